# SPDX-License-Identifier: Apache-2.0
"""The indices of the k largest logits of each row, on the device the logits are on."""

from typing import Any

import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.backends import Backend

MAX_K = 32  # every backend keeps its k best in a list it shifts or rescans: meant for small k

# The dtypes taken, each with the integer of its width and the bits of its infinity: the kernels
# compare bits, so no conversion can flush a denormal or choke on a NaN.
INTEGER_FORM = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


def top_k_ids(logits: torch.Tensor, k: int, backend: Backend = "auto") -> torch.Tensor:
    """Return the ids of the `k` largest logits of each row, best first, as int32 `[rows, k]`.

    The contract::

        for row in range(rows):
            x = logits[row]
            ids = sorted(range(vocab), key=lambda i: (isnan(x[i]), 0 if isnan(x[i]) else -x[i], i))
            out[row] = ids[:k]

    So ties go to the lowest id (as argmax breaks them, which torch.topk does not promise), -0.0
    equals 0.0, and NaN ranks below -inf. Every backend gives the same integers.

    `logits` is float32, bfloat16 or float16 `[rows, vocab]`; rows may be strided, the last
    dimension must be contiguous. `rows` may be 0; `k` is 1 to min(vocab, 32).

    "auto" takes numba on the CPU, triton on CUDA and the torch reference elsewhere. The numba form
    is compiled at the first call with 16-bit and the first with 32-bit logits (about 1 s each,
    cached on disk where a folder is writable). "triton" on CPU tensors needs TRITON_INTERPRET=1.
    """
    _validate(logits, k)
    form: Any
    # Imported here: a backend that is not used may be missing, and costs nothing.
    match backends.choose(backend, logits):
        case "numba":
            from vllm_ext.kernels.top_k_numba import top_k_ids_numba as form
        case "triton":
            from vllm_ext.kernels.top_k_triton import top_k_ids_triton as form
        case _:
            from vllm_ext.kernels.top_k_ref import top_k_ids_ref as form
    ids: torch.Tensor = form(logits, k)
    return ids


def _validate(logits: torch.Tensor, k: int) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"logits.shape={tuple(logits.shape)} must be [rows, vocab] with vocab >= 1; "
            "for a single row pass logits[None]"
        )
    if logits.dtype not in INTEGER_FORM:
        raise ValueError(
            f"logits.dtype={logits.dtype} must be float32, bfloat16 or float16; pass logits.float()"
        )
    vocab = logits.shape[1]
    if vocab > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"logits.stride()={logits.stride()} must be 1 in the last dimension; pass logits.contiguous()"
        )
    if not 1 <= k <= min(vocab, MAX_K):
        raise ValueError(f"k={k} must be from 1 to min(vocab={vocab}, {MAX_K}); for more use torch.topk")
