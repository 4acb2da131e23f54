"""Prove on a live server that there is one copy: every claim is tested from both processes, for each weight shard.

While a trainer is attached nothing is written, because it may be computing with the weights: values are compared
instead.
"""

import json
import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bridge.checks import Check, judged, skipped
from bridge.config import SamplingConfig
from bridge.core.address import free_port
from bridge.core.concurrency import map_in_threads
from bridge.core.python_child import Began, exit_code, run_child, run_children
from bridge.errors import AttachError
from bridge.passes.packing import Sample, packs
from bridge.passes.parallel import divide
from bridge.passes.prepared_model import PreparedModel
from bridge.passes.routing import RouterReplay
from bridge.ranks import messages
from bridge.ranks.world import INTERFACES, LOOPBACK, Ranks
from bridge.rollouts.sampler import Sampler
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.manifest import Manifest
from bridge.server.protocol import Element, Status
from bridge.types import Group
from bridge.weights import cuda_ipc, fp8
from bridge.weights.attach import AttachedModel, attach
from bridge.weights.model_folder import state
from bridge.weights.rank_parts import digest

NUM_PROMPTS, PROMPT_TOKENS, NUM_SAMPLES, NEW_TOKENS = 8, 24, 4, 24
LOGPROB_MEAN_LIMIT = 0.05
"""In nats. Two healthy engines differ by 0.013 to 0.054 in the mean; with a stale copy they differ by whole nats."""
FP8_LOGPROB_MEAN_LIMIT = 0.2
"""In nats. FP8 by itself moves log-probabilities by some hundredths; a stale copy moves them by whole nats."""
SAME_WEIGHTS_LIMIT = FP8_LOGPROB_MEAN_LIMIT
"""In nats. With weights whose checksums are equal, the engines may differ by up to this, with a warning."""
LOGPROBS = "log-probabilities"
TRIES = 5
"""Retries, because a publication can change versions between two reads."""
MODULE = "bridge.checks.one_copy_proof"
"""Module that runs in one process per part of a model, if there are several."""
RESTART = "restart the server: bridge serve-vllm --model MODEL; then attach again"


def verify(config_path: Path | None = None, *, timeout_s: float = 600.0) -> Iterator[Check]:
    """Attach to the live server and yield one check per claim. The weights are unchanged afterwards.

    Raises:
        AttachError: there is nothing to attach to, or the server refuses.
        ServerUnreachableError: the server is gone.
    """
    exported = manifest.load(config_path)
    attached = [attach(exported, part, num_parts=exported.tp_degree) for part in range(exported.tp_degree)]
    with BridgeClient(exported, timeout_s=timeout_s) as client:
        prepared = PreparedModel(attached[0].model)
        if len(attached) == 1:
            prepared.replay = RouterReplay.if_known(prepared.model, client.status().experts)
        yield from proofs(attached, client, prepared, manifest.find(config_path), timeout_s=timeout_s)


def proofs(
    parts: Sequence[AttachedModel],
    client: BridgeClient,
    prepared: PreparedModel,
    path: Path | None = None,
    *,
    timeout_s: float,
    adapter: str | None = None,
    is_loaded: bool = False,
) -> Iterator[Check]:
    """Yield the checks of `verify` for a model that is already attached, in one or several `parts`.

    `prepared` is the first part. The server computes with the adapter named `adapter`; None: without an adapter. If it
    was loaded (`is_loaded`) from disk, its matrices are copies, and the base alone is one copy.

    The log-probabilities of several parts are computed by processes that attach to the manifest at `path`.
    """

    def of_part(part: int, checks: Iterable[Check]) -> Iterator[Check]:
        return (replace(check, name=f"{check.name}, part {part}") if len(parts) > 1 else check for check in checks)

    have_same_weights = True
    for part, attached in enumerate(parts):
        yield from of_part(
            part,
            [storages(attached, with_adapter=not is_loaded), bytes_allocated(attached, with_adapter=not is_loaded)],
        )
    with fence.frozen(client) as may_write:
        for part, attached in enumerate(parts):
            yield from of_part(part, markers(attached, client) if may_write else values(attached, client))
            checksums = digests(attached, client.digests(part))
            have_same_weights &= checksums.status == "PASS"
            yield from of_part(part, [checksums])
            if attached.shard.quantized:
                yield from of_part(part, [quantized_weights(attached, client.digests(part, quantized=True))])
    status = client.status()
    model = prepared.model
    endpoint = Endpoint(url=client.url, model=adapter, reports_experts=status.experts is not None)
    with Sampler(SamplingConfig(max_new_tokens=NEW_TOKENS, request_timeout_s=timeout_s)) as sampler:
        groups = sample(sampler, endpoint, model.config.get_text_config().vocab_size)
    if path is None or len(parts) == 1:
        diffs = logprob_diffs(prepared, groups)
    else:
        diffs = diffs_of_parts(path, len(parts), groups, status.experts, timeout_s=timeout_s)
    limit = FP8_LOGPROB_MEAN_LIMIT if parts[0].shard.quantized else LOGPROB_MEAN_LIMIT
    judgment = logprobs(diffs, limit, have_same_weights=have_same_weights)
    yield unless_updated(judgment, status.version, client.status())


