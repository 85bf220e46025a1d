"""What a user types, names or sets: wrong values are refused in one line that names them and the nearest right one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import click
import pytest
import typer
from checkpoints import save_pair
from rich.text import Text
from terminal import one_line_error, run
from typer.testing import CliRunner

from gsd_kernels_cli import values
from gsd_kernels_cli.app import app
from gsd_kernels_cli.commands import Commands
from gsd_kernels_cli.options import read_graph_config, read_prompts
from gsd_kernels_hf.files import checkpoint_place, model_place
from gsd_kernels_hf.sources.checkpoints import fetch


def error(*arguments, stdin=None, code=2):
    return one_line_error(run(*arguments, stdin=stdin), code).removeprefix("gsd-kernels: error: ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``target`` and ``draft``."""
    place = tmp_path_factory.mktemp("pair")
    save_pair(place)
    return place


# ---- --graph-config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("auto,depth=3", '"auto" is no shape of its own and has no fields'),
        ("depth=3,depth=4", "--graph-config: depth is given twice"),
        ("tree,max-rows=3", "unknown field 'max-rows'; did you mean 'max_rows'?"),
        ("tree,", "expected key=value, got ''"),
        ("=3", "expected key=value, got '=3'"),
        ("depth=", "depth: expected a number or none, got ''"),
        ("depth=1e30", "depth: expected an int, got 1e+30"),
        ("chain,depth=none", "depth: expected an int, got None"),
    ],
)
def test_graph_config_names_what_is_wrong(text, says):
    with pytest.raises((ValueError, TypeError), match=re.escape(says)):
        read_graph_config(text)


# ---- numbers


@pytest.mark.parametrize("value", ["nan", "inf", "-nan"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("generate", "--temperature"),
        ("generate", "--top-p"),
        ("chat", "--min-p"),
        ("check", "--tp-timeout"),
        ("serve", "--max-seconds"),
        ("train-heads", "--lr"),
    ],
)
def test_numbers_are_finite(command, option, value):
    """Typer says so where its bounds meet the value: ``nan`` from some release on, ``inf`` at an upper one."""
    result = CliRunner().invoke(app, [command, f"{option}={value}"])
    said = f"error: {option}: expected a finite number", f"Invalid value for '{option}'"
    assert result.exit_code == 2 and any(text in result.stderr for text in said), result.output


# ---- who may ask the server


def test_names_are_those_that_requests_have_and_others_are_refused():
    from gsd_kernels_serve.listen import host_names, names_of, origins_of

    given = ["Box:8000", "[::1]", "[FE80::1]:80", "::1", "box.local.", "*", "10.0.0.1:1"]
    assert host_names(given) == ["box", "::1", "fe80::1", "::1", "box.local", "*", "10.0.0.1"]
    assert names_of("BOX", ["b"])[-2:] == ["box", "b"] and names_of("0.0.0.0", []) is None
    assert origins_of(["http://Localhost:3000/", "*", "null", "https://a.b:443", "http://a:80", "tauri://x"]) == [
        "http://localhost:3000",
        "*",
        "null",
        "https://a.b",
        "http://a",
        "tauri://x",
    ]
    assert host_names(None) == origins_of(None) == []


# ---- prompts


def test_prompt_files_are_refused_by_name(tmp_path):
    latin, empty, blank = tmp_path / "latin.txt", tmp_path / "empty.txt", tmp_path / "blank.txt"
    latin.write_bytes("déjà".encode("latin-1"))
    empty.write_text("")
    blank.write_text("\n \n")
    for command in ("generate", "check"):
        line = error(command, "--prompt-file", latin)
        assert line.startswith(f"--prompt-file: {latin} is not UTF-8 text (byte 1") and "iconv" in line
        assert error(command, "--prompt-file", tmp_path).startswith(f"--prompt-file: {tmp_path} is a folder")
        assert error(command, "--prompt-file", empty).startswith(f"prompt: {empty} is empty")
        assert error(command, "--prompt-file", blank, "--lines").startswith(f"prompt: {blank} is empty")
        gone = tmp_path / "none.txt"
        assert error(command, "--prompt-file", gone, code=1) == f"--prompt-file: no such file: {gone}"
    assert error("generate", stdin=b"a\xffb").startswith("prompt: stdin is not UTF-8 text (byte 1")
    assert error("generate", stdin="").startswith("prompt: stdin is empty")


def test_a_byte_order_mark_is_no_text(tmp_path):
    file = tmp_path / "windows.txt"
    file.write_bytes("\ufeffhéllo".encode())
    assert read_prompts(None, [str(file)], lines=False) == ["héllo"]
    text = "a\u2028b\x85c\x0cd\r\n\ne\x1cf\n"
    file.write_bytes(text.encode())
    assert read_prompts(None, [str(file)], lines=True) == ["a\u2028b\x85c\x0cd", "e\x1cf"]


