"""The files in a model folder other than its weights: the source's configuration with any changes, and its other files.

This does not use transformers' `save_pretrained`, which rewrites the configuration in the format of its own version.
Earlier versions silently misread that format. It also refuses to save some values that it has loaded, but a strange
line in someone else's configuration must not cost the trained weights.

Not covered: the weights (`model_folder.py`), an adapter's configuration (`adapter.py`).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core import json_lines, paths
from bridge.core.concurrency import in_thread
from bridge.core.paths import ADAPTER_CONFIG, CONFIG_NAME
from bridge.errors import UsageError, first_line

if TYPE_CHECKING:  # this module is imported before vLLM starts, and importing transformers takes seconds
    from transformers import PretrainedConfig

MODEL_CARD = "README.md"
GENERATION_CONFIG = "generation_config.json"
CHECKPOINT_MARKER = "bridge_checkpoint.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "tekken.json",
)  # fmt: skip
_VOCABULARY_SUFFIXES = (".tiktoken", ".spm")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
"""Files with the chat template; they take precedence over the one in `tokenizer_config.json`."""
_TOKENIZER_FILES = (
    *_VOCABULARY_FILES, *_TEMPLATE_FILES, TOKENIZER_CONFIG, "merges.txt", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
_TOKENIZER_SUFFIXES = (*_VOCABULARY_SUFFIXES, ".jinja")
_TEMPLATES = "additional_chat_templates"
"""The only subfolder that transformers writes next to a tokenizer."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Processor files that vLLM needs for a vision-language model, even to serve text."""
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".index.json", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data",
    ".ot", ".tflite",
)  # fmt: skip
"""Suffixes of weight files in any format. They are not copied: the source's weights are not the trained ones."""
_NEVER_COPIED = {CONFIG_NAME, ADAPTER_CONFIG, CHECKPOINT_MARKER}
MAX_BYTES = 100 * 2**20
"""Size of the largest file that is copied; tokenizer files have up to 40 MB."""
_EARLIER_ROPE = {
    "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "original_max_position_embeddings",
}  # fmt: skip
"""Keys of transformers 4 that transformers 5 stores in `rope_parameters`."""
_EARLIER_NAMES = {"num_experts", "num_local_experts", "n_routed_experts"}
"""Keys that transformers 5 renamed and keeps as aliases."""
_NOT_COMPARED = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}

Document = dict[str, Any]


@dataclass(frozen=True)
class SourceFiles:
    """Files of a source folder other than its weights and configuration."""

    folder: Path | None
    """None if the source is not on this machine."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """Source paths by name in the new folder."""
    left_out: tuple[str, ...] = ()
    """Names of the files that are not copied, each with the reason."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer can be loaded: a chat template or a list of special tokens is not sufficient."""
        return self.has_vocabulary or TOKENIZER_CONFIG in self.paths  # which may name a vocabulary of its own

    @property
    def has_vocabulary(self) -> bool:
        return any(name in _VOCABULARY_FILES or name.endswith(_VOCABULARY_SUFFIXES) for name in self.paths)

    @property
    def has_template(self) -> bool:
        """Whether a chat template is in a file of its own, or in the tokenizer's configuration."""
        if not self.paths.keys().isdisjoint(_TEMPLATE_FILES):
            return True
        try:
            settings = json_lines.parsed(self.paths[TOKENIZER_CONFIG].read_bytes())
        except (KeyError, OSError, ValueError):
            return False
        return isinstance(settings, dict) and bool(settings.get("chat_template"))

    def note(self) -> str:
        """Return a line that lists the files missing from every checkpoint; empty if none are."""
        return f"checkpoints lack these files of {self.folder}: {', '.join(self.left_out)}" if self.left_out else ""


