"""Gemma 4's assistants: a small model that reads the target's own keys and values, drafting a graph without a cache.

All its layers attend to what the target's last layers of their type have stored, from one place: where the root is. A
row reads the embedding of a node's token and the vector of the node before it, so a level is a batch of such pairs.
transformers drafts a chain for one sequence with it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from gsd_kernels import GraphConfig

from ..model.attention import GraphInputs, configs_of, switched_configs, windowed
from ..model.hidden import decoder_of
from ..model.properties import device_of, text_config
from . import checkpoints
from .base import Level, Text
from .checkpoints import CONFIG, bad
from .expansion import DraftVocabulary, NodeVectors
from .features import LastState, Recursion
from .layouts import GEMMA4

KIND = "Gemma 4"
Stored = dict[str, tuple[Tensor, Tensor]]
"""Keys and values [B, Hkv, S, D] by type of layer."""


class Gemma4Assistant(nn.Module):
    """An assistant of a Gemma 4 model: ``patch(model, drafter=folder_or_id)``.

    Args:
        model: as transformers loads it, a ``Gemma4AssistantForCausalLM``.
    """

    kind = KIND

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.sizes = model, model.config.get_text_config()
        self.width = model.config.backbone_hidden_size  # of the target
        self.configs, types = configs_of(model), self.sizes.layer_types
        # transformers' mask has both ends in it, and the root's own place is not stored.
        self.windows = [self.sizes.sliding_window + 2 if kind == "sliding_attention" else None for kind in types]

    @classmethod
    def from_pretrained(cls, where: str | os.PathLike[str], target: PreTrainedModel) -> Gemma4Assistant:
        """An assistant from a folder or hub id, on ``target``'s device and in its dtype.

        Raises:
            ValueError: none that can be served, or another model's; the message names what and the cure.
        """
        folder = checkpoints.fetch(where)
        kind = getattr(transformers, GEMMA4, None)
        if kind is None:
            raise bad(f"{folder} is a Gemma 4 assistant; it needs transformers with {GEMMA4}")
        try:
            config = kind.config_class.from_dict(checkpoints.read_json(folder / CONFIG))
        except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError) as error:
            raise bad(f"{folder} has no readable config of a Gemma 4 assistant: {error}") from error
        check_sizes(config, target)
        model, report = kind.from_pretrained(folder, dtype=target.dtype, output_loading_info=True)
        strange = [*report["missing_keys"], *report["mismatched_keys"]]
        if strange:
            raise bad(f"{folder} lacks {strange[0]}, or has it in another shape")
        found = cls(model)
        checkpoints.move_to(found, target)
        return found

    def __repr__(self) -> str:
        return f"<Gemma4Assistant: {len(self.windows)} layer(s) of width {self.sizes.hidden_size}>"

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise unless the assistant fits a target's vocabulary, width and types of layers.

        Raises:
            ValueError: the difference and the cure.
        """
        check_sizes(self.model.config, target)

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, stored: Stored, graph: Any) -> Any:
        """One level: the vectors that nodes hand on [B, W, D], and logits [B, W, V].

        Args:
            embedded: [B, W, D], of the nodes' tokens, by the target's embedding.
            features: [B, W, D], of the target for the root, else vectors of the nodes before.
            positions: int64 [B, W], of the root.
            stored: of the target's last layers.
            graph: what the rows see of it.
        """
        model, text = self.model, self.model.model  # whose own forward takes one row a sequence
        hidden = model.pre_projection(torch.cat([embedded, features], -1))
        turns = {kind: text.rotary_emb(hidden, positions, kind) for kind in stored}
        with switched_configs(self.configs):
            for layer, kind in zip(text.layers, self.sizes.layer_types, strict=True):
                hidden = layer(
                    hidden,
                    shared_kv_states=stored,
                    position_embeddings=turns[kind],
                    position_ids=positions,
                    graph=graph,
                )
        hidden, ordered = text.norm(hidden), model.masked_embedding
        vectors = model.post_projection(hidden)
        if ordered is None:
            return vectors, model.lm_head(hidden)
        # With ordered embeddings there are logits of the tokens of the best clusters, and −∞ elsewhere.
        best = ordered.centroids(hidden).topk(ordered.centroid_intermediate_top_k, -1).indices  # [B, W, k]
        tokens = ordered.token_ordering.long().view(ordered.num_centroids, -1)[best].flatten(2)  # [B, W, n]
        scores = torch.einsum("bwd,bwnd->bwn", hidden, model.lm_head.weight[tokens])
        whole = hidden.new_full((*hidden.shape[:2], self.sizes.vocab_size), -torch.inf)
        return vectors, whole.scatter(-1, tokens, scores)


