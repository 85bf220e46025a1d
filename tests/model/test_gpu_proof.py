"""A GPU proves the operator of rows before it serves there; shown on a CPU, whose own operator takes its place."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
from block_code import rows as block_code
from models import tiny
from ops.contracts.backends import needs_cpu

from gsd_kernels.environment import forced
from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights, cuda
from gsd_kernels_hf.model import fused, proof, replay
from gsd_kernels_hf.model.proof import Kind, Sizes, proof_of
from gsd_kernels_hf.model.runner import FusedRows, RowModel

CPU = torch.device("cpu")
KIND = Kind(torch.bfloat16, 64, "mma")
BEGUN = proof.BEGUN["why"]
SMALL = (
    Sizes(hidden=128, inner=192, vocabulary=96, width=128, prompt=45),
    Sizes(hidden=136, inner=72, vocabulary=104, width=128, window=20, prompt=45),
)
own = FusedRows.rows


def figures(why: str | None = None, **operator: float) -> dict[str, Any]:
    """A proof by which rows take half of the modules' time, or as much of it as is said: ``rows_64=1.5``."""
    times = {str(n): {"operator": operator.get(f"rows_{n}", 0.5), "modules": 1.0} for n in proof.TIMED_ROWS}
    return proof.verdict(why, milliseconds=times)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Small sizes, times that are none, a cache folder of its own, and no GPU's name."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(proof, "MODELS", SMALL)
    monkeypatch.setattr(proof, "REPLAYS", 4)
    monkeypatch.setattr(proof, "seconds_of", lambda call, device: 5e-4 if call() is None else 1e-3)
    monkeypatch.setattr(proof, "_known", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(proof, "installed", dict)


def chosen() -> proof.Choice:
    return proof.choice(CPU, torch.bfloat16, 64)


# What is found.


@needs_cpu
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float16, 128)], ids=str)
def test_a_right_operator_proves_itself(dtype, head_dim):
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    found = proof_of(Kind(dtype, head_dim, "mma"), CPU)
    assert found["why"] is None and found["seconds"] > 0 and set(found["apart"].values()) == {0}
    assert 0 < found["errors"]["operator"] < 2 * found["errors"]["modules"] + 1e-5
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == default


Rows = Callable[[Any, Any, int], torch.Tensor]


def another_bit(part: Callable[[Any, int], bool]) -> Rows:
    """The last bit of a row, where a part of the rows is by itself."""

    def rows(of, inputs, keep):
        logits = own(of, *inputs, keep=keep)
        if part(inputs, keep):
            logits = logits.clone()
            logits.view(torch.int16)[0, -1, 3] ^= 1
        return logits

    return rows


class Stale:
    """A replay reads what the call before has left; the first two calls are those that say what is right."""

    def __init__(self, count: int) -> None:
        self.count, self.calls = count, {}

    def __call__(self, of, inputs, keep):
        logits, (_, calls) = own(of, *inputs, keep=keep), self.calls.setdefault((id(inputs[1]), keep), (inputs[1], []))
        calls.append(logits)
        return calls[-2] if keep == self.count and len(calls) > 3 else logits


def broken(*_):
    raise RuntimeError("an illegal\n  instruction" + 400 * "!")


WRONG: dict[str, tuple[Rows, str]] = {
    **{
        f"{count} rows by themselves": (
            another_bit(lambda inputs, keep, count=count: keep == count and len(inputs[0]) == 1),
            "(alone)",
        )
        for count in (len(proof.PATH), 33, 129)
    },
    "a batch": (another_bit(lambda inputs, keep: len(inputs[0]) == 2), "2 rows have other bits (beside another)"),
    **{f"{n} rows, stale": (Stale(n), "6 rows have other bits (replayed)") for n in (16, 128)},
    "launches in turn": (another_bit(lambda inputs, keep: forced().get(cuda.OVERLAP) == "0"), "bits (replayed)"),
    "an error": (lambda of, inputs, keep: own(of, *inputs, keep=keep) * 1.5, "its error is 5."),
    "NaN": (lambda of, inputs, keep: own(of, *inputs, keep=keep) * float("nan"), "its error is inf, the modules' "),
    "no operator": (broken, "RuntimeError: an illegal instruction!!!"),
}


@needs_cpu
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_keeps_the_modules(what, monkeypatch):
    rows, says = WRONG[what]
    monkeypatch.setattr(FusedRows, "rows", lambda self, *inputs, keep: rows(self, inputs, keep))
    monkeypatch.setattr(cuda, "WAYS", {"mma": {}})
    reason = chosen().why
    assert reason.startswith("one operator did not prove itself on this GPU: ") and says in reason
    assert reason.endswith("; again by: gsd-kernels doctor --prove") and len(reason) < 350
    proof._known.clear()
    assert chosen().why == reason, "as it was kept"


# What is decided.


