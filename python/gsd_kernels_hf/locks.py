"""Locks that a fork leaves free: the threads that would give them back do not run in the child."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def forkable_lock() -> AbstractContextManager[bool]:
    """A re-entrant lock that is free in the child of a fork, unless the thread that forks holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _renew() -> None:
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()  # as the standard library's own


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew)
