"""Ways of decoding one prompt: ours, and everything transformers brings for the same purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from gsd_kernels import GraphConfig, LayerSkip
from gsd_kernels_cli import comparison
from gsd_kernels_hf.engine import engine
from gsd_kernels_hf.sources.load import source_of

from .pairs import Pair

NEW = "-new"  # behind the names of ours that begin every call with a new session, in which nothing is captured yet
GREEDY, STATIC, PLAIN, AUTO, HISTORY_AUTO = "hf-greedy", "hf-static-compile", "plain", "auto", "history-auto"
ASSISTED = ("hf-assisted-3", "hf-assisted-5", "hf-assisted-8", "hf-assisted-dynamic")
OTHER_SPECULATION = ("hf-prompt-lookup", "hf-early-exit", "hf-mtp", "hf-dflash")
HISTORY_ROWS = {"history-4": 4, "history-8": 8, "history-16": 16}  # fixed shapes beside ``history``, which has 11 rows
#: ``merged`` joins recurring sequences inside a step, ``graph`` across steps too, through the history; ``all`` is
#: ``graph`` with the heads. ``history`` verifies as many rows as prompt lookup does, ``history-auto`` what pays of any.
#: ``auto`` is what a user has who names a draft model and nothing else.
BASIC = (
    *(PLAIN, "chain", "tree", "merged", "graph", "history", *HISTORY_ROWS, HISTORY_AUTO),
    *("layer-skip", "heads", "all", AUTO, f"graph{NEW}", f"{AUTO}{NEW}"),
)
#: By name: draft sources beside the pair's own draft, and the shape. All verify as many rows at most.
DRAFTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "heads-history": (("heads", "history"), "graph"),
    "heads-auto": (("model", "heads", "history"), AUTO),
    "eagle3-chain": (("eagle3",), "chain"),
    "eagle3": (("eagle3",), "merged"),
    "eagle3-history": (("eagle3", "history"), "graph"),
    "dflash-chain": (("dflash",), "block-chain"),
    "dflash-lattice": (("dflash",), "block"),
    "dflash-history": (("dflash", "history"), "block-history"),
    "every": (("model", "heads", "eagle3", "dflash", "history"), "graph"),
    "every-auto": (("model", "heads", "eagle3", "dflash", "history"), AUTO),
    "eagle3-auto": (("eagle3", "history"), AUTO),
}
OURS = (*BASIC, *DRAFTERS)
COMPETITORS = (GREEDY, STATIC, *ASSISTED, *OTHER_SPECULATION, *OURS)
#: Raced where they are asked for.
SINGLE_SOURCES = ("merged", *HISTORY_ROWS, HISTORY_AUTO, "layer-skip", "heads", "all", *DRAFTERS)
LATER = (*SINGLE_SOURCES, f"graph{NEW}", f"{AUTO}{NEW}")
DEFAULT = tuple(name for name in COMPETITORS if name not in LATER)

#: With the draft model; ``auto`` drafts from the history where there is none.
NEED_A_DRAFT = (*ASSISTED, "hf-dflash", "chain", "tree", "merged", "graph", f"graph{NEW}", "all")

BLOCK_DEPTH = 7  # of the embedded DFlash drafter's block, and of what train-drafter makes by default
PROMPT_LOOKUP_TOKENS = 10  # transformers' documentation's choice

Decode = Callable[[Tensor, int, int], comparison.Decoded]
"""(prompt [1, P], new tokens, seed) → what was decoded."""


@dataclass(frozen=True)
class Competitor:
    """A way of decoding, or why it is missing.

    Attributes:
        compiled: decodes with a compiled forward, which must be warmed up in full.
    """

    name: str
    decode: Decode | None = None
    missing: str | None = None
    compiled: bool = False


def fixed_configs(device: torch.device) -> dict[str, GraphConfig]:
    """The chain, tree and graph that ``auto`` has to beat: rows cost time on a CPU and hardly any on a GPU."""
    if device.type == "cuda":
        tree = GraphConfig(depth=6, width=8, branch=4, max_rows=64, merge_context=-1)
        chain = GraphConfig.preset("chain", depth=8)
    else:
        tree = GraphConfig(depth=5, width=3, branch=3, max_rows=16, merge_context=-1)
        chain = GraphConfig.preset("chain", depth=5)
    merged = tree.replace(merge_context=2)
    graph = merged.replace(history_depth=4, history_width=8)
    rows = PROMPT_LOOKUP_TOKENS + 1
    history = GraphConfig(
        depth=0, branch=3, max_rows=rows, merge_context=2, history_depth=PROMPT_LOOKUP_TOKENS, history_width=3
    )
    block = merged.replace(depth=BLOCK_DEPTH, merge_context=0)  # its candidates hold below every path, at one forward
    return {
        "chain": chain,
        "tree": tree,
        "merged": merged,
        "graph": graph,
        "history": history,
        **{
            name: history.replace(max_rows=rows, history_depth=min(rows - 1, PROMPT_LOOKUP_TOKENS))
            for name, rows in HISTORY_ROWS.items()
        },
        "all": graph,
        "block-chain": GraphConfig.preset("chain", depth=BLOCK_DEPTH),
        "block": block,
        "block-history": block.replace(history_depth=4, history_width=8),
    }


def check_names(names: Sequence[str]) -> None:
    """Raise a ValueError that names the first of ``names`` which is no competitor."""
    unknown = [name for name in names if name not in COMPETITORS]
    if unknown:
        raise ValueError(f"--competitors: {unknown[0]!r} is none of {', '.join(COMPETITORS)}")


def competitors(
    pair: Pair,
    names: Sequence[str],
    *,
    temperature: float = 0.0,
    backend: str = "auto",
    quick: bool = False,
) -> list[Competitor]:
    """The named ones, in the given order.

    Raises:
        ValueError: an unknown name.
    """
    check_names(names)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    wanted = dict.fromkeys(names)
    undrafted = {name for name in wanted if pair.draft is None and _needs_draft(name)}
    return [
        Competitor(name, missing="no draft model was given")
        if name in undrafted
        else _competitor(name, pair, sampling, backend, quick)
        for name in wanted
    ]


def _needs_draft(name: str) -> bool:
    return name in NEED_A_DRAFT or "model" in DRAFTERS.get(name, ((), ""))[0]


def _competitor(
    name: str,
    pair: Pair,
    sampling: dict[str, Any],
    backend: str,
    quick: bool,
) -> Competitor:
    target, draft = pair.target, pair.draft
    if name in DRAFTERS:
        return _drafters(name, pair, sampling, backend)
    if name in OURS:
        if name in ("heads", "all") and pair.heads is None:
            return Competitor(name, missing="the pair has no trained heads")
        if name == "layer-skip" and pair.source is None:
            return Competitor(name, missing="searched for the demo's pair alone, whole")
        return Competitor(name, _ours(name, pair, sampling, backend))

    def theirs(**options: Any) -> Decode:
        return _seeded(comparison.plain(target, **sampling, **options))

    if name == GREEDY:
        return Competitor(name, theirs())
    if name == STATIC:
        return _static(name, target, theirs, quick)
    if name in ASSISTED:
        setting = name.rpartition("-")[2]
        tokens = None if setting == "dynamic" else int(setting)
        return Competitor(name, _seeded(comparison.assisted(target, draft, tokens, **sampling)))
    if name == "hf-prompt-lookup":
        return Competitor(name, theirs(prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS))
    if name == "hf-early-exit":
        layers = target.config.num_hidden_layers
        if layers < 2:
            return Competitor(name, missing="a target of one layer has no earlier exit")
        # Half of the layers that compute something: an inflated target's added ones do not.
        return Competitor(name, theirs(counted=False, assistant_early_exit=max(1, _effective_layers(pair) // 2)))
    return _by_model(name, target, draft, theirs)


def _seeded(contender: comparison.Contender) -> Decode:
    """Decode with transformers' own random numbers."""

    def decode(ids: Tensor, new_tokens: int, seed: int) -> comparison.Decoded:
        torch.manual_seed(seed)
        return contender(_inputs(ids), new_tokens)

    return decode


