"""GGUF files as models: the blocks stay as they lie in the file, mapped to memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from gsd_kernels.ops.packed import BY_NAME, PackedMatrix

from .modules import PackedEmbedding, PackedLinear

logger = logging.getLogger("gsd_kernels")
PERMUTED = ("llama", "mistral")
"""Architectures whose rows of q and k lie in the file as pairs of a head's halves."""
PACKED = (*PERMUTED, "qwen2", "qwen3")
"""Architectures whose matrices stay packed; transformers' loader unpacks the others."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQUENCIES = "rope_freqs.weight"
"""Factors that divide the frequencies of the rotary embedding, float32 [head_dim / 2]."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAGIC = b"GGUF"


def from_gguf(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A transformers model over a GGUF file, for a CPU: its matrices stay packed, where they lie in the file.

    Config and vocabulary are read by transformers; ``AutoTokenizer.from_pretrained(folder, gguf_file=name)`` gives the
    tokenizer with the file's chat template. A matrix is multiplied as the dense one that its format defines, rounded to
    ``dtype``, bit for bit: nothing is quantised anew, activations are not quantised.

    Args:
        path: of the file. It must stay there while the model is used.
        dtype: of activations, norms and what matrices stand for.

    Returns:
        The model, in evaluation mode. Its own ``forward`` and ``generate`` work; :func:`gsd_kernels.patch` makes it fast.
        It cannot be trained or saved. Of architectures other than LLaMA's, Mistral's, Qwen2's and Qwen3's, transformers
        unpacks all weights, which the log says.

    Raises:
        ImportError: the ``gguf`` package is missing.
        TypeError, ValueError: no GGUF file, a damaged one, or one that cannot be served.
    """
    path = Path(path)
    if dtype not in FLOATS.values():
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    reader = _reader(path)
    config = _config(path)
    architecture = _text(reader, "general.architecture")
    if architecture not in PACKED or not _known(reader, config):
        logger.warning("%s: transformers unpacks all weights of the architecture %r", path, architecture)
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _Filling(path, reader, model, dtype, permuted=architecture in PERMUTED).fill()
    model.save_pretrained = _refusal(path)
    return model.eval()


def _reader(path: Path) -> Any:
    """The file's names, numbers and places.

    Raises:
        ImportError, ValueError: see :func:`from_gguf`.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError("reading GGUF files needs the gguf package: pip install gguf") from error
    if not path.is_file():
        raise ValueError(f"path: {path} is no file; expected one in the GGUF format")
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"path: {path} is not in the GGUF format; it does not begin with GGUF")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # whatever a damaged file leads to
        raise ValueError(f"path: {path} is damaged or cut short ({type(error).__name__}: {error})") from error
    size = path.stat().st_size
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise ValueError(f"path: {path} is cut short: {tensor.name} ends behind its {size} bytes")
    return reader


def _config(path: Path) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise ValueError(f"path: transformers cannot read the config in {path} ({error})") from error
    return config


def _text(reader: Any, key: str) -> str:
    field = reader.fields.get(key)
    return "" if field is None else str(field.contents())


def _known(reader: Any, config: PretrainedConfig) -> bool:
    """Whether every tensor has a place in a model of plain decoder layers."""
    names = {tensor.name for tensor in reader.tensors} - {FREQUENCIES}
    return all(_place(name) is not None for name in names) and hasattr(config, "num_hidden_layers")


def _place(name: str) -> str | None:
    """Name of the module's tensor for that of the file."""
    parts = name.split(".")
    if parts[-1] not in ("weight", "bias"):
        return None
    if parts[0] == "blk" and len(parts) == 4 and parts[1].isdigit():
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}" if parts[2] in NAMES else None
    return f"{NAMES[parts[0]]}.{parts[1]}" if len(parts) == 2 and parts[0] in NAMES else None


