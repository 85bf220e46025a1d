"""Drafter checkpoints that cannot be served: each is refused by name, and no weight of it was read."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from models import prompts, tiny
from safetensors.torch import load_file, save_file
from sources.drafters import dflash_config, eagle3_config, random_dflash, random_eagle3, safeailab, save

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, Eagle3
from gsd_kernels_hf.sources import checkpoints
from gsd_kernels_hf.sources.checkpoints import Checkpoint
from gsd_kernels_hf.sources.load import load_drafter


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=3, dtype=torch.float32)


def eagle3(target, folder, tensors=None, drop=(), own_embedding=False, **changes):
    """A good EAGLE-3 folder with another config or other tensors."""
    good = eagle3_config(target, **{k: v for k, v in changes.items() if k == "draft_vocab_size" and v == 61})
    stored = safeailab(random_eagle3(good, own_embedding=own_embedding).float())
    stored = {name: value for name, value in stored.items() if name not in drop} | (tensors or {})
    return save(folder, {**good, **changes}, stored)


def dflash(target, folder, inner=None, tensors=None, **changes):
    good = dflash_config(target)
    stored = random_dflash(good).float().state_dict() | (tensors or {})
    config = {**good, **changes}
    config["dflash_config"] = {**good["dflash_config"], **(inner or {})}
    return save(folder, config, stored)


def medusa(target, folder, tensors):
    return save(folder, {"medusa_num_heads": 1}, tensors)


def ones(*shape):
    return torch.ones(shape)


EAGLE3 = {
    "vocabulary": ({"vocab_size": 5000, "draft_vocab_size": 97}, "vocabulary of 5000 tokens, and the target has 97"),
    "hidden size": ({"target_hidden_size": 64}, "hidden states of size 64, and the target's are 32"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "reads hidden state 9, and the target has 3 layers"),
    "layers twice": ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "a list of different layers, got [1, 1, 2]"),
    "one fused layer": (
        {"eagle_config": {"use_aux_hidden_state": False}, "eagle_aux_hidden_state_layer_ids": None},
        "turns use_aux_hidden_state off",
    ),
    "shape": ({"intermediate_size": 50}, "is [48, 32], and its config means [50, 32]"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads in its config: expected an integer of at least 1"),
    "odd heads": ({"num_key_value_heads": 3}, "num_attention_heads=4 in its config is no multiple of"),
    "text for a number": (
        {"vocab_size": "97"},
        "vocab_size in its config: expected an integer of at least 1, got '97'",
    ),
    "text for a flag": ({"fc_norm": "yes"}, "fc_norm in its config: expected true or false, got 'yes'"),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm, of which"),
    "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' in its config"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu' in its config"),
    "draft vocabulary too large": ({"draft_vocab_size": 99}, "draft_vocab_size=99 in its config is more than"),
    "map out of range": ({"draft_vocab_size": 61, "tensors": {"d2t": torch.full((61,), 90)}}, "outside the vocabulary"),
    "map onto one": ({"draft_vocab_size": 61, "tensors": {"d2t": -torch.arange(61)}}, "two draft tokens to one token"),
    "tensor missing": ({"drop": ("midlayer.self_attn.o_proj.weight",)}, "no tensor layers.0.self_attn.o_proj.weight"),
    "tensor unknown": ({"tensors": {"experts.weight": ones(2)}}, "a tensor experts.weight, which this kind"),
    "the same twice": ({"tensors": {"layers.0.hidden_norm.weight": ones(32)}}, "which are the same weight"),
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
}
DFLASH = {
    "vocabulary": ({"vocab_size": 9000}, "vocabulary of 9000 tokens, and the target has 97"),
    "layers": ({"inner": {"target_layer_ids": [0, 3]}}, "reads hidden state 4, and the target has 3 layers"),
    "mask": ({"inner": {"mask_token_id": 97}}, "mask token 97 has no row in an embedding of 97"),
    "no mask": ({"inner": {"mask_token_id": None}}, "mask_token_id in its config: expected an integer"),
    "reduced without a matrix": ({"draft_vocab_size": 50}, "needs an output matrix of its own"),
    "DFlash 2 without its head": (
        {"architectures": ["DFlash2DraftModel"]},
        "selector_rank in its config: expected an integer",
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
}
MEDUSA = {
    "no heads": ({"x": ones(1)}, "has no Medusa heads"),
    "a head missing": (
        {
            "0.0.linear.weight": ones(32, 32),
            "0.0.linear.bias": ones(32),
            "0.1.weight": ones(97, 32),
            "2.1.weight": ones(97, 32),
        },
        "has no tensor 1.0.linear.weight|has no tensor 2.0.linear.weight",
    ),
    "hidden size": (
        {"0.0.linear.weight": ones(16, 16), "0.0.linear.bias": ones(16), "0.1.weight": ones(97, 16)},
        "hidden_size=16, and this one has 32",
    ),
    "vocabulary": (
        {"0.0.linear.weight": ones(32, 32), "0.0.linear.bias": ones(32), "0.1.weight": ones(3000, 32)},
        "vocabulary of 3000 tokens, and the target has 97",
    ),
    "no block": ({"0.0.weight": ones(97, 32)}, "without a residual block"),
}


def refuse(target, where, message, monkeypatch, reads=False):
    """Both doors refuse, and nothing was read (unless only the values show it) or changed."""
    read = []
    honest = Checkpoint._read
    monkeypatch.setattr(Checkpoint, "_read", lambda self: read.append(1) or honest(self))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    pattern = message if "|" in message or ".*" in message else re.escape(message)
    with pytest.raises(ValueError, match=pattern) as error:
        gsd.patch(target, drafter=where)
    assert str(error.value).startswith("drafter: ")
    with pytest.raises(ValueError, match=pattern):
        gsd.generate(target, **prompts(1, 4), drafter=where, max_new_tokens=2, do_sample=False)
    assert bool(read) == reads
    assert "generate" not in vars(target) and "_gsd_patch" not in vars(target)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


VALUES = ("map out of range", "map onto one", "NaN")


@pytest.mark.parametrize("name", EAGLE3)
def test_bad_eagle3(name, target, tmp_path, monkeypatch):
    changes, message = EAGLE3[name]
    refuse(target, eagle3(target, tmp_path, **changes), message, monkeypatch, reads=name in VALUES)


@pytest.mark.parametrize("name", DFLASH)
def test_bad_dflash(name, target, tmp_path, monkeypatch):
    changes, message = DFLASH[name]
    refuse(target, dflash(target, tmp_path, **changes), message, monkeypatch)


@pytest.mark.parametrize("name", MEDUSA)
def test_bad_medusa(name, target, tmp_path, monkeypatch):
    tensors, message = MEDUSA[name]
    refuse(target, medusa(target, tmp_path, tensors), message, monkeypatch)


CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def written(name, text):
    """Put a text in the place of a file."""
    return lambda folder: (folder / name).write_text(text)


def instead(name, text):
    """Put a file in the place of the weights."""

    def damage(folder):
        (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
        (folder / name).write_text(text)

    return damage


def of_architecture(name):
    return written(CONFIG, json.dumps({"architectures": [name]}))


UNREADABLE = {
    "pickle": (
        instead("pytorch_model.bin", ""),
        "pytorch_model.bin alone, a pickle, which is not loaded since it may run code; convert it",
    ),
    "shard missing": (
        instead(INDEX, json.dumps({"weight_map": {"fc.weight": "model-1.safetensors"}})),
        "names model-1.safetensors, and",
    ),
    "shard outside": (
        instead(INDEX, json.dumps({"weight_map": {"fc.weight": "../outside.safetensors"}})),
        "which is outside the folder",
    ),
    "no map": (instead(INDEX, "{}"), "has no weight_map of file names"),
    "language model": (of_architecture("LlamaForCausalLM"), "is a language model (LlamaForCausalLM), not a drafter"),
    "nothing known": (of_architecture("Whisper"), "is no drafter of a kind that is served"),
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_unreadable_folders(how, target, tmp_path, monkeypatch):
    damage, message = UNREADABLE[how]
    damage(eagle3(target, tmp_path / "drafter"))
    refuse(target, tmp_path / "drafter", message, monkeypatch)


@pytest.mark.slow
def test_the_conversion_that_a_pickle_is_refused_with_works(target, tmp_path):
    folder = eagle3(target, tmp_path / "drafter")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="a pickle") as error:
        load_drafter(folder, target)
    command = str(error.value).partition("where you trust it: ")[2].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert isinstance(load_drafter(folder, target), Eagle3)


def test_shards_are_read(target, tmp_path):
    folder = eagle3(target, tmp_path)
    tensors, names = load_file(folder / "model.safetensors"), {}
    for number, name in enumerate(tensors):
        names[name] = f"model-{number % 2}.safetensors"
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    loaded = Eagle3.from_pretrained(folder)
    assert all(torch.equal(loaded.state_dict()[n.replace("midlayer", "layers.0")], tensors[n]) for n in names)


def test_a_hub_id_is_fetched_without_code_and_pickles(target, tmp_path, monkeypatch):
    folder, asked = eagle3(target, tmp_path), []
    monkeypatch.setattr(checkpoints, "snapshot_download", lambda name, **how: asked.append((name, how)) or str(folder))
    assert isinstance(load_drafter("someone/eagle3", target), Eagle3)
    ((name, how),) = asked
    assert name == "someone/eagle3" and how["allow_patterns"] == ["*.json", "*.safetensors"]

    def fails(name, **how):
        raise OSError("offline")

    monkeypatch.setattr(checkpoints, "snapshot_download", fails)
    refuse(target, "someone/other", "could not be fetched from the hub: offline", monkeypatch)


def test_places_that_are_none(target, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refuse(target, tmp_path / "file", "is a file; expected the folder", monkeypatch)
    refuse(target, str(tmp_path / "missing"), "no such folder", monkeypatch)
    with pytest.raises(
        TypeError, match=r'a folder, a hub id, "mtp", or one of Eagle3, DFlash, .*, Gemma4Assistant, got int'
    ):
        gsd.patch(target, drafter=3)
    heads = DraftHeads.for_model(target, 2)
    with pytest.raises(ValueError, match="drafter: these are heads, and draft_heads has others"):
        gsd.patch(target, drafter=heads, draft_heads=heads)
    with pytest.raises(ValueError, match='"drafter" needs drafter'):
        gsd.patch(target, draft_sources=("drafter",))
    with pytest.raises(ValueError, match=r"drafter: .*drafts from one model alone; leave it out"):
        gsd.patch(target, drafter=heads, criterion="speculative", graph_config="chain")
    assert "generate" not in vars(target)


def test_a_target_too_small_for_the_published_layers(tmp_path, monkeypatch):
    small = tiny(num_hidden_layers=2, dtype=torch.float32)
    folder = eagle3(small, tmp_path, eagle_aux_hidden_state_layer_ids=None)
    refuse(small, folder, "reads hidden state -1, and the target has 2 layers", monkeypatch)


def test_a_loaded_drafter_of_another_model_is_refused(target):
    other = tiny(num_hidden_layers=3, hidden_size=64, dtype=torch.float32)
    for drafter in (random_eagle3(eagle3_config(other)).float(), random_dflash(dflash_config(other)).float()):
        with pytest.raises(ValueError, match="hidden states of size 64"):
            gsd.patch(target, drafter=drafter)
        with pytest.raises(ValueError, match="is on meta, and the target takes its input on cpu; move it"):
            gsd.patch(other, drafter=drafter.to("meta"))
