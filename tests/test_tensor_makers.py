"""Every tensor that is made names where it is made and, where PyTorch's default would decide, its dtype."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BY_DEFAULT = set("ones zeros empty empty_strided eye rand randn normal linspace logspace full tensor as_tensor".split())
BY_DEFAULT |= {"asarray", "scalar_tensor", "hann_window"}
INTEGERS = {"arange", "range", "randint", "randperm", "tril_indices", "triu_indices"}
"""Whose dtype is int64 whatever the default is; with other numbers they name it as well."""
OF_MODULES = {"Parameter", "register_buffer"}
"""Parts of a module are made where a ``with torch.device`` block says, as those of PyTorch's own modules are."""
FILES = [
    path
    for folder in ("python", "gsd_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "tests" not in path.parts  # the Hub kernel carries its own
]


def made_by_default(tree: ast.AST) -> Iterator[str]:
    """Calls that leave something to the process's defaults, in words."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    parts = {id(part) for call in calls if call.func.attr in OF_MODULES for arg in call.args for part in ast.walk(arg)}
    for call in calls:
        name, owner = call.func.attr, call.func.value
        if not isinstance(owner, ast.Name) or owner.id != "torch" or name not in BY_DEFAULT | INTEGERS:
            continue
        if id(call) in parts:
            continue
        needed = {"device"} | ({"dtype"} if name in BY_DEFAULT else set())
        if missing := sorted(needed - {keyword.arg for keyword in call.keywords}):
            yield f"line {call.lineno}: {ast.unparse(call)} without {' and '.join(missing)}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch.ones(3)", 1),
        ("torch.ones(3, dtype=torch.float32)", 1),
        ("torch.tensor([1], device=device)", 1),
        ("torch.zeros(2, dtype=dtype, device='cpu')", 0),
        ("torch.arange(3, device=device)", 0),
        ("torch.arange(3)", 1),
        ("nn.Parameter(torch.zeros(3))", 0),
        ("x.new_zeros(3), torch.zeros_like(x)", 0),
    ],
)
def test_what_is_looked_for(code, found):
    assert len(list(made_by_default(ast.parse(code)))) == found


def test_no_tensor_is_made_by_the_process_defaults():
    found = {str(path.relative_to(ROOT)): list(made_by_default(ast.parse(path.read_text("utf-8")))) for path in FILES}
    assert not {path: calls for path, calls in found.items() if calls}
