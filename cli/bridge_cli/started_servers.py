"""The servers that `bridge run` and `bridge demo` start: one for each replica, by the first of its ranks.

Not covered: starting, watching and stopping one (`bridge/processes/server_process.py`).
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.checkpoints.run_directory import RunDirectory, write_json
from bridge.config import LoraConfig, SamplingConfig, ServeConfig, TrainConfig, combinations
from bridge.core.address import free_port
from bridge.errors import UsageError
from bridge.processes import accelerator, start_checks
from bridge.processes.preload import Preloaded, preloading
from bridge.processes.server_command import ServerCommand, prepare
from bridge.processes.server_process import StartedServer
from bridge.processes.vllm_flags import names, slot_rank, value
from bridge.server import api_key
from bridge_cli import console
from bridge_cli.launch import ReplicaServer, Servers
from bridge_cli.rank_process import OWN_RANK

if TYPE_CHECKING:
    from bridge.ranks.world import Ranks

SHARDED = "--fully-sharded-loras"
MAX_RANK = "--max-lora-rank"
"""vLLM's flag for the rank of its adapter slots."""


class StartedServers(Servers):
    """A server for each replica, which starts and ends with the job."""

    serve: ServeConfig

    def __init__(
        self, serve: ServeConfig, trainer: TrainConfig, vllm_flags: Sequence[str] = (), *, start_limit_s: float
    ) -> None:
        self.serve = serve
        self.trainer = trainer
        """What the user chose."""
        self.vllm_flags = vllm_flags
        self.command: ServerCommand | None = None
        """The command that starts the server of this process; None until it is prepared."""
        self._start_limit_s = start_limit_s
        self._preloaded: Preloaded | None = None

    @property
    def tp_degree(self) -> int:
        return self.serve.tensor_parallel_size

    @property
    def max_model_len(self) -> int | None:
        from bridge.checks import model

        return self.serve.max_model_len or model.longest_sequence(model.read(self.serve.model))

    @contextlib.contextmanager
    def preloading(self) -> Iterator[None]:
        """Import vLLM in the background, if this process will start a server."""
        own = OWN_RANK.get()
        if own is not None and own.rank % own.tp_size:
            yield
            return
        with preloading() as self._preloaded:
            yield

    def check(self) -> None:
        config = self.trainer
        if self.serve.vllm_config_path is not None and not config.needs_patched_server:
            raise UsageError(
                f"--vllm-config-path {self.serve.vllm_config_path}: --mode none --reload {config.publishing.reload}"
                " starts the stock vLLM, which writes no manifest",
                hint="leave it out",
            )
        if config.mode == "lora_only":
            in_memory, experts = config.trains_in_server, config.lora.has_experts
            self.serve = for_adapters(self.serve, config.lora.r, self.vllm_flags, in_memory=in_memory, experts=experts)

    def prepare(self, sampling: SamplingConfig) -> SamplingConfig:
        from bridge.rollouts.sampler import fit_completions
        from bridge.weights import model_files

        config = self.trainer
        sampling = fit_completions(sampling, self.max_model_len)
        if config.mode == "lora_only":
            _check_adapter(config.model_name, config.lora)
        if config.needs_patched_server:
            start_checks.check_trained_dtype(self.serve)
        self.command = self._prepared(self.serve, sampling)
        model_files.source_files(config.model_name)  # every checkpoint includes these files
        send_key(self.vllm_flags)
        return sampling

    def record(self, run: RunDirectory, checkpoints: Path) -> None:
        config = self.trainer
        assert self.command is not None, "it was prepared"
        write_json(run.server_config, self.serve.document(self.serve))
        url = config.changed(**self.command.server_choices).server.url()
        console.note(f"mode {config.mode}, vLLM at {url}, checkpoints in {checkpoints}")

    @contextlib.contextmanager
    def serving(self, world: "Ranks", sampling: SamplingConfig, run: RunDirectory) -> Iterator[ReplicaServer]:
        """Start this replica's server, and stop it at the end of the block.

        The first replica's files are in the run directory, those of each other replica in a folder inside it.
        """
        folder = run.path if world.is_rank_zero else run.ranks / str(world.rank)
        log = folder / run.server_log.name

        def server_choices() -> Mapping[str, Any]:
            if self.command is None:
                self.command = self._command(world, sampling, folder / run.manifest.name)
            return self.command.server_choices

        choices = world.run_on_all(lambda: world.tp_group.run_on_rank_zero(server_choices))
        send_key(self.vllm_flags)
        with contextlib.ExitStack() as running:

            def start() -> StartedServer | None:
                if not world.is_tp_rank_zero:
                    return None
                assert self.command is not None, "the first rank of the replica made it"
                server = StartedServer(
                    self.command, log, limit_s=self._start_limit_s, waiting=console.waiting, preloaded=self._preloaded
                )
                return running.enter_context(server.running(world.check_abort))

            with self._compiling_ahead(world):
                process = world.run_on_all(start)
            yield ReplicaServer(choices, process)

    def _compiling_ahead(self, world: "Ranks") -> contextlib.AbstractContextManager[None]:
        """Compile the training step while vLLM starts, if this process trains a whole model in the server's memory."""
        config = self.trainer
        device_type, _ = accelerator.choose(self.serve.device)
        is_whole = config.trains_in_server and world.tp_size == world.cp_size == 1
        if not (is_whole and config.compute.compiles_on(device_type)):
            return contextlib.nullcontext()
        import torch

        from bridge.engine.compile_ahead import compiling_ahead
        from bridge.weights.attach import leave_core_to_server, stand_in

        assert self.command is not None, "a rank with a whole model starts a server"
        device = leave_core_to_server() if device_type == "cpu" else torch.device("cuda", 0)
        dtype = torch.bfloat16 if self.serve.dtype == "auto" else getattr(torch, self.serve.dtype)
        share = float(value(self.command.argv, "--gpu-memory-utilization") or 1)  # 1: vLLM may use all memory
        model = partial(stand_in, config.model_name, dtype, device, share=share)
        return compiling_ahead(
            model, config.compute, config.optimizer,
            lora=config.lora if config.mode == "lora_only" else None, temperature=config.sampling.temperature,
            ranks=world,
        )  # fmt: skip

    def _command(self, world: "Ranks", sampling: SamplingConfig, manifest: Path) -> ServerCommand:
        """Return the server command for a replica other than the first."""
        manifest.parent.mkdir(parents=True, exist_ok=True)
        is_known = not self.trainer.rollouts.samples_here  # environments know the port, even after a resume
        port = self.serve.port + world.dp_rank if is_known else free_port(self.serve.host)
        serve = self.serve.model_copy(update={"port": port, "vllm_config_path": manifest})
        return self._prepared(serve, sampling)

    def _prepared(self, serve: ServeConfig, sampling: SamplingConfig) -> ServerCommand:
        """Check what can be checked before a server starts, and return the command that starts it."""
        trainer = self.trainer.model_copy(update={"sampling": sampling})
        combinations.refuse(serve, trainer)
        return prepare(
            serve, self.vllm_flags,
            shares_weights=trainer.needs_patched_server,
            share_of=partial(accelerator.derive, trainer=trainer),
            sent_from=trainer.trainer_device if trainer.publishing.reload == "transfer" else None,
        )  # fmt: skip


