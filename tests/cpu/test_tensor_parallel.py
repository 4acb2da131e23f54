"""Tensor parallelism on the CPU: a real vLLM with two ranks, a trainer process for each, and one copy of the weights.

Not covered: what parts compute (`tests/unit/passes/test_parallel.py`), several replicas, GPUs.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3MoeConfig

from bridge.checkpoints import checkpoint
from bridge.checks.one_copy_proof import logprob_diffs, verify
from bridge.config import TrainConfig
from bridge.modes import WAYS
from bridge.modes.mode import RunContext
from bridge.passes.prepared_model import PreparedModel
from bridge.processes import children
from bridge.processes.children import Child
from bridge.ranks.world import Ranks
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.server.manifest import MANIFEST_NAME
from bridge.types import Group
from bridge.weights.rank_parts import digest
from tests import scenarios
from tests.cpu import test_gpus
from tests.models import tiny
from tests.unit import learners
from tests.unit.several_ranks import on_ranks

pytestmark = pytest.mark.slow
NUM_PARTS, STEPS = 2, 3
SHARED_MEMORY = Path("/dev/shm")
FORM_OF_TRANSFORMERS_4 = {"torch_dtype", "rope_theta", "rope_scaling", "num_experts"}
"""Keys of a saved config.json in addition to those of transformers 5."""
IN_PARTS = "--tensor-parallel-size", str(NUM_PARTS)
ADAPTER = "--mode", "lora_only", "--lora-r", str(scenarios.LORA_RANK)
EITHER = pytest.mark.parametrize(
    "way", [pytest.param((), id="all weights"), pytest.param(ADAPTER, id="an adapter", marks=pytest.mark.several)]
)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Remove the files that vLLM's ranks leave in /dev/shm."""
    mailboxes = "vllm_dist_*cpushm_*"
    before = {*SHARED_MEMORY.glob(mailboxes)}
    yield
    for path in {*SHARED_MEMORY.glob(mailboxes)} - before:
        path.unlink(missing_ok=True)


def one_head() -> PretrainedConfig:
    """Return a model with tied embeddings, a padded vocabulary, and a single key-value head, which the parts share."""
    config = tiny.llama()
    config.num_key_value_heads = 1
    return config


def experts() -> PretrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=128, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


FAMILIES = {
    "qwen2": (tiny.qwen2, scenarios.PARITY_LIMIT),
    "one head": (one_head, scenarios.PARITY_LIMIT),
    "experts": (experts, scenarios.FAMILY_PARITY_LIMIT),
}


def scored(groups: Sequence[Group]) -> list[Group]:
    """Reward even tokens."""
    return [
        replace(
            group, rewards=tuple(sum(i % 2 == 0 for i in c.token_ids) / len(c.token_ids) for c in group.completions)
        )
        for group in groups
    ]


