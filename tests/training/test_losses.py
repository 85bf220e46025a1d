"""The losses of drafts and heads, and the measures before and after."""

from __future__ import annotations

import pytest
import torch
from training.options import options_for
from transformers import AutoModelForCausalLM

from gsd_kernels_train.distill import Distillation
from gsd_kernels_train.heads import HeadTraining
from gsd_kernels_train.job import load_target
from gsd_kernels_train.streams import Streams
from gsd_kernels_train.text import read_text


@pytest.fixture(scope="module")
def windows(folder):
    _, tokenizer = load_target(options_for(folder))
    stream = read_text([folder / "text.txt"], [], tokenizer, 12).training
    return Streams([(1.0, stream)], 0, 36).batch(0, 12)[0]


def distillation(folder, **changed):
    options = options_for(folder, **changed)
    target, tokenizer = load_target(options)
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float64)
    return Distillation(options, target, tokenizer, draft, tokenizer, torch.float32)


def head_training(folder, **changed):
    options = options_for(folder, **changed)
    target, _ = load_target(options)
    trained = HeadTraining(options, target, 3, 1, torch.float32)
    for parameter in trained.module.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return trained


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_drafts_loss_is_divergence_and_likelihood(folder, windows, weight):
    trained = distillation(folder, token_level=weight)
    with torch.no_grad():
        p, q = (model(windows[:, :-1]).logits.softmax(-1) for model in (trained.target, trained.module))
    expected = []
    for row in range(windows.shape[0]):
        for place in range(12):
            divergence = (p[row, place] * (p[row, place] / q[row, place]).log()).sum()
            expected.append(weight * divergence - (1 - weight) * q[row, place, windows[row, place + 1]].log())
    torch.testing.assert_close(trained.loss(windows).detach(), torch.stack(expected).mean())


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_heads_loss_compares_with_the_token_that_each_is_for(folder, windows, weight):
    trained = head_training(folder, token_level=weight)
    target, heads = trained.target, trained.module
    expected = 0.0
    with torch.no_grad():
        for k in range(3):
            losses = []
            for row in windows:
                for place in range(12 - 3):
                    seen = target(row[None, : place + 1], output_hidden_states=True).hidden_states[-1][:, -1]
                    q = heads(seen, target.lm_head)[0, k].softmax(-1)
                    p = target(row[None, : place + k + 2]).logits[0, -1].softmax(-1)
                    divergence = (p * (p / q).log()).sum()
                    losses.append(weight * divergence - (1 - weight) * q[row[place + k + 2]].log())
            expected += 0.8**k * torch.stack(losses).mean()
    torch.testing.assert_close(trained.loss(windows).detach(), expected)
