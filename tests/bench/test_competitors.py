"""The ways of decoding that a race can name."""

from __future__ import annotations

import pytest
import torch

from gsd_kernels_bench.generation.competitors import HISTORY_ROWS, competitors, fixed_configs
from gsd_kernels_bench.generation.pairs import load_pair


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fixed_shapes_of_the_history_have_the_rows_of_their_names(device):
    shapes = fixed_configs(torch.device(device))
    for name, rows in {**HISTORY_ROWS, "history": 11}.items():
        assert shapes[name].depth == 0 and shapes[name].max_rows == rows
        assert 0 < shapes[name].history_depth < rows  # a row of its own for every level


def test_the_history_alone_decodes_with_as_many_rows():
    pair = load_pair("tiny", device=torch.device("cpu"), dtype=torch.float32, prompts=1)
    prompt = pair.prompts[0].input_ids
    plain, *found = (way.decode(prompt, 24, 0) for way in competitors(pair, ("plain", *HISTORY_ROWS, "history-auto")))
    assert all(torch.equal(decoded.sequences, plain.sequences) for decoded in found)
