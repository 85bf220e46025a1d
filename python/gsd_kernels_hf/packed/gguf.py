"""GGUF files as models: the blocks stay as they lie in the file, mapped to memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels.ops.packed import BY_NAME, PackedMatrix

from ..files import path_of
from .dense import FLOATS, copied, divide_frequencies, load_model
from .fields import PACKED, PERMUTED, empty_model, file_names
from .header import Header
from .modules import PackedEmbedding, PackedLinear
from .pack import forbid_saving

logger = logging.getLogger("gsd_kernels")


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
    architecture = header.architecture
    if architecture not in PACKED:
        logger.warning("%s: transformers unpacks all weights of the architecture %s", path, architecture)
        return load_model(path, dtype)
    model = empty_model(header, dtype)
    _Filling(header, model, dtype).fill()
    forbid_saving(model, f"the weights of this model stay packed in {path}; copy that file instead")
    return model.eval()


class _Filling:
    """Puts a file's tensors, which were compared with those that its model has, into a model without any."""

    def __init__(self, header: Header, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.header, self.model, self.dtype = header, model, dtype
        self.files: dict[Path, Tensor] = {}
        names = file_names(model)
        if model.config.tie_word_embeddings:
            del names["lm_head.weight"]
        self.tensors = {name: header.tensors[place] for name, place in names.items()}

    def fill(self) -> None:
        """Replace every module that holds weights, then what is computed from the config.

        Raises:
            ValueError: a tensor is packed as nothing that is served, with its name.
        """
        for name, module in list(self.model.named_modules()):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                self.model.set_submodule(name, self._matrix_module(name, module))
            else:
                for own, _ in list(module.named_parameters(recurse=False)):
                    setattr(module, own, self._vector(f"{name}.{own}"))
        decoder = self.model.model
        with torch.device("cpu"):
            decoder.rotary_emb = type(decoder.rotary_emb)(config=self.model.config)
        divide_frequencies(self.model, self.header)

    def _matrix_module(self, name: str, module: nn.Linear | nn.Embedding) -> nn.Module:
        embeds = isinstance(module, nn.Embedding)
        of = name if f"{name}.weight" in self.tensors or embeds else "model.embed_tokens"  # tied
        matrix = self._matrix(f"{of}.weight")
        bias = None if embeds or module.bias is None else self._vector(f"{name}.bias")
        if isinstance(matrix, PackedMatrix):
            if embeds:
                return PackedEmbedding(matrix, self.dtype, module.padding_idx)
            return PackedLinear(matrix, self.dtype, bias)
        module.weight = nn.Parameter(matrix, requires_grad=False)
        if bias is not None:
            module.bias = bias
        return module

    def _matrix(self, name: str) -> PackedMatrix | Tensor:
        """[outputs, inputs] as it lies, or in the model's dtype where the file has plain floats."""
        tensor, rows = self.tensors[name], self._rows(name)
        if tensor.kind in FLOATS:
            return rows.view(FLOATS[tensor.kind]).to(self.dtype)
        if tensor.kind not in BY_NAME:
            raise ValueError(
                f"path: {name} of {self.header.path} is packed as {tensor.kind}, which is none of {', '.join(BY_NAME)};"
                " convert it with llama-quantize"
            )
        return PackedMatrix(BY_NAME[tensor.kind], rows, tensor.shape[1])

    def _vector(self, name: str) -> nn.Parameter:
        kind = self.tensors[name].kind
        if kind not in FLOATS:
            raise ValueError(f"path: {name} of {self.header.path} is packed as {kind}; expected plain floats")
        value = self._rows(name).view(FLOATS[kind]).flatten().to(self.dtype, copy=True)
        return nn.Parameter(value, requires_grad=False)

    def _rows(self, name: str) -> Tensor:
        """Bytes [outputs, …] as they lie in the file; those of q and k in transformers' order.

        That is the first half of a head and then its second; the file has them in turns.
        """
        tensor, config = self.tensors[name], self.model.config
        outputs, part = tensor.shape[0], name.rpartition(".")[0]
        if self.header.architecture in PERMUTED and part.endswith(("self_attn.q_proj", "self_attn.k_proj")):
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            rows = copied(tensor).view(-1, head_dim // 2, 2, tensor.nbytes // outputs)
            return rows.transpose(1, 2).reshape(outputs, -1)
        path = tensor.path
        if path not in self.files:
            # Private pages of the file: nothing is read before it is used, nothing is ever written.
            self.files[path] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        return self.files[path][tensor.offset : tensor.offset + tensor.nbytes].view(outputs, -1)
