"""`bridge export`: a checkpoint as a plain model folder, on disk and, if wanted, on the hub."""

import json
from pathlib import Path
from typing import Annotated

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
Base = Annotated[str | None, option("--model", "MODEL", "Base of an adapter (default: the one that it names).")]
PUSH = "Also upload the folder to this repository on the hub; a new one is private."
Push = Annotated[str | None, option("--push", "REPO", PUSH)]


def export(checkpoint: Checkpoint, *, out: Out, model: Base = None, push: Push = None, as_json: Json = False) -> None:
    """Write a checkpoint as a model that transformers and vLLM load by itself.

    An adapter is merged into its base, in the dtype of the base. The tokenizer and the generation defaults are
    beside the weights.
    """
    from bridge.core import hub, mark
    from bridge.run import export as exports

    if push is not None:
        hub.check_push(push)
    exports.holds_adapter(checkpoint, base=model)
    with console.waiting(f"Writing {out}"):
        folder = exports.export(checkpoint, out, base=model)
    console.note(f"exported {checkpoint} to {folder}")
    page = None
    if push is not None:
        with console.waiting(f"Uploading {folder}"):
            page = hub.push(folder, push, leave_out=mark.NAME)
        console.note(f"uploaded to {page}")
    if as_json:
        console.data(json.dumps({"folder": str(folder), "page": page}))
