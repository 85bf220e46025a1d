"""The training loop: schedule, checkpoints, the minutes of a run, and the folder that it resumes from.

A batch is a pure function of the step's number, and the learning rate one of the progress. So a checkpoint of weights,
optimizers, random state and step is all of a run, and one that was killed goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels_hf.files import write_file, write_text
from gsd_kernels_hf.progress import tracked

CHECKPOINT = "state.pt"

PICKING_SHARE, MEASURING_SHARE, WRITING_SHARE = 0.08, 0.08, 0.2
"""Largest shares of a run's minutes in which the target continues the held-out text, the guesses are measured before
training (and as long after it), and the target writes its own text."""


@dataclass(frozen=True)
class Interval:
    """Frequency of something: every so many steps, or seconds."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Interval:
        """``500`` is steps, ``60s`` seconds.

        Raises:
            ValueError: neither, or not positive.
        """
        match = re.fullmatch(r"(\d+)(s?)", text.strip())
        if match is None or int(match[1]) == 0:
            raise ValueError(f"checkpoint_every: expected steps, or seconds with an s (500, 60s), got {text!r}")
        return cls(seconds=float(match[1])) if match[2] else cls(steps=int(match[1]))

    def due(self, steps: int, seconds: float) -> bool:
        """Return whether it is time, so long after the last."""
        return steps >= self.steps if self.steps else seconds >= self.seconds


@dataclass
class Record:
    """Resources that one training run used."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    loss: float = float("nan")


def learning_rate_factor(progress: float, warmup: float, decay: float) -> float:
    """Trapezoid: a short rise, a plateau, then a straight line down to zero at the end of the budget."""
    rise = (progress + 1e-3) / warmup if warmup else 1.0
    fall = (1.0 - progress) / decay if decay else 1.0
    return max(0.0, min(1.0, rise, fall))


def build_optimizers(model: nn.Module, *, lr: float, weight_decay: float = 0.05) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and everything else that is trained.

    Muon (https://kellerjordan.github.io/posts/muon) needs fewer steps where a model starts from nothing; its update is
    scaled to the size of AdamW's (arXiv 2502.16982), so both take the same learning rate.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (matrices if p.ndim == 2 and "embed" not in name and "head" not in name else rest).append(p)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        )
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
    return optimizers


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The newest state of a run, on the CPU; ``None`` before the first."""
    file = folder / CHECKPOINT
    return torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None


def train(
    name: str,
    model: nn.Module,
    losses: Callable[[int], Iterable[Tensor]],
    optimizers: list[torch.optim.Optimizer],
    folder: Path,
    *,
    tokens_per_step: int,
    steps: int | None = None,
    seconds: float = math.inf,
    every: Interval,
    warmup: float = 0.02,
    decay: float = 0.6,
) -> Record:
    """Train for so many steps, or seconds, on from the checkpoint in ``folder`` if there is one.

    A run by seconds begins no step that, by the one before, would take longer than what is left; its first step is
    dropped where the time is over between two of its losses.

    Args:
        name: of the progress bar.
        model: what ``optimizers`` train.
        losses: step → scalars whose sum is the step's loss; gradients of one are taken before the next is asked for.
            It must draw the same batch whenever it is called with one step.
        tokens_per_step: for the record.
        every: how often a checkpoint is written; one more is written at the end.
        warmup, decay: shares of the run in which the learning rates rise, and fall to zero in the end.

    Raises:
        RuntimeError: the loss or its gradient is not finite; the last checkpoint stays.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    record = _resume(folder, model, optimizers)
    begin, saved_at, saved_step, took = time.monotonic() - record.seconds, time.monotonic(), record.steps, 0.0
    model.train()
    with tracked(f"training {name}", steps or seconds, "steps" if steps else "seconds") as update:
        while record.steps < steps if steps else record.seconds + took <= seconds:
            started = time.monotonic()
            progress = record.steps / steps if steps else record.seconds / seconds
            factor = learning_rate_factor(progress, warmup, decay)
            until = math.inf if record.steps else begin + seconds
            try:
                value = _step(model, losses(record.steps), optimizers, factor, until)
            except FloatingPointError as error:
                kept = f"the checkpoint of step {saved_step} stays in {folder}" if saved_step else "none was saved"
                anew = "start anew with a lower learning rate"
                raise RuntimeError(f"{name}: {error} at step {record.steps}; {kept}; {anew}") from error
            if value is None:
                break
            now = time.monotonic()
            took = now - started
            record.steps += 1
            record.tokens += tokens_per_step
            record.seconds = now - begin
            record.loss = value if math.isnan(record.loss) else 0.98 * record.loss + 0.02 * value
            count = "" if steps else f"{record.steps} steps, "
            update(record.steps if steps else record.seconds, f"{count}loss {record.loss:.4f}")
            if every.due(record.steps - saved_step, now - saved_at):
                _save(folder, model, optimizers, record)
                saved_at, saved_step = time.monotonic(), record.steps
    if record.steps > saved_step:
        _save(folder, model, optimizers, record)
    model.eval()
    return record


def _step(
    model: nn.Module,
    losses: Iterable[Tensor],
    optimizers: list[torch.optim.Optimizer],
    factor: float,
    until: float,
) -> float | None:
    """Update the weights once, at ``factor`` times the learning rates; the loss.

    Where the clock is past ``until`` between two of them the step is dropped, and there is no loss.

    Raises:
        FloatingPointError: the loss or its gradient is not finite.
    """
    value = 0.0
    for done, loss in enumerate(losses):
        if done and time.monotonic() > until:
            return None
        value += loss.item()
        _check_finite("the loss", value)
        loss.backward()
    _check_finite("the gradient", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return value


def _check_finite(what: str, value: float) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(f"{what} is {value}")


def _save(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], record: Record) -> None:
    device = next(model.parameters()).device
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    saved = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    state = {**saved, "random": random, "record": asdict(record)}
    write_file(folder / CHECKPOINT, lambda file: torch.save(state, file))


def _resume(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Record:
    """Bring back the newest checkpoint's state; its record, of a run without one an empty record."""
    state = load_checkpoint(folder)
    if state is None:
        return Record()
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    torch.set_rng_state(state["random"]["cpu"])
    device = next(model.parameters()).device
    if "cuda" in state["random"] and device.type == "cuda":
        torch.cuda.set_rng_state(state["random"]["cuda"], device)
    return Record(**state["record"])


