"""A GGUF file read by transformers: its tokenizer, and its model with every weight unpacked."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..extras import cure

__all__ = ["NEEDED", "load_model", "load_tokenizer", "quiet"]

NEEDED = ("gguf", "accelerate")
"""Packages that transformers reads such a file with."""


def load_model(file: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The file's model, in evaluation mode on the CPU: every weight dequantised in float32, then rounded to ``dtype``.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: a package of :data:`NEEDED` is missing; the message has pip's line.
        ValueError, NotImplementedError: transformers cannot read this architecture from GGUF.
    """
    _check(file)
    dense: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # from 5.24 on weights may stay in their blocks
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, **dense)
    # Dense as it is, it still says that it is quantised, and could not be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval()


def load_tokenizer(file: Path, **options: Any) -> PreTrainedTokenizerBase:
    """The file's tokenizer; ``options`` are those of ``AutoTokenizer.from_pretrained``.

    Raises:
        FileNotFoundError, ImportError: as of :func:`load_model`.
    """
    _check(file)
    with quiet():
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **options)


def _check(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"GGUF: no such file: {file}")
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"reading {file.name} needs the package {package}: {cure('gguf')}")


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' remarks and bars: they are about packed weights and stages that take no time."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with ExitStack() as stack:  # the bar of dequantising asks nobody whether it is wanted
            stack.enter_context(redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
