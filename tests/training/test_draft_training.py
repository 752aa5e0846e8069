# SPDX-License-Identifier: Apache-2.0
"""Distilling a draft model, in seconds: a target of 64 tokens whose distributions are known."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from typer.testing import CliRunner

from vllm_ext.cli.train import draft, train_app
from vllm_ext.data import answers as draft_data
from vllm_ext.data.answers import Answer
from vllm_ext.training import draft_model, sources, timed
from vllm_ext.training.draft_model import (
    Batches,
    Estimate,
    Recipe,
    Shape,
    candidates,
    estimate,
    from_layers,
    has_embeddings_of,
    keep_embeddings,
    loss_of,
    make_model,
    split,
    train,
)
from vllm_ext.training.timed import CHECKPOINT

VOCAB, TOP_K = 64, 4
SHAPE = Shape(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32)


def nothing(*_: Any) -> None:
    """No progress bar."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def answers(count: int) -> list[Answer]:
    """Two of each prompt. Each token has four successors, with chances 0.6, 0.2, 0.1 and 0.05."""
    rng = np.random.default_rng(0)
    logp = np.log(np.array([0.6, 0.2, 0.1, 0.05], np.float32))
    made = []
    for number in range(count):
        prompt = number // 2
        tokens, tops = [prompt % VOCAB, 1 + prompt % 7], []
        for _ in range(20 + number % 9):
            ids = (tokens[-1] * 5 + np.array([1, 2, 3, 4])) % VOCAB
            tops.append(ids)
            tokens.append(int(rng.choice(ids, p=np.exp(logp) / np.exp(logp).sum())))
        made.append(
            Answer(np.array(tokens, np.int32), 2, np.array(tops, np.int32), np.tile(logp, (len(tops), 1)))
        )
    return made


def test_the_loss_is_the_cross_entropy_with_the_rest_as_one_class() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, VOCAB, generator=generator)
    top_ids = torch.tensor([[1, 5], [0, 63], [7, 8]])
    p = torch.tensor([[0.5, 0.2], [0.9, 0.1], [0.3, 0.3]])
    q = logits.softmax(1).gather(1, top_ids)
    classes = torch.cat([p, 1 - p.sum(1, keepdim=True)], 1), torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
    expected = -(classes[0] * classes[1].log()).sum(1).mean()
    assert loss_of(logits, top_ids, p.log()) == pytest.approx(float(expected), abs=1e-5)


