"""The stream of batches that environments in other processes sample, score and push into an Atropos API.

One batch is taken per step, and none in advance: environments limit how far they run ahead by the number of queued
groups. The API returns the newest batch first. The version of the weights that sampled a token is known only if the
environment sends it, as Bridge's do.

With several ranks, the first one talks to the API and sends every batch to all others. Each rank checks its own server.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import torch

from bridge.atropos.api import NO_TRAINER, AtroposApi, ScoredGroup, TrainerInfo
from bridge.atropos.scored_groups import flaws, ignored, left_out, to_train_on
from bridge.config import CheckpointConfig, EvaluationConfig, LossConfig, RolloutConfig, SamplingConfig
from bridge.core.logs import info_once, warn_once
from bridge.errors import AtroposError, RewardError, UsageError
from bridge.ranks.world import ALONE, Ranks
from bridge.server.client import VllmClient, max_model_len
from bridge.server.endpoint import Endpoint
from bridge.types import Group, TrainedProblems
from bridge.weights import skeleton

logger = logging.getLogger(__name__)

SHORTEST_PAUSE_S = 0.05
"""Pause in seconds before the second request for a batch; each further pause is 1.5 times as long."""
LONGEST_PAUSE_S = 1.0
"""Longest pause between two requests for a batch."""
HEALTH_INTERVAL_S = 5.0
"""Seconds between two checks of the server that samples, because environments wait forever for a dead server."""
POLLED_PORTS = range(9004, 9008)
"""Local ports that an environment polls if its `config_init` returns a single server instead of a list.

