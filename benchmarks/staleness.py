"""The cost of staleness in learning and its gain in time: two tasks, several bounds and seeds, and naive clipping.

Each run trains in place on one live server, from the same weights. `sums` is the demo's task. `counting` has long
completions of very different lengths: for `17=20=` the model writes `17+18+19+20`, and the reward is the share of it
that is right before the first error. Its model is warmed up by next-token prediction on right answers and on some with
mistakes. All runs of a task take the same number of steps and completions, and so train on about as many tokens.

`naive` clips the ratio relative to the policy that sampled a token, instead of using importance weights and clipping
the ratio relative to the trainer's policy at the start of the batch.

On a GPU a run takes under a minute, on a CPU two; times need a machine with nothing else running.
"""

import contextlib
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import _results
from benchmarks._results import say
from bridge.checkpoints.metrics import StepMetrics
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import ServeConfig, TrainConfig
from bridge.core import atomic_folder
from bridge.core.address import free_port
from bridge.learn.policy_loss import LossSpec, Sums, policy_loss
from bridge.passes.packing import MicroBatch
from bridge.processes.server_command import prepare
from bridge.processes.server_process import StartedServer
from bridge.run import learner
from bridge.run.trainer import Run
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.types import Problem
from bridge.weights import model_folder
from bridge.weights.attach import attach
from bridge_cli import demo_model
from bridge_cli.demo import GPU_SHARE, LEARNING_RATE, demo_model_folder
from bridge_environments import registry
from tests.listener import Listener

TASKS = ("sums", "counting")
NAIVE = "naive"
LAST_STEPS = 10
"""The mean reward of this many last steps is compared, too."""
MOST_NUMBERS = 75
"""Most numbers in a count, which then has at most 225 characters."""
WARM_UP_STEPS, WARM_UP_BATCH = 400, 32


class Counting:
    """Counts from one number to another: `17=20=`, then `17+18+19+20`.

    The number of numbers is lognormal, with a median of 12 and a long tail.
    """

    def __init__(self) -> None:
        draw = random.Random(0)  # noqa: S311  not a secret
        pairs = list(dict.fromkeys(_pair(draw) for _ in range(600)))
        problems: list[Problem] = [
            {"prompt": f"{first}={last}=", "answer": "+".join(map(str, range(first, last + 1)))}
            for first, last in pairs
        ]
        self._held_out = problems[:40]
        self._training = problems[40:]

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._training)

    def held_out(self) -> list[Problem]:
        return list(self._held_out)

    def score(self, problem: Problem, completion: str) -> float:
        """Return the share that is right before the first error, relative to the longer of answer and completion."""
        answer = problem["answer"]
        right = next((index for index, pair in enumerate(zip(answer, completion, strict=False)) if pair[0] != pair[1]),
                     min(len(answer), len(completion)))  # fmt: skip
        return right / max(len(answer), len(completion))


@dataclass(frozen=True)
class Row:
    """One run."""

    task: str
    staleness: int
    clipping: str
    seed: int
    reward_before: float
    reward_after: float
    """Mean reward of held-out problems after training."""
    reward_last: float
    tokens: int
    """Number of tokens sampled for the steps."""
    staleness_mean: float
    seconds: float
    """Seconds of all steps, without evaluations."""


def main() -> None:
    """Train with every bound and seed, and print a table per task."""
    made = _results.parser(__doc__)
    made.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    made.add_argument("--steps", type=int, default=60)
    made.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 8])
    made.add_argument("--naive", type=int, nargs="*", default=[4, 8], help="bounds to show naive clipping with")
    made.add_argument("--seeds", type=int, default=3)
    options = made.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for task in options.tasks:
            for row in measure(task, options, Path(folder, task)):
                rows.append(row)
                path = _results.write(
                    "staleness", {"steps": options.steps, "rows": list(map(asdict, rows))}, options.out
                )
    for task in options.tasks:
        print(f"{task}\n{_results.table(cells([row for row in rows if row.task == task]))}")
    say(f"written to {path}")


def measure(task: str, options: Any, folder: Path) -> Iterator[Row]:
    """Train on one live server, always from the initial weights."""
    folder.mkdir()
    model = demo_model_folder() if task == "sums" else counting_model()
    serve = ServeConfig(
        model=str(model),
        port=free_port("127.0.0.1"),
        gpu_memory_utilization=GPU_SHARE if torch.cuda.is_available() else None,
        vllm_config_path=folder / manifest.MANIFEST_NAME,
    )
    command = prepare(serve, [])
    with StartedServer(command, folder / "serve.log", limit_s=300).running():
        exported = manifest.load(command.manifest)
        live = attach(exported)
        for seed in range(options.seeds):
            for clipping, bounds in (("decoupled", options.staleness), (NAIVE, options.naive)):
                for bound in bounds:
                    with BridgeClient(exported, timeout_s=60) as client:
                        later = client.status().version + 1
                        with fence.publish(client, Update(version=later, takeover=True)):
                            model_folder.load_into(live.model, model)
                    config = _config(task, model, command.manifest, folder / f"{clipping}-{bound}-{seed}", options)
                    row = trained(task, config.changed(max_staleness=bound, seed=seed), clipping)
                    say(
                        f"{task} staleness {bound} {clipping} seed {seed}: {row.reward_before:.3f} ->"
                        f" {row.reward_after:.3f}, {row.tokens} tokens in {row.seconds:.1f} s"
                    )
                    yield row


