"""Read how large a model is from its folder, without loading any weight.

Not covered: parts other than attention, gated delta rules and gated feed-forward; if the weights are missing, the
parts of an outer model around the language model.
"""

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from bridge.core import json_lines, paths
from bridge.core.paths import CONFIG_NAME
from bridge.errors import UsageError
from bridge.types import Quantization

COUNTABLE = frozenset({
    "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "granite", "llama",
    "ministral", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "seed_oss", "smollm3",
})  # fmt: skip
"""Values of a language model's `model_type` whose layers consist of attention or gated delta rules, and of gated
feed-forward parts, dense or of experts."""
RESIZE = (
    "the tokenizer's vocabulary is larger than the model's embedding: add its rows, and save the model, by"
    " model.resize_token_embeddings(len(tokenizer)); or use the tokenizer that the model came with"
)
"""Hint for tokens without an embedding."""
SEEING = frozenset({"mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl"})
"""Values of `model_type` whose images can be in prompts: those with a row for images in docs/families.md."""
GATED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Values of `model_type` whose queries come with a gate of the same width."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts per layer in different families."""
KEEP_KEYS_AND_VALUES = {"full_attention", "sliding_attention", "chunked_attention"}
KEEPS_A_STATE = "linear_attention"
HEAD, EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "wte.weight", "embed_in.weight")
"""Suffixes of the names of a head and of an embedding in a model's files."""
ENDS = (HEAD, *EMBEDDINGS)
"""The suffixes of both."""
EMBEDDING = re.compile(r"embed|wte")
"""Part of the name of every tensor that may be an embedding."""
COMPARED_ROWS = 256
"""Number of rows of a head and an embedding that are compared, to find out whether they are equal."""
COMPARED_TENSORS, COMPARED_BYTES = 64, 4096
"""How many tensors of two sets of weights are compared by name, and how many bytes from the middle of each."""
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
REPLACE_MODEL = "download or copy the model again"
NO_PLAN = "serve and train it without a plan: --gpu-memory-utilization limits what vLLM takes"


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Widths of a decoder, dense or with mixtures of experts, from its configuration."""

    num_layers: int
    num_states: int  # layers that keep a state of fixed size instead of keys and values
    state_keys: int  # width of all key heads of such a layer together
    state_values: int  # width of all value heads
    state_heads: int  # value heads
    state_size: int  # elements of the state of one sequence in one layer
    convolved: int  # tokens that the convolution of such a layer reads
    gates: int  # width of the gates that come with the queries of an attention layer, or 0
    hidden: int  # width of the residual stream
    query: int  # width of all query heads together
    key_value: int  # width of all key heads together, and of all value heads
    vocabulary: int  # rows of the head
    tied: bool  # whether the head is the embedding
    biased: bool  # whether queries, keys and values have biases
    num_dense_layers: int  # layers without experts
    dense: int  # width of their feed-forward part
    num_experts: int  # experts of each layer that is not dense, or 0
    num_routes: int  # experts per token
    expert: int  # width of one expert
    shared_expert: int  # width of the shared expert, or 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the dimensions from a configuration; a KeyError names a missing key."""
        hidden = config["hidden_size"]
        heads = config["num_attention_heads"]
        layers = config["num_hidden_layers"]
        head = config.get("head_dim") or hidden // heads
        kind = str(config.get("model_type"))
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        num_experts = next((config[key] for key in EXPERTS if config.get(key)), 0)
        num_routes = expert = shared_expert = 0
        if num_experts:
            num_routes = config["num_experts_per_tok"]
            expert = width
            shared_expert = (
                config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
            )
        step = config.get("decoder_sparse_step") or 1
        named = set(config.get("mlp_only_layers") or ())
        first = config.get("first_k_dense_replace") or 0

        states = layer_types(config).count(KEEPS_A_STATE)
        key_heads = key_width = value_heads = value_width = convolved = 0
        if states:
            key_heads = config["linear_num_key_heads"]
            key_width = config["linear_key_head_dim"]
            value_heads = config["linear_num_value_heads"]
            value_width = config["linear_value_head_dim"]
            convolved = config["linear_conv_kernel_dim"]

        def is_dense(layer: int) -> bool:
            return not num_experts or layer < first or layer in named or (layer + 1) % step > 0

        return cls(
            num_layers=layers,
            num_states=states,
            state_keys=key_heads * key_width,
            state_values=value_heads * value_width,
            state_heads=value_heads,
            state_size=value_heads * value_width * key_width,
            convolved=convolved,
            gates=head * heads if kind in GATED else 0,
            hidden=hidden,
            query=head * heads,
            key_value=head * (config.get("num_key_value_heads") or heads),
            vocabulary=config["vocab_size"],
            tied=is_tied(config),
            biased=config.get("attention_bias", kind.startswith("qwen2")),
            num_dense_layers=sum(map(is_dense, range(layers))),
            dense=config.get("intermediate_size") or width,
            num_experts=num_experts,
            num_routes=num_routes,
            expert=expert,
            shared_expert=shared_expert,
        )

    @property
    def num_params(self) -> int:
        """Count the parameters, tied ones once: exact except for small vectors of some families."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        norms = self.hidden * (2 * self.num_layers + 1)
        attention = self.hidden * (2 * (self.query + self.key_value) + self.gates)
        attention += self.query + 2 * self.key_value if self.biased else 0
        dense = 3 * self.hidden * self.dense
        mixture = self.hidden * (3 * (self.num_experts * self.expert + self.shared_expert) + self.num_experts)
        state = self.hidden * (2 * self.state_keys + 3 * self.state_values + 2 * self.state_heads)
        state += self.convolved * (2 * self.state_keys + self.state_values) + 2 * self.state_heads
        layers = self.num_attending * attention + self.num_states * state
        return embeddings + norms + layers + self._feed_forward(dense, mixture)

    @property
    def num_attending(self) -> int:
        """The number of layers that keep keys and values."""
        return self.num_layers - self.num_states

    @property
    def active(self) -> int:
        """The feed-forward width per token, in the widest kind of layer."""
        return max(self.dense if self.num_dense_layers else 0, self.num_routes * self.expert + self.shared_expert)

    @property
    def adaptable(self) -> int:
        """An adapter's parameters per rank: inputs plus outputs of all linear layers except routed experts."""
        attention = 4 * self.hidden + 2 * (self.query + self.key_value) + self.gates
        state = 5 * self.hidden + 2 * self.state_keys + 3 * self.state_values + 2 * self.state_heads
        shared = 3 * (self.hidden + self.shared_expert) if self.shared_expert else 0
        layers = self.num_attending * attention + self.num_states * state
        return layers + self._feed_forward(3 * (self.hidden + self.dense), shared)

    def adapted(self, *, experts: bool) -> int:
        """Return `adaptable`, plus the inputs and outputs of routed experts if `experts`."""
        of_experts = self._feed_forward(0, 3 * self.num_experts * (self.hidden + self.expert))
        return self.adaptable + of_experts * experts

    @property
    def largest(self) -> int:
        """Elements of the largest parameter: the embedding, or the fused first half of all experts."""
        return max(self.vocabulary * self.hidden, 2 * self.num_experts * self.expert * self.hidden)

    def _feed_forward(self, dense: int, mixture: int) -> int:
        return self.num_dense_layers * dense + (self.num_layers - self.num_dense_layers) * mixture


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters and widths of one model."""

    num_params: int  # parameters of the language model; tied parameters count once
    exact: bool  # whether parameters were counted in the headers of the weight files, not estimated from dimensions
    dimensions: Dimensions
    max_tokens: int | None = None  # longest sequence, if the configuration states it
    num_untrained: int = 0  # held but never trained, such as a vision tower; negative if serving only FP8 saves memory

    @classmethod
    def of(cls, model: str | Path) -> Self:
        """Read the size of `model`, a folder or a name in the hub's cache.

        Raises:
            UsageError: the model is not on this machine, or its size is unknown until it is loaded.
        """
        folder = folder_of(str(model))
        document = _read(folder / CONFIG_NAME)
        try:
            text = document.get("text_config")
            config = dict(text if text and isinstance(text, dict) else document)
            if "tie_word_embeddings" in document:  # the outer model's setting wins
                config["tie_word_embeddings"] = document["tie_word_embeddings"]
            others = {*map(str, {*layer_types(config)} - KEEP_KEYS_AND_VALUES - {KEEPS_A_STATE})}
            if config.get("kv_lora_rank"):
                others.add("compressed keys and values (kv_lora_rank)")
            if config.get("per_layer_config") or config.get("global_head_dim"):
                others.add("heads of several sizes")
            if others:
                raise UsageError(
                    f"the model has layers of {' and '.join(sorted(others))}: how much they keep per token is unknown",
                    hint=NO_PLAN,
                )
            dimensions = Dimensions.of(config)
            estimate = dimensions.num_params
        except (KeyError, TypeError, ZeroDivisionError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else "its dimensions are not numbers"
            raise UsageError(f"{folder / CONFIG_NAME} does not give the model's size: {why}", hint=NO_PLAN) from error
        counted = _count_in_headers(folder, tied=is_tied(document))
        kind = config.get("model_type")
        if counted is None and kind not in COUNTABLE:
            raise UsageError(
                f"{folder} lacks weights, and the parameters of a {kind!r} model cannot be derived from its dimensions",
                hint="name a folder with all .safetensors files: their headers are counted",
            )
        total = counted or estimate
        around = max(total - estimate, 0) if "text_config" in document and kind in COUNTABLE else 0
        return cls(
            num_params=total - around,
            exact=counted is not None and not around,
            dimensions=dimensions,
            max_tokens=config.get("max_position_embeddings"),
            num_untrained=around,
        )

    def quantized(self, how: Quantization | None, *, beside: bool = True) -> Self:
        """Return the size with all weights except the embedding and the head in FP8, at half the bytes; None: no FP8.

        If `beside`, the server also holds the weights that the FP8 is made from; otherwise it holds only the FP8.
        """
        widths = self.dimensions
        if how is None:
            return self
        kept = widths.vocabulary * widths.hidden * (1 if widths.tied else 2)
        half = (self.num_params + self.num_untrained - kept) // 2
        return replace(self, num_untrained=self.num_untrained + (half if beside else -half))


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of a decoder's layers; empty: all are attention layers."""
    named = config.get("layer_types")
    interval = config.get("full_attention_interval")
    if named or not interval:
        return list(named or ())
    layers = range(1, config["num_hidden_layers"] + 1)
    return [KEEPS_A_STATE if layer % interval else "full_attention" for layer in layers]


