"""Two threads at the same door: one enters, the other is told, and nothing is left switched or half written."""

from __future__ import annotations

import threading

from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels_hf import api


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
