# SPDX-License-Identifier: Apache-2.0
"""The head of EAGLE-3 in training: one layer of attention that reads the target's features and its own.

Row ``i`` takes the embedding of token ``i + 1`` and the target's feature of token ``i``, and says what token ``i + 2``
is. Where the target has no feature yet, the row takes what the row before it put out. Names and order of computation
are those of ``LlamaForCausalLMEagle3``, so that what is saved is what vLLM serves.

Source: EAGLE-3, arXiv 2503.01840, sections 3.1 and 3.2, and the layout of its published heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.functional import dropout, rms_norm, silu, smooth_l1_loss

from vllm_ext.kernels.sparse import Int32
from vllm_ext.training.eagle_texts import Batch, EagleTexts
from vllm_ext.training.medusa import CONFIG, WEIGHTS

INITIAL = 0.02  # standard deviation of weights before training
DROPPED = 0.1  # of what is read, in training: answers are few


@dataclass(frozen=True)
class EagleShape:
    """How large the head is, and what it reads."""

    aux_layers: Sequence[int]  # the target's hidden states after so many of its layers
    num_rows: int = 8192  # of the language head, at most
    intermediate_size: int = 0  # of the layer's MLP; 0: the target's


def default_layers(num_layers: int) -> tuple[int, ...]:
    """What vLLM's targets hand out unless a head asks for others: an early, a middle and a late layer."""
    return 2, num_layers // 2, num_layers - 3


def config_of(
    architecture: str, target: Any, shape: EagleShape, num_rows: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The head's ``config.json``.

    Args:
        architecture: the class that serves it.
        target: its text configuration, of transformers.
        shape: of the head.
        num_rows: of its language head.
        dtype: that it is served in.
    """
    heads = target.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    if "rope_theta" not in rope:  # one for each kind of layer
        rope = next((each for each in rope.values() if isinstance(each, dict)), {})
    rope = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    rope.pop("partial_rotary_factor", None)
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size or target.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-5),
        "rope_parameters": rope,
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": num_rows,
        # vLLM's V1 runner looks in both places, its V2 runner in the first alone.
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        },
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


class Norm(torch.nn.Module):
    """Root mean square normalisation of the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows.float(), self.weight.shape, self.weight, self._eps)


def linear(inputs: int, outputs: int) -> torch.nn.Linear:
    """One without a bias."""
    return torch.nn.Linear(inputs, outputs, bias=False)


class Goal(NamedTuple):
    """What a head should hand on."""

    features: torch.Tensor  # [num_queries, hidden_size]
    known: torch.Tensor  # bool [num_queries]


