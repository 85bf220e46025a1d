"""EAGLE-3 drafters (arXiv 2503.01840) from the checkpoints that are published, drafting dynamic graphs.

One decoder layer reads at every position a feature of the target and the embedding of the token after. Drafted tokens
have no feature of the target's, so the layer's own output stands in for it: one vector a node, which travels along the
drafted edges. Layouts: SafeAILab's, SpecForge's (which SGLang serves) and that of speculators (which vLLM serves).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..model.attention import Attends, configs_of, switched_configs
from ..model.cache import GraphCache
from ..packed.modules import device_of_weights, dtype_of
from . import checkpoints
from .checkpoints import bad
from .feature_drafter import FeatureConfig, FeatureDrafter, Shapes
from .layouts import EAGLE3, settings_of

if TYPE_CHECKING:
    from typing_extensions import Self

UNITS_AT_ONCE = 64
"""Columns of the target's output matrix that are read at once."""

MASK = "mask_hidden"
"""P-EAGLE's tensor."""

MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names of P-EAGLE's mask token, in the order in which vLLM looks for them."""

TARGET_HEAD = "target_lm_head"
"""Setting of a config of ours: the output matrix is not stored, see :attr:`Eagle3Config.own_head`."""

PARALLEL = 8
"""Tokens that P-EAGLE drafts at once where a checkpoint does not say it: what ``speculators`` trains by default."""


@dataclass(frozen=True)
class Eagle3Config(FeatureConfig):
    """The config of an EAGLE-3 checkpoint.

    Attributes:
        mask_shape: of P-EAGLE's hidden states of a token that is not known; ``None``: EAGLE-3.
        num_parallel: tokens that P-EAGLE drafts in one forward.
        norm_before_residual: whether the residual of the first layer is the normed feature.
        norm_before_fc: whether the hidden states are normed together before they are fused.
        fc_norm: whether they are normed each by itself.
        norm_output: whether a node's vector is the normed output, which the output matrix reads.
    """

    mask_shape: tuple[int, ...] | None
    num_parallel: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], tensors: Shapes) -> Eagle3Config:
        """Read a ``config.json``, beside which there are tensors of these shapes.

        Raises:
            BadCheckpoint: a setting is missing, impossible, or not served.
        """
        said, fused = settings_of(config, EAGLE3)
        mask_shape = tensors.get(MASK)
        read = cls.read(
            said,
            tensors,
            hidden_layers=fused,
            own_head=not checkpoints.flag(said, TARGET_HEAD),
            mask_shape=mask_shape,
            **parallel_settings(config, said, mask_shape),
        )
        scale = said.get("logit_scale")
        checkpoints.refuse(
            {
                f"logit_scale={scale!r} in its config; only 1 is served": scale not in (None, 1),
                "its config sets norm_before_fc and fc_norm, of which a drafter has one at most": (
                    read.norm_before_fc and read.fc_norm
                ),
                f"its {MASK} is {list(mask_shape or ())}, and its config means {read.fused_width} numbers": (
                    mask_shape is not None and math.prod(mask_shape) != read.fused_width
                ),
            }
        )
        return read

    @property
    def num_fused(self) -> int:
        """Hidden states that are fused."""
        return 3 if self.hidden_layers is None else len(self.hidden_layers)

    @property
    def fused_width(self) -> int:
        """Numbers of all of them together."""
        return self.num_fused * self.target_hidden_size


def parallel_settings(config: Mapping[str, Any], said: Mapping[str, Any], mask: tuple[int, ...] | None) -> Any:
    """Read of a P-EAGLE checkpoint, which has a tensor of this shape for masks, what EAGLE-3's has not.

    Raises:
        BadCheckpoint: no mask token, settings that are impossible, or such a config without the tensor.
    """
    if mask is None:
        named = [config.get("speculators_model_type"), config.get("architectures")]
        if "peagle" in str(named).lower() or said.get("parallel_drafting"):
            raise bad(f"a P-EAGLE checkpoint without its tensor {MASK}")
        return {"mask_token_id": None, "num_parallel": 1}
    token = next((name for name in MASK_TOKENS if name in said), None)
    if token is None:
        raise bad(f"a P-EAGLE checkpoint whose config has no mask token: {', '.join(MASK_TOKENS)}")
    spec = said.get("speculators_config")
    methods = spec.get("proposal_methods") if isinstance(spec, dict) else None
    trained = [method for method in methods or () if isinstance(method, dict) and "speculative_tokens" in method]
    count = max((checkpoints.number(method, "speculative_tokens") for method in trained), default=PARALLEL)
    return {"mask_token_id": checkpoints.number(said, token, least=0), "num_parallel": count}


