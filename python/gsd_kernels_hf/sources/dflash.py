"""DFlash block drafters (arXiv 2602.06036) from the checkpoints that are published, drafting a lattice.

One forward a step: the root's embedding and as many mask tokens as the block is long see each other and the features of
the text, which are keys and values in every layer. It gives candidates for every later position at once: a lattice,
which is a graph by nature. What follows what within it, the history's candidates say, and the edges of
:mod:`.edges` where a checkpoint has them. Kinds: DFlash itself, JetSpec's (arXiv 2606.18394: rows of the block see
the earlier ones only), DSpark, DFlash 2. Layouts: z-lab's (``dflash_config``), DeepSpec's (flat), that of speculators.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from gsd_kernels import GraphConfig
from gsd_kernels.graph import pack_bits

from ..records import Verified
from . import checkpoints
from .base import Level, Proposal, Text
from .chain import Chain
from .checkpoints import BadCheckpoint, Checkpoint
from .edges import ConvolvedLayer, MarkovHead, Selector
from .lattice import Lattice, shares_of
from .layers import Layer, Rotary, RowPass

__all__ = ["DFlash"]

UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of training, which drafting does not read."""


@dataclass(frozen=True)
class DFlashConfig:
    """What a DFlash checkpoint's config says.

    Attributes:
        layers: sizes and rotary settings of the decoder layers; ``vocab_size`` is the target's.
        block_size: rows of the forward, the root's included.
        mask_token_id: whose embedding stands for a token to be drafted.
        hidden_layers: the target's hidden states that are fused, as transformers' ``hidden_states[i]``.
        draft_vocab_size: tokens that it can draft.
        target_hidden_size: Dt, width of the target's hidden states.
        sample_from_anchor: whether the root's row drafts, too; else candidates after it are those of the first mask.
        bidirectional_window: whether rows of a layer with a sliding window see the later ones of the block.
        own_embedding, own_head: whether the checkpoint has these matrices; else the target's are used.
        causal: whether rows of all layers see the earlier ones of the block only (JetSpec).
        markov_rank, markov_gated: of DSpark's head; 0: none.
        selector_rank, selector_top_k: of DFlash 2's head; 0: none.
        taps, group: of DFlash 2's convolutions; 0: none.
    """

    layers: PretrainedConfig
    block_size: int
    mask_token_id: int
    hidden_layers: tuple[int, ...]
    draft_vocab_size: int
    target_hidden_size: int
    sample_from_anchor: bool = False
    bidirectional_window: bool = False
    own_embedding: bool = False
    own_head: bool = False
    causal: bool = False
    markov_rank: int = 0
    markov_gated: bool = False
    selector_rank: int = 0
    selector_top_k: int = 0
    taps: int = 0
    group: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], *, own_embedding: bool, own_head: bool) -> DFlashConfig:
        """Read a ``config.json``.

        z-lab's layout and DeepSpec's list the layers whose outputs are fused, that of speculators what layers read. In
        DeepSpec's the root's row always drafts; it has no word for it.

        Raises:
            BadCheckpoint: a setting is missing, impossible, or not served.
        """
        inner = config.get("dflash_config")
        nested = config.get("transformer_layer_config")
        if isinstance(inner, dict):
            flat = dict(config)
            settings = {"block_size": config.get("block_size"), **checkpoints.set_in(inner)}
            layers = checkpoints.layer_numbers("target_layer_ids", inner.get("target_layer_ids"), shift=1)
        elif isinstance(nested, dict):
            flat, settings = dict(nested), checkpoints.set_in(config)
            name = "aux_hidden_state_layer_ids"
            layers = checkpoints.layer_numbers(name, config.get(name))
        elif "target_layer_ids" in config:
            flat, settings = dict(config), {**checkpoints.set_in(config), "sample_from_anchor": True}
            layers = checkpoints.layer_numbers("target_layer_ids", config["target_layer_ids"], shift=1)
        else:
            raise BadCheckpoint(
                "drafter: its config has neither dflash_config nor transformer_layer_config nor target_layer_ids"
            )
        sizes = checkpoints.layer_config({**flat, "model_type": "qwen3"}, "qwen3")
        draft_vocab_size = checkpoints.number(checkpoints.set_in(config), "draft_vocab_size", default=sizes.vocab_size)
        if draft_vocab_size < sizes.vocab_size and not own_head:
            raise BadCheckpoint(
                f"drafter: its draft vocabulary of {draft_vocab_size} needs an output matrix of its own, lm_head.weight"
            )
        edges = edges_of(settings, sizes)
        second = config.get("speculators_model_type") == "dflash2" or any(
            str(name).startswith("DFlash2") for name in config.get("architectures") or ()
        )
        for name in ("selector_rank", "conv_kernel_size") if second else ():
            checkpoints.number(settings, name)  # a DFlash 2 drafter has both
        if edges.get("taps"):  # DFlash 2's own code has it so; the others say it
            settings = {"sliding_window_non_causal": True, **settings}
        if edges.get("selector_rank") and draft_vocab_size < sizes.vocab_size:
            raise BadCheckpoint("drafter: a DFlash 2 drafter with a draft vocabulary of its own; not served")
        return cls(
            sizes,
            checkpoints.number(settings, "block_size", least=2),
            checkpoints.number(settings, "mask_token_id", least=0),
            layers,
            draft_vocab_size,
            checkpoints.number(
                {"target_hidden_size": sizes.hidden_size, **checkpoints.set_in(config), **settings},
                "target_hidden_size",
            ),
            checkpoints.flag(settings, "sample_from_anchor"),
            checkpoints.flag(settings, "sliding_window_non_causal"),
            own_embedding,
            own_head,
            checkpoints.flag(settings, "causal_head"),
            **edges,
        )

    @property
    def kind(self) -> str:
        """What its authors call it."""
        if self.selector_rank or self.taps:
            return "DFlash 2"
        return "DSpark" if self.markov_rank else "JetSpec" if self.causal else "DFlash"

    @property
    def num_drafted(self) -> int:
        """Later positions that a block has candidates for."""
        return self.block_size - (not self.sample_from_anchor)


