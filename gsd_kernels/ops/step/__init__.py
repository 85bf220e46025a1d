"""Small ops between the larger ones of a step: the graph's root, what a model reads of rows, the text that grows."""

from .api import accepted_path, commit_text, feed_chain, feed_rows, start_graph
from .records import NO_NODE, Chain, FedRows

__all__ = ["NO_NODE", "Chain", "FedRows", "accepted_path", "commit_text", "feed_chain", "feed_rows", "start_graph"]
