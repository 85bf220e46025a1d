"""JSON of answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi.responses import Response

_WHOLE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def spelled(value: Any) -> str:
    """An event's value as JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


async def answer(value: Any) -> Response:
    """A response of JSON, spelled beside the event loop in parts: other threads have their turns between them."""
    return Response(await asyncio.to_thread(lambda: "".join(_WHOLE.iterencode(value))), media_type="application/json")
