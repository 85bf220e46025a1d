"""Targets spread over devices and over ranks: the single process's texts, divided caches, errors instead of hangs.

Ranks are forks of a process that has imported this file. Run as a program, it decodes with a target whose second half
lies on a pretended device (tensors that say they lie elsewhere and refuse to mix), and prints what was seen as JSON.
"""

from __future__ import annotations

import copy
import datetime
import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import tiny_configs
import torch
import torch.distributed as dist
import transformers
from checkpoints import save_pair
from models import noised, prompts, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import gsd_kernels
from gsd_kernels import GraphConfig
from gsd_kernels_cli.app import app, main
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.model import proof

pytestmark = pytest.mark.long

pytest.importorskip("accelerate", reason="transformers shards models with accelerate")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

LIMIT = 480.0  # seconds that ranks may take on a busy machine; a hang is longer
START_TIMEOUT = 100.0  # seconds; machines are busy
TIMEOUT = 5.0  # seconds of a process group in which a rank will fail
PROMPT, NEW_TOKENS, CASE_TOKENS = 9, 16, 11
STEP = 5  # at which something goes wrong, beyond those of a case
SIZE = 2  # ranks
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 7}
TREE = {"graph_config": GraphConfig.preset("tree", depth=3, max_rows=16)}
CHAIN = {"graph_config": GraphConfig.preset("chain", depth=3)}
GRAPH = {
    "graph_config": GraphConfig(
        depth=4, width=3, branch=3, max_rows=16, merge_context=0, history_depth=2, history_width=2
    )
}
CASES: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "tree": (True, 3, {**SAMPLED, **TREE}),
    "auto": (False, 1, GREEDY),
    "processors": (False, 3, {**SAMPLED, "repetition_penalty": 1.3, **GRAPH}),
    "history": (True, 1, {**GREEDY, "draft_sources": ("history",), **GRAPH}),
}
"""Whether the draft is sharded too, sequences, arguments of generate."""
ALIKE = "ValueError: tensor parallel: ranks must be started alike, and differ in {} (rank 1 from rank 0)"
PARTED = "tensor parallel: the ranks decode different texts (rank 1 from rank 0) since "
DIVIDES = "ValueError: {}: num_key_value_heads=3 does not divide among 2 tensor-parallel ranks"
SAID = {
    **{name: ALIKE.format(name) for name in ("prompt", "seed", "graph_config", "assistant_model")},
    "heads": DIVIDES.format("model"),
    "draft heads": DIVIDES.format("assistant_model"),
    "hybrid": "is sharded among ranks; not supported",
    "rows": PARTED + "one of the steps 5 … 8",
    "every step": PARTED + "step 5;",
}
"""What a call is refused with, by what is wrong."""


def save(folder: Path) -> None:
    """The checkpoints: targets and drafts that are their noised copies."""
    odd = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    for name, config in (("even", {"num_key_value_heads": 4}), ("odd", odd)):
        target = tiny(**config)
        target.save_pretrained(folder / name)
        noised(target, 0.03).save_pretrained(folder / f"{name}-draft")
    tiny_configs.build("Qwen3_5ForCausalLM", 4).save_pretrained(folder / "hybrid")


def load(folder: Path, name: str, *, sharded: bool = False) -> PreTrainedModel:
    options = {"tp_plan": "auto"} if sharded else {}
    return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, **options).eval()


def generate(target: PreTrainedModel, draft: PreTrainedModel, batch: int = 1, **arguments: Any) -> Any:
    inputs = arguments.pop("inputs", None) or prompts(batch, PROMPT)
    if "draft_sources" not in arguments:
        arguments["assistant_model"] = draft
    arguments = {"max_new_tokens": NEW_TOKENS, **arguments}
    return gsd_kernels.generate(target, **inputs, **arguments, return_dict_in_generate=True)


def texts(folder: Path, *, sharded: bool) -> dict[str, dict[str, Any]]:
    """All cases, by a process of several or alone."""
    target, found = load(folder, "even", sharded=sharded), {}
    drafts = {shared: load(folder, "even-draft", sharded=sharded and shared) for shared in (False, True)}
    for name, (shared, batch, arguments) in CASES.items():
        engines_of(target).clear()  # which ranks do not share, so that steps can be compared
        output = generate(target, drafts[shared], batch, max_new_tokens=CASE_TOKENS, **arguments)
        stats = output.stats
        found[name] = {"tokens": output.sequences.tolist(), "bytes": stats.cache_bytes, "steps": stats.steps}
    return found


