# SPDX-License-Identifier: Apache-2.0
"""A page of HTML as a test reads it, and a text that would break one."""

from __future__ import annotations

from html.parser import HTMLParser

HOSTILE = "x\"><script>alert('1')</script> $\\frac$ --> & ]]> {{ 7*7 }}\x00\ud800"
VOID = {"meta", "wbr", "br"}


class Page(HTMLParser):
    """Elements with their attributes, text by class, and the tables as text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, dict[str, list[str]]] = {}  # caption -> name of the row -> cells
        self.lost: list[str] = []
        self.svgs: list[list[str]] = []  # the texts of each
        self.open: list[str] = []
        self.text = ""
        self._row: list[str] = []
        self._caption = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.elements.append((tag, given))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "svg":
            self.svgs.append([])
        if tag in ("td", "th"):
            self._row.append("")
        if tag == "tr":
            self._row = []
        if tag == "caption":
            self._caption = ""
        if given.get("class") == "spread":
            self._row[-1] += " "
        if given.get("class") == "lost":
            self.lost.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "caption":
            assert self._caption not in self.tables
            self.tables[self._caption] = {}
        if tag == "tr":
            name = self._row[0]
            assert name not in self.tables[self._caption]
            self.tables[self._caption][name] = self._row[1:]

    def handle_data(self, data: str) -> None:
        data = data.replace("\u2013", "-")  # of spreads
        if self.open and self.open[-1] == "text":
            self.svgs[-1].append(data)
        elif "caption" in self.open:
            self._caption += data
        elif {"td", "th"} & set(self.open):
            self._row[-1] += data
        if not {"style", "script"} & set(self.open):
            self.text += data
