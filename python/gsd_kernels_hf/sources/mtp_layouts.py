"""Multi-token-prediction heads as checkpoints have them: a row for each way of naming their tensors.

Which row serves a checkpoint is decided by the tensors found in it, not by the model's name. Only the first head of
several is read: it drafts every depth, from its own output, as vLLM's does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SCALE = "_scale_inv"
"""What the name of a weight in blocks of FP8 has behind it where its scales are, one a block."""
QUANTISED = ("weight_scale", "weight_packed", "qweight", "weight.absmax", "SCB", "proj_scale_inv")
"""Ends of the names of tensors that only other quantised weights have beside them."""

PARTS = ("projection", "embedding_norm", "hidden_norm", "output_norm")
"""Modules of a head beside its decoder layer, as they are called here; a layout has an attribute for each."""


@dataclass(frozen=True)
class Layout:
    """Names of a head's tensors, and how it is wired.

    Attributes:
        families: who has it, for errors and the documentation.
        prefix: of all its tensors, behind what wrappers of the model put before; ``{layers}`` stands for the number of
            the target's layers.
        projection: the linear layer that reads both, behind the prefix, by which the layout is recognised.
        embedding_norm, hidden_norm: norms of what it reads.
        output_norm: norm of what the head gives; ``None``: the target's own final norm.
        code: of vLLM, with the wiring.
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
    output_norm: str | None
    code: str
    block: str = ""
    hidden_first: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    unused: str = "$"
    attention: str | None = None

    def recognised_by(self, layers: int) -> str:
        """The name of the projection's weight in a checkpoint of a target with so many layers."""
        return f"{self.prefix}{self.projection}.weight".replace("{layers}", str(layers))

    def published_name(self, name: str, prefix: str | None = None) -> str:
        """Name in a file of a tensor that is called ``name`` here; the inverse of :meth:`own_name`.

        prefix: as of :func:`find`; ``None``: the layout's own.
        """
        begin = self.prefix if prefix is None else prefix
        module, _, kind = name.rpartition(".")
        if module in PARTS:
            return f"{begin}{getattr(self, module)}.{kind}"
        inner = name.removeprefix("block.")
        for theirs, ours in self.renamed.items():
            if inner == ours or inner.startswith(f"{ours}."):
                inner = theirs + inner.removeprefix(ours)
        return f"{begin}{self.block}{inner}"

    def own_name(self, name: str) -> str | None:
        """Name here of a tensor, named behind the prefix; ``None``: it is not read."""
        parts = {getattr(self, part): part for part in PARTS}
        module, _, kind = name.rpartition(".")
        if module in parts:
            return f"{parts[module]}.{kind}"
        if re.fullmatch(self.unused, name):
            return None
        if not name.startswith(self.block):
            return name
        inner = name.removeprefix(self.block)
        for theirs, ours in self.renamed.items():
            if inner == theirs or inner.startswith(f"{theirs}."):
                inner = ours + inner.removeprefix(theirs)
        return f"block.{inner}"


LAYOUTS = (
    Layout(
        "DeepSeek-V3, Kimi, GLM-4.5 to 4.7",
        "layers.{layers}.",
        "eh_proj",
        "enorm",
        "hnorm",
        "shared_head.norm",
        "deepseek_mtp.py",
        unused=r"embed_tokens\.weight|shared_head\.head\.weight",
    ),
    Layout(
        "Qwen3-Next, Qwen3.5, Qwen3.6, EXAONE MoE, Mellum",
        "mtp.",
        "fc",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "norm",
        "qwen3_next_mtp.py, qwen3_5_mtp.py, exaone_moe_mtp.py",
        block="layers.0.",
        unused=r"layers\.[1-9]\d*\..*|embed_tokens\.weight|lm_head\.weight",
    ),
    Layout(
        "MiMo",
        "mtp_layers.0.",
        "input_proj",
        "token_layernorm",
        "hidden_layernorm",
        "final_layernorm",
        "mimo_mtp.py",
        hidden_first=True,
    ),
    Layout(
        "MiMo-V2",
        "mtp.layers.0.",
        "eh_proj",
        "enorm",
        "hnorm",
        "final_layernorm",
        "mimo_v2_mtp.py",
        renamed={"pre_mlp_layernorm": "post_attention_layernorm", "self_attn.attention_sink_bias": "self_attn.sinks"},
        attention="sliding_attention",
    ),
    Layout(
        "Ernie 4.5 MoE",
        "",
        "mtp_linear_proj.0",
        "mtp_emb_norm.0",
        "mtp_hidden_norm.0",
        None,  # as its authors have it (FastDeploy's ernie4_5_mtp.py); vLLM's file has no norm there
        "ernie_mtp.py",
        block="mtp_block.0.",
        unused=r"(?!mtp_).*|mtp_\w+\.[1-9]\d*\..*",
    ),
)


def find(names: Iterable[str], layers: int) -> tuple[Layout, str] | None:
    """The layout of a checkpoint's heads and the prefix of their tensors; ``None``: none that is known.

    Args:
        names: of all its tensors.
        layers: of the target.
    """
    names = list(names)
    for layout in LAYOUTS:
        sign = layout.recognised_by(layers)
        for name in names:
            if name == sign or name.endswith(f".{sign}"):
                return layout, name.removesuffix(f"{layout.projection}.weight")
    return None


def looked_for(layers: int) -> str:
    """Say what :func:`find` looks for, for an error."""
    return ", ".join(f"{layout.recognised_by(layers)} ({layout.families})" for layout in LAYOUTS)
