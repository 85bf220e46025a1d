"""Steps as CUDA graphs, one in flight while the host reads the last one: what can be shown without a GPU, and on one.

A CPU is taken for one (fake_cuda). A replay there is over at once, so whatever the host reads of a step after the next
one was queued is the next one's."""

from __future__ import annotations

import traceback
from concurrent.futures import ThreadPoolExecutor

import fake_cuda
import pytest
import torch
from chats import CAPTURED, GRAPHS, SAMPLED, drafting, in_turns, on_a_gpu, text
from models import CHARACTERS, noised, tiny, tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StoppingCriteria

from gsd_kernels import DraftSource, patch, unpatch
from gsd_kernels_hf.acceptance.criteria import CRITERIA
from gsd_kernels_hf.costs import machine
from gsd_kernels_hf.engine import capture, decoder, loop
from gsd_kernels_hf.engine.capture import WARM_STEPS
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.engine.flight import Launched
from gsd_kernels_hf.model import replay
from gsd_kernels_hf.policy.learning import LearningPolicy

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def pair():
    target = tiny()
    return target, noised(target)


EACH = [(name, more) for name in CAPTURED for more in ({}, SAMPLED)]
EACH += [("chain", {**SAMPLED, "criterion": criterion}) for criterion in CRITERIA if criterion != "exact"]


class Spoils(DraftSource):
    """Does something while a step is captured."""

    def __init__(self, cuda, spoil):
        self.cuda, self.spoil = cuda, spoil

    def propose(self, level):
        return None

    def observe(self, seen):
        if self.cuda.capturing:
            self.spoil(seen)


@pytest.mark.parametrize("name", ["graph", "chain", "plain"])
def test_a_shape_is_captured_once(pair, cuda, name):
    """However many steps are taken, each one queued before the host has heard of the one before."""
    for _ in range(2):
        out = text(pair, name, max_new_tokens=48, return_dict_in_generate=True)
    assert out.stats.steps > 20 and len(out.stats.shapes) == 1
    assert cuda.counts["captures"] == GRAPHS
    assert cuda.counts["replays"] % GRAPHS == 0 and cuda.counts["replays"] > 2 * GRAPHS * (out.stats.steps - 2)
    spent = out.stats.seconds
    assert spent["draft"] > 0 and spent["target"] > 0 and spent["draft"] + spent["target"] <= spent["total"]


def test_failing_to_capture_is_said_and_harmless(pair, cuda, caplog):
    expected = text(pair, "graph")
    spoils = Spoils(cuda, lambda seen: int(seen.accepted.num_accepted[0]))  # waits for the device
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        assert torch.equal(text(pair, "graph", draft_sources=("model", spoils)), expected)
    said = [r.message for r in caplog.records if "captured" in r.message]
    assert said == [
        "a step could not be captured, so steps run uncaptured: "
        "operation not permitted when stream is capturing: aten::_local_scalar_dense"
    ], "what came first, not what ending the capture says"
    assert cuda.counts["captures"] == 2 * GRAPHS, "it is not tried again"
    assert cuda.current_stream() is cuda._default, "later work is on the stream that it was on"


def test_a_mistake_in_a_step_is_no_matter_of_capturing(pair, cuda):
    with pytest.raises(KeyError, match="a name"):
        text(pair, "graph", draft_sources=("model", Spoils(cuda, lambda seen: {}["a name"])))


def test_a_gpu_that_failed_for_good_ends_the_call_with_the_first_error(pair, cuda, caplog):
    """Whatever is called after it fails too, and what a capture says then is not where it happened."""

    def fail(seen):
        cuda.lost = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError("gsd_kernels: CUDA error: an illegal\nmemory access was encountered")

    with pytest.raises(replay.DeviceLostError, match="unusable after an error: gsd_kernels: CUDA error: an") as f:
        text(pair, "graph", draft_sources=("model", Spoils(cuda, fail)))
    assert "a step could not be captured" not in caplog.text and str(f.value.__cause__).startswith("gsd_kernels: ")


