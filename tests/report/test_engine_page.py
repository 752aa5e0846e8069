# SPDX-License-Identifier: Apache-2.0
"""The bench's page: read back as a browser would, its figures beside the JSON's."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from html_page import HOSTILE, Page

from vllm_ext.report.bench_page import html

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"


def run(label: str, size: int, speedup: float, wrong: int = 0) -> dict[str, Any]:
    """A run whose every figure can be told from the others."""
    rounds = [speedup - 0.11, speedup, speedup + 0.23]
    return {
        "method": label,
        "label": label,
        "options": {},
        "batch_size": size,
        "decode_tokens_per_s": 30 * speedup,
        "decode_tokens_per_s_rounds": [30 * value for value in rounds],
        "speedup_vs_plain": speedup,
        "speedup_vs_plain_rounds": rounds,
        "tokens_per_step": speedup + 0.5,
        "tokens_per_step_rounds": [speedup + 0.4, speedup + 0.6],
        "draft_tokens_per_step": 3 * speedup,
        "draft_tokens_per_step_rounds": [2.9 * speedup, 3.1 * speedup],
        "draft_time_share": 0.0123 * speedup,
        "prompts": 9,
        "identical": 6 - wrong,
        "tie_divergences": 3,
        "wrong_divergences": wrong,
        "wrong": [f"prompt {number}: another answer" for number in range(wrong)],
        "category": {
            name: {
                "prompts": 3,
                "speedup_vs_plain": speedup + more,
                "speedup_vs_plain_rounds": [speedup + more - 0.07, None, speedup + more + 0.05],
                "tokens_per_step": speedup + more + 0.3,
                "tokens_per_step_rounds": [speedup, speedup + 1],
            }
            for name, more in (("rag", 0.31), ("qa", -0.42), ("coding", 0.17))
        },
    }


def document(*runs: dict[str, Any], **environment: Any) -> dict[str, Any]:
    command = ["vllm-ext", "bench", "--methods", "plain,x y"]
    given = {"model": "/models/Small-1B", "workload": "fresh", "command_line": command, **environment}
    return {"environment": given, "notices": ["two prompts skipped"], "runs": list(runs)}


@pytest.fixture
def saved() -> dict[str, Any]:
    return document(run("plain", 1, 1.0), run("first(k=2)", 1, 1.75), run("second", 1, 1.14))


def test_the_tables_hold_the_json_s_figures(saved: dict[str, Any]) -> None:
    page = Page(html([("a.json", saved)]))
    summary = next(table for caption, table in page.tables.items() if caption.startswith("Batch size 1"))
    speeds, tokens = (
        page.tables["Speed-up over plain"],
        page.tables["Tokens per step and request (plain: 1.00)"],
    )
    for number, entry in enumerate(saved["runs"][1:]):
        lowest, _, highest = entry["speedup_vs_plain_rounds"]
        speedup = f"{entry['speedup_vs_plain']:.2f}x {lowest:.2f}-{highest:.2f}"
        assert summary[entry["label"]] == [
            speedup,
            f"{entry['decode_tokens_per_s']:.1f} {30 * lowest:.1f}-{30 * highest:.1f}",
            f"{entry['tokens_per_step']:.2f} {entry['tokens_per_step'] - 0.1:.2f}-{entry['tokens_per_step'] + 0.1:.2f}",
            f"{entry['draft_tokens_per_step']:.2f} "
            + "-".join(f"{value:.2f}" for value in entry["draft_tokens_per_step_rounds"]),
            f"{entry['draft_time_share']:.1%}",
            "6 / 3 / 0",
        ]
        assert speeds["all prompts (9)"][number] == speedup
        for name, figures in entry["category"].items():
            low, high = figures["speedup_vs_plain_rounds"][::2]
            assert speeds[f"{name} (3)"][number] == f"{figures['speedup_vs_plain']:.2f}x {low:.2f}-{high:.2f}"
            assert tokens[f"{name} (3)"][number].startswith(f"{figures['tokens_per_step']:.2f} ")
    assert set(speeds) == {"category (prompts)", "all prompts (9)", "rag (3)", "qa (3)", "coding (3)"}
    assert "a.json" in page.text
    assert "two prompts skipped" in page.text
    assert "vllm-ext bench --methods 'plain,x y'" in page.text
    assert "Small-1B" in page.text


def test_the_bars_are_as_long_as_the_json_says(saved: dict[str, Any]) -> None:
    text = html([("a.json", saved)])
    categories = ["all prompts", "coding", "qa", "rag"]
    for svg in re.findall(r"<svg[^>]*aria-label=\"Bars.*?</svg>", text, re.DOTALL):
        for colour, entry in zip(("m0", "m1"), saved["runs"][1:], strict=True):
            figures = [entry, *(entry["category"][name] for name in categories[1:])]
            paths = re.findall(
                rf'<path d="M ([\d.]+) [\d. L]+? L ([\d.]+) [^"]*"[^>]*fill: var\(--{colour}\)', svg
            )
            widths = [float(right) - float(left) for left, right in paths]
            scale = widths[0] / entry["speedup_vs_plain"]
            assert widths == pytest.approx([scale * f["speedup_vs_plain"] for f in figures], abs=0.01)
            values = [f"{f['speedup_vs_plain']:.2f}x" for f in figures]
            assert [v for v in re.findall(r">(\d\.\d\dx)<", svg) if v in values] == values
        # Each line from the lowest to the highest round: drawn twice, the first time as its own halo.
        spans = re.findall(r'<path d="M ([\d.]+) ([\d.]+)\s+L ([\d.]+) \2\s*"[^>]*stroke-width: 1.4', svg)
        lengths = sorted(float(right) - float(left) for left, _, right in spans)
        assert lengths == pytest.approx([scale * 0.12] * 6 + [scale * 0.34] * 2, abs=0.01)
        assert [name for name in re.findall(r">([a-z ]+)<", svg) if name in categories] == categories


def places(svg: str, colour: str) -> list[tuple[float, float]]:
    """Where markers of a colour are, in pixels right and up."""
    found = re.findall(
        rf'<use href="#[^"]*" x="([\d.]+)" y="([\d.]+)" style="[^"]*fill: var\(--{colour}\)', svg
    )
    return [(float(x), -float(y)) for x, y in found]


def test_points_and_lines_are_where_the_json_says(saved: dict[str, Any]) -> None:
    lone = html([("a.json", saved)])
    [svg] = re.findall(r"<svg[^>]*aria-label=\"Points.*?</svg>", lone, re.DOTALL)
    [(x0, y0)] = places(svg, "plain")  # no nodes, one token
    first, second = saved["runs"][1:]
    [(x1, y1)], [(x2, y2)] = places(svg, "m0"), places(svg, "m1")
    for one, two, key, less in (
        (x1 - x0, x2 - x0, "draft_tokens_per_step", 0),
        (y1 - y0, y2 - y0, "tokens_per_step", 1),
    ):
        assert one > 0
        assert two / one == pytest.approx((second[key] - less) / (first[key] - less), abs=1e-3)

    four = [run("plain", 4, 1.0), run("second", 4, 0.8)]
    both = html([("a.json", document(saved["runs"][0], saved["runs"][2], *four))])
    svgs = re.findall(r"<svg[^>]*aria-label=\"Lines.*?</svg>", both, re.DOTALL)
    assert len(svgs) == 2
    for svg in svgs:
        plain, ours = places(svg, "plain"), places(svg, "m0")
        assert [x for x, _ in plain] == [x for x, _ in ours]
        bottoms = [
            -float(y) - float(h)
            for y, h in re.findall(r'<rect x="[^"]*" y="([^"]*)" [^>]*height="([^"]*)"', svg)
        ]
        # Throughput: plain is 30 tokens/s at both sizes. Speed-up: 1. So both panels have the same ratios.
        assert len(bottoms) == 2
        for panel, bottom in enumerate(bottoms):
            heights = [y - bottom for _, y in plain[2 * panel :][:2] + ours[2 * panel :][:2]]
            ratios = [height / heights[0] for height in heights]
            assert ratios == pytest.approx([1, 1, second["speedup_vs_plain"], 0.8], abs=1e-3)


def test_it_is_one_file_that_loads_nothing(saved: dict[str, Any]) -> None:
    text = html([("a.json", saved)])
    assert text.startswith("<!DOCTYPE html>")
    assert "://" not in text
    assert not re.search(r"@import|url\((?!#)", text)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {
        tag for tag, _ in page.elements
    }
    assert not [1 for _, given in page.elements for name in given if name in ("src", "srcset", "data")]
    ids = [given["id"] for _, given in page.elements if "id" in given]
    assert len(ids) == len(set(ids))
    used = {given["href"] for _, given in page.elements if "href" in given}
    used |= set(re.findall(r"url\((#[^)]*)\)", text))
    assert used
    assert used == {f"#{name}" for name in ids}
    assert html([("a.json", saved)]) == text


def test_every_plot_has_a_layout_for_phones_and_one_for_desktops(saved: dict[str, Any]) -> None:
    text = html([("a.json", document(*saved["runs"], run("plain", 4, 1.0), run("second", 4, 0.9)))])
    page = Page(text)
    layouts = [given["class"] for tag, given in page.elements if tag == "svg"]
    assert layouts == ["narrow", "wide"] * 4  # categories twice, nodes, batch sizes
    for narrow, wide in zip(page.svgs[::2], page.svgs[1::2], strict=True):
        assert {t for t in narrow if re.search("[a-z]", t)} == {t for t in wide if re.search("[a-z]", t)}
    for words in (
        "decode speed, multiples",
        "draft nodes verified",
        "tokens emitted",
        "tokens/s",
        "batch size:",
    ):
        assert any(words in label for svg in page.svgs for label in svg), words
    assert all(given.get("aria-label") for tag, given in page.elements if tag == "svg")


def contrast(left: str, right: str) -> float:
    """WCAG 2's ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(left), luminance(right)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_colour_is_defined_and_readable_in_light_and_dark(saved: dict[str, Any]) -> None:
    text = html([("a.json", saved)])
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w+);", block))
        for block in re.findall(r":root \{(.*?)\}", text, re.S)
    )
    used = set(re.findall(r"var\(--([\w-]+)\)", text)) - {"colour"}
    assert set(light) == set(dark)
    assert used <= set(light)
    assert "#0000" not in text
    for theme in (light, dark):
        for name in ("text", "muted", "loss", *(key for key in theme if re.fullmatch(r"m\d", key))):
            assert contrast(theme[name], theme["page"]) >= 4.5, name
            assert contrast(theme[name], theme["on-colour"]) >= 4.5 or name in ("text", "muted", "loss")


