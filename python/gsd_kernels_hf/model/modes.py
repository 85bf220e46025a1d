"""The one mark of a call that is no mistake: transformers serves it, and graph-speculative generation does not."""

from __future__ import annotations

OTHERWISE = "; or let transformers serve it: model.generate"
"""What a refusal ends with."""
LEAVE_OUT = "leave it out" + OTHERWISE


class Unsupported(ValueError):
    """A mode, a model input or a model that transformers' own ``generate`` serves and this package does not.

    Bad input is any other ``ValueError``. A patched model's ``generate`` hands such a call to transformers;
    ``gsd_kernels.generate`` lets the error out, so its message names what works instead.

    Attributes:
        reason: the message without the advice to call ``model.generate``.
        begun: whether a text was being written, by a call round the one that is not served.
    """

    begun = False

    @property
    def reason(self) -> str:
        """See above."""
        return str(self).removesuffix(OTHERWISE)


class Unserved(Exception):
    """Graph rows cannot be verified in a model; the message completes a sentence that begins with its class."""


def named(value: object) -> str:
    """Say what came in the place of something else."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
