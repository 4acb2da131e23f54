"""Scores in worker processes that hang, crash, or lose their parent; every real process is checked to have exited."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from bridge.errors import RewardError
from bridge.scoring import worker_handle
from bridge.scoring.inside_worker import pickled
from bridge.scoring.score import FailedScore, Score, Scores
from bridge.scoring.scorer import Scorer
from bridge.types import Problem
from tests.unit import scores_sample
from tests.unit.scores_sample import Sample

LIMIT_S = 3.0
"""Time limit of a score, far above what one takes that does not hang."""
PATIENCE_S = 60.0
ROOT = Path(__file__).parents[3]
PROBLEM: Problem = {"prompt": "3+4="}
PROGRAM = """
import asyncio
import sys
from functools import partial
from pathlib import Path

from bridge.scoring.scorer import Scorer
from tests.unit.scores_sample import Sample

log, *completions = sys.argv[1:]
scorer = Scorer(partial(Sample, Path(log)), processes=2, timeout_s=100)
print(asyncio.run(scorer.score({"prompt": "3+4="}, completions)))
scorer.close()
"""
"""No `if __name__ == "__main__"`."""


@dataclass
class Scoring:
    """A scorer, and the log of its processes."""

    log: Path
    scorer: Scorer
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def score(self, *completions: str) -> list[Score | FailedScore]:
        return self.runner.run(self.scorer.score(PROBLEM, completions))

    def rewards(self, *completions: str) -> list[float | None]:
        return [score.reward if isinstance(score, Score) else None for score in self.score(*completions)]

    def fault(self, completion: str) -> FailedScore:
        (score,) = self.score(completion)
        assert isinstance(score, FailedScore)
        assert "\n" not in score.line
        return score

    @property
    def noted(self) -> list[str]:
        """The calls that have started, in order."""
        return noted(self.log)

    @property
    def processes(self) -> set[int]:
        """Every process that ever scored, and its children."""
        return processes(self.log)


def noted(log: Path) -> list[str]:
    return [line.partition(" ")[2] for line in log.read_text().splitlines()] if log.exists() else []


def processes(log: Path) -> set[int]:
    return {int(line.split()[0]) for line in log.read_text().splitlines()}


@contextmanager
def scoring(folder: Path, **choices: Any) -> Iterator[Scoring]:
    log = folder / "log"
    scorer = Scorer(partial(Sample, log), **{"processes": 1, "timeout_s": LIMIT_S} | choices)
    try:
        yield (made := Scoring(log, scorer))
        made.runner.close()
    finally:
        scorer.close()
    until(lambda: not alive(made.processes - {os.getpid()}))


def alive(pids: set[int]) -> set[int]:
    """Return the processes still running; our own children must not even be zombies, because we must reap them."""
    return {pid for pid in pids if psutil.pid_exists(pid) and not _is_nobodys(pid)}


def _is_nobodys(pid: int) -> bool:
    """Return whether an orphaned process has exited and waits for init to reap it."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return True


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


async def begun(ours: Scoring, completion: str) -> None:
    while completion not in ours.noted:  # noqa: ASYNC110  another process notes it
        await asyncio.sleep(0.01)


