"""Messages between the ranks of a tensor-parallel target for an emitted token: plain decoding beside speculation.

Starts torchrun for every number of ranks. A message is one collective operation, and its bytes are those of the tensor
that a rank hands to it; every collective that the process starts is counted, whoever starts it. Counts do not depend on
the machine, so a CPU with gloo shows them as well as GPUs would.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsd_kernels import GraphConfig
from gsd_kernels.config import PRESETS
from gsd_kernels_cli import comparison, ranks
from gsd_kernels_cli.pair import quiet_transformers
from gsd_kernels_hf import validate
from gsd_kernels_hf.files import write_json
from gsd_kernels_hf.parallel import Agreement

from ..generation.pairs import load_pair
from ..lib.environment import environment
from ..lib.report import SCHEMA, markdown

NAME = "scale_messages"
PLAIN = "plain"
WAYS = (PLAIN, *PRESETS)
TIMEOUT_SECONDS = 600.0  # seconds that a message may take on a busy machine

ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
OPERATIONS = {
    "allreduce_": ALL_REDUCE,
    "all_reduce_": ALL_REDUCE,
    "allgather_": ALL_GATHER,
    "_allgather_base_": ALL_GATHER,
    "all_gather_into_tensor": ALL_GATHER,
}
LOCAL = ("wait_tensor", "_wrap_tensor_autograd")  # operations beside the collectives that send nothing
PROMPT, DECODING, START, CHECKS, OTHER = "prompt", "decoding", "agreement at the start", "agreement checks", "other"


class Messages(TorchDispatchMode):
    """Counts the collectives of this process by what they are for.

    Attributes:
        part: what the next ones are for.
        counts, bytes: by part and operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = OTHER
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # which becomes operations on local tensors, and those come here
        name = function._schema.name.partition("::")[2]
        if "c10d" in function.namespace and name not in LOCAL:
            key = self.part, OPERATIONS.get(name, name)
            self.counts[key] += 1
            self.bytes[key] += sum(t.nbytes for t in tree_leaves(_given(name, args)) if isinstance(t, Tensor))
        return function(*args, **(kwargs or {}))

    def forget(self) -> None:
        """Begin anew."""
        self.counts.clear()
        self.bytes.clear()

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """part → operation → its count and bytes."""
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for part, operation in self.counts:
            numbers = {"count": self.counts[part, operation], "bytes": self.bytes[part, operation]}
            counts.setdefault(part, {})[operation] = numbers
        return counts


def _given(name: str, args: Any) -> Any:
    """The arguments of a collective that hold what this rank hands to it."""
    return args[1] if name in ("allgather_", "_allgather_base_") else args


@contextmanager
def counted(target: torch.nn.Module) -> Iterator[Messages]:
    """Count while one text is decoded: the target's first forward reads the prompt, the others decode."""
    messages = Messages()
    parts, gathers = [DECODING, PROMPT], iter([START])
    gather = Agreement._gather

    def begin(*_: Any) -> None:
        messages.part = parts.pop() if len(parts) > 1 else parts[0]

    def end(*_: Any) -> None:
        messages.part = OTHER

    def agree(self: Agreement, mine: Tensor) -> Tensor:
        messages.part = next(gathers, CHECKS)
        everyone = gather(self, mine)
        messages.part = OTHER
        return everyone

    hooks = [target.register_forward_pre_hook(begin), target.register_forward_hook(end)]
    try:
        with mock.patch.object(Agreement, "_gather", agree), messages:
            # A model proves by forwards that it is served, once; hooks and what counts make another one of it.
            validate.check_model("model", target)
            parts[:] = [DECODING, PROMPT]
            messages.forget()
            yield messages
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Settings:
    """Models, prompts and lengths that every rank decodes."""

    pair: str
    target_shape: str
    dtype: str
    prompts: int
    new_tokens: int


def run_rank(settings: Settings, file: Path) -> None:
    """Measure as one of torchrun's processes; the first one writes ``file``."""
    measured = measure(settings)
    if ranks.is_first():
        write_json(file, measured)


def measure(settings: Settings) -> dict[str, Any]:
    """One rank: every prompt, every way of decoding it."""
    quiet_transformers()
    device = ranks.join(TIMEOUT_SECONDS)
    size = torch.distributed.get_world_size()
    torch.set_num_threads(1)
    dtype = getattr(torch, settings.dtype)
    pair = load_pair(
        settings.pair,
        device=device,
        dtype=dtype,
        target_shape=settings.target_shape,
        prompts=settings.prompts,
        tensor_parallel=size > 1,
    )
    ways = {PLAIN: comparison.plain(pair.target)}
    ways |= {name: comparison.graph(pair.target, assistant_model=pair.draft, graph_config=name) for name in PRESETS}
    runs = []
    for prompt in pair.prompts:
        inputs = {"input_ids": prompt.input_ids, "attention_mask": torch.ones_like(prompt.input_ids)}
        for way, decode in ways.items():
            with counted(pair.target) as messages:
                run = comparison.measure(pair.target, decode, inputs, settings.new_tokens)
            runs.append(
                {
                    "ranks": size,
                    "way": way,
                    "prompt": prompt.name,
                    "prompt_tokens": prompt.input_ids.shape[1],
                    "tokens": run.tokens,
                    # The forward of the prompt emits plain decoding's first token, and none of ours.
                    "decoded_tokens": len(run.tokens) - (way == PLAIN),
                    "forwards": run.target_forwards - (way == PLAIN),
                    "messages": messages.as_dict(),
                }
            )
    config = pair.target.config
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {
        "environment": environment(device),
        "target": {name: getattr(config, name) for name in sizes},
        "runs": runs,
    }