# ---------------------------------------------------------------- the minutes of a run: reading and measuring count too


class RunClock:
    """The rest of a run's minutes, counted over all the times that it was begun.

    Args:
        minutes: of the run; ``None``: no limit.
        begun: of this time, on the clock of ``time.monotonic``; ``None``: now.

    Attributes:
        limited: whether there is a limit.
        seconds: of the whole run; infinite without a limit.
        earlier: seconds of earlier times of the same run, of what is not done again.
    """

    def __init__(self, minutes: float | None, begun: float | None = None) -> None:
        self.limited = minutes is not None
        self.seconds = math.inf if minutes is None else 60 * minutes
        self.begun = time.monotonic() if begun is None else begun
        self.earlier = 0.0

    @property
    def used(self) -> float:
        """Seconds that are gone."""
        return time.monotonic() - self.begun + self.earlier

    @property
    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return self.seconds - self.used

    def share(self, share: float) -> float:
        """Seconds of a share of the run, or what is left if that is less."""
        return max(0.0, min(share * self.seconds, self.left))

    def check(self, doing: str) -> None:
        """Raise where nothing is left.

        Raises:
            RuntimeError: it says what the time went by with.
        """
        if self.left <= 0:
            raise NothingLearned(f"the {spoken(self.seconds)} are over {doing}, before the training began")


class NothingLearned(RuntimeError):
    """A run that ended without a step."""

    def __init__(self, why: str) -> None:
        super().__init__(f"nothing was learned, and nothing is written: {why}; give more by --minutes, or less text")


def spoken(seconds: float) -> str:
    """``90 s`` or ``15 minutes``."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:.3g} minutes"


# ---------------------------------------------------------------- the folder of a run


class RunFolder:
    """``--out``: what was trained, and before that ``checkpoints/``, from which the same command goes on.

    Args:
        folder: absent, empty, or of the same run.
        identity: by option name, everything that decides the result, as JSON values.

    Raises:
        ValueError: the folder holds something else, or a run that differs; the option is named.
    """

    REPORT = "training.json"

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.identity = folder, identity
        self.work = folder / "checkpoints"
        self.report: dict[str, Any] | None = None
        """Report that :meth:`finish` wrote, if the run was over before."""
        finished, begun = folder / self.REPORT, self.work / "run.json"
        if finished.exists():
            self.report = json.loads(finished.read_text(encoding="utf-8"))
            self._compare(self.report["options"])
            shutil.rmtree(self.work, ignore_errors=True)
        elif begun.exists():
            self._compare(json.loads(begun.read_text(encoding="utf-8")))
        elif folder.exists() and (
            not folder.is_dir()
            or any(
                path != self.work and not path.name.startswith(".partial-")  # of a run killed before its first file
                for path in folder.rglob("*")
            )
        ):
            raise ValueError(f"out: {folder} is not empty and holds no checkpoint of a run; name another folder")
        else:
            write_text(begun, json.dumps(identity, indent=1))

    def _compare(self, theirs: dict[str, Any]) -> None:
        mine = json.loads(json.dumps(self.identity))
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                raise ValueError(
                    f"{name}: the run in {self.folder} has {_short(theirs.get(name))}, and now it is "
                    f"{_short(mine.get(name))}; give the same to resume it, or name another folder by out"
                )

    @property
    def trains(self) -> bool:
        """Return whether training has begun: there is a checkpoint."""
        return (self.work / CHECKPOINT).exists()

    def knows(self, name: str) -> bool:
        """Return whether :meth:`remember` has it."""
        return (self.work / f"{name}.json").exists()

    def remember(self, name: str, measure: Callable[[], Any]) -> Any:
        """Result of ``measure`` (as JSON), now or before the run was interrupted."""
        file = self.work / f"{name}.json"
        if not self.knows(name):
            write_text(file, json.dumps(measure()))
        return json.loads(file.read_text(encoding="utf-8"))

    def timed(self, name: str, measure: Callable[[], Any], clock: RunClock) -> tuple[Any, float]:
        """Measure by :meth:`remember`, and count the seconds; ``clock`` counts those of earlier times."""
        begin, earlier = time.monotonic(), self.knows(name)
        entry = self.remember(name, lambda: {"value": measure(), "seconds": time.monotonic() - begin})
        if earlier:
            clock.earlier += entry["seconds"]
        return entry["value"], entry["seconds"]

    def discard(self) -> None:
        """Leave nothing of a run that ended without a result; the folder itself too if it is empty then."""
        shutil.rmtree(self.work, ignore_errors=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def finish(self, save: Callable[[Path], object], report: dict[str, Any]) -> dict[str, Any]:
        """Write the result by ``save`` and ``training.json``, remove the checkpoints; the report."""
        report = {"options": self.identity, **report}
        save(self.folder)  # killed here, the same command goes on from the last checkpoint and saves anew
        write_text(self.folder / self.REPORT, json.dumps(report, indent=2) + "\n")
        shutil.rmtree(self.work)
        return report


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
