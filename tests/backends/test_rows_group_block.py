"""The source of the product for many rows on the CPU: groups of warps that bring, multiply and wait for each other.

Its machine (tests/block_code/warpgroup_machine.h) has the hardware's freedoms: boxes arrive in any order, operands are
read at any time up to a wait, sums are added as tensor cores add. What comes out has the contract's bits.
"""

from __future__ import annotations

import math
import re
import struct
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from block_code import rows as block_code
from block_code.programs import CXX, DIFFERENT, DIVERGENT, RACE, ROOT, build_mutated, programs_of, run
from decoders import Sizes, Text, decoder, random_parents, random_tokens, tree
from shared import once

from gsd_kernels.ops.decoder_rows.cuda import GROUP

SOURCE = ROOT / "tests/block_code/rows_group.cpp"
HEADER = ROOT / "csrc/algorithms/rows_group_product.h"
NOT_AWAITED, UNPUBLISHED, UNFENCED, MISUSED = 7, 8, 9, 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kept("csrc", "tests/block_code"),
    pytest.mark.skipif(CXX is None, reason="no C++ compiler (CXX, g++)"),
    pytest.mark.skipif(not SOURCE.exists(), reason="not a source checkout"),
]

TEXT = HEADER.read_text(encoding="utf-8") if HEADER.exists() else ""


#: Calls of the machine by the option that makes one of their names faulty; how a run then ends.
FAULTS = {
    "--drop": (r"(?:sync|any|sync_consumers|cluster_sync)", (RACE, DIFFERENT, MISUSED)),
    "--no-wait": ("wait_barrier", (RACE, DIFFERENT, MISUSED)),
    "--parity": ("wait_barrier", (RACE, DIFFERENT, DIVERGENT, MISUSED)),
    "--no-arrival": ("arrive_barrier", (DIVERGENT,)),
    "--no-multiply-wait": (r"multiply_wait<\d>", (RACE, DIFFERENT)),
    "--no-publish": ("publish_barriers", (UNPUBLISHED,)),
    "--no-await": ("await_previous", (RACE, MISUSED)),
}
NAMES = {
    option: sorted(set(re.findall(rf'machine\.(?:template )?{call}\("([^"]+)"', TEXT)))
    for option, (call, _) in FAULTS.items()
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return programs_of(tmp_path_factory, SOURCE)


@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 8), ("address", 12)])
def test_random_problems_keep_the_contract_and_are_clean(programs, sanitizer, rounds):
    """Odd sizes, all ends, up to four splits in a cluster and up to five tiles a block; two stages and eight."""
    status, output = run(programs[sanitizer], "random", rounds, 1, timeout=300)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 4), ("address", 8)])
def test_heads_that_turn_are_those_of_the_kernel_of_few_rows(programs, sanitizer, rounds):
    """Of 64 and 128, keys and values into caches of both orders, some of them not finite."""
    status, output = run(programs[sanitizer], "turned", rounds, 1, timeout=300)
    assert status == 0, output[-3000:]


def test_a_row_has_the_same_bits_in_every_size_of_block(programs):
    """33 … 300 rows in blocks of 64, 128 and 256."""
    status, output = run(programs["address"], "sizes", 1, 3, timeout=300)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize(("option", "name"), [(option, name) for option, names in NAMES.items() for name in names])
def test_what_is_left_out_is_caught(programs, option, name):
    """A barrier, a wait, a parity, an arrival, the barriers' publication, the wait for the launch before."""
    status, output = run(programs["thread"], "random", 4, 2, option, name)
    assert status in FAULTS[option][1], (status, output[-2000:])


def test_a_block_that_ends_before_it_waits_is_caught(programs):
    assert run(programs["address"], "random", 1, 2, "--early-end", "block")[0] == NOT_AWAITED


