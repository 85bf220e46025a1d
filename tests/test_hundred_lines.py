"""The whole method in 100 lines: its texts are the model's own, and the package's."""

from __future__ import annotations

import ast
import io
import re
import runpy
import tokenize

import hundred_lines
import pytest
import torch
from models import noised, prompts, tiny

import gsd_kernels as gsd

METHOD = hundred_lines.load()
SOURCE = hundred_lines.PATH.read_text(encoding="utf-8").partition("\n\nif __name__")[0]
SPACE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def test_it_has_100_lines_besides_imports_and_docstrings_and_imports_nothing_of_the_package():
    apart: set[int] = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            apart |= {*range(node.lineno, node.end_lineno + 1)}
        elif isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            apart |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    code = {
        token.start[0] for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline) if token.type not in SPACE
    }
    assert len(code - apart) <= 100
    assert "gsd_kernels" not in SOURCE


def test_run_it_shows_the_graph_of_a_step_and_the_text(capsys):
    runpy.run_path(str(hundred_lines.PATH), run_name="__main__")
    said = capsys.readouterr().out
    assert "\nclass Stack:\n    def push(self" in said and re.search(r"\n0 \d+ \* +\S+\n", said)


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3"])
@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_greedy_text_is_transformers_and_ours(family, noise):
    target = tiny(family)
    draft, ids = noised(target, noise), prompts(1, 12)["input_ids"]
    own = target.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0)
    text, steps = METHOD.generate(target, draft, ids[0].tolist(), 48)
    assert text == own[0].tolist()
    given = [len(picked) for _, _, picked in steps]
    assert sum(given) >= 48 and (max(given) > 2 or noise > 0.1), "nothing was accepted, so nothing was tested"
    ours = gsd.generate(target, ids, assistant_model=draft, graph_config="graph", max_new_tokens=48, eos_token_id=None)
    assert ours[0].tolist() == text


def test_sampled_text_does_not_depend_on_the_draft():
    target, ids = tiny(), prompts(1, 12)["input_ids"][0].tolist()
    drafts = [noised(target, 0.02), noised(target, 0.3), tiny(seed=7)]
    texts, steps = zip(*(METHOD.generate(target, d, ids, 48, temperature=0.7, seed=3) for d in drafts), strict=True)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != METHOD.generate(target, drafts[0], ids, 48, temperature=0.7, seed=4)[0]
    assert len(steps[0]) < len(steps[2]), "the better draft needs fewer steps"


def test_a_row_is_scored_as_if_its_path_were_the_text():
    target, text = tiny(), prompts(1, 9)["input_ids"][0].tolist()
    tokens, parents = [text[-1], 5, 9, 9, 11], [-1, 0, 0, 1, 2]
    with torch.no_grad():
        scores = METHOD.attend(target, METHOD.DynamicCache(), text, tokens, parents)
        for row, path in enumerate([[], [5], [9], [5, 9], [9, 11]]):
            alone = target(torch.tensor([text + path])).logits[0, -1]
            torch.testing.assert_close(scores[row], alone.double(), rtol=1e-9, atol=1e-9)
