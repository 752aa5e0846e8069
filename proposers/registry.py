# SPDX-License-Identifier: Apache-2.0
"""Method names to proposer classes. A new method is one file and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module

from vllm_ext.proposers.base import Proposer

# Paths, not classes: a server that uses one method imports one.
METHODS: dict[str, str] = {
    "token_recycling": "vllm_ext.proposers.token_recycling:TokenRecycling",
    "suffix_tree": "vllm_ext.proposers.suffix_tree:SuffixDecoding",
    "stand": "vllm_ext.proposers.stand:Stand",
    "aded": "vllm_ext.proposers.aded:Aded",
    "input_copy": "vllm_ext.proposers.input_copy:InputCopy",
    "rest": "vllm_ext.proposers.rest:Rest",
    "hybrid": "vllm_ext.proposers.hybrid:Hybrid",
    "rasd": "vllm_ext.proposers.rasd:Rasd",
    "dyspec": "vllm_ext.proposers.dyspec:DySpec",
    "rsd_c": "vllm_ext.proposers.rsd:RsdC",
    "rsd_s": "vllm_ext.proposers.rsd:RsdS",
    "static_tree": "vllm_ext.proposers.static_tree:StaticTree",
    "layerskip": "vllm_ext.proposers.layerskip:LayerSkip",
    "del": "vllm_ext.proposers.dynamic_exit:DynamicExit",
    "unified_skip": "vllm_ext.proposers.unified_skip:UnifiedSkip",
    "eagle_tree": "vllm_ext.proposers.eagle:Eagle",
    "clover_tree": "vllm_ext.proposers.clover:Clover",
    "medusa_tree": "vllm_ext.proposers.medusa:Medusa",
    "ppd": "vllm_ext.proposers.ppd:Ppd",
    "spectr": "vllm_ext.proposers.spectr:SpecTr",
    "specdec_pp": "vllm_ext.proposers.specdec_pp:SpecDecPP",
}


MAX_QUOTED = 200  # characters of a value in an error


def load_method(name: str) -> type[Proposer]:
    """The proposer class of a method.

    Raises:
        ValueError: the name is not in the registry; the message lists those that are.
    """
    if name not in METHODS:
        raise ValueError(unknown_method(name))
    module, _, attribute = METHODS[name].partition(":")
    proposer: type[Proposer] = getattr(import_module(module), attribute)
    return proposer


def unknown_method(name: object, allowed: Iterable[str] = METHODS, others: Iterable[str] = ()) -> str:
    """The text of the error for a method nobody knows: the nearest name first, then ours.

    Args:
        name: the user's value of ``method``.
        allowed: methods of ours that may stand there.
        others: vLLM's own names, if they may stand there too; only the nearest is named.
    """
    allowed = list(allowed)
    near = difflib.get_close_matches(str(name), [*allowed, *others], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    shown = repr(name)[:MAX_QUOTED]
    return (
        f"speculative_config.method: unknown method {shown}.{hint} Methods of vllm-ext: {', '.join(allowed)}."
    )
