"""The table of online learning: its requests, and a table of what was measured."""

from __future__ import annotations

import pytest

from gsd_kernels_bench.generation import online_table


def test_requests_are_pieces_of_one_file():
    name, pieces = online_table.topic(5, 16)
    assert name.endswith(".py") and len({tuple(piece[0].tolist()) for piece in pieces}) == 5
    assert all(piece.shape == (1, 16) for piece in pieces)
    with pytest.raises(ValueError, match=r"requests: .* has only"):
        online_table.topic(10**9, 16)


def test_a_row_is_the_mean_of_its_requests():
    counts = {"without": [1.0] * 10, "with": [1.0] * 8 + [2.0, 3.0]}
    settings = {"requests": 10, "prompt_tokens": 4, "new_tokens": 8, "steps": 1, "lr": 1e-4}
    text = online_table.table({"settings": settings, "file": "a.py", "topics": {"again": counts, "new": counts}})
    assert "| 1–8 | 1.000 | 1.000 | 1.000 | 1.000 |" in text and "| 9–10 | 1.000 | 2.500 | 1.000 | 2.500 |" in text
