"""Rows through a model's modules: caches, hidden states, linear layers and functions of elements on a CPU."""

from __future__ import annotations

import copy

import fake_cuda
import pytest
import torch
from models import noised, prompts, tiny
from torch import nn
from torch.nn import functional as F

import gsd_kernels as gsd
from gsd_kernels import DraftSource, GraphConfig, Proposal
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_hf.model import linear, runner
from gsd_kernels_hf.model.cache import GraphCache
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.model.hidden import LAST
from gsd_kernels_hf.model.linear import SHARE, CpuLinear, as_rows, own_bits, plain, widened_linear, with_cpu_linears

# The cache as one allocation: layers evenly spaced for the commit, also after growing.


def filled(*, stacked: bool, layers: int = 3) -> GraphCache:
    """Two sequences, five positions of a prompt."""
    cache = GraphCache(tiny(num_hidden_layers=layers).config, 12, stacked=stacked)
    gen = torch.Generator().manual_seed(0)
    for index in range(layers):
        cache.update(*torch.randn(2, 2, 4, 5, 6, generator=gen), index)
    cache.prompt_length = 5
    return cache


def contents(cache: GraphCache) -> list[torch.Tensor]:
    return [t for layer in cache.layers for t in (layer.keys, layer.values)]


def test_layers_are_views_of_one_block_and_stay_so_when_it_grows():
    stacked, apart, kept = filled(stacked=True), filled(stacked=False), contents(filled(stacked=False))
    for capacity in (12, 40):
        for cache in (stacked, apart):
            if capacity > 12:
                cache.grow(capacity)
        assert all(torch.equal(a, b) for a, b in zip(contents(stacked), contents(apart), strict=True))
        assert all(torch.equal(a[:, :, :5], b[:, :, :5]) for a, b in zip(contents(apart), kept, strict=True))
        assert all(t.shape == (2, 4, capacity, 6) and t.is_contiguous() for t in contents(stacked))
        places = torch.tensor([t.data_ptr() for t in contents(stacked)]).view(3, 2)
        assert bool((places.diff(dim=0) == places[1] - places[0]).all()), "evenly spaced"
        assert stacked.nbytes == stacked.block.nbytes == apart.nbytes and apart.block is None


@pytest.mark.parametrize("fused", ["0", "1"])
def test_a_stacked_cache_writes_the_same_text(fused, monkeypatch):
    """Long enough to grow, by modules and by the operator; a GPU stacks by itself, here it is told to."""
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", fused)
    target = tiny(dtype=torch.float32 if fused == "1" else torch.float64)
    ending = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts = []
    for stacks in (False, True):

        def stacking(*given, stacked, stacks=stacks, **options):
            return GraphCache(*given, stacked=stacks, **options)

        monkeypatch.setattr(runner, "GraphCache", stacking)
        with gsd.patch(target, assistant_model=noised(target), graph_config="graph") as handle:
            short = target.generate(**prompts(2, 9), max_new_tokens=10, **ending)
            long = target.generate(**prompts(2, 250), max_new_tokens=20, **ending)
            (session,) = handle.engines.sessions
            assert (session.target.cache.block is not None) == stacks and session.capacity > 256
        texts.append((short.tolist(), long.tolist()))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("stacked", [True, False])
def test_outgrown_storage_is_held_until_its_copy_is_done(stacked, monkeypatch):
    """It goes back to the stream that it was made on, and is copied on the caller's."""
    cuda, cache = fake_cuda.install(monkeypatch), filled(stacked=stacked, layers=1)
    outgrown, caller = [cache.block] if stacked else contents(cache), cuda.new_stream()
    with cuda.on(caller):
        cache.grow(20)
    assert cuda.held == [(storage.data_ptr(), caller) for storage in outgrown]


# Hidden states of chosen layers, at the prompt and at graph rows, equal transformers' own.


class Listening(DraftSource):
    """Proposes the token after next in the vocabulary, and keeps all hidden states of the committed text."""

    name = "listening"

    def __init__(self, layers):
        self.hidden_layers, self.used = layers, []

    def attach(self, text):
        self.text, self.pieces, self.states = text, [], {}
        self.used.append(self)  # the session's copy

    def propose(self, level):
        after = ((level.frontier.token_ids + 1) % 97)[..., None]
        return Proposal(after, torch.full_like(after, -0.5, dtype=torch.float32))

    def observe(self, verified):
        if isinstance(verified, gsd.Prefilled):
            self.pieces.append(verified.begin)
            end = verified.begin + verified.hidden[0].shape[1]
            for number, found in verified.hidden.items():  # of the last layer, the last position alone
                for i in range(found.shape[1]):
                    self.states[number, end - found.shape[1] + i] = found[:, i]
            return
        count = int(verified.accepted.num_accepted[0])
        place = int(self.text.state.out_len[0]) - count - 1
        for i, row in enumerate(verified.accepted.accepted_rows[0, :count].tolist()):
            for number, found in verified.hidden.items():
                self.states[number, place + i] = found[:, row]


