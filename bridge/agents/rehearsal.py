"""Test an environment before a run starts: encode the prompts of some problems, and score made-up completions."""

import asyncio
import json
import logging
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from heapq import nlargest
from itertools import islice
from operator import length_hint
from typing import Any

from transformers import PreTrainedTokenizerBase

from bridge.agents.open_stream import group_sampler
from bridge.agents.trajectories import as_chat
from bridge.config import OWN_WEIGHTS, SamplingConfig, TaskConfig
from bridge.core import redaction
from bridge.core.foreign_code import described
from bridge.errors import RejectedRequestError, RewardError, UsageError
from bridge.rollouts import chat_template
from bridge.rollouts.groups import GroupSampler
from bridge.rollouts.problems import has_hint, hinted
from bridge.rollouts.sampler import Sampler, fitting
from bridge.rollouts.vocabulary import Vocabulary
from bridge.scoring.score import FailedScore
from bridge.scoring.scorer import Scorer
from bridge.types import Environment, Problem, Task
from bridge.weights import skeleton

logger = logging.getLogger(__name__)

NUM_PROBLEMS = 3
"""Number of problems for which made-up completions are scored."""
NUM_TRIED = 256
"""Maximum number of prompts to encode if the problems are a list."""
NUM_MADE = 64
"""Number of prompts to encode if problems are generated on demand."""
MOST_CHARACTERS = 2_000_000
"""Maximum total length of the prompts drawn at random from a list; encoding these takes about a second."""
LIMIT_S = 10.0
"""Total time limit for scoring in a rehearsal; in training, `--reward-timeout-s` applies."""


def rehearse(
    model_name: str,
    chosen: TaskConfig,
    sampling: SamplingConfig,
    environment: Environment,
    *,
    teacher: str | None = None,
    max_model_len: int | None = None,
    pass_size: int = 1,
) -> None:
    """Encode the prompts of the problems that `tried` returns, and score made-up completions of the first ones.

    Findings that are not fatal are logged. `teacher` is the one that `--teacher` names, and `max_model_len` is the
    server's longest sequence in tokens, if known.
    `pass_size` is the number of GPUs that compute a pass together.
    """
    task = Task.of(environment)
    sample, lines = tried(task)
    problems = [problem for _, problem in sample[:NUM_PROBLEMS]]
    processes = 1 if task.in_workers and chosen.reward_processes != 0 else 0
    sampler = Sampler(sampling)  # opens no connection
    scorer = Scorer(
        task.recipe, processes=processes, timeout_s=chosen.reward_timeout_s, variables=chosen.worker_env,
        call_here=sampler.loop.call_here,
    )  # fmt: skip
    with sampler, closing(scorer):
        tokenizer = skeleton.tokenizer(model_name)  # takes seconds, while the scoring process starts
        vocabulary = Vocabulary.of(tokenizer, model_name)
        vocabulary.check_stop(sampling.stop)
        groups = group_sampler(model_name, chosen, task, tokenizer, sampler, scorer, pass_size=pass_size)
        if teacher is not None:
            _check_hints(sample, teacher, task)
        for place, problem in sample:
            _check_prompt(place, problem, groups, vocabulary, sampling, max_model_len)
        is_text = not groups.is_chat and all(isinstance(problem["prompt"], str) for _, problem in sample)
        own = {**chosen.chat_template_kwargs, **({"tools": task.schemas} if task.schemas else {})}
        sources = {chat_template.applied_to(tokenizer.chat_template, problem, own) for _, problem in sample}
        if task.interaction == "agent":  # each request may have tools or not
            sources = {chat_template.applied(tokenizer.chat_template, has_tools=has) for has in (False, True)}
        _check_template(chosen.chat_template_kwargs, "" if is_text else "\n".join(sources))
        if task.interaction != "agent":
            prompts = [as_chat(problem) if groups.is_chat else problem for _, problem in sample]
            of_teacher = () if teacher is None else ("hint",)
            read = None if chosen.data is None else (chosen.prompt_column, chosen.answer_column, *of_teacher)
            lines += chat_template.remarks(tokenizer, prompts, own, read=read)
            if chosen.system_prompt == "" and not is_text:
                lines += _own_system_message(tokenizer, own)
        if not is_text:
            lines += _of_serving(tokenizer, model_name, chosen.chat_template_kwargs)
        if not is_text or vocabulary.beyond(tokenizer):
            lines += vocabulary.remarks(tokenizer, model_name)
        for line in lines:
            logger.info(line)
        failures = sampler.loop.run(_failures(groups, problems))
    if not failures:
        return
    what = f"none of {len(failures)} made-up completions of the first problems got a reward: {failures[0].line}"
    if len({failure.kind for failure in failures}) > 1 or chosen.max_unscored_share == 1:
        logger.warning(what)
        return
    hint = (
        "fix the score method; it may return 0.0 for a completion in an unexpected format (to train anyway:"
        " --max-unscored-share 1)"
    )
    if processes and (hidden := redaction.hidden_variables(chosen.worker_env)):
        hint += f"; it cannot read {', '.join(hidden)} (--worker-env NAME passes a variable on)"
    raise RewardError(what, hint=hint)