def test_hostile_names_stay_text(saved: dict[str, Any]) -> None:
    evil = json.loads(json.dumps(saved).replace("first(k=2)", "MARK").replace('"rag"', '"MARK"'))
    evil = json.loads(
        json.dumps(evil),
        object_hook=lambda entry: {
            (HOSTILE if key == "MARK" else key): HOSTILE if value == "MARK" else value
            for key, value in entry.items()
        },
    )
    evil["environment"] |= {
        "model": f"models/{HOSTILE.replace('/', '')}",
        "dtype": HOSTILE,
        HOSTILE: [HOSTILE],
    }
    evil["environment"]["command_line"] = [HOSTILE]
    evil["notices"] = [HOSTILE]
    evil["runs"][1]["category"]["$x^2$"] = {"prompts": 1, "speedup_vs_plain": 1.5}
    evil["runs"][1] |= {"wrong_divergences": 1, "wrong": [HOSTILE]}
    text = html([(HOSTILE, evil)])
    text.encode()
    page = Page(text)
    assert not {"script"} & {tag for tag, _ in page.elements}
    assert not [name for _, given in page.elements for name in given if name.startswith("on")]
    assert "\x00" not in text
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert page.text.count(shown) >= 8
    assert any("$x^2$" in svg for svg in page.svgs)  # no formula
    assert any(shown[:20] in label for svg in page.svgs for label in svg)  # cut, in the plot


