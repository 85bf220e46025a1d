"""A checked request as the decoding takes it: transformers' config, processors, and what to record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from gsd_kernels_hf.model import properties
from gsd_kernels_hf.model.sides import longropes_of
from gsd_kernels_hf.validate import CONFIG_FIELDS, HONOURED, REFUSED

from . import fields
from .checks import Refused, is_whole
from .limits import Limits
from .processors import Marked, Penalties

DEFAULT_TOKENS = 1024
"""Tokens of a text whose request does not say how many."""

PIECE_TOKENS = 2048
"""Tokens of a prompt that are read at once: memory, and how soon a text can end that nobody waits for."""

LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

_BOOKKEEPING = ("transformers_version", "_from_model_config", "_commit_hash")
_SERVER_SAYS = ("num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits")


@dataclass
class TextOptions:
    """The part of a request that all its texts have in common.

    Attributes:
        config: transformers' options.
        length: what named the length; ``None``: nothing.
        source: the field of the prompt.
        positions: of the model; ``None``: it does not say.
        most: tokens of a prompt.
        seed: of the first text; ``None``: new ones.
        top: likeliest tokens to record with their log-probabilities; ``None``: no log-probabilities.
        penalties: of frequency and presence.
        held: the JSON schema that a text is held to, and the field that asks for it; ``None``: it is free.
        grammar: that schema, compiled.
        reference: tokens that the texts may repeat, or ``None``.
        named: what ``generation_config`` names: what ``generate`` then refuses is its.
        ends: tokens that end a text.
        echoes: whether log-probabilities of the prompt are told as well.
        pieces: whether a prompt may be read in pieces: with ``longrope`` they would change the text.
        forced: the function that a text calls; ``""``: one that it names; ``None``: it is no forced call.
    """

    config: GenerationConfig
    length: str | None
    source: str
    positions: int | None
    most: int
    seed: int | None = None
    top: int | None = None
    penalties: tuple[float, float] = (0.0, 0.0)
    held: tuple[Any, str] | None = None
    grammar: Any = None
    reference: list[int] | None = None
    named: tuple[str, ...] = ()
    ends: list[int] = field(default_factory=list)
    echoes: bool = False
    pieces: bool = True
    forced: str | None = None

    @property
    def is_content(self) -> bool:
        """Return whether the whole text is JSON by a grammar: content, whatever the prompt has begun."""
        return self.forced is not None or (self.held is not None and not isinstance(self.held[0], Marked))

    def fitted(self, prompt: int) -> GenerationConfig:
        """The config of a text behind ``prompt`` tokens; where no length is named, it ends where the positions do.

        A named length goes beyond them, as ``generate`` does.

        Raises:
            Refused: no length is named, and the prompt leaves no room; or it is beyond the server's bound.
        """
        config = deepcopy(self.config)
        if self.pieces:
            config.prefill_chunk_size = min(config.prefill_chunk_size or PIECE_TOKENS, PIECE_TOKENS)
        unnamed = self.positions is not None and self.length is None
        if unnamed and prompt >= self.positions:
            reason = f"{prompt} tokens leave no room in the model's {self.positions} positions"
            raise Refused(self.source, f"{reason}; shorten it, or name a length to go beyond them")
        if prompt > self.most:
            raise Refused(self.source, f"{prompt} tokens; this server reads {self.most} (--max-prompt): shorten it")
        if not unnamed:
            return config
        config.max_new_tokens = min(config.max_new_tokens, self.positions - prompt)
        return config

    def processors(self, prompt: int) -> list[LogitsProcessor]:
        """New ones, for one text behind ``prompt`` tokens."""
        found: list[LogitsProcessor] = [Penalties(prompt, *self.penalties)] if any(self.penalties) else []
        if self.grammar is not None:
            from xgrammar.contrib.hf import LogitsProcessor as Grammar

            found.append(Grammar(self.grammar))
        return found


def text_options(body: Mapping[str, Any], model: PreTrainedModel, source: str, limits: Limits) -> TextOptions:
    """Make of a checked request what the decoding takes, but for grammar, log-probabilities and reference.

    Raises:
        Refused: fields that contradict each other, or a token that the model does not have.
    """
    config = deepcopy(model.generation_config)
    named = _arguments(body["generation_config"]) if "generation_config" in body else {}
    for name, value in named.items():
        setattr(config, name, value)
    vocabulary = properties.vocabulary(model)
    _sampling(config, body, named, vocabulary)
    if body.get("logit_bias"):
        if beyond := [token for token in body["logit_bias"] if int(token) >= vocabulary]:
            raise Refused("logit_bias", f"the model's {vocabulary} tokens have no {', '.join(beyond)}")
        config.sequence_bias = {(int(token),): float(much) for token, much in body["logit_bias"].items()}
    if body.get("stop"):
        config.stop_strings = [body["stop"]] if isinstance(body["stop"], str) else list(body["stop"])
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    length = _length(config, body, named)
    for name, value in named.items():
        unread = name == "temperature" and body.get("temperature", value) != value
        if unread or getattr(config, name) != value:
            raise Refused(f"generation_config.{name}", f"{value!r} contradicts another field; give one of them")
    _check_named(named, bool(config.do_sample))
    positions = properties.positions(model)
    return TextOptions(
        config,
        length,
        source,
        positions,
        limits.tokens(positions),
        seed=body.get("seed"),
        named=tuple(named),
        pieces=not longropes_of(model),
        penalties=(float(body.get("frequency_penalty", 0)), float(body.get("presence_penalty", 0))),
        ends=[int(end) for end in ends if end is not None],
    )


def _sampling(config: GenerationConfig, body: Mapping[str, Any], named: Mapping[str, Any], vocabulary: int) -> None:
    if body.get("temperature"):
        config.temperature = float(body["temperature"])
    for name in ("top_p", "min_p", "repetition_penalty"):
        if name in body:
            setattr(config, name, float(body[name]))
    if "top_k" in body:
        config.top_k = min(max(0, body["top_k"]), vocabulary)  # which may be beyond C++'s integers
    if "temperature" in body:
        config.do_sample = body["temperature"] != 0
    elif any(name in body for name in ("top_p", "top_k", "min_p")) and "do_sample" not in named:
        config.do_sample = True


def _length(config: GenerationConfig, body: Mapping[str, Any], named: Mapping[str, Any]) -> str | None:
    """Set the length; the field that named it."""
    given = [name for name in LENGTHS if name in body]
    if len({body[name] for name in given}) > 1:
        raise Refused(given[1], f"{body[given[1]]} contradicts {given[0]}; give one of them")
    if given:
        config.max_new_tokens = body[given[0]]
        return given[0]
    if "max_new_tokens" in named or "max_length" in named:
        return "generation_config"
    config.max_new_tokens = max(config.max_new_tokens or 0, DEFAULT_TOKENS)
    return None


def _arguments(given: str) -> dict[str, Any]:
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


def _check_named(named: Mapping[str, Any], samples: bool) -> None:
    """Have transformers judge what ``generation_config`` names: it warns of what it leaves out, and goes on.

    Raises:
        Refused: out of bounds, of another type, or without an effect.
    """
    try:
        GenerationConfig(**{**named, "do_sample": samples}).validate(strict=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise refused_config(named, error) from error


def refused_config(named: Iterable[str], error: Exception) -> Refused:
    """The refusal of what ``generation_config`` names, by the argument that transformers' error speaks of."""
    message = " ".join(str(error).split()) or type(error).__name__
    spoken = [name for name in named if re.search(rf"\b{name}\b", message)] or list(named)
    at = f".{spoken[0]}" if len(spoken) == 1 or len(spoken) < len(list(named)) else ""
    return Refused(f"generation_config{at}", message)


def token_ids(given: list[Any], name: str, vocabulary: int) -> list[int]:
    """A prompt of token ids, checked.

    Raises:
        Refused: not all are the model's.
    """
    if odd := [token for token in given if not is_whole(token) or not 0 <= token < vocabulary]:
        raise Refused(name, f"expected token ids from 0 to {vocabulary - 1}, got {odd[0]!r}")
    return given
