# SPDX-License-Identifier: Apache-2.0
"""Grammars that the engine core has compiled, for rules in its process: they are there without a wait.

vLLM schedules a request when its grammar is compiled. So who reads that one has it in the request's first step. An
xgrammar grammar is handed on as it is: writing one down and reading it again takes longer than to compile it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from vllm_ext.samplers.base import Kind, Vocabulary
from vllm_ext.samplers.kept import digest

# As long as the core, or a rule, keeps them. Engines of one process may have different tokens.
_shared: WeakValueDictionary[tuple[Vocabulary, bytes], Any] = WeakValueDictionary()


def share(vocabulary: Vocabulary, kind: Kind, source: str, compiled: Any) -> None:
    """Hand on a grammar.

    Args:
        vocabulary: the target's, which hashes.
        kind: how ``source`` is written.
        source: what was compiled.
        compiled: an xgrammar CompiledGrammar of it.
    """
    _shared[vocabulary, digest(kind, source)] = compiled


def find(vocabulary: Vocabulary, kind: Kind, source: str) -> Any | None:
    """The CompiledGrammar, where one was handed on and is still in use."""
    return _shared.get((vocabulary, digest(kind, source)))
