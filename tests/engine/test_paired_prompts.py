# SPDX-License-Identifier: Apache-2.0
"""Requests that are given a pair where they come in: its prompt, its images, and what is refused there."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.renderers.params import TokenizeParams
from vllm.v1.engine import EngineCoreRequest

from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine import paired_requests
from vllm_ext.samplers.prompt_parts import PairedPrompt

MAX_MODEL_LEN = 64
PROMPT = "Be kind. What is the sea? It is"


@functools.cache
def config_of(model: str) -> Any:
    return EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        additional_config={"vllm_ext": {"rules": {"cad": {}}}},
    ).create_engine_config()


def feature(offset: int, length: int, name: str = "x", is_embed: torch.Tensor | None = None) -> Any:
    place = PlaceholderRange(offset, length, is_embed)
    return MultiModalFeatureSpec(None, "image", name, place, name)


def prepared(
    model: str,
    tokens: Sequence[int],
    features: Sequence[Any] = (),
    *,
    config: Any = None,
    special: bool = True,
    resumable: bool = False,
    asked: dict[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    **extra_args: Any,
) -> SamplingParams:
    """What becomes of a request's parameters, with these keys of ``vllm_xargs``."""
    params = SamplingParams(**{"max_tokens": 5, **(asked or {})}, extra_args={**extra_args, **(given or {})})
    request = EngineCoreRequest(
        "a", list(tokens), list(features), params, None, 0.0, None, None, None, resumable=resumable
    )
    renderer = SimpleNamespace(default_cmpl_tok_params=TokenizeParams(None, add_special_tokens=special))
    paired_requests.prepare(
        SimpleNamespace(vllm_config=config or config_of(model), renderer=renderer), request
    )
    return params


def encode(model: str, text: str) -> list[int]:
    return ModelVocabulary.of(config_of(model).model_config).encode(text)


def test_the_pair_of_a_text(slice_dir: str) -> None:
    tokens = encode(slice_dir, PROMPT)
    for given, expected in (
        ({"cad_context": "Be kind."}, " What is the sea? It is"),
        ({"cad_context": "Be kind.", "cad_negative": "Be rude!"}, "Be rude! What is the sea? It is"),
        ({"cad_negative": "A poem:"}, "A poem:"),
        ({"cad_negative": ""}, " is"),
    ):
        params = prepared(slice_dir, tokens, given=given)
        assert params.extra_args is not None
        assert params.extra_args[paired_requests.PROMPT] == [encode(slice_dir, expected), []]
        assert params.max_tokens == 5
    assert paired_requests.PROMPT not in (prepared(slice_dir, tokens, other=1).extra_args or {})


