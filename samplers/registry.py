# SPDX-License-Identifier: Apache-2.0
"""Rule names to classes. A new rule is one file and one line here."""

from __future__ import annotations

import difflib
from importlib import import_module

from vllm_ext.samplers.base import Rule

# In the order in which they change a row that several rules are for.
RULES: dict[str, str] = {
    "trie": "vllm_ext.samplers.trie:TrieRule",
    "extract": "vllm_ext.samplers.extract:ExtractRule",
    "monitor": "vllm_ext.samplers.monitor:MonitorRule",
    "rpg": "vllm_ext.samplers.rpg:RpgRule",
    # These make p of what the ones before have left.
    "entropy_adaptive": "vllm_ext.samplers.entropy_adaptive:EntropyAdaptiveRule",
    "svdecode": "vllm_ext.samplers.svdecode:SvdecodeRule",
    "caad": "vllm_ext.samplers.caad:CaadRule",
    "cad": "vllm_ext.samplers.cad:CadRule",
    "contrastive": "vllm_ext.samplers.contrastive:ContrastiveRule",
    "lol": "vllm_ext.samplers.lol:LolRule",
    "dola": "vllm_ext.samplers.dola:DolaRule",
    "momentum": "vllm_ext.samplers.momentum:MomentumRule",
    "adadec": "vllm_ext.samplers.adadec:AdadecRule",
    "anchored": "vllm_ext.samplers.anchored:AnchoredRule",
    # Of what is left then, what can still end.
    "close_by_max_tokens": "vllm_ext.samplers.close_by_max_tokens:CloseByMaxTokens",
    # Those that sample from the model's own law come last.
    "asap": "vllm_ext.samplers.asap_rule:AsapRule",
    "awrs": "vllm_ext.samplers.awrs_rule:AwrsRule",
}


MAX_QUOTED = 200  # characters of a value in an error


def load_rule(name: str) -> type[Rule]:
    """The class of a rule.

    Raises:
        ValueError: the name is not in the registry; the message lists those that are.
    """
    if name not in RULES:
        raise ValueError(unknown_rule(name))
    module, _, attribute = RULES[name].partition(":")
    rule: type[Rule] = getattr(import_module(module), attribute)
    return rule


def unknown_rule(name: object) -> str:
    """The text of the error for a rule nobody knows: the nearest name first, then all."""
    near = difflib.get_close_matches(str(name), RULES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown rule {repr(name)[:MAX_QUOTED]}.{hint} Rules: {', '.join(RULES)}."
