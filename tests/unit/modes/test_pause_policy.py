"""When the server pauses and its KV cache sleeps, depending on settings and measurements."""

from dataclasses import replace

import pytest

from bridge.config import PublishingConfig
from bridge.errors import UsageError
from bridge.modes.mode import PausePolicy

ON_DEMAND, NEVER, ALWAYS = None, False, True
KV_SLEEP = [
    # --kv-sleep, the server can, the cache sleeps
    ("auto", True, ON_DEMAND),
    ("auto", False, NEVER),
    ("never", True, NEVER),
    ("never", False, NEVER),
    ("always", True, ALWAYS),
]
PAUSES = [
    # --pause-while-training, --max-staleness, one GPU for both, sampling stops
    (None, 0, True, False),
    (None, 8, True, True),
    (None, 8, False, False),
    (True, 0, False, True),
    (False, 8, True, False),
]


@pytest.mark.parametrize(("kv_sleep", "can_sleep", "sleeps"), KV_SLEEP)
@pytest.mark.parametrize(("pause", "max_staleness", "shares_gpu", "stops"), PAUSES)
def test_settings_and_server_determine_the_pause_policy(
    kv_sleep: str, can_sleep: bool, sleeps: bool | None, pause: bool | None, max_staleness: int, shares_gpu: bool,
    stops: bool,
) -> None:  # fmt: skip
    choices = PublishingConfig.model_validate({"kv_sleep": kv_sleep, "pause_while_training": pause})
    policy = PausePolicy.of(choices, max_staleness=max_staleness, can_sleep=can_sleep, shares_gpu=shares_gpu)
    assert policy == PausePolicy(kv_sleeps=sleeps, stops_sampling=stops)
    for measured in (True, False, None):  # decided by the first batch if nothing else decides
        decided = replace(policy, kv_sleeps=measured) if policy.kv_sleeps is None else policy
        assert decided.computes_inside == (bool(decided.kv_sleeps) or stops)


def test_always_sleep_without_sleep_support_is_refused() -> None:
    choices = PublishingConfig(kv_sleep="always")
    with pytest.raises(UsageError, match="--kv-sleep always"):
        PausePolicy.of(choices, max_staleness=0, can_sleep=False, shares_gpu=True)
