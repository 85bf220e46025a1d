"""Cost of one decode step's graph ops beside the target's forward: merge × depth + flatten + verify + commit.

The target is a Llama of about 100 million parameters with random weights (the time does not depend on them), one row a
forward, a 256-token prefix in its cache: what an ordinary decoding step costs. The graph is drafted from random
candidates and verified against picks that agree with most of them.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason

LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB, PREFIX = 12, 768, 12, 12, 32000, 256
FORWARDS = 30
GRAPH = gsd.GraphConfig(depth=6, width=8, branch=4, max_rows=64, merge_context=1)


def target_forward(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """A single-row forward over a filled cache, and the model's parameter count."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    from gsd_kernels_hf.model.properties import cache_argument

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()
    cache = StaticCache(config=config, max_cache_len=PREFIX + 2 * FORWARDS)  # every call adds a token
    cached = {cache_argument(model): cache}
    model(torch.randint(0, VOCAB, (1, PREFIX), device=device), **cached, use_cache=True)
    token, position = torch.tensor([[7]], device=device), torch.tensor([[PREFIX]], device=device)

    def forward() -> object:
        return model(token, **cached, use_cache=True, position_ids=position).logits

    return forward, sum(p.numel() for p in model.parameters())


class GraphStep:
    """The four verbs of one step on fixed random inputs, in the order in which a decoder calls them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, batch: int) -> None:
        gen = torch.Generator().manual_seed(0)
        widths = [1] + [GRAPH.width] * (GRAPH.depth - 1)
        self.levels = []
        for width in widths:
            shape = (batch, width, GRAPH.branch)
            tokens = torch.rand(batch, width, 40, generator=gen).argsort(-1)[..., : GRAPH.branch].int()
            log_probs = (torch.randn(shape, generator=gen) * 2).log_softmax(-1)
            self.levels.append((tokens.to(device).contiguous(), log_probs.to(device)))
        self.graph = gsd.TokenGraph.empty(batch, GRAPH, device)
        self.root = torch.ones(batch, dtype=torch.int32, device=device)
        self.tail = torch.full((batch, 8), -1, dtype=torch.int32, device=device)
        shape = (batch, KV_HEADS, PREFIX + GRAPH.cache_slots, HIDDEN // HEADS)
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(LAYERS)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(LAYERS)]
        self.kv_len = torch.full((batch,), PREFIX, dtype=torch.int32, device=device)
        self.eos = torch.empty(0, dtype=torch.int32, device=device)
        self.remaining = torch.full((batch,), 1000, dtype=torch.int32, device=device)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.sampled = torch.zeros(batch, GRAPH.max_rows, dtype=torch.int32, device=device)
        self.merge()
        self.rows = self.flatten()
        for row in range(1, GRAPH.max_rows):  # the target agrees with the deepest path
            parents = self.rows.parent_rows[:, row].clamp(min=0).long()
            self.sampled.scatter_(1, parents[:, None], self.rows.token_ids[:, row, None])
        self.acceptance = self.verify()

    def merge(self) -> None:
        self.graph.reset(self.root, self.tail)
        frontier = self.graph.root_frontier()
        for level, (tokens, log_probs) in enumerate(self.levels):
            frontier = gsd.merge(
                self.graph,
                frontier,
                tokens,
                log_probs,
                level=level,
                width=GRAPH.width,
                merge_context=GRAPH.merge_context,
            ).node_ids

    def flatten(self) -> gsd.Rows:
        return gsd.flatten(self.graph, GRAPH.max_rows, GRAPH.max_path)

    def verify(self) -> gsd.Acceptance:
        return gsd.verify(
            self.rows,
            self.sampled,
            eos_ids=self.eos,
            remaining=self.remaining,
            done=self.done,
            max_path=GRAPH.max_path,
        )

    def commit(self) -> None:
        self.kv_len.fill_(PREFIX)
        gsd.commit_kv(self.k, self.v, self.acceptance.accepted_rows, self.acceptance.num_accepted, self.kv_len)


def measure(function: Callable[[], object], device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds: smallest, median, 20th and 80th percentile."""
    times = []
    for i in range(repeats + repeats // 5 + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i > repeats // 5:
            times.append((time.perf_counter() - start) * 1e3)
    fifths = statistics.quantiles(times, n=5)
    return {"min_ms": min(times), "median_ms": statistics.median(times), "p20_ms": fifths[0], "p80_ms": fifths[3]}


@torch.inference_mode()
def run(device: torch.device, dtype: torch.dtype, batch: int = 1) -> dict[str, object]:
    """The row of the benchmark."""
    forward, parameters = target_forward(device, dtype)
    step = GraphStep(device, dtype, batch)
    parts = {name: measure(getattr(step, name), device, 200) for name in ("merge", "flatten", "verify", "commit")}
    whole = sum(part["median_ms"] for part in parts.values())
    plain = measure(forward, device, FORWARDS)
    return {
        "benchmark": "step_overhead",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "gsd_kernels": gsd.__version__, "python": platform.python_version()},
        "backend": "reference" if unavailable_reason(device.type, device) else device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "target_parameters": parameters,
        "batch": batch,
        "rows": GRAPH.max_rows,
        "levels": GRAPH.depth,
        "accepted": step.acceptance.num_accepted.tolist(),
        "parts": parts,
        "graph_ops_ms": whole,
        "target_forward": plain,
        "fraction": whole / plain["median_ms"],
        # On a busy machine the forward suffers more than the ops; its fastest run is the stricter yardstick.
        "fraction_of_fastest_forward": whole / plain["min_ms"],
    }
