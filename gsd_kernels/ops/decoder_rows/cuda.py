"""The CUDA C++ decoder: at most nine launches a layer, which a CUDA graph can hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...compiled import architectures, force_rows
from ...environment import forced
from ..cuda_common import ALIGNMENT, MIN_CAPABILITY, check_device, check_dtype, check_rows, check_type, expects
from ..packed import PackedMatrix
from ..table import OPS
from .weights import DecoderWeights

PACKED = ("q8_0", "int8", "uint8", "int4", "int4_offset")
"""Kinds of packed matrices that are decoded on the way into a product's tile; they never ran on a GPU."""
EARLY_CAPABILITY = (9, 0)
"""From which on the launches of up to 32 rows begin while the one before ends (csrc/algorithms/rows.h)."""
MEASURED = ((9, 0),)
"""Compute capabilities on which it was found right, and faster than modules up to 64 rows (bench/results/gpu)."""
WEIGHTS = 8  # that are decoded at a time
OVERLAP = "GSD_KERNELS_ROWS_OVERLAP"
"""Environment variable: ``0`` keeps launches from beginning while the one before ends (docs/how-it-works.md)."""
AHEAD = "GSD_KERNELS_ROWS_AHEAD"
"""Environment variable: megabytes of the next product's weights that one asks for, where launches begin early."""
GROUP = "GSD_KERNELS_ROWS_GROUP"
"""Environment variable: whether groups of warps multiply more than 32 rows, where there is code for it and a proof."""
GROUP_CAPABILITY, GROUP_CODE = (9, 0), "9.0a"
"""GPUs that have groups of warps, and what the library has to be compiled for."""
SWITCHES = {OVERLAP: "1", AHEAD: "24", GROUP: "0"}
"""What the kernels read of the environment, and what they take where a variable is unset."""
IN_TURN = "mma, in turn"
WAYS: dict[str, dict[str, str]] = {"wgmma": {GROUP: "1"}, "mma": {GROUP: "0"}, IN_TURN: {GROUP: "0", OVERLAP: "0"}}
"""How rows may be multiplied and launched, by name, and the variables by which calls do so; all give the same bits.

The last one is for systems that refuse, in a graph, launches that begin early.
"""


