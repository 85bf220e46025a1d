"""The measures that rows as one operator are held to: its error, its bits wherever they are due, and its time.

On a few layers with random weights, in the operator's dtype and in float32, beside the modules.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from . import replay
from .proof import tree_of
from .runner import RowModel

Way = Callable[[Any, int, Tensor, str], RowModel]
"""Makes what forwards rows, of a model, cache positions, left padding int32 [B] and a backend."""

BRANCH = 4  # children of a node of the tree
ROWS = 64  # of a comparison with float32
MOST_ROWS = 256
PARTS = ((0, 1), (0, 16), (5, 22), (16, 48), (3, 36), (0, 64), (63, 64), (64, 192), (127, 256))
"""First and last of some rows: blocks of 16, 32, 64, 128 and 256 rows, each with places left over."""

BOUNDS = {
    torch.bfloat16: {"row": 0.06, "element": 0.4},
    torch.float16: {"row": 0.008, "element": 0.05},
    torch.float32: {"row": 1e-5, "element": 1e-4},
}
"""Of float32 logits what rounding of a few layers may cost; ten times what was seen on CPUs (bfloat16: 0.006, 0.04)."""
TIMES_THE_MODULES = 2.0
SLACK = 1e-5  # of float32, where the modules are the measure itself
NO_NUMBER = 1e9  # an error that is none, or larger
IN_A_ROW, TURNS = 5, 5  # calls that are timed together, and how often


@dataclass(frozen=True)
class Case:
    """Rows behind a prefix: tokens of the prompt, and left padding of every sequence."""

    prefix: int
    pads: tuple[int, ...] = (0,)

    @property
    def name(self) -> str:
        return f"prefix={self.prefix}" + (f" pads={','.join(map(str, self.pads))}" if len(self.pads) > 1 else "")


@dataclass(frozen=True)
class Sizes:
    """Of a model that a proof makes: those of a 1B, whose layers no second-level cache holds."""

    hidden: int = 2048
    inner: int = 8192
    layers: int = 2
    vocabulary: int = 4096


def random_model(sizes: Sizes, dtype: torch.dtype, head_dim: int, device: torch.device) -> Any:
    """A LLaMA, four query heads to one of keys; no random numbers are taken from anybody."""
    heads = sizes.hidden // head_dim
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=head_dim,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).eval()
    model = model.to(dtype=dtype).to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        mean, spread = (1.0, 0.1) if parameter.dim() == 1 else (0.0, parameter.shape[1] ** -0.5)
        parameter.normal_(mean, spread, generator=generator)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    return model


def row_inputs(
    rows: int, prefix: int, device: torch.device | str = "cpu", batch: int = 1, branch: int = BRANCH
) -> tuple[Tensor, ...]:
    """A tree of ``rows`` nodes, each with up to ``branch`` children; arguments of :meth:`RowModel.rows`.

    Of a batch every sequence has other tokens.
    """
    device = torch.device(device)
    mask, depths = tree_of([-1, *((row - 1) // branch for row in range(1, rows))], batch, device)
    kv_len = torch.full((batch,), prefix, dtype=torch.int32, device=device)
    slots = torch.arange(rows, device=device)
    tokens = (slots + torch.arange(batch, device=device)[:, None]) % 7
    return tokens, kv_len, slots, mask, depths, depths


class Subject:
    """The subject of a proof: the rows of a model by one operator, beside its modules.

    Args:
        make: makes the model, when it is first asked for.
        ways: ``"operator"`` and ``"modules"``.
        backend: of the operator.
    """

    def __init__(self, make: Callable[[], Any], ways: Mapping[str, Way], backend: str = "auto") -> None:
        self.make, self.ways, self.backend = make, ways, backend

    @cached_property
    def model(self) -> Any:
        return self.make()

    @cached_property
    def exact(self) -> Any:
        return copy.deepcopy(self.model).float()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @torch.no_grad()
    def behind(self, case: Case, way: str = "operator", model: Any = None, backend: str = "reference") -> RowModel:
        """A way to forward rows, behind the tokens of a case.

        Modules attend by the reference, so that the proof needs none of our other kernels.
        """
        model, device = model or self.model, self.device
        start = torch.tensor(case.pads, dtype=torch.int32, device=device)
        named = self.backend if way == "operator" else backend
        rows = self.ways[way](model, case.prefix + MOST_ROWS, start, named)
        at = torch.arange(case.prefix, device=device)
        # What is written is the same behind any padding.
        ids = torch.stack([(at - pad).clamp(min=0) * (3 + 2 * b) for b, pad in enumerate(case.pads)])
        padded = (at >= start[:, None]).long() if any(case.pads) else None
        rows.prefill(ids % model.config.vocab_size, padded, None)
        return rows

    def inputs(self, case: Case, count: int) -> tuple[Tensor, ...]:
        """Rows of a tree; of the last sequence of a batch behind three positions less."""
        tokens, kv_len, *others = row_inputs(count, case.prefix, self.device, len(case.pads))
        kv_len[1:] -= 3
        return (tokens, kv_len, *others)

    @torch.no_grad()
    def alone(self, case: Case, number: int) -> Tensor:
        """Logits [1, ROWS, V] of one sequence of a case by the operator, without its padding."""
        tokens, kv_len, slots, mask, depths, nodes = self.inputs(case, ROWS)
        this, pad = slice(number, number + 1), case.pads[number]
        length, device = case.prefix - pad, self.device
        start = torch.zeros(1, dtype=torch.int32, device=device)
        rows = self.ways["operator"](self.model, length + MOST_ROWS, start, self.backend)
        ids = torch.arange(length, device=device)[None] * (3 + 2 * number) % self.model.config.vocab_size
        rows.prefill(ids, None, None)
        return rows.rows(tokens[this], kv_len[this] - pad, slots, mask[this], depths[this], nodes[this], keep=ROWS)

    def texts(self, case: Case) -> list[Tensor]:
        """Tokens [B, ROWS] of two texts, with the rest of :meth:`inputs` alike."""
        tokens = self.inputs(case, ROWS)[0]
        return [tokens, (tokens + 11) % self.model.config.vocab_size]


@torch.no_grad()
def errors_of(of: Subject, case: Case) -> dict[str, dict[str, float]]:
    """Errors of operator and modules against float32, see :func:`errors`."""
    inputs = of.inputs(case, ROWS)

    def logits(*way: Any) -> Tensor:
        return of.behind(case, *way).rows(*inputs, keep=ROWS).float()

    exact = logits("modules", of.exact)
    return {way: errors(logits(way), exact) for way in of.ways}


def errors(logits: Tensor, exact: Tensor) -> dict[str, float]:
    """Of logits [B, R, V]: a row's error over its norm, and the largest one over the root mean square of its row."""
    away, size = logits - exact, exact.norm(dim=-1)
    width = exact.shape[-1] ** 0.5
    largest = {"row": (away.norm(dim=-1) / size).max(), "element": (away.abs().amax(-1) * width / size).max()}
    return {kind: min(float(value.nan_to_num(NO_NUMBER, NO_NUMBER)), NO_NUMBER) for kind, value in largest.items()}


