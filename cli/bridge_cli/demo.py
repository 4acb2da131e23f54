"""`bridge demo`: all of Bridge in one command, with a generated tiny model (`demo_model.py`) or the user's own."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from bridge.checkpoints.run_directory import RunDirectory, write_json
from bridge.checks import Check, any_failed
from bridge.checks.model import is_half, read
from bridge.config import DeviceChoice, ServeConfig, TrainConfig
from bridge.core import folder_mark
from bridge.core.address import free_port
from bridge.errors import UsageError
from bridge.processes.server_command import prepare
from bridge.processes.start_checks import check_model, check_software
from bridge_cli import console, rank_gpus, rank_process, report
from bridge_cli.launch import start_ranks, train_on
from bridge_cli.live import duration
from bridge_cli.options import HOME, Json
from bridge_cli.started_servers import StartedServers
from bridge_cli.task_environment import load_environment
from bridge_cli.verify import FAILED_EXIT_CODE, proof

if TYPE_CHECKING:
    from bridge.checkpoints.metrics import Summary

HOST = "127.0.0.1"
START_LIMIT_S = 300.0
LEAST_GAIN = 0.2
"""How much the tiny model's held-out reward must rise for the demo to pass; it usually rises twice as much."""
LEARNING_RATE = 2e-4
TINY: Mapping[str, Any] = {"lr": LEARNING_RATE, "batch_size": 128, "max_new_tokens": 4, "eval_samples": 16}
PRETRAINED: Mapping[str, Any] = {
    "environment": "word_problems", "lr": 1e-5, "batch_size": 64, "max_new_tokens": 48, "temperature": 0.5,
    "eval_samples": 1, "eval_temperature": 0.0,
}  # fmt: skip
"""Choices for the user's own model, which is already pretrained."""
GPU_SHARE = 0.2
"""Fraction of a GPU's memory: more than enough for a one-megabyte model and its KV cache."""

Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Run directory; an earlier demo in it is replaced.", **HOME)
]
Steps = Annotated[
    int,
    typer.Option("--steps", metavar="INTEGER", min=1, help="Training steps; with only a few, the demo cannot pass."),
]
Where = Annotated[
    DeviceChoice,
    typer.Option("--device", metavar="auto|cpu|cuda", help="Where vLLM runs; auto uses a GPU if there is one."),
]


OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="FOLDER", show_default=False,
        help="Train this model on word problems and report its reward (default: a tiny model, which must learn).",
    ),
]  # fmt: skip
ModelOnly = Annotated[
    Path | None,
    typer.Option(
        "--model-only", metavar="FOLDER", show_default=False, **HOME,
        help="Write a tiny model for a task of your own to this folder and exit; it takes chat messages and tools.",
    ),
]  # fmt: skip
Gpus = Annotated[
    int, typer.Option("--gpus", metavar="INTEGER", min=1, help="Replicas, one per GPU; on a CPU, servers.")
]


def demo(
    *,
    out: Out = Path("runs/demo"),
    steps: Steps = 60,
    device: Where = "auto",
    gpus: Gpus = 1,
    model: OwnModel = None,
    model_only: ModelOnly = None,
    as_json: Json = False,
) -> None:
    """Train a tiny model in place on a running vLLM, and prove that there is one copy.

    Needs no network, GPU or download. Exits with 3 if a check failed, if the tiny model's reward did not rise, or if
    --model was never updated.
    """
    if model is not None and model_only is not None:
        raise UsageError("--model and --model-only cannot be combined", hint="leave one of them out")
    if model_only is not None:
        _write_model(model_only)
        return
    check_software(device)
    if model is not None:  # before an earlier demo is replaced
        check_model(model)
    serve, train = _choices(out, steps, device, gpus, model)
    servers = StartedServers(serve, train, start_limit_s=START_LIMIT_S)
    if rank_process.OWN_RANK.get() is None:
        start_ranks(rank_gpus.of_started(serve, 1, train.dp_size(1), gpus=gpus))
    with servers.preloading(), rank_process.joined() as world:
        environment = load_environment(train)
        own = world.run_on_all(lambda: _fresh(out) if world.is_rank_zero else None)
        run = own or rank_process.join_run_directory(world, out)
        if world.is_rank_zero:
            world.barrier()  # lets the other ranks use the same run directory
            servers.command = prepare(serve, [])
            write_json(run.server_config, serve.document())
        with console.printing_only(*console.OF_STARTS), servers.serving(world, train.sampling, run) as server:
            summary = train_on(server, train, environment, run, resume=None, ranks=world, as_json=False)
            if not world.is_rank_zero:
                return
            assert servers.command is not None, "it was prepared"
            console.note("verifying on the same live server")
            checks = proof(servers.command.manifest, as_json=False)
    document = conclusion(summary, checks, least_gain=LEAST_GAIN if model is None else None)
    write_json(run.path / "summary.json", document)
    report.write([run.path], run.report)
    goal = f"the reward must rise by {LEAST_GAIN}" if model is None else "rewards must differ in at least one step"
    _print_table(document, run, goal)
    if as_json:
        console.data(json.dumps(document))
    if not document["passed"]:
        raise typer.Exit(FAILED_EXIT_CODE)


