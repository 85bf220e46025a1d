"""Tensor-parallel targets on gloo ranks: the single process's texts, divided caches, and errors instead of hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel as ranks
import torch
import torch.distributed as dist
from checkpoints import save_pair
from forked import Fork, Forks
from typer.testing import CliRunner

from gsd_kernels_cli.app import app
from gsd_kernels_hf.parallel import check_heads

pytestmark = pytest.mark.long

pytest.importorskip("accelerate", reason="transformers shards models with accelerate")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

SIZES = (2, 4)
LIMIT = 480.0  # seconds that ranks may take on a busy machine; a hang is longer


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


@pytest.fixture(scope="module")
def forks():
    started = Forks()
    yield started
    started.close()


class Launched:
    """The processes of one job."""

    def __init__(self, forks: Forks, job: str, size: int, folder: Path) -> None:
        self.forks = forks
        self.job, self.size, self.folder = job, size, folder / f"{job}-{size}"
        self.folder.mkdir()
        for checkpoint in folder.iterdir():
            if checkpoint.name in {ranks.HYBRID, *(name + end for name in ranks.TARGETS for end in ("", "-draft"))}:
                (self.folder / checkpoint.name).symlink_to(checkpoint)
        self.begin = time.monotonic()
        self.processes = [self._start(rank) for rank in range(size)]

    def _start(self, rank: int) -> Fork:
        command, out = [ranks.__file__, self.job, str(self.folder)], Path(os.devnull)
        return self.forks.start(command, out, self._errors(rank), **place(rank, self.size), GSD_KERNELS_DEBUG="0")

    def _errors(self, rank: int) -> Path:
        return self.folder / f"errors-{rank}.txt"

    def wait(self, rank: int) -> tuple[int, str]:
        """Exit status and standard error of a rank, which must end by itself."""
        try:
            status = self.processes[rank].wait(max(1.0, LIMIT - (time.monotonic() - self.begin)))
        except TimeoutError:
            self.close(signal.SIGABRT)  # which prints where they are
            places = "\n".join(f"rank {r}: {self._errors(r).read_text()[-3000:]}" for r in range(self.size))
            pytest.fail(f"{self.job}: rank {rank} of {self.size} hangs\n{places}")
        return status, self._errors(rank).read_text()

    def results(self) -> list[dict[str, Any]]:
        """What every rank found."""
        for rank in range(self.size):
            status, error = self.wait(rank)
            assert status == 0, error[-3000:]
        return [json.loads((self.folder / f"{self.job}-{r}.json").read_text()) for r in range(self.size)]

    def close(self, by: signal.Signals = signal.SIGKILL) -> None:
        for process in self.processes:
            process.send_signal(by)
        for process in self.processes:
            process.wait()


def place(rank: int, size: int) -> dict[str, str]:
    """What tells a process which rank it is."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids="{} ranks".format)
def test_ranks_decode_like_one_process(size, forks, folder, alone):
    """All that ranks can show without one being lost, in one launch: starting is what takes long."""
    launched = Launched(forks, "texts", size, folder)
    try:
        everyone = launched.results()
    finally:
        launched.close()
    for found in everyone:
        _same_texts(found["cases"], alone, size)
        _divided_caches(found["cases"], alone, size)
        assert found["drawn"] == everyone[0]["drawn"], "seed=None"
        _differences_at_the_start(found["refused"], size)
        _heads(found["refused"], size)
        message = found["refused"]["rank 1 drafts otherwise"]
        assert "decode different texts (rank 1 from rank 0) since one of the steps 5 … 8" in message
        assert "decode different texts (rank 1 from rank 0) since step 5;" in found["refused"]["every step"]


def _same_texts(cases: dict[str, dict[str, Any]], alone: dict[str, dict[str, Any]], size: int) -> None:
    assert list(cases) == ranks.cases_of(size)
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
def test_a_lost_rank_ends_the_others(job, size, forks, folder):
    launched = Launched(forks, job, size, folder)
    try:
        for rank in range(size):
            if rank == 1 and job != "early":
                continue
            status, error = launched.wait(rank)
            assert status == 1, error[-3000:]
            lost = f"RuntimeError: tensor parallel: rank {rank} of {size} lost the other ranks in step "
            parted = "RuntimeError: tensor parallel: the ranks decode different texts"
            assert lost in error or (job == "early" and parted in error), error[-3000:]
    finally:
        launched.close()


def test_heads_are_checked_from_a_configuration(folder):
    config = ranks.load(folder, "gqa").config
    check_heads("model", config, 4)
    with pytest.raises(ValueError, match="--model: num_key_value_heads=4 does not divide among 8"):
        check_heads("--model", config, 8)


def alone_here(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The command line in this process, which has imported everything."""
    done = CliRunner().invoke(app, list(arguments))
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout_bytes, done.stderr_bytes)


def run(forks: Forks, folder: Path, *arguments: str, processes: int) -> subprocess.CompletedProcess[bytes]:
    """The command line by ranks that find each other as torchrun's do; what they print, one after the other."""
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
    command = ["-m", "gsd_kernels_hf", *arguments]
    places = [{**place(rank, processes), **meeting} for rank in range(processes)]
    done = finished(forks, folder, command, places)
    out, errors = (b"".join(getattr(process, name) for process in done) for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, max(abs(process.returncode) for process in done), out, errors)


def finished(
    forks: Forks, folder: Path, command: list[str], environments: list[dict[str, str]]
) -> list[subprocess.CompletedProcess[bytes]]:
    """The command in several processes at once."""
    files = [(folder / f"out-{number}.txt", folder / f"errors-{number}.txt") for number in range(len(environments))]
    started = [
        forks.start(command, *paths, **environment) for paths, environment in zip(files, environments, strict=True)
    ]
    try:
        statuses = [process.wait(LIMIT) for process in started]
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
    return [
        subprocess.CompletedProcess(command, status, out.read_bytes(), errors.read_bytes())
        for status, (out, errors) in zip(statuses, files, strict=True)
    ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_command_line(forks, tmp_path):
    """Both processes run, the first one prints."""
    target, draft = save_pair(tmp_path, dtype=torch.float64)
    command = ["--model", target, "--draft", draft, "--max-new-tokens", "12", "--graph-config", "graph", "hello"]
    alone = alone_here("generate", *command)
    both = run(forks, tmp_path, "generate", "--tp", *command, processes=2)
    assert both.returncode == 0, both.stderr.decode()[-3000:]
    assert both.stdout == alone.stdout
    assert len(both.stdout) > 5
    checked = run(forks, tmp_path, "check", "--tp", "--json", *command, processes=2)
    assert checked.returncode == 0, checked.stderr.decode()[-3000:]
    assert json.loads(checked.stdout)["summary"]["equal"] == 1
    unshared = run(forks, tmp_path, "generate", "--tp", *command[:-1], processes=2)
    assert b"processes cannot share stdin" in unshared.stderr
    assert b"start it as torchrun" in alone_here("generate", "--tp", *command).stderr
    refused = run(forks, tmp_path, "generate", "--tp", *command, processes=3)
    assert b"--model: num_attention_heads=8 does not divide" in refused.stderr