def edges_of(settings: Mapping[str, Any], sizes: PretrainedConfig) -> dict[str, Any]:
    """What a config says of heads for edges, and of the convolutions that come with one of them.

    Raises:
        BadCheckpoint: a setting is missing, impossible, or not served.
    """
    found: dict[str, Any] = {}
    projector = settings.get("projector_type", "dflash")
    if projector != "dflash":
        raise BadCheckpoint(f"drafter: projector_type={projector!r} in its config; only 'dflash' is served")
    if settings.get("markov_rank"):
        kind = settings.get("markov_head_type", "vanilla")
        if kind not in ("vanilla", "gated"):
            raise BadCheckpoint(
                f"drafter: markov_head_type={kind!r} in its config; served are 'vanilla' and 'gated', whose scores "
                "depend on the token before alone, not on the whole path"
            )
        found |= {"markov_rank": checkpoints.number(settings, "markov_rank"), "markov_gated": kind == "gated"}
    if settings.get("selector_rank"):
        found |= {name: checkpoints.number(settings, name) for name in ("selector_rank", "selector_top_k")}
    if settings.get("conv_kernel_size"):
        taps, group = (checkpoints.number(settings, name) for name in ("conv_kernel_size", "conv_group_size"))
        if sizes.hidden_size % group:
            raise BadCheckpoint(
                f"drafter: conv_group_size={group} in its config does not divide hidden_size={sizes.hidden_size}"
            )
        found |= {"taps": taps, "group": group}
    return found


