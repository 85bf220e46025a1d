"""The border of draft sources of one's own: what one declares is checked where it is given, then its first proposal.

The classes of this package are not checked: their proposals come from its ops, which read any values without harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gsd_kernels import Frontier
from gsd_kernels.ops.line import Line

from ..model.facts import Facts
from ..model.hidden import why_no_states
from ..model.properties import text_config
from .base import DraftSource, Level, Proposal

ROUNDING_LOG_PROB = 0.01  # above 0, of a log-probability: what half precision makes of a probability of 1
PROPOSAL = Line("node_ids[B,W] tokens:ids[B,W,K] log_probs:float[B,W,K] index?:ids[B,W]")


def is_own(source: DraftSource) -> bool:
    """Return whether the class of a source is one of this package."""
    return type(source).__module__.partition(".")[0] == __name__.partition(".")[0]


def check_source(source: DraftSource, reserved: Sequence[str]) -> None:
    """Raise unless what a source declares can be read; ``reserved`` names are those of this package's sources.

    Raises:
        TypeError, ValueError: the attribute, what was expected, what it is.
    """
    kind = type(source).__name__
    if not isinstance(source.name, str) or not source.name:
        raise TypeError(f"draft_sources: {kind}.name: expected a name, got {source.name!r}")
    where = f"draft_sources: {source.name}: "
    if source.name in reserved:
        raise ValueError(f"{where}the name of a source of this package; give {kind} a name of its own")
    forwards = source.forwards
    if not isinstance(forwards, (tuple, list)) or not all(isinstance(m, nn.Module) for m in forwards):
        raise TypeError(f"{where}forwards: expected a tuple of torch modules, got {shown(forwards)}; () for none")
    if not numbers_in(source.shares, most=1.0):
        raise ValueError(
            f"{where}shares: expected a tuple of weights from 0 to 1, at least one, got {shown(source.shares)}"
        )
    ratios = source.reliability
    if ratios is not None and (not numbers_in(ratios, most=math.inf) or len(ratios) != len(source.shares)):
        raise ValueError(f"{where}reliability: expected a ratio for each share, or None, got {shown(ratios)}")


def check_hidden_layers(source: DraftSource, target: PreTrainedModel) -> None:
    """Raise unless the target has the hidden states that a source asks for.

    Raises:
        ValueError: the source, what it asks for and what there is.
    """
    layers, last = source.hidden_layers, int(text_config(target).num_hidden_layers)
    if not isinstance(layers, (tuple, list)) or not all(type(i) is int and -1 <= i <= last for i in layers):
        raise ValueError(
            f"draft_sources: {source.name}: hidden_layers: expected a tuple of numbers from −1 to {last}, since the "
            f"target has {last} layers, got {shown(layers)}"
        )
    reason = Facts.of(target).proved(("hidden states", tuple(layers)), lambda: why_no_states(target, layers))
    if reason is not None:
        raise ValueError(f"draft_sources: {source.name} reads hidden states, and {reason}; not supported")


def numbers_in(values: Any, *, most: float) -> bool:
    """Return whether ``values`` are finite numbers from 0 to ``most``, at least one."""
    if not isinstance(values, (tuple, list)) or not values:
        return False
    return all(isinstance(value, (int, float)) and math.isfinite(value) and 0 <= value <= most for value in values)


def shown(value: object) -> str:
    """``value`` as an error says it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def ask(source: DraftSource, level: Level, vocab_size: int, checked: set[str]) -> Proposal | None:
    """Ask a source for its proposal at a level; of one's own check the first of a session, and copy each.

    Later ones are not looked at, for that would wait for the device: the ops read any values without harm, and take NaN
    for no candidate and what is above 0 for 0.

    Args:
        source: to be asked.
        level: of a step.
        vocab_size: of the target.
        checked: names of the sources whose first proposal was looked at; filled here.

    Raises:
        TypeError, ValueError: no proposal: the source, what was expected, what came and the cure.
    """
    if is_own(source):
        return source.propose(level)
    # What is merged is not theirs to write.
    frontier = Frontier(*(tensor.clone() for tensor in level.frontier.tensors()))
    proposal = source.propose(replace(level, frontier=frontier))
    if proposal is None:
        return None
    if source.name not in checked:
        try:
            check_proposal(proposal, level, vocab_size)
        except (TypeError, ValueError) as error:
            raise type(error)(f"draft_sources: {source.name}: {error}") from None
        checked.add(source.name)
    index = proposal.index
    # A source may write its tensors again: what it proposed is learned from behind the step.
    return Proposal(
        proposal.tokens.detach().clone(),
        proposal.log_probs.detach().nan_to_num(-torch.inf, 0.0),
        None if index is None else index.detach().clone(),
        proposal.rows,
    )


def check_proposal(proposal: object, level: Level, vocab_size: int) -> None:
    """Raise unless a proposal is as a level asks for it. It may wait for the device.

    Raises:
        TypeError, ValueError: what was expected, what came and the cure.
    """
    if not isinstance(proposal, Proposal):
        expected = "propose to return a Proposal, or None for nothing at this level"
        raise TypeError(f"expected {expected}, got {type(proposal).__name__}; return Proposal(tokens, log_probs)")
    if not isinstance(proposal.rows, int):
        raise TypeError(f"rows: expected how many were forwarded, got {shown(proposal.rows)}")
    nodes, tokens, log_probs, index = level.frontier.node_ids, proposal.tokens, proposal.log_probs, proposal.index
    try:
        PROPOSAL.check(nodes, tokens, log_probs, index)
    except (TypeError, ValueError) as error:
        cure = "propose int32 tokens and float32 log_probs, K of each after every frontier node"
        raise type(error)(f"{error}; {cure}") from None
    if any(part is not None and part.layout is not torch.strided for part in (tokens, log_probs, index)):
        raise TypeError("expected dense tensors, got sparse ones; convert them by to_dense()")
    tokens, log_probs = tokens[..., : level.graph.branch], log_probs[..., : level.graph.branch].float()
    counts = (nodes >= 0)[..., None] & (tokens != -1) & (log_probs != -torch.inf)
    ids, none = f"token ids from −1 to {vocab_size - 1}", "and token −1, or −inf, for none"
    for wrong, values, expected, cure in (
        ((tokens < -1) | (tokens >= vocab_size), tokens, ids, "ids of the target's tokenizer"),
        (~(log_probs <= ROUNDING_LOG_PROB), log_probs, "log-probabilities of at most 0", "log_softmax of logits"),
    ):
        for at in map(tuple, (counts & wrong).nonzero().tolist()):
            got = f"{values[at].item()} after node {at[1]} of level {level.number}"
            raise ValueError(f"expected {expected}, got {got}; propose {cure}, {none}")
