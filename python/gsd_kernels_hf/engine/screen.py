"""What is refused of a call before transformers looks at it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from .. import validate
from ..model import properties
from ..sources import border
from ..sources.base import DraftSource
from ..sources.draft_model import DraftModel
from ..sources.layer_skip import LayerSkip
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
    sources = options.sources(automatic=True)
    for source in sources:
        source.check(model)
        border.check_hidden_layers(source, model)
    for name, draft in drafts_of(options, sources).items():
        validate.check_pair(model, draft, name)


def drafts_of(options: Options, sources: Sequence[DraftSource] | None = None) -> dict[str, PreTrainedModel]:
    """The models that sources forward, besides the target, by the name that an error calls them."""
    found = {}
    for source in options.sources(automatic=True) if sources is None else sources:
        name = "assistant_model" if source.name in NAMES else f"draft_sources: {source.name}"
        if isinstance(source, DraftModel) and source.model in options.other_drafts:
            name = source.name.replace("model", "assistant_model", 1)
        for number, model in enumerate(models_of(source), 1):
            found[name if number == 1 else f"{name} {number}"] = model
    return found


def models_of(source: DraftSource) -> list[PreTrainedModel]:
    """Of what a source forwards, the language models of transformers; an encoder has no output matrix."""
    found = [module.view if isinstance(module, LayerSkip) else module for module in source.forwards]
    return [m for m in found if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is not None]
