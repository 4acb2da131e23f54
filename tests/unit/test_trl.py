"""What `for_trl` and its callback refuse, and why: the trainer would train a copy, and the server would never change.

Not covered: a training run (`tests/cpu/test_trl.py`).
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bridge
from bridge import policy as policy_module
from bridge import trl
from bridge.errors import UsageError
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.test_policy import FenceClient, calls


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bridge.Policy]:
    monkeypatch.setattr(policy_module, "BridgeClient", FenceClient)
    monkeypatch.setattr(trl, "_check_version", lambda: None)
    toy = toy_server.serve(tiny.llama(), tmp_path / "model")
    with bridge.Policy(
        toy.manifest, sampling=bridge.SamplingConfig(), compute=bridge.ComputeConfig(), reads_only=False
    ) as made:
        yield made


def choices(**changed: Any) -> SimpleNamespace:
    """Return what `for_trl` reads of a `GRPOConfig` that chooses nothing."""
    plain: dict[str, Any] = {
        "world_size": 1, "n_gpu": 1, "device": torch.device("cpu"), "learning_rate": 1e-6, "weight_decay": 0.0,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "seed": 42, "chat_template_kwargs": None, "max_completion_length": 8,
        "temperature": 1.0, "fp16": False, "cast_lm_head_to_fp32": False,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **changed})


def test_plain_choices_are_accepted_and_training_begins(policy: bridge.Policy) -> None:
    (fence,) = bridge.for_trl(policy, choices())["callbacks"]
    fence.on_train_begin(None, None, None, model=policy.model)
    assert calls(policy)[-1] == "publish"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"n_gpu": 2}, "2 GPUs"),
        ({"device": torch.device("cuda:0")}, "would use cuda:0, and the server's weights are on cpu"),
        ({"fp16": True}, "fp16=True"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
    ],
)
def test_choices_that_would_train_a_copy_are_refused(
    policy: bridge.Policy, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        bridge.for_trl(policy, choices(**changed))


def test_filters_are_refused_because_trl_does_not_know_what_they_kept(
    policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_sampling", bridge.SamplingConfig(top_p=0.9))
    with pytest.raises(UsageError, match="samples with top_p, and TRL computes its loss over the whole vocabulary"):
        bridge.for_trl(policy, choices())


def test_parameters_outside_the_servers_memory_are_refused_when_training_begins(policy: bridge.Policy) -> None:
    """As with `peft_config`, or a model that was moved: its updates would never reach the server."""
    (fence,) = bridge.for_trl(policy, choices())["callbacks"]
    policy.model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"2 of the trainer's parameters .* adapter\.weight"):
        fence.on_train_begin(None, None, None, model=policy.model)
    assert "publish" not in calls(policy)


@pytest.mark.parametrize(
    ("loads", "best", "num_published"), [(True, "step_1", 1), (True, None, 0), (False, "step_1", 0)]
)
def test_the_best_checkpoint_is_published_when_training_ends(
    policy: bridge.Policy, loads: bool, best: str | None, num_published: int
) -> None:
    """The trainer loads it into the server's memory, whose prefix cache is of the last step's weights."""
    (fence,) = bridge.for_trl(policy, choices())["callbacks"]
    args, state = SimpleNamespace(load_best_model_at_end=loads), SimpleNamespace(best_model_checkpoint=best)
    fence.on_train_end(args, state, None, model=policy.model)
    assert calls(policy).count("publish") == num_published
