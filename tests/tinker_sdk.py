"""The `tinker` package in a Python of its own (`make tinker`), and what its client is told to expect."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from bridge.core.address import free_port
from tests.documents import ROOT

PYTHON = Path(os.environ.get("TINKER_PYTHON", ROOT / ".venv-tinker" / "bin" / "python"))
CLIENT = Path(__file__).with_name("tinker_client.py")
needs_client = pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: make tinker")
needs_messages = pytest.mark.skipif(
    not PYTHON.exists() and importlib.util.find_spec("tinker") is None, reason=f"no {PYTHON}: make tinker"
)


def package(folder: Path) -> Path:
    """Return a folder for sys.path with the SDK in it, and none of the packages that it depends on."""
    link = folder / "tinker"
    if not link.exists():
        (installed,) = PYTHON.parent.parent.glob("lib/python3*/site-packages/tinker")
        folder.mkdir(parents=True, exist_ok=True)
        link.symlink_to(installed)
    return folder


@contextmanager
def door(folder: Path, *flags: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]", Path]]:
    """Run `bridge tinker`; yield its address once it answers, the process and its log."""
    port, log = free_port("127.0.0.1"), folder / "door.log"
    folders = [ROOT, ROOT / "cli", ROOT / "environments", ROOT / "patches", package(folder / "sdk")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    argv = [
        sys.executable, "-m", "bridge", "tinker", "--port", str(port), "--save-path", str(folder / "runs"), *flags,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out, cwd=folder)
    try:
        while True:
            assert process.poll() is None, log.read_text()
            try:
                if httpx.get(f"{url}/api/v1/healthz", headers={"x-api-key": "tml-x"}, trust_env=False).is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url, process, log
    finally:
        process.kill()
        process.wait()


def expected(
    model: Path,
    *,
    base: str,
    pairs: list[tuple[list[int], list[int]]],
    lr: float,
    tolerance: float,
    is_real: bool,
    is_lora: bool,
) -> dict[str, Any]:
    """Return what the client's checks compare with: token ids, and log-probabilities of transformers in float32."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = []
    for prompt, completion in pairs:
        ids = prompt + completion
        with torch.no_grad():
            logprobs = reference(torch.tensor([ids[:-1]])).logits[0].float().log_softmax(-1)
        targets = torch.tensor(ids[1:])
        several = torch.stack([targets, (targets + 7) % 200], dim=1)
        texts.append(
            {
                "ids": ids, "num_prompt": len(prompt), "logprobs": logprobs.gather(1, targets[:, None])[:, 0].tolist(),
                "zero": logprobs[:, 0].tolist(), "several": several.tolist(),
                "several_logprobs": logprobs.gather(1, several).tolist(),
            }
        )  # fmt: skip
    return {
        "base": base, "tokenizer": str(model), "lr": lr, "is_real": is_real, "is_lora": is_lora,
        "tolerance": tolerance, "texts": texts, "steps": 15 if is_lora else 6, "many": 32 if is_real else 1000,
    }  # fmt: skip


def checks(url: str, about: dict[str, Any], folder: Path, *, limit_s: float) -> str:
    """Run the real client's checks; return what it printed, whose last line counts them."""
    path = folder / "expected.json"
    path.write_text(json.dumps(about))
    environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "PYTHONPATH": ""}
    done = subprocess.run(
        [PYTHON, CLIENT, path],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-4000:]}"
    return done.stdout
