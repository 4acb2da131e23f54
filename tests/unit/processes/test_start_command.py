"""`--start-command`: how it is parsed, what is refused, and how such a server is started and restarted."""

import os
import shlex
import socket
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from bridge.config import TrainConfig
from bridge.core.address import free_port
from bridge.errors import UsageError
from bridge.processes.server_command import StartCommand
from bridge.processes.server_process import StartedServer

FAKE_VLLM = Path(__file__).with_name("fake_vllm.py")


def config(command: str, port: int | None = None, model: str = "first") -> TrainConfig:
    return TrainConfig.of(
        model_name=model, mode="none", start_command=command, vllm_port=port or free_port("127.0.0.1")
    )


def parsed(config: TrainConfig, outer: Mapping[str, str] = os.environ) -> StartCommand:
    assert config.publishing.start_command is not None
    return StartCommand.parse(config.publishing.start_command, config.server.url(), config.model_name, outer)


def fake(*flags: str) -> TrainConfig:
    port = free_port("127.0.0.1")
    program = shlex.join([sys.executable, "-I", "-S", str(FAKE_VLLM)])
    return config(f"{program} --model {{model}} --port {port} {shlex.join(flags)}", port)


def refused(command: str, port: int | None = None) -> UsageError:
    with pytest.raises(UsageError) as error:
        parsed(config(command, port), {"PATH": os.defpath})
    return error.value


def test_model_folder_replaces_the_placeholder() -> None:
    command = parsed(config("sh --model={model} '{\"a\": 1}' {model}"), {"PATH": os.defpath})
    assert Path(command.argv[0]).is_absolute()
    assert command.argv_for(None)[1:] == ("--model=first", '{"a": 1}', "first")
    assert command.argv_for(Path("/a folder/$x"))[1:] == ("--model=/a folder/$x", '{"a": 1}', "/a folder/$x")


def test_variables_before_the_program_set_its_environment() -> None:
    command = parsed(config("CUDA_VISIBLE_DEVICES=1 A= sh {model}"), {"PATH": os.defpath, "A": "b"})
    assert command.environment == {"PATH": os.defpath, "CUDA_VISIBLE_DEVICES": "1", "A": ""}
    assert command.argv[1:] == ("{model}",)


def test_program_in_the_python_folder_is_found() -> None:
    name = Path(sys.executable).name
    assert parsed(config(f"{name} {{model}}"), {"PATH": "/nowhere"}).argv[0].endswith(f"/{name}")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("vllm serve", "has no {model} in it"),
        ("", "has no {model} in it"),
        ("A={model}", "has no {model} in it"),
        ("sh '{model}", "No closing quotation"),
        ("no-such-program {model}", "cannot find the program no-such-program"),
        ("sh {model} --port 8123", "listens on port 8123, but the trainer would use port"),
        ("sh {model} --port=8123", "listens on port 8123, but the trainer would use port"),
    ],
)
def test_unstartable_command_is_refused(command: str, message: str) -> None:
    assert message in refused(command).message


def test_unrelated_server_on_the_port_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error = refused("sh {model}", port)
        assert f"port {port} is taken by pid {os.getpid()}" in error.message
        assert "--vllm-port" in error.hint
        socket.create_connection(("127.0.0.1", port)).close()


def answer(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as response:
        text: str = response.read().decode()
        return text


@pytest.mark.parametrize("flags", [(), ("--no-health",)], ids=["health route", "only the models route"])
def test_any_server_is_started_and_restarted(tmp_path: Path, flags: tuple[str, ...]) -> None:
    command = parsed(fake(*flags))
    with StartedServer(command, tmp_path / "serve.log").running() as server:
        assert answer(command.port) == "first as None"
        server.restart(tmp_path / "step_1")
        assert answer(command.port) == f"{tmp_path / 'step_1'} as None"
    assert server._server is None
