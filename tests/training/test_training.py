"""What is learned: losses, levels and blocks of drafters, chats, minutes of a run, and learning while serving."""

from __future__ import annotations

import copy
import json
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from models import noised, prompts, tiny
from sources.drafters import FixedText, random_tensors, target_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import gsd_kernels as gsd
from gsd_kernels_hf.sources.base import Prefilled
from gsd_kernels_hf.sources.features import DFlashDrafts, Recursive
from gsd_kernels_train import loop
from gsd_kernels_train.distill import Distillation, distill
from gsd_kernels_train.drafters import DFlashTraining, DrafterOptions, Eagle3Training, HeadTraining, MtpTraining
from gsd_kernels_train.job import TrainingOptions, load_target
from gsd_kernels_train.loop import Interval, RunClock, load_checkpoint
from gsd_kernels_train.text import encode_chats

WINDOWS = torch.randint(3, 250, (3, 13), generator=torch.Generator().manual_seed(3))


def options_for(folder, **changed):
    given = dict.fromkeys(("minutes", "micro_batch", "own_sequences"))
    given |= dict.fromkeys(("warmup", "decay", "weight_decay", "sequence_level"), 0.0)
    given |= {
        "target": str(folder / "target"),
        "text": [folder / "text.txt"],
        "out": folder / "unused",
        "held_out_text": [],
        "steps": 1,
        "batch": 3,
        "length": 12,
        "lr": 1e-3,
        "token_level": 1.0,
        "seed": 0,
        "dtype": torch.float64,
        "device": torch.device("cpu"),
        "checkpoint_every": Interval(steps=1),
    }
    return TrainingOptions(**given | changed)


# ---- losses


def trained_of(kind, folder, token_level=1.0, family=None, **drafter):
    """A training of a kind with random weights, and its target, of the pair or of a family."""
    options = options_for(folder, token_level=token_level)
    target, tokenizer = load_target(options)
    target = target_of(family) if family else target
    if kind == "draft":
        draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float64)
        return Distillation(options, target, tokenizer, draft, tokenizer, torch.float32)
    if kind == "heads":
        trained = HeadTraining(options, target, 3, 1)
        random_tensors(trained.module)
        return trained
    given = options, target, DrafterOptions(kind, **drafter)
    if kind == "mtp":
        trained = MtpTraining(*given)
    elif kind == "eagle3":
        trained = Eagle3Training(*given, torch.arange(3, 259, 2))
    else:
        trained = DFlashTraining(*given, tokenizer)
    random_tensors(trained.module)
    trained.module.requires_grad_(False)
    return trained


@torch.no_grad()
def test_the_drafts_loss_is_divergence_and_likelihood(folder):
    trained, expected = trained_of("draft", folder, 0.3), []
    p, q = (model(WINDOWS[:, :-1]).logits.softmax(-1) for model in (trained.target, trained.module))
    for row in range(WINDOWS.shape[0]):
        for place in range(12):
            divergence = (p[row, place] * (p[row, place] / q[row, place]).log()).sum()
            expected.append(0.3 * divergence - 0.7 * q[row, place, WINDOWS[row, place + 1]].log())
    torch.testing.assert_close(trained.loss(WINDOWS), torch.stack(expected).mean())


@torch.no_grad()
def test_the_heads_loss_compares_with_the_token_that_each_is_for(folder):
    trained = trained_of("heads", folder, 0.3)
    target, heads, expected = trained.target, trained.module, 0.0
    for k in range(3):
        losses = []
        for row in WINDOWS:
            for place in range(12 - 3):
                seen = target(row[None, : place + 1], output_hidden_states=True).hidden_states[-1][:, -1]
                q = heads(seen, target.lm_head)[0, k].softmax(-1)
                p = target(row[None, : place + k + 2]).logits[0, -1].softmax(-1)
                losses.append(0.3 * (p * (p / q).log()).sum() - 0.7 * q[row[place + k + 2]].log())
        expected += 0.8**k * torch.stack(losses).mean()
    torch.testing.assert_close(trained.loss(WINDOWS), expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["draft", "heads", "eagle3", "dflash", "dspark"])
def test_the_loss_is_the_mean_of_what_counts(folder, kind):
    settings = {"eagle3": {"depth": 3}, "dflash": {"block_size": 4}, "dspark": {"block_size": 4}}
    trained = trained_of(kind, folder, **settings.get(kind, {}))

    def loss(counted, windows=WINDOWS[:2]):
        torch.manual_seed(0)
        return trained.loss(windows, counted)

    every = torch.ones(2, 13, dtype=torch.bool)
    none, early, later = torch.zeros_like(every), torch.zeros_like(every), WINDOWS[:2].clone()
    early[:, 5:8] = True
    later[:, 9:] = (later[:, 9:] + 1) % 250
    torch.testing.assert_close(loss(every), loss(None))
    torch.testing.assert_close(loss(early, later), loss(early))
    assert loss(none) == 0 and loss(every, later) != loss(every) != loss(early)


