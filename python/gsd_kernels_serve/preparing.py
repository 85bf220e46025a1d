"""Reading of requests beside the event loop: templates, tokens and schemas take as long as a client makes them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .checks import Refused

THREAD = "gsd_kernels request"
"""Name of the threads."""

ASIDE_NICENESS = 19
"""Niceness of a thread for whose outcome nobody waits any more."""

T = TypeVar("T")


class BusyError(RuntimeError):
    """The server has no place for a request now."""


class _TooSlow(BaseException):
    """Raised inside a thread whose time is over; of no kind that code within catches."""


def in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Have an event loop call a function, from another thread; a loop that is closed hears nothing."""
    with contextlib.suppress(RuntimeError):  # the server has ended
        loop.call_soon_threadsafe(function, *args)


async def outcome_of(future: concurrent.futures.Future[T]) -> T:
    """Return what another thread's future comes to; it goes on where nobody waits any more."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: in_loop(loop, done.set))
    await done.wait()
    try:
        return future.result()
    finally:
        del future  # an error would have itself among the variables of its traceback


class Preparing:
    """Calls functions in threads of their own, each for some seconds at most.

    Args:
        seconds: after which a function is told to end. Python's code does at once; compiled code goes on, behind all
            others on the processor, and keeps its place.
        places: functions at once.
    """

    def __init__(self, seconds: float, places: int) -> None:
        self.seconds = seconds
        self.places = asyncio.Semaphore(places)

    async def __call__(self, field: str, function: Callable[..., T], *args: Any) -> T:
        """Return what ``function(*args)`` returns.

        Raises:
            Refused: it takes too long; the error names ``field``.
            BusyError: other requests took all places for as long, or the system gives no thread.
        """
        try:
            await asyncio.wait_for(self.places.acquire(), self.seconds)
        except asyncio.TimeoutError:
            raise BusyError("other requests are being read; try again later") from None
        try:
            work = _Work(asyncio.get_running_loop(), lambda: function(*args), self.places.release)
        except BaseException as error:  # it has no thread, which would free the place
            self.places.release()
            if isinstance(error, RuntimeError):
                raise BusyError(f"{error}; try again later") from error
            raise
        try:
            return await asyncio.wait_for(work.outcome, self.seconds)
        except asyncio.TimeoutError:
            reason = f"takes more than {self.seconds:g} s to read; make it shorter or simpler (--max-seconds)"
            raise Refused(field, reason) from None
        finally:
            work.end()


class _Work:
    """A function in a thread; ``outcome`` is its future, ``release`` called in the loop once the thread is over."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[], Any], release: Callable[[], None]
    ) -> None:
        self.loop, self.function, self.release = loop, function, release
        self.outcome: asyncio.Future[Any] = loop.create_future()
        self.lock, self.over = threading.Lock(), False
        self.thread = threading.Thread(target=self._run, daemon=True, name=THREAD)
        self.thread.start()

    def end(self) -> None:
        """Have a function that goes on end."""
        with self.lock:
            if self.over or self.thread.ident is None or self.thread.native_id is None:
                return
            where = ctypes.c_ulong(self.thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(where, ctypes.py_object(_TooSlow))
            if sys.platform == "linux":  # where threads have a niceness of their own
                os.setpriority(os.PRIO_PROCESS, self.thread.native_id, ASIDE_NICENESS)

    def _run(self) -> None:
        try:
            self._tell(self._called())
        except _TooSlow:  # nobody waits
            pass
        finally:
            in_loop(self.loop, self.release)

    def _called(self) -> tuple[Any, Exception | None]:
        try:
            return self.function(), None
        except Exception as error:
            return None, error
        finally:
            with self.lock:
                self.over = True

    def _tell(self, result: tuple[Any, Exception | None]) -> None:
        def tell() -> None:
            if self.outcome.done():
                return
            value, error = result
            if error is None:
                self.outcome.set_result(value)
            else:
                self.outcome.set_exception(error)

        in_loop(self.loop, tell)
