"""`~` expands to the home folder in every path setting; invalid names are not files."""

import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from bridge.config import ServeConfig, TrainConfig
from bridge.config.choices import Config
from bridge.config.rollouts import FeedConfig
from bridge.core import paths

REQUIRED: dict[type[Config], dict[str, str]] = {
    ServeConfig: {"model": "m"},
    TrainConfig: {"model_name": "m"},
    FeedConfig: {"model_name": "m"},
}
NAMED = {"model", "model_name", "reference_model", "environment", "data", "eval_data", "loss"}


def path_choices(cls: type[Config]) -> list[str]:
    """Return the settings that hold a path, judging by type or name."""
    kinds = {key: choice.info.annotation for key, choice in cls.choices().items()}
    return [key for key, kind in kinds.items() if Path in (kind, *typing.get_args(kind)) or key in NAMED]


CASES = [(cls, key) for cls in REQUIRED for key in path_choices(cls)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_settings_with_paths_are_found() -> None:
    assert {"run_dir", "save_path", "vllm_config_path", "verifiers_python"} | NAMED - {"model"} <= {
        key for cls, key in CASES if cls is TrainConfig
    }


@pytest.mark.parametrize(("cls", "key"), CASES)
@pytest.mark.parametrize("source", ["flag", "variable", "toml", "program"])
def test_tilde_expands_to_the_home_folder_in_every_setting(
    home: Path, monkeypatch: pytest.MonkeyPatch, cls: type[Config], key: str, source: str
) -> None:
    given: dict[str, Any] = {name: value for name, value in REQUIRED[cls].items() if name != key}
    if key == "reference_model":
        given["kl_coef"] = 0.1
    toml, name = home / "c.toml", "a b.py:f" if key in ("loss", "environment") else "a b"
    toml.write_text(f'{key} = "~/{name}"\n' if source == "toml" else "")
    if source == "variable":
        monkeypatch.setenv(f"BRIDGE_{key.upper()}", f"~/{name}")
    if source in ("flag", "program"):
        given[key] = f"~/{name}"
    config = cls.of(**given) if source == "program" else cls.resolve(given, toml)
    assert str(config.get(key)) == f"{home}/{name}"


def test_non_path_settings_keep_their_tilde() -> None:
    assert TrainConfig.of(model_name="m", system_prompt="~/x").task.system_prompt == "~/x"
    assert TrainConfig.of(model_name="m", run_dir="a/~").run_dir == Path("a/~")


def test_unknown_users_home_is_not_expanded() -> None:
    assert paths.expanded("~nobody-at-all/x") == Path("~nobody-at-all/x")
    assert paths.expanded(Path("~")) == Path(os.environ["HOME"])


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud83d", "", "a/" * 3000], ids=range(5))
def test_impossible_name_is_not_a_file(name: str) -> None:
    assert not paths.is_file(name)
    assert not paths.is_folder(name)


def test_exiting_fork_keeps_the_temporary_folder() -> None:
    program = (
        "import os, sys\n"
        "from bridge.core import paths\n"
        "folder = paths.temporary_folder('bridge-test-')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\n"
        "print(folder, folder.is_dir())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    folder, was_there = done.stdout.split()
    assert was_there == "True"
    assert not Path(folder).exists(), "the process that made it removed it"
