# SPDX-License-Identifier: Apache-2.0
"""KV methods that choose blocks on the V2 runner: attention's metadata has the blocks alone that rows read.

Positions, slots and the block tables of vLLM's own stay those of the whole text. Before vLLM makes a step's metadata,
requests become *parts* (`vllm_ext.kernels.kept_blocks`), whose tables and lengths any of its attention kernels takes; a
captured graph reads them in buffers that stay. The blocks between are the scheduler's again (`block_specs`).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_ext import patches
from vllm_ext.codecs.base import KVCodec
from vllm_ext.config import kv_cache
from vllm_ext.engine import tree_layers
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.kv_cache import block_specs
from vllm_ext.engine.recurrent.device_rows import to_device
from vllm_ext.engine.tree_layout import offsets, starts
from vllm_ext.engine.v2.chosen_blocks import Choices
from vllm_ext.kernels import backends
from vllm_ext.kernels.block_mass import AskedRows
from vllm_ext.kernels.kept_blocks import KeptParts, Window, end_with_block, keep_blocks
from vllm_ext.proposers.tree import Int32

WHOLE = 1 << 20  # blocks: more than any text has
tree_layers.allow_spec(block_specs.CodecSpec, block_specs.OWN_FIELDS)


class Parts(NamedTuple):
    """A step's parts, request after request, as far as the host knows."""

    request: Int32  # [parts] place in the batch
    rows: Int32  # [parts]
    behind: Int32  # [parts] rows of the same request behind it


