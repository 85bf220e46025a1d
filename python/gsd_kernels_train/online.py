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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels_hf import validate
from gsd_kernels_hf.api import Patch
from gsd_kernels_hf.engine.resolved import Sources
from gsd_kernels_hf.files import path_of
from gsd_kernels_hf.model import properties
from gsd_kernels_hf.parallel import digest
from gsd_kernels_hf.sources.heads import DraftHeads

from .lessons import Lesson, Notes, draft_loss, heads_loss
from .online_files import read_state, write_state

log = logging.getLogger(__name__)

_taught: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.Lock()


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
            loss = self._loss(lesson)
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

    def _loss(self, lesson: Lesson) -> Tensor | None:
        if isinstance(self._master, DraftHeads):
            return heads_loss(self._master, self.target, lesson)
        return draft_loss(self._master, lesson)

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