class Eagle3(FeatureDrafter):
    """An EAGLE-3 drafter: ``gsd_kernels.patch(model, drafter=Eagle3.from_pretrained(folder_or_id, model))``.

    Args:
        config: see :class:`Eagle3Config`.
    """

    read_config = Eagle3Config.of

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        layers, width = config.layers, config.fused_width
        size, eps = layers.hidden_size, layers.rms_norm_eps
        self.input_norm = LlamaRMSNorm(width, eps) if config.norm_before_fc else None
        norms = [LlamaRMSNorm(config.target_hidden_size, eps) for _ in range(config.num_fused)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(width, size, bias=False)
        first = self.layers[0]
        first.hidden_norm = LlamaRMSNorm(size, eps)
        for name in ("q_proj", "k_proj", "v_proj"):  # of the normed embedding beside the normed feature
            narrow = getattr(first.self_attn, name)
            setattr(first.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))
        self.mask_hidden = None if config.mask_shape is None else nn.Parameter(torch.zeros(config.mask_shape))
        # Of its draft source, and in errors.
        self.name, self.kind = ("eagle3", "EAGLE-3") if config.mask_shape is None else ("p-eagle", "P-EAGLE")
        self.hands_on_normed = config.norm_output  # of a node what the output matrix reads, not the norm before it

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
        units = torch.eye(self.config.layers.hidden_size, dtype=dtype_of(head), device=ids.device)
        rows = torch.cat([head(part)[:, ids] for part in units.split(UNITS_AT_ONCE)]).T
        self.lm_head = nn.Linear(*reversed(rows.shape), bias=False, dtype=weight.dtype, device="meta")
        self.lm_head.weight = nn.Parameter(rows.to(weight).contiguous(), requires_grad=False)

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        """The feature of the target's hidden states, [B, n, Dt] each: [B, n, D]."""
        if self.fc_norm is not None:
            hidden = [norm(state) for norm, state in zip(self.fc_norm, hidden, strict=True)]
        whole = torch.cat(hidden, -1)
        return self.fc(whole if self.input_norm is None else self.input_norm(whole))

    def first_parameters(self) -> dict[str, Any]:
        """Parameters of the first layer that :class:`~gsd_kernels.ops.feature_rows.FeatureWeights` has by name."""
        feature_norm = self.layers[0].hidden_norm.weight.detach()
        return {"feature_norm": feature_norm, "normed_residual": self.config.norm_before_residual}

    def mask_feature(self) -> Tensor:
        """The feature that stands for that of a token which is not known, [D]."""
        parts: tuple[Tensor, ...] = self.mask_hidden.reshape(1, 1, -1).chunk(self.config.num_fused, -1)
        return self.fuse([*parts])[0, 0]

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, graph: Attends, cache: GraphCache | None = None
    ) -> Tensor:
        """The layers' output before the last norm.

        Args:
            embedded: [B, R, D], of the token after each position.
            features: [B, R, D], of the target, or vectors of drafted nodes' parents.
            positions: int64 [B, R].
            graph, cache: see :meth:`HiddenDrafter.options`.

        Returns:
            [B, R, D].
        """
        options, (first, *later) = self.options(features, positions, graph, cache), self.layers
        normed = first.hidden_norm(features)
        hidden = normed if self.config.norm_before_residual else features
        with switched_configs(configs_of(self.layers)):
            both = torch.cat([first.input_layernorm(embedded), normed], -1)
            hidden = hidden + first.self_attn(both, **options)[0]
            hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
            for layer in later:
                hidden = layer(hidden, **options)
        return hidden

    def outputs(self, hidden: Tensor, head: Any = None) -> tuple[Tensor, Tensor]:
        """The vectors that nodes hand on [B, R, D], and logits over the draft vocabulary [B, R, V]."""
        normed = self.norm(hidden)
        return normed if self.hands_on_normed else hidden, self.lm_head(normed)
