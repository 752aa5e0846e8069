# SPDX-License-Identifier: Apache-2.0
"""Grammars of structured requests as the worker has them; no engine is started."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams

from vllm_ext import plugin
from vllm_ext.engine.composed import scheduler
from vllm_ext.engine.structured_output import grammar as grammars
from vllm_ext.engine.structured_output.grammar import Grammar, Grammars
from vllm_ext.proposers.base import Request, Sampling
from vllm_ext.proposers.tree import DraftTree

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["name", "year"],
    "additionalProperties": False,
}
ANSWER = '{"name": "Ada", "year": 1815}'


def config_for(model_dir: str, **options: Any) -> Any:
    plugin.register()
    return EngineArgs(
        model=model_dir,
        dtype="float32",
        max_model_len=256,
        speculative_config={"method": "suffix_tree", "num_speculative_tokens": 8},
        **options,
    ).create_engine_config()


@pytest.fixture(scope="module")
def found(slice_dir: str) -> Grammars:
    config = config_for(slice_dir)
    assert grammars.in_worker(config)
    config.parallel_config.world_size = 2  # compiled before anybody asks
    return Grammars(config)


def start(found: Grammars, name: str = "r", backend: str = "xgrammar") -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=json.dumps(SCHEMA)))
    assert params.structured_outputs is not None
    params.structured_outputs._backend = backend
    params.update_from_generation_config({}, 2)
    found.start(name, params)


def tokenizer(found: Grammars) -> Any:
    return found._manager.tokenizer


def encode(found: Grammars, text: str) -> list[int]:
    tokens: list[int] = tokenizer(found).encode(text, add_special_tokens=False)
    return tokens


def request_behind(tokens: list[int], budget_tokens: int = 8) -> Request:
    sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
    return Request("r", np.array([7, *tokens], np.int32), 1, budget_tokens, 8, sampling)


@pytest.mark.parametrize("output", ['{"na', '{"name": "Ada", "ye', '{"name": "Ada", "'])
def test_forced_text_is_drafted_as_the_tokenizer_has_it(found: Grammars, output: str) -> None:
    start(found)
    tokens = encode(found, output)
    grammar = found.of("r", tokens)
    assert grammar is not None
    text = grammar.forced_text()
    assert text
    assert (output + text) in ANSWER
    tree = found.tree(grammar, request_behind(tokens), DraftTree.empty())
    assert tree.is_chain
    assert tree.probabilities.tolist() == [1.0] * len(tree)
    assert tokenizer(found).decode([*tokens, *tree.tokens.tolist()]) == output + text
    found.finish("r")
    assert not found.has("r")


@pytest.mark.parametrize(
    ("words", "forced"),
    [("да|де", "д"), ("あか|いろ", ""), ("été|être", ""), ("ждём|ждут", "жд"), ("yes|yet", "ye")],
)
def test_forced_text_ends_with_a_whole_character(found: Grammars, words: str, forced: str) -> None:
    """Found: xgrammar tells the bytes that all alternatives begin with, and fails where they are no text."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=f"({words})"))
    assert params.structured_outputs is not None
    params.structured_outputs._backend = "xgrammar"
    params.update_from_generation_config({}, 2)
    found.start("r", params)
    grammar = found.of("r", [])
    assert grammar is not None
    assert grammar.forced_text() == forced
    assert len(found.tree(grammar, request_behind([]), DraftTree.empty())) <= 8


