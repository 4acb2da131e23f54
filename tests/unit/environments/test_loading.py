"""Loading environments by name: every misuse ends in one clear line."""

import os
import py_compile
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from bridge.config import TaskConfig
from bridge.core import foreign_code
from bridge.errors import RewardError, UsageError
from bridge.types import Environment, Problem
from bridge_environments import registry
from bridge_environments.registry import Arithmetic

CLASS = "class Task:\n"
PROBLEM: Problem = {"prompt": "3+4="}
ITERATES = "    def __iter__(self):\n        return iter([{'prompt': '3+4='}])\n"
SCORES = "    def score(self, problem, completion):\n        return 1.0\n"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(source: str) -> Path:
        path = tmp_path / "task.py"
        path.write_text(source)
        return path

    return write_file


def load(name: str) -> Environment:
    return registry.load(TaskConfig(environment=name))


def refusal(name: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(name)
    assert "\n" not in caught.value.message
    assert "\n" not in caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value


def test_arithmetic_is_known_by_name() -> None:
    assert list(load("arithmetic")) == list(Arithmetic())


def test_class_in_a_file_is_loaded(write: Write) -> None:
    environment = load(f"{write(CLASS + ITERATES + SCORES)}:Task")
    assert list(environment) == [PROBLEM]
    assert [environment.score(PROBLEM, completion) for completion in ("7", "8")] == [1.0, 1.0]


def test_file_imports_its_neighbors_and_restores_sys_path(write: Write, tmp_path: Path) -> None:
    (tmp_path / "neighbor_of_task.py").write_text("PROMPT = 'from next door'\n")
    path = write(
        "from neighbor_of_task import PROMPT\nclass Task:\n"
        "    def __iter__(self):\n        return iter([{'prompt': PROMPT}])\n" + SCORES
    )
    before = list(sys.path)
    assert list(load(f"{path}:Task")) == [{"prompt": "from next door"}]
    assert sys.path == before


@pytest.mark.parametrize("line", ["from .helper import PROMPT", "from own_tasks.sub.helper import PROMPT"])
def test_file_in_a_package_imports_from_the_package(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "own_tasks" / "sub"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "helper.py").write_text("PROMPT = 'from the package'\n")
    source = f"class Task:\n    def __iter__(self):\n        return iter([{{'prompt': PROMPT}}])\n{SCORES}"
    (folder / "task.py").write_text(f"{line}\nfrom helper import PROMPT as beside\n{source}")
    before = list(sys.path)
    assert list(load(f"{folder / 'task.py'}:Task")) == [{"prompt": "from the package"}]
    assert sys.path == before
    for name in [name for name in sys.modules if name.startswith("own_tasks") or name == "helper"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("edited", "line"),
    [
        ("task.py", ""),
        ("helper_beside_task.py", "from helper_beside_task import PROMPT"),
        ("package_beside_task/__init__.py", "from package_beside_task import PROMPT"),
        ("package_beside_task/sub/helper.py", "from package_beside_task.sub.helper import PROMPT"),
        ("folder_beside_task/helper.py", "from folder_beside_task.helper import PROMPT"),
    ],
)
def test_file_edited_within_a_second_is_compiled_again(
    edited: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for package in ("package_beside_task", "package_beside_task/sub", "folder_beside_task"):
        (tmp_path / package).mkdir()
        if not package.startswith("folder"):
            (tmp_path / package / "__init__.py").touch()
    body = f"class Task:\n    def __iter__(self):\n        return iter([{{'prompt': PROMPT}}])\n{SCORES}"
    (tmp_path / "task.py").write_text(f"{line}\n{body}")
    modules = set(sys.modules)
    for prompt in ("first", "other"):
        prefix = f"PROMPT = '{prompt}'\n"
        (tmp_path / edited).write_text(prefix + (body if edited == "task.py" else ""))
        os.utime(tmp_path / edited, (0, 0))
        assert list(load(f"{tmp_path / 'task.py'}:Task")) == [{"prompt": prompt}]
        for name in set(sys.modules) - modules:
            del sys.modules[name]
        py_compile.compile(str(tmp_path / edited))
    assert [path for path in tmp_path.rglob("*.pyc") if path.name.partition(".")[0] != Path(edited).stem] == []


def test_libraries_of_a_users_file_keep_their_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    library = tmp_path / "lib" / "site-packages"
    (library / "some_library").mkdir(parents=True)
    for name in ("__init__", "part"):
        (library / "some_library" / f"{name}.py").touch()
    monkeypatch.setattr(foreign_code, "LIBRARIES", (f"{library}/",))
    monkeypatch.syspath_prepend(library)
    (tmp_path / "task.py").write_text("import some_library.part\n" + CLASS + ITERATES + SCORES)
    modules = set(sys.modules)
    load(f"{tmp_path / 'task.py'}:Task")
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    assert {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")} == {"__init__", "part"}
    assert not [finder for finder in sys.meta_path if isinstance(finder, foreign_code.SourceFinder)]


def test_file_may_be_named_like_a_standard_module(tmp_path: Path) -> None:
    import random

    (tmp_path / "random.py").write_text("class Task:\n" + ITERATES + SCORES)
    load(f"{tmp_path / 'random.py'}:Task")
    assert sys.modules["random"] is random


def test_dataclasses_and_chat_messages_work(write: Write) -> None:
    path = write(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
        + CLASS
        + "    size: int = 3\n"
        "    def __iter__(self):\n        return iter([{'prompt': [{'role': 'user', 'content': 'hi'}]}])\n" + SCORES
    )
    assert len(list(load(f"{path}:Task"))) == 1


def test_unknown_name_lists_the_known_ones() -> None:
    error = refusal("arithmetics")
    assert "'arithmetics'" in error.message
    assert "arithmetic, word_problems, gsm8k, jsonl, verifiers:ID, reasoning_gym:TASK or path" in error.message
    assert "path/to/file.py:ClassName" in error.message
    own = "--environment arithmetic, or --environment path/to/file.py:ClassName for your own"
    assert error.hint == f"did you mean arithmetic? {own}"


def test_file_named_without_its_suffix_is_suggested(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write("").parent)
    assert refusal("task").hint == "did you mean --environment task.py:ClassName?"


def test_file_without_a_class_name_error_shows_the_form() -> None:
    assert refusal("task.py").hint == "--environment task.py:ClassName"


@pytest.mark.parametrize(
    ("name", "message"),
    [("gone.py:Task", "no such file"), (".:Task", "folder"), ("README.md:Task", "is not a Python file")],
)
def test_non_python_file_is_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert message in refusal(name).message


def test_missing_class_error_lists_the_available_classes(write: Write) -> None:
    path = write("from pathlib import Path\ndef make(): ...\nclass Alpha: ...\nclass Sums: ...\n")
    error = refusal(f"{path}:Sum")
    assert "no class 'Sum'" in error.message
    assert "it defines Alpha, Sums" in error.message
    assert error.hint == f"--environment {path}:Sums"
    assert "make in" in refusal(f"{path}:make").message
    assert "no class at all" in refusal(f"{write('')}:Sum").message


def test_constructor_arguments_are_named(write: Write) -> None:
    path = write("class Task:\n    def __init__(self, split, *, size, seed=0): ...\n")
    assert "(split, size)" in refusal(f"{path}:Task").message


def test_class_written_in_c_gets_a_one_line_error(write: Write) -> None:
    path = write("from collections import OrderedDict\nfrom itertools import count\n")
    for name in ("OrderedDict", "count"):
        assert f"{path}:{name}" in refusal(f"{path}:{name}").message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nraise KeyError('secret')\n", "raised KeyError: 'secret' (task.py line 2)"),
        (
            "x = 1\n\nimport no_such_module\n",
            "raised ModuleNotFoundError: No module named 'no_such_module' (task.py line 3)",
        ),
        ("import sys\nsys.exit(3)\n", "raised SystemExit: 3 (task.py line 2)"),
        ("class Task:\n    def (", "(task.py line 2)"),
        ("raise ValueError('two\\nlines')\n", "raised ValueError: two lines (task.py line 1)"),
        (
            "class Task:\n    def __init__(self):\n        1 / 0\n",
            "raised ZeroDivisionError: division by zero (task.py line 3)",
        ),
        (
            "class Task:\n    def __iter__(self):\n        yield {}['x']\n" + SCORES,
            "raised KeyError: 'x' (task.py line 3)",
        ),
        ("class Task:\n" + ITERATES + SCORES + "    def held_out(self):\n        return 1 / 0\n", "line 7)"),
    ],
)
def test_error_in_user_code_names_exception_and_line(write: Write, source: str, message: str) -> None:
    error = refusal(f"{write(source)}:Task")
    assert isinstance(error, RewardError)
    assert message in error.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (SCORES, "is not iterable"),
        (
            "    def __iter__(self):\n        return self\n    def __next__(self):\n        raise StopIteration\n"
            + SCORES,
            "iterator",
        ),
        (
            "    def __init__(self):\n        self.problems = iter([{'prompt': '3+4='}])\n"
            "    def __iter__(self):\n        return self.problems\n" + SCORES,
            "iterator",
        ),
        (ITERATES, "has no method score, get_reward or run"),
        (ITERATES + "    score = 3\n", "has no method score"),
        (
            ITERATES + "    def score(self, completion):\n        return 1.0\n",
            "score cannot be called with (problem, completion)",
        ),
        (ITERATES + SCORES.replace("def", "async def"), "score is an async function, expected a plain one"),
        ("    def __iter__(self):\n        return iter([])\n" + SCORES, "has no problems"),
        (ITERATES + SCORES + "    def held_out(self):\n        return []\n", "has no held-out problems"),
        (ITERATES + SCORES + "    def held_out(self):\n        yield {'prompt': ''}\n", "returned a generator"),
        (
            ITERATES + SCORES + "    def held_out(self):\n        return [{'prompt': ''}]\n",
            "held-out problem 0: its prompt is empty",
        ),
    ],
)
def test_class_without_the_environments_methods_is_refused(write: Write, body: str, message: str) -> None:
    assert message in refusal(f"{write(CLASS + body)}:Task").message


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("'3+4='", "found '3+4=' of type str"),
        ("{'question': 'x'}", "no prompt, found the keys ['question']"),
        ("{'prompt': 7}", "its prompt is 7"),
        ("{'prompt': ''}", "its prompt is empty"),
        ("{'prompt': []}", "its prompt is []"),
        ("{'prompt': ['hi']}", "message 1 of its prompt is 'hi'"),
        ("{'prompt': [{'role': 'user'}]}", "message 1 of its prompt is {'role': 'user'}"),
    ],
)
def test_invalid_problem_is_named_by_its_index(write: Write, bad: str, message: str) -> None:
    problems = f"    def __iter__(self):\n        return iter([{{'prompt': 'fine'}}, {bad}])\n"
    error = refusal(f"{write(CLASS + problems + SCORES)}:Task")
    assert "problem 1: " in error.message
    assert message in error.message


