# SPDX-License-Identifier: Apache-2.0
"""Heads that draft from the target's last hidden state, in vLLM's V1 worker.

The row that they read is the last one that was accepted, of this very step: nothing is kept between steps, so that
preemption, prefixes from the cache and chunked prompts are nothing to them. Medusa's heads tell all depths in one pass
over these rows; Clover's take a pass for each depth of growing trees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.passes import ModelPasses, Pass, stacked
from vllm_ext.engine.models import clover_heads, cpu_linear, prompt_embeddings
from vllm_ext.engine.models.medusa_heads import MedusaHeads, read_shape
from vllm_ext.engine.models.node_states import NodeStates
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.clover import CloverOptions
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.medusa import MedusaOptions
from vllm_ext.proposers.sampled import ROOT
from vllm_ext.proposers.tree import Float32, Int32


class LastRows(ModelPasses):
    """Heads that read these rows and nothing else of the target.

    Args:
        vllm_config: the target's.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self._target_config = vllm_config
        self._rows: Int32 = np.empty(0, np.int32)  # [batch_size] of the step's query

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._target_config.model_config.dtype
        return dtype

    @property
    def _device(self) -> torch.device:
        return torch.device(self._target_config.device_config.device)

    def _for_few_rows(self, heads: torch.nn.Module) -> None:
        """Let their linear layers multiply by our product where the target's do."""
        if cpu_linear.wanted(self._target_config):
            bits = cpu_linear.bits_of_drafts(self._target_config)
            for layer in heads.modules():
                if isinstance(layer, torch.nn.Linear):
                    cpu_linear.take_over(layer, True, bits)

    def verified(self, trees: StepTrees) -> None:
        """See `ModelPasses`."""
        last = [path[-1] if path else 0 for path in trees.accepted] or [0] * len(trees.query_row)
        self._rows = trees.query_row + np.array(last, np.int32)

    def _drafted(self, drafting: set[str]) -> tuple[list[int], list[str]]:
        """Batch indices and names of the requests that are drafted for."""
        names = self._runner.input_batch.req_ids
        slots = [slot for slot, name in enumerate(names) if name in drafting]
        return slots, [names[slot] for slot in slots]

    def _hidden_of(self, slots: list[int]) -> torch.Tensor:
        """``[num_requests, hidden_size]`` behind the target's last norm, by batch index."""
        rows = torch.from_numpy(self._rows[slots].astype(np.int64)).to(self._runner.device)
        hidden: torch.Tensor = self._runner.step_hidden[rows]
        return hidden

    def _random_hidden(self, rows: int) -> torch.Tensor:
        """Of a pass whose time is measured."""
        shape = rows, self._target_config.model_config.get_hidden_size()
        return torch.randn(shape, dtype=self._dtype, device=self._runner.device)


