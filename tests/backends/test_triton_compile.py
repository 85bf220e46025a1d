"""Every Triton kernel in its shipped configurations, compiled for GPUs that need not be here."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from gsd_kernels.attention_config import attention_config, load_table
from gsd_kernels_cli import kernel_report

pytestmark = [
    pytest.mark.quick,
    pytest.mark.long,
    pytest.mark.kept("gsd_kernels", "python/gsd_kernels_cli/kernel_report.py"),
]

KERNELS = {
    *("split", "combine", "merge", "flatten", "verify", "cut", "score", "log_probs", "commit", "write"),
    *("lookup", "mix", "perturb"),
}
READ = ("split", "score", "commit", "cut", "write")  # kernels whose instructions matter
MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCMMA"}  # what a tile of 64 or more half-precision rows must use


@pytest.mark.slow
@pytest.mark.parametrize("arch", kernel_report.ARCHS)
def test_kernels_compile_without_spilling(arch):
    table = kernel_report.kernel_table([arch], read=READ)
    for row in table:
        print({k: v for k, v in row.items() if k != "arch"})
    assert {row["kernel"] for row in table} == KERNELS
    failures = {f"{row['kernel']} {row['case']}": kernel_report.gate(row) for row in table if kernel_report.gate(row)}
    assert not failures
    for row in table:
        if row["kernel"] == "split":
            group, rows = map(int, re.search(r"(\d+)×(\d+) rows", row["case"]).groups())
            half = not row["case"].startswith("fp32")
            assert row["load_bits"] == 128, row
            assert ("MMA" in row["matrix"]) == half, row
            assert not half or group * rows < 64 or "window" in row["case"] or MATRIX[arch] in row["matrix"], row
        if row["kernel"] in ("score", "commit", "cut", "write"):
            assert row["load_bits"] == 128, row


@pytest.mark.slow
def test_the_gate_fails_for_a_configuration_that_is_too_large():
    from gsd_kernels.ops.dag_attention.triton import dag_attention

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    config = attention_config(80, 2, 128, 64, 8192)
    q, cache = meta(1, 8, 64, 128, dtype=torch.bfloat16), meta(1, 8, 8192, 128, dtype=torch.bfloat16)

    def problems(**changes: int) -> list[str]:
        changed = replace(config, **changes)
        arguments = (q, cache, cache, meta(1, 64, 2), meta(1), None, None, None, 0.1, *4 * [None], changed)
        kernels = dict(kernel_report.compile_launches(lambda: dag_attention(*arguments), 80))
        return kernel_report.gate(kernel_report.facts(kernels["split"], 80, read=False))

    assert not problems()
    assert any("shared memory" in p for p in problems(num_stages=8))
    assert any("stack" in p for p in problems(block_m=256))


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 103, 120, 130])
def test_every_shape_has_a_configuration(arch):
    for element_size in (2, 4):
        for head_dim in (64, 80, 96, 128, 256):
            for size_m in (1, 16, 17, 64, 128, 1000, 8192):
                config = attention_config(arch, element_size, head_dim, size_m, 4096)
                assert config.block_n % 16 == 0 and config.block_m >= 16
                splits = config.prefix_splits(8, 4096, 4, 1)
                assert 1 <= splits <= 31
    assert load_table().keys() == {80, 86, 90, 100, 120}
    with pytest.raises(ValueError, match="head_dim 512"):
        attention_config(arch, 2, 512, 16, 4096)
