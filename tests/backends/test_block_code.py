"""The block code of csrc as T threads: no races, no bad accesses, and a dropped barrier is noticed.

Blind to what only a GPU has: warps, fences, races between blocks, asynchronous copies.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
from block_code.programs import BUILDS, DIFFERENT, DIVERGENT, RACE, ROOT, SOURCE, build_all, needs, run
from shared import once

from gsd_kernels.ops.sampling import reference

# Code over thread groups. That over the warp machine, as the attention, has tests of its own.
HEADERS = [p for p in sorted((ROOT / "csrc/algorithms").glob("*.h")) if "group.sync(" in p.read_text()]

pytestmark = [pytest.mark.long, *needs(SOURCE, *HEADERS[:1])]

BARRIERS = sorted({name for header in HEADERS for name in re.findall(r'sync\("([^"]+)"\)', header.read_text())})


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = once(tmp_path_factory, "block_code", lambda folder: build_all(SOURCE, folder))
    return {name: folder / name for name in BUILDS}


@pytest.mark.parametrize("threads", [8, 32])
@pytest.mark.parametrize("sanitizer", BUILDS)
def test_a_block_equals_one_thread_and_is_clean(programs, sanitizer, threads):
    rounds = 1600 // threads
    status, output = run(programs[sanitizer], threads, rounds, 1)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize(("threads", "rounds"), [(1, 1000), (8, 60)])
def test_values_of_no_meaning_stay_inside(programs, threads, rounds):
    """Scores above 0, NaN, ids and rows that do not exist: nothing outside of the storage, no endless loop."""
    status, output = run(programs["address"], threads, rounds, 1, "--wild", timeout=60)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_dropped_barrier_is_caught(programs, barrier):
    status, output = run(programs["thread"], 8, 40, 2, "--drop", barrier)
    assert status in (RACE, DIFFERENT), (status, output[-2000:])


@pytest.mark.parametrize("atomic", ["atomic_or", "atomic_add", "atomic_add64"])
def test_an_atomic_made_plain_is_caught(programs, atomic):
    status, output = run(programs["thread"], 8, 40, 3, "--plain", atomic)
    assert status == RACE, (status, output[-2000:])


WARPERS = [
    (0, 0, 1, 0),
    (0.8, 0, 1, 0),
    (1, 5, 1, 0),
    (0.7, 0, 0.9, 0),
    (1.5, 0, 1, 0.1),
    (0.9, 40, 0.8, 0.02),
    (1, 0, 0, 0),
]


@pytest.mark.kept("gsd_kernels/ops/sampling")
@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 111, 1000])
def test_the_sampling_block_equals_the_reference(programs, warpers, vocab):
    """On CPU tensors other code runs, so the block is asked directly; of no branch for the whole distribution."""
    gen = torch.Generator().manual_seed(vocab)
    logits = torch.randn(1, 1, vocab, generator=gen) * 4
    position, sequence, seed = 1234, 7, -(2**61) + 5
    stream = torch.tensor(seed), torch.tensor([sequence], dtype=torch.int32)
    places = torch.tensor([[position]], dtype=torch.int32)
    tokens, log_probs = reference.draft_candidates(logits, places, 4, *stream, *warpers, True)
    whole = reference.warped_log_probs(logits, *warpers)
    for branch, expected in ((4, log_probs.flatten()), (0, whole.flatten())):
        arguments = map(str, ("--pick", 8, vocab, branch, seed, position, sequence, *warpers))
        done = subprocess.run(
            [str(programs["address"]), *arguments], input=logits.numpy().tobytes(), capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        pairs = [line.split() for line in done.stdout.decode().splitlines()]
        got, finite = torch.tensor([float(p) for _, p in pairs]), expected.isfinite()
        assert torch.equal(got.isfinite(), finite)
        torch.testing.assert_close(got[finite], expected[finite], atol=1e-5, rtol=1e-5)
        if branch:
            picked = torch.tensor([int(t) for t, _ in pairs])
            assert torch.equal(picked[finite], tokens.flatten().long()[finite])


def test_threads_at_different_barriers_are_caught(programs):
    status, output = run(programs["address"], 8, 0, 1, "--diverge")
    assert status == DIVERGENT and "divergent barrier" in output


def test_every_barrier_of_the_headers_is_listed():
    calls = sum(header.read_text().count("group.sync(") for header in HEADERS)
    assert calls == len(BARRIERS) >= 20, "two barriers share a name, or one is not a literal"
