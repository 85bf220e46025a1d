"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gsd_kernels_hf.files import decode_utf8, read_utf8

from . import values
from .output import only_first_rank_prints

if TYPE_CHECKING:
    from gsd_kernels import GraphConfig

    from .pair import LoadedPair

_MODELS, _PROMPT, _DECODING = "Models", "Prompt", "Decoding"
_SAMPLING = "Sampling (any of these turns it on; otherwise greedy)"


CRITERIA = ("exact", "speculative", "block", "typical")
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


def option(panel: str | None, help: str | None = None, *flags: str, **more: Any) -> Any:
    """An option in a panel of a command's help; without ``flags`` it is called as its parameter."""
    return typer.Option(*flags, rich_help_panel=panel, help=help, **more)


def choice(panel: str | None, help: str, known: Sequence[str]) -> Any:
    """An option whose value is one of those that are known."""
    return option(panel, help, metavar="|".join(known), callback=values.one_of(known))


def model_option(without: str) -> Any:
    """``--model``; ``without`` it, says its help, what."""
    said = f"Target: a local checkpoint folder, a hub id, or a GGUF file. Without it {without}."
    return option(_MODELS, said, "--model", metavar="DIR|ID|FILE.gguf", callback=values.model)


def checkpoint_option(said: str) -> Any:
    """``--model`` of commands that read a checkpoint's own files, which no GGUF file has; ``said`` by its help."""
    return typer.Option("--model", metavar="DIR|ID", callback=values.folder, help=said)


