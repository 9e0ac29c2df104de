"""What a forge reads: workflows that call scripts of this repository, issue forms, placeholders, pinned versions."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import jitgemm
from jitgemm.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def jobs() -> dict:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]


def commands(job: dict) -> list[str]:
    """Of a job, one for each value of its matrix."""
    runs = [step["run"] for step in job["steps"] if "run" in step]
    for name, values in job.get("strategy", {}).get("matrix", {}).items():
        runs = [run.replace(f"${{{{ matrix.{name} }}}}", str(value)) for run in runs for value in values]
    return runs


def test_jobs_run_scripts_that_can_be_run_and_that_of_a_gpu_where_there_is_one(jobs):
    assert set(jobs) == {"lint", "tests", "contracts", "nvrtc", "docs", "gpu"}
    for job in jobs.values():
        found = [shlex.split(command) for command in commands(job)]
        assert found and all(os.access(ROOT / command[0], os.X_OK) for command in found), found
    assert "vars.GPU_RUNNER != ''" in jobs["gpu"]["if"] and jobs["gpu"]["runs-on"] == "${{ vars.GPU_RUNNER }}"
    assert read(".ci/run").split()[-1].strip('"').endswith(f"/../{commands(jobs['tests'])[0].split()[0]}")


def test_shards_are_the_whole_suite_and_versions_those_of_the_docs(jobs):
    shards = [command.split()[-1] for command in commands(jobs["tests"])]
    assert shards == [f"{shard}/{len(shards)}" for shard in range(1, len(shards) + 1)]
    assert {command.split()[-1] for command in commands(jobs["nvrtc"])} == {"12", "13"}
    for command in commands(jobs["contracts"]):
        script, version = command.split()
        page = read(f"docs/{Path(script).name.partition('_')[0]}.md")
        assert re.search(rf"\b{re.escape(version)}\b", page), command


@pytest.mark.parametrize("form", ["bug", "performance"])
def test_issue_forms_ask_for_what_commands_print(form):
    yaml = pytest.importorskip("yaml")
    text = read(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert [each["type"] for each in yaml.safe_load(text)["body"]] and "jitgemm env" in text
    assert set(re.findall(r"`jitgemm (\w+)", text)) <= set(get_command(app).commands)
    for line in re.findall(r"`python (scripts/\S+) ([^`]*)`", text):
        assert all(f'"{option}"' in read(line[0]) for option in re.findall(r"--\w+", line[1])), line


def test_placeholders_of_the_owner_are_replaced_everywhere_or_nowhere():
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(PROJECT["urls"])
    named = ("pyproject.toml", ".github/CODEOWNERS", "CITATION.cff")
    left = {name: len(re.findall(r"\bOWNER\b", read(name))) for name in named}
    assert all(left.values()) or not any(left.values()), left


def test_the_citation_is_of_this_version():
    assert f"version: {jitgemm.__version__}\n" in read("CITATION.cff")
    date = re.search(r"^## [0-9.]+ .([0-9-]+).", read("CHANGELOG.md"), re.MULTILINE)[1]
    assert f"date-released: {date}" in read("CITATION.cff")


def test_constraints_pin_every_requirement_within_its_bounds():
    requirements = pytest.importorskip("packaging.requirements")
    pins = dict(line.lower().split("==") for line in read("constraints.txt").split("\n") if "==" in line)
    extras = PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *extras["test"], *extras["docs"], *extras["libraries"]):
        requirement = requirements.Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name]), text
