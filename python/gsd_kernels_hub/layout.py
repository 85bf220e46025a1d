"""Lays out what the Hub calls a kernel from libraries that setup.py has compiled. ``.ci/hub`` calls it."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import shutil
from pathlib import Path

HUB = Path(__file__).resolve().parent
ROOT = HUB.parents[1]
NAME, VERSION = "gsd-kernels", 1
STABLE_ABI = "210"  # of the oldest torch that the libraries serve: OLDEST_TORCH in setup.py


def python_files() -> dict[str, bytes]:
    """Every variant's Python: the package without its bindings, and what a kernel has beside it."""
    package = ROOT / "gsd_kernels"
    listed = [path for path in package.rglob("*") if path.suffix in (".py", ".json")]
    files = {path.relative_to(package).as_posix(): path.read_bytes() for path in listed}
    return files | {path.name: path.read_bytes() for path in (HUB / "kernel").glob("*.py")}


def lay_out(libraries: Path, out: Path, *, cuda: str | None = None, archs: list[str] | None = None) -> list[Path]:
    """Write a kernel's repository.

    Args:
        libraries: folder with ``_cpu.abi3.so``, and ``_cuda.abi3.so`` where there are CUDA ops.
        out: the repository's folder; its ``build`` is replaced.
        cuda: the version of CUDA that compiled ``_cuda.abi3.so``, such as "13.0", which then gets a variant.
        archs: the compute capabilities that it has code for.

    Returns:
        The folders of the variants.
    """
    shutil.rmtree(out / "build", ignore_errors=True)
    for folder in ("benchmarks", "tests"):
        shutil.copytree(HUB / folder, out / folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (HUB / "README.md", ROOT / "LICENSE"):
        shutil.copy(file, out)
    variants = [variant(libraries, out, "cpu", {"type": "cpu"}, ["_cpu.abi3.so"])]
    if cuda is not None:
        backend = {"type": "cuda", "archs": archs or []}
        name = "cu" + "".join(cuda.split(".")[:2])
        variants.append(variant(libraries, out, name, backend, ["_cpu.abi3.so", "_cuda.abi3.so"]))
    return variants


def variant(libraries: Path, out: Path, name: str, backend: dict[str, object], needed: list[str]) -> Path:
    """Write one variant. Its id, which names the namespace of its ops, is new whenever a byte of it is."""
    files = python_files() | {library: (libraries / library).read_bytes() for library in needed}
    digests = {path: hashlib.sha256(files[path]).digest() for path in sorted(files)}
    together = hashlib.sha256(b"".join(path.encode() + digest for path, digest in digests.items())).hexdigest()
    metadata = {
        "name": NAME,
        "id": f"_{NAME.replace('-', '_')}_{backend['type']}_{together[:10]}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend,
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(digest).decode() for path, digest in digests.items()},
        },
    }
    folder = out / "build" / f"torch-stable-abi{STABLE_ABI}-{name}-{platform.machine()}-linux"
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", type=Path, help="folder with _cpu.abi3.so")
    parser.add_argument("out", type=Path, help="folder of the repository")
    parser.add_argument("--cuda", help="version of CUDA that compiled _cuda.abi3.so")
    parser.add_argument("--archs", default="", help='its compute capabilities, such as "8.0;9.0+PTX"')
    given = parser.parse_args()
    for folder in lay_out(given.libraries, given.out, cuda=given.cuda, archs=[a for a in given.archs.split(";") if a]):
        print(folder)


if __name__ == "__main__":
    main()
