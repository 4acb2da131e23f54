"""A pytest plugin that makes every `GRPOTrainer` of a test module train on a live Bridge server of one model.

A test that fails runs again on stock TRL. Its outcome is one of `OUTCOMES`; only `broken` fails.
"""

import json
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import bridge

SERVER = Path(os.environ["BRIDGE_FOREIGN_SERVER"])
SERVED = os.environ["BRIDGE_FOREIGN_MODEL"]
RESULT = Path(os.environ["BRIDGE_FOREIGN_RESULT"])
OUTCOMES = ("passed", "refused by name", "fails on stock TRL, too", "needs another model", "skipped by TRL", "broken")
GIVEN = ("callbacks", "optimizers", "processing_class")
"""Arguments of `GRPOTrainer` that belong to `for_trl`."""
FAILURES = Exception, pytest.fail.Exception
"""The second is no `Exception`, and is raised by `pytest.raises` if nothing is."""
counts: Counter[str] = Counter()
of_another_model: dict[str, str] = {}
"""Test -> the model that it trains instead of the served one."""
first: list[torch.Tensor] = []
"""The initial weights, with which every test begins."""


policies: list[bridge.Policy] = []
"""The policy of the running test; an adapter is trained by another one than all weights."""


class AnotherModelError(Exception):
    """The test trains a model that is not the served one; its name is the argument."""


class OnBridge(GRPOTrainer):
    """A `GRPOTrainer` that trains the served model, or an adapter in its slot, and takes TRL's arguments."""

    def __init__(self, model: Any, **given: Any) -> None:
        peft_config = given.pop("peft_config", None)
        if isinstance(model, PeftModel):
            peft_config, model = model.peft_config["default"], model.get_base_model()
        name = model.config.name_or_path if isinstance(model, PreTrainedModel) else model
        if name != SERVED:
            raise AnotherModelError(name)
        args = given.pop("args", None) or GRPOConfig("unnamed")
        own = {name: given.pop(name) for name in GIVEN if name in given}
        policy = policies[-1]
        if peft_config is not None:
            policy.close()  # one policy updates a server
            policy = bridge.attach(SERVER, lora=peft_config)
            policies.append(policy)
        super().__init__(**bridge.for_trl(policy, args, peft_config=peft_config, **own), args=args, **given)


@pytest.fixture(autouse=True)
def on_the_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with bridge.attach(SERVER) as policy, torch.no_grad():
        first[:] = first or [parameter.clone() for parameter in policy.parameters()]
        policy.publish(lambda: [own.copy_(kept) for own, kept in zip(policy.parameters(), first, strict=True)])
        begun = policy.version
        policies[:] = [policy]
        with torch.enable_grad():
            monkeypatch.setattr(request.module, "GRPOTrainer", OnBridge)
            yield
        counts["fences"] += policies[-1].version - begun
        policies[-1].close()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    try:
        result = yield
    except bridge.BridgeError as error:
        counts["refused by name"] += 1
        pytest.xfail(f"refused: {error.message}")
    except AnotherModelError as error:
        counts["needs another model"] += 1
        of_another_model[pyfuncitem.nodeid] = str(error)
        pytest.xfail(f"another model: {error}")
    except FAILURES:
        if fault := _fault_of_stock(pyfuncitem):
            counts["fails on stock TRL, too"] += 1
            pytest.xfail(f"fails on stock TRL, too: {fault}")
        counts["broken"] += 1
        raise
    counts["passed"] += 1
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        counts["skipped by TRL"] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not any(counts[name] for name in OUTCOMES):
        terminalreporter.write_line("none of TRL's tests ran: there is no result")
        return
    outcomes = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES)
    terminalreporter.write_line(f"TRL's tests on Bridge: {outcomes}; {counts['fences']} fences")


def pytest_sessionfinish() -> None:
    RESULT.write_text(json.dumps({"counts": counts, "of_another_model": of_another_model}))


def _fault_of_stock(item: pytest.Function) -> str:
    """Return in one line why the test fails on stock TRL; empty if it passes."""
    item.module.GRPOTrainer = GRPOTrainer
    try:
        item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
    except FAILURES as error:  # any failure on stock TRL is not Bridge's fault
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    finally:
        item.module.GRPOTrainer = OnBridge
    return ""
