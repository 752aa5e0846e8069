# SPDX-License-Identifier: Apache-2.0
"""What a codec of KV blocks is: bytes for a full block of one KV head, and the keys and values they stand for.

A block is encoded once, when its last token is settled, from its own tokens alone: what is in it does not depend on how
a prompt was cut into chunks, on drafts, or on what comes behind it, so that blocks can be shared by requests with a
common prefix, and a request that starts again finds the same. A row of queries reads the blocks before its own
encoded, and its own as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict


class CodecOptions(BaseModel):
    """Of a server."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


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

    def __init__(self, options: Any, block_size: int, head_size: int) -> None:
        self.options, self.block_size, self.head_size = options, block_size, head_size

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Of one KV head, keys and values."""

    @property
    @abstractmethod
    def numbers(self) -> tuple[int, int]:
        """What the codec's kernels are told besides the sizes."""

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

    def raw_tokens_per_block(self, element_size: int) -> int:
        """How many tokens as they are have room in the bytes of a block, none of them in two."""
        return self.block_size * self.bytes_per_token // (2 * self.head_size * element_size)

    def tail_blocks(self, element_size: int, num_tokens: int) -> int:
        """Blocks behind the one that fills up whose bytes hold its tokens as they are.

        Args:
            element_size: bytes of an element of a key.
            num_tokens: that may stand there, those of drafts among them.
        """
        return -(-num_tokens // self.raw_tokens_per_block(element_size))