#: Products into sums that begin at 0, added by an instruction of their own.
ADDED_LATE = (
    "[&] { float late[kRowTiles][4] = {}; "
    "machine.template multiply_group<Element>(late, weights, rows); "
    'machine.multiply_commit(); machine.template multiply_wait<0>("late"); machine.multiply_begin(); '
    "for (int j = 0; j < kRowTiles; j++) for (int i = 0; i < 4; i++) sums[j][i] += late[j][i]; }()"
)

#: What the source says, from a bar on, what it becomes, and how that ends.
MUTATIONS = {
    "a sum that is added behind its products": (
        "machine.template multiply_group<Element>(sums, weights, rows)",
        ADDED_LATE,
        DIFFERENT,
    ),
    "two steps of inputs swapped": ("32 * step", "32 * (step ^ 1)", DIFFERENT),
    "a split that is not added": ("s < cut.splits", "s < cut.splits - 1", DIFFERENT),
    "splits that are added backwards": ("sums_of(s)", "sums_of(cut.splits - 1 - s)", DIFFERENT),
    "a share that is not the split's": ("split * cut.split_stages", "0 * cut.split_stages", DIFFERENT),
    "sums that no fence orders": ("machine.multiply_begin()", "(void)0", UNFENCED),
    "a split's sums in another's place": ("sums_of(share.split)", "sums_of(0)", DIFFERENT),
    "ups that are taken for gates": ("if (|ups_first(a)", "false", DIFFERENT),
    "a pair of another head": ("pair & -(a.turn.head_dim / 2)", "0", DIFFERENT),
    "half of the arrivals": (
        "kConsumers * kGroupThreads / kLanes",
        "kConsumers * kGroupThreads / kLanes / 2",
        DIVERGENT,
    ),
}


@pytest.fixture(scope="module")
def mutated(tmp_path_factory):
    def make(folder: Path) -> None:
        text = TEXT
        for number, (before, after, _) in enumerate(MUTATIONS.values(), 1):
            lead, _, place = before.rpartition("|")
            assert TEXT.count(lead + place) == 1, before
            text = text.replace(lead + place, f"{lead}(mutation() == {number} ? {after} : {place})")
        build_mutated(SOURCE, folder, {HEADER: text})

    return once(tmp_path_factory, "rows_group_mutated", make) / "mutated"


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_changed_source_is_caught(mutated, mutation):
    *_, expected = MUTATIONS[mutation]
    part = "turned" if "head" in mutation else "random"
    status, output = run(mutated, part, 6, 1, mutation=list(MUTATIONS).index(mutation) + 1)
    assert status == expected, (status, output)
    assert run(mutated, part, 2, 1)[0] == 0


def split_float(value: float, smallest: int) -> tuple[Fraction, int]:
    """A number as significand and exponent, as MMA-Sim takes them apart: that of a zero is -126."""
    exponent = -126 if value == 0 else max(math.frexp(value)[1] - 1, smallest)
    return Fraction(value) / Fraction(2) ** exponent, exponent


def tensor_core(total: float, pairs: list[tuple[float, float]], smallest: int) -> float:
    """The sum of MMA-Sim's rule for 9.0, in rational numbers."""
    terms = [split_float(total, -126)]
    for a, b in pairs:
        (s, e), (t, f) = split_float(a, smallest), split_float(b, smallest)
        terms.append((s * t, e + f if a * b else -126))
    highest = max(exponent for _, exponent in terms)
    unit = Fraction(2) ** (highest - 25)
    exact = unit * sum(math.trunc(s * Fraction(2) ** e / unit) for s, e in terms)
    if exact == 0:
        return 0.0
    last = Fraction(2) ** (max(math.frexp(float(exact))[1] - 1, -126) - 23)
    cut = math.trunc(exact / last) * last
    return math.copysign(math.inf, cut) if abs(cut) >= 2**128 else float(cut)


