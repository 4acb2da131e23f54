"""`import bridge` on the real vLLM on the CPU: every example as a user runs it, and calls that no example uses."""

import asyncio
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import bridge
from bridge.checkpoints.run_directory import RunDirectory
from bridge.checks.one_copy_proof import logprob_diffs
from bridge.errors import AttachError, RejectedRequestError, UsageError
from bridge.passes.prepared_model import PreparedModel
from tests import forked, scenarios
from tests.cpu.conftest import Servers
from tests.cpu.test_tensor_parallel import experts
from tests.models import tiny
from tests.scenarios import LiveServer, different
from tests.unit.engine.test_policy import manifest_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = bridge.SamplingConfig(max_new_tokens=8, group_size=4)
STEPS = 3


def run(example: str, server: LiveServer, *arguments: str) -> list[str]:
    """Run an example in the server's folder, and return its lines."""
    program = (EXAMPLES / f"{example}.py").read_text()
    done = forked.ended(arguments, server.path.parent, program=program, limit_s=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("example", ["own_loss", "own_optimizer", "two_tasks", "warm_up"])
def test_library_example_updates_the_server(llama: LiveServer, example: str) -> None:
    before = llama.status().version
    lines = run(example, llama, str(STEPS))
    assert [line.partition(":")[0] for line in lines[:STEPS]] == [f"version {before + 1 + n}" for n in range(STEPS)]
    assert llama.status().version == before + STEPS


def test_killed_loop_resumes_exactly(servers: Servers, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("reinforce", servers.of("llama"), "5", str(whole), "2")
    server = servers.of("llama")  # with its initial weights
    command = [sys.executable, str(EXAMPLES / "reinforce.py"), "5", str(killed), "2"]
    with subprocess.Popen(command, cwd=server.path.parent, stdout=subprocess.PIPE, text=True) as loop:
        assert loop.stdout is not None
        for _ in range(3):  # the third step is lost: there is a checkpoint of every second one
            loop.stdout.readline()
        loop.kill()
    assert len(run("reinforce", server, "5", str(killed), "2")) == 3
    one, other = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (whole, killed)
    )
    assert [line["step"] for line in other] == [1, 2, 3, 4, 5]
    for name in ("loss", "reward_mean", "completion_tokens_mean"):
        assert [line[name] for line in one] == [line[name] for line in other], name
    last = RunDirectory(killed).checkpoints / "step_5"
    assert different(server, last) == [], "the server has what the checkpoint has"
    assert different(server, RunDirectory(whole).checkpoints / "step_5") == []
    report = scenarios.bridge("report", killed, "--json", folder=tmp_path)
    assert json.loads(report.stdout)


def test_every_example_is_tested_and_short() -> None:
    here = "".join(
        (Path(__file__).parent / name).read_text() for name in ("test_library.py", "test_losses.py", "test_trl.py")
    )
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) == 9
    for file in files:
        assert file.stem in here, f"no test runs {file.name}"
        assert len(file.read_text().splitlines()) <= 40, file.name


@pytest.mark.slow
def test_student_moves_towards_its_teacher(llama: LiveServer, tmp_path: Path) -> None:
    """The teacher has the same shape and different weights; the student's divergence from it must fall."""
    teacher = tiny.write(tiny.llama(), tmp_path / "teacher", seed=1, std=0.06)
    with scenarios.served(teacher, tmp_path / "server") as other:
        before = other.status().version
        lines = run("distillation", llama, str(llama.path), str(other.path), "12")
        assert other.status().version == before, "a teacher is not updated"
    nats = [float(line.split()[2]) for line in lines]
    assert sum(nats[-3:]) < sum(nats[:3]), lines


def test_policy_is_one_copy_and_matches_its_checkpoint(llama: LiveServer, tmp_path: Path) -> None:
    with bridge.attach(llama.path, sampling=SHORT) as policy:
        optimizer = policy.optimizer("adamw", lr=scenarios.LR)
        for _ in range(STEPS):
            groups = policy.sample(["say 1:", "say 2:"], lambda _, text: float(text.count("a")), seed=3)
            for batch in policy.pack(bridge.samples(groups)):
                logprobs, _ = policy.logprobs(batch)
                bridge.policy_loss(logprobs, batch).backward()
            moved = policy.update(optimizer)
        assert (moved.version, policy.version) == (llama.status().version,) * 2
        assert all(parameter.grad is None for parameter in policy.parameters())
        checks = policy.verify()
        folder = policy.save(tmp_path / "saved")
        with pytest.raises(UsageError, match="saved"):
            policy.save(folder)
        groups = policy.sample(["say 1:", "say 2:"])
    assert checks
    assert all(check.status == "PASS" for check in checks), checks
    saved = logprob_diffs(PreparedModel(scenarios.loaded(folder)), groups)
    assert saved.mean() < scenarios.PARITY_LIMIT