def launch(settings: Settings, size: int, folder: Path) -> dict[str, Any]:
    """Start ``size`` ranks; what the first one found.

    Raises:
        RuntimeError: the ranks failed; their output has the reason.
    """
    file = folder / f"ranks-{size}.json"
    given = asdict(settings).items()
    arguments = [text for name, value in given for text in (f"--{name.replace('_', '-')}", str(value))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    print(f"{NAME}: {size} ranks", file=sys.stderr, flush=True)
    module = ["-m", "gsd_kernels_hf", "bench", "scale-messages", "--one-rank", str(file), *arguments]
    if subprocess.run([*launcher, *module]).returncode:
        raise RuntimeError(f"{NAME}: {size} ranks failed")
    return json.loads(file.read_text(encoding="utf-8"))


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums over the prompts, an emitted token, for every number of ranks and way."""
    first = min(run["ranks"] for run in runs)
    alone = {run["prompt"]: run["tokens"] for run in runs if run["ranks"] == first and run["way"] == PLAIN}
    rows: list[dict[str, Any]] = []
    for size, way in dict.fromkeys((run["ranks"], run["way"]) for run in runs):
        chosen = [run for run in runs if (run["ranks"], run["way"]) == (size, way)]
        tokens, forwards = (sum(run[key] for run in chosen) for key in ("decoded_tokens", "forwards"))

        def total(
            part: str, what: str = "count", only: str | None = None, chosen: list[dict[str, Any]] = chosen
        ) -> int:
            parts = [run["messages"].get(part, {}) for run in chosen]
            return sum(n[what] for operations in parts for name, n in operations.items() if only in (None, name))

        row = {
            "ranks": size,
            "way": way,
            "tokens_per_forward": tokens / forwards,
            "all_reduces_per_token": total(DECODING, only=ALL_REDUCE) / tokens,
            "messages_per_token": total(DECODING) / tokens,
            "bytes_per_token": total(DECODING, "bytes") / tokens,
            "bytes_per_message": total(DECODING, "bytes") / max(total(DECODING), 1),
            "messages_per_prompt": total(PROMPT) / len(chosen),
            "agreement_messages_per_text": (total(START) + total(CHECKS)) / len(chosen),
            "agreement_messages_per_token": (total(START) + total(CHECKS)) / tokens,
            "agreement_bytes_per_token": (total(START, "bytes") + total(CHECKS, "bytes")) / tokens,
            "other_messages": total(OTHER),
            "texts": len(chosen),
            "equal": sum(run["tokens"] == alone[run["prompt"]] for run in chosen),
        }
        plain = next((r for r in rows if r["ranks"] == size and r["way"] == PLAIN), row)
        mine = row["all_reduces_per_token"]
        row["fewer_all_reduces"] = plain["all_reduces_per_token"] / mine if mine else None
        rows.append(row)
    return rows


def table(data: dict[str, Any]) -> str:
    """The summary in Markdown."""
    rows = []
    for row in data["summary"]:
        fewer = row["fewer_all_reduces"]
        rows.append(
            [
                f"{row['ranks']}, {row['way']}",
                f"{row['tokens_per_forward']:.2f}",
                f"{row['all_reduces_per_token']:.2f}",
                "–" if fewer is None else f"{fewer:.2f}×",
                f"{row['messages_per_token']:.2f}",
                f"{row['bytes_per_token'] / 1024:.1f}",
                f"{row['bytes_per_message'] / 1024:.1f}",
                f"{row['agreement_messages_per_token']:.2f}",
                f"{row['agreement_bytes_per_token']:.0f}",
                f"{row['equal']}/{row['texts']}",
            ]
        )
    head = ["ranks", "tokens/forward", "all-reduces/token", "fewer", "all messages/token", "KiB/token", "KiB/message"]
    return markdown([*head, "agreement messages/token", "agreement bytes/token", "same tokens"], rows)


def run(settings: Settings, *, ranks: list[int], folder: Path) -> dict[str, Any]:
    """All numbers of ranks, and what they add up to; written to ``folder``."""
    with tempfile.TemporaryDirectory() as parts:
        found = [launch(settings, size, Path(parts)) for size in ranks]
    runs = [run for each in found for run in each["runs"]]
    result = {
        "schema": SCHEMA,
        "case": NAME,
        "environment": found[0]["environment"],
        "settings": {
            "pair": settings.pair,
            "target_shape": settings.target_shape,
            "dtype": settings.dtype,
            "new_tokens": settings.new_tokens,
            "prompts": list(dict.fromkeys(run["prompt"] for run in runs)),
            "ranks": ranks,
            "configs": {name: asdict(GraphConfig.preset(name)) for name in PRESETS},
        },
        "target": found[0]["target"],
        "summary": summary(runs),
        "runs": runs,
    }
    write_json(folder / f"{NAME}.json", result, indent=None)
    return result
