"""Drafter checkpoints for tiny targets, fitted by a few steps so that they are right now and then.

Last come heads of multi-token prediction in checkpoints of tiny targets, named as the families' makers do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_configs
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

import gsd_kernels as gsd
from gsd_kernels import DFlash, Eagle3
from gsd_kernels_hf.model.runner import RowModel
from gsd_kernels_hf.records import DecodeState
from gsd_kernels_hf.sources.base import Prefilled
from gsd_kernels_hf.sources.layouts import HEADS, HeadLayout
from gsd_kernels_hf.sources.load import source_of

SIZES = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def generate(target, new=14, **options):
    """A text that may end early, and its statistics."""
    options = {"max_new_tokens": new, "eos_token_id": [5], "pad_token_id": 0, **options}
    return gsd.generate(target, return_dict_in_generate=True, **options)


class FixedText:
    """What a source is told of a session, without one."""

    first = True

    def __init__(self, target, tokens, kv_start):
        batch, length = tokens.shape
        self.state = DecodeState.empty(batch, length + 8, 8, tokens.device)
        self.state.restart(tokens, kv_start, 8, 0)
        self.target = RowModel(target, length + 32, self.state.kv_start, "auto")
        self.sampler = self.draws = None

    def keep(self, rows):
        pass


def states_of(module, target, tokens) -> list[torch.Tensor]:
    """Random states [B, L, D] in place of the target's, which a drafter reads."""
    gen, shape = torch.Generator().manual_seed(3), (*tokens.shape, target.config.hidden_size)
    return [torch.randn(shape, generator=gen).to(target.device, target.dtype) for _ in module.layers_of(target)]


def started(module, target, tokens, pads=None, *, modules: bool = False):
    """A drafter's source behind a text, of whose states it was told in two pieces; ``modules``: it forwards these."""
    source, tokens = source_of(module), tokens.to(target.device)
    pads = torch.tensor([0] * len(tokens) if pads is None else pads, dtype=torch.int32, device=target.device)
    source.check(target)
    with pytest.MonkeyPatch.context() as patch:
        if modules:
            patch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
        source.attach(FixedText(target, tokens, pads))
    states = dict(zip(source.hidden_layers, states_of(module, target, tokens), strict=True))
    for begin, end in ((0, 5), (5, tokens.shape[1])):
        source.observe(Prefilled({number: state[:, begin:end] for number, state in states.items()}, begin))
    return source


class Causal:
    """Attention of a whole text at once: what the inputs of rows are for rows of a cache."""

    def attend(self, module, query, key, value, attention_mask=None, scaling=None, options=None):
        sinks, length = (options or {}).get("s_aux"), query.shape[2]
        unseen = torch.full((1, query.shape[1], length, length), -torch.inf, dtype=query.dtype).triu(1)
        if sinks is not None:  # as the logits of a key whose value is 0
            unseen = torch.cat([unseen, sinks.view(1, -1, 1, 1).expand(1, -1, length, 1)], -1)
            key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
        scale = module.scaling if scaling is None else scaling
        return scaled_dot_product_attention(query, key, value, unseen, enable_gqa=True, scale=scale)


def eagle3_config(target, **changes: Any) -> dict[str, Any]:
    """A ``config.json`` of SafeAILab's layout, for ``target``."""
    config = target.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": [0, 1, config.num_hidden_layers],
        **SIZES,
        **changes,
    }


def random_tensors(module: torch.nn.Module) -> None:
    """Fill weights with noise, those of norms around 1."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)


def random_eagle3(
    config: dict[str, Any], *, own_embedding: bool = False, seed: int = 0, mask_shape: tuple[int, ...] | None = None
) -> Eagle3:
    """A drafter of random weights, and of a random draft vocabulary where that is a reduced one."""
    torch.manual_seed(seed)
    tensors = {"embed_tokens.weight": ()} if own_embedding else {}
    tensors |= {"mask_hidden": mask_shape} if mask_shape else {}
    return randomised(Eagle3(config | {"tensors": tensors}))


def randomised(module: Any) -> Any:
    """A drafter of random weights in float64, and of a random draft vocabulary where that is a reduced one."""
    random_tensors(module.double().requires_grad_(False))
    if module.d2t is not None:
        ids = torch.randperm(module.sizes.vocab_size)[: len(module.d2t)].sort().values
        module.d2t.copy_(ids - torch.arange(len(ids)))
    return module


@functools.cache
def text_of(target):
    """The target's own greedy text, [12, 34], and its hidden states."""
    low, high = 3, target.config.vocab_size
    ids = torch.randint(low, high, (12, 4), generator=torch.Generator().manual_seed(9))
    text = target.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        return text, target(text, output_hidden_states=True).hidden_states


