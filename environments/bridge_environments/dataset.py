r"""Rows of a JSONL or Parquet file, a local folder in the hub's layout, or a Hugging Face data set; their formats.

GSM8K has grade-school word problems: a question, and a worked answer that ends in `#### 42`. The 162 problems in
`problems/` were written for this project, so that everything can be tried offline. The data set itself is
`openai/gsm8k` on the hub (Cobbe et al. 2021, arXiv 2110.14168); they include nothing of it. JSONL has your own
problems: a prompt (text or chat messages), an optional answer, and optional images (paths from the file's folder).
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bridge.core.foreign_code import shortened
from bridge.errors import RewardError, UsageError, first_few
from bridge.types import Problem
from bridge_environments.environment_checks import problem_fault

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
MAX_SHOWN_ROWS = 10
"""Most bad rows in an error message; the rest are counted."""


class BadRowError(ValueError):
    """One row is not a problem; it becomes part of an error that lists all of them."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How rows become problems."""

    problem: Callable[[Mapping[str, Any], str, str], Problem]
    """Turns a row's values into a problem, given the prompt's and the answer's columns; may raise `BadRowError`."""
    prompt_column: str
    """Default column of the prompt."""
    reward: str
    """Default reward."""
    system_prompt: str | None = None
    """Default system message."""
    subset: str | None = None
    """Configuration of the data set on the hub."""
    bundled: Path | None = None
    """Folder of the default problems."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one source."""

    source: str
    """The file, or the data set and the split, for error messages."""
    rows: Sequence[tuple[str, Any]]
    """The place of each, such as `line 7`, and its values or its line of JSON."""
    folder: Path | None = None
    """What paths of images are relative to; None: rows of this source have no files."""

    def problems(self, make: Callable[[dict[str, Any]], Problem]) -> list[Problem]:
        """Return `make` of each row's values."""
        problems, faults = [], []
        for location, content in self.rows:
            try:
                problems.append(make(_located(_values(content), self.folder)))
            except BadRowError as error:
                faults.append(f"{location} {error}")
        if faults:
            shown = first_few(faults, most=MAX_SHOWN_ROWS)
            raise RewardError(
                f"{self.source}: {len(faults)} of {len(self.rows)} rows are bad: {shown}",
                remedy="fix these rows (a JSONL file has a JSON object in each line), or name the columns to read with"
                " --prompt-column and --answer-column",
            )
        if not problems:
            raise RewardError(f"{self.source} has no rows", remedy="give it one problem per row")
        return problems


def column(values: Mapping[str, Any], name: str) -> Any:
    """Return the row's value in the column `name`."""
    if name not in values:
        raise BadRowError(f"has no column {name!r}, found {shortened(', '.join(values)) or 'none'}")
    return values[name]


def read(source: str, subset: str | None, flag: str) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those held out, if any: the splits `train` and `test`.

    A file has no splits. `subset` is the configuration of a data set on the hub, and its folder in a local copy.
    """
    path = Path(source).expanduser()
    if path.is_file():
        is_parquet = path.suffix == ".parquet"
        return _data_set(source, flag, "parquet", data_files=str(path)) if is_parquet else (_file(path), None)
    if path.is_dir():
        folder = path / subset if subset and (path / subset).is_dir() else path
        if (folder / "train.jsonl").is_file():
            test = folder / "test.jsonl"
            return _file(folder / "train.jsonl"), _file(test) if test.is_file() else None
        return _data_set(source, flag, str(path), data_dir=None if folder == path else subset)
    if not HUB_NAME.fullmatch(source) or path.suffix in (".json", ".jsonl", ".parquet"):
        raise UsageError(
            f"{flag} {source}: there is no such file or folder in {Path.cwd()}",
            remedy=f"{flag} path/to/problems.jsonl, or a name on the hub such as openai/gsm8k",
        )
    return _data_set(source, flag, source, name=subset)


def _file(path: Path) -> Rows:
    """Return the rows of a JSONL file, one per line that is not blank."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", remedy="name a readable file") from error
    rows = [(f"line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    return Rows(source=str(path), rows=rows, folder=path.parent.absolute())


def _located(values: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return the values with absolute paths of images."""
    images = values.get("images")
    if not images:
        return values
    if folder is None:
        raise BadRowError("has images, which are read from the files that a JSONL file names")
    is_list = isinstance(images, list) and all(isinstance(path, str) for path in images)
    return {**values, "images": [str(folder / path) for path in images]} if is_list else values


def _values(content: Any) -> dict[str, Any]:
    try:
        values = json.loads(content.decode()) if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        raise BadRowError(f"is not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise BadRowError(f"is not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise BadRowError("is nested too deeply") from error
    if not isinstance(values, dict):
        raise BadRowError(f"is {shortened(repr(values))}, expected a JSON object")
    return values


def _data_set(source: str, flag: str, path: str, **options: str | None) -> tuple[Rows, Rows | None]:
    """Return the splits of what the library datasets loads from `path`."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{flag} {source} needs the library datasets, which is not installed",
            remedy=f"pip install datasets, or {flag} path/to/problems.jsonl",
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    from bridge.core import hub

    fault = hub.why_unreachable(path) if "name" in options else ""  # not of files
    is_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = is_offline or bool(fault)  # then it looks into its cache at once
    try:
        splits = datasets.load_dataset(path, **options)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"{flag} {source}: cannot be loaded: {fault or shortened(error, 300)}",
            remedy=f"check its name and the network, or use a local copy: {flag} path/to/folder"
            if "name" in options
            else f"write the problems to a JSONL file and use that: {flag} path/to/problems.jsonl",
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = is_offline
    if "train" not in splits:
        raise UsageError(
            f"{flag} {source} has no split train, found {', '.join(splits)}",
            remedy=f"write the split to a JSONL file and use that: {flag} path/to/problems.jsonl",
        )

    def split(name: str) -> Rows:
        rows = [(f"row {number}", values) for number, values in enumerate(splits[name].to_list(), start=1)]
        return Rows(source=f"{source}, split {name}", rows=rows)

    return split("train"), split("test") if "test" in splits else None


SYSTEM_PROMPT = "Think step by step. Then write the answer, a number, on a last line of its own behind ####."
NUMBER = re.compile(r"-?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?(?<=\d)")


def gsm8k_problem(values: Mapping[str, Any], prompt_column: str, answer_column: str) -> Problem:
    """Return a problem: the question as chat messages and as text, the final number, and the worked solution."""
    if values.get("images"):
        raise BadRowError("has images, which only --environment jsonl reads")
    question, solution = column(values, prompt_column), str(column(values, answer_column))
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
    """Return a problem with the prompt and an optional answer; other columns stay in it, for your own rewards."""
    made = {**values, "prompt": column(values, prompt_column)}
    if answer_column in values:
        made["answer"] = values[answer_column]
    if fault := problem_fault(made):
        raise BadRowError(f"is not a problem: {fault}")
    return cast("Problem", made)


JSONL = Format(problem=jsonl_problem, prompt_column="prompt", reward="exact")
