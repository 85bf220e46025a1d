"""Builds the compiled ops. Metadata is in pyproject.toml; docs/contributing.md explains the variables for users.

GSD_KERNELS_BUILD_CPU=auto|0|1    CPU ops (C++). auto: when there is a compiler. 1: fail without one.
GSD_KERNELS_BUILD_CUDA=auto|0|1   CUDA ops. auto: when there is nvcc 12.5 or newer and torch was built for CUDA. 1: fail
                                  without.
GSD_KERNELS_CUDA_ARCHS            e.g. "8.0;9.0+PTX"; then TORCH_CUDA_ARCH_LIST; this machine's GPUs; RELEASE_ARCHS.
MAX_JOBS                          parallel compilations.
CXX, CUDACXX, CUDA_HOME           compilers.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

MAPPED = {
    name: f"python/{name}"
    for name in ("gsd_kernels_hf", "gsd_kernels_train", "gsd_kernels_serve", "gsd_kernels_cli", "gsd_kernels_sglang")
}
if "editable_wheel" in sys.argv:  # the benchmarks run in a clone and are no part of the wheel
    MAPPED["gsd_kernels_bench"] = "bench"
OLDEST_TORCH = "0x020A000000000000"  # 2.10: the stable ABI that the libraries are built against
OLDEST_NVCC = (12, 5)  # since which the runtime can be asked for a function of the driver by version
RELEASE_ARCHS = "8.0;8.6;8.9;9.0;10.0;11.0;12.0+PTX"
CSRC = Path("csrc")


def packages() -> list[str]:
    names = find_packages(include=["gsd_kernels", "gsd_kernels.*"])
    for name, folder in MAPPED.items():
        # Recipes of models that are in the repository are run once, by hand, from a clone.
        names += [name, *(f"{name}.{sub}" for sub in find_packages(folder, exclude=["recipes*"]))]
    return names


def wanted(variable: str) -> bool | None:
    """The variable's True, False, or None for auto."""
    value = os.environ.get(variable, "auto")
    if value not in ("auto", "0", "1"):
        raise SystemExit(f"{variable}: expected auto, 0 or 1, got {value!r}")
    return None if value == "auto" else value == "1"


def find_torch() -> Path | None:
    """The installed torch, if new enough. pip's isolated build hides it from ``import``; sysconfig knows the folder."""
    user = sysconfig.get_path("platlib", scheme=sysconfig.get_preferred_scheme("user"))
    for place in (*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), user):
        torch = Path(place) / "torch"
        if not (torch / "include/torch/csrc/stable/library.h").exists():
            continue
        major, minor = re.search(r"__version__ = ['\"](\d+)\.(\d+)", (torch / "version.py").read_text()).groups()
        if (int(major), int(minor)) >= (2, 10):
            return torch
    return None


def torch_cuda_version(torch: Path) -> str | None:
    """The CUDA version that torch was built for; None for a CPU build. Read, not imported: torch may be hidden."""
    text = (torch / "version.py").read_text()
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = [os.environ.get("CUDACXX"), *(f"{home}/bin/nvcc" for home in homes), shutil.which("nvcc")]
    return next((path for path in (*found, "/usr/local/cuda/bin/nvcc") if path and Path(path).exists()), None)


def told(*command: str, **options: Any) -> str:
    """What a program says; nothing where it does not run here."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, **options)
    except OSError:
        return ""
    return answer.stdout + answer.stderr


def nvcc_version(nvcc: str) -> tuple[int, ...]:
    """Such as (12, 8); () where it does not say."""
    match = re.search(r"release (\d+)\.(\d+)", told(nvcc, "--version"))
    return tuple(map(int, match.groups())) if match else ()


def cuda_libraries(nvcc: str) -> Path:
    """The folder of libcudart_static.a. nvcc may be a wrapper script, so it is asked where its toolkit is."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.cu"
        source.touch()
        match = re.search(r"^#\$ TOP=(.*)$", told(nvcc, "--dryrun", source.name, cwd=folder), re.MULTILINE)
    top = Path(match.group(1).strip()).resolve() if match else Path(nvcc).resolve().parents[1]
    for folder in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"):
        if (top / folder / "libcudart_static.a").exists():
            return top / folder
    raise SystemExit(f"no libcudart_static.a under {top}: the CUDA toolkit is incomplete")


