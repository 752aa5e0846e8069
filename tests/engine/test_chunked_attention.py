# SPDX-License-Identifier: Apache-2.0
"""A Llama 4 of random weights, whose attention has a row of the block table for each chunk: chains, and plain's tokens.

Found: trees read behind the end of that table, and the worker died.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import V2_HOST_METHOD, V2_METHOD, engine, v2_engine
from helpers import assert_same_outputs
from v2_requests import counters, generate, sampling, tokens

CHUNK = 128
PROMPTS = [
    [(7 * i + start) % 400 + 30 for i in range(length)] for start, length in ((1, 12), (2, 100), (3, 300))
]
PARAMS = sampling(max_tokens=30)


@pytest.fixture(scope="module")
def llama4_dir(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=4,  # of which the last attends to all
        intermediate_size=128,
        intermediate_size_mlp=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1000,  # no experts: they want process groups of their own
        attention_chunk_size=CHUNK,
        use_qk_norm=True,
        attn_temperature_tuning=True,
        initializer_range=1 / math.sqrt(64),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).to(torch.float32)
    model.lm_head.weight.data[24:] = 0  # few tokens are ever likely, so that drafts are accepted
    folder = tmp_path_factory.mktemp("llama4")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model_dir) / name, folder / name)
    return str(folder)


def check(plain: Any, speculating: Any) -> None:
    expected = tokens(generate(plain, PROMPTS, PARAMS))
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    assert_same_outputs(expected, tokens(generate(speculating, PROMPTS, PARAMS)))
    totals = counters(speculating)
    assert totals["spec_accepted_tokens"] > 5
    assert totals["fallbacks:model_chain"] > 5


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("method", ["token_recycling", "hybrid"])
def test_a_model_with_chunked_attention_drafts_chains(llama4_dir: str, method: str) -> None:
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20}
    drafts = {"method": method, "num_speculative_tokens": 12, "budget": "fixed"}

    @contextmanager
    def running(spec: dict[str, Any] | None) -> Iterator[Any]:
        yield from engine(llama4_dir, spec, **options)

    with running(None) as plain, running(drafts) as speculating:
        check(plain, speculating)


@pytest.mark.v2
@pytest.mark.slow
@pytest.mark.parametrize("method", [V2_METHOD, V2_HOST_METHOD], ids=["device", "host"])
def test_and_on_v2(llama4_dir: str, v2_plain: Any, method: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_model_len": 512}
    check(v2_engine(llama4_dir, **options), v2_engine(llama4_dir, method, **options))
