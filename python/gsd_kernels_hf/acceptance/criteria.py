"""Criteria of acceptance: the exact one, and three others that are asked for by name.

A criterion says for every row at once which token follows it. :func:`gsd_kernels.verify` then walks down the rows that
hold these tokens. So end-of-text tokens, lengths, finished sequences and the commit are the same for all criteria.

With greedy decoding, the target's distribution is one token, and every criterion is the exact one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from gsd_kernels import GraphConfig, Rows
from gsd_kernels.ops.sampling.philox import derived_seed, uniform_of

from ..records import EVERY, At, Candidates, Sampler

CriterionName = Literal["exact", "speculative", "block", "typical"]
"""What ``criterion`` takes by name."""

EXACT, SPECULATIVE, BLOCK, TYPICAL = CRITERIA = get_args(CriterionName)
DRAWN = (SPECULATIVE, BLOCK)  # those that verify the draft's own samples
CHAIN = {"width": 1, "branch": 1, "merge_context": -1, "history_depth": 0}  # what makes a GraphConfig a chain
DRAFT_STREAM, ACCEPT_STREAM = 1, 2  # of noise, see derived_seed; 0 is the target's own
MAX_CHAIN_ROWS = 65  # rows of the longest chain, in the keys of a step's noise

UNWARPED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # of a distribution that is warped already


@dataclass(frozen=True)
class Typical:
    """``criterion="typical"`` with thresholds of one's own. Lossy: the output is no longer the target's.

    A drafted token x is accepted where p(x) > min(epsilon, delta · exp(−H(p))), p being the target's distribution and H
    its entropy in nats (Medusa, arXiv 2401.10774, section 2.3.1).

    Args:
        epsilon: probability that is enough in any case (above 0, at most 1). Smaller accepts more.
        delta: factor where the target is undecided (above 0). ``None``: the square root of epsilon, as in the paper.

    Raises:
        TypeError, ValueError: a threshold is no number, or out of range.
    """

    epsilon: float = 0.09
    delta: float | None = None

    def __post_init__(self) -> None:
        for name, value, high in (("epsilon", self.epsilon, 1.0), ("delta", self.delta, math.inf)):
            if name == "delta" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}: expected a number, got {value!r}")
            if not 0.0 < value <= high:
                raise ValueError(f"{name}: expected a number above 0{', at most 1' * (high == 1.0)}, got {value}")
        if self.delta is None:
            object.__setattr__(self, "delta", math.sqrt(self.epsilon))


def resolve_criterion(value: str | Typical) -> str | Typical:
    """``"typical"`` becomes a :class:`Typical`; the other names stay.

    Raises:
        TypeError, ValueError: neither a name of :data:`CRITERIA` nor a :class:`Typical`.
    """
    if isinstance(value, Typical):
        return value
    expected = f"criterion: expected {', '.join(map(repr, CRITERIA))} or a gsd_kernels.Typical, got"
    if not isinstance(value, str):
        raise TypeError(f"{expected} {type(value).__name__}")
    if value not in CRITERIA:
        raise ValueError(f"{expected} {value!r}")
    return Typical() if value == TYPICAL else value


def shape_for(criterion: str | Typical, graph_config: GraphConfig | str | None) -> GraphConfig | str | None:
    """The shape that ``graph_config`` means for the criterion: where none is given, the draft's samples are a chain."""
    return "chain" if criterion in DRAWN and graph_config in (None, "auto") else graph_config


