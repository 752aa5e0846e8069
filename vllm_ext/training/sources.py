# SPDX-License-Identifier: Apache-2.0
"""The answers that training learns from, and the work folder they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SETTINGS = "settings.json"  # of the work folder: what its answers and its checkpoint belong to


class Source:
    """Answers to learn from: asked for, or kept by a server.

    Raises:
        ValueError: both, or none of them, are given.
    """

    def __init__(
        self,
        folder: Path,
        prompts: list[str] | None,
        answers: list[Path] | None,
        own_prompts: int,
        samples: int,
        max_tokens: int,
        top_k: int,
    ) -> None:
        from vllm_ext.data.prompts import load_prompts

        if bool(prompts or own_prompts) == bool(answers):
            raise ValueError(
                f"--prompts={prompts or []}, --own-prompts={own_prompts} and "
                f"--answers={[*map(str, answers or [])]} are not allowed; prompts of either kind or "
                "answers, one of them must be given, and not both"
            )
        self._folder, self._kept = folder, [given.resolve() for given in answers or []]
        self._chats: list[Any] = []
        if prompts:
            self._chats = [prompt.messages for prompt in load_prompts([Path(file) for file in prompts])]
        self._asked = {
            "own_prompts": own_prompts,
            "samples": samples,
            "max_tokens": max_tokens,
            "top_k": top_k,
        }

    def settings(self) -> dict[str, Any]:
        """What the answers belong to."""
        kept = [str(given) for given in self._kept]
        return {"target": str(self._folder), "chats": len(self._chats), "answers": kept, **self._asked}

    def answers(self, work: Path, options: dict[str, Any], report: Any, verbose: bool = False) -> list[Any]:
        """The answers."""
        from vllm_ext.bench.side_by_side import set_environment
        from vllm_ext.data.answers import generate, load

        if self._kept:
            return [answer for kept in self._kept for answer in load(kept)]
        asked = self._asked
        set_environment(verbose)
        generate(
            str(self._folder),
            self._chats,
            asked["own_prompts"],
            work / "answers",
            asked["samples"],
            asked["max_tokens"],
            asked["top_k"],
            {**options, "enforce_eager": True, "use_tqdm_on_load": verbose},
            report,
        )
        return load(work / "answers")


def same_settings(work: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on with what other settings began."""
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = work / SETTINGS
    if not file.exists():
        file.write_text(json.dumps(settings, indent=1))
    elif (before := json.loads(file.read_text())) != settings:
        changed = ", ".join(
            f"{name}={settings[name]!r}, was {before.get(name)!r}"
            for name in settings
            if settings[name] != before.get(name)
        )
        raise ValueError(
            f"{work} was begun with other settings ({changed}); use those, another --output, or delete it"
        )
