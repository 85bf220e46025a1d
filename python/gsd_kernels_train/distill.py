"""Align a draft with its target by distillation: what ``gsd-kernels distill`` does.

Sequence level (Kim and Rush, arXiv 1606.07947): the draft learns from text that the target wrote. Token level (Hinton,
arXiv 1503.02531; DistillSpec, arXiv 2310.08461): at every position it learns the target's whole distribution.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels_hf import validate
from gsd_kernels_hf.model import properties
from gsd_kernels_hf.parallel import digest

from .job import Trainee, TrainingOptions, accepted_per_step, check_length, run, stored_dtype
from .text import HeldOut, mean_of

CHAIN_TOKENS = 5
"""Tokens of the chain whose acceptance is reported."""

WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def has_weights(folder: str | Path) -> bool:
    """Return whether a checkpoint folder holds more than a config."""
    return any(next(Path(folder).glob(pattern), None) is not None for pattern in WEIGHTS)


def load_draft(folder: str, options: TrainingOptions) -> PreTrainedModel:
    """The draft to train; one of a config alone is initialised from the seed.

    Raises:
        ValueError: no such folder, or one without a config.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"draft: no config.json in {folder}; expected a checkpoint folder, or one of a config alone")
    if has_weights(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=options.weights)
    torch.manual_seed(options.seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=options.weights)


class Distillation(Trainee):
    """A draft that learns from a target; without a tokenizer of its own, the vocabulary sizes are compared.

    Raises:
        ValueError: they read different tokens, or the draft has too few positions.
    """

    kind = "draft"

    def __init__(
        self,
        options: TrainingOptions,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        draft: PreTrainedModel,
        draft_tokenizer: PreTrainedTokenizerBase | None,
        dtype: torch.dtype,
    ) -> None:
        try:
            validate.check_pair(target, draft)
            if draft_tokenizer is not None and draft_tokenizer.get_vocab() != tokenizer.get_vocab():
                raise ValueError("draft: its vocabulary differs from the target's")
        except ValueError as error:
            reason = str(error).split("; ")[0].split(": ", 1)[1]
            raise ValueError(f"draft: {reason}; a draft is trained for a target of the same tokenizer") from error
        check_length(options, draft, "draft", 0)
        self.options, self.target, self.tokenizer, self.dtype = options, target, tokenizer, dtype
        self.module = draft.to(options.device)
        self.vocabulary = min(properties.vocabulary(target), properties.vocabulary(draft))
        self.identity = {"draft": f"{digest(draft):016x}"}

    def logits(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """int64 [B, N] → [B, N, V] of the vocabulary that both have."""
        known = torch.where(tokens < properties.vocabulary(model), tokens, 0)
        with self.options.autocast():
            logits = model(known, use_cache=False).logits
        return logits[..., : self.vocabulary].to(self.options.weights)

    def loss(self, windows: Tensor, counted: Tensor | None = None) -> Tensor:
        """Mean of ``token_level`` · KL(target ‖ draft) + (1 − ``token_level``) · −log draft(next).

        Over the positions whose next token counts.
        """
        weight = self.options.token_level
        inputs, following = windows[:, :-1], windows[:, 1:]
        log_draft = self.logits(self.module, inputs).log_softmax(-1).flatten(0, 1)  # [rows, V]
        loss = log_draft.new_zeros(len(log_draft))
        if weight > 0:
            with torch.no_grad():
                log_target = self.logits(self.target, inputs).log_softmax(-1).flatten(0, 1)
            loss = loss + weight * F.kl_div(log_draft, log_target, reduction="none", log_target=True).sum(-1)
        if weight < 1:
            known = following < self.vocabulary
            likelihood = F.nll_loss(log_draft, torch.where(known, following, -100).flatten(), reduction="none")
            # Tokens that the draft does not have are no part of the mean.
            loss = loss + (1 - weight) * likelihood * (known.numel() / known.sum().clamp(min=1))
        return mean_of(loss, None if counted is None else counted[:, 1:].flatten())

    def of_text(self, windows: Tensor) -> Tensor:
        """Return whether both have the same most likely token, and KL(target ‖ draft): [B, places, 2]."""
        ours, theirs = (self.logits(model, windows[:, :-1]) for model in (self.module, self.target))
        same = ours.argmax(-1) == theirs.argmax(-1)
        ours, theirs = (logits.log_softmax(-1) for logits in (ours, theirs))
        return torch.stack([same.double(), (theirs.exp() * (theirs - ours)).sum(-1).double()], -1)

    def right(self, windows: Tensor, first: int) -> Tensor:
        """Tell whether the draft would have picked the tokens behind place ``first``: bool [B, places]."""
        return self.logits(self.module, windows[:, :-1])[:, first:].argmax(-1) == windows[:, first + 1 :]

    def measures(self, read: Tensor, own: Tensor, held_out: HeldOut) -> dict[str, Any]:
        """Sum up the draft's picks.

        Returns:
            agreement: share of positions of the text where both have the same most likely token. divergence: KL(target
            ‖ draft) there, nats a token. continuation_agreement: share of the target's own tokens that the draft would
            have picked. accepted: of a chain of :data:`CHAIN_TOKENS` drafted tokens, per step of decoding them.
        """
        said = read.flatten(0, 1) if held_out.counted is None else read[held_out.counted[:, 1:]]
        agreement, divergence = said.mean(0).tolist()
        depth = min(CHAIN_TOKENS, own.shape[1] - 1)
        chains = own[:, 1:].unfold(1, depth, 1)  # [texts, places, depth]
        return {
            "agreement": agreement,
            "divergence": divergence,
            "continuation_agreement": own[held_out.picked].double().mean().item(),
            "accepted": accepted_per_step(chains, (held_out.picked.sum(1) - depth).clamp(min=0)) if depth else None,
        }

    def save(self, folder: Path) -> None:
        self.module.config.name_or_path = ""
        super().save(folder)
        self.tokenizer.save_pretrained(folder)


def distill(draft: str, options: TrainingOptions) -> dict[str, Any]:
    """Train ``draft`` (a folder) by ``options``; the report that ``training.json`` holds.

    Raises:
        ValueError, OSError, RuntimeError: see :func:`~gsd_kernels_train.job.run`.
    """

    def make(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, _: object) -> Distillation:
        model = load_draft(draft, options)
        named = any((Path(draft) / name).is_file() for name in TOKENIZERS)  # else an empty one would be made
        own = AutoTokenizer.from_pretrained(draft) if named else None
        return Distillation(options, target, tokenizer, model, own, stored_dtype(draft))

    return run(options, make)
