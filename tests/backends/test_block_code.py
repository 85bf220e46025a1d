"""The block code of csrc on the CPU: right, free of races and bad accesses; every fault that is planted is noticed.

A block's threads are fibers, and its machine does literally what the PTX ISA says (tests/block_code); ThreadSanitizer
and AddressSanitizer look on. Code over thread groups ("8 threads") leaves what one thread does. Products and path
attention have their contracts' bits in any company and place, dag_attention is held against double precision. Blind to
what only a GPU has: fences, rounding, time.
"""

from __future__ import annotations

import math
import re
import struct
import subprocess
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from block_code.changes import CHANGES
from block_code.programs import BUILDS, CAUGHT, CODE, DIVERGENT, ROOT, build, needs, problems, run

from gsd_kernels.ops.sampling import reference

ALGORITHMS = ROOT / "csrc/algorithms"
pytestmark = [pytest.mark.long, *needs(CODE, ALGORITHMS)]
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(ALGORITHMS.glob("*.h"))}


class Part(NamedTuple):
    """A problem: rounds under ThreadSanitizer, under AddressSanitizer, with a fault; headers whose calls it makes."""

    thread: int
    address: int
    faulty: int = 0
    headers: tuple[str, ...] = ()


PARTS = {
    "8 threads": Part(200, 200, 40, tuple(name for name, text in TEXTS.items() if "group.sync(" in text)),
    "32 threads": Part(50, 50),
    "wild 1": Part(0, 800),  # scores above 0, NaN, ids and rows that do not exist: it stays inside, and ends
    "wild 8": Part(0, 60),
    "attention": Part(12, 40, 12, ("attention_tiles",)),
    "path": Part(4, 12, 8, ("path_attention", "path_end")),
    "path cuts": Part(0, 1),
    "path lists": Part(0, 1),
    "product": Part(8, 16, 8, ("rows_product",)),
    "packed": Part(4, 8),
    "many": Part(0, 2),
    "turned": Part(4, 8, 8, ("rows_heads",)),
    "between": Part(8, 16, 8, ("rows_turn", "rows_pair")),
    "group": Part(8, 12, 4, ("rows_group_product",)),
    "group turned": Part(4, 8),
    "group sizes": Part(0, 1),
}
#: By fault: the calls that it is about, of a group's or a machine's, and the sanitizer that notices.
FAULTS = {
    "drop": (r"(?:sync|any|sync_warp|sync_consumers|cluster_sync)", "thread"),
    "hurry": (r"wait<[^>]+>", "address"),
    "misplace-copy": (r"copy", "address"),
    "misplace-load": (r"load_matrices<\w+>", "address"),
    "no-await": (r"await_previous", "address"),
    "no-wait": ("wait_barrier", "thread"),
    "parity": ("wait_barrier", "thread"),
    "no-arrival": ("arrive_barrier", "thread"),
    "no-multiply-wait": (r"multiply_wait<\d>", "thread"),
    "no-publish": ("publish_barriers", "thread"),
}
CALL = r'(?:(?:machine|group)\.(?:template )?{0}\(|\b{0}\(machine, )"([^"]+)"'


def rows() -> list[tuple[str, str, str]]:
    """Problem, fault, name."""
    found = {
        (problem, fault, name)
        for problem, part in PARTS.items()
        for fault, (call, _) in FAULTS.items()
        for header in part.headers
        for name in re.findall(CALL.format(call), TEXTS.get(header, ""))
    }
    plain = {("8 threads", "plain", name) for name in ("atomic_or", "atomic_add", "atomic_add64")}
    return sorted(found | plain | {("group", "early-end", "block")})


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return problems(tmp_path_factory)


@pytest.mark.parametrize(
    ("problem", "sanitizer"), [(p, s) for p, part in PARTS.items() for s in BUILDS if getattr(part, s) > 0]
)
def test_random_problems_are_right_and_clean(programs, problem, sanitizer):
    status, output = run(programs[sanitizer], problem, getattr(PARTS[problem], sanitizer), 1, timeout=300)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize(("problem", "fault", "name"), rows())
def test_a_planted_fault_is_caught(programs, problem, fault, name):
    """A barrier or a wait that is left out, a wrong place on one side, an atomic that is none."""
    sanitizer = FAULTS[fault][1] if fault in FAULTS else "thread"
    status, output = run(programs[sanitizer], problem, PARTS[problem].faulty, 2, fault, name)
    assert status in CAUGHT, (status, output[-2000:])


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_source_is_caught(programs, change):
    _, _, _, problem, rounds = CHANGES[change]
    status, output = run(programs["address"], problem, rounds, 1, mutation=list(CHANGES).index(change) + 1)
    assert status in CAUGHT, (status, output[-2000:])


def test_every_call_that_can_be_faulty_has_a_name():
    for header in {header for part in PARTS.values() for header in part.headers}:
        for call, _ in FAULTS.values():
            calls = re.findall(rf"(?:machine|group)\.(?:template )?{call}\((?!name,)", TEXTS[header])
            assert len(calls) <= len(re.findall(CALL.format(call), TEXTS[header])), (header, call)
    assert len(rows()) >= 75


def test_threads_at_different_barriers_are_caught(programs):
    status, output = run(programs["address"], "diverge", 1, 1)
    assert status == DIVERGENT and "divergent barrier" in output


def test_the_runtime_is_asked_once_about_a_kernel(tmp_path):
    program = build(CODE / "kernel_facts.cpp", tmp_path / "kernel_facts", BUILDS["thread"])
    assert run(program) == (0, "")


WARPERS = [(0, 0, 1, 0), (1, 5, 1, 0), (0.7, 0, 0.9, 0), (1.5, 0, 1, 0.1), (0.9, 40, 0.8, 0.02), (1, 0, 0, 0)]


@pytest.mark.kept("gsd_kernels/ops/sampling")
@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize("vocab", [1, 111, 1000])
def test_the_sampling_block_equals_the_reference(programs, warpers, vocab):
    """On CPU tensors other code runs, so the block is asked directly; of no branch for the whole distribution."""
    logits = torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    position, sequence, seed = 1234, 7, -(2**61) + 5
    stream = torch.tensor(seed), torch.tensor([sequence], dtype=torch.int32)
    places = torch.tensor([[position]], dtype=torch.int32)
    tokens, log_probs = reference.draft_candidates(logits, places, 4, *stream, *warpers, True)
    whole = reference.warped_log_probs(logits, *warpers)
    for branch, expected in ((4, log_probs.flatten()), (0, whole.flatten())):
        asked = map(str, ("pick", 8, vocab, branch, seed, position, sequence, *warpers))
        found = subprocess.run(
            [programs["address"], *asked], input=logits.numpy().tobytes(), capture_output=True, check=True, timeout=120
        )
        pairs = [line.split() for line in found.stdout.decode().splitlines()]
        got, finite = torch.tensor([float(p) for _, p in pairs]), expected.isfinite()
        assert torch.equal(got.isfinite(), finite)
        torch.testing.assert_close(got[finite], expected[finite], atol=1e-5, rtol=1e-5)
        if branch:
            picked = torch.tensor([int(t) for t, _ in pairs])
            assert torch.equal(picked[finite], tokens.flatten().long()[finite])


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