def source_files(source: str | Path, *, download: bool = False) -> SourceFiles:
    """Return the files of `source`, a folder or a hub name, that every checkpoint also includes.

    Call this before training with `download=True`, so that the hub's cache has all of the model's files.

    Raises:
        UsageError: `source` has no tokenizer files, or one of the files cannot be read.
    """
    files = found(source, download=download)
    if not files.has_tokenizer:
        raise UsageError(
            f"{source} has no tokenizer files (such as tokenizer.json): its checkpoints would be useless",
            hint="put the tokenizer's files beside the model's weights",
        )
    for path in files.paths.values():
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise UsageError(
                f"{path} cannot be read, but every checkpoint needs it: {error.strerror}",
                hint=f"make it readable, or remove it: chmod u+r {path}",
            ) from error
    return files


def is_tokenizer_file(name: str) -> bool:
    return name in _TOKENIZER_FILES or name.endswith(_TOKENIZER_SUFFIXES)


def is_loaded(name: str) -> bool:
    """Return whether transformers or vLLM may read a file with this name when they load a model folder."""
    base = name.rpartition("/")[2]
    known = (*_PROCESSOR_FILES, GENERATION_CONFIG, CONFIG_NAME, ADAPTER_CONFIG, "params.json")
    return is_tokenizer_file(base) or base in known or base.endswith((*_WEIGHT_SUFFIXES, ".py", ".model"))


def copy(files: SourceFiles, folder: Path) -> list[str]:
    """Copy `files` into the existing `folder`; return one line for each file that could no longer be read."""
    missing = []
    for name, path in files.paths.items():
        try:
            content = path.read_bytes()
        except OSError as error:
            missing.append(f"{name} ({path}: {error.strerror})")
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(_with_earlier_tokenizer(content) if name == TOKENIZER_CONFIG else content)
    return missing


def _with_earlier_tokenizer(content: bytes) -> bytes:
    """Return a tokenizer_config.json in the form that transformers 4 reads, too; unchanged if it is another file.

    transformers 5 names its class TokenizersBackend, which earlier versions do not have, and writes further special
    tokens as a list under a name that had an object.
    """
    try:
        settings = json_lines.parsed(content)
    except ValueError:
        return content
    if not isinstance(settings, dict) or settings.get("tokenizer_class") != "TokenizersBackend":
        return content
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    return json.dumps(settings, indent=2, ensure_ascii=False).encode() + b"\n"


def copy_beside_adapter(source: str | Path, folder: Path) -> list[str]:
    """Copy all files of a base model except its weights and model card; return one line per missing file."""
    files = found(source)
    missing = [] if files.has_tokenizer else [_no_tokenizer(source)]
    copied = {name: path for name, path in files.paths.items() if name != MODEL_CARD}
    return missing + copy(replace(files, paths=copied), folder)


def _no_tokenizer(source: str | Path) -> str:
    return f"the tokenizer ({source} no longer has one)"


def write(
    folder: Path, config: "PretrainedConfig", source: str | Path, *, architecture: str, dtype: str,
    tokenizer: str | Path | None = None,
) -> list[str]:  # fmt: skip
    """Write the files that belong next to a model's weights, and return one line per missing file.

    `source` is what the model was loaded from; `tokenizer` is a different folder to take the tokenizer from.

    Only a failure to write to `folder` raises: the weights are already there, and are worth more than any other file.
    """
    files = found(source)
    if tokenizer is not None:
        files = _with_tokenizer(files, found(tokenizer))
    missing = [] if files.has_tokenizer else [_no_tokenizer(source)]
    try:
        described = document(config, files.folder, architecture=architecture, dtype=dtype)
        text = json.dumps(described, indent=2)
    except Exception as error:  # noqa: BLE001 - someone else's configuration may raise anything
        missing.append(f"the changes to {CONFIG_NAME} ({first_line(error)})")
        text = json.dumps(_read(files.folder) or {}, indent=2)
    (folder / CONFIG_NAME).write_text(text + "\n")
    return missing + copy(files, folder)


