# SPDX-License-Identifier: Apache-2.0
"""Pairs with images, as vLLM's front process makes them and its scheduler has them: encoded once for both."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import tiny_idefics
from negative_prompts import CASES, PAGE, image
from paired_engine import BLOCK, Engine
from tiny_idefics import IMAGE
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine import FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request, RequestStatus

from vllm_ext.engine import paired_requests

LENGTH = 9  # of an image, in tokens


@functools.cache
def config_of(model: str) -> Any:
    return EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        block_size=BLOCK,
        additional_config={"vllm_ext": {"rules": {"cad": {}, "adadec": {}}}},
    ).create_engine_config()


@pytest.fixture(scope="module")
def seeing_dir(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_idefics.write(slice_dir, tmp_path_factory.mktemp("seeing"))


class Seeing(Engine):
    """An engine whose worker looks at what is in its encoder cache, as vLLM's does when it needs an image."""

    def __init__(self, model: str, num_blocks: int, seed: int, room: int, monkeypatch: Any) -> None:
        monkeypatch.setattr("paired_engine.config_of", lambda *_: config_of(model))
        super().__init__(model, num_blocks, "fcfs", seed)
        self.scheduler.encoder_cache_manager = EncoderCacheManager(room)
        self.encoded: set[str] = set()
        self.num_encoded = 0
        schedule = self.scheduler.schedule

        def watched() -> Any:
            step = schedule()
            self.encoded.difference_update(step.free_encoder_mm_hashes)
            requests = self.scheduler.requests
            for name, indices in step.scheduled_encoder_inputs.items():
                self.encoded.update(requests[name].mm_features[index].identifier for index in indices)
                self.num_encoded += len(indices)
            for name, count in step.num_scheduled_tokens.items():
                end = requests[name].num_computed_tokens  # the step's tokens count already
                for each in requests[name].mm_features:
                    first, last = each.mm_position.offset, each.mm_position.offset + each.mm_position.length
                    assert last <= end - count or first >= end or each.identifier in self.encoded
            return step

        self.scheduler.schedule = watched

    def look(
        self, name: str, prompt: int, images: dict[int, str], moved: list[int], rest: int, most: int
    ) -> None:
        """A request with images at some places, which its pair has at others; -1: it does not have it."""
        features = [
            MultiModalFeatureSpec(None, "image", image, PlaceholderRange(place, LENGTH), image)
            for place, image in images.items()
        ]
        given = {paired_requests.PROMPT: [[2] * rest, moved]}
        params = SamplingParams(max_tokens=most, ignore_eos=True, extra_args=given)
        request = Request(name, [1] * prompt, params, None, mm_features=features, block_hasher=self._hasher)
        self.answers[name] = []
        self.scheduler.add_request(request)
        pair = self.scheduler.requests[f"{name}-pair"]
        assert [each.mm_position.offset for each in pair.mm_features] == [each for each in moved if each >= 0]


