"""What a resumed run may change: its position in the data must stay valid, and all other changes are reported.

A checkpoint stores the number of problems that its weights were trained on. With different problems, or a different
seed for their order, this number would refer to different problems: some would come twice in an epoch, others never.
"""

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import length_hint
from typing import Any

from bridge.checkpoints.checkpoint import SavedCheckpoint
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.config.choices import flag, flattened
from bridge.core import redaction
from bridge.core.foreign_code import shortened
from bridge.errors import UsageError
from bridge.optimizers import factory
from bridge.rollouts import training_rows
from bridge.rollouts.training_rows import TrainingRow
from bridge.run.saving import Order
from bridge.types import Environment, Problem

MOST_COMPARED = 20_000
"""Maximum number of a list's problems that are compared, evenly spaced; its length is compared, too."""
NUM_FIRST = 64
"""Number of problems that are compared if the problems may be endless."""
MAY_DIFFER = {
    "resume", "run_dir", "save_path", "training_steps", "restarts", "rendezvous", "vllm_config_path", "vllm_port",
    "vllm_host", "server_url", "servers",
}  # fmt: skip
"""Choices about how long and where a run trains, whose changes are not reported."""
ENDING = ("linear", "cosine")
"""Learning rate schedules that depend on the number of steps."""


def digest(environment: Environment) -> str:
    """Return a string that identifies an environment's problems and their order: their number, and a hash of prompts.

    System messages are left out: a resumed run may change them.
    """
    problems = iter(environment)
    length = length_hint(problems)
    compared = list(islice(problems, length or NUM_FIRST))
    total = hashlib.blake2b(digest_size=16)
    for problem in compared[:: max(1, length // MOST_COMPARED)]:
        total.update(_text(problem).encode(errors="backslashreplace") + b"\0")
    return f"{length or f'first {len(compared)}'}:{total.hexdigest()}"


def _text(problem: Problem) -> str:
    prompt: Any = problem["prompt"]
    if isinstance(prompt, str):
        return prompt
    without_instructions = [message for message in prompt if message["role"] not in ("system", "developer")]
    contents = [message.get("content") for message in without_instructions or prompt]
    return contents[0] if len(contents) == 1 and isinstance(contents[0], str) else repr(contents)


def order_of(config: TrainConfig, environment: Environment | None, rows: Sequence[TrainingRow]) -> Order:
    """Return what the order of a run's problems and rows depends on."""
    if environment is None and not rows:
        return Order()
    return Order(
        seed=config.seed,
        problems=None if environment is None else digest(environment),
        rows=training_rows.digest(rows) if rows else None,
    )


def check(
    source: SavedCheckpoint, config: TrainConfig, environment: Environment | None, rows: Sequence[TrainingRow] = ()
) -> list[str]:
    """Return the changes since the checkpoint, one line each.

    `config` is what the user chose for the resumed run; `environment` has the problems that it trains on, unless
    rollouts come from elsewhere, and `rows` those of a file.

    Raises:
        UsageError: the position in the data is not valid with these choices.
    """
    progress = source.progress
    before = _choices(RunDirectory.of_checkpoint(source.folder, saved_by=progress.run_dir))
    now = flattened(TrainConfig, config.model_dump(mode="json"))
    differing = {key for key, value in now.items() if key in before and before[key] != value}
    seed = before.get("seed") if progress.seed is None else progress.seed
    if progress.step < config.num_row_steps:
        _check_rows(source, before, config, rows)
    if environment is not None and seed is not None and seed != config.seed:
        raise UsageError(
            f"--seed {config.seed}: {source.folder} was trained on {progress.problems_drawn:,} problems in the order of"
            f" --seed {seed}; with a different seed, they would be different problems",
            hint=f"--seed {seed}, or {_new_run_hint(source, config.mode)}",
        )
    lines = [*_changed(before, now, differing - MAY_DIFFER, progress.step)]
    if "training_steps" in differing and config.optimizer.lr_scheduler_type in ENDING:
        num_updates = progress.step * config.optimizer.updates_per_step
        old_rate, new_rate = (
            factory.schedule(config.optimizer, steps)(num_updates)
            for steps in (before["training_steps"], config.training_steps)
        )
        lines.append(
            f"training_steps {before['training_steps']} -> {config.training_steps}: from here on the learning rate is"
            f" that of a {config.optimizer.lr_scheduler_type} schedule over {config.training_steps} steps"
            f" (at step {progress.step + 1} {new_rate:.2g} of --lr instead of {old_rate:.2g})"
        )
    given = None if environment is None else digest(environment)
    if given is None or progress.problems is None or given == progress.problems:
        return lines
    (old, _), (new, _) = progress.problems.split(":"), given.split(":")
    are_lists = old.isdecimal() and new.isdecimal()
    if are_lists or differing & {"environment", "data"}:
        counts = f" ({old} then, {new} now)" if old != new else ""
        raise UsageError(
            f"these are not the problems that {source.folder} was trained on{counts}: the first"
            f" {progress.problems_drawn:,} of them would be skipped, and problems of the old run could repeat",
            hint=f"give the same {flag('data' if config.task.data else 'environment')}, or"
            f" {_new_run_hint(source, config.mode)}",
        )
    lines.append(
        f"the environment's first problems differ from those of the run, but {progress.problems_drawn:,} of them are"
        " skipped anyway; let __iter__ yield the same problems each time"
    )
    return lines


def _check_rows(
    source: SavedCheckpoint, before: Mapping[str, Any], config: TrainConfig, rows: Sequence[TrainingRow]
) -> None:
    """Raise UsageError if the rows, their order or their number in a batch changed before the last step on rows."""
    progress = source.progress
    if progress.rows is None:  # the steps before it were not on rows
        return
    key = config.rows_key
    where = f"{source.folder} is from step {progress.step} of {config.num_row_steps} on rows"
    if training_rows.digest(rows) != progress.rows:
        raise UsageError(
            f"{flag(key)} {config.get(key)}: these are not the rows that the run trained on; {where}",
            hint=f"give the same {flag(key)}, or {_new_run_hint(source, config.mode)}",
        )
    for changed in ("seed", "batch_size"):
        if before.get(changed, config.get(changed)) != config.get(changed):
            raise UsageError(
                f"{flag(changed)} {config.get(changed)}: {where} in batches of {before['batch_size']} in the order of"
                f" --seed {before['seed']}; some rows would come twice, others never",
                hint=f"{flag(changed)} {before[changed]}, or {_new_run_hint(source, config.mode)}",
            )


def _new_run_hint(source: SavedCheckpoint, mode: str) -> str:
    """Return a hint about how to start a new run from the checkpoint's weights."""
    if mode == "lora_only":
        exported = f"bridge export {shlex.quote(str(source.folder))} --out FOLDER"
        return f"start a new run from its weights: {exported}, then --model FOLDER without --resume"
    return f"start a new run from its weights: --model {shlex.quote(str(source.folder))}, without --resume"


def _choices(run: RunDirectory) -> Mapping[str, Any]:
    """Return the run's configuration as the user chose it, by key; empty if its directory was removed."""
    try:
        return run.choices(derived=False)
    except (OSError, ValueError):
        return {}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], keys: set[str], step: int) -> Iterator[str]:
    old = redaction.redacted(before)
    new = redaction.redacted(now)
    changes = [f"{key} {_shown(old[key])} -> {_shown(new[key])}" for key in now if key in keys]
    if changes:
        yield f"changed since step {step}: {', '.join(changes)}"


def _shown(value: Any) -> str:
    return "default" if value is None else shortened(re.sub(r"\.0$", "", str(value)))