def parts_of(first: Int32, rows: Int32, drafts: Int32, window: Window) -> Parts | None:
    """Where a step's requests are cut, so that all rows of a part read the same blocks; None: nowhere.

    Args:
        first: int32 ``[requests]`` position of the first row; it does not matter where there is one, or drafts.
        rows: int32 ``[requests]`` of each.
        drafts: int32 ``[requests]``, of these.
        window: of the rows.
    """
    whole = (drafts > 0) | (rows == 1)
    assert (rows[drafts > 0] == 1 + drafts[drafts > 0]).all()  # no prompt has drafts
    # As long as nothing is skipped, rows of several blocks are one part.
    before = window.sinks + window.blocks
    skipped = np.maximum(first // window.block_size - before, 0)
    last = np.maximum((first + rows - 1) // window.block_size - before, 0)
    number = np.where(whole, 1, last - skipped + 1)
    if (number == 1).all():
        return None
    request = np.repeat(np.arange(len(rows), dtype=np.int32), number)
    place = offsets(number)
    begin = (skipped[request] + place + before) * window.block_size
    end = np.minimum(begin + window.block_size, (first + rows)[request])
    begin, end = (
        np.where(place == 0, first[request], begin),
        np.where(whole[request], (first + rows)[request], end),
    )
    behind = (first + rows)[request] - end
    return Parts(request, (end - begin).astype(np.int32), behind.astype(np.int32))


def parts_at(first: Int32, rows: Int32, drafts: Int32, cuts: Sequence[Sequence[int]]) -> Parts | None:
    """The same, where rows from some positions on read something else: of each request these, ascending."""
    found = []
    for request, (begin, number) in enumerate(zip(first.tolist(), rows.tolist(), strict=True)):  # numpy
        end = begin + number
        inside = [] if drafts[request] else [cut for cut in cuts[request] if begin < cut < end]
        found += [(request, until - start, end - until) for start, until in pairwise([begin, *inside, end])]
    if len(found) == len(rows):
        return None
    request, lengths, behind = np.ascontiguousarray(np.array(found, np.int32).T)
    return Parts(request, lengths, behind)


class KeptState(ABC):
    """Mixin in front of vLLM's model state class, with our trees or without; an ABC, see `TreeState`."""

    # vLLM's.
    max_num_reqs: int
    max_num_tokens: int
    vllm_config: Any
    device: torch.device

    codec: KVCodec
    _window: Window
    _kept: tuple[KeptParts, ...] = ()  # by KV group
    _choices: Choices | None = None  # of codecs that choose
    _laid_out = False  # whether trees were, whose contexts are not known yet

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """vLLM's, once caches are bound, and it is known how wide tables are."""
        check_layers(self.vllm_config)
        super().initialize_kv_cache(kv_cache_config, block_tables)  # type: ignore[misc]
        blocks, drafts = self.codec.window_blocks, self.vllm_config.num_speculative_tokens or 0
        tables = block_tables.input_block_tables
        if blocks is None:
            self._window = window = Window(0, WHOLE, self.codec.block_size)
            self._choices = Choices(self.codec, self.max_num_reqs, tables[0].shape[1], self.device)
        else:
            self._window = window = Window(self.codec.sink_blocks, blocks, self.codec.block_size)
        most = window.sinks + window.blocks + 1 + -(-drafts // window.block_size)
        # A request's rows may begin in the middle of a block, and end there; a prompt's end is a cut of its own.
        parts = 3 * self.max_num_reqs + -(-self.max_num_tokens // window.block_size)
        self._kept = tuple(
            KeptParts.of_size(parts, min(most, table.shape[1]), self.device) for table in tables
        )

    @property
    def choices(self) -> Choices | None:
        """What requests have chosen to read; None: nobody chooses."""
        return self._choices

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """vLLM's; a codec that chooses begins with the prompt, or goes on behind a preemption."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        if self._choices is not None:
            self._choices.admit(req_index, new_req_data)

    def remove_request(self, req_id: str) -> None:
        """vLLM's; the request may come back."""
        super().remove_request(req_id)  # type: ignore[misc]
        if self._choices is not None:
            self._choices.drop(req_id)

    def preprocess_state(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM's, of real steps alone: what the last one has told is known from here on."""
        if self._choices is not None:
            self._choices.settle()
        super().preprocess_state(input_batch, *args, **kwargs)  # type: ignore[misc]

    def lay_out(self, input_batch: Any) -> None:
        """`TreeState`'s; drafts end with the block of their root and read what it reads, where that may change then."""
        super().lay_out(input_batch)  # type: ignore[misc]
        self._laid_out = self._choices is not None
        if self._choices is None or self.codec.CHOOSES_AGAIN:
            trees: Any = self
            end_with_block(trees.speculator.layout, input_batch.positions, self._window, backends.V2)

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """vLLM's metadata, and our trees', of the blocks that are read."""
        asked: list[tuple[AskedRows, ...]] = []
        if self._kept:
            graph = for_capture or cudagraph_mode == CUDAGraphMode.FULL
            whole, tables, laid_out = input_batch, block_tables, self._laid_out
            input_batch, block_tables = self._keep(whole, tables, graph)
            if self._choices is not None and not graph:
                trees: Any = self
                layout = trees.speculator.layout if laid_out else None
                start = input_batch.query_start_loc_np
                asked = self._choices.ask(whole, tables, self._kept, start, layout)
        metadata: dict[str, Any] = super().prepare_attn(  # type: ignore[misc]
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture=for_capture,
            **kwargs,
        )
        for rows, groups in zip(asked, attn_groups, strict=False):
            for name in (name for group in groups for name in group.layer_names):
                setattr(metadata[name], tree_backend.ASKED, rows)
        return metadata

    def _shorten_contexts(self, number: int) -> None:
        """Of trees, which come first in a step of so many parts: what is read before them."""
        trees: Any = self
        layout = trees.speculator.layout
        laid = min(number, len(layout.context))
        torch.sub(self._kept[0].seq_lens[:laid], layout.num_rows[:laid], out=layout.context[:laid])

    def _keep(self, input_batch: Any, block_tables: Any, graph: bool) -> tuple[Any, Any]:
        """The batch of the step's parts, and their tables. In a graph each request is one part."""
        batch, parts = input_batch, None
        if not graph:
            first, num = batch.num_computed_tokens_np, batch.num_scheduled_tokens
            drafts = batch.num_draft_tokens_per_req
            drafts = np.zeros_like(num) if drafts is None else drafts
            if self._choices is None:
                parts = parts_of(first, num, drafts, self._window)
            elif ((num > 1) & (drafts == 0)).any():  # else nothing can be cut, as in steps that decode
                parts = parts_at(first, num, drafts, self._choices.cuts(batch.req_ids))
        request = behind = None
        number = min(len(block_tables[0]), len(batch.query_start_loc) - 1)  # graphs have more than there are
        seq_lens, part_start, rows = (
            batch.seq_lens,
            batch.query_start_loc[: number + 1],
            batch.num_scheduled_tokens,
        )
        most = batch.seq_lens_cpu_upper_bound.numpy()
        if parts is not None:
            rows, start, number = parts.rows, starts(parts.rows), len(parts.rows)
            known = np.concatenate([start, parts.request, parts.behind])
            moved = to_device(known, torch.int32, self.device)
            part_start, request, behind = moved[: number + 1], moved[number + 1 : -number], moved[-number:]
            most = most[parts.request] - parts.behind
            batch = _split(batch, parts, start, part_start, request)
        gone = None if self._choices is None else self._choices.gone
        slots = input_batch.idx_mapping
        for table, kept in zip(block_tables, self._kept, strict=True):
            keep_blocks(
                table, seq_lens, part_start, request, behind, self._window, kept, gone, slots, backends.V2
            )
        if self._laid_out:
            self._laid_out = False
            self._shorten_contexts(number)
        read = self._kept[0].table.shape[1] * self._window.block_size
        bound = most.copy()
        bound[: len(rows)] = np.minimum(most[: len(rows)], read)
        batch = replace(
            batch, seq_lens=self._kept[0].seq_lens[:number], seq_lens_cpu_upper_bound=torch.from_numpy(bound)
        )
        return batch, tuple(kept.table[:number] for kept in self._kept)


def _split(batch: Any, parts: Parts, start: Int32, part_start: torch.Tensor, request: torch.Tensor) -> Any:
    """vLLM's batch with a request for each part, as far as attention's metadata is made of it.

    Args:
        batch: the step's.
        parts: of it.
        start: int32 ``[parts + 1]`` rows before each part.
        part_start: the same on the device.
        request: int32 ``[parts]`` whose each is, on the device.
    """
    number, of = len(parts.rows), parts.request
    drafts = batch.num_draft_tokens_per_req
    as_decodes = batch.prefill_runs_as_decode_np
    return replace(
        batch,
        req_ids=[batch.req_ids[place] for place in of],
        num_reqs=number,
        num_reqs_after_padding=number,
        idx_mapping=batch.idx_mapping[request],
        idx_mapping_np=batch.idx_mapping_np[of],
        num_scheduled_tokens=parts.rows,
        num_draft_tokens_per_req=None if drafts is None else drafts[of],
        query_start_loc=part_start,
        query_start_loc_np=start,
        is_prefilling_np=batch.is_prefilling_np[of],
        prefill_runs_as_decode_np=None if as_decodes is None else as_decodes[of],
    )


def install(runner: Any) -> None:
    """Put the mixin in front of the model state's class of a runner whose model is loaded."""
    settings = kv_cache.from_config(runner.vllm_config)
    assert settings is not None
    patches.subclass_in_place(runner.model_state, KeptState)
    block_size = runner.vllm_config.cache_config.block_size
    runner.model_state.codec = settings.codec(block_size, runner.model_config.get_head_size())


def check_layers(vllm_config: Any) -> None:
    """Refuse layers that go by more than the keys and values of a table. Their caches are bound.

    Raises:
        ValueError: with the layer's name, and what was seen.
    """
    settings = kv_cache.from_config(vllm_config)
    assert settings is not None
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if problem := _problem(name, layer, vllm_config):
            raise ValueError(
                f"{kv_cache.FIELD}: method {settings.method!r} on vLLM's V2 runner does not work with {problem}. "
                "Remove it for this model."
            )


def _problem(name: str, layer: Any, vllm_config: Any) -> str | None:
    impl = getattr(layer, "impl", None)
    if impl is None:
        return None  # no attention: `block_specs` looks at what has a cache
    if getattr(impl, "kv_sharing_target_layer_name", None) is not None:
        return f"layer {name}: it reads another layer's cache"
    if tree_layers.window_of(impl):
        return f"layer {name}: it has a sliding window of its own"
    return tree_layers.layer_problem(name, layer, vllm_config)