# ---- checkpoints


@pytest.mark.parametrize("name", ["./none", "none", "none/", "~/none/none", "/none", "a/b/c", "models/none", "..", ""])
def test_what_is_no_hub_id_is_not_sought_on_the_hub(name, tmp_path, monkeypatch):
    assert checkpoint_place("owner/name-1.5B", "--model") == "owner/name-1.5B"
    (tmp_path / "models").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    if name == "..":  # there, whatever it holds
        assert checkpoint_place(name, "--tokenizer") == ".."
        return
    with pytest.raises(ValueError, match=r"^--model: (no such folder: |empty)"):
        checkpoint_place(name, "--model")
    with pytest.raises(ValueError, match=r"^drafter: (no such folder: |empty)"):
        fetch(name)


# ---- before torch is imported


HOSTS = ["http://box", "box/", "", ":80", "*.box", "[]"]
ORIGINS = ["localhost:3000", "http://", "http://box/page", "http://*.box", "box", "://box", ""]
SLIPS = [
    (("generate", "--device", "gpu", "x"), r"--device: 'gpu' is no device; did you mean 'cuda'\?"),
    (("generate", "--device", "CUDA", "x"), r"--device: 'CUDA' is no device; did you mean 'cuda'\?"),
    (("check", "--device", "mars", "x"), r"--device: 'mars' is no device; expected cpu, cuda or cuda:1"),
    (("bench", "real", "--ways", "gsd-histry"), r"--ways: there is no 'gsd-histry'; did you mean 'gsd-history'\?"),
    (("generate", "--backend", "cudaa", "x"), r"--backend: there is no 'cudaa'; did you mean 'cuda'\?"),
    (("bench", "generate", "--backend", "abacus"), r"--backend: there is no 'abacus'; expected one of auto, cpu"),
    (("generate", "--draft", "embedded", "x"), r"--draft: no such folder: embedded"),
    (("generate", "--drafter", "none", "x"), r"--drafter: no such folder: none"),
    (("bench", "real", "--drafter", "./none"), r"--drafter: no such folder: ./none"),
    (("chat", "--draft", "owner/name"), r"--draft: needs --model"),
    (("check", "--draft", "owner/name", "x"), r"--draft: needs --model"),
    (
        ("generate", "--dtype", "bf16", "x"),
        r"--dtype: there is no 'bf16'; did you mean 'bfloat16'\? expected one",
    ),
    (("bench", "real", "--dtype", "fp16"), r"--dtype: there is no 'fp16'; did you mean 'float16'\?"),
    (("generate", "--criterion", "loose", "x"), r"--criterion: there is no 'loose'; expected one of exact"),
    (("generate", "--model", "none", "x"), r"--model: no such folder: none; on the hub"),
    (("chat", "--model", __file__), r"--model: .*expected the folder of a checkpoint, a hub id, or FILE\.gguf"),
    (("demo", "--model", "none.gguf"), r"--model: no such file: "),
]
LATER = [  # which the package itself says
    (("generate", "--graph-config", "auto2", "x"), r"--graph-config: unknown name 'auto2'"),
    (("check", "--graph-config", "", "x"), r"--graph-config: unknown name ''"),
    (("generate", "caf\udce9"), r"prompt: the argument is not UTF-8 text \(byte 3"),
    *((("serve", "--allowed-host", host), "--allowed-host: expected a name such as box.local") for host in HOSTS),
    *((("serve", "--cors", origin), "--cors: expected an origin such as http://localhost:3000") for origin in ORIGINS),
]


@pytest.mark.parametrize(("given", "says"), [*SLIPS, *LATER], ids=lambda value: ascii(value))
def test_a_slip_is_refused_by_its_option(given, says):
    assert re.match(says, error(*given))


@pytest.mark.slow
def test_slips_are_refused_before_torch_is_imported():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom gsd_kernels_cli.app import app\n"
        f"for given in {[list(given) for given, _ in SLIPS]!r}:\n"
        "    assert CliRunner().invoke(app, given).exit_code == 2, given\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), given\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_is_named_by_its_place_or_by_the_option(folder, tmp_path):
    """Every command that takes a model: the same words at both doors, and not at both at once."""
    place, none = str(folder / "target"), tmp_path / "none"
    benches = [["bench", name] for name in ("real", "prompt", "sources", "generate")]
    for command in (["chat"], ["demo"], ["learn"], ["serve"], ["doctor"], ["export", tmp_path / "new"], *benches):
        assert error(*command, none).startswith(f"MODEL: no such folder: {none}")
        assert error(*command, "--model", none).startswith(f"--model: no such folder: {none}")
        assert error(*command, place, "--model", place).startswith(f"--model: {place!r} names the model already")
    options = ["--draft", "none", "--max-new-tokens", "4"]
    for command in ("generate", "check"):
        by_place, by_option = ([command, *named, *options, "x"] for named in ([place], ["--model", place]))
        texts = [CliRunner().invoke(app, arguments) for arguments in (by_place, by_option)]
        assert [done.exit_code for done in texts] == [0, 0], texts[0].output
    assert values.model_before([place, "x"], place) == (place, [place, "x"])
    assert values.model_before(["owner/name", "x"], None) == ("owner/name", ["x"])
    assert values.model_before(["def f(n):"], None) == (None, ["def f(n):"])
    assert error("generate", "m.gguf", "x").startswith("MODEL: no such file: m.gguf")
    assert error("learn").startswith("MODEL: name the model")


