#!/usr/bin/env python3
"""test_paired.py - tests of dev/paired: statistics, study files, runner, report, pictures.

Most of it runs a stand-in trainer (paired_stub.py) whose losses are a formula, so every answer is known; the
last test runs the smoke study with the real CPU trainer if it has been built. Standard library only; pictures
are tested where matplotlib is installed.
"""

import concurrent.futures
import fcntl
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
PAIRED = os.path.join(ROOT, "dev", "paired")
STUB = os.path.join(HERE, "paired_stub.py")
sys.dont_write_bytecode = True
sys.path.insert(0, PAIRED)
import analyse  # noqa: E402
import run as runner_module  # noqa: E402
import study as study_module  # noqa: E402
from study import Study, StudyError  # noqa: E402

TESTS = []


class Skip(Exception):
    pass


class Failed(Exception):
    pass


def test(text):
    def add(function):
        TESTS.append((text, function))
        return function

    return add


def check(condition, text):
    if not condition:
        raise Failed(text)


def equal(got, want, text):
    check(got == want, "%s: got %.600s, expected %.600s" % (text, repr(got), repr(want)))


def close(got, want, tolerance, text):
    check(
        got is not None and abs(got - want) <= tolerance,
        "%s: got %r, expected %r +- %g" % (text, got, want, tolerance),
    )


def refused(function, *words):
    """The function must raise StudyError with all the words in its message, on one line."""
    try:
        function()
    except StudyError as e:
        for word in words:
            check(word in str(e), "message '%s' lacks '%s'" % (e, word))
        check("\n" not in str(e), "message is one line")
        return
    raise Failed("not refused; expected an error with %s" % (words,))


class Place:
    """A temporary folder with a made-up study in it."""

    def __init__(self, folder, arms=("block", "rd"), seeds=(1, 2), **entries):
        self.folder = folder
        self.root, self.results, self.file = (
            os.path.join(folder, n) for n in ("runs", "results", "study.json")
        )
        self.entries = {
            "name": "made_up",
            "about": "Made-up numbers.",
            "trainer": STUB,
            "limits": ["These numbers are made up."],
            "flags": {
                "layers": 3,
                "steps": 20,
                "batch": 4,
                "context": 8,
                "val-every": 5,
                "checkpoint-every": 5,
                "block-size": 2,
                "lr": 0.01,
            },
            "milestones": [320, 640],
            "sizes": {"a": {"label": "size a"}},
            "groups": [{"arms": list(arms), "seeds": list(seeds)}],
        }
        self.entries.update(entries)
        self.write()

    def write(self):
        with open(self.file, "w") as f:
            json.dump(self.entries, f)

    def study(self):
        return Study(self.file)

    def command(self, *words):
        return [sys.executable, "-B", os.path.join(PAIRED, "run.py"), self.file, "--root", self.root, *words]

    def run(self, *words, **env):
        """Runs run.py; (exit status, everything it printed)."""
        done = subprocess.run(
            self.command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(os.environ, **env),
            timeout=120,
        )
        return done.returncode, done.stdout

    def analyse(self, from_runs=True):
        words = [self.file, "--root", self.root] if from_runs else []
        done = subprocess.run(
            [sys.executable, "-B", os.path.join(PAIRED, "analyse.py"), *words, "--results", self.results],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout

    def report(self):
        status, text = self.analyse()
        equal(status, 0, "analyse.py: " + text)
        with open(os.path.join(self.results, "report.md"), encoding="utf-8") as f:
            return f.read()

    def log_lines(self, name):
        with open(os.path.join(self.root, name, "log.jsonl")) as f:
            return f.read().splitlines()

    def attempts(self, name):
        with open(os.path.join(self.root, "runner", name + ".attempts.jsonl")) as f:
            return [json.loads(line) for line in f]


def in_place(**options):
    """Decorator: the test gets a Place of its own, removed afterwards."""

    def wrap(function):
        def run():
            folder = tempfile.mkdtemp(prefix="test_paired_")
            try:
                return function(Place(folder, **options))
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return run

    return wrap


# ---- statistics ----------------------------------------------------------------------------------------------
@test("Student's t quantiles agree with the printed tables")
def _():
    for p, df, want in (
        (0.975, 1, 12.7062047362),
        (0.975, 2, 4.30265272991),
        (0.975, 3, 3.18244630528),
        (0.975, 4, 2.77644510520),
        (0.975, 9, 2.26215716274),
        (0.975, 30, 2.04227245630),
        (0.975, 120, 1.97993040505),
        (0.95, 4, 2.13184678633),
        (0.995, 4, 4.60409487142),
        (0.5, 7, 0.0),
    ):
        close(analyse.t_quantile(p, df), want, 1e-9 * max(1.0, want), "t(%g, %d)" % (p, df))


@test("Student's t distribution agrees with the integral of its density")
def _():
    worst = 0.0
    for df in (1, 2, 4, 7, 19):
        scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
        for t in (0.3, 1.0, 2.5, 6.0):
            n = 4000  # Simpson
            h = t / n
            total = (
                sum(
                    (1 if i in (0, n) else 4 if i % 2 else 2)
                    * scale
                    * (1 + (i * h) ** 2 / df) ** (-(df + 1) / 2)
                    for i in range(n + 1)
                )
                * h
                / 3
            )
            worst = max(
                worst, abs(analyse.t_cdf(t, df) - 0.5 - total), abs(analyse.t_cdf(-t, df) - 0.5 + total)
            )
    check(worst < 1e-10, "difference %g" % worst)
    return "largest difference %.1e" % worst


@test("t interval of 1, 2, 3, 4, 5 is 3 +- 1.963243; none for a single value")
def _():
    low, high = analyse.t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    close(low, 3 - 1.9632431614, 1e-9, "low")
    close(high, 3 + 1.9632431614, 1e-9, "high")
    equal(analyse.t_interval([1.0]), None, "one value")
    equal(analyse.t_interval([]), None, "no value")


@test("bootstrap interval equals the brute-force count of all 5^5 resamples")
def _():
    equal(analyse.bootstrap_interval([0.0, 1.0]), (0.0, 1.0), "two values")
    values = [-0.4, 0.1, 0.15, 0.7, 2.0]
    means = sorted(math.fsum(s) / 5 for s in itertools.product(values, repeat=5))
    k = math.ceil(0.025 * len(means))
    low, high = analyse.bootstrap_interval(values)
    close(low, means[k - 1], 1e-12, "low")
    close(high, means[-k], 1e-12, "high")
    many = [math.sin(i) for i in range(20)]
    equal(analyse.bootstrap_interval(many), analyse.bootstrap_interval(many), "drawn ones repeat")
    low, high = analyse.bootstrap_interval(many)
    half = 1.96 * math.sqrt(sum((v - sum(many) / 20) ** 2 for v in many) / 20) / math.sqrt(20)
    close((high - low) / 2, half, 0.05 * half, "drawn ones have the right width")


@test("sign test: 10 of 10 gives 2/1024, 4 of 5 gives 0.375, ties alone give none")
def _():
    equal(analyse.sign_test(10, 0), 2 / 1024, "10:0")
    equal(analyse.sign_test(0, 5), 2 / 32, "0:5")
    equal(analyse.sign_test(4, 1), 12 / 32, "4:1")
    equal(analyse.sign_test(3, 3), 1.0, "3:3")
    equal(analyse.sign_test(0, 0), None, "0:0")


@test("rank correlation: 1 for the same order, -1 for the opposite one, Spearman's 0.6 for a known case")
def _():
    equal(analyse.rank_correlation([1, 5, 9], [2, 3, 80]), 1.0, "same order")
    equal(analyse.rank_correlation([1, 5, 9, 11], [4, 3, 2, 1]), -1.0, "opposite order")
    close(analyse.rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]), 0.6, 1e-12, "two swaps: 1 - 6 * 4 / (4 * 15)")


