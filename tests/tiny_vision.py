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


def places(side: int) -> Tensor:
    """Column and row of every patch of a square image, [1, side², 2]."""
    at = torch.arange(side)
    return torch.stack(torch.meshgrid(at, at, indexing="xy"), -1).view(1, side * side, 2)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``one`` and of ``other``, which wins, of nested configs as well."""
    nested = {k: merged(one[k], v) for k, v in other.items() if isinstance(v, Mapping) and isinstance(one.get(k), dict)}
    return {**one, **other, **nested}


ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
MROPE = {"rope_parameters": ROPE}
SEVERAL = {"image_token_id": IMAGE, "vision_start_token_id": OPEN, "vision_end_token_id": CLOSE, "video_token_id": 59}
MERGED: dict[str, Any] = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
QWEN: dict[str, Any] = {**SEVERAL, "text_config": MROPE, "vision_config": MERGED}
QWEN3 = {**QWEN, "vision_config": {**MERGED, "num_position_embeddings": 16}}
GLM = {**QWEN, "text_config": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}}
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}
DEEP = merged(QWEN3, {"vision_config": {"deepstack_visual_indexes": [0, 1]}})
SEEN: dict[str, Any] = {"vision_config": vision()}
LARGER: dict[str, Any] = {"vision_config": vision(image_size=2 * SIDE)}
SOUNDS = {"num_mel_bins": 8, "max_source_positions": 16}
GRID = constant([1, 6, 4])  # patches; a quarter as many placeholders
PATCHES = pixels(24, 96, image_grid_thw=GRID, mm_token_type_ids=types)
IMAGES = pixels(1, 3, SIDE, SIDE)
TILES = pixels(1, 2, 3, SIDE, SIDE, image_sizes=constant([SIDE, SIDE]))  # the whole, and its one part
SIZED = pixels(1, 3, 2 * SIDE, 2 * SIDE, image_sizes=constant([2 * SIDE, 2 * SIDE]))

FAMILIES: dict[str, Family] = {
    "AriaForConditionalGeneration": Family(4, IMAGES, {**SEEN, "projector_patch_to_query_dict": {4: 4}}),
    "AyaVisionForConditionalGeneration": Family(1, IMAGES, {**SEEN, "downsample_factor": 2}),
    "Cohere2VisionForConditionalGeneration": Family(
        4, pixels(1, 3, 2 * SIDE, 2 * SIDE), {**LARGER, "downsample_factor": 2, "text_config": {"sliding_window": 8}}
    ),
    "DeepseekVLForConditionalGeneration": Family(4, IMAGES, SEEN),
    "Exaone4_5_ForConditionalGeneration": Family(
        6, pixels(24, 96, image_grid_thw=GRID), merged(QWEN, {"vision_config": WINDOWS})
    ),
    "Gemma3ForConditionalGeneration": Family(
        4,
        pixels(1, 3, SIDE, SIDE, token_type_ids=types),
        {**SEEN, "mm_tokens_per_image": 4, "text_config": {"query_pre_attn_scalar": 1, "sliding_window": 7}},
    ),
    "Gemma4ForConditionalGeneration": Family(
        4,
        pixels(1, 36, 48, image_position_ids=lambda ids: places(6), mm_token_type_ids=types),
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 16,
            },
            "text_config": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        },
    ),
    "Glm46VForConditionalGeneration": Family(6, PATCHES, GLM),
    "Glm4vForConditionalGeneration": Family(6, PATCHES, GLM),
    "GotOcr2ForConditionalGeneration": Family(1, IMAGES, SEEN),
    "Idefics3ForConditionalGeneration": Family(1, pixels(1, 1, 3, SIDE, SIDE), {**SEEN, "scale_factor": 2}),
    "InternVLForConditionalGeneration": Family(
        1, IMAGES, {"vision_config": {"image_size": [SIDE, SIDE], "patch_size": [4, 4]}, "downsample_ratio": 0.5}
    ),
    "Lfm2VlForConditionalGeneration": Family(
        1,
        pixels(1, 4, 48, spatial_shapes=constant([2, 2]), pixel_attention_mask=constant([1] * 4)),
        {"vision_config": vision(num_patches=4), "downsample_factor": 2},
    ),
    "LightOnOcrForConditionalGeneration": Family(4, SIZED, {**LARGER, "spatial_merge_size": 2}),
    "LlavaForConditionalGeneration": Family(4, IMAGES, SEEN),
    "LlavaNextForConditionalGeneration": Family(10, TILES, {**SEEN, "image_grid_pinpoints": [[SIDE, SIDE]]}),
    "LlavaOnevisionForConditionalGeneration": Family(10, TILES, {**SEEN, "image_grid_pinpoints": [[SIDE, SIDE]]}),
    "Mistral3ForConditionalGeneration": Family(4, SIZED, {**LARGER, "spatial_merge_size": 2}),
    "MllamaForConditionalGeneration": Family(
        1,
        lambda ids, seed: {
            "pixel_values": drawn(1, 1, 4, 3, SIDE, SIDE, seed=seed),
            "aspect_ratio_ids": torch.tensor([[1]]),
            "aspect_ratio_mask": torch.ones(1, 1, 4, dtype=torch.long),
            "cross_attention_mask": torch.ones(1, ids.shape[1], 1, 4, dtype=torch.long),
        },
        {
            "vision_config": vision(
                intermediate_layers_indices=[0],
                supported_aspect_ratios=[[1, 1], [1, 2], [2, 1], [2, 2]],
                max_num_tiles=4,
                num_global_layers=1,
                vision_output_dim=64,
            ),
            "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        },
    ),
    "Ovis2ForConditionalGeneration": Family(4, IMAGES, SEEN),
    "PaddleOCRVLForConditionalGeneration": Family(
        6,
        pixels(24, 3, 4, 4, image_grid_thw=GRID, mm_token_type_ids=types),
        {**QWEN, "vision_config": {"patch_size": 4, "image_size": 24}},
    ),
    "PaliGemmaForConditionalGeneration": Family(
        4, IMAGES, {"vision_config": vision(projection_dim=32), "projection_dim": 32}
    ),
    "Qwen2VLForConditionalGeneration": Family(
        6, PATCHES, {**QWEN, "vision_config": {**MERGED, "embed_dim": 16, "hidden_size": 32}}
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(6, PATCHES, merged(QWEN, {"vision_config": WINDOWS})),
    "Qwen3VLForConditionalGeneration": Family(6, PATCHES, DEEP),
    "Qwen3VLMoeForConditionalGeneration": Family(6, PATCHES, merged(DEEP, {"text_config": {"sliding_window": None}})),
    "Qwen3_5ForConditionalGeneration": Family(
        6, PATCHES, merged(QWEN3, {"text_config": {"layer_types": ["linear_attention", "full_attention"]}})
    ),
    "SmolVLMForConditionalGeneration": Family(1, pixels(1, 1, 3, SIDE, SIDE), {**SEEN, "scale_factor": 2}),
    "VipLlavaForConditionalGeneration": Family(4, IMAGES, {**SEEN, "vision_feature_layers": [-1, -2]}),
    "VoxtralForConditionalGeneration": Family(
        4,
        lambda ids, seed: {"input_features": drawn(1, 8, 32, seed=seed)},
        {"audio_token_id": IMAGE, "audio_config": {**SOUNDS, "intermediate_size": 128, "hidden_size": 32}},
    ),
}


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
    for name_of, parameter in model.named_parameters():
        if parameter.dim() > 1 or name_of.endswith("gate"):  # what cross attention adds begins at nothing
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


def endings(name: str, *behind: int) -> Inputs:
    """Prompts of one length that end so many words behind their image: 0 are placeholders to the end."""
    family, words = FAMILIES[name], torch.randint(3, CLOSE - 1, (WORDS,), generator=torch.Generator().manual_seed(9))
    rows = []
    for count in behind:
        before, after = words[count:].tolist(), words[:count].tolist()
        ids = torch.tensor([[*before, 1, OPEN, *[IMAGE] * family.count, *after]])
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), **family.inputs(ids, 4)})
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