It ignores the configured address, and waits forever if no server listens on these ports.
Source: atroposlib 0.4.0, `ServerManager.__init__`.
"""
FIRST_REPORT_S = 30.0
"""Seconds without a batch after which the reason is logged; logged again each time the wait has doubled."""


class AtroposStream:
    """Takes batches from one API."""

    skipped: tuple[Group, ...] = ()
    num_in_flight = 0
    """Always 0: the groups in flight belong to the environments."""

    def __init__(
        self,
        model_name: str,
        *,
        rollouts: RolloutConfig,
        sampling: SamplingConfig,
        loss: LossConfig,
        evaluation: EvaluationConfig,
        checkpoints: CheckpointConfig,
        training_steps: int,
        max_unscored_share: float,
        run_name: str,
        ranks: Ranks = ALONE,
    ) -> None:
        """Check the API first, before anything slow. Environments group their own runs under `run_name`.

        The API gets `training_steps` and the folder of `checkpoints`. Settings in `loss` and `evaluation` that have no
        effect are logged.

        Raises:
            AtroposError: the API does not answer.
            UsageError: the API keeps a different trainer's settings, or the model has no tokenizer.
        """
        self.num_retries = 0
        """Retries in the last step, including requests for batches that the API lost."""
        self._rollouts = rollouts
        self._sampling = sampling
        self._checkpoints = checkpoints
        self._training_steps = training_steps
        self._max_unscored_share = max_unscored_share
        self._run_name = run_name
        self._ranks = ranks
        self._left_out: Counter[str] = Counter()
        self._num_lost = 0
        self._fetched: list[Group] = []
        """Groups fetched for the next step; kept while a lost server of any rank is restarted."""
        self._longest: int | None = None
        """Length of the longest sequence in tokens; None until the trainer is registered, which needs a server."""
        api = AtroposApi(rollouts.atropos_url, max_retries=sampling.max_retries)
        with closing(api):
            ranks.run_on_rank_zero(lambda: _refuse_others(api, batch_size=rollouts.batch_size))
        tokenizer = skeleton.tokenizer(model_name)
        self._decode = lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))
        self._model = skeleton.build(model_name, torch.bfloat16).config.get_text_config()
        if evaluation.samples:
            logger.info("--eval-samples is ignored: Atropos environments run their own evaluations")
        if loss.mask_truncated:
            logger.info(
                "--mask-truncated is ignored: Atropos environments do not report which completions were truncated"
            )
        self._api = AtroposApi(rollouts.atropos_url, max_retries=sampling.max_retries)

    def served(self, endpoint: Endpoint, version: int) -> None:  # noqa: ARG002  each token has its own
        self._server_url = endpoint.url
        self._server_urls = self._ranks.one_per_replica(self._ranks.all_gather_object(endpoint.url))

    def resume(self, trained: TrainedProblems) -> None:
        """Do nothing: the environments choose the problems."""

    def take(self, count: int, *, step: int) -> list[Group]:  # noqa: ARG002  the API decides how many groups a batch has
        """Wait for a batch, and return its groups; unusable groups come last, without completions.

        Raises:
            ServerUnreachableError: the server that environments sample from does not answer.
            AtroposError: the API does not answer, or has had no batch for too long.
            RewardError: too much of the batch is unusable.
            UsageError: the API keeps a different trainer's settings.
        """
        before = self._api.num_retries + self._num_lost
        polls = self._poll(step)
        groups = None
        while groups is None:
            groups = self._ranks.run_and_gather(lambda: next(polls))[0]
        self.num_retries = self._api.num_retries + self._num_lost - before
        self._fetched = []
        return groups

    def evaluate(self, *, step: int) -> None:
        """Do nothing: environments run their own evaluations."""

    def close(self) -> None:
        """Close the connection, and log how much was left out in total."""
        self._api.close()
        if self._left_out:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in self._left_out.most_common())
            logger.warning(f"{self._left_out.total()} groups of Atropos environments were left out ({kinds})")
        if self._num_lost:
            logger.warning(f"{self._num_lost} batches were lost in the Atropos API")

    def _poll(self, step: int) -> Iterator[list[Group] | None]:
        """Yield None until a batch arrives, checking the server after each; then, on rank 0, yield the batch's groups.

        The pause between two requests for a batch grows; the reason for a long wait is logged.

        Raises:
            ServerUnreachableError: this rank's server does not answer.
            AtroposError: the wait took too long, or the API does not answer.
        """
        while not self._ranks.is_rank_zero:
            yield None
            self._check_server()
        batch_size = self._rollouts.batch_size
        limit_s = self._rollouts.atropos_timeout_s
        begun = checked = time.monotonic()
        pause_s = SHORTEST_PAUSE_S
        report_s = FIRST_REPORT_S
        while not self._fetched:
            if batch := self._batch(step):
                self._fetched = self._groups(batch)
                break
            now = time.monotonic()
            if now - checked >= HEALTH_INTERVAL_S:
                checked = now
                yield None
                self._check_server()
            if now - begun >= min(limit_s, report_s):
                reason, hint = diagnose(self._api, batch_size)
                if now - begun >= limit_s:
                    raise AtroposError(
                        f"the Atropos API at {self._api.url} had no batch for {limit_s:.0f} s: {reason}", hint=hint
                    )
                report_s *= 2
                logger.warning(f"no batch from the Atropos API for {now - begun:.0f} s: {reason}; {hint}")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        yield self._fetched

    def _check_server(self) -> None:
        if self._ranks.is_tp_rank_zero:
            with VllmClient(self._server_url) as server:
                server.check_health()

    def _batch(self, step: int) -> tuple[ScoredGroup, ...] | None:
        if self._longest is None:
            self._longest = self._register(step)
        answer = self._api.batch()
        if answer is not None and answer.status is None:
            return answer.batch
        if answer is not None or self._api.info().batch_size == NO_TRAINER:  # a reset breaks /batch
            self._longest = None
            logger.warning(f"the Atropos API at {self._api.url} has lost its trainer's registration: registering again")
            return None
        self._num_lost += 1
        warn_once(
            logger,
            f"the Atropos API at {self._api.url} lost a whole batch: it cannot encode NaN or infinity; fix the"
            " environment that sends such a score or log-probability",
        )
        return None

    def _register(self, step: int) -> int:
        """Register before `step`, and return the longest sequence in tokens.

        The API keeps the settings of the first trainer.

        Raises:
            UsageError: the API keeps a different trainer's settings.
        """
        longest, whose = longest_sequence(self._server_url, getattr(self._model, "max_position_embeddings", None))
        checkpoints = self._checkpoints
        batch_size = self._rollouts.batch_size
        assert checkpoints.save_path is not None, "derived from the run directory"
        max_token_len = longest + 1  # environments leave out sequences of this length or more
        is_first = self._api.info().batch_size == NO_TRAINER
        if is_first:
            self._api.register(
                TrainerInfo(batch_size=batch_size, max_token_len=max_token_len),
                wandb_group=self._run_name,
                wandb_project="bridge",
                checkpoint_dir=str(checkpoints.save_path.absolute()),
                save_checkpoint_interval=checkpoints.save_interval,
                starting_step=step - 1,
                num_steps=self._training_steps,
            )
        _refuse_others(self._api, is_registered=True, batch_size=batch_size, max_token_len=max_token_len)
        how = "registered this trainer" if is_first else "already has a trainer with the same settings"
        logger.info(
            f"the Atropos API at {self._api.url} {how}: batches of {batch_size} sequences, each of at most"
            f" {longest:,} tokens ({whose} limit); staleness is known only for sequences from `bridge env`"
        )
        if len(self._server_urls) > 1:
            logger.info(
                f"environments can sample from all servers: bridge env --server-url {','.join(self._server_urls)}"
            )
        return longest

    def _groups(self, batch: tuple[ScoredGroup, ...]) -> list[Group]:
        assert self._longest is not None
        good = list[ScoredGroup]()
        bad = list[Group]()
        for scored in batch:
            flaw = next(flaws(scored, longest=self._longest, num_words=self._model.vocab_size), None)
            if flaw is None:
                good.append(scored)
                continue
            kind, fault = flaw
            bad.append(left_out(scored, fault))
            self._left_out[kind] += 1
            if self._left_out[kind] == 1:
                whose = "" if scored.env_id is None else f" of environment {scored.env_id}"
                logger.warning(f"a group{whose} is left out: {fault} (reported once; all are counted)")
        unscored = [completion for group in bad for completion in group.unscored]
        num_sequences = sum(len(scored.tokens) for scored in batch)
        if len(unscored) > self._max_unscored_share * num_sequences:
            raise RewardError(
                f"{len(unscored)} of the {num_sequences} sequences of a batch are in groups that cannot be used;"
                f" in the last, {unscored[-1].fault}",
                hint="fix the environment that sends them, or raise --max-unscored-share",
            )
        for scored in good:
            for line in ignored(scored, temperature=self._sampling.temperature):
                info_once(logger, line)
        return [*(to_train_on(scored, self._decode) for scored in good), *bad]


def longest_sequence(url: str, max_position_embeddings: int | None) -> tuple[int, str]:
    """Return the length in tokens of the longest sequence that can be trained on, and where this limit comes from.

    Raises:
        UsageError: neither the model nor the server at `url` has a limit.
    """
    limits = [(max_position_embeddings, "the model's max_position_embeddings"), (max_model_len(url), "the server's")]
    bounds = [(bound, whose) for bound, whose in limits if bound]
    if not bounds:
        raise UsageError(
            f"neither the model's config.json nor the server at {url} limits the length of a sequence",
            hint="add max_position_embeddings to config.json",
        )
    return min(bounds)


def _refuse_others(api: AtroposApi, *, is_registered: bool = False, **wanted: int) -> None:
    """Raise UsageError if the API's settings differ from those `wanted`.

    An API without settings is free to use, unless this trainer `is_registered` there and should have set them.
    """
    kept = api.info()
    is_free = kept.batch_size == NO_TRAINER
    differing = [
        f"{name} {getattr(kept, name)}, expected {value}"
        for name, value in wanted.items()
        if getattr(kept, name) != value
    ]
    if not differing or (is_free and not is_registered):
        return
    what = f"keeps the settings of a different trainer ({'; '.join(differing)})"
    if is_free:
        what = "received groups before a trainer registered, and no longer accepts a trainer"
    raise UsageError(
        f"the Atropos API at {api.url} {what}",
        hint=f"stop the environments, restart run-api or empty it (curl {api.url}/reset_data), then start this"
        " command, and then the environments",
    )


def diagnose(api: AtroposApi, batch_size: int) -> tuple[str, str]:
    """Return why the API does not form a batch of `batch_size` sequences, which it does not report, and a hint.

    Raises:
        AtroposError: the API does not answer.
    """
    environment = api.environment_status(0)
    if environment is None:
        reason = "no environment is connected"
        hint = (
            f"start one: python my_environment.py serve --env.rollout_server_url {api.url}, or bridge env; restart one"
            " that was started before the API"
        )
    elif not environment.queue_size:
        reason = "environments have registered, but no groups are queued"
        hint = (
            "check that they are still running, and read their logs: they stop at their own total_steps, and leave out"
            " groups whose scores are all equal, or with a sequence that is too long. An environment that sends no"
            f" requests to the server may poll ports {POLLED_PORTS[0]} to {POLLED_PORTS[-1]} regardless of"
            " --openai.base_url: name the server twice, in a list under `openai:` in a file for --config. Or raise"
            " --atropos-timeout-s"
        )
    else:
        largest = environment.max_group_size
        reason = (
            f"{environment.queue_size} groups of up to {largest} sequences are queued, but do not form a batch of"
            f" {batch_size}"
        )
        hint = "read the environments' logs; if they have a min_batch_allocation, each must send its share"
        if batch_size % largest:
            reason += f", which is not a multiple of {largest}"
            hint = (
                f"--batch-size {-(-batch_size // largest) * largest} --group-size {largest}, or a different group size"
                " in the environment; then restart run-api, and after it the environments"
            )
    return reason, hint
