"""The same text whatever is drafted: it depends on the seed alone."""

from __future__ import annotations

import models
import pytest
import torch
import transformers
from acceptance.distributions import transformers_warpers
from validate.calls import VOCAB, pair

import gsd_kernels as gsd
from gsd_kernels.ops.sampling import philox


@pytest.mark.parametrize(("config", "cut"), [(None, 0.0), ("chain", 0.0), ("graph", 0.0), ("graph", 0.8)])
def test_every_token_is_the_argmax_of_its_own_noise(config, cut):
    """Recomputed one token at a time: position counts real tokens only, sequence is the row of the batch.

    ``cut``: a top-p of the caller's own, which comes before the temperature.
    """
    target, draft = pair()
    prompt = models.prompts(3, 9, seed=3, vocab=VOCAB)
    assert (prompt["attention_mask"] == 0).any()
    options = {"temperature": 2.5, "top_k": 9} if cut else {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
    first = [transformers.TopPLogitsWarper(cut)] if cut else []
    source = {} if config is None else {"assistant_model": draft, "graph_config": config}
    seed = 2**63 + 12345
    out = gsd.generate(
        target, **prompt, **source, do_sample=True, seed=seed, max_new_tokens=12, logits_processor=first, **options
    )
    for row in range(3):
        text = out[row, int((prompt["attention_mask"][row] == 0).sum()) :]
        with torch.no_grad():
            logits = target(text[None]).logits[0].float()
        for position in range(len(text) - 12, len(text)):
            scores = transformers.LogitsProcessorList(first)(text[None], logits[None, position - 1])
            scores = transformers_warpers(options)(text[None], scores).log_softmax(-1)
            key = (torch.tensor(seed - 2**64), torch.tensor([position]), torch.tensor([row]))
            assert int(text[position]) == int((scores + philox.gumbel_noise(*key, VOCAB)).argmax()), (row, position)


def test_rows_of_a_batch_keep_their_noise():
    """Noise goes by row and real position: independent of padding, of other rows' lengths, of who has finished."""
    target, draft = pair()
    prompt = models.prompts(3, 9, seed=3, vocab=VOCAB)
    assert (prompt["attention_mask"] == 0).any()
    arguments = {"do_sample": True, "seed": 5, "top_k": 0, "max_new_tokens": 12}
    together = gsd.generate(target, **prompt, assistant_model=draft, graph_config="graph", **arguments)
    wider = {  # more padding changes nothing
        "input_ids": torch.nn.functional.pad(prompt["input_ids"], (4, 0)),
        "attention_mask": torch.nn.functional.pad(prompt["attention_mask"], (4, 0)),
    }
    shifted = gsd.generate(target, **wider, assistant_model=draft, graph_config="tree", **arguments)
    assert torch.equal(shifted[:, 4:], together)
    first = gsd.generate(target, prompt["input_ids"][:1], assistant_model=draft, graph_config="graph", **arguments)
    assert torch.equal(first, together[:1])
    stopped = int(together[1, 11])  # the others go on as they did
    eos = gsd.generate(target, **prompt, assistant_model=draft, graph_config="graph", eos_token_id=stopped, **arguments)
    for row in range(3):
        new = together[row, 9:].tolist()
        end = new.index(stopped) + 1 if stopped in new else len(new)
        assert eos[row, 9 : 9 + end].tolist() == new[:end]


UNFUSED = [
    {"typical_p": 0.7},
    {"eta_cutoff": 0.02},
    {"epsilon_cutoff": 0.03},
    {"renormalize_logits": True, "top_k": 9},
    {"top_h": 0.5},
    {"top_p": 0.9, "typical_p": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"watermarking_config": {"bias": 2.0, "seeding_scheme": "lefthash", "context_width": 1}},
]


@pytest.mark.parametrize("options", UNFUSED, ids=lambda o: next(iter(o)))
def test_other_processors_go_through_the_walk(options):
    """They equal plain decoding, and what was picked is what transformers' own processors leave."""
    target, draft = pair()
    options = {"top_k": 0, **options}
    if "watermarking_config" in options:
        options["watermarking_config"] = transformers.WatermarkingConfig(**options["watermarking_config"])
    prompt = models.prompts(2, 7, seed=4, vocab=VOCAB)
    arguments = {**prompt, "do_sample": True, "max_new_tokens": 12, "temperature": 1.1, **options}
    config = transformers.GenerationConfig(
        **{**target.generation_config.to_dict(), **options, "do_sample": True, "temperature": 1.1}
    )
    for seed in range(4):
        outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        plain = gsd.generate(target, **arguments, seed=seed, **outputs)
        out = gsd.generate(target, assistant_model=draft, graph_config="tree", seed=seed, **arguments, **outputs)
        assert out.sequences.tolist() == plain.sequences.tolist()
        processors = target._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=7,
            encoder_input_ids=prompt["input_ids"],
            device="cpu",
            model_kwargs={"attention_mask": prompt["attention_mask"]},
        )
        for step, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
            theirs = processors(out.sequences[:, : 7 + step], logits.clone())
            torch.testing.assert_close(scores, theirs, rtol=1e-5, atol=1e-4)
            picked = theirs.gather(1, out.sequences[:, 7 + step, None])
            assert (picked > -torch.inf).all()
    assert out.stats.tokens_per_step > 1.0
