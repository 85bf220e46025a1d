"""Multi-token prediction: the head that came in the target's own checkpoint, used recursively over a graph.

DeepSeek-V3 (arXiv 2412.19437, section 2.2). One decoder layer of the target's own class reads at every position the
target's last hidden state and the embedding of the token after, both normed and projected together; its normed output
goes through the target's output matrix. Drafted tokens have no hidden state of the target's, so the head's own output
stands in for it. transformers uses each head once, and so drafts as many tokens as there are heads, mostly one.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from gsd_kernels.ops.feature_rows import Projection

from ..model.attention import GraphInputs, implementation_of
from ..model.cache import GraphCache
from ..model.hidden import decoder_of
from ..model.probe import in_words
from ..model.properties import device_of, text_config
from ..validate import SERVED_LAYERS
from .checkpoints import BELONGS, WEIGHTS, BadCheckpoint, Checkpoint, bad, check_sizes, fetch, files_of, shapes_of
from .feature_drafter import HiddenDrafter, Shapes
from .layouts import QUANTISED, HeadLayout, find_heads, looked_for

logger = logging.getLogger("gsd_kernels")
KIND = "multi-token-prediction"
FIRST = "*.json", WEIGHTS
"""Of a target's checkpoint what is fetched first: the index of its files, or an only one."""
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Weights of all experts in one tensor, as transformers holds them: [E, 2 · inner, D] and [E, D, inner]; of what."""


class Block(NamedTuple):
    """A decoder layer that a head may have, without weights.

    Attributes:
        module: on the meta device.
        config: its own, all layers of one type.
        index: of the target's layer that it resembles.
        attention: its type, as in ``layer_types``; ``None`` where the target's layers have none.
        target: whose layers these are.
    """

    module: nn.Module
    config: PretrainedConfig
    index: int
    attention: str | None
    target: PreTrainedModel


@contextmanager
def making(what: str, target: PreTrainedModel) -> Iterator[None]:
    """Refuse a target of which a part cannot be made by itself."""
    try:
        yield
    except Exception as error:  # whatever the part's own code says
        raise bad(
            f"{what} of {type(target).__name__} cannot be made by itself: {error}; its {KIND} heads are not served"
        ) from error


def blocks_of(target: PreTrainedModel) -> Iterator[Block]:
    """Every decoder layer that differs from the others in its parts or its type of attention.

    Raises:
        BadCheckpoint: they cannot be made.
    """
    layers, _ = decoder_of(target)
    config = text_config(target)
    types = sorted(set(getattr(config, "layer_types", None) or ()) & SERVED_LAYERS) or [None]
    different = {(*map(type, layer.children()),): index for index, layer in reversed([*enumerate(layers)])}
    for index in sorted(different.values()):
        for attention in types:
            own = copy.deepcopy(config)
            own._attn_implementation_internal = implementation_of(config)
            with making("a layer", target), torch.device("meta"):
                if attention is not None:
                    own.layer_types = [attention] * len(layers)
                module = type(layers[index])(own, index)
            for part in module.modules():
                if hasattr(part, "layer_idx"):
                    part.layer_idx = 0  # of the head's own cache
            yield Block(module.eval().requires_grad_(False), own, index, attention, target)


def stored_as(name: str, shape: tuple[int, ...], files: Mapping[str, Any]) -> Shapes:
    """The tensors of a checkpoint that make up one of a layer: itself, or one of each expert and matrix, in order."""
    experts, _, what = name.rpartition(".")
    if name in files or not experts.endswith(".experts") or what not in EXPERTS or len(shape) != 3:
        return {name: shape}
    part = (shape[1] // len(EXPERTS[what]), shape[2])
    return {f"{experts}.{i}.{matrix}.weight": part for i in range(shape[0]) for matrix in EXPERTS[what]}


def block_for(files: Shapes, target: PreTrainedModel, attention: str | None, named: object) -> Block:
    """The target's decoder layer that has these tensors, or most of them: what is missing, reading them says.

    Args:
        files: names, shapes of the head's tensors.
        target: whose layers are looked at.
        attention: type of the layer where neither tensors nor the config tell; ``None``: no such layer is served.
        named: the checkpoint's ``mtp_layer_types``, for a target whose config has none.

    Raises:
        BadCheckpoint: layers of several types have them.
    """
    found, there = [], {name for name in files if name.startswith("block.")}
    for block in blocks_of(target):
        tensors = shapes_of(block.module).items()
        stored = {part for name, shape in tensors for part in stored_as(f"block.{name}", shape, files)}
        found.append((len(stored ^ there), block))
    wrong, nearest = min(found, key=lambda one: one[0])
    kinds = {block.attention: block for strange, block in reversed(found) if strange == wrong}
    named = getattr(nearest.config, "mtp_layer_types", None) or named
    if wrong or (len(kinds) == 1 and not named):
        return nearest
    wanted = named[0] if isinstance(named, (list, tuple)) and named else attention
    if wanted not in kinds:
        raise bad(
            f"the decoder layer of the {KIND} head may be one of {type(target).__name__}'s layers with "
            f"{' or '.join(map(str, reversed(kinds)))}, and its config's mtp_layer_types is {named!r}"
        )
    return kinds[wanted]


class Mtp(HiddenDrafter):
    """A head of a target's checkpoint: ``patch(model, drafter="mtp")``, or ``Mtp.from_pretrained(folder, model)``.

    Embedding, output matrix and rotary embedding are the target's.

    Args:
        layout: how it is wired.
        block: its decoder layer.
        bias: whether the projection has one.
    """

    name, kind = "mtp", KIND
    embed_tokens = lm_head = d2t = None  # the target's, of all tokens

    def __init__(self, layout: HeadLayout, block: Block, *, bias: bool) -> None:
        super().__init__()
        self.layout, self.sizes = layout, block.config
        self.windows = (block.config.sliding_window if block.attention == "sliding_attention" else None,)
        size = block.config.hidden_size
        _, norm = decoder_of(block.target)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        with making("the norm", block.target):
            self.embedding_norm, self.hidden_norm, self.norm = (type(norm)(size, eps=eps) for _ in range(3))
        self.projection = nn.Linear(2 * size, size, bias=bias)
        self.block = block.module
        self.layers = [self.block]
        with making("the rotary embedding", block.target):
            rotary = block.target.get_decoder().rotary_emb
            typed = "layer_type" in inspect.signature(rotary.forward).parameters
            self.rotary = partial(copy.deepcopy(rotary), **({"layer_type": block.attention} if typed else {}))
        self.runs = False  # whether that is known

    @classmethod
    def from_pretrained(
        cls, where: str | os.PathLike[str], target: PreTrainedModel, *, revision: str | None = None
    ) -> Mtp:
        """The first head in a checkpoint, on ``target``'s device and in its precision.

        Args:
            where: folder or hub id of a checkpoint of ``target``, or of a copy whose heads were trained further.
            target: whose checkpoint it is.
            revision: commit of the hub; ``None``: its newest.

        Raises:
            ValueError: no heads, of a layout or a decoder layer that is not served, or another model's; no weight was
                read.
        """
        folder, (layers, norm) = fetch(where, wanted=FIRST, revision=revision), decoder_of(target)
        files = files_of(folder)
        heads = find_heads(files, len(layers))
        if heads is None:
            others = [name for name in files if "mtp" in name.lower() or "nextn" in name.lower()]
            strange = f"; it has {others[0]}, of a layout that is not served" if others else ""
            raise bad(f"{where} has no {KIND} heads; looked for were {looked_for(len(layers))}{strange}")
        layout, prefix = heads
        own = {
            name: ours
            for name in files
            if name.startswith(prefix) and (ours := layout.own_name(name.removeprefix(prefix))) is not None
        }
        quantised = next((name for name in own if name.endswith(QUANTISED)), None)
        if quantised is not None:
            raise bad(
                f"the {KIND} heads in {where} are quantised ({quantised}); served are floating point and FP8 in blocks "
                "(weight_scale_inv)"
            )
        # Of the many files of a target only those that hold them.
        fetch(where, wanted=sorted({files[name] for name in own}), revision=revision)
        checkpoint = Checkpoint.open(folder, own.get)
        checkpoint.published = lambda name: layout.published_name(name, prefix)
        shapes = checkpoint.shapes
        block = block_for(shapes, target, layout.attention, checkpoint.config.get("mtp_layer_types"))
        with torch.device("meta"):
            module = cls(layout, block, bias="projection.bias" in shapes)
        module.check_target(target)
        weights = {} if layout.norm else {"norm.weight": norm.weight.detach().clone()}
        wanted = {name: shape for name, shape in shapes_of(module).items() if name not in weights}
        stored = {name: stored_as(name, shape, shapes) for name, shape in wanted.items()}
        weights |= checkpoint.stacked(stored, wanted)  # experts one after the other, each with its gate before
        # In the target's precision, and what it keeps in a finer one, as the biases of routers, in that.
        kept = layers[block.index].state_dict().items()
        finer = {f"block.{name}": value.dtype for name, value in kept if value.is_floating_point()}
        device = device_of(target)
        weights = {name: value.to(device, finer.get(name, target.dtype)) for name, value in weights.items()}
        module.load_state_dict(weights, assign=True)
        return module.eval().requires_grad_(False)

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise unless the head belongs to a target of this kind.

        Raises:
            ValueError: the difference and the cure.
        """
        check_sizes(KIND, self.sizes.vocab_size, self.sizes.hidden_size, target)
        mine, theirs = type(self.block), type(decoder_of(target)[0][0])
        if mine is not theirs:
            raise bad(
                f"this {KIND} head is a {mine.__name__}, and the target's layers are {theirs.__name__}; {BELONGS}"
            )

    @torch.no_grad()
    def check_block(self) -> None:
        """Raise unless the layer is content with what a head has for it; a token shows it, once.

        Layers may read more than hidden states and positions, as Gemma 3n's do, or attend twice, as DiffLlama's.

        Raises:
            BadCheckpoint: what it does instead.
        """
        if self.runs:
            return
        one = self.projection.weight.new_zeros(1, 1, self.sizes.hidden_size)
        place = torch.zeros(1, 1, dtype=torch.int32, device=one.device)
        graph = GraphInputs(place[..., None] + 1, place[0], place[0], place, place)  # a token that sees itself alone
        try:
            self(one, one, place.long(), graph, GraphCache(self.sizes, 1))
            if graph.calls != 1:
                raise RuntimeError(f"it attends {graph.calls} times")
        except Exception as error:  # whatever a layer's own code says
            raise bad(
                f"a {type(self.block).__name__} cannot be forwarded as a {KIND} head, which has hidden states, "
                f"positions and a cache for it ({in_words(error)}); not supported"
            ) from error
        self.runs = True

    def first_parameters(self) -> dict[str, Any]:
        """Parameters for embedding and feature, as :class:`~gsd_kernels.ops.feature_rows.FeatureWeights` has them."""
        weight, bias = self.projection.weight, self.projection.bias
        made = Projection(weight, self.embedding_norm.weight, bias, self.layout.hidden_first)
        return {"feature_norm": self.hidden_norm.weight, "projection": made}

    def layers_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """The target's hidden state that a head reads: what leaves its final norm."""
        return (len(decoder_of(target)[0]),)

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        """The feature of the target's hidden states: what leaves its final norm, [B, n, D]."""
        return hidden[0]

    def begin(self, embedded: Tensor, features: Any, options: Any) -> tuple[Tensor, Iterable[nn.Module]]:
        """Both projected together, and the layer."""
        both = [self.embedding_norm(embedded), self.hidden_norm(features)]
        return self.projection(torch.cat(both[::-1] if self.layout.hidden_first else both, -1)), self.layers


