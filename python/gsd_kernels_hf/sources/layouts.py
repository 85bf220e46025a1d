"""Published drafters as tables: where their configs say what, what their tensors are called.

A new layout is a row. How the drafters themselves are wired stands in the files of their modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .checkpoints import bad

GEMMA4 = "Gemma4AssistantForCausalLM"
"""transformers' class of Gemma 4's assistants."""


# Configs of drafters that read the target's features.

NESTED = "transformer_layer_config", "dflash_config", "eagle_config"
"""Keys that some makers nest a part of a config in: speculators sizes of layers, z-lab and SGLang the rest."""
FUSED = "eagle_aux_hidden_state_layer_ids"


class ConfigLayout(NamedTuple):
    """Where a kind of ``config.json`` lists the layers whose hidden states are fused.

    Attributes:
        layers: name of the list.
        inside: the key that it is nested in; empty: it is not.
        shift: what is added to their numbers: 1 where it lists layers whose outputs are fused, not what layers read.
        fixed: settings that it has no word for.
    """

    layers: str
    inside: str = ""
    shift: int = 0
    fixed: Mapping[str, Any] = {}


EAGLE3 = (
    ConfigLayout(FUSED),  # SafeAILab, SpecForge, speculators
    ConfigLayout(FUSED, "eagle_config", 1),  # SGLang: layers whose outputs are fused
)
DFLASH = (
    ConfigLayout("target_layer_ids", "dflash_config", 1),  # z-lab
    ConfigLayout("aux_hidden_state_layer_ids"),  # speculators
    ConfigLayout("target_layer_ids", "", 1, {"sample_from_anchor": True}),  # DeepSpec, whose root's row always drafts
)


def settings_of(config: Mapping[str, Any], layouts: Iterable[ConfigLayout]) -> dict[str, Any]:
    """All that a config says, flat; ``hidden_layers`` are the hidden states that are fused, ``None`` if it lists none.

    Args:
        config: of a ``config.json``, and as ``tensors`` the shapes of those that lie beside it, if any do.
        layouts: how it may list the layers.

    Raises:
        BadCheckpoint: the first of the layouts that it is of lists no different layers.
    """
    parts = {"": config} | {name: config[name] for name in NESTED if isinstance(config.get(name), dict)}
    said = {name: value for part in parts.values() for name, value in part.items() if value is not None}
    said |= {"hidden_layers": None, "tensors": config.get("tensors", {})}
    for layout in layouts:
        value = parts.get(layout.inside, {}).get(layout.layers)
        if value is None:
            continue
        good = isinstance(value, list) and {*map(type, value)} == {int} and min(value) + layout.shift >= 0
        if not good or len({*value}) < len(value):
            raise bad(f"{layout.layers} in its config: expected a list of different layers, got {value!r}")
        return said | layout.fixed | {"hidden_layers": tuple(i + layout.shift for i in value)}
    return said


UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of training, which drafting does not read."""


def weight_name(name: str) -> str | None:
    """The name here of a published tensor of such a drafter; ``None``: not needed."""
    name = name.removeprefix("model.")
    if name in UNUSED or name.endswith("rotary_emb.inv_freq"):
        return None
    return swapped_prefix(name, [("midlayer.", "layers.0.")])


# Multi-token-prediction heads in a target's own checkpoint. Which row serves one is decided by the tensors found in it,
# not by the model's name. Only the first head of several is read: it drafts every depth, from its own output, as vLLM's
# does.

QUANTISED = ("weight_scale", "weight_packed", "qweight", "weight.absmax", "SCB", "proj_scale_inv")
"""Ends of the names of tensors that only other quantised weights have beside them."""
PARTS = ("projection", "embedding_norm", "hidden_norm", "norm")
"""Modules of a head beside its decoder layer, as they are called here; a layout has an attribute for each."""