def send_key(flags: Sequence[str]) -> None:
    """Make this process send the API key that vLLM's own `flags` set, if any."""
    if key := value(flags, "--api-key"):
        os.environ[api_key.VARIABLE] = key
    api_key.headers()  # raises for a key that cannot be sent


def _check_adapter(model: str, lora: LoraConfig) -> None:
    """Check that the model has the layers that the adapter targets."""
    import torch

    from bridge.weights import adapter, skeleton

    if lora.target_modules != adapter.ALL_LINEAR:
        adapter.check_targets(skeleton.build(model, torch.bfloat16), lora)


def for_adapters(
    serve: ServeConfig, rank: int, flags: Sequence[str] = (), *, in_memory: bool, experts: bool = False
) -> ServeConfig:
    """Return `serve` with slots for a trained adapter of this `rank`; `flags` are vLLM's own.

    With `experts`, the slots also cover routed experts.

    Raises:
        UsageError: the user chose slots that are too small, that are sharded differently from the weights, or, if the
            adapter is trained `in_memory`, that have a different rank.
    """
    if in_memory and serve.tensor_parallel_size > 1 and SHARDED in names(flags):
        raise UsageError(
            f"{SHARDED} shards an adapter differently from the weights, so it cannot be trained in vLLM's memory",
            hint="leave it out, or --lora-handover disk",
        )
    if experts:
        serve = serve.model_copy(update={"lora_experts": True})
    to_vllm = value(flags, MAX_RANK)
    given = int(to_vllm) if to_vllm.isdecimal() else serve.max_lora_rank
    if given is not None and given < rank:
        raise UsageError(
            f"{MAX_RANK} {given} is less than --lora-r {rank}", hint=f"leave {MAX_RANK} out: it is derived"
        )
    slot = slot_rank(rank if given is None else given)
    if in_memory and slot is not None and slot != rank:
        instead = f"leave {MAX_RANK} out" if slot_rank(rank) == rank else f"--lora-r {slot}"
        raise UsageError(
            f"--lora-r {rank}: with --lora-handover memory the adapter is trained in vLLM's own slot, whose rank"
            f" is {slot}",
            hint=f"{instead}, or --lora-handover disk",
        )
    if serve.max_lora_rank is None:
        console.note(f"{MAX_RANK} {rank}: the rank of --lora-r", style="dim")
        return serve.model_copy(update={"max_lora_rank": rank})
    return serve
