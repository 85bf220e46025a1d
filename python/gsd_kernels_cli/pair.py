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
from gsd_kernels_hf.engine.options import Options
from gsd_kernels_hf.engine.resolved import Sources
from gsd_kernels_hf.exported.options import SOURCES, read_options, shape_in
from gsd_kernels_hf.files import GGUF, model_place
from gsd_kernels_hf.model import properties
from gsd_kernels_hf.packed.dense import load_tokenizer
from gsd_kernels_hf.packed.gguf import from_gguf
from gsd_kernels_hf.parallel import check_heads
from gsd_kernels_hf.sources.corpus import Corpus
from gsd_kernels_hf.sources.heads import DraftHeads
from gsd_kernels_hf.sources.load import OWN, load_drafter

from . import ranks, values
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

    def chat(self, turns: list[dict[str, str]], option: str) -> dict[str, Tensor]:
        """Inputs of a chat up to where its answer begins; without a template, its texts, an empty line between them."""
        if not self.tokenizer.chat_template:
            return self.encode(["\n\n".join(turn["content"] for turn in turns)])
        text = self.templated(turns, option)
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
    loading = {"dtype": dtype, "trust_remote_code": trust}
    place = _place(model, "--model", where)
    tokenizer = _load_tokenizer(place, models.revision, trust)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    sharded = {} if tp_timeout is None else _sharding(place, models.revision, trust)
    target = _load_model(place, where, models.revision, **loading, **sharded)
    drafts: dict[str, Any] = {}
    if draft is not None and draft not in WITHOUT_MODEL:
        place = _place(draft, "--draft", where)
        small = drafts["assistant_model"] = _load_model(place, where, models.draft_revision, **loading)
        try:
            draft_tokenizer = _load_tokenizer(place, models.draft_revision, trust)
        except (OSError, ValueError):
            # A folder of weights alone: the vocabulary sizes are compared.
            cure = f"{place} has no tokenizer that can be read; put its files there"
            validate.check_pair(target, small, "--draft", cure)
        else:
            tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": draft_tokenizer}
            options = Options(small, **tokenizers)
            Sources.of(options, target)
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


def of_folder(model: str) -> tuple[dict[str, str], GraphConfig | str | None]:
    """Find what drafts by a folder's ``gsd_kernels.json``, as options of a command, and its ``graph_config``.

    Raises:
        ValueError: the file is damaged.
    """
    folder = Path(model)
    given = read_options(folder) if folder.is_dir() else {}
    named = {name: given[name] for name in values.SOURCES if name in given}
    return {name: OWN if place == OWN else str(folder / place) for name, place in named.items()}, shape_in(given)


def _place(where: str, what: str, device: torch.device) -> str:
    """Find a model like :func:`~gsd_kernels_hf.files.model_place`.

    Raises:
        ValueError: it is none; a file whose packed weights ``device`` cannot multiply.
    """
    place = model_place(where, what)
    if place.endswith(GGUF) and device.type != "cpu":
        raise ValueError(f"{what}: the packed weights of a GGUF file are multiplied on a CPU alone; --device cpu")
    return place


def _sharding(place: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Arguments that shard the target over the ranks, whose heads they divide."""
    if place.endswith(GGUF):
        raise ValueError("--tp: the packed weights of a GGUF file are not divided among processes; leave it out")
    config = AutoConfig.from_pretrained(place, revision=revision or "main", trust_remote_code=trust_remote_code)
    check_heads("--model", config, dist.get_world_size())  # before anything large is read
    return ranks.sharding()


def _load_model(name: str, where: torch.device, revision: str | None, **options: Any) -> PreTrainedModel:
    """A model in evaluation mode on its device; one that is sharded is there already."""
    if name.endswith(GGUF):
        dtype = options["dtype"]
        return from_gguf(name, dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    loaded = AutoModelForCausalLM.from_pretrained(name, revision=revision or "main", **options)
    on_device = any(option in options for option in ("tp_plan", "distributed_config")) and loaded.tp_size
    return (loaded if on_device else loaded.to(where)).eval()


def _load_tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if name.endswith(GGUF):
        return load_tokenizer(Path(name), padding_side="left")
    options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    return AutoTokenizer.from_pretrained(name, padding_side="left", **options)