@test("the paper's entries agree with themselves: seed means, perplexities, 10 of 10")
def _():
    for paper in analyse.PAPER:
        close(sum(paper["seeds"]) / 5, paper["mean"], 0.0005, paper["label"] + " mean of its seeds")
        close(100 * math.expm1(paper["mean"]), paper["perplexity"], 0.02, paper["label"] + " perplexity")
        check(all(v < 0 for v in paper["seeds"]), "signs")


@test("a comparison with missing, diverged, tied and one-sided seeds")
def _():
    nan = "diverged"
    c = analyse.Comparison(
        {1: 1.0, 2: 2.0, 3: nan, 4: None, 5: 3.0, 6: 1.0, 7: nan, 8: 1.0},
        {1: 1.5, 2: 1.5, 3: 2.0, 4: 1.0, 5: nan, 6: 1.0, 7: nan},
    )
    equal(c.by_seed, {1: -0.5, 2: 0.5, 6: 0.0}, "differences")
    equal((c.lower, c.higher, c.ties), (2, 2, 1), "signs (who diverges loses)")
    equal(sorted(c.lost), [(3, "arm"), (4, "missing"), (5, "base"), (7, "both"), (8, "missing")], "lost pairs")
    close(c.mean, 0.0, 1e-15, "mean")
    empty = analyse.Comparison({}, {})
    equal((empty.n, empty.mean, empty.t, empty.p, empty.perplexity()), (0, None, None, None, None), "no pair")


# ---- study files ---------------------------------------------------------------------------------------------
@test("the study files of the project can be read and hold the runs they should")
def _():
    folder = os.path.join(PAIRED, "studies")
    studies = {
        n: Study(os.path.join(folder, n + ".json"))
        for n in ("paper_s", "paper_m", "controls_s", "small", "shallow", "deep", "deep_lr", "smoke")
    }
    for name, study in studies.items():
        equal(study.name, name, "name")
    for name in ("paper_s", "paper_m"):
        study = studies[name]
        equal(
            sorted((r.arch, r.seed) for r in study.runs),
            sorted(itertools.product(("block", "rd"), range(1, 6))),
            name,
        )
        size = next(iter(study.sizes))
        equal(
            study.milestone_steps[size], [477, 954, 1908, 3816], name + " steps of 0.25, 0.5, 1.0, 2.0B tokens"
        )
    equal(
        {r.arch for r in studies["controls_s"].runs},
        {"block", "rd", "tied", "average", "frozen-v"},
        "controls_s",
    )
    small = studies["small"]
    check(len(small.sizes) >= 2, "small has two sizes or more")
    for size in small.sizes:
        for arch in ("residual", "block", "rd"):
            check(
                len([r for r in small.runs if (r.size, r.arch) == (size, arch)]) >= 5,
                "small: 5 seeds of %s" % arch,
            )
    for arch in ("tied", "average", "frozen-v"):
        check(len([r for r in small.runs if r.arch == arch]) >= 3, "small: 3 seeds of %s" % arch)


@test("variables: --set replaces them, unknown ones are refused")
@in_place(
    variables={"data": "here"},
    flags={"steps": 20, "batch": 4, "context": 8, "val-every": 5, "train": "{data}/t_*.bin"},
)
def _(place):
    equal(place.study().runs[0].flags["train"], "here/t_*.bin", "default")
    equal(Study(place.file, ["data=/there"]).runs[0].flags["train"], "/there/t_*.bin", "set")
    refused(lambda: Study(place.file, ["dta=/there"]), "--set dta=/there", "data")


@test("bad study files are refused, each with its reason")
@in_place()
def _(place):
    flags = place.entries["flags"]
    for change, words in (
        ({"colour": 1}, ("unknown entry 'colour'",)),
        ({"trainer": None}, ("entry 'trainer' is missing",)),
        ({"groups": [{"arms": ["blok"], "seeds": [1]}]}, ("unknown arm 'blok'",)),
        ({"groups": [{"sizes": ["b"], "arms": ["rd"], "seeds": [1]}]}, ("unknown size 'b'",)),
        ({"groups": []}, ("no runs",)),
        ({"sizes": {"a-b": {}}}, ("size 'a-b'",)),
        ({"flags": dict(flags, seed=3)}, ("'seed'", "runner's")),
        ({"flags": dict(flags, train="{nowhere}/x")}, ("variable",)),
        ({"flags": {k: v for k, v in flags.items() if k != "val-every"}}, ("val_every", "needed")),
        ({"milestones": [330]}, ("milestone 330", "step 10")),
        ({"milestones": [640, 320]}, ("rise",)),
        ({"milestones": [900]}, ("milestone 900", "640 tokens")),
    ):
        entries = {k: v for k, v in dict(place.entries, **change).items() if v is not None}
        with open(place.file, "w") as f:
            json.dump(entries, f)
        refused(place.study, place.file, *words)
    with open(place.file, "w") as f:
        f.write("{")
    refused(place.study, "not JSON")
    os.remove(place.file)
    refused(place.study, "No such file")


@test("a log: cut last line is passed over, junk elsewhere is not, later events replace earlier ones")
@in_place()
def _(place):
    path = os.path.join(place.folder, "log.jsonl")

    def log(*lines):
        with open(path, "w") as f:
            f.write("\n".join(lines))
        return study_module.Log(path)

    step = '{"event":"step","step":%d,"tokens":1,"loss":%s}'
    got = log(
        '{"event":"config","options":{"lr":0.1}}', step % (1, 5), step % (2, 4), step % (2, 3), '{"event":"st'
    )
    equal((got.last_step(), got.steps[2]["loss"], got.diverged_at), (2, 3, None), "cut line")
    equal(log(step % (1, 5), step % (2, "null")).diverged_at, 2, "null loss")
    equal(log(step % (1, 5), step % (2, "1e999")).diverged_at, 2, "infinite loss")
    refused(lambda: log("{nonsense", step % (1, 5)), ":1:", "not a log event")
    refused(
        lambda: log('{"event":"config","options":{"lr":0.1}}', '{"event":"config","options":{"lr":0.2}}', ""),
        "resumed with other settings",
        "lr 0.1 against 0.2",
    )


