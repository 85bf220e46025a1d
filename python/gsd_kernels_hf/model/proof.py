"""A few tokens through a model as transformers forwards it, and through what stands in for that: the same logits.

A way to forward rows serves a model after it has shown that it computes what the model's own ``forward`` does: a prompt
in pieces, behind padding in one of two sequences, then rows of a tree. In half precision rounding hides what is off by
a hundredth; numbers and modules that could be are looked at by name, see :func:`.foreign`.

A GPU proves the operator of rows before it serves there, in a few seconds, once: its errors, its bits, its time. Longer
passages at a model's real sizes: models of random weights, some with norms of heads, biases, a window and sizes that
are no multiple of a tile, so that all code has its share that the served classes launch. The operator's logits are held
to float32 as the modules' are, and its rows to their own bits in any company. It is made of each way to multiply that
the GPU has; the fastest one that is right serves. A verdict is kept in the user's cache folder with its figures, by
GPU, driver, package and build, under the switches that it was made with.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise, product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from gsd_kernels import compiled
from gsd_kernels.environment import forcing
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.cuda_common import DTYPES, HEAD_DIMS
from gsd_kernels.ops.decoder_rows import cuda

from ..files import locked
from ..packed.modules import rounds_rows, shape_of
from ..store import Document
from . import replay
from .facts import Facts, fact
from .hidden import hooked
from .probe import PIECE_TOKENS, in_words, piece, trying
from .recurrent.mixers import mixers_of
from .runner import FusedRows, RowModel

logger = logging.getLogger("gsd_kernels")

PARENTS = (-1, 0, 0, 1, 3, 4)  # of the rows
TEXT = (0, 1, 3, 4, 5)  # rows that are a path; the other one is beside it
PLACES = (0, 1, 0, 2, 3, 4)  # of the rows' tokens in that path
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


SHORT, LONG = Passage(), Passage(160)
"""What shows another formula, and what shows the window that a function of attention may have of its own."""

Forward = Callable[[Facts], Tensor]
"""Logits of :data:`TEXT`, [B, len(TEXT), V], the way that is to be proved."""


class Difference(NamedTuple):
    """The difference that keeps a way to forward rows from a model.

    Attributes:
        what: in words.
        cause: an error that the model raised.
        passing: whether another try may say something else.
    """

    what: str
    cause: Exception | None = None
    passing: bool = False


def text(facts: Facts, passage: Passage = SHORT) -> Tensor:
    """Tokens [B, n] of a passage, spread over the vocabulary."""
    batch, length = len(passage.pads), passage.prompt + passage.steps * len(TEXT)
    ids = 11 + 7919 * torch.arange(batch * length, device=facts.device).view(batch, -1)
    return ids % min(facts.vocabulary, shape_of(facts.model.get_input_embeddings())[0])


def padded(ids: Tensor, pads: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Attention mask int64 [B, n] of tokens behind this left padding, and the padding, int32 [B]."""
    kv_start = torch.tensor(pads, dtype=torch.int32, device=ids.device)
    return (torch.arange(ids.shape[1], device=ids.device) >= kv_start[:, None]).long(), kv_start


def own_logits(facts: Facts, passage: Passage, *, singly: bool = False) -> Tensor:
    """Logits as transformers' ``generate`` computes them of a prompt; ``singly``: of a prompt and tokens behind it."""
    ids, cache, (prompt, _, pads) = text(facts, passage), DynamicCache(config=facts.model.config), passage
    (mask, _), length, logits = padded(ids, pads), ids.shape[1], []
    for begin, end in pairwise((0, *range(prompt + 1 if singly else length, length + 1))):
        logits.append(piece(facts, cache, ids, mask, begin, end)[:, max(0, prompt - begin) :])
    return torch.cat(logits, 1)


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
    return logits_of_tree(rows, PARENTS, tokens[:, PLACES], stored)[:, TEXT]


