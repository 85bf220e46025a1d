"""The folder that is shipped, and the measurements of its card."""

from __future__ import annotations

import json
import platform
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from gsd_kernels_hf.files import write_json
from gsd_kernels_hf.sources.heads import CONFIG_FILE, WEIGHTS_FILE
from gsd_kernels_train.loop import RunFolder

from ..stdlib import SourceFile, sources_digest
from ..stdlib_prompts import EXCERPT, cut_prompts, excerpt
from .card import heads_card, values_of, write_card
from .evaluation import continuation_agreement, evaluate
from .models import load_member
from .stages import prepare


def write_heads(trained: Path, folder: Path) -> None:
    """Copy what is shipped of trained heads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        shutil.copyfile(trained / name, folder / name)


def strip_local_settings(folder: Path) -> None:
    """Remove what the tokenizer noted about how it was loaded here, and let everyone read the weights."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only")}, 2)
    (folder / "model.safetensors").chmod(0o644)


def assemble(work: Path, folder: Path) -> None:
    """Write the folder that is shipped, and measure the numbers of its card."""
    tokenizer, training, held_out, tokens = prepare(work)
    records = json.loads((work / "records.json").read_text())
    heads = json.loads((work / "heads" / RunFolder.REPORT).read_text(encoding="utf-8"))
    copy_results(work, folder)
    target, draft = load_member(folder / "target"), load_member(folder / "draft")
    prompts = cut_prompts(held_out, tokenizer)
    checked = checked_excerpt(target, draft, tokenizer, held_out)
    write_json(folder / "prompts.json", {"prompts": prompts, "excerpt": checked})
    write_json(
        folder / "sources.json",
        {
            "python": platform.python_version(),
            "digest": sources_digest(training + held_out),
            "held_out": {source.name: source.sha256 for source in held_out},
            "training": {source.name: source.sha256 for source in training},
        },
        indent=0,
    )
    measured = evaluate(target, draft, tokenizer, held_out)
    code, copies = ([prompt["text"] for prompt in prompts if prompt["kind"] == kind] for kind in ("code", "copy"))
    write_card(
        folder,
        **values_of(training, held_out, tokens, records),
        target=target.num_parameters(),
        draft=draft.num_parameters(),
        ratio=target.num_parameters() / draft.num_parameters(),
        measured=measured,
        continuation=continuation_agreement(target, draft, tokenizer, code),
        copy_continuation=continuation_agreement(target, draft, tokenizer, copies),
        code_prompts=len(code),
        copy_prompts=len(copies),
        heads=heads_card(heads),
        head_steps=heads["training"]["steps"],
    )


def copy_results(work: Path, folder: Path) -> None:
    """Copy models, heads and the licence of the text from the ``work`` folder to the one that is shipped."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("target", "draft"):
        shutil.copytree(work / name, folder / name, dirs_exist_ok=True)
        strip_local_settings(folder / name)
    write_heads(work / "heads", folder / "heads")
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if licence.exists():
        shutil.copyfile(licence, folder / "PYTHON-LICENSE.txt")


def checked_excerpt(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: list[SourceFile]
) -> dict[str, Any]:
    """A text with the target's bits per byte on it, by which a loaded pair can be checked."""
    name, first, last = EXCERPT
    text = excerpt(next(source for source in held_out if source.name == name), first, last)
    measured = evaluate(target, draft, tokenizer, [SourceFile(name, text, "")])
    bits = round(measured.target_bits_per_byte, 4)
    return {"file": name, "lines": [first, last], "bits_per_byte": bits, "text": text}
