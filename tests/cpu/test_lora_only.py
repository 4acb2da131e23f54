"""`lora_only` with the real vLLM on the CPU, behind an API key: both hand-overs, resumed, torn and restored.

Not covered: the slots (`test_lora_slots.py`), stock servers (`test_stock.py`), and refusals, which need no vLLM
(`tests/unit/modes/test_lora_disk.py`).
"""

import json
import signal
from pathlib import Path

import pytest

import bridge
from tests import disturbed, scenarios
from tests.disturbed import Disturbance
from tests.forked import Command
from tests.ground import UNEVEN
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.scenarios import LiveServer

KILLED_IN_STEP = 3
NUM_MATRICES = 2 * 7 * 2
"""A and B of seven projections in two layers."""
LIMIT_S = 240


def adapter_flags(handover: str) -> tuple[str, ...]:
    return "--mode", "lora_only", "--lora-handover", handover, "--lora-r", str(scenarios.LORA_RANK)


def test_adapter_trains_on_a_previously_used_server(lora_llama: LiveServer, tmp_path: Path) -> None:
    for number, handover in enumerate(("memory", "disk", "memory")):
        folder = tmp_path / str(number)
        folder.mkdir()
        scenarios.trains_an_adapter(lora_llama, folder, handover)


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_run_resumes_from_its_adapter_without_repeating_steps(
    lora_llama: LiveServer, tmp_path: Path, handover: str
) -> None:
    base = lora_llama.sample()
    scenarios.trained(lora_llama, tmp_path, *adapter_flags(handover), steps=2)
    stderr = scenarios.trained(lora_llama, tmp_path, *adapter_flags(handover), "--resume", steps=4).stderr
    assert f"resuming after step 2 from {tmp_path / 'saved' / 'adapter_step_2'}" in stderr
    assert "the base model is the server's own: this process holds 0 bytes of it" in stderr
    steps = scenarios.metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[0]["weight_version"] < steps[1]["weight_version"] < steps[2]["weight_version"]
    assert all(step["logprob_diff_mean"] < scenarios.PARITY_LIMIT for step in steps), steps
    scenarios.serves_the_adapter(lora_llama, tmp_path / "saved" / "adapter_step_4", base)


def test_mixture_of_experts_gets_an_adapter_outside_experts(tmp_path: Path) -> None:
    """It runs in float32, in which rounding does not swap experts."""
    model = tiny.write(FAMILIES["Qwen3-MoE"](), tmp_path / "model")
    with scenarios.served(model, tmp_path / "server", max_lora_rank=scenarios.LORA_RANK, dtype="float32") as server:
        assert not [name for name in server.manifest.shards[0].lora_slots if "experts" in name]
        scenarios.trained(server, tmp_path, *adapter_flags("memory"))
    steps = scenarios.metrics(tmp_path / "run")
    assert max(step["logprob_diff_max"] for step in steps) < 1e-4, steps


def test_adapters_in_turn_are_verified_on_one_base(lora_llama: LiveServer) -> None:
    sample = bridge.Sample(
        prompt_token_ids=(5, 6, 7),
        token_ids=(8, 9, 10),
        sampled_logprobs=(-1.0,) * 3,
        advantages=(1.0,) * 3,
        weight=1.0,
    )
    lora = bridge.LoraConfig(r=scenarios.LORA_RANK)
    with bridge.attach(lora_llama.path, lora=lora, several_adapters=True) as policy:
        adapters = [policy.new_adapter(seed=1), policy.new_adapter(r=2, alpha=8, seed=2)]
        completions = []
        for adapter in adapters:
            policy.use(adapter)
            for _ in range(3):
                policy.train_step([sample], lr=3e-2)
            failed = [check for check in policy.verify() if check.status != "PASS"]
            assert not failed, failed
            (group,) = policy.sample([[5, 6, 7]], n=1, max_tokens=8, temperature=0)
            completions.append(group.completions[0].token_ids)
        for adapter, before in zip(adapters, completions, strict=True):
            policy.use(adapter)
            (group,) = policy.sample([[5, 6, 7]], n=1, max_tokens=8, temperature=0)
            assert group.completions[0].token_ids == before


