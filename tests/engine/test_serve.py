# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve`` with Token Recycling: metrics, edges, aborts, bad requests, many clients."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import own_prompts
from typer.testing import CliRunner

from vllm_ext.bench import local_server
from vllm_ext.cli.main import app
from vllm_ext.data.trie_build import build
from vllm_ext.demo import servers

pytestmark = pytest.mark.engine

METHOD: dict[str, object] = {"method": "token_recycling", "num_speculative_tokens": 4, "matrix_width": 8}


ANSWERS = ["a cat", "a dog", "a dog and a cat"]


@pytest.fixture(scope="module")
def server(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    folder = tmp_path_factory.mktemp("trie")
    (folder / "pets.txt").write_text("\n".join(ANSWERS))
    file = folder / "pets.trie"
    build([folder / "pets.txt"], file, model_dir, "text", "", lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # the log is tested
        server = servers.Server("tested", model_dir, "float32", METHOD)
        rules = {"trie": {"files": {"pets": str(file)}}, "awrs": {}, "cad": {}}
        ours = {"vllm_ext": {"rules": rules, "structured_outputs": {"strict": True}}}
        server.command += [
            "--additional-config",
            json.dumps(ours),
            "--structured-outputs-config.backend",
            "xgrammar",
            "--per-request-spec-decode-metrics",
            "summary",
        ]
        with server:
            patch.undo()
            for _ in local_server.wait_until_ready([server]):
                pass
            yield server


def post(server: servers.Server, path: str, **body: Any) -> tuple[int, Any]:
    """Status and JSON of one request."""
    request = urllib.request.Request(
        server.url + path,
        json.dumps({"model": servers.SERVED_NAME, "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def answer(server: servers.Server, prompt: str, max_tokens: int = 24) -> str:
    messages = [{"role": "user", "content": prompt}]
    status, reply = post(server, "/v1/chat/completions", messages=messages, max_tokens=max_tokens)
    assert status == 200, reply
    text: str = reply["choices"][0]["message"]["content"]
    return text


def complete(server: servers.Server, prompt: list[int], max_tokens: int) -> Any:
    status, reply = post(server, "/v1/completions", prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
    assert status == 200, reply
    return reply


def test_counters_on_the_metrics_page(server: servers.Server) -> None:
    def read() -> dict[str, float]:
        names = ("spec_draft_tokens", "spec_accepted_tokens", "spec_emitted_tokens", "spec_steps")
        return {name: server.metric(f"vllm_ext:{name}_total") for name in names}

    complete(server, [504, 253], 1)
    before = read()
    reply = complete(server, [504, 253, 504, 253, 504], 40)
    new = {name: value - before[name] for name, value in read().items()}
    assert new["spec_emitted_tokens"] == reply["usage"]["completion_tokens"] == 40
    assert new["spec_emitted_tokens"] == new["spec_steps"] + new["spec_accepted_tokens"]
    assert 0 < new["spec_accepted_tokens"] <= new["spec_draft_tokens"]
    # Where one token of a prompt is left to compute vLLM fills its rows up as if there were drafts.
    for _ in range(2):
        complete(server, [504] * 129, 4)
    assert read()["spec_draft_tokens"] > before["spec_draft_tokens"]
    # Ours and vLLM's own count the same drafts.
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") == read()["spec_draft_tokens"]
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        page = response.read().decode()
    assert 'vllm_ext:fallbacks_total{engine="0",method="token_recycling"' in page
    assert server.metric("vllm_ext:fallbacks_total") == 0


def test_method_and_options_are_logged_once(server: servers.Server) -> None:
    log = server.log.read_text()
    said = re.findall(r"speculative method token_recycling \((.*)\)", log)
    assert len(said) == 1
    assert said[0].startswith("num_speculative_tokens=4, budget='goodput', ")
    assert "matrix_width=8" in said[0].split(", ")
    ready = [line for line in log.splitlines() if "vllm-ext is ready: " in line]
    assert len(ready) == 1
    assert "token_recycling drafts trees of up to 4 tokens (budget goodput)" in ready[0]
    assert "8.5 MB of host memory" in ready[0]
    assert 'To switch off: leave out --speculative-config and "vllm_ext" in --additional-config.' in ready[0]
    assert "docs/usage.md" in ready[0]
    # Of vLLM's warnings none that our worker makes untrue.
    for untrue in ("min_p and logit_bias", "custom scheduler class", "custom class-based proposer"):
        assert untrue not in log
    assert "Unknown vLLM environment variable" not in log
    assert "milliseconds of a forward pass by query tokens: 1: " in log


@pytest.mark.parametrize("prompt_tokens", [1, 2046, 2047])
def test_prompt_lengths_at_the_edges(server: servers.Server, prompt_tokens: int) -> None:
    room = 2048 - prompt_tokens
    reply = complete(server, [504] * prompt_tokens, min(room, 8))
    assert reply["usage"]["completion_tokens"] == min(room, 8)


def test_bad_requests_get_400_and_hurt_nobody(server: servers.Server) -> None:
    for body in (
        {"prompt": [504] * 2049, "max_tokens": 1},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "max_tokens": 4, "min_p": 2.0, "temperature": 1},
        {"prompt": "x", "max_tokens": 4, "logit_bias": {"99999999": 1}},
        {"prompt": "x", "max_tokens": 4, "temperature": -1},
        {"prompt": "x", "max_tokens": 4, "vllm_xargs": {"speculation_max_nodes": -1}},
        {"prompt": "x", "max_tokens": 4, "vllm_xargs": {"speculaton": False}},
        {"prompt": "x", "max_tokens": 4, "vllm_xargs": {"verify": "lossy"}},
        {"prompt": "x", "max_tokens": 4, "vllm_xargs": {"verify": "typical"}, "seed": 1},
    ):
        status, reply = post(server, "/v1/completions", **body)
        assert status == 400, (body, reply)
    # What vLLM refuses next to its own speculation.
    status, reply = post(
        server, "/v1/completions", prompt="x", max_tokens=4, min_p=0.1, temperature=1, logit_bias={"28": 1}
    )
    assert status == 200, reply
    assert answer(server, "Say hello.")


def test_a_request_says_what_is_drafted_for_it_and_hears_what_was(server: servers.Server) -> None:
    """Switched off it has plain's answer and no drafts; vLLM's own field of a response has a request's figures."""

    def ask(asked: dict[str, Any] | None) -> tuple[str, dict[str, Any] | None, int]:
        """The answer, what the response says of drafts, and how many nodes the server says it verified."""
        before = server.metric("vllm_ext:spec_draft_tokens_total")
        status, reply = post(
            server,
            "/v1/completions",
            prompt="1, 2, 1, 2, 1, 2, 1,",
            max_tokens=40,
            ignore_eos=True,
            vllm_xargs=asked,
        )
        assert status == 200, reply
        said = (reply.get("metrics") or {}).get("speculative_decoding")
        nodes = server.metric("vllm_ext:spec_draft_tokens_total") - before
        return reply["choices"][0]["text"], said, int(nodes)

    text, said, nodes = ask(None)
    assert said is not None
    assert said["num_draft_tokens"] == nodes > 0
    assert 0 < said["num_accepted_draft_tokens"] <= nodes
    assert ask({"speculation_max_nodes": 1})[0] == text
    off, said, nodes = ask({"speculation": False})
    assert off == text
    assert nodes == 0
    assert said is None or said["num_spec_steps"] == 0


def test_rules_of_requests(server: servers.Server) -> None:
    """Several at once, beside wrong ones and a free one."""
    messages = [{"role": "user", "content": "Which animal do you like?"}]

    def ask(**body: Any) -> tuple[int, Any]:
        return post(server, "/v1/chat/completions", messages=messages, max_tokens=24, **body)

    bodies: list[dict[str, Any]] = [
        {"vllm_xargs": {"trie": "pets"}},
        {"vllm_xargs": {"trie": "pets"}, "temperature": 1, "seed": 1},
        {},
        {"vllm_xargs": {"trie": "plants"}},
        {"vllm_xargs": {"trie": "pets"}, "ignore_eos": True},
        {"vllm_xargs": {"trie": "pets"}, "response_format": {"type": "json_object"}},
        {"vllm_xargs": {"awrs_regex": "(cat|dog)s?"}, "temperature": 1, "seed": 1},
        {"vllm_xargs": {"awrs_json": "{"}},
        {"vllm_xargs": {"cad_context": "Which animal", "cad_alpha": 0.0}},
        {"vllm_xargs": {"cad_context": "Which animal", "cad_alpha": 3.0}},
        {"vllm_xargs": {"cad_context": "Which plant"}},
        {"vllm_xargs": {"trei": "pets"}},
        {"vllm_xargs": {"no_such_rule": "pets"}},
    ]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda body: ask(**body), bodies))
    assert [status for status, _ in replies] == [
        200,
        200,
        200,
        400,
        400,
        400,
        200,
        400,
        200,
        200,
        400,
        400,
        200,
    ]
    texts = [reply["choices"][0]["message"]["content"] for _, reply in replies[:3]]
    assert set(texts[:2]) <= set(ANSWERS)
    assert texts[2] not in ANSWERS
    assert "vllm_xargs: trie='plants' is not allowed; allowed: 'pets'." in json.dumps(replies[3][1])
    assert "does not go with ignore_eos=True" in json.dumps(replies[4][1])
    weighed = replies[6][1]
    assert re.fullmatch("(cat|dog)s?", weighed["choices"][0]["message"]["content"])
    assert weighed["kv_transfer_params"]["vllm_ext"]["awrs_log_weight"] <= 0.0
    assert replies[0][1]["kv_transfer_params"] is None
    assert "vllm_xargs awrs_json: Invalid JSON" in json.dumps(replies[7][1])
    assert "unknown key 'trei'. Did you mean 'trie'?" in json.dumps(replies[11][1])
    steered = [reply["choices"][0]["message"]["content"] for _, reply in replies[8:10]]
    assert steered[0] == texts[2] != steered[1]
    assert "cad_context='Which plant' is not in the prompt" in json.dumps(replies[10][1])


def test_a_strict_server_refuses_schemas_that_are_enforced_in_part(server: servers.Server) -> None:
    messages = [{"role": "user", "content": "How old is Ada, who was born 36 years ago?"}]

    def ask(schema: Any) -> tuple[int, Any]:
        response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        path = "/v1/chat/completions"
        return post(server, path, messages=messages, max_tokens=60, response_format=response_format)

    person = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    status, reply = ask({**person, "required": ["age", "name"]})
    assert status == 400, reply
    said = reply["error"]["message"]
    assert 'at the root: required=["age", "name"]: xgrammar does not demand \'name\'' in said
    assert "--structured-outputs-config.backend guidance" in said
    status, reply = ask(person)
    assert status == 200, reply
    assert json.loads(reply["choices"][0]["message"]["content"]).keys() == {"age"}


SPACES = (216, 198, 197, 256, 333)  # tokens that are whitespace


def test_whitespace_is_bounded_by_request(server: servers.Server) -> None:
    messages = [{"role": "user", "content": "Say yes or no, in JSON."}]
    word = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}

    def ask(most: Any, schema: Any = word) -> tuple[int, Any]:
        response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return post(
            server,
            "/v1/chat/completions",
            messages=messages,
            max_tokens=40,
            response_format=response_format if schema else {"type": "text"},
            logit_bias={str(token): 100 for token in SPACES},
            vllm_xargs={"max_whitespace": most},
        )

    status, reply = ask(3)
    assert status == 200, reply
    text = reply["choices"][0]["message"]["content"]
    assert json.loads(text).keys() == {"ok"}
    assert max(map(len, re.findall(r"\s+", text))) == 3
    status, reply = ask(-1)
    assert status == 200, reply
    assert max(map(len, re.findall(r"\s+", reply["choices"][0]["message"]["content"]))) > 30
    for wrong, says in ((0, "max_whitespace=0: none at all"), ("3", "max_whitespace='3' is not allowed")):
        status, reply = ask(wrong)
        assert status == 400, reply
        assert says in reply["error"]["message"]
    status, reply = ask(3, None)
    assert status == 400, reply
    assert "max_whitespace is for JSON" in reply["error"]["message"]


def test_aborts_in_mid_stream(server: servers.Server) -> None:
    prompt = "Count from one to one hundred in words."
    expected = answer(server, prompt)
    for _ in range(3):
        stream = server.stream(prompt, 400)
        for _ in range(3):
            next(stream)
        stream.close()  # type: ignore[attr-defined]  # a generator: closes the connection
    deadline = time.monotonic() + 20
    while server.metric("vllm:num_requests_running") > 0:
        assert time.monotonic() < deadline, "an aborted request still runs"
        time.sleep(0.2)
    assert answer(server, prompt) == expected


def test_many_clients_get_what_one_gets(server: servers.Server) -> None:
    """Twelve at once on four places, three of them aborting, one under a grammar."""
    prompts = own_prompts()[:8]
    expected = [answer(server, prompt) for prompt in prompts]

    def abort(_: int) -> None:
        stream = server.stream("Tell me a long story about the sea.", 200)
        for _ in range(4):
            next(stream)
        stream.close()  # type: ignore[attr-defined]

    def structured() -> Any:
        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        messages = [{"role": "user", "content": "How old is Ada, who was born 36 years ago?"}]
        return post(
            server,
            "/v1/chat/completions",
            messages=messages,
            max_tokens=60,
            response_format=response_format,
        )

    with ThreadPoolExecutor(12) as pool:
        aborts = [pool.submit(abort, i) for i in range(3)]
        grammar = pool.submit(structured)
        assert list(pool.map(lambda prompt: answer(server, prompt), prompts)) == expected
        for job in aborts:
            job.result()
        status, reply = grammar.result()
    assert status == 200, reply
    assert reply["choices"][0]["message"]["content"].lstrip().startswith("{")
    assert server.metric("vllm_ext:fallbacks_total", 'reason="proposer_error"') == 0
    assert server.metric("vllm_ext:fallbacks_total", 'reason="model_chain"') == 0
    assert server.metric("vllm_ext:spec_budget_step_seconds") > 0


def test_a_bad_option_ends_start_up_before_the_model_is_loaded(model_dir: str) -> None:
    bad = servers.Server("bad", model_dir, "float32", {**METHOD, "matrix_width": 0})
    done = subprocess.run(bad.command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "matrix_width=0 is not allowed; allowed: integer, 1 to 32" in done.stderr + done.stdout
    assert "load model" not in done.stderr + done.stdout


def test_a_bench_of_a_running_server(server: servers.Server, model_dir: str, tmp_path: Path) -> None:
    prompts, figures, page = tmp_path / "p.jsonl", tmp_path / "out.json", tmp_path / "out.html"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in own_prompts()[:8]))
    command = (
        f"bench --model {model_dir} --prompts {prompts} --url here={server.url} --url again={server.url}"
    )
    command += (
        f" --concurrency 1,2 --rounds 1 --max-tokens 8 --ignore-eos --goodput e2el:100000 --json {figures}"
    )
    result = CliRunner().invoke(app, [*command.split(), "--html", str(page)])
    assert result.exit_code == 0, result.output
    rows = json.loads(figures.read_text())["serving"]
    assert [(row["label"], row["concurrency"]) for row in rows] == [
        (label, flying) for flying in (1, 2) for label in ("here", "again")
    ]
    for row in rows:
        assert row["requests"] == 4
        assert row["output_tokens"] == 8 * row["requests"]
        assert row["same_as_plain"] == row["requests"]
        assert row["goodput_share"] == 1.0
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"]
        assert 1.0 <= row["tokens_per_step"] <= 5.0
        assert row["engine_steps"] > 0
    assert "<svg" in page.read_text()
    assert "between pieces" in result.output
