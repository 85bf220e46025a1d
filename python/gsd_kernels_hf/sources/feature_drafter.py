"""Drafters that read the target's hidden states: transformers' decoder layers, over a cache of graph rows.

All of them have layers, a norm behind them and a rotary embedding. EAGLE-3 and DFlash come from checkpoints of their
own, which say the sizes of their layers and may bring an embedding, an output matrix and a vocabulary.

EAGLE-3 (arXiv 2503.01840) is here: one decoder layer reads at every position a feature of the target and the embedding
of the token after. Drafted tokens have no feature of the target's, so the layer's own output stands in for it: one
vector a node, which travels along the drafted edges. Layouts: SafeAILab's, SpecForge's (which SGLang serves) and that
of speculators (which vLLM serves).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from ..model.attention import Attends, configs_in, switched_configs
from ..model.fused import STATIC_ROPE
from ..model.properties import cache_argument, text_config
from ..packed.modules import device_of_weights, dtype_of, shape_of
from .checkpoints import Checkpoint, bad, check_sizes, fetch, flag, move_to, number, refuse
from .layouts import EAGLE3, settings_of, weight_name

if TYPE_CHECKING:
    from typing_extensions import Self


Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors, by name."""

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of a row's position, [B, R, head_dim] each."""

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

    def turns(self, like: Tensor, positions: Tensor) -> Turns:
        """The rotation of int positions [B, R], in the dtype and on the device of ``like``."""
        self.rotary.func.to(like.device)
        turns: Turns = self.rotary(like, positions)
        return turns

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
        refuse(
            {
                f"logit_scale={scale!r} in its config; only 1 is served": scale not in (None, 1),
                "its config sets norm_before_fc and fc_norm, of which a drafter has one at most": before and each,
                f"a P-EAGLE checkpoint without its tensor {MASK}": (
                    mask is None and ("peagle" in named or said.get("parallel_drafting"))
                ),
                f"its {MASK} is {list(mask or ())}, and its config means {width} numbers": (
                    mask is not None and math.prod(mask) != width
                ),
            }
        )
        self.name, self.kind, self.mask_hidden = "eagle3", "EAGLE-3", None
        if mask is not None:
            self.name, self.kind, self.mask_hidden = "p-eagle", "P-EAGLE", nn.Parameter(torch.zeros(mask))
            token = next((name for name in MASK_TOKENS if name in said), MASK_TOKENS[0])
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
