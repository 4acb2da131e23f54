import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from bridge.config import FeedConfig, ServeConfig, TrainConfig, declaration
from bridge.config.choices import Config, flag
from bridge.errors import UsageError
from bridge_cli import options
from bridge_cli.options import from_config


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (ServeConfig, TrainConfig):
        for name in cls.choices():
            monkeypatch.delenv(f"BRIDGE_{name.upper()}", raising=False)


def parse(*arguments: str, configs: tuple[type[Config], ...] = (TrainConfig,)) -> list[Config]:
    """Run a command with the flags of `configs`, and return the parsed values."""
    parsed: list[Config] = []
    app = typer.Typer()
    app.command()(from_config(*configs)(_recorder(len(configs), parsed)))
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return parsed


def _recorder(num: int, parsed: list[Config]) -> Callable[..., None]:
    def one(a: Config) -> None:
        parsed.append(a)

    def two(a: Config, b: Config) -> None:
        parsed.extend((a, b))

    return one if num == 1 else two


@pytest.mark.parametrize("configs", [(ServeConfig,), (TrainConfig,), (ServeConfig, TrainConfig)])
def test_every_field_has_one_visible_flag_in_a_panel(configs: tuple[type[Config], ...]) -> None:
    def command(*configs: Config) -> None: ...

    built = from_config(*configs)(command)
    declared = [p.annotation.__metadata__[0] for p in inspect.signature(built).parameters.values()]
    shown = {declaration for option in declared if not option.hidden for declaration in option.param_decls or ()}
    shown |= {option.default for option in declared if not option.hidden}
    for name, field in ((key, choice.info) for cls in configs for key, choice in cls.choices().items()):
        others = (name, *options._synonyms(name, configs))
        assert any("--" + other.replace("_", "-") in shown for other in others), name
        assert field.description, f"{name} has no docstring"


def test_flag_has_the_name_of_its_field() -> None:
    (config,) = parse("--model-name", "m", "--training-steps", "3", "--lr", "1e-4", "--gradient-checkpointing")
    assert isinstance(config, TrainConfig)
    assert (config.model_name, config.training_steps, config.optimizer.lr, config.compute.gradient_checkpointing) == (
        "m",
        3,
        1e-4,
        True,
    )


def test_switch_set_in_a_file_can_be_turned_off(tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text("gradient_checkpointing = true\n")
    (config,) = parse("--model-name", "m", "--config", str(toml), "--no-gradient-checkpointing")
    assert isinstance(config, TrainConfig)
    assert config.compute.gradient_checkpointing is False


@pytest.mark.parametrize(
    "arguments", [("--mode", "shared_vllm"), ("--weight-bridge-mode", "shared_vllm"), ("--single-copy",)]
)
def test_every_documented_name_sets_the_mode(arguments: tuple[str, ...]) -> None:
    (config,) = parse("--model", "m", *arguments)
    assert isinstance(config, TrainConfig)
    assert config.mode == "shared_vllm"


def test_flags_override_the_environment_which_overrides_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text('model_name = "toml"\ntraining_steps = 1\nseed = 1\nlr = 0.1\n')
    monkeypatch.setenv("BRIDGE_TRAINING_STEPS", "2")
    monkeypatch.setenv("BRIDGE_SEED", "2")
    (config,) = parse("--config", str(toml), "--seed", "3")
    assert isinstance(config, TrainConfig)
    assert (config.model_name, config.optimizer.lr, config.training_steps, config.seed) == ("toml", 0.1, 2, 3)


@pytest.mark.parametrize(("mode", "lr"), [("shared_vllm", 1e-6), ("none", 1e-6), ("lora_only", 1e-5)])
def test_default_learning_rate_depends_on_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, lr: float
) -> None:
    def rate(*arguments: str) -> float:
        (config,) = parse("--model", "m", *arguments)
        assert isinstance(config, TrainConfig)
        return config.learning_rate

    assert rate("--weight-bridge-mode", mode) == lr
    for written in (1e-6, 1e-5, 0.1):
        assert rate("--mode", mode, "--lr", str(written)) == written
        toml = tmp_path / "c.toml"
        toml.write_text(f'lr = {written}\nmode = "{mode}"\n')
        assert rate("--config", str(toml)) == written
    monkeypatch.setenv("BRIDGE_LR", "0.3")
    assert rate("--mode", mode) == 0.3


