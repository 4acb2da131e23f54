"""`bridge tinker`: Tinker's API on one copy of the weights, for the `tinker` client and scripts that use it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridge.config import ServeConfig
from bridge.config.optimizers import OptimizerName
from bridge.errors import UsageError
from bridge.processes.preload import Preloaded, preloading
from bridge_cli import console
from bridge_cli.options import from_config, option
from bridge_cli.serve_vllm import VllmFlags

if TYPE_CHECKING:
    from bridge.engine.policy import Policy

MaxAdapters = Annotated[
    int | None,
    option("--max-adapters", "INTEGER", "Adapters that are trained at once, of all clients (default: 4).", min=1),
]
AllWeights = Annotated[
    bool, option("--all-weights", "", "Train all weights, of one client's model at a time, instead of adapters.")
]
BaseModel = Annotated[
    str, option("--base-model", "TEXT", "The model's name for clients, such as Qwen/Qwen3-8B (default: --model).")
]
SavePath = Annotated[Path, option("--save-path", "FOLDER", "Folder for clients' checkpoints (default: runs/tinker).")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", metavar="TEXT", envvar="TINKER_API_KEY", show_default=False, show_envvar=False,
        help="Key that clients send, tml-... (default: TINKER_API_KEY, or any key, but only from this machine).",
    ),
]  # fmt: skip
Optimizer = Annotated[
    str, option("--optimizer", "NAME", "AdamW's state: adamw, adamw-8bit or adamw-4bit (default: adamw).")
]
MicroBatchTokens = Annotated[
    int | None,
    option(
        "--micro-batch-tokens", "INTEGER",
        "Tokens per forward and backward pass (default: as many as fit in free memory).", min=1,
    ),
]  # fmt: skip
OWN = ("host", "port", "model", "vllm_config_path", "max_lora_rank")
"""Choices that mean the API's address, which server, or the adapters: vLLM's own are derived."""
MOST_ADAPTERS = 4
CACHED = 4
"""Adapters that vLLM keeps in host memory for each that is trained, where it loads snapshots from folders."""


@from_config(ServeConfig, hide=("lora_experts",))
def tinker(
    config: ServeConfig,
    *,
    all_weights: AllWeights = False,
    max_adapters: MaxAdapters = None,
    base_model: BaseModel = "",
    save_path: SavePath = Path("runs/tinker"),
    api_key: ApiKey = None,
    optimizer: Optimizer = "adamw",
    micro_batch_tokens: MicroBatchTokens = None,
    vllm_flags: VllmFlags = None,
) -> None:
    """Answer the tinker client: its scripts train this model, on one copy of the weights.

    Starts vLLM, or attaches to the running server whose manifest is at --vllm-config-path. Clients train adapters
    beside each other, of ranks up to --max-lora-rank (default: 32). For example: bridge tinker --model MODEL, then
    TINKER_BASE_URL=http://127.0.0.1:9001 TINKER_API_KEY=tml-local python SCRIPT.
    """
    if all_weights and (max_adapters is not None or config.max_lora_rank is not None):
        flag = "--max-adapters" if max_adapters is not None else "--max-lora-rank"
        raise UsageError(f"{flag} has no effect with --all-weights: there are no adapters", hint=f"leave {flag} out")
    if config.lora_experts:
        raise UsageError(
            "--lora-experts has no effect here: routed experts get no adapter", hint="leave --lora-experts out"
        )
    most = None if all_weights else max_adapters or MOST_ADAPTERS
    starts_server = config.vllm_config_path is None
    with preloading() if starts_server else contextlib.nullcontext(Preloaded(None)) as preloaded:
        from bridge.tinker import serving, wire  # while vLLM is imported, too

        serving.check_key(config.host, api_key)
        wire.messages()  # before vLLM starts
        sections = {"optimizer": _optimizer(optimizer), "compute": _compute(micro_batch_tokens)}
        with _policy(config, sections, vllm_flags or [], most, preloaded) as policy:
            name = base_model or policy.model_name
            trainer = serving.trainer_of(policy, save_path, base_name=name, most_adapters=most)
            keys = "the API key" if api_key else "any key that begins with tml-"
            url = f"http://{config.host}:{config.port}"
            console.note(f"Tinker's API for {name}: {url}, with {keys}; checkpoints in {save_path}")
            saved = serving.serve(trainer, host=config.host, port=config.port, key=api_key)
            for path in saved:
                console.note(f"saved: {path}")


def _optimizer(name: str) -> Any:
    from typing import get_args

    from bridge.config import OptimizerConfig
    from bridge.tinker.training import ADAM

    names = get_args(OptimizerName)
    if name not in names:
        raise UsageError(f"--optimizer {name}, expected one of {', '.join(names)}", hint="--optimizer adamw-8bit")
    # clients give a rate with each step; without one here, the log would announce a default that no step takes
    return OptimizerConfig(name=name, lr=ADAM["learning_rate"])  # type: ignore[arg-type]


def _compute(micro_batch_tokens: int | None) -> Any:
    from bridge.config import ComputeConfig

    return ComputeConfig(micro_batch_tokens=micro_batch_tokens)


@contextlib.contextmanager
def _policy(
    config: ServeConfig,
    training: dict[str, Any],
    vllm_flags: list[str],
    most_adapters: int | None,
    preloaded: Preloaded,
) -> "Iterator[Policy]":
    """Attach to the server that the user named, or to one that is started for the block; None: all weights."""
    from bridge import library
    from bridge.config import LoraConfig, PublishingConfig
    from bridge.tinker.adapters import ALPHA, DEFAULT_RANK
    from bridge.weights import skeleton

    # a client may sample between a pass and its step: the KV cache keeps its memory
    sections: dict[str, Any] = {**training, "publishing": PublishingConfig(kv_sleep="never")}
    several_adapters = most_adapters is not None
    own_flags = list[str]()
    if most_adapters is not None:
        rank = config.max_lora_rank or DEFAULT_RANK
        sections["lora"] = LoraConfig(r=rank, alpha=ALPHA)
        own_flags = ["--max-loras", str(most_adapters), "--max-cpu-loras", str(CACHED * most_adapters)]
    path = config.vllm_config_path
    given = {name: value for name, value in config.model_dump(exclude_unset=True).items() if name not in OWN}
    if path is None:
        with library.serve_preloaded(
            preloaded, config.model, own_flags + vllm_flags, sections, given, several_adapters=several_adapters
        ) as policy:
            yield policy
        return
    without_effect = [f"--{name.replace('_', '-')}" for name in given] + vllm_flags
    if without_effect:
        raise UsageError(
            f"{without_effect[0]} has no effect on a running server", hint="leave it or --vllm-config-path out"
        )
    with library.attach(path, **sections, several_adapters=several_adapters) as policy:
        if skeleton.absolute(config.model) != policy.model_name:
            raise UsageError(
                f"the server serves {policy.model_name}, expected {config.model} (--model)",
                hint=f"--model {policy.model_name}",
            )
        yield policy
