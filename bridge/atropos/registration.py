"""A trainer's place at an Atropos API, which keeps the first one's settings and tells no later one that it does.

Not covered: fetching batches (`experience.py`), an environment's place (`enrolment.py`).
"""

from collections.abc import Mapping

from bridge.atropos.client import AtroposApi
from bridge.atropos.protocol import Info, TrainerRegistration
from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.run.run_directory import CHECKPOINTS
from bridge.server.client import max_model_len

NOBODY = -1
"""What an API tells instead of settings where no trainer registered."""


def refuse_another_batch_size(api: AtroposApi, config: TrainConfig) -> None:
    """Refuse an API whose batches are another trainer's; one without a trainer is welcome.

    Raises:
        UsageError: another trainer's settings are there.
    """
    found = api.info()
    if found.batch_size != NOBODY:
        _refuse_others(api, found, {"batch_size": config.batch_size})


def register(api: AtroposApi, config: TrainConfig, *, longest: int, step: int) -> str:
    """Register before `step`, for sequences of at most `longest` tokens, and return what came of it in words.

    Raises:
        UsageError: another trainer's settings are there.
    """
    assert config.save_path is not None, "the loop derives it from the run directory"
    folder = config.save_path.absolute()
    trainer = TrainerRegistration(
        wandb_group=(folder.parent if folder.name == CHECKPOINTS else folder).name or "bridge",
        wandb_project="bridge",
        batch_size=config.batch_size,
        max_token_len=longest + 1,  # environments leave out what is as long as this
        checkpoint_dir=str(folder),
        save_checkpoint_interval=config.save_interval,
        starting_step=step - 1,
        num_steps=config.training_steps,
    )
    is_first = api.info().batch_size == NOBODY
    if is_first:
        api.register(trainer)
    _refuse_others(api, api.info(), {"batch_size": trainer.batch_size, "max_token_len": trainer.max_token_len})
    return "has this trainer now" if is_first else "goes on with what a trainer of the same settings left"


def longest_sequence(url: str, max_position_embeddings: int | None) -> tuple[int, str]:
    """Return the tokens of the longest sequence that is trained on, and whose bound it is.

    Raises:
        UsageError: neither the model nor the server at `url` has one.
    """
    found = {"the model's max_position_embeddings": max_position_embeddings, "the server's": max_model_len(url)}
    bounds = [(bound, whose) for whose, bound in found.items() if bound]
    if not bounds:
        raise UsageError(
            f"neither the model's config.json nor the server at {url} tells how long a sequence may be",
            remedy="give config.json a max_position_embeddings",
        )
    return min(bounds)


def _refuse_others(api: AtroposApi, found: Info, wanted: Mapping[str, int]) -> None:
    pairs = [(name, getattr(found, name), value) for name, value in wanted.items()]
    differing = [f"{name} {other}, expected {value}" for name, other, value in pairs if other != value]
    if not differing:
        return
    whose = f"keeps the settings of another trainer ({'; '.join(differing)})"
    if found.batch_size == NOBODY:
        whose = "got groups of environments before it had a trainer, and takes none any more"
    raise UsageError(
        f"the Atropos API at {api.url} {whose}",
        remedy=f"stop the environments, start run-api again or empty it (curl {api.url}/reset_data), then start this"
        " command, and then the environments",
    )
