"""Reading of requests beside the event loop: templates, tokens and schemas take as long as a client makes them."""

from __future__ import annotations

import asyncio
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


def _end(outcome: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if outcome.done():  # nobody waits any more
        return
    if error is None:
        outcome.set_result(value)
    else:
        outcome.set_exception(error)


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
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def run(outcome: asyncio.Future[T]) -> None:
            try:
                in_loop(loop, _end, outcome, function(*args), None)
            except Exception as error:
                in_loop(loop, _end, outcome, None, error)
            finally:
                in_loop(loop, self.places.release)

        try:
            await asyncio.wait_for(self.places.acquire(), self.seconds)
        except asyncio.TimeoutError:
            raise BusyError("other requests are being read; try again later") from None
        try:
            threading.Thread(target=run, args=(outcome,), daemon=True, name=THREAD).start()
        except RuntimeError as error:
            self.places.release()
            raise BusyError(f"{error}; try again later") from error
        try:
            return await asyncio.wait_for(outcome, self.seconds)
        except asyncio.TimeoutError:
            reason = f"takes more than {self.seconds:g} s to read; make it shorter or simpler (--max-seconds)"
            raise Refused(field, reason) from None
        finally:
            del outcome  # an error would have itself among the variables of its traceback
