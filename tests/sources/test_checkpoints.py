"""Checkpoints of drafters: every layout is the same drafter, loaded once; what cannot be served is refused by name."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny_configs
import torch
import transformers
from models import prompts, tiny
from safetensors.torch import load_file, save_file
from sources.drafters import dflash_config, eagle3_config, generate, random_dflash, random_eagle3, safeailab, save
from sources.mtp_checkpoints import add, give_head, saved, target_of
from sources.rows import GEMMA, MEDUSA, assistant, filled, gemma, medusa_tensors, mtp, random_assistant

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, Eagle3, GraphConfig, Mtp
from gsd_kernels_hf import validate
from gsd_kernels_hf.sources import checkpoints
from gsd_kernels_hf.sources.checkpoints import Checkpoint
from gsd_kernels_hf.sources.dflash import DFlashConfig
from gsd_kernels_hf.sources.load import load_drafter, loaded_drafter, source_of

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LAYERS = "eagle_aux_hidden_state_layer_ids"
TREE = GraphConfig(depth=3, width=2, branch=3, max_rows=16, merge_context=-1)


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=3, dtype=torch.float32)


def ones(*shape):
    return torch.ones(shape)


def changed_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# What cannot be served: a good folder of each kind, and what is changed of it.


def eagle3(target, folder, tensors=None, drop=(), **changes):
    good = eagle3_config(target, **{k: v for k, v in changes.items() if k == "draft_vocab_size" and v == 61})
    stored = safeailab(random_eagle3(good).float())
    stored = {name: value for name, value in stored.items() if name not in drop} | (tensors or {})
    return save(folder, {**good, **changes}, stored)


def dflash(target, folder, inner=None, tensors=None, **changes):
    good = dflash_config(target)
    stored = random_dflash(good).float().state_dict() | (tensors or {})
    config = {**good, **changes}
    config["dflash_config"] = {**good["dflash_config"], **(inner or {})}
    return save(folder, config, stored)


def medusa(target, folder, **tensors):
    return save(folder, {"medusa_num_heads": 1}, tensors)


def medusa_of(size, vocab):
    return {"0.0.linear.weight": ones(size, size), "0.0.linear.bias": ones(size), "0.1.weight": ones(vocab, size)}


def heads(target, folder, of=None, damaged=None, **sizes):
    made = DraftHeads(32, 2, **sizes) if of is None else DraftHeads.for_model(of, 2)
    made.save_pretrained(folder)
    if damaged is not None:
        (folder / damaged).write_bytes(b"{}")
    return folder


def gemma4(target, folder, config=None, **own):
    random_assistant(**own).save_pretrained(folder)
    if config is not None:
        changed_json(folder / CONFIG, text_config=json.loads((folder / CONFIG).read_text())["text_config"] | config)
    (folder / WEIGHTS).write_bytes(b"not read")
    return folder


def spoilt(target, folder, name, text, weights=False):
    """A file with another text; without ``weights`` these lie outside."""
    eagle3(target, folder)
    if not weights:
        (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
    (folder / name).write_text(text)
    return folder


def sharded(name):
    return {"name": INDEX, "text": json.dumps({"weight_map": {"fc.weight": name}})}


def of_architecture(name):
    return {"name": CONFIG, "text": json.dumps({"architectures": [name]}), "weights": True}


BAD = {
    eagle3: {
        "vocabulary": (
            {"vocab_size": 5000, "draft_vocab_size": 97},
            "vocabulary of 5000 tokens, and the target has 97",
        ),
        "hidden size": ({"target_hidden_size": 64}, "hidden states of size 64, and the target's are 32"),
        "layers": ({LAYERS: [0, 1, 9]}, "reads hidden state 9, and the target has 3 layers"),
        "layers twice": ({LAYERS: [1, 1, 2]}, "a list of different layers, got [1, 1, 2]"),
        "one fused layer": (
            {"eagle_config": {"use_aux_hidden_state": False}, LAYERS: None},
            "turns use_aux_hidden_state off",
        ),
        "shape": ({"intermediate_size": 50}, "is [48, 32], and its config means [50, 32]"),
        "odd heads": ({"num_key_value_heads": 3}, "num_attention_heads=4 in its config is no multiple of"),
        "a text": ({"vocab_size": "97"}, "vocab_size in its config: expected an integer of at least 1, got '97'"),
        "a text for a flag": ({"fc_norm": "yes"}, "fc_norm in its config: expected true or false, got 'yes'"),
        "both norms": ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm, of which"),
        "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' in its config"),
        "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu' in its config"),
        "large draft vocabulary": ({"draft_vocab_size": 99}, "draft_vocab_size=99 in its config is more than"),
        "map out of range": (
            {"draft_vocab_size": 61, "tensors": {"d2t": torch.full((61,), 90)}},
            "outside the vocabulary",
        ),
        "map onto one": ({"draft_vocab_size": 61, "tensors": {"d2t": -torch.arange(61)}}, "two draft tokens to one"),
        "missing": ({"drop": ("midlayer.self_attn.o_proj.weight",)}, "no tensor layers.0.self_attn.o_proj.weight"),
        "unknown": ({"tensors": {"experts.weight": ones(2)}}, "a tensor experts.weight, which this kind"),
        "twice": ({"tensors": {"layers.0.hidden_norm.weight": ones(32)}}, "which are the same weight"),
        "NaN": ({"tensors": {"norm.weight": ones(32) * torch.nan}}, "norm.weight in .* holds NaN"),
        "P-EAGLE without a mask token": (
            {"tensors": {"mask_hidden": ones(96)}},
            "no mask token: mask_token_id, pard_token, ptd_token_id",
        ),
        "P-EAGLE without its tensor": (
            {"architectures": ["PEagleDraftModel"], "mask_token_id": 3},
            "a P-EAGLE checkpoint without its tensor mask_hidden",
        ),
        "P-EAGLE's tensor": (
            {"tensors": {"mask_hidden": ones(1, 32)}, "mask_token_id": 3},
            "is [1, 32], and its config means 96 numbers",
        ),
        "P-EAGLE's mask": (
            {"tensors": {"mask_hidden": ones(96)}, "pard_token": 97},
            "mask token 97 has no row in an embedding of 97",
        ),
        "a scale": ({"logit_scale": 2.0}, "logit_scale=2.0 in its config; only 1 is served"),
        "EAGLE-1": ({"tensors": {"fc.weight": ones(32, 64)}}, "an EAGLE-1 or EAGLE-2 checkpoint"),
        "speculators' other kind": ({"speculators_model_type": "mtp"}, "speculators' kind 'mtp'"),
        "speculators without layers": ({"speculators_model_type": "eagle3"}, "no transformer_layer_config"),
    },
    dflash: {
        "vocabulary": ({"vocab_size": 9000}, "vocabulary of 9000 tokens, and the target has 97"),
        "layers": ({"inner": {"target_layer_ids": [0, 3]}}, "reads hidden state 4, and the target has 3 layers"),
        "mask": ({"inner": {"mask_token_id": 97}}, "mask token 97 has no row in an embedding of 97"),
        "no mask": ({"inner": {"mask_token_id": None}}, "mask_token_id in its config: expected an integer"),
        "reduced without a matrix": ({"draft_vocab_size": 50}, "needs an output matrix of its own"),
        "DFlash 2 without its head": (
            {"architectures": ["DFlash2DraftModel"]},
            "selector_rank in its config: expected",
        ),
        "odd groups": (
            {"inner": {"conv_kernel_size": 2, "conv_group_size": 5}},
            "conv_group_size=5 in its config does not divide hidden_size=32",
        ),
        "DSpark's unknown head": (
            {"inner": {"markov_rank": 4, "markov_head_type": "lstm"}},
            "markov_head_type='lstm' in its config; served are vanilla, gated, rnn",
        ),
        "DSpark's confidence head": (
            {"inner": {"markov_rank": 4}, "tensors": {"confidence_head.proj.weight": ones(1, 33)}},
            "confidence_head.proj.weight is [1, 33], and its config means [1, 32] or [1, 36]",
        ),
        "DSpark of other layers": (
            {"architectures": ["Gemma4DSparkModel"]},
            "a DSpark drafter of other layers than Qwen3's (Gemma4DSparkModel)",
        ),
        "Domino": ({"inner": {"projector_type": "domino"}}, "projector_type='domino' in its config"),
    },
    medusa: {
        "no heads": ({"x": ones(1)}, "has no Medusa heads"),
        "a head missing": ({**medusa_of(32, 97), "2.1.weight": ones(97, 32)}, "has no tensor [12].0.linear.weight"),
        "hidden size": (medusa_of(16, 97), "hidden_size=16, and this one has 32"),
        "vocabulary": (medusa_of(32, 3000), "vocabulary of 3000 tokens, and the target has 97"),
        "no block": ({"0.0.weight": ones(97, 32)}, "without a residual block"),
    },
    heads: {
        "another's": ({"of": tiny(num_hidden_layers=2)}, "made for a target with num_hidden_layers=2"),
        "no config": ({"damaged": "draft_heads.json"}, " holds no readable draft heads"),
        "no weights": ({"damaged": "draft_heads.safetensors"}, " holds no readable draft heads"),
        "vocabulary": ({"output_size": 3000}, "this Medusa drafter was made"),
    },
    spoilt: {
        "pickle": (
            {"name": "pytorch_model.bin", "text": ""},
            "pytorch_model.bin alone, a pickle, which is not loaded since it may run code; convert it",
        ),
        "shard missing": (sharded("model-1.safetensors"), "names model-1.safetensors, and"),
        "shard outside": (sharded("../outside.safetensors"), "which is outside the folder"),
        "no map": ({"name": INDEX, "text": "{}"}, "has no weight_map of file names"),
        "model": (of_architecture("LlamaForCausalLM"), "is a language model (LlamaForCausalLM), not a drafter"),
        "unknown": (of_architecture("Whisper"), "is no drafter of a kind that is served"),
    },
    gemma4: {
        "vocabulary": ({"vocab_size": 5000}, "vocabulary of 5000 tokens, and the target has 64"),
        "width": ({"backbone": 48}, "hidden states of size 48, and the target's are 32"),
        "config": ({"config": {"hidden_size_per_layer_input": 8}}, "no readable config of a Gemma 4 assistant"),
    },
}
VALUES = ("map out of range", "map onto one", "NaN")  # which the values alone show


def refuse(target, where, message, monkeypatch, reads=False):
    """Both doors refuse, and nothing was read (unless only the values show it) or changed."""
    read = []
    honest = Checkpoint._read
    monkeypatch.setattr(Checkpoint, "_read", lambda self: read.append(1) or honest(self))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    pattern = message if ".*" in message or "[12]" in message else re.escape(message)
    with pytest.raises(ValueError, match=pattern) as error:
        gsd.patch(target, drafter=where)
    assert str(error.value).startswith("drafter: ")
    with pytest.raises(ValueError, match=pattern):
        gsd.generate(target, **prompts(1, 4, vocab=60), drafter=where, max_new_tokens=2, do_sample=False)
    assert bool(read) == reads
    assert "generate" not in vars(target) and "_gsd_patch" not in vars(target)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


@pytest.mark.parametrize(
    ("made", "name"), [(made, name) for made in BAD for name in BAD[made]], ids=lambda p: getattr(p, "__name__", p)
)
def test_a_folder_that_cannot_be_served_is_refused_by_name(made, name, target, tmp_path, monkeypatch):
    changes, message = BAD[made][name]
    target = gemma() if made is gemma4 else target
    refuse(target, made(target, tmp_path / "drafter", **changes), message, monkeypatch, reads=name in VALUES)


def test_heads_are_refused_by_the_option_that_named_them(target, tmp_path):
    for made, why in (
        (DraftHeads.for_model(tiny(num_hidden_layers=2), 2), "made for a target with num_"),
        (DraftHeads(32, 2).to("meta"), "on meta, and the target's output matrix on cpu"),
        (heads(target, tmp_path, damaged="draft_heads.json"), ".* holds no readable draft heads"),
    ):
        for option in ("draft_heads", "drafter"):
            with pytest.raises(ValueError, match=f"^{option}: {why}"):
                gsd.generate(target, **prompts(1, 5), max_new_tokens=4, **{option: made})


def test_places_that_are_none(target, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refuse(target, tmp_path / "file", "is a file; expected the folder", monkeypatch)
    refuse(target, str(tmp_path / "missing"), "no such folder", monkeypatch)
    own = DraftHeads.for_model(target, 2)
    for match, given in (
        (r'a folder, a hub id, "mtp", or one of Eagle3, DFlash, .*, Gemma4Assistant, got int', {"drafter": 3}),
        ("drafter: these are heads, and draft_heads has others", {"drafter": own, "draft_heads": own}),
        ('"drafter" needs drafter', {"draft_sources": ("drafter",)}),
        (
            r"drafter: .*drafts from one model alone; leave it out",
            {"drafter": own, "criterion": "speculative", "graph_config": "chain"},
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            gsd.patch(target, **given)
    small = tiny(num_hidden_layers=2, dtype=torch.float32)
    folder = eagle3(small, tmp_path / "small", **{LAYERS: None})
    refuse(small, folder, "reads hidden state -1, and the target has 2 layers", monkeypatch)


def test_a_loaded_drafter_of_another_model_is_refused(target):
    other = tiny(num_hidden_layers=3, hidden_size=64, dtype=torch.float32)
    for drafter in (random_eagle3(eagle3_config(other)).float(), random_dflash(dflash_config(other)).float()):
        with pytest.raises(ValueError, match="hidden states of size 64"):
            gsd.patch(target, drafter=drafter)
        with pytest.raises(ValueError, match="is on meta, and the target takes its input on cpu; move it"):
            gsd.patch(other, drafter=drafter.to("meta"))
    with pytest.raises(
        ValueError, match="is a DeepseekV3DecoderLayer, and the target's layers are Glm4MoeDecoderLayer"
    ):
        generate(target_of("glm"), drafter=mtp("deepseek"), **prompts(1, 4, vocab=60))
    types = {**GEMMA, "layer_types": ["full_attention"] * 4}
    full = filled(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**types)))
    with pytest.raises(ValueError, match="keys and values of sliding_attention layers, which Gemma4ForCausalLM does"):
        generate(full, drafter=assistant(), **prompts(1, 4, vocab=60))
    # Of a patched model such a call goes to transformers, which takes it so.
    with pytest.raises(validate.Unsupported, match=r"pass drafter= its folder, or gsd_kernels\.Gemma4Assistant"):
        generate(gemma(), **prompts(1, 4, vocab=60), assistant_model=random_assistant())


AT = "model.layers.2."
BAD_MTP = {
    "none": ({None: {"other.weight": ones(1)}}, r"no multi-token-prediction heads; looked for were layers\.2\.eh_proj"),
    "another layout": ({None: {"mtp.odd.weight": ones(1)}}, r"it has mtp\.odd\.weight, of a layout that is not"),
    "width": ({"eh_proj.weight": ones(32, 32)}, r"model\.layers\.2\.eh_proj\.weight .*is \[32, 32\]"),
    "an expert less": (
        {"mlp.experts.3.up_proj.weight": None},
        r"none of Glm4MoeForCausalLM's layers: it has no model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight",
    ),
    "quantised": (
        {"self_attn.q_proj.qweight": ones(1)},
        r"are quantised \(model\.layers\.2\.self_attn\.q_proj\.qweight\); served are",
    ),
    "scales of other blocks": (
        {"self_attn.q_proj.weight_scale_inv": ones(2, 2)},
        r"model\.layers\.2\.self_attn\.q_proj\.weight_scale_inv .*is \[2, 2\], and its config means \[1, 1\]",
    ),
    "scales of nothing": (
        {"other.weight_scale_inv": ones(1, 1)},
        r"has a tensor model\.layers\.2\.other\.weight_scale_inv, which this kind of drafter has no use for",
    ),
    "NaN": ({"enorm.weight": ones(32) * torch.nan}, r"model\.layers\.2\.enorm\.weight in .* holds NaN"),
}


def with_head(folder, name, head):
    """A family's target with these tensors of a head beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    target_of(name).save_pretrained(folder)
    add(folder, head)
    return Mtp.from_pretrained(folder, target_of(name))


