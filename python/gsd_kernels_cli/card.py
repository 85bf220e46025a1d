"""The card of a model folder: the model's own, behind what the Hub's convention for ``custom_generate`` asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import ModelCard

from gsd_kernels_hf.exported.options import HUB
from gsd_kernels_hf.files import HUB_ID

OWN = "## The model's own card"
KEPT = ("Model compatibility", "Additional Arguments", "Output Type changes")
"""Sections of the card of ``custom_generate`` that hold for every folder."""


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
    general = sections((HUB / "README.md").read_text(encoding="utf-8"))
    text = own.text.partition(f"{OWN}\n")[2] if f"{OWN}\n" in own.text else own.text
    written = {
        "Description": DESCRIPTION.format(
            drafts=", ".join([*(WORDS[o] for o in WORDS if o in options), "the text itself"])
        ),
        "Base model": f"{name}, whose weights and tokenizer are those of this folder.\n",
        **{title: general[title] for title in KEPT},
    }
    body = "\n".join(f"## {title}\n\n{content}" for title, content in written.items())
    return f"---\n{own.data.to_yaml()}\n---\n\n# {Path(name).name}\n\n{body}\n{OWN}\n\n{text.strip()}\n"


DESCRIPTION = """\
Loaded with `trust_remote_code=True`, this model's `generate` is graph-structured speculative decoding by the package
gsd-kernels, which has to be installed. In float32 and float64 the text is token for token the model's own; in half
precision tokens whose scores nearly tie may round the other way. What drafts here: {drafts}.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
```

`gsd_kernels.unpatch(model)`, after the first call, gives it transformers' own `generate`; without `trust_remote_code`
it never has another.
"""


def sections(text: str) -> dict[str, str]:
    """The sections of a card by their titles."""
    parts = re.split(r"^## (.*)\n+", text, flags=re.MULTILINE)[1:]
    return {title: content.strip() + "\n" for title, content in zip(parts[::2], parts[1::2], strict=True)}
