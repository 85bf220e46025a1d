"""The way in: a request's body is read whole, within bounds, before anything looks at it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from .limits import READ_SECONDS, Limits
from .listen import name_of
from .service import answer_of

log = logging.getLogger(__name__)


class Door:
    """ASGI middleware: bodies have a size and a time, requests a number and a name.

    Errors are answered here, within what adds the headers that web pages need; those of the server itself are logged.

    Args:
        app: the application.
        limits: of all requests.
        hosts: names of this machine; a page of another name, which its owner lets point here, is sent away.
    """

    def __init__(self, app: Any, limits: Limits, hosts: Sequence[str] | None = None) -> None:
        self.app, self.limits = app, limits
        self.hosts = None if hosts is None or "*" in hosts else {host.lower() for host in hosts}
        self.under_way = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, headers = False, {"Connection": "close"}  # where a request is sent away
        name = dict(scope["headers"]).get(b"x-request-id") or str(uuid.uuid4()).encode()
        scope.setdefault("state", {})["request_id"] = name.decode("latin-1")

        async def sent(message: Any) -> None:
            nonlocal begun
            if not begun:
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
            begun = True
            await send(message)

        posts = scope["method"] == "POST"
        try:
            host = name_of(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))  # without its port
            if self.hosts is not None and host not in self.hosts:
                raise HTTPException(400, f"Host: {host!r} is not this server's name; allow it by --allowed-host")
            body = await self._body(receive) if posts else b""
            if body is None:  # the client is gone
                return
            if posts and self.under_way >= self.limits.requests:
                raise HTTPException(503, f"{self.under_way} requests are under way; try again later (--max-requests)")
            left: list[bytes] = [body]
            del body
            headers.clear()

            async def whole() -> Any:
                return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

            self.under_way += posts
            try:
                await self.app(scope, whole, sent)
            finally:
                self.under_way -= posts
        except (Exception, asyncio.CancelledError) as error:
            if begun:
                raise
            status, answer = answer_of(error, scope["path"])
            if status == 500:
                log.exception("%s failed", scope["path"])
            await JSONResponse(answer, status_code=status, headers=headers)(scope, receive, sent)

    async def _body(self, receive: Any) -> bytes | None:
        """The body, or ``None`` where the client goes away. What is beyond the bound is read and dropped.

        Raises:
            HTTPException: it is too large, or too slow.
        """
        body, size, more = bytearray(), 0, True
        until = time.monotonic() + READ_SECONDS
        while more:
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body was not sent within {READ_SECONDS:g} s") from None
            if message["type"] != "http.request":
                return None
            size += len(message.get("body", b""))
            if size <= self.limits.body:
                body += message.get("body", b"")
            else:
                body.clear()
            more = message.get("more_body", False)
        if size > self.limits.body:
            raise HTTPException(413, f"{size:,} bytes; this server takes {self.limits.body:,} (--max-body): send fewer")
        return bytes(body)
