"""SGLang on the CPU with the plug-in and without: the same tokens. ``make test-sglang``; elsewhere it is skipped.

This file as a program, ``test_sglang_engine.py ALGORITHM RESULT``, runs an engine through the phases and writes what it
gave as JSON: a process of its own, because the engine ends all that it started with it. ALGORITHM is ``GSD``, with a
cache that is too small for its last phase, or ``none``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.version", reason="needs SGLang, which make test-sglang installs")

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "python" / "gsd_kernels_cli" / "demo"
REPETITIVE = (
    "x = 1\ny = 2\nx = 1\ny = 2\nx = 1\ny =",
    "import os\nimport sys\nimport os\nimport sys\nimport",
    "def f(a):\n    return a\n\ndef f(a):\n    return a\n\ndef f(",
    "a, b, c, a, b, c, a, b, c, a,",
)


class Phases:
    """Requests to an engine; every phase is a list of tokens and of what SGLang says about them."""

    def __init__(self, engine: Any) -> None:
        from transformers import AutoTokenizer

        self.engine, self.result = engine, {}
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")

    async def many(self, name: str, prompts: list[list[int]], limits: list[int], at_once: int = 8, **more: Any) -> None:
        """All ``prompts``, ``at_once`` of them at a time, the next one as soon as one ends."""
        places = asyncio.Semaphore(at_once)

        async def queued(number: int, ids: list[int]) -> dict[str, Any]:
            sampling = {"temperature": 0.0, "max_new_tokens": limits[number % len(limits)], **more}
            async with places:
                answer = await self.engine.async_generate(input_ids=ids, sampling_params=sampling)
            return {"output_ids": answer["output_ids"], **answer["meta_info"]}

        self.result[name] = await asyncio.gather(*(queued(*request) for request in enumerate(prompts)))

    async def all(self) -> None:
        """The phases, in an order in which the later ones find a history of the earlier ones."""
        texts = [prompt["text"] for prompt in json.loads((DEMO / "prompts.json").read_text())["prompts"][:20]]
        texts = [self.tokenizer(text)["input_ids"][: 8 + 3 * (i % 7)] for i, text in enumerate(texts)]
        await self.many("repetitive", [self.tokenizer(text)["input_ids"] for text in REPETITIVE], [48])
        await self.many("together", texts, [40])
        stops = sorted({answer["output_ids"][9] for answer in self.result["together"][:8]})
        await self.many("stopped", texts[:8], [40, 1, 15], stop_token_ids=stops)
        await self.many("out_of_cache", texts[:12], [160], 12)
        await self.many("after", texts[:1], [40])


def main(algorithm: str, place: str) -> None:
    from sglang.srt.entrypoints.engine import Engine

    drafting = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": 9, "max_total_tokens": 1600}
    given = {"GSD": drafting, "none": {"max_total_tokens": 8192}}
    engine = Engine(
        model_path=str(DEMO / "target"),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        grammar_backend="none",
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        disable_overlap_schedule=True,
        max_running_requests=20,
        schedule_conservativeness=0.01,
        log_level="info",
        **given[algorithm],
    )
    phases = Phases(engine)
    engine.loop.run_until_complete(phases.all())
    Path(place).write_text(json.dumps(phases.result), encoding="utf-8")
    engine.shutdown()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What the phases gave, by algorithm and name, and the log of the plug-in's engine."""
    folder, given = tmp_path_factory.mktemp("sglang"), {}
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "stubs"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "GSD_KERNELS_SGLANG_OPTIONS": '{"log_steps": 1}',
        "OMP_NUM_THREADS": "1",
    }
    for algorithm in ("none", "GSD"):
        result, log = folder / f"{algorithm}.json", folder / f"{algorithm}.log"
        with log.open("w") as out:
            command = [sys.executable, __file__, algorithm, str(result)]
            subprocess.run(command, env=environment, stdout=out, stderr=out, timeout=900)
        text = log.read_text(encoding="utf-8", errors="replace")
        assert result.exists(), f"the end of the log:\n{text[-6000:]}"
        given[algorithm] = json.loads(result.read_text(encoding="utf-8"))
    return given["GSD"], given["none"], text


@pytest.mark.parametrize("phase", ["repetitive", "together", "stopped", "out_of_cache", "after"])
def test_tokens_equal_those_without_speculation(phase, ran):
    speculated, plain, _ = ran
    for answer, expected in zip(speculated[phase], plain[phase], strict=True):
        assert answer["output_ids"] == expected["output_ids"]
    assert phase != "out_of_cache" or any(answer["num_retractions"] for answer in speculated[phase])


def test_drafts_and_merged_edges_are_accepted(ran):
    answers = ran[0]["repetitive"]
    lengths = [(len(answer["output_ids"]) - 1) / answer["spec_verify_ct"] for answer in answers]  # one is the prompt's
    assert sum(lengths) / len(lengths) > 1.3
    last = re.findall(r"GSD: steps=.*", ran[2])[-1]
    figures = dict(pair.split("=") for pair in last.removeprefix("GSD: ").split())
    assert int(figures["merged_edges"]) > 0 and int(figures["accepted_merged"]) > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
