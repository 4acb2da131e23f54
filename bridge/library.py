"""Train a served model with your own loop: `import bridge` exports these names, and those of `engine/policy.py`."""

import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor

from bridge.config import (
    ComputeConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    PublishingConfig,
    SamplingConfig,
    ServeConfig,
    TrainConfig,
)
from bridge.core import paths
from bridge.core.address import free_port
from bridge.core.foreign_code import described
from bridge.engine import reference, teacher
from bridge.engine.peft_settings import lora_of
from bridge.engine.policy import Policy, path_of
from bridge.errors import ManifestError, UsageError
from bridge.learn import policy_loss as losses
from bridge.learn import samples as learning
from bridge.modes.mode import RunContext
from bridge.passes.packing import MicroBatch, Sample
from bridge.processes.preload import Preloaded, preloading
from bridge.processes.server_command import prepare
from bridge.processes.server_process import StartedServer
from bridge.ranks import torchrun
from bridge.ranks.world import ALONE, Ranks
from bridge.scoring.score import as_reward
from bridge.server import discovery, manifest
from bridge.server.manifest import MANIFEST_NAME, Manifest
from bridge.types import Group
from bridge.weights import cuda_ipc

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig

logger = logging.getLogger(__name__)


SECTIONS = {
    "sampling": SamplingConfig, "compute": ComputeConfig, "optimizer": OptimizerConfig, "loss": LossConfig,
    "lora": LoraConfig, "publishing": PublishingConfig,
}  # fmt: skip


def attach(
    path: str | Path | None = None,
    *,
    sampling: SamplingConfig | None = None,
    compute: ComputeConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    loss: LossConfig | None = None,
    lora: "LoraConfig | PeftLoraConfig | None" = None,
    publishing: PublishingConfig | None = None,
    seed: int = 0,
    several_adapters: bool = False,
    reads_only: bool = False,
    run_dir: str | Path | None = None,
) -> Policy:
    """Attach to the live server whose manifest is at `path`; None: the only server that is found.

    One process at a time may update a server. With `reads_only` this process never does: such a policy is a teacher or
    a reference, or observes a server that another process trains. The sections set what the flags of `bridge train`
    set: with `lora`, Bridge's or PEFT's `LoraConfig`, an adapter is trained on the frozen base, otherwise all weights;
    `optimizer` is used by `optim_step`, and `loss` is the default of `forward_backward`. `seed` initializes an adapter
    and stochastic rounding. With `several_adapters`, adapters take turns on the base: `Policy.new_adapter` starts
    another one, and the server loads what is sampled from disk. Progress is logged to loggers below `bridge`.
    `run_dir` is the folder of `Policy.log`, `save` and `resume`; by default they use a new folder under `runs/`, named
    after the time and the program.

    In a program that torchrun has started, each process attaches to the server of its replica: all tensor-parallel
    ranks of one server pass the same `path`.

    Raises:
        ManifestError: there is no such server on this host.
        AttachError: another trainer updates it, or its weights are half-written.
        UnsupportedModelError: the model cannot be trained in place.
        UsageError: these choices do not fit together, or the wrong number of processes was started.
        ServerUnreachableError: the server does not answer.
    """
    sections = {
        "sampling": sampling, "compute": compute, "optimizer": optimizer, "loss": loss, "lora": lora,
        "publishing": publishing,
    }  # fmt: skip
    chosen = {name: section for name, section in sections.items() if section is not None}
    return _attached(path, chosen, seed=seed, several_adapters=several_adapters, reads_only=reads_only, run_dir=run_dir)


def _attached(
    path: str | Path | None,
    sections: dict[str, Any],
    *,
    seed: int,
    several_adapters: bool,
    reads_only: bool,
    run_dir: str | Path | None,
    process: StartedServer | None = None,
) -> Policy:
    """Attach with the sections that were given; `process` is the server, if this process has started it."""
    folder = None if run_dir is None else path_of("bridge.attach: run_dir", run_dir)
    try:
        path_found = discovery.find(None if path is None else path_of("bridge.attach: path", path))
    except ManifestError as error:
        if path is not None:
            raise
        # the original hint names command-line flags, which a program does not have
        hint = re.sub(r"--vllm-config-path (\S+)", r'bridge.attach("\1")', error.hint)
        hint = hint.replace("name its file with --vllm-config-path", "name its file: bridge.attach(PATH)")
        raise ManifestError(error.message, hint=hint) from error
    exported = manifest.load(path_found)
    chosen = dict(sections)
    if "lora" in sections:
        chosen["lora"] = lora_of(sections["lora"], exported.model)
    if several_adapters:
        chosen["lora"] = _for_several(chosen.get("lora"))
    config = _config(exported, path_found, chosen, seed=seed, num_ranks=1 if reads_only else torchrun.world_size())
    reference.check(exported.model, config.loss)
    teacher.check_server(exported.model, config.loss, config.sampling)
    held = ExitStack()
    try:
        ranks = ALONE if reads_only else _join(exported, held)
        scratch = paths.temporary_folder("bridge-policy-")
        held.callback(shutil.rmtree, scratch, ignore_errors=True)
        program = f"{Path(sys.argv[0]).name or 'python'} (pid {os.getpid()})"
        context = RunContext(
            name=program, scratch=scratch, process=process, ranks=ranks,
            several_adapters=several_adapters, reads_only=reads_only,
        )  # fmt: skip
        policy = Policy(config, context, run_dir=folder, held=held)
        if policy.version and not reads_only and "lora" not in chosen and ranks.is_rank_zero:
            logger.warning(
                "the server was trained before: this loop starts from its weights, version %d, not those of %s",
                policy.version, exported.model,
            )  # fmt: skip
        return policy.open()
    except BaseException:
        held.close()
        raise


