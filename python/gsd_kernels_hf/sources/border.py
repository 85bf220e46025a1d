"""The border of draft sources of one's own: what one declares is checked where it is given, then its first proposal.

The classes of this package are not checked: their proposals come from its ops, which read any values without harm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import Frontier

from ..model.facts import Facts
from ..model.hidden import why_no_states
from ..model.properties import text_config
from .base import DraftSource, Level, Proposal

ROUNDING_LOG_PROB = 0.01  # above 0, of a log-probability: what half precision makes of a probability of 1
TOKEN_TYPES = (torch.int32, torch.int64)


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
    known = isinstance(layers, (tuple, list))
    if not known or not all(type(layer) is int and -1 <= layer <= last for layer in layers):
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


class Border:
    """Asks sources; of one's own it checks the first proposal of a session, and copies each.

    Later ones are not looked at, for that would wait for the device: the ops read any values without harm, and take NaN
    for no candidate and what is above 0 for 0.

    Args:
        sources: of a session.
        vocab_size: of the target.
    """

    def __init__(self, sources: Sequence[DraftSource], vocab_size: int) -> None:
        self.foreign = {source.name for source in sources if not is_own(source)}
        self.unchecked = set(self.foreign)
        self.vocab_size = vocab_size

    def ask(self, source: DraftSource, level: Level) -> Proposal | None:
        """Ask ``source`` for its proposal at a level, in storage of its own where the source is a user's.

        Raises:
            TypeError, ValueError: no proposal: the source, what was expected, what came and the cure.
        """
        if source.name not in self.foreign:
            return source.propose(level)
        # What is merged is not theirs to write.
        frontier = Frontier(*(tensor.clone() for tensor in level.frontier.tensors()))
        proposal = source.propose(replace(level, frontier=frontier))
        if proposal is None:
            return None
        if source.name in self.unchecked:
            for kind, fault in faults(proposal, level, self.vocab_size):
                raise kind(f"draft_sources: {source.name}: {fault}")
            self.unchecked.remove(source.name)
        tokens, log_probs, index = proposal.tokens, proposal.log_probs, proposal.index
        # A source may write its tensors again: what it proposed is learned from behind the step.
        return Proposal(
            tokens.detach().clone(),
            log_probs.detach().nan_to_num(-torch.inf, 0.0),
            None if index is None else index.detach().clone(),
            proposal.rows,
        )


def faults(proposal: object, level: Level, vocab_size: int) -> Iterator[tuple[type[Exception], str]]:
    """Say what of a proposal is not as a level asks for it, with the cure: the first alone, on which others rely.

    It may wait for the device.
    """
    if not isinstance(proposal, Proposal):
        expected = "propose to return a Proposal, or None for nothing at this level"
        yield TypeError, f"expected {expected}, got {type(proposal).__name__}; return Proposal(tokens, log_probs)"
        return
    if not isinstance(proposal.rows, int):
        yield TypeError, f"rows: expected how many were forwarded, got {shown(proposal.rows)}"
    nodes, tokens, log_probs, index = level.frontier.node_ids, proposal.tokens, proposal.log_probs, proposal.index
    batch, width = nodes.shape
    most = tokens.shape[-1] if isinstance(tokens, Tensor) and tokens.dim() else 0
    each = f"[{batch}, {width}, K], K candidates after every frontier node, of tokens and log_probs alike"
    for part, tensor, shape, expected in (
        ("tokens", tokens, (batch, width, most), each),
        ("log_probs", log_probs, (batch, width, most), each),
        ("index", nodes if index is None else index, (batch, width), f"[{batch}, {width}], of the nodes"),
    ):
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            got = type(tensor).__name__ if not isinstance(tensor, Tensor) else f"one of layout {tensor.layout}"
            yield TypeError, f"{part}: expected a dense tensor, got {got}"
        floats = part == "log_probs"
        if not (tensor.dtype.is_floating_point if floats else tensor.dtype in TOKEN_TYPES):
            kinds, cast = ("a float dtype", "float()") if floats else ("int32 or int64", "int()")
            got = str(tensor.dtype).removeprefix("torch.")
            yield TypeError, f"{part}: expected {kinds}, got {got}; cast it by {cast}"
        if tensor.device != nodes.device:
            cure = "move it to level.frontier.node_ids.device"
            yield ValueError, f"{part}: expected a tensor on {nodes.device}, got one on {tensor.device}; {cure}"
        if tensor.shape != shape:
            yield ValueError, f"{part}: expected shape {expected}, got {list(tensor.shape)}"
    tokens, log_probs = tokens[..., : level.graph.branch], log_probs[..., : level.graph.branch].float()
    counts = (nodes >= 0)[..., None] & (tokens != -1) & (log_probs != -torch.inf)
    below, none = "log-probabilities of at most 0", "propose −inf, or token −1, for none"
    taken = "propose log-probabilities: log_softmax of logits, log of probabilities"
    ids, cure = f"token ids from −1 to {vocab_size - 1}", "propose ids of the target's tokenizer, and −1 for none"
    for wrong, values, expected, mended in (
        ((tokens < -1) | (tokens >= vocab_size), tokens, ids, cure),
        (log_probs.isnan(), log_probs, below, none),
        (log_probs > ROUNDING_LOG_PROB, log_probs, below, taken),
    ):
        for at in map(tuple, (counts & wrong).nonzero().tolist()):
            value = f"token {values[at].item()}" if values is tokens else f"{values[at].item():g}"
            where = f"after node {at[1]} of level {level.number}"
            yield ValueError, f"expected {expected}, got {value} {where}; {mended}"
