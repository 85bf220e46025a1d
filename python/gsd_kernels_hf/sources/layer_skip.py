"""Self-drafting by skipping layers: the target without some of them is its own draft.

Draft & Verify (arXiv 2309.08168), the "self-graph" mode of GSD (arXiv 2407.16207). Nothing is trained or loaded, and no
second cache is kept: the prefix is the target's own, and what the draft writes lies in slots that verification
overwrites.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig

from .. import validate
from ..model.linear import with_cpu_linears
from ..model.probe import examine
from ..model.properties import device_of, text_config, unwrap, vocabulary, with_children
from ..model.recurrent.mixers import keeps_state
from ..model.runner import RowModel
from ..progress import tracked
from .base import Text
from .expansion import Expansion

logger = logging.getLogger("gsd_kernels")

PARTS = {"attention": "self_attn", "mlp": "mlp"}
"""Names of a layer's blocks; a block that keeps a recurrent state may have any name, where there is no attention."""
LONGEST_DRAFT = 10  # tokens of the longest chain that the search considers

Block = tuple[str, int]
"""A block: its part, and the number of its layer."""


class LayerSkip(Expansion):
    """``model`` without some attention and MLP blocks, as the draft of ``model``: ``assistant_model=LayerSkip(model)``.

    It shares the weights and the prefix of the cache. :meth:`search` finds what to skip.

    Args:
        model: a LLaMA-family transformers model, which is not changed.
        attention, mlp: indices of the layers whose block is skipped; what keeps a recurrent state in place of attention
            counts as one. A layer that lacks both is not visited at all, where all layers are of one type.

    Attributes:
        model: the target.
        attention, mlp: as given, sorted.
        cost: share of the weights of a forward that is still read, between 0 and 1.

    Raises:
        TypeError, ValueError: not such a model, an index that is no layer's, or nothing to skip.
    """

    name = "layer_skip"
    stem = 1

    def __init__(self, model: PreTrainedModel, *, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> None:
        self.model = unwrap(model)
        validate.check_model("model", self.model)
        blocks = _Blocks(self.model)
        given = [(part, index) for part, all_ in zip(PARTS, (attention, mlp), strict=True) for index in all_]
        for part, index in given:
            if type(index) is not int:
                raise TypeError(f"{part}: expected indices of layers, got {index!r}")
            if (part, index) not in blocks.names:
                raise ValueError(f"{part}: expected indices 0 … {len(blocks.layers) - 1}, got {index}")
        if not given:
            raise ValueError(
                "attention, mlp: nothing is skipped; name layers, or use LayerSkip.search(model, input_ids)"
            )
        skipped = frozenset(given)
        if blocks.attending <= skipped:
            raise ValueError(
                "attention: all that attends is skipped; leave a layer, of whose keys the cache has a length"
            )
        self.attention, self.mlp = (tuple(sorted(i for part, i in skipped if part == name)) for name in PARTS)
        self.view = blocks.without(skipped)
        self.forwards = (self.view,)
        report = examine(self.view)
        if report.problem is not None:  # where others read a layer's keys and values, as those of Gemma 4 do
            raise ValueError(
                f"attention, mlp: without these blocks {type(self.model).__name__} {report.problem}; name others"
            ) from report.cause
        self.cost = blocks.share(skipped)

    def __repr__(self) -> str:
        return f"LayerSkip(attention={list(self.attention)}, mlp={list(self.mlp)}, cost={self.cost:.2f})"

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target whose layers these are not.

        Raises:
            ValueError: they are another model's.
        """
        if self.model is not target:
            raise ValueError("assistant_model: a LayerSkip of another model; make one of the model that generates")

    def row_model(self, text: Text) -> RowModel:
        """The committed prefix is there already, in the target's own cache."""
        return text.target.sharing_cache(self.view)

    def prefix(self) -> Tensor:
        return self.text.kv_len + 1

    def root_logits(self, config: GraphConfig) -> Tensor:
        """Forward the root alone; logits float [B, 1, V]. Its slot is the first that verification overwrites."""
        state = self.state
        zeros = torch.zeros_like(state.out_len)[:, None]
        return self.rows.rows(
            state.root_tokens()[:, None],
            self.text.kv_len,
            0,
            torch.ones_like(zeros)[..., None],
            zeros,
            zeros,
            keep=1,
        )

    @classmethod
    @torch.no_grad()
    def search(
        cls,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        seconds: float | None = 60.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> LayerSkip:
        """Find what to skip on a sample of text, the target's own output at best.

        Blocks are taken away one by one, each time the one without which the expected speed of drafting a chain,
        (1 − α^(n+1)) / ((1 − α)(1 + n·c)) with n drafted tokens of cost c each (Leviathan et al., arXiv 2211.17192,
        theorem 3.8), is largest. α is how often the best token is still the same. The best set of all is returned.
        Every block is tried once, in a forward of the sample each; then only those that can still be the best, taking
        it that α does not rise when more is skipped. It ends when no smaller draft can be faster than the best.

        Args:
            model: the target.
            input_ids: int64 [batch, length] without padding, a few hundred tokens in all.
            seconds: after which the best set so far is returned, and the log says so; ``None``: however long it takes.
            progress: called as (done, total) whenever a step is done: every block's first trial, then every block that
                is taken away, of which there are ``total`` at most. Without it a terminal shows a bar, and elsewhere
                the logger ``gsd_kernels.progress`` a line every ten seconds.

        Raises:
            TypeError, ValueError: as for the class, or ``input_ids`` or ``seconds`` is no such thing.
        """
        model = unwrap(model)
        validate.check_model("model", model)
        validate.check_prompt(input_ids, None, vocabulary(model))
        if input_ids.shape[1] < 2:
            raise ValueError(f"input_ids: expected at least 2 tokens a row, got {input_ids.shape[1]}")
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
            raise ValueError(f"seconds: expected a number above 0, or None for no limit, got {seconds!r}")
        found = _best_blocks(_Blocks(model), input_ids, math.inf if seconds is None else seconds, progress)
        return cls(model, **{name: [i for part, i in found if part == name] for name in PARTS})


def _best_blocks(
    blocks: _Blocks, input_ids: Tensor, seconds: float, progress: Callable[[int, int], None] | None
) -> frozenset[Block]:
    """The greedy search of :meth:`LayerSkip.search`."""
    begin, ids, total = time.monotonic(), input_ids.to(device_of(blocks.model)), 2 * len(blocks.names) - 1
    # The plain products of half precision take most of the time on CPUs without instructions for it.
    quick = _Blocks(with_cpu_linears(blocks.model, "auto"))

    def best_tokens(view: PreTrainedModel) -> Tensor:
        return view(input_ids=ids, use_cache=False).logits.argmax(-1)  # [B, L]

    def tell(steps: int) -> None:
        if progress is None:
            update(steps, f"{best[0]:.2f} times the speed at best")
        else:
            progress(steps, total)

    def promise(block: Block) -> float:  # the speed without it too, if it agrees as often as when it was last tried
        return expected_speed(min(agreements[block], agreement), blocks.share(skipped | {block}))

    wanted, agreements = best_tokens(quick.model), dict.fromkeys(blocks.names, 1.0)
    best: tuple[float, frozenset[Block]] = 0.0, frozenset()
    agreement, skipped, floor = 1.0, frozenset[Block](), blocks.share(blocks.names)
    done = forwards = 0
    with tracked("LayerSkip.search", total, "steps") as update:
        while len(skipped) < len(blocks.names) - 1 and expected_speed(agreement, floor) > best[0]:
            taken = -1.0, 0.0, skipped
            # First what may become the fastest: a block that agreed less often earlier does not agree more often now.
            left = [
                block for block in blocks.names if block not in skipped and not blocks.attending <= skipped | {block}
            ]
            for block in sorted(left, key=lambda block: (-promise(block), block)):
                if taken[0] >= promise(block):
                    break
                if forwards and time.monotonic() - begin > seconds:
                    logger.warning(
                        "LayerSkip.search: %.3g seconds are over after %d forwards of %d tokens; the best set so far "
                        "is returned (expected: %.2f times plain decoding's speed); give more seconds, or fewer tokens",
                        *(seconds, forwards, ids.numel(), best[0]),
                    )
                    return best[1]
                without, speed, agrees = skipped | {block}, 0.0, 0.0
                # A later layer attends to its keys and values, as in Gemma 3n and 4; what it is given is not hidden
                # states alone, as in Zaya.
                with suppress(LookupError, TypeError):
                    agrees = float((best_tokens(quick.without(without)) == wanted).float().mean())
                    speed = expected_speed(agrees, blocks.share(without))
                    forwards += 1
                agreements[block] = agrees
                best = max(best, (speed, without), key=lambda one: one[0])
                taken = max(taken, (speed, agrees, without), key=lambda one: one[0])
                done += not skipped
                tell(done)
            _, agreement, skipped = taken
            done += 1
            tell(done)
        tell(total)
    return best[1]


def expected_speed(agreement: float, cost: float) -> float:
    """Tokens per target forward's time of the best chain; 1 is plain decoding."""
    return max(sum(agreement**i for i in range(n + 1)) / (1 + n * cost) for n in range(1, LONGEST_DRAFT + 1))


class _NoBlock(nn.Module):
    """In place of a block that returns hidden states in front of so many ``besides``; ``None``: it returns no tuple."""

    def __init__(self, besides: int | None) -> None:
        super().__init__()
        self.besides = besides

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor | tuple[Tensor | None, ...]:
        zeros = torch.zeros_like(hidden_states)
        return zeros if self.besides is None else (zeros, *[None] * self.besides)


class _Blocks:
    """The blocks of a model's layers.

    Attributes:
        layers: the decoder layers.
        names: of each block in its layer.
        besides: hidden states, what each returned in a forward of two tokens: how many; ``None``: it returned no tuple.
        attending: those with keys and values, which return what they weigh, in place of a state or beside one.

    Raises:
        ValueError: blocks cannot be taken out of this model.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.decoder = model, getattr(model, model.base_model_prefix, None)
        self.layers, kind = getattr(self.decoder, "layers", None), type(model).__name__
        found = list(enumerate(self.layers)) if isinstance(self.layers, nn.ModuleList) else []
        self.names = {(part, i): _name(layer, part) for part in PARTS for i, layer in found}
        if not found or not all(self.names.values()):
            raise ValueError(
                f"model: the blocks of {kind} are not self_attn and mlp of model.layers, so none can be skipped"
            )
        for module in (model, self.decoder, *self.layers):
            if "forward" in vars(module):
                raise ValueError(
                    f"model: {kind} is dispatched by hooks (offloading, several devices); nothing can be skipped"
                )
        modules = {(part, i): getattr(self.layers[i], name) for (part, i), name in self.names.items()}
        self.besides = dict.fromkeys(self.names)

        def note(block: Block, _: nn.Module, __: Any, output: Any) -> None:
            self.besides[block] = len(output) - 1 if isinstance(output, tuple) else None

        with ExitStack() as hooks:
            for block, module in modules.items():
                hooks.enter_context(module.register_forward_hook(partial(note, block)))
            ids = torch.zeros(1, 2, dtype=torch.int64, device=device_of(model))
            model(input_ids=ids, use_cache=False)
        self.attending = {block for block in self.names if block[0] == "attention" and self.besides[block] is not None}
        # Elements of weights: of the blocks, of what else a layer has, and of all that a forward reads.
        self.sizes = {block: _elements(module) for block, module in modules.items()}
        self.rest = [_elements(layer) - sum(self.sizes[part, i] for part in PARTS) for i, layer in found]
        self.whole = sum(self.sizes.values()) + sum(self.rest) + _elements(model.get_output_embeddings())

    def without(self, skipped: Collection[Block]) -> PreTrainedModel:
        """A view of the model: the same weights, fewer blocks."""
        kept, kinds = [], set(getattr(text_config(self.model), "layer_types", None) or ())
        for index, layer in enumerate(self.layers):
            gone = [(part, index) for part in PARTS if (part, index) in skipped]
            stubs = {self.names[block]: _NoBlock(self.besides[block]) for block in gone}
            # Where layers are of several types, their numbers say which mask is theirs.
            if len(stubs) < len(PARTS) or len(kinds) > 1:
                kept.append(with_children(layer, stubs) if stubs else layer)
        decoder = with_children(self.decoder, {"layers": nn.ModuleList(kept).train(self.model.training)})
        view = with_children(self.model, {self.model.base_model_prefix: decoder})
        vars(view)["lacks"] = sorted(map(list, skipped))  # tells what forwards cost from those of the whole model
        return view

    def share(self, skipped: Collection[Block]) -> float:
        """Share of the weights of a forward that is still read without some blocks; see :attr:`LayerSkip.cost`."""
        unvisited = [rest for i, rest in enumerate(self.rest) if all((part, i) in skipped for part in PARTS)]
        return (self.whole - sum(unvisited) - sum(self.sizes[block] for block in skipped)) / self.whole


def _elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _name(layer: nn.Module, part: str) -> str:
    """The name of a layer's block; empty where it has none such."""
    states = (name for name, child in layer.named_children() if part == "attention" and keeps_state(type(child)))
    return PARTS[part] if hasattr(layer, PARTS[part]) else next(states, "")
