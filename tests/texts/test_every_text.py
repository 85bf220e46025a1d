"""The promise: the text is the target's own, whatever drafts, whatever the shape, the batch, the call and the door."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest
import torch
from texts.covering import AXES, SUBJECTS, asked, drafted, plain_text, rows

GOLDENS = Path(__file__).parents[1] / "goldens.py"


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_text_is_the_targets_own(name, tmp_path):
    subject = SUBJECTS[name]
    target, given, inputs = subject.made(tmp_path)
    accepted, rejected, tokens = 0, 0, set()
    for row in rows()[name]:
        options = asked(inputs, row)
        expected = plain_text(subject, target, options)
        out = drafted(target, given, options, row)
        assert torch.equal(out.sequences, expected), row
        tokens |= set(expected[:, options["input_ids"].shape[1] :].flatten().tolist())
        accepted += sum(out.stats.accepted[2:])
        rejected += out.stats.target_rows > out.stats.new_tokens
    assert accepted > 0 and rejected > 0 and len(tokens) >= 12, "nothing could have failed"


def test_shapes_that_were_only_warmed_have_no_storage_of_a_drafters_nodes_yet(monkeypatch, tmp_path):
    """On a GPU a policy's shapes are warmed before the first step of any."""
    target, given, inputs = SUBJECTS["source DSpark recurrent"].made(tmp_path)
    row = ("auto", 3, "greedy", "generate")
    options = asked(inputs, row)
    fake_cuda.install(monkeypatch)
    assert torch.equal(drafted(target, given, options, row).sequences, target.generate(**options))


def test_the_array_covers_all_pairs():
    every = [row for each in rows().values() for row in each]
    for one in range(len(AXES)):
        for other in range(one):
            met = {(row[other], row[one]) for row in every}
            assert len(met) == len(AXES[one]) * len(AXES[other])


@pytest.mark.long
def test_goldens_replay():
    """Texts, bits of ops, refusals' words and fields are those of before."""
    done = subprocess.run([sys.executable, str(GOLDENS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
