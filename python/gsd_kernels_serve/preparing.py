"""Reading of requests beside the event loop: templates, tokens and schemas take as long as a client makes them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .checks import Refused

THREAD = "gsd_kernels request"
"""Name of the threads."""

T = TypeVar("T")


class BusyError(RuntimeError):
    """The server has no place for a request now."""


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
        seconds: after which nobody waits for a function any more; it goes on, and keeps its place until it is over.
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
        loop, future = asyncio.get_running_loop(), concurrent.futures.Future[T]()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)
            finally:
                in_loop(loop, self.places.release)

        try:
            await asyncio.wait_for(self.places.acquire(), self.seconds)
        except asyncio.TimeoutError:
            raise BusyError("other requests are being read; try again later") from None
        try:
            threading.Thread(target=run, daemon=True, name=THREAD).start()
        except RuntimeError as error:
            self.places.release()
            raise BusyError(f"{error}; try again later") from error
        try:
            return await asyncio.wait_for(outcome_of(future), self.seconds)
        except asyncio.TimeoutError:
            reason = f"takes more than {self.seconds:g} s to read; make it shorter or simpler (--max-seconds)"
            raise Refused(field, reason) from None
