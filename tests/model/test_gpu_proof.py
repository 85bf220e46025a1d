"""A GPU proves the operator of rows before it serves there; shown on a CPU, whose own operator takes its place."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import types

import fake_cuda
import pytest
import torch
from block_code import rows as block_code
from models import tiny
from ops.contracts.backends import needs_cpu

from gsd_kernels.environment import forced
from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights, cuda
from gsd_kernels_hf.model import fused, gpu_proof, replay
from gsd_kernels_hf.model.fused import FusedRows
from gsd_kernels_hf.model.gpu_proof import Kind, Sizes, Subject, proof_of
from gsd_kernels_hf.model.runner import RowModel
from gsd_kernels_hf.store import Document

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KIND = Kind(torch.bfloat16, 64, "mma")
BEGUN = gpu_proof.BEGUN["why"]
SMALL = (
    Sizes(hidden=128, inner=192, vocabulary=96, layers=1, width=128, prefix=45, pads=(0, 7)),
    Sizes(hidden=136, inner=72, vocabulary=104, width=64, window=20, prefix=45, pads=(0, 7)),
)
own = FusedRows.rows


def figures(why=None, **operator):
    """A proof by which rows take half of the modules' time, or as much of it as is said: ``rows_64=1.5``."""
    times = {
        str(rows): {"operator": operator.get(f"rows_{rows}", 0.5), "modules": 1.0} for rows in gpu_proof.TIMED_ROWS
    }
    return {**gpu_proof.no_figures(""), "why": why, "milliseconds": times}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Small sizes, times that are none, a cache folder of its own, and no GPU's name."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(gpu_proof, "MODELS", SMALL)
    monkeypatch.setattr(gpu_proof, "REPLAYS", 4)
    monkeypatch.setattr(gpu_proof, "_known", {})
    monkeypatch.setattr(Subject, "milliseconds", lambda *_: (figures()["milliseconds"], 0))
    monkeypatch.setattr(gpu_proof, "document_of", lambda device: Document("gpu-proof", {"gpu": str(device)}))


def proved(kind=KIND, **options):
    return proof_of(kind, CPU, fused.ways(), **options)


def chosen():
    return gpu_proof.choice(CPU, torch.bfloat16, 64, fused.ways())


# What is found.


@needs_cpu
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float16, 128)], ids=str)
def test_a_right_operator_proves_itself(dtype, head_dim, monkeypatch):
    monkeypatch.setattr(gpu_proof, "MODELS", [Sizes(**{**vars(of), "width": 128}) for of in SMALL])
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    proof = proved(Kind(dtype, head_dim, "mma"))
    assert proof["why"] is None and proof["seconds"] > 0 and set(proof["apart"].values()) == {0}
    assert 0 < proof["errors"]["operator"] < 2 * proof["errors"]["modules"] + 1e-5
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == default


def another_bit(part):
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

    def __init__(self, count):
        self.count, self.calls = count, {}

    def __call__(self, of, inputs, keep):
        logits, (_, calls) = own(of, *inputs, keep=keep), self.calls.setdefault((id(inputs[1]), keep), (inputs[1], []))
        calls.append(logits)
        return calls[-2] if keep == self.count and len(calls) > 3 else logits


def broken(*_):
    raise RuntimeError("an illegal\n  instruction \x1b[31m" + 400 * "!")


