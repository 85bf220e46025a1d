"""Tiny random models that read images or sounds, and prompts with them; by class, since processors and sizes differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tiny_configs
import torch
import transformers
from tiny_configs import VOCAB
from torch import Tensor
from transformers import PreTrainedModel

PREPARED = hasattr(transformers.generation.utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL")
"""Whether transformers drops images behind the prompt itself, for all families."""
IMAGE = VOCAB - 1  # the placeholder
OPEN, CLOSE = VOCAB - 3, VOCAB - 4
SIDE = 8  # of an image
STD = 0.3
WORDS = 5  # behind an image; every further prompt of a batch has one less

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A class's tiny config and what its processor makes of an image.

    Attributes:
        count: placeholders of an image.
        inputs: of one image and the prompt's tokens [1, P], by seed; concatenated for a batch.
        more: of the config, nested.
    """

    count: int
    inputs: Callable[[Tensor, int], Inputs]
    more: Mapping[str, Any] = field(default_factory=dict)


def drawn(*shape: int, seed: int) -> Tensor:
    """Pixels."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pixels(*shape: int, **more: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Inputs]:
    """``pixel_values`` of this shape, and what is made of the tokens."""
    return lambda ids, seed: {
        "pixel_values": drawn(*shape, seed=seed),
        **{name: make(ids) for name, make in more.items()},
    }


def types(ids: Tensor) -> Tensor:
    """1 where there is an image."""
    return (ids == IMAGE).long()


def constant(*values: Any) -> Callable[[Tensor], Tensor]:
    """The same for all tokens."""
    return lambda ids: torch.tensor(values)


def vision(**more: Any) -> dict[str, Any]:
    """Four patches of an image of 8 × 8."""
    return {"image_size": SIDE, "patch_size": 4, **more}


MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}}
SEVERAL = {"image_token_id": IMAGE, "vision_start_token_id": OPEN, "vision_end_token_id": CLOSE, "video_token_id": 59}
GRID = pixels(24, 96, image_grid_thw=constant([1, 6, 4]), mm_token_type_ids=types)
MERGED: dict[str, Any] = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
IMAGES = pixels(1, 3, SIDE, SIDE)

FAMILIES: dict[str, Family] = {
    "AyaVisionForConditionalGeneration": Family(1, IMAGES, {"vision_config": vision(), "downsample_factor": 2}),
    "Gemma3ForConditionalGeneration": Family(
        4, pixels(1, 3, SIDE, SIDE, token_type_ids=types), {"vision_config": vision(), "mm_tokens_per_image": 4}
    ),
    "Idefics3ForConditionalGeneration": Family(
        1, pixels(1, 1, 3, SIDE, SIDE), {"vision_config": vision(), "scale_factor": 2}
    ),
    "InternVLForConditionalGeneration": Family(
        1, IMAGES, {"vision_config": {"image_size": [SIDE, SIDE], "patch_size": [4, 4]}, "downsample_ratio": 0.5}
    ),
    "LlavaForConditionalGeneration": Family(4, IMAGES, {"vision_config": vision()}),
    "Mistral3ForConditionalGeneration": Family(
        4,
        pixels(1, 3, 2 * SIDE, 2 * SIDE, image_sizes=constant([2 * SIDE, 2 * SIDE])),
        {"vision_config": vision(image_size=2 * SIDE), "spatial_merge_size": 2},
    ),
    "PaliGemmaForConditionalGeneration": Family(
        4, IMAGES, {"vision_config": vision(projection_dim=32), "projection_dim": 32}
    ),
    "Qwen2VLForConditionalGeneration": Family(
        6, GRID, {**SEVERAL, "text_config": MROPE, "vision_config": {**MERGED, "embed_dim": 16, "hidden_size": 32}}
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        6,
        GRID,
        {
            **SEVERAL,
            "text_config": MROPE,
            "vision_config": {**MERGED, "window_size": 16, "out_hidden_size": 32, "fullatt_block_indexes": [1]},
        },
    ),
    "Qwen3VLForConditionalGeneration": Family(
        6,
        GRID,
        {
            **SEVERAL,
            "text_config": MROPE,
            "vision_config": {
                **MERGED,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
        },
    ),
    "SmolVLMForConditionalGeneration": Family(
        1, pixels(1, 1, 3, SIDE, SIDE), {"vision_config": vision(), "scale_factor": 2}
    ),
}


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``one`` and of ``other``, which wins, of nested configs as well."""
    nested = {k: merged(one[k], v) for k, v in other.items() if isinstance(v, Mapping) and isinstance(one.get(k), dict)}
    return {**one, **other, **nested}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model in float64."""
    model_class: type[PreTrainedModel] = getattr(transformers, name)
    placeholder = {key: IMAGE for key in ("image_token_id", "image_token_index")}
    fields = merged(
        tiny_configs.shrunk(model_class.config_class, 2),
        {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}, **placeholder},
    )
    config = model_class.config_class(**merged(fields, FAMILIES[name].more))
    torch.manual_seed(seed)
    model = model_class(config).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) < tiny_configs.MOST_PARAMETERS
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=STD)
    model.set_experts_implementation("eager")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.double()


def prompts(name: str, *seeds: int) -> Inputs:
    """Left-padded prompts, the same words behind an image each; of the second one word less, and so on."""
    family, words = FAMILIES[name], torch.randint(3, CLOSE - 1, (WORDS,), generator=torch.Generator().manual_seed(7))
    rows = []
    for number, seed in enumerate(seeds):
        ids = torch.tensor([[0] * number + [1, OPEN, *[IMAGE] * family.count, CLOSE, *words[number:].tolist()]])
        rows.append({"input_ids": ids, "attention_mask": (ids != 0).long(), **family.inputs(ids, seed)})
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
