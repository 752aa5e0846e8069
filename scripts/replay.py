# SPDX-License-Identifier: Apache-2.0
"""Drafters on recorded answers, without an engine: in seconds, what a change does to their drafts and their cost.

    .venv/bin/python scripts/replay.py record --model MODEL --prompts FILE.jsonl:10 --answers answers.npz
    .venv/bin/python scripts/replay.py run --answers answers.npz --methods token_recycling,hybrid [--batch-size 32]

`record` has plain vLLM answer, greedily, and keeps what the target ranked highest at each position. `run` goes through
the answers as an engine would: observe, propose, accept the path that agrees. It prints

- tokens and nodes a step, with ``--nodes`` nodes verified in each, or ``--verified`` of so many: as many of each, or
  with ``--shared now`` the most probable ones of the batch, with ``late`` by the probabilities of each request's tree
  before; there is no goodput budget here, it goes by a real step's time;
- microseconds a request and step for `observe` and `propose` together, ``--batch-size`` requests at a time, by this
  thread's clock, which what else the machine does disturbs little: their median and 99th percentile over steps;
- what starting and finishing a request costs, which includes indexing its prompt;
- tokens a step by category.

Rejected nodes have no logits on record and teach nothing: the figures are a little below an engine's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TOP = 16  # successors recorded for each position
Int32 = npt.NDArray[np.int32]


@dataclass
class Answer:
    """One recorded answer, and how far its replay has come."""

    category: str
    text: Int32  # prompt and output
    num_prompt_tokens: int
    top_ids: Int32  # [num_output_tokens, TOP] for each output token, what stood for choice in its place
    top_logits: npt.NDArray[np.float32]
    request_id: str = ""
    length: int = 0  # tokens that are known
    row_tokens: list[int] = field(default_factory=list)  # rows of the last step


def record(model: str, prompts: list[Path], path: Path, max_tokens: int, dtype: str) -> None:
    """Ask, and write the file."""
    from vllm import LLM, SamplingParams

    from vllm_ext.data.prompts import load_prompts

    loaded = load_prompts(prompts)
    llm = LLM(model, dtype=dtype, max_model_len=2048, max_num_seqs=16, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=TOP)
    answers = llm.chat([prompt.messages for prompt in loaded], params)
    outputs = [answer.outputs[0] for answer in answers]
    best = [
        sorted(position.items(), key=lambda entry: -entry[1].logprob)[:TOP]
        for output in outputs
        for position in output.logprobs or []
    ]
    np.savez_compressed(
        path,
        category=[prompt.category for prompt in loaded],
        prompts=np.concatenate([np.array(answer.prompt_token_ids, np.int32) for answer in answers]),
        prompt_lengths=[len(answer.prompt_token_ids or ()) for answer in answers],
        outputs=np.concatenate([np.array(output.token_ids, np.int32) for output in outputs]),
        output_lengths=[len(output.token_ids) for output in outputs],
        top_ids=np.array([[token for token, _ in row] for row in best], np.int32),
        top_logits=np.array([[entry.logprob for _, entry in row] for row in best], np.float32),
    )
    print(f"{path}: {len(outputs)} answers, {len(best)} tokens")


def load(path: Path) -> list[Answer]:
    """The answers, mixed: a server's requests do not come by category."""
    saved = np.load(path)
    prompts = np.split(saved["prompts"], np.cumsum(saved["prompt_lengths"])[:-1])
    ends = np.cumsum(saved["output_lengths"])[:-1]
    parts = (np.split(saved[name], ends) for name in ("outputs", "top_ids", "top_logits"))
    answers = [
        Answer(str(category), np.concatenate([prompt, output]), len(prompt), top_ids, top_logits)
        for category, prompt, output, top_ids, top_logits in zip(
            saved["category"], prompts, *parts, strict=True
        )
        if len(output) > 1
    ]
    return [answers[i] for i in np.random.default_rng(0).permutation(len(answers))]