class Ranks:
    """The jobs, and where this process stands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()

    def texts(self) -> dict[str, Any]:
        """All cases, and everything that ranks can be told apart by."""
        target, draft = load(self.folder, "even", sharded=True), load(self.folder, "even-draft")
        torch.manual_seed(self.rank)
        drawn = generate(target, draft, do_sample=True, **TREE).sequences.tolist()
        return {"cases": texts(self.folder, sharded=True), "drawn": drawn, "said": self.said(target, draft)}

    def said(self, target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, str | None]:
        """What calls that must fail on every rank say, by what is wrong."""
        last, swap = self.rank == 1, {"observer": self.at_step(swap_rows)}
        odd = load(self.folder, "odd", sharded=True)
        found = {
            "heads": refused(odd, draft),
            "draft heads": refused(target, odd),
            "hybrid": refused(load(self.folder, "hybrid", sharded=True), draft),
            "prompt": refused(target, draft, inputs=prompts(1, PROMPT, seed=int(last))),
            "seed": refused(target, draft, **{**SAMPLED, "seed": int(last)}),
            "assistant_model": refused(target, noised(draft, 1e-6) if last else draft),
            "graph_config": refused(target, draft, **(CHAIN if last else TREE)),
            "rows": refused(target, draft, **swap),
        }
        os.environ["GSD_KERNELS_DEBUG"] = "1"
        return {**found, "every step": refused(target, draft, observer=self.at_step(swap_rows))}

    def killed(self) -> None:
        """Rank 1 is killed in the middle."""
        dist.barrier()  # all ranks are there: none waits longer from here on
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT))
        target, draft = load(self.folder, "even", sharded=True), load(self.folder, "even-draft")
        generate(target, draft, observer=self.at_step(lambda record: os.kill(os.getpid(), signal.SIGKILL)), **CHAIN)

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


def refused(*models: PreTrainedModel, **arguments: Any) -> str | None:
    try:
        generate(*models, **TREE | arguments)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def rank(job: str, checkpoints: Path, folder: Path) -> None:
    """Do a job with the others that meet in ``folder``; what was found goes to ``folder/RANK.json``."""
    torch.set_num_threads(1)
    number, timeout = int(os.environ["RANK"]), datetime.timedelta(seconds=START_TIMEOUT)
    meeting = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=SIZE, timeout=timeout)
    (folder / f"{number}.json").write_text(json.dumps(getattr(Ranks(checkpoints), job)()))
    dist.destroy_process_group()


def command(*words: str) -> None:
    """The command line."""
    sys.argv[1:] = words
    main()


def begin(place: dict[str, str], files: list[Path], function: Callable[..., None], *arguments: Any) -> None:
    """Begin a process that was forked: variables, where it prints, then what it is for."""
    os.environ.update(place)
    for number, path in enumerate(files, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    faulthandler.enable()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    function(*arguments)
    sys.stdout.flush()


# The tests of ranks.


@pytest.fixture(scope="module", autouse=True)
def one_process_has_imported_everything():
    """Its forks begin at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # by which the server finds this folder
        forkserver.ensure_running()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    save(path)
    return path


class Launched:
    """Processes that do the same, rank by rank, and what they print; killed at the end of a ``with`` block."""

    def __init__(self, folder: Path, function: Callable[..., None], *arguments: Any, **more: str) -> None:
        folder.mkdir()
        self.folder, self.processes = folder, []
        for rank in range(SIZE):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), **more}
            files = [self.file("out", rank), self.file("errors", rank)]
            self.processes.append(FORKS.Process(target=begin, args=(place, files, function, *arguments)))
            self.processes[-1].start()

    def file(self, what: str, rank: int) -> Path:
        return self.folder / f"{what}-{rank}.txt"

    def wait(self, rank: int) -> tuple[int, str]:
        """Exit status and standard error of a rank, which must end by itself."""
        process = self.processes[rank]
        process.join(LIMIT)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGABRT)  # which prints where it is
            process.join()
            pytest.fail(f"rank {rank} hangs\n{self.file('errors', rank).read_text()[-3000:]}")
        return process.exitcode, self.file("errors", rank).read_text()

    def succeed(self) -> None:
        """Wait for all."""
        for rank in range(SIZE):
            status, error = self.wait(rank)
            assert status == 0, error[-3000:]

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()


@pytest.mark.slow
def test_ranks_decode_like_one_process(folder, tmp_path):
    """All that ranks can show without one being lost, in one launch: starting is what takes long."""
    meeting = tmp_path / "ranks"
    with Launched(meeting, rank, "texts", folder, meeting) as launched:
        alone = texts(folder, sharded=False)
        launched.succeed()
    everyone = [json.loads((meeting / f"{rank}.json").read_text()) for rank in range(SIZE)]
    assert everyone[0]["drawn"] == everyone[1]["drawn"], "seed=None"
    for found in everyone:
        for name, case in found["cases"].items():
            assert case["tokens"] == alone[name]["tokens"], name
            assert case["steps"] == alone[name]["steps"] or name == "auto", name
            assert case["bytes"] * SIZE == alone[name]["bytes"] or not CASES[name][0], name
        for name, words in SAID.items():
            assert words in (found["said"][name] or ""), (name, found["said"][name])


@pytest.mark.slow
def test_a_lost_rank_ends_the_other(folder, tmp_path):
    meeting = tmp_path / "ranks"
    with Launched(meeting, rank, "killed", folder, meeting) as launched:
        status, error = launched.wait(0)
    assert status == 1, error[-3000:]
    assert "RuntimeError: tensor parallel: rank 0 of 2 lost the other ranks in step " in error, error[-3000:]


