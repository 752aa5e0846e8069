# SPDX-License-Identifier: Apache-2.0
"""Token Recycling on the device: every form equals the readable one, and the host's drafter.

Steps are played as an engine has them: prompts, trees that are verified, learnt from and grown again. Without a GPU the
triton form runs through triton's interpreter: see `test_triton_forms`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from interpreter import IN_INTERPRETER

from vllm_ext.kernels import best_first_tree
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import EMPTY, RowLayout, SlotTrees, Walked, lay_out, walk
from vllm_ext.kernels.recycling import (
    FIRST_CALL,
    Calibration,
    Marks,
    RecyclingTables,
    WalkedRows,
    grow,
    learn,
    mark,
    record_prompts,
)
from vllm_ext.proposers import token_recycling_template
from vllm_ext.proposers.token_recycling import SHARES

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch", "numba"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, ROOM, DEPTHS = 5, 200, 4
BASES = 2 * (len(SHARES) + 1) + 4

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@dataclass
class Device:
    """All state of one drafter, driven by one backend."""

    backend: Backend
    vocab: int
    width: int
    nodes: int
    longest: int
    pairs: int
    texts: int
    template: torch.Tensor | None = None
    call: int = FIRST_CALL
    text: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        pairs, texts = (self.pairs, self.texts) if self.longest > 1 else (0, 0)
        self.tables = RecyclingTables.empty(self.vocab, self.width, pairs, texts, DEVICE)
        generator = torch.Generator().manual_seed(3)
        prior = torch.rand(self.longest, BASES, DEPTHS, generator=generator, dtype=torch.float64)
        self.calibration = Calibration.of_prior(prior.to(DEVICE), 8.0)
        self.trees = SlotTrees.of_size(SLOTS, self.nodes, DEVICE)
        self.layout = RowLayout.of_size(SLOTS, SLOTS * (1 + self.nodes), DEVICE)
        self.marks = Marks.of_size(SLOTS * (1 + self.nodes), DEVICE)
        self.text = torch.full((SLOTS, ROOM), EMPTY, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        self.prefill = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        self.shares = torch.from_numpy(SHARES).to(DEVICE)

    def start(self, prompts: dict[int, list[int]]) -> None:
        for slot, prompt in prompts.items():
            self.text[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
            self.lengths[slot] = self.prefill[slot] = len(prompt)
        slots = torch.tensor(list(prompts), device=DEVICE)
        most = max(map(len, prompts.values()))
        self.call += len(prompts)
        record_prompts(
            self.tables, self.text, slots, self.lengths, most, self.longest, self.call, self.backend
        )
        self.call += len(prompts)

    def propose(self, slots: torch.Tensor, chains: torch.Tensor, deepest: torch.Tensor) -> torch.Tensor:
        tokens = torch.full((len(slots), self.nodes), -7, dtype=torch.int64, device=DEVICE)
        grow(
            self.tables,
            self.calibration.estimates,
            self.text,
            self.lengths,
            slots,
            chains,
            deepest,
            self.template,
            self.longest,
            self.trees,
            tokens,
            self.backend,
        )
        return tokens

    def verify(
        self, slots: torch.Tensor, drafts: torch.Tensor, logits: torch.Tensor, teaches: torch.Tensor
    ) -> list[list[int]]:
        """Greedily, with the trees of the last `propose`; no drafts: a row for each request."""
        requests, level = len(slots), drafts.shape[1]
        rows = 1 + level
        start = torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=DEVICE)
        roots = self.text[slots, self.lengths[slots].long() - 1][:, None].to(torch.int64)
        tokens = torch.cat([roots, drafts], 1).flatten().to(torch.int32)
        seq_lens = (self.lengths[slots] + level).to(torch.int32)
        positions = torch.zeros(requests * rows, dtype=torch.int64, device=DEVICE)
        lay_out(self.trees, slots, start, start, seq_lens, positions, self.layout, self.backend)
        walked = Walked.of_size(requests, requests * rows, max(rows, 1 + self.nodes), DEVICE)
        sampled = logits.argmax(1)
        walk(
            start,
            slots,
            tokens,
            positions,
            self.layout.parents,
            sampled,
            None,
            self.prefill - 1,  # the prompt's last token is a root that tells
            seq_lens,
            walked,
            None,
            self.backend,
        )
        self.call += 1
        verified = WalkedRows(
            start, slots, tokens, positions, walked.accepted, walked.emitted, walked.num_emitted
        )
        mark(
            self.tables,
            self.calibration,
            verified,
            self.layout if level else None,
            self.text,
            self.prefill - 1,
            teaches,
            self.longest,
            self.call,
            self.marks,
            self.backend,
        )
        learn(self.tables, self.calibration, logits, tokens, self.shares, self.marks, self.backend)
        emitted = []
        for request, slot in enumerate(slots.tolist()):
            new = walked.emitted[request, : int(walked.num_emitted[request])]
            length = int(self.lengths[slot])
            self.text[slot, length : length + len(new)] = new.to(torch.int32)
            self.lengths[slot] += len(new)
            emitted.append(new.tolist())
        return emitted

    def parts(self) -> dict[str, torch.Tensor]:
        named = {f"tables.{name}": part for name, part in self.tables._asdict().items()}
        named |= {f"calibration.{name}": part for name, part in self.calibration._asdict().items()}
        return named | {f"trees.{name}": part for name, part in self.trees._asdict().items()}


def logits_of(tokens: torch.Tensor, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Of each row mostly what its token says: text that repeats itself."""
    base = torch.Generator().manual_seed(11)
    of_token = torch.randn(vocab, vocab, generator=base) * 2
    noise = torch.randn(len(tokens), vocab, generator=generator)
    return (of_token[tokens.cpu().long()] + 0.6 * noise).to(DEVICE)


