#!/usr/bin/env python3
"""dev/look.html in a headless Chromium: what it draws of a log, of two, of a broken one; it loads nothing else."""
import functools
import html
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading

from check import case, finish, skip

ROOT = pathlib.Path(__file__).resolve().parent.parent
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if not BROWSER:
    skip("dev/look.html", "no chromium on this machine")
    finish()


def log(arch, steps):
    """A log of three validations whose routes are known: layer 1 at step s reads block 1 with weight s / 100."""
    options = {"arch": arch, "layers": "2", "width": "8", "block-size": "2", "steps": "40", "seed": "1"}
    events = [{"event": "config", "options": options, "parameters": 1234}]
    for s in range(1, steps + 1):
        events.append({"event": "step", "step": s, "loss": 5 / s, "norm": 1.5, "lr": 0.001})
        if s % 10 == 0:
            two = [[1], [1 - s / 100, s / 100]]
            events.append({"event": "val", "step": s, "split": "val", "loss": 4 / s, "count": 9})
            events.append({"event": "routes", "step": s, "split": "val", "qk": two,
                           "v": two if arch == "rd" else [[], []], "js_bits": [0, s / 1000 if arch == "rd" else 0]})
    return "".join(json.dumps(e) + "\n" for e in events) + '{"event":"done","step":40}\n'


class Quiet(http.server.SimpleHTTPRequestHandler):
    asked = []

    def log_message(self, *_):
        self.asked.append(self.path.split("?")[0])


def page(query):
    """What the page's document holds, as text, once it has read its logs."""
    address = f"http://localhost:{server.server_port}/look.html?{query}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/browser"]
    done = subprocess.run([BROWSER, *flags, "--virtual-time-budget=3000", "--dump-dom", address], capture_output=True,
                          text=True, timeout=120)
    return html.unescape(re.sub(r"<script>.*</script>", "", done.stdout, flags=re.S))


with tempfile.TemporaryDirectory() as folder:
    shutil.copy(ROOT / "dev/look.html", folder)
    broken = log("rd", 40).split("\n")
    broken[5], broken[9] = '{"event":"step","st', '{"event":"step","step":null}'
    for name, text in (("a", log("rd", 40)), ("b", log("block", 30)), ("c", "\n".join(broken))):
        (pathlib.Path(folder) / name).mkdir()
        (pathlib.Path(folder) / name / "log.jsonl").write_text(text)
    server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    with case("a run: four curves and JS of two layers, both routes' weights at the last moment, the memory's sentence"):
        text = page("log=a/log.jsonl")
        assert text.count('class="curve"') == 6 and text.count('class="weight"') == 6
        for words in ("L = 2, C = 8, S = 2", "step 40 of 40", "a, step 40", ">60%<", ">40%<", ">0.04<", "The head mixes by one query"):
            assert words in text, words
    with case("two runs: a curve each and their difference; one route, one row of weights"):
        text = page("log=a/log.jsonl&log=b/log.jsonl")
        assert text.count('class="curve"') == 11 and text.count('class="weight"') == 9
        assert "validation loss minus a's" in text and "b, step 30" in text
    with case("a broken log: its lines are named and the rest is drawn; a missing one is said"):
        text = page("log=c/log.jsonl&log=d/log.jsonl")
        assert "2 of its lines left out: line 6, line 10" in text and text.count('class="curve"') == 6
        assert "d/log.jsonl: 404" in text
    with case("the page asks for the logs and nothing else"):
        logs = {f"/{name}/log.jsonl" for name in "abcd"}
        assert set(Quiet.asked) - {"/favicon.ico"} == {"/look.html"} | logs, Quiet.asked
    server.shutdown()
finish()