def trained(ranks: Ranks, model: Path, manifest: Path, folder: Path, choices: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps, save, and return the differences between this part and the server."""
    config = TrainConfig.of(
        model_name=str(model), vllm_config_path=manifest, lr=scenarios.LR, batch_size=32, group_size=4,
        max_new_tokens=24, training_steps=STEPS, **choices,
    )  # fmt: skip
    context = RunContext(name="test", scratch=folder / "scratch", ranks=ranks)
    mode: Any = WAYS[config.way](config, context)
    opened = mode.open()
    replayed = mode.replayed_experts
    learner = learners.made(config, opened, max_model_len=mode.max_model_len, experts=replayed, ranks=ranks)

    def sampled() -> list[Group]:
        url, name = mode.endpoint.url, mode.endpoint.model
        return ranks.run_on_rank_zero(lambda: scored(scenarios.sampled(url, name, experts=replayed is not None)))

    before = logprob_diffs(learner.trainable.prepared, sampled()).mean().item()
    figures, learnt = [], list[dict[str, Any]]()
    for step in range(1, STEPS + 1):
        learner.take(sampled(), step=step)
        learner.prepare()
        with mode.publish(Update()):
            learner.write()
        learnt.append(learner.learnt())
        figures.append((learnt[-1]["grad_norm"], learner.optimizer.changed_weight_share, mode.version))
    after = logprob_diffs(learner.trainable.prepared, sampled()).mean().item()
    if ranks.is_rank_zero:
        (folder / "saved").mkdir()
        mode.save(folder / "saved")
    else:
        mode.send_parts()
    served = ranks.run_on_rank_zero(lambda: [mode.client.digests(part) for part in range(NUM_PARTS)])[ranks.tp_rank]
    mode.close()
    return {
        "before": before, "after": after, "figures": figures, "weight_bytes": opened.weight_bytes,
        "rerouted": [step["rerouted_share"] for step in learnt],
        "mismatch": [step["logprob_diff_mean"] for step in learnt],
        "is_served": served == {name: digest(t) for name, t in mode._attached.server_tensors.items()},
    }  # fmt: skip


def shared_memory(server: Child) -> set[Path]:
    """Return the Python shared-memory segments of the server's processes."""
    maps = [region.path for process in children._tree(server) for region in process.memory_maps()]
    return {Path(path) for path in maps if path.startswith("/dev/shm/psm_")}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.core) if name == "one head" else name for name in FAMILIES]
)
def test_parts_train_in_place_and_match_the_server(family: str, tmp_path: Path) -> None:
    config, limit = FAMILIES[family]
    model = tiny.write(config(), tmp_path / "model", std=0.06)
    first = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with scenarios.served(model, tmp_path / "server", num_parts=NUM_PARTS) as server:
        before = server.sample()
        results = on_ranks(
            NUM_PARTS, trained, model, server.path, tmp_path, {}, tp_size=NUM_PARTS, limit_s=scenarios.START_LIMIT_S
        )
        groups = server.sample()
        with BridgeClient(server.manifest, timeout_s=60) as client:
            assert client.status().version == STEPS
        if family in ("one head", "experts"):
            checks = [*verify(server.path)]
            assert {check.status for check in checks} == {"PASS"}, checks
        shared = shared_memory(server.child)
        if family == "one head":
            scenarios.bridge("restore", model, "--vllm-config-path", server.path, folder=tmp_path)
            assert scenarios.same_samples(server.sample(), before)
    assert shared
    assert [path for path in shared if path.exists()] == []
    for mine in results:
        assert mine["before"] < limit, results
        assert mine["after"] < limit, results
        assert mine["weight_bytes"] == 0
        assert mine["is_served"]
        assert mine["figures"] == results[0]["figures"]
        assert mine["rerouted"] == results[0]["rerouted"]
        assert max(mine["mismatch"]) < limit, results
        assert all(share > 0.5 for _, share, _ in mine["figures"])
    if family == "experts":
        assert all(share is not None and share < scenarios.REROUTED_LIMIT for share in results[0]["rerouted"]), results
    else:
        assert results[0]["rerouted"] == [None] * STEPS
    saved, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    assert logprob_diffs(PreparedModel(saved), groups).mean().item() < limit
    assert logprob_diffs(PreparedModel(first), groups).mean().item() > 3 * limit
    given, written = (json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "saved"))
    assert written == given | {name: written[name] for name in FORM_OF_TRANSFORMERS_4 & written.keys()}


def test_adapter_in_parts_is_trained_in_slots_and_saved_as_peft(tmp_path: Path) -> None:
    model = tiny.write(one_head(), tmp_path / "model", std=0.06)
    choices = {"mode": "lora_only", "lora_r": scenarios.LORA_RANK}
    given, saved = (model, tmp_path / "server" / MANIFEST_NAME, tmp_path, choices), tmp_path / "saved"
    with scenarios.served(model, tmp_path / "server", max_lora_rank=scenarios.LORA_RANK, num_parts=NUM_PARTS) as server:
        base = server.sample()
        results = on_ranks(NUM_PARTS, trained, *given, tp_size=NUM_PARTS, limit_s=scenarios.START_LIMIT_S)
        for mine in results:
            assert isinstance(mine, dict), mine
            assert max(mine["before"], mine["after"]) < scenarios.PARITY_LIMIT, results
            assert (mine["weight_bytes"], mine["figures"]) == (0, results[0]["figures"])
            assert all(share > 0.1 for _, share, _ in mine["figures"])
        scenarios.serves_the_adapter(server, saved, base)
        assert {check.status for check in verify(server.path)} == {"PASS"}
        scenarios.bridge("restore", saved, "--vllm-config-path", server.path, folder=tmp_path)
        scenarios.serves_the_adapter(server, saved, base)


