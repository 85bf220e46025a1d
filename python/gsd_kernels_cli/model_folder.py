"""Writes a model folder that decodes by itself: a checkpoint's files, what drafts for it, ``custom_generate/``.

Its card is the model's own, behind what the Hub's convention for ``custom_generate`` asks for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from gsd_kernels_hf.exported.folder import FILE, HUB, PLACES, write_options
from gsd_kernels_hf.files import HUB_ID, write_folder, write_text
from gsd_kernels_hf.progress import tracked
from gsd_kernels_hf.sources.checkpoints import INDEX, WEIGHTS, fetch

WANTED = "*.json *.safetensors *.jinja *.model *.txt *.tiktoken *.py README.md LICENSE* NOTICE*".split()
"""Files of a checkpoint that are taken along, by their names: weights as safetensors alone."""
LEFT_OUT = (FILE, "consolidated*.safetensors")
"""Of these, what is not: options of an earlier export, and weights in a layout that transformers does not read."""
LARGE = (".safetensors", ".npy")
"""Endings of the files that may be linked."""
MB = 1e6

OWN_CARD = "## The model's own card"
FROM = "\n## Model compatibility"
"""From here on the card of ``custom_generate`` holds for every folder."""
TEMPLATE = Path(__file__).with_name("card.md")

WORDS = {
    "assistant_model": "a smaller model (`draft/`)",
    "drafter": "a drafter that was trained for it (`drafter/`, or heads in its own checkpoint)",
    "draft_heads": "heads that were trained for it (`heads/`)",
    "corpus": "a corpus of texts (`corpus/`)",
}


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
    if (folder / "adapter_config.json").is_file():
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
    """
    sources = {"": model, **{PLACES[option]: source for option, source in parts.items()}}
    files = [(place, file) for place, source in sources.items() for file in taken(source)]
    total = sum(file.stat().st_size for _, file in files)
    with write_folder(folder) as new, tracked(f"writing {folder}", total / MB, "MB") as update:
        done = 0.0
        for place, file in files:
            (new / place).mkdir(exist_ok=True)
            put(file, new / place / file.name, link=link)
            done += file.stat().st_size / MB
            update(done)
        write_options(new, {**{option: PLACES[option] for option in parts}, **options})
        (code := new / "custom_generate").mkdir()
        for file in (HUB / code.name).glob("*.*"):  # of any modes, where the package is installed to be read alone
            shutil.copyfile(file, code / file.name)
        write_text(new / "README.md", card_of(model, name, [*parts, *options]))


def taken(source: Path) -> list[Path]:
    """The files of a checkpoint or an index that are taken along."""
    files = {file for pattern in (*WANTED, "*.npy") for file in source.glob(pattern) if file.is_file()}
    return sorted(file for file in files if not any(map(file.match, LEFT_OUT)))


def put(file: Path, to: Path, *, link: bool) -> None:
    """Copy a file; ``link``: a large one is linked where the file system can."""
    if link and file.suffix in LARGE:
        with suppress(OSError):  # another file system, or one without links
            os.link(file.resolve(), to)  # the hub's cache has links to its files
            return
    shutil.copyfile(file, to)


def card_of(model: Path, name: str, options: Iterable[str]) -> str:
    """The text of ``README.md``.

    Args:
        model: the folder of the model, whose own card may be in it.
        name: of the model: a hub id, or what the user called it.
        options: names of those that say what drafts for it.
    """
    file = model / "README.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    own = ModelCard(text if text.startswith("---") else f"---\n{{}}\n---\n{text}", ignore_metadata_errors=True)
    own.data.tags = sorted({*(own.data.tags or ()), "custom_generate"})
    own.data.base_model = own.data.base_model or (name if HUB_ID.fullmatch(name) else None)
    own.data.library_name = own.data.library_name or "transformers"
    general = (HUB / "README.md").read_text(encoding="utf-8").partition(FROM)
    said = {
        "title": Path(name).name,
        "drafts": ", ".join([*(WORDS[o] for o in WORDS if o in options), "the text itself"]),
        "model": name,
        "general": "".join(general[1:]),
        "own": own.text.rpartition(f"{OWN_CARD}\n")[2].strip(),
    }
    return ModelCard.from_template(own.data, template_path=str(TEMPLATE), **said).content.strip() + "\n"