def logits_of_rows(facts: Facts, make: Callable[..., Any], backend: str, passage: Passage, **options: Any) -> Tensor:
    """The same by rows: a prompt in pieces, then rows of a tree, and more behind its accepted path.

    Args:
        facts: of the model.
        make: of rows, with the arguments of :class:`~.runner.RowModel`: the others are among them.
        backend, options: as it takes them.
        passage: that is read.
    """
    ids, (prompt, steps, pads) = text(facts, passage), passage
    mask, kv_start = padded(ids[:, :prompt], pads)
    rows = make(facts, ids.shape[1] - len(TEXT) + len(PARENTS), kv_start, backend, **options)
    rows.prefill(ids[:, :prompt], mask, max(PIECE_TOKENS, prompt // 2))
    stored = torch.full_like(kv_start, prompt)  # [B]
    path = torch.tensor([TEXT] * len(pads), dtype=torch.int32, device=ids.device)  # [B, len(TEXT)]
    logits = []
    for step in range(steps):
        logits.append(logits_of_path(rows, ids[:, prompt + step * len(TEXT) :][:, : len(TEXT)], stored))
        if step + 1 < steps:
            rows.cache.commit(path, torch.full_like(stored, len(TEXT)), stored)
    return torch.cat(logits, 1)


@fact
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
        make, backend, passage, options: as of :func:`logits_of_rows`.
        singly: whether the model forwards token by token, as it does behind a prompt: code that is not transformers'
            own may go by how many there are.
    """
    steps, prompt = (partial(own_logits, passage=passage, singly=one) for one in (singly, False))
    ours = partial(logits_of_rows, make=make, backend=backend, passage=passage, **options)
    return difference(facts, ours, steps, prompt)


def difference(facts: Facts, forward: Forward, own_steps: Forward, own_prompt: Forward) -> Difference | None:
    """Compare logits of a text, [B, n, V], with the model's own by transformers' steps, and as a prompt's."""
    with trying(facts):
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


# What a GPU proves of the operator.

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
    return rows_of_tree(parents, tokens, prefix - 3 * sequences)


def behind(model: Any, passage: Passage, make: type[RowModel] = FusedRows, only: int | None = 0) -> Any:
    """A way to forward rows behind one prompt of a passage without its padding; ``only=None``: behind all of them."""
    ids, pads = text(Facts.of(model), passage)[:, : passage.prompt], passage.pads
    if only is not None:
        ids, pads = ids[only : only + 1, pads[only] :], (0,)
    mask, kv_start = padded(ids, pads)
    rows = make(model, passage.prompt + MOST_ROWS, kv_start, "auto")
    rows.prefill(ids, mask, None)
    return rows


# What is looked for. Of a model and a passage, and of the first sequence alone where nothing else is said.


def errors(model: Any, passage: Passage) -> dict[str, float]:
    """Errors of operator and modules against float32: a row's, relative to the spread of its logits."""
    exact = own_logits(Facts.of(copy.deepcopy(model).float()), passage).double()
    facts = Facts.of(model)
    rows, own = logits_of_rows(facts, FusedRows, "auto", passage), own_logits(facts, passage)
    return {way: worst(exact, logits.double()) for way, logits in zip(WAYS, (rows, own), strict=True)}


def parts_apart(model: Any, passage: Passage) -> Iterator[tuple[str, list[int]]]:
    """Of rows by themselves, in blocks of every size, and of a path, those with other bits than among all."""
    rows = behind(model, passage)
    tokens, kv_len, slots, mask, depths, nodes = inputs = row_inputs(MOST_ROWS, passage.prompt, model.device)
    whole = rows.rows(*inputs, keep=MOST_ROWS)
    for first, last in PARTS:
        some = slice(first, last)
        part = (tokens[:, some], kv_len, slots[some], mask[:, some], depths[:, some], nodes)
        yield f"rows {first} … {last - 1} by themselves", apart(rows.rows(*part, keep=last - first), whole[:, some])
    path = logits_of_tree(rows, range(-1, len(PATH) - 1), tokens[:, PATH], kv_len)
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
    largest, wrong = dict.fromkeys(WAYS, 0.0), {"alone": 0, "beside another": 0, "replayed": 0}
    why: str | None = None
    times: dict[str, Any] = {}
    for sizes in MODELS:
        model, passage = random_model(sizes, kind.dtype, kind.head_dim, device), Passage(sizes.prompt, pads=PADS)
        error = errors(model, passage)
        why, largest = why or too_large(error), {way: max(largest[way], error[way]) for way in WAYS}
        for what, found in zip(wrong, (parts_apart, sequences_apart, replays_apart), strict=True):
            wrong[what] += sum(len(rows) for _, rows in found(model, passage))
        times = times or milliseconds(model, passage)
    others = (f"{count} rows have other bits ({what})" for what, count in wrong.items() if count)
    return verdict(why or next(others, None), errors=largest, apart=wrong, milliseconds=times)


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
    """The driver, and a digest of the compiled kernels."""
    try:
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:  # the system does not tell: the CUDA that it has
        driver = f"CUDA {torch._C._cuda_getDriverVersion()}"
    library = Path(compiled.__file__).with_name(compiled.LIBRARIES["cuda"])
    return {"driver": driver, "build": hashlib.sha256(library.read_bytes()).hexdigest()}


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
            document.write({**document.read(), kind.name: BEGUN})
            kept: Proof = {}  # an interrupt says nothing about the GPU
            try:
                found = prove(kind, device)
                kept = {} if found["passing"] else found
            except replay.DeviceLostError:
                kept = BEGUN
                raise
            finally:
                document.write({**document.read(), kind.name: kept})
        _known[place] = found
    return found


def report(device: torch.device, *, again: bool) -> dict[str, Proof]:
    """Of every kind, by its name, what is kept; ``again``: it is proved anew.

    Raises:
        DeviceLostError: the GPU failed for good.
    """
    kinds = list(starmap(Kind, product(DTYPES, HEAD_DIMS, cuda.ways(device))))
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