def test_same_seed_samples_the_same_completions(llama: LiveServer) -> None:
    with bridge.attach(llama.path, sampling=SHORT) as policy:
        one, same = (policy.sample(["say 1:"], seed=5) for _ in range(2))
        others = [policy.sample(["say 1:"]) for _ in range(2)]
    assert one == same
    assert others[0] != others[1] != one


def test_one_process_updates_and_others_read(llama: LiveServer) -> None:
    with bridge.attach(llama.path, sampling=SHORT) as policy:
        program = "import sys, bridge; bridge.attach(sys.argv[1])"
        second = forked.ended([llama.path], llama.path.parent, program=program, limit_s=120)
        assert second.returncode != 0
        assert AttachError.__name__ in second.stderr
        with bridge.attach(llama.path, sampling=SHORT, reads_only=True) as reader:
            weight = next(iter(reader.parameters()))
            weight.grad = torch.zeros_like(weight)
            with pytest.raises(UsageError, match="is read-only"):
                reader.update(torch.optim.SGD([weight], lr=1.0))
        assert policy.version == llama.status().version


def test_non_finite_gradient_changes_nothing(llama: LiveServer) -> None:
    before = llama.status().version
    with bridge.attach(llama.path, sampling=SHORT) as policy:
        weight = next(iter(policy.parameters()))
        kept = weight.detach().clone()
        for optimizer in (torch.optim.SGD([weight], lr=1.0), policy.optimizer(lr=1e-3)):
            weight.grad = torch.full_like(weight, math.nan)
            with pytest.raises(UsageError, match="no weight was changed"):
                policy.update(optimizer)
        assert torch.equal(weight, kept)
        weight.grad = torch.full_like(weight, 1.0)
        policy.update(torch.optim.SGD([weight], lr=1.0), max_norm=weight.numel() ** 0.5 / 4)
        assert torch.allclose((kept - weight.detach()).float(), torch.tensor(0.25), atol=0.01)  # clipped to a quarter
    assert llama.status().version == before + 1


def test_padding_is_computed_correctly_or_refused(llama: LiveServer) -> None:
    """Attention for packed sequences uses no mask, and would silently attend to padding."""
    ids, mask = torch.tensor([[0, 0, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, 1]])
    with bridge.attach(llama.path, sampling=SHORT) as policy, torch.no_grad():
        alone = policy.model(input_ids=ids[:, 2:]).logits[0, -1]
        positions = torch.tensor([[0, 0, 0, 1, 2]])
        padded = policy.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[0, -1]
        assert torch.allclose(padded, alone, atol=0.05)
        policy.pack([policy.encode("a", "b")])
        with pytest.raises(UsageError, match="padding"):
            policy.model(input_ids=ids, attention_mask=mask, position_ids=positions)
        policy.model(input_ids=ids[:, 2:], attention_mask=mask[:, 2:])


@pytest.mark.slow
@pytest.mark.core
def test_serve_starts_a_server_and_stops_it(tmp_path: Path) -> None:
    model = tiny.write(tiny.llama(), tmp_path / "model")
    with bridge.serve(model, *scenarios.EAGER, sampling=SHORT, device="cpu", max_model_len=256) as policy:
        (group,) = policy.sample([{"prompt": "say 1:", "answer": "x"}])
        server = manifest_of(policy).server
        assert server.is_alive()
    assert len(group.completions) == SHORT.group_size
    assert replace(group, completions=()).rewards == (0.0,) * SHORT.group_size
    assert not server.is_alive()


ATTENTION = bridge.LoraConfig(r=scenarios.LORA_RANK, target_modules="q_proj,k_proj,v_proj,o_proj")


