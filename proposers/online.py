# SPDX-License-Identifier: Apache-2.0
"""Options of live distillation: a draft model goes on learning from what is asked, while the server runs.

Answers that have ended are kept in a folder. A process of its own follows it, trains the draft, and
writes versions of its weights, which the worker takes over between steps. Output stays the target's own whatever the
weights are: only how much is accepted changes.

Source: "Online Speculative Decoding", arXiv 2310.07177, algorithm 1 (`update_interval`, the buffer that is cleared, a
constant learning rate of 1e-4). Code: `vllm_ext.training.online`, `vllm_ext.engine.draft_model.online`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_ext.kernels.user_paths import UserPath


class OnlineOptions(BaseModel):
    """Options under ``online``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    dir: UserPath = Field(
        min_length=1,
        description="folder of answers that wait, as token ids, and of versions of the draft's weights",
    )
    update_interval: int = Field(
        default=8, ge=1, le=1024, description="answers that are handed to the trainer at once"
    )
    positions: Literal["wrong", "all"] = Field(
        default="all",
        description="where it learns: all, or, as in the paper, wrong: where its likeliest token was not the one that "
        "was put out, by which it unlearns others",
    )
    learning_rate: float = Field(default=1e-4, gt=0.0, le=0.1, description="constant, of AdamW")
    batch_tokens: int = Field(
        default=256, ge=1, le=65536, description="tokens of answers in a step of training, about"
    )
    passes: int = Field(
        default=3, ge=1, le=64, description="times that each answer is learnt from before it is deleted"
    )
    buffer_mb: float = Field(
        default=16.0, ge=1.0, le=65536.0, description="most of the answers that wait, the newest ones"
    )
    version_seconds: float = Field(
        default=30.0, ge=0.0, le=86400.0, description="least time between two versions"
    )
    kept_versions: int = Field(default=2, ge=1, le=100, description="versions that are left in the folder")
    device: str = Field(default="cpu", min_length=1, description="where it trains, as PyTorch names it")
    threads: int = Field(default=1, ge=1, le=256, description="most of the trainer's, on a CPU")
