"""GGUF files as models, their blocks as they lie in the file, mapped to memory, or unpacked; and as tokenizers."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from gsd_kernels.ops.packed import BY_NAME, PackedMatrix, unpack_rows

from ..files import path_of
from .fields import FREQUENCIES, PACKED, PERMUTED, check_foreign, empty_model, end_by, file_names
from .header import Header, require
from .modules import packed_layer
from .pack import forbid_saving, replace

logger = logging.getLogger("gsd_kernels")

NEEDED = ("gguf", "accelerate")
"""Packages that transformers reads such a file with."""
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Kinds of tensors that are plain numbers."""


def from_gguf(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A transformers model over a GGUF file, for a CPU: its matrices stay packed, where they lie in the file.

    Config and vocabulary are read by transformers; ``AutoTokenizer.from_pretrained(folder, gguf_file=name)`` gives the
    tokenizer with the file's chat template. A matrix is multiplied as the dense one that its format defines, rounded to
    ``dtype``, bit for bit: nothing is quantised anew, activations are not quantised.

    A file is read whole or refused: a tensor or a field of the head that the model would not use is an error that
    names it. Tokens that end a turn or a message end a text, as in llama.cpp.

    Args:
        path: of the file, of a split model's first one. It must stay there while the model is used.
        dtype: of activations, norms and what matrices stand for.

    Returns:
        The model, in evaluation mode. Its own ``forward`` and ``generate`` work; :func:`gsd_kernels.patch` makes it
        fast.
        It cannot be trained or saved. Of architectures other than LLaMA's, Mistral's, Qwen2's and Qwen3's, transformers
        unpacks all weights, which the log says.

    Raises:
        TypeError, ValueError: no GGUF file, a damaged one, or one that cannot be served.
        ImportError: transformers needs a package to unpack it.
    """
    path = path_of(path)
    if dtype not in FLOATS.values():
        raise TypeError(f"dtype: expected torch.float32, torch.bfloat16 or torch.float16, got {dtype!r}")
    header = Header.read(path)
    if header.architecture not in PACKED:
        logger.warning("%s: transformers unpacks all weights of the architecture %s", path, header.architecture)
        return _foreign(header, dtype)
    model = _filled(header, dtype)
    forbid_saving(model, f"the weights of this model stay packed in {path}; copy that file instead")
    return model


def load_model(file: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The file's model, in evaluation mode on the CPU: every weight dequantised in float32, then rounded to ``dtype``.

    Raises:
        ImportError: a package that reads the file is missing; the message has pip's line.
        ValueError: there is no such file, it is damaged, transformers cannot read this architecture from GGUF, or would
            leave some of the model or of the file out.
    """
    header = Header.read(file)
    return _filled(header, dtype, dense=True) if header.architecture in PACKED else _foreign(header, dtype)


def load_tokenizer(file: Path, **options: Any) -> PreTrainedTokenizerBase:
    """The file's tokenizer; ``options`` are those of ``AutoTokenizer.from_pretrained``.

    Raises:
        ImportError, ValueError: as of :func:`load_model`.
    """
    require(file, *NEEDED)
    Header.read(file)
    with quiet():
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **options)


