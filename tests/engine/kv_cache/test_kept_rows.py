# SPDX-License-Identifier: Apache-2.0
"""Blocks of a window, or of a choice, on the V2 runner: rows find what they are to read, and no block is lost.

A cache of numbers stands for keys and values: of each token one for all of its text so far.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_ext.config import kv_cache
from vllm_ext.engine.kv_cache import block_specs
from vllm_ext.engine.v2 import chosen_blocks, kept_blocks
from vllm_ext.engine.v2.chosen_blocks import Choices
from vllm_ext.kernels.device_trees import RowLayout
from vllm_ext.kernels.kept_blocks import KeptParts, Window, keep_blocks

BLOCK, DRAFTS, TOKENS, NUM_BLOCKS = 16, 6, 90, 34
STREAMING = {"method": "streaming_llm", "window": 2 * BLOCK}
SNAPKV = {"method": "snapkv", "budget": 4 * BLOCK, "window": BLOCK, "watched": 8}
CRITIC = {"method": "critic", "budget": 4 * BLOCK, "window": BLOCK, "watched": 12}
MOST_BLOCKS, SLOTS = 400 // BLOCK + 2, 12


class Engine:
    """Scheduler and worker of a few requests, as far as blocks go."""

    def __init__(self, kv: dict[str, Any], seed: int, skew: int = 0) -> None:
        whole: Any = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=400, dtype=torch.float32),
            cache_config=SimpleNamespace(block_size=BLOCK),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            additional_config={"vllm_ext": {"kv": kv}},
            num_speculative_tokens=DRAFTS,
            use_v2_model_runner=True,
            max_in_flight_tokens=TOKENS,
        )
        stock = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.float32)
        (self.spec,) = block_specs.codec_specs(whole, {"one": stock}).values()
        assert (self.spec.page_size_bytes, self.spec.dtype) == (stock.page_size_bytes, stock.dtype)
        self.codec = kv_cache.parse(kv).codec(BLOCK, 64)
        self.window, self.choices = Window(0, kept_blocks.WHOLE, BLOCK), None
        if self.codec.window_blocks is None:
            self.choices = Choices(self.codec, SLOTS, MOST_BLOCKS, torch.device("cpu"))
        else:
            self.window = Window(self.spec.sink_blocks, self.codec.window_blocks + skew, BLOCK)
        self.slots: dict[str, int] = {}
        # By request: as its policy is where each token is read alone and nothing has to be said twice.
        self.shadows: dict[str, Any] = {}
        self.said: dict[str, int] = {}  # how many of its tokens it was told of
        config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["one"], self.spec)])
        self.manager = KVCacheManager(config, 400, BLOCK, BLOCK, max_in_flight_tokens=TOKENS)
        self.pool = self.manager.block_pool
        self.random = random.Random(seed)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.cache = np.full((NUM_BLOCKS, BLOCK), -1, np.int64)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.tables: dict[str, list[int]] = {}  # the worker's: what is freed stays in it
        self.made = self.refused = self.skipped = self.found = self.cut = self.evicted = self.nodes = 0

    def event(self) -> None:
        kind = self.random.choices(("new", "step", "preempt", "end"), (4, 60, 2, 1))[0]
        if kind == "new" and len(self.waiting) < 4:
            length = self.random.randrange(1, 200)
            # Prompts that begin alike.
            prompt = [self.random.randrange(2)] * length + [7] * self.random.randrange(1, 40)
            self.made += 1
            self.waiting.append(
                Request(
                    f"{self.made}", prompt, SamplingParams(max_tokens=300), None, block_hasher=self.hasher
                )
            )
        elif kind == "step":
            self._step()
        elif self.running:
            self._free(self.random.choice(self.running), again=kind == "preempt")

    def _free(self, request: Request, again: bool) -> None:
        name = request.request_id
        self.manager.free(request)
        self.running.remove(request)
        del self.tables[name], self.slots[name]
        if self.choices is not None:
            self.choices.drop(name)
            if not again:
                self.choices.finish([name])
                self._manager.drop(name)
        if again:
            request.num_computed_tokens = 0
            self.waiting.insert(0, request)

    def _step(self) -> None:
        """What vLLM schedules: some of the running requests, and the first that waits."""
        left, batch = TOKENS, []
        for request in [*self.running]:
            if request.num_tokens > 330:
                self._free(request, again=False)
                continue
            missing = request.num_tokens - request.num_computed_tokens
            decodes = missing == 1 and request.num_output_tokens > 0
            drafts = self.random.randrange(DRAFTS + 1) if decodes else 0
            rows = min(missing + drafts, left)
            if rows < 1 or (drafts and rows <= drafts) or self.random.random() < 0.2:
                continue
            new = self.manager.allocate_slots(request, rows, num_lookahead_tokens=DRAFTS)
            if new is None:
                self.refused += 1
                continue
            self.tables[request.request_id] += new.get_block_ids()[0]
            batch.append((request, rows, drafts))
            left -= rows
        if self.waiting and left and len(self.running) < SLOTS:
            request = self.waiting[0]
            blocks, num = self.manager.get_computed_blocks(request)[:2]
            rows = min(request.num_tokens - num, left)
            if self.manager.allocate_slots(
                request, rows, num, blocks, num_lookahead_tokens=DRAFTS, full_sequence_must_fit=True
            ):
                self.running.append(self.waiting.pop(0))
                request.num_computed_tokens = num
                self.found += num > 0
                name = request.request_id
                self.tables[name] = [*self.manager.get_block_ids(name)[0]]
                self.slots[name] = min({*range(SLOTS)} - {*self.slots.values()})
                if self.choices is not None:
                    prompt = SimpleNamespace(req_id=name, prompt_len=request.num_prompt_tokens)
                    self.choices.admit(self.slots[name], prompt)
                batch.append((request, rows, 0))
            else:
                self.refused += 1
        if batch:
            self._work(sorted(batch, key=lambda each: not each[2]))

    def _work(self, batch: list[tuple[Request, int, int]]) -> None:
        """The worker's part: write rows, read what the tables say, accept some drafts."""
        requests = [each[0] for each in batch]
        rows, drafts = (np.array([each[i] for each in batch], np.int32) for i in (1, 2))
        first = np.array([request.num_computed_tokens for request in requests], np.int32)
        table = np.zeros((len(batch), MOST_BLOCKS), np.int32)
        for place, request in enumerate(requests):
            ids = self.tables[request.request_id]
            table[place, : len(ids)] = ids
            for row in range(rows[place]):
                position = first[place] + row
                settled = position < request.num_tokens
                self.cache[ids[position // BLOCK], position % BLOCK] = (
                    _text(request, position) if settled else -2
                )
        slots = np.array([self.slots[request.request_id] for request in requests])
        if self.choices is None:
            parts = kept_blocks.parts_of(first, rows, drafts, self.window)
        else:
            self.choices.settle()
            names = [request.request_id for request in requests]
            parts = kept_blocks.parts_at(first, rows, drafts, self.choices.cuts(names))
        of, lengths, behind = parts or (np.arange(len(batch)), rows, np.zeros_like(rows))
        self.cut += parts is not None
        start = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        width = min(self.window.sinks + self.window.blocks + 2, MOST_BLOCKS)
        kept = KeptParts.of_size(len(of), width, torch.device("cpu"))
        keep_blocks(
            torch.from_numpy(table),
            torch.from_numpy(first + rows),
            start,
            torch.tensor(of),
            torch.tensor(behind),
            self.window,
            kept,
            None if self.choices is None else self.choices.gone,
            torch.from_numpy(slots),
            "torch",
        )
        for part, place in enumerate(of):
            end = int(first[place] + rows[place] - behind[part])
            begin, length = end - int(lengths[part]), int(kept.seq_lens[part])
            self.skipped += length < end
            read = self.cache[kept.table[part].numpy()].ravel()
            # Rows of drafts read the same before their root.
            for position in range(begin, begin + 1 if drafts[place] else end):
                own = position // BLOCK
                blocks = [*self._read_by(requests[place], position), own]
                expected = [q for b in blocks for q in range(b * BLOCK, min((b + 1) * BLOCK, position + 1))]
                found = read[: length - (end - 1 - position)]
                assert found.tolist() == [_text(requests[place], q) for q in expected]
        paths = [self._path(int(at), int(number)) for at, number in zip(first, drafts, strict=True)]
        if self.choices is not None:
            self._ask(requests, (first, rows, drafts), table, kept, (of, start.numpy()), paths)
            self.choices.collect(_walked(paths))
            for name, evicted in self.choices.take_evicted().items():
                self._manager.evict(name, evicted)
                self.evicted += sum(len(blocks) for _, blocks in evicted)
        for place, request in enumerate(requests):
            self._settle(
                request, int(first[place]), int(rows[place]), int(drafts[place]), len(paths[place]) - 1
            )

    def _path(self, root: int, drafts: int) -> list[int]:
        """Rows of a tree that stand, its root first; where blocks end drafts do, too."""
        ends = self.choices is None or self.codec.CHOOSES_AGAIN
        most = min(drafts, BLOCK - 1 - root % BLOCK) if ends else drafts
        return [0, *sorted(self.random.sample(range(1, drafts + 1), self.random.randrange(most + 1)))]

    def _read_by(self, request: Request, position: int) -> list[int]:
        """Blocks before its own that a row reads."""
        if self.choices is None:
            return self.codec.format.blocks_read(position // BLOCK)
        shadow: Any = self.shadows.setdefault(
            request.request_id, self.codec.choice(request.num_prompt_tokens)
        )
        for end in range(self.said.get(request.request_id, 0) + 1, position + 1):
            for asked in shadow.watched(end - 1, end):
                shadow.take(asked, _weights(request, asked)[: asked // BLOCK] * self._reads(shadow, asked))
            shadow.settle(end)
            self.said[request.request_id] = end
        read = shadow.read_at(position)
        return [*range(position // BLOCK)] if isinstance(read, int) else [*read]

    def _reads(self, shadow: Any, position: int) -> Any:
        """float32 ``[blocks before the row's own]``: 1 for those that it reads."""
        read = shadow.read_at(position)
        found = np.zeros(position // BLOCK, np.float32)
        found[slice(None) if isinstance(read, int) else [*read]] = 1
        return found

    def _ask(
        self, requests: list[Request], step: Any, table: Any, kept: KeptParts, parts: Any, paths: Any
    ) -> None:
        """Weights are chance's, but a request's own."""
        assert self.choices is not None
        (first, rows, drafts), (of, part_start) = step, parts
        logits = np.array([0, *np.cumsum(1 + drafts)])
        batch = SimpleNamespace(
            req_ids=[request.request_id for request in requests],
            num_computed_tokens_np=first,
            num_scheduled_tokens=rows,
            query_start_loc_np=np.array([0, *np.cumsum(rows)]),
            num_draft_tokens_per_req=drafts,
            cu_num_logits_np=logits,
        )
        layout = RowLayout.of_size(len(requests), int(logits[-1]), torch.device("cpu"))
        layout.bits[:] = torch.arange(logits[-1])[:, None]
        trees = layout if drafts.any() else None
        for group in self.choices.ask(batch, [torch.from_numpy(table)], [kept], part_start, trees):
            for asked in group:
                assert all(
                    numbers.is_contiguous()
                    for numbers in (*asked[1:], *(asked.trees or ()))
                    if torch.is_tensor(numbers)
                )
                for i, (whose, row, seen) in enumerate(zip(*(p.tolist() for p in asked[1:4]), strict=True)):
                    self._answer(requests, batch, asked, i, (whose, row, seen), (kept, of), paths)

    def _answer(
        self, requests: list[Request], batch: Any, asked: Any, i: int, what: Any, parts: Any, paths: Any
    ) -> None:
        """Of one row: what it sees is right, and it gets its weights."""
        (whose, row, seen), (kept, of) = what, parts
        place = int(np.searchsorted(batch.query_start_loc_np, row, "right")) - 1
        request, offset = requests[place], row - int(batch.query_start_loc_np[place])
        root, drafts = int(batch.num_computed_tokens_np[place]), batch.num_draft_tokens_per_req[place]
        if asked.table is not kept.table:  # a prompt's
            assert (whose, seen) == (place, root + offset + 1)
            asked.mass[i] = torch.from_numpy(_weights(request, root + offset))
            return
        assert of[whose] == place
        position, whole = root + offset, seen
        if drafts:
            whole = int(asked.trees.whole[i])
            assert seen == whole + 1 + drafts
            assert set(asked.trees.bits[i].tolist()) == {int(batch.cu_num_logits_np[place]) + offset}
            position = root + paths[place].index(offset) if offset in paths[place] else -1
            self.nodes += 1
        elif asked.trees is not None:
            assert int(asked.trees.whole[i]) == seen
        if position < 0:
            asked.mass[i] = 7.0  # of a node that does not stand
            return
        read = self._read_by(request, root if drafts else position)
        assert whole == len(read) * BLOCK + (root % BLOCK if drafts else position % BLOCK + 1)
        asked.mass[i] = 9.0  # of what is no block before its own
        asked.mass[i, : len(read)] = torch.from_numpy(_weights(request, position)[read])

    @property
    def _manager(self) -> Any:
        return self.manager.coordinator.single_type_managers[0]

    def _settle(self, request: Request, first: int, rows: int, drafts: int, accepted: int) -> None:
        request.num_computed_tokens = first + rows - drafts
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids([self.random.randrange(9) for _ in range(1 + accepted)])
            for position in range(first + 1, first + 1 + accepted):  # what has moved there
                block = self.tables[request.request_id][position // BLOCK]
                self.cache[block, position % BLOCK] = _text(request, position)
            request.num_computed_tokens += accepted

    def check(self) -> None:
        """Blocks are counted right, and a request has no more than its window and a step."""
        counts = [0] * NUM_BLOCKS
        for request in self.running:
            held = [
                block.block_id
                for block in self._manager.req_to_blocks[request.request_id]
                if not block.is_null
            ]
            for block in held:
                counts[block] += 1
        assert counts[1:] == [block.ref_cnt for block in self.pool.blocks[1:]]
        assert self.pool.get_num_free_blocks() == sum(count == 0 for count in counts[1:])


def _text(request: Request, position: int) -> int:
    """A number for all tokens up to a position."""
    return hash(tuple(request.all_token_ids[: position + 1]))


def _weights(request: Request, position: int) -> Any:
    """float32 ``[blocks]``: what a row attends to, the same whenever it is asked."""
    draw = np.random.default_rng([int(request.request_id), position])
    return draw.random(MOST_BLOCKS).astype(np.float32)


def _walked(paths: list[list[int]]) -> Any:
    path = np.tile(np.arange(1 + DRAFTS, dtype=np.int32), (len(paths), 1))
    for row, own in zip(path, paths, strict=True):
        row[: len(own)] = own
    number = torch.tensor([len(own) for own in paths], dtype=torch.int32)
    return SimpleNamespace(path=torch.from_numpy(path), num_emitted=number)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_blocks, "get_tensor_model_parallel_world_size", lambda: 1)


@pytest.mark.parametrize(
    "kv",
    [
        pytest.param(STREAMING, id="streaming_llm"),
        pytest.param(SNAPKV, id="snapkv", marks=pytest.mark.slow),
        pytest.param(CRITIC, id="critic"),
    ],
)
def test_rows_find_what_they_read_and_no_block_is_lost(kv: dict[str, Any]) -> None:
    """Ten thousand events: prompts in parts, shared beginnings, drafts, preemption, ends."""
    engine = Engine(kv, seed=1)
    for _ in range(10_000):
        engine.event()
        engine.check()
    assert min(engine.made, engine.refused, engine.found) > 50
    assert engine.cut > (50 if kv is STREAMING else 10)
    assert engine.evicted > 50 or kv is STREAMING
    assert (engine.nodes > 1000) == (kv is CRITIC)
    assert engine.skipped > 1000
    for request in [*engine.running]:
        engine._free(request, again=False)
    assert engine.pool.get_num_free_blocks() == NUM_BLOCKS - 1


@pytest.mark.parametrize(
    ("kv", "what"),
    [
        (STREAMING, "freed too early"),
        (STREAMING, "read too long"),
        (STREAMING, "not cut"),
        (SNAPKV, "freed too early"),
        (SNAPKV, "not shown again"),
        (SNAPKV, "not cut"),
        (CRITIC, "freed too early"),
        (CRITIC, "not shown again"),
        (CRITIC, "not cut"),
        (CRITIC, "another path"),
        (CRITIC, "another block"),
    ],
)
def test_what_goes_wrong_is_noticed(kv: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "freed too early" and kv is STREAMING:
        original = block_specs.CodecManager.remove_skipped_blocks
        monkeypatch.setattr(
            block_specs.CodecManager,
            "remove_skipped_blocks",
            lambda self, name, processed, *rest: original(self, name, processed + BLOCK, *rest),
        )
    elif what == "freed too early":  # of a request that begins again, before its prompt is read
        evict = block_specs.CodecManager.evict
        monkeypatch.setattr(
            block_specs.CodecManager,
            "evict",
            lambda self, name, evicted: evict(self, name, [(1, blocks) for _, blocks in evicted]),
        )
    elif what == "another path":  # the tree's rows, as if they were a chain
        original_settle = Choices.settle

        def settle(self: Choices) -> None:
            if self._pending is not None and self._pending.paths is not None:
                self._pending.paths[:, 1:] = torch.arange(1 + DRAFTS)
            original_settle(self)

        monkeypatch.setattr(Choices, "settle", settle)
    elif what == "another block":  # the table's columns, as if they were the text's
        monkeypatch.setattr(
            Choices, "_by_block", lambda self, policy, position, mass: mass[: position // BLOCK].copy()
        )
    elif what == "not shown again":
        monkeypatch.setattr(Choices, "_show", lambda *_: None)
    elif what == "not cut":
        monkeypatch.setattr(kept_blocks, "parts_of" if kv is STREAMING else "parts_at", lambda *_: None)
    engine = Engine(kv, seed=1, skew=what == "read too long")

    def run() -> None:
        for _ in range(6_000):
            engine.event()
            engine.check()

    with pytest.raises(AssertionError):
        run()