def _config(exported: Manifest, path: Path, sections: Mapping[str, Any], *, seed: int, num_ranks: int) -> TrainConfig:
    """Return the choices of a run on this server; UsageError if they do not fit together."""
    for name, section in sections.items():
        if type(section) is not SECTIONS[name]:
            raise UsageError(
                f"{name} is {described(section)}, expected a bridge.{SECTIONS[name].__name__}",
                hint=f"bridge.{SECTIONS[name].__name__}(...), whose choices help() lists",
            )
    sampling = sections.get("sampling", SamplingConfig())
    given = {
        "model_name": exported.model,
        "mode": "lora_only" if "lora" in sections else "shared_vllm",
        "gpus": num_ranks,
        "seed": seed,
        "vllm_config_path": path,
        "batch_size": sampling.group_size if sections.get("loss", LossConfig()).name != "dpo" else 2,
        **{name: section.model_dump(exclude_unset=True) for name, section in sections.items()},
    }
    try:
        return TrainConfig.model_validate(given)
    except ValidationError as error:
        fault = error.errors()[0]
        cause = fault.get("ctx", {}).get("error")
        message = cause.message if isinstance(cause, UsageError) else fault["msg"].removeprefix("Value error, ")
        hint = cause.hint if isinstance(cause, UsageError) else "change one of them"
        raise UsageError(f"these choices cannot be used together: {message}", hint=hint) from error


def _for_several(adapter: LoraConfig | None) -> LoraConfig:
    """Return the settings of adapters that take turns. UsageError: there are none, or they are for several ranks."""
    if adapter is None:
        raise UsageError("several_adapters needs lora", hint="lora=bridge.LoraConfig(r=...) of the highest rank")
    if torchrun.world_size() > 1:
        raise UsageError(
            f"several_adapters is for one process, and torchrun has started {torchrun.world_size()}",
            hint="attach in each process with one adapter",
        )
    return adapter.model_copy(update={"handover": "disk"})


def _join(exported: Manifest, held: ExitStack) -> Ranks:
    """Join the process group of torchrun, if it started this process; closing `held` leaves the group."""
    if torchrun.world_size() == 1:
        return ALONE
    shard = exported.shards[torchrun.rank() % exported.tp_degree]
    device = torch.device("cpu") if shard.gpu_uuid is None else cuda_ipc.device_of(shard.gpu_uuid)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = torchrun.join(device, tp_size=exported.tp_degree)
    held.callback(ranks.close)
    return ranks


@contextmanager
def serve(
    model: str | Path,
    *vllm_flags: str,
    sampling: SamplingConfig | None = None,
    compute: ComputeConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    loss: LossConfig | None = None,
    lora: "LoraConfig | PeftLoraConfig | None" = None,
    publishing: PublishingConfig | None = None,
    seed: int = 0,
    several_adapters: bool = False,
    run_dir: str | Path | None = None,
    **choices: Any,
) -> Iterator[Policy]:
    """Start a server, attach to it, and stop it at the end of the block.

    `choices` set what the flags of `bridge serve-vllm` set, such as `max_model_len=2048`; with `lora` the server takes
    adapters of its rank. `vllm_flags` are flags of vLLM, such as `"--enforce-eager"`; the other arguments are those of
    `attach`. The server ends with this process, however the process ends. Its log is kept after an error.

    Raises:
        UsageError: a choice is unknown or cannot be used, or there is no such model.
        ServerUnreachableError: vLLM does not start; the message has the reason, the hint the path of its log.
        BridgeError: `bridge.attach` failed.
    """
    sections = {
        "sampling": sampling, "compute": compute, "optimizer": optimizer, "loss": loss, "lora": lora,
        "publishing": publishing,
    }  # fmt: skip
    chosen = {name: section for name, section in sections.items() if section is not None}
    with (
        preloading() as preloaded,
        serve_preloaded(
            preloaded, str(model), vllm_flags, chosen, choices,
            seed=seed, several_adapters=several_adapters, run_dir=run_dir,
        ) as policy,
    ):  # fmt: skip
        yield policy