def too_large(ours: Mapping[str, float], theirs: Mapping[str, float], dtype: torch.dtype) -> str | None:
    """Name the error that is larger than twice the modules', or than rounding may cost; ``None``: none is."""
    for kind, bound in BOUNDS[dtype].items():
        relative = TIMES_THE_MODULES * theirs[kind] + SLACK
        if not ours[kind] <= relative:
            return f"{kind} error {ours[kind]:.2e}, the modules' is {theirs[kind]:.2e}"
        if not ours[kind] <= bound:
            return f"{kind} error {ours[kind]:.2e}, {dtype} may have {bound:.2e}"
    return None


@torch.no_grad()
def parts_apart(of: Subject, case: Case) -> Iterator[tuple[str, list[int]]]:
    """Of rows by themselves, in blocks of every size, those whose bits are others than among all: a part at a time."""
    rows = of.behind(case)
    tokens, kv_len, slots, mask, depths, nodes = of.inputs(case, MOST_ROWS)
    whole = rows.rows(tokens, kv_len, slots, mask, depths, nodes, keep=MOST_ROWS)
    for first, last in PARTS:
        some = slice(first, last)
        part = (tokens[:, some], kv_len, slots[some], mask[:, some], depths[:, some], nodes)
        yield f"rows {first} … {last - 1} by themselves", apart(rows.rows(*part, keep=last - first), whole[:, some])


