"""The forward of rows as one operator: as accurate as the modules, and a row's bits are its own."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoders import SIZES, Sizes, Text, check_marks, decoder, random_parents, random_tokens, tree
from models import add_noise, noised, prompts, tiny
from ops.contracts.backends import LEVELS, needs_cpu

import gsd_kernels as gsd
from gsd_kernels import cpu_levels
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.decoder_rows import decoder_rows
from gsd_kernels_hf.model.fused import FusedRows, rows_of, why_not
from gsd_kernels_hf.model.hidden import LAST
from gsd_kernels_hf.model.runner import RowModel

pytestmark = [pytest.mark.quick, needs_cpu]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paired(names):
    """One dtype of a name, and the others among many."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(name, dtype, marks=[pytest.mark.many] if (i + j) % 3 else [])
            for i, name in enumerate(names)
            for j, dtype in enumerate(DTYPES)
        ],
    )


@pytest.fixture(params=LEVELS)
def level(request):
    with cpu_levels.forced(request.param):
        yield request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Accuracy.

FAMILIES = {
    "llama": ("llama-gqa", {"hidden_size": 40, "intermediate_size": 104, "num_attention_heads": 4, "head_dim": 10}),
    "llama-bias": ("llama-mha", {"attention_bias": True, "mlp_bias": True, "hidden_size": 72, "head_dim": 64}),
    "tied-yarn": (
        "llama-tied",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}, "intermediate_size": 90},
    ),
    "llama-unused-window": ("llama-gqa", {"sliding_window": 4, "layer_types": ["full_attention"] * 2}),
    "mistral": ("mistral-window", {"head_dim": 128, "num_attention_heads": 4, "sliding_window": 5}),
    "qwen2": ("qwen2", {"hidden_size": 48, "num_attention_heads": 6}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "hidden_size": 48},
    ),
    "qwen3": ("qwen3", {"head_dim": 96, "intermediate_size": 99, "attention_bias": True}),
}


def family(name: str):
    """A model in float32 with biases and norms that matter."""
    base, changes = FAMILIES[name]
    model = tiny(base, dtype=torch.float32, **changes)
    add_noise((parameter for parameter in model.parameters() if parameter.dim() == 1), 0.3, seed=3)
    return model


