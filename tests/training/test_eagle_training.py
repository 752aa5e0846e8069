# SPDX-License-Identifier: Apache-2.0
"""Training a head of EAGLE-3, in seconds: a random Llama whose answers follow a rule that a head can learn."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from typer.testing import CliRunner

from vllm_ext.cli.train import train_app
from vllm_ext.data import answers as kept_answers
from vllm_ext.data.answers import Answer
from vllm_ext.proposers.sampled import ROOT
from vllm_ext.training.draft_model import Recipe
from vllm_ext.training.eagle import EagleShape, Head, begun, default_layers, save
from vllm_ext.training.eagle_relatives.chimera import ChimeraHead
from vllm_ext.training.eagle_relatives.falcon import FalconHead
from vllm_ext.training.eagle_relatives.fspad import FspadHead
from vllm_ext.training.eagle_texts import EagleTexts, batch_of, batches_of, read
from vllm_ext.training.eagle_training import train, unrolled
from vllm_ext.training.figures.common import RANKS
from vllm_ext.training.figures.eagle import Grown, figures

VOCAB, WIDTH, SAID = 64, 32, 40
SHAPE = EagleShape((1, 2, 4), SAID, 48)


def nothing(*_: Any) -> None:
    """No progress bar."""


def answers(count: int, sampled: bool = False) -> list[Answer]:
    """Each token's successor is the next but four, most of the time; of many lengths."""
    made = []
    for number in range(count):
        draw = np.random.default_rng(number)
        prompt, outputs = 1 + number % 7, 12 + number % 9
        tokens = [(number + 5 * place) % SAID for place in range(prompt + outputs)]
        top_ids = np.array([[token, (token + 1) % SAID] for token in tokens[prompt:]], np.int32)
        top_logp = np.tile(np.log(np.array([0.9, 0.05], np.float32)), (outputs, 1))
        if sampled:
            tokens[prompt + int(draw.integers(outputs))] = 3
        made.append(Answer(np.array(tokens, np.int32), prompt, top_ids, top_logp))
    return made


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        rms_norm_eps=1e-5,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts(model: Any) -> EagleTexts:
    return read(model, SHAPE.aux_layers, answers(30), 10_000, nothing)


@pytest.fixture
def head(model: Any, texts: EagleTexts) -> Head:
    return random(model, texts, Head)


def random(model: Any, texts: EagleTexts, kind: type[Head]) -> Head:
    """Of weights that make everything in it matter."""
    torch.manual_seed(1)
    made = begun(model, SHAPE, texts.frequent, torch.float32, kind)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return made.eval()


def test_rows_hold_what_the_target_computed(model: Any, texts: EagleTexts) -> None:
    """Each answer's features, its next tokens, and its distributions one token further on."""
    given = answers(30)
    for number in (0, 5, 29):
        answer = given[number]
        ids = torch.from_numpy(answer.tokens).long()[None]
        states = model(ids, output_hidden_states=True).hidden_states
        rows = slice(int(texts.starts[number]), int(texts.starts[number + 1]))
        length = len(answer.tokens) - 2
        wanted = torch.cat([states[layer][0, :length] for layer in SHAPE.aux_layers], 1)
        torch.testing.assert_close(texts.aux[rows].float(), wanted, rtol=2e-2, atol=2e-2)
        assert texts.tokens[rows].tolist() == answer.tokens[1:-1].tolist()
        assert texts.positions[rows].tolist() == list(range(length))
        learning = slice(int(texts.learn_starts[number]), int(texts.learn_starts[number + 1]))
        assert texts.top_ids[learning].tolist() == answer.top_ids[1:].tolist()
    assert texts.greedy.all()
    assert not read(model, (1,), answers(3, sampled=True), 99, nothing).greedy.all()


def test_the_last_layers_state_is_what_its_norm_gets(model: Any) -> None:
    found = read(model, (6,), answers(1), 99, nothing)
    ids = torch.from_numpy(answers(1)[0].tokens).long()[None]
    wanted = model(ids, output_hidden_states=True).hidden_states[-1][0, :-2]
    torch.testing.assert_close(model.model.norm(found.aux.float()), wanted, rtol=3e-2, atol=3e-2)