@pytest.mark.several
def test_checkpoint_resumes_with_any_number_of_parts(tmp_path: Path) -> None:
    model = tiny.write(one_head(), tmp_path / "model", std=0.06)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    test_gpus.run(model, whole, *IN_PARTS, "--training-steps", "3", "--save-interval", "2", gpus=1)
    checkpoints, new_checkpoints = whole / "run" / "checkpoints", resumed / "checkpoints"
    shutil.copytree(checkpoints / "step_2", new_checkpoints / "step_2")
    continued = "--resume", "--save-path", str(new_checkpoints), "--training-steps"
    test_gpus.run(model, resumed, *IN_PARTS, *continued, "3", gpus=1)
    assert test_gpus.content(new_checkpoints / "step_3") == test_gpus.content(checkpoints / "step_3")
    test_gpus.run(model, resumed, *continued, "4", gpus=1)
    test_gpus.run(model, resumed, *IN_PARTS, *continued, "5", gpus=1)
    rows = [*test_gpus.metrics(whole), *test_gpus.metrics(resumed)]
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4, 5]
    assert all(float(str(row["logprob_diff_mean"])) < scenarios.PARITY_LIMIT for row in rows)
    state = json.loads((new_checkpoints / "step_5" / "optimizer" / "state.json").read_text())
    assert set(state["steps"].values()) == {5}


@pytest.mark.several
def test_adapter_resumes_with_any_number_of_parts_and_by_disk(tmp_path: Path) -> None:
    model, saved = tiny.write(one_head(), tmp_path / "model", std=0.06), tmp_path / "saved"
    ways = (IN_PARTS, (), IN_PARTS, (*IN_PARTS, "--lora-handover", "disk"))
    for steps, way in enumerate(ways, start=2):
        resumes = ("--resume",) if steps > 2 else ()
        choices = *ADAPTER, *way, *resumes, "--save-path", str(saved), "--training-steps", str(steps)
        test_gpus.run(model, tmp_path, *choices, gpus=1)
    rows = test_gpus.metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(float(str(row["logprob_diff_mean"])) < scenarios.PARITY_LIMIT for row in rows)
    state = json.loads((saved / "adapter_step_5" / "optimizer" / "state.json").read_text())
    assert set(state["steps"].values()) == {5}


@EITHER
def test_two_replicas_of_two_parts_train_in_lockstep(tmp_path: Path, way: Sequence[str]) -> None:
    model = tiny.write(one_head(), tmp_path / "model", std=0.06)
    test_gpus.run(model, tmp_path, *IN_PARTS, *way, "--training-steps", "2", gpus=2 * NUM_PARTS)
    rows = test_gpus.metrics(tmp_path)
    first = 2 if way else 1  # a new adapter is a version, too
    assert [(row["step"], row["weight_version"]) for row in rows] == [(1, first), (2, first + 1)]
    assert all(float(str(row["logprob_diff_mean"])) < scenarios.PARITY_LIMIT for row in rows)
    assert len([*(tmp_path / "run" / "ranks").glob("*/serve.log")]) == 1, "the first replica's is elsewhere"


@EITHER
def test_server_in_parts_is_restarted_without_losing_a_step(tmp_path: Path, way: Sequence[str]) -> None:
    model = tiny.write(one_head(), tmp_path / "model", std=0.06)
    argv = test_gpus.command(model, tmp_path, *IN_PARTS, *way, "--training-steps", "12", gpus=1)
    process = test_gpus.started(argv, tmp_path / "out")
    test_gpus.wait_for_steps(tmp_path, process, 2)
    (pid,) = re.findall(r"starting vLLM \(pid (\d+)", (tmp_path / "out").read_text())
    os.kill(int(pid), signal.SIGKILL)
    assert process.wait(test_gpus.LIMIT_S) == 0, (tmp_path / "out").read_text()[-4000:]
    assert [row["step"] for row in test_gpus.metrics(tmp_path)] == [*range(1, 13)]
    assert "the server died" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_in_parts_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    model = tiny.write(one_head(), tmp_path / "model", std=0.06)
    argv = test_gpus.command(model, tmp_path, *IN_PARTS, "--training-steps", "500", "--save-interval", "2", gpus=1)
    process = test_gpus.started(argv, tmp_path / "out")
    test_gpus.wait_for_steps(tmp_path, process, 3)
    tree = test_gpus.everything(process)
    (rank,) = test_gpus.ranks_of(tree, 1)
    (process if how is signal.SIGINT else rank).send_signal(how)
    assert process.wait(test_gpus.LIMIT_S) == (130 if how is signal.SIGINT else 1)
    assert not test_gpus.left(tree)
    output = (tmp_path / "out").read_text()
    assert "Traceback" not in output
    assert ("interrupted" if how is signal.SIGINT else "error: rank 1 of 2 was killed by SIGKILL") in output
    newest, _ = checkpoint.newest(tmp_path / "run" / "checkpoints", "step_")
    assert newest is not None
    assert newest.progress.step >= (3 if how is signal.SIGINT else 2)
