"""``GSD`` among SGLang's speculative algorithms: verified as its n-gram trees are."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from .options import Options, check_flags

NGRAM = SpeculativeAlgorithm.NGRAM
DEFAULTS = {
    "speculative_num_draft_tokens": 16,
    "speculative_eagle_topk": 4,
    "max_running_requests": 48,  # SGLang's own beside a speculative algorithm
}


class GraphAlgorithm(CustomSpecAlgo):
    """SGLang asks the n-gram algorithm's questions of this one; what a plug-in's base class lacks answers as there."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    carries_draft_hidden_states = staticmethod(NGRAM.carries_draft_hidden_states)
    create_future_map = staticmethod(NGRAM.create_future_map)
    need_topk = staticmethod(NGRAM.need_topk)

    def get_platform_worker_cls(self) -> type | None:
        return None

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in what the user left open.

        Raises:
            ValueError: pages of several tokens, with the flag that cures it.
        """
        for name, value in DEFAULTS.items():
            if getattr(server_args, name) is None:
                setattr(server_args, name, value)
        rows, branch = server_args.speculative_num_draft_tokens, server_args.speculative_eagle_topk
        if server_args.speculative_num_steps is None:
            # SGLang reserves the product of the two, if it is more than the rows, in a request's cache.
            server_args.speculative_num_steps = max(1, rows // branch)
        server_args.enable_mixed_chunk = False
        server_args.disable_overlap_schedule = True  # a draft starts from what the step before it accepted
        Options.read().graph_config(rows, branch)
        # Where SGLang moves accepted branches wrongly.
        paged = (server_args.page_size or 1) > 1 and branch > 1
        if paged and server_args.attention_backend != "flashinfer":
            raise ValueError(
                f"--page-size: expected 1 with --speculative-algorithm GSD, got {server_args.page_size}: SGLang "
                "verifies branches over larger pages with --attention-backend flashinfer only"
            )


def check(server_args: Any) -> None:
    """Refuse, by name, what the plug-in cannot serve.

    Raises:
        TypeError, ValueError: an option that is out of range, or one of SGLang that does not go with ``GSD``.
    """
    Options.read()
    reasons = {
        "speculative_draft_model_path": "it drafts from the history; docs/served.md says what a draft model needs",
        "speculative_adaptive": "its rows follow the load by themselves",
        "speculative_ngram_external_corpus_path": "it has a history of its own",
        "enable_dp_attention": "SGLang verifies n-gram trees without it only",
        "speculative_use_rejection_sampling": "drafts of the history are no distribution",
    }
    for name, reason in reasons.items():
        if getattr(server_args, name, None):
            raise ValueError(f"--{name.replace('_', '-')}: not with --speculative-algorithm GSD: {reason}")
    if getattr(server_args, "pp_size", 1) > 1:
        raise ValueError(
            "--pp-size: expected 1 with --speculative-algorithm GSD: its trees are not relayed between stages"
        )
    check_flags(
        getattr(server_args, "speculative_num_draft_tokens", None), getattr(server_args, "speculative_eagle_topk", None)
    )