def check_chain(
    criterion: str | Typical,
    config: GraphConfig,
    sources: tuple[str, ...] | None,
    others: Mapping[str, object],
) -> None:
    """Raise if a criterion of :data:`DRAWN` should draft anything but a chain of one model's samples.

    Args:
        criterion, config: of the call.
        sources: those that were asked for.
        others: what else there is to draft from, by the option; ``None`` where it was not given.
    """
    if criterion not in DRAWN:
        return
    cure = 'or use criterion="exact", which takes any graph'
    for name, value in CHAIN.items():
        if getattr(config, name) != value:
            raise ValueError(
                f'graph_config: criterion="{criterion}" needs a chain, and {name} is {getattr(config, name)} instead '
                f'of {value}; pass graph_config="chain" or GraphConfig.preset("chain", depth=…), {cure}'
            )
    alone = f'criterion="{criterion}" drafts from one model alone'
    if sources is not None and tuple(sources) not in (("model",), ("layer_skip",)):
        raise ValueError(f"draft_sources: {alone}, got {sources!r}; leave it out, {cure}")
    for name, value in others.items():
        if value is not None:
            what = {"drafter": "leave it out", "assistant_model": "give one"}.get(name, "leave them out")
            raise ValueError(f"{name}: {alone}; {what}, {cure}")


class ExactMatch:
    """The exact criterion: after every row comes the target's own pick, so a drafted token is accepted if it is that.

    Attributes:
        name: of :data:`CRITERIA`.
        lossless: whether the output is an exact sample of the target's distribution.
    """

    name = EXACT
    lossless = True

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def of_warped(self) -> ExactMatch:
        """The same criterion for logits that the warpers have seen."""
        other = copy.copy(self)
        other.sampler = replace(self.sampler, warpers=UNWARPED)
        return other

    def picks(self, rows: Rows, logits: Tensor, positions: Tensor, at: At = EVERY) -> Tensor:
        """The token that the step picks after each row.

        Args:
            rows: all rows.
            logits: float [b, r, V], the target's, of the rows ``at``.
            positions: int32 [b, r], index of the token being picked.
            at: which sequences and rows to decide on.

        Returns:
            int32 [b, r]; −1 where the logits hold NaN, or have no distribution to sample: +∞, or nothing but −∞.
        """
        return self.sampler.pick(logits, positions, at)


class ChainProposal:
    """Draws the tokens of a chain from the draft's distribution q, and keeps q for :class:`SpeculativeSampling`.

    Every step has noise of its own, see :func:`step_keys`.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.own = replace(sampler, seed=torch.empty_like(sampler.seed), warpers=UNWARPED)  # q is warped already
        self.accept_seed = torch.empty_like(sampler.seed)  # int64 [], of the test
        self.restart()
        self.distributions: list[Tensor] = []  # q of the step's levels, float32 [B, 1, draft's V] each

    def restart(self) -> None:
        """Begin a text: derive the streams from the sampler's seed, in place, since captured steps read them."""
        self.own.seed.copy_(derived_seed(self.sampler.seed, DRAFT_STREAM))
        self.accept_seed.copy_(derived_seed(self.sampler.seed, ACCEPT_STREAM))

    def draw(self, level: int, logits: Tensor, positions: Tensor) -> Candidates:
        """Draw the chain's next token; draft logits [B, 1, V], positions int32 [B, 1].

        Returns:
            The token and its log-probability, [B, 1, 1]; −1 and NaN where the logits hold NaN.
        """
        log_q = self.sampler.log_probs(logits)  # [B, 1, draft's V]
        token = self.own.pick(log_q, step_keys(positions - level, level))[..., None]  # [B, 1, 1]
        self.distributions[level:] = [log_q.exp().to(self.sampler.seed.device, non_blocking=True)]
        return token, log_q.gather(-1, token.clamp(min=0).long())

    def wide(self, rows: int, vocabulary: int) -> Tensor:
        """The distribution that each row's child was drawn from, of the target's tokens: float32 [B, rows, vocabulary].

        In a chain the row at depth d is row d, and its one child was drawn from level d's distribution.
        """
        q = torch.cat(self.distributions, 1)[:, :rows]  # [B, levels, draft's V]
        return torch.nn.functional.pad(q, (0, vocabulary - q.shape[-1], 0, rows - q.shape[1]))


