import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bridge import __version__
from bridge.checks import failed, software
from bridge.errors import IncompatibleVersionError
from bridge_cli import main

COMMANDS = tuple(main.COMMANDS)


def run_python(code: str, *arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def bridge(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return run_python("from bridge_cli.main import main; main()", *arguments, columns=columns)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Give a command wrong arguments in this process, and return what it prints."""
    assert main.answer(arguments) == 2
    return capsys.readouterr().err


def test_help_names_every_command() -> None:
    shown = bridge("--help").stdout
    assert [name for name in main.COMMANDS if name not in shown] == []


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_command_help_is_not_truncated(
    command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main.answer([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "[default: ()]" not in shown
    assert max(len(line) for line in shown.splitlines()) <= columns


def test_command_without_arguments_shows_the_help() -> None:
    assert bridge().stdout.strip() == bridge("--help").stdout.strip()


def test_version_is_printed_on_stdout() -> None:
    done = bridge("--version")
    assert (done.stdout, done.stderr, done.returncode) == (f"bridge {__version__}\n", "", 0)


def test_wrong_flag_suggests_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "train", "--traning-steps", "3")
    assert error.startswith("error: no such flag: --traning-steps\n\nhint: did you mean")
    assert "--training-steps" in error


@pytest.mark.parametrize(("wrong", "meant"), [("--modle", "--model"), ("--mod", "--mode")])
def test_flag_with_swapped_letters_is_recognized(wrong: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "run", wrong, "m").splitlines()[-1] == f"hint: did you mean {meant}?"


def test_vllm_flag_before_the_dashes_is_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert "after --" in refusal(capsys, "serve-vllm", "--model", "m", "--enforce-eager")


def test_wrong_command_suggests_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'train'" in refusal(capsys, "trian")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("demo", "--steps", "0"), "--steps: must be greater than or equal to 1"),
        (("demo", "--steps", "ten"), "--steps: must be a valid integer"),
        (("doctor", "--vllm-port", "0"), "--port: must be greater than or equal to 1"),
        (("init", "--task", "sums"), "--task: 'sums' is not one of 'class', 'jsonl', 'gsm8k'"),
    ],
)
def test_wrong_value_of_a_commands_own_flag_names_the_flag(
    arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *arguments) == f"error: {error}\n\nhint: bridge {arguments[0]} --help\n"


def test_flag_without_a_value_hints_at_the_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "run", "--model-name").splitlines()[-1] == "hint: bridge run --help"


def test_user_mistake_prints_no_traceback() -> None:
    done = bridge("verify", "--vllm-config-path", "/no/such/manifest.json")
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.startswith("error: no manifest at /no/such/manifest.json\n\nhint: ")
    assert "Traceback" not in done.stderr


def test_bug_prints_the_traceback_and_asks_for_a_report() -> None:
    code = "import bridge_cli.main as m\ndef broken(arguments): raise ZeroDivisionError('ours')\n"
    code += "m.answer = broken\nm.main()"
    done = run_python(code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith(main.REPORT)


def test_interrupt_prints_one_line_and_exits_with_130() -> None:
    code = (
        "import sys, bridge_cli.main as m\n"
        "import bridge_cli.verify\n"
        "def interrupted(given): raise KeyboardInterrupt\n"
        "bridge_cli.verify.discovery.find = interrupted\n"
        "sys.argv = ['bridge', 'verify']\n"
        "m.main()"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_python_m_bridge_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bridge", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, f"bridge {__version__}\n")


def test_terminated_command_exits_with_143() -> None:
    code = (
        "import os, signal, sys, bridge_cli.main as m\n"
        "import bridge_cli.verify\n"
        "bridge_cli.verify.discovery.find = lambda given: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.argv = ['bridge', 'verify']\n"
        "m.main()"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr.strip()) == (143, "interrupted")


def test_sigterm_ends_a_command_like_an_interrupt() -> None:
    code = (
        "import os, signal, time; from bridge_cli import main;"
        "main.answer = lambda _: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60));"
        "main.main()"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_after_a_command_has_ended_prints_nothing(number: int) -> None:
    code = (
        "import atexit, os, sys\nfrom bridge_cli.main import main\n"
        f"atexit.register(lambda: os.kill(os.getpid(), {int(number)}))\n"
        "sys.argv = ['bridge', '--version']\n"
        "main()"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (-number, f"bridge {__version__}\n", "")


@pytest.mark.parametrize("command", [(), *((name,) for name in main.COMMANDS)])
def test_h_prints_the_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for flag in ("-h", "--help"):
        assert main.answer([*command, flag]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_shell_completes_commands_and_flags() -> None:
    code = "from bridge_cli.main import main; main()"
    for words, wanted in (
        ("bridge ver", "verify"),
        ("bridge train --learn", ""),
        ("bridge train --eval-i", "--eval-interval"),
        ("bridge run --mode lo", "lora_only"),
        ("bridge run --loss gs", "gspo"),
        ("bridge run --environment word", "word_problems"),
        ("bridge train --optimizer adamw-4", "adamw-4bit"),
    ):
        environment = {**os.environ, "_BRIDGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "2"}
        environment["COMP_CWORD"] = str(len(words.split()) - 1)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        assert (done.stdout.split(), done.stderr) == ([wanted] if wanted else [], "")


def test_underscores_in_flags_mean_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "train", "--model", "m", "--learning_rate", "-1")
    assert error.startswith("error: --learning-rate: must be greater than 0")


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--repetition-penalty", "--temperature, --top-k, --top-p and --min-p"),
        ("--repetition_penalty", "--temperature, --top-k, --top-p and --min-p"),
        ("--loss_type", "--loss dapo"),
        ("--actor_rollout_ref.rollout.n", "--group-size"),
        ("--per-device-train-batch-size", "--batch-size"),
    ],
)
def test_flag_of_another_tool_is_refused_with_a_hint(flag: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "train", "--model", "m", flag, "0.9")
    assert error.startswith("error: no such flag: --")
    assert hint in error.splitlines()[-1]


HINTED: dict[str, str] = {
    "--dry-run": "bridge plan", "--tokenizer": "--model", "--patience": "--stop-at", "--deepspeed": "--gpus",
    "--load-best-model-at-end": "bridge export", "--debug": "events.log", "--verbose": "events.log",
    "--fast-inference": "always vLLM", "--kl-penalty": "--kl-coef", "--early-stopping": "--stop-at",
    "--enable-lora": "--mode lora_only", "--epochs": "--training-steps", "--steps": "--training-steps",
    "--max-seq-length": "--max-model-len", "--load_in_4bit": "quantized weights are not trained",
    "--dataset": "--data", "--wandb_project": "WANDB_PROJECT", "--eval_strategy": "--eval-samples",
    "--save_strategy": "--save-interval", "--log_completions": "rollouts.jsonl", "--push_to_hub": "--push",
    "--hub_model_id": "--push", "--enforce_eager": "-- --enforce-eager", "--reward_weights": "--reward",
    "--trust_remote_code": "-- --trust-remote-code", "--lrr": "did you mean --lr?",
    "--num-itterations": "did you mean --passes-per-batch?", "--max-step": "did you mean --training-steps?",
    "--batchsize": "did you mean --batch-size?", "--no-tensorbord": "did you mean --no-tensorboard?",
    "--evaluate": "bridge run --help", "--pad-token": "bridge run --help",
}  # fmt: skip
"""Flag that Bridge does not have -> words of its hint: an answer, Bridge's own flag, or the help."""


@pytest.mark.parametrize("wrong", HINTED)
def test_wrong_flag_gets_the_right_hint_or_none(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.answer(["run", "--model", "m", wrong, "1"]) == 2
    hint = capsys.readouterr().err.splitlines()[-1]
    assert HINTED[wrong] in hint
    assert " or --" not in hint


@pytest.mark.parametrize("command", ["run", "train", "serve-vllm"])
def test_model_without_its_flag_suggests_the_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--", "--enforce-eager"] if command != "train" else []
    assert main.answer([command, "./m", *more]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert (errors[0], errors[-1]) == ("error: unexpected argument ./m", "hint: did you mean --model ./m?")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["--lr", "--seed", "3"], "--lr has no value, so it took --seed for one"),
        (["lr=1e-5"], "did you mean --lr 1e-5?"), (["#--lr", "1e-5"], "write each value behind its flag"),
    ],
)  # fmt: skip
def test_stray_argument_beside_a_model_gets_a_hint(
    given: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.answer(["train", "--model", "m", *given]) == 2
    assert hint in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--wandb", "false"], "--no-wandb"), (["--wandb=false"], "--no-wandb"), (["--wandb", "True"], "--wandb"),
        (["--save-rollouts", "0"], "--no-save-rollouts"), (["--save-rollouts=yes"], "--save-rollouts"),
    ],
)  # fmt: skip
def test_value_of_a_switch_suggests_the_right_form(
    command: str, given: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.answer([command, "--model", "m", *given]) == 2
    hint = capsys.readouterr().err.splitlines()[-1]
    assert hint == f"hint: a switch takes no value, did you mean {meant}?"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("no_such_package.sub", "cannot find no_such_package, a package that Bridge needs"),
        ("json.nothing", None),
    ],
)
def test_missing_package_is_named(
    module: str, message: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(main.COMMANDS, "init", (f"{module}:command", "Import what is not there."))
    if message is None:
        with pytest.raises(ModuleNotFoundError):
            main.answer(["init"])
        return
    assert main.answer(["init"]) == IncompatibleVersionError.exit_code
    assert message in capsys.readouterr().err


def test_package_that_cannot_be_imported_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torchvision for another torch, transformers raises ModuleNotFoundError about one of its classes."""
    fault = failed("torchvision", "0.28.0 cannot be imported", "absent", "pip uninstall -y torchvision")
    monkeypatch.setattr(software, "obstacle", lambda _: fault)
    monkeypatch.setitem(main.COMMANDS, "init", ("json.nothing:command", "Import what is not there."))
    assert main.answer(["init"]) == IncompatibleVersionError.exit_code
    error, _, hint = capsys.readouterr().err.partition("\n\n")
    assert error == "error: torchvision: 0.28.0 cannot be imported"
    assert hint == "hint: pip uninstall -y torchvision; all checks: bridge doctor\n"
