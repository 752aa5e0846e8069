# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connectors beside trees: what one engine has saved another goes on with, and answers are plain's.

In float32, with trees on the side that saves, on the one that loads, and on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import engine
from helpers import assert_same_outputs, counted, generate, loading, long_and_short_prompts
from vllm import SamplingParams
from vllm.config import KVTransferConfig

pytestmark = pytest.mark.engine

BLOCK = 32
TREES = {"method": "token_recycling", "num_speculative_tokens": 12, "budget": "fixed"}
OPTIONS: dict[str, Any] = {"block_size": BLOCK, "max_model_len": 1024}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=80, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=80, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=80, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, max_tokens=80, ignore_eos=True),
]


@pytest.fixture(scope="module")
def prompts(plain_slice_llm: Any) -> list[list[int]]:
    """None is one token longer than its blocks: `ExampleConnector` looks for such a prompt by another name."""
    texts = long_and_short_prompts(plain_slice_llm, 12)
    return [text if (len(text) - 1) % BLOCK else [*text, text[-1]] for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def saving(folder: Path) -> KVTransferConfig:
    extra = {"shared_storage_path": str(folder)}
    return KVTransferConfig(
        kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )


@pytest.fixture(scope="module")
def plain(slice_dir: str, folder: Path) -> Iterator[Any]:
    yield from engine(slice_dir, kv_transfer_config=saving(folder), enable_prefix_caching=False, **OPTIONS)


@pytest.fixture(scope="module")
def trees(slice_dir: str, folder: Path) -> Iterator[Any]:
    yield from engine(
        slice_dir, TREES, kv_transfer_config=saving(folder), enable_prefix_caching=False, **OPTIONS
    )


@pytest.mark.slow  # two engines of its own: a minute and a half where both cores are busy
def test_who_saves_and_who_loads(
    plain_slice_llm: Any, plain: Any, trees: Any, prompts: list[list[int]], folder: Path
) -> None:
    first, second, third = prompts[:4], prompts[4:8], prompts[8:11]  # the last begins as one of the first
    expected = {
        tuple(prompt): generate(plain_slice_llm, [prompt], [params])[0]
        for prompt, params in zip(prompts, PARAMS * 3, strict=True)
    }

    of_engines = {id(llm): loading(llm) for llm in (plain, trees)}

    def right(llm: Any, texts: list[list[int]]) -> list[int]:
        """How many tokens were loaded, by request, for answers that are plain's."""
        of_engines[id(llm)].clear()
        assert_same_outputs(
            [expected[tuple(text)] for text in texts], generate(llm, texts, PARAMS[: len(texts)])
        )
        return list(of_engines[id(llm)])

    # The last block of a prompt, whose last token is read in any case, is not asked for.
    whole = [[(len(text) - 2) // BLOCK * BLOCK for text in texts] for texts in (first, second)]
    assert right(trees, first) == []  # saves
    assert right(plain, first) == whole[0]
    assert right(plain, second) == []
    _, counters = counted(trees, second, PARAMS)  # and is right, below
    assert counters["spec_accepted_tokens"] > 20
    assert right(trees, second) == whole[1]
    assert right(trees, first) == whole[0]  # by both
    # What is loaded is read: with other keys and values the answers are others.
    assert right(plain, third) == []
    for file in folder.rglob("*.safetensors"):
        found = safetensors.torch.load_file(file)
        safetensors.torch.save_file({name: torch.zeros_like(each) for name, each in found.items()}, file)
    with pytest.raises(AssertionError, match="differs at token"):
        right(trees, third)


def test_blocks_go_and_come_back(slice_dir: str, plain_slice_llm: Any, prompts: list[list[int]]) -> None:
    """Of answers too: a second turn reads what was written behind draft slots of the first."""
    extra = {
        "spec_name": "OffloadedOnCpu",
        "spec_module_path": "offloaded_on_cpu",
        "cpu_bytes_to_use": 64 << 20,
        "offload_prompt_only": False,
    }
    connector = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    for llm in engine(slice_dir, TREES, kv_transfer_config=connector, **OPTIONS):
        texts, brought = prompts[:4], loading(llm)
        first = [
            generate(plain_slice_llm, [text], [params])[0] for text, params in zip(texts, PARAMS, strict=True)
        ]
        answers, counters = counted(llm, texts, PARAMS)
        assert_same_outputs(first, answers)
        assert counters["spec_accepted_tokens"] > 20
        assert not brought
        turns = [[*text, *answer, *text[-20:]] for text, answer in zip(texts, first, strict=True)]
        second = [
            generate(plain_slice_llm, [text], [params])[0] for text, params in zip(turns, PARAMS, strict=True)
        ]
        llm.reset_prefix_cache()
        assert_same_outputs(second, generate(llm, turns, PARAMS))
        # All blocks but those of each last token, whose own state no step has written. All prompts begin alike: that
        # block comes once.
        written = [len(text) + len(answer) - 1 for text, answer in zip(texts, first, strict=True)]
        assert len({tuple(text[:BLOCK]) for text in texts}) == 1
        assert brought == [num // BLOCK * BLOCK - BLOCK * (i > 0) for i, num in enumerate(written)]
