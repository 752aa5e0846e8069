# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext bench`` over HTTP: loads as they are written, prompts dealt out, figures; and a server that streams."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm")
from aiohttp import web

from vllm_ext.bench.engine import EncodedPrompt
from vllm_ext.bench.load import Load, Reply, Target, Turn, drive
from vllm_ext.bench.serving import deal, of_length, parse_limits, parse_loads, parse_urls
from vllm_ext.bench.serving_stats import percentile, summarise

NOTHING_COUNTED = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0, "engine_steps": 10.0}


def test_loads_as_they_are_written() -> None:
    assert parse_loads("1, 8,32", None) == (Load(1), Load(8), Load(32))
    assert parse_loads(None, "0.5,2") == (Load(None, 0.5), Load(None, 2.0))
    assert parse_loads("16", "4") == (Load(16, 4.0),)
    assert str(Load(16, 4.0)) == "4 requests/s"


@pytest.mark.parametrize(
    ("concurrency", "rate", "said"),
    [
        ("0", None, "--concurrency='0'"),
        ("1,1", None, "positive integers, each once"),
        ("many", None, "--concurrency='many'"),
        (None, "-1", "--request-rate='-1'"),
        (None, "inf", "positive numbers"),
        (None, "nan", "positive numbers"),
        ("1,2", "3", "one number"),
    ],
)
def test_loads_that_are_none(concurrency: str | None, rate: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_loads(concurrency, rate)


def test_urls() -> None:
    assert parse_urls(["plain=http://a:1/v1", "http://b:2/"]) == (
        ("plain", "http://a:1"),
        ("b:2", "http://b:2"),
    )
    with pytest.raises(ValueError, match="LABEL=http"):
        parse_urls(["localhost:8000"])
    with pytest.raises(ValueError, match="more than once"):
        parse_urls(["a=http://x:1", "a=http://y:1"])


def test_limits() -> None:
    assert parse_limits("ttft:500, tpot:50") == {"ttft": 500.0, "tpot": 50.0}
    assert parse_limits(None) == {}
    for wrong in ("ttft", "ttft:0", "itl:5", "tpot:nan"):
        with pytest.raises(ValueError, match="--goodput"):
            parse_limits(wrong)


def test_each_prompt_is_dealt_once() -> None:
    notices: list[str] = []
    plan = deal(200, [Load(1), Load(8), Load(32)], 3, notices)
    dealt = [index for of_load in plan for turns in of_load for members in turns for index in members]
    assert sorted(dealt) == list(range(200))
    sizes = [sum(len(members) for turns in of_load for members in turns) for of_load in plan]
    assert sizes[0] < sizes[1] < sizes[2]
    assert not notices or "never full" in notices[0]
    with pytest.raises(ValueError, match="concurrency 1 gets"):
        deal(20, [Load(1), Load(32)], 3, notices)


def test_prompts_of_a_length_end_as_their_own() -> None:
    prompts = [EncodedPrompt("", "", list(range(first, first + 7))) for first in (10, 20, 30)]
    for size in (3, 7, 18):
        made = of_length(prompts, size)
        assert {len(prompt.token_ids) for prompt in made} == {size}
        assert [prompt.token_ids[-1] for prompt in made] == [16, 26, 36]
    assert of_length(prompts, 9)[2].token_ids == [15, 16, *range(30, 37)]


def test_percentiles_are_numpys() -> None:
    values = list(np.random.default_rng(0).random(37))
    for percent in (0, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([], 50) is None


def reply(prompt: int, text: str, tokens: int, ttft_s: float, gaps_s: list[float]) -> Reply:
    return Reply(prompt, text, tokens, 5, ttft_s, ttft_s + sum(gaps_s), gaps_s)


def test_figures_of_a_row() -> None:
    plain = [[Turn([reply(0, "a", 5, 0.1, [0.1] * 4)], 0.5, NOTHING_COUNTED, [])]]
    counted = {"drafts": 2.0, "draft_tokens": 8.0, "accepted_tokens": 2.0, "engine_steps": 5.0}
    ours = [[Turn([reply(0, "a", 5, 0.1, [0.1] * 2)], 0.3, counted, ["lost"])]]
    row = summarise("m", Load(1), ours, plain, {"ttft": 200.0, "tpot": 49.0}, compared=True)
    assert row["output_tokens_per_s"] == pytest.approx(5 / 0.3)
    assert row["speedup_vs_plain"] == pytest.approx(0.5 / 0.3)
    assert row["tokens_per_step"] == 2.0
    assert row["tpot_p50_ms"] == pytest.approx(50.0)
    assert row["itl_p99_ms"] == pytest.approx(100.0)
    assert (row["goodput_share"], row["acceptance"], row["same_as_plain"]) == (0.0, 0.25, 1)
    assert row["step_ms"] == pytest.approx(60.0)
    assert row["target_efficiency"] == pytest.approx(50 / 60)
    assert row["errors"] == ["lost"]
    at_a_rate = summarise("m", Load(None, 2.0), ours, plain, {}, compared=False)
    assert at_a_rate["step_ms"] is at_a_rate["target_efficiency"] is at_a_rate["goodput_share"] is None


GAP_S, PIECES = 0.05, 5


@pytest.fixture(scope="module")
def streaming() -> Iterator[tuple[str, list[int]]]:
    """A server that streams pieces of two tokens at known times, and the most requests it has had at once."""
    flying, most = [0], [0]

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert (body["ignore_eos"], body["prompt"]) == (True, [1, 2, 3])
        flying[0] += 1
        most[0] = max(most[0], flying[0])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(PIECES):
            await asyncio.sleep(GAP_S)
            await answer.write(b"data: " + json.dumps({"choices": [{"text": "ab"}]}).encode() + b"\n\n")
        usage = {"choices": [], "usage": {"completion_tokens": 2 * PIECES, "prompt_tokens": 3}}
        await answer.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        flying[0] -= 1
        return answer

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text='vllm:iteration_tokens_total_count{engine="0"} 7.0\n')

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        loop.run_until_complete(runner.setup())
        loop.run_until_complete(web.SockSite(runner, listening).start())
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", most
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_times_are_those_of_the_stream(streaming: tuple[str, list[int]]) -> None:
    url, most = streaming
    most[0] = 0
    prompts = [(number, [1, 2, 3]) for number in range(6)]
    turn = drive(Target(url, "m", 16, 0.0, True), prompts, Load(3), 0)
    assert most[0] == 3
    assert not turn.errors
    assert [each.prompt for each in turn.replies] == list(range(6))
    assert {each.num_tokens for each in turn.replies} == {2 * PIECES}
    assert {len(each.gaps_s) for each in turn.replies} == {PIECES - 1}
    gaps = [gap for each in turn.replies for gap in each.gaps_s]
    assert statistics.median(gaps) == pytest.approx(GAP_S, rel=0.5)
    assert turn.replies[0].tpot_s == pytest.approx(
        statistics.fmean(gaps) * (PIECES - 1) / (2 * PIECES - 1), rel=0.5
    )
    assert turn.counted["engine_steps"] == 0.0  # what was added
    assert turn.wall_s > 2 * PIECES * GAP_S


def test_requests_come_at_a_rate(streaming: tuple[str, list[int]]) -> None:
    url, _ = streaming
    prompts = [(number, [1, 2, 3]) for number in range(20)]
    turn = drive(Target(url, "m", 16, 0.0, True), prompts, Load(None, 20.0), 0)
    assert len(turn.replies) == 20
    assert 0.4 < turn.wall_s < 4.0


def test_a_server_that_is_gone(streaming: tuple[str, list[int]]) -> None:
    with pytest.raises(OSError):
        drive(Target("http://127.0.0.1:9", "m", 16, 0.0, True), [(0, [1])], Load(1), 0)
