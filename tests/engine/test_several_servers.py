# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with several engines and API servers: each server shows the same counters, added up right."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_ext.bench import local_server
from vllm_ext.engine import counters

pytestmark = pytest.mark.engine

METHOD = {"method": "token_recycling", "num_speculative_tokens": 4, "matrix_width": 8}
LENGTH = 256  # max_model_len
TIMES = 12  # as often as is asked, to have reached both servers: each connection is one or the other's


class Started(NamedTuple):
    """A server, and where its processes keep what they count."""

    server: local_server.LocalServer
    folder: Path
    engines: int

    def complete(self, prompt: list[int], max_tokens: int, engine: int | None = None) -> int:
        """How many tokens an engine, or any, has put out."""
        body = {"model": "tested", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        if engine is not None:
            headers["X-data-parallel-rank"] = str(engine)
        request = urllib.request.Request(
            f"{self.server.url}/v1/completions",
            json.dumps({**body, "ignore_eos": True}).encode(),
            headers,
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            tokens: int = json.load(response)["usage"]["completion_tokens"]
        return tokens

    def shown(self, name: str) -> list[float]:
        """By engine, what `/metrics` says; each server has been asked, and they say the same."""
        pages = [local_server.metrics_page(self.server.url) for _ in range(TIMES)]
        said = [
            [local_server.total(page, name, f'engine="{each}"') for each in range(self.engines)]
            for page in pages
        ]
        assert said == [said[0]] * TIMES
        return said[0]

    def emitted_by_process(self) -> list[float]:
        """What each API server has counted of all engines."""
        return [
            sum(
                sample.value
                for metric in MultiProcessCollector.merge([str(file)], accumulate=False)  # type: ignore[no-untyped-call]
                for sample in metric.samples
                if sample.name == "vllm_ext:spec_emitted_tokens_total"
            )
            for file in sorted(self.folder.glob("counter_*.db"))
        ]


@pytest.fixture(
    scope="module",
    params=[(2, 2), pytest.param((1, 2), marks=pytest.mark.slow)],
    ids=["two-engines", "one-engine"],
)
def started(
    request: pytest.FixtureRequest, slice_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    engines, servers = request.param
    folder = tmp_path_factory.mktemp("counters")
    arguments = [
        *("--served-model-name", "tested", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(LENGTH), "--max-num-seqs", "4"),
        *("--data-parallel-size", str(engines), "--api-server-count", str(servers)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else a list has cores for each engine
        server = local_server.LocalServer("several", slice_dir, arguments, METHOD)
        with server:
            patch.undo()
            for _ in local_server.wait_until_ready([server]):
                pass
            yield Started(server, folder, engines)


def test_an_idle_engine_and_one_at_its_longest(started: Started) -> None:
    for name in ("spec_emitted_tokens", "spec_draft_tokens", "state_saves", "spec_draft_passes"):
        assert started.shown(f"vllm_ext:{name}_total") == [0] * started.engines
    for name in counters.GAUGES:
        assert started.shown(f"vllm_ext:{name}") == [0] * started.engines
    busy = started.engines - 1
    emitted = started.complete([504, 253] * 100, LENGTH - 200, busy)
    assert emitted == LENGTH - 200
    idle = [0] * busy
    assert started.shown("vllm_ext:spec_emitted_tokens_total") == [*idle, emitted]
    drafted = started.shown("vllm:spec_decode_num_draft_tokens_total")
    assert started.shown("vllm_ext:spec_draft_tokens_total") == drafted
    assert drafted[busy] > 0
    assert [value > 0 for value in started.shown("vllm_ext:spec_budget_step_seconds")] == [*idle, True]


def test_what_goes_through_several_servers_is_counted_once(started: Started) -> None:
    before = started.shown("vllm_ext:spec_emitted_tokens_total")
    with ThreadPoolExecutor(4) as pool:
        sent = pool.map(lambda each: started.complete([504, 253, 300 + each], 20 + each), range(2 * TIMES))
        emitted = sum(sent)
    after = started.shown("vllm_ext:spec_emitted_tokens_total")
    assert sum(after) - sum(before) == emitted == sum(20 + each for each in range(2 * TIMES))
    assert all(new > old for new, old in zip(after, before, strict=True))  # each engine had some
    assert after == started.shown("vllm:generation_tokens_total")
    steps, accepted = (started.shown(f"vllm_ext:spec_{name}_total") for name in ("steps", "accepted_tokens"))
    assert after == [sum(both) for both in zip(steps, accepted, strict=True)]
    assert started.shown("vllm_ext:spec_draft_tokens_total") == started.shown(
        "vllm:spec_decode_num_draft_tokens_total"
    )
    by_process = started.emitted_by_process()
    assert sum(by_process) == sum(after)
    assert sum(value > 0 for value in by_process) == 2  # both servers had some
