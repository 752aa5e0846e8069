# SPDX-License-Identifier: Apache-2.0
"""A served draft model's weights by the names of its checkpoint, so that others can be copied into their places.

vLLM joins matrices (q, k and v are one), and on CPUs packs them for their products. Each name's place is found by the
model's ``packed_modules_mapping`` and then proved: the checkpoint's own weights must be there, bit for bit. Copies are
made in place, so that compiled code and CUDA graphs read the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ext.kernels.linear import pack
from vllm_ext.kernels.linear8 import Packed, pack8

# Stay as they are: most of a small draft's weights, and right from the start.
FROZEN = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Place:
    """Where some tensors of the checkpoint lie, joined along their first dimension."""

    names: Sequence[str]  # of the checkpoint
    shapes: Sequence[torch.Size]
    into: Sequence[torch.Tensor]  # what is copied into
    dtype: torch.dtype
    packed_by: Callable[[torch.Tensor], Sequence[torch.Tensor]]  # the joined weights as `into` has them


# The joined weights and where each of them goes.
Prepared = list[tuple[torch.Tensor, torch.Tensor]]


class DraftWeights:
    """The places of all weights but `FROZEN` ones.

    Args:
        model: vLLM's, loaded; linear layers that vLLM has packed its own way multiply by plain weights from here on.
        folder: of its checkpoint.
        dtype: that the model runs in.
        what: how errors name the model.

    Raises:
        ValueError: a weight of the checkpoint is not found in the model as it is.
    """

    def __init__(self, model: Any, folder: Path, dtype: torch.dtype, what: str) -> None:
        self._what = what
        own = _checkpoint(folder)
        joined = {
            part: (whole, place)
            for whole, parts in getattr(model, "packed_modules_mapping", {}).items()
            for place, part in enumerate(parts)
        }
        groups: dict[str, dict[int, str]] = {}
        for name in own:
            path = name.split(".")
            whole, place = next(((whole, joined[whole]) for whole in path if whole in joined), ("", ("", 0)))
            of_model = ".".join(place[0] if part == whole else part for part in path)
            groups.setdefault(of_model, {})[place[1]] = name
        self.places = [
            self._place(model, of_model, [parts[i] for i in sorted(parts)], own, dtype)
            for of_model, parts in groups.items()
        ]

    def _place(
        self, model: Any, of_model: str, names: list[str], own: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> Place:
        path, _, attribute = of_model.rpartition(".")
        try:
            module = model.get_submodule(path)
            there: torch.Tensor = module.get_parameter(attribute)
        except AttributeError:
            raise ValueError(self._problem(f"it has no {of_model}")) from None
        value = torch.cat([own[name] for name in names]).to(dtype)
        packed: Sequence[torch.Tensor] = getattr(module, "packed", ())
        packed_by: Callable[[torch.Tensor], Sequence[torch.Tensor]] = _plain
        into: Sequence[torch.Tensor] = (there,)
        if attribute == "weight" and not there.numel():
            if packed:
                into, packed_by = packed, pack8 if isinstance(packed, Packed) else _packed16
            else:
                into = (_unpacked(module, value),)
        expected = packed_by(value)
        if any(
            a.shape != b.shape or not torch.equal(a, b.to(a)) for a, b in zip(into, expected, strict=True)
        ):
            raise ValueError(self._problem(f"{of_model} is not {' and '.join(names)} of the checkpoint"))
        return Place(names, [own[name].shape for name in names], into, dtype, packed_by)

    def _problem(self, found: str) -> str:
        return (
            f"{self._what}: its weights cannot be replaced while it is served, as {found}. Remove 'online' from "
            "--speculative-config, or choose a draft of another architecture: Llama's are tested."
        )

    @property
    def names(self) -> set[str]:
        """Of the weights that a version must have."""
        return {name for place in self.places for name in place.names}

    def prepare(self, weights: Mapping[str, torch.Tensor]) -> Prepared:
        """All that takes time, so that `apply` copies alone. May run in another thread.

        Args:
            weights: by the checkpoint's names.

        Raises:
            ValueError: other names or shapes, or values that are no numbers.
        """
        if differing := sorted(self.names.symmetric_difference(weights)):
            raise ValueError(f"it has other weights than the draft: {', '.join(differing[:4])}")
        prepared: Prepared = []
        for place in self.places:
            for name, shape in zip(place.names, place.shapes, strict=True):
                if weights[name].shape != shape:
                    raise ValueError(f"{name} is {tuple(weights[name].shape)}, and must be {tuple(shape)}")
            value = torch.cat([weights[name] for name in place.names]).to(place.dtype)
            if not value.isfinite().all():
                raise ValueError(f"{' and '.join(place.names)} have values that are no numbers")
            for old, new in zip(place.into, place.packed_by(value), strict=True):
                prepared.append((old, new.to(old.device)))
        for device in {old.device for old, _ in prepared if old.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()  # `apply` may run on another stream
        return prepared


def apply(prepared: Prepared) -> None:
    """Copy weights of `DraftWeights.prepare` into their places."""
    with torch.no_grad():
        for old, new in prepared:
            old.copy_(new)


def _plain(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    return (weight,)


def _packed16(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    return (pack(weight),)


def _unpacked(module: Any, value: torch.Tensor) -> torch.Tensor:
    """Let a linear layer on a CPU multiply by weights as they are, instead of those that vLLM has packed for oneDNN,
    which nothing can be copied into.
    """
    module.weight = torch.nn.Parameter(value.clone(), requires_grad=False)
    module.cpu_linear = torch.nn.functional.linear
    if getattr(module, "bias", None) is not None:
        module.bias.data = module.bias.data.to(value.dtype)
    weight: torch.Tensor = module.weight
    return weight


def _checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Of a checkpoint all tensors but `FROZEN` ones."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if not any(part in FROZEN for part in name.split("."))
    }
