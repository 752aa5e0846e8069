# SPDX-License-Identifier: Apache-2.0
"""EAGLE and EAGLE-3 heads by vLLM's own classes: whatever its methods ``eagle`` and ``eagle3`` load, loads here.

Relatives of EAGLE-3 have classes of ours, which vLLM without us does not know.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from pydantic import ValidationError
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models import ModelRegistry

from vllm_ext.config.head_files import FALCON_BLOCK
from vllm_ext.data import model_files
from vllm_ext.engine.models import cpu_linear
from vllm_ext.engine.models.second_model import weight_bytes, with_speculation

logger = init_logger("vllm.vllm_ext")

FIELD = "speculative_config.model"
WAY_OUT = "Name a folder that `vllm-ext train heads --kind eagle` has made for this model, or a head published for it."
# Relatives, by the architecture that their config.json names.
RELATIVES = {
    "ChimeraLlamaForCausalLMEagle3": "vllm_ext.engine.models.chimera:ChimeraEagle3",
    "FalconLlamaForCausalLMEagle3": "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM",
    "FspadLlamaForCausalLMEagle3": "vllm_ext.engine.models.fspad:FspadEagle3",
}
FIRST_READ = (
    1  # place of a text's first token that rows read: the one at 0 has no row of which it is the next
)
HINTS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")  # of a config of EAGLE-3


def vllms_config(vllm_config: Any, name: str) -> Any:
    """The target's VllmConfig, with vLLM's own speculation with this head in it, as its classes want it.

    Raises:
        ValueError: the head cannot be read, or is none that vLLM knows.
    """
    target = vllm_config.model_config
    try:
        folder = model_files.snapshot(name)
        config = json.loads((folder / "config.json").read_text())
        architectures = config.get("architectures") or []
        for each in RELATIVES.keys() & architectures:
            ModelRegistry.register_model(each, RELATIVES[each])
        third = any("Eagle3" in each for each in architectures) or any(hint in config for hint in HINTS)
        return with_speculation(
            vllm_config,
            method="eagle3" if third else "eagle",
            model=str(folder),
            num_speculative_tokens=1,
        )
    except (OSError, ValueError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ValueError(
            f"{FIELD}={name!r} cannot be used beside {target.model}: {problem.rstrip('.')}. {WAY_OUT}"
        ) from error


def check(vllm_config: Any, name: str) -> None:
    """Refuse at start-up a head that does not fit the target.

    Raises:
        ValueError: naming what does not, and the way out.
    """
    draft = vllms_config(vllm_config, name).speculative_config.draft_model_config.hf_config
    model = vllm_config.model_config
    text = model.hf_text_config
    if (block := getattr(draft, FALCON_BLOCK, 1)) not in (1, 2):
        raise ValueError(f"{FIELD}={name!r}: its {FALCON_BLOCK} is {block}; it must be 1 or 2. {WAY_OUT}")
    for what, own, its in (
        ("hidden_size", getattr(draft, "target_hidden_size", draft.hidden_size), model.get_hidden_size()),
        ("vocab_size", draft.vocab_size, model.get_vocab_size()),
    ):
        if own != its:
            raise ValueError(f"{FIELD}={name!r}: its {what} is {own}, that of {model.model} {its}. {WAY_OUT}")
    if wrong := [layer for layer in layer_ids(draft) if not 0 <= layer <= text.num_hidden_layers]:
        raise ValueError(
            f"{FIELD}={name!r}: it reads the target after {wrong} layers; {model.model} has "
            f"{text.num_hidden_layers}. {WAY_OUT}"
        )


def layer_ids(draft: Any) -> list[int]:
    """After how many of the target's layers a head reads hidden states, by its config; none: it does not say."""
    of_eagle = getattr(draft, "eagle_config", None) or {}
    found = getattr(draft, "eagle_aux_hidden_state_layer_ids", None)
    return list(found or of_eagle.get("eagle_aux_hidden_state_layer_ids") or [])