class HeadLayout(NamedTuple):
    """Names of a head's tensors, and how it is wired.

    Attributes:
        families: who has it, for errors and the documentation.
        prefix: of all its tensors, behind what wrappers of the model put before; ``{layers}`` stands for the number of
            the target's layers.
        projection: the linear layer that reads both, behind the prefix, by which the layout is recognised.
        embedding_norm, hidden_norm: norms of what it reads.
        norm: of what the head gives; ``None``: the target's own final norm.
        block: where the names of the decoder layer begin, behind the prefix.
        hidden_first: whether the projection reads the hidden state before the embedding.
        renamed: parts of the decoder layer by what transformers calls them.
        unused: regular expression of names behind the prefix that are not read: copies of the target's embedding and
            output matrix, further heads, the target's own tensors.
        attention: type of the decoder layer where neither its tensors nor the config (``mtp_layer_types``) tell.
    """

    families: str
    prefix: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str | None
    block: str = ""
    hidden_first: bool = False
    renamed: Mapping[str, str] = {}
    unused: str = "$"
    attention: str | None = None

    def recognised_by(self, layers: int) -> str:
        """The name of the projection's weight in a checkpoint of a target with so many layers."""
        return f"{self.prefix}{self.projection}.weight".replace("{layers}", str(layers))

    @property
    def prefixes(self) -> list[tuple[str, str]]:
        """Pairs of what names begin with in a file, behind the prefix, and here; the first that fits counts."""
        return [
            *((f"{getattr(self, part)}.", f"{part}.") for part in PARTS),
            *((self.block + theirs, f"block.{ours}") for theirs, ours in self.renamed.items()),
            (self.block, "block."),
        ]

    def own_name(self, name: str) -> str | None:
        """Name here of a tensor, named behind the prefix; ``None``: it is not read."""
        return None if re.fullmatch(self.unused, name) else swapped_prefix(name, self.prefixes)

    def published_name(self, name: str, prefix: str | None = None) -> str:
        """Name in a file of a tensor that is called ``name`` here; the inverse of :meth:`own_name`.

        prefix: as of :func:`find_heads`; ``None``: the layout's own.
        """
        begin = self.prefix if prefix is None else prefix
        return begin + swapped_prefix(name, [(ours, theirs) for theirs, ours in self.prefixes])


def swapped_prefix(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """``name`` with its prefix exchanged, by the first pair of old and new that fits."""
    old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
    return new + name.removeprefix(old)


HEADS = (
    HeadLayout(
        "DeepSeek-V3, Kimi, GLM-4.5 to 4.7",  # wired as in vLLM's deepseek_mtp.py
        "layers.{layers}.",
        "eh_proj",
        "enorm",
        "hnorm",
        "shared_head.norm",
        unused=r"embed_tokens\.weight|shared_head\.head\.weight",
    ),
    HeadLayout(
        "Qwen3-Next, Qwen3.5, Qwen3.6, EXAONE MoE, Mellum",  # wired as in vLLM's qwen3_next_mtp.py and two alike
        "mtp.",
        "fc",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "norm",
        block="layers.0.",
        unused=r"layers\.[1-9]\d*\..*|embed_tokens\.weight|lm_head\.weight",
    ),
    HeadLayout(
        "MiMo",  # wired as in vLLM's mimo_mtp.py
        "mtp_layers.0.",
        "input_proj",
        "token_layernorm",
        "hidden_layernorm",
        "final_layernorm",
        hidden_first=True,
    ),
    HeadLayout(
        "MiMo-V2",  # wired as in vLLM's mimo_v2_mtp.py
        "mtp.layers.0.",
        "eh_proj",
        "enorm",
        "hnorm",
        "final_layernorm",
        renamed={"pre_mlp_layernorm": "post_attention_layernorm", "self_attn.attention_sink_bias": "self_attn.sinks"},
        attention="sliding_attention",
    ),
    HeadLayout(
        "Ernie 4.5 MoE",  # wired as in vLLM's ernie_mtp.py
        "",
        "mtp_linear_proj.0",
        "mtp_emb_norm.0",
        "mtp_hidden_norm.0",
        None,  # as its authors have it (FastDeploy's ernie4_5_mtp.py); vLLM's file has no norm there
        block="mtp_block.0.",
        unused=r"(?!mtp_).*|mtp_\w+\.[1-9]\d*\..*",
    ),
)


def find_heads(names: Iterable[str], layers: int) -> tuple[HeadLayout, str] | None:
    """The layout of a checkpoint's heads and the prefix of their tensors; ``None``: none that is known.

    Args:
        names: of all its tensors.
        layers: of the target.
    """
    names = list(names)
    for layout in HEADS:
        sign = layout.recognised_by(layers)
        for name in names:
            if f".{name}".endswith(f".{sign}"):
                return layout, name.removesuffix(f"{layout.projection}.weight")
    return None


def looked_for(layers: int) -> str:
    """Say what :func:`find_heads` looks for, for an error."""
    return ", ".join(f"{layout.recognised_by(layers)} ({layout.families})" for layout in HEADS)
