"""Code blocks of the pages, and the examples, run."""

from __future__ import annotations

import contextlib
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
from kept import keep_modules, program
from models import noised, prompts, tiny
from sources.drafters import saved
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

NOT_RUN = ("docs/served.md",)
"""Pages whose Python has its own tests: it needs a server (tests/serving), or ranks (tests/engine)."""
OTHERS = ("git", "pip", "rm", "curl", "python", "ray", "torchrun", "gsd-kernels export", "gsd-kernels serve")
"""Commands that have their own tests, install, delete or need a server."""
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


RUN = [command for page in PAGES for command in commands(page) if not f"{command} ".startswith(OTHERS)]


@pytest.mark.parametrize("command", RUN)
def test_command_runs(command, tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    target, draft = save_pair(tmp_path, chat_template=TEMPLATE)
    command = command.replace("--draft DIR_OR_ID", f"--draft {draft}").replace("DIR_OR_ID", target)
    words = shlex.split(command, comments=True)
    result = CliRunner().invoke(app, [*words[1:], "--max-new-tokens", "4"], input="Hello\n")
    assert result.exit_code == 0 and result.stdout, result.stderr


# The examples run, with no arguments and on the user's own checkpoints.


SAYS = {
    "batch": "a draft: True",
    "retrieval": "tokens: True",
    "chat": "per step]",
    "gsd_in_100_lines": "\nclass Stack:\n    def push(self",
}
EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py")}


@pytest.fixture(scope="module")
def own_pair(tmp_path_factory):
    target, draft = save_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", target, "--draft", draft, "--max-new-tokens", "8"]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {"ray_batch"}))  # which tests/machines has
@pytest.mark.parametrize("own", [False, True])
def test_example(name, own, own_pair, monkeypatch, tmp_path, capsys):
    if name == "retrieval":
        pytest.importorskip("bm25s", reason="needs the extra [retrieval]")
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [name, *(own_pair if own else ())])
    with contextlib.suppress(SystemExit):  # by which Typer ends
        runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip() and SAYS.get(name, "") in printed


# The whole method in 100 lines: its texts are the model's own, and the package's.


def test_greedy_text_is_transformers_and_ours():
    target = tiny("llama-gqa")
    draft, ids = noised(target, 0.02), prompts(1, 12)["input_ids"]
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None}
    text, steps = program("gsd_in_100_lines").generate(target, draft, ids[0].tolist(), 48)
    assert text == target.generate(ids, pad_token_id=0, **options)[0].tolist()
    assert max(len(picked) for _, _, picked in steps) > 2, "nothing was accepted, so nothing was tested"
    assert text == gsd_kernels.generate(target, ids, assistant_model=draft, **options)[0].tolist()