@pytest.mark.parametrize("what", BAD_MTP)
def test_heads_of_a_target_that_cannot_be_served_are_refused_by_name(what, tmp_path):
    changes, message = BAD_MTP[what]
    head = saved("glm", tmp_path) | {f"{AT}{name}": value for name, value in changes.items() if name is not None}
    head = changes.get(None, {name: value for name, value in head.items() if value is not None})
    with pytest.raises(ValueError, match=message):
        with_head(tmp_path, "glm", head)


def reloaded(name, folder):
    target = type(target_of(name)).from_pretrained(folder, dtype=torch.float64).eval()
    target.set_experts_implementation("eager")
    target.generation_config.eos_token_id = None
    return target


def test_a_targets_files_that_are_missing_or_damaged(tmp_path):
    saved("glm", tmp_path)
    target, file = reloaded("glm", tmp_path), tmp_path / "model-00002.safetensors"
    for spoil, match in (
        (lambda: file.write_bytes(b"nothing"), r"model-00002\.safetensors is no readable safetensors file"),
        (file.unlink, r"names model-00002\.safetensors, and .* has none"),
        ((tmp_path / INDEX).unlink, r"no model\.safetensors and no model\.safetensors\.index\.json"),
    ):
        spoil()
        with pytest.raises(ValueError, match=match):
            loaded_drafter("mtp", target)
    with pytest.raises(ValueError, match="names no checkpoint"):
        gsd.generate(tiny(), prompts(1, 4)["input_ids"], drafter="mtp", max_new_tokens=2)


