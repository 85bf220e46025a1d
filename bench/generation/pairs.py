"""The pairs and prompts that whole generations are measured on."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels import DFlash, DraftHeads, Eagle3
from gsd_kernels_cli import demo, ranks
from gsd_kernels_cli.demo.drafters import embedded, heads_folder
from gsd_kernels_cli.demo.inflate import inflate, inflated_config
from gsd_kernels_hf.parallel import check_heads
from gsd_kernels_train.recipes.stdlib import split_sources, stdlib_sources
from gsd_kernels_train.recipes.stdlib_prompts import copy_prompt

from ..kernels.rows import random_model
from ..lib.shapes import shape_named
from .options import OfGenerate


@dataclass(frozen=True)
class Prompt:
    """A named prompt, int64 [1, P] on the target's device; ``question``: that it is a turn of."""

    name: str
    kind: str
    input_ids: Tensor
    question: str = ""

    def about(self) -> dict[str, Any]:
        """Its row of a report."""
        return {"kind": self.kind, "tokens": self.input_ids.shape[1], "question": self.question or self.name}


@dataclass(frozen=True)
class Pair:
    """A target, its draft if there is one, and prompts that neither was trained on."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel | None
    prompts: list[Prompt]
    heads: DraftHeads | None = None  # trained for the target
    drafters: dict[str, Eagle3 | DFlash] = field(default_factory=dict)  # trained for the target, by kind


def of_length(prompts: Sequence[Prompt], tokens: int, limit: int) -> list[Prompt]:
    """The prompts, each with the next ones behind it, and again from the first, cut to exactly ``tokens`` tokens.

    Raises:
        ValueError: more than ``limit``, the model's positions.
    """
    if tokens > limit:
        raise ValueError(f"--prompt-tokens: expected at most {limit}, the model's positions, got {tokens}")
    cut = []
    for number, prompt in enumerate(prompts):
        ids = torch.cat([other.input_ids for other in (*prompts[number:], *prompts[:number])], 1)
        times = -(-tokens // ids.shape[1])
        cut.append(Prompt(prompt.name, prompt.kind, ids.repeat(1, times)[:, :tokens]))
    return cut


def endless(*models: PreTrainedModel | None) -> None:
    """Let texts of models have no end, so that all get the same length and rates are comparable."""
    for model in filter(None, models):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0


def load_pair(given: OfGenerate, device: torch.device, dtype: torch.dtype, *, tensor_parallel: bool = False) -> Pair:
    """The pair that the options name, with the first prompts of their kind, or the last ones.

    Args:
        given: the command's options; see :class:`OfGenerate`.
        device, dtype: of both models.
        tensor_parallel: shard the target over the processes of the group that :func:`ranks.join` made.

    Raises:
        ValueError: heads that do not divide among the processes, or prompts longer than the model's positions.
    """
    is_demo, shape = given.pair == "demo", given.target_shape
    source, draft, raw = (_demo if is_demo else _tiny)(given.text, given.prompts, given.fresh)
    target = (_sharded if tensor_parallel else _placed)(source, shape, device, dtype)
    draft = _placed(draft, given.draft_shape, device, dtype)
    endless(target, draft)
    extras: dict[str, Any] = {}
    if is_demo and shape == "none" and not tensor_parallel:
        extras = {"drafters": embedded(target), "heads": DraftHeads.from_pretrained(heads_folder(), target)}
    prompts = [Prompt(name, given.text, ids.to(device)) for name, ids in raw]
    if given.prompt_tokens is not None:
        limit = target.config.max_position_embeddings - given.new_tokens
        prompts = of_length(prompts, given.prompt_tokens, limit)
    return Pair(given.pair, target, draft, prompts, **extras)


def _placed(model: PreTrainedModel, shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    if shape == "none":
        return model.to(device=device, dtype=dtype)
    return inflate(model, shape_named(shape), dtype=dtype, device=device)


def _sharded(target: PreTrainedModel, shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """transformers shards what it reads from disk: one process of every machine writes the target there."""
    config = target.config if shape == "none" else inflated_config(target.config, shape_named(shape))
    check_heads(f"--target-shape {shape}", config, dist.get_world_size())
    folder = ranks.from_first(os.path.join(tempfile.gettempdir(), f"gsd-kernels-{os.urandom(8).hex()}"))
    folder += f"-{os.environ.get('GROUP_RANK', '0')}"  # torchrun's number of the machine
    writes = os.environ["LOCAL_RANK"] == "0"
    try:
        if writes:
            _placed(target, shape, torch.device("cpu"), dtype).save_pretrained(folder)
        dist.barrier()
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, **ranks.sharding()).eval()
        dist.barrier()
    finally:
        if writes:
            shutil.rmtree(folder, ignore_errors=True)
    return loaded


Found = tuple[PreTrainedModel, PreTrainedModel, list[tuple[str, Tensor]]]
"""Target, draft, and prompts by name."""


def _demo(kind: str, count: int, fresh: bool) -> Found:
    target, draft, tokenizer = demo.load()
    known = [(p["name"], p["text"]) for p in demo.prompts(kind)]
    if kind == "copy" and fresh:
        known = _fresh_copies(tokenizer)
    chosen = known[-count:] if fresh else known[:count]
    return target, draft, [(name, tokenizer(text, return_tensors="pt")["input_ids"]) for name, text in chosen]


def _fresh_copies(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Functions written twice, of this Python's files that were held out and have no such prompt in the demo's list."""
    known = {p["file"] for p in demo.prompts("copy")}
    copies = []
    for source in split_sources(stdlib_sources())[1]:
        prompt = None if source.name in known else copy_prompt(source, tokenizer)
        if prompt is not None:
            copies.append((f"fresh-copy-{source.name}", str(prompt["text"])))
    return copies


def _tiny(kind: str, count: int, fresh: bool) -> Found:
    torch.manual_seed(0)
    target = random_model("tiny", torch.float32)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    draft = copy.deepcopy(target)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.data += 0.01 * torch.randn_like(parameter)
    made = []
    for number in range(count):
        ids = torch.randint(3, 512, (1, 24), generator=torch.Generator().manual_seed(number))
        made.append((f"{kind}-{number}", ids.repeat(1, 2) if kind == "copy" else ids))
    return target, draft, made
