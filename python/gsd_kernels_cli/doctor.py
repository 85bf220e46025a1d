"""``gsd-kernels doctor``: what runs here, and why the rest does not."""

from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata, util
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gsd_kernels_hf.extras import cure

from . import options, values
from .demo.smollm2 import NAME
from .output import FAILURE, err, out, print_json, progress, table

if TYPE_CHECKING:
    import torch

RESOURCES = ("registers", "stack_bytes", "spill_stores", "spill_loads", "shared_kib", "load_bits")
"""Of a compiled kernel, that are shown."""
NO_GPU = "no GPU here can run the operator of rows"


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
    with progress("looking around"):
        report = examine()
    if prove:
        with progress("proving the operator of rows"):
            report["proofs"] = proofs(again=True)
    if model is not None:
        with progress("loading the model"):
            report["drafters"] = drafters_of(model)
    if kernels:
        with progress("compiling the Triton kernels (about a minute the first time)"):
            report["kernels"], report["kernels_missing"] = _kernels(archs)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if prove and not report["proofs"]:
        err.print(f"gsd-kernels: error: nothing to prove: {NO_GPU}", markup=False, soft_wrap=True)
    if (kernels and report["kernels"] is None) or (prove and not report["proofs"]):
        raise typer.Exit(FAILURE)


def examine() -> dict[str, Any]:
    """Everything that ``doctor`` reports about this machine, as plain data."""
    import torch

    from gsd_kernels import cpu_levels
    from gsd_kernels.backends import BACKENDS, unavailable_reason
    from gsd_kernels.ops.decoder_rows import cuda
    from gsd_kernels_hf.model import fused

    from .demo import smollm2
    from .versions import versions

    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    devices = [torch.device("cpu"), *gpus]
    no_cpu_ops = unavailable_reason("cpu", devices[0])
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "devices": [_device(device) for device in devices],
        "compilers": _compilers(),
        "backends": {
            backend: {str(device): unavailable_reason(backend, device) for device in devices}
            for backend in BACKENDS
            if backend != "auto"
        },
        "small_ops": {str(gpu): unavailable_reason("cuda", gpu) for gpu in gpus},
        "flash_attention": flash_attention(gpu=bool(gpus)),
        "fused_rows": {str(device): fused.missing(device) for device in devices},
        "proofs": proofs(),
        "products": {str(gpu): cuda.products(torch.cuda.get_device_capability(gpu)) for gpu in gpus},
        "cpu_levels": {} if no_cpu_ops else cpu_levels.levels(),
        "cpu_level": None if no_cpu_ops else _level(),
        "serving": serving(),
        "demo_model": smollm2.why_missing(),
        "plot": None if util.find_spec("matplotlib") else f"matplotlib is missing: {cure('plot')}",
    }


def proofs(*, again: bool = False) -> dict[str, dict[str, Any]]:
    """By GPU that can run the operator of rows and kind of it what was found; ``again``: it is proved anew."""
    import torch

    from gsd_kernels_hf.model import fused, gpu_proof

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    able = [device for device in devices if fused.missing(device) is None]
    return {str(device): gpu_proof.report(device, again=again) for device in able}


def drafters_of(model: str) -> dict[str, str]:
    """List what ``drafter=`` takes for a model and comes with it, and what that is.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    from gsd_kernels_hf.files import model_place
    from gsd_kernels_hf.sources.mtp import own_heads

    from .pair import quiet_transformers

    quiet_transformers()
    target = AutoModelForCausalLM.from_pretrained(model_place(model, "--model", gguf=False), dtype="auto")
    heads = own_heads(target)
    return {} if heads is None else {"mtp": f"the multi-token-prediction heads in its checkpoint ({heads} …)"}


def flash_attention(gpu: bool) -> dict[str, str | None]:
    """The installed flash-attn, and why prompts cannot go through it: ``{"version": …, "missing": …}``.

    Graph rows never do: they have an operator of their own.
    """
    version, missing = None, None if gpu else "there is no NVIDIA GPU; sdpa serves without one"
    try:
        version = metadata.version("flash-attn")
        importlib.import_module("flash_attn")
    except metadata.PackageNotFoundError:
        needs = "" if gpu else ", on a machine with an NVIDIA GPU"
        missing = f"flash-attn is missing: {cure('flash', '--no-build-isolation')}{needs}; sdpa serves without it"
    except (ImportError, OSError) as error:  # built for another torch
        again = "pip install --no-build-isolation --force-reinstall --no-deps flash-attn"
        missing = f"does not load ({' '.join(str(error).split())}): {again}"
    return {"version": version, "missing": missing}


def serving() -> str | None:
    """Why ``gsd-kernels serve`` cannot run here."""
    try:
        pkgutil.resolve_name("gsd_kernels_serve.installed:check_installed")()
    except ImportError as error:
        return str(error).removeprefix("serve: ")
    return None


def _level() -> str:
    """The instructions in use, or why none can be."""
    from gsd_kernels import cpu_levels

    try:
        return cpu_levels.active()
    except ValueError as error:
        return str(error)


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    if device.type == "cpu":
        name, capability = platform.processor() or platform.machine(), torch.backends.cpu.get_cpu_capability()
        return {"device": "cpu", "name": name, "threads": torch.get_num_threads(), "capability": capability}
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    about = {"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability}
    return {"device": str(device), **about}


def _compilers() -> dict[str, str | None]:
    """Lines of ``--version`` that name releases: of C++ compilers the first line, of nvcc the last; ``None``: none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.join(home, "bin")])
    cxx = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found: dict[str, str | None] = {}
    for kind, names, line in (("c++", cxx, 0), ("nvcc", ["nvcc"], -1)):
        command = next((path for name in names if (path := shutil.which(name, path=places))), names[0])
        try:
            told = subprocess.check_output(
                [*command.split(), "--version"], stderr=subprocess.DEVNULL, text=True, timeout=20
            )
            found[kind] = told.strip().splitlines()[line].strip()
        except (OSError, subprocess.SubprocessError, IndexError):
            found[kind] = None
    return found


