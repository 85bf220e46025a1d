"""The command line: every command once on a small pair; what goes where; wrong values, refused in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import typer
from checkpoints import save_pair
from rich.text import Text
from terminal import one_line_error, run
from typer.testing import CliRunner

import gsd_kernels
from gsd_kernels_cli import comparison, demo, values
from gsd_kernels_cli.app import app
from gsd_kernels_cli.commands import Commands
from gsd_kernels_cli.options import read_graph_config, read_prompts
from gsd_kernels_cli.pair import load_pair
from gsd_kernels_hf import learning
from gsd_kernels_hf.files import checkpoint_place, model_place
from gsd_kernels_hf.sources.checkpoints import fetch
from gsd_kernels_hf.sources.corpus import Corpus

# ---- The command line: what goes where, exit codes, JSON; every command once, on a small pair


TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
SMALL = ["--graph-config", "graph,depth=3,width=2,branch=2,max_rows=8"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), chat_template=TEMPLATE)
    return ["--model", target, "--draft", draft]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))


def done(*arguments, code=0, **more):
    result = run(*arguments, **more)
    assert result.exit_code == code, result.output
    return result


def stats_of(result):
    return json.loads(result.stderr.splitlines()[-1])


# ---- the program


def test_help_needs_neither_torch_nor_transformers():
    code = (
        "import sys; sys.argv = ['gsd-kernels', '--help']\n"
        "from gsd_kernels_cli.app import main\n"
        "try: main()\n"
        "except SystemExit as leave: assert not leave.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    commands = "demo chat generate serve check index export learn distill train-heads train-drafter doctor bench"
    assert all(command in shown.stdout for command in commands.split()) and "130 interrupted" in shown.stdout


def test_a_version_is_told_and_nothing_to_do_is_a_usage_error():
    assert run("--version").stdout == f"gsd-kernels {gsd_kernels.__version__}\n"
    assert [run(*given).exit_code for given in ((), ("fly",), ("generate", "x", "--dtype", "int3"))] == [2, 2, 2]


# ---- generate


@pytest.fixture(scope="module")
def expected(pair):
    """What transformers' own generate continues."""
    loaded = load_pair(pair[1], "none")

    def text(prompts, new_tokens):
        inputs = loaded.encode(prompts)
        out = loaded.target.generate(**inputs, **loaded.padding, do_sample=False, max_new_tokens=new_tokens)
        return loaded.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return text


def test_generate_streams_the_continuation_alone(pair, expected):
    result = done("generate", *pair, *SMALL, "--max-new-tokens", 24, "--stats", "json", "hello")
    assert result.stdout == expected(["hello"], 24)[0] + "\n"
    stats = stats_of(result)
    assert stats["new_tokens"] == 24 and stats["tokens_per_step"] > 1 and stats["steps"] < 24
    unstreamed = run("generate", *pair, *SMALL, "--max-new-tokens", 24, "--no-stream", "--echo", "hello")
    assert unstreamed.stdout == "hello" + result.stdout
    table = done("generate", *pair[:2], "--max-new-tokens", 4, "--stats", "table", "hello")
    assert "plain decoding" in table.stderr and "tokens per step" in table.stderr and "per step" not in table.stdout