@paired(FAMILIES)
def test_the_error_is_at_most_twice_the_module_paths(name, dtype):
    model = family(name).to(dtype)
    batch, length, parents = 2, 290 if name == "llama-bias" else 21, [-1, 0, 0, 1, 2, 3, 3, 6]
    ids, tokens = random_tokens(batch, length), random_tokens(batch, len(parents), 1)
    kv_start = torch.tensor([0, 4], dtype=torch.int32)
    padding = (torch.arange(length) >= kv_start[:, None]).long()
    sees, depths = tree(parents)
    mask, depths = pack_bits(sees).expand(batch, -1, -1).contiguous(), depths.expand(batch, -1).contiguous()
    kv_len = torch.full((batch,), length, dtype=torch.int32)
    assert why_not(model, "auto") is None
    found = []
    for cls, of in ((RowModel, copy.deepcopy(model).double()), (RowModel, model), (FusedRows, model)):
        with torch.no_grad():
            rows = cls(of, length + 40, kv_start, "auto")
            rows.hidden_layers = (LAST,)
            rows.prefill(ids, padding, 1 + length // 3)
            logits = rows.rows(tokens, kv_len, torch.arange(len(parents)), mask, depths, depths, keep=6)
        assert logits.dtype == of.dtype
        found.append((logits.double(), rows.hidden[LAST].double()))
    exact, theirs, ours = found
    for i in range(2):  # logits, and what the output matrix reads
        assert (ours[i] - exact[i]).norm() <= 2 * (theirs[i] - exact[i]).norm() + 1e-6 * exact[i].norm()


@paired(SIZES)
def test_every_level_equals_the_reference(name, dtype, level):
    sizes = SIZES[name]
    sees, depths = tree(random_parents(40))
    results = []
    for backend in ("cpu", "reference"):
        text = Text(decoder(sizes, dtype), sizes, dtype, [0, 3], 80)
        text.read(random_tokens(2, 30), 30)
        for cache in (*text.caches[0], *text.caches[1]):
            cache.nan_to_num_(0.0)  # the reference reads every slot
        rows = (random_tokens(2, 40, 1).int(), (text.kv_len - text.kv_start)[:, None] + depths)
        slots = text.kv_len[:, None] + torch.arange(40, dtype=torch.int32)
        graph = (pack_bits(sees).expand(2, -1, -1).contiguous(), depths.expand(2, -1))
        results.append(
            decoder_rows(
                text.weights, *rows, slots, *graph, text.kv_len, text.kv_start, *text.caches, keep=40, backend=backend
            )
        )
    # Relative. In bfloat16 some levels round the weights of attention too, as PyTorch's attention does.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= tolerance * expected.norm()


# A row's bits are its own.


@paired(SIZES)
def test_a_row_alone_and_among_others(name, dtype, level):
    sizes, count, pads = SIZES[name], 37, [0, 5, 2, 11]
    weights, prompt, tokens = decoder(sizes, dtype), random_tokens(4, 19), random_tokens(4, count, 1)
    sees, depths = tree(random_parents(count))

    def logits(sequences: list[int], step: int):
        text = Text(weights, sizes, dtype, [pads[b] for b in sequences], 80)
        text.read(prompt[sequences], step)
        parts = [
            text.rows(tokens[sequences], sees, depths, first, min(count, first + step))
            for first in range(0, count, step)
        ]
        return torch.cat(parts, 1)

    whole = logits([0, 1, 2, 3], count)
    assert whole.isfinite().all()
    for step in (1, 2, 7, 16, 17):
        assert torch.equal(logits([0, 1, 2, 3], step), whole), step
    for sequences in ([2], [3, 1], [1, 0, 3]):
        assert torch.equal(logits(sequences, count), whole[sequences]), sequences


@paired(SIZES)
def test_a_row_when_no_others_are_kept(name, dtype, level):
    """The last layer leaves out what nobody reads; keys and values are all there."""
    sizes, count, pads = SIZES[name], 21, [0, 5, 2]
    weights, prompt, tokens = decoder(sizes, dtype), random_tokens(3, 19), random_tokens(3, count, 1)
    tree_of = tree(random_parents(count))

    def forward(sequences: list[int], keep: int):
        text = Text(weights, sizes, dtype, [pads[b] for b in sequences], 48)
        text.read(prompt[sequences], 19)
        logits = text.rows(tokens[sequences], *tree_of, 0, count, keep)
        return logits, torch.stack([*text.caches[0], *text.caches[1]]).nan_to_num(7.0)

    for sequences in ([0, 1, 2], [2, 0], [1]):
        whole, caches = forward(sequences, count)
        for keep in (0, 1, 8, 17, count - 1):
            logits, stored = forward(sequences, keep)
            assert torch.equal(logits, whole[:, count - keep :]), keep
            assert torch.equal(stored, caches), keep


PIECES = {1: ((0, 1), (0, 33), (64, 128), (100, 127), (127, 128)), 4: ((0, 1), (5, 21), (-1, 0))}
SEQUENCES = {1: (([0], 1), ([0], 2)), 4: (([0], 1), ([3, 1], 2), ([2, 0, 1], 1))}  # and threads


@pytest.mark.slow
@pytest.mark.parametrize("batch", PIECES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_threads_share(dtype, batch, level, threads):
    """Up to 128 of a text, and of batches; of the larger model two threads share the outputs of a single row too."""
    sizes, pads = SIZES["qwen2-64"] if batch == 1 else Sizes(hidden=272, inner=300, head_dim=16, layers=1), [0, 3, 1, 6]
    weights, prompt = decoder(sizes, dtype), random_tokens(batch, 30 if batch == 1 else 11)
    count = 128 if batch == 1 or level.startswith("avx512") else 34
    tokens, (sees, depths) = random_tokens(batch, count, 1), tree(random_parents(count))

    def logits(sequences: list[int], first: int, last: int, of: int):
        threads(of)
        text = Text(weights, sizes, dtype, [pads[b] for b in sequences], 200)
        text.read(prompt[sequences], 30)
        for begin in range(0, first, 40):
            text.rows(tokens[sequences], sees, depths, begin, min(first, begin + 40))
        return text.rows(tokens[sequences], sees, depths, first, last)

    whole = logits([*range(batch)], 0, count, 2)
    assert batch > 1 or torch.equal(logits([0], 0, count, 1), whole)
    for sequences, of in SEQUENCES[batch]:
        for first, last in PIECES[batch]:
            first, last = (first, last) if first >= 0 else (count - 1, count)
            assert torch.equal(logits(sequences, first, last, of), whole[sequences, first:last])


# Every pair of size, dtype and prefix.
@pytest.mark.parametrize(
    ("name", "dtype", "prefix"),
    [(n, DTYPES[(i + j) % 3], p) for i, n in enumerate(SIZES) for j, p in enumerate((9, 250, 256))],
)
def test_a_path_of_the_tree_and_the_same_tokens_committed(name, dtype, prefix, level):
    sizes, parents = SIZES[name], random_parents(30, seed=2)
    weights, prompt, tokens = decoder(sizes, dtype), random_tokens(2, prefix), random_tokens(2, 30, 1)
    sees, depths = tree(parents)
    leaf = int(depths.argmax())
    path = sorted(torch.nonzero(sees[leaf]).flatten().tolist(), key=lambda node: int(depths[node]))
    assert len(path) > 8
    text = Text(weights, sizes, dtype, [0, 3], 320)
    text.read(prompt, 64)
    drafted = text.rows(tokens, sees, depths, 0, 30)[:, path]
    for step in (1, 3):
        plain = Text(weights, sizes, dtype, [0, 3], 320)
        plain.read(prompt, 100)
        assert torch.equal(plain.read(tokens[:, path], step), drafted)


@paired(["llama-odd", "mistral-128"])
def test_where_rows_lie_does_not_matter(name, dtype, level):
    sizes, count = SIZES[name], 20
    weights, prompt, tokens = decoder(sizes, dtype), random_tokens(1, 12), random_tokens(1, count, 1)
    parents = random_parents(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5))  # children before parents too
    place = order.argsort()
    moved = [-1 if parents[old] < 0 else int(place[parents[old]]) for old in order.tolist()]
    found = []
    for these, of in ((parents, tokens), (moved, tokens[:, order])):
        text = Text(weights, sizes, dtype, [0], 64)
        text.read(prompt, 12)
        found.append(text.rows(of, *tree(these), 0, count))
    assert torch.equal(found[1], found[0][:, order])


def test_positions_are_paired_by_their_place_in_the_text(level):
    """Wide, since what attention returns is rounded to bfloat16: of some thousand values one shows another order."""
    sizes, count = Sizes(hidden=32, inner=40, heads=32, head_dim=64, layers=1), 100
    weights, prompt, tokens = decoder(sizes, torch.bfloat16), random_tokens(1, 8), random_tokens(1, count, 1)
    found = []
    for shared in (count, 3):  # nodes that lie where the prefix ends, and those behind them the other way round
        order = torch.tensor([*range(shared), *reversed(range(shared, count))])
        place = order.argsort().tolist()
        text = Text(weights, sizes, torch.bfloat16, [0], 120)
        text.read(prompt, 8)
        parents = [-1 if node == 0 else place[node - 1] for node in order.tolist()]
        found.append(text.rows(tokens[:, order], *tree(parents), 0, count)[:, place])
    assert torch.equal(found[1], found[0])
    tokens = random_tokens(1, 300, 1)
    for window in (0, 30):
        sizes, found = dataclasses.replace(sizes, heads=4, kv_heads=2, window=window), []
        for step in (300, 129, 1):
            text = Text(decoder(sizes, torch.bfloat16), sizes, torch.bfloat16, [0], 310)
            found.append(text.read(tokens, step))
        assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@paired(SIZES)
def test_padding_does_not_matter(name, dtype, level):
    sizes = SIZES[name]
    weights, prompt, tokens = decoder(sizes, dtype), random_tokens(1, 270), random_tokens(1, 20, 1)
    found = []
    for pad in (0, 1, 7, 16):
        text = Text(weights, sizes, dtype, [pad], 340)
        text.read(prompt, 90)
        found.append(text.rows(tokens, *tree(random_parents(20)), 0, 20))
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_what_overflows_in_one_row_stays_there(level):
    sizes = SIZES["llama-odd"]
    weights = decoder(sizes, torch.float32)
    sees, depths = tree([-1, 0, 0, 1, 2])
    found = []
    for token in (7, 8):
        text = Text(weights, sizes, torch.float32, [0], 40)
        text.read(random_tokens(1, 6), 6)
        weights.embedding[8] = 1e38
        found.append(text.rows(torch.tensor([[1, 2, token, 3, 4]]), sees, depths, 0, 5))
    assert torch.equal(found[0][:, [0, 1, 3]], found[1][:, [0, 1, 3]])
    assert not torch.equal(found[0][:, 4], found[1][:, 4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_whose_keys_or_values_are_not_finite_are_marked(level, dtype):
    sizes = SIZES["llama-odd"]
    check_marks(Text(decoder(sizes, dtype), sizes, dtype, [0, 3], 40))


# Prompts and texts through the model.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_has_the_same_bits_in_any_chunks_and_batch(dtype):
    model = family("qwen3").to(dtype)
    ids, kv_start = random_tokens(2, 150), torch.tensor([0, 9], dtype=torch.int32)
    padding = (torch.arange(150) >= kv_start[:, None]).long()
    caches = []
    for chunk in (None, 1, 50):
        rows = FusedRows(model, 160, kv_start, "auto")
        rows.prefill(ids, padding, chunk)
        caches.append(torch.stack([t[:, :, :150] for part in rows.caches(2) for t in part]))
    alone = FusedRows(model, 160, kv_start[:1], "auto")
    alone.prefill(ids[1:, 9:], None, None)
    single = torch.stack([t[:, :, :141] for part in alone.caches(1) for t in part])
    text = (torch.arange(150) >= kv_start[:, None])[:, None, :, None]
    assert caches[0].isfinite().all()
    for cache in caches[1:]:
        assert torch.equal(cache * text, caches[0] * text)
    assert torch.equal(single[:, 0], caches[0][:, 1, :, 9:])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("sampled", [False, True])
def test_half_precision_has_one_text_whatever_is_drafted(name, dtype, sampled):
    target = family(name).to(dtype)
    options = {**prompts(3, 9), "max_new_tokens": 40, "do_sample": sampled, "seed": 3, "eos_token_id": None}
    alone = gsd.generate(target, **options)
    assert len(set(alone[:, 9:].flatten().tolist())) >= 15
    for noise, config in ((0.02, "chain"), (0.05, "tree"), (0.02, "graph"), (0.1, "graph")):
        out = gsd.generate(
            target,
            **options,
            assistant_model=noised(target, noise),
            graph_config=config,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, alone)
        assert out.stats.tokens_per_step > 1
    one = {**options, "input_ids": options["input_ids"][:1], "attention_mask": options["attention_mask"][:1]}
    assert torch.equal(gsd.generate(target, **one), alone[:1])


def test_the_model_stays_as_it_is():
    model = family("qwen2").bfloat16()
    before = copy.deepcopy(model.state_dict())
    rows = rows_of(model, 30, torch.zeros(1, dtype=torch.int32), "auto")
    assert type(rows) is FusedRows
    rows.prefill(random_tokens(1, 20), None, None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert rows.weights.head.data_ptr() == model.lm_head.weight.data_ptr()
    with pytest.raises(ValueError, match="cache: full, 31 positions needed and 30 allocated"):
        rows_of(model, 30, torch.zeros(1, dtype=torch.int32), "auto").prefill(random_tokens(1, 31), None, None)


# Levels.


def test_levels_are_named_with_their_reasons(level):
    found = cpu_levels.levels()
    assert list(found) == ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
    assert found["portable"] is None and all(reason is None or len(reason) > 10 for reason in found.values())
    assert cpu_levels.active() == level


@pytest.mark.slow
def test_unknown_levels_are_refused():
    with pytest.raises(ValueError, match=r"expected one of portable, avx2, .* got sse"), cpu_levels.forced("sse"):
        pass
    code = "from gsd_kernels import cpu_levels; cpu_levels.active()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "GSD_KERNELS_CPU_LEVEL": "sse"},
    )
    assert "ValueError" in run.stderr and "GSD_KERNELS_CPU_LEVEL: expected one of portable" in run.stderr


# Memory.


@pytest.mark.slow
def test_nothing_outside_a_tensor_is_touched():
    here = Path(__file__).resolve().parents[1]
    run = subprocess.run(
        [sys.executable, str(here / "decoder_edges.py")],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(here.parent), os.environ.get("PYTHONPATH", "")))},
    )
    assert run.returncode == 0 and run.stdout.endswith("done\n"), run.stdout + run.stderr[-2000:]
