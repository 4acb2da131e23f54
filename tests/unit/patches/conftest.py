"""A fence on an engine that records its calls, and a process that may hold it."""

import subprocess
from collections.abc import Iterator

import pytest

from bridge.server.protocol import Holder
from bridge_patches.server_fence import ServerFence
from tests.unit.checks_sample import holder_of, manifest
from tests.unit.patches.fake_engine import FakeEngine, end, living


@pytest.fixture
def anyio_backend() -> str:
    """Run async tests with asyncio, as vLLM runs."""
    return "asyncio"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = living()
    yield child
    end(child)


@pytest.fixture
def other(child: subprocess.Popen[bytes]) -> Holder:
    return holder_of(child.pid)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def fence(engine: FakeEngine) -> ServerFence:
    return ServerFence(engine, manifest())
