"""The problems of a run: their endless order, the held-out ones for evaluation, and their prompts as token ids."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from bridge.core.foreign_code import described
from bridge.core.problem_form import problem_fault
from bridge.errors import RewardError, UsageError
from bridge.rollouts import chat_template
from bridge.types import Environment, Message, Problem

WINDOW = 4096
"""Size of the shuffle buffer. A list is in memory anyway, and is shuffled as a whole."""


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
    """Yield each problem once: draw a random problem from the buffer, and replace it with the next one."""
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
            hint="add some with --eval-data, --eval-env-args or a method held_out() of the environment's class, or"
            " leave --eval-samples at 0",
        )
    return problems


def encode(tokenizer: PreTrainedTokenizerBase, problem: Problem, /, **template: Any) -> tuple[int, ...]:
    """Return the prompt's token ids.

    Chat messages are rendered by the model's chat template, which gets `template` and the problem's own `tools`,
    `documents` and `chat_template_kwargs`; a model without a template gets the text `plain_prompt`. A text gets the
    tokens that the tokenizer prepends, once, but none that it appends. Prompts with images are encoded by
    `encoded_prompts.py`.

    Raises:
        RewardError: the prompt cannot be encoded, or the template drops one of its messages.
    """
    refuse_images(problem)
    check_form(problem)
    prompt: Any = problem["prompt"]
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        prompt = problem.get("plain_prompt") or prompt
    if isinstance(prompt, str):
        ids = begun(tokenizer, prompt)
    elif tokenizer.chat_template is None:
        raise RewardError(
            "the environment's prompts are chat messages, but the model's tokenizer has no chat template",
            hint="write the prompts as text, add their text as plain_prompt, or use a model with a chat template",
        )
    else:
        given = chat_template.arguments(tokenizer.chat_template, problem, template)
        messages = chat_template.as_known(prompt)
        in_parts = chat_template.as_known(prompt, keeps_parts=True)
        try:
            ids = _rendered(tokenizer, messages, given)
        except RewardError:
            if in_parts == messages:
                raise
            ids = _rendered(tokenizer, in_parts, given)  # templates of models for images may take only parts
    if not ids:
        raise RewardError(
            f"the prompt {described(prompt)} has no tokens", hint="give every problem a prompt of at least one token"
        )
    return tuple(ids)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], given: Mapping[str, Any]) -> list[int]:
    """Return the token ids of messages. RewardError: the template rejects them, or drops one."""
    render = partial(chat_template.apply_chat_template, tokenizer, **given)
    ids: list[int] = render(messages, tokenize=True)
    chat_template.refuse_lost(partial(render, tokenize=False), messages)
    return ids


def has_hint(problem: Problem) -> bool:
    """Return whether a problem has a hint; in a data set's column, null or an empty text stands for none."""
    hint: Any = problem.get("hint")
    return hint is not None and hint != ""


def hinted(problem: Problem) -> Problem:
    """Return a problem as a teacher sees it: with its hint after the text, or after the user's last message.

    Raises:
        RewardError: the hint is not text, or the prompt has no place for it.
    """
    hint: Any = problem["hint"]
    prompt: Any = problem["prompt"]
    if not isinstance(hint, str):
        raise RewardError(
            f"the hint {described(hint)} is not text that a teacher could read", hint="give problems a text as hint"
        )
    if isinstance(prompt, str):
        return cast("Problem", {**problem, "prompt": f"{prompt}\n\n{hint}"})
    users = [index for index, message in enumerate(prompt) if message.get("role") == "user"]
    content = prompt[users[-1]].get("content") if users else None
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n\n{hint}"}]
    elif isinstance(content, str):
        content = f"{content}\n\n{hint}"
    else:
        raise RewardError(
            f"the prompt {described(prompt)} has no message of the user with text, which a hint could follow",
            hint="add a user's message, or leave out the hint",
        )
    messages = [*prompt]
    messages[users[-1]] = {**messages[users[-1]], "content": content}
    return cast("Problem", {**problem, "prompt": messages})


def with_hint(prompt: tuple[int, ...], plain: tuple[int, ...], hinted: tuple[int, ...]) -> tuple[int, ...]:
    """Return a sampled `prompt` as a teacher sees it, given the problem's own prompt without and with its hint.

    Tools may have added text to the end of the problem's prompt. If that text differs between completions, `prompt` is
    what all of their prompts begin with. Then the hint's tokens are inserted where the problem's own prompt has them.
    """
    if prompt == plain or not prompt:
        return hinted if prompt else ()
    begin = _num_common(plain, hinted)
    num_after = _num_common(plain[begin:][::-1], hinted[begin:][::-1])
    place = _num_common(prompt, plain[:begin])
    return prompt[:place] + hinted[begin : len(hinted) - num_after] + prompt[place:]


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def begun(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that the model continues.

    Tokens that the tokenizer prepends, such as a beginning-of-sequence token, are added once, even if the text already
    begins with them. Tokens that it appends, such as an end-of-sequence token, are left out, because the model would
    continue after the end.
    """
    encoded = tokenizer(text, return_special_tokens_mask=True)
    ids: list[int] = [*encoded["input_ids"]]
    added = [*encoded["special_tokens_mask"]]
    if len(added) != len(ids):  # this tokenizer does not report which tokens it adds
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


def check_form(problem: Problem) -> None:
    """Raise RewardError if a problem's prompt or images do not have the right form; image files are not opened."""
    if fault := problem_fault(problem, opens_images=False):
        raise RewardError(
            f"a problem cannot be used: {fault}",
            hint="write its prompt as text, or as messages such as [{'role': 'user', 'content': '3+4='}]",
        )


def refuse_images(problem: Problem) -> None:
    """Raise a UsageError if a problem has images."""
    if problem.get("images"):
        raise UsageError(
            f"the prompt {described(problem['prompt'])} has images: only bridge run and bridge train support them, and"
            " only for single-turn completions",
            hint="use bridge run or bridge train with an environment without tools and agents, or leave the images out",
        )


def check_prompts(prompts: object) -> None:
    """Refuse a single prompt in place of a list: its letters, fields or messages would be taken for prompts."""
    is_single = isinstance(prompts, str | Mapping)
    entries = [] if is_single or not isinstance(prompts, Sequence) else prompts
    wrong = next((entry for entry in entries if isinstance(entry, dict) and "prompt" not in entry), None)
    if is_single or (wrong is not None and {"role", "content"} <= wrong.keys()):
        raise UsageError(
            f"prompts is one prompt, {str(prompts)[:80]!r}, expected a list of prompts",
            hint="pass a list: policy.sample([prompt])",
        )
    if wrong is not None:
        raise UsageError(
            f"a problem has no key 'prompt', only {', '.join(map(repr, wrong))}",
            hint="add the prompt's text or messages under the key 'prompt'",
        )