class Longer(StoppingCriteria):
    """Stops all sequences early, for a reason that no device state knows."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full(input_ids.shape[:1], input_ids.shape[1] > 20)


PER_TOKEN = {
    "criterion": {"stopping_criteria": [Longer()]},
    "logits": {"output_logits": True, "return_dict_in_generate": True, "repetition_penalty": 1.3},
    "together": {"logits_processor": [lambda ids, scores: 1.6 * scores - 0.6 * scores.roll(1, 0)]},
}


def parts(out):
    """Every tensor of what ``generate`` returned."""
    return [out] if isinstance(out, torch.Tensor) else [out.sequences, *out.logits]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("logits", SAMPLED), ("criterion", SAMPLED), ("together", {})],
)
def test_what_the_host_accepts_is_committed_between_two_graphs(pair, name, sampling, request):
    options = {**PER_TOKEN[name], **sampling}
    expected = parts(text(pair, "graph", **options))
    cuda = request.getfixturevalue("cuda")
    got = parts(text(pair, "graph", **options))
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))
    assert cuda.counts["captures"] == GRAPHS
    assert cuda.counts["replays"] >= GRAPHS * WARM_STEPS
    assert cuda.counts["replays"] % GRAPHS == 0


# A lane: one stream to capture on, one lock round captures, and replays that wait for each other.


def test_measuring_spoils_no_capture_of_another_thread(cuda, monkeypatch):
    """Waiting for the whole device would: a first call measures its memory while another one's step is captured."""
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 12)

    def function():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(machine.measure_bandwidth, torch.device("cpu")).result(20)

    replay.lane_of(torch.device("cpu")).capture(function)
    assert cuda.counts["waits"] == 2 * 3, "of its own work it waits"
    with pytest.raises(RuntimeError, match="stream is capturing"):
        replay.lane_of(torch.device("cpu")).capture(lambda: replay.wait(torch.device("cpu")))


def test_replays_on_other_streams_wait_for_each_other(cuda):
    """They share the workspace of the stream that they were captured on."""
    lane, one, two = replay.lane_of(torch.device("cpu")), cuda.new_stream(), cuda.new_stream()
    graph, _ = lane.capture(lambda: torch.zeros(1))
    for stream in (one, one, two, one):
        with cuda.on(stream):
            graph()
    number = id(graph.graph)
    assert cuda.log == [
        ("replay", one, number),
        ("replay", one, number),
        ("wait", two, one),
        ("replay", two, number),
        ("wait", one, two),
        ("replay", one, number),
    ]


# The next step is queued before the host hears of the last one: the same texts and counts; on a CPU taken for a GPU.


LONG = {"max_new_tokens": 24}


@pytest.fixture
def flown(monkeypatch):
    """Whether each step that the host heard of had another one queued behind it, in order.

    Nobody is given the record of such a step, over which that other one may be writing.
    """
    found, hear, observed = [], Launched.hear, Launched.observed

    def held(launched, heard):
        seen = observed(launched, heard)
        assert (seen.verified is None) == (launched.sent is not None)
        return seen

    monkeypatch.setattr(Launched, "observed", held)
    monkeypatch.setattr(Launched, "hear", lambda launched: (found.append(launched.sent is not None), hear(launched))[1])
    return found


class Streamer:
    """Keeps what it is given."""

    def __init__(self, fails_at=None):
        self.given, self.fails_at = [], fails_at

    def put(self, value):
        self.given.append(value.tolist())
        if len(self.given) == self.fails_at:
            raise ConnectionError("the reader went away")

    def end(self):
        self.given.append("end")


def ended(pair, name, rows, **options):
    """A token in the middle of a text, which ends it there."""
    return int(text(pair, name, rows, **options)[0, 9 + 11])


CASES = {
    "plain, sampled": ("plain", 2, SAMPLED),
    "graph": ("graph", 1, {}),
    "layer skip, sampled": ("layer_skip", 1, SAMPLED),
    "chain, speculative": ("chain", 1, {**SAMPLED, "seed": 3, "criterion": "speculative"}),
}


