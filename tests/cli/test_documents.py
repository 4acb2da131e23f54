"""README.md and docs/: each block runs as written, or is listed with a reason why not; no run prints a traceback.

A server in its own process stands in for vLLM: everything else of `bridge run` is real.
"""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
import typer

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import Progress
from bridge.core.address import free_port
from bridge_cli import demo_model, main
from bridge_environments.dataset import GSM8K
from tests import documents, forked
from tests.cli import report_runs
from tests.documents import PAGES, ROOT, SPANS, TRIALS, Block
from tests.models import tiny

LIMIT_S = 300.0
STAND_IN = """
import dataclasses, sys
from pathlib import Path
from bridge.processes.server_command import ServerCommand

real = ServerCommand.of

def stand_in(config, flags, **given):
    command = real(config, flags, **given)
    model, server = Path(command.model).resolve(), (sys.executable, "-m", "tests.unit.patched_server")
    adapter_slots = "0"
    argv = (*server, str(model), str(command.manifest), str(command.port), adapter_slots)
    return dataclasses.replace(command, argv=argv)

ServerCommand.of = stand_in
"""
SERVED = """
from bridge.config import ServeConfig
from bridge.processes.server_process import StartedServer

config = ServeConfig(model="MODEL", port={port}, vllm_config_path=Path("vllm_bridge_config.json"))
with StartedServer(ServerCommand.of(config, ()), Path("server.log")).running():
    exec({text!r})
"""
"""A program that attaches to a server."""
COMMAND = f"{STAND_IN}\nfrom bridge_cli import main\nmain.main()\n"
FAULTS = re.compile(r"Traceback|\b\w*(Error|Exception|Warning)\b|error:|generator|never (awaited|retrieved)")
"""What no example may print, however it ends."""
BLOCKS = documents.blocks()
RUNNABLE = [
    pytest.param(block, marks=[pytest.mark.slow] * block.trial.is_slow, id=block.name)
    for block in BLOCKS
    if TRIALS.get(block.page, {}).get(block.name) and block.trial.how == "run"
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the pages mention: models, problems, runs and a checkpoint."""
    for name in ("MODEL", "TEACHER", "Qwen/Qwen2.5-0.5B-Instruct"):
        model = tiny.write(tiny.llama(), tmp_path / name)
        (model / "chat_template.jinja").write_text(demo_model.TEMPLATE)
    assert GSM8K.bundled is not None
    for name in ("openai/gsm8k", "copies/gsm8k"):
        shutil.copytree(GSM8K.bundled, tmp_path / name)
    shutil.copytree(ROOT / "examples" / "recipes", tmp_path / "examples" / "recipes")
    for name in ("mine.jsonl", "held_out.jsonl"):
        shutil.copy(GSM8K.bundled / "test.jsonl", tmp_path / name)
    for name in ("runs/20261121-1040-gsm8k", "runs/one", "runs/other", "RUN"):
        report_runs.make(tmp_path / name, num_steps=3)

    def write(scratch: Path) -> None:
        shutil.copytree(tmp_path / "MODEL", scratch, dirs_exist_ok=True)

    progress = Progress(step=3, weight_version=3, problems_drawn=24, run_dir=tmp_path / "RUN")
    checkpoint.save(tmp_path / "CHECKPOINT", write, progress)
    return tmp_path


def run(folder: Path, program: str, words: list[str], variables: dict[str, str]) -> None:
    environment = {
        "BRIDGE_STOP_AT": "reward_mean>=-1e9",  # after one step
        "BRIDGE_PORT": str(free_port("127.0.0.1")),
        "LOGDIR": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    if "lora_only" in words:
        environment["BRIDGE_LORA_HANDOVER"] = "disk"  # the stand-in has no slots
    done = forked.ended(words, folder, program=program, environment=environment | variables, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert not FAULTS.search(done.stderr), done.stderr


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize("block", RUNNABLE)
def test_block_runs_as_written(folder: Path, block: Block) -> None:
    for other in documents.blocks(block.page):
        if other.trial.how == "file":
            name = "problems.jsonl" if other.kind == "json" else other.name.removeprefix("# ")
            (folder / name).write_text(other.text)
    if block.kind == "python":
        served = SERVED.format(port=free_port("127.0.0.1"), text=block.text)
        run(folder, STAND_IN + (served if "bridge.attach(" in block.text else block.text), [], {})
        return
    for variables, (bridge, *words) in documents.commands(block.text):
        assert bridge == "bridge"
        run(folder, COMMAND, words, variables)


@pytest.mark.xdist_group("commands")
def test_readme_commands_that_need_no_server_run(folder: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    for span in SPANS:
        assert f"`{span}`" in readme
        _, *words = span.replace("--out FOLDER", "--out exported").split()
        run(folder, COMMAND, words, {})


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_classified(page: str) -> None:
    names = [block.name for block in documents.blocks(page)]
    assert names == [*TRIALS.get(page, {})]


def test_block_that_is_not_run_names_its_test_or_reason() -> None:
    for trials in TRIALS.values():
        for name, trial in trials.items():
            if trial.how == "tested":
                assert (ROOT / trial.why).is_file(), name
            assert trial.why or trial.how in ("run", "file"), name


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_flag_of_a_page_exists(page: str) -> None:
    shells = [block.text for block in documents.blocks(page) if block.kind in ("bash", "sh")]
    for text in (*shells, *documents.SPAN.findall((ROOT / page).read_text())):
        for _, words in documents.commands(text):
            if words[0] == "bridge":
                known = flags(words[1])
                own = words[: words.index("--")] if "--" in words else words
                given = {word.partition("=")[0] for word in own if word.startswith("--")}
                assert given <= known | {"--help", "--version", "--install-completion"}, text


def flags(command: str) -> set[str]:
    """Return every flag of a command, hidden ones too."""
    if command.startswith("--"):
        return set()
    module, _, function = main.COMMANDS[command][0].partition(":")
    app = typer.Typer(add_completion=False)
    app.command()(getattr(__import__(module, fromlist=[function]), function))
    return {name for parameter in typer.main.get_command(app).params for name in parameter.opts}


def test_no_page_or_message_installs_bridge_from_a_registry() -> None:
    """Bridge is not published there, so anyone could register its name."""
    files = [
        path for package in ("bridge", "cli", "environments", "patches") for path in (ROOT / package).rglob("*.py")
    ]
    texts = {str(path): path.read_text() for path in (*files, *(ROOT / page for page in PAGES))}
    assert [name for name, text in texts.items() if re.search(r"pip install[^`\n]*bridge-rl", text)] == []


def test_every_program_and_data_row_can_be_parsed() -> None:
    kinds = []
    for block in BLOCKS:
        kinds.append(block.kind)
        if block.kind == "python":
            compile(block.text, block.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if block.kind == "json":
            assert [json.loads(line) for line in block.text.splitlines()]
    assert set(kinds) == {"", "bash", "sh", "python", "json", "yaml", "diff"}
