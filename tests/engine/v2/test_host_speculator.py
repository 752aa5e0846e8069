# SPDX-License-Identifier: Apache-2.0
"""Between V2's tensors and a drafter on the host, without an engine: what a step says arrives, its trees get back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_ext.config import speculative
from vllm_ext.engine.v2.speculators import base, host, tree_rows
from vllm_ext.engine.v2.speculators.base import StepRows
from vllm_ext.engine.v2.speculators.host import HostSpeculator
from vllm_ext.engine.v2.speculators.host_drafter import Verified
from vllm_ext.kernels.device_trees import RowLayout
from vllm_ext.kernels.recycling import WalkedRows
from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.proposers.base import Proposer, Request
from vllm_ext.proposers.tree import DraftTree

VOCAB, SLOTS, NODES, WIDTH = 30, 3, 4, 2


class Silent(Proposer):
    """Drafts nothing."""

    summary: ClassVar[str] = "drafts nothing"
    paper: ClassVar[str] = "none"
    verified_top_k = WIDTH

    @classmethod
    def from_options(cls, options: Any, vocab_size: int) -> Silent:
        return cls()

    @property
    def memory_bytes(self) -> int:
        return 0

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [DraftTree.empty() for _ in requests]


class OnHost:
    """vLLM's buffer that host and device both see; its own is in pinned memory, which wants a driver."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)
        self.np = self.gpu.numpy()

    def copy_to_uva(self) -> None:
        """The same memory."""


@pytest.fixture
def speculator(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostSpeculator]:
    monkeypatch.setattr(base, "UvaBackedTensor", OnHost)
    alone = SimpleNamespace(broadcast=lambda tensor: tensor)
    monkeypatch.setattr(host, "get_tp_group", lambda: alone)
    monkeypatch.setattr(speculative.Settings, "proposer_class", Silent)
    speculation = {"method": "suffix_tree", "num_speculative_tokens": NODES}
    vllm_config = SimpleNamespace(
        additional_config={"vllm_ext": {"speculation": speculation}},
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=50),
        parallel_config=SimpleNamespace(rank=0, world_size=1, data_parallel_index=0),
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS, scheduler_cls=None),
        structured_outputs_config=None,
    )
    made = HostSpeculator(vllm_config, torch.device("cpu"), None)
    made.load(None)
    made.serve()
    return made


def watch(
    speculator: HostSpeculator, monkeypatch: pytest.MonkeyPatch, trees: list[DraftTree]
) -> list[tuple[list[str], Verified, int]]:
    """What the drafter is told from now on; it answers with these trees."""
    told: list[tuple[list[str], Verified, int]] = []

    def step(names: list[str], verified: Verified, level: int) -> Any:
        told.append((names, verified, level))
        return trees, np.array([21, 22], np.int32)[: len(trees)]

    monkeypatch.setattr(speculator.drafts, "step", step)
    return told


def batch(names: list[str], slots: list[int], row_start: list[int], prefill_len: int = 0) -> Any:
    return SimpleNamespace(
        req_ids=names,
        num_reqs=len(names),
        idx_mapping=torch.tensor(slots, dtype=torch.int32),
        idx_mapping_np=np.array(slots),
        cu_num_logits_np=np.array(row_start),
        num_computed_tokens_np=np.full(len(names), 10),
        num_scheduled_tokens=np.diff(row_start),
        prefill_len_np=np.full(len(names), prefill_len),
    )


def step_rows(
    logits: torch.Tensor,
    tokens: list[int],
    emitted: list[list[int]],
    num_emitted: list[int],
    accepted: list[int] | None = None,
    parents: list[int] | None = None,
) -> StepRows:
    """As the device leaves them; without parents of a step that had no drafts."""
    layout = None
    if parents is not None:
        layout = RowLayout.of_size(SLOTS, SLOTS * (1 + NODES), torch.device("cpu"))
        layout.parents[: len(parents)] = torch.tensor(parents)
    nothing = torch.empty(0)
    verified = WalkedRows(
        nothing,
        nothing,
        torch.tensor(tokens, dtype=torch.int32),
        nothing,
        torch.tensor(accepted or [1] * len(tokens), dtype=torch.int32),
        torch.tensor(emitted),
        torch.tensor(num_emitted, dtype=torch.int32),
    )
    return StepRows(logits, verified, layout)