def _choices(
    out: Path, steps: int, device: DeviceChoice, gpus: int, own_model: str | None
) -> tuple[ServeConfig, TrainConfig]:
    model = own_model or str(demo_model_folder())
    serve = ServeConfig(
        model=model,
        port=free_port(HOST),
        device=device,
        dtype="bfloat16" if own_model and is_half(read(own_model)) else "auto",
        gpu_memory_utilization=None if own_model or device == "cpu" else GPU_SHARE,
        vllm_config_path=RunDirectory(out).manifest,
    )
    choices = PRETRAINED if own_model else TINY
    return serve, TrainConfig.of(model_name=model, training_steps=steps, run_dir=out, gpus=gpus, **choices)


def _write_model(folder: Path) -> None:
    from bridge_cli import demo_model

    with console.waiting(f"Writing a tiny model to {folder}") as detail:
        demo_model.write_tiny(folder, progress=lambda step, num_steps: detail(f"step {step}/{num_steps}"))
    console.note(f"to train it: bridge run --model {shlex.quote(str(folder))} --environment my_task.py:MyTask")


def conclusion(summary: "Summary", checks: list[Check], *, least_gain: float | None) -> dict[str, Any]:
    """Return the content of `summary.json`: what was measured, and whether the demo passed.

    `least_gain`: how much the held-out reward must rise; None: any update will do, whatever the reward.
    """
    before, after = summary.reward_before, summary.reward_after
    assert before is not None and after is not None, "the demo evaluates"  # noqa: PT018  one fact
    learned = summary.updates > 0 if least_gain is None else after - before >= least_gain
    return {
        "reward_before": before,
        "reward_after": after,
        "steps": summary.steps,
        "updates": summary.updates,
        "weight_bytes_copied": summary.weight_bytes,
        "logprob_diff_max": summary.logprob_diff_max if summary.updates else None,
        "fence_p50_ms": summary.fence_p50_ms,
        "passed": learned and summary.weight_bytes == 0 and bool(checks) and not any_failed(checks),
    }


def _fresh(out: Path) -> RunDirectory:
    """Return an empty run directory at `out`, replacing an earlier demo there but nothing else."""
    folder_mark.make_empty(out, "demo", RunDirectory(out).names, flag="--out")
    return RunDirectory.create(out, environment="demo", kind="demo")


def demo_model_folder() -> Path:
    """Return the folder of the tiny model, generating it on first use."""
    from bridge_cli import demo_model

    folder = demo_model.cache_folder()
    if (folder / demo_model.name()).is_dir():
        console.note(f"tiny model: {folder / demo_model.name()}", style="dim")
        return folder / demo_model.name()
    with console.waiting("making a tiny model (once; it is cached)") as detail:
        return demo_model.make(folder, progress=lambda step, num_steps: detail(f"step {step}/{num_steps}"))


def _print_table(document: dict[str, Any], run: RunDirectory, goal: str) -> None:
    updates, steps, passed = document["updates"], document["steps"], document["passed"]
    idle = "" if updates == steps else f" (in {steps - updates} of {steps} steps all rewards were equal)"
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("held-out reward before", f"{document['reward_before']:.3f}")
    table.add_row("held-out reward after", f"{document['reward_after']:.3f}")
    table.add_row("optimizer steps, in place", f"{updates}{idle}")
    table.add_row("bytes of weights copied", str(document["weight_bytes_copied"]))
    if updates:
        table.add_row("largest log-probability difference", f"{document['logprob_diff_max']:.4f} nats")
    table.add_row("fence, median", duration(document["fence_p50_ms"] / 1e3))
    table.add_row("report, for a browser", str(run.report))
    table.add_row("summary", str(run.path / "summary.json"))
    console.people.print()
    console.people.print(table)
    failure = f"every check must pass, and {goal}"
    console.verdict("PASS" if passed else "FAIL", "one copy, trained in place" if passed else failure)
