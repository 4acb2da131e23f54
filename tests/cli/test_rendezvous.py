"""Where hosts meet: who is let in, and the one line that ends every other attempt. Each host is a thread here.

Not covered: whole runs on two hosts (`tests/cpu/test_hosts.py`).
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bridge.config import ServeConfig, TrainConfig
from bridge.config.choices import HOSTS_KNOW
from bridge.errors import BridgeError, RankError, UsageError
from bridge_cli import alike, rendezvous
from bridge_cli.rendezvous import LOOPBACK, Met, Rendezvous
from bridge_cli.serve import free_port

SECRET = "known to the hosts alone"
FACTS = {alike.HOST: "one", "--gpus": "2"}
LIMIT_S = 30.0


@contextmanager
def places(count: int, *, secrets: tuple[str, ...] = (), hosts: int | None = None) -> Iterator[list[Rendezvous]]:
    """Yield the place where hosts meet, as each of `count` sees it; the first one listens."""
    port = free_port(LOOPBACK)
    known = secrets or (SECRET,) * count
    found = [Rendezvous(hosts or count, LOOPBACK, port, each.encode()) for each in known]
    try:
        yield found
    finally:
        for place in found:
            place.close()


@contextmanager
def in_background(act: Callable[..., Any], *given: Any, **more: Any) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor() as pool:
        yield pool.submit(act, *given, **more)


def test_hosts_that_meet_know_the_same_and_have_numbers_of_their_own() -> None:
    with places(3) as (first, *others), ThreadPoolExecutor() as pool:
        assert first.is_first
        assert not any(place.is_first for place in others)
        waiting = [pool.submit(place.attend, FACTS | {alike.HOST: "other"}) for place in others]
        met = [first.gather(FACTS, "runs/a"), *(each.result(LIMIT_S)[0] for each in waiting)]
        assert {each.result()[1] for each in waiting} == {"runs/a"}
        assert sorted(each.host for each in met) == [0, 1, 2]
        assert len({each.key for each in met}) == 1
        assert [each.interface for each in met] == ["lo"] * 3
        assert all(each.lost() is None for each in met)
        assert met[0].listener is not None
        met[1].lines[0].close()
        assert met[0].lost() == "other"


def test_each_run_has_a_key_of_its_own() -> None:
    keys = []
    for _ in range(2):
        with places(2) as (first, other), in_background(other.attend, FACTS) as waiting:
            keys.append(first.gather(FACTS, "run").key)
            waiting.result(LIMIT_S)
    assert keys[0] != keys[1]


def test_hosts_that_differ_end_in_the_same_line() -> None:
    theirs = {alike.HOST: "two", "--gpus": "1"}
    with places(2) as (first, other), in_background(other.attend, theirs) as waiting:
        with pytest.raises(UsageError) as met:
            first.gather(FACTS, "run")
        error = waiting.exception(LIMIT_S)
    assert isinstance(error, UsageError)
    assert error.message == met.value.message == "the hosts differ in --gpus: 2 on one, 1 on two"


def test_a_host_with_another_secret_is_sent_away_and_one_with_the_right_one_is_let_in() -> None:
    with places(3, secrets=(SECRET, "a guess of somebody", SECRET), hosts=2) as (first, stranger, other):
        with pytest.raises(UsageError, match=f"the host there has another {HOSTS_KNOW}"):
            stranger.attend(FACTS)
        with in_background(other.attend, FACTS) as waiting:
            assert first.gather(FACTS, "run").num_hosts == 2
            assert waiting.result(LIMIT_S)[0].host == 1


def test_what_is_not_a_host_is_not_listened_to() -> None:
    with places(2) as (first, other):
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"bridge " + b"0" * 64 + b"\n" + b"0" * 64 + b' {"host": "x"}\n'):
            with socket.create_connection((LOOPBACK, first._port)) as connection:
                connection.sendall(noise)
        with in_background(other.attend, FACTS) as waiting:
            assert first.gather(FACTS, "run").host == 0
            waiting.result(LIMIT_S)
        while first._strangers < 3:
            time.sleep(0.01)


@pytest.mark.parametrize("hello", [[1, 2], {"--gpus": "2"}, {alike.HOST: 3}, {alike.HOST: "one", "--gpus": ["2"]}])
def test_a_hello_of_another_form_is_refused_in_one_line(hello: Any) -> None:
    with places(3, hosts=2) as (first, odd, other):
        with pytest.raises(UsageError, match=f"the host there has another {HOSTS_KNOW}"):
            odd.attend(hello)
        with in_background(other.attend, FACTS) as waiting:
            assert first.gather(FACTS, "run").num_hosts == 2
            assert waiting.result(LIMIT_S)[0].host == 1
        assert first._strangers == 1


def test_a_connection_that_says_nothing_keeps_no_host_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_LIMIT_S", 10 * LIMIT_S)
    with (
        places(2) as (first, other),
        socket.create_connection((LOOPBACK, first._port)),
        in_background(other.attend, FACTS) as waiting,
    ):
        first.gather(FACTS, "run", limit_s=LIMIT_S)
        waiting.result(LIMIT_S)


class Exhausted:
    """A listener of a process that has no file descriptors left for a moment."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.left = listener, 3

    def accept(self) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_hosts_meet_once_there_are_descriptors_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "POLL_S", 0.01)
    with places(2) as (first, other):
        listener = Exhausted(first._listener)  # type: ignore[arg-type]
        first._listener = listener  # type: ignore[assignment]
        while listener.left:
            time.sleep(0.01)
        with in_background(other.attend, FACTS) as waiting:
            assert first.gather(FACTS, "run", limit_s=LIMIT_S).num_hosts == 2
            waiting.result(LIMIT_S)


