"""The table of the demo's race: what was raced, when the times are not told, and how an answer ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gsd_kernels_cli import demo_chat
from gsd_kernels_cli.demo_chat import HF, OURS
from gsd_kernels_cli.streaming import is_cut


def report(share, done=2, asked=2):
    way = {"dtype": "float32", "tokens_per_forward": 1.5, "compared_with": None, "equal": 2, "within_rounding": 0}
    rates = {HF: 2, OURS: 9}
    ways = [{**way, "way": name, "tokens_per_second": rate, "beyond_rounding": 0} for name, rate in rates.items()]
    race = {"prompts": done, "asked": asked, "seconds": 90.0, "max_new_tokens": 64, "others_share": share}
    return {**race, "ways": ways}


@pytest.mark.parametrize("share", [0.02, 0.6])
def test_no_factor_is_told_of_a_busy_machine(share, capsys):
    demo_chat._print_race(report(share))
    shown = capsys.readouterr().out
    assert ("4.50" in shown) == (share < 0.1)
    assert ("do not trust these times" in shown) == (share > 0.1)
    assert "busy" not in shown or shown.index("busy") < shown.index(OURS), "before the figures"


def test_the_title_says_why_prompts_are_left_out():
    assert demo_chat._title(report(0.0)) == "The same 2 prompts, 64 tokens at most, every way in turn:"
    late = demo_chat._title(report(0.0, done=1, asked=5))
    assert late.startswith("The same prompt, 64 tokens") and "time is up after 1 of 5 prompts: --seconds 90" in late


def test_a_text_is_cut_where_it_does_not_end_itself():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[2, 3]))
    assert is_cut(model, [5, 6, 7], 3) and not is_cut(model, [5, 6, 3], 3) and not is_cut(model, [5, 6], 3)
    model.generation_config.eos_token_id = None
    assert is_cut(model, [5, 6, 7], 3)
