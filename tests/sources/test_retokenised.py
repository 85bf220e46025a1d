"""Drafts whose tokenizer shares few tokens with the target's: the text is the target's own, their text is accepted."""

from __future__ import annotations

import functools

import models
import pytest
import torch
import two_tokenizers as two

import gsd_kernels as gsd
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
