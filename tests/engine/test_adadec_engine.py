# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext adadec learn`` on a real engine: entropies and ranks beside independent ones, and the whole command."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import what_failed
from vllm import SamplingParams

from vllm_ext.training.adadec import read_by
from vllm_ext.training.adadec_texts import Text

pytestmark = pytest.mark.engine

COMMAND = "from vllm_ext.entry import main; main()"
# Of Python's own library.
FILES = [Path(getattr(module, "__file__", "")) for module in (dataclasses, json, subprocess)]


def read(worker: Any) -> Any:
    """As vLLM's worker would have it with the extension."""
    from vllm_ext.training.adadec_worker import EntropyReader

    return EntropyReader.vllm_ext_adadec_read(worker)


def release(worker: Any) -> None:
    del worker.model_runner._get_prompt_logprobs_dict, worker._vllm_ext_adadec_reader


@pytest.mark.slow  # reads texts three times: a minute and a half where both cores are busy
def test_entropies_and_ranks_are_the_models(model_dir: str, plain_llm: Any) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = plain_llm.get_tokenizer()
    texts = [
        Text(tokenizer.encode(file.read_text(), add_special_tokens=False)[at : at + size], counts_from)
        for file, at, size, counts_from in zip(FILES, (50, 0, 900), (300, 200, 350), (1, 150, 3), strict=True)
    ]
    llm: Any = SimpleNamespace(
        generate=plain_llm.generate, collective_rpc=lambda name: plain_llm.collective_rpc(read)
    )
    reports: list[tuple[str, int, int]] = []
    try:
        found = read_by(llm, texts, lambda *report: reports.append(report))
    finally:
        plain_llm.collective_rpc(release)
    assert reports[-1] == ("reading", 299 + 50 + 347, 299 + 50 + 347)

    prompts = [{"prompt_token_ids": text.tokens} for text in texts]
    outputs = plain_llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for text, of_text, output in zip(texts, found, outputs, strict=True):
        places = zip(text.tokens, output.prompt_logprobs, strict=True)
        ranks = [place[token].rank for token, place in places if place is not None]
        assert of_text.first.tolist() == [rank == 1 for rank in ranks[text.counts_from - 1 :]]
        with torch.inference_mode():
            log_p = model(torch.tensor([text.tokens])).logits[0].double().log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1)[text.counts_from - 1 : -1]
        np.testing.assert_allclose(of_text.entropy, entropy.numpy(), atol=2e-3)
    assert 0.2 < np.concatenate([each.first for each in found]).mean() < 0.9


def learn(model_dir: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "adadec", "learn", "--model", model_dir, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )


@pytest.mark.slow
def test_the_command_learns_from_code(model_dir: str) -> None:
    options = ["--tokens", "4000", "--context", "256", "--dtype", "float32", "--json"]
    done = learn(model_dir, *map(str, FILES), *options)
    assert done.returncode == 0, what_failed(done)
    report = json.loads(done.stdout)
    assert report["tokens"] == 4000
    assert 0.3 < report["rank_1"] < 0.9
    assert 0.3 < report["threshold"] < 4.0
    assert report["held_out"]["learnt"]["balanced_accuracy"] > 0.6
    assert 0.0 < report["held_out"]["learnt"]["pauses"] < 1.0
    assert report["weight"] < 0.0
    assert "reading: 100%" in done.stderr
