"""Where atroposlib's environments look for servers, as docs/atropos.md and the trainer's hint claim."""

from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

from bridge.atropos.atropos_stream import POLLED_PORTS
from tests.models import chat, tiny

URL = "http://localhost:9001/v1"


@pytest.mark.parametrize(
    ("num_servers", "expected"),
    [(None, [f"http://localhost:{port}/v1" for port in POLLED_PORTS]), (2, [URL, URL])],
)
def test_single_server_must_be_given_in_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_servers: int | None, expected: list[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    tiny.qwen2(600).save_pretrained(tmp_path)
    chat.tokenizer(tmp_path, "qwen2_5")
    one = APIServerConfig(server_type="vllm", base_url=URL, model_name=str(tmp_path), api_key="x")
    given: Any = one if num_servers is None else [one] * num_servers
    assert [server.config.base_url for server in ServerManager(given).servers] == expected
