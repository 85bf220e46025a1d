"""Code blocks of the pages, and the examples, run."""

from __future__ import annotations

import ast
import io
import logging
import re
import runpy
import shlex
import shutil
import sys
import tokenize
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


OWN_TESTS = {"gsd_in_100_lines": "below", "ray_batch": "tests/machines"}
NEEDS = {"retrieval": ("bm25s", "[retrieval]"), "ray_batch": ("ray", "[ray]")}
SAYS = {"batch": "the same tokens without a draft: True", "retrieval": "the same tokens: True", "chat": "per step]"}
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}


@pytest.fixture(scope="module")
def own_pair(tmp_path_factory):
    target, draft = save_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", target, "--draft", draft, "--max-new-tokens", "8"]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - OWN_TESTS))
@pytest.mark.parametrize("whose", ["embedded", "own"])
def test_example(name, whose, own_pair, monkeypatch, tmp_path, capsys):
    if name == "retrieval":
        pytest.importorskip("bm25s", reason="needs the extra [retrieval]")
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [name, *(own_pair if whose == "own" else ())])
    runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip() and SAYS.get(name, "") in printed


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {"gsd_in_100_lines"}))
@pytest.mark.parametrize("missing", ["gsd_kernels_cli", "its own"])
def test_a_missing_package_is_named_with_the_line_of_pip(name, missing, monkeypatch):
    package, extra = NEEDS.get(name, ("transformers", "pip install ."))
    if missing == "gsd_kernels_cli":
        if name == "retrieval":
            pytest.importorskip("bm25s", reason="needs the extra [retrieval]")
        package, extra = missing, "pip install"
    for module in [package, *(m for m in sys.modules if m.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=f"^{package}.* is missing.*{re.escape(extra)}"):
        runpy.run_path(str(EXAMPLES[name]), run_name="__main__")


# examples/retrieval.py: whatever the cache guesses, the tokens are those of retrieving every time.


@pytest.mark.parametrize(
    ("prompt", "arguments"),
    [
        ("def heappush(heap, item):\n", {"do_sample": False}),
        ("class Queue:\n    def put(self, item):\n", {"do_sample": True, "temperature": 0.8, "seed": 11}),
    ],
    ids=["greedy", "sampled"],
)
def test_the_cache_changes_no_token_and_saves_waits(prompt, arguments, tmp_path, monkeypatch):
    pytest.importorskip("bm25s", reason="needs the extra [retrieval]")
    example, waited, latency, length, interval = program("retrieval"), [], 0.25, 48, 4
    monkeypatch.setattr("time.sleep", waited.append)
    passages = example.python_passages()
    example.Retriever.build(tmp_path, passages)
    target, draft, tokenizer = demo.load()
    gsd_kernels.patch(target, assistant_model=draft, graph_config="tree")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][:48] for text in passages]

    def make():
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return example.Generation(target, tokenizer, ids, prompt_ids, length, interval, 6, arguments)

    every, speculative = (example.Retriever(tmp_path, passages, latency) for _ in range(2))
    expected = example.retrieving_every_time(make(), every)
    assert len(expected) == length and every.waits == length // interval
    assert len({every.search([make().query(expected[:n])])[0][0] for n in range(0, length, interval)}) > 1
    waited.clear()
    cache = example.Cache(tmp_path, passages)
    tokens, guesses = example.retrieving_speculatively(make(), speculative, cache, stride=3)
    assert tokens == expected and guesses.right > 0
    assert speculative.waits < length // interval * 2 // 3 and waited == [latency] * speculative.waits


# The whole method in 100 lines: its texts are the model's own, and the package's.


METHOD = program("gsd_in_100_lines")
APART = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER


def test_it_has_100_lines_besides_imports_and_docstrings_shows_a_step_and_imports_nothing_of_ours(capsys):
    source = EXAMPLES["gsd_in_100_lines"].read_text(encoding="utf-8").partition("\n\nif __name__")[0]
    apart: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            apart |= {*range(node.lineno, node.end_lineno + 1)}
        elif isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            apart |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    assert len({token.start[0] for token in tokens if token.type not in APART} - apart) <= 100
    assert "gsd_kernels" not in source
    runpy.run_path(str(EXAMPLES["gsd_in_100_lines"]), run_name="__main__")
    said = capsys.readouterr().out
    assert "\nclass Stack:\n    def push(self" in said and re.search(r"\n0 \d+ \* +\S+\n", said)


@pytest.mark.parametrize(("family", "noise"), [("llama-gqa", 0.02), ("qwen3", 0.3)])
def test_greedy_text_is_transformers_and_ours(family, noise):
    target = tiny(family)
    draft, ids = noised(target, noise), prompts(1, 12)["input_ids"]
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None}
    text, steps = METHOD.generate(target, draft, ids[0].tolist(), 48)
    assert text == target.generate(ids, pad_token_id=0, **options)[0].tolist()
    assert max(len(picked) for _, _, picked in steps) > 2 or noise > 0.1, "nothing was accepted, so nothing was tested"
    assert text == gsd_kernels.generate(target, ids, assistant_model=draft, **options)[0].tolist()


def test_sampled_text_does_not_depend_on_the_draft():
    target, ids = tiny(), prompts(1, 12)["input_ids"][0].tolist()
    drafts = [noised(target, 0.02), tiny(seed=7)]
    texts, steps = zip(*(METHOD.generate(target, d, ids, 32, temperature=0.7, seed=3) for d in drafts), strict=True)
    assert texts[0] == texts[1] != METHOD.generate(target, drafts[0], ids, 32, temperature=0.7, seed=4)[0]
    assert len(steps[0]) < len(steps[1])
