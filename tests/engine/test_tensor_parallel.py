"""Tensor-parallel targets on gloo ranks: the single process's texts, divided caches, and errors instead of hangs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel as ranks
import torch
import torch.distributed as dist
from checkpoints import save_pair
from typer.testing import CliRunner

from gsd_kernels_cli.app import app
from gsd_kernels_hf.parallel import check_heads

pytestmark = pytest.mark.long

pytest.importorskip("accelerate", reason="transformers shards models with accelerate")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

SIZES = (2, 4)
LIMIT = 480.0  # seconds that ranks may take on a busy machine; a hang is longer
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([ranks.__name__])


@pytest.fixture(scope="module", autouse=True)
def one_process_has_imported_everything():
    """Its forks begin at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # by which the server finds this folder
        forkserver.ensure_running()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    ranks.save(path)
    return path


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, dict[str, Any]]:
    """Every case by one process."""
    models = {name: ranks.load(folder, name) for name in ("gqa", "mha")}
    drafts = ranks.load_drafts(folder, sharded=False)
    return {
        name: ranks.run_case(name, models[target], drafts[target, sharded])
        for name, (target, sharded, *_) in ranks.CASES.items()
    }


class Launched:
    """Processes that do the same, rank by rank, and what they print; killed at the end of a ``with`` block."""

    def __init__(self, folder: Path, size: int, function: Callable[..., None], *arguments: Any, **more: str) -> None:
        folder.mkdir()
        self.folder, self.end = folder, time.monotonic() + LIMIT
        self.processes = []
        for rank in range(size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), **more}
            files = [self.file("out", rank), self.file("errors", rank)]
            self.processes.append(FORKS.Process(target=ranks.begin, args=(place, files, function, *arguments)))
            self.processes[-1].start()

    def file(self, what: str, rank: int) -> Path:
        return self.folder / f"{what}-{rank}.txt"

    def wait(self, rank: int) -> tuple[int, str]:
        """Exit status and standard error of a rank, which must end by itself."""
        process = self.processes[rank]
        process.join(max(1.0, self.end - time.monotonic()))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGABRT)  # which prints where it is
            process.join()
            pytest.fail(f"rank {rank} hangs\n{self.file('errors', rank).read_text()[-3000:]}")
        return process.exitcode, self.file("errors", rank).read_text()

    def succeed(self) -> Launched:
        """Wait for all."""
        for rank in range(len(self.processes)):
            status, error = self.wait(rank)
            assert status == 0, error[-3000:]
        return self

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids="{} ranks".format)
def test_ranks_decode_like_one_process(size, folder, alone, tmp_path):
    """All that ranks can show without one being lost, in one launch: starting is what takes long."""
    meeting = tmp_path / "ranks"
    with Launched(meeting, size, ranks.rank, "texts", folder, meeting) as launched:
        launched.succeed()
    everyone = [json.loads((meeting / f"{rank}.json").read_text()) for rank in range(size)]
    for found in everyone:
        _same_texts(found["cases"], alone)
        _divided_caches(found["cases"], alone, size)
        assert found["drawn"] == everyone[0]["drawn"], "seed=None"
        _differences_at_the_start(found["refused"], size)
        _heads(found["refused"], size)
        message = found["refused"]["rank 1 drafts otherwise"]
        assert "decode different texts (rank 1 from rank 0) since one of the steps 5 … 8" in message
        assert "decode different texts (rank 1 from rank 0) since step 5;" in found["refused"]["every step"]


def _same_texts(cases: dict[str, dict[str, Any]], alone: dict[str, dict[str, Any]]) -> None:
    for name, case in cases.items():
        assert case["tokens"] == alone[name]["tokens"], name
        assert case["steps"] == alone[name]["steps"] or name == "auto", name


