"""A run's problems: their endless order, those held out for evaluation, and their prompts as token ids."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import length_hint
from typing import Any

from transformers import PreTrainedTokenizerBase

from bridge.core.foreign_code import described, reason_of, surrogate_fault
from bridge.errors import RewardError, UsageError
from bridge.types import Environment, Message, Problem

WINDOW = 4096
"""Size of the shuffle buffer; a list, which is in memory anyway, is shuffled as a whole."""


def endless(problems: Iterable[Problem], seed: int) -> Iterator[Problem]:
    """Yield the problems forever, reshuffled by `seed` in each pass; an environment may yield problems without end."""
    for number in range(2**63):
        order = random.Random(f"{seed}/{number}")  # noqa: S311  an order, not a secret
        problem: Problem | None = None
        for problem in _shuffled(iter(problems), order):
            yield problem
        if problem is None:
            raise RewardError(
                f"pass {number + 1} over the environment's problems yielded none",
                remedy="let __iter__ return a new iterator each time, over at least one problem",
            )


def _shuffled(problems: Iterator[Problem], order: random.Random) -> Iterator[Problem]:
    """Yield each problem once: a random one of the buffer, which the next problem replaces."""
    held = list(islice(problems, max(WINDOW, length_hint(problems))))
    for problem in problems:
        index = order.randrange(len(held))
        yield held[index]
        held[index] = problem
    order.shuffle(held)
    yield from held


def held_out(environment: Environment) -> list[Problem]:
    """Return the problems that the environment holds out."""
    problems = list(getattr(environment, "held_out", list)())
    if not problems:
        raise RewardError(
            "the environment has no held-out problems to evaluate on",
            remedy="add some with --eval-data, --eval-env-args or a method held_out() of its class, or leave"
            " --eval-samples at 0",
        )
    return problems


def encode(tokenizer: PreTrainedTokenizerBase, problem: Problem, /, **template: Any) -> tuple[int, ...]:
    """Return the prompt's token ids; chat messages go through the model's chat template, or `plain_prompt` without one.

    `template` is given to the chat template. Prompts with images are encoded by `images.py`.
    """
    refuse_images(problem)
    prompt: Any = problem["prompt"]
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        prompt = problem.get("plain_prompt", prompt)
    if fault := surrogate_fault(prompt):
        raise RewardError(
            f"the prompt {fault}",
            remedy="remove it from the problem, as prompt.encode(errors='ignore').decode() does",
        )
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise RewardError(
            "the environment's prompts are chat messages, and the model's tokenizer has no chat template",
            remedy="write the prompts as text, add their text as plain_prompt, or use a model with a chat template",
        )
    else:
        ids = apply_chat_template(tokenizer, prompt, tokenize=True, return_dict=False, **template)
    if not ids:
        raise RewardError(
            f"the prompt {described(prompt)} has no tokens", remedy="give every problem a prompt of at least one token"
        )
    return tuple(ids)


def apply_chat_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], /, **options: Any) -> Any:
    """Return what `tokenizer.apply_chat_template` makes of a prompt; RewardError if the template rejects it."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except Exception as error:  # a template computes with the messages, and may raise anything
        raise RewardError(
            f"the model's chat template rejects the prompt {described(messages)}: {type(error).__name__}"
            f"{reason_of(error)}",
            remedy="use the roles that the model's template supports, in the order that it expects",
        ) from error


def refuse_images(problem: Problem) -> None:
    """Raise a UsageError if a problem has images."""
    if problem.get("images"):
        raise UsageError(
            f"the prompt {described(problem['prompt'])} has images: bridge run and bridge train take them, for"
            " completions of one turn",
            remedy="use an environment without tools and agents there, or leave the images out",
        )


def check_prompts(prompts: object) -> None:
    """Refuse one prompt in place of a list: its letters, fields or messages would be taken for prompts."""
    alone = isinstance(prompts, str | Mapping)
    entries = [] if alone or not isinstance(prompts, Sequence) else prompts
    wrong = next((entry for entry in entries if isinstance(entry, dict) and "prompt" not in entry), None)
    if alone or (wrong is not None and {"role", "content"} <= wrong.keys()):
        raise UsageError(
            f"prompts is one prompt, {str(prompts)[:80]!r}, expected a list of prompts",
            remedy="policy.sample([prompt])",
        )
    if wrong is not None:
        raise UsageError(
            f"a problem has no 'prompt', only {', '.join(map(repr, wrong))}",
            remedy="add its text or messages as 'prompt'",
        )
