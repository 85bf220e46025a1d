"""Random decoders of odd sizes for :func:`gsd_kernels.ops.decoder_rows`, and the rows that tests give them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights, decoder_rows

VOCAB = 61


@dataclass(frozen=True)
class Sizes:
    hidden: int = 88
    inner: int = 150
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    layers: int = 2
    bias: bool = False
    head_norms: bool = False
    window: int = 0


SIZES = {
    "llama-odd": Sizes(hidden=50, inner=77, head_dim=10),
    "qwen2-64": Sizes(hidden=72, inner=176, heads=2, kv_heads=1, head_dim=64, bias=True),
    "qwen3-96": Sizes(hidden=104, inner=33, heads=4, kv_heads=1, head_dim=96, head_norms=True),
    "mistral-128": Sizes(hidden=48, inner=130, heads=2, kv_heads=2, head_dim=128, window=9),
}


def decoder(sizes: Sizes, dtype: torch.dtype, wrap=lambda t: t) -> DecoderWeights:
    """Random weights, each handed through ``wrap``."""
    gen = torch.Generator().manual_seed(sizes.hidden)

    def matrix(*shape: int) -> Tensor:
        return wrap((torch.randn(shape, generator=gen) * shape[-1] ** -0.5).to(dtype))

    def norm(size: int) -> Tensor:
        return wrap((1 + 0.2 * torch.randn(size, generator=gen)).to(dtype))

    def layer() -> LayerWeights:
        q_size, kv_size = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        outputs = {"q": q_size, "k": kv_size, "v": kv_size, "o": sizes.hidden}
        outputs |= {"gate": sizes.inner, "up": sizes.inner, "down": sizes.hidden}
        inputs = {"o": q_size, "down": sizes.inner}
        parts = {name: matrix(n, inputs.get(name, sizes.hidden)) for name, n in outputs.items()}
        if sizes.bias:
            parts |= {f"{name}_bias": wrap(torch.randn(n, generator=gen).to(dtype)) for name, n in outputs.items()}
        if sizes.head_norms:
            parts |= {"q_norm": norm(sizes.head_dim), "k_norm": norm(sizes.head_dim)}
        return LayerWeights(input_norm=norm(sizes.hidden), second_norm=norm(sizes.hidden), window=sizes.window, **parts)

    half = sizes.head_dim // 2
    return DecoderWeights(
        embedding=matrix(VOCAB, sizes.hidden),
        layers=[layer() for _ in range(sizes.layers)],
        final_norm=norm(sizes.hidden),
        head=matrix(VOCAB + 2, sizes.hidden),
        inv_freq=wrap(100.0 ** -(torch.arange(half) / half)),
        rope_scale=1.1,
        heads=sizes.heads,
        eps=1e-5,
    )


@dataclass
class Text:
    """One or more sequences in a cache: what was read so far, padding before it, and rows behind it."""

    weights: DecoderWeights
    sizes: Sizes
    dtype: torch.dtype
    pads: list[int]
    capacity: int
    backend: str = "cpu"
    caches: tuple[list[Tensor], list[Tensor]] = field(init=False)
    kv_start: Tensor = field(init=False)
    kv_len: Tensor = field(init=False)
    spoiled: Tensor | None = None  # of the next call
    states: tuple[int, ...] = ()
    found: tuple[Tensor, ...] = field(init=False)  # by the last call

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def __post_init__(self) -> None:
        shape = (len(self.pads), self.sizes.kv_heads, self.capacity, self.sizes.head_dim)
        self.caches = tuple(
            [torch.full(shape, float("nan"), dtype=self.dtype, device=self.device) for _ in range(self.sizes.layers)]
            for _ in range(2)
        )
        self.kv_start = torch.tensor(self.pads, dtype=torch.int32, device=self.device)
        self.kv_len = self.kv_start.clone()

    def graph(self, tokens: Tensor, sees: Tensor, depths: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
        """Arguments of rows first … last − 1 of a tree, [B, R] tokens, which lie in slots of their number."""
        batch, tokens, sees, depths = len(self.pads), *(t.to(self.device) for t in (tokens, sees, depths))
        return (
            tokens[:, first:last].to(torch.int32),
            (self.kv_len - self.kv_start)[:, None] + depths[first:last],
            self.kv_len[:, None] + torch.arange(first, last, dtype=torch.int32, device=self.device),
            pack_bits(sees)[first:last].expand(batch, -1, -1).contiguous(),
            depths.expand(batch, -1),
            self.kv_len,
            self.kv_start,
            *self.caches,
        )

    def rows(
        self, tokens: Tensor, sees: Tensor, depths: Tensor, first: int, last: int, keep: int | None = None
    ) -> Tensor:
        """Logits [B, n, V] of these rows, or of the last ``keep`` of them."""
        graph = self.graph(tokens, sees, depths, first, last)
        keep = last - first if keep is None else keep
        self.found = self.forward(*graph, keep=keep, spoiled=self.spoiled, backend=self.backend)
        return self.found[0]

    def forward(self, ids: Tensor, *rows: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
        """The operator of rows."""
        return decoder_rows(self.weights, ids, *rows, states=self.states, **options)

    def read(self, tokens: Tensor, step: int) -> Tensor:
        """Append [B, n] tokens, ``step`` at a time; their logits."""
        found = []
        for part in tokens.split(step, 1):
            n = part.shape[1]
            found.append(self.rows(part, torch.ones(n, n).tril().bool(), torch.arange(n, dtype=torch.int32), 0, n))
            self.kv_len = self.kv_len + n
        return torch.cat(found, 1)


CUDA_SIZES = {
    "llama-64": Sizes(hidden=64, inner=104, heads=4, kv_heads=2, head_dim=64),
    "qwen2-64": SIZES["qwen2-64"],
    "qwen3-128": Sizes(hidden=104, inner=40, heads=3, kv_heads=1, head_dim=128, head_norms=True),
    "mistral-128": Sizes(hidden=48, inner=136, heads=2, kv_heads=2, head_dim=128, window=9),
}
"""Of decoders that the CUDA operator takes, by what is theirs alone."""


def check_alike(results: list[list[Tensor]], dtype: torch.dtype, slack: float = 1) -> None:
    """The first implementation's outputs, logits first, are finite and the others' but for rounding."""
    assert len(results) >= 2 and results[0][0].dtype is dtype, "the output matrix rounds"
    # In bfloat16 some levels round the weights of attention too, as PyTorch's attention does.
    tolerance = slack * {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for ours, *others in zip(*results, strict=True):
        assert ours.isfinite().all()
        for other in others:
            assert ours.shape == other.shape and (ours - other).norm() <= tolerance * other.norm()


def tree(parents: list[int]) -> tuple[Tensor, Tensor]:
    """What each node sees, bool [R, R], and its depth, int32 [R]; a parent may come later than its child."""
    count = len(parents)
    sees, depths = torch.eye(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int32)
    for node in range(count):
        at = parents[node]
        while at >= 0:
            sees[node, at] = True
            depths[node] += 1
            at = parents[at]
    return sees, depths


def random_parents(count: int, seed: int = 0) -> list[int]:
    gen = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(max(0, i - 6), i, (), generator=gen)) for i in range(1, count)]


def random_tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def touch(sizes: Sizes, dtype: torch.dtype) -> None:
    """A prompt and a tree that fill the caches to their last position, all between protected pages."""
    from guards import guarded

    text = Text(decoder(sizes, dtype, guarded), sizes, dtype, [0, 2], 64)
    text.caches = tuple([guarded(t) for t in caches] for caches in text.caches)
    text.read(random_tokens(2, 24), 24)
    count = 64 - int(text.kv_len.max())
    text.rows(random_tokens(2, count, 1), *tree(random_parents(count)), 0, count)


if __name__ == "__main__":  # all products of every level that can run here; for backends/test_decoder.py
    from gsd_kernels import cpu_levels

    smallest = Sizes(hidden=1, inner=1, heads=1, kv_heads=1, head_dim=2, layers=1)
    torch.set_num_threads(1)
    for name in ("amx_in_software", *(name for name, why in cpu_levels.levels().items() if why is None)):
        print(name, flush=True)
        with cpu_levels.forced(name):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for sizes in (*SIZES.values(), smallest):
                    touch(sizes, dtype)
    print("done")