@dataclass(frozen=True)
class Served:
    """A snapshot of what one server of a run serves."""

    version: int
    digests: dict[str, str]
    """Digests of every tensor on every rank, and of the FP8 weights made from them."""


def served(config_path: Path, *, timeout_s: float = 600.0) -> Served:
    """Return what a live server serves; the server is paused meanwhile."""
    exported = manifest.load(config_path)
    with BridgeClient(exported, timeout_s=timeout_s) as client, fence.frozen(client):
        checksums: dict[str, str] = {}
        for part in range(exported.tp_degree):
            where = f", part {part}" if part else ""
            for suffix, of_fp8 in fp8.DIGESTED.items():
                for name, text in client.digests(part, quantized=of_fp8).items():
                    checksums[f"{name}{suffix}{where}"] = text
        return Served(client.status().version, checksums)


def replicas(paths: Sequence[Path], look: Callable[[Path], Served] = served) -> Check:
    """Check that the servers of one run, given by their manifests, serve the same bytes.

    All servers are read concurrently, and again if a trainer published in between.
    """
    expected = "equal checksums of every tensor on all servers"
    for _ in range(TRIES):
        first, *others = map_in_threads(look, paths, len(paths))
        if all(replica.version == first.version for replica in others):
            break
    else:
        return skipped("replicas", "a trainer kept publishing", expected, "run bridge verify again")
    for path, replica in zip(paths[1:], others, strict=True):
        names = sorted(first.digests.keys() | replica.digests.keys())
        if different := [name for name in names if first.digests.get(name) != replica.digests.get(name)]:
            found = f"{len(different)} of {len(names)} tensors of {path} differ from those of {paths[0]}"
            hint = "end the run, and continue with --resume: every server loads the same checkpoint"
            return judged("replicas", False, f"{found}, the first: {different[0]}", expected, hint)
    found = f"{len(paths)} servers have equal checksums of {len(first.digests)} tensors, version {first.version}"
    return judged("replicas", True, found, expected, RESTART)


def storages(attached: AttachedModel, *, with_adapter: bool = True) -> Check:
    outside = attached.unshared_parameters(with_adapter=with_adapter)
    total = sum(with_adapter or ".lora_" not in name for name in state(attached.model))
    found = f"{total} of {total} parameters lie in the server's memory"
    if outside:
        found = f"{len(outside)} of {total} parameters lie elsewhere, the first: {outside[0]}"
    return judged("storages", not outside, found, "every parameter lies in the server's memory", RESTART)


def bytes_allocated(attached: AttachedModel, *, with_adapter: bool = True) -> Check:
    count = attached.weight_bytes(with_adapter=with_adapter)
    words = "bytes of weights allocated by the trainer"
    return judged("weight bytes", count == 0, f"{count} {words}", f"0 {words}", RESTART)


def markers(attached: AttachedModel, client: BridgeClient) -> Iterator[Check]:
    """Check in both directions that one process reads what the other writes, in one element of every parameter.

    The caller holds the fence. Every element has its old value afterwards.
    """
    elements, cells = _middle_elements(attached)
    before = [cell.clone() for cell in cells]
    marks = tuple(1.0 + index % 128 / 128 for index in range(len(cells)))  # exact in bf16
    marks = tuple(-mark if mark == old.item() else mark for mark, old in zip(marks, before, strict=True))
    opposite = tuple(-mark for mark in marks)
    try:
        _fill(cells, marks)
        yield _compare("trainer writes, server reads", client.read(elements), marks)
        client.write(elements, opposite)
        yield _compare("server writes, trainer reads", tuple(cell.item() for cell in cells), opposite)
    finally:
        _fill(cells, tuple(old.item() for old in before))
    old_values = tuple(old.item() for old in before)
    yield _compare("old values restored", client.read(elements), old_values, noun="old value")


