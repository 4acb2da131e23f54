"""One part of a model that lies on several ranks of a server: `bridge verify` runs one program for each part.

`python -m bridge.checks.child logprobs MANIFEST PART PORT` reads what was sampled from its standard input, and computes
its log-probabilities together with the other parts; the first one prints how far they are from the server's.
"""

import json
import os
import socket
import sys
from pathlib import Path

import torch

from bridge.checks.verify import logprob_diffs
from bridge.passes.parallel import divide
from bridge.ranks.world import INTERFACES, LOOPBACK, Ranks
from bridge.server import manifest
from bridge.types import Completion, Group
from bridge.weights import cuda_ipc
from bridge.weights.attach import attach


def run(path: str, part: str, port: str) -> None:
    os.environ.update({name: os.environ.get(name, "lo") for name in INTERFACES})
    groups = [_group(*each) for each in json.load(sys.stdin)]
    found, own = manifest.load(Path(path)), int(part)
    uuid, count = found.shard(own).gpu_uuid, found.tp_degree
    device = torch.device("cpu") if uuid is None else cuda_ipc.device_of(uuid)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    listener = socket.create_server((LOOPBACK, int(port))) if own == 0 else None
    ranks = Ranks.join(own, count, tp_size=count, port=int(port), device=device, listener=listener)
    try:
        attached = attach(found, own, num_parts=count)
        divide(attached.model, attached.cuts, ranks.tp_group.process_group)
        found_diffs = logprob_diffs(attached.model, groups)
    finally:
        ranks.close()
    if own == 0:
        sys.stdout.write(json.dumps(found_diffs.tolist()))


def _group(prompt: list[int], completions: list[tuple[list[int], list[float]]]) -> Group:
    made = [
        Completion(
            token_ids=tuple(ids), logprobs=tuple(logprobs), text="", finish_reason="stop", versions=(0,) * len(ids)
        )
        for ids, logprobs in completions
    ]
    rewards = (0.0,) * len(made)
    return Group(problem={"prompt": ""}, prompt_token_ids=tuple(prompt), completions=tuple(made), rewards=rewards)
