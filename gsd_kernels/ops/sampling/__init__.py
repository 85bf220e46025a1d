"""Pick tokens with noise keyed by position: the target's samples and the draft's candidates."""

from .api import draft_candidates, sample_rows, warped_log_probs

__all__ = ["draft_candidates", "sample_rows", "warped_log_probs"]
