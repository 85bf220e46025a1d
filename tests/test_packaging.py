"""Wheels as pip makes them: torch hidden by build isolation, torch or compiler missing. Tried outside the checkout."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import setuptools
from kept import once

ROOT = Path(__file__).parent.parent
CXX = shutil.which(os.environ.get("CXX", "g++"))
SATELLITES = ("gsd_kernels_train", "gsd_kernels_serve", "gsd_kernels_cli", "gsd_kernels_sglang")
TREES = ("csrc", "gsd_kernels", "python", "bench", "setup.py", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kept("csrc", "setup.py", "pyproject.toml", "gsd_kernels", "python"),
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source checkout"),
]


def cloned(folder: Path) -> Path:
    """A fresh clone: no shared objects, no build folder."""
    for name in TREES:
        here, there = ROOT / name, folder / "source" / name
        if here.is_dir():
            shutil.copytree(here, there, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(here, there)
    return folder / "source"


@pytest.fixture
def source(tmp_path):
    return cloned(tmp_path)


@pytest.fixture
def pure(tmp_path_factory):
    """The folder of a wheel without compiled operators, and what its build printed; made once."""

    def build(folder: Path) -> None:
        done = build_wheel(cloned(folder), GSD_KERNELS_BUILD_CPU="0")
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "printed").write_text(done.stdout + done.stderr)

    return once(tmp_path_factory, "pure-wheel", build)


def dependencies(source: Path) -> Path:
    """A folder that has setuptools alone."""
    folder = source.parent / "dependencies"
    if not folder.exists():
        folder.mkdir()
        site_packages = Path(setuptools.__file__).parents[1]
        for name in ("setuptools", "_distutils_hack", f"setuptools-{setuptools.__version__}.dist-info"):
            (folder / name).symlink_to(site_packages / name)
    return folder


def build_wheel(source: Path, python: str | Path = sys.executable, **environment: str) -> subprocess.CompletedProcess:
    """setup.py with setuptools but without any site-packages on sys.path, as in pip's isolated build."""
    program = (
        "import sys, runpy\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [sys.argv[1]]\n"
        "try:\n    import torch\nexcept ImportError: pass\nelse: raise SystemExit('torch is not hidden')\n"
        "sys.argv = ['setup.py', '-q', 'bdist_wheel', '-d', '../wheels']\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GSD_") and k != "PYTHONPATH"}
    return subprocess.run(
        [str(python), "-c", program, str(dependencies(source))],
        cwd=source,
        env={**clean, "GSD_KERNELS_BUILD_CUDA": "0", **environment},
        capture_output=True,
        text=True,
    )


def installed(source: Path) -> tuple[Path, str]:
    """The one wheel that was built, unpacked; and its tags."""
    (wheel,) = (source.parent / "wheels").glob("*.whl")
    target = source.parent / "installed"
    shutil.unpack_archive(wheel, target, "zip")
    return target, wheel.stem.split("-", 2)[2]


def answer(target: Path, program: str) -> str:
    """What a program prints that imports the unpacked wheel from outside the checkout."""
    program = (
        f"import gsd_kernels; assert gsd_kernels.__file__.startswith({str(target)!r}), gsd_kernels.__file__\n{program}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=target.parent,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REASON = (
    "import torch\nfrom gsd_kernels.backends import unavailable_reason as why\nprint(why('cpu', torch.device('cpu')))"
)


@pytest.fixture
def one_op(source):
    """Without the other operators' C++: each registers itself, and installing this checkout has compiled them all."""
    for file in (source / "csrc/cpu").glob("*.cpp"):
        if file.name != "graph_ops.cpp":
            file.unlink()


@pytest.fixture
def quick_compiler(tmp_path):
    """The C++ compiler without optimisation, which takes most of a build's time."""
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\nexec "{CXX}" "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
@pytest.mark.usefixtures("one_op")
def test_an_isolated_build_finds_the_installed_torch(source, quick_compiler):
    done = build_wheel(source, GSD_KERNELS_BUILD_CPU="1", CXX=quick_compiler)
    assert done.returncode == 0, done.stdout + done.stderr
    target, tags = installed(source)
    assert tags.startswith("cp310-abi3-linux_")
    assert answer(target, REASON) == "None"
    for package in ("gsd_kernels", "gsd_kernels_hf", *SATELLITES):
        assert (target / package / "__init__.py").exists(), package


