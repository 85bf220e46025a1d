"""A drafter that is named by its folder is loaded once for a target, as long as the files stay."""

from __future__ import annotations

import os

import torch
from models import tiny
from sources.drafters import eagle3_config, random_eagle3, safeailab, save

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