def _divided_caches(cases: dict[str, dict[str, Any]], alone: dict[str, dict[str, Any]], size: int) -> None:
    for name, case in cases.items():
        if name == "auto":  # one process has room for larger shapes
            continue
        _, sharded, _, arguments = ranks.CASES[name]
        whole = alone[name]["cache_bytes"]  # target and draft have the same shape, a draft that is whole half the bytes
        if sharded or "draft_sources" in arguments:
            assert case["cache_bytes"] * size == whole, name
        else:
            assert case["cache_bytes"] * size * 3 == whole * (2 + size), name


def _differences_at_the_start(said: dict[str, str], size: int) -> None:
    last = f"(rank {size - 1} from rank 0)"
    others = "(rank 1 from rank 0)" if size == 2 else "(ranks 1, 2, 3 from rank 0)"
    alike = "ValueError: tensor parallel: ranks must be started alike, and differ in "
    for name in ("prompt", "seed", "graph_config"):
        assert said[name] == f"{alike}{name} {last}"
    assert said["draft"] == said["no draft"] == said["two drafts"] == f"{alike}assistant_model {last}"
    assert f"max_new_tokens {last}" in said["max_new_tokens"]
    assert f"prompt {others}" in said["length"]


def _heads(said: dict[str, str], size: int) -> None:
    field = "num_key_value_heads=3" if size == 2 else "num_attention_heads=6"
    for name, model in (("heads", "model"), ("draft heads", "assistant_model")):
        assert said[name] == f"ValueError: {model}: {field} does not divide among {size} tensor-parallel ranks"
    assert "model: Qwen3_5ForCausalLM keeps a recurrent state" in said["hybrid"]
    assert "is sharded among ranks; not supported" in said["hybrid"]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "size"), [("killed", 4), ("stopped", 2), ("early", 2)])
def test_a_lost_rank_ends_the_others(job, size, folder, tmp_path):
    meeting = tmp_path / "ranks"
    with Launched(meeting, size, ranks.rank, job, folder, meeting) as launched:
        for rank in range(size):
            if rank == 1 and job != "early":
                continue
            status, error = launched.wait(rank)
            assert status == 1, error[-3000:]
            lost = f"RuntimeError: tensor parallel: rank {rank} of {size} lost the other ranks in step "
            parted = "RuntimeError: tensor parallel: the ranks decode different texts"
            assert lost in error or (job == "early" and parted in error), error[-3000:]


def test_heads_are_checked_from_a_configuration(folder):
    config = ranks.load(folder, "gqa").config
    check_heads("model", config, 4)
    with pytest.raises(ValueError, match="--model: num_key_value_heads=4 does not divide among 8"):
        check_heads("--model", config, 8)


@pytest.mark.slow
def test_command_line(tmp_path):
    """All processes run, the first one prints."""
    target, draft = save_pair(tmp_path, dtype=torch.float64)
    words = ["--model", target, "--draft", draft, "--max-new-tokens", "12", "--graph-config", "graph", "hello"]
    alone = CliRunner().invoke(app, ["generate", *words])

    def run(name: str, size: int, *words: str) -> Launched:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "GROUP_RANK": "0"}
        return Launched(tmp_path / name, size, ranks.command, *words, **meeting)

    with run("both", 2, "generate", "--tp", *words) as both:
        first, second = (both.succeed().file("out", rank).read_text() for rank in range(2))
    assert first == alone.stdout and len(first) > 5 and not second
    with run("check", 2, "check", "--tp", "--json", *words) as checked:
        assert json.loads(checked.succeed().file("out", 0).read_text())["summary"]["equal"] == 1
    for name, size, given, message in (
        ("stdin", 2, words[:-1], "processes cannot share stdin"),
        ("three", 3, words, "--model: num_attention_heads=8 does not divide"),
    ):
        with run(name, size, "generate", "--tp", *given) as refused:
            assert any(message in error for _, error in map(refused.wait, range(size)))
    assert "start it as torchrun" in CliRunner().invoke(app, ["generate", "--tp", *words]).stderr
