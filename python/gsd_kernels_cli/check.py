"""``gsd-kernels check``: proof on the user's own pair and prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from . import options
from .busy import distrust
from .groups import with_groups
from .options import describe_graph_config, read_graph_config, read_prompts
from .output import DIFFERS, OK, only_first_rank_prints, out, print_json, progress, size, speed, table
from .values import check_draft, model_before

if TYPE_CHECKING:
    from gsd_kernels_cli.comparison import Divergence, Run

    from .pair import LoadedPair

DEFAULT_PROMPTS = 4
PLAIN, UNDRAFTED, GRAPH = "plain", "undrafted", "graph"
"""Ways: transformers' own generate, this package's without a draft, and with drafts."""
NOISE_FACTOR = 1.1
"""Drafts cannot give more than their tokens per step; beyond this multiple of it the times are not believed."""


@with_groups
def command(
    *,
    prompts: options.Prompts = None,
    model: options.Model = None,
    models: options.Models,
    ranks: options.Ranks,
    prompt_files: options.PromptFiles = None,
    lines: options.Lines = False,
    chat: options.Chat = False,
    max_new_tokens: options.MaxNewTokens = 64,
    graph_config: options.GraphOption = None,
    backend: options.Backend = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Compare transformers' own greedy generate with graph speculation, prompt by prompt.

    Equality of the tokens, the first divergence with the target's logit gap there (judged by the dtype's rounding),
    speed (by this package's forwards alone, and by drafts) and peak memory. Exit code 0: equal, or different only where
    rounding decides; 3: different beyond that.
    Without prompts, a few excerpts of Python source are continued.
    """
    if ranks.tp:
        only_first_rank_prints()
    model, prompts = model_before(prompts, model)
    check_draft(model, models.draft)
    config = read_graph_config(graph_config)
    given = prompts or prompt_files
    texts = read_prompts(prompts, prompt_files, lines, several_processes=ranks.tp) if given else []
    with progress("loading the models"):
        import torch

        from gsd_kernels_cli import demo

        from .versions import versions

        pair = models.load(model, tp_timeout=ranks.timeout)
    texts = texts or [prompt["text"] for prompt in demo.prompts()[:DEFAULT_PROMPTS]]
    inputs = [pair.encode([text], chat) for text in texts]
    rounds, divergences, share = _compare(
        pair, inputs, max_new_tokens, graph_config=pair.shape(config), backend=backend
    )
    report = {
        "versions": versions(),
        "device": str(pair.device),
        "dtype": pair.dtype,
        "threads": torch.get_num_threads(),
        "backend": backend,
        "graph_config": describe_graph_config(config),
        "prompts": [
            _row(text, i["input_ids"].shape[1], runs, divergence)
            for text, i, runs, divergence in zip(texts, inputs, rounds, divergences, strict=True)
        ],
        "summary": _summary(rounds, divergences, share),
    }
    if as_json:
        print_json(report)
    else:
        _print(report)
    raise typer.Exit(DIFFERS if report["summary"]["beyond_rounding"] else OK)


def _compare(
    pair: LoadedPair, inputs: list[Any], max_new_tokens: int, **speculation: Any
) -> tuple[list[dict[str, Run]], list[Divergence | None], float | None]:
    """Every prompt in all ways, where plain and graph first differ, and what others took of the machine meanwhile."""
    from gsd_kernels_cli import comparison
    from gsd_kernels_hf.progress import tracked

    contenders = {
        PLAIN: comparison.plain(pair.target, **pair.padding),
        UNDRAFTED: comparison.undrafted(pair.target, backend=speculation["backend"], **pair.padding),
        GRAPH: comparison.graph(pair.target, **speculation, **pair.speculation, **pair.padding),
    }
    rounds, share = comparison.race(pair.target, contenders, inputs, max_new_tokens)
    with tracked("comparing", len(inputs), "prompts") as update:
        divergences = []
        for number, (i, runs) in enumerate(zip(inputs, rounds, strict=True)):
            update(number)
            texts = runs[PLAIN].tokens, runs[GRAPH].tokens
            divergences.append(comparison.first_divergence(pair.target, i["input_ids"], *texts))
    return rounds, divergences, share


def _row(text: str, prompt_tokens: int, runs: dict[str, Run], divergence: Divergence | None) -> dict[str, Any]:
    names = ("seconds", "tokens_per_second", "target_forwards", "peak_bytes")
    sides = {way: {name: getattr(run, name) for name in names} for way, run in runs.items()}
    stats = runs[GRAPH].stats
    assert stats is not None
    return {
        "prompt": text,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(runs[PLAIN].tokens),
        "equal": divergence is None,
        "divergence": None if divergence is None else divergence.as_dict(),
        "speedup": runs[PLAIN].seconds / runs[GRAPH].seconds,
        **sides,
        GRAPH: {**sides[GRAPH], "stats": stats.as_dict()},
    }


