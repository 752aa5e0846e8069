# SPDX-License-Identifier: Apache-2.0
"""Saved figures, read back: the JSON of ``vllm-ext bench`` and of scripts/bench_load.py, old files too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

# What must be equal for figures of two files to stand in one plot.
CONDITIONS = (
    "model",
    "dtype",
    "max_tokens",
    "temperature",
    "rounds",
    "limit",
    "workload",
    "prompt_files",
    "vllm",
    "torch",
    "vllm_ext",
    "platform",
    "cpu_model",
    "cores",
)
# Characters that no XML, and so no SVG, can hold; lone surrogates cannot be written at all.
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
WAY_OUT = "give a file written by `vllm-ext bench --json` or scripts/bench_load.py."

Finite = Annotated[float, Field(allow_inf_nan=False)]
Figure = Finite | None  # None: nothing to divide by


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)  # fields that a later version adds are let through


class CategoryFigures(_Model):
    """One category's figures of one run. Files before 0.1.0's release have no rounds here."""

    prompts: int
    speedup_vs_plain: Figure = None
    speedup_vs_plain_rounds: tuple[Figure, ...] = ()
    tokens_per_step: Figure = None
    tokens_per_step_rounds: tuple[Figure, ...] = ()


class Run(_Model):
    """One method at one batch size."""

    label: str
    batch_size: Annotated[int, Field(ge=1)]
    tokens_per_s: Figure = Field(None, validation_alias="decode_tokens_per_s")  # of all requests together
    tokens_per_s_rounds: tuple[Figure, ...] = Field((), validation_alias="decode_tokens_per_s_rounds")
    speedup_vs_plain: Figure = None
    speedup_vs_plain_rounds: tuple[Figure, ...] = ()
    tokens_per_step: Figure = None
    tokens_per_step_rounds: tuple[Figure, ...] = ()
    draft_tokens_per_step: Figure = None
    draft_tokens_per_step_rounds: tuple[Figure, ...] = ()
    draft_time_share: Figure = None
    prompts: int | None = None
    identical: int | None = None  # None: answers were not compared
    tie_divergences: int | None = None
    wrong_divergences: int | None = None
    wrong: tuple[str, ...] = ()
    category: dict[str, CategoryFigures] = {}


@dataclass
class Comparison:
    """Runs that may stand in one plot: made under the same conditions, each batch size in one file."""

    load: bool  # whole requests timed, prefill included, as scripts/bench_load.py does; else decoding alone
    conditions: dict[str, Any]
    files: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # name, environment
    runs: list[Run] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def batch_sizes(self) -> list[int]:
        """Ascending."""
        return sorted({run.batch_size for run in self.runs})


def comparisons(documents: Sequence[tuple[str, Any]]) -> list[Comparison]:
    """Read documents, each a name and what its JSON holds, and join those that may be joined.

    Raises:
        ValueError: a document that is not of the bench; the message names it and the field.
    """
    found: list[Comparison] = []
    for raw_name, raw in documents:
        name, document = printable(raw_name), printable(raw)
        if not isinstance(document, dict) or not ({"runs", "rows"} & set(document)):
            raise ValueError(f"{name}: holds neither `runs` nor `rows`; {WAY_OUT}")
        load = "rows" in document
        environment = document.get("options" if load else "environment")
        if not isinstance(environment, dict):
            raise ValueError(f"{name}: does not say its environment; {WAY_OUT}")
        try:
            if load:
                environment = {**environment, **document.get("machine", {})}
            entries = list(_load_runs(document["rows"])) if load else document["runs"]
            runs = TypeAdapter(list[Run]).validate_python(entries)
            notices = TypeAdapter(list[str]).validate_python(document.get("notices", []))
        except (ValidationError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{name}: {reason(error)}; {WAY_OUT}") from None
        if not runs:
            raise ValueError(f"{name}: holds no run; {WAY_OUT}")
        conditions = {key: environment.get(key) for key in CONDITIONS}
        sizes = {run.batch_size for run in runs}
        for comparison in found:
            same = (comparison.load, comparison.conditions) == (load, conditions)
            if same and not sizes & set(comparison.batch_sizes):
                break
        else:
            comparison = Comparison(load, conditions)
            found.append(comparison)
        comparison.files.append((name, environment))
        comparison.runs += runs
        comparison.notices += notices
    return found


def _load_runs(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of scripts/bench_load.py as runs: plain, the goodput budget, and budgets that are fixed."""
    for row in rows:
        size, plain_rounds = row["batch_size"], row.get("plain_tokens_per_s_rounds", [])
        yield {
            "label": "plain",
            "batch_size": size,
            "decode_tokens_per_s": row["plain_tokens_per_s"],
            "decode_tokens_per_s_rounds": plain_rounds,
            "speedup_vs_plain": 1.0,
        }
        for kind, entry in row.items():
            if isinstance(entry, dict):
                yield {
                    "label": f"token_recycling, budget {kind}",
                    "batch_size": size,
                    "decode_tokens_per_s": entry.get("tokens_per_s"),
                    "decode_tokens_per_s_rounds": entry.get("tokens_per_s_rounds", []),
                    "speedup_vs_plain": entry["speedup"],
                    "speedup_vs_plain_rounds": entry["rounds"],
                    "draft_tokens_per_step": entry["nodes_per_step"],
                }


def printable(value: Any) -> Any:
    """Parsed JSON without what no page can hold."""
    if isinstance(value, str):
        return UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value


def reason(error: Exception) -> str:
    """What was wrong with a document, with the field's name."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    return f"{type(error).__name__}: {error}"
