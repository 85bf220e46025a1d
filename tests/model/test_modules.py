"""Rows through a model's modules: caches, hidden states, convolutions, quantised weights."""

from __future__ import annotations

import importlib.util
import threading

import fake_cuda
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FAMILIES, noised, prompts, tiny
from quantised import by_bitsandbytes, original

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, DraftSource, GraphConfig, Proposal
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.model import runner
from gsd_kernels_hf.model.cache import GraphCache, lies_in_a_block
from gsd_kernels_hf.model.fused import FusedRows, rows_of, why_not
from gsd_kernels_hf.model.hidden import LAST, decoder_of, listening
from gsd_kernels_hf.model.recurrent.short_convolution import ShortConvolution
from gsd_kernels_hf.model.recurrent.tree import RowTree

# The cache as one allocation: layers evenly spaced for the commit, also after growing; unlike layers apart.


LAYERS = 3


def filled(*, stacked: bool) -> GraphCache:
    """Two sequences, five positions of a prompt."""
    cache = GraphCache(tiny(num_hidden_layers=LAYERS).config, 12, stacked=stacked)
    gen = torch.Generator().manual_seed(0)
    for index in range(LAYERS):
        cache.update(*torch.randn(2, 2, 4, 5, 6, generator=gen), index)
    cache.prompt_length = 5
    return cache


def contents(cache: GraphCache) -> list[torch.Tensor]:
    return [t for layer in cache.layers for t in (layer.keys, layer.values)]


def evenly_spaced(cache: GraphCache) -> bool:
    addresses = torch.tensor([[layer.keys.data_ptr(), layer.values.data_ptr()] for layer in cache.layers])
    return bool((addresses.diff(dim=0) == addresses[1] - addresses[0]).all())


def test_layers_are_views_of_one_block_and_stay_so_when_it_grows():
    stacked, apart = filled(stacked=True), filled(stacked=False)
    for capacity in (12, 40):
        for cache in (stacked, apart):
            if capacity > 12:
                cache.grow(capacity)
        assert all(torch.equal(a, b) for a, b in zip(contents(stacked), contents(apart), strict=True))
        assert all(t.shape == (2, 4, capacity, 6) and t.is_contiguous() for t in contents(stacked))
        assert {t.untyped_storage().data_ptr() for t in contents(stacked)} == {stacked.block.data_ptr()}
        assert evenly_spaced(stacked) and stacked.nbytes == stacked.block.nbytes == apart.nbytes
    assert apart.block is None and len({t.untyped_storage().data_ptr() for t in contents(apart)}) == 2 * LAYERS


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
def test_a_commit_of_a_block_is_one_launch():
    """Counted where Triton's launcher looks for runs of layers."""
    from gsd_kernels.ops.commit_kv.triton import even_run

    layers = filled(stacked=True).layers
    count, k_step, v_step = even_run([layer.keys for layer in layers], [layer.values for layer in layers])
    assert (count, k_step, v_step) == (LAYERS, 2 * 2 * 4 * 12 * 6, 2 * 2 * 4 * 12 * 6)


def test_what_is_unlike_the_first_layer_has_its_own_storage():
    cache = GraphCache(tiny(num_hidden_layers=4).config, 12, stacked=True)
    for index, (heads, k_dim, v_dim) in enumerate(((4, 6, 6), (2, 6, 6), (4, 6, 8), (4, 6, 6))):
        cache.update(torch.ones(2, heads, 5, k_dim), torch.ones(2, heads, 5, v_dim), index)
    assert [layer.in_block for layer in cache.layers] == [True, False, False, True]
    cache.prompt_length = 5
    cache.grow(20)
    for layer, v_dim in zip(cache.layers, (6, 6, 8, 6), strict=True):
        assert layer.keys.shape[2] == layer.values.shape[2] == 20 and layer.values.shape[3] == v_dim
        assert layer.keys[:, :, :5].eq(1).all() and not layer.values[:, :, 5:].any()


