# SPDX-License-Identifier: Apache-2.0
"""Distil a small Llama from the target's own answers.

The loss is the cross-entropy between the target's distribution, its ``top_k`` tokens and the rest as one, and the
draft's. Its minimum is the target's distribution; what draws and verification want, as many ``min(p, q)`` as possible,
grows with it. The embeddings, most of such a model's weights, begin as the target's, projected to the draft's width by
their leading singular vectors. A step compares the tokens that stand in its answers and some drawn from the others,
which stand for all of these: the whole vocabulary would take three quarters of the time.

Or it begins as some of the target's layers, between its embeddings and its norm and head (`from_layers`): larger, and
right from far fewer tokens.

Source: FastDraft, arXiv 2411.11055: a small model with the target's vocabulary, trained on its answers. Deviations: no
pre-training on a corpus, distributions instead of the answers' tokens, the projected embeddings, the
sampled softmax (arXiv 1412.2007, section 3). Layers of the target: as DistilBERT (arXiv 1910.01108, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ext.data.answers import Answer
from vllm_ext.data.atomic_files import Progress
from vllm_ext.kernels.sparse import Int32
from vllm_ext.training.timed import train_for

OTHERS = 4096  # tokens drawn in a step from those that do not stand in its answers


@dataclass(frozen=True)
class Shape:
    """Of the draft: the defaults make 11 million parameters with a vocabulary of 49,152."""

    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 3
    intermediate_size: int = 512


@dataclass(frozen=True)
class Recipe:
    """How it is trained."""

    minutes: float = 25.0  # of training; the learning rate falls to 0 by then
    batch_tokens: int = 2048  # output tokens of a step, about
    learning_rate: float = 3e-3
    max_length: int = 512  # tokens of an answer that are read, the last ones
    held_out: float = 0.05  # of the answers
    checkpoint_seconds: float = 60.0
    seed: int = 0


OF_LAYERS = Recipe(batch_tokens=512, learning_rate=1e-3)  # of a model that begins as layers of the target


@dataclass(frozen=True)
class Estimate:
    """On answers that were held out, by the target's own words up to each token."""

    # Mean over tokens of the sum of min(p, q), tokens outside the target's best left out.
    sampled_acceptance: float
    # Share of tokens where both rank the same first.
    greedy_acceptance: float
    # The same of answers that are greedy themselves, which are easier; nan if there are none.
    on_greedy_answers: float
    # Mean tokens of a greedy step with four drafts in a row, the target's own counted.
    chain_of_4: float


