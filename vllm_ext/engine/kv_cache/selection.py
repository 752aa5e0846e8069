# SPDX-License-Identifier: Apache-2.0
"""What rows of an encoded KV cache read, by what the rows before them have attended to, in vLLM's V1 runner.

The worker chooses (`vllm_ext.codecs.selection`), and masks what it has dropped from the next step on; what it has
chosen goes to the scheduler with the step's tokens (`scheduler.evicted_blocks`), whose manager frees the blocks when
it plans that step. So no block is given away that anybody still reads. Ranks that share the heads add up what these
attend to, and choose the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size

from vllm_ext import patches
from vllm_ext.codecs.base import KVCodec
from vllm_ext.codecs.selection import EvictionPolicy, lists_of
from vllm_ext.config import kv_cache
from vllm_ext.engine import step_extras
from vllm_ext.engine.kv_cache.encoded_rows import EncodedMetadata
from vllm_ext.kernels.encoded_attention import Reading


@dataclass(frozen=True)
class Part:
    """A request's rows of a step."""

    choice: EvictionPolicy
    name: str
    index: int  # in the batch
    start: int  # of its rows
    num_rows: int
    num_settled: int
    context: int


class SelectingRunner:
    """Mixin in front of vLLM's V1 runner class of a CPU, where a codec has a choice."""

    selecting: KVCodec | None = None
    step_parts: list[Part] | None = None
    step_reading: Reading | None = None
    choices: dict[str, EvictionPolicy]

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """vLLM's; notes which rows there are."""
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        runner: Any = self
        batch, drafts = runner.input_batch, scheduler_output.scheduled_spec_decode_tokens
        self.step_parts, start = [], 0
        for i in range(batch.num_reqs):
            name, num = batch.req_ids[i], int(num_scheduled_tokens[i])
            if name not in self.choices:
                self.choices[name] = self._choice(int(runner.requests[name].num_prompt_tokens))
            settled = num - len(drafts.get(name, ()))
            context = int(batch.num_computed_tokens_cpu[i])
            self.step_parts.append(Part(self.choices[name], name, i, start, num, settled, context))
            start += num
        return result

    def _choice(self, prompt_len: int) -> EvictionPolicy:
        assert self.selecting is not None
        choice = self.selecting.choice(prompt_len)
        assert choice is not None
        return choice

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's metadata, with what rows read."""
        metadata, common = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        if self.step_parts and isinstance(metadata, dict):
            ours = {id(each): each for each in metadata.values() if isinstance(each, EncodedMetadata)}
            width = max((each.rows.block_table.shape[1] for each in ours.values()), default=0)
            self.step_reading = reading_of(self.step_parts, width)
            for each in ours.values():
                each.rows = replace(each.rows, reading=self.step_reading)
        return metadata, common

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; then it is known which rows stand, and what is chosen goes with the tokens."""
        trees = getattr(self, "step_trees", None)
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        parts, reading, self.step_parts, self.step_reading = self.step_parts, self.step_reading, None, None
        if parts and reading is not None:
            mass = reading.mass
            if len(mass) and get_tensor_model_parallel_world_size() > 1:
                mass = tensor_model_parallel_all_reduce(mass)
            accepted = {} if trees is None else {i: trees.accepted[i] for i in trees.decoding}
            evicted = settle(parts, reading.watched.numpy(), mass.numpy(), accepted)
            if output is not None:
                step_extras.set_of(output).evicted = evicted
        return output

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)  # type: ignore[misc]
        self.choices.pop(req_id, None)


def reading_of(parts: list[Part], width: int) -> Reading:
    """What the rows of a step read, and which are watched; block tables have ``width`` columns."""
    read: list[Any] = []
    total = parts[-1].start + parts[-1].num_rows
    watched = np.full(total, -1, np.int32)
    num = 0
    for part in parts:
        drafts = part.num_settled < part.num_rows
        # Drafts are of the block of the row before them.
        read += [part.choice.read_at(part.context + (0 if drafts else row)) for row in range(part.num_rows)]
        asked = part.choice.watched(part.context, part.context + part.num_rows)
        if asked:
            # How deep a draft is tells where it would stand: all are watched where one may be.
            rows = (
                range(part.num_rows)
                if drafts
                else range(asked[0] - part.context, asked[-1] + 1 - part.context)
            )
            watched[part.start + rows[0] : part.start + rows[-1] + 1] = num + np.arange(len(rows))
            num += len(rows)
    lists, lengths, list_of_row = (torch.from_numpy(each) for each in lists_of(read))
    return Reading(lists, lengths, list_of_row, torch.from_numpy(watched), torch.zeros(num, width))


def settle(
    parts: list[Part], watched: Any, mass: Any, accepted: dict[int, list[int]]
) -> dict[str, list[tuple[int, list[int]]]]:
    """Tell the choices what stands after a step.

    Args:
        parts: of the step.
        watched: int32 ``[num_rows]`` of its `Reading`.
        mass: float32 ``[num_watched, max_blocks]``.
        accepted: by place in the batch the accepted rows of drafts, as offsets in the request.

    Returns:
        By request id, what is forgotten from now on, where something is.
    """
    found = {}
    for part in parts:
        drafts = part.num_settled < part.num_rows
        rows = [0, *accepted.get(part.index, ())] if drafts else range(part.num_rows)
        asked = part.choice.watched(part.context, part.context + len(rows))
        for position in asked:
            place = watched[part.start + rows[position - part.context]]
            part.choice.take(position, mass[place].copy())
        if evicted := part.choice.settle(part.context + len(rows)):
            found[part.name] = evicted
    return found


def install(runner: Any, codec: KVCodec) -> None:
    """Put the mixin in front of a constructed runner's class."""
    patches.subclass_in_place(runner, SelectingRunner)
    runner.selecting, runner.choices = codec, {}


def codec_of(vllm_config: Any) -> KVCodec | None:
    """The server's, where it has a choice."""
    settings = kv_cache.from_config(vllm_config)
    if settings is None or not settings.answers_read_less:
        return None
    return settings.codec(vllm_config.cache_config.block_size, vllm_config.model_config.get_head_size())
