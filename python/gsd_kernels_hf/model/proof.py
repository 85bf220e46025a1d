"""A few tokens through a model as transformers forwards it, and through what stands in for that: the same logits.

A way to forward rows serves a model after it has shown that it computes what the model's own ``forward`` does: a prompt
in pieces, behind padding in one of two sequences, then rows of a tree. In half precision rounding hides what is off by
a hundredth; numbers and modules that could be are looked at by name, see :func:`.foreign`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from gsd_kernels.graph import pack_bits

from ..packed.modules import rounds_rows, shape_of
from .facts import Facts
from .hidden import hooked
from .probe import in_words, random_numbers_kept
from .properties import storing
from .recurrent.mixers import KINDS, limit_of, mixers_of, states_of

PIECE_TOKENS = 4  # of a piece of the prompt, at least
WHOLE_TOKENS = 2**31
"""Least size of pieces of prompts that are read in one: layers begin with no state at every piece, as Jamba's do."""
SEVERAL_TOKENS = 2
"""Where one token alone is read by other rules than a prompt, as Zamba 2's."""
PARENTS = (-1, 0, 0, 1, 3, 4)  # of the rows
TEXT = (0, 1, 3, 4, 5)  # rows that are a path; the other one is beside it
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest difference of a row's logits, relative to their spread, that needs no second look."""
# Two right ways add in other orders, and a model may multiply each rounding of that. How much, one rounding of the
# embedding shows: by a multiple of its change the ways may differ, up to what no rounding makes in ordinary models.
MAX_RELATIVE_ERROR = 0.3  # of the logits' spread
NOISE_FACTOR_BELOW_MAX = 30.0  # × the change that one rounding of the embedding makes, up to the maximum
NOISE_FACTOR_ALWAYS = 3.0  # × that change, where a model multiplies roundings beyond the maximum


class Passage(NamedTuple):
    """How much text a proof forwards: tokens of a prompt, how often rows follow it, left padding of each sequence."""

    prompt: int = 7
    steps: int = 1
    pads: tuple[int, ...] = (0, 3)

    @property
    def length(self) -> int:
        """Tokens of each of its sequences."""
        return self.prompt + self.steps * len(TEXT)

    @property
    def capacity(self) -> int:
        """Cache positions that its rows need."""
        return self.length - len(TEXT) + len(PARENTS)


SHORT, LONG = Passage(), Passage(160)
"""What shows another formula, and what shows the window that a function of attention may have of its own."""

Forward = Callable[[Facts], Tensor]
"""Logits of :data:`TEXT`, [B, len(TEXT), V], the way that is to be proved."""


@dataclass(frozen=True)
class Difference:
    """The difference that keeps a way to forward rows from a model.

    Attributes:
        what: in words.
        cause: an error that the model raised.
        passing: whether another try may say something else.
    """

    what: str
    cause: Exception | None = None
    passing: bool = False


def text(model: PreTrainedModel | Facts, passage: Passage = SHORT) -> Tensor:
    """Tokens [B, length of the passage], spread over the vocabulary."""
    facts, batch = Facts.of(model), len(passage.pads)
    ids = 11 + 7919 * torch.arange(batch * passage.length, device=facts.device).view(batch, -1)
    return ids % min(facts.vocabulary, shape_of(facts.model.get_input_embeddings())[0])


def padding(ids: Tensor, pads: Sequence[int]) -> Tensor:
    """1 for tokens, 0 for the left padding of every sequence."""
    mask = torch.ones_like(ids)
    for sequence, pad in zip(mask, pads, strict=True):
        sequence[:pad] = 0
    return mask


def own_logits(facts: Facts, *, singly: bool = False, passage: Passage = SHORT) -> Tensor:
    """Logits as transformers' ``generate`` computes them of a prompt; ``singly``: of a prompt and tokens behind it."""
    ids, cache, length = text(facts, passage), DynamicCache(config=facts.model.config), passage.length
    mask = padding(ids, passage.pads)
    ends = [*range(passage.prompt + 1, length + 1)] if singly else [length]
    logits, begin = [], 0
    for end in ends:
        piece = _piece(facts, cache, ids, mask, begin, end)  # [B, end − begin, V]
        logits.append(piece[:, -1:] if singly else piece[:, passage.prompt - length :])
        begin = end
    return torch.cat(logits, 1)


