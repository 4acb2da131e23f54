"""A run's problems: their endless order, those held out for evaluation, and their prompts as token ids."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any

from transformers import PreTrainedTokenizerBase

from bridge.core.foreign_code import described, surrogate_fault
from bridge.errors import RewardError, UsageError
from bridge.rollouts import chat_template
from bridge.types import Environment, Problem

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
                hint="let __iter__ return a new iterator each time, over at least one problem",
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
            hint="add some with --eval-data, --eval-env-args or a method held_out() of its class, or leave"
            " --eval-samples at 0",
        )
    return problems


def encode(tokenizer: PreTrainedTokenizerBase, problem: Problem, /, **template: Any) -> tuple[int, ...]:
    """Return the prompt's token ids; chat messages go through the model's chat template, or `plain_prompt` without one.

    The chat template gets `template`, and the problem's own `tools`, `documents` and `chat_template_kwargs`. A text
    gets what the tokenizer writes in front of it, once, and nothing behind it. Prompts with images are encoded by
    `encoded_prompts.py`.

    Raises:
        RewardError: the prompt cannot be encoded, or the template drops one of its messages.
    """
    refuse_images(problem)
    prompt: Any = problem["prompt"]
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        prompt = problem.get("plain_prompt", prompt)
    if fault := surrogate_fault(prompt):
        raise RewardError(
            f"the prompt {fault}",
            hint="remove it from the problem, as prompt.encode(errors='ignore').decode() does",
        )
    if isinstance(prompt, str):
        ids = begun(tokenizer, prompt)
    elif tokenizer.chat_template is None:
        raise RewardError(
            "the environment's prompts are chat messages, and the model's tokenizer has no chat template",
            hint="write the prompts as text, add their text as plain_prompt, or use a model with a chat template",
        )
    else:
        messages = chat_template.as_known(prompt)
        given = chat_template.arguments(tokenizer.chat_template, problem, template)
        render = partial(chat_template.apply_chat_template, tokenizer, **given)
        ids = render(messages, tokenize=True)
        chat_template.refuse_lost(partial(render, tokenize=False), messages)
    if not ids:
        raise RewardError(
            f"the prompt {described(prompt)} has no tokens", hint="give every problem a prompt of at least one token"
        )
    return tuple(ids)


def begun(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that the model continues.

    What the tokenizer adds in front, such as a token for the beginning, comes once, even if the text has it already;
    what it adds behind, such as an end of the sequence, is left out: the model would continue after its end.
    """
    encoded = tokenizer(text, return_special_tokens_mask=True)
    ids: list[int] = [*encoded["input_ids"]]
    added = [*encoded["special_tokens_mask"]]
    if len(added) != len(ids):  # a tokenizer that does not know what it adds
        return ids
    if all(added):  # an empty text
        return [token for token in ids if token != tokenizer.eos_token_id] or ids[:1]
    while added[-1]:
        ids.pop()
        added.pop()
    num_before = added.index(0)
    before = ids[:num_before]
    rest = ids[num_before:]
    return rest if rest[:num_before] == before else ids


def refuse_images(problem: Problem) -> None:
    """Raise a UsageError if a problem has images."""
    if problem.get("images"):
        raise UsageError(
            f"the prompt {described(problem['prompt'])} has images: bridge run and bridge train take them, for"
            " completions of one turn",
            hint="use an environment without tools and agents there, or leave the images out",
        )


def check_prompts(prompts: object) -> None:
    """Refuse one prompt in place of a list: its letters, fields or messages would be taken for prompts."""
    alone = isinstance(prompts, str | Mapping)
    entries = [] if alone or not isinstance(prompts, Sequence) else prompts
    wrong = next((entry for entry in entries if isinstance(entry, dict) and "prompt" not in entry), None)
    if alone or (wrong is not None and {"role", "content"} <= wrong.keys()):
        raise UsageError(
            f"prompts is one prompt, {str(prompts)[:80]!r}, expected a list of prompts",
            hint="policy.sample([prompt])",
        )
    if wrong is not None:
        raise UsageError(
            f"a problem has no 'prompt', only {', '.join(map(repr, wrong))}",
            hint="add its text or messages as 'prompt'",
        )