class SpeculativeSampling(ExactMatch):
    """Accept a drafted x with probability min(1, p(x) / q(x)); at a rejection draw from norm(max(0, p − q)).

    Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2. For a chain whose
    tokens are drawn from q, the draft's own distribution. What is emitted is an exact sample of the target's
    distribution, but which one depends on the draft and on where steps begin, not on the seed alone.

    Every random number comes from one of three independent streams: the draft's sample, which is keyed by its step, the
    test, and the target's sample, both keyed by position. The text at a position depends on no test of a later one, so
    numbers of later positions may be used there again.
    """

    name = SPECULATIVE

    def __init__(self, sampler: Sampler, proposal: ChainProposal) -> None:
        super().__init__(sampler)
        self.proposal = proposal
        self.residual = replace(sampler, warpers=UNWARPED)

    def picks(self, rows: Rows, logits: Tensor, positions: Tensor, at: At = EVERY) -> Tensor:
        """See :meth:`ExactMatch.picks`."""
        p = self.sampler.log_probs(logits).exp()  # [b, r, V]
        q = self.proposal.wide(rows.token_ids.shape[1], p.shape[-1])[at]  # [b, r, V]
        child = children_of(rows)[at].amax(-1)  # [b, r], −1 where nothing was drafted
        index = child.clamp(min=0).long()[..., None]  # [b, r, 1]
        p_child, q_child = p.gather(-1, index).squeeze(-1), q.gather(-1, index).squeeze(-1)  # [b, r] each
        u = uniform_of(self.proposal.accept_seed, positions, self.sampler.sequence_ids[at[0]][:, None])
        accepted = (child >= 0) & (p_child > 0) & (u * q_child <= p_child)
        rest = torch.where(child[..., None] >= 0, (p - q).clamp(min=0), p)  # [b, r, V]
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # p = q: never rejected but for rounding
        return torch.where(accepted, child, self.residual.pick(rest.log(), positions, at))


class BlockVerification(SpeculativeSampling):
    """Accept as much of a drafted chain as its tokens deserve together: in expectation never less than one by one.

    Sun et al., arXiv 2403.10444, algorithm 2; as exact a sample. Here numbers of later positions decide where a step
    ends, so no later step may use them again: the test is keyed by its step, as the draft's sample is. The target's
    sample at a position decides about nothing but the token there.
    """

    name = BLOCK

    def picks(self, rows: Rows, logits: Tensor, positions: Tensor, at: At = EVERY) -> Tensor:
        """See :meth:`ExactMatch.picks`; of :data:`EVERY` row, since what follows decides about what comes before."""
        count = rows.token_ids.shape[1]
        p = self.sampler.log_probs(logits).exp()  # [B, R, V]
        q = self.proposal.wide(count, p.shape[-1])  # [B, R, V]
        child = children_of(rows).amax(-1)  # [B, R], −1 where nothing was drafted
        keep, rest = block_verification(p, q, child)  # [B, R], [B, R, V]
        place = torch.arange(count, dtype=torch.int32, device=p.device)
        keys = step_keys(positions[:, :1], place)  # [B, R]
        u = uniform_of(self.proposal.accept_seed, keys, self.sampler.sequence_ids[:, None])
        kept = (place > 0) & (place < rows.num_rows[:, None]) & (u <= keep)
        last = (kept * place).amax(-1, keepdim=True)  # the deepest row that is kept, 0 is the root
        # Rounding may leave nothing to draw from, or draw the rejected token again; the target's sample follows it.
        drawn = (place == last)[..., None] & (rest.sum(-1, keepdim=True) > 0)
        return torch.where(place < last, child, self.residual.pick(torch.where(drawn, rest, p).log(), positions))