def test_refused_choice_reports_only_itself() -> None:
    with pytest.raises(UsageError) as refused:
        parse("--model", "m", "--mode", "lora")
    assert "--mode" in refused.value.message
    assert "lr" not in refused.value.message


def test_toml_file_accepts_synonyms(tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text('model = "m"\nport = 7\n')
    (config,) = parse("--config", str(toml))
    assert isinstance(config, TrainConfig)
    assert (config.model_name, config.server.port) == ("m", 7)


def test_both_configurations_share_the_model_and_the_port() -> None:
    serve, train = parse("--model-name", "m", "--vllm-port", "7", configs=(ServeConfig, TrainConfig))
    assert isinstance(serve, ServeConfig)
    assert isinstance(train, TrainConfig)
    assert (serve.model, serve.port, train.model_name, train.server.port) == ("m", 7, "m", 7)


def test_one_toml_file_serves_both_configurations(tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text('model = "m"\nmax_model_len = 64\nlr = 0.5\n')
    serve, train = parse("--config", str(toml), configs=(ServeConfig, TrainConfig))
    assert isinstance(serve, ServeConfig)
    assert isinstance(train, TrainConfig)
    assert (serve.max_model_len, train.optimizer.lr) == (64, 0.5)


def test_unknown_key_suggests_the_nearest_one(tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text('model_name = "m"\ntraining-step = 3\n')
    with pytest.raises(UsageError) as refused:
        parse("--config", str(toml))
    assert refused.value.message == f"training-step in {toml}: there is no such choice"
    assert refused.value.hint == "did you mean training_steps?"


def test_two_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="contradict"):
        parse("--model", "a", "--model-name", "b")


def test_all_faults_are_reported_with_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_SEED", "many")
    with pytest.raises(UsageError) as refused:
        parse("--lr", "-1")
    message = refused.value.message
    assert "--model-name is missing" in message
    assert "--lr: must be greater than 0, found '-1'" in message
    assert "BRIDGE_SEED: must be a valid integer, found 'many'" in message


NO_TOML = {
    "unfinished": "lr = ",
    "no UTF-8": b"\xff\xfe",
    "brackets": "lr = " + "[" * 5000 + "]" * 5000,
    "tables": "lr = " + "{a=" * 3000 + "1" + "}" * 3000,
    "digits": "training_steps = " + "9" * 5000,
}


@pytest.mark.parametrize("case", NO_TOML)
def test_invalid_toml_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    text: Any = NO_TOML[case]
    toml = tmp_path / "c.toml"
    toml.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=r"c\.toml is (not valid TOML: |nested too deeply)") as refused:
        parse("--model", "m", "--config", str(toml))
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        (("--learning-rate", "1e-4"), "lr", 1e-4),
        (("--num-generations", "4"), "group_size", 4),
        (("--max-completion-length", "9"), "max_new_tokens", 9),
        (("--max-steps", "3"), "training_steps", 3),
        (("--mask-truncated-completions",), "mask_truncated", True),
        (("--lora-rank", "16"), "lora_r", 16),
        (("--delta", "3"), "clip_dual", 3.0),
        (("--top-entropy-quantile", "0.2"), "top_entropy", 0.2),
        (("--lr-scheduler-type", "linear", "--lr-warmup-steps", "3"), "warmup_steps", 3),
    ],
)
def test_equivalent_names_of_other_tools_are_accepted(given: tuple[str, ...], field: str, value: object) -> None:
    (config,) = parse("--model", "m", *given)
    assert config.get(field) == value


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        (("--stop", "</answer>"), "stop", ("</answer>",)),
        (("--stop", '["\\n\\n", "x"]'), "stop", ("\n\n", "x")),
        (("--stop", "[1"), "stop", ("[1",)),
        (("--stop", "7"), "stop", ("7",)),
        (("--chat-template-kwargs", '{"enable_thinking": false}'), "chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_string_lists_and_objects_are_parsed_as_json(given: tuple[str, ...], field: str, value: object) -> None:
    (config,) = parse("--model", "m", *given)
    assert config.get(field) == value
    assert TrainConfig.of(model_name="m", **{field: value}).get(field) == value  # as in TOML


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--stop", ""), "--stop: must be text that is not empty, or a JSON list of such texts, found ''"),
        (("--stop", '["a", 1]'), "--stop: must be text that is not empty, or a JSON list of such texts, found"),
        (("--chat-template-kwargs", "enable_thinking"), "--chat-template-kwargs: must be a JSON object, such as"),
        (("--chat-template-kwargs", '{"tokenize": true}'), "must not contain tokenize, which Bridge sets"),
    ],
)
def test_malformed_json_values_are_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse("--model", "m", *given)
    assert message in refused.value.message


