"""Remember continuations of recent contexts, look them up, and mix them with another source's."""

from .api import (
    mix_candidates,
    ngram_insert,
    ngram_lookup,
    ngram_recall,
    ngram_remember,
    perturb_candidates,
)
from .table import NgramTable

__all__ = [
    "NgramTable",
    "mix_candidates",
    "ngram_insert",
    "ngram_lookup",
    "ngram_recall",
    "ngram_remember",
    "perturb_candidates",
]
