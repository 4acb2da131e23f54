"""TRL's GRPO with vLLM in its process (colocate), on another GPU (server), or on Bridge's, on the task of `_work.py`.

Prints one JSON object per step: seconds per part and torch's peak memory. TRL is not modified: its methods are timed
from outside, and every timed part begins and ends with an idle device. With `--task`, TRL trains on an environment of
Bridge's, in the same order, and prints the share of held-out problems that it solves, as `bridge run --json` does.
With `--server`, weights are sent by vLLM's NCCL engine; without a GPU, for a try, they are not.

Source: TRL 1.16.0, `trl/trainer/grpo_trainer.py`, `trl/generation/vllm_generation.py` and `vllm_client.py`, for the
names.
"""

import argparse
import functools
import importlib
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch
from torch import Tensor
from transformers import AutoTokenizer, TrainerCallback

import bridge
from benchmarks import _servers, _sides, _work
from benchmarks._lengths import Lognormal
from benchmarks._results import say
from bridge.config import ServeConfig, TaskConfig
from bridge.core.address import free_port
from bridge.processes.server_command import ServerCommand
from bridge.processes.server_process import StartedServer
from bridge.rollouts import problems
from bridge.server.manifest import MANIFEST_NAME
from bridge.types import Task
from bridge_environments import registry


def main() -> None:
    """Train, and print one line per step."""
    is_first = os.environ.get("RANK", "0") == "0"
    os.environ.setdefault("MASTER_PORT", str(free_port("127.0.0.1")))  # torchrun sets it; else two runs share 29500
    lines = os.fdopen(os.dup(1), "w", buffering=1) if is_first else None
    os.dup2(2, 1)  # vLLM logs to stdout, which is for the lines
    options = flags().parse_args()
    with _servers.on_another_gpu(options) if options.server else nullcontext() as url:
        train(options, url, lines)


def train(options: argparse.Namespace, url: str | None, lines: TextIO | None) -> None:
    """Train with the server at `url`; None: with TRL's own engine, or with Bridge's."""
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    task = registry.load(TaskConfig(environment=options.task)) if options.task else None
    clock, args = Clock(task), trl.GRPOConfig(**settings(options, url))
    if url is not None and not torch.cuda.is_available():
        send_nothing()
    if options.kv_gib:
        size_kv_cache(int(options.kv_gib * 2**30))
    with stock(options) if not options.on_bridge else on_bridge(options, args) as arguments:
        trainer = trl.GRPOTrainer(
            **arguments,
            reward_funcs=clock.reward,
            args=args,
            train_dataset=datasets.Dataset.from_dict(columns(task, options) if task else {"prompt": prompts()}),
        )
        watch(trainer, clock)
        if options.lengths and trainer.use_vllm and url is None:
            limit(trainer.vllm_generation.llm, Lognormal.parse(options.lengths))
        trainer.add_callback(Lines(clock, lines, trainer.accelerator))
        if task is not None and lines is not None:
            trainer.add_callback(HeldOut(task, lines, trainer, options))
        trainer.train()


@contextmanager
def stock(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what a stock script passes to the trainer."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    yield {"model": str(options.model), "processing_class": tokenizer}


@contextmanager
def on_bridge(options: argparse.Namespace, args: Any) -> Iterator[dict[str, Any]]:
    """Yield what `bridge.for_trl` passes to the trainer, beside a server with the same settings."""
    engine = [*_sides.engine_flags(options.completions), *_sides.lengths_flags(options.lengths)]
    share = options.share if torch.cuda.is_available() else None
    with TemporaryDirectory(prefix="bridge-bench-") as folder:
        config = ServeConfig(
            model=str(options.model), port=free_port("127.0.0.1"), max_model_len=options.max_model_len,
            gpu_memory_utilization=share, vllm_config_path=Path(folder, MANIFEST_NAME),
        )  # fmt: skip
        log = Path(folder, "server.log")
        with (
            StartedServer(ServerCommand.of(config, engine), log).running(),
            bridge.attach(config.vllm_config_path) as policy,
        ):
            say(log.read_text(errors="replace"))  # the size of its KV cache, for grpo.py
            arguments = bridge.for_trl(policy, args)
            if options.trl_optimizer:
                del arguments["optimizers"]
            yield arguments


def flags() -> argparse.ArgumentParser:
    parser = common_flags(__doc__)
    parser.add_argument("--liger", action="store_true", help="liger-kernel's layers")
    parser.add_argument("--no-correction", action="store_true", help="no importance weights, no second forward pass")
    parser.add_argument("--sleep", action="store_true", help="vLLM sleeps while training")
    parser.add_argument("--server", action="store_true", help="vLLM on another GPU than the trainer's (server mode)")
    parser.add_argument("--on-bridge", action="store_true", help="one copy of the weights, by bridge.for_trl")
    parser.add_argument("--trl-optimizer", action="store_true", help="with --on-bridge: TRL's AdamW, not Bridge's")
    parser.add_argument("--float32", action="store_true", help="float32 weights, as TRL loads a model by its name")
    parser.add_argument("--kv-gib", type=float, help="size of the KV cache, which vLLM then does not measure")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate, which is constant")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling, and in the loss")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the problems, and of sampling")
    parser.add_argument("--task", metavar="ENVIRONMENT", help="train on this one of Bridge's, and evaluate")
    parser.add_argument("--eval-interval", type=int, default=10, help="with --task: steps between evaluations")
    parser.add_argument("--no-vllm", action="store_true", help="sample by transformers, for a try without a GPU")
    return parser