@pytest.mark.parametrize("fused", ["0", "1"])
def test_a_stacked_cache_writes_the_same_text(fused, monkeypatch):
    """Long enough to grow, by modules and by the operator; a GPU stacks by itself, here it is told to."""
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", fused)
    target = tiny(dtype=torch.float32 if fused == "1" else torch.float64)
    ending = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts = {}
    for stacks in (False, True):
        monkeypatch.setattr(runner, "lies_in_a_block", lambda _, stacks=stacks: stacks)
        handle = gsd.patch(target, assistant_model=noised(target), graph_config="graph")
        short = target.generate(**prompts(2, 9), max_new_tokens=10, **ending)
        long = target.generate(**prompts(2, 250), max_new_tokens=20, **ending)
        (session,) = handle.engines.idle.sessions
        assert (session.target.cache.block is not None) == stacks and session.capacity > 256
        texts[stacks] = (short.tolist(), long.tolist())
        gsd.unpatch(target)
    assert texts[True] == texts[False]


@pytest.mark.parametrize("stacked", [True, False])
def test_outgrown_storage_is_held_until_its_copy_is_done(stacked, monkeypatch):
    """It goes back to the stream that it was made on, and is copied on the caller's."""
    cuda = fake_cuda.install(monkeypatch)
    cache, keys = GraphCache(tiny().config, 12, stacked=stacked), torch.ones(2, 2, 5, 6)
    cache.update(keys, keys, 0)
    kept = cache.layers[0].keys, cache.layers[0].values, cache.block
    caller = cuda.new_stream()
    with cuda.on(caller):
        cache.grow(20)
    outgrown = [cache.block is not None and kept[2]] if stacked else kept[:2]
    assert cuda.held == [(storage.data_ptr(), caller) for storage in outgrown]


def test_only_a_gpu_stacks():
    assert not lies_in_a_block(tiny())


# Hidden states of chosen layers, at the prompt and at graph rows, equal transformers' own.


CHOSEN = (0, 1, 2, 3, LAST)
CONFIG = GraphConfig(depth=0, branch=2, max_rows=12, history_depth=3, history_width=3)


class Listening(DraftSource):
    """Proposes the token after next in the vocabulary, and keeps all hidden states of the committed text."""

    name = "listening"

    def __init__(self, layers=CHOSEN):
        self.hidden_layers, self.used = layers, []

    def attach(self, text):
        self.text, self.pieces, self.states = text, [], {}
        self.used.append(self)  # the session's copy

    def propose(self, level):
        after = ((level.frontier.token_ids + 1) % 97)[..., None]
        return Proposal(after, torch.full_like(after, -0.5, dtype=torch.float32))

    def observe(self, verified):
        if isinstance(verified, gsd.Prefilled):
            self.read(verified.hidden, verified.begin)
            return
        place = int(self.text.state.out_len[0] - verified.accepted.num_accepted[0])
        for i in range(int(verified.accepted.num_accepted[0])):
            row = int(verified.accepted.accepted_rows[0, i])
            for number, found in verified.hidden.items():
                self.states[number, place - 1 + i] = found[:, row]

    def read(self, hidden, begin):
        self.pieces.append(begin)
        for number, found in hidden.items():
            for i in range(found.shape[1]):  # of the last layer, the last position alone
                first = hidden[0].shape[1] - found.shape[1]
                self.states[number, begin + first + i] = found[:, i]


