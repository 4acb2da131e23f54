"""TRL's GRPOTrainer on a server's own weights: the example, and its learning compared with a stock script.

Not covered: memory and speed.
"""

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bridge
from tests import forked
from tests.cpu import demo_server
from tests.cpu.demo_server import DemoServer
from tests.cpu.test_library import EXAMPLES
from tests.scenarios import LORA_RANK, LiveServer, different

EXAMPLE = (EXAMPLES / "trl_grpo.py").read_text()
STEPS = 60
LIMIT_S = 600
AT_THE_END = 10
"""Number of steps whose mean reward is compared, since a single step's varies by 0.04 by chance."""
LEAST_GAIN, NOISE = 0.2, 0.1
RATIO_NOISE = 0.02
"""Of the mean ratio over a batch: both sides compute in bf16, by other kernels."""
SHOWN = """
import json
print(json.dumps([entry["METRIC"] for entry in trainer.state.log_history if "METRIC" in entry]))
"""

MINE = """
from transformers import TrainerCallback
class Mine(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        assert all(parameter.grad is not None for parameter in model.parameters())
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 3
"""


def stock(model: str) -> str:
    """Return the example without Bridge."""
    lines = EXAMPLE.replace("import bridge  # +\n", "").replace("with bridge.attach() as policy:  # +", "if True:")
    start = lines.index("        **bridge.for_trl")
    return lines[:start] + f"        model={model!r},\n" + lines[lines.index("\n", start) + 1 :]


