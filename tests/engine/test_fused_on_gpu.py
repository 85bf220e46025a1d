"""Rows of a whole model as one operator on a GPU: the switch, and texts of captured steps, without a GPU.

A CPU is taken for one: steps are recorded and replayed (fake_cuda), and the kernels' source runs (block_code.rows).
"""

from __future__ import annotations

import copy

import fake_cuda
import pytest
import torch
from block_code import rows as block_code
from decoders import random_tokens, tree
from models import add_noise, noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels.graph import pack_bits
from gsd_kernels_hf.engine import capture
from gsd_kernels_hf.model import fused, replay
from gsd_kernels_hf.model.fused import FusedRows, missing, why_not
from gsd_kernels_hf.model.hidden import LAST
from gsd_kernels_hf.model.runner import RowModel

GPU = torch.device("cuda", 0)
FAMILIES = {
    "llama": ("llama-gqa", {"attention_bias": True, "mlp_bias": True}),
    "tied-yarn": (
        "llama-tied",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}, "num_key_value_heads": 4},
    ),
    "mistral": ("mistral-window", {"head_dim": 128, "sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"attention_bias": True}),
}


def family(name: str, **heads: int):
    """A model in float32 with biases and norms that matter, of sizes that the kernels take."""
    base, changes = FAMILIES[name]
    sizes = {"num_attention_heads": 4, "head_dim": 64, **({} if base != "qwen2" else {"hidden_size": 256})}
    model = tiny(base, dtype=torch.float32, **{**sizes, **changes, **heads})
    add_noise((parameter for parameter in model.parameters() if parameter.dim() == 1), 0.3, seed=3)
    return model


# The switch.


def test_one_switch_selects_it(monkeypatch):
    monkeypatch.setattr(fused, "unavailable_reason", lambda *_: None)
    for capability, reason in (
        ((12, 0), None),
        ((7, 5), "cuda:0: backend 'cuda' expects a GPU of compute capability 8.0 or newer, got 7.5"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for setting in ("1", "cuda"):
            monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", setting)
            assert missing(GPU) == reason and missing(torch.device("cpu")) is None, "a CPU asks nothing more"
    assert missing(GPU, "triton") == "backend 'triton' has no such operator"
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
    assert missing(GPU) == missing(torch.device("cpu")) == "GSD_KERNELS_FUSED_ROWS=0"
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "gpu")
    with pytest.raises(ValueError, match="GSD_KERNELS_FUSED_ROWS: expected one of 0, 1, cuda, got 'gpu'; or unset it"):
        missing(GPU)


# The operator in a model.


@pytest.fixture(params=block_code.DEVICES)
def device(request, monkeypatch, tmp_path_factory):
    """A GPU with the switch on, or a CPU that is taken for one."""
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "cuda")
    if request.param == "cpu":
        block_code.take_for_gpus(monkeypatch, tmp_path_factory)
        fake_cuda.install(monkeypatch)
    return request.param


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, (torch.bfloat16, torch.float16)[i % 2]) for i, name in enumerate(FAMILIES)], ids=str
)
def test_the_error_is_at_most_twice_the_module_paths(device, name, dtype):
    model = family(name).to(device, dtype)
    batch, length, parents = 2, 21, [-1, 0, 0, 1, 2, 3, 3, 6]
    ids, tokens = (t.to(device) for t in (random_tokens(batch, length), random_tokens(batch, len(parents), 1)))
    kv_start = torch.tensor([0, 4], dtype=torch.int32, device=device)
    padding = (torch.arange(length, device=device) >= kv_start[:, None]).long()
    sees, depths = (t.to(device) for t in tree(parents))
    mask, depths = pack_bits(sees).expand(batch, -1, -1).contiguous(), depths.expand(batch, -1).contiguous()
    kv_len, slots = torch.full_like(kv_start, length), torch.arange(len(parents), device=device)
    assert why_not(model, "auto") is None
    found = []
    exactly = (RowModel, copy.deepcopy(model).double(), "reference")
    for cls, of, backend in (exactly, (RowModel, model, "auto"), (FusedRows, model, "auto")):
        with torch.no_grad():
            rows = cls(of, 64, kv_start, backend)
            rows.hidden_layers = (LAST,)
            rows.prefill(ids, padding, 8)
            logits = rows.rows(tokens, kv_len, slots, mask, depths, depths, keep=6)
        found.append((logits.double(), rows.hidden[LAST].double()))
    assert rows.operator == "cuda"
    exact, theirs, ours = found
    for i in range(2):  # logits, and what the output matrix reads
        assert (ours[i] - exact[i]).norm() <= 2 * (theirs[i] - exact[i]).norm() + 1e-6 * exact[i].norm()


def test_a_prompt_has_one_text_in_captured_steps(device, monkeypatch):
    captured, ordinary = [], []
    capturing, warm = replay.CaptureLane.capture, capture.warm_steps
    monkeypatch.setattr(replay.CaptureLane, "capture", lambda *a: captured.append(1) or capturing(*a))
    monkeypatch.setattr(capture, "warm_steps", lambda session: ordinary.append(warm(session)) or ordinary[-1])
    # Heads are most of its work, and two for one of keys and values show what four show.
    target = family("mistral", num_attention_heads=2, num_key_value_heads=1).to(device, torch.float16)
    count, shapes = (14, ("graph",)) if device == "cpu" else (100, ("chain", "tree", "graph", "auto"))
    inputs = {name: t.to(device) for name, t in prompts(2, 9).items()}
    options = {**inputs, "max_new_tokens": count, "do_sample": True, "seed": 3, "eos_token_id": None}
    options["return_dict_in_generate"] = True
    alone = gsd.generate(target, **options, graph_config="plain")
    assert alone.stats.why_modules is None
    assert len(set(alone.sequences[:, 9:].flatten().tolist())) >= 15
    assert len(captured) == 3, "plain decoding is captured"
    assert device != "cpu" or not any(ordinary), "where nothing compiles no step comes before"
    for shape in shapes:
        config = shape if shape == "auto" else gsd.GraphConfig.preset(shape, depth=3)
        out = gsd.generate(target, **options, assistant_model=noised(target, 0.05), graph_config=config)
        assert torch.equal(out.sequences, alone.sequences) and out.stats.tokens_per_step > 1
    assert len(captured) > 3 + len(shapes), "drafted steps are captured too"
