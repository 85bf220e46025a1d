"""A fork while other threads are inside of what is locked: its child decodes."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack

import models
import pytest
import torch

import gsd_kernels as gsd
from gsd_kernels_hf import locks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_lock_of_another_thread_is_held_in_a_child():
    target, held, over = models.tiny(), threading.Event(), threading.Event()

    def hold():
        with ExitStack() as every:
            for lock in list(locks._locks):
                every.enter_context(lock)
            held.set()
            over.wait()

    with gsd.patch(target):
        ids = target.generate(max_new_tokens=4)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        if (child := os.fork()) == 0:
            signal.alarm(60)  # a child that hangs is killed
            torch.set_num_threads(1)  # threads of its pool are not in the child either
            os._exit(not target.generate(max_new_tokens=4).equal(ids))
        status = os.waitpid(child, 0)[1]
        over.set()
        thread.join()
    assert status == 0