def values(attached: AttachedModel, client: BridgeClient) -> Iterator[Check]:
    """Check, inside the fence, that both processes read the same value in one element of every parameter."""
    yield skipped("marks", "a trainer is updating this server: nothing else may write now", "no trainer")
    elements, cells = _middle_elements(attached)
    ours = [cell.item() for cell in cells]
    theirs = client.read(elements)
    equal = sum(map(_is_same, ours, theirs))
    found = f"{equal} of {len(ours)} values are equal"
    yield judged("values", equal == len(ours), found, "the same value from both sides", RESTART)


def digests(attached: AttachedModel, theirs: dict[str, str]) -> Check:
    ours = {name: digest(tensor) for name, tensor in attached.server_tensors.items()}
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    found = f"{len(ours)} of {len(ours)} tensors have equal checksums"
    if different:
        found = f"{len(different)} of {len(ours)} tensors differ, the first: {different[0]}"
    return judged("checksums", not different, found, "equal checksums of every tensor from both sides", RESTART)


def quantized_weights(attached: AttachedModel, theirs: dict[str, str]) -> Check:
    """Check that the server's FP8 weights are the quantization of the weights that this process has mapped.

    `theirs` has the server's digests. The caller holds the fence.
    """
    tensors = attached.server_tensors
    ours = {name: fp8.digest(*fp8.quantized(tensors[name], how)) for name, how in attached.shard.quantized.items()}
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    found = f"{len(ours)} of {len(ours)} served tensors are the FP8 of the shared weights"
    if different:
        found = f"{len(different)} of {len(ours)} served tensors are not the FP8 of the shared ones: {different[0]}"
    expected = "the server's FP8 equals the quantization of the shared weights, tensor by tensor"
    hint = "publish the weights again, which quantizes them again: bridge restore MODEL_OR_CHECKPOINT"
    return judged("FP8", not different, found, expected, hint)


def logprobs(diffs: torch.Tensor, limit: float = LOGPROB_MEAN_LIMIT, *, have_same_weights: bool = False) -> Check:
    """Judge the log-probability differences of single tokens, whose mean may be up to `limit` nats.

    How far two healthy engines differ depends on the model. If they `have_same_weights`, exceeding the limit is only a
    warning: the engines compute differently, but with the same weights.
    """
    mean = diffs.mean().item()
    largest = diffs.max().item()
    found = f"{len(diffs)} tokens: mean difference {mean:.4f}, max {largest:.4f}"
    hint = "compare the versions of transformers and vLLM, and the model's configuration"
    if have_same_weights and mean <= SAME_WEIGHTS_LIMIT:
        found += ", with equal checksums" if mean > limit else ""
        hint = f"watch logprob_diff_mean and --mismatch in a run; {hint}"
        return judged(LOGPROBS, mean <= limit, found, f"mean difference at most {limit}", hint, otherwise="WARN")
    return judged(LOGPROBS, mean <= limit, found, f"mean difference at most {limit}", hint)


def unless_updated(check: Check, version: int, after: Status) -> Check:
    """Return `check`, or a SKIP if it failed while a trainer was writing or had published a version after `version`."""
    if check.status == "PASS" or (after.version == version and after.state == "serving"):
        return check
    later = max(after.version, version + 1)
    reason = f"a trainer wrote version {later} while version {version} was compared: {check.found}"
    return skipped(check.name, reason, check.expected, "run bridge verify again when no trainer is running")