@torch.no_grad()
def sequences_apart(of: Subject, case: Case) -> Iterator[tuple[str, list[int]]]:
    """Of sequences behind padding beside others, the rows whose bits are others than alone: a sequence at a time."""
    whole, written = (of.behind(case).rows(*of.inputs(case, ROWS), keep=ROWS) for _ in range(2))
    yield "the same call again", apart(written, whole)
    for number in range(len(case.pads)):
        yield f"sequence {number} alone", apart(of.alone(case, number), whole[[number]])


def apart(logits: Tensor, expected: Tensor) -> list[int]:
    """Rows of logits [B, R, V], one sequence behind the other, with other bits."""
    if torch.equal(logits, expected):
        return []
    rows: list[int] = (logits != expected).flatten(0, -2).any(-1).nonzero().flatten().tolist()
    return rows or [-1]  # NaN with other bits


def replayed(forward: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """``forward`` as a CUDA graph; itself on a CPU.

    Raises:
        CaptureError: it cannot be captured.
    """
    if not replay.is_gpu(device):
        return forward
    forward()  # loads what it launches
    graph, logits = replay.lane_of(device).capture(forward)

    def call() -> Tensor:
        graph()
        return logits

    return call


def wrong(call: Callable[[], Tensor], tokens: Tensor, texts: list[Tensor], expected: list[Tensor], count: int) -> int:
    """How many of ``count`` forwards, of two texts in turns, have other bits; the host waits once.

    In turns, because what a launch reads too early is what the forward before left, which must not be the right thing.
    """
    number = torch.zeros((), dtype=torch.int32, device=tokens.device)
    for turn in range(count):
        tokens.copy_(texts[turn % 2])
        number += (call() != expected[turn % 2]).any()
    return int(number)


@torch.no_grad()
def replays_apart(of: Subject, case: Case, count: int) -> int:
    """How many of ``count`` replays of a captured forward have other bits than when it is called.

    Raises:
        RuntimeError: two texts have the same logits.
    """
    rows, (first, *inputs) = of.behind(case), of.inputs(case, ROWS)
    texts = of.texts(case)
    expected = [rows.rows(tokens, *inputs, keep=ROWS) for tokens in texts]
    if torch.equal(*expected):
        raise RuntimeError("two texts have the same logits: nothing would be noticed")
    tokens = first.clone()
    return wrong(replayed(lambda: rows.rows(tokens, *inputs, keep=ROWS), of.device), tokens, texts, expected, count)


@torch.no_grad()
def milliseconds(of: Subject, case: Case, counts: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Of a forward of so many rows, by the operator and by the modules, each as a step replays it."""
    ways = {way: of.behind(case, way, backend="auto") for way in of.ways}
    times: dict[int, dict[str, float]] = {}
    for count in counts:
        inputs = of.inputs(case, count)
        calls = {
            way: replay.replayable(
                lambda rows=rows, inputs=inputs, count=count: rows.rows(*inputs, keep=count), of.device
            )
            for way, rows in ways.items()
        }
        times[count] = {way: 1e3 * seconds_of(call, of.device) for way, call in calls.items()}
    return times


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, some behind each other, of several turns the fastest: what others do only adds."""
    best = float("inf")
    for _ in range(TURNS):
        if replay.is_gpu(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(device)
            begin.record(stream)
            for _ in range(IN_A_ROW):
                call()
            end.record(stream)
            end.synchronize()
            taken = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                call()
            taken = time.perf_counter() - start
        best = min(best, taken / IN_A_ROW)
    return best
