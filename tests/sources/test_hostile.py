"""Whatever a source proposes: the target's own text or an error that names the source; the next call is exact."""

from __future__ import annotations

import contextlib
import re
from contextlib import nullcontext

import fake_cuda
import pytest
import torch
from models import VOCAB, prompts, tiny
from sources.hostile import ABOVE, EXACT, IDS, KINDS, SHAPES, Oracle

import gsd_kernels as gsd
from gsd_kernels import DraftSource, GraphConfig

TEXT = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 3}
HELD = ("graph", "lattice", "wide")  # in whose calls there is a history, too


@pytest.fixture(scope="module")
def target():
    """Patched, so that what a call leaves behind is there for the next one."""
    model = tiny()
    gsd.patch(model)
    yield model
    gsd.unpatch(model)


@pytest.fixture(scope="module")
def texts(target):
    """Greedy and sampled, by whether they are."""
    return {
        sampled: gsd.generate(target, **prompts(2, 9), **TEXT, **(SAMPLED if sampled else {"do_sample": False}))
        for sampled in (False, True)
    }


def swept(shape: str, target, texts):
    """Every other kind in turn with one shape, by one source; what was neither exact nor the error that belongs to it.

    Behind every error, and now and then behind another text, the same source proposes what is right.
    """
    wrong = {}
    last = ("history",) if shape in HELD else ()
    options = {**prompts(2, 9), **TEXT, "graph_config": SHAPES[shape], "return_dict_in_generate": True}
    accepted = 0
    for number, (kind, (change, error)) in enumerate(KINDS.items()):
        if (number + list(SHAPES).index(shape)) % 2:  # a kind with half of the shapes
            continue
        sampled = number % 4 == 3
        options |= SAMPLED if sampled else {"do_sample": False}
        source = Oracle(texts[sampled], VOCAB, change)  # of a session of its own, whose first proposal is checked
        options["draft_sources"] = source, *last
        try:
            got = gsd.generate(target, **options).sequences
        except Exception as found:
            if error == EXACT or not re.search(error, str(found)):
                wrong[kind] = repr(found)
        else:
            if not torch.equal(got, texts[sampled]):
                wrong[kind] = "another text"
            elif error != EXACT:
                wrong[kind] = "taken"
        if error == EXACT and number % 4 != 0 and kind not in wrong:
            continue
        source.tell(texts[sampled], None)
        out = gsd.generate(target, **options)
        accepted += sum(out.stats.accepted[2:])
        if not torch.equal(out.sequences, texts[sampled]):
            wrong[f"the call after {kind}"] = "another text"
    assert accepted > len(KINDS) / 8, "nothing was accepted, so nothing was tested"
    return wrong


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_or_a_named_error(shape, target, texts):
    assert swept(shape, target, texts) == {}


class Trusted(Oracle):
    """Passes for a class of the package, whose proposals nobody checks."""

    __module__ = DraftSource.__module__


@pytest.mark.parametrize("shape", ["lattice", "wide", "chain", "tree"])
def test_no_op_relies_on_the_check(shape, target, texts):
    """Values that the border refuses, behind it: less is accepted, and the text is the target's own."""
    source = Trusted(texts[False], VOCAB)
    options = {**prompts(2, 9), **TEXT, "do_sample": False, "graph_config": SHAPES[shape]}
    tried = 0
    for kind, (change, error) in KINDS.items():
        if not error.startswith((ABOVE, IDS)):
            continue
        tried += 1
        source.tell(texts[False], change)
        assert torch.equal(gsd.generate(target, **options, draft_sources=(source, "history")), texts[False]), kind
    assert tried > 6


class Ending(DraftSource):
    """Counts its ends in a list that all copies have; fails at an event, by which error the test says."""

    name = "ending"

    def __init__(self, event: str) -> None:
        self.event, self.levels = event, []

    def happens(self, event):
        if event == self.event:
            raise KeyboardInterrupt if event == "observe" else ValueError(event)

    attach = lambda self, text: self.happens("attach")  # noqa: E731
    observe = lambda self, seen: self.happens("observe")  # noqa: E731
    end = lambda self: self.levels.append("end")  # noqa: E731

    def propose(self, level):
        self.happens("propose")


@pytest.mark.parametrize(("event", "ends"), {"propose": 1, "observe": 1, "streamer": 1, "attach": 0, "none": 1}.items())
def test_a_source_is_told_the_end_of_a_call_that_fails(event, ends, target):
    source = Ending(event)
    heard = type("Heard", (), {"put": lambda _, value: None, "end": lambda _: source.happens("streamer")})
    with nullcontext() if event == "none" else pytest.raises((KeyboardInterrupt, ValueError)):
        streamed = {"streamer": heard(), "graph_config": SHAPES["chain"]}
        gsd.generate(target, **prompts(1, 9), **TEXT, draft_sources=(source,), do_sample=False, **streamed)
    assert source.levels == ["end"] * ends


class Declares(Oracle):
    def __init__(self, **attributes) -> None:
        super().__init__(torch.zeros(2, 1, dtype=torch.int64), VOCAB)
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"forwards": (None,)}, r"hostile: forwards: expected a tuple of torch modules, got \(None,\)"),
        ({"shares": ()}, r"hostile: shares: expected a tuple of weights from 0 to 1, at least one, got \(\)"),
        ({"shares": (0.5, 2.0)}, "hostile: shares: expected"),
        ({"shares": (float("nan"),)}, "hostile: shares: expected"),
        ({"reliability": (-1.0,)}, "hostile: reliability: expected"),
        ({"reliability": (0.5, 0.7)}, "hostile: reliability: expected a ratio for each share"),
        ({"hidden_layers": (99,)}, r"hostile: hidden_layers: expected a tuple of numbers from −1 to 2, .* got \(99,\)"),
        ({"hidden_layers": 1}, "hostile: hidden_layers: expected"),
        ({"name": 5}, "Declares.name: expected a name, got 5"),
        ({"name": "history"}, "history: the name of a source of this package; give Declares a name of its own"),
    ],
    ids=lambda value: next(iter(value.items()))[0] if isinstance(value, dict) else "",
)
def test_what_a_source_declares_is_checked(attributes, match, target, texts):
    options = {**prompts(2, 9), **TEXT, "do_sample": False}
    with pytest.raises((TypeError, ValueError), match=match):
        gsd.generate(target, **options, draft_sources=(Declares(**attributes),), graph_config="graph")
    assert torch.equal(gsd.generate(target, **options, draft_sources=(Declares(),), graph_config="graph"), texts[False])


@pytest.mark.parametrize("kind", ["NaN", "token vocab", "late"])
def test_on_a_gpu_the_first_proposal_alone_is_waited_for(kind, texts, monkeypatch):
    """Later steps are captured, and what has no meaning in them is not drafted."""
    fake_cuda.install(monkeypatch)
    target, (change, error) = tiny(), KINDS[kind]
    options = {**prompts(2, 9), **TEXT, "do_sample": False}
    options["graph_config"] = GraphConfig(depth=3, width=2, branch=3, max_rows=8)
    source = Oracle(texts[False], VOCAB, change)
    with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
        assert torch.equal(gsd.generate(target, **options, draft_sources=(source,)), texts[False])
    source.tell(texts[False], None)
    assert torch.equal(gsd.generate(target, **options, draft_sources=(source,)), texts[False])
