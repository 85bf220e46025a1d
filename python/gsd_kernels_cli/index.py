"""``gsd-kernels index``: texts as a corpus that drafts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gsd_kernels_hf.files import checkpoint_place, read_utf8
from gsd_kernels_hf.progress import Update, tracked

from . import demo, options
from .output import err, progress


def command(
    files: Annotated[
        list[str], typer.Argument(metavar="FILES...", help="UTF-8 texts; a folder stands for all files under it.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder of the index; must not exist.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", metavar="DIR|ID", help="The target's. Without it that of the embedded pair is used."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Of the tokenizer on the hub.")] = None,
    suffixes: Annotated[
        list[str] | None,
        typer.Option("--suffix", metavar=".EXT", help="Of a folder, only files that end so. Repeatable."),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Index texts, for --corpus of generate and check, and for gsd_kernels.Corpus.

    Files in a folder that are not UTF-8 are left out. Interrupted, nothing is left; killed, a folder .partial-… beside,
    which the next run removes.
    """
    from .corpus import build_corpus, files_of, tokenized

    named = {Path(name) for name in files}
    paths, left_out = files_of(files, suffixes or ()), 0

    def texts(update: Update) -> Iterator[str]:
        nonlocal left_out
        for number, file in enumerate(paths):
            update(number)
            try:
                yield read_utf8(file, "FILES")
            except ValueError:
                if file in named:
                    raise
                left_out += 1
        update(len(paths), "sorting")

    begin = time.perf_counter()
    with progress("loading the tokenizer"):
        from transformers import AutoTokenizer

        place = demo.path() / "target" if tokenizer is None else checkpoint_place(tokenizer, "--tokenizer")
        loaded = AutoTokenizer.from_pretrained(place, revision=revision or "main", trust_remote_code=trust_remote_code)
    with tracked("indexing", len(paths), "files") as update:
        header = build_corpus(out, tokenized(texts(update), loaded), tokenizer=loaded)
    size = sum(file.stat().st_size for file in out.iterdir())
    if left_out:
        err.print(f"gsd-kernels: {left_out} files are not UTF-8 and were left out")
    seconds = time.perf_counter() - begin
    if as_json:
        print(json.dumps({**asdict(header), "bytes": size, "seconds": seconds}))
    else:
        print(f"{out}: {header.tokens:,} tokens of {header.documents:,} texts, {size / 1e6:.1f} MB, {seconds:.1f} s")
