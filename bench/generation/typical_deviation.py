"""Deviation and gain of typical acceptance, beside the exact criterion and speculative sampling.

Every criterion decodes the same prompts with the same seed. Nothing here depends on the machine's speed.

The target's own pick at a position is the token that the exact criterion emits after the same prefix, with the noise
of that position. Its distribution is the target's, so the share of tokens that are another one bounds,
on average over the contexts, the total variation distance between the emitted token and the target's distribution.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import GraphConfig, Typical, generate, sample_rows
from gsd_kernels_hf import Verified
from gsd_kernels_hf.files import write_json

from ..lib.environment import environment
from ..lib.intervals import Ratio, paired_ratio
from ..lib.report import SCHEMA, markdown
from .pairs import Pair, left_padded, load_pair

NAME = "typical"
EXACT, SPECULATIVE = "exact", "speculative"
EPSILONS = (0.3, 0.09, 0.03, 0.01)
TEMPERATURES = (0.0, 0.7, 1.0)
SHAPES = {
    "chain": GraphConfig.preset("chain", depth=5),
    "graph": GraphConfig(depth=5, width=4, branch=4, max_rows=32, merge_context=2, history_depth=4),
}
SEED = 0


def ways(shape: str, temperature: float) -> dict[str, str | Typical]:
    """The criteria of a cell by their names in the table; speculative sampling takes a chain and a temperature."""
    found: dict[str, str | Typical] = {EXACT: EXACT}
    if shape == "chain" and temperature:
        found[SPECULATIVE] = SPECULATIVE
    epsilons = EPSILONS if temperature else EPSILONS[-1:]  # greedy: the smallest, which accepts most, shows that
    return found | {f"typical, ε = {epsilon}": Typical(epsilon) for epsilon in epsilons}


def decode(
    pair: Pair, shape: GraphConfig, criterion: str | Typical, temperature: float, samples: int, new_tokens: int
) -> tuple[Tensor, Tensor, list[int], bool]:
    """Sequences and mask int64 [B · samples, L], steps of each sequence, and whether the run calls itself lossless."""
    ids, mask = left_padded(pair.prompts)
    steps = torch.zeros(len(ids) * samples, dtype=torch.int64)

    def observe(record: Verified) -> None:
        steps.add_((record.accepted.num_accepted > 0).long())

    output = generate(
        pair.target,
        ids,
        attention_mask=mask,
        assistant_model=pair.draft,
        graph_config=shape,
        criterion=criterion,
        max_new_tokens=new_tokens,
        num_return_sequences=samples,
        seed=SEED,
        observer=observe,
        return_dict_in_generate=True,
        **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}),
    )
    whole = torch.cat([mask.repeat_interleave(samples, 0), torch.ones(len(steps), new_tokens, dtype=torch.int64)], 1)
    return output.sequences, whole, steps.tolist(), output.stats.lossless


@torch.no_grad()
def judged(
    pair: Pair, sequences: Tensor, mask: Tensor, temperature: float, new_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Judge every new token by one plain forward: whether it is the target's own pick, its log-likelihood
    under the distribution that is sampled from (greedy: at temperature 1), and that distribution's entropy.
    [B, new tokens] each.
    """
    place = (mask.cumsum(1) - 1).clamp(min=0)
    logits = pair.target(sequences, attention_mask=mask, position_ids=place).logits
    logits = logits[:, -new_tokens - 1 : -1].float()
    emitted = sequences[:, -new_tokens:]
    own = sample_rows(
        logits,
        place[:, -new_tokens:].to(torch.int32).contiguous(),
        seed=torch.tensor(SEED),
        sequence_ids=torch.arange(len(emitted), dtype=torch.int32),
        temperature=temperature,
    )
    log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    return own == emitted, log_probs.gather(-1, emitted[..., None]).squeeze(-1), entropy


