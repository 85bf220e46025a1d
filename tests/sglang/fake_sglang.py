"""As much of SGLang as the plug-in touches: registration, server arguments, and an n-gram worker over a toy target.

The toy target's next token depends on the last two tokens of a row's path, so a row that is verified with a wrong
ancestor gives another text.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

VOCAB = 11
OURS = ("algorithm", "plugin", "worker")


def next_token(before: int, last: int) -> int:
    """What the toy target picks; the sequences that it writes run into cycles."""
    return (before * last + before + 3) % VOCAB


def written(prompt: list[int], count: int) -> list[int]:
    """The toy target's text after a prompt of at least two tokens."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(*text[-2:]))
    return text[len(prompt) :]


@dataclass
class Request:
    rid: str
    origin_input_ids_unpadded: list[int]
    output_ids: list[int] = field(default_factory=list)


@dataclass
class Mode:
    name: str

    def is_decode(self) -> bool:
        return self.name == "decode"


class Batch(SimpleNamespace):
    """Requests, and what the last step left for the next one."""


class CustomSpecAlgo:
    def __init__(self, name: str, factory: Any, *, validate_server_args: Any = None) -> None:
        self.name, self.factory, self.validate_server_args = name, factory, validate_server_args


class NGRAMWorker:
    """The contract of SGLang's worker that the plug-in relies on, from its 0.5.23."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.draft_token_num = self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.topk, self.device = server_args.speculative_eagle_topk, "cpu"
        self.model_runner = SimpleNamespace(
            prefill_attention_backend_str=server_args.attention_backend,
            decode_attention_backend_str=server_args.decode_attention_backend or server_args.attention_backend,
            decode_cuda_graph_runner=server_args.graphs,
        )
        self.ngram_corpus = sys.modules["sglang.srt.speculative.ngram_worker"].NgramCorpus(capacity=1)
        self.widths: list[int] = []  # of the verifications
        self.served: set[str] = set()

    def _init_preallocated_tensors(self) -> None:
        self.draft_tokens = torch.empty(64 * self.draft_token_num, dtype=torch.int64)
        self.draft_tokens_batch = [self.draft_tokens[: n * self.draft_token_num] for n in range(65)]

    def _prepare_for_speculative_decoding(self, batch: Batch) -> None:
        if not batch.forward_mode.is_decode():
            return
        tokens, mask = self._prepare_draft_tokens(batch)
        assert tokens.dtype == np.int64 and mask.dtype == np.bool_
        assert len(mask) == len(tokens) * self.draft_token_num
        self.draft_tokens_batch[len(batch.reqs)].copy_(torch.from_numpy(tokens))  # fails where the widths differ
        batch.tree = tokens.reshape(len(batch.reqs), -1), mask.reshape(len(batch.reqs), *2 * (self.draft_token_num,))

    def forward_batch_generation(self, batch: Batch, on_publish: Any = None, pp_proxy_tensors: Any = None) -> Any:
        self._prepare_for_speculative_decoding(batch)
        count, width = len(batch.reqs), self.draft_token_num
        accepted, lengths = torch.zeros(count, width, dtype=torch.int32), torch.ones(count, dtype=torch.int32)
        logits = torch.zeros(count * width, VOCAB)
        if batch.forward_mode.is_decode():
            self.widths.append(width)
            for b, request in enumerate(batch.reqs):
                picks = self._forward(request, *(part[b] for part in batch.tree), logits[b * width :])
                given = follow(*(part[b] for part in batch.tree), picks)
                accepted[b, : len(given)], lengths[b] = torch.tensor(given, dtype=torch.int32), len(given)
            gone = self.served - {request.rid for request in batch.reqs}
            self.served = {request.rid for request in batch.reqs}
            self.ngram_corpus.erase_match_state(list(gone))
            self._update_ngram_corpus(batch)
        carried = SimpleNamespace(accept_tokens=accepted.flatten(), draft_token_num=width)
        output = SimpleNamespace(next_token_logits=logits)
        return SimpleNamespace(
            logits_output=output, next_token_ids=accepted.flatten(), accept_lens=lengths, next_draft_input=carried
        )

    def _forward(self, request: Request, tokens: np.ndarray, mask: np.ndarray, logits: torch.Tensor) -> list[int]:
        text = [*request.origin_input_ids_unpadded, *request.output_ids]
        assert tokens[0] == text[-1], "the root is the text's last token"
        picks = []
        for row in range(len(tokens)):
            path = [*text[:-1], *(int(tokens[j]) for j in np.flatnonzero(mask[row]))]
            picks.append(next_token(*path[-2:]))
            logits[row, picks[-1]] = 4.0
            logits[row, (picks[-1] + 1) % VOCAB] = 2.0
        return picks


def follow(tokens: np.ndarray, mask: np.ndarray, picks: list[int]) -> list[int]:
    """The picks along the accepted path, as SGLang finds them from the mask."""
    parents = [max((j for j in range(i) if mask[i, j]), default=-1) for i in range(len(tokens))]
    node, given = 0, []
    while True:
        given.append(picks[node])
        children = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == picks[node]]
        assert len(children) <= 1, "no two children of a row hold the same token"
        if not children:
            return given
        node = children[0]


def arguments(**changes: Any) -> SimpleNamespace:
    """SGLang's server arguments, as far as the plug-in reads them; unset ones are None."""
    names = ("num_draft_tokens", "eagle_topk", "num_steps")
    given = dict.fromkeys([f"speculative_{name}" for name in names] + ["max_running_requests", "graphs"])
    given |= {"enable_mixed_chunk": True, "disable_overlap_schedule": False, "page_size": 1}
    given |= {"attention_backend": "torch_native", "decode_attention_backend": None}
    return SimpleNamespace(**given | changes)


def install(patch: pytest.MonkeyPatch, version: str = "0.5.23") -> dict[str, CustomSpecAlgo]:
    """Put the fakes where the plug-in imports SGLang from; returns what is registered, by name."""
    registered: dict[str, CustomSpecAlgo] = {}

    class SpeculativeAlgorithm:
        NGRAM = SimpleNamespace(
            carries_draft_hidden_states=lambda: False, create_future_map=lambda *args: args, need_topk=lambda: False
        )

        @staticmethod
        def register(name: str, *, spec_class: type = CustomSpecAlgo, validate_server_args: Any = None) -> Any:
            def decorate(factory: Any) -> Any:
                registered[name] = spec_class(name, factory, validate_server_args=validate_server_args)
                return factory

            return decorate

    speculative = "sglang.srt.speculative"
    contents = {
        "sglang.version": {"__version__": version},
        f"{speculative}.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
        f"{speculative}.spec_registry": {"CustomSpecAlgo": CustomSpecAlgo},
        f"{speculative}.ngram_worker": {"NGRAMWorker": NGRAMWorker, "NgramCorpus": None},
    }
    for name in ("sglang", "sglang.srt", speculative, *contents):
        module = ModuleType(name)
        module.__dict__.update(contents.get(name, {}))
        patch.setitem(sys.modules, name, module)
        if parent := name.rpartition(".")[0]:
            setattr(sys.modules[parent], name.rpartition(".")[2], module)
    for name in OURS:
        sys.modules.pop(f"gsd_kernels_sglang.{name}", None)
    return registered