def test_losses_stay_and_are_marked(saved: dict[str, Any]) -> None:
    page = Page(html([("a.json", saved)]))
    assert page.tables["Speed-up over plain"]["qa (3)"][1] == "0.72x 0.65-0.77"
    assert len(page.lost) == 1
    rounded = document(run("plain", 1, 1.0), run("second", 1, 0.9951))
    assert "0.9951" not in (text := html([("a.json", rounded)]))
    assert len(Page(text).lost) == 1  # qa at 0.58; what is written as 1.00x is no loss


def test_wrong_answers_are_the_first_thing_said(saved: dict[str, Any]) -> None:
    fine = Page(html([("a.json", saved)]))
    assert "No wrong answer: of 18 answers 12 are token-identical" in fine.text
    bad = copy.deepcopy(saved)
    bad["runs"][2] = run("second", 1, 1.14, wrong=2)
    page = Page(html([("a.json", bad)]))
    assert page.text.index("2 wrong") < page.text.index("Speed-up by category")
    assert "second, batch size 1: prompt 1: another answer" in page.text
    assert ("div", {"class": "verdict bad", "role": "alert"}) in page.elements
    assert ("div", {"class": "verdict bad", "role": "alert"}) not in fine.elements
    del bad["runs"][2]["wrong"]  # as in old files
    assert "second, batch size 1: 2 of 9 answers" in Page(html([("a.json", bad)])).text