def test_whole_prompts_are_tokenized_as_the_server_does_it(
    slice_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ModelVocabulary.encode
    monkeypatch.setattr(
        ModelVocabulary,
        "encode",
        lambda self, text, special=False: [1] * special + honest(self, text),
    )
    tokens = encode(slice_dir, PROMPT)
    for special in (True, False):
        for given, is_whole in (({}, True), ({"cad_context": "Be kind."}, False)):
            params = prepared(slice_dir, tokens, special=special, cad_negative="A poem:", given=given)
            assert params.extra_args is not None
            assert (params.extra_args[paired_requests.PROMPT][0][0] == 1) == (special and is_whole)


LONG = "word " * 40


def test_as_many_tokens_as_there_is_room_for(slice_dir: str) -> None:
    """vLLM's default, which is full of the request's own prompt, is cut to what the pair's leaves."""
    tokens, negative = encode(slice_dir, PROMPT), encode(slice_dir, LONG)
    full = MAX_MODEL_LEN - len(tokens)
    for most in (full, full + 1000):
        params = prepared(slice_dir, tokens, cad_negative=LONG, asked={"max_tokens": most})
        assert params.max_tokens == MAX_MODEL_LEN - len(negative)
    for most in (full, full - 1, 1):  # a shorter pair changes nothing
        assert prepared(slice_dir, tokens, cad_negative="A", asked={"max_tokens": most}).max_tokens == most


@pytest.mark.parametrize("kept", [True, False])
def test_pairs_that_are_too_long(slice_dir: str, kept: bool) -> None:
    tokens = encode(slice_dir, PROMPT)
    given = {"cad_context": "Be kind."} if kept else {}
    length = len(encode(slice_dir, LONG.strip() + (PROMPT.removeprefix("Be kind.") if kept else " ")))
    room = MAX_MODEL_LEN - length
    ask = functools.partial(prepared, slice_dir, tokens, cad_negative=LONG, given=given)
    assert ask(asked={"max_tokens": room}).max_tokens == room
    says = rf"cad_negative makes a prompt of {length} tokens, which with max_tokens={room + 1} is more than "
    says += (
        rf"max_model_len={MAX_MODEL_LEN}; allowed: max_tokens and min_tokens up to {room}\. Lower them, or sh"
    )
    with pytest.raises(VLLMValidationError, match=says):
        ask(asked={"max_tokens": room + 1})
    with pytest.raises(VLLMValidationError, match=f"min_tokens up to {room}"):
        ask(asked={"max_tokens": MAX_MODEL_LEN - len(tokens), "min_tokens": room + 1})
    with pytest.raises(
        VLLMValidationError, match=r"max_tokens and min_tokens up to 0\. Lower them, or shorten"
    ):
        prepared(slice_dir, tokens, cad_negative=LONG * 2, asked={"max_tokens": MAX_MODEL_LEN}, given=given)


def test_what_does_not_go_with_pairs(slice_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = encode(slice_dir, PROMPT)
    ask = functools.partial(prepared, slice_dir, tokens, cad_negative="A poem:")
    with pytest.raises(VLLMValidationError, match="prompt_logprobs do not go with a rule that reads another"):
        ask(asked={"prompt_logprobs": 1})
    with pytest.raises(VLLMValidationError, match="streamed input do not go"):
        ask(resumable=True)
    own = config_of(slice_dir)
    model = {
        name: getattr(own.model_config, name)
        for name in (
            "tokenizer",
            "tokenizer_revision",
            "tokenizer_mode",
            "trust_remote_code",
            "max_model_len",
        )
    }

    def other(**changed: Any) -> Any:
        values = {**model, "is_encoder_decoder": False, "get_vocab_size": lambda: 4096, **changed}
        return SimpleNamespace(
            additional_config=own.additional_config, model_config=SimpleNamespace(**values)
        )

    with pytest.raises(VLLMValidationError, match="encoder-decoder models do not go"):
        ask(config=other(is_encoder_decoder=True))
    shm = other(multimodal_config=SimpleNamespace(mm_processor_cache_type="shm"))
    with pytest.raises(VLLMValidationError, match="out of --mm-processor-cache-type shm do not go"):
        ask(features=[feature(2, 2)], config=shm)
    assert ask(config=shm).extra_args  # text alone
    monkeypatch.setattr(ModelVocabulary, "encode", lambda self, text, special=False: [5, 4096])
    with pytest.raises(
        VLLMValidationError, match=r"cad_negative has token 4096, .*; allowed: below 4096\. Leave"
    ):
        ask()


IMAGE = 12  # a special token


def test_images_move_with_the_text_before_them(slice_dir: str) -> None:
    """And what their tokens say is no text: a part of the prompt may go on behind an image, which stays."""
    before, between, behind = (encode(slice_dir, text) for text in ("Be kind. Look:", " A dog.", " And?"))
    for image in ([IMAGE] * 4, encode(slice_dir, "\n A\n cat\n")[:4]):
        tokens = [*before, *image, *between, *image, *behind]
        first, then = len(before), len(before) + 4 + len(between)
        mask = torch.tensor([True, False, True, True])
        features = [feature(first, 4, "cat", mask), feature(then, 4, "cat", mask)]
        for context, negative, left in (
            ("Be kind.", "", (" Look:", " A dog.", " And?")),
            ("Be kind.", "Do be rude!", ("Do be rude! Look:", " A dog.", " And?")),
            ("A dog.", "A hundred dogs.", ("Be kind. Look:", " A hundred dogs.", " And?")),
            ("Look: A dog. And", "See: A", ("Be kind. See: A", "", "?")),
            ("cat", "dog", None),
        ):
            ask = functools.partial(
                prepared, slice_dir, tokens, features, cad_context=context, cad_negative=negative
            )
            if left is None:
                with pytest.raises(VLLMValidationError, match="cad_context='cat' is not in the prompt"):
                    ask()
                continue
            extra_args = ask().extra_args
            assert extra_args is not None
            found, offsets = extra_args[paired_requests.PROMPT]
            parts = [encode(slice_dir, text) for text in left]
            assert found == [*parts[0], *image, *parts[1], *image, *parts[2]]
            assert offsets == [len(parts[0]), len(parts[0]) + 4 + len(parts[1])]
            moved = paired_requests.features_of(features, offsets)
            for its, own, offset in zip(moved, features, offsets, strict=True):
                assert (its.mm_position.offset, its.mm_position.length) == (offset, 4)
                assert its.mm_position.is_embed is own.mm_position.is_embed
                assert (its.data, its.identifier, its.mm_hash) == (own.data, own.identifier, own.mm_hash)
            assert [each.mm_position.offset for each in features] == [
                first,
                then,
            ]  # the primary's are its own


def test_a_negative_prompt_alone_has_no_images(slice_dir: str) -> None:
    tokens = [*encode(slice_dir, "See:"), *[IMAGE] * 4, *encode(slice_dir, " And?")]
    image = feature(len(tokens) - len(encode(slice_dir, " And?")) - 4, 4)
    for negative in ("A poem:", ""):
        extra_args = prepared(slice_dir, tokens, [image], cad_negative=negative).extra_args
        assert extra_args is not None
        assert extra_args[paired_requests.PROMPT][1] == [-1]
        assert paired_requests.features_of([image], [-1]) == []


def test_tokens_above_the_vocabulary_that_stand_for_images(slice_dir: str) -> None:
    tokens = [*encode(slice_dir, "Be kind. See:"), *[9999] * 4, *encode(slice_dir, " And?")]
    extra_args = prepared(
        slice_dir, tokens, [feature(tokens.index(9999), 4)], cad_context="Be kind."
    ).extra_args
    assert extra_args is not None
    assert extra_args[paired_requests.PROMPT][0].count(9999) == 4


def test_prompts_that_end_with_an_image(slice_dir: str) -> None:
    text = encode(slice_dir, "Be kind. See:")
    image = feature(len(text), 4)
    for more, given in (
        ([], {"cad_context": "Be kind."}),
        ([], {"cad_negative": "A poem:"}),
        ([], {"cad_negative": ""}),
        (encode(slice_dir, " And?"), {"cad_context": "And?"}),
    ):
        with pytest.raises(
            VLLMValidationError, match=r"does not go with a prompt that ends with an image; put t"
        ):
            prepared(slice_dir, [*text, *[IMAGE] * 4, *more], [image], given=given)


def test_parts_of_images_are_refused() -> None:
    pair = PairedPrompt([5, 6, 7, 8], [0, 1, -1, -1, 2, 3], "field")
    for place, length in ((1, 2), (0, 3), (3, 2), (1, 4)):
        with pytest.raises(ValueError, match="field would leave a part of an image in the other prompt"):
            paired_requests.offsets_of([PlaceholderRange(place, length)], pair)
    places = [PlaceholderRange(0, 2), PlaceholderRange(2, 2), PlaceholderRange(4, 1)]
    assert paired_requests.offsets_of(places, pair) == [0, -1, 2]
