"""`bridge report`: the page of whole, partial and broken runs, of several runs, and what it refuses to do."""

import html.parser
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from bridge.core import claim
from bridge.run.run_directory import RunDirectory, to_json
from cli import main
from cli.report import record
from cli.report.command import names
from tests.cli import report_runs
from tests.cli.test_help import run_python

HEADINGS = (
    "Learning", "Two engines, one policy", "Time and memory", "Completions over time",
    "Choices that differ from the defaults", "What happened between the steps",
)  # fmt: skip
CHARTS = (
    "reward", "parts", "length", "truncated", "entropy", "clipped", "gradient", "loss", "changed", "difference",
    "histogram", "weights", "corrected", "time", "fence", "speed", "tokens", "memory",
)  # fmt: skip


class Page(html.parser.HTMLParser):
    """What a browser makes of a page: its elements and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)
        self.text += " " if tag in ("td", "th", "li") else ""

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for each, attributes in self.elements if each == tag]

    @property
    def charts(self) -> list[str]:
        keys = [str(attributes.get("id")) for attributes in self.all("figure")]
        return [key.removeprefix("chart-") for key in keys]


def written(*runs: Path, out: Path) -> Page:
    assert main.answer(["report", *map(str, runs), "--out", str(out)]) == 0
    return Page(out.read_text())


def drawn(page: Path) -> dict[str, list[Any]]:
    """Return the steps and values of every line of every chart."""
    lines: dict[str, list[Any]] = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text())[0])["lines"]
    return lines


def test_the_page_of_a_whole_run_has_every_section_and_chart(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=60)
    report_runs.write_rollouts(run, report_runs.groups(60, num_problems=12))
    page = written(run.path, out=tmp_path / "page.html")
    assert [heading for heading in HEADINGS if heading not in page.text] == []
    assert [key for key in CHARTS if key not in page.charts] == []
    for told in ("Qwen/Qwen2.5-7B-Instruct", "shared_vllm", "--lr", "2e-06", "0 bytes", "finished", "step 30"):
        assert told in page.text
    assert "KL from the reference, nats: 0" in page.text


def test_every_chart_is_labelled_and_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=30)
    page = written(run.path, out=tmp_path / "page.html")
    assert all(str(svg["aria-label"]).count("from") for svg in page.all("svg"))
    assert not [attributes for _, attributes in page.elements if {"src", "onclick", "onerror"} & attributes.keys()]
    assert not page.all("link") + page.all("img") + page.all("iframe")
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert str(policy).startswith("default-src 'none'")


HOSTILE = "<script>alert(1)</script></div>{{ 7 * 7 }}\x00\x1b[31m\u202etxt.exe\u2066 \ud800 مرحبا"


def test_what_a_completion_holds_is_text_and_never_markup(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "<b>run", num_steps=5, environment="<i>env")
    completion = {"text": HOSTILE, "reward": 1.0, "parts": {HOSTILE: 1.0}, "tokens": 9, "finish_reason": HOSTILE}
    line = {
        "step": 1,
        "problem": {"prompt": [{"role": HOSTILE, "content": HOSTILE}], "answer": HOSTILE},
        "completions": [completion, completion | {"reward": 0.0}],
        "unscored": [{"text": HOSTILE, "fault": HOSTILE}],
    }
    report_runs.write_rollouts(run, iter([line]))
    run.events.write_text(f"2026-11-21T10:00:00+0000 {HOSTILE[:-8]}\n")
    page = written(run.path, out=tmp_path / "page.html")
    assert len(page.all("script")) == 2
    assert not page.all("i") or all(not attributes.get("onerror") for attributes in page.all("i"))
    assert (
        page.text.count("<script>alert(1)</script></div>{{ 7 * 7 }}␀␛[31m⟨U+202E⟩txt.exe⟨U+2066⟩ ⟨U+D800⟩ مرحبا") >= 8
    )
    assert "<b>run" in page.text
    assert "<i>env" in page.text
    assert not {character for character in page.text if ord(character) < 32} - {"\n", "\t"}


def test_a_run_that_was_killed_is_shown_and_what_is_missing_is_said(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "begun", num_steps=20, planned=50)
    run = RunDirectory(shutil.copytree(run.path, tmp_path / "run"))  # in which nobody is at work
    run.evaluations.unlink()
    with run.metrics.open("a") as file:
        file.write('{"step": 21, "rewa')
    run.lost_metrics.write_text(run.metrics.read_text().splitlines()[3] + "\n")
    page = written(run.path, out=tmp_path / "page.html")
    for told in (
        "unfinished", "step 20 of 50", "the last line of metrics.jsonl was cut short", "no evaluations.jsonl",
        "no rollouts.jsonl", "1 steps were lost and taken again",
    ):  # fmt: skip
        assert told in page.text


def test_a_run_under_way_names_the_process_that_is_at_work(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=3, planned=9)  # which claims it for this process
    page = written(run.path, out=tmp_path / "page.html")
    assert f"process {os.getpid()} is at work in it; so far step 3 of 9" in page.text


def test_a_finished_summary_of_fewer_steps_than_were_taken_is_not_this_runs_end(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=6)
    with run.metrics.open("a") as file:
        file.write(run.metrics.read_text().splitlines()[-1].replace('"step": 6', '"step": 7') + "\n")
    shutil.copytree(run.path, tmp_path / "copy")  # which nobody is at work in
    page = written(tmp_path / "copy", out=tmp_path / "page.html")
    assert "it stopped after step 7 of 6" in page.text


def test_steps_of_an_older_version_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=12)
    gone = ("entropy", "reward_parts", "unscored", "completion_tokens_mean")
    lines = [report_runs.older(report_runs.metrics(step, 12), *gone) for step in range(1, 13)]
    run.metrics.write_text("\n".join(lines) + "\n")
    run.config.write_text('{"model_name": "m", "a_choice_of_old": 3}')
    page = written(run.path, out=tmp_path / "page.html")
    assert "no step has unscored, completion_tokens_mean, entropy: another version of Bridge" in page.text
    assert not {"entropy", "parts", "length"} & set(page.charts)
    assert {"gradient", "time"} <= set(page.charts)
    assert "This version of Bridge does not know it." in page.text


@pytest.mark.parametrize("missing", ["config", "server_config", "summary", "evaluations", "events"])
def test_any_other_file_may_be_missing_or_broken(missing: str, tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=4)
    path: Path = getattr(run, missing)
    path.write_bytes(b"\xff\x00 no json {")
    written(run.path, out=tmp_path / "page.html")
    path.unlink()
    written(run.path, out=tmp_path / "page.html")


def test_values_that_are_no_numbers_leave_gaps(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=8)
    odd = ({"entropy": None}, {"entropy": "much"}, {"entropy": float("nan")}, {"entropy": 10**400}, {"reward_parts": 3})
    lines = [json.loads(to_json(report_runs.metrics(step, 8))) for step in range(1, 9)]
    changed = [line | change for line, change in zip(lines, [*odd, {}, {}, {}], strict=True)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in changed))
    page = written(run.path, out=tmp_path / "page.html")
    assert record.read(run.path).notes == ("no rollouts.jsonl: no completions to show",)
    assert "no completions to show" in page.text
    assert "NaN" not in (tmp_path / "page.html").read_text()


def test_a_step_that_nothing_was_trained_on_is_no_dip(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=6)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines[3] |= {"logprob_diff_histogram": [None] * 8, "logprob_diff_mean": None}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    written(run.path, out=tmp_path / "page.html")
    data = drawn(tmp_path / "page.html")
    assert data["histogram"][0][0] == [1, 2, 3, 5, 6]
    assert data["difference"][0][1][3] is None


def test_one_step_is_enough(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    run.evaluations.unlink()
    page = written(run.path, out=tmp_path / "page.html")
    assert page.charts == ["reward"]
    assert "The same in every step" in page.text


def test_thousands_of_steps_are_thinned_and_no_spike_is_lost(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1500)
    lines = run.metrics.read_text().splitlines()
    lines[1234] = json.dumps(json.loads(lines[1234]) | {"grad_norm": 55.5})
    run.metrics.write_text("\n".join(lines) + "\n")
    page = written(run.path, out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    xs, ys = drawn(tmp_path / "page.html")["gradient"][0]
    assert len(xs) < 500
    assert (1235, 55.5) in list(zip(xs, ys, strict=True))
    assert len(text) < 1_000_000
    assert "not every one is drawn" in page.text


def test_several_runs_share_their_charts_and_tables(tmp_path: Path) -> None:
    one = report_runs.make(tmp_path / "one", num_steps=30)
    other = report_runs.make(tmp_path / "other", num_steps=20, planned=30, seed=1, lr=1e-6, loss="grpo")
    report_runs.write_rollouts(one, report_runs.groups(30))
    page = written(one.path, other.path, out=tmp_path / "page.html")
    text = " ".join(page.text.split())
    assert "2 runs side by side" in text
    assert "--lr 2e-06 1e-06" in text
    assert "--loss dapo grpo" in text
    assert "--run-dir /" not in text.partition("Each run")[0]
    assert {"reward", "part-0", "part-1", "length", "difference", "histogram", "time"} <= set(page.charts)
    assert "one, held out" in text


def test_runs_of_one_name_are_told_apart_by_their_folders() -> None:
    assert names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert names([Path("/a/x/run")]) == ["run"]


def test_the_same_run_given_twice_is_one(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=3)
    assert "side by side" not in written(run.path, run.path, out=tmp_path / "page.html").text


def test_the_page_goes_into_the_run_and_may_be_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=3)
    for _ in range(2):
        assert main.answer(["report", str(run.path)]) == 0
        told = capsys.readouterr()
        assert told.out == f"{run.path / 'report.html'}\n"
        assert "wrote " in told.err


def test_the_page_of_several_goes_into_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(report_runs.make(tmp_path / name, num_steps=3).path) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert main.answer(["report", *runs]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert (tmp_path / "report.html").is_file()


def test_a_file_that_is_no_report_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=3)
    precious = tmp_path / "page.html"
    precious.write_text("<html>mine, made by bridge report</html>")
    assert main.answer(["report", str(run.path), "--out", str(precious)]) == 2
    assert "no report of ours" in capsys.readouterr().err
    assert precious.read_text() == "<html>mine, made by bridge report</html>"
    assert main.answer(["report", str(run.path), "--out", str(tmp_path)]) == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=3)
    run.metrics.unlink()
    run.metrics.symlink_to("/proc/self/mem")  # whose first page nobody can read
    assert main.answer(["report", str(run.path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot read {run.path}: ")


def test_more_runs_than_colours_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(tmp_path / str(number)) for number in range(9)]
    assert main.answer(["report", *runs]) == 2
    assert "9 runs on one page are too many" in capsys.readouterr().err


def test_the_figures_are_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=40)
    assert main.answer(["report", str(run.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (figures,) = document["runs"]
    assert document["report"] == str(run.path / "report.html")
    assert figures["steps"] == 40
    assert figures["weight_bytes"] == 0
    assert figures["held_out_before"] == pytest.approx(0.26)
    assert figures["held_out_after"] > 0.6
    assert 20 < figures["fence_ms"] < 30


@pytest.mark.parametrize(("make", "told"), [
    (lambda path: None, "no folder"),
    (lambda path: path.mkdir(), "is no run of Bridge"),
    (lambda path: path.write_text("a file"), "no folder"),
    (lambda path: (path.mkdir(), (path / "metrics.jsonl").write_text('{"step": 1, "rew')), "no whole step"),
    (lambda path: report_runs.make(path / "inside", num_steps=1), "is no run, but holds some"),
])  # fmt: skip
def test_what_is_no_run_is_one_line_and_exit_code_2(
    make: object, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(make)
    make(tmp_path / "given")
    assert main.answer(["report", str(tmp_path / "given")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert told in shown.err.splitlines()[0]


def test_the_hint_for_a_folder_of_runs_can_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report_runs.make(tmp_path / "my runs" / "one", num_steps=1)
    assert main.answer(["report", str(tmp_path / "my runs")]) == 2
    hint = capsys.readouterr().err.splitlines()[-1]
    assert shlex.split(hint.removeprefix("hint: ")) == ["bridge", "report", str(run.path)]


def test_help_shows_everything_and_loads_nothing_heavy() -> None:
    heavy = ("torch", "jinja2", "markupsafe", "matplotlib", "numpy")
    code = (
        "import sys; from cli.main import answer; answer(['report', '--help']); answer(['--help']);"
        f"sys.stderr.write(' '.join(name for name in {heavy!r} if name in sys.modules))"
    )
    done = run_python(code)
    assert done.stderr == ""
    assert "--out" in done.stdout
    assert "{RUN}..." in done.stdout
    assert "report.html in the run" in " ".join(done.stdout.split())
    assert "…" not in done.stdout


def test_a_report_loads_no_torch(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=2)
    given = ["report", str(run.path)]
    code = f"import sys; from cli.main import answer; answer({given!r}); sys.exit('torch' in sys.modules)"
    assert run_python(code).returncode == 0


def test_the_holder_of_a_claim_is_told_by_its_folder(tmp_path: Path) -> None:
    claim.make(tmp_path / "run", what="run directory", flag="--run-dir")
    assert claim.holder((tmp_path / "run").stat().st_ino) == str(os.getpid())
