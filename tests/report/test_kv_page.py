# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext kv``: its figures of quality against what they are defined by, and its page, without an engine."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_figures import invoke
from html_page import HOSTILE, Page
from rich.console import Console

from vllm_ext.bench import kv_quality
from vllm_ext.bench.divergence import Place, divergence, kl
from vllm_ext.bench.kv_quality import DEPTHS, Plan
from vllm_ext.cli.kv import show
from vllm_ext.report.kv_page import html


def place(log_probs: torch.Tensor, token: int, top: int) -> Place:
    """What vLLM says of a token: its log-probability, and the likeliest ``top`` tokens."""
    values, tokens = log_probs.topk(top)
    return Place(log_probs[token].item(), dict(zip(tokens.tolist(), values.tolist(), strict=True)))


@pytest.mark.parametrize("change", [0.0, 0.1, 1.0])
def test_kl_is_a_lower_bound_that_the_whole_vocabulary_reaches(change: float) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        logits = 3 * torch.randn(100, dtype=torch.float64)
        p, q = (
            torch.log_softmax(x, 0) for x in (logits, logits + change * torch.randn(100, dtype=torch.float64))
        )
        exact = (p.exp() * (p - q)).sum().item()
        whole, few = (kl(place(p, 0, top), place(q, 0, top)) for top in (100, 20))
        assert whole == pytest.approx(exact, abs=1e-9)
        assert few <= exact + 1e-9
        assert few >= 0.5 * exact - 1e-9
        if change:
            assert few != pytest.approx(kl(place(q, 0, 20), place(p, 0, 20)), rel=1e-6)


def test_divergence_by_position() -> None:
    def window(log_prob: float, best: int) -> list[Place]:
        return [Place(log_prob, {best: -0.3, 3 - best: -2.0}) for _ in range(16)]

    # The second half of the other's places has another likeliest token, and each token there is half as likely.
    plain, half = window(-1.0, 1), math.log(2)
    other = [*window(-1.0, 1)[:8], *window(-1.0 - half, 2)[8:]]
    found = divergence([plain, plain], [other, other])
    assert found["same_likeliest"] == 0.5
    rows = found["by_position"]
    assert [row["end"] for row in rows] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [row["perplexity_ratio"] for row in rows] == pytest.approx([1] * 4 + [2] * 4)
    assert [row["kl"] > 0.1 for row in rows] == [False] * 4 + [True] * 4
    assert found["kl"] == pytest.approx(sum(row["kl"] for row in rows) / 8)
    windows = divergence([plain, plain], [other, plain])["by_window"]
    assert [row["perplexity_ratio"] for row in windows] == pytest.approx([2**0.5, 1])
    assert [row["last_quarter"] for row in windows] == pytest.approx([2, 1])


def test_windows_are_of_the_text_and_prompts_have_no_common_beginning() -> None:
    tokens = list(range(100))
    assert kv_quality._windows(tokens, 40, 5) == [tokens[:40], tokens[40:80]]
    with pytest.raises(ValueError, match="the text has 100 tokens, fewer than the context of 101"):
        kv_quality._windows(tokens, 101, 1)
    prompts = kv_quality._different(tokens, 60, 4)
    assert [len(prompt) for prompt in prompts] == [60] * 4
    assert len({prompt[0] for prompt in prompts}) == 4


def test_pass_keys_are_said_at_their_depth_and_asked_for_at_the_end() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return list(text.encode())

    text = [random.Random(0).randrange(97, 123) for _ in range(3000)]
    plan = Plan(model="", text="", methods=[], context=600, keys=3)
    hidden = kv_quality._hidden_keys(Letters(), text, plan)
    assert [key.depth for key in hidden] == [depth for depth in DEPTHS for _ in range(3)]
    for key in hidden:
        whole = bytes(key.tokens).decode()
        asked, answer = whole[: -key.num_answer], whole[-key.num_answer :]
        assert len(asked) == plan.context
        assert asked.count(f"is{answer}. Remember it.") == 1
        assert asked.endswith(" is")
        said = asked.index("The pass key")
        assert said == pytest.approx(key.depth * plan.context, abs=120)
    assert len({bytes(key.tokens[-key.num_answer :]) for key in hidden}) == len(hidden)