def test_tokens_drawn_stand_for_all_others(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(target, SHAPE, "cpu")
    noise = torch.Generator().manual_seed(0)
    hidden = 4 * torch.randn(3, SHAPE.hidden_size, generator=noise)
    top_ids = torch.tensor([[1, 5], [5, 63], [7, 8]])
    with torch.no_grad():
        whole = model.lm_head(hidden)
        few, places = candidates(model.lm_head.weight, hidden, top_ids, noise)
        # All of the vocabulary fits: only its order differs.
        torch.testing.assert_close(few.gather(1, places), whole.gather(1, top_ids))
        torch.testing.assert_close(few.logsumexp(1), whole.logsumexp(1))
        monkeypatch.setattr(draft_model, "OTHERS", 16)
        draws = [candidates(model.lm_head.weight, hidden, top_ids, noise)[0] for _ in range(2000)]
    assert draws[0].shape == (3, 5 + 16)
    mean = torch.stack([logits.exp().sum(1) for logits in draws]).mean(0)
    torch.testing.assert_close(mean, whole.exp().sum(1), rtol=0.02, atol=0.0)


def test_no_prompt_is_both_learnt_and_held_out() -> None:
    """Whatever the order of the answers, as those that servers have kept come."""
    mixed = [answers(200)[index] for index in np.random.default_rng(1).permutation(200)]
    learnt, held_out = (
        [tuple(answer.tokens[:2].tolist()) for answer in part] for part in split(mixed, Recipe())
    )
    assert (len(learnt), len(held_out)) == (190, 10)
    assert set(learnt).isdisjoint(held_out)


def test_training_learns_the_targets_distribution_and_goes_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Looked at twice a step: 250 steps, however fast the machine is.
    clock = itertools.count(0.0, 6.0 / 500)
    monkeypatch.setattr(timed, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    learnt, held_out = split(answers(200), Recipe())
    assert len(held_out) == 10
    assert len(learnt) == 190
    model = make_model(target, SHAPE, "cpu")
    before = estimate(model, held_out, Recipe())
    assert math.isnan(before.on_greedy_answers)  # they are all sampled
    first = Recipe(minutes=0.1, batch_tokens=400, learning_rate=1e-2)
    curve = train(model, learnt, first, tmp_path, nothing, nothing)
    found = estimate(model, held_out, first)
    assert curve[-1]["loss"] < 0.9 * math.log(VOCAB)
    # All there is to have: the four successors are 0.95 of the target's mass.
    assert found.sampled_acceptance > 0.85 > 0.3 > before.sampled_acceptance
    assert found.greedy_acceptance > 0.95
    greedy = [
        replace(a, tokens=np.concatenate([a.tokens[: a.num_prompt_tokens], a.top_ids[:, 0]]))
        for a in held_out
    ]
    of_both = estimate(model, [*held_out, *greedy], first)
    assert of_both.on_greedy_answers == estimate(model, greedy, first).greedy_acceptance
    assert of_both.on_greedy_answers != of_both.greedy_acceptance
    assert found.chain_of_4 == pytest.approx(4.5, abs=0.5)
    # Begun again, from the checkpoint: nothing is lost, and time that is spent stays spent.
    again = make_model(target, SHAPE, "cpu")
    assert train(again, learnt, first, tmp_path, nothing, nothing)[: len(curve)] == curve
    assert estimate(again, held_out, first) == found
    assert (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_a_draft_begins_as_layers_of_the_target(name: str, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        tie_word_embeddings=True,
    )
    target = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    target.save_pretrained(tmp_path / "target")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(
        from_layers(tmp_path / "target", [0, 1, 2], "cpu")(ids).logits, target(ids).logits
    )
    draft = from_layers(tmp_path / "target", [0, 2], "cpu")
    embeddings = draft.model.embed_tokens.weight.clone()
    layer = draft.model.layers[1].mlp.up_proj.weight.clone()
    torch.testing.assert_close(layer, target.model.layers[2].mlp.up_proj.weight)
    # Generation reads each layer's cache by its place.
    torch.testing.assert_close(
        draft.generate(ids, max_new_tokens=4, do_sample=False),
        draft.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False),
    )
    train(draft, answers(20), Recipe(minutes=0.01), tmp_path, nothing, nothing)
    assert (draft.model.embed_tokens.weight == embeddings).all()
    assert (draft.model.layers[1].mlp.up_proj.weight != layer).any()
    draft.save_pretrained(tmp_path / "draft")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    torch.testing.assert_close(again(ids).logits, draft(ids).logits)
    # One may go on from it; a model of a shape of its own has learnt its embeddings.
    assert has_embeddings_of(tmp_path / "draft", tmp_path / "target")
    make_model(tmp_path / "target", SHAPE, "cpu").save_pretrained(tmp_path / "own")
    assert not has_embeddings_of(tmp_path / "own", tmp_path / "target")
    assert [name for name, p in keep_embeddings(again).named_parameters() if not p.requires_grad] == [
        "model.embed_tokens.weight"
    ]
    with pytest.raises(ValueError, match=r"has layers 0 to 2, and not \[3\]"):
        from_layers(tmp_path / "target", [0, 3], "cpu")


def test_a_draft_begins_as_one_thing(target: Path, tmp_path: Path) -> None:
    arguments = ["draft", "--target", str(target), "--output", str(tmp_path), "--prompts", "x.jsonl"]
    for given, message in (
        (["--layers", "0", "--start", str(target)], "a model begins as one of them"),
        (["--layers", "0;1"], "must be numbers of layers with commas"),
    ):
        result = CliRunner().invoke(train_app, arguments + given)
        assert result.exit_code != 0
        assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["exits", "--exits", "4,40"],
            r"--exits=4,40 is not allowed; allowed for \S+: 1 to \d+, and not.* 40",
        ),
        (["exits", "--exits", "0"], r"--exits=0 is not allowed"),
        (
            ["draft", "--layers", "0,99"],
            r"--layers=0,99 is not allowed; allowed for \S+: 0 to \d+, and not 99",
        ),
    ],
)
def test_layers_that_there_are_not_are_refused_at_once(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(draft_data, "generate", lambda *_: pytest.fail("the target answers"))
    common = ["--model", str(target), "--output", str(tmp_path / "out"), "--own-prompts", "4"]
    result = CliRunner().invoke(train_app, arguments + common)
    assert result.exit_code == 2, result.output
    assert re.search(message, " ".join(result.output.split()))
    assert list(tmp_path.iterdir()) == []


def estimated(greedy: float, chain: float) -> Estimate:
    return Estimate(greedy, greedy, greedy, chain)


def test_a_draft_that_nothing_is_accepted_of_is_not_to_be_served() -> None:
    said = draft._not_to_be_served
    assert said(estimated(0.3, 1.5), estimated(0.4, 1.6)) is None
    short = said(estimated(0.02, 1.02), estimated(0.03, 1.03))
    assert short is not None
    assert short.startswith("do not serve this: 1.02 tokens a step")
    assert "Raise --minutes" in short
    by_heart = said(estimated(0.05, 1.05), estimated(0.6, 2.0))
    assert by_heart is not None
    assert "Raise more prompts: --own-prompts" in by_heart


def test_answers_are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        draft_data.write(tmp_path / "0.npz", answers(3))
        draft_data.write(tmp_path / "0.npz", answers(4))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "0.npz").stat().st_mode) == 0o600
    assert len(draft_data.load(tmp_path)) == 4