@pytest.mark.parametrize("operator", [False, True], ids=["modules", "operator"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_the_text_equal_those_of_a_plain_forward(family, operator):
    layers = tuple(layer for layer in CHOSEN if layer != 3) if operator else CHOSEN
    target = tiny(family, num_hidden_layers=3, dtype=torch.float32 if operator else torch.float64)
    source = Listening(layers)
    if operator and why_not(target, "auto", layers) is not None:
        pytest.skip(f"{family}: no operator")
    inputs = prompts(1, 14)
    text = gsd.generate(
        target,
        **inputs,
        draft_sources=(source, "history"),
        graph_config=CONFIG,
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


def test_only_what_is_asked_for_is_kept_and_hooks_go_with_the_forward():
    target = tiny(num_hidden_layers=3)
    with torch.no_grad(), listening(target, (1,)) as found:
        target(prompts(1, 4)["input_ids"])
        assert set(found) == {1}
    with listening(target, ()) as found:
        target(prompts(1, 4)["input_ids"])
    assert found == {}
    blocks, norm = decoder_of(target)
    for module in (*blocks, norm, target.lm_head):
        assert not module._forward_pre_hooks and not module._forward_hooks


def test_another_threads_forward_is_not_kept():
    target, ids = tiny(num_hidden_layers=3), prompts(1, 4)["input_ids"]
    with torch.no_grad(), listening(target, CHOSEN) as found:
        thread = threading.Thread(target=lambda: target(ids))
        thread.start()
        thread.join()
    assert found == {}


def test_the_operator_hands_out_the_state_behind_the_last_norm():
    target = tiny(dtype=torch.float32)
    start, layers = torch.zeros(1, dtype=torch.int32), target.config.num_hidden_layers
    assert why_not(target, "auto") is None and why_not(target, "auto", (0, layers - 1, LAST)) is None
    assert why_not(target, "auto", (0, layers)) is None
    assert type(rows_of(target, 8, start, "auto", (layers,))) is FusedRows
    assert type(rows_of(target, 8, start, "auto", (0, LAST))) is FusedRows


def test_a_model_whose_layers_lie_elsewhere_is_refused():
    target = tiny()
    target.model.layers = torch.nn.Sequential(*target.model.layers)
    with pytest.raises(ValueError, match="its decoder has no layers"):
        decoder_of(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)  # one operator, and modules
@pytest.mark.parametrize("turns", [1, 3])
def test_heads_see_in_the_first_step(dtype, turns):
    """Untrained heads repeat the target's own next token; there is none in a first step without the prompt's state."""
    target = tiny(dtype=dtype)
    target.lm_head.weight.data.zero_()
    target.lm_head.weight.data[5] = 1.0  # the same token forever, or never
    inputs, heads = prompts(2, 9), DraftHeads.for_model(target, 3).requires_grad_(False)
    with torch.no_grad():
        if target(**inputs).logits[0, -1].argmax() != 5:
            target.lm_head.weight.data[5] = -1.0
    options = {"max_new_tokens": 2, "eos_token_id": None, "do_sample": False, "return_dict_in_generate": True}
    engines_of(target).clear()
    gsd.patch(target, draft_heads=heads, draft_sources=("heads",), graph_config=GraphConfig(depth=1, branch=2))
    try:
        for _ in range(turns):  # the same prompt again: all of it is in the cache
            out = target.generate(inputs["input_ids"][:1], **options)
            assert out.stats.steps == 1, "the first step accepted nothing"
    finally:
        gsd.unpatch(target)


# Short convolutions over rows: a path's outputs, whatever is beside it.


CHANNELS = 32


def tree_of(parents: list[int]) -> RowTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return RowTree(torch.tensor([parents]), torch.tensor([depths]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(2, 4), st.integers(1, 5), st.booleans())
def test_rows_are_a_convolution_over_their_path(dtype, beside, width, path, biased):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, CHANNELS, 80, generator=generator).to(dtype)
    weight = torch.randn(CHANNELS, width, generator=generator).to(dtype)
    bias = torch.randn(CHANNELS, generator=generator).to(dtype) if biased else None
    convolution, done = ShortConvolution(), 3
    convolution.begin(torch.nn.functional.pad(x[..., :done], (width, 0))[..., -width:])
    for accepted in (1, path, 1):
        parents = list(range(-1, path - 1))
        parents += [p % (path + i + 1) - 1 for i, p in enumerate(beside)]
        places = [*range(done, done + path), *range(60, 60 + len(beside))]
        out = convolution(tree_of(parents), x[..., places], weight, bias, "silu")
        for row in range(len(parents)):
            up, text = row, []
            while up >= 0:
                text, up = [places[up], *text], parents[up]
            whole = torch.nn.functional.pad(x[..., [*range(done), *text]], (width, 0)).double()
            right = (whole[0, :, -width:] * weight.double()).sum(-1) + (0 if bias is None else bias.double())
            right = torch.nn.functional.silu(right.to(dtype)).double()
            assert torch.allclose(out[0, :, row].double(), right, atol=1e-5 if dtype != torch.bfloat16 else 3e-2)
            alone = ShortConvolution()
            alone.begin(whole[..., -width - 1 : -1].to(dtype))
            one = alone(tree_of([-1]), x[..., places[row] : places[row] + 1], weight, bias, "silu")
            assert torch.equal(one[..., 0], out[..., row])
        convolution.commit(torch.arange(path)[None], torch.tensor([accepted]))
        done += accepted


def test_sequences_that_accept_nothing_stay():
    x, weight = torch.randn(2, CHANNELS, 4), torch.randn(CHANNELS, 4)
    convolution, tree = ShortConvolution(), RowTree(torch.tensor([[-1, 0], [-1, 0]]), torch.tensor([[0, 1], [0, 1]]))
    convolution(tree, x[..., :2], weight)
    convolution.commit(torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32))
    state = convolution.end()
    assert torch.equal(state[0, :, 2:], x[0, :, :2]) and not state[1].any()
    assert state.shape == (2, CHANNELS, 4)


# Targets with quantised weights: the text of the same model by itself. Needs the extra ``[quantised]``.
# Exact are schemes that read every row of activations by itself. ``llm_int8_threshold`` above 0 (bitsandbytes' default)
# and dynamic activation quantisation per tensor choose outliers or scales over all rows of a forward, rejected ones
# included.


SHAPE = GraphConfig(depth=3, width=3, branch=3, max_rows=20, history_depth=2, history_width=3)
GREEDY = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
FLOAT32 = torch.float32


def torchao(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())  # its output matrix, too
    return model


def bitsandbytes(**how):
    return lambda model: by_bitsandbytes(model, **how)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": FLOAT32}
SCHEMES = {
    "bitsandbytes": (bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0), "Int8Params"),
    "bitsandbytes nf4": (bitsandbytes(**NF4), "Params4bit"),
    "torchao": (torchao, "Int8Tensor"),
}


@pytest.fixture(scope="module", params=SCHEMES)
def quantised(request):
    package = request.param.partition(" ")[0]
    pytest.importorskip(package, reason=f"needs {package}: pip install -e '.[quantised]'")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[quantised]'")
    make, weight = SCHEMES[request.param]
    model = make(original(FLOAT32))
    assert type(model.model.layers[0].self_attn.q_proj.weight).__name__ == weight, "nothing is quantised"
    return model


def inputs_of(batch: int, seed: int = 0):
    return prompts(batch, 12, seed=seed, vocab=96)


@torch.no_grad()
def logits(model):
    return model(**inputs_of(2)).logits


def test_a_quantised_draft(quantised):
    target, call = original(FLOAT32), {**inputs_of(2), **GREEDY}
    options = {"assistant_model": quantised, "graph_config": SHAPE, "return_dict_in_generate": True}
    out = gsd.generate(target, **call, **options)
    assert torch.equal(out.sequences, target.generate(**call)) and out.stats.tokens_per_step > 1.5


def test_activations_that_are_quantised_row_by_row_under_auto():
    """A last bit of an activation may become a whole level of int8, so texts are the same at their beginning only."""
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install -e '.[quantised]'")
    target = original(FLOAT32)
    quantization.quantize_(target, quantization.Int8DynamicActivationInt8WeightConfig())
    inputs = inputs_of(1)
    expected = target.generate(**inputs, **GREEDY)
    for sources in ({"draft_sources": ("history",)}, {"assistant_model": noised(original(FLOAT32), 0.02)}):
        out = gsd.generate(target, **inputs, **GREEDY, **sources)
        assert out.shape == expected.shape and torch.equal(out[:, :14], expected[:, :14])


def test_int8_that_takes_outliers_from_all_rows_may_draft():
    """A target that does so is refused, as tests/packed/test_libraries.py asks."""
    pytest.importorskip("bitsandbytes")
    draft, call = by_bitsandbytes(original(FLOAT32), load_in_8bit=True), {**inputs_of(1), **GREEDY}
    expected = original(FLOAT32).generate(**call)
    assert torch.equal(gsd.generate(original(FLOAT32), **call, assistant_model=draft, graph_config="chain"), expected)
