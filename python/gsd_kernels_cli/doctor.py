"""``gsd-kernels doctor``: what runs here, and why the rest does not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata, util
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from gsd_kernels_hf.extras import cure

from . import options, values
from .demo import smollm2
from .output import out, print_json, progress, table

if TYPE_CHECKING:
    import torch

READY, SERVES = "ready", "serves"
GOOD = (READY, SERVES, "True")
KERNEL = "kernel case arch registers stack_bytes spill_stores spill_loads shared_kib load_bits matrix ok".split()
"""Of a compiled kernel, what is shown."""


def command(
    place: options.ModelPlace = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile every Triton kernel, no GPU needed, and list its resources.")
    ] = False,
    archs: Annotated[
        list[int] | None, typer.Option("--arch", help="Compute capability for --kernels, e.g. 90. Repeatable.")
    ] = None,
    model: Annotated[
        str | None,
        options.checkpoint_option("Load it, too, and say which drafters come with it."),
    ] = None,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Prove the operator of rows on every GPU anew, in some seconds, and show how."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Versions, devices, compilers, and every backend on every device with the reason why one is missing."""
    model = values.named_once(place, model)
    with progress("proving the operator of rows" if prove else "looking around"):
        report = examine(prove=prove)
    if model is not None:
        with progress("loading the model"):
            report["installed"]["drafters"] = drafters_of(model)
    if kernels:
        with progress("compiling the Triton kernels (about a minute the first time)"):
            from .kernel_report import ARCHS, SHARED_LIMIT, kernel_table

            unknown = set(archs or ()) - set(SHARED_LIMIT)
            if unknown:
                raise ValueError(f"--arch: expected one of {', '.join(map(str, SHARED_LIMIT))}, got {min(unknown)}")
            report["kernels"] = kernel_table(archs or ARCHS)
    if as_json:
        print_json(report)
    else:
        _print(**report)
    if prove and not report["proofs"]:
        raise RuntimeError("nothing to prove: no GPU here can run the operator of rows")


def examine(*, prove: bool = False) -> dict[str, dict[str, Any]]:
    """Everything that ``doctor`` reports about this machine: tables by their titles, of names and what was found.

    Behind them ``proofs`` of the operator of rows, by GPU and kind; ``prove``: they are made anew.
    """
    import torch

    from gsd_kernels import cpu_levels
    from gsd_kernels.backends import BACKENDS, unavailable_reason
    from gsd_kernels.ops.decoder_rows import cuda
    from gsd_kernels_hf.model import fused, proof

    from .versions import versions

    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    devices = [torch.device("cpu"), *gpus]
    proofs = {str(gpu): proof.report(gpu, again=prove) for gpu in gpus if fused.missing(gpu) is None}
    installed = {name: version or "missing" for name, version in versions().items()}
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    installed |= {
        "platform": platform.platform(),
        "c++": _release(os.environ.get("CXX") or "g++", 0),
        "nvcc": _release(shutil.which("nvcc") or os.path.join(home, "bin", "nvcc"), -1),
        "flash attention": _flash_attention(bool(gpus)),
    }
    for device in devices:
        installed[f"rows on {device}"] = _rows_on(fused.missing(device), proofs.get(str(device)))
    for gpu in gpus:
        kernels = cuda.products(torch.cuda.get_device_capability(gpu))
        installed[f"products on {gpu}"] = kernels or "none: it is too old"
        slow = unavailable_reason("cuda", gpu)  # no Triton kernel: backend="triton" takes them too
        installed[f"small ops on {gpu}"] = (
            "the compiled ones, with Triton as well"
            if slow is None
            else f"PyTorch's operators, hundreds of launches a step: {slow}"
        )
    installed["server"] = _said(resolve_name("gsd_kernels_serve.limits:check_installed"), "transformers' own")
    installed["demo's model"] = smollm2.why_missing() or smollm2.NAME
    installed["drawing"] = "matplotlib" if util.find_spec("matplotlib") else f"matplotlib is missing: {cure('plot')}"
    report = {"installed": installed | {str(device): _device(device) for device in devices}}
    for device in devices:
        reasons = {backend: unavailable_reason(backend, device) for backend in BACKENDS if backend != "auto"}
        report[f"backends on {device}"] = _ready(reasons)
    if unavailable_reason("cpu", devices[0]) is None:
        levels = _ready(cpu_levels.levels())
        report["instructions for rows on the CPU"] = {**levels, "in use": _said(cpu_levels.active)}
    return {**report, "proofs": proofs}


