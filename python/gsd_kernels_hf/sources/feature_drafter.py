"""Drafters that read the target's hidden states: transformers' decoder layers, over a cache of graph rows.

All of them have layers, a norm behind them and a rotary embedding. EAGLE-3 and DFlash come from checkpoints of their
own, which say the sizes of their layers and may bring an embedding, an output matrix and a vocabulary.

EAGLE-3 (arXiv 2503.01840) and multi-token prediction are here: one decoder layer reads at every position a feature of
the target and the embedding of the token after. Drafted tokens have no feature of the target's, so the layer's own
output stands in for it: one vector a node, which travels along the drafted edges. EAGLE-3's layouts: SafeAILab's,
SpecForge's (which SGLang serves) and that of speculators (which vLLM serves).
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from gsd_kernels.ops.feature_rows import Projection

from ..model.attention import Attends, GraphInputs, configs_in, implementation_of, switched_configs
from ..model.cache import GraphCache
from ..model.fused import STATIC_ROPE
from ..model.hidden import decoder_of
from ..model.probe import in_words
from ..model.properties import cache_argument, device_of, text_config
from ..packed.modules import device_of_weights, dtype_of, shape_of
from ..validate import SERVED_LAYERS
from .checkpoints import (
    BELONGS,
    WEIGHTS,
    Checkpoint,
    Shapes,
    bad,
    check_sizes,
    fetch,
    files_of,
    flag,
    move_to,
    number,
    refuse,
    shapes_of,
)
from .layouts import EAGLE3, QUANTISED, HeadLayout, find_heads, looked_for, settings_of, weight_name

if TYPE_CHECKING:
    from typing_extensions import Self


logger = logging.getLogger("gsd_kernels")

SETTINGS = (
    "rms_norm_eps hidden_act attention_bias mlp_bias rope_theta rope_scaling rope_parameters max_position_embeddings "
    "layer_types sliding_window use_sliding_window max_window_layers partial_rotary_factor"
).split()
"""Of a drafter's config, those that its layers depend on, beside sizes."""

LAYERS: dict[str, type[nn.Module]] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
"""By ``model_type``."""


