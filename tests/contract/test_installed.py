"""The installed vLLM fits, and each patch pins what it imports from vLLM and passes on unknown arguments."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from bridge.config.rollouts import LEAST_TEMPERATURE, MOST_TEMPERATURE
from bridge.rollouts.distribution import WHOLE
from bridge_patches import pins
from bridge_patches.compatibility import TESTED_VERSIONS, check_installed, read_installed

ROOT = Path(__file__).parents[2]
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM is installed")


@needs_vllm
def test_every_pinned_symbol_of_the_installed_version_fits() -> None:
    assert check_installed()


@needs_vllm
def test_checking_imports_neither_vllm_nor_torch() -> None:
    program = (
        "import sys; from bridge_patches.compatibility import check_installed; check_installed(); "
        "print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@needs_vllm
def test_missing_vllm_module_reads_as_none() -> None:
    assert read_installed("vllm.no.such.module") is None
    assert read_installed("vllm.plugins"), "a package resolves to its __init__.py"


@pytest.mark.parametrize("file", sorted((ROOT / "patches").rglob("*.py")), ids=lambda file: file.name)
def test_every_patch_pins_what_it_imports_from_vllm(file: Path) -> None:
    pinned = {(pin.module, pin.parsed()[0]["name"].partition(".")[0]) for pin in pins.of_file(file)}
    modules = {module for module, _ in pinned}
    imported = {pair for pair in pins.imports_of(ast.parse(file.read_text())) if f"{pair[0]}.".startswith("vllm.")}
    unpinned = {pair for pair in imported if pair not in pinned and ".".join(pair).strip(".") not in modules}
    assert not unpinned, f"add these to the file's PINS: {sorted(unpinned)}"


@pytest.mark.parametrize("file", sorted((ROOT / "patches").rglob("*.py")), ids=lambda file: file.name)
def test_patches_pass_on_arguments_of_later_vllms(file: Path) -> None:
    """Otherwise the first call kills the engine, as when 0.33 added an argument to `get_computed_blocks`."""
    source = ast.parse(file.read_text(encoding="utf-8"))
    exact = {
        pin.parsed()[0]["name"].rpartition(".")[2]
        for pin in pins.of_file(file)
        if pin.parsed()[0].get("use") == "replace"
    }
    wrappers = [(wrapped, node) for wrapped, node in _wrappers(source) if wrapped not in exact]
    assert [node.name for _, node in wrappers if not _passes_on(node)] == [], (
        "needs *args and **kwargs, or a replace pin"
    )


def test_every_form_of_wrap_is_found() -> None:
    source = ast.parse("""
@wrap(Owner, "f")
def first(original, *args, **kwargs): return original(*args, **kwargs)
def second(original, one): return original(one)
def third(how, original, *args, **kwargs): return original(*args)
def fourth(original, *, one, **kwargs): return original(one=one, **kwargs)
def other(one): return original(one)
wrap(Owner, name)(self.second)
wrap(Owner, "h")(partial(third, how))
wrap(Owner, "i")(fourth)
""")
    wrappers = [(wrapped, node.name, _passes_on(node)) for wrapped, node in _wrappers(source)]
    assert wrappers == [("f", "first", True), ("", "second", False), ("h", "third", False), ("i", "fourth", True)]


def _wrappers(source: ast.Module) -> Iterator[tuple[str, pins.FunctionNode]]:
    """Yield each function that is passed to `wrap`, with the name of what it wraps; empty if that is not a constant."""
    functions = {node.name: node for node in ast.walk(source) if isinstance(node, pins.FunctionNode)}
    given: list[tuple[ast.expr, ast.AST]] = [
        (call, ast.Name(node.name)) for node in functions.values() for call in node.decorator_list
    ]
    given += [(call.func, call.args[0]) for call in ast.walk(source) if isinstance(call, ast.Call) and call.args]
    for call, wrapper in given:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "wrap":
            names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(wrapper)}
            wrapped = call.args[1]
            name = str(wrapped.value) if isinstance(wrapped, ast.Constant) else ""
            yield from ((name, functions[leaf]) for leaf in sorted(names & functions.keys()))


def _passes_on(wrapper: pins.FunctionNode) -> bool:
    """Return whether arguments that the wrapper does not name reach the original; it may accept only keywords."""
    calls = [node for node in ast.walk(wrapper) if isinstance(node, ast.Call) and ast.unparse(node.func) == "original"]
    rest, named = wrapper.args.vararg, wrapper.args.kwarg
    takes_all = named is not None and (rest is not None or bool(wrapper.args.kwonlyargs))
    return takes_all and all(
        any(keyword.arg is None for keyword in call.keywords)
        and (rest is None or any(isinstance(argument, ast.Starred) for argument in call.args))
        for call in calls
    )


def test_bridge_sets_every_parameter_with_model_defaults() -> None:
    (known,) = [pin.parsed()[0]["names"].split(", ") for pin in pins.collect() if " lists " in pin.statement]
    assert set(known) == {*WHOLE, "temperature", "max_new_tokens", "skip_special_tokens"}


def test_vllm_samples_at_every_temperature_of_a_run() -> None:
    from vllm.sampling_params import SamplingParams

    for temperature in (LEAST_TEMPERATURE, MOST_TEMPERATURE):
        assert SamplingParams(temperature=temperature).temperature == temperature
    assert SamplingParams(temperature=LEAST_TEMPERATURE / 2).temperature == LEAST_TEMPERATURE


def test_package_requires_the_tested_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    major, minor, _ = TESTED_VERSIONS[-1].split(".")
    assert extras["gpu"] == [f"vllm>={TESTED_VERSIONS[0].removesuffix('.0')},<{major}.{int(minor) + 1}"]
