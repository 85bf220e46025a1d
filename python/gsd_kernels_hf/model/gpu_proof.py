"""A GPU proves the operator of rows before it serves there: its errors, its bits, its time, in a few seconds, once.

The passages of :mod:`.proof` at a model's real sizes: models of random weights, some with norms of heads, biases, a
window and sizes that are no multiple of a tile, so that all code has its share that the served classes launch. The
operator's logits are held to float32 as the modules' are, and its rows to their own bits in any company. It is made of
each way to multiply that the GPU has; the fastest one that is right serves. A verdict is kept in the user's cache
folder with its figures, by GPU, driver, package and build, under the switches that it was made with.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import gsd_kernels
from gsd_kernels.compiled import LIBRARIES
from gsd_kernels.environment import forcing
from gsd_kernels.ops.cuda_common import DTYPES, HEAD_DIMS
from gsd_kernels.ops.decoder_rows import cuda

from ..files import locked
from ..store import Document
from . import proof, replay
from .facts import Facts
from .probe import in_words
from .proof import Passage
from .runner import FusedRows, RowModel

logger = logging.getLogger("gsd_kernels")

WAYS: dict[str, type[RowModel]] = {"operator": FusedRows, "modules": RowModel}
"""The way that is proved, and the one that it is held to."""
Proof = dict[str, Any]
"""A verdict and its figures.

``"why"`` a way to multiply may not serve (``None``: it may), whether that is ``"passing"``, so that another process
tries again, ``"seconds"`` that the proof took, ``"errors"`` of operator and modules against float32, rows or replays
``"apart"`` from the bits that are due, ``"milliseconds"`` by rows.
"""

BRANCH, PATH = 4, (0, 3, 15, 63, 255)  # children of a node of the tree; nodes from its root to its last leaf
ROWS, MOST_ROWS = 64, 256  # of a sequence beside another; of any
PADS = (0, 37)  # of a batch
PARTS = ((0, 1), (0, 16), (5, 22), (16, 48), (3, 36), (0, 64), (63, 64), (64, 192), (127, 256))
"""First and last of some rows: blocks of 16, 32, 64, 128 and 256 rows, each with places left over."""
REPLAYED_ROWS, REPLAYS = (1, 16, 32, 64, 128), 50  # up to 32 rows launches begin early and weights are asked for ahead
TIMED_ROWS = (1, 16, 64, 128, 256)
STEP_ROWS, PIECE_ROWS = TIMED_ROWS[:3], TIMED_ROWS[2:]  # of most steps; of a prompt's pieces, and by groups of warps
TIMES_THE_MODULES, SLACK = 2.0, 1e-5  # that an error may be; of float32, where the modules are the measure itself
IN_A_ROW, TURNS = 5, 5  # calls that are timed together, and how often
WAIT_SECONDS = 120.0  # for another process's proof
AGAIN = "again by: gsd-kernels doctor --prove"


class Sizes(NamedTuple):
    """Of a model that is made: those of a 1B, whose layers no second-level cache holds.

    Attributes:
        width: of all query heads together.
        window: of the second layer, where heads have norms and projections biases, as Qwen's; 0: a LLaMA.
        prompt: cached tokens before its rows.
    """

    hidden: int = 2048
    inner: int = 8192
    vocabulary: int = 4096
    width: int = 2048
    window: int = 0
    prompt: int = 1000


MODELS = (
    Sizes(),
    Sizes(hidden=1992, inner=3016, vocabulary=9000, window=700, prompt=2100),
    Sizes(hidden=1056, inner=4104, width=6144, prompt=2100),
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
        """The kind in words."""
        return f"{str(self.dtype).removeprefix('torch.')}, heads of {self.head_dim}, {self.way}"


def random_model(sizes: Sizes, dtype: torch.dtype, head_dim: int, device: torch.device) -> Any:
    """A model of two layers, four query heads to one of keys; no random numbers are taken from anybody."""
    heads = sizes.width // head_dim
    config = AutoConfig.for_model(
        "qwen3" if sizes.window else "llama",
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=head_dim,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
        attention_bias=sizes.window > 0,
        use_sliding_window=sizes.window > 0,
        sliding_window=sizes.window or None,
        max_window_layers=1,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    model = model.to(dtype=dtype).to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        mean = float(parameter.dim() == 1 and not name.endswith("bias"))
        parameter.normal_(mean, 0.1 if parameter.dim() == 1 else parameter.shape[1] ** -0.5, generator=generator)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def row_inputs(rows: int, prefix: int, device: torch.device | str, batch: int = 1) -> tuple[Tensor, ...]:
    """A tree of ``rows`` nodes behind ``prefix`` tokens; arguments of :meth:`RowModel.rows`.

    Of a batch every sequence has other tokens, behind three positions less than the one before.
    """
    parents = [-1, *((row - 1) // BRANCH for row in range(1, rows))]
    sequences = torch.arange(batch, dtype=torch.int32, device=device)
    tokens = (torch.arange(rows, device=device) + sequences[:, None]) % 7
    return proof.rows_of_tree(parents, tokens, prefix - 3 * sequences)


def behind(model: Any, passage: Passage, make: type[RowModel] = FusedRows, only: int | None = 0) -> Any:
    """A way to forward rows behind one prompt of a passage without its padding; ``only=None``: behind all of them."""
    ids, pads = proof.text(model, passage)[:, : passage.prompt], passage.pads
    if only is not None:
        ids, pads = ids[only : only + 1, pads[only] :], (0,)
    rows = make(model, passage.prompt + MOST_ROWS, proof.kv_start(model, pads), "auto")
    rows.prefill(ids, proof.padding(ids, pads), None)
    return rows


# What is looked for. Of a model and a passage, and of the first sequence alone where nothing else is said.


def errors(model: Any, passage: Passage) -> dict[str, float]:
    """Errors of operator and modules against float32: a row's, relative to the spread of its logits."""
    exact = proof.own_logits(Facts.of(copy.deepcopy(model).float()), passage=passage).double()
    found = proof.forward_of(FusedRows, "auto", passage), lambda of: proof.own_logits(of, passage=passage)
    return {way: proof.worst(exact, of(Facts.of(model)).double()) for way, of in zip(WAYS, found, strict=True)}


