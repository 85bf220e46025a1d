"""One planted fault a row: the file, the text that is replaced (it stands there once), by what, what breaks, the tests."""

# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    breaks: str
    tests: str  # pytest's arguments; some of these tests must fail


HF = "python/gsd_kernels_hf/"
LOCKSTEP, SAMPLING, CRITERIA = (HF + f"acceptance/{name}.py" for name in ("lockstep", "sampling", "criteria"))
CACHE, MASKS, FACTS = (HF + f"model/{name}.py" for name in ("cache", "masks", "facts"))
STREAMING, STOPS, KEY, OUTPUT = (HF + f"engine/{n}.py" for n in ("streaming", "stop_strings", "session_key", "output"))
VERIFY, MERGE = (f"gsd_kernels/ops/{name}/reference.py" for name in ("verify", "merge"))
T_LOCKSTEP, T_SAMPLING = "tests/acceptance/test_lockstep.py", "tests/acceptance/test_sampling.py"
T_STOPS, T_STREAM = "tests/engine/test_stop_strings.py", "tests/engine/test_streaming.py"
T_VERIFY, T_MERGE, T_CHANGES = "tests/ops/test_verify.py", "tests/ops/test_merge.py", "tests/model/test_changes.py"
T_CACHE, T_CHUNKS = "tests/model/test_cache.py", "tests/model/test_chunks.py"
T_STALE, T_LENGTHS = "tests/engine/test_stale.py", "tests/engine/test_lengths.py"

# fmt: off
MUTANTS = [Mutant(*row) for row in (
    (VERIFY, " & ~ends & ", " & ", "verify: text goes on behind an end-of-text token", T_VERIFY),
    (VERIFY, "(depths < remaining[:, None])", "(depths <= remaining[:, None])", "verify: a row beyond the length is accepted", T_VERIFY),
    (VERIFY, "(picked == token_ids)", "(picked >= 0)", "verify: a row is accepted that the target did not pick", T_VERIFY),
    (VERIFY, " & real & ~done[:, None]", " & real", "verify: a finished sequence accepts rows", T_VERIFY),
    (MERGE, "& (nodes > candidates.origins[:, :, None])", "", "merge: a candidate joins an older node, a cycle", T_MERGE),
    (MERGE, "present & ~(same_sibling & earlier).any(-1)", "present", "merge: duplicate siblings both stay", T_MERGE),
    (MERGE, "joinable = _keep_best(joinable, agreement.float())", "pass", "merge: the longest common context does not win", T_MERGE),
    (LOCKSTEP, "self.final_length - self.prompt >= self.room", "self.final_length - self.prompt > self.room", "lockstep: one token beyond the length", T_LOCKSTEP),
    (LOCKSTEP, "torch.where(done, accepted.num_accepted.max(), accepted.num_accepted)", "accepted.num_accepted", "padding: finished sequences commit no padding", T_LOCKSTEP),
    (LOCKSTEP, "depths=torch.where(done, place, rows.depths)", "depths=rows.depths", "positions: padding is read at wrong positions", T_LOCKSTEP),
    (LOCKSTEP, "(self.plan.warpers(self.history, scores),)", "(scores,)", "scores that are returned were not warped", T_LOCKSTEP),
    (LOCKSTEP, "[self.pad if done else next(picked)", "[0 if done else next(picked)", "padding: finished sequences get another token", T_LOCKSTEP),
    (SAMPLING, "_fused_rank(processors[split - 1]) < rank", "_fused_rank(processors[split - 1]) < len(FUSED)", "processors' order: warpers in another order are fused", T_SAMPLING),
    (SAMPLING, "scores.expand(batch, -1))[b : b + 1]", "scores.expand(batch, -1))[:1]", "processors: every sequence gets the first one's", "tests/acceptance"),
    (SAMPLING, "return seed - 2**64 if", "return seed - 2**63 if", "noise keys: a large seed becomes another", T_SAMPLING),
    (CRITERIA, "DRAFT_STREAM, ACCEPT_STREAM = 1, 2", "DRAFT_STREAM, ACCEPT_STREAM = 1, 1", "noise keys: draft and test share a stream", "tests/acceptance/test_noise.py tests/acceptance/test_speculative_sampling.py"),
    (STOPS, "iter(row[-2::-1])", "iter(row[-3::-1])", "stop strings: the token before the last is skipped", T_STOPS),
    (STOPS, "            if found >= len(string):", "            if found > len(string):", "stop strings: an exact end is missed", T_STOPS),
    (STREAMING, "min(growing) if growing else max(map(len, self.texts))", "max(map(len, self.texts))", "streaming: slow sequences are padded before they end", T_STREAM),
    (STREAMING, "if at < len(text) else self.pad", "if at < len(text) else 0", "streaming: padding is another token", T_STREAM),
    (KEY, "tuple(sorted(request.eos_ids))", "()", "caches between calls: a session with other EOS tokens serves", T_STALE + " tests/engine/test_turns.py"),
    (KEY, "tuple(request.plan.warper_arguments.items())", "()", "caches between calls: a session with other warpers serves", T_STALE + " tests/engine/test_turns.py"),
    (OUTPUT, "to(request.input_ids.device, copy=True)", "to(request.input_ids.device)", "output: the returned text is storage of the next call", "tests/engine/test_copies.py tests/engine/test_engine.py"),
    (CACHE, "new[..., : storage.shape[-2], :] = storage", "new[..., : storage.shape[-2] - 1, :] = storage[..., :-1, :]", "resize: the last position is lost when a cache grows", T_CACHE),
    (CACHE, "if not length and isinstance(layer, StateLayer)", "if length and isinstance(layer, StateLayer)", "caches between calls: recurrent states of the last text stay", "tests/engine/test_recurrent.py"),
    (MASKS, "row - position < self.window", "row - position <= self.window", "windows: one position more is seen", T_CHUNKS + " tests/model/test_cache.py"),
    (MASKS, "row // self.chunk == position // self.chunk", "row - position < self.chunk", "windows: a chunk is a sliding window", T_CHUNKS),
    (FACTS, "found = modules, configs, self.code, around, self.ambient", "found = modules, [], self.code, around, self.ambient", "gate: a changed config is not noticed", T_CHANGES),
    (FACTS, "found = modules, configs, self.code, around, self.ambient", "found = modules, configs, self.code, around, ()", "gate: autocast is not noticed", T_CHANGES),
    (FACTS, "                tuple(hooks),", "                (),", "gate: a hook is not noticed", T_CHANGES),
    (FACTS, 'if getattr(answer, "passing", False):', "if False:", "proofs: a passing verdict is kept", "tests/model/test_facts.py tests/model/test_why_not.py"),
)]
# fmt: on
