# SPDX-License-Identifier: Apache-2.0
"""KV methods that choose blocks on the V2 runner: answers are V1's, whatever is drafted, cached or preempted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import V2_HOST_METHOD, V2_METHOD, v2_attention, v2_engine, v2_engine_ahead
from helpers import assert_same_outputs, preemptions
from transformers import AutoModelForCausalLM
from v2_requests import counters, generate, sampling, tokens

from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.v2 import chosen_blocks, kept_blocks

pytestmark = pytest.mark.v2
BLOCK = 32
# From its fifth block on a row skips some.
STREAMING = {"method": "streaming_llm", "window": 2 * BLOCK}
SNAPKV = {"method": "snapkv", "budget": 3 * BLOCK, "window": BLOCK, "watched": 8}
CRITIC = {**SNAPKV, "method": "critic"}
OPTIONS: dict[str, Any] = {
    "block_size": BLOCK,
    "logits_processors": None,
    "reasoning_config": None,
}
KINDS = [
    sampling(max_tokens=45),
    sampling(max_tokens=140),
    sampling(max_tokens=45, temperature=0.8, seed=3),
    sampling(max_tokens=45, temperature=0.6, seed=5, repetition_penalty=1.1),
]


def texts() -> list[list[int]]:
    """One that begins behind the window, one that grows into it, two that repeat themselves."""
    draw = random.Random(2)
    words = draw.choices(range(20, 1000), k=12)
    return [draw.choices(range(20, 1000), k=170), draw.choices(range(20, 1000), k=9), words * 11, words * 5]


@pytest.fixture(scope="module", params=[STREAMING, SNAPKV, CRITIC], ids=["streaming_llm", "snapkv", "critic"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**OPTIONS, "additional_config": {"vllm_ext": {"kv": request.param}}}


@pytest.fixture(scope="module")
def plain(v2_plain: Any, v2_dir: str, options: dict[str, Any]) -> Any:
    """Whole prompts in a step, no drafts, nothing cached."""
    return v2_engine(v2_dir, **options, max_num_batched_tokens=512, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[list[int]]:
    return tokens(generate(plain, texts(), KINDS))


def chooses(options: dict[str, Any]) -> bool:
    return bool(options["additional_config"]["vllm_ext"]["kv"] != STREAMING)


def chooses_again(options: dict[str, Any]) -> bool:
    return bool(options["additional_config"]["vllm_ext"]["kv"] == CRITIC)


def test_answers_are_v1_s_and_not_the_model_s(
    v2_dir: str,
    v2_plain: Any,
    options: dict[str, Any],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy ones: V1 draws with other random numbers. There blocks are float16, which changes no token of these."""
    from vllm import envs

    greedy = [0, 1]
    envs.disable_envs_cache()
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        on_v1 = v2_engine(v2_dir, **options)
        assert not on_v1.llm_engine.vllm_config.use_v2_model_runner
        answers = tokens(generate(on_v1, [texts()[i] for i in greedy], [KINDS[i] for i in greedy]))
    envs.disable_envs_cache()  # engines after it are V2's again
    assert_same_outputs(answers, [expected[i] for i in greedy])
    whole = tokens(generate(v2_plain, texts(), KINDS))
    assert whole != expected


def test_answers_are_those_of_the_model_under_a_mask(
    v2_dir: str, options: dict[str, Any], expected: list[list[int]]
) -> None:
    """Greedy ones, by Transformers' attention, in which a row sees the first block, two before its own, and its own."""
    if chooses(options):
        pytest.skip("a window's is plain to say")
    model = AutoModelForCausalLM.from_pretrained(v2_dir, dtype=torch.float32, attn_implementation="eager")
    for text, answer in zip(texts()[:2], expected[:2], strict=True):
        ids = torch.tensor(text + answer[:-1])
        place = torch.arange(len(ids))
        own = place // BLOCK
        seen = (own == 0) | (own > own[:, None] - 3)
        mask = torch.where(seen & (place <= place[:, None]), 0.0, -torch.inf)
        with torch.no_grad():
            logits = model(ids[None], attention_mask=mask[None, None]).logits[0, len(text) - 1 :]
        said = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        # The same sums in another order: of two tokens as near as that either may be said.
        assert (logits.max(1).values - said).max() < 1e-3