class DFlash(nn.Module):
    """A DFlash drafter: ``gsd_kernels.patch(model, drafter=DFlash.from_pretrained(folder_or_id, model))``.

    Args:
        config: see :class:`DFlashConfig`.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.layers
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.rotary = Rotary(sizes)
        self.embed_tokens = nn.Embedding(sizes.vocab_size, size) if config.own_embedding else None
        self.fc = nn.Linear(len(config.hidden_layers) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        count, taps, group = sizes.num_hidden_layers, config.taps, config.group
        self.layers = nn.ModuleList(
            ConvolvedLayer(sizes, i, taps, group) if taps else Layer(sizes, i) for i in range(count)
        )
        for layer in self.layers:
            if layer.self_attn.window is not None:
                layer.self_attn.window += 1  # counted from the root, which every row of the block does
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_head else None
        reduced = config.draft_vocab_size < sizes.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if reduced else None)
        vocab, drafted, rank = sizes.vocab_size, config.draft_vocab_size, config.markov_rank
        self.markov_head = MarkovHead(vocab, drafted, rank, size, gated=config.markov_gated) if rank else None
        rank = config.selector_rank
        self.candidate_selector = Selector(vocab, rank, size, config.selector_top_k) if rank else None

    @property
    def edges(self) -> MarkovHead | Selector | None:
        """The head that scores a token by the one before, if there is one."""
        return self.candidate_selector if self.markov_head is None else self.markov_head

    @classmethod
    def from_pretrained(cls, where: str | os.PathLike[str], target: PreTrainedModel | None = None) -> DFlash:
        """A drafter from a folder or hub id: as stored, or with ``target``'s dtype and device.

        Raises:
            ValueError: no DFlash checkpoint that can be served, or not one of ``target``'s; nothing was loaded.
        """
        return cls.from_checkpoint(Checkpoint.open(where), target)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target: PreTrainedModel | None = None) -> DFlash:
        """As :meth:`from_pretrained`, of an open checkpoint."""
        checkpoint.rename(weight_name)
        has = {name: f"{name}.weight" in checkpoint.files for name in ("embed_tokens", "lm_head")}
        config = DFlashConfig.of(checkpoint.config, own_embedding=has["embed_tokens"], own_head=has["lm_head"])
        return checkpoints.build(cls, config, checkpoint, target)

    def __repr__(self) -> str:
        config = self.config
        sizes = f"{len(self.layers)} layer(s) of width {config.layers.hidden_size}, blocks of {config.block_size}"
        return f"<DFlash: {config.kind}, {sizes}, vocabulary of {config.draft_vocab_size:,} tokens>"

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise unless the drafter fits a target's vocabulary, width and layers.

        Raises:
            ValueError: the difference and the cure.
        """
        config = self.config
        checkpoints.check_vocabulary("DFlash", config.layers.vocab_size, target)
        checkpoints.check_layers("DFlash", config.hidden_layers, config.target_hidden_size, target)
        shared = self.embed_tokens is None or self.lm_head is None
        if shared and config.layers.hidden_size != config.target_hidden_size:
            raise BadCheckpoint(
                f"drafter: this DFlash drafter shares the target's matrices, and is {config.layers.hidden_size} wide "
                f"where these are {config.target_hidden_size}"
            )
        rows = (
            config.layers.vocab_size if self.embed_tokens is not None else target.get_input_embeddings().weight.shape[0]
        )
        if config.mask_token_id >= rows:
            raise BadCheckpoint(
                f"drafter: this DFlash drafter's mask_token_id={config.mask_token_id} has no row in an embedding of "
                f"{rows}"
            )

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of every layer."""
        return [layer.self_attn.window for layer in self.layers]

    def target_ids(self) -> Tensor:
        """The target's id of every draft token, int64 [draft_vocab_size]."""
        at = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        return at if self.d2t is None else at + self.d2t

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        """The feature of the target's hidden states, [B, n, Dt] each: [B, n, D]."""
        return self.hidden_norm(self.fc(torch.cat(hidden, -1)))

    def store(self, features: Tensor, positions: Tensor, rows: RowPass) -> None:
        """Store every layer's keys and values of features [B, n, D] at text positions int64 [B, n]."""
        turns = self.rotary(features, positions)
        for layer in self.layers:
            layer.self_attn.store(features, turns, rows)

    def forward(self, embedded: Tensor, positions: Tensor, rows: RowPass) -> Tensor:
        """What the output matrix reads, of a block.

        Args:
            embedded: [B, block_size, D], of the root and of masks.
            positions: int64 [B, block_size], in the text.
            rows: the cache with the features' keys and values, and what is seen.

        Returns:
            [B, block_size, D].
        """
        turns, hidden = self.rotary(embedded, positions), embedded
        for layer in self.layers:
            hidden = layer(hidden, turns, rows)
        return self.norm(hidden)


def weight_name(name: str) -> str | None:
    """The name here of a published tensor; ``None``: not needed."""
    name = name.removeprefix("model.")
    # Which of the lattice's edges pay is learned from what is accepted, so DSpark's confidence head is not read.
    unused = name in UNUSED or name.endswith("rotary_emb.inv_freq") or name.startswith("confidence_head.")
    return None if unused else name


