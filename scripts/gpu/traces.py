# SPDX-License-Identifier: Apache-2.0
"""Recordings of a real model's answers, and what it ranked highest behind each token: what planted logits come from.

    .venv/bin/python scripts/gpu/traces.py --out traces.npz FILE.jsonl:6 [FILE.jsonl:20 ...]

SmolLM2-135M answers greedily on this machine. Three kinds of rows are kept, each with its 8 largest logits:

- ``answer``: behind each token of an answer, as plain vLLM computed it;
- ``reject``: behind draft nodes that were rejected, as two of our methods made them verify;
- ``token``: behind each token of the vocabulary when nothing stands before it, for nodes that no run has verified.

A model of another shape and random weights then answers what SmolLM2 answered (`planted`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TOP = 8
MODEL_VOCABULARY = 49152  # SmolLM2's; behind these ids there is one for each trace, its prompt's first token
MAX_PROMPT = 384
# What verifies nodes that are then rejected.
DRAFTERS: tuple[dict[str, Any], ...] = (
    {"method": "token_recycling", "num_speculative_tokens": 24, "budget": "fixed"},
    {"method": "hybrid", "num_speculative_tokens": 24, "budget": "fixed"},
)
KINDS = ("answer", "reject", "token")


@dataclass
class Traces:
    """All recordings.

    Args:
        vocabulary: ids below are the recorded model's; id ``vocabulary + t`` begins the prompt of trace ``t``.
        prompts: of each trace, with that id.
        outputs: of each trace.
        categories: of each trace.
        keys: int64 ``[rows]``, ascending; see `key_of`. A row of kind ``token`` has trace and position -1.
        kinds: uint8 ``[rows]`` place in `KINDS`.
        top_ids: uint16 ``[rows, TOP]`` best first.
        below: float16 ``[rows, TOP]`` each logit less the largest of its row.
    """

    vocabulary: int
    prompts: list[list[int]]
    outputs: list[list[int]]
    categories: list[str]
    keys: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    top_ids: npt.NDArray[np.uint16]
    below: npt.NDArray[np.float16]

    def save(self, path: Path) -> None:
        """Write the file."""
        np.savez_compressed(
            path,
            vocabulary=self.vocabulary,
            prompts=np.concatenate([np.array(prompt, np.int32) for prompt in self.prompts]),
            prompt_lengths=[len(prompt) for prompt in self.prompts],
            outputs=np.concatenate([np.array(output, np.int32) for output in self.outputs]),
            output_lengths=[len(output) for output in self.outputs],
            categories=self.categories,
            keys=self.keys,
            kinds=self.kinds,
            top_ids=self.top_ids,
            below=self.below,
        )

    @classmethod
    def load(cls, path: Path) -> Traces:
        """Read the file."""
        saved = np.load(path)

        def lists(name: str) -> list[list[int]]:
            parts = np.split(saved[name], np.cumsum(saved[f"{name[:-1]}_lengths"])[:-1])
            return [part.tolist() for part in parts]

        return cls(
            int(saved["vocabulary"]),
            lists("prompts"),
            lists("outputs"),
            saved["categories"].tolist(),
            *(saved[name] for name in ("keys", "kinds", "top_ids", "below")),
        )


def key_of(trace: Any, position: Any, token: Any) -> Any:
    """One integer of a row's trace, position in the text and input token; -1 and -1 for a token with nothing before it.

    As `planted` computes it on the device.
    """
    return ((trace + 1) << 40) + ((position + 1) << 20) + token


def pack(rows: list[tuple[int, int, int, int, Any, Any]]) -> tuple[Any, Any, Any, Any]:
    """Keys, kinds, ids, logits of rows (kind, trace, position, token, ids, logits); of equal keys the first stays."""
    keys = np.array([key_of(*row[1:4]) for row in rows], np.int64)
    unique, first = np.unique(keys, return_index=True)
    chosen = [rows[place] for place in first]
    ids = np.array([row[4][:TOP] for row in chosen])
    logits = np.array([row[5][:TOP] for row in chosen], np.float32)
    below = np.clip(logits - logits[:, :1], -16.0, 0.0)
    return (
        unique,
        np.array([row[0] for row in chosen], np.uint8),
        ids.astype(np.uint16),
        below.astype(np.float16),
    )


def record(model: str, files: list[Path], path: Path, tokens: int, count: int) -> None:
    """Ask, verify, and write the file."""
    from vllm import SamplingParams

    from vllm_ext.bench.engine import chat_token_ids
    from vllm_ext.data.prompts import load_prompts

    loaded = load_prompts(files)
    llm = _engine(model, None)
    tokenizer = llm.get_tokenizer()
    prompts = [(prompt.category, chat_token_ids(tokenizer, prompt.messages)) for prompt in loaded]
    prompts = [(category, text) for category, text in prompts if len(text) <= MAX_PROMPT]
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=TOP)
    answers = [
        output.outputs[0] for output in llm.generate([{"prompt_token_ids": t} for _, t in prompts], params)
    ]
    llm.llm_engine.engine_core.shutdown()
    # Of equal length, so that a batch stays as large as it is.
    whole = [place for place, answer in enumerate(answers) if len(answer.token_ids) == tokens]
    whole = sorted(np.random.default_rng(0).permutation(whole)[:count].tolist())
    print(f"{len(whole)} of {len(prompts)} prompts have {tokens} tokens of answer and are taken")
    texts = [prompts[place][1] for place in whole]
    outputs = [list(answers[place].token_ids) for place in whole]
    rows: list[tuple[int, int, int, int, Any, Any]] = []
    for trace, place in enumerate(whole):
        text = texts[trace] + outputs[trace]
        for step, position in enumerate(answers[place].logprobs):
            best = sorted(
                position.items(), key=lambda entry: (entry[0] != outputs[trace][step], -entry[1].logprob)
            )
            at = (
                len(texts[trace]) + step
            )  # one more than in the text: there the prompt has its trace's id first
            rows.append(
                (0, trace, at, text[at - 1], [t for t, _ in best], [entry.logprob for _, entry in best])
            )
    for method in DRAFTERS:
        rows += _rejected(model, method, texts, outputs)
    rows += _alone(model)
    traces = Traces(
        MODEL_VOCABULARY,
        [[MODEL_VOCABULARY + trace, *text] for trace, text in enumerate(texts)],
        outputs,
        [prompts[place][0] for place in whole],
        *pack(rows),
    )
    traces.save(path)
    counts = np.bincount(traces.kinds, minlength=len(KINDS))
    print(
        f"{path}: {path.stat().st_size / 1e6:.1f} MB, rows {dict(zip(KINDS, counts.tolist(), strict=True))}"
    )


def _engine(model: str, method: dict[str, Any] | None) -> Any:
    from vllm import LLM

    return LLM(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=True,
        speculative_config=method,
        enable_prefix_caching=False,
        worker_extension_cls="traces.Recorder",
    )


def _rejected(
    model: str, method: dict[str, Any], texts: list[list[int]], outputs: list[list[int]]
) -> list[tuple[int, int, int, int, Any, Any]]:
    """Rows of nodes that one method made verify, as long as the answer is plain's."""
    from vllm import SamplingParams

    llm = _engine(model, method)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        llm.collective_rpc("record_rows", args=(str(file),))
        params = SamplingParams(temperature=0, max_tokens=len(outputs[0]), ignore_eos=True)
        llm.generate([{"prompt_token_ids": text} for text in texts], params)
        llm.llm_engine.engine_core.shutdown()
        steps = [json.loads(line) for line in file.read_text().splitlines()]
    emitted: dict[int, list[int]] = {trace: [] for trace in range(len(texts))}
    rows = []
    for step in steps:
        trace = step["trace"]
        before = emitted[trace]
        if before == outputs[trace][: len(before)]:
            depths: list[int] = []
            for parent, token, accepted, ids, logits in zip(
                step["parents"], step["tokens"], step["accepted"], step["ids"], step["logits"], strict=True
            ):
                depths.append(0 if parent < 0 else depths[parent] + 1)
                if not accepted:
                    at = len(texts[trace]) + len(before) + depths[-1]
                    rows.append((1, trace, at, token, ids, logits))
        before += step["emitted"]
    same = sum(emitted[trace] == output for trace, output in enumerate(outputs))
    print(
        f"{method['method']}: {len(rows)} rejected rows, {same} of {len(outputs)} answers as plain's to the end"
    )
    return rows


