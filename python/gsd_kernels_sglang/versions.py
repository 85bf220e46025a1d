"""The versions of SGLang that the plug-in was tried with."""

from __future__ import annotations

TESTED = ("0.5.23",)


def refusal(version: str) -> str | None:
    """Why ``--speculative-algorithm GSD`` is refused with an SGLang of this version; ``None``: it is not."""
    if version in TESTED:
        return None
    return (
        f"--speculative-algorithm GSD: tested with SGLang {', '.join(TESTED)}, this is {version}. Its workers have no "
        f"stable interface, and a draft that is verified wrongly gives wrong text: install sglang=={TESTED[-1]}, "
        "or a gsd-kernels that names this version."
    )