@pytest.mark.parametrize(
    ("proofs", "group", "way", "prompt", "why"),
    [
        ({"wgmma": {}, "mma": {}}, None, "wgmma", 256, None),
        ({"wgmma": {"rows_128": 0.6}, "mma": {"rows_256": 1.0}}, "0", "mma", 128, None),
        ({"wgmma": {"rows_64": 0.6}, "mma": {}}, "1", "wgmma", 256, None),
        ({"wgmma": {"rows_1": 1.2, "rows_16": 1.2, "rows_64": 1.2}, "mma": {"why": "wrong"}}, None, None, 256, "1.20"),
        ({"wgmma": {"why": "wrong"}, "mma": {"why": "refused"}, cuda.IN_TURN: {}}, None, cuda.IN_TURN, 256, None),
        ({"wgmma": {"why": "1"}, "mma": {"why": "2"}, cuda.IN_TURN: {"why": "3"}}, None, None, 256, ": 2; again by"),
    ],
)
def test_the_fastest_way_that_is_right_serves(proofs, group, way, prompt, why, monkeypatch):
    if group is not None:
        monkeypatch.setenv(cuda.GROUP, group)
    asked = []
    monkeypatch.setattr(proof, "prove", lambda kind, _: asked.append(kind.way) or figures(**proofs[kind.way]))
    found = chosen()
    assert found[1:] == (way, prompt) and (found.why is None if why is None else why in found.why)
    assert asked == [name for name in proofs if name != "wgmma" or group != "0"], "in turn only where mma fails"


def test_a_model_goes_the_way_of_its_kind(monkeypatch):
    model, planted = tiny(dtype=torch.float16, head_dim=64), {"why": "planted"}
    monkeypatch.setattr(replay, "is_gpu", lambda device: True)
    monkeypatch.setattr(fused, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(fused.proof, "why_not_proved", lambda *_, **__: None)  # which would run the kernels
    monkeypatch.setattr(proof, "prove", lambda kind, _: figures(**planted))
    for setting, wrong, settings, prompt in (
        ("1", "planted", None, None),
        ("1", None, {cuda.GROUP: "1"}, 128),
        ("cuda", "planted", {}, 256),  # on request, unproved
    ):
        monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", setting)
        planted = {"why": wrong, "rows_256": 2.0}
        proof._known.clear()
        monkeypatch.setattr(proof, "installed", lambda of=wrong: {"of": of})
        rows = fused.rows_of(model, 8, torch.zeros(1, dtype=torch.int32), "auto")
        if settings is None:
            assert type(rows) is RowModel and wrong in rows.why_modules
        else:
            assert (rows.settings, rows.prompt_rows) == (settings, prompt)


# What is kept.


def test_it_is_made_once_a_kind_and_what_is_switched_and_a_report_is_of_every_kind(monkeypatch):
    taken = []

    def found(kind, _):
        taken.append((kind.way, forced()))
        if kind.head_dim == 128:
            raise torch.OutOfMemoryError("full")
        return figures()

    monkeypatch.setattr(proof, "figures", found)
    assert proof.report(CPU, again=False) == {} and not taken
    proofs = proof.report(CPU, again=True)
    assert len(proofs) == len(taken) == 12 and all(settings == cuda.WAYS[way] for way, settings in taken)
    assert {p["why"] for p in proofs.values()} == {None, f"{COULD_NOT}OutOfMemoryError: full"} and not forced()
    assert set(proof.report(CPU, again=False)) == {n for n, p in proofs.items() if p["why"] is None}
    proof._known.clear()
    assert proof_of(KIND, CPU)["why"] is None and len(taken) == 12, "another process reads it"
    for made, variable in enumerate((cuda.OVERLAP, cuda.GROUP), 13):
        monkeypatch.setenv(variable, "0")
        assert proof_of(KIND, CPU)["why"] is None and len(taken) == made


COULD_NOT = "one operator could not be proved on this GPU: "
ENDS: dict[str, tuple[Any, ...]] = {
    # what ends it: the error, whether the GPU is lost, what comes out, what this process and the next one find
    "its memory": (torch.OutOfMemoryError("full"), None, None, f"{COULD_NOT}OutOfMemoryError: full", None),
    "the operator": (RuntimeError("bad"), None, None, "RuntimeError: bad", "RuntimeError: bad"),
    "the GPU": (RuntimeError("bad"), "an illegal address", replay.DeviceLostError, BEGUN, BEGUN),
    "the process": (None, None, None, BEGUN, BEGUN),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_proof_is_known_to_the_process_and_kept_where_it_would_end_others(what, monkeypatch):
    error, lost, raised, here, kept = ENDS[what]

    def ends(*_):
        if error is None:
            os._exit(3)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(proof, "figures", ends)
        patched.setattr(replay, "lost", lambda device: lost)
        patched.setattr(cuda, "WAYS", {"mma": {}})
        if error is None:
            process = multiprocessing.get_context("fork").Process(target=proof_of, args=(KIND, CPU))
            process.start()
            process.join(60)
            assert process.exitcode == 3
        elif raised is not None:
            with pytest.raises(raised):
                proof_of(KIND, CPU)
        else:
            for measured in (True, False):  # GPUs on which the operator was measured go on where there is no proof
                patched.setattr(cuda, "is_measured", lambda device, found=measured: found)
                assert chosen().why is None if measured and kept is None else here in chosen().why
    made = []
    monkeypatch.setattr(proof, "prove", lambda *_: made.append(1) or figures())
    assert proof_of(KIND, CPU)["why"] == here and len(made) == (here is None), "a session's begin does not try again"
    proof._known.clear()
    assert proof_of(KIND, CPU)["why"] == kept and len(made) == (kept is None), "another process"
    assert proof_of(KIND, CPU, again=True) == figures()


# What it launches.


class Nothing(RowModel):
    """Modules where only launches count."""

    def prefill(self, *_):
        pass

    def rows(self, tokens, *_, keep):
        return logits_of(tokens, self.vocab_size)


def logits_of(tokens, width):
    """Logits of other tokens are others."""
    return tokens[..., None].float() + torch.arange(width)


#: Of published models: hidden, inner, query heads, heads of keys, their size, norms of heads, window.
PUBLISHED = {
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, False, 0),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, False, 0),
    "Mistral-7B-v0.1": (4096, 14336, 32, 8, 128, False, 4096),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64, False, 0),
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128, True, 0),
    "Qwen3-32B": (5120, 25600, 64, 8, 128, True, 0),
}


