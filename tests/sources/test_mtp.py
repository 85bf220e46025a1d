"""Multi-token-prediction heads as drafts: the same text as without, read from the target's own checkpoint."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import tempfile
from pathlib import Path

import pytest
import tiny_configs
import torch
import transformers
from models import prompts, tiny
from safetensors.torch import load_file, save_file
from sources.drafters import generate
from sources.mtp_checkpoints import add, fit, give_head, saved, target_of

import gsd_kernels as gsd
from gsd_kernels import GraphConfig, Mtp
from gsd_kernels_hf.sources import checkpoints
from gsd_kernels_hf.sources.load import loaded_drafter

GRAPHS = {
    "chain": GraphConfig.preset("chain", depth=4),
    "tree": GraphConfig(depth=3, width=2, branch=3, max_rows=16, merge_context=-1),
    "graph": GraphConfig(depth=4, width=3, branch=3, max_rows=32, merge_context=0, history_depth=2, history_width=4),
}


@functools.cache
def head_of(name: str) -> Mtp:
    """A head from a checkpoint, trained so that it is right now and then."""
    folder = Path(tempfile.mkdtemp())
    try:
        saved(name, folder)
        return fit(Mtp.from_pretrained(folder, target_of(name)), target_of(name), steps=40)
    finally:
        shutil.rmtree(folder)


def reloaded(name: str, folder: Path):
    target = type(target_of(name)).from_pretrained(folder, dtype=torch.float64).eval()
    target.set_experts_implementation("eager")
    target.generation_config.eos_token_id = None
    return target


def test_a_hybrid_target_has_a_head_of_full_attention(tmp_path):
    saved("qwen3.5", tmp_path)
    target = reloaded("qwen3.5", tmp_path)
    options = {"do_sample": False, **prompts(2, 12, vocab=60), "eos_token_id": None}
    plain = generate(target, new=24, **options, graph_config="plain").sequences
    out = generate(target, new=24, **options, drafter="mtp", graph_config=GRAPHS["graph"])
    assert torch.equal(out.sequences, plain) and len(plain.unique()) >= 15
    assert out.stats.draft_rows > 0 and sum(out.stats.accepted[2:]) > 0 and out.stats.accepted[1] > 0


def test_the_language_model_inside_a_model_of_images(tmp_path):
    """As Qwen3.5 is published: the head's tensors lie outside, the text is that of the whole model."""
    sizes = tiny_configs.shrunk(transformers.Qwen3_5Config, 2)
    sizes["text_config"]["layer_types"] = ["linear_attention", "full_attention"]
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16}
    sizes["vision_config"].update(vision)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(**sizes)).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    head = give_head(tmp_path, "qwen3.5")
    for kind in (transformers.Qwen3_5ForConditionalGeneration, transformers.AutoModelForCausalLM):
        target = kind.from_pretrained(tmp_path, dtype=torch.float64).eval()
        assert torch.equal(loaded_drafter("mtp", target).projection.weight, head["mtp.fc.weight"])
        options = {"do_sample": False, **prompts(1, 9, vocab=60), "eos_token_id": None}
        plain = generate(target, **options, graph_config="plain").sequences
        out = generate(target, **options, drafter="mtp", graph_config=GRAPHS["tree"])
        assert torch.equal(out.sequences, plain) and out.stats.draft_rows > 0


def test_of_a_hub_id_only_files_with_heads_are_fetched(tmp_path, monkeypatch, caplog):
    """At the commit that the target was loaded from; to mention heads the hub is not asked."""
    saved("glm", tmp_path)
    target, asked = reloaded("glm", tmp_path), []
    (tmp_path / "model-00001.safetensors").rename(tmp_path / "mapped")  # by the target
    (tmp_path / "model-00001.safetensors").write_bytes(b"not read")
    target.config.name_or_path, target.config._commit_hash = "someone/glm", "abc"
    monkeypatch.setattr(
        checkpoints, "snapshot_download", lambda name, **how: asked.append((name, how)) or str(tmp_path)
    )
    head = loaded_drafter("mtp", target)
    assert [how["allow_patterns"] for _, how in asked] == [["*.json"], ["model-00002.safetensors"]]
    assert all(name == "someone/glm" and how["revision"] == "abc" for name, how in asked)
    assert loaded_drafter("mtp", target) is head and len(asked) == 2
    with gsd.patch(target):
        assert len(asked) == 2, "nobody would read the line"
    with caplog.at_level(logging.INFO, "gsd_kernels"), gsd.patch(target):
        assert len(asked) == 3 and asked[-1][1]["local_files_only"]


