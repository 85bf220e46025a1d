"""Whatever a source proposes: the target's own text or an error that names the source; the next call is exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import fake_cuda
import pytest
import torch
from models import VOCAB, prompts, tiny
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels import DraftSource, GraphConfig, Level, Proposal

K = 3
EXACT = ""  # no error: the target's own text


class Oracle(DraftSource):
    """Proposes the text that the target writes, and two other tokens.

    Args:
        text: int64 [B, S], prompt and all that follows.
        vocab: tokens.
        change: what is made of tokens and log-probabilities [B, W, K]; ``None``: nothing.
    """

    name = "hostile"

    def __init__(self, text: Tensor, vocab: int, change: Callable[..., Any] | None = None) -> None:
        self.vocab, self.asked = vocab, 0
        self.told: dict[str, Any] = {}  # one for all copies, so that a kept session hears of it
        self.tell(text, change)

    def tell(self, text: Tensor, change: Callable[..., Any] | None) -> None:
        """What to propose from here on."""
        self.told.update(text=text, change=change)

    def attach(self, text):
        self.state = text.state

    def propose(self, level: Level) -> Any:
        self.asked += 1
        text, change = self.told["text"], self.told["change"]
        at = (self.state.kv_start[:, None] + level.positions).long().clamp(max=text.shape[1] - 1)
        right = text.gather(1, at)  # [B, W]
        tokens = torch.stack([right, (right + 1) % self.vocab, (right + 2) % self.vocab], -1).int()
        log_probs = torch.tensor([0.6, 0.2, 0.1]).log().expand(tokens.shape).contiguous()
        return Proposal(tokens, log_probs) if change is None else change(self, level, tokens, log_probs)


def _made(tokens: Any = None, log_probs: Any = None, index: Any = None) -> Callable[..., Any]:
    """A proposal whose parts are changed, by functions of tokens, of log-probabilities, and of the nodes' ids."""

    def change(source, level, *parts):
        parts = (part if make is None else make(part) for make, part in zip((tokens, log_probs), parts, strict=True))
        return Proposal(*parts, index and index(level.frontier.node_ids))

    return change


def _returns(value: Callable[..., Any]) -> Callable[..., Any]:
    return lambda source, level, tokens, log_probs: value(tokens, log_probs)


