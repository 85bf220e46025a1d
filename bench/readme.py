"""The table of README.md, from bench/results.

Rewrites what lies between ``<!-- bench:real -->`` and ``<!-- /bench:real -->``; ``--check`` changes nothing and fails
where the file is out of date. Other pages show what the commands printed, and name the file of results beside it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from .generation import report
from .lib.report import caption

BLOCK = re.compile(r"(<!-- bench:real -->\n)(.*?)(<!-- /bench:real -->)", re.DOTALL)


def real(results: Path) -> str:
    """Everyday work on a real model: the gain in one sentence, the table, what was run, and what float32 gives."""
    paths = (results / f"real-{kind}.json" for kind in ("bfloat16", "float32"))
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    if not runs:
        return "Not measured yet: `gsd-kernels bench real`."
    environment = runs[0]["environment"]
    machine = f"{caption(environment)}, transformers {environment['versions']['transformers']}"
    table = report.engines_table(report.short(runs[0]), {"texts as without drafts": report.as_without_drafts})
    what = f"{report.what(runs[0])}; {machine}, {environment['date']}."
    return "\n\n".join([f"**{report.gains(runs[0])}**", table, what, *map(report.exactness, runs[1:])])


def rewrite(file: Path, results: Path, *, check: bool) -> bool:
    """Rewrite the file's block, or only check it; whether all is well."""
    before = file.read_text(encoding="utf-8")
    if len(BLOCK.findall(before)) != 1:
        print(f"{file}: expected one block between <!-- bench:real --> and <!-- /bench:real -->", file=sys.stderr)
        return False
    after = BLOCK.sub(lambda match: f"{match[1]}{real(results)}\n{match[3]}", before)
    if check:
        if after != before:
            print(f"{file}: out of date: gsd-kernels bench readme", file=sys.stderr)
        return after == before
    file.write_text(after, encoding="utf-8")
    return True
