"""Options of a training, for tests."""

from __future__ import annotations

import torch

from gsd_kernels_train.job import TrainingOptions
from gsd_kernels_train.loop import Interval


def options_for(folder, **changed):
    given = {
        "target": str(folder / "target"),
        "text": [folder / "text.txt"],
        "out": folder / "unused",
        "held_out_text": [],
        "steps": 1,
        "minutes": None,
        "batch": 3,
        "length": 12,
        "micro_batch": None,
        "lr": 1e-3,
        "warmup": 0.0,
        "decay": 0.0,
        "weight_decay": 0.0,
        "sequence_level": 0.0,
        "token_level": 1.0,
        "own_sequences": None,
        "seed": 0,
        "dtype": torch.float64,
        "device": torch.device("cpu"),
        "checkpoint_every": Interval(steps=1),
    }
    return TrainingOptions(**{**given, **changed})
