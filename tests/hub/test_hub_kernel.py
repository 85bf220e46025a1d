"""The kernel for the Hub (`.ci/hub`), laid out from this build and loaded on a CPU by the kernels package."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import prompts, tiny
from ops.contracts.backends import needs_cpu
from torch import nn

import gsd_kernels

ROOT = Path(__file__).resolve().parents[2]
HUB = "python/gsd_kernels_hub"
LIBRARIES = Path(gsd_kernels.__file__).parent
NAME = "gsd-kernels/gsd-kernels"

kernels = pytest.importorskip("kernels")
pytestmark = [pytest.mark.skipif(not (ROOT / HUB).exists(), reason="not a source checkout"), needs_cpu]


def lay_out(*places, source=ROOT, **options):
    return runpy.run_path(str(source / HUB / "layout.py"))["lay_out"](*places, **options)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The kernel's folder."""
    out = tmp_path_factory.mktemp("hub")
    lay_out(LIBRARIES, out)
    return out


@pytest.fixture(scope="module")
def kernel(repository):
    return kernels.get_local_kernel(repository)


def test_digests_are_those_that_kernels_computes_and_cuda_gets_a_variant_of_its_own(tmp_path):
    """Laid out from a stand-in: nothing here runs it."""
    from kernels import _rust
    from kernels.variants import parse_variant

    shutil.copy(LIBRARIES / "_cpu.abi3.so", tmp_path)
    (tmp_path / "_cuda.abi3.so").write_bytes(b"CUDA")
    variants = lay_out(tmp_path, tmp_path / "out", cuda="13.0", archs=["8.0", "9.0+PTX"])
    for variant, backend in zip(variants, ("cpu", "cu130"), strict=True):
        read = _rust.Metadata.read_from_file(variant / "metadata.json")
        read.digest.validate(_rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, variant))
        assert (variant / "_cuda.abi3.so").exists() == (backend == "cu130")
        assert parse_variant(variant.name).arch.backend.variant_str == backend
    assert read.backend.archs == ["8.0", "9.0+PTX"] and read.id.startswith("_gsd_kernels_cuda_")


@pytest.mark.parametrize("same_file", [False, True], ids=["a library each", "one library, as in the Hub's cache"])
def test_two_versions_live_in_one_process(same_file, kernel, tmp_path):
    """Ops of one name and other arguments, each in a namespace of its own; the installed package has them too."""
    source, libraries = tmp_path / "source", Path(kernel.__file__).parent
    for folder in ("gsd_kernels", HUB):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "LICENSE", source)
    file = source / "gsd_kernels/ops/verify/api.py"
    file.write_text(file.read_text().replace('"token_ids[B,R]', f'"token_ids_{same_file}[B,R]'))
    (folder,) = lay_out(libraries, tmp_path, source=source)
    if same_file:
        (folder / "_cpu.abi3.so").unlink()
        (folder / "_cpu.abi3.so").hardlink_to(libraries / "_cpu.abi3.so")
    other = kernels.get_local_kernel(tmp_path)
    assert all(hasattr(kernel, name) for name in kernel.__all__)
    assert len({module.__name__ for module in (gsd_kernels, kernel, other)}) == 3
    schemas = [str(getattr(torch.ops, module.__name__).verify.default._schema) for module in (kernel, other)]
    assert [f"token_ids_{same_file}" in schema for schema in schemas] == [False, True]
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 9, 16)
    assert torch.equal(*(module.attention(None, q, k, k)[0] for module in (kernel, other)))


