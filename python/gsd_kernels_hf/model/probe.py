"""One forward of a few tokens, which shows how a model treats graph rows.

Nothing here knows a family by name. The forward's attention is a stand-in in which every row sees itself alone, so that
whatever else mixes rows or sequences shows; the rows are chosen so that one position is at two places of the cache. How
far back rows see says the function that transformers made a mask of; where a text must end, the table, if there is one,
in which a model looks up where its tokens stand.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.masking_utils import causal_mask_function

from ..packed.modules import PackedLinear, dtype_of
from .attention import (
    AttentionKind,
    Temperature,
    implementation_of,
    original_attention,
    switched_configs,
    watching,
)
from .cache import GraphCache
from .facts import Facts, described, fact, is_shipped
from .hidden import hooked
from .modes import Unserved, Unsupported
from .properties import storing, text_config
from .recurrent.mixers import RowTree, limit_of, mixers_of, states_in, with_mixers
from .sides import check_sides

CACHED = 3  # positions that the cache holds already
POSITIONS = [[3, 4, 5, 4, 5], [0, 0, 0, 1, 2]]  # [2, ROWS]; the second sequence is padded up to its column 2
ROWS = len(POSITIONS[0])
TWIN_COLUMNS = (1, 3)  # columns of the first sequence with one token at one position
POISONED = 2  # the first sequence's column whose embedding is NaN
UNLIKE_RATIO = 0.05  # relative difference that no rounding makes
PADDING = (0, CACHED + POISONED)  # of the sequences
LOUD_FACTOR = 1e3  # times as large as the other rows
PIECE_TOKENS = 4  # of a piece of a prompt, at least
WHOLE_TOKENS = 2**31
"""Least size of pieces of prompts that are read in one: layers begin with no state at every piece, as Jamba's do."""
SEVERAL_TOKENS = 2
"""Where one token alone is read by other rules than a prompt, as Zamba 2's."""


@dataclass(frozen=True)
class AttentionReport:
    """The findings. ``problem`` completes a sentence that begins with the model's class; ``None``: there is none."""

    kinds: tuple[AttentionKind, ...] = ()  # of every attention call of a forward, in their order
    unwritten: frozenset[int] = frozenset()  # layers of the cache that get nothing, before others that do
    stacked: bool = False  # whether layers store alike on one GPU, so that their storage may be one
    positions: int | None = None  # that it has entries for in a table; ``None``: there is no table
    unusual: str | None = None  # attention that may be another one than graph rows get, which a proof shows
    problem: str | None = None
    cause: BaseException | None = None  # an error of the model's, which may be a passing one, as full memory is

    @property
    def passing(self) -> bool:
        """Say whether another look may find something else."""
        return self.cause is not None


def unusual(own: Callable[..., Any], options: dict[str, Any]) -> str | None:
    """A reason to doubt that a call of a function is softmax attention over all that it was told, or ``None``."""
    if not is_shipped(own):
        return f"its attention is {described(own)}; model.set_attn_implementation('sdpa') chooses another"
    for what, name in (("sinks", "s_aux"), ("a softcap", "softcap")):
        if options.get(name) is not None:
            return (
                f"{described(own)} may leave {what} out; model.set_attn_implementation('eager') chooses what does not"
            )
    return None