def decoder_rows(weights: DecoderWeights, token_ids: Tensor, *rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """csrc/cuda/decoder_rows.cpp; arguments as the reference takes them."""
    *_, k_caches, v_caches, _, _, _ = rows
    check_device(token_ids.device)
    check_once(weights, check)
    with naming_caches(weights, k_caches, v_caches):
        return run("decoder_rows", weights, token_ids, *rows)


def run(name: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator of decoder_rows or feature_rows."""
    tell_switches()
    return OPS[name].compiled(*arguments)


def is_measured(device: torch.device) -> bool:
    """Return whether it was run on such a GPU; of other devices nothing is said."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in MEASURED


def ways(device: torch.device) -> list[str]:
    """The :data:`WAYS` that a GPU has, and the library code for, but for one that the environment rules out."""
    grouped = device.type != "cuda" or _has_groups(torch.cuda.get_device_capability(device))
    return [way for way in WAYS if way != "wgmma" or (grouped and os.environ.get(GROUP) != "0")]


def settings(way: str | None, device: torch.device) -> dict[str, str]:
    """Name what a call by one of :data:`WAYS`, or any, does otherwise than the environment says, by variable.

    Weights that are asked for ahead take a quarter of the GPU's second-level cache at most, unless the environment says
    how many: more would push out what the launch before is still reading.
    """
    asked = {**WAYS.get(way or "", {})}
    if device.type == "cuda" and AHEAD not in os.environ:
        quarter = torch.cuda.get_device_properties(device).L2_cache_size >> 22  # MB
        asked[AHEAD] = str(min(quarter, int(SWITCHES[AHEAD])))
    return {name: value for name, value in asked.items() if os.environ.get(name, SWITCHES[name]) != value}


def tell_switches() -> None:
    """Tell the library what of :data:`SWITCHES` this thread has forced."""
    force_rows(*(int(forced().get(name, -1)) for name in SWITCHES))


def _has_groups(capability: tuple[int, int]) -> bool:
    compiled = (architecture.removesuffix("+PTX") for architecture in architectures())
    return capability == GROUP_CAPABILITY and GROUP_CODE in compiled


def products(capability: tuple[int, int]) -> str | None:
    """The kernels that multiply on GPUs of a compute capability, in words; ``None``: there are none."""
    if capability < MIN_CAPABILITY:
        return None
    few = "mma.sync: tiles of 16 or 32 rows" + (", launched early" if capability >= EARLY_CAPABILITY else "")
    has = _has_groups(capability)
    more = ", or wgmma of 64, 128 or 256 where that proves itself faster" if has else ""
    if capability == GROUP_CAPABILITY and not has:
        more = f"; without wgmma: compiled for {', '.join(architectures()) or 'what is not known'}, not {GROUP_CODE}"
    return f"{few}; of 64 for more rows{more}"


def check(weights: DecoderWeights) -> None:
    """Raise for weights that the kernels do not take.

    Raises:
        TypeError, ValueError: a dtype, a head size, a row's length or an address, with the tensor's name.
    """
    check_type("embedding", weights.dtype, 2 * weights.inv_freq.shape[0])
    check_tensors(weights.dtype, _named(weights))


def check_once(weights: Any, check: Callable[[Any], None]) -> None:
    """Check weights when they are first seen: hundreds of tensors, which stay as they are."""
    if "checked_for_cuda" not in vars(weights):
        check(weights)
        vars(weights)["checked_for_cuda"] = True


def check_tensors(dtype: torch.dtype, named: Iterable[tuple[str, Tensor | PackedMatrix | None]]) -> None:
    """Raise for tensors, by name, where there are any, that kernels for weights of ``dtype`` do not take.

    Raises:
        TypeError, ValueError: see :func:`check`.
    """
    for name, tensor in named:
        if isinstance(tensor, PackedMatrix):
            _check_packed(name, tensor)
        if not isinstance(tensor, Tensor):
            continue
        check_dtype(name, tensor, dtype)
        chunk = ALIGNMENT // tensor.element_size()
        if tensor.dim() == 2 and tensor.shape[1] % chunk:
            raise ValueError(expects(name, f"rows of a multiple of {chunk}, got {tensor.shape[1]}"))
        _check_place(name, tensor)


def _check_packed(name: str, matrix: PackedMatrix) -> None:
    """Eight weights are decoded at a time, of one group."""
    kind, scales = matrix.kind, matrix.scales
    if kind.name not in PACKED:
        raise TypeError(expects(name, f"dense matrices or packed ones of {', '.join(PACKED)}, got {kind.name}"))
    group = matrix.inputs if scales is None else matrix.inputs // scales.shape[1]
    if group % WEIGHTS:
        raise ValueError(expects(name, f"groups of a multiple of {WEIGHTS} weights, got {group}"))
    for tensor in (matrix.data, scales):
        if tensor is not None:
            _check_place(name, tensor)


def _check_place(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous() or _address(tensor) % ALIGNMENT:
        expected = f"a contiguous tensor at a multiple of {ALIGNMENT} bytes"
        raise ValueError(f"{name}: backend 'cuda' expects {expected}; pass its .clone()")


@contextmanager
def naming_caches(weights: DecoderWeights, k_caches: list[Tensor], v_caches: list[Tensor]) -> Iterator[None]:
    """Where the operator refuses a call, name the cache that it was for, and the cure: C++ looks at every one as well,
    in a hundredth of the time, and before anything is launched.

    Raises:
        TypeError, ValueError: see :func:`check_caches`.
    """
    try:
        yield
    except RuntimeError:
        check_caches(weights, k_caches, v_caches)
        raise


def check_caches(weights: DecoderWeights, k_caches: list[Tensor], v_caches: list[Tensor]) -> None:
    """Raise for caches that the kernels do not take.

    Raises:
        TypeError, ValueError: a dtype, an address or a stride, with the tensor's name.
    """
    for name, caches in (("k_caches", k_caches), ("v_caches", v_caches)):
        for layer, cache in enumerate(caches):
            check_rows(f"{name}[{layer}]", cache, weights.dtype)


def _named(weights: DecoderWeights) -> Iterator[tuple[str, Tensor | PackedMatrix | None]]:
    yield "embedding", weights.embedding
    for number, layer in enumerate(weights.layers):
        for name, tensor in layer.named.items():
            yield f"layers[{number}].{name}", tensor
    yield "final_norm", weights.final_norm
    yield "head", weights.head


def _address(tensor: Tensor) -> int:
    """Where a tensor begins, as far as alignment goes: a fake one has no address, and allocations are aligned."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return tensor.data_ptr()
    return tensor.storage_offset() * tensor.element_size()
