# SPDX-License-Identifier: Apache-2.0
"""Names of methods for the KV cache to codec classes. A new one is one file and one line here."""

from __future__ import annotations

import difflib
from importlib import import_module

from vllm_ext.codecs.base import KVCodec

# Paths, not classes: a server that uses one method imports one.
CODECS: dict[str, str] = {
    "actqkv": "vllm_ext.codecs.actqkv:ActQKV",
    "chelsea": "vllm_ext.codecs.chelsea:Chelsea",
    "critic": "vllm_ext.codecs.critic:Critic",
    "gear": "vllm_ext.codecs.gear:Gear",
    "kivi": "vllm_ext.codecs.kivi:Kivi",
    "mustafar": "vllm_ext.codecs.mustafar:Mustafar",
    "snapkv": "vllm_ext.codecs.snapkv:SnapKV",
    "spherical": "vllm_ext.codecs.spherical:Spherical",
    "streaming_llm": "vllm_ext.codecs.streaming_llm:StreamingLLM",
}


MAX_QUOTED = 200  # characters of a value in an error


def load_codec(name: object) -> type[KVCodec]:
    """The class of a codec.

    Raises:
        ValueError: the name is not in the registry; the message lists those that are.
    """
    if not isinstance(name, str) or name not in CODECS:
        near = difflib.get_close_matches(str(name), CODECS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown method {repr(name)[:MAX_QUOTED]}.{hint} KV methods: {', '.join(CODECS)}.")
    module, _, attribute = CODECS[name].partition(":")
    codec: type[KVCodec] = getattr(import_module(module), attribute)
    return codec