def _check_hints(sample: Sequence[tuple[str, Problem]], teacher: str, task: Task) -> None:
    """Raise UsageError if the problems lack the hints without which the trained model cannot teach itself.

    RewardError: a teacher cannot be shown one of the hints.
    """
    with_hints = [(place, problem) for place, problem in sample if has_hint(problem)]
    if not with_hints and teacher == OWN_WEIGHTS:
        raise UsageError(
            f"--teacher {OWN_WEIGHTS}: no problem has a hint, without which the teacher predicts what the policy does",
            hint="give problems a key 'hint' with a text that only the teacher sees, or name another model",
        )
    if with_hints and task.interaction == "agent":
        raise UsageError(
            "the problems have hints for the teacher, but an agent writes its prompts itself",
            hint="use an environment with tools or single completions, or leave the key 'hint' out",
        )
    for place, problem in with_hints:
        try:
            hinted(problem)
        except RewardError as error:
            raise RewardError(f"{place}: {error.message}", hint=error.hint) from error


def _check_prompt(
    place: str,
    problem: Problem,
    groups: GroupSampler,
    vocabulary: Vocabulary,
    sampling: SamplingConfig,
    max_model_len: int | None,
) -> None:
    try:
        prompt = groups.check_prompt(problem)
        vocabulary.check_ids(prompt, lambda: f"the prompt {described(problem['prompt'])}")
    except (RewardError, RejectedRequestError) as error:
        raise RewardError(f"{place}: {error.message}", hint=error.hint) from error
    num_tokens = len(prompt)
    longest = fitting(sampling, max_model_len).longest
    if max_model_len is not None and num_tokens + longest > max_model_len:
        raise RewardError(
            f"the prompt {described(problem['prompt'])} is too long: its {num_tokens:,} tokens and the {longest:,} of"
            f" --max-new-tokens exceed the server's longest sequence of {max_model_len:,} tokens",
            hint="leave such problems out, lower --max-new-tokens, or serve with a larger --max-model-len",
        )


def _check_template(arguments: Mapping[str, Any], template: str) -> None:
    if unused := chat_template.unused_arguments(arguments, template):
        why = "the model's chat template does not use " + ", ".join(unused) if template else "the prompts are text"
        raise UsageError(
            f"--chat-template-kwargs has no effect: {why}",
            hint="leave it out, or use names that occur in the model's chat template",
        )


