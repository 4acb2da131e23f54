"""How large a model is, read off its folder without loading anything.

Not covered: what a run keeps of each parameter and token (`memory.py`); layers that keep no keys and values.
"""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bridge.core import hub
from bridge.core.hub import CONFIG_NAME
from bridge.errors import UsageError
from bridge.planning.dimensions import Dimensions

COUNTABLE = frozenset({
    "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite", "llama", "ministral",
    "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3",
})  # fmt: skip
"""Values of `model_type` whose layers are attention and gated feed-forward parts alone, dense or of experts."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
KEEP_KEYS_AND_VALUES = {"full_attention", "sliding_attention", "chunked_attention"}
NO_PLAN = "serve and train it without a plan: --gpu-memory-utilization says what vLLM may take"


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """One model's size."""

    num_params: int
    """Parameters, tied ones once."""
    exact: bool
    """Whether they were counted in the headers of its weights; else they follow from its dimensions."""
    dimensions: Dimensions
    """Its widths."""
    max_tokens: int | None = None
    """Longest sequence; None: its configuration names none."""

    @classmethod
    def of(cls, model: str | Path) -> Self:
        """Read the size of `model`, a folder or the name of a model that the hub's cache keeps.

        Raises:
            UsageError: it is not here, or its size cannot be told without loading it, and why.
        """
        folder = folder_of(str(model))
        document = _read(folder / CONFIG_NAME)
        config = document.get("text_config") or document
        _refuse_other_layers(config)
        try:
            dimensions = Dimensions.of(config)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else "its dimensions are no numbers"
            raise UsageError(f"{folder / CONFIG_NAME} does not tell the model's size: {why}", remedy=NO_PLAN) from error
        counted = _count_in_headers(folder)
        if counted is None:
            _refuse_uncountable(folder, document)
        return cls(
            num_params=counted or dimensions.num_params,
            exact=counted is not None,
            dimensions=dimensions,
            max_tokens=config.get("max_position_embeddings"),
        )


def folder_of(model: str, *, fetch: bool = False) -> Path:
    """Return the folder of `model`, its own or in the hub's cache; `fetch` downloads its config.json if it is missing.

    Raises:
        UsageError: it is not here, or the hub does not have it or does not answer.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    with suppress(OSError, HFValidationError):
        cached = Path(snapshot_download(model, local_files_only=True))
        if not fetch or (cached / CONFIG_NAME).is_file():
            return cached
    if fetch and (fetched := hub.fetch_config(model)):
        return fetched
    raise UsageError(
        f"there is no folder {model}, and no model of that name in the hub's cache",
        remedy=f"check the name; a Hugging Face model's folder with only its {CONFIG_NAME} is enough"
        + (f", or download it: hf download {model}" if HUB_NAME.fullmatch(model) else ""),
    )


def _refuse_other_layers(config: Mapping[str, Any]) -> None:
    others = sorted(set(config.get("layer_types") or ()) - KEEP_KEYS_AND_VALUES)
    others += ["compressed keys and values (kv_lora_rank)"] if config.get("kv_lora_rank") else []
    if others:
        raise UsageError(
            f"the model has layers of {' and '.join(others)}: what they keep of a token cannot be told", remedy=NO_PLAN
        )


def _refuse_uncountable(folder: Path, document: Mapping[str, Any]) -> None:
    kind = document.get("model_type")
    if kind not in COUNTABLE:
        raise UsageError(
            f"{folder} holds no whole set of weights, and the parameters of a {kind!r} model cannot be counted by its "
            "dimensions",
            remedy="give a folder with all of its .safetensors: their headers are counted",
        )


def _count_in_headers(folder: Path) -> int | None:
    """Return the number of parameters in the weights of `folder`; None where not all are there."""
    index = folder / "model.safetensors.index.json"
    names = set(_read(index).get("weight_map", {}).values()) if index.is_file() else {"model.safetensors"}
    files = [folder / name for name in names]
    if not files or not all(file.is_file() for file in files):
        return None
    return sum(_count_in_header(file) for file in files)


def _count_in_header(weights: Path) -> int:
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, weights.stat().st_size))
    header = _object(weights, text)
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _read(path: Path) -> dict[str, Any]:
    try:
        return _object(path, path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="name a model's folder") from error


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not whole: {error}", remedy="download or copy the model again") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds no JSON object", remedy="download or copy the model again")
    return document
