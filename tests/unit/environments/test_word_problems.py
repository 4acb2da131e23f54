"""`--environment word_problems`: problems that repeat, a disjoint held-out set, exact scores, and its recipe."""

import re
import tomllib
from itertools import islice

from bridge.config import ServeConfig, TaskConfig, TrainConfig
from bridge.types import Problem
from bridge_environments import registry
from bridge_environments.word_problems import HELD_OUT_PER_LEVEL, INSTRUCTION, LEVELS, NAMES, THINGS, WordProblems
from tests.documents import ROOT

RECIPE = ROOT / "examples" / "recipes" / "word_problems.toml"


def story(problem: Problem) -> str:
    """Return the problem without its name and object."""
    return re.sub("|".join((*NAMES, *THINGS)), "_", str(problem["plain_prompt"]))


def test_each_pass_and_each_process_yield_the_same_problems() -> None:
    passes = [list(islice(iter(WordProblems()), 100)) for _ in range(2)]
    assert passes[0] == passes[1]


def test_held_out_stories_do_not_occur_in_training() -> None:
    held_out = WordProblems().held_out()
    assert len(held_out) == HELD_OUT_PER_LEVEL * len(LEVELS)
    assert not {story(problem) for problem in held_out} & {story(p) for p in islice(iter(WordProblems()), 20_000)}


def test_last_number_of_a_completion_is_its_answer() -> None:
    task = WordProblems()
    problem: Problem = {"prompt": "", "answer": "1200"}
    scores = {
        "1200": 1.0, "30 * 40 is 1,200 apples.": 1.0, "1200.0": 1.0, "1200, not 1100": 0.0, "twelve hundred": 0.0,
        "-1200": 0.0, "": 0.0, "12001": 0.0, "1200, in total.": 1.0, "1,200, ,": 1.0, "a profit of -$1200": 0.0,
        "\u22121200": 0.0, "-€1,200": 0.0, r"-\$1200": 0.0, "\u20131200": 0.0, "900\u20131200": 1.0,
        "$1200": 1.0, "between 900-1200": 1.0, "2400-1200=1200": 1.0, ".1200": 0.0,
    }  # fmt: skip
    assert {text: task.score(problem, text) for text in scores} == scores


def test_answers_are_positive_whole_numbers() -> None:
    problems = list(islice(iter(WordProblems()), 2_000))
    assert all(int(problem["answer"]) > 0 for problem in problems)
    assert all(str(problem["plain_prompt"]).endswith(INSTRUCTION) for problem in problems)


def test_word_problems_recipe_loads_and_names_the_task() -> None:
    choices = tomllib.loads(RECIPE.read_text())
    train = TrainConfig.resolve({"model_name": "model"}, RECIPE, beside=(TrainConfig, ServeConfig))
    assert train.task == TaskConfig(environment="word_problems")
    assert (train.training_steps, train.learning_rate) == (choices["training_steps"], choices["optimizer"]["lr"])
    assert len(registry.load(train.task).held_out()) == HELD_OUT_PER_LEVEL * len(LEVELS)