def test_borrowed_name_works_in_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text('model_name_or_path = "m"\nnum_generations = 2\n')
    monkeypatch.setenv("BRIDGE_MAX_STEPS", "5")
    serve, train = parse("--config", str(toml), configs=(ServeConfig, TrainConfig))
    assert isinstance(serve, ServeConfig)
    assert isinstance(train, TrainConfig)
    assert (serve.model, train.model_name, train.sampling.group_size, train.training_steps) == ("m", "m", 2, 5)
    with pytest.raises(UsageError, match="--lr 1 and --learning-rate 2 contradict each other"):
        parse("--model", "m", "--lr", "1", "--learning-rate", "2")


@pytest.mark.parametrize("cls", [ServeConfig, FeedConfig, TrainConfig])
def test_every_name_belongs_to_one_choice(cls: type[Config]) -> None:
    names = [name for key, one in cls.choices().items() for name in (key, *one.synonyms, *one.borrowed)]
    assert len(names) == len(set(names))
    assert not declaration.HINTS.keys() & set(cls.names())


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        (("--max-steps", "100", "--num-iterations", "4"), "--max-steps: TRL counts", "--training-steps 25"),
        (("--save-steps", "9", "--updates-per-batch", "2"), "--save-steps: TRL counts", "--save-interval 5"),
        (("--eval-steps", "8", "--updates-per-batch", "2", "--ppo-epochs", "2"), "of 4 optimizer", "--eval-interval 2"),
        (("--loss", "cispo", "--epsilon-high", "5"), "--clip-high 5 would clip it at 6", "--clip-high 4"),
        (("--loss", "cispo", "--epsilon-high", "0.5"), "clips the weight at 0.5", "--clip-high is the bound minus 1"),
    ],
)  # fmt: skip
def test_name_with_a_different_meaning_is_refused(given: tuple[str, ...], message: str, hint: str) -> None:
    given = "--model-name", "m", "--eval-samples", "1", *given
    with pytest.raises(UsageError) as refused:
        parse(*given)
    assert message in refused.value.message
    assert refused.value.hint == hint


def test_borrowed_name_works_if_it_counts_the_same(tmp_path: Path) -> None:
    (one,) = parse("--model-name", "m", "--max-steps", "100", "--save-steps", "5", "--epsilon-high", "0.3")
    assert isinstance(one, TrainConfig)
    assert (one.training_steps, one.checkpoints.save_interval, one.loss.clip_high) == (100, 5, 0.3)
    parse(
        "--model-name", "m", "--total-training-steps", "9", "--ppo-epochs", "4", "--save-freq", "2"
    )  # verl's names, which count batches
    parse("--model-name", "m", "--loss", "cispo", "--clip-ratio-high", "4")
    toml = tmp_path / "c.toml"
    toml.write_text("max_steps = 100\n")
    parse(
        "--model-name", "m", "--config", str(toml), "--training-steps", "25", "--num-iterations", "4"
    )  # the flag wins over the file


def test_hints_name_only_existing_flags() -> None:
    flags = {flag(name) for cls in (ServeConfig, TrainConfig) for name in cls.names()} | {"--model"}
    flags |= {"--out", "--push"}  # flags of bridge export
    named = {name for hint in declaration.HINTS.values() for name in re.findall(r"--[a-z0-9-]+", hint.split(" -- ")[0])}
    assert named <= flags


@pytest.mark.parametrize(
    ("variable", "hint"),
    [("BRIDGE_LRR", "did you mean BRIDGE_LR?"), ("BRIDGE_USE_VLLM", declaration.HINTS["use_vllm"])],
)
@pytest.mark.parametrize("configs", [(ServeConfig,), (ServeConfig, TrainConfig)])
def test_unknown_variable_is_refused_as_a_typo(
    monkeypatch: pytest.MonkeyPatch, variable: str, hint: str, configs: tuple[type[Config], ...]
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UsageError) as refused:
        parse("--model", "m", configs=configs)
    assert (refused.value.message, refused.value.hint) == (f"{variable}: there is no such choice", hint)