@test(
    "byte shards from GPT-2 shards: same documents, end-of-text 256, cut at whole documents, bad files refused"
)
@in_place()
def _(place):
    def write(name, header, body):
        path = os.path.join(place.folder, name)
        with open(path, "wb") as f:
            f.write(struct.pack("<%dI" % len(header), *header).ljust(1024, b"\0") + body)
        return path

    words = [b"a", b"bc", b"\xff", b" def", b""]  # the last is end-of-text
    tokenizer = write("tokenizer.bin", [20240328, 2, 5, 4], b"".join(bytes([len(w)]) + w for w in words))
    ids = [4, 0, 1, 4, 2, 3, 3, 4, 0]
    shard = write("shard.bin", [20240520, 1, len(ids)], struct.pack("<9H", *ids))
    bad = write("bad.bin", [20240520, 1, 1], struct.pack("<H", 5))
    short = write("short.bin", [20240520, 1, 7], b"xx")

    def convert(shard, *words):
        done = subprocess.run(
            [
                sys.executable,
                "-B",
                os.path.join(PAIRED, "gpt2_to_bytes.py"),
                "--tokenizer",
                tokenizer,
                "--out",
                place.folder + "/bytes",
                shard,
                *words,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            return done.stdout
        with open(os.path.join(place.folder, "bytes", os.path.basename(shard)), "rb") as f:
            data = f.read()
        equal(struct.unpack("<4i", data[:16]), (20240520, 1, (len(data) - 1024) // 2, 0), "header")
        return list(struct.unpack("<%dH" % ((len(data) - 1024) // 2), data[1024:]))

    want = [256, *b"abc", 256, 255, *b" def def", 256, *b"a"]
    equal(convert(shard), want, "tokens")
    for most in range(len(want), 3, -1):
        equal(
            convert(shard, "--max-bytes", str(most)),
            want[: len(want) if most >= 16 else 14 if most >= 14 else 4],
            "%d bytes at most" % most,
        )
    check("token 5, but the tokenizer has 5" in convert(bad), convert(bad))
    check(
        "header" in convert(short) and not os.path.exists(place.folder + "/bytes/short.bin"),
        "wrong size is refused",
    )


# ---- which runs may be compared ------------------------------------------------------------------------------
@test("pairs that differ in anything but the arm are refused, known setting or not")
def _():
    base = {"arch": "block", "seed": 1, "lr": 0.01, "steps": 20, "train": "x", "out": "a", "something_new": 1}

    def rows(**change):
        return [
            ("one", 1, "a", base, 5.0),
            ("two", 1, "a", dict(base, arch="rd", out="b", **change), change.pop("loss", 5.001)),
        ]

    study_module.check_comparable(rows())
    study_module.check_comparable(rows(lr="0.0100"))  # the same number, written another way
    for name, value in (("lr", 0.02), ("steps", 21), ("train", "y"), ("something_new", 2), ("total_batch", 64)):
        refused(
            lambda: study_module.check_comparable(rows(**{name: value})), "one and two", name, json.dumps(value)
        )
    refused(
        lambda: study_module.check_comparable(
            [("one", 1, "a", base, 5.0), ("two", 1, "a", dict(base, arch="rd"), 5.006)]
        ),
        "first losses",
        "batch",
    )
    other_seed = ("three", 2, "a", dict(base, seed=2), 5.3)
    study_module.check_comparable(rows() + [other_seed])
    refused(
        lambda: study_module.check_comparable(rows() + [("three", 2, "a", dict(base, seed=2, lr=0.02), 5.3)]),
        "one and three",
        "lr",
    )
    study_module.check_comparable(rows() + [("four", 2, "b", dict(base, seed=2, lr=0.02), 5.3)])  # another size


@test("the runner stops when the trainer did not do what it was asked to")
@in_place()
def _(place):
    status, text = place.run(STUB_LR="rd-s1")
    equal(status, 1, text)
    check("a-rd-s1: made with --lr 0.5" in text and "0.01" in text, text)
    check(not os.path.exists(os.path.join(place.root, "a-block-s2")), "no further run was started")


@test("runner and analysis refuse runs whose logs differ in more than the arm")
@in_place(seeds=(1,))
def _(place):
    equal(place.run()[0], 0, "the study runs")
    path = os.path.join(place.root, "a-rd-s1", "log.jsonl")
    lines = place.log_lines("a-rd-s1")
    config = json.loads(lines[0])
    config["options"]["data_order"] = "backwards"
    with open(path, "w") as f:
        f.write("\n".join([json.dumps(config)] + lines[1:]) + "\n")
    for status, text in (place.run(), place.analyse()):
        equal(status, 1, text)
        check("a-block-s1 and a-rd-s1 must not be compared" in text and "data_order" in text, text)


@test("a pair made by two different programs is refused; pairs of different seeds may have different ones")
@in_place()
def _(place):
    other = os.path.join(place.folder, "other.py")
    shutil.copy(STUB, other)
    with open(other, "a") as f:
        f.write("# rebuilt\n")
    equal(place.run("--only=-s1")[0], 0, "seed 1 with the first")
    equal(place.run("--only=-s2", "--trainer", other)[0], 0, "seed 2 with the other")
    place.report()
    shutil.rmtree(os.path.join(place.root, "a-rd-s2"))
    os.remove(os.path.join(place.root, "runner", "a-rd-s2.launches.jsonl"))
    status, text = place.run()
    equal(status, 1, text)
    check("a-block-s2 and a-rd-s2 must not be compared" in text and "trainer" in text, text)
    # resumed with another program: both are on record, unless nothing of the first's work is left
    run = place.study().runs[1]
    path = os.path.join(place.root, "runner", run.name + ".launches.jsonl")

    def programs(*launches):
        with open(path, "w") as f:
            for begin, trainer in launches:
                f.write(json.dumps({"from": begin, "trainer": trainer}) + "\n")
        return study_module.state_of(run, place.root)[1].config["trainer"]

    equal(programs((0, "A"), (10, "B")), "A+B", "A's steps 1 to 10 are in the run")
    equal(programs((0, "A"), (0, "B")), "B", "nothing of A is")
    equal(programs((0, "A"), (10, "B"), (10, "A")), "A", "nothing of B is")


@test("a study whose flags were changed does not take over the old runs")
@in_place(seeds=(1,))
def _(place):
    equal(place.run()[0], 0, "the study runs")
    place.entries["flags"]["lr"] = 0.02
    place.write()
    status, text = place.run()
    equal(status, 1, text)
    check("made with --lr 0.01" in text and "0.02" in text, text)


# ---- the runner ----------------------------------------------------------------------------------------------
@test("a study runs in the order of its file; finished runs are skipped the next time")
@in_place(groups=[{"arms": ["rd", "block"], "seeds": [2, 1]}, {"arms": ["tied"], "seeds": [1]}])
def _(place):
    status, text = place.run()
    equal(status, 0, text)
    started = [line.split()[0] for line in text.splitlines() if line.endswith("started")]
    equal(started, ["a-rd-s2", "a-block-s2", "a-rd-s1", "a-block-s1", "a-tied-s1"], "order")
    status, text = place.run()
    equal(status, 0, text)
    equal(text.count("finished"), 5, "all skipped")
    check("started" not in text and len(place.attempts("a-rd-s1")) == 1, "nothing ran again")
    status, text = place.run("--list")
    equal(text.count("finished    step 20 of 20"), 5, "--list")


@test("the trainer gets the study's flags, its own size's, arm, seed and folder, and the environment asked for")
@in_place(seeds=(3,), env={"A_SETTING": "x"}, sizes={"a": {"flags": {"lr": 0.25, "quiet": True}}})
def _(place):
    run = place.study().runs[1]
    equal(
        study_module.command(place.study(), run, "R", True),
        [
            STUB,
            "--layers",
            "3",
            "--steps",
            "20",
            "--batch",
            "4",
            "--context",
            "8",
            "--val-every",
            "5",
            "--checkpoint-every",
            "5",
            "--block-size",
            "2",
            "--lr",
            "0.25",
            "--quiet",
            "--arch",
            "rd",
            "--seed",
            "3",
            "--out",
            "R/a-rd-s3",
            "--resume",
            "R/a-rd-s3",
        ],
        "command line",
    )
    equal(run.env, {"A_SETTING": "x"}, "environment")


@test("two at a time, and one per GPU: each GPU has one run at a time, all are used")
@in_place(seeds=(1, 2, 3))
def _(place):
    trainer = os.path.join(place.folder, "trainer.sh")
    with open(trainer, "w") as f:
        f.write(
            '#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS" >> "%s"\nexec "%s" "$@"\n'
            % (place.folder + "/seen", STUB)
        )
    os.chmod(trainer, 0o755)
    status, text = place.run("--gpus", "3,5", "--threads", "2", "--trainer", trainer, STUB_MS="5")
    equal(status, 0, text)
    with open(place.folder + "/seen") as f:
        seen = f.read().split("\n")[:-1]
    equal(sorted(set(seen)), ["3 2", "5 2"], "CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS")
    equal(len(seen), 6, "runs")
    busy = {}
    for line in text.splitlines():
        name = line.split()[0]
        if "on GPU" in line:
            check(line[-1] not in busy.values(), "GPU %s has two runs" % line[-1])
            busy[name] = line[-1]
        elif "finished" in line:
            del busy[name]
    check(place.attempts("a-rd-s1")[0]["gpu"] in ("3", "5"), "GPU is on record")


@test(
    "a trainer killed in the middle is resumed from its checkpoint, and the log is that of a run never killed"
)
@in_place(seeds=(1,))
def _(place):
    status, text = place.run(STUB_KILL="rd-s1@13")
    equal(status, 0, text)
    check(
        "FAILED: trainer ended with status -9 after step 12" in text and "resumed after step 10" in text, text
    )
    equal(
        [(a["from"], a["reached"], a["status"]) for a in place.attempts("a-rd-s1")],
        [(0, 12, -9), (10, 20, 0)],
        "attempts",
    )
    broken = place.log_lines("a-rd-s1")
    shutil.rmtree(place.root)
    equal(place.run()[0], 0, "again")
    whole = place.log_lines("a-rd-s1")
    again = [line for line in broken if line.startswith('{"event": "config"')]
    equal(again, [whole[0]] * 2, "the resumed run states its settings again")
    equal([line for line in broken if line not in again], whole[1:], "log")


@test("a trainer killed before its first checkpoint begins again")
@in_place(seeds=(1,))
def _(place):
    status, text = place.run(STUB_KILL="rd-s1@3")
    equal(status, 0, text)
    equal([(a["from"], a["reached"]) for a in place.attempts("a-rd-s1")], [(0, 2), (0, 20)], "attempts")


@test("a failure repeated at the same step stops the study; a restart tries once more and stops again")
@in_place()
def _(place):
    status, text = place.run(STUB_FAIL="rd-s1@13")
    equal(status, 1, text)
    check(
        "error: a-rd-s1 failed again at the same step (trainer ended with status 1 after step 12)" in text, text
    )
    check("it said: error: told to fail" in text, "the trainer's words are passed on: " + text)
    equal(len(place.attempts("a-rd-s1")), 2, "attempts")
    check(not os.path.exists(os.path.join(place.root, "a-block-s2")), "no further run was started")
    status, text = place.run(STUB_FAIL="rd-s1@13")
    equal((status, len(place.attempts("a-rd-s1"))), (1, 3), text)
    status, text = place.run()  # mended
    equal(status, 0, text)


@test("when one run stops the study, the others running beside it are saved and ended")
@in_place(seeds=(1,))
def _(place):
    status, text = place.run("--jobs", "2", STUB_FAIL="block-s1@3", STUB_MS="150")
    equal(status, 1, text)
    (attempt,) = place.attempts("a-rd-s1")
    equal((attempt["interrupted"], attempt["status"], attempt["reached"] < 20), (True, 0, True), text)
    equal(study_module.checkpoints(place.root + "/a-rd-s1")[-1][5:13], "%08d" % attempt["reached"], "it saved")


@test("a run that was asked to stop somewhere and fails there next time gets its second chance")
@in_place(seeds=(1,))
def _(place):
    os.makedirs(os.path.join(place.root, "runner"))
    with open(os.path.join(place.root, "runner", "a-block-s1.attempts.jsonl"), "w") as f:
        stopped = {"from": 0, "reached": 12, "status": 0, "interrupted": True, "message": "", "seconds": 1}
        f.write(json.dumps(stopped) + "\n")
    status, text = place.run(STUB_FAIL="block-s1@13")
    equal((status, len(place.attempts("a-block-s1"))), (1, 3), text)


@test("--keep-going gives up the failing run and carries out the others")
@in_place()
def _(place):
    status, text = place.run("--keep-going", STUB_FAIL="rd-s1@13")
    equal(status, 1, text)
    check("given up" in text, text)
    equal(
        [study_module.state_of(r, place.root)[0] for r in place.study().runs],
        ["finished", "interrupted", "finished", "finished"],
        "states",
    )


@test("a trainer that dies at changing steps without a new checkpoint is stuck")
@in_place(seeds=(1,))
def _(place):
    trainer = os.path.join(place.folder, "trainer.sh")
    with open(
        trainer, "w"
    ) as f:  # fails at step 7, 8, 9, ...: every attempt gets further, none to a checkpoint
        f.write(
            '#!/bin/sh\nn=$(ls "%s" | wc -l)\ntouch "%s/$n"\nSTUB_FAIL="block-s1@$((7 + n))" exec "%s" "$@"\n'
            % (place.folder + "/n", place.folder + "/n", STUB)
        )
    os.mkdir(place.folder + "/n")
    os.chmod(trainer, 0o755)
    place.entries["flags"]["checkpoint-every"] = 15
    place.write()
    status, text = place.run("--trainer", trainer)
    equal(status, 1, text)
    check("failed 3 times without reaching a new checkpoint" in text, text)


@test("a trainer that refuses its flags is not asked twice")
@in_place()
def _(place):
    write_program(
        place.folder, "trainer.sh", "#!/bin/sh\necho 'error: --lr: got 0.01, expected 7' >&2\nexit 2\n"
    )
    status, text = place.run("--trainer", os.path.join(place.folder, "trainer.sh"))
    equal((status, len(place.attempts("a-block-s1"))), (1, 1), text)
    check("failed because of its flags" in text and "it said: error: --lr: got 0.01, expected 7" in text, text)


@test("a trainer that is not there is one clear line")
@in_place()
def _(place):
    status, text = place.run("--trainer", "/nowhere/train")
    equal(status, 1, text)
    check("cannot start the trainer /nowhere/train" in text and "Traceback" not in text, text)


@test("SIGTERM to the runner: the trainers save and end, status 130, and the next start goes on from there")
@in_place()
def _(place):
    process = subprocess.Popen(
        place.command("--jobs", "2"), stdout=subprocess.PIPE, text=True, env=dict(os.environ, STUB_MS="50")
    )
    first, deadline = os.path.join(place.root, "a-block-s1", "log.jsonl"), time.time() + 20
    while time.time() < deadline and not (os.path.exists(first) and '"step": 3' in open(first).read()):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=20)[0]
    equal(process.returncode, 130, text)
    check("interrupted" in text, text)
    attempt = place.attempts("a-block-s1")[0]
    check(attempt["interrupted"] and 0 < attempt["reached"] < 20, "attempt %r" % attempt)
    equal(
        study_module.checkpoints(os.path.join(place.root, "a-block-s1"))[-1],
        "ckpt_%08d.safetensors" % attempt["reached"],
        "checkpoint where it was stopped",
    )
    status, text = place.run()
    equal(status, 0, text)
    check("resumed after step %d" % attempt["reached"] in text and "FAILED" not in text, text)


@test("Ctrl-C in the terminal reaches the trainers as one polite request")
@in_place(seeds=(1,))
def _(place):
    process = subprocess.Popen(
        place.command(),
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, STUB_MS="50"),
        start_new_session=True,
    )
    first, deadline = os.path.join(place.root, "a-block-s1", "log.jsonl"), time.time() + 20
    while time.time() < deadline and not (os.path.exists(first) and '"step": 3' in open(first).read()):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everyone in the foreground
    text = process.communicate(timeout=20)[0]
    attempt = place.attempts("a-block-s1")[0]
    equal((process.returncode, attempt["status"]), (130, 0), text)
    check("ckpt_%08d.safetensors" % attempt["reached"] in os.listdir(place.root + "/a-block-s1"), "it saved")


@test("a second signal to the runner makes the trainers leave at once")
@in_place(seeds=(1,))
def _(place):
    process = subprocess.Popen(
        place.command(), stdout=subprocess.PIPE, text=True, env=dict(os.environ, STUB_MS="30000")
    )
    first, deadline = os.path.join(place.root, "a-block-s1", "log.jsonl"), time.time() + 20
    while time.time() < deadline and not (os.path.exists(first) and '"val"' in open(first).read()):
        time.sleep(0.02)
    begin = time.time()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
    text = process.communicate(timeout=20)[0]
    equal((process.returncode, place.attempts("a-block-s1")[0]["status"]), (130, 130), text)
    check(time.time() - begin < 15, "it took %.0f s" % (time.time() - begin))


@test("a run that another runner holds is left alone until it is free")
@in_place(seeds=(1,))
def _(place):
    os.makedirs(os.path.join(place.root, "runner"))
    with open(os.path.join(place.root, "runner", "a-block-s1.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(place.command(), stdout=subprocess.PIPE, text=True)
        deadline = time.time() + 20
        while time.time() < deadline and not os.path.exists(
            os.path.join(place.root, "a-rd-s1", "ckpt_00000020.safetensors")
        ):
            time.sleep(0.02)
        check(not os.path.exists(os.path.join(place.root, "a-block-s1")), "not touched")
        equal(process.poll(), None, "still waiting")
    text = process.communicate(timeout=20)[0]
    equal(process.returncode, 0, text)
    equal(
        [line.split()[0] for line in text.splitlines() if "started" in line], ["a-rd-s1", "a-block-s1"], "order"
    )


@test("a killed runner leaves its trainer's lock held, so a second runner cannot start the same run beside it")
@in_place(seeds=(1,))
def _(place):
    process = subprocess.Popen(place.command(), stdout=subprocess.DEVNULL, env=dict(os.environ, STUB_MS="40"))
    first, deadline = os.path.join(place.root, "a-block-s1", "log.jsonl"), time.time() + 20
    while time.time() < deadline and not (os.path.exists(first) and '"step": 2' in open(first).read()):
        time.sleep(0.02)
    process.kill()
    process.wait()
    status, text = place.run()
    equal(status, 0, text)
    check("FAILED" not in text, text)
    equal(
        [line.split()[0] for line in text.splitlines() if "started" in line or "resumed" in line],
        ["a-rd-s1"],
        "the orphan ended its run by itself",
    )


@test("--results: runs summarised elsewhere as finished are not run again, and are checked too")
@in_place(seeds=(1,))
def _(place):
    place.run("--only", "block")
    place.report()
    shutil.rmtree(place.root)
    status, text = place.run("--results", place.results)
    equal(status, 0, text)
    check("finished, kept in" in text, text)
    check(not os.path.exists(os.path.join(place.root, "a-block-s1")), "block did not run again")
    text = place.report()
    check("| size a | 640 | 1 |" in text, "the pair is complete: " + text)
    path = os.path.join(place.results, "summaries", "a-block-s1.json")
    with open(path) as f:
        summary = json.load(f)
    summary["config"]["data_order"] = "backwards"
    with open(path, "w") as f:
        json.dump(summary, f)
    status, text = place.run("--results", place.results)
    equal(status, 1, text)
    check("must not be compared" in text, text)


# ---- Slurm ---------------------------------------------------------------------------------------------------
@test("job array numbers are written as ranges")
def _():
    equal(runner_module.ranges([0, 1, 2, 5, 7, 8]), "0-2,5,7-8", "ranges")
    equal(runner_module.ranges([4]), "4", "one")


@test("--slurm writes a job array that a scheduler can read: one task a run, finished runs left out")
@in_place(slurm=["--gpus=1", "--time=01:00:00"])
def _(place):
    equal(place.run("--only", "a-rd-s1")[0], 0, "one run is finished before")
    script = os.path.join(place.folder, "job.sh")
    status, text = place.run("--slurm", script, "--sbatch=--partition=long", "--threads", "4")
    equal(status, 0, text)
    with open(script) as f:
        lines = f.read().splitlines()
    options = {}
    for line in lines:
        if line.startswith("#SBATCH "):
            name, _, value = line[8:].split("#")[0].strip().partition("=")
            options[name] = value
    equal(options["--array"], "0,2-3", "array")
    equal(
        (options["--gpus"], options["--time"], options["--partition"]),
        ("1", "01:00:00", "long"),
        "the study's and the command's options",
    )
    equal(options["--signal"], "B:TERM@120", "signal before the limit")
    check("--requeue" in options and options["--output"].startswith(place.root), "requeue, output")
    first_command = min(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    check(
        all(not line.startswith("#SBATCH") for line in lines[first_command:]),
        "sbatch ignores options after the first command",
    )
    equal(lines[0], "#!/bin/bash", "interpreter")
    check(any('--task "$SLURM_ARRAY_TASK_ID"' in line and "--threads 4" in line for line in lines), "command")
    equal(subprocess.call(["bash", "-n", script]), 0, "bash reads it")
    check("a-rd-s1" not in "\n".join(lines), "finished run is not listed")


SBATCH = """#!%s
import os, re, subprocess, sys
script = sys.argv[1]
text = open(script).read()
for part in re.search(r"^#SBATCH --array=(.*)$", text, re.M).group(1).split(","):
    low, _, high = part.partition("-")
    for task in range(int(low), int(high or low) + 1):
        out = open(os.path.join(%r, "task-%%d" %% task), "w")
        env = dict(os.environ, SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_JOB_ID="77")
        status = subprocess.call(["bash", script], env=env, stdout=out, stderr=out)
        print("task", task, "status", status)
"""


def write_program(folder, name, text):
    path = os.path.join(folder, name)
    with open(path, "w") as f:
        f.write(text)
    os.chmod(path, 0o755)


@test("--slurm --submit against a stub sbatch: the array carries out the study, and gives the same report")
@in_place()
def _(place):
    bin_folder = os.path.join(place.folder, "bin")
    os.mkdir(bin_folder)
    write_program(bin_folder, "sbatch", SBATCH % (sys.executable, place.folder))
    path = bin_folder + os.pathsep + os.environ["PATH"]
    script = os.path.join(place.folder, "job.sh")
    status, text = place.run("--slurm", script, "--submit", PATH=path)
    equal(status, 0, text)
    equal(
        [line for line in text.splitlines() if line.startswith("task")],
        ["task %d status 0" % k for k in range(4)],
        text,
    )
    by_array = place.report()
    shutil.rmtree(place.root)
    shutil.rmtree(place.results)
    equal(place.run()[0], 0, "run directly")
    equal(place.report(), by_array, "report")
    equal(place.run("--slurm", script), (0, "nothing to do: every run is finished\n"), "nothing left")


@test("a Slurm task that gets SIGTERM before its limit saves, queues itself again, and goes on the next time")
@in_place(seeds=(1,))
def _(place):
    bin_folder = os.path.join(place.folder, "bin")
    os.mkdir(bin_folder)
    write_program(bin_folder, "scontrol", '#!/bin/sh\necho "$@" > "%s/requeued"\n' % place.folder)
    script = os.path.join(place.folder, "job.sh")
    equal(place.run("--slurm", script)[0], 0, "written")
    env = dict(
        os.environ,
        SLURM_ARRAY_TASK_ID="1",
        SLURM_ARRAY_JOB_ID="77",
        STUB_MS="50",
        PATH=bin_folder + os.pathsep + os.environ["PATH"],
    )
    process = subprocess.Popen(
        ["bash", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log, deadline = os.path.join(place.root, "a-rd-s1", "log.jsonl"), time.time() + 20
    while time.time() < deadline and not (os.path.exists(log) and '"step": 3' in open(log).read()):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # as --signal=B:TERM does: to the batch shell alone
    text = process.communicate(timeout=20)[0]
    equal(process.returncode, 130, text)
    with open(os.path.join(place.folder, "requeued")) as f:
        equal(f.read(), "requeue 77_1\n", "scontrol")
    env["STUB_MS"] = "0"
    equal(subprocess.call(["bash", script], env=env, stdout=subprocess.DEVNULL), 0, "second time")
    attempts = place.attempts("a-rd-s1")
    equal(
        (len(attempts), attempts[1]["from"], attempts[1]["reached"]), (2, attempts[0]["reached"], 20), "went on"
    )


# ---- the report ----------------------------------------------------------------------------------------------
FIVE = dict(seeds=(1, 2, 3, 4, 5))


@test("report of a complete study: the known differences, their interval, signs, JS in nats and bits")
@in_place(
    groups=[
        {"arms": ["block", "rd"], "seeds": [1, 2, 3, 4, 5]},
        {"arms": ["residual", "tied", "average", "frozen-v"], "seeds": [1, 2, 3]},
    ]
)
def _(place):
    place.entries["flags"]["test"] = "held_out"
    place.write()
    equal(place.run("--jobs", "2")[0], 0, "run")
    text = place.report()
    # differences are -0.032 ... -0.028: standard deviation 0.0015811, half width 2.7764 * 0.0015811 / sqrt(5)
    for row in (
        "| size a | 640 | 5 | −0.0300 | −0.0320 to −0.0280 | −0.0312 to −0.0288 | 5 : 0 | 0.0625 | −2.96% |",
        "| size a | 320 | 5 | −0.0150 | −0.0160 to −0.0140 | −0.0156 to −0.0144 | 5 : 0 | 0.0625 | −1.49% |",
        "| size a | 640 | −0.0320 | −0.0310 | −0.0300 | −0.0290 | −0.0280 |",
        "| paper, S (119.8M) | 2B | 5 | −0.0301 |",
        "−2.97%",
        "| paper, M (343.0M) | 2B | 5 | −0.0247 |",
        "−2.43%",
        "| paper, M (343.0M) | 2B | −0.0120 | −0.0181 | −0.0211 | −0.0293 | −0.0430 |",
        "rd is better, beyond the spread of the seeds",
        "10 of 10 pairs lower: sign test p = 0.00195",
        "All runs are finished; none was left out.",
        "size a, nats by layer: 0.0000, 0.1000, 0.3000",
        "| size a | 5 | 0.1333 | 0.2000 | 0.1924 | 0.2885 |",
        "| paper, S (119.8M) | 5 | 0.218 |",
        "| embedding | 0.350 | 0.425 | +0.075 |",
        "| block 2 | 0.500 | 0.200 | −0.300 |",
        "V +1.00 (+1.00 to +1.00), V − QK +1.00 (+1.00 to +1.00).",
        "| size a, rd | 640 | 5 | −0.0300 |",
        "These numbers are made up.",
    ):
        check(row in text, "the report lacks: %s\n%s" % (row, text))
    rows = {
        line.split(" | ")[0][2:]: line
        for line in text.split("## Every arm")[1].splitlines()
        if line.startswith("| ")
    }
    for arm, mean, signs, p in (
        ("residual", "+0.0200", "0 : 3", "0.25"),
        ("tied", "0.0000", "0 : 0", "–"),
        ("average", "−0.0040", "3 : 0", "0.25"),
        ("frozen-v", "+0.0100", "0 : 3", "0.25"),
    ):
        check(" | 3 | 3 | %s | " % mean in rows[arm] and " | %s | %s | " % (signs, p) in rows[arm], rows[arm])
    check("−0.0270 (−0.0295 to −0.0245)" in rows["average"], "rd minus average: " + rows["average"])
    with open(os.path.join(place.results, "speed.md"), encoding="utf-8") as f:
        speed = f.read()
    check("| rd | 5 | 900 | 0.900 |" in speed and "| residual | 3 | 1100 | 1.100 |" in speed, speed)


@test("the report regenerates from the summaries alone to the same text, and holds no path of this machine")
@in_place()
def _(place):
    place.entries["flags"]["train"] = place.folder + "/secret/t.bin"
    place.write()
    place.run()
    first = place.report()
    shutil.rmtree(place.root)
    os.remove(os.path.join(place.results, "report.md"))
    equal(place.analyse(from_runs=False)[0], 0, "from the summaries")
    with open(os.path.join(place.results, "report.md"), encoding="utf-8") as f:
        equal(f.read(), first, "text")
    for name in os.listdir(os.path.join(place.results, "summaries")):
        with open(os.path.join(place.results, "summaries", name)) as f:
            check(place.folder not in f.read(), name + " holds a path")


@test("the results that the repository holds: every study's report is what its summaries give")
@in_place()
def _(place):
    held = os.path.join(PAIRED, "results")
    names = sorted(os.listdir(held)) if os.path.isdir(held) else []
    if not names:
        raise Skip("no results are committed")
    for name in names:
        copy = os.path.join(place.folder, name)
        os.makedirs(copy)
        shutil.copy(os.path.join(held, name, "study.json"), copy)
        shutil.copytree(os.path.join(held, name, "summaries"), os.path.join(copy, "summaries"))
        command = [sys.executable, "-B", os.path.join(PAIRED, "analyse.py"), "--results", copy]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        equal(done.returncode, 0, "%s: %s" % (name, done.stdout))
        with open(os.path.join(held, name, "report.md"), encoding="utf-8") as f:
            committed = f.read()
        with open(os.path.join(copy, "report.md"), encoding="utf-8") as f:
            equal(f.read(), committed, name)
        with open(os.path.join(PAIRED, "studies", name + ".json")) as a, open(copy + "/study.json") as b:
            equal(json.load(a), json.load(b), name + ": the study file is the one that was carried out")


@test(
    "a study killed with runner and trainer in the middle and started again gives the same summaries and report"
)
@in_place()
def _(place):
    place.run()
    whole = place.report()
    summaries = {
        n: open(os.path.join(place.results, "summaries", n)).read()
        for n in os.listdir(place.results + "/summaries")
    }
    shutil.rmtree(place.root)
    shutil.rmtree(place.results)
    process = subprocess.Popen(
        place.command("--jobs", "2"),
        stdout=subprocess.DEVNULL,
        env=dict(os.environ, STUB_MS="20", STUB_KILL="rd-s1@13"),
    )
    killed, deadline = os.path.join(place.root, "a-rd-s1.killed"), time.time() + 20
    while time.time() < deadline and not os.path.exists(killed):
        time.sleep(0.01)
    process.kill()
    process.wait()
    equal(place.run()[0], 0, "started again")
    equal(place.report(), whole, "report")
    for name, text in summaries.items():
        with open(os.path.join(place.results, "summaries", name)) as f:
            equal(f.read(), text, name)


@test("missing, interrupted and diverged runs are named, and pairs are formed only where both are there")
@in_place(**FIVE)
def _(place):
    place.run("--only=-s1")
    place.run("--only=-s2")
    place.run("--only", "block-s3")
    place.run("--keep-going", "--only=-s3", STUB_FAIL="rd-s3@13")  # reaches the first milestone, not the second
    place.run("--keep-going", "--only=-s4", STUB_NAN="rd-s4@8")
    text = place.report()
    for row in (
        "| size a | rd | 5 | 2 | 1 | 1 | 1 |",
        "| size a | block | 5 | 4 | 0 | 0 | 1 |",
        "- `a-rd-s3`: interrupted at step 12",
        "- `a-rd-s4`: diverged at step 8",
        "- `a-rd-s5`: missing",
        "- `a-block-s5`: missing",
        "The study is not complete",
        "| size a | 320 | 3 | −0.0155 |",
        "| 3 : 1 | 0.625 |",  # three differences; the diverged pair counts as lost
        "| size a | 640 | 2 | −0.0315 |",
        "| 2 : 1 | 1 |",
        "| size a | 320 | −0.0160 | −0.0155 | −0.0150 | rd diverged | missing |",
        "| size a | 640 | −0.0320 | −0.0310 | missing | rd diverged | missing |",
    ):
        check(row in text, "the report lacks: %s\n%s" % (row, text))
    status, _ = place.run()  # what was missing is made up for
    equal(status, 0, "the rest runs")
    check("All runs are finished" in place.report(), "complete now")


@test("an empty study and a single pair make a report that claims nothing")
@in_place()
def _(place):
    os.makedirs(place.root)
    check("no complete pair yet" in place.report(), "empty")
    place.run("--only=-s1")
    check("one pair only (−0.0320 nats): no interval, no conclusion" in place.report(), "one pair")


@test("a finished summary is not replaced by an unfinished run")
@in_place(seeds=(1,))
def _(place):
    place.run()
    whole = place.report()
    shutil.rmtree(place.root)
    place.run("--keep-going", STUB_FAIL="rd-s1@13")
    equal(place.report(), whole, "report")


@test("a run that is done with fewer steps than the study asks for is not finished")
@in_place(seeds=(1,))
def _(place):
    place.run()
    path = os.path.join(place.root, "a-rd-s1", "log.jsonl")
    lines = [line for line in place.log_lines("a-rd-s1") if '"done"' not in line]
    with open(path, "w") as f:
        f.write("\n".join(lines + ['{"event": "done", "step": 19, "tokens": 608, "seconds": 1}']) + "\n")
    equal(study_module.state_of(place.study().runs[1], place.root)[0], "interrupted", "state")


@test("a run said to be finished without the validation that is compared is an error")
@in_place(seeds=(1,))
def _(place):
    place.run()
    lines = [line for line in place.log_lines("a-rd-s1") if '"val", "step": 10' not in line]
    with open(os.path.join(place.root, "a-rd-s1", "log.jsonl"), "w") as f:
        f.write("\n".join(lines) + "\n")
    status, text = place.analyse()
    equal(status, 1, text)
    check("without the validation at step 10" in text, text)


@test("tied that is not block is shouted about")
@in_place(arms=("block", "tied"), seeds=(1,))
def _(place):
    place.run()
    check("is 0 in all 1 pairs" in place.report(), "equal: said so")
    path = os.path.join(place.results, "summaries", "a-tied-s1.json")
    with open(path) as f:
        summary = json.load(f)
    summary["val"]["val"][-1][2] += 1e-9
    with open(path, "w") as f:
        json.dump(summary, f)
    equal(place.analyse(from_runs=False)[0], 0, "analyse")
    with open(os.path.join(place.results, "report.md"), encoding="utf-8") as f:
        check("**`tied` differs from `block`" in f.read(), "different: said so")


# ---- pictures ------------------------------------------------------------------------------------------------
@test("pictures: PNG and SVG of everything, the same files from the same summaries")
@in_place(
    groups=[
        {"arms": ["residual", "block", "rd"], "seeds": [1, 2]},
        {"arms": ["tied", "average", "frozen-v"], "seeds": [1]},
    ]
)
def _(place):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Skip("matplotlib is not installed")
    place.run("--jobs", "2")
    place.report()

    def draw():
        done = subprocess.run(
            [sys.executable, "-B", os.path.join(PAIRED, "plot.py"), "--results", place.results]
            + ["--beside", place.results],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        equal((done.returncode, "Warning" in done.stdout), (0, False), done.stdout)
        folder = os.path.join(place.results, "pictures")
        return {n: open(os.path.join(folder, n), "rb").read() for n in sorted(os.listdir(folder))}

    files = draw()
    equal(
        sorted(files),
        sorted(n + e for n in ("beside_made_up", "loss", "pairs", "gap", "routes_a", "js") for e in (".png", ".svg")),
        "files",
    )
    for name, data in files.items():
        check(
            data.startswith(b"\x89PNG") if name.endswith("png") else b"</svg>" in data,
            name + " is what its name says",
        )
        check(len(data) > 5000, name + " is not empty")
    for arm in ("residual", "block", "rd", "tied", "average", "frozen-v"):
        check((">%s<" % arm).encode() in files["loss.svg"], "the loss picture names " + arm)
    for label in ("embedding", "block 1", "QK route", "V route"):
        check(label.encode() in files["routes_a.svg"], "the routes picture says " + label)
    again = draw()
    for name in files:
        check(files[name] == again[name], name + " differs the second time")


@test("pictures of a study with nothing, or almost nothing, in it do not fail")
@in_place()
def _(place):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Skip("matplotlib is not installed")
    os.makedirs(place.root)
    for words in ((), ("--only", "a-block-s1"), ("--only", "a-rd-s1")):
        if words:
            place.run(*words)
        place.report()
        done = subprocess.run(
            [sys.executable, "-B", os.path.join(PAIRED, "plot.py"), "--results", place.results],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        equal((done.returncode, "Warning" in done.stdout), (0, False), done.stdout)


@test("plot.py without matplotlib: says so; --if-possible makes it no error")
@in_place(seeds=(1,))
def _(place):
    os.makedirs(os.path.join(place.folder, "matplotlib"))
    write_program(os.path.join(place.folder, "matplotlib"), "__init__.py", "raise ImportError('none')\n")
    env = dict(os.environ, PYTHONPATH=place.folder)
    for words, want in (([], 1), (["--if-possible"], 0)):
        done = subprocess.run(
            [sys.executable, "-B", os.path.join(PAIRED, "plot.py"), "--results", place.folder, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        equal((done.returncode, done.stdout), (want, "no pictures: matplotlib is not installed\n"), "message")


@test("every flag of the study files is one of the trainer's")
def _():
    trainer = os.path.join(ROOT, "train_rdattnres_cpu")
    if not os.path.exists(trainer):
        raise Skip("train_rdattnres_cpu is not built")
    told = subprocess.run([trainer, "--help"], stdout=subprocess.PIPE, text=True).stdout
    known = {word for line in told.splitlines() for word in line.split()[:1] if word.startswith("--")}
    check("--arch" in known and len(known) > 20, "--help lists flags: %s" % known)
    folder = os.path.join(PAIRED, "studies")
    for name in os.listdir(folder):
        for run in Study(os.path.join(folder, name)).runs:
            for flag in run.flags:
                check("--" + flag.replace("_", "-") in known, "%s: --%s" % (name, flag))


# ---- with PyTorch --------------------------------------------------------------------------------------------
def script_with_torch(name, *words):
    """Runs a script of dev/paired that needs torch; (exit status, everything it printed)."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("safetensors") is None:
        raise Skip("torch or safetensors is not installed")
    done = subprocess.run([sys.executable, "-B", os.path.join(PAIRED, name), *words], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


HIDDEN = """
import sys, torch
sys.path.insert(0, %r)
import hide, rdattnres
torch.manual_seed(1)
model = hide.Hiding(rdattnres.Config("rd", L=3, C=8, NH=2, F=8, S=2, T=4, V=9)).double()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
sources = [torch.randn(1, 4, 8).double() for _ in range(3)]
whole = model.attention_mixes(2, sources)
model.hidden = {(2, "v"): 1}
qk, v = model.attention_mixes(2, sources)
# by hand: the softmax over all three with the hidden one's logit at minus infinity
keys = [model.attn_route_gain[2] * s / (s.square().mean(-1, keepdim=True) + 1e-6).sqrt() for s in sources]
logits = torch.stack([(k * model.attn_route_v[2]).sum(-1) for k in keys])
logits[1] = -float("inf")
want = sum(p[..., None] * s for p, s in zip(logits.exp() / logits.exp().sum(0), sources))
assert torch.equal(qk, whole[0]) and not torch.equal(v, whole[1])
assert (v - want).abs().max() < 1e-12, (v - want).abs().max()
"""


@test("hide.py hides one source from one route: the softmax over the others; bad runs are one line")
@in_place()
def _(place):
    status, text = script_with_torch("hide.py", "shard.bin", place.folder)
    equal((status, text), (1, "error: %s: no checkpoint\n" % place.folder), "no checkpoint")
    done = subprocess.run([sys.executable, "-B", "-c", HIDDEN % PAIRED], stderr=subprocess.PIPE, text=True)
    equal((done.returncode, done.stderr), (0, ""), "hidden source")


THEIR_READS = """
import torch
def naive_attnres(query, residuals, rms_weight, rms_eps):
    v = torch.stack(list(residuals)).float()
    k = v / (v.square().mean(-1, keepdim=True) + rms_eps).sqrt() * rms_weight.float()
    p = torch.softmax((k * query.float()).sum(-1) + %s, 0)
    return (p[..., None] * v).sum(0).to(residuals[0].dtype)
"""
THEIR_MEMORY = """
import torch
class BlockAttnResReference(torch.nn.Module):
    def __init__(self, sublayers, C, S, eps):
        super().__init__()
        self.S, self.mixer = S, torch.nn.Module()
        self.mixer.queries = torch.nn.Parameter(torch.zeros(sublayers + 1, C))
        self.mixer.key_norms = torch.nn.ModuleList(torch.nn.RMSNorm(C, eps) for _ in range(sublayers + 1))
    def init_state(self, embedding):
        return [[embedding]]  # one list a block, the embedding's first
    def layer_input(self, state):
        i = sum(map(len, state)) - 1
        v = torch.stack([sum(block) for block in state])
        p = torch.softmax(self.mixer.key_norms[i](v) @ self.mixer.queries[i], 0)
        return (p[..., None] * v).sum(0)
    def append_layer_output(self, state, output):
        i = sum(map(len, state)) - 1
        state.append([output]) if i %% self.S == %s else state[-1].append(output)
    final_output = layer_input
"""


@test("agreement.py: others' code agrees, and does not with a bias towards one source or a block shifted by one")
@in_place()
def _(place):
    for name, file, text, good, bad, arms in (
        ("fla", "fla/ops/attnres/naive.py", THEIR_READS, "0", "0.01 * torch.arange(len(v))[:, None, None]", 2),
        ("nanogpt", "examples/nanogpt/attnres.py", THEIR_MEMORY, "0", "1", 1),
    ):
        path = os.path.join(place.folder, file)
        os.makedirs(os.path.dirname(path))
        for fault, want in ((good, 0), (bad, 1)):
            with open(path, "w") as f:
                f.write(text % fault)
            status, said = script_with_torch("agreement.py", name, place.folder)
            equal((status, said.count("differ by")), (want, arms), said)


# ---- with the real trainer -----------------------------------------------------------------------------------
@test("the smoke study with the real CPU trainer, whole and killed in the middle: the same report")
@in_place()
def _(place):
    trainer = os.path.join(ROOT, "train_rdattnres_cpu")
    if not os.path.exists(trainer):
        raise Skip("train_rdattnres_cpu is not built")
    place.file = os.path.join(PAIRED, "studies", "smoke.json")
    begin = time.time()
    status, text = place.run("--trainer", trainer, OMP_NUM_THREADS="1")
    equal(status, 0, text)
    whole = place.report()
    said = "%.1f s for %d runs" % (time.time() - begin, len(place.study().runs))
    check("All runs are finished" in whole and "is 0 in all" in whole, whole)
    shutil.rmtree(place.root)
    shutil.rmtree(place.results)
    killer = os.path.join(
        place.folder, "trainer.sh"
    )  # the fourth launch is killed as soon as it has a checkpoint
    write_program(
        place.folder,
        "trainer.sh",
        """#!/bin/bash
echo >> "%(folder)s/launches"
if [ "$(wc -l < "%(folder)s/launches")" -eq 4 ]; then
  "%(trainer)s" "$@" &
  while kill -0 $! 2>/dev/null; do
    ls "%(folder)s"/runs/*-rd-s1/ckpt_*4.safetensors 2>/dev/null && kill -9 $!
  done
  wait $!; exit 1
fi
exec "%(trainer)s" "$@"
"""
        % {"folder": place.folder, "trainer": trainer},
    )
    status, text = place.run("--trainer", killer, OMP_NUM_THREADS="1")
    equal(status, 0, text)
    equal(place.report(), whole, "report")
    return said


def outcome(text, function):
    """Runs one test; (what to print, which count it adds to)."""
    try:
        said = function()
        return "ok   %s%s" % (text, ": " + said if said else ""), "passed"
    except Skip as e:
        return "skip %s: %s" % (text, e), "skipped"
    except Exception as e:  # a test that breaks is a test that fails
        return "FAIL %s: %s%s" % (text, "" if isinstance(e, Failed) else type(e).__name__ + " ", e), "failed"


def main():
    wanted, count = sys.argv[1:], {"passed": 0, "failed": 0, "skipped": 0}
    chosen = [t for t in TESTS if not wanted or any(w in t[0] for w in wanted)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # they mostly wait for processes
        for text, kind in pool.map(lambda t: outcome(*t), chosen):
            count[kind] += 1
            print(text, flush=True)
    passed, failed, skipped = count["passed"], count["failed"], count["skipped"]
    print("%d passed, %d failed, %d skipped" % (passed, failed, skipped))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