def test_without_torch_the_wheel_is_pure_python_and_names_the_cure(source):
    venv.create(source.parent / "venv", with_pip=False)
    python = source.parent / "venv/bin/python"
    done = build_wheel(source, python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not built: there is no torch 2.10 or newer" in done.stdout
    target, tags = installed(source)
    assert tags == "py3-none-any"
    assert "then this package again: pip install ." in answer(target, REASON)

    refused = build_wheel(source, python, GSD_KERNELS_BUILD_CPU="1")
    assert refused.returncode != 0 and "GSD_KERNELS_BUILD_CPU=1, but there is no torch" in refused.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GSD_KERNELS_BUILD_CPU": "1"}, "GSD_KERNELS_BUILD_CPU=1, but there is no C++17 compiler"),
        ({"GSD_KERNELS_BUILD_CPU": "yes"}, "GSD_KERNELS_BUILD_CPU: expected auto, 0 or 1"),
        (
            {"GSD_KERNELS_BUILD_CPU": "0", "GSD_KERNELS_BUILD_CUDA": "1"},
            "GSD_KERNELS_BUILD_CUDA=1, but there is no",
        ),
    ],
)
def test_what_is_asked_for_and_impossible_fails(source, environment, message):
    done = build_wheel(source, CXX="no-such-compiler", **environment)
    assert done.returncode != 0 and message in done.stderr


def test_both_off_is_pure_python(pure):
    target, tags = installed(pure / "source")
    assert tags == "py3-none-any"
    assert "would be ignored" not in (pure / "printed").read_text(), "setuptools takes folders of weights for packages"
    (entry_points,) = target.glob("*.dist-info/entry_points.txt")
    assert "[sglang.srt.plugins]\ngsd = gsd_kernels_sglang.plugin:register" in entry_points.read_text()
    assert {folder.name for folder in target.iterdir() if not folder.name.endswith(".dist-info")} == {
        *("gsd_kernels", "gsd_kernels_hf"),
        *SATELLITES,
    }, "without benchmarks"
    weights = {file.relative_to(target).as_posix() for file in target.rglob("*.safetensors")}
    models = {f"gsd_kernels_cli/demo/{member}/model.safetensors" for member in ("target", "draft")}
    assert weights == {*models, "gsd_kernels_hf/shipped/smollm2-135m-instruct.safetensors"}


TYPED = """\
import gsd_kernels
from transformers import PreTrainedModel


def use(model: PreTrainedModel, draft: PreTrainedModel) -> None:
    with gsd_kernels.patch(model, draft_sources=("history",), graph_config="auto", criterion="exact") as handle:
        handle.clear()
    gsd_kernels.generate(model, assistant_model=draft, graph_config="tree", max_new_tokens=8, top_p=0.9, seed=1)
"""
MISTAKES = {
    "gsd_kernels.patch(model, graph_confg='auto')": "graph_confg",
    "gsd_kernels.patch(model, draft_sources=('histroy',))": "draft_sources",
    "gsd_kernels.GraphConfig.preset('chian')": "preset",
}


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="no mypy: pip install mypy")
def test_a_type_checker_finds_a_misspelt_option_of_the_installed_wheel(pure, tmp_path):
    """Every mistake has its line, and no other line has an error. Nothing of torch or transformers is read."""
    target, _ = installed(pure / "source")
    file, settings = tmp_path / "use.py", tmp_path / "mypy.ini"
    file.write_text(TYPED + "".join(f"    {line}\n" for line in MISTAKES))
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "transformers", "numpy"))
    settings.write_text(f"[mypy]\nignore_missing_imports = true\n{skipped}")
    mypy = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path / "cache", file]
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run([*map(str, mypy)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    first = len(TYPED.splitlines()) + 1
    found = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error:" in line}
    assert list(found) == [*range(first, first + len(MISTAKES))], done.stdout + done.stderr
    assert all(named in line for named, line in zip(MISTAKES.values(), found.values(), strict=True)), found
