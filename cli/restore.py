"""`bridge restore`: load a checkpoint into a live server's weights, in place, whether they are torn or not.

Everything is checked before the server is paused: what is refused has changed nothing.

Not covered: reading and writing the weights (`bridge/weights/model_folder.py`), the fence around it
(`bridge/server/fence.py`), the slot of an adapter (`patches/adapter.py`).
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
from cli import console
from cli.options import Json
from cli.verify import ManifestPath

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from bridge.run.checkpoint import Progress
    from bridge.server.client import BridgeClient
    from bridge.server.fence import FenceTimes
    from bridge.server.manifest import Manifest
    from bridge.weights.attach import AttachedModel

TIMEOUT_S = 600.0
COMPUTED_WITH = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
)  # fmt: skip
"""What a model computes with its weights: two that differ here alone have weights of the same names and shapes."""

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint of bridge train, or any folder with weights of the served model.",
        show_default=False,
    ),
]


def restore(checkpoint: Checkpoint, *, vllm_config_path: ManifestPath = None, as_json: Json = False) -> None:
    """Load a checkpoint into the weights of a live server, in place.

    It mends a server whose trainer died while it wrote, and brings older weights back to one that is well.
    Requests under way are kept, and go on with the restored weights.
    """
    from bridge.server import fence
    from bridge.server.client import BridgeClient

    exported = manifest.load(vllm_config_path)
    folder = folder_of(checkpoint)
    with BridgeClient(exported, timeout_s=TIMEOUT_S) as client:
        fence.when_free(lambda: client.take_lease(f"bridge restore {folder}"))
        with console.waiting(f"Checking {folder}"):
            progress = checked(folder)
            write = prepared(client, exported, folder)
        with deferred_interrupt():  # what was done is told before an interrupt acts
            times = write(0 if progress is None else progress.weight_version)
            tell(folder, progress, times, exported.model, as_json=as_json)


def folder_of(checkpoint: str) -> Path:
    """Return the folder that `checkpoint` names: itself, or where the hub's cache keeps the model of that name.

    Raises:
        UsageError: there is none.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    folder = Path(checkpoint)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(checkpoint, local_files_only=True))
        except (OSError, HFValidationError) as error:
            raise UsageError(
                f"there is no folder {checkpoint}, nor a model of that name in the hub's cache",
                remedy="name a checkpoint, such as SAVE_PATH/step_N, or the folder that the server was started with",
            ) from error
    return folder.resolve()


def prepared(client: "BridgeClient", exported: "Manifest", folder: Path) -> "Callable[[int], FenceTimes]":
    """Check that `folder` fits the server, and return what loads it as a version or a later one.

    Raises:
        UsageError: it is of another model, or an adapter that has no place in the server's slots.
        AttachError: the server cannot be attached to, or takes no adapters.
    """
    from bridge.weights import adapter_folder, attach

    if (folder / adapter_folder.CONFIG_NAME).is_file():
        refuse_without_slots(exported, folder)
        adapter_folder.check(folder, exported.shard(0).lora_slots)
        return lambda version: load_adapter(client, folder, version)
    attached = attach.attach(exported)
    refuse_other_model(attached.model, folder, exported.model)
    return lambda version: load(client, attached, folder, version)


def refuse_without_slots(exported: "Manifest", folder: Path) -> None:
    """Check that the server that `exported` itself takes adapters.

    Raises:
        AttachError: it does not.
    """
    if not exported.shard(0).lora_slots:
        raise AttachError(
            f"{folder} holds an adapter, and the server takes none",
            remedy="bridge serve-vllm --max-lora-rank R, or name a checkpoint with the weights of a whole model",
        )


def load_adapter(client: "BridgeClient", folder: Path, version: int) -> "FenceTimes":
    """Let the server load the adapter in `folder` into a slot, inside the fence.

    Raises:
        AttachError: a living process holds the fence, the weights themselves are torn, or the adapter does not fit.
        ServerUnreachableError: the server is gone.
    """
    from bridge.server import fence
    from bridge.server.fence import Update

    def write() -> None:
        try:
            client.seat_adapter(folder)
        except AttachError:  # vLLM loads an adapter whole or not at all
            with suppress(AttachError):  # one that was torn before stays torn
                client.resume()
            raise

    with console.waiting(f"Loading {folder}"):
        update = Update(write, version=version, takeover=True, last_checkpoint=folder)
        return fence.publish(client, update, writes="adapter")


def checked(folder: Path) -> "Progress | None":
    """Check every file of a checkpoint of ours and return how far its run had come; None for any other folder.

    Raises:
        CheckpointError: it was cut short or changed.
    """
    from bridge.run import checkpoint

    return checkpoint.read(folder).progress if checkpoint.is_checkpoint(folder) else None


def refuse_other_model(served: "PreTrainedModel", folder: Path, name: str) -> None:
    """Check that `folder` holds the weights of the model that is `served` as `name`.

    Raises:
        UsageError: they are of another model.
    """
    from bridge.weights import model_folder, skeleton

    found, expected = skeleton.build(str(folder), served.dtype).config.to_dict(), served.config.to_dict()
    others = [key for key in COMPUTED_WITH if found.get(key) != expected.get(key)]
    if others:
        told = "; ".join(f"{key} {found.get(key)}, expected {expected.get(key)}" for key in others[:3])
        raise UsageError(
            f"{folder} is of another model than {name}, which the server serves: {told}",
            remedy=f"name a checkpoint of {name}, or serve that one: "
            f"bridge serve-vllm --model {shlex.quote(str(folder))}",
        )
    model_folder.check(served, folder)


def load(client: "BridgeClient", attached: "AttachedModel", folder: Path, version: int) -> "FenceTimes":
    """Load the weights in `folder` inside the fence, and publish them as `version` or a later one.

    Raises:
        AttachError: a living process holds the fence.
        ServerUnreachableError: the server is gone.
    """
    from bridge.server import fence
    from bridge.server.fence import Update
    from bridge.weights import model_folder

    def write() -> None:
        try:
            model_folder.load_into(attached.model, folder)
        except BaseException:
            console.note("the weights may be half written: the server stands still until bridge restore has worked")
            raise

    with console.waiting(f"Loading {folder}"):
        return fence.publish(client, Update(write, version=version, takeover=True, last_checkpoint=folder))


def tell(folder: Path, progress: "Progress | None", times: "FenceTimes", model: str, *, as_json: bool) -> None:
    """Say what was loaded, as which version, and how long the server stood still for it."""
    step = None if progress is None else progress.step
    seconds = times.pause_s + times.write_s + times.publish_s
    of_step = "" if step is None else f" (step {step})"
    console.note(f"restored {folder}{of_step} into {model}: version {times.version}, {seconds:.2f} s")
    if as_json:
        found = {"checkpoint": str(folder), "step": step, "version": times.version, "seconds": seconds}
        console.data(json.dumps(found))
