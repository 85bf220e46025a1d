"""Remember continuations of recent contexts, and look them up for leaves of the graph."""

from .api import NgramTable, ngram_insert, ngram_lookup

__all__ = ["NgramTable", "ngram_insert", "ngram_lookup"]
