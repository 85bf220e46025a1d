"""What a user types, names or sets: wrong values are refused in one line that names them and the nearest right one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import typer
from checkpoints import save_pair
from rich.text import Text
from terminal import one_line_error, run
from typer.testing import CliRunner

from gsd_kernels_cli import values
from gsd_kernels_cli.app import app
from gsd_kernels_cli.commands import Commands
from gsd_kernels_cli.options import read_prompts
from gsd_kernels_hf.files import checkpoint_place, model_place
from gsd_kernels_hf.sources.checkpoints import fetch

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