class Probe:
    """Stands in for the attention of one forward, and notes what arrives."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, Any, dict[str, Any]]] = []  # what attends, its mask, other arguments
        self.masks: list[tuple[Any, dict[str, Any]]] = []
        self.without_graph = 0
        self.unusual: str | None = None

    def made(self, mask: Any, arguments: dict[str, Any]) -> None:
        """Note a mask."""
        self.masks.append((mask, arguments))

    def called(
        self,
        implementation: str,
        graph: Any,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        options: dict[str, Any],
    ) -> Tensor:
        """Note a call to the function of a name, with ``graph=`` or without, and let every row see itself alone."""
        if graph is None:
            self.without_graph += 1
        else:
            check_call(module, query, key, value, options)
            self.unusual = self.unusual or unusual(original_attention(implementation, module), options)
            self.calls.append((module, attention_mask, options))
        rows = value[:, :, -query.shape[2] :]
        return rows.repeat_interleave(query.shape[1] // value.shape[1], dim=1)  # [B, Hq, R, Dv]


def check_call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
    """Raise unless ``dag_attention`` computes what this call asks for."""
    sinks = options.get("s_aux")
    if sinks is not None and not (isinstance(sinks, Tensor) and sinks.shape == query.shape[1:2]):
        raise Unserved(f"has attention sinks (s_aux) that are not one for each of {query.shape[1]} heads")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise Unserved("has attention that is not causal (is_causal=False)")
    for name, given in options.items():
        if name != "s_aux" and isinstance(given, Tensor) and given.is_floating_point():
            raise Unserved(f"hands {name} to its attention, which graph rows have none of")
    if not query.dtype == key.dtype == value.dtype:
        raise Unserved(
            f"attends to keys of {key.dtype} and values of {value.dtype}, as under autocast inside its forward"
        )
    if query.shape[2] != ROWS or key.shape[2] != CACHED + ROWS:
        raise Unserved(f"attends from {query.shape[2]} rows to {key.shape[2]}, not from {ROWS} to {CACHED + ROWS}")
    if query.shape[1] % value.shape[1]:
        raise Unserved(f"has {query.shape[1]} query heads over {value.shape[1]} heads in its cache")
    for what, states in (("queries", query), ("keys", key), ("values", value)):
        one, other = (states[0, :, -ROWS:][:, row].float() for row in TWIN_COLUMNS)
        if float((one - other).norm()) > UNLIKE_RATIO * float(one.norm()):
            raise Unserved(f"computes {what} by place in the cache rather than by position_ids")


class ProbeCache(GraphCache):
    """A cache that notes whether layers ask for its length, which means nothing to graph rows; for ``facts``' model."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts.model.config, CACHED + ROWS)
        self.prompt_length, self.by_length = CACHED, frozenset(temperatures_of(facts))
        self.input_device = facts.device
        self.asked: set[int | None] = set()  # layers; what asks before one has stored something may be the model
        self.updated: list[int] = []  # layers, in the order in which they were stored

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store like its base, and note the layer."""
        self.updated.append(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Answer as for rows, and note who asked; before anything is stored, as if the prompt were."""
        scales, begun = layer_idx in self.by_length, any(layer.is_initialized for layer in self.layers)
        self.asked |= {layer_idx} if scales or begun else set()
        if scales:
            return self.no_places(layer_idx, ROWS, self.input_device)
        return super().get_seq_length(layer_idx, *args, **kwargs) if begun else self.prompt_length


@fact
def temperatures_of(facts: Facts) -> dict[int | None, Temperature]:
    """The factors of layers that scale their queries by the cache's length, by their number."""
    found = ((getattr(module, "layer_idx", None), Temperature.of(module)) for _, module in facts.modules)
    return {layer: temperature for layer, temperature in found if temperature is not None}


@fact
def examine(facts: Facts) -> AttentionReport:
    """Look at what a model does with graph rows.

    One forward of 2 × 5 tokens, remembered until the model's structure is another one, see :class:`.Facts`; what an
    error cut short is not. The model is left as it was.
    """
    try:
        with trying(facts):
            check_linears(facts)
            check_sides(facts)
            report, clean = _forward(facts, poisoned=True)
            # Weights that hold NaN show nothing; they are found out by their logits.
            if not clean and _forward(facts, poisoned=False)[1]:
                raise Unserved("lets a token's row reach other rows or sequences otherwise than by attention")
            return report
    except Unserved as error:
        return AttentionReport(problem=str(error), cause=error.__cause__)
    except Exception as error:  # whatever it is: the model cannot be forwarded as graph rows are
        problem = f"cannot be forwarded with graph rows ({in_words(error)})"
        if getattr(facts.model.config, "return_dict", True) is False:
            problem += ", nor by transformers while model.config.return_dict is False: set it to True"
        return AttentionReport(problem=problem, cause=error)


def in_words(error: Exception) -> str:
    """An error's type and the beginning of its text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def served(facts: Facts, name: str = "model") -> AttentionReport:
    """The findings of :func:`examine`, without a problem.

    Raises:
        Unsupported: the model, the argument ``name``, cannot be forwarded with graph rows.
    """
    report = examine(facts)
    if report.problem is not None:
        kind = type(facts.model).__name__
        raise Unsupported(f"{name}: {kind} {report.problem}; not supported") from report.cause
    return report


@contextmanager
def trying(facts: Facts) -> Iterator[None]:
    """Forward without gradients, and leave torch's generators as they are: a model in training mode draws from them."""
    devices = [facts.device] if facts.device.type == "cuda" and facts.model.training else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.no_grad():
        yield


