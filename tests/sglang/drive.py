"""Run an SGLang engine on the CPU through the phases of ``test_sglang_engine.py`` and write what it gave as JSON.

``python drive.py ALGORITHM RESULT``: a process of its own, because the engine ends all that it started with it.
ALGORITHM is ``GSD`` or ``none``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "python" / "gsd_kernels_cli" / "demo" / "target"
ROWS, CROWD, CACHE = 9, 20, 1600
REPETITIVE = (
    "x = 1\ny = 2\nx = 1\ny = 2\nx = 1\ny =",
    "import os\nimport sys\nimport os\nimport sys\nimport",
    "def f(a):\n    return a\n\ndef f(a):\n    return a\n\ndef f(",
    "for i in range(3):\n    print(i)\nfor i in range(3):\n    print(i)\nfor",
    "a, b, c, a, b, c, a, b, c, a,",
    "self.x = x\nself.y = y\nself.x = x\nself.y = y\nself.",
    "# ----\n# ----\n# ----\n# --",
    "assert f(1) == 1\nassert f(1) == 1\nassert f(",
)


def prompts() -> list[list[int]]:
    """32 prompts, by their tokens, of different lengths."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    folder = ROOT / "python" / "gsd_kernels_cli" / "demo" / "prompts.json"
    texts = [prompt["text"] for prompt in json.loads(folder.read_text(encoding="utf-8"))["prompts"]]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    cut = [some[: 8 + 3 * (i % 7)] for i, some in enumerate(ids * (1 + 32 // len(ids)))]
    halves = [some[-(5 + i % 11) :] for i, some in enumerate(ids * (1 + 32 // len(ids)))]
    return [cut[i] if i < len(ids) else halves[i] for i in range(32)]


class Phases:
    """Requests to an engine; every phase is a list of tokens and of what SGLang says about them."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.result = engine, {}

    async def one(self, ids: list[int], limit: int, **sampling: Any) -> dict[str, Any]:
        settings = {"temperature": 0.0, "max_new_tokens": limit, **sampling}
        answer = await self.engine.async_generate(input_ids=ids, sampling_params=settings)
        return kept(answer)

    async def many(self, name: str, requests: list[tuple[list[int], int]], at_once: int, **sampling: Any) -> None:
        """All ``requests``, ``at_once`` of them at a time, the next one as soon as one ends."""
        started, places = time.perf_counter(), asyncio.Semaphore(at_once)

        async def queued(ids: list[int], limit: int) -> dict[str, Any]:
            async with places:
                return await self.one(ids, limit, **sampling)

        self.result[name] = await asyncio.gather(*(queued(*request) for request in requests))
        print(f"== {name}: {time.perf_counter() - started:.1f} s", flush=True)

    async def aborted(self, name: str, requests: list[list[int]], limit: int) -> None:
        """Every second request is aborted after its first tokens."""
        sampling = {"temperature": 0.0, "max_new_tokens": limit}

        async def run(number: int, ids: list[int]) -> dict[str, Any]:
            rid, last = f"aborted-{number}", {}
            stream = await self.engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True, rid=rid)
            tokens: list[int] = []
            async for last in stream:
                tokens = joined(tokens, last["output_ids"])
                if number % 2 and len(tokens) >= 6 and last["meta_info"]["finish_reason"] is None:
                    self.engine.tokenizer_manager.abort_request(rid)
            return {**kept(last), "output_ids": tokens}

        self.result[name] = await asyncio.gather(*(run(*request) for request in enumerate(requests)))
        print(f"== {name}", flush=True)

    async def all(self) -> None:
        """The phases, in an order in which the later ones find a history of the earlier ones."""
        from transformers import AutoTokenizer

        texts, tokenizer = prompts(), AutoTokenizer.from_pretrained(MODEL)
        repetitive = [tokenizer(text)["input_ids"] for text in REPETITIVE]
        await self.many("repetitive", [(ids, 48) for ids in repetitive], 8)
        await self.many("together", [(ids, 40) for ids in texts], 8)
        await self.many("ending", [(ids, 1 + 7 * (i % 6)) for i, ids in enumerate(texts[:16])], 8)
        stops = sorted({answer["output_ids"][9] for answer in self.result["together"][:8]})
        await self.many("stopped", [(ids, 40) for ids in texts[:8]], 8, stop_token_ids=stops)
        await self.aborted("aborted", texts[8:16], 60)
        await self.many("crowd", [(ids, 24) for ids in texts[:CROWD]], CROWD)
        await self.many("out_of_cache", [(ids, 160) for ids in texts[:12]], 12)
        self.result["after"] = [await self.one(texts[0], 40)]


def joined(before: list[int], new: list[int]) -> list[int]:
    """The tokens of a stream whose pieces hold all of them so far, or the next ones only."""
    return new if new[: len(before)] == before else before + new


def kept(answer: dict[str, Any]) -> dict[str, Any]:
    about = answer["meta_info"]
    names = ("finish_reason", "num_retractions", "spec_accept_length", "spec_verify_ct")
    return {"output_ids": answer["output_ids"], **{name: about.get(name) for name in names}}


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine

    algorithm, place = sys.argv[1:]
    speculation = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": ROWS}
    engine = Engine(
        model_path=str(MODEL),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        grammar_backend="none",
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        disable_overlap_schedule=True,
        max_running_requests=CROWD,
        max_total_tokens=CACHE if algorithm == "GSD" else 8192,
        schedule_conservativeness=0.01,
        log_level="info",
        **(speculation if algorithm == "GSD" else {}),
    )
    phases = Phases(engine)
    engine.loop.run_until_complete(phases.all())
    Path(place).write_text(json.dumps(phases.result), encoding="utf-8")
    engine.shutdown()


if __name__ == "__main__":
    main()
