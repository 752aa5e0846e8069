# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext methods``, ``vllm-ext rules`` and ``vllm-ext kv methods``: what there is, a line each, and options."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vllm_ext.cli.output.console import errors_of, say, wrapped

if TYPE_CHECKING:
    from pydantic import BaseModel

Row = tuple[str, str, str, str]  # name, default, allowed, meaning
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show the options of this one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
PLACEHOLDERS = {"object": {"NAME": "..."}, "array": ["..."]}  # of required options, by what is allowed


@dataclass(frozen=True)
class Entry:
    """A method or a rule, with groups of its options."""

    name: str
    summary: str
    paper: str
    options: dict[str, list[Row]]  # by what heads them


def methods(name: Name = None, as_json: AsJson = False) -> None:
    """List the methods for --speculative-config; with NAME, the options of one."""
    from vllm_ext.config.request_options import RequestOptions
    from vllm_ext.proposers.base import MethodOptions
    from vllm_ext.proposers.registry import METHODS, load_method

    common = _rows(MethodOptions)

    def entry(each: str) -> Entry:
        found = load_method(each)
        options = _own_and_common(found.Options, common, "methods")
        options["parameters of requests (vllm_xargs), of all methods"] = _rows(RequestOptions)
        return Entry(each, found.summary, found.paper, options)

    def serve(each: str, options: dict[str, Any]) -> str:
        return f"--speculative-config '{json.dumps({'method': each, **options})}'"

    _print("methods", METHODS, entry, name, as_json, serve)


def rules(name: Name = None, as_json: AsJson = False) -> None:
    """List the sampling rules for --additional-config; with NAME, the options of the server and of requests."""
    from vllm_ext.samplers.registry import RULES, load_rule

    def entry(each: str) -> Entry:
        found = load_rule(each)
        options = {
            "options of the server": _rows(found.Options),
            "parameters of requests (vllm_xargs)": _rows(found.Params),
        }
        return Entry(each, found.summary, found.paper, options)

    def serve(each: str, options: dict[str, Any]) -> str:
        return f"--additional-config '{json.dumps({'vllm_ext': {'rules': {each: options}}})}'"

    _print("rules", RULES, entry, name, as_json, serve)


def kv_methods(name: Name = None, as_json: AsJson = False) -> None:
    """List the methods for the KV cache, for --additional-config; with NAME, the options of one."""
    from vllm_ext.codecs.base import CodecOptions
    from vllm_ext.codecs.registry import CODECS, load_codec

    common = _rows(CodecOptions)

    def entry(each: str) -> Entry:
        found = load_codec(each)
        return Entry(each, found.summary, found.paper, _own_and_common(found.Options, common, "KV methods"))

    def serve(each: str, options: dict[str, Any]) -> str:
        return f"--additional-config '{json.dumps({'vllm_ext': {'kv': {'method': each, **options}}})}'"

    _print("kv methods", CODECS, entry, name, as_json, serve)


def _rows(options: type[BaseModel]) -> list[Row]:
    from vllm_ext.config.speculative import option_rows

    return option_rows(options)


def _own_and_common(options: type[BaseModel], common: list[Row], of: str) -> dict[str, list[Row]]:
    """Options of one, and those that it has as all others do."""
    rows = _rows(options)
    return {
        "options": [row for row in rows if row not in common],
        f"options that all {of} have": [row for row in rows if row in common],
    }


def _print(
    command: str,
    known: Iterable[str],
    entry_of: Callable[[str], Entry],
    name: str | None,
    as_json: bool,
    serve: Callable[[str, dict[str, Any]], str],
) -> None:
    console = Console()
    names = list(known) if name is None else [name]
    with errors_of(Console(stderr=True)):
        entries = [entry_of(each) for each in names]
    if as_json:
        say(console, json.dumps([_as_json(entry) for entry in entries], indent=2))
    elif name is None:
        width = max(map(len, names)) + 2
        for entry in entries:
            wrapped(console, f"{entry.name:{width}}", entry.summary)
        say(console, f"\nOptions of one, and how it is served: vllm-ext {command} NAME")
    else:
        _print_options(console, entries[0], serve)


def _print_options(console: Console, entry: Entry, serve: Callable[[str, dict[str, Any]], str]) -> None:
    wrapped(console, f"{entry.name}: ", entry.summary)
    say(console, f"paper: {entry.paper}")
    required: dict[str, Any] = {}
    for heading, rows in entry.options.items():
        say(console, f"\n{heading}:" if rows else f"\n{heading}: none")
        for option, default, allowed, meaning in rows:
            value = default if default == "required" else f"default {default}"
            wrapped(console, f"  {option}  ", f"{value}; {allowed}")
            if meaning:
                wrapped(console, "      ", meaning)
            if default == "required" and rows is next(iter(entry.options.values())):
                required[option] = PLACEHOLDERS.get(allowed, "...")
    say(console, f"\nserve with: {serve(entry.name, required)}")


def _as_json(entry: Entry) -> dict[str, Any]:
    keys = ("name", "default", "allowed", "meaning")
    return {
        "name": entry.name,
        "summary": entry.summary,
        "paper": entry.paper,
        **{
            heading: [dict(zip(keys, row, strict=True)) for row in rows]
            for heading, rows in entry.options.items()
        },
    }
