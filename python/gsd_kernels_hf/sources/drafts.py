"""A draft model as a source, by whether its tokens are the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ..model.vocabulary import Translation
from .base import DraftSource
from .draft_model import DraftModel
from .retokenised import Retokenised
from .translated import Translated

MIN_SHARED_FRACTION = 0.6
"""Of the larger vocabulary's tokens: with so many shared, the draft reads the target's text token by token."""


def draft_source(model: PreTrainedModel, name: str, translation: Translation | None) -> DraftSource:
    """The source of a draft model.

    Args:
        model: the draft.
        name: of the source.
        translation: between its tokenizer and the target's; ``None``: they are the same.
    """
    if translation is None:
        return DraftModel(model, name=name)
    return (Translated if is_mapped(translation) else Retokenised)(model, translation, name=name)


def is_mapped(translation: Translation) -> bool:
    """Return whether ids are mapped; else text is read."""
    return translation.shared.part >= MIN_SHARED_FRACTION


def translations_of(tokenizer: Any, assistant_tokenizer: Any, drafts: Sequence[object]) -> list[Translation | None]:
    """The translations between the target's tokenizer and that of each draft; ``None`` where it is the target's own.

    Args:
        tokenizer: of the target, or ``None``.
        assistant_tokenizer: of all drafts, or a list of theirs, ``None`` for one that has the target's. Without drafts
            it is ignored, as by transformers.
        drafts: the draft models.

    Raises:
        TypeError, ValueError: no tokenizers, or as many as there are drafts.
    """
    given = assistant_tokenizer if drafts else ()
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


def check_probabilities(translations: Sequence[Translation | None], criterion: object) -> None:
    """Raise where a criterion needs the draft's probability of every target token, and a draft gives text.

    Raises:
        ValueError: the draft's tokens are re-tokenised.
    """
    for between in translations:
        if between is not None and not is_mapped(between):
            raise ValueError(
                f'criterion: "{criterion}" needs the draft\'s probability of every token of the target, and '
                f'assistant_tokenizer shares only {between.shared.part:.0%} of them; use criterion="exact"'
            )
