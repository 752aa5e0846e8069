# SPDX-License-Identifier: Apache-2.0
"""Request parameters and configurations that are all bad, made up by `fuzz_options.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ext.codecs.registry import CODECS, load_codec
from vllm_ext.config.allowed import nearest
from vllm_ext.config.rules import ENGINE_KEYS
from vllm_ext.proposers.registry import METHODS, load_method
from vllm_ext.samplers.registry import RULES, load_rule

LETTERS = "abcdefghijklmnopqrstuvwxyz_"
MOST = 2**62  # vLLM refuses integers of more bits in extra_args by itself
DEEP = "[" * 50_000
# A value of each JSON type. Booleans are numbers to vLLM's request types.
JUNK: dict[str, list[Any]] = {
    "null": [None],
    "string": ["nope", "", "\x00", "\ud800", "x" * 5_000, "3"],
    "integer": [3, -1, MOST],
    "number": [2.5, -1e308, float("nan"), float("inf")],
    "array": [[], [[]], ["x"], [1.5, "x"], [1] * 5_000],
    "object": [{}, {"a": 1}, {"": []}],
}


class Bad(NamedTuple):
    """What must be refused, with a message that names the field."""

    field: str
    kind: str
    content: dict[str, Any]  # a request's body; or of EngineArgs


def wrong(schema: Mapping[str, Any], chance: random.Random) -> Any:
    """A value that a field's JSON schema does not allow."""
    choices = schema.get("anyOf", [schema])
    kinds = {choice.get("type", "string") for choice in choices}
    kinds |= {"integer"} if kinds & {"number", "boolean"} else set()
    found = [value for kind, values in JUNK.items() if kind not in kinds for value in values]
    if "boolean" in kinds:
        found += [2, -1, 0.5]
    for choice in choices:
        if (low := choice.get("minimum", choice.get("exclusiveMinimum"))) is not None:
            found += [low - 1, -MOST]
            found += [low] if "exclusiveMinimum" in choice else []
        if (high := choice.get("maximum")) is not None:
            found += [high + 1, MOST]
        if choice.get("type") == "array":
            items = choice.get("items", {})
            found += [[wrong(items, chance)]] if items.get("type") in ("integer", "number", "string") else []
            found += [[]] if choice.get("minItems") else []
            found += [[1] * (choice["maxItems"] + 1)] if choice.get("maxItems") else []
        if "enum" in choice or "const" in choice:
            found += ["nope", ""]
        if choice.get("minLength"):
            found += [""]
        if 0 < choice.get("maxLength", 0) <= 200_000:
            found += ["x" * (choice["maxLength"] + 1)]
    return chance.choice(found)


def slip(name: str, chance: random.Random) -> str:
    """The name with a letter more, less, another, or two that have changed places."""
    at = chance.randrange(len(name) - 1)  # of names with two letters or more
    return chance.choice(
        [
            name[:at] + chance.choice(LETTERS) + name[at:],
            name[:at] + name[at + 1 :],
            name[:at] + chance.choice(LETTERS) + name[at + 1 :],
            name[:at] + name[at + 1] + name[at] + name[at + 2 :],
            name.replace("_", "-", 1) if "_" in name else name.capitalize(),
        ]
    )


def requests(chance: random.Random) -> Iterator[Bad]:
    """Without end; of a server with all rules, a trie "pets" and passages of 100 characters."""
    schemas = {
        key: schema
        for name in RULES
        for key, schema in load_rule(name).Params.model_json_schema()["properties"].items()
    }
    while True:
        kind = chance.choice(["value", "value", "value", "key", "special"])
        if kind == "value":
            key = chance.choice(list(schemas))
            yield Bad(key, kind, {"vllm_xargs": {key: wrong(schemas[key], chance)}})
        elif kind == "key":
            key = slip(chance.choice(list(schemas)), chance)
            if key not in schemas and nearest(key, tuple(schemas)):
                yield Bad(key, kind, {"vllm_xargs": {key: chance.choice(["x", 1, 0.5, [1]])}})
        else:
            field, others = chance.choice(_special_requests(chance))
            yield Bad(field, kind, {"vllm_xargs": others} if "vllm_xargs" not in others else others)


def _special_requests(chance: random.Random) -> list[tuple[str, dict[str, Any]]]:
    rule = chance.choice(["asap", "awrs"])
    many = chance.choice([10**6, 10**5])
    sources: list[tuple[str, dict[str, Any]]] = [
        (f"{rule}_{kind}", {f"{rule}_{kind}": source})
        for kind, source in (
            ("json", "{"),
            ("json", ""),
            ("json", DEEP),
            ("json", '{"type": "nope"}'),
            ("regex", "("),
            ("regex", "[a"),
            ("regex", "(" * 2_000),
            ("grammar", ""),
            ("grammar", "root ::="),
            ("grammar", "root ::= nope"),
        )
    ]
    return [
        *sources,
        ("extra_args", {"trie": 10**30}),
        *(
            (key, {key: "a \ud800 cat"})
            for key in (
                "trie",
                "extract",
                "monitor",
                "cad_context",
                "cad_negative",
                "lol_instruction",
                "asap_regex",
                "awrs_json",
            )
        ),
        ("monitor_context", {"monitor": "python", "monitor_context": "a \ud800 cat"}),
        ("trie", {"trie": "nope"}),
        ("trie", {"trie": "x" * many}),
        ("monitor", {"monitor": chance.choice(["nope", "x" * many])}),
        ("awrs_check", {"awrs_check": chance.choice(["nope", "x" * many])}),
        ("trie", {"vllm_xargs": {"trie": "x" * many}, "ignore_eos": True}),
        ("cad_context", {"cad_context": "x" * many}),
        ("cad_negative", {"cad_negative": "x" * many}),
        ("cad_negative", {"cad_negative": "word " * 10_000}),
        ("cad_context", {"cad_context": " ", "cad_negative": "x"}),
        ("lol_instruction", {"lol_instruction": "x" * (many - 1)}),
        ("extract", {"extract": "x" * many}),
        ("cad_context", {"cad_context": f"not in the prompt {chance.random()}"}),
        ("lol_instruction", {"lol_instruction": "not in the prompt"}),
        ("extract", {"trie": "pets", "extract": "a cat"}),
        ("asap", {"asap_regex": "a", "rpg": 1}),
        ("awrs", {"asap_regex": "a", "awrs_regex": "a"}),
        ("asap_regex", {"asap_json": "{}", "asap_regex": "a"}),
        ("trie", {"vllm_xargs": {"trie": "pets"}, "ignore_eos": True}),
        ("trie", {"vllm_xargs": {"trie": "pets"}, "min_tokens": 2}),
        ("extract", {"vllm_xargs": {"extract": "a cat"}, "bad_words": ["cat"]}),
        ("asap", {"vllm_xargs": {"asap_regex": "a"}, "temperature": 0}),
        ("trie", {"vllm_xargs": {"trie": "pets"}, "response_format": {"type": "json_object"}}),
        (key := chance.choice(ENGINE_KEYS), {key: chance.choice(["x", 1])}),
    ]


