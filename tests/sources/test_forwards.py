"""Forwards of drafters: transformers' own where it has them, what makers write down, and all as one operator."""

from __future__ import annotations

import copy
import re

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
    noting,
    random_dflash,
    random_eagle3,
    random_tensors,
    saved,
    started,
    states_of,
    target_of,
)
from sources.rows import DFLASH, EAGLE3, GEMMA, P_EAGLE, VOCAB, assistant, dflash, eagle3, gemma, llama, p_eagle
from torch import nn

from gsd_kernels import DFlash, Eagle3, Frontier, GraphConfig, Mtp
from gsd_kernels_hf.model import replay
from gsd_kernels_hf.sources.base import Level
from gsd_kernels_hf.sources.features import DFlashDrafts
from gsd_kernels_hf.sources.layouts import PARTS
from gsd_kernels_train.drafters import block_to_train, new_head

pytestmark = backend_param("cpu").marks
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
MtpLayer = getattr(transformers.modeling_layers, "MtpLayer", None)
LENGTH = 5  # within every sliding window
OF_MTP = dict(zip(("block", *PARTS), ("mtp_block", "eh_proj", "enorm", "hnorm", "post_norm"), strict=True))
ALONE = {"do_sample": False, "draft_sources": ("drafter",)}


# Heads of multi-token prediction.


def wired(name, target, head, embedded, states):
    """The head's output as transformers' own module gives it, around a layer of the target's class."""
    family, own = FAMILIES[name], copy.deepcopy(target.config.get_text_config(decoder=True))
    own._attn_implementation, own.mtp_hidden_states_first = "eager", family.layout.hidden_first
    if name == "mellum":  # its head's window is its config's, not that of a full layer
        own.layer_types = ["sliding_attention"] * 2
    kinds = type(target.model.layers[family.layer]), type(target.model.norm)
    module, tensors = MtpLayer(own, *kinds, family.layer).eval(), {}
    for full, value in head.items():
        part, _, rest = family.layout.own_name(full.removeprefix(family.prefix)).partition(".")
        tensors[f"{OF_MTP[part]}.{rest}"] = value
    tensors.setdefault("post_norm.weight", target.model.norm.weight)
    like = module.state_dict()
    module.load_state_dict({inner: stacked(tensors, inner, value) for inner, value in like.items()})
    positions = torch.arange(LENGTH)[None]
    typed = (own.layer_types[family.layer],) if name in ("mellum", "mimo-v2") else ()
    turns = target.model.rotary_emb(states, positions, *typed)
    unseen = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]  # as transformers' masks say it
    return module(embedded, states, turns, unseen, positions, None)


def stacked(tensors, name, like):
    """A layer's tensor, of all experts where a checkpoint has one of each."""
    if name in tensors:
        return tensors[name]
    base, what = re.fullmatch(r"(.*experts)\.(gate_up_proj|down_proj)", name).groups()
    kinds = ["gate_proj", "up_proj"] if what == "gate_up_proj" else ["down_proj"]
    experts = range(like.shape[0])
    return torch.stack([torch.cat([tensors[f"{base}.{i}.{kind}.weight"] for kind in kinds]) for i in experts])


@pytest.mark.skipif(MtpLayer is None, reason="an older transformers")
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_head_is_wired_as_its_family_says(name, tmp_path):
    target, head = copy.deepcopy(target_of(name)).float(), saved(name, tmp_path)
    module, ids = Mtp.from_pretrained(tmp_path, target), prompts(1, LENGTH + 1, vocab=60)["input_ids"]
    embedded = target.get_input_embeddings()(ids[:, 1:])
    states = target(ids, output_hidden_states=True).hidden_states[-1][:, :LENGTH]
    found = module(embedded, states, torch.arange(LENGTH)[None], Causal())
    head = {full: value.float() for full, value in head.items()}
    torch.testing.assert_close(module.norm(found), wired(name, target, head, embedded, states), **CLOSE)


