"""The page of a run works in a real browser: curves, hovering, zooming, and live updates."""

import json
import re
import subprocess
import sys
import threading
import urllib.request

import pytest

from arriero.report.run_page import thinned
from browser import browse
from report.test_runs import END, START, write_run

PROBE = """
<script>
const later = (ms) => new Promise((done) => setTimeout(done, ms));
async function probe() {
  await later(1000);
  const charts = [...document.querySelectorAll(".chart")];
  const loss = charts[0].querySelector(".js-plotly-plot");
  const area = loss.querySelector(".nsewdrag"), box = area.getBoundingClientRect();
  const at = (kind, x, target) => target.dispatchEvent(new MouseEvent(kind, {
    bubbles: true, view: window, buttons: kind === "mouseup" ? 0 : 1,
    clientX: box.left + x * box.width, clientY: box.top + box.height / 2 }));
  at("mouseover", 0.5, area); at("mousemove", 0.5, area);
  await later(500);
  const hover = loss.querySelector(".hoverlayer").textContent;
  const range = () => loss._fullLayout.xaxis.range.map(Number);
  const before = range();
  at("mousedown", 0.25, area);
  for (const x of [0.3, 0.5, 0.75]) { at("mousemove", x, document); await later(50); }
  at("mouseup", 0.75, document);
  await later(500);
  const found = {
    names: charts.map((chart) => chart.getAttribute("aria-label")),
    curves: charts.map((chart) =>
      chart.querySelector(".js-plotly-plot").data.map((each) => [each.name, each.x, each.y])),
    lines: loss.querySelectorAll(".scatterlayer .trace path.js-line").length,
    hover, before, after: range(), errors: window.errors,
    wide: document.documentElement.scrollWidth > innerWidth,
  };
  const out = document.createElement("pre");
  document.body.append(Object.assign(out, { id: "found", textContent: JSON.stringify(found) }));
}
probe();
</script>
"""
EVALUATED = [
    {
        "time": 2.0 + step,
        "event": "evaluation",
        "step": step,
        "tokens": 100 * step,
        "eval_loss": 5.0 - step / 10,
    }
    for step in (0, 10, 20)
]
LOSSES = [(step, 4.0 - step / 20) for step in range(1, 21)]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs", "a", LOSSES, (START, *EVALUATED, END), grad_norm=1.0, mfu=0.5)


def test_curves_hovering_and_zooming_work_in_a_browser(command, run):
    assert command("report", run).returncode == 0
    found, console = browse(run / "report.html", PROBE)
    assert (console, found["errors"]) == ([], [])
    assert {"Loss", "Throughput", "Gradient norm", "Model FLOPs utilisation", "Events"} <= set(found["names"])
    training, validation = found["curves"][0]
    assert training == ["training", [100 * step for step, _ in LOSSES], [loss for _, loss in LOSSES]]
    assert validation == ["validation", [0, 1000, 2000], [5.0, 4.0, 3.0]]
    assert found["lines"] == 2
    assert "training" in found["hover"]
    (left, right), (zoomed_left, zoomed_right) = found["before"], found["after"]
    assert left < zoomed_left < zoomed_right < right


def test_the_page_fits_a_phone(command, run):
    assert command("report", run).returncode == 0
    found, console = browse(run / "report.html", PROBE, width=500)
    assert (console, found["errors"], found["wide"]) == ([], [], False)


def test_several_runs_share_their_charts(command, run, tmp_path):
    write_run(tmp_path / "runs", "b", LOSSES[:10], lr=0.2)
    assert command("report", "a", "b", "--out", "both.html").returncode == 0
    found, _ = browse(tmp_path / "both.html", PROBE)
    assert [name for name, *_ in found["curves"][0]] == ["a, training", "a, validation", "b, training"]
    assert run.joinpath("report.html").exists() is False


OVERLAP = """
<script>
setTimeout(() => {
  const box = (part) => document.querySelector(`.chart ${part}`).getBoundingClientRect();
  const found = { legend: box(".legend").bottom, area: box(".nsewdrag").top };
  const out = document.createElement("pre");
  document.body.append(Object.assign(out, { id: "found", textContent: JSON.stringify(found) }));
}, 1000);
</script>
"""


def test_a_long_legend_does_not_cover_the_curves_on_a_phone(command, tmp_path):
    by_source = {f"a source with a long name {number}": 3.0 + number for number in range(5)}
    evaluated = [event | {"eval_losses": by_source} for event in EVALUATED]
    run = write_run(tmp_path / "runs", "a", LOSSES, (START, *evaluated, END))
    assert command("report", run).returncode == 0
    found, _ = browse(run / "report.html", OVERLAP, width=500)
    assert found["legend"] <= found["area"]


def test_faults_are_told_in_words(command, tmp_path):
    fault = {"time": 8.0, "event": "fault", "step": 2, "error": "RuntimeError: <no memory>"}
    run = write_run(tmp_path / "runs", "a", LOSSES, (START, fault))
    assert command("report", run).returncode == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "fault at step 2" in text and ">RuntimeError: &lt;no memory&gt;</td>" in text


def test_the_page_loads_nothing_from_elsewhere(command, run):
    command("report", run)
    text = (run / "report.html").read_text(encoding="utf-8")
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!data:)', own)


def test_a_served_page_shows_what_was_written_since(run):
    command = [sys.executable, "-m", "arriero", "report", run, "--serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(120, server.kill)
    watchdog.start()
    try:
        address = re.search(r"http://\S+", server.stdout.readline())[0]
        assert "123.4567" not in urllib.request.urlopen(address).read().decode()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 21, "tokens": 2100, "loss": 123.4567}) + "\n")
        page, content = (urllib.request.urlopen(address + query).read() for query in ("", "/?content"))
        assert b"123.4567" in page and b"123.4567" in content
        # a refresh does not send the plotting library again
        assert len(content) < 100_000 < len(page)
    finally:
        watchdog.cancel()
        server.kill()
        server.communicate()


def test_a_thinned_curve_keeps_its_spikes_and_ends():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[4321] = (4321.0, 99.0)
    kept = thinned(points, 200)
    assert len(kept) <= 200
    assert (4321.0, 99.0) in kept
    assert thinned(points[:50], 200) == points[:50]
