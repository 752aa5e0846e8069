# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext warm``: a server that begins with what it wrote knows the model, and says the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs
from typer.testing import CliRunner
from vllm import SamplingParams

from vllm_ext.cli.main import app
from vllm_ext.training import warm
from vllm_ext.training.warm import Warmed

METHOD: dict[str, Any] = {"method": "hybrid", "num_speculative_tokens": 12, "budget": "fixed"}
TEXTS = [f"Describe the {thing}." for thing in ("sea", "moon", "old town", "first day of spring")]


class Model:
    """Answers with three tokens, in ten seconds each time."""

    def __init__(self, template: str | None) -> None:
        self.asked: list[Any] = []
        self.now = 0.0
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4)),
            model_config=SimpleNamespace(get_vocab_size=lambda: 2500),
            engine_core=SimpleNamespace(shutdown=lambda: self.asked.append("shutdown")),
        )
        self._tokenizer = SimpleNamespace(
            chat_template=template,
            apply_chat_template=lambda chat, tokenize: f"<user>{chat[0]['content']}<answer>",
            encode=lambda text, add_special_tokens: [len(text)],
        )

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
        self.asked.append(prompts)
        self.now += 10.0
        completion = SimpleNamespace(token_ids=[1, 2, 3], text=" Why? ", finish_reason="stop")
        return [SimpleNamespace(outputs=[completion]) for _ in prompts]

    chat = generate


def warmed(monkeypatch: pytest.MonkeyPatch, model: Model, chats: list[Any], minutes: float) -> Warmed:
    monkeypatch.setattr(warm, "engine", lambda name, options: model)
    method = {**METHOD, "state_dir": "/none"}
    return warm.warm("m", method, chats, minutes, 9, {}, lambda *_: None, lambda: model.now)


def test_what_it_reads_and_in_which_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens for a fifth of the time, then what is given, then its own, until time is up; and then it saves."""
    model, given = Model("{{ a chat's }}"), [[{"role": "user", "content": str(n)}] for n in range(6)]
    done = warmed(monkeypatch, model, given, 1.5)
    # A fifth is 18 seconds: two lots.
    assert [prompts[-1] for prompts in model.asked[:2]] == [{"prompt_token_ids": [n]} for n in (1023, 2047)]
    assert model.asked[2:4] == [given[:4], given[4:]]
    own = [[{"role": "user", "content": "Why?"}]] * 4
    assert model.asked[4:] == [[{"prompt_token_ids": [len("<user>")]}] * 4, own] * 3 + ["shutdown"]
    assert vars(done) == {"vocabulary": 2048, "prompts": 6 + 3 * 4, "tokens": 3 * (6 + 3 * 4)}


def test_a_model_that_is_no_chat_model_is_given_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(None)
    done = warmed(monkeypatch, model, [[{"role": "user", "content": "One"}]], 60.0)
    assert model.asked[3:] == [["One"], "shutdown"]
    assert vars(done) == {"vocabulary": 2500, "prompts": 1, "tokens": 3}
    model = Model(None)
    with pytest.raises(ValueError, match="--prompts is needed: m has no chat template"):
        warmed(monkeypatch, model, [], 60.0)
    assert not model.asked
    with pytest.raises(
        ValueError, match=r"m writes none of its own within --minutes=0\.1; give some, or more minutes"
    ):
        warmed(monkeypatch, Model("{{ a chat's }}"), [], 0.1)


@pytest.mark.slow
@pytest.mark.engine
def test_a_server_begins_with_what_was_learnt(slice_dir: str, plain_slice_llm: Any, tmp_path: Path) -> None:
    prompts, state = tmp_path / "prompts.jsonl", tmp_path / "state"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about {n} birds."}) + "\n" for n in range(8)))
    command = [
        str(Path(sys.executable).parent / "vllm-ext"),
        "warm",
        "--model",
        slice_dir,
        "--output",
        str(state),
    ]
    command += ["--speculative-config", json.dumps(METHOD), "--prompts", str(prompts), "--minutes", "0.3"]
    command += ["--max-tokens", "24", "--max-num-seqs", "8", "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "tokens read alone" in done.stdout
    assert json.dumps({**METHOD, "state_dir": str(state)}) in done.stdout
    (file,) = state.iterdir()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    chats: Any = [[{"role": "user", "content": text}] for text in TEXTS]

    def tokens(llm: Any) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.chat(chats, params, use_tqdm=False)]

    wanted, steps = tokens(plain_slice_llm), []
    for config in (METHOD, {**METHOD, "state_dir": str(state)}):
        for llm in engine(slice_dir, config):
            assert_same_outputs(wanted, tokens(llm))
            (counters,) = llm.collective_rpc("vllm_ext_counters")
            assert counters["state_loads"] == int("state_dir" in config)
            assert counters["state_set_aside"] == 0
            steps.append(counters["spec_steps"])
    assert steps[1] < 0.9 * steps[0]
    assert [path.name for path in state.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is no JSON"),
        ('{"method": "ngram"}', "allowed: a JSON object whose `method` is one of"),
        ('["hybrid"]', "allowed: a JSON object whose `method` is one of"),
        ('{"method": "hybrid", "state_dir": "x"}', "--output is its state_dir; leave it out"),
    ],
)
def test_what_it_refuses(tmp_path: Path, config: str, message: str) -> None:
    arguments = ["warm", "--model", "none", "--output", str(tmp_path), "--speculative-config", config]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
