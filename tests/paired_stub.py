#!/usr/bin/env python3
"""paired_stub.py - stands in for a trainer in tests/test_paired.py.

Takes the trainer's flags, writes log.jsonl and checkpoint files as the trainer does, and can be killed and
resumed; its losses are a formula of arm, seed and step, so the right answers of the analysis are known. The
environment makes it misbehave: STUB_FAIL="rd-s2@7" exits with status 1 at step 7 of that run, every time;
STUB_KILL likewise kills itself, once; STUB_NAN says that a loss is not finite and exits; STUB_LR="rd-s2"
trains that run with another learning rate than asked; STUB_MS sleeps so long before each step.
"""

import json
import math
import os
import signal
import sys
import time

GAIN = {"residual": 0.02, "block": 0.0, "tied": 0.0, "rd": -0.03, "average": -0.004, "frozen-v": 0.01}
SPEED = {"rd": 900, "residual": 1100}
flags = {flag[2:].replace("_", "-"): value for flag, value in zip(sys.argv[1::2], sys.argv[2::2])}
arch, seed, out, steps = flags["arch"], int(flags["seed"]), flags["out"], int(flags["steps"])
run = "%s-s%d" % (arch, seed)
path = os.path.join(out, "log.jsonl")
start = 0
os.makedirs(out, exist_ok=True)
if "resume" in flags:
    start = max(int(n[5:-12]) for n in os.listdir(out) if n.startswith("ckpt_"))
    with open(path) as f:
        lines = [line for line in f if line.endswith("\n") and json.loads(line).get("step", 0) <= start]
    with open(path, "w") as f:
        f.writelines(lines)
elif os.path.exists(path):
    sys.exit("error: %s exists" % path)
log = open(path, "a", buffering=1)


def loss(step):
    wobble = 0.001 * (seed - 3) if arch == "rd" else 0.0  # pair differences -0.032 ... -0.028 for seeds 1 ... 5
    late = min(step / 20.0, 1.0)
    return 2.0 + 3.0 * math.exp(-step / 12.0) + 0.01 * math.sin(seed) + (GAIN[arch] + wobble) * late


def event(kind, step, **fields):
    tokens = step * int(flags.get("total-batch") or int(flags["batch"]) * int(flags["context"]))
    log.write(json.dumps(dict(event=kind, step=step, tokens=tokens, **fields)) + "\n")


def validation(step):
    event("val", step, split="val", loss=loss(step), count=1000)
    qk = [[1.0], [0.5, 0.5], [0.2, 0.3, 0.5]]
    v = [[1.0], [0.25, 0.75], [0.6, 0.2, 0.2]] if arch == "rd" else qk
    js = [0.0, 0.1 * step / steps, 0.3 * step / steps] if arch == "rd" else [0.0] * 3
    if arch != "residual":
        event("routes", step, split="val", qk=qk, v=v, js_nats=js, js_bits=[x / math.log(2) for x in js])


def checkpoint(step):
    open(os.path.join(out, "ckpt_%08d.safetensors" % step), "w").close()
    event("checkpoint", step)


stop = []
signal.signal(signal.SIGTERM, lambda *_: os._exit(130) if stop else stop.append(1))
options = {k: v for k, v in flags.items() if k not in ("out", "resume", "quiet")}  # not about this call only
if os.environ.get("STUB_LR") == run:
    options["lr"] = "0.5"
log.write(json.dumps({"event": "config", "options": options, "parameters": 1000 + (arch == "rd"), "layers": 900,
                      "routes": int(arch == "rd")}) + "\n")
if start == 0:
    validation(0)
for step in range(start + 1, steps + 1):
    time.sleep(float(os.environ.get("STUB_MS", "0")) / 1000)
    told = [name for name in os.environ if os.environ[name] == "%s@%d" % (run, step)]
    if "STUB_FAIL" in told:
        sys.exit("error: told to fail")
    if "STUB_KILL" in told and not os.path.exists(out + ".killed"):
        open(out + ".killed", "w").close()
        log.write('{"event":"st')
        log.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if "STUB_NAN" in told:
        sys.exit("error: step %d: loss nan, gradient norm nan; expected finite numbers" % step)
    event("step", step, loss=loss(step - 1), norm=1.0, lr=0.1, ms=1.0, tok_s=SPEED.get(arch, 1000))
    if step % int(flags["val-every"]) == 0 or step == steps:
        validation(step)
    if stop or step % int(flags.get("checkpoint-every", 5)) == 0:
        checkpoint(step)
    if stop:
        sys.exit(0)
if "test" in flags:
    event("val", steps, split="test", loss=loss(steps) + 0.05, count=900)
event("val", steps, split="answers", count=5, right=1)
checkpoint(steps)
event("done", steps, seconds=1.0)