def rules_of(folder: Path) -> dict[str, Any]:
    """The server's, all that need no file but a trie. They go together only where a request does not mix them."""
    return {
        **{name: {} for name in ("rpg", "cad", "dola", "momentum", "adadec", "asap", "awrs", "monitor")},
        **{name: {"model": "self"} for name in ("entropy_adaptive", "contrastive", "lol", "anchored")},
        "extract": {"max_passage": 100},
        "trie": {"files": {"pets": str(folder / "pets.trie")}},
    }


REQUIRED: dict[str, Any] = {
    "model": "self",
    "datastore": "/no/store",
    "file": "/no/file",
    "files": {"a": "/no"},
}


def configs(chance: random.Random, folder: Path) -> Iterator[Bad]:
    """Without end; `speculative_config` and `additional_config` of EngineArgs."""
    while True:
        kind = chance.choice(["method", "method", "rule", "kv", "key", "special"])
        if kind == "special":
            yield chance.choice(_special_configs(chance, folder))
            continue
        where = chance.choice(["method", "rule"]) if kind == "key" else kind
        name = chance.choice(list({"method": METHODS, "rule": RULES, "kv": CODECS}[where]))
        load: Any = {"method": load_method, "rule": load_rule, "kv": load_codec}[where]
        schemas = load(name).Options.model_json_schema()["properties"]
        required = {each: REQUIRED[each] for each in schemas if each in REQUIRED}
        if not schemas:
            continue
        field = chance.choice([each for each in schemas if len(each) > 1])
        if kind == "key":
            field = slip(field, chance)
            if field.replace("-", "_") in schemas:
                continue
            given = {**required, field: 1}
        else:
            given = {**required, field: wrong(schemas[field], chance)}
        if where == "method":
            content = {"speculative_config": {"method": name, **given}}
        elif where == "rule":
            content = {"additional_config": {"vllm_ext": {"rules": {name: given}}}}
        else:
            content = {"additional_config": {"vllm_ext": {"kv": {"method": name, **given}}}}
        yield Bad(field.replace("-", "_") if where == "method" else field, kind, content)


def _special_configs(chance: random.Random, folder: Path) -> list[Bad]:
    path = chance.choice(
        ["~nouser/x", "a\0b", str(folder / "pipe"), str(folder / "junk"), str(folder / "no" / "x")]
    )
    junk: Any = chance.choice([None, [], 3, "x", True, [{}]])
    method, rule, other = chance.choice(list(METHODS)), chance.choice(list(RULES)), slip("vllm_ext", chance)
    ours: dict[str, Any] = {
        "vllm_ext": junk,
        "rules": {"rules": junk},
        "kv": {"kv": junk},
        "structured_outputs": {"structured_outputs": junk},
        "files": {"rules": {"trie": {"files": {"a": path}}}},
        "file": {"rules": {chance.choice(["caad", "svdecode"]): {"file": path}}},
        "strict": {"structured_outputs": {"strict": junk if junk is not True else 1}},
        rule: {"rules": {rule: chance.choice([None, [], 3, "x"])}},
        (wrong_rule := slip(rule, chance)): {"rules": {wrong_rule: {}}},
        "speculation": {"speculation": {}},
    }
    spec: dict[str, Any] = {
        "method": {"method": chance.choice([slip(method, chance), ["stand", "aded"], 3, "x" * 10_000])},
        "datastore": {"method": "rest", "datastore": path},
        "heads": {"method": "layerskip", "heads": path},
        "drafters": {
            "method": "hybrid",
            "drafters": chance.choice([["stand"] * 2, [], ["x"], [{}], "stand", [3]]),
        },
        "max_order": {"method": "stand", "max_order": 2, "max-order": 2},
        "disable_by_batch_size": {"method": method, "disable_by_batch_size": 4},
        "prompt_lookup_max": {"method": method, "prompt_lookup_max": 4},
        "speculative_config": chance.choice([["stand"], "stand", 3]),
    }
    return [
        *(Bad(field, "special", {"speculative_config": given}) for field, given in spec.items()),
        *(
            Bad(field, "special", {"additional_config": {"vllm_ext": junk if field == "vllm_ext" else given}})
            for field, given in ours.items()
        ),
        *([] if other == "vllm_ext" else [Bad(other, "special", {"additional_config": {other: {}}})]),
    ]
