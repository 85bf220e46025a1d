"""Self-drafting by skipping layers: the target without some of them is its own draft.

Draft & Verify (arXiv 2309.08168), the "self-graph" mode of GSD (arXiv 2407.16207). Nothing is trained or loaded, and no
second cache is kept: the prefix is the target's own, and what the draft writes lies in slots that verification
overwrites.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig

from .. import validate
from ..model import properties
from ..model.linear import with_children
from ..model.runner import RowModel
from .base import Text
from .expansion import Expansion

PARTS = {"attention": "self_attn", "mlp": "mlp"}
LONGEST_DRAFT = 10  # tokens of the longest chain that the search considers


class LayerSkip:
    """``model`` without some attention and MLP blocks, as the draft of ``model``: ``assistant_model=LayerSkip(model)``.

    It shares the weights and the prefix of the cache. :meth:`search` finds what to skip.

    Args:
        model: a LLaMA-family transformers model, which is not changed.
        attention, mlp: indices of the layers whose block is skipped. A layer that lacks both is not visited at all.

    Attributes:
        model: the target.
        attention, mlp: as given, sorted.
        cost: share of the weights of a forward that is still read, between 0 and 1.

    Raises:
        TypeError, ValueError: not such a model, an index that is no layer's, or nothing to skip.
    """

    def __init__(self, model: PreTrainedModel, *, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> None:
        self.model = properties.unwrap(model)
        validate.check_model("model", self.model)
        layers = _layers(self.model)
        skipped = {"attention": tuple(sorted(set(attention))), "mlp": tuple(sorted(set(mlp)))}
        for name, indices in skipped.items():
            for index in indices:
                if isinstance(index, bool) or not isinstance(index, int):
                    raise TypeError(f"{name}: expected indices of layers, got {index!r}")
                if not 0 <= index < len(layers):
                    raise ValueError(f"{name}: expected indices 0 … {len(layers) - 1}, got {index}")
        if not any(skipped.values()):
            raise ValueError(
                "attention, mlp: nothing is skipped; name layers, or use LayerSkip.search(model, input_ids)"
            )
        if all(len(indices) == len(layers) for indices in skipped.values()):
            raise ValueError("attention, mlp: every layer is skipped; leave some")
        self.attention, self.mlp = skipped["attention"], skipped["mlp"]
        self.view = _without(self.model, self.attention, self.mlp)
        whole, kept = _read(layers, self.model), _read(_layers(self.view), self.model)
        self.cost = kept / whole

    def __repr__(self) -> str:
        return f"LayerSkip(attention={list(self.attention)}, mlp={list(self.mlp)}, cost={self.cost:.2f})"

    @classmethod
    @torch.no_grad()
    def search(cls, model: PreTrainedModel, input_ids: Tensor) -> LayerSkip:
        """Find what to skip on a sample of text, the target's own output at best.

        Blocks are taken away one by one, each time the one whose loss costs least: the expected speed of drafting a
        chain, (1 − α^(n+1)) / ((1 − α)(1 + n·c)) with n drafted tokens of cost c each (Leviathan et al., arXiv
        2211.17192, theorem 3.8), is largest without it. α is how often the best token is still the same. The best set
        of all is returned. Takes about 2·layers² forwards of the sample.

        Args:
            model: the target.
            input_ids: int64 [batch, length] without padding, a few hundred tokens in all.

        Raises:
            TypeError, ValueError: as for the class, or ``input_ids`` is no such sample.
        """
        model = properties.unwrap(model)
        validate.check_model("model", model)
        validate.check_prompt(input_ids, None, properties.vocabulary(model))
        if input_ids.shape[1] < 2:
            raise ValueError(f"input_ids: expected at least 2 tokens a row, got {input_ids.shape[1]}")
        input_ids = input_ids.to(properties.device_of(model))
        wanted = model(input_ids=input_ids, use_cache=False).logits.argmax(-1)  # [B, L]
        best: tuple[float, LayerSkip] | None = None
        skipped: dict[str, tuple[int, ...]] = {"attention": (), "mlp": ()}
        count = len(_layers(model))
        for _ in range(2 * count - 1):
            found: list[tuple[float, dict[str, tuple[int, ...]], LayerSkip]] = []
            for name in PARTS:
                for index in set(range(count)) - set(skipped[name]):
                    changed = {**skipped, name: (*skipped[name], index)}
                    if all(len(indices) == count for indices in changed.values()):
                        continue
                    draft = cls(model, **changed)
                    best_tokens = draft.view(input_ids=input_ids, use_cache=False).logits.argmax(-1)
                    agreement = float((best_tokens == wanted).float().mean())
                    found.append((expected_speed(agreement, draft.cost), changed, draft))
            speed, skipped, draft = max(found, key=lambda entry: entry[0])
            if best is None or speed > best[0]:
                best = speed, draft
            if speed < 0.5 * best[0]:  # far beyond the best set
                break
        assert best is not None
        return best[1]


def expected_speed(agreement: float, cost: float) -> float:
    """Tokens per target forward's time of the best chain; 1 is plain decoding."""
    lengths = range(1, LONGEST_DRAFT + 1)
    return max(sum(agreement**i for i in range(n + 1)) / (1 + n * cost) for n in lengths)


