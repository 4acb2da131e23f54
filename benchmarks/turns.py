"""The cost of turns with a tool: trajectories of several turns, compared with the same number of tokens in one turn.

    python -m benchmarks.turns --size 7b

Both sides use a run's own rollout stream, alternately on one server. One has an environment with a tool that takes 200
ms, in as many processes as a run would have; the other has the same prompts without a tool. The weights are random, so
a turn ends after a fixed number of tokens, and each turn but the last counts as a tool call: all trajectories wait for
the tool at the same time, so overlap cannot hide it. The tool is also measured without the model. `bound` is the ratio
if turns cost nothing but this time; `other_s` is what they cost beyond it. Every round uses new seeds, so that no
sampled token is in the prefix cache from an earlier round.

To try it on a CPU: `--size tiny --trajectories 8 --group 4 --rounds 2`.
"""

import argparse
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import _results, _servers, _work
from benchmarks._models import SIZES, make_dummy_model
from benchmarks._results import say
from bridge.agents import open_stream
from bridge.agents.conversation import Conversation
from bridge.agents.tool_calls import Call
from bridge.config import SamplingConfig, TrainConfig
from bridge.core import logs
from bridge.core.concurrency import gather_or_cancel
from bridge.rollouts.sampler import Sampler
from bridge.rollouts.servers import Server
from bridge.rollouts.stream import EnvironmentStream
from bridge.scoring.score import FailedScore
from bridge.scoring.scorer import Scorer
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Problem
from bridge_cli.demo_model import TEMPLATE
from bridge_environments import registry

AIM = 0.8
"""Target: the smallest acceptable ratio."""
TEMPLATE_TOKENS = 32
"""Most tokens that the chat template adds to a message."""
COLUMNS = {
    "turns_tokens_per_s": "turns tokens/s", "one_turn_tokens_per_s": "one turn tokens/s", "ratio": "ratio",
    "bound": "bound", "turns_s": "turns s", "one_turn_s": "one turn s", "tool_s": "tool s", "other_s": "other s",
}  # fmt: skip


class Counted(Sampler):
    """Ends each turn after a fixed number of tokens, as if the model had ended all turns but the last by itself."""

    def __init__(self, config: SamplingConfig, *, turns: int, tokens: int, **other: Any) -> None:
        super().__init__(config, **other)
        self._num_turns = turns
        self._num_tokens = tokens

    async def one(
        self,
        servers: Sequence[Server],
        prompt: tuple[int, ...],
        *,
        num_samples: int,
        seed: int,
        index: int = 0,
        **other: Any,
    ) -> tuple[Completion, ...]:
        """Return completions of that many tokens; `index` counts the turns of all trajectories."""
        counted = {**other, "max_tokens": self._num_tokens}
        completions = await super().one(servers, prompt, num_samples=num_samples, seed=seed, index=index, **counted)
        is_last = (index + 1) % self._num_turns == 0
        return completions if is_last else tuple(replace(one, finish_reason="stop") for one in completions)


