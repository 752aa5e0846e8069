# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads for tests: of random weights; and for a target whose tokens have one successor each, that know it.

Relatives of EAGLE-3 too, which are these with something more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_heads import VOCAB, WIDTH, head_of


def write(
    folder: Path, target: Path, tensors: dict[str, torch.Tensor], layers: list[int], **config: Any
) -> str:
    """A checkpoint in the published layout.

    Args:
        folder: made if it is not there.
        target: whose shape it has.
        tensors: by the names of the layout.
        layers: after how many of the target's it reads.
        config: what else is in its config, or other than the target's.
    """
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True, parents=True)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    of_target = json.loads((target / "config.json").read_text())
    made = {
        **of_target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(tensors.get("lm_head.weight", ())),
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
        **config,
    }
    (folder / "config.json").write_text(json.dumps(made))
    return str(folder)


FALCON, FSPAD = "FalconLlamaForCausalLMEagle3", "FspadLlamaForCausalLMEagle3"
CHIMERA = "ChimeraLlamaForCausalLMEagle3"


def of(architecture: str) -> dict[str, Any]:
    """What a relative's config has more."""
    return {"falcon_block": 2} if architecture == FALCON else {}


def random(folder: Path, target: Path, num_rows: int | None = None, architecture: str | None = None) -> str:
    """A head that turns the target's last hidden state at random, on its own language head or some rows of it."""
    from safetensors.torch import load_file

    stored = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    head = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
    width, inner = config["hidden_size"], config["intermediate_size"]
    of_head = config.get("head_dim") or width // config["num_attention_heads"]
    q, kv = (config[f"num_{kind}_heads"] * of_head for kind in ("attention", "key_value"))
    draw = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (0.3 * torch.randn(rows, columns, generator=draw) / math.sqrt(columns)).to(head)

    tensors = {
        "fc.weight": weight(width, 2 * width) + torch.eye(width, 2 * width, dtype=head.dtype).roll(width, 1),
        "midlayer.self_attn.q_proj.weight": weight(q, 2 * width),
        "midlayer.self_attn.k_proj.weight": weight(kv, 2 * width),
        "midlayer.self_attn.v_proj.weight": weight(kv, 2 * width),
        "midlayer.self_attn.o_proj.weight": weight(width, q),
        "midlayer.mlp.gate_proj.weight": weight(inner, width),
        "midlayer.mlp.up_proj.weight": weight(inner, width),
        "midlayer.mlp.down_proj.weight": weight(width, inner),
        "lm_head.weight": head.clone(),
        **{
            f"{norm}.weight": torch.ones(width, dtype=head.dtype)
            for norm in (
                *("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"),
                "norm",
            )
        },
    }
    tensors["norm.weight"] = stored["model.norm.weight"]
    if num_rows is not None:
        chosen = torch.arange(num_rows) * (len(head) // num_rows)
        tensors["lm_head.weight"] = head[chosen]
        tensors["d2t"] = chosen - torch.arange(num_rows)
    last = config["num_hidden_layers"]
    if architecture == FSPAD:
        tensors |= {
            "midlayer.mlp.down_proj.weight": weight(2 * width, inner),
            "sampling.fc.weight": weight(width, 2 * width)
            + torch.eye(width, 2 * width, dtype=head.dtype).roll(width, 1),
            "sampling.norm.weight": torch.ones(width, dtype=head.dtype),
            "sampling.gate.weight": weight(inner, width),
            "sampling.up.weight": weight(inner, width),
            "sampling.down.weight": weight(width, inner),
        }
    if architecture == CHIMERA:
        tensors |= {
            "trigram.block.weight": weight(3 * width, 3 * width),
            "trigram.down.weight": weight(width, 3 * width),
        }
    named = {} if architecture is None else {"architectures": [architecture], **of(architecture)}
    return write(folder, target, tensors, [0, last], **named)


def knowing(
    folder: Path,
    target: Path,
    after: torch.Tensor,
    by: str = "token",
    late: int = 0,
    naming: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = head_of,
) -> str:
    """A head that knows the successors, or as many tokens too late.

    Args:
        folder: of the head.
        target: of `tiny_heads.successors`.
        after: its successors.
        by: 'token': by its tokens, at all depths, as each row attends to its own token alone; 'feature': by what it
            takes of the target, which it gets below the last token only; 'sampling': by tokens again, and these only
            by FSPAD's feature sampling; 'blocks': as 'token', two tokens further on, as Falcon's blocks of two ask;
            'trigram': as 'token', by the first of Chimera's three tokens.
        late: how many tokens.
        naming: `head_of`, or `second_choice`.
    """
    from safetensors.torch import load_file

    embeddings = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    one, none = torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)
    by_token = by in ("token", "blocks", "trigram")
    further = {"feature": 2, "blocks": 2, "trigram": 3}.get(by, 1)
    # Embeddings come normed, so that a token's product with itself is WIDTH, and that with any other far less.
    own = torch.cat([2.0 * one, none], 1)
    tensors = {
        "fc.weight": none if by_token else one,
        "midlayer.self_attn.q_proj.weight": own,
        "midlayer.self_attn.k_proj.weight": own,
        "midlayer.self_attn.v_proj.weight": torch.cat([one, none], 1),
        "midlayer.self_attn.o_proj.weight": one if by_token else none,
        "midlayer.mlp.gate_proj.weight": torch.zeros(64, WIDTH),
        "midlayer.mlp.up_proj.weight": torch.zeros(64, WIDTH),
        "midlayer.mlp.down_proj.weight": torch.zeros(WIDTH, 64),
        "lm_head.weight": naming(embeddings, after, further + late),
        **{
            f"{norm}.weight": torch.ones(WIDTH)
            for norm in (
                *("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"),
                "norm",
            )
        },
    }
    if by_token:  # else the parent's output would be added to the token's own
        tensors["midlayer.hidden_norm.weight"] = torch.zeros(WIDTH)
    assert len(embeddings) == VOCAB
    shape: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": WIDTH}
    if by == "blocks":
        shape |= {"architectures": [FALCON], **of(FALCON)}
    if by == "trigram":
        shape["architectures"] = [CHIMERA]
        tensors |= {
            "trigram.block.weight": torch.zeros(3 * WIDTH, 3 * WIDTH),
            "trigram.down.weight": torch.cat([one, none, none], 1),
        }
    if by == "sampling":
        shape["architectures"] = [FSPAD]
        tensors |= {
            "fc.weight": none,
            "midlayer.mlp.down_proj.weight": torch.zeros(2 * WIDTH, 64),
            "sampling.fc.weight": torch.cat([one, none], 1),
            "sampling.norm.weight": torch.ones(WIDTH),
            "sampling.gate.weight": torch.zeros(64, WIDTH),
            "sampling.up.weight": torch.zeros(64, WIDTH),
            "sampling.down.weight": torch.zeros(WIDTH, 64),
        }
    return write(folder, target, tensors, [1], norm_before_residual=by_token, **shape)


def first(folder: Path, target: Path) -> str:
    """A checkpoint of the first EAGLE that knows the successors by its tokens, with the target's language head."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    none = torch.zeros(WIDTH, WIDTH)
    tensors = {
        # Sure of itself: nothing is normed here.
        "fc.weight": 12.0 * torch.eye(WIDTH, 2 * WIDTH),
        **{f"layers.0.self_attn.{name}.weight": none for name in names},
        "layers.0.mlp.gate_proj.weight": torch.zeros(64, WIDTH),
        "layers.0.mlp.up_proj.weight": torch.zeros(64, WIDTH),
        "layers.0.mlp.down_proj.weight": torch.zeros(WIDTH, 64),
        "layers.0.post_attention_layernorm.weight": torch.ones(WIDTH),
    }
    made = Path(write(folder, target, tensors, [], architectures=["LlamaForCausalLM"]))
    config = json.loads((made / "config.json").read_text())
    del config["eagle_config"], config["draft_vocab_size"]
    (made / "config.json").write_text(json.dumps(config))
    return str(made)
