"""A model as OpenVINO's own converter traces it, with keys and values as its state, as OpenVINO GenAI takes it.

The weights are stored in the model's dtype, to the bit.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import openvino as ov
import torch
from openvino import opset15 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from openvino.frontend.pytorch.patch_model import __make_16bit_traceable as keep_16_bits
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.models.llama import modeling_llama

FILE = "openvino_model.xml"


def write_ir(model: LlamaForCausalLM, folder: Path, weights: str) -> None:
    """Write ``folder``/openvino_model.xml and .bin, with the keys and values as the model's state.

    Inputs are ``input_ids``, ``attention_mask``, ``position_ids`` and ``beam_idx``, as OpenVINO GenAI gives them; the
    output is ``logits``. ``weights`` of ``int8`` or ``int4`` are what nncf makes of the matrices.
    """
    config = model.config
    model = copy.deepcopy(model)  # it is changed for the converter
    model.model.rotary_emb = _Rotary(model.model.rotary_emb)
    caches = [
        f"past_key_values.{layer}.{part}" for layer in range(config.num_hidden_layers) for part in ("key", "value")
    ]
    cache = torch.zeros(1, config.num_key_value_heads, 3, config.head_dim)
    new, seen = torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 5, dtype=torch.int64)
    example = (new, seen, new, torch.zeros(1, dtype=torch.int32), *(cache for _ in caches))
    # keep_16_bits leaves a function of its own as torch.bmm: a patched model would decode the slow way from then on.
    kept = patch.object(torch, "bmm", torch.bmm)
    with warnings.catch_warnings(), kept, patch.object(modeling_llama, "rotate_half", _turned):
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of what no shape of these decides
        if model.dtype != torch.float32:
            keep_16_bits(model)
        built = ov.convert_model(_Traced(model), example_input=example)
    names = [*caches, "logits", *(f"{name}.present" for name in caches)]
    for port, name in zip([*built.inputs[-len(caches) :], *built.outputs], names, strict=True):
        port.set_names({name})
    built.reshape({name: ov.PartialShape([-1, cache.shape[1], -1, cache.shape[3]]) for name in caches})
    apply_make_stateful_transformation(built, {name: f"{name}.present" for name in caches})
    batch = ops.gather(ops.shape_of(built.input("input_ids")), _ints(0), _ints(0))
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, _ints(cache.shape[1], 0, cache.shape[3])], 0))
    for operation in built.get_ops():
        if operation.get_type_name() == "ReadValue":
            operation.set_arguments([empty])
    built.validate_nodes_and_infer_types()
    folder.mkdir(parents=True, exist_ok=True)
    ov.save_model(_compressed(built, model, weights) if weights else built, folder / FILE, compress_to_fp16=False)


def _compressed(built: ov.Model, model: LlamaForCausalLM, weights: str) -> ov.Model:
    """Eight bits a row, or four a group, symmetric, as OpenVINO's own exporter does; embedding and head keep eight."""
    import nncf

    logging.getLogger("nncf").setLevel(logging.ERROR)
    options = {"mode": nncf.CompressWeightsMode.INT8_SYM}
    if weights == "int4":
        widths = (model.config.hidden_size, model.config.intermediate_size)
        group = next(size for size in (128, 64, 32, 16, 8, 4) if all(width % size == 0 for width in widths))
        options = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": group, "ratio": 1.0}
    with redirect_stdout(sys.stderr):  # its bar, which would stand among results
        return nncf.compress_weights(built, **options)


def write_tokenizer(folder: Path, checkpoint: Path) -> None:
    """Write ``checkpoint``'s tokenizer beside the model: OpenVINO GenAI compares target's and draft's."""
    import openvino_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    there, back = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(there, folder / "openvino_tokenizer.xml")
    ov.save_model(back, folder / "openvino_detokenizer.xml")


class _Rotary(nn.Module):
    """Cosine and sine by a product of matrices, as which OpenVINO knows them and keeps them in float32.

    transformers multiplies element by element: in bfloat16 positions would be rounded, from 256 on to even ones.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.scaling, self.inv_freq = rotary.attention_scaling, rotary.inv_freq

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = self.inv_freq.float()[None, :, None].expand(position_ids.shape[0], -1, 1)
        angles = (frequencies @ position_ids[:, None].float()).transpose(1, 2)  # [B, N, D / 2]
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def _turned(rows: Tensor) -> Tensor:
    """transformers' ``rotate_half``, with a product for ``-rows``: so OpenVINO makes one operator of the rotation."""
    half = rows.shape[-1] // 2
    return torch.cat([rows[..., half:] * -1.0, rows[..., :half]], -1)


class _Traced(nn.Module):
    """A forward of tensors alone; the cache is each layer's keys, then its values, [B, H, S, D]."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, beam_idx: Tensor, *cache: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits [B, N, V], and the cache with the new tokens."""
        before = [part.index_select(0, beam_idx) for part in cache]
        past = DynamicCache()
        for keys, values in zip(before[::2], before[1::2], strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            past.layers.append(layer)
        columns = torch.arange(attention_mask.shape[1])
        earlier = columns <= columns[-input_ids.shape[1] :, None]  # [N, S]
        visible = earlier & attention_mask[:, None, None].bool()  # [B, 1, N, S]
        logits = self.model(input_ids, visible, position_ids, past).logits
        return logits, *(part for layer in past.layers for part in (layer.keys, layer.values))


def _ints(*values: int) -> Any:
    return ops.constant(np.array(values, dtype=np.int64))
