"""A GPU proves the operator of rows before it serves there: its errors, its bits, its time, in a few seconds, once.

The proof of :mod:`.proof` at a model's real sizes: models of random weights, some with norms of heads, biases, a window
and sizes that are no multiple of a tile, so that all code has its share that the served classes launch. Their rows by
the operator are held to float32 as the modules are, and to their own bits in any company. It is made of each way to
multiply that the GPU has; the fastest one that is right serves. A verdict is kept in the user's cache folder with its
figures, by GPU, driver, package and build, under the switches that it was made with.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import gsd_kernels
from gsd_kernels.compiled import LIBRARIES
from gsd_kernels.environment import forcing
from gsd_kernels.ops.cuda_common import DTYPES, HEAD_DIMS
from gsd_kernels.ops.decoder_rows import cuda

from ..files import locked
from ..store import Document
from . import replay
from .fused_rows import FusedRows
from .proof import tree_of, worst
from .runner import RowModel

logger = logging.getLogger("gsd_kernels")

WAYS: dict[str, type[RowModel]] = {"operator": FusedRows, "modules": RowModel}
"""The way that is proved, and the one that it is held to."""
Proof = dict[str, Any]
"""A verdict and its figures.

``"why"`` a way to multiply may not serve (``None``: it may), whether that is ``"passing"``, so that another process
tries again, ``"seconds"`` that the proof took, ``"errors"`` of operator and modules against float32, rows or replays
``"apart"`` from the bits that are due, ``"milliseconds"`` by rows.
"""

BRANCH = 4  # children of a node of the tree
ROWS, MOST_ROWS = 64, 256  # of a comparison with float32; of any
PARTS = ((0, 1), (0, 16), (5, 22), (16, 48), (3, 36), (0, 64), (63, 64), (64, 192), (127, 256))
"""First and last of some rows: blocks of 16, 32, 64, 128 and 256 rows, each with places left over."""
REPLAYED_ROWS, REPLAYS = (1, 16, 32, 64, 128), 50  # up to 32 rows launches begin early and weights are asked for ahead
TIMED_ROWS = (1, 16, 64, 128, 256)
STEP_ROWS, PIECE_ROWS = TIMED_ROWS[:3], TIMED_ROWS[2:]  # of most steps; of a prompt's pieces, and by groups of warps
TIMES_THE_MODULES, SLACK = 2.0, 1e-5  # that an error may be; of float32, where the modules are the measure itself
IN_A_ROW, TURNS = 5, 5  # calls that are timed together, and how often
MOST_TEXT = 300  # characters of what went wrong
WAIT_SECONDS = 120.0  # for another process's proof
AGAIN = "again by: gsd-kernels doctor --prove"


class Case(NamedTuple):
    """Rows behind a prefix: tokens of the prompt, left padding of every sequence, and the text of the first one."""

    prefix: int
    pads: tuple[int, ...] = (0,)
    text: int = 0

    @property
    def name(self) -> str:
        return f"prefix={self.prefix}" + (f" pads={','.join(map(str, self.pads))}" if len(self.pads) > 1 else "")


class Sizes(NamedTuple):
    """Of a model that is made: those of a 1B, whose layers no second-level cache holds.

    Attributes:
        width: of all query heads together.
        window: of the second layer, where heads have norms and projections biases, as Qwen's; 0: a LLaMA.
        prefix, pads: cached tokens before its rows, and left padding of a batch's sequences.
    """

    hidden: int = 2048
    inner: int = 8192
    vocabulary: int = 4096
    layers: int = 2
    width: int = 2048
    window: int = 0
    prefix: int = 1000
    pads: tuple[int, ...] = (0, 37)


MODELS = (
    Sizes(),
    Sizes(hidden=1992, inner=3016, vocabulary=9000, width=2048, window=700, prefix=2100),
    Sizes(hidden=1056, inner=4104, width=6144, prefix=2100),
    Sizes(hidden=1032, inner=1032, width=6144, window=700),
)
"""With products that are split and whole, turned heads with norms and without, and of both attention's splits."""


class Kind(NamedTuple):
    """A part of the operator that is proved by itself: kernels are compiled for each.

    Attributes:
        dtype: float16 or bfloat16.
        head_dim: 64 or 128.
        way: of ``cuda.WAYS``, how it multiplies and launches.
    """

    dtype: torch.dtype
    head_dim: int
    way: str

    @property
    def name(self) -> str:
        """The kind in words, with the switches that others than the way have set."""
        others = (f", {v}={os.environ[v]}" for v in cuda.SWITCHES if v in os.environ and v not in cuda.WAYS[self.way])
        return f"{str(self.dtype).removeprefix('torch.')}, heads of {self.head_dim}, {self.way}" + "".join(others)


