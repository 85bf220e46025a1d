"""llama.cpp, by the server that the ``xllamacpp`` package carries; it is called in its process, not by a port."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .base import Place, Setting, usual_choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKUP_NGRAM = 3  # how many tokens have to recur


@dataclass(frozen=True)
class LlamaCpp:
    """One slot, no prompt cache; of its n-gram modes the one that remembers nothing of earlier texts.

    Attributes:
        ends: tokens that end a text, of which its file gets the first.
    """

    ends: tuple[int, ...] = ()
    name: ClassVar[str] = "llama-cpp"
    packages: ClassVar[tuple[str, ...]] = ("xllamacpp", "gguf")

    def prepare(self, target: PreTrainedModel, draft: PreTrainedModel | None, folder: Path) -> None:
        from .gguf_file import write_gguf

        for name, model in (("target", target), ("draft", draft)):
            if model is not None:
                write_gguf(model, folder / name, self.ends)

    def choices(self, kind: str) -> list[Setting]:
        return usual_choices(kind)

    def weight_bytes(self, folder: Path) -> int | None:
        return None

    def start(self, place: Place) -> _Servers:
        return _Servers(place)

    def about(self) -> str:
        import xllamacpp

        return f"xllamacpp {version('xllamacpp')}: {xllamacpp.get_system_info().strip(' |')}"


class _Servers:
    """One server a kind; it is started anew for another number of drafted tokens."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.opened: dict[str, tuple[Setting, Any]] = {}

    def open(self, setting: Setting) -> None:
        setting = replace(setting, round=0)  # what it opens remembers nothing of earlier texts
        if self.opened.get(setting.kind, (None,))[0] == setting:
            return
        import xllamacpp

        self.opened.pop(setting.kind, None)
        self.opened[setting.kind] = setting, xllamacpp.Server(self._parameters(setting))

    def _parameters(self, setting: Setting) -> Any:
        import xllamacpp

        cache = {
            "float32": xllamacpp.ggml_type.GGML_TYPE_F32,
            "bfloat16": xllamacpp.ggml_type.GGML_TYPE_BF16,
        }[self.place.dtype]
        kinds = xllamacpp.common_speculative_type
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(self.place.folder / "target" / "model.gguf")
        parameters.n_ctx = self.place.longest + 256
        parameters.n_parallel = 1
        parameters.cache_prompt, parameters.warmup, parameters.verbosity = False, False, -1
        speculative = parameters.speculative
        for settings in (parameters, speculative.draft):
            settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = self.place.threads
            settings.cache_type_k = settings.cache_type_v = cache
        if setting.kind == "draft":
            speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            speculative.draft.mparams.path = str(self.place.folder / "draft" / "model.gguf")
            speculative.draft.n_max, speculative.draft.n_min, speculative.draft.p_min = setting.tokens, 0, 0.0
        elif setting.kind == "lookup":
            speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = LOOKUP_NGRAM, setting.tokens
        return parameters

    def decode(self, setting: Setting, ids: Sequence[int], new_tokens: int) -> list[int]:
        request = {"prompt": list(ids), "n_predict": new_tokens, "temperature": 0.0, "cache_prompt": False}
        answer = self.opened[setting.kind][1].handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp refused the request: {answer}")
        return [int(token) for token in re.findall(r"t(\d+)", answer["choices"][0]["text"])]