def _refusal(path: Path) -> Callable[..., NoReturn]:
    def save_pretrained(*args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: the model is its file."""
        raise ValueError(f"save_pretrained: the weights of this model stay packed in {path}; copy that file instead")

    return save_pretrained


class _Filling:
    """Puts a file's tensors into a model without any."""

    def __init__(self, path: Path, reader: Any, model: PreTrainedModel, dtype: torch.dtype, *, permuted: bool) -> None:
        self.path, self.reader, self.model, self.dtype, self.permuted = path, reader, model, dtype, permuted
        # Private pages of the file: nothing is read before it is used, nothing is ever written.
        self.file = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        self.tensors = {_place(tensor.name) or tensor.name: tensor for tensor in reader.tensors}

    def fill(self) -> None:
        """Replace every module that holds weights, then what is computed from the config.

        Raises:
            ValueError: a tensor is missing or of another shape, with its name.
        """
        for name, module in list(self.model.named_modules()):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                self._replace(name, self._matrix_module(name, module))
            else:
                for own, parameter in list(module.named_parameters(recurse=False)):
                    value = self._vector(f"{name}.{own}", parameter.shape)
                    setattr(module, own, nn.Parameter(value, requires_grad=False))
        rotary = self.model.model.rotary_emb
        self._replace("model.rotary_emb", type(rotary)(config=self.model.config))
        if FREQUENCIES in self.tensors:
            rotary = self.model.model.rotary_emb
            rotary.inv_freq /= self._vector(FREQUENCIES, rotary.inv_freq.shape, torch.float32)
        left = [name for name, t in (*self.model.named_parameters(), *self.model.named_buffers()) if t.is_meta]
        if left:
            raise ValueError(f"path: {self.path} has nothing for {', '.join(left[:4])}")

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(parent), last, module)

    def _matrix_module(self, name: str, module: nn.Linear | nn.Embedding) -> nn.Module:
        embeds = isinstance(module, nn.Embedding)
        of = name if f"{name}.weight" in self.tensors or embeds else "model.embed_tokens"  # tied
        matrix = self._matrix(f"{of}.weight", module.weight.shape)
        bias = None if embeds or module.bias is None else self._vector(f"{name}.bias", module.bias.shape)
        if isinstance(matrix, PackedMatrix):
            if embeds:
                return PackedEmbedding(matrix, self.dtype, module.padding_idx)
            return PackedLinear(matrix, bias)
        module.weight = nn.Parameter(matrix, requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias, requires_grad=False)
        return module

    def _matrix(self, name: str, shape: torch.Size) -> PackedMatrix | Tensor:
        """[outputs, inputs] as it lies, or in the model's dtype where the file has plain floats."""
        tensor = self._found(name, shape)
        kind = tensor.tensor_type.name
        raw = self._bytes(tensor).view(shape[0], -1)
        if self.permuted and name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            raw = self._unpermuted(raw)
        if kind in FLOATS:
            return raw.view(FLOATS[kind]).to(self.dtype)
        return PackedMatrix(BY_NAME[kind.lower()], raw, shape[1])

    def _unpermuted(self, rows: Tensor) -> Tensor:
        """Rows of a head as transformers has them, its first half and then its second; the file has them in turns."""
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)

    def _vector(self, name: str, shape: torch.Size, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._found(name, shape)
        kind = tensor.tensor_type.name
        if kind not in FLOATS:
            raise ValueError(f"path: {name} of {self.path} is packed as {kind}; expected plain floats")
        value = self._bytes(tensor).view(FLOATS[kind]).to(dtype or self.dtype, copy=True)
        if self.permuted and name.endswith(("q_proj.bias", "k_proj.bias")):
            value = self._unpermuted(value[:, None])[:, 0]
        return value

    def _found(self, name: str, shape: torch.Size) -> Any:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ValueError(f"path: {self.path} has no tensor for {name}")
        found, kind = [int(n) for n in reversed(tensor.shape)], tensor.tensor_type.name
        if found != list(shape):
            raise ValueError(f"path: {name} of {self.path} is {found}, the config says {list(shape)}")
        if kind not in FLOATS and kind.lower() not in BY_NAME:
            raise ValueError(f"path: {name} of {self.path} is packed as {kind}, which is none of {', '.join(BY_NAME)}")
        return tensor

    def _bytes(self, tensor: Any) -> Tensor:
        return self.file[int(tensor.data_offset) : int(tensor.data_offset) + int(tensor.n_bytes)]
