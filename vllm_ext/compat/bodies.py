# SPDX-License-Identifier: Apache-2.0
"""The bodies of vLLM's functions that we override, call or imitate: whether they are those that we have read.

A function that keeps its signature may still change what it does. `bodies.json` has the digest of each body in each
vLLM that was read; ``scripts/new_vllm.py`` makes its entries, and shows the difference.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ext.compat.hooks import Hook
from vllm_ext.compat.hooks_v2 import TABLES
from vllm_ext.compat.source_scan import Files

_SAMPLE = "vllm.v1.worker.gpu.sample"
_BENCH = "vllm.benchmarks"
# What ours do in the same way, and no table has: nothing of ours calls them.
IMITATED = tuple(
    Hook(module, name, None, why)
    for module, name, why in (
        (f"{_SAMPLE}.sampler", "Sampler.sample", "the order of what a row goes through"),
        (f"{_SAMPLE}.sampler", "Sampler._sample_random", "the draw of a row"),
        (f"{_SAMPLE}.gumbel", "_gumbel_sample_kernel", "the noise of a draw"),
        (f"{_SAMPLE}.gumbel", "gumbel_noised_argmax", "the noise of a draw"),
        (f"{_SAMPLE}.gumbel", "_temperature_kernel", "temperatures"),
        (f"{_SAMPLE}.penalties", "_penalties_kernel", "penalties along the path of a tree's row"),
        (f"{_SAMPLE}.bad_words", "_bad_words_kernel", "bad words along the path of a tree's row"),
        (f"{_SAMPLE}.logit_bias", "_bias_kernel", "min_tokens by the depth of a row"),
        (f"{_SAMPLE}.thinking_budget", "_thinking_budget_kernel", "which rows draw by the path alone"),
        ("vllm.v1.worker.gpu.input_batch", "_combine_sampled_and_draft_tokens_kernel", "rows of drafts"),
        ("vllm.v1.worker.gpu.input_batch", "_post_update_kernel", "what a step leaves behind"),
        ("vllm.v1.worker.gpu.mm.rope", "_prepare_rope_positions_kernel", "M-RoPE's positions of a chain"),
        (
            "vllm.v1.attention.backends.utils",
            "make_local_attention_virtual_batches",
            "which tokens a chunk has",
        ),
        ("vllm.v1.sample.sampler", "Sampler.apply_logits_processors", "the order of what a row goes through"),
        (f"{_BENCH}.serve", "calculate_metrics", "figures of bench over HTTP"),
        (f"{_BENCH}.lib.endpoint_request_func", "async_request_openai_chat_completions", "times of bench"),
    )
)
_ALL = {**TABLES, "imitated": IMITATED}
_WITHOUT = {"annotation", "returns", "ctx", "kind", "type_comment", "type_params"}


class Body(NamedTuple):
    """One function of a vLLM, beside what we have read."""

    table: str
    name: str  # with its module
    found: str  # digest
    read_in: tuple[str, ...]  # versions that have the same body; (): nobody has read it


def bodies(files: Files) -> Iterator[Body]:
    """Of all functions in our tables that ``files`` has."""
    for table, name, node in functions(files):
        found = digest(node)
        versions = tuple(version for version, known in read().get(name, {}).items() if known == found)
        yield Body(table, name, found, versions)


def functions(files: Files) -> Iterator[tuple[str, str, ast.AST]]:
    """Table, name with its module, and what is written there; each function once."""
    seen = set()
    for table, hooks in _ALL.items():
        for hook in hooks:
            name, node = f"{hook.module}.{hook.name}", files.function(hook)
            if node is not None and name not in seen:
                seen.add(name)
                yield table, name, node


@cache
def read() -> dict[str, dict[str, str]]:
    """Digests of the bodies that were read: by function and version."""
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return found


def digest(body: ast.AST) -> str:
    """12 hexadecimal digits of what a function does: comments, docstrings, layout and annotations do not count."""
    return hashlib.sha256(repr(_plain(body)).encode()).hexdigest()[:12]


def _plain(of: Any) -> Any:
    """The same in all Pythons, unlike `ast.dump`: a field that is empty is left out."""
    if isinstance(of, list):
        return [_plain(each) for each in of]
    if not isinstance(of, ast.AST):
        return of
    fields = dict(ast.iter_fields(of))
    if isinstance(of, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(of) is not None:
        fields["body"] = fields["body"][1:]
    kept = {name: _plain(value) for name, value in fields.items() if name not in _WITHOUT}
    return (type(of).__name__, *((name, value) for name, value in kept.items() if value not in (None, [])))
