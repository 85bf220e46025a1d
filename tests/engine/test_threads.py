"""Two threads at the same door: one enters, the other is told, and nothing is left switched or half written."""

from __future__ import annotations

import json
import logging
import sys
import threading

import torch
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels_hf import api
from gsd_kernels_hf.policy import tuning


def together(work, count: int = 2) -> list[BaseException]:
    """What was raised by ``count`` threads that begin at once."""
    barrier, raised = threading.Barrier(count), []

    def run() -> None:
        barrier.wait()
        try:
            work()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_of_two_patches_at_once_one_is_refused(monkeypatch):
    target, draft = tiny(), noised(tiny())
    engines, inside = api.Engines, threading.Barrier(2)

    def meet(**options):  # the last thing that is made before a patch is set
        inside.wait(10)
        return engines(**options)

    monkeypatch.setattr(api, "Engines", meet)
    raised = together(lambda: gsd.patch(target, assistant_model=draft, graph_config="tree"))
    assert [type(error) for error in raised] == [ValueError] and "already patched" in str(raised[0])
    target.generate(**prompts(1, 5), max_new_tokens=4, do_sample=False)
    gsd.unpatch(target)
    assert target.config._attn_implementation == draft.config._attn_implementation == "sdpa"
    assert "generate" not in vars(target)


def test_threads_that_keep_the_same_costs_write_whole_files(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    model = tiny(dtype=torch.float32)
    costs = gsd.tune(model)
    (file,) = tmp_path.glob("tune-*.json")
    whole = json.loads(file.read_text())
    monkeypatch.setattr(tuning, "measure", lambda *a: costs)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
            assert not together(lambda: [gsd.tune(model, refresh=True) for _ in range(40)], count=4)
    finally:
        sys.setswitchinterval(interval)
    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == [file.name] and json.loads(file.read_text()) == whole
