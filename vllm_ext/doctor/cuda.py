# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-ext doctor`` says on CUDA: the GPU, the attention backend, trees or chains and why, captured graphs.

`facts` asks torch and vLLM; the rest takes what they say.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vllm_ext.doctor.check import Check
from vllm_ext.proposers.level_budget import DEFAULT_NODES, LevelBudget, levels_of

TREE_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
HEAD_SIZE = 128  # of the layer that vLLM is asked about; most models of 3B parameters and more have it
# Rows of the largest graph that vLLM captures, where nobody says how many.
MOST_ROWS = 512
OLDEST = (8, 0)  # compute capability whose tensor cores multiply bfloat16


class Gpu(NamedTuple):
    """One that is visible."""

    name: str
    capability: tuple[int, int]
    gib: float  # of memory
    multiprocessors: int


class Facts(NamedTuple):
    """Of one machine."""

    gpus: Sequence[Gpu]
    backend: str | None  # what vLLM chooses for plain decoder layers; None: nothing
    reasons: Mapping[str, str]  # by backend that vLLM does not take, why
    runner: Literal["V1", "V2"]
    batch_invariant: bool


def gpus_of(cuda: Any) -> list[Gpu]:
    """What ``torch.cuda`` has."""
    found = []
    for index in range(cuda.device_count()):
        properties = cuda.get_device_properties(index)
        found.append(
            Gpu(
                properties.name,
                (properties.major, properties.minor),
                properties.total_memory / 2**30,
                properties.multi_processor_count,
            )
        )
    return found


def backend_of(platform: Any, capability: Any, selector_config: Any) -> tuple[str | None, dict[str, str]]:
    """The attention backend that a platform of vLLM's chooses by itself, and why not those it likes better.

    Args:
        platform: with ``get_valid_backends`` of vLLM's CUDA platform.
        capability: vLLM's ``DeviceCapability``.
        selector_config: vLLM's ``AttentionSelectorConfig``.
    """
    valid, invalid = platform.get_valid_backends(capability, selector_config)
    if not valid:
        best, place = None, len(invalid)
    else:
        chosen = min(valid, key=lambda each: each.priority)
        best, place = chosen.backend.name, chosen.priority
    reasons = {
        backend.name: "; ".join(why)[:200] for backend, (priority, why) in invalid.items() if priority < place
    }
    return best, reasons


def facts(runner: Literal["V1", "V2"]) -> Facts:
    """Of this machine; its platform is CUDA."""
    import torch
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    invariant = bool(envs.VLLM_BATCH_INVARIANT)
    asked = AttentionSelectorConfig(HEAD_SIZE, torch.bfloat16, "auto", None, use_batch_invariant=invariant)
    backend, reasons = backend_of(current_platform, current_platform.get_device_capability(), asked)
    return Facts(gpus_of(torch.cuda), backend, reasons, runner, invariant)


def checks(found: Facts, nodes: int = DEFAULT_NODES, most_rows: int = MOST_ROWS) -> Iterator[Check]:
    """The lines of a report.

    Args:
        found: of the machine.
        nodes: of a tree, at most.
        most_rows: of the largest graph that is captured.
    """
    yield from _gpus(found.gpus)
    yield _attention(found)
    yield _trees(found)
    yield _graphs(found, nodes, most_rows)


def _gpus(gpus: Sequence[Gpu]) -> Iterator[Check]:

    if not gpus:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f"CUDA_VISIBLE_DEVICES={shown[:200]!r}" if shown is not None else "nvidia-smi"
        yield Check("fail", "GPU", "none is visible to torch", f"look at {hint} and the driver")
    for gpu, count in Counter(gpus).items():
        capability = ".".join(map(str, gpu.capability))
        line = f"{gpu.name}, compute capability {capability}, {gpu.gib:.0f} GiB, {gpu.multiprocessors} multiprocessors"
        line = f"{count} x {line}" if count > 1 else line
        old = gpu.capability < OLDEST
        way_out = "pass --dtype float16: below 8.0 there is no bfloat16 in hardware" if old else ""
        yield Check("warn" if old else "ok", "GPU", line, way_out, short=line)


def _attention(found: Facts) -> Check:

    reasons = "; ".join(f"not {name}: {why}" for name, why in found.reasons.items())
    behind = f" ({reasons})" if reasons else ""
    if found.backend is None:
        return Check("fail", "attention", f"vLLM finds no backend{behind}", "report this to vLLM")
    line = f"{found.backend}, for heads of {HEAD_SIZE} elements in bfloat16"
    return Check("ok", "attention", line + behind, short=line)


def _trees(found: Facts) -> Check:

    if found.batch_invariant:
        why = "VLLM_BATCH_INVARIANT=1, and how trees' keys are shared out depends on the batch"
        return Check("warn", "trees", f"chains: {why}", "unset VLLM_BATCH_INVARIANT for trees")
    if found.backend not in TREE_BACKENDS:
        return Check(
            "warn",
            "trees",
            f"chains: {found.backend} has no tree attention; output is the same",
            f"pass --attention-backend {' or '.join(TREE_BACKENDS)} for trees",
        )
    line = f"trees, with {found.backend}"
    return Check("ok", "trees", f"{line}, on the {found.runner} runner", short=line)


def _graphs(found: Facts, nodes: int, most_rows: int) -> Check:

    what = "CUDA graphs"
    if found.runner == "V1" or found.backend not in TREE_BACKENDS:
        line = "whole decode steps as vLLM captures them"
        if found.backend in TREE_BACKENDS:
            line = "of all but attention (PIECEWISE): on the V1 runner a graph would not see trees"
        return Check("ok", what, line, short=line)
    budget = LevelBudget(levels_of(nodes), most_rows)
    sizes = []
    for level in budget.levels:
        most = most_rows // (1 + level)
        assert budget.fits(level, most)
        sizes.append(f"{1 + level} {'rows' if level else 'row'} x {most} requests")
    line = f"whole decode steps of up to {', '.join(sizes)} ({nodes} nodes, {most_rows} rows at most)"
    return Check("ok", what, line, "", short=line)