class Head(torch.nn.Module):
    """The head, float32, by the names of the published layout.

    Its attention is not here: what a row may attend to differs between training and growth. Both ask for
    `modulated`, `inputs`, `queries` and `keys_values`, attend, and ask for `output`.

    Args:
        config: of `config_of`.
        embedding: ``[vocab_size, hidden_size]`` the target's, which is neither trained nor saved.
        token_map: int32 ``[num_rows]`` ids of the tokens that the head can say, ascending.
    """

    architecture: ClassVar[str] = "LlamaForCausalLMEagle3"
    aligned: ClassVar[float] = (
        0.0  # weight of handing on other features than the target's; cross-entropy has 1
    )
    block = 1  # rows of which each says what comes so many tokens behind its own
    num_read = 1  # tokens that a row reads: the one after its own, and those before that
    spent = 0.0  # of training, the share
    midlayer: Any
    d2t: torch.Tensor
    t2d: torch.Tensor
    embedding: torch.Tensor

    def __init__(self, config: dict[str, Any], embedding: torch.Tensor, token_map: Int32) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = config
        size, eps, inner = config["hidden_size"], config["rms_norm_eps"], config["intermediate_size"]
        self.head_dim = config["head_dim"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.fc = linear(size * len(config["eagle_aux_hidden_state_layer_ids"]), size)
        layer = torch.nn.Module()
        layer.input_layernorm, layer.hidden_norm = Norm(size, eps), Norm(size, eps)
        layer.post_attention_layernorm = Norm(size, eps)
        layer.self_attn = torch.nn.ModuleDict(
            {
                "q_proj": linear(2 * size, wide),
                "k_proj": linear(2 * size, narrow),
                "v_proj": linear(2 * size, narrow),
                "o_proj": linear(wide, size),
            }
        )
        layer.mlp = torch.nn.ModuleDict(
            {
                "gate_proj": linear(size, inner),
                "up_proj": linear(size, inner),
                "down_proj": linear(inner, size),
            }
        )
        self.midlayer = layer
        self.norm = Norm(size, eps)
        self.lm_head = linear(size, len(token_map))
        ids = torch.from_numpy(token_map).long()
        known = torch.zeros(config["vocab_size"], dtype=torch.bool)
        known[ids] = True
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", known)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**config))

    @property
    def token_map(self) -> torch.Tensor:
        """int64 ``[num_rows]`` ids of the tokens that the head can say."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[num_rows, 1, head_dim]`` of int64 ``[num_rows]`` positions."""
        cos, sin = self.rotary(self.embedding.new_zeros((1,), dtype=torch.float32), positions[None])
        return cos[0, :, None], sin[0, :, None]

    def features(self, aux: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` of the target's hidden states ``[num_rows, num_layers * hidden_size]``."""
        found: torch.Tensor = self.fc(dropout(aux.float(), DROPPED, self.training))
        return found

    def embeds(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normed ``[num_rows, hidden_size]`` of int64 ``[num_rows]`` tokens, or ``[num_rows, num_read]``."""
        return self.normed(self.embedding[tokens].float().flatten(1))

    def normed(self, embeds: torch.Tensor) -> torch.Tensor:
        """What the layer reads of embeddings ``[num_rows, num_read * hidden_size]``, the oldest token's first."""
        found: torch.Tensor = self.midlayer.input_layernorm(embeds)
        return found

    def modulated(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What the layer reads of features whose next token is known.

        Args:
            tokens: int64 ``[num_rows, num_read]``, the token after each row's last.
            features: ``[num_rows, hidden_size]`` the target's, or what the row before handed on.

        Returns:
            likewise.
        """
        return features

    def inputs(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What attention's projections get.

        Args:
            tokens: int64 ``[num_rows, num_read]``, the token after each row's last.
            features: ``[num_rows, hidden_size]`` of `modulated`.

        Returns:
            ``[num_rows, 2 * hidden_size]``.
        """
        read = torch.cat([self.embeds(tokens), self.midlayer.hidden_norm(features)], 1)
        return dropout(read, DROPPED, self.training)

    def queries(self, inputs: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``[num_rows, num_heads, head_dim]``."""
        return _turned(self.midlayer.self_attn.q_proj(inputs).unflatten(1, (-1, self.head_dim)), turns)

    def keys_values(
        self, inputs: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Twice ``[num_rows, num_kv_heads, head_dim]``."""
        attention = self.midlayer.self_attn
        keys = attention.k_proj(inputs).unflatten(1, (-1, self.head_dim))
        return _turned(keys, turns), attention.v_proj(inputs).unflatten(1, (-1, self.head_dim))

    def output(self, features: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What rows put out.

        Args:
            features: ``[num_rows, hidden_size]`` of `modulated`.
            attended: ``[num_rows, num_heads * head_dim]``.

        Returns:
            ``[num_rows, size]`` for `logits` and `handed_on`.
        """
        rows = features + self.midlayer.self_attn.o_proj(dropout(attended, DROPPED, self.training))
        inner = self.midlayer.post_attention_layernorm(rows)
        mlp = self.midlayer.mlp
        added: torch.Tensor = mlp.down_proj(silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        found: torch.Tensor = rows.repeat(1, added.shape[1] // rows.shape[1]) + added
        return found

    def handed_on(self, output: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` what the rows behind get as features, before any norm."""
        return output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """float32 ``[num_tokens, num_rows]`` over `token_map`."""
        found: torch.Tensor = self.lm_head(self.norm(output)).float()
        return found

    def glanced(self, features: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """What rows get in training of what was handed on; ``truth`` is what the target would have."""
        return features

    @torch.no_grad()
    def goal(self, texts: EagleTexts, batch: Batch) -> Goal:
        """The target's features of the rows behind the batch's queries, unless the answer ends."""
        behind = batch.rows[batch.queries] + 1
        known = ~torch.isin(behind, texts.starts)
        behind = torch.where(known, behind, 0)
        return Goal(self.fc(texts.aux[behind].to(self.fc.weight)), known)

    def misaligned(self, output: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The loss of rows that should hand on these features, relative to their size."""
        scale = features.float().square().mean(1, keepdim=True).rsqrt()
        return self.aligned * smooth_l1_loss(self.handed_on(output).float() * scale, features.float() * scale)

    def begin_as(self, layer: torch.nn.Module) -> None:
        """Let the head be a layer of the target's over the last of the features, as far as it has the same parts.

        From few answers it learns twice as fast as from random weights.
        """
        size = self.lm_head.weight.shape[1]
        theirs: dict[str, torch.Tensor] = dict(layer.named_parameters())
        theirs["hidden_norm.weight"] = theirs.pop("input_layernorm.weight", torch.empty(0))
        for name, own in self.midlayer.named_parameters():
            # Attention's inputs are embeddings and features, and its layer read no embeddings.
            part = own[:, size:] if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else own
            if name in theirs and part.shape == theirs[name].shape:
                part.copy_(theirs[name])
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -size:] += torch.eye(size, device=self.fc.weight.device)


def _turned(rows: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = turns
    low, high = rows.chunk(2, -1)
    return rows * cos + torch.cat([-high, low], -1) * sin


@torch.no_grad()
def begun(
    target: Any,
    shape: EagleShape,
    frequent: Callable[[int, int], Int32],
    dtype: torch.dtype,
    kind: type[Head] = Head,
) -> Head:
    """A head to train. Its norm begins as the target's, and its language head stays the target's.

    To train the language head as well takes a third more time a step: in about the time that left a cross-entropy of
    2.31 on other answers of SmolLM2-135M, it came to 2.41.

    Args:
        target: a causal model of transformers.
        shape: of the head.
        frequent: of the size of a vocabulary and a number of rows, the tokens that the head can say.
        dtype: that it is served in.
        kind: EAGLE-3's, or a relative.
    """
    config = target.config.get_text_config()
    token_map = frequent(config.vocab_size, shape.num_rows)
    embedding = target.get_input_embeddings().weight
    own = config_of(kind.architecture, config, shape, len(token_map), dtype)
    head = kind(own, embedding, token_map).to(embedding.device)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=INITIAL)
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.token_map])
    head.lm_head.weight.requires_grad_(False)
    head.norm.weight.copy_(target.model.norm.weight)
    head.begin_as(target.model.layers[-1])
    return head


def save(head: Head, folder: Path) -> None:
    """Write a checkpoint in the published layout, in the configuration's dtype."""
    from safetensors.torch import save_file

    dtype = getattr(torch, head.config["torch_dtype"])
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(head.config, indent=2) + "\n")
