"""TRL's AsyncGRPO on the task of `_work.py`: a stock vLLM on the first GPU, and the trainer on the second.

Prints one JSON object per step, like `_trl.py`: seconds spent waiting for completions, training, in the optimizer, and
sending the weights, from TRL's own metrics. TRL is unmodified except for its attention kernel: instead of downloading
FlashAttention 3 from a hub, it uses the same kernel as Bridge, torch's FlashAttention 2 (`_flash.py`). Weights are sent
by vLLM's NCCL engine; in a trial without a GPU they are not sent.

Source: TRL 1.16.0, `trl/experimental/async_grpo`, for the names.
"""

import argparse
import importlib
import json
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, TextIO

import torch
from transformers import AutoTokenizer, TrainerCallback

from benchmarks import _flash, _servers, _trl, _trl_times, _work
from benchmarks._servers import GPUS

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""TRL sends conversations; this template turns one into the prompt of `_work.py`."""


def main() -> None:
    """Train, and print one line per step."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout, which is reserved for results
    flags = _trl.common_flags(__doc__)
    flags.add_argument("--max-staleness", type=int, default=4, help="updates since a completion was begun")
    flags.add_argument(
        "--token-budget", type=int, default=0, help="tokens of one pass, in place of BATCH completions of one"
    )
    options = flags.parse_args()
    with _servers.on_another_gpu(options) as url:
        train(options, url, lines)


def train(options: argparse.Namespace, url: str, lines: TextIO) -> None:
    _trl_times.watch_stalls()
    trl, datasets = importlib.import_module("trl.experimental.async_grpo"), importlib.import_module("datasets")
    packing: Any = importlib.import_module("trl.experimental.async_grpo.packing")
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_flash.flash_attn_varlen_func)
    inside: Any = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    if not torch.cuda.is_available():
        inside.get_peak_flops_per_device = lambda *_: None  # it requests the GPU's name
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = tokenizer.parse_response = plain_text  # otherwise TRL refuses this chat template
    conversations = [[{"role": "user", "content": prompt}] for prompt in _trl.prompts()]
    trainer = trl.AsyncGRPOTrainer(
        model=str(options.model),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=trl.AsyncGRPOConfig(**settings(options, url)),
        train_dataset=datasets.Dataset.from_dict({"prompt": conversations}),
        weight_transfer=None if torch.cuda.is_available() else Unsent(),
    )
    trainer.add_callback(Lines(trainer, lines))
    trainer.train()


def settings(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Return TRL's settings: the same as Bridge's if both have them, otherwise the fastest ones."""
    return {
        "output_dir": str(options.model.parent / "trl"), "max_steps": options.steps, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": GPUS * options.completions // options.batch,
        "num_generations": options.group, "max_completion_length": options.tokens,
        "epsilon": 0.2, "epsilon_high": 0.28, "learning_rate": 1e-6, "weight_decay": 0.0, "max_grad_norm": 1.0,
        "optim": options.optim, "dtype": "bfloat16", "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": not options.no_checkpointing, "use_cpu": not torch.cuda.is_available(),
        **_trl.compiled(options.compile),
        "token_budget": options.token_budget, "max_staleness": options.max_staleness, "vllm_server_base_url": url,
    }  # fmt: skip


def plain_text(*_: Any, **__: Any) -> None:
    """Raise ValueError, so that TRL uses the decoded text."""
    raise ValueError


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [_work.reward(completion[-1]["content"]) for completion in completions]


class Unsent:
    """Leaves the server's weights unchanged."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class Lines(TrainerCallback):  # type: ignore[misc]
    """Prints the times of every step, from TRL's metrics."""

    def __init__(self, trainer: Any, out: TextIO) -> None:
        self._trainer = trainer
        self._out = out

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        _trl_times.watch_stalls()
        _flash.check_used()
        document = {"step": state.global_step, **parts(self._trainer._metrics["train"])}
        self._out.write(json.dumps(document) + "\n")


def parts(metrics: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the seconds of a step's parts; the weights are sent at the end of the step."""
    on_gpu = torch.cuda.is_available()
    return {
        "tokens": metrics["batch/trained_tokens_per_step"][-1],
        "generation_s": metrics["perf/rollout_wait_s"][-1],
        "training_s": metrics["perf/fwd_bwd_s"][-1],
        "optimizer_s": metrics["perf/optimizer_s"][-1],
        "sync_s": metrics["perf/weight_sync_s"][-1],
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
    }


if __name__ == "__main__":
    main()
