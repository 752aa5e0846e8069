# SPDX-License-Identifier: Apache-2.0
"""What a codec of KV blocks is: bytes for a full block of one KV head, and the keys and values they stand for.

A block is encoded once, when its last token is settled, from its own tokens alone: what is in it does not depend on how
a prompt was cut into chunks, on drafts, or on what comes behind it, so that blocks can be shared by requests with a
common prefix, and a request that starts again finds the same. A row of queries reads the blocks before its own
encoded, and its own as it is.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from vllm_ext.kernels.block_format import BlockFormat

if TYPE_CHECKING:
    import torch

    from vllm_ext.codecs.selection import EvictionPolicy


class CodecOptions(BaseModel):
    """Of a server: what all codecs have."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    window: int | None = Field(
        default=None,
        ge=1,
        description="how many tokens before its own block a token reads, rounded up to whole blocks; those before are "
        "forgotten, and their blocks freed. None: all",
    )
    sinks: int = Field(
        default=4,
        ge=0,
        description="how many of the first tokens are read all the same, rounded up to whole blocks",
    )


class KVCodec(ABC):
    """A codec for one size of block and head.

    Args:
        options: of ``Options``.
        block_size: tokens of a block.
        head_size: elements of a key, and of a value.

    Raises:
        ValueError: the sizes do not go with the options.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    Options: ClassVar[type[CodecOptions]]
    CACHES_PREFIXES: ClassVar[bool] = True
    """Whether a full block stays as it is, so that another request may begin with it."""
    ANSWERS_READ_LESS: ClassVar[bool] = False
    """Whether tokens behind a prompt read less than those in it: see `choice`. Blocks of answers are then no part of
    another request's prompt."""
    CHOOSES_AGAIN: ClassVar[bool] = False
    """Whether tokens behind a prompt are asked what they attend to, too; what is chosen then is read from the beginning
    of a block on."""
    WHY_V1: ClassVar[str] = (
        "encodes blocks, and kernels that read them run on CPUs alone, on vLLM's V1 runner"
    )
    """Why there is no form for vLLM's V2 runner, and so for GPUs; "": there is one."""
    RAW_VECTORS: ClassVar[int] = 2
    """Of a token as it is: its key, its value, and maybe the mean of the queries that go with its key."""
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Options with which tests run it: windows and budgets that short texts outgrow."""
    KERNELS: ClassVar[str] = ""
    """The codec whose kernels these blocks take; "": its own."""
    BLOCK_SIZE: ClassVar[int] = 64
    """Where the user has not said. What is not encoded yet takes the more room, and is the more, the larger it is."""

    def __init__(self, options: Any, block_size: int, head_size: int) -> None:
        self.options, self.block_size, self.head_size = options, block_size, head_size

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Of one KV head, keys and values."""

    @property
    @abstractmethod
    def numbers(self) -> tuple[int, ...]:
        """What the codec's kernels are told besides the sizes: up to four."""

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The readable form of what the kernels do.

        Args:
            keys: float32 ``[..., block_size, head_size]``.
            values: the same.

        Returns:
            uint8 ``[..., block_size * bytes_per_token]``.
        """

    @abstractmethod
    def decode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that `encode`'s bytes stand for."""

    def merge(self, spans: torch.Tensor) -> torch.Tensor:
        """The one block that `span_blocks` blocks become.

        Args:
            spans: uint8 ``[..., span_blocks, bytes]``, as `encode` makes them.

        Returns:
            uint8 ``[..., bytes]``, which `decode` and `log_counts` take too.
        """
        raise NotImplementedError

    def log_counts(self, blocks: torch.Tensor) -> torch.Tensor | None:
        """What is added to the scores of a block's tokens, the logarithm of how many each stands for.

        float32 ``[..., block_size]``; None: each stands for itself.
        """
        return None

    @property
    def span_blocks(self) -> int:
        """How many blocks that lie before the window become one; 0: they are not read."""
        return 0

    @property
    def window_blocks(self) -> int | None:
        """How many blocks before its own a row reads; None: all."""
        return None if self.options.window is None else -(-self.options.window // self.block_size)

    @property
    def sink_blocks(self) -> int:
        """How many of the first blocks are read whatever the window is."""
        return -(-int(self.options.sinks) // self.block_size)

    @property
    def watched_tokens(self) -> int:
        """How many of a prompt's last tokens are asked what they attend to; these are never taken from the cache."""
        return 0

    def choice(self, prompt_len: int) -> EvictionPolicy | None:
        """What a request with a prompt of so many tokens reads behind it; None: what `blocks_read` says."""
        return None

    def retrieve(self, queries: torch.Tensor, blocks: torch.Tensor, scale: float) -> list[int]:
        """The blocks that a row reads of those before its own, ascending; of codecs with a choice of RETRIEVED.

        Args:
            queries: float32 ``[num, head_size]``: of the tokens of its block so far, its own the last, the mean of the
                queries that go with a KV head.
            blocks: uint8 ``[blocks before its own, bytes]`` of that KV head.
            scale: of attention's scores.
        """
        raise NotImplementedError

    @functools.cached_property
    def format(self) -> BlockFormat:
        """What the kernels take of this codec."""
        return BlockFormat(
            name=self.name,
            kernels=self.KERNELS or self.name,
            block_size=self.block_size,
            head_size=self.head_size,
            bytes_per_token=self.bytes_per_token,
            raw_vectors=self.RAW_VECTORS,
            numbers=self.numbers,
            window_blocks=self.window_blocks,
            sink_blocks=self.sink_blocks,
            span_blocks=self.span_blocks,
            encode=self.encode,
            decode=self.decode,
            merge=self.merge,
            log_counts=self.log_counts,
            retrieve=self.retrieve,
        )
