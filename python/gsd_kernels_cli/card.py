"""The card of a model folder: the model's own, behind what the Hub's convention for ``custom_generate`` asks for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import ModelCard

from gsd_kernels_hf.exported.options import HUB
from gsd_kernels_hf.files import HUB_ID

OWN = "## The model's own card"
FROM = "\n## Model compatibility"
"""From here on the card of ``custom_generate`` holds for every folder."""
TEMPLATE = Path(__file__).with_name("card.md")

WORDS = {
    "assistant_model": "a smaller model (`draft/`)",
    "drafter": "a drafter that was trained for it (`drafter/`, or heads in its own checkpoint)",
    "draft_heads": "heads that were trained for it (`heads/`)",
    "corpus": "a corpus of texts (`corpus/`)",
}


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
        "own": own.text.rpartition(f"{OWN}\n")[2].strip(),
    }
    return ModelCard.from_template(own.data, template_path=str(TEMPLATE), **said).content.strip() + "\n"
