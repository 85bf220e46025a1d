"""Forwards of drafters: transformers' own where it has them, what makers write down, and all as one operator."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
import transformers
from block_code import rows as block_code
from models import prompts, tiny
from ops.contracts.backends import backend_param
from sources.drafters import (
    FAMILIES,
    Causal,
    dflash_config,
    eagle3_config,
    generate,
    random_dflash,
    random_eagle3,
    random_tensors,
    saved,
    started,
    states_of,
    target_of,
)
from sources.rows import EAGLE3, GEMMA, P_EAGLE, VOCAB, assistant, dflash, gemma, llama, p_eagle
from torch import nn
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from gsd_kernels import DFlash, Eagle3, GraphConfig, Mtp
from gsd_kernels_hf.model import replay
from gsd_kernels_hf.sources.dflash import DFlashDrafts
from gsd_kernels_hf.sources.edges import along
from gsd_kernels_train.mtp import block_to_train, new_head

pytestmark = backend_param("cpu").marks
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LENGTH = 5  # within every sliding window
ALONE = {"do_sample": False, "draft_sources": ("drafter",)}


def unseen(length: int) -> torch.Tensor:
    """What a text's rows do not see, as transformers' masks say it, [1, 1, L, L]."""
    return torch.full((length, length), -torch.inf).triu(1)[None, None]


# Heads of multi-token prediction.


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
    hidden = layer(hidden, attention_mask=unseen(LENGTH), position_ids=positions, position_embeddings=turns)
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
    target, head = copy.deepcopy(target_of(name)).float(), saved(name, tmp_path)
    module, ids = Mtp.from_pretrained(tmp_path, target), prompts(1, LENGTH + 1, vocab=60)["input_ids"]
    states = target(ids, output_hidden_states=True).hidden_states[-1][:, :LENGTH]

    def found(following):
        embedded = target.get_input_embeddings()(following)
        return module(embedded, states, torch.arange(LENGTH)[None], Causal())

    head = {full: value.float() for full, value in head.items()}
    torch.testing.assert_close(found(ids[:, 1:]), wired(name, target, head, ids, states), **CLOSE)
    assert (found(ids[:, 1:]) - found(ids.flip(1)[:, 1:])).abs().max() > 0.1


# EAGLE-3 and P-EAGLE.


def written_out(module: Eagle3, tokens: torch.Tensor, states: list[torch.Tensor], count: int) -> torch.Tensor:
    """Logits [count, V] of ``count`` tokens after a text [1, T]: the papers' forward, in transformers' LLaMA layers."""
    config, sizes, weights, masks = module.config, module.sizes, module.state_dict(), count - 1

    def normed(name, x):
        return rms_norm(x, x.shape[-1:], weights[name], sizes.rms_norm_eps)

    wide = torch.cat(states, -1)[:, : tokens.shape[1] - 1]  # [1, T − 1, 3 D]
    if masks:
        wide = torch.cat([wide, module.mask_hidden.view(1, 1, -1).expand(-1, masks, -1)], 1)
    if config.norm_before_fc:
        wide = normed("input_norm.weight", wide)
    if config.fc_norm:
        wide = torch.cat([normed(f"fc_norm.{i}.weight", part) for i, part in enumerate(wide.chunk(3, -1))], -1)
    hidden = feature = wide @ weights["fc.weight"].T
    embedding = weights.get("embed_tokens.weight", llama().get_input_embeddings().weight)
    embedded = embedding[torch.cat([tokens[:, 1:], torch.full((1, masks), config.mask_token_id or 0)], 1)]
    rows, own = feature.shape[1], copy.deepcopy(sizes)
    own._attn_implementation = "eager"
    turns = LlamaRotaryEmbedding(own)(feature, torch.arange(rows)[None])
    for number in range(sizes.num_hidden_layers):
        layer, at = LlamaDecoderLayer(own, number), f"layers.{number}."
        for name, parameter in layer.named_parameters():
            parameter.data = weights[at + name]  # queries, keys and values of the first layer are wider
        read, residual = layer.input_layernorm(hidden if number else embedded), hidden
        if number == 0:
            beside = normed(at + "hidden_norm.weight", feature)
            read, residual = torch.cat([read, beside], -1), beside if config.norm_before_residual else feature
        out, _ = layer.self_attn(read, position_embeddings=turns, attention_mask=unseen(rows))
        hidden = residual + out
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return normed("norm.weight", hidden)[0, -count:] @ weights["lm_head.weight"].T


def eagle3(name):
    return random_eagle3(eagle3_config(llama(), **EAGLE3[name]), own_embedding=name == "before")


@pytest.mark.parametrize(
    ("made", "name"),
    [*((eagle3, name) for name in EAGLE3), *((p_eagle, name) for name in P_EAGLE)],
    ids=lambda part: getattr(part, "__name__", part),
)
@torch.no_grad()
def test_one_forward_is_the_papers(made, name):
    """At once for the whole text, and with most of it in the cache: the masks of the step before left nothing."""
    module, tokens = made(name), prompts(1, 12, vocab=VOCAB)["input_ids"]
    source, masks = started(module, llama(), tokens), 0 if made is eagle3 else 4
    for length, width in ((9, 8), (12, 4)):
        source.state.out_len.fill_(length)
        _, logits = source.feed(source.state.out_len - 1, width, unknown=masks, keep=1 + masks)
        assert int(source.cached) == length - 1
        wanted = written_out(module, tokens[:, :length], states_of(module, llama(), tokens), 1 + masks)
        torch.testing.assert_close(logits[0], wanted, **CLOSE)
        assert masks == 0 or (logits[0, 1:] - logits[0, :-1]).abs().max() > 0.1


# DFlash and its kin: blocks, and edges that know the token before.


def graphs_of(drafter: DFlash, shape: GraphConfig, **how) -> list[tuple]:
    """Of every step the graph that a drafter alone gave, all states of its block, and the logits of what it drafts."""
    graphs, blocks, whole = [], [], DFlashDrafts.forward_block

    def noted(self):
        blocks.append(tuple(found[0].clone() for found in whole(self)))
        return whole(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashDrafts, "forward_block", noted)
        call = {**ALONE, **prompts(1, 14, vocab=VOCAB), "drafter": drafter, **how}
        generate(llama(), **call, graph_config=shape, observer=lambda seen: graphs.append(copy.deepcopy(seen.graph)))
    return [(graph, *block) for graph, block in zip(graphs, blocks, strict=True)]


@pytest.mark.parametrize("kind", ["dflash shared", "DSpark", "DSpark recurrent", "DSpark confident", "DFlash 2"])
def test_every_edge_has_what_the_head_says_of_it(kind):
    """Of its depth and its two tokens, whatever path was first to reach its node; a recurrent head of its path.

    A confidence head has none: the likeliest token is picked.
    """
    drafter, merged, longest = dflash(kind), 0, 0
    skipped = int(not drafter.config.sample_from_anchor)  # the root's row is a recurrent head's first step all the same
    shape = GraphConfig(depth=4, width=4, branch=3, max_rows=32, merge_context=-1 if kind.endswith("rent") else 0)
    for graph, states, logits in graphs_of(drafter, shape):
        parents: dict[int, set[int]] = {}
        for node, (targets, log_probs) in enumerate(zip(graph.edge_targets[0], graph.edge_log_probs[0], strict=True)):
            if bool((targets < 0).all()):
                continue
            path = [node]
            while path[0] != 0:
                path.insert(0, int(graph.parents[0, path[0]]))
            tokens = graph.token_ids[0, torch.tensor(path)].long()[None]
            before = torch.cat([tokens[:, :1].repeat(1, skipped), tokens], 1)
            rows = torch.cat([torch.zeros_like(logits[:1]).repeat(skipped, 1), logits[: len(path)]])[None]
            hidden = states[None, : before.shape[1]]
            if drafter.edges is not None:
                rows = along(drafter.edges, rows, hidden, before)
            expected = rows[0, -1].log_softmax(-1)
            for after, found in zip(targets.tolist(), log_probs.double(), strict=True):
                if after >= 0:
                    torch.testing.assert_close(found, expected[graph.token_ids[0, after]].double(), **CLOSE)
                    parents.setdefault(after, set()).add(node)
                    longest = max(longest, len(path))
        merged += sum(len(found) > 1 for found in parents.values())
    assert longest > 2 and (merged > 10 or shape.merge_context == -1)


def test_rows_of_a_causal_head_do_not_see_later_ones():
    """A block's rows are those of a shorter block; without the setting they are not."""
    tokens, found = prompts(1, 12, vocab=VOCAB)["input_ids"], []
    for causal in (True, False):
        for size in (6, 3):
            module = random_dflash(dflash_config(llama(), block_size=size, inner={"causal_head": causal}))
            source = started(module, llama(), tokens)
            source.enter(source.state.out_len - 1, 12)
            found.append(source.forward_block()[0][:, :3])
    assert torch.allclose(*found[:2]) and not torch.allclose(*found[2:])


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