@pytest.mark.slow
def test_command_line(tmp_path):
    """All processes run, the first one prints."""
    target, draft = save_pair(tmp_path, dtype=torch.float64)
    words = ["--model", target, "--draft", draft, "--max-new-tokens", "12", "--graph-config", "graph"]
    alone = CliRunner().invoke(app, ["generate", *words, "hello"])

    def run(name: str, *words: str) -> Launched:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "GROUP_RANK": "0"}
        return Launched(tmp_path / name, command, "generate", "--tp", *words, **meeting)

    with run("both", *words, "hello") as both, run("stdin", *words) as refused:
        both.succeed()
        assert any("processes cannot share stdin" in refused.wait(rank)[1] for rank in range(SIZE))
    first, second = (both.file("out", rank).read_text() for rank in range(SIZE))
    assert first == alone.stdout and len(first) > 5 and not second
    assert "start it as torchrun" in CliRunner().invoke(app, ["generate", "--tp", *words, "hello"]).stderr


# Devices.


SPREAD = GraphConfig(depth=3, width=2, branch=2, max_rows=7, max_path=5)
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


def spread(target, draft, **more):
    call = {**prompts(2, PROMPT), "max_new_tokens": 16, "do_sample": True, "seed": 3, "graph_config": SPREAD, **more}
    output = gsd_kernels.generate(target, assistant_model=draft, **call, return_dict_in_generate=True)
    assert len(output.stats.accepted) > 2  # several tokens were accepted in one step
    return output


@pytest.mark.slow
def test_two_devices_without_a_gpu():
    """The second device is a pretended one: its tensors are kept apart from the CPU's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen["same"], "another text than on one device"
    assert seen["cache_bytes"][0] == seen["cache_bytes"][1] and seen["steps"] < 16, "nothing was accepted"


@pytest.mark.parametrize("offloaded", [("model.layers.1",), ("model.embed_tokens", "model.layers.0")], ids=len)
def test_offloaded_to_disk(offloaded, tmp_path):
    whole = tiny(num_key_value_heads=4)
    whole.save_pretrained(tmp_path)
    offloaded_one = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float64,
        device_map={part: "disk" if part in offloaded else "cpu" for part in PARTS},
        offload_folder=tmp_path / "offload",
    ).eval()
    draft = noised(whole)
    expected, found = spread(whole, draft), spread(offloaded_one, draft)
    assert torch.equal(expected.sequences, found.sequences)
    assert expected.stats.cache_bytes == found.stats.cache_bytes


# A second device on a machine that has only a CPU: tensors that say they lie elsewhere and refuse to mix.


aten = torch.ops.aten
LAYERS_THERE = 2
SECOND = torch.device("privateuseone", 0)
COPIES = (aten._to_copy.default, aten.copy_.default)


class Elsewhere(Tensor):
    """A CPU tensor that says it lies on the second device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        outer = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=SECOND
        )
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("used outside SecondDevice")


class SecondDevice(TorchDispatchMode):
    """Runs what happens on the second device, and refuses what mixes the two."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [isinstance(t, Elsewhere) for t in tensors]
        asked = kwargs.get("device")
        to_second = torch.device(asked) == SECOND if asked is not None else any(there)
        if function not in COPIES and any(there):
            alone = [t for t, away in zip(tensors, there, strict=True) if not away and t.dim() > 0]
            assert not alone, f"{function}: tensors on two devices"
        if function is aten.copy_.default:
            to_second = there[0]
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map_only(Elsewhere, lambda t: t.inner, (args, kwargs))
        result = function(*args, **kwargs)
        if not to_second:
            return result
        known = {id(t.inner): t for t in tensors if isinstance(t, Elsewhere)}
        return tree_map_only(Tensor, lambda r: known[id(r)] if id(r) in known else Elsewhere(r), result)


def split(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose last layers lie on the second device, dispatched as ``device_map`` does."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = copy.deepcopy(model)
    layers = list(model.model.layers)
    here, there = layers[:-LAYERS_THERE], layers[-LAYERS_THERE:]
    for module in (module for layer in there for module in layer.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(Elsewhere(parameter.data), requires_grad=False))
    for part in (*here, model.model.norm):
        add_hook_to_module(part, AlignDevicesHook("cpu", skip_keys=["cache", "past_key_values"]))
    for part in there:
        add_hook_to_module(part, AlignDevicesHook(SECOND, skip_keys=["cache", "past_key_values"]))
    return model


def decode_on_two_devices() -> None:
    torch.set_num_threads(1)
    whole = tiny(num_key_value_heads=4, num_hidden_layers=4)
    draft = noised(whole)
    alone = spread(whole, draft, backend="reference")
    # A mode makes the model's code suspect; the proof's own tensors would have to be made on the second device.
    proof.why_not_proved = lambda *_, **__: None
    with SecondDevice(), torch.no_grad():
        both = spread(split(whole), draft, backend="reference")
    print(
        json.dumps(
            {
                "same": torch.equal(alone.sequences, both.sequences),
                "steps": both.stats.steps,
                "cache_bytes": [alone.stats.cache_bytes, both.stats.cache_bytes],
            }
        )
    )


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend()
    decode_on_two_devices()
