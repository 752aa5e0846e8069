# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connectors beside V2's trees: what comes back is what was committed, and answers are plain V2's.

One engine with a connector at a time: vLLM keeps a process's worker side of it in a global.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import V2_HOST_METHOD, V2_METHOD, v2_engine, v2_engine_ahead
from helpers import assert_same_outputs, loading
from v2_requests import counters, generate, prompts, sampling, tokens
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

pytestmark = pytest.mark.v2

BLOCK = 32
PARAMS = [sampling(max_tokens=60), sampling(max_tokens=60, temperature=0.8, seed=3)] * 2


@pytest.fixture(autouse=True)
def no_other() -> Iterator[None]:
    """Each test leaves the process without the worker side of its connector."""
    yield
    ensure_kv_transfer_shutdown()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Of one block and more, none a token longer than its blocks."""
    return [text for text in prompts(40) if len(text) > BLOCK and (len(text) - 1) % BLOCK][:4]


def ask(llm: Any, texts: list[list[int]]) -> list[list[int]]:
    return tokens(generate(llm, texts, PARAMS[: len(texts)]))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", [V2_METHOD, V2_HOST_METHOD], ids=["device", "host"])
def test_blocks_go_and_come_back(
    v2_dir: str, v2_plain: Any, texts: list[list[int]], method: dict[str, Any], ahead: bool
) -> None:
    """Of answers too: a second turn reads what was written behind draft slots of the first."""
    extra = {
        "spec_name": "OffloadedOnCpu",
        "spec_module_path": "offloaded_on_cpu",
        "cpu_bytes_to_use": 16 << 20,
        "offload_prompt_only": False,
    }
    connector = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    start = v2_engine_ahead if ahead else v2_engine
    llm = start(v2_dir, method, kv_transfer_config=connector, enable_prefix_caching=False)
    brought = loading(llm)
    first = ask(v2_plain, texts)
    assert_same_outputs(first, ask(llm, texts))
    assert not brought
    turns = [[*text, *answer, *text[-20:]] for text, answer in zip(texts, first, strict=True)]
    second = ask(v2_plain, turns)
    assert_same_outputs(second, ask(llm, turns))
    # All whole blocks but that of the last token, which no step has written.
    written = [len(text) + len(answer) - 1 for text, answer in zip(texts, first, strict=True)]
    assert brought == [num // BLOCK * BLOCK for num in written]
    assert counters(llm)["spec_accepted_tokens"] > 20


def test_prompts_are_saved_and_loaded(
    v2_dir: str, v2_plain: Any, texts: list[list[int]], tmp_path: Path
) -> None:
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    # It saves a prompt's first chunk alone: here all of each prompt.
    llm = v2_engine_ahead(
        v2_dir,
        V2_METHOD,
        kv_transfer_config=connector,
        enable_prefix_caching=False,
        max_num_batched_tokens=512,
    )
    expected, brought = ask(v2_plain, texts), loading(llm)
    assert_same_outputs(expected, ask(llm, texts))
    assert not brought
    assert_same_outputs(expected, ask(llm, texts))
    assert brought == [(len(text) - 2) // BLOCK * BLOCK for text in texts]
    # What is loaded is read: with other keys and values the answers are others.
    for file in tmp_path.rglob("*.safetensors"):
        found = safetensors.torch.load_file(file)
        safetensors.torch.save_file({name: torch.zeros_like(each) for name, each in found.items()}, file)
    with pytest.raises(AssertionError, match="differs at token"):
        assert_same_outputs(expected, ask(llm, texts))
