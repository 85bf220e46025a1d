"""Every causal language model that transformers has: served exactly, or refused by name; and the table that says so.

``python tests/model_sweep.py`` writes these classes of ``docs/model_classes.json`` anew.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import tiny_configs
import torch
import transformers
from transformers import PreTrainedModel

import gsd_kernels as gsd

TABLE = Path(__file__).parents[1] / "docs" / "model_classes.json"
NEW = 9  # tokens after prompts of 7, with windows of 5
NOISE = 0.02
LAYERS = (2, 4)  # some hybrids have no attention in their first two
SERVED, REFUSED, UNBUILDABLE = "served", "refused", "no tiny model"


@dataclass(frozen=True)
class Finding:
    """What the sweep says of one class."""

    verdict: str
    why: str = ""


def prompts() -> dict[str, torch.Tensor]:
    """Three prompts of 7, 3 and 5 tokens, left-padded; batch 1 is the first."""
    ids = torch.randint(3, tiny_configs.VOCAB - 4, (3, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :2] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """What must not change, but for weights: copies of parameters and buffers, configs and module variables."""
    return {
        "tensors": {name: value.clone() for name, value in model.state_dict().items()},
        "implementations": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        "config": model.config.to_dict(),
        "variables": [(type(m), sorted(vars(m)), len(m._forward_hooks), m.training) for m in model.modules()],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two :func:`state_of` are bit for bit the same."""
    tensors = (one["tensors"], other["tensors"])
    equal = tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(tensors[0][name].nan_to_num(7.0), tensors[1][name].nan_to_num(7.0)) for name in tensors[0]
    )
    return equal and all(str(one[key]) == str(other[key]) for key in one.keys() - {"tensors"})


def sweep(name: str) -> Finding:
    """What becomes of one class.

    Raises:
        AssertionError: a wrong token, an error that is no refusal, a refusal that does not name the model, or a model
            that is not as it was.
    """
    for layers in LAYERS:
        try:
            target = tiny_configs.build(name, layers)
            plain = PlainTexts(target)
            break
        except tiny_configs.Unbuildable as error:
            finding = Finding(UNBUILDABLE, str(error))
    else:
        return finding
    before = state_of(target)
    options = {"graph_config": "tree", "max_new_tokens": NEW, "assistant_model": models.noised(target, NOISE)}
    try:
        out = gsd.generate(target, **prompts(), **options, do_sample=False)
    except (ValueError, TypeError) as error:
        reason = str(error)
        assert same(before, state_of(target)), f"{name}: refused, and not as it was"
        assert re.search(rf"\b{name}\b|rope type|: not supported", reason), f"{name}: refused without a name: {reason}"
        return Finding(REFUSED, reason.removeprefix("model: ").removeprefix(name).strip())
    assert torch.equal(out, plain.batch), f"{name}: greedy, batch 3: {out.tolist()} != {plain.batch.tolist()}"
    one = {"input_ids": prompts()["input_ids"][:1]}
    alone = gsd.generate(target, **one, **options, do_sample=False)
    assert torch.equal(alone, plain.one), f"{name}: greedy, batch 1"
    sampled = {"do_sample": True, "top_k": 0, "seed": 3, "max_new_tokens": NEW - 3}
    drafted = gsd.generate(target, **prompts(), **{**options, **sampled})
    assert torch.equal(drafted, gsd.generate(target, **prompts(), **sampled)), f"{name}: sampled, batch 3"
    assert same(before, state_of(target)), f"{name}: served, and not as it was"
    return Finding(SERVED)


def broken_by_padding(model: PreTrainedModel) -> list[int]:
    """Sequences of which the model itself says NaN in a batch, as transformers' eager attention does in float64."""
    with torch.no_grad():
        logits = model(**prompts()).logits[:, -1]
    return logits.isnan().any(-1).nonzero().flatten().tolist()


class PlainTexts:
    """What transformers itself says; a class that it cannot decode is as good as not built."""

    def __init__(self, model: PreTrainedModel) -> None:
        try:
            self.one = model.generate(prompts()["input_ids"][:1], max_new_tokens=NEW, do_sample=False)
            self.batch = model.generate(**prompts(), max_new_tokens=NEW, do_sample=False)
            for row in broken_by_padding(model):
                real = prompts()["attention_mask"][row].bool()
                alone = model.generate(prompts()["input_ids"][row, real][None], max_new_tokens=NEW, do_sample=False)
                self.batch[row, -NEW:] = alone[0, -NEW:]
        except Exception as error:
            why = f"transformers does not decode it: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
            raise tiny_configs.Unbuildable(why) from error


def read_table(kind: str = "text") -> tuple[str, dict[str, str]]:
    """The transformers version of ``docs/model_classes.json``, and the classes of one kind with their cells."""
    found = json.loads(TABLE.read_text(encoding="utf-8"))
    return found["transformers"], found[kind]


def cell(finding: Finding) -> str:
    """One class's cell of the table."""
    if finding.verdict == SERVED:
        return SERVED
    return f"{finding.verdict}: {finding.why.removesuffix('; not supported')}".replace("|", "/")


def write_table(kind: str, cells: dict[str, str]) -> None:
    """Put the classes of one kind into ``docs/model_classes.json``; the other kind stays."""
    found = json.loads(TABLE.read_text(encoding="utf-8")) | {"transformers": transformers.__version__, kind: cells}
    TABLE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    write_table("text", {name: cell(sweep(name)) for name in tiny_configs.classes()})