def _summary(rounds: list[dict[str, Run]], divergences: list[Divergence | None], share: float | None) -> dict[str, Any]:
    """Of all prompts; ``share``: of the machine's processor time, what others took."""
    from gsd_kernels_cli.comparison import tally, together

    plain, undrafted, graph = (together([runs[way] for runs in rounds]) for way in (PLAIN, UNDRAFTED, GRAPH))
    rate, counts = graph.tokens_per_second, tally(divergences)
    kept = [runs[GRAPH].stats for runs in rounds if runs[GRAPH].stats is not None]
    per_step = sum(s.new_tokens for s in kept) / max(sum(s.sequence_steps for s in kept), 1)
    by_drafts = rate / undrafted.tokens_per_second
    verdict = "differs" if counts["beyond_rounding"] else "rounding" if counts["within_rounding"] else "equal"
    return {
        "verdict": verdict,
        "prompts": len(rounds),
        **counts,
        "plain_tokens_per_second": plain.tokens_per_second,
        "undrafted_tokens_per_second": undrafted.tokens_per_second,
        "graph_tokens_per_second": rate,
        "speedup": rate / plain.tokens_per_second,
        "speedup_without_drafts": undrafted.tokens_per_second / plain.tokens_per_second,
        "speedup_by_drafts": by_drafts,
        "tokens_per_step": per_step,
        "others_share": share,
        "why_not_believed": _doubt(by_drafts, per_step, share),
        "plain_peak_bytes": plain.peak_bytes,
        "graph_peak_bytes": graph.peak_bytes,
    }


def _doubt(by_drafts: float, tokens_per_step: float, share: float | None) -> str | None:
    """Why the times of a run say nothing, or ``None``."""
    if distrust(share) is not None:
        return f"the machine was busy with other work, {share:.0%} of its processors"
    if by_drafts > NOISE_FACTOR * tokens_per_step:
        return (
            f"drafts seem to make it {by_drafts:.2f}× as fast, more than {tokens_per_step:.2f} tokens a step can; "
            "the runs are too short, or the machine was busy"
        )
    return None


def _print(report: dict[str, Any]) -> None:
    from gsd_kernels_cli.comparison import sameness

    doubt = report["summary"]["why_not_believed"]
    rows = [
        [
            escape(_short(row["prompt"])),
            f"{row['new_tokens']}",
            f"{row['plain']['tokens_per_second']:.1f}",
            f"{row['graph']['tokens_per_second']:.1f}",
            "–" if doubt else f"{row['speedup']:.2f}×",
            f"{row['graph']['stats']['tokens_per_step']:.2f}",
            _verdict(row["divergence"]),
        ]
        for row in report["prompts"]
    ]
    out.print(table(["prompt", "tokens", "plain tok/s", "graph tok/s", "speed", "tok/step", "<output"], rows))
    summary = report["summary"]
    memory = f"peak memory {size(summary['plain_peak_bytes'])} plain, {size(summary['graph_peak_bytes'])} graph"
    out.print(f"\n{report['dtype']} on {report['device']}: {_speed(summary)}; {memory}", soft_wrap=True)
    if doubt:
        out.print(f"No speed is told: {doubt}.", style="bold yellow", soft_wrap=True)
    out.print(f"The same tokens: {sameness(summary, len(rows))}", soft_wrap=True)
    if summary["equal"] < summary["prompts"]:
        out.print(
            "(gap: how far apart the target's logits of the two tokens are; bound: how far rounding in this dtype "
            "moves them. Within the bound either token is a right answer, and transformers may give either.)",
            style="dim",
            soft_wrap=True,
        )


def _speed(summary: dict[str, Any]) -> str:
    steps = f"{summary['tokens_per_step']:.2f} tokens per step"
    if summary["why_not_believed"]:
        return steps
    return (
        f"{speed(summary['speedup'])} over all prompts, {summary['speedup_without_drafts']:.2f}× by forwards alone and "
        f"{summary['speedup_by_drafts']:.2f}× by drafts; {steps}"
    )


def _verdict(divergence: dict[str, Any] | None) -> str:
    if divergence is None:
        return "same"
    kind = "rounding" if divergence["within_rounding"] else "DIFFERS"
    return f"{kind} at {divergence['index']}: gap {divergence['gap']:.2g}, bound {divergence['bound']:.2g}"


def _short(text: str, width: int = 18) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
