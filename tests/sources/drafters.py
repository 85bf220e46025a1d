"""Drafter checkpoints for tiny targets, fitted by a few steps so that they are right now and then."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import gsd_kernels as gsd
from gsd_kernels import DFlash, Eagle3
from gsd_kernels_hf.model.runner import RowModel
from gsd_kernels_hf.records import DecodeState
from gsd_kernels_hf.sources.base import Prefilled
from gsd_kernels_hf.sources.dflash import DFlashConfig, DFlashDrafts
from gsd_kernels_hf.sources.eagle3 import Eagle3Config
from gsd_kernels_hf.sources.edges import along
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
        self.state = DecodeState.empty(batch, length, 8, tokens.device)
        self.state.restart(tokens, kv_start, 8, 0)
        self.target = RowModel(target, length + 32, self.state.kv_start, "auto")
        self.sampler = self.draws = None

    def keep(self, rows):
        pass


@torch.no_grad()
def started(module, target, tokens, pads=None):
    """A drafter's source behind a text, of whose states it was told in two pieces."""
    source, pads = source_of(module), torch.zeros(len(tokens), dtype=torch.int32) if pads is None else pads
    source.check(target)
    source.attach(FixedText(target, tokens, pads))
    states = target(tokens, output_hidden_states=True).hidden_states
    for begin, end in ((0, 3), (3, tokens.shape[1] - 1)):
        source.observe(Prefilled({number: states[number][:, begin:end] for number in source.hidden_layers}, begin))
    if isinstance(source, DFlashDrafts):
        source.enter(source.state.out_len - 1, tokens.shape[1])
    return source


class Causal:
    """Attention of a whole text at once, for training: what :class:`RowPass` is for rows of a cache."""

    def attend(self, module, query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=module.scaling)


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
    if mask_shape is not None:
        tensors["mask_hidden"] = mask_shape
    found = Eagle3Config.of(config, tensors)
    module = Eagle3(found).double().requires_grad_(False)
    random_tensors(module)
    if module.d2t is not None:
        ids = torch.randperm(found.layers.vocab_size)[: found.draft_vocab_size].sort().values
        module.d2t.copy_(ids - torch.arange(len(ids)))
    return module


@functools.cache
def text_of(target, count: int = 12, new: int = 30):
    """The target's own greedy text, [count, 4 + new], and its hidden states."""
    low, high = 3, target.config.vocab_size
    ids = torch.randint(low, high, (count, 4), generator=torch.Generator().manual_seed(9))
    text = target.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None)
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
    embed = target.get_input_embeddings() if module.embed_tokens is None else module.embed_tokens
    draft_id = torch.full((module.config.layers.vocab_size,), -100)
    draft_id[module.target_ids()] = torch.arange(module.config.draft_vocab_size)
    chosen = [states[i].float() for i in module.layers_of(target)]
    return text, chosen, embed, draft_id, torch.Generator().manual_seed(1)


def fit_eagle3(module: Eagle3, target, steps: int = 60) -> Eagle3:
    """Fit a drafter to the target's own text: two levels, each reading the last one's output."""
    text, chosen, embed, draft_id, _ = lessons(module, target)

    def loss() -> torch.Tensor:
        features, total = module.fuse(chosen), 0.0
        for level in range(2):
            length = text.shape[1] - 2 - level
            tokens = text[:, 1 + level : 1 + level + length]
            positions = torch.arange(length).expand(len(text), -1)
            hidden = module(embed(tokens).detach().float(), features[:, :length], positions, Causal())
            features, logits = module.outputs(hidden)
            total = total + cross_entropy(logits.flatten(0, 1), draft_id[text[:, 2 + level :]].flatten())
        return total

    return descended(module, steps, 0.02, loss).to(target.dtype)


def fit_parallel(module: Eagle3, target, steps: int = 80) -> Eagle3:
    """Fit P-EAGLE to the target's own text: the masks behind a place of every text a step."""
    text, chosen, embed, draft_id, gen = lessons(module, target)
    config, count = module.config, module.config.num_parallel

    def loss() -> torch.Tensor:
        place = int(torch.randint(3, text.shape[1] - count, (), generator=gen))
        masks = torch.full((len(text), count - 1), config.mask_token_id)
        tokens = torch.cat([text[:, 1 : place + 1], masks], 1)
        known = module.fuse([state[:, :place] for state in chosen])
        features = torch.cat([known, module.mask_feature().expand(len(text), count - 1, -1)], 1)
        positions = torch.arange(tokens.shape[1]).expand(len(text), -1)
        _, logits = module.outputs(module(embed(tokens).detach().float(), features, positions, Causal()))
        wanted = draft_id[text[:, place + 1 : place + 1 + count]]
        return cross_entropy(logits[:, -count:].flatten(0, 1), wanted.flatten())

    return descended(module, steps, 0.01, loss).to(target.dtype)


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
        known = torch.zeros(module.config.layers.vocab_size, dtype=torch.bool)
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


def random_dflash(
    config: dict[str, Any], *, own: bool = False, seed: int = 0, confidence: tuple[int, ...] | None = None
) -> DFlash:
    """A drafter of random weights; ``own``: with embedding and output matrix; ``confidence``: with such a head."""
    torch.manual_seed(seed)
    tensors = dict.fromkeys(("embed_tokens.weight", "lm_head.weight") if own else (), ())
    if confidence is not None:
        tensors |= {"confidence_head.proj.weight": confidence, "confidence_head.proj.bias": (1,)}
    found = DFlashConfig.of(config, tensors)
    module = DFlash(found).double().requires_grad_(False)
    random_tensors(module)
    if module.d2t is not None:
        ids = torch.randperm(config["vocab_size"])[: config["draft_vocab_size"]].sort().values
        module.d2t.copy_(ids - torch.arange(len(ids)))
    return module


class Block(list):
    """A block behind its context, for training: what :class:`RowPass` and its cache are for rows."""

    cache = property(lambda self: self)
    layers = property(
        lambda self: [types.SimpleNamespace(update=lambda *kv, i=i: self.insert(i, kv)) for i in range(9)]
    )

    def attend(self, module, query, key, value):
        keys, values = (torch.cat([a, b], 2) for a, b in zip(self[module.layer], (key, value), strict=True))
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True, scale=module.scaling)


def fit_dflash(module: DFlash, target, steps: int = 80) -> DFlash:
    """Fit a drafter to the target's own text, a block of every text at a place a step."""
    text, chosen, embed, draft_id, gen = lessons(module, target)
    config = module.config
    head = (target.lm_head if module.lm_head is None else module.lm_head).weight.detach().float()

    def loss() -> torch.Tensor:
        place = int(torch.randint(3, text.shape[1] - config.block_size, (), generator=gen))
        block = torch.full((len(text), config.block_size), config.mask_token_id)
        block[:, 0] = text[:, place]
        positions = torch.arange(place + config.block_size).expand(len(text), -1)
        rows = Block()
        module.store(module.fuse([state[:, :place] for state in chosen]), positions[:, :place], rows)
        hidden = module(embed(block).detach().float(), positions[:, place:], rows)
        hidden = hidden[:, config.block_size - config.num_drafted :]
        logits = hidden @ head.T
        if module.edges is not None:
            logits = along(module.edges, logits, hidden, text[:, place : place + config.num_drafted])
        wanted = draft_id[text[:, place + 1 : place + 1 + config.num_drafted]]
        return cross_entropy(logits.flatten(0, 1), wanted.flatten())

    return descended(module, steps, 0.01, loss).to(target.dtype)