def _kernels(archs: list[int] | None) -> tuple[list[dict[str, Any]] | None, str | None]:
    """The table of compiled kernels, or why there is none."""
    try:
        from .kernel_report import ARCHS, SHARED_LIMIT, kernel_table

        unknown = set(archs or ()) - set(SHARED_LIMIT)
        if unknown:
            raise ValueError(f"--arch: expected one of {', '.join(map(str, SHARED_LIMIT))}, got {min(unknown)}")
        return kernel_table(archs or ARCHS), None
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, " ".join(str(error).split())


def _rows_of(device: str, report: dict[str, Any]) -> str:
    """Say which way rows go on a device."""
    reason = report["fused_rows"][device]
    if reason is not None:
        return f"the model's modules: {reason}"
    if device not in report["proofs"]:
        return "one operator"
    right = [name for name, proof in report["proofs"][device].items() if proof["why"] is None]
    waits = "where a model's kind proves itself at its first use; gsd-kernels doctor --prove does so now"
    return f"one operator, proved for {'; '.join(right)}" if right else f"one operator, {waits}"


def _facts(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines of the first table: what, and what was found."""
    for name, version in (report["versions"] | {"platform": report["platform"]} | report["compilers"]).items():
        yield name, version or "missing"
    yield "flash attention", ", ".join(filter(None, report["flash_attention"].values()))
    for device in report["fused_rows"]:
        yield f"rows on {device}", _rows_of(device, report)
    for device, kernels in report["products"].items():
        yield f"products on {device}", kernels or "none: it is too old"
    for device, reason in report["small_ops"].items():  # no Triton kernel: backend="triton" takes them too
        slow = f"PyTorch's operators, hundreds of launches a step: {reason}"
        yield f"small ops on {device}", "the compiled ones, with Triton as well" if reason is None else slow
    if "drafters" in report:
        named = [f'drafter="{name}" drafts with {what}' for name, what in report["drafters"].items()]
        yield "drafters", "; ".join([*named, "used where it is named"]) if named else "none comes with the model"
    yield "server", report["serving"] or "transformers' own"
    yield "demo's model", report["demo_model"] or NAME
    yield "drawing", report["plot"] or "matplotlib"
    for device in report["devices"]:
        size = f"{device['threads']} threads" if "threads" in device else f"{device['memory_bytes'] / 2**30:.0f} GiB"
        yield device["device"], f"{device['name']}, {size}, {device['capability']}"


def _ready(reason: str | None, said: str = "ready") -> str:
    return f"[green]{said}[/green]" if reason is None else f"no: {escape(reason)}"


def _print(report: dict[str, Any]) -> None:
    _show(["installed", "<"], [[name, escape(text)] for name, text in _facts(report)])
    for device in (device["device"] for device in report["devices"]):
        backends = report["backends"].items()
        _show([f"backends on {device}", "<"], [[name, _ready(reasons[device])] for name, reasons in backends])
    levels = [[level, _ready(reason)] for level, reason in report["cpu_levels"].items()]
    if levels:
        _show(["instructions for rows on the CPU", "<"], [*levels, ["in use", escape(report["cpu_level"])]])
    for device, kinds in report["proofs"].items():
        named = f"one operator on {device}, and its modules"
        if kinds:
            _show([named, "error", "other bits", "<rows: ms", "<"], [_proof(*proof) for proof in kinds.items()])
    if report.get("kernels_missing"):
        err.print(f"gsd-kernels: error: no kernel table: {report['kernels_missing']}", markup=False, soft_wrap=True)
    elif report.get("kernels"):
        headers = ["kernel", "<case", "arch", *(name.replace("_", " ") for name in RESOURCES), "<matrix", "<"]
        rows = []
        for kernel in report["kernels"]:
            mark = "ok" if kernel["ok"] else "[red]over the limit[/red]"
            numbers = (str(kernel[name]) for name in RESOURCES)
            rows.append([kernel["kernel"], kernel["case"], f"sm_{kernel['arch']}", *numbers, kernel["matrix"], mark])
        _show(headers, rows)


def _show(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    out.print(table(headers, rows))
    out.print()


def _proof(kind: str, proof: dict[str, Any]) -> list[str]:
    """A row of the operator's proofs on a GPU: its figures, and the modules' behind them."""
    errors = " / ".join(f"{error:.1e}" for error in proof["errors"].values())
    times = {rows: " / ".join(f"{time:.3f}" for time in ways.values()) for rows, ways in proof["milliseconds"].items()}
    said = ", ".join(f"{rows}: {ways}" for rows, ways in times.items())
    return [kind, errors, str(sum(proof["apart"].values())), said, _ready(proof["why"], "serves")]
