"""`bridge tinker`: Tinker's API on one copy of the weights, for the `tinker` client and scripts that use it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridge.config import ServeConfig
from bridge.config.optimizers import OptimizerName
from bridge.errors import UsageError
from bridge_cli import console
from bridge_cli.options import from_config, option
from bridge_cli.serve_vllm import VllmFlags

if TYPE_CHECKING:
    from bridge.engine.policy import Policy

AllWeights = Annotated[
    bool, typer.Option("--all-weights", help="Train all weights, of one client's model at a time.", show_default=False)
]
BaseModel = Annotated[
    str, option("--base-model", "TEXT", "The model's name for clients, such as Qwen/Qwen3-8B (default: --model).")
]
SavePath = Annotated[Path, option("--save-path", "FOLDER", "Folder for clients' checkpoints (default: runs/tinker).")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", metavar="TEXT", envvar="TINKER_API_KEY", show_default=False, show_envvar=False,
        help="Key that clients send, tml-... (default: TINKER_API_KEY, or any key, from this machine alone).",
    ),
]  # fmt: skip
Optimizer = Annotated[
    str, option("--optimizer", "NAME", "AdamW's state: adamw, adamw-8bit or adamw-4bit (default: adamw).")
]
OWN = ("host", "port", "model", "vllm_config_path")
"""Choices that mean the API's address, or which server: vLLM's own address is chosen for it."""


@from_config(ServeConfig)
def tinker(
    config: ServeConfig,
    *,
    all_weights: AllWeights = False,
    base_model: BaseModel = "",
    save_path: SavePath = Path("runs/tinker"),
    api_key: ApiKey = None,
    optimizer: Optimizer = "adamw",
    vllm_flags: VllmFlags = None,
) -> None:
    """Answer the tinker client: its scripts train this model, on one copy of the weights.

    Starts vLLM, or attaches to the running server whose manifest is at --vllm-config-path. For example: bridge tinker
    --model MODEL --all-weights, then TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python SCRIPT.
    """
    from bridge.tinker import serving, wire

    if not all_weights:
        raise UsageError(
            "bridge tinker trains all weights, and no adapters yet, which is its default",
            hint="bridge tinker --model MODEL --all-weights",
        )
    serving.check_key(config.host, api_key)
    wire.messages()  # before vLLM starts
    with _policy(config, _optimizer(optimizer), vllm_flags or []) as policy:
        base = serving.base_folder(policy.model_name)
        name = base_model or policy.model_name
        keys = "the API key" if api_key else "any key that begins with tml-"
        url = f"http://{config.host}:{config.port}"
        console.note(f"Tinker's API for {name}: {url}, with {keys}; checkpoints in {save_path}")
        saved = serving.serve(
            policy, base=base, base_name=name, folder=save_path, host=config.host, port=config.port, key=api_key
        )
        for path in saved:
            console.note(f"saved: {path}")


def _optimizer(name: str) -> Any:
    from typing import get_args

    from bridge.config import OptimizerConfig

    names = get_args(OptimizerName)
    if name not in names:
        raise UsageError(f"--optimizer {name}, expected one of {', '.join(names)}", hint="--optimizer adamw-8bit")
    return OptimizerConfig(name=name)  # type: ignore[arg-type]


@contextlib.contextmanager
def _policy(config: ServeConfig, optimizer: Any, vllm_flags: list[str]) -> "Iterator[Policy]":
    """Attach to the server that the user named, or to one that is started for the block."""
    from bridge import library
    from bridge.config import PublishingConfig
    from bridge.weights import skeleton

    # a client may sample between a pass and its step: the KV cache keeps its memory
    sections: dict[str, Any] = {"optimizer": optimizer, "publishing": PublishingConfig(kv_sleep="never")}
    path = config.vllm_config_path
    if path is None:
        given = {name: value for name, value in config.model_dump(exclude_unset=True).items() if name not in OWN}
        with library.serve(config.model, *vllm_flags, **sections, **given) as policy:
            yield policy
        return
    if vllm_flags:
        raise UsageError(f"{vllm_flags[0]} has no effect on a running server", hint="leave out --vllm-config-path")
    with library.attach(path, **sections) as policy:
        if skeleton.absolute(config.model) != policy.model_name:
            raise UsageError(
                f"the server serves {policy.model_name}, expected {config.model} (--model)",
                hint=f"--model {policy.model_name}",
            )
        yield policy