def _forward(facts: Facts, *, poisoned: bool) -> tuple[AttentionReport, bool]:
    """Forward the rows: what is found, and whether NaN appeared nowhere but where it was put."""
    model, device, probe, cache = facts.model, facts.device, Probe(), ProbeCache(facts)
    if mixers_of(facts):  # whose rows see themselves alone as well; how they see others is proved apart
        none = torch.full((2, ROWS), -1, device=device)
        cache.tree = RowTree(none, torch.zeros_like(none))
        model = with_mixers(model, cache.form_of)
    tokens = torch.tensor([[5, 7, 9, 7, 8], [5, 7, 9, 7, 8]], device=device, dtype=torch.int64) % facts.vocabulary
    mask = torch.ones(2, CACHED + ROWS, dtype=torch.int64, device=device)
    mask[1, : CACHED + POISONED] = 0
    positions = torch.tensor(POSITIONS, device=device, dtype=torch.int64)
    lookups = Lookups(facts, positions)

    def spoil(_: Any, output: Any) -> Any:
        if poisoned and output.shape[:2] == (2, ROWS):
            output = output.clone()
            output[0, POISONED] = torch.nan
        return output

    with switched_configs(facts.configs), watching(probe), hooked(model.get_input_embeddings(), spoil), lookups:
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            **storing(facts.model, cache),
            graph=probe,
        )
    calls, total = len(probe.calls), probe.without_graph + len(probe.calls)
    seen = f"{calls} of {total} attention calls" if total else "none of its layers"
    stored = sum(layer.is_initialized for layer in cache.layers)
    twice = [layer for layer in cache.updated if cache.updated.count(layer) > 1]
    for found, words in (
        (cache.forms and not total, "has recurrent layers alone, of which transformers' cache knows no length"),
        (
            model._is_stateful and not total,
            "keeps a state that is not in transformers' cache, and that no row could be taken out of again",
        ),
        (
            probe.without_graph or not calls,
            f"does not use transformers' attention interface as graph rows need it: {seen} pass unknown keywords on to "
            "the attention function; LLaMA-family models do",
        ),
        (not 0 < stored <= calls, f"stores keys in {stored} layers of the cache and attends in {calls}"),
        (twice, f"stores keys of several attention calls in layer {next(iter(twice), None)} of the cache (layer_idx)"),
        (  # another layer scales by it, or one by what the model makes of it, as in 5.0
            cache.asked != cache.by_length,
            "computes with the cache's length in its layers, which differs from the positions of graph rows",
        ),
    ):
        if found:
            raise Unserved(words)
    unknown = output.logits.isnan().any(-1)  # [2, ROWS]
    if poisoned:
        unknown[0, POISONED] = False
    report = AttentionReport(
        tuple(_kinds(facts, probe)),
        frozenset(range(max(cache.updated))) - set(cache.updated),
        cache.alike_on_a_gpu,
        min(lookups.ends, default=None),
        probe.unusual,
    )
    return report, not bool(unknown.any())


def _kinds(facts: Facts, probe: Probe) -> Iterator[AttentionKind]:
    """The demands of every attention call.

    What a call says is what flash attention goes by, the mask is what every other implementation goes by.
    """
    flash = str(implementation_of(text_config(facts.model))).startswith("flash")
    layers, temperatures = DynamicCache(config=facts.model.config).layers, temperatures_of(facts)
    cached = {i: layer.sliding_window for i, layer in enumerate(layers) if getattr(layer, "is_sliding", False)}
    known: dict[tuple[int, int | None], AttentionKind] = {}  # layers share a mask or two, which the calls keep alive
    for module, mask, options in probe.calls:
        layer, window = getattr(module, "layer_idx", None), options.get("sliding_window")
        asked = id(mask), window
        if asked not in known:
            known[asked] = limits_of_mask(mask, window, probe.masks)
        limits = known[asked]
        if flash and limits.chunk is not None:
            raise Unserved(f"has chunks of {limits.chunk} in its mask, which flash attention has none of")
        if flash and limits.window != window:
            raise Unserved(
                f"has a sliding window of {limits.window} in its mask and of {window} in its attention calls"
            )
        kept, most = cached.get(layer), limits.most
        if kept is not None and (most is None or most > kept):
            raise Unserved(
                f"has a cache that keeps {kept} tokens (sliding_window) under attention that "
                + ("sees all of them" if most is None else f"sees {most}")
            )
        sinks = getattr(options.get("s_aux"), "dtype", None)
        yield replace(limits, sinks=sinks, temperature=temperatures.get(layer))


