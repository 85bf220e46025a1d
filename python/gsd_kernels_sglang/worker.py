"""SGLang's n-gram worker with graphs in place of its trie: it verifies, compacts the cache and reports as before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sglang.srt.speculative import ngram_worker
from torch.nn.functional import pad

from .drafter import TAIL, Drafted, Drafter, Text
from .load import CPU_ROWS, FLEXIBLE, GPU_ROWS, RowPolicy
from .options import Options

logger = logging.getLogger(__name__)


class GraphWorker(ngram_worker.NGRAMWorker):
    """Drafts graphs from what the target answered, and lets the n-gram worker verify their rows.

    Args: as SGLang constructs its workers.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        with patch.object(ngram_worker, "NgramCorpus", Departures):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.options, self.most_rows, self.branch = Options.read(), self.draft_token_num, self.topk
        self.drafted: Drafted | None = None  # of the step that is under way
        self.storage: dict[int, dict[str, Any]] = {}  # the n-gram worker's tensors, by the rows of a request

    @cached_property
    def drafter(self) -> Drafter:
        """Made for the first draft: by then SGLang has chosen its attention, and captured what it captures."""
        runner = self.model_runner
        backends = {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
        flexible = len(backends) == 1 and backends.pop() in FLEXIBLE
        batch_rows = self.options.batch_rows or (CPU_ROWS if str(self.device).startswith("cpu") else GPU_ROWS)
        policy = RowPolicy(self.most_rows, batch_rows, flexible, flexible and runner.decode_cuda_graph_runner is None)
        logger.info("GSD: %s, %s", self.options, policy)
        self.ngram_corpus.drafter = drafter = Drafter(self.options, self.most_rows, self.branch, policy)
        return drafter

    def use_rows(self, rows: int) -> None:
        """Take ``rows`` rows of each request for the next forward."""
        if rows == self.draft_token_num and rows in self.storage:
            return
        self.draft_token_num = self.speculative_num_draft_tokens = rows
        if rows not in self.storage:
            self._init_preallocated_tensors()
            named = vars(self).items()
            self.storage[rows] = {name: views for name, views in named if name.endswith("_batch")}
        vars(self).update(self.storage[rows])

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None) -> Any:
        """Run a step of SGLang; learn from it where it verified drafts."""
        self.drafted = None
        result = super().forward_batch_generation(batch, on_publish, pp_proxy_tensors)
        if self.drafted is not None:
            self.observe(self.drafted, result)
        self._widen(result.next_draft_input)
        return result

    def _prepare_for_speculative_decoding(self, batch: Any) -> None:
        if batch.forward_mode.is_decode():
            self.drafted = self.drafter.draft([text_of(request) for request in batch.reqs])
            self.use_rows(self.drafted.num_rows)
        super()._prepare_for_speculative_decoding(batch)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        assert self.drafted is not None
        return self.drafted.arrays()

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Nothing: :meth:`observe` learns from the target's probabilities instead."""

    def observe(self, drafted: Drafted, result: Any) -> None:
        """Hand the target's most likely tokens after every row to the history."""
        logits = result.logits_output.next_token_logits.float()  # [B·R, V]
        best = logits.topk(self.branch, dim=-1)
        log_probs = (best.values - logits.logsumexp(-1, keepdim=True)).cpu()
        shape = (len(drafted.numbers), drafted.num_rows)
        candidates = best.indices.to("cpu", torch.int32).unflatten(0, shape), log_probs.unflatten(0, shape)
        tokens = result.next_token_ids.cpu().view(shape)
        self.drafter.observe(drafted, candidates, tokens, result.accept_lens.cpu())
        statistics = self.drafter.statistics
        if self.options.log_steps and statistics.steps % self.options.log_steps == 0:
            logger.info(statistics.line())

    def _widen(self, carried: Any) -> None:
        """Give what is carried to the next step the start-up's width: requests of different steps are joined by it."""
        if carried is None or carried.draft_token_num == self.most_rows:
            return
        tokens = carried.accept_tokens.view(-1, carried.draft_token_num)
        carried.accept_tokens = pad(tokens, (0, self.most_rows - tokens.shape[1])).flatten()
        carried.draft_token_num = self.most_rows


class Departures:
    """What is left of the n-gram worker's corpus: it is told which requests went, and when the cache is flushed.

    Args: as SGLang's corpus, unused.
    """

    def __init__(self, **settings: Any) -> None:
        self.drafter: Drafter | None = None

    def erase_match_state(self, keys: Sequence[str]) -> None:
        if self.drafter is not None:
            self.drafter.forget(keys)

    def reset(self) -> None:
        if self.drafter is not None:
            self.drafter.clear()

    def load_external_corpus_named(self, *args: Any) -> int:
        raise ValueError("--speculative-algorithm GSD takes no external corpus: it has a history of its own")

    remove_external_corpus = load_external_corpus_named

    def list_external_corpora(self) -> dict[str, int]:
        return {}


def text_of(request: Any) -> Text:
    """A request of SGLang as the drafter needs it."""
    prompt, output = request.origin_input_ids_unpadded, request.output_ids
    tail = [*prompt[-TAIL:], *output[-TAIL:]]
    return Text(request.rid, tail[-TAIL:], lambda: [*prompt, *output])
