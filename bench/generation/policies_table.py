"""Policies raced over what the demo pair really accepts and seconds of recorded machines: no clock is read.

    gsd-kernels bench policies [--quick] [--out DIR]

The pair decodes three kinds of text, greedy and sampled. What a step takes is told to the policy,
and added up, by a cost curve of ``bench ladder``: the same figures on every machine, busy or not. Beside ``auto`` race

- ``rows``: rows chosen one by one beside a draft model too (:class:`RowPolicy` over one shape with the draft's levels);
- ``ema``: the rule by which SGLang adapts its number of draft steps (srt/speculative/adaptive_spec_params.py, with its
  default settings for one sequence): an average of accepted lengths over four shapes, with hysteresis;
- every shape of the ladder alone, of which hindsight takes the best for each text.

Each contestant knows nothing of the pair at the first prompt of a kind of text, and learns from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import gsd_kernels
from gsd_kernels import GraphConfig
from gsd_kernels_hf.costs.model import CostModel
from gsd_kernels_hf.costs.prior import CostPrior
from gsd_kernels_hf.engine.engine import Engines
from gsd_kernels_hf.files import write_json, write_text
from gsd_kernels_hf.policy.base import Observation, Plan, Policy
from gsd_kernels_hf.policy.fixed import FixedPolicy
from gsd_kernels_hf.policy.row_policy import RowExperience, RowPolicy
from gsd_kernels_hf.policy.shape_policy import ShapeExperience, ShapePolicy
from gsd_kernels_hf.policy.shapes import ladder, shape_name
from gsd_kernels_hf.progress import tracked

from ..lib.environment import environment
from ..lib.report import markdown
from .ladder import CURVES, KINDS, PROMPTS, TEMPERATURES, Curve, texts

NAME = "policies"
NEW_TOKENS = 96
RACED = tuple(name for name, curve in CURVES.items() if curve.device == "cpu" and curve.batch == 1)
BANDWIDTH = 1.5e10
REUSE = {"history_depth": 4, "history_width": 8}
#: One shape whose rows are chosen: the draft's levels cost what they cost, so two depths race.
WIDE = {f"rows, {depth} levels": GraphConfig(depth=depth, width=4, branch=3, max_rows=32, **REUSE) for depth in (3, 6)}


class AverageRule(FixedPolicy):
    """The number of draft levels by an average of accepted tokens, as SGLang's ``AdaptiveStepSlot`` has it.

    A rule of its own words over our shapes: two candidates a level, two rows a level, and the history's levels behind.
    """

    LEVELS = (1, 3, 5, 7)
    ALPHA, EVERY, WARM_UP, DOWN, UP = 0.2, 5, 10, -0.25, 0.0

    def __init__(self) -> None:
        self.place = len(self.LEVELS) // 2
        self.shapes = [
            GraphConfig(depth=depth, width=2, branch=2, max_rows=2 * depth + 2, **REUSE) for depth in self.LEVELS
        ]
        super().__init__(self.shapes[self.place])
        self.average, self.steps = float(self.LEVELS[self.place] - 1), 0

    def observe(self, seen: Observation) -> None:
        """Average the accepted tokens; every fifth step move between the shapes."""
        going = [count - 1 for count in seen.tokens if count > 0]
        if going:
            self.average += self.ALPHA * (sum(going) / len(going) - self.average)
        self.steps += 1
        if self.steps > self.WARM_UP and (self.steps - self.WARM_UP) % self.EVERY == 0:
            self._move()
            self.config = self.shapes[self.place]

    def _move(self) -> None:
        before = self.place
        while self.place and self.average <= self.LEVELS[self.place - 1] - 0.5 + self.DOWN:
            self.place -= 1
        while self.place >= before and self.place + 1 < len(self.LEVELS):
            if self.average <= self.LEVELS[self.place] - 0.5 + self.UP:
                break
            self.place += 1

    def largest_shapes(self) -> list[GraphConfig]:
        """All four."""
        return self.shapes


@dataclass
class Step:
    """One step as it was planned and taken: its shape (``None``: plain), rows, and tokens emitted."""

    shape: GraphConfig | None
    rows: int
    tokens: int


class Told:
    """A policy that is told the seconds of a curve in place of a clock's; notes every step.

    Args:
        policy: that plans.
        curve: ``None``: nothing is told, as a fixed shape wants to know nothing.
    """

    def __init__(self, policy: Policy, curve: Curve | None) -> None:
        self.policy, self.curve, self.acceptance = policy, curve, policy.acceptance
        self.steps: list[Step] = []
        self.shape: GraphConfig | None = None

    def plan(self) -> Plan:
        """The policy's own."""
        plan = self.policy.plan()
        self.shape = plan.shape
        return plan

    def observe(self, seen: Observation) -> None:
        """Tell the policy what a step like this one takes by the curve."""
        self.steps.append(Step(self.shape, seen.rows, sum(seen.tokens)))
        target, other = (0.0, 0.0) if self.curve is None else self.curve.parts(self.shape, seen.rows)
        self.policy.observe(replace(seen, target_seconds=target, other_seconds=other))

    def without_model(self, *, reuses: bool) -> Policy:
        """The policy's own."""
        return self.policy.without_model(reuses=reuses)

    def end(self) -> None:
        """The policy's own."""
        self.policy.end()

    def largest_shapes(self) -> list[GraphConfig]:
        """The policy's own."""
        return self.policy.largest_shapes()