def test_a_grammar_that_was_given_up_is_the_cores_until_the_request_ends(found: Grammars) -> None:
    start(found)
    assert found.of("r", []) is not None
    found.give_up("r")
    assert found.of("r", []) is None
    assert found.has("r")
    found.finish("r")
    start(found)
    assert found.of("r", []) is not None


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_masks_are_the_matchers_behind_every_token(slice_dir: str, backend: str) -> None:
    """Along an answer, in walks of three tokens; every token of the vocabulary is asked for alone."""
    config = config_for(slice_dir)
    config.parallel_config.world_size = 2
    found = Grammars(config)
    start(found, backend=backend)
    tokens = [*encode(found, ANSWER), 2]
    vocab = config.model_config.get_vocab_size()
    for begin in range(0, len(tokens), 3):
        grammar = found.of("r", tokens[:begin])
        assert grammar is not None
        masks = found.masks({4: grammar})
        assert masks.has(4)
        assert not masks.has(3)
        for length in range(min(3, len(tokens) - begin)):
            path = tokens[begin : begin + length]
            logits = torch.zeros(2, vocab)
            masks.apply(logits, [3, 4], [[], path])
            assert (logits[0] == 0).all()
            allowed = torch.tensor([bool(_accepts(grammar, token)) for token in range(vocab)])
            unmasked = logits[1] == 0
            assert (logits[1][~unmasked] == -torch.inf).all()
            if backend == "guidance":
                allowed[2] = unmasked[2]  # vLLM takes the end token without asking it
            # Where text is forced llguidance masks all spellings but one, and accepts others.
            assert (allowed == unmasked).all() or (backend == "guidance" and allowed[unmasked].all())
            assert unmasked[tokens[begin + length]]
        masks.close()
        again = torch.zeros(1, vocab)
        found.masks({0: grammar}).apply(again, [0], [[]])
        assert (again[0] == 0).any()
    # Behind the end token nothing is masked, and nothing may be drafted.
    grammar = found.of("r", tokens)
    assert grammar is not None
    logits = torch.zeros(1, vocab)
    found.masks({0: grammar}).apply(logits, [0], [[]])
    assert (logits == 0).all()
    tree = DraftTree.chain(np.array([5], np.int32), np.array([0.5], np.float32))
    assert len(found.tree(grammar, request_behind(tokens), tree)) == 0


def test_what_has_one_choice_is_forced(slice_dir: str) -> None:
    """By masks: llguidance leaves one spelling of what is forced."""
    config = config_for(slice_dir)
    config.parallel_config.world_size = 2
    found = Grammars(config)
    start(found, backend="guidance")
    tokens = encode(found, '{"')
    grammar = found.of("r", tokens)
    assert grammar is not None
    tree = found.tree(grammar, request_behind(tokens), DraftTree.empty())
    assert tree.is_chain
    assert tree.tokens.tolist() == encode(found, ANSWER)[len(tokens) :][: len(tree)]
    assert tokenizer(found).decode(tree.tokens.tolist()).startswith("name")
    assert len(found.tree(grammar, request_behind(tokens, budget_tokens=1), DraftTree.empty())) == 1


def _accepts(grammar: Grammar, token: int) -> bool:
    accepted = grammar.accept(token)
    if accepted:
        grammar.rollback(1)
    return accepted


def test_nothing_is_drafted_behind_output_that_breaks_the_grammar(found: Grammars) -> None:
    start(found)
    assert found.of("r", encode(found, "Hello")) is None


def test_a_backend_is_named_as_vllm_names_it() -> None:
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend
    from vllm.v1.structured_output.backend_outlines import OutlinesBackend
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    of_vllm = {XgrammarBackend, GuidanceBackend, OutlinesBackend, LMFormatEnforcerBackend}
    assert {backend.__name__ for backend in of_vllm} == set(grammars.BACKENDS)


def test_the_core_masks_where_the_worker_cannot_know(slice_dir: str) -> None:
    config = config_for(slice_dir)
    assert config.scheduler_config.scheduler_cls == scheduler.path_of(
        ["StructuredDrafts", "DraftCounts", "DraftBlocks", "Counts"], False
    )
    config.structured_outputs_config.reasoning_parser = "qwen3"
    assert not grammars.in_worker(config)
    config.structured_outputs_config.enable_in_reasoning = True
    assert grammars.in_worker(config)
    # The user's own scheduler stays.
    config = config_for(slice_dir, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    assert not grammars.in_worker(config)
