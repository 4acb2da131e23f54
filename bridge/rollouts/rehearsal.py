"""Dry run of an environment before anything is started: encode its first prompts, and score made-up completions."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from bridge.config import TaskConfig
from bridge.core import private
from bridge.errors import RewardError, UsageError
from bridge.rollouts.agent_runs import Run, conversations, scored
from bridge.rollouts.conversation import Conversation
from bridge.rollouts.problems import encode
from bridge.rollouts.recorder import Recorder
from bridge.rollouts.recording import Asked, Recording, Tools
from bridge.rollouts.trajectories import as_chat
from bridge.scoring.agent import WithAgent
from bridge.scoring.score import FailedScore, Score, Scores
from bridge.scoring.scorer import Scorer
from bridge.scoring.tools import WithTools
from bridge.types import Completion, Environment, Problem
from bridge.weights import skeleton

NUM_PROBLEMS = 3
MAX_TURNS = 8
"""Turns of an agent, after which it gets none."""
LIMIT_S = 10.0
"""Time limit of all scores together: training gives a slow score the time that it needs."""


def check(
    model_name: str,
    task: TaskConfig,
    environment: Environment,
    recipe: Callable[[], Scores],
    note: Callable[[str], None],
) -> None:
    """Try the first problems and the first held-out ones; `note` gets what is no reason to refuse.

    Raises:
        RewardError: a prompt cannot be encoded, or every score failed in the same way.
        UsageError: the model has no tokenizer, or its chat template does not use an argument that it is given.
    """
    problems = list(islice(environment, NUM_PROBLEMS))
    held_out: list[Problem] = getattr(environment, "held_out", list)()
    processes = 0 if task.reward_processes == 0 else 1
    choices: dict[str, Any] = {"timeout_s": task.reward_timeout_s, "variables": task.worker_env}
    with closing(Scorer(recipe, processes=processes, **choices)) as scorer:
        tokenizer = skeleton.tokenizer(model_name)  # takes seconds, in which the process starts
        tried = [*problems, *held_out[:NUM_PROBLEMS]]
        template = task.chat_template_kwargs
        scores = _scores(scorer, problems)
        if isinstance(environment, WithTools):
            tried = [as_chat(problem) for problem in tried]
            template = Conversation(tokenizer, model_name, tools=environment.schemas, **template).template
            scores = _scores_with_tools(scorer, problems)
        elif isinstance(environment, WithAgent):
            tried = [as_chat(problem) for problem in tried]
            known = conversations(tokenizer, model_name, **template)
            scores = _scores_of_agent(scorer, problems, known, tokenizer)
        for problem in tried:
            if not isinstance(environment, WithAgent):  # which makes prompts of its own
                encode(tokenizer, problem, **template)
        _refuse_unused(task.chat_template_kwargs, tokenizer, tried)
        failures = asyncio.run(_failures(scores))
    if not failures:
        return
    what = f"none of {len(failures)} made-up completions of the first problems got a reward: {failures[0].line}"
    if len({failure.kind for failure in failures}) > 1 or task.max_unscored_share == 1:
        note(what)
        return
    remedy = (
        "fix what scores; it may return 0.0 for a completion of an unexpected form (to train anyway:"
        " --max-unscored-share 1)"
    )
    if processes and (hidden := private.hidden(task.worker_env)):
        remedy += f"; it cannot read {', '.join(hidden)} (--worker-env NAME passes a variable on)"
    raise RewardError(what, remedy=remedy)


def _refuse_unused(arguments: Iterable[str], tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> None:
    """Refuse an argument of the chat template that would be ignored without a word."""
    is_text = all(isinstance(problem["prompt"], str) for problem in problems)
    template = "" if is_text else str(tokenizer.chat_template or "")
    if unused := [name for name in arguments if name not in template]:
        why = "the prompts are text" if not template else f"the model's chat template does not use {', '.join(unused)}"
        raise UsageError(
            f"--chat-template-kwargs has no effect: {why}",
            remedy="leave it out, or give the names that the model's chat template uses",
        )


async def _failures(scores: AsyncGenerator[Score | FailedScore, None]) -> list[FailedScore]:
    """Score until one completion gets a reward; return the failures, or nothing if one did or time is up."""
    failures = []
    try:
        async with asyncio.timeout(LIMIT_S), aclosing(scores):
            async for found in scores:
                if not isinstance(found, FailedScore):
                    return []
                failures.append(found)
    except TimeoutError:
        return []
    return failures


async def _scores(scorer: Scorer, problems: Sequence[Problem]) -> AsyncGenerator[Score | FailedScore, None]:
    for problem in problems:
        for completion in completions(problem):
            (found,) = await scorer.score(problem, [completion])
            yield found


async def _scores_with_tools(scorer: Scorer, problems: Sequence[Problem]) -> AsyncGenerator[Score | FailedScore, None]:
    """Score trajectories that call no tool."""
    for problem in problems:
        for completion in completions(problem):
            async with scorer.trajectory(problem) as trajectory:
                begun = await trajectory.begin()
                yield begun if isinstance(begun, FailedScore) else await trajectory.score(completion)


async def _scores_of_agent(
    scorer: Scorer,
    problems: Sequence[Problem],
    conversation: Callable[[Tools], Conversation],
    tokenizer: PreTrainedTokenizerBase,
) -> AsyncGenerator[Score | FailedScore, None]:
    """Score runs of an agent that gets the same made-up completion in each turn."""
    recorder = Recorder("made-up")

    async def room(_: Asked) -> int:
        return sys.maxsize

    try:
        for problem in problems:
            for text in completions(problem):
                ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
                said = Completion(token_ids=ids, logprobs=(0.0,) * len(ids), text=text, finish_reason="stop")

                async def sample(*_: Any, said: Completion = said) -> Completion:
                    return said

                async with scorer.trajectory(problem) as trajectory:
                    run = Run(Recording(conversation, _ignore), sample, room, max_turns=MAX_TURNS, note=_ignore)
                    yield await scored(run, recorder, trajectory, problem)
    finally:
        await recorder.close()


def _ignore(_: str) -> None:
    """Take no note: nothing of it is trained on."""


def completions(problem: Problem) -> Iterator[str]:
    """Yield what a model might answer: the right answer in several forms, another number, and nothing."""
    answer = str(problem.get("answer", 42))
    yield answer
    yield f"<think>I add.</think>\n<answer>{answer}</answer>\n#### {answer}\n\\boxed{{{answer}}}"
    yield json.dumps({"answer": answer})
    yield "7"
    yield ""
