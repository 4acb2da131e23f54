"""Check a user's environment: its kind of interaction, its score, its tools and its problems.

The first problems are checked before anything starts. The others are checked as they are read, because an environment
may yield problems without end.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from itertools import islice
from numbers import Rational, Real
from types import UnionType
from typing import (
    Any,
    Literal,
    NoReturn,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from bridge.agents.tools import names as tool_names
from bridge.core.foreign_code import described, foreign_code, is_async, source_file
from bridge.core.problem_form import problem_fault
from bridge.errors import RewardError
from bridge.types import Interaction, Problem

EXAMPLE = "{'prompt': '3+4='}"
OF_JSON = (str, int, float, bool, list, tuple, type(None), Any)
"""Types of parsed JSON values other than objects."""
UNNAMED: Mapping[Any, str] = {
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only",
    inspect.Parameter.VAR_POSITIONAL: "takes any number of values",
    inspect.Parameter.VAR_KEYWORD: "takes values of any name",
}
"""Kind of an argument that has no single name in a call -> a description of it."""
NUM_FIRST = 64
"""Number of problems that are checked before anything starts."""
RUN = "def run(self, problem: dict, base_url: str) -> float"
REWARD = "def get_reward(self) -> float"
SCORE = "def score(self, problem: dict, completion: str) -> float"


def check_score(environment: Any, name: str) -> None:
    """Raise RewardError unless `environment` has a method `score` with the right parameters."""
    score = getattr(environment, "score", None)
    if not callable(score):
        hint = f"add one to the class: {SCORE}; with tools: {REWARD}; for an agent: {RUN}"
        raise RewardError(f"environment {name} has no method score, get_reward or run", hint=hint)
    try:
        inspect.signature(score).bind({}, "")
    except TypeError as error:
        raise RewardError(
            f"environment {name}: score cannot be called with (problem, completion): {error}",
            hint=f"write it as: {SCORE}",
        ) from error
    if is_async(score) and not hasattr(environment, "get_reward"):
        raise RewardError(
            f"environment {name}: score is an async function, expected a plain one",
            hint=f"write it as: {SCORE}; asyncio.run(...) in it awaits other functions",
        )


def interaction(kind: type, name: str) -> Interaction:
    """Return the kind of interaction of a class.

    A class with a method `reset` has tools, as in TRL's `environment_factory`. A class with a method `run` and without
    `reset` is an agent. Any other class scores single completions.
    """
    run = getattr(kind, "run", None)
    if callable(getattr(kind, "reset", None)):
        if callable(run) and {"problem", "base_url"} <= inspect.signature(run).parameters.keys():
            fault = "has a method reset, so that run(problem, base_url) would be a tool that the model calls"
            _refuse(name, fault, "rename reset: an agent is started only by run")
        return "tools"
    if not callable(run):
        return "completion"
    try:
        inspect.signature(run).bind(None, {}, "")
    except TypeError as error:
        _refuse(name, f"is an agent whose run cannot be called with (problem, base_url): {error}", f"write: {RUN}")
    return "agent"


def schemas(environment: Any, name: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools of `environment`, its public methods."""
    from transformers.utils import get_json_schema  # imports torch, which takes seconds

    tools = tool_names(type(environment))
    if not tools:
        _refuse(name, "has a method reset, but no tools", "add a public method, which the model can call")
    with foreign_code(f"environment {name}: describing its tools {', '.join(tools)}", source_file(type(environment))):
        schemas = [get_json_schema(_without_types(getattr(environment, tool))) for tool in tools]
        hints = {tool: get_type_hints(getattr(environment, tool)) for tool in tools}
        for schema, of_tool in zip(schemas, hints.values(), strict=True):
            properties = schema["function"]["parameters"]["properties"]
            for argument, of_argument in properties.items():
                if any(_typed_dicts(of_tool[argument])):
                    properties[argument] = {
                        **_schema(of_tool[argument]), "description": of_argument["description"],
                    }  # fmt: skip
    for tool in tools:
        method = getattr(environment, tool)
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            _refuse(
                name, f"has the tool {tool}, which yields, expected a method that returns", f"return all text in {tool}"
            )
        _refuse_unnamed(name, tool, inspect.signature(method).parameters)
    for tool, of_tool in hints.items():
        for argument, hint in of_tool.items():
            if argument != "return" and (unknown := next(_classes(hint), None)):
                _refuse_class(name, tool, argument, unknown)
    return schemas


