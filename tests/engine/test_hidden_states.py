# SPDX-License-Identifier: Apache-2.0
"""Hidden states of an engine that verifies trees, beside those of the model as its authors wrote it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import generate, own_prompts
from vllm import SamplingParams

pytestmark = pytest.mark.engine

LAYERS = [0, 1, 15, 30]


def capture(worker: Any, layers: list[int]) -> None:
    """Keep, of each step, the positions of the rows with logits, their hidden states and what the last layer says."""
    from vllm_ext.engine.models.hidden_states import HiddenStates
    from vllm_ext.engine.steering.aux_logits import StepAuxLogits
    from vllm_ext.engine.v1 import steering_runner

    runner = worker.model_runner
    worker.without = type(runner)
    steering_runner.install(runner)  # as where a rule reads layers
    read = HiddenStates.of_target(runner, layers)
    runner.aux_logits = StepAuxLogits(runner.model_config.get_vocab_size(), read, None, runner.requests)
    worker.kept, sample = [], runner._sample

    def sampled(logits: torch.Tensor, *args: Any) -> Any:
        if runner.aux_logits is not None:
            states = runner.aux_logits.read
            positions = runner.positions[runner.logits_rows].tolist()
            same = torch.equal(states.logits(layers[-1:])[0].argmax(1), logits.argmax(1))
            worker.kept.append((positions, [states.of(layer).tolist() for layer in layers], same))
        return sample(logits, *args)

    runner._sample = sampled


def release(worker: Any) -> Any:
    runner = worker.model_runner
    runner.aux_logits, runner.use_aux_hidden_state_outputs = None, False
    runner.get_model().set_aux_hidden_state_layers(())
    runner.__class__ = worker.without
    del runner._sample
    return worker.kept


def refusal(worker: Any, layers: list[int]) -> str:
    from vllm_ext.engine.models.hidden_states import HiddenStates

    try:
        HiddenStates.of_target(worker.model_runner, layers)
    except ValueError as error:
        return str(error)
    return ""


def test_rows_of_trees_are_what_the_model_computes(model_dir: str, tested_llm: Any) -> None:
    from transformers import AutoModelForCausalLM

    prompt = tested_llm.get_tokenizer().encode(own_prompts()[0])
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)]
    expected = generate(tested_llm, [prompt], params)
    tested_llm.collective_rpc(capture, args=(LAYERS,))
    actual = generate(tested_llm, [prompt], params)
    (kept,) = tested_llm.collective_rpc(release)
    assert actual == expected
    assert all(same for _, _, same in kept)
    assert any(len(positions) > 2 for positions, _, _ in kept)

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    sequence = [*prompt, *actual[0]]
    with torch.inference_mode():
        states = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
    for place, layer in enumerate(LAYERS[:-1]):  # transformers has the last one behind the norm
        right = set()
        for positions, of_layers, _ in kept:
            rows, found = torch.tensor(of_layers[place]), states[layer][0, positions]
            error = (rows - found).abs().amax(1) / found.abs().amax(1)
            right |= {
                position for position, value in zip(positions, error.tolist(), strict=True) if value < 1e-4
            }
        # A step's rows off the path are of other tokens: at each position one row at least is on it.
        assert right >= set(range(len(prompt) - 1, len(sequence) - 1)), layer


@pytest.mark.parametrize("layers", [[], [31], [3, 2], [-1]])
def test_wrong_layers_are_refused(tested_llm: Any, layers: list[int]) -> None:
    (message,) = tested_llm.collective_rpc(refusal, args=(layers,))
    assert str(layers) in message
    assert "allowed: 0 to 30" in message
