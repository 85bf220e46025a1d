"""Steps as CUDA graphs, one in flight while the host reads the last one: what can be shown without a GPU, and on one.

A CPU is taken for one (fake_cuda). A replay there is over at once, so whatever the host reads of a step after the next
one was queued is the next one's."""

from __future__ import annotations

import traceback

import fake_cuda
import pytest
import torch
from chats import CAPTURED, GRAPHS, SAMPLED, drafting, in_turns, on_a_gpu, text
from models import noised, tiny

from gsd_kernels import DraftSource, patch
from gsd_kernels_hf.acceptance.criteria import CRITERIA
from gsd_kernels_hf.engine import capture, decoder
from gsd_kernels_hf.engine.capture import WARM_STEPS, Launched
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.model import replay

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def pair():
    target = tiny()
    return target, noised(target)


class Spoils(DraftSource):
    """Does something while a step is captured."""

    def __init__(self, cuda, spoil):
        self.cuda, self.spoil = cuda, spoil

    def propose(self, level):
        return None

    def observe(self, seen):
        if self.cuda.capturing:
            self.spoil(seen)


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


def test_replays_on_other_streams_wait_for_each_other(cuda):
    """They share the workspace of the stream that they were captured on."""
    lane, one, two = replay.lane_of(torch.device("cpu")), cuda.new_stream(), cuda.new_stream()
    graph = lane.capture(lambda: torch.zeros(1))[0]
    for stream in (one, one, two, one):
        with cuda.on(stream):
            graph()
    assert [what[:3] if what[0] == "wait" else what[:2] for what in cuda.log] == [
        *[("replay", one)] * 2,
        *[("wait", two, one), ("replay", two)],
        *[("wait", one, two), ("replay", one)],
    ]


# The next step is queued before the host hears of the last one: the same texts and counts; on a CPU taken for a GPU.


LONG = {"max_new_tokens": 24}


@pytest.fixture
def flown(monkeypatch):
    """Whether each step that the host heard of had another one queued behind it, in order."""
    found, hear = [], Launched.hear
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


CASES = {
    "plain, sampled": ("plain", 2, SAMPLED),
    "graph": ("graph", 1, {}),
    "chain, speculative": ("chain", 1, {**SAMPLED, "seed": 3, "criterion": "speculative"}),
}
COUNTS = (
    "steps plain_steps new_tokens sequence_steps accepted shapes drafted_nodes merges accepted_merges draft_rows "
    "target_rows"
).split()


@pytest.mark.parametrize("ends", [False, True], ids=["to its length", "by a token"])
@pytest.mark.parametrize("case", CASES)
def test_texts_streams_and_counts_are_the_same(pair, case, ends, flown, cuda, monkeypatch):
    name, rows, options = CASES[case]
    options = {**options, **LONG, "return_dict_in_generate": True}
    if ends:  # by a token in the middle
        options["eos_token_id"] = int(text(pair, name, rows, **options).sequences[0, 9 + 11])
    found = []
    for flies in (False, True):
        engines_of(pair[0]).clear()
        flown.clear()
        streamer = Streamer()
        with monkeypatch.context() as patched:
            if not flies:
                patched.setattr(decoder, "may_fly", lambda *_, **__: False)
            found.append((text(pair, name, rows, **options, streamer=streamer), streamer))
        assert any(flown) == flies and cuda.counts["replays"] > 0
    (expected, before), (got, streamer) = found
    assert torch.equal(got.sequences, expected.sequences) and streamer.given == before.given
    assert sum(flown) >= len(flown) - 2 and len(flown) == got.stats.steps
    assert [getattr(got.stats, name) for name in COUNTS] == [getattr(expected.stats, name) for name in COUNTS]


def never(input_ids, scores, **_):
    return torch.zeros(len(input_ids), dtype=torch.bool)


STAY = {
    "a processor": {"repetition_penalty": 1.3, **SAMPLED},
    "a criterion": {"stopping_criteria": [never]},
    "a clock": {"max_time": 1000.0},
    "an observer": {"observer": lambda verified: None},
}


@pytest.mark.parametrize("what", STAY)
def test_where_the_host_decides_it_hears_of_every_step_first(pair, flown, what, request):
    """What it accepts is committed between two graphs."""
    expected = text(pair, "graph", **STAY[what], **LONG)
    flown.clear()
    cuda = request.getfixturevalue("cuda")
    got = text(pair, "graph", **STAY[what], **LONG)
    assert flown and not any(flown)
    assert cuda.counts["captures"] == GRAPHS and cuda.counts["replays"] >= GRAPHS * WARM_STEPS
    assert torch.equal(got, expected)


def test_an_error_is_the_step_s_and_what_is_queued_is_waited_for(pair, cuda, flown):
    expected = text(pair, "graph", **LONG)
    with patch(pair[0], assistant_model=pair[1]):
        waits = cuda.counts["waits"]
        with pytest.raises(ConnectionError, match="the reader went away"):
            text(pair, "graph", **LONG, streamer=Streamer(fails_at=8))
        assert cuda.counts["waits"] > waits
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


@pytest.mark.parametrize("name", ["plain", "auto"])
def test_no_step_waits_for_the_host(name, cuda, monkeypatch):
    """None reads from the device, under a policy that learns too."""
    target = tiny()
    pair = target, noised(target)
    in_turns(monkeypatch, drafting("cuda")[0])
    which, options = ("plain", {}) if name == "plain" else ("graph", {"graph_config": "auto"})
    expected, steps, behind = text(pair, which, **options, **LONG), [], []
    own_decode, send = decoder.decode, replay.send

    def decode(session, policy, ranks, out):
        with monkeypatch.context() as patched:
            reads, hear = Reads(patched), Launched.hear
            patched.setattr(replay, "send", lambda tensor: reads.host(send(tensor)))

            def counted(launched):
                steps.append(reads.count)
                behind.append(launched.sent is not None and cuda.counts["replays"] > GRAPHS * len(steps))
                return hear(launched)

            patched.setattr(Launched, "hear", counted)
            own_decode(session, policy, ranks, out)
            assert len(steps) > 5 and len({*steps, reads.count}) == 1, reads.places
            assert all(behind[:-1]), "another one is queued, but where the text is known to end"

    monkeypatch.setattr(decoder, "decode", decode)
    before = cuda.counts["captures"]
    cuda.counts["replays"] = 0
    assert torch.equal(text(pair, which, **options, **LONG), expected) and cuda.counts["captures"] == before


# What only a GPU can say.


OF_A_GPU = [(name, more) for name in CAPTURED for more in ({}, SAMPLED)]
OF_A_GPU += [("chain", {**SAMPLED, "criterion": criterion}) for criterion in CRITERIA if criterion != "exact"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(("name", "more"), [*OF_A_GPU, ("auto", {})], ids=str)
def test_captured_on_a_gpu(name, more, monkeypatch, caplog):
    """After a capture that failed too; shapes of "auto" take turns in one pool, where none may write over another's."""
    with pytest.raises(replay.CaptureError, match="captur"):
        replay.lane_of(GPU).capture(lambda: torch.ones(3, device=GPU).sum().item())

    def texts():
        in_turns(monkeypatch, *drafting("cuda")[:3])
        return text(on_a_gpu(), name, **more, max_new_tokens=96)

    with caplog.at_level("WARNING", logger="gsd_kernels"):
        captured = texts()
    assert all("is lossy" in message for message in caplog.messages)
    monkeypatch.setattr(capture, "can_capture", lambda session: False)
    assert torch.equal(texts(), captured)
