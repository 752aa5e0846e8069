# SPDX-License-Identifier: Apache-2.0
"""What settings of a KV codec cost in quality, in torch and without an engine: many of them in the time of one.

    .venv/bin/python scripts/kv_variants.py TEXT --json variants.json \\
        --method '{"method": "streaming_llm", "window": 1920}' \\
        --method '{"method": "chelsea", "window": 1408, "ratio": 5}'

Of each window of the text the first three quarters are read once, as the model does. Their keys and values are what
each method starts from, and only the last quarter is read through its blocks: so what a method does to the hidden
states before is left out, which `vllm-ext kv report` has. The table: tokens that a row reads at the end, in the mean
and at most, its own block among them; by how much the perplexity of the last quarter is higher than the model's; the
difference from the first method's, by token and window, with its standard error over windows; and the KL divergence.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import AttentionMaskInterface

from vllm_ext.codecs.base import KVCodec
from vllm_ext.config import kv_cache
from vllm_ext.demo import embedded_model

NAME, ROWS = "vllm_ext_held", 256  # of plain attention at once

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Layer, queries ``[heads, rows, head_size]``, keys and values ``[kv_heads, rows, head_size]``, scale: the output."""


class Reader:
    """A model whose attention is a function that can be changed."""

    def __init__(self, model: str) -> None:
        self.attend: Attend
        AttentionInterface.register(NAME, self._forward)
        AttentionMaskInterface.register(NAME, lambda *args, **options: None)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=NAME
        ).eval()
        self.num_layers = int(self._model.config.num_hidden_layers)

    def _forward(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float,
        **options: Any,
    ) -> tuple[Tensor, None]:
        found = self.attend(module.layer_idx, query[0], key[0], value[0], scaling)
        return found.transpose(0, 1)[None], None

    def log_probs(self, tokens: list[int], begin: int, behind: int, attend: Attend) -> Tensor:
        """What is said behind the tokens from ``behind`` on, those before ``begin`` not being read.

        float32 ``[len(tokens) - behind, vocabulary]``.
        """
        self.attend = attend
        positions = torch.arange(begin, len(tokens))[None]
        ids = torch.tensor(tokens[begin:])[None]
        logits = self._model(
            ids, position_ids=positions, use_cache=False, logits_to_keep=len(tokens) - behind
        )
        return torch.log_softmax(logits.logits[0], -1)