def test_what_a_step_says_arrives_whole(speculator: HostSpeculator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: logits read as integers, accepted and drafted exchanged, sampled tokens of the flat list."""
    tree = DraftTree(
        np.array([7, 8, 9], np.int32), np.array([-1, -1, 0], np.int32), np.array([0.6, 0.4, 0.2], np.float32)
    )
    told = watch(speculator, monkeypatch, [DraftTree.empty(), tree])
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    sampled = [[6, 11, 0, 0, 0], [12, 0, 0, 0, 0]]
    speculator.learn(step_rows(logits, [4, 5, 6, 7, 8], sampled, [2, 1], [1, 0, 1, 1, 0], [-1, 0, 0, -1, 0]))
    drafts = speculator.propose(batch(["a", "b"], [2, 0], [0, 3, 5]), num_speculative_tokens=3)
    ((names, verified, level),) = told
    assert (names, level) == (["a", "b"], 3)
    assert verified.row_start.tolist() == [0, 3, 5]
    assert verified.tokens.tolist() == [4, 5, 6, 7, 8]
    assert verified.parents.tolist() == [-1, 0, 0, -1, 0]
    assert verified.drafted.tolist() == [False, True, True, False, True]
    assert verified.accepted.tolist() == [True, False, True, True, False]
    assert verified.sampled == [[6, 11], [12]]
    expected = top_k_ids(logits, WIDTH, "torch")
    assert verified.top_ids.tolist() == expected.tolist()
    assert verified.top_logits.tolist() == logits.float().gather(1, expected.long()).tolist()
    assert drafts.tolist() == [[21] * 4, [7, 8, 9, 22]]
    # Of slot 2 the tree without nodes, of slot 0 the other; slot 1 has none yet.
    assert speculator.trees.parents.tolist() == [[-1, 0, 0, 1, -1], [-1] * 5, [-1] * 5]
    assert speculator.trees.depths.tolist() == [[0, 1, 1, 2, 1], [0, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert speculator.trees.bits[0, :, 0].tolist() == [1, 0b11, 0b101, 0b1011, 0b10000]
    assert not (speculator.trees.groups >= 0).any()


def test_of_a_step_without_drafts_each_row_is_a_root(
    speculator: HostSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = watch(speculator, monkeypatch, [])
    before = [part.clone() for part in speculator.trees]
    speculator.learn(step_rows(torch.zeros((2, VOCAB)), [4, 5], [[6], [7]], [1, 0]))
    made = batch(["a", "b"], [1, 0], [0, 1, 2])
    assert speculator.propose(made, dummy_run=True).shape == (2, NODES)
    assert not told
    # Level 0: the drafter hears of the step, and no tree is written.
    assert speculator.propose(made, num_speculative_tokens=0).shape == (2, NODES)
    ((_, verified, level),) = told
    assert level == 0
    assert verified.parents.tolist() == [-1, -1]
    assert verified.drafted.tolist() == [False, False]
    assert verified.accepted.tolist() == [True, True]
    assert verified.sampled == [[6], []]
    assert all(torch.equal(a, b) for a, b in zip(speculator.trees, before, strict=True))


def test_ranks_verify_the_trees_of_the_first(
    speculator: HostSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the proposer has failed, on rank 0 it has not."""
    watch(speculator, monkeypatch, [DraftTree.empty()])
    tree = DraftTree(np.array([7], np.int32), np.array([-1], np.int32), np.array([0.6], np.float32))
    first = torch.from_numpy(tree_rows.pack([tree], np.array([21], np.int32), NODES))
    group = SimpleNamespace(broadcast=lambda tensor: tensor.copy_(first))
    monkeypatch.setattr(host, "get_tp_group", lambda: group)
    speculator.learn(step_rows(torch.zeros((1, VOCAB)), [4], [[6]], [1]))
    drafts = speculator.propose(batch(["a"], [1], [0, 1]), num_speculative_tokens=NODES)
    assert drafts.tolist() == [[7, 21, 21, 21]]
    assert speculator.trees.parents[1].tolist() == [-1, 0, -1, -1, -1]


def test_rows_behind_a_prompt_are_no_nodes(
    speculator: HostSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root is the prompt's last token, at 10; vLLM has filled the rows behind it up."""
    told = watch(speculator, monkeypatch, [DraftTree.empty()])
    rows = step_rows(torch.zeros((3, VOCAB)), [4, 4, 4], [[6, 0, 0, 0, 0]], [1], [1, 0, 0], [-1, 0, 1])
    speculator.learn(rows)
    speculator.propose(batch(["a"], [1], [0, 3], prefill_len=11), num_speculative_tokens=NODES)
    speculator.learn(rows)
    speculator.propose(batch(["a"], [1], [0, 3], prefill_len=10), num_speculative_tokens=NODES)
    assert [verified.drafted.tolist() for _, verified, _ in told] == [[False] * 3, [False, True, True]]
    assert told[0][1].parents.tolist() == [-1, -1, -1]


def test_without_drafts_nothing_is_waited_for(
    speculator: HostSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proposer hears of such a step in the next one that drafts, or in one in which it has arrived."""
    told = watch(speculator, monkeypatch, [DraftTree.empty()])
    waited: list[int] = []

    def send(number: int, here: bool) -> None:
        speculator.learn(step_rows(torch.zeros((1, VOCAB)), [number], [[6]], [1]))
        assert speculator._sent is not None
        event = SimpleNamespace(query=lambda: here, synchronize=lambda: waited.append(number))
        speculator._sent = speculator._sent[0], event, *speculator._sent[2:]

    made = batch(["a"], [1], [0, 1])
    for number, here in ((1, False), (2, True), (3, False)):
        send(number, here)
        speculator.propose(made, num_speculative_tokens=0)
    assert not told
    speculator.finish([])
    send(4, False)
    speculator.propose(made, num_speculative_tokens=2)
    assert [(verified.tokens.tolist(), level) for _, verified, level in told] == [
        ([1], 0),
        ([2], 0),
        ([3], 0),
        ([4], 2),
    ]
    assert waited == [1, 2, 3, 4]
    send(5, True)
    speculator.propose(made, num_speculative_tokens=0)
    assert told[-1][1].tokens.tolist() == [5]


@pytest.mark.parametrize(
    ("structured", "path_dependent", "chain", "depth"),
    [
        (None, False, False, NODES),
        ("schema", False, True, NODES),
        (None, True, False, base.SLOW_DEPTH),
    ],
)
def test_the_drafter_is_told_what_can_be_verified(
    speculator: HostSpeculator,
    monkeypatch: pytest.MonkeyPatch,
    structured: Any,
    path_dependent: bool,
    chain: bool,
    depth: int,
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(speculator.drafts, "admit", lambda *args: told.append(args))
    request = SimpleNamespace(sampling_params=SimpleNamespace(structured_outputs=structured, extra_args=None))
    speculator.admit(1, request, path_dependent)
    assert told == [(request, chain, depth)]
    assert speculator.teaches.tolist() == [0, int(structured is None), 0]
    # Of one that is switched off nobody hears.
    request.sampling_params.extra_args = {"speculation": False}
    speculator.admit(1, request, path_dependent)
    assert len(told) == 1
    assert speculator.teaches.tolist() == [0, 0, 0]