def parts_apart(model: Any, passage: Passage) -> Iterator[tuple[str, list[int]]]:
    """Of rows by themselves, in blocks of every size, and of a path, those with other bits than among all."""
    rows = behind(model, passage)
    tokens, kv_len, slots, mask, depths, nodes = inputs = row_inputs(MOST_ROWS, passage.prompt, model.device)
    whole = rows.rows(*inputs, keep=MOST_ROWS)
    for first, last in PARTS:
        some = slice(first, last)
        part = (tokens[:, some], kv_len, slots[some], mask[:, some], depths[:, some], nodes)
        yield f"rows {first} … {last - 1} by themselves", apart(rows.rows(*part, keep=last - first), whole[:, some])
    path = proof.logits_of_tree(rows, range(-1, len(PATH) - 1), tokens[:, PATH], kv_len)
    yield "a path without the rest of its tree", apart(path, whole[:, PATH])


def sequences_apart(model: Any, passage: Passage) -> Iterator[tuple[str, list[int]]]:
    """Of sequences behind padding beside others, the rows with other bits than alone: a sequence at a time."""
    tokens, kv_len, slots, *tree = inputs = row_inputs(ROWS, passage.prompt, model.device, len(passage.pads))
    whole, again = (behind(model, passage, only=None).rows(*inputs, keep=ROWS) for _ in range(2))
    yield "the same call again", apart(again, whole)
    for number, pad in enumerate(passage.pads):
        this = slice(number, number + 1)
        own = tokens[this], kv_len[this] - pad, slots, *(part[this] for part in tree)
        alone = behind(model, passage, only=number).rows(*own, keep=ROWS)
        yield f"sequence {number} alone", apart(alone, whole[this])


def replays_apart(model: Any, passage: Passage, count: int = 0) -> Iterator[tuple[str, list[int]]]:
    """Of ``count`` or :data:`REPLAYS` replays of a captured forward those with other bits than of a call, by its rows.

    Of two texts in turns, because what a launch reads too early is what the forward before left, which must not be the
    right thing. The host waits once.

    Raises:
        RuntimeError: two texts have the same logits, or a forward cannot be captured.
    """
    operator = behind(model, passage)
    for number in REPLAYED_ROWS:
        tokens, *inputs = row_inputs(number, passage.prompt, model.device)
        texts = [tokens.clone(), (tokens + 11) % model.config.vocab_size]
        with forcing({cuda.OVERLAP: "0"}):
            expected = [operator.rows(text, *inputs, keep=number) for text in texts]
        if torch.equal(*expected):
            raise RuntimeError("two texts have the same logits")
        call = replay.captured(lambda: operator.rows(tokens, *inputs, keep=number), model.device)  # noqa: B023
        wrong = []
        for turn in range(count or REPLAYS):
            tokens.copy_(texts[turn % 2])
            wrong.append((call() != expected[turn % 2]).any())
        yield f"{number} rows replayed", torch.stack(wrong).nonzero().flatten().tolist()


def milliseconds(model: Any, passage: Passage) -> dict[str, dict[str, float]]:
    """Of a forward by its rows, by the operator and by the modules, each as a step replays it."""
    ways = {way: behind(model, passage, make) for way, make in WAYS.items()}

    def taken(rows: Any, count: int) -> float:
        inputs = row_inputs(count, passage.prompt, model.device)
        call = replay.replayable(lambda: rows.rows(*inputs, keep=count), model.device)
        return 1e3 * seconds_of(call, model.device)

    return {str(count): {way: taken(rows, count) for way, rows in ways.items()} for count in TIMED_ROWS}


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