@pytest.mark.parametrize("ends", [False, True], ids=["to its length", "by a token"])
@pytest.mark.parametrize("case", CASES)
def test_texts_streams_and_counts_are_the_same(pair, case, ends, flown, request):
    name, rows, options = CASES[case]
    options = {**options, **LONG, "return_dict_in_generate": True}
    if ends:
        options["eos_token_id"] = ended(pair, name, rows, **{**CASES[case][2], **LONG})
    monkeypatch = request.getfixturevalue("monkeypatch")
    cuda = fake_cuda.install(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "may_fly", lambda *_, **__: False)
        engines_of(pair[0]).clear()
        before = Streamer()
        expected = text(pair, name, rows, **options, streamer=before)
        assert not any(flown) and cuda.counts["replays"] > 0
    flown.clear()
    engines_of(pair[0]).clear()
    streamer = Streamer()
    got = text(pair, name, rows, **options, streamer=streamer)
    assert torch.equal(got.sequences, expected.sequences) and streamer.given == before.given
    assert sum(flown) >= len(flown) - 2 and len(flown) == got.stats.steps
    for count in ("steps", "plain_steps", "new_tokens", "sequence_steps", "accepted", "shapes", "drafted_nodes",
                  "merges", "accepted_merges", "draft_rows", "target_rows"):  # fmt: skip
        assert getattr(got.stats, count) == getattr(expected.stats, count), count


class NeverStops(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.zeros(len(input_ids), dtype=torch.bool)


STAY = {
    "a processor": {"repetition_penalty": 1.3},
    "a criterion": {"stopping_criteria": [NeverStops()]},
    "a clock": {"max_time": 1000.0},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "an observer": {"observer": lambda verified: None},
    "a string": {"stop_strings": list(CHARACTERS[3:29:4]), "tokenizer": tokenizer()},
}


@pytest.mark.parametrize("what", STAY)
def test_where_the_host_decides_it_hears_of_every_step_first(pair, flown, what, request):
    expected = text(pair, "chain", **STAY[what], **LONG)
    flown.clear()
    request.getfixturevalue("cuda")
    got = text(pair, "chain", **STAY[what], **LONG)
    assert flown and not any(flown)
    got, expected = (getattr(found, "sequences", found) for found in (got, expected))
    assert torch.equal(got, expected)


def test_an_error_is_the_step_s_and_what_is_queued_is_waited_for(pair, cuda, flown):
    expected = text(pair, "graph", **LONG)
    handle = patch(pair[0], assistant_model=pair[1])
    try:
        waits = cuda.counts["waits"]
        with pytest.raises(ConnectionError, match="the reader went away"):
            text(pair, "graph", **LONG, streamer=Streamer(fails_at=8))
        assert cuda.counts["waits"] > waits
    finally:
        unpatch(pair[0])
    del handle
    assert torch.equal(text(pair, "graph", **LONG), expected)


def test_nothing_is_picked_from_nan(pair, cuda, flown):
    """The step behind it reads some other token, and nobody hears of it."""
    whole = text(pair, "plain", **LONG)
    with torch.no_grad():
        pair[0].get_input_embeddings().weight[int(whole[0, 9 + 12])] = torch.nan
    given = Streamer()
    with pytest.raises(ValueError, match=r"NaN|not finite"):
        text(pair, "plain", 1, **LONG, streamer=given)
    assert len(given.given) > 5 and given.given[-1] != "end"


# The host reads a step in one tensor, once, when the next one is queued; shown on a CPU taken for a GPU.


class Reads:
    """Counts what brings values of the device to the host, where the CPU is taken for one."""

    def __init__(self, monkeypatch):
        self.on_host, self.count, self.places = [], 0, []
        cpu = torch.Tensor.cpu
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: self.note(tensor) or self.host(cpu(tensor).clone()))
        for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            own = getattr(torch.Tensor, name)
            monkeypatch.setattr(torch.Tensor, name, lambda tensor, own=own: self.note(tensor) or own(tensor))

    def host(self, tensor):
        self.on_host.append(tensor.untyped_storage())  # held, so that no other storage takes its place
        return tensor

    def note(self, tensor):
        storage = tensor.untyped_storage()._cdata
        if not any(found._cdata == storage for found in self.on_host):
            self.count += 1
            self.places.append("".join(traceback.format_stack(limit=6)[:-2]))


