"""Loading a target, its draft and their tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from gsd_kernels import GraphConfig
from gsd_kernels.config import PLAIN
from gsd_kernels_cli import demo
from gsd_kernels_cli.demo.drafters import heads_folder
from gsd_kernels_hf import validate
from gsd_kernels_hf.engine.resolved import Options, Sources
from gsd_kernels_hf.exported.folder import SOURCES
from gsd_kernels_hf.files import GGUF, model_place
from gsd_kernels_hf.model import properties
from gsd_kernels_hf.packed.gguf import from_gguf, load_tokenizer
from gsd_kernels_hf.parallel import check_heads
from gsd_kernels_hf.sources.corpus import Corpus
from gsd_kernels_hf.sources.heads import DraftHeads
from gsd_kernels_hf.sources.load import load_drafter

from . import ranks
from .values import NONE, WITHOUT_MODEL

BAD_CHAT = (TemplateError, ValueError, TypeError, KeyError)
"""What templates raise for chats that they do not take."""


@dataclass
class LoadedPair:
    """Models and tokenizer of a command.

    Attributes:
        tokenizer: of the target.
        speculation: arguments of :func:`gsd_kernels.generate` that name the draft sources.
        plain: whether nothing drafts, not even the text itself.
        own_shape: ``graph_config`` of the model's folder.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    speculation: dict[str, Any]
    plain: bool = False
    own_shape: GraphConfig | str | None = None

    @property
    def draft(self) -> PreTrainedModel | None:
        return self.speculation.get("assistant_model")

    @property
    def device(self) -> torch.device:
        return properties.device_of(self.target)

    @property
    def dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def described(self) -> str:
        """The target, its dtype and device, and where drafts come from, in words."""
        kind = f"{type(self.target).__name__} of {self.target.num_parameters() / 1e6:.0f}M parameters"
        where = f"{self.dtype} on {self.device}"
        if self.draft is not None:
            drafting = f"its draft model has {self.draft.num_parameters() / 1e6:.0f}M"
        else:
            drafting = "nothing drafts" if self.plain else "drafts come from the text itself, there is no draft model"
        return f"{kind}, {where}; {drafting}"

    def encode(self, prompts: list[str], chat: bool = False) -> dict[str, Tensor]:
        """Left-padded ``input_ids`` and ``attention_mask`` on the target's device.

        Raises:
            ValueError: ``chat`` without a chat template, or a prompt without a token.
        """
        if chat:
            if not self.tokenizer.chat_template:
                raise ValueError("--chat: the tokenizer has no chat template")
            prompts = [self.templated([{"role": "user", "content": prompt}], "--chat") for prompt in prompts]
        encoded = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=not chat)
        return {name: encoded[name].to(self.device) for name in ("input_ids", "attention_mask")}

    def chat(self, turns: list[dict[str, str]]) -> dict[str, Tensor]:
        """Inputs of a chat up to where its answer begins; without a template, its texts, an empty line between them."""
        if not self.tokenizer.chat_template:
            return self.encode(["\n\n".join(turn["content"] for turn in turns)])
        text = self.templated(turns, "--model")
        return dict(self.tokenizer(text, return_tensors="pt", add_special_tokens=False).to(self.device))

    def templated(self, turns: list[dict[str, str]], option: str) -> str:
        """The text of a chat, up to where its answer begins.

        Raises:
            ValueError: the template does not take it; the error names ``option``.
        """
        try:
            written = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except BAD_CHAT as error:
            raise ValueError(f"{option}: the chat template: {' '.join(str(error).split())}") from error
        return str(written)

    @property
    def padding(self) -> dict[str, Any]:
        """``pad_token_id`` for any ``generate`` where the model names none."""
        config = self.target.generation_config
        return {} if config.pad_token_id is not None else {"pad_token_id": self.tokenizer.pad_token_id}

    def shape(self, config: GraphConfig | str | None) -> GraphConfig | str | None:
        """The ``graph_config`` for these models, ``config`` being ``--graph-config``: plain without any source."""
        return PLAIN if self.plain else self.own_shape if config is None else config


def quiet_transformers() -> None:
    """Silence its progress bars and hints: a command reports its own progress."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def pick_device(name: str | None) -> torch.device:
    """``--device``: by default the first GPU if there is one.

    Raises:
        ValueError: not a device, or not one of this machine's.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device, dtype=torch.float32)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device: {name!r} cannot be used: {str(error).splitlines()[0]}; leave it out") from error
    return device