def verdict(why: str | None = None, **figures: Any) -> Proof:
    """A proof; of one that something ended before it had figures there are none."""
    return {"why": why, "passing": False, "seconds": 0.0, "errors": {}, "apart": {}, "milliseconds": {}, **figures}


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
        found = verdict(what + in_words(error), passing=passing)
    return {**found, "seconds": round(time.perf_counter() - begin, 3)}


def figures(kind: Kind, device: torch.device) -> Proof:
    """The worst figures of all models; the first one is timed."""
    worst, wrong = dict.fromkeys(WAYS, 0.0), {"alone": 0, "beside another": 0, "replayed": 0}
    why: str | None = None
    times: dict[str, Any] = {}
    for sizes in MODELS:
        model, passage = random_model(sizes, kind.dtype, kind.head_dim, device), Passage(sizes.prompt, pads=PADS)
        error = errors(model, passage)
        why, worst = why or too_large(error), {way: max(worst[way], error[way]) for way in WAYS}
        for what, found in zip(wrong, (parts_apart, sequences_apart, replays_apart), strict=True):
            wrong[what] += sum(len(rows) for _, rows in found(model, passage))
        times = times or milliseconds(model, passage)
    others = (f"{count} rows have other bits ({what})" for what, count in wrong.items() if count)
    return verdict(why or next(others, None), errors=worst, apart=wrong, milliseconds=times)


def document_of(device: torch.device) -> Document:
    """Where proofs of a GPU are kept: by everything that they depend on."""
    about = {
        "gpu": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "switches": {name: os.environ[name] for name in cuda.SWITCHES if name in os.environ},
        **installed(),
    }
    return Document("gpu-proof", about)


@cache
def installed() -> dict[str, str]:
    """The driver, a digest of the compiled kernels, and versions."""
    try:
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:  # the system does not tell: the CUDA that it has
        driver = f"CUDA {torch._C._cuda_getDriverVersion()}"
    library = Path(gsd_kernels.__file__).with_name(LIBRARIES["cuda"])
    versions = f"{gsd_kernels.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return {"driver": driver, "build": hashlib.sha256(library.read_bytes()).hexdigest(), "versions": versions}


BEGUN = verdict("a proof was begun and did not end, as where a GPU fails or hangs")
_known: dict[tuple[Path, str], Proof] = {}
"""Proofs of this process."""


def proof_of(kind: Kind, device: torch.device, *, again: bool = False) -> Proof:
    """The proof of a kind on a GPU: known, kept, or made now, ``again``: in any case.

    Threads and processes that ask at once wait for one. What is passing is not kept, but known: else every text would
    wait for another try. A process that dies of a proof, or whose GPU does, leaves word of that.

    Raises:
        DeviceLostError: see :func:`prove`.
    """
    document = document_of(device)
    place = document.path, kind.name
    if place in _known and not again:
        return _known[place]
    with locked(document.path.with_suffix(".lock"), WAIT_SECONDS):
        found: Proof = {} if again else _known.get(place) or document.read().get(kind.name) or {}
        if not found:
            logger.info("rows as one operator (%s) are proved on this GPU, some seconds, once", kind.name)
            document.write({kind.name: BEGUN})
            kept: Proof = {}  # an interrupt says nothing about the GPU
            try:
                found = prove(kind, device)
                kept = {} if found["passing"] else found
            except replay.DeviceLostError:
                kept = BEGUN
                raise
            finally:
                document.write({kind.name: kept})
        _known[place] = found
    return found


def report(device: torch.device, *, again: bool) -> dict[str, Proof]:
    """Of every kind, by its name, what is kept; ``again``: it is proved anew.

    Raises:
        DeviceLostError: the GPU failed for good.
    """
    kinds = list(itertools.starmap(Kind, itertools.product(DTYPES, HEAD_DIMS, cuda.ways(device))))
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
    why: dict[str, str] = {}
    right: dict[str, Any] = {}
    for way in cuda.ways(device):
        if way == cuda.IN_TURN and right:
            break
        found = proof_of(Kind(dtype, head_dim, way), device)
        if found["passing"]:
            return Choice(None if cuda.is_measured(device) else found["why"])
        if found["why"] is None:
            right[way] = found["milliseconds"]
        else:
            why[way] = found["why"]
    if not right:
        return Choice(f"one operator did not prove itself on this GPU: {why['mma']}; {AGAIN}")

    def mean(way: str, rows: tuple[int, ...], of: str = "operator") -> float:
        return statistics.geometric_mean(right[way][str(count)][of] for count in rows)

    forced = os.environ.get(cuda.GROUP) == "1" and "wgmma" in right
    way = "wgmma" if forced else min(right, key=lambda name: mean(name, PIECE_ROWS))
    slower = mean(way, STEP_ROWS) / mean(way, STEP_ROWS, "modules")
    if slower > 1:
        return Choice(f"one operator takes {slower:.2f} times as long as the modules on this GPU; {AGAIN}")
    return Choice(None, way, min(PIECE_ROWS, key=lambda rows: right[way][str(rows)]["operator"] / rows))