@torch.no_grad()
def _filled(header: Header, dtype: torch.dtype, *, dense: bool = False) -> PreTrainedModel:
    """The model of a file whose architecture is in :data:`PACKED`; with ``dense`` nothing of it stays packed.

    Raises:
        ValueError: a tensor is packed as nothing that is served, with its name.
    """
    model = empty_model(header, dtype).requires_grad_(dense)
    decoder = model.model
    pairs = decoder.rotary_emb.inv_freq.numel()  # of a head's numbers, that are turned together
    # Private pages of the files: nothing is read before it is used, nothing is ever written.
    files = {of: torch.from_numpy(np.memmap(of, mode="c")) for of in {t.path for t in header.tensors.values()}}

    def weight(name: str, dtype: torch.dtype) -> nn.Parameter | PackedMatrix:
        shape, kind, *_ = header.tensors[name]
        vector, rows = len(shape) == 1, _rows(header, name, files, pairs)
        if kind in FLOATS:
            value = rows.view(FLOATS[kind]).view(shape).to(dtype, copy=dense or vector)
        elif vector or kind not in BY_NAME:
            served = "plain floats" if vector else f"one of {', '.join(BY_NAME)}; convert it with llama-quantize"
            raise header.refusal(name, kind, served)
        else:
            matrix = PackedMatrix(BY_NAME[kind], rows, shape[1])
            if not dense:
                return matrix
            value = unpack_rows(matrix, dtype=dtype)
        return nn.Parameter(value, requires_grad=False)

    weights = {own: weight(name, dtype) for own, name in file_names(model).items() if name in header.tensors}
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({k: v for k, v in weights.items() if isinstance(v, Tensor)}, strict=False, assign=True)
    matrices = {k.rpartition(".")[0]: v for k, v in weights.items() if isinstance(v, PackedMatrix)}
    if matrices:
        replace(model, {k: packed_layer(model.get_submodule(k), v, dtype) for k, v in matrices.items()})
    with torch.device("cpu"):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config)
    if FREQUENCIES in header.tensors:
        factors: Any = weight(FREQUENCIES, torch.float32)  # [head_dim / 2]
        if not (factors.isfinite() & (factors > 0)).all():
            raise header.refusal(FREQUENCIES, factors.tolist(), "factors above 0")
        decoder.rotary_emb.inv_freq /= factors
        if not torch.allclose(factors, torch.ones_like(factors), rtol=0, atol=1e-5):
            forbid_saving(
                model, f"no config says what divides the frequencies of {header.path}; copy that file instead"
            )
    return model.eval()


def _rows(header: Header, name: str, files: dict[Path, Tensor], pairs: int) -> Tensor:
    """Bytes [outputs, …] as they lie in the file; those of q and k in transformers' order.

    That is the first half of a head and then its second; the file has them in turns, as ``pairs`` of a head.
    """
    shape, _, path, offset, nbytes = header.tensors[name]
    if header.architecture not in PERMUTED or name.split(".")[-2] not in ("attn_q", "attn_k"):
        return files[path][offset : offset + nbytes].view(shape[0], -1)
    # Read, not mapped: pages looked at once would count as this process' memory for good.
    data = torch.from_numpy(np.fromfile(path, np.uint8, nbytes, offset=offset))
    return data.view(-1, pairs, 2, nbytes // shape[0]).transpose(1, 2).reshape(shape[0], -1)


def _foreign(header: Header, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a file of another architecture, every weight unpacked by transformers, if that reads all of it."""
    file, architecture = header.path, header.architecture
    require(file, *NEEDED)
    check_foreign(header)
    if (count := header.fields.get("split.count", 0)) > 1:
        raise ValueError(
            f"path: {file} is part 1 of {count} (split.count is {count}), and transformers reads one file; "
            "merge the parts by llama-gguf-split --merge"
        )
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # from 5.24 on weights may stay in their blocks
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True, **options
            )
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of a library that reads numbers as they come
        raise ValueError(f"path: {file}: transformers cannot read this {architecture} file: {error}") from error
    missing = [*report["missing_keys"], *report["mismatched_keys"]]
    if missing:
        raise ValueError(f"path: {file} has nothing for {_some(missing)} of the {architecture} model that it names")
    if unused := sorted({*report["unexpected_keys"], *_passed_over(model, header)}):
        raise ValueError(
            f"path: {file} has {_some(unused)}, which transformers' loader passes over: the model would be another"
        )
    end_by(model, header)
    # Dense as it is, it still says that it is quantised, and could not be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval()


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
    before, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # The bar of dequantising asks nobody whether it is wanted.
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()
