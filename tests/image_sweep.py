"""Model classes that read images or sounds: served exactly, or refused by name; and the table that says so.

``python tests/image_sweep.py`` writes these classes of ``docs/model_classes.json`` anew.
"""

from __future__ import annotations

import math
import re
import warnings

import tiny_vision
import torch
import transformers
from model_sweep import REFUSED, SERVED, Finding, cell, same, state_of, write_table
from tiny_vision import IMAGE, VOCAB, prompts
from transformers import PreTrainedModel

import gsd_kernels as gsd
from gsd_kernels import DraftSource, Level, Proposal
from gsd_kernels_hf.model.facts import Facts


class Reciting(DraftSource):
    """Proposes what ``text`` [B, L] has at a place, mostly second or third of three: siblings are accepted.

    Args:
        text: with prompt and padding, as ``generate`` returns it.
        vocab: of what is proposed beside it.
        wrong: share of places where the text's token is not among the proposals.
    """

    name = "reciting"

    def __init__(self, text: torch.Tensor, vocab: int, *, wrong: float = 0.25, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch, length = text.shape
        known = torch.cat([text, torch.zeros(batch, 80, dtype=text.dtype)], 1)
        beside = torch.randint(3, vocab, (batch, length + 80, 3), generator=generator)
        rank = torch.randint(0, 3, known.shape, generator=generator)
        said = torch.rand(known.shape, generator=generator) >= wrong
        at = torch.nn.functional.one_hot(rank, 3).bool() & said[..., None]
        self.tokens = torch.where(at, known[..., None], beside).to(torch.int32)  # [B, L, 3]

    def attach(self, text) -> None:
        self.state = text.state

    def propose(self, level: Level) -> Proposal:
        place = (self.state.out_len[:, None] + level.frontier.depths).long()  # [B, W]; of the token after each node
        place = place.clamp(max=self.tokens.shape[1] - 1)
        tokens = self.tokens.gather(1, place[..., None].expand(-1, -1, 3))
        used = (level.frontier.node_ids >= 0)[..., None]
        return Proposal(
            torch.where(used, tokens, -1), torch.where(used, math.log(0.3), -math.inf).expand(tokens.shape).contiguous()
        )


NEW = 16
SHORT = 6  # tokens
ENDINGS = ((0,), (0, 2))  # words behind the image, of the prompts of a call
IMAGES = ((1,), (2, 3))  # of a call with one prompt, and of one with two


def sweep(name: str) -> Finding:
    """What becomes of one class.

    Raises:
        AssertionError: a wrong token, an image that changes nothing, an error that is no refusal by name, or a model
            that is not as it was.
    """
    model = tiny_vision.build(name)
    calls = [prompts(name, *seeds) for seeds in IMAGES]
    texts = [type(model).generate(model, **call, max_new_tokens=NEW, do_sample=False) for call in calls]
    assert not torch.equal(texts[0][0, -NEW:], texts[1][0, -NEW:]), f"{name}: the image must matter"
    before = state_of(model)
    check_endings(name, model)
    findings = [behind(model, call, text) for call, text in zip(calls, texts, strict=True)]
    check_endings(name, model)
    apart = [way for way in map(str, Facts(model).proofs) if "no word" in way]
    assert all(f"{IMAGE}]" in way for way in apart), f"{name}: a word at the end is taken for none: {apart}"
    assert same(before, state_of(model)), f"{name}: not as it was"
    alone, batch = findings
    if alone.verdict == SERVED and batch.verdict == REFUSED:
        return Finding(SERVED, f"one prompt; several: {batch.why}")
    return alone


def check_endings(name: str, model: PreTrainedModel) -> None:
    """Prompts whose last token stands for the image, alone and beside one that ends in a word.

    Raises:
        AssertionError: a wrong token, or an error that is no refusal by name.
    """
    for ends in ENDINGS:
        call = tiny_vision.endings(name, *ends)
        text = type(model).generate(model, **call, max_new_tokens=SHORT, do_sample=False)
        source = Reciting(text, VOCAB)
        try:
            out = gsd.generate(
                model, **call, graph_config="tree", draft_sources=(source,), max_new_tokens=SHORT, do_sample=False
            )
        except (ValueError, TypeError) as error:
            assert re.search(rf"\b{name}\b", str(error)), f"{name}: refused without a name: {error}"
        else:
            assert torch.equal(out, text), f"{name}, {ends}: {out.tolist()} != {text.tolist()}"


def behind(model: PreTrainedModel, call: tiny_vision.Inputs, text: torch.Tensor) -> Finding:
    """What becomes of one call, whose text is to be ``text``."""
    name = type(model).__name__
    options = {"graph_config": "tree", "draft_sources": (Reciting(text, VOCAB),), "return_dict_in_generate": True}
    try:
        out = gsd.generate(model, **call, **options, max_new_tokens=NEW, do_sample=False)
    except (ValueError, TypeError) as error:
        assert re.search(rf"\b{name}\b", str(error)), f"{name}: refused without a name: {error}"
        why = re.sub(rf"^.*?\b{name}\b ", "", str(error)).partition("; not supported")[0]
        return Finding(REFUSED, why)
    assert torch.equal(out.sequences, text), f"{name}: {out.sequences.tolist()} != {text.tolist()}"
    assert sum(out.stats.accepted[:3]) and sum(out.stats.accepted[3:]), f"{name}: drafts are rejected, and accepted"
    return Finding(SERVED)


def row(finding: Finding) -> str:
    """One class's cell of the table."""
    return f"{SERVED}: {finding.why}" if finding.verdict == SERVED and finding.why else cell(finding)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    write_table("images", {name: row(sweep(name)) for name in sorted(tiny_vision.FAMILIES)})