def check_linears(facts: Facts) -> None:
    """Raise if what a linear layer says of a row depends on the other rows, as with activations quantised together."""
    dtype = dtype_of(facts.model.get_input_embeddings())
    for name, module in facts.modules:
        if not _is_special_linear(module):
            continue
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, module.in_features, generator=generator, dtype=torch.float32, device="cpu")
        tensors = (*module.parameters(), *module.buffers())
        device = next((t.device for t in tensors if t.device.type != "meta"), facts.device)
        x, said = x.to(device, dtype if dtype.is_floating_point else torch.float32), []
        try:
            for factor in (1.0, LOUD_FACTOR):
                if facts.model.training:
                    torch.manual_seed(0)  # dropout drops the same
                said.append(module(torch.cat([x[:1], factor * x[1:]]))[:1].float())
        except Exception:  # it takes something else than rows; the forward shows what it does with them
            continue
        alone, among = said
        if float((alone - among).norm()) > 2 * UNLIKE_RATIO * float(alone.norm()):
            raise Unserved(
                f"has activations that are quantised over all rows of a forward ({name}: {type(module).__name__}), so "
                "drafted tokens would change the output; quantise weights only, or activations row by row"
            )


def _is_special_linear(module: nn.Module) -> bool:
    if type(module) is PackedLinear:  # which takes row by row, and unpacks its weights for whom asks
        return False
    if not isinstance(getattr(module, "in_features", None), int) or getattr(module, "out_features", None) is None:
        return False
    weight = getattr(module, "weight", None)
    if "DTensor" in (type(weight).__name__, type(getattr(weight, "data", None)).__name__):
        return False  # a shard of a tensor-parallel layer takes a shard of a row
    return type(module) is not nn.Linear or type(weight) not in (Tensor, nn.Parameter)


FAR = 1 << 20  # no window reaches further


def limits_of_mask(mask: Any, call_window: int | None, made: list[tuple[Any, dict[str, Any]]]) -> AttentionKind:
    """The limits of the mask that arrived, which the model's mask function must have made.

    Where it is a copy, on another device for instance, that could be of several, ``call_window`` decides.

    Args:
        mask: as it arrived.
        call_window: the window that the attention call names.
        made: masks and what they were made of.
    """
    by_likeness: dict[int, list[dict[str, Any]]] = {}
    for own, arguments in made:
        by_likeness.setdefault(likeness(mask, own), []).append(arguments)
    most = max(by_likeness, default=0)
    if not most:
        raise Unserved("makes an attention mask of its own, which graph rows cannot follow")
    origins = by_likeness[most]
    if any(arguments.get("attention_mask") is None for arguments in origins):
        raise Unserved("leaves padding out of its attention mask")
    limits = {limits_of(arguments.get("mask_function", causal_mask_function), PADDING) for arguments in origins}
    if len(limits) > 1:
        limits = {one for one in limits if one.window == call_window}
    if len(limits) != 1:
        raise Unserved("has attention masks that cannot be told apart")
    return limits.pop()


def likeness(mask: Any, own: Any) -> int:
    """How surely a mask is one that was made: 3, itself; 2, a view of its memory; 1, a copy; 0, it is not."""
    if mask is own and own is not None:
        return 3
    both = isinstance(mask, Tensor) and isinstance(own, Tensor)
    if not both or mask.dtype != own.dtype or mask.shape != own.shape:
        return 0
    with suppress(RuntimeError):  # a wrapper of tensors has no storage
        if mask.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
            return 2
    return int((mask == own.to(mask.device)).all())


