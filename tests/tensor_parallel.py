"""What one rank of the tensor-parallel tests does: a job of :class:`Ranks`, or the command line.

Ranks are forks of a process that has imported this file, and with it all that they need.
"""

from __future__ import annotations

import datetime
import faulthandler
import itertools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_configs
import torch
import torch.distributed as dist
import transformers
from models import noised, prompts, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteriaList

import gsd_kernels
from gsd_kernels import GraphConfig
from gsd_kernels_cli.app import main
from gsd_kernels_hf.engine.engine import engines_of

PROMPT, NEW_TOKENS = 9, 16
CASE_TOKENS = 11  # of a case; calls in which something goes wrong take more steps than that has
HYBRID = "hybrid"
START_TIMEOUT = 100.0  # seconds; machines are busy
TIMEOUT = 5.0  # seconds of a process group in which a rank will fail
STEP = 5  # at which something goes wrong

TARGETS: dict[str, dict[str, Any]] = {
    "gqa": {"num_key_value_heads": 4},
    "mha": {"num_key_value_heads": 8},
    "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "odd": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
}
CONFIGS = {
    "chain": GraphConfig.preset("chain", depth=3),  # a level more shows no more, and is six messages of a sharded draft
    "tree": GraphConfig.preset("tree", depth=3, max_rows=16),
    "graph": GraphConfig(depth=4, width=3, branch=3, max_rows=16, merge_context=0, history_depth=2, history_width=2),
}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 7}

#: name → (target, draft is sharded too, batch, arguments of generate)
CASES: dict[str, tuple[str, bool, int, dict[str, Any]]] = {
    f"{target}-{config}-{batch}": (target, batch == 3, batch, {"graph_config": CONFIGS[config], **decoding})
    for target, config, decoding, batch in (
        *(("gqa", "chain", GREEDY, 1), ("mha", "chain", SAMPLED, 3)),
        *(("gqa", "tree", SAMPLED, 1), ("mha", "tree", GREEDY, 3)),
        *(("gqa", "graph", GREEDY, 3), ("mha", "graph", SAMPLED, 1)),
    )
}
CASES |= {
    "auto": ("gqa", False, 1, GREEDY),
    "processors": ("gqa", False, 3, {**SAMPLED, "repetition_penalty": 1.3, "graph_config": CONFIGS["graph"]}),
    "timed": ("gqa", False, 1, {**GREEDY, "max_time": 600.0, "graph_config": CONFIGS["graph"]}),
    "history": ("mha", False, 1, {**GREEDY, "draft_sources": ("history",), "graph_config": CONFIGS["graph"]}),
}


def save(folder: Path) -> None:
    """The checkpoints of all cases: a target and a draft that is its noised copy."""
    for name, config in TARGETS.items():
        target = tiny(**config)
        target.save_pretrained(folder / name)
        noised(target, 0.03).save_pretrained(folder / f"{name}-draft")
    tiny_configs.build("Qwen3_5ForCausalLM", 4).save_pretrained(folder / HYBRID)


def load(folder: Path, name: str, *, sharded: bool = False, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    options = {"tp_plan": "auto"} if sharded else {}
    return AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype, **options).eval()


def load_drafts(folder: Path, *, sharded: bool) -> dict[tuple[str, bool], PreTrainedModel]:
    """The drafts of cases by target, and whether ranks share them. Whole ones are float32: one operator is quick."""
    return {
        (name, shared): load(folder, f"{name}-draft", sharded=sharded and shared, dtype=dtype)
        for name in ("gqa", "mha")
        for shared, dtype in ((True, torch.float64), (False, torch.float32))
    }


def generate(target: PreTrainedModel, draft: PreTrainedModel, batch: int = 1, **arguments: Any) -> Any:
    inputs = arguments.pop("inputs", None) or prompts(batch, PROMPT)
    if "draft_sources" not in arguments:
        arguments["assistant_model"] = draft
    arguments = {"max_new_tokens": NEW_TOKENS, **arguments}
    return gsd_kernels.generate(target, **inputs, **arguments, return_dict_in_generate=True)


def run_case(name: str, target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, Any]:
    _, _, batch, arguments = CASES[name]
    engines_of(target).clear()  # which ranks do not share, so that steps can be compared
    output = generate(target, draft, batch, max_new_tokens=CASE_TOKENS, **arguments)
    return {
        "tokens": output.sequences.tolist(),
        "cache_bytes": output.stats.cache_bytes,
        "steps": output.stats.steps,
        "accepted": output.stats.accepted,
    }