def random_model(sizes: Sizes, dtype: torch.dtype, head_dim: int, device: torch.device) -> Any:
    """A model, four query heads to one of keys; no random numbers are taken from anybody."""
    heads = sizes.width // head_dim
    common: dict[str, Any] = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": head_dim,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    }
    windowed = {"sliding_window": sizes.window, "use_sliding_window": True, "max_window_layers": sizes.layers - 1}
    with torch.device("meta"):
        model: Any = (
            Qwen3ForCausalLM(Qwen3Config(**common, **windowed, attention_bias=True))
            if sizes.window
            else LlamaForCausalLM(LlamaConfig(**common))
        ).eval()
    model = model.to(dtype=dtype).to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        mean = float(parameter.dim() == 1 and not name.endswith("bias"))
        parameter.normal_(mean, 0.1 if parameter.dim() == 1 else parameter.shape[1] ** -0.5, generator=generator)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
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
    """The subject of a proof: the rows of a model of random weights by one operator, beside its modules."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device: torch.device = model.device

    @cached_property
    def exact(self) -> Any:
        return copy.deepcopy(self.model).float()

    @torch.no_grad()
    def behind(self, case: Case, way: str = "operator", model: Any = None, backend: str = "reference") -> RowModel:
        """A way to forward rows, behind the tokens of a case.

        ``backend``: of the modules' attention: the reference, so that the proof needs none of our other kernels.
        """
        model, device = model or self.model, self.device
        start = torch.tensor(case.pads, dtype=torch.int32, device=device)
        backend = "auto" if way == "operator" else backend
        rows = WAYS[way](model, case.prefix + MOST_ROWS, start, backend)
        at = torch.arange(case.prefix, device=device)
        # What is written is the same behind any padding.
        ids = torch.stack([(at - pad).clamp(min=0) * (3 + 2 * text) for text, pad in enumerate(case.pads, case.text)])
        padded = (at >= start[:, None]).long() if any(case.pads) else None
        rows.prefill(ids % model.config.vocab_size, padded, None)
        return rows

    def inputs(self, case: Case, count: int) -> tuple[Tensor, ...]:
        """Rows of a tree; of the last sequence of a batch behind three positions less."""
        tokens, kv_len, *others = row_inputs(count, case.prefix, self.device, len(case.pads))
        kv_len[1:] -= 3
        return (tokens, kv_len, *others)

    @torch.no_grad()
    def errors(self, case: Case) -> dict[str, float]:
        """Errors of operator and modules against float32: a row's, relative to the spread of its logits."""
        inputs = self.inputs(case, ROWS)

        def logits(*way: Any) -> Tensor:
            return self.behind(case, *way).rows(*inputs, keep=ROWS).double()

        exact = logits("modules", self.exact)
        return {way: worst(exact, logits(way)) for way in WAYS}

    @torch.no_grad()
    def parts_apart(self, case: Case) -> Iterator[tuple[str, list[int]]]:
        """Of rows by themselves, in blocks of every size, those with other bits than among all: a part at a time."""
        rows = self.behind(case)
        tokens, kv_len, slots, mask, depths, nodes = self.inputs(case, MOST_ROWS)
        whole = rows.rows(tokens, kv_len, slots, mask, depths, nodes, keep=MOST_ROWS)
        for first, last in PARTS:
            some = slice(first, last)
            part = (tokens[:, some], kv_len, slots[some], mask[:, some], depths[:, some], nodes)
            yield f"rows {first} … {last - 1} by themselves", apart(rows.rows(*part, keep=last - first), whole[:, some])

    @torch.no_grad()
    def sequences_apart(self, case: Case) -> Iterator[tuple[str, list[int]]]:
        """Of sequences behind padding beside others, the rows with other bits than alone: a sequence at a time."""
        tokens, kv_len, slots, mask, depths, nodes = inputs = self.inputs(case, ROWS)
        whole, again = (self.behind(case).rows(*inputs, keep=ROWS) for _ in range(2))
        yield "the same call again", apart(again, whole)
        for number, pad in enumerate(case.pads):
            rows, this = self.behind(Case(case.prefix - pad, text=number)), slice(number, number + 1)
            one = tokens[this], kv_len[this] - pad, slots, mask[this], depths[this], nodes[this]
            yield f"sequence {number} alone", apart(rows.rows(*one, keep=ROWS), whole[this])

    @torch.no_grad()
    def replays_apart(self, case: Case, count: int, rows: tuple[int, ...] = REPLAYED_ROWS) -> Iterator[tuple[str, int]]:
        """How many of ``count`` replays of a captured forward have other bits than when it is called, by its rows.

        Of two texts in turns, because what a launch reads too early is what the forward before left, which must not be
        the right thing. The host waits once.

        Raises:
            RuntimeError: two texts have the same logits, or a forward cannot be captured.
        """
        operator = self.behind(case)
        for number in rows:
            tokens, *inputs = self.inputs(case, number)
            texts = [tokens.clone(), (tokens + 11) % self.model.config.vocab_size]
            with forcing({cuda.OVERLAP: "0"}):
                expected = [operator.rows(text, *inputs, keep=number) for text in texts]
            if torch.equal(*expected):
                raise RuntimeError("two texts have the same logits")
            call = replay.captured(lambda: operator.rows(tokens, *inputs, keep=number), self.device)  # noqa: B023
            wrong = torch.zeros((), dtype=torch.int32, device=self.device)
            for turn in range(count):
                tokens.copy_(texts[turn % 2])
                wrong += (call() != expected[turn % 2]).any()
            yield f"{number} rows replayed", int(wrong)

    @torch.no_grad()
    def milliseconds(self, case: Case, counts: tuple[int, ...]) -> dict[str, dict[str, float]]:
        """Of a forward by its rows, by the operator and by the modules, each as a step replays it."""
        ways = {way: self.behind(case, way, backend="auto") for way in WAYS}

        def taken(rows: RowModel, count: int) -> float:
            inputs = self.inputs(case, count)
            call = replay.replayable(lambda: rows.rows(*inputs, keep=count), self.device)
            return 1e3 * seconds_of(call, self.device)

        return {str(count): {way: taken(rows, count) for way, rows in ways.items()} for count in counts}