def test_a_layer_of_an_unknown_type_is_refused(tmp_path):
    """Layers of both types have these tensors, and nothing says which one it is."""
    saved("exaone", tmp_path)
    changed_json(tmp_path / CONFIG, mtp_layer_types=None)
    config, kept = target_of("exaone").config, target_of("exaone").config.mtp_layer_types
    try:
        config.mtp_layer_types = None
        with pytest.raises(ValueError, match="full_attention or sliding_attention, and its config's mtp_layer_types"):
            Mtp.from_pretrained(tmp_path, target_of("exaone"))
    finally:
        config.mtp_layer_types = kept


# Layouts: one drafter in each that its makers, and those of servers, give its folder.


def nested(kind, config, *own):
    """Speculators' layout: its layers' config inside the drafter's."""
    own = {name: config.pop(name) for name in own}
    return {"speculators_model_type": kind, **own, "transformer_layer_config": config}


def renamed(tensors):
    """Speculators' names, from those of SafeAILab and SpecForge."""
    return {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}


def eagle3_in(layout, target):
    config = eagle3_config(target, draft_vocab_size=29)
    module = random_eagle3(config)
    tensors = safeailab(module)
    if layout == "SafeAILab":
        return module, config, tensors
    return module, nested("eagle3", config, "draft_vocab_size", LAYERS), renamed(tensors)


