"""Code blocks of the pages, and the examples, run."""

from __future__ import annotations

import logging
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_pair
from exported.loading import keep_modules
from sources.mtp_checkpoints import saved
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import gsd_kernels
from gsd_kernels_cli import demo
from gsd_kernels_cli.app import app
from gsd_kernels_cli.demo.drafters import FOLDER

# The code of README and of docs/ runs: Python page by page, commands line by line, placeholders filled.


ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"

NOT_RUN = {
    "docs/served.md": "needs a server, or several ranks: tests/serving sends the same fields by the same client, "
    "tests/engine/test_tensor_parallel.py starts ranks",
}
"""Pages whose Python has its own tests."""
OTHERS = {
    "git": "tested from a fresh clone by .ci/run",
    "pip": "installs",
    "rm": "deletes the user's cache",
    "curl": "needs a server, tests/serving",
    "python": "tests/machines",
    "ray": "tests/machines",
    "torchrun": "tests/engine/test_tensor_parallel.py",
    "gsd-kernels export": "tests/exported",
    "gsd-kernels serve": "tests/serving",
}
"""Commands that have their own tests, or none for the reason given."""
FILLED = {
    '"someone/EAGLE3-LLaMA3.1-Instruct-8B"': "eagle3",
    '"eagle3-folder"': "eagle3",
    '"folder-or-id"': "whole",
    '"HuggingFaceTB/SmolLM2-135M-Instruct"': "folder",
    "max_new_tokens=256": "max_new_tokens=12",
    "depth=6, width=8, branch=4, max_rows=64": "depth=3, width=2, branch=2, max_rows=8",
}


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def filled(code: str) -> str:
    for placeholder, value in FILLED.items():
        code = code.replace(placeholder, value)
    return code


@pytest.fixture
def names(tmp_path, monkeypatch) -> dict[str, Any]:
    """What a reader has at hand: a model, its draft and tokenizer, a prompt, an index of texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    keep_modules(monkeypatch, tmp_path / "modules")
    model, draft, tokenizer = demo.load()
    inputs = tokenizer("def fibonacci(n):\n    ", return_tensors="pt")
    (tmp_path / "a.py").write_text("def fibonacci(n):\n    return n\n" * 20)
    for command in (["index", "a.py", "-o", "index"], ["export", "my-model"]):
        assert CliRunner().invoke(app, command).exit_code == 0
    return {
        **{"gsd_kernels": gsd_kernels, "model": model, "draft": draft, "tokenizer": tokenizer, "inputs": inputs},
        "draft_tokenizer": tokenizer,
        **{"input_ids": inputs["input_ids"], "eagle3": FOLDER / "eagle3", "folder": chatting(tmp_path / "chatting")},
    }


def chatting(folder: Path) -> Path:
    """A copy of the embedded target that has a chat template."""
    shutil.copytree(demo.path() / "target", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(autouse=True)
def a_page_may_ask_for_the_log():
    """Whoever reads it later is told no more than before: a patch looks for more where somebody listens."""
    logger = logging.getLogger("gsd_kernels")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page not in NOT_RUN])
def test_python_runs(page, names):
    for code in blocks(page, "python"):
        if "xgrammar" in code:
            names |= grammars(names["tokenizer"])
        if "dist/hub" in code:
            laid_out()
        scope = names | with_heads(Path("whole")) if 'drafter="mtp"' in code else names
        try:
            exec(compile(filled(code), page, "exec"), scope)
        finally:
            if "generate" in vars(names["model"]):
                gsd_kernels.unpatch(names["model"])


def with_heads(folder: Path) -> dict[str, Any]:
    """A model whose checkpoint has multi-token-prediction heads, and that checkpoint."""
    saved("mimo", folder)
    return {"model": AutoModelForCausalLM.from_pretrained(folder), "whole": folder}


def laid_out() -> None:
    """What ``.ci/hub`` leaves."""
    pytest.importorskip("kernels", reason="needs the extra [test]")
    runpy.run_path(str(ROOT / "python/gsd_kernels_hub/layout.py"))["lay_out"](
        Path(gsd_kernels.__file__).parent, Path("dist/hub")
    )


def grammars(tokenizer: Any) -> dict[str, Any]:
    """A grammar's compiler, and a schema for the one prompt."""
    xgrammar = pytest.importorskip("xgrammar", reason="needs the extra [grammar]")
    pytest.importorskip("xgrammar.contrib.hf")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    return {"xgrammar": xgrammar, "compiler": xgrammar.GrammarCompiler(info), "schemas": ['{"type": "object"}']}