def _piece(facts: Facts, cache: DynamicCache, ids: Tensor, mask: Tensor, begin: int, end: int) -> Tensor:
    """Logits [B, end − begin, V] of a piece of a text [B, n], behind what the cache holds."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    output = facts.model(
        input_ids=ids[:, begin:end],
        attention_mask=mask[:, :end],
        position_ids=positions[:, begin:end],
        **storing(facts.model, cache),
        return_dict=True,
    )
    logits: Tensor = output.logits
    return logits


def least_piece(facts: Facts) -> int:
    """Fewest tokens of a piece of a model's prompts behind the first, see :func:`~.runner.pieces`.

    Whether layers begin with no state at every piece is no question of closeness, which rounding in half precision
    would hide: a state that a piece left is made NaN, and the logits of the next piece show whether it was read. One
    layer of each class, one of its states at a time.
    """
    mixers = mixers_of(facts)
    if not mixers:
        return 1
    with random_numbers_kept(facts), torch.inference_mode(False), torch.no_grad(), suppress(Exception):
        # What cannot be forwarded, the proof of its rows names.
        if facts.proved("pieces", lambda: _begins_anew(facts)):
            return WHOLE_TOKENS
    return SEVERAL_TOKENS if any(limit_of(module) is not None for _, module in mixers) else 1


def _begins_anew(facts: Facts) -> bool:
    ids = text(facts)
    mask = torch.ones_like(ids)
    for layer in {type(module): module.layer_idx for _, module in reversed(mixers_of(facts))}.values():
        for kind in KINDS:
            for index in range(states_of(facts)[layer]):
                cache = DynamicCache(config=facts.model.config)
                _piece(facts, cache, ids, mask, 0, PIECE_TOKENS)
                states = getattr(cache.layers[layer], kind)[index]
                if states is None:
                    continue
                states.fill_(torch.nan)
                if bool(_piece(facts, cache, ids, mask, PIECE_TOKENS, ids.shape[1]).isfinite().all()):
                    return True
    return False


def rows_of_tree(parents: Sequence[int], tokens: Tensor, stored: Tensor) -> tuple[Tensor, ...]:
    """Arguments of :meth:`~.runner.RowModel.rows`; its own as of :func:`logits_of_tree`."""
    (batch, count), device = tokens.shape, stored.device
    sees, depths = torch.eye(count, dtype=torch.bool, device="cpu"), torch.zeros(count, dtype=torch.int32, device="cpu")
    for row, parent in enumerate(parents[1:], 1):
        sees[row] |= sees[parent]
        depths[row] = depths[parent] + 1
    words = pack_bits(sees).expand(batch, -1, -1).contiguous().to(device)  # [B, R, words]
    depths = depths.expand(batch, -1).contiguous().to(device)  # [B, R]
    return tokens, stored, torch.arange(count, device=device), words, depths, depths


def logits_of_tree(rows: Any, parents: Sequence[int], tokens: Tensor, stored: Tensor) -> Tensor:
    """Logits [B, R, V] of rows with these parents and ``tokens`` [B, R], behind ``stored`` int32 [B] positions."""
    logits: Tensor = rows.rows(*rows_of_tree(parents, tokens, stored), keep=tokens.shape[1])
    return logits


def logits_of_path(rows: Any, tokens: Tensor, stored: Tensor) -> Tensor:
    """Logits [B, len(TEXT), V] of ``tokens`` [B, len(TEXT)] as a path of the tree of :data:`PARENTS`."""
    places = [TEXT.index(row) if row in TEXT else 0 for row in range(len(PARENTS))]
    return logits_of_tree(rows, PARENTS, tokens[:, places], stored)[:, list(TEXT)]


def logits_of_rows(rows: Any, model: PreTrainedModel | Facts, passage: Passage = SHORT) -> Tensor:
    """The same through a row model: a prompt in pieces, then rows of a tree, and more behind its accepted path."""
    ids, (prompt, steps, pads) = text(model, passage), passage
    device = ids.device
    rows.prefill(ids[:, :prompt], padding(ids, pads)[:, :prompt], max(PIECE_TOKENS, prompt // 2))
    stored = torch.full((len(pads),), prompt, dtype=torch.int32, device=device)  # [B]
    path = torch.tensor([TEXT] * len(pads), dtype=torch.int32, device=device)  # [B, len(TEXT)]
    logits = []
    for step in range(steps):
        logits.append(logits_of_path(rows, ids[:, prompt + step * len(TEXT) :][:, : len(TEXT)], stored))
        if step + 1 < steps:
            rows.cache.commit(path, torch.full_like(stored, len(TEXT)), stored)
    return torch.cat(logits, 1)


def forward_of(make: Callable[..., Any], backend: str, passage: Passage = SHORT, **options: Any) -> Forward:
    """A way to be proved: :func:`logits_of_rows` of what ``make`` makes, as :class:`~.runner.RowModel` is made."""

    def forward(of: Facts) -> Tensor:
        return logits_of_rows(make(of, passage.capacity, kv_start(of, passage.pads), backend, **options), of, passage)

    return forward


def kv_start(model: PreTrainedModel | Facts, pads: Sequence[int]) -> Tensor:
    """Padding of the sequences, int32 [B]."""
    return torch.tensor(pads, dtype=torch.int32, device=Facts.of(model).device)


def why_not_proved(
    facts: Facts,
    make: Callable[..., Any],
    backend: str,
    passage: Passage = SHORT,
    *,
    singly: bool = False,
    **options: Any,
) -> Difference | None:
    """Name what rows compute otherwise than the model, or ``None``: remembered while its structure is what it is.

    Args:
        facts: of the model, which is left as it is.
        make, backend, passage, options: as of :func:`forward_of`.
        singly: whether the model forwards token by token, as it does behind a prompt: code that is not transformers'
            own may go by how many there are.
    """
    steps, prompt = (partial(own_logits, singly=one, passage=passage) for one in (singly, False))
    forward, way = forward_of(make, backend, passage, **options), (make, backend, passage, singly, *options.items())
    return facts.proved(way, lambda: difference(facts, forward, steps, prompt))


def difference(facts: Facts, forward: Forward, own_steps: Forward, own_prompt: Forward) -> Difference | None:
    """Compare logits of a text, [B, n, V], with the model's own by transformers' steps, and as a prompt's."""
    with random_numbers_kept(facts), torch.inference_mode(False), torch.no_grad():
        try:
            own, ours = own_steps(facts).double(), forward(facts).double()
            # Eager attention makes NaN of padding in float64.
            finite = own.isfinite().flatten(1).all(1)  # [B]
            if not bool(finite.any()):
                return Difference("the logits of a few tokens are not finite", passing=True)
            own, ours, tolerance = own[finite], ours[finite], TOLERANCE[precision_of(facts)]
            found = worst(own, ours)
            if found <= tolerance:
                return None
            rounding = worst(own, shaken(facts, own_steps)[finite])
            if mixers_of(facts):  # which have other code for prompts than for single tokens
                codes = worst(own, own_prompt(facts).double()[finite])
                if codes <= max(tolerance, NOISE_FACTOR_BELOW_MAX * rounding):  # else it is another formula
                    rounding = max(rounding, codes)
            bound = min(MAX_RELATIVE_ERROR, NOISE_FACTOR_BELOW_MAX * rounding)
            if found > max(bound, NOISE_FACTOR_ALWAYS * rounding):
                return Difference(f"its logits of a few tokens differ from the modules' by {found:.1g} of their spread")
        except Exception as error:
            return Difference(f"a few tokens could not be forwarded ({in_words(error)})", cause=error, passing=True)
    return None


def precision_of(facts: Facts) -> torch.dtype:
    """The type that a model rounds to: recurrent states are float32 at best; codes have eight bits."""
    if rounds_rows(facts.model):
        return torch.bfloat16
    dtype: torch.dtype = facts.model.dtype
    return torch.float32 if mixers_of(facts) and dtype == torch.float64 else dtype


def worst(own: Tensor, ours: Tensor) -> float:
    """The largest difference of a row's logits [B, n, V], relative to their spread."""
    spread = (own - own.mean(-1, keepdim=True)).norm(dim=-1)  # [B, n]
    largest = ((ours - own).norm(dim=-1) / spread.clamp(min=1e-30)).max()
    return float(largest.nan_to_num(float("inf")))


def shaken(facts: Facts, own: Forward) -> Tensor:
    """The model's ``own`` logits, [B, n, V], of embeddings that are rounded otherwise."""
    eps = torch.finfo(precision_of(facts)).eps

    def shake(_: Any, output: Any) -> Any:
        noise = (
            torch.rand(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
            - 0.5
        )
        return output + output * (noise * eps).to(output)

    with hooked(facts.model.get_input_embeddings(), shake):
        return own(facts).double()
