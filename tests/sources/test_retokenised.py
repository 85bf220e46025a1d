"""Drafts whose tokenizer shares few tokens with the target's: the text is the target's own, their text is accepted."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import models
import pytest
import torch
import two_tokenizers as two
from hypothesis import given, settings
from hypothesis import strategies as st

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf.engine.capture import can_capture
from gsd_kernels_hf.engine.options import Options
from gsd_kernels_hf.engine.resolved import Sources
from gsd_kernels_hf.model import replay
from gsd_kernels_hf.model.vocabulary import Translation, Vocabulary
from gsd_kernels_hf.sources.own_text import OwnText
from gsd_kernels_hf.sources.retokenised import Retokenised

SHAPES = two.shapes(4)
TEXT = {"max_new_tokens": 28, "pad_token_id": 0}
PROMPTS = (two.TEXT[:60], two.TEXT[29:56], two.TEXT[100:152])

# Target and draft: words of several tokens on either side, ▁ for a space, bytes of a character apart.
PAIRS = {
    "byte-level to sentencepiece": (two.byte_level, two.sentencepiece),
    "sentencepiece to byte-level": (two.sentencepiece, two.byte_level),
    "of another text": (two.byte_level, lambda: two.byte_level(300, two.OTHER)),
}


@functools.cache
def models_of(pair: str, noise: float = 0.0):
    ours, theirs = (make() for make in PAIRS[pair])
    draft = models.noised(two.learned(theirs), noise)
    return two.learned(ours), draft, {"tokenizer": ours, "assistant_tokenizer": theirs}


def encoded(tokenizer, texts=PROMPTS):
    found = tokenizer(list(texts), return_tensors="pt", padding=True)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def test_these_pairs_are_read_as_text():
    for pair in PAIRS:
        target, draft, both = models_of(pair)
        (source,) = Sources.of(Options(draft, **both, draft_sources=("model",)), target).every
        assert isinstance(source, Retokenised), pair


def test_most_of_a_draft_that_knows_the_text_is_accepted():
    """Both know the text by heart; in other tokens, of which mapping ids leaves little."""
    target, draft, both = models_of("byte-level to sentencepiece")
    options = {**encoded(both["tokenizer"], PROMPTS[:1]), **both, **TEXT, "do_sample": False, "graph_config": "chain"}
    out = gsd.generate(target, **options, assistant_model=draft, draft_sources=("model",), return_dict_in_generate=True)
    assert 28 / out.stats.steps > 2.5 and out.stats.lossless


class Watched(Retokenised):
    """Compares what the draft's cache gives with a forward of its whole text, and claims with the draft's rows."""

    compared = claims = begun = 0

    def paths(self, rows):
        self.rows = rows
        return super().paths(rows)

    def text_of(self, sequence, row):
        """What the draft's tokens up to a row spell; a token that ends a text is no text."""
        text = b""
        while row > 0:
            text = self.translation.draft.spelled.get(int(self.rows.token_ids[sequence, row]), b"") + text
            row = int(self.rows.parent_rows[sequence, row])
        return text

    def check_claims(self, sequence, trie, text):
        """Every token is claimed by the first row of a path whose text has all of it."""
        for token, after in trie.after.items():
            whole = text + self.translation.target.spelled.get(token, b"")
            assert after.rows
            for row, prob in after.rows.items():
                parent = int(self.rows.parent_rows[sequence, row])
                assert self.text_of(sequence, row).startswith(whole)
                assert token not in self.translation.target.spelled or len(self.text_of(sequence, parent)) < len(whole)
                assert prob == pytest.approx(float(self.rows.scores[sequence, row].exp()))
                Watched.claims += 1
            self.check_claims(sequence, after, whole)

    def check_edges(self, sequence, node, logits):
        """What the draft's graph has behind a node is what ``logits`` [V] say; the children."""
        graph = self.drafts.current.graph
        edges = graph.edge_targets[sequence, node]
        there = (edges >= 0) & (graph.edge_log_probs[sequence, node] > -torch.inf)
        drafted = graph.token_ids[sequence][edges[there].long()].long()
        found, expected = graph.edge_log_probs[sequence, node][there], logits.log_softmax(-1)[drafted]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        return edges[there].tolist()

    def look_ahead(self, config):
        found = super().look_ahead(config)
        graph, draft = self.drafts.current.graph, self.translation.draft
        assert torch.equal(self.draft.cached, self.own.state.out_len), "behind it drafts were written"
        for sequence, (trie, ids) in enumerate(zip(found, self.own.ids, strict=True)):
            if bool(self.state.done[sequence]):
                continue
            begun, half = self.own.begun[sequence], bool(self.own.open[sequence])
            self.check_claims(sequence, trie, begun)
            Watched.begun += half and bool(trie.after)
            text = ids[: int(self.own.state.out_len[sequence] - self.own.state.kv_start[sequence])]
            assert b"".join(map(draft.spelled.get, ids[len(text) :])) + self.own.open[sequence] == begun
            logits = self.model(torch.tensor([text])).logits[0, -1]
            if begun and len(draft.beginning(begun, longer=not half)):
                only = torch.full_like(logits, -torch.inf)
                only[draft.beginning(begun, longer=not half)] = logits[draft.beginning(begun, longer=not half)]
                logits = only
            for child in self.check_edges(sequence, 0, logits):
                if graph.expanded[sequence, child]:
                    path = [*text, int(graph.token_ids[sequence, child])]
                    self.check_edges(sequence, child, self.model(torch.tensor([path])).logits[0, -1])
                    Watched.compared += 1
        return found


