"""Prompts of more than tokens: images, videos, sounds. The model's own forward reads them, rows of graphs follow.

What a prompt has beside its tokens acts in the forward that reads it: as embeddings in the place of tokens, states that
are added in some layers, rotary positions of several axes, attention in both directions inside an image. So that
forward is the one that transformers' ``generate`` makes, all of the prompt at once. What follows is text, at the
positions behind the prompt's last one. Nothing here knows a family by name: before rows serve a model behind such a
prompt, its logits there have been compared with those of transformers' own steps, see :func:`check_inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from . import proof
from .facts import Facts
from .hidden import LAST, kept, listening
from .modes import LEAVE_OUT, OTHERWISE, Unsupported
from .properties import CACHES, cache_argument, logits_alone
from .runner import Listener, RowModel
from .sides import longropes_of

BY_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs [..., B, P] that transformers cuts where it cuts tokens."""
TAIL = len(proof.TEXT) - 1  # tokens that a proof appends
NAMED = ("_token_id", "_token_index")
"""What configs' names of tokens end in."""


@dataclass(frozen=True)
class PromptInputs:
    """A prompt that has more than tokens, as transformers' ``generate`` prepared it.

    Attributes:
        input_ids: int64 [B, P], left-padded, placeholders of images and the like included.
        kwargs: model inputs beside them, without a cache.
        unread: names of those that a text has none of.
    """

    input_ids: Tensor
    kwargs: Mapping[str, Any]
    unread: tuple[str, ...]

    @classmethod
    def of(cls, input_ids: Tensor, model_kwargs: Mapping[str, Any], unread: tuple[str, ...]) -> PromptInputs:
        """The inputs of a call; its own cache, which is empty, is not used."""
        kept = {name: value for name, value in model_kwargs.items() if name not in CACHES}
        return cls(input_ids, {**kept, "use_cache": True}, unread)

    @property
    def axes(self) -> tuple[int, ...]:
        """The dimensions of the model's positions before [B, P]: nothing, or a number of axes."""
        positions = self.kwargs.get("position_ids")
        return () if positions is None else tuple(positions.shape[:-2])

    def ahead(self, kv_start: Tensor) -> Tensor:
        """How far the positions behind the prompt are ahead of those of tokens, int64 [*axes, B, 1].

        kv_start: int32 [B], left padding.
        """
        text = self.input_ids.shape[1] - 1 - kv_start.long()  # of the last token
        positions = self.kwargs.get("position_ids")
        last = text if positions is None else positions[..., -1].to(text.device)
        return (last - text).expand(*self.axes, len(text))[..., None]

    def read(self, model: PreTrainedModel, cache: Cache, **kwargs: Any) -> Any:
        """The model's output of a prompt's forward, which fills ``cache``."""
        given = {**self.again(), cache_argument(model): cache}
        prepared = model.prepare_inputs_for_generation(self.input_ids, is_first_iteration=True, **given)
        return model(**{**prepared, **kwargs, **logits_alone(model)}, return_dict=True)

    def shorter(self) -> PromptInputs:
        """Without the last token, which is one of text."""
        cut = {name: value[..., :-1] for name, value in self.kwargs.items() if name in BY_TOKEN and value is not None}
        return replace(self, input_ids=self.input_ids[:, :-1], kwargs={**self.kwargs, **cut})

    def again(self) -> dict[str, Any]:
        """The inputs of one forward: it may put its own into dicts."""
        return {name: dict(v) if isinstance(v, dict) else v for name, v in self.kwargs.items()}


class RowsBehindInputs(RowModel):
    """Rows behind prompts of more than tokens.

    Nothing of such a text is used for another one: images are no part of its tokens.

    Args:
        given, options: as of :class:`RowModel`.
        axes: see :attr:`PromptInputs.axes`.

    Attributes:
        inputs: of the text being written.
        ahead: see :meth:`PromptInputs.ahead`.
    """

    ahead: Tensor
    inputs: PromptInputs | None = None

    def __init__(self, *given: Any, axes: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(*given, **options)
        self.ahead = torch.zeros(*axes, len(self.kv_start), 1, dtype=torch.int64, device=self.device)
        self.why_modules = "the prompt has more than tokens, which the operator does not read"

    def holds(self, tokens: Tensor, lengths: Tensor) -> None:
        """After a text: nothing for another one."""
        self.inputs = None

    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None, chunk: int | None, listener: Listener | None = None
    ) -> None:
        """Cache the prompt, all of it at once.

        Its last token is read again, as the first row of a graph, but where a recurrent state would hold it twice:
        attention in both directions may reach it, as it does where transformers reads the prompt.
        """
        assert self.inputs is not None
        self.ahead.copy_(self.inputs.ahead(self.kv_start))
        inputs, model, end = self.inputs, self.model, None if self.recurrent else -1
        if self.recurrent:
            inputs, model = inputs.shorter(), self.stepping
        keep, length = 2 if LAST in self.hidden_layers and end else 1, inputs.input_ids.shape[1]
        self.cache.padding = inputs.kwargs.get("attention_mask")
        with listening(model, self.hidden_layers) as hidden:
            inputs.read(model, self.cache, logits_to_keep=kept(keep, length, self.hidden_layers, model))
        self.cache.advance(length)
        if listener is not None:
            listener({layer: states[:, :end] for layer, states in hidden.items()}, 0)


