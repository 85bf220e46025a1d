"""Peak memory of an 8k-token prompt: transformers' plain decoding beside graph-speculative decoding.

Every measurement is a process of its own, so that its peak is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

PROMPT, NEW_TOKENS = 8192, 32
CASES = {
    "loaded models": {},
    "transformers": {},
    "transformers, chunks of 512": {"prefill_chunk_size": 512},
    "gsd plain": {"graph": "plain"},
    "gsd plain, chunks of 512": {"graph": "plain", "prefill_chunk_size": 512},
    "gsd graph": {"graph": "graph"},
    "gsd graph, chunks of 512": {"graph": "graph", "prefill_chunk_size": 512},
}


def measure(name: str) -> dict[str, float | int | str]:
    """Run one case here; peak and growth of this process in MiB, and what the caches hold.

    Raises:
        ValueError: an unknown case.
    """
    if name not in CASES:
        raise ValueError(f"--case: {name!r} is none of {'; '.join(CASES)}")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import gsd_kernels

    def model(layers: int, hidden: int) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 256),
            max_position_embeddings=2 * PROMPT,
        )
        return LlamaForCausalLM(config).eval()

    torch.set_num_threads(2)
    target, draft = model(4, 512), model(2, 128)
    prompt = torch.randint(3, 4096, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    options = dict(CASES[name])
    graph = options.pop("graph", "none")
    shared = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result: dict[str, float | int | str] = {"case": name}
    if name == "loaded models":
        pass
    elif graph == "none":
        tokens = target.generate(prompt, **shared)
        result["tokens"] = hash(tuple(tokens[0].tolist()))
    else:
        assistant = {"assistant_model": draft, "graph_config": graph}
        out = gsd_kernels.generate(target, prompt, return_dict_in_generate=True, **assistant, **shared)
        result["tokens"] = hash(tuple(out.sequences[0].tolist()))
        result["cache_mib"] = round(out.stats.cache_bytes / 2**20, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**result, "peak_mib": round(peak, 1), "growth_mib": round(peak - before, 1)}


def run() -> dict[str, object]:
    """Every case in a process of its own.

    Raises:
        RuntimeError: a case failed; its output has the reason.
    """
    rows = []
    for name in CASES:
        command = [sys.executable, "-m", "gsd_kernels_hf", "--debug", "bench", "long-prompt-memory", "--case", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    texts = {row["tokens"] for row in rows if "tokens" in row}
    return {"prompt": PROMPT, "new_tokens": NEW_TOKENS, "equal_tokens": len(texts) == 1, "rows": rows}