def apart(logits: Tensor, expected: Tensor) -> list[int]:
    """Rows of logits [B, R, V], one sequence behind the other, with other bits."""
    if torch.equal(logits, expected):
        return []
    rows: list[int] = (logits != expected).flatten(0, -2).any(-1).nonzero().flatten().tolist()
    return rows or [-1]  # NaN with other bits


def too_large(errors: Mapping[str, float]) -> str | None:
    """Name the error that is larger than twice the modules', or no number; ``None``: it is not."""
    if errors["operator"] <= TIMES_THE_MODULES * errors["modules"] + SLACK:
        return None
    return f"its error is {errors['operator']:.2e}, the modules' {errors['modules']:.2e}"


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, some behind each other, of several turns the fastest: what others do only adds."""
    best = float("inf")
    for _ in range(TURNS):
        replay.wait(device)
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            call()
        replay.wait(device)
        best = min(best, (time.perf_counter() - start) / IN_A_ROW)
    return best


def no_figures(why: str, *, passing: bool = False) -> Proof:
    """A proof that something ended before it had figures."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(why.split()))
    ended = {"why": line[:MOST_TEXT], "passing": passing, "seconds": 0.0}
    return {**ended, "errors": {}, "apart": {}, "milliseconds": {}}


def prove(kind: Kind, device: torch.device) -> Proof:
    """Try a kind on models of its own; what goes wrong in it is part of the answer.

    Passing is that the GPU has no room for it, some 800 MB, and an error that is neither CUDA's nor the operator's.

    Raises:
        DeviceLostError: the GPU failed for good.
    """
    begin, quiet = time.perf_counter(), torch.autocast(device.type, enabled=False)
    try:
        with torch.inference_mode(False), torch.no_grad(), quiet, forcing(cuda.WAYS[kind.way]):
            found = figures(kind, device)
    except Exception as error:
        if replay.lost(device) is not None:
            raise replay.DeviceLostError(f"the GPU failed while rows as one operator were proved: {error}") from error
        passing = isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError)
        what = "one operator could not be proved on this GPU: " if passing else ""
        found = no_figures(f"{what}{type(error).__name__}: {error}", passing=passing)
    return {**found, "seconds": round(time.perf_counter() - begin, 3)}


def figures(kind: Kind, device: torch.device) -> Proof:
    """The worst figures of all models; the first one is timed."""
    errors, apart, times = dict.fromkeys(WAYS, 0.0), {"alone": 0, "beside another": 0, "replayed": 0}, {}
    why: str | None = None
    for sizes in MODELS:
        of = Subject(random_model(sizes, kind.dtype, kind.head_dim, device))
        one, batch = Case(sizes.prefix), Case(sizes.prefix, sizes.pads)
        for case in (one, batch):
            found = of.errors(case)
            why = why or too_large(found)
            errors = {way: max(errors[way], found[way]) for way in errors}
        del of.exact  # the largest part of the memory
        apart["alone"] += sum(len(rows) for _, rows in of.parts_apart(one))
        apart["beside another"] += sum(len(rows) for _, rows in of.sequences_apart(batch))
        apart["replayed"] += sum(count for _, count in of.replays_apart(one, REPLAYS))
        times = times or of.milliseconds(one, TIMED_ROWS)
    for what, count in apart.items():
        why = why or (f"{count} rows have other bits ({what})" if count else None)
    return {"why": why, "passing": False, "errors": errors, "apart": apart, "milliseconds": times}