@pytest.mark.parametrize("operator", [False, True], ids=["modules", "operator"])
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "mistral-window"])
def test_states_of_the_text_equal_those_of_a_plain_forward(family, operator):
    layers = (0, 1, 2, LAST) if operator else (0, 1, 2, 3, LAST)
    target = tiny(family, num_hidden_layers=3, dtype=torch.float32 if operator else torch.float64)
    if operator and why_not(target, "auto") is not None:
        pytest.skip(f"{family}: no operator")
    source = Listening(layers)
    text = gsd.generate(
        target,
        **prompts(1, 14),
        draft_sources=(source, "history"),
        graph_config=GraphConfig(depth=0, branch=2, max_rows=12, history_depth=3, history_width=3),
        max_new_tokens=20,
        eos_token_id=None,
        do_sample=False,
        prefill_chunk_size=5,
    )
    with torch.no_grad():
        want = target(text, output_hidden_states=True).hidden_states
    (used,) = source.used
    close = {"atol": 1e-4, "rtol": 1e-4} if operator else {}
    assert used.pieces == [0, 5, 10]
    for number in layers:
        for place in range(text.shape[1] - 1):
            if number == LAST and place < 13 and place not in ((12,) if operator else (4, 9, 12)):
                assert (number, place) not in used.states
                continue
            torch.testing.assert_close(used.states[number, place], want[number][:, place], **close)


# Linear layers and functions of elements on a CPU: few rows each on its own, as accurate as PyTorch's.


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("rows", "k", "n"), [(49, 48, 63), (130, 2048, 1025)])
def test_widened_products_are_at_least_as_accurate(rows, k, n, dtype):
    gen = torch.Generator().manual_seed(rows * 1000 + n)
    x, weight = (torch.randn(m, k, generator=gen).to(dtype) for m in (rows, n))
    exact = x.double() @ weight.double().T
    theirs = (F.linear(x, weight).double() - exact).norm()
    ours = (widened_linear(x, weight).double() - exact).norm()
    assert ours <= 1.1 * theirs and ours <= torch.finfo(dtype).eps / 2 * exact.norm()


@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 8), (torch.bfloat16, 64), (torch.float16, 64)], ids=str)
def test_a_view_computes_the_same_and_leaves_the_model_alone(dtype, length):
    """With biases, and hooks that still count."""
    model = tiny("qwen2", dtype=dtype)
    before, kinds, calls = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()], []
    view = with_cpu_linears(model, "auto")
    if unavailable_reason("cpu", model.device) is None and linear.serves(model.lm_head.weight):
        assert all(type(m) is CpuLinear for m in view.modules() if isinstance(m, nn.Linear))
        assert view.lm_head.weight is model.lm_head.weight
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    ids = prompts(2, length, ragged=False)["input_ids"]
    with torch.no_grad():
        theirs, ours = model(ids).logits.double(), view(ids).logits.double()
        exact = copy.deepcopy(model).double()(ids).logits
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm() and len(calls) == 3
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


CALLS = {
    "silu": F.silu,
    "softplus": lambda x: F.softplus(x.float() + 0.5),
    "sigmoid": lambda x: x.sigmoid(),
    "exp": lambda x: -x.float().exp(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "pow": lambda x: (x.abs() + 1) ** 1.7,
    "a part": lambda x: F.softplus(x[..., : x.shape[-1] // 2] + 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 48, 64, 1100, SHARE // 16])
def test_a_row_has_its_own_bits(dtype, size):
    """Whatever threads share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    x = 3 * torch.randn(1, 64, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        for name, call in CALLS.items():
            with own_bits(True, in_parts=name == "a part"):
                found = {count: plain(call(as_rows(x[:, 64 - count :]))) for count in (1, 2, 3, 5, 16, 33, 64)}
            assert torch.allclose(found[64].double(), call(x.double()).double(), rtol=2e-2, atol=1e-6), name
            for count, values in found.items():
                assert torch.equal(values[0], found[64][0, 64 - count :]), (name, count)
    finally:
        torch.set_num_threads(threads)
