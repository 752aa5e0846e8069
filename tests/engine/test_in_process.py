# SPDX-License-Identifier: Apache-2.0
"""The engine in the caller's own process (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from helpers import assert_same_outputs, own_prompts, what_failed
from vllm import SamplingParams

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
model, method, prompts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
options = dict(dtype="float32", max_model_len=512, max_num_seqs=4, enforce_eager=True, disable_log_stats=False)
llm = LLM(model, speculative_config=method, **options)
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
counters = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
print("RESULT" + json.dumps([[o.outputs[0].token_ids for o in outputs], counters]))
"""


def run(slice_dir: str, method: dict[str, object]) -> tuple[list[list[int]], dict[str, float]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, slice_dir, json.dumps(method), json.dumps(own_prompts()[:4])],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, what_failed(done)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    tokens, counters = json.loads(line.removeprefix("RESULT"))
    return tokens, counters


def test_in_process_engine_is_lossless(slice_dir: str, plain_slice_llm: Any) -> None:
    outputs = plain_slice_llm.generate(
        own_prompts()[:4], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False
    )
    expected = [list(output.outputs[0].token_ids) for output in outputs]
    tokens, counters = run(slice_dir, {"method": "token_recycling"})
    assert_same_outputs(expected, tokens)
    # Scripts see our counters too, and vLLM's own agree with them.
    assert counters["vllm_ext:spec_emitted_tokens"] == sum(map(len, tokens))
    drafted = counters["vllm_ext:spec_draft_tokens"]
    assert 0 < drafted == counters["vllm:spec_decode_num_draft_tokens"]
