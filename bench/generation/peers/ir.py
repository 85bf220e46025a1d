"""A Llama as an OpenVINO model, built operator by operator from the torch model's own numbers.

The patterns are those that OpenVINO's plug-ins fuse (RMS norm, rotary embedding, gated MLP, attention over the state);
the weights are stored in the model's dtype, to the bit.
"""

from __future__ import annotations

import logging
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset15 as ops
from torch import Tensor
from transformers import LlamaForCausalLM

FILE = "openvino_model.xml"


def write_ir(model: LlamaForCausalLM, folder: Path, weights: str = "") -> None:
    """Write ``folder``/openvino_model.xml and .bin, with the keys and values as the model's state.

    Inputs are ``input_ids``, ``attention_mask``, ``position_ids`` and ``beam_idx``, as OpenVINO GenAI gives them; the
    output is ``logits``. ``weights`` of ``int8`` or ``int4`` are what nncf makes of the matrices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    built = _Builder(model).build()
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


def _ints(*values: int) -> Any:
    return ops.constant(np.array(values, dtype=np.int64))


def _scalar(value: float, rank: int) -> Any:
    return ops.constant(np.full((1,) * rank, value, dtype=np.float32))


class _Builder:
    """Operators of one model; shapes: B sequences, N new tokens, S positions, H heads of D, E wide."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model, self.config = model, model.config
        self.heads, self.kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        self.head_dim = model.config.head_dim
        self.sinks: list[Any] = []
        self.ids, self.mask, self.positions = (
            self._parameter(name, [-1, -1], ov.Type.i64) for name in ("input_ids", "attention_mask", "position_ids")
        )
        self.beam = self._parameter("beam_idx", [-1], ov.Type.i32)
        self.batch = ops.gather(ops.shape_of(self.ids), _ints(0), ops.constant(np.int64(0)))  # [1]

    @staticmethod
    def _parameter(name: str, shape: list[int], dtype: Any) -> Any:
        parameter = ops.parameter(shape, dtype, name=name)
        parameter.output(0).set_names({name})
        return parameter

    def build(self) -> ov.Model:
        inner = self.model.model
        embedding = self._weight(inner.embed_tokens.weight)
        hidden = ops.gather(embedding, ops.convert(self.ids, ov.Type.i32), ops.constant(np.int32(0)))  # [B, N, E]
        self.cos, self.sin = self._rotary()
        self.visible = self._causal_mask()
        for index, layer in enumerate(inner.layers):
            attended = self._attention(self._norm(hidden, layer.input_layernorm), layer.self_attn, index)
            hidden = ops.add(hidden, attended)
            hidden = ops.add(hidden, self._mlp(self._norm(hidden, layer.post_attention_layernorm), layer.mlp))
        tied = self.config.tie_word_embeddings
        head = embedding if tied else self._weight(self.model.lm_head.weight)
        logits = ops.matmul(self._norm(hidden, inner.norm), head, False, True)
        logits.output(0).set_names({"logits"})
        inputs = [self.ids, self.mask, self.positions, self.beam]
        return ov.Model([ops.result(logits)], self.sinks, inputs, "llama")

    @staticmethod
    def _weight(weight: Tensor) -> Any:
        """A float32 node of ``weight``, which is stored in its own dtype."""
        weight = weight.detach().contiguous()
        if weight.dtype == torch.float32:
            return ops.constant(weight.numpy())
        raw = weight.view(torch.uint16).numpy()
        stored = ov.op.Constant(ov.Tensor(raw, ov.Shape(list(raw.shape)), ov.Type.bf16), shared_memory=False)
        return ops.convert(stored, ov.Type.f32)

    def _linear(self, rows: Any, weight: Tensor) -> Any:
        return ops.matmul(rows, self._weight(weight), False, True)

    def _norm(self, rows: Any, module: Any) -> Any:
        square = ops.power(rows, _scalar(2.0, 3))
        mean = ops.add(ops.reduce_mean(square, _ints(-1), True), _scalar(module.variance_epsilon, 3))
        scaled = ops.multiply(rows, ops.divide(_scalar(1.0, 3), ops.sqrt(mean)))
        weight = module.weight.detach().float().reshape(1, 1, -1).contiguous()
        return ops.multiply(scaled, ops.constant(weight.numpy()))

    def _rotary(self) -> tuple[Any, Any]:
        """Cosine and sine of every new position, [B, 1, N, D]."""
        rotary = self.model.model.rotary_emb
        frequencies = rotary.inv_freq.detach().float().reshape(1, -1, 1)
        shape = ops.concat([self.batch, _ints(frequencies.shape[1]), _ints(1)], 0)
        wide = ops.broadcast(ops.constant(frequencies.contiguous().numpy()), shape)
        places = ops.convert(ops.unsqueeze(self.positions, _ints(1)), ov.Type.f32)  # [B, 1, N]
        angles = ops.transpose(ops.matmul(wide, places, False, False), _ints(0, 2, 1))
        angles = ops.concat([angles, angles], -1)
        scale = _scalar(rotary.attention_scaling, 3)
        cos, sin = (ops.unsqueeze(ops.multiply(f(angles), scale), _ints(1)) for f in (ops.cos, ops.sin))
        return cos, sin

    def _rotated(self, rows: Any) -> Any:
        """``rows`` [B, H, N, D] turned by their positions."""
        half = self.head_dim // 2
        first = ops.slice(rows, _ints(0), _ints(half), _ints(1), _ints(3))
        second = ops.slice(rows, _ints(half), _ints(2**62), _ints(1), _ints(3))
        turned = ops.concat([ops.multiply(second, _scalar(-1.0, 4)), first], -1)
        return ops.add(ops.multiply(rows, self.cos), ops.multiply(turned, self.sin))

    def _causal_mask(self) -> Any:
        """The term that is added to the scores, [B, 1, N, S]: nothing, or -inf for a later position or padding."""
        zero = ops.constant(np.int64(0))
        new = ops.gather(ops.shape_of(self.ids), ops.constant(np.int64(1)), zero)
        total = ops.gather(ops.shape_of(self.mask), ops.constant(np.int64(1)), zero)
        one = ops.constant(np.int64(1))
        columns = ops.unsqueeze(ops.range(zero, total, one, output_type="i64"), _ints(0))
        rows = ops.unsqueeze(ops.range(ops.subtract(total, new), total, one, output_type="i64"), _ints(1))
        earlier = ops.unsqueeze(ops.less_equal(columns, rows), _ints(0, 1))  # [1, 1, N, S]
        present = ops.unsqueeze(ops.not_equal(self.mask, zero), _ints(1, 2))  # [B, 1, 1, S]
        lowest = float(np.finfo(np.float32).min)
        return ops.select(
            ops.logical_and(earlier, present), ops.constant(np.float32(0)), ops.constant(np.float32(lowest))
        )

    def _split(self, rows: Any, heads: int) -> Any:
        """[B, N, H·D] as [B, H, N, D]."""
        return ops.transpose(ops.reshape(rows, _ints(0, 0, heads, self.head_dim), True), _ints(0, 2, 1, 3))

    def _remembered(self, rows: Any, name: str) -> Any:
        """Append ``rows`` to the state ``name``; all of it, repeated for every query head, [B, H, S, D]."""
        shape = ops.concat([self.batch, _ints(self.kv_heads), _ints(0), _ints(self.head_dim)], 0)
        empty = ops.broadcast(ops.constant(np.float32(0)), shape)
        partial = ov.PartialShape([-1, self.kv_heads, -1, self.head_dim])
        info = ov.op.util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = partial, ov.Type.f32, name
        variable = ov.op.util.Variable(info)
        before = ops.gather(ops.read_value(empty, variable), self.beam, ops.constant(np.int64(0)))
        after = ops.concat([before, rows], 2)
        self.sinks.append(ops.assign(after, variable))
        copies = self.heads // self.kv_heads
        if copies == 1:
            return after
        positions = ops.gather(ops.shape_of(after), _ints(2), ops.constant(np.int64(0)))  # [1]
        shape = ops.concat([self.batch, _ints(self.kv_heads, copies), positions, _ints(self.head_dim)], 0)
        wide = ops.broadcast(ops.unsqueeze(after, _ints(2)), shape, "BIDIRECTIONAL")
        return ops.reshape(wide, _ints(0, self.heads, -1, self.head_dim), True)

    def _attention(self, rows: Any, module: Any, index: int) -> Any:
        query = self._rotated(self._split(self._linear(rows, module.q_proj.weight), self.heads))
        key = self._rotated(self._split(self._linear(rows, module.k_proj.weight), self.kv_heads))
        value = self._split(self._linear(rows, module.v_proj.weight), self.kv_heads)
        keys = self._remembered(key, f"past_key_values.{index}.keypresent.{index}.key")
        values = self._remembered(value, f"past_key_values.{index}.valuepresent.{index}.value")
        mixed = ops.scaled_dot_product_attention(query, keys, values, self.visible)
        joined = ops.reshape(ops.transpose(mixed, _ints(0, 2, 1, 3)), _ints(0, 0, self.heads * self.head_dim), True)
        return self._linear(joined, module.o_proj.weight)

    def _mlp(self, rows: Any, module: Any) -> Any:
        gate = ops.swish(self._linear(rows, module.gate_proj.weight))
        return self._linear(ops.multiply(gate, self._linear(rows, module.up_proj.weight)), module.down_proj.weight)
