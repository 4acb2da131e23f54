"""The stream of batches that environments in other processes sample, score and push into an Atropos API.

One batch is taken for each step, and none ahead: environments limit how far they run ahead, by the groups that wait.
The API returns the newest batch first, and does not report which weights made it.

Not covered: environments of ours that feed an API (`feeder.py`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bridge.atropos.api import NOBODY, AtroposApi, ScoredGroup, TrainerInfo, TrainerRegistration
from bridge.atropos.groups import Bounds, Flaw, first_flaw, ignored, left_out, to_train_on
from bridge.config import TrainConfig
from bridge.errors import AtroposError, RewardError, UsageError
from bridge.server.client import VllmClient, max_model_len
from bridge.server.endpoint import Endpoint
from bridge.types import Group, TrainedProblems
from bridge.weights import skeleton

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Seconds between two requests for a batch, half as long again each time."""
HEALTH_INTERVAL_S = 5.0
"""Seconds between two checks of the server that samples: environments wait forever for one that died."""
FIRST_REPORT_S = 30.0
"""Seconds without a batch after which the reason is reported, and again whenever the time has doubled."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Time, which tests replace."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class AtroposStream:
    """The batches of one API; see `Stream` for its methods."""

    def __init__(
        self,
        config: TrainConfig,
        tell: Callable[[str], None],
        *,
        run_name: str,
        clock: Clock | None = None,
    ) -> None:
        """Check the API before anything that takes long; environments group their own runs under `run_name`.

        Raises:
            AtroposError: the API does not answer.
            UsageError: the API keeps another trainer's settings, or the model has no tokenizer.
        """
        self.num_retries = 0
        """Those of the last step, which include requests for a batch that the API lost."""
        self._config, self._tell, self._run_name, self._clock = config, tell, run_name, clock or Clock()
        self._told: set[str] = set()
        self._left_out: Counter[str] = Counter()
        self._num_lost = 0
        self._bounds: Bounds | None = None
        """Known once the trainer is registered, which takes a server."""
        rollouts = config.rollouts
        self._api = AtroposApi(rollouts.atropos_url, max_retries=config.sampling.max_retries, sleep=self._clock.sleep)
        found = self._api.info()
        if found.batch_size != NOBODY:
            _refuse_others(self._api, found, {"batch_size": rollouts.batch_size})
        self._tokenizer = skeleton.tokenizer(config.model_name)
        self._model = skeleton.build(config.model_name, torch.bfloat16).config
        if config.evaluation.samples:
            tell("--eval-samples is ignored: Atropos' environments evaluate by themselves")
        if config.loss.mask_truncated:
            tell("--mask-truncated is ignored: Atropos' environments do not report which completions were truncated")

    def served(self, endpoint: Endpoint, version: int) -> None:  # noqa: ARG002  no token's version is known anyway
        """Watch the server of `endpoint`, from which environments sample."""
        self._server_url = endpoint.url

    def resume(self, trained: TrainedProblems) -> None:
        """Skip nothing: the problems are the environments'."""

    def take(self, count: int, *, step: int) -> list[Group]:  # noqa: ARG002  a batch has as many groups as it has
        """Wait for a batch, and return it; groups that cannot be used are in it without completions, at the end.

        Raises:
            ServerUnreachableError: the server that environments sample from is gone.
            AtroposError: the API is gone, or had no batch for too long.
            RewardError: too much of the batch cannot be used.
            UsageError: the API keeps another trainer's settings.
        """
        before = self._api.num_retries + self._num_lost
        batch = next(found for _ in self._pauses() if (found := self._batch(step)))
        self.num_retries = self._api.num_retries + self._num_lost - before
        return self._groups(batch)

    def evaluate(self, *, step: int) -> None:
        """Evaluate nothing: environments do it themselves."""

    def close(self) -> None:
        """Close the connection, and report what was left out in all."""
        self._api.close()
        if self._left_out:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in self._left_out.most_common())
            self._tell(f"{self._left_out.total()} groups of Atropos environments were left out ({kinds})")
        if self._num_lost:
            self._tell(f"{self._num_lost} batches were lost in the Atropos API")

    def _pauses(self) -> Iterator[None]:
        """Yield before each request for a batch, after a pause that grows; watch the server, and report what is wrong.

        Raises:
            ServerUnreachableError: the server that samples is gone.
            AtroposError: it took too long, or the API is gone.
        """
        batch_size, limit_s = self._config.rollouts.batch_size, self._config.rollouts.atropos_timeout_s
        begun = checked = self._clock.now()
        pause_s, report_s = SHORTEST_PAUSE_S, FIRST_REPORT_S
        while True:
            yield
            now = self._clock.now()
            if now - checked >= HEALTH_INTERVAL_S:
                checked = now
                with VllmClient(self._server_url) as server:
                    server.check_health()
            if now - begun >= limit_s:
                why = diagnose(self._api, batch_size)
                raise AtroposError(
                    f"the Atropos API at {self._api.url} had no batch for {limit_s:.0f} s: {why.found}", remedy=why.hint
                )
            if now - begun >= report_s:
                report_s *= 2
                why = diagnose(self._api, batch_size)
                self._tell(f"no batch from the Atropos API for {now - begun:.0f} s: {why.found}")
            self._clock.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def _batch(self, step: int) -> tuple[ScoredGroup, ...] | None:
        if self._bounds is None:
            self._register(step)
        answer = self._api.batch()
        if answer is not None and answer.status is None:
            return answer.batch
        if answer is not None or self._api.info().batch_size == NOBODY:  # restarted, or reset, which breaks /batch
            self._bounds = None
            self._tell(f"the Atropos API at {self._api.url} no longer knows a trainer: registering again")
            return None
        self._num_lost += 1
        self._tell_once(
            f"the Atropos API at {self._api.url} lost a whole batch: it cannot encode NaN or infinity; fix the score or"
            " the log-probability of the environment that sends it"
        )
        return None

    def _register(self, step: int) -> None:
        longest, whose = longest_sequence(self._server_url, getattr(self._model, "max_position_embeddings", None))
        how = self._registered(longest, step)
        self._bounds = Bounds(longest=longest, num_words=self._model.vocab_size)
        batch_size = self._config.rollouts.batch_size
        self._tell(
            f"the Atropos API at {self._api.url} {how}: batches of {batch_size} sequences, each of at most"
            f" {longest:,} tokens ({whose} limit); their staleness is unknown, because Atropos does not report it"
        )

    def _registered(self, longest: int, step: int) -> str:
        """Register before `step`, and return in words what came of it: the API keeps the settings of the first trainer.

        Raises:
            UsageError: the API keeps another trainer's settings.
        """
        checkpoints = self._config.checkpoints
        assert checkpoints.save_path is not None, "derived from the run directory"
        trainer = TrainerRegistration(
            wandb_group=self._run_name,
            wandb_project="bridge",
            batch_size=self._config.rollouts.batch_size,
            max_token_len=longest + 1,  # environments leave out what is as long as this
            checkpoint_dir=str(checkpoints.save_path.absolute()),
            save_checkpoint_interval=checkpoints.save_interval,
            starting_step=step - 1,
            num_steps=self._config.training_steps,
        )
        is_first = self._api.info().batch_size == NOBODY
        if is_first:
            self._api.register(trainer)
        wanted = {"batch_size": trainer.batch_size, "max_token_len": trainer.max_token_len}
        _refuse_others(self._api, self._api.info(), wanted)
        return "registered this trainer" if is_first else "continues with a trainer of the same settings"

    def _groups(self, batch: tuple[ScoredGroup, ...]) -> list[Group]:
        assert self._bounds is not None
        found = [(scored, first_flaw(scored, self._bounds)) for scored in batch]
        good = [scored for scored, flaw in found if flaw is None]
        bad = [self._leave_out(scored, flaw) for scored, flaw in found if flaw is not None]
        self._refuse_share(bad, sum(len(scored.tokens) for scored in batch))
        for line in (
            line for scored in good for line in ignored(scored, temperature=self._config.sampling.temperature)
        ):
            self._tell_once(line)
        return [*(to_train_on(scored, self._decode) for scored in good), *bad]

    def _leave_out(self, scored: ScoredGroup, flaw: Flaw) -> Group:
        self._left_out[flaw.kind] += 1
        if self._left_out[flaw.kind] == 1:
            whose = "" if scored.env_id is None else f" of environment {scored.env_id}"
            self._tell(f"a group{whose} is left out: {flaw.found}; others of this kind are counted")
        return left_out(scored, flaw.found)

    def _refuse_share(self, bad: Sequence[Group], num_sequences: int) -> None:
        unscored = [each for group in bad for each in group.unscored]
        if len(unscored) > self._config.task.max_unscored_share * num_sequences:
            raise RewardError(
                f"{len(unscored)} of the {num_sequences} sequences of a batch are in groups that cannot be used;"
                f" in the last, {unscored[-1].fault}",
                remedy="fix the environment that sends them, or raise --max-unscored-share",
            )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)


