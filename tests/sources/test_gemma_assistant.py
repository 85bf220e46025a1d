"""Gemma 4's assistants as drafts: the same text as without, and the drafts of transformers' own forward."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import transformers
from models import prompts
from sources.drafters import descended, generate
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from gsd_kernels import Gemma4Assistant, GraphConfig
from gsd_kernels_hf import validate
from gsd_kernels_hf.sources.load import loaded_drafter

pytestmark = pytest.mark.skipif(not hasattr(transformers, "Gemma4AssistantForCausalLM"), reason="an older transformers")

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "sliding_window": 6,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
OWN = {"hidden_size": 16, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
TREE = GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=-1)


def filled(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    return model.double().eval()


@functools.cache
def target_of(**changes):
    return filled(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**SIZES, **changes})))


def random_assistant(*, backbone=32, ordered=False, **changes):
    config = transformers.Gemma4TextConfig(**{**SIZES, **OWN, "num_kv_shared_layers": 2, **changes})
    more = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 5} if ordered else {}
    own = transformers.Gemma4AssistantConfig(text_config=config, backbone_hidden_size=backbone, **more)
    model = filled(transformers.Gemma4AssistantForCausalLM(own))
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model


class Before:
    """Attention of all places of a text at once: a row sees what was stored before it."""

    def attend(self, module, query, key, value, attention_mask, scaling, options):
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=scaling)


@functools.cache
def assistant_of(ordered: bool = False) -> Gemma4Assistant:
    """Fitted to the target's own text: two levels, the second one reading the first one's vectors."""
    target, module = target_of(), Gemma4Assistant(random_assistant(ordered=ordered))
    ids = torch.randint(3, VOCAB, (12, 4), generator=torch.Generator().manual_seed(9))
    text = target.generate(ids, max_new_tokens=26, do_sample=False)
    with torch.no_grad():
        out = target(text, output_hidden_states=True, return_shared_kv_states=True)
    states, embed = out.hidden_states[-1].float(), target.get_input_embeddings()

    def loss():
        features, total = states[:, :-2], 0.0
        positions = torch.arange(1, features.shape[1] + 1).expand(len(text), -1)
        for level in range(2):
            length = text.shape[1] - 2 - level
            stored = {kind: tuple(t[:, :, :length].float() for t in kv) for kind, kv in out.shared_kv_states.items()}
            embedded = embed(text[:, 1 + level : 1 + level + length]).detach().float()
            features, logits = module(embedded, features[:, :length], positions[:, :length], stored, Before())
            total = total + cross_entropy(logits.clamp(min=-50).flatten(0, 1), text[:, 2 + level :].flatten())
        return total

    return descended(module, 50, 0.01, loss).double()


@pytest.mark.parametrize("ordered", [False, True])
@torch.no_grad()
def test_drafts_are_those_of_transformers_forward(ordered):
    """Root and second level, behind padding and beyond the sliding window."""
    target, module = target_of(), assistant_of(ordered)
    ids, seen = prompts(1, 17, vocab=VOCAB)["input_ids"], []
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(20) >= 3).long()[None]
    for inputs in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask}):
        drafts = []
        options = {
            "do_sample": False,
            "draft_sources": ("drafter",),
            "graph_config": GraphConfig.preset("chain", depth=3),
        }
        keep = lambda v, drafts=drafts: drafts.append((v.rows.token_ids + 0, v.rows.scores + 0))  # noqa: E731
        generate(target, drafter=module, observer=keep, **options, **inputs)
        seen.append(drafts[0])
    assert torch.equal(seen[0][0], seen[1][0])
    torch.testing.assert_close(seen[0][1], seen[1][1])

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
    assert seen[0][0][0].tolist() == tokens
    torch.testing.assert_close(seen[0][1][0].double(), torch.tensor(scores, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_by_its_folder(tmp_path):
    target, options = target_of(), {"do_sample": False, **prompts(1, 9, vocab=VOCAB)}
    assistant_of().model.save_pretrained(tmp_path)
    found, want = loaded_drafter(tmp_path, target).state_dict(), assistant_of().state_dict()
    assert found.keys() == want.keys() and all(torch.equal(found[name], value) for name, value in want.items())
    plain = generate(target, **options, graph_config="plain").sequences
    out = generate(target, **options, drafter=tmp_path, graph_config=TREE)
    assert torch.equal(out.sequences, plain) and sum(out.stats.accepted[2:]) > 0


BAD = {
    "vocabulary": ({"vocab_size": 5000}, {}, "vocabulary of 5000 tokens, and the target has 64"),
    "width": ({"backbone": 48}, {}, "hidden states of size 48, and the target's are 32"),
    "types": (
        {},
        {"layer_types": ["full_attention"] * 4},
        "keys and values of sliding_attention layers, which Gemma4ForCausalLM does not have",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_another_models_assistant_is_refused(what, tmp_path):
    own, theirs, message = BAD[what]
    random_assistant(**own).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    target = filled(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**SIZES, **theirs})))
    with pytest.raises(ValueError, match=message):
        generate(target, **prompts(1, 4, vocab=VOCAB), drafter=tmp_path)


def test_as_a_draft_model_it_is_refused_with_the_cure():
    """Of a patched model such a call goes to transformers, which takes it so."""
    with pytest.raises(validate.Unsupported, match=r"pass drafter= its folder, or gsd_kernels\.Gemma4Assistant"):
        generate(target_of(), **prompts(1, 4, vocab=VOCAB), assistant_model=random_assistant())


def test_a_config_that_is_none(tmp_path):
    random_assistant().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["hidden_size_per_layer_input"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no readable config of a Gemma 4 assistant: [\s\S]*must be 0, got 8"):
        generate(target_of(), **prompts(1, 4, vocab=VOCAB), drafter=tmp_path)