def limits_of(mask_function: Callable[..., Tensor], padding: Sequence[int] = (0,)) -> AttentionKind:
    """Find what limits a mask function (b, h, q, k) → bool of columns, for sequences behind ``padding``.

    Raises:
        Unserved: the function is not that of a causal mask, with or without a window or chunks.
    """

    def sees(sequence: int, row: Tensor, back: Tensor) -> Tensor:
        zero, column = torch.zeros_like(row), row + padding[sequence]
        seen = mask_function(zero + sequence, zero, column, column - back)
        return torch.as_tensor(seen, dtype=torch.bool, device=row.device).expand_as(row)

    def blind(row: int, back: int) -> bool:
        return not sees(0, *torch.tensor([[row], [back]], dtype=torch.int64, device="cpu"))

    try:
        # The first row that does not see the text's first token; a chunk's does not see its predecessor either.
        first = 1 + bisect_left(range(1, FAR), True, key=lambda row: blind(row, row))
        chunked = 1 < first < FAR and blind(first, 1)
        limits = AttentionKind(chunk=first) if chunked else AttentionKind(None if first == FAR else first)
        edge = limits.most or 4096
        few = {0, 3, 7, 100, *(1 << i for i in range(20))}
        few |= {edge - 1, edge, edge + 1, 2 * edge - 1, 2 * edge, 3 * edge + 1}
        pairs = ((row, back) for row in few | {FAR} for back in few | {-1, -2, -100} if back <= row)
        row, distance = torch.tensor(list(pairs), dtype=torch.int64, device="cpu").T
        expected = limits.seen(row, row - distance)
        exact = all(bool((sees(sequence, row, distance) == expected).all()) for sequence in range(len(padding)))
    except Exception as error:
        raise Unserved(f"has an attention mask that depends on more than positions ({type(error).__name__})") from error
    if not exact:
        raise Unserved("has attention that is neither causal nor causal within a sliding window or chunks")
    return limits


def piece(facts: Facts, cache: DynamicCache, ids: Tensor, mask: Tensor, begin: int, end: int) -> Tensor:
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
    with trying(facts), suppress(Exception):
        # What cannot be forwarded, the proof of its rows names.
        if _begins_anew(facts):
            return WHOLE_TOKENS
    return SEVERAL_TOKENS if any(limit_of(module) is not None for _, module in mixers) else 1


@fact
def _begins_anew(facts: Facts) -> bool:
    ids, first = torch.arange(2 * PIECE_TOKENS, device=facts.device)[None], DynamicCache(config=facts.model.config)
    mask = torch.ones_like(ids)
    piece(facts, first, ids, mask, 0, PIECE_TOKENS)
    for layer in {type(module): module.layer_idx for _, module in reversed(mixers_of(facts))}.values():
        for state in states_in(first.layers[layer]):
            cache = copy.deepcopy(first)
            states_in(cache.layers[layer])[state].fill_(torch.nan)
            if bool(piece(facts, cache, ids, mask, PIECE_TOKENS, ids.shape[1]).isfinite().all()):
                return True
    return False


class Lookups(TorchFunctionMode):
    """Notes the tables of a model that a forward looks its tokens' positions up in.

    Args:
        facts: of the model, whose parameters, buffers and other tensors are its tables.
        positions: int [B, R], as ``position_ids`` of the forward.

    Attributes:
        ends: positions that the tables have entries for.
    """

    def __init__(self, facts: Facts, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions.flatten()
        # Other facts than the call's: the forward that is looked into may have a library rewrite its weights.
        self.owned = {tensor.data_ptr() for tensor in Facts(facts.model).tensors}
        self.ends: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``func`` as it is; noted if it looks up positions."""
        table, indices = looked_up(func, args)
        if isinstance(table, Tensor) and isinstance(indices, Tensor):
            self._note(table, indices.flatten())
        return func(*args, **(kwargs or {}))

    def _note(self, table: Tensor, indices: Tensor) -> None:
        indices = getattr(indices, "to_local", lambda: indices)()  # of a sharded model: the same on every rank
        if indices.shape != self.positions.shape or indices.is_floating_point() or table.data_ptr() not in self.owned:
            return
        offset = indices - self.positions.to(indices.device)  # some tables begin with entries for padding
        if bool((offset == offset[0]).all()):
            self.ends.append(table.shape[0] - int(offset[0]))


def looked_up(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """A table and the indices of its first dimension that a call of ``func`` reads, or ``None`` twice."""
    if func is functional.embedding and len(args) > 1:
        return args[1], args[0]
    if func is Tensor.__getitem__:
        return args[0], args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    if func in (torch.index_select, Tensor.index_select) and len(args) > 2 and args[1] == 0:
        return args[0], args[2]
    return None, None