def killed_while_it_writes(server: LiveServer, folder: Path, *flags: str) -> int:
    """Train until the trainer kills itself halfway through its third write; return its pid."""
    (folder / "uneven.py").write_text(UNEVEN)
    killed = Disturbance(fault="SIGKILL", phase="writing", step=KILLED_IN_STEP, num_pieces=NUM_MATRICES // 2)
    arguments: list[str | Path] = [
        *("train", *adapter_flags("memory"), *flags, "--model-name", server.manifest.model),
        *("--vllm-config-path", server.path, "--environment", "uneven.py:Uneven", "--training-steps", "5"),
        *("--batch-size", "8", "--group-size", "4", "--lr", "3e-3", "--max-new-tokens", "16"),
        *("--run-dir", "run", "--save-path", "saved"),
    ]
    trainer = Command(arguments, folder, program=disturbed.program(killed))
    try:
        assert trainer.wait(LIMIT_S) == -signal.SIGKILL, trainer.stderr
    finally:
        trainer.kill()
    return trainer.pid


def check_named(server: LiveServer, folder: Path, hint: Path, trainer_pid: int) -> None:
    """Check that doctor reports what is torn, which process caused it, and the fix."""
    printed = scenarios.bridge("doctor", "--json", "--vllm-config-path", server.path, folder=folder, expect=3).stdout
    (fence,) = [row for row in map(json.loads, printed.splitlines()) if row["name"] == "Fence"]
    assert (fence["status"], fence["hint"]) == ("FAIL", f"bridge restore {hint}")
    assert "the adapter may be half-written" in fence["found"]
    assert f"process {trainer_pid} died inside the fence" in fence["found"]


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--save-interval", "1"), f"saved/adapter_step_{KILLED_IN_STEP - 1}"),
        ((), "run/served/bridge-adapter"),  # before the first checkpoint
    ],
)
def test_torn_adapter_is_reported_and_restored(
    lora_llama: LiveServer, tmp_path: Path, flags: tuple[str, ...], hint: str
) -> None:
    base, whole = lora_llama.sample(), tmp_path / hint
    pid = killed_while_it_writes(lora_llama, tmp_path, *flags)
    torn = lora_llama.status()
    assert (torn.state, torn.writes, torn.last_checkpoint) == ("torn", "adapter", str(whole))
    check_named(lora_llama, tmp_path, whole, pid)
    for handover in ("memory", "disk"):
        run_flags = ("--save-path", "elsewhere", "--run-dir", f"refused_{handover}")
        refused = scenarios.bridge(
            *("train", *adapter_flags(handover), *run_flags, "--model-name", lora_llama.manifest.model),
            *("--vllm-config-path", lora_llama.path),
            folder=tmp_path,
            expect=4,
        )
        assert refused.stderr.splitlines()[-1] == f"hint: bridge restore {whole}"
        assert not (tmp_path / f"refused_{handover}").exists()
    output = scenarios.bridge("restore", "--json", whole, "--vllm-config-path", lora_llama.path, folder=tmp_path).stdout
    assert json.loads(output)["version"] == torn.version + 1 == lora_llama.status().version
    assert lora_llama.status().state == "serving"
    if flags:
        scenarios.serves_the_adapter(lora_llama, whole, base)
    else:  # a new adapter, whose B is zero
        assert scenarios.adapter_name(lora_llama.manifest.url) == "bridge-adapter"
        assert scenarios.same_samples(lora_llama.sample("bridge-adapter"), lora_llama.sample())
    assert scenarios.same_samples(lora_llama.sample(), base)


def test_resumed_run_restores_a_torn_adapter(lora_llama: LiveServer, tmp_path: Path) -> None:
    base = lora_llama.sample()
    killed_while_it_writes(lora_llama, tmp_path, "--save-interval", "1")
    scenarios.trained(lora_llama, tmp_path, *adapter_flags("memory"), "--resume", steps=4)
    assert [step["step"] for step in scenarios.metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert lora_llama.status().state == "serving"
    scenarios.serves_the_adapter(lora_llama, tmp_path / "saved" / "adapter_step_4", base)
