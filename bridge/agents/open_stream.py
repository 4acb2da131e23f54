"""Open the rollout stream of an environment, for single-turn completions, tools or agents."""

import os
from collections.abc import Callable
from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase

from bridge.agents.agent_runs import AgentRuns, conversations
from bridge.agents.conversation import Conversation
from bridge.agents.recorder import Recorder
from bridge.agents.trajectories import Trajectories
from bridge.config import EvaluationConfig, RolloutConfig, SamplingConfig, TaskConfig
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts.encoded_prompts import Prompts
from bridge.rollouts.groups import Completions, GroupSampler
from bridge.rollouts.sampler import Sampler
from bridge.rollouts.stream import EnvironmentStream
from bridge.rollouts.vocabulary import Vocabulary
from bridge.scoring.scorer import Scorer
from bridge.types import Environment, Task
from bridge.weights import skeleton

PER_CORE = 8
"""Concurrent trajectories per CPU core: each has its own process, which mostly waits for the model."""


def group_sampler(
    model_name: str,
    chosen: TaskConfig,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    sampler: Sampler,
    scorer: Scorer,
    *,
    max_turns: int = 1,
    pass_size: int = 1,
) -> GroupSampler:
    """Return the group sampler for the environment's kind of interaction; with tools, verify the chat template.

    `pass_size` is the number of GPUs that compute a pass together.
    """
    template = chosen.chat_template_kwargs
    if task.interaction == "completion":
        return Completions(Prompts(model_name, tokenizer, template, pass_size=pass_size), sampler, scorer)
    if task.interaction == "tools":
        conversation = Conversation(tokenizer, model_name, tools=task.schemas, **template)
        return Trajectories(tokenizer, sampler, scorer, max_turns, conversation)
    known = conversations(tokenizer, model_name, **template)
    return AgentRuns(tokenizer, sampler, scorer, max_turns, known, Recorder(model_name))


def open_stream(
    model_name: str,
    environment: Environment,
    *,
    chosen: TaskConfig,
    sampling: SamplingConfig,
    rollouts: RolloutConfig,
    evaluation: EvaluationConfig,
    seed: int,
    has_teacher: bool = False,
    hosts: int = 1,
    progress: Callable[[int, int], None] = lambda *_: None,
    ranks: Ranks = ALONE,
) -> EnvironmentStream:
    """Prepare everything that does not need a server. With several replicas, the first rank of each samples a share.

    `hosts` is the number of hosts that the ranks run on. With `has_teacher`, groups have the prompts that it sees.
    """
    task = Task.of(environment)
    processes = chosen.reward_processes
    if not (task.in_workers and ranks.is_tp_rank_zero):  # scoring needs no workers, or another rank scores
        processes = 0
    elif processes is None and task.interaction != "completion":  # one process per concurrent trajectory
        at_once = min(rollouts.batch_size, PER_CORE * len(os.sched_getaffinity(0)) * hosts)
        processes = max(1, at_once // ranks.dp_size)
    tokenizer = skeleton.tokenizer(model_name)
    sampler = Sampler(sampling, vocabulary=Vocabulary.of(tokenizer, model_name))
    with ExitStack() as undo:
        scorer = Scorer(
            task.recipe,
            processes=processes,
            timeout_s=chosen.reward_timeout_s,
            tool_timeout_s=rollouts.tool_timeout_s,
            variables=chosen.worker_env,
            call_here=sampler.loop.call_here,
        )
        undo.callback(scorer.close)
        groups = group_sampler(
            model_name, chosen, task, tokenizer, sampler, scorer,
            max_turns=rollouts.max_turns, pass_size=ranks.pass_size,
        )  # fmt: skip
        stream = EnvironmentStream(
            task, groups, sampler, scorer,
            rollouts=rollouts, sampling=sampling, evaluation=evaluation, seed=seed,
            max_unscored_share=chosen.max_unscored_share, has_teacher=has_teacher, progress=progress,
            ranks=ranks,
        )  # fmt: skip
        undo.pop_all()
    return stream
