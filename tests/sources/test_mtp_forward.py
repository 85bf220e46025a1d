"""Forwards of multi-token-prediction heads: equal to transformers' own where it has them, and to the wiring."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from models import prompts
from sources.drafters import started
from sources.mtp_checkpoints import FAMILIES, Causal, saved, target_of

from gsd_kernels import Mtp

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
LENGTH = 5  # within every sliding window


def inputs_for(target):
    """Tokens [1, LENGTH + 1] and the target's last hidden states [1, LENGTH, D], float32."""
    ids = prompts(1, LENGTH + 1, vocab=60)["input_ids"]
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states[-1]
    return ids, states[:, :LENGTH]


def loaded(name, folder):
    target = copy.deepcopy(target_of(name)).float()
    head = saved(name, folder)
    return target, {full: value.float() for full, value in head.items()}, Mtp.from_pretrained(folder, target)


def mine(module, target, ids, states):
    positions = torch.arange(LENGTH)[None]
    return module(target.get_input_embeddings()(ids[:, 1:]), states, positions, Causal())


def norm(x, weight, eps, zero_centred):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight if zero_centred else weight)


def written_out(name, target, head, ids, states):
    """The head's output by its description, its decoder layer run as transformers runs one of the target's."""
    family, text = FAMILIES[name], target.config.get_text_config(decoder=True)
    zero_centred = name.startswith("qwen")
    projection, of_embedding, of_hidden, of_output = family.names

    def normed(x, weight):
        return norm(x, weight, text.rms_norm_eps, zero_centred)

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
    for theirs, ours in {v: k for k, v in family.renamed.items()}.items():
        tensors = {inner.replace(theirs, ours): value for inner, value in tensors.items()}
    layer.load_state_dict(with_stacked_experts(tensors, layer.state_dict()), strict=True)
    positions = torch.arange(LENGTH)[None]
    rotary = target.model.rotary_emb
    typed = (own.layer_types[family.layer],) if name in ("mellum", "mimo-v2") else ()
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    hidden = layer(
        hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary(hidden, positions, *typed)
    )
    last = target.model.norm.weight if of_output is None else head[f"{of_output}.weight"]
    return normed(hidden, last)


def with_stacked_experts(tensors, like):
    found = {}
    for name in like:
        if name in tensors:
            found[name] = tensors[name]
            continue
        base, what = re.fullmatch(r"(.*experts)\.(gate_up_proj|down_proj)", name).groups()
        count = like[name].shape[0]
        kinds = ["gate_proj", "up_proj"] if what == "gate_up_proj" else ["down_proj"]
        found[name] = torch.stack(
            [torch.cat([tensors[f"{base}.{i}.{kind}.weight"] for kind in kinds]) for i in range(count)]
        )
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_the_wiring(name, tmp_path):
    target, head, module = loaded(name, tmp_path)
    ids, states = inputs_for(target)
    with torch.no_grad():
        found, want = mine(module, target, ids, states), written_out(name, target, head, ids, states)
        torch.testing.assert_close(found, want, **TOLERANCE)
        swapped = mine(module, target, ids.flip(1), states)
    assert (found - swapped).abs().max() > 0.1


@pytest.mark.parametrize("name", ["glm", "deepseek", "mimo", "exaone"])
def test_rows_of_a_cache_are_the_same_forward(name, tmp_path):
    """Entries made of a prompt in pieces, then a level: as the whole text at once, where a node reads its parent's."""
    target, _, module = loaded(name, tmp_path)
    ids, states = inputs_for(target)
    source = started(module, target, ids)
    with torch.no_grad():
        whole = mine(module, target, ids, states)
        for end in (2, 3, LENGTH):
            entry, _ = source.feed(torch.tensor([end], dtype=torch.int32), 2, keep=1)
            torch.testing.assert_close(entry[:, 0], whole[:, end - 1], **TOLERANCE)
        following = torch.tensor([[7]], dtype=torch.int32)
        zeros = torch.zeros(1, 1, dtype=torch.int32)
        graph = zeros[..., None] + 1, zeros, zeros
        node, _ = source.forward(following, entry, source.cached, zeros, *graph, keep=1)
        longer = module(
            target.get_input_embeddings()(torch.cat([ids[:, 1:], following], 1)),
            torch.cat([states, entry], 1),
            torch.arange(LENGTH + 1)[None],
            Causal(),
        )
    torch.testing.assert_close(node[:, 0], longer[:, -1], **TOLERANCE)
