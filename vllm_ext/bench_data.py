# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-ext bench`` reads and computes: methods, prompts, figures. No vLLM in here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

PLAIN = "plain"
NUM_SPECULATIVE_TOKENS = 5
# Filled in when not given: vLLM's own ngram default, matches of exactly 5 tokens, rarely drafts.
DEFAULT_OPTIONS = {"ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2}}
WORKLOADS = ("fresh", "repeat")
PROMPT_FIELDS = ("messages", "turns", "question", "prompt")
# How far below the top log-probability a token may lie and still be a tie: about what another order
# of summation changes in a forward pass of 16 bits. float32 gets no such room.
TIE_TOLERANCE = {"bfloat16": 0.25, "float16": 0.25}
# bfloat16 logits of 16 to 32 lie 1/8 apart, so gaps of exactly 0.25 are common, and the softmax rounds them.
GAP_ROUNDING = 1e-4

T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """One column of the comparison."""

    name: str
    options: dict[str, Any]  # defaults filled in
    label: str  # as the user wrote it, spaces normalised

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        """What vLLM is given; None for plain."""
        return None if self.name == PLAIN else {"method": self.name, **self.options}


def parse_methods(text: str) -> list[Method]:
    """``plain,ngram(prompt_lookup_max=3),more.json`` -> methods; a missing plain is put first.

    Raises:
        ValueError: text that is not such a list, unreadable JSON, a label given twice.
    """
    methods: list[Method] = []
    for item in split_outside_brackets(text):
        methods.extend(_from_file(Path(item)) if item.endswith(".json") else [_from_text(item)])
    if all(method.name != PLAIN for method in methods):
        methods.insert(0, _method(PLAIN, {}))
    labels = [method.label for method in methods]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(
            f"--methods={text!r}: {', '.join(twice)} is given more than once; allowed: each method "
            "and option set once. Remove one, or give them different options."
        )
    return methods


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas that are in no bracket and no double quotes; strip; drop empty items."""
    items, start, depth, quoted = [], 0, 0, False
    for position, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif not quoted and character in "([{":
            depth += 1
        elif not quoted and character in ")]}":
            depth -= 1
        elif character == "," and depth == 0 and not quoted:
            items.append(text[start:position])
            start = position + 1
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def _from_text(item: str) -> Method:
    match = re.fullmatch(r"(\w[\w.\-]*)\s*(?:\((.*)\))?", item, re.DOTALL)
    if match is None:
        raise _bad_method(item)
    options = {}
    for pair in split_outside_brackets(match[2] or ""):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise _bad_method(item)
        options[key.strip()] = _json_or_text(value.strip())
    return _method(match[1], options)


def _from_file(path: Path) -> list[Method]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--methods: {path} cannot be read as JSON ({error}); correct the path or the file."
        ) from None
    entries = content if isinstance(content, list) else [content]
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("method"), str):
            raise ValueError(
                f"--methods: {path} holds {entry!r}; allowed: an object with a text `method` and "
                "its options, or a list of those."
            )
    return [_method(entry.pop("method"), entry) for entry in entries]


def _method(name: str, given: dict[str, Any]) -> Method:
    given = {key.replace("-", "_"): value for key, value in given.items()}
    pairs = ", ".join(f"{key}={_compact(value)}" for key, value in given.items())
    label = f"{name}({pairs})" if pairs else name
    if "method" in given:
        raise ValueError(f"--methods: {label}: remove 'method', the name before the brackets is it.")
    if name == PLAIN:
        if given:
            raise ValueError(f"--methods: {label}: plain takes no options; remove them.")
        return Method(name, {}, label)
    defaults = {"num_speculative_tokens": NUM_SPECULATIVE_TOKENS, **DEFAULT_OPTIONS.get(name, {})}
    return Method(name, {**defaults, **given}, label)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _bad_method(item: str) -> ValueError:
    return ValueError(
        f"--methods: {item!r} is not a method; allowed: NAME, NAME(key=value, ...) or a path "
        "ending in .json, separated by commas."
    )


def parse_batch_sizes(text: str) -> list[int]:
    """``1,4`` -> [1, 4].

    Raises:
        ValueError: anything but different positive integers.
    """
    items = [item.strip() for item in text.split(",")]
    sizes = [int(item) for item in items if item.isascii() and item.isdigit()]
    if len(sizes) != len(items) or 0 in sizes or len(set(sizes)) != len(sizes):
        raise ValueError(f"--batch-size={text!r} is not allowed; allowed: positive integers, each once: 1,4.")
    return sizes


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file."""

    source: str  # file:line
    category: str
    messages: list[dict[str, Any]]  # OpenAI chat


def load_prompts(paths: Iterable[Path]) -> list[Prompt]:
    """All prompts of the JSON-lines files, in order.

    Raises:
        ValueError: an unreadable file or a line without a prompt, as file:line.
    """
    prompts = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts={path} cannot be read ({error}); correct the path.") from None
        prompts += [
            _prompt(line, f"{path}:{number}", path.stem)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    if not prompts:
        raise ValueError("--prompts: the files hold no prompt; give at least one JSON line.")
    return prompts


def _prompt(line: str, source: str, default_category: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{source}: not JSON ({error}); give one JSON object a line.") from None
    fields = [name for name in PROMPT_FIELDS if name in entry] if isinstance(entry, dict) else []
    if not fields:
        raise ValueError(f"{source}: no prompt; allowed: an object with one of {', '.join(PROMPT_FIELDS)}.")
    field = fields[0]
    value = entry[field]
    if field == "turns" and isinstance(value, list) and value:
        value = value[0]  # a second turn would depend on the method's own first answer
    if field == "messages":
        valid = isinstance(value, list) and bool(value)
        valid = valid and all(isinstance(message, dict) and "role" in message for message in value)
    else:
        valid = isinstance(value, str) and bool(value.strip())
    if not valid:
        raise ValueError(
            f"{source}: {field}={value!r} is not a prompt; allowed: a text, for `turns` a list of "
            "texts, for `messages` a list of chat messages."
        )
    messages = value if field == "messages" else [{"role": "user", "content": value}]
    return Prompt(source, str(entry.get("category", default_category)), messages)


def evenly_spaced(items: Sequence[T], limit: int | None) -> list[T]:
    """At most ``limit`` items, spread over all: prompt files are often sorted by category."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


def rounds_of(num_prompts: int, num_rounds: int, workload: str) -> list[list[int]]:
    """The prompt indices of each round: disjoint for ``fresh``, all each time for ``repeat``.

    Raises:
        ValueError: an unknown workload, or a round without a prompt.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"--workload={workload!r} is not allowed; allowed: {', '.join(WORKLOADS)}")
    if workload == "repeat":
        return [list(range(num_prompts)) for _ in range(num_rounds)]
    if num_prompts < num_rounds:
        raise ValueError(
            f"--rounds={num_rounds} is not allowed with {num_prompts} prompts; allowed: at most "
            "one round a prompt. Lower --rounds, or give more prompts."
        )
    return [list(range(first, num_prompts, num_rounds)) for first in range(num_rounds)]


@dataclass
class Answer:
    """One request, as seen by the client of the engine."""

    prompt: int
    category: str
    submitted_s: float
    token_ids: list[int]
    step_times_s: list[float]  # of each engine step that gave it tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first, which is the prefill's."""
        return len(self.token_ids) - 1

    @property
    def decode_steps(self) -> int:
        """Steps after the first."""
        return len(self.step_times_s) - 1

    @property
    def decode_s(self) -> float:
        """First token to last."""
        return self.step_times_s[-1] - self.step_times_s[0]


@dataclass
class Round:
    """One method's answers to one round's prompts."""

    answers: list[Answer]
    wall_s: float
    num_draft_tokens: int
    draft_s: float | None  # None: this runner cannot be timed

    @property
    def decode_s(self) -> float:
        """Time during which at least one request was between its first and last token."""
        return union_s([(a.step_times_s[0], a.step_times_s[-1]) for a in self.answers])

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None when no answer has a second token."""
        return ratio(sum(answer.decode_tokens for answer in self.answers), self.decode_s)

    @property
    def e2e_tokens_per_s(self) -> float | None:
        """Prefill and queueing included."""
        return ratio(sum(len(answer.token_ids) for answer in self.answers), self.wall_s)


def union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """None when either is missing or there is nothing to divide by."""
    return numerator / denominator if numerator is not None and denominator else None


def _median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


@dataclass(frozen=True)
class Divergence:
    """The first place where a method's answer leaves plain's, and what plain thinks of it there."""

    prompt: int
    source: str
    position: int  # in the answer
    plain_token: int | None  # None: the answer had ended
    method_token: int | None
    preferred_token: int | None  # plain's first choice when asked again; None: not asked
    gap: float  # log-probability of the first choice minus that of the method's token
    top_gap: float  # first choice minus second

    def is_tie(self, tolerance: float) -> bool:
        """Whether plain itself hardly tells the tokens apart. Ending early or late never is one."""
        if self.plain_token is None or self.method_token is None:
            return False
        tolerance += GAP_ROUNDING if tolerance else 0.0
        return self.top_gap <= tolerance and self.gap <= tolerance

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} ({self.source}), position {self.position}: "
            f"plain {self.plain_token}, method {self.method_token}; asked again plain prefers "
            f"{self.preferred_token}, gap {self.gap:.3f}, first to second {self.top_gap:.3f}"
        )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Position of the first differing token; the shorter length for a prefix; None when equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def summarise(
    method: Method,
    batch_size: int,
    rounds: Sequence[Round],
    plain_rounds: Sequence[Round],
    divergences: Sequence[Divergence],
    tolerance: float,
) -> dict[str, Any]:
    """One entry of the JSON's ``runs``. Ratios pair rounds of the same prompts."""
    answers = [answer for round_ in rounds for answer in round_.answers]
    plain_answers = [answer for round_ in plain_rounds for answer in round_.answers]
    pairs = list(zip(rounds, plain_rounds, strict=True))
    speeds = [round_.decode_tokens_per_s for round_ in rounds]
    speedups = [ratio(ours.decode_tokens_per_s, plain.decode_tokens_per_s) for ours, plain in pairs]
    num_steps = sum(answer.decode_steps for answer in answers)
    draft_s = [round_.draft_s for round_ in rounds if round_.draft_s is not None]
    wrong = sum(not divergence.is_tie(tolerance) for divergence in divergences)
    categories = sorted({answer.category for answer in answers})
    return {
        "method": method.name,
        "label": method.label,
        "options": method.options,
        "batch_size": batch_size,
        "decode_tokens_per_s": _median(speeds),
        "decode_tokens_per_s_rounds": speeds,
        "speedup_vs_plain": _median(speedups),
        "speedup_vs_plain_rounds": speedups,
        "e2e_tokens_per_s": _median(round_.e2e_tokens_per_s for round_ in rounds),
        "e2e_speedup_vs_plain": _median(
            ratio(ours.e2e_tokens_per_s, plain.e2e_tokens_per_s) for ours, plain in pairs
        ),
        "ttft_ms": 1000 * median(answer.step_times_s[0] - answer.submitted_s for answer in answers),
        "tokens_per_step": _tokens_per_step(answers),
        "draft_tokens_per_step": ratio(sum(r.num_draft_tokens for r in rounds), num_steps),
        "draft_time_share": ratio(sum(draft_s), sum(round_.decode_s for round_ in rounds))
        if len(draft_s) == len(rounds)
        else None,
        "identical": len(answers) - len(divergences),
        "tie_divergences": len(divergences) - wrong,
        "wrong_divergences": wrong,
        "prompts": len(answers),
        "category": {
            category: _category(
                [answer for answer in answers if answer.category == category],
                [answer for answer in plain_answers if answer.category == category],
            )
            for category in categories
        },
    }


def _category(answers: Sequence[Answer], plain_answers: Sequence[Answer]) -> dict[str, Any]:
    speed = _request_speed(answers)
    return {
        "prompts": len(answers),
        "decode_tokens_per_s": speed,
        "speedup_vs_plain": ratio(speed, _request_speed(plain_answers)),
        "tokens_per_step": _tokens_per_step(answers),
    }


def _request_speed(answers: Sequence[Answer]) -> float | None:
    """Per request: requests of other categories in the batch cannot be told apart in the union."""
    return ratio(sum(a.decode_tokens for a in answers), sum(a.decode_s for a in answers))


def _tokens_per_step(answers: Sequence[Answer]) -> float | None:
    return ratio(sum(a.decode_tokens for a in answers), sum(a.decode_steps for a in answers))
