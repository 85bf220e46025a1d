"""Train drafters and heads that read a target's hidden states: what ``train-drafter`` and ``train-heads`` do.

The result is written in the layout that others publish and serve, and read back by
:func:`gsd_kernels_hf.sources.load.load_drafter`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, scaled_dot_product_attention
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels_hf.model.hidden import decoder_of
from gsd_kernels_hf.model.properties import vocabulary
from gsd_kernels_hf.sources.checkpoints import BadCheckpoint, shapes_of
from gsd_kernels_hf.sources.dflash import CONFIDENCE, DFlash
from gsd_kernels_hf.sources.feature_drafter import TARGET_HEAD, Block, Eagle3, Mtp, blocks_of
from gsd_kernels_hf.sources.heads import DraftHeads
from gsd_kernels_hf.sources.layouts import HEADS

from .drafter import (
    DEPTH,
    DrafterOptions,
    DrafterTraining,
    UnrolledTraining,
    layer_sizes,
    spread,
    write_checkpoint,
)
from .job import TrainingOptions, check_output_matrix, output_logits, run
from .text import TrainingText

LARGEST_DRAFT_VOCABULARY = 32000
"""Default draft vocabulary of EAGLE-3 at most, as published ones have it."""

WRITTEN = next(layout for layout in HEADS if layout.prefix == "mtp.")
"""The names of heads that are trained here."""
WANTED = ("full_attention", None, "sliding_attention")
"""Types of attention that a new head's layer may have, the best first."""

BLOCK_GUESSES = 7
"""Of a block, by default."""

MARKOV_RANK = 256
"""Of published DSpark drafters."""

FUSED_STATES = 5
"""Hidden states that published drafters fuse."""

MEASURED_BLOCKS = 32
"""Blocks of a window that are measured at once."""


# ---- Training of EAGLE-3 drafters, unrolled (arXiv 2503.01840, section 3.2).