def test_long_answers_lose_their_beginning(model: Any, texts: EagleTexts) -> None:
    cut = read(model, SHAPE.aux_layers, answers(30), 10_000, nothing, max_length=9)
    number = 29
    end, cut_end = int(texts.starts[number + 1]), int(cut.starts[number + 1])
    assert int(cut.starts[number]) == cut_end - 9
    assert cut.positions[cut_end - 9 :].tolist() == texts.positions[end - 9 :].tolist()
    assert torch.equal(cut.aux[cut_end - 9 :], texts.aux[end - 9 :])
    assert torch.equal(cut.top_ids[-9:], texts.top_ids[-9:])


def _plain(head: Head, tokens: list[int], features: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """What the last of these rows puts out, by loops over what the paper says."""
    weights = {name: tensor.double() for name, tensor in head.state_dict().items()}
    eps = head.config["rms_norm_eps"]
    layer = "midlayer.self_attn."

    def norm(row: torch.Tensor, name: str) -> torch.Tensor:
        return torch.mul(row / (row.pow(2).mean() + eps).sqrt(), weights[name])

    def turned(row: torch.Tensor, position: int) -> torch.Tensor:
        made = row.clone()
        half = head.head_dim // 2
        for start in range(0, len(row), head.head_dim):
            for pair in range(half):
                angle = position * head.config["rope_parameters"]["rope_theta"] ** (-pair / half)
                a, b = row[start + pair], row[start + pair + half]
                made[start + pair] = a * math.cos(angle) - b * math.sin(angle)
                made[start + pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return made

    rows = [
        torch.cat(
            [
                norm(head.embedding[token].double(), "midlayer.input_layernorm.weight"),
                norm(feature, "midlayer.hidden_norm.weight"),
            ]
        )
        for token, feature in zip(tokens, features, strict=True)
    ]
    keys = [turned(weights[layer + "k_proj.weight"] @ r, p) for r, p in zip(rows, positions, strict=True)]
    values = [weights[layer + "v_proj.weight"] @ row for row in rows]
    query = turned(weights[layer + "q_proj.weight"] @ rows[-1], positions[-1])
    parts = []
    for number in range(head.num_heads):
        own = slice(number * head.head_dim, (number + 1) * head.head_dim)
        kv = number * head.num_kv_heads // head.num_heads
        of = slice(kv * head.head_dim, (kv + 1) * head.head_dim)
        scores = torch.stack([query[own] @ key[of] for key in keys]) / math.sqrt(head.head_dim)
        parts.append(sum(w * value[of] for w, value in zip(scores.softmax(0), values, strict=True)))
    middle = features[-1] + weights[layer + "o_proj.weight"] @ torch.cat(parts)
    inner = norm(middle, "midlayer.post_attention_layernorm.weight")
    gate = weights["midlayer.mlp.gate_proj.weight"] @ inner
    up = weights["midlayer.mlp.up_proj.weight"] @ inner
    return torch.add(middle, weights["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))


@torch.no_grad()
def test_passes_are_what_plain_loops_say(head: Head, texts: EagleTexts) -> None:
    """The first pass over the target's rows, and later ones over these and the chain's own."""
    some = [4, 11]
    passes = list(unrolled(head, texts, batch_of(texts, some), 4))
    start = 0
    for answer in some:
        rows = slice(int(texts.starts[answer]), int(texts.starts[answer + 1]))
        tokens, positions = texts.tokens[rows].tolist(), texts.positions[rows].tolist()
        features = texts.aux[rows].double() @ head.fc.weight.double().T
        learning = int(texts.learn_starts[answer + 1] - texts.learn_starts[answer])
        first = len(tokens) - learning
        for query in (0, 5, learning - 4):
            chain = features[: first + query + 1]
            for number in range(4):
                end = first + query + number + 1
                wanted = _plain(head, tokens[:end], chain, positions[:end])
                found = passes[number][start + query + number].double()
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
                chain = torch.cat([chain, wanted[None]])
        start += learning


@pytest.mark.parametrize("kind", [Head, FspadHead, FalconHead, ChimeraHead])
@torch.no_grad()
def test_a_pass_is_a_node_of_that_depth(model: Any, texts: EagleTexts, kind: type[Head]) -> None:
    """What training computes for a row of pass k is what growth computes for the k-th node of a chain."""
    head = random(model, texts, kind)
    some = [3, 8, 20]
    batch = batch_of(texts, some)
    passes = [head.logits(output).log_softmax(1) for output in unrolled(head, texts, batch, 5)]
    starts = torch.cumsum(torch.tensor([0, *torch.diff(texts.learn_starts)[some].tolist()]), 0)
    grown = Grown(head, texts, some, 16)
    for place in (0, 2, 6):
        grown.places[:] = place
        ids = [str(number) for number in range(3)]
        rows = grown.roots(ids)
        for number in range(5):
            at = (starts[:3] + place + number).tolist()
            best = passes[number][at].topk(min(RANKS, SAID), 1)
            np.testing.assert_allclose(rows.log_q, best.values.numpy(), rtol=1e-3, atol=1e-3)
            assert (rows.ids[:, 0] == head.token_map[best.indices[:, 0]].numpy()).all()
            came = [int(texts.top_ids[int(texts.learn_starts[a]) + place + number, 0]) for a in some]
            # Of the last text a node that does not belong to the path: nobody may read it.
            rows = grown.nodes(
                [*ids, "2"], [number - 1] * 2 + [_on_path(number)] + [ROOT], [*came, 7 + number]
            )
            rows = type(rows)(rows.ids[:3], rows.log_q[:3])


def _on_path(number: int) -> int:
    """Of a text whose every second node is on a path, its last one's place; the root's for the first."""
    return 2 * (number - 1) if number else ROOT


def test_batches_have_every_answer_once(texts: EagleTexts) -> None:
    for seed in (0, 1):
        parts = list(batches_of(texts, 50, seed))
        assert sorted(answer for part in parts for answer in part) == list(range(30))
        learning = [len(batch_of(texts, part).labels) for part in parts]
        assert 25 < np.mean(learning) < 75
    assert list(batches_of(texts, 50, 0)) != list(batches_of(texts, 50, 1))


@pytest.mark.parametrize(
    "kind",
    [Head, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (FspadHead, FalconHead, ChimeraHead))],
)
def test_it_learns_and_goes_on(model: Any, texts: EagleTexts, tmp_path: Path, kind: type[Head]) -> None:
    torch.manual_seed(0)
    head = begun(model, SHAPE, texts.frequent, torch.float32, kind)
    recipe = Recipe(minutes=0.15, batch_tokens=128, learning_rate=1e-2)
    before = figures(head, texts, (3,))
    curve, points = train(head, texts, 3, recipe, tmp_path, nothing, nothing, lambda: 1.0)
    assert [seen for seen, _ in points] == sorted(seen for seen, _ in points)
    assert curve[-1]["loss"] < 0.7 * curve[0]["loss"]
    found = figures(head, texts, (1, 3))
    assert found.right[:3, 0].min() > 0.95 > before.right[:3, 0].max()
    assert found.tokens_per_step[3][0] > 3.8
    assert 1.9 < found.tokens_per_step[1][0] <= 2.0
    assert found.num_tokens == int(texts.learn_starts[-1])
    # Again: it goes on, and has no time left.
    other = begun(model, SHAPE, texts.frequent, torch.float32, kind)
    train(other, texts, 3, recipe, tmp_path, nothing, nothing)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), other.parameters(), strict=True))


