# SPDX-License-Identifier: Apache-2.0
"""Codec snapkv: when a prompt is read, those of its blocks are kept that its last tokens attend to the most.

What a prompt's end looks at is what the answer will look at: of each block the attention of the last ``watched`` tokens
is summed, and the blocks of the largest sums, the first and the last ones remain, ``budget`` tokens in all.

Source: "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, section 4 and listing 1.
Deviations: whole blocks instead of tokens, which makes the pooling over neighbours superfluous; one choice for all
layers and heads, whose attention is added up, as a block has its part in each; the first tokens are always kept.
"""

from __future__ import annotations

from vllm_ext.codecs.selection import SelectingCodec, SelectionOptions


class SnapKVOptions(SelectionOptions):
    """Those of every codec that chooses blocks."""


class SnapKV(SelectingCodec):
    """The base classes' all: one choice, when the prompt ends."""

    name = "snapkv"
    summary = "of a prompt the blocks that its end attends to, as they are"
    paper = "arXiv 2404.14469"
    Options = SnapKVOptions
    EXAMPLES = ({"budget": 256},)
