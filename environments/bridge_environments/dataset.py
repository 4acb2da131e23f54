r"""Read problems from local JSONL, JSON and Parquet files, from folders of these, and from data sets on the hub.

The same rows give the same problems in every file format. A file is always opened by its exact name: no character of a
path acts as a pattern, and nothing is cached. Null values in chat messages, tool calls and tool schemas are dropped,
because Parquet gives every message the keys of all messages. Values of Arrow's type JSON are parsed: the library
datasets writes messages, calls and tools so whose values have different types.

The format GSM8K has grade-school word problems: a question, and a worked answer that ends in `#### 42`. The 162
problems in `problems/` were written for this project, so that everything can be tried offline. They include nothing
from the data set itself, `openai/gsm8k` on the hub (Cobbe et al. 2021, arXiv 2110.14168). The format JSONL is for your
own problems: a prompt (text or chat messages), an optional answer, and optional images (paths relative to the file).
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from bridge.core import json_lines, paths
from bridge.core.foreign_code import reason_of, shortened
from bridge.core.problem_form import problem_fault
from bridge.errors import RewardError, UsageError, first_few
from bridge.types import Problem

Made = TypeVar("Made")
"""What a row is converted to."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
SUFFIXES = (".jsonl", ".json", ".parquet")
"""Suffixes of files with rows."""
NO_ROWS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Names of files without rows, with which the library datasets describes a data set."""
PARQUET = b"PAR1"
"""The first bytes of a Parquet file."""
PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""Matches columns in which pandas stores the index of a data frame."""
SPLIT_WORDS: Mapping[str, Sequence[str]] = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "dev", "val"),
}
"""Split -> the words in file and folder names by which the library datasets recognizes it."""
WRITE_JSONL = "write a JSON object in each line, or one JSON list of objects"
ABSENT = object()
"""Stands for the value of a column that a row does not have."""
MAX_SHOWN_FAULTS = 10
"""Maximum number of different faults in an error message; the others are counted."""


class BadRowError(ValueError):
    """A row that cannot be used; reported in one error together with all others."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How rows become problems."""

    problem: Callable[[Mapping[str, Any], str, str], Problem]
    """Converts a row's values to a problem, given the prompt and answer columns; may raise `BadRowError`."""
    prompt_column: str
    """Default prompt column."""
    reward: str
    """Default reward."""
    system_prompt: str | None = None
    """Default system message."""
    subset: str | None = None
    """Name of the data set's configuration on the hub."""
    bundled: Path | None = None
    """Folder with the default problems."""


class Row(NamedTuple):
    """One row, before it becomes a problem."""

    place: str
    """Position for error messages, such as `line 7`."""
    content: Any
    """The row's values, a line of JSON, or the `BadRowError` of an unreadable row."""
    folder: Path | None = None
    """The folder that image paths are relative to; None if the row is not from a local file."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one source."""

    source: str
    """The file, or the data set and its split, for error messages."""
    rows: Sequence[Row]

    def problems(self, make: Callable[[dict[str, Any]], Problem]) -> list[Problem]:
        """Convert all rows to problems with `make`; raise RewardError if any row is bad, or if there are no rows."""
        return self.converted(make, "name the columns to read with --prompt-column and --answer-column")

    def converted(self, make: Callable[[dict[str, Any]], Made], hint: str) -> list[Made]:
        """Convert all rows with `make`; raise RewardError if any row is bad, or if there are no rows."""
        made = list[Made]()
        places = dict[str, list[str]]()  # fault -> the rows with this fault
        for row in self.rows:
            try:
                made.append(make(_located(_values(row.content), row.folder)))
            except BadRowError as error:
                places.setdefault(str(error), []).append(row.place)
        if places:
            num_bad = sum(map(len, places.values()))
            faults = [
                f"{first} {fault}" + (f" (the same in {len(others)} more)" if others else "")
                for fault, (first, *others) in places.items()
            ]
            shown = first_few(faults, most=MAX_SHOWN_FAULTS)
            raise RewardError(
                f"{self.source}: {num_bad} of {len(self.rows)} rows are bad: {shown}",
                hint=f"fix these rows (a JSONL file has a JSON object in each line), or {hint}",
            )
        if not made:
            raise RewardError(f"{self.source} has no rows", hint="give it one problem per row")
        return made


