"""A drafter is the same in every layout that its makers, and those of servers, give its folder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import tiny
from sources.drafters import dflash_config, eagle3_config, random_dflash, random_eagle3, safeailab, save

from gsd_kernels import Eagle3
from gsd_kernels_hf.sources.dflash import DFlashConfig
from gsd_kernels_hf.sources.load import load_drafter, source_of

LAYERS = "eagle_aux_hidden_state_layer_ids"


def target_of():
    return tiny(num_hidden_layers=3, vocab_size=41)


def nested(kind, config, *own):
    """Speculators' layout: its layers' config inside the drafter's."""
    own = {name: config.pop(name) for name in own}
    return {"speculators_model_type": kind, **own, "transformer_layer_config": config}


def renamed(tensors):
    """Speculators' names, from those of SafeAILab and SpecForge."""
    return {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}


def eagle3(layout):
    config = eagle3_config(target_of(), draft_vocab_size=29)
    module = random_eagle3(config)
    tensors = safeailab(module)
    if layout == "SafeAILab":
        return module, config, tensors
    return module, nested("eagle3", config, "draft_vocab_size", LAYERS), renamed(tensors)


def p_eagle(layout):
    flags = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
    config = eagle3_config(target_of(), mask_token_id=3, num_hidden_layers=2, **flags)
    config["speculators_config"] = {"proposal_methods": [{"speculative_tokens": 5}]}
    module = random_eagle3(config, mask_shape=(1, 1, 96))
    tensors = safeailab(module)
    if layout == "speculators":
        own = ("speculators_config", "mask_token_id", "draft_vocab_size", LAYERS, *flags)
        return module, {**nested("peagle", config, *own), "architectures": ["PEagleSpeculator"]}, renamed(tensors)
    tensors["mask_hidden"] = tensors["mask_hidden"].flatten()[None]
    config[{"vLLM": "pard_token", "ptd": "ptd_token_id"}[layout]] = config.pop("mask_token_id")
    config["architectures"] = ["PeagleLlamaForCausalLM"]
    module.config = replace(module.config, mask_shape=(1, 96))
    if layout == "vLLM":  # which does not say of how many tokens
        del config["speculators_config"]
        module.config = replace(module.config, num_parallel=8)
    return module, config, tensors


def dflash(layout, **inner):
    config = dflash_config(target_of(), inner=inner, block_size=4)
    module = random_dflash(config, confidence=(1, 38) if inner else None)
    tensors, inner, block = module.state_dict(), config.pop("dflash_config"), config.pop("block_size")
    if inner.get("markov_rank"):
        inner |= {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
    if layout == "z-lab":
        return module, {**config, "dflash_config": inner, "block_size": block}, tensors
    if layout == "newer":
        return module, {**config, "dflash_config": {**inner, "block_size": block}}, tensors
    del config["architectures"], config["auto_map"]
    if layout == "DeepSpec":
        return module, {**config, **inner, "architectures": ["Qwen3DSparkModel"], "block_size": block}, tensors
    kind, layers = ("dspark" if "markov_rank" in inner else "dflash"), inner.pop("target_layer_ids")
    inner |= {"aux_hidden_state_layer_ids": [i + 1 for i in layers], "block_size": block}
    return module, {**nested(kind, config), **inner}, tensors


def dspark(layout):
    return dflash(layout, markov_rank=6, sample_from_anchor=True)


LAYOUTS = {eagle3: ("SafeAILab", "speculators"), p_eagle: ("speculators", "vLLM", "ptd")}
LAYOUTS |= {dflash: ("z-lab", "newer", "speculators"), dspark: ("z-lab", "newer", "DeepSpec", "speculators")}


@pytest.mark.parametrize(
    ("made", "layout"),
    [(made, layout) for made, layouts in LAYOUTS.items() for layout in layouts],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_layouts_are_the_same_drafter(made, layout, tmp_path):
    module, config, tensors = made(layout)
    found = load_drafter(save(tmp_path, config, tensors), target_of())
    assert found.config == module.config and repr(found) == repr(module)
    assert type(source_of(found)) is type(source_of(module))
    assert found.state_dict().keys() == module.state_dict().keys()
    for name, value in found.state_dict().items():
        assert torch.equal(value.flatten(), module.state_dict()[name].flatten()), name


def test_which_layers_are_read_where_a_config_does_not_say_it_as_others(tmp_path):
    """SGLang's list is of layers' outputs; without one they are spread over the target's."""
    _, config, tensors = eagle3("SafeAILab")
    del config[LAYERS]
    loaded = Eagle3.from_pretrained(save(tmp_path / "sglang", {**config, "eagle_config": {LAYERS: [0, 1, 2]}}, tensors))
    assert loaded.layers_of(target_of()) == (1, 2, 3)
    loaded = Eagle3.from_pretrained(save(tmp_path / "default", config, tensors))
    assert loaded.layers_of(tiny(num_hidden_layers=32, hidden_size=8)) == (2, 16, 29)


def test_the_roots_row_drafts_only_where_the_config_says_so():
    """Speculators' layout without the setting: slot j predicts the token of its own place."""
    _, config, _ = dspark("speculators")
    del config["sample_from_anchor"], config["enable_confidence_head"]
    assert DFlashConfig.of(config, {}).num_drafted == 3
