"""Every vLLM in the supported range fits, according to the source in its wheel (`make contract`)."""

import pytest

from bridge_patches import pins
from bridge_patches.compatibility import TESTED_VERSIONS, find_faults, read_below
from tests.contract.wheels import fetch


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_every_pinned_symbol_fits(version: str, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--every-vllm"):
        pytest.skip("reads nine wheels: make contract")
    pinned = pins.collect()
    root = fetch(version, frozenset(pin.module for pin in pinned))
    assert find_faults(lambda module: read_below(root, module), pinned) == []
    of_origins = [pin.module for pin in pinned if pin.parsed()[0]["name"] == "FrontendArgs.allowed_origins"]
    assert any(read_below(root, module) for module in of_origins), "nothing checks the default of --allowed-origins"
    of_routes = [pin.module for pin in pinned if pin.parsed()[0]["name"] == "update_weights"]
    assert any(read_below(root, module) for module in of_routes), "nothing checks the routes of a stock server"
