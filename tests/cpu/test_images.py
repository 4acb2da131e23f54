"""Images on the real vLLM on the CPU: server and trainer use the same images, and a task that needs images is learned.

Not covered: packed passes (`tests/unit/passes/test_image_embeddings.py`), a GPU (`tests/gpu/test_images.py`).
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PretrainedConfig

from bridge.config import ComputeConfig, SamplingConfig
from bridge.passes import preparation
from bridge.passes.packing import Sample, packs
from bridge.passes.prepared_model import PreparedModel
from bridge.planning.model_size import SEEING
from bridge.rollouts import openai_api
from bridge.rollouts.encoded_prompts import Encoded, Prompts
from bridge.rollouts.sampler import Sampler
from bridge.server.endpoint import Endpoint
from bridge.server.protocol import COMPLETIONS
from bridge.types import Completion
from bridge.weights import skeleton
from bridge.weights.attach import attach
from tests import family_proof, scenarios
from tests.cpu import test_gpus
from tests.models import colors, tiny
from tests.models.families import FAMILIES, INSIDE
from tests.models.processors import END, FIRST_TOKEN, IMAGE, START
from tests.scenarios import LiveServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's modules of these families import torchvision"),
]
MARKER = f"{START}{IMAGE}{END}"
MARKERS = {"Mistral 3": IMAGE}
"""What stands for an image, if it is not that: its processor writes what comes between rows and at the end."""
NAMES = [name for name in sorted(INSIDE) if FAMILIES[name]().model_type in SEEING]
SWAPPED_AT_LEAST = 8
"""How many times farther log-probs are if the trainer computes with another image of the same size."""
FLAGS = ("--batch-size", "64", "--group-size", "8", "--max-new-tokens", "1", "--lr", "1e-3")
REWARD = f"{Path(colors.__file__)}:names_it"
CHANCE = 1 / len(colors.COLORS)


@pytest.mark.parametrize("family", NAMES)
def test_server_and_trainer_see_the_same_images(family: str, tmp_path: Path) -> None:
    model = written(FAMILIES[family](), tmp_path)
    marker = MARKERS.get(family, MARKER)
    data, _ = colors.write(tmp_path / "data", marker)
    with scenarios.served(model, tmp_path / "server") as server:
        sees_the_same(server, data.parent, marker)
        refuses_other_tokens(server, data.parent, marker)


def test_task_with_images_is_learned(tmp_path: Path) -> None:
    model = written(FAMILIES["Qwen3-VL"](), tmp_path)
    with scenarios.served(model, tmp_path / "server") as server:
        learns(server, tmp_path, steps=30)
        tower_is_unchanged(server, tmp_path)
        scenarios.verifies(server, tmp_path)


def test_two_replicas_train_on_images(tmp_path: Path) -> None:
    """Each replica trains on images of prompts that the other one sampled."""
    model = written(FAMILIES["Qwen3-VL"](), tmp_path)
    data, _ = colors.write(tmp_path / "data", MARKER)
    of_data = ("--environment", "jsonl", "--data", str(data), "--reward", REWARD, "--training-steps", "3")
    test_gpus.run(model, tmp_path, *of_data, *FLAGS)
    rows = test_gpus.metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    differences = [float(str(row["logprob_diff_mean"])) for row in rows if row["tokens_trained"]]
    assert len(differences) > 1
    assert max(differences) < scenarios.PARITY_LIMIT, differences


def written(config: PretrainedConfig, folder: Path) -> Path:
    return tiny.write(config, folder / "model", std=family_proof.GAIN / sqrt(config.get_text_config().hidden_size))


def sees_the_same(server: LiveServer, data: Path, marker: str = MARKER) -> None:
    """Compare log-probs for prompts with one image, a different image of the same size, two images and no image.

    Exchanging the first two images must change the log-probs.
    """
    prompts = encoded(server, data, marker)
    completions, attached = sampled(server, prompts), attach(server.manifest)
    assert attached.weight_bytes() == 0
    prepared = preparation.prepare(attached.model, ComputeConfig(compile_layers=False))
    own = [mismatch(prepared, *pair) for pair in zip(prompts, completions, strict=True)]
    assert max(own) < scenarios.FAMILY_PARITY_LIMIT, own
    first, second, *_ = prompts
    exchanged = [replace_images(first, second), replace_images(second, first)]
    swapped = [mismatch(prepared, *pair) for pair in zip(exchanged, completions, strict=False)]
    assert min(swapped) > SWAPPED_AT_LEAST * max(own[:2]), (own, swapped)


def replace_images(prompt: Encoded, other: Encoded) -> Encoded:
    assert prompt.prompt == other.prompt
    return prompt._replace(images=other.images)


def encoded(server: LiveServer, data: Path, marker: str) -> list[Encoded]:
    model = server.manifest.model
    prompts, folder = Prompts(model, skeleton.tokenizer(model), {}), data / "images"
    problems: list[Any] = [
        {"prompt": f"{marker}color:", "images": [str(folder / "red-24x16-1.png")]},
        {"prompt": f"{marker}color:", "images": [str(folder / "blue-24x16-1.png")]},
        {
            "prompt": f"{marker}or{marker}?",
            "images": [str(folder / f"{name}.png") for name in ("white-16x32-2", "red-16x16-0")],
        },
        {"prompt": "color:"},
    ]
    return [prompts.encode(problem) for problem in problems]


def sampled(server: LiveServer, prompts: Sequence[Encoded]) -> list[tuple[Completion, ...]]:
    endpoint = Endpoint(url=server.manifest.url, reports_experts=server.status().experts is not None)
    with Sampler(SamplingConfig(max_new_tokens=16, request_timeout_s=120)) as sampler:
        servers = sampler.servers_at([endpoint])
        images: list[dict[str, Any]] = [{"images": shown} if shown else {} for _, shown in prompts]
        return [
            sampler.loop.run(
                sampler.one(
                    servers,
                    ids,
                    num_samples=4,
                    seed=1,
                    index=index,
                    **images[index],
                )
            )
            for index, (ids, _) in enumerate(prompts)
        ]


@torch.no_grad()
def mismatch(prepared: PreparedModel, prompt: Encoded, completions: Sequence[Completion]) -> float:
    """Return the mean log-prob difference between the server and the trainer, in nats."""
    samples = [
        Sample(
            prompt_token_ids=prompt.prompt, images=prompt.images, token_ids=completion.token_ids,
            sampled_logprobs=completion.logprobs, advantages=(1.0,) * len(completion.token_ids), weight=1.0,
        )
        for completion in completions
    ]  # fmt: skip
    (batch,) = packs(samples, max_tokens=10_000, device=prepared.model.device)
    logprobs_N, _ = prepared.logprobs(batch, 1.0)
    return float((logprobs_N - batch.sampled_logprobs_N).abs().mean())


def refuses_other_tokens(server: LiveServer, data: Path, marker: str = MARKER) -> None:
    """Check that prompts whose image tokens were expanded twice, or not at all, are refused."""
    ids, shown = encoded(server, data, marker)[0]
    assert shown is not None
    start, count = shown.starts[0], ids.count(FIRST_TOKEN)
    prompts = {
        "were they expanded twice?": ids[:start] + (FIRST_TOKEN,) * count + ids[start:],
        "vLLM finds the tokens of 0 images in the prompt": (*ids[:start], FIRST_TOKEN, *ids[start + count :]),
    }
    body = {"model": server.manifest.model, "n": 1, "max_tokens": 1, "temperature": 1.0}
    for words, prompt in prompts.items():
        document = {**body, "prompt": prompt, "images": openai_api.sent(shown)}
        answer = httpx.post(f"{server.manifest.url}{COMPLETIONS}", json=document, trust_env=False, timeout=60)
        assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
        assert words in answer.text
    whole = openai_api.sent(shown).items()
    for odd in (
        {name: (kind, [1, *shape], content) for name, (kind, shape, content) in whole},
        {name: (kind, shape, content[:4]) for name, (kind, shape, content) in whole},
        {name: ("int64", [1], "AAAAAAAAAAA=") for name, _ in whole},
    ):
        document = {**body, "prompt": ids, "images": odd}
        answer = httpx.post(f"{server.manifest.url}{COMPLETIONS}", json=document, trust_env=False, timeout=60)
        assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
        assert "the image tensors do not fit this model" in answer.text


def learns(server: LiveServer, folder: Path, *flags: str, steps: int) -> None:
    """Train by the command line until most colors are named, including shades that were not trained on."""
    data, kept = colors.write(folder / "data", MARKER)
    of_data = ("--environment", "jsonl", "--data", str(data), "--eval-data", str(kept), "--reward", REWARD)
    scenarios.trained(server, folder, *of_data, "--eval-samples", "4", *FLAGS, *flags, steps=steps)
    evaluations = (folder / "run" / "evaluations.jsonl").read_text().splitlines()
    first, last = (json.loads(line) for line in (evaluations[0], evaluations[-1]))
    assert first["reward_mean"] < 2 * CHANCE, first
    assert last["reward_mean"] > 3 * CHANCE, last
    differences = [step["logprob_diff_mean"] for step in scenarios.metrics(folder / "run") if step["tokens_trained"]]
    assert max(differences) < scenarios.PARITY_LIMIT, differences


def tower_is_unchanged(server: LiveServer, folder: Path) -> None:
    """Check that the checkpoint has the same vision tower as the model, but a different language model."""
    model, (saved,) = Path(server.manifest.model), (folder / "saved").glob("step_*")
    kind = skeleton.auto_class(FAMILIES["Qwen3-VL"]())
    was, now = (dict(kind.from_pretrained(folder).named_parameters()) for folder in (model, saved))
    changed = {name for name, parameter in was.items() if not torch.equal(parameter, now[name])}
    assert changed
    assert not any(name.startswith("model.visual.") for name in changed), changed