def _alone(model: str) -> list[tuple[int, int, int, int, Any, Any]]:
    """Each token of the vocabulary behind nothing."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    rows: list[tuple[int, int, int, int, Any, Any]] = []
    with torch.inference_mode():
        for tokens in torch.split(torch.arange(MODEL_VOCABULARY)[:, None], 1024):
            logits, ids = network(tokens).logits[:, 0].float().topk(TOP)
            rows += [
                (2, -1, -1, int(token), i, v)
                for token, i, v in zip(tokens[:, 0], ids.tolist(), logits.tolist(), strict=True)
            ]
    return rows


def synthetic(path: Path, vocabulary: int = 1000, count: int = 8, tokens: int = 24) -> None:
    """Small ones that no model has made, for a dry run: each token has eight successors, mostly the first follows."""
    generator = np.random.default_rng(0)
    successors = np.array([generator.choice(vocabulary, TOP, replace=False) for _ in range(vocabulary)])
    logits = np.sort(generator.uniform(0, 10, (vocabulary, TOP)))[:, ::-1]
    rows: list[tuple[int, int, int, int, Any, Any]] = [
        (2, -1, -1, token, successors[token], logits[token]) for token in range(vocabulary)
    ]
    prompts, outputs = [], []
    for trace in range(count):
        text = generator.integers(0, vocabulary, 9).tolist() * 2
        prompts.append([vocabulary + trace, *text])
        for step in range(tokens):
            first = int(generator.uniform() < 0.25)
            order = np.roll(successors[text[-1]], -first)
            rows.append((0, trace, len(prompts[-1]) - 1 + step, text[-1], order, logits[text[-1]]))
            text.append(int(order[0]))
        outputs.append(text[-tokens:])
    Traces(vocabulary, prompts, outputs, ["synthetic"] * count, *pack(rows)).save(path)


class Recorder:
    """A ``worker_extension_cls``: writes down what a proposer is told of the rows that were verified."""

    model_runner: Any  # the worker's

    def record_rows(self, path: str) -> None:
        """From now on, one line of JSON for each request of each step."""
        proposer = self.model_runner.drafter.proposer
        observe = proposer.observe
        numbers: dict[str, int] = {}
        file = Path(path).open("w", buffering=1)  # noqa: SIM115  # as long as the engine

        def observing(rows: Any) -> None:
            observe(rows)
            for place, name in enumerate(rows.request_ids):
                part = slice(rows.row_start[place], rows.row_start[place + 1])
                if not rows.emitted[place]:
                    continue
                line = {
                    "trace": numbers.setdefault(name, int(name.split("-")[0])),
                    "tokens": rows.tokens[part].tolist(),
                    "parents": rows.parents[part].tolist(),
                    "accepted": rows.accepted[part].tolist(),
                    "ids": rows.top_ids[part, :TOP].tolist(),
                    "logits": rows.top_logits[part, :TOP].tolist(),
                    "emitted": list(rows.emitted[place]),
                }
                file.write(json.dumps(line) + "\n")

        proposer.observe = observing


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "prompts", type=Path, nargs="*", help="as `vllm-ext bench --prompts`; none: synthetic ones"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=160, help="of each answer; shorter ones are left out")
    parser.add_argument("--count", type=int, default=80, help="answers at most")
    arguments = parser.parse_args()
    if not arguments.prompts:
        synthetic(arguments.out)
        return
    from vllm_ext.demo.embedded_model import ensure_model

    record(str(ensure_model()), arguments.prompts, arguments.out, arguments.tokens, arguments.count)


if __name__ == "__main__":
    main()