class Calling(Conversation):
    """Treats every turn as a tool call."""

    def __init__(self, *given: Any, tool_s: float, **other: Any) -> None:
        super().__init__(*given, **other)
        self._call = Call(name="wait", arguments={"seconds": tool_s})

    def read(self, token_ids: Sequence[int], *, until: str = "") -> tuple[str, tuple[Call, ...]]:
        """Return a tool call, after parsing the turn as a run would."""
        text, calls = super().read(token_ids, until=until)
        return text, calls or (self._call,)

    def tokens_between(self, calls: Sequence[Call], answers: Sequence[Any], last: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the tokens after the turn's end token, which has no embedding in this model."""
        return super().tokens_between(calls, answers, self._end_id)


def main() -> None:
    """Measure both sides; write the results."""
    options = flags().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(options.size, folder / "model")
        longest = math.ceil((_work.PROMPT_TOKENS + TEMPLATE_TOKENS + longest_completion(options)) / 128) * 128
        command = _servers.serve_command(model, folder, max_model_len=longest)
        with _servers.served(command, folder / "serve.log") as url:
            row = measure(url, model, options)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    path = _results.write("turns", {**settings, **row}, options.out)
    say(f"{path}\n{table(row)}")


def flags() -> argparse.ArgumentParser:
    made = _results.parser(__doc__)
    made.add_argument("--size", choices=SIZES, default="7b")
    made.add_argument("--trajectories", type=int, default=64, help="trajectories of a round")
    made.add_argument("--group", type=int, default=8, help="trajectories of a prompt")
    made.add_argument("--turns", type=int, default=4, help="turns of a trajectory")
    made.add_argument("--tokens", type=int, default=256, help="sampled tokens of a turn")
    made.add_argument("--tool-ms", type=float, default=200, help="time that a call of the tool takes")
    made.add_argument("--rounds", type=int, default=5, help="rounds per side, alternating")
    return made


def make_model(size: str, folder: Path) -> Path:
    """Write a model without weight files, with a chat template for tools; its end token cannot be sampled."""
    make_dummy_model(size, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def longest_completion(options: argparse.Namespace) -> int:
    """Return the most tokens after a prompt: those of all turns and of the tool answers between them."""
    return int(options.turns * (options.tokens + _work.ANSWER_TOKENS + TEMPLATE_TOKENS))


def measure(url: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of both sides, of their per-round ratios, and of only the tool, after one warm-up round."""
    num_tokens, tool_s = options.turns * options.tokens, options.tool_ms / 1e3
    with (
        logs.handled_by(logging.StreamHandler()),
        closing(stream(_work.Waiting, model, options, turns=options.turns)) as with_tool,
        closing(stream(_work.Hashed, model, options, turns=1)) as without,
    ):
        for one in (with_tool, without):
            one.served(Endpoint(url=url), 0)
        sides: tuple[Callable[[int], None], ...] = (
            partial(sample, with_tool, options, options.turns),
            partial(sample, without, options, 1),
            lambda _: with_tool._sampler.loop.run(tools_alone(with_tool._scorer, options)),
        )
        seconds: list[list[float]] = [[], [], []]
        for number in range(options.rounds + 1):
            for index in sorted(range(len(sides)), reverse=number % 2 == 1):
                begun = time.perf_counter()
                sides[index](number)
                seconds[index].append(time.perf_counter() - begun)
    turns, one_turn, tool = (column[1:] for column in seconds)
    turns_s, one_turn_s, alone_s = map(statistics.median, (turns, one_turn, tool))
    ratio = statistics.median(one / several for one, several in zip(one_turn, turns, strict=True))
    processes = len(with_tool._scorer._workers)
    if processes < options.trajectories:
        say(f"{processes} of {options.trajectories} trajectories at once: {open_stream.PER_CORE} per core")
    return {
        "turns_tokens_per_s": options.trajectories * num_tokens / turns_s,
        "one_turn_tokens_per_s": options.trajectories * num_tokens / one_turn_s,
        "ratio": ratio, "is_fast_enough": ratio >= AIM, "bound": one_turn_s / (one_turn_s + alone_s),
        "turns_s": turns_s, "one_turn_s": one_turn_s, "tool_s": alone_s, "waits_s": (options.turns - 1) * tool_s,
        "other_s": turns_s - one_turn_s - alone_s, "processes": processes,
        "seconds": {"turns": turns, "one_turn": one_turn, "tool": tool},
    }  # fmt: skip


def stream(kind: type[_work.Hashed], model: Path, options: argparse.Namespace, *, turns: int) -> EnvironmentStream:
    """Return a run's stream whose trajectories have this number of turns."""
    config = TrainConfig.of(
        model_name=str(model), environment=f"{_work.__file__}:{kind.__name__}", batch_size=options.trajectories,
        group_size=options.group, max_new_tokens=longest_completion(options), max_turns=turns, seed=turns,
        max_unscored_share=0.0,
    )  # fmt: skip
    counted = partial(Counted, turns=turns, tokens=options.turns * options.tokens // turns)
    calling = partial(Calling, tool_s=options.tool_ms / 1e3)
    with patch.object(open_stream, "Sampler", counted), patch.object(open_stream, "Conversation", calling):
        return open_stream.open_stream(
            config.model_name, registry.load(config.task),
            chosen=config.task, sampling=config.sampling, rollouts=config.rollouts, evaluation=config.evaluation,
            seed=config.seed,
        )  # fmt: skip


def sample(stream: EnvironmentStream, options: argparse.Namespace, turns: int, number: int) -> None:
    """Sample one round, and check its numbers of tokens and turns."""
    groups = stream.take(options.trajectories // options.group, step=number + 1)
    shapes = [(completion.num_sampled, completion.num_turns) for group in groups for completion in group.completions]
    expected = [(options.turns * options.tokens, turns)] * options.trajectories
    assert shapes == expected, f"expected {expected[0]} tokens and turns, found {sorted(set(shapes))}"


async def tools_alone(scorer: Scorer, options: argparse.Namespace) -> None:
    """Run the trajectories of a round without a model: reset, calls and reward."""
    problem: Problem = {"prompt": ""}

    async def one() -> None:
        async with scorer.trajectory(problem) as tools:
            begun = await tools.begin()
            answers = [await tools.call("wait", {"seconds": options.tool_ms / 1e3}) for _ in range(options.turns - 1)]
            all_found = begun, *answers, await tools.score("")
        assert not any(isinstance(scores, FailedScore) for scores in all_found), all_found

    await gather_or_cancel(one() for _ in range(options.trajectories))


def table(row: dict[str, Any]) -> str:
    return _results.table([list(COLUMNS.values()), [f"{row[name]:.3g}" for name in COLUMNS]])


if __name__ == "__main__":
    main()
