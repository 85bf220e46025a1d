"""Drafters from checkpoints of their own that read the target's hidden states: what EAGLE-3 and DFlash share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..model.properties import text_config
from . import checkpoints
from .checkpoints import Checkpoint, bad
from .layers import Rotary
from .layouts import weight_name

if TYPE_CHECKING:
    from typing_extensions import Self


class FeatureDrafter(nn.Module):
    """A drafter with layers, and with an embedding, an output matrix and a vocabulary of its own or the target's.

    A subclass adds its layers, then what follows them: weights of a new drafter are drawn in this order.

    Args:
        config: what its checkpoint's config says.

    Attributes:
        kind: in errors.
        sizes: of the layers, and their rotary settings.
        plain: whether the layers are a decoder's, which may be one operator.
        read_config: function that reads a ``config.json`` beside tensors of these shapes, or refuses it.
    """

    kind: str
    sizes: PretrainedConfig
    plain = True
    read_config: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Any]
    fc: nn.Linear
    layers: nn.ModuleList

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.sizes = config, config.layers
        self.rotary, sizes = Rotary(self.sizes), self.sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size) if config.own_embedding else None

    def _add_outputs(self) -> None:
        """Make what follows the layers."""
        config, sizes, drafted = self.config, self.config.layers, self.config.draft_vocab_size
        self.norm = LlamaRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, drafted, bias=False) if config.own_head else None
        reduced = drafted < sizes.vocab_size
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64) if reduced else None)

    @classmethod
    def from_pretrained(cls, where: str | os.PathLike[str], target: PreTrainedModel | None = None) -> Self:
        """A drafter from a folder or hub id: as stored, or with ``target``'s dtype and device.

        Raises:
            ValueError: no checkpoint of this kind that can be served, or not one of ``target``'s; nothing was loaded.
        """
        return cls.from_checkpoint(Checkpoint.open(where), target)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target: PreTrainedModel | None = None) -> Self:
        """Load an open checkpoint, see :meth:`from_pretrained`."""
        checkpoint.rename(weight_name)
        config = cls.read_config(checkpoint.config, checkpoint.shapes)
        vocab_size = config.layers.vocab_size
        if config.draft_vocab_size == vocab_size:
            checkpoint.files.pop("d2t", None)  # the identity
        with torch.device("meta"):
            module = cls(config)
        if target is not None:
            module.check_target(target)
        checkpoint.load_into(module)
        if module.d2t is not None:
            checkpoints.check_map("d2t", module.target_ids(), vocab_size)
        checkpoints.move_to(module, target)
        return module

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise unless the drafter fits a target's vocabulary, width and layers.

        Raises:
            ValueError: the difference and the cure.
        """
        config, kind, own = self.config, self.kind, self.embed_tokens
        width, theirs = config.layers.hidden_size, config.target_hidden_size
        checkpoints.check_sizes(kind, config.layers.vocab_size, theirs, target, self.layers_of(target))
        if (own is None or not config.own_head) and width != theirs:
            what = "embedding" if own is None else "output matrix"
            raise bad(
                f"this {kind} drafter has no {what} of its own, and is {width} wide where the target's {what} "
                f"is {theirs}"
            )
        rows = len((target.get_input_embeddings() if own is None else own).weight)
        if config.mask_token_id is not None and config.mask_token_id >= rows:
            raise bad(f"this {kind} drafter's mask token {config.mask_token_id} has no row in an embedding of {rows}")

    def check_block(self) -> None:
        """Raise unless the layers can be forwarded, as those can that are ours."""

    def layers_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """The target's hidden states that are fused."""
        numbers: tuple[int, ...] | None = self.config.hidden_layers
        count = int(text_config(target).num_hidden_layers)
        return (2, count // 2, count - 3) if numbers is None else numbers

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of every layer."""
        return [layer.self_attn.window for layer in self.layers]

    def target_ids(self) -> Tensor:
        """The target's id of every draft token, int64 [draft_vocab_size]."""
        at = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        return at if self.d2t is None else at + self.d2t
