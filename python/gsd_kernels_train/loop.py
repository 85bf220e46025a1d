"""The training loop of drafts, heads and the demo pair: schedule, checkpoints, and a folder that a run resumes from.

A batch is a pure function of the step's number, and the learning rate one of the progress. So a checkpoint of weights,
optimizers, random state and step is all of a run, and one that was killed goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels_hf.files import write_file, write_folder
from gsd_kernels_hf.progress import tracked

from .clock import RunClock

# ---------------------------------------------------------------- schedule


@dataclass(frozen=True)
class Budget:
    """Length of a training: a number of steps, or minutes of wall time (whichever is given)."""

    steps: int | None = None
    minutes: float | None = None

    @property
    def seconds(self) -> float:
        """Of wall time; infinite in a run by steps."""
        return math.inf if self.minutes is None else 60 * self.minutes

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the budget that is used, 0 … 1."""
        return min(1.0, step / self.steps if self.steps else seconds / (60 * self.minutes))


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
    unfinished: int = 0  # parts of the last step that were done when the time was over; it counts for nothing


def learning_rate_factor(progress: float, warmup: float = 0.02, decay: float = 0.6) -> float:
    """Trapezoid: a short rise, a plateau, then a straight line down to zero at the end of the budget."""
    rise = (progress + 1e-3) / warmup if warmup else 1.0
    fall = (1.0 - progress) / decay if decay else 1.0
    return max(0.0, min(1.0, rise, fall))


def build_optimizers(
    model: nn.Module, *, matrix_lr: float, lr: float, weight_decay: float = 0.05
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and everything else that is trained.

    Muon (https://kellerjordan.github.io/posts/muon) needs fewer steps where a model starts from nothing; its update is
    scaled to the size of AdamW's (arXiv 2502.16982), so both take learning rates of one magnitude.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if p.ndim == 2 and "embed" not in name and "head" not in name]
    known = {id(p) for p in matrices}
    rest = [p for _, p in trained if id(p) not in known]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=matrix_lr, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            )
        )
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
    return optimizers


# ---------------------------------------------------------------- what survives a kill


class Checkpoints:
    """The newest state of a run, in ``folder/step-<number>``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, oldest first."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))

    def load(self) -> dict[str, Any] | None:
        """The newest state, on the CPU; ``None`` before the first."""
        steps = self.steps()
        if not steps:
            return None
        return torch.load(self.folder / f"step-{steps[-1]}" / "state.pt", map_location="cpu", weights_only=True)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a state and remove what is older."""
        older = self.steps()
        if step in older:
            return
        with write_folder(self.folder / f"step-{step}") as partial:
            torch.save(state, partial / "state.pt")
        for number in older:
            shutil.rmtree(self.folder / f"step-{number}")


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def train(
    name: str,
    model: nn.Module,
    losses: Callable[[int, float], Iterable[Tensor]],
    optimizers: list[torch.optim.Optimizer],
    budget: Budget,
    checkpoints: Checkpoints,
    *,
    tokens_per_step: int,
    every: Interval = Interval(seconds=120),
    schedule: Callable[[float], float] = learning_rate_factor,
) -> Record:
    """Train until the budget is used, on from the newest checkpoint if there is one.

    A run by minutes begins no step that, by the one before, would take longer than what is left; its first step is
    dropped where the time is over between two of its losses.

    Args:
        name: of the progress bar.
        model: what ``optimizers`` train.
        losses: (step, progress 0 … 1) → scalars whose sum is the step's loss; gradients of one are taken before the
            next is asked for. It must draw the same batch whenever it is called with one step.
        tokens_per_step: for the record.
        every: how often a checkpoint is written; one more is written at the end.
        schedule: progress → factor of the learning rates.

    Raises:
        RuntimeError: the loss or its gradient is not finite; the last checkpoint stays.
    """
    run = _Run(name, model, optimizers, budget, checkpoints)
    run.resume()
    record = run.record
    begin, before = time.monotonic(), record.seconds
    saved_at, saved_step = begin, record.steps
    model.train()
    took = 0.0
    with tracked(f"training {name}", budget.steps or budget.seconds, "steps" if budget.steps else "seconds") as update:
        while (progress := run.progress) < 1.0 and record.seconds + took <= budget.seconds:
            started = time.monotonic()
            value = run.step(losses(record.steps, progress), schedule(progress), begin - before + budget.seconds)
            now = time.monotonic()
            if value is None:
                break
            took = now - started
            record.steps += 1
            record.tokens += tokens_per_step
            record.seconds = before + now - begin
            record.loss = value if math.isnan(record.loss) else 0.98 * record.loss + 0.02 * value
            steps = "" if budget.steps else f"{record.steps} steps, "
            update(record.steps if budget.steps else record.seconds, f"{steps}loss {record.loss:.4f}")
            if every.due(record.steps - saved_step, now - saved_at):
                run.save()
                saved_at, saved_step = time.monotonic(), record.steps
    run.save()
    model.eval()
    return record


