# SPDX-License-Identifier: Apache-2.0
"""What it costs a draft with caches of its own to read what it has not read of a request: its prompt, at first.

It reads nothing before it drafts. Then that is spread over the tokens which a request still puts out, as far as one
knows: as many as those that have ended.
"""

from __future__ import annotations

ANSWER = 128.0  # tokens that a request is believed to put out, before any has ended
ANSWER_RATE = 0.05
READING_ROWS = 256  # a pass of so many is half of what is believed of a row's cost where many are read


class ReadingCost:
    """Learnt from passes that read much, and from requests that have ended."""

    def __init__(self) -> None:
        self._row: float | None = None  # seconds of one where many are read
        self._answer = ANSWER

    def row_seconds(self, otherwise: float) -> float:
        """Of a token among many; ``otherwise`` as long as none were read."""
        return otherwise if self._row is None else self._row

    def steps(self, tokens: float) -> float:
        """Steps that a request takes in which it puts out so many ``tokens`` each: one at least."""
        return max(self._answer / tokens, 1.0)

    def record(self, seconds: float, rows: int) -> None:
        """A pass of the draft over what it had not read."""
        known = seconds / rows if self._row is None else self._row
        self._row = known + rows / (rows + READING_ROWS) * (seconds / rows - known)

    def ended(self, num_tokens: int) -> None:
        """A request is gone that has put out so many."""
        self._answer += ANSWER_RATE * (max(num_tokens, 1) - self._answer)
