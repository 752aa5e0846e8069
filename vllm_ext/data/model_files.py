# SPDX-License-Identifier: Apache-2.0
"""A model's weights and tokenizer as files: by which hash others know them, and what sampling rules ask of a tokenizer.

A tokenizer to be hashed is loaded by the `tokenizers` library alone where there is a ``tokenizer.json``: a build then
needs neither torch nor transformers, and the server's start-up hashes exactly what the build hashed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PLACES, BYTES = 16, 1 << 16  # of a file of weights that are looked at, besides its header


def fingerprint(folder: Path) -> str:
    """Of a model's weights: their names, shapes and dtypes, and bytes from many places. Fast, however large they are.

    Raises:
        ValueError: the folder has no safetensors files.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors files; exit heads belong to a model that has")
    found = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = stream.read(8)
            found.update(header + stream.read(int.from_bytes(header, "little")))
            for place in range(PLACES):
                stream.seek(max(size - BYTES, 0) * place // (PLACES - 1))
                found.update(stream.read(BYTES))
    return found.hexdigest()


def load_tokenizer(name: str, revision: str | None = None) -> Tokenizer:
    """The fast tokenizer of a model.

    Args:
        name: a model's folder or Hugging Face id.
        revision: of the id.

    Raises:
        ValueError: there is none.
    """
    from tokenizers import Tokenizer

    if (file := _tokenizer_file(name, revision)) is not None:
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"tokenizer={name!r}: {file} cannot be read: {error}") from None
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name, revision=revision)
    except Exception as error:  # each tokenizer class has its own
        raise ValueError(
            f"tokenizer={name!r} cannot be loaded ({error}); name a model's folder or Hugging Face id"
        ) from None
    if not loaded.is_fast:
        raise ValueError(
            f"tokenizer={name!r} has no fast form (tokenizer.json), which a datastore needs; save one with "
            "transformers' convert_slow_tokenizer, or choose another model"
        )
    fast: Tokenizer = loaded.backend_tokenizer
    return fast


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def vocabulary_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 over every id and its token, in the order of the ids, added tokens included.

    Two tokenizers have the same hash if and only if each id stands for the same token in both: that is what makes
    stored ids usable. How text is split may differ; then fewer drafts are right.
    """
    digest = hashlib.sha256()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for token, number in sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0])):
        digest.update(f"{number} {json.dumps(token)}\n".encode())
    return digest.hexdigest()


def hash_of(name: str, revision: str | None = None) -> str:
    """`vocabulary_hash` of a model's tokenizer; see `load_tokenizer`."""
    return vocabulary_hash(load_tokenizer(name, revision))


def _tokenizer_file(name: str, revision: str | None) -> Path | None:
    if Path(name).is_dir():
        file = Path(name) / "tokenizer.json"
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "tokenizer.json", revision=revision))
    except (OSError, ValueError):  # no such file, no such repository, no network, no valid id
        return None


def snapshot(name: str) -> Path:
    """The folder of a model's files; of a Hugging Face id that of its snapshot, fetched where it is missing.

    Raises:
        ValueError: there is none.
    """
    if Path(name).is_dir():
        return Path(name).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except (OSError, ValueError) as error:
        raise ValueError(f"model={name!r}: no folder, and not to be had by that id ({error})") from None


@dataclass(frozen=True)
class ModelVocabulary:
    """A `vllm_ext.samplers.base.Vocabulary`: of one model, by vLLM's own tokenizer; loaded when it is asked for."""

    tokenizer: str
    revision: str | None
    mode: str
    trust_remote_code: bool
    size: int

    @classmethod
    def of(cls, model_config: Any) -> ModelVocabulary:
        """Of vLLM's ModelConfig."""
        return cls(
            str(model_config.tokenizer),
            model_config.tokenizer_revision,
            model_config.tokenizer_mode,
            model_config.trust_remote_code,
            model_config.get_vocab_size(),
        )

    @functools.cached_property
    def _loaded(self) -> Any:
        from vllm.tokenizers import get_tokenizer

        return get_tokenizer(
            self.tokenizer,
            tokenizer_mode=self.mode,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )

    @functools.cached_property
    def tokenizer_info(self) -> Any:
        """What xgrammar knows of it."""
        import xgrammar

        return xgrammar.TokenizerInfo.from_huggingface(self._loaded, vocab_size=self.size)

    @functools.cached_property
    def pieces(self) -> Sequence[bytes]:
        """See the protocol."""
        pieces = list(self.tokenizer_info.decoded_vocab)
        added = getattr(self._loaded, "added_tokens_decoder", {})
        special = {number for number, token in added.items() if token.special}
        for number in special.union(self._loaded.all_special_ids):
            pieces[number] = b""
        return pieces

    def encode(self, text: str, special: bool = False) -> list[int]:
        """See the protocol; or with those that the tokenizer puts around a text."""
        ids: list[int] = self._loaded.encode(text, add_special_tokens=special)
        return ids
