"""`bridge report`: the page of whole, partial and broken runs, of several runs, and what it refuses."""

import dataclasses
import html.parser
import json
import math
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from bokeh.models import ColumnDataSource

from bridge.config import TrainConfig
from bridge.core import claim
from bridge.run.metrics import StepMetrics
from bridge.run.run_directory import RunDirectory, to_json
from bridge.types import LOGPROB_DIFF_EDGES
from bridge_cli import main
from bridge_cli.report import charts, record
from bridge_cli.report.command import names
from bridge_cli.report.page import choices
from tests.cli import report_runs
from tests.cli.test_help import run_python

HEADINGS = (
    "Learning", "Two engines, one policy", "Time and memory", "Completions over time",
    "Configuration", "Events",
)  # fmt: skip
CHARTS = (
    "Mean reward", "Parts of the reward", "Completion length, tokens", "Truncated completions, %", "Entropy, nats",
    "Clipped tokens, %", "Gradient norm", "Policy loss", "Changed weights, %", "|Δ log-probability|, nats",
    "Tokens by |Δ log-probability|, %", "Importance weights", "Corrected tokens, %", "Where a step's time goes, s",
    "The fence, ms", "Tokens per second", "Tokens per step", "Peak memory of the trainer, GiB",
)  # fmt: skip


class Page(html.parser.HTMLParser):
    """A page as a browser parses it: elements and text."""

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
        return [str(each["aria-label"]).split(". ")[0] for each in self.all("div") if each.get("role") == "img"]


def written(*runs: Path, out: Path) -> Page:
    assert main.answer(["report", *map(str, runs), "--out", str(out)]) == 0
    return Page(out.read_text())