def check_inputs(facts: Facts, inputs: PromptInputs, kv_start: Tensor) -> None:
    """Raise unless rows behind such a prompt are what the model computes there.

    The first prompt with these inputs is read twice, once by transformers' own steps with a few tokens behind it, once
    here with the same tokens as rows of a tree. What is found holds until the model's structure is another one. The
    prompt's last token is read as a word by the first row: one that configs name, as what stands for an image is, has a
    proof of its own.

    Args:
        facts: of the target.
        inputs: of the call.
        kv_start: int32 [B], left padding.

    Raises:
        Unsupported: the logits differ, there are none, or positions or ranks are of a kind that is not served.
    """
    whose = "with longrope" if longropes_of(facts) else None
    if getattr(facts.model, "_device_mesh", None) is not None:
        whose = "that is sharded among ranks"
    if whose is not None:
        raise Unsupported(f"{inputs.unread[0]}: not supported of a model {whose}; {LEAVE_OUT}")
    kv_start = kv_start.to(facts.device)
    parts = {name: inputs.kwargs.get(name) for name in inputs.unread}  # images, videos, sounds
    kinds = ((name, *sorted(value)) if isinstance(value, dict) else name for name, value in parts.items())
    way = check_inputs, *kinds, inputs.axes, inputs.kwargs.get("attention_mask") is not None
    named = {v for config in facts.configs for k, v in vars(config).items() if k.endswith(NAMED) and isinstance(v, int)}
    last = sorted(named.intersection(inputs.input_ids[:, -1].tolist()))
    end = f" where prompts end in {last}, which is no word" if last else ""
    own = partial(_own, inputs=inputs)
    ours = partial(_ours, inputs=inputs, kv_start=kv_start)
    difference = facts.proved((*way, end), lambda: proof.difference(facts, ours, own, own))
    if difference is not None:
        raise Unsupported(
            f"{', '.join(inputs.unread)}: {type(facts.model).__name__} cannot be forwarded with graph rows behind "
            f"it{end}, since {difference.what}; not supported by graph-speculative generation{OTHERWISE}"
        ) from difference.cause


def _tail(facts: Facts, inputs: PromptInputs) -> Tensor:
    """Tokens behind the prompt, int64 [B, TAIL]."""
    ids = proof.text(facts)[:1, :TAIL]
    return ids.expand(len(inputs.input_ids), -1).to(inputs.input_ids.device)


def _own(facts: Facts, inputs: PromptInputs) -> Tensor:
    """Logits as transformers computes them of the prompt and of each token behind it, [B, 1 + TAIL, V]."""
    model, ids = facts.model, inputs.input_ids
    cache = DynamicCache(config=model.config)
    kwargs = {**inputs.again(), cache_argument(model): cache}
    output = inputs.read(model, cache)
    logits = [output.logits[:, -1:]]
    for token in _tail(facts, inputs).T:
        kwargs = model._update_model_kwargs_for_generation(output, kwargs, is_encoder_decoder=False)
        ids = torch.cat([ids, token[:, None]], 1)
        prepared = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        output = model(**{**prepared, **logits_alone(model)}, return_dict=True)
        logits.append(output.logits[:, -1:])
    return torch.cat(logits, 1)


def _ours(facts: Facts, inputs: PromptInputs, kv_start: Tensor) -> Tensor:
    """The same through rows of a tree behind the prompt."""
    length = inputs.input_ids.shape[1]
    rows = RowsBehindInputs(facts, length + len(proof.PARENTS), kv_start, "auto", axes=inputs.axes)
    rows.inputs = inputs
    rows.read(inputs.input_ids, None, None)
    tail = torch.cat([inputs.input_ids[:, -1:], _tail(facts, inputs)], 1).to(kv_start.device)  # [B, 1 + TAIL]
    return proof.logits_of_path(rows, tail, torch.full_like(kv_start, length - 1))