# The same as one operator, where that is possible.

ROPE = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
LEVELS = {name: EAGLE3[name] for name in ("reduced", "norms")} | {
    "layers": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "norm_before_fc": True},
    "rope": ROPE,
}
HEADS = {
    "llama": ("llama-gqa", {"attention_bias": True, "mlp_bias": True}),
    "yarn": ("llama-tied", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("mistral-window", {"head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
"""Targets of heads of multi-token prediction."""
FIRST = ("yarn", "qwen2")
"""Of them those whose heads read the feature first, with a bias."""
BLOCKS = {
    "DFlash": {},
    "JetSpec": {"inner": {"causal_head": True}},
    "DSpark": {"inner": {"markov_rank": 6, "sample_from_anchor": True}},
    "recurrent": {"inner": {"markov_rank": 6, "markov_head_type": "rnn"}, "num_hidden_layers": 1},
    "reduced block": {"draft_vocab_size": 31, "attention_bias": True},
    "rope block": ROPE,
}
SERVED = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
"""Heads that a GPU's operators take."""


def made_for(variant: str, dtype: torch.dtype, **sizes: int) -> tuple[nn.Module, nn.Module]:
    """A target and a drafter for it."""
    family, config = HEADS.get(variant, ("llama-gqa", {}))
    target = tiny(family, num_hidden_layers=3, vocab_size=VOCAB, dtype=torch.float64, **{**config, **sizes})
    if variant in HEADS:
        torch.manual_seed(0)
        module = new_head(block_to_train(target)).requires_grad_(False)
        if variant in FIRST:
            module.layout = replace(module.layout, hidden_first=True)
            module.projection = nn.Linear(64, 32, dtype=torch.float64).requires_grad_(False)
        random_tensors(module)
    elif variant in LEVELS:
        config = eagle3_config(target, **{**LEVELS[variant], **sizes})
        module = random_eagle3(config, own_embedding=variant == "layers")
    else:
        module = random_dflash(dflash_config(target, **BLOCKS[variant], **sizes), own=variant == "reduced block")
    return target.to(dtype), module.to(dtype)


def computed(source) -> list[torch.Tensor]:
    """What a step of it computes, and all keys and values of the text and the step."""
    found, behind = block(source) if isinstance(source, DFlashDrafts) else levels(source)
    layers = source.rows.cache.layers[: len(source.module.layers)]
    caches = [t for layer in layers for t in (layer.keys, layer.values)]
    pads, end = source.rows.text_kv_start.tolist(), int(source.state.out_len.max()) + behind
    stored = [torch.cat([t[b, :, pad:end] for b, pad in enumerate(pads)], 1) for t in caches]
    return [t.double() for t in (*found, *stored)]


def block(source: DFlashDrafts) -> tuple[list[torch.Tensor], int]:
    """States and logits of the block behind features that came in two pieces; rows behind the text but its root."""
    end = source.state.out_len - 1
    source.enter(end - 5, source.state.tokens.shape[1])
    source.enter(end, 7)  # with rows that are padding
    return [*source.forward_block()], source.module.config.block_size - 1


def levels(source) -> tuple[list[torch.Tensor], int]:
    """Vectors and logits: entries in two pieces, the last three kept; a fork of two behind the root, one more each."""
    state, batch, device = source.state, len(source.cached), source.cached.device
    found = [*source.feed(state.out_len - 6, 8, keep=0), *source.feed(state.out_len - 1, 6, keep=3)]
    source.feed(state.out_len - 1, 2, keep=1)  # nothing is missing
    vectors, node_depths = found[-2][:, -1:].expand(-1, 2, -1), torch.zeros(batch, 4, dtype=torch.int32, device=device)
    for level, mask in ((0, [1, 2]), (1, [0b101, 0b1010])):
        tokens = torch.tensor([[level + 3, 40]], dtype=torch.int32, device=device).expand(batch, -1).contiguous()
        graph = torch.tensor(mask, dtype=torch.int32, device=device)[:, None].expand(batch, -1, -1).contiguous()
        depths = torch.full((batch, 2), level + 1, dtype=torch.int32, device=device)
        found += source.forward(
            tokens, vectors, state.out_len - 1, 2 * level, graph, depths, node_depths, keep=2, shift=1
        )
        vectors = found[-2]
    return found, 3


ERRORS = [(variant, torch.float32) for variant in (*LEVELS, *HEADS, *BLOCKS)]
ERRORS += [(variant, torch.bfloat16) for variant in ("norms", "llama", "DSpark")]
ERRORS += [(variant, torch.float16) for variant in ("layers", "yarn", "reduced block")]


@pytest.mark.parametrize("place", [block_code.OWN, *block_code.DEVICES])
@pytest.mark.parametrize(("variant", "dtype"), ERRORS, ids=str)
@torch.no_grad()
def test_an_operators_error_is_at_most_twice_the_modules(place, variant, dtype, monkeypatch, tmp_path_factory):
    """Against the modules in float64, behind texts that padding begins: vectors or states, logits, keys and values."""
    if dtype == torch.float32 and place != block_code.OWN:
        pytest.skip("a GPU's operators are those of half precision")
    device = block_code.drafting_on(place, monkeypatch, tmp_path_factory)
    target, module = (part.to(device) for part in made_for(variant, dtype, **SERVED))
    tokens, found = prompts(3, 17, vocab=VOCAB)["input_ids"], []
    for exact, modules in ((True, True), (False, True), (False, False)):
        of = (copy.deepcopy(module).double(), copy.deepcopy(target).double()) if exact else (module, target)
        source = started(*of, tokens, [0, 4, 16], modules=modules)
        assert modules or source.operator is not None
        assert source.rows.operator == ("cuda" if replay.is_gpu(source.rows.device) else "auto")
        found.append(computed(source))
    for number, (exactly, theirs, ours) in enumerate(zip(*found, strict=True)):
        assert ours.isfinite().all()
        assert (ours - exactly).norm() <= 2 * (theirs - exactly).norm() + 1e-6 * exactly.norm(), number


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


NO_OPERATOR = {
    "an embedding of its own kind": lambda m, t: t.set_input_embeddings(Scaled(VOCAB, 32)),
    "float64": lambda m, t: (m.double(), t.double()),
    "a hook": lambda m, t: m.layers[0].mlp.register_forward_hook(lambda *_: None),
    "another epsilon": lambda m, t: setattr(m.norm, "variance_epsilon", 1e-3),
    "another activation": lambda m, t: setattr(m.layers[0].mlp, "act_fn", nn.GELU()),
    "a bias": lambda m, t: setattr(m.lm_head, "bias", nn.Parameter(torch.zeros(VOCAB))),
}


@pytest.mark.parametrize("what", NO_OPERATOR)
def test_what_is_no_plain_decoder_keeps_its_modules(what):
    target, module = made_for("rope", torch.float32)
    tokens = torch.arange(9)[None]
    assert started(module, target, tokens).operator is not None
    NO_OPERATOR[what](module, target)
    assert started(module, target, tokens).operator is None