ModelPlace = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        callback=values.model,
        show_default=False,
        help="Target: a local checkpoint folder, a hub id, or a GGUF file; --model is the same.",
    ),
]
Model = Annotated[str | None, model_option("that of the command is taken, if it has one")]
Draft = Annotated[
    str | None,
    option(
        _MODELS,
        "Draft model; its tokenizer may be another. [bold]history[/bold], the default beside --model: no model, "
        "the text itself and the target's earlier tokens. [bold]none[/bold]: plain decoding.",
        "--draft",
        metavar="DIR|ID|history|none",
        callback=values.draft,
    ),
]
Revision = Annotated[str | None, option(_MODELS, "Branch, tag or commit of --model on the hub.")]
DtypeOption = Annotated[str, choice(_MODELS, "auto: as stored (the embedded pair: float32).", DTYPES)]
Device = Annotated[
    str | None,
    option(_MODELS, "cpu, cuda, cuda:1, …; default: the first GPU if there is one.", callback=values.device),
]
TrustRemoteCode = Annotated[bool, option(_MODELS, "Run Python code that the checkpoint brings.", "--trust-remote-code")]
PromptFiles = Annotated[
    list[str] | None,
    option(_PROMPT, "Read a prompt from a UTF-8 file; - is stdin. Repeatable.", "--prompt-file", metavar="FILE"),
]
Lines = Annotated[bool, option(_PROMPT, "Every non-empty line of a file or of stdin is a prompt.", "--lines")]
MaxNewTokens = Annotated[int, option(_DECODING, min=1)]
GraphOption = Annotated[
    str | None,
    option(
        _DECODING,
        "auto (default), chain, tree or graph, and fields of GraphConfig: [bold]tree,depth=6,max_rows=16[/bold].",
        metavar="PRESET|KEY=VALUE,…",
    ),
]
CriterionOption = Annotated[
    str,
    choice(
        _DECODING,
        "Which drafted tokens are accepted when sampling. [bold]exact[/bold]: what the target itself draws. "
        "[bold]speculative[/bold]: by probability ratio; exact too, but the draft decides which sample. "
        "[bold]block[/bold]: the same, a chain at a time. "
        "[bold]typical[/bold]: likely enough, which changes the output.",
        CRITERIA,
    ),
]
Backend = Annotated[str, choice(_DECODING, "Of the ops; see gsd-kernels doctor.", values.BACKENDS)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text and tables.")]


@dataclass(frozen=True)
class Named:
    """The model of a command, by its place or by ``--model``."""

    place: ModelPlace = None
    model: Model = None

    @property
    def name(self) -> str | None:
        """The one that was given."""
        return values.named_once(self.place, self.model)


@dataclass(frozen=True)
class Drafts:
    """Drafts for a command's model, named as by :func:`gsd_kernels.patch`, and from where both are loaded."""

    assistant_model: Draft = None
    draft_heads: Annotated[
        str | None,
        option(
            _MODELS,
            "Heads of the target, from [bold]gsd-kernels train-heads[/bold]: beside --draft and the history, or "
            "without a draft. [bold]demo[/bold]: those of the embedded target.",
            metavar="DIR",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        option(
            _MODELS,
            "Drafter that was trained for the target: EAGLE-3, P-EAGLE, DFlash, DSpark, JetSpec, Medusa or Gemma 4's. "
            "'mtp': the multi-token-prediction heads in the target's own. Beside --draft and the history, or without "
            "one.",
            metavar="DIR|ID|mtp",
            callback=values.drafter,
        ),
    ] = None
    corpus: Annotated[
        str | None,
        option(
            _MODELS,
            "Texts indexed by [bold]gsd-kernels index[/bold] with the target's tokenizer: beside --draft and "
            "the history, with [bold]--draft none[/bold] alone.",
            metavar="DIR",
        ),
    ] = None
    revision: Revision = None
    draft_revision: Annotated[str | None, option(_MODELS, "The same for --draft.")] = None
    device: Device = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class Models(Drafts):
    """The same with a dtype."""

    dtype: DtypeOption = "auto"

    def load(self, model: str | None, tp_timeout: float | None = None) -> LoadedPair:
        """Load by :func:`~gsd_kernels_cli.pair.load_pair`; by default with what a folder names to draft.

        Raises:
            ValueError: the folder's file of options is damaged, or see there.
        """
        from gsd_kernels_hf.exported.folder import read_options
        from gsd_kernels_hf.sources.load import OWN

        from .pair import load_pair

        named = any(getattr(self, name) for name in values.SOURCES)
        given = read_options(folder) if model and not named and (folder := Path(model)).is_dir() else {}
        own = {
            name: OWN if given[name] == OWN else str(folder / given[name]) for name in values.SOURCES if name in given
        }
        pair = load_pair(model, replace(self, **own), tp_timeout)
        pair.own_shape = given.get("graph_config")
        return pair

    def load_chat_model(self) -> LoadedPair:
        """Load SmolLM2 of pip's package, by default in the dtype that it was published in."""
        from .demo import smollm2

        folder = str(smollm2.folder())  # has a bar of its own
        return replace(self, dtype="bfloat16" if self.dtype == "auto" else self.dtype).load(folder)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: Annotated[float | None, option(_SAMPLING, "0 is greedy.", min=0.0)] = None
    top_k: Annotated[int | None, option(_SAMPLING, min=0, max=2**31 - 1)] = None
    top_p: Annotated[float | None, option(_SAMPLING, min=0.0, max=1.0)] = None
    min_p: Annotated[float | None, option(_SAMPLING, min=0.0, max=1.0)] = None
    seed: Annotated[int | None, option(_SAMPLING, "Same seed, same text, whatever the draft.")] = None

    def arguments(self) -> dict[str, Any]:
        """Of ``generate``. Temperature 0 is greedy, as on most servers."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if not given or self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, **given}


@dataclass(frozen=True)
class Ranks:
    """The processes that the target is sharded over, if it is."""

    tp: Annotated[
        bool,
        option(
            _MODELS,
            "Shard the target over the processes of [bold]torchrun … -m gsd_kernels_hf[/bold]; the draft is whole on "
            "each. The first process prints.",
            "--tp",
        ),
    ] = False
    tp_timeout: Annotated[float, option(_MODELS, "After which a silent rank is lost.", metavar="SECONDS", min=1.0)] = (
        600.0
    )

    @property
    def timeout(self) -> float | None:
        """Seconds after which a silent rank is lost; ``None`` without ``--tp``."""
        return self.tp_timeout if self.tp else None


@dataclass(frozen=True)
class Asked:
    """Prompts, and the model that continues or answers them."""

    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPTS]...",
            show_default=False,
            help="Prompts; several are one batch. The first names the target if it is its folder, hub id or GGUF file.",
        ),
    ] = None
    model: Model = None
    prompt_files: PromptFiles = None
    lines: Lines = False
    chat: Annotated[
        bool, option(_PROMPT, "Each prompt is a user's message: apply the tokenizer's chat template.", "--chat")
    ] = False

    def read(self, models: Models, ranks: Ranks, *, stdin: bool) -> tuple[str | None, list[str]]:
        """The model and the texts; none where neither an argument nor a file has one, and ``stdin`` is not read.

        Raises:
            ValueError: a prompt is empty, or a draft has no target.
        """
        if ranks.tp:
            only_first_rank_prints()
        model, prompts = values.model_before(self.prompts, self.model)
        values.check_draft(model, models.assistant_model)
        if not (stdin or prompts or self.prompt_files):
            return model, []
        return model, read_prompts(prompts, self.prompt_files, self.lines, several_processes=ranks.tp)


def read_graph_config(text: str | None) -> GraphConfig | str | None:
    """``--graph-config``: ``auto``, ``plain`` or a preset's name, ``key=value`` fields, or a preset followed by fields.

    Raises:
        TypeError, ValueError: an unknown preset or field, or a value out of range.
    """
    if text is None:
        return None
    from gsd_kernels import GraphConfig
    from gsd_kernels.config import AUTO, PLAIN

    first, *rest = (part.strip() for part in text.split(","))
    name, pairs = ("graph", [first, *rest]) if "=" in first else (first, rest)
    if not pairs:
        return name if name in (AUTO, PLAIN) else GraphConfig.preset(name) and name
    changes: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals):
            raise ValueError(f"--graph-config: expected key=value, got {pair!r}")
        if key in changes:
            raise ValueError(f"--graph-config: {key} is given twice, in {text!r}; give it once")
        changes[key] = _number(key, value)
    return GraphConfig.preset(name, **changes)


def _number(key: str, text: str) -> int | float | None:
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ValueError(f"--graph-config: {key}: expected a number or none, got {text!r}")


def read_prompts(
    arguments: list[str] | None,
    files: list[str] | None,
    lines: bool,
    *,
    several_processes: bool = False,
    by: str = "--prompt-file",
) -> list[str]:
    """Prompts from the arguments, then from the files; with neither, from stdin unless it is a terminal.

    Raises:
        ValueError: a prompt is empty, or ``several_processes`` would have to share stdin.
    """
    texts = []
    files = files or ([] if arguments or sys.stdin is None or sys.stdin.isatty() else ["-"])
    if several_processes and "-" in files:
        raise ValueError("--tp: processes cannot share stdin; give the prompt as an argument or by --prompt-file")
    for name in files:
        text = _stdin() if name == "-" else read_utf8(Path(name), by)
        kept = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]  # no other ends: U+2028 is text
        prompts = kept if lines else [text]
        if not any(prompts):
            whose = "stdin" if name == "-" else name
            raise ValueError(f"prompt: {whose} is empty; give one as an argument, by --prompt-file or on stdin")
        texts += prompts
    texts = [*(decode_utf8(os.fsencode(text), "prompt", "the argument") for text in arguments or ()), *texts]
    if any(not text for text in texts):
        raise ValueError("prompt: empty")
    return texts


def _stdin() -> str:
    if sys.stdin is None:
        raise ValueError("prompt: stdin is closed; give one as an argument or by --prompt-file")
    return decode_utf8(sys.stdin.buffer.read(), "prompt", "stdin")
