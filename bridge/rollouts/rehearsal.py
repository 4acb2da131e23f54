"""Try the first problems before anything is started: their prompts become tokens, and something scores a completion.

Not covered: what a problem is (`environments/inspection.py`), and what becomes of faults in training
(`bridge/scoring/faults.py`).
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice

from bridge.config import FeedConfig, TrainConfig
from bridge.errors import RewardError
from bridge.rollouts import data
from bridge.scoring.scorer import Scorer
from bridge.scoring.scoring import Fault, Scores
from bridge.types import Environment, Problem
from bridge.weights import skeleton

NUM_PROBLEMS = 3
LIMIT_S = 10.0
"""For scoring: a score that is slow is judged in training, where it has its time."""


def check(
    config: TrainConfig | FeedConfig,
    environment: Environment,
    recipe: Callable[[], Scores],
    tell: Callable[[str], None],
) -> None:
    """Try the first problems and the first of those held out; `tell` hears what is no reason to refuse.

    Raises:
        RewardError: a prompt cannot be encoded, or every completion that was tried ended in the same fault.
        UsageError: the model has no tokenizer.
    """
    problems = list(islice(environment, NUM_PROBLEMS))
    held_out: list[Problem] = getattr(environment, "held_out", list)()
    processes = 0 if config.reward_processes == 0 else 1
    with closing(Scorer(recipe, processes=processes, timeout_s=config.reward_timeout_s)) as scorer:
        tokenizer = skeleton.tokenizer(config.model_name)  # takes seconds, in which the process starts
        for problem in (*problems, *held_out[:NUM_PROBLEMS]):
            data.encode(tokenizer, problem)
        faults = asyncio.run(_faults(scorer, problems))
    if not faults:
        return
    what = f"{len(faults)} completions were made up for the first problems, and none has a reward: {faults[0].line}"
    if len({fault.kind for fault in faults}) > 1 or config.max_unscored_share == 1:
        tell(what)
        return
    raise RewardError(
        what,
        remedy="fix what scores; it may return 0.0 where a completion has an unexpected form (to train nevertheless:"
        " --max-unscored-share 1)",
    )


async def _faults(scorer: Scorer, problems: Sequence[Problem]) -> list[Fault]:
    """Score until one completion has a reward; return the faults if none has, and nothing if that takes too long."""
    faults = []
    try:
        async with asyncio.timeout(LIMIT_S):
            for problem in problems:
                for completion in completions(problem):
                    (found,) = await scorer.score(problem, [completion])
                    if not isinstance(found, Fault):
                        return []
                    faults.append(found)
    except TimeoutError:
        return []
    return faults


def completions(problem: Problem) -> Iterator[str]:
    """Yield what a model might say: the answer, plain and in the usual forms, another number, and nothing."""
    answer = str(problem.get("answer", 42))
    yield answer
    yield f"<think>I add.</think>\n<answer>{answer}</answer>\n#### {answer}\n\\boxed{{{answer}}}"
    yield json.dumps({"answer": answer})
    yield "7"
    yield ""
