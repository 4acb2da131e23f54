"""A client of Tinker's API on the task of `_work.py`, with the real SDK.

    python -m benchmarks._tinker_client URL MODEL WORK RANK

Takes as many steps as each line of stdin says, and prints one JSON object per step, with the seconds of its parts under
the names used by `bridge run --json`.
"""

import itertools
import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import tinker
from tinker import types
from transformers import AutoTokenizer

from benchmarks import _work
from benchmarks._sides import Work
from benchmarks._tinker import BASE, KEY


def main() -> None:
    """Take steps; stdout is reserved for results."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    url, model, work, rank = sys.argv[1:]
    train(url, Path(model), Work(**json.loads(work)), int(rank), lines)


def train(url: str, model: Path, work: Work, rank: int, lines: TextIO) -> None:
    """Take steps as a script of the SDK does: sample groups, a pass and a step, and new weights for the sampler."""
    while not _answers(url):
        time.sleep(0.1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = service.create_lora_training_client(base_model=BASE, rank=rank).result()
    parameters = types.SamplingParams(max_tokens=work.tokens, temperature=1.0)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompts = itertools.cycle([tokenizer(text, add_special_tokens=False)["input_ids"] for text in _work.prompts()])
    steps = (number for line in sys.stdin for number in range(int(line)))
    for _ in steps:
        started = time.perf_counter()
        batch = list(itertools.islice(prompts, work.completions // work.group))
        asked = [sampler.sample(types.ModelInput.from_ints(ids), work.group, parameters) for ids in batch]
        groups = [future.result().sequences for future in asked]
        sampled = time.perf_counter()
        data = [datum for ids, group in zip(batch, groups, strict=True) for datum in _data(ids, group)]
        passes = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-5))
        passes.result()
        metrics = stepped.result().metrics or {}
        pause_s, write_s, publish_s = (metrics[f"fence_{part}_s:mean"] for part in ("pause", "write", "publish"))
        trained = time.perf_counter()
        sampler = training.save_weights_and_get_sampling_client().result()
        saved = time.perf_counter()
        line = {
            "rollout_s": sampled - started,
            "train_s": trained - sampled - pause_s - write_s - publish_s,
            "fence_pause_s": pause_s,
            "fence_write_s": write_s,
            "fence_publish_s": publish_s + saved - trained,  # from then on the new weights are sampled
            "peak_memory_gib": 0.0,
            "step_s": saved - started,
            "ended": time.time(),
            "tokens_generated": sum(len(sequence.tokens) for group in groups for sequence in group),
        }
        lines.write(json.dumps(line) + "\n")


def _data(prompt: Sequence[int], group: Sequence[Any]) -> "Iterator[Any]":
    """Yield the data of a group, with advantages of made-up rewards, as the SDK's RL scripts build them."""
    rewards = np.array([zlib.crc32(str(sequence.tokens).encode()) / 2**32 for sequence in group])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for sequence, advantage in zip(group, advantages, strict=True):
        ids = [*prompt, *sequence.tokens]
        zeros = [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": ids[1:],
            "logprobs": zeros + list(sequence.logprobs),
            "advantages": zeros + [float(advantage)] * len(sequence.tokens),
        }
        yield types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def _answers(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


if __name__ == "__main__":
    main()
