"""A draft that learns while it serves: online speculative decoding (arXiv 2310.07177), between calls.

What a call verified anyway is kept: its tokens, the likeliest tokens of the target after each, and, for heads, the
hidden states there. After the call the draft takes a bounded number of distillation steps on it; the target runs for
none of them. The draft's weights are the only thing that changes, so the output is what it was.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels_hf import validate
from gsd_kernels_hf.api import Patch
from gsd_kernels_hf.engine.resolved import Sources
from gsd_kernels_hf.files import path_of
from gsd_kernels_hf.model import properties
from gsd_kernels_hf.model.hidden import LAST
from gsd_kernels_hf.parallel import digest
from gsd_kernels_hf.records import Verified
from gsd_kernels_hf.sources.heads import DraftHeads
from gsd_kernels_hf.store import damaged, read_saved, write_saved

log = logging.getLogger(__name__)

HEAD_WEIGHT = 0.8
"""Weight of a head's loss, to the power of its number: later tokens are harder (arXiv 2401.10774, section 2.2.1)."""

FORMAT = "gsd_kernels online learner"
VERSION = 1
PARTS = ("weight", "exp_avg", "exp_avg_sq")

_taught: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.Lock()


# ---- the lessons that a call leaves, and the losses on them


@dataclass(frozen=True, eq=False)
class Lesson:
    """The end of one sequence as its call verified it, on the host.

    Attributes:
        tokens: int64 [N], the last n of which were emitted.
        labels: int64 [n, K], the target's likeliest tokens at the places of those.
        log_probs: float32 [n, K], theirs.
        hidden: [n, D], what the output matrix read to pick each of the n; ``None`` where nobody asked for it.
    """

    tokens: Tensor
    labels: Tensor
    log_probs: Tensor
    hidden: Tensor | None


class Notes:
    """Takes down what every step of a call verified; on the device until the call is over.

    Args:
        window: last tokens of a sequence that count; as many steps are kept, each of which emits one or more.
        top: K, labels of a token.
        vocab: tokens that target and draft both have.
        hidden: whether hidden states are needed.
    """

    def __init__(self, window: int, top: int, vocab: int, *, hidden: bool) -> None:
        self._window, self._top, self._vocab, self._hidden = window, min(top, vocab), vocab, hidden
        self._steps: deque[tuple[Tensor, ...]] = deque(maxlen=window)
        self._count = 0

    def beside(self, observer: Callable[[Verified], None] | None) -> Callable[[Verified], None]:
        """An observer that does what ``observer`` does, and takes notes."""
        if observer is None:
            return self.take

        def both(verified: Verified) -> None:
            observer(verified)
            self.take(verified)

        return both

    def take(self, verified: Verified) -> None:
        """Take down a step: a few numbers of every accepted row, nothing of which waits for the device."""
        accepted = verified.accepted
        rows = accepted.accepted_rows.clamp(min=0).long()[..., None]  # [B, P, 1]
        logits = verified.logits[..., : self._vocab]
        logits = logits.gather(1, rows.expand(-1, -1, logits.shape[2])).float()
        likely = logits.topk(self._top)
        notes = [
            accepted.num_accepted.clone(),
            verified.tokens.clone(),
            likely.indices,
            likely.values - logits.logsumexp(-1, keepdim=True),
        ]
        if self._hidden:
            hidden = verified.hidden[LAST]
            notes.append(hidden.gather(1, rows.to(hidden.device).expand(-1, -1, hidden.shape[2])))
        self._steps.append(tuple(notes))
        self._count += 1

    def lessons(self, prompt: Tensor | None, attention_mask: Tensor | None) -> list[Lesson]:
        """One of each sequence that anything was emitted in.

        Args:
            prompt: int64 [b, length], of each sequence or of each group of as many; ``None``: none.
            attention_mask: [b, length], 0 where the prompt is padded.
        """
        steps = [[part.cpu() for part in step] for step in self._steps]
        lessons = []
        for row in range(len(steps[0][0]) if steps else 0):
            counts = [int(step[0][row]) for step in steps]
            tokens, labels, log_probs, *hidden = (
                torch.cat([step[part][row, :n] for step, n in zip(steps, counts, strict=True)])[-self._window :]
                for part in range(1, len(steps[0]))
            )
            tokens = tokens.long()
            if not len(tokens):
                continue
            # Where steps were dropped, so were the tokens that stood between the prompt and these.
            if prompt is not None and self._count == len(self._steps):
                at = row * len(prompt) // len(steps[0][0])
                own = prompt[at].cpu().long()
                if attention_mask is not None:
                    own = own[attention_mask[at].cpu().bool()]
                tokens = torch.cat([own, tokens])[-self._window :]
            lessons.append(Lesson(tokens, labels.long(), log_probs, hidden[0] if hidden else None))
        return lessons