def folder_of(model: str, *, fetch: bool = False) -> Path:
    """Return the folder of `model`, or its folder in the hub's cache; `fetch` downloads a missing config.json.

    Raises:
        UsageError: the model is not on this machine, and the hub does not have it or does not answer.
    """
    folder = paths.expanded(model)
    if paths.is_folder(folder):
        return folder
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # not cached, not a model name, or an optional library is missing
        cached = Path(snapshot_download(model, local_files_only=True))
        if not fetch or (cached / CONFIG_NAME).is_file():
            return cached
    from bridge.core import hub  # loads the hub's client, which a folder does not need

    if fetch and (fetched := hub.fetch_config(model)):
        return fetched
    hint = f"check the name; a Hugging Face model's folder with only its {CONFIG_NAME} is enough"
    if HUB_NAME.fullmatch(model):
        hint += f", or download it: hf download {model}"
    raise UsageError(f"there is no folder {model}, and no model of that name in the hub's cache", hint=hint)


def is_tied(document: Mapping[str, Any]) -> bool:
    """Return whether a model's head is its embedding, by its config.json; an outer model's setting wins."""
    text = document.get("text_config")
    config = text if text and isinstance(text, dict) else document
    kind = str(config.get("model_type", ""))
    by_default = config.get("tie_word_embeddings", kind.startswith(("gemma", "cohere")))
    return bool(document.get("tie_word_embeddings", by_default))


