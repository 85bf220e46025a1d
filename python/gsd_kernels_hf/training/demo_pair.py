"""Train the demo pair: a small Llama target and a smaller draft distilled from it, on Python's standard library.

    python -m gsd_kernels_hf.training.demo_pair --out pair

reads the ``*.py`` files of the running interpreter's standard library, trains a byte-level BPE tokenizer and the
target, lets the target write some text, distils the draft on both, trains heads for the target, and leaves in
``pair/demo_pair`` what this package ships: ``target/``, ``draft/``, ``heads/``, ``prompts.json``, ``sources.json`` and
a model card with the measured numbers. Every stage resumes from ``pair/work``, so an interrupted run continues where it
stopped.

On Linux, ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=268435456`` in the
environment saves about a tenth of the time on a CPU: activations are then neither mapped anew nor in small pages.
On a machine that others use too, ``OMP_WAIT_POLICY=passive`` saves far more.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import platform
import shutil
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from ..sources.heads import CONFIG_FILE, WEIGHTS_FILE
from .heads import train_heads
from .job import TrainingOptions
from .loop import Budget, Checkpoints, Interval, Record, RunFolder, Streams, build_optimizers, train
from .text import HELD_OUT_BLOCKS, PICKED_TEXTS, PICKED_TOKENS

SEED = 2407
VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"

#: Whole files that neither the tokenizer nor the models see before evaluation.
HELD_OUT = (
    "asyncio/queues.py",
    "base64.py",
    "bdb.py",
    "calendar.py",
    "cmd.py",
    "collections/__init__.py",
    "configparser.py",
    "contextlib.py",
    "csv.py",
    "difflib.py",
    "email/message.py",
    "filecmp.py",
    "fractions.py",
    "ftplib.py",
    "functools.py",
    "graphlib.py",
    "heapq.py",
    "html/parser.py",
    "http/cookies.py",
    "json/decoder.py",
    "json/encoder.py",
    "logging/handlers.py",
    "pprint.py",
    "queue.py",
    "sched.py",
    "shelve.py",
    "shlex.py",
    "string.py",
    "tempfile.py",
    "textwrap.py",
    "urllib/parse.py",
    "xml/dom/minidom.py",
)

#: Left out altogether: other people's packages, tables and deliberately undecodable text, and what differs by machine.
EXCLUDED_PARTS = frozenset({"site-packages", "dist-packages", "__pycache__", "ensurepip", "encodings", "pydoc_data",
                            "encoded_modules", "cjkencodings", "lib2to3"})  # fmt: skip
#: Too like sunau.py and process.py to be evaluated on, and not trained on either.
EXCLUDED_FILES = frozenset({"wave.py", "concurrent/futures/thread.py"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "bad_coding", "badsyntax", "bad_")

TARGET_CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DRAFT_CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}

TARGET_BATCH, DRAFT_BATCH = 8192, 4096  # tokens a step
#: (share of the run, sequence length): short sequences first, because attention costs most on a CPU.
TARGET_CURRICULUM = ((0.62, 256), (0.92, 512), (1.0, 1024))
DRAFT_CURRICULUM = ((0.69, 512), (1.0, 1024))
#: The draft learns from so many windows (library, tests, the target's own text) of each length, on which the target is
#: asked once: its most likely tokens and their probabilities are kept, so that a step costs no pass of the target.
LABEL_WINDOWS = {512: (3200, 600, 1000), 1024: (560, 90, 250)}
LABEL_TOP = 8
#: Share of each batch that comes from library code; the rest is from its test suites.
LIBRARY_SHARE = 0.6
GENERATED_PROMPT, GENERATED_LENGTH, GENERATED_BATCH = 64, 256, 256
EVALUATION_CONTEXT, EVALUATION_STRIDE = 1024, 512
CONTINUATION_LENGTH = 128
PROMPT_TOKENS = (60, 150)
#: (file, first line, last line) of the text whose bits per byte are shipped, so that a loaded pair can be checked.
EXCERPT = ("textwrap.py", 100, 180)
HEADS, HEAD_BATCH, HEAD_LENGTH, HEAD_RATE = 4, 4, 256, 1e-2
#: Share of ``--minutes`` that the target gets.
TARGET_SHARE = 0.74


# ---------------------------------------------------------------- text


@dataclass(frozen=True)
class SourceFile:
    """One source file: its path below the standard library, its text and the SHA-256 of its bytes."""

    name: str
    text: str
    sha256: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite."""
        return any(part in ("test", "tests", "idle_test") for part in Path(self.name).parts)