def common_flags(description: str | None) -> argparse.ArgumentParser:
    """Return the flags that `_trl_async.py` has, too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", type=int, help="completions of one forward and backward pass")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--completions", type=int, default=64, help="completions of one step and GPU")
    parser.add_argument("--group", type=int, default=8, help="completions of one prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of one completion")
    parser.add_argument("--lengths", help="as grpo.py")
    parser.add_argument("--max-model-len", type=int, default=1024, help="longest sequence")
    parser.add_argument("--share", type=float, default=0.3, help="share of the GPU for vLLM")
    parser.add_argument("--optim", default="adamw_torch_fused", help="TRL's `optim`; adamw_bnb_8bit: 8-bit moments")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    return parser


def prompts() -> list[str]:
    """Return the prompts in the order in which Bridge takes them."""
    order = islice(problems.endless(_work.Hashed(), seed=0), _work.NUM_PROMPTS)
    return [str(problem["prompt"]) for problem in order]


def columns(task: Task, options: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the problems of all steps as columns, in the order in which Bridge takes them."""
    count = options.steps * options.completions // options.group
    taken = list(islice(problems.endless(task, seed=options.seed), count))
    return {"prompt": [problem["prompt"] for problem in taken], "problem": list(map(json.dumps, taken))}


def settings(options: argparse.Namespace, url: str | None = None) -> dict[str, Any]:
    """Return TRL's settings: Bridge's where both have them, otherwise the fastest.

    A trainer with a server at `url` trains on the completions of both GPUs.
    """
    inside = {
        "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.share,
        "vllm_max_model_length": options.max_model_len, "vllm_enable_sleep_mode": options.sleep,
    }  # fmt: skip
    outside = {"vllm_mode": "server", "vllm_server_base_url": url}
    vllm = {
        "use_vllm": True, **(inside if url is None else outside),
        "vllm_importance_sampling_correction": not options.no_correction,
        "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0,
    }  # fmt: skip
    return {
        **({} if options.no_vllm or options.on_bridge else vllm),
        "output_dir": str(options.model.parent / "trl"), "max_steps": options.steps, "report_to": "none",
        "save_strategy": "no", "logging_steps": options.steps, "disable_tqdm": True, "seed": options.seed,
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": options.completions * (1 if url is None else _servers.GPUS) // options.batch,
        "num_generations": options.group, "max_completion_length": options.tokens,
        "temperature": options.temperature,
        "shuffle_dataset": False,
        "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0,
        "learning_rate": options.lr, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
        "optim": options.optim, "bf16": True,
        "model_init_kwargs": {"dtype": "float32" if options.float32 else "bfloat16"},
        "gradient_checkpointing": not options.no_checkpointing, "use_liger_kernel": options.liger,
        "use_cpu": not torch.cuda.is_available(),
    }  # fmt: skip


