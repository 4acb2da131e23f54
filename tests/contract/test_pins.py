"""Each kind of pin reports each way in which a vLLM can stop fitting."""

from collections.abc import Collection
from pathlib import Path

import pytest

from bridge.checks import software
from bridge.errors import IncompatibleVersionError
from bridge_patches import compatibility, pins
from bridge_patches.compatibility import TESTED_VERSIONS, find_faults, is_supported
from bridge_patches.pins import Pin

SOURCE = """
from typing import TYPE_CHECKING
GROUP = "vllm.group"
if TYPE_CHECKING:
    platform: object

class Base:
    limit: int = 3
    def __init__(self, size):
        self.size = size
    async def reset(self, hard=False): ...

class Worker(Base):
    def load(self, dummy=False, *, model=None): ...
    def pool(self, tag): ...
    def defaults(self):
        available = ["top_k", "top_p"]
        return available
    def process(self):
        from layers.linear import dispatch
        dispatch(self)
"""


def pin(statement: str, module: str = "m") -> Pin:
    return Pin(module=module, statement=statement)


LOAD, POOL = pin("wrap Worker.load(dummy)"), pin("replace Worker.pool(tag)")
LATE = pin("Worker.process imports layers.linear.dispatch")
PINS = (
    LOAD,
    POOL,
    pin("call async Worker.reset(hard)"),
    pin("Worker: size, limit, pool"),
    pin("GROUP = 'vllm.group'"),
    LATE,
    pin("platform"),
    pin("Worker.defaults lists available: top_k, top_p"),
)


def _faults(old: str, new: str, pinned: Collection[Pin] = PINS) -> list[str]:
    doctored = SOURCE.replace(old, new)
    assert doctored != SOURCE or old == new, f"the source does not hold {old!r}"
    return find_faults({"m": doctored}.get, pinned)


def test_unmodified_source_fits() -> None:
    assert _faults("", "") == []


def test_conditional_pin_applies_if_its_condition_is_defined() -> None:
    beside_pool, elsewhere = (pin("if Worker.pool: wrap Worker.load(dummy)", module) for module in ("m", "n"))
    assert _faults("", "", (beside_pool, elsewhere)) == []
    assert _faults("load(self, dummy=False", "load(self", [pin("if Worker.drain: wrap Worker.load(dummy)")]) == []
    assert _faults("load(self, dummy=False", "load(self", (beside_pool,))
    assert _faults("def load", "def load_weights", (beside_pool,))


def test_changed_default_is_reported() -> None:
    source = "class Flags:\n    pages: list[str] = field(default_factory=list)"
    either = pin("if Flags: Flags.pages = field(default_factory=lambda: ['*']) | field(default_factory=list)")
    assert find_faults({"m": source}.get, [either]) == []
    assert find_faults({"m": source.replace("Flags", "Others")}.get, [either]) == []
    assert find_faults({"m": source.replace("=list", "=set")}.get, [either])


def test_pins_are_read_from_a_files_source_text(tmp_path: Path) -> None:
    (tmp_path / "patch.py").write_text('''PINS = """
# A comment.
m: call f()  # why
n.o
    C: a,
        b
    # Another.
    name
"""
raise ImportError
''')
    statements = [(pin.patch, pin.module, pin.statement) for pin in pins.of_file(tmp_path / "patch.py")]
    assert statements == [("patch", "m", "call f()"), ("patch", "n.o", "C: a, b"), ("patch", "n.o", "name")]


