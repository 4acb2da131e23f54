import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bridge.choices import Config
from bridge.config import ServeConfig, TrainConfig
from bridge.errors import UsageError
from cli import options
from cli.options import from_config


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (ServeConfig, TrainConfig):
        for name in cls.model_fields:
            monkeypatch.delenv(f"BRIDGE_{name.upper()}", raising=False)


def parse(*arguments: str, configs: tuple[type[Config], ...] = (TrainConfig,)) -> list[Config]:
    """Run a command that has the flags of `configs`, and return what it was given."""
    seen: list[Config] = []
    app = typer.Typer()
    app.command()(from_config(*configs)(_recorder(len(configs), seen)))
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return seen


def _recorder(num: int, seen: list[Config]) -> Callable[..., None]:
    def one(a: Config) -> None:
        seen.append(a)

    def two(a: Config, b: Config) -> None:
        seen.extend((a, b))

    return one if num == 1 else two


@pytest.mark.parametrize("configs", [(ServeConfig,), (TrainConfig,), (ServeConfig, TrainConfig)])
def test_every_field_is_one_shown_flag_in_a_panel(configs: tuple[type[Config], ...]) -> None:
    def command(*configs: Config) -> None: ...

    built = from_config(*configs)(command)
    declared = [p.annotation.__metadata__[0] for p in inspect.signature(built).parameters.values()]
    shown = {declaration for option in declared if not option.hidden for declaration in option.param_decls or ()}
    shown |= {option.default for option in declared if not option.hidden}
    for name, field in ((n, f) for cls in configs for n, f in cls.model_fields.items()):
        others = (name, *options._synonyms(name, configs))
        assert any("--" + other.replace("_", "-") in shown for other in others), name
        assert field.description, f"{name} has no docstring"


def test_a_flag_is_the_fields_name() -> None:
    (config,) = parse("--model-name", "m", "--training-steps", "3", "--lr", "1e-4", "--gradient-checkpointing")
    assert isinstance(config, TrainConfig)
    assert (config.model_name, config.training_steps, config.lr, config.gradient_checkpointing) == ("m", 3, 1e-4, True)


def test_a_switch_can_be_turned_off_again(tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text("gradient_checkpointing = true\n")
    (config,) = parse("--model-name", "m", "--config", str(toml), "--no-gradient-checkpointing")
    assert isinstance(config, TrainConfig)
    assert config.gradient_checkpointing is False


@pytest.mark.parametrize(
    "arguments", [("--mode", "shared_vllm"), ("--weight-bridge-mode", "shared_vllm"), ("--single-copy",)]
)
def test_the_documented_names_of_the_mode_are_one_choice(arguments: tuple[str, ...]) -> None:
    (config,) = parse("--model", "m", *arguments)
    assert isinstance(config, TrainConfig)
    assert config.mode == "shared_vllm"


def test_flags_win_over_the_environment_which_wins_over_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text('model_name = "toml"\ntraining_steps = 1\nseed = 1\nlr = 0.1\n')
    monkeypatch.setenv("BRIDGE_TRAINING_STEPS", "2")
    monkeypatch.setenv("BRIDGE_SEED", "2")
    (config,) = parse("--config", str(toml), "--seed", "3")
    assert isinstance(config, TrainConfig)
    assert (config.model_name, config.lr, config.training_steps, config.seed) == ("toml", 0.1, 2, 3)


@pytest.mark.parametrize(("mode", "lr"), [("shared_vllm", 1e-6), ("none", 1e-6), ("lora_only", 1e-5)])
def test_a_learning_rate_that_nobody_wrote_is_the_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, lr: float
) -> None:
    def rate(*arguments: str) -> float:
        (config,) = parse("--model", "m", *arguments)
        assert isinstance(config, TrainConfig)
        assert json.loads(config.model_dump_json())["lr"] == config.lr
        return config.lr

    assert rate("--weight-bridge-mode", mode) == lr
    for written in (1e-6, 1e-5, 0.1):
        assert rate("--mode", mode, "--lr", str(written)) == written
        toml = tmp_path / "c.toml"
        toml.write_text(f'lr = {written}\nmode = "{mode}"\n')
        assert rate("--config", str(toml)) == written
    monkeypatch.setenv("BRIDGE_LR", "0.3")
    assert rate("--mode", mode) == 0.3


def test_a_choice_that_is_refused_says_nothing_of_what_would_follow_from_it() -> None:
    with pytest.raises(UsageError) as refused:
        parse("--model", "m", "--mode", "lora")
    assert "--mode" in refused.value.message
    assert "lr" not in refused.value.message


def test_a_name_of_the_toml_file_may_be_a_synonym(tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text('model = "m"\nport = 7\n')
    (config,) = parse("--config", str(toml))
    assert isinstance(config, TrainConfig)
    assert (config.model_name, config.vllm_port) == ("m", 7)


def test_both_configurations_share_the_model_and_the_port() -> None:
    serve, train = parse("--model-name", "m", "--vllm-port", "7", configs=(ServeConfig, TrainConfig))
    assert isinstance(serve, ServeConfig)
    assert isinstance(train, TrainConfig)
    assert (serve.model, serve.port, train.model_name, train.vllm_port) == ("m", 7, "m", 7)


def test_one_toml_file_serves_both_configurations(tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text('model = "m"\nmax_model_len = 64\nlr = 0.5\n')
    serve, train = parse("--config", str(toml), configs=(ServeConfig, TrainConfig))
    assert isinstance(serve, ServeConfig)
    assert isinstance(train, TrainConfig)
    assert (serve.max_model_len, train.lr) == (64, 0.5)


def test_an_unknown_key_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text('model_name = "m"\ntraining-step = 3\n')
    with pytest.raises(UsageError) as refused:
        parse("--config", str(toml))
    assert refused.value.message == f"training-step in {toml}: there is no such choice"
    assert refused.value.remedy == "did you mean training_steps?"


def test_two_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="contradict"):
        parse("--model", "a", "--model-name", "b")


def test_all_faults_are_told_at_once_and_by_the_place_they_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_SEED", "many")
    with pytest.raises(UsageError) as refused:
        parse("--lr", "-1")
    message = refused.value.message
    assert "--model-name is missing" in message
    assert "--lr: must be greater than 0, found '-1'" in message
    assert "BRIDGE_SEED: must be a valid integer, found 'many'" in message


@pytest.mark.parametrize("text", ["lr = ", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path: Path, text: str | bytes) -> None:
    toml = tmp_path / "c.toml"
    toml.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=r"c\.toml is no TOML"):
        parse("--model", "m", "--config", str(toml))
