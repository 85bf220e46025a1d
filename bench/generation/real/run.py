"""One interleaved run of everyday work, in this process and those of other engines, with a cache folder of its own."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ...lib.environment import environment
from ..competitors import warmed_up
from ..names import HF, HISTORY, LABELS, OURS, PACKED, plain_of
from ..options import OfReal
from ..pairs import Pair, Prompt
from ..peers.race import peers
from ..race import Race, terminable
from ..report import Report
from .models import Real, bits_of, load_real
from .prompts import Chat, encoded, read_chats
from .ways import engines_for, names_of, own_ways

NAME = "real"
WARM_UP_TOKENS = 8
TEMPLATE_TOKENS = 32  # that a chat template may write round an answer


def name_of(given: OfReal) -> str:
    """Of the file of results: README's table is made of the whole run of this benchmark's own model and prompts."""
    places = (given.model, given.draft, given.drafter, given.prompts)
    own = [re.sub(r"[^\w.]+", "-", Path(part).name or str(part)).lower() for part in places if part is not None]
    part = ["part"] if given.ways else []
    quick = [] if given.limit is None else ["quick" if given.limit == 1 else f"first-{given.limit}"]
    return "-".join([NAME, given.dtype, *own, *part, *quick])


@terminable()
def run(given: OfReal, ways: Sequence[str], folder: Path, name: str) -> Report:
    """Race the ways, by default all that there are; after every prompt the results so far are written to ``folder``.

    Raises:
        KeyboardInterrupt: it was ended before the first prompt was decoded.
        ValueError: a way that there is not, or prompts or models that cannot be read.
    """
    chats, tuning = read_chats(given.prompts, given.limit)
    print(f"{NAME}: loading the model", file=sys.stderr, flush=True)
    real = load_real(given.model, given.draft, given.drafter, getattr(torch, given.dtype))
    engines, own = engines_for(real, given.llama_cpp), own_ways(real)
    names = _named(ways, names_of(real, own, engines))
    prompts, others = encoded(chats, real.tokenizer), encoded(tuning, real.tokenizer)
    longest = [_to_the_end(real, chat, given.new_tokens) for chat in chats if chat.turns]
    pair = Pair(real.name, real.model, real.shared_draft, [*prompts, *longest])
    report = Report(
        NAME,
        settings={
            "model": real.name,
            "dtype": given.dtype,
            "draft": given.draft,
            "drafter": given.drafter,
            "prompts": "own" if given.prompts else "bench/generation/real/prompts.json",
            "new_tokens": given.new_tokens,
            "rounds": given.rounds,
            "ways": names,
            "ours": HISTORY,
            "against": HF,
        },
        environment=environment(torch.device("cpu")),
        parameters=real.model.num_parameters(),
        prompts={prompt.name: prompt.about() for prompt in prompts},
    )
    asked = {chat.name: chat for chat in chats}

    def following(prompt: Prompt, answer: list[int]) -> Prompt | None:
        chat = asked[prompt.name].answered(real.tokenizer.decode(answer, skip_special_tokens=True))
        if chat is None:
            return None
        asked[chat.name] = chat
        return encoded([chat], real.tokenizer)[0]

    race = Race(
        real.model,
        report,
        given.new_tokens,
        references=lambda way: {"same": HF, "same_as_plain": plain_of(way)},
        judged=lambda way: LABELS[way].engine in ("gsd_kernels", "transformers"),
        ours=lambda way: way in OURS,
        following=following,
        ends=real.ends,
        rounds=given.rounds,
        folder=folder,
        name=name,
    )
    with (
        cold_cache(),
        peers(pair, names, others, new_tokens=given.new_tokens, engines=engines, ends=real.ends) as (theirs, notes),
    ):
        report.peers = notes
        if real.packed is not None:
            report.peers |= {PACKED: {"bits": bits_of(real.packed)}}
        known = {**own, **theirs}
        race.run(
            warmed_up([known[name] for name in names], others[0].input_ids, lambda way: WARM_UP_TOKENS, report), prompts
        )
    return report


def _to_the_end(real: Real, chat: Chat, new_tokens: int) -> Prompt:
    """A prompt as long as a chat's last turn can be, for engines that ask for the length before."""
    said = [*chat.messages, *({"role": "user", "content": turn} for turn in chat.turns)]
    (prompt,) = encoded([Chat(chat.name, chat.kind, said)], real.tokenizer)
    room = len(chat.turns) * (new_tokens + TEMPLATE_TOKENS)
    return Prompt(prompt.name, prompt.kind, torch.nn.functional.pad(prompt.input_ids, (0, room)))


def _named(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    for way in wanted:
        if way not in known:
            raise ValueError(f"--ways: {way!r} cannot take part with this model and these engines: {', '.join(known)}")
    return [way for way in known if not wanted or way in wanted]


@contextmanager
def cold_cache() -> Iterator[None]:
    """Nothing that was learned before helps: a folder of the run's own in place of the user's cache."""
    before = os.environ.get("GSD_KERNELS_CACHE")
    # What costs have been learned is written behind a race, also behind one that is stopped while the folder goes.
    with tempfile.TemporaryDirectory(prefix="gsd-kernels-cold-", ignore_cleanup_errors=True) as cold:
        os.environ["GSD_KERNELS_CACHE"] = cold
        try:
            yield
        finally:
            if before is None:
                del os.environ["GSD_KERNELS_CACHE"]
            else:
                os.environ["GSD_KERNELS_CACHE"] = before
