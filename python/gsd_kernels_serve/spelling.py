"""JSON of answers that are large."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi.responses import Response


class Spelled(str):
    """JSON already."""


def spelled(value: Any, depth: int = 6, *, ascii: bool = False) -> str:
    """A value as JSON, in parts: the interpreter's other threads have their turns between them.

    Args:
        value: of lists, objects and what they hold; a :class:`Spelled` is put in as it is.
        depth: of lists and objects that are parts.
        ascii: whether other characters are escaped.
    """
    if isinstance(value, Spelled):
        return value
    if depth and isinstance(value, dict):
        members = (f"{json.dumps(key)}:{spelled(inner, depth - 1, ascii=ascii)}" for key, inner in value.items())
        return f"{{{','.join(members)}}}"
    if depth and isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value[:2]):
        return f"[{','.join(spelled(inner, depth - 1, ascii=ascii) for inner in value)}]"
    return json.dumps(value, ensure_ascii=ascii, allow_nan=False, separators=(",", ":"))


async def answer(value: Any) -> Response:
    """A response of JSON, spelled beside the event loop."""
    return Response(await asyncio.to_thread(spelled, value), media_type="application/json")
