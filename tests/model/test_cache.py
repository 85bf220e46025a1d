"""The cache as one allocation: layers evenly spaced for the commit, also after growing; unlike layers apart."""

from __future__ import annotations

import importlib.util

import fake_cuda
import pytest
import torch
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels_hf.model import runner
from gsd_kernels_hf.model.cache import GraphCache, lies_in_a_block

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