def test_answers_of_chats_count_and_what_ends_them(folder, tmp_path):
    file, tokenizer = tmp_path / "two.jsonl", AutoTokenizer.from_pretrained(folder / "target")
    with file.open("w") as lines:
        for said in (("Hello.", "Good day.", "And 3 times 3?", "It is 9."), ("Hi", "Ho")):
            turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
            lines.write(json.dumps({"messages": turns}) + "\n")
    stream, _, _ = encode_chats("chats", [file], tokenizer, 24, RunClock(None), 0.0)
    end = tokenizer.eos_token
    whole = f"<user>Hello.{end}\n<assistant>Good day.{end}\n<user>And 3 times 3?{end}\n<assistant>It is 9.{end}\n"
    assert "".join(tokenizer.decode([token]) for token in stream.tokens) == (
        f"{whole}<user>Hi{end}\n<assistant>Ho{end}\n"
    )
    assert tokenizer.decode(stream.tokens[stream.counted]) == f"Good day.{end}It is 9.{end}Ho{end}"
    assert [tokenizer.decode(stream.tokens[at : at + 2]) for at in stream.answers] == ["Go", "It", "Ho"]
    assert tokenizer.decode(stream.tokens[stream.starts[-1] :])[:8] == "<user>Hi"


# ---- what is trained is what drafts


LEVELS = [("eagle3", {"layers": 2}), ("mtp", {}), ("mtp", {"family": "qwen3.5"}), ("mtp", {"family": "mellum"})]


def source_on(kind, trained, tokens, states):
    """A draft source that has read ``tokens`` [1, N], once for every place."""
    length = tokens.shape[1]
    text = FixedText(trained.target, tokens.expand(length, -1), torch.zeros(length, dtype=torch.int32))
    source = kind(trained.module)
    source.check(trained.target)
    source.attach(text)
    hidden = {n: s.expand(length, -1, -1) for n, s in zip(trained.hidden_layers, states, strict=True)}
    source.observe(Prefilled(hidden, 0))
    text.state.out_len.copy_((torch.arange(length) + 2).clamp(max=length))  # entries 0 … i
    return text, source


@pytest.mark.parametrize(("kind", "given"), LEVELS)
def test_levels_are_what_drafting_computes(folder, kind, given):
    trained = trained_of(kind, folder, depth=3, **given)
    window = WINDOWS[:1] % trained.target.config.vocab_size
    states, _ = trained.read(window)
    levels = trained.levels(window, states)
    places = levels[0].shape[1]
    text, source = source_on(Recursive, trained, window, states)
    vectors, logits = source.feed(text.state.out_len - 1, 13, keep=1)
    torch.testing.assert_close(levels[0][0], logits[:places, 0])
    zeros = torch.zeros(13, 1, dtype=torch.int32)
    for level in (1, 2):
        slots = zeros + level - 1
        tokens = window[0, torch.arange(1 + level, 14 + level).clamp(max=12), None].to(torch.int32)
        path = torch.full((13, 1, 1), 2**level - 1, dtype=torch.int32)
        graph = path, slots, torch.arange(level, dtype=torch.int32).expand(13, -1)
        vectors, logits = source.forward(tokens, vectors, source.cached, slots, *graph, keep=1)
        torch.testing.assert_close(levels[level][0], logits[:places, 0])


@pytest.mark.parametrize("kind", ["dflash", "jetspec", "dspark"])
def test_blocks_are_what_drafting_computes(folder, kind):
    settings = {"block_size": 3, "markov_rank": 5, "markov_head": "rnn"} if kind == "dspark" else {"block_size": 4}
    trained, window = trained_of(kind, folder, layers=2, **settings), WINDOWS[:1]
    states, _ = trained.read(window)
    roots = torch.arange(1, 9)
    logits, confidence = trained.outputs(window, states, roots[None])  # [1, 8, 3, V]
    text, source = source_on(DFlashDrafts, trained, window, states)
    source.feed(text.state.out_len - 1, 13, keep=0)
    hidden = source.forward_block()[0][:8, -3:]
    expected = trained.target.lm_head(hidden)
    if kind == "dspark":
        tokens = window[0, roots[:, None] + torch.arange(3)]
        expected, _ = trained.module.edges(expected, hidden, tokens)
        torch.testing.assert_close(confidence[0], trained.module.confidence(hidden, tokens)[..., 0])
    torch.testing.assert_close(logits[0], expected)
    assert (trained.guessed(window, 0, 8)[0] == expected.argmax(-1)).all()


# ---- the loop


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_checkpoint(tmp_path):
    model = torch.nn.Linear(8, 8)

    def losses(step):
        yield model.weight.square().sum() * (float("nan") if step == 10 else 1.0)

    optimizers = loop.build_optimizers(model, lr=0.01)
    with pytest.raises(RuntimeError, match=r"test: the loss is nan at step 10; the checkpoint of step 8 stays"):
        loop.train("test", model, losses, optimizers, tmp_path, tokens_per_step=4, steps=20, every=Interval(steps=4))
    assert load_checkpoint(tmp_path)["record"]["steps"] == 8


