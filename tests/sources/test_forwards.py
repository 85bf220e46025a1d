"""Forwards of drafters: equal to transformers' own where it has them, and to what papers and makers write down."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import transformers
from models import prompts
from sources.drafters import dflash_config, generate, random_dflash, random_tensors, started
from sources.mtp_checkpoints import FAMILIES, Causal, saved, target_of
from sources.rows import GEMMA, P_EAGLE, VOCAB, assistant, dflash, fitted_p_eagle, gemma, llama, p_eagle
from torch.nn.functional import rms_norm, silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gsd_kernels import DFlash, Eagle3, GraphConfig, Mtp
from gsd_kernels_hf.sources.dflash import DFlashDrafts
from gsd_kernels_hf.sources.edges import DynamicConvolution, MarkovHead, RecurrentHead, Selector, along
from gsd_kernels_hf.sources.recursion import Parallel

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LENGTH = 5  # within every sliding window
ALONE = {"do_sample": False, "draft_sources": ("drafter",)}


# Heads of multi-token prediction.


def loaded(name, folder):
    """A target in float32, its head's tensors and module, tokens [1, LENGTH + 1] and its last states [1, LENGTH, D]."""
    target = copy.deepcopy(target_of(name)).float()
    head = {full: value.float() for full, value in saved(name, folder).items()}
    ids = prompts(1, LENGTH + 1, vocab=60)["input_ids"]
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states[-1][:, :LENGTH]
    return target, head, Mtp.from_pretrained(folder, target), ids, states


def mine(module, target, following, states):
    positions = torch.arange(states.shape[1])[None]
    return module(target.get_input_embeddings()(following), states, positions, Causal())


def wired(name, target, head, ids, states):
    """The head's output by its description, its decoder layer run as transformers runs one of the target's."""
    family, text = FAMILIES[name], target.config.get_text_config(decoder=True)
    projection, of_embedding, of_hidden, of_output = family.names

    def normed(x, weight):  # those of Qwen are 1 + w
        return rms_norm(x, x.shape[-1:], weight + name.startswith("qwen"), text.rms_norm_eps)

    both = [
        normed(target.get_input_embeddings()(ids[:, 1:]), head[f"{of_embedding}.weight"]),
        normed(states, head[f"{of_hidden}.weight"]),
    ]
    hidden = torch.cat(both[::-1] if family.hidden_first else both, -1) @ head[f"{projection}.weight"].T
    own = copy.deepcopy(text)
    own._attn_implementation = "eager"
    if name == "mellum":  # its head's window is its config's, not that of a full layer
        own.layer_types = ["sliding_attention"] * 2
    layer = type(target.model.layers[family.layer])(own, family.layer).eval()
    tensors = {full.removeprefix(family.block): value for full, value in head.items() if full.startswith(family.block)}
    for ours, theirs in family.renamed.items():
        tensors = {inner.replace(theirs, ours): value for inner, value in tensors.items()}
    layer.load_state_dict({inner: stacked(tensors, inner, like) for inner, like in layer.state_dict().items()})
    positions = torch.arange(LENGTH)[None]
    typed = (own.layer_types[family.layer],) if name in ("mellum", "mimo-v2") else ()
    turns = target.model.rotary_emb(hidden, positions, *typed)
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=turns)
    return normed(hidden, target.model.norm.weight if of_output is None else head[f"{of_output}.weight"])


def stacked(tensors, name, like):
    """A layer's tensor, of all experts where a checkpoint has one of each."""
    if name in tensors:
        return tensors[name]
    base, what = re.fullmatch(r"(.*experts)\.(gate_up_proj|down_proj)", name).groups()
    kinds = ["gate_proj", "up_proj"] if what == "gate_up_proj" else ["down_proj"]
    experts = range(like.shape[0])
    return torch.stack([torch.cat([tensors[f"{base}.{i}.{kind}.weight"] for kind in kinds]) for i in experts])


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_head_is_wired_as_its_family_says(name, tmp_path):
    target, head, module, ids, states = loaded(name, tmp_path)
    found = mine(module, target, ids[:, 1:], states)
    torch.testing.assert_close(found, wired(name, target, head, ids, states), **CLOSE)
    assert (found - mine(module, target, ids.flip(1)[:, 1:], states)).abs().max() > 0.1


