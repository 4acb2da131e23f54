"""The order of the problems, and their prompts as token ids.

Not covered: what a problem is (`environments`), and sampling (`bridge/rollouts`).
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from bridge.errors import RewardError
from bridge.rewards.foreign_code import shortened
from bridge.types import Environment, Message, Problem


def endless(problems: Sequence[Problem], seed: int) -> Iterator[Problem]:
    """Yield the problems for ever, each pass over them in an order of its own that `seed` decides."""
    assert problems, "no problems: there would be no end to looking for the first"
    for number in range(2**63):
        order = list(range(len(problems)))
        random.Random(f"{seed}/{number}").shuffle(order)  # noqa: S311  an order, not a secret
        for index in order:
            yield problems[index]


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
