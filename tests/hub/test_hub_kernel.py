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
LIBRARIES = Path(gsd_kernels.__file__).parent
NAME = "gsd-kernels/gsd-kernels"
ATTENTION = f"{NAME}:attention"

kernels = pytest.importorskip("kernels")
pytestmark = [
    pytest.mark.skipif(not (ROOT / "python/gsd_kernels_hub").exists(), reason="not a source checkout"),
    needs_cpu,
]


@pytest.fixture(scope="module")
def layout():
    return runpy.run_path(str(ROOT / "python/gsd_kernels_hub/layout.py"))["lay_out"]


@pytest.fixture(scope="module")
def repository(layout, tmp_path_factory):
    """The kernel's folder."""
    out = tmp_path_factory.mktemp("hub")
    layout(LIBRARIES, out)
    return out


@pytest.fixture(scope="module")
def kernel(repository):
    return kernels.get_local_kernel(repository)


@pytest.fixture
def by_name(repository, monkeypatch):
    """``gsd-kernels/gsd-kernels`` is the local kernel, in transformers too.

    transformers 5.24 asks for kernels 0.18.2, which not every index has; what it calls of them older ones have too.
    """
    from transformers.integrations import hub_kernels

    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={repository}")
    if not hub_kernels.is_kernels_available():
        monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
        monkeypatch.setattr(hub_kernels, "get_kernel_hub", kernels.get_kernel, raising=False)
    return NAME


def test_the_digests_are_those_that_kernels_computes(layout, tmp_path):
    from kernels import _rust

    for variant in layout(LIBRARIES, tmp_path):
        digest = _rust.Metadata.read_from_file(variant / "metadata.json").digest
        digest.validate(_rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, variant))
        (variant / "attention.py").write_text("")
        with pytest.raises(_rust.DigestValidationError):
            digest.validate(_rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, variant))


def test_cuda_gets_a_variant_of_its_own(layout, tmp_path):
    """Laid out from a stand-in: nothing here runs it."""
    from kernels import _rust
    from kernels.variants import parse_variant

    shutil.copy(LIBRARIES / "_cpu.abi3.so", tmp_path)
    (tmp_path / "_cuda.abi3.so").write_bytes(b"CUDA")
    cpu, cuda = layout(tmp_path, tmp_path / "out", cuda="13.0", archs=["8.0", "9.0+PTX"])
    assert (cuda / "_cuda.abi3.so").exists() and not (cpu / "_cuda.abi3.so").exists()
    assert parse_variant(cuda.name).arch.backend.variant_str == "cu130"
    assert parse_variant(cpu.name).arch.backend.variant_str == "cpu"
    read = _rust.Metadata.read_from_file(cuda / "metadata.json")
    assert read.backend.archs == ["8.0", "9.0+PTX"] and read.id.startswith("_gsd_kernels_cuda_")


def test_its_public_names_are_there_and_its_ops_are_its_own(kernel):
    assert all(hasattr(kernel, name) for name in kernel.__all__)
    (loaded,) = (each for each in kernels.get_loaded_kernels() if each.module is kernel)
    assert kernel.__name__ == loaded.metadata.id != "gsd_kernels"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"{kernel.__name__}::dag_attention", "CPU") and has("gsd_kernels::dag_attention", "CPU")


@pytest.mark.parametrize("same_file", [False, True], ids=["a library each", "one library, as in the Hub's cache"])
def test_two_versions_live_in_one_process(same_file, layout, kernel, tmp_path):
    """Ops of one name and other arguments, each in a namespace of its own; the installed package has them too."""
    source, libraries = tmp_path / "source", Path(kernel.__file__).parent
    for folder in ("gsd_kernels", "python/gsd_kernels_hub"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "LICENSE", source)
    file = source / "gsd_kernels/ops/verify/api.py"
    file.write_text(file.read_text().replace('"verify(Tensor token_ids', f'"verify(Tensor token_ids_{same_file}'))
    (folder,) = runpy.run_path(str(source / "python/gsd_kernels_hub/layout.py"))["lay_out"](libraries, tmp_path)
    if same_file:
        (folder / "_cpu.abi3.so").unlink()
        (folder / "_cpu.abi3.so").hardlink_to(libraries / "_cpu.abi3.so")
    other = kernels.get_local_kernel(tmp_path)
    assert len({module.__name__ for module in (gsd_kernels, kernel, other)}) == 3
    schemas = [str(getattr(torch.ops, module.__name__).verify.default._schema) for module in (kernel, other)]
    assert [f"token_ids_{same_file}" in schema for schema in schemas] == [False, True]
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 9, 16)
    assert torch.equal(*(module.attention(None, q, k, k)[0] for module in (kernel, other)))


def test_every_op_is_registered_where_the_loader_says():
    for source in (ROOT / "csrc").glob("c*/*.cpp"):
        assert "STABLE_TORCH_LIBRARY" not in source.read_text(), f"{source.name}: GSD_OPS (torch_ops/registration.h)"


@pytest.fixture
def kernelized(repository, monkeypatch):
    """A function that puts the kernel's products of rows in place of a model's."""
    monkeypatch.setattr(nn.Linear, "kernel_layer_name", "Linear", raising=False)
    monkeypatch.setattr(nn.Linear, "kernel_condition", staticmethod(lambda module: True), raising=False)

    def replace(model: nn.Module) -> nn.Module:
        repo = kernels.LocalLayerRepository(repository, layer_name="Linear")
        with kernels.use_kernel_mapping({"Linear": {"cpu": {kernels.Mode.INFERENCE: repo}}}):
            return kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")

    return replace