def stdlib_sources() -> list[SourceFile]:
    """Return the standard library's readable Python files, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if (
            EXCLUDED_PARTS.intersection(relative.parts)
            or relative.as_posix() in EXCLUDED_FILES
            or any(part.startswith(EXCLUDED_PREFIXES) for part in relative.parts)
        ):
            continue
        data = path.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        sources.append(SourceFile(relative.as_posix(), text.replace("\r\n", "\n"), hashlib.sha256(data).hexdigest()))
    return sources


def split_sources(sources: list[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return (training files, held-out files)."""
    names = set(HELD_OUT)
    held_out = [source for source in sources if source.name in names]
    if missing := names.difference(source.name for source in held_out):
        raise FileNotFoundError(f"held-out modules not in this standard library: {sorted(missing)}")
    return [source for source in sources if source.name not in names], held_out


def sources_digest(sources: list[SourceFile]) -> str:
    """Return one SHA-256 over the sorted per-file hashes."""
    return hashlib.sha256("\n".join(sorted(source.sha256 for source in sources)).encode()).hexdigest()


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer; like Llama's it puts the begin-of-text token first, and no end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    pattern = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def encode_files(tokenizer: PreTrainedTokenizerFast, sources: list[SourceFile]) -> np.ndarray:
    """Encode files into one stream, each between begin-of-text and end-of-text."""
    rows = tokenizer([source.text for source in sources])["input_ids"]
    return np.concatenate([np.asarray([*row, tokenizer.eos_token_id], dtype=np.uint16) for row in rows])


Labels = dict[str, np.ndarray]


class LabelledWindows:
    """Windows with the target's most likely tokens at each position; batches are a pure function of their step too."""

    def __init__(self, labels: dict[int, Labels], seed: int, tokens: int) -> None:
        self.labels = labels
        self.seed = seed
        self.tokens = tokens

    def batch(self, step: int, length: int) -> tuple[torch.Tensor, ...]:
        """Return (windows, likely token ids, their probabilities)."""
        labels, rng = self.labels[length], np.random.default_rng([self.seed, step])
        rows = rng.choice(len(labels["windows"]), self.tokens // length, replace=False)
        windows, ids, probabilities = (labels[name][rows] for name in ("windows", "ids", "probabilities"))
        return (
            torch.from_numpy(windows.astype(np.int64)),
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(probabilities.astype(np.float32)),
        )


# ---------------------------------------------------------------- models and optimisation


def build_model(shape: dict[str, int], tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a freshly initialised Llama with tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **shape,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.num_hidden_layers))
    return model


LossFunction = Callable[..., torch.Tensor]


def optimise(
    name: str,
    model: LlamaForCausalLM,
    loss_function: LossFunction,
    streams: Streams | LabelledWindows,
    curriculum: tuple[tuple[float, int], ...],
    budget: Budget,
    checkpoints: Path,
) -> Record:
    """Train until the budget is used; continue from ``checkpoints`` if there are any."""

    def losses(step: int, progress: float) -> list[torch.Tensor]:
        length = next(length for end, length in curriculum if progress < end)
        return [loss_function(*streams.batch(step, length))]

    return train(
        name,
        model,
        losses,
        build_optimizers(model, matrix_lr=4e-3, lr=3e-3),
        budget,
        Checkpoints(checkpoints),
        tokens_per_step=streams.tokens,
    )


def autocast() -> torch.autocast:
    """Matrix products in bfloat16, everything that sums in float32."""
    return torch.autocast("cpu", torch.bfloat16)


