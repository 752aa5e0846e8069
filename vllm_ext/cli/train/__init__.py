# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext train``: draft models, heads that draft, and heads of early exits."""

from __future__ import annotations

import typer

from vllm_ext.cli.train.draft import draft_command
from vllm_ext.cli.train.exits import exits_command
from vllm_ext.cli.train.heads import heads_command

train_app = typer.Typer(help="Train draft models and heads.", no_args_is_help=True)
train_app.command("draft", short_help="Distil a small draft model from the target's answers.")(draft_command)
train_app.command("heads", short_help="Train heads that draft from hidden states.")(heads_command)
train_app.command("exits", short_help="Train heads of early exits, for layerskip and del.")(exits_command)
