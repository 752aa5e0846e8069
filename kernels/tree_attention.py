# SPDX-License-Identifier: Apache-2.0
"""Attention of draft-tree rows over a paged KV cache.

Row j of a request has its key and value at flat index ``context_len + j`` of the request's blocks. It attends to
the ``context_len`` tokens before the tree, to its ancestors and to itself; of these, with a sliding window, to the
last ones by position in the text, which is ``context_len`` plus the row's depth, or with chunks those of its own
chunk of the text. A tree that grows from one forward
pass to the next has rows that were computed before: only the others have queries.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_ext.kernels import ancestor_bits as masks
from vllm_ext.kernels import backends
from vllm_ext.kernels.ancestor_bits import MAX_ROWS
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.kv_layouts import sizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = (
    256  # of "triton": two steps' keys and values of larger heads do not fit the shared memory of a GPU
)


@dataclass(frozen=True)
class TreeRows:
    """Which rows of a step belong to which tree: made once, used by every layer.

    A captured graph can read it: the triton forms launch by shapes and ``max_rows`` alone. A request without rows
    is padding, for which nothing is read but its ``num_rows`` and ``num_past``, and nothing written.

    Args:
        block_table: int32 ``[num_requests, max_blocks]``.
        first_row: int32 ``[num_requests]``, where in the query the first of the request's rows is that has one.
        num_rows: int32 ``[num_requests]``, rows of each request: the root and its draft nodes, say.
        num_past: int32 ``[num_requests]``, how many of them, the first, have no query: their keys and values are there.
        context_len: int32 ``[num_requests]``, tokens before the first row.
        parents: int32 ``[sum(num_rows)]``, each row's parent as an offset inside its request, smaller than the
            row's own; -1 where there is none.
        max_rows: no request has more rows, as far as the host knows: the closer, the better the launch fits. The triton
            forms take MAX_ROWS at most.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit. The values are not looked at.
    """

    block_table: torch.Tensor
    first_row: torch.Tensor
    num_rows: torch.Tensor
    num_past: torch.Tensor
    context_len: torch.Tensor
    parents: torch.Tensor
    max_rows: int = MAX_ROWS

    def __post_init__(self) -> None:
        device, requests = self.parents.device, self.block_table.shape[0]
        if self.max_rows < 1:
            raise ValueError(f"max_rows={self.max_rows} must be 1 at least; leave it out")
        for name, tensor in vars(self).items():
            if name == "max_rows":
                continue
            if tensor.dtype != torch.int32 or tensor.device != device:
                raise ValueError(
                    f"{name}: {tensor.dtype} on {tensor.device} must be torch.int32 on the device of parents, "
                    f"{device}; pass {name}.to(parents.device, torch.int32)"
                )
            if name == "block_table":
                one_row_apart = tensor.dim() == 2 and (tensor.shape[1] == 1 or tensor.stride(1) == 1)
                good, shape = one_row_apart, "[num_requests, max_blocks]"
            else:
                good, shape = tensor.dim() == 1 and tensor.is_contiguous(), "[sum(num_rows)]"
                if name != "parents":
                    good, shape = good and len(tensor) == requests, f"[num_requests={requests}]"
            if not good:
                raise ValueError(
                    f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()} must be {shape} with the "
                    f"last dimension contiguous; num_requests is block_table's; pass {name}.contiguous()"
                )

    @functools.cached_property
    def ancestor_bits(self) -> torch.Tensor:
        """int32 ``[sum(num_rows), WORDS]``, see `vllm_ext.kernels.ancestor_bits`. Made on the device."""
        return masks.ancestor_bits(self.parents, self.row_start)

    @functools.cached_property
    def depths(self) -> torch.Tensor:
        """int32 ``[sum(num_rows)]``: of each row, how many ancestors it has. Made on the device."""
        bit = torch.arange(32, dtype=torch.int32, device=self.parents.device)
        return ((self.ancestor_bits[..., None] >> bit) & 1).sum((1, 2), dtype=torch.int32) - 1

    @functools.cached_property
    def prepared(self) -> dict[Any, Any]:
        """By the form of the other tensors, which were looked at: what is kept from layer to layer."""
        return {}

    @functools.cached_property
    def row_start(self) -> torch.Tensor:
        """int32 ``[num_requests + 1]``: where each request's rows begin in ``parents``. Made on the device."""
        return torch.nn.functional.pad(self.num_rows.cumsum(0, dtype=torch.int32), (1, 0))


class Scoring(NamedTuple):
    """How a layer's scores become weights, besides their factor.

    Args:
        window: tokens that a row sees, itself included; 0: all. Blocks that no row sees are not read.
        soft_cap: a score s becomes ``soft_cap * tanh(s / soft_cap)``; 0: it stays.
        sinks: float32 ``[num_heads]``, contiguous, on query's device: of each head a score that has a weight and no
            value; None: there are none.
        chunk: tokens of a chunk: a row sees those of its own, itself included, which begins at a multiple of this in
            the text; 0: all. Not with a window. Blocks that no row sees are not read.
    """

    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    chunk: int = 0

    @property
    def most_seen(self) -> int:
        """Tokens that a row sees at most; 0: all."""
        return self.window or self.chunk

    @property
    def kind(self) -> tuple[int, int, bool, bool]:
        """What a launch depends on."""
        return self.window, self.chunk, self.soft_cap > 0.0, self.sinks is not None


