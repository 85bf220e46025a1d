"""A draft model as a source, by whether its tokens are the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ..model.vocabulary import Translation
from ..validate.modes import Unsupported
from .base import DraftSource
from .draft_model import DraftModel
from .translated import Translated

MOST = 0.5
"""Of the larger vocabulary's tokens: with so many shared, the target's text is what the draft reads, token by token."""


def draft_source(model: PreTrainedModel, name: str, translation: Translation | None) -> DraftSource:
    """The source of a draft model.

    Args:
        model: the draft.
        name: of the source.
        translation: between its tokenizer and the target's; ``None``: they are the same.

    Raises:
        Unsupported: too few tokens are shared.
    """
    if translation is None:
        return DraftModel(model, name=name)
    if translation.shared.part >= MOST:
        return Translated(model, translation, name=name)
    raise Unsupported(
        f"assistant_tokenizer: {translation.shared.part:.0%} of its tokens are the tokenizer's, and {MOST:.0%} are "
        "needed; use a draft whose tokenizer shares more"
    )


def translations_of(tokenizer: Any, assistant_tokenizer: Any, drafts: Sequence[object]) -> list[Translation | None]:
    """What is between the target's tokenizer and that of each draft; ``None`` where it is the target's own.

    Args:
        tokenizer: of the target, or ``None``.
        assistant_tokenizer: of all drafts, or a list of theirs, ``None`` for one that has the target's.
        drafts: the draft models.

    Raises:
        TypeError, ValueError: no tokenizers, or as many as there are drafts.
    """
    given = assistant_tokenizer
    if isinstance(given, (list, tuple)):
        if len(given) != len(drafts):
            raise ValueError(
                f"assistant_tokenizer: expected one, or a list of {len(drafts)}, one for each draft model, got "
                f"{len(given)}"
            )
    else:
        given = [given] * len(drafts)
    if tokenizer is None and any(one is not None for one in given):
        raise ValueError(
            "assistant_tokenizer: needs the target's tokenizer beside it, to map the draft's tokens; pass tokenizer="
        )
    return [None if one is None or one is tokenizer else Translation.between(tokenizer, one) for one in given]
