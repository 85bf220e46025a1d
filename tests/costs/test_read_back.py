"""Numbers that are read from disk are what was written, or nothing of them is taken over: one line, and all goes on."""

from __future__ import annotations

import json
import logging
import math
import random

import numpy as np
import pytest
import simulated
import simulated_rows
import torch
from json_damage import leaves, replaced

from gsd_kernels_hf import numbers
from gsd_kernels_hf.costs import machine
from gsd_kernels_hf.costs.model import PLAIN, CostModel
from gsd_kernels_hf.policy.row_policy import RowExperience, RowPolicy
from gsd_kernels_hf.policy.shape_policy import ShapeExperience, ShapePolicy
from gsd_kernels_hf.store import MAX_BYTES, Document

REFUSED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # what a section is ignored for
WRONG = (None, "1", True, -1, -0.5, 0, 0.5, 7, math.nan, math.inf, -math.inf, 1e300, 10**400, [], {}, [[1.0]])
STEPS = 8


def fresh(part: str) -> CostModel | ShapeExperience | RowExperience:
    """What nobody taught."""
    if part == "rows":
        return simulated_rows.experience()
    found = simulated.experience()
    return found.costs if part == "costs" else found


def use(found: CostModel | ShapeExperience | RowExperience, steps: int = STEPS) -> None:
    """Some steps of a text."""
    if isinstance(found, CostModel):
        for name in (PLAIN, *found.names):
            found.observe(name, 4, 2e5, 3, 0.01, 0.001)
        seconds = found.target_seconds(np.array([1.0, 5.0, 900.0]), 1e6), found.other_seconds(64)
        assert all(np.isfinite(some).all() and (some > 0).all() for some in seconds)
    elif isinstance(found, ShapeExperience):
        simulated.World(simulated.BFLOAT16).run(ShapePolicy(found, prefix=200), steps)
        tokens, rows = found.acceptance.tokens(found.forecast)
        assert np.isfinite(tokens).all() and np.isfinite(rows).all()
    else:
        simulated_rows.World(simulated_rows.STEEP).run(RowPolicy(found, prefix=200), steps)


@pytest.fixture(scope="module")
def written():
    """What is written of parts that steps taught, as it comes back from the disk."""
    made = {}
    for part in ("costs", "shapes", "rows"):
        found = fresh(part)
        use(found, 40)
        made[part] = json.loads(json.dumps(found.as_dict()))
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("part", ["costs", "shapes", "rows"])
def test_a_value_that_is_none_leaves_all_as_it_was(written, part, seed):
    choose, whole, before = random.Random(seed), written[part], fresh(part).as_dict()
    ways = leaves(whole)
    short = [way for way in ways if len(way) < 4]  # or numbers of tables alone would be chosen
    refused = 0
    for _ in range(120):
        way, found = choose.choice(choose.choice((ways, short))), fresh(part)
        data = replaced(whole, way, choose.choice(WRONG))
        try:
            found.load(data)
        except REFUSED:
            refused += 1
            assert found.as_dict() == before, way
        else:
            use(found)
    assert refused > 60


def mirrored(covariance: list[list[float]], i: int, j: int, value: float) -> list[list[float]]:
    """A covariance with another value at two places."""
    made = [list(row) for row in covariance]
    made[i][j] = made[j][i] = value
    return made


COVARIANCES = {  # of values that vary by about one
    "of two values that vary together more than alone": lambda c: mirrored(c, 0, 1, 1.5 * c[0][0]),
    "not symmetric": lambda c: [[c[0][0], 0.5 * c[0][1], *c[0][2:]], *c[1:]],
    "of a variance below 0": lambda c: mirrored(c, 0, 0, -1e-3),
    "of a variance that is too large": lambda c: mirrored(c, 1, 1, 1e6),
    "of nan": lambda c: mirrored(c, 0, 1, math.nan),
    "of infinity": lambda c: mirrored(c, 0, 1, math.inf),
    "too small": lambda c: [row[:-1] for row in c[:-1]],
    "ragged": lambda c: [c[0][:-1], *c[1:]],
}


@pytest.mark.parametrize("what", COVARIANCES)
@pytest.mark.parametrize(("part", "of"), [("costs", "target"), ("costs", "other"), ("rows", "edges")])
def test_a_covariance_that_is_none_is_refused(written, part, of, what):
    data = replaced(written[part], (of, "covariance"), COVARIANCES[what](written[part][of]["covariance"]))
    found, before = fresh(part), fresh(part).as_dict()
    with pytest.raises(ValueError, match="covariance: "):
        found.load(data)
    assert found.as_dict() == before


def test_a_covariance_whose_digits_were_left_out_is_none_the_less_one():
    directions = np.random.default_rng(0).standard_normal((12, 3))
    exact = directions @ directions.T  # of rank 3
    rounded = [[float(f"{value:.7g}") for value in row] for row in exact]
    assert np.linalg.eigvalsh(np.array(rounded))[0] < 0
    found = numbers.covariance("covariance", rounded, exact.diagonal() + 1)
    assert np.linalg.eigvalsh(found)[0] > -1e-12
    np.testing.assert_allclose(found, exact, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "way", "value"),
    [
        ("costs", ("steps",), -5),
        ("costs", ("timed",), {PLAIN: -40}),
        ("costs", ("timed",), {"no shape": 80}),
        ("costs", ("steps",), 1e9),
        ("shapes", ("acceptance", "accepted"), {"model": [-10.0, 0.0]}),
        ("shapes", ("acceptance", "accepted"), {"model": [0.0, -10.0]}),
        ("shapes", ("acceptance", "accepted"), {"lookup": [math.inf, 1.0]}),
        ("shapes", ("acceptance", "hits", "model", 0, 0), 1e-300),
        ("shapes", ("acceptance", "expected", "lookup", 0, 0), 0.01),
        ("shapes", ("last",), {"1": "no shape"}),
        ("shapes", ("wait",), 10**9),
        ("rows", ("wait",), 10**9),
        ("rows", ("off",), "no"),
        ("rows", ("tokens",), "2"),
    ],
)
def test_counts_that_no_text_brings_are_refused(written, part, way, value):
    with pytest.raises(ValueError):
        fresh(part).load(replaced(written[part], way, value))


def test_a_file_larger_than_memory_is_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    document = Document("pair", {"a": 1})
    document.write({"costs": 1})
    with document.path.open("r+b") as file:
        file.truncate(1 << 42)  # a hole: the disk keeps none of it
    with caplog.at_level(logging.WARNING, "gsd_kernels"):
        assert document.read() == {} == document.read()
    assert len(caplog.records) == 1 and f"more than {MAX_BYTES} bytes" in caplog.text
    document.write({"costs": 2})
    assert Document("pair", {"a": 1}).read() == {"costs": 2}


@pytest.mark.parametrize("value", ["fast", -1.0, 1e30, True, [1.0], {}])
def test_a_speed_that_no_machine_has_is_measured_anew(value, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "_known", {})
    monkeypatch.setattr(machine, "measure_bandwidth", lambda device: 2e10)
    assert machine.bandwidth(torch.device("cpu")) == 2e10
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(replaced(json.loads(file.read_text()), ("sections", "bandwidth"), value)))
    machine._known.clear()
    with caplog.at_level(logging.WARNING, "gsd_kernels"):
        assert machine.bandwidth(torch.device("cpu")) == 2e10
    assert len(caplog.records) == 1 and str(file) in caplog.text
    assert json.loads(file.read_text())["sections"] == {"bandwidth": 2e10}