def longest_sequence(url: str, max_position_embeddings: int | None) -> tuple[int, str]:
    """Return the tokens of the longest sequence that can be trained on, and whose limit it is.

    Raises:
        UsageError: neither the model nor the server at `url` has one.
    """
    found = {"the model's max_position_embeddings": max_position_embeddings, "the server's": max_model_len(url)}
    bounds = [(bound, whose) for whose, bound in found.items() if bound]
    if not bounds:
        raise UsageError(
            f"neither the model's config.json nor the server at {url} limits the length of a sequence",
            remedy="add max_position_embeddings to config.json",
        )
    return min(bounds)


def _refuse_others(api: AtroposApi, found: TrainerInfo, wanted: Mapping[str, int]) -> None:
    pairs = [(name, getattr(found, name), value) for name, value in wanted.items()]
    differing = [f"{name} {other}, expected {value}" for name, other, value in pairs if other != value]
    if not differing:
        return
    what = f"keeps the settings of another trainer ({'; '.join(differing)})"
    if found.batch_size == NOBODY:
        what = "got groups of environments before it had a trainer, and accepts none any more"
    raise UsageError(
        f"the Atropos API at {api.url} {what}",
        remedy=f"stop the environments, restart run-api or empty it (curl {api.url}/reset_data), then start this"
        " command, and then the environments",
    )