def test_minutes_bound_all_of_a_run(folder, tmp_path, monkeypatch):
    """By a clock on which a token whose embedding is looked up takes 0.03 seconds, and nothing else any."""
    now, out = [0.0], tmp_path / "out"

    def hook(module, given):
        if isinstance(module, torch.nn.Embedding):
            now[0] += 0.03 * given[0].numel()

    for name, module in list(sys.modules.items()):  # time's own is that of all threads, other tests' servers too
        if name.startswith("gsd_kernels_train") and getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        options = options_for(folder, steps=None, minutes=1.0, out=out, sequence_level=0.5, batch=2)
        report = distill(str(folder / "draft"), options)
    finally:
        handle.remove()
    assert 45 < report["seconds"] == now[0] <= 60, "nor is the time left unused"
    assert report["training"]["steps"] > 1 and (out / "training.json").exists()


# ---- Drafts that learn while serving: the same text, more of it accepted, undone bit for bit, whole on disk.


GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
INPUTS = prompts(1, 12, seed=2)


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture
def draft(target):
    return noised(target, 0.1)


@contextmanager
def patched(model, draft, **options):
    kind, source = ("draft_heads", "heads") if isinstance(draft, gsd.DraftHeads) else ("assistant_model", "model")
    handle = gsd.patch(model, **{kind: draft, "graph_config": "chain", "draft_sources": (source,), **options})
    try:
        yield handle
    finally:
        gsd.unpatch(model)


def bits(model) -> list[bytes]:
    return [p.detach().clone().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def steps_of(handle, model, calls: int) -> list[int]:
    expected, found = gsd.generate(model, **INPUTS, **GREEDY, graph_config="plain"), []
    for _ in range(calls):
        assert torch.equal(model.generate(**INPUTS, **GREEDY), expected)
        found.append(handle.stats.steps)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "heads"])
def test_more_is_accepted_on_a_topic_that_comes_again(kind, target, draft):
    if kind == "heads":
        draft = gsd.DraftHeads.for_model(target, 2)
    first, theirs, state = bits(draft), bits(target), torch.get_rng_state()
    with patched(target, draft) as handle:
        without = steps_of(handle, target, 2)
        with gsd.OnlineLearner(handle, draft, steps=4, lr=3e-3 if kind == "draft" else 3e-2) as learner:
            learned = steps_of(handle, target, 5)
            assert without == [learned[0]] * 2 and learned[-1] < 0.7 * without[0]
            assert learner.taken == 20 and bits(draft) != first
        assert bits(draft) == first and steps_of(handle, target, 1) == without[:1]
    assert torch.equal(torch.get_rng_state(), state)
    assert bits(target) == theirs and all(p.grad is None for p in (*target.parameters(), *draft.parameters()))


def test_what_was_saved_goes_on(target, draft, tmp_path):
    file, again = tmp_path / "learned", copy.deepcopy(draft)
    with patched(target, draft) as handle, gsd.OnlineLearner(handle, draft, batch=1) as learner:
        with pytest.raises(ValueError, match="no step was taken"):
            learner.save(file)
        steps_of(handle, target, 2)
        learner.save(file)
        saved = bits(draft)
        target.generate(**INPUTS, **GREEDY)
        later = bits(draft)
    with patched(target, again) as handle, gsd.OnlineLearner(handle, again, batch=1) as learner:
        learner.load(file)
        assert bits(again) == saved and learner.taken == 2
        target.generate(**INPUTS, **GREEDY)
        assert bits(again) == later != saved  # the optimizer goes on too


def test_what_cannot_learn_is_refused_by_name(target, draft):
    shared, whole = noised(target), noised(target)
    shared.model.embed_tokens.weight = target.model.embed_tokens.weight
    whole.register_parameter("scale", torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    with patched(target, draft) as handle:
        for given, kind, message in (
            (None, TypeError, "the history, a LayerSkip"),
            (shared, ValueError, "shares weights with the target"),
            (whole, ValueError, "quantised"),
            (noised(target).to("meta"), ValueError, "offloaded"),
        ):
            with pytest.raises(kind, match=message):
                gsd.OnlineLearner(handle, given)
        with pytest.raises(ValueError, match="batch: expected"):
            gsd.OnlineLearner(handle, draft, batch=True)
        with gsd.OnlineLearner(handle, draft) as learner, pytest.raises(ValueError, match="a learner already"):
            gsd.OnlineLearner(handle, noised(target))
        with pytest.raises(ValueError, match="closed"):
            learner.load("nowhere")
    with pytest.raises(ValueError, match="not patched any more"):
        gsd.OnlineLearner(handle, draft)
