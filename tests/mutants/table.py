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
HOST, LOCKSTEP, SAMPLING, CRITERIA = (HF + f"acceptance/{name}.py" for name in ("rule", "rule", "sampling", "criteria"))
CACHE, MASKS, FACTS = (HF + f"model/{name}.py" for name in ("cache", "attention", "facts"))
STREAMING, STOPS, KEY, OUTPUT = (HF + f"engine/{n}.py" for n in ("output", "stop_strings", "resolved", "output"))
HISTORY, MEMORY, GRAMMAR, BORDER, FEATURES, LAYOUTS, MTP = (
    HF + f"sources/{name}.py"
    for name in (
        *("history", "memory", "grammar", "border"),
        *("features", "layouts", "feature_drafter"),
    )
)
DECODER = HF + "engine/decoder.py"
VERIFY, MERGE, FLATTEN = (f"gsd_kernels/ops/{name}/reference.py" for name in ("verify", "merge", "flatten"))
VERIFY_H, COMMIT_H, FLATTEN_H, MERGE_H, RANDOM_H = (
    f"csrc/algorithms/{name}.h" for name in ("verify", "commit", "flatten", "merge", "random")
)
T_LOCKSTEP, T_SAMPLING = "tests/acceptance/test_lockstep.py", "tests/acceptance/test_sampling.py"
T_STOPS = T_STREAM = "tests/engine/test_streaming.py"
T_GRAPHS, T_OPS = "tests/ops/test_graph_ops.py", "tests/ops/test_step_ops.py"
T_CHANGES = "tests/model/test_changes.py"
T_MEMORY, T_GRAMMAR, T_BORDER = (
    "tests/sources/test_history.py",
    "tests/acceptance/test_grammar_drafts.py",
    "tests/sources/test_hostile.py",
)
T_ACCEPTED = "tests/demo/test_demo_pair.py tests/sources/test_forwards.py"
T_PADDING = "tests/sources/test_every_source.py -k padding"
T_MODULES, T_ATTENTION = "tests/model/test_modules.py", "tests/model/test_attention.py"
T_TURNS = "tests/engine/test_turns.py"