def p_eagle_in(layout, target):
    flags = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
    config = eagle3_config(target, mask_token_id=3, num_hidden_layers=2, **flags)
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


def dflash_in(layout, target, **inner):
    config = dflash_config(target, inner=inner, block_size=4)
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


def dspark_in(layout, target):
    return dflash_in(layout, target, markov_rank=6, sample_from_anchor=True)


LAYOUTS = {eagle3_in: ("SafeAILab", "speculators"), p_eagle_in: ("speculators", "vLLM", "ptd")}
LAYOUTS |= {dflash_in: ("z-lab", "newer", "speculators"), dspark_in: ("z-lab", "newer", "DeepSpec", "speculators")}


@pytest.mark.parametrize(
    ("made", "layout"),
    [(made, layout) for made, layouts in LAYOUTS.items() for layout in layouts],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_layouts_are_the_same_drafter(made, layout, target, tmp_path):
    module, config, tensors = made(layout, target)
    found = load_drafter(save(tmp_path, config, tensors), target)
    assert found.config == module.config and repr(found) == repr(module)
    assert type(source_of(found)) is type(source_of(module))
    assert found.state_dict().keys() == module.state_dict().keys()
    for name, value in found.state_dict().items():
        assert torch.equal(value.flatten(), module.float().state_dict()[name].flatten()), name


def test_what_a_config_does_not_say_is_as_others_have_it(target, tmp_path):
    """SGLang's list is of layers' outputs; without one they are spread; speculators' root drafts where it says so."""
    _, config, tensors = eagle3_in("SafeAILab", target)
    del config[LAYERS]
    loaded = Eagle3.from_pretrained(save(tmp_path / "sglang", {**config, "eagle_config": {LAYERS: [0, 1, 2]}}, tensors))
    assert loaded.layers_of(target) == (1, 2, 3)
    loaded = Eagle3.from_pretrained(save(tmp_path / "default", config, tensors))
    assert loaded.layers_of(tiny(num_hidden_layers=32, hidden_size=8)) == (2, 16, 29)
    _, config, _ = dspark_in("speculators", target)
    del config["sample_from_anchor"], config["enable_confidence_head"]
    assert DFlashConfig.of(config, {}).num_drafted == 3


def test_shards_are_read(target, tmp_path):
    folder = eagle3(target, tmp_path)
    tensors, names = load_file(folder / WEIGHTS), {}
    for number, name in enumerate(tensors):
        names[name] = f"model-{number % 2}.safetensors"
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    found = Eagle3.from_pretrained(folder).state_dict()
    assert all(torch.equal(found[name.replace("midlayer", "layers.0")], tensors[name]) for name in names)


@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_medusas_heads_are_their_blocks_and_their_own_matrices(layers, target, tmp_path):
    tensors, hidden = medusa_tensors(target, layers=layers), torch.randn(4, 32)
    prefixed = {f"medusa_head.{name}": value for name, value in tensors.items()} | {"lm_head.weight": ones(2, 2)}
    for number, stored in enumerate((tensors, prefixed)):
        found = DraftHeads.from_medusa(Checkpoint.open(save(tmp_path / str(number), MEDUSA, stored)), target)
        for head in range(3):
            state = hidden
            for layer in range(layers):
                weight, bias = (tensors[f"{head}.{layer}.linear.{part}"] for part in ("weight", "bias"))
                state = state + torch.nn.functional.silu(torch.nn.functional.linear(state, weight, bias))
            want = state @ tensors[f"{head}.{layers}.weight"].T
            torch.testing.assert_close(found(hidden, target.lm_head)[:, head], want)
    found.save_pretrained(tmp_path / "heads")
    assert torch.equal(DraftHeads.from_pretrained(tmp_path / "heads")(hidden, None), found(hidden, None))


def test_a_gemma_assistant_by_its_folder(tmp_path):
    assistant().model.save_pretrained(tmp_path)
    found, want = loaded_drafter(tmp_path, gemma()).state_dict(), assistant().state_dict()
    assert found.keys() == want.keys() and all(torch.equal(found[name], value) for name, value in want.items())


def test_the_heads_of_a_model_of_images(tmp_path):
    """As Qwen3.5 is published: the head's tensors lie outside, the text is that of the whole model."""
    sizes = tiny_configs.shrunk(transformers.Qwen3_5Config, 2)
    sizes["text_config"]["layer_types"] = ["linear_attention", "full_attention"]
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16}
    sizes["vision_config"].update(vision)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(**sizes)).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    head = give_head(tmp_path, "qwen3.5")
    for kind in (transformers.Qwen3_5ForConditionalGeneration, transformers.AutoModelForCausalLM):
        target = kind.from_pretrained(tmp_path, dtype=torch.float64).eval()
        assert torch.equal(loaded_drafter("mtp", target).projection.weight, head["mtp.fc.weight"])
        options = {"do_sample": False, **prompts(1, 9, vocab=60), "eos_token_id": None}
        plain = generate(target, **options, graph_config="plain").sequences
        out = generate(target, **options, drafter="mtp", graph_config=TREE)
        assert torch.equal(out.sequences, plain) and out.stats.draft_rows > 0


