"""``gsd-kernels learn``: what a model's own answers teach its history."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from . import options, values
from .output import print_json, progress


def command(
    *,
    named: options.Named,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="FILE", help="As of --prompt-file --lines. Without it those of the package."),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option("--texts", metavar="FILE", help="UTF-8, read beside the answers; it leaves phrases. Repeatable."),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 288,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Instead of the cache folder, where it is found by itself."),
    ] = None,
    dtype: options.DtypeOption = "auto",
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Let a model answer everyday prompts, and keep how its answers go on: later calls draft with it.

    The texts stay what they are. What comes out is a file of less than a megabyte in the cache folder, found by the
    model's fingerprint. Interrupted (Ctrl-C), what was answered so far is kept.
    """
    from gsd_kernels_hf.files import read_utf8

    model = named.name
    if model is None:
        raise ValueError("MODEL: name the model that is to answer: a folder, a hub id or FILE.gguf")
    begin = time.perf_counter()
    asked = None if prompts is None else options.read_prompts(None, [prompts], lines=True, by="--prompts")
    read = [read_utf8(file, "--texts") for file in texts or ()]
    with progress("loading the model"):
        from gsd_kernels_hf.learning import learn

        pair = options.Models(
            values.NONE, device="cpu", dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
        ).load(model)
    place = learn(pair.target, pair.tokenizer, prompts=asked, texts=read, new_tokens=max_new_tokens, file=out)
    seconds, size = time.perf_counter() - begin, place.stat().st_size
    if as_json:
        print_json({"file": str(place), "bytes": size, "seconds": seconds})
    else:
        print(f"{place}: {size / 1e6:.2f} MB, {seconds:.0f} s")
