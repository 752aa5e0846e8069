# SPDX-License-Identifier: Apache-2.0
"""Where in a JSON text its end is: what is open, and what stands there of the innermost."""

from __future__ import annotations

from typing import Any, NamedTuple


class Place(NamedTuple):
    """Of two texts with one place a schema usually has the same to hear.

    Usually: whether names of an object were there before its last one does not count.
    """

    levels: tuple[
        tuple[str, bytes | int], ...
    ] = ()  # by what is open the last name, or how many items are before
    begun: bytes = b""  # of a name or value that has not ended, or was the last to end
    in_string: bool = False
    escaped: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """Alike for places that differ in what was said of a value, not in how much."""
        kind, last = self.levels[-1] if self.levels else ("", 0)
        is_name = kind == "{" and isinstance(last, bytes) and (not last or last.endswith(b","))
        return self.levels, self.in_string, self.begun if is_name else len(self.begun)

    def behind(self, text: bytes) -> Place:
        """The place when so much more was read."""
        levels, begun, in_string, escaped = list(self.levels), bytearray(self.begun), *self[2:]
        for code in text:
            char = chr(code)
            if in_string:
                begun.append(code)
                in_string, escaped = escaped or char != '"', char == "\\" and not escaped
            elif char == '"':
                begun[:] = b'"'
                in_string = True
            elif char in "{[":
                levels.append((char, b"" if char == "{" else 0))
                begun.clear()
            elif char in "}]":
                if levels:
                    levels.pop()
                begun[:] = b"}"  # a value has ended: not the same as none that has begun
            elif char == ":":
                if levels:
                    levels[-1] = (levels[-1][0], bytes(begun))
                begun.clear()
            elif char == ",":
                if levels:
                    kind, last = levels[-1]
                    # In an object a name comes, and what begins is no value of the last one.
                    levels[-1] = kind, last + 1 if isinstance(last, int) else last + b","
                begun.clear()
            elif not char.isspace():
                begun.append(code)
        return Place(tuple(levels), bytes(begun), in_string, escaped)