@torch.no_grad()
def test_rows_of_a_cache_are_the_same_forward(tmp_path):
    """Entries made of a prompt in pieces, then a level: as the whole text at once, where a node reads its parent's."""
    target, _, module, ids, states = loaded("glm", tmp_path)
    source = started(module, target, ids)
    whole = mine(module, target, ids[:, 1:], states)
    for end in (2, 3, LENGTH):
        entry, _ = source.feed(torch.tensor([end], dtype=torch.int32), 2, keep=1)
        torch.testing.assert_close(entry[:, 0], whole[:, end - 1], **CLOSE)
    following, zeros = torch.tensor([[7]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    graph = zeros[..., None] + 1, zeros, zeros
    node, _ = source.forward(following, entry, source.cached, zeros, *graph, keep=1)
    longer = mine(module, target, torch.cat([ids[:, 1:], following], 1), torch.cat([states, entry], 1))
    torch.testing.assert_close(node[:, 0], longer[:, -1], **CLOSE)


# P-EAGLE, with one row EAGLE-3's first level.


def written_out(module: Eagle3, tokens: list[int], count: int) -> torch.Tensor:
    """Logits [count, V] of the ``count`` tokens after a text: every row, layer and head of the paper's forward."""
    config, weights, sizes = module.config, module.state_dict(), module.config.layers

    def normed(name, x):
        return rms_norm(x, x.shape[-1:], weights[name], sizes.rms_norm_eps)

    with torch.no_grad():
        hidden = llama()(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    wide = torch.cat([hidden[number][0] for number in module.layers_of(llama())], -1)  # [T − 1, 3 D]
    wide = torch.cat([wide, module.mask_hidden.view(1, -1).expand(count - 1, -1)])
    if config.norm_before_fc:
        wide = normed("input_norm.weight", wide)
    if config.fc_norm:
        wide = torch.cat([normed(f"fc_norm.{i}.weight", part) for i, part in enumerate(wide.chunk(3, -1))], -1)
    feature = wide @ weights["fc.weight"].T
    own = weights.get("embed_tokens.weight", llama().get_input_embeddings().weight)
    embedded = own[torch.tensor([*tokens[1:], *[config.mask_token_id] * (count - 1)])]
    rows, head_dim = len(feature), sizes.head_dim
    cos, sin = module.rotary(feature[None], torch.arange(rows)[None])
    hidden = feature
    for layer in range(sizes.num_hidden_layers):
        at = f"layers.{layer}."
        read, residual = normed(at + "input_layernorm.weight", embedded if layer == 0 else hidden), hidden
        if layer == 0:
            beside = normed(at + "hidden_norm.weight", feature)
            read = torch.cat([read, beside], -1)
            residual = beside if config.norm_before_residual else feature
        query, key, value = (
            (read @ weights[f"{at}self_attn.{name}_proj.weight"].T + weights.get(f"{at}self_attn.{name}_proj.bias", 0))
            .view(1, rows, -1, head_dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        group = sizes.num_attention_heads // sizes.num_key_value_heads
        scores = query[0] @ key[0].repeat_interleave(group, 0).transpose(1, 2) * head_dim**-0.5
        scores = scores + torch.full((rows, rows), -torch.inf, dtype=scores.dtype).triu(1)
        out = (scores.softmax(-1) @ value[0].repeat_interleave(group, 0)).transpose(0, 1).reshape(rows, -1)
        out = out @ weights[f"{at}self_attn.o_proj.weight"].T + weights.get(f"{at}self_attn.o_proj.bias", 0)
        hidden = residual + out
        read = normed(at + "post_attention_layernorm.weight", hidden)
        gate, up = (read @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (silu(gate) * up) @ weights[f"{at}mlp.down_proj.weight"].T
    return normed("norm.weight", hidden)[-count:] @ weights["lm_head.weight"].T


@pytest.mark.parametrize("variant", P_EAGLE)
def test_one_forward_is_the_papers(variant):
    """At once for the whole text, and with most of it in the cache: the masks of the step before left nothing."""
    module, tokens = p_eagle(variant), prompts(1, 12, vocab=VOCAB)["input_ids"]
    source = started(module, llama(), tokens)
    assert isinstance(source, Parallel)
    for length, width in ((9, 8), (12, 4)):
        source.state.out_len.fill_(length)
        with torch.no_grad():
            _, logits = source.feed(source.state.out_len - 1, width, unknown=4, keep=5)
        assert int(source.cached) == length - 1
        torch.testing.assert_close(logits[0], written_out(module, tokens[0, :length].tolist(), 5), **CLOSE)
        assert (logits[0, 1:] - logits[0, :-1]).abs().max() > 0.1


def test_a_step_is_one_forward_whatever_the_depth():
    """And no masks beyond what the shape reads, or the drafter was trained for."""
    for depth, masks in ((1, 0), (3, 2), (7, 4)):
        shape = GraphConfig(depth=depth, width=2, branch=2, max_rows=16, merge_context=0)
        call = {**ALONE, **prompts(1, 9, vocab=VOCAB), "drafter": fitted_p_eagle("norms"), "graph_config": shape}
        stats = generate(llama(), **call).stats
        assert stats.draft_rows == (shape.chain_rows + masks) * stats.steps


# DFlash and its kin: blocks, and edges that know the token before.


def graphs_of(drafter: DFlash, shape: GraphConfig) -> list[tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of every step the graph that a drafter alone gave, and its block: all states, those of what it drafts, logits."""
    graphs, blocks = [], []

    def keep(verified):
        names = ("token_ids", "depths", "parents", "edge_targets", "edge_log_probs")
        graphs.append({name: getattr(verified.graph, name)[0].clone() for name in names})

    honest, whole = DFlashDrafts.keep, DFlashDrafts.forward_block

    def states(self):
        found = whole(self)
        blocks.append([found[0][0].clone()])
        return found

    def noted(self, hidden, logits, level):
        blocks[-1] += [hidden[0].clone(), logits[0].clone()]
        honest(self, hidden, logits, level)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashDrafts, "keep", noted)
        patch.setattr(DFlashDrafts, "forward_block", states)
        call = {**ALONE, **prompts(1, 14, vocab=VOCAB), "drafter": drafter, "observer": keep}
        generate(llama(), **call, graph_config=shape)
    return [(graph, *block) for graph, block in zip(graphs, blocks, strict=True)]


def edges_in(graph: dict):
    """Node, what follows it, and the log-probability of that."""
    for node, (targets, log_probs) in enumerate(zip(graph["edge_targets"], graph["edge_log_probs"], strict=True)):
        for after, found in zip(targets.tolist(), log_probs, strict=True):
            if after >= 0:
                yield node, after, found.double()


@pytest.mark.parametrize("kind", ["dflash shared", "DSpark", "DFlash 2"])
def test_every_merged_node_has_what_the_head_says_of_it(kind):
    """An edge's probability is that of its depth and its two tokens, whatever path was first to reach its node."""
    drafter, merged, steps = dflash(kind), 0, 0
    shape = GraphConfig(depth=4, width=4, branch=3, max_rows=32, merge_context=0)
    for graph, _, hidden, logits in graphs_of(drafter, shape):
        steps, parents = steps + 1, {}
        for node, after, found in edges_in(graph):
            parents.setdefault(after, set()).add(node)
            at, before = slice(int(graph["depths"][node]), int(graph["depths"][node]) + 1), graph["token_ids"][node]
            scored = logits[None, at]
            if drafter.edges is not None:
                scored = drafter.edges(scored, hidden[None, at], before.long()[None, None])
            expected = scored.log_softmax(-1)[0, 0, graph["token_ids"][after]]
            torch.testing.assert_close(found, expected, **CLOSE)
        merged += sum(len(found) > 1 for found in parents.values())
    assert merged > 10 and steps > 4


@pytest.mark.parametrize("sampled", [False, True])
def test_confidence_counts_where_tokens_are_drawn(sampled, monkeypatch):
    """Candidates after a node lose what the head says of its depth and token; greedily nothing."""
    drafter, seen = dflash("DSpark confident"), 0
    kept, markov, honest = drafter.confidence_head, drafter.markov_head.markov_w1, DFlashDrafts.at_depths

    def compared(self, level):
        nonlocal seen
        found = honest(self, level)
        drafter.confidence_head = None
        without = honest(self, level)
        drafter.confidence_head = kept
        assert torch.equal(found.tokens, without.tokens)
        for node, (depth, token) in enumerate(zip(level.frontier.depths[0], level.frontier.token_ids[0], strict=True)):
            if depth < drafter.config.num_drafted:
                said = kept.proj(torch.cat([self.hidden[0, depth], markov(token.long())])).sigmoid().log()
                lost = (without.log_probs - found.log_probs)[0, node]
                lost = lost[without.tokens[0, node] >= 0].double()
                torch.testing.assert_close(lost, (-said if sampled else 0 * said).expand_as(lost), **CLOSE)
                seen += len(lost)
        return found

    monkeypatch.setattr(DFlashDrafts, "at_depths", compared)
    shape = GraphConfig(depth=4, width=4, branch=3, max_rows=32, merge_context=0, history_depth=1, history_width=4)
    call = {**ALONE, **prompts(1, 9, vocab=VOCAB), "drafter": drafter, "do_sample": sampled}
    generate(llama(), **call, graph_config=shape)
    assert seen > 50


def test_a_recurrent_heads_state_goes_along_the_path():
    """In a tree every node has one; the root's row, which does not draft here, is its first step."""
    drafter, longest = dflash("DSpark recurrent"), 0
    assert not drafter.config.sample_from_anchor
    shape = GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=-1)
    for graph, whole, hidden, logits in graphs_of(drafter, shape):
        for node, after, found in edges_in(graph):
            path = [node]
            while path[0] != 0:
                path.insert(0, int(graph["parents"][path[0]]))
            tokens = graph["token_ids"][torch.tensor(path)].long()
            longest = max(longest, len(path))
            before, count = torch.cat([tokens[:1], tokens]), len(path)  # the root's row and the first mask's: one token
            rows = torch.cat([torch.zeros_like(logits[:1]), logits[:count]])
            along_it = along(drafter.edges, rows[None], whole[None, : count + 1], before[None])
            assert torch.equal(whole[1 : count + 1], hidden[:count])
            torch.testing.assert_close(found, along_it[0, -1].log_softmax(-1)[graph["token_ids"][after]], **CLOSE)
    assert longest == 3


def markov(head, logits, hidden, before, state):
    e = head.markov_w1.weight[before]
    if head.gate_proj is not None:
        e = e * torch.sigmoid(head.gate_proj.weight @ torch.cat([hidden, e]) + head.gate_proj.bias)
    return logits + head.markov_w2.weight @ e, state


def selector(head, logits, hidden, before, state):
    context = head.predecessor_codebook[before] * (head.hidden_projection.weight @ hidden)
    best = logits.topk(head.top_k).indices
    return logits.index_add(0, best, head.successor_codebook[best] @ context), state


def recurrent(head, logits, hidden, before, state):
    read = torch.cat([state, head.markov_w1.weight[before], hidden])
    gate, candidate, output = (head.joint_proj.weight @ read + head.joint_proj.bias).split(3)
    gate = gate.sigmoid()
    return logits + head.markov_w2.weight @ output.tanh(), gate * state + (1 - gate) * candidate.tanh()


HEADS = {
    "markov": (lambda: MarkovHead(11, 9, 3, 4, gated=False), markov),
    "gated": (lambda: MarkovHead(11, 9, 3, 4, gated=True), markov),
    "recurrent": (lambda: RecurrentHead(11, 9, 3, 4), recurrent),
    "selector": (lambda: Selector(11, 3, 4, 5), selector),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_its_formula(name):
    (made, formula), gen = HEADS[name], torch.Generator().manual_seed(1)
    head, vocab = made(), 11 if name == "selector" else 9
    random_tensors(head)
    logits, hidden = torch.randn(2, 5, vocab, generator=gen), torch.randn(2, 5, 4, generator=gen)
    before = torch.randint(0, 11, (2, 5), generator=gen)
    found = along(head, logits, hidden, before)
    for b in range(2):
        state = torch.zeros(3)
        for k in range(5):
            expected, state = formula(head, logits[b, k], hidden[b, k], before[b, k], state)
            torch.testing.assert_close(found[b, k], expected)


def test_a_convolution_is_its_formula():
    taps, group, size = 3, 2, 6
    part, gen = DynamicConvolution(size, taps, group), torch.Generator().manual_seed(1)
    random_tensors(part)
    hidden, output = torch.randn(2, 5, size, generator=gen), torch.randn(2, 5, size, generator=gen)
    read, delta = part.before(hidden)
    kernels = (hidden @ part.kernel_projection.weight.T).view(2, 5, 2, taps, size // group)
    for side, (x, y) in enumerate(((hidden, read), (output, part.after(output, delta)))):
        for b, t, channel in torch.cartesian_prod(*map(torch.arange, y.shape)).tolist():
            total = sum(
                (part.base_kernel[side, tap, channel] + kernels[b, t, side, tap, channel // group])
                * x[b, t - tap, channel]
                for tap in range(min(taps, t + 1))
            )
            torch.testing.assert_close(y[b, t, channel], total)


def test_rows_of_a_causal_head_do_not_see_later_ones():
    """A block's rows are those of a shorter block; without the setting they are not."""
    tokens = prompts(1, 12, vocab=VOCAB)["input_ids"]
    for causal in (True, False):
        long, short = (
            random_dflash(dflash_config(llama(), block_size=size, inner={"causal_head": causal})) for size in (6, 3)
        )
        with torch.no_grad():
            a, b = (started(module, llama(), tokens).forward_block()[0][:, :3] for module in (long, short))
        assert torch.allclose(a, b) == causal


# Gemma 4's assistants.


@pytest.mark.skipif(not hasattr(transformers, "Gemma4AssistantForCausalLM"), reason="an older transformers")
@pytest.mark.parametrize("ordered", [False, True])
@torch.no_grad()
def test_drafts_are_those_of_transformers_forward(ordered):
    """Root and second level, beyond the sliding window."""
    target, module, drafts = gemma(), assistant(ordered), []
    ids = prompts(1, 17, vocab=GEMMA["vocab_size"])["input_ids"]
    keep = lambda v: drafts.append((v.rows.token_ids + 0, v.rows.scores + 0))  # noqa: E731
    shape = GraphConfig.preset("chain", depth=3)
    generate(target, drafter=module, observer=keep, **ALONE, input_ids=ids, graph_config=shape)
    out = target(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    token, hidden, scores, tokens = ids[:, -1:], out.hidden_states[-1][:, -1:], [0.0], [int(ids[0, -1])]
    for _ in range(3):
        found = module.model(
            inputs_embeds=torch.cat([target.get_input_embeddings()(token), hidden], -1),
            position_ids=torch.tensor([[16]]),
            shared_kv_states=dict(out.shared_kv_states),
            attention_mask=torch.ones(1, 16, dtype=torch.long),
        )
        logits, hidden = found.logits[0, 0], found.last_hidden_state
        if ordered:  # theirs have a floor that ours leave out
            logits = torch.where(logits > logits.min(), logits, -torch.inf)
        token = logits.argmax()[None, None]
        scores.append(scores[-1] + float(logits.log_softmax(-1).max()))
        tokens.append(int(token))
    assert drafts[0][0][0].tolist() == tokens
    torch.testing.assert_close(drafts[0][1][0].double(), torch.tensor(scores, dtype=torch.float64), **CLOSE)
