"""Graph-structured speculative decoding in 100 lines: plain PyTorch, a transformers model, nothing of this package.

One sequence, slow and sequential on purpose. Tests hold the package's operations and texts against it.

    draft → merge → flatten → attend → verify → commit

Run, it shows a text and the graph of a step. From Python:

    ids, steps = generate(target, draft, tokenizer("import os", return_tensors="pt").input_ids[0].tolist(), 40)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import torch
from numpy import errstate, float32
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


@dataclass
class Graph:
    """Drafted tokens as a directed acyclic graph; node 0, the root, is the last token of the text."""

    tokens: list[int]
    tail: list[int]  # the text before the root, nearest token first; −1 where it begins
    parents: list[int] = field(default_factory=lambda: [-1])  # of the edge on which a node was drafted
    scores: list[float32] = field(default_factory=lambda: [float32(0)])  # log-probability of the path of parents
    edges: dict[int, list[tuple[int, float32] | None]] = field(default_factory=dict)  # of nodes that were expanded
    merges: int = 0

    def context(self, node: int) -> list[int]:
        """The up to 8 tokens before a node, nearest first."""
        up = self.parents[node]
        return self.tail[:8] if up < 0 else [self.tokens[up], *self.context(up)][:8]

    def depth(self, node: int) -> int:
        return 0 if node == 0 else 1 + self.depth(self.parents[node])


def agreement(a: list[int], b: list[int]) -> int:
    """How many tokens in a row two contexts share."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y or x < 0), min(len(a), len(b)))


def merge(graph, frontier, tokens, log_probs, width, merge_context=1, log_sibling_ratio=-4.6, log_min_prob=-inf):
    """Add the candidates after every frontier node; the next frontier, the best nodes that are not expanded yet."""
    existing, candidates = len(graph.tokens), []
    for u, proposed, likely in zip(frontier, tokens, log_probs, strict=True):
        if u < 0:
            continue
        likely = [float32(min(lp, 0.0)) for lp in likely]
        least = max((lp for lp in likely if lp > -inf), default=float32(0)) + float32(log_sibling_ratio)
        graph.edges[u] = [None] * len(proposed)
        for rank, (token, lp) in enumerate(zip(proposed, likely, strict=True)):
            repeated = any(token == c[3] for c in candidates if c[1] == u)
            if lp > -inf and lp >= least and token >= 0 and not repeated:
                with errstate(over="ignore"):
                    candidates.append((graph.scores[u] + lp, u, rank, int(token), lp))
    leaders: dict[tuple, int] = {}
    for score, u, rank, token, lp in sorted(candidates, key=lambda c: (-c[0], c[1], c[2])):
        context = [graph.tokens[u], *graph.context(u)][:8]
        agree = {v: agreement(context, graph.context(v)) for v in range(u + 1, existing) if graph.tokens[v] == token}
        same = [(-n, -graph.scores[v], v) for v, n in agree.items() if 0 <= merge_context <= n]
        needed = tuple(context[: max(merge_context, 0)])
        if merge_context < 0 or len(needed) < merge_context or min(needed, default=0) < 0:
            needed = (u, rank)  # another candidate's never: nothing joins where the context is not known
        node = min(same)[2] if same else leaders.get((token, needed))  # of an earlier level, or of this one
        graph.merges += node is not None
        if node is None:
            node = leaders[token, needed] = len(graph.tokens)
            graph.tokens.append(token)
            graph.parents.append(u)
            graph.scores.append(score)
        graph.edges[u][rank] = (node, lp)
    leaves = (n for n, score in enumerate(graph.scores) if n not in graph.edges and score > -inf)
    best = sorted((n for n in leaves if graph.scores[n] >= log_min_prob), key=lambda n: (-graph.scores[n], n))
    return (best + [-1] * width)[:width]


def flatten(graph, max_rows, max_path):
    """The graph's best paths as rows of a tree: (node, parent row, depth, path score), best first."""
    rows, heap = [], [(float32(-0.0), 0, -1, 0, 0)]  # (−score, depth, parent row, edge, node)
    while heap and len(rows) < max_rows:
        minus, depth, parent, _, node = heapq.heappop(heap)
        rows.append((node, parent, depth, -minus))
        for index, edge in enumerate(graph.edges.get(node, []) if depth < max_path else []):
            with errstate(over="ignore"):
                if edge is not None and (score := edge[1] - minus) > -inf:
                    heapq.heappush(heap, (-score, depth + 1, len(rows) - 1, index, edge[0]))
    return rows