def played(devices: list[Device], steps: int, vocab: int, level: int | None = None) -> list[list[list[int]]]:
    """The same requests on all of them; what was put out."""
    generator = torch.Generator().manual_seed(5)

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    for device in devices:
        device.start({3: [1, 2, 3, 1, 2, 4, 1], 0: [5, 6], 4: [2, 3, 1, 2, 5, 1, 2, 3]})
    outputs = []
    for step in range(steps):
        slots = torch.tensor([[3, 0, 4], [4, 3], [0, 3, 4]][step % 3], device=DEVICE)
        chains = (ints(4, SLOTS) == 0).to(torch.int32).to(DEVICE)
        deepest = ints(6, SLOTS).to(torch.int32).to(DEVICE)
        teaches = (ints(5, SLOTS) > 0).to(torch.int32).to(DEVICE)
        nodes = devices[0].nodes if level is None else level
        if step % 4 == 3:
            nodes = 0
        seed = int(ints(1 << 30, 1))
        results = []
        for device in devices:
            drafts = device.propose(slots, chains, deepest)[:, :nodes]
            roots = device.text[slots, device.lengths[slots].long() - 1][:, None].to(torch.int64)
            rows = torch.cat([roots, drafts], 1).flatten()
            logits = logits_of(rows, vocab, torch.Generator().manual_seed(seed))
            results.append((drafts, device.verify(slots, drafts, logits, teaches)))
        for drafts, emitted in results[1:]:
            assert torch.equal(drafts, results[0][0])
            assert emitted == results[0][1]
        outputs.append(results[0][1])
    return outputs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("width", "nodes", "longest", "static"),
    [
        (3, 6, 1, False),
        pytest.param(8, 15, 4, False, marks=pytest.mark.slow),
        (2, 7, 8, False),
        pytest.param(4, 40, 2, False, marks=pytest.mark.slow),
        (4, 8, 4, True),
        pytest.param(8, 15, 4, True, marks=pytest.mark.slow),
    ],
)
def test_the_forms_are_one(width: int, nodes: int, longest: int, static: bool, form: Backend) -> None:
    """Few places, so that contexts and pairs meet in them."""
    template = torch.from_numpy(token_recycling_template.positions(width)).to(DEVICE) if static else None
    devices = [Device(backend, 12, width, nodes, longest, 16, 32, template) for backend in (form, "torch")]
    outputs = played(devices, 9 if IN_INTERPRETER else 14, 12)
    assert sum(len(emitted) > 1 for step in outputs for emitted in step) > 5  # drafts are accepted
    for (name, part), other in zip(devices[0].parts().items(), devices[1].parts().values(), strict=True):
        assert torch.equal(part, other), name


