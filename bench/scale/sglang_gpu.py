"""SGLang on a GPU without speculation, with its n-gram trees, and with the token graphs of gsd_kernels_sglang.

    python bench/scale/sglang_gpu.py --model-path DIR_OR_ID [--out FILE] [SGLang's own arguments]

One engine a process: an engine ends all that it started with it. Every engine serves the same prompts, the first few to
warm up, then all of them at 1, 8 and 32 requests. Needs SGLang and this package in one environment. Never run on a GPU
so far; rehearsed in the environment of ``make test-sglang`` with ``PYTHONPATH=tests/sglang/stubs``,
``SGLANG_USE_CPU_ENGINE=1`` and ``--device cpu --attention-backend torch_native --disable-overlap-schedule
--grammar-backend none``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "python" / "gsd_kernels_cli" / "demo" / "prompts.json"
ENGINES: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 16},
    "gsd-16": {"speculative_algorithm": "GSD", "speculative_num_draft_tokens": 16},
    "gsd-32": {"speculative_algorithm": "GSD", "speculative_num_draft_tokens": 32},
    "gsd-16-flashinfer-no-graph": {
        "speculative_algorithm": "GSD",
        "speculative_num_draft_tokens": 16,
        "attention_backend": "flashinfer",
        "disable_cuda_graph": True,
    },
    "gsd-16-triton": {
        "speculative_algorithm": "GSD",
        "speculative_num_draft_tokens": 16,
        "attention_backend": "triton",
    },
}


def parsed(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and what is left for SGLang."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sglang-gpu.json"))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_known_args(arguments)


async def serve(engine: Any, texts: list[str], at_once: int, new_tokens: int) -> dict[str, Any]:
    """All texts, ``at_once`` at a time: seconds, tokens and what SGLang says of speculation."""
    places, sampling = asyncio.Semaphore(at_once), {"temperature": 0.0, "max_new_tokens": new_tokens}

    async def one(text: str) -> dict[str, Any]:
        async with places:
            return await engine.async_generate(prompt=text, sampling_params=sampling)

    begun = time.perf_counter()
    answers = await asyncio.gather(*map(one, texts))
    seconds = time.perf_counter() - begun
    about = [answer["meta_info"] for answer in answers]
    tokens, verified = (sum(a.get(name) or 0 for a in about) for name in ("completion_tokens", "spec_verify_ct"))
    return {
        "at_once": at_once,
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
        "tokens_per_verification": round((tokens - len(texts)) / verified, 3) if verified else 1.0,
        "output_ids": [answer["output_ids"] for answer in answers],
    }


def run_one(own: argparse.Namespace, foreign: list[str]) -> None:
    """One engine, in this process."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = vars(parser.parse_args(foreign))
    chosen = {name: value for name, value in given.items() if value != parser.get_default(name)}
    engine = Engine(**{**chosen, **ENGINES[own.one]})
    texts = [prompt["text"] for prompt in json.loads(PROMPTS.read_text(encoding="utf-8"))["prompts"]][: own.prompts]

    async def all_of_them() -> list[dict[str, Any]]:
        await serve(engine, texts[:4], 4, 32)  # compiles and captures what is left
        return [await serve(engine, texts, at_once, own.new_tokens) for at_once in own.at_once]

    rows = engine.loop.run_until_complete(all_of_them())
    own.out.write_text(json.dumps(rows), encoding="utf-8")
    engine.shutdown()


def same(texts: list[list[int]], others: list[list[int]]) -> int:
    return sum(text == other for text, other in zip(texts, others, strict=True))


def main() -> None:
    own, foreign = parsed()
    if own.one:
        run_one(own, foreign)
        return
    results: dict[str, Any] = {"arguments": foreign, "engines": {}}
    plain: list[dict[str, Any]] | None = None
    for name in own.engines:
        part = own.out.with_suffix(f".{name}.json")
        part.unlink(missing_ok=True)
        counts = [
            "--at-once",
            *map(str, own.at_once),
            "--new-tokens",
            str(own.new_tokens),
            "--prompts",
            str(own.prompts),
        ]
        command = [sys.executable, __file__, "--one", name, "--out", str(part), *counts, *foreign]
        code = subprocess.run(command).returncode
        if not part.exists():
            results["engines"][name] = {"failed": f"exit status {code}"}
            continue
        rows = json.loads(part.read_text(encoding="utf-8"))
        part.unlink()
        plain = rows if name == "none" else plain
        for i, row in enumerate(rows):
            if plain is not None:
                row["same_text"] = f"{same(row['output_ids'], plain[i]['output_ids'])}/{len(row['output_ids'])}"
        results["engines"][name] = [{k: v for k, v in row.items() if k != "output_ids"} for row in rows]
        own.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        for row in results["engines"][name]:
            print(name, row, flush=True)
    own.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