def attend(model, cache, text, tokens, parents):
    """Scores [rows, vocabulary] at rows of a tree behind the text, whose last token is row 0; one forward.

    A row sees the text and its ancestors. What the cache lacks of the text is read before them.
    """
    known, root = cache.get_seq_length(), len(text) - 1
    depths, sees = [], torch.ones(root + len(tokens), root + len(tokens)).tril().bool()  # [positions, positions]
    for row, parent in enumerate(parents):
        sees[root + row, root:] = sees[root + parent, root:] if row else False
        sees[root + row, root + row] = True
        depths.append(depths[parent] + 1 if row else 0)
    mask = torch.where(sees, 0.0, -inf)[None, None, known:].to(model.dtype)
    new, positions = [*text[known:-1], *tokens], [*range(known, root), *(root + depth for depth in depths)]
    inputs = {"input_ids": torch.tensor([new]), "position_ids": torch.tensor([positions]), "attention_mask": mask}
    return model(**inputs, past_key_values=cache, use_cache=True).logits[0, -len(tokens) :].double()


def commit(cache, places):
    """Keep the keys and values of some positions."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, places], layer.values[:, :, places]


@torch.no_grad()
def generate(target, draft, prompt, new_tokens, temperature=0.0, seed=0, depth=4, width=4, branch=3, max_rows=16):
    """The prompt and its continuation, which does not depend on the draft; and the steps.

    Of a step: its graph, the nodes that were accepted, and the tokens that it gave.
    """
    text, steps, read, drafted = list(prompt), [], DynamicCache(), DynamicCache()

    def perturbed(scores, position):  # the same noise for draft and target, by position: Gumbel's trick
        if not temperature:
            return scores
        uniform = torch.rand(len(scores), generator=torch.Generator().manual_seed(seed * 2**20 + position)).double()
        return torch.log_softmax(scores / temperature, -1) - (-uniform.log()).log()

    while len(text) < len(prompt) + new_tokens:
        graph, frontier = Graph([text[-1]], [*text[-2::-1], *[-1] * 8]), [0]
        for _ in range(depth):  # draft and merge
            scores = attend(draft, drafted, text, graph.tokens, graph.parents)
            commit(drafted, list(range(len(text) - 1)))
            nodes = [node for node in frontier if node >= 0]
            picks = [perturbed(scores[n], len(text) + graph.depth(n)).topk(branch).indices for n in nodes]
            likely = [torch.log_softmax(scores[n], -1)[p].tolist() for n, p in zip(nodes, picks, strict=True)]
            frontier = merge(graph, nodes, [p.tolist() for p in picks], likely, width)
        nodes, parents, *_ = zip(*flatten(graph, max_rows, depth), strict=True)
        tokens = [graph.tokens[node] for node in nodes]
        scores = attend(target, read, text, tokens, parents)
        accepted, picked = [0], []
        while True:  # verify: from the root on, the row that holds the target's own pick
            picked.append(int(perturbed(scores[accepted[-1]], len(text) + len(picked)).argmax()))
            if (accepted[-1], picked[-1]) not in (rows := list(zip(parents, tokens, strict=True))):
                break
            accepted.append(rows.index((accepted[-1], picked[-1])))
        commit(read, [*range(len(text) - 1), *(len(text) - 1 + row for row in accepted)])
        text, steps = text + picked, [*steps, (graph, [nodes[row] for row in accepted], picked)]
    return text[: len(prompt) + new_tokens], steps


if __name__ == "__main__":  # the graph of the step that gave the most tokens, accepted ones marked, and the text
    demo = Path(__file__).parents[1] / "python" / "gsd_kernels_cli" / "demo"
    pair = [AutoModelForCausalLM.from_pretrained(demo / name, dtype=torch.float32) for name in ("target", "draft")]
    tokenizer = AutoTokenizer.from_pretrained(demo / "target")
    ids, steps = generate(*pair, tokenizer("class Stack:\n    def push(self").input_ids, 40)
    graph, accepted, _ = max(steps, key=lambda step: len(step[1]))
    for node, token in enumerate(graph.tokens):
        print(graph.parents[node], node, " *"[node in accepted], " " * graph.depth(node), tokenizer.decode([token]))
    print(tokenizer.decode(ids[1:]))
