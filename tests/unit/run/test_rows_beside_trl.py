"""Rows of a file give the losses that TRL's trainers compute on the same rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from bridge.rollouts.training_rows import RowEncoder
from bridge.weights import loaded
from tests.models import chat, tiny
from tests.unit.run.test_learner import learner_of
from tests.unit.run.test_row_losses import PLAIN

BETA = 0.5
ASKED = [{"role": "user", "content": f"{number}+12?"} for number in range(4)]
PAIRS: list[dict[str, Any]] = [
    {
        "prompt": [asked],
        "chosen": [{"role": "assistant", "content": f"It is {number + 12}."}],
        "rejected": [{"role": "assistant", "content": f"I think that it is {number}."}],
    }
    for number, asked in enumerate(ASKED)
]
CHATS: list[dict[str, Any]] = [
    {"messages": [*pair["prompt"], *pair["chosen"], ASKED[0], *pair["rejected"]]} for pair in PAIRS
]


def of_trl(trainer: Any) -> float:
    """Return the loss of the first step."""
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


def model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = tiny.llama(vocabulary=400)
    config.initializer_range = 0.08
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return made.eval()


def of_bridge(rows: list[dict[str, Any]], encode: Callable[[Any], Any], **choices: Any) -> dict[str, Any]:
    with mock.patch.object(loaded, "load") as load:
        load.return_value.model = model(8)
        learner = learner_of(model(7), **PLAIN | choices)
    learner.take([encode(row).group() for row in rows])
    learner.prepare()
    learner.write()
    return learner.learnt()


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trl"), "max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-4,
        "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1,
        "save_strategy": "no",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["qwen2_5_training", "llama3_training"])
def test_supervised_loss_is_that_of_trl(tmp_path: Path, name: str) -> None:
    tokenizer = chat.tokenizer(tmp_path, name)
    tokenizer.pad_token = "<s>"
    args = SFTConfig(assistant_only_loss=True, **arguments(tmp_path))
    trainer = SFTTrainer(model(7), args, train_dataset=Dataset.from_list(CHATS), processing_class=tokenizer)
    theirs = of_trl(trainer)
    encode = RowEncoder(tokenizer, {}, tokenizer.eos_token_id).supervised
    assert of_bridge(CHATS, encode, loss="sft")["loss"] == pytest.approx(theirs, abs=2e-4)


def test_preference_loss_is_that_of_trl(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "llama3")
    tokenizer.pad_token = "<s>"
    args = DPOConfig(beta=BETA, **arguments(tmp_path))
    trainer = DPOTrainer(model(7), model(8), args, train_dataset=Dataset.from_list(PAIRS), processing_class=tokenizer)
    theirs = of_trl(trainer)
    encode = RowEncoder(tokenizer, {}, tokenizer.eos_token_id).preference
    ours = of_bridge(PAIRS, encode, loss="dpo", dpo_beta=BETA, reference_model="frozen")
    assert ours["loss"] == pytest.approx(theirs, abs=2e-4)
    logged = trainer.state.log_history[0]
    assert ours["margin"] == pytest.approx(logged["rewards/margins"], abs=2e-4)
    assert ours["preference_accuracy"] == logged["rewards/accuracies"]