def document_of(device: torch.device) -> Document:
    """Where proofs of a GPU are kept: by everything that they depend on."""
    properties = torch.cuda.get_device_properties(device)
    about = {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver(),
        "package": gsd_kernels.__version__,
        "build": build(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return Document("gpu-proof", about)


def driver() -> str:
    """The driver's version; where the system does not tell, that of the CUDA which it has."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, ValueError, IndexError):
        return f"CUDA {torch._C._cuda_getDriverVersion()}"


@cache
def build() -> str:
    """Digest of the compiled kernels."""
    library = Path(gsd_kernels.__file__).with_name(LIBRARIES["cuda"])
    return hashlib.sha256(library.read_bytes()).hexdigest()[:20] if library.exists() else "none"


BEGUN = no_figures("a proof was begun and did not end, as where a GPU fails or hangs")
_known: dict[tuple[Path, str], Proof] = {}
"""Proofs of this process."""
_lock = threading.Lock()


def proof_of(kind: Kind, device: torch.device, *, again: bool = False) -> Proof:
    """The proof of a kind on a GPU: known, kept, or made now, ``again``: in any case.

    Processes that ask at once wait for one. What is passing is not kept, but known: else every text would wait for
    another try. A process that dies of a proof, or whose GPU does, leaves word of that.

    Raises:
        DeviceLostError: see :func:`prove`.
    """
    document = document_of(device)
    known = document.path, kind.name
    with _lock:
        if not again and known in _known:
            return _known[known]
        with locked(document.path.with_suffix(".lock"), WAIT_SECONDS):
            found = None if again else document.read().get(kind.name)
            if not (isinstance(found, dict) and found.keys() == BEGUN.keys()):
                logger.info("rows as one operator (%s) are proved on this GPU, some seconds, once", kind.name)
                document.write({kind.name: BEGUN})
                try:
                    found = prove(kind, device)
                except replay.DeviceLostError:
                    raise
                except BaseException:  # an interrupt says nothing about the GPU
                    document.write({kind.name: {}})
                    raise
                document.write({kind.name: {} if found["passing"] else found})
        _known[known] = found
    return found


def report(device: torch.device, *, again: bool) -> dict[str, Proof]:
    """Of every kind, by its name, what is kept; ``again``: it is proved anew.

    Raises:
        DeviceLostError: the GPU failed for good.
    """
    kinds = [Kind(*of) for of in itertools.product(DTYPES, HEAD_DIMS, cuda.ways(device))]
    if again:
        return {kind.name: proof_of(kind, device, again=True) for kind in kinds}
    kept = document_of(device).read()
    return {kind.name: kept[kind.name] for kind in kinds if kept.get(kind.name)}


class Choice(NamedTuple):
    """The decision of a GPU's proofs.

    Attributes:
        why: rows stay with the modules; ``None``: they need not.
        way: of ``cuda.WAYS``, by which the operator multiplies; ``None``: as the environment says.
        prompt_rows: of a prompt at a time, all sequences together.
    """

    why: str | None
    way: str | None = None
    prompt_rows: int = MOST_ROWS


def choice(device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """Choose how rows go on a GPU, which proves itself at the first question.

    Of the ways that are right the one that is fastest from 33 rows on; fewer are the same kernels for all of them.
    Modules, where those are faster in the mean over a step's rows: they share no text with the operator, since their
    bits go by how many rows there are. Where nothing can be proved, GPUs on which the operator was measured go on.

    Raises:
        DeviceLostError: the GPU failed for good.
    """
    proofs: dict[str, Proof] = {}
    right: dict[str, Any] = {}
    for way in cuda.ways(device):
        if way == cuda.IN_TURN and right:
            break
        proofs[way] = proof = proof_of(Kind(dtype, head_dim, way), device)
        if proof["passing"]:
            return Choice(None if cuda.is_measured(device) else proof["why"])
        if proof["why"] is None:
            right[way] = proof["milliseconds"]
    if not right:
        return Choice(f"one operator did not prove itself on this GPU: {proofs['mma']['why']}; {AGAIN}")

    def mean(way: str, rows: tuple[int, ...], of: str = "operator") -> float:
        return statistics.geometric_mean(right[way][str(count)][of] for count in rows)

    forced = os.environ.get(cuda.GROUP) == "1" and "wgmma" in right
    way = "wgmma" if forced else min(right, key=lambda name: mean(name, PIECE_ROWS))
    slower = mean(way, STEP_ROWS) / mean(way, STEP_ROWS, "modules")
    if slower > 1:
        return Choice(f"one operator takes {slower:.2f} times as long as the modules on this GPU; {AGAIN}")
    return Choice(None, way, min(PIECE_ROWS, key=lambda rows: right[way][str(rows)]["operator"] / rows))