def prior(curve: Curve) -> CostPrior:
    """What a machine's bandwidth and a model's bytes would have said of the curve: right for one row, and no more."""
    bytes_read = BANDWIDTH * min(curve.target.values())
    return CostPrior(bytes_read, 12, BANDWIDTH * curve.level, 2, 3e4, BANDWIDTH, 16.0, draft_layer_seconds=5e-5)


def learners(curve: Curve) -> dict[str, Callable[[int], Policy]]:
    """Policies that go by seconds: by name, what makes the one of a generation from its prompt's length."""
    shapes = ladder("cpu", with_model=True)
    experience = ShapeExperience(CostModel(prior(curve), shapes), shapes)
    found: dict[str, Callable[[int], Policy]] = {"auto": lambda prefix: ShapePolicy(experience, prefix=prefix)}
    for name, shape in WIDE.items():
        known = shape_name(shape)
        rows = RowExperience(CostModel(prior(curve), {known: shape}, rows_vary=True), known, shape)
        found[name] = lambda prefix, rows=rows: RowPolicy(rows, prefix=prefix)
    return found


def fixed() -> dict[str, Callable[[int], Policy]]:
    """Policies whose steps are the same on every machine."""
    found: dict[str, Callable[[int], Policy]] = {"ema": lambda prefix: AverageRule()}
    for name, shape in ladder("cpu", with_model=True).items():
        found[name] = lambda prefix, shape=shape: FixedPolicy(shape)
    return found


def race(
    models: Any, kind: str, prompts: Sequence[str], make: Callable[[int], Policy], curve: Curve | None
) -> list[Step]:
    """All steps of one contestant over the prompts of a kind of text, ``"code, greedy"`` say."""
    target, draft, tokenizer = models
    steps: list[Step] = []
    engines = Engines()  # what the sources learn outlives a call, and is this contestant's alone
    for number, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        told = Told(make(ids.shape[1]), curve)
        decoder = gsd_kernels.GraphDecoder(draft, seed=number)
        decoder.engines = engines
        decoder.policy = lambda *_, told=told, **__: told
        options: dict[str, Any] = {"do_sample": False}
        if kind.endswith("sampled"):
            options = {"do_sample": True, "temperature": TEMPERATURES[1], "top_k": 0}
        with torch.no_grad():
            target.generate(ids, custom_generate=decoder, max_new_tokens=NEW_TOKENS, eos_token_id=None, **options)
        steps += told.steps
    return steps


def rate(steps: Sequence[Step], curve: Curve) -> float:
    """Tokens a second."""
    return sum(step.tokens for step in steps) / sum(sum(curve.parts(step.shape, step.rows)) for step in steps)


def run(out: Path, *, quick: bool, show: Callable[[str], object] = print) -> None:
    """Race and write ``policies.json`` and ``policies.md`` into ``out``."""
    from gsd_kernels_hf import demo

    models = demo.load()
    kinds = KINDS[:1] if quick else KINDS
    curves = {name: CURVES[name] for name in (RACED[:1] if quick else RACED)}
    prompts = texts(1 if quick else PROMPTS)
    cells: dict[tuple[str, str], dict[str, float]] = {}
    with tracked("race", len(kinds), "kinds of text") as update:
        for done, kind in enumerate(kinds):
            own = prompts[kind.split(", ")[0]]
            same = {name: race(models, kind, own, make, None) for name, make in fixed().items()}
            for name, curve in curves.items():
                rates = {contestant: rate(steps, curve) for contestant, steps in same.items()}
                for contestant, make in learners(curve).items():
                    rates[contestant] = rate(race(models, kind, own, make, curve), curve)
                rates["plain"] = 1.0 / sum(curve.parts(None, 1))
                cells[name, kind] = rates
            update(done + 1)
    raced = ("auto", *WIDE, "ema")
    rows = []
    for name in curves:
        for contestant in raced:
            row: dict[str, Any] = {"curve": name, "policy": contestant}
            for kind in kinds:
                rates = cells[name, kind]
                best = max(value for other, value in rates.items() if other not in raced)
                row[kind] = round(rates[contestant] / best, 3)
            rows.append({**row, "mean": round(sum(row[kind] for kind in kinds) / len(kinds), 3)})
    header = ["curve", "policy", *kinds, "mean"]
    text = markdown(header, [[str(row[key]) for key in header] for row in rows])
    about = environment(torch.device("cpu"))
    rates = [{"curve": curve, "text": kind, "tokens_per_second": found} for (curve, kind), found in cells.items()]
    write_json(
        out / f"{NAME}.json", {"case": NAME, "environment": about, "of_the_best_fixed_shape": rows, "rates": rates}
    )
    write_text(out / f"{NAME}.md", text + "\n")
    show(text)