@torch.no_grad()
def stepwise(model, input_ids, attention_mask, prompt: int) -> torch.Tensor:
    """Logits of all places: the prompt's at once, then one by one."""
    logits, cache, places = [], None, (attention_mask.cumsum(-1) - 1).clamp(min=0)
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, input_ids.shape[1]))]:
        out = model(
            input_ids[:, begin:end],
            attention_mask=attention_mask[:, :end],
            position_ids=places[:, begin:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache, _ = out.past_key_values, logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_models_rows_have_the_same_bits_alone_and_in_a_padded_batch(family, dtype, by_name, kernelized):
    model = tiny(family, dtype=dtype)
    model.set_attn_implementation(ATTENTION)
    assert model.config._attn_implementation == ATTENTION
    inputs = prompts(4, 90)
    stock = stepwise(model, **inputs, prompt=80)
    kernelized(model)
    together = stepwise(model, **inputs, prompt=80)
    torch.testing.assert_close(together, stock, atol=0.3 if dtype == torch.bfloat16 else 1e-3, rtol=0.05)
    at_once = stepwise(model, **inputs, prompt=90)
    for b in range(4):
        begin = int((1 - inputs["attention_mask"][b]).sum())
        own = {name: tensor[b : b + 1, begin:] for name, tensor in inputs.items()}
        alone = stepwise(model, **own, prompt=max(1, 80 - begin))
        assert torch.equal(alone[0], together[b, begin:]), "a row of the prompt, or one behind it"
        if family == "llama-gqa":
            assert torch.equal(alone[0], at_once[b, begin:]), "a row behind the prompt, and in it"


def test_switching_there_and_back_is_exact(by_name, tmp_path):
    tiny(dtype=torch.float32).save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    there = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=ATTENTION)
    assert there.config._attn_implementation == ATTENTION
    inputs = prompts(3, 20)
    options = {
        **inputs,
        "max_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }

    def bits(model):
        return torch.stack(model.generate(**options).logits)

    before = bits(model)
    model.set_attn_implementation(ATTENTION)
    switched = bits(model)
    assert torch.equal(switched, bits(there)) and not torch.equal(switched, before)
    torch.testing.assert_close(switched, before, atol=1e-3, rtol=1e-3)
    model.set_attn_implementation("sdpa")
    assert torch.equal(bits(model), before)
    model.set_attn_implementation(ATTENTION)
    assert torch.equal(bits(model), switched)


def test_padding_may_lie_anywhere(kernel):
    torch.manual_seed(0)
    mask = torch.rand(3, 150) < 0.7
    q, k, v = torch.randn(3, 4, 100, 16), *torch.randn(2, 3, 2, 150, 16)
    out = kernel.attention(None, q, k.masked_fill(~mask[:, None, :, None], torch.nan), v, mask)[0]
    for b in range(3):
        own, seen = mask[b, 50:], mask[b]
        alone = kernel.attention(None, q[b : b + 1, :, own], k[b : b + 1, :, seen], v[b : b + 1, :, seen])[0][0]
        assert torch.equal(out[b, own], alone) and not out[b, ~own].any()
    nothing = kernel.attention(None, q, k, v, torch.zeros_like(mask))[0]
    assert not nothing.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 1, 3, 3)},
            r"attention_mask: expected None or \[batch, positions\], got \[1, 1",
        ),
        ({"dropout": 0.1}, "dropout: expected 0, got 0.1; call model.eval"),
        ({"is_causal": False}, "is_causal: expected True, got False; use"),
        ({"position_bias": torch.zeros(1)}, "position_bias: expected None, got Tensor; use 'sdpa'"),
        ({"query": torch.zeros(1, 1, 3, 16).requires_grad_()}, "query: expected no gradient"),
        ({"query": torch.zeros(1, 1, 3, 16).double()}, "query: expected float32, bfloat16 or float16, got float64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_does_not_compute_is_refused(change, message, kernel):
    q = torch.zeros(1, 1, 3, 16)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        kernel.attention(None, **{"query": q, "key": q, "value": q, **change})


@pytest.mark.slow
@pytest.mark.kept("csrc", "setup.py", "gsd_kernels", "python/gsd_kernels_hub", ".ci/hub")
def test_ci_lays_it_out_and_runs_its_tests_and_benchmarks(tmp_path):
    environment = {"PYTHON": sys.executable, "LIBRARIES": str(LIBRARIES), "OUT": str(tmp_path / "hub")}
    done = subprocess.run([ROOT / ".ci/hub"], env=os.environ | environment, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert re.search(r"\b9 passed", said) and re.search(r"decode .*✓", said) and re.search(r"prompt .*✓", said), said


def test_a_benchmark_of_other_bits_is_refused(kernel):
    made = runpy.run_path(str(ROOT / "python/gsd_kernels_hub/benchmarks/benchmark_attention.py"))["Attention"]()
    made.kernel = kernel
    made.setup_decode()
    made.benchmark_decode()
    made.verify_decode()
    made.out[1, 0, 0, 0] += 1e-3
    with pytest.raises(RuntimeError, match="depend on its batch"):
        made.verify_decode()
