"""Open pages in a real headless Chromium."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WATCH = (
    "<script>window.errors = []; addEventListener('error', (e) => window.errors.push(e.message));</script>"
)


def browse(path, probe, width=1200):
    """Open a page with a script appended; return what the script wrote into #found, and console messages."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    probed = path.with_name("probed.html")
    text = path.read_text(encoding="utf-8").replace("<head>", f"<head>{WATCH}", 1)
    # the last one: a library inside the page may contain the same words
    before, _, after = text.rpartition("</body>")
    probed.write_text(f"{before}{probe}</body>{after}", encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    size = (
        f"--user-data-dir={path.parent}/profile",
        "--virtual-time-budget=20000",
        f"--window-size={width},900",
    )
    ran = subprocess.run(
        [CHROMIUM, *options, *size, probed.as_uri()], capture_output=True, text=True, timeout=300
    )
    answer = re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert answer, ran.stderr[-2000:]
    console = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(answer[1])), console
