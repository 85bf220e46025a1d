"""`gsd-kernels bench real`: its prompts, the names of ways, and the tables made of a report."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from gsd_kernels_bench import readme
from gsd_kernels_bench.generation.real import names
from gsd_kernels_bench.generation.real.names import (
    HF,
    HF_LOOKUP,
    HISTORY,
    KNOWN,
    PACKED,
    PACKED_HISTORY,
    PLAIN,
    plain_of,
)
from gsd_kernels_bench.generation.real.prompts import NOT_FETCHED, first_of_each_kind, read_chats
from gsd_kernels_bench.generation.real.report import RealReport, equal_table, lengths_table, remarks, table, verdicts

KINDS = {"model": "M", "dtype": "bfloat16", "new_tokens": 8}


def run(prompt, way, seconds, **more):
    found = {"prompt": prompt, "way": way, "round": 0, "tokens": 8, "ended": False, "seconds": seconds, "steps": 4}
    return {**found, "rows_per_step": None, **more}


def report():
    prompts = {name: {"kind": kind, "tokens": 5} for name, kind in (("a", "chat"), ("b", "code"))}
    made = RealReport(settings=KINDS, environment={}, parameters=10, prompts=prompts)
    made.peers = {"llama-cpp-q4_0": {"bits": 4.5}}
    for prompt in prompts:
        made.runs += [
            run(prompt, HF, 8.0),
            run(prompt, "llama-cpp-q4_0-lookup", 2.0, same=False, steps=None),
            run(prompt, PLAIN, 4.0, same=True),
            run(prompt, HISTORY, 1.0, same=prompt == "a", within_rounding=True, same_as_plain=True),
        ]
    made.summarise([HF, "llama-cpp-q4_0-lookup", PLAIN, HISTORY])
    return made


def test_its_prompts_are_many_and_of_every_kind():
    chats, tuning = read_chats()
    assert len(chats) >= 24 and len({chat.kind for chat in chats}) >= 10
    assert not {chat.name for chat in chats} & {chat.name for chat in tuning}, "settings are chosen on others"
    assert len(first_of_each_kind(chats, 1)) == len({chat.kind for chat in chats})


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a.txt", "One.\n\nTwo.\n", 2),
        ("a.jsonl", '{"prompt": "One."}\n{"messages": [{"role": "user", "content": "Two."}], "kind": "k"}\n', 2),
        ("a.json", '["One."]', 1),
    ],
)
def test_prompts_of_ones_own(tmp_path, name, text, count):
    (tmp_path / name).write_text(text)
    chats, _ = read_chats(tmp_path / name)
    assert len(chats) == count and chats[0].messages == [{"role": "user", "content": "One."}]


@pytest.mark.parametrize("text", ["", "[]", "[3]", '[{"messages": []}]', '[{"messages": [{"role": "user"}]}]', "{"])
def test_prompts_that_are_none_are_refused_by_option_and_file(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"--prompts: .*a\.json"):
        read_chats(file)


SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 82, "category": "coding", "turns": ["Code."], "reference": ["x"]},
    {"question_id": 161, "category": "translation", "turns": ["Translate."]},
]


def test_the_questions_of_spec_bench(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SPEC_BENCH))
    chats, _ = read_chats(file)
    assert [(chat.name, chat.kind) for chat in chats] == [
        ("81", "mt_bench"),
        ("82", "mt_bench"),
        ("161", "translation"),
    ]
    assert [chat.name for chat in first_of_each_kind(chats, 1)] == ["81", "161"]
    second = chats[0].answered("Once.")
    assert (second.name, second.question, second.kind) == ("81/2", "81", "mt_bench")
    assert [(turn["role"], turn["content"]) for turn in second.messages] == [
        ("user", "Write."), ("assistant", "Once."), ("user", "Again."),
    ]  # fmt: skip
    assert second.answered("Twice.") is None and chats[1].answered("x") is None


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], '"turns", a list of texts'),
        (["a", 3], '"turns", a list of texts'),
        ("a", '"turns", a list of texts, got str'),
        ([f"{NOT_FETCHED} USING SPECDEC_BENCH\n\nMore"], "its text is not in the file.*prepare_data"),
    ],
)
def test_questions_without_a_text_are_refused(turns, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question_id": 1, "category": "c", "turns": turns}))
    with pytest.raises(ValueError, match=rf"--prompts: .*a\.jsonl, prompt 1: .*{message}"):
        read_chats(tmp_path / "a.jsonl")


def test_means_of_accepted_tokens_are_over_steps_and_over_questions():
    """A question of two turns counts once in the one, by its steps in the other."""
    prompts = {name: {"kind": "k", "tokens": 5, "question": name[0]} for name in ("a", "a/2", "b")}
    made = RealReport(settings=KINDS, environment={}, parameters=10, prompts=prompts)
    for prompt, tokens, steps in (("a", 8, 4), ("a/2", 12, 1), ("b", 2, 2)):
        made.runs.append(run(prompt, HISTORY, 1.0, tokens=tokens, steps=steps))
    made.summarise([HISTORY])
    (row,) = made.summary
    assert row["tokens_per_step"] == row["by_kind"]["k"]["tokens_per_step"] == pytest.approx(22 / 7)
    assert row["acceptance_length"] == row["by_kind"]["k"]["acceptance_length"] == pytest.approx((20 / 5 + 2 / 2) / 2)
    lines = lengths_table(asdict(made)).splitlines()
    assert "| accepted tokens | 3.14 | 3.14 |" in lines[-2] and "| acceptance length | 2.50 | 2.50 |" in lines[-1]


def test_rates_ratios_and_texts_follow_from_the_runs():
    made = report()
    rows = {row["way"]: row for row in made.summary}
    assert rows[HF]["tokens_per_second"] == 1 and rows[HISTORY]["tokens_per_second"] == 8
    assert rows["llama-cpp-q4_0-lookup"]["bits"] == 4.5 and rows[HISTORY]["bits"] == 16
    assert made.ratios[HF]["value"] == pytest.approx(8) and made.ratios[PLAIN]["value"] == pytest.approx(4)
    assert made.strongest == {"wide": HF, "narrow": "llama-cpp-q4_0-lookup", "transformers": HF}
    data = json.loads(json.dumps(asdict(made)))
    lines = table(data).splitlines()
    assert "1 of 2" in lines[-1] and "as our plain 2 of 2" in lines[-1] and "**" in lines[-1], "ours is the fastest"
    assert any("llama.cpp, q4_0, n-gram drafts" in said for said in verdicts(data))


def test_few_prompts_give_no_interval_and_a_busy_machine_is_named():
    made = report()
    assert made.ratios[HF]["low"] is None and made.ratios[HF]["value"] == pytest.approx(8)
    data = json.loads(json.dumps(asdict(made)))
    assert remarks(data) == ["No intervals: 2 prompts are too few; from 6 on there are."]
    assert "8.00 times transformers' plain decoding" in verdicts(data)
    made.busy, made.stopped = "This machine was busy", True
    made.prompts |= {f"more {number}": {"kind": "chat", "tokens": 5} for number in range(4)}
    assert remarks(asdict(made))[:2] == ["This machine was busy", "Stopped after 2 of 6 prompts."]
    for prompt in list(made.prompts)[2:]:
        made.runs += [run(prompt, HF, 8.0), run(prompt, HISTORY, 1.0)]
    made.summarise()
    assert made.ratios[HF]["low"] == pytest.approx(8), "six are enough"


def test_the_readme_shows_a_stored_run(tmp_path):
    with pytest.raises(readme.MissingResultError, match="bench real"):
        readme.real(tmp_path)
    made = report()
    made.environment = {"device": "CPU", "device_type": "cpu", "threads": 2, "date": "2026-01-01", "commit": "c"}
    made.environment["versions"] = {"torch": "2", "transformers": "5"}
    made.write(tmp_path, "real-bfloat16")
    shown = readme.real(tmp_path)
    assert "In bfloat16 the history alone gives 8 tokens/s" in shown and "transformers, plain" in shown


def test_texts_with_drafts_are_counted_beside_their_own_engines_plain_ones():
    """transformers' from what was compared with its plain text, others' from what was compared with theirs."""
    made = report()
    for prompt in made.prompts:
        made.runs += [
            run(prompt, HF_LOOKUP, 8.0, same=prompt == "a"),
            run(prompt, "openvino", 3.0, same=False),
            run(prompt, "openvino-lookup", 2.0, same=False, same_as_plain=prompt == "b"),
            run(prompt, PACKED, 2.0, same=True, same_as_plain=True),
        ]
    made.summarise([HF, HF_LOOKUP, "openvino", "openvino-lookup", PLAIN, HISTORY, PACKED])
    data = json.loads(json.dumps(asdict(made)))
    assert equal_table([data, {**data, "settings": {**KINDS, "dtype": "float32"}}, data]).splitlines()[2:] == [
        f"| {engine} | {drafts} | {dtype} | {count} |"
        for dtype in ("bfloat16", "float32")
        for engine, drafts, count in (
            ("transformers", "prompt lookup", "1 of 2"),
            ("OpenVINO GenAI", "prompt lookup", "1 of 2"),
            ("gsd_kernels", "history alone, no draft model", "2 of 2"),
        )
    ]
    lines = {line.split("|")[1].strip(): line for line in table(data).splitlines()[2:]}
    assert "0 of 2; as its plain 1 of 2" in lines["OpenVINO GenAI, prompt lookup"]
    assert "plain" not in lines["transformers, prompt lookup"]


@pytest.mark.parametrize(
    ("way", "plain"),
    [
        (HF_LOOKUP, HF),
        ("openvino-int8-floats-lookup", "openvino-int8-floats"),
        ("llama-cpp-draft", "llama-cpp"),
        (PACKED_HISTORY, PLAIN),
        *((way, PLAIN) for way in names.OURS),
    ],
)
def test_every_way_has_a_plain_one(way, plain):
    assert plain_of(way) == plain and plain in KNOWN
