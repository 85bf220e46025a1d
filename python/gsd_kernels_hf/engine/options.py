"""Options of decoding, declared once: ``generate``, ``patch``, :class:`GraphDecoder` and the ranks read them here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from gsd_kernels import GraphConfig
from gsd_kernels.backends import Backend
from gsd_kernels.config import AUTO, PLAIN, GraphName, resolve_graph_config
from gsd_kernels.names import did_you_mean, fields_named

from .. import validate
from ..acceptance.criteria import DRAWN, CriterionName, Typical, check_chain, resolve_criterion, shape_for
from ..acceptance.sampling import draw_seed
from ..model import properties
from ..policy.settings import Automatic
from ..records import Verified
from ..sources.base import DraftSource
from ..sources.border import check_source
from ..sources.drafts import check_probabilities, translations_of
from ..sources.expansion import Expansion
from ..sources.heads import DraftHeads
from ..sources.layer_skip import LayerSkip
from ..sources.layouts import GEMMA4
from ..sources.load import DRAFTERS, Drafter

SourceName = Literal["model", "layer_skip", "drafter", "heads", "history", "grammar"]
"""What ``draft_sources`` may name."""

NAMES: tuple[SourceName, ...] = get_args(SourceName)

NEEDS = {
    "model": "assistant_model, a draft model",
    "layer_skip": "assistant_model=LayerSkip(model, …)",
    "drafter": 'drafter, a folder, a hub id, "mtp" or a loaded one',
    "heads": "draft_heads",
}


@fields_named("unknown option")
@dataclass(eq=False, repr=False)
class Options:
    """Options of graph-speculative decoding, checked when they are made.

    What they name is loaded, and what drafts is made, once a call: :class:`~gsd_kernels_hf.engine.resolved.Sources`.

    Args:
        assistant_model: the draft, or a :class:`~gsd_kernels.LayerSkip` of the target; or a list of drafts, whose
            candidates are mixed by learned weights. ``None``: the history and other sources draft.
        graph_config: ``"auto"`` (the default: the shape of every step follows what steps cost and what has been
            accepted, see :mod:`gsd_kernels_hf.policy`) or :class:`~gsd_kernels.Automatic` with settings, ``"chain"``,
            ``"tree"``, ``"graph"``, a :class:`~gsd_kernels.GraphConfig`, or ``"plain"``: no speculation, by the same
            code. Clocks differ between the ranks of a tensor-parallel model, where ``"auto"`` is ``"graph"``.
        tokenizer: of the target; for ``stop_strings``, and for a draft of another tokenizer.
        assistant_tokenizer: of the draft, where it is another than the target's; of several drafts one for all of them,
            or a list of one for each, ``None`` for the target's own.
        seed: 64-bit seed of the sampling noise; ``None`` draws one from torch's generator.
        backend: of all ops, see :mod:`gsd_kernels.backends`.
        draft_sources: of ``"model"`` (the draft), ``"layer_skip"``, ``"drafter"``, ``"heads"``, ``"history"`` (the
            prompt, and what the target picked and nearly picked before), ``"grammar"`` (what a grammar among the logits
            processors forces), and :class:`~gsd_kernels.DraftSource` objects. ``None``: all that are given and the
            history, the latter beside a model only where ``graph_config`` has levels for it, as ``"auto"`` has, and on
            a CPU the grammar where a call has one of xgrammar or llguidance. Nothing given is the history alone.
        draft_heads: :class:`~gsd_kernels.DraftHeads` that were trained for the target, or their folder or hub id.
        drafter: a drafter that was trained for the target, from a checkpoint: its folder or hub id, whose config says
            which kind it is, or a loaded one (:class:`~gsd_kernels.Eagle3`, :class:`~gsd_kernels.DFlash`,
            :class:`~gsd_kernels.DraftHeads`, :class:`~gsd_kernels.Mtp`, :class:`~gsd_kernels.Gemma4Assistant`).
            ``"mtp"``: the multi-token-prediction heads in the target's own checkpoint. A place is loaded once for a
            target, as long as its files stay the same.
        reference_ids: int64 [length] for all sequences or [batch, length], a text that the output may repeat: the file
            to edit, a retrieved document. The history starts with it; it changes the speed, never the output.
        criterion: which drafted tokens are accepted when sampling. ``"exact"``: those that the model itself draws.
            ``"speculative"``: by the ratio of both models' probabilities; still an exact sample, but another one with
            another draft, and from a chain only. ``"block"``: as exact, but the chain is judged as a
            whole, which accepts more. ``"typical"`` or :class:`~gsd_kernels.Typical`: what is likely enough under the
            model, which changes the output. Greedy output is the same with each.
        reuse_prefix: whether keys and values of the last text may serve as the beginning of this one, where both begin
            alike, as the turns of a chat do; in what :func:`gsd_kernels.patch` keeps only.
        reuse_history: whether the history begins with what earlier calls' histories held, and leaves them its own;
            bounded, in what :func:`gsd_kernels.patch` keeps only. One caller's texts then speed up another's, which
            somebody may time.
        learned: whether the history drafts with what :func:`gsd_kernels.learn` left of the model in the cache folder,
            where it did. Needs the compiled ops of the target's device.
        streamer: gets the prompt [batch, length], then the batch's tokens position by position, [batch] each, as from
            transformers; its own text streamers take one sequence only. A method ``ask()``, where it has one, is called
            while the prompt is read, between pieces and layers: what it raises ends the call.
        observer: called with the :class:`~gsd_kernels_hf.records.Verified` of every step.

    Attributes:
        drafts: draft models, unwrapped, or the :class:`~gsd_kernels.LayerSkip`.
        translations: what is between the target's tokens and those of each draft; ``None``: they are the same.
        named: names of the sources in use; empty for plain decoding.
        automatic: whether a policy may choose the shapes.
        automatic_settings: of that policy.

    Raises:
        TypeError, ValueError: an option that cannot be served.
    """

    assistant_model: PreTrainedModel | LayerSkip | Sequence[PreTrainedModel] | None = None
    graph_config: GraphConfig | Automatic | GraphName | None = None
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None
    seed: int | None = None
    backend: Backend = "auto"
    draft_sources: Sequence[SourceName | DraftSource] | None = None
    draft_heads: DraftHeads | str | os.PathLike[str] | None = None
    drafter: Drafter | str | os.PathLike[str] | None = None
    reference_ids: Tensor | None = None
    criterion: CriterionName | Typical = "exact"
    reuse_prefix: bool = True
    reuse_history: bool = True
    learned: bool = True
    streamer: BaseStreamer | None = None
    observer: Callable[[Verified], None] | None = None

    def __post_init__(self) -> None:
        self.criterion = resolve_criterion(self.criterion)
        self.automatic_settings = Automatic()
        if isinstance(self.graph_config, Automatic):
            self.automatic_settings, self.graph_config = self.graph_config, AUTO
        shape = shape_for(self.criterion, self.graph_config)
        if shape != AUTO and self.automatic_settings != Automatic():
            raise ValueError(
                f'graph_config: criterion="{self.criterion}" needs a chain, whose length settings of Automatic do not '
                'choose; pass graph_config="chain" or GraphConfig.preset("chain", depth=…), or use criterion="exact"'
            )
        self.drafts = drafts_in(self.assistant_model)
        models = [draft for draft in self.drafts if not isinstance(draft, DraftSource)]
        self.translations = translations_of(self.tokenizer, self.assistant_tokenizer, models)
        if self.draft_heads is not None and not isinstance(self.draft_heads, (DraftHeads, str, os.PathLike)):
            got = type(self.draft_heads).__name__
            raise TypeError(f"draft_heads: expected DraftHeads, their folder or hub id, got {got}")
        if self.drafter is not None and not isinstance(self.drafter, (str, os.PathLike, *DRAFTERS)):
            kinds, got = ", ".join(kind.__name__ for kind in DRAFTERS), type(self.drafter).__name__
            one = "; of drafters one is taken" if isinstance(self.drafter, (list, tuple)) else ""
            raise TypeError(f'drafter: expected a folder, a hub id, "mtp", or one of {kinds}, got {got}{one}')
        if isinstance(self.reference_ids, Tensor) and not self.reference_ids.numel():
            self.reference_ids = None  # of any dtype and shape: the tokens of an empty text
        self.named = () if shape == PLAIN else self._names()
        self.automatic = shape in (None, AUTO) and bool(self.named)
        self.graph_config = GraphConfig() if shape in (AUTO, PLAIN) else resolve_graph_config(shape)
        others = {
            "draft_heads": self.draft_heads,
            "drafter": self.drafter,
            "reference_ids": self.reference_ids,
            "assistant_model": self.drafts[1:] or None,
        }
        check_chain(self.criterion, self.graph_config, self.draft_sources, others)
        if self.criterion in DRAWN:
            check_probabilities(self.translations, self.criterion)
        validate.check_backend(self.backend)
        if self.seed is not None:
            draw_seed(self.seed)
        validate.check_listeners(self.streamer, self.observer)

    def __repr__(self) -> str:
        """Shape and sources, in one line."""
        shape = AUTO if self.automatic else repr(self.graph_config) if self.named else PLAIN
        return (
            f"<{type(self).__name__}: {shape}, sources {', '.join(self.named) or 'none'}, criterion {self.criterion}>"
        )

    def _names(self) -> tuple[str, ...]:
        """Names of the sources in use; by default all that are given, and the history."""
        there = {draft.name if isinstance(draft, DraftSource) else "model" for draft in self.drafts}
        there |= {name for name, one in (("drafter", self.drafter), ("heads", self.draft_heads)) if one is not None}
        sources = self.draft_sources
        if sources is None:
            given = tuple(name for name in NEEDS if name in there)
            # The rule of speculative sampling is about a model's own draws: without a model there is none.
            return () if self.criterion in DRAWN and not given else (*given, "history")
        expected = (
            f"draft_sources: expected a tuple of {', '.join(NAMES)} or DraftSource objects, got {sources!r}; leave it "
            "out to take all that are given, and the history"
        )
        if not isinstance(sources, (tuple, list, str)):
            raise TypeError(expected)
        strange = [s for s in sources if not isinstance(s, DraftSource) and s not in NAMES]
        if not sources or sources in ("none", PLAIN) or "none" in strange:
            raise ValueError(f'{expected}; for decoding without any source pass graph_config="plain"')
        if isinstance(sources, str) or strange:
            near = "" if isinstance(sources, str) else did_you_mean(str(strange[0]), NAMES)
            raise ValueError(expected + near)
        for source in sources:
            if isinstance(source, DraftSource):
                check_source(source, NAMES)
        names = tuple(s.name if isinstance(s, DraftSource) else s for s in sources)
        if len(set(names)) < len(names):
            raise ValueError(f"draft_sources: {', '.join(names)} have a name twice; give each source a name of its own")
        for name, needed in NEEDS.items():
            if name in names and name not in there:
                raise ValueError(f'draft_sources: "{name}" needs {needed}')
            if name in there and name not in names:
                given = needed.partition(",")[0].partition("=")[0]
                raise ValueError(
                    f'draft_sources: leave out {given}, or name "{name}"; {given}=False leaves a patched model\'s out'
                )
        return names


def drafts_in(given: object) -> tuple[PreTrainedModel | Expansion, ...]:
    """The draft models of ``assistant_model``, unwrapped.

    Raises:
        TypeError, ValueError: not models, a model twice, or an empty list.
    """
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)):
        given = [given]
    elif not given:
        raise ValueError("assistant_model: expected draft models, got an empty list; leave it out for none")
    if len(given) > 1 and any(isinstance(draft, Expansion) or draft is None for draft in given):
        raise TypeError("assistant_model: expected a list of models; a LayerSkip is given alone")
    drafts = []
    for one in given:
        if isinstance(one, (str, os.PathLike)):
            raise TypeError(
                f"assistant_model: expected a model, got the path {os.fspath(one)!r}; load it, as by "
                "AutoModelForCausalLM.from_pretrained, or pass drafter= for the folder of a drafter"
            )
        draft = one if isinstance(one, Expansion) else properties.unwrap(one)
        if type(draft).__name__ == GEMMA4:
            raise validate.Unsupported(
                f"assistant_model: a {GEMMA4} has no keys and values of its own; pass drafter= its folder, or "
                "gsd_kernels.Gemma4Assistant(model)"
            )
        if not isinstance(draft, Expansion):
            validate.check_model("assistant_model", draft)
        drafts.append(draft)
    if len({id(draft) for draft in drafts}) < len(drafts):
        raise ValueError("assistant_model: the same draft model twice; give each once")
    return tuple(drafts)
