"""What the package gave before: texts of the covering array, bits of every op, refusals' words, statistics' fields.

``python tests/goldens.py --make`` writes ``goldens.json.gz`` anew, ``python tests/goldens.py`` replays it. Both run at
the level ``avx2``, which every processor of today has, so that a file made on one machine holds on all.
"""

from __future__ import annotations

import base64
import functools
import gzip
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import torch
import typer
from models import noised, prompts, tiny
from ops.contracts.inputs import op_inputs
from texts.covering import CALLS, SUBJECTS, asked, plain_text, rows

import gsd_kernels as gsd
from gsd_kernels import cpu_levels
from gsd_kernels.ops.table import all_ops
from gsd_kernels_bench.cli import app as benches
from gsd_kernels_cli.app import app
from gsd_kernels_hf import files

FILE = Path(__file__).with_name("goldens.json.gz")
LEVEL, TOLERANCE = "avx2", 1e-4  # of floats


def texts() -> Iterator[tuple[str, Any]]:
    """Token ids of every text that is not transformers' own; a source's target is one of a family."""
    for name, subject in SUBJECTS.items():
        own = [row for row in rows()[name] if not (subject.own and not CALLS[row[2]]["do_sample"])]
        # bitsandbytes rounds its scales where the processor multiplies bfloat16, and there alone.
        if name.startswith(("source ", "weights bitsandbytes")) or not own:
            continue
        with tempfile.TemporaryDirectory() as folder:
            made = subject.made(Path(folder))
            for row in own:
                text = plain_text(subject, made.target, asked(made.inputs, row))
                yield f"{name}: {' '.join(map(str, row[1:3]))}", text.tolist()


def ops() -> Iterator[tuple[str, Any]]:
    """Results of every op in C++, and what it wrote in place: integers to the bit, floats to rounding."""
    torch.manual_seed(0)
    given = op_inputs()
    for name, op in sorted(all_ops().items()):
        if name not in given:
            continue
        arguments = given[name]
        results = op.operator(*arguments)
        yield name, [_kept(tensor) for tensor in (*_tensors(results), *_tensors(arguments))]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _kept(tensor: torch.Tensor) -> Any:
    if tensor.is_floating_point():
        numbers = tensor.double().nan_to_num(9e9, 9e8, -9e8).flatten().tolist()
        return {"floats": [float(f"{number:.6g}") for number in numbers]}
    return {"bytes": base64.b64encode(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).decode()}


def _llama() -> Any:
    return tiny(dtype=torch.float32)


WRONG: dict[str, dict[str, Any]] = {
    "a shape that is none": {"graph_config": "gaph"},
    "a shape of another type": {"graph_config": 3},
    "a source that is none": {"draft_sources": ("histroy",)},
    "a source without its draft": {"draft_sources": ("model",)},
    "a backend that is none": {"backend": "gpu"},
    "a criterion that is none": {"criterion": "exactly"},
    "an option that is none": {"graph_confg": "auto"},
    "a seed of text": {"seed": "1"},
    "beams": {"num_beams": 2},
    "stop strings without a tokenizer": {"stop_strings": ["x"]},
    "padding on the right": {"attention_mask": torch.tensor([[1, 1, 0]])},
    "a mask of another size": {"attention_mask": torch.ones(1, 5, dtype=torch.int64)},
    "a draft that is no model": {"assistant_model": "draft"},
    "heads that are none": {"draft_heads": 3},
    "a drafter that is nowhere": {"drafter": "./none"},
    "an observer that is none": {"observer": 3},
    "ids of floats": {"input_ids": torch.rand(1, 3)},
    "no ids": {"input_ids": torch.zeros(1, 0, dtype=torch.int64)},
    "ids beyond the vocabulary": {"input_ids": torch.tensor([[4, 5000]])},
    "ids below zero": {"input_ids": torch.tensor([[4, -1]])},
    "ids in a list": {"input_ids": [[4, 5]]},
    "ids of one dimension": {"input_ids": torch.tensor([4, 5])},
    "a mask in a list": {"attention_mask": [[1, 1, 1]]},
    "a seed that is a fraction": {"seed": 1.5},
    "a seed that is a truth": {"seed": True},
    "a seed of 65 bits": {"seed": 2**64},
    "a shape in a dict": {"graph_config": {"depth": 3}},
    "a criterion that is a number": {"criterion": 3},
    "sources in a string": {"draft_sources": "history"},
    "no sources": {"draft_sources": ()},
    "a source that is a number": {"draft_sources": ("history", 3)},
    "a layer to skip without a model": {"draft_sources": ("layer_skip",)},
    "reference ids in a list": {"draft_sources": ("history",), "reference_ids": [3, 4]},
    "reference ids beyond the vocabulary": {"draft_sources": ("history",), "reference_ids": torch.tensor([5000])},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "guidance": {"guidance_scale": 2.0},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "an early exit": {"assistant_early_exit": 1},
    "forced words": {"force_words_ids": [[3]]},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "another cache": {"cache_implementation": "offloaded"},
    "embeddings": {"inputs_embeds": torch.zeros(1, 3, 32)},
    "positions": {"position_ids": torch.tensor([[0, 1, 2]])},
    "layers to contrast": {"dola_layers": "high"},
    "settings of a chain": {"graph_config": gsd.Automatic(min_gain=2.0), "criterion": "block"},
    "a drafter that is a file": {"drafter": "/dev/null"},
}