class SkippedLayers(Expansion):
    """The draft source of a :class:`LayerSkip`: the committed prefix is there already, in the target's own cache."""

    name = "layer_skip"

    def __init__(self, skip: LayerSkip) -> None:
        self.skip = skip
        self.forwards = (skip,)

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target whose layers these are not.

        Raises:
            ValueError: they are another model's.
        """
        if self.skip.model is not target:
            raise ValueError("assistant_model: a LayerSkip of another model; make one of the model that generates")

    def row_model(self, text: Text) -> RowModel:
        return text.target.sharing_cache(self.skip.view)

    def prefix(self) -> Tensor:
        return self.text.kv_len + 1

    def num_rows(self, config: GraphConfig) -> int:
        return 1 + config.draft_slots if config.depth > 0 else 0

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


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers.

    Raises:
        ValueError: blocks cannot be taken out of this model.
    """
    decoder = getattr(model, model.base_model_prefix, None)
    layers = getattr(decoder, "layers", None)
    kind = type(model).__name__
    if not isinstance(layers, nn.ModuleList) or not all(hasattr(la, part) for la in layers for part in PARTS.values()):
        raise ValueError(
            f"model: the blocks of {kind} are not self_attn and mlp of model.layers, so none can be skipped"
        )
    for module in (model, decoder, *layers):
        if "forward" in vars(module):
            raise ValueError(
                f"model: {kind} is dispatched by hooks (offloading, several devices); nothing can be skipped"
            )
    return layers


def _without(model: PreTrainedModel, attention: tuple[int, ...], mlp: tuple[int, ...]) -> PreTrainedModel:
    """A view of ``model``: the same weights, fewer blocks."""
    kept = []
    for index, layer in enumerate(_layers(model)):
        stubs: dict[str, nn.Module] = {}
        if index in attention:
            stubs["self_attn"] = _NoAttention()
        if index in mlp:
            stubs["mlp"] = _NoMLP()
        if len(stubs) < len(PARTS):
            kept.append(with_children(layer, stubs) if stubs else layer)
    decoder = with_children(
        getattr(model, model.base_model_prefix), {"layers": nn.ModuleList(kept).train(model.training)}
    )
    return with_children(model, {model.base_model_prefix: decoder})


def _read(layers: nn.ModuleList, model: PreTrainedModel) -> int:
    """Elements of the weights that a forward of these layers and of the output matrix reads."""
    head = model.get_output_embeddings()
    return sum(p.numel() for layer in layers for p in layer.parameters()) + sum(p.numel() for p in head.parameters())