@torch.no_grad()
def stepwise(model, input_ids, attention_mask, prompt: int) -> torch.Tensor:
    """Logits of all places: the prompt's at once, then one by one."""
    logits, cache, places = [], None, (attention_mask.cumsum(-1) - 1).clamp(min=0)
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, input_ids.shape[1]))]:
        given = {"attention_mask": attention_mask[:, :end], "position_ids": places[:, begin:end]}
        out = model(input_ids[:, begin:end], **given, past_key_values=cache, use_cache=True)
        cache, _ = out.past_key_values, logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama-gqa", torch.bfloat16), ("mistral-window", torch.float32)], ids=str
)
def test_a_models_rows_have_the_same_bits_alone_and_in_a_padded_batch(family, dtype, repository, monkeypatch):
    """By its name in transformers, whose version may ask for newer ``kernels`` than an index has; and switched off."""
    from transformers.integrations import hub_kernels

    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={repository}")
    if not hub_kernels.is_kernels_available():
        monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
        monkeypatch.setattr(hub_kernels, "get_kernel_hub", kernels.get_kernel, raising=False)
    model, inputs = tiny(family, dtype=dtype), prompts(4, 90)
    before = stepwise(model, **inputs, prompt=80)
    model.set_attn_implementation(f"{NAME}:attention")
    stock = stepwise(model, **inputs, prompt=80)
    assert not torch.equal(before, stock)
    monkeypatch.setattr(nn.Linear, "kernel_layer_name", "Linear", raising=False)
    monkeypatch.setattr(nn.Linear, "kernel_condition", staticmethod(lambda module: True), raising=False)
    repo = kernels.LocalLayerRepository(repository, layer_name="Linear")
    with kernels.use_kernel_mapping({"Linear": {"cpu": {kernels.Mode.INFERENCE: repo}}}):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    together = stepwise(model, **inputs, prompt=80)
    torch.testing.assert_close(together, before, atol=0.3 if dtype == torch.bfloat16 else 1e-3, rtol=0.05)
    at_once = stepwise(model, **inputs, prompt=90)
    for b in range(4):
        begin = int((1 - inputs["attention_mask"][b]).sum())
        own = {name: tensor[b : b + 1, begin:] for name, tensor in inputs.items()}
        alone = stepwise(model, **own, prompt=max(1, 80 - begin))
        assert torch.equal(alone[0], together[b, begin:]), "a row of the prompt, or one behind it"
        if family == "llama-gqa":
            assert torch.equal(alone[0], at_once[b, begin:]), "a row behind the prompt, and in it"


REFUSED = [
    ({"attention_mask": torch.ones(1, 1, 3, 3)}, "attention_mask: expected None or [batch, positions], got [1, 1"),
    ({"position_bias": torch.zeros(1)}, "position_bias: expected None, got Tensor; use 'sdpa'"),
    ({"query": torch.zeros(1, 1, 3, 16).requires_grad_()}, "query: expected no gradient"),
]


def test_what_it_does_not_compute_is_refused(kernel):
    q = torch.zeros(1, 1, 3, 16)
    for change, message in REFUSED:
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
            kernel.attention(None, **{"query": q, "key": q, "value": q, **change})


@pytest.mark.slow
@pytest.mark.kept("csrc", "setup.py", "gsd_kernels", "python/gsd_kernels_hub", ".ci/hub")
def test_ci_lays_it_out_and_runs_its_tests_and_benchmarks(tmp_path):
    environment = {"PYTHON": sys.executable, "LIBRARIES": str(LIBRARIES), "OUT": str(tmp_path / "hub")}
    done = subprocess.run([ROOT / ".ci/hub"], env=os.environ | environment, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert re.search(r"\b9 passed", said) and re.search(r"decode .*✓", said) and re.search(r"prompt .*✓", said), said


def test_padding_may_lie_anywhere(kernel):
    torch.manual_seed(0)
    mask = torch.rand(3, 150) < 0.7
    mask[2] = False
    q, k, v = torch.randn(3, 4, 100, 16), *torch.randn(2, 3, 2, 150, 16)
    out = kernel.attention(None, q, k.masked_fill(~mask[:, None, :, None], torch.nan), v, mask)[0]
    for b in range(2):
        own, seen = mask[b, 50:], mask[b]
        alone = kernel.attention(None, q[b : b + 1, :, own], k[b : b + 1, :, seen], v[b : b + 1, :, seen])[0][0]
        assert torch.equal(out[b, own], alone) and not out[b, ~own].any()
    assert not out[2].any()
