"""Continuations of contexts in a sorted corpus."""

from .api import corpus_recall
from .index import MAX_MATCH, SortedCorpus, sort_corpus

__all__ = ["MAX_MATCH", "SortedCorpus", "corpus_recall", "sort_corpus"]
