"""Every class of transformers that writes text, whatever it reads, is served or refused by name, as the table says."""

from __future__ import annotations

import image_sweep
import model_sweep
import pytest
import tiny_configs
import tiny_vision
import torch
import transformers

torch.set_num_threads(1)
SWEEPS = {  # of a kind: its classes, what becomes of one, its cell of the table, and of how many cases one runs
    "text": (tiny_configs.classes, model_sweep.sweep, model_sweep.cell, 6),
    "images": (lambda: sorted(tiny_vision.FAMILIES), image_sweep.sweep, image_sweep.row, 3),
}
ROWS = {kind: model_sweep.read_table(kind)[1] for kind in SWEEPS}
SAME = transformers.__version__ == model_sweep.read_table()[0]
pytestmark = pytest.mark.kept(
    *("csrc", "gsd_kernels", "python/gsd_kernels_hf", "docs/model_classes.json"),
    *("tests/model_sweep.py", "tests/image_sweep.py", "tests/tiny_configs.py", "tests/tiny_vision.py"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=pytest.mark.many if number % every else ())
        for kind, (classes, _, _, every) in SWEEPS.items()
        for number, name in enumerate(classes())
    ],
)
def test_served_exactly_or_refused_by_name(kind, name):
    """A class that nobody has seen fails only if a token is wrong, or on any other error than a refusal by name."""
    if kind == "images" and not SAME:
        pytest.skip("the inputs are of another transformers")
    transformers.logging.set_verbosity_error()
    _, sweep, cell, _ = SWEEPS[kind]
    found = cell(sweep(name))
    assert not SAME or ROWS[kind][name] == found, f"docs/model_classes.json is old; run {sweep.__module__}.py"


@pytest.mark.skipif(not SAME, reason="the table is of another transformers")
@pytest.mark.parametrize(("kind", "least"), [("text", 75), ("images", 25)])
def test_the_table_lists_every_class(kind, least):
    assert list(ROWS[kind]) == SWEEPS[kind][0]()
    assert sum(row.startswith(model_sweep.SERVED) for row in ROWS[kind].values()) >= least