def cross_entropy_loss(model: LlamaForCausalLM, compiled: bool) -> LossFunction:
    """Return the ordinary next-token loss."""

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with autocast():
            logits = model(tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return torch.compile(loss, dynamic=False) if compiled else loss


def distillation_loss(model: LlamaForCausalLM, compiled: bool) -> LossFunction:
    """Return the cross-entropy with the target's distribution, its unlikely tokens taken together as one."""

    def loss(tokens: torch.Tensor, ids: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        with autocast():
            logits = model(tokens[:, :-1], use_cache=False).logits
        likely = F.log_softmax(logits.float(), dim=-1).gather(-1, ids)
        rest = torch.log1p(-likely.exp().sum(-1).clamp(max=1 - 1e-4))
        return -((probabilities * likely).sum(-1) + (1 - probabilities.sum(-1)).clamp(min=0) * rest).mean()

    return torch.compile(loss, dynamic=False) if compiled else loss


@torch.no_grad()
def label_windows(target: LlamaForCausalLM, corpus: list[np.ndarray], length: int, seed: int) -> Labels:
    """Draw windows that do not overlap from (library, tests, generated) and keep the target's likely tokens."""
    target = target.to(torch.bfloat16)
    rng = np.random.default_rng(seed)
    drawn = []
    for stream, count in zip(corpus, LABEL_WINDOWS[length], strict=True):
        starts = length * rng.permutation((len(stream) - 1) // length)[:count]
        drawn += [stream[start : start + length + 1] for start in starts]
    windows = np.stack(drawn)
    ids, probabilities = [], []
    for batch in tqdm(np.array_split(windows, len(windows) * length // 8192), desc=f"target on {length}", unit="batch"):
        logits = target(torch.from_numpy(batch[:, :-1].astype(np.int64)), use_cache=False).logits
        top = logits.topk(LABEL_TOP, dim=-1)
        normaliser = logits.float().logsumexp(-1, keepdim=True)
        ids.append(top.indices.numpy().astype(np.uint16))
        probabilities.append((top.values.float() - normaliser).exp().numpy().astype(np.float16))
    return {"windows": windows, "ids": np.concatenate(ids), "probabilities": np.concatenate(probabilities)}


@torch.no_grad()
def generate_text(model: LlamaForCausalLM, streams: Streams, batches: int) -> np.ndarray:
    """Let the target continue training text, half greedily and half at temperature 0.8; return one token stream.

    Greedy rows come in even batches. The prompt stays in front of each continuation.
    """
    model = model.to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    rows = []
    torch.manual_seed(SEED)
    for index in tqdm(range(batches), desc="target's own text", unit="batch"):
        windows = torch.cat([streams.batch(10**6 + 16 * index + k, 512)[0] for k in range(GENERATED_BATCH // 16)])
        sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0} if index % 2 else {"do_sample": False}
        tokens = model.generate(
            windows[:, :GENERATED_PROMPT],
            attention_mask=torch.ones_like(windows[:, :GENERATED_PROMPT]),
            max_length=GENERATED_LENGTH,
            **sampling,
        )
        rows.append(tokens.numpy().astype(np.uint16))
    stream = np.concatenate([row.flatten() for row in rows])
    return stream[stream != model.config.pad_token_id]


# ---------------------------------------------------------------- stages


def save_pair_member(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary checkpoint folder: float16 weights, config and tokenizer."""
    model.config.name_or_path = ""
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_member(folder: Path) -> LlamaForCausalLM:
    """Load a stored model in float32, ready for evaluation."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prepare(work: Path) -> tuple[PreTrainedTokenizerFast, list[SourceFile], list[SourceFile], dict[str, np.ndarray]]:
    """Read the sources, train the tokenizer and encode the training text (kept in ``work``)."""
    training, held_out = split_sources(stdlib_sources())
    tokenizer_folder, encoded = work / "tokenizer", work / "tokens.npz"
    if not tokenizer_folder.exists():
        train_tokenizer([source.text for source in training]).save_pretrained(tokenizer_folder)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    if not encoded.exists():
        np.savez(
            encoded,
            library=encode_files(tokenizer, [source for source in training if not source.is_test]),
            tests=encode_files(tokenizer, [source for source in training if source.is_test]),
        )
    return tokenizer, training, held_out, dict(np.load(encoded))


def train_pair(work: Path, target_budget: Budget, draft_budget: Budget, batches: int, compiled: bool) -> None:
    """Run the training stages that ``work`` does not hold yet: target, the target's own text, draft."""
    tokenizer, _, _, tokens = prepare(work)
    corpus = [(LIBRARY_SHARE, tokens["library"]), (1 - LIBRARY_SHARE, tokens["tests"])]
    records_file = work / "records.json"
    records = json.loads(records_file.read_text()) if records_file.exists() else {}

    def note(stage: str, what: dict[str, float]) -> None:
        records[stage] = what
        records_file.write_text(json.dumps(records, indent=1))

    if not (work / "target").exists():
        model = build_model(TARGET_CONFIG, tokenizer, SEED)
        if compiled:
            model.set_attn_implementation("eager")
        loss = cross_entropy_loss(model, compiled)
        streams = Streams(corpus, SEED, TARGET_BATCH)
        record = optimise("target", model, loss, streams, TARGET_CURRICULUM, target_budget, work / "target-checkpoints")
        note("target", asdict(record) | {"threads": torch.get_num_threads()})
        save_pair_member(model, tokenizer, work / "target")

    generated_file = work / "generated.npy"
    if not generated_file.exists():
        model = load_member(work / "target")
        began = time.monotonic()
        generated = generate_text(model, Streams(corpus, SEED + 1, TARGET_BATCH), batches)
        np.save(generated_file, generated)
        note("generated", {"tokens": len(generated), "seconds": time.monotonic() - began})

    corpus = [tokens["library"], tokens["tests"], np.load(generated_file)]
    for length in LABEL_WINDOWS:
        if not (file := work / f"labels-{length}.npz").exists():
            np.savez(file, **label_windows(load_member(work / "target"), corpus, length, SEED))

    if not (work / "draft").exists():
        model = build_model(DRAFT_CONFIG, tokenizer, SEED)
        if compiled:
            model.set_attn_implementation("eager")
        loss = distillation_loss(model, compiled)
        labels = {length: dict(np.load(work / f"labels-{length}.npz")) for length in LABEL_WINDOWS}
        windows = LabelledWindows(labels, SEED, DRAFT_BATCH)
        record = optimise("draft", model, loss, windows, DRAFT_CURRICULUM, draft_budget, work / "draft-checkpoints")
        note("draft", asdict(record) | {"threads": torch.get_num_threads()})
        save_pair_member(model, tokenizer, work / "draft")


def train_pair_heads(target: Path, out: Path, budget: Budget) -> dict[str, Any]:
    """Train heads for the target in one folder into another, on the library files; the report of the training.

    It goes on from where it stopped, and is not repeated.
    """
    root = Path(sysconfig.get_path("stdlib"))
    training, held_out = split_sources(stdlib_sources())
    options = TrainingOptions(
        target=str(target),
        text=[root / source.name for source in training if not source.is_test],
        held_out_text=[root / source.name for source in held_out],
        out=out,
        steps=budget.steps,
        minutes=budget.minutes,
        batch=HEAD_BATCH,
        length=HEAD_LENGTH,
        micro_batch=None,
        lr=HEAD_RATE,
        warmup=0.02,
        decay=0.6,
        weight_decay=0.0,
        sequence_level=0.5,
        token_level=1.0,
        own_sequences=None,
        seed=SEED,
        dtype=torch.float32,
        device=torch.device("cpu"),
        checkpoint_every=Interval(seconds=60),
    )
    return train_heads(HEADS, 1, options)


# ---------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Evaluation:
    """What both models do on the held-out files."""

    files: int
    tokens: int
    bytes: int
    target_loss: float
    target_bits_per_byte: float
    draft_loss: float
    draft_bits_per_byte: float
    agreement: float


def negative_log_likelihood(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return the sum over ``tokens`` [n] of -log p, in nats, from the logits [n, vocabulary] that predict them."""
    return F.cross_entropy(logits.double(), tokens, reduction="sum").item()


@torch.no_grad()
def evaluate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: list[SourceFile]
) -> Evaluation:
    """Score whole files: every token once, after at least ``EVALUATION_STRIDE`` others where the file has them.

    The agreement is the share of positions where both models' most likely tokens are the same.
    """
    count = size = agreed = 0
    target_nats = draft_nats = 0.0
    for source in tqdm(held_out, desc="held-out files", unit="file"):
        tokens = torch.tensor(tokenizer(source.text)["input_ids"])
        size += len(source.text.encode())
        scored = 1
        while scored < len(tokens):
            start = 0 if scored == 1 else scored - EVALUATION_STRIDE
            window = tokens[start : start + EVALUATION_CONTEXT + 1]
            skip = scored - start - 1
            wanted = window[skip + 1 :]
            ours, theirs = (model(window[None, :-1], use_cache=False).logits[0, skip:] for model in (target, draft))
            target_nats += negative_log_likelihood(ours, wanted)
            draft_nats += negative_log_likelihood(theirs, wanted)
            agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            count += len(wanted)
            scored = start + len(window)
    return Evaluation(
        files=len(held_out),
        tokens=count,
        bytes=size,
        target_loss=target_nats / count,
        target_bits_per_byte=target_nats / math.log(2) / size,
        draft_loss=draft_nats / count,
        draft_bits_per_byte=draft_nats / math.log(2) / size,
        agreement=agreed / count,
    )


@torch.no_grad()
def continuation_agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> float:
    """Return the share of the target's own greedy tokens, after each text, that the draft would also have picked."""
    agreed = count = 0
    for text in tqdm(texts, desc="continuations", unit="prompt"):
        prompt = tokenizer(text, return_tensors="pt")
        length = prompt["input_ids"].shape[1]
        tokens = target.generate(**prompt, max_new_tokens=CONTINUATION_LENGTH, do_sample=False)
        picked = draft(tokens[:, :-1]).logits[0, length - 1 :].argmax(-1)
        agreed += int((picked == tokens[0, length:]).sum())
        count += len(picked)
    return agreed / count


# ---------------------------------------------------------------- prompts


def _spans(source: SourceFile) -> list[tuple[int, int]]:
    """Return (first line, last line) of each function's and class's header with its docstring, in order."""
    spans = []
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            body = node.body[0]
            documented = ast.get_docstring(node) is not None
            last = body.end_lineno if documented else body.lineno - 1
            if last >= node.lineno:
                spans.append((node.lineno, last))
    return sorted(spans)


def _text(source: SourceFile, first: int, last: int) -> str:
    return "\n".join(source.text.split("\n")[first - 1 : last]).rstrip()


def code_prompt(source: SourceFile, tokenizer: PreTrainedTokenizerFast) -> dict[str, object] | None:
    """Cut a prompt of a natural length that ends after a header or docstring, from the middle of the file's choices."""
    low, high = PROMPT_TOKENS
    lines = source.text.split("\n")
    choices = []
    for first, last in _spans(source):
        while first > 1:
            tokens = len(tokenizer(_text(source, first, last))["input_ids"])
            if tokens >= low + 20 and lines[first - 1].strip():
                break
            first -= 1
        if low <= len(tokenizer(_text(source, first, last))["input_ids"]) <= high:
            choices.append((first, last))
    if not choices:
        return None
    first, last = choices[len(choices) // 2]
    return {"kind": "code", "file": source.name, "lines": [first, last], "text": _text(source, first, last)}


def copy_prompt(source: SourceFile, tokenizer: PreTrainedTokenizerFast) -> dict[str, object] | None:
    """Write a short function of the file twice, then its first line: what follows has been said before."""
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 4:
            block = _text(source, node.lineno, node.end_lineno)
            text = f"{block}\n\n{block}\n\n" + _text(source, node.lineno, node.lineno)
            low, high = PROMPT_TOKENS
            if low <= len(tokenizer(text)["input_ids"]) <= high:
                return {
                    "kind": "copy",
                    "file": source.name,
                    "lines": [node.lineno, node.end_lineno],
                    "text": text,
                }
    return None


def cut_prompts(held_out: list[SourceFile], tokenizer: PreTrainedTokenizerFast) -> list[dict[str, object]]:
    """Return one code prompt per held-out file, and a copy prompt from every third, each with a name."""
    found = [code_prompt(source, tokenizer) for source in held_out]
    found += [copy_prompt(source, tokenizer) for source in held_out[::3]]
    prompts = []
    for prompt in found:
        if prompt is not None:
            stem = prompt["file"].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            prompts.append({"name": f"{prompt['kind']}-{stem}"} | prompt)
    return prompts


# ---------------------------------------------------------------- the shipped folder

CARD = """\
# The demo pair

A small Llama and a draft distilled from it, so that speculative decoding can be tried, tested and measured without
downloading anything. They continue Python source; they are not assistants, and what they write is not correct code.
Written by `python -m gsd_kernels_hf.training.demo_pair`, every number measured by it on the float16 weights as stored,
computed in float32.

| | target | draft |
|---|---|---|
| parameters | {target_parameters:,} | {draft_parameters:,} ({ratio:.1f}× fewer) |
| layers × width (MLP) | {target_size} | {draft_size} |
| query / key-value heads × size | {target_heads} | {draft_heads} |
| held-out loss, nats per token | {target_loss:.3f} | {draft_loss:.3f} |
| held-out bits per byte | **{target_bpb:.3f}** | {draft_bpb:.3f} |
| training | {target_training} | {draft_training} |

Both: Llama architecture, tied embeddings, a byte-level BPE vocabulary of {vocabulary}, {positions} positions
(rotary; trained on up to {trained_length}).

**The draft's greedy agreement with the target**: {agreement:.3f} of all positions of the held-out files;
{continuation:.3f} of the target's own greedy continuations ({continuation_length} tokens after each code prompt of
`prompts.json`), {copy_continuation:.3f} after its copy prompts.

{heads}

## How it was made

- Text: the standard library of Python {python}, {files} files, {megabytes:.1f} MB; {held_out_files} further files held
  out. Digest of all files (SHA-256 over the sorted hashes in `sources.json`): `{digest}`.
  Left out: encodings, pydoc topics, lib2to3, ensurepip, site-packages, files that are not UTF-8, build configuration,
  and two modules that are near copies of others (`wave`, `concurrent.futures.thread`).
- Target: cross-entropy on {tokens_million:.1f} M tokens, library code drawn {library_share:.0%} of the time and test
  suites the rest. Draft: cross-entropy with the target's own distribution (its {label_top} likeliest tokens, the
  others taken together) on {label_tokens:.1f} M tokens of that text and of {generated_tokens} tokens that the target
  wrote itself (half greedily, half at temperature 0.8).
- Muon for the layers' matrices, AdamW for the rest; {target_batch} and {draft_batch} tokens a step; a short warm-up,
  a plateau, then 60% of the run straight down to zero. Matrix products in bfloat16. {threads} CPU threads of a shared
  machine; writing text took the target another {generated_minutes:.0f} min.
- Evaluation: whole files after the begin-of-text token, windows of {context} tokens moved by {stride}, every token
  scored once ({evaluated_tokens:,} tokens, {evaluated_bytes:,} bytes).

To run it again (same files, tokenizer, seeds and batches; it comes close, not to the bit: the schedules follow the
clock in a run by `--minutes` and the steps in a run by `--steps`, and another machine rounds differently):

    python -m gsd_kernels_hf.training.demo_pair --out pair --steps {target_steps} {draft_steps} {head_steps}

## Held-out files

{held_out}

`prompts.json` holds {code_prompts} prompts cut from them and {copy_prompts} that repeat a function, chosen by the
recipe before any benchmark.

## Licence

The training text, and the excerpts of it in `prompts.json`, are part of Python: Copyright © 2001 onwards Python
Software Foundation; All Rights Reserved; used under the PSF License Version 2 (PSF-2.0), whose text is in
`PYTHON-LICENSE.txt`. The weights and tokenizers are licensed like this package, under Apache-2.0, as far as they are
subject to any rights of its authors.
"""


HEADS_CARD = """\
## Heads

`heads/` lets the target draft for itself: {count} heads of one residual block each ({parameters:,} parameters), which
guess the tokens after the next one from the target's last hidden state. How often each head's first guess is right:

| | {columns} | accepted a step |
|---|{rule}---|
| held-out text | {text} | |
| the target's own greedy text | {own} | {accepted:.2f} |
| before training: text | {text_before} | |
| before training: own text | {own_before} | {accepted_before:.2f} |

`accepted a step`: of one guess per head, as a chain. Measured on {windows} windows of {length} tokens of the held-out
files and {tokens} greedy tokens after the beginnings of {texts} of them. Trained by `gsd-kernels train-heads` on the
library files alone, half of the windows continued by the target itself ({own_tokens:,} tokens), on the target's
distributions: {training_tokens:.1f} M tokens, {steps} steps, {minutes:.0f} min."""


def heads_card(report: dict[str, Any]) -> str:
    """The card's section on the heads, from the report of their training."""
    options, before, after, training = (report[name] for name in ("options", "before", "after", "training"))

    def row(values: list[float]) -> str:
        return " | ".join(f"{value:.3f}" for value in values)

    count = options["heads"]
    return HEADS_CARD.format(
        count=count,
        parameters=count * TARGET_CONFIG["hidden_size"] * (TARGET_CONFIG["hidden_size"] + 1),
        columns=" | ".join(f"head {k}" for k in range(count)),
        rule="---|" * count,
        text=row(after["accuracy"]),
        own=row(after["continuation_accuracy"]),
        text_before=row(before["accuracy"]),
        own_before=row(before["continuation_accuracy"]),
        accepted=after["accepted"],
        accepted_before=before["accepted"],
        windows=HELD_OUT_BLOCKS,
        length=options["length"],
        texts=PICKED_TEXTS,
        tokens=PICKED_TOKENS,
        own_tokens=report["own_text"]["tokens"],
        training_tokens=training["tokens"] / 1e6,
        steps=training["steps"],
        minutes=(training["seconds"] + report["own_text"]["seconds"]) / 60,
    )


def write_heads(trained: Path, folder: Path) -> None:
    """Copy what is shipped of trained heads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        shutil.copyfile(trained / name, folder / name)


def write_card(folder: Path, values: dict[str, object]) -> None:
    """Fill in the model card."""
    (folder / "README.md").write_text(CARD.format(**values), encoding="utf-8")


def write_json(file: Path, content: object, indent: int | None = 1) -> None:
    """Write UTF-8 JSON with a final newline."""
    file.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def strip_local_settings(folder: Path) -> None:
    """Remove what the tokenizer noted about how it was loaded here, and let everyone read the weights."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only")}, 2)
    (folder / "model.safetensors").chmod(0o644)


def assemble(work: Path, folder: Path) -> None:
    """Write the folder that is shipped, and measure what its card says."""
    tokenizer, training, held_out, tokens = prepare(work)
    records = json.loads((work / "records.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("target", "draft"):
        shutil.copytree(work / name, folder / name, dirs_exist_ok=True)
        strip_local_settings(folder / name)
    write_heads(work / "heads", folder / "heads")
    head_report = json.loads((work / "heads" / RunFolder.REPORT).read_text(encoding="utf-8"))
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if licence.exists():
        shutil.copyfile(licence, folder / "PYTHON-LICENSE.txt")
    target, draft = load_member(folder / "target"), load_member(folder / "draft")

    prompts = cut_prompts(held_out, tokenizer)
    code, copies = ([prompt["text"] for prompt in prompts if prompt["kind"] == kind] for kind in ("code", "copy"))
    name, first, last = EXCERPT
    excerpt = _text(next(source for source in held_out if source.name == name), first, last)
    measured = evaluate(target, draft, tokenizer, [SourceFile(name, excerpt, "")])
    write_json(
        folder / "prompts.json",
        {
            "prompts": prompts,
            "excerpt": {
                "file": name,
                "lines": [first, last],
                "bits_per_byte": round(measured.target_bits_per_byte, 4),
                "text": excerpt,
            },
        },
    )
    write_json(
        folder / "sources.json",
        {
            "python": platform.python_version(),
            "digest": sources_digest(training + held_out),
            "held_out": {source.name: source.sha256 for source in held_out},
            "training": {source.name: source.sha256 for source in training},
        },
        indent=0,
    )

    measured = evaluate(target, draft, tokenizer, held_out)
    target_parameters, draft_parameters = target.num_parameters(), draft.num_parameters()
    values = {
        "target_parameters": target_parameters,
        "draft_parameters": draft_parameters,
        "ratio": target_parameters / draft_parameters,
        "vocabulary": VOCAB_SIZE,
        "positions": MAX_POSITIONS,
        "trained_length": max(length for _, length in TARGET_CURRICULUM),
        "target_loss": measured.target_loss,
        "draft_loss": measured.draft_loss,
        "target_bpb": measured.target_bits_per_byte,
        "draft_bpb": measured.draft_bits_per_byte,
        "agreement": measured.agreement,
        "continuation": continuation_agreement(target, draft, tokenizer, code),
        "copy_continuation": continuation_agreement(target, draft, tokenizer, copies),
        "continuation_length": CONTINUATION_LENGTH,
        "python": platform.python_version(),
        "files": len(training),
        "megabytes": sum(len(source.text.encode()) for source in training) / 1e6,
        "held_out_files": len(held_out),
        "digest": sources_digest(training + held_out),
        "tokens_million": sum(len(stream) for stream in tokens.values()) / 1e6,
        "library_share": LIBRARY_SHARE,
        "label_top": LABEL_TOP,
        "label_tokens": sum(length * sum(counts) for length, counts in LABEL_WINDOWS.items()) / 1e6,
        "generated_tokens": f"{records['generated']['tokens']:,}",
        "generated_minutes": records["generated"]["seconds"] / 60,
        "target_batch": TARGET_BATCH,
        "draft_batch": DRAFT_BATCH,
        "threads": records["target"]["threads"],
        "context": EVALUATION_CONTEXT,
        "stride": EVALUATION_STRIDE,
        "evaluated_tokens": measured.tokens,
        "evaluated_bytes": measured.bytes,
        "held_out": ", ".join(f"`{name}`" for name in HELD_OUT),
        "code_prompts": len(code),
        "copy_prompts": len(copies),
        "heads": heads_card(head_report),
        "head_steps": head_report["training"]["steps"],
    }
    for member, shape in (("target", TARGET_CONFIG), ("draft", DRAFT_CONFIG)):
        record = records[member]
        values |= {
            f"{member}_size": f"{shape['num_hidden_layers']} × {shape['hidden_size']} ({shape['intermediate_size']})",
            f"{member}_heads": f"{shape['num_attention_heads']} / {shape['num_key_value_heads']} × {shape['head_dim']}",
            f"{member}_steps": record["steps"],
            f"{member}_training": f"{record['tokens'] / 1e6:.1f} M tokens, {record['steps']} steps, "
            f"{record['seconds'] / 60:.0f} min"
            + "".join(f", extended at step {step}" for step in record.get("extended_at", [])),
        }
    write_card(folder, values)


def main(arguments: list[str] | None = None) -> None:
    """Run the recipe from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gsd_kernels_hf.training.demo_pair", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the pair, and for work in progress")
    parser.add_argument("--minutes", type=float, default=43, help="wall time for both models (default: %(default)s)")
    parser.add_argument("--head-minutes", type=float, default=15, help="the same for the heads (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, nargs=3, metavar=("TARGET", "DRAFT", "HEADS"), help="train by steps instead"
    )
    parser.add_argument("--batches", type=int, default=8, help="batches of text from the target (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--no-compile", action="store_true", help="where torch.compile has no C++ compiler")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    if options.steps:
        target_budget, draft_budget, head_budget = (Budget(steps=steps) for steps in options.steps)
    else:
        head_budget = Budget(minutes=options.head_minutes)
        target_budget = Budget(minutes=TARGET_SHARE * options.minutes)
        draft_budget = Budget(minutes=(1 - TARGET_SHARE) * options.minutes)
    work = options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    train_pair(work, target_budget, draft_budget, options.batches, compiled=not options.no_compile)
    train_pair_heads(work / "target", work / "heads", head_budget)
    assemble(work, options.out / "demo_pair")


if __name__ == "__main__":
    main()
