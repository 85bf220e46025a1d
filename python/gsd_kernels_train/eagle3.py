"""Training of EAGLE-3 drafters, unrolled (arXiv 2503.01840, section 3.2)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels_hf.model.hidden import decoder_of
from gsd_kernels_hf.sources.eagle3 import TARGET_HEAD, Eagle3, Eagle3Config

from .drafter import DrafterOptions, layer_sizes, spread, write_checkpoint
from .job import TrainingOptions, check_output_matrix
from .unrolled import DEPTH, UnrolledTraining


class Eagle3Training(UnrolledTraining):
    """An EAGLE-3 drafter that learns from its target.

    Args:
        draft_ids: int64 [draft vocabulary], ids of the tokens that it can draft, ascending.

    Raises:
        ValueError: see :meth:`DrafterTraining.begin`.
    """

    kind = "eagle3"

    def __init__(
        self,
        options: TrainingOptions,
        target: PreTrainedModel,
        drafter: DrafterOptions,
        draft_ids: Tensor,
    ) -> None:
        super().__init__(options, target, drafter.given)
        fused = drafter.layers_of(target, default_layers(target))
        sizes = layer_sizes(target, drafter)
        self.config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **sizes,
            "draft_vocab_size": len(draft_ids),
            "target_hidden_size": sizes["hidden_size"],
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(fused),  # what layers read: vLLM
        }
        if min(fused) > 0:  # outputs of layers: SGLang
            inner = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in fused], "use_aux_hidden_state": True}
            self.config["eagle_config"] = inner
        if drafter.target_head:
            self.config[TARGET_HEAD] = True
            check_output_matrix("drafters without an output matrix of their own", options, target)
        module = Eagle3(Eagle3Config.of(self.config, {}))
        if module.d2t is not None:
            module.d2t.copy_(draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
        self.begin(module, fused, drafter.depth or DEPTH)
        # It begins as the target's output matrix, and the norm before, on the deepest state that is fused.
        with torch.no_grad():
            size = sizes["hidden_size"]
            module.fc.weight.zero_()[:, -size:].copy_(torch.eye(size, dtype=torch.float32, device="cpu"))
            module.norm.weight.copy_(decoder_of(target)[1].weight)
        trained = module.config.own_head
        module.share_head(target)
        module.lm_head.weight.requires_grad_(trained)

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`UnrolledTraining.outputs`."""
        vectors, logits = self.module.outputs(hidden)
        return vectors, logits

    def save(self, folder: Path) -> None:
        """Write the layout of SafeAILab and SpecForge, which vLLM and SGLang read."""
        tensors = {name.replace("layers.0.", "midlayer.", 1): value for name, value in self.module.state_dict().items()}
        if not self.module.config.own_head:
            del tensors["lm_head.weight"]
        if self.module.d2t is not None:
            known = torch.zeros(self.config["vocab_size"], dtype=torch.bool, device="cpu")
            known[self.module.target_ids().cpu()] = True
            tensors["t2d"] = known
        write_checkpoint(folder, self.config, tensors, self.dtype)


def default_layers(target: PreTrainedModel) -> tuple[int, ...]:
    """Hidden states 2, L // 2 and L − 3 of a target of L layers, as published; of a shallow one spread ones."""
    count = len(decoder_of(target)[0])
    published = (2, count // 2, count - 3)
    return published if count >= 8 else spread(int(count > 3), count - 1, 3)
