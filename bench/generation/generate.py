"""Whole generations in one interleaved run: ours beside everything that transformers brings for the same purpose."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsd_kernels_cli.comparison import first_divergence, sameness
from gsd_kernels_cli.ranks import from_first
from gsd_kernels_hf.files import write_json

from ..lib.environment import environment
from ..lib.intervals import Ratio, paired_ratio
from ..lib.report import SCHEMA, markdown
from .competitors import (
    AUTO,
    DEFAULT,
    GREEDY,
    PLAIN,
    Competitor,
    check_names,
    competitors,
    fixed_configs,
    is_ours,
    warmed_up,
)
from .pairs import Pair, load_pair, of_length
from .real.own import own_pair

NAME = "generate"
WARM_UP_TOKENS = 8
FORWARDS = ("prefill", "draft", "target")  # parts of a call's statistics


@dataclass(frozen=True)
class Settings:
    """One run. ``seconds`` bounds it: no further prompt is begun after that, and there is always one.

    ``prompt_tokens`` is the length of every prompt; the
    prompts' own by default.
    """

    device: torch.device
    dtype: torch.dtype
    pair: str = "demo"
    target_shape: str = "250m"
    draft_shape: str = "none"
    text: str = "code"
    prompts: int = 20
    new_tokens: int = 128
    temperature: float = 0.0
    competitors: Sequence[str] = DEFAULT
    backend: str = "auto"
    quick: bool = False
    seconds: float = float("inf")
    ranks: int = 1  # processes that share the target, this one among them
    prompt_tokens: int | None = None
    fresh: bool = False  # prompts on which no setting was chosen
    model: str | None = None  # one's own, with its draft and prompts, in place of the pair
    draft: str | None = None
    prompt_file: Path | None = None


@dataclass
class GenerateReport:
    """Every decoding of the run, and what follows from them."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    parameters: dict[str, int]
    prompts: list[str]
    runs: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    setup_seconds: dict[str, float] = field(default_factory=dict)  # warm-up and compiling; not timed
    summary: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    case: str = NAME
    schema: int = SCHEMA

    @property
    def against(self) -> str:
        """The baseline of speedups: transformers' plain decoding; on a GPU our own, which is captured."""
        on_gpu, raced = self.environment["device_type"] == "cuda", {run["competitor"] for run in self.runs}
        return PLAIN if on_gpu and PLAIN in raced else GREEDY

    def totals(self, name: str, cost: str = "seconds") -> list[tuple[float, float]]:
        """(tokens, cost) of a competitor on every prompt, in order."""
        return [(run["tokens"], run[cost]) for run in self.runs if run["competitor"] == name]

    def ratio(self, ours: str, theirs: str) -> Ratio:
        return paired_ratio(self.totals(ours), self.totals(theirs))

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write ``name``.json; the files written."""
        return [write_json(folder / f"{name}.json", asdict(self))]

    def table(self) -> str:
        """The summary in Markdown."""
        return markdown(
            [
                "",
                "tokens/s",
                f"against {self.against} (95%)",
                "tokens/forward",
                "ms a token beside the models",
                "same tokens",
            ],
            [
                [
                    row["competitor"],
                    f"{row['tokens_per_second']:.1f}",
                    "–" if row["speedup"] is None else str(Ratio(**row["speedup"])),
                    "–" if row["tokens_per_forward"] is None else f"{row['tokens_per_forward']:.2f}",
                    "–" if row["beside_seconds"] is None else f"{1e3 * row['beside_seconds']:.2f}",
                    sameness(row, row["compared"]) if row["compared"] else "–",
                ]
                for row in self.summary
            ],
        )


def run(settings: Settings, *, folder: Path | None = None, name: str = NAME) -> GenerateReport:
    """Race the competitors; after every prompt the results so far are written to ``folder``."""
    check_names(settings.competitors)
    if settings.model is None and (settings.draft is not None or settings.prompt_file is not None):
        raise ValueError("--draft, --prompt-file: need --model; the embedded pair has its own")
    pair = _pair(settings)
    report = GenerateReport(
        settings={
            **{k: v for k, v in asdict(settings).items() if k not in ("device", "dtype", "competitors", "seconds")},
            "pair": pair.name,
            "prompt_file": None if settings.prompt_file is None else settings.prompt_file.name,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "competitors": list(settings.competitors),
            "configs": {key: asdict(config) for key, config in fixed_configs(settings.device).items()},
        },
        environment=environment(settings.device),
        parameters={
            "target": pair.target.num_parameters(),
            "draft": 0 if pair.draft is None else pair.draft.num_parameters(),
        },
        prompts=[prompt.name for prompt in pair.prompts],
    )
    _rounds(settings, pair, _prepare(settings, pair, report), report, folder, name)
    return report


def _pair(settings: Settings) -> Pair:
    """The pair with its prompts."""
    if settings.model is not None:
        options = {"device": settings.device, "dtype": settings.dtype, "count": settings.prompts}
        return own_pair(settings.model, settings.draft, settings.prompt_file, **options)
    pair = load_pair(
        settings.pair,
        device=settings.device,
        dtype=settings.dtype,
        target_shape=settings.target_shape,
        draft_shape=settings.draft_shape,
        texts=[settings.text],
        prompts=settings.prompts,
        fresh=settings.fresh,
        tensor_parallel=settings.ranks > 1,
    )
    if settings.prompt_tokens is None:
        return pair
    limit = pair.target.config.max_position_embeddings - settings.new_tokens
    return replace(pair, prompts=of_length(pair.prompts, settings.prompt_tokens, limit))


def _rounds(
    settings: Settings, pair: Pair, racing: list[Competitor], report: GenerateReport, folder: Path | None, name: str
) -> None:
    """One round for each prompt; each begins with another competitor."""
    begin = time.perf_counter()
    for number, prompt in enumerate(pair.prompts):
        spent = from_first(time.perf_counter() - begin)
        if number and spent * (number + 1) / number > settings.seconds:
            print(f"generate: {number} of {len(pair.prompts)} prompts in {spent:.0f} s", file=sys.stderr)
            break
        turn = number % len(racing)
        decoded: dict[str, list[int]] = {}
        order = racing[turn:] + racing[:turn]
        for place, competitor in enumerate(order):
            print(f"generate: prompt {number + 1}/{len(pair.prompts)}, {competitor.name}", file=sys.stderr, flush=True)
            measured, decoded[competitor.name] = _decode(competitor, prompt.input_ids, settings, seed=number)
            report.runs.append({"prompt": prompt.name, "competitor": competitor.name, "place": place, **measured})
        _judge(settings, pair, prompt.input_ids, decoded, report.runs[-len(order) :], seed=number)
        _summarise(report, [c.name for c in racing])
        if folder is not None:
            report.write(folder, name)


def _prepare(settings: Settings, pair: Pair, report: GenerateReport) -> list[Competitor]:
    """Compile and warm up; the competitors that work.

    What compiles as it goes writes a whole text: the compiled ones, and on a GPU everybody, whose kernels are compiled
    for the rows of a step when it first has so many.
    """
    longest = max((prompt.input_ids for prompt in pair.prompts), key=lambda ids: ids.shape[1])
    options = {"temperature": settings.temperature, "backend": settings.backend, "quick": settings.quick}

    def tokens(competitor: Competitor) -> int:
        return settings.new_tokens if competitor.compiled or settings.device.type == "cuda" else WARM_UP_TOKENS

    return warmed_up(competitors(pair, settings.competitors, **options), longest, tokens, report)


def _decode(competitor: Competitor, ids: Tensor, settings: Settings, seed: int) -> tuple[dict[str, Any], list[int]]:
    new, seconds, decoded = competitor.timed(ids, settings.new_tokens, seed)
    stats = decoded.stats
    result = {
        "tokens": len(new),
        "seconds": seconds,
        "target_forwards": decoded.target_forwards,
        "mean_rows": stats.target_rows / stats.steps if stats is not None and stats.steps else None,
        "same": None,
        "divergence": None,
        "stats": None if stats is None else stats.as_dict(),
    }
    return result, new


def _judge(
    settings: Settings,
    pair: Pair,
    ids: Tensor,
    decoded: dict[str, list[int]],
    runs: list[dict[str, Any]],
    seed: int,
) -> None:
    """Compare every text with plain decoding: transformers' own or ours, of sampled ones ours."""
    reference = GREEDY if settings.temperature == 0 and GREEDY in decoded else PLAIN
    if reference not in decoded:
        return
    plain = decoded[reference]
    for run_ in runs:
        if run_["competitor"] == reference or (settings.temperature > 0 and not is_ours(run_["competitor"])):
            continue
        other = decoded[run_["competitor"]]
        run_["same"] = plain == other
        if not run_["same"]:
            divergence = first_divergence(pair.target, ids, plain, other, temperature=settings.temperature, seed=seed)
            run_["divergence"] = None if divergence is None else divergence.as_dict()


