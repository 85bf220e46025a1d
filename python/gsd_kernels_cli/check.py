"""``gsd-kernels check``: proof on the user's own pair and prompts."""

from __future__ import annotations

from typing import Any

import typer

from . import options
from .output import DIFFERS, OK, out, print_json, progress, table

DEFAULT_PROMPTS = 4


def command(
    *,
    asked: options.Asked,
    models: options.Models,
    ranks: options.Ranks,
    max_new_tokens: options.MaxNewTokens = 64,
    graph_config: options.GraphOption = None,
    backend: options.Backend = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Compare transformers' own greedy generate with graph speculation, prompt by prompt.

    Equality of the tokens, the first divergence with the target's logit gap there (judged by the dtype's rounding),
    speed and peak memory, of this package without drafts as well. Exit code 0: equal, or different only where
    rounding decides; 3: different beyond that.
    Without prompts, a few excerpts of Python source are continued; without MODEL, by the embedded pair.
    """
    model, texts = asked.read(models, ranks, stdin=False)
    config = options.read_graph_config(graph_config)
    with progress("loading the models"):
        import torch

        from . import comparison, demo
        from .versions import versions

        pair = models.load(model, tp_timeout=ranks.timeout)
    texts = texts or [prompt["text"] for prompt in demo.prompts()[:DEFAULT_PROMPTS]]
    inputs = [pair.encode([text], asked.chat) for text in texts]
    decoding = {"graph_config": pair.shape(config), "backend": backend, **pair.speculation, **pair.padding}
    ways = {
        "plain": comparison.plain(pair.target, **pair.padding),
        comparison.UNDRAFTED: comparison.undrafted(pair.target, backend=backend, **pair.padding),
        "graph": comparison.graph(pair.target, **decoding),
    }
    race = comparison.race(pair.target, ways, inputs, max_new_tokens)
    rows = [
        {
            "prompt": text,
            "prompt_tokens": encoded["input_ids"].shape[1],
            "new_tokens": len(runs["plain"].tokens),
            "equal": parted is None,
            "divergence": None if parted is None else parted.as_dict(),
            **{way: run.as_dict() for way, run in runs.items()},
        }
        for text, encoded, runs, parted in zip(texts, inputs, race.rounds, race.divergences, strict=True)
    ]
    summary = race.as_dict()
    report = {
        "versions": versions(),
        "device": str(pair.device),
        "dtype": pair.dtype,
        "threads": torch.get_num_threads(),
        "backend": backend,
        "graph_config": graph_config or "auto",
    }
    if as_json:
        print_json({**report, "prompts": rows, "summary": summary})
    else:
        shown = []
        for row in rows:
            rates = [f"{row[way]['tokens_per_second']:.1f}" for way in ("plain", "graph")]
            per_step = f"{row['graph']['tokens_per_forward']:.2f}"
            verdict = _verdict(row["divergence"])
            shown.append([_short(row["prompt"]), str(row["new_tokens"]), *rates, per_step, verdict])
        out.print(table(["prompt", "tokens", "plain tok/s", "graph tok/s", "tok/step", "<output"], shown))
        out.print(f"\n{report['dtype']} on {report['device']}:")
        race.show()
        if summary["equal"] < summary["prompts"]:
            out.print(GAP, style="dim")
    raise typer.Exit(DIFFERS if summary["beyond_rounding"] else OK)


GAP = (
    "(gap: how far apart the target's logits of the two tokens are; bound: how far rounding in this dtype moves them. "
    "Within the bound either token is a right answer, and transformers may give either.)"
)


def _verdict(divergence: dict[str, Any] | None) -> str:
    if divergence is None:
        return "same"
    kind = "rounding" if divergence["within_rounding"] else "DIFFERS"
    return f"{kind} at {divergence['index']}: gap {divergence['gap']:.2g}, bound {divergence['bound']:.2g}"


def _short(text: str, width: int = 18) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