@pytest.mark.parametrize("num_blocks", [17, 40])
def test_images_are_there_when_they_are_read(
    seeing_dir: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In encoder caches with room for one or few, in a KV cache with room for one pair or few."""
    for seed in range(12):
        chance = random.Random(seed)
        engine = Seeing(seeing_dir, num_blocks, seed, LENGTH * chance.choice([1, 2, 8]), monkeypatch)
        free, wanted, aborted = engine.num_free_blocks, {}, set()
        for index in range(16):
            name, place, moved, images = f"{index}", chance.randint(0, 20), 0, {}
            shift, its = chance.randint(-5, 20), []
            for _ in range(chance.randint(0, 2)):
                images[place] = f"image {chance.randint(0, 3)}"
                moved = max(place + shift, moved)
                its.append(-1 if chance.random() < 0.2 else moved)
                moved += LENGTH + 1
                place += LENGTH + chance.randint(0, 20)
            wanted[name] = chance.randint(1, 40)
            engine.look(
                name, place + chance.randint(1, 9), images, its, moved + chance.randint(1, 9), wanted[name]
            )
            for _ in range(chance.choice([0, 0, 1, 9])):
                engine.step()
            if chance.random() < 0.15 and name not in engine.reasons:
                engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                aborted.add(name)
        engine.finish()
        for name, count in wanted.items():
            assert len(engine.answers[name]) == count or name in aborted
        assert engine.num_free_blocks == free
        assert not engine.scheduler.requests
        manager = engine.scheduler.encoder_cache_manager
        assert manager.num_freeable_slots == manager.cache_size
        assert not any(manager.cached.values())


def test_an_image_is_encoded_once_for_both(seeing_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Seeing(seeing_dir, 40, 0, 8 * LENGTH, monkeypatch)
    engine.look("a", 60, {3: "x", 40: "y"}, [23, 60], 80, 10)
    engine.finish()
    assert engine.reasons == {"a": FinishReason.LENGTH}
    assert engine.num_encoded == 2


def test_blocks_of_other_images_are_not_shared(seeing_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Seeing(seeing_dir, 40, 0, 8 * LENGTH, monkeypatch)
    for name, what in (("a", "x"), ("b", "y"), ("c", "x")):
        engine.look(name, 40, {3: what}, [7], 44, 10)
    hashes = {name: each.block_hashes[0] for name, each in engine.scheduler.requests.items()}
    assert hashes["a"] == hashes["c"] != hashes["b"]
    assert hashes["a-pair"] == hashes["c-pair"] != hashes["b-pair"]
    engine.finish()


def test_the_front_process_makes_the_other_prompt(seeing_dir: str) -> None:
    """By vLLM's own processing of prompts and images: tokens and places are those of the other prompt as a request."""
    processor = InputProcessor(config_of(seeing_dir))

    def taken(prompt: str, seeds: list[int], given: dict[str, Any] | None = None) -> Any:
        inputs: Any = {"prompt": prompt}
        if seeds:
            inputs["multi_modal_data"] = {"image": list(map(image, seeds))}
        params = SamplingParams(max_tokens=5, extra_args=given)
        return processor.process_inputs("a", inputs, params, ("generate",))

    for prompt, seeds, given, other in CASES:
        own, alone = taken(prompt, seeds, given), taken(other, seeds if IMAGE in other else [])
        tokens, offsets = own.sampling_params.extra_args[paired_requests.PROMPT]
        assert tokens == list(alone.prompt_token_ids), given
        assert [each.identifier for each in own.mm_features or ()] == [
            each.identifier for each in taken(prompt, seeds).mm_features or ()
        ]
        found = paired_requests.features_of(own.mm_features or [], offsets)
        for its, expected in zip(found, alone.mm_features or [], strict=True):
            assert its.identifier == expected.identifier
            place, wanted = its.mm_position, expected.mm_position
            assert (place.offset, place.length) == (wanted.offset, wanted.length)
            assert place.is_embed.tolist() == wanted.is_embed.tolist()
    with pytest.raises(
        VLLMValidationError, match="cad_negative does not go with a prompt that ends with an image"
    ):
        taken(f"What is this? {IMAGE}", [1], {"cad_negative": "A"})
    with pytest.raises(VLLMValidationError, match="cad_context='The village' is not in the prompt"):
        taken(PAGE, [1, 2], {"cad_context": "The village", "cad_negative": "A"})
    with pytest.raises(
        VLLMValidationError, match=r"cad_negative makes a prompt of .* more than max_model_len=256"
    ):
        taken(PAGE, [1, 2], {"cad_context": "The town is old.", "cad_negative": "An old town. " * 70})
    for given in (
        {"cad_negative": f"{IMAGE} A"},
        {"cad_context": "The town", "cad_negative": f"{IMAGE} A town"},
    ):
        with pytest.raises(
            VLLMValidationError, match=r"cad_negative has token 3, which stands for an image, audio"
        ):
            taken(PAGE, [1, 2], given)
