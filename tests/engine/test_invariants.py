# SPDX-License-Identifier: Apache-2.0
"""The invariants of batched speculation (EQSPEC, arXiv 2510.22876), watched inside the worker at every step.

Numbered as below; 6 (a request's own sampler state) and 12 (logprobs) are test_sampling_matrix.py, 9 (preemption,
chunked prompts, reused prefixes) is test_stress.py, and 7 (the draft model's cache) is test_companion.py.

1. A row's position is the number of tokens before it on its path.
2. At a step's end the KV cache holds exactly the committed tokens but the last, as plain decoding computes them.
3. What rejected drafts left in the cache is never read.
4. A request has one row for its root and one for each draft.
5. A request grows by the drafts it accepted, and one.
8. No row is told from padding by its token: every row belongs to a request.
10. Output depends on neither slot, order nor company.
11. Nor on how much is drafted, which may change at every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_outputs, own_prompts
from vllm import SamplingParams

pytestmark = pytest.mark.engine

POISON = 1e4  # finite: stock kernels multiply what is behind the last token by 0
SIZES = (0, 12, 1, 0, 5)


def wrap(owner: Any, name: str, after: Callable[[Any], None]) -> None:
    """Call ``after`` with what the method returned, each time; `unwrap` ends it."""
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        after(result)
        return result

    setattr(owner, name, wrapped)


def unwrap(worker: Any) -> None:
    """Take all wrappers off: they are attributes of the instances, in front of the classes' methods."""
    for owner in (worker.model_runner, getattr(worker.model_runner, "drafter", None)):
        for name in ("_prepare_inputs", "sample_tokens", "step"):
            if owner is not None and name in vars(owner):
                delattr(owner, name)


def layers(runner: Any) -> list[Any]:
    """Caches of the target's layers: a draft model's stand in the same groups."""
    context = runner.compilation_config.static_forward_context
    passes = getattr(getattr(runner, "drafter", None), "passes", None)
    drafting = passes.own_layers if passes else ()
    names = [name for groups in runner.attn_groups for group in groups for name in group.layer_names]
    return [context[name].kv_cache for name in names if name not in drafting]