def test_policy_trains_an_adapter_in_the_servers_slot(lora_llama: LiveServer, tmp_path: Path) -> None:
    optimizer = bridge.OptimizerConfig(lr=1e-2)
    base = PreparedModel(scenarios.loaded(Path(lora_llama.manifest.model)))
    with bridge.attach(lora_llama.path, lora=ATTENTION, sampling=SHORT, optimizer=optimizer) as policy:
        names = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
        assert names
        assert all(".lora_" in name for name in names)
        for _ in range(STEPS):
            groups = policy.sample(["say 1:", "say 2:"], lambda _, text: sum(map(ord, text)) % 7 + 0.0, seed=3)
            passes, stepped = policy.train_step(bridge.samples(groups))
            assert passes.metrics["logprob_diff_mean"] < scenarios.PARITY_LIMIT
            assert stepped.version == policy.version
        groups = policy.sample(["say 1:", "say 2:"])
        checks = policy.verify()
        folder = policy.save(tmp_path / "adapter")
    assert {check.status for check in checks} <= {"PASS", "SKIP"}, checks
    adapted = scenarios.loaded(folder)
    assert logprob_diffs(PreparedModel(adapted), groups).mean() < scenarios.PARITY_LIMIT
    assert logprob_diffs(base, groups).mean() > 3 * scenarios.PARITY_LIMIT


def test_threads_and_tasks_share_a_policy(llama: LiveServer) -> None:
    """Six threads sample three times each while the main thread steps; every call returns, or raises one clear line."""
    with bridge.attach(llama.path, sampling=SHORT, optimizer=bridge.OptimizerConfig(lr=1e-6)) as policy:
        samples = bridge.samples(policy.sample(["say 1:"] * 4, lambda _, text: float(len(text))))
        with ThreadPoolExecutor(6) as pool:
            calls = [pool.submit(policy.sample, [f"say {number}:"]) for number in range(18)]
            versions = [policy.train_step(samples)[1].version for _ in range(3)]
            sampled = [call.result(timeout=120) for call in calls]
        assert len(sampled) == 18
        assert versions == [*range(versions[0], versions[0] + 3)]

        async def several() -> list[list[bridge.Group]]:
            cut = asyncio.ensure_future(policy.sample_async(["say a lot:"] * 8, max_tokens=200))
            await asyncio.sleep(0.2)
            cut.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cut
            return await asyncio.gather(*(policy.sample_async([f"say {number}:"], n=2) for number in range(4)))

        groups = asyncio.run(asyncio.wait_for(several(), 120))
        assert [len(group.completions) for (group,) in groups] == [2] * 4
        assert len(policy.sample(["say 1:"])) == 1

        def nested() -> None:
            with pytest.raises(UsageError, match=r"policy\.sample was called inside policy\.publish"):
                policy.sample(["say 1:"])
            with pytest.raises(UsageError, match=r"policy\.train_step|policy\.forward_backward"):
                policy.train_step(samples)

        policy.publish(nested)


FORKS = """
import json, multiprocessing, os, signal, sys, threading
import bridge
from torch.utils.data import DataLoader

def outcome(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "works"

def calls(policy, samples):
    return [outcome(lambda: policy.sample(["say 1:"])), outcome(lambda: policy.train_step(samples))]

def own(path):
    with bridge.attach(path, sampling=policy.sampling, reads_only=True) as reader:
        return len(reader.sample(["say 1:"]))

def in_process(act, *arguments):
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=lambda: there.send(act(*arguments)))
    child.start()
    assert here.poll(120), "the child hangs"
    child.join(60)
    assert child.exitcode == 0
    return here.recv()

class Texts:
    def __init__(self, act):
        self.act = act
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return self.act(f"say {index}:")

def loaded(act):
    loader = DataLoader(Texts(act), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    return [*loader]

path = sys.argv[1]
sampling = bridge.SamplingConfig(max_new_tokens=8, group_size=4)
with bridge.attach(path, sampling=sampling, optimizer=bridge.OptimizerConfig(lr=1e-6)) as policy:
    samples = bridge.samples(policy.sample(["say 1:"] * 4, lambda _, text: float(len(text))))
    found = {}
    sampling_thread = threading.Thread(target=policy.sample, args=(["say a lot:"] * 8,), kwargs={"max_tokens": 200})
    sampling_thread.start()
    found["process beside a thread that samples"] = in_process(calls, policy, samples)
    sampling_thread.join(120)
    found["process of its own policy"] = in_process(own, path)
    found["workers that encode"] = len(loaded(lambda text: policy.encode(text, "1")))
    found["workers that sample"] = outcome(lambda: loaded(lambda text: policy.sample([text])))
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        sys.exit(len(calls(policy, samples)))  # leaves the block, and runs what is to be done at exit
    found["fork that leaves the block"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found["parent"] = calls(policy, samples)
    found["scratch"] = policy.mode._run.scratch.is_dir()
    found["verify"] = sorted({check.status for check in policy.verify()})
print(json.dumps(found))
"""


