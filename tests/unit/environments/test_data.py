"""Problems from data: required fields of a row, sources of rows, and the effect of each choice."""

import importlib.util
import json
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from huggingface_hub import constants
from PIL import Image
from pyarrow import parquet

from bridge.config import TaskConfig
from bridge.core import hub as hub_module
from bridge.core.address import free_port
from bridge.errors import RewardError, UsageError
from bridge.types import Environment, Problem
from bridge_environments import dataset, registry
from tests.unit.http_server import HttpRequest, serving

Write = Callable[..., Path]
WORKED = "4*2=<<4*2=8>>8\n#### 1,008"
OWN = (
    "class Task:\n    def __iter__(self):\n        return iter([{'prompt': 'a?'}, {'prompt': [\n"
    "            {'role': 'system', 'content': 'own'}, {'role': 'user', 'content': 'b?'}], 'plain_prompt': 'b:'}])\n"
)


def config(environment: str, **choices: Any) -> TaskConfig:
    return TaskConfig(environment=environment, **choices)


def load(environment: str, **choices: Any) -> Environment:
    return registry.load(config(environment, **choices))


def prompts(environment: Any) -> list[Any]:
    return [problem["prompt"] for problem in environment]


def refusal(environment: str, **choices: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(environment, **choices)
    assert "\n" not in caught.value.message
    assert "\n" not in caught.value.hint
    return caught.value


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(*lines: object, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write_file


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder in the hub's layout, with two training problems and one held out."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "copy"
    (folder / "main").mkdir(parents=True)
    for split, names in (("train", "ab"), ("test", "c")):
        table = pa.table({"question": [f"{name}?" for name in names], "answer": [WORKED] * len(names)})
        parquet.write_table(table, folder / "main" / f"{split}-00000-of-00001.parquet")
    return folder


def test_gsm8k_without_data_has_the_bundled_problems() -> None:
    environment: Any = load("gsm8k")
    problem: Any = next(iter(environment))
    assert (len(list(environment)), len(environment.held_out())) == (120, 42)
    assert [message["role"] for message in problem["prompt"]] == ["system", "user"]
    assert problem["prompt"][0]["content"] == dataset.SYSTEM_PROMPT
    question = problem["prompt"][1]["content"]
    assert problem["plain_prompt"] == f"{dataset.SYSTEM_PROMPT}\n\nQuestion: {question}\nAnswer:"
    assert environment.score(problem, f"So it is\n#### {problem['answer']}") == 1.0
    assert environment.score(problem, "#### 0.123") == 0.0


def test_folder_in_the_hubs_layout_is_read(hub: Path) -> None:
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n" + "".join(
        f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test")
    )
    for text in ("", card + "---\n"):
        (hub / "README.md").write_text(text)
        environment: Any = load("gsm8k", data=str(hub), system_prompt="")
        assert prompts(environment) == [[{"role": "user", "content": name}] for name in ("a?", "b?")]
        assert prompts(environment.held_out()) == [[{"role": "user", "content": "c?"}]]
        assert [problem["answer"] for problem in environment] == ["1008", "1008"]


def test_layout_of_the_original_gsm8k_repository_is_read(write: Write) -> None:
    path = write({"question": "a?", "answer": WORKED}, name="folder/train.jsonl")
    assert not load("gsm8k", data=str(path.parent)).held_out()  # type: ignore[attr-defined]
    write({"question": "c?", "answer": WORKED}, name="folder/test.jsonl")
    environment: Any = load("gsm8k", data=str(path.parent), system_prompt="")
    assert prompts(environment.held_out()) == [[{"role": "user", "content": "c?"}]]


def test_parquet_file_is_read(hub: Path, tmp_path: Path) -> None:
    file = hub / "main" / "train-00000-of-00001.parquet"
    environment: Any = load("gsm8k", data=str(file), eval_data=str(file), system_prompt="")
    assert prompts(environment) == prompts(environment.held_out())
    assert prompts(environment) == [[{"role": "user", "content": name}] for name in ("a?", "b?")]
    where = f"{file}: 2 of 2 rows are bad: row 1"
    assert refusal("jsonl", data=str(file)).message.startswith(
        f"{where} has no column 'prompt', found question, answer"
    )


def test_unreadable_data_error_does_not_blame_the_network(tmp_path: Path) -> None:
    refused = refusal("jsonl", data=str(tmp_path))
    assert refused.message.startswith(f"--data {tmp_path}: cannot be loaded: ")
    assert refused.hint == "write the problems to a JSONL file and use that: --data path/to/problems.jsonl"


def test_other_file_types_are_refused_with_an_explanation(write: Write) -> None:
    refused = refusal("jsonl", data=str(write("prompt,answer", "1+1=,2", name="problems.csv")))
    assert "2 of 2 rows are bad: line 1 is not JSON" in refused.message
    assert "a JSONL file has a JSON object in each line" in refused.hint


@pytest.fixture
def hub_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Redirect the hub to a different address."""
    path = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)

    def move(url: str) -> None:
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + path)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)

    return move


def test_unreachable_hub_is_not_retried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub_at: Callable[[str], None]
) -> None:
    def wait(seconds: float) -> None:
        raise AssertionError(f"waits {seconds} s for another try")

    monkeypatch.setattr("time.sleep", wait)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub_at(f"http://127.0.0.1:{free_port('127.0.0.1')}")
    silence = f"the hub at {constants.ENDPOINT} does not answer ([Errno 111] Connection refused)"
    assert refusal("gsm8k", data="openai/gsm8k").message == f"--data openai/gsm8k: cannot be loaded: {silence}"
    assert not datasets.config.HF_HUB_OFFLINE


def test_slow_hub_is_waited_for(monkeypatch: pytest.MonkeyPatch, hub_at: Callable[[str], None]) -> None:
    monkeypatch.setattr(hub_module, "REQUEST_LIMIT_S", 1.0)  # a connection takes less, on a busy machine, too
    is_late = threading.Event()

    def answer(_: HttpRequest) -> None:
        is_late.wait(5.0)

    def load_dataset(path: str, **options: Any) -> Any:
        is_late.set()
        assert not datasets.config.HF_HUB_OFFLINE
        return {"train": datasets.Dataset.from_list([{"question": "a?", "answer": WORKED}])}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with serving(answer) as server:
        hub_at(server.url)
        assert len(prompts(load("gsm8k", data="openai/gsm8k"))) == 1
    assert len([request for request in server.requests if request.path.endswith("README.md")]) == 1


def test_hub_data_set_is_loaded_with_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "why_unreachable", lambda _: "")
    calls: list[Any] = []

    def load_dataset(path: str, **options: Any) -> Any:
        calls.append((path, options))
        row = datasets.Dataset.from_list([{"question": "a?", "answer": WORKED}])
        return {"train": row, "test": row}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load("gsm8k", data="openai/gsm8k")
    load("jsonl", data="someone/else", prompt_column="question")
    assert calls == [("openai/gsm8k", {"name": "main"}), ("someone/else", {"name": None})]


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("no route"), FileNotFoundError("no route")])
def test_unreachable_hub_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(path: str, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(hub_module, "why_unreachable", lambda _: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    refused = refusal("gsm8k", data="openai/gsm8k")
    assert refused.message == "--data openai/gsm8k: cannot be loaded: no route"
    assert "--data path/to/folder" in refused.hint


def test_missing_datasets_library_hint_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refusal("gsm8k", data="openai/gsm8k").hint
    load("gsm8k")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            ImportError("Using SOCKS proxy, but the 'socksio' package is not installed."),
            "pip install socksio, or unset",
        ),
        (ModuleNotFoundError("No module named 'librosa'"), "check its name and the network"),
        (KeyError("features"), "check its name and the network"),
        (AssertionError(), "check its name and the network"),
    ],
)
def test_data_set_errors_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str) -> None:
    def load_dataset(path: str, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(hub_module, "why_unreachable", lambda _: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    refused = refusal("gsm8k", data="openai/gsm8k")
    assert refused.message.startswith("--data openai/gsm8k: cannot be loaded: ")
    assert (str(error) or "AssertionError") in refused.message
    assert refused.hint.startswith(hint)


def test_missing_socks_library_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx")
    if importlib.util.find_spec("socksio"):
        pytest.skip("socksio is installed")
    monkeypatch.setenv("ALL_PROXY", "socks5h://127.0.0.1:9")
    program = (
        "from bridge.config import TaskConfig\nfrom bridge_environments import registry\n"
        "registry.load(TaskConfig(environment='gsm8k', data='openai/gsm8k'))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "UsageError: --data openai/gsm8k: cannot be loaded: Using SOCKS proxy" in run.stderr
    assert "hint: pip install socksio, or unset ALL_PROXY" in run.stderr


def test_missing_training_split_error_names_the_splits(hub: Path) -> None:
    (hub / "main" / "train-00000-of-00001.parquet").unlink()
    assert "has no split train, found test" in refusal("gsm8k", data=str(hub)).message


def test_missing_file_that_is_not_a_hub_name_is_refused(tmp_path: Path) -> None:
    for flag in ("data", "eval_data"):
        error = refusal("jsonl", **{"data": str(tmp_path / "gone.jsonl"), flag: "gone/data.jsonl"})
        assert "there is no such file or folder" in error.message
    assert refusal("jsonl").hint == "--environment jsonl --data path/to/problems.jsonl"


def test_jsonl_accepts_text_and_messages_and_extra_columns(write: Write) -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    path = write({"prompt": "2+2=", "answer": 4, "level": 1}, "", {"prompt": messages, "answer": " two "})
    environment: Any = load("jsonl", data=str(path))
    first, second = environment
    assert first == {"prompt": "2+2=", "answer": 4, "level": 1}
    assert second["prompt"] == messages
    assert [environment.score(first, "4\n"), environment.score(second, "two"), environment.score(second, "2")] == [
        1,
        1,
        0,
    ]
    assert environment.held_out() == []


def test_columns_and_evaluation_data_can_be_chosen(write: Write) -> None:
    path = write({"q": "2+2=", "a": "4"})
    other = write({"q": "3+3=", "a": "6"}, name="eval.jsonl")
    environment: Any = load("jsonl", data=str(path), eval_data=str(other), prompt_column="q", answer_column="a")
    assert [(problem["prompt"], problem["answer"]) for problem in environment] == [("2+2=", "4")]
    assert [(problem["prompt"], problem["answer"]) for problem in environment.held_out()] == [("3+3=", "6")]


def test_every_bad_line_is_named_with_its_fault(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "fine", "answer": "1"}\n\n{"prompt": "cut\n[1]\n\xff\n{"answer": "1"}\n'
        b'{"prompt": "", "answer": "1"}\n{"prompt": 7, "answer": "1"}\n{"prompt": "no answer"}\n'
        b'{"prompt": "a", "answer": [1]}\n{"prompt": "a", "answer": ""}\n{"prompt": "a\\ud800", "answer": "1"}\n'
    )
    message = refusal("jsonl", data=str(path)).message
    assert message.startswith(f"{path}: 10 of 11 rows are bad: line 3 is not JSON (Unterminated string")
    for fault in (
        "line 4 is [1], expected a JSON object",
        "line 5 is not UTF-8 at byte 1",
        "line 6 has no column 'prompt', found answer",
        "line 7 is not a problem: its prompt is empty",
        "line 8 is not a problem: its prompt is 7",
        "line 9 has no answer, but the reward exact compares with the column 'answer'",
        "line 10 has the answer [1], expected text or a number",
        "line 11 has an empty answer",
        "line 12 is not a problem: its prompt 'a\\ud800' has half of a surrogate pair",
    ):
        assert fault in message


@pytest.mark.parametrize("answer", ["NaN", "Infinity", "-Infinity"])
def test_answer_must_be_text_or_a_finite_number(answer: str, write: Write) -> None:
    message = refusal("jsonl", data=str(write(f'{{"prompt": "a", "answer": {answer}}}'))).message
    assert f"has the answer {float(answer)!r}, expected text or a number" in message


def test_many_faults_are_counted_past_the_first_ten(write: Write) -> None:
    message = refusal("jsonl", data=str(write(*[f"[{number}]" for number in range(25)]))).message
    assert "25 of 25 rows are bad: line 1 is [0], expected a JSON object; line 2 is [1]" in message
    assert message.count("expected a JSON object") == dataset.MAX_SHOWN_FAULTS
    assert message.endswith("; and 15 more")


def test_fault_shared_by_many_rows_is_named_once(write: Write) -> None:
    message = refusal("jsonl", data=str(write(*["[1]"] * 25, "[2]"))).message
    assert message.endswith(
        "26 of 26 rows are bad: line 1 is [1], expected a JSON object (the same in 24 more); line 26 is [2], expected a"
        " JSON object"
    )


def test_file_without_rows_is_refused(write: Write) -> None:
    assert "has no rows" in refusal("jsonl", data=str(write())).message


def test_custom_reward_needs_no_answer(write: Write) -> None:
    path = write({"prompt": "hi"})
    mine = write("def length(problem, completion): return len(completion)", name="mine.py")
    environment = load("jsonl", data=str(path), reward=f"{mine}:length,format")
    assert environment.score(next(iter(environment)), "abc") == 3
    assert "line 1 has no answer, but the reward math" in refusal("jsonl", data=str(path), reward="format,math").message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a?", "answer": "it is 7, I think"}, "line 1 has an answer that ends in 'it is 7, I think'"),
        ({"question": "a?", "answer": "#### seven"}, "ends in 'seven', expected #### and a number"),
        ({"question": "a?", "answer": "#### 1,00"}, "ends in '1,00'"),
        ({"question": " ", "answer": "#### 7"}, "has the question ' ', expected text"),
        ({"question": "a?"}, "has no column 'answer', found question"),
    ],
)
def test_row_not_in_gsm8k_format_is_named(write: Write, row: Any, message: str) -> None:
    assert message in refusal("gsm8k", data=str(write(row))).message


@pytest.mark.parametrize(
    ("solution", "answer"), [("#### -1,234.50", "-1234.50"), ("#### $18", "18"), (".5", ".5"), (7, "7")]
)
def test_gsm8k_answer_is_the_final_number(write: Write, solution: object, answer: str) -> None:
    (problem,) = load("gsm8k", data=str(write({"question": "a?", "answer": solution})))
    assert problem["answer"] == answer


def test_system_prompt_replaces_the_problems_own(write: Write) -> None:
    path = write(OWN + "    def score(self, problem, completion): return 1.0\n", name="task.py")
    first, second = load(f"{path}:Task", system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert first["prompt"] == [system, {"role": "user", "content": "a?"}]
    assert second["prompt"] == [system, {"role": "user", "content": "b?"}]
    plain: list[Any] = [first, second]
    assert [problem["plain_prompt"] for problem in plain] == ["Be brief.\n\na?", "Be brief.\n\nb:"]


def test_empty_system_prompt_removes_the_problems_own(write: Write) -> None:
    path = write(OWN + "    def score(self, problem, completion): return 1.0\n", name="task.py")
    assert prompts(load(f"{path}:Task", system_prompt="")) == ["a?", [{"role": "user", "content": "b?"}]]


def test_chosen_rewards_replace_the_environments_own() -> None:
    environment: Any = load("arithmetic", reward="math,format=0.5")
    problem: Problem = {"prompt": "12+7=", "answer": "19"}
    assert environment.score(problem, "#### 19") == 1.5
    assert (len(list(environment)), len(environment.held_out())) == (320, 80)


def test_chosen_rewards_replace_a_missing_score(write: Write) -> None:
    path = write(OWN, name="task.py")
    assert "has no method score" in refusal(f"{path}:Task").message
    assert load(f"{path}:Task", reward="format").score({"prompt": "a?"}, "#### 7") == 1.0
    error = refusal(f"{path}:Task", reward="exact")
    assert isinstance(error, RewardError)
    assert "problem 0 has no answer, but the reward exact compares with the answer" in error.message


def test_choices_an_environment_would_ignore_are_refused() -> None:
    error = refusal("arithmetic", data="x.jsonl", answer_column="a")
    assert error.message == ("--data, --answer-column: only for --environment gsm8k and jsonl, not arithmetic")
    for choice in registry.OF_DATA:
        assert "only for --environment" in refusal("arithmetic", **{choice: "x"}).message
    assert "no environment 'gsm8'" in refusal("gsm8", data="x").message
    assert refusal("gsm8", data="x").hint.startswith("did you mean gsm8k? --environment gsm8k, or ")
    assert refusal("chess", data="x").hint.startswith("--environment arithmetic, or ")


def scored(recipe: bytes, problem: Problem, completion: str) -> Any:
    return pickle.loads(recipe)().scores(problem, completion)


def test_scorer_can_be_pickled_and_needs_no_data() -> None:
    config = TaskConfig(environment="jsonl", data="gone.jsonl", reward="math,format=0.5")
    recipe = pickle.dumps(partial(registry.scorer, config))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        problem: Problem = {"prompt": "6*7?", "answer": "42"}
        assert pool.apply(scored, (recipe, problem, "it is 42")) == (1.0, {"math": 1.0, "format": 0.0})


def test_environment_scores_with_its_own_scorer(write: Write) -> None:
    assert registry.scorer(config("arithmetic")).score({"prompt": "1+1=", "answer": "2"}, "2") == 1.0
    assert registry.scorer(config("gsm8k")).score({"prompt": "-", "answer": "2"}, "#### 2.0") == 1.0
    path = write(OWN, name="task.py")
    with pytest.raises(RewardError, match="has no method score"):
        registry.scorer(config(f"{path}:Task"))


def test_problems_and_rewards_do_not_import_torch(hub: Path) -> None:
    program = (
        "import sys\nfrom bridge.config import TaskConfig\nfrom bridge_environments import registry\n"
        "config = TaskConfig(environment='gsm8k', data=sys.argv[1])\n"
        "problem = next(iter(registry.load(config)))\n"
        "assert registry.scorer(config).score(problem, '#### 1008') == 1.0\n"
        "assert 'pyarrow' in sys.modules\nassert not {'torch', 'transformers', 'vllm'} & set(sys.modules)\n"
    )
    environment = {"PATH": "", "HF_HOME": str(hub.parent / "home")}
    subprocess.run(
        [sys.executable, "-c", program, str(hub)], check=True, env=environment, cwd=Path(__file__).parents[3]
    )


def picture(folder: Path, name: str, content: bytes | None = None) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        Image.new("RGB", (8, 8)).save(folder / name)
    else:
        (folder / name).write_bytes(content)


def test_images_are_relative_to_their_file(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path, "there/images/a.png")
    data = write({"prompt": "p", "images": ["images/a.png"]}, {"prompt": "q"}, name="there/data.jsonl")
    monkeypatch.chdir(tmp_path)
    first, second = load("jsonl", data=str(data.relative_to(tmp_path)), reward="format")
    assert first["images"] == [str(tmp_path / "there/images/a.png")]
    assert "images" not in second


def test_invalid_images_are_reported_row_by_row(write: Write, tmp_path: Path) -> None:
    picture(tmp_path, "broken.png", b"no image")
    data = write(
        {"prompt": "p", "images": ["missing.png"]},
        {"prompt": "p", "images": ["broken.png"]},
        {"prompt": "p", "images": "a.png"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
    )
    message = refusal("jsonl", data=str(data), reward="format").message
    assert "4 of 4 rows are bad" in message
    assert f"line 1 is not a problem: there is no image {tmp_path}/missing.png; line 2" in message
    assert f"the image {tmp_path}/broken.png cannot be read: cannot identify image file" in message
    assert "line 3 is not a problem: its images are 'a.png', expected a list of paths" in message
    assert "line 4 is not a problem: message 1 of its prompt is" in message


def test_messages_may_contain_image_markers(write: Write, tmp_path: Path) -> None:
    picture(tmp_path, "a.png")
    content = [{"type": "text", "text": "look:"}, {"type": "image"}]
    exported = [{"type": "text", "text": "look:"}, {"type": "image", "text": None}]
    data = write({"prompt": [{"role": "user", "content": exported}], "images": ["a.png"]})
    assert prompts(load("jsonl", data=str(data), reward="format")) == [[{"role": "user", "content": content}]]


def test_image_marker_mismatches_are_reported_row_by_row(write: Write, tmp_path: Path) -> None:
    picture(tmp_path, "a.png")
    part, other = {"type": "image"}, {"type": "image", "text": "a"}
    data = write(
        {"prompt": [{"role": "user", "content": [part, part]}], "images": ["a.png"]},
        {"prompt": [{"role": "system", "content": "look"}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [other]}], "images": ["a.png"]},
    )
    message = refusal("jsonl", data=str(data), reward="format").message
    assert "line 1 is not a problem: its messages have 2 image parts for 1 images" in message
    assert "line 2 is not a problem: it has images, but neither a user message" in message
    assert "with images, content may be parts {'type': 'text', 'text': text} and {'type': 'image'}" in message


def test_word_problems_with_images_are_refused(write: Write, tmp_path: Path) -> None:
    """The format reads only a question and an answer, so images would be ignored silently."""
    picture(tmp_path, "a.png")
    data = write({"question": "how many?", "answer": "two #### 2", "images": ["a.png"]})
    assert "line 1 has images, which only --environment jsonl reads" in refusal("gsm8k", data=str(data)).message


def test_images_of_a_hub_data_set_are_refused() -> None:
    rows = dataset.Rows(
        source="some/set, split train", rows=[dataset.Row("row 1", {"prompt": "p", "images": ["a.png"]})]
    )
    with pytest.raises(RewardError, match="row 1 has images, which are supported only as paths in a local file"):
        rows.problems(lambda values: values)  # type: ignore[arg-type, return-value]
