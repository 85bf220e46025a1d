"""Drafters behind long contexts: tokens a target forward of each source, alone and together, by context length.

The contexts are real text: the last tokens of one window a held-out file, so that every length ends at the same places.
The demo models were trained on texts of up to 1,024 tokens. Here their rotary settings, and those of their drafters,
are YaRN's (arXiv 2309.00071) for the longest context, at every length alike; the target's loss by position in the same
windows says how far that carries. Greedy, so that nothing depends on the clock.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from gsd_kernels_cli import demo
from gsd_kernels_hf.files import write_json

from ..lib.environment import environment
from ..lib.report import SCHEMA, markdown
from .competitors import competitors
from .corpus_tasks import demo_sources
from .drafters_table import TABLE
from .generate import Settings
from .pairs import Pair, Prompt, load_pair

NAME = "drafters-long"
TRAINED = 1024  # tokens of the longest texts that the demo models were trained on
NAMES = (
    "history",
    "merged",
    "graph",
    "heads",
    "eagle3",
    "eagle3-history",
    "dflash-chain",
    "dflash-lattice",
    "dflash-history",
    "every",
)


def windows(length: int, count: int, after: int) -> list[Prompt]:
    """The first ``length`` tokens of the longest held-out files, a window each, int64 [1, length].

    Args:
        after: tokens that a file must have behind its window.

    Raises:
        ValueError: fewer than ``count`` files are that long.
    """
    tokenizer = AutoTokenizer.from_pretrained(demo.path() / "target")
    found: list[Prompt] = []
    for source in sorted(demo_sources(), key=lambda source: (-len(source.text), source.name)):
        if len(found) == count:
            break
        ids = tokenizer(source.text, return_tensors="pt", verbose=False).input_ids
        if ids.shape[1] >= length + after:
            found.append(Prompt(source.name, "code", ids[:, :length]))
    if len(found) < count:
        raise ValueError(f"--prompts: only {len(found)} held-out files have {length + after} tokens, not {count}")
    return found


def stretched(pair: Pair, positions: int) -> Pair:
    """The pair and its drafters, in place, with YaRN's rotary settings for so many positions."""

    def stretch(config: PretrainedConfig) -> None:
        config.max_position_embeddings = positions
        if positions > TRAINED:
            yarn = {"rope_type": "yarn", "factor": positions / TRAINED, "original_max_position_embeddings": TRAINED}
            config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **yarn}

    for model in (pair.target, pair.draft):
        stretch(model.config)
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(model.config).to(rotary.inv_freq.device)
    for drafter in pair.drafters.values():
        stretch(drafter.config.layers)
        drafter.rotary.by_device.clear()
    return pair


@torch.no_grad()
def losses(target: PreTrainedModel, prompts: Sequence[Prompt], lengths: Sequence[int]) -> list[float]:
    """Nats a token of the texts, over the half before each length."""
    sums = torch.zeros(len(lengths))
    for prompt in prompts:
        hidden = target.model(prompt.input_ids).last_hidden_state[0]
        for i, length in enumerate(lengths):
            half = slice(length // 2 - 1, length - 1)
            following = prompt.input_ids[0, length // 2 : length]
            sums[i] += F.cross_entropy(target.lm_head(hidden[half]).float(), following)
    return (sums / len(prompts)).tolist()


def counted(pair: Pair, prompts: list[Prompt], names: Sequence[str], new_tokens: int) -> tuple[dict[str, Any], bool]:
    """Tokens and forwards of every competitor, and whether all texts are the same."""
    found: dict[str, Any] = {}
    texts: dict[str, Tensor] = {}
    same = True
    for competitor in competitors(replace(pair, prompts=prompts), names):
        if competitor.decode is None:
            continue
        tokens = forwards = 0
        for prompt in prompts:
            decoded = competitor.decode(prompt.input_ids, new_tokens, 0)
            same &= torch.equal(texts.setdefault(prompt.name, decoded.sequences), decoded.sequences)
            tokens += decoded.sequences.shape[1] - prompt.input_ids.shape[1]
            forwards += int(decoded.target_forwards or 0)
        found[competitor.name] = {"tokens": tokens, "forwards": forwards}
    return found, same


def run(settings: Settings, lengths: Sequence[int], *, folder: Path, name: str = NAME) -> str:
    """Decode behind every length, write ``name``.json and .md to ``folder``, and return the table.

    Raises:
        ValueError: the held-out files are too short.
    """
    longest = max(lengths)
    pair = load_pair(settings.pair, device=settings.device, dtype=settings.dtype, prompts=1)
    texts = windows(longest, settings.prompts, settings.new_tokens)
    stretched(pair, longest + settings.new_tokens)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "case": NAME,
        "settings": {
            "pair": settings.pair,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "new_tokens": settings.new_tokens,
            "files": [prompt.name for prompt in texts],
            "rope": pair.target.config.rope_parameters,
        },
        "losses": losses(pair.target, texts, lengths),
        "bins": [],
    }
    for length in lengths:
        print(f"{name}: context of {length}", file=sys.stderr, flush=True)
        prompts = [replace(prompt, input_ids=prompt.input_ids[:, -length:]) for prompt in texts]
        found, same = counted(pair, prompts, settings.competitors, settings.new_tokens)
        result["bins"].append({"length": length, "same": same, "found": found})
    result["environment"] = environment(settings.device)
    written = table(result)
    write_json(folder / f"{name}.json", result, indent=None)
    (folder / f"{name}.md").write_text(written + "\n", encoding="utf-8")
    return written


def table(result: dict[str, Any]) -> str:
    """Tokens a forward by length, and the target's loss, in Markdown."""
    settings, bins = result["settings"], result["bins"]
    labels = {"history": "history alone", **TABLE.labels}
    rows = []
    for name in bins[0]["found"]:
        counts = [b["found"][name] for b in bins]
        rows.append([labels.get(name, name), *(f"{c['tokens'] / max(1, c['forwards']):.2f}" for c in counts)])
    rows.append(
        [
            "the target's loss from half of that place to it, nats a token",
            *(f"{loss:.2f}" for loss in result["losses"]),
        ]
    )
    files, longest, same = len(settings["files"]), bins[-1]["length"], sum(b["same"] for b in bins)
    head = (
        f"Tokens a target forward, at place {longest:,} of {files} held-out files with so many tokens before it; demo "
        f"pair, {settings['dtype']}, greedy, {settings['new_tokens']} new tokens; rotary settings of all models: "
        f"{rope_said(settings['rope'])}. Texts of all ways equal: {same} of {len(bins)} lengths."
    )
    return "\n\n".join([head, markdown(["context", *(f"{b['length']:,}" for b in bins)], rows)])


def rope_said(rope: dict[str, Any]) -> str:
    """Rotary settings in words."""
    if rope["rope_type"] == "default":
        return "as trained"
    return f"YaRN, factor {rope['factor']:.2f} over {rope['original_max_position_embeddings']:,} positions"