def descended(module: Any, steps: int, rate: float, loss: Callable[[], torch.Tensor]) -> Any:
    """A module, in float32, after steps down a loss."""
    optimizer = torch.optim.Adam(module.float().requires_grad_(True).parameters(), rate)
    with torch.enable_grad():  # whoever asks first
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    return module.requires_grad_(False)


def lessons(module: Any, target) -> tuple[torch.Tensor, list[torch.Tensor], Any, torch.Tensor, torch.Generator]:
    """The target's own text, the states that a drafter fuses, its embedding, its ids of tokens, and draws."""
    text, states = text_of(target)
    own, ids = module.embed_tokens, module.target_ids()
    embed = target.get_input_embeddings() if own is None else own
    draft_id = torch.full((module.sizes.vocab_size,), -100)
    draft_id[ids] = torch.arange(len(ids))
    chosen = [states[i].float() for i in module.layers_of(target)]
    return text, chosen, lambda ids: embed(ids).detach().float(), draft_id, torch.Generator().manual_seed(1)


def unrolled(text: torch.Tensor, labels: torch.Tensor, features: Any, step: Callable[..., Any]) -> torch.Tensor:
    """The loss of two levels, each reading the last one's output; ``step``: tokens, features → vectors, logits."""
    total = 0.0
    for level in range(2):
        length = text.shape[1] - 2 - level
        features, logits = step(text[:, 1 + level : 1 + level + length], features[:, :length])
        total = total + cross_entropy(logits.flatten(0, 1), labels[:, 2 + level :].flatten())
    return total


def fit_eagle3(module: Any, target, steps: int = 60, rate: float = 0.02) -> Any:
    """Fit a recursive drafter to the target's own text."""
    text, chosen, embed, draft_id, _ = lessons(module, target)
    head = module.lm_head or target.get_output_embeddings()

    def step(tokens, features):
        positions = torch.arange(tokens.shape[1]).expand(len(text), -1)
        return module.outputs(module(embed(tokens), features, positions, Causal()), head)

    loss = lambda: unrolled(text, draft_id[text], module.fuse(chosen), step)  # noqa: E731
    return descended(module, steps, rate, loss).to(target.dtype)


def noting(drafts: list[Any]) -> Callable[[Any], None]:
    """An observer that keeps the rows of every step, and their scores."""
    return lambda seen: drafts.append((seen.rows.token_ids + 0, seen.rows.scores + 0))


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def safeailab(module: Eagle3) -> dict[str, torch.Tensor]:
    """The tensors of a drafter under the names that SafeAILab and SpecForge give them."""
    found = {name.replace("layers.0.", "midlayer."): value for name, value in module.state_dict().items()}
    if module.d2t is not None:
        known = torch.zeros(module.sizes.vocab_size, dtype=torch.bool)
        known[module.target_ids()] = True
        found["t2d"] = known
    return found


def dflash_config(target, **changes: Any) -> dict[str, Any]:
    """A ``config.json`` of z-lab's layout, for ``target``."""
    config = target.config
    inner = {"mask_token_id": config.vocab_size - 1, "target_layer_ids": [0, config.num_hidden_layers - 1]}
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "block_size": 5,
        "dflash_config": {**inner, **changes.pop("inner", {})},
        **SIZES,
        **changes,
    }


def random_dflash(config: dict[str, Any], *, own: bool = False, confidence: tuple[int, ...] | None = None) -> DFlash:
    """A drafter of random weights; ``own``: with embedding and output matrix; ``confidence``: with such a head."""
    torch.manual_seed(0)
    tensors = dict.fromkeys(("embed_tokens.weight", "lm_head.weight") if own else (), ())
    if confidence is not None:
        tensors |= {"confidence_head.proj.weight": confidence, "confidence_head.proj.bias": (1,)}
    return randomised(DFlash(config | {"tensors": tensors}))


class Block(dict):
    """A block behind its context, for training: what the inputs and the cache are for rows."""

    def update(self, keys, values, layer):
        self[layer] = keys, values

    def attend(self, module, query, key, value, *_):
        keys, values = (torch.cat([a, b], 2) for a, b in zip(self[module.layer_idx], (key, value), strict=True))
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True, scale=module.scaling)


