"""Environment variables: what each means, what is refused, and that they are read at every use."""

from __future__ import annotations

import os
import re
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
    settings._folder.cache_clear()


def test_cache_dir_is_a_list_of_stripped_names_and_is_read_at_every_use(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", os.pathsep.join([f"{tmp_path / 'a'} ", "", " ", " ~/b"]))
    assert settings.cache_roots() == [tmp_path / "a", Path.home() / "b"]
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "c"))
    assert settings.cache_roots() == [tmp_path / "c"]


def test_relative_cache_dir_does_not_move_with_later_chdir(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JITGEMM_CACHE_DIR", "kernels")
    monkeypatch.setenv("JITGEMM_DUMP_DIR", "dump")
    for _ in range(2):
        assert settings.cache_roots() == [tmp_path / "kernels"]
        assert settings.dump_dir() == tmp_path / "dump"
        monkeypatch.chdir("/")


@pytest.mark.parametrize("name", ["JITGEMM_CACHE_DIR", "JITGEMM_DUMP_DIR"])
def test_a_folder_of_nobodys_home_is_left_out_with_one_warning(monkeypatch, name):
    monkeypatch.setenv(name, "~nosuch/x")
    with pytest.warns(UserWarning, match=f"{name}: folder '~nosuch/x' is left out") as caught:
        assert not settings.cache_roots() if name == "JITGEMM_CACHE_DIR" else settings.dump_dir() is None
        settings.cache_roots(), settings.dump_dir()
    assert len(caught) == 1


def test_a_relative_folder_is_left_out_where_the_working_folder_was_deleted(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("JITGEMM_CACHE_DIR", os.pathsep.join(["kernels", "/a"]))
    with pytest.warns(UserWarning, match="folder 'kernels' is left out"):
        assert settings.cache_roots() == [Path("/a")]


def test_without_a_home_there_is_no_user_folder_and_no_error(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    checkout = settings.checkout_dir()
    assert settings.cache_roots() == ([checkout / "cache"] if checkout else [])


@pytest.mark.parametrize(("project", "own"), [("jitgemm", ["cache"]), ("something-else", [])])
def test_a_checkout_caches_in_its_own_folder_before_the_users(tmp_path, project, own):
    """Of a copy of the package, in a process of its own."""
    shutil.copytree(PACKAGE, tmp_path / "jitgemm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "jitgemm_cli.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    script = "import jitgemm_cli; from jitgemm import settings; print(*settings.cache_roots(), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path / each) for each in (*own, "home/jitgemm")], done.stderr


def test_jit_modes(monkeypatch):
    assert settings.jit_mode() == "on"
    for mode in settings.JIT_MODES:
        monkeypatch.setenv("JITGEMM_JIT", mode.upper())
        assert settings.jit_mode() == mode
    monkeypatch.setenv("JITGEMM_JIT", "maybe")
    with pytest.raises(ValueError, match="JITGEMM_JIT: expected one of on, warn, off, got 'maybe'"):
        settings.jit_mode()


@pytest.mark.parametrize(
    ("name", "asked", "default"), [("DEBUG", settings.debug, False), ("YIELDS", settings.yields, True)]
)
def test_flags(monkeypatch, name, asked, default):
    assert asked() is default
    for value, meaning in {"1": True, "true": True, "0": False, "off": False, "no": False, "": default}.items():
        monkeypatch.setenv(f"JITGEMM_{name}", value)
        assert asked() is meaning, value
    monkeypatch.setenv(f"JITGEMM_{name}", "2")
    with pytest.raises(ValueError, match=f"JITGEMM_{name}: expected 0 or 1, got '2'"):
        asked()


def test_every_variable_that_is_read_is_in_the_table():
    text = (PACKAGE / "settings.py").read_text()
    read = set(re.findall(r'_(?:read|flag)\("(\w+)"', text))
    assert text.count("environ.") == 1 and read == set(settings.VARIABLES)