def waiting(answers: list[Answer], repeats: int) -> Iterator[Answer]:
    """All answers, asked ``repeats`` times over."""
    for turn in range(repeats):
        for i, answer in enumerate(answers):
            answer.request_id, answer.length = f"{turn}.{i}", answer.num_prompt_tokens
            answer.row_tokens = [int(answer.text[answer.length - 1])]
            yield answer


class Replay:
    """One proposer's way through the answers."""

    def __init__(
        self,
        proposer: Any,
        nodes: int,
        batch_size: int,
        verified: int | None = None,
        shared: str | None = None,
    ) -> None:
        self.proposer, self.nodes, self.batch_size = proposer, nodes, batch_size
        self.verified, self.shared = nodes if verified is None else verified, shared
        self.before: dict[str, Any] = {}  # probabilities of each request's last tree
        self.step_us: list[float] = []  # for each request, of each full step
        self.start_us: list[float] = []
        self.steps: dict[str, int] = defaultdict(int)
        self.tokens: dict[str, int] = defaultdict(int)
        self.drafted: dict[str, int] = defaultdict(int)

    def run(self, source: Iterator[Answer]) -> None:
        """Until nothing is left."""
        from vllm_ext.proposers.base import Request, Sampling

        greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
        running: list[Answer] = []
        drafts: dict[str, Any] = {}
        while True:
            running += [
                answer for _, answer in zip(range(self.batch_size - len(running)), source, strict=False)
            ]
            if not running:
                return
            started, emitted = [], []
            for answer in running:
                tree = drafts.pop(answer.request_id, None)
                if tree is None:
                    started.append(answer)
                emitted.append(self._accept(answer, tree))
            rows = self._rows(running, emitted)
            requests = {
                answer.request_id: Request(
                    answer.request_id,
                    answer.text[: answer.length],
                    answer.num_prompt_tokens,
                    self.nodes,
                    len(answer.text),
                    greedy,
                )
                for answer in running
                if answer.length < len(answer.text)
            }
            clock = time.thread_time()
            self.proposer.observe(rows)
            seconds = time.thread_time() - clock
            clock = time.thread_time()
            for answer in started:
                if answer.request_id in requests:
                    self.proposer.start(requests[answer.request_id])
            gone = [answer for answer in running if answer.length == len(answer.text)]
            for answer in gone:
                self.proposer.finish(answer.request_id)
            if started:
                self.start_us.append(1e6 * (time.thread_time() - clock) / len(started))
            clock = time.thread_time()
            trees = self.proposer.propose(list(requests.values()))
            seconds += time.thread_time() - clock
            if not started and not gone and len(running) == self.batch_size:
                self.step_us.append(1e6 * seconds / len(running))
            drafts.update(zip(requests, self._cut(list(requests), trees), strict=True))
            running = [answer for answer in running if answer.length < len(answer.text)]

    def _cut(self, names: list[str], trees: list[Any]) -> list[Any]:
        """The part of each that is verified."""
        from vllm_ext.proposers.level_budget import shared_out

        sizes = [self.verified] * len(trees)
        now = [tree.probabilities for tree in trees]
        known: list[Any] = [self.before.get(name) for name in names] if self.shared == "late" else now
        if self.shared:
            there = [place for place, tree in enumerate(known) if tree is not None]
            counts = shared_out([known[place] for place in there], self.verified * len(there))
            for place, count in zip(there, counts, strict=True):
                sizes[place] = count
        self.before.update(zip(names, now, strict=True))
        return [tree.prefix(size) for tree, size in zip(trees, sizes, strict=True)]

    def _accept(self, answer: Answer, tree: Any) -> list[int]:
        """Take the tree's path that agrees, and one token more; returns them."""
        path: list[int] = []
        if tree is not None:
            node = -1
            rest = answer.text[answer.length :]
            while len(path) < len(rest):
                below = np.flatnonzero((tree.parents == node) & (tree.tokens == rest[len(path)]))
                if not len(below):
                    break
                node = int(below[0])
                path.append(int(rest[len(path)]))
            self.drafted[answer.category] += len(tree)
            self.steps[answer.category] += 1
        emitted: list[int] = answer.text[answer.length : answer.length + len(path) + 1].tolist()
        if tree is not None:
            self.tokens[answer.category] += len(emitted)
        answer.row_tokens = [int(answer.text[answer.length - 1]), *emitted[:-1]]
        answer.length += len(emitted)
        return emitted

    def _rows(self, running: list[Answer], emitted: list[list[int]]) -> Any:
        from vllm_ext.proposers.base import VerifiedRows

        width = self.proposer.verified_top_k
        counts = [len(answer.row_tokens) for answer in running]
        ends = [answer.length - answer.num_prompt_tokens for answer in running]
        spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return VerifiedRows(
            [answer.request_id for answer in running],
            np.cumsum([0, *counts], dtype=np.int32),
            np.concatenate([np.array(answer.row_tokens, np.int32) for answer in running]),
            np.concatenate([np.arange(-1, count - 1, dtype=np.int32) for count in counts]),
            np.ones(sum(counts), np.bool_),
            np.concatenate([a.top_ids[span, :width] for a, span in zip(running, spans, strict=True)]),
            np.concatenate([a.top_logits[span, :width] for a, span in zip(running, spans, strict=True)]),
            emitted,
        )