class Eagle3Training(UnrolledTraining):
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
        draft_ids: Tensor,
    ) -> None:
        super().__init__(options, target, drafter.given)
        count = len(decoder_of(target)[0])
        published = (2, count // 2, count - 3)  # of a shallow target spread ones
        fused = drafter.layers_of(target, published if count >= 8 else spread(int(count > 3), count - 1, 3))
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
        if drafter.target_head:
            self.config[TARGET_HEAD] = True
            check_output_matrix("drafters without an output matrix of their own", options, target)
        module = Eagle3(self.config)
        if module.d2t is not None:
            module.d2t.copy_(draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
        self.begin(module, fused, drafter.depth or DEPTH)
        # It begins as the target's output matrix, and the norm before, on the deepest state that is fused.
        with torch.no_grad():
            size = sizes["hidden_size"]
            module.fc.weight.zero_()[:, -size:].copy_(torch.eye(size, dtype=torch.float32, device="cpu"))
            module.norm.weight.copy_(decoder_of(target)[1].weight)
        module.share_head(target)
        module.lm_head.weight.requires_grad_(not drafter.target_head)

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`UnrolledTraining.outputs`."""
        return self.module.outputs(hidden)

    def save(self, folder: Path) -> None:
        """Write the layout of SafeAILab and SpecForge, which vLLM and SGLang read."""
        tensors = {name.replace("layers.0.", "midlayer.", 1): value for name, value in self.module.state_dict().items()}
        if TARGET_HEAD in self.config:
            del tensors["lm_head.weight"]
        if self.module.d2t is not None:
            known = torch.zeros(self.config["vocab_size"], dtype=torch.bool, device="cpu")
            known[self.module.target_ids().cpu()] = True
            tensors["t2d"] = known
        write_checkpoint(folder, self.config, tensors, self.dtype)


# ---- Training of a multi-token-prediction head for a target that came without one.
#
# DeepSeek-V3 (arXiv 2412.19437, section 2.2). The head is one decoder layer of the target's own class.
# It is unrolled as EAGLE-3 is, since it is used recursively.


def block_to_train(target: PreTrainedModel) -> Block:
    """The target's decoder layer that a new head has: with attention, over all positions if it can be, the smallest.

    Raises:
        BadCheckpoint: layers cannot be made by themselves, or none is of attention.
    """
    blocks = [block for block in blocks_of(target) if hasattr(block.module, "self_attn") and block.attention in WANTED]
    if not blocks:
        raise BadCheckpoint(f"target: {type(target).__name__} has no decoder layer of attention that a head could have")
    return min(
        blocks, key=lambda block: (WANTED.index(block.attention), sum(p.numel() for p in block.module.parameters()))
    )


def new_head(block: Block) -> Mtp:
    """A head to be trained: new norms and projection, and a copy of the target's last such layer.

    Raises:
        BadCheckpoint: no layer is alike.
    """
    head, shapes = Mtp(WRITTEN, block, bias=False), shapes_of(block.module)
    head.block = head.block.to_empty(device="cpu").requires_grad_(True)
    for layer in reversed(decoder_of(block.target)[0]):
        tensors = layer.state_dict()
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes:
            head.block.load_state_dict(tensors)
            return head
    made, of = type(head.block).__name__, type(block.target).__name__
    raise BadCheckpoint(f"target: no layer of {of} has the tensors of a new {made}; its heads are not served")


class MtpTraining(UnrolledTraining):
    """A multi-token-prediction head that learns from its target.

    Raises:
        ValueError: see :meth:`DrafterTraining.begin`; or a target whose layers cannot be made by themselves, or that
            changes its logits after the output matrix, which the head shares.
    """

    kind = "mtp"

    def __init__(self, options: TrainingOptions, target: PreTrainedModel, drafter: DrafterOptions) -> None:
        super().__init__(options, target, drafter.given)
        check_output_matrix("multi-token-prediction heads", options, target)
        block = block_to_train(target)
        module = new_head(block)
        self.config = {
            "architectures": [type(target).__name__.removesuffix("ForCausalLM") + "MTP"],
            "model_type": target.config.model_type,
            "hidden_size": block.config.hidden_size,
            "vocab_size": block.config.vocab_size,
            "num_nextn_predict_layers": 1,
        }
        if block.attention is not None:
            self.config["mtp_layer_types"] = [block.attention]
        self.begin(module, (len(decoder_of(target)[0]),), drafter.depth or DEPTH)

    def initialise(self, module: Mtp) -> None:
        """It begins as the target's own guess: its last state, and a copy of its layer that adds nothing yet."""
        size = module.sizes.hidden_size
        for name, parameter in module.block.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
        module.projection.weight.zero_()[:, -size:].copy_(torch.eye(size, dtype=torch.float32, device="cpu"))
        module.norm.load_state_dict(decoder_of(self.target)[1].state_dict())

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`UnrolledTraining.outputs`."""
        hidden = self.module.norm(hidden)
        return hidden, output_logits(self.options, self.target, hidden)

    def save(self, folder: Path) -> None:
        """Write the names of Qwen3-Next's heads, which are the commonest."""
        tensors = {self.module.layout.published_name(name): value for name, value in self.module.state_dict().items()}
        write_checkpoint(folder, self.config, tensors, self.dtype)


# ---- Training of drafters that draft a block: DFlash, JetSpec, DSpark.
#
# Blocks of masks at random places of a text (DFlash, arXiv 2602.06036). JetSpec's rows see the earlier ones of their
# block only (arXiv 2606.18394). DSpark's have a head beside them that knows the token before, which in training is the
# text's, and one that learns how much of the target's distribution the draft's shares (DeepSpec, 2026).


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
        module = DFlash(self.config | {"tensors": tensors})
        self.begin(module, fused, module.num_drafted)
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
        size, places = self.module.block_size, windows.shape[1] - 1
        row = torch.arange(size, device=windows.device)
        block = torch.full((batch, count, size), self.module.mask_token_id, device=windows.device, dtype=torch.int64)
        block[..., 0] = windows.gather(1, roots)
        text = torch.arange(places, device=windows.device)
        before = (text < roots[..., None])[:, :, None].expand(-1, -1, size, -1).flatten(1, 2)
        owner = torch.arange(count, device=windows.device).repeat_interleave(size)
        same = owner[:, None] == owner
        if self.module.causal_head:
            same = same.tril()
        rows = Blocks(torch.cat([before, same.expand(batch, -1, -1)], -1))
        with self.options.autocast():
            features = self.module.fuse([state[:, :places] for state in states])
            self.module.store(features, text.expand(batch, -1), rows)
            at = (roots[..., None] + row).flatten(1)
            hidden = self.module.norm(self.module(self.embedded(block.flatten(1)), None, at, rows))
        hidden = hidden.unflatten(1, (count, size))[:, :, size - self.guesses :]
        logits = output_logits(self.options, self.target, hidden)
        if self.module.edges is None:
            return logits, None
        known = self.places(roots)
        tokens = windows[:, None].expand(-1, count, -1).gather(2, known).flatten(0, 1)  # before each guess
        paths = hidden.flatten(0, 1)
        with self.options.autocast():
            logits = self.module.edges(logits.flatten(0, 1), paths, tokens)[0].unflatten(0, (batch, count))
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


# ---- Heads that let a target draft for itself: what ``gsd-kernels train-heads`` does.
#
# The target is frozen (Medusa-1, arXiv 2401.10774, section 2.2.1); its own distributions serve as labels at no cost,
# since its hidden states are at hand.


class HeadTraining(UnrolledTraining):
    """Heads that learn from their target: levels that all read its last hidden state, and none the one before.

    Raises:
        ValueError: blocks too short for so many heads, or a target that changes its logits after its output matrix.
    """

    kind = "heads"

    def __init__(self, options: TrainingOptions, target: PreTrainedModel, num_heads: int, num_layers: int) -> None:
        super().__init__(options, target, {"heads": num_heads, "layers": num_layers})
        self.guesses = num_heads
        self.module = DraftHeads.for_model(target, num_heads, num_layers=num_layers).to(options.weights)
        if options.length <= num_heads:
            raise ValueError(f"length: expected more than the {num_heads} heads, got {options.length}")
        check_output_matrix("draft heads", options, target)

    @torch.no_grad()
    def read(self, windows: Tensor) -> tuple[list[Tensor], Tensor]:
        """The last hidden state [B, N, D], which the output matrix reads, and the target's log-probabilities."""
        with self.options.autocast():
            hidden = self.target.base_model(windows, use_cache=False).last_hidden_state
        return [hidden], output_logits(self.options, self.target, hidden).log_softmax(-1)

    def levels(self, windows: Tensor, states: list[Tensor]) -> list[Tensor]:
        """See :meth:`UnrolledTraining.levels`: a level is a head."""
        places = windows.shape[1] - 1 - self.guesses
        read = self.module.states(states[0][:, :places].flatten(0, 1))  # [rows, heads, D]
        heads = (output_logits(self.options, self.target, read[:, k]) for k in range(self.guesses))
        return [logits.unflatten(0, (len(windows), places)) for logits in heads]


def train_heads(num_heads: int, num_layers: int, options: TrainingOptions) -> dict[str, Any]:
    """Train heads by ``options``; the report that ``training.json`` holds.

    Raises:
        ValueError, OSError, RuntimeError: see :func:`~gsd_kernels_train.job.run`.
    """
    return run(options, lambda target, *_: HeadTraining(options, target, num_heads, num_layers))


# ---- all kinds of drafters


def trainee_of(
    options: TrainingOptions,
    drafter: DrafterOptions,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    read: Callable[[], TrainingText],
) -> DrafterTraining:
    """The training of a kind; ``read`` gives the text."""
    if drafter.kind == "mtp":
        return MtpTraining(options, target, drafter)
    if drafter.kind != "eagle3":
        return DFlashTraining(options, target, drafter, tokenizer)
    size = vocabulary(target)
    count = min(size, LARGEST_DRAFT_VOCABULARY) if drafter.draft_vocabulary is None else drafter.draft_vocabulary
    if count > size:
        raise ValueError(f"draft_vocabulary: expected at most the target's {size} tokens, got {count}")
    text = read().training
    learned = text.tokens if text.counted is None else text.tokens[text.counted]
    often = np.argsort(-np.bincount(learned, minlength=size)[:size], kind="stable")[:count]  # of equals the lower ids
    return Eagle3Training(options, target, drafter, torch.from_numpy(np.sort(often).astype(np.int64)))


def train_drafter(drafter: DrafterOptions, options: TrainingOptions) -> dict[str, Any]:
    """Train a drafter by ``options``; the report that ``training.json`` holds.

    Raises:
        ValueError, OSError, RuntimeError: see :func:`~gsd_kernels_train.job.run`.
    """
    return run(options, partial(trainee_of, options, drafter))