class _Run:
    """A model in training, and what a checkpoint holds of it."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        budget: Budget,
        checkpoints: Checkpoints,
    ) -> None:
        self.name, self.model, self.optimizers = name, model, optimizers
        self.budget, self.checkpoints, self.record = budget, checkpoints, Record()
        self.device = next(model.parameters()).device
        self.base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    @property
    def progress(self) -> float:
        """Share of the budget that is used, 0 … 1."""
        return self.budget.progress(self.record.steps, self.record.seconds)

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        state = self.checkpoints.load()
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        _set_random_state(state["random"], self.device)
        self.record = Record(**state["record"])

    def save(self) -> None:
        """Write a checkpoint."""
        self.checkpoints.save(
            self.record.steps,
            {
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "random": _random_state(self.device),
                "record": asdict(self.record),
            },
        )

    def step(self, losses: Iterable[Tensor], factor: float, until: float) -> float | None:
        """Update the weights once, at ``factor`` times the base learning rates; the step's loss.

        The first step of a run, whose length nobody knows, is dropped where the clock is past ``until`` before its end:
        ``None``.

        Raises:
            RuntimeError: the loss or its gradient is not finite.
        """
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        value = 0.0
        for done, loss in enumerate(losses):
            if done and self.record.steps == 0 and time.monotonic() > until:
                self.record.unfinished = done
                return None
            value += loss.item()
            self._check_finite("the loss", value)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._check_finite("the gradient", norm.item())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return value

    def _check_finite(self, what: str, value: float) -> None:
        if math.isfinite(value):
            return
        saved = self.checkpoints.steps()
        kept = f"the checkpoint of step {saved[-1]} stays in {self.checkpoints.folder}" if saved else "none was saved"
        raise RuntimeError(
            f"{self.name}: {what} is {value} at step {self.record.steps}; {kept}; start anew with a lower learning rate"
        )


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
        """Report that :meth:`finish` wrote, if the run is over."""
        finished, begun = folder / self.REPORT, self.work / "run.json"
        if finished.exists():
            self.report = json.loads(finished.read_text(encoding="utf-8"))
            self._compare(self.report["options"])
            shutil.rmtree(self.work, ignore_errors=True)
        elif begun.exists():
            self._compare(json.loads(begun.read_text(encoding="utf-8")))
        elif folder.exists() and (not folder.is_dir() or any(self._others())):
            raise ValueError(f"out: {folder} is not empty and holds no checkpoint of a run; name another folder")
        else:
            self.work.mkdir(parents=True, exist_ok=True)
            write_file(begun, lambda file: file.write_text(json.dumps(identity, indent=1), encoding="utf-8"))

    def _others(self) -> Iterator[Path]:
        """Files of something else than a run that was killed before its first file."""
        for path in self.folder.rglob("*"):
            if path != self.work and not path.name.startswith(".partial-"):
                yield path

    def _compare(self, theirs: dict[str, Any]) -> None:
        mine = json.loads(json.dumps(self.identity))
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                raise ValueError(
                    f"{name}: the run in {self.folder} has {_short(theirs.get(name))}, and now it is "
                    f"{_short(mine.get(name))}; give the same to resume it, or name another folder by out"
                )

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.work)

    def remember(self, name: str, measure: Callable[[], Any]) -> Any:
        """Result of ``measure`` (as JSON), now or before the run was interrupted."""
        file = self.work / f"{name}.json"
        if not file.exists():
            value = measure()
            write_file(file, lambda partial: partial.write_text(json.dumps(value), encoding="utf-8"))
        return json.loads(file.read_text(encoding="utf-8"))

    def timed(self, name: str, measure: Callable[[], Any], clock: RunClock) -> tuple[Any, float]:
        """Measure by :meth:`remember`, and count the seconds; ``clock`` counts those of earlier times."""
        begin, earlier = time.monotonic(), (self.work / f"{name}.json").exists()
        entry = self.remember(name, lambda: {"value": measure(), "seconds": time.monotonic() - begin})
        if earlier:
            clock.spent_earlier(entry["seconds"])
        return entry["value"], entry["seconds"]

    def discard(self) -> None:
        """Leave nothing of a run that ended without a result; the folder itself too if it is empty then."""
        shutil.rmtree(self.work, ignore_errors=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def finish(self, save: Callable[[Path], object], report: dict[str, Any]) -> dict[str, Any]:
        """Write the result by ``save`` and ``training.json``, remove the checkpoints; the report."""
        report = {"options": self.identity, **report}
        staged = self.work / "result"
        shutil.rmtree(staged, ignore_errors=True)
        with write_folder(staged) as partial:
            save(partial)
        for file in sorted(staged.iterdir()):
            file.replace(self.folder / file.name)
        write_file(
            self.folder / self.REPORT,
            lambda file: file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8"),
        )
        shutil.rmtree(self.work)
        self.report = report
        return report


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