def _inputs(ids: Tensor) -> comparison.Inputs:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _by_model(
    name: str, target: PreTrainedModel, draft: PreTrainedModel | None, theirs: Callable[..., Decode]
) -> Competitor:
    """Modes that need a model which was trained for them."""
    known = vars(GenerationConfig())
    if name == "hf-mtp":
        if "use_mtp" not in known:
            return Competitor(name, missing="this version of transformers has no multi-token prediction")
        if not getattr(target.config, "num_mtp_layers", None):
            return Competitor(name, missing="the target has no multi-token-prediction layers")
        return Competitor(name, theirs(use_mtp=True))
    if "speculation_type" not in known:
        return Competitor(name, missing="this version of transformers has no dflash")
    if not hasattr(draft.config, "target_layer_ids"):
        return Competitor(name, missing="the draft is not a dflash model")
    return Competitor(name, theirs(assistant_model=draft, speculation_type="dflash"))


def _static(name: str, target: PreTrainedModel, theirs: Callable[..., Decode], quick: bool) -> Competitor:
    if quick:
        return Competitor(name, missing="compiling it takes longer than --quick allows")
    from transformers import CompileConfig

    config = CompileConfig()
    if target.device.type == "cpu":
        if not hasattr(config, "_compile_all_devices"):
            return Competitor(name, missing="this version of transformers compiles on GPUs only")
        config._compile_all_devices = True
        config.mode = "default"  # the other modes are about CUDA graphs
    return Competitor(name, theirs(counted=False, cache_implementation="static", compile_config=config), compiled=True)