def test_a_greeting_has_one_limit_for_all_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_LIMIT_S", 0.3)
    with places(1, hosts=2) as (first,), socket.create_connection((LOOPBACK, first._port), 5) as slow:
        began = time.monotonic()
        with suppress(OSError):
            while time.monotonic() < began + 5:
                slow.sendall(b"b")
                time.sleep(0.05)
        assert time.monotonic() < began + 2


def test_many_greetings_keep_no_host_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MOST_GREETINGS", 4)
    with places(2) as (first, other), ExitStack() as opened:
        held = [opened.enter_context(socket.create_connection((LOOPBACK, first._port), 5)) for _ in range(20)]
        for one in held[:16]:
            while one.recv(200):  # until it is closed
                pass
        with in_background(other.attend, FACTS) as waiting:
            assert first.gather(FACTS, "run", limit_s=LIMIT_S).num_hosts == 2
            waiting.result(LIMIT_S)


@pytest.mark.parametrize("hello", [[1, 2], {"--gpus": "2"}, {alike.HOST: 3}, "text", None])
def test_a_host_that_does_not_say_what_it_is_is_sent_away(hello: Any) -> None:
    with places(1, hosts=2) as (first,), socket.create_connection((LOOPBACK, first._port), 5) as connection:
        line = rendezvous._Line(connection, SECRET.encode(), rendezvous.OTHER)
        line.send(hello)
        with pytest.raises(OSError, match=r"closed|reset"):
            line.receive()
        with pytest.raises(UsageError, match="1 of 2 hosts came"):
            first.gather(FACTS, "run", limit_s=0.1)


def test_a_host_that_never_comes_is_waited_for_until_the_limit() -> None:
    with (
        places(1, hosts=2) as (first,),
        pytest.raises(UsageError, match=r"1 of 2 hosts came to 127.0.0.1:\d+ within 1"),
    ):
        first.gather(FACTS, "run", limit_s=1)


def test_a_host_that_ended_while_it_waited_is_not_counted() -> None:
    with places(2, hosts=2) as (first, other):
        line = other._line(0)
        line.send(FACTS)
        line.receive()
        line.close()
        with pytest.raises(UsageError, match="1 of 2 hosts came"):
            first.gather(FACTS, "run", limit_s=1)


def test_a_host_too_many_is_sent_away() -> None:
    with places(3, hosts=2) as (first, *others), ThreadPoolExecutor() as pool:
        waiting = [pool.submit(place.attend, FACTS) for place in others]
        while len(first._here) < 2:
            time.sleep(0.01)
        first.gather(FACTS, "run")
        (error,) = [error for each in waiting if (error := each.exception(LIMIT_S))]
    assert "all 2 hosts of the run" in str(error)


def test_the_others_learn_that_the_first_host_has_ended() -> None:
    with places(2, hosts=3) as (first, other), in_background(other.attend, FACTS) as waiting:
        with pytest.raises(UsageError, match="2 of 3 hosts came"):
            first.gather(FACTS, "run", limit_s=2)
        first.close()
        error = waiting.exception(LIMIT_S)
    assert isinstance(error, RankError)
    assert "ended before all 3 hosts had come" in error.message


def silent(connection: socket.socket) -> None:
    pass


def talking(connection: socket.socket) -> None:
    connection.sendall(b"220 mail.example.org ESMTP\r\n")


@pytest.mark.parametrize("answer", [silent, talking])
def test_a_port_of_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_LIMIT_S", 0.5)
    with socket.create_server((LOOPBACK, 0)) as taken:
        place = Rendezvous(2, LOOPBACK, taken.getsockname()[1], SECRET.encode())

        def serve() -> None:
            connection, _ = taken.accept()
            answer(connection)

        with in_background(serve), pytest.raises(UsageError, match="is no `bridge run` that waits") as met:
            place.attend(FACTS)
        assert f"by pid {os.getpid()}" in met.value.message


def test_a_host_that_nobody_has_is_refused_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    place = Rendezvous(2, LOOPBACK, 9, SECRET.encode())
    with pytest.raises(UsageError, match="no host answers there \\(Connection refused\\)"):
        place.attend(FACTS, limit_s=0.5)