# fmt: off
MUTANTS = [Mutant(*row) for row in (
    (VERIFY, " & ~ends & ", " & ", "verify: text goes on behind an end-of-text token", T_GRAPHS),
    (VERIFY, "(depths < remaining[:, None])", "(depths <= remaining[:, None])", "verify: a row beyond the length is accepted", T_GRAPHS),
    (VERIFY, "(picked == token_ids)", "(picked >= 0)", "verify: a row is accepted that the target did not pick", T_GRAPHS),
    (VERIFY, " & real & ~done[:, None]", " & real", "verify: a finished sequence accepts rows", T_GRAPHS),
    (MERGE, "& (nodes > candidates.origins[:, :, None])", "", "merge: a candidate joins an older node, a cycle", T_GRAPHS),
    (MERGE, "present & ~(same_sibling & earlier).any(-1)", "present", "merge: duplicate siblings both stay", T_GRAPHS),
    (MERGE, "joinable = _keep_best(joinable, agreement.float())", "pass", "merge: the longest common context does not win", T_OPS + " -k merge"),
    (HOST, "before[b] >= remaining[b]", "before[b] > remaining[b]", "lockstep: one token beyond the length", T_LOCKSTEP),
    (LOCKSTEP, "torch.where(done, accepted.num_accepted.max(), accepted.num_accepted)", "accepted.num_accepted", "padding: finished sequences commit no padding", T_LOCKSTEP),
    (LOCKSTEP, "depths=torch.where(done, place, rows.depths)", "depths=rows.depths", "positions: padding is read at wrong positions", T_LOCKSTEP),
    (HOST, "self.plan.warpers(history, scores.clone()) if \"scores\" in self.noted else scores", "scores", "scores that are returned were not warped", T_LOCKSTEP + " -k warped"),
    (HOST, "[self.pad if self.done[b] else next(picked)", "[0 if self.done[b] else next(picked)", "padding: finished sequences get another token", T_LOCKSTEP),
    (SAMPLING, "_fused_rank(processors[split - 1]) < rank", "_fused_rank(processors[split - 1]) < len(FUSED)", "processors' order: warpers in another order are fused", T_SAMPLING),
    (SAMPLING, "scores.expand(batch, -1))[b : b + 1]", "scores.expand(batch, -1))[:1]", "processors: every sequence gets the first one's", T_LOCKSTEP + " -k built_in"),
    (SAMPLING, "return seed - 2**64 if", "return seed - 2**63 if", "noise keys: a large seed becomes another", T_SAMPLING),
    (CRITERIA, "DRAFT_STREAM, ACCEPT_STREAM = 1, 2", "DRAFT_STREAM, ACCEPT_STREAM = 1, 1", "noise keys: draft and test share a stream", T_SAMPLING),
    (STOPS, "if not last:", "if len(self.pieces) > 3:", "stop strings: after a few tokens nothing ends a text", T_STOPS),
    (STREAMING, "min(growing) if growing else max(map(len, self.texts))", "max(map(len, self.texts))", "streaming: slow sequences are padded before they end", T_STREAM),
    (STREAMING, "if at < len(text) else self.pad", "if at < len(text) else 0", "streaming: padding is another token", T_STREAM),
    (KEY, "tuple(sorted(request.eos_ids))", "()", "caches between calls: a session with other EOS tokens serves", T_TURNS),
    (KEY, "tuple(request.plan.warper_arguments.items())", "()", "caches between calls: a session with other warpers serves", T_TURNS),
    (OUTPUT, "to(request.input_ids.device, copy=True)", "to(request.input_ids.device)", "output: the returned text is storage of the next call", T_TURNS + " -k returned_stays"),
    (CACHE, "new[..., : storage.shape[-2], :] = storage", "new[..., 1 : storage.shape[-2], :] = storage[..., 1:, :]", "resize: the first position is lost when a cache grows", T_MODULES),
    (CACHE, "if not length and isinstance(layer, StateLayer)", "if length and isinstance(layer, StateLayer)", "caches between calls: recurrent states of the last text stay", T_TURNS + " -k state"),
    (MASKS, "row - position < self.window", "row - position <= self.window", "windows: one position more is seen", T_ATTENTION),
    (MASKS, "row // self.chunk == position // self.chunk", "row - position < self.chunk", "windows: a chunk is a sliding window", T_ATTENTION),
    (FACTS, "found = modules, configs, self.spaces, around, self.ambient, places, libraries", "found = modules, [], self.spaces, around, self.ambient, places, libraries", "gate: a changed config is not noticed", T_CHANGES),
    (FACTS, "found = modules, configs, self.spaces, around, self.ambient, places, libraries", "found = modules, configs, self.spaces, around, (), places, libraries", "gate: autocast is not noticed", T_CHANGES),
    (FACTS, "                tuple(own.hooks),", "                (),", "gate: a hook is not noticed", T_CHANGES),
    (FACTS, 'if not getattr(answer, "passing", False):', "if True:", "proofs: a passing verdict is kept", "tests/validate/test_models.py -k passing"),
    (DECODER, "if alone and self.reuse_history else None", "if ranks.alone else None", "history's privacy: a call that asked for none leaves its text to later ones", T_MEMORY),
    (HISTORY, "if memory is not None and memory.era is self.era:", "if memory is not None:", "history's privacy: what was cleared during a call comes back", T_MEMORY),
    (HISTORY, "not text.continues or era is not self.era:", "not text.continues:", "history's privacy: a session goes on with what was cleared", T_MEMORY),
    (MEMORY, "each(first, Tensor.clone)", "first", "history: what is kept is the call's own table", T_MEMORY),
    (GRAMMAR, 'return [one.fork() if hasattr(one, "fork") else one.deep_copy() for one in found]', "return list(found)", "grammar: drafts move the processor's own matcher", T_GRAMMAR),
    (GRAMMAR, "        walk.back(steps)\n        return text, probs, ends", "        return text, probs, ends", "grammar: a walk does not come back", T_GRAMMAR),
    (GRAMMAR, "self.before[b] = (self.before[b] + self._spelled(new))[-256:]", "self.before[0] = (self.before[b] + self._spelled(new))[-256:]", "batch borders: a grammar's text is written to the first sequence", T_GRAMMAR),
    (HISTORY, "inside = (place >= kv_start[:, None]) & (place < lengths[:, None])", "inside = (place < lengths[:, None])", "batch borders: left padding is remembered as text", T_PADDING),
    (BORDER, "Frontier(*(tensor.clone() for tensor in level.frontier.tensors()))", "level.frontier", "border: a source writes what is merged", T_BORDER),
    (BORDER, "(tokens < -1) | (tokens >= vocab_size)", "(tokens < -1) | (tokens > vocab_size)", "border: the first token beyond the vocabulary is no fault", T_BORDER),
    (FLATTEN, "for level in range(max_path):", "for level in range(max_path + 1):", "flatten budget: a row beyond the deepest", T_OPS + " -k flatten"),
    (FLATTEN, "log_probs.clamp(max=0.0) + 0.0", "log_probs + 0.0", "flatten: a log-probability above 0 puts a child before its parent", T_OPS + " -k flatten"),
    (FEATURES, "ahead, end = self.ahead, torch", "ahead, end = 0, torch", "EAGLE, MTP: an entry reads the token at its position, not the one after", T_ACCEPTED),
    (FEATURES, "keep=config.width, shift=1)", "keep=config.width)", "EAGLE, MTP: drafted rows stand one position too late", T_ACCEPTED),
    (FEATURES, "at = (self.state.out_len - count - 1)[:, None]", "at = (self.state.out_len - count)[:, None]", "features of accepted rows are one position late", T_ACCEPTED + " tests/sources/test_every_source.py"),
    (FEATURES, "self.state.kv_start.clamp(min=", "(0 * self.state.kv_start).clamp(min=", "EAGLE, MTP: left padding is read as text", T_PADDING),
    (LAYOUTS, 'ConfigLayout(FUSED, "eagle_config", 1)', 'ConfigLayout(FUSED, "eagle_config", 0)', "EAGLE: features of the layers before those that are named", "tests/sources/test_checkpoints.py -k SGLang"),
    (MTP, "both[::-1] if self.layout.hidden_first else both", "both", "MTP: embedding and feature change places", "tests/sources/test_forwards.py -k wired"),
    (FEATURES, "torch.minimum(kv_len[:, None] + chain.depths, end[:, None]).long()", "chain.depths.long()", "DFlash: features are read at the text's beginning", T_PADDING + " tests/demo/test_demo_pair.py"),
    (FEATURES, "self.cached, 0, self.sees[0], self.row, self.row", "self.cached, 0, self.sees[0], self.row + 1, self.row", "DFlash: the block stands one position too late", T_ACCEPTED),
    (STOPS, "ends every text\n            return True", "ends every text\n            return False", "stop strings: an empty one ends nothing", T_STOPS),
    (STOPS, "-self.maximum_token_len :]", "-2:]", "stop strings: one of three tokens is missed", T_STOPS),    (VERIFY_H, " || a.depths[row] >= *a.remaining", "", "C++ verify: a row beyond the length is accepted", T_OPS + " -k cpu"),
    (VERIFY_H, "if (picked != a.token_ids[row])", "if (picked < 0)", "C++ verify: a row is accepted that the target did not pick", T_OPS + " -k cpu"),
    (VERIFY_H, "row < real_rows && !*a.done;", "row < real_rows;", "C++ verify: a finished sequence accepts rows", T_OPS + " -k cpu"),
    (COMMIT_H, "(first + (kv_len + i) *", "(first + (kv_len + i + 1) *", "CUDA commit: accepted keys stand one slot behind their place", "tests/backends/test_block_code.py::test_random_problems_are_right_and_clean"),
    (FLATTEN_H, "(descending(rows.score[middle]) <= word)", "(descending(rows.score[middle]) < word)", "C++ flatten: of equal scores the later node comes first", T_OPS + " -k cpu"),
    (MERGE_H, " || shared < best_shared", "", "C++ merge: the longest common context does not win", T_OPS + " -k cpu"),
    (MERGE_H, "int node = parent + 1;", "int node = 0;", "C++ merge: a candidate joins an older node, a cycle", T_OPS + " -k cpu"),
    (MERGE_H, "a.scores[i] >= s.log_min_prob &&", "", "C++ merge: unlikely nodes are expanded", T_OPS + " -k cpu"),
    (RANDOM_H, "kPhiloxRounds = 10", "kPhiloxRounds = 9", "C++ noise: another generator than the reference's", T_OPS + " -k cpu"),
    (RANDOM_H, "static_cast<uint32_t>(sequence)}", "0}", "C++ noise: every sequence has the same", T_OPS + " -k cpu"),
    (FLATTEN_H, "words() const { return words_for(rows); }", "words() const { return rows / 32; }", "C++ flatten budget: ancestors beyond the last whole word are lost", T_OPS + " -k cpu"),
)]
# fmt: on