@pytest.mark.parametrize("pair", PAIRS)
def test_the_drafts_text_and_cache_are_those_of_the_targets_text(pair, monkeypatch):
    """However it was cut while it grew; and what is cut spells what the target said."""
    monkeypatch.setattr("gsd_kernels_hf.sources.drafts.Retokenised", Watched)
    target, draft, both = models_of(pair)
    options = {**TEXT, **both, "do_sample": False, "assistant_model": draft, "draft_sources": ("model",)}
    Watched.compared = Watched.claims = 0
    with gsd.patch(target, graph_config=SHAPES["tree"]) as handle:
        for texts in (PROMPTS, PROMPTS[::-1], PROMPTS):
            target.generate(**encoded(both["tokenizer"], texts), **options)
        (session,) = handle.engines.idle.sessions
        own = session.mixer.every[0].own
        for sequence, ids in enumerate(own.ids):
            spelled = b"".join(own.translation.draft.spelled.get(token, b"") for token in ids) + own.open[sequence]
            tokens = session.state.tokens[sequence, session.state.kv_start[sequence] : own.taken[sequence]].tolist()
            said = b"".join(own.translation.target.spelled.get(token, b"") for token in tokens)
            assert spelled.strip() == said.strip() and len(spelled) - len(said) in (0, 1, -1)
    assert Watched.compared > 20 and Watched.claims > 200


def test_the_next_text_reads_on_behind_what_the_cache_holds(monkeypatch):
    """The cache keeps what both texts begin with, and no more."""
    monkeypatch.setattr("gsd_kernels_hf.sources.drafts.Retokenised", Watched)
    target, draft, both = models_of("byte-level to sentencepiece")
    options = {"pad_token_id": 0, "do_sample": False, "attention_mask": None}
    patched = {**both, "assistant_model": draft, "draft_sources": ("model",), "graph_config": SHAPES["tree"]}
    Watched.compared = reused = 0
    ids = encoded(both["tokenizer"], [two.TEXT])["input_ids"]
    with gsd.patch(target, **patched) as handle:
        for length in range(20, 60, 8):
            target.generate(ids[:, :length], max_new_tokens=2, **options)
            (session,) = handle.engines.idle.sessions
            target.generate(ids[:, : length + 12], max_new_tokens=2, **options)
            reused += session.mixer.every[0].own.target.reused
    assert reused > 50 and Watched.compared > 10


