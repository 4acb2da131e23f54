"""The reward plot: a PNG of the promised size, whatever the rewards are."""

import struct
import sys
from pathlib import Path
from subprocess import run

import pytest

from cli.reward_plot import plot, smoothed


@pytest.mark.parametrize(
    ("rewards", "held_out"),
    [([0.1, 0.5, 0.9], (0.1, 0.9)), ([0.5], (0.5, 0.5)), ([0.0] * 5, (0.0, 0.0)), ([-3.0, 7.0], (-4.0, 8.0))],
)
def test_it_writes_a_png_of_900_by_500(rewards: list[float], held_out: tuple[float, float], tmp_path: Path) -> None:
    path = plot(rewards, held_out, tmp_path / "new folder" / "reward.png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (900, 500)


def test_other_rewards_make_another_picture(tmp_path: Path) -> None:
    pictures = {
        plot(rewards, held_out, tmp_path / "reward.png").read_bytes()
        for rewards, held_out in [([0.2, 0.8], (0.2, 0.8)), ([0.2, 0.7], (0.2, 0.8)), ([0.2, 0.8], (0.2, 0.7))]
    }
    assert len(pictures) == 3


def test_smoothing_keeps_a_constant_and_follows_a_step_halfway() -> None:
    assert smoothed([0.5] * 4) == pytest.approx([0.5] * 4)
    line = smoothed([0.0] * 10 + [1.0] * 10)
    assert line[9] == 0.0
    assert 0.1 < line[10] < 0.4
    assert 0.85 < line[-1] < 1.0


def test_importing_it_loads_no_matplotlib() -> None:
    code = "import sys, cli.reward_plot; sys.exit('matplotlib' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
