"""Checkpoints of drafters: every layout is the same drafter, loaded once; what cannot be served is refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import tiny_configs
import torch
import transformers
from models import prompts, tiny
from safetensors.torch import load_file, save_file
from sources.drafters import (
    add,
    dflash_config,
    eagle3_config,
    generate,
    give_head,
    random_dflash,
    random_eagle3,
    safeailab,
    save,
    saved,
    target_of,
)
from sources.rows import MEDUSA, assistant, filled, gemma, medusa_tensors, mtp, random_assistant

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, Mtp
from gsd_kernels_hf.sources import checkpoints
from gsd_kernels_hf.sources.checkpoints import Checkpoint
from gsd_kernels_hf.sources.load import load_drafter, loaded, source_of

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LAYERS = "eagle_aux_hidden_state_layer_ids"
AT = "model.layers.2."
"""Of a head in GLM's checkpoint."""


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=3, dtype=torch.float32)


def ones(*shape):
    return torch.ones(shape)


# What cannot be served: a good folder of each kind, and what is changed of it.


def eagle3(target, folder, tensors=None, **changes):
    good = eagle3_config(target, **{k: v for k, v in changes.items() if k == "draft_vocab_size" and v == 61})
    stored = safeailab(random_eagle3(good).float()) | (tensors or {})
    return save(folder, good | changes, {name: value for name, value in stored.items() if value is not None})


