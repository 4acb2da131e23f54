"""Find an environment by name, `arithmetic` or `file.py:ClassName`, and check it before anything is started.

Not covered: scoring (`bridge/rewards`), and what a class needs beyond its problems and its score.
"""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from bridge.errors import RewardError, UsageError
from bridge.rewards.foreign_code import foreign_code, shortened, source_file
from bridge.types import Environment
from environments.arithmetic import Arithmetic

KNOWN: dict[str, type] = {"arithmetic": Arithmetic}
FORM = "path/to/file.py:ClassName"
EXAMPLE = "{'prompt': '3+4='}"


def load(name: str) -> Environment:
    """Return the environment `name`, made and iterated once to check its problems.

    While a file is loaded its folder comes first on `sys.path`, as when Python runs the file, so it can import its
    neighbours; imports inside functions that run later find them only if they were imported before.

    Raises:
        UsageError: there is no such environment, file or class, or the class needs constructor arguments.
        RewardError: its code raised, it has no problems or no score, or one of its problems is no problem.
    """
    environment = _made(_class(name), name)
    _check_score(environment, name)
    _check_problems(environment, name)
    checked: Environment = environment
    return checked


def _class(name: str) -> type:
    if name in KNOWN:
        return KNOWN[name]
    path, _, class_name = name.rpartition(":")
    if path:
        return _class_in(_module(Path(path).expanduser(), name), class_name, path)
    if name.endswith(".py"):
        raise UsageError(f"environment {name!r} names no class", remedy=f"--environment {name}:ClassName")
    close = difflib.get_close_matches(name, KNOWN, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"no environment {name!r}, expected {', '.join(KNOWN)} or {FORM}",
        remedy=f"{meant}--environment {close[0] if close else 'arithmetic'}, or --environment {FORM} for your own",
    )


def _module(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else f"there is no such file, seen from {Path.cwd()}"
        raise UsageError(f"environment {name!r}: cannot read {path}: {found}", remedy=f"--environment {FORM}")
    file = path.resolve()
    # Prefixed, or else a file called random.py would pose as the standard library's module.
    spec = importlib.util.spec_from_file_location(f"bridge_environment_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"environment {name!r}: {path} is no Python file", remedy=f"--environment {FORM}")
    module = importlib.util.module_from_spec(spec)
    with _first_on_path(file.parent), foreign_code(f"importing {path}", str(file)):
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _class_in(module: ModuleType, class_name: str, path: str) -> type:
    found = getattr(module, class_name, None)
    if isinstance(found, type):
        return found
    there = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    classes = [key for key in there if isinstance(vars(module)[key], type)]
    problem = f"no class {class_name!r} in {path}" if found is None else f"{class_name} in {path} is no class"
    close = difflib.get_close_matches(class_name, classes, n=1) or classes[:1] or ["ClassName"]
    raise UsageError(
        f"{problem}, it defines {', '.join(classes) or 'no class at all'}", remedy=f"--environment {path}:{close[0]}"
    )


def _made(kind: type, name: str) -> Any:
    with foreign_code(f"environment {name}: making {kind.__name__}()", source_file(kind)):
        if needed := [
            parameter.name for parameter in inspect.signature(kind).parameters.values() if _is_needed(parameter)
        ]:
            raise UsageError(
                f"environment {name}: {kind.__name__} needs constructor arguments ({', '.join(needed)}), expected none",
                remedy=f"give each of them a default in {kind.__name__}.__init__",
            )
        return kind()


def _is_needed(parameter: inspect.Parameter) -> bool:
    takes_any_number = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not takes_any_number


def _check_score(environment: Any, name: str) -> None:
    form = "def score(self, problem: dict, completion: str) -> float"
    score = getattr(environment, "score", None)
    if not callable(score):
        raise RewardError(f"environment {name} has no method score", remedy=f"add to it: {form}")
    try:
        inspect.signature(score).bind({}, "")
    except TypeError as error:
        raise RewardError(
            f"environment {name}: score cannot be called with (problem, completion): {error}",
            remedy=f"write it as: {form}",
        ) from error


def _check_problems(environment: Any, name: str) -> None:
    file = source_file(type(environment))
    with foreign_code(f"environment {name}: listing its problems", file):
        if not isinstance(environment, Iterable):
            _refuse(name, "is not iterable", f"add __iter__, which yields problems such as {EXAMPLE}")
        if iter(environment) is environment:
            _refuse(name, "is an iterator, so a second pass would be empty", "return a new iterator from __iter__")
        _check_each(name, "problem", list(environment))
    if hasattr(environment, "held_out"):
        with foreign_code(f"environment {name}: listing its held-out problems", file):
            held_out = environment.held_out()
            if not isinstance(held_out, list):
                _refuse(name, f"has a held_out that returned a {type(held_out).__name__}", "return a list of problems")
            _check_each(name, "held-out problem", held_out)


def _check_each(name: str, noun: str, problems: list[Any]) -> None:
    if not problems:
        _refuse(name, f"has no {noun}s", f"give it at least one, such as {EXAMPLE}")
    for index, problem in enumerate(problems):
        if fault := _fault(problem):
            _refuse(name, f"has a bad {noun} {index}: {fault}", f"make each a dict such as {EXAMPLE}")


def _refuse(name: str, fault: str, remedy: str) -> NoReturn:
    raise RewardError(f"environment {name} {fault}", remedy=remedy)


def _fault(problem: object) -> str:
    """Say what is wrong with `problem`, or nothing."""
    if not isinstance(problem, dict):
        return f"found {shortened(repr(problem))} of type {type(problem).__name__}, expected a dict with a prompt"
    if "prompt" not in problem:
        return f"no prompt, found the keys {shortened(list(problem))}"
    prompt = problem["prompt"]
    if isinstance(prompt, str):
        return "" if prompt else "its prompt is empty"
    if not isinstance(prompt, list) or not prompt or not all(_is_message(message) for message in prompt):
        return f"its prompt is {shortened(repr(prompt))}, expected text or messages {{'role': text, 'content': text}}"
    return ""


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
