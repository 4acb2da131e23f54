"""A learner without a server, for tests of what training computes."""

from bridge.config import TrainConfig
from bridge.engine.make_trainable import prepared_of, trainable_of
from bridge.learn.policy_loss import LossSpec
from bridge.optimizers import factory
from bridge.ranks.world import ALONE, Ranks
from bridge.run.learner import Learner, log_uncorrected
from bridge.weights.attach import OpenedModel


def made(
    config: TrainConfig,
    opened: OpenedModel,
    *,
    max_model_len: int | None = None,
    experts: tuple[int, int] | None = None,
    ranks: Ranks = ALONE,
) -> Learner:
    prepared = prepared_of(config.compute, opened, max_model_len=max_model_len, experts=experts, ranks=ranks)
    trainable = trainable_of(
        opened, prepared,
        compute=config.compute, optimizer=config.optimizer, lr=config.learning_rate, loss=config.loss,
        sampling=config.sampling, num_groups=config.groups_per_batch, replicas=config.replicas, hosts=config.hosts,
        seed=config.seed, has_adapter=config.mode == "lora_only", model_name=config.model_name,
        max_model_len=max_model_len, ranks=ranks,
    )  # fmt: skip
    log_uncorrected(
        config.loss, max_staleness=config.rollouts.max_staleness, restart_interval=config.publishing.restart_interval
    )
    return Learner(trainable, LossSpec.of(config.loss), factory.schedule(config.optimizer, config.training_steps))
