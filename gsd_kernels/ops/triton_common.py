"""Parts that the Triton rooms share. Importing this imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NO_GPU_ARCH = 80
"""Whose launch configurations the interpreter uses."""


def interpreting() -> bool:
    """Return whether kernels run in triton's interpreter, on CPU tensors."""
    return triton.knobs.runtime.interpret


def current_arch(device: torch.device) -> int:
    """Compute capability as one number, e.g. 90."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if device.type == "meta":  # compiling for a target that is not here: see kernel_report
        return triton.runtime.driver.active.get_current_target().arch
    return NO_GPU_ARCH


@triton.jit
def plain(log_prob):
    """The value that a log-probability counts as: NaN → −inf, above 0 → +0, −0 → +0."""
    # The sum comes first: compilers make a minimum of a choice below 0, and a GPU's minimum of −0 and +0 is −0.
    return tl.where(log_prob > float("-inf"), tl.where(log_prob <= 0.0, log_prob + 0.0, 0.0), float("-inf"))


@triton.jit
def ordered(x):
    """float32 → int32 in the same order; −0 and +0 share a key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
