"""The demo pair's recipe from text to card: every stage, with models of a few thousand parameters and little text."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gsd_kernels_hf import DraftHeads, generate
from gsd_kernels_train import text
from gsd_kernels_train.recipes import stdlib as sources
from gsd_kernels_train.recipes import stdlib_prompts as prompts
from gsd_kernels_train.recipes.demo_pair import __main__ as recipe
from gsd_kernels_train.recipes.demo_pair import distillation, evaluation, models, stages

SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TARGET = SHAPE | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DRAFT = SHAPE | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
HELD_OUT = ("base64.py", "queue.py", "shlex.py", "textwrap.py")
TRAINING = ("bisect.py", "copy.py", "dataclasses.py", "statistics.py")
STEPS = (3, 4, 2)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A standard library of a few files (two stand for test suites) and the recipe's sizes made small."""
    library = Path(sysconfig.get_path("stdlib"))
    root = tmp_path / "library"
    (root / "test").mkdir(parents=True)
    for name in HELD_OUT + TRAINING:
        shutil.copyfile(library / name, root / name)
    for name in ("argparse.py", "inspect.py"):
        shutil.copyfile(library / name, root / "test" / name)
    (root / "LICENSE.txt").write_text("the licence", encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(sources, "HELD_OUT", HELD_OUT)
    # Shapes and windows are read by several files: changed in place.
    for shape, values in ((models.TARGET_CONFIG, TARGET), (models.DRAFT_CONFIG, DRAFT)):
        for key, value in values.items():
            monkeypatch.setitem(shape, key, value)
    for length, counts in {512: (12, 6, 2), 1024: (8, 4, 1)}.items():
        monkeypatch.setitem(distillation.LABEL_WINDOWS, length, counts)
    for module, name, value in (
        (distillation, "GENERATED_BATCH", 16),
        (distillation, "GENERATED_LENGTH", 96),
        (evaluation, "CONTINUATION_LENGTH", 8),
        (stages, "HEAD_BATCH", 2),
        (stages, "HEAD_LENGTH", 32),
        (stages, "HEAD_SEQUENCES", 4),
        (text, "PICKED_TEXTS", 2),
        (text, "PICKED_TOKENS", 8),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.slow
def test_every_stage_runs_and_the_pair_decodes(small, tmp_path):
    out = tmp_path / "out"
    command = ["--out", str(out), "--steps", *map(str, STEPS), "--batches", "2", "--no-compile"]
    recipe.main(command)
    folder, work = out / "demo_pair", out / "work"
    shipped = sorted(path.name for path in folder.iterdir())
    assert shipped == ["PYTHON-LICENSE.txt", "README.md", "draft", "heads", "prompts.json", "sources.json", "target"]

    records = json.loads((work / "records.json").read_text())
    assert (records["target"]["steps"], records["draft"]["steps"]) == STEPS[:2]
    listed = json.loads((folder / "sources.json").read_text(encoding="utf-8"))
    assert sorted(listed["held_out"]) == sorted(HELD_OUT)
    assert sorted(listed["training"]) == sorted([*TRAINING, "test/argparse.py", "test/inspect.py"])
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert listed["python"] in card and "--steps 3 4 2" in card
    shown = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    assert shown["prompts"] and shown["excerpt"]["file"] == prompts.EXCERPT[0]

    # Nothing is trained again.
    weights = (work / "target" / "model.safetensors", work / "draft" / "model.safetensors", work / "heads")
    before = [path.stat().st_mtime_ns for path in weights]
    recipe.main(command)
    assert [path.stat().st_mtime_ns for path in weights] == before
    assert (folder / "README.md").read_text(encoding="utf-8") == card

    target, draft = (models.load_member(folder / name) for name in ("target", "draft"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    ids = tokenizer(shown["prompts"][0]["text"], return_tensors="pt")["input_ids"]
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    for drafts in ({"assistant_model": draft}, {"draft_heads": DraftHeads.from_pretrained(folder / "heads", target)}):
        assert generate(target, ids, max_new_tokens=12, do_sample=False, **drafts).equal(plain)