def commands(page: str) -> list[str]:
    lines = "".join(blocks(page, "console")).replace("\\\n", " ").splitlines()
    return [line.split("$ ", 1)[1] for line in lines if "$ " in line]


ALL = [(page, command) for page in PAGES for command in commands(page)]


def whose(command: str) -> str | None:
    return next((other for other in OTHERS if command == other or command.startswith(f"{other} ")), None)


def test_commands_run_or_have_a_reason():
    run = [command for _, command in ALL if whose(command) is None]
    assert len(run) >= 3 and all(command.startswith("gsd-kernels ") for command in run), run
    assert {whose(command) for _, command in ALL} - {None} == set(OTHERS), "a reason that nothing needs"


@pytest.mark.parametrize("command", [command for _, command in ALL if whose(command) is None])
def test_command_runs(command, tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    target, draft = save_pair(tmp_path, chat_template=TEMPLATE)
    command = command.replace("--draft DIR_OR_ID", f"--draft {draft}").replace("DIR_OR_ID", target)
    words = shlex.split(command, comments=True)
    result = CliRunner().invoke(app, [*words[1:], "--max-new-tokens", "4"], input="Hello\n")
    assert result.exit_code == 0 and result.stdout, result.stderr


# The examples run, with no arguments and on the user's own checkpoints.


OWN_TESTS = {
    "gsd_in_100_lines": "tests/test_hundred_lines.py",  # has no command line
    "ray_batch": "tests/machines",  # starts Ray
}
EXAMPLES = sorted(
    path for path in Path(__file__).parents[1].joinpath("examples").glob("*.py") if path.stem not in OWN_TESTS
)


@pytest.fixture(scope="module")
def own_pair(tmp_path_factory):
    target, draft = save_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", target, "--draft", draft, "--max-new-tokens", "8"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("whose", ["embedded", "own"])
def test_example(example, whose, own_pair, monkeypatch, tmp_path, capsys):
    if example.stem == "retrieval":
        pytest.importorskip("bm25s", reason="needs the extra [retrieval]")
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    arguments = own_pair if whose == "own" else []
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    if example.stem == "batch":
        assert "the same tokens without a draft: True" in printed
    if example.stem == "retrieval":
        assert "the same tokens: True" in printed
    if example.stem == "chat":
        assert printed.count("tokens per step]") == 2


NEEDS = {"retrieval": ("bm25s", "[retrieval]"), "ray_batch": ("ray", "[ray]")}
COMMAND_LINES = sorted(
    path for path in Path(__file__).parents[1].joinpath("examples").glob("*.py") if path.stem != "gsd_in_100_lines"
)


@pytest.mark.parametrize("example", COMMAND_LINES, ids=lambda path: path.stem)
@pytest.mark.parametrize("missing", ["gsd_kernels_cli", "its own"])
def test_a_missing_package_is_named_with_the_line_of_pip(example, missing, monkeypatch, capsys):
    name, extra = NEEDS.get(example.stem, ("transformers", "pip install ."))
    if missing == "gsd_kernels_cli":
        if example.stem == "retrieval":
            pytest.importorskip("bm25s", reason="needs the extra [retrieval]")
        name, extra = "gsd_kernels_cli", "pip install"
    for module in [name, *(m for m in sys.modules if m.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", [str(example)])
    with pytest.raises(SystemExit) as leave:
        runpy.run_path(str(example), run_name="__main__")
    assert str(leave.value).startswith(name) and "is missing" in str(leave.value) and extra in str(leave.value)
