"""The order of the problems, and their prompts as token ids.

Not covered: what a problem is (`environments`), and sampling (`bridge/rollouts`).
"""

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import length_hint
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from bridge.core.foreign_code import shortened
from bridge.errors import RewardError
from bridge.types import Environment, Message, Problem

WINDOW = 4096
"""Problems that are held to be shuffled, unless there are fewer, or all are in memory anyway."""


def endless(problems: Iterable[Problem], seed: int) -> Iterator[Problem]:
    """Yield the problems for ever, each pass over them in an order of its own that `seed` decides.

    They are read as they are needed, so that a pass may have no end.

    Raises:
        RewardError: a pass has no problems. Whatever reading them raises is raised.
    """
    for number in range(2**63):
        order = random.Random(f"{seed}/{number}")  # noqa: S311  an order, not a secret
        problem: Problem | None = None
        for problem in _shuffled(iter(problems), order):
            yield problem
        if problem is None:
            raise RewardError(
                f"pass {number + 1} over the environment's problems has none",
                remedy="let __iter__ return a new iterator each time, over at least one problem",
            )


def _shuffled(problems: Iterator[Problem], order: random.Random) -> Iterator[Problem]:
    """Yield each problem once: a random one of those held, whose place the next one takes; a list is held whole."""
    held = list(islice(problems, max(WINDOW, length_hint(problems))))
    for problem in problems:
        index = order.randrange(len(held))
        yield held[index]
        held[index] = problem
    order.shuffle(held)
    yield from held


def held_out(environment: Environment) -> list[Problem]:
    """Return the problems that the environment keeps from training.

    Raises:
        RewardError: it keeps none.
    """
    problems = list(getattr(environment, "held_out", list)())
    if not problems:
        raise RewardError(
            "the environment has no held-out problems to evaluate on",
            remedy="give it some, by --eval-data or a method held_out() of its class, or leave --eval-samples at 0",
        )
    return problems


def encode(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> tuple[int, ...]:
    """Return the prompt's token ids; chat messages go through the model's chat template.

    A model without a template gets the problem's `plain_prompt` in place of messages, if there is one.

    Raises:
        RewardError: messages alone without a chat template or that it refuses, or a prompt of no tokens.
    """
    prompt: Any = problem["prompt"]
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        prompt = problem.get("plain_prompt", prompt)
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise RewardError(
            "the environment's prompts are chat messages, and the model's tokenizer has no chat template",
            remedy="give the prompts as text, or as text under plain_prompt too, or take a model with a chat template",
        )
    else:
        ids = _render(tokenizer, prompt)
    if not ids:
        raise RewardError(
            f"the prompt {prompt!r} has no tokens", remedy="give every problem a prompt that says something"
        )
    return tuple(ids)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError as error:
        raise RewardError(
            f"the model's chat template refuses the prompt {shortened(repr(messages))}: {error.message}",
            remedy="give messages in the order and the roles that the model knows",
        ) from error
    return ids
