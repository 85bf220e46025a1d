"""``gsd-kernels chat``: turns, commands, an answer that is stopped, a conversation that is too long."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import save_pair
from terminal import run
from transformers import AutoModelForCausalLM, AutoTokenizer

import gsd_kernels
from gsd_kernels_cli import chat as command
from gsd_kernels_cli.chat import Conversation
from gsd_kernels_cli.pair import load_pair
from gsd_kernels_cli.streaming import StdoutStreamer

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