class Queued(TorchDispatchMode):
    """Names of operations, but for those of functions that go without."""

    def __init__(self):
        super().__init__()
        self.names, self.paused = set(), False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.paused:
            self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))

    def without(self, function):
        def uncounted(*args):
            self.paused = True
            function(*args)
            self.paused = False

        return uncounted


@pytest.mark.parametrize("name", ["plain", "fixed", "auto"])
def test_no_step_waits_for_the_host(name, monkeypatch):
    """None reads from the device, nothing is put together outside its graph, under a policy that learns too."""
    target, cuda = tiny(), fake_cuda.install(monkeypatch)
    pair = target, noised(target)
    in_turns(monkeypatch, drafting("cuda")[0])
    options = {"plain": {"graph_config": "plain"}, "fixed": {}, "auto": {"graph_config": "auto"}}[name]
    which, options = ("plain" if name == "plain" else "graph"), {**options, "max_new_tokens": 24}
    expected, learned, steps, behind = text(pair, which, **options), [], [], []
    observe = LearningPolicy.observe
    monkeypatch.setattr(
        LearningPolicy, "observe", lambda self, seen: learned.append(seen.tokens) or observe(self, seen)
    )
    own_decode, replayed, send = decoder.decode, fake_cuda.FakeGraph.replay, replay.send

    def decode(session, policy, ranks, out):
        with monkeypatch.context() as patched, Queued() as queued:
            reads, hear = Reads(patched), Launched.hear
            patched.setattr(fake_cuda.FakeGraph, "replay", queued.without(replayed))
            patched.setattr(replay, "send", lambda tensor: reads.host(send(tensor)))

            def counted(launched):
                if not steps:
                    queued.names.clear()  # of prompts
                steps.append(reads.count)
                behind.append(launched.sent is not None and cuda.counts["replays"] > GRAPHS * len(steps))
                return hear(launched)

            patched.setattr(Launched, "hear", counted)
            own_decode(session, policy, ranks, out)
            steps.append(reads.count)
            assert not queued.names & {"aten::cat", "aten::_to_copy"}, queued.names
            assert len(steps) > 5 and len(set(steps)) == 1, reads.places
            assert all(behind[:-1]), "another one is queued, but where the text is known to end"

    monkeypatch.setattr(decoder, "decode", decode)
    before = cuda.counts["captures"]
    cuda.counts["replays"] = 0
    assert torch.equal(text(pair, which, **options), expected) and cuda.counts["captures"] == before
    assert bool(learned) == (name == "auto") and all(learned[:-1])


# What only a GPU can say.


def gpu(test):
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
    return pytest.mark.gpu(missing(test))


@gpu
@pytest.mark.parametrize(("name", "more"), EACH, ids=str)
def test_captured_on_a_gpu(name, more, monkeypatch, caplog):
    pair, more = on_a_gpu(), {**more, "max_new_tokens": 64}
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        captured = text(pair, name, **more)
    assert all("is lossy" in message for message in caplog.messages)
    monkeypatch.setattr(capture, "can_capture", lambda session: False)
    assert torch.equal(text(pair, name, **more), captured)


@gpu
def test_captured_shapes_take_turns_in_one_pool(monkeypatch, caplog):
    """What one graph leaves in the pool's memory, and is read later, another one must not write over."""

    def texts():
        in_turns(monkeypatch, *drafting("cuda")[:3])
        return text(on_a_gpu(), "auto", max_new_tokens=96)

    with caplog.at_level("WARNING", logger="gsd_kernels"):
        captured = texts()
    assert not caplog.records
    monkeypatch.setattr(capture, "can_capture", lambda session: False)
    assert torch.equal(texts(), captured)


@gpu
def test_captured_steps_go_on_after_a_failed_capture(caplog):
    before, x = text(on_a_gpu(), "graph", max_new_tokens=96), torch.ones(3, device=GPU)
    for _ in range(2):
        with pytest.raises(replay.CaptureError, match="captur"):
            replay.lane_of(GPU).capture(lambda: x.sum().item())
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        assert torch.equal(text(on_a_gpu(), "graph", max_new_tokens=96), before)
    assert not caplog.records and float(x.sum()) == 3.0
