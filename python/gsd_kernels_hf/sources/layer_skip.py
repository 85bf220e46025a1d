"""Self-drafting by skipping layers: the target without some of them is its own draft.

Draft & Verify (arXiv 2309.08168), the "self-graph" mode of GSD (arXiv 2407.16207). Nothing is trained or loaded, and no
second cache is kept: the prefix is the target's own, and what the draft writes lies in slots that verification
overwrites.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig

from .. import validate
from ..model import properties
from ..model.linear import with_cpu_linears
from ..model.probe import examine
from ..model.recurrent.mixers import keeps_state
from ..model.runner import RowModel
from ..model.view import with_children
from ..progress import tracked
from .base import Text
from .expansion import Expansion

logger = logging.getLogger("gsd_kernels")

PARTS = {"attention": "self_attn", "mlp": "mlp"}
"""Names of a layer's blocks; a block that keeps a recurrent state may have any name, where there is no attention."""
LONGEST_DRAFT = 10  # tokens of the longest chain that the search considers


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
    stem = 1  # the root
    root_alone = True

    def __init__(self, model: PreTrainedModel, *, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> None:
        self.model = properties.unwrap(model)
        validate.check_model("model", self.model)
        layers = _layers(self.model)
        skipped = {"attention": tuple(sorted(set(attention))), "mlp": tuple(sorted(set(mlp)))}
        for name, indices in skipped.items():
            for index in indices:
                if type(index) is not int:
                    raise TypeError(f"{name}: expected indices of layers, got {index!r}")
                if not 0 <= index < len(layers):
                    raise ValueError(f"{name}: expected indices 0 … {len(layers) - 1}, got {index}")
        if not any(skipped.values()):
            raise ValueError(
                "attention, mlp: nothing is skipped; name layers, or use LayerSkip.search(model, input_ids)"
            )
        if _attending(layers) <= set(skipped["attention"]):
            raise ValueError(
                "attention: all that attends is skipped; leave a layer, of whose keys the cache has a length"
            )
        _check_blocks(self.model, skipped)
        self.attention, self.mlp = skipped.values()
        self.view = _without(self.model, skipped)
        self.forwards = (self.view,)
        report = examine(self.view)
        if report.problem is not None:  # where others read a layer's keys and values, as those of Gemma 4 do
            raise ValueError(
                f"attention, mlp: without these blocks {type(self.model).__name__} {report.problem}; name others"
            ) from report.cause
        self.cost = _Weights(self.model).share({(part, i) for part, indices in skipped.items() for i in indices})

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
        model = properties.unwrap(model)
        validate.check_model("model", model)
        validate.check_prompt(input_ids, None, properties.vocabulary(model))
        if input_ids.shape[1] < 2:
            raise ValueError(f"input_ids: expected at least 2 tokens a row, got {input_ids.shape[1]}")
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
            raise ValueError(f"seconds: expected a number above 0, or None for no limit, got {seconds!r}")
        search = _Search(model, input_ids, math.inf if seconds is None else seconds)
        with tracked("LayerSkip.search", search.total, "steps") as update:
            best = search.run(update if progress is None else lambda done, _: progress(done, search.total))
        return cls(model, **best)


class _Search:
    """The greedy search of :meth:`LayerSkip.search`.

    Args:
        model: the target.
        input_ids: the sample, int64 [B, L].
        seconds: that it may take, from now on.

    Attributes:
        total: steps at most.
        best: speed and blocks of the best set so far.
    """

    def __init__(self, model: PreTrainedModel, input_ids: Tensor, seconds: float) -> None:
        self.begin, self.seconds = time.monotonic(), seconds
        # The plain products of half precision take most of the time on CPUs without instructions for it.
        self.model = with_cpu_linears(model, "auto")
        layers = _layers(self.model)
        _check_blocks(model, dict.fromkeys(PARTS, range(len(layers))))
        self.attending = {("attention", i) for i in _attending(layers)}
        self.total = 4 * len(layers) - 1
        self.input_ids = input_ids.to(properties.device_of(model))
        self.weights = _Weights(model)
        self.wanted = self.best_tokens(self.model)
        self.agreements = dict.fromkeys(
            self.weights.blocks, 1.0
        )  # with the block skipped too, when that was last tried
        self.forwards = 0
        self.best: tuple[float, dict[str, tuple[int, ...]]] = (0.0, {})

    def best_tokens(self, model: PreTrainedModel) -> Tensor:
        """The most likely token at every place, int64 [B, L]."""
        return model(input_ids=self.input_ids, use_cache=False).logits.argmax(-1)

    def run(self, update: Callable[[int, str], None]) -> dict[str, tuple[int, ...]]:
        """Blocks by name, the best that were found; ``update`` is called with steps done and a note."""
        skipped: frozenset[tuple[str, int]] = frozenset()
        agreement, done = 1.0, 0
        blocks = frozenset(self.weights.blocks)
        floor = self.weights.share(blocks)

        def note(done: int) -> None:
            update(done, f"{self.best[0]:.2f} times the speed at best")

        while len(skipped) < len(blocks) - 1 and expected_speed(agreement, floor) > self.best[0]:
            taken = -1.0, 0.0, skipped
            # First what may become the fastest: a block that agreed less often earlier does not agree more often now.
            left = [block for block in blocks - skipped if not self.attending <= skipped | {block}]
            for block in sorted(left, key=lambda block: (-self.promise(skipped, block, agreement), block)):
                if taken[0] >= self.promise(skipped, block, agreement):
                    break
                if self.forwards and time.monotonic() - self.begin > self.seconds:
                    logger.warning(
                        "LayerSkip.search: %.3g seconds are over after %d forwards of %d tokens; the best set so far "
                        "is returned (expected: %.2f times plain decoding's speed); give more seconds, or fewer tokens",
                        self.seconds,
                        self.forwards,
                        self.input_ids.numel(),
                        self.best[0],
                    )
                    return self.best[1]
                speed, share = self.tried(skipped | {block})
                self.agreements[block] = share
                if speed > taken[0]:
                    taken = speed, share, skipped | {block}
                done += not skipped
                note(done)
            _, agreement, skipped = taken
            done += 1
            note(done)
        note(self.total)
        return self.best[1]

    def promise(self, skipped: frozenset[tuple[str, int]], block: tuple[str, int], agreement: float) -> float:
        """The speed without ``block`` too, if it agrees as often as when it was last tried."""
        return expected_speed(min(self.agreements[block], agreement), self.weights.share(skipped | {block}))

    def tried(self, skipped: frozenset[tuple[str, int]]) -> tuple[float, float]:
        """Expected speed and agreement of a draft without these blocks."""
        blocks = {name: tuple(sorted(i for part, i in skipped if part == name)) for name in PARTS}
        try:
            tokens = self.best_tokens(_without(self.model, blocks))
        except LookupError:  # a later layer attends to keys and values of one of them, as in Gemma 3n and 4
            return 0.0, 0.0
        self.forwards += 1
        agreement = float((tokens == self.wanted).float().mean())
        speed = expected_speed(agreement, self.weights.share(skipped))
        if speed > self.best[0]:
            self.best = speed, blocks
        return speed, agreement


def expected_speed(agreement: float, cost: float) -> float:
    """Tokens per target forward's time of the best chain; 1 is plain decoding."""
    return max(sum(agreement**i for i in range(n + 1)) / (1 + n * cost) for n in range(1, LONGEST_DRAFT + 1))


class _NoBlock(nn.Module):
    """In place of a block; ``alone``: of what returns hidden states alone, an MLP or what keeps a recurrent state."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.alone = alone

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor | tuple[Tensor, None]:
        zeros = torch.zeros_like(hidden_states)
        return zeros if self.alone else (zeros, None)


def _block(layer: nn.Module, part: str) -> str:
    """The name of a layer's block; empty where it has none such."""
    names = [PARTS[part]] + [name for name, child in layer.named_children() if keeps_state(type(child))]
    blocks = (name for name in names[: None if part == "attention" else 1] if hasattr(layer, name))
    return next(blocks, "")


@torch.no_grad()
def _check_blocks(model: PreTrainedModel, skipped: Mapping[str, Iterable[int]]) -> None:
    """Raise where a block returns something else than what takes its place: a forward of two tokens shows it.

    MLPs of Zaya return their router's states for the next layer, those of gpt-oss their router's scores.

    Raises:
        ValueError: one of them does.
    """
    layers, returned = _layers(model), {}
    blocks = {(part, i): getattr(layers[i], _block(layers[i], part)) for part in PARTS for i in skipped[part]}
    with ExitStack() as hooks:
        for place, module in blocks.items():
            keep = partial(returned.__setitem__, place)
            hooks.enter_context(module.register_forward_hook(lambda _, __, output, keep=keep: keep(output)))
        ids = torch.zeros(1, 2, dtype=torch.int64, device=properties.device_of(model))
        model(input_ids=ids, use_cache=False)
    for (part, index), module in blocks.items():
        output = returned.get((part, index))
        alone = _returns_states(module, part)
        if not (isinstance(output, Tensor) if alone else isinstance(output, tuple) and len(output) == 2):
            raise ValueError(
                f"{part}: the blocks of {type(model).__name__} ({type(module).__name__}) return more than hidden "
                f"states, so they cannot be skipped; name layers of {'attention' if part == 'mlp' else 'mlp'} alone"
            )


def _returns_states(module: nn.Module, part: str) -> bool:
    """Return whether a block returns hidden states alone, rather than with what attention weighs."""
    return part == "mlp" or keeps_state(type(module))


def _attending(layers: Iterable[nn.Module]) -> set[int]:
    """Numbers of the layers whose first block has keys and values, in place of a state or beside one."""
    return {i for i, layer in enumerate(layers) if not keeps_state(type(getattr(layer, _block(layer, "attention"))))}


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers.

    Raises:
        ValueError: blocks cannot be taken out of this model.
    """
    decoder = getattr(model, model.base_model_prefix, None)
    layers = getattr(decoder, "layers", None)
    kind = type(model).__name__
    if not isinstance(layers, nn.ModuleList) or not all(_block(layer, part) for layer in layers for part in PARTS):
        raise ValueError(
            f"model: the blocks of {kind} are not self_attn and mlp of model.layers, so none can be skipped"
        )
    for module in (model, decoder, *layers):
        if "forward" in vars(module):
            raise ValueError(
                f"model: {kind} is dispatched by hooks (offloading, several devices); nothing can be skipped"
            )
    return layers


def _without(model: PreTrainedModel, skipped: Mapping[str, Sequence[int]]) -> PreTrainedModel:
    """A view of ``model``: the same weights, fewer blocks."""
    kept, kinds = [], set(getattr(properties.text_config(model), "layer_types", None) or ())
    for index, layer in enumerate(_layers(model)):
        stubs: dict[str, nn.Module] = {}
        for part, indices in skipped.items():
            if index in indices:
                name = _block(layer, part)
                stubs[name] = _NoBlock(alone=_returns_states(getattr(layer, name), part))
        # Where layers are of several types, their numbers say which mask is theirs.
        if len(stubs) < len(PARTS) or len(kinds) > 1:
            kept.append(with_children(layer, stubs) if stubs else layer)
    decoder = with_children(
        getattr(model, model.base_model_prefix), {"layers": nn.ModuleList(kept).train(model.training)}
    )
    view = with_children(model, {model.base_model_prefix: decoder})
    vars(view)["lacks"] = list(map(list, skipped.values()))  # tells what forwards cost from those of the whole model
    return view


class _Weights:
    """Elements of the weights that a forward reads.

    Attributes:
        blocks: by part and number of the layer.
        layers: whole, by number.
        head: of the output matrix.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        def elements(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters())

        layers = list(enumerate(_layers(model)))
        self.blocks = {
            (part, i): elements(getattr(layer, _block(layer, part))) for part in PARTS for i, layer in layers
        }
        self.layers, self.head = [elements(layer) for _, layer in layers], elements(model.get_output_embeddings())

    def share(self, skipped: Collection[tuple[str, int]]) -> float:
        """Share of them that is still read without some blocks; see :attr:`LayerSkip.cost`."""
        kept = self.head
        for i, elements in enumerate(self.layers):
            gone = [block for block in ((part, i) for part in PARTS) if block in skipped]
            kept += 0 if len(gone) == len(PARTS) else elements - sum(self.blocks[block] for block in gone)
        return kept / (self.head + sum(self.layers))
