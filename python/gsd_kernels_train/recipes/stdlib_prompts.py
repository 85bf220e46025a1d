"""Prompts cut from the held-out files."""

from __future__ import annotations

import ast

from transformers import PreTrainedTokenizerFast

from .stdlib import SourceFile

PROMPT_TOKENS = (60, 150)


def excerpt(source: SourceFile, first: int, last: int) -> str:
    """Lines ``first`` … ``last`` of a file, without trailing space."""
    return "\n".join(source.text.split("\n")[first - 1 : last]).rstrip()


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
