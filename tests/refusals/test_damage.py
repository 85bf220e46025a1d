"""Files that are damaged: whatever reads one says in a sentence which it is, or reads it; nothing else comes out.

A file is a row; what may befall it is done to all alike.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import corpus_of, random_text
from gguf_files import tiny as tiny_file
from gguf_files import write_gguf
from models import prompts, tiny
from sources.drafters import dflash_config, eagle3_config, random_dflash, random_eagle3, safeailab, save

import gsd_kernels as gsd
from gsd_kernels_hf import learning
from gsd_kernels_hf.sources.corpus import open_corpus
from gsd_kernels_hf.sources.load import load_drafter
from gsd_kernels_hf.sources.memory import HistoryMemory, read_learned

EDGES = (0, 1, 2, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)
SEEDS = 60
MOST_WORDS = 1500  # characters
FOUR_BITS = struct.pack("<Q", 56) + b'{"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'.ljust(56) + b"0"


class File(NamedTuple):
    """``made`` writes the file's folder, whose ``name`` is damaged; ``read`` reads the folder."""

    name: str
    made: Callable[[Path], Any]
    read: Callable[[Path], Any]


def target() -> Any:
    return tiny(num_hidden_layers=3, dtype=torch.float32)


def eagle3(folder: Path) -> None:
    config = eagle3_config(target())
    save(folder, config, safeailab(random_eagle3(config).float()))


def dflash(folder: Path) -> None:
    config = dflash_config(target())
    save(folder, config, random_dflash(config).float().state_dict())


def history(folder: Path) -> None:
    model = target()
    with gsd.patch(model, draft_sources=("history",)) as handle:
        model.generate(**prompts(1, 9), max_new_tokens=20, do_sample=False)
        handle.history.save(folder / "history.safetensors")


def learned(folder: Path) -> None:
    asked = [prompts(1, 9)["input_ids"][0]]
    gsd.learn(target(), prompts=asked, new_tokens=8, progress=False, file=folder / "learned.safetensors")


def drafter(folder: Path) -> Any:
    return load_drafter(folder, target())


def heads(folder: Path) -> Any:
    return gsd.DraftHeads.from_pretrained(folder, target())


def head_folder(folder: Path) -> None:
    gsd.DraftHeads.for_model(target(), 2).save_pretrained(folder)


def index(folder: Path) -> None:
    corpus_of(folder / "index", random_text(3000))


def indexed(folder: Path) -> Any:
    return open_corpus(folder / "index")


FILES = {
    "a GGUF file": File(
        "m.gguf",
        lambda folder: write_gguf(folder / "m.gguf", tiny_file("llama"), "llama", ["q4_0", "q8_0"]),
        lambda folder: gsd.from_gguf(folder / "m.gguf"),
    ),
    "EAGLE-3's config": File("config.json", eagle3, drafter),
    "EAGLE-3's tensors": File("model.safetensors", eagle3, drafter),
    "DFlash's config": File("config.json", dflash, drafter),
    "DFlash's tensors": File("model.safetensors", dflash, drafter),
    "heads' config": File("draft_heads.json", head_folder, heads),
    "heads' tensors": File("draft_heads.safetensors", head_folder, heads),
    "an index's header": File("corpus.json", index, indexed),
    "an index's array": File("order.npy", index, indexed),
    "a history": File("history.safetensors", history, lambda f: HistoryMemory(97).load(f / "history.safetensors")),
    "what was learned": File(
        "learned.safetensors",
        learned,
        lambda f: read_learned(f / "learned.safetensors", fingerprint=learning.fingerprint(target()), vocab_size=97),
    ),
}
WHOLE: dict[str, Callable[[Path, bytes], Any]] = {
    "empty": lambda file, raw: file.write_bytes(b""),
    "noise": lambda file, raw: file.write_bytes(bytes(range(256)) * 40),
    "cut": lambda file, raw: file.write_bytes(raw[: len(raw) // 2]),
    "a list": lambda file, raw: file.write_text("[]"),
    "lists in lists": lambda file, raw: file.write_text("[" * 100_000),
    "a program": lambda file, raw: file.write_text("print('mine')\n"),
    "another's tensors": lambda file, raw: file.write_bytes(FOUR_BITS),
    "a folder": lambda file, raw: file.mkdir(),
    "gone": lambda file, raw: None,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of :data:`FILES`, each written once."""
    made: dict[str, Path] = {}

    def folder(name: str, copy: Path) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole")
            FILES[name].made(made[name])
            FILES[name].read(made[name])
        shutil.copytree(made[name], copy)
        (file,) = copy.rglob(FILES[name].name)
        return file

    return folder


def refusal(name: str, folder: Path) -> str | None:
    """What the file is refused with; ``None`` where it is read."""
    try:
        FILES[name].read(folder)
    except (ValueError, OSError) as error:
        assert str(folder) in str(error) or folder.name in str(error), error
        assert len(str(error)) < MOST_WORDS
        return str(error)
    return None


@pytest.mark.parametrize("how", WHOLE)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none_is_refused_by_name(name, how, folders, tmp_path):
    file = folders(name, tmp_path / "f")
    raw = file.read_bytes()
    file.unlink()
    WHOLE[how](file, raw)
    assert refusal(name, tmp_path / "f") is not None


def damaged(raw: bytes, draws: random.Random) -> bytes:
    """The file with something else in it, near its head mostly."""
    data = bytearray(raw)
    end = min(len(data), 4096)
    for _ in range(draws.choice((1, 1, 2, 4))):
        at, kind = draws.randrange(min(end, len(data))), draws.randrange(6)
        if kind == 0:
            data[at] ^= 1 << draws.randrange(8)
        elif kind == 1:
            data[at : at + 4] = struct.pack("<I", draws.choice(EDGES) & 0xFFFFFFFF)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", draws.choice(EDGES))
        elif kind == 3:
            del data[at : at + draws.randrange(1, 40)]
        elif kind == 4:
            data[at:at] = draws.randbytes(draws.randrange(1, 40))
        else:
            other, length = draws.randrange(len(data)), draws.randrange(1, 64)
            data[at : at + length] = data[other : other + length]
    return bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_whatever_a_file_holds_is_read_or_refused_in_a_sentence(name, folders, tmp_path):
    file = folders(name, tmp_path / "f")
    raw, refused = file.read_bytes(), 0
    for seed in range(SEEDS):
        os.unlink(file)
        file.write_bytes(damaged(raw, random.Random(seed)))
        refused += refusal(name, tmp_path / "f") is not None
    assert refused > SEEDS // 3
