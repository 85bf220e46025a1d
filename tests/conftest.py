"""Tests leave nothing behind: measured step costs go to a directory of their own. One thread for each process.

A run of many files ends with the slowest ones.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import sys
from collections import Counter
from typing import Any

# All that is imported below stays: looking through it for garbage, again and again while it grows, takes 7 s a process.
gc.disable()

# Read when torch and NumPy are loaded. The models are tiny and several test processes share the cores, on which
# threads without work would wait by asking again and again. Processes that tests start inherit it.
for variable, value in (("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE")):
    os.environ.setdefault(variable, value)

import pytest
import torch
from kept import pytest_addoption, pytest_runtest_makereport, pytest_runtest_setup  # noqa: F401

torch.set_num_threads(1)
for library in ("torchao", "torch.utils._pytree"):  # which tell of GPUs that are not here, and of each other
    logging.getLogger(library).setLevel(logging.ERROR)
pytest.register_assert_rewrite("ops.contracts")


def prepare_once_a_launch() -> None:
    """Make calls of functions inside a kernel take the language as the launch has prepared it: a third of the time.

    By itself Triton's interpreter prepares its language in every call of a function.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    languages_of = (tl, tl.core)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    ready: set[int] = set()  # languages that this launch has prepared, by their place in languages_of

    @functools.cache
    def languages(function: Any) -> frozenset[int]:
        names = function.__globals__.values()
        return frozenset(i for i, language in enumerate(languages_of) if any(value is language for value in names))

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


if os.environ.get("TRITON_INTERPRET") == "1":
    prepare_once_a_launch()


def mark_what_is_slow(items: list[pytest.Item]) -> None:
    """Of tests with many cases of whole generations, all cases but the first are slow together."""
    seen: set[str] = set()
    for item in items:
        if any(item.get_closest_marker(name) is not None for name in ("quick", "slow")):
            continue
        test = item.nodeid.partition("[")[0]
        if test in seen:
            item.add_marker(pytest.mark.slow)
        if not any(mark.name in ("gpu", "skip") for mark in item.iter_markers()):
            seen.add(test)


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where triton is interpreted, the interpreter's cases run and no others; elsewhere all but these.

    What is long begins, so that no process waits for another's last test, nor makes a fixture that another has. What is
    one of many, as two of three interpreted cases of a test are, runs where ``EVERY`` is set or something is asked for
    by name.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    mark_what_is_slow(items)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    every = bool(os.environ.get("EVERY")) or any("::" in name for name in config.args)
    cases: Counter[str] = Counter()

    def stays(item: pytest.Item) -> bool:
        if (item.get_closest_marker("interpreter") is not None) != interpreted:
            return False
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        return every or not (item.get_closest_marker("many") or (interpreted and cases[test] % 3 != 1))

    kept = {item: stays(item) for item in items}
    if others := [item for item, stay in kept.items() if not stay]:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item, stay in kept.items() if stay]


def pytest_collection_finish() -> None:
    """From here on garbage is collected, and what was imported is not looked through."""
    gc.freeze()
    gc.enable()
    atexit.register(thaw)


def thaw() -> None:
    """Leave the interpreter what it frees at its end, or libraries complain of leaks."""
    gc.disable()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_learned_yet():
    """Engines of a test begin as those of a new process do: what another test's learned is not theirs."""
    yield
    if store := sys.modules.get("gsd_kernels_hf.store"):
        for known in (store._shared, store._waiting, store._told):
            known.clear()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSD_KERNELS_CACHE", str(tmp_path_factory.mktemp("gsd-cache")))
        yield
