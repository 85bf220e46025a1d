"""Training of drafters that draft a block: DFlash, JetSpec, DSpark.

Blocks of masks at random places of a text (DFlash, arXiv 2602.06036). JetSpec's rows see the earlier ones of their
block only (arXiv 2606.18394). DSpark's have a head beside them that knows the token before, which in training is the
text's, and one that learns how much of the target's distribution the draft's shares (DeepSpec, 2026).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, scaled_dot_product_attention
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels_hf.model.hidden import decoder_of
from gsd_kernels_hf.sources.dflash import CONFIDENCE, DFlash, DFlashConfig, along

from .drafter import DrafterOptions, DrafterTraining, layer_sizes, spread, write_checkpoint
from .job import TrainingOptions, check_output_matrix, output_logits

BLOCK_GUESSES = 7
"""Of a block, by default."""

MARKOV_RANK = 256
"""Of published DSpark drafters."""

FUSED_STATES = 5
"""Hidden states that published drafters fuse."""

MEASURED_BLOCKS = 32
"""Blocks of a window that are measured at once."""


class Blocks:
    """Attention of many blocks behind one text: what the inputs and the cache are for the rows of one block.

    Args:
        seen: bool [B, rows, places + rows], what each row sees: features before its root, and its own block.
    """

    def __init__(self, seen: Tensor) -> None:
        self.seen = seen
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> None:
        """Keep a layer's keys and values of the features, as a cache does."""
        self.stored[layer] = keys, values

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        """[B, Hq, rows, D], keys and values [B, Hkv, rows, D]: [B, Hq, rows, D]."""
        text_keys, text_values = self.stored[module.layer_idx]
        keys, values = torch.cat([text_keys, key], 2), torch.cat([text_values, value], 2).to(query.dtype)
        mask = self.seen[:, None]
        return scaled_dot_product_attention(
            query, keys.to(query.dtype), values, attn_mask=mask, enable_gqa=True, scale=module.scaling
        )