def local_archs() -> list[str]:
    """The compute capabilities of this machine's GPUs."""
    listed = told("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return sorted(set(re.findall(r"^\d+\.\d+$", listed, re.MULTILINE)), key=_number)


def wanted_archs(nvcc: str) -> str:
    """Those that a variable names; else this machine's, else a release's, as far as nvcc knows them.

    A GPU that is newer than nvcc gets the PTX of the newest one before it, so that an installation does not end there.
    9.0 is compiled as 9.0a, which has wgmma: every GPU of 9.0 runs it. PTX of 9.0a would fit no other GPU.
    """
    named = os.environ.get("GSD_KERNELS_CUDA_ARCHS") or os.environ.get("TORCH_CUDA_ARCH_LIST")
    archs = re.split(r"[;,\s]+", named.strip()) if named else local_archs() or RELEASE_ARCHS.split(";")
    if not named:
        found = re.findall(r"sm_(\d+)(\d)\b", told(nvcc, "--list-gpu-code"))
        known = [f"{major}.{minor}" for major, minor in found]
        fitting = [arch for arch in archs if not known or arch.removesuffix("+PTX") in known]
        if len(fitting) < len(archs):
            newest = max(known, key=_number)
            archs = [*(arch for arch in fitting if arch != newest), f"{newest}+PTX"]
    return ";".join(re.sub(r"^9\.0(?!a)", "9.0a", arch) for arch in sorted(archs, key=_number))


def _number(arch: str) -> float:
    """Of an architecture; 0 where it has none, which is refused where it is read."""
    return float(re.match(r"\d+\.\d+|", arch)[0] or 0)


def code_flags(archs: str) -> list[str]:
    """nvcc's -gencode options for a list such as ``8.0;9.0a+PTX``."""
    flags = []
    for arch in archs.split(";"):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        if match is None:
            raise SystemExit(f"GSD_KERNELS_CUDA_ARCHS: cannot read {arch!r}; expected e.g. 8.0;9.0+PTX")
        plain = match[1] + match[2]
        flags += ["-gencode", f"arch=compute_{plain}{match[3]},code=sm_{plain}{match[3]}"]
        if match[4]:
            flags += ["-gencode", f"arch=compute_{plain},code=compute_{plain}"]
    return flags


@dataclass
class Toolchain:
    """What there is to build with."""

    torch: Path | None = field(default_factory=find_torch)
    cxx: str | None = field(default_factory=lambda: shutil.which(os.environ.get("CXX", "g++")))
    nvcc: str | None = field(default_factory=find_nvcc)

    def missing(self, *, cuda: bool) -> str | None:
        if sys.platform != "linux":
            return "Linux"
        if self.torch is None:
            return "torch 2.10 or newer"
        if self.cxx is None:
            return "C++17 compiler (CXX, g++)"
        if cuda and self.nvcc is None:
            return "nvcc (CUDACXX, CUDA_HOME, PATH)"
        if cuda and (version := nvcc_version(self.nvcc)) < OLDEST_NVCC:
            expected, found = (".".join(map(str, numbers)) for numbers in (OLDEST_NVCC, version))
            return f"nvcc {expected} or newer: {self.nvcc} is {found or 'of no known version'}; CUDACXX names another"
        return None


def missing_torch() -> list[str]:
    """What an isolated build has to install so that operators are compiled; nothing where they cannot be."""
    tools = Toolchain()
    if tools.torch is not None or wanted("GSD_KERNELS_BUILD_CPU") is False:
        return []
    tools.torch = Path()
    return [] if tools.missing(cuda=False) else ["torch>=2.10"]


def extensions(tools: Toolchain) -> list[Extension]:
    found = []
    for name, cuda in (("cpu", False), ("cuda", True)):
        variable = f"GSD_KERNELS_BUILD_{name.upper()}"
        want = wanted(variable)
        if want is False:
            continue
        missing = tools.missing(cuda=cuda)
        sources = sorted(str(p) for p in (CSRC / name).iterdir() if p.suffix in (".cpp", ".cu"))
        if missing is not None and want:
            raise SystemExit(f"{variable}=1, but there is no {missing}")
        if missing is not None:
            print(f"gsd_kernels: the {name} ops are not built: there is no {missing}")
        elif want is None and cuda and torch_cuda_version(tools.torch) is None:
            print(f"gsd_kernels: the cuda ops are not built: torch has no CUDA; {variable}=1 builds them")
        else:
            found.append(Extension(f"gsd_kernels._{name}", sources, py_limited_api=True))
    return found


class BuildOps(build_ext):
    """Writes one build.ninja an extension; without ninja the same commands run one after the other."""

    def build_extension(self, ext: Extension) -> None:
        tools, cuda = Toolchain(), ext.name.endswith("_cuda")
        # What an editable installation compiled, the next one finds: pip gives each a temporary folder.
        temporary = "build/editable" if "editable_wheel" in sys.argv else self.build_temp
        build = Path(temporary).resolve() / ext.name.rpartition(".")[2]
        build.mkdir(parents=True, exist_ok=True)
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        root = Path.cwd()

        cxx = [tools.cxx, "-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
        cxx += [f"-ffile-prefix-map={root}=.", f"-DTORCH_TARGET_VERSION={OLDEST_TORCH}", "-isystem"]
        cxx.append(str(tools.torch / "include"))
        # Only libtorch is named: its own dependencies bring libtorch_cpu, and libtorch_cuda where there is one.
        link = [tools.cxx, "-shared", "-s", "-Wl,-O1", "-Wl,--exclude-libs,ALL", f"-L{tools.torch / 'lib'}"]
        link += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
        nvcc: list[str] = []
        if cuda:
            archs = wanted_archs(tools.nvcc)
            nvcc = [tools.nvcc, "-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
            nvcc += ["-Xptxas", "-v", *code_flags(archs)]
            # The smallest binaries, which nvcc 12.8 and newer write; drivers of CUDA 12.4 and newer read them.
            if "--compress-mode" in told(tools.nvcc, "--help"):
                nvcc.append("--compress-mode=size")
            cxx += ["-DUSE_CUDA", f'-DGSD_ARCHITECTURES="{archs}"']
            link += [f"-L{cuda_libraries(tools.nvcc)}", "-lcudart_static", "-lrt", "-ldl", "-lpthread"]

        sources = [root / source for source in ext.sources]
        compiles = [([*(nvcc if s.suffix == ".cu" else cxx), "-c"], s, build / f"{s.name}.o") for s in sources]
        objects = [str(o) for _, _, o in compiles]
        # The linker resolves symbols from left to right: objects before libraries.
        link = [link[0], *objects, *link[1:]]
        if shutil.which("ninja") is None:
            for command, source, target in compiles:
                self.spawn([*command, str(source), "-o", str(target)])
            self.spawn([*link, "-o", str(output)])
            return
        lines = ["rule run", "  command = $command", "  depfile = $out.d", "  deps = gcc", ""]
        lines += ["rule link", "  command = $command", ""]
        for command, source, target in compiles:
            text = " ".join([*map(_quote, command), "-MD", "-MF", _quote(f"{target}.d"), _quote(str(source))])
            lines += [f"build {target}: run {source}", f"  command = {text} -o {target}", ""]
        lines += [f"build {output}: link {' '.join(objects)}", f"  command = {' '.join(map(_quote, link))} -o {output}"]
        (build / "build.ninja").write_text("\n".join(lines) + "\n")
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        self.spawn(["ninja", "-v", "-C", str(build), *jobs])


def _quote(word: str) -> str:
    """For a command in build.ninja."""
    return shlex.quote(word).replace("$", "$$")


class StableWheel(bdist_wheel):
    """With compiled ops one wheel serves every Python from 3.10 on; without, it is pure Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if not self.root_is_pure:
            self.py_limited_api = "cp310"


if __name__ == "__main__":  # also read by the build backend
    setup(
        packages=packages(),
        package_dir=MAPPED,
        ext_modules=extensions(Toolchain()),
        cmdclass={"build_ext": BuildOps, "bdist_wheel": StableWheel},
    )