# EAGLE-3 and P-EAGLE.


def at_once(module: Eagle3, tokens: torch.Tensor, states: list[torch.Tensor], count: int) -> torch.Tensor:
    """Logits [count, V] of ``count`` tokens after a text [1, T], from one forward of all of it without a cache."""
    features, unknown = module.fuse(states)[:, : tokens.shape[1] - 1], tokens.new_zeros(1, count - 1)
    if count > 1:
        features = torch.cat([features, module.mask_feature().expand(1, count - 1, -1)], 1)
        unknown += module.mask_token_id
    embed = llama().get_input_embeddings() if module.embed_tokens is None else module.embed_tokens
    embedded, positions = embed(torch.cat([tokens[:, 1:], unknown], 1)), torch.arange(features.shape[1])[None]
    return module.outputs(module(embedded, features, positions, Causal()))[1][0, -count:]


@pytest.mark.parametrize(
    ("made", "name"),
    [*((eagle3, name) for name in EAGLE3), *((p_eagle, name) for name in P_EAGLE)],
    ids=lambda part: getattr(part, "__name__", part),
)
@torch.no_grad()
def test_rows_behind_a_cache_are_those_of_a_whole_text(made, name):
    """With most of it in the cache: the masks of the step before left nothing."""
    module, tokens = made(name), prompts(1, 12, vocab=VOCAB)["input_ids"]
    source, masks = started(module, llama(), tokens), 0 if made is eagle3 else 4
    for length, width in ((9, 8), (12, 4)):
        source.state.out_len.fill_(length)
        _, logits = source.feed(source.state.out_len - 1, width, unknown=masks, keep=1 + masks)
        assert int(source.cached) == length - 1
        wanted = at_once(module, tokens[:, :length], states_of(module, llama(), tokens), 1 + masks)
        torch.testing.assert_close(logits[0], wanted, **CLOSE)
        assert masks == 0 or (logits[0, 1:] - logits[0, :-1]).abs().max() > 0.1


@pytest.mark.parametrize("modules", [False, True], ids=["operator", "modules"])
@torch.no_grad()
def test_a_drafted_row_is_the_next_of_the_text(modules):
    """It reads the vector of the row before, and stands where its token does."""
    module, tokens = eagle3("norms"), prompts(1, 12, vocab=VOCAB)["input_ids"]
    shape = GraphConfig(depth=2, width=1, branch=1, max_rows=3)
    source = started(module, llama(), tokens, modules=modules)
    source.prepare(shape)
    vector, _ = source.feed(source.state.out_len - 1, shape.chain_rows, keep=1)
    one = torch.ones(1, 1, dtype=torch.int32)
    frontier = Frontier(one, 7 * one, one, one[..., None])
    _, logits = source.nodes(Level(1, shape, None, frontier, None), vector)
    features = torch.cat([module.fuse(states_of(module, llama(), tokens))[:, :-1], vector], 1)
    embedded = llama().get_input_embeddings()(torch.cat([tokens[:, 1:], 7 * one], 1))
    wanted = module(embedded, features, torch.arange(12)[None], Causal())[:, -1:]
    torch.testing.assert_close(logits, module.outputs(wanted, source.head)[1], **CLOSE)


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
    skipped = int(not drafter.sample_from_anchor)  # the root's row is a recurrent head's first step all the same
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
                rows, _ = drafter.edges(rows, hidden, before)
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
            source.feed(source.state.out_len - 1, 12, keep=0)
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
    shape = GraphConfig.preset("chain", depth=3)
    generate(target, drafter=module, observer=noting(drafts), **ALONE, input_ids=ids, graph_config=shape)
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

