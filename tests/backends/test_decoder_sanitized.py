"""The forward of rows under the sanitizers, and how much it allocates: the rows' activations, whatever the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from block_code.programs import BUILDS, ROOT, TORCH, build_all, needs, run
from shared import once

SOURCE = ROOT / "tests/block_code/decoder.cpp"
#: Compiled together: most of the time goes into PyTorch's headers.
UNITS = (
    ("csrc/cpu/decoder", "csrc/cpu/team", "csrc/cpu/weights", "tests/block_code/decoder"),
    tuple(
        f"csrc/cpu/{name}"
        for name in (
            "path_attention",
            "model_math",
            "instruction_sets",
            "products_portable",
            "row_math",
            "row_forms",
        )
    ),
)

pytestmark = needs(SOURCE, ROOT / "csrc/cpu")


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    builds = {**BUILDS, "count": ["-O1", "-DGSD_COUNT"]}

    def make(folder: Path) -> None:
        units = [folder / f"unit{i}.cpp" for i in range(len(UNITS))]
        for unit, files in zip(units, UNITS, strict=True):
            unit.write_text("".join(f'#include "{ROOT / file}.cpp"\n' for file in files))
        build_all(units[0], folder, {name: [*flags, *TORCH, *units[1:]] for name, flags in builds.items()})

    folder = once(tmp_path_factory, "decoder", make)
    return {name: folder / name for name in builds}


@pytest.mark.parametrize("sanitizer", BUILDS)
@pytest.mark.parametrize("rows", [1, 19, 50])
def test_no_races_and_no_bad_accesses(decoders, sanitizer, rows):
    status, output = run(decoders[sanitizer], rows, 421, 333, 1)
    assert status == 0, output[-3000:]


def test_only_activations_of_the_rows_are_allocated(decoders):
    def allocated(rows: int, hidden: int, inner: int, layers: int) -> int:
        status, output = run(decoders["count"], rows, hidden, inner, layers)
        assert status == 0
        return int(output)

    few = allocated(16, 64, 150, 2)
    assert allocated(16, 64, 150, 6) == few
    for rows, hidden, inner in ((16, 64, 150), (32, 64, 150), (16, 256, 600), (64, 256, 600)):
        count, q = 2 * rows, 40  # of two sequences
        activations = 4 * count * (2 * hidden + 2 * q + 2 * 20 + inner + 10)
        packed = 4 * (count + 16) * (max(hidden, inner) + 32)
        strips = 4 * 2 * count * 256
        attention = 4 * 64 * (512 + rows + 64) + 4 * count * rows + (1 << 14)
        assert allocated(rows, hidden, inner, 2) <= activations + 2 * packed + strips + attention