def document(labels: list[str]) -> dict[str, Any]:
    """What a run comes to."""
    draw = random.Random(1)

    def keys() -> list[dict[str, float]]:
        return [{"depth": depth, "found": draw.random(), "log_prob": -draw.random()} for depth in DEPTHS]

    methods = [
        {
            "method": {"method": "kivi"},
            "label": label,
            "capacity_tokens": 137856,
            "capacity": 3.45,
            "bytes_per_token": 6660.0,
            "perplexity": 20.86 + i,
            "same_likeliest": 0.945,
            "kl": 0.0123,
            "answers": {"perplexity": 20.5, "kl": 0.02},
            "by_position": [
                {"end": 512 * (n + 1), "kl": 0.01 * n, "perplexity_ratio": 1.0} for n in range(8)
            ],
            "keys": keys(),
            "decode": [
                {"context": context, "speed": speed, "speed_rounds": [speed - 0.01, speed], "step_ms": 55.0}
                for context, speed in ((1024, 0.97), (7168, 1.3))
            ],
            "fill": {
                "requests": 12,
                "tokens": 98304,
                "finished": 12,
                "at_once": 12,
                "usage": 0.987,
                "preemptions": 0.0,
            },
        }
        for i, label in enumerate(labels)
    ]
    plain = {"capacity_tokens": 39936, "bytes_per_token": 23040.0, "perplexity": 20.64, "keys": keys()}
    plain["answers"] = {"perplexity": 20.0}
    environment = {
        "model": "/a/SmolLM2",
        "dtype": "bfloat16",
        "windows": 3,
        "context": 4096,
        "vllm": "0.32.0",
    }
    environment |= {"cpu_model": None, "command_line": ["vllm-ext", "kv", "report"]}
    return {"environment": environment, "plain": plain, "methods": methods}


def test_page_has_the_figures_and_nothing_from_outside(tmp_path: Path) -> None:
    given = document(["kivi", "gear, bits=2", HOSTILE])
    page = Page(html("kv.json", given))
    (table,) = [rows for caption, rows in page.tables.items() if caption.startswith("All methods")]
    rows = {name: [" ".join(cell.split()) for cell in cells] for name, cells in table.items()}
    (kivi,) = [cells for name, cells in rows.items() if name.endswith("kivi")]
    keys = f"{sum(row['found'] for row in given['methods'][0]['keys']) / 5:.0%}"
    expected = [
        "3.45x",
        "137,856",
        "6,660",
        "20.86",
        "+1.07 %",
        "0.0123",
        "94.5%",
        "20.50 +2.50 %",
        "0.0200",
        keys,
    ]
    assert kivi == [*expected, "0.97x 0.96-0.97", "1.30x 1.29-1.30"]
    assert len(page.lost) == 3  # decoding behind 1,024 of each
    assert "12 requests of 8,192 tokens at once, 12 finished, 0 preempted, 98.7% of it in use" in page.text
    assert len(page.svgs) >= 3
    assert not [tag for tag, _ in page.elements if tag in ("script", "img", "link")]
    assert not [given for _, given in page.elements if str(given.get("href", "")).startswith("http")]
    without_keys = document(["kivi"])
    for entry in (without_keys["plain"], *without_keys["methods"]):
        entry["keys"] = []
    assert "Pass keys" not in Page(html("kv.json", without_keys)).text
    older = document(["kivi"])  # than figures of answers
    for entry in (older["plain"], *older["methods"]):
        del entry["answers"]
    page = Page(html("kv.json", older))
    (table,) = [rows for caption, rows in page.tables.items() if caption.startswith("All methods")]
    assert [len(cells) for cells in table.values()] == [10, 10, 10]


def test_page_command(tmp_path: Path) -> None:
    figures, page = tmp_path / "kv.json", tmp_path / "kv.html"
    figures.write_text(json.dumps(document(["kivi"])))
    result = invoke("kv", "page", figures, "--html", page)
    assert result.exit_code == 0, result.output
    assert page.read_text() == html("kv.json", document(["kivi"]))
    for text, reason in (
        ("{", "not JSON"),
        ("[]", "not of vllm-ext kv report"),
        ("{}", "not of vllm-ext kv report"),
    ):
        figures.write_text(text)
        result = invoke("kv", "page", figures, "--html", page)
        assert result.exit_code == 2, result.output
        assert reason in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--method", "kiwi"], "unknown method 'kiwi'"),
        (["--method", '{"method": "kivi", "bits": 3}'], "bits=3 is not allowed"),
        (["--method", '{"method": '], "is not JSON"),
        (["--method", "kivi", "--decode-context", "1024,x"], "--decode-context='1024,x' is not allowed"),
        (["--method", "kivi", "--json", "/nowhere/kv.json"], "/nowhere"),
    ],
)
def test_report_refuses_by_name(tmp_path: Path, options: list[str], reason: str) -> None:
    text = tmp_path / "text"
    text.write_text("words " * 100)
    result = invoke("kv", "report", text, *options)
    assert result.exit_code == 2, result.output
    assert reason in " ".join(result.output.split())


def test_the_table_is_whole_at_80_columns() -> None:
    seen = io.StringIO()
    show(Console(file=seen, width=80), document(["kivi, bits=2, group_size=32", "streaming_llm"]))
    lines = [line.rstrip() for line in seen.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in seen.getvalue()
    assert "KV caches; vLLM's has room for 39,936 tokens" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert rows["vLLM's"][:3] == ["1.00x", "20.64", "20.00"]
    assert rows["streaming_llm"][:6] == ["3.45x", "+5.91%", "0.0123", "+2.50%", "0.0200", "94.5%"]
    assert rows["streaming_llm"][7:] == ["0.97x", "1.30x"]
    assert "kivi: kivi, bits=2, group_size=32" in lines
