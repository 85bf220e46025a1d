"""The keywords of ``generate`` and ``patch`` for type checkers and editors; at run time nothing reads them.

``**kwargs: Unpack[…]`` needs every name in the source. What they mean is said where they are defined, and a test
compares name by name and type by type: with :class:`~gsd_kernels_hf.engine.options.Options`, and with what
:mod:`gsd_kernels_hf.validate.options` honours of transformers' own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from gsd_kernels import GraphConfig
from gsd_kernels.backends import Backend
from gsd_kernels.config import GraphName

from ..acceptance.criteria import CriterionName, Typical
from ..policy.settings import Automatic
from ..records import Verified
from ..sources.base import DraftSource
from ..sources.heads import DraftHeads
from ..sources.layer_skip import LayerSkip
from ..sources.load import Drafter
from .options import SourceName


class OptionArguments(TypedDict, total=False):
    """The fields of :class:`~gsd_kernels_hf.engine.options.Options`, each of which may be left out."""

    assistant_model: PreTrainedModel | LayerSkip | Sequence[PreTrainedModel] | None
    graph_config: GraphConfig | Automatic | GraphName | None
    tokenizer: PreTrainedTokenizerBase | None
    assistant_tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None
    seed: int | None
    backend: Backend
    draft_sources: Sequence[SourceName | DraftSource] | None
    draft_heads: DraftHeads | str | os.PathLike[str] | None
    drafter: Drafter | str | os.PathLike[str] | None
    reference_ids: Tensor | None
    criterion: CriterionName | Typical
    reuse_prefix: bool
    reuse_history: bool
    learned: bool
    streamer: BaseStreamer | None
    observer: Callable[[Verified], None] | None


class GenerateArguments(OptionArguments, total=False):
    """These, and what ``generate`` honours of transformers' own arguments and generation options."""

    input_ids: Tensor | None
    attention_mask: Tensor | None
    logits_processor: LogitsProcessorList | Sequence[Callable[[Tensor, Tensor], Tensor]] | None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None
    use_cache: bool | None
    bad_words_ids: list[list[int]] | None
    begin_suppress_tokens: list[int] | None
    bos_token_id: int | None
    do_sample: bool | None
    encoder_no_repeat_ngram_size: int | None
    encoder_repetition_penalty: float | None
    eos_token_id: int | list[int] | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    exponential_decay_length_penalty: tuple[int, float] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | list[int] | None
    max_length: int | None
    max_new_tokens: int | None
    max_time: float | None
    min_length: int | None
    min_new_tokens: int | None
    min_p: float | None
    no_repeat_ngram_size: int | None
    num_return_sequences: int | None
    output_logits: bool | None
    output_scores: bool | None
    pad_token_id: int | None
    prefill_chunk_size: int | None
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    repetition_penalty: float | None
    return_dict_in_generate: bool | None
    sequence_bias: dict[tuple[int, ...], float] | list[list[Any]] | None
    stop_strings: str | list[str] | None
    suppress_tokens: list[int] | None
    temperature: float | None
    top_h: float | None
    top_k: int | None
    top_p: float | None
    typical_p: float | None
    watermarking_config: Any
