"""The corpus table: its prompts, and a table of what was measured."""

from __future__ import annotations

import copy

import pytest
from corpora import corpus_of

from gsd_kernels_bench.generation import corpus_table
from gsd_kernels_bench.generation.corpus_tasks import CHANGED, LINES, TASKS, VISITED, demo_sources, texts_of


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_different_and_as_many_as_asked(task):
    found = texts_of(task, 4, 12)
    assert len(found) == (12 if task == "agent" else 4)
    assert len({text for _, text in found}) == len(found) and all(text.strip() for _, text in found)


def test_an_edit_changes_three_lines():
    for _, text in texts_of("edit", 8, 0):
        original, changed = (part.strip("\n").split("\n") for part in text.split("\n\n\n"))
        assert len(original) == LINES and len(changed) < LINES
        assert sum(a != b for a, b in zip(original, changed, strict=False)) == CHANGED


def test_the_loop_comes_back_to_its_files_and_the_corpus_lacks_them():
    names = [name.partition(": ")[2] for name, _ in texts_of("agent", 0, 2 * VISITED)]
    assert names[:VISITED] == names[VISITED:] and len(set(names)) == VISITED
    assert not set(names) & {source.name for source in demo_sources(held_out=False)}


def test_look_ups_of_a_sessions_copy_are_timed(tmp_path):
    timed = corpus_table.Timed(corpus_of(tmp_path / "index", [1, 2, 3]))
    assert copy.copy(timed).seconds is timed.seconds and type(copy.copy(timed)) is corpus_table.Timed


def test_the_table_names_what_is_missing():
    def runs(scale):
        return [
            {
                **{"prompt": "a", "competitor": name, "tokens": 8, "seconds": scale, "target_forwards": 4},
                **{"lookup_seconds": 0.01, "same": True},
            }
            for name in ("plain", "lookup", "history", "calls", "corpus", "auto")
        ]

    cells = [{"task": t, "missing": {"suffix": "no"}, "prompt_tokens": [3], "runs": runs(1.0)} for t in TASKS]
    index = {"build_seconds": 1.0, "tokenize_seconds": 2.0, "tokens": 9, "documents": 2, "bytes": 1}
    index |= {"open_seconds": 0.01, "second_process": {"own": 0, "mapped_resident": 4096}}
    settings = {"dtype": "float32", "new_tokens": 8}
    text = corpus_table.table({"cells": cells, "index": index, "settings": settings, "parameters": 1_000_000})
    assert "8.0 (2.00)" in text and "1.00 (1.00–1.00)" in text and "suffix decoding, verified here: no." in text
    assert "1.0% of the time" in text
