"""``gsd-kernels export``: a model folder that decodes by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gsd_kernels_hf.files import check_writable, path_of

from . import options, values
from .output import out, print_json, progress


def command(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="To be written; must not exist.")],
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", callback=values.folder, show_default=False, help="Target; --model is the same."
        ),
    ] = None,
    model: Annotated[
        str | None,
        options.checkpoint_option("Target: a checkpoint's folder, or a hub id. Without it the embedded pair is taken."),
    ] = None,
    drafts: options.Drafts,
    graph_config: options.GraphOption = None,
    link: Annotated[
        bool,
        typer.Option(
            "--link", help="Weights take no room: hard links. What writes to the one file in place changes the other."
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Write a model and what drafts for it to a folder that transformers itself loads and serves.

    Loaded with trust_remote_code=True, in programs, pipelines or transformers serve, it decodes as after
    gsd_kernels.patch. The pair is loaded once, to see that it fits.
    """
    model = values.named_once(place, model)
    draft = drafts.assistant_model
    values.check_draft(model, draft)
    if draft == values.NONE:
        raise ValueError("--draft: none drafts nothing, and the folder would be the model's own; leave it out")
    if folder.exists():
        raise ValueError(f"DIR: {folder} exists; name a new folder, or delete it first")
    check_writable("DIR", folder)
    with progress("loading the models"):
        from gsd_kernels_hf.engine.resolved import Options, Sources
        from gsd_kernels_hf.exported.folder import PLACES
        from gsd_kernels_hf.sources.checkpoints import fetch
        from gsd_kernels_hf.sources.load import OWN

        from . import demo
        from . import model_folder as write
        from .demo.drafters import heads_folder
        from .pair import load_pair

        name = "the embedded target" if model is None else model
        if model is None:
            model, draft = str(demo.path() / "target"), draft or str(demo.path() / "draft")
        elif Path(model).is_dir():
            name = Path(model).resolve().name  # the card may be published, where it lies is nobody's business
        named = {source: getattr(drafts, source) for source in values.SOURCES}
        named["assistant_model"] = None if draft in values.WITHOUT_MODEL else draft
        if drafts.draft_heads == "demo":
            named["draft_heads"] = str(heads_folder())
        target = write.checkpoint_folder(model, "--model", drafts.revision)
        how: dict[str, Callable[[str, str], Path]] = {"corpus": lambda where, _: path_of(where)}
        how["assistant_model"] = partial(write.checkpoint_folder, revision=drafts.draft_revision)
        # A drafter that is the target's own heads has no folder.
        parts = {o: how.get(o, fetch)(where, o) for o, where in named.items() if where not in (None, OWN)}
        own = {"drafter": OWN} if drafts.drafter == OWN else {}
        fetched = dict.fromkeys((*values.SOURCES, "revision", "draft_revision")) | parts | own
        pair = load_pair(str(target), options.Models(**{**vars(drafts), **fetched}))
        shape = options.read_graph_config(graph_config)
        Sources(Options(**pair.speculation, graph_config=shape), pair.target)
    if "assistant_tokenizer" in pair.speculation:
        parts["assistant_tokenizer"] = parts["assistant_model"]
    write.write_model_folder(folder, target, name, parts, {**own, "graph_config": shape}, link=link)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    taken = [PLACES[source] for source in values.SOURCES if source in (*parts, *own)]
    if as_json:
        print_json({"folder": str(folder), "bytes": size, "drafts": taken})
        return
    out.print(f"{folder}: {name}, {size / 1e6:.1f} MB; drafts: {', '.join([*taken, 'history'])}")
    out.print(f'AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True).generate(…)')
    out.print(f"transformers serve {folder} --trust-remote-code")
    out.print(f"gsd-kernels serve {folder}")
