# SPDX-License-Identifier: Apache-2.0
"""What matrices keep: plain vLLM's answers (`--plain-answers`), and by which name a method is recorded."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class RecordedLLM:
    """Answers from the folder what an earlier run has asked; for the rest there is the engine.

    Greedy and seeded answers alone: of others a second one would be another sample.
    """

    def __init__(self, folder: Path, model_dir: str, start: Callable[[], Any]) -> None:
        self._folder, self._model_dir, self._start = folder, model_dir, start
        folder.mkdir(parents=True, exist_ok=True)

    def chat(self, messages: Any, params: Any, **options: Any) -> Any:
        return self._answer("chat", messages, params, options)

    def generate(self, prompts: Any, params: Any, **options: Any) -> Any:
        return self._answer("generate", prompts, params, options)

    def get_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model_dir)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._start(), name)

    def _answer(self, kind: str, asked: Any, params: Any, options: dict[str, Any]) -> Any:
        for each in params if isinstance(params, list) else [params]:
            assert each.temperature == 0 or each.seed is not None, (
                "a sample without a seed is not for keeping"
            )
        key = pickle.dumps((kind, asked, params, sorted(options.items())))
        file = self._folder / hashlib.sha256(key).hexdigest()
        if not file.exists():
            answer = getattr(self._start(), kind)(asked, params, **options)
            file.write_bytes(pickle.dumps(answer))
        return pickle.loads(file.read_bytes())  # of this suite's own run


def recorded_name(method: Mapping[str, Any]) -> str:
    """``METHOD``, ``METHOD+DRAFTER`` for drafters with passes, or ``METHOD+cascade``."""
    names = [method["method"]]
    for drafter in method.get("drafters", ()):
        if isinstance(drafter, dict):
            of_vllm = drafter.get("speculative_config", {}).get("method")
            names.append(drafter["method"] if of_vllm is None else f"vllm:{of_vllm}")
    return "+".join([*names, *(["cascade"] if "cascade" in method else [])])
