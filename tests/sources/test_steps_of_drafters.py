"""Drafters of newer kinds keep a step capturable: no host reads, no data of the host, the same work every time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.host_data import NoHostData, Placed
from engine.test_step_trace import Enough, HostReads
from models import prompts
from sources import test_dflash_kinds, test_gemma_assistant, test_mtp, test_parallel_eagle

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf.engine import decoder, warming
from gsd_kernels_hf.policy.base import Plan

SHAPE = GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=0)


def of_dflash(kind: str) -> Callable[[], tuple[Any, Any]]:
    return lambda: (test_dflash_kinds.target_of(), test_dflash_kinds.drafter_of(kind))


DRAFTERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mtp": lambda: (test_mtp.target_of("mimo"), test_mtp.head_of("mimo")),
    "JetSpec": of_dflash("JetSpec"),
    "DSpark": of_dflash("DSpark reduced"),
    "DSpark recurrent": of_dflash("DSpark recurrent"),
    "DFlash 2": of_dflash("DFlash 2"),
    "P-EAGLE": lambda: (test_parallel_eagle.target_of(), test_parallel_eagle.drafter_of("reduced")),
    "assistant": lambda: (test_gemma_assistant.target_of(), test_gemma_assistant.assistant_of(True)),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_step_reads_nothing_back(kind, monkeypatch):
    target, drafter = (copy.deepcopy(module).float() for module in DRAFTERS[kind]())
    operations, accepted = [], []

    def loop(session, policy, *_):
        session.trims = False  # what a CPU does in place of static shapes, with a host read
        session.use(Plan(SHAPE, policy.acceptance))
        before = [tensor.clone() for tensor in (session.state.tokens, session.kv_len, session.state.out_len)]
        warming._warm_graph(session, SHAPE)
        after = session.state.tokens, session.kv_len, session.state.out_len
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "nothing was written"
        session.step()
        for _ in range(4):
            with HostReads() as reads, NoHostData(), Placed():
                record = session.step()
            assert not reads.seen, reads.seen
            operations.append(reads.count)
            accepted.extend(record.accepted.num_accepted.tolist())
        raise Enough

    monkeypatch.setattr(decoder, "decode", loop)
    options = {"drafter": drafter, "draft_sources": ("drafter",), "graph_config": SHAPE, "backend": "reference"}
    with pytest.raises(Enough):
        gsd.generate(target, **prompts(3, 11, vocab=40), do_sample=False, max_new_tokens=40, **options)
    assert len(set(operations)) == 1 and len(set(accepted)) > 1, "the steps must differ"