def load_pair(model: str | None, models: Any, tp_timeout: float | None = None) -> LoadedPair:
    """The pair that the options name, with its heads, drafter and corpus; the embedded one without ``model``.

    Args:
        model: as ``--model`` has it.
        models: the options, a :class:`~gsd_kernels_cli.options.Models`.
        tp_timeout: seconds; with it the target is sharded over the processes that torchrun started.

    Raises:
        ValueError: options that contradict each other, or a draft that cannot draft for the target.
        OSError: a checkpoint cannot be found.
    """
    quiet_transformers()
    if tp_timeout is None:
        where = pick_device(models.device)
    elif model is None or models.device is not None:
        raise ValueError("--tp: needs --model, and takes no --device: the GPUs, or the CPU of a machine without one")
    else:
        where = ranks.join(tp_timeout)
    draft, trust, dtype = models.assistant_model, models.trust_remote_code, models.dtype
    if model is None:
        model, draft = str(demo.path() / "target"), str(demo.path() / "draft") if draft is None else draft
        dtype = "float32" if dtype == "auto" else dtype
    hub = {"revision": models.revision or "main", "trust_remote_code": trust}
    place = _place(model, "--model", where)
    tokenizer = _load_tokenizer(place, hub)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    sharded = {} if tp_timeout is None else _sharding(place, hub)
    target = _load_model(place, where, dtype, {**hub, **sharded})
    drafts: dict[str, Any] = {}
    if draft is not None and draft not in WITHOUT_MODEL:
        place = _place(draft, "--draft", where)
        hub["revision"] = models.draft_revision or "main"
        small = drafts["assistant_model"] = _load_model(place, where, dtype, hub)
        try:
            draft_tokenizer = _load_tokenizer(place, hub)
        except (OSError, ValueError):
            # A folder of weights alone: the vocabulary sizes are compared.
            cure = f"{place} has no tokenizer that can be read; put its files there"
            validate.check_pair(target, small, "--draft", cure)
        else:
            tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": draft_tokenizer}
            options = Options(small, **tokenizers)
            Sources(options, target)
            drafts |= {} if options.translations == [None] else tokenizers
    heads, drafter, corpus = models.draft_heads, models.drafter, models.corpus
    if drafter is not None:
        drafts["drafter"] = load_drafter(drafter, target)
    if heads is not None:
        drafts["draft_heads"] = DraftHeads.from_pretrained(heads_folder() if heads == "demo" else heads, target)
    if corpus is not None:
        named = [source for option, source in SOURCES.items() if option in drafts]
        history = ["history"] if named or draft != NONE else []
        drafts["draft_sources"] = (*named, *history, Corpus(corpus, tokenizer=tokenizer))
    return LoadedPair(target, tokenizer, drafts, plain=draft == NONE and not (heads or drafter or corpus))


def _place(where: str, what: str, device: torch.device) -> str:
    """Find a model like :func:`~gsd_kernels_hf.files.model_place`.

    Raises:
        ValueError: it is none; a file whose packed weights ``device`` cannot multiply.
    """
    place = model_place(where, what)
    if place.endswith(GGUF) and device.type != "cpu":
        raise ValueError(f"{what}: the packed weights of a GGUF file are multiplied on a CPU alone; --device cpu")
    return place


def _sharding(place: str, hub: dict[str, Any]) -> dict[str, Any]:
    """Arguments that shard the target over the ranks, whose heads they divide."""
    if place.endswith(GGUF):
        raise ValueError("--tp: the packed weights of a GGUF file are not divided among processes; leave it out")
    check_heads("--model", AutoConfig.from_pretrained(place, **hub), dist.get_world_size())  # before anything large
    return ranks.sharding()


def _load_model(place: str, where: torch.device, dtype: str, options: dict[str, Any]) -> PreTrainedModel:
    """A model in evaluation mode on its device; one that is sharded is there already."""
    if place.endswith(GGUF):
        return from_gguf(place, dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    loaded = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **options)
    sharded = not {"tp_plan", "distributed_config"}.isdisjoint(options) and loaded.tp_size
    return (loaded if sharded else loaded.to(where)).eval()


def _load_tokenizer(place: str, hub: dict[str, Any]) -> PreTrainedTokenizerBase:
    if place.endswith(GGUF):
        return load_tokenizer(Path(place), padding_side="left")
    return AutoTokenizer.from_pretrained(place, padding_side="left", **hub)