def _effective_layers(pair: Pair) -> int:
    """Layers whose output projections are not all zero, as an inflated target's added ones are."""
    target = pair.target
    if pair.source is None:
        return int(target.config.num_hidden_layers)
    return sum(bool(layer.mlp.down_proj.weight.any()) for layer in target.model.layers)


@contextmanager
def new_sessions(target: PreTrainedModel) -> Iterator[None]:
    """Keep what other calls of a target left from those inside, and nothing that these leave."""
    kept, engine._unpatched[target] = engine.engines_of(target), engine.Engines()
    try:
        yield
    finally:
        engine._unpatched[target] = kept


def layer_skip(pair: Pair) -> LayerSkip:
    """Search skipped layers on the source of the target; of an inflated target's added layers skip the same share."""
    assert pair.source is not None and pair.sample is not None
    source = pair.source.to(pair.sample.device)
    skip = LayerSkip.search(source, pair.sample)
    own, all_ = source.config.num_hidden_layers, pair.target.config.num_hidden_layers

    def scaled(skipped: Sequence[int]) -> list[int]:
        return [*skipped, *range(own, own + round((all_ - own) * len(skipped) / own))]

    return LayerSkip(pair.target, attention=scaled(skip.attention), mlp=scaled(skip.mlp))


def _drafters(name: str, pair: Pair, sampling: dict[str, Any], backend: str) -> Competitor:
    """Drafters of the pair, alone or mixed."""
    wanted, shape = DRAFTERS[name]
    own = {kind: source_of(drafter) for kind, drafter in pair.drafters.items()}
    missing = [w for w in wanted if w not in own and w not in ("model", "heads", "history")]
    missing += ["heads"] * ("heads" in wanted and pair.heads is None)
    if missing and not (name.startswith("every") and len(missing) < 3):
        return Competitor(name, missing=f"the pair has no trained {', '.join(missing)}")
    options: dict[str, Any] = {"graph_config": fixed_configs(pair.target.device).get(shape, shape)}
    sources = [own.get(source, source) for source in wanted if source not in missing]
    options["draft_sources"] = tuple(sources)
    options |= {"assistant_model": pair.draft} if "model" in wanted else {}
    options |= {"draft_heads": pair.heads} if "heads" in sources else {}

    def decode(ids: Tensor, new_tokens: int, seed: int) -> comparison.Decoded:
        contender = comparison.graph(pair.target, seed=seed, backend=backend, **sampling, **options)
        return contender(_inputs(ids), new_tokens)

    return Competitor(name, decode)


def _ours(name: str, pair: Pair, sampling: dict[str, Any], backend: str) -> Decode:
    target, configs = pair.target, fixed_configs(pair.target.device)
    is_new, name = name.endswith(NEW), name.removesuffix(NEW)
    options: dict[str, Any] = {"assistant_model": pair.draft}
    if name == PLAIN:
        options = {"graph_config": PLAIN}
    elif name == AUTO:
        options["graph_config"] = "auto"
    elif name in ("history", *HISTORY_ROWS, HISTORY_AUTO):
        options = {"draft_sources": ("history",), "graph_config": configs.get(name, "auto")}
    elif name == "layer-skip":
        options = {"assistant_model": layer_skip(pair), "graph_config": configs["merged"]}
    elif name == "heads":
        options = {"draft_heads": pair.heads, "draft_sources": ("heads",), "graph_config": configs["merged"]}
    else:
        options["graph_config"] = configs[name]
        if name == "all":
            options["draft_heads"] = pair.heads

    def decode(ids: Tensor, new_tokens: int, seed: int) -> comparison.Decoded:
        contender = comparison.graph(target, seed=seed, backend=backend, **sampling, **options)
        with new_sessions(target) if is_new else nullcontext():
            return contender(_inputs(ids), new_tokens)

    return decode