@pytest.mark.parametrize("method", [None, V2_METHOD, V2_HOST_METHOD], ids=["plain", "device", "host"])
def test_trees_parts_caches_and_preemptions_change_nothing(
    v2_dir: str, options: dict[str, Any], expected: list[list[int]], method: dict[str, Any] | None
) -> None:
    """Prompts in parts of 48 tokens, a cached beginning, and room for half of what the requests want."""
    given = {**options, "num_gpu_blocks_override": 14, "enable_prefix_caching": True}
    ahead = method == V2_METHOD and not chooses(options)
    llm = v2_engine_ahead(v2_dir, V2_METHOD, **given) if ahead else v2_engine(v2_dir, method, **given)
    for _ in range(1 if method is None else 2):
        assert_same_outputs(expected, tokens(generate(llm, texts(), KINDS)))
    if ahead:  # elsewhere requests may wait instead
        assert preemptions(llm) > 0
    if method is not None:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert runner.speculator.chain_reason is None
        assert counters(llm)["spec_accepted_tokens"] > 10


def test_blocks_that_are_not_read_go_back(plain: Any, options: dict[str, Any]) -> None:
    """Of a window: the first, two of the last, and that which fills up.

    Of a choice: three of six, and those of the answer. Of one that is made again: three, that which fills up, and one
    that is given back a step later.
    """
    grows = not chooses(options) or chooses_again(options)
    length, asked = (30, sampling(max_tokens=220)) if grows else (190, sampling(max_tokens=60))
    plain.llm_engine.add_request("long", {"prompt_token_ids": [*range(100, 100 + length)]}, asked)
    pool = plain.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free, held = pool.get_num_free_blocks(), []
    while plain.llm_engine.has_unfinished_requests():
        plain.llm_engine.step()
        held.append(free - pool.get_num_free_blocks())
    assert pool.get_num_free_blocks() == free
    if chooses_again(options):
        assert max(held) == 3 + 1 + 1
        assert held.count(3 + 1 + 1) < len(held) / 10
    elif chooses(options):
        assert held[0] == 6
        assert max(held[4:-1]) == 3 + 3
    else:
        assert max(held) == 1 + 2 + 1


@pytest.fixture
def on_triton() -> Iterator[None]:
    """The attention of GPUs, in the interpreter."""
    with v2_attention("TRITON_ATTN"):
        yield


def test_attention_of_gpus(plain: Any, on_triton: None, v2_dir: str, options: dict[str, Any]) -> None:
    """Few tokens, as the interpreter takes minutes; behind the third of them a block of the second answer ends."""
    given = [texts()[2], (texts()[0] * 2)[:189]]
    asked = [sampling(max_tokens=6)] * 2
    expected = tokens(generate(plain, given, asked))
    for method in (None, V2_METHOD):
        assert_same_outputs(expected, tokens(generate(v2_engine(v2_dir, method, **options), given, asked)))


@pytest.mark.parametrize("what", ["drafts", "prompts", "nodes"])
def test_a_row_that_reads_other_blocks_is_noticed(
    v2_dir: str,
    options: dict[str, Any],
    expected: list[list[int]],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a window, nodes behind their root's block.

    Of a choice, trees that take their context for the whole one, and prompts whose ends are not asked. Of one that is
    made again, nodes whose weights are another block's.
    """
    if what == "nodes":
        if not chooses_again(options):
            pytest.skip("nodes are not asked")
        monkeypatch.setattr(
            chosen_blocks.Choices, "_by_block", lambda self, policy, position, mass: mass[::-1].copy()
        )
    elif what == "drafts" and chooses(options):
        monkeypatch.setattr(kept_blocks.KeptState, "_shorten_contexts", lambda *_: None)
    elif what == "drafts":

        def keep_all(layout: Any, positions: Any, window: Any, backend: Any) -> None:
            end = layout.context // window.block_size
            layout.context.sub_((end - window.blocks - window.sinks).clamp(min=0) * window.block_size)

        monkeypatch.setattr(kept_blocks, "end_with_block", keep_all)
    elif chooses(options):
        monkeypatch.setattr(tree_backend, "add_block_mass", lambda *_: None)
    else:
        pytest.skip(
            "a block too many changes no token of these answers: kv_cache/test_kept_rows.py notices it"
        )
    llm = v2_engine(v2_dir, None if what == "prompts" else V2_METHOD, **options)
    with pytest.raises(AssertionError, match="differs at token"):
        assert_same_outputs(expected, tokens(generate(llm, texts(), KINDS)))
