"""Every causal language model that transformers has: served exactly, or refused by name; and the table that says so.

``python tests/model_sweep.py`` writes the first table of ``docs/models.md`` anew.
"""

from __future__ import annotations

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

TABLE = Path(__file__).parents[1] / "docs" / "models.md"
NEW = 9  # tokens after prompts of 7, with windows of 5
NOISE = 0.02
LAYERS = (2, 4)  # some hybrids have no attention in their first two
HEADING = "## Image-text models"  # of the second table, which tests/image_sweep.py writes
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


def read_table() -> tuple[str, dict[str, str]]:
    """The transformers version of ``docs/models.md`` and its rows, class → cell."""
    text = TABLE.read_text().partition(HEADING)[0]
    version = re.search(r"transformers (\S+?)[,:.]?\s", text)
    assert version is not None
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", text, re.MULTILINE)
    return version[1].rstrip("."), dict(rows)


def cell(finding: Finding) -> str:
    """One class's cell of the table."""
    if finding.verdict == SERVED:
        return SERVED
    return f"{finding.verdict}: {finding.why.removesuffix('; not supported')}".replace("|", "/")


HEAD = """# Models

Every causal language model class of transformers {version}, with a tiny random model of it:

- **served** ({served}): greedy text in float64 is token for token transformers' own, beyond any sliding window, for one
  prompt and for three left-padded ones; sampled text is the same with a draft and without.
- **refused** ({refused}): a `ValueError` names the class and says why, before anything is changed.
- **no tiny model** ({unbuildable}): the sweep cannot make a small config of it, so nothing is known. Such a
  model is examined like any other when it is used.

No class is listed in the code. Before a model is used for the first time it forwards 2 × 5 tokens, in which its
attention is a stand-in: every layer must hand `graph=` to its attention function, mix tokens nowhere else, place
tokens by `position_ids`, and use the causal mask (with or without a sliding window or chunks) that transformers' mask
function made. Its own attention function must compute what graph rows get, sinks included. Queries that are scaled by
the cache's length (Llama 4) are looked at for several lengths. Linear layers whose output for a row depends on the
other rows, as with activations that are quantised over all rows of a forward, are found as well; so an unknown class
is judged by what it does. What one forward cannot show is a rule that begins to matter at a far position only.
Modules that keep a recurrent state in transformers' cache (linear attention, state spaces, short convolutions) are
served where rows of a tree come out as single tokens do, see [method.md](method.md#recurrent-layers).

Written by `python tests/model_sweep.py`; `tests/validate/test_model_sweep.py` checks it.

| class | |
|---|---|
"""


def write_table() -> None:
    """Sweep all classes and write the first table of ``docs/models.md``; what follows it stays."""
    found = {name: sweep(name) for name in tiny_configs.classes()}
    counts = {verdict: sum(f.verdict == verdict for f in found.values()) for verdict in (SERVED, REFUSED, UNBUILDABLE)}
    head = HEAD.format(
        version=transformers.__version__,
        served=counts[SERVED],
        refused=counts[REFUSED],
        unbuildable=counts[UNBUILDABLE],
    )
    rows = "".join(f"| `{name}` | {cell(finding)} |\n" for name, finding in found.items())
    _, heading, second = TABLE.read_text().partition(HEADING)
    TABLE.write_text(f"{head}{rows}\n{heading}{second}" if heading else head + rows)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    write_table()