def block_verification(p: Tensor, q: Tensor, child: Tensor) -> tuple[Tensor, Tensor]:
    """Verify every row of a chain as part of a block, from the draft's and the target's probabilities.

    Args:
        p: float [B, R, V], the target's after each row.
        q: float [B, R, V], what the row's child was drawn from.
        child: int32 [B, R], the drafted token after each row, −1 behind the last one.

    Returns:
        The probability h [B, R] that a step which does not go beyond a row keeps it, and what its next token is then
        drawn from, not normalised [B, R, V]: max(0, w·p − q), w being the weight of the tokens up to the row.
    """
    index = child.clamp(min=0).long()[..., None]  # [B, R, 1]
    ratio = (p.gather(-1, index) / q.gather(-1, index)).squeeze(-1)  # [B, R]
    weights = [torch.ones_like(ratio[:, 0])]
    for row in range(child.shape[1] - 1):
        weights.append((weights[-1] * ratio[:, row]).clamp(max=1))
    w = torch.stack(weights, 1)  # [B, R]
    rest = (w[..., None] * p - q).clamp(min=0)  # [B, R, V]
    gain = rest.sum(-1)  # [B, R]
    keep = torch.where(w >= 1, 1.0, gain / (gain + 1 - w))
    drafted = child >= 0
    return torch.where(drafted, keep, w), torch.where(drafted[..., None], rest, p)


def step_keys(first: Tensor, level: Tensor | int) -> Tensor:
    """Keys of noise that no other step has: int32, by the position of a step's first drafted token, and the level."""
    return (first * MAX_CHAIN_ROWS + level).to(torch.int32)


class TypicalAcceptance(ExactMatch):
    """Accept what is likely enough under the target, see :class:`Typical`: more tokens per step, another output.

    The target's own pick is taken where it was drafted. Where it was not, the exact criterion ends the step; this one
    goes on with the most probable of the acceptable children, and ends where there is none. So the last token of a
    step is the target's own, unless the text ends there. (Medusa's step takes the longest of its acceptable paths.)
    """

    name = TYPICAL
    lossless = False

    def __init__(self, sampler: Sampler, thresholds: Typical) -> None:
        super().__init__(sampler)
        self.thresholds = thresholds

    def picks(self, rows: Rows, logits: Tensor, positions: Tensor, at: At = EVERY) -> Tensor:
        """See :meth:`ExactMatch.picks`."""
        own = super().picks(rows, logits, positions, at)
        p = self.sampler.log_probs(logits).exp()  # [b, r, V]
        entropy = torch.special.entr(p).sum(-1, keepdim=True)  # [b, r, 1]
        threshold = (self.thresholds.delta * torch.exp(-entropy)).clamp(max=self.thresholds.epsilon)  # [b, r, 1]
        children = children_of(rows)[at]  # [b, r, R]
        likely = p.gather(-1, children.clamp(min=0).long())  # [b, r, R]
        likely = torch.where((children >= 0) & (likely > threshold), likely, -1.0)
        instead = children.gather(-1, likely.argmax(-1, keepdim=True)).squeeze(-1)  # [b, r]
        ends = (children == own[..., None]).any(-1) | (likely < 0).all(-1)
        return torch.where(ends, own, instead)


def criterion_of(
    criterion: str | Typical, sampler: Sampler, proposal: ChainProposal | None, *, drafts: bool, per_token: bool
) -> ExactMatch:
    """The criterion of one generation; the exact one where nothing is drafted, or nothing is random.

    Args:
        criterion: what was asked for, resolved.
        sampler: of the generation.
        proposal: what draws the chain, for speculative sampling.
        drafts: whether there is any source.
        per_token: whether rows are decided one by one, as they are read: of a block by the ratio then.
    """
    if drafts and not sampler.greedy:
        if isinstance(criterion, Typical):
            return TypicalAcceptance(sampler, criterion)
        if proposal is not None:
            kind = BlockVerification if criterion == BLOCK and not per_token else SpeculativeSampling
            return kind(sampler, proposal)
    return ExactMatch(sampler)


def children_of(rows: Rows) -> Tensor:
    """The drafted tokens after every row, by the row that holds them: int32 [B, R, R], −1 elsewhere."""
    place = torch.arange(rows.token_ids.shape[1], device=rows.token_ids.device)  # [R]
    return torch.where(rows.parent_rows[:, None] == place[:, None], rows.token_ids[:, None], -1)
