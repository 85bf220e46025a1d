"""Decoding with the automatic policy: nothing is measured ahead, what was learned is kept."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import cpu_levels
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_hf import store
from gsd_kernels_hf.costs import machine
from gsd_kernels_hf.costs import pair as pairs
from gsd_kernels_hf.engine import decoder, engine
from gsd_kernels_hf.policy.automatic import own_pair
from gsd_kernels_hf.policy.learning import LearningPolicy

OPTIONS = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    forget()


def forget() -> None:
    """As in another process, after this one's end."""
    store._flush_all()
    pairs._pairs.clear()
    machine._known.clear()
    engine._unpatched.clear()


@pytest.fixture
def models():
    target = tiny(dtype=torch.float32)
    return target, noised(target)


@pytest.fixture
def opened(monkeypatch):
    """The policies that generations had."""
    found: list[LearningPolicy] = []
    honest = decoder.automatic_policy

    def remember(*args, **kwargs):
        found.append(honest(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(decoder, "automatic_policy", remember)
    return found


def generate(models, tokens: int = 24, batch: int = 1, length: int = 12, **options):
    target, draft = models
    inputs = prompts(batch, length, vocab=target.config.vocab_size)
    return gsd.generate(target, **inputs, assistant_model=draft, max_new_tokens=tokens, **{**OPTIONS, **options})


def test_settings_are_objects_that_a_user_can_pass(models, opened):
    """They reach the policy of either kind and never change the text."""
    plain = generate(models, tokens=40, graph_config="plain").sequences
    settings = gsd.Automatic(first_choice_steps=9, min_gain=2.5)
    assert torch.equal(generate(models, tokens=40, graph_config=settings).sequences, plain)
    assert opened[-1].settings == settings
    history = generate((models[0], None), tokens=40, graph_config=settings, draft_sources=("history",))
    assert torch.equal(history.sequences, plain) and opened[-1].settings == settings and opened[-1].least == 9
    generate(models, tokens=4)
    assert opened[-1].settings == gsd.Automatic() and opened[-1].experience is not opened[0].experience


def test_what_is_known_is_of_a_device_a_dtype_and_a_way_of_sampling(models, opened):
    """As what is on disk is, whatever forwards the rows: costs of a CPU say nothing of a GPU's."""
    generate(models, tokens=4, backend="reference")
    generate(models, tokens=4, backend="reference")
    assert opened[1].experience is opened[0].experience
    for model in models:
        model.double()
    generate(models, tokens=4, backend="reference")
    assert opened[2].experience.costs is not opened[0].experience.costs
    whole = {"logits_processor": [lambda ids, scores: scores], "batch": 2}  # asks for the batch together
    generate(models, tokens=4, backend="reference", batch=2)
    generate(models, tokens=4, backend="reference", **whole)
    assert opened[3].experience is opened[2].experience is not opened[4].experience


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (r"unknown setting 'min_gian'; did you mean 'min_gain'", {"min_gian": 1.0}),
        (r"Automatic: retry_steps: expected an int like 5, got 2\.5", {"retry_steps": 2.5}),
        (r"Automatic: payback_tokens: expected a finite number of at least 1", {"payback_tokens": 0}),
        (r"Automatic: min_gain: expected a finite number", {"min_gain": float("nan")}),
        (r"Automatic: min_gain: expected a number like 1\.02, got True", {"min_gain": True}),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(error, settings):
    with pytest.raises((TypeError, ValueError), match=error):
        gsd.Automatic(**settings)


def test_every_target_forward_is_decoding(models):
    """Of a first call, of a new batch size, of a much longer prompt: the prompt's forward and one a step."""
    forwards = []
    models[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    for _ in range(2):  # a model proves once, by forwards of its own, that it is served
        proofs = len(forwards)
        gsd.patch(models[0], assistant_model=models[1])
        gsd.unpatch(models[0])
    assert len(forwards) == proofs > 0
    for batch, length in ((1, 12), (3, 12), (1, 200)):
        forwards.clear()
        out = generate(models, batch=batch, length=length)
        assert len(forwards) == out.stats.steps + 1


def test_what_was_learned_is_on_disk_and_the_next_process_begins_with_it(models, opened, tmp_path):
    generate(models, tokens=60)
    store._flush_all()
    (file,) = tmp_path.glob("pair-*.json")
    sections = json.loads(file.read_text())["sections"]
    assert sum(sections["costs"]["timed"]) > 0 and any(name.startswith("learned ") for name in sections)
    assert not list(tmp_path.glob(".partial-*"))
    first = opened[-1].experience
    forget()
    generate(models, tokens=1)
    second = opened[-1].experience
    assert second is not first
    assert second.costs.steps >= first.costs.steps and second.last[0] >= 0


def test_without_a_draft_model_rows_are_chosen_and_the_next_process_knows_of_them(models, opened):
    options = {"draft_sources": ("history",), "max_new_tokens": 60, **OPTIONS}
    for _ in range(2):
        gsd.generate(models[0], **prompts(1, 12, vocab=models[0].config.vocab_size), **options)
    first, again = opened
    assert first.selector is not None and again.experience is first.experience and len(first.names) == 2
    learned = again.experience.as_dict()
    forget()
    gsd.generate(models[0], **prompts(1, 12, vocab=models[0].config.vocab_size), **{**options, "max_new_tokens": 1})
    assert opened[-1].experience is not first.experience and opened[-1].experience.costs.steps
    assert np.array_equal(opened[-1].experience.as_dict()["weights"], learned["weights"])
    generate(models)
    assert opened[-1].plan().rows is None


def test_sampling_and_other_weights_learn_apart_and_share_costs(models, opened):
    generate(models)
    generate(models, do_sample=True, seed=1)
    other = (models[0], noised(models[0], 0.5))
    generate(other)
    one, sampled, others = (policy.experience for policy in opened)
    assert one.acceptance is not sampled.acceptance and one.acceptance is not others.acceptance
    assert one.costs is sampled.costs is others.costs


DAMAGE = {
    "cut": lambda text: text[:-20],
    "another number": lambda text: text.replace('"timed": [', '"timed": [1'),
    "no section": lambda text: text.replace('"sections": {', '"sections": 3, "others": {'),
    "other arrays": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_what_was_written_is_one_line_and_changes_no_text(models, tmp_path, caplog, damage):
    expected = generate(models).sequences
    store._flush_all()
    (file,) = tmp_path.glob("pair-*.json")
    if DAMAGE[damage] is None:
        own_pair(*models, "auto").document.write({"costs": {"target": [[1.0]], "other": [], "timed": []}})
    else:
        file.write_text(DAMAGE[damage](file.read_text()))
    forget()
    with caplog.at_level(logging.WARNING, "gsd_kernels"):
        assert torch.equal(generate(models).sequences, expected)
    assert sum(str(file) in record.getMessage() for record in caplog.records) == 1
    forget()
    caplog.clear()
    assert torch.equal(generate(models).sequences, expected) and not caplog.records, "it was written anew"


def test_deterministic_algorithms_make_no_timing_decisions(models, monkeypatch):
    monkeypatch.setattr(decoder, "automatic_policy", lambda *a, **k: pytest.fail("by the clock"))
    torch.use_deterministic_algorithms(True)
    try:
        out = generate(models, tokens=8)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.stats.plain_steps == 0


@pytest.mark.skipif(unavailable_reason("cpu", torch.device("cpu")) is not None, reason="no compiled CPU ops")
def test_costs_of_the_operator_are_not_those_of_the_modules_or_of_other_instructions(
    models, opened, tmp_path, monkeypatch
):
    generate(models)
    with cpu_levels.forced("portable"):
        generate(models)
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
    generate(models)
    with cpu_levels.forced("portable"):  # the modules do not use them
        generate(models)
    monkeypatch.delenv("GSD_KERNELS_FUSED_ROWS")
    generate(models)
    best, portable, modules, still_modules, again = (policy.experience for policy in opened)
    assert again is best and still_modules is modules
    alone = cpu_levels.active() == "portable"
    assert len({id(found.costs) for found in (best, portable, modules)}) == 3 - alone
    store._flush_all()
    assert len(list(tmp_path.glob("pair-*.json"))) == 3 - alone
