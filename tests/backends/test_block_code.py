"""The block code of csrc on the CPU: right, free of races and bad accesses; every fault that is planted is noticed.

A block's threads are fibers, and its machine does literally what the PTX ISA says (tests/block_code); ThreadSanitizer
and AddressSanitizer look on. Code over thread groups ("8 threads") leaves what one thread does. Products and path
attention have their contracts' bits in any company and place. Blind to what only a GPU has: fences, rounding, time.
The CPU's threads and accesses are looked at, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from block_code.changes import CHANGES
from block_code.programs import BUILDS, CAUGHT, CODE, CXX, MARKS, ROOT, TORCH, build, problems, run

from gsd_kernels.ops.sampling import reference

ALGORITHMS = ROOT / "csrc/algorithms"
pytestmark = [pytest.mark.long, *MARKS]
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
    "path": Part(4, 12, 8, ("attention_tiles", "path_attention", "path_end")),
    "product": Part(8, 16, 8, ("rows_product",)),
    "many": Part(0, 2),
    "turned": Part(4, 8, 8, ("rows_heads",)),
    "between": Part(8, 16, 8, ("rows_turn", "rows_pair")),
    "group": Part(8, 12, 4, ("rows_group_product",)),
    "group turned": Part(4, 8),
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
    status, output = run(programs[sanitizer], problem, getattr(PARTS[problem], sanitizer), 1)
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


# On a CPU.


def test_a_team_of_threads_does_every_piece_once(tmp_path):
    (tmp_path / "team.cpp").write_text(f'#include "{CODE}/team.cpp"\n#include "{ROOT}/csrc/cpu/team.cpp"\n')
    program = build(tmp_path / "team.cpp", tmp_path / "team", [*BUILDS["thread"], *TORCH])
    assert run(program) == (0, "")


PROGRAM = """
import ctypes, sys, pytest, torch
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.table import all_ops
assert unavailable_reason("cpu", torch.device("cpu")) is None  # the compiled ops are there; these come in their place
library = ctypes.CDLL(sys.argv[1])
library.gsd_register(b"gsd_kernels")
for name, op in all_ops().items():
    library.gsd_line(name.encode(), op.line.text.encode())
sys.exit(pytest.main([sys.argv[2], "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-x", "-s"]))
"""


@pytest.mark.kept("gsd_kernels", "tests/ops")
def test_no_bad_accesses_of_recurrent_layers(tmp_path):
    """By the op's own tests, over a build of it that watches every access."""
    names, libraries = ("libasan.so", "libubsan.so"), Path(torch.__file__).parent / "lib"
    asked = [[CXX, f"-print-file-name={name}"] for name in names]
    preload = [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in asked]
    if not all(Path(place).is_absolute() for place in preload):
        pytest.skip("the compiler has no sanitizers' libraries")
    flags = ["-O1", "-fPIC", "-shared", "-w", "-fsanitize=address,undefined", *TORCH]
    flags += [f"-L{libraries}", "-ltorch_cpu", "-ltorch"]
    library = build(ROOT / "csrc/cpu/state_rows.cpp", tmp_path / "states.so", flags)
    options = {"ASAN_OPTIONS": "detect_leaks=0:exitcode=67", "UBSAN_OPTIONS": "halt_on_error=1"}
    command = [sys.executable, "-c", PROGRAM, library, ROOT / "tests/ops/test_state_rows.py"]
    environment = os.environ | options | {"LD_PRELOAD": " ".join(preload)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and " passed" in done.stdout, (done.stdout + done.stderr)[-3000:]
