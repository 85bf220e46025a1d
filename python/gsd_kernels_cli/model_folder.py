"""Writes a model folder that decodes by itself: a checkpoint's files, what drafts for it, and ``custom_generate/``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gsd_kernels_hf.exported.options import FILE, HUB, PLACES, write_options
from gsd_kernels_hf.files import check_writable, path_of, write_folder, write_text
from gsd_kernels_hf.progress import tracked
from gsd_kernels_hf.sources.checkpoints import INDEX, WEIGHTS, fetch
from gsd_kernels_hf.sources.load import OWN

from .card import card_of

WANTED = "*.json *.safetensors *.jinja *.model *.txt *.tiktoken *.py README.md LICENSE* NOTICE*".split()
"""Files of a checkpoint that are taken along, by their names: weights as safetensors alone."""
LEFT_OUT = (FILE, "consolidated*.safetensors")
"""Of these, what is not: options of an earlier export, and weights in a layout that transformers does not read."""
LARGE = (".safetensors", ".npy")
"""Endings of the files that may be linked."""
ADAPTER = "adapter_config.json"
MB = 1e6


def checkpoint_folder(where: str | os.PathLike[str], what: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint whose files can be taken along; from the hub they are fetched.

    Args:
        where: folder or hub id.
        what: the option that names it, the first word of every error.
        revision: of the hub.

    Raises:
        ValueError: it is an adapter, or has no safetensors.
    """
    folder = fetch(where, what, wanted=WANTED, revision=revision)
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{what}: {where} is an adapter, which names its base model alone; merge them first: "
            "model.merge_and_unload().save_pretrained(FOLDER)"
        )
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        raise ValueError(
            f"{what}: no {WEIGHTS} and no {INDEX} in {where}; save it anew, as by "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(FOLDER), its tokenizer too"
        )
    return folder


def folders_of(named: Mapping[str, str | None], draft_revision: str | None) -> dict[str, Path]:
    """The folders of what drafts, fetched where they are hub ids; a drafter that is the target's own heads has none.

    Args:
        named: places by their options, those of :data:`PLACES`; ``None`` for none.
        draft_revision: of the draft model on the hub.

    Raises:
        ValueError: there is no such folder, or one whose files cannot be taken along.
    """
    folders = {}
    for option, where in named.items():
        if where is None or where == OWN:
            continue
        if option == "assistant_model":
            folders[option] = checkpoint_folder(where, option, draft_revision)
        else:
            folders[option] = path_of(where) if option == "corpus" else fetch(where, option)
    return folders


def check_new(folder: Path) -> None:
    """Raise for a folder that exists, or that cannot be made.

    Raises:
        ValueError: it exists.
        OSError: nothing may be written beside it.
    """
    if folder.exists():
        raise ValueError(f"DIR: {folder} exists; name a new folder, or delete it first")
    check_writable("DIR", folder)


def write_model_folder(
    folder: Path,
    model: Path,
    name: str,
    parts: Mapping[str, Path],
    options: Mapping[str, Any],
    *,
    link: bool,
) -> None:
    """Write a folder whole, or not at all.

    Args:
        folder: must not exist.
        model: the folder of the model's checkpoint.
        name: of the model, as the card calls it.
        parts: folders of what drafts for it, by their options, those of :data:`PLACES`.
        options: further ones: ``graph_config``, and ``drafter="mtp"``.
        link: whether large files are hard links to those that they come from, where the file system can.

    Raises:
        ValueError: it exists.
    """
    check_new(folder)
    sources = {"": model, **{PLACES[option]: source for option, source in parts.items()}}
    files = [(place, file) for place, source in sources.items() for file in taken(source)]
    total = sum(file.stat().st_size for _, file in files)
    with write_folder(folder) as partial, tracked(f"writing {folder}", total / MB, "MB") as update:
        done = 0.0
        for place, file in files:
            (partial / place).mkdir(exist_ok=True)
            put(file, partial / place / file.name, link=link)
            done += file.stat().st_size / MB
            update(done)
        write_options(partial, {**{option: PLACES[option] for option in parts}, **options})
        (partial / "custom_generate").mkdir()
        for file in ("generate.py", "requirements.txt"):
            shutil.copyfile(HUB / "custom_generate" / file, partial / "custom_generate" / file)
        write_text(partial / "README.md", card_of(model, name, [*parts, *options]))


def taken(source: Path) -> list[Path]:
    """The files of a checkpoint or an index that are taken along."""
    named = {file for pattern in (*WANTED, *(f"*{ending}" for ending in LARGE)) for file in source.glob(pattern)}
    left_out = {file for pattern in LEFT_OUT for file in source.glob(pattern)}
    return sorted(file for file in named - left_out if file.is_file())


def put(file: Path, to: Path, *, link: bool) -> None:
    """Copy a file; ``link``: a large one is linked where the file system can."""
    if link and file.suffix in LARGE:
        with suppress(OSError):  # another file system, or one without links
            os.link(file.resolve(), to)  # the hub's cache has links to its files
            return
    shutil.copyfile(file, to)