def make_model(target: Path, shape: Shape, device: str) -> Any:
    """A Llama of that shape with the target's vocabulary, its embeddings projected from the target's."""
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    of = AutoConfig.from_pretrained(target)
    config = LlamaConfig(
        vocab_size=of.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=of.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=of.bos_token_id,
        eos_token_id=of.eos_token_id,
        pad_token_id=of.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(device)
    embeddings = _embeddings(target).float()
    if shape.hidden_size < embeddings.shape[1]:
        # The right singular vectors, by the small square matrix.
        _, vectors = torch.linalg.eigh(embeddings.T @ embeddings)
        embeddings = embeddings @ vectors[:, -shape.hidden_size :]
    width = embeddings.shape[1]
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[:, :width] = embeddings.to(weight) * (config.initializer_range / embeddings.std())
    return model


def from_layers(target: Path, layers: Sequence[int], device: str) -> Any:
    """The target with these of its layers alone. Its embeddings, most of the weights, stay as they are.

    Raises:
        ValueError: a layer that it does not have, or a model that is not made of ``model.layers``.
    """
    model = load_model(target, device)
    whole = getattr(getattr(model, "model", None), "layers", None)
    if whole is None:
        raise ValueError(
            f"--layers={list(layers)}: {type(model).__name__} has no model.layers; leave --layers out for a Llama "
            "with a shape of its own"
        )
    if wrong := [layer for layer in layers if not 0 <= layer < len(whole)]:
        raise ValueError(
            f"--layers={list(layers)} is not allowed; {target} has layers 0 to {len(whole) - 1}, and not {wrong}"
        )
    model.model.layers = torch.nn.ModuleList(whole[layer] for layer in layers)
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = len(layers)
    model.config.target_layers = list(layers)
    if kinds := getattr(model.config, "layer_types", None):
        model.config.layer_types = [kinds[layer] for layer in layers]
    return keep_embeddings(model)


def has_embeddings_of(folder: Path, target: Path) -> bool:
    """Whether a draft's embeddings are the target's, as those of layers of the target are."""
    own, its = _embeddings(folder), _embeddings(target)
    return own.shape == its.shape and torch.equal(own, its.to(own))


def keep_embeddings(model: Any) -> Any:
    """The same model, whose embeddings are not trained."""
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def multiplies_bfloat16(device: str) -> bool:
    """Whether products in bfloat16 are faster there than in float32."""
    if device != "cpu":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def load_model(folder: Path, device: str) -> Any:
    """A draft model to train further, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)


def _embeddings(target: Path) -> torch.Tensor:
    from safetensors import safe_open

    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in list(weights.keys()):
                if name.endswith("embed_tokens.weight"):
                    found: torch.Tensor = weights.get_tensor(name)
                    return found
    raise ValueError(
        f"{target} has no safetensors file with embed_tokens.weight; name a local folder that has"
    )


def loss_of(logits: torch.Tensor, top_ids: torch.Tensor, top_logp: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the target's distribution and the draft's.

    Args:
        logits: float32 ``[num_tokens, vocab]`` the draft's.
        top_ids: int64 ``[num_tokens, top_k]``.
        top_logp: float32 ``[num_tokens, top_k]`` the target's; the rest of the vocabulary is one class.
    """
    p = top_logp.exp()
    log_q = logits.gather(1, top_ids) - torch.logsumexp(logits, 1, keepdim=True)
    rest_p = (1.0 - p.sum(1)).clamp(min=0.0)
    rest_q = (1.0 - log_q.exp().sum(1)).clamp(min=1e-6)
    return -((p * log_q).sum(1) + rest_p * rest_q.log()).mean()


def candidates(
    weight: torch.Tensor, hidden: torch.Tensor, top_ids: torch.Tensor, noise: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the tokens that stand in the answers and of `OTHERS` drawn instead of all others.

    Args:
        weight: ``[vocab, hidden_size]`` of the model's head.
        hidden: ``[num_tokens, hidden_size]``.
        top_ids: int64 ``[num_tokens, top_k]``.
        noise: on the CPU.

    Returns:
        float32 ``[num_tokens, num_candidates]``, the others' raised by how many each stands for, so that the sum of
        exponentials has the whole vocabulary's expectation; and ``top_ids`` as places among them.
    """
    own, places = torch.unique(top_ids, return_inverse=True)
    absent = torch.ones(len(weight), dtype=torch.bool)
    absent[own.cpu()] = False
    rest = absent.nonzero()[:, 0]
    drawn = rest[torch.randperm(len(rest), generator=noise)[:OTHERS]].to(own.device)
    logits = (hidden @ weight[torch.cat([own, drawn])].T).float()
    if len(drawn):
        logits[:, len(own) :] += math.log(len(rest) / len(drawn))
    return logits, places


class Batches:
    """Batches of answers of about equal lengths, in an order that the seed and the epoch give.

    They have about as many tokens of output each.
    """

    def __init__(self, answers: Sequence[Answer], recipe: Recipe, device: str) -> None:
        self._answers, self._recipe, self._device = answers, recipe, device
        # By what is read, prompts too: what pads it costs as much.
        order = sorted(range(len(answers)), key=lambda i: len(self._read(answers[i])))
        self.parts: list[list[int]] = [[]]
        size = 0
        for index in order:
            tokens = len(answers[index].top_ids)
            if self.parts[-1] and size + tokens > recipe.batch_tokens:
                self.parts.append([])
                size = 0
            self.parts[-1].append(index)
            size += tokens

    def _read(self, answer: Answer) -> Int32:
        """The tokens that go through the model: the last ones, without that which nothing follows."""
        return answer.tokens[-self._recipe.max_length - 1 : -1]

    def at(self, step: int) -> tuple[torch.Tensor, ...]:
        """Input ids ``[batch, length]``, the mask of what precedes an output token, and its alternatives."""
        epoch, place = divmod(step, len(self.parts))
        order = np.random.default_rng([self._recipe.seed, epoch]).permutation(len(self.parts))
        return self.tensors([self._answers[i] for i in self.parts[order[place]]])

    def tensors(self, answers: Sequence[Answer]) -> tuple[torch.Tensor, ...]:
        """See `at`."""
        kept = [self._read(answer) for answer in answers]
        length = max(map(len, kept))
        ids = np.zeros((len(answers), length), np.int64)
        mask = np.zeros((len(answers), length), bool)
        tops = []
        for row, (answer, tokens) in enumerate(zip(answers, kept, strict=True)):
            outputs = min(len(answer.top_ids), len(tokens))
            ids[row, : len(tokens)] = tokens
            mask[row, len(tokens) - outputs : len(tokens)] = True
            tops.append((answer.top_ids[-outputs:], answer.top_logp[-outputs:]))
        top_ids = np.concatenate([top for top, _ in tops]).astype(np.int64)
        top_logp = np.concatenate([logp for _, logp in tops])
        return tuple(torch.from_numpy(a).to(self._device) for a in (ids, mask, top_ids, top_logp))


def split(answers: Sequence[Answer], recipe: Recipe) -> tuple[list[Answer], list[Answer]]:
    """Those to learn from and those held out; all answers of a prompt go the same way."""
    prompts = [answer.tokens[: answer.num_prompt_tokens].tobytes() for answer in answers]
    order = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
    count = max(int(len(order) * recipe.held_out), 1)
    chosen = set(np.random.default_rng(recipe.seed).permutation(len(order))[:count].tolist())
    parts: tuple[list[Answer], list[Answer]] = ([], [])
    for answer, prompt in zip(answers, prompts, strict=True):
        if len(answer.top_ids):
            parts[order[prompt] in chosen].append(answer)
    return parts


def train(
    model: Any,
    answers: Sequence[Answer],
    recipe: Recipe,
    folder: Path,
    report: Progress,
    log: Callable[[str], None],
) -> list[dict[str, float]]:
    """Train in place, from the folder's checkpoint where there is one; returns the loss curve.

    Args:
        model: of `make_model`.
        answers: to learn from.
        recipe: how.
        folder: of the checkpoint and the curve.
        report: progress in seconds of training.
        log: takes a line with the loss at each checkpoint.
    """
    device = str(next(model.parameters()).device)
    batches = Batches(answers, recipe, device)
    noise = torch.Generator()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        fused=True,
    )
    products = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=multiplies_bfloat16(device))

    def loss_at(step: int, share: float) -> torch.Tensor:
        ids, mask, top_ids, top_logp = batches.at(step)
        noise.manual_seed((recipe.seed << 32) + step)
        with products:
            hidden = model.model(input_ids=ids).last_hidden_state[mask]
            logits, places = candidates(model.lm_head.weight, hidden, top_ids, noise)
        return loss_of(logits, places, top_logp)

    model.train()
    curve, _ = train_for(model, optimizer, loss_at, recipe, folder, report, log)
    return curve


@torch.inference_mode()
def estimate(model: Any, answers: Sequence[Answer], recipe: Recipe) -> Estimate:
    """How often drafts of the model would be accepted."""
    device = str(next(model.parameters()).device)
    model.eval()
    batches = Batches(answers, recipe, device)
    sampled, same, chains, tokens = 0.0, 0, 0.0, 0
    of_greedy: list[Any] = []
    for answer in answers:
        ids, mask, top_ids, top_logp = batches.tensors([answer])
        logits = model.lm_head(model.model(input_ids=ids).last_hidden_state[mask]).float()
        q = logits.softmax(1)
        sampled += float(torch.minimum(q.gather(1, top_ids), top_logp.exp()).sum())
        agree = (logits.argmax(1) == top_ids[:, 0]).cpu().numpy()
        same += int(agree.sum())
        tokens += len(agree)
        if answer.is_greedy:
            of_greedy.append(agree)
        for start in range(len(agree)):
            run = agree[start : start + 4]
            chains += 1 + (len(run) if run.all() else int(run.argmin()))
    on_greedy = float(np.concatenate(of_greedy).mean()) if of_greedy else math.nan
    return Estimate(sampled / tokens, same / tokens, on_greedy, chains / tokens)