def _without_types(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose docstring names its arguments as transformers reads them: `a: ...`, not `a (int): ...`."""
    before, heading, described = (inspect.getdoc(method) or "").partition("\nArgs:\n")
    names = "|".join(inspect.signature(method).parameters)

    @functools.wraps(method)
    def same(*_: Any) -> None:
        """Only describe the method."""

    same.__doc__ = before + heading + re.sub(rf"(?m)^(\s*(?:{names}))\s*(?:\(.*?\))?\s*:", r"\1:", described)
    return same


def _schema(hint: Any, within: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the JSON schema of a type hint with the keys of each TypedDict, which transformers leaves out.

    `within` are the TypedDicts that contain the hint; one that contains itself is described once.
    """
    if is_typeddict(hint) and hint not in within:
        keys = get_type_hints(hint)
        schema: dict[str, Any] = {
            "type": "object", "properties": {key: _schema(inner, (*within, hint)) for key, inner in keys.items()},
        }  # fmt: skip
        required = _required(hint)
        return {**schema, "required": required} if required else schema
    origin, inner_hints = get_origin(hint), get_args(hint)
    is_described = origin in (list, tuple, dict, Union, UnionType) and Ellipsis not in inner_hints
    if not is_described or not any(_typed_dicts(hint)):
        return _schema_without_keys(hint)
    if origin is list:
        return {"type": "array", "items": _schema(inner_hints[0], within)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_schema(inner, within) for inner in inner_hints]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner_hints[1], within)}
    choices = [_schema(inner, within) for inner in inner_hints if inner is not type(None)]
    schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
    return {**schema, "nullable": True} if type(None) in inner_hints else schema


def _required(kind: Any) -> list[str]:
    """Return the required keys of a TypedDict.

    Source: under `from __future__ import annotations`, `__required_keys__` ignores Required and NotRequired.
    """
    marks = {Required: True, NotRequired: False}
    hints = get_type_hints(kind, include_extras=True)
    return [key for key, hint in hints.items() if marks.get(get_origin(hint), key in kind.__required_keys__)]


def _schema_without_keys(hint: Any) -> dict[str, Any]:
    """Return what transformers makes of a type hint."""
    from transformers.utils import get_json_schema  # as above

    def tool(argument: Any) -> None:
        """Do nothing.

        Args:
            argument: Anything.
        """

    tool.__annotations__ = {"argument": hint}
    schema: dict[str, Any] = get_json_schema(tool)["function"]["parameters"]["properties"]["argument"]
    return {key: value for key, value in schema.items() if key != "description"}


def _typed_dicts(hint: Any) -> Iterator[Any]:
    """Yield the TypedDicts in a type hint, without those inside other TypedDicts."""
    if is_typeddict(hint):
        yield hint
    for inner in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _typed_dicts(inner)