def one_file(folder, head):
    """All tensors in one file, without an index."""
    whole = load_file(folder / "model-00001.safetensors") | head
    (folder / INDEX).unlink()
    save_file(whole, folder / WEIGHTS, {"format": "pt"})


def more_heads(folder, head):
    """Beside the first one, and copies of the target's matrices."""
    more = {name.replace("layers.0", "layers.1"): value + 1 for name, value in head.items() if "layers.0" in name}
    more["mtp.embed_tokens.weight"] = ones(3, 3)
    with_head(folder, "mellum", head | more)


def fused_experts(folder, head):
    want = Mtp.from_pretrained(folder, target_of("glm")).state_dict()
    fused = {name: value for name, value in head.items() if ".experts." not in name}
    for what in ("gate_up_proj", "down_proj"):
        fused[f"{AT}mlp.experts.{what}"] = want[f"block.mlp.experts.{what}"]
    with_head(folder, "glm", fused)


@pytest.mark.parametrize(
    ("change", "name"),
    [(one_file, "glm"), (more_heads, "mellum"), (fused_experts, "glm")],
    ids=["one", "more", "fused"],
)
def test_the_first_head_is_read_however_it_lies_there(change, name, tmp_path):
    head = saved(name, tmp_path)
    want = Mtp.from_pretrained(tmp_path, target_of(name)).state_dict()
    change(tmp_path, head)
    found = Mtp.from_pretrained(tmp_path, target_of(name)).state_dict()
    assert found.keys() == want.keys() and all(torch.equal(found[part], value) for part, value in want.items())