PLAIN = Scoring()


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    scale: float,
    backend: Backend = "auto",
    scoring: Scoring = PLAIN,
) -> None:
    """Softmax attention of tree rows, in float32 inside.

    Args:
        query: float32, bfloat16 or float16 ``[num_tokens, num_heads, head_size]``, last dimension contiguous.
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_size]`` of the same dtype, a view of any
            strides, or the six dimensions of `kv_layouts`; "numba" wants one of the layouts there, "triton" four
            dimensions. ``num_heads`` is a multiple of ``num_kv_heads``.
        value_cache: as ``key_cache``.
        output: shape and dtype of ``query``. Written at the rows of ``trees`` and nowhere else.
        trees: the rows, on query's device.
        scale: factor of the scores.
        backend: "auto" takes numba on the CPU, triton on CUDA and torch elsewhere. "triton" takes a head_size of
            MAX_HEAD_SIZE at most.
        scoring: the layer's.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit, or ``scoring`` is no layer's.
    """
    # Layers differ in addresses alone: what depends on all else is done for the first.
    tensors = (query, key_cache, value_cache, output)
    kind = (
        backend,
        query.device,
        scoring.kind,
        *[(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors],
    )
    found = trees.prepared.get(kind)
    if found is None:
        validate(query, key_cache, value_cache, output, trees)
        _validate_scoring(scoring, query)
        found = trees.prepared[kind] = _form(backends.choose(backend, query)), {}
    form, kept = found
    form(query, key_cache, value_cache, output, trees, scale, kept, scoring=scoring)


def _form(backend: Backend) -> Any:
    """A backend's function; imported here: one that is not used may be missing, and costs nothing."""
    match backend:
        case "numba":
            from vllm_ext.kernels.tree_attention_numba import tree_attention_numba

            return tree_attention_numba
        case "triton":
            from vllm_ext.kernels.tree_attention_triton import tree_attention_triton

            return tree_attention_triton
        case _:
            from vllm_ext.kernels.tree_attention_ref import tree_attention_ref

            return tree_attention_ref


def _validate_scoring(scoring: Scoring, query: torch.Tensor) -> None:
    window, soft_cap, sinks, chunk = scoring
    if min(window, chunk) < 0 or not 0.0 <= soft_cap < float("inf"):
        raise ValueError(
            f"window={window}, soft_cap={soft_cap}, chunk={chunk} must be at least 0, and finite; 0: none"
        )
    if window and chunk:
        raise ValueError(f"window={window} and chunk={chunk} do not go together; leave one at 0")
    if sinks is not None and (
        sinks.dtype != torch.float32
        or sinks.shape != query.shape[1:2]
        or sinks.device != query.device
        or not sinks.is_contiguous()
    ):
        raise ValueError(
            f"sinks: {sinks.dtype} {tuple(sinks.shape)} on {sinks.device} must be contiguous float32 "
            f"[num_heads={query.shape[1]}] on query's device; pass sinks.float().contiguous()"
        )


def validate(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
) -> None:
    """Raise ValueError for what `tree_attention` refuses."""
    if query.dim() != 3 or query.stride(2) != 1:
        raise ValueError(
            f"query: shape {tuple(query.shape)}, strides {query.stride()} must be [num_tokens, num_heads, "
            "head_size] with the last dimension contiguous; pass query.contiguous()"
        )
    if query.dtype not in DTYPES or not query.dtype == key_cache.dtype == value_cache.dtype == output.dtype:
        raise ValueError(
            f"dtypes of query {query.dtype}, key_cache {key_cache.dtype}, value_cache {value_cache.dtype} and "
            f"output {output.dtype} must be one of {', '.join(map(str, DTYPES))}, the same for all four"
        )
    if output.shape != query.shape or output.stride(2) != 1:
        raise ValueError(
            f"output: shape {tuple(output.shape)}, strides {output.stride()} must be query's shape "
            f"{tuple(query.shape)} with the last dimension contiguous"
        )
    if (
        key_cache.dim() not in (4, 6)
        or key_cache.dim() != value_cache.dim()
        or key_cache.shape[0] != value_cache.shape[0]
        or sizes(key_cache) != sizes(value_cache)
        or sizes(key_cache)[2] != query.shape[2]
        or query.shape[1] % key_cache.shape[1]
    ):
        raise ValueError(
            f"key_cache.shape={tuple(key_cache.shape)} and value_cache.shape={tuple(value_cache.shape)} must "
            "both be [num_blocks, num_kv_heads, block_size, head_size], or this with tokens and elements taken apart "
            "as in kv_layouts, with query's head_size "
            f"{query.shape[2]} and a num_kv_heads that divides its num_heads {query.shape[1]}"
        )
    if trees.parents.device != query.device:
        raise ValueError(
            f"trees: on {trees.parents.device} must be on query's device {query.device}; make TreeRows of "
            "tensors there"
        )