def _first(value: float, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """The first candidate after every node made ``value``."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone().to(dtype or tensor.dtype)
        tensor[..., 0] = value
        return tensor

    return change


def _none(token: int, log_prob: float) -> Callable[..., Any]:
    """A second candidate that is none."""

    def change(source, level, tokens, log_probs):
        tokens, log_probs = tokens.long(), log_probs.clone()
        tokens[..., 1], log_probs[..., 1] = token, log_prob
        return Proposal(tokens, log_probs)

    return change


def _raises(source, level, tokens, log_probs):
    raise RuntimeError("boom")


def _reused(source, level, tokens, log_probs):
    """One buffer for all levels and steps, of the widest level."""
    if not hasattr(source, "buffer"):
        source.buffer = tokens.new_zeros(tokens.shape[0], 64, K), log_probs.new_zeros(tokens.shape[0], 64, K)
    mine, scores = (buffer[:, : tokens.shape[1]] for buffer in source.buffer)
    mine.copy_(tokens), scores.copy_(log_probs)
    return Proposal(mine, scores)


def _writes_frontier(source, level, tokens, log_probs):
    level.frontier.token_ids.add_(1), level.frontier.node_ids.fill_(7), level.frontier.depths.fill_(9)
    level.frontier.ancestor_mask.fill_(-1)
    return Proposal(tokens, log_probs)


def _in_inference_mode(source, level, tokens, log_probs):
    with torch.inference_mode():
        return Proposal(tokens + 0, log_probs + 0.0)


def _late(source, level, tokens, log_probs):
    return Proposal(tokens, log_probs + 5.0 if source.asked > 2 else log_probs)


def _random(source, level, tokens, log_probs):
    gen = torch.Generator().manual_seed(source.asked)
    tokens = torch.randint(0, source.vocab, tokens.shape, generator=gen)
    return Proposal(tokens, torch.randn(tokens.shape, generator=gen).log_softmax(-1))


ABOVE = "hostile: expected log-probabilities of at most 0, got"
IDS = "hostile: expected token ids from −1 to"
NOT_A_PROPOSAL = "hostile: expected propose to return a Proposal"

KINDS: dict[str, tuple[Callable[..., Any], str]] = {
    # What is returned.
    "a tuple": (_returns(lambda t, p: (t, p)), f"{NOT_A_PROPOSAL}.*got tuple"),
    "nothing": (_returns(lambda t, p: None), EXACT),
    "an error": (_raises, "boom"),
    "arrays": (_made(*2 * [lambda x: x.numpy()]), "hostile: tokens: expected a tensor, got ndarray"),
    # Dtypes.
    "float tokens": (
        _made(lambda t: t.float()),
        "hostile: tokens: expected int32 or int64, got float32; propose int32 tokens",
    ),
    "sparse scores": (_made(log_probs=lambda p: p.to_sparse()), "hostile: expected dense tensors"),
    "int64 tokens": (_made(lambda t: t.long()), EXACT),
    "float16 scores": (_made(log_probs=lambda p: p.half()), EXACT),
    # Devices.
    "tokens on meta": (_made(lambda t: t.to("meta")), "hostile: tokens: expected device cpu, got meta"),
    # Shapes.
    "a node too many": (
        _made(*2 * [lambda x: torch.cat([x, x[:, :1]], 1)]),
        "hostile: tokens: expected shape.*K of each after",
    ),
    "an index a sequence": (_made(index=lambda n: n[:, 0]), "hostile: index: expected shape"),
    "no candidates": (_made(*2 * [lambda x: x[..., :0]]), EXACT),
    "many candidates": (_made(*2 * [lambda x: x.repeat(1, 1, 40)]), EXACT),
    # Token ids.
    "token vocab": (_made(_first(97)), f"{IDS} 96, got 97"),
    "token 2³¹": (_made(_first(2**31, torch.int64)), f"{IDS} 96, got 2147483648"),
    "token −1 of +∞": (_none(-1, torch.inf), EXACT),
    "no token at all": (_made(lambda t: torch.full_like(t, -1)), EXACT),
    "random": (_random, EXACT),
    # Log-probabilities.
    "NaN": (_made(log_probs=_first(torch.nan)), f"{ABOVE} nan"),
    "+∞": (_made(log_probs=_first(torch.inf)), f"{ABOVE} inf"),
    "−∞ everywhere": (_made(log_probs=lambda p: -p.abs() * torch.inf), EXACT),
    "10⁻⁶": (_made(log_probs=_first(1e-6)), EXACT),
    "certain of all": (_made(log_probs=torch.zeros_like), EXACT),
    # Indices.
    "index 2⁶³ − 1": (_made(index=lambda n: torch.full_like(n.long(), 2**63 - 1)), EXACT),
    # Memory.
    "requires a gradient": (_made(log_probs=lambda p: p.clone().requires_grad_()), EXACT),
    "made in inference mode": (_in_inference_mode, EXACT),
    "a buffer used again": (_reused, EXACT),
    "the frontier written": (_writes_frontier, EXACT),
    # Changes from call to call.
    "late": (_late, EXACT),
}

SHAPES: dict[str, GraphConfig | str] = {
    "graph": "graph",
    "tree": "tree",
    "chain": "chain",
    "lattice": GraphConfig(
        depth=3, width=3, branch=3, max_rows=24, merge_context=0, history_depth=2, history_width=4, sibling_ratio=0.1
    ),
    "wide": GraphConfig(depth=2, width=12, branch=8, max_rows=64, merge_context=1, history_depth=1, history_width=12),
    "levels": GraphConfig(depth=0, branch=3, max_rows=16, history_depth=4, history_width=3),
}

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


class Trusted(Oracle):
    """Passes for a class of the package, whose proposals nobody checks."""

    __module__ = DraftSource.__module__


CASES = [
    (kind, shape, number % 4 == 3)
    for number, kind in enumerate(KINDS)
    for place, shape in enumerate(SHAPES)
    if (number + place) % 3 == 0
]


@pytest.mark.parametrize(("kind", "shape", "sampled"), CASES)
def test_exact_or_a_named_error(kind, shape, sampled, target, texts):
    """Behind either the same source proposes what is right; what the check refuses does no harm behind it."""
    change, error = KINDS[kind]
    call = {**prompts(2, 9), **TEXT, **(SAMPLED if sampled else {"do_sample": False}), "graph_config": SHAPES[shape]}
    last = ("history",) if shape in HELD else ()
    source = Oracle(texts[sampled], VOCAB, change)  # of a session of its own, whose first proposal is checked
    with pytest.raises(Exception, match=error) if error else nullcontext():
        assert torch.equal(gsd.generate(target, **call, draft_sources=(source, *last)), texts[sampled])
    source.tell(texts[sampled], None)
    out = gsd.generate(target, **call, draft_sources=(source, *last), return_dict_in_generate=True)
    assert torch.equal(out.sequences, texts[sampled]) and sum(out.stats.accepted[2:])
    if error.startswith((ABOVE, IDS)):
        trusted = Trusted(texts[sampled], VOCAB, change)
        assert torch.equal(gsd.generate(target, **call, draft_sources=(trusted, "history")), texts[sampled])


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
        ({"name": 3}, "Declares.name: expected a name, got 3"),
        ({"forwards": (None,)}, r"hostile: forwards: expected a tuple of torch modules, got \(None,\)"),
        ({"shares": (float("nan"),)}, "hostile: shares: expected a tuple of weights from 0 to 1, at least one, got"),
        ({"reliability": (0.5, 0.7)}, "hostile: reliability: expected a ratio for each share"),
        ({"hidden_layers": (99,)}, r"hostile: hidden_layers: expected a tuple of numbers from −1 to 2, .* got \(99,\)"),
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
