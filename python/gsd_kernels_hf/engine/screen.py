"""What is refused of a call before transformers looks at it."""

from __future__ import annotations

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from .. import validate
from ..model import properties
from ..sources.draft_model import DraftModel
from .options import NAMES, Options


def screen(
    options: Options,
    model: PreTrainedModel,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    generation_config: GenerationConfig,
) -> None:
    """Raise for a call that cannot be served, once: before transformers looks at it where that is possible.

    Args:
        options: of speculation.
        model: the target, unwrapped and checked.
        input_ids: the prompt [B, P]; ``None``: transformers begins with the token that texts begin with.
        attention_mask: [B, P], 0 for padding; ``None`` where there is none.
        generation_config: transformers' options, the model's own included.

    Raises:
        TypeError, ValueError: the reason and the cure.
    """
    check_sources(options, model)
    if input_ids is not None:
        validate.check_prompt(input_ids, attention_mask, properties.vocabulary(model))
    validate.check_generation_config(generation_config)


def check_sources(options: Options, model: PreTrainedModel) -> None:
    """Raise unless all sources can draft for the target ``model``; load a drafter that was named by its place."""
    options.load(model)
    for source in options.sources(automatic=True):
        source.check(model)
        for draft in source.models:
            validate.check_pair(model, draft)


def drafts_of(options: Options) -> dict[str, PreTrainedModel]:
    """The models that sources forward, besides the target, by the name that an error calls them."""
    found = {}
    for source in options.sources(automatic=True):
        name = "assistant_model" if source.name in NAMES else f"draft_sources: {source.name}"
        if isinstance(source, DraftModel) and source.models[0] in options.other_drafts:
            name = source.name.replace("model", "assistant_model", 1)
        for number, model in enumerate(source.models, 1):
            found[name if number == 1 else f"{name} {number}"] = model
    return found
