# SPDX-License-Identifier: Apache-2.0
"""How messages quote what users have given."""

from __future__ import annotations

MOST_QUOTED = 200  # characters of a value in a message


def quoted(value: object) -> str:
    """A value as a message quotes it: its beginning where it is long; of exceptions their text."""
    if isinstance(value, (str, bytes)) and len(value) > MOST_QUOTED:
        value = value[:MOST_QUOTED]
        return f"{value!r:.{MOST_QUOTED}}..."
    text = str(value) if isinstance(value, BaseException) else repr(value)
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}..."
