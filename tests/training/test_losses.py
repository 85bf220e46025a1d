"""The losses of drafts and heads, and the measures before and after."""

from __future__ import annotations

import pytest
import torch
from models import noised
from training.options import options_for
from transformers import AutoModelForCausalLM

from gsd_kernels_train.distill import Distillation
from gsd_kernels_train.heads import HeadTraining
from gsd_kernels_train.job import load_target
from gsd_kernels_train.streams import Streams
from gsd_kernels_train.text import HeldOut, read_text


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


def test_windows_that_go_through_apart_train_the_same(folder, windows):
    whole, parts = (distillation(folder) for _ in range(2))
    whole.loss(windows).backward()
    for part in windows.split(2):
        (parts.loss(part) * (len(part) / len(windows))).backward()
    for ours, theirs in zip(whole.module.parameters(), parts.module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@torch.no_grad()
def greedy_chain(target, prompt, new, guess, depth):
    """Mean of accepted guesses in a step of speculative decoding, by decoding; ``guess`` continues a row."""
    tokens = target.generate(prompt, max_new_tokens=new, do_sample=False)
    place, counts = prompt.shape[1], []
    while place + depth < tokens.shape[1]:
        drafted = guess(tokens[:, : place + 1])
        wanted = tokens[0, place + 1 : place + 1 + depth].tolist()
        accepted = next((i for i, (a, b) in enumerate(zip(drafted, wanted, strict=True)) if a != b), depth)
        counts.append(accepted)
        place += accepted + 1
    return tokens, counts


def test_accepted_is_what_a_chain_accepts(folder, windows):
    trained = distillation(folder)
    target = trained.target
    trained.module = draft = noised(target, 0.02)

    def guess(tokens):
        return draft.generate(tokens, max_new_tokens=5, do_sample=False)[0, tokens.shape[1] :].tolist()

    rows = [greedy_chain(target, row[None, :6], 25, guess, 5) for row in windows]
    picks = torch.cat([tokens for tokens, _ in rows])
    counts = [count for _, counts in rows for count in counts]
    assert len(set(counts)) >= 3
    measured = trained.measure(HeldOut(windows, picks, torch.ones(3, 25, dtype=torch.bool)))
    assert measured["accepted"] == pytest.approx(sum(counts) / len(counts))
    same = (draft(windows[:, :-1]).logits.argmax(-1) == target(windows[:, :-1]).logits.argmax(-1)).double().mean()
    assert measured["agreement"] == pytest.approx(same.item()) and 0 < same < 1


def test_accepted_is_what_the_heads_guess(folder, windows):
    trained = head_training(folder)
    target, heads = trained.target, trained.module
    for parameter in heads.parameters():  # heads that are often right: those that guess one token for ever
        parameter.data.mul_(0.2)

    def guess(tokens):
        state = target(tokens[:, :-1], output_hidden_states=True).hidden_states[-1][:, -1]
        return heads(state, target.lm_head)[0].argmax(-1).tolist()

    rows = [greedy_chain(target, row[None, :6], 40, guess, 3) for row in windows]
    counts = [count for _, counts in rows for count in counts]
    picks = torch.cat([tokens for tokens, _ in rows])
    measured = trained.measure(HeldOut(windows, picks, torch.ones(3, 40, dtype=torch.bool)))
    assert measured["accepted"] == pytest.approx(sum(counts) / len(counts))
    right = [0, 0, 0]
    for row in windows:
        for place in range(12 - 3):
            guesses = guess(row[None, : place + 2])
            right = [n + int(guesses[k] == row[place + k + 2]) for k, n in enumerate(right)]
    assert measured["accuracy"] == pytest.approx([n / (3 * 9) for n in right])
