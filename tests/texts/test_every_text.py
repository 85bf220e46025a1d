"""The promise: the text is the target's own, whatever drafts, whatever the shape, the batch, the call and the door."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
import torch
from goldens import LEVEL, PARTS, changed
from models import FAMILIES, endless, noised, prompts, tiny
from texts.covering import (
    AXES,
    BESIDE,
    CPU,
    DEFAULTS,
    GPU,
    PIECES,
    ROWS_OF_A_SUBJECT,
    SUBJECTS,
    asked,
    opened,
    placed,
    plain_text,
    rows,
)
from torch.utils._python_dispatch import TorchDispatchMode

import gsd_kernels as gsd
from gsd_kernels import cpu_levels

EVERY = SUBJECTS | BESIDE
RANDOM = 200
TOKENS = 14
"""Of a text: beyond the border where there is one."""


def held(name, cases, folder, least=1):
    """Hold texts of rows at places to what they have to be: of ``least``, and of as many as could have failed.

    Then at least one draft is right, one wrong, and texts vary.
    """
    subject = EVERY[name]
    made = subject.made(folder)
    accepted, rejected, tokens, could_fail = 0, 0, set(), False
    for number, (row, place) in enumerate(cases):
        if number >= least and could_fail:
            return
        options = asked(made.inputs, row) | {"max_new_tokens": TOKENS}
        if place == DEFAULTS and row[2] == "bad words":
            place = CPU  # transformers' own processor does not work there
        pieces = {"prefill_chunk_size": 5} if place == PIECES else {}
        with placed(place if place == GPU else CPU):
            expected = plain_text(subject, made.right or made.target, options)
        with placed(place), opened(made, row) as call:
            out = call(**options, **pieces, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected), (row, place)
        tokens |= set(expected[:, options["input_ids"].shape[1] :].flatten().tolist())
        accepted += sum(out.stats.accepted[2:])
        rejected += out.stats.target_rows > out.stats.new_tokens
        could_fail = accepted > 0 and rejected > 0 and len(tokens) >= 10
    assert could_fail or len(cases) < ROWS_OF_A_SUBJECT


def cases_of(name):
    """The rows of a subject, the last one first, and where it has each."""
    turn, places = list(EVERY).index(name), EVERY[name].places
    return [(row, places[(turn + n) % len(places)]) for n, row in enumerate(reversed(rows()[name]))]


@pytest.mark.parametrize("name", EVERY)
def test_the_text_is_the_targets_own(name, tmp_path):
    held(name, cases_of(name), tmp_path)


@pytest.mark.many
@pytest.mark.parametrize("name", EVERY)
def test_the_other_rows_of_a_subject(name, tmp_path):
    held(name, cases_of(name)[1:], tmp_path, ROWS_OF_A_SUBJECT)


@pytest.mark.many
@pytest.mark.parametrize("seed", range(RANDOM))
def test_a_random_row_of_the_product(seed, tmp_path):
    draws = random.Random(seed)
    name, row = draws.choice(list(EVERY)), draws.choice(list(itertools.product(*AXES)))
    held(name, [(row, draws.choice(EVERY[name].places))], tmp_path)


class Alarm:
    """Goes off at the ``n``-th ring: as a hook, a processor, a criterion or an observer."""

    def __init__(self, n, error):
        self.left, self.error, self.rang = n, error, False

    def __deepcopy__(self, memo):
        return self  # one count for all rows

    def __call__(self, *given, **_):
        self.left -= 1
        if self.left == 0:
            self.rang = True
            raise self.error("stop")

    def processor(self, input_ids, scores):
        self()
        return scores

    def criterion(self, input_ids, scores, **_):
        self()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Ops(TorchDispatchMode):
    """Rings at every operator."""

    def __init__(self, alarm):
        super().__init__()
        self.alarm = alarm

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.alarm()
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def interrupted(error):
    """By the error itself, or by the refusal of a model whose proof it interrupted."""
    try:
        yield
    except (error, ValueError) as found:
        assert isinstance(found, error) or isinstance(found.__cause__, error), found


@contextlib.contextmanager
def ringing(draws, alarm, models):
    """The alarm somewhere in a call; what the call is given more."""
    place = draws.choice(["hook", "op", "op", "logits_processor", "stopping_criteria", "observer"])
    given = {"logits_processor": [alarm.processor], "stopping_criteria": [alarm.criterion], "observer": alarm}
    if place == "hook":
        alarm.left = draws.randint(1, 12)
        module = draws.choice(list(draws.choice(models).modules()))
        handle = draws.choice([module.register_forward_hook, module.register_forward_pre_hook])(alarm)
        try:
            yield {}
        finally:
            handle.remove()
    elif place == "op":
        alarm.left = draws.randint(1, 1500)
        with Ops(alarm):
            yield {}
    else:
        yield {place: given[place]}


def state_of(models):
    """What a call must leave as it was: attributes, hooks, attention, training mode, weights."""
    found = [(sorted(vars(model)), model.training, getattr(model, "config", None)) for model in models]
    modules = [(name, module) for model in models for name, module in model.named_modules()]
    found += [(name, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for name, m in modules]
    return repr(found), [value.clone() for model in models for value in model.state_dict().values()]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.many if seed >= 10 else ()) for seed in range(120)]
)
def test_the_call_after_an_interruption_is_right(seed, tmp_path):
    draws = random.Random(seed)
    families = [name for name, subject in SUBJECTS.items() if subject.own and name.partition(", ")[0] in FAMILIES]
    name, row = draws.choice(families), draws.choice(list(itertools.product(*AXES)))
    made, error = (
        SUBJECTS[name].made(tmp_path),
        draws.choice((KeyboardInterrupt, RuntimeError, SystemExit, MemoryError)),
    )
    options, alarm = asked(made.inputs, row), Alarm(draws.randint(1, 4), error)
    expected = plain_text(SUBJECTS[name], made.target, options)
    models = [made.target, made.drafts["assistant_model"]]
    with opened(made, row) as call:
        before, weights = state_of(models)
        with interrupted(error), ringing(draws, alarm, models) as more:
            out = call(**options, **more)
            handle = getattr(call, "handle", None)
            assert not alarm.rang or error.__name__ in str(handle and handle.stats.why), "the error was swallowed"
            assert torch.equal(out, expected)
        after, same = state_of(models)
        assert after == before and all(map(torch.equal, weights, same))
        assert torch.equal(call(**options), expected)


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "mistral-window"])
def test_in_half_precision_a_text_leaves_transformers_where_two_tokens_are_as_good(family):
    """Plain decoding, to which other drafts are held there, and transformers' own round in another order."""
    target, call = tiny(family, dtype=torch.bfloat16), {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
    inputs = prompts(3, 12)
    mine = gsd.generate(target, **inputs, **call, graph_config="plain")
    own = target.generate(**inputs, **call)
    for row in range(3):
        differs = (mine[row] != own[row]).nonzero()
        if len(differs):
            at = int(differs[0])
            mask = {
                "attention_mask": torch.nn.functional.pad(inputs["attention_mask"][row, None], (0, at - 12), value=1)
            }
            logits = target(own[row, None, :at], **mask).logits[0, -1].float()
            gap = (logits[own[row, at]] - logits[mine[row, at]]).abs()
            assert gap <= 2**-5 * logits.abs().max(), (row, at)


@pytest.mark.parametrize("context", [pytest.param(n, marks=pytest.mark.many if n % 2 else ()) for n in range(4)])
def test_merge_edges_are_accepted_with_every_context(context):
    """Of a small vocabulary, in which sequences recur."""
    target = endless("qwen3", vocab_size=32)
    shape = gsd.GraphConfig(depth=8, width=12, branch=3, max_rows=128, merge_context=context)
    call = {**prompts(4, 20, seed=3, vocab=32), "max_new_tokens": 32, "do_sample": False}
    drafts = {"assistant_model": noised(target, 0.01), "graph_config": shape, "return_dict_in_generate": True}
    out = gsd.generate(target, **call, **drafts)
    assert torch.equal(out.sequences, target.generate(**call))
    assert out.stats.merges > out.stats.accepted_merges > 0


def test_a_prompt_of_8192_tokens():
    target = tiny(dtype=torch.float32, max_position_embeddings=16384)
    options = {**prompts(1, 8192), "do_sample": False, "max_new_tokens": 12}
    assert torch.equal(gsd.generate(target, **options, graph_config="graph"), target.generate(**options))


def test_a_text_that_time_ends_is_the_beginning_of_the_whole():
    target = tiny(dtype=torch.float32)
    options = {**prompts(1, 9), "do_sample": False, "eos_token_id": None, "max_new_tokens": 200}
    whole = target.generate(**options)
    text = gsd.generate(target, **options, max_time=0.05)
    assert text.shape[1] > 9 and torch.equal(text, whole[:, : text.shape[1]])


def test_the_array_covers_all_pairs():
    every = [row for *_, row in rows().values()]
    for one in range(len(AXES)):
        for other in range(one):
            met = {(row[other], row[one]) for row in every}
            assert len(met) == len(AXES[one]) * len(AXES[other])


@pytest.mark.parametrize("part", PARTS)
def test_goldens_replay(part):
    """Texts, bits of ops, refusals' words and fields are those of before."""
    with cpu_levels.forced(LEVEL):
        assert not changed(part)