def run(
    path: Path,
    methods: str,
    nodes: int,
    batch_size: int,
    repeats: int,
    vocab_size: int,
    verified: int | None,
    shared: str | None,
) -> None:
    """Replay each method and print its figures."""
    from vllm_ext.bench.settings import PLAIN, parse_methods
    from vllm_ext.proposers import registry

    for method in parse_methods(methods):
        if method.name == PLAIN:
            continue
        proposer_class = registry.load_method(method.name)
        options = proposer_class.Options.model_validate(method.options)
        proposer = proposer_class.from_options(options, vocab_size)
        proposer.warm_up()
        if proposer.verified_top_k > TOP:
            raise SystemExit(
                f"{method.label} wants {proposer.verified_top_k} logits a row, {TOP} are on record"
            )
        replay = Replay(proposer, nodes, batch_size, verified, shared)
        replay.run(waiting(load(path), repeats))
        steps = sum(replay.steps.values())
        print(
            f"{method.label}: {sum(replay.tokens.values()) / steps:.3f} tokens and "
            f"{sum(replay.drafted.values()) / steps:.2f} nodes a step; microseconds a request: step "
            f"{statistics.median(replay.step_us):.0f} (p99 {np.quantile(replay.step_us, 0.99):.0f}), "
            f"start and finish {statistics.median(replay.start_us):.0f}"
        )
        by_category = (
            f"{name} {replay.tokens[name] / replay.steps[name]:.2f}" for name in sorted(replay.steps)
        )
        print("   ", ", ".join(by_category))


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("--model", required=True)
    recorder.add_argument("--prompts", type=Path, action="append", required=True)
    recorder.add_argument("--max-tokens", type=int, default=128)
    recorder.add_argument("--dtype", default="bfloat16")
    runner = commands.add_parser("run")
    runner.add_argument("--methods", required=True, help="as `vllm-ext bench --methods`")
    runner.add_argument("--nodes", type=int, default=8)
    runner.add_argument("--verified", type=int, help="nodes of each tree, on average; default: all")
    runner.add_argument(
        "--shared", choices=("now", "late"), help="the batch's most probable ones; default: as many of each"
    )
    runner.add_argument("--batch-size", type=int, default=1)
    runner.add_argument("--repeats", type=int, default=1, help="how often all prompts are asked")
    runner.add_argument("--vocab-size", type=int, default=49152)
    for command in (recorder, runner):
        command.add_argument("--answers", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.model, arguments.prompts, arguments.answers, arguments.max_tokens, arguments.dtype)
    else:
        run(
            arguments.answers,
            arguments.methods,
            arguments.nodes,
            arguments.batch_size,
            arguments.repeats,
            arguments.vocab_size,
            arguments.verified,
            arguments.shared,
        )


if __name__ == "__main__":
    main()
