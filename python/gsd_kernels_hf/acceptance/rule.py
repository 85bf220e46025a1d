"""One signature for deciding what a step accepts: on the device for all rows at once, or token by token on the host."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gsd_kernels import Acceptance, Rows, verify

from ..records import DecodeState
from .criteria import ExactMatch


class AcceptanceRule(Protocol):
    """Decides which rows a step accepts.

    Attributes:
        criterion: which token follows a row.
        on_device: whether nothing in :meth:`accept` and :meth:`settle` waits for the device.
        done: the sequences that :meth:`settle` marks; ``None``: it marks none.
    """

    criterion: ExactMatch
    on_device: bool
    done: list[bool] | None

    def accept(self, rows: Rows, logits: Tensor, positions: Tensor, max_path: int) -> Acceptance:
        """Accept a path of rows in every sequence.

        Args:
            rows: the drafted rows.
            logits: float [B, R, V], the target's.
            positions: int32 [B, R], index of the token picked after each row, padding excluded.
            max_path: depth of the deepest row that may be accepted, P − 1.

        Returns:
            Accepted rows int32 [B, P], their number and the bonus token int32 [B].
        """
        ...

    def settle(self) -> None:
        """Mark, after the commit, sequences that ended for a reason which the device state does not know."""
        ...


class OnDevice:
    """The rule where end-of-text tokens and lengths alone end a sequence.

    Args:
        criterion: which token follows a row.
        state: of the texts.
        eos_ids: int32 [E], end-of-text tokens.
        backend: of the op.
    """

    on_device = True
    done = None

    def __init__(self, criterion: ExactMatch, state: DecodeState, eos_ids: Tensor, backend: str) -> None:
        self.criterion, self.state, self.eos_ids, self.backend = criterion, state, eos_ids, backend

    def accept(self, rows: Rows, logits: Tensor, positions: Tensor, max_path: int) -> Acceptance:
        """See :class:`AcceptanceRule`; a criterion's picks, then :func:`gsd_kernels.verify`."""
        return verify(
            rows,
            self.criterion.picks(rows, logits, positions),
            eos_ids=self.eos_ids,
            remaining=self.state.remaining,
            done=self.state.done,
            max_path=max_path,
            backend=self.backend,
        )

    def settle(self) -> None:
        """Nothing is left to mark."""
