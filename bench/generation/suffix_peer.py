"""Suffix decoding as Snowflake's arctic-inference publishes it, as a draft source of ours: its trees, our verification.

Greedy chains as its vLLM plugin drafts them by default: as long as the match, up to a bound.
"""

from __future__ import annotations

import importlib.util
import itertools
import math

import torch

from gsd_kernels import DraftSource, GraphConfig, Level, Proposal, Verified

MOST = 15  # drafted tokens
CONFIG = GraphConfig(
    depth=0, branch=1, max_rows=MOST + 1, merge_context=-1, history_depth=MOST, history_width=1, min_prob=0.0
)


def missing() -> str | None:
    """Why it cannot run; ``None`` if it can."""
    try:
        found = importlib.util.find_spec("arctic_inference.suffix_decoding") is not None
    except ImportError:
        found = False
    if not found:
        return "arctic-inference is not installed (it is published as source alone, which needs CMake and nanobind)"
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # noqa: F401
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


class Suffix(DraftSource):
    """One sequence at a time; earlier texts of the same object stay in its cache."""

    name = "suffix"
    reliability = None

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=64)
        self.requests = itertools.count()

    def begin(self, text):
        self.state = text.state

    def restart(self) -> None:
        self.request = next(self.requests)
        self.cache.start_request(self.request, self._text())

    def end(self) -> None:
        self.cache.stop_request(self.request)

    def _text(self) -> list[int]:
        return self.state.tokens[0, : int(self.state.out_len[0])].tolist()

    def propose(self, level: Level) -> Proposal:
        if level.number == 0:
            found = self.cache.speculate(self.request, self._text()[-64:], max_spec_tokens=MOST, min_token_prob=0.1)
            self.drafted = list(zip(found.token_ids, found.probs, strict=True))
        token, prob = self.drafted[level.number] if level.number < len(self.drafted) else (-1, 0.0)
        here = level.frontier.node_ids[..., None] >= 0
        tokens = torch.where(here, token, -1).to(torch.int32)
        return Proposal(tokens, torch.where(tokens >= 0, math.log(max(prob, 1e-6)), -torch.inf))

    def observe(self, verified: Verified) -> None:
        count = int(verified.accepted.num_accepted[0])
        self.cache.add_active_response(self.request, verified.tokens[0, :count].tolist())
