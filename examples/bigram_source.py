"""A draft source in one file: what followed the same token last time.

python examples/bigram_source.py                      the embedded target
python examples/bigram_source.py --model DIR_OR_ID    your own; --draft names a second source beside it

Needs the package: pip install . in this repository's folder.
"""

from __future__ import annotations

import math

import torch
import typer

import gsd_kernels
from gsd_kernels import DraftSource, Level, Proposal, Verified
from gsd_kernels_cli.options import Models


class Bigram(DraftSource):
    """The token that last followed the frontier's token in this text."""

    name = "bigram"

    def attach(self, text):  # once a text, its prompt in the state; may wait for the device
        if text.first:  # of the session: storage, which later texts and all steps update in place
            self.state, device = text.state, text.state.tokens.device
            self.after = torch.empty(len(text.state.tokens), text.target.vocab_size, dtype=torch.int32, device=device)
        self.after.fill_(-1)
        prompt = self.state.tokens[:, : int(self.state.out_len.min())].int()  # [B, P]
        for i in range(prompt.shape[1] - 1):
            self.remember(prompt[:, i : i + 1], prompt[:, i + 1 : i + 2], torch.ones_like(self.state.done))

    def propose(self, level: Level) -> Proposal:  # once a level
        token = self.after.gather(1, level.frontier.token_ids.long())[..., None]  # int32 [B, W, K], K = 1; −1: none
        return Proposal(token, torch.where(token < 0, -math.inf, math.log(0.5)))

    def observe(self, verified: Verified) -> None:  # once a step
        before = verified.rows.token_ids[:, :1]  # the root, [B, 1]
        for i in range(verified.tokens.shape[1]):
            token = verified.tokens[:, i : i + 1]
            self.remember(before, token, verified.accepted.num_accepted > i)
            before = token

    def remember(self, before: torch.Tensor, token: torch.Tensor, new: torch.Tensor) -> None:
        before = before.long()
        self.after.scatter_(1, before, torch.where(new[:, None], token, self.after.gather(1, before)))


def main(model: str | None = None, draft: str | None = None, max_new_tokens: int = 48) -> None:
    """Continue a prompt with the source, and without."""
    pair = Models(draft or "history").load(model)
    call = {**pair.encode(["def main():\n    parser = argparse.ArgumentParser("]), **pair.padding}
    call |= {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    sources = (*(("model",) if draft else ()), Bigram())
    out = gsd_kernels.generate(pair.target, **call, **pair.speculation, draft_sources=sources, graph_config="graph")
    print(pair.tokenizer.decode(out.sequences[0]))
    plain = gsd_kernels.generate(pair.target, **call, graph_config="plain")
    print("the same tokens as without it:", torch.equal(out.sequences, plain.sequences))
    print(f"{out.stats.tokens_per_step:.2f} tokens per step, {out.stats.steps} target forwards")


if __name__ == "__main__":
    typer.run(main)
