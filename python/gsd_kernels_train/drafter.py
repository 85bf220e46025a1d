"""The common part of the trainings of drafters that read the target's hidden states.

The target is frozen; its hidden states and its own distributions are at hand at no further cost.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels_hf.model.hidden import decoder_of, listening
from gsd_kernels_hf.model.properties import text_config, vocabulary
from gsd_kernels_hf.sources.checkpoints import CONFIG, WEIGHTS
from gsd_kernels_hf.sources.dflash import MARKOV_HEADS

from .job import Guessing, TrainingOptions, stored_dtype
from .options import Parts
from .text import mean_of

SETTINGS = {
    "eagle3": ("draft_vocabulary", "target_head", "depth"),
    "dflash": ("block_size", "mask_token_id"),
    "jetspec": ("block_size", "mask_token_id"),
    "dspark": ("block_size", "mask_token_id", "markov_rank", "markov_head"),
    "mtp": ("depth",),
}
"""Options of each kind alone."""

KINDS = tuple(SETTINGS)

DEPTH = 5
"""Levels, by default."""

LEVEL_WEIGHT = 0.8
"""Weight of a level's loss, to the power of its number: deeper tokens are reached less often (as SpecForge has it)."""


@dataclass(frozen=True)
class DrafterOptions(Parts):
    """Options of the drafter that is trained.

    Attributes:
        kind: one of :data:`KINDS`.
        layers: decoder layers of the drafter; of mtp, which is one of the target's, 1.
        intermediate_size: of their feed-forward parts; ``None``: the target's.
        hidden_layers: the target's hidden states that are fused, as transformers' ``hidden_states[i]``; ``None``: as
            published ones choose them, where the target has enough layers.
        draft_vocabulary: tokens that EAGLE-3 can draft, those most frequent in the text; ``None``: 32,000 at most.
        target_head: whether EAGLE-3 drafts by the target's output matrix, its rows of the draft vocabulary, which are
            then neither trained nor stored; else it has its own.
        depth: unrolled levels of EAGLE-3 and of mtp, of which each reads the last one's output (training-time test).
        block_size: rows of a block, the root's included, of the kinds that have one; ``None``: for seven guesses.
        mask_token_id: whose embedding stands for a token to be drafted by such a block; ``None``: the tokenizer's mask
            token, else its padding, else its end of text.
        markov_rank: of DSpark's head; ``None``: 256.
        markov_head: its kind, ``vanilla``, ``gated`` or ``rnn``; ``None``: vanilla.

    Raises:
        ValueError: an option out of range, or of another kind, by name.
    """

    hidden_layers: tuple[int, ...] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        least = {"layers": 1, "intermediate_size": 1, "draft_vocabulary": 1, "depth": 1, "block_size": 2}
        for name, lowest in (least | {"mask_token_id": 0, "markov_rank": 1}).items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}: expected at least {lowest}, got {value}")
        for name, plain in (("layers", 1), ("intermediate_size", None), ("hidden_layers", None)):
            if self.kind == "mtp" and getattr(self, name) not in (plain, ()):
                raise ValueError(f"{name}: not a setting of mtp, which is a layer as the target's own; leave it out")
        for name in sorted({name for names in SETTINGS.values() for name in names} - set(SETTINGS[self.kind])):
            if name in self.given:
                raise ValueError(f"{name}: not a setting of {self.kind}; leave it out")
        if self.markov_head not in (None, *MARKOV_HEADS):
            raise ValueError(f"markov_head: expected one of {', '.join(MARKOV_HEADS)}, got {self.markov_head!r}")
        chosen = self.hidden_layers
        if chosen is not None and (not chosen or len(set(chosen)) < len(chosen)):
            raise ValueError(f"hidden_layers: expected different numbers, got {list(chosen)}")

    @property
    def given(self) -> dict[str, Any]:
        """The options that were chosen, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None and value is not False}

    def layers_of(self, target: PreTrainedModel, default: tuple[int, ...]) -> tuple[int, ...]:
        """The hidden states that are fused.

        Raises:
            ValueError: the target has no such layer.
        """
        count = len(decoder_of(target)[0])
        for number in self.hidden_layers or ():
            if not 0 <= number <= count:
                raise ValueError(
                    f"hidden_layers: expected numbers from 0 to {count}, the target's layers; got {number}"
                )
        return self.hidden_layers or default


def spread(first: int, last: int, count: int) -> tuple[int, ...]:
    """``count`` numbers from ``first`` to ``last``, evenly spaced; fewer where there are not so many."""
    return tuple(dict.fromkeys(np.linspace(first, max(first, last), count).round().astype(int).tolist()))


def layer_sizes(target: PreTrainedModel, options: DrafterOptions) -> dict[str, Any]:
    """A config's sizes and rotary settings of decoder layers as wide as the target."""
    theirs = text_config(target)
    heads = theirs.num_attention_heads
    rope = dict(getattr(theirs, "rope_parameters", None) or {})
    sizes = {
        "hidden_size": theirs.hidden_size,
        "intermediate_size": options.intermediate_size or theirs.intermediate_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(theirs, "num_key_value_heads", None) or heads,
        "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        "vocab_size": vocabulary(target),
        "hidden_act": "silu",
        "rms_norm_eps": theirs.rms_norm_eps,
        "rope_theta": rope.pop("rope_theta", 10000.0),
        "max_position_embeddings": theirs.max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": theirs.bos_token_id,
        "eos_token_id": theirs.eos_token_id,
    }
    return sizes if rope.get("rope_type", "default") == "default" else sizes | {"rope_scaling": rope}