def test_variables_of_other_commands_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LR": "1e-3", "SERVER_URL": "http://a:1", "MANIFEST_PATH": "/m", "NONSENSE": ""}.items():
        monkeypatch.setenv(f"BRIDGE_{name}", value)
    (config,) = parse("--model", "m", configs=(ServeConfig,))
    assert isinstance(config, ServeConfig)


def test_toml_takes_tables_and_flat_keys(tmp_path: Path) -> None:
    flat, tables = tmp_path / "flat.toml", tmp_path / "tables.toml"
    flat.write_text('mode = "lora_only"\nloss = "gspo"\nlr = 1e-4\nlora_r = 4\neval_samples = 2\n')
    tables.write_text(
        'mode = "lora_only"\n[loss]\nname = "gspo"\n[optimizer]\nlr = 1e-4\n[lora]\nr = 4\n[evaluation]\nsamples = 2\n'
    )
    one, other = (parse("--model-name", "m", "--config", str(path)) for path in (flat, tables))
    assert one == other
    assert isinstance(one[0], TrainConfig)
    assert (one[0].loss.name, one[0].optimizer.lr, one[0].lora.r, one[0].evaluation.samples) == ("gspo", 1e-4, 4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nlearn_rate = 1", r"learn_rate in \[optimizer\] of .*: there is no such choice"),
        ("[optimizer]\nlr = -1", r"lr in \[optimizer\] of .*: must be greater than 0, found -1"),
        ("[optimiser]\nlr = 1", r"optimiser in .*: there is no such table\nhint: lr belongs in \[optimizer\]"),
        ("[optimiser]\nx = 1", r"optimiser in .*: there is no such table\nhint: did you mean \[optimizer\]\?"),
        ("[training]\nx = 1", r"training in .*: there is no such table\nhint: the tables are task, sampling, "),
    ],
)
def test_toml_error_names_the_table(tmp_path: Path, text: str, message: str) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text(text + "\n")
    with pytest.raises(UsageError, match=message):
        parse("--model-name", "m", "--config", str(toml))


@pytest.mark.parametrize("cls", [TrainConfig, ServeConfig])
def test_switch_in_place_of_a_number_is_refused(tmp_path: Path, cls: type[Config]) -> None:
    toml = tmp_path / "c.toml"
    kinds = {key: {choice.info.annotation, *get_args(choice.info.annotation)} for key, choice in cls.choices().items()}
    numbers = [key for key, known in kinds.items() if not known.isdisjoint({int, float})]
    assert len(numbers) > 2
    for key in numbers:
        toml.write_text(f"{key} = true\n")
        with pytest.raises(UsageError, match=f"{key} in .*: must be a number, not true or false, found True"):
            cls.resolve({"model_name": "m"}, toml)


@pytest.mark.parametrize("cls", [TrainConfig, ServeConfig])
def test_empty_optional_path_is_refused(cls: type[Config]) -> None:
    kinds = {key: get_args(choice.info.annotation) for key, choice in cls.choices().items()}
    paths = [key for key, known in kinds.items() if Path in known or (cls.choices()[key].is_path and known)]
    assert paths
    for key in paths:
        with pytest.raises(UsageError, match="must not be empty, found ''"):
            cls.resolve({"model_name": "m", key: ""})


@pytest.mark.parametrize("key", ["reward", "prompt_column", "answer_column"])
def test_empty_name_is_no_default(key: str) -> None:
    with pytest.raises(UsageError, match="must have at least 1 character, found ''"):
        TrainConfig.resolve({"model_name": "m", key: ""})


def test_document_separates_given_and_derived_values() -> None:
    config = TrainConfig.of(model_name="m", batch_size=16)
    document = config.document(config.changed(max_new_tokens=64, lr=1e-6))
    assert (document["rollouts"]["batch_size"], document["sampling"]["max_new_tokens"]) == (16, None)
    assert document["derived"] == {"max_new_tokens": 64, "lr": 1e-6}
    assert TrainConfig.written(document)["max_new_tokens"] == 64
    assert TrainConfig.written({"model_name": "m", "lr": 3e-6})["lr"] == 3e-6  # as earlier versions wrote it