def soft_loss(logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
    """Mean cross-entropy of the target's likeliest tokens, their probabilities scaled to a sum of 1.

    Args:
        logits: float [n, V], of the draft.
        labels: int64 [n, K].
        log_probs: float32 [n, K].
    """
    weights = log_probs.to(logits.device, logits.dtype).softmax(-1)
    return -(weights * logits.log_softmax(-1).gather(1, labels.to(logits.device))).sum(-1).mean()


def draft_loss(draft: PreTrainedModel, lesson: Lesson) -> Tensor | None:
    """Loss of a draft model on the emitted tokens, or ``None`` where there is none with a token before it."""
    count = min(len(lesson.labels), len(lesson.tokens) - 1)
    if count < 1:
        return None
    vocab = properties.vocabulary(draft)
    tokens = torch.where(lesson.tokens < vocab, lesson.tokens, 0)[None, :-1].to(draft.device)
    logits = draft(tokens, use_cache=False).logits[0, -count:, :vocab]
    return soft_loss(logits, lesson.labels[-count:], lesson.log_probs[-count:])


def heads_loss(heads: DraftHeads, target: PreTrainedModel, lesson: Lesson) -> Tensor | None:
    """Sum over heads k of 0.8^k times their loss: head k at one token's place guesses the one k + 1 behind it."""
    assert lesson.hidden is not None
    lm_head = target.get_output_embeddings()
    total = None
    states = heads.states(lesson.hidden.to(heads.weight.device))  # [n, H, D]
    for k in range(min(heads.num_heads, len(states) - 1)):
        state = states[: len(states) - k - 1, k]
        if heads.output is not None:
            logits = state @ heads.output[k].T
        else:
            logits = lm_head(state.to(lm_head.weight.dtype)).to(state.dtype)
        loss = HEAD_WEIGHT**k * soft_loss(logits, lesson.labels[k + 1 :], lesson.log_probs[k + 1 :])
        total = loss if total is None else total + loss
    return total


# ---- what was learned, as a file that is whole or absent: weights and moments of AdamW, ``weight.<name>`` and so on,
# and the steps behind them


def write_state(file: Path, module: nn.Module, optimizer: torch.optim.Optimizer, taken: int, base: str) -> None:
    """Write it beside what ``file`` holds, then put it in its place; ``base`` tells whose it is."""
    tensors = {
        f"{part}.{name}": parameter if part == "weight" else optimizer.state[parameter][part]
        for name, parameter in module.named_parameters()
        for part in PARTS
    }
    write_saved(file, FORMAT, VERSION, tensors, taken=taken, base=base)


def read_state(file: Path, module: nn.Module, optimizer: torch.optim.Optimizer, base: str) -> int:
    """Read what :func:`write_state` wrote into a module of the same parameters and its optimizer; the steps behind it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, of a newer version, of another draft, or something else. Nothing changed.
    """
    tensors, about = read_saved(file, "learner", FORMAT, VERSION, foreign="holds nothing that a learner saved")
    if about["base"] != base:
        raise ValueError(
            f"learner: {file} is of another draft, or of this one with other weights to begin with; load what "
            "was saved for it"
        )
    parameters = dict(module.named_parameters())
    expected = {f"{part}.{name}": (p.shape, p.dtype) for name, p in parameters.items() for part in PARTS}
    if expected != {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}:
        raise damaged("learner", file, "its tensors are not the draft's")
    taken = int(about["taken"])
    with torch.inference_mode(False), torch.no_grad():
        for name, parameter in parameters.items():
            moments = {part: tensors[f"{part}.{name}"].to(parameter.device, copy=True) for part in PARTS[1:]}
            step = torch.tensor(float(taken), dtype=torch.float32, device="cpu")
            parameter.copy_(tensors[f"weight.{name}"])
            optimizer.state[parameter] = {"step": step, **moments}
    return taken


# ---- the learner


class Gate:
    """A lock that any number of calls hold together, and learning alone. Learning that waits lets no new call in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()  # calls by thread: one may begin inside another, from a streamer
        self._learns = False
        self._waiting = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Hold it for a call."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._inside[me] > 0 or not (self._learns or self._waiting))
            self._inside[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= Counter([me])
                self._changed.notify_all()

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Hold it alone, once no call is running.

        Raises:
            RuntimeError: asked for inside a call, for which it would wait without end.
        """
        with self._changed:
            if self._inside[threading.get_ident()]:
                raise RuntimeError(f"{what}: not inside a call, from a streamer or an observer; do it after the call")
            self._waiting += 1
            self._changed.wait_for(lambda: not (self._inside or self._learns))
            self._waiting -= 1
            self._learns = True
        try:
            yield
        finally:
            with self._changed:
                self._learns = False
                self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Return whether a call or learning holds it, or learning waits for it."""
        return bool(self._inside or self._learns or self._waiting)


class OnlineLearner:
    """Lets a draft learn from the calls of a patched model, between them: ``OnlineLearner(handle, draft)``.

    After a call that used the draft it takes ``steps`` steps of AdamW, in float32, on what the target verified in the
    last calls, then the new weights are written into the draft in place. Learning and calls exclude each other: after
    a call that overlaps with another none is done, and a call that arrives meanwhile waits. The output never changes.
    The weights stay changed until :meth:`close`, or the end of a ``with`` block, which brings the first bits back.

    Args:
        handle: what :func:`gsd_kernels.patch` returned.
        draft: a draft model, or :class:`~gsd_kernels.DraftHeads`, that its calls use.
        steps: after a call; 0: only when :meth:`step` is called.
        batch: texts of a step: the newest, and others at random.
        texts: that are remembered, on the host; the oldest goes.
        window: last tokens of a text that are remembered.
        top: likeliest tokens of the target after each, which are the labels.
        lr: learning rate.
        seed: of the choice of texts.

    Attributes:
        taken: steps so far.
        skipped: steps that were dropped, with their texts, since a gradient was not finite.

    Raises:
        TypeError: no handle, or a draft of another kind; the history alone has no weights to learn.
        ValueError: a number out of range; a draft that another learner changes, of another vocabulary or another
            target, that shares weights with the target, is quantised, sharded or offloaded; several processes.
    """

    def __init__(
        self,
        handle: Patch,
        draft: PreTrainedModel | DraftHeads,
        *,
        steps: int = 1,
        batch: int = 4,
        texts: int = 64,
        window: int = 256,
        top: int = 8,
        lr: float = 1e-4,
        seed: int = 0,
    ) -> None:
        _check_numbers(steps=steps, batch=batch, texts=texts, window=window, top=top)
        if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not (lr > 0 and math.isfinite(lr)):
            raise ValueError(f"lr: expected a positive number, got {lr!r}")
        if not isinstance(handle, Patch):
            raise TypeError(f"handle: expected what patch returns, got {type(handle).__name__}")
        if "generate" not in vars(handle.model):
            raise ValueError("handle: its model is not patched any more; patch it anew")
        self.draft = properties.unwrap(draft)
        self.target = handle.model
        _check_draft(self.target, self.draft)
        self._engines = handle.engines
        self._steps, self._batch, self._window, self._top = steps, batch, window, top
        self._texts: deque[Lesson] = deque(maxlen=texts)
        self._random = torch.Generator().manual_seed(seed)
        self._gate = Gate()
        self._base = f"{digest(self.draft):016x}"
        with torch.inference_mode(False):
            self._first = {name: p.detach().to("cpu", copy=True) for name, p in self.draft.named_parameters()}
            wide = next(self.draft.parameters()).dtype == torch.float64
            # What is trained is a copy: small steps would be lost in the rounding of the draft's own dtype.
            self._master = copy.deepcopy(self.draft).to(torch.float64 if wide else torch.float32).eval()
            self._master.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(self._master.parameters(), lr=lr, weight_decay=0.0)
        self.taken = self.skipped = 0
        self.closed = False
        with _lock:  # of two threads one is refused
            if self._engines.learner is not None:
                raise ValueError("handle: it has a learner already; close that one first")
            if self.draft in _taught:
                raise ValueError("draft: another learner changes it; close that one first")
            _taught.add(self.draft)
            self._engines.learner = self

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.taken} steps taken, {len(self)} texts remembered"
        return f"<OnlineLearner of {type(self.draft).__name__}: {state}>"

    def __len__(self) -> int:
        """Texts that are remembered."""
        return len(self._texts)

    def __enter__(self) -> OnlineLearner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def call(self, sources: Sources, prompt: Any, attention_mask: Any) -> Iterator[None]:
        """Watch a call, and learn after it: for :func:`gsd_kernels.generate`."""
        if not any(part is self.draft for part in sources.parts):
            yield
            return
        vocab = properties.vocabulary(self.target)
        if isinstance(self.draft, PreTrainedModel):
            vocab = min(vocab, properties.vocabulary(self.draft))
        notes = Notes(self._window, self._top, vocab, hidden=isinstance(self.draft, DraftHeads))
        sources.options.observer = notes.beside(sources.options.observer)
        with self._gate.call():
            yield
            if not self.closed:
                with torch.inference_mode(False):  # what is kept takes part in learning
                    self._texts.extend(notes.lessons(prompt, attention_mask))
        if self._steps and not self._gate.busy:
            try:
                self.step(self._steps)
            except RuntimeError as error:  # the call's text is there all the same
                self._steps = 0
                log.warning("online learning ended, the draft stays as it is: %s", error)

    def step(self, steps: int = 1) -> int:
        """Take steps now, once no call is running.

        Returns:
            How many were taken; 0 while nothing is remembered, or after :meth:`close`.

        Raises:
            ValueError: ``steps`` is not a number of steps.
            RuntimeError: inside a call.
        """
        _check_numbers(steps=steps)
        with self._gate.alone("step"):
            if self.closed:
                return 0
            before = self.taken
            with torch.inference_mode(False), torch.enable_grad():
                for _ in range(steps):
                    self._step()
            if self.taken > before:
                self._write(dict(self._master.named_parameters()))
            return self.taken - before

    def _step(self) -> None:
        """One step of the copy, on the newest text and others."""
        known = list(self._texts)
        if not known:
            return
        order = torch.randperm(len(known) - 1, generator=self._random, device="cpu")[: self._batch - 1].tolist()
        chosen = [known[-1], *(known[i] for i in order)]
        parameters = list(self._master.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for lesson in chosen:
            if isinstance(self._master, DraftHeads):
                loss = heads_loss(self._master, self.target, lesson)
            else:
                loss = draft_loss(self._master, lesson)
            if loss is None:
                continue
            # Not backward: the target's output matrix, through which heads go, must get no gradient.
            for parameter, grad in zip(
                parameters, torch.autograd.grad(loss / len(chosen), parameters, allow_unused=True), strict=True
            ):
                if grad is not None:
                    parameter.grad.add_(grad)
        if not math.isfinite(nn.utils.clip_grad_norm_(parameters, 1.0).item()):
            for lesson in chosen:
                self._texts.remove(lesson)
            self.skipped += 1
        else:
            self._optimizer.step()
            self.taken += 1
        self._optimizer.zero_grad(set_to_none=True)

    def _write(self, weights: dict[str, Tensor]) -> None:
        """Copy weights into the draft, in place; the next call notices it."""
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in self.draft.named_parameters():
                parameter.copy_(weights[name])

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write what was learned to a safetensors file, as a whole or not at all; the texts are not written.

        Raises:
            ValueError: nothing was learned yet.
            RuntimeError: inside a call.
        """
        with self._gate.alone("save"):
            if not self.taken:
                raise ValueError("learner: no step was taken yet; generate with the draft first")
            write_state(path_of(file), self._master, self._optimizer, self.taken, self._base)

    def load(self, file: str | os.PathLike[str]) -> None:
        """Go on from what :meth:`save` wrote for the same draft; its weights become those.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, of a newer version, of another draft, or something else. Nothing changed.
            RuntimeError: inside a call.
        """
        with self._gate.alone("load"):
            if self.closed:
                raise ValueError("learner: it is closed; make another one")
            self.taken = read_state(path_of(file), self._master, self._optimizer, self._base)
            self._write(dict(self._master.named_parameters()))

    def close(self) -> None:
        """End it: the draft has the bits that it had before. What was learned is lost unless it was saved.

        Raises:
            RuntimeError: inside a call.
        """
        with self._gate.alone("close"):
            if self.closed:
                return
            self._write(self._first)
            self.closed = True
            self._texts.clear()
            with _lock:
                _taught.discard(self.draft)
                self._engines.learner = None


def _check_numbers(**numbers: object) -> None:
    for name, value in numbers.items():
        least = 0 if name == "steps" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")


def _check_draft(target: PreTrainedModel, draft: object) -> None:
    """Raise unless the draft's weights can be trained and written back.

    Raises:
        TypeError, ValueError: the reason.
    """
    if isinstance(draft, DraftHeads):
        draft.check_target(target)
    elif isinstance(draft, PreTrainedModel):
        try:
            validate.check_pair(target, draft, cure="a draft learns from a target of the same tokenizer")
        except ValueError as error:
            raise ValueError(str(error).replace("assistant_model", "draft", 1)) from error
    else:
        raise TypeError(
            f"draft: expected a draft model or DraftHeads, got {type(draft).__name__}; the history, a LayerSkip and "
            "other drafters have no weights that are learned while serving"
        )
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError("draft: it learns in one process only, whose weights other ranks would not have")
    parameters: Sequence[Tensor] = list(draft.parameters())
    if any(not p.is_floating_point() or hasattr(p, "__tensor_flatten__") for p in parameters) or getattr(
        draft, "hf_quantizer", None
    ):
        raise ValueError("draft: its weights are quantised or sharded and cannot be trained; give one in float dtype")
    if any(p.is_meta for p in parameters):
        raise ValueError("draft: some of its weights are not on the device (offloaded); load it whole")
    if any(p.is_inference() for p in parameters):
        raise ValueError("draft: it was loaded under torch.inference_mode, so that its weights cannot be changed")
    theirs = {p.untyped_storage().data_ptr() for p in target.parameters()}
    if any(p.untyped_storage().data_ptr() in theirs for p in parameters):
        raise ValueError("draft: it shares weights with the target, which must not change; give a copy of its own")