class MedusaPasses(LastRows):
    """Medusa's heads beside the target. See `vllm_ext.proposers.draft_model.DraftModel`.

    Args:
        vllm_config: the target's.
        options: which heads.
    """

    def __init__(self, vllm_config: Any, options: MedusaOptions) -> None:
        super().__init__(vllm_config)
        self._options = options
        self.num_heads = read_shape(options.model)[1].num_heads
        self.heads: MedusaHeads | None = None
        self._of: dict[str, tuple[Int32, Float32]] = {}  # by request id, [num_heads, support] ids and log_q
        self._depths: dict[str, list[int]] = {}  # by request id, of its nodes asked for so far

    def load(self, target: Any) -> None:
        """See `ModelPasses`."""
        self.heads = MedusaHeads(self._options.model, self._dtype, self._device)
        self._for_few_rows(self.heads)

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `ModelPasses`: all heads, over the last accepted rows of those that are drafted for."""
        self.passes.clear()
        self._of.clear()
        self._depths.clear()
        slots, names = self._drafted(drafting)
        if not slots:
            return
        started = time.perf_counter()
        ids, log_q = self._distributions(self._hidden_of(slots))
        for place, name in enumerate(names):
            self._of[name] = ids[:, place], log_q[:, place]
            self._depths[name] = []
        self.passes.append(Pass(time.perf_counter() - started, len(slots), len(slots)))

    def depths(self, request_id: str) -> Rows:
        """See `vllm_ext.proposers.medusa.AllDepths`."""
        return Rows(*self._of[request_id])

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel`."""
        return self._rows_at(request_ids, [0] * len(request_ids))

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`: whatever the tokens are, those of a depth have one distribution."""
        depths = []
        for name, parent in zip(request_ids, parents, strict=True):
            known = self._depths[name]
            known.append(1 if parent == ROOT else known[parent] + 1)
            depths.append(known[-1])
        return self._rows_at(request_ids, depths)

    def _rows_at(self, request_ids: Sequence[str], depths: Sequence[int]) -> Rows:
        found = [self._of[name] for name in request_ids]
        return stacked(
            [(ids[depth], log_q[depth]) for (ids, log_q), depth in zip(found, depths, strict=True)]
        )

    def _distributions(self, hidden: torch.Tensor) -> tuple[Int32, Float32]:
        assert self.heads is not None
        with torch.inference_mode():
            ids, log_q = self.heads.distributions(hidden)
        return ids.cpu().numpy(), log_q.cpu().numpy()

    def calibration_pass(self, rows: int) -> None:
        """See `ModelPasses`."""
        self._distributions(self._random_hidden(rows))


class CloverPasses(LastRows):
    """See `vllm_ext.proposers.draft_model.DraftModel`.

    Args:
        vllm_config: the target's.
        options: which heads.
    """

    def __init__(self, vllm_config: Any, options: CloverOptions) -> None:
        super().__init__(vllm_config)
        self._options = options
        self._heads: clover_heads.CloverHeads | None = None
        self._table: Any = None  # the target's embeddings
        self._num_tokens: int = vllm_config.model_config.get_vocab_size()
        self._states = NodeStates()
        self._roots: dict[
            str, tuple[Int32, Float32]
        ] = {}  # by request id, the distribution after its last token

    @property
    def heads(self) -> clover_heads.CloverHeads:
        """Once they are loaded."""
        assert self._heads is not None
        return self._heads

    def load(self, target: Any) -> None:
        """See `ModelPasses`.

        Raises:
            ValueError: weights are missing or do not fit, or the target has no table of embeddings or several.
        """
        _, self._table = prompt_embeddings.only_table(target, "clover_tree")
        self._heads = clover_heads.load(self._options.model, self._dtype, self._device)
        self._for_few_rows(self._heads)

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `ModelPasses`: the states behind the last tokens of those that are drafted for."""
        self.passes.clear()
        self._states.clear()
        self._roots.clear()
        slots, names = self._drafted(drafting)
        if not slots:
            return
        started = time.perf_counter()
        last = np.array([num_tokens[slot] - 1 for slot in slots])
        tokens = self._runner.input_batch.token_ids_cpu[slots, last]
        with torch.inference_mode():
            states = self.heads.first(self._hidden_of(slots), self._embeds(tokens))
        rows = self._said(names, states)
        self._roots.update({name: (ids, log_q) for name, ids, log_q in zip(names, *rows, strict=True)})
        self._timed(started, names)

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel`."""
        return stacked([self._roots[name] for name in request_ids])

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`: the cell goes on from the states of the parents."""
        started = time.perf_counter()
        with torch.inference_mode():
            embeds = self._embeds(np.array(tokens))
            states = self.heads.following(self._states.at(request_ids, parents), embeds)
        rows = self._said(request_ids, states)
        self._timed(started, request_ids)
        return rows

    def _embeds(self, tokens: Any) -> torch.Tensor:
        # Tokens behind the vocabulary stand for images.
        known = np.where(tokens < self._num_tokens, tokens, 0).astype(np.int64)
        embeds: torch.Tensor = self._table(torch.from_numpy(known).to(self._runner.device))
        return embeds

    def _said(self, request_ids: Sequence[str], states: torch.Tensor) -> Rows:
        self._states.keep(request_ids, states)
        with torch.inference_mode():
            ids, log_q = self.heads.distributions(states)
        return Rows(ids.cpu().numpy(), log_q.cpu().numpy())

    def _timed(self, started: float, request_ids: Sequence[str]) -> None:
        self.passes.append(Pass(time.perf_counter() - started, len(request_ids), len(set(request_ids))))

    def calibration_pass(self, rows: int) -> None:
        """See `ModelPasses`."""
        tokens = np.random.default_rng(0).integers(self._num_tokens, size=rows)
        with torch.inference_mode():
            states = self.heads.following(self._random_hidden(rows), self._embeds(tokens))
            self.heads.distributions(states)
