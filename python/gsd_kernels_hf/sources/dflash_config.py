"""The config of a DFlash checkpoint: DFlash itself, JetSpec, DSpark, DFlash 2, in three layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from . import checkpoints
from .checkpoints import bad
from .config_layouts import NESTED, ConfigLayout, layer_numbers, layout_of

MARKOV_HEADS = ("vanilla", "gated", "rnn")
"""Kinds of DSpark's head."""


LAYERS = "target_layer_ids"
LAYOUTS = (
    ConfigLayout("dflash_config", LAYERS, 1, settings="dflash_config"),  # z-lab
    ConfigLayout(NESTED, "aux_hidden_state_layer_ids", sizes=NESTED),  # speculators
    ConfigLayout(LAYERS, LAYERS, 1, fixed={"sample_from_anchor": True}),  # DeepSpec, whose root's row always drafts
)
"""What published drafters come in; a new layout is a row."""


@dataclass(frozen=True)
class DFlashConfig:
    """The settings in a DFlash checkpoint's config.

    Attributes:
        layers: sizes and rotary settings of the decoder layers; ``vocab_size`` is the target's.
        block_size: rows of the forward, the root's included.
        mask_token_id: whose embedding stands for a token to be drafted.
        hidden_layers: the target's hidden states that are fused, as transformers' ``hidden_states[i]``.
        draft_vocab_size: tokens that it can draft.
        target_hidden_size: Dt, width of the target's hidden states.
        sample_from_anchor: whether the root's row drafts, too; else candidates after it are those of the first mask.
        bidirectional_window: whether rows of a layer with a sliding window see the later ones of the block.
        own_embedding, own_head: whether the checkpoint has these matrices; else the target's are used.
        causal: whether rows of all layers see the earlier ones of the block only (JetSpec).
        markov_rank, markov_type: of DSpark's head, the latter one of :data:`MARKOV_HEADS`; 0: none.
        confidence, confidence_bias: numbers that DSpark's confidence head reads, and whether it has a bias; 0: none.
        selector_rank, selector_top_k: of DFlash 2's head; 0: none.
        taps, group: of DFlash 2's convolutions; 0: none.
    """

    layers: PretrainedConfig
    block_size: int
    mask_token_id: int
    hidden_layers: tuple[int, ...]
    draft_vocab_size: int
    target_hidden_size: int
    sample_from_anchor: bool = False
    bidirectional_window: bool = False
    own_embedding: bool = False
    own_head: bool = False
    causal: bool = False
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: int = 0
    confidence_bias: bool = False
    selector_rank: int = 0
    selector_top_k: int = 0
    taps: int = 0
    group: int = 0

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        *,
        own_embedding: bool,
        own_head: bool,
        confidence: tuple[int, ...] | None = None,
        confidence_bias: bool = False,
    ) -> DFlashConfig:
        """Read a ``config.json``, beside which there are tensors; ``confidence``: the shape of that head's weight.

        Raises:
            BadCheckpoint: a setting is missing, impossible, or not served.
        """
        layout = layout_of(config, LAYOUTS)
        if layout is None:
            raise bad(f"its config has neither {' nor '.join(one.mark for one in LAYOUTS)}")
        said = layout.settings_in(config)
        settings = {"block_size": config.get("block_size"), **checkpoints.set_in(said), **layout.fixed}
        layers = layer_numbers(layout.layers, said.get(layout.layers), shift=layout.shift)
        sizes = checkpoints.layer_config({**layout.sizes_in(config), "model_type": "qwen3"}, "qwen3")
        draft_vocab_size = checkpoints.number(config, "draft_vocab_size", default=sizes.vocab_size)
        if draft_vocab_size < sizes.vocab_size and not own_head:
            raise bad(f"its draft vocabulary of {draft_vocab_size} needs an output matrix of its own, lm_head.weight")
        edges = edges_of(settings, sizes)
        second = config.get("speculators_model_type") == "dflash2" or any(
            str(name).startswith("DFlash2") for name in config.get("architectures") or ()
        )
        for name in ("selector_rank", "conv_kernel_size") if second else ():
            checkpoints.number(settings, name)  # a DFlash 2 drafter has both
        if edges.get("taps"):  # DFlash 2's own code has it so; the others say it
            settings = {"sliding_window_non_causal": True, **settings}
        if edges.get("selector_rank") and draft_vocab_size < sizes.vocab_size:
            raise bad("a DFlash 2 drafter with a draft vocabulary of its own; not served")
        return cls(
            sizes,
            checkpoints.number(settings, "block_size", least=2),
            checkpoints.number(settings, "mask_token_id", least=0),
            layers,
            draft_vocab_size,
            checkpoints.number({**config, **settings}, "target_hidden_size", default=sizes.hidden_size),
            checkpoints.flag(settings, "sample_from_anchor"),
            checkpoints.flag(settings, "sliding_window_non_causal"),
            own_embedding,
            own_head,
            checkpoints.flag(settings, "causal_head"),
            **edges,
            **confidence_of(confidence, sizes.hidden_size, edges.get("markov_rank", 0)),
            confidence_bias=confidence is not None and confidence_bias,
        )

    @property
    def kind(self) -> str:
        """The name that its authors gave it."""
        if self.selector_rank or self.taps:
            return "DFlash 2"
        return "DSpark" if self.markov_rank else "JetSpec" if self.causal else "DFlash"

    @property
    def num_drafted(self) -> int:
        """Later positions that a block has candidates for."""
        return self.block_size - (not self.sample_from_anchor)


def edges_of(settings: Mapping[str, Any], sizes: PretrainedConfig) -> dict[str, Any]:
    """Read of a config the heads for edges, and of the convolutions that come with one of them.

    Raises:
        BadCheckpoint: a setting is missing, impossible, or not served.
    """
    found: dict[str, Any] = {}
    projector = settings.get("projector_type", "dflash")
    if projector != "dflash":
        raise bad(f"projector_type={projector!r} in its config; only 'dflash' is served")
    if settings.get("markov_rank"):
        kind = settings.get("markov_head_type", "vanilla")
        if kind not in MARKOV_HEADS:
            raise bad(f"markov_head_type={kind!r} in its config; served are {', '.join(MARKOV_HEADS)}")
        found |= {"markov_rank": checkpoints.number(settings, "markov_rank"), "markov_type": kind}
    if settings.get("selector_rank"):
        found |= {name: checkpoints.number(settings, name) for name in ("selector_rank", "selector_top_k")}
    if settings.get("conv_kernel_size"):
        taps, group = (checkpoints.number(settings, name) for name in ("conv_kernel_size", "conv_group_size"))
        if sizes.hidden_size % group:
            raise bad(f"conv_group_size={group} in its config does not divide hidden_size={sizes.hidden_size}")
        found |= {"taps": taps, "group": group}
    return found


def confidence_of(shape: tuple[int, ...] | None, hidden_size: int, rank: int) -> dict[str, int]:
    """Tell what DSpark's confidence head reads by its weight: a row's output, and maybe the token before.

    Raises:
        BadCheckpoint: another shape.
    """
    if shape is None:
        return {}
    if shape not in ((1, hidden_size), (1, hidden_size + rank)):
        sizes = sorted({hidden_size, hidden_size + rank})
        raise bad(
            f"confidence_head.proj.weight is {list(shape)}, and its config means "
            f"{' or '.join(f'[1, {size}]' for size in sizes)}"
        )
    return {"confidence": shape[1]}