def test_generate_reads_arguments_stdin_files_and_chats(pair, expected, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    options = ["generate", *pair, *SMALL, "--max-new-tokens", 8]
    hello = run(*options, "hello").stdout
    assert run(*options, stdin="hello").stdout == run(*options, "--prompt-file", "-", stdin="hello").stdout == hello
    assert run(*options, "--prompt-file", file).stdout == run(*options, "one\n\ntwo\n").stdout
    first, second = expected(["one", "two"], 8)
    assert run(*options, "--prompt-file", file, "--lines").stdout == f"==> 1 <==\n{first}\n==> 2 <==\n{second}\n"
    assert done(*options, "--chat", "hi").stdout == run(*options, "[user]hi[assistant]").stdout


def test_generate_sampling_depends_on_the_seed_not_on_the_draft(pair, expected):
    def text(*more, draft=pair):
        sampling = ["--max-new-tokens", 16, "--temperature", 0.8, "--top-k", 20]
        return done("generate", *draft, *sampling, *more, "hello").stdout

    seeded = text(*SMALL, "--seed", 5)
    assert seeded == text("--graph-config", "chain", "--seed", 5)
    assert seeded == text("--seed", 5, draft=[*pair[:2], "--draft", "none"])
    assert seeded != text(*SMALL, "--seed", 6)
    greedy = run("generate", *pair, *SMALL, "--max-new-tokens", 16, "--temperature", 0, "hello").stdout
    assert greedy == expected(["hello"], 16)[0] + "\n"
    for criterion, lossless in (("speculative", True), ("typical", False)):
        options = ["--max-new-tokens", 8, "--temperature", 0.8, "--criterion", criterion, "--stats", "json"]
        stats = stats_of(done("generate", *pair, "--graph-config", "chain", *options, "hello"))
        assert (stats["criterion"], stats["lossless"]) == (criterion, lossless)


def another_tokenizer(pair, folder):
    """A copy of the target behind another tokenizer, which is written second."""
    import two_tokenizers as two
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gsd_kernels_hf.model.vocabulary import Vocabulary

    ours = AutoTokenizer.from_pretrained(pair[1])
    theirs = two.renumbered(ours, names={name: getattr(ours, name) for name in ("pad_token", "bos_token", "eos_token")})
    both = (Vocabulary.of(one, "tokenizer") for one in (ours, theirs))
    two.behind(AutoModelForCausalLM.from_pretrained(pair[1]), *both).save_pretrained(folder)
    refused = done("generate", *pair[:2], "--draft", folder, "Hello", code=2).stderr
    assert "error: --draft: " in refused and f"{folder} has no tokenizer that can be read" in refused
    theirs.save_pretrained(folder)
    return [*pair[:2], "--draft", folder]


def a_drafter(pair, folder):
    from sources.drafters import eagle3_config, random_eagle3, safeailab, save
    from transformers import AutoModelForCausalLM

    config = eagle3_config(AutoModelForCausalLM.from_pretrained(pair[1]))
    return [*pair[:2], "--drafter", save(folder, config, safeailab(random_eagle3(config).float()))]


def own_heads(pair, folder):
    import shutil

    from sources.mtp_checkpoints import give_head

    shutil.copytree(pair[1], folder, dirs_exist_ok=True)
    give_head(folder, "mimo")
    return ["--model", folder, "--drafter", "mtp"]


@pytest.mark.parametrize("drafts", [another_tokenizer, a_drafter, own_heads], ids=lambda make: make.__name__)
def test_whatever_drafts_the_text_is_the_targets(drafts, pair, expected, tmp_path):
    given = [*drafts(pair, tmp_path / "draft"), "--max-new-tokens", 24, "--no-stream", *SMALL]
    result = done("generate", *given, "--stats", "json", "Hello")
    assert result.stdout == expected(["Hello"], 24)[0] + "\n" and stats_of(result)["draft_rows"] > 0
    if drafts is another_tokenizer:
        assert sum(stats_of(result)["accepted"][2:]) > 0, "nothing of the draft was accepted"


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (None, None),
        ("auto", "auto"),
        ("tree", "tree"),
        ("depth=4, width=2", gsd_kernels.GraphConfig(depth=4, width=2)),
        ("tree,sibling_ratio=0.1", gsd_kernels.GraphConfig(merge_context=-1, sibling_ratio=0.1)),
        ("chain,depth=3,max_path=none", gsd_kernels.GraphConfig.preset("chain", depth=3)),
    ],
)
def test_graph_config_option(text, config):
    assert read_graph_config(text) == config


# ---- check


