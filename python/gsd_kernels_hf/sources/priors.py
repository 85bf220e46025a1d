"""The weights with which the history's mixture begins, in the order of :mod:`gsd_kernels.ops.history.records`.

Fitted as :func:`gsd_kernels.learn` fits its own, from zero: to 7,888 nodes that SmolLM2 accepted in its greedy answers
to 72 prompts, of which the benchmarks report none (of a recipe in commit a2049d6), with a table of the other half's
answers and without.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRIOR = (
    1.305, 0.171, 0.347, -1.46, 1.81, 0.209, 0.668, 0.221,  # text, contexts of 1
    0.677, 0.133, 0.074, 0.09, 2.37, 0.33, 0.541, 0.361,  # text, contexts of 2
    0.813, 0.163, -0.435, -0.687, 2.364, 0.365, 1.087, 0.606,  # text, contexts of 3
    1.001, 0.139, 0.489, 0.156, 1.001, 0.139, 0.489, 0.156,  # text, contexts of 4
    0.57, 0.221, -0.016, 0.762, 1.099, 0.13, 0.216, -0.039,  # learned, contexts of 1
    1.368, 0.52, -0.02, 0.498, 0.681, -0.004, 0.422, 0.009,  # learned, contexts of 2
    0.659, -0.121, 0.45, -0.185, 0.659, -0.121, 0.45, -0.185,  # learned, contexts of 3
    0.432, 0.026, 0.892, 0.0, 0.0, 0.0, 0.0, 0.0,  # runners-up
    0.58, 1.667, 1.68, 1.811, 3.492, 2.857, 4.317,  # the longest match, by length
    -0.315, -1.801, -0.716, 0.164, 0.628, -0.008, 0.0,  # the next one
    0.135, 0.236, -0.083, -0.208,  # pace: of the match, of the longest context
    2.193,  # none: 1
    0.959, 1.051, 0.817, -0.474, -0.16,  # by longest context
    0.49, 0.571, 0.483, 0.648,  # by longest learned
    0.407, 0.539, 0.062, 0.524, 0.445, 0.279, 0.24, -0.305,  # by match
    0.09, 0.224, 0.331, 0.407, 0.252, 0.89,  # by depth
    -0.217, -0.391,  # by pace
    0.149, 0.251, 0.045, 0.318, 0.419, -0.308,  # by what is left
    -0.006,  # by the first runner-up
)  # fmt: skip


def weights_of(prior: tuple[float, ...]) -> Tensor:
    """The weights in the form that the op takes, float64."""
    return torch.tensor(prior, dtype=torch.float64, device="cpu")