def test_faulty_score_does_not_affect_others(tmp_path: Path) -> None:
    given = [
        *("good", "raises", "spins", "fine", "is_nan", "dies", "crashes", "matches", "well", "is_text"),
        *("runs_out_of_memory", "starts_another", "exits", "enough"),
    ]
    with scoring(tmp_path, processes=4) as ours:
        scores = ours.score(*given)
        begun = [line for line in ours.noted if line != "started"]
    assert sorted(begun) == sorted(given), "each was begun once"
    scored = {completion: one.reward for completion, one in zip(given, scores, strict=True) if isinstance(one, Score)}
    assert scored == {"good": 4, "fine": 4, "well": 4, "enough": 6}
    faults = {
        completion: one.line for completion, one in zip(given, scores, strict=True) if isinstance(one, FailedScore)
    }
    assert {completion: line.partition(", on prompt")[0] for completion, line in faults.items()} == {
        "raises": f"Sample.score raised ValueError: could not convert string to float: 'seven' ({line('raises', 1)})",
        "spins": f"Sample.score took longer than 3 s ({line('spins', 1)})",
        "is_nan": f"Sample.score returned nan, expected a finite number ({line('score')})",
        "dies": f"Sample.score exited with status 3 ({line('score')})",
        "crashes": f"Sample.score was killed by SIGSEGV ({line('crashes', 5)})",
        "matches": f"Sample.score took longer than 3 s ({line('matches', 1)})",
        "is_text": f"Sample.score returned '1.0' of type str, expected a finite number ({line('score')})",
        "runs_out_of_memory": f"Sample.score was killed by SIGKILL (out of memory?) ({line('score')})",
        "starts_another": f"Sample.score took longer than 3 s ({line('starts_another', 3)})",
        "exits": f"Sample.score raised SystemExit: enough ({line('exits', 1)})",
    }
    assert all(line.endswith(f"on prompt '3+4=' and completion '{name}'") for name, line in faults.items())


def line(name: str, number: int = 0) -> str:
    """Name a line of a method of the sample, counted from its `def`."""
    return f"scores_sample.py line {getattr(Sample, name).__code__.co_firstlineno + number}"


def test_failed_worker_process_is_replaced(tmp_path: Path) -> None:
    with scoring(tmp_path, timeout_s=2) as ours:
        assert ours.rewards("dies", "good", "spins", "fine") == [None, 4, None, 4]
        assert len(ours.processes) == 3


def test_processes_started_by_a_score_end_with_it(tmp_path: Path) -> None:
    with scoring(tmp_path, timeout_s=2) as ours:
        assert ours.fault("starts_another").kind == "Sample.score took longer than 2 s"
        assert len(ours.processes) == 2
        until(lambda: not alive(ours.processes))


SPOILED = "Sample.score wrote to the connection of its process"
LATE = "Sample.score took longer than 2 s"


@pytest.mark.parametrize(
    ("completion", "kind"),
    [
        *[(name, None) for name in ("forks", "forks_in_c", "forks_and_exits", "leaves_a_daemon")],
        ("leaves_a_daemon_and_dies", "Sample.score exited with status 3"),
        ("leaves_a_daemon_and_hangs", LATE),
        ("hangs_in_a_child_of_c", "Sample.score exited with status 3"),
        *[(name, LATE) for name in ("will_not_stop", "stops", "stops_its_parent")],
        *[
            (name, SPOILED)
            for name in (
                "scribbles",
                "claims_too_much",
                "writes_a_pickle",
                "answers_by_itself 7",
                "answers_by_itself 0",
            )
        ],
        ("scribbles abc", SPOILED),
        ("scribbles_and_hangs", LATE),
        ("closes_everything", "Sample.score exited with status 1"),
        ("kills_its_parent", "Sample.score closed the connection of its process"),
        ("ends_by_a_nameless_signal", f"Sample.score was killed by signal {signal.SIGRTMIN + 5}"),
    ],
)
def test_failed_worker_never_changes_later_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completion: str, kind: str | None
) -> None:
    monkeypatch.setattr(worker_handle, "GRACE_S", 0.5)
    with scoring(tmp_path, timeout_s=2) as ours:
        first, *others = ours.score(completion, "good", "process", "enough", "process")
        assert (first.kind if isinstance(first, FailedScore) else None) == kind
        assert isinstance(first, FailedScore) or first.reward == 1
        rewards = [other.reward for other in others if isinstance(other, Score)]
        assert rewards[::2] == [4, 6]
        assert rewards[1] == rewards[3], "the same process scored both"
    assert not ours.log.with_suffix(".unpickled").exists()


