# SPDX-License-Identifier: Apache-2.0
"""Caches that know how many bytes they hold, and whose keys stay short whatever they are made of."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
ENTRY_BYTES = 200  # of a key and its place


def digest(*parts: str | bytes | float | None) -> bytes:
    """16 bytes that stand for some values; others for others."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, str):
            data = b"s" + part.encode(errors="surrogatepass")
        else:
            data = b"b" + part if isinstance(part, bytes) else f"r{part!r}".encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()


class Kept(Generic[T]):
    """The values that were asked for last, up to some bytes of them; the last one in any case.

    Args:
        max_bytes: most of all values.
        bytes_of: how many one takes at most.
    """

    def __init__(self, max_bytes: int, bytes_of: Callable[[T], int]) -> None:
        self._max_bytes, self._bytes_of = max_bytes, bytes_of
        self._values: OrderedDict[bytes, T] = OrderedDict()
        self.num_bytes = 0  # of all values there are

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def of(self, key: bytes, make: Callable[[], T]) -> T:
        """The value of a key, made where it is not there. What ``make`` raises is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._values[key] = make()
        self.num_bytes += ENTRY_BYTES + self._bytes_of(value)
        while self.num_bytes > self._max_bytes and len(self._values) > 1:
            self.num_bytes -= ENTRY_BYTES + self._bytes_of(self._values.popitem(last=False)[1])
        return value
