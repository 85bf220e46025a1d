"""Tokens a forward of a trained hybrid target, by what drafts: counts, which no load of the machine changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import gsd_kernels as gsd
from gsd_kernels_cli import demo
from gsd_kernels_hf import DraftHeads

from ..lib.environment import environment
from ..lib.intervals import paired_ratio
from ..lib.report import markdown
from .competitors import fixed_configs

NAME = "hybrid-trained"
TEXTS = ("code", "copy")
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "history": ("history",),
    "heads": ("heads",),
    "heads and history": ("heads", "history"),
    "draft model": ("model",),
    "draft model and history": ("model", "history"),
    "all of them": ("model", "heads", "history"),
}


@torch.no_grad()
def count(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    heads: DraftHeads,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: int,
    new_tokens: int,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Greedy texts of the first prompts of every kind, by every way.

    Args:
        target, draft, heads: of one tokenizer, in one dtype.
        prompts: of each of :data:`TEXTS`.
        new_tokens: of each.
        about: what the report says of the target.
    """
    shapes = fixed_configs(target.device)
    runs: list[dict[str, Any]] = []
    for text in TEXTS:
        for prompt in demo.prompts(text)[:prompts]:
            ids = tokenizer(prompt["text"], return_tensors="pt")["input_ids"]
            options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
            own = target.generate(ids, **options)
            for way, sources in WAYS.items():
                given: dict[str, Any] = {"graph_config": shapes["graph"] if sources else "plain"}
                given |= {"draft_sources": sources} if sources else {}
                given |= {"assistant_model": draft} if "model" in sources else {}
                given |= {"draft_heads": heads} if "heads" in sources else {}
                out = gsd.generate(target, ids, **options, **given, return_dict_in_generate=True)
                runs.append(
                    {
                        "text": text,
                        "prompt": prompt["name"],
                        "way": way,
                        "tokens": new_tokens,
                        "steps": out.stats.steps,
                        "own_text": bool(torch.equal(out.sequences, own)),
                        "distinct_tokens": int(own[0, ids.shape[1] :].unique().numel()),
                    }
                )
    return {
        "schema": 1,
        "case": NAME,
        "environment": environment(torch.device("cpu")),
        "dtype": str(target.dtype).removeprefix("torch."),
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "target": about,
        "prompts": prompts,
        "new_tokens": new_tokens,
        "rows": shapes["graph"].max_rows,
        "date": time.strftime("%Y-%m-%d"),
        "runs": runs,
    }


def table(report: dict[str, Any]) -> str:
    """The report in Markdown: tokens a forward with their intervals, and how many texts are transformers' own."""

    def of(way: str, text: str) -> list[tuple[float, float]]:
        return [(run["tokens"], run["steps"]) for run in report["runs"] if (run["way"], run["text"]) == (way, text)]

    lines: list[Sequence[str]] = []
    for way in WAYS:
        same = [run["own_text"] for run in report["runs"] if run["way"] == way]
        rates = (str(paired_ratio(of(way, text), [(1, 1)] * len(of(way, text)))) for text in TEXTS)
        lines.append([way, *rates, f"{sum(same)} of {len(same)}"])
    what, size = report["target"], report["parameters"]["target"] / 1e6
    head = (
        f"A hybrid of Qwen3.5's layers, {size:.1f}M parameters ({what['layers']} layers, "
        f"{what['loss']:.2f} nats a token in training, {what['tokens'] / 1e6:.1f}M tokens), {report['dtype']}, greedy, "
        f"{report['new_tokens']} new tokens, {report['prompts']} held-out prompts of each text, "
        f"at most {report['rows']} rows. Tokens a forward, with bootstrap 95% intervals:"
    )
    return head + "\n\n" + markdown(["", *TEXTS, "transformers' text"], lines)
