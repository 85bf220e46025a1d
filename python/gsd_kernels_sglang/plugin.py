"""SGLang's way in: it calls :func:`register` in each of its processes, whether or not the algorithm is chosen."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.version import __version__

from .versions import refusal

NAME = "GSD"


def register() -> None:
    """Make ``--speculative-algorithm GSD`` known; with an untested SGLang, make it a refusal that says so."""
    reason = refusal(__version__)
    if reason is None:
        from .algorithm import GraphAlgorithm, check

        SpeculativeAlgorithm.register(NAME, spec_class=GraphAlgorithm, validate_server_args=check)(worker)
        return

    def refuse(server_args: Any) -> None:
        raise ValueError(reason)

    SpeculativeAlgorithm.register(NAME, validate_server_args=refuse)(refuse)


def worker(server_args: Any) -> type:
    """The worker's class; importing it loads SGLang's kernels."""
    from .worker import GraphWorker

    return GraphWorker