def _config(task: str, model: Path, exported: Path, folder: Path, options: Any) -> TrainConfig:
    sizes: dict[str, Any] = (
        {"batch_size": 128, "max_new_tokens": 4, "eval_samples": 16}
        if task == "sums"
        else {"batch_size": 64, "max_new_tokens": 256, "eval_samples": 4}
    )
    return TrainConfig.model_validate(
        {
            "model_name": str(model), "training_steps": options.steps, "lr": LEARNING_RATE, "reward_processes": 0,
            "environment": "arithmetic" if task == "sums" else f"{__file__}:{Counting.__name__}",
            "vllm_config_path": exported, "save_path": folder / "saved", "run_dir": folder / "run",
            "save_optimizer": False, "compile_layers": False, **sizes,
        }
    )  # fmt: skip


def trained(task: str, config: TrainConfig, clipping: str) -> Row:
    """Train once, and return the run's row."""
    steps: list[StepMetrics] = []
    run = RunDirectory.create(config.run_dir, environment=config.task.environment)
    with naive() if clipping == NAIVE else contextlib.nullcontext():
        summary = Run(config, registry.load(config.task), run, Listener(steps.append)).train()
    assert summary.reward_before is not None, "it evaluates"
    assert summary.reward_after is not None, "it evaluates"
    return Row(
        task=task, staleness=config.rollouts.max_staleness, clipping=clipping, seed=config.seed,
        reward_before=summary.reward_before, reward_after=summary.reward_after,
        reward_last=statistics.fmean(summary.rewards[-LAST_STEPS:]),
        tokens=sum(step.tokens_generated for step in steps),
        staleness_mean=statistics.fmean(step.staleness_mean for step in steps),
        seconds=sum(step.step_s for step in steps),
    )  # fmt: skip


@contextlib.contextmanager
def naive() -> Iterator[None]:
    """Clip the ratio relative to the policy that sampled a token; importance weights are then 1."""

    def clipped(
        logprobs: Tensor, _: Tensor, batch: MicroBatch, spec: LossSpec, reference: Tensor | None = None
    ) -> tuple[Tensor, Sums]:
        return policy_loss(logprobs, batch.sampled_logprobs_N, batch, spec, reference)

    with patch.object(learner, "policy_loss", clipped):
        yield


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table of one task: means over seeds, with the standard deviation of the reward."""
    made = [["staleness", "clip", "held-out before", "after", "+-", "last steps", "tokens", "mean lag", "s", "speed"]]
    rows_by_setting: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        rows_by_setting.setdefault((row.staleness, row.clipping), []).append(row)
    first = statistics.fmean(row.seconds for row in next(iter(rows_by_setting.values())))
    for (bound, clipping), of_kind in sorted(
        rows_by_setting.items(), key=lambda setting: (setting[0][1], setting[0][0])
    ):
        after, seconds = [row.reward_after for row in of_kind], statistics.fmean(row.seconds for row in of_kind)
        made.append([
            str(bound), clipping, f"{statistics.fmean(row.reward_before for row in of_kind):.3f}",
            f"{statistics.fmean(after):.3f}", f"{statistics.stdev(after):.3f}" if len(after) > 1 else "-",
            f"{statistics.fmean(row.reward_last for row in of_kind):.3f}",
            f"{statistics.fmean(row.tokens for row in of_kind):.0f}",
            f"{statistics.fmean(row.staleness_mean for row in of_kind):.2f}", f"{seconds:.1f}",
            f"{first / seconds:.2f}x",
        ])  # fmt: skip
    return made


def counting_model() -> Path:
    """Return a tiny model that counts, with occasional mistakes; it is trained once, and cached beside the demo's."""
    folder = demo_model.cache_folder() / f"counting-{WARM_UP_STEPS}x{WARM_UP_BATCH}"
    if folder.is_dir():
        return folder
    tokenizer = demo_model.demo_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    draw, problems = random.Random(0), list(Counting())  # noqa: S311  no secret is made of it
    say("counting: making a model")
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**demo_model.MODEL, **ids, vocab_size=len(tokenizer)))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=demo_model.WEIGHT_DECAY)
    for step in range(WARM_UP_STEPS):
        slips = step > 0.8 * WARM_UP_STEPS
        examples = [
            demo_model.answered(
                str(problem["prompt"]), slipped(problem["answer"], draw) if slips else str(problem["answer"])
            )
            for problem in draw.sample(problems, WARM_UP_BATCH)
        ]
        cosine = 0.5 * (1 + math.cos(math.pi * step / WARM_UP_STEPS))
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 10) * (0.05 + 0.95 * cosine)
        optimizer.zero_grad()
        loss = demo_model._loss(model, tokenizer, examples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with atomic_folder.write(folder, replaceable=lambda _: False) as scratch:
        model.to(torch.bfloat16).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    return folder


def slipped(answer: str, draw: random.Random) -> str:
    """Return a count that leaves out some numbers, and repeats others."""
    numbers = answer.split("+")
    return "+".join(
        number for summand in numbers for number in [summand] * draw.choices((1, 0, 2), (0.9, 0.05, 0.05))[0]
    )


def _pair(draw: random.Random) -> tuple[int, int]:
    count = min(max(round(draw.lognormvariate(math.log(12), 0.9)), 2), MOST_NUMBERS)
    first = draw.randrange(100 - count)
    return first, first + count - 1


if __name__ == "__main__":
    main()