def test_files_of_the_same_conditions_are_joined_others_are_not(saved: dict[str, Any]) -> None:
    four = document(run("plain", 4, 1.0), run("second", 4, 1.3))
    page = Page(html([("a.json", saved), ("b.json", four)]))
    assert sum(tag == "section" for tag, _ in page.elements) == 1
    table = page.tables["Tokens per second, all requests together"]
    assert table["1"][0] == "30.0 26.7-36.9"
    assert [table["4"][i].split()[0] for i in range(3)] == ["30.0", "-", "39.0"]
    assert {"a.json", "b.json"} <= set(re.findall(r"\w\.json", page.text))
    other = document(run("plain", 8, 1.0), run("second", 8, 1.3), dtype="float32")
    text = html([("a.json", saved), ("b.json", four), ("c.json", other), ("d.json", saved)])
    assert text.count("<section>") == 3  # another type; batch size 1 is there already


def test_load_files() -> None:
    rows: list[dict[str, Any]] = [
        {
            "batch_size": size,
            "plain_tokens_per_s": 20.0 * size,
            "goodput": {"speedup": 1.5, "rounds": [1.4, 1.6], "nodes_per_step": 4.25},
            "fixed 8": {"speedup": 0.87, "rounds": [0.8, 0.9], "nodes_per_step": 7.5},
            "best_fixed": ["none", "none"],
            "goodput_over_best_fixed": 1.1,
        }
        for size in (1, 16)
    ]
    load = {"options": {"model": "M", "rounds": 2, "dtype": "bfloat16"}, "machine": {"cpus": 2}, "rows": rows}
    page = Page(html([("load.json", load)]))
    assert page.tables["Speed-up over plain"]["16"] == ["1.00x", "1.50x 1.40-1.60", "0.87x 0.80-0.90"]
    assert page.tables["Tokens per second, all requests together"]["16"] == ["320.0", "-", "-"]
    assert "Answers were not compared" in page.text
    assert "prefill included" in page.text
    rows[0]["goodput"] |= {"tokens_per_s": 31.0, "tokens_per_s_rounds": [30.0, 32.0]}
    page = Page(html([("load.json", load)]))
    assert page.tables["Tokens per second, all requests together"]["1"][1] == "31.0 30.0-32.0"


def test_the_page_begins_with_what_came_out() -> None:
    slow, fast = run("slow", 1, 0.9), run("hybrid(num_speculative_tokens=16)", 1, 1.75)
    page = Page(html([("a.json", document(run("plain", 1, 1.0), slow, fast))]))
    said = "hybrid is the fastest: 1.75x plain vLLM's speed at batch size 1, with 2.25 tokens a step."
    assert page.text.index(said) < page.text.index("No wrong answer")
    # The fastest first, in each table and plot, by its name.
    summary = next(table for caption, table in page.tables.items() if caption.startswith("Batch size 1"))
    assert [name for name in summary if name in ("plain", "slow") or "hybrid" in name] == [
        "plain", "hybridhybrid(num_speculative_tokens=16)", "slow"
    ]  # fmt: skip
    for svg in page.svgs[:2]:
        assert [text for text in svg if text in ("slow", "hybrid")] == ["hybrid", "slow"] * 4
    alone = Page(html([("a.json", document(run("plain", 1, 1.0), slow))]))
    assert "No method is faster than plain vLLM; slow comes nearest: 0.90x" in alone.text


