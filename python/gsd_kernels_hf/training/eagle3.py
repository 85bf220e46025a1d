"""Training of EAGLE-3 drafters: the training-time test (arXiv 2503.01840, section 3.2).

Drafted tokens have no feature of the target's, so a drafter meets its own output in their place. In training it does so
too: it is unrolled some levels deep at every position of a text, each level reading the one before.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.hidden import decoder_of
from ..sources.eagle3 import Eagle3, Eagle3Config
from ..sources.layers import Attention
from .drafter import DrafterOptions, DrafterTraining, layer_sizes, spread, write_checkpoint
from .job import TrainingOptions

__all__ = ["Eagle3Training", "Unrolled"]

DEPTH = 5
"""Levels, by default."""

LEVEL_WEIGHT = 0.8
"""Weight of a level's loss, to the power of its number: deeper tokens are reached less often (as SpecForge has it)."""


class Unrolled:
    """Attention of all places of a text at once, level by level: what a row pass is for rows of a cache.

    At level k a place stands for the token k places on. It sees the text up to itself, as level 0 read it, and itself
    at the levels before: what a path of drafted tokens sees.
    """

    def __init__(self) -> None:
        self.levels: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # by layer

    def attend(self, module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, Hq, T, D] of the next level, keys and values [B, Hkv, T, D]: [B, Hq, T, D]."""
        group = query.shape[1] // key.shape[1]
        self.levels[module.layer].append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        (text_keys, text_values), *path = self.levels[module.layer]
        scores = query @ text_keys.transpose(-1, -2)  # [B, Hq, T, T]
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        own = [(query * keys).sum(-1, keepdim=True).to(scores.dtype) for keys, _ in path]
        scores = torch.cat([scores.masked_fill(~seen, -torch.inf), *own], -1) * module.scaling
        weights = scores.float().softmax(-1).to(scores.dtype) if scores.dtype == torch.bfloat16 else scores.softmax(-1)
        text, *levels = weights.split([query.shape[2], *[1] * len(path)], -1)
        out = text @ text_values
        for weight, (_, values) in zip(levels, path, strict=True):
            out = out + weight * values
        return out


class Eagle3Training(DrafterTraining):
    """An EAGLE-3 drafter that learns from its target.

    Args:
        draft_ids: int64 [draft vocabulary], ids of the tokens that it can draft, ascending.

    Raises:
        ValueError: see :meth:`DrafterTraining.begin`.
    """

    kind = "eagle3"

    def __init__(
        self,
        options: TrainingOptions,
        target: PreTrainedModel,
        drafter: DrafterOptions,
        dtype: torch.dtype,
        draft_ids: Tensor,
    ) -> None:
        super().__init__(options, target, drafter, dtype)
        fused = drafter.layers_of(target, default_layers(target))
        sizes = layer_sizes(target, drafter)
        self.config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **sizes,
            "draft_vocab_size": len(draft_ids),
            "target_hidden_size": sizes["hidden_size"],
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(fused),  # what layers read: vLLM
        }
        if min(fused) > 0:  # outputs of layers: SGLang
            inner = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in fused], "use_aux_hidden_state": True}
            self.config["eagle_config"] = inner
        module = Eagle3(Eagle3Config.of(self.config, own_embedding=False))
        if module.d2t is not None:
            module.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
        self.begin(module, fused, drafter.depth or DEPTH)
        # It begins as the target's output matrix, and the norm before, on the deepest state that is fused.
        with torch.no_grad():
            size = sizes["hidden_size"]
            module.fc.weight.zero_()[:, -size:].copy_(torch.eye(size))
            head, (_, norm) = target.get_output_embeddings().weight, decoder_of(target)
            module.lm_head.weight.copy_(head[draft_ids.to(head.device)])
            module.norm.weight.copy_(norm.weight)

    def levels(self, windows: Tensor, states: list[Tensor]) -> list[Tensor]:
        """Logits [B, places, draft vocabulary] of each level; at level k place t guesses token t + k + 2."""
        places = windows.shape[1] - 1 - self.guesses
        rows, found = Unrolled(), []
        at = torch.arange(places, device=windows.device).expand(len(windows), -1)
        with self.options.autocast():
            vectors = self.module.fuse([state[:, :places] for state in states])
            for level in range(self.guesses):
                tokens = windows[:, level + 1 : level + 1 + places]
                hidden = self.module(self.embedded(tokens), vectors, at + level, rows)
                vectors, logits = self.module.outputs(hidden)
                found.append(logits.to(self.options.weights))
        return found

    def loss(self, windows: Tensor) -> Tensor:
        """Sum over levels k of 0.8^k times the mean of :meth:`DrafterTraining.divergence` over places."""
        states, log_target = self.read(windows)
        total, labels = log_target.new_zeros(()), self.labels(log_target)
        for level, logits in enumerate(self.levels(windows, states)):
            there = (slice(None), slice(level + 1, level + 1 + logits.shape[1]))
            loss = self.divergence(logits, labels.at(there), windows[:, 1:][there])
            total = total + LEVEL_WEIGHT**level * loss.mean()
        return total

    def guessed(self, windows: Tensor, first: int, places: int) -> Tensor:
        """See :meth:`DrafterTraining.guessed`; levels read the window's tokens, which are right where it counts."""
        states, _ = self.read(windows)
        guesses = [logits[:, first : first + places].argmax(-1) for logits in self.levels(windows, states)]
        return self.module.target_ids()[torch.stack(guesses, -1)]

    def save(self, folder: Path) -> None:
        """Write the layout of SafeAILab and SpecForge, which vLLM and SGLang read."""
        tensors = {name.replace("layers.0.", "midlayer.", 1): value for name, value in self.module.state_dict().items()}
        if self.module.d2t is not None:
            known = torch.zeros(self.config["vocab_size"], dtype=torch.bool)
            known[self.module.target_ids().cpu()] = True
            tensors["t2d"] = known
        write_checkpoint(folder, self.config, tensors, self.dtype)


def default_layers(target: PreTrainedModel) -> tuple[int, ...]:
    """Hidden states 2, L // 2 and L − 3 of a target of L layers, as published; of a shallow one spread ones."""
    count = len(decoder_of(target)[0])
    published = (2, count // 2, count - 3)
    return published if count >= 8 else spread(int(count > 3), count - 1, 3)