def document(config: "PretrainedConfig", source: Path | None, *, architecture: str, dtype: str) -> Document:
    """Return a model's config.json: that of `source` with all changes, readable by both transformers 4 and 5."""
    current = config.to_dict()
    written = _read(source)
    if written is None:
        written = {name: value for name, value in current.items() if name not in _NOT_COMPARED}
    else:
        original = type(config).from_dict(deepcopy(written)).to_dict()
        _update(written, original, current, type(config).attribute_map)
    names = written.get("architectures")
    if not isinstance(names, list) or architecture not in names:
        written["architectures"] = [architecture]
    written["dtype"] = written["torch_dtype"] = dtype
    for part in written.values():
        if isinstance(part, dict):
            part.update({name: dtype for name in ("dtype", "torch_dtype") if part.get(name) is not None})
    _drop_absent_code(written, source)
    return _with_earlier_form(written, config)


def _read(source: Path | None) -> Document | None:
    try:
        held = None if source is None else json_lines.parsed((source / CONFIG_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return held if isinstance(held, dict) else None


def _update(written: Document, original: Document, current: Document, aliases: Mapping[str, str]) -> None:
    """Update `written` with every value in which `current` differs from `original`, the configuration it describes."""
    for name in current.keys() - _NOT_COMPARED:
        value = current[name]
        before = original.get(name)
        if value == before:
            continue
        if name == "rope_parameters":
            for earlier in _EARLIER_ROPE:
                written.pop(earlier, None)
        elif isinstance(value, dict) and isinstance(before, dict) and isinstance(written.get(name), dict):
            _update(written[name], before, value, {})
            continue
        for alias in [alias for alias, real in aliases.items() if real == name]:
            written.pop(alias, None)
        written[name] = value


def _drop_absent_code(written: Document, source: Path | None) -> None:
    """Drop `auto_map` if it names code that will not be in the folder: loading with --trust-remote-code would fail.

    Code in a different hub repository is named OWNER/NAME--module.Class.
    """
    mapped = written.get("auto_map")
    if not isinstance(mapped, dict):
        return
    classes = [str(one) for value in mapped.values() for one in (value if isinstance(value, list) else [value]) if one]
    modules = {name.rpartition(".")[0] for name in classes if "--" not in name}
    if source is None or any(not (source / f"{module.replace('.', '/')}.py").is_file() for module in modules):
        del written["auto_map"]


def _with_earlier_form(written: Document, config: "PretrainedConfig") -> Document:
    """Add the keys that transformers 4 reads instead of those of transformers 5, unless that changes what 5 reads.

    Without them, transformers 4 silently uses a RoPE base of 10,000 or a wrong number of experts.
    """
    kind = type(config)
    text_kind = type(config.get_text_config())
    extended = _with_earlier_keys(written, kind.attribute_map)
    if isinstance(text := written.get("text_config"), dict):
        extended = {**extended, "text_config": _with_earlier_keys(text, text_kind.attribute_map)}
    try:
        before, after = (kind.from_dict(deepcopy(held)).to_dict() for held in (written, extended))
    except Exception:  # noqa: BLE001 - a configuration class may raise anything
        return written
    return extended if _is_equal(before, after) else written


def _with_earlier_keys(held: Document, aliases: Mapping[str, str]) -> Document:
    """Return a configuration, or a part of one, with the key names of transformers 4 next to those of 5."""
    for alias in _EARLIER_NAMES & aliases.keys() - held.keys():
        if aliases[alias] in held:
            held = {**held, alias: held[aliases[alias]]}
    parameters = held.get("rope_parameters")
    if not isinstance(parameters, dict) or _EARLIER_ROPE & {"rope_theta", "rope_scaling"} & held.keys():
        return held
    earlier: Document = {}
    if isinstance(everywhere := parameters.get("full_attention"), dict):  # one entry for each type of layer
        windowed = parameters.get("sliding_attention")
        parameters = everywhere
        if isinstance(windowed, dict) and windowed.get("rope_theta") != parameters.get("rope_theta"):
            earlier["rope_local_base_freq"] = windowed.get("rope_theta")
    scaling = {name: value for name, value in parameters.items() if name not in ("rope_theta", "partial_rotary_factor")}
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    for name in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(name) is not None:
            earlier[name] = parameters[name]
    if kind == "longrope":  # Phi-3 in transformers 4 accepts only these three
        if "original_max_position_embeddings" in scaling:
            earlier["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
        earlier["rope_scaling"] = {"type": kind, **scaling}
    elif kind != "default" or scaling:
        earlier["rope_scaling"] = {"rope_type": kind, **scaling}
    return {**held, **{name: value for name, value in earlier.items() if name not in held}}


def _is_equal(before: Any, after: Any) -> bool:
    """Compare two configurations as transformers reads them, ignoring names that only the earlier form has."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return bool(before == after)
    if before.keys() - after.keys() or after.keys() - before.keys() - _EARLIER_ROPE - {"type"}:
        return False
    return all(_is_equal(value, after[name]) for name, value in before.items())


def found(source: str | Path, *, download: bool = False) -> SourceFiles:
    """Return the files to copy from `source`, preferring a location that has a tokenizer."""
    files = SourceFiles(folder=None)
    for folder in _source_folders(str(source), download=download):
        files = _listed(folder)
        if files.has_tokenizer:
            break
    return files


def _listed(folder: Path) -> SourceFiles:
    """Select the files to copy from `folder`, without hidden files, which belong to other programs."""
    paths = dict[str, Path]()
    left_out = []
    is_ours = (folder / CHECKPOINT_MARKER).is_file()
    try:
        held = sorted(folder.iterdir())
    except OSError:  # removed or locked in the meantime
        held = []
    for path in held:
        name = path.name
        if name.startswith(".") or name in _NEVER_COPIED or name.endswith(_WEIGHT_SUFFIXES):
            continue
        if path.is_dir():
            if name == _TEMPLATES:
                paths |= {f"{name}/{inner.name}": inner for inner in sorted(path.glob("*.jinja")) if inner.is_file()}
            elif not (is_ours and name == "optimizer"):
                left_out.append(f"{name}/ (a folder)")
        elif not path.is_file():
            left_out.append(f"{name} ({'a broken link' if path.is_symlink() else 'not a regular file'})")
        elif (num_bytes := path.stat().st_size) > MAX_BYTES:
            left_out.append(f"{name} ({num_bytes / 2**20:.0f} MiB)")
        else:
            paths[name] = path
    return SourceFiles(folder=folder, paths=paths, left_out=tuple(left_out))


def _with_tokenizer(files: SourceFiles, other: SourceFiles) -> SourceFiles:
    """Return `files` with the tokenizer, processors and generation defaults of `other`.

    If `other` has no vocabulary, only the files that it has, such as a chat template, replace those of `files`.
    """
    if not any(map(is_tokenizer_file, other.paths)):
        return files
    taken = {
        name: path for name, path in other.paths.items()
        if is_tokenizer_file(name) or name in (*_PROCESSOR_FILES, GENERATION_CONFIG)
    }  # fmt: skip
    kept = {**files.paths}
    if other.has_vocabulary:
        kept = {name: path for name, path in kept.items() if not is_tokenizer_file(name)}
    elif other.has_template:
        kept = {name: path for name, path in kept.items() if name not in _TEMPLATE_FILES}
    return replace(files, paths=kept | taken)


def _source_folders(source: str, *, download: bool = False) -> Iterator[Path]:
    """Yield the locations of `source`: the folder itself, or the hub's cache before and after a download."""
    if paths.is_folder(source):
        yield Path(source)
        return
    from huggingface_hub import constants, snapshot_download  # takes a second, and only the hub needs it

    from bridge.core import hub

    ignored = ["*/*", *(f"*{suffix}" for suffix in _WEIGHT_SUFFIXES)]

    def snapshot(*, local: bool) -> Path:
        return Path(snapshot_download(source, ignore_patterns=ignored, local_files_only=local))

    if download and not constants.HF_HUB_OFFLINE:
        with suppress(Exception):  # not cached, or a timeout
            yield in_thread(lambda: snapshot(local=False), "download").result(hub.LIMIT_S)
    for is_local in (True, False):
        with suppress(Exception):  # not cached, no such model, no network, an optional library is missing
            yield snapshot(local=is_local)