def _own_system_message(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about the system message that the chat template writes in front of a prompt without one."""
    if text := chat_template.own_system_message(tokenizer, template):
        yield (
            "--system-prompt '' leaves out system messages, but the model's chat template then writes one of its own:"
            f" {described(text)}; to leave it out, too, give the model a chat_template.jinja without it"
        )


def _of_serving(tokenizer: PreTrainedTokenizerBase, model_name: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about a chat template that opens no turn, and about arguments that a server must repeat."""
    if tokenizer.chat_template is not None and (opening := chat_template.missing_opening(tokenizer, arguments)):
        yield (
            f"the chat template of {model_name} ignores add_generation_prompt: prompts end without {opening!r}, with"
            " which it begins a turn of the assistant, so the model has to write that itself; give the model a"
            " chat_template.jinja that writes it"
        )
    if arguments:
        written = shlex.quote(json.dumps(arguments, ensure_ascii=False))
        yield (
            f"the chat template gets {written} in this run alone. To serve the trained model the same way: vllm serve"
            f" FOLDER --default-chat-template-kwargs {written}"
        )


def tried(task: Task) -> tuple[list[tuple[str, Problem]], list[str]]:
    """Return the problems to test, with their positions, and a line for each list of which only a part is tested.

    From a list, these are the first problems, the longest one, the one with the most images, one of each form, and a
    random selection. If problems are generated on demand, these are the first ones.
    """
    problems = iter(task)
    listed = [*islice(problems, length_hint(problems))]
    chosen = []
    lines = []
    for name, whole in (("problem", listed), ("held-out problem", task.held_out())):
        indices = _chosen(whole)
        chosen += [(f"{name} {index + 1} of {len(whole):,}", whole[index]) for index in indices]
        if len(indices) < len(whole):
            lines.append(f"the prompts of {len(indices)} of {len(whole):,} {name}s are tested before the start")
    made = [] if listed else [*islice(problems, NUM_MADE)]
    return [*((f"problem {index + 1}", problem) for index, problem in enumerate(made)), *chosen], lines


def _chosen(problems: Sequence[Problem]) -> list[int]:
    """Return the indices of the problems to test; the first problems of the list come first."""
    first = range(len(problems))[:NUM_PROBLEMS]
    longest = nlargest(1, range(len(problems)), key=lambda index: len(str(problems[index]["prompt"])))
    with_images = [index for index, problem in enumerate(problems) if problem.get("images")]
    most_images = nlargest(1, with_images, key=lambda index: len(problems[index]["images"]))
    forms: dict[Any, int] = {}
    for index, problem in enumerate(problems):
        forms.setdefault(_form(problem), index)
    drawn = random.Random(0).sample(range(len(problems)), min(NUM_TRIED, len(problems)))  # noqa: S311  not a secret
    indices = dict.fromkeys((*first, *longest, *most_images, *islice(forms.values(), NUM_TRIED)))
    num_characters = 0
    for index in drawn:
        num_characters += len(str(problems[index]["prompt"]))
        if num_characters > MOST_CHARACTERS or len(indices) >= NUM_TRIED:
            break
        if not problems[index].get("images"):
            indices[index] = None
    return [*indices]


def _form(problem: Problem) -> Any:
    """Return a value that is equal for problems whose messages have the same roles and keys in the same order."""
    prompt = problem["prompt"]
    if isinstance(prompt, str):
        return str
    return tuple((str(message.get("role")), *map(str, message)) for message in prompt)


async def _failures(groups: GroupSampler, problems: Sequence[Problem]) -> list[FailedScore]:
    """Score until a completion gets a reward; return the failures, or nothing if one got a reward or time is up."""
    failures: list[FailedScore] = []
    try:
        async with asyncio.timeout(LIMIT_S):
            for problem in problems:
                for text in completions(problem):
                    result = await groups.rehearse(problem, text)
                    if not isinstance(result, FailedScore):
                        return []
                    failures.append(result)
    except TimeoutError:
        first = f": {failures[0].line}" if failures else ""
        logger.warning(f"no made-up completion of the first problems got a reward within {LIMIT_S:g} s{first}")
        return []
    finally:
        await groups.close()
    return failures


def completions(problem: Problem) -> Iterator[str]:
    """Yield possible completions: the right answer in several formats, a different number, and an empty text."""
    try:
        answer = str(problem.get("answer", 42))
    except Exception:  # noqa: BLE001  a custom __str__, or an integer with too many digits
        answer = "42"
    yield answer
    yield f"<think>I add.</think>\n<answer>{answer}</answer>\n#### {answer}\n\\boxed{{{answer}}}"
    yield json.dumps({"answer": answer})
    yield "7"
    yield ""