class EagleHead:
    """A head beside the target.

    Args:
        vllm_config: the target's.
        name: folder or hub name.
        target: vLLM's model, loaded.
    """

    def __init__(self, vllm_config: Any, name: str, target: Any) -> None:
        from vllm.compilation.backends import set_model_tag
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.model_executor.model_loader import get_model

        self.config = vllms_config(vllm_config, name)
        speculation = self.config.speculative_config
        context = vllm_config.compilation_config.static_forward_context
        before = set(context)
        with (
            set_current_vllm_config(self.config),
            set_model_tag("eagle_head"),
            cpu_linear.drafts(self.config),
        ):
            self.model = get_model(vllm_config=self.config, model_config=speculation.draft_model_config)
        self.attention = [
            layer
            for layer in context
            if layer not in before and isinstance(context[layer], AttentionLayerBase)
        ]
        language = target.get_language_model() if hasattr(target, "get_language_model") else target
        self._share(language)
        # After how many of the target's layers it reads; none: behind the last norm.
        self.layers: list[int] = []
        if speculation.method == "eagle3" and getattr(self.model.model, "use_aux_hidden_state", True):
            default = getattr(target, "get_eagle3_default_aux_hidden_state_layers", lambda: ())
            self.layers = sorted(layer_ids(speculation.draft_model_config.hf_config) or default())
        ids = getattr(self.model, "draft_id_to_target_id", None)
        # int64 [rows of its language head], which tokens they are; None: all, in order.
        self.token_map: torch.Tensor | None = None
        if ids is not None:
            self.token_map = torch.arange(len(ids), device=ids.device) + ids.data
        self.hidden_size: int = speculation.draft_model_config.hf_config.hidden_size
        # Tokens before a row's own that it reads, too; and the width of what rows take and hand on.
        self.num_before: int = getattr(self.model, "num_before", 0)
        self.width = self.hidden_size * (1 + self.num_before)
        logger.info(
            "vllm-ext: %s head %s: %d layers, %.1f MB of weights of its own, reads the target after layers %s; its KV "
            "is counted with the target's",
            speculation.method,
            name,
            len(self.attention),
            self._own_bytes / 1e6,
            self.layers or "all",
        )

    def _share(self, target: Any) -> None:
        """What its checkpoint does not have is the target's."""
        inner: Any = self.model.model
        if not self.model.has_own_embed_tokens:
            inner.embed_tokens = target.model.embed_tokens
        # With a vocabulary of its own it has its own, if only by dummy weights.
        rows = getattr(self.model, "draft_id_to_target_id", None)
        own_config = self.config.speculative_config.draft_model_config.hf_config
        whole = rows is None or len(rows) == own_config.vocab_size
        if not self.model.has_own_lm_head and whole:
            self.model.lm_head = target.lm_head
        shared = {id(parameter) for parameter in target.parameters()}
        self._own_bytes = weight_bytes(self.model) - sum(
            parameter.nbytes for parameter in self.model.parameters() if id(parameter) in shared
        )

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """What rows take of the target's hidden states.

        Args:
            hidden: ``[num_rows, hidden_size]`` behind the last norm, or ``[num_rows, num_layers * hidden_size]``.

        Returns:
            ``[num_rows, hidden_size]`` of the head.
        """
        with torch.inference_mode():
            combined: torch.Tensor = self.model.combine_hidden_states(hidden) if self.layers else hidden
        return combined

    def beside(self, features: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What rows of texts take.

        Args:
            features: ``[num_rows, hidden_size]``.
            before: int ``[num_rows, num_before]`` the tokens before each row's own, the oldest first.

        Returns:
            ``[num_rows, width]``.
        """
        with torch.inference_mode():
            embeds = self.model.embed_input_ids(before.flatten()).view(len(features), -1)
            return torch.cat([features, embeds], 1)

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass, in vLLM's forward context.

        Args:
            tokens: int32 ``[num_rows]``, the tokens behind those that the features are of.
            positions: int64 ``[num_rows]`` of these.
            features: ``[num_rows, width]``.

        Returns:
            ``[num_rows, hidden_size]``, what its language head gets; and ``[num_rows, width]``, what rows below take.
        """
        found: tuple[torch.Tensor, torch.Tensor] = self.model(tokens, positions, features)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, rows of its language head]``."""
        if self.token_map is not None:  # vLLM's would spread them over the whole vocabulary
            found: torch.Tensor = self.model.logits_processor(self.model.lm_head, hidden)
            return found
        found = self.model.compute_logits(hidden)
        return found