def column(values: Mapping[str, Any], name: str) -> Any:
    """Return a row's value in the column `name`; raise BadRowError if there is no such column.

    A dot leads into an object: `reward_model.ground_truth` is a key of the column `reward_model`, unless a column has
    the name as a whole.
    """
    found = _nested(values, name)
    if found is ABSENT:
        raise BadRowError(f"has no column {name!r}, found {shortened(', '.join(columns_in(values)), 200) or 'none'}")
    return found


def has_column(values: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has the column `name`, as `column` reads it."""
    return _nested(values, name) is not ABSENT


def _nested(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a key of an object in one; ABSENT if there is neither."""
    if name in values:
        return values[name]
    outer, _, inner = name.partition(".")
    return _nested(values[outer], inner) if isinstance(values.get(outer), Mapping) else ABSENT


def columns_in(values: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's columns; a column with an object is followed by the names of its keys."""
    names = []
    for name, value in values.items():
        inner = value if isinstance(value, Mapping) else {}
        names += [name, *(f"{name}.{key}" for key in inner)]
    return names


def read(source: str, subset: str | None, flag: str) -> tuple[Rows, Rows | None]:
    """Return the training rows and the held-out rows, if any: the splits `train` and `test`.

    A single file has no splits. `subset` names the configuration of a data set on the hub, or its folder in a local
    copy.
    """
    path = paths.expanded(source)
    if paths.is_file(path):
        return _of_files([path], ""), None
    if paths.is_folder(path):
        return _folder(path, subset, source, flag)
    check_source(source, flag)
    return _data_set(source, flag, source, name=subset)


def check_source(source: str, flag: str) -> None:
    """Check that `source` is a file, a folder, or a possible name of a data set on the hub."""
    path = paths.expanded(source)
    if paths.is_file(path) or paths.is_folder(path):
        return
    if not HUB_NAME.fullmatch(source) or path.suffix.lower() in SUFFIXES:
        raise UsageError(
            f"{flag} {source}: there is no such file or folder in {Path.cwd()}",
            hint=f"{flag} path/to/problems.jsonl, or a name on the hub such as openai/gsm8k",
        )


# Files


def _of_files(files: Sequence[Path], source: str) -> Rows:
    """Return the rows of all `files`; `source` names them in error messages."""
    if len(files) == 1:
        return Rows(source=str(files[0]), rows=[*_rows(files[0])])
    return Rows(
        source=source, rows=[row._replace(place=f"{file.name} {row.place}") for file in files for row in _rows(file)]
    )


def _rows(path: Path) -> Iterable[Row]:
    """Return the rows of a Parquet file, of a JSON list, or of a JSONL file with one row per non-blank line."""
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(PARQUET)) == PARQUET or path.suffix.lower() == ".parquet"
        content = b"" if is_parquet else path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="name a readable file") from error
    noun = "row"
    contents = _parquet(path) if is_parquet else _json_list(path, content)
    if contents is None:
        noun = "line"
        contents = content.split(b"\n")
    folder = path.parent.absolute()
    is_line = noun == "line"
    return (
        Row(f"{noun} {number}", values, folder)
        for number, values in enumerate(contents, start=1)
        if not is_line or values.strip()
    )