def slots(runner: Any, request: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and offsets of the positions ``start .. end - 1``."""
    from vllm_ext.kernels.kv_layouts import vec_layout

    block_size = vec_layout(layers(runner)[0])[0].shape[2]
    at = np.arange(start, end)
    table = runner.input_batch.block_table[0].block_table.np[request]
    return torch.from_numpy(table[at // block_size].astype(np.int64)), torch.from_numpy(at % block_size)


def watch_rows(worker: Any) -> None:
    """Invariants 1, 4, 5 and 8; a broken one ends the engine, with its traceback."""
    runner = worker.model_runner
    worker.seen = {"steps": 0, "branching": 0, "rows": 0}
    before: dict[str, int] = {}

    def check_inputs(_: Any) -> None:
        trees, batch = runner.step_trees, runner.input_batch
        start = runner.query_start_loc.np[: batch.num_reqs + 1]
        positions = runner.positions[: start[-1]].tolist()
        worker.seen["steps"] += 1
        worker.seen["branching"] += len(trees.branching)
        worker.seen["rows"] += int(trees.row_start[-1])
        assert len(trees.row_start) == batch.num_reqs + 1
        for request, name in enumerate(batch.req_ids):
            rows = trees.rows(request)
            parents = trees.parents[rows].tolist()
            committed = int(batch.num_tokens_no_spec[request])
            query = range(int(start[request]), int(start[request + 1]))
            computed = int(batch.num_computed_tokens_cpu[request])
            first = int(trees.query_row[request])
            # Prompt rows, then the root, then the drafts: nothing else, nothing twice.
            assert len(query) == first - query.start + len(parents)
            assert positions[query.start : first] == list(range(computed, computed + first - query.start))
            assert int(trees.context[request]) == computed + first - query.start
            if computed + len(query) < batch.num_prompt_tokens[request]:
                continue  # an unfinished prompt
            assert int(trees.context[request]) == committed - 1
            assert int(trees.tokens[rows][0]) == int(batch.token_ids_cpu[request, committed - 1])
            for row, parent in enumerate(parents):
                above = positions[first + parent] + 1 if parent >= 0 else committed - 1
                assert positions[first + row] == above
            before[name] = committed

    def check_growth(_: Any) -> None:
        batch = runner.input_batch
        for request, name in enumerate(batch.req_ids):
            if name in before:
                grown = int(batch.num_tokens_no_spec[request]) - before.pop(name)
                assert grown == len(worker.last_accepted[request]) + 1

    inner = runner.drafter.step

    def step(runner: Any, trees: Any, *args: Any) -> Any:
        worker.last_accepted = [list(path) for path in trees.accepted]
        return inner(runner, trees, *args)

    wrap(runner, "_prepare_inputs", check_inputs)
    runner.drafter.step = step
    wrap(runner, "sample_tokens", check_growth)


def keep_kv(worker: Any) -> None:
    """Copy each request's keys and values of all committed tokens but the last, after every step."""
    from vllm_ext.kernels.kv_layouts import vec_layout

    runner = worker.model_runner
    worker.kept = {}

    def keep(_: Any) -> None:
        for request, name in enumerate(runner.input_batch.req_ids):
            length = int(runner.input_batch.num_tokens_no_spec[request]) - 1
            blocks, offsets = slots(runner, request, 0, length)
            views = [view for cache in layers(runner) for view in vec_layout(cache)]
            worker.kept[name] = torch.stack([view[blocks, :, offsets] for view in views])

    wrap(runner, "sample_tokens", keep)


def read_kv(worker: Any) -> list[Any]:
    """float32 ``[2 * layers, tokens, heads, head_size]`` of each request, as they came."""
    names = sorted(worker.kept, key=lambda name: int(name.split("-")[0]))
    return [worker.kept[name].numpy() for name in names]


def poison(worker: Any) -> None:
    """In each step, before new drafts may be written there, overwrite every slot behind the committed tokens."""
    from vllm_ext.kernels.kv_layouts import vec_layout

    runner = worker.model_runner
    step = runner.drafter.step
    worker.poisoned = 0

    def poisoned_step(*args: Any) -> Any:
        table = runner.input_batch.block_table[0]
        for request in range(runner.input_batch.num_reqs):
            keys, _ = vec_layout(layers(runner)[0])
            start = int(runner.input_batch.num_tokens_no_spec[request]) - 1
            end = int(table.num_blocks_per_row[request]) * keys.shape[2]
            blocks, offsets = slots(runner, request, start, end)
            worker.poisoned += len(blocks)
            for cache in layers(runner):
                for view in vec_layout(cache):
                    view[blocks, :, offsets] = POISON
        return step(*args)

    runner.drafter.step = poisoned_step


def change_sizes(worker: Any) -> None:
    """Another budget each step, none among them."""
    drafter, sizes = worker.model_runner.drafter, itertools.cycle(SIZES)
    worker.num_nodes = drafter.num_nodes

    def change(_: Any) -> None:
        drafter.num_nodes = next(sizes)

    wrap(drafter, "step", change)


def restore_sizes(worker: Any) -> None:
    worker.model_runner.drafter.num_nodes = worker.num_nodes


def read(worker: Any, name: str) -> Any:
    return getattr(worker, name)


def run(llm: Any, prompts: list[str], batch_size: int = 4, tokens: int = 40) -> list[list[int]]:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch = [[{"role": "user", "content": text}] for text in prompts[start : start + batch_size]]
        answers += [list(o.outputs[0].token_ids) for o in llm.chat(batch, params, use_tqdm=False)]
    return answers


@pytest.fixture(scope="module")
def expected(plain_llm: Any) -> list[list[int]]:
    return run(plain_llm, own_prompts())


def test_rows_positions_and_growth(
    tested_llm: Any, tested_method: dict[str, Any], expected: list[list[int]], enough: int
) -> None:
    tested_llm.collective_rpc(watch_rows)
    try:
        assert_same_outputs(expected, run(tested_llm, own_prompts()))
        (seen,) = tested_llm.collective_rpc(read, args=("seen",))
    finally:
        tested_llm.collective_rpc(unwrap)
    assert seen["branching"] > 50 // enough or tested_method["method"] == "del"  # which drafts chains
    assert seen["rows"] > seen["steps"] * (5 if enough == 1 else 1)


def test_the_cache_holds_what_plain_decoding_computes(plain_engine: Any, tested_llm: Any) -> None:
    kept = []
    for llm in (plain_engine, tested_llm):
        llm.collective_rpc(keep_kv)
        try:
            run(llm, own_prompts()[:4])
            kept.append(llm.collective_rpc(read_kv)[0])
        finally:
            llm.collective_rpc(unwrap)
    for plain, trees in zip(*kept, strict=True):
        tokens = min(plain.shape[1], trees.shape[1])
        assert tokens > 40
        np.testing.assert_allclose(plain[:, :tokens], trees[:, :tokens], atol=2e-3, rtol=1e-3)


def test_what_rejected_drafts_left_is_never_read(
    tested_llm: Any, expected: list[list[int]], enough: int
) -> None:
    tested_llm.reset_prefix_cache()
    tested_llm.collective_rpc(poison)
    try:
        assert_same_outputs(expected, run(tested_llm, own_prompts()))
        assert tested_llm.collective_rpc(read, args=("poisoned",))[0] > 1000 // enough
    finally:
        tested_llm.collective_rpc(unwrap)
        tested_llm.reset_prefix_cache()


def test_slot_order_and_company_do_not_matter(tested_llm: Any, expected: list[list[int]]) -> None:
    backwards = run(tested_llm, own_prompts()[::-1], 4)
    assert_same_outputs(expected, backwards[::-1])
    assert_same_outputs(expected[:3], run(tested_llm, own_prompts()[:3], 1))


def test_drafting_may_change_at_every_step(tested_llm: Any, expected: list[list[int]]) -> None:
    tested_llm.collective_rpc(change_sizes)
    try:
        assert_same_outputs(expected, run(tested_llm, own_prompts()))
    finally:
        tested_llm.collective_rpc(unwrap)
        tested_llm.collective_rpc(restore_sizes)
