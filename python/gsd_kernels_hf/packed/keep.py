"""Packed layers in the place of a library's, with the weights that they have now."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .adapters import compressed_tensors, stored_in
from .modules import Packed, linear_over
from .pack import check_model, replace


@torch.no_grad()
def keep_packed(model: PreTrainedModel) -> PreTrainedModel:
    """Put packed layers in the place of those that a library quantised, as their weights lie now; nothing is rounded.

    For libraries that would rewrite them at the first forward: compressed-tensors makes all of them dense, bitsandbytes
    rounds their scales to bfloat16 on CPUs with AVX512_BF16. :func:`~gsd_kernels_hf.api.patch` and ``generate`` read
    all others in place; they need no call of this.

    Args:
        model: on a CPU, with layers of torchao, bitsandbytes, compressed-tensors (pack-quantized,
            int-quantized) or gptqmodel, before its first forward. Those layers are replaced; what else it has stays.

    Returns:
        ``model``, in evaluation mode: that of the dense matrices that the library would dequantise its weights to, in
        the model's dtype. Where those round activations to eight bits, so do these. It cannot be trained or saved.

    Raises:
        TypeError, ValueError: no quantised layers, or some that are not read; the model is left as it was.
    """
    check_model(model)
    layers: dict[str, Packed] = {}
    for name, module in model.named_modules():
        stored = stored_in(module)
        if stored is None:
            continue
        if stored.problem is not None:
            raise ValueError(f"model: {name} {stored.problem}, so it cannot be kept packed")
        if not stored.is_for(model.dtype) or any(tensor.device.type != "cpu" for tensor in stored.tensors):
            place = stored.tensors[0].device
            raise ValueError(f"model: {name} stands for {stored.dtype} on {place}; expected {model.dtype} on a CPU")
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(f"model: {name} has a hook, which a packed layer would lose; remove it first")
        layers[name] = linear_over(module, stored.read(), model.dtype)
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} has no layers that a library quantised; this comes before its first "
            "forward, and gsd_kernels.pack packs a dense model"
        )
    replace(model, layers)
    compressed_tensors.release(model)
    return model
