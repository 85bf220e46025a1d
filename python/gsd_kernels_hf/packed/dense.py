"""A GGUF file read by transformers: its tokenizer, and its model with every weight unpacked."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .entries import TensorEntry
from .fields import FREQUENCIES, PACKED, check_foreign, empty_model, end_by
from .header import Header, require
from .pack import forbid_saving

NEEDED = ("gguf", "accelerate")
"""Packages that transformers reads such a file with."""
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Kinds of tensors that are plain numbers."""


def load_model(file: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The file's model, in evaluation mode on the CPU: every weight dequantised in float32, then rounded to ``dtype``.

    Raises:
        ImportError: a package of :data:`NEEDED` is missing; the message has pip's line.
        ValueError: there is no such file, it is damaged, transformers cannot read this architecture from GGUF, or would
            leave some of the model or of the file out.
    """
    require(file, *NEEDED)
    header = Header.read(file)
    dense: dict[str, Any] = {}
    if header.architecture in PACKED:
        dense["config"] = empty_model(header).config
    else:
        check_foreign(header)
    if len({tensor.path for tensor in header.tensors.values()} | {header.path}) > 1:
        count = header.fields["split.count"]
        raise ValueError(
            f"path: {file} is part 1 of {count} (split.count is {count}), and transformers reads one file; "
            "merge the parts by llama-gguf-split --merge"
        )
    if hasattr(transformers, "GgufConfig"):  # from 5.24 on weights may stay in their blocks
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = _loaded(header, dtype=dtype, output_loading_info=True, **dense)
    end_by(model, header)
    if header.architecture in PACKED and divide_frequencies(model, header):
        forbid_saving(model, f"no config says what divides the frequencies of {file}; copy that file instead")
    # Dense as it is, it still says that it is quantised, and could not be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval()


def copied(tensor: TensorEntry) -> Tensor:
    """A tensor's bytes. Read, not mapped: pages looked at once would count as this process' memory for good."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=torch.uint8)


@torch.no_grad()
def divide_frequencies(model: PreTrainedModel, header: Header) -> bool:
    """Divide the model's frequencies by the file's factors; whether that makes it another than its config says.

    Raises:
        ValueError: the factors are none.
    """
    stored = header.tensors.get(FREQUENCIES)
    if stored is None:
        return False
    if stored.kind not in FLOATS:
        raise header.refusal(FREQUENCIES, stored.kind, "plain floats")
    factors = copied(stored).view(FLOATS[stored.kind]).float()  # [head_dim / 2]
    if not (factors.isfinite() & (factors > 0)).all():
        raise header.refusal(FREQUENCIES, factors.tolist(), "factors above 0")
    model.get_decoder().rotary_emb.inv_freq /= factors
    return not torch.allclose(factors, torch.ones_like(factors), rtol=0, atol=1e-5)


def load_tokenizer(file: Path, **options: Any) -> PreTrainedTokenizerBase:
    """The file's tokenizer; ``options`` are those of ``AutoTokenizer.from_pretrained``.

    Raises:
        ImportError, ValueError: as of :func:`load_model`.
    """
    require(file, *NEEDED)
    Header.read(file)
    with quiet():
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **options)


def _loaded(header: Header, **options: Any) -> PreTrainedModel:
    """Load a file by transformers, if it is all of it."""
    file, architecture = header.path, header.architecture
    try:
        with quiet():
            model, report = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of a library that reads numbers as they come
        raise ValueError(f"path: {file}: transformers cannot read this {architecture} file: {error}") from error
    missing = [*report["missing_keys"], *report["mismatched_keys"]]
    if missing:
        raise ValueError(f"path: {file} has nothing for {_some(missing)} of the {architecture} model that it names")
    unused = sorted({*report["unexpected_keys"], *_passed_over(model, header)})
    if architecture in PACKED and FREQUENCIES in unused:  # read below
        unused.remove(FREQUENCIES)
    if unused:
        raise ValueError(
            f"path: {file} has {_some(unused)}, which transformers' loader passes over: the model would be another"
        )
    return model


def _passed_over(model: PreTrainedModel, header: Header) -> list[str]:
    """Tensors of the file that transformers' older loader, which reports none of them, has no place for."""
    from transformers import modeling_gguf_pytorch_utils as loader

    architecture = header.architecture
    if importlib.util.find_spec("transformers.integrations.gguf") is not None:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        if is_gguf_arch_supported(architecture):
            return []  # by the one that reports them
    kind = loader.TENSOR_PROCESSORS.get(architecture, loader.TensorProcessor)
    known = loader.get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    return [name for name in header.tensors if name not in known and name.removesuffix(".weight") not in known]


def _some(names: list[Any]) -> str:
    """Some of them, and how many there are."""
    return f"{', '.join(map(str, names[:3]))}{f' and {len(names) - 3} more' if names[3:] else ''}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' remarks and bars: they are about packed weights and stages that take no time."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The bar of dequantising asks nobody whether it is wanted.
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