OUTSIDE_OF_GENERATE: dict[str, Callable[[], Any]] = {
    "a depth below zero": lambda: gsd.GraphConfig(depth=-1),
    "a depth of text": lambda: gsd.GraphConfig(depth="3"),
    "no branch": lambda: gsd.GraphConfig(branch=0),
    "no width": lambda: gsd.GraphConfig(width=0),
    "too many rows": lambda: gsd.GraphConfig(max_rows=500),
    "a path longer than the rows": lambda: gsd.GraphConfig(max_rows=8, max_path=9),
    "a ratio above one": lambda: gsd.GraphConfig(sibling_ratio=2.0),
    "a probability above one": lambda: gsd.GraphConfig(min_prob=2.0),
    "a context that is too long": lambda: gsd.GraphConfig(merge_context=99),
    "a preset that is none": lambda: gsd.GraphConfig.preset("tre"),
    "no layer to skip": lambda: gsd.LayerSkip(_llama()),
    "a layer that is none": lambda: gsd.LayerSkip(_llama(), mlp=[9]),
    "no heads": lambda: gsd.DraftHeads.for_model(_llama(), 0),
    "a threshold above one": lambda: gsd.Typical(2.0),
    "a threshold of text": lambda: gsd.Typical("2"),
    "a setting of text": lambda: gsd.Automatic(min_gain="2"),
    "a setting that is none": lambda: gsd.Automatic(min_gian=1.0),
    "a setting below one": lambda: gsd.Automatic(payback_tokens=0),
    "a setting that is no number": lambda: gsd.Automatic(min_gain=float("nan")),
    "a kind of weights that is none": lambda: gsd.pack(_llama(), "q9_9"),
    "a patch of no model": lambda: gsd.patch(3),
    "a patch with an option that is none": lambda: gsd.patch(_llama(), graph_confg="auto"),
    "an end of no patch": lambda: gsd.unpatch(_llama()),
    "a decoder with a draft that is none": lambda: gsd.GraphDecoder("draft")(_llama(), torch.tensor([[4, 5]])),
    "a corpus that is nowhere": lambda: gsd.Corpus("none"),
    "a file that is nowhere": lambda: gsd.from_gguf("none.gguf"),
    "a model that is nowhere": lambda: files.model_place("none.gguf", "model"),
    "a text that is nowhere": lambda: files.read_utf8(Path("none"), "text"),
    "a name that is too long": lambda: files.read_utf8(Path("n" * 999), "text"),
}


def refusals() -> Iterator[tuple[str, Any]]:
    """Type and words of what a call is refused with; ``None`` where it is served."""
    for name, call in OUTSIDE_OF_GENERATE.items():
        yield name, _refused(call)
    for name, wrong in WRONG.items():
        given = {"input_ids": torch.tensor([[4, 5, 6]]), "max_new_tokens": 4, "do_sample": False, **wrong}
        yield name, _refused(functools.partial(gsd.generate, _llama(), **given))


def _refused(call: Callable[[], Any]) -> list[str] | None:
    try:
        call()
    except (ValueError, TypeError, OSError) as error:
        return [type(error).__name__, str(error)]
    return None


def statistics() -> Iterator[tuple[str, Any]]:
    """Names of all that is public, parameters, commands, options, and fields and types of a call's statistics."""
    yield "public names", sorted(gsd.__all__)
    for name in gsd.__all__:
        value = getattr(gsd, name)
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
            yield name, [*inspect.signature(value).parameters]
    yield from options("gsd-kernels", typer.main.get_command(app))
    yield from options("gsd-kernels bench", typer.main.get_command(benches))
    target = _llama()
    out = gsd.generate(
        target, **prompts(1, 9), assistant_model=noised(target), max_new_tokens=12, return_dict_in_generate=True
    )
    yield "statistics", {name: type(value).__name__ for name, value in sorted(out.stats.as_dict().items())}


def options(name: str, command: typer.core.TyperCommand | typer.core.TyperGroup) -> Iterator[tuple[str, Any]]:
    """Arguments and options of a command and of those below it."""
    yield name, sorted(word for given in command.params for word in (*given.opts, *given.secondary_opts))
    for below in getattr(command, "commands", ()):
        yield from options(f"{name} {below}", command.get_command(None, below))


PARTS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "texts": texts,
    "ops": ops,
    "refusals": refusals,
    "statistics": statistics,
}


def differ(mine: Any, before: Any) -> bool:
    """Return whether a value is another one; floats may differ by rounding."""
    if isinstance(mine, float) or isinstance(before, float):
        return not abs(mine - before) <= TOLERANCE * max(1.0, abs(before))
    if isinstance(mine, list) and isinstance(before, list):
        return len(mine) != len(before) or any(map(differ, mine, before))
    if isinstance(mine, dict) and isinstance(before, dict):
        return mine.keys() != before.keys() or any(differ(mine[key], before[key]) for key in mine)
    return mine != before


def changed(part: str) -> list[str]:
    """Name what of a part is not as it was."""
    before = json.loads(gzip.decompress(FILE.read_bytes()))[part]
    now = json.loads(json.dumps(dict(PARTS[part]())))
    return [name for name in sorted(before.keys() | now.keys()) if differ(now.get(name), before.get(name))]


def main() -> None:
    """Make the file, or say what is no longer as it was."""
    torch.set_num_threads(1)
    with cpu_levels.forced(LEVEL):
        if "--make" in sys.argv:
            made = {part: dict(values()) for part, values in PARTS.items()}
            FILE.write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))
        elif other := [f"{part}: {name}" for part in PARTS for name in changed(part)]:
            raise SystemExit("other than before:\n" + "\n".join(other))


if __name__ == "__main__":
    main()
