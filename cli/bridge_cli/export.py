"""`bridge export`: write a checkpoint as a plain model folder, and upload it to the hub if asked to."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from bridge_cli import console
from bridge_cli.options import HOME, Json, option

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint, `step_N` or `adapter_step_N`, or any adapter.",
        show_default=False,
        **HOME,
    ),
]
Out = Annotated[Path, option("--out", "FOLDER", "The folder to write: new, empty, or an earlier export.")]
Base = Annotated[str | None, option("--model", "MODEL", "Base model of an adapter (default: the one that it names).")]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    option("--dtype", "DTYPE", "Dtype of a merged adapter's files (default: the base's); float32 loses nothing."),
]
PUSH = "Also upload the folder to this repository on the hub; a new one is private."
Push = Annotated[str | None, option("--push", "REPO", PUSH)]


def export(
    checkpoint: Checkpoint,
    *,
    out: Out,
    model: Base = None,
    dtype: Dtype = None,
    push: Push = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a model folder that transformers and vLLM can load.

    An adapter is merged into its base, in the dtype of the base or in --dtype; the command prints how much of it
    rounding loses. The source's configuration, tokenizer, code and other files are copied beside the weights.
    """
    from bridge.checkpoints import model_export as exports
    from bridge.core import folder_mark, hub

    if push is not None:
        hub.check_push(push)
    exports.holds_adapter(checkpoint, base=model, dtype=dtype)
    with console.waiting(f"Writing {out}"):
        exported = exports.export(checkpoint, out, base=model, dtype=dtype)
    folder, rounding = exported.folder, exported.rounding
    console.note(f"exported {checkpoint} to {folder}")
    for line in exported.missing:
        console.note(f"warning: {folder} lacks {line}", style="yellow")
    if exported.tokens_beyond:
        console.note(
            f"warning: {exported.tokens_beyond}; give the adapter's folder the tokenizer of its base", style="yellow"
        )
    if rounding is not None:
        console.note(
            f"rounding to {rounding.dtype} changes what the adapter adds to the weights: relative error"
            f" {rounding.relative_error:.2g}, cosine {rounding.cosine:.2f}"
        )
        if rounding.is_large:
            lost = "warning: the exported model has lost part of what was learned"
            console.note(f"{lost}; --dtype float32 keeps it, or {exported.as_adapter}", style="yellow")
    if exported.is_base:
        console.note("warning: the adapter changes nothing: the exported model equals its base", style="yellow")
    page = None
    if push is not None:
        with console.waiting(f"Uploading {folder}"):
            page = hub.push(folder, push, leave_out=folder_mark.NAME)
        console.note(f"uploaded to {page}")
    if as_json:
        figures = None if rounding is None else dataclasses.asdict(rounding)
        console.data(json.dumps({"folder": str(folder), "page": page, "rounding": figures}))
