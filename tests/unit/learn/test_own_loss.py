"""`--loss file.py:function`: the same bits as a built-in loss, exact metrics for any micro-batches, and errors."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from bridge.checkpoints import metrics
from bridge.config import LossConfig
from bridge.errors import RewardError, UsageError
from bridge.learn import own_loss
from bridge.learn.policy_loss import LossSpec, policy_loss
from bridge.passes.packing import packs
from bridge.ranks.world import Ranks
from bridge.types import Group
from bridge_cli import main
from tests.unit.learn.test_policy_loss import doubled, group_of
from tests.unit.run import test_learner
from tests.unit.run.test_learner import base, learner_of, updated, weights
from tests.unit.several_ranks import on_ranks
from tests.unit.trainer_runs import Running, runner

EXAMPLE = f"{Path(__file__).parents[3] / 'examples' / 'own_loss_file.py'}:soft_clip"
DAPO = """
def dapo(tensors):
    ratios = (tensors.logprobs - tensors.old_logprobs).clamp(-20, 20).exp()
    clipped = ratios.clamp(0.8, 1.28)
    advantages = tensors.advantages
    low, high = ratios < 0.8, ratios > 1.28
    return -(ratios * advantages).minimum(clipped * advantages), {
        "clipped_low_share": (low & (advantages < 0)).detach(),
        "clipped_high_share": (high & (advantages > 0)).detach(),
        "ratio_of_good": ((ratios * (advantages > 0)).sum(), (advantages > 0).sum()),
        "tokens_of_sequence": tensors.lengths[tensors.sequences].float(),
    }

def summed(tensors):
    return (dapo(tensors)[0] * tensors.weights).sum()
