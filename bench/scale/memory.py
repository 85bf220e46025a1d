"""Memory that one GPU holds of a tensor-parallel target and a replicated draft, from their shapes alone.

transformers shards every matrix of a Llama: the heads of the attention, the columns and rows of the MLP, the vocabulary
of the embedding and of the head; only the norms are whole on every rank. (Its version 5.0 keeps the vocabulary whole as
well.) A cache holds its rank's key/value heads. Activations, the CUDA context and NCCL's buffers come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from gsd_kernels import GraphConfig
from gsd_kernels_cli.demo.inflate import ModelShape

from ..lib.report import markdown
from ..lib.shapes import shape_named

TARGET, DRAFT = "llama-2-70b", "tinyllama-1.1b"
GPUS = (1, 2, 4, 8)
TEXTS = ((2048, 1), (4096, 1), (4096, 8))  # positions and batch
BYTES = 2  # of a value in bfloat16
GIB = 2**30


def parameters_per_rank(shape: ModelShape, ranks: int, *, vocabulary: bool = True) -> int:
    """Parameters of a Llama on the rank that holds most of them.

    Args:
        vocabulary: whether embedding and head are sharded.

    Raises:
        ValueError: the key/value heads do not divide.
    """
    if shape.num_key_value_heads % ranks or shape.num_heads % ranks:
        heads = f"{shape.num_heads} heads and {shape.num_key_value_heads} key/value heads"
        raise ValueError(f"ranks: {heads} do not divide among {ranks}")
    attention = 2 * shape.head_dim * shape.hidden_size * (shape.num_heads + shape.num_key_value_heads) // ranks
    mlp = 3 * shape.hidden_size * _share(shape.intermediate_size, ranks)
    tokens = _share(shape.vocab_size, ranks) if vocabulary else shape.vocab_size
    embeddings = shape.hidden_size * tokens * (1 if shape.tie_word_embeddings else 2)
    norms = 2 * shape.hidden_size
    return shape.num_layers * (attention + mlp + norms) + embeddings + shape.hidden_size


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)


def cache_bytes(shape: ModelShape, positions: int, batch: int, ranks: int = 1, value: int = BYTES) -> int:
    """Bytes of the keys and values on each rank."""
    return 2 * shape.num_layers * shape.num_key_value_heads // ranks * shape.head_dim * value * batch * positions


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU; ``caches`` of both models, by (positions, batch)."""

    gpus: int
    target: int
    draft: int
    caches: dict[tuple[int, int], int]

    def total(self, text: tuple[int, int]) -> int:
        """Weights and caches."""
        return self.target + self.draft + self.caches[text]


def memory(gpus: int, target: str = TARGET, draft: str = DRAFT) -> Memory:
    """Memory of a pair of named shapes in bfloat16, decoded with the preset graph."""
    large, small = shape_named(target), shape_named(draft)
    slots = GraphConfig.preset("graph").cache_slots
    caches = {
        (length, batch): cache_bytes(large, length + slots, batch, gpus) + cache_bytes(small, length + slots, batch)
        for length, batch in TEXTS
    }
    weights = BYTES * parameters_per_rank(large, gpus), BYTES * parameters_per_rank(small, 1)
    return Memory(gpus, *weights, caches)


def table() -> str:
    """All numbers of GPUs in Markdown."""
    texts = [f"{length:,} × {batch}" for length, batch in TEXTS]
    head = ["GPUs", "target", "draft", *(f"caches, {text}" for text in texts), *(f"**all, {text}**" for text in texts)]
    rows = []
    for found in map(memory, GPUS):
        sizes = [found.target, found.draft, *found.caches.values(), *map(found.total, TEXTS)]
        rows.append([str(found.gpus), *(f"{size / GIB:.1f}" for size in sizes)])
    return markdown(head, rows)