def _beside(runs: list[dict[str, Any]]) -> float | None:
    """Seconds a token in which neither target nor draft forwarded: captures, the host, what comes before and after."""
    if any(run["stats"] is None for run in runs):
        return None
    forwards = sum(run["stats"]["seconds"].get(part, 0.0) for run in runs for part in FORWARDS)
    return (sum(run["seconds"] for run in runs) - forwards) / sum(run["tokens"] for run in runs)


def _summarise(report: GenerateReport, names: list[str]) -> None:
    report.summary, report.ratios = [], {}
    for name in names:
        runs = [run for run in report.runs if run["competitor"] == name]
        tokens, seconds = sum(run["tokens"] for run in runs), sum(run["seconds"] for run in runs)
        forwards = [run["target_forwards"] for run in runs]
        compared = [run for run in runs if run["same"] is not None]
        differing = [run["divergence"] for run in compared if not run["same"]]
        near = sum(d is not None and d["within_rounding"] for d in differing)
        report.summary.append(
            {
                "competitor": name,
                "tokens_per_second": tokens / seconds,
                "speedup": asdict(report.ratio(name, report.against)) if report.against in names else None,
                "beside_seconds": _beside(runs),
                "tokens_per_forward": tokens / sum(forwards) if all(forwards) else None,
                "mean_rows": None if runs[0]["mean_rows"] is None else statistics.mean(r["mean_rows"] for r in runs),
                "compared": len(compared),
                "equal": len(compared) - len(differing),
                "within_rounding": near,
                "beyond_rounding": len(differing) - near,
            }
        )
    if AUTO in names:
        report.ratios = {f"{AUTO} / {name}": asdict(report.ratio(AUTO, name)) for name in names if name != AUTO}
