"""TRL's GRPO with vLLM in its process (colocate), on another GPU (server), or on Bridge's, on the task of `_work.py`.

Prints one JSON object per step: seconds per part and torch's peak memory (`_trl_times.py`). TRL is not modified. With
`--task`, TRL trains on an environment of Bridge's, in the same order, and prints the share of held-out problems that it
solves, as `bridge run --json` does. With `--server`, weights are sent by vLLM's NCCL engine; without a GPU, for a try,
they are not.

Source: TRL 1.16.0, `trl/trainer/grpo_trainer.py`, `trl/generation/vllm_generation.py` and `vllm_client.py`, for the
names.
"""

import argparse
import functools
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch
from transformers import AutoTokenizer

import bridge
from benchmarks import _flash, _servers, _sides, _trl_times, _work
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

FLASH = "flash"
"""FlashAttention 2 by `_flash.py`; any other name is passed to transformers as `attn_implementation`."""
COMPILED = ("model", "layers")
"""What `torch_compile` compiles: the model, or each layer separately (accelerate's regional compilation)."""


def main() -> None:
    """Train, and print one line per step."""
    is_first = os.environ.get("RANK", "0") == "0"
    os.environ.setdefault("MASTER_PORT", str(free_port("127.0.0.1")))  # else all runs would use port 29500
    lines = os.fdopen(os.dup(1), "w", buffering=1) if is_first else None
    os.dup2(2, 1)  # vLLM logs to stdout, which is reserved for results
    options = flags().parse_args()
    with _servers.on_another_gpu(options) if options.server else nullcontext() as url:
        train(options, url, lines)


def train(options: argparse.Namespace, url: str | None, lines: TextIO | None) -> None:
    """Train with the server at `url`; None: with TRL's own engine or Bridge's."""
    _trl_times.watch_stalls()
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    task = registry.load(TaskConfig(environment=options.task)) if options.task else None
    if options.attention == FLASH:
        _flash.register()
    clock, args = _trl_times.Clock(task), trl.GRPOConfig(**settings(options, url))
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
        _trl_times.watch(trainer, clock)
        if options.lengths and not options.on_bridge and trainer.use_vllm and url is None:
            limit(trainer.vllm_generation.llm, Lognormal.parse(options.lengths))
        if options.compile == "layers":
            trainer.model.train()  # else TRL samples again for each pass: accelerate switches only its compiled copy
        if options.attention == FLASH:
            trainer.add_callback(_trl_times.Checked(_flash.check_used))
        trainer.add_callback(_trl_times.Lines(clock, lines, trainer.accelerator))
        if task is not None and lines is not None:
            trainer.add_callback(_trl_times.HeldOut(task, lines, trainer, options))
        trainer.train()


@contextmanager
def stock(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the trainer's arguments in a stock script."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    yield {"model": str(options.model), "processing_class": tokenizer}


@contextmanager
def on_bridge(options: argparse.Namespace, args: Any) -> Iterator[dict[str, Any]]:
    """Yield the trainer's arguments from `bridge.for_trl`, with a running server that has the same settings."""
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
            say(log.read_text(errors="replace"))  # grpo.py reads the size of the KV cache
            arguments = bridge.for_trl(policy, args)
            if options.trl_optimizer:
                del arguments["optimizers"]
            yield arguments


def flags() -> argparse.ArgumentParser:
    parser = common_flags(__doc__)
    parser.add_argument("--liger", action="store_true", help="liger-kernel's layers")
    parser.add_argument("--attention", metavar="NAME", default="sdpa", help="flash, or a name of transformers")
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
    """Return the flags that `_trl_async.py` also has."""
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
    parser.add_argument("--compile", choices=COMPILED, help="compile the trainer's model, or its layers one by one")
    parser.add_argument("--server-gpu", default="0", help="GPU of a vLLM that has its own")
    parser.add_argument("--server-log", type=Path, default=Path("trl-server.log"), help="log file of that vLLM")
    return parser


def prompts() -> list[str]:
    """Return the prompts in Bridge's order."""
    order = islice(problems.endless(_work.Hashed(), seed=0), _work.NUM_PROMPTS)
    return [str(problem["prompt"]) for problem in order]


def columns(task: Task, options: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the problems of all steps as columns, in Bridge's order."""
    count = options.steps * options.completions // options.group
    taken = list(islice(problems.endless(task, seed=options.seed), count))
    return {"prompt": [problem["prompt"] for problem in taken], "problem": list(map(json.dumps, taken))}


def settings(options: argparse.Namespace, url: str | None = None) -> dict[str, Any]:
    """Return TRL's settings: the same as Bridge's if both have them, otherwise the fastest ones.

    A trainer with a server at `url` trains on the completions of both GPUs.
    """
    inside = {
        "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.share,
        "vllm_max_model_length": options.max_model_len, "vllm_enable_sleep_mode": options.sleep,
    }  # fmt: skip
    outside = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": free_port("")}
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
        **compiled(options.compile),
        "model_init_kwargs": {
            "dtype": "float32" if options.float32 else "bfloat16",
            "attn_implementation": _flash.NAME if options.attention == FLASH else options.attention,
        },
        "gradient_checkpointing": not options.no_checkpointing, "use_liger_kernel": options.liger,
        "use_cpu": not torch.cuda.is_available(),
    }  # fmt: skip


def compiled(what: str | None) -> dict[str, Any]:
    """Return TRL's setting to compile `what`; accelerate reads the details from the environment."""
    if what == "layers":
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    return {"torch_compile": True} if what else {}


def send_nothing() -> None:
    """Leave the server's weights unchanged, since TRL can send weights only from a GPU."""
    client: Any = importlib.import_module("trl.generation.vllm_client").VLLMClient
    client.init_communicator = client.update_named_params = lambda *_, **__: None


def size_kv_cache(num_bytes: int) -> None:
    """Give TRL's engine a KV cache of this size; vLLM cannot measure memory while another vLLM starts."""
    vllm_generation: Any = importlib.import_module("trl.generation.vllm_generation")
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, kv_cache_memory_bytes=num_bytes)


def limit(llm: Any, lengths: Lognormal) -> None:
    """Limit each completion separately; TRL passes every prompt once per completion."""
    generate = llm.generate

    def limited(prompts: Sequence[Mapping[str, Any]], sampling_params: Any, **named: Any) -> Any:
        caps = lengths.of_each([prompt["prompt_token_ids"] for prompt in prompts])
        params = [sampling_params.clone() for _ in caps]
        for one, cap in zip(params, caps, strict=True):
            one.max_tokens = min(one.max_tokens, cap)
        return generate(prompts, sampling_params=params, **named)

    llm.generate = limited


if __name__ == "__main__":
    main()