def test_what_is_saved_has_the_published_layout(head: Head, tmp_path: Path) -> None:
    save(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (WIDTH, 3 * WIDTH),
        "midlayer.input_layernorm.weight": (WIDTH,),
        "midlayer.hidden_norm.weight": (WIDTH,),
        "midlayer.self_attn.q_proj.weight": (WIDTH, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": (WIDTH // 2, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": (WIDTH // 2, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": (WIDTH, WIDTH),
        "midlayer.post_attention_layernorm.weight": (WIDTH,),
        "midlayer.mlp.gate_proj.weight": (48, WIDTH),
        "midlayer.mlp.up_proj.weight": (48, WIDTH),
        "midlayer.mlp.down_proj.weight": (WIDTH, 48),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (SAID, WIDTH),
        "d2t": (SAID,),
        "t2d": (VOCAB,),
    }
    said = tensors["d2t"] + torch.arange(SAID)
    assert torch.equal(said, head.token_map)
    assert torch.equal(torch.nonzero(tensors["t2d"])[:, 0], said)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, SAID)


def test_it_begins_as_the_targets_last_layer(model: Any, texts: EagleTexts) -> None:
    """What reads features has its weights; where the shapes differ, they are left out."""
    theirs = dict(model.model.layers[-1].named_parameters())
    for inner in (48, 40):
        head = begun(model, replace(SHAPE, intermediate_size=inner), texts.frequent, torch.float32)
        own = dict(head.midlayer.named_parameters())
        assert torch.equal(own["self_attn.k_proj.weight"][:, WIDTH:], theirs["self_attn.k_proj.weight"])
        assert torch.equal(own["self_attn.o_proj.weight"], theirs["self_attn.o_proj.weight"])
        assert torch.equal(own["hidden_norm.weight"], theirs["input_layernorm.weight"])
        assert (own["mlp.up_proj.weight"].shape == theirs["mlp.up_proj.weight"].shape) == (inner == 48)
        assert inner == 40 or torch.equal(own["mlp.up_proj.weight"], theirs["mlp.up_proj.weight"])
        assert torch.equal(head.lm_head.weight, model.lm_head.weight[head.token_map])
        late = head.fc.weight[:, -WIDTH:] - torch.eye(WIDTH)
        assert late.abs().max() < 0.02


def test_layers_are_vllms_own_unless_said() -> None:
    assert default_layers(30) == (2, 15, 27)


@pytest.mark.parametrize(
    ("kind", "options", "kept"),
    [
        (
            "eagle",
            ["--aux-layers", "1,2,6", "--num-passes", "2"],
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]},
        ),
        ("clover", ["--num-heads", "3"], {"num_heads": 3, "intermediate_size": 2 * WIDTH}),
    ],
)
def test_the_command_trains_and_goes_on(
    target: Path, tmp_path: Path, kind: str, options: list[str], kept: dict[str, Any]
) -> None:
    (tmp_path / "answers").mkdir()
    kept_answers.write(kept_answers.shard_file(tmp_path / "answers", 0), answers(40))
    output = tmp_path / "head"
    arguments = ["heads", "--kind", kind, "--model", str(target), "--answers", str(tmp_path / "answers")]
    arguments += ["--output", str(output), "--minutes", "0.05", "--vocabulary", "40", "--device", "cpu"]
    arguments += [*options, "--batch-tokens", "128"]
    result = CliRunner().invoke(train_app, arguments)
    assert result.exit_code == 0, result.output
    assert f'"method": "{kind}_tree"' in " ".join(result.output.split())
    assert "tokens a step with trees" in result.output
    first = load_file(output / "model.safetensors")
    config = json.loads((output / "config.json").read_text())
    assert kept.items() <= config.items()
    assert CliRunner().invoke(train_app, arguments).exit_code == 0
    again = load_file(output / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--kind", "eagle", "--num-heads", "3"], "--num-heads=3 is not allowed with --kind=eagle"),
        (["--kind", "medusa", "--num-passes", "3"], "--num-passes=3 is not allowed with --kind=medusa"),
        (["--kind", "hydra"], "--kind='hydra' is not allowed; allowed: medusa, clover, eagle"),
        (["--kind", "eagle", "--aux-layers", "2,7"], "--aux-layers=2,7 is not allowed; .* 1 to 6, and not 7"),
    ],
)
def test_what_does_not_fit_is_refused(target: Path, tmp_path: Path, given: list[str], message: str) -> None:
    arguments = ["heads", "--model", str(target), "--own-prompts", "2", "--output", str(tmp_path / "head")]
    result = CliRunner().invoke(train_app, arguments + given)
    assert result.exit_code != 0
    assert re.search(message, " ".join(result.output.split()))
    assert not (tmp_path / "head").exists()