@pytest.mark.slow
def test_check_equal(pair):
    result = done("check", *pair, *SMALL, "--max-new-tokens", 24, "--json", "hello", "graph")
    report = json.loads(result.stdout)
    assert report["summary"]["verdict"] == "equal" and report["summary"]["equal"] == 2
    assert report["dtype"] == "float32" and report["graph_config"]["max_rows"] == 8
    for row in report["prompts"]:
        assert row["equal"] and row["divergence"] is None and row["new_tokens"] == 24
        assert row["plain"]["target_forwards"] == 24 > row["graph"]["target_forwards"]
        assert row["graph"]["stats"]["tokens_per_step"] > 1
        if sys.platform == "linux":
            assert min(row["plain"]["peak_bytes"], row["graph"]["peak_bytes"]) > 2**20
    shown = done("check", *pair, *SMALL, "--max-new-tokens", 4, "[INST] hello").stdout
    assert "1 of 1 prompts: the same tokens" in shown and "[INST] hello" in shown


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
    own = [*pair, "--prompt-file", tmp_path / "asked", "--lines"]
    options = ["--max-new-tokens", 24, "--seconds", 0, "--out", tmp_path / "out", "--json", tmp_path / "numbers.json"]
    result = done("demo", *(own if whose == "own" else ["--embedded"]), *options)
    report = json.loads((tmp_path / "numbers.json").read_text())
    asked = [answer["question"] for answer in report["answers"]]
    assert asked == ["def first(n):", "import os"] if whose == "own" else len(asked) == 1
    assert all(answer["tokens_per_step"] >= 1 for answer in report["answers"])  # how many, the clock decides
    ours = report["race"]["ways"][-1]
    assert ours["way"] == "gsd_kernels, draft model" and ours["equal"] == report["race"]["prompts"] == 1
    assert "its draft model has" in result.stdout and "time is up after 1 of" in result.stdout
    assert report["drawing"]["nodes"] > report["drawing"]["accepted_tokens"] >= 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"step.svg", "step.png"}


# ---- index and learn: files that later calls draft with

TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.py").write_text(TEXT)
    (folder / "texts" / "b.bin").write_bytes(b"\xff\xfe\x00")
    made = done("index", folder / "texts", "-o", folder / "corpus", "--json")
    assert "1 files are not UTF-8" in made.stderr and json.loads(made.stdout)["documents"] == 1
    return folder / "corpus"


def test_a_corpus_drafts_beside_which_sources(corpus):
    prompt = "def fibonacci(n):\n    if n"
    arguments = ("generate", demo.path() / "target", prompt, "--max-new-tokens", 24, "--no-stream")
    plain = done(*arguments, "--draft", "none")
    found = run(*arguments, "--draft", "none", "--corpus", corpus, "--graph-config", "graph", "--stats", "json")
    assert found.stdout == plain.stdout and stats_of(found)["steps"] < 24, found.stderr

    def names(**options):
        sources = load_pair(None, **options, corpus=str(corpus)).speculation["draft_sources"]
        return [source.name if isinstance(source, Corpus) else source for source in sources]

    assert names(draft=None) == ["model", "history", "corpus"]
    assert names(draft="history") == ["history", "corpus"] and names(draft="none") == ["corpus"]
    assert names(draft="none", heads="demo") == ["heads", "history", "corpus"]


def test_what_was_learned_changes_no_text(pair, tmp_path, monkeypatch):
    target = pair[1]
    monkeypatch.setattr(learning, "everyday_prompts", lambda: ["one", "two"])
    own = done("learn", target, "--max-new-tokens", 4, "-o", tmp_path / "own.safetensors")
    assert f"{tmp_path / 'own.safetensors'}: 0.0" in own.stdout
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").glob("learned-*"))
    (tmp_path / "asked.txt").write_text("one two\n\nthree\n")
    (tmp_path / "read.txt").write_text("one two three one two three")
    plain = done("generate", "one two", "--model", target, "--max-new-tokens", 12, "--no-stream")
    arguments = ("--prompts", tmp_path / "asked.txt", "--texts", tmp_path / "read.txt", "--max-new-tokens", 12)
    report = json.loads(done("learn", target, *arguments, "--json").stdout)
    assert report["bytes"] > 0 and report["file"].startswith(str(tmp_path / "cache"))
    assert done("generate", "one two", "--model", target, "--max-new-tokens", 12, "--no-stream").stdout == plain.stdout


# ---- What a user types, names or sets: wrong values are refused in one line that names them and the nearest right one