def drawn(*runs: Path) -> dict[str, dict[str, list[float]]]:
    """Return the curves of every chart: chart title -> curve name -> values."""
    artist = charts.Artist({run.name: record.read(run) for run in runs})
    found = [drawing for group in charts.CHARTS.values() for chart in group for drawing in artist.drawings(chart)]
    return {drawing.title: {line.name: line.values.tolist() for line in drawing.lines} for drawing in found}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Return the page of a whole run."""
    run = report_runs.make(tmp_path_factory.mktemp("whole") / "run", num_steps=60)
    report_runs.write_rollouts(run, report_runs.groups(60, num_problems=12))
    return written(run.path, out=run.report)


def test_the_page_of_a_whole_run_has_every_section_and_chart(page: Page) -> None:
    assert [heading for heading in HEADINGS if heading not in page.text] == []
    assert [title for title in CHARTS if title not in page.charts] == []
    assert sum("data-root-id" in attributes for attributes in page.all("div")) == len(page.charts)
    for expected in ("Qwen/Qwen2.5-7B-Instruct", "shared_vllm", "--lr", "2e-06", "0 bytes", "finished", "step 30"):
        assert expected in page.text
    assert "KL from the reference, nats: 0" in page.text


def test_every_number_of_a_step_has_a_chart() -> None:
    numbers = {field.name for field in dataclasses.fields(StepMetrics) if field.type in (int, float)}
    drawn = {name for group in charts.CHARTS.values() for chart in group for name in chart.columns}
    assert numbers - drawn == {"step", "weight_version", "fence_prepare_s"}  # which is part of training


def test_a_derived_value_is_not_listed_as_chosen() -> None:
    for derived in ((), ("lr",)):
        changed, unchanged = choices({"mode": "lora_only", "lr": 1e-5}, TrainConfig, derived)
        (found,) = [choice for choice in (unchanged if derived else changed) if choice[0] == "--lr"]
        assert found[1] == "1e-05"


def test_every_chart_is_labelled_and_nothing_is_loaded_from_elsewhere(page: Page) -> None:
    assert all(str(each["aria-label"]).count("from") for each in page.all("div") if each.get("role") == "img")
    assert not [attributes for _, attributes in page.elements if {"src", "onclick", "onerror"} & attributes.keys()]
    assert not page.all("link") + page.all("img") + page.all("iframe")
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert str(policy).startswith("default-src 'none'")


HOSTILE = "<script>alert(1)</script></div>{{ 7 * 7 }}\x00\x1b[31m\u202etxt.exe\u2066 \ud800 مرحبا"


def test_what_others_wrote_is_text_and_never_markup(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "<b>run", num_steps=5, environment="<i>env")
    completion = {"text": HOSTILE, "reward": 1.0, "parts": {HOSTILE: 1.0}, "tokens": 9, "finish_reason": HOSTILE}
    line = {
        "step": 1,
        "problem": {"prompt": [{"role": HOSTILE, "content": HOSTILE}], "answer": HOSTILE},
        "completions": [completion, completion | {"reward": 0.0}],
        "unscored": [{"text": HOSTILE, "fault": HOSTILE}],
    }
    report_runs.write_rollouts(run, iter([line]))
    run.events.write_text(f"2026-11-21T10:00:00+0000 step 3 {HOSTILE[:-8]}\n")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text(
        "".join(json.dumps(line | {"reward_parts": {HOSTILE: line["reward_mean"]}}) + "\n" for line in lines)
    )
    page = written(run.path, out=tmp_path / "page.html")
    assert len(page.all("script")) == 1
    assert not page.all("i") or all(not attributes.get("onerror") for attributes in page.all("i"))
    assert (
        page.text.count(
            "<script>alert(1)</script></div>{{ 7 * 7 }}⟨U+0000⟩⟨U+001B⟩[31m⟨U+202E⟩txt.exe⟨U+2066⟩ ⟨U+D800⟩ مرحبا"
        )
        >= 8
    )
    assert "<b>run" in page.text
    assert "<i>env" in page.text
    assert not {character for character in page.text if ord(character) < 32} - {"\n", "\t"}


def test_a_killed_run_is_shown_with_a_list_of_what_is_missing(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "begun", num_steps=20, planned=50)
    run = RunDirectory(shutil.copytree(run.path, tmp_path / "run"))  # in which no process is running
    run.evaluations.unlink()
    with run.metrics.open("a") as file:
        file.write('{"step": 21, "rewa')
    run.lost_metrics.write_text(run.metrics.read_text().splitlines()[3] + "\n")
    page = written(run.path, out=tmp_path / "page.html")
    for expected in (
        "unfinished", "step 20 of 50", "metrics.jsonl: skipped 1 incomplete or damaged lines",
        "no evaluations.jsonl", "no rollouts.jsonl", "1 steps were lost and repeated",
    ):  # fmt: skip
        assert expected in page.text


def test_a_running_run_names_its_process(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1, planned=9)  # which claims it for this process
    page = written(run.path, out=tmp_path / "page.html")
    assert f"process {os.getpid()} is at step 1 of 9" in page.text


def test_a_finished_summary_of_fewer_steps_than_were_taken_is_not_this_runs_end(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=6)
    with run.metrics.open("a") as file:
        file.write(run.metrics.read_text().splitlines()[-1].replace('"step": 6', '"step": 7') + "\n")
    shutil.copytree(run.path, tmp_path / "copy")  # no process is running in it
    page = written(tmp_path / "copy", out=tmp_path / "page.html")
    assert "stopped after step 7 of 6" in page.text


def test_steps_of_an_older_version_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=12)
    gone = ("entropy", "reward_parts", "unscored", "completion_tokens_mean")
    lines = [report_runs.older(report_runs.metrics(step, 12), *gone) for step in range(1, 13)]
    run.metrics.write_text("\n".join(lines) + "\n")
    run.config.write_text('{"model_name": "m", "a_choice_of_old": 3}')
    page = written(run.path, out=tmp_path / "page.html")
    assert "no step has unscored, completion_tokens_mean, entropy: another version of Bridge" in page.text
    assert not {"Entropy, nats", "Parts of the reward", "Completion length, tokens"} & set(page.charts)
    assert {"Gradient norm", "Where a step's time goes, s"} <= set(page.charts)
    assert "This version of Bridge does not know it." in page.text


@pytest.mark.parametrize("missing", ["config", "server_config", "summary", "evaluations", "events"])
def test_any_other_file_may_be_missing_or_broken(missing: str, tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    path: Path = getattr(run, missing)
    for broken in (b"\xff\x00 no json {", b"[" * 100_000, b'{"derived": null, "reward_before": NaN}\n\n'):
        path.write_bytes(broken)
        written(run.path, out=tmp_path / "page.html")
    path.unlink()
    written(run.path, out=tmp_path / "page.html")


def test_steps_without_a_value_leave_gaps(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=8)
    odd: tuple[dict[str, Any], ...] = (
        {"entropy": None},
        {"entropy": float("nan")},
        {"reward_parts": {}},
        {"reward_parts": None},
    )
    lines = [json.loads(to_json(report_runs.metrics(step, 8))) for step in range(1, 9)]
    changed = [line | change for line, change in zip(lines, [*odd, {}, {}, {}, {}], strict=True)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in changed))
    curves = drawn(run.path)
    assert [step for step, each in enumerate(curves["Entropy, nats"]["smoothed"], 1) if math.isnan(each)] == [1, 2]
    parts = curves["Parts of the reward"]["correct"]
    assert [step for step, each in enumerate(parts, 1) if math.isnan(each)] == [3, 4]
    assert "NaN" not in written(run.path, out=tmp_path / "page.html").text


def test_numbers_that_no_float_holds_are_left_out(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=3)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines[1] |= {"grad_norm": 10**400, "logprob_diff_histogram": [10**400] * 8}
    lines.append(lines[2] | {"step": 10**400})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.evaluations.write_text('{"step": 0, "reward_mean": 1' + "0" * 400 + '}\n{"step": 3}\n')
    run.summary.write_text(json.dumps({"steps": 3, "reward_before": 10**400, "weight_bytes": 10**400}))
    assert "skipped 1 incomplete" in written(run.path, out=tmp_path / "page.html").text
    curve = drawn(run.path)["Gradient norm"]["each step"]
    assert [math.isnan(each) for each in curve] == [False, True, False]


def test_a_step_without_training_is_no_dip_in_a_stack(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=6)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines[3] |= {"logprob_diff_histogram": [None] * 8, "logprob_diff_mean": None}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (histogram,) = charts.Artist({"run": record.read(run.path)}).drawings(charts.HISTOGRAM)
    assert histogram.plot is not None
    sources = [each for each in histogram.plot.references() if isinstance(each, ColumnDataSource)]
    assert [list(each.data["step"]) for each in sources if "step" in each.data] == [[1, 2, 3, 5, 6]]
    assert math.isnan(drawn(run.path)["|Δ log-probability|, nats"]["mean"][3])


def test_one_step_is_enough(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    run.evaluations.unlink()
    page = written(run.path, out=tmp_path / "page.html")
    assert page.charts == ["Mean reward"]
    assert "The same in every step" in page.text


def test_thousands_of_steps_are_all_on_the_page(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1500)
    lines = run.metrics.read_text().splitlines()
    lines[1234] = json.dumps(json.loads(lines[1234]) | {"grad_norm": 55.5})
    run.metrics.write_text("\n".join(lines) + "\n")
    written(run.path, out=tmp_path / "page.html")
    curve = drawn(run.path)["Gradient norm"]["each step"]
    assert (len(curve), curve[1234]) == (1500, 55.5)
    assert (tmp_path / "page.html").stat().st_size < 2_500_000


def test_several_runs_share_their_charts_and_tables(tmp_path: Path) -> None:
    one = report_runs.make(tmp_path / "one", num_steps=30)
    other = report_runs.make(tmp_path / "other", num_steps=20, planned=30, seed=1, lr=1e-6, loss="grpo")
    report_runs.write_rollouts(one, report_runs.groups(30))
    page = written(one.path, other.path, out=tmp_path / "page.html")
    text = " ".join(page.text.split())
    assert "2 runs side by side" in text
    assert "--lr 2e-06 1e-06" in text
    assert "--loss dapo grpo" in text
    assert "--run-dir /" not in text.partition("Mean reward")[0]
    assert {
        "Mean reward", "Parts of the reward: correct", "Parts of the reward: format", "Completion length, tokens",
        "|Δ log-probability|: mean, nats", "Tokens by |Δ log-probability|: 0.1 nats and more, %",
        "Where a step's time goes: in all, s",
    } <= set(page.charts)  # fmt: skip
    assert "one, held out" in text


def test_runs_of_one_name_are_told_apart_by_their_folders() -> None:
    assert names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert names([Path("/a/x/run")]) == ["run"]


def test_the_same_run_given_twice_is_one(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    assert "side by side" not in written(run.path, run.path, out=tmp_path / "page.html").text


def test_the_page_goes_into_the_run_and_may_be_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    for _ in range(2):
        assert main.answer(["report", str(run.path)]) == 0
        told = capsys.readouterr()
        assert told.out == f"{run.path / 'report.html'}\n"
        assert "wrote " in told.err


def test_the_page_of_several_goes_into_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(report_runs.make(tmp_path / name, num_steps=1).path) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert main.answer(["report", *runs]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert (tmp_path / "report.html").is_file()


def test_a_file_that_is_not_a_report_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    precious = tmp_path / "page.html"
    precious.write_text("<html>mine, made by bridge report</html>")
    assert main.answer(["report", str(run.path), "--out", str(precious)]) == 2
    assert "exists and is not a report" in capsys.readouterr().err
    assert precious.read_text() == "<html>mine, made by bridge report</html>"
    assert main.answer(["report", str(run.path), "--out", str(tmp_path)]) == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    run.metrics.unlink()
    run.metrics.symlink_to("/proc/self/mem")  # whose first page is unreadable
    assert main.answer(["report", str(run.path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot read {run.path}: ")


def test_more_runs_than_colors_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(tmp_path / str(number)) for number in range(9)]
    assert main.answer(["report", *runs]) == 2
    assert "9 runs do not fit on one page" in capsys.readouterr().err


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
    (lambda path: None, "is not a directory"),
    (lambda path: path.mkdir(), "is not a run directory"),
    (lambda path: path.write_text("a file"), "is not a directory"),
    (lambda path: (path.mkdir(), (path / "metrics.jsonl").write_text('{"step": 1, "rew')), "has no complete step"),
    (lambda path: report_runs.make(path / "inside", num_steps=1), "is not a run directory, but contains some"),
])  # fmt: skip
def test_anything_else_than_a_run_is_one_line_and_exit_code_2(
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
    heavy = ("torch", "jinja2", "bokeh", "numpy")
    code = (
        "import sys; from bridge_cli.main import answer; answer(['report', '--help']); answer(['--help']);"
        f"sys.stderr.write(' '.join(name for name in {heavy!r} if name in sys.modules))"
    )
    done = run_python(code)
    assert done.stderr == ""
    assert "--out" in done.stdout
    assert "{RUN}..." in done.stdout
    assert "report.html in the run" in " ".join(done.stdout.split())
    assert "…" not in done.stdout


def test_a_report_loads_no_torch(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    given = ["report", str(run.path)]
    code = f"import sys; from bridge_cli.main import answer; answer({given!r}); sys.exit('torch' in sys.modules)"
    assert run_python(code).returncode == 0


def test_the_bins_are_those_of_the_loss() -> None:
    edges = [str(edge).removesuffix(".0") for edge in LOGPROB_DIFF_EDGES]
    assert [name.split()[1] for name in charts.BINS[:-1]] == edges
    assert len(charts.BINS) == len(LOGPROB_DIFF_EDGES) + 1


def test_the_holder_of_a_claim_is_found_by_its_folder(tmp_path: Path) -> None:
    claim.make(tmp_path / "run", what="run directory", flag="--run-dir")
    assert claim.holder((tmp_path / "run").stat().st_ino) == str(os.getpid())