def test_forked_child_never_becomes_a_second_trainer(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with scoring(tmp_path, processes=0) as ours:
        assert ours.rewards("forks", "good") == [1, 4]
        ours.log.with_suffix(".end").open("a").write("reached\n")
        forked = {child.pid for child in psutil.Process().children()} - before
        assert forked
        for pid in forked:
            os.waitpid(pid, 0)
    assert ours.log.with_suffix(".end").read_text() == "reached\n"


def test_one_completion_is_scored_per_process_at_a_time(tmp_path: Path) -> None:
    with scoring(tmp_path, processes=3, timeout_s=PATIENCE_S) as ours:
        assert ours.rewards("meets 3", "meets 3", "meets 3") == [1, 1, 1]
        assert len(ours.processes) == 3


def test_process_killed_while_idle_loses_no_completion(tmp_path: Path) -> None:
    with scoring(tmp_path) as ours:
        (first,) = ours.rewards("process")
        assert first is not None
        os.kill(int(first), signal.SIGKILL)
        until(lambda: not alive({int(first)}))
        (second,) = ours.rewards("process")
        assert second not in {None, first}


def test_timely_answer_counts_even_if_read_late(tmp_path: Path) -> None:
    with scoring(tmp_path) as ours:

        async def held_up() -> list[Score | FailedScore]:
            answer = asyncio.create_task(ours.scorer.score(PROBLEM, ["waits"]))
            await begun(ours, "waits")
            ours.log.with_suffix(".go").touch()
            until(lambda: "done" in ours.noted)
            time.sleep(LIMIT_S)  # noqa: ASYNC251  and nobody listens
            return await answer

        ours.score("ready")
        assert ours.runner.run(held_up()) == [Score(reward=1.0)]


def test_interrupt_while_scoring_leaves_no_stale_answer(tmp_path: Path) -> None:
    with scoring(tmp_path, timeout_s=PATIENCE_S) as ours:

        async def interrupted() -> None:
            task = asyncio.create_task(ours.scorer.score(PROBLEM, ["spins", "good"]))
            await begun(ours, "spins")
            os.kill(os.getpid(), signal.SIGINT)
            await task

        with pytest.raises(KeyboardInterrupt):
            ours.runner.run(interrupted())
        assert not alive(ours.processes)
        assert ours.noted == ["spins"]
        assert ours.rewards("another", "good") == [7, 4]


def test_workers_ignore_ctrl_c(tmp_path: Path) -> None:
    with scoring(tmp_path) as ours:
        assert ours.rewards("interrupts_itself") == [1]


def test_output_of_a_score_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with scoring(tmp_path) as ours:
        assert ours.rewards("prints") == [1]
        assert capfd.readouterr() == ("", "a word of the score\n")


def test_workers_import_no_heavy_modules(tmp_path: Path) -> None:
    with scoring(tmp_path) as ours:
        modules = ("torch", "transformers", "pydantic", "httpx", "asyncio")
        assert ours.rewards("knows sys", *(f"knows {module}" for module in modules)) == [1, 0, 0, 0, 0, 0]


def test_zero_processes_score_in_the_trainer_without_a_limit(tmp_path: Path) -> None:
    with scoring(tmp_path, processes=0, timeout_s=1e-9) as ours:
        assert ours.rewards("process", "raises", "fine") == [os.getpid(), None, 4]


def refused(recipe: Callable[[], Scores], problem: Problem = PROBLEM, *, processes: int = 2) -> RewardError:
    def score() -> None:
        with closing(Scorer(recipe, processes=processes, timeout_s=LIMIT_S)) as scorer:
            asyncio.run(scorer.score(problem, ["7"] * 4))

    with pytest.raises(RewardError) as caught:
        score()
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("processes", [0, 2])
def test_recipe_that_raises_ends_the_run_with_one_line(processes: int) -> None:
    location = f"scores_sample.py line {scores_sample.broken.__code__.co_firstlineno + 1}"
    error = refused(scores_sample.broken, processes=processes)
    assert error.message == f"creating the scoring object raised ValueError: no luck ({location})"
    assert error.hint == f"fix {location}, then run the same command again"


def test_recipe_that_exits_its_process_is_reported() -> None:
    error = refused(scores_sample.ends)
    assert error.message.endswith("failed to create the scoring object: it exited with status 3")
    assert "--reward-processes 0" in error.hint


def test_unpicklable_recipe_or_problem_is_refused(tmp_path: Path) -> None:
    here: Any = lambda: None  # noqa: E731  what pickle refuses
    error = refused(here)
    assert "cannot be sent to another process: " in error.message
    assert "--reward-processes 0" in error.hint
    unfit: Any = {"prompt": "3+4=", "answer": here}
    assert "cannot be sent to another process: " in refused(partial(Sample, tmp_path / "log"), unfit).message


def command(source: str, log: Path, *completions: str) -> list[str]:
    return [sys.executable, "-c", source, str(log), *completions]


def output(*given: str) -> tuple[str, str]:
    """Return what a program prints on stdout and stderr."""
    surroundings = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(given, env=surroundings, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.stdout, done.stderr


def test_workers_do_not_rerun_the_users_script(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(PROGRAM)
    stdout, stderr = output(sys.executable, str(script), str(log), "good", "raises")
    assert stdout.startswith("[Score(reward=4.0, parts={}, turns=[]), FailedScore("), stderr
    assert stdout.count("\n") == 1
    assert sorted(noted(log)) == ["good", "raises"]


def test_recipe_defined_in_the_script_gets_a_hint(tmp_path: Path) -> None:
    script = PROGRAM.replace("log, *", "class Own(Sample): ...\nlog, *").replace("partial(Sample,", "partial(Own,")
    _, stderr = output(*command(script, tmp_path / "log", "good"))
    assert "cannot be loaded in another process: AttributeError: Can't get attribute 'Own'" in stderr
    assert "from the script that was started to a module" in stderr


def test_busy_workers_exit_with_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with subprocess.Popen(command(PROGRAM, log, "matches", "spins"), cwd=ROOT) as parent:
        until(lambda: {"matches", "spins"} <= set(noted(log)))
        assert len(alive(processes(log))) == 2
        parent.kill()
    until(lambda: not alive(processes(log)))


def test_processes_of_a_score_exit_with_a_killed_trainer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with subprocess.Popen(command(PROGRAM, log, "leaves_a_daemon_and_hangs"), cwd=ROOT) as parent:
        until(lambda: "started" in noted(log))
        assert len(alive(processes(log))) == 2
        parent.kill()
    until(lambda: not alive(processes(log)))


def test_idle_workers_exit_with_a_killed_parent(tmp_path: Path) -> None:
    log, program = tmp_path / "log", PROGRAM.replace("scorer.close()", "sys.stdout.flush(); sys.stdin.read()")
    given = command(program, log, "meets 2", "meets 2")
    with subprocess.Popen(given, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().count("Score") == 2
        assert len(alive(processes(log))) == 2
        parent.kill()
    until(lambda: not alive(processes(log)))


def test_worker_exits_quietly_if_its_connection_closes(
    tmp_path: Path,
) -> None:
    ours, theirs = socket.socketpair()
    code = (
        "import os, sys; from bridge.scoring import inside_worker; "
        "inside_worker.work(*map(int, sys.argv[1:]), os.getppid())"
    )
    with theirs, (tmp_path / "last_words").open("w") as last_words:
        given = theirs.fileno(), last_words.fileno()
        command = [sys.executable, "-c", code, *map(str, given)]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=given, stderr=subprocess.PIPE, text=True)
    with ours:
        ours.settimeout(PATIENCE_S)
        ours.sendall(pickled(partial(Sample, tmp_path / "log")))
        ours.recv(1, socket.MSG_PEEK)  # the answer is there, and stays unread
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