@pytest.mark.parametrize("statement", ["call f", "wraps f()", "NAME = 3", "f lists x", "C : a"])
def test_invalid_statement_is_an_error(statement: str) -> None:
    with pytest.raises(ValueError, match="is not a statement about m"):
        pin(statement).fault(None)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("load(self, dummy=False", "load(self", "m.Worker.load takes (model), expected (dummy)"),
        ("def load", "def load_weights", "m.Worker.load is missing"),
        ("pool(self, tag)", "pool(self, tag, device=0)", "m.Worker.pool takes (tag, device), expected (tag)"),
        ("pool(self, tag)", "pool(self, kind)", "m.Worker.pool takes (kind), expected (tag)"),
        ("hard=False", "mode, hard=False", "m.Worker.reset takes (mode, hard), expected (hard): mode has no default"),
        (
            "hard=False",
            "*, mode, hard=False",
            "m.Worker.reset takes (mode, hard), expected (hard): mode has no default",
        ),
        ("async def reset", "def reset", "m.Worker.reset is not async, expected the opposite"),
        ("self.size = size", "self.length = size", "m.Worker has no attribute size"),
        ("class Worker(Base)", "class Worker", "m.Worker has no attribute size, limit"),
        ('"vllm.group"', '"vllm.groups"', "m.GROUP is 'vllm.groups', expected 'vllm.group'"),
        (
            "from layers.linear",
            "from layers.other",
            "m.Worker.process does not import layers.linear.dispatch when it runs",
        ),
        ("platform: object", "pass", "m.platform is missing"),
        ('"top_p"]', '"top_p", "top_q"]', "m.Worker.defaults lists top_q, which Bridge does not know"),
        ('["top_k", "top_p"]', "sorted(KNOWN)", "m.Worker.defaults has no list available"),
        ("def defaults", "def no_defaults", "m.Worker.defaults has no list available"),
    ],
)
def test_modified_source_is_reported(old: str, new: str, fault: str) -> None:
    assert fault in _faults(old, new)


def test_top_level_import_is_not_a_late_import() -> None:
    moved = SOURCE.replace("        from layers.linear import dispatch\n", "").replace(
        "from typing", "from layers.linear import dispatch\nfrom typing"
    )
    assert len(find_faults({"m": moved}.get, [LATE])) == 1


def test_all_mismatches_are_reported_together() -> None:
    assert [fault.partition(" ")[0] for fault in _faults("class Worker(Base):", "class Other:")] == [
        "m.Worker.load",
        "m.Worker.pool",
        "m.Worker.reset",
        "m.Worker",
        "m.Worker.process",
        "m.Worker.defaults",
    ]


def test_missing_module_is_reported_once_per_symbol() -> None:
    assert find_faults(lambda _module: None, [POOL, LOAD]) == [
        "m.Worker.pool is missing with its module",
        "m.Worker.load is missing with its module",
    ]


@pytest.mark.parametrize("version", [*TESTED_VERSIONS, "0.32.0+cpu", "0.26.3", "0.33.1.post1", "0.30.0rc2"])
def test_version_within_the_range_is_supported(version: str) -> None:
    assert is_supported(version)


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "0.3.3", "dev"])
def test_version_outside_the_range_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "installed_version", lambda: version)
    with pytest.raises(IncompatibleVersionError) as refusal:
        compatibility.check_installed()
    assert version in refusal.value.message
    assert all(tested in refusal.value.message for tested in TESTED_VERSIONS)
    assert '"vllm>=0.26,<0.34"' in refusal.value.hint


def test_mismatched_vllm_is_refused_with_every_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "installed_version", lambda: "0.30.0")
    monkeypatch.setattr(compatibility, "read_installed", {"m": "class Worker: ..."}.get)
    with pytest.raises(IncompatibleVersionError) as refusal:
        compatibility.check_installed()
    assert "0.30.0" in refusal.value.message
    names = [
        f"{pin.module}.{pin.parsed()[0]['name']}" for pin in pins.collect() if not pin.parsed()[0].get("condition")
    ]
    assert [name for name in names if f"{name} is missing with its module" not in refusal.value.message] == []
    assert all(tested in refusal.value.message for tested in TESTED_VERSIONS)


def test_missing_vllm_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(IncompatibleVersionError, match="no vLLM is installed"):
        compatibility.installed_version()
