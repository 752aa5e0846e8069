# SPDX-License-Identifier: Apache-2.0
"""How many nodes of each request's tree a step of the V2 runner verifies, where the budget says how many of all.

vLLM's scheduler gives each request as many drafts as the largest tree has, before there are trees, and says with the
step how many of them a request gets on average (`StepExtras.level`). The worker cuts before it makes the step's
batch: the likeliest nodes of all requests stay, as far as their chances are known on the host. What is cut counts as
rejected: the scheduler never sees which drafts were verified. So nothing of a request's output depends on it.

A step whose requests have different query lengths has no captured graph, unless vLLM has made graphs of any lengths
(`TreeSpeculator.varlen`). Where a step would lose its graph, or need a larger one, all trees are cut to one size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.config.compilation import CUDAGraphMode

from vllm_ext.config import runners
from vllm_ext.config.speculative import Settings
from vllm_ext.engine import step_extras
from vllm_ext.proposers.level_budget import shared_out
from vllm_ext.proposers.tree import Float32

NO_CHANCES: Float32 = np.empty(0, np.float32)


def problem(vllm_config: Any, settings: Settings) -> str | None:
    """Why budget='shared' is 'goodput' with this engine; None if it is not, or was not asked for."""
    if settings.options.budget != "shared":
        return None
    if runners.is_on_device(settings):
        return f"{settings.method} grows its trees on the device, and the host does not know their chances"
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        return "ranks must have equally many rows, and each has drafts of its own"
    return None


def are_shared(vllm_config: Any, settings: Settings) -> bool:
    """Whether steps have nodes of some requests more than of others."""
    return settings.options.budget == "shared" and problem(vllm_config, settings) is None


def cut(output: Any, chances: Mapping[str, Float32], graphs: Any, alike: bool = False) -> Any:
    """A step with as many drafts as it is to verify.

    Args:
        output: vLLM's ``SchedulerOutput``, left as it is: the scheduler may hold the same object.
        chances: by request, of the nodes of its tree; who has no tree is not in it.
        graphs: vLLM's ``CudaGraphManager``; None where there are none.
        alike: all requests are to have equally many, where the scheduler has given them so.
    """
    level, drafts = step_extras.of(output).level, output.scheduled_spec_decode_tokens
    if level is None or not drafts:
        return output
    even = {name: min(level, len(tokens)) for name, tokens in drafts.items()}
    if alike:
        return _with_drafts(output, even)
    known = [chances.get(name, NO_CHANCES)[: len(tokens)] for name, tokens in drafts.items()]
    by_chance = dict(zip(drafts, shared_out(known, sum(even.values())), strict=True))
    return _with_drafts(output, by_chance if _may_differ(output, by_chance, even, graphs) else even)


def _may_differ(output: Any, sizes: Mapping[str, int], even: Mapping[str, int], graphs: Any) -> bool:
    """Whether a step with such drafts has a graph no larger than one with as many of each, or that has none either."""
    lengths, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    if graphs is None or any(count != 1 + len(drafts.get(name, ())) for name, count in lengths.items()):
        return True  # with prompts in it: no step of decoding, which alone have such graphs
    alike, shared = (_graph(graphs, [1 + nodes.get(name, 0) for name in lengths]) for nodes in (even, sizes))
    if alike.cg_mode != CUDAGraphMode.FULL:
        return True
    fits: bool = shared.cg_mode == CUDAGraphMode.FULL and shared.num_tokens <= alike.num_tokens
    return fits


def _graph(graphs: Any, lengths: list[int]) -> Any:
    """What vLLM will run a step of decoding with, by the rows of each request."""
    uniform = lengths[0] if min(lengths) == max(lengths) else None
    return graphs.dispatch(len(lengths), sum(lengths), uniform, 0, max(lengths))


def _with_drafts(output: Any, sizes: Mapping[str, int]) -> Any:
    """The step, of each request's drafts so many."""
    lengths = dict(output.num_scheduled_tokens)
    for name, tokens in output.scheduled_spec_decode_tokens.items():
        lengths[name] -= len(tokens) - sizes[name]
    made = copy.copy(output)  # with what we have put on it
    made.num_scheduled_tokens = lengths
    made.total_num_scheduled_tokens = sum(lengths.values())
    made.scheduled_spec_decode_tokens = {
        name: tokens[: sizes[name]]
        for name, tokens in output.scheduled_spec_decode_tokens.items()
        if sizes[name]
    }
    return made