def spoilt(target, folder, name, text):
    """A file with another text; weights lie outside."""
    eagle3(target, folder)
    (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
    (folder / name).write_text(text)
    return folder


def head(target, folder, whole=None, **tensors):
    """GLM's target with a head, whose tensors have these names behind :data:`AT`."""
    given = saved("glm", folder) | {f"{AT}{name}": value for name, value in tensors.items()}
    return with_head(folder, "glm", whole or given)


def with_head(folder, name, tensors):
    shutil.rmtree(folder, ignore_errors=True)
    target_of(name).save_pretrained(folder)
    add(folder, tensors)
    return folder


OUTSIDE = json.dumps({"weight_map": {"fc.weight": "../outside.safetensors"}})
BAD_EAGLE3 = [
    ({"vocab_size": 5000, "draft_vocab_size": 97}, "vocabulary of 5000 tokens, and the target has 97"),
    ({"target_hidden_size": 64}, "hidden states of size 64, and the target's are 32"),
    ({LAYERS: [0, 1, 9]}, "reads hidden state 9, and the target has 3 layers"),
    ({"intermediate_size": 50}, "is [48, 32], and its config means [50, 32]"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' in its config"),
    ({"draft_vocab_size": 61, "tensors": {"d2t": torch.full((61,), 90)}}, "outside the vocabulary"),
    ({"tensors": {"midlayer.self_attn.o_proj.weight": None}}, "no tensor layers.0.self_attn.o_proj.weight"),
    ({"tensors": {"experts.weight": ones(2)}}, "a tensor experts.weight, which this kind"),
    ({"tensors": {"norm.weight": ones(32) * torch.nan}}, "holds NaN or infinity"),
    ({"tensors": {"layers.0.mlp.up_proj.weight": ones(2)}}, "midlayer.mlp.up_proj.weight, which are the same"),
    ({"tensors": {"fc.weight_scale_inv": ones(2)}, "quantization_config": {"weight_block_size": 3}}, "got 3"),
    ({"draft_vocab_size": 98}, "draft_vocab_size=98 in its config is more than vocab_size=97"),
    ({"fc_norm": 3}, "fc_norm in its config: expected true or false, got 3"),
    ({LAYERS: [1, 1]}, "expected a list of different layers, got [1, 1]"),
    ({"parallel_drafting": 1}, "without its tensor mask_hidden"),
    ({"tensors": {"mask_hidden": ones(96)}}, "whose config has no mask token"),
    ({"speculators_model_type": "x"}, "is of speculators' kind 'x'; served are"),
    ({"architectures": ["LlamaDSpark"]}, "is a DSpark drafter of other layers"),
    ({"medusa_num_heads": 2}, "has no Medusa heads"),
    ({"architectures": ["Gemma4AssistantForCausalLM"], "text_config": 3}, "a Gemma 4 assistant"),
]
BAD = [
    *((eagle3, *row) for row in BAD_EAGLE3),
    (spoilt, {"name": "pytorch_model.bin", "text": ""}, "a pickle, which is not loaded since it may run code; convert"),
    (spoilt, {"name": INDEX, "text": OUTSIDE}, "which is outside the folder"),
    (spoilt, {"name": INDEX, "text": '{"weight_map": 1}'}, "has no weight_map of file names"),
    (
        *(spoilt, {"name": CONFIG, "text": '{"architectures": ["LlamaForCausalLM"]}'}),
        "is a language model (LlamaForCausalLM), not a drafter",
    ),
    (head, {"whole": {"other.weight": ones(1)}}, "no multi-token-prediction heads; looked for were layers.2.eh_proj"),
    (head, {"self_attn.q_proj.qweight": ones(1)}, f"are quantised ({AT}self_attn.q_proj.qweight); served are"),
]
VALUES = ("outside the vocabulary", "holds NaN or infinity")


@pytest.mark.parametrize(("made", "changes", "words"), BAD, ids=[words[:40] for *_, words in BAD])
def test_a_folder_that_cannot_be_served_is_refused_by_name(made, changes, words, target, tmp_path, monkeypatch):
    """Nothing was read, unless only the values show it."""
    of, read, honest = target_of("glm") if made is head else target, [], Checkpoint._read
    where = made(of, tmp_path / "drafter", **changes)
    monkeypatch.setattr(Checkpoint, "_read", lambda self: read.append(1) or honest(self))
    with pytest.raises(ValueError, match=f"^drafter: .*{re.escape(words)}"):
        Mtp.from_pretrained(where, of) if made is head else gsd.patch(of, drafter=where)
    assert bool(read) == (words in VALUES) and "_gsd_patch" not in vars(of)


def test_what_is_no_folder_and_another_models_drafter(target):
    own = DraftHeads.for_model(target, 2)
    for of, options, words in (
        (target, {"drafter": own, "draft_heads": own}, "drafter: these are heads, and draft_heads has others"),
        (tiny(), {"drafter": "mtp"}, "names no checkpoint"),
        (target, {"drafter": random_eagle3(eagle3_config(target)).to("meta")}, "is on meta, and"),
        (target, {"draft_heads": own.to("meta")}, "draft_heads: on meta, and"),
        (target_of("glm"), {"drafter": mtp("deepseek")}, "is a DeepseekV3DecoderLayer, and the target's layers are"),
        (gemma(), {"assistant_model": random_assistant()}, r"pass drafter= its folder, or gsd_kernels\.Gemma4Assis"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            generate(of, **prompts(1, 4, vocab=60), **options)


# Layouts: one drafter in each that its makers, and those of servers, give its folder.


def nested(kind, config, *own):
    """Speculators' layout: its layers' config inside the drafter's."""
    return {"speculators_model_type": kind, **{name: config.pop(name) for name in own}, NESTED: config}


NESTED = "transformer_layer_config"
FLAGS = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}


def eagle3_in(layout, target):
    config = eagle3_config(target, draft_vocab_size=29, **{LAYERS: [1, 2, 3]})
    module = random_eagle3(config)
    tensors = safeailab(module)
    if layout == "SGLang":  # whose list is of layers' outputs
        config["eagle_config"] = {LAYERS: [i - 1 for i in config.pop(LAYERS)]}
    if layout == "speculators":
        config, tensors = nested("eagle3", config, "draft_vocab_size", LAYERS), module.state_dict()
    return module, config, tensors


def p_eagle_in(layout, target):
    config = eagle3_config(target, mask_token_id=3, num_hidden_layers=2, **FLAGS)
    config["speculators_config"] = {"proposal_methods": [{"speculative_tokens": 5}]}
    module = random_eagle3(config, mask_shape=(1, 1, 96))
    if layout == "speculators":
        own = ("speculators_config", "mask_token_id", "draft_vocab_size", LAYERS, *FLAGS)
        return module, nested("peagle", config, *own), module.state_dict()
    return module, config | {"architectures": ["PeagleLlamaForCausalLM"]}, safeailab(module)


def dspark_in(layout, target, **inner):
    config = dflash_config(target, inner={"markov_rank": 6, "sample_from_anchor": True}, block_size=4)
    module = random_dflash(config, confidence=(1, 38))
    inner, block = config.pop("dflash_config"), {"block_size": config.pop("block_size")}
    if layout == "z-lab":
        config |= {"dflash_config": inner, **block}
    elif layout == "newer":
        config["dflash_config"] = inner | block
    elif layout == "DeepSpec":
        config |= {**inner, **block, "architectures": ["Qwen3DSparkModel"]}
    else:
        inner["aux_hidden_state_layer_ids"] = [i + 1 for i in inner.pop("target_layer_ids")]
        del config["architectures"], config["auto_map"]
        config = {**nested("dspark", config), **inner, **block}
    return module, config, module.state_dict()


LAYOUTS = {
    eagle3_in: ("SafeAILab", "SGLang", "speculators"),
    p_eagle_in: ("speculators", "vLLM"),
    dspark_in: ("z-lab", "newer", "DeepSpec", "speculators"),
}


@pytest.mark.parametrize(
    ("made", "layout"),
    [(made, layout) for made, layouts in LAYOUTS.items() for layout in layouts],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_layouts_are_the_same_drafter(made, layout, target, tmp_path):
    module, config, tensors = made(layout, target)
    found = load_drafter(save(tmp_path, config, tensors), target)
    assert settings(found) == settings(module.eval()) and repr(found) == repr(module)
    assert type(source_of(found)) is type(source_of(module))
    same(found, module.float())


def settings(module):
    return [(name, value) for name, value in vars(module).items() if not (name.startswith("_") or callable(value))]


def same(found, module):
    want = module if isinstance(module, dict) else module.state_dict()
    assert found.state_dict().keys() == want.keys()
    for name, value in found.state_dict().items():
        assert torch.equal(value, want[name]), name


def test_layers_that_a_config_does_not_say_are_spread(tmp_path):
    large = tiny(num_hidden_layers=32, hidden_size=8, dtype=torch.float32)
    found = load_drafter(eagle3(large, tmp_path, **{LAYERS: None}), large)
    assert found.layers_of(large) == (2, 16, 29)


@torch.no_grad()
def test_medusas_heads_are_their_blocks_and_their_own_matrices(target, tmp_path):
    tensors, hidden = medusa_tensors(target, layers=2), torch.randn(4, 32)
    stored = {f"medusa_head.{name}": value for name, value in tensors.items()} | {"lm_head.weight": ones(2, 2)}
    found = load_drafter(save(tmp_path, MEDUSA, stored), target)
    for head in range(3):
        state = hidden
        for layer in range(2):
            weight, bias = (tensors[f"{head}.{layer}.linear.{part}"] for part in ("weight", "bias"))
            state = state + torch.nn.functional.silu(torch.nn.functional.linear(state, weight, bias))
        want = state @ tensors[f"{head}.2.weight"].T
        torch.testing.assert_close(found(hidden, target.lm_head)[:, head], want)
    found.save_pretrained(tmp_path / "heads")
    file = tmp_path / "heads" / "draft_heads.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"license": "whoever published them"}))
    same(DraftHeads.from_pretrained(tmp_path / "heads"), found)


def test_a_gemma_assistant_by_its_folder(tmp_path):
    assistant().model.save_pretrained(tmp_path)
    same(loaded(tmp_path, gemma()), assistant())


# Heads of multi-token prediction, however they lie in a target's checkpoint.


def test_the_heads_of_a_model_of_images(tmp_path):
    """As Qwen3.5 is published: the head's tensors lie outside, the text is that of the whole model."""
    sizes = tiny_configs.shrunk(transformers.Qwen3_5Config, 2)
    sizes["text_config"]["layer_types"] = ["linear_attention", "full_attention"]
    sizes["vision_config"] |= {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
    filled(transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(**sizes))).save_pretrained(tmp_path)
    head = give_head(tmp_path, "qwen3.5")
    for kind in (transformers.Qwen3_5ForConditionalGeneration, transformers.AutoModelForCausalLM):
        target = kind.from_pretrained(tmp_path, dtype=torch.float64).eval()
        assert torch.equal(loaded("mtp", target).projection.weight, head["mtp.fc.weight"])


def one_file(folder, head):
    whole = load_file(folder / "model-00001.safetensors") | head
    (folder / INDEX).unlink()
    save_file(whole, folder / WEIGHTS, {"format": "pt"})


def beside_one_file(folder, head):
    """As quantisers write a model of one file, and what transformers does not load of it."""
    (folder / "model-00001.safetensors").rename(folder / WEIGHTS)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace("model-00001.safetensors", WEIGHTS))


def more_heads(folder, head):
    """Beside the first one, and copies of the target's matrices."""
    more = {name.replace("layers.0", "layers.1"): value + 1 for name, value in head.items() if "layers.0" in name}
    with_head(folder, "mellum", head | more | {"mtp.embed_tokens.weight": ones(3, 3)})


@pytest.mark.parametrize(("change", "name"), [(one_file, "glm"), (beside_one_file, "glm"), (more_heads, "mellum")])
def test_the_first_head_is_read_however_it_lies_there(change, name, tmp_path):
    head = saved(name, tmp_path)
    want = Mtp.from_pretrained(tmp_path, target_of(name))
    change(tmp_path, head)
    same(Mtp.from_pretrained(tmp_path, target_of(name)), want)


def test_heads_in_fp8_are_what_their_scales_say(tmp_path):
    """As DeepSeek-V3 is published: blocks of FP8, the last of them cut off, each with a scale."""
    want, target, rows, columns = saved("deepseek", tmp_path), target_of("deepseek"), 24, 20
    stored = dict(want)
    for name, value in stored.copy().items():
        if value.dim() == 2 and "gate.weight" not in name and "eh_proj" not in name:
            n, k = (-(-size // step) for size, step in zip(value.shape, (rows, columns), strict=True))
            scale = torch.rand(n, k, generator=torch.Generator().manual_seed(n)) * 0.05 + 0.01
            spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: len(value), : value.shape[1]]
            stored[name], stored[f"{name}_scale_inv"] = (value.float() / spread).to(torch.float8_e4m3fn), scale
            want[name] = (stored[name].float() * spread).double()
    plain = Mtp.from_pretrained(with_head(tmp_path, "deepseek", want), target)
    folder = with_head(tmp_path, "deepseek", stored)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"quantization_config": {"weight_block_size": [rows, columns]}}))
    same(Mtp.from_pretrained(folder, target), plain)


# Loading: what a call drafts with is made once, the hub asked for an id once.


@pytest.fixture
def hub(monkeypatch):
    """What the hub is asked for, and the folder that it gives."""
    given = {"asked": []}

    def download(name, **how):
        given["asked"].append((name, how))
        if "folder" not in given:
            raise OSError("offline")
        return str(given["folder"])

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    return given


def test_a_folder_is_loaded_once_until_its_files_change(target, tmp_path):
    config = eagle3_config(target)
    save(tmp_path, config, safeailab(random_eagle3(config)))
    first = loaded(tmp_path, target)
    assert loaded(str(tmp_path), target) is first
    save(tmp_path, config, safeailab(random_eagle3(config, seed=1)))
    os.utime(tmp_path / WEIGHTS, ns=(1, 1))  # of the same size
    second = loaded(tmp_path, target)
    assert second is not first and not torch.equal(second.fc.weight, first.fc.weight)
    other = tiny(num_hidden_layers=3)
    assert loaded(tmp_path, other) is not second
    assert loaded(tmp_path, other.half()).fc.weight.dtype == torch.float16


def test_the_hub_is_asked_for_an_id_once(hub, target, tmp_path):
    """Not for code and pickles, not at every call; again where the folder that it gave is gone."""
    with pytest.raises(ValueError, match="could not be fetched from the hub: offline"):
        gsd.patch(target, drafter="someone/other")
    hub["folder"] = eagle3(target, tmp_path / "a")
    hub["asked"].clear()
    for _ in range(2):
        generate(target, **prompts(1, 6), new=4, drafter="someone/once")
    ((name, how),) = hub["asked"]
    assert name == "someone/once" and how["allow_patterns"] == ["*.json", "*.safetensors"]
    hub["folder"] = hub["folder"].rename(tmp_path / "b")
    loaded("someone/once", target)
    assert len(hub["asked"]) == 2


def test_of_a_targets_files_only_those_with_heads_are_fetched(hub, tmp_path):
    """At the commit that the target was loaded from."""
    saved("glm", tmp_path)
    target, asked, hub["folder"] = target_of("glm"), hub["asked"], tmp_path
    (tmp_path / "model-00001.safetensors").write_bytes(b"not read")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target.config, "name_or_path", "someone/glm")
        patch.setattr(target.config, "_commit_hash", "abc", raising=False)
        head = loaded("mtp", target)
        assert [how["allow_patterns"] for _, how in asked] == [["*.json", WEIGHTS], ["model-00002.safetensors"]]
        assert all(name == "someone/glm" and how["revision"] == "abc" for name, how in asked)
        assert loaded("mtp", target) is head and len(asked) == 2