def test_the_page_says_what_cannot_be() -> None:
    odd = run("hybrid", 1, 2.78) | {"tokens_per_step": 1.23, "tokens_per_step_rounds": [1.23] * 3}
    page = Page(html([("a.json", document(run("plain", 1, 1.0), odd))]))
    assert "hybrid: 2.78x at 1.23 tokens a step is more than drafts can do" in page.text
    assert "plain: its rounds differ by 38%" in page.text
    summary = next(table for caption, table in page.tables.items() if caption.startswith("Batch size 1"))
    assert summary["hybrid"][0].startswith("2.78x ?")
    steady = run("plain", 1, 1.0) | {"decode_tokens_per_s_rounds": [30.0, 31.0, 32.0]}
    fine = Page(html([("a.json", document(steady, run("hybrid", 1, 1.75)))]))
    assert "Not to be believed" not in fine.text


def test_a_bar_far_longer_than_the_others_is_clipped_and_says_its_figure() -> None:
    entry = run("hybrid", 1, 1.5)
    entry["category"] = {f"c{number}": {"prompts": 1, "speedup_vs_plain": 1.5} for number in range(12)}
    entry["category"]["c11"]["speedup_vs_plain"] = 40.0
    text = html([("a.json", document(run("plain", 1, 1.0), entry))])
    for svg in re.findall(r"<svg[^>]*aria-label=\"Bars.*?</svg>", text, re.DOTALL):
        ends = re.findall(r'<path d="M ([\d.]+) [\d. L]+? L ([\d.]+) [^"]*"[^>]*fill: var\(--m0\)', svg)
        widths = sorted(float(right) - float(left) for left, right in ends)
        assert widths[0] == pytest.approx(widths[-2], abs=0.01)
        assert widths[0] < widths[-1] < 1.7 * widths[0]
        assert ">40.00x<" in svg


# Those of the load bench are no comparison of methods; tests above read such files.
@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*batch*.json")), ids=lambda file: file.stem)
def test_the_repository_s_own_figures(file: Path) -> None:
    saved = json.loads(file.read_text())
    page = Page(html([(file.name, saved)]))
    drafting = [entry for entry in saved["runs"] if entry["method"] != "plain"]
    for number, entry in enumerate(sorted(drafting, key=lambda entry: -entry["speedup_vs_plain"])):
        assert entry["label"] in page.text
        for name, figures in entry["category"].items():
            [cells] = [
                row for key, row in page.tables["Speed-up over plain"].items() if key.startswith(f"{name} (")
            ]
            assert cells[number].split()[0] == f"{figures['speedup_vs_plain']:.2f}x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "a.json: holds neither `runs` nor `rows`"),
        ({"runs": []}, "a.json: does not say its environment"),
        ({"environment": {}, "runs": []}, "a.json: holds no run"),
        ({"environment": {}, "runs": [{"label": "x"}]}, "a.json: 0.batch_size: Field required"),
        ({"environment": {}, "runs": [{"label": "x", "batch_size": 0}]}, "a.json: 0.batch_size"),
        (
            {"environment": {}, "runs": [{"label": "x", "batch_size": 1, "speedup_vs_plain": float("nan")}]},
            "a.json: 0.speedup_vs_plain",
        ),
        ({"options": {}, "rows": [{}]}, "a.json: KeyError: 'batch_size'"),
        ({"options": {}, "rows": 3}, "a.json: TypeError"),
    ],
)
def test_other_documents_are_refused_by_name(content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        html([("a.json", content)])
    with pytest.raises(ValueError, match="at least one"):
        html([])


def test_figures_that_are_missing() -> None:
    """No second token anywhere, a category that one method was not asked, one prompt, no plain."""
    empty = {"label": "x", "batch_size": 1, "category": {"qa": {"prompts": 1}}}
    other = {"label": "y", "batch_size": 1, "speedup_vs_plain": 1.2}
    page = Page(html([("a.json", {"environment": {}, "runs": [empty, other]})]))
    assert page.tables["Speed-up over plain"]["qa (1)"] == ["-", "-"]
    assert "Answers were not compared" in page.text