class Clock:
    """Seconds per part since the last step, and the sampled tokens."""

    def __init__(self, task: Task | None = None) -> None:
        self._task = task
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.num_tokens = 0

    def reward(self, completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """Score completions for TRL, and count their tokens."""
        self.num_tokens += sum(map(len, completion_ids))
        if self._task is not None:
            texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
            return list(map(self._task.score, map(json.loads, columns["problem"]), texts))
        return [_work.reward(completion) for completion in completions]

    def part(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return `inner`, timed as a part of the step."""

        @functools.wraps(inner)
        def timed(*positional: Any, **named: Any) -> Any:
            start = moment()
            try:
                return inner(*positional, **named)
            finally:
                self.seconds[name] += moment() - start

        return timed


def watch(trainer: Any, clock: Clock) -> None:
    """Time the parts of every step of `trainer`."""
    if trainer.use_vllm:
        generation = trainer.vllm_generation
        generation.generate = clock.part("generation", generation.generate)
        generation.sync_weights = clock.part("sync", generation.sync_weights)
    elif trainer.rollout_func is not None:
        trainer.rollout_func = clock.part("generation", trainer.rollout_func)
    trainer._prepare_inputs = clock.part("prepare", trainer._prepare_inputs)
    trainer.training_step = clock.part("training_step", trainer.training_step)
    trainer.accelerator.clip_grad_norm_ = clock.part("clip", trainer.accelerator.clip_grad_norm_)
    forward = trainer._get_per_token_logps_and_entropies
    without_gradient = clock.part("old_logprobs", forward)

    def either(*positional: Any, **named: Any) -> Any:
        return (forward if torch.is_grad_enabled() else without_gradient)(*positional, **named)

    trainer._get_per_token_logps_and_entropies = either


def send_nothing() -> None:
    """Leave the server's weights as they are: TRL sends from a GPU alone."""
    client: Any = importlib.import_module("trl.generation.vllm_client").VLLMClient
    client.init_communicator = client.update_named_params = lambda *_, **__: None


def size_kv_cache(num_bytes: int) -> None:
    """Give TRL's engine a KV cache of so many bytes: vLLM cannot measure it while another one starts."""
    vllm_generation: Any = importlib.import_module("trl.generation.vllm_generation")
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, kv_cache_memory_bytes=num_bytes)


def limit(llm: Any, lengths: Lognormal) -> None:
    """Limit each completion separately: TRL passes every prompt once for each of its completions."""
    generate = llm.generate

    def limited(prompts: Sequence[Mapping[str, Any]], sampling_params: Any, **named: Any) -> Any:
        caps = lengths.of_each([prompt["prompt_token_ids"] for prompt in prompts])
        params = [sampling_params.clone() for _ in caps]
        for one, cap in zip(params, caps, strict=True):
            one.max_tokens = min(one.max_tokens, cap)
        return generate(prompts, sampling_params=params, **named)

    llm.generate = limited


class Lines(TrainerCallback):  # type: ignore[misc]
    """Prints the times at the end of every step: those of the first process, and the tokens of all."""

    def __init__(self, clock: Clock, out: TextIO | None, accelerator: Any) -> None:
        self._clock = clock
        self._out = out
        self._accelerator = accelerator
        self._stepped_at = 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._stepped_at = moment()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._clock.seconds["optimizer"] += moment() - self._stepped_at

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        moment()
        mine = torch.tensor(self._clock.num_tokens, device=self._accelerator.device)
        num_tokens = int(self._accelerator.reduce(mine))
        if self._out is not None:
            document = {"step": state.global_step, "tokens": num_tokens, **parts(self._clock.seconds)}
            self._out.write(json.dumps(document) + "\n")
        self._clock.seconds.clear()
        self._clock.num_tokens = 0


class HeldOut(TrainerCallback):  # type: ignore[misc]
    """Prints the mean reward of greedy answers to held-out problems, before, while and after the model is trained."""

    def __init__(self, task: Task, out: TextIO, trainer: Any, options: argparse.Namespace) -> None:
        self._task = task
        self._out = out
        self._trainer = trainer
        self._options = options
        self._prompts = [list(problems.encode(trainer.processing_class, problem)) for problem in task.held_out()]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._evaluate(0)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step % self._options.eval_interval == 0 or state.global_step == self._options.steps:
            self._evaluate(state.global_step)

    def _evaluate(self, step: int) -> None:
        start = moment()
        answers = self._sampled() if self._trainer.use_vllm else self._generated()
        texts = self._trainer.processing_class.batch_decode(answers, skip_special_tokens=True)
        rewards = list(map(self._task.score, self._task.held_out(), texts))
        measured = {"step": step, "reward_mean": statistics.fmean(rewards), "seconds": moment() - start}
        self._out.write(json.dumps({"evaluation": measured}) + "\n")

    def _sampled(self) -> list[list[int]]:
        generation, sampling = self._trainer.vllm_generation, importlib.import_module("vllm").SamplingParams
        generation.sync_weights()
        outputs = generation.llm.generate(
            [{"prompt_token_ids": ids} for ids in self._prompts],
            sampling_params=sampling(temperature=0, max_tokens=self._options.tokens), use_tqdm=False,
        )  # fmt: skip
        return [output.outputs[0].token_ids for output in outputs]

    def _generated(self) -> list[list[int]]:
        padded = self._trainer.processing_class.pad(
            {"input_ids": self._prompts}, padding_side="left", return_tensors="pt"
        )
        greedy = {"do_sample": False, "max_new_tokens": self._options.tokens}
        with torch.inference_mode():
            tokens: Tensor = self._trainer.model.generate(**padded.to(self._trainer.model.device), **greedy)
        answers: list[list[int]] = tokens[:, padded["input_ids"].shape[1] :].tolist()
        return answers


def parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return parts that do not overlap; the pass for old log-probs counts as training."""
    learning = seconds["training_step"] - seconds["prepare"] + seconds["clip"]
    return {
        "generation_s": seconds["generation"],
        "training_s": learning + seconds["old_logprobs"],
        "old_logprobs_s": seconds["old_logprobs"],
        "optimizer_s": seconds["optimizer"],
        "sync_s": seconds["sync"],
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    }


def moment() -> float:
    """Return the time once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