def drafters_of(model: str) -> str:
    """Say what ``drafter=`` takes for a model and comes with it.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    from gsd_kernels_hf.files import model_place
    from gsd_kernels_hf.sources.feature_drafter import own_heads

    from .pair import quiet_transformers

    quiet_transformers()
    heads = own_heads(AutoModelForCausalLM.from_pretrained(model_place(model, "--model", gguf=False), dtype="auto"))
    if heads is None:
        return "none comes with the model"
    return f'drafter="mtp", where it is named: the multi-token-prediction heads in its checkpoint ({heads} …)'


def _ready(reasons: dict[str, str | None]) -> dict[str, str]:
    return {name: READY if reason is None else f"no: {reason}" for name, reason in reasons.items()}


def _flash_attention(gpu: bool) -> str:
    """The installed flash-attn, or why prompts cannot go through it. Graph rows never do: they have an operator."""
    try:
        version = metadata.version("flash-attn")
        resolve_name("flash_attn")
    except metadata.PackageNotFoundError:
        needs = "" if gpu else ", on a machine with an NVIDIA GPU"
        return f"flash-attn is missing: {cure('flash', '--no-build-isolation')}{needs}; sdpa serves without it"
    except (ImportError, OSError) as error:  # built for another torch
        again = "pip install --no-build-isolation --force-reinstall --no-deps flash-attn"
        return f"{version}, does not load ({' '.join(str(error).split())}): {again}"
    return version if gpu else f"{version}, there is no NVIDIA GPU; sdpa serves without one"


def _said(call: Callable[[], str | None], otherwise: str = "") -> str:
    """Return what a call does, or the words of its error."""
    try:
        return call() or otherwise
    except (ImportError, ValueError) as error:
        return str(error).removeprefix("serve: ")


def _device(device: torch.device) -> str:
    import torch

    if device.type == "cpu":
        name, capability = platform.processor() or platform.machine(), torch.backends.cpu.get_cpu_capability()
        return f"{name}, {torch.get_num_threads()} threads, {capability}"
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor}"


def _release(command: str, line: int) -> str:
    """The line of what a compiler says of itself that names its release."""
    try:
        asked = [*command.split(), "--version"]
        told = subprocess.check_output(asked, stderr=subprocess.DEVNULL, text=True, timeout=20)
        return told.strip().splitlines()[line].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "missing"


def _rows_on(missing: str | None, proofs: dict[str, dict[str, Any]] | None) -> str:
    """Say which way rows go on a device where the operator is ``missing`` for a reason, or proved so."""
    if missing is not None:
        return f"the model's modules: {missing}"
    if proofs is None:
        return "one operator"
    right = [name for name, proof in proofs.items() if proof["why"] is None]
    waits = "where a model's kind proves itself at its first use; gsd-kernels doctor --prove does so now"
    return f"one operator, proved for {'; '.join(right)}" if right else f"one operator, {waits}"


def _print(proofs: dict[str, Any], kernels: Sequence[dict[str, Any]] = (), **tables: dict[str, str]) -> None:
    """Print a table of each that has rows, what is good in green."""
    shown: list[tuple[list[str], list[Any]]] = [([title, "<"], [*found.items()]) for title, found in tables.items()]
    for device, kinds in proofs.items():
        headers = [f"one operator on {device}, and its modules", "error", "other bits", "<rows: ms", "<"]
        shown.append((headers, [_proof(*proof) for proof in kinds.items()]))
    headers = [name.replace("_", " ") for name in KERNEL]
    shown.append((headers, [[str(kernel[name]) for name in KERNEL] for kernel in kernels]))
    for headers, rows in shown:
        if rows:
            out.print(table(headers, [[Text(cell, "green" if cell in GOOD else "") for cell in row] for row in rows]))
            out.print()


def _proof(kind: str, proof: dict[str, Any]) -> list[str]:
    """A row of the operator's proofs on a GPU: its figures, and the modules' behind them."""
    errors = " / ".join(f"{error:.1e}" for error in proof["errors"].values())
    times = {rows: " / ".join(f"{time:.3f}" for time in ways.values()) for rows, ways in proof["milliseconds"].items()}
    said = ", ".join(f"{rows}: {ways}" for rows, ways in times.items())
    verdict = SERVES if proof["why"] is None else f"no: {proof['why']}"
    return [kind, errors, str(sum(proof["apart"].values())), said, verdict]
