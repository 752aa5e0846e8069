#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/options.md: every option of every method, rule and KV method, as the registries have them.

    python scripts/options_page.py > docs/options.md

`tests/test_docs.py` fails where the page is another.
"""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from vllm_ext.cli.main import app

HEAD = """# Options

Made by `python scripts/options_page.py` of what `vllm-ext methods`, `vllm-ext rules` and `vllm-ext kv methods` print.
A wrong name, type or value is refused at start-up, and of a request with HTTP 400; the message says what is allowed.
"""
PARTS = (
    (["methods"], "Methods", "In `--speculative-config`, beside `method`. [Which one](methods.md)."),
    (
        ["rules"],
        "Sampling rules",
        'In `--additional-config`: `{"vllm_ext": {"rules": {NAME: {OPTION: VALUE}}}}`. Requests give parameters in '
        "`vllm_xargs`. [What rules do](rules.md), [rules that steer](steering.md).",
    ),
    (
        ["kv", "methods"],
        "The KV cache",
        'In `--additional-config`: `{"vllm_ext": {"kv": {"method": NAME, OPTION: VALUE}}}`. [What they cost](kv.md).',
    ),
)
COMMON, OF_REQUESTS = "options that all", "parameters of requests (vllm_xargs), of all methods"

OF_ONE_REQUEST = "tuning.md#of-one-request"


def table(rows: list[dict[str, str]]) -> str:
    """Markdown of options."""
    lines = ["| option | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = [f"`{row['name']}`", f"`{row['default']}`", row["allowed"], row["meaning"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def part(entries: list[dict[str, Any]]) -> list[str]:
    """Markdown of one command's entries; what all have comes once."""
    found = []
    shared = [rows for heading, rows in entries[0].items() if heading.startswith(COMMON)]
    if shared:
        found.append(f"All of them have:\n\n{table(max(shared, key=len))}\n")
    if rows := entries[0].get(OF_REQUESTS):
        what = f"[what they do]({OF_ONE_REQUEST})"
        found.append(f"Parameters of requests to any of them, in `vllm_xargs` ({what}):\n\n{table(rows)}\n")
    for entry in entries:
        found.append(f"### {entry['name']}\n\n{entry['summary']} ({entry['paper']})\n")
        for heading, rows in entry.items():
            if isinstance(rows, list) and not heading.startswith((COMMON, OF_REQUESTS)):
                if heading != "options":
                    found.append(f"{heading[0].upper()}{heading[1:]}{':' if rows else ': none.'}\n")
                elif not rows:
                    found.append("No options of its own.\n")
                if rows:
                    found.append(table(rows) + "\n")
    return found


def page() -> str:
    """The page."""
    parts = [HEAD]
    for command, title, where in PARTS:
        done = CliRunner().invoke(app, [*command, "--json"])
        if done.exit_code:
            raise RuntimeError(done.output)
        parts += [f"## {title}\n\n{where}\n", *part(json.loads(done.output))]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
