"""A file of prompts, decoded by patched models in many processes, on one machine or several (Ray Data).

python examples/ray_batch.py                                   the embedded pair on its own prompts
python examples/ray_batch.py prompts.jsonl texts.jsonl --model DIR_OR_ID --draft DIR_OR_ID --actors 4
python examples/ray_batch.py … --address auto                  on the machines of a Ray cluster (ray start)

Every line of the input is an object with "prompt", every line of the output one with "row" (the input's line, from 0),
"prompt", "text", "tokens_per_step" and "process". Rows are written as they are done. Started again, it does the rows
that the output lacks. An actor that dies is started anew, and its rows are decoded again; a row's text does not depend
on the actor, sampled text (--temperature) neither, as its seed is --seed plus its row.

Needs pip install -e '.[ray]' in this repository's folder.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gsd_kernels_cli import demo
from gsd_kernels_cli.options import Models

Row = dict[str, Any]


class Generator:
    """An actor: a patched model that decodes one prompt after another."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        import gsd_kernels

        torch.set_num_threads(options["threads"])
        self.pair, self.options = Models(options["draft"]).load(options["model"]), options
        self.handle = gsd_kernels.patch(self.pair.target, **self.pair.speculation)  # without a draft the history drafts

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for row, prompt in zip(batch["row"], batch["prompt"], strict=True):
            inputs = self.pair.encode([str(prompt)])
            temperature, seed = self.options["temperature"], self.options["seed"] + int(row)
            sampling = {"do_sample": temperature > 0, "temperature": temperature or None, "seed": seed}
            output = self.pair.target.generate(**inputs, **sampling, max_new_tokens=self.options["max_new_tokens"])
            text = self.pair.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            done = {"row": int(row), "prompt": str(prompt), "text": text}
            done["tokens_per_step"] = round(self.handle.stats.tokens_per_step, 3)
            done["process"] = f"{socket.gethostname()}:{os.getpid()}"
            yield {name: [value] for name, value in done.items()}


def read_prompts(path: Path | None) -> list[Row]:
    """The rows of the input, or the embedded prompts."""
    if path is None:
        return [{"row": row, "prompt": prompt["text"]} for row, prompt in enumerate(demo.prompts("code")[:4])]
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            prompt = json.loads(line).get("prompt")
            if not isinstance(prompt, str):
                raise SystemExit(f'{path}, line {number + 1}: expected an object with a string "prompt"')
            rows.append({"row": number, "prompt": prompt})
    return rows


def rows_done(path: Path) -> set[int]:
    """The rows that the output has; a last line that a kill cut short is taken away."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return {json.loads(line)["row"] for line in whole.splitlines()}


def decode(rows: list[Row], options: dict[str, Any]) -> Iterator[Row]:
    """The rows with their texts, as they are done."""
    try:
        import ray.data
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is missing: pip install -e '.[ray]', or 'ray[data]' alone") from None

    ray.init(options["address"], include_dashboard=False, log_to_driver=False, logging_level="warning")
    size = options["rows_per_task"]
    done = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // size)).map_batches(
        Generator,
        fn_constructor_args=(options,),
        batch_size=size,
        compute=ray.data.ActorPoolStrategy(size=options["actors"]),
        num_cpus=options["threads"],
        num_gpus=options["gpus"],
    )
    yield from done.iter_rows()
    ray.shutdown()


def main(
    context: typer.Context,
    prompts: Annotated[Path | None, typer.Argument()] = None,
    texts: Annotated[Path | None, typer.Argument()] = None,
    model: str | None = None,
    draft: str | None = None,
    max_new_tokens: int = 48,
    temperature: float = 0.0,
    seed: int = 0,
    actors: Annotated[int, typer.Option(help="models, in a process each")] = 2,
    threads: Annotated[int, typer.Option(help="CPUs of an actor")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of an actor")] = 0,
    rows_per_task: Annotated[int, typer.Option(help="rows that are lost and done again with an actor")] = 4,
    address: Annotated[str, typer.Option(help="auto: the cluster that this machine belongs to")] = "local",
) -> None:
    """Decode a file of prompts by patched models in many processes."""
    rows = read_prompts(prompts)
    done = rows_done(texts) if texts else set()
    missing = [row for row in rows if row["row"] not in done]
    print(f"{len(rows)} rows, {len(rows) - len(missing)} done before")
    if not missing:
        return
    with open(texts or os.devnull, "a", encoding="utf-8") as output:
        for row in decode(missing, context.params):
            output.write(json.dumps(row, ensure_ascii=False) + "\n")
            output.flush()
            if texts is None:
                print(row["prompt"] + row["text"], end="\n\n---\n\n")
    print(f"{len(missing)} rows done now")


if __name__ == "__main__":
    typer.run(main)