def fit_dflash(module: DFlash, target, steps: int = 80) -> DFlash:
    """Fit a drafter to the target's own text, a block of every text at a place a step."""
    text, chosen, embed, draft_id, gen = lessons(module, target)
    size, drafted = module.block_size, module.num_drafted
    head = (target.lm_head if module.lm_head is None else module.lm_head).weight.detach().float()

    def loss() -> torch.Tensor:
        place = int(torch.randint(3, text.shape[1] - size, (), generator=gen))
        block = torch.full((len(text), size), module.mask_token_id)
        block[:, 0] = text[:, place]
        positions = torch.arange(place + size).expand(len(text), -1)
        rows = Block()
        module.store(module.fuse([state[:, :place] for state in chosen]), positions[:, :place], rows)
        hidden = module.norm(module(embed(block), None, positions[:, place:], rows))
        hidden = hidden[:, size - drafted :]
        logits = hidden @ head.T
        if module.edges is not None:
            logits = module.edges(logits, hidden, text[:, place : place + drafted])[0]
        wanted = draft_id[text[:, place + 1 : place + 1 + drafted]]
        return cross_entropy(logits.flatten(0, 1), wanted.flatten())

    return descended(module, steps, 0.01, loss).to(target.dtype)


class Family(NamedTuple):
    """A tiny target and the layout of its head, whose decoder layer has the tensors of the target's ``layer``.

    ``outside``: what the names of the head's tensors have before the layout's prefix.
    """

    model: str
    layout: HeadLayout
    config: dict[str, Any]
    layer: int = 1
    outside: str = "model."

    @property
    def prefix(self) -> str:
        """What the names of the head's tensors begin with."""
        return self.outside + self.layout.prefix.replace("{layers}", "2")


NEXTN, QWEN, MIMO, MIMO_V2, ERNIE = HEADS
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"]}
DENSE = {"mlp_layer_types": ["dense", "sparse"]}
FULL = {"mtp_layer_types": ["full_attention"]}
FAMILIES = {
    "glm": Family("Glm4MoeForCausalLM", NEXTN, {}),
    "deepseek": Family("DeepseekV3ForCausalLM", NEXTN, {}),
    "mimo": Family("Qwen2ForCausalLM", MIMO, {"use_sliding_window": False}),
    "mimo-v2": Family("MiMoV2FlashForCausalLM", MIMO_V2, {"layer_types": SLIDING["layer_types"][::-1]} | DENSE, 0),
    "ernie": Family("Ernie4_5_MoeForCausalLM", ERNIE, {}, 0),
    "exaone": Family("ExaoneMoeForCausalLM", QWEN, SLIDING | DENSE | FULL, 0, ""),
    "mellum": Family("MellumForCausalLM", QWEN, SLIDING | {"num_mtp_layers": 1}, outside=""),
    "qwen-next": Family("Qwen3NextForCausalLM", QWEN, LINEAR, outside=""),
    "qwen3.5": Family("Qwen3_5ForCausalLM", QWEN, LINEAR, outside=""),
}


@functools.cache
def target_of(name: str):
    """The tiny target of a family, in float64."""
    family = FAMILIES[name]
    return tiny_configs.build(family.model, **family.config)


def saved(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write the family's target into ``folder`` with a random head; the head's tensors by their published names."""
    target_of(name).save_pretrained(folder)
    return give_head(folder, name)


def give_head(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Put a random head, named as the family does, into the checkpoint of a target; its tensors."""
    family, weights = FAMILIES[name], load_file(folder / "model.safetensors")
    gen, last = torch.Generator().manual_seed(3), weights["lm_head.weight"]
    size = last.shape[1]
    norms = ["embedding_norm", "hidden_norm", "norm"][: 2 + (family.layout.norm is not None)]
    like = {f"{norm}.weight": torch.zeros(size) for norm in norms} | {"projection.weight": torch.zeros(size, 2 * size)}
    layer = f"layers.{family.layer}."
    for full, value in weights.items():
        if layer in full and "visual" not in full:
            like[f"block.{full.partition(layer)[2]}"] = value
    head = {}
    for own, value in like.items():
        noise = 0.2 * torch.randn(value.shape, generator=gen, dtype=torch.float64)
        centered = "norm" in own and not name.startswith("qwen")  # theirs are 1 + w
        head[family.layout.published_name(own, family.prefix)] = (noise + centered).to(last.dtype)
    add(folder, head)
    return head


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors into a checkpoint's second file, so that it has an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    save_file(tensors, folder / "model-00002.safetensors", {"format": "pt"})
    index = dict.fromkeys(weights, "model-00001.safetensors") | dict.fromkeys(tensors, "model-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
