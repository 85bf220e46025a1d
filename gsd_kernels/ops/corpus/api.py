from __future__ import annotations

from ..table import Op
from . import reference

corpus_recall = Op(
    "corpus_recall(Tensor text, Tensor order, Tensor following, Tensor token_ids, Tensor parents, Tensor tokens, "
    "Tensor out_len, Tensor kv_start, Tensor frontier, int branch, int vocab) -> (Tensor, Tensor, Tensor)",
    reference.corpus_recall,
    ranked=("cpu",),
    lacks=("triton", "cuda"),
    flat=lambda corpus, graph, nodes, tokens, out_len, kv_start, vocab: (
        *(corpus.text, corpus.order, corpus.following, graph.token_ids, graph.parents),
        *(tokens, out_len, kv_start, nodes, graph.branch, vocab),
    ),
    tolerance=1e-5,
)
