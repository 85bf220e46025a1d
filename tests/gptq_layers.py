"""gptqmodel's layers by its table of layouts, for tests: the package itself has to be compiled.

Names, buffers and arithmetic are those of gptqmodel 7.7 (nn_modules/qlinear: torch.py, torch_awq.py and
torch_aten_kernel*.py), without what other devices need. Loaded under the package's name, see quantised.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class GPTQ(nn.Module):
    """Codes along the inputs of a dense [out, in], rounded to the nearest between the ends of a group."""

    def __init__(self, dense: Tensor, bias: Tensor | None, bits: int = 4, group_size: int = 32) -> None:
        super().__init__()
        self.out_features, self.in_features = dense.shape
        self.bits, self.group_size, self.maxq, self.adapter = bits, group_size, (1 << bits) - 1, None
        groups = dense.float().unflatten(1, (-1, group_size))  # [out, groups, group_size]
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / self.maxq).to(dense.dtype)
        zeros = (-low / scales.float()).round().clamp(0, self.maxq)
        codes = (groups / scales[..., None].float() + zeros[..., None]).round().clamp(0, self.maxq).flatten(1)
        self.register_buffer("scales", scales.T.contiguous())  # [groups, out]
        self.register_buffer("bias", bias)
        self.register_buffer("g_idx", torch.arange(self.in_features, dtype=torch.int32) // group_size)
        qweight, qzeros = self.pack(codes.T.int(), zeros.T.int())
        self.register_buffer("qweight", qweight)
        self.register_buffer("qzeros", qzeros)

    def words(self, codes: Tensor) -> Tensor:
        """Codes [n, m] in words along m, the first in the lowest bits: int32 [n, m · bits / 32]."""
        shifts = torch.arange(0, 32, self.bits)
        return (codes.long().unflatten(1, (-1, 32 // self.bits)) << shifts).sum(-1).to(torch.int32)

    def codes(self, words: Tensor) -> Tensor:
        return ((words[..., None].long() >> torch.arange(0, 32, self.bits)) & self.maxq).flatten(1)

    def pack(self, codes: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(codes.T).T.contiguous(), self.words(zeros)

    def unpack(self) -> tuple[Tensor, Tensor]:
        return self.codes(self.qweight.T).T, self.codes(self.qzeros)

    def qzero_format(self) -> int:
        return 2

    def dequantize_weight(self) -> Tensor:
        weight, zeros = self.unpack()
        return self.scales[self.g_idx.long()] * (weight - zeros[self.g_idx.long()]).to(torch.int16)  # [in, out]

    def forward(self, x: Tensor) -> Tensor:
        out = torch.matmul(x, self.dequantize_weight().to(x.dtype))
        return out if self.bias is None else out.add_(self.bias)


class AWQ(GPTQ):
    """Codes along the outputs, in AWQ's order."""

    def pack(self, codes: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(self.words(c.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)) for c in (codes, zeros))

    def unpack(self) -> tuple[Tensor, Tensor]:
        back = [AWQ_ORDER.index(i) for i in range(8)]
        return tuple(self.codes(w).unflatten(1, (-1, 8))[..., back].flatten(1) for w in (self.qweight, self.qzeros))


class Aten:
    """Puts the codes into the order of PyTorch's own product at the first forward."""

    _cpu_transformed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self._cpu_transformed:
            weight, zeros = self.unpack()
            self.scales = self.scales.to(x.dtype).contiguous()
            self.qweight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.T.int().contiguous(), 1)
            self.qzeros = (8 - zeros.to(x.dtype)) * self.scales
            self.scales_and_zeros = torch.stack([self.scales, self.qzeros], 2).contiguous()
            self._cpu_transformed = True
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        out = product(rows, self.qweight, self.group_size, self.scales_and_zeros)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out.add_(self.bias)


class TorchLinear(GPTQ):
    pass


class AwqTorchLinear(AWQ):
    pass


class TorchAtenLinear(Aten, GPTQ):
    pass


class TorchAtenAwqLinear(Aten, AWQ):
    pass


class TorchInt8Linear(GPTQ):
    """Not read: it rounds anew."""
