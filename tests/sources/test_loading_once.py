"""What a call drafts with is made once a call; a drafter that is named is loaded once, the hub asked for an id once."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from models import prompts, tiny
from sources.drafters import eagle3_config, random_eagle3, safeailab, save

import gsd_kernels as gsd
from gsd_kernels_hf.sources import checkpoints
from gsd_kernels_hf.sources.load import loaded_drafter


def test_a_folder_is_loaded_once_until_its_files_change(tmp_path):
    target = tiny(num_hidden_layers=2)
    config = eagle3_config(target)
    save(tmp_path, config, safeailab(random_eagle3(config)))
    first = loaded_drafter(tmp_path, target)
    assert loaded_drafter(str(tmp_path), target) is first
    save(tmp_path, config, safeailab(random_eagle3(config, seed=1)))
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))  # of the same size
    second = loaded_drafter(tmp_path, target)
    assert second is not first and not torch.equal(second.fc.weight, first.fc.weight)
    assert loaded_drafter(tmp_path, target.float()).fc.weight.dtype == torch.float32
    assert loaded_drafter(tmp_path, tiny(num_hidden_layers=2)) is not loaded_drafter(tmp_path, target)


def test_the_hub_is_asked_for_an_id_once(tmp_path, monkeypatch):
    """Not at every call; again where the folder that it gave is gone."""
    target, asked = tiny(num_hidden_layers=2), []
    config = eagle3_config(target)
    save(tmp_path / "a", config, safeailab(random_eagle3(config)))
    hub = {"here": tmp_path / "a"}
    monkeypatch.setattr(
        checkpoints, "snapshot_download", lambda name, **how: asked.append((name, how)) or str(hub["here"])
    )
    options = {**prompts(1, 6), "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**options)
    for _ in range(3):
        assert torch.equal(gsd.generate(target, **options, drafter="someone/once"), plain)
    with gsd.patch(target, drafter="someone/once"):
        for _ in range(3):
            assert torch.equal(target.generate(**options), plain)
    assert [name for name, _ in asked] == ["someone/once"]
    first = loaded_drafter("someone/once", target)
    assert loaded_drafter("someone/once", tiny(num_hidden_layers=2)) is not first
    assert len(asked) == 1
    hub["here"] = (tmp_path / "a").rename(tmp_path / "b")
    assert loaded_drafter("someone/once", target) is not first
    assert len(asked) == 2


@pytest.mark.parametrize("option", ["draft_heads", "drafter"])
def test_files_that_go_bad_leave_what_was_loaded(tmp_path, caplog, option):
    """A draft never decides whether there is a text."""
    target, inputs = tiny(num_hidden_layers=2), {**prompts(1, 9), "max_new_tokens": 6, "do_sample": False}
    want, place = target.generate(**inputs), tmp_path / "heads"
    gsd.DraftHeads.for_model(target, 2).save_pretrained(place)
    with gsd.patch(target, **{option: place}) as handle:

        def heads() -> gsd.DraftHeads:
            (*_, engine) = handle.engines
            return engine.parts[0]()

        assert torch.equal(target.generate(**inputs), want)
        first = heads()
        (place / ".partial-1-draft_heads.safetensors").write_bytes(b"is being written")
        assert torch.equal(target.generate(**inputs), want) and heads() is first and not caplog.records
        for bad in (lambda: (place / "draft_heads.safetensors").write_bytes(b"half"), lambda: shutil.rmtree(place)):
            bad()
            for _ in range(2):
                assert torch.equal(target.generate(**inputs), want) and heads() is first
        said = [record.getMessage() for record in caplog.records if "goes on drafting" in record.getMessage()]
        assert len(said) == 2 and all(message.startswith(f"{option}: what was loaded") for message in said)
        gsd.DraftHeads.for_model(target, 3).save_pretrained(place)
        assert torch.equal(target.generate(**inputs), want) and heads().num_heads == 3