class DFlashTraining(DrafterTraining):
    """A DFlash, JetSpec or DSpark drafter that learns from its target.

    Raises:
        ValueError: see :meth:`DrafterTraining.begin`; or a target that changes its logits after the output matrix,
            which the drafter shares.
    """

    def __init__(
        self,
        options: TrainingOptions,
        target: PreTrainedModel,
        drafter: DrafterOptions,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        super().__init__(options, target, drafter.given)
        self.kind = drafter.kind
        count = len(decoder_of(target)[0])
        fused = drafter.layers_of(target, spread(min(2, count), count - 2, min(FUSED_STATES, count)))
        if min(fused) < 1:
            raise ValueError("hidden_layers: expected numbers from 1 on, since this layout lists outputs of layers")
        mask = drafter.mask_token_id
        for token in (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
            mask = token if mask is None else mask
        if mask is None:
            raise ValueError("mask_token_id: the tokenizer has no mask, padding or end of text; name a token by its id")
        dspark = self.kind == "dspark"
        size = drafter.block_size or BLOCK_GUESSES + (not dspark)
        sizes = layer_sizes(target, drafter)
        self.config = {
            "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
            "model_type": "qwen3",
            **sizes,
            "block_size": size,
            "num_target_layers": count,
            "layer_types": ["full_attention"] * drafter.layers,
        }
        said: dict[str, Any] = {"mask_token_id": mask, "target_layer_ids": [i - 1 for i in fused]}
        tensors: dict[str, tuple[int, ...]] = {}
        if dspark:
            rank = drafter.markov_rank or MARKOV_RANK
            self.config |= {**said, "markov_rank": rank, "markov_head_type": drafter.markov_head or "vanilla"}
            self.config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
            tensors = {f"{CONFIDENCE}weight": (1, sizes["hidden_size"] + rank), f"{CONFIDENCE}bias": (1,)}
        else:
            self.config["dflash_config"] = said | ({"causal_head": True} if self.kind == "jetspec" else {})
        check_output_matrix("drafters of blocks", options, target)
        read = DFlashConfig.of(self.config, tensors)
        module = DFlash(read)
        self.begin(module, fused, read.num_drafted)
        with torch.no_grad():  # the target's output matrix is behind it
            module.norm.weight.copy_(decoder_of(target)[1].weight)
        # Later tokens are harder, and reached less often: arXiv 2602.06036 has exp(−k/7) for 16 rows, exp(−k/4) for 8.
        decay = torch.arange(self.guesses, device=options.device, dtype=options.weights)
        self.weights = torch.exp(-2 * decay / (self.guesses + 1))

    def outputs(self, windows: Tensor, states: list[Tensor], roots: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs of blocks whose roots are the tokens at places ``roots`` int64 [B, A].

        Returns:
            Logits [B, A, guesses, V], and those of the confidence head [B, A, guesses]; ``None`` without one.
        """
        batch, count = roots.shape
        size, places = self.module.config.block_size, windows.shape[1] - 1
        row = torch.arange(size, device=windows.device)
        block = torch.full(
            (batch, count, size), self.module.config.mask_token_id, device=windows.device, dtype=torch.int64
        )
        block[..., 0] = windows.gather(1, roots)
        text = torch.arange(places, device=windows.device)
        before = (text < roots[..., None])[:, :, None].expand(-1, -1, size, -1).flatten(1, 2)
        owner = torch.arange(count, device=windows.device).repeat_interleave(size)
        same = owner[:, None] == owner
        if self.module.config.causal_head:
            same = same.tril()
        rows = Blocks(torch.cat([before, same.expand(batch, -1, -1)], -1))
        with self.options.autocast():
            features = self.module.fuse([state[:, :places] for state in states])
            self.module.store(features, text.expand(batch, -1), rows)
            at = (roots[..., None] + row).flatten(1)
            hidden = self.module(self.embedded(block.flatten(1)), at, rows)
        hidden = hidden.unflatten(1, (count, size))[:, :, size - self.guesses :]
        logits = output_logits(self.options, self.target, hidden)
        if self.module.edges is None:
            return logits, None
        known = self.places(roots)
        tokens = windows[:, None].expand(-1, count, -1).gather(2, known).flatten(0, 1)  # before each guess
        paths = hidden.flatten(0, 1)
        with self.options.autocast():
            logits = along(self.module.edges, logits.flatten(0, 1), paths, tokens).unflatten(0, (batch, count))
            confidence = self.module.confidence(paths, tokens).unflatten(0, (batch, count))[..., 0]
        return logits, confidence.to(self.options.weights)

    def places(self, roots: Tensor) -> Tensor:
        """Places of the tokens before each guess, int64 [B, A, guesses]."""
        return roots[..., None] + torch.arange(self.guesses, device=roots.device)

    def loss(self, windows: Tensor, counted: Tensor | None = None) -> Tensor:
        """Mean over blocks and their tokens, nearer ones weighing more, of :meth:`DrafterTraining.divergence`.

        To it comes the cross-entropy of the confidence head, if there is one, against the overlap Σ min(p, q). Roots
        are random places of each window, those whose next token counts first; there are so many blocks that their rows
        are about the window's.
        """
        states, log_target = self.read(windows)
        last = windows.shape[1] - 1 - self.guesses
        count = max(1, min(last, self.options.length // (self.guesses + 1)))
        order = torch.rand(len(windows), last, dtype=torch.float32, device="cpu")
        if counted is not None:
            order += counted[:, 2 : 2 + last].cpu()
        roots = order.topk(count).indices.to(windows.device) + 1  # [B, A]
        place = self.places(roots)
        window = windows.shape[1] * torch.arange(len(windows), device=windows.device)
        tokens = windows[:, None].expand(-1, count, -1).gather(2, place + 1)
        labels = self.labels(log_target.flatten(0, 1)[place + window[:, None, None]])
        logits, confidence = self.outputs(windows, states, roots)
        loss = self.divergence(logits, labels, tokens)
        if confidence is not None:
            overlap = torch.minimum(logits.detach().softmax(-1), labels.expected).sum(-1)
            loss = loss + binary_cross_entropy_with_logits(confidence, overlap, reduction="none")
        weights = self.weights.expand_as(loss)
        if counted is not None:
            weights = weights * counted[:, None].expand(-1, count, -1).gather(2, place + 1)
        return (loss * weights).sum() / weights.sum().clamp(min=1e-9)

    def guessed(self, windows: Tensor, first: int, places: int) -> Tensor:
        """See :meth:`DrafterTraining.guessed`; edges read the window's tokens, which are right where it counts."""
        states, _ = self.read(windows)
        roots = torch.arange(first + 1, first + 1 + places, device=windows.device).expand(len(windows), -1)
        parts = [self.outputs(windows, states, part)[0].argmax(-1) for part in roots.split(MEASURED_BLOCKS, 1)]
        return torch.cat(parts, 1)

    def save(self, folder: Path) -> None:
        """Write z-lab's layout, and of DSpark DeepSpec's, without copies of the target's matrices."""
        write_checkpoint(folder, self.config, self.module.state_dict(), self.dtype)
