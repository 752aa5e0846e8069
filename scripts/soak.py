# SPDX-License-Identifier: Apache-2.0
"""A server under mixed traffic for many minutes: nothing may be lost, change, or grow.

    python scripts/soak.py [--minutes 15] [--concurrency 16] [--method hybrid] [--kill worker,core,api] [--json F]

Sampling options, grammars, rules, aborts and refused requests at once, beside an *oracle*: one fixed greedy request
whose answer must stay that of plain vLLM, which a server without a method gives first. Memory and counters are read
every ten seconds. With --kill these processes of the server get SIGKILL, one after the other over the time; the server
is started again each time, must load what it has learnt, and answer the oracle alike. Exits 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
from soak_traffic import Ask, draw

from vllm_ext.bench.local_server import LocalServer, wait_until_ready
from vllm_ext.data.trie_build import build
from vllm_ext.demo.embedded_model import ensure_model

NAME = "soak"
SAMPLE_S = 10.0
ORACLE = {
    "messages": [{"role": "user", "content": "List the planets of the solar system with one fact each."}],
    "max_tokens": 64,
    "temperature": 0,
}
PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "prompts.jsonl"
GROWTH = 1.05  # of resident memory between the second and the last quarter, at most
TITLES = {"worker": "VLLM::Worker", "core": "VLLM::EngineCore"}


class Soak:
    """One run: what was asked, what came of it, and what was seen meanwhile."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.ended: Counter[str] = Counter()
        self.problems: list[str] = []
        self.samples: list[dict[str, float]] = []
        self.oracle = ""
        self.asked = self.down = 0
        self.up = asyncio.Event()
        self.chance = random.Random(options.seed)
        self.prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]

    def server(self, method: dict[str, Any] | None) -> LocalServer:
        """Not started yet; None: plain vLLM, for the oracle."""
        arguments = [
            *(
                "--served-model-name",
                NAME,
                "--dtype",
                "float32",
                "--max-model-len",
                "2048",
                "--enforce-eager",
            ),
            *("--max-num-seqs", str(self.options.concurrency)),
        ]
        if method is not None:
            rules = {
                "trie": {"files": {"pets": str(self.folder / "pets.trie")}},
                **{name: {} for name in ("extract", "rpg", "awrs", "asap", "dola", "cad")},
            }
            arguments += ["--additional-config", json.dumps({"vllm_ext": {"rules": rules}})]
            # A worker of its own can be killed alone.
            arguments += ["--distributed-executor-backend", "mp"]
        return LocalServer(
            f"soak-{'plain' if method is None else 'method'}", self.options.model, arguments, method
        )

    async def post(self, session: aiohttp.ClientSession, url: str, ask: Ask) -> tuple[int, str]:
        """Status and text; the text of a stream that was given up is what had come."""
        streams = ask.abort_after is not None
        body = {"model": NAME, "stream": streams, **ask.body}
        pieces: list[str] = []
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if not streams or response.status != 200:
                text = await response.text()
                if response.status == 200:
                    text = "".join(choice["message"]["content"] for choice in json.loads(text)["choices"])
                return response.status, text
            async for line in response.content:
                pieces.append(line.decode())
                if len(pieces) >= 2 * (ask.abort_after or 0):
                    break  # leaving closes the connection
        return 200, "".join(pieces)

    async def client(self, session: aiohttp.ClientSession, end: float) -> None:
        """Asks one thing after the other; what a kill cut off is asked again."""
        while time.monotonic() < end:
            ask = draw(self.chance, self.prompts)
            self.asked += 1
            while True:
                await self.up.wait()
                before = self.down
                try:
                    status, text = await self.post(session, self.running.url, ask)
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                    status, text = 0, repr(error)
                if status == ask.status:
                    self.ended["aborted" if ask.abort_after else ask.kind] += 1
                    break
                if self.down != before or not self.up.is_set() or (status in (0, 500) and await self.died()):
                    self.ended["cut off by a kill"] += 1
                    continue
                self.problems.append(f"{ask.kind}: status {status}, not {ask.status}: {text[:200]}")
                break

    async def died(self) -> bool:
        """Whether a kill explains it: the killer says so within a moment."""
        for _ in range(40):
            if not self.up.is_set():
                return True
            await asyncio.sleep(0.05)
        return False

    async def watch(self, session: aiohttp.ClientSession, end: float) -> None:
        """The oracle and the figures, every ten seconds."""
        while time.monotonic() < end:
            await asyncio.sleep(SAMPLE_S)
            if not self.up.is_set():
                continue
            before = self.down
            try:
                _, text = await self.post(session, self.running.url, Ask("oracle", ORACLE))
                self.samples.append(self.sample())
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError, psutil.Error):
                if self.down == before and self.up.is_set() and not await self.died():
                    self.problems.append("the oracle was not answered")
                continue
            self.ended["oracle"] += 1
            if text != self.oracle and self.down == before and self.up.is_set():
                self.problems.append(f"the oracle changed: {text[:120]!r}")

    def sample(self) -> dict[str, float]:
        """Resident memory of the server's processes, and what it counts."""
        memory = {"rss_mb": sum(each.memory_info().rss for each in self.processes()) / 2**20}
        names = (
            "kv_cache_usage_perc",
            "num_requests_running",
            "num_requests_waiting",
            "generation_tokens_total",
        )
        counted = {name: self.running.metric(f"vllm:{name}") for name in names}
        faults = self.running.metric("vllm_ext:fallbacks_total", 'reason="proposer_error"')
        return {"at_s": time.monotonic(), "start": self.down, **memory, **counted, "faults": faults}

    def processes(self) -> list[psutil.Process]:
        """The server and all under it."""
        top = psutil.Process(self.running.pid)
        return [top, *top.children(recursive=True)]

    async def kill(self, what: str) -> None:
        """End one process the hard way, and start again."""
        found = [
            each for each in self.processes() if what == "api" or TITLES[what] in " ".join(each.cmdline())
        ]
        everyone = self.processes()
        self.up.clear()
        self.down += 1
        os.kill(found[0].pid, signal.SIGKILL)
        gone, alive = await asyncio.to_thread(psutil.wait_procs, everyone, 60)
        if alive:
            self.problems.append(f"{what} killed: {len(alive)} processes of the server still ran after 60 s")
            for each in alive:
                with suppress(psutil.Error):
                    each.kill()
        await self.start()
        loads = self.running.metric("vllm_ext:state_loads_total")
        aside = self.running.metric("vllm_ext:state_set_aside_total")
        print(
            f"{what} killed: {len(gone)} processes ended; started again, state loaded {loads:.0f} times",
            flush=True,
        )
        if (loads, aside) != (1.0, 0.0):
            self.problems.append(
                f"{what} killed: state loaded {loads:.0f} times, set aside {aside:.0f} times"
            )

    async def start(self) -> None:
        """Start the server, and wait until it answers."""
        config = {
            "method": self.options.method,
            "state_dir": str(self.folder / "state"),
            "state_interval_minutes": 0.1,
        }
        self.running = self.server(config)
        self.running.__enter__()
        await asyncio.to_thread(lambda: list(wait_until_ready([self.running])))
        self.up.set()

    async def run(self) -> None:
        """All of it."""
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            plain = self.server(None)
            with plain:
                await asyncio.to_thread(lambda: list(wait_until_ready([plain])))
                _, self.oracle = await self.post(session, plain.url, Ask("oracle", ORACLE))
            await self.start()
            begun, seconds = time.monotonic(), 60.0 * self.options.minutes
            clients = [self.client(session, begun + seconds) for _ in range(self.options.concurrency)]
            tasks = [asyncio.create_task(each) for each in [*clients, self.watch(session, begun + seconds)]]
            kills = [what for what in self.options.kill.split(",") if what]
            for number, what in enumerate(kills, 1):
                await asyncio.sleep(max(0.0, begun + seconds * number / (len(kills) + 1) - time.monotonic()))
                await self.kill(what)
            await asyncio.gather(*tasks)
            await asyncio.sleep(3.0)
            last = self.sample()
        if last["num_requests_running"] or last["num_requests_waiting"]:
            self.problems.append(f"requests are left: {last}")
        if last["kv_cache_usage_perc"]:
            self.problems.append(f"blocks of the KV cache are left: {last['kv_cache_usage_perc']:.2%}")
        if last["faults"]:
            self.problems.append(f"drafting failed {last['faults']:.0f} times")
        self.check_memory()

    def check_memory(self) -> None:
        """The last quarter of the longest time without a start beside its second."""
        starts = Counter(sample["start"] for sample in self.samples)
        of_longest = [each["rss_mb"] for each in self.samples if each["start"] == starts.most_common(1)[0][0]]
        quarter = len(of_longest) // 4
        if quarter < 2:
            print("memory: too few samples to compare")
            return
        early, late = median(of_longest[quarter : 2 * quarter]), median(of_longest[-quarter:])
        print(
            f"memory: {early:.0f} MB in the second quarter, {late:.0f} MB in the last, of {len(of_longest)} samples"
        )
        if late > early * GROWTH:
            self.problems.append(f"memory grew from {early:.0f} MB to {late:.0f} MB")


def main() -> int:
    """Run, print, and say whether all held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or id; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--method", default="hybrid")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--kill", default="", help="comma list of worker, core and api")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.model = options.model or str(ensure_model())
    with tempfile.TemporaryDirectory(prefix="vllm-ext-soak-") as name:
        folder = Path(name)
        (folder / "pets.txt").write_text("a cat\na dog\na dog and a cat\n")
        build([folder / "pets.txt"], folder / "pets.trie", options.model, "text", "", lambda *_: None)
        soak = Soak(options, folder)
        try:
            asyncio.run(soak.run())
        finally:
            if hasattr(soak, "running"):
                soak.running.__exit__(None, None, None)
    print(
        f"{soak.asked} requests: "
        + ", ".join(f"{count} {name}" for name, count in sorted(soak.ended.items()))
    )
    for problem in soak.problems[:20]:
        print(f"PROBLEM: {problem}")
    print(f"{len(soak.problems)} problems; server log: {soak.running.log}")
    if options.json is not None:
        found = {
            "command_line": sys.argv,
            "asked": soak.asked,
            "ended": soak.ended,
            "problems": soak.problems,
        }
        options.json.write_text(json.dumps({**found, "samples": soak.samples}, indent=1) + "\n")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
