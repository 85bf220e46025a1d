"""OpenVINO GenAI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import Engine, Place, Setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKUP_NGRAM = 3  # the longest that is looked for


@dataclass(frozen=True)
class OpenVino(Engine):
    """Its pipelines: paged attention, one request at a time, no prefix caching.

    Attributes:
        weights: of the target: the model's own, or ``int8`` or ``int4`` as nncf makes them.
        tokenizer: a checkpoint folder, by default the demo's. Target's and draft's are compared, and no text goes
            through it.
        floats: whether activations are floats where weights are ``int8`` or ``int4``. In float32 OpenVINO rounds
            them to eight bits by default, in groups of 32; in bfloat16 it never does.
    """

    weights: str = ""
    tokenizer: Path | None = None
    floats: bool = False

    @property
    def name(self) -> str:
        return "-".join(filter(None, ("openvino", self.weights, "floats" * self.floats)))

    @property
    def packages(self) -> tuple[str, ...]:
        return ("openvino", "openvino_genai", "openvino_tokenizers", *["nncf"] * bool(self.weights))

    def prepare(self, target: PreTrainedModel, draft: PreTrainedModel | None, folder: Path) -> None:
        from gsd_kernels_cli import demo

        from .ir import write_ir, write_tokenizer

        tokenizer = self.tokenizer or demo.path() / "target"
        for name, model in (("target", target), ("draft", draft)):
            if model is not None:
                write_ir(model, folder / name, weights=self.weights if name == "target" else "")
                write_tokenizer(folder / name, tokenizer)

    def weight_bytes(self, folder: Path) -> int | None:
        return (folder / "target" / "openvino_model.bin").stat().st_size if self.weights else None

    def start(self, place: Place) -> _Pipelines:
        return _Pipelines(place, {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if self.floats else {})

    def about(self) -> str:
        without = "" if has_bfloat16() else ", which multiplies bfloat16 weights in float32 on this CPU"
        return f"openvino-genai {version('openvino-genai')}{without}"


def has_bfloat16() -> bool:
    """Return whether its CPU plug-in multiplies and caches in bfloat16 here; it refuses without the instructions."""
    import openvino as ov

    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


class _Pipelines:
    """One pipeline a kind; drafted tokens are a matter of the call."""

    def __init__(self, place: Place, properties: dict[str, Any]) -> None:
        self.place, self.properties = place, properties
        self.opened: dict[str, Any] = {}

    def open(self, setting: Setting) -> None:
        if setting.kind in self.opened:
            return
        import openvino_genai as genai

        precision = "bf16" if self.place.dtype == "bfloat16" and has_bfloat16() else "f32"
        # Both by name: the cache's would be u8. Hyper-threads and all cores are what torch's threads get too.
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": self.place.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_HYPER_THREADING": True,
            **self.properties,
        }
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = max(256, self.place.longest)  # a prompt is read at once
        scheduler.max_num_seqs = 1
        more: dict[str, Any] = {}
        if setting.kind == "draft":
            more["draft_model"] = genai.draft_model(str(self.place.folder / "draft"), "CPU", **properties)
        elif setting.kind == "lookup":
            more["prompt_lookup"] = True
        self.opened[setting.kind] = genai.LLMPipeline(
            str(self.place.folder / "target"), "CPU", scheduler_config=scheduler, **more, **properties
        )

    def decode(self, setting: Setting, ids: Sequence[int], new_tokens: int) -> list[int]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = new_tokens, False, False
        ends = self.place.ends
        config.ignore_eos, config.eos_token_id, config.stop_token_ids = not ends, ends[0] if ends else 0, set(ends)
        if setting.kind != "plain":
            config.num_assistant_tokens = setting.tokens
        if setting.kind == "lookup":
            config.max_ngram_size = LOOKUP_NGRAM
        prompt = ov.Tensor(np.array([ids], dtype=np.int64))
        return list(self.opened[setting.kind].generate(prompt, config).tokens[0])
