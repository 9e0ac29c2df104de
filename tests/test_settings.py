"""Environment variables: what each means, what is refused, and that they are read at every use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jitgemm import settings

PACKAGE = Path(settings.__file__).parent


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def default_roots(folder: Path) -> list[str]:
    """`cache_roots()` of a copy of the package in `folder`, in a process of its own."""
    shutil.copytree(PACKAGE, folder / "jitgemm", ignore=shutil.ignore_patterns("__pycache__"))
    script = "from jitgemm import settings; print(*settings.cache_roots(), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "home")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_cache_dir_is_a_list_and_is_read_at_every_use(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", os.pathsep.join([str(tmp_path / "a"), "", "~/b"]))
    assert settings.cache_roots() == [tmp_path / "a", Path.home() / "b"]
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "c"))
    assert settings.cache_roots() == [tmp_path / "c"]


def test_relative_cache_dir_does_not_move_with_later_chdir(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JITGEMM_CACHE_DIR", "kernels")
    assert settings.cache_roots() == [tmp_path / "kernels"]


def test_a_checkout_caches_in_its_own_folder(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "jitgemm"\n')
    assert default_roots(tmp_path) == [str(tmp_path / "cache")]


def test_an_installed_package_caches_in_the_user_folder(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "something-else"\n')
    assert default_roots(tmp_path) == [str(tmp_path / "home" / "jitgemm")]


def test_jit_modes(monkeypatch):
    assert settings.jit_mode() == "on"
    for mode in settings.JIT_MODES:
        monkeypatch.setenv("JITGEMM_JIT", mode.upper())
        assert settings.jit_mode() == mode
    monkeypatch.setenv("JITGEMM_JIT", "maybe")
    with pytest.raises(ValueError, match="JITGEMM_JIT: expected one of on, warn, off, got 'maybe'"):
        settings.jit_mode()


def test_debug(monkeypatch):
    assert settings.debug() is False
    for value, meaning in {"1": True, "true": True, "0": False, "off": False, "": False}.items():
        monkeypatch.setenv("JITGEMM_DEBUG", value)
        assert settings.debug() is meaning
    monkeypatch.setenv("JITGEMM_DEBUG", "2")
    with pytest.raises(ValueError, match="JITGEMM_DEBUG: expected 0 or 1, got '2'"):
        settings.debug()


def test_dump_dir(monkeypatch, tmp_path):
    assert settings.dump_dir() is None
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path))
    assert settings.dump_dir() == tmp_path


def test_every_variable_that_is_read_is_in_the_table():
    text = (PACKAGE / "settings.py").read_text()
    read = set(part.split('"')[0] for part in text.split('environ.get("')[1:])
    assert read == set(settings.VARIABLES)