def rewards(script: str, folder: Path, *arguments: str, logged: str = "reward") -> list[float]:
    """Run a script in `folder`, and return the mean reward of each step, or another metric."""
    script = script.replace('report_to="none",', 'report_to="none", lr_scheduler_type="constant",')
    script = script.replace("batch_size=64", "batch_size=128") + SHOWN.replace("METRIC", logged)
    environment = {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if not torch.cuda.is_available():
        done = forked.ended(arguments, folder, program=script, environment=environment, limit_s=LIMIT_S)
    else:
        (folder / "script.py").write_text(script)
        done = subprocess.run(
            [sys.executable, "script.py", *arguments], cwd=folder, env={**os.environ, **environment},
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values: list[float] = json.loads(done.stdout.splitlines()[-1])
    return values


def test_at_most_five_lines_differ_from_a_stock_script() -> None:
    changed = [line for line in difflib.ndiff(stock("MODEL").splitlines(), EXAMPLE.splitlines()) if line[0] == "+"]
    assert 0 < len(changed) <= 5, changed


def test_trl_trains_in_the_servers_memory(llama: LiveServer, tmp_path: Path) -> None:
    """The script has its own callback, which ends training, and sees the gradients before the step uses them."""
    before = llama.status().version
    script = EXAMPLE.replace("attach()", f"attach({str(llama.path)!r})").replace(
        "for_trl(policy, args)", "for_trl(policy, args, callbacks=[Mine()])"
    )
    assert len(rewards(script.replace("args = GRPOConfig", MINE + "args = GRPOConfig"), tmp_path, "9")) == 3
    assert llama.status().version == before + 3
    with bridge.attach(llama.path) as policy:
        checks = policy.verify()
    assert all(check.status == "PASS" for check in checks), checks


def test_trl_corrects_for_the_servers_mismatch(llama: LiveServer, tmp_path: Path) -> None:
    """With `use_vllm=True`, TRL divides its own probabilities by those that the server sampled with."""
    script = EXAMPLE.replace("attach()", f"attach({str(llama.path)!r})").replace(
        "max_steps=", "use_vllm=True, max_steps="
    )
    ratios = rewards(script, tmp_path, "2", logged="sampling/importance_sampling_ratio/mean")
    assert len(ratios) == 2
    assert all(abs(ratio - 1) < RATIO_NOISE for ratio in ratios), ratios


@pytest.mark.slow
def test_trl_trains_an_adapter_in_the_servers_slot(lora_llama: LiveServer, tmp_path: Path) -> None:
    before = lora_llama.status().version
    settings = f"LoraConfig(r={LORA_RANK}, lora_alpha=16, target_modules=['q_proj', 'v_proj'])"
    script = EXAMPLE.replace("attach()", f"attach({str(lora_llama.path)!r}, lora=settings)")
    script = script.replace("for_trl(policy, args)", "for_trl(policy, args, peft_config=settings)")
    script = script.replace("import bridge", f"import bridge\nfrom peft import LoraConfig\nsettings = {settings}")
    script = script.replace('save_strategy="no"', 'save_strategy="steps", save_steps=2, beta=0.05')
    script = script.replace("float(text.strip() == wanted)", "len(text) + 0.0 * len(wanted)")
    assert len(rewards(script.replace("trainer.train()", "trainer.train(); policy.save('ours')"), tmp_path, "4")) == 4
    assert lora_llama.status().version == before + 1 + 4, "the slot, and four steps"
    last, kept = tmp_path / "trl_grpo" / "checkpoint-4", tmp_path / "whole"
    assert not [*last.glob("model*.safetensors")], "the adapter alone"
    saved, ours = (load_file(folder / "adapter_model.safetensors") for folder in (last, tmp_path / "ours"))
    assert saved.keys() == ours.keys()
    assert all(torch.equal(saved[name], ours[name]) for name in ours), "as PEFT reads it: B without the scaling"
    last.rename(kept)
    resumed = script.replace("trainer.train()", 'trainer.train(resume_from_checkpoint="trl_grpo/checkpoint-2")')
    assert len(rewards(resumed, tmp_path, "4")) == 4
    middle, whole, again = (b_of(folder) for folder in (last.with_name("checkpoint-2"), kept, last))
    assert middle.any()
    assert (whole - again).norm() < (whole - middle).norm(), "steps 3 and 4 again: rarely a tie falls otherwise"


def b_of(folder: Path) -> torch.Tensor:
    """Return all B matrices of a saved adapter, which start at zero, as one vector."""
    saved = load_file(folder / "adapter_model.safetensors")
    return torch.cat([saved[name].float().flatten() for name in sorted(saved) if "lora_B" in name])


@pytest.mark.slow
@pytest.mark.core
def test_resumed_trl_trainer_continues_in_the_servers_memory(llama: LiveServer, tmp_path: Path) -> None:
    saving = EXAMPLE.replace("attach()", f"attach({str(llama.path)!r})")
    saving = saving.replace("float(text.strip() == wanted)", "len(text) + 0.0 * len(wanted)")
    saving = saving.replace('save_strategy="no"', 'save_strategy="steps", save_steps=2')
    whole = rewards(saving, tmp_path, "4")
    last, kept = tmp_path / "trl_grpo" / "checkpoint-4", tmp_path / "whole"
    last.rename(kept)
    version = llama.status().version
    resumed = saving.replace("trainer.train()", 'trainer.train(resume_from_checkpoint="trl_grpo/checkpoint-2")')
    resumed_rewards = rewards(resumed, tmp_path, "4")
    assert resumed_rewards[:2] == whole[:2], "the first two steps are the checkpoint's"
    assert llama.status().version == version + 1 + 2
    assert different(llama, last) == []
    states = [torch.load(folder / "optimizer.pt")["state"].values() for folder in (kept, last)]
    for one, other in zip(*states, strict=True):
        assert one["step"] == other["step"] == 4
        mean = one["exp_avg"]
        assert (mean - other["exp_avg"]).norm() < mean.norm() / 3, "the same samples: rarely a tie falls otherwise"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with demo_server.served(tmp_path_factory.mktemp("trl")) as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("losses")
def test_bridge_learns_what_a_stock_trl_script_learns(demo: DemoServer, tmp_path: Path) -> None:
    demo.load_initial_weights()
    (tmp_path / "ours").mkdir()
    (tmp_path / "stock").mkdir()
    ours = rewards(EXAMPLE.replace("attach()", f"attach({str(demo.manifest)!r})"), tmp_path / "ours", str(STEPS))
    theirs = rewards(stock(str(demo.model)), tmp_path / "stock", str(STEPS))
    first, last, stocks = (
        sum(curve) / AT_THE_END for curve in (ours[:AT_THE_END], ours[-AT_THE_END:], theirs[-AT_THE_END:])
    )
    assert last - first >= LEAST_GAIN, (ours, theirs)
    assert abs(last - stocks) <= NOISE, (ours, theirs)
