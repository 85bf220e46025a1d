"""GitHub's workflows: they are read, and what they run is there and does what its step says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="not a source checkout")


def steps(name: str) -> list[dict[str, Any]]:
    workflow = yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))
    assert workflow[True], "YAML reads `on` as a boolean"
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"] <= 90 and job["runs-on"]
    return job["steps"]


def runs(name: str) -> list[str]:
    return [step["run"] for step in steps(name) if "run" in step]


@pytest.mark.parametrize("name", ["tests", "wheels", "weekly"])
def test_every_command_is_a_shell_script_whose_files_are_there(name):
    for command in runs(name):
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
        for script in re.findall(r"\.ci/\w+", command):
            subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_the_tests_are_those_of_the_readme():
    assert runs("tests") == ["bash .ci/run"]
    assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("mebibytes", [25, 26])
def test_a_wheel_that_is_too_large_fails(mebibytes, tmp_path):
    (gate,) = (command for command in runs("wheels") if "-size" in command)
    (tmp_path / "dist").mkdir()
    with open(tmp_path / "dist" / "gsd_kernels-0-cp310-abi3-manylinux_2_28_x86_64.whl", "wb") as file:
        file.truncate(mebibytes << 20)
    assert (subprocess.run(["bash", "-c", gate], cwd=tmp_path).returncode == 0) == (mebibytes == 25)