# A target's own checkpoint, where its heads are.


def place_of(target: PreTrainedModel) -> tuple[str, str | None]:
    """Where a target was loaded from: folder or hub id, and the hub's commit.

    Raises:
        BadCheckpoint: it was made here.
    """
    where = target.config.name_or_path
    if not where:
        raise BadCheckpoint(
            'drafter="mtp": the target names no checkpoint (its config.name_or_path is empty), where its '
            "multi-token-prediction heads would be; load it with from_pretrained, or pass "
            "Mtp.from_pretrained(folder, model)"
        )
    return where, getattr(target.config, "_commit_hash", None)


def own_heads(target: PreTrainedModel) -> str | None:
    """A tensor of the heads in the target's checkpoint, as far as that is on this machine; ``None`` without any."""
    try:
        where, revision = place_of(target)
        layers = len(decoder_of(target)[0])
        heads = find_heads(files_of(fetch(where, wanted=FIRST, revision=revision, download=False)), layers)
    except ValueError:  # no checkpoint, or none that can be read: nothing to mention
        return None
    return None if heads is None else heads[0].recognised_by(layers)


def mention_heads(target: PreTrainedModel) -> None:
    """Say in a line of the log if the target's checkpoint, as far as it is on this machine, has heads to draft with."""
    if not logger.isEnabledFor(logging.INFO):  # looking is reading the names of all tensors
        return
    found = own_heads(target)
    if found is not None:
        logger.info(
            "the checkpoint of this model has multi-token-prediction heads (%s …), which are not used; "
            'drafter="mtp" drafts with them',
            found,
        )