def test_a_character_that_is_not_whole_is_gone_on_from(monkeypatch):
    """The target's text ends within one: the draft's ends before it; what begins with its bytes is proposed."""
    monkeypatch.setattr("gsd_kernels_hf.sources.drafts.Retokenised", Watched)
    target, draft, both = models_of("of another text")
    prompts = [two.TEXT[: two.TEXT.index(char)].encode() + char.encode()[:1] for char in "é你🦊"]
    vocabulary = Vocabulary.of(both["tokenizer"], "tokenizer")
    Watched.begun = 0
    for prompt in prompts:
        ids = torch.tensor([both["tokenizer"](prompt[:-1].decode())["input_ids"] + [vocabulary.ids[prompt[-1:]]]])
        options = {**TEXT, "do_sample": False}
        out = gsd.generate(target, ids, **options, **both, assistant_model=draft, graph_config=SHAPES["tree"])
        assert torch.equal(out, target.generate(ids, **options))
    assert Watched.begun >= 3


def test_a_text_that_ends_in_the_middle_of_the_drafts_token_is_gone_on_from_before_it(monkeypatch):
    """The draft knows " evening" as one token, and nothing behind " eve": it goes on from " the"."""
    monkeypatch.setattr("gsd_kernels_hf.sources.drafts.Retokenised", Watched)
    target, draft, both = models_of("byte-level to sentencepiece")
    seen = []
    look_ahead = Watched.look_ahead

    def watched(self, config):
        found = look_ahead(self, config)
        path, trie = [], found[0]
        while trie.after:
            path.append(trie.best()[0][1])
            trie = trie.after[path[-1]]
        seen.append((self.own.begun[0], both["tokenizer"].decode(path)))
        return found

    monkeypatch.setattr(Watched, "look_ahead", watched)
    whole = two.TEXT[: two.TEXT.index(" closes")]
    for text, begun, after in ((whole[: whole.index("ening")], b" ev", "ening the"), (whole, b"", " closes; a")):
        options = {**encoded(both["tokenizer"], [text]), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        out = gsd.generate(target, **options, **both, assistant_model=draft, graph_config=SHAPES["chain"])
        assert torch.equal(out, target.generate(**options))
        assert seen[0][0] == begun and seen[0][1].startswith(after), seen
        seen.clear()


@pytest.mark.parametrize("shape", ["chain", "graph"])
def test_any_bytes_at_all(shape):
    """Random tokens: text that is not UTF-8, ids that are no tokens, ends of text in the middle."""
    ours, theirs = two.byte_level(), two.sentencepiece()
    target, draft = two.target_of(ours), two.learned(theirs).float()
    for seed in range(3):
        prompt = models.prompts(3, 11, seed=seed, vocab=len(ours) + 3)
        prompt["input_ids"][:, 5] = ours.eos_token_id
        options = {**prompt, **TEXT, "eos_token_id": [40, 41], "do_sample": False}
        out = gsd.generate(
            target,
            **options,
            assistant_model=draft,
            tokenizer=ours,
            assistant_tokenizer=theirs,
            graph_config=SHAPES[shape],
        )
        assert torch.equal(out, target.generate(**options))


def test_the_end_of_a_text_is_drafted():
    """The draft's token that ends a text is proposed as the target's."""
    ours, theirs = two.byte_level(), two.sentencepiece()
    text = "the quick fox"
    target, draft = (two.learned(one, text=text + "</s>", steps=60) for one in (ours, theirs))
    out = gsd.generate(
        target,
        **encoded(ours, ["the quick"]),
        **TEXT,
        tokenizer=ours,
        assistant_tokenizer=theirs,
        assistant_model=draft.float(),
        draft_sources=("model",),
        graph_config=GraphConfig.preset("chain", depth=8),
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert ours.decode(out.sequences[0]) == text + "</s>" and out.stats.steps == 1


def test_neither_model_is_changed():
    target, draft, both = models_of("of another text")
    draft = copy.deepcopy(draft)
    before, config = copy.deepcopy(draft.state_dict()), draft.config.to_dict()
    gsd.generate(target, **encoded(both["tokenizer"]), **TEXT, **both, assistant_model=draft, graph_config="tree")
    assert draft.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())


def test_steps_of_a_source_on_the_host_are_not_captured(monkeypatch):
    monkeypatch.setattr(replay, "is_gpu", lambda device: True)
    target, draft, both = models_of("of another text")
    (host,) = Sources.of(Options(draft, **both, draft_sources=("model",)), target).every
    (other,) = Sources.of(Options(models.noised(target), draft_sources=("model",)), target).every
    for source, captures in ((host, False), (other, True)):
        target = SimpleNamespace(recurrent=False)
        session = SimpleNamespace(
            kv_len=torch.zeros(1), target=target, row_models=[], mixer=SimpleNamespace(sources=[source])
        )
        assert can_capture(session) is captures


def test_speculative_sampling_is_refused():
    target, draft, both = models_of("of another text")
    with pytest.raises(ValueError, match='criterion: "speculative" needs the draft\'s probability of every token'):
        gsd.generate(
            target,
            **encoded(both["tokenizer"]),
            **TEXT,
            **both,
            assistant_model=draft,
            criterion="speculative",
            graph_config="chain",
            do_sample=True,
        )


class Growing:
    """A session whose texts grow."""

    def __init__(self, batch: int, length: int):
        from gsd_kernels_hf.records import DecodeState, Sampler

        self.state = DecodeState.empty(batch, length, 1, torch.device("cpu"))
        self.sampler = Sampler(
            torch.zeros((), dtype=torch.int64), torch.arange(batch, dtype=torch.int32), {"temperature": 0.0}
        )
        self.branch = 3


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(4, 319), min_size=1, max_size=5), min_size=1, max_size=6), st.booleans())
def test_text_that_grows_is_cut_as_text_that_is_there(pieces, sentencepiece):
    """Bytes are kept, whatever comes when; what was cut earlier changes near the end only."""
    ours, theirs = two.byte_level(), two.sentencepiece() if sentencepiece else two.byte_level(300, two.OTHER)
    between = Translation.between(ours, theirs)
    text = Growing(1, 64)
    first, *rest = pieces
    text.state.restart(torch.tensor([first]), torch.zeros(1, dtype=torch.int32), 64, 0)
    own, cached = OwnText(text, between), torch.zeros(1, dtype=torch.int32)
    own.restart()
    said = Vocabulary.of(ours, "tokenizer")
    tokens = list(first)
    for piece in rest:
        before = list(own.ids[0])
        text.state.tokens[0, len(tokens) : len(tokens) + len(piece)] = torch.tensor(piece)
        text.state.out_len += len(piece)
        tokens += piece
        cached.fill_(10_000)
        own.catch_up(cached)
        same = next((i for i, (a, b) in enumerate(zip(before, own.ids[0], strict=False)) if a != b), len(before))
        start = int(own.state.kv_start)
        assert int(cached) - start <= max(0, min(same, len(own.ids[0]) - 1)), "what changed is read anew"
        assert same >= len(before) - 4, "and no more than that"
        assert own.state.tokens[0, start : int(own.state.out_len)].tolist() == own.ids[0]
    spelled = b"".join(between.draft.spelled.get(token, b"") for token in own.ids[0]) + own.open[0]
    expected = b"".join(said.spelled.get(token, b"") for token in tokens)
    assert spelled.replace(b" ", b"") == expected.replace(b" ", b"")