def test_generate_without_a_model_answers_by_that_of_chat_and_says_which(folder, monkeypatch):
    from gsd_kernels_cli.demo import smollm2

    monkeypatch.setattr(smollm2, "why_missing", lambda: None)
    monkeypatch.setattr(smollm2, "folder", lambda: folder / "target")
    assert error("generate", "hello") == "--chat: the tokenizer has no chat template"  # the pair's, here in its place
    monkeypatch.setattr(smollm2, "why_missing", lambda: "it is not installed")
    done = CliRunner().invoke(app, ["generate", "--max-new-tokens", "4", "hello"])
    assert done.exit_code == 0 and "gsd-kernels: the embedded pair" in done.stderr


def test_folders_without_what_they_should_hold_are_refused_by_their_option(folder, tmp_path):
    model = ["--model", folder / "target"]
    assert error("generate", *model, "--draft-heads", tmp_path, "x").startswith("--draft-heads: no draft_heads.json in")
    assert error("generate", *model, "--corpus", tmp_path, "x").startswith("--corpus: ")
    for option, beside in (("--model", []), ("--draft", model)):
        for command in (["generate", "x"], ["bench", "real"]):
            says = f"{option}: no config.json in {tmp_path}; "
            assert error(*command, *beside, option, tmp_path).startswith(says)
    (tmp_path / "adapter_config.json").write_text("{}")  # of PEFT; its base is a model
    assert model_place(str(tmp_path), "--model") == str(tmp_path)


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
        result = CliRunner().invoke(shell, [command])
        assert result.exit_code == 2 and result.stderr == f"gsd-kernels: error: {line}\n"


# ---- the environment


@pytest.mark.slow
def test_an_unknown_level_leads_with_its_variable(folder):
    command = [sys.executable, "-m", "gsd_kernels_hf", "generate", f"--model={folder / 'target'}", "--draft=none", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "GSD_KERNELS_CPU_LEVEL": "amx2"})
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("gsd-kernels: error: GSD_KERNELS_CPU_LEVEL: expected one of portable, avx2")


# ---- help


def commands():
    """Every command with its name, those of ``bench`` too."""
    from gsd_kernels_bench.cli import app as bench

    for root, group in (("", typer.main.get_command(app)), ("bench ", typer.main.get_command(bench))):
        for name, command in group.commands.items():
            yield root + name, command


TAG = re.compile(r"(?<!\\)\[[^\]\[]*\]")
STYLES = re.compile(r"\[/?(bold|dim|green|red)?\]")


def test_no_help_is_swallowed_as_markup():
    for name, command in commands():
        texts = [command.help or "", command.short_help or ""]
        texts += [param.help or "" for param in command.params if isinstance(param, click.Option)]
        texts += [param.help or "" for param in command.params if hasattr(param, "help")]
        for text in texts:
            for tag in TAG.findall(text):
                assert STYLES.fullmatch(tag), f"{name}: {tag} in {text!r} is taken for a style and not shown"
            Text.from_markup(text)


def test_a_prompt_in_brackets_is_shown(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    given = ["check", "--model", folder / "target", "--draft", "history", "--max-new-tokens", "2", "[INST] hi"]
    result = CliRunner().invoke(app, [str(a) for a in given])
    assert result.exit_code == 0 and "[INST] hi" in result.stdout


# ---- bytes


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_a_terminal_shows_a_replacement_for_what_its_encoding_has_not(encoding, folder):
    prompt, model = "x = '\u2713\u00e9'", ["--model", str(folder / "target"), "--draft", "none"]
    options = [*model, "--max-new-tokens", "2", "--dtype", "float32"]
    for stream in ("--stream", "--no-stream"):
        result = CliRunner(charset=encoding).invoke(app, ["generate", prompt, "--echo", *options, stream])
        assert result.exit_code == 0, result.stderr
        assert result.stdout_bytes.startswith(prompt.encode(encoding, errors="replace"))