@pytest.mark.parametrize("form", FORMS)
def test_trees_and_tables_are_the_hosts(form: Backend) -> None:
    """With room for all: the same rows, pairs and texts as `best_first_tree` records, and the same trees from them."""
    vocab, width, nodes, longest = 14, 4, 12, 4
    room = 1 << 22, 1 << 22  # no two contexts meet
    device = Device(form, vocab, width, nodes, longest, *room)
    host = best_first_tree.SuccessorTables.empty(vocab, width, *room)
    told: dict[int, int] = {}

    def tell(slot: int) -> None:
        length = int(device.lengths[slot])
        tokens = device.text[slot, :length].cpu().numpy()
        best_first_tree.record_text(host, tokens, told.get(slot, 1), longest)
        told[slot] = length

    prompts = {2: [1, 2, 3, 1, 2, 3, 4, 1, 2], 1: [5, 6, 1, 2, 3, 9]}
    device.start(prompts)
    for slot, prompt in prompts.items():
        for token, successor in itertools.pairwise(prompt):
            host.successors[token, 0] = successor
        tell(slot)
    generator = torch.Generator().manual_seed(2)
    slots = torch.tensor([2, 1], device=DEVICE)
    zeros = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    agreed, steps = 0, 6 if IN_INTERPRETER else 10
    for _ in range(steps):
        drafts = device.propose(slots, zeros, zeros + 5)
        contexts = np.full((2, longest), EMPTY, np.int32)
        for row, slot in zip(contexts, slots.tolist(), strict=True):
            tail = device.text[slot, : int(device.lengths[slot])].cpu().numpy()[-longest:]
            row[longest - len(tail) :] = tail
        made = best_first_tree.grow_trees(
            host,
            device.calibration.estimates.cpu().numpy(),
            contexts,
            np.full(2, nodes),
            np.full(2, 5),
            np.zeros(2, np.bool_),
            np.empty((0, width), np.int32),
        )
        for request, slot in enumerate(slots.tolist()):
            count = int(made.counts[request])
            assert count == int((device.trees.parents[slot] >= 0).sum())
            assert drafts[request, :count].tolist() == made.tokens[request, :count].tolist()
            parents = device.trees.parents[slot, 1 : 1 + count] - 1
            assert parents.tolist() == made.parents[request, :count].tolist()
            agreed += count
        before = [device.text[slot, : int(device.lengths[slot])].tolist() for slot in slots.tolist()]
        roots = torch.tensor([[text[-1]] for text in before], device=DEVICE)
        rows = torch.cat([roots, drafts], 1).flatten()
        logits = logits_of(rows, vocab, generator)
        device.verify(slots, drafts, logits, zeros + 1)
        top = logits.topk(width)
        real = device.layout.parents[: len(rows)].cpu().numpy() >= 0
        real[:: 1 + nodes] = True
        start = np.concatenate([[0], np.cumsum(real)]).astype(np.int32)[[0, 1 + nodes, 2 + 2 * nodes]]
        accepted = device.marks.rows.cpu().numpy()[: len(rows)] >> 20 & 1
        best_first_tree.record_rows(
            host,
            start,
            rows.cpu().numpy().astype(np.int32)[real],
            device.layout.parents[: len(rows)].cpu().numpy()[real],
            (accepted == 1)[real],
            np.array([text[-2] for text in before], np.int32),
            top.indices.cpu().numpy().astype(np.int32)[real],
            top.values.float().cpu().numpy()[real],
            SHARES,
        )
        for slot in slots.tolist():
            tell(slot)
        assert np.array_equal(device.tables.successors[:vocab].cpu().numpy(), host.successors[:vocab])
        assert np.array_equal(device.tables.classes[:vocab].cpu().numpy(), host.bases[:vocab])
    assert agreed > 15 * steps
    assert int((device.tables.pair_keys != 0).sum()) == int((host.pair_keys != 0).sum()) > 20
    assert int((device.tables.text_keys != 0).sum()) == int((host.text_keys != 0).sum()) > 40


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_there_is_not_written(form: Backend) -> None:
    """Tokens outside the vocabulary, requests whose prompt is incomplete, and those that teach nothing."""
    devices = [Device(backend, 9, 2, 3, 3, 16, 32) for backend in (form, "torch")]
    for device in devices:
        device.start({1: [1, 2, 20, -1, 3], 2: [4]})
        seeded = device.tables.successors[:, 0].tolist()
        assert seeded[:5] == [EMPTY, 2, EMPTY, EMPTY, EMPTY]
        before = [part.clone() for part in device.tables[:5]]
        device.prefill[1] = 9  # the prompt goes on
        slots = torch.tensor([1, 2], device=DEVICE)
        nothing = torch.zeros((2, 0), dtype=torch.int64, device=DEVICE)
        zeros = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        device.verify(slots, nothing, logits_of(torch.tensor([3, 4]), 9, torch.Generator()), zeros)
        for old, new in zip(before[:3], device.tables[:3], strict=True):
            assert torch.equal(old, new)
    for (name, part), other in zip(devices[0].parts().items(), devices[1].parts().values(), strict=True):
        assert torch.equal(part, other), name


@pytest.mark.parametrize("form", FORMS)
def test_right_nodes_count(form: Backend) -> None:
    """Chains of a token that follows itself: of their nodes more is promised each time, of others nothing new."""
    device = Device(form, 6, 2, 3, 1, 0, 0)
    half = torch.full((1, BASES, DEPTHS), 0.5, dtype=torch.float64, device=DEVICE)
    device.calibration = Calibration.of_prior(half, 8.0)
    device.start({0: [2, 2]})
    slots = torch.tensor([0], device=DEVICE)
    ones = torch.ones(SLOTS, dtype=torch.int32, device=DEVICE)
    logits = torch.zeros((4, 6), device=DEVICE)
    logits[:, 2] = 5.0
    device.verify(slots, device.propose(slots, ones, ones * 9), logits, ones)
    before = device.calibration.estimates.clone()
    for _ in range(25):
        drafts = device.propose(slots, ones, ones * 9)
        assert drafts.tolist() == [[2, 2, 2]]
        device.verify(slots, drafts, logits, ones)
    group = device.trees.groups[0, 1:].long()
    changed = (device.calibration.estimates != before).flatten().nonzero()[:, 0]
    assert changed.tolist() == sorted(group.tolist())
    assert (device.calibration.estimates.view(-1)[group] > before.view(-1)[group]).all()
    assert (device.calibration.estimates.view(-1)[group] > 0.7).all()