def test_one_file_without_an_index(tmp_path):
    head = saved("glm", tmp_path)
    whole = load_file(tmp_path / "model-00001.safetensors") | head
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    assert isinstance(loaded_drafter("mtp", reloaded("glm", tmp_path)), Mtp)


def test_later_heads_and_copies_are_left_alone(tmp_path):
    """Of several heads the first is read; embedding and output matrix are the target's."""
    head = saved("mellum", tmp_path)
    target = target_of("mellum")
    more = {name.replace("layers.0", "layers.1"): value + 1 for name, value in head.items() if "layers.0" in name}
    path = tmp_path / "model-00002.safetensors"
    save_file({**head, **more, "mtp.embed_tokens.weight": torch.ones(3, 3)}, path, {"format": "pt"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys([*more, "mtp.embed_tokens.weight"], path.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(Mtp.from_pretrained(tmp_path, target).projection.weight, head["mtp.fc.weight"])


def test_fused_experts_are_read_too(tmp_path):
    head = saved("glm", tmp_path)
    target = target_of("glm")
    want = Mtp.from_pretrained(tmp_path, target).state_dict()
    fused = {name: value for name, value in head.items() if ".experts." not in name}
    at = "model.layers.2.mlp.experts."
    for what in ("gate_up_proj", "down_proj"):
        fused[at + what] = want[f"block.mlp.experts.{what}"]
    shutil.rmtree(tmp_path)
    target.save_pretrained(tmp_path)
    add(tmp_path, fused)
    found = Mtp.from_pretrained(tmp_path, target).state_dict()
    assert all(torch.equal(found[name], value) for name, value in want.items())


def test_heads_in_fp8_are_what_their_scales_say(tmp_path):
    """As DeepSeek-V3 is published: blocks of FP8, the last of them cut off, each with a scale."""
    head, target, rows, columns = saved("deepseek", tmp_path), target_of("deepseek"), 24, 20
    want, stored = {}, {}
    for name, value in head.items():
        if value.dim() < 2 or "gate.weight" in name or "eh_proj" in name:
            want[name] = stored[name] = value
            continue
        n, k = (-(-size // step) for size, step in zip(value.shape, (rows, columns), strict=True))
        scale = torch.rand(n, k, generator=torch.Generator().manual_seed(n)) * 0.05 + 0.01
        spread = scale.repeat_interleave(rows, 0)[: value.shape[0]].repeat_interleave(columns, 1)[:, : value.shape[1]]
        stored[name], stored[f"{name}_scale_inv"] = (value.float() / spread).to(torch.float8_e4m3fn), scale
        want[name] = (stored[name].float() * spread).double()
    folders = {"plain": want, "fp8": stored}
    for folder, tensors in folders.items():
        target.save_pretrained(tmp_path / folder)
        add(tmp_path / folder, tensors)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    plain, fp8 = (Mtp.from_pretrained(tmp_path / folder, target).state_dict() for folder in folders)
    assert all(torch.equal(fp8[name], value) for name, value in plain.items())
    config["quantization_config"]["weight_block_size"] = [24]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"weight_block_size in its config: expected two positive integers, got \[24\]"
    ):
        Mtp.from_pretrained(tmp_path / "fp8", target)


# What cannot be served.


def changed(tmp_path, name, change):
    """The head's tensors after ``change``, which may add, drop or reshape."""
    head = saved(name, tmp_path)
    shutil.rmtree(tmp_path)
    target_of(name).save_pretrained(tmp_path)
    add(tmp_path, {full: value for full, value in change(head).items() if value is not None})
    return Mtp.from_pretrained(tmp_path, target_of(name))


AT = "model.layers.2."
BAD = {
    "none": (
        lambda head: {"other.weight": torch.ones(1)},
        r"no multi-token-prediction heads; looked for were layers\.2\.eh_proj",
    ),
    "another layout": (
        lambda head: {"mtp.odd.weight": torch.ones(1)},
        r"it has mtp\.odd\.weight, of a layout that is not",
    ),
    "width": (
        lambda head: head | {f"{AT}eh_proj.weight": torch.ones(32, 32)},
        r"model\.layers\.2\.eh_proj\.weight .*is \[32, 32\]",
    ),
    "an expert less": (
        lambda head: head | {f"{AT}mlp.experts.3.up_proj.weight": None},
        r"none of Glm4MoeForCausalLM's layers: it has no model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight",
    ),
    "quantised": (
        lambda head: head | {f"{AT}self_attn.q_proj.qweight": torch.ones(1)},
        r"are quantised \(model\.layers\.2\.self_attn\.q_proj\.qweight\); served are",
    ),
    "scales of other blocks": (
        lambda head: head | {f"{AT}self_attn.q_proj.weight_scale_inv": torch.ones(2, 2)},
        r"model\.layers\.2\.self_attn\.q_proj\.weight_scale_inv .*is \[2, 2\], and its config means \[1, 1\]",
    ),
    "scales of nothing": (
        lambda head: head | {f"{AT}other.weight_scale_inv": torch.ones(1, 1)},
        r"has a tensor model\.layers\.2\.other\.weight_scale_inv, which this kind of drafter has no use for",
    ),
    "NaN": (
        lambda head: head | {f"{AT}enorm.weight": torch.ones(32) * torch.nan},
        r"model\.layers\.2\.enorm\.weight in .* holds NaN",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_served_is_refused_by_name(what, tmp_path):
    change, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        changed(tmp_path, "glm", change)


def test_a_layer_of_an_unknown_type_is_refused(tmp_path):
    """Layers of both types have these tensors, and nothing says which one it is."""
    saved("exaone", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_layer_types": None}))
    target = target_of("exaone")
    config, kept = target.config, target.config.mtp_layer_types
    try:
        config.mtp_layer_types = None
        with pytest.raises(ValueError, match="full_attention or sliding_attention, and its config's mtp_layer_types"):
            Mtp.from_pretrained(tmp_path, target)
    finally:
        config.mtp_layer_types = kept


def test_a_model_without_a_checkpoint_is_refused():
    with pytest.raises(ValueError, match="names no checkpoint"):
        gsd.generate(tiny(), prompts(1, 4)["input_ids"], drafter="mtp", max_new_tokens=2)


def test_files_that_are_missing_or_damaged(tmp_path):
    saved("glm", tmp_path)
    target = reloaded("glm", tmp_path)
    (tmp_path / "model-00002.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model-00002\.safetensors is no readable safetensors file"):
        loaded_drafter("mtp", target)
    (tmp_path / "model-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names model-00002\.safetensors, and .* has none"):
        loaded_drafter("mtp", target)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        loaded_drafter("mtp", target)


def test_another_models_head_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="is a DeepseekV3DecoderLayer, and the target's layers are Glm4MoeDecoderLayer"
    ):
        generate(target_of("glm"), drafter=head_of("deepseek"), **prompts(1, 4, vocab=60))


def test_heads_that_are_not_used_are_mentioned(tmp_path, caplog):
    saved("glm", tmp_path)
    target = reloaded("glm", tmp_path)
    for options, mentioned in (({}, True), ({"drafter": "mtp"}, False), ({"graph_config": "plain"}, False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "gsd_kernels"), gsd.patch(target, **options):
            pass
        assert (sum("layers.2.eh_proj.weight" in record.message for record in caplog.records) == 1) == mentioned
    caplog.clear()
    with caplog.at_level(logging.INFO, "gsd_kernels"), gsd.patch(tiny()):
        assert not [record for record in caplog.records if "multi-token" in record.message]