def sample(sampler: Sampler, endpoint: Endpoint, vocab_size: int) -> list[Group]:
    """Sample completions of random prompts, which depend only on the size of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    prompts = [tuple(row) for row in rows]
    completions = sampler.sample([endpoint], prompts, num_samples=NUM_SAMPLES, seed=0)
    return [
        Group(problem={"prompt": ""}, prompt_token_ids=prompt, completions=sampled, rewards=(0.0,) * NUM_SAMPLES)
        for prompt, sampled in zip(prompts, completions, strict=True)
    ]


def logprob_diffs(prepared: PreparedModel, groups: list[Group]) -> torch.Tensor:
    """Return |log-probability from the server - log-probability computed here| of each sampled token, in nats."""
    samples = [
        Sample(
            prompt_token_ids=group.prompt_token_ids,
            token_ids=completion.token_ids,
            sampled_logprobs=completion.logprobs,
            advantages=(0.0,) * len(completion.token_ids),
            weight=0.0,
            experts=completion.experts,
        )
        for group in groups
        for completion in group.completions
    ]
    single_packs = packs(samples, max_tokens=1, device=prepared.model.device)  # packing must not affect the result
    with torch.no_grad():
        return torch.cat([(prepared.logprobs(part, 1.0)[0] - part.sampled_logprobs_N).abs() for part in single_packs])


def diffs_of_parts(
    path: Path, num_parts: int, groups: Sequence[Group], experts: tuple[int, int] | None, *, timeout_s: float
) -> torch.Tensor:
    """Return what `logprob_diffs` returns, for a model that the server of the manifest at `path` holds in parts.

    `experts` are as in `RouterReplay.of`.

    Raises:
        AttachError: a process failed.
    """
    port = free_port(LOOPBACK)
    sampled = messages.dumps([experts, *groups]).decode()

    def computed(part: int, began: Began) -> str:
        ended = run_child(MODULE, *map(str, (path, part, port)), timeout_s=timeout_s, stdin=sampled, began=began)
        if trouble := ended.trouble():
            raise AttachError(
                f"the process for part {part} failed: {trouble}",
                hint=f"bridge doctor; for the whole error: python -m {MODULE} MANIFEST PART PORT",
            )
        return ended.stdout

    return torch.tensor(json.loads(run_children(computed, num_parts)[0]))


def print_diffs_of_part(path: str, rank: str, port: str) -> None:
    """Compute `logprob_diffs` of the groups on stdin together with the ranks of the other parts; rank 0 prints them."""
    os.environ.update({name: os.environ.get(name, "lo") for name in INTERFACES})
    experts, *groups = messages.loads(sys.stdin.buffer.read())
    exported = manifest.load(Path(path))
    part = int(rank)
    uuid, count = exported.shards[part].gpu_uuid, exported.tp_degree
    device = torch.device("cpu") if uuid is None else cuda_ipc.device_of(uuid)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    listener = socket.create_server((LOOPBACK, int(port))) if part == 0 else None
    ranks = Ranks.join(part, count, tp_size=count, port=int(port), device=device, listener=listener)
    try:
        diffs = diffs_of_part(ranks, exported, groups, experts)
    finally:
        ranks.close()
    if part == 0:
        sys.stdout.write(json.dumps(diffs.tolist()))


def diffs_of_part(
    ranks: Ranks, exported: Manifest, groups: list[Group], experts: tuple[int, int] | None
) -> torch.Tensor:
    """Return what `diffs_of_parts` returns, computed by each rank with its part of the model."""
    attached = attach(exported, ranks.tp_rank, num_parts=ranks.tp_size)
    parallel = divide(attached.model, attached.cuts, ranks.tp_group.process_group)
    prepared = PreparedModel(attached.model, parallel)
    prepared.replay = RouterReplay.if_known(attached.model, experts)
    return logprob_diffs(prepared, groups)


def _middle_elements(attached: AttachedModel) -> tuple[tuple[Element, ...], list[torch.Tensor]]:
    """Return one element of every parameter, by its name on the server and as a tensor here."""
    views = attached.shard.param_mappings
    named = attached.named()
    middles = {name: view.offset + named[name].numel() // 2 for name, view in views.items()}
    part = attached.shard.rank
    elements = tuple(Element(parameter=views[name].parameter, index=i, part=part) for name, i in middles.items())
    return elements, [attached.server_tensors[e.parameter].view(-1)[e.index] for e in elements]


def _fill(cells: list[torch.Tensor], values: tuple[float, ...]) -> None:
    for cell, value in zip(cells, values, strict=True):
        cell.fill_(value)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize(cells[0].device)


def _is_same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def _compare(name: str, found: tuple[float, ...], expected: tuple[float, ...], noun: str = "mark") -> Check:
    wrong = len(expected) - sum(map(_is_same, found, expected))
    text = f"{len(found) - wrong} of {len(found)} {noun}s seen"
    return judged(name, not wrong, text, f"one {noun} in every parameter", RESTART)


if __name__ == "__main__":
    sys.exit(exit_code(print_diffs_of_part, *sys.argv[1:]))
