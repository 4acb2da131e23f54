"""Read the rows that a run trains on from a file, as token ids: for `--loss sft`, `--loss dpo` and a warm-up.

They are read like problems (`dataset.py`), and encoded at once (`bridge/rollouts/training_rows.py`), so that a row that
the model's chat template cannot render is found before anything is started.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.checks import model
from bridge.config import TrainConfig
from bridge.config.choices import flag
from bridge.errors import RejectedRequestError, RewardError
from bridge.rollouts.training_rows import RowEncoder, TrainingRow, fitting
from bridge.rollouts.vocabulary import Vocabulary
from bridge.weights import skeleton
from bridge_environments import dataset


def load(config: TrainConfig, max_model_len: int | None) -> list[TrainingRow]:
    """Return the rows of the file that the configuration names; empty if it trains on none.

    Rows of more than `max_model_len` tokens are left out, and counted in the log; None: the model's own limit.

    Raises:
        UsageError: there is no such file.
        RewardError: a row is bad, or all are too long.
    """
    key = config.rows_key
    if not key:
        return []
    tokenizer = skeleton.tokenizer(config.model_name)
    vocabulary = Vocabulary.of(tokenizer, config.model_name)
    encoder = RowEncoder(tokenizer, config.task.chat_template_kwargs, tokenizer.eos_token_id)
    encode = encoder.preference if config.loss.name == "dpo" else encoder.supervised
    source, _ = dataset.read(config.get(key), None, flag(key))
    rows = source.converted(_naming_faults(encode, vocabulary), "leave them out")
    longest = max_model_len or model.longest_sequence(model.read(config.model_name))
    return fitting(rows, longest, source.source)


def _naming_faults(
    encode: Callable[[Mapping[str, Any]], TrainingRow], vocabulary: Vocabulary
) -> Callable[[dict[str, Any]], TrainingRow]:
    """Return `encode` with errors that are reported together with those of the other rows, and their places."""

    def encoded(values: dict[str, Any]) -> TrainingRow:
        try:
            row = encode(values)
            for ids in (row.prompt, *(ids for ids, _ in row.completions)):
                vocabulary.check_ids(ids, lambda: "the row")
        except (RewardError, RejectedRequestError) as error:
            raise dataset.BadRowError(f"{error.message} ({error.hint})") from error
        return row

    return encoded
