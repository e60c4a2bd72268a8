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


# A hand at the keyboard: after a second the slider goes to its first moment, the depth memory to the next sublayer, the
# first run is closed and a log with a bad line of routes is dropped.
OPERATE = """<script>setTimeout(() => {
  const press = (node, key) => node.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  $("step").value = 0;
  $("step").dispatchEvent(new Event("input"));
  document.querySelector(".here").focus();
  press(document.activeElement, "Home");
  press(document.activeElement, "ArrowRight");
  press(document.activeElement, "ArrowRight");
  document.body.dataset.focus = document.activeElement.getAttribute("aria-label");
  $("runs").querySelector("button").focus();
  document.activeElement.click();
  document.body.dataset.after = document.activeElement.getAttribute("aria-label");
  const dropped = new DataTransfer();
  dropped.items.add(new File([DROPPED], "log.jsonl"));
  document.dispatchEvent(new DragEvent("drop", { dataTransfer: dropped, cancelable: true }));
}, 1000)</script>"""


def page(query, name="look.html"):
    """What the page's document holds, as text, once it has read its logs."""
    address = f"http://localhost:{server.server_port}/{name}?{query}"
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
        for words in ("L = 2, C = 8, S = 2", "step 40 of 40", "a, step 40", ">60%<", ">40%<", ">0.04<", "The head reads the embedding, block 1 and block 2, mixed by one query."):
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
        assert set(Quiet.asked) == {"/look.html"} | {f"/{name}/log.jsonl" for name in "abcd"}, Quiet.asked
    with case("slider, arrow keys, closing, dropping: the focus stays, weights are told, bad routes are left out"):
        bad = log("average", 10).replace('"js_bits": [0,', '"js_bits": [').replace('"seed": "1"', '"seed": "7"')
        operated = (ROOT / "dev/look.html").read_text() + OPERATE.replace("DROPPED", json.dumps(bad))
        (pathlib.Path(folder) / "operated.html").write_text(operated)
        text = page("log=a/log.jsonl&log=b/log.jsonl", "operated.html")
        for words in ("data-focus=\"Sublayer 2, the attention of layer 1, reads the embedding (QK 90%, V 90%) and block 1 (QK 10%, "
                      'V 10%)', 'data-after="close b"', "average-7", "1 of its lines left out: line 13", "b, step 10"):
            assert words in text, words
    server.shutdown()
finish()
