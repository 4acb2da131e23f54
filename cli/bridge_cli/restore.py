"""`bridge restore`: load a checkpoint into a live server's weights, in place, even if they are half-written.

Everything is checked before the server is paused, so that a refusal changes nothing.
"""

import json
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.core.interrupt import deferred_interrupt
from bridge.errors import AttachError, UsageError
from bridge.server import manifest
from bridge_cli import console
from bridge_cli.options import Json
from bridge_cli.verify import ManifestPath

if TYPE_CHECKING:
    from bridge.server.client import BridgeClient
    from bridge.server.manifest import Manifest
    from bridge.server.protocol import Written

TIMEOUT_S = 600.0
COMPUTED_WITH = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
)  # fmt: skip
"""Settings that decide how weights are used: models that differ here may have the same weight names and shapes."""

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint of bridge train, or any folder with weights of the served model.",
        show_default=False,
    ),
]


def restore(checkpoint: Checkpoint, *, vllm_config_path: ManifestPath = None, as_json: Json = False) -> None:
    """Load a checkpoint into the weights of a running server, in place.

    It repairs a server whose trainer died while writing, or restores older weights on a healthy one.
    In-flight requests are kept, and continue with the restored weights.
    """
    from bridge.checkpoints import checkpoint as checkpoints
    from bridge.core.paths import ADAPTER_CONFIG
    from bridge.server import fence
    from bridge.server.client import BridgeClient
    from bridge.server.fence import Update

    exported = manifest.load(vllm_config_path)
    folder = _folder_of(checkpoint)
    with BridgeClient(exported, timeout_s=TIMEOUT_S) as client:
        fence.when_free(lambda: client.take_lease(f"bridge restore {folder}"))
        with console.waiting(f"Checking {folder}"):
            progress = checkpoints.read(folder).progress if checkpoints.is_checkpoint(folder) else None
            is_adapter = (folder / ADAPTER_CONFIG).is_file()
            write = _adapter_writer(client, exported, folder) if is_adapter else _model_writer(exported, folder)
        version = 0 if progress is None else progress.weight_version
        update = Update(version=version, takeover=True, last_checkpoint=folder)
        with deferred_interrupt():  # the result is printed before an interrupt takes effect
            writes: Written = "adapter" if is_adapter else "weights"
            with console.waiting(f"Loading {folder}"), fence.publish(client, update, writes=writes) as window:
                write()
            times = window.times
            seconds = times.pause_s + times.write_s + times.publish_s
            what = f"{folder}" if progress is None else f"{folder} (step {progress.step})"
            console.note(f"restored {what} into {exported.model}: version {times.version}, {seconds:.2f} s")
            if as_json:
                step = None if progress is None else progress.step
                document = {"checkpoint": str(folder), "step": step, "version": times.version, "seconds": seconds}
                console.data(json.dumps(document))


def _folder_of(checkpoint: str) -> Path:
    """Return the folder `checkpoint`, or the folder in the hub's cache of the model with this name."""
    from bridge.planning import model_size

    try:
        return model_size.folder_of(checkpoint).resolve()
    except UsageError as error:
        raise UsageError(
            error.message,
            hint="name a checkpoint, such as SAVE_PATH/step_N, or the folder that the server was started with",
        ) from error


def _model_writer(exported: "Manifest", folder: Path) -> Callable[[], None]:
    """Check that `folder` holds weights of the served model, and return a function that loads them."""
    from bridge.ranks.world import Ranks
    from bridge.weights import attach, model_folder, skeleton
    from bridge.weights.rank_parts import Parts

    count = exported.tp_degree
    attached = [attach.attach(exported, part, num_parts=count) for part in range(count)]
    parts = [
        Parts(cuts=model.cuts, tp_group=Ranks(part, count)) if count > 1 else None
        for part, model in enumerate(attached)
    ]
    served, name = attached[0].model, exported.model
    configs = (model.config.get_text_config() for model in (skeleton.build(str(folder), served.dtype), served))
    stored, expected = (config.to_dict() for config in configs)
    others = [key for key in COMPUTED_WITH if stored.get(key) != expected.get(key)]
    if others:
        differences = "; ".join(f"{key} {stored.get(key)}, expected {expected.get(key)}" for key in others[:3])
        serve_command = f"bridge serve-vllm --model {shlex.quote(str(folder))}"
        raise UsageError(
            f"{folder} does not hold the served model, {name}: {differences}",
            hint=f"name a checkpoint of {name}, or serve this model: {serve_command}",
        )
    model_folder.check(served, folder, parts[0])

    def write() -> None:
        try:
            for attached_part, part in zip(attached, parts, strict=True):
                model_folder.load_into(attached_part.model, folder, part)
                attach.synchronize(attached_part.device)
        except BaseException:
            console.note("the weights may be half-written: the server stays paused until bridge restore succeeds")
            raise

    return write


def _adapter_writer(client: "BridgeClient", exported: "Manifest", folder: Path) -> Callable[[], None]:
    """Check that the adapter in `folder` fits the server's slots, and return a function that loads it into one."""
    from bridge.weights import stored_tensors

    shard = exported.shards[0]
    if not shard.lora_slots:
        raise AttachError(
            f"{folder} holds an adapter, but the server does not accept adapters",
            hint="bridge serve-vllm --max-lora-rank R, or name a checkpoint with full model weights",
        )
    stored_tensors.check_adapter(folder, shard)

    def write() -> None:
        try:
            client.load_into_slot(folder)
        except AttachError:  # vLLM loads an adapter completely or not at all
            with suppress(AttachError):  # refused if the weights were already half-written
                client.resume()
            raise

    return write
