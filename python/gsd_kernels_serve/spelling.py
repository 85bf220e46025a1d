"""JSON of answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fastapi.responses import Response

_WHOLE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def spelled(value: Any) -> str:
    """An event's value as JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


async def answer(function: Callable[..., Any], *args: Any) -> Response:
    """A response of JSON, made and spelled beside the event loop in parts: other threads have turns between them."""
    return Response(
        await asyncio.to_thread(lambda: "".join(_WHOLE.iterencode(function(*args)))), media_type="application/json"
    )
