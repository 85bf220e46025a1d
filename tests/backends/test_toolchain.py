"""What setup.py builds with: architectures by name, and nvcc as old as there is, by scripts in its place."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source checkout"),
]


@pytest.fixture
def setup(monkeypatch) -> ModuleType:
    """The file, which builds nothing."""
    monkeypatch.setenv("GSD_KERNELS_BUILD_CPU", "0")
    monkeypatch.setenv("GSD_KERNELS_BUILD_CUDA", "0")
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("gsd_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gsd_setup", module)
    spec.loader.exec_module(module)
    return module


def test_architecture_lists(setup):
    flags = ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90a,code=sm_90a"]
    assert setup.code_flags("8.0;9.0a+PTX") == [*flags, "-gencode", "arch=compute_90,code=compute_90"]
    with pytest.raises(SystemExit, match="cannot read"):
        setup.code_flags("ampere")


@pytest.fixture
def nvcc(setup, tmp_path, monkeypatch):
    """Puts an nvcc of a version in place, and a torch for CUDA."""

    def place(version: str, codes: str = "") -> str:
        file = tmp_path / "nvcc"
        file.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" || echo "{codes}"\n')
        file.chmod(0o755)
        monkeypatch.setattr(setup, "torch_cuda_version", lambda torch: "12.8")
        return str(file)

    return place


@pytest.mark.parametrize("version", ["11.8", "12.4", "12.5", "13.0", None])
def test_an_nvcc_that_does_not_compile_the_ops_is_left_alone(version, setup, nvcc, monkeypatch, capsys):
    """The install goes on without them and says why; where they are asked for, it fails by the version."""
    path = nvcc(f"Cuda compilation tools, release {version}, V{version}.1" if version else "no compiler")
    suitable = version in ("12.5", "13.0")
    monkeypatch.setenv("GSD_KERNELS_BUILD_CUDA", "auto")
    tools = setup.Toolchain(torch=ROOT, cxx="g++", nvcc=path)
    assert [extension.name for extension in setup.extensions(tools)] == ["gsd_kernels._cuda"] * suitable
    why = f"there is no nvcc 12.5 or newer: {path} is {version or 'of no known version'}; CUDACXX names another"
    assert (why in capsys.readouterr().out) != suitable
    monkeypatch.setenv("GSD_KERNELS_BUILD_CUDA", "1")
    if not suitable:
        with pytest.raises(SystemExit, match=re.escape(f"GSD_KERNELS_BUILD_CUDA=1, but {why}")):
            setup.extensions(tools)


ALL = "sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_90a sm_100 sm_103 sm_110 sm_120 sm_121"
OLD = "sm_50 sm_80 sm_86 sm_87 sm_89 sm_90 sm_90a"


@pytest.mark.parametrize(
    ("codes", "local", "named", "archs"),
    [
        (ALL, [], None, "8.0;8.6;8.9;9.0a;10.0;11.0;12.0+PTX"),
        (OLD, [], None, "8.0;8.6;8.9;9.0a+PTX"),
        ("", [], None, "8.0;8.6;8.9;9.0a;10.0;11.0;12.0+PTX"),
        (ALL, ["9.0"], None, "9.0a"),
        (OLD, ["12.0"], None, "9.0a+PTX"),
        (OLD, ["8.0", "10.0"], None, "8.0;9.0a+PTX"),
        (OLD, ["8.0"], "8.0 9.0 10.0+PTX", "8.0;9.0a;10.0+PTX"),
    ],
)
def test_code_is_for_what_is_named_here_or_released_as_far_as_nvcc_knows(
    codes, local, named, archs, setup, nvcc, monkeypatch
):
    monkeypatch.setattr(setup, "local_archs", lambda: local)
    monkeypatch.delenv("GSD_KERNELS_CUDA_ARCHS", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if named:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    assert setup.wanted_archs(nvcc("", codes)) == archs
