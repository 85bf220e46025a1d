"""Ranks of a tensor-parallel model decode one text: checked at the start and as it grows.

Every rank drafts the same graph and picks the same tokens by itself: the model's own messages leave equal logits on
all ranks, and sampling noise is keyed by position. So no token is ever sent. What could part the ranks (other prompts,
other drafts, unequal hardware, a clock) would end in a hang or in nonsense; here it ends in an error that names it.

Everything runs on the process group that transformers sharded the model over.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from .records import Verified
from .store import VERSIONS
from .validate import check_heads

logger = logging.getLogger("gsd_kernels")

EVERY = 64
"""Steps between two checks; the first ones come after 1, 2, 4, … steps. One step with ``GSD_KERNELS_DEBUG=1`` or where
the ``gsd_kernels`` logger is at DEBUG."""

SAMPLES = 16  # elements of a weight that stand for it
MULTIPLIER = 0x2545F4914F6CDD1D  # of the running hash; odd, so that nothing is forgotten
EXIT_PAUSE = 0.5  # seconds; a gloo thread needs microseconds, once it gets a core
LOST = re.compile(r"gloo|nccl|connection (closed|reset)|timed out waiting|watchdog", re.IGNORECASE)


def tensor_parallel_group(name: str, model: PreTrainedModel) -> dist.ProcessGroup | None:
    """The group that ``from_pretrained(tp_plan=…)`` sharded ``model`` over; ``None`` if it is whole.

    ``name`` is what an error calls the model.

    Raises:
        ValueError: it is sharded in another way as well, or its heads do not divide.
    """
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None or not dist.is_initialized():
        return None
    names = mesh.mesh_dim_names or ()
    for mode in names:
        if mode != "tp" and mesh[mode].size() > 1:
            raise ValueError(f"{name}: sharded over {mode!r}; only tensor parallelism is supported")
    mesh = mesh["tp"] if "tp" in names else mesh
    if mesh.size() == 1:
        return None
    check_heads(name, model.config, mesh.size())
    group: dist.ProcessGroup = mesh.get_group()
    return group


class Ranks:
    """The ranks that models are sharded over, which decode one text and hold each other to it in a ``generate`` call.

    Where all models are whole it is this process alone, which has nothing to agree on.

    Args:
        models: by the name that an error calls them.
        device: the target's, which the ranks' messages must come from.

    Attributes:
        alone: whether there is one process.
        captures: whether their messages can be part of CUDA graphs: on all of them, or on none.
    """

    def __init__(self, models: dict[str, PreTrainedModel], device: torch.device) -> None:
        found = [tensor_parallel_group(name, model) for name, model in models.items()]
        groups = [group for group in found if group is not None]
        # NCCL's messages can be in a CUDA graph, gloo's wait for the host.
        self.captures = all("cuda:nccl" in dist.get_backend_config(group).split(",") for group in groups)
        self.alone = not groups
        if self.alone:
            return
        self.group, self.device = groups[0], device
        if dist.get_backend(self.group) == dist.Backend.GLOO:
            pause_at_exit()
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        debug = logger.isEnabledFor(logging.DEBUG) or os.environ.get("GSD_KERNELS_DEBUG", "0") not in ("", "0")
        self.every = 1 if debug else EVERY
        self.steps = 0
        self.agreed = 0  # the last step that was checked
        self.hash = torch.zeros((), dtype=torch.int64, device=device)

    def start(self, own_seed: int, given: dict[str, object]) -> int:
        """Raise unless every rank was given the same under every name; the seed to use, which is the first rank's.

        Args:
            own_seed: this rank's, drawn if none was given.
            given: what must agree, by the name that an error calls it; see :func:`digest`.
        """
        if self.alone:
            return own_seed
        given = {**given, "versions": VERSIONS, "GSD_KERNELS_DEBUG": self.every}
        mine = torch.tensor([*map(digest, given.values()), own_seed], dtype=torch.int64, device="cpu")
        with self.explained():
            everyone = self._gather(mine)
        wrong = [
            f"{name} ({_ranks(everyone[:, column])})"
            for column, name in enumerate(given)
            if (everyone[:, column] != everyone[0, column]).any()
        ]
        if wrong:
            raise ValueError(f"tensor parallel: ranks must be started alike, and differ in {', '.join(wrong)}")
        return int(everyone[0, -1])

    def check(self, verified: Verified, finished: bool, *, timed: bool) -> bool:
        """After every step: whether to stop. Raises if another rank decodes another text, where a check is due.

        Args:
            verified: the step.
            finished: whether this rank would stop.
            timed: whether that may depend on a clock, so that the first rank's word is asked for.
        """
        if self.alone:
            return finished
        rows, count = verified.rows, verified.accepted.num_accepted[:, None]
        real = torch.arange(rows.token_ids.shape[1], device=self.device) < rows.num_rows[:, None]
        drafted = [torch.where(real, column, 0) for column in (rows.token_ids, rows.parent_rows)]
        content = torch.cat([*drafted, verified.tokens, count], 1).flatten().long()
        place = torch.arange(1, content.shape[0] + 1, device=self.device)
        self.hash.mul_(MULTIPLIER).add_(((content + 2) * (place * MULTIPLIER | 1)).sum())
        self.steps += 1
        if timed:
            finished = self._say(finished)[0]
        if finished or self.steps % self.every == 0 or self.steps & (self.steps - 1) == 0:
            hashes = self._gather(self.hash[None])[:, 0]
            if (hashes != hashes[0]).any():
                when = f"step {self.steps}"
                if self.steps > self.agreed + 1:
                    when = f"one of the steps {self.agreed + 1} … {self.steps} (GSD_KERNELS_DEBUG=1 checks every step)"
                raise RuntimeError(
                    f"tensor parallel: the ranks decode different texts ({_ranks(hashes)}) since {when}; "
                    "they must have equal hardware, software and weights"
                )
            self.agreed = self.steps
        return finished

    def agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes; all must ask."""
        return yes if self.alone else all(self._say(yes))

    def _say(self, yes: bool) -> list[bool]:
        """Return what every rank says; all must ask."""
        return self._gather(torch.tensor([yes], dtype=torch.int64, device="cpu"))[:, 0].bool().tolist()

    def _gather(self, mine: Tensor) -> Tensor:
        """int64 [n] of every rank: [ranks, n], on the CPU."""
        mine = mine.to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone).cpu()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of a failed message what it means: another rank ended, hangs, or is elsewhere."""
        try:
            yield
        except RuntimeError as error:
            if self.alone or not (isinstance(error, dist.DistError) or LOST.search(str(error))):
                raise
            raise RuntimeError(
                f"tensor parallel: rank {self.rank} of {self.ranks} lost the other ranks in step {self.steps + 1}: one "
                "ended, hangs, or decodes another text; what it printed says why, and GSD_KERNELS_DEBUG=1 checks every "
                f"step. ({' '.join(str(error).split())})"
            ) from error


@cache
def pause_at_exit() -> None:
    """Let gloo's threads take Python's lock once more before the interpreter ends; no call but the first does anything.

    Such a thread may be the last to hold a message's tensors, and needs the lock to drop them. If the interpreter ends
    while it waits, as on busy cores it may, the process aborts: an error's exit status, or success, becomes SIGABRT.
    ``destroy_process_group`` does not wait for these threads (https://github.com/pytorch/pytorch/issues/190489).
    """
    atexit.register(time.sleep, EXIT_PAUSE)


def _ranks(column: Tensor) -> str:
    """Name the ranks that differ from the first: ``rank 1 from rank 0``."""
    others = [str(rank) for rank in range(len(column)) if column[rank] != column[0]]
    return f"rank{'s' * (len(others) > 1)} {', '.join(others)} from rank 0"


def digest(value: object) -> int:
    """63 bits of what ranks have alike: the elements of a tensor, weights of a model, parts of a tuple, or text.

    Files of online learners and of trainings keep a model's, by which they know what they go on with.
    """
    content = hashlib.sha256()
    if isinstance(value, Tensor):
        content.update(repr(tuple(value.shape)).encode())
        content.update(value.long().cpu().numpy().tobytes())
    elif isinstance(value, nn.Module):  # a model, heads, or another drafter
        if isinstance(value, PreTrainedModel):
            config = {**value.config.to_dict(), "_name_or_path": "", "transformers_version": ""}
            content.update(repr((type(value).__name__, sorted(config.items()))).encode())
        content.update(_weights(value))
    elif isinstance(value, tuple):
        content.update(repr([digest(part) for part in value]).encode())
    else:
        content.update(repr(value).encode())
    return int.from_bytes(content.digest()[:8], "little") >> 1


def _weights(model: nn.Module) -> bytes:
    """A few elements of every weight; of a sharded model only the norms, which are whole."""
    whole, samples = getattr(model, "_device_mesh", None) is None, []
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not (whole or "norm" in name):
            continue
        local: Any = parameter.detach()
        local = (local.to_local() if hasattr(local, "to_local") else local).reshape(-1)
        samples.append(
            local[:: max(1, local.numel() // SAMPLES)][:SAMPLES].double().to(next(model.parameters()).device)
        )
    return torch.cat(samples).cpu().numpy().tobytes() if samples else b""
