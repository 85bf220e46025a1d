"""Drafters that a clone has: which model one is for, the line that says so, and its name as an option."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from models import prompts, tiny
from sources.drafters import eagle3_config, fit_eagle3, random_eagle3, safeailab, save

import gsd_kernels as gsd
from gsd_kernels_cli import values
from gsd_kernels_hf.sources import shipped
from gsd_kernels_hf.sources.checkpoints import Checkpoint, read_json
from gsd_kernels_hf.sources.eagle3 import Eagle3, Eagle3Config
from gsd_kernels_hf.sources.feature_drafter import weight_name
from gsd_kernels_hf.sources.shipped import SHIPPED_DRAFTERS, SHIPPED_FOLDER, Shipped, fingerprint

NAME = "tiny-instruct"
CALL = {**prompts(2, 9, seed=3, vocab=61), "max_new_tokens": 40, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A model in float32 that a drafter comes for."""
    model = tiny(num_hidden_layers=3, vocab_size=61, dtype=torch.float32)
    config = eagle3_config(model)
    save(tmp_path / NAME, config, safeailab(fit_eagle3(random_eagle3(config), model)))
    sizes = tuple(getattr(model.config, name) for name in shipped.SIZES)
    monkeypatch.setattr(shipped, "SHIPPED_FOLDER", tmp_path)
    monkeypatch.setattr(shipped, "SHIPPED_DRAFTERS", {NAME: Shipped(sizes, fingerprint(model))})
    return model


def said(caplog):
    return [record.getMessage() for record in caplog.records if "this model" in record.getMessage()]


def test_it_is_mentioned_and_used_where_it_is_named(target, caplog):
    plain = target.generate(**CALL)
    assert len(set(plain[:, 9:].flatten().tolist())) >= 15
    with caplog.at_level(logging.INFO, "gsd_kernels"), gsd.patch(target) as handle:
        assert torch.equal(target.generate(**CALL), plain) and "eagle3" not in handle.stats.sources
    (line,) = said(caplog)
    assert f'drafter="{NAME}" drafts with it' in line and "is not used" in line
    caplog.clear()
    with caplog.at_level(logging.INFO, "gsd_kernels"), gsd.patch(target, drafter=NAME) as handle:
        assert torch.equal(target.generate(**CALL), plain)
        assert handle.stats.sources["eagle3"].accepted > 0 and handle.stats.draft_rows > 0
        sampled = [target.generate(**{**CALL, "do_sample": True}, seed=5, **more) for more in ({}, {"drafter": False})]
    assert torch.equal(*sampled) and not said(caplog)


CHANGES = {
    "one matrix": lambda model: model.model.layers[1].mlp.down_proj.weight.mul_(1.01),
    "every weight": lambda model: [parameter.add_(0.01) for parameter in model.parameters()],
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_other_weights_are_another_model(target, change, caplog):
    assert shipped.drafter_of(target) == NAME
    CHANGES[change](target)
    assert shipped.drafter_of(target) is None
    plain = target.generate(**CALL)
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        gsd.patch(target)
        gsd.unpatch(target)
        assert not said(caplog)
        assert torch.equal(gsd.generate(target, **CALL, drafter=NAME), plain)
    assert "trained for other weights than this model's" in said(caplog)[0]


def test_it_is_the_same_model_in_bfloat16_and_unknown_in_float16(target, caplog):
    assert fingerprint(target) == fingerprint(target.to(torch.bfloat16))
    assert fingerprint(target.to(torch.float16)) is None and shipped.drafter_of(target) is None


def test_other_sizes_cost_no_look_at_the_weights(target, monkeypatch):
    monkeypatch.setattr(shipped, "fingerprint", lambda model: pytest.fail("weights were read"))
    assert shipped.drafter_of(tiny(num_hidden_layers=2)) is None


def test_weights_are_looked_at_when_it_is_loaded_and_not_at_every_call(target, monkeypatch):
    looks = []
    monkeypatch.setattr(shipped, "fingerprint", lambda model: looks.append(model) or fingerprint(model))
    for _ in range(3):
        gsd.generate(target, **CALL, drafter=NAME)
    assert len(looks) == 1


def test_a_folder_of_that_name_comes_first(target, tmp_path, monkeypatch):
    assert shipped.folder_of(NAME) == tmp_path / NAME
    assert shipped.folder_of("else/where") == "else/where"
    monkeypatch.chdir(tmp_path)
    assert shipped.folder_of(NAME) == NAME


def test_an_installed_wheel_says_where_a_drafter_is(target, monkeypatch):
    monkeypatch.setattr(shipped, "SHIPPED_FOLDER", shipped.SHIPPED_FOLDER / "elsewhere")
    assert shipped.drafter_of(target) is None
    with pytest.raises(ValueError, match=f"drafter: {NAME} is in a clone of gsd_kernels, not in its wheel"):
        gsd.generate(target, **CALL, drafter=NAME)


@pytest.mark.parametrize("name", SHIPPED_DRAFTERS)
def test_what_is_shipped_is_small_and_whole(name):
    folder = SHIPPED_FOLDER / name
    weights = folder / "model.safetensors"
    assert weights.stat().st_size <= 10_000_000
    config = Eagle3Config.of(read_json(folder / "config.json"), own_embedding=False)
    assert (
        not config.own_head and config.draft_vocab_size < config.layers.vocab_size == SHIPPED_DRAFTERS[name].sizes[-1]
    )
    shapes = {key: tuple(value.shape) for key, value in Eagle3(config).state_dict().items()}
    checkpoint = Checkpoint.open(folder)
    checkpoint.rename(weight_name)
    found = checkpoint.read(shapes)
    assert {value.dtype for key, value in found.items() if key != "d2t"} == {torch.bfloat16}
    assert f"`{SHIPPED_DRAFTERS[name].fingerprint}`" in (folder / "README.md").read_text(encoding="utf-8")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_command_line_takes_its_name(tmp_path):
    for name in SHIPPED_DRAFTERS:
        assert values.drafter(name) == name
    assert {folder.name for folder in SHIPPED_FOLDER.iterdir()} == SHIPPED_DRAFTERS.keys()
    with pytest.raises(ValueError, match="--drafter: no such folder: tiny-instruct"):
        values.drafter(NAME)