def test_heads_in_fp8_are_what_their_scales_say(tmp_path):
    """As DeepSeek-V3 is published: blocks of FP8, the last of them cut off, each with a scale."""
    head, rows, columns = saved("deepseek", tmp_path), 24, 20
    want, stored = {}, {}
    for name, value in head.items():
        if value.dim() < 2 or "gate.weight" in name or "eh_proj" in name:
            want[name] = stored[name] = value
            continue
        n, k = (-(-size // step) for size, step in zip(value.shape, (rows, columns), strict=True))
        scale = torch.rand(n, k, generator=torch.Generator().manual_seed(n)) * 0.05 + 0.01
        spread = scale.repeat_interleave(rows, 0)[: value.shape[0]].repeat_interleave(columns, 1)[:, : value.shape[1]]
        stored[name], stored[f"{name}_scale_inv"] = (value.float() / spread).to(torch.float8_e4m3fn), scale
        want[name] = (stored[name].float() * spread).double()
    plain, target = with_head(tmp_path, "deepseek", want).state_dict(), target_of("deepseek")
    shutil.rmtree(tmp_path)
    target.save_pretrained(tmp_path)
    add(tmp_path, stored)
    for block in ([rows, columns], [24]):
        changed_json(tmp_path / CONFIG, quantization_config={"quant_method": "fp8", "weight_block_size": block})
        if len(block) == 2:
            fp8 = Mtp.from_pretrained(tmp_path, target).state_dict()
            assert all(torch.equal(fp8[name], value) for name, value in plain.items())
            continue
        with pytest.raises(ValueError, match=r"weight_block_size in its config: expected two .* integers, got \[24\]"):
            Mtp.from_pretrained(tmp_path, target)


def test_heads_that_are_not_used_are_mentioned(tmp_path, caplog):
    saved("glm", tmp_path)
    target = reloaded("glm", tmp_path)
    for options, mentioned in (({}, True), ({"drafter": "mtp"}, False), ({"graph_config": "plain"}, False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "gsd_kernels"), gsd.patch(target, **options):
            pass
        assert (sum("layers.2.eh_proj.weight" in record.message for record in caplog.records) == 1) == mentioned


# Loading: what a call drafts with is made once, the hub asked for an id once.


@pytest.fixture
def hub(monkeypatch):
    """What the hub is asked for, and the folder that it gives."""
    given = {"asked": []}

    def download(name, **how):
        given["asked"].append((name, how))
        if "folder" not in given:
            raise OSError("offline")
        return str(given["folder"])

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    return given


def test_a_folder_is_loaded_once_until_its_files_change(tmp_path):
    target = tiny(num_hidden_layers=2)
    config = eagle3_config(target)
    save(tmp_path, config, safeailab(random_eagle3(config)))
    first = loaded_drafter(tmp_path, target)
    assert loaded_drafter(str(tmp_path), target) is first
    save(tmp_path, config, safeailab(random_eagle3(config, seed=1)))
    os.utime(tmp_path / WEIGHTS, ns=(1, 1))  # of the same size
    second = loaded_drafter(tmp_path, target)
    assert second is not first and not torch.equal(second.fc.weight, first.fc.weight)
    assert loaded_drafter(tmp_path, target.float()).fc.weight.dtype == torch.float32
    assert loaded_drafter(tmp_path, tiny(num_hidden_layers=2)) is not loaded_drafter(tmp_path, target)


def test_the_hub_is_asked_for_an_id_once(hub, target, tmp_path, monkeypatch):
    """Not for code and pickles, not at every call; again where the folder that it gave is gone."""
    refuse(target, "someone/other", "could not be fetched from the hub: offline", monkeypatch)
    hub["folder"] = eagle3(target, tmp_path / "a")
    hub["asked"].clear()
    options = {**prompts(1, 6), "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**options)
    for _ in range(2):
        assert torch.equal(gsd.generate(target, **options, drafter="someone/once"), plain)
    with gsd.patch(target, drafter="someone/once"):
        assert torch.equal(target.generate(**options), plain)
    ((name, how),) = hub["asked"]
    assert name == "someone/once" and how["allow_patterns"] == ["*.json", "*.safetensors"]
    first = loaded_drafter("someone/once", target)
    assert loaded_drafter("someone/once", tiny(num_hidden_layers=3)) is not first and len(hub["asked"]) == 1
    hub["folder"] = hub["folder"].rename(tmp_path / "b")
    assert loaded_drafter("someone/once", target) is not first and len(hub["asked"]) == 2


def test_of_a_targets_files_only_those_with_heads_are_fetched(hub, tmp_path, caplog):
    """At the commit that the target was loaded from; to mention heads the hub is not asked."""
    saved("glm", tmp_path)
    target, asked, hub["folder"] = reloaded("glm", tmp_path), hub["asked"], tmp_path
    (tmp_path / "model-00001.safetensors").rename(tmp_path / "mapped")  # by the target
    (tmp_path / "model-00001.safetensors").write_bytes(b"not read")
    target.config.name_or_path, target.config._commit_hash = "someone/glm", "abc"
    head = loaded_drafter("mtp", target)
    assert [how["allow_patterns"] for _, how in asked] == [["*.json"], ["model-00002.safetensors"]]
    assert all(name == "someone/glm" and how["revision"] == "abc" for name, how in asked)
    assert loaded_drafter("mtp", target) is head and len(asked) == 2
    with gsd.patch(target):
        assert len(asked) == 2, "nobody would read the line"
    with caplog.at_level(logging.INFO, "gsd_kernels"), gsd.patch(target):
        assert len(asked) == 3 and asked[-1][1]["local_files_only"]


@pytest.mark.slow
def test_the_conversion_that_a_pickle_is_refused_with_works(target, tmp_path):
    folder = eagle3(target, tmp_path / "drafter")
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="a pickle") as error:
        load_drafter(folder, target)
    command = str(error.value).partition("where you trust it: ")[2].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert isinstance(load_drafter(folder, target), Eagle3)
