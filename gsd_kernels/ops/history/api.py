from __future__ import annotations

from torch import Tensor

from ..ngram.api import TABLE
from ..table import small_op
from . import reference
from .records import WEIGHTS, Recollection, Seen

# Of lines: what steps write, all storage, what Recollection.sizes says, and the noise of the target.
FOLLOWED = f"{TABLE} text[B,S] length[B] heads[B,H] previous[B,S] runners[B,G] runner_log_probs:float32[B,G] emitted[B]"
HISTORY = (
    f"history{{ {FOLLOWED} weights:float64[{WEIGHTS}] learned_keys?:int64[1,D] learned_tokens?[1,D,E] "
    "learned_log_probs?:float32[1,D,E] }"
)
SIZES = "sizes:ints=mwno"
NOISE = "first_pick?[B] seed?:int64[] sequence_ids?[B]"


def followed(known: Recollection, tokens: Tensor, counts: Tensor, seen: Seen | None) -> tuple[object, ...]:
    """The operator's lists: what is written, and what the target found likely."""
    return known.written(), tokens, counts, [] if seen is None else seen.tensors(), known.sizes


history_recall = small_op(
    "history_recall",
    f"{HISTORY} token_ids[B,N] parents[B,N] contexts[B,N,X] depths[B,N] nodes[B,R] "
    f"branch:int=k {SIZES} {NOISE} -> [B,R,k] float32[B,R,k] [B,R]",
    reference.history_recall,
    flat=lambda known, graph, nodes, *noise: (
        *(known.tensors(), graph.token_ids, graph.parents, graph.contexts, graph.depths, nodes),
        *(graph.branch, known.sizes, *noise),
    ),
    tolerance=2e-5,
)
history_append = small_op(
    "history_append",
    f"history!{{ {FOLLOWED} }} tokens[B,P] counts[B] seen{{ token_ids?[B,R] parent_rows?[B,R] "
    "depths?[B,R] num_rows?[B] tail?[B,X] accepted_rows?[B,A] seen_tokens?[B,R,T] "
    f"log_probs?:float32[B,R,T] }} {SIZES}",
    reference.history_append,
    flat=followed,
)
