"""Attention of a padded batch; right is what every row gives alone, bit for bit."""

import torch
from kernels.benchmark import Benchmark

BATCH, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 8, 2, 64, 320


class Attention(Benchmark):
    """Rows of four texts of different lengths, padded on the left, beside the same rows one by one."""

    seed = 0

    def rows(self, count):
        def random(heads, length):
            return torch.randn(BATCH, heads, length, HEAD_DIM, device=self.device, dtype=torch.bfloat16)

        self.query, self.key, self.value = random(HEADS, count), random(KV_HEADS, LENGTH), random(KV_HEADS, LENGTH)
        self.padding = [0, 37, 101, 255]
        starts = torch.tensor(self.padding, device=self.device, dtype=torch.int64)
        self.mask = torch.arange(LENGTH, device=self.device) >= starts[:, None]  # [B, S]

    def setup_decode(self):
        self.rows(1)

    def setup_prompt(self):
        self.rows(64)

    def benchmark_decode(self):
        self.out = self.kernel.attention(None, self.query, self.key, self.value, self.mask)[0]

    benchmark_prompt = benchmark_decode

    def verify_decode(self):
        alone = torch.zeros_like(self.out)
        count = self.query.shape[2]
        for b, start in enumerate(self.padding):
            for row in range(count):
                end = LENGTH - count + row + 1  # of what the row sees
                tensors = (self.query[b : b + 1, :, row : row + 1], self.key[b : b + 1, :, start:end])
                alone[b, row] = self.kernel.attention(None, *tensors, self.value[b : b + 1, :, start:end])[0][0, 0]
        if not torch.equal(self.out, alone):  # the runner itself is content with a hundredth
            raise RuntimeError("attention: a row's bits depend on its batch")
        return alone

    verify_prompt = verify_decode