@contextmanager
def serve_preloaded(
    preloaded: Preloaded,
    model: str,
    vllm_flags: Sequence[str],
    sections: Mapping[str, Any],
    choices: Mapping[str, Any],
    *,
    seed: int = 0,
    several_adapters: bool = False,
    run_dir: str | Path | None = None,
) -> Iterator[Policy]:
    """Do what `serve` does, in the process that `preloaded` has started; `sections` are those of `attach` that are set.

    Raises:
        BridgeError: as `serve`.
    """
    folder = Path(tempfile.mkdtemp(prefix="bridge-serve-"))
    pid = os.getpid()
    given = {"model": model, "port": free_port("127.0.0.1"), "vllm_config_path": folder / MANIFEST_NAME}
    try:
        if "lora" in sections:
            adapter = lora_of(sections["lora"], model)
            given |= {"max_lora_rank": adapter.r, "lora_experts": adapter.has_experts}
        command = prepare(ServeConfig.resolve({**given, **choices}), list(vllm_flags))
    except BaseException:  # the server has not started, so there is no log to keep
        shutil.rmtree(folder, ignore_errors=True)
        raise
    with (
        StartedServer(command, folder / "server.log", preloaded=preloaded).running() as process,
        _attached(
            command.manifest, dict(sections),
            seed=seed, several_adapters=several_adapters, reads_only=False, run_dir=run_dir, process=process,
        ) as policy,
    ):  # fmt: skip
        yield policy
    if os.getpid() == pid:  # otherwise this process was forked inside the block
        shutil.rmtree(folder, ignore_errors=True)


def samples(
    groups: Sequence[Group], loss: LossConfig | None = None, *, max_new_tokens: int | None = None
) -> list[Sample]:
    """Turn the groups of one update into samples, with the advantages and weights of `loss`; by default DAPO's.

    Completions without an advantage are left out. `max_new_tokens` is required by losses that divide by it: `dr_grpo`
    and `rloo`.

    Raises:
        UsageError: `groups` are no groups, the advantages or rewards that a group was given are invalid, or the loss
            needs `max_new_tokens`.
    """
    groups = _checked(groups)
    spec = losses.LossSpec.of(loss or LossConfig())
    if spec.aggregation == "constant" and max_new_tokens is None:
        raise UsageError(
            "this loss divides by the length of the longest completion, which is not given",
            hint="samples(groups, loss, max_new_tokens=policy.sampling.longest)",
        )
    return learning.samples(groups, spec, max_new_tokens=max_new_tokens or 1)


def _checked(groups: object) -> list[Group]:
    """Return the groups, with rewards as floats where advantages are computed from them.

    Raises:
        UsageError: one is no group, or has rewards from which advantages cannot be computed.
    """
    listed = []
    for number, group in enumerate(groups if isinstance(groups, Iterable) else [groups], start=1):
        if not isinstance(group, Group):
            raise UsageError(
                f"group {number} is {described(group)}, expected a bridge.Group",
                hint="bridge.samples(policy.sample(prompts, score))",
            )
        if group.advantages is not None:
            listed.append(group)
            continue
        numbers = [as_reward(reward) for reward in group.rewards]
        rewards = tuple(number for number in numbers if number is not None)
        if len(rewards) != len(numbers) or len(rewards) != len(group.completions):
            raise UsageError(
                f"the rewards of group {number} (prompt {described(group.problem['prompt'])}) are"
                f" {described(group.rewards)}, expected a finite number for each of its {len(group.completions)}"
                " completions",
                hint="replace(group, rewards=...), or group.with_advantages(...)",
            )
        listed.append(replace(group, rewards=rewards))
    return listed


def policy_loss(
    logprobs_N: Tensor, batch: MicroBatch, loss: LossConfig | None = None, *, old_logprobs_N: Tensor | None = None
) -> Tensor:
    """Return a micro-batch's share of an update's loss, as `bridge train` computes it; by default DAPO's.

    `old_logprobs_N` are the log-probabilities that this process computed before the first update of the batch; None:
    this is the first update, and they equal `logprobs_N`. The shares of all micro-batches add up.

    Shapes: [N] float32, [N] float32 -> [].
    """
    spec = losses.LossSpec.of(loss or LossConfig())
    if spec.objective == "preference":
        raise UsageError(
            "loss dpo compares log-probabilities with a reference's, which this function does not have",
            hint="policy.forward_backward(samples, loss) computes them",
        )
    if spec.kl_coef > 0 or spec.top_entropy < 1 or spec.entropy_coef > 0 or spec.teacher_weight > 0:
        raise UsageError(
            f"kl_coef is {spec.kl_coef:g}, entropy_coef {spec.entropy_coef:g}, teacher_weight"
            f" {spec.teacher_weight:g} and top_entropy {spec.top_entropy:g}: this loss has neither a reference, nor a"
            " teacher, nor entropies, and one micro-batch does not know those of the others",
            hint="policy.forward_backward(samples, loss) has kl_coef, entropy_coef and teachers; or multiply"
            " batch.advantages_N by your own mask",
        )
    old_logprobs_N = logprobs_N.detach() if old_logprobs_N is None else old_logprobs_N
    return losses.policy_loss(logprobs_N, old_logprobs_N, batch, spec)[0]
