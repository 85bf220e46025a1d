from __future__ import annotations

from ..table import Op
from . import reference

corpus_recall = Op(
    "corpus_recall",
    "text[T] order[E] following[E] token_ids[B,N] parents[B,N] tokens:int64[B,S] "
    "out_len[B] kv_start[B] frontier[B,W] branch:int=K vocab:int=V "
    "-> [B,W,K] float32[B,W,K] [B,W]",
    reference.corpus_recall,
    ranked=("cpu",),
    lacks=("triton", "cuda"),
    flat=lambda corpus, graph, nodes, tokens, out_len, kv_start, vocab: (
        *(corpus.text, corpus.order, corpus.following, graph.token_ids, graph.parents),
        *(tokens, out_len, kv_start, nodes, graph.branch, vocab),
    ),
    tolerance=1e-5,
)
