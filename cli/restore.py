"""`bridge restore`: load a checkpoint into a live server's weights, in place, half-written or not.

Everything is checked before the server is paused: a refusal has changed nothing.

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

    from bridge.server.client import BridgeClient
    from bridge.server.fence import FenceTimes
    from bridge.server.manifest import Manifest
    from bridge.weights.attach import AttachedModel

TIMEOUT_S = 600.0
COMPUTED_WITH = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
)  # fmt: skip
"""What a model computes with its weights: models that differ only here have weights of the same names and shapes."""

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
    from bridge.run import checkpoint as checkpoints
    from bridge.server import fence
    from bridge.server.client import BridgeClient

    exported = manifest.load(vllm_config_path)
    folder = _folder_of(checkpoint)
    with BridgeClient(exported, timeout_s=TIMEOUT_S) as client:
        fence.when_free(lambda: client.take_lease(f"bridge restore {folder}"))
        with console.waiting(f"Checking {folder}"):
            progress = checkpoints.read(folder).progress if checkpoints.is_checkpoint(folder) else None
            load = _prepared(client, exported, folder)
        with deferred_interrupt():  # what was done is printed before an interrupt acts
            with console.waiting(f"Loading {folder}"):
                times = load(0 if progress is None else progress.weight_version)
            step = None if progress is None else progress.step
            seconds = times.pause_s + times.write_s + times.publish_s
            of_step = "" if step is None else f" (step {step})"
            console.note(f"restored {folder}{of_step} into {exported.model}: version {times.version}, {seconds:.2f} s")
            if as_json:
                found = {"checkpoint": str(folder), "step": step, "version": times.version, "seconds": seconds}
                console.data(json.dumps(found))


def _folder_of(checkpoint: str) -> Path:
    """Return the folder that `checkpoint` names: itself, or that of a model in the hub's cache."""
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


def _prepared(client: "BridgeClient", exported: "Manifest", folder: Path) -> "Callable[[int], FenceTimes]":
    """Check that `folder` fits the server, and return what loads it as a version or a later one."""
    from bridge.weights import adapter_folder, attach

    if not (folder / adapter_folder.CONFIG_NAME).is_file():
        attached = attach.attach(exported)
        _refuse_other_model(attached.model, folder, exported.model)
        return lambda version: _load(client, attached, folder, version)
    slots = exported.shard(0).lora_slots
    if not slots:
        raise AttachError(
            f"{folder} holds an adapter, and the server takes none",
            remedy="bridge serve-vllm --max-lora-rank R, or name a checkpoint with the weights of a whole model",
        )
    adapter_folder.check(folder, slots)
    return lambda version: _load_adapter(client, folder, version)


def _refuse_other_model(served: "PreTrainedModel", folder: Path, name: str) -> None:
    """Check that `folder` holds the weights of the model that is `served` as `name`."""
    from bridge.weights import model_folder, skeleton

    found, expected = skeleton.build(str(folder), served.dtype).config.to_dict(), served.config.to_dict()
    others = [key for key in COMPUTED_WITH if found.get(key) != expected.get(key)]
    if others:
        differences = "; ".join(f"{key} {found.get(key)}, expected {expected.get(key)}" for key in others[:3])
        raise UsageError(
            f"{folder} is of another model than {name}, which the server serves: {differences}",
            remedy=f"name a checkpoint of {name}, or serve that one: "
            f"bridge serve-vllm --model {shlex.quote(str(folder))}",
        )
    model_folder.check(served, folder)


def _load_adapter(client: "BridgeClient", folder: Path, version: int) -> "FenceTimes":
    """Let the server load the adapter in `folder` into a slot, inside the fence."""
    from bridge.server import fence
    from bridge.server.fence import Update

    def write() -> None:
        try:
            client.seat_adapter(folder)
        except AttachError:  # vLLM loads an adapter whole or not at all
            with suppress(AttachError):  # one that was half-written before stays so
                client.resume()
            raise

    update = Update(write, version=version, takeover=True, last_checkpoint=folder)
    return fence.publish(client, update, writes="adapter")


def _load(client: "BridgeClient", attached: "AttachedModel", folder: Path, version: int) -> "FenceTimes":
    """Load the weights in `folder` inside the fence."""
    from bridge.server import fence
    from bridge.server.fence import Update
    from bridge.weights import model_folder

    def write() -> None:
        try:
            model_folder.load_into(attached.model, folder)
        except BaseException:
            console.note("the weights may be half-written: the server stays paused until bridge restore succeeds")
            raise

    return fence.publish(client, Update(write, version=version, takeover=True, last_checkpoint=folder))