def test_the_machines_sums_are_those_of_the_published_rule(programs):
    """Numbers of all exponents, subnormal ones among them, zeros, and sums that cancel or leave the range."""
    lines = subprocess.check_output([programs["address"], "dots", "300", "1"], text=True).split("\n")[:-1]
    assert len(lines) == 600
    for number, line in enumerate(lines):
        total, *factors, found = (struct.unpack(">f", bytes.fromhex(word))[0] for word in line.split())
        pairs = list(zip(factors[::2], factors[1::2], strict=True))
        assert tensor_core(total, pairs, -14 if number < 300 else -126) == found, line


#: Of a product: its end, inputs, outputs of its matrices; then tiles of 128 outputs and splits.
CUTS = {
    "8B: q, k, v": (0, 4096, (4096, 1024, 1024), 48, 2),
    "8B: o": (1, 4096, (4096,), 32, 4),
    "8B: gate and up": (2, 4096, (14336, 14336), 224, 1),
    "8B: down": (1, 14336, (4096,), 32, 4),
    "8B: head": (3, 4096, (128256,), 1002, 1),
    "1B: q, k, v": (0, 2048, (2048, 512, 512), 24, 4),
    "1B: o": (1, 2048, (2048,), 16, 8),
    "1B: gate and up": (2, 2048, (8192, 8192), 128, 1),
    "1B: down": (1, 8192, (2048,), 16, 8),
    "0.5B: down": (1, 4864, (896,), 7, 8),
    "short splits": (1, 1000, (128,), 1, 4),
    "one stage": (1, 8, (128,), 1, 1),
}


@pytest.mark.parametrize("product", CUTS)
def test_the_cut_follows_from_the_shape(programs, product):
    """The same for any number of rows, and with splits no more blocks than multiprocessors."""
    end, inputs, outputs, tiles, splits = CUTS[product]
    found = subprocess.check_output([programs["address"], "cut", str(end), str(inputs), *map(str, outputs)], text=True)
    assert set(found.split("\n")) == {f"{tiles} {splits}", ""} and (splits == 1 or tiles * splits <= 132)


@pytest.mark.kept("gsd_kernels", "python/gsd_kernels_hf/model", "tests/decoders.py")
@pytest.mark.parametrize("where", block_code.DEVICES)
@pytest.mark.parametrize("count", [40, 140])
def test_the_operator_has_the_same_bits_by_groups(where, count, monkeypatch, tmp_path_factory):
    """All layers, in blocks of 64, 128 and 256 rows, with splits and without; caches as well."""
    if where == "cpu":
        block_code.take_for_gpus(monkeypatch, tmp_path_factory)
    sizes = Sizes(hidden=320, inner=272, heads=2, kv_heads=1, head_dim=64, layers=1, bias=True)
    tokens, (sees, depths) = random_tokens(1, count, 1), tree(random_parents(count))
    results = []
    for group in "01":
        monkeypatch.setenv(GROUP, group)
        case = Text(decoder(sizes, torch.bfloat16, lambda t: t.to(where)), sizes, torch.bfloat16, [1], 200, "cuda")
        case.read(random_tokens(1, 45), 40)
        logits = case.rows(tokens, sees, depths, 0, count)
        results.append([logits, *(cache.nan_to_num(7.0) for caches in case.caches for cache in caches)])
    assert results[0][0].isfinite().all()
    for ours, others in zip(*results, strict=True):
        assert torch.equal(ours, others)
    monkeypatch.setenv(GROUP, "yes")
    with pytest.raises(RuntimeError, match=f"{GROUP}: expected 0 or 1, got 'yes'; or unset it"):
        case.rows(tokens[:, :1], sees, depths, 0, 1)


def test_everything_with_a_name_is_listed():
    counts = {option: len(names) for option, names in NAMES.items()}
    assert counts == {
        **{"--drop": 6, "--no-wait": 2, "--parity": 2, "--no-arrival": 2},
        **{"--no-multiply-wait": 2, "--no-publish": 1, "--no-await": 2},
    }
