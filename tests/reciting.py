"""A draft source that knows the text, and says something else now and then."""

from __future__ import annotations

import math

import torch

from gsd_kernels import DraftSource, Level, Proposal


class Reciting(DraftSource):
    """Proposes what ``text`` [B, L] has at a place, mostly second or third of three: siblings are accepted.

    Args:
        text: with prompt and padding, as ``generate`` returns it.
        vocab: of what is proposed beside it.
        wrong: share of places where the text's token is not among the proposals.
    """

    name = "reciting"

    def __init__(self, text: torch.Tensor, vocab: int, *, wrong: float = 0.25, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch, length = text.shape
        known = torch.cat([text, torch.zeros(batch, 80, dtype=text.dtype)], 1)
        beside = torch.randint(3, vocab, (batch, length + 80, 3), generator=generator)
        rank = torch.randint(0, 3, known.shape, generator=generator)
        said = torch.rand(known.shape, generator=generator) >= wrong
        at = torch.nn.functional.one_hot(rank, 3).bool() & said[..., None]
        self.tokens = torch.where(at, known[..., None], beside).to(torch.int32)  # [B, L, 3]

    def attach(self, text) -> None:
        self.state = text.state

    def propose(self, level: Level) -> Proposal:
        place = (self.state.out_len[:, None] + level.frontier.depths).long()  # [B, W]; of the token after each node
        place = place.clamp(max=self.tokens.shape[1] - 1)
        tokens = self.tokens.gather(1, place[..., None].expand(-1, -1, 3))
        used = (level.frontier.node_ids >= 0)[..., None]
        return Proposal(
            torch.where(used, tokens, -1), torch.where(used, math.log(0.3), -math.inf).expand(tokens.shape).contiguous()
        )
