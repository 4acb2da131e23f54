"""Looking up a model's name before vLLM starts: on a local hub, without a hub, and only in the cache."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.http_server import Answer, HttpRequest, serving

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys
from bridge.checks import model
from bridge.core import hub
from bridge.errors import UsageError

hub.REQUEST_LIMIT_S, hub.LIMIT_S = (2.0, 6.0) if "slow" in sys.argv[1] else (30.0, 30.0)
try:
    hub.fetch_config(sys.argv[1])
    print(json.dumps({"config": model.read(sys.argv[1])}))
except UsageError as error:
    print(json.dumps({"message": error.message, "hint": error.hint}))
"""
CONFIG = "/resolve/main/config.json"
NAME = "Someone/Model-0.5B-Instruct"
SECRET = "someone/secret"
LIMIT_S = 60.0


def answer(request: HttpRequest) -> Answer:
    """Respond like the hub, which returns 401 for a missing model unless the user is logged in."""
    known = {
        f"/{NAME}{CONFIG}": Answer('{"model_type": "llama"}', 200, {"ETag": '"1"', "X-Repo-Commit": "0" * 40}),
        f"/{SECRET}{CONFIG}": Answer("", 403, {"X-Error-Code": "GatedRepo"}),
        f"/someone/weights{CONFIG}": Answer("", 404, {"X-Error-Code": "EntryNotFound"}),
        f"/someone/slow{CONFIG}": None,
    }
    if "slow" in request.path:
        time.sleep(4)
    return known.get(request.path) or Answer("", 401, {"X-Error-Code": "RepoNotFound"})


def looked_up(model: str, cache: Path, **surroundings: str) -> dict[str, Any]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    outer |= {"HF_HOME": str(cache), "HF_HUB_CACHE": str(cache), "PYTHONPATH": str(ROOT)} | surroundings
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model],
        env=outer, cwd=cache, capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(done.stdout)
    assert done.stderr == ""
    assert "\n" not in "".join(map(str, document.values()))
    return document


def test_config_is_fetched_once_and_then_cached(tmp_path: Path) -> None:
    with serving(answer) as hub:
        assert looked_up(NAME, tmp_path, HF_ENDPOINT=hub.url) == {"config": {"model_type": "llama"}}
    assert looked_up(NAME, tmp_path, HF_HUB_OFFLINE="1") == {"config": {"model_type": "llama"}}


@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        ("nobody/else", "has no such model, or hides it from you", "hf auth login"),
        (SECRET, "requires that you accept its terms", "hf auth login"),
        ("someone/weights", "has no config.json for it", "in transformers' format"),
        ("someone/slow", "does not answer", "hf download someone/slow"),
        ("some one/a:b", "no such folder in ", "--model ORGANISATION/NAME"),
    ],
)
def test_unavailable_config_is_refused_with_the_reason(tmp_path: Path, model: str, message: str, hint: str) -> None:
    with serving(answer) as hub:
        document = looked_up(model, tmp_path, HF_ENDPOINT=hub.url)
    assert document["message"].startswith(f"--model {model}: ")
    assert message in document["message"]
    assert hint in document["hint"]


@pytest.mark.parametrize(
    ("surroundings", "message"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "not downloaded yet, and HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub at http://127.0.0.1:9 does not answer ([Errno 111]"),
        ({"HF_ENDPOINT": "http://no-such-host.invalid"}, "the hub at http://no-such-host.invalid does not answer"),
    ],
)
def test_only_cached_models_can_be_served_offline(tmp_path: Path, surroundings: dict[str, str], message: str) -> None:
    document = looked_up(NAME, tmp_path, **surroundings)
    assert message in document["message"]
    assert document["hint"].startswith("name a folder, or download it")


@pytest.mark.parametrize("model", ["s3://bucket/model", "nobody/else"])
def test_model_names_of_another_hub_are_not_looked_up(tmp_path: Path, model: str) -> None:
    others = {"VLLM_USE_MODELSCOPE": "True"} if model == "nobody/else" else {}
    assert looked_up(model, tmp_path, HF_HUB_OFFLINE="1", **others) == {"config": None}
