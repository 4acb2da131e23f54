"""What is learnt from where an Atropos API has it: batches that environments of other processes sampled and scored.

One batch is taken for each step, and none ahead: how far environments run ahead is theirs to bound, by the groups that
wait. The API gives the newest batch first, and nobody tells which weights made it.

Not covered: environments of ours that feed an API (`feeder.py`).
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from bridge.atropos import groups
from bridge.atropos.client import AtroposApi
from bridge.atropos.faults import Bounds, Fault, find
from bridge.atropos.ignored import ignored
from bridge.atropos.protocol import ScoredGroup
from bridge.atropos.registration import NOBODY, longest_sequence, refuse_another_batch_size, register
from bridge.atropos.waiting import Clock, Waiting
from bridge.config import TrainConfig
from bridge.errors import RewardError
from bridge.learn.policy_loss import LossSpec
from bridge.server.endpoint import Endpoint
from bridge.types import Group, Problem
from bridge.weights import skeleton


class AtroposExperience:
    """One run's batches of an Atropos API; the interface is that of `bridge/rollouts/experience.py`."""

    def __init__(
        self,
        config: TrainConfig,
        tell: Callable[[str], None],
        *,
        clock: Clock | None = None,
    ) -> None:
        """Look for the API before anything that takes long.

        Raises:
            AtroposError: it does not answer.
            UsageError: it keeps another trainer's settings, or the model has no tokenizer.
        """
        self.num_drawn = 0
        """Problems taken so far: none, they are the environments'."""
        self.num_retries = 0
        """Requests of the last step that were sent again, those for a batch that the API lost among them."""
        self._config, self._tell, self._clock = config, tell, clock or Clock()
        self._told: set[str] = set()
        self._left_out: Counter[str] = Counter()
        self._num_lost = 0
        self._bounds: Bounds | None = None
        """Known with the first server; None: not registered."""
        self._api = AtroposApi(config.atropos_url, max_retries=config.max_retries, sleep=self._clock.sleep)
        refuse_another_batch_size(self._api, config)
        self._tokenizer = skeleton.tokenizer(config.model_name)
        self._model = skeleton.build(config.model_name, torch.bfloat16).config
        self._note_what_is_lacking()

    def draw(self, count: int) -> list[Problem]:  # noqa: ARG002  the interface's
        """Take no problem: they are the environments'."""
        return []

    def groups(self, endpoint: Endpoint, problems: Sequence[Problem], *, step: int) -> list[Group]:  # noqa: ARG002
        """Wait for a batch, and return it; what cannot be learnt from is among it as groups without completions.

        Raises:
            ServerUnreachableError: the server behind `endpoint`, which environments sample from, is gone.
            AtroposError: the API is gone, or had no batch for too long.
            RewardError: too much of the batch cannot be learnt from.
            UsageError: the API keeps another trainer's settings.
        """
        before = self._api.num_retries + self._num_lost
        waiting = Waiting(
            self._api,
            server_url=endpoint.url,
            batch_size=self._config.batch_size,
            limit_s=self._config.atropos_timeout_s,
            tell=self._tell,
            clock=self._clock,
        )
        while not (batch := self._batch(endpoint, step)):
            waiting.pause()
        self.num_retries = self._api.num_retries + self._num_lost - before
        return self._learnt_from(batch)

    def evaluate(self, endpoint: Endpoint, *, step: int, version: int) -> None:
        """Evaluate nothing: environments do it themselves."""

    def close(self) -> None:
        """Close the connection, and say what was left out in all."""
        self._api.close()
        if self._left_out:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in self._left_out.most_common())
            self._tell(f"{self._left_out.total()} groups of Atropos environments were left out ({kinds})")
        if self._num_lost:
            self._tell(f"{self._num_lost} batches were lost in the Atropos API")

    def _batch(self, endpoint: Endpoint, step: int) -> tuple[ScoredGroup, ...] | None:
        if self._bounds is None:
            self._register(endpoint, step)
        answer = self._api.batch()
        if answer is not None and answer.status is None:
            return answer.batch
        if answer is not None or self._api.info().batch_size == NOBODY:  # started again, or reset, which it fails at
            self._bounds = None
            self._tell(f"the Atropos API at {self._api.url} knows no trainer any more: registering again")
            return None
        self._num_lost += 1
        self._tell_once(
            f"the Atropos API at {self._api.url} lost a whole batch: it cannot write down one that holds NaN or inf;"
            " mend the score or the log-probability of the environment that sends it"
        )
        return None

    def _register(self, endpoint: Endpoint, step: int) -> None:
        longest, whose = longest_sequence(endpoint.url, getattr(self._model, "max_position_embeddings", None))
        how = register(self._api, self._config, longest=longest, step=step)
        self._bounds = Bounds(longest=longest, num_words=self._model.vocab_size)
        self._tell(
            f"the Atropos API at {self._api.url} {how}: batches of {self._config.batch_size} sequences, each of at most"
            f" {longest:,} tokens ({whose} bound)"
        )

    def _learnt_from(self, batch: tuple[ScoredGroup, ...]) -> list[Group]:
        assert self._bounds is not None
        found = [(scored, find(scored, self._bounds)) for scored in batch]
        good = [scored for scored, fault in found if fault is None]
        bad = [self._leave_out(scored, fault) for scored, fault in found if fault is not None]
        self._refuse_share(bad, sum(len(scored.tokens) for scored in batch))
        for line in (line for scored in good for line in ignored(scored, temperature=self._config.temperature)):
            self._tell_once(line)
        whole = [groups.learnt_from(scored, self._decode) for scored in good]
        return [*groups.with_zeros(whole, good, LossSpec.of(self._config).advantage_scale), *bad]

    def _leave_out(self, scored: ScoredGroup, fault: Fault) -> Group:
        self._left_out[fault.kind] += 1
        if self._left_out[fault.kind] == 1:
            whose = "" if scored.env_id is None else f" of environment {scored.env_id}"
            self._tell(f"a group{whose} is left out: {fault.found}; others of this kind are counted")
        return groups.left_out(scored, fault.found)

    def _refuse_share(self, bad: Sequence[Group], num_sequences: int) -> None:
        unscored = [each for group in bad for each in group.unscored]
        if len(unscored) > self._config.max_unscored_share * num_sequences:
            raise RewardError(
                f"{len(unscored)} of the {num_sequences} sequences of a batch are in groups that cannot be learnt from;"
                f" in the last, {unscored[-1].fault}",
                remedy="mend the environment that sends them, or raise --max-unscored-share",
            )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _note_what_is_lacking(self) -> None:
        if self._config.eval_samples:
            self._tell("--eval-samples: nothing is evaluated here, Atropos' environments do it themselves")
        if self._config.mask_truncated:
            self._tell("--mask-truncated: Atropos' environments do not tell which completions were cut off")

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)
