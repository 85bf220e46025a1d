"""``gsd-kernels doctor``: what runs here, and why the rest does not."""

from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import shutil
import subprocess
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
    from rich.table import Table

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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
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

    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "devices": [_device(device) for device in devices],
        "compilers": {"c++": _compiler(_cxx()), "nvcc": _compiler(_nvcc(), last=True)},
        "backends": {
            backend: {str(device): unavailable_reason(backend, device) for device in devices}
            for backend in BACKENDS
            if backend != "auto"
        },
        "small_ops": {str(device): unavailable_reason("cuda", device) for device in devices if device.type == "cuda"},
        "flash_attention": flash_attention(gpu=len(devices) > 1),
        "fused_rows": {str(device): fused.missing(device) for device in devices},
        "proofs": proofs(),
        "products": {str(d): cuda.products(torch.cuda.get_device_capability(d)) for d in devices if d.type == "cuda"},
        "cpu_levels": {} if unavailable_reason("cpu", torch.device("cpu")) else cpu_levels.levels(),
        "cpu_level": None if unavailable_reason("cpu", torch.device("cpu")) else _level(),
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
    return {str(device): gpu_proof.report(device, fused.ways(), again=again) for device in able}


def drafters_of(model: str) -> dict[str, str]:
    """List what ``drafter=`` takes for a model and comes with it, and what that is.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    from gsd_kernels_hf.files import model_place
    from gsd_kernels_hf.sources.mtp_files import own_heads

    from .pair import quiet_transformers

    quiet_transformers()
    target = AutoModelForCausalLM.from_pretrained(model_place(model, "--model", gguf=False), dtype="auto")
    heads = own_heads(target)
    return {} if heads is None else {"mtp": f"the multi-token-prediction heads in its checkpoint ({heads} …)"}


def flash_attention(gpu: bool) -> dict[str, str | None]:
    """The installed flash-attn, and why prompts cannot go through it: ``{"version": …, "missing": …}``.

    Graph rows never do: they have an operator of their own.
    """
    install = cure("flash", "--no-build-isolation")
    try:
        version = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        needs = "" if gpu else ", on a machine with an NVIDIA GPU"
        return {"version": None, "missing": f"flash-attn is missing: {install}{needs}; sdpa serves without it"}
    reason = None
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:  # built for another torch
        what = " ".join(str(error).split())
        reason = f"does not load ({what}): pip install --no-build-isolation --force-reinstall --no-deps flash-attn"
    if reason is None and not gpu:
        reason = "there is no NVIDIA GPU; sdpa serves without one"
    return {"version": version, "missing": reason}


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
        return {
            "device": "cpu",
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _cxx() -> str | None:
    named = os.environ.get("CXX")
    return named or next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    beside = os.path.join(home, "bin", "nvcc")
    return shutil.which("nvcc") or (beside if os.access(beside, os.X_OK) else None)


def _compiler(command: str | None, last: bool = False) -> str | None:
    """The line of ``--version`` that names the release; ``None`` without a working compiler."""
    if command is None:
        return None
    try:
        done = subprocess.run([*command.split(), "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return (lines[-1] if last else lines[0]) if lines else None


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


def _ways(report: dict[str, Any]) -> dict[str, str]:
    """Say which way rows and the small ops of a step go on each device."""
    ways = {
        f"rows on {device}": "one operator" if reason is None else f"the model's modules: {reason}"
        for device, reason in report["fused_rows"].items()
    }
    for device, kinds in report["proofs"].items():
        right = [name for name, proof in kinds.items() if proof["why"] is None]
        waits = "where a model's kind proves itself at its first use; gsd-kernels doctor --prove does so now"
        ways[f"rows on {device}"] = (
            f"one operator, proved for {'; '.join(right)}" if right else f"one operator, {waits}"
        )
    for device, kernels in report["products"].items():
        ways[f"products on {device}"] = kernels or "none: it is too old"
    for device, reason in report["small_ops"].items():  # no Triton kernel: backend="triton" takes them too
        slow = f"PyTorch's operators, hundreds of launches a step: {reason}"
        ways[f"small ops on {device}"] = "the compiled ones, with Triton as well" if reason is None else slow
    return ways


def _drafters(report: dict[str, Any]) -> dict[str, str]:
    """The line on what drafts for the model that was named, if one was."""
    if "drafters" not in report:
        return {}
    named = [f'drafter="{name}" drafts with {what}' for name, what in report["drafters"].items()]
    return {"drafters": "; ".join([*named, "used where it is named"]) if named else "none comes with the model"}


def _proof_table(device: str, kinds: dict[str, dict[str, Any]]) -> Table:
    """A table of the operator's proofs on a GPU, kind by kind: the operator's figure, and the modules' behind it."""
    counts = list(dict.fromkeys(rows for proof in kinds.values() for rows in proof["milliseconds"]))
    headers = ("error", "other bits", *(f"{rows} rows, ms" for rows in counts), "<verdict")
    rows = table(f"one operator on {device}, and its modules", *headers)
    for name, proof in kinds.items():
        errors, times = proof["errors"], proof["milliseconds"]
        cells = [" / ".join(f"{errors[way]:.1e}" for way in errors), str(sum(proof["apart"].values()))]
        cells += [" / ".join(f"{times[n][way]:.3f}" for way in times[n]) if n in times else "" for n in counts]
        rows.add_row(name, *cells, "[green]serves[/green]" if proof["why"] is None else f"no: {escape(proof['why'])}")
    return rows