class HiddenDrafter(nn.Module):
    """A drafter whose decoder layers are transformers' own, forwarded over rows of a graph.

    Attributes:
        kind: in errors.
        sizes: config of the layers.
        layers, norm: the decoder layers, and the norm behind them.
        rotary: position → rotation: the forward of a module of transformers, which is no part of this one since a
            module's casts would round its frequencies.
        windows: the sliding window of every layer.
        embed_tokens, lm_head: of its own; ``None``: the target's.
        d2t: what is added to a draft token's id for the target's; ``None``: nothing.
        plain: whether the layers are a decoder's, which may be one operator.
        num_drafted: later positions that one forward gives candidates for; 0: it is used recursively.
        rows_ahead: that lie behind the text in such a forward, at most.
        hands_on_normed: whether a node's vector is what the output matrix reads, not what the norm before it does.
    """

    plain = hands_on_normed = True
    rows_ahead = num_drafted = 0
    rotary: partial[Any]

    def __repr__(self) -> str:
        tokens = self.sizes.vocab_size if self.d2t is None else len(self.d2t)
        sizes = f"{len(self.layers)} layer(s) of width {self.sizes.hidden_size}, vocabulary of {tokens:,} tokens"
        return f"<{type(self).__name__}: {self.kind}, {sizes}>"

    def begin(self, embedded: Tensor, features: Any, options: Any) -> tuple[Tensor, Iterable[nn.Module]]:
        """Hidden states [B, R, D], and the layers that they go through: all, or those behind what is computed here."""
        return embedded, self.layers

    def forward(self, embedded: Tensor, features: Any, positions: Tensor, graph: Attends, cache: Any = None) -> Tensor:
        """The layers' output before the last norm.

        Args:
            embedded: [B, R, D], of the token after each position; of a block the root's and those of masks.
            features: [B, R, D], of the target, or vectors of drafted nodes' parents; ``None`` of a block.
            positions: int64 [B, R], in the text.
            graph: what the rows see.
            cache: where keys and values go; ``None``: nowhere.

        Returns:
            [B, R, D].
        """
        options = {
            "attention_mask": None,
            "position_ids": positions,
            "position_embeddings": self.turns(embedded if features is None else features, positions),
            "use_cache": cache is not None,
            "graph": graph,
            cache_argument(self.layers[0]): cache,
        }
        with switched_configs(configs_in(self.modules())):
            hidden, layers = self.begin(embedded, features, options)
            for layer in layers:
                hidden = layer(hidden, **options)
        return hidden

    def turns(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of int positions [B, R], [B, R, head_dim] each, like ``like`` in dtype and device."""
        self.rotary.func.to(like.device)
        return self.rotary(like, positions)  # type: ignore[no-any-return]

    def outputs(self, hidden: Tensor, head: Any = None) -> tuple[Tensor, Tensor]:
        """The vectors that nodes hand on [B, R, D], and logits [B, R, V] by ``head``; ``None``: the drafter's own."""
        normed, head = self.norm(hidden), self.lm_head if head is None else head
        logits = head(normed.to(device_of_weights(head), dtype_of(head)))
        return normed if self.hands_on_normed else hidden, logits

    def check_block(self) -> None:
        """Raise unless the layers can be forwarded, as those of LLaMA and Qwen3 can."""

    def target_ids(self) -> Tensor:
        """The target's id of every draft token, int64 [draft vocabulary]."""
        if self.d2t is None:
            return torch.arange(self.sizes.vocab_size, device=next(self.parameters()).device)
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def layer_config(config: Mapping[str, Any]) -> PretrainedConfig:
    """The sizes, activation and rotary settings of a drafter's decoder layers.

    Args:
        config: flat, as transformers' own; LLaMA's where ``model_type`` is none of :data:`LAYERS`.

    Raises:
        BadCheckpoint: a size is missing or impossible, or frequencies depend on the length.
    """
    size, heads = (number(config, name) for name in ("hidden_size", "num_attention_heads"))
    defaults = {
        "intermediate_size": None,
        "vocab_size": None,
        "num_hidden_layers": 1,
        "num_key_value_heads": heads,
        "head_dim": size // heads,
    }
    own = {"hidden_size": size, "num_attention_heads": heads}
    own |= {name: number(config, name, default=value) for name, value in defaults.items()}
    own |= {name: config[name] for name in SETTINGS if config.get(name) is not None}
    kind = config["model_type"] if config.get("model_type") in LAYERS else "llama"
    try:
        found: PretrainedConfig = AutoConfig.for_model(kind, **own)
    except (TypeError, ValueError, KeyError) as error:
        raise bad(f"its config describes no decoder layer: {error}") from error
    queries, keys = found.num_attention_heads, found.num_key_value_heads
    rope = (found.rope_parameters or {}).get("rope_type", "default")
    refuse(
        {
            f"num_attention_heads={queries} in its config is no multiple of num_key_value_heads={keys}": queries % keys,
            f"hidden_act={found.hidden_act!r} in its config; only 'silu' is served": found.hidden_act != "silu",
            f"rope type {rope!r} in its config; served are {', '.join(STATIC_ROPE)}, whose frequencies do not depend "
            "on the length": rope not in STATIC_ROPE,
        }
    )
    found._attn_implementation = "sdpa"
    return found


class FeatureDrafter(HiddenDrafter):
    """A drafter from a checkpoint of its own.

    Args:
        said: all that its config says, see :func:`~gsd_kernels_hf.sources.layouts.settings_of`.
        own_head: whether there is an output matrix among them; else the target's is used.
        layer: class of the decoder layers; ``None``: by the config.

    Attributes:
        hidden_layers: hidden states that are fused, as transformers' ``hidden_states[i]``; ``None``: layers 2, L // 2
            and L − 3 of a target of L layers.
        target_hidden_size: Dt, width of the target's hidden states.
        mask_token_id: whose embedding stands for a token to be drafted; ``None``: there is none.

    Raises:
        BadCheckpoint: a setting is missing, impossible, or not served.
    """

    mask_token_id: int | None = None

    def __init__(
        self,
        said: Mapping[str, Any],
        *,
        own_head: bool,
        layer: Callable[[PretrainedConfig, int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes = layer_config(said)
        vocab, size, make = sizes.vocab_size, sizes.hidden_size, layer or LAYERS[sizes.model_type]
        self.draft_vocab_size = drafted = number(said, "draft_vocab_size", default=vocab)
        if drafted > vocab:
            raise bad(f"draft_vocab_size={drafted} in its config is more than vocab_size={vocab}")
        self.hidden_layers: tuple[int, ...] | None = said["hidden_layers"]
        self.target_hidden_size = number(said, "target_hidden_size", default=size)
        with torch.device("cpu"):
            self.rotary = partial(LlamaRotaryEmbedding(sizes))
        self.embed_tokens = nn.Embedding(vocab, size) if "embed_tokens.weight" in said["tensors"] else None
        types = getattr(sizes, "layer_types", None) or [None] * sizes.num_hidden_layers
        self.windows = [sizes.sliding_window if kind == "sliding_attention" else None for kind in types]
        self.layers = nn.ModuleList(make(sizes, at) for at in range(sizes.num_hidden_layers))
        self.norm = LlamaRMSNorm(size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(size, drafted, bias=False) if own_head else None
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64) if drafted < vocab else None)

    @classmethod
    def from_pretrained(cls, where: str | os.PathLike[str], target: PreTrainedModel | None = None) -> Self:
        """A drafter from a folder or hub id: as stored, or with ``target``'s dtype and device.

        Raises:
            ValueError: no checkpoint of this kind that can be served, or not one of ``target``'s; nothing was loaded.
        """
        checkpoint = Checkpoint.open(fetch(where), weight_name)
        with torch.device("meta"):
            module = cls(checkpoint.config | {"tensors": checkpoint.shapes})  # type: ignore[call-arg]
        if target is not None:
            module.check_target(target)
        if module.d2t is None:
            checkpoint.files.pop("d2t", None)  # the identity
        checkpoint.load_into(module)
        if module.d2t is not None:
            ids, size = module.target_ids(), module.sizes.vocab_size
            far = int(ids.min() if ids.min() < 0 else ids.max())
            refuse(
                {
                    f"d2t maps a draft token to {far}, outside the vocabulary of {size}": not 0 <= far < size,
                    "d2t maps two draft tokens to one token of the target": len(ids.unique()) < len(ids),
                }
            )
        move_to(module, target)
        return module

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise unless the drafter fits a target's vocabulary, width and layers.

        Raises:
            ValueError: the difference and the cure.
        """
        kind, own, mask, theirs = self.kind, self.embed_tokens, self.mask_token_id, self.target_hidden_size
        width, vocab = self.sizes.hidden_size, self.sizes.vocab_size
        check_sizes(kind, vocab, theirs, target, self.layers_of(target))
        what = "embedding" if own is None else "output matrix"
        rows, _ = shape_of(target.get_input_embeddings() if own is None else own)
        refuse(
            {
                f"this {kind} drafter has no {what} of its own, and is {width} wide where the target's {what} is "
                f"{theirs}": (own is None or self.lm_head is None) and width != theirs,
                f"this {kind} drafter's mask token {mask} has no row in an embedding of {rows}": (
                    mask is not None and mask >= rows
                ),
            }
        )

    def layers_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """The target's hidden states that are fused."""
        count = int(text_config(target).num_hidden_layers)
        return self.hidden_layers or (2, count // 2, count - 3)


# EAGLE-3 and P-EAGLE.

UNITS_AT_ONCE = 64
"""Columns of the target's output matrix that are read at once."""
MASK = "mask_hidden"
"""P-EAGLE's tensor."""
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names of P-EAGLE's mask token, in the order in which vLLM looks for them."""
TARGET_HEAD = "target_lm_head"
"""Setting of a config of ours: the output matrix is not stored, but the target's is used."""
PARALLEL = 8
"""Tokens that P-EAGLE drafts at once where a checkpoint does not say it: what ``speculators`` trains by default."""


class Eagle3(FeatureDrafter):
    """An EAGLE-3 drafter: ``gsd_kernels.patch(model, drafter=Eagle3.from_pretrained(folder_or_id, model))``.

    Args:
        config: as of :func:`~gsd_kernels_hf.sources.layouts.settings_of`; with a tensor :data:`MASK` it is P-EAGLE.

    Attributes:
        num_fused: hidden states that are fused.
        normed_residual: whether the residual of the first layer is the normed feature.
        input_norm: of all hidden states together before they are fused; ``None``: there is none.
        fc_norm: of each by itself, likewise.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        said = settings_of(config, EAGLE3)
        super().__init__(said, own_head=not flag(said, TARGET_HEAD))
        mask, spec = said["tensors"].get(MASK), said.get("speculators_config")
        self.num_fused = 3 if self.hidden_layers is None else len(self.hidden_layers)
        size, eps, width = self.sizes.hidden_size, self.sizes.rms_norm_eps, self.num_fused * self.target_hidden_size
        before, each, self.normed_residual, self.hands_on_normed = (
            flag(said, name) for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
        )
        named = f"{config.get('speculators_model_type')}, {config.get('architectures')}".lower()
        scale = said.get("logit_scale")
        token = next((name for name in MASK_TOKENS if name in said), "")
        refuse(
            {
                f"logit_scale={scale!r} in its config; only 1 is served": scale not in (None, 1),
                "its config sets norm_before_fc and fc_norm, of which a drafter has one at most": before and each,
                f"a P-EAGLE checkpoint without its tensor {MASK}": (
                    mask is None and ("peagle" in named or said.get("parallel_drafting"))
                ),
                f"a P-EAGLE checkpoint whose config has no mask token: {', '.join(MASK_TOKENS)}": mask and not token,
                f"its {MASK} is {list(mask or ())}, and its config means {width} numbers": (
                    mask is not None and math.prod(mask) != width
                ),
            }
        )
        self.name, self.kind, self.mask_hidden = "eagle3", "EAGLE-3", None
        if mask is not None:
            self.name, self.kind, self.mask_hidden = "p-eagle", "P-EAGLE", nn.Parameter(torch.zeros(mask))
            self.mask_token_id = number(said, token, least=0)
            methods = spec.get("proposal_methods") if isinstance(spec, dict) else None
            trained = [one for one in methods or () if isinstance(one, dict) and "speculative_tokens" in one]
            self.num_drafted = max((number(one, "speculative_tokens") for one in trained), default=PARALLEL)
            self.rows_ahead = self.num_drafted - 1
        self.input_norm = LlamaRMSNorm(width, eps) if before else None
        norms = (LlamaRMSNorm(self.target_hidden_size, eps) for _ in range(self.num_fused))
        self.fc_norm = nn.ModuleList(norms) if each else None
        self.fc = nn.Linear(width, size, bias=False)
        first = self.layers[0]
        first.hidden_norm = LlamaRMSNorm(size, eps)
        for name in ("q_proj", "k_proj", "v_proj"):  # of the normed embedding beside the normed feature
            narrow = getattr(first.self_attn, name)
            setattr(first.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))

    @classmethod
    def from_pretrained(cls, where: str | os.PathLike[str], target: PreTrainedModel | None = None) -> Self:
        """See :meth:`FeatureDrafter.from_pretrained`; ``target`` is needed where its output matrix is the drafter's."""
        drafter = super().from_pretrained(where, target)
        if drafter.lm_head is None:
            if target is None:
                raise bad(f"this EAGLE-3 drafter in {where} drafts by its target's output matrix; pass the target too")
            drafter.share_head(target)
        return drafter

    @torch.no_grad()
    def share_head(self, target: PreTrainedModel) -> None:
        """Take the target's rows of the draft vocabulary as output matrix, as they are now; they are not trained.

        However the target holds them: a row is what its output matrix makes of unit vectors.
        """
        head, weight = target.get_output_embeddings(), self.fc.weight
        ids = self.target_ids().to(device_of_weights(head))
        units = torch.eye(self.sizes.hidden_size, dtype=dtype_of(head), device=ids.device)
        rows = torch.cat([head(part)[:, ids] for part in units.split(UNITS_AT_ONCE)]).T
        self.lm_head = nn.Linear(*reversed(rows.shape), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(rows.to(weight).contiguous(), requires_grad=False)

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        """The feature of the target's hidden states, [B, n, Dt] each: [B, n, D]."""
        if self.fc_norm is not None:
            hidden = [norm(state) for norm, state in zip(self.fc_norm, hidden, strict=True)]
        whole = torch.cat(hidden, -1)
        return self.fc(whole if self.input_norm is None else self.input_norm(whole))

    def first_parameters(self) -> dict[str, Any]:
        """Parameters of the first layer that :class:`~gsd_kernels.ops.feature_rows.FeatureWeights` has by name."""
        return {
            "feature_norm": self.layers[0].hidden_norm.weight.detach(),
            "normed_residual": self.normed_residual,
        }

    def mask_feature(self) -> Tensor:
        """The feature that stands for that of a token which is not known, [D]."""
        return self.fuse([*self.mask_hidden.reshape(1, 1, -1).chunk(self.num_fused, -1)])[0, 0]

    def begin(self, embedded: Tensor, features: Any, options: Any) -> tuple[Tensor, Iterable[nn.Module]]:
        """The first layer's output, and the others: it reads both, side by side."""
        first, *later = self.layers
        normed = first.hidden_norm(features)
        hidden = normed if self.normed_residual else features
        both = torch.cat([first.input_layernorm(embedded), normed], -1)
        hidden = hidden + first.self_attn(both, **options)[0]
        return hidden + first.mlp(first.post_attention_layernorm(hidden)), later


# Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the head in the target's own checkpoint.
#
# One decoder layer of the target's own class reads at every position the target's last hidden state and the embedding
# of the token after, both normed and projected together; its normed output goes through the target's output matrix.
# transformers uses each head once, and so drafts as many tokens as there are heads, mostly one.

MTP = "multi-token-prediction"
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
            f"{what} of {type(target).__name__} cannot be made by itself: {error}; its {MTP} heads are not served"
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
            f"the decoder layer of the {MTP} head may be one of {type(target).__name__}'s layers with "
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

    name, kind = "mtp", MTP
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
            raise bad(f"{where} has no {MTP} heads; looked for were {looked_for(len(layers))}{strange}")
        layout, prefix = heads
        own = {
            name: ours
            for name in files
            if name.startswith(prefix) and (ours := layout.own_name(name.removeprefix(prefix))) is not None
        }
        quantised = next((name for name in own if name.endswith(QUANTISED)), None)
        if quantised is not None:
            raise bad(
                f"the {MTP} heads in {where} are quantised ({quantised}); served are floating point and FP8 in blocks "
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
        check_sizes(MTP, self.sizes.vocab_size, self.sizes.hidden_size, target)
        mine, theirs = type(self.block), type(decoder_of(target)[0][0])
        if mine is not theirs:
            raise bad(f"this {MTP} head is a {mine.__name__}, and the target's layers are {theirs.__name__}; {BELONGS}")

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
                f"a {type(self.block).__name__} cannot be forwarded as a {MTP} head, which has hidden states, "
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
        raise bad(
            f"the target names no checkpoint (its config.name_or_path is empty), where its {MTP} heads would be; load "
            "it with from_pretrained, or pass Mtp.from_pretrained(folder, model)",
            'drafter="mtp"',
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
    # Looking is reading the names of all tensors.
    if logger.isEnabledFor(logging.INFO) and (found := own_heads(target)) is not None:
        logger.info(
            'the checkpoint of this model has %s heads (%s …), which are not used; drafter="mtp" drafts with them',
            MTP,
            found,
        )