def test_batches_have_every_answer_once(target: Path) -> None:
    given = answers(30)
    recipe = Recipe(batch_tokens=100, max_length=16)
    batches = Batches(given, recipe, "cpu")
    assert sorted(index for part in batches.parts for index in part) == list(range(30))
    for step in range(len(batches.parts)):
        ids, mask, top_ids, top_logp = batches.at(step)
        assert ids.shape[1] <= 16
        assert int(mask.sum()) == len(top_ids) == len(top_logp)
        # Each place that is learnt from precedes the token whose alternatives stand there.
        places = ids[mask]
        assert ((places * 5 + 1) % VOCAB == top_ids[:, 0]).all()


def test_batches_pad_little() -> None:
    given = answers(30)
    for index in range(0, 30, 2):  # half of them behind a prompt: longer, with no more output
        tokens = np.concatenate([np.ones(40, np.int32), given[index].tokens])
        given[index] = replace(given[index], tokens=tokens)
    batches = Batches(given, Recipe(batch_tokens=100), "cpu")
    read = [len(given[index].tokens) - 1 for part in batches.parts for index in part]
    assert read == sorted(read)
    padded = sum(batches.at(step)[0].numel() for step in range(len(batches.parts)))
    assert padded < 1.2 * sum(read)


def test_shards_come_back_and_bad_ones_are_named(tmp_path: Path) -> None:
    given = answers(5)
    draft_data.write(draft_data.shard_file(tmp_path, 0), given[:3])
    draft_data.write(draft_data.shard_file(tmp_path, 64), given[3:])
    for one, other in zip(given, draft_data.load(tmp_path), strict=True):
        assert one.num_prompt_tokens == other.num_prompt_tokens
        assert (one.tokens == other.tokens).all()
        assert (one.top_ids == other.top_ids).all()
        assert (one.top_logp == other.top_logp).all()
    draft_data.shard_file(tmp_path, 64).write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"00000064\.npz cannot be read .*; delete it"):
        draft_data.load(tmp_path)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    sources.same_settings(tmp_path, {"samples": 2})
    sources.same_settings(tmp_path, {"samples": 2})
    with pytest.raises(ValueError, match=r"begun with other settings \(samples=3, was 2\)"):
        sources.same_settings(tmp_path, {"samples": 3})


def test_answers_in_the_place_of_prompts(target: Path, tmp_path: Path) -> None:
    """Those that servers have kept, of several folders; and one of the two must be given."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        draft_data.write(draft_data.shard_file(tmp_path / str(number), 0), answers(3))
    folders = [tmp_path / "0", tmp_path / "1"]
    source = sources.Source(target, None, folders, own_prompts=0, samples=2, max_tokens=9, top_k=TOP_K)
    assert len(source.answers(tmp_path, {}, nothing, verbose=False)) == 6
    assert source.settings()["answers"] == [str(folder) for folder in folders]
    for prompts, given, own in ((None, None, 0), (["x.jsonl"], folders, 0), (None, folders, 5)):
        with pytest.raises(ValueError, match="one of them must be given, and not both"):
            sources.Source(target, prompts, given, own_prompts=own, samples=2, max_tokens=9, top_k=TOP_K)


class Writer:
    """Says what it is told to, as vLLM's ``LLM`` does, behind what its template puts before a user's words."""

    def __init__(self, *said: tuple[str, str]) -> None:
        self.said, self.asked = said, 0

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            apply_chat_template=lambda messages, tokenize: f"system.user:{messages[0]['content']}.end",
            encode=lambda text, add_special_tokens: list(text.encode()),
        )

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert all(prompt == {"prompt_token_ids": list(b"system.user:")} for prompt in prompts)
        self.asked += len(prompts)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=reason)])
            for text, reason in self.said
        ]


def test_the_target_writes_prompts(tmp_path: Path) -> None:
    """Each once and to its end; one that never ends them is refused, and leaves no file."""
    pytest.importorskip("vllm")
    file = tmp_path / "own.jsonl"
    writer = Writer((" How?\n", "stop"), ("How?", "stop"), ("", "stop"), ("cut", "length"), ("Why?", "stop"))
    draft_data._write_prompts(writer, 2, file, nothing)
    assert [json.loads(line) for line in file.read_text().splitlines()] == ["How?", "Why?"]
    assert writer.asked > 0
    with pytest.raises(ValueError, match=r"--own-prompts=2 is not allowed.* ended none within 256 tokens"):
        draft_data._write_prompts(Writer(("cut", "length")), 2, tmp_path / "none.jsonl", nothing)
    with pytest.raises(ValueError, match="new beside 1"):
        draft_data._write_prompts(Writer(("How?", "stop")), 2, tmp_path / "none.jsonl", nothing)
    assert not (tmp_path / "none.jsonl").exists()


def test_the_draft_is_a_checkpoint_like_any_other(target: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model(target, SHAPE, "cpu")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(model(ids).logits, again(ids).logits)
    assert again.lm_head.weight is again.model.embed_tokens.weight