class Labels(NamedTuple):
    """The target's distribution over the draft vocabulary.

    Attributes:
        expected: [..., draft vocabulary], probabilities.
        mass: [...], their sum.
        negative_entropy: [...], sum of p log p.
    """

    expected: Tensor
    mass: Tensor
    negative_entropy: Tensor

    def at(self, index: tuple[slice, ...] | Tensor) -> Labels:
        """Choose those of some positions."""
        return Labels(*(part[index] for part in self))


class DrafterTraining(Guessing):
    """The training that all kinds have in common.

    Attributes:
        config: of the checkpoint, as ``config.json`` holds it.
    """

    config: dict[str, Any]

    def __init__(self, options: TrainingOptions, target: PreTrainedModel, identity: dict[str, Any]) -> None:
        self.options, self.target = options, target
        self.dtype = stored_dtype(options.target)
        self.embedding = target.get_input_embeddings()
        self.identity = identity

    def begin(self, module: nn.Module, hidden_layers: tuple[int, ...], guesses: int) -> None:
        """Take a new drafter.

        Raises:
            ValueError: windows too short for so many guesses, or a target that the drafter does not fit.
        """
        if self.options.length <= guesses + 1:
            raise ValueError(
                f"length: expected more than {guesses + 1} for {guesses} guesses, got {self.options.length}"
            )
        module.check_target(self.target)
        with torch.no_grad():
            self.initialise(module)
        self.module = module.to(self.options.device, self.options.weights)
        self.hidden_layers, self.guesses = hidden_layers, guesses

    def initialise(self, module: nn.Module) -> None:
        """Fill a new drafter as transformers fills new models, but for residual branches, which begin at zero."""
        generator = torch.Generator().manual_seed(self.options.seed)
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(float(name.endswith("weight")))
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            else:
                parameter.normal_(0.0, 0.02, generator=generator)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens by the target's matrix, which the drafter shares."""
        return self.embedding(tokens).to(self.options.weights)

    @torch.no_grad()
    def read(self, windows: Tensor) -> tuple[list[Tensor], Tensor]:
        """Hidden states [B, N, D] that are fused, and the target's log-probabilities [B, N, V]."""
        with listening(self.target, self.hidden_layers) as hidden, self.options.autocast():
            logits = self.target(windows, use_cache=False).logits
        states = [hidden[number].to(self.options.weights) for number in self.hidden_layers]
        return states, logits.to(self.options.weights).log_softmax(-1)

    @property
    def ids(self) -> Tensor | None:
        """Ids of a reduced draft vocabulary, ascending; ``None``: it is the target's."""
        return None if getattr(self.module, "d2t", None) is None else self.module.target_ids()

    def labels(self, log_target: Tensor) -> Labels:
        """The labels that the loss takes of the target's log-probabilities [..., V]."""
        log_target = log_target if self.ids is None else log_target[..., self.ids]
        expected = log_target.exp()
        return Labels(expected, expected.sum(-1), (expected * log_target).sum(-1))

    def divergence(self, logits: Tensor, labels: Labels, tokens: Tensor) -> Tensor:
        """Loss at every position: ``token_level`` · KL(target ‖ draft) + (1 − ``token_level``) · −log draft(token).

        Of a reduced vocabulary, the divergence is the sum over its tokens, so that positions where the target expects
        others count less; and a text's token outside it counts nothing.

        Args:
            logits: [..., draft vocabulary].
            labels: of the same positions.
            tokens: int64 [...], the text's.

        Returns:
            [...].
        """
        weight, normaliser = self.options.token_level, logits.logsumexp(-1)
        loss = torch.zeros_like(normaliser)
        if weight > 0:
            cross_entropy = labels.mass * normaliser - (labels.expected * logits).sum(-1)
            loss = loss + weight * (labels.negative_entropy + cross_entropy)
        if weight < 1:
            ids, at = self.ids, tokens
            if ids is not None:
                at = torch.searchsorted(ids, tokens.contiguous()).clamp(max=len(ids) - 1)
            nll = normaliser - logits.gather(-1, at[..., None])[..., 0]
            loss = loss + (1 - weight) * (nll if ids is None else torch.where(ids[at] == tokens, nll, 0.0))
        return loss