@pytest.mark.parametrize(
    ("address", "found"),
    [("0.0.0.0", "is 0.0.0.0 on this host"), ("no-such-host.invalid", "there is no host no-such-host.invalid")],
)
def test_an_address_that_no_other_host_can_use_is_refused(address: str, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        Rendezvous(2, address, 29400, SECRET.encode())


def test_a_name_that_means_the_loopback_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29400))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(UsageError, match=r"gpu-1:29400 is 127\.0\.1\.1 on this host, where no other"):
        Rendezvous(2, "gpu-1", 29400, SECRET.encode())


@pytest.mark.parametrize("given", [None, "gpu-1", "gpu-1:", ":29400", "gpu-1:0", "gpu-1:99999", "gpu-1:http"])
def test_a_rendezvous_without_host_or_port_is_refused(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setenv(HOSTS_KNOW, SECRET)
    with (
        pytest.raises(UsageError, match="--hosts 2 needs --rendezvous HOST:PORT"),
        rendezvous.opened(TrainConfig.of(model_name="m", hosts=2, rendezvous=given)),
    ):
        pass


@pytest.mark.parametrize(("secret", "found"), [("", "is not set"), ("short", "has 5 characters")])
def test_hosts_without_a_secret_are_refused(monkeypatch: pytest.MonkeyPatch, secret: str, found: str) -> None:
    monkeypatch.setenv(HOSTS_KNOW, secret)
    with (
        pytest.raises(UsageError, match=f"{HOSTS_KNOW} {found}") as met,
        rendezvous.opened(TrainConfig.of(model_name="m", hosts=2, rendezvous="127.0.0.1:29400")),
    ):
        pass
    assert "openssl rand" in met.value.remedy


def test_one_host_needs_no_place_and_its_servers_never_see_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS_KNOW, SECRET)
    with rendezvous.opened(TrainConfig.of(model_name="m")) as place:
        assert place is None
    with (
        pytest.raises(UsageError, match="has no effect on one host"),
        rendezvous.opened(TrainConfig.of(model_name="m", rendezvous="a:1")),
    ):
        pass
    train = TrainConfig.of(model_name="m", hosts=2, rendezvous=f"127.0.0.1:{free_port(LOOPBACK)}")
    with rendezvous.opened(train):
        assert HOSTS_KNOW not in os.environ


def told(folder: Path, **choices: Any) -> alike.Facts:
    serve = ServeConfig(model=str(folder), port=choices.pop("port", 9001))
    flags = choices.pop("flags", [])
    return alike.facts(TrainConfig.of(model_name=str(folder), **choices), serve, flags)


def test_the_first_difference_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "task.py").write_text("class A: ...")
    task = {"environment": f"{tmp_path / 'task.py'}:A"}
    files = {"reward": f"math, {tmp_path / 'mine.py'}:brief=0.5", "eval_data": str(tmp_path / "held_out.jsonl")}
    for name in ("mine.py", "held_out.jsonl"):
        (tmp_path / name).write_text("one")
        before = told(tmp_path, **task, **files)
        (tmp_path / name).write_text("other")
        assert f"the file {tmp_path / name}" in str(alike.difference(before, told(tmp_path, **task, **files)))
    ours = told(tmp_path, **task)
    assert alike.difference(ours, told(tmp_path, run_dir=Path("x"), resume=True, restarts=2, port=9002, **task)) is None
    assert "differ in --lr: None on" in str(alike.difference(ours, told(tmp_path, lr=1e-5, **task)))
    assert "vLLM's flags" in str(alike.difference(ours, told(tmp_path, flags=["--enforce-eager"], **task)))
    assert "secret" not in str(told(tmp_path, flags=["--api-key", "secret"], **task))
    (tmp_path / "task.py").write_text("class A: pass")
    assert f"the file {tmp_path / 'task.py'}" in str(alike.difference(ours, told(tmp_path, **task)))
    (tmp_path / "model.safetensors").write_text("other weights")
    assert f"the files of {tmp_path}" in str(alike.difference(ours, told(tmp_path, **task)))
    reference = tmp_path / "reference"
    reference.mkdir()
    frozen = {"reference_model": str(reference), "kl_coef": 0.1, **task}
    ours = told(tmp_path, **frozen)
    (reference / "model.safetensors").write_text("frozen weights")
    assert f"the files of {reference}" in str(alike.difference(ours, told(tmp_path, **frozen)))
    monkeypatch.setattr("bridge.__version__", "0.0.1")
    assert "the version of Bridge" in str(alike.difference(ours, told(tmp_path, **task)))


def test_the_ranks_of_one_host_have_a_secret_that_is_made_for_them() -> None:
    one, other = Met.alone(), Met.alone()
    assert len(one.key) >= 16
    assert one.key != other.key
    for met in (one, other):
        assert met.listener is not None
        assert met.listener.getsockname()[0] == LOOPBACK
        met.listener.close()


def test_every_error_has_a_remedy() -> None:
    with places(1, hosts=2) as (first,), pytest.raises(BridgeError) as met:
        first.gather(FACTS, "run", limit_s=0.1)
    assert met.value.remedy