def test_forks_return_a_result_or_one_error(llama: LiveServer) -> None:
    """An attached program forks with `os.fork`, with multiprocessing and for the workers of a `DataLoader`."""
    command = [sys.executable, "-c", FORKS, str(llama.path)]
    done = subprocess.run(command, cwd=llama.path.parent, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    calls = found["process beside a thread that samples"]
    for call, line in zip(("sample", "train_step"), calls, strict=True):
        assert re.match(
            rf"UsageError: policy\.{call}: process \d+ created this policy, and process \d+ was forked", line
        )
    assert found["process of its own policy"] == 1
    assert found["workers that encode"] == 4
    assert re.search(r"policy\.sample: process \d+ created this policy", found["workers that sample"])
    assert found["fork that leaves the block"] == len(calls)
    assert found["parent"] == ["works", "works"]
    assert found["scratch"] is True, "the folder of the parent's policy"
    assert found["verify"] == ["PASS"]


def logprobs_of(policy: bridge.Policy, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token but the first, by transformers' forward pass of the trainer's model."""
    ids = torch.tensor([token_ids], device=policy.device)
    with torch.no_grad():
        logits_PV = policy.model(input_ids=ids).logits[0].float()
    logprobs_PV = logits_PV.log_softmax(-1)
    own_P = logprobs_PV[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return [float(logprob) for logprob in own_P]


def test_sample_parameters_override_the_policys(llama: LiveServer) -> None:
    with bridge.attach(llama.path, sampling=SHORT) as policy:
        ids = [*policy.tokenizer("say 1:")["input_ids"]]
        (group, *_), (text, *_) = policy.sample([ids], n=2, max_tokens=3, seed=1), policy.sample(["say 1:"], seed=1)
        assert group.prompt_token_ids == text.prompt_token_ids == tuple(ids)
        assert [len(completion.token_ids) for completion in group.completions] == [3, 3]
        greedy = [policy.sample([ids], n=1, temperature=0.0)[0].completions[0].token_ids for _ in range(2)]
        assert greedy[0] == greedy[1]
        scored = policy.sample([ids, ids[:2]], n=2, max_tokens=2, temperature=0.5, prompt_logprobs=True)
        for group in scored:
            given = group.prompt_token_ids
            expected = logprobs_of(policy, given)
            for completion in group.completions:
                first, *rest = completion.prompt_logprobs
                assert math.isnan(first)
                assert rest == pytest.approx(expected, abs=0.02)
        assert policy.sample([ids], n=1)[0].completions[0].prompt_logprobs == ()
        wrong: dict[str, dict[str, Any]] = {
            "prompt_logprobs is 1, expected True or False": {"prompt_logprobs": 1},
            "has no parameter 'max_tokns'": {"max_tokns": 3},
            "temperature is 0.005: expected 0, or greater than or equal to 0.01": {"temperature": 0.005},
            "n is 0: input should be greater than or equal to 1": {"n": 0},
        }  # fmt: skip
        for words, parameters in wrong.items():
            with pytest.raises(UsageError, match=words):
                policy.sample([ids], **parameters)
        with pytest.raises(UsageError, match="a single prompt"):
            policy.sample(ids)
        with pytest.raises(RejectedRequestError, match="embedding"):
            policy.sample([[10**6]])


@pytest.mark.slow
@pytest.mark.several
def test_ranks_train_an_adapter_and_resume_exactly(tmp_path: Path) -> None:
    """A mixture of experts in two parts, with replay; two processes of torchrun that are killed after three steps."""
    model = tiny.write(experts(), tmp_path / "model", std=0.06)
    lines = list[list[dict[str, Any]]]()
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        with scenarios.served(model, tmp_path / name / "server", max_lora_rank=8, num_parts=2) as server:
            run_dir = tmp_path / name / "run"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            command += [str(EXAMPLES / "ranks.py"), str(server.path), "4", str(run_dir)]
            with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as started:
                assert started.stdout is not None
                if name == "whole":
                    started.communicate(timeout=300)
                    assert started.returncode == 0
                else:
                    for _ in range(3):
                        started.stdout.readline()
                    for process in psutil.Process(started.pid).children(recursive=True):
                        process.kill()
                    started.kill()
            if name == "killed":
                done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
                assert "FAIL" not in done.stdout
                assert "one copy: PASS" in done.stdout
        lines.append([json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()])
    whole, killed = lines
    assert [line["step"] for line in killed] == [1, 2, 3, 4]
    for metric in ("loss", "grad_norm", "reward_mean", "logprob_diff_mean"):
        assert [line[metric] for line in whole] == [line[metric] for line in killed], metric
