"""`bridge init`: write the files to start your own run from: a TOML configuration and a task."""

import json
import shlex
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo

from bridge.config import ServeConfig, TrainConfig
from bridge.config.choices import Config
from bridge.errors import UsageError
from bridge_cli import console
from bridge_cli.options import HOME, option

CHOICES = "bridge.toml"
WIDTH = 100
"""Width of an explanation in columns."""
UNSET = "..."
"""Placeholder for the value of a choice that has no default."""
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
HEADER = f"""\
# The choices of: bridge run --config {CHOICES}
# To change one, remove the # before its name. Variables (BRIDGE_LR=1e-6) and flags (--lr 1e-6) override this file.

"""
CLASS = '''\
"""A task: problems, and a score for each completion."""

import re
from collections.abc import Iterator
from typing import Any


class MyTask:
    """Sums of two numbers."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the problems to train on: the same ones, in the same order, each time."""
        for a in range(30):
            for b in range(30):
                yield {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}

    def held_out(self) -> list[dict[str, Any]]:
        """Return problems for evaluation, which are not trained on."""
        sums = ((a, 31) for a in range(30))
        return [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in sums]

    def score(self, problem: dict[str, Any], completion: str) -> float:
        """Return the reward of one completion: 1 if its last number is the answer."""
        return float(re.findall(r"\\d+", completion)[-1:] == [problem["answer"]])
'''
PROBLEMS = """\
{"prompt": "How many days are in a leap year?", "answer": "366"}
{"prompt": [{"role": "user", "content": "What is 12 * 12?"}], "answer": "144"}
"""
REWARDS = '''\
"""Rewards: each takes a problem, with the fields of its line, and a completion."""

from typing import Any


def contains_answer(problem: dict[str, Any], completion: str) -> float:
    """Return 1 if the answer is somewhere in the completion."""
    return float(problem["answer"] in completion)
'''
Task = Literal["class", "jsonl", "gsm8k"]
FILES: Mapping[Task, Mapping[str, str]] = {
    "class": {"my_task.py": CLASS},
    "jsonl": {"problems.jsonl": PROBLEMS, "rewards.py": REWARDS},
    "gsm8k": {},
}
"""Way to describe a task -> its files."""
GIVEN: Mapping[Task, Mapping[str, Any]] = {
    "class": {"environment": "my_task.py:MyTask", "eval_samples": 4},
    "jsonl": {"environment": "jsonl", "data": "problems.jsonl", "reward": "rewards.py:contains_answer"},
    "gsm8k": {"environment": "gsm8k", "eval_samples": 4},
}
"""Way to describe a task -> the choices that name its files."""

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Where to write (default: here).", show_default=False, **HOME)
]
TASK = "A Python class, problems in JSONL with a reward in Python, or the bundled word problems (default: class)."
TaskOption = Annotated[Task, option("--task", "class|jsonl|gsm8k", TASK)]
Model = Annotated[str, option("--model", "MODEL", f"The model to train (default: {MODEL}).")]


def init(folder: Folder = Path(), *, task: TaskOption = "class", model: Model = MODEL) -> None:
    """Write a configuration file that explains every choice, and a task to start from."""
    given = {"model_name": model, "training_steps": 100, **GIVEN[task]}
    files = {CHOICES: HEADER + commented((TrainConfig, ServeConfig), given), **FILES[task]}
    taken = [str(folder / name) for name in files if (folder / name).exists() or (folder / name).is_symlink()]
    if taken:
        exist = "exists" if len(taken) == 1 else "exist"
        raise UsageError(f"{' and '.join(taken)} already {exist}", hint="bridge init FOLDER, with a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x") as file:
                file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}", hint="bridge init FOLDER") from error
    console.note(f"wrote {', '.join(str(folder / name) for name in files)}")
    there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    console.note(f"to train: {there}bridge run --config {CHOICES}")


def commented(classes: tuple[type[Config], ...], given: Mapping[str, Any]) -> str:
    """Return a TOML file that sets the choices in `given`, by key, and comments out every other one.

    A choice that several classes declare is written once, as in the first of them.
    """
    tables: dict[str, list[str]] = {"": []}
    for index, cls in enumerate(classes):
        for key, choice in cls.choices().items():
            if any(earlier.field_of(key) for earlier in classes[:index]):
                continue
            *sections, field = choice.path
            for name in sections:
                docstring = cls.model_fields[name].annotation.__doc__ or ""
                first, _, _ = docstring.partition("\n")
                tables.setdefault(name, [f"[{name}] # {first}"])
            lines = _lines(field, key, choice.info, given)
            tables["".join(sections)].append("\n".join(lines))
    return "\n\n\n".join("\n\n".join(parts) for parts in tables.values()) + "\n"


def _lines(field: str, key: str, info: FieldInfo, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the explanation of one choice, and its line."""
    text = " ".join((info.description or "").split())
    kinds = (info.annotation, *typing.get_args(info.annotation))
    choices = [value for kind in kinds if typing.get_origin(kind) is typing.Literal for value in typing.get_args(kind)]
    if choices:
        text += f" One of {', '.join(choices)}."
    for line in textwrap.wrap(text, WIDTH - 2):
        yield f"# {line}"
    if key in given:
        yield f"{field} = {_toml(given[key])}"
    elif info.is_required() or info.default is None:
        yield f"#{field} = {UNSET}"
    else:
        yield f"#{field} = {_toml(info.default)}"


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and booleans are written the same in TOML and JSON