# ---- level by level: the training-time test (EAGLE-3, arXiv 2503.01840, section 3.2)
#
# Drafted tokens have no feature of the target's, so a drafter meets its own output in their place. In training it does
# so too: it is unrolled some levels deep at every position of a text, each level reading the one before.


class Unrolled:
    """Attention of all places of a text at once, level by level: the ``graph=`` argument of decoder layers.

    At level k a place stands for the token k places on. It sees the text up to itself, as level 0 read it, and itself
    at the levels before: what a path of drafted tokens sees.
    """

    def __init__(self) -> None:
        self.levels: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # by layer

    def attend(
        self,
        module: Any,
        query: Tensor,  # [B, Hq, T, D] of the next level
        key: Tensor,  # [B, Hkv, T, D]
        value: Tensor,
        attention_mask: Any,
        scaling: float | None,
        options: dict[str, Any],
    ) -> Tensor:
        """See :class:`~gsd_kernels_hf.model.attention.Attends`; a window is of the text and the levels.

        Raises:
            ValueError: the layer has a soft cap or sinks.
        """
        for name, what in (("softcap", "a soft cap"), ("s_aux", "sinks")):
            if options.get(name) is not None:
                raise ValueError(
                    f"kind: mtp trains a decoder layer of the target, and the attention of its {type(module).__name__} "
                    f"has {what}, which training does not know; train another kind"
                )
        scaling, window = query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("sliding_window")
        group = query.shape[1] // key.shape[1]
        levels = self.levels[getattr(module, "layer_idx", 0)]
        levels.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        (text_keys, text_values), *path = levels
        scores = query @ text_keys.transpose(-1, -2)  # [B, Hq, T, T]
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if window is not None:
            seen = seen.triu(1 + len(path) - window)
            path = path[-window:]
        scores = scores.masked_fill(~seen, -torch.inf)
        own = [(query * keys).sum(-1, keepdim=True).to(scores.dtype) for keys, _ in path]
        scores = torch.cat([scores, *own], -1) * scaling
        weights = scores.float().softmax(-1).to(scores.dtype) if scores.dtype == torch.bfloat16 else scores.softmax(-1)
        text, *shares = weights.split([query.shape[2], *[1] * len(path)], -1)
        out = text @ text_values
        for weight, (_, values) in zip(shares, path, strict=True):
            out = out + weight * values
        return out


class UnrolledTraining(DrafterTraining):
    """A drafter that learns from its target level by level, each from the output of the one before."""

    def levels(self, windows: Tensor, states: list[Tensor]) -> list[Tensor]:
        """Logits [B, places, draft vocabulary] of each level; at level k place t guesses token t + k + 2.

        Args:
            windows: int64 [B, N].
            states: the hidden states [B, N, D] that are fused.
        """
        places = windows.shape[1] - 1 - self.guesses
        rows, found = Unrolled(), []
        at = torch.arange(places, device=windows.device).expand(len(windows), -1)
        with self.options.autocast():
            vectors = self.module.fuse([state[:, :places] for state in states])
            for level in range(self.guesses):
                tokens = windows[:, level + 1 : level + 1 + places]
                hidden = self.module(self.embedded(tokens), vectors, at + level, rows)
                vectors, logits = self.outputs(hidden)
                found.append(logits.to(self.options.weights))
        return found

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of the module's outputs what the next level reads [B, places, D], and logits."""
        raise NotImplementedError

    def loss(self, windows: Tensor, counted: Tensor | None = None) -> Tensor:
        """Sum over levels k of 0.8^k times the mean of :meth:`DrafterTraining.divergence` over places that count."""
        states, log_target = self.read(windows)
        total, labels = log_target.new_zeros(()), self.labels(log_target)
        for level, logits in enumerate(self.levels(windows, states)):
            there = (slice(None), slice(level + 1, level + 1 + logits.shape[1]))
            loss = self.divergence(logits, labels.at(there), windows[:, 1:][there])
            total = total + LEVEL_WEIGHT**level * mean_of(loss, None if counted is None else counted[:, 1:][there])
        return total

    def guessed(self, windows: Tensor, first: int, places: int) -> Tensor:
        """See :meth:`DrafterTraining.guessed`; levels read the window's tokens, which are right where it counts."""
        states, _ = self.read(windows)
        guesses = [logits[:, first : first + places].argmax(-1) for logits in self.levels(windows, states)]
        picked = torch.stack(guesses, -1)
        return picked if self.ids is None else self.ids[picked]


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``model.safetensors``, weights in ``dtype``."""
    whole = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous().cpu()
        for name, value in tensors.items()
    }
    named = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
