# SPDX-License-Identifier: Apache-2.0
"""The search for a draft's layers: a set that was planted is found, and not where the wrong children survive."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from typer.testing import CliRunner

from vllm_ext.cli.train import train_app
from vllm_ext.data import answers as draft_data
from vllm_ext.data.answers import Answer
from vllm_ext.training.draft_model import Recipe
from vllm_ext.training.drafts.layer_search import AnswerLoss, Layers, SearchRecipe, mutated, search, spread

VOCAB, NUM_LAYERS, TOP_K = 64, 8, 4
PLANTED: Layers = (1, 3, 4)  # the layers that do anything
QUICK = SearchRecipe(children=8, survivors=(4, 2), answers=(1, 2, 6), minutes=5.0, generations=40)


def test_children_have_as_many_layers() -> None:
    """One to three others; one the most often, by the smaller of two draws."""
    noise = np.random.default_rng(0)
    parent: Layers = (0, 3, 5, 9)
    switched = []
    for _ in range(900):
        child = mutated(parent, 12, 3, noise)
        assert len(child) == len(set(child)) == 4
        assert list(child) == sorted(child)
        assert set(child) <= set(range(12))
        switched.append(len(set(child) - set(parent)))
    # Of 9 pairs of draws 5 have a 1, 3 a 2 at least, and 1 both 3; a switch may be taken back.
    counts = np.bincount(switched, minlength=4)
    assert counts[1] > counts[2] > counts[3] > 0
    assert counts[1] > 0.5 * 900
    assert mutated((0, 1), 2, 3, noise) == (0, 1)  # there are no others


def test_it_begins_evenly() -> None:
    assert spread(30, 4) == (0, 10, 19, 29)
    assert spread(30, 1) == (0,)
    assert spread(5, 5) == (0, 1, 2, 3, 4)


def noisy(layers: Layers, answers: int) -> float:
    """The fewer the answers, the less it says of how many of the layers are the best ones."""
    best = {2, 3, 11, 17, 23, 28}
    noise = np.random.default_rng([answers, *layers]).standard_normal()
    return len(best - set(layers)) + 0.6 * float(noise) / answers


def test_a_planted_set_is_found_among_many() -> None:
    """There are 593,775 sets of 6 layers of 30; a hundred generations score less than a hundredth of them."""
    recipe = SearchRecipe(minutes=5.0, generations=100, answers=(1, 4, 16))
    found = search(noisy, 30, spread(30, 6), recipe)
    assert found.layers == (2, 3, 11, 17, 23, 28)
    assert found.scored < 5000
    assert found == search(noisy, 30, spread(30, 6), recipe)


def test_it_is_not_found_where_the_wrong_ones_survive() -> None:
    """The mutation: the first rounds keep the worst children."""

    def inverted(layers: Layers, answers: int) -> float:
        return noisy(layers, answers) * (1.0 if answers == 16 else -1.0)

    recipe = SearchRecipe(minutes=5.0, generations=100, answers=(1, 4, 16))
    assert search(inverted, 30, spread(30, 6), recipe).layers != (2, 3, 11, 17, 23, 28)


def test_what_was_found_never_gets_worse() -> None:
    """On all answers; however little the first rounds say."""
    losses: list[float] = []

    def score(layers: Layers, answers: int) -> float:
        return float(np.random.default_rng([answers, *layers]).random())

    for generations in range(1, 12):
        recipe = SearchRecipe(minutes=5.0, generations=generations, answers=(1, 2, 3))
        losses.append(search(score, 20, spread(20, 5), recipe).loss)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_no_time_is_no_search() -> None:
    found = search(noisy, 30, (5, 2, 9), SearchRecipe(minutes=0.0))
    assert (found.layers, found.generations) == ((2, 5, 9), 0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, of which three do anything: the others add nothing to what they are given."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for place, layer in enumerate(model.model.layers):
            if place not in PLANTED:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return folder


def whole(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def answers_of(folder: Path, count: int = 8) -> list[Answer]:
    """What the target says, and how likely it finds its four best tokens."""
    model = whole(folder)
    noise = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        tokens = torch.randint(VOCAB, (24,), generator=noise)
        logp = model(input_ids=tokens[None]).logits[0].log_softmax(1)
        top = logp[3:-1].topk(TOP_K)
        made.append(
            Answer(tokens.int().numpy(), 4, top.indices.int().numpy(), top.values.numpy().astype(np.float32))
        )
    return made


def test_the_layers_that_do_anything_are_found(target: Path) -> None:
    """And no other set of three is as good, by trying all of them."""
    model, given = whole(target), answers_of(target)
    before = model(input_ids=torch.arange(9)[None]).logits
    score = AnswerLoss(model, given, Recipe())
    found = search(score, score.num_layers, spread(NUM_LAYERS, 3), QUICK)
    assert found.layers == PLANTED
    every = {layers: score(layers, 6) for layers in itertools.combinations(range(NUM_LAYERS), 3)}
    assert min(every, key=every.__getitem__) == PLANTED
    assert found.loss == pytest.approx(every[PLANTED])
    assert found.loss == pytest.approx(score(tuple(range(NUM_LAYERS)), 6), rel=1e-5)
    score.close()
    torch.testing.assert_close(model(input_ids=torch.arange(9)[None]).logits, before)


def test_a_draft_of_searched_layers_is_trained(target: Path, tmp_path: Path) -> None:
    """The command says which they are, and keeps them in the draft's configuration; run again it does not search."""
    draft_data.write(tmp_path / "kept.npz", answers_of(target, 24))
    given = ["--model", str(target), "--answers", str(tmp_path), "--output", str(tmp_path / "out")]
    given += ["--minutes", "0.01", "--search-layers", "3", "--search-minutes", "0.2"]
    result = CliRunner().invoke(train_app, ["draft", *given])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "layers 1,3,4 of 8" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["target_layers"] == list(PLANTED)
    assert config["num_hidden_layers"] == 3
    (tmp_path / "out" / "work" / "layers.json").write_text("[0, 3, 4]")
    assert "generation" not in CliRunner().invoke(train_app, ["draft", *given]).output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["target_layers"] == [0, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--search-layers", "3", "--layers", "1,2"],
            "--search-layers=3 and --layers=1,2 are not allowed together",
        ),
        (
            ["--search-layers", "3", "--start", "x"],
            "--search-layers=3 and --start=x are not allowed together",
        ),
        (["--search-layers", "8"], "--search-layers=8 is not allowed for .*: 1 to 7"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    target: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    import re

    common = ["draft", "--model", str(target), "--output", str(tmp_path / "out"), "--own-prompts", "4"]
    result = CliRunner().invoke(train_app, common + arguments)
    assert result.exit_code == 2, result.output
    assert re.search(message, " ".join(result.output.split()))