def _refuse_unnamed(name: str, tool: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuse an argument that a call by name cannot set: the schema would ask the model for one all the same."""
    for parameter in parameters.values():
        if parameter.kind in UNNAMED:
            _refuse(
                name,
                f"has the tool {tool}, whose argument {parameter} {UNNAMED[parameter.kind]}, but calls of tools name"
                " each argument",
                f"give {tool} an argument for each value, or one list or dict",
            )


def _refuse_class(name: str, tool: str, argument: str, kind: type) -> NoReturn:
    """Refuse an argument whose type JSON lacks: the schema would say object, and the tool would get a wrong type."""
    meant = f"Literal{[member.value for member in kind]}" if issubclass(kind, Enum) else "a type of JSON, such as str,"
    _refuse(
        name,
        f"has the tool {tool}, whose argument {argument} is a {kind.__name__}, which JSON schemas cannot describe: the"
        " schema would ask the model for an object",
        f"use {meant} as its type hint, and convert it to a {kind.__name__} in {tool}",
    )


def _classes(hint: Any, within: tuple[Any, ...] = ()) -> Iterator[type]:
    """Yield the classes in a type hint that parsed JSON cannot be an instance of; `within` as for `_schema`."""
    if get_origin(hint) is Literal:
        return
    if get_origin(hint) is not None:
        for inner in get_args(hint):
            yield from _classes(inner, within)
    elif is_typeddict(hint):
        for inner in get_type_hints(hint).values() if hint not in within else ():
            yield from _classes(inner, (*within, hint))
    elif isinstance(hint, type) and hint not in OF_JSON and not isinstance({}, hint):
        yield hint


def check_problems(environment: Any, name: str, reward: str) -> list[Problem]:
    """Check the first problems of `environment` and all held-out ones, and return the held-out ones.

    `reward` is the name of a reward that compares with the problems' answers; empty if none does.
    """
    file = source_file(type(environment))
    with foreign_code(f"environment {name}: listing its problems", file):
        if not isinstance(environment, Iterable):
            _refuse(name, "is not iterable", f"add __iter__, which yields problems such as {EXAMPLE}")
        iterator = iter(environment)
        if iterator is environment or iterator is iter(environment):
            _refuse(name, "is an iterator, so a second pass would be empty", "return a new iterator from __iter__")
    if not list(islice(checked(iterator, name, reward, file), NUM_FIRST)):
        _refuse(name, "has no problems", f"add at least one, such as {EXAMPLE}")
    with foreign_code(f"environment {name}: listing its held-out problems", file):
        held_out = environment.held_out() if hasattr(environment, "held_out") else None
    if held_out is None:
        return []
    if not isinstance(held_out, list):
        _refuse(name, f"has a held_out that returned a {type(held_out).__name__}", "return a list of problems")
    if not held_out:
        _refuse(name, "has no held-out problems", f"add at least one, such as {EXAMPLE}")
    return list(checked(held_out, name, reward, file, noun="held-out problem"))


def checked(
    problems: Iterable[Any], name: str, reward: str, file: str, *, noun: str = "problem", opens_images: bool = True
) -> Iterator[Problem]:
    """Check and yield the problems of one pass; `file` is the file with the code that lists them.

    During a run, images are not opened here: an unreadable image costs its group when the prompt is encoded.
    """
    with foreign_code(f"environment {name}: listing its {noun}s", file):
        for index, problem in enumerate(problems):
            if fault := problem_fault(problem, opens_images=opens_images):
                _refuse(name, f"has a bad {noun} {index}: {fault}", f"make each a dict such as {EXAMPLE}")
            if reward and (lack := answer_fault(problem)):
                raise RewardError(
                    f"environment {name}: {noun} {index} {lack}, but the reward {reward} compares with the answer",
                    hint="give every problem an answer that is text or a number, or choose a different --reward",
                )
            yield problem


def answer_fault(problem: Any) -> str:
    """Return what is wrong with the answer of `problem`, as the rest of a sentence; empty if it is valid."""
    if "answer" not in problem:
        return "has no answer"
    answer = problem["answer"]
    if isinstance(answer, str):
        return "" if answer.strip() else "has an empty answer"
    if isinstance(answer, Decimal):
        is_valid = answer.is_finite()
    else:
        is_valid = isinstance(answer, Real) and not isinstance(answer, bool)
        is_valid = is_valid and (isinstance(answer, Rational) or math.isfinite(answer))
    return "" if is_valid else f"has the answer {described(answer)}, expected text or a number"


def _refuse(name: str, fault: str, hint: str) -> NoReturn:
    raise RewardError(f"environment {name} {fault}", hint=hint)
