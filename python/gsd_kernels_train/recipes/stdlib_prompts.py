"""Prompts cut from the held-out files."""

from __future__ import annotations

import ast

from transformers import PreTrainedTokenizerFast

from .stdlib import SourceFile

PROMPT_TOKENS = (60, 150)
#: (file, first line, last line) of the text whose bits per byte are shipped, so that a loaded pair can be checked.
EXCERPT = ("textwrap.py", 100, 180)


def _spans(source: SourceFile) -> list[tuple[int, int]]:
    """Return (first line, last line) of each function's and class's header with its docstring, in order."""
    spans = []
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            body = node.body[0]
            documented = ast.get_docstring(node) is not None
            last = body.end_lineno if documented else body.lineno - 1
            if last >= node.lineno:
                spans.append((node.lineno, last))
    return sorted(spans)


def excerpt(source: SourceFile, first: int, last: int) -> str:
    """Lines ``first`` … ``last`` of a file, without trailing space."""
    return "\n".join(source.text.split("\n")[first - 1 : last]).rstrip()


def code_prompt(source: SourceFile, tokenizer: PreTrainedTokenizerFast) -> dict[str, object] | None:
    """Cut a prompt of a natural length that ends after a header or docstring, from the middle of the file's choices."""
    low, high = PROMPT_TOKENS
    lines = source.text.split("\n")
    choices = []
    for first, last in _spans(source):
        while first > 1:
            tokens = len(tokenizer(excerpt(source, first, last))["input_ids"])
            if tokens >= low + 20 and lines[first - 1].strip():
                break
            first -= 1
        if low <= len(tokenizer(excerpt(source, first, last))["input_ids"]) <= high:
            choices.append((first, last))
    if not choices:
        return None
    first, last = choices[len(choices) // 2]
    return {"kind": "code", "file": source.name, "lines": [first, last], "text": excerpt(source, first, last)}


def copy_prompt(source: SourceFile, tokenizer: PreTrainedTokenizerFast) -> dict[str, object] | None:
    """Write a short function of the file twice, then its first line: what follows repeats the prompt."""
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 4:
            block = excerpt(source, node.lineno, node.end_lineno)
            text = f"{block}\n\n{block}\n\n" + excerpt(source, node.lineno, node.lineno)
            low, high = PROMPT_TOKENS
            if low <= len(tokenizer(text)["input_ids"]) <= high:
                return {
                    "kind": "copy",
                    "file": source.name,
                    "lines": [node.lineno, node.end_lineno],
                    "text": text,
                }
    return None


def cut_prompts(held_out: list[SourceFile], tokenizer: PreTrainedTokenizerFast) -> list[dict[str, object]]:
    """Return one code prompt per held-out file, and a copy prompt from every third, each with a name."""
    found = [code_prompt(source, tokenizer) for source in held_out]
    found += [copy_prompt(source, tokenizer) for source in held_out[::3]]
    prompts = []
    for prompt in found:
        if prompt is not None:
            stem = prompt["file"].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            prompts.append({"name": f"{prompt['kind']}-{stem}"} | prompt)
    return prompts
