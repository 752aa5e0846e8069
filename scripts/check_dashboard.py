#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/grafana.json and docs/alerts.yml on a real server under load, scraped by a real Prometheus.

    apt-get install prometheus
    .venv/bin/python scripts/check_dashboard.py             # a server of its own, on the embedded model
    .venv/bin/python scripts/check_dashboard.py --url http://127.0.0.1:8000 --state-dir FOLDER   # one that runs

Under load, and then with its ``state_dir`` taken away for a while, so that saving fails and its alert fires. The table
has each query of the dashboard before the load, its least and its most meanwhile, and after it; exits with 1 where one
finds nothing, or does not move, or another alert fires.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vllm_ext.bench.local_server import LocalServer, free_port, wait_until_ready
from vllm_ext.demo.embedded_model import ensure_model
from vllm_ext.demo.servers import PROMPTS

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "docs" / "alerts.yml"
EXPECTED = {"VllmExtStateNotSaved"}
STILL = "loads"  # counted at a start alone
REQUESTS, AT_ONCE, MAX_TOKENS = 24, 4, 32
# With a scheduler that is named, JSON has chains instead of trees: fallbacks.
OPTIONS = ("--enforce-eager", "--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler")
# What Grafana fills in.
FILLED = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}


def queries() -> list[tuple[str, str]]:
    """Of the dashboard: each panel's title with the query, as Grafana sends it."""
    found = []
    for panel in json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in FILLED.items():
                query = query.replace(name, value)
            found.append((f"{panel['title']}: {target['legendFormat']}", query))
    return found


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Callable[[str], dict[str, float]]]:
    """One that scrapes a server; yields what asks it a query, for values by labels."""
    address = f"127.0.0.1:{free_port()}"
    scraped = {"job_name": "vllm", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    config = {
        "global": {"evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [scraped],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    options = {"config.file": "prometheus.yml", "storage.tsdb.path": "series", "web.listen-address": address}
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)

    def ask(query: str) -> dict[str, float]:
        asked = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(asked, timeout=30) as response:
            series = json.load(response)["data"]["result"]
        return {json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in series}

    try:
        yield ask
    finally:
        process.terminate()
        process.wait()


def load(url: str) -> None:
    """A few dozen requests; every third wants JSON, by a schema that the server has not seen."""

    def ask(number: int) -> None:
        asked = {"role": "user", "content": f"{PROMPTS[number % len(PROMPTS)]} ({number})"}
        body: dict[str, Any] = {"messages": [asked], "max_tokens": MAX_TOKENS}
        if number % 3 == 0:
            properties = {f"field_{number}_{place}": {"type": "string"} for place in range(20)}
            schema = {"type": "object", "properties": properties, "required": list(properties)}
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        typed = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), typed)
        urllib.request.urlopen(request, timeout=300).read()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, range(REQUESTS)))


def shown(values: dict[str, float]) -> str:
    """For the table."""
    each = [f"{value:.4g}" for value in values.values()]
    return each[0] if len(each) == 1 else f"[{', '.join(each)}]"


def main() -> None:
    """Run, print the table, and say what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="of a server with a method and a state_dir; none: one is started")
    parser.add_argument("--state-dir", type=Path, help="its state_dir")
    parser.add_argument("--save-seconds", type=float, default=6.0, help="state_interval_minutes, in seconds")
    given = parser.parse_args()
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(ROOT / "tests" / "alerts.yml")]):
        subprocess.run(["promtool", *command], check=True)
    with tempfile.TemporaryDirectory(prefix="vllm-ext-dashboard-") as name, ExitStack() as running:
        url, state = given.url, given.state_dir or Path(name, "state")
        if url is None:
            learnt = {"state_dir": str(state), "state_interval_minutes": given.save_seconds / 60}
            server = LocalServer("server", str(ensure_model()), OPTIONS, {"method": "hybrid", **learnt})
            running.enter_context(server)
            list(wait_until_ready([server]))
            url = server.url
        ask = running.enter_context(prometheus(Path(name), url.removeprefix("http://")))
        time.sleep(10)  # it starts, and scrapes
        before = [ask(query) for _, query in queries()]
        load(url)
        time.sleep(given.save_seconds + 2)
        away = state.rename(state.with_name(f"{state.name}.away"))
        load(url)
        time.sleep(given.save_seconds + 5)
        after = [ask(query) for _, query in queries()]
        least = [ask(f"min_over_time(({query})[1h:1s])") for _, query in queries()]
        most = [ask(f"max_over_time(({query})[1h:1s])") for _, query in queries()]
        alerts = {json.loads(each)["alertname"] for each in ask('ALERTS{alertstate="firing"}')}
        away.rename(state)
    wrong = alerts != EXPECTED
    for (title, query), *values in zip(queries(), before, least, most, after, strict=True):
        fits = bool(values[-1]) and (values[1] != values[2] or title.endswith(STILL))
        wrong |= not fits
        print("ok   " if fits else "WRONG", title, f"\n      {query}\n     ", " | ".join(map(shown, values)))
    print(f"alerts: {', '.join(sorted(alerts)) or 'none'}; expected: {', '.join(EXPECTED)}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
