# SPDX-License-Identifier: Apache-2.0
"""Clover heads: what they say by a loop, that a node depends on its branch, and which checkpoints are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_clover
import torch
from tiny_heads import of_target

from vllm_ext.engine.models.clover_heads import CloverHeads, check, load, read_shape
from vllm_ext.engine.models.node_states import NodeStates
from vllm_ext.proposers.sampled import ROOT

WIDTH, VOCAB, ROWS = 16, 64, 40
TOKEN_MAP = torch.arange(3, 3 + ROWS)


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return tiny_clover.drawn(torch.randn(ROWS, WIDTH, generator=draw))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return tiny_clover.write(tmp_path / "heads", weights(), TOKEN_MAP, VOCAB)


@pytest.fixture
def heads(folder: str) -> CloverHeads:
    return load(folder, torch.float32, torch.device("cpu"))


def normed(row: torch.Tensor) -> torch.Tensor:
    return row / torch.sqrt((row * row).mean() + 1e-6)


def reference(hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    """Of one text, log-probabilities ``[VOCAB]`` behind the embeddings ``[num_tokens, WIDTH]`` of a branch."""
    w = weights()
    silu = torch.nn.functional.silu
    state = hidden + silu(w["augment.weight"] @ hidden)
    for embed in branch:
        state = state + w["regress.weight"] @ torch.cat([normed(state), normed(embed)])
        gate, up = (w["gate_up.weight"] @ normed(state)).chunk(2)
        state = state + w["down.weight"] @ (silu(gate) * up)
    logits = torch.full((VOCAB,), -torch.inf)
    logits[TOKEN_MAP] = w["lm_head.weight"] @ (normed(state) * w["norm"])
    return logits.log_softmax(0)


def branches() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states ``[5, WIDTH]`` and embeddings of three tokens each ``[5, 3, WIDTH]``, at some scale."""
    draw = torch.Generator().manual_seed(2)
    return torch.randn(5, WIDTH, generator=draw), 7.0 * torch.randn(5, 3, WIDTH, generator=draw)


def assert_says(heads: CloverHeads, states: torch.Tensor, wanted: torch.Tensor) -> None:
    ids, log_q = heads.distributions(states)
    assert (ids.dtype, ids.shape[1]) == (torch.int32, 32)
    best = wanted.topk(32, 1)
    assert ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(log_q, best.values, rtol=1e-4, atol=1e-4)


def test_what_heads_say_in_batches(heads: CloverHeads) -> None:
    """A batch says what each of its rows says alone: a loop's."""
    hidden, embeds = branches()
    states = heads.first(hidden, embeds[:, 0])
    for depth in range(3):
        if depth:
            states = heads.following(states, embeds[:, depth])
        wanted = torch.stack(
            [reference(h, branch[: depth + 1]) for h, branch in zip(hidden, embeds, strict=True)]
        )
        assert_says(heads, states, wanted)


def test_a_node_depends_on_its_branch(heads: CloverHeads) -> None:
    """On each token of it; and where a token is ignored, this is seen."""
    hidden, embeds = branches()
    hidden = hidden[:1].expand(5, -1)

    def spread() -> list[float]:
        """By which token of the branch differs, how much the state behind it differs at least."""
        found = []
        for differs in range(3):
            branch = embeds[:1].expand(5, -1, -1).clone()
            branch[:, differs] = embeds[:, differs]
            states = heads.first(hidden, branch[:, 0])
            for depth in (1, 2):
                states = heads.following(states, branch[:, depth])
            logits = heads.logits(states)
            found.append(float((logits[1:] - logits[:1]).abs().amax(1).min()))
        return found

    assert min(spread()) > 0.1
    with torch.no_grad():
        heads.regress.weight[:, WIDTH:] = 0.0  # the mutation
    assert max(spread()) < 1e-5


def test_nodes_go_on_from_their_parents() -> None:
    states = NodeStates()
    states.keep(["a", "b"], torch.tensor([[1.0], [2.0]]))
    assert states.at(["b", "a"], [ROOT, ROOT]).tolist() == [[2.0], [1.0]]
    states.keep(["a", "a", "b"], torch.tensor([[10.0], [11.0], [20.0]]))
    states.keep(["b"], torch.tensor([[21.0]]))
    assert states.at(["a", "b", "b", "a"], [1, 1, 0, ROOT]).tolist() == [[11.0], [21.0], [20.0], [1.0]]
    states.clear()
    states.keep(["b"], torch.tensor([[3.0]]))
    assert states.at(["b"], [ROOT]).tolist() == [[3.0]]


def test_what_is_refused(folder: str, tmp_path: Path) -> None:
    assert check(of_target(WIDTH, VOCAB), folder).num_rows == ROWS
    with pytest.raises(
        ValueError, match=r"model='.*': its hidden_size is 16, that of target 32.*--kind clover"
    ):
        check(of_target(32, VOCAB), folder)
    with pytest.raises(ValueError, match="its vocab_size is 64, that of target 65"):
        check(of_target(WIDTH, 65), folder)
    with pytest.raises(ValueError, match=r"cannot be read.*--kind clover"):
        read_shape(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"architectures": ["MedusaModel"]},
            r"no checkpoint of Clover heads: architectures=\['MedusaModel'\]",
        ),
        ({"architectures": None}, "no checkpoint of Clover heads: architectures=None"),
        ({"num_rows": None}, "num_rows=None, not an integer of at least 1"),
        ({"intermediate_size": 0}, "intermediate_size=0, not an integer of at least 1"),
        ({"hidden_size": 8}, r"norm is \[16\], not 8"),
        ({"intermediate_size": 8}, r"gate_up.weight is \[96, 16\], not 16 x 16"),
        ({"num_rows": 41}, r"token_map is \[40\], not 41"),
        ({"vocab_size": 42}, "token_map has ids that are not below vocab_size=42"),
    ],
)
def test_configs_that_do_not_fit(folder: str, changed: dict[str, Any], problem: str) -> None:
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(ValueError, match=f"speculative_config.model=.*{problem}.*--kind clover"):
        load(folder, torch.float32, torch.device("cpu"))


def test_missing_weights(folder: str) -> None:
    from safetensors.torch import load_file, save_file

    file = Path(folder) / "model.safetensors"
    stored = load_file(file)
    del stored["down.weight"]
    save_file(stored, file)
    with pytest.raises(ValueError, match=r"its weights have no down\.weight"):
        load(folder, torch.float32, torch.device("cpu"))
    file.unlink()
    with pytest.raises(ValueError, match="has no weights"):
        load(folder, torch.float32, torch.device("cpu"))
