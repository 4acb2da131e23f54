"""How much of an update each optimizer retains: the demo's task at a learning rate below bf16's resolution.

Every optimizer trains the demo's model in place on one live server, from the same weights with the same seed. The
reference holds a float32 master of every weight, updates it with torch's AdamW, and rounds it into the live weight;
`bf16` is torch's AdamW on the live bf16 weights. Rewards are compared, the distance from the initial weights relative
to the reference's, and the cosine with its direction.

Runs on a CPU, about two minutes per optimizer.
"""

import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import _results
from benchmarks._results import say
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import OptimizerConfig, ServeConfig, TrainConfig
from bridge.core.address import free_port
from bridge.optimizers import factory
from bridge.optimizers.in_place import EPS, InPlaceOptimizer
from bridge.processes.server_command import prepare
from bridge.processes.server_process import StartedServer
from bridge.run.trainer import Run
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.weights import model_folder
from bridge.weights.attach import AttachedModel, attach
from bridge_cli.demo import demo_model_folder
from bridge_environments import registry
from tests.listener import Listener

REFERENCE, PLAIN = "float32 master", "bf16"
OURS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {},
    "adamw, offloaded": {"offload_optimizer": True},
    "adamw-8bit": {"optimizer": "adamw-8bit"},
    "adamw-4bit": {"optimizer": "adamw-4bit"},
}
"""Configuration of each of Bridge's optimizers, by name."""
LAST_STEPS = 20
"""The mean reward of this many last steps is compared, because single steps are noisy."""


class Rival(InPlaceOptimizer):
    """torch's AdamW on the live weights, or on float32 masters that are rounded into them."""

    def __init__(self, groups: Iterable[dict[str, Any]], choices: OptimizerConfig, *, has_masters: bool) -> None:
        groups = list(groups)
        betas = choices.beta1, choices.beta2
        super().__init__(groups, betas=betas)
        self._live = [parameter for group in groups for parameter in group["params"]]
        self._stepped = [p.detach().float().clone() if has_masters else p for p in self._live]
        self._inner = torch.optim.AdamW(
            self._stepped, lr=groups[0]["lr"], betas=betas, eps=EPS, weight_decay=choices.weight_decay
        )

    def _step(self, norm: float, max_norm: float) -> None:
        before = [live.detach().clone() for live in self._live]
        scale = min(1.0, max_norm / norm) if norm else 1.0
        for live, stepped in zip(self._live, self._stepped, strict=True):
            stepped.grad = None if live.grad is None else live.grad.to(stepped.dtype).mul_(scale)
        self._inner.step()
        for live, stepped in zip(self._live, self._stepped, strict=True):
            live.data.copy_(stepped)
        self._num_changed = [(old != new).sum() for old, new in zip(before, self._live, strict=True)]


def main() -> None:
    """Train with each optimizer and print the comparison with the reference."""
    options = _parser().parse_args()
    results: dict[str, Any] = {"lr": options.lr, "steps": options.steps}
    with tempfile.TemporaryDirectory() as folder:
        results["rows"] = measure([REFERENCE, *options.optimizers], options.steps, options.lr, Path(folder))
    print(_results.table(_cells(results["rows"])))
    say(f"written to {_results.write('lost_updates', results, options.out)}")


def _parser() -> Any:
    made = _results.parser(__doc__)
    made.add_argument("--steps", type=int, default=200, help="optimizer steps of each")
    others = (PLAIN, *OURS)
    made.add_argument("--optimizers", nargs="+", choices=others, default=others, help="beside the reference")
    made.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    return made


def measure(names: Sequence[str], steps: int, lr: float, folder: Path) -> list[dict[str, Any]]:
    """Train with each optimizer on one server, always from the initial weights; return one row each."""
    model = demo_model_folder()
    serve = ServeConfig(
        model=str(model), port=free_port("127.0.0.1"), device="cpu", vllm_config_path=folder / manifest.MANIFEST_NAME
    )
    command = prepare(serve, [])
    rows = []
    with StartedServer(command, folder / "serve.log", limit_s=300).running():
        exported = manifest.load(command.manifest)
        live = attach(exported)
        first = _weights(live)
        for name in names:
            _publish_initial_weights(exported, live, model)
            rows.append(
                {"optimizer": name, **_trained(name, _config(model, command.manifest, folder, steps, lr, name))}
            )
            moved = _weights(live) - first
            if name == REFERENCE:
                reference = moved
            rows[-1] |= _compared(moved, reference)
            say(f"{name}: held-out reward {rows[-1]['reward_before']:.3f} -> {rows[-1]['reward_after']:.3f}")
    return rows


def _config(model: Path, exported: Path, folder: Path, steps: int, lr: float, name: str) -> TrainConfig:
    """Return the demo's configuration with this learning rate and optimizer."""
    return TrainConfig.model_validate(
        {
            "model_name": str(model), "training_steps": steps, "lr": lr, "batch_size": 128, "max_new_tokens": 4,
            "eval_samples": 16, "vllm_config_path": exported, "save_path": folder / name / "saved",
            "run_dir": folder / name / "run", "save_optimizer": False, **OURS.get(name, {}),
        }
    )  # fmt: skip


def _trained(name: str, config: TrainConfig) -> dict[str, Any]:
    shares: list[float] = []
    run = RunDirectory.create(config.run_dir, environment=config.task.environment)

    ours = factory.make

    def make(choices: OptimizerConfig, groups: Iterable[dict[str, Any]], **shared: Any) -> InPlaceOptimizer:
        if name in OURS:
            return ours(choices, groups, **shared)
        return Rival(groups, choices, has_masters=name == REFERENCE)

    environment = registry.load(config.task)
    listener = Listener(lambda metrics: shares.append(metrics.changed_weight_share))
    with mock.patch.object(factory, "make", make):
        summary = Run(config, environment, run, listener).train()
    return {
        "reward_before": summary.reward_before,
        "reward_after": summary.reward_after,
        "reward_last": statistics.fmean(summary.rewards[-LAST_STEPS:]),
        "changed_weight_share": statistics.median(shares),
        "rewards": list(summary.rewards),
    }


def _publish_initial_weights(exported: manifest.Manifest, live: AttachedModel, model: Path) -> None:
    with BridgeClient(exported, timeout_s=60) as client:
        version = client.status().version + 1
        with fence.publish(client, Update(version=version, takeover=True)):
            model_folder.load_into(live.model, model)


def _weights(live: AttachedModel) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in live.model.parameters()])


def _compared(moved: Tensor, reference: Tensor) -> dict[str, float]:
    cosine = float(moved @ reference / (moved.norm() * reference.norm()))
    return {"distance": float(moved.norm() / reference.norm()), "cosine": cosine}


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = ["optimizer", "held-out before", "after", f"last {LAST_STEPS} steps", "changed", "distance", "cosine"]
    return [
        head,
        *(
            [
                row["optimizer"], f"{row['reward_before']:.3f}", f"{row['reward_after']:.3f}",
                f"{row['reward_last']:.3f}", f"{row['changed_weight_share']:.1%}", f"{row['distance']:.3f}",
                f"{row['cosine']:.3f}",
            ]
            for row in rows
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