def measure(pair: Pair, samples: int, new_tokens: int) -> list[dict[str, Any]]:
    """One record for every temperature, shape and criterion, with what each text shows."""
    found = []
    for temperature in TEMPERATURES:
        each = samples if temperature else 1
        for name, shape in SHAPES.items():
            exact: Tensor | None = None
            for way, criterion in ways(name, temperature).items():
                print(f"{NAME}: T = {temperature}, {name}, {way}", file=sys.stderr, flush=True)
                sequences, mask, steps, lossless = decode(pair, shape, criterion, temperature, each, new_tokens)
                is_own, log_probs, entropy = judged(pair, sequences, mask, temperature, new_tokens)
                emitted = sequences[:, -new_tokens:]
                exact = emitted if exact is None else exact
                texts = [
                    {
                        "tokens": new_tokens,
                        "steps": count,
                        "not_own": int((~own).sum()),
                        "differing": int(differs.sum()),
                        "first_difference": int(differs.long().argmax()) if differs.any() else None,
                        "log_likelihood": float(likelihood.double().mean()),
                        "entropy": float(uncertainty.double().mean()),
                    }
                    for count, own, differs, likelihood, uncertainty in zip(
                        steps, is_own, emitted != exact, log_probs, entropy, strict=True
                    )
                ]
                found.append(
                    {
                        "temperature": temperature,
                        "shape": name,
                        "criterion": way,
                        "options": asdict(criterion) if isinstance(criterion, Typical) else None,
                        "lossless": lossless,
                        "texts": texts,
                    }
                )
    return found


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Totals of every record, against those of the exact criterion in its cell."""
    rows = []
    for record in records:
        texts = record["texts"]
        cell = (record["temperature"], record["shape"])
        exact = next(r["texts"] for r in records if (r["temperature"], r["shape"], r["criterion"]) == (*cell, EXACT))
        totals, base = ([(t["tokens"], t["steps"]) for t in side] for side in (texts, exact))
        tokens = sum(t["tokens"] for t in texts)
        excess = [t["log_likelihood"] + t["entropy"] for t in texts]
        rows.append(
            {
                **{key: record[key] for key in ("temperature", "shape", "criterion", "lossless")},
                "tokens_per_step": tokens / sum(t["steps"] for t in texts),
                "gain": asdict(paired_ratio(totals, base)),
                "not_own_share": sum(t["not_own"] for t in texts) / tokens,
                "differing_share": sum(t["differing"] for t in texts) / tokens,
                "differing_texts": sum(t["differing"] > 0 for t in texts),
                "texts": len(texts),
                "log_likelihood": statistics.fmean(t["log_likelihood"] for t in texts),
                "excess": statistics.fmean(excess),
                "excess_error": statistics.stdev(excess) / math.sqrt(len(excess)) if len(excess) > 1 else None,
            }
        )
    return rows


def table(data: dict[str, Any]) -> str:
    """The summary in Markdown."""
    rows = []
    for row in data["summary"]:
        how = f"T = {row['temperature']}" if row["temperature"] else "greedy"
        error = "" if row["excess_error"] is None else f" ± {row['excess_error']:.3f}"
        other_sample = row["criterion"] == SPECULATIVE  # its own pick is not the noise's, though as good a sample
        rows.append(
            [
                f"{how}, {row['shape']}, {row['criterion']}",
                f"{row['tokens_per_step']:.2f}",
                str(Ratio(**row["gain"])),
                "–" if other_sample else f"{row['not_own_share']:.1%}",
                f"{row['differing_share']:.1%}",
                f"{row['differing_texts']}/{row['texts']}",
                f"{row['log_likelihood']:.3f}",
                f"{row['excess']:+.3f}{error}",
                "yes" if row["lossless"] else "no",
            ]
        )
    head = ["", "tokens/step", "against exact (95%)", "not the target's own pick", "other token than exact"]
    head += ["texts that differ", "log-likelihood/token", "its excess", "lossless"]
    made = data["settings"]
    about = (
        f"{made['pair']} pair, {len(made['prompts'])} prompts of code, {made['samples']} samples of each "
        f"(greedy: one), {made['new_tokens']} new tokens, δ = √ε:"
    )
    notes = (
        "*Not the target's own pick*: tokens that the exact criterion would not have emitted after the same prefix; it "
        "bounds the total variation distance from the target's distribution a token. *Other token than exact*: "
        "position by position, so all that follows a first difference counts; `speculative` shows what another exact "
        "sample of the same distribution looks like. *Log-likelihood*: natural, mean, under the distribution that is "
        "sampled from (greedy: at temperature 1). *Its excess* over the mean of that distribution after the same text, "
        "with the standard error over texts where there are several: 0 is expected of an exact sample, more of "
        "likelier tokens than that."
    )
    return "\n\n".join([about, markdown(head, rows), notes])


def run(*, pair: str, prompts: int, samples: int, new_tokens: int, folder: Path) -> str:
    """Measure, write ``typical.json`` and ``typical.md`` to ``folder``, and return the table."""
    device = torch.device("cpu")
    models = load_pair(pair, device=device, dtype=torch.float32, prompts=prompts)
    records = measure(models, samples, new_tokens)
    result = {
        "schema": SCHEMA,
        "case": NAME,
        "environment": environment(device),
        "settings": {
            "pair": pair,
            "prompts": [prompt.name for prompt in models.prompts],
            "samples": samples,
            "new_tokens": new_tokens,
            "seed": SEED,
            "shapes": {name: asdict(shape) for name, shape in SHAPES.items()},
        },
        "summary": summary(records),
        "records": records,
    }
    text = table(result)
    write_json(folder / f"{NAME}.json", result, indent=None)
    (folder / f"{NAME}.md").write_text(text + "\n", encoding="utf-8")
    return text