def _print(report: dict[str, Any]) -> None:
    facts = table("installed", "<")
    for name, version in report["versions"].items():
        facts.add_row(name, version or "missing")
    facts.add_row("platform", escape(report["platform"]))
    for name, version in report["compilers"].items():
        facts.add_row(name, escape(version or "none found"))
    flash = report["flash_attention"]
    facts.add_row("flash attention", escape(", ".join(filter(None, (flash["version"], flash["missing"])))))
    for what, way in {**_ways(report), **_drafters(report)}.items():
        facts.add_row(what, escape(way))
    facts.add_row("server", escape(report["serving"] or "transformers' own"))
    facts.add_row("demo's model", escape(report["demo_model"] or NAME))
    facts.add_row("drawing", escape(report["plot"] or "matplotlib"))
    for device in report["devices"]:
        size = f"{device['threads']} threads" if "threads" in device else f"{device['memory_bytes'] / 2**30:.0f} GiB"
        facts.add_row(device["device"], f"{device['name']}, {size}, {device['capability']}")
    out.print(facts)
    _print_tables(report)


def _print_tables(report: dict[str, Any]) -> None:
    """Backends, proofs and levels, and compiled kernels where they were asked for."""
    for device in report["devices"]:
        rows = table(f"backends on {device['device']}", "<")
        for backend, reasons in report["backends"].items():
            reason = reasons[device["device"]]
            rows.add_row(backend, "[green]ready[/green]" if reason is None else f"no: {escape(reason)}")
        out.print()
        out.print(rows)
    if report["cpu_levels"]:
        rows = table("instructions for rows on the CPU", "<")
        for level, reason in report["cpu_levels"].items():
            rows.add_row(level, "[green]ready[/green]" if reason is None else f"no: {escape(reason)}")
        rows.add_row("in use", escape(report["cpu_level"]))
        out.print()
        out.print(rows)
    for device, kinds in report["proofs"].items():
        if kinds:
            out.print()
            out.print(_proof_table(device, kinds))
    if report.get("kernels_missing"):
        err.print(f"gsd-kernels: error: no kernel table: {report['kernels_missing']}", markup=False, soft_wrap=True)
    elif report.get("kernels"):
        columns = ("registers", "stack_bytes", "spill_stores", "spill_loads", "shared_kib", "load_bits")
        rows = table("kernel", "<case", "arch", *(name.replace("_", " ") for name in columns), "<matrix", "<")
        for kernel in report["kernels"]:
            values = (f"{kernel[name]}" for name in columns)
            mark = "ok" if kernel["ok"] else "[red]over the limit[/red]"
            rows.add_row(kernel["kernel"], kernel["case"], f"sm_{kernel['arch']}", *values, kernel["matrix"], mark)
        out.print()
        out.print(rows)