class Diagnosis(NamedTuple):
    """Why an API makes no batch, which it does not report itself."""

    found: str
    hint: str


def diagnose(api: AtroposApi, batch_size: int) -> Diagnosis:
    """Find out why the API makes no batch of `batch_size` sequences.

    Raises:
        AtroposError: the API is gone.
    """
    num_groups, environment = api.status().queue_size, api.environment_status(0)
    waiting = f"{num_groups} groups wait" if num_groups else "no groups wait"
    if environment is None:
        return Diagnosis(
            found=f"no environment is connected, and {waiting}",
            hint=f"start one: python my_environment.py serve --env.rollout_server_url {api.url}, or bridge env;"
            " restart one that was started before the API",
        )
    if not num_groups:
        return Diagnosis(
            found=f"environments have registered, and {waiting}",
            hint="check that they still run, and read their logs: they end at a total_steps of their own, and leave out"
            " groups whose scores are all equal or with too long a sequence; or raise --atropos-timeout-s",
        )
    largest = environment.max_group_size
    waiting = f"{num_groups} groups wait, of up to {largest} sequences each, and"
    if batch_size % largest:
        fitting = -(-batch_size // largest) * largest
        return Diagnosis(
            found=f"{waiting} they make no batch of {batch_size}, which is not a multiple of {largest}",
            hint=f"--batch-size {fitting} --group-size {largest}, or another group size of the environment; restart"
            " run-api for it, and then the environments",
        )
    return Diagnosis(
        found=f"{waiting} they make no batch of {batch_size}",
        hint="read the environments' logs; if they have a min_batch_allocation, each has to send its share",
    )
