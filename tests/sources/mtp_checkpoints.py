"""Checkpoints of tiny targets with multi-token-prediction heads in them, named as the families' makers do."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_configs
import torch
from safetensors.torch import load_file, save_file
from sources.drafters import descended, text_of
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from gsd_kernels import Mtp


@dataclass(frozen=True)
class Family:
    """A tiny target and the names of its head's tensors.

    Attributes:
        model: class of the target.
        config: beside the tiny sizes.
        layer: number of the target's layer whose tensors the head's decoder layer has.
        names: of the head's own tensors: projection, norm of embeddings, of hidden states, of the output.
        block: what the names of its decoder layer begin with.
        renamed: parts of these names.
    """

    model: str
    names: tuple[str, str, str, str | None]
    block: str
    config: dict[str, Any] = field(default_factory=dict)
    layer: int = 1
    renamed: dict[str, str] = field(default_factory=dict)
    hidden_first: bool = False


def nextn(layers: int = 2, wrapper: str = "model.") -> dict[str, Any]:
    at = f"{wrapper}layers.{layers}."
    return {"names": (f"{at}eh_proj", f"{at}enorm", f"{at}hnorm", f"{at}shared_head.norm"), "block": at}


QWEN = {
    "names": ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "block": "mtp.layers.0.",
}
MIMO = "model.mtp_layers.0."
MIMO_V2 = "model.mtp.layers.0."
FAMILIES = {
    "glm": Family("Glm4MoeForCausalLM", **nextn()),
    "glm-lite": Family("Glm4MoeLiteForCausalLM", **nextn(), config={"mlp_layer_types": ["dense", "sparse"]}),
    "deepseek": Family("DeepseekV3ForCausalLM", **nextn()),
    "mimo": Family(
        "Qwen2ForCausalLM",
        (f"{MIMO}input_proj", f"{MIMO}token_layernorm", f"{MIMO}hidden_layernorm", f"{MIMO}final_layernorm"),
        MIMO,
        {"use_sliding_window": False},
        hidden_first=True,
    ),
    "mimo-v2": Family(
        "MiMoV2FlashForCausalLM",
        (f"{MIMO_V2}eh_proj", f"{MIMO_V2}enorm", f"{MIMO_V2}hnorm", f"{MIMO_V2}final_layernorm"),
        MIMO_V2,
        {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
        layer=0,
        renamed={"post_attention_layernorm": "pre_mlp_layernorm", "self_attn.sinks": "self_attn.attention_sink_bias"},
    ),
    "ernie": Family(
        "Ernie4_5_MoeForCausalLM",
        ("model.mtp_linear_proj.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", None),
        "model.mtp_block.0.",
        layer=0,
    ),
    "exaone": Family(
        "ExaoneMoeForCausalLM",
        **QWEN,
        config={
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "mtp_layer_types": ["full_attention"],
        },
        layer=0,
    ),
    "mellum": Family(
        "MellumForCausalLM",
        **QWEN,
        config={"layer_types": ["full_attention", "sliding_attention"], "num_mtp_layers": 1},
    ),
    "qwen-next": Family(
        "Qwen3NextForCausalLM",
        **QWEN,
        config={"layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3.5": Family("Qwen3_5ForCausalLM", **QWEN, config={"layer_types": ["linear_attention", "full_attention"]}),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeForCausalLM", **QWEN, config={"layer_types": ["linear_attention", "full_attention"]}
    ),
}


@functools.cache
def target_of(name: str):
    """The tiny target of a family, in float64."""
    family = FAMILIES[name]
    return tiny_configs.build(family.model, **family.config)


def saved(name: str, folder: Path) -> dict[str, Tensor]:
    """Write the family's target into ``folder`` with a random head; the head's tensors by their published names."""
    target_of(name).save_pretrained(folder)
    return give_head(folder, name)


def give_head(folder: Path, name: str, seed: int = 3) -> dict[str, Tensor]:
    """Put a random head, named as the family does, into the checkpoint of a target; its tensors."""
    family, weights = FAMILIES[name], load_file(folder / "model.safetensors")
    last = next(
        value for full, value in weights.items() if re.fullmatch(r"model\.(language_model\.)?norm\.weight", full)
    )
    gen, (size,) = torch.Generator().manual_seed(seed), last.shape
    like = {f"{part}.weight": torch.zeros(size) for part in family.names[1:] if part is not None}
    like[f"{family.names[0]}.weight"] = torch.zeros(size, 2 * size)
    layer = f"layers.{family.layer}."
    for full, value in weights.items():
        if layer in full and "visual" not in full:
            inner = full.partition(layer)[2]
            for ours, theirs in family.renamed.items():
                inner = inner.replace(ours, theirs)
            like[family.block + inner] = value
    head = {}
    for full, value in like.items():
        noise = 0.2 * torch.randn(value.shape, generator=gen, dtype=torch.float64)
        centered = "norm" in full and not name.startswith("qwen")  # theirs are 1 + w
        head[full] = (noise + centered).to(last.dtype)
    add(folder, head)
    return head


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Put tensors into a checkpoint's second file, so that it has an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    save_file(tensors, folder / "model-00002.safetensors", {"format": "pt"})
    index = dict.fromkeys(weights, "model-00001.safetensors") | dict.fromkeys(tensors, "model-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


class Causal:
    """Attention of a whole text at once, for training: what the runner's inputs are for rows of a cache."""

    def attend(self, module, query, key, value, attention_mask, scaling, options):
        if options.get("s_aux") is None:
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=scaling)
        group, length = query.shape[1] // key.shape[1], query.shape[2]
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        sinks = options["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value.repeat_interleave(group, 1)


def fit(module: Mtp, target, steps: int = 60) -> Mtp:
    """Fit a head to the target's own text: two levels, each reading the last one's output."""
    text, states = text_of(target)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings().weight.detach().float()

    def loss() -> Tensor:
        features, total = states[-1].float(), 0.0
        for level in range(2):
            length = text.shape[1] - 2 - level
            tokens = text[:, 1 + level : 1 + level + length]
            positions = torch.arange(length).expand(len(text), -1)
            features = module(embed(tokens).detach().float(), features[:, :length], positions, Causal())
            total = total + cross_entropy((features @ head.T).flatten(0, 1), text[:, 2 + level :].flatten())
        return total

    return descended(module, steps, 0.01, loss).to(target.dtype)
