"""Every causal language model that transformers has is served or refused by name, as docs/model_classes.json says."""

from __future__ import annotations

import functools

import model_sweep
import pytest
import tiny_configs
import torch
import transformers

torch.set_num_threads(1)
pytestmark = pytest.mark.kept(
    *("csrc", "gsd_kernels", "python/gsd_kernels_hf", "docs/model_classes.json"),
    *("tests/model_sweep.py", "tests/tiny_configs.py", "tests/models.py"),
)


@functools.lru_cache
def table() -> tuple[str, dict[str, str]]:
    return model_sweep.read_table()


@functools.cache
def finding(name: str) -> model_sweep.Finding:
    return model_sweep.sweep(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.many if number % 6 else ())
        for number, name in enumerate(tiny_configs.classes())
    ],
)
def test_served_exactly_or_refused_by_name(name):
    """A class that nobody has seen fails only if a token is wrong, or on any other error than a refusal by name."""
    transformers.logging.set_verbosity_error()
    found = finding(name)
    version, rows = table()
    if version == transformers.__version__ and name in rows:
        assert rows[name] == model_sweep.cell(found), "docs/model_classes.json is old; run python tests/model_sweep.py"


def test_the_table_lists_every_class():
    version, rows = table()
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, and {transformers.__version__} is installed")
    assert list(rows) == tiny_configs.classes()
    assert sum(row == model_sweep.SERVED for row in rows.values()) >= 75