def launched_by(factory, sizes, rows, capacity):
    """The code that a forward of rows of a published model takes, of one layer; the weights are never read."""
    hidden, inner, heads, kv_heads, head_dim, norms, window = sizes
    q, kv = heads * head_dim, kv_heads * head_dim

    def made(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16)

    one = {"q_norm": made(head_dim), "k_norm": made(head_dim)} if norms else {}
    shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q), "gate": (inner, hidden)}
    shapes |= {"up": (inner, hidden), "down": (hidden, inner), "input_norm": (hidden,), "second_norm": (hidden,)}
    layer = LayerWeights(**{name: made(*shape) for name, shape in shapes.items()}, **one, window=window)
    table = made(32_000, hidden)
    weights = DecoderWeights(table, [layer], made(hidden), table, torch.ones(head_dim // 2), 1.0, heads, 1e-6)
    ids, zero = torch.zeros(1, rows, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    mask = torch.zeros(1, rows, (rows + 31) // 32, dtype=torch.int32)
    caches = [made(1, kv_heads, capacity, head_dim)]
    return block_code.kinds(factory, weights, ids, ids, ids, mask, ids, zero, zero, caches, caches, rows, ())


@pytest.mark.slow
@pytest.mark.skipif(block_code.MISSING is not None, reason=str(block_code.MISSING))
@pytest.mark.parametrize(("head_dim", "group"), [(64, "1"), pytest.param(128, "0", marks=pytest.mark.many)])
def test_it_covers_the_code_that_published_models_launch(head_dim, group, monkeypatch, tmp_path_factory):
    """Every kernel, end and split of products, and of attention, for the head size and the way that is proved."""
    monkeypatch.undo()
    monkeypatch.setenv(cuda.GROUP, group)
    block_code.take_for_gpus(monkeypatch, tmp_path_factory)
    fake_cuda.install(monkeypatch)
    calls = {}

    def run(_, weights, ids, *rest):
        keep, key = rest[-3], (id(weights), *ids.shape, rest[-3], rest[-5][0].shape[2])
        calls.setdefault(key, (weights, ids, *rest[:-1]))
        logits = logits_of(ids[:, ids.shape[1] - keep :], weights.head.shape[0])
        return logits, logits[..., :1].expand(-1, -1, weights.final_norm.shape[0]), torch.zeros(0, *ids.shape, 1)

    monkeypatch.setattr(cuda, "run", run)
    monkeypatch.setattr(proof, "REPLAYS", 2)
    monkeypatch.setattr(proof, "errors", lambda *_: dict.fromkeys(proof.WAYS, 0.0))  # of six rows
    monkeypatch.setitem(proof.WAYS, "modules", Nothing)
    proof.figures(Kind(torch.bfloat16, head_dim, "wgmma" if group == "1" else "mma"), CPU)
    proved = set().union(*(block_code.kinds(tmp_path_factory, *call) for call in calls.values()))
    counts, capacities = (1, 16, 17, 32, 33, 64, 65, 128, 129, 256), (1000, 4000)
    left = {}
    for name, rows, capacity in itertools.product(PUBLISHED, counts, capacities):
        if PUBLISHED[name][4] == head_dim:
            for kind in launched_by(tmp_path_factory, PUBLISHED[name], rows, capacity) - proved:
                left.setdefault(kind, (name, rows, capacity))
    assert not left