class DFlashDrafts(Lattice):
    """The draft source of a :class:`DFlash`: candidates by depth, from one forward a step.

    They are the same below every path, or with edges below every token of a depth: a lattice in a graph that merges
    (``merge_context=0``), and a chain in the shape ``"chain"``.
    """

    name = "dflash"

    def __init__(self, module: DFlash) -> None:
        self.module = module
        self.hidden_layers = module.config.hidden_layers
        self.extra_slots = module.config.block_size
        self.shares = shares_of(module.config.num_drafted)

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that the drafter was not made for."""
        self.module.check_target(target)
        checkpoints.check_device("DFlash", self.module, target)

    def begin(self, text: Text) -> None:
        self.start(text, self.module.config.layers)
        config, device, batch = self.module.config, self.cached.device, len(self.cached)
        self.lm_head = self.module.lm_head or text.target.stepping.get_output_embeddings()
        self.vocab_size, self.target_ids = text.target.vocab_size, self.module.target_ids()
        row = torch.arange(config.block_size, device=device)
        every = torch.ones(len(row), len(row), dtype=torch.bool, device=device)
        self.row = row.to(torch.int32).expand(batch, -1)
        earlier = pack_bits(every.tril()).expand(batch, -1, -1).contiguous()
        self.sees_all = earlier if config.causal else pack_bits(every).expand(batch, -1, -1).contiguous()
        self.sees_window = self.sees_all if config.bidirectional_window else earlier

    def num_rows(self, config: GraphConfig) -> int:
        return config.chain_rows + self.module.config.block_size if config.depth > 0 else 0

    def enter(self, end: Tensor, width: int) -> None:
        """Store keys and values of up to ``width`` features before ``end`` [B]."""
        chain = Chain.of(self.cached, end, width)
        with self.rows.cache.writing((self.cached[:, None] + chain.slots).long()):
            positions = self.rows.positions(self.cached, chain.depths)
            self.module.store(self.rows.at(chain.place), positions, RowPass(self.rows.cache, None))
        self.cached.add_(chain.count)

    def propose(self, level: Level) -> Proposal | None:
        """The block's candidates after nodes of each depth; the forward is at level 0. ``None`` beyond ``depth``."""
        if level.number >= level.config.depth:
            return None
        if level.number == 0:
            self.enter(self.state.out_len - 1, level.config.chain_rows)
            self.look_ahead(level)
        return self.at_depths(level)

    def warm(self, level: Level, verified: Verified) -> Proposal | None:
        """The attention of a block and the storing of features, behind what is stored; candidates of a block."""
        config, block_size = level.config, self.module.config.block_size
        if config.depth == 0:
            return None
        stored = self.state.out_len - 1
        self.rows.launch(stored, config.chain_rows, 0)
        self.rows.launch(stored, block_size, block_size)
        features, drafted = self.rows.features, self.module.config.num_drafted
        logits = self.lm_head.weight.new_zeros(len(features), drafted, self.module.config.draft_vocab_size)
        self.keep(features.new_zeros(len(features), drafted, features.shape[2]), logits, level)
        return self.at_depths(level)

    def look_ahead(self, level: Level) -> None:
        """Forward the block, and keep what candidates of its positions are made of until the next step."""
        config = self.module.config
        hidden = self.block_states()[:, config.block_size - config.num_drafted :]
        self.keep(hidden, self.lm_head(hidden.to(self.lm_head.weight.dtype)), level)

    def keep(self, hidden: Tensor, logits: Tensor, level: Level) -> None:
        """Keep states [B, n, D] and logits [B, n, V] of the drafted positions, or the candidates where that is all."""
        if self.module.edges is not None:
            self.hidden, self.logits = hidden, logits
        else:
            self.keep_positions(logits, level)

    def at_depths(self, level: Level) -> Proposal:
        """Candidates after the nodes of a frontier, by their depths and, with edges, their tokens."""
        if self.module.edges is None:
            return super().at_depths(level)
        drafted = self.module.config.num_drafted
        place = level.frontier.depths.long().clamp(max=drafted)  # [B, W]
        at = place.clamp(max=drafted - 1)[..., None].to(self.logits.device)
        hidden, logits = (found.gather(1, at.expand(-1, -1, found.shape[2])) for found in (self.hidden, self.logits))
        before = level.frontier.token_ids.long().to(logits.device).clamp(max=self.module.config.layers.vocab_size - 1)
        tokens, log_probs = self.ranked(self.module.edges(logits, hidden, before), level.positions, level.config.branch)
        there = (place < drafted)[..., None]
        return Proposal(torch.where(there, tokens, -1), torch.where(there, log_probs, -torch.inf), place)

    def block_states(self) -> Tensor:
        """Forward the block behind all features; [B, block_size, D]."""
        state, kv_len = self.state, self.cached
        tokens = torch.full_like(self.row, self.module.config.mask_token_id, dtype=torch.int64)
        tokens[:, 0] = state.root_tokens()
        # Windows are counted from the root, so for attention all rows are where the root is.
        here = torch.zeros_like(self.row)
        inputs = self.rows.inputs(kv_len, self.sees_all, here, here)
        rows = RowPass(self.rows.cache, inputs, self.rows.inputs(kv_len, self.sees_window, here, here))
        with self.rows.cache.writing((kv_len[:, None] + self.row).long()):
            return self.module(self.embedded(tokens), self.rows.positions(kv_len, self.row), rows)