def check_sizes(config: PretrainedConfig, target: PreTrainedModel) -> None:
    """Raise unless an assistant of this config fits a target.

    Raises:
        BadCheckpoint: the difference and the cure.
    """
    sizes = config.get_text_config()
    checkpoints.check_sizes(KIND, sizes.vocab_size, config.backbone_hidden_size, target)
    reads, storing = "this Gemma 4 assistant reads", storing_layers(target)
    for kind, (heads, size) in stored_by(sizes).items():
        if kind not in storing:
            raise bad(
                f"{reads} keys and values of {kind} layers, which {type(target).__name__} does not have; "
                f"{checkpoints.BELONGS}"
            )
        theirs = stored_by(text_config(target))[kind]
        if theirs != (heads, size):
            raise bad(
                f"{reads} {heads} heads of {size} of {kind} layers, and those of {type(target).__name__} store "
                f"{theirs[0]} of {theirs[1]}; {checkpoints.BELONGS}"
            )


def stored_by(config: PretrainedConfig) -> dict[str, tuple[Any, ...]]:
    """Of every type of layer how many heads of keys and values there are, and their size."""
    each = zip(config.layer_types, config.per_layer_config, strict=False)
    names = ("num_key_value_heads", "head_dim")
    return {kind: tuple(getattr(layer, name, None) for name in names) for kind, layer in each}


def storing_layers(target: PreTrainedModel) -> dict[str, int]:
    """Of every type of layer the last one that stores keys and values of its own."""
    config = text_config(target)
    own = len(decoder_of(target)[0]) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: index for index, kind in enumerate((getattr(config, "layer_types", None) or ())[:own])}


class AssistantDrafts(LastState, Recursion):
    """The draft source of a :class:`Gemma4Assistant`: keys and values are the target's, as they lie there."""

    name = "gemma4_assistant"
    stem = 1

    def __init__(self, module: Gemma4Assistant) -> None:
        self.module, self.forwards = module, (module,)

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that the assistant was not made for."""
        checkpoints.check(self.module, target)

    def start(self, text: Text) -> None:
        super().start(text)
        self.head, self.vectors = self.module.model.lm_head, NodeVectors()
        self.vocabulary = DraftVocabulary(None, self.module.sizes.vocab_size, text.target.vocab_size)
        self.embed = text.target.stepping.get_input_embeddings()
        stored = storing_layers(text.target.model)
        self.layers = {kind: stored[kind] for kind in self.module.sizes.layer_types}
        self.device = device_of(self.module.model)
        self.kinds = windowed(self.module.windows)

    def prepare(self, config: GraphConfig) -> None:
        """Make the storage of a shape."""
        like = self.hidden.new_zeros(len(self.hidden), 0, device=self.device)
        self.vectors.prepare(config, like, self.module.width)

    def launch(self, level: Level) -> None:
        """Forward a frontier, which writes nothing."""
        self.nodes(level, None)

    def nodes(self, level: Level, vectors: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :meth:`Recursion.nodes`; all 0 for a text of which the target has read nothing yet."""
        tokens, cached = level.frontier.token_ids, self.text.target.cache.layers
        if vectors is None:
            vectors = self.hidden[:, None].to(self.device, self.module.model.dtype).expand(-1, tokens.shape[1], -1)
        if not all(cached[index].is_initialized for index in self.layers.values()):
            return torch.zeros_like(vectors), self.no_logits(tokens.shape[1])
        kv_len, kv_start, to = self.text.kv_len, self.state.kv_start, self.device
        zeros = torch.zeros_like(tokens, dtype=torch.int32)  # [B, W]; all rows are where the root is
        graph = zeros[..., None], kv_len, kv_start, zeros, zeros[:, :1], self.text.target.backend
        inputs = GraphInputs(*graph, self.kinds)
        stored = {kind: (cached[index].keys.to(to), cached[index].values.to(to)) for kind, index in self.layers.items()}
        embedded = self.embed(tokens.long()).to(vectors.dtype)
        positions = (kv_len - kv_start)[:, None].long().expand(tokens.shape)
        vectors, logits = self.module(embedded, vectors, positions, stored, inputs)
        inputs.check_complete()
        known = self.known[:, None, None]
        return torch.where(known, vectors, 0.0), torch.where(known, logits, 0.0)