HEADS = {
    "llama": ("llama-gqa", {"attention_bias": True, "mlp_bias": True}),
    "yarn": ("llama-tied", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}),
    "qwen2": ("qwen2", {}),
}
"""Targets of heads of multi-token prediction."""
FIRST = ("yarn", "qwen2")
"""Of them those whose heads read the feature first, with a bias."""
BLOCKS = ("dflash shared", "dflash reduced", "JetSpec", "DSpark", "DSpark recurrent")
ERRORS = [(variant, torch.float32) for variant in (*EAGLE3, *HEADS, *BLOCKS)]
ERRORS += [(variant, torch.bfloat16) for variant in ("norms", "llama", "DSpark")]
ERRORS += [(variant, torch.float16) for variant in ("before", "yarn", "dflash reduced")]


def made_for(variant: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A target and a drafter for it, with heads that a GPU's operators take."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    family, config = HEADS.get(variant, ("llama-gqa", {}))
    target = tiny(family, num_hidden_layers=3, vocab_size=VOCAB, dtype=torch.float64, **config | sizes)
    if variant in HEADS:
        torch.manual_seed(0)
        module = new_head(block_to_train(target)).requires_grad_(False)
        if variant in FIRST:
            module.layout = module.layout._replace(hidden_first=True)
            module.projection = nn.Linear(64, 32, dtype=torch.float64).requires_grad_(False)
        random_tensors(module)
    elif variant in EAGLE3:
        module = random_eagle3(eagle3_config(target, **EAGLE3[variant] | sizes), own_embedding=variant == "before")
    else:
        module = random_dflash(dflash_config(target, **DFLASH[variant] | sizes), own=variant == "dflash reduced")
    return target.to(dtype), module.to(dtype)


def computed(source) -> list[torch.Tensor]:
    """What a step computes behind entries that came in two pieces: a block, or the last three rows and a fork."""
    end, batch, device = source.state.out_len - 1, len(source.cached), source.cached.device
    if isinstance(source, DFlashDrafts):
        source.feed(end - 5, source.state.tokens.shape[1], keep=0)
        source.feed(end, 7, keep=0)  # with rows that are padding
        return [*source.forward_block()]
    source.feed(end - 5, 8, keep=0)
    found = [*source.feed(end, 6, keep=3)]
    source.feed(end, 2, keep=1)  # nothing is missing
    zeros = torch.zeros(batch, 2, dtype=torch.int32, device=device)
    tokens, graph = zeros + torch.tensor([3, 40]).to(zeros), (zeros + torch.tensor([1, 2]).to(zeros))[..., None]
    vectors = found[0][:, -1:].expand(-1, 2, -1)
    return [*found, *source.forward(tokens, vectors, end, 0, graph, zeros + 1, zeros, keep=2, shift=1)]


@pytest.mark.parametrize("place", [block_code.OWN, *block_code.DEVICES])
@pytest.mark.parametrize(("variant", "dtype"), ERRORS, ids=str)
@torch.no_grad()
def test_an_operators_error_is_at_most_twice_the_modules(place, variant, dtype, monkeypatch, tmp_path_factory):
    """Against the modules in float64, behind texts that padding begins: vectors or states, and logits."""
    if dtype == torch.float32 and place != block_code.OWN:
        pytest.skip("a GPU's operators are those of half precision")
    device = block_code.drafting_on(place, monkeypatch, tmp_path_factory)
    target, module = (part.to(device) for part in made_for(variant, dtype))
    tokens, found = prompts(3, 17, vocab=VOCAB)["input_ids"], []
    for exact, modules in ((True, True), (False, True), (False, False)):
        of = (copy.deepcopy(module).double(), copy.deepcopy(target).double()) if exact else (module, target)
        source = started(*of, tokens, [0, 4, 16], modules=modules)
        assert modules or source.operator is not None
        assert source.rows.operator == ("cuda" if replay.is_gpu(source.rows.device) else "auto")
        found.append([t.double() for t in computed(source)])
    for number, (exactly, theirs, ours) in enumerate(zip(*found, strict=True)):
        assert ours.isfinite().all()
        assert (ours - exactly).norm() <= 2 * (theirs - exactly).norm() + 1e-6 * exactly.norm(), number