"""
groups = test_learner.groups


def file(folder: Path, text: str = DAPO, name: str = "dapo") -> str:
    (folder / "my_loss.py").write_text(text)
    return f"{folder / 'my_loss.py'}:{name}"


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return runner(tmp_path, monkeypatch)


def with_signal(groups: Sequence[Group]) -> list[Group]:
    """Give every completion a nonzero advantage, since built-in losses leave out those without one."""
    rewards = (0.0, 1.0, 0.125, 0.25, 0.5, 2.0)
    return [replace(group, rewards=rewards[: len(group.rewards)]) for group in groups]


CUTS: tuple[dict[str, Any], ...] = (
    {}, {"updates_per_batch": 2, "passes_per_batch": 2, "lr": 0.05}, {"micro_batch_tokens": 12}, {"kl_coef": 0.0},
    {"gradient_release": True, "optimizer": "adamw"}, {"aggregation": "sequence_mean", "mismatch": "mask"},
    {"top_entropy": 0.5, "advantage_scale": "batch"},
)  # fmt: skip


@pytest.mark.parametrize("choices", CUTS)
@pytest.mark.parametrize("name", ["dapo", "summed"])
def test_rewritten_builtin_loss_has_the_same_bits(
    groups: list[Group], tmp_path: Path, choices: dict[str, Any], name: str
) -> None:
    learnt, after = list[dict[str, Any]](), []
    for loss in ("dapo", file(tmp_path, name=name)):
        model = base()
        learnt.append(updated(model, with_signal(groups), loss=loss, **choices))
        after.append(weights(model))
    assert all(torch.equal(after[0][key], after[1][key]) for key in after[0]) or name == "summed"
    assert learnt[1]["loss"] == (learnt[0]["loss"] if name == "dapo" else pytest.approx(learnt[0]["loss"], abs=1e-6))
    assert learnt[1]["grad_norm"] == pytest.approx(learnt[0]["grad_norm"], rel=0 if name == "dapo" else 1e-5)
    if name == "dapo":
        assert learnt[1].items() > learnt[0].items()


def trained(ranks: Ranks, groups: Sequence[Group], choices: dict[str, Any]) -> dict[str, Any]:
    learner = learner_of(base(), ranks=ranks, **choices)
    learner.take(groups)
    learner.prepare()
    learner.write()
    return learner.learnt()


def test_metrics_are_exact_over_cuts_and_ranks(groups: list[Group], tmp_path: Path) -> None:
    name = file(tmp_path)
    expected = updated(base(), groups, loss=name)
    added = expected.keys() - {*metrics.RECORDED}
    lengths = [len(one.token_ids) for group in groups for one in group.completions]
    assert expected["tokens_of_sequence"] == sum(length**2 for length in lengths) / sum(lengths)
    assert expected["ratio_of_good"] == 1
    in_parts = updated(base(), groups, loss=name, micro_batch_tokens=12)
    for learnt in (in_parts, *on_ranks(2, trained, groups, {"loss": name})):
        assert {name: learnt[name] for name in added} == pytest.approx({n: expected[n] for n in added}, rel=1e-6)


def test_own_loss_gets_the_reference_and_its_kl_is_added(tmp_path: Path) -> None:
    text = "def f(t):\n    assert t.reference_logprobs is not None\n    return 0 * t.logprobs, {}\n"
    spec = LossSpec.of(LossConfig(name=file(tmp_path, text, "f"), kl_coef=0.5))
    (batch,) = packs(bridge.samples([group_of([3, 3], [1.0, 0.0])]), max_tokens=100, device=torch.device("cpu"))
    logprobs = doubled(batch).sampled_logprobs_N.requires_grad_()
    loss, sums = policy_loss(logprobs, logprobs.detach(), doubled(batch), spec, logprobs.detach() - 1)
    assert loss.item() == pytest.approx(0.5 * math.exp(-1))
    assert sums["kl"].tolist() == pytest.approx([6 * math.exp(-1), 6])
    with pytest.raises(RewardError, match=r"my_loss\.py line 2"):
        LossSpec.of(LossConfig(name=file(tmp_path, text, "f")))


def test_library_computes_the_same_own_loss(tmp_path: Path) -> None:
    own = LossConfig(name=file(tmp_path))
    (batch,) = packs(bridge.samples([group_of([3, 3], [1.0, 0.0])], own), max_tokens=100, device=torch.device("cpu"))
    logprobs = (batch.sampled_logprobs_N - 0.1).requires_grad_()
    old = batch.sampled_logprobs_N
    expected = bridge.policy_loss(logprobs, batch, old_logprobs_N=old)
    assert torch.equal(bridge.policy_loss(logprobs, batch, own, old_logprobs_N=old), expected)


BROKEN: dict[str, tuple[str, str]] = {
    "raise ValueError('no')": ("raised ValueError: no (my_loss.py line 3)", "fix my_loss.py line 3"),
    "return tensors.nothing": ("has no attribute 'nothing' (my_loss.py line 3)", "fix"),
    "return None": ("returned None, expected a float tensor of shape (5,), one term per token (my_loss.py line 2)", ""),
    "return tensors.logprobs[:2]": ("returned a tensor of shape (2,), expected shape (5,)", ""),
    "return tensors.advantages": ("returned terms without a gradient", ""),
    "return tensors.logprobs.log(), {}": ("has a terms of", ""),
    "return tensors.logprobs.sub(tensors.logprobs.detach()).abs().sqrt(), {}": ("has a gradient of", ""),
    "return tensors.logprobs, 7": ("returned metrics 7", ""),
    "return tensors.logprobs, {'a b': tensors.mask}": ("returned metrics {'a b'", ""),
    "return tensors.logprobs, {'a': 7}": ("returned 7 as metric 'a', expected a tensor of shape (5,), or a pair", ""),
    "return tensors.logprobs, {'a': (tensors.mask, 1)}": ("as metric 'a'", ""),
    "return tensors.logprobs, {'a': (tensors.mask.sum(), None)}": ("as metric 'a'", ""),
    "return tensors.logprobs, {f'n{len(tensors.mask)}': tensors.mask}": ("returned the metrics [", ""),
    "return tensors.logprobs, {'a': (tensors.logprobs.sum(), 10**400)}": ("as metric 'a'", ""),
    "return tensors.logprobs, {'a': (tensors.logprobs.sum(), float('nan'))}": ("as metric 'a'", ""),
    "return tensors.logprobs.to_sparse()": ("returned a sparse_coo tensor on cpu, expected a dense tensor", ""),
    "return tensors.logprobs.to('meta')": ("returned a strided tensor on meta, expected a dense tensor on cpu", ""),
    "tensors.logprobs.sum().backward(); return tensors.logprobs * 1": ("calls backward() itself", "return"),
    "torch.set_default_dtype(torch.float64); return tensors.logprobs * 1": ("changes torch's grad mode or", ""),
}
TERMS = "-(tensors.logprobs - tensors.old_logprobs).exp() * tensors.advantages"
BROKEN |= {
    f"return {body.format(TERMS)}": (
        "does not double when tensors.weights do: it averages, sums",
        "* tensors.weights).sum()",
    )
    for body in (
        "({}).mean()",
        "({}).sum()",
        "(({}) * tensors.mask).sum() / tensors.mask.sum()",
        "(({}) * tensors.weights).sum() / tensors.weights.sum()",
        "({}) * tensors.weights",
        "({}).mean(), {{'ratio': tensors.mask}}",
    )
}
BROKEN |= {
    f"return {body.format(TERMS)}": ("has a different gradient if each sequence is a separate micro-batch", "(terms *")
    for body in (
        "(({}) * tensors.weights).sum() / len(tensors.lengths)",
        "({}) * len(tensors.mask)",
        "({}) / tensors.advantages.sub(tensors.advantages.mean()).square().mean().add(1)",
        "({}) * (tensors.sequences + 1)",
    )
}
BROKEN |= {
    f"tensors.{change}; return {TERMS}": (f"changes tensors.{change.partition('.')[0]} in place", "clone()")
    for change in (
        "advantages.mul_(0.1)",
        "sampled_logprobs.add_(1)",
        "weights.zero_()",
        "mask.fill_(True)",
        "sequences.zero_()",
        "lengths.fill_(1)",
        "old_logprobs.data.add_(1)",
        "advantages.numpy().fill(0)",
    )
}


@pytest.mark.parametrize("body", BROKEN)
def test_unusable_function_is_refused_before_a_run(body: str, tmp_path: Path) -> None:
    message, hint = BROKEN[body]
    with pytest.raises(RewardError) as refused:
        LossSpec.of(LossConfig(name=file(tmp_path, f"import torch\ndef f(tensors):\n    {body}\n", "f")))
    assert torch.get_default_dtype() == torch.float32
    assert message in refused.value.message
    assert "\n" not in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    "body",
    [
        f"return (({TERMS}) * tensors.weights).sum()",
        f"return ({TERMS}) * (torch.rand(len(tensors.mask)) < 0.5)",
        f"state[0] += 1; return ({TERMS}) / state[0]",
        f"return ({TERMS}) * tensors.mask",
        f"return ({TERMS}) / tensors.lengths[tensors.sequences]",
        f"advantages = tensors.advantages.clone().mul_(0.1); return ({TERMS}) * advantages",
    ],
)
def test_loss_independent_of_micro_batches_is_accepted(body: str, tmp_path: Path) -> None:
    text = f"import torch\nstate = [0]\ndef f(tensors):\n    {body}\n"
    before = torch.get_rng_state()
    LossSpec.of(LossConfig(name=file(tmp_path, text, "f")))
    assert torch.equal(torch.get_rng_state(), before)


def test_edited_loss_file_is_reloaded(tmp_path: Path) -> None:
    factors = []
    for factor in (2, 3):
        name = file(tmp_path, f"def f(t):\n    return {factor} * t.logprobs\n", "f")
        os.utime(tmp_path / "my_loss.py", (0, 0))
        spec = LossSpec.of(LossConfig(name=name))
        assert LossSpec.of(LossConfig(name=name)).own is spec.own
        assert spec.own is not None
        terms, _ = spec.own(own_loss.example_tensors((1,), has_reference=False))
        factors.append((terms / own_loss.example_tensors((1,), has_reference=False).logprobs).item())
    assert factors == [2, 3]


def test_input_changed_in_a_later_pass_is_refused(tmp_path: Path) -> None:
    text = f"def f(tensors):\n    len(tensors.mask) == 6 and tensors.advantages.zero_()\n    return {TERMS}\n"
    (batch,) = packs(bridge.samples([group_of([3, 3], [1.0, 0.0])]), max_tokens=100, device=torch.device("cpu"))
    logprobs = (batch.sampled_logprobs_N - 0.1).requires_grad_()
    with pytest.raises(RewardError, match=r"changes .*tensors\.advantages in place"):
        bridge.policy_loss(logprobs, batch, LossConfig(name=file(tmp_path, text, "f")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "nope",
            "--loss: must be one of dapo, grpo, dr_grpo, gspo, cispo, rloo, distill, sft, dpo, or path/to/file.py",
        ),
        ("missing.py:f", "there is no such file"),
        ("my_loss.py:g", "no function 'g' in my_loss.py; it defines f, two"),
        ("my_loss.py:two", "takes (a, b), expected one argument, the tensors"),
        ("my_loss.py:taken", "returns a metric named 'reward_mean', which Bridge measures itself"),
        ("my_loss.py:f --clip-low 0.1", "--clip-low has no effect with --loss my_loss.py:f"),
        ("my_loss.py:f --stop-at ratoi>=2", "there is no metric 'ratoi'"),
    ],
)
def test_invalid_loss_flag_is_a_one_line_error(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "def f(t):\n    return t.logprobs, {'ratio': t.mask}\ndef two(a, b): ...\n"
    file(tmp_path, text + "def taken(t):\n    return t.logprobs, {'reward_mean': t.mask}\n")
    command = ["train", "--model", "m", "--run-dir", "run", "--loss", *given.split()]
    assert main.answer(command) == 2
    assert message in capsys.readouterr().err.splitlines()[0]
    assert not (tmp_path / "run").exists()


def test_stop_at_may_use_a_metric_of_the_loss() -> None:
    goal = metrics.goal_of("ratio>=2", ["ratio"])
    assert [goal(metrics.StepMetrics(ratio=value)) for value in (1.0, 2.0)] == [False, True]
    assert not goal(metrics.Evaluation(ratio=2.0))
    with pytest.raises(UsageError, match="--stop-at: the loss of this run does not measure divergence"):
        metrics.goal_of("divergence<=0.1", ["kl"])
    assert metrics.goal_of("divergence<=0.1", ["kl", "divergence"])(metrics.StepMetrics(divergence=0.0))
    metrics.check_names(["clipped_low_share", "ratio"], "x.py:f")
    with pytest.raises(UsageError):
        metrics.check_names(["kl"], "x.py:f")


def test_run_records_the_metrics_and_resumes(running: Running) -> None:
    with running() as run:
        run.train(loss=EXAMPLE, training_steps=2, eval_samples=0, stop_at="ratio>=9")
        assert [row["ratio"] for row in run.metrics] == [1.0, 1.0]
        assert [row["ratio_of_long"] for row in run.metrics] == [None, None]  # since no completion is that long
        assert run.metrics[0]["clipped_low_share"] is None
        run.go_on(loss=EXAMPLE, training_steps=3)
        assert [row["ratio"] for row in run.metrics] == [1.0, 1.0, 1.0]


MADE_UP_CALLS = 9
"""Number of trial calls: both made-up batches twice and with doubled weights, and their three sequences separately."""
FAILS = """
calls = [0]
def f(tensors):
    calls[0] += 1
    if calls[0] > {good}:
        raise ValueError("enough")
    return -tensors.logprobs * tensors.advantages
"""


@pytest.mark.parametrize(
    ("good", "choices", "steps"),
    [
        (0, {}, 0),
        (1, {}, 1),
        (1, {"updates_per_batch": 2}, 1),  # the first update is published
        (1, {"updates_per_batch": 2, "training_steps": 1}, 1),  # and there is no next step
        (1, {"gradient_release": True}, 2),  # inside the write, before any weight changes
    ],
)
def test_function_that_raises_ends_the_run_in_one_line(
    running: Running, tmp_path: Path, good: int, choices: dict[str, Any], steps: int
) -> None:
    with running() as run:
        own_loss._load.cache_clear()
        error = run.stopped(RewardError, loss=file(tmp_path, FAILS.format(good=MADE_UP_CALLS + good), "f"), **choices)
        assert isinstance(error, RewardError)
        assert error.message.endswith("raised ValueError: enough (my_loss.py line 6)")
        assert len(run.metrics if steps else []) == steps
        assert [*run.saved()] == ([f"step_{steps}"] if steps else [])
