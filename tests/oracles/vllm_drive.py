"""Decode prompts in vLLM on the CPU, greedily, with each of some drafters: a process of its own, for ``test_vllm.py``.

``vllm_drive.py JOB RESULT`` takes and writes JSON. The job: ``target``, ``prompts``, ``new_tokens``, and ``drafters``
of ``method``, ``folder`` and ``tokens`` of a chain. The result, of each drafter and prompt: the text, and by how much
the request raised the counters of speculative decoding.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, and its counters up to date
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

COUNTERS = "vllm:spec_decode_num_"


def counters(engine: Any) -> dict[str, Any]:
    """Drafts so far, and tokens of them accepted, in all and by their place."""
    found = {m.name.removeprefix(COUNTERS): m for m in engine.get_metrics() if m.name.startswith(COUNTERS)}
    places = found["accepted_tokens_per_pos"].values
    return {"drafts": found["drafts"].value, "accepted": found["accepted_tokens"].value, "by_place": list(places)}


def decode(job: dict[str, Any], drafter: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=job["target"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=1,
        disable_log_stats=False,
        speculative_config={
            "method": drafter["method"],
            "model": drafter["folder"],
            "num_speculative_tokens": drafter["tokens"],
        },
    )
    how = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    answers, before = [], counters(engine)
    for prompt in job["prompts"]:
        (answer,) = engine.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)
        after = counters(engine)
        answers.append(
            {
                "tokens": list(answer.outputs[0].token_ids),
                "drafts": after["drafts"] - before["drafts"],
                "accepted": after["accepted"] - before["accepted"],
                "by_place": [a - b for a, b in zip(after["by_place"], before["by_place"], strict=True)],
            }
        )
        before = after
    del engine
    gc.collect()
    return answers


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([decode(given, drafter) for drafter in given["drafters"]]))
