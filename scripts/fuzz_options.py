# SPDX-License-Identifier: Apache-2.0
"""Bad request parameters and bad configurations by the hundred: all must be refused by name, and end nothing.

    python scripts/fuzz_options.py [--requests 500] [--configs 200] [--seed 0]
    python scripts/fuzz_options.py --serve            # a server to send a share of the requests to; in another shell:
    python scripts/fuzz_options.py --url http://127.0.0.1:8000 --share 100

Requests go through the types, the parameters and the checks that vLLM's server uses, without an engine; with --url a
share of them over HTTP as well. Configurations are made as `vllm serve` makes them, up to the engine's start. Exits 1
if one is accepted, is refused without its field's name, with a traceback, at length, or by anything but HTTP 400.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_options import Bad, configs, requests, rules_of

from vllm_ext.data.trie_build import build
from vllm_ext.demo import embedded_model

MOST_CHARACTERS = 8_000  # of a message
PROMPT = [504, 253, 504]
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True}


def problem_of(bad: Bad, message: str | None) -> str | None:
    """What is wrong with an answer; None where nothing is.

    Args:
        bad: what was to be refused.
        message: the refusal; None: it was accepted.
    """
    if message is None:
        return "was accepted"
    if bad.field not in message and ascii(bad.field)[1:-1] not in message:
        return "the field is not named"
    if "Traceback" in message or 'File "' in message:
        return "there is a traceback"
    if len(message) > MOST_CHARACTERS:
        return f"the message has {len(message)} characters"
    return None


class Requests:
    """What a server does with a request before the engine has it."""

    def __init__(self, model: str, rules: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        ours = {"vllm_ext": {"rules": rules, "structured_outputs": {"strict": True}}}
        config = EngineArgs(model=model, additional_config=ours, **ENGINE).create_engine_config()
        self._processor = InputProcessor(config, renderer_from_config(config))

    def refusal(self, body: dict[str, Any]) -> str | None:
        """The message; None where it is accepted. Raises what would be an HTTP 500."""
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.exceptions import VLLMClientError

        body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 1, **body}
        try:
            asked = CompletionRequest.model_validate(body)
            params = asked.to_sampling_params(4)
            prompt = {"type": "token", "prompt_token_ids": PROMPT}
            self._processor.process_inputs("1", prompt, params, ("generate",))
        except (ValueError, VLLMClientError) as error:  # what a server answers with HTTP 400
            return str(error)
        return None


def config_refusal(model: str, content: dict[str, Any]) -> str | None:
    """The message; None where the configuration is accepted. Raises what would be a traceback."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(model=model, **ENGINE, **content).create_engine_config()
    except ValueError as error:
        return str(error)
    return None


def http_refusal(url: str, body: dict[str, Any]) -> str | None:
    """The message of a running server's HTTP 400. Raises OSError for any other failure."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(
            {"model": name_at(url), "prompt": PROMPT, "max_tokens": 4, "temperature": 1, **body}
        ).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120):
            return None
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        if error.code != 400:
            raise OSError(f"HTTP {error.code}: {text[:200]}") from None
        return str(json.loads(text)["error"]["message"])


def name_at(url: str) -> str:
    """Of the model that a server has. Raises OSError where it is gone."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        return str(json.load(response)["data"][0]["id"])


class Run:
    """Counts of what came of all that was tried."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def attempt(self, what: str, bad: Bad, refusal: Callable[[dict[str, Any]], str | None]) -> None:
        """Try one, and judge the answer."""
        message: str | None
        try:
            message = refusal(bad.content)
            problem = problem_of(bad, message)
        except Exception as error:
            message, problem = f"{type(error).__name__}: {error}", "it raises"
        self.counts[f"{what} ({bad.kind}): {'refused by name' if problem is None else problem}"] += 1
        if problem is not None:
            self.failures.append(
                f"{what}: {problem}: {bad.field!r} in {ascii(bad.content)[:300]}\n    {ascii(message)[:600]}"
            )


def prepare(folder: Path, model: str) -> dict[str, Any]:
    """Files for a server's rules, and some that are none; those rules."""
    (folder / "pets.txt").write_text("a cat\na dog")
    build([folder / "pets.txt"], folder / "pets.trie", model, "text", "", lambda *_: None)
    (folder / "junk").write_text("junk")
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
    return rules_of(folder)


def main(arguments: list[str] | None = None) -> int:
    """1 if anything was not refused as it should be."""
    parser = argparse.ArgumentParser(
        description="Bad request parameters and configurations: all refused by name."
    )
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--configs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a server that was started with --serve")
    parser.add_argument("--share", type=int, default=100, help="how many of the requests go there too")
    parser.add_argument("--serve", action="store_true", help="run that server")
    options = parser.parse_args(arguments)
    model = str(embedded_model.ensure_model())
    with tempfile.TemporaryDirectory() as name:
        rules = prepare(Path(name), model)
        if options.serve:
            ours = {"vllm_ext": {"rules": rules, "structured_outputs": {"strict": True}}}
            command = ["serve", model, "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
            vllm = Path(sys.executable).with_name("vllm")
            return subprocess.run(
                [vllm, *command, "--additional-config", json.dumps(ours)], check=False
            ).returncode
        run, chance = Run(), random.Random(options.seed)
        bad_requests = list(itertools.islice(requests(chance), options.requests))
        for bad in itertools.islice(configs(chance, Path(name)), options.configs):
            run.attempt("configuration", bad, lambda content: config_refusal(model, content))
        if bad_requests:
            server = Requests(model, rules)
            for bad in bad_requests:
                run.attempt("request", bad, server.refusal)
        if options.url:
            for bad in chance.sample(bad_requests, min(options.share, len(bad_requests))):
                run.attempt("over HTTP", bad, lambda body: http_refusal(options.url, body))
            try:
                if (refused := http_refusal(options.url, {})) is not None:
                    run.failures.append(f"a good request is refused: {refused[:200]}")
            except OSError as error:
                run.failures.append(f"the server is gone: {error}")
    for what, count in sorted(run.counts.items()):
        print(f"{count:5} {what}")
    for failure in run.failures[:40]:
        print(failure)
    print(f"{run.counts.total()} tried with seed {options.seed}, {len(run.failures)} failures")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