ENDLESS = (
    "import itertools\n"
    + CLASS
    + "    def __iter__(self):\n"
    + "        for number in itertools.count():\n"
    + "            assert number < 1000, 'read without an end'\n"
    + "            yield {'prompt': f'{number}+1=', 'answer': number + 1} if number != 200 else {'prompt': BAD}\n"
)


@pytest.mark.parametrize("choices", [{}, {"system_prompt": "Add."}, {"reward": "exact"}])
def test_problems_of_an_endless_environment_are_checked_lazily(write: Write, choices: dict[str, str]) -> None:
    name = f"{write(ENDLESS.replace('BAD', '7') + SCORES)}:Task"
    environment = registry.load(TaskConfig.model_validate({"environment": name} | choices))
    for _ in range(2):  # each epoch starts over
        problems = iter(environment)
        assert [problem["answer"] for problem in islice(problems, 200)] == list(range(1, 201))
        with pytest.raises(RewardError, match="has a bad problem 200: its prompt is 7"):
            next(problems)


def test_later_problem_without_an_answer_is_named(write: Write) -> None:
    name = f"{write(ENDLESS.replace('BAD', repr('2+2=')))}:Task"
    problems = iter(registry.load(TaskConfig(environment=name, reward="exact")))
    with pytest.raises(RewardError, match="problem 200 has no answer, but the reward exact compares with the answer"):
        list(islice(problems, 201))
    problems = iter(registry.load(TaskConfig(environment=name, reward="format")))
    with pytest.raises(RewardError, match=r"listing its problems raised AssertionError: read.*\(task.py line 5\)"):
        list(islice(problems, 1001))


def test_images_of_a_class_are_opened_only_at_startup(tmp_path: Path) -> None:
    """An image that disappears later costs its group: it is refused when its prompt is encoded."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "task.py").write_text(
        "class Task:\n    def __iter__(self):\n"
        f"        yield {{'prompt': 'p', 'images': [{str(tmp_path / 'a.png')!r}]}}\n"
        "    def score(self, problem, completion): return 1.0\n"
    )
    config = TaskConfig(environment=f"{tmp_path}/task.py:Task")
    task = registry.load(config)
    (tmp_path / "a.png").unlink()
    assert len(list(task)) == 1
    with pytest.raises(RewardError, match="there is no image"):
        registry.load(config)
