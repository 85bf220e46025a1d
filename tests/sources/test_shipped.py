"""What comes with this package of a model: found in every form of the model, a user's own first, and left out."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from itertools import chain

import pytest
import torch
from gguf_files import tiny as packed_tiny
from gguf_files import write_gguf
from models import prompts
from transformers import LlamaForCausalLM

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_bench.generation.real.prompts import FILE
from gsd_kernels_hf import learning
from gsd_kernels_hf.costs.pair import fingerprint
from gsd_kernels_hf.packed.gguf import from_gguf
from gsd_kernels_hf.sources import shipped
from gsd_kernels_hf.sources.learned import read_learned
from gsd_kernels_hf.sources.shipped import FOLDER, SHIPPED, Shipped, print_of_vectors

UNSEEN = FILE.parents[2] / "prompts" / "unseen.json"  # prompts of the same kinds on which nothing was chosen
NAME = "tiny-instruct"
ASKED = prompts(1, 9, vocab=61)["input_ids"]
CALL = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None}
SHAPE = GraphConfig(depth=0, branch=3, max_rows=16, history_depth=6, history_width=4)
DRAFTS = {"draft_sources": ("history",), "graph_config": SHAPE, "reuse_history": False}
BYTES_A_TOKEN = 10  # 1 MB for 100,000 tokens
SHARED_WORDS = 8  # in a row: so many no prompt that is learned from has in common with one that is measured on
FORMS = {
    "float32": lambda model, folder: model,
    "bfloat16": lambda model, folder: LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
    "float16": lambda model, folder: LlamaForCausalLM.from_pretrained(folder, dtype=torch.float16),
    "q8_0": lambda model, folder: from_gguf(write_gguf(folder / "m.gguf", model, "llama", "q8_0"), dtype=torch.float32),
    "q4_0": lambda model, folder: from_gguf(
        write_gguf(folder / "m.gguf", model, "llama", "q4_0"), dtype=torch.bfloat16
    ),
}


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A model in float32 whose norms a checkpoint had in bfloat16, and a file of it in the package."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    model = packed_tiny("llama")
    for norm in vectors(model):
        norm.data = norm.data.bfloat16().float()
    model.save_pretrained(tmp_path)
    place, own = tmp_path / f"{NAME}.safetensors", print_of_vectors(model)
    gsd.learn(model, prompts=ASKED, new_tokens=32, file=place, progress=False)
    found = read_learned(place, fingerprint=fingerprint(model), vocab_size=96)
    replace(found, fingerprint=own).save(place)
    sizes = tuple(getattr(model.config, name) for name in shipped.SIZES)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(shipped, "SHIPPED", {NAME: Shipped(sizes, own)})
    return model


def vectors(model):
    return [parameter for parameter in model.parameters() if parameter.dim() == 1]


def found_in(caplog):
    return [message for message in caplog.messages if "drafting with what was learned" in message]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_model_drafts_with_it_unless_told_not_to(form, target, tmp_path, caplog):
    model = FORMS[form](target, tmp_path)
    plain = gsd.generate(model, ASKED, **CALL, graph_config="plain")
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        with gsd.patch(model, **DRAFTS) as handle:
            assert torch.equal(model.generate(ASKED, **CALL), plain)
            steps = handle.stats.steps
        (line,) = found_in(caplog)
        assert f"{NAME}.safetensors" in line and "which comes with this package" in line
        caplog.clear()
        with gsd.patch(model, **DRAFTS, learned=False) as handle:
            assert torch.equal(model.generate(ASKED, **CALL), plain) and not found_in(caplog)
            assert steps < handle.stats.steps or form in ("q4_0", "float16")  # whose texts are others


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_whole_and_small(name):
    """Where this fails because the mixture has other weights, run ``python -m gsd_kernels_train.recipes.learned``."""
    file, about = FOLDER / f"{name}.safetensors", SHIPPED[name]
    found = read_learned(file, fingerprint=about.fingerprint, vocab_size=about.sizes[-1])
    assert found.seen > 15_000 and file.stat().st_size <= BYTES_A_TOKEN * found.seen
    assert {file.stem for file in FOLDER.iterdir()} == SHIPPED.keys()


def words_in_a_row(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + SHARED_WORDS]) for at in range(len(words) - SHARED_WORDS + 1)}


def test_no_prompt_that_is_learned_from_is_measured_on():
    """Nor is one that nothing is chosen on like those on which settings were."""
    asked = {
        place: [
            said
            for prompt in chain(
                *(json.loads(place.read_text(encoding="utf-8"))[part] for part in ("tuning", "prompts"))
            )
            for said in prompt.get("turns") or [turn["content"] for turn in prompt["messages"]]
        ]
        for place in (FILE, UNSEEN)
    }
    parts = [learning.everyday_prompts(), *asked.values()]
    rows = [set().union(*map(words_in_a_row, texts)) for texts in parts]
    assert min(map(len, rows)) > 300
    assert not (rows[0] & rows[1] or rows[0] & rows[2] or rows[1] & rows[2])
