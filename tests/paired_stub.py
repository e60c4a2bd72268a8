#!/usr/bin/env python3
"""paired_stub.py - stands in for a trainer in tests/test_paired.py.

Takes the trainer's flags, writes log.jsonl and checkpoint files as the trainer does, and can be killed and
resumed; its losses are a formula of arm, seed and step, so the right answers of the analysis are known. The
environment makes it misbehave: STUB_FAIL="rd-s2@7" exits with status 1 at step 7 of that run, every time;
STUB_KILL likewise kills itself, once; STUB_NAN says that a loss is not finite and exits; STUB_LR="rd-s2"
trains that run with another learning rate than asked; STUB_MS sleeps so long a step.
"""

import json
import math
import os
import signal
import sys
import time


def loss(arch, seed, step):
    gain = {"residual": 0.02, "block": 0.0, "tied": 0.0, "rd": -0.03, "average": -0.004, "frozen-v": 0.01}[arch]
    wobble = {"rd": 0.001 * (seed - 3)}.get(arch, 0.0)  # pair differences -0.032 ... -0.028 for seeds 1 ... 5
    return 2.0 + 3.0 * math.exp(-step / 12.0) + 0.01 * math.sin(seed) + (gain + wobble) * min(step / 20.0, 1.0)


def main():
    words, flags = sys.argv[1:], {}
    while words:
        flag, value, *words = words
        flags[flag[2:].replace("-", "_")] = value
    arch, seed, out = flags["arch"], int(flags["seed"]), flags["out"]
    steps, every = int(flags["steps"]), int(flags["val_every"])
    tokens = (
        int(flags["total_batch"]) if "total_batch" in flags else int(flags["batch"]) * int(flags["context"])
    )
    checkpoint_every = int(flags.get("checkpoint_every", 5))
    run, path = "%s-s%d" % (arch, seed), os.path.join(out, "log.jsonl")

    def told(name, step):  # does the environment name this run and step?
        who, _, when = os.environ.get(name, "").partition("@")
        return who == run and when == str(step)

    os.makedirs(out, exist_ok=True)
    start = 0
    if "resume" in flags:
        start = max(int(n[5:-12]) for n in os.listdir(out) if n.startswith("ckpt_"))
        with open(path) as f:
            lines = [line for line in f if line.endswith("\n") and json.loads(line).get("step", 0) <= start]
        with open(path + ".tmp", "w") as f:
            f.writelines(lines)
        os.rename(path + ".tmp", path)
    elif os.path.exists(path):
        print("error: %s exists" % path, file=sys.stderr)
        return 1
    log = open(path, "a")

    def event(kind, **fields):
        log.write(json.dumps(dict(event=kind, **fields)) + "\n")
        log.flush()

    def validate(step):
        event("val", step=step, tokens=step * tokens, split="val", loss=loss(arch, seed, step), count=1000)
        if arch != "residual":
            qk = [[1.0], [0.5, 0.5], [0.2, 0.3, 0.5]]
            v = [[1.0], [0.25, 0.75], [0.6, 0.2, 0.2]] if arch == "rd" else qk
            js = [0.0, 0.1 * step / steps, 0.3 * step / steps] if arch == "rd" else [0.0] * 3
            event(
                "routes",
                step=step,
                tokens=step * tokens,
                split="val",
                qk=qk,
                v=v,
                js_nats=js,
                js_bits=[x / math.log(2) for x in js],
            )

    def checkpoint(step):
        name = os.path.join(out, "ckpt_%08d.safetensors" % step)
        with open(name + ".tmp", "w") as f:
            f.write("a checkpoint")
        os.rename(name + ".tmp", name)
        event("checkpoint", step=step)

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: os._exit(130) if stop else stop.append(1))
    now = ("out", "resume", "quiet")  # about this call only
    options = {k.replace("_", "-"): v for k, v in flags.items() if k not in now}
    if os.environ.get("STUB_LR") == run:
        options["lr"] = "0.5"
    event("config", options=options, parameters=1000 + (arch == "rd"), layers=900, routes=int(arch == "rd"))
    if start == 0:
        validate(0)
    for step in range(start + 1, steps + 1):
        time.sleep(float(os.environ.get("STUB_MS", "0")) / 1000)
        if told("STUB_FAIL", step):
            print("error: told to fail", file=sys.stderr)
            return 1
        if told("STUB_KILL", step) and not os.path.exists(out + ".killed"):
            open(out + ".killed", "w").close()
            log.write('{"event":"st')
            log.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if told("STUB_NAN", step):
            print(
                "error: step %d: loss nan, gradient norm nan; expected finite numbers" % step, file=sys.stderr
            )
            return 1
        value = loss(arch, seed, step - 1)
        event(
            "step",
            step=step,
            tokens=step * tokens,
            loss=value,
            norm=1.0,
            lr=0.1,
            ms=1.0,
            tok_s={"rd": 900, "residual": 1100}.get(arch, 1000),
        )
        if step % every == 0 or step == steps:
            validate(step)
        if stop:
            checkpoint(step)
            return 0
        if step % checkpoint_every == 0:
            checkpoint(step)
    if "test" in flags:
        event(
            "val",
            step=steps,
            tokens=steps * tokens,
            split="test",
            loss=loss(arch, seed, steps) + 0.05,
            count=900,
        )
    event("val", step=steps, tokens=steps * tokens, split="answers", count=5, right=1)
    checkpoint(steps)
    event("done", step=steps, tokens=steps * tokens, seconds=1.0)
    return 0


sys.exit(main())
