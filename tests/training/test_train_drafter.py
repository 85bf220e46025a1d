"""``train-drafter``: what it learns, the layouts that it writes, interruption, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from sources.drafters import FixedText, random_tensors
from sources.mtp_checkpoints import target_of
from training.options import options_for
from training.test_commands import done
from training.test_training import windows  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

import gsd_kernels as gsd
from gsd_kernels_hf.sources.base import Prefilled
from gsd_kernels_hf.sources.dflash import DFlashDrafts
from gsd_kernels_hf.sources.edges import along
from gsd_kernels_hf.sources.load import load_drafter
from gsd_kernels_hf.sources.recursion import Recursive
from gsd_kernels_train.dflash import DFlashTraining
from gsd_kernels_train.drafters import DrafterOptions
from gsd_kernels_train.eagle3 import Eagle3Training
from gsd_kernels_train.job import load_target
from gsd_kernels_train.mtp import MtpTraining

QUICK = ["--batch", 4, "--length", 24, "--lr", 0.01, "--checkpoint-every", 5, "--device", "cpu", "--own-sequences", 64]
KINDS = {
    "eagle3": ["--depth", 3, "--draft-vocabulary", 250],
    "dflash": ["--block-size", 4, "--layers", 2],
    "jetspec": ["--block-size", 4, "--layers", 1],
    "dspark": ["--block-size", 3, "--layers", 1, "--markov-rank", 8, "--markov-head", "gated", "--lr", 0.03],
    "mtp": ["--depth", 3],
}


def arguments(kind, folder, out, *more, steps=30):
    given = ["train-drafter", "--target", folder / "target", "--kind", kind, "--out", out, "--steps", steps, *QUICK]
    return [str(a) for a in [*given, *KINDS[kind], *more, "--text", folder / "text.txt"]]


@pytest.fixture(scope="module", params=KINDS)
def trained(request, folder):
    out = folder / request.param
    return request.param, out, done(*arguments(request.param, folder, out, "--sequence-level", 1))


def test_a_drafter_learns_and_our_loader_reads_it(folder, trained):
    _, out, report = trained
    before, after = (report[when]["continuation_accuracy"] for when in ("before", "after"))
    assert len(after) == 3 and sum(after) > sum(before) + 0.05
    assert 0 < report["after"]["accepted"] <= 3 and not (out / "checkpoints").exists()
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    drafter = load_drafter(out, target)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float64}
    ids = AutoTokenizer.from_pretrained(folder / "target")("3 times 3", return_tensors="pt").input_ids
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    options = {"drafter": out, "draft_sources": ("drafter",), "return_dict_in_generate": True}
    drafted = gsd.generate(target, ids, max_new_tokens=24, **options)
    assert torch.equal(drafted.sequences, plain) and drafted.stats.draft_rows > 0


INNER = {"mask_token_id": 0, "target_layer_ids": [1]}
CONFIDENT = {"block_size": 3, "markov_rank": 8, "markov_head_type": "gated", "enable_confidence_head": True}
BLOCK = {"fc", "hidden_norm", "layers", "norm"}
LAYOUTS = {  # architecture, more of the config, what the names of tensors begin with
    "eagle3": (
        "LlamaForCausalLMEagle3",
        {"draft_vocab_size": 250, "eagle_aux_hidden_state_layer_ids": [0, 1]},
        {"fc", "lm_head", "midlayer", "norm", "d2t", "t2d"},
    ),
    "dflash": ("DFlashDraftModel", {"block_size": 4, "dflash_config": INNER}, BLOCK),
    "jetspec": ("DFlashDraftModel", {"block_size": 4, "dflash_config": INNER | {"causal_head": True}}, BLOCK),
    "dspark": ("Qwen3DSparkModel", INNER | CONFIDENT, BLOCK | {"markov_head", "confidence_head"}),
    "mtp": ("LlamaMTP", {"num_nextn_predict_layers": 1}, {"mtp"}),
}


def test_the_layouts_are_the_published_ones(folder, trained):
    kind, out, _ = trained
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    architecture, said, parts = LAYOUTS[kind]
    said |= {"architectures": [architecture], "torch_dtype": "float32", "hidden_size": 32, "vocab_size": 259}
    assert said.items() <= config.items() and {name.split(".")[0] for name in tensors} == parts
    assert {tensors[name].dtype for name in tensors if name not in ("d2t", "t2d")} == {torch.float32}
    if kind == "dspark":
        assert tensors["confidence_head.proj.weight"].shape == (1, 40) and "confidence_head.proj.bias" in tensors
    if kind == "mtp":
        heads = {name.split(".")[1] for name in tensors}
        assert heads == {"fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers"}
    if kind == "eagle3":
        assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 64 and tensors["fc.weight"].shape == (32, 64)
        assert torch.equal(tensors["t2d"].nonzero().flatten(), torch.arange(250) + tensors["d2t"])


def random_training(kind, folder, token_level=1.0, **drafter):
    options = options_for(folder, token_level=token_level)
    target, tokenizer = load_target(options)
    if kind == "mtp":
        trained = MtpTraining(options, target, DrafterOptions(kind, **drafter), torch.float32)
    elif kind != "eagle3":
        trained = DFlashTraining(options, target, DrafterOptions(kind, **drafter), torch.float32, tokenizer)
    else:
        ids = torch.arange(3, 259, 2)
        trained = Eagle3Training(options, target, DrafterOptions(kind, **drafter), torch.float32, ids)
    random_tensors(trained.module)
    trained.module.requires_grad_(False)
    return trained, target


def source_on(kind, trained, target, tokens, states):
    """A draft source that has read ``tokens`` [1, N], once for every place."""
    length = tokens.shape[1]
    text = FixedText(target, tokens.expand(length, -1), torch.zeros(length, dtype=torch.int32))
    source = kind(trained.module)
    source.check(target)
    source.attach(text)
    source.observe(
        Prefilled({n: s.expand(length, -1, -1) for n, s in zip(trained.hidden_layers, states, strict=True)}, 0)
    )
    return text, source


@pytest.mark.parametrize(("kind", "layers"), [("eagle3", 1), ("eagle3", 2), ("mtp", 1)])
def test_levels_are_what_drafting_computes(folder, windows, kind, layers):  # noqa: F811
    trained, target = random_training(kind, folder, layers=layers, depth=3)
    window = windows[:1]  # [1, 13]
    states, _ = trained.read(window)
    levels = trained.levels(window, states)
    places = levels[0].shape[1]
    text, source = source_on(Recursive, trained, target, window, states)
    text.state.out_len.copy_((torch.arange(13) + 2).clamp(max=13))  # entries 0 … i
    vectors, logits = source.feed(text.state.out_len - 1, 13, keep=1)
    torch.testing.assert_close(levels[0][0], logits[:places, 0])
    zeros = torch.zeros(13, 1, dtype=torch.int32)
    for level in (1, 2):
        slots = zeros + level - 1
        tokens = window[0, torch.arange(1 + level, 14 + level).clamp(max=12), None].to(torch.int32)
        path = torch.full((13, 1, 1), 2**level - 1, dtype=torch.int32)
        depths = torch.arange(level, dtype=torch.int32).expand(13, -1)
        graph = path, zeros + level - 1, depths
        vectors, logits = source.forward(tokens, vectors, source.cached, slots, *graph, keep=1)
        torch.testing.assert_close(levels[level][0], logits[:places, 0])


BLOCKS = {
    "dflash": {"block_size": 4},
    "jetspec": {"block_size": 4},
    "dspark": {"block_size": 3, "markov_rank": 5, "markov_head": "rnn"},
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_drafting_computes(folder, windows, kind):  # noqa: F811
    trained, target = random_training(kind, folder, layers=2, **BLOCKS[kind])
    window = windows[:1]
    states, _ = trained.read(window)
    roots = torch.arange(1, 9)
    logits, confidence = trained.outputs(window, states, roots[None])  # [1, 8, 3, V]
    text, source = source_on(DFlashDrafts, trained, target, window, states)
    text.state.out_len.copy_((torch.arange(13) + 2).clamp(max=13))  # roots 1 … 12
    source.enter(text.state.out_len - 1, 13)
    hidden = source.forward_block()[0][:8, -3:]
    expected = target.lm_head(hidden)
    if kind == "dspark":
        tokens = window[0, roots[:, None] + torch.arange(3)]
        expected = along(trained.module.edges, expected, hidden, tokens)
        torch.testing.assert_close(confidence[0], trained.module.confidence(hidden, tokens)[..., 0])
    torch.testing.assert_close(logits[0], expected)
    assert (trained.guessed(window, 0, 8)[0] == expected.argmax(-1)).all()


@pytest.mark.parametrize("name", ["qwen3.5", "mellum", "glm", "exaone"])
def test_heads_of_layers_of_other_classes(folder, tmp_path, windows, name):  # noqa: F811
    """A hybrid's attention layer, one of two types of attention, the dense one beside experts: trained, read, equal."""
    target, options = target_of(name), options_for(folder)
    trained = MtpTraining(options, target, DrafterOptions("mtp", depth=2), torch.float64)
    tokens = windows % target.config.vocab_size
    states, log_target = trained.read(tokens)
    begun = trained.levels(tokens, states)[0].log_softmax(-1)
    torch.testing.assert_close(begun, log_target[:, : begun.shape[1]], atol=1e-4, rtol=0)  # as the target's own guess
    assert hasattr(trained.module.block, "self_attn")
    assert hasattr(trained.module.block.mlp, "experts") == (name == "mellum")  # whose layers all have some
    optimizer = torch.optim.SGD(trained.module.parameters(), 0.1)
    trained.loss(tokens).backward()
    assert all(parameter.grad is not None for parameter in trained.module.parameters())
    optimizer.step()
    trained.save(tmp_path)
    read = load_drafter(tmp_path, target)
    trained.module = read
    after = trained.levels(tokens, states)[0].log_softmax(-1)
    assert not torch.allclose(after, begun)
    drafted = gsd.generate(target, tokens[:1], max_new_tokens=16, drafter=read, draft_sources=("drafter",))
    assert torch.equal(drafted, target.generate(tokens[:1], max_new_tokens=16, do_sample=False))
