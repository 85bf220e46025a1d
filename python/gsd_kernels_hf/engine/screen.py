"""Refusals of a call before transformers looks at it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from gsd_kernels.names import did_you_mean

from .. import validate
from ..model.facts import Facts
from ..validate.options import CONFIG_FIELDS, GENERATE_PARAMETERS, warn_once
from .options import Options
from .resolved import Sources

OPTIONS = tuple(field.name for field in fields(Options))

DRAFT_LENGTHS = (
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
    "target_lookbehind assistant_ensemble_weight max_matching_ngram_size"
).split()
"""Settings of transformers' own assisted generation, which decide how much it drafts; they have no effect here."""

NEAR_RATIO = 0.75  # of difflib's ratio; transformers refuses what is further away from every name


def check_names(given: Iterable[str], model: PreTrainedModel) -> None:
    """Raise for an argument of ``generate`` that nobody knows and that is nearly an option's or transformers' own.

    What is near nothing is left to transformers, which knows what the model's code takes.

    Raises:
        TypeError: it names the nearest.
    """
    known = {*OPTIONS, *CONFIG_FIELDS, *GENERATE_PARAMETERS}
    strange = [name for name in given if name not in known]
    for function in (model.forward, model.prepare_inputs_for_generation) if strange else ():
        known |= inspect.signature(function).parameters.keys()
    for name in strange:
        if name not in known and get_close_matches(name, known, n=1, cutoff=NEAR_RATIO):
            raise TypeError(f"generate: unknown argument {name!r}{did_you_mean(name, known)}")


def report_draft_lengths(given: Mapping[str, Any], config: GenerationConfig | None, model: PreTrainedModel) -> None:
    """Say once that a setting of :data:`DRAFT_LENGTHS` has no effect, wherever it was set."""
    places = {"the call": given, "generation_config": vars(config) if config is not None else {}}
    places["the model's generation_config"] = vars(model.generation_config)
    for place, values in places.items():
        for name in DRAFT_LENGTHS:
            value = values.get(name)
            if value is None:
                continue
            depth = value if name == "num_assistant_tokens" and type(value) is int and 1 <= value <= 64 else 5
            warn_once(
                (name, str(value)),
                '%s=%r of %s has no effect: graph_config says how much is drafted, as in graph_config="auto" or '
                'GraphConfig.preset("chain", depth=%d)',
                name,
                value,
                place,
                depth,
            )


def screen(
    options: Options,
    facts: Facts,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    generation_config: GenerationConfig,
) -> Sources:
    """Raise for a call that cannot be served, once: before transformers looks at it where that is possible.

    Args:
        options: of speculation.
        facts: of the target, which is checked.
        input_ids: the prompt [B, P]; ``None``: transformers begins with the token that texts begin with.
        attention_mask: [B, P], 0 for padding; ``None`` where there is none.
        generation_config: transformers' options, the model's own included.

    Returns:
        What the call drafts with, and the facts of its target.

    Raises:
        TypeError, ValueError: the reason and the cure.
    """
    sources = Sources.of(options, facts)
    validate.check_paths(options.graph_config, (facts.model, *sources.models.values()))
    if input_ids is not None:
        validate.check_prompt(input_ids, attention_mask, facts.vocabulary)
    validate.check_generation_config(generation_config)
    return sources
