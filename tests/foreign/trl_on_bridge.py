"""A pytest plugin that makes the trainers of TRL's test modules train on a live Bridge server of one model.

A test that fails runs again on stock TRL; only what passes there is broken.
"""

import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl  # noqa: F401 - the installed one, before pytest prepends the repository's
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback

import bridge
from bridge.trl_settings import CONFIGS

SERVER = Path(os.environ["BRIDGE_FOREIGN_SERVER"])
SERVED = os.environ["BRIDGE_FOREIGN_MODEL"]
RESULT = Path(os.environ["BRIDGE_FOREIGN_RESULT"])
MAX_STEPS = int(os.environ["BRIDGE_FOREIGN_MAX_STEPS"])
"""Steps after which a trainer stops that would train whole epochs; 0: none."""
GIVEN = ("callbacks", "optimizers", "processing_class")
"""Arguments of the trainers that belong to `for_trl`."""
FAILURES = Exception, pytest.fail.Exception
"""The second is no `Exception`, and is raised by `pytest.raises` if nothing is."""
outcomes: dict[str, tuple[str, str]] = {}
"""Test -> its outcome and why."""
of_another_model: dict[str, str] = {}
"""Test -> the model that it trains instead of the served one."""
first: list[torch.Tensor] = []
"""The initial weights, with which every test begins."""
created: list[str] = []
"""Names of the trainers that the running test has created."""
fences = 0


policies: list[bridge.Policy] = []
"""The policy of the running test; an adapter is trained by another one than all weights."""


class AnotherModelError(Exception):
    """The test trains a model that is not the served one; its name is the argument."""


def config_of(trainer: type[Trainer]) -> Any:
    """Return the class of the trainer's config; None if its trainer does not generate with `VLLMGeneration`."""
    for ancestor in trainer.__mro__:
        config = vars(sys.modules[ancestor.__module__]).get(ancestor.__name__.replace("Trainer", "Config"))
        if inspect.isclass(config) and any(base.__name__ in CONFIGS for base in config.__mro__):
            return config
    return None


class Limit(TrainerCallback):
    """Ends training after `MAX_STEPS`."""

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= MAX_STEPS


def on_bridge(stock: type[Trainer]) -> type[Trainer]:
    """Return a trainer that trains the served model, or an adapter in its slot, and takes TRL's arguments."""

    class OnBridge(stock):
        def __init__(self, *positional: Any, **named: Any) -> None:
            created.append(stock.__name__)
            given = dict(inspect.signature(super().__init__).bind(*positional, **named).arguments)
            given |= given.pop("kwargs", {})
            model, peft_config = given.pop("model"), given.pop("peft_config", None)
            if isinstance(model, PeftModel):
                peft_config, model = model.peft_config["default"], model.get_base_model()
            name = model.config.name_or_path if isinstance(model, PreTrainedModel) else model
            if name != SERVED:
                raise AnotherModelError(name if isinstance(name, str) else type(name).__name__)
            args = given.pop("args", None) or config_of(stock)("unnamed")
            own = {name: given.pop(name) for name in GIVEN if name in given}
            if MAX_STEPS and args.max_steps < 0:
                own["callbacks"] = [*(own.get("callbacks") or ()), Limit()]
            policy = policies[-1]
            if peft_config is not None:
                policy.close()  # one policy updates a server
                policy = bridge.attach(SERVER, lora=peft_config)
                policies.append(policy)
            super().__init__(**bridge.for_trl(policy, args, peft_config=peft_config, **own), args=args, **given)

    OnBridge.__name__ = OnBridge.__qualname__ = stock.__name__
    return OnBridge


def on_a_peft_model(stock: type[Trainer]) -> type[Trainer]:
    """Return TRL's trainer that wraps its model by itself, instead of leaving it to `peft_config`."""

    class OnPeftModel(stock):
        def __init__(self, model: Any, *positional: Any, peft_config: Any = None, **named: Any) -> None:
            if peft_config is not None:
                own = model if isinstance(model, PreTrainedModel) else AutoModelForCausalLM.from_pretrained(model)
                model = get_peft_model(own, peft_config)
            super().__init__(model, *positional, **named)

    return OnPeftModel


def trainers_of(module: Any) -> dict[str, type[Trainer]]:
    """Return the supported trainers that a test module has imported, by their names in it."""
    classes = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    return {name: value for name, value in classes.items() if issubclass(value, Trainer) and config_of(value)}


@pytest.fixture(autouse=True)
def on_the_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global fences  # noqa: PLW0603 - of the session
    created.clear()
    with bridge.attach(SERVER) as policy, torch.no_grad():
        first[:] = first or [parameter.clone() for parameter in policy.parameters()]
        policy.publish(lambda: [own.copy_(kept) for own, kept in zip(policy.parameters(), first, strict=True)])
        begun = policy.version
        policies[:] = [policy]
        with torch.enable_grad():
            for name, stock in trainers_of(request.module).items():
                monkeypatch.setattr(request.module, name, on_bridge(stock))
            yield
        fences += policies[-1].version - begun
        policies[-1].close()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    def ended(outcome: str, why: str = "") -> None:
        outcomes[pyfuncitem.nodeid] = outcome, why

    try:
        result = yield
    except bridge.BridgeError as error:
        ended("refused by name", error.message)
        pytest.xfail(f"refused: {error.message}")
    except AnotherModelError as error:
        ended("needs another model", str(error))
        of_another_model[pyfuncitem.nodeid] = str(error)
        pytest.xfail(f"another model: {error}")
    except FAILURES as error:
        if fault := _fault_of_stock(pyfuncitem):
            ended("fails on stock TRL, too", fault)
            pytest.xfail(f"fails on stock TRL, too: {fault}")
        ended("broken", _in_one_line(error))
        raise
    ended("passed" if created else "creates no trainer")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        outcomes[report.nodeid] = "skipped by TRL", report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if report.when == "setup" and report.failed:  # before a trainer exists
        outcomes[report.nodeid] = "fails on stock TRL, too", "its fixtures load from the hub what has no stand-in"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = Counter(outcome for outcome, _ in outcomes.values())
    if not counts:
        terminalreporter.write_line("none of TRL's tests ran: there is no result")
        return
    line = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    terminalreporter.write_line(f"TRL's tests on Bridge: {line}; {fences} fences")


def pytest_sessionfinish() -> None:
    RESULT.write_text(json.dumps({"outcomes": outcomes, "of_another_model": of_another_model, "fences": fences}))


def _fault_of_stock(item: pytest.Function) -> str:
    """Return in one line why the test fails on stock TRL; empty if it passes.

    On Bridge the trainer always gets a PEFT model, of which TRL copies the adapter as a reference.
    """
    ours = trainers_of(item.module)
    variants = {"": lambda stock: stock, "with a PEFT model instead of peft_config: ": on_a_peft_model}
    try:
        for words, variant in variants.items():
            for name, trainer in ours.items():
                setattr(item.module, name, variant(trainer.__mro__[1]))
            try:
                item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
            except FAILURES as error:  # any failure on stock TRL is not Bridge's fault
                return words + _in_one_line(error)
    finally:
        for name, trainer in ours.items():
            setattr(item.module, name, trainer)
    return ""


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
