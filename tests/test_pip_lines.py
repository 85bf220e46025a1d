"""What a message says that pip is to install: packages by name, and the extra in a clone."""

from __future__ import annotations

import pytest

from gsd_kernels_hf import extras

NEEDED = ["torch>=2", "gguf>=1; extra == 'gguf'", 'flash-attn>=2; platform_system == "Linux" and extra == "flash"']


def test_packages_are_named_and_the_extra_in_a_clone(monkeypatch):
    monkeypatch.setattr(extras.metadata, "requires", lambda name: NEEDED)
    assert extras.packages("gguf") == ["gguf>=1"] and extras.packages("flash") == ["flash-attn>=2"]
    assert extras.cure("gguf") == "pip install 'gguf>=1' (in a clone of this repository: pip install -e '.[gguf]')"
    assert extras.cure("flash", "-U").startswith("pip install -U 'flash-attn>=2' ")


@pytest.mark.parametrize("installed", [True, False])
def test_without_known_packages_the_clone_alone_is_named(installed, monkeypatch):
    def requires(name):
        if not installed:
            raise extras.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras.metadata, "requires", requires)
    assert extras.cure("gguf") == "in a clone: pip install -e '.[gguf]'"