def rival_weights(folder: Path) -> tuple[str, Path, Path] | None:
    """Return a tensor of `folder` that transformers and vLLM would take from different files, with different values.

    The first file is transformers', the second vLLM's. None: no such tensor is known. Only a few bytes are compared.

    Source: `_get_resolved_checkpoint_files` of transformers 5.17 and 5.19; `DefaultModelLoader._prepare_weights` of
        vLLM 0.26 to 0.33. transformers prefers the single file to an index. vLLM prefers an index to everything else,
        and loads every file if there is none.
    """
    of_index = _named_files(folder) if (folder / INDEX).is_file() else []
    single = folder / SINGLE_FILE
    for_transformers = [single] if single.is_file() else of_index
    for_vllm = sorted(folder.glob("consolidated*.safetensors")) or of_index or sorted(folder.glob("*.safetensors"))
    others = [file for file in for_vllm if file not in for_transformers]
    if not others or not all(file.is_file() for file in (*for_transformers, *others)):
        return None
    ours, theirs = _tensors_of(for_transformers), _tensors_of(others)
    common = sorted(ours.keys() & theirs.keys())
    for name in common[:: max(1, len(common) // COMPARED_TENSORS)]:
        if not _is_alike(ours[name], theirs[name]):
            return name, ours[name].path, theirs[name].path
    return None


def other_rows(folder: Path, vocabulary: int) -> tuple[str, int] | None:
    """Return an embedding or a head in `folder` whose number of rows is not `vocabulary`, and that number."""
    for name, tensor in sorted(_ends(folder).items()):
        if len(tensor.shape) == 2 and tensor.shape[0] != vocabulary:
            return name, tensor.shape[0]
    return None


def lone_head(folder: Path) -> str | None:
    """Return the name of a head in the weights of `folder` if they hold no embedding; None: they do, or it is unknown.

    transformers also uses the head of a tied model as its embedding, but vLLM would start with an empty embedding.
    """
    names = _weight_map(folder) if (folder / INDEX).is_file() else _headers(folder) or {}
    if any(EMBEDDING.search(name) for name in names):
        return None
    return next((name for name in names if name.endswith(HEAD)), None)


def own_head(folder: Path) -> tuple[str, str] | None:
    """Return the names of a head in `folder` and of an embedding that differs from it; None: no difference is known.

    Only a few rows are compared.
    """
    tensors = _ends(folder)
    heads = [name for name in tensors if name.endswith(HEAD)]
    embeddings = [name for name in tensors if name.endswith(EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1:
        return None
    head, embedding = tensors[heads[0]], tensors[embeddings[0]]
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or len(head.shape) != 2 or not head.shape[0]:
        return None
    num_rows = head.shape[0]
    width = head.num_bytes // num_rows
    with head.path.open("rb") as one, embedding.path.open("rb") as other:
        for row in range(0, num_rows, max(1, num_rows // COMPARED_ROWS)):
            one.seek(head.start + row * width)
            other.seek(embedding.start + row * width)
            if one.read(width) != other.read(width):
                return heads[0], embeddings[0]
    return None


class _Stored(NamedTuple):
    """A tensor of a .safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # offset in the file in bytes
    num_bytes: int


def _count_in_headers(folder: Path, *, tied: bool) -> int | None:
    """Count the parameters in the weights of `folder`, a `tied` head only once; None if a file is missing."""
    tensors = _headers(folder)
    if tensors is None:
        return None
    has_embedding = any(name.endswith(EMBEDDINGS) for name in tensors)
    return sum(
        math.prod(tensor.shape)
        for name, tensor in tensors.items()
        if not (tied and has_embedding and name.endswith(HEAD))
    )


def _headers(folder: Path) -> dict[str, _Stored] | None:
    """Return the tensors in the weights of `folder` by name; None if a file is missing."""
    files = _named_files(folder) if (folder / INDEX).is_file() else [folder / SINGLE_FILE]
    if not files or not all(file.is_file() for file in files):
        return None
    return _tensors_of(files)


def _ends(folder: Path) -> dict[str, _Stored]:
    """Return the embeddings and heads in the weights of `folder` by name, reading only the files that hold them."""
    files = [folder / SINGLE_FILE]
    if (folder / INDEX).is_file():
        weight_map = _weight_map(folder)
        files = [folder / file for file in {weight_map[name] for name in weight_map if name.endswith(ENDS)}]
    tensors = _tensors_of(files) if all(file.is_file() for file in files) else {}
    return {name: tensor for name, tensor in tensors.items() if name.endswith(ENDS)}


def _named_files(folder: Path) -> list[Path]:
    """Return the files that the index of `folder` names."""
    return [folder / name for name in sorted(set(_weight_map(folder).values()))]


def _weight_map(folder: Path) -> Mapping[str, str]:
    """Return the name of the file that holds each tensor, by the index of `folder`."""
    weight_map: Mapping[str, str] = _read(folder / INDEX).get("weight_map", {})
    return weight_map


def _is_alike(one: _Stored, other: _Stored) -> bool:
    if (one.dtype, one.shape, one.num_bytes) != (other.dtype, other.shape, other.num_bytes):
        return False
    middle = max(0, (one.num_bytes - COMPARED_BYTES) // 2)
    contents = []
    for tensor in (one, other):
        with tensor.path.open("rb") as file:
            file.seek(tensor.start + middle)
            contents.append(file.read(min(COMPARED_BYTES, one.num_bytes)))
    return contents[0] == contents[1]


def _tensors_of(files: Iterable[Path]) -> dict[str, _Stored]:
    tensors = dict[str, _Stored]()
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = _object(path, file.read(min(length, path.stat().st_size)))
        header.pop("__metadata__", None)
        try:
            for name, tensor in header.items():
                start, end = tensor["data_offsets"]
                tensors[name] = _Stored(path, tensor["dtype"], tuple(tensor["shape"]), 8 + length + start, end - start)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is damaged: its header is not that of safetensors", hint=REPLACE_MODEL) from error
    return tensors


def _read(path: Path) -> dict[str, Any]:
    try:
        return _object(path, path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="name a model's folder") from error


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        document = json_lines.parsed(text)
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}", hint=REPLACE_MODEL) from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} does not hold a JSON object", hint=REPLACE_MODEL)
    return document
