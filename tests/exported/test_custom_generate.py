"""``model.generate(…, custom_generate=FOLDER, trust_remote_code=True)``, by transformers itself."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from models import noised, prompts, tiny
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria, RepetitionPenaltyLogitsProcessor

import gsd_kernels as gsd
from gsd_kernels_hf.exported.call import custom_generate

FOLDER = gsd.custom_generate_folder()
DOOR = {"custom_generate": FOLDER, "trust_remote_code": True}
CALL = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def target():
    return tiny()


OPTIONS = {
    "greedy": {},
    "tree of a draft": {"assistant_model": ..., "graph_config": "tree"},
    "of one's own": {
        "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(17)]),
        "bad_words_ids": [[5], [7, 9]],
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_writes_the_models_own_text(options, target):
    inputs, variables = prompts(2, 9), set(vars(target))
    drafts = {name: noised(target) if value is ... else value for name, value in options.items()}
    theirs = {name: value for name, value in options.items() if value is not ... and name != "graph_config"}
    expected = target.generate(**inputs, **CALL, **theirs)
    out = target.generate(**inputs, **CALL, **drafts, **DOOR, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert out.stats.steps > 0 and set(vars(target)) == variables


def test_a_patched_model_takes_it_too(target):
    inputs = prompts(1, 9)
    expected = target.generate(**inputs, **CALL)
    with gsd.patch(target, assistant_model=noised(target)):
        assert torch.equal(target.generate(**inputs, **CALL, **DOOR), expected)
        assert torch.equal(type(target).generate(target, **inputs, **CALL, **DOOR), expected)


def test_modes_that_are_not_served_are_refused_by_name(target):
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(**prompts(1, 9), **CALL, **DOOR, num_beams=2)


@pytest.mark.skipif(
    "has_local_code=False" not in inspect.getsource(GenerationMixin.load_custom_generate),
    reason="this transformers runs the code of any local folder",
)
def test_it_runs_for_those_alone_who_trust_it(target):
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(**prompts(1, 9), **CALL, custom_generate=FOLDER, trust_remote_code=False)


def test_without_the_package_the_error_names_the_cure(target, tmp_path, monkeypatch):
    """From a copy, of which transformers has no module yet."""
    folder = tmp_path / "copied"
    (folder / "custom_generate").mkdir(parents=True)
    for file in (Path(FOLDER) / "custom_generate").iterdir():
        if file.is_file():
            (folder / "custom_generate" / file.name).write_bytes(file.read_bytes())
    call = {**prompts(1, 9), **CALL, "custom_generate": str(folder), "trust_remote_code": True}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gsd_kernels", None)
        with pytest.raises(ImportError, match=r"not installed here, or too old.*pip install"):
            target.generate(**call)
        old = type(sys)("gsd_kernels")
        patch.setitem(sys.modules, "gsd_kernels", old)
        with pytest.raises(ImportError, match="or too old"):
            target.generate(**call)
    assert torch.equal(target.generate(**call), target.generate(**prompts(1, 9), **CALL))


def test_every_option_of_the_card_is_one(target):
    listed = re.findall(r"^- `(\w+)`", Path(FOLDER, "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) >= 6 and set(listed) <= set(gsd.GraphDecoder.__dataclass_fields__)
    with pytest.raises(TypeError, match=r"came twice|too many"):
        custom_generate(prompts(1, 9)["input_ids"], None, model=target, generation_config=None)
