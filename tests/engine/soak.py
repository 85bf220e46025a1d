"""Many short generations of mixed length and batch size by two threads on one patch: memory, and equal texts.

``python soak.py 1000`` prints JSON: resident memory after the first tenth and at the end, and how many texts differ
from those of an engine that was never used.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chats import GRAPH, SAMPLED, ask, expected, pair, words

import gsd_kernels as gsd

THREADS = 2
KINDS = 24  # of calls, over and over: their texts are known from fresh engines


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def calls() -> list[dict[str, Any]]:
    """Prompts of 1 … 300 tokens for 1 … 4 sequences, greedy or sampled."""
    rng, found = random.Random(0), []
    for i in range(KINDS):
        batch, length = 1 + i % 4, rng.choice((1, 2, 5, 9, 30, 120, 300))
        decoding = {} if i % 3 else {**SAMPLED, "seed": i}
        found.append({"ids": words(batch, length, seed=i % 7), "tokens": rng.randint(1, 12), **decoding})
    return found


def soak(generations: int) -> dict[str, Any]:
    """Generate, a half in each thread, and report."""
    torch.set_num_threads(1)
    target, draft = pair(dtype=torch.float64)
    kinds = calls()
    wanted = [expected(target, **call) for call in kinds]
    handle = gsd.patch(target, assistant_model=draft, graph_config=GRAPH)
    lock, done, memory, wrong = threading.Lock(), 0, [], 0

    def work(thread: int) -> None:
        nonlocal done, wrong
        rng = random.Random(thread)
        for _ in range(generations // THREADS):
            i = rng.randrange(KINDS)
            same = torch.equal(ask(target, **kinds[i]), wanted[i])
            with lock:
                done, wrong = done + 1, wrong + (not same)
                if done % max(1, generations // 10) == 0:
                    memory.append(round(resident(), 1))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = handle.engines.cache_bytes / 2**20
    gsd.unpatch(target)
    gc.collect()
    return {"generations": done, "wrong": wrong, "resident_mib": memory, "kept_mib": round(kept, 2)}


if __name__ == "__main__":
    print(json.dumps(soak(int(sys.argv[1]))))