class Ranks:
    """The jobs, and where this process stands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank, self.size = folder, dist.get_rank(), dist.get_world_size()

    def texts(self) -> dict[str, Any]:
        """All cases, and everything that ranks can be told apart by."""
        models = {name: load(self.folder, name, sharded=True) for name in ("gqa", "mha")}
        drafts = load_drafts(self.folder, sharded=True)
        cases = {name: run_case(name, models[case[0]], drafts[case[:2]]) for name, case in CASES.items()}
        target, draft = models["gqa"], drafts["gqa", False]
        torch.manual_seed(self.rank)
        drawn = generate(target, draft, graph_config=CONFIGS["tree"], do_sample=True).sequences.tolist()
        return {"cases": cases, "drawn": drawn, "refused": self.refusals(target, draft)}

    def refusals(self, target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, str | None]:
        """Messages of calls that must fail on every rank, by what is wrong."""
        mine, last = self.rank, self.rank == self.size - 1
        fixed = {"graph_config": CONFIGS["tree"]}
        odd = load(self.folder, "odd", sharded=True), load(self.folder, "odd-draft")
        found = {
            "heads": refused(generate, *odd, **fixed),
            "draft heads": refused(generate, target, load(self.folder, "odd-draft", sharded=True), **fixed),
            "hybrid": refused(generate, load(self.folder, HYBRID, sharded=True), draft, **fixed),
            "prompt": refused(generate, target, draft, inputs=prompts(1, PROMPT, seed=int(last)), **fixed),
            "length": refused(generate, target, draft, inputs=prompts(1, PROMPT + mine), **fixed),
            "seed": refused(generate, target, draft, **{**SAMPLED, "seed": int(last)}, **fixed),
            "draft": refused(generate, target, noised(draft, 1e-6) if last else draft, **fixed),
            "two drafts": refused(generate, target, [draft, noised(draft, 1e-6)] if last else draft, **fixed),
            "no draft": refused(generate, target, None if last else draft, **fixed),
            "graph_config": refused(generate, target, draft, graph_config=CONFIGS["chain" if last else "tree"]),
            "max_new_tokens": refused(generate, target, draft, max_new_tokens=NEW_TOKENS + last, **fixed),
            "rank 1 drafts otherwise": refused(generate, target, draft, observer=self.at_step(swap_rows), **fixed),
        }
        os.environ["GSD_KERNELS_DEBUG"] = "1"
        found["every step"] = refused(generate, target, draft, observer=self.at_step(swap_rows), **fixed)
        return found

    def killed(self) -> None:
        """Rank 1 is killed in the middle."""
        self.interrupted(lambda record: os.kill(os.getpid(), signal.SIGKILL))

    def stopped(self) -> None:
        """Rank 1 hangs in the middle."""
        self.interrupted(lambda record: time.sleep(600))

    def interrupted(self, fault: Any) -> None:
        shorten_timeout()
        target, draft = load(self.folder, "mha", sharded=True), load(self.folder, "mha-draft")
        generate(target, draft, graph_config=CONFIGS["chain"], observer=self.at_step(fault))

    def early(self) -> None:
        """A stopping criterion ends rank 1 before the others."""
        shorten_timeout()
        target, draft = load(self.folder, "mha", sharded=True), load(self.folder, "mha-draft")
        limit = PROMPT + (STEP if self.rank == 1 else NEW_TOKENS)
        criteria = StoppingCriteriaList([lambda ids, scores: ids.shape[1] >= limit])
        generate(target, draft, graph_config=CONFIGS["chain"], stopping_criteria=criteria)

    def at_step(self, fault: Any) -> Any:
        """An observer that does ``fault`` on rank 1 in step :data:`STEP`."""
        steps = itertools.count(1)

        def observe(record: Any) -> None:
            if next(steps) == STEP and self.rank == 1:
                fault(record)

        return observe


def swap_rows(record: Any) -> None:
    """As if another graph had been drafted; the picked tokens may well be the same."""
    record.rows.token_ids[:, 1] += 1


def shorten_timeout() -> None:
    """To :data:`TIMEOUT`, now that all ranks are there."""
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT))


def refused(function: Any, *args: Any, **kwargs: Any) -> str | None:
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def rank(job: str, checkpoints: Path, folder: Path) -> None:
    """Do a job with the others that meet in ``folder``; what was found goes to ``folder/RANK.json``."""
    torch.set_num_threads(1)
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=START_TIMEOUT)
    meeting = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=size, timeout=timeout)
    (folder / f"{number}.json").write_text(json.dumps(getattr(Ranks(checkpoints), job)()))
    dist.destroy_process_group()


def command(*words: str) -> None:
    """The command line."""
    sys.argv[1:] = words
    main()


def begin(environment: dict[str, str], files: list[Path], function: Callable[..., None], *arguments: Any) -> None:
    """Begin a process that was forked: variables, where it prints, then what it is for."""
    os.environ.update(environment)
    for number, path in enumerate(files, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    faulthandler.enable()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    function(*arguments)
    sys.stdout.flush()