def softmax_over(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Of rows that are the last of the keys, causal among themselves; ``bias`` is ``[kv_heads, keys]``."""
    heads, rows, size = query.shape
    kv_heads, keys = key.shape[:2]
    scores = query.reshape(kv_heads, -1, size) @ key.mT * scale + bias[:, None]
    later = torch.full((rows, rows), -math.inf).triu(1)
    scores.view(kv_heads, -1, rows, keys)[..., keys - rows :] += later
    return (scores.softmax(-1) @ value).view(heads, rows, size)


class Plain:
    """Attention over all tokens, which keeps keys and values of those before ``begin``."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Attend`."""
        self.kept[layer] = key[:, : self.begin].clone(), value[:, : self.begin].clone()
        parts = []
        for start in range(0, key.shape[1], ROWS):
            end = min(start + ROWS, key.shape[1])
            bias = torch.zeros(len(key), end)
            parts.append(softmax_over(query[:, start:end], key[:, :end], value[:, :end], bias, scale))
        return torch.cat(parts, 1)


class Held:
    """Attention of the tokens from ``begin`` on over a codec's blocks of those before their own."""

    def __init__(self, codec: KVCodec, plain: Plain) -> None:
        self.codec, self.plain, self.begin = codec, plain, plain.begin
        self.held: list[int] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Attend`."""
        codec, size = self.codec, self.codec.block_size
        whole = [
            torch.cat([old, new], 1) for old, new in zip(self.plain.kept[layer], (key, value), strict=True)
        ]
        num = whole[0].shape[1] // size
        keys, values = (each[:, : num * size].view(len(each), num, size, -1) for each in whole)
        encoded = codec.encode(keys, values)
        was = encoded.clone()  # rows before a span is merged read its first block as it was
        spans = codec.format.num_spans(num - 1)
        for span in range(spans):
            of_span = codec.format.blocks_of(span)
            encoded[:, of_span[0]] = codec.merge(encoded[:, of_span[0] : of_span[-1] + 1])
        parts, self.held = [], []
        for block in range(self.begin // size, num):
            read = codec.format.blocks_read(block)
            merged = {codec.format.blocks_of(span)[0] for span in range(codec.format.num_spans(block))}
            blocks = torch.stack([(encoded if each in merged else was)[:, each] for each in read], 1)
            bias = codec.log_counts(blocks)
            own = slice(block * size, (block + 1) * size)
            held_keys, held_values = (
                torch.cat([old.flatten(1, 2), new[:, own]], 1)
                for old, new in zip(codec.decode(blocks), whole, strict=True)
            )
            if bias is None:
                bias = torch.zeros(*blocks.shape[:2], size)
            bias = torch.cat([bias.flatten(1), torch.zeros(len(bias), size)], 1)
            rows = slice(block * size - self.begin, (block + 1) * size - self.begin)
            parts.append(softmax_over(query[:, rows], held_keys, held_values, bias, scale))
            self.held.append((len(read) + 1) * size)
        return torch.cat(parts, 1)


def measure(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """A row for each method: the same list after each window."""
    model = arguments.model or str(embedded_model.ensure_model())
    reader = Reader(model)
    tokens = AutoTokenizer.from_pretrained(model).encode(arguments.text.read_text(encoding="utf-8"))
    context = arguments.context
    starts = range(0, len(tokens) - context + 1, context)[: arguments.windows]
    windows = [tokens[start : start + context] for start in starts]
    begin = context * 3 // 4
    rows = [{"method": json.loads(each), "held": [], "changes": [], "kl": []} for each in arguments.method]
    for i, window in enumerate(windows):
        print(f"window {i + 1} of {len(windows)}", flush=True)
        plain = Plain(begin)
        expected = reader.log_probs(window, 0, begin, plain)
        target = torch.tensor(window[begin + 1 :])[:, None]
        for row in rows:
            codec = kv_cache.parse(row["method"]).codec(arguments.block_size, plain.kept[0][0].shape[-1])
            held = Held(codec, plain)
            found = reader.log_probs(window, begin, begin, held)
            row["held"] = held.held
            lost = (expected[:-1] - found[:-1]).gather(1, target).mean()
            row["changes"].append(float(lost))
            row["kl"].append(float((expected.exp() * (expected - found)).sum(-1)[:-1].mean()))
        yield rows


def main() -> None:
    """Read the arguments, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--method", action="append", required=True, help="JSON; those that read all alike")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", default=None)
    parser.add_argument("--context", type=int, default=4096, help="a multiple of four blocks")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--block-size", type=int, default=64)
    arguments = parser.parse_args()
    with torch.inference_mode():
        for rows in measure(arguments):  # after each window: what is measured is not lost
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("held at the end, mean, most | perplexity | beside the first | KL | method")
    for row in rows:
        beside = [one - other for one, other in zip(row["changes"], rows[0]["changes"], strict=True)]
        error = statistics.stdev(beside) / len(beside) ** 0.5 if len(beside) > 1 else math.nan
        print(
            f"{row['held'][-1]} {statistics.fmean(row['held']):.0f} {max(row['held'])} | "
            f"{100 * statistics.fmean(row['changes']):+.2f} % | "
            f"{100 * statistics.fmean(beside):+.2f} +- {100 * error:.2f} | {statistics.fmean(row['kl']):.4f} | "
            f"{json.dumps(row['method'])}"
        )


if __name__ == "__main__":
    main()
