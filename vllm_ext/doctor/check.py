# SPDX-License-Identifier: Apache-2.0
"""One line of what `vllm-ext doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    status: Status
    what: str
    found: str
    way_out: str = ""
    short: str = ""  # what the short report says of it where it is fine; nothing: it is left out