@needs_cpu
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        *(
            (another_bit(lambda inputs, keep, count=count: keep == count and len(inputs[0]) == 1), "(alone)")
            for count in (17, 33, 128, 129)
        ),
        (another_bit(lambda inputs, keep: len(inputs[0]) == 2), "2 rows have other bits (beside another)"),
        *((Stale(count), "6 rows have other bits (replayed)") for count in gpu_proof.REPLAYED_ROWS),
        (
            another_bit(lambda inputs, keep: forced().get(cuda.OVERLAP) == "0"),
            "rows have other bits (replayed)",
        ),
        (lambda of, inputs, keep: own(of, *inputs, keep=keep) * 1.5, "its error is 5."),
        (lambda of, inputs, keep: own(of, *inputs, keep=keep) * float("nan"), "its error is inf, the modules' "),
        (broken, "RuntimeError: an illegal instruction ?[31m!!!"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_keeps_the_modules(rows, says, monkeypatch):
    monkeypatch.setattr(FusedRows, "rows", lambda self, *inputs, keep: rows(self, inputs, keep))
    monkeypatch.setattr(cuda, "WAYS", {"mma": {}})
    reason = chosen().why
    assert reason.startswith("one operator did not prove itself on this GPU: ") and says in reason
    assert reason.endswith("; again by: gsd-kernels doctor --prove") and reason.isprintable() and len(reason) < 450
    gpu_proof._known.clear()
    assert chosen().why == reason, "as it was kept"


@needs_cpu
def test_what_is_timed_has_its_bits(monkeypatch):
    monkeypatch.undo()
    of = Subject(gpu_proof.random_model(SMALL[0], torch.float32, 64, CPU), fused.ways())
    calls = itertools.count()
    monkeypatch.setattr(
        FusedRows, "rows", lambda self, *inputs, keep: own(self, *inputs, keep=keep) + (next(calls) > 5)
    )
    found, wrong = of.milliseconds(gpu_proof.Case(20), (1, 3))
    assert list(found) == ["1", "3"] and all(min(ms["operator"], ms["modules"]) > 0 for ms in found.values())
    assert wrong == 1, "those that were right when they were called"


# What is decided.


@pytest.mark.parametrize(
    ("proofs", "group", "way", "prompt", "why"),
    [
        ({"wgmma": {}, "mma": {}}, None, "wgmma", 256, None),
        ({"wgmma": {"rows_128": 0.4}, "mma": {}}, None, "wgmma", 256, None),
        ({"wgmma": {"rows_128": 0.6}, "mma": {"rows_256": 1.0}}, "0", "mma", 128, None),
        ({"wgmma": {"rows_64": 0.6}, "mma": {}}, None, "mma", 256, None),
        ({"wgmma": {"rows_64": 0.6}, "mma": {}}, "1", "wgmma", 256, None),
        ({"wgmma": {"why": "wrong"}, "mma": {}}, "1", "mma", 256, None),
        ({"wgmma": {"rows_1": 1.2, "rows_16": 1.2, "rows_64": 1.2}, "mma": {"why": "wrong"}}, None, None, 256, "1.20"),
        ({"wgmma": {"rows_256": 3.0}, "mma": {"why": "wrong"}}, None, "wgmma", 128, None),
        ({"wgmma": {"why": "wrong"}, "mma": {"why": "refused"}, cuda.IN_TURN: {}}, None, cuda.IN_TURN, 256, None),
        ({"wgmma": {"why": "1"}, "mma": {"why": "2"}, cuda.IN_TURN: {"why": "3"}}, None, None, 256, ": 2; again by"),
    ],
)
def test_the_fastest_way_that_is_right_serves(proofs, group, way, prompt, why, monkeypatch):
    if group is not None:
        monkeypatch.setenv(cuda.GROUP, group)
    asked = []
    monkeypatch.setattr(gpu_proof, "prove", lambda kind, *_: asked.append(kind.way) or figures(**proofs[kind.way]))
    found = chosen()
    assert found[1:] == (way, prompt) and (found.why is None if why is None else why in found.why)
    assert asked == [name for name in proofs if name != "wgmma" or group != "0"], "in turn only where mma fails"


@pytest.mark.parametrize(
    ("capability", "archs", "names"),
    [((9, 0), "9.0a", ["wgmma", "mma"]), ((9, 0), "9.0", ["mma"]), ((8, 0), "9.0a", ["mma"])],
)
def test_groups_of_warps_are_proved_where_they_are(capability, archs, names, monkeypatch):
    """On GPUs that have them, by a library that has their code; each way sets what is set otherwise."""
    monkeypatch.setattr(cuda, "architectures", lambda: ("8.0", archs))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cuda.ways(GPU) == [*names, cuda.IN_TURN]
    assert [cuda.settings(way, CPU) for way in cuda.WAYS] == [{cuda.GROUP: "1"}, {}, {cuda.OVERLAP: "0"}]
    monkeypatch.setenv(cuda.GROUP, "1")
    assert cuda.ways(GPU) == [*names, cuda.IN_TURN]
    assert [cuda.settings(way, CPU) for way in ("wgmma", "mma")] == [{}, {cuda.GROUP: "0"}]


@pytest.mark.parametrize(("megabytes", "ahead"), [(32, {cuda.AHEAD: "8"}), (128, {})])
def test_weights_ahead_take_a_quarter_of_the_cache_at_most(megabytes, ahead, monkeypatch):
    gpu = types.SimpleNamespace(L2_cache_size=megabytes << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert cuda.settings(None, GPU) == ahead
    monkeypatch.setenv(cuda.AHEAD, "24")
    assert cuda.settings(None, GPU) == {}


@pytest.mark.parametrize("setting", ["1", "cuda"])
def test_a_model_goes_the_way_of_its_kind(setting, monkeypatch):
    model, asked = tiny(dtype=torch.float16, head_dim=64), []
    monkeypatch.setattr(replay, "is_gpu", lambda device: True)
    monkeypatch.setattr(fused, "unavailable_reason", lambda *_: None)
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", setting)
    monkeypatch.setattr(fused.proof, "why_not_proved", lambda *_, **__: None)  # which would run the kernels
    for proof, why in ((figures("planted"), "planted"), (figures(rows_256=2.0), None)):
        monkeypatch.setattr(gpu_proof, "proof_of", lambda kind, *_, proof=proof: asked.append(kind) or proof)
        rows = fused.rows_of(model, 8, torch.zeros(1, dtype=torch.int32), "auto")
        assert isinstance(rows, FusedRows) == (why is None or setting == "cuda")
        assert why is None or setting == "cuda" or (type(rows) is RowModel and why in rows.why_modules)
    assert (rows.settings, rows.prompt_rows) == (({}, 256) if setting == "cuda" else ({cuda.GROUP: "1"}, 128))
    kinds = [Kind(torch.float16, 64, way) for way in cuda.WAYS]
    assert set(asked) == (set() if setting == "cuda" else set(kinds)), "on request, unproved"


# What is kept.


def given(monkeypatch, proof):
    """Counts proofs that are made."""
    made = []
    monkeypatch.setattr(gpu_proof, "prove", lambda kind, *_: made.append(kind) or proof)
    return made


def test_it_is_made_once_a_machine_a_kind_and_what_is_switched(monkeypatch):
    made = given(monkeypatch, figures())
    kinds = KIND, KIND, Kind(torch.float16, 64, "mma"), Kind(torch.bfloat16, 64, "wgmma")
    for kind in kinds:
        assert proved(kind) == figures()
    for variable in (cuda.OVERLAP, cuda.AHEAD):
        monkeypatch.setenv(variable, "0")
        assert proved() == figures()
    monkeypatch.setenv(cuda.GROUP, "1")  # which the way says
    assert proved() == figures() and made == [*kinds[1:], KIND, KIND]
    gpu_proof._known.clear()
    assert proved() == figures() and len(made) == 5, "another process reads it"
    assert proved(again=True) == figures() and len(made) == 6


def test_a_proof_is_made_under_its_own_switches_and_a_report_is_of_every_kind(monkeypatch):
    taken = []

    def found(kind, *_):
        taken.append((kind.way, forced()))
        if kind.head_dim == 128:
            raise torch.OutOfMemoryError("full")
        return figures()

    monkeypatch.setattr(gpu_proof, "figures", found)
    assert gpu_proof.report(CPU, fused.ways(), again=False) == {} and not taken
    proofs = gpu_proof.report(CPU, fused.ways(), again=True)
    assert len(proofs) == len(taken) == 12 and all(settings == cuda.WAYS[way] for way, settings in taken)
    assert {proof["why"] for proof in proofs.values()} == {None, FULL} and not forced()
    assert set(gpu_proof.report(CPU, fused.ways(), again=False)) == {n for n, p in proofs.items() if p["why"] is None}


FULL = "there is no memory to prove one operator on this GPU (1 GB)"
ENDS = {
    # what ends it: the error, whether the GPU is lost, what comes out, what this process and the next one find
    "its memory": (torch.OutOfMemoryError("full"), None, None, FULL, None),
    "a library": (
        TypeError("another library"),
        None,
        None,
        "one operator could not be proved on this GPU: TypeError: another library",
        None,
    ),
    "the operator": (RuntimeError("bad"), None, None, "RuntimeError: bad", "RuntimeError: bad"),
    "the user": (KeyboardInterrupt(), None, KeyboardInterrupt, None, None),
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
        patched.setattr(gpu_proof, "figures", ends)
        patched.setattr(replay, "lost", lambda device: lost)
        patched.setattr(cuda, "WAYS", {"mma": {}})
        if error is None:
            process = multiprocessing.get_context("fork").Process(target=proved)
            process.start()
            process.join(60)
            assert process.exitcode == 3
        elif raised is not None:
            with pytest.raises(raised):
                proved()
        else:
            for measured in (True, False):
                patched.setattr(cuda, "is_measured", lambda device, found=measured: found)
                reason = chosen().why
                assert (reason is None) if measured and kept is None else here in reason
    made = given(monkeypatch, figures())
    assert proved()["why"] == here and len(made) == (here is None), "a session's begin does not try again"
    gpu_proof._known.clear()
    assert proved()["why"] == kept and len(made) == (kept is None), "another process"
    assert proved(again=True) == figures()


def asks(queue, folder):
    def prove(*_):
        with (folder / "made").open("a") as file:
            file.write(".")
        __import__("time").sleep(0.3)
        return figures()

    gpu_proof.prove = prove
    queue.put(proved())


def test_processes_that_ask_at_once_wait_for_one(tmp_path):
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    processes = [fork.Process(target=asks, args=(queue, tmp_path)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert found == 4 * [figures()] and (tmp_path / "made").read_text() == "."


def test_a_proof_is_of_a_gpu_a_driver_and_a_build(monkeypatch):
    monkeypatch.undo()
    properties = type("Properties", (), {"name": "A", "major": 8, "minor": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(gpu_proof, "driver", lambda: "driver 1")
    paths = {gpu_proof.document_of(CPU).path}
    for name, value in (("driver", lambda: "driver 2"), ("build", lambda: "another")):
        monkeypatch.setattr(gpu_proof, name, value)
        paths.add(gpu_proof.document_of(CPU).path)
    monkeypatch.setattr(properties, "name", "B")
    paths.add(gpu_proof.document_of(CPU).path)
    assert len(paths) == 4


# What it launches.


@pytest.mark.slow
@pytest.mark.skipif(block_code.MISSING is not None, reason=str(block_code.MISSING))
def test_what_is_replayed_begins_early_and_asks_for_weights(monkeypatch, tmp_path_factory):
    """Of forwards of up to 32 rows, which plain decoding and small graphs are."""
    captured = []
    block_code.take_for_gpus(monkeypatch, tmp_path_factory)
    fakes = fake_cuda.install(monkeypatch)

    def run(*arguments):
        if fakes.capturing:
            captured.append(arguments[:-1])
        return cuda.OPS["decoder_rows"].implementations["cpu"](*arguments)

    monkeypatch.setattr(cuda, "run", run)
    of = Subject(gpu_proof.random_model(SMALL[0], torch.bfloat16, 64, CPU), fused.ways())
    assert not any(count for _, count in of.replays_apart(SMALL[0].cases[0], 2))
    plans = {
        call[1].shape[1]: (
            block_code.begins_early(tmp_path_factory, *call),
            bool(block_code.asked_ahead(tmp_path_factory, *call)),
        )
        for call in captured
    }
    assert plans == {1: (True, True), 16: (True, True), 32: (True, True), 64: (False, False)}


class Nothing:
    """Modules, or the operator's results, where only launches count; logits of other tokens are others."""

    def __init__(self, model, *_):
        self.width = model.config.vocab_size

    def prefill(self, *_):
        pass

    def rows(self, tokens, *_, keep):
        return logits_of(tokens, self.width)


def logits_of(tokens, width):
    return tokens[..., None].float() + torch.arange(width)


#: Of published models: hidden, inner, query heads, heads of keys, their size, norms of heads, window.
PUBLISHED = {
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, False, 0),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, False, 0),
    "Llama-3.1-70B": (8192, 28672, 64, 8, 128, False, 0),
    "Mistral-7B-v0.1": (4096, 14336, 32, 8, 128, False, 4096),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64, False, 0),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 128, False, 0),
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
@pytest.mark.parametrize("group", ["0", "1"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_covers_the_code_that_published_models_launch(head_dim, group, monkeypatch, tmp_path_factory):
    """Every kernel, end and split of products, and of attention, for the head size and the way that is proved."""
    monkeypatch.undo()
    monkeypatch.setenv(cuda.GROUP, group)
    block_code.take_for_gpus(monkeypatch, tmp_path_factory)
    fake_cuda.install(monkeypatch)
    calls = {}

    def run(weights, ids, *rest):
        keep, key = rest[-3], (id(weights), *ids.shape, rest[-3], rest[-5][0].shape[2])
        calls.setdefault(key, (weights, ids, *rest[:-1]))
        width = weights.head.shape[0]
        logits = logits_of(ids[:, ids.shape[1] - keep :], width)
        return logits, logits[..., :1].expand(-1, -1, weights.final_norm.shape[0]), torch.zeros(0, *ids.shape, 1)

    monkeypatch.setattr(cuda, "run", run)
    monkeypatch.setattr(gpu_proof, "REPLAYS", 2)
    ways = {"operator": FusedRows, "modules": Nothing}
    way = "wgmma" if group == "1" else "mma"
    gpu_proof.figures(Kind(torch.bfloat16, head_dim, way), CPU, ways, "auto")
    proved = set().union(*(block_code.kinds(tmp_path_factory, *call) for call in calls.values()))
    counts, capacities = (1, 16, 17, 32, 33, 64, 65, 128, 129, 256), (1000, 4000)
    left = {}
    for name, rows, capacity in itertools.product(PUBLISHED, counts, capacities):
        if PUBLISHED[name][4] == head_dim:
            for kind in launched_by(tmp_path_factory, PUBLISHED[name], rows, capacity) - proved:
                left.setdefault(kind, (name, rows, capacity))
    assert not left
