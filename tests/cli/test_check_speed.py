"""What ``gsd-kernels check`` says of speed, and when it says nothing."""

from __future__ import annotations

import os

import pytest

from gsd_kernels_cli import busy, check
from gsd_kernels_cli.comparison import Run
from gsd_kernels_hf.engine.stats import GenerationStats


def rounds(**seconds):
    """One prompt of twelve tokens, decoded in all ways; with drafts in four steps."""
    stats = GenerationStats(new_tokens=12, steps=4, sequence_steps=4)
    runs = {name: Run(list(range(12)), taken, taken, 12, 1, None) for name, taken in seconds.items()}
    runs[check.GRAPH] = Run(list(range(12)), seconds[check.GRAPH], 1.0, 4, 1, stats)
    return [runs]


def test_the_speed_is_told_by_its_causes():
    summary = check._summary(rounds(plain=12.0, undrafted=6.0, graph=3.0), [None], 0.0)
    assert summary["speedup"] == pytest.approx(4) and summary["why_not_believed"] is None
    assert summary["speedup_without_drafts"] == pytest.approx(2) and summary["speedup_by_drafts"] == pytest.approx(2)
    assert "4.00× as fast" in check._speed(summary) and "2.00× by drafts" in check._speed(summary)


@pytest.mark.parametrize(
    ("graph", "share", "reason"), [(1.0, 0.0, "more than 3.00 tokens a step"), (3.0, 0.5, "busy with other work, 50%")]
)
def test_no_speed_that_cannot_be(graph, share, reason):
    summary = check._summary(rounds(plain=12.0, undrafted=6.0, graph=graph), [None], share)
    assert reason in summary["why_not_believed"] and "as fast" not in check._speed(summary)


def test_others_are_what_this_process_is_not(tmp_path, monkeypatch):
    stat, times = tmp_path / "stat", [1.0, 0.0, 0.0, 0.0, 0.0]
    monkeypatch.setattr(busy, "STAT", stat)
    monkeypatch.setattr(busy, "PROC", tmp_path)
    monkeypatch.setattr(busy.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(busy.os, "times", lambda: tuple(times))
    stat.write_text("cpu 100 0 0 100 0 0 0 0 0 0\n")
    others = busy.Others()
    stat.write_text("cpu 250 0 50 200 0 0 0 0 7 0\n")  # three seconds passed, two of them not idle
    times[0] = 2.5
    assert others.share() == pytest.approx((2.0 - 1.5) / 3.0)
    stat.unlink()
    assert others.share() is None and busy.Others().share() is None


def test_processes_that_this_one_started_are_not_others(tmp_path, monkeypatch):
    """Engines of a race live as long as it does, and start processes of their own."""
    monkeypatch.setattr(busy, "PROC", tmp_path)
    mine = os.getpid()
    for number, parent, ticks in ((mine, 1, 9), (900001, mine, 30), (900002, 900001, 5), (900003, 1, 70)):
        columns = ["S", parent, *[0] * 9, ticks, ticks, 1, 1, 0]
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} (a) name) {' '.join(map(str, columns))}\n")
    assert busy._of_descendants() == (2 * 30 + 2) + (2 * 5 + 2)


def test_times_are_distrusted_from_a_share_on():
    assert busy.distrust(None) is None and busy.distrust(busy.BUSY_SHARE) is None
    assert "busy with other work (47% of its processors): do not trust" in busy.distrust(0.47)