def _parquet(path: Path) -> list[Any]:
    """Return the rows of a Parquet file, without pandas' index columns."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            f"{path} is a Parquet file, but pyarrow is not installed",
            hint="pip install pyarrow, or write the problems to a JSONL file",
        ) from error
    try:
        with path.open("rb") as file:
            table = parquet.ParquetFile(file).read()
    except Exception as error:  # pyarrow may raise anything for a damaged file
        raise UsageError(
            f"{path} cannot be read as Parquet{reason_of(error)}",
            hint="write the file again, or write the problems to a JSONL file",
        ) from error
    names = table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"{path} has more than one column {' and '.join(map(repr, twice))}", hint="give each column its own name"
        )
    table = table.drop_columns([name for name in names if PANDAS_INDEX.fullmatch(name)])
    table = _in_double_precision(table)
    try:
        rows: list[Any] = table.to_pylist()
    except Exception:  # noqa: BLE001  a value that Python cannot hold, such as text that is not UTF-8
        rows = [_only_row(table.slice(index, 1)) for index in range(table.num_rows)]
    types = {field.name: field.type for field in table.schema if "arrow.json" in str(field.type)}
    return [_with_parsed_json(row, types) for row in rows] if types else rows


def _with_parsed_json(row: Any, types: Mapping[str, Any]) -> Any:
    """Return a row with the JSON in its columns parsed, given their Arrow types; a BadRowError stays one."""
    if isinstance(row, BadRowError):
        return row
    parsed = {}
    for name, kind in types.items():
        try:
            parsed[name] = _parsed(row[name], kind)
        except ValueError as error:
            return BadRowError(f"has the column {name!r} of type JSON, which is not JSON{reason_of(error)}")
    return {**row, **parsed}


def _parsed(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type with all JSON in it parsed; ValueError if it is not JSON."""
    from pyarrow import types

    if value is None:
        return None
    if "arrow.json" in str(kind) and not types.is_nested(kind):
        return json_lines.parsed(value)
    if types.is_struct(kind):
        return {field.name: _parsed(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return [(key, _parsed(item, kind.item_type)) for key, item in value]
    return [_parsed(item, kind.value_type) for item in value] if types.is_nested(kind) else value


def _in_double_precision(table: Any) -> Any:
    """Return a table without float32 columns: as a Python number, their 0.1 would be 0.10000000149011612."""
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if field.type == pa.float32():
            table = table.set_column(index, field.name, table[index].cast(pa.string()).cast(pa.float64()))
    return table


def _only_row(table: Any) -> Any:
    """Return the values of a one-row table, or a BadRowError if they cannot be read."""
    try:
        return table.to_pylist()[0]
    except Exception as error:  # noqa: BLE001  as above
        return BadRowError(f"cannot be read{reason_of(error)}")


def _json_list(path: Path, content: bytes) -> list[Any] | None:
    """Return the rows of a file that is a single JSON list; None if the file should be read line by line.

    Raises:
        RewardError: the file is a single JSON object, or an invalid list over several lines.
    """
    first = content.lstrip()[:1]
    is_jsonl = _is_json(content.lstrip().partition(b"\n")[0])
    if first not in (b"[", b"{") or (first == b"{" and is_jsonl):
        return None
    try:
        document = json_lines.parsed(content.decode())
    except ValueError as error:
        if first == b"{" or is_jsonl:
            return None
        raise RewardError(f"{path} is not JSON{reason_of(error)}", hint=WRITE_JSONL) from error
    if isinstance(document, list):
        return document
    found = shortened(", ".join(document)) or "none"
    raise RewardError(f"{path} is one JSON object with the keys {found}, expected rows", hint=WRITE_JSONL)


def _is_json(line: bytes) -> bool:
    try:
        json_lines.parsed(line.decode())
    except ValueError:
        return False
    return True


def _values(content: Any) -> dict[str, Any]:
    """Return the values of a row."""
    if isinstance(content, BadRowError):
        raise content
    try:
        values = json_lines.parsed(content.decode()) if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        raise BadRowError(f"is not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise BadRowError(f"is not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(values, dict):
        raise BadRowError(f"is {shortened(repr(values))}, expected a JSON object")
    return {
        name: json_lines.without_nulls(value) if _is_of_chat(name, value) else value for name, value in values.items()
    }


def _is_of_chat(name: str, value: Any) -> bool:
    """Return whether a column has chat messages or tool schemas."""
    is_list_of_dicts = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    return is_list_of_dicts and (name == "tools" or "role" in value[0])


def _located(values: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return the values with absolute image paths."""
    images = values.get("images")
    if not images:
        return values
    if folder is None:
        raise BadRowError("has images, which are supported only as paths in a local file")
    is_list = isinstance(images, list) and all(isinstance(path, str) for path in images)
    return {**values, "images": [str(folder / path) for path in images]} if is_list else values


# Folders


def _folder(path: Path, subset: str | None, source: str, flag: str) -> tuple[Rows, Rows | None]:
    """Return the splits of a folder that has a `train.jsonl`, or files in the hub's layout."""
    folder = path / subset if subset and paths.is_folder(path / subset) else path
    if paths.is_file(folder / "train.jsonl"):
        splits = {name: [file] for name in ("train", "test") if paths.is_file(file := folder / f"{name}.jsonl")}
    else:
        splits = _splits_of_card(path, subset, flag) or _splits_by_name(folder)
    if not splits:
        with tempfile.TemporaryDirectory() as cache:  # files in other formats, such as CSV
            other = {"data_dir": None if folder == path else subset, "cache_dir": cache}
            return _data_set(source, flag, str(path), **other)
    for name, files in splits.items():
        if len({file.suffix.lower() for file in files}) > 1:
            raise UsageError(
                f"{flag} {source} has the split {name} in several formats: {', '.join(file.name for file in files)}",
                hint=f"name one file: {flag} {files[0]}",
            )
    if "train" not in splits:
        raise _no_train(source, flag, splits)
    made = {
        name: _of_files(files, f"{source}, split {name}") for name, files in splits.items() if name in ("train", "test")
    }
    return made["train"], made.get("test")


def _splits_of_card(folder: Path, subset: str | None, flag: str) -> dict[str, list[Path]]:
    """Return the files of each split that the folder's README.md lists, as on the hub; empty if it lists none."""
    card = folder / "README.md"
    if not paths.is_file(card):
        return {}
    from huggingface_hub import metadata_load

    try:
        document = metadata_load(card) or {}
        listed = [config for config in document.get("configs") or [] if config.get("data_files")]
        files = {config.get("config_name", "default"): config["data_files"] for config in listed}
        known = [subset, "default", *(config.get("config_name") for config in listed if config.get("default"))]
        chosen = next((name for name in known if name in files), next(iter(files)) if len(files) == 1 else None)
        of_splits = [] if chosen is None else _named_patterns(files[chosen])
        splits = {name: sorted(file for pattern in given for file in folder.glob(pattern)) for name, given in of_splits}
    except Exception as error:  # invalid metadata may raise anything
        raise UsageError(
            f"{card} has metadata that cannot be read{reason_of(error)}", hint="fix it, or name one file"
        ) from error
    if files and chosen is None:
        raise UsageError(
            f"{flag} {folder} has several configurations: {', '.join(files)}",
            hint=f"name the folder or the file of one: {flag} {folder}/path/to/problems.parquet",
        )
    return {name: found for name, found in splits.items() if found}


def _named_patterns(data_files: Any) -> list[tuple[str, list[str]]]:
    """Return the file patterns of each split, from any form of `data_files` that a README.md may have."""
    if isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files):
        pairs = [(entry["split"], entry["path"]) for entry in data_files]
    elif isinstance(data_files, dict):
        pairs = [*data_files.items()]
    else:
        pairs = [("train", data_files)]
    return [(name, [given] if isinstance(given, str) else list(given)) for name, given in pairs]


def _splits_by_name(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split, found by words in file names or else in folder names; default: all are `train`.

    Source: the order of `get_data_patterns` in the library datasets 5.2.
    """
    found = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES
        and file.name not in NO_ROWS
        and not any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)
        and paths.is_file(file)
    )
    names = [file.stem for file in found]
    folders = [file.relative_to(folder).parent.as_posix() for file in found]
    for texts in (names, folders):
        splits: dict[str, list[Path]] = {}
        for file, text in zip(found, texts, strict=True):
            words = re.split(r"[-._ /\d]+", text.lower())
            split = next((name for name, known in SPLIT_WORDS.items() if not set(known).isdisjoint(words)), None)
            if split is not None:
                splits.setdefault(split, []).append(file)
        if splits:
            return splits
    return {"train": found} if found else {}


def _no_train(source: str, flag: str, found: Iterable[str]) -> UsageError:
    return UsageError(
        f"{flag} {source} has no split train, found {', '.join(found)}",
        hint=f"write the split to a JSONL file and use that: {flag} path/to/problems.jsonl",
    )


# The library datasets


def _data_set(source: str, flag: str, path: str, **options: str | None) -> tuple[Rows, Rows | None]:
    """Load a data set from `path` with the library datasets, and return its splits."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{flag} {source} needs the library datasets, which is not installed",
            hint=f"pip install datasets, or {flag} path/to/problems.jsonl",
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    from bridge.core import hub

    fault = hub.why_unreachable(path) if "name" in options else ""  # only for data sets on the hub
    is_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = is_offline or bool(fault)  # if the hub is unreachable, use the cache immediately
    try:
        splits = datasets.load_dataset(path, **options)
        tables = {name: splits[name].with_format("arrow")[:] for name in ("train", "test") if name in splits}
        rows = {name: _in_double_precision(table).to_pylist() for name, table in tables.items()}
    except Exception as error:  # the error's class depends on the data set, optional libraries and the network
        local = f"use a local copy: {flag} path/to/folder"
        if "socks" in str(error).lower():
            hint = f"pip install socksio, or unset ALL_PROXY; or {local}"
        elif "name" in options:
            hint = f"check its name and the network, or {local}"
        else:
            hint = f"write the problems to a JSONL file and use that: {flag} path/to/problems.jsonl"
        cause = fault or shortened(error, 300) or type(error).__name__
        raise UsageError(f"{flag} {source}: cannot be loaded: {cause}", hint=hint) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = is_offline
    if "train" not in rows:
        raise _no_train(source, flag, splits)
    made = {
        name: Rows(
            source=f"{source}, split {name}",
            rows=[Row(f"row {number}", row) for number, row in enumerate(listed, start=1)],
        )
        for name, listed in rows.items()
    }
    return made["train"], made.get("test")


SYSTEM_PROMPT = "Think step by step. Then write the answer, a number, on a last line of its own behind ####."
NUMBER = re.compile(r"-?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?(?<=\d)")


def gsm8k_problem(values: Mapping[str, Any], prompt_column: str, answer_column: str) -> Problem:
    """Return a problem with the question as chat messages and as text, the final number, and the worked solution."""
    if values.get("images"):
        raise BadRowError("has images, which only --environment jsonl reads")
    question = column(values, prompt_column)
    solution = str(column(values, answer_column))
    if not isinstance(question, str) or not question.strip():
        raise BadRowError(f"has the question {shortened(repr(question))}, expected text")
    last = solution.rpartition("####")[2].strip().removeprefix("$")
    if not NUMBER.fullmatch(last):
        shown = shortened(repr(last if len(last) <= 60 else f"...{last[-50:]}"))
        raise BadRowError(f"has an answer that ends in {shown}, expected #### and a number")
    return cast(
        "Problem",
        {
            "prompt": [{"role": "user", "content": question}],
            "plain_prompt": f"Question: {question}\nAnswer:",
            "answer": last.replace(",", ""),
            "solution": solution,
        },
    )


GSM8K = Format(
    problem=gsm8k_problem,
    prompt_column="question",
    reward="math",
    system_prompt=SYSTEM_PROMPT,
    subset="main",
    bundled=Path(__file__).parent / "problems",
)


def jsonl_problem(values: Mapping[str, Any], prompt_column: str, answer_column: str) -> Problem:
    """Return a problem with the prompt and an optional answer; other columns are kept for custom rewards."""
    made = {**values, "prompt": column(values, prompt_column)}
    if has_column(values, answer_column):
        made["answer"] = column(values, answer_column)
    else:
        made.pop("answer", None)  # a column named `answer` that is not the chosen answer column
    if fault := problem_fault(made):
        raise BadRowError(f"is not a problem: {fault}")
    return cast("Problem", made)


JSONL = Format(problem=jsonl_problem, prompt_column="prompt", reward="exact")
