"""The generation config of transformers that a checked request asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from copy import deepcopy

from transformers import GenerationConfig, PreTrainedModel

from gsd_kernels_hf.model import properties
from gsd_kernels_hf.model.sides import longropes_of
from gsd_kernels_hf.validate import CONFIG_FIELDS, HONOURED, REFUSED

from . import fields
from .checks import Json, Refused, one_line

PIECE_TOKENS = 2048
"""Tokens of a prompt that are read at once: memory, and how soon a text can end that nobody waits for."""

LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

_BOOKKEEPING = ("transformers_version", "_from_model_config", "_commit_hash")
_SERVER_SAYS = ("num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits")


def config_of(body: Json, model: PreTrainedModel) -> tuple[GenerationConfig, Json]:
    """The config of a checked request's texts, and the arguments of it that ``generation_config`` names.

    Raises:
        Refused: fields that contradict each other, a token that the model does not have, or an argument that
            ``generation_config`` names out of bounds, of another type, or without an effect.
    """
    config, vocabulary = deepcopy(model.generation_config), properties.vocabulary(model)
    named = _arguments(body["generation_config"]) if "generation_config" in body else {}
    asked = _sampling(body, named, vocabulary)
    if bias := body.get("logit_bias"):
        if beyond := [token for token in bias if int(token) >= vocabulary]:
            raise Refused("logit_bias", f"the model's {vocabulary} tokens have no {', '.join(beyond)}")
        asked["sequence_bias"] = {(int(token),): float(much) for token, much in bias.items()}
    if stop := body.get("stop"):
        asked["stop_strings"] = [stop] if isinstance(stop, str) else list(stop)
    given = [name for name in LENGTHS if name in body]
    if len({body[name] for name in given}) > 1:
        raise Refused(given[1], f"{body[given[1]]} contradicts {given[0]}; give one of them")
    if given:
        asked["max_new_tokens"] = body[given[0]]
    for name, value in named.items():
        if asked.get(name, value) != value:
            raise Refused(f"generation_config.{name}", f"{value!r} contradicts another field; give one of them")
    for name, value in {**named, **asked}.items():
        if (name, value) != ("temperature", 0) or name in named:
            setattr(config, name, value)
    try:  # transformers warns of what it leaves out, and goes on
        GenerationConfig(**{**named, "do_sample": bool(config.do_sample)}).validate(strict=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise refused_config(named, error) from error
    if not longropes_of(model):  # whose text pieces would change
        config.prefill_chunk_size = min(config.prefill_chunk_size or PIECE_TOKENS, PIECE_TOKENS)
    return config, named


def _sampling(body: Json, named: Json, vocabulary: int) -> Json:
    """Fields of a config by which a request samples, or does not."""
    floats = ("temperature", "top_p", "min_p", "repetition_penalty")
    asked: Json = {name: float(body[name]) for name in floats if name in body}
    if "top_k" in body:
        asked["top_k"] = min(max(0, body["top_k"]), vocabulary)  # which may be beyond C++'s integers
    if "temperature" in body:
        asked["do_sample"] = body["temperature"] != 0
    elif any(name in body for name in ("top_p", "top_k", "min_p")) and "do_sample" not in named:
        asked["do_sample"] = True
    return asked


def _arguments(given: str) -> Json:
    """The fields that ``generation_config`` names, a JSON string as transformers writes it.

    Raises:
        Refused: no JSON, or arguments that would do nothing or are refused.
    """
    try:
        arguments = json.loads(given, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused("generation_config", f"no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise Refused("generation_config", f"expected a JSON object, got {given[:60]!r}")
    fields.ARGUMENT.check("generation_config", arguments)
    found = {}
    defaults = GenerationConfig().to_dict()
    for name, value in arguments.items():
        unknown = "" if name in CONFIG_FIELDS else f"transformers has no argument {name}"
        why, neutral = REFUSED.get(name, (unknown, ()))
        if name in HONOURED and name not in _SERVER_SAYS:
            if value is not None and name in fields.ARGUMENTS:
                fields.ARGUMENTS[name](f"generation_config.{name}", value)
            found[name] = value
        elif value is not None and value not in neutral and value != defaults.get(name) and name not in _BOOKKEEPING:
            raise Refused(f"generation_config.{name}", f"not served: {why or 'it does nothing here'}; leave it out")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def refused_config(named: Iterable[str], error: Exception) -> Refused:
    """The refusal of what ``generation_config`` names, by the argument that transformers' error speaks of."""
    message = one_line(error)
    spoken = [name for name in named if re.search(rf"\b{name}\b", message)] or list(named)
    at = f".{spoken[0]}" if len(spoken) == 1 or len(spoken) < len(list(named)) else ""
    return Refused(f"generation_config{at}", message)