FILES = {
    "latin.txt": "déjà".encode("latin-1"),
    "empty.txt": b"",
    "blank.txt": b"\n \n",
    "text.py": b"def f(n):\n    return n\n",
    "binary": b"\xff\xfe\x00",
    "nothing/file": b"",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder ``{}`` of the rows: ``target``, ``draft``, and files that are not as they should be."""
    folder = tmp_path_factory.mktemp("place")
    save_pair(folder)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def error(*arguments, stdin=None, code=2):
    return one_line_error(run(*arguments, stdin=stdin), code).removeprefix("gsd-kernels: error: ")


SLIPS = {  # refused before torch is imported
    "generate --device gpu x": "--device: 'gpu' is no device; did you mean 'cuda'?",
    "check --device mars x": "--device: 'mars' is no device; expected cpu, cuda or cuda:1",
    "bench real --ways gsd-histry": "--ways: there is no 'gsd-histry'; did you mean 'gsd-history'?",
    "generate --backend cudaa x": "--backend: there is no 'cudaa'; did you mean 'cuda'?",
    "bench generate --backend abacus": "--backend: there is no 'abacus'; expected one of auto, cpu",
    "generate --draft embedded x": "--draft: no such folder: embedded",
    "generate --drafter none x": "--drafter: no such folder: none",
    "bench real --drafter ./none": "--drafter: no such folder: ./none",
    "chat --draft owner/name": "--draft: needs --model",
    "check --draft owner/name x": "--draft: needs --model",
    "generate --dtype bf16 x": "--dtype: there is no 'bf16'; did you mean 'bfloat16'? expected one",
    "bench real --dtype fp16": "--dtype: there is no 'fp16'; did you mean 'float16'?",
    "generate --criterion loose x": "--criterion: there is no 'loose'; expected one of exact",
    "demo --draft owner/name": "--draft: needs --model; without it the demo has models of its own",
    "demo --embedded --model owner/name": "--embedded: has a model and prompts of its own",
    "demo --model none.gguf": "--model: no such file: ",
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
    "generate --graph-config auto2 x": "--graph-config: unknown name 'auto2'",
    "check --graph-config=": "--graph-config: unknown name ''",
    "generate --graph-config auto,depth=3 x": '"auto" is no shape of its own and has no fields',
    "generate --graph-config depth=3,depth=4 x": "--graph-config: depth is given twice",
    "generate --graph-config tree,max-rows=3 x": "unknown field 'max-rows'; did you mean 'max_rows'?",
    "generate --graph-config tree, x": "expected key=value, got ''",
    "generate --graph-config depth= x": "depth: expected a number or none, got ''",
    "generate --graph-config chain,depth=none x": "depth: expected an int, got None",
    "generate caf\udce9": "prompt: the argument is not UTF-8 text (byte 3",
    "generate --prompt-file {}/latin.txt": "--prompt-file: {}/latin.txt is not UTF-8 text (byte 1",
    "check --prompt-file {}": "--prompt-file: {} is a folder",
    "check --prompt-file {}/empty.txt": "prompt: {}/empty.txt is empty",
    "generate --prompt-file {}/blank.txt --lines": "prompt: {}/blank.txt is empty",
    "generate --model {}/nothing x": "--model: no config.json in {}/nothing; ",
    "generate --model {}/target --draft {}/nothing x": "--draft: no config.json in {}/nothing; ",
    "generate --model {}/target --draft-heads {}/nothing x": "--draft-heads: no draft_heads.json in",
    "generate --model {}/target --corpus {}/nothing x": "--corpus: ",
    "generate --model {}/target --drafter {}/none x": "--drafter: no such folder",
    "generate --model {}/target --drafter mtp x": "has no multi-token-prediction heads; looked for were layers.2",
    "generate --model {}/target --chat x": "--chat: the tokenizer has no chat template",
    "generate --model {}/target --draft {}/draft --graph-config tree --criterion speculative x": "chain",
    "index {}/text.py -o {}/target": "exists; remove it",
    "index {}/none -o {}/new": "FILES: no such file",
    "index {}/binary -o {}/new": "binary is not UTF-8",
    "index {}/text.py -o {}/new --tokenizer ./none": "--tokenizer: no such folder: ./none",
    "learn {}/target -o {}": "file: expected the name of a file to write, got the folder {}",
    "doctor --kernels --arch 1": "--arch: expected one of 80",
    **dict.fromkeys(
        [f"serve --allowed-host={host}" for host in ("http://box", "box/", "", ":80", "*.box", "[]")],
        "--allowed-host: expected a name such as box.local",
    ),
    **dict.fromkeys(
        [f"serve --cors={origin}" for origin in ("localhost:3000", "http://", "http://box/page", "http://*.box", "")],
        "--cors: expected an origin such as http://localhost:3000",
    ),
}


@pytest.mark.parametrize(("given", "says"), {**SLIPS, **LATER}.items(), ids=lambda value: ascii(value)[:60])
def test_a_slip_is_refused_by_its_option(given, says, place):
    assert says.replace("{}", str(place)) in error(*given.replace("{}", str(place)).split())
    assert not (place / "new").exists()


@pytest.mark.slow
def test_slips_are_refused_before_torch_is_imported(place):
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom gsd_kernels_cli.app import app\n"
        f"for given in {[given.replace('{}', str(place)).split() for given in SLIPS]!r}:\n"
        "    assert CliRunner().invoke(app, given).exit_code == 2, given\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), given\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_that_are_not_there_and_stdin(place):
    for option in ("generate --prompt-file", f"learn {place}/target --prompts"):
        said = error(*option.split(), place / "none.txt", code=1)
        assert said == f"{option.split()[-1]}: no such file: {place}/none.txt"
    assert error("generate", stdin=b"a\xffb").startswith("prompt: stdin is not UTF-8 text (byte 1")
    assert error("generate", stdin="").startswith("prompt: stdin is empty")


@pytest.mark.parametrize("option", ["generate --temperature", "check --tp-timeout", "serve --max-seconds"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(option, value):
    """Typer says so where its bounds meet the value: ``nan`` from some release on, ``inf`` at an upper one."""
    result = run(*f"{option}={value}".split())
    name = option.split()[1]
    said = f"error: {name}: expected a finite number", f"Invalid value for '{name}'"
    assert result.exit_code == 2 and any(text in result.stderr for text in said), result.output


def test_names_of_the_server_are_those_that_requests_have():
    from gsd_kernels_serve.listen import host_names, names_of, origins_of

    given = ["Box:8000", "[::1]", "[FE80::1]:80", "::1", "box.local.", "*", "10.0.0.1:1"]
    assert host_names(given) == ["box", "::1", "fe80::1", "::1", "box.local", "*", "10.0.0.1"]
    assert names_of("BOX", ["b"])[-2:] == ["box", "b"] and names_of("0.0.0.0", []) is None
    origins = ["http://Localhost:3000/", "*", "null", "https://a.b:443", "http://a:80", "tauri://x"]
    asked = ["http://localhost:3000", "*", "null", "https://a.b", "http://a", "tauri://x"]
    assert origins_of(origins) == asked and host_names(None) == origins_of(None) == []


def test_a_byte_order_mark_is_no_text_and_lines_end_as_in_files(tmp_path):
    file = tmp_path / "windows.txt"
    file.write_bytes("\ufeffhéllo".encode())
    assert read_prompts(None, [str(file)], lines=False) == ["héllo"]
    file.write_bytes("a\u2028b\x85c\x0cd\r\n\ne\x1cf\n".encode())
    assert read_prompts(None, [str(file)], lines=True) == ["a\u2028b\x85c\x0cd", "e\x1cf"]


@pytest.mark.parametrize("name", ["./none", "none", "none/", "~/none/none", "/none", "a/b/c", "models/none", ""])
def test_what_is_no_hub_id_is_not_sought_on_the_hub(name, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "adapter_config.json").write_text("{}")  # of PEFT; its base is a model
    monkeypatch.chdir(tmp_path)
    for where, find in {"--model": checkpoint_place, "drafter": lambda name, _: fetch(name)}.items():
        with pytest.raises(ValueError, match=rf"^{where}: (no such folder: |empty)"):
            find(name, where)
    assert [checkpoint_place(there, "--model") for there in ("..", "owner/name-1.5B")] == ["..", "owner/name-1.5B"]
    assert model_place(str(tmp_path), "--model") == str(tmp_path)


def test_a_model_stands_before_the_prompts(place):
    target = str(place / "target")
    options = ["--draft", "none", "--max-new-tokens", "4"]
    by_place, by_option = (run("generate", *named, *options, "x") for named in ([target], ["--model", target]))
    assert by_place.exit_code == 0 and by_place.stdout == by_option.stdout
    assert values.model_before([target, "x"], target) == (target, [target, "x"])
    assert values.model_before(["owner/name", "x"], None) == ("owner/name", ["x"])
    assert values.model_before(["def f(n):"], None) == (None, ["def f(n):"])


def test_generate_without_a_model_answers_by_that_of_chat_and_says_which(place, monkeypatch):
    from gsd_kernels_cli.demo import smollm2

    monkeypatch.setattr(smollm2, "why_missing", lambda: None)
    monkeypatch.setattr(smollm2, "folder", lambda: place / "target")
    assert error("generate", "hello") == "--chat: the tokenizer has no chat template"  # the pair's, here in its place
    monkeypatch.setattr(smollm2, "why_missing", lambda: "it is not installed")
    done = run("generate", "--max-new-tokens", "4", "hello")
    assert done.exit_code == 0 and "gsd-kernels: the embedded pair" in done.stderr


KINDS = {
    ValueError("a\nb"): 2,
    TypeError("t"): 2,
    OSError("none"): 1,
    RuntimeError("full"): 1,
    KeyboardInterrupt(): 130,
}


@pytest.mark.parametrize(("error", "code"), KINDS.items(), ids=[type(error).__name__ for error in KINDS])
def test_errors_have_a_line_a_code_and_a_traceback_if_asked_for(error, code):
    shell = typer.Typer(cls=Commands)

    @shell.callback()
    def options(debug: bool = False):
        pass

    @shell.command("fail")
    def fail():
        raise error

    done = CliRunner().invoke(shell, ["fail"])
    line = " ".join(str(error).split())
    assert done.exit_code == code
    assert done.stderr == ("gsd-kernels: interrupted\n" if code == 130 else f"gsd-kernels: error: {line}\n")
    assert code == 130 or CliRunner().invoke(shell, ["--debug", "fail"]).exception is error


def test_errors_of_the_library_name_the_options():
    def drafting(draft: str = "x"):
        raise ValueError("assistant_tokenizer: 3% of its tokens are the tokenizer's")

    def training(heads: int = 3):
        raise ValueError("heads: the run has 4")

    shell = typer.Typer(cls=Commands)
    shell.command("draft")(drafting)
    shell.command("train")(training)
    says = {"draft": "--draft: 3% of its tokens are the tokenizer's", "train": "heads: the run has 4"}
    for command, line in says.items():
        assert CliRunner().invoke(shell, [command]).stderr == f"gsd-kernels: error: {line}\n"


@pytest.mark.slow
def test_an_unknown_level_leads_with_its_variable(place):
    command = [sys.executable, "-m", "gsd_kernels_hf", "generate", f"--model={place / 'target'}", "--draft=none", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "GSD_KERNELS_CPU_LEVEL": "amx2"})
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("gsd-kernels: error: GSD_KERNELS_CPU_LEVEL: expected one of portable, avx2")


TAG = re.compile(r"(?<!\\)\[[^\]\[]*\]")
STYLES = re.compile(r"\[/?(bold|dim|green|red)?\]")


def test_no_help_is_swallowed_as_markup():
    from gsd_kernels_bench.cli import app as bench

    for command in (c for group in (app, bench) for c in typer.main.get_command(group).commands.values()):
        texts = [command.help, command.short_help, *(getattr(param, "help", None) for param in command.params)]
        for text in filter(None, texts):
            for tag in TAG.findall(text):
                assert STYLES.fullmatch(tag), f"{command.name}: {tag} in {text!r} is taken for a style and not shown"
            Text.from_markup(text)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_a_terminal_shows_a_replacement_for_what_its_encoding_has_not(encoding, place):
    prompt, model = "[INST] '\u2713\u00e9'", ["--model", str(place / "target"), "--draft", "none"]
    options = [*model, "--max-new-tokens", "2", "--dtype", "float32"]
    for stream in ("--stream", "--no-stream"):
        result = CliRunner(charset=encoding).invoke(app, ["generate", prompt, "--echo", *options, stream])
        assert result.exit_code == 0, result.stderr
        assert result.stdout_bytes.startswith(prompt.encode(encoding, errors="replace"))
