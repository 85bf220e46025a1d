"""The border of draft sources of one's own: what one declares is checked where it is given, what it proposes at once.

The classes of this package are not checked: their proposals come from its ops, which read any values without harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import Frontier

from ..model.facts import Facts
from ..model.hidden import why_no_states
from ..model.properties import text_config
from .base import DraftSource, Level, OwnSource, Proposal

ROUNDING_LOG_PROB = 0.01  # above 0, of a log-probability: what half precision makes of a probability of 1
TOKEN_TYPES = (torch.int32, torch.int64)
REPLACED = {
    "costs_forward": "declare forwards, the modules that it runs; without them it costs no forward",
    "models": "declare them in forwards, a tuple of the modules that it runs",
    **dict.fromkeys(("begin", "restart", "prepare"), "attach(text) starts every text"),
    "num_rows": "say it in Proposal.rows",
}
FAULTS = ("nothing", "a token id that the target does not have", "NaN", "a log-probability above 0")
"""What is wrong with a candidate, by number."""

CURES = (
    "",
    "propose ids of the target's tokenizer, and −1 for none",
    "propose −inf, or token −1, for none",
    "propose log-probabilities: log_softmax of logits, log of probabilities",
)


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
    for attribute, cure in REPLACED.items():
        if hasattr(source, attribute) and not isinstance(source, OwnSource):
            raise TypeError(f"{where}{attribute} is no longer an attribute of draft sources; {cure}")
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
    """Checks what sources of one's own propose, and copies it.

    Where the host may wait for the device a fault raises at once. On a GPU it is marked on the device, read with the
    step's one host read, and until then the candidate counts as none.

    Args:
        sources: of a session.
        vocab_size: of the target.
        faults: int32 [B], for the first fault of every sequence, 0 for none; ``None``: faults raise at once.
    """

    def __init__(self, sources: Sequence[DraftSource], vocab_size: int, faults: Tensor | None) -> None:
        self.foreign = [source.name for source in sources if not is_own(source)]
        self.vocab_size = vocab_size
        self.faults = faults if self.foreign else None

    def restart(self) -> None:
        """Forget the faults of the last text."""
        if self.faults is not None:
            self.faults.zero_()

    def ask(self, source: DraftSource, level: Level) -> Proposal | None:
        """Ask ``source`` for its proposal at a level, in storage of its own where the source is a user's.

        Raises:
            TypeError, ValueError: no proposal: the source, what was expected, what came and the cure.
        """
        if source.name not in self.foreign:
            return source.propose(level)
        frontier = Frontier(*(tensor.clone() for tensor in level.frontier.tensors()))
        proposal = source.propose(replace(level, frontier=frontier))
        if proposal is None:
            return None
        check_tensors(source.name, proposal, level)
        return replace(self._values(source.name, proposal, level), rows=proposal.rows)

    def _values(self, name: str, proposal: Proposal, level: Level) -> Proposal:
        """A copy of a proposal of the right shapes, as many candidates as the graph takes, without those of no meaning.

        Raises:
            ValueError: a candidate has no meaning, and the host may wait for the device.
        """
        branch = level.graph.branch
        tokens, log_probs = proposal.tokens.detach()[..., :branch], proposal.log_probs.detach()[..., :branch].float()
        index = None if proposal.index is None else proposal.index.detach().to(torch.int32, copy=True)
        if not tokens.numel():
            return Proposal(tokens.int(), log_probs, index)
        fault = self._faults(tokens, log_probs, level)
        if self.faults is not None:
            first = fault.amax((1, 2)) + 4 * self.foreign.index(name) * fault.any(2).any(1)
            self.faults.copy_(torch.where(self.faults > 0, self.faults, first))
        elif bool(fault.any()):
            self._explain(name, tokens, log_probs, fault, level)
        none = (fault > 0) | (tokens < 0) | (tokens >= self.vocab_size) | log_probs.isnan()
        tokens, log_probs = torch.where(none, -1, tokens), torch.where(none, -torch.inf, log_probs.clamp(max=0.0))
        return Proposal(tokens.to(torch.int32, copy=True), log_probs.contiguous(), index)

    def _faults(self, tokens: Tensor, log_probs: Tensor, level: Level) -> Tensor:
        """Number of what is wrong with each candidate, int32 [B, W, K]; 0: nothing, or it counts for nothing."""
        counts = (level.frontier.node_ids >= 0)[..., None] & (tokens != -1) & (log_probs != -torch.inf)
        fault = torch.where(log_probs.isnan(), 2, torch.where(log_probs > ROUNDING_LOG_PROB, 3, 0))
        fault = torch.where((tokens < -1) | (tokens >= self.vocab_size), 1, fault)
        return torch.where(counts, fault, 0).to(torch.int32)

    def _explain(self, name: str, tokens: Tensor, log_probs: Tensor, faults: Tensor, level: Level) -> None:
        at = tuple(faults.nonzero()[0].tolist())
        fault = int(faults[at])
        value = f"token {int(tokens[at])}" if fault == 1 else f"{float(log_probs[at]):g}"
        raise ValueError(self._message(name, fault, f"{value} after node {at[1]} of level {level.number}"))

    def _message(self, name: str, fault: int, got: str) -> str:
        expected = f"token ids from −1 to {self.vocab_size - 1}" if fault == 1 else "log-probabilities of at most 0"
        return f"draft_sources: {name}: expected {expected}, got {got}; {CURES[fault]}"

    def check(self, faults: Sequence[int]) -> None:
        """Raise for the first of a step's ``faults`` [B], as the host has read them.

        Raises:
            ValueError: the source and what was wrong.
        """
        for fault in faults:
            if fault:
                raise ValueError(self._message(self.foreign[fault // 4], fault % 4, FAULTS[fault % 4]))


def check_tensors(name: str, proposal: object, level: Level) -> None:
    """Raise unless a proposal has tensors of the types and shapes that a level asks for.

    Raises:
        TypeError, ValueError: the source, what was expected and what came.
    """
    where = f"draft_sources: {name}: "
    if not isinstance(proposal, Proposal):
        raise TypeError(
            f"{where}expected propose to return a Proposal, or None for nothing at this level, got "
            f"{type(proposal).__name__}; return Proposal(tokens, log_probs)"
        )
    if not isinstance(proposal.rows, int):
        raise TypeError(f"{where}rows: expected how many were forwarded, got {shown(proposal.rows)}")
    nodes = level.frontier.node_ids
    parts = {"tokens": proposal.tokens, "log_probs": proposal.log_probs, "index": proposal.index}
    for part, tensor in parts.items():
        if part == "index" and tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            got = type(tensor).__name__ if not isinstance(tensor, Tensor) else f"one of layout {tensor.layout}"
            raise TypeError(f"{where}{part}: expected a dense tensor, got {got}")
        floats = part == "log_probs"
        if not (tensor.dtype.is_floating_point if floats else tensor.dtype in TOKEN_TYPES):
            expected, cast = ("a float dtype", "float()") if floats else ("int32 or int64", "int()")
            raise TypeError(f"{where}{part}: expected {expected}, got {dtype_of(tensor)}; cast it by {cast}")
        if tensor.device != nodes.device:
            raise ValueError(
                f"{where}{part}: expected a tensor on {nodes.device}, got one on {tensor.device}; move it to "
                "level.frontier.node_ids.device"
            )
    batch, width = nodes.shape
    tokens, log_probs, index = parts.values()
    if tokens.dim() != 3 or tokens.shape[:2] != nodes.shape:
        raise ValueError(
            f"{where}tokens: expected shape [{batch}, {width}, K], K candidates after every frontier node, got "
            f"{list(tokens.shape)}"
        )
    if log_probs.shape != tokens.shape:
        raise ValueError(
            f"{where}log_probs: expected shape {list(tokens.shape)} as of tokens, got {list(log_probs.shape)}"
        )
    if index is not None and index.shape != nodes.shape:
        raise ValueError(f"{where}index: expected shape [{batch}, {width}], of the nodes, got {list(index.shape)}")


def dtype_of(tensor: Tensor) -> str:
    """``float32`` and the like."""
    return str(tensor.dtype).removeprefix("torch.")
