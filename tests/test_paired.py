#!/usr/bin/env python3
"""test_paired.py - tests of dev/paired: statistics, study files, runner, report, pictures.

Most of it runs a stand-in trainer (paired_stub.py) whose losses are a formula, so every answer is known; the
last test runs the real CPU trainer if it has been built. Pictures are tested where matplotlib is installed, what
needs PyTorch where that is. Arguments choose tests: those whose text holds one of them.
"""

import concurrent.futures
import fcntl
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from check import Skip, case, finish

HERE = os.path.dirname(os.path.abspath(__file__))
PAIRED = os.path.join(os.path.dirname(HERE), "dev", "paired")
STUB = os.path.join(HERE, "paired_stub.py")
TRAINER = os.path.join(os.path.dirname(HERE), "train_rdattnres_cpu")
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.path.insert(0, PAIRED)
import analyse  # noqa: E402
from study import Log, Study, StudyError, check_comparable, checkpoints, command, state_of  # noqa: E402

TEMPORARY = tempfile.TemporaryDirectory(prefix="test_paired_")
TESTS = []


def test(text, **entries):
    """Collects a test: a function of a Place whose study has these entries."""

    def add(function):
        TESTS.append((text, lambda: function(Place(**entries))))

    return add


def close(got, want, tolerance):
    assert got is not None and abs(got - want) <= tolerance, "got %r, expected %r +- %g" % (got, want, tolerance)


def has(text, *words):
    for word in words:
        assert word in text, "lacks %s:\n%s" % (word, text)


def refused(function, *words):
    """The function must raise StudyError with all the words in its message, on one line."""
    try:
        function()
    except StudyError as e:
        has(str(e), *words)
        assert "\n" not in str(e), e
    else:
        raise AssertionError("not refused; expected an error with %s" % (words,))


def need(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise Skip("%s is not installed" % module)


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as f:
        return f.read()


def write(path, text):
    """Writes the file and its folder; a script is made executable."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    if text.startswith("#!"):
        os.chmod(path, 0o755)
    return path


def edit(path, old, new):
    """Replaces a pattern's first match in the file."""
    text, count = re.subn(old, new, read(path), count=1)
    assert count == 1, "%s has no %s" % (path, old)
    write(path, text)


def wait_for(text, *path):
    """Waits until the file is there and says so."""
    for _ in range(1500):
        if os.path.exists(os.path.join(*path)) and text in read(*path):
            return
        time.sleep(0.02)
    raise AssertionError("30 s without '%s' in %s" % (text, os.path.join(*path)))


def script(name, *words, status=0, **env):
    """What a script of dev/paired printed, once it ended with this status."""
    done = subprocess.run([sys.executable, os.path.join(PAIRED, name), *words], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, env={**os.environ, **env}, timeout=600)
    assert done.returncode == status, "%s: status %d, expected %d: %s" % (name, done.returncode, status, done.stdout)
    return done.stdout


def launched(text):
    """Names of the runs that a runner says it launched."""
    return [line.split()[0] for line in text.splitlines() if "started" in line or "resumed" in line]


class Place:
    """A temporary folder with a made-up study in it."""

    def __init__(self, arms=("block", "rd"), seeds=(1, 2), **entries):
        self.folder = tempfile.mkdtemp(dir=TEMPORARY.name)
        self.root, self.results, self.file = (self.path(n) for n in ("runs", "results", "study.json"))
        self.entries = {
            "name": "made_up", "about": "Made-up numbers.", "trainer": STUB,
            "limits": ["These numbers are made up."],
            "flags": {"layers": 3, "steps": 20, "batch": 4, "context": 8, "val-every": 5, "checkpoint-every": 5,
                      "block-size": 2, "lr": 0.01},
            "milestones": [320, 640],
            "sizes": {"a": {"label": "size a"}},
            "groups": [{"arms": list(arms), "seeds": list(seeds)}],
        }
        self.change(**entries)

    def change(self, **entries):
        """Writes the study file with these entries replaced; an entry that is None is left out."""
        self.entries.update(entries)
        write(self.file, json.dumps({k: v for k, v in self.entries.items() if v is not None}))

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def study(self):
        return Study(self.file)

    def run(self, *words, **more):
        return script("run.py", self.file, "--root", self.root, *words, **more)

    def start(self, *words, **env):
        """A runner left to itself."""
        words = [sys.executable, os.path.join(PAIRED, "run.py"), self.file, "--root", self.root, *words]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **env},
                                start_new_session=True)

    def analyse(self, **more):
        return script("analyse.py", self.file, "--root", self.root, "--results", self.results, **more)

    def report(self):
        self.analyse()
        return read(self.results, "report.md")

    def report_from_summaries(self):
        script("analyse.py", "--results", self.results)
        return read(self.results, "report.md")

    def log(self, name):
        return os.path.join(self.root, name, "log.jsonl")

    def summary(self, name):
        return os.path.join(self.results, "summaries", name + ".json")

    def attempts(self, name):
        return [json.loads(line) for line in read(self.root, "runner", name + ".attempts.jsonl").splitlines()]

    def wipe(self):
        """Forgets the runs and the results."""
        shutil.rmtree(self.root)
        shutil.rmtree(self.results, ignore_errors=True)


# ---- statistics ----------------------------------------------------------------------------------------------
@test("Student's t: quantiles as in the printed tables; intervals")
def _(place):
    for p, df, want in ((0.975, 1, 12.7062047362), (0.975, 4, 2.77644510520), (0.975, 120, 1.97993040505),
                        (0.95, 4, 2.13184678633), (0.995, 4, 4.60409487142), (0.5, 7, 0.0)):
        close(analyse.t_quantile(p, df), want, 1e-9 * max(1.0, want))
        close(analyse.t_cdf(-want, df), 1 - p, 1e-9)
    low, high = analyse.t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    close(low, 3 - 1.9632431614, 1e-9)
    close(high, 3 + 1.9632431614, 1e-9)
    assert analyse.t_interval([1.0]) is analyse.t_interval([]) is None


@test("bootstrap interval equals the brute-force count of all 6^6 resamples")
def _(place):
    values = [-0.4, 0.1, 0.15, 0.7, 2.0, 2.2]
    means = sorted(math.fsum(s) / 6 for s in itertools.product(values, repeat=6))
    k = math.ceil(0.025 * len(means))
    low, high = analyse.bootstrap_interval(values)
    close(low, means[k - 1], 1e-12)
    close(high, means[-k], 1e-12)
    many = [math.sin(i) for i in range(20)]  # too many to count: drawn, the same ones every time
    assert analyse.bootstrap_interval(many) == analyse.bootstrap_interval(many)


@test("sign test, rank correlation and the paper's numbers against what is known of them")
def _(place):
    for pair, want in (((10, 0), 2 / 1024), ((0, 5), 2 / 32), ((4, 1), 12 / 32), ((3, 3), 1.0), ((0, 0), None)):
        assert analyse.sign_test(*pair) == want, pair
    assert analyse.rank_correlation([1, 5, 9], [2, 3, 80]) == 1.0
    close(analyse.rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]), 0.6, 1e-12)  # 1 - 6 * 4 / (4 * 15)
    for paper in analyse.PAPER:
        close(sum(paper["seeds"]) / 5, paper["mean"], 0.0005)
        close(100 * math.expm1(paper["mean"]), paper["perplexity"], 0.02)


@test("a comparison with missing, diverged, tied and one-sided seeds")
def _(place):
    nan = "diverged"
    c = analyse.Comparison({1: 1.0, 2: 2.0, 3: nan, 4: None, 5: 3.0, 6: 1.0, 7: nan, 8: 1.0},
                           {1: 1.5, 2: 1.5, 3: 2.0, 4: 1.0, 5: nan, 6: 1.0, 7: nan})
    assert c.by_seed == {1: -0.5, 2: 0.5, 6: 0.0}, c.by_seed
    assert (c.lower, c.higher, c.ties) == (2, 2, 1), "who diverges loses: %r" % vars(c)
    assert sorted(c.lost) == [(3, "arm"), (4, "missing"), (5, "base"), (7, "both"), (8, "missing")], c.lost
    close(c.mean, 0.0, 1e-15)
    empty = analyse.Comparison({}, {})
    assert (empty.n, empty.mean, empty.t, empty.p, empty.perplexity()) == (0, None, None, None, None)


# ---- study files ---------------------------------------------------------------------------------------------
@test("the project's study files: the paper's pairs and milestones; every flag is one of the trainer's")
def _(place):
    folder = os.path.join(PAIRED, "studies")
    studies = {name[:-5]: Study(os.path.join(folder, name)) for name in os.listdir(folder)}
    assert all(name == study.name for name, study in studies.items()), studies
    for name in ("paper_s", "paper_m"):
        pairs = sorted((run.arch, run.seed) for run in studies[name].runs)
        assert pairs == sorted(itertools.product(("block", "rd"), range(1, 6))), name
        steps = list(studies[name].milestone_steps.values())
        assert steps == [[477, 954, 1908, 3816]], "0.25, 0.5, 1.0, 2.0B tokens"
    if not os.path.exists(TRAINER):
        raise Skip("train_rdattnres_cpu is not built")
    known = subprocess.run([TRAINER, "--help"], stdout=subprocess.PIPE, text=True).stdout.split()
    for name, study in studies.items():
        for flag in {flag for run in study.runs for flag in run.flags}:
            assert "--" + flag.replace("_", "-") in known, "%s: --%s" % (name, flag)


@test("the trainer gets the flags of study and size, arm, seed, folder, environment; --set replaces variables",
      seeds=(3,), env={"A_SETTING": "x"}, variables={"data": "here"},
      sizes={"a": {"flags": {"lr": 0.25, "quiet": True, "train": "{data}/t_*.bin"}}})
def _(place):
    run = place.study().runs[1]
    got = " ".join(command(place.study(), run, "R", True))
    assert got == STUB + (" --layers 3 --steps 20 --batch 4 --context 8 --val-every 5 --checkpoint-every 5"
                          " --block-size 2 --lr 0.25 --quiet --train here/t_*.bin --arch rd --seed 3"
                          " --out R/a-rd-s3 --resume R/a-rd-s3"), got
    assert run.env == {"A_SETTING": "x"}, run.env
    assert Study(place.file, ["data=/there"]).runs[0].flags["train"] == "/there/t_*.bin"
    refused(lambda: Study(place.file, ["dta=/there"]), "--set dta=/there", "data")


@test("bad study files are refused, each with its reason")
def _(place):
    flags, whole = place.entries["flags"], dict(place.entries, colour=None)
    for change, words in (
        ({"colour": 1}, ("unknown entry 'colour'",)),
        ({"trainer": None}, ("entry 'trainer' is missing",)),
        ({"groups": [{"arms": ["blok"], "seeds": [1]}]}, ("unknown arm 'blok'",)),
        ({"sizes": {"a-b": {}}}, ("size 'a-b'",)),
        ({"flags": dict(flags, seed=3)}, ("'seed'", "runner's")),
        ({"flags": dict(flags, train="{nowhere}/x")}, ("variable",)),
        ({"flags": {k: v for k, v in flags.items() if k != "val-every"}}, ("val_every", "needed")),
        ({"milestones": [330]}, ("milestone 330", "step 10")),
        ({"milestones": [900]}, ("milestone 900", "640 tokens")),
    ):
        place.change(**dict(whole, **change))
        refused(place.study, place.file, *words)
    write(place.file, "{")
    refused(place.study, "not JSON")
    os.remove(place.file)
    refused(place.study, "No such file")


@test("a log: cut last line is passed over, junk elsewhere is not, later events replace earlier ones")
def _(place):
    def log(*lines):
        return Log(write(place.path("log.jsonl"), "\n".join(lines)))

    step = '{"event":"step","step":%d,"tokens":1,"loss":%s}'
    config = '{"event":"config","options":{"lr":%g}}'
    got = log(config % 0.1, step % (1, 5), step % (2, 4), step % (2, 3), '{"event":"st')
    assert (got.last_step(), got.steps[2]["loss"], got.diverged_at) == (2, 3, None), vars(got)
    for loss in ("null", "1e999"):
        assert log(step % (1, 5), step % (2, loss)).diverged_at == 2, loss
    refused(lambda: log("{nonsense", step % (1, 5)), ":1:", "not a log event")
    refused(lambda: log(config % 0.1, config % 0.2, ""), "resumed with other settings", "lr 0.1 against 0.2")


@test("byte shards from GPT-2 shards: same documents, end-of-text 256, cut at whole documents, bad files refused")
def _(place):
    def binary(name, header, body):
        with open(place.path(name), "wb") as f:
            f.write(struct.pack("<%dI" % len(header), *header).ljust(1024, b"\0") + body)
        return place.path(name)

    words = [b"a", b"bc", b"\xff", b" def", b""]  # the last is end-of-text
    tokenizer = binary("tokenizer.bin", [20240328, 2, 5, 4], b"".join(bytes([len(w)]) + w for w in words))
    shard = binary("shard.bin", [20240520, 1, 9], struct.pack("<9H", 4, 0, 1, 4, 2, 3, 3, 4, 0))
    bad = binary("bad.bin", [20240520, 1, 1], struct.pack("<H", 5))
    short = binary("short.bin", [20240520, 1, 7], b"xx")

    def convert(shard, *words, **more):
        words = ("--tokenizer", tokenizer, "--out", place.path("bytes"), shard, *words)
        return script("gpt2_to_bytes.py", *words, **more)

    documents = [256, *b"abc", 256, 255, *b" def def", 256, *b"a"]
    for most, kept in ((99, 16), (16, 16), (15, 14), (14, 14), (13, 4), (4, 4)):
        convert(shard, "--max-bytes", str(most))
        with open(place.path("bytes", "shard.bin"), "rb") as f:
            data = f.read()
        assert struct.unpack("<4i", data[:16]) == (20240520, 1, kept, 0), data[:16]
        assert data[1024:] == struct.pack("<%dH" % kept, *documents[:kept]), "%s bytes at most" % most
    has(convert(bad, status=1), "token 5, but the tokenizer has 5")
    has(convert(short, status=1), "header")
    assert not os.path.exists(place.path("bytes", "short.bin"))


# ---- which runs may be compared ------------------------------------------------------------------------------
@test("pairs that differ in anything but the arm are refused, known setting or not")
def _(place):
    base = {"arch": "block", "seed": 1, "lr": 0.01, "steps": 20, "train": "x", "out": "a", "something_new": 1}

    def compare(*row, loss=5.001, **change):
        check_comparable([("one", 1, "a", base, 5.0),
                          ("two", 1, "a", dict(base, arch="rd", out="b", **change), loss), *row])

    compare(lr="0.0100")  # the same number, written another way
    for name, value in (("lr", 0.02), ("train", "y"), ("something_new", 2), ("total_batch", 64)):
        refused(lambda: compare(**{name: value}), "one and two", name, json.dumps(value))
    refused(lambda: compare(loss=5.006), "first losses", "batch")
    compare(("three", 2, "a", dict(base, seed=2), 5.3))
    other = dict(base, seed=2, lr=0.02)
    refused(lambda: compare(("three", 2, "a", other, 5.3)), "one and three", "lr")
    compare(("four", 2, "b", other, 5.3))  # another size


@test("runner and analysis refuse runs that do not fit each other or the study; fewer steps are not all steps")
def _(place):
    has(place.run(status=1, STUB_LR="rd-s1"), "a-rd-s1: made with --lr 0.5", "0.01")
    assert not os.path.exists(place.log("a-block-s2")), "no further run was started"
    place.wipe()
    place.run()
    log = place.log("a-rd-s1")
    whole = read(log)

    def both_refuse(*words):
        has(place.run(status=1), *words)
        has(place.analyse(status=1), *words)
        write(log, whole)

    edit(log, '"options": {', '"options": {"data_order": "backwards", ')
    both_refuse("a-block-s1 and a-rd-s1 must not be compared", "data_order")
    edit(log, '.*"val", "step": 10,.*\n', "")
    both_refuse("without the validation at step 10")
    place.change(flags=dict(place.entries["flags"], lr=0.02))
    both_refuse("made with --lr 0.01", "0.02")
    edit(log, '"done", "step": 20', '"done", "step": 19')
    assert state_of(place.study().runs[1], place.root)[0] == "interrupted"


@test("a pair made by two programs is refused; pairs of different seeds may have different ones")
def _(place):
    place.run("--only=-s1")
    place.run("--only=-s2", "--trainer", write(place.path("other.py"), read(STUB) + "# rebuilt\n"))
    place.report()
    launches = os.path.join(place.root, "runner", "a-rd-s2.launches.jsonl")
    for history, want in (("A0 B10", "A+B"), ("A0 B0", "B"), ("A0 B10 A10", "A")):  # who started at which step
        lines = [json.dumps({"from": int(launch[1:]), "trainer": launch[0]}) for launch in history.split()]
        write(launches, "\n".join(lines) + "\n")
        got = state_of(place.study().runs[3], place.root)[1].config["trainer"]
        assert got == want, (history, got)
    has(place.run(status=1), "a-block-s2 and a-rd-s2 must not be compared", "trainer")


# ---- the runner ----------------------------------------------------------------------------------------------
@test("a study runs in the order of its file; finished runs are skipped the next time",
      groups=[{"arms": ["rd", "block"], "seeds": [2, 1]}, {"arms": ["tied"], "seeds": [1]}])
def _(place):
    got = launched(place.run())
    assert got == ["a-rd-s2", "a-block-s2", "a-rd-s1", "a-block-s1", "a-tied-s1"], got
    text = place.run()
    assert text.count("finished") == 5 and not launched(text) and len(place.attempts("a-rd-s1")) == 1, text
    assert place.run("--list").count("finished    step 20 of 20") == 5


@test("one run per GPU at a time, all of them used, with the threads asked for", seeds=(1, 2, 3))
def _(place):
    trainer = write(place.path("trainer.sh"), """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS" >> "$0.seen"
mkdir "$0.$CUDA_VISIBLE_DEVICES" && "%s" "$@" && rmdir "$0.$CUDA_VISIBLE_DEVICES"
""" % STUB)
    place.run("--gpus", "3,5", "--threads", "2", "--trainer", trainer, STUB_MS="5")
    seen = read(trainer + ".seen").splitlines()
    assert set(seen) == {"3 2", "5 2"} and len(seen) == 6, seen
    assert place.attempts("a-rd-s1")[0]["gpu"] in ("3", "5"), "GPU is on record"


@test("a killed trainer is resumed from its checkpoint, if it has one; its log is that of a run never killed",
      seeds=(1,))
def _(place):
    def attempts():
        return [(a["from"], a["reached"], a["status"]) for a in place.attempts("a-rd-s1")]

    text = place.run(STUB_KILL="rd-s1@13")
    has(text, "FAILED: trainer ended with status -9 after step 12", "resumed after step 10")
    assert attempts() == [(0, 12, -9), (10, 20, 0)], attempts()
    broken = read(place.log("a-rd-s1")).splitlines()
    place.wipe()
    place.run(STUB_KILL="rd-s1@3")
    assert attempts() == [(0, 2, -9), (0, 20, 0)], attempts()
    whole = read(place.log("a-rd-s1")).splitlines()
    assert [line for line in broken if '"config"' in line] == [whole[0]] * 2, "the settings, once for each launch"
    assert [line for line in broken if '"config"' not in line] == whole[1:], broken


@test("failures that stop a study: after how many attempts, and with the trainer's own words")
def _(place):
    same = 'STUB_FAIL=block-s1@13 exec "%s" "$@"' % STUB
    later = 'touch "$0.$$"; STUB_FAIL="block-s1@$((1 + $(ls "$0".* | wc -l)))" exec "%s" "$@"' % STUB
    for name, trainer, attempts, said in (
        ("same", same, 2, "failed again at the same step (trainer ended with status 1 after step 12)"),
        ("later", later, 3, "failed 3 times without reaching a new checkpoint"),
        ("flags", "echo error: told to fail >&2; exit 2", 1, "failed because of its flags"),
    ):
        place.root = place.path("runs " + name)
        text = place.run("--trainer", write(place.path(name + ".sh"), "#!/bin/sh\n" + trainer + "\n"), status=1)
        has(text, said, "it said: error: told to fail")
        assert len(place.attempts("a-block-s1")) == attempts, text
        assert launched(text)[-1] == "a-block-s1", "no further run was started: " + text
    text = place.run("--trainer", "/nowhere/train", status=1)
    assert "cannot start the trainer /nowhere/train" in text and "Traceback" not in text, text


@test("after a failure: a restart tries once more, --keep-going does the other runs, a mended trainer all")
def _(place):
    for words, attempts, states in (
        ([], 2, ["finished", "interrupted", "missing", "missing"]),
        ([], 3, ["finished", "interrupted", "missing", "missing"]),
        (["--keep-going"], 4, ["finished", "interrupted", "finished", "finished"]),
    ):
        text = place.run(*words, status=1, STUB_FAIL="rd-s1@13")
        assert len(place.attempts("a-rd-s1")) == attempts, text
        assert [state_of(r, place.root)[0] for r in place.study().runs] == states, text
    has(text, "given up")
    place.run()


@test("when one run stops the study, the others running beside it are saved and ended", seeds=(1,))
def _(place):
    text = place.run("--jobs", "2", status=1, STUB_FAIL="block-s1@3", STUB_MS="150")
    (attempt,) = place.attempts("a-rd-s1")
    assert (attempt["interrupted"], attempt["status"], attempt["reached"] < 20) == (True, 0, True), text
    assert checkpoints(place.root + "/a-rd-s1")[-1][5:13] == "%08d" % attempt["reached"], "it saved"


@test("SIGTERM or Ctrl-C to the runner: the trainers save, the next start goes on; two end them at once")
def _(place):
    def ctrl_c(process):  # as a terminal does: to everyone in the foreground
        os.killpg(process.pid, signal.SIGINT)

    for send in (subprocess.Popen.terminate, ctrl_c):
        process = place.start("--jobs", "2", STUB_MS="50")
        wait_for('"step": 3', place.log("a-block-s1"))
        send(process)
        text = process.communicate(timeout=20)[0]
        (attempt,) = place.attempts("a-block-s1")
        assert (process.returncode, attempt["status"], attempt["interrupted"]) == (130, 0, True), text
        assert checkpoints(place.root + "/a-block-s1")[-1][5:13] == "%08d" % attempt["reached"], text
        text = place.run()
        assert "resumed after step %d" % attempt["reached"] in text and "FAILED" not in text, text
        place.wipe()
    process = place.start("--jobs", "2", STUB_MS="30000")
    wait_for('"val"', place.log("a-block-s1"))
    process.terminate()
    time.sleep(1)
    process.terminate()
    process.communicate(timeout=20)
    assert (process.returncode, place.attempts("a-block-s1")[0]["status"]) == (130, 130)


@test("a run that another runner holds is left alone until it is free", seeds=(1,))
def _(place):
    with open(write(os.path.join(place.root, "runner", "a-block-s1.lock"), ""), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = place.start()
        wait_for('"done"', place.log("a-rd-s1"))
        assert not os.path.exists(place.log("a-block-s1")) and process.poll() is None, "still waiting"
    assert launched(process.communicate(timeout=20)[0]) == ["a-rd-s1", "a-block-s1"]


@test("a study killed with a trainer and started again gives the same files; a trainer left behind is waited for")
def _(place):
    def files():
        names = sorted(os.listdir(os.path.join(place.results, "summaries")))
        return [place.report(), *(read(place.results, "summaries", name) for name in names)]

    place.run()
    place.report()
    whole = files()
    place.wipe()
    process = place.start("--jobs", "2", STUB_MS="100", STUB_KILL="rd-s1@7")
    wait_for("", place.root, "a-rd-s1.killed")
    process.kill()
    process.communicate()
    text = place.run()
    assert sorted(launched(text)) == ["a-block-s2", "a-rd-s1", "a-rd-s2"], "a-block-s1 ended by itself: " + text
    has(text, "resumed after step 5")
    assert "FAILED" not in text, text
    place.report()
    assert files() == whole, "report and summaries"


@test("--results: runs summarised elsewhere as finished are not run again, and are checked too", seeds=(1,))
def _(place):
    place.run("--only", "block")
    place.report()
    shutil.rmtree(place.root)
    has(place.run("--results", place.results), "finished, kept in")
    assert not os.path.exists(place.log("a-block-s1")), "block did not run again"
    has(place.report(), "| size a | 640 | 1 |")
    edit(place.summary("a-block-s1"), '"config": {', '"config": {"data_order": "backwards", ')
    has(place.run("--results", place.results, status=1), "must not be compared")


# ---- Slurm ---------------------------------------------------------------------------------------------------
@test("--slurm writes a job array that a scheduler can read: one task a run, finished runs left out",
      slurm=["--gpus=1", "--time=01:00:00"])
def _(place):
    place.run("--only", "a-rd-s1")
    job = place.path("job.sh")
    place.run("--slurm", job, "--sbatch=--partition=long", "--threads", "4")
    text = read(job)
    head = re.match("#!/bin/bash\n(#.*\n|\n)*", text).group()  # sbatch ignores options after the first command
    has(head, "--array=0,2-3\n", "--gpus=1\n", "--time=01:00:00\n", "--partition=long\n", "--signal=B:TERM@120 ",
        "--requeue\n", "#SBATCH --output=" + place.root)
    assert text.count("#SBATCH") == head.count("#SBATCH"), text
    has(text, '--task "$SLURM_ARRAY_TASK_ID"', "--threads 4")
    assert "a-rd-s1" not in text, "finished run is not listed"


@test("a Slurm array carries out the study; a task stopped before its limit saves, queues itself again, goes on")
def _(place):
    write(place.path("bin", "sbatch"), '#!/bin/sh\necho "submitted $1"\n')
    write(place.path("bin", "scontrol"), '#!/bin/sh\necho "$@" > "%s"\n' % place.path("requeued"))
    path = place.path("bin") + os.pathsep + os.environ["PATH"]
    job = place.path("job.sh")
    has(place.run("--slurm", job, "--submit", PATH=path), "submitted " + job)

    def start(task, ms):
        env = dict(os.environ, SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_JOB_ID="77", STUB_MS=ms, PATH=path)
        return subprocess.Popen(["bash", job], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    process = start(1, "50")
    wait_for('"step": 3', place.log("a-rd-s1"))
    process.terminate()  # as --signal=B:TERM does: to the batch shell alone
    assert (process.wait(20), read(place.path("requeued"))) == (130, "requeue 77_1\n")
    assert [start(task, "0").wait(20) for task in range(4)] == [0] * 4
    first, second = place.attempts("a-rd-s1")
    assert (second["from"], second["reached"]) == (first["reached"], 20), (first, second)
    by_array = place.report()
    assert place.run("--slurm", job) == "nothing to do: every run is finished\n"
    place.wipe()
    place.run()
    assert place.report() == by_array


# ---- the report ----------------------------------------------------------------------------------------------
@test("report of a complete study: the known numbers; the same text from the summaries alone; no path is kept",
      groups=[{"arms": ["block", "rd"], "seeds": [1, 2, 3, 4, 5]},
              {"arms": ["residual", "tied", "average", "frozen-v"], "seeds": [1, 2, 3]}])
def _(place):
    place.change(flags=dict(place.entries["flags"], test="held_out", train=place.path("secret", "t.bin")))
    place.run("--jobs", "2")
    text = place.report()
    # differences are -0.032 ... -0.028: standard deviation 0.0015811, half width 2.7764 * 0.0015811 / sqrt(5)
    has(
        text,
        "| size a | 640 | 5 | −0.0300 | −0.0320 to −0.0280 | −0.0312 to −0.0288 | 5 : 0 | 0.0625 | −2.96% |",
        "| size a | 320 | 5 | −0.0150 | −0.0160 to −0.0140 | −0.0156 to −0.0144 | 5 : 0 | 0.0625 | −1.49% |",
        "| paper, S (119.8M) | 2B | 5 | −0.0301 |",
        "| paper, M (343.0M) | 2B | −0.0120 | −0.0181 | −0.0211 | −0.0293 | −0.0430 |",
        "rd is better, beyond the spread of the seeds",
        "10 of 10 pairs lower: sign test p = 0.00195",
        "All runs are finished; none was left out.",
        "| size a | 5 | 0.1333 | 0.2000 | 0.1924 | 0.2885 |",
        "| block 2 | 0.500 | 0.200 | −0.300 |",
        "V +1.00 (+1.00 to +1.00), V − QK +1.00 (+1.00 to +1.00).",
        "is 0 in all 3 pairs",  # tied computes what block computes
    )
    arms = text.split("## Every arm")[1].splitlines()
    rows = {line.split(" | ")[0][2:]: line for line in arms if line.startswith("| ")}
    for arm, mean, signs, p in (("residual", "+0.0200", "0 : 3", "0.25"), ("tied", "0.0000", "0 : 0", "–"),
                                ("average", "−0.0040", "3 : 0", "0.25"), ("frozen-v", "+0.0100", "0 : 3", "0.25")):
        has(rows[arm], " | 3 | 3 | %s | " % mean, " | %s | %s | " % (signs, p))
    has(rows["average"], "−0.0270 (−0.0295 to −0.0245)")  # rd minus average
    has(read(place.results, "speed.md"), "| rd | 5 | 900 | 0.900 |", "| residual | 3 | 1100 | 1.100 |")

    assert place.report_from_summaries() == text
    for run in place.study().runs:
        assert place.folder not in read(place.summary(run.name)), run.name + " holds a path"
    edit(place.summary("a-tied-s1"), r'"val": \[\[0, 0, ', r"\g<0>1")
    has(place.report_from_summaries(), "**`tied` differs from `block`")


@test("the results that the repository holds: every study's report is what its summaries give")
def _(place):
    for name in os.listdir(os.path.join(PAIRED, "results")):
        held = os.path.join(PAIRED, "results", name)
        place.results = place.path(name)
        shutil.copytree(held, place.results)
        assert place.report_from_summaries() == read(held, "report.md"), name
        carried_out = json.loads(read(held, "study.json"))
        assert carried_out == json.loads(read(PAIRED, "studies", name + ".json")), name


@test("missing, interrupted and diverged runs are named, and pairs are formed only where both are there",
      seeds=(1, 2, 3, 4, 5))
def _(place):
    place.run("--only=-s1")
    place.run("--only=-s2")
    place.run("--only=-s3", status=1, STUB_FAIL="rd-s3@13")  # reaches the first milestone only
    place.run("--only=-s4", status=1, STUB_NAN="rd-s4@8")
    has(
        place.report(),
        "| size a | rd | 5 | 2 | 1 | 1 | 1 |",
        "| size a | block | 5 | 4 | 0 | 0 | 1 |",
        "- `a-rd-s3`: interrupted at step 12",
        "- `a-rd-s4`: diverged at step 8",
        "- `a-rd-s5`: missing",
        "The study is not complete",
        "| size a | 320 | 3 | −0.0155 |",
        "| 3 : 1 | 0.625 |",  # three differences; the diverged pair counts as lost
        "| size a | 640 | 2 | −0.0315 |",
        "| 2 : 1 | 1 |",
        "| size a | 640 | −0.0320 | −0.0310 | missing | rd diverged | missing |",
    )
    place.run()  # what was missing is made up for
    whole = place.report()
    has(whole, "All runs are finished")
    shutil.rmtree(place.root)
    place.run("--only", "rd-s1", status=1, STUB_FAIL="rd-s1@13")
    assert place.report() == whole, "an unfinished run does not replace a finished summary"


# ---- pictures ------------------------------------------------------------------------------------------------
def draw(place, *words):
    """{name: content} of the pictures; none may be drawn with a warning."""
    need("matplotlib")
    text = script("plot.py", "--results", place.results, *words)
    assert "Warning" not in text, text
    folder, found = os.path.join(place.results, "pictures"), {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as f:
            found[name] = f.read()
    return found


@test("pictures: PNG and SVG of everything, the same files from the same summaries",
      groups=[{"arms": ["residual", "block", "rd"], "seeds": [1, 2]},
              {"arms": ["tied", "average", "frozen-v"], "seeds": [1]}])
def _(place):
    place.run("--jobs", "2")
    place.report()
    files = draw(place, "--beside", place.results)
    names = ("beside_made_up", "loss", "pairs", "gap", "routes_a", "js")
    assert set(files) == {n + e for n in names for e in (".png", ".svg")}, set(files)
    for name, data in files.items():
        assert data.startswith(b"\x89PNG") if name.endswith("png") else b"</svg>" in data, name
        assert len(data) > 5000, name + " is empty"
    has(files["loss.svg"].decode(), *(">%s<" % arm for arm in analyse.ARMS))
    has(files["routes_a.svg"].decode(), "embedding", "block 1", "QK route", "V route")
    again = draw(place, "--beside", place.results)
    assert [n for n in files if files[n] != again[n]] == [], "the second time differs"


@test("report and pictures of a study with nothing, one run, or one pair in it", seeds=(1,))
def _(place):
    os.makedirs(place.root)
    has(place.report(), "no complete pair yet")
    draw(place)
    place.run("--only", "block")
    place.report()
    draw(place)
    place.run()
    has(place.report(), "one pair only (−0.0320 nats): no interval, no conclusion")
    draw(place)


@test("plot.py without matplotlib: says so; --if-possible makes it no error")
def _(place):
    write(place.path("matplotlib", "__init__.py"), "raise ImportError('none')\n")
    for words, status in (((), 1), (("--if-possible",), 0)):
        got = script("plot.py", "--results", place.folder, *words, status=status, PYTHONPATH=place.folder)
        assert got == "no pictures: matplotlib is not installed\n", got


# ---- with PyTorch --------------------------------------------------------------------------------------------
@test("hide.py hides one source from one route: the softmax over the others; bad runs are one line")
def _(place):
    need("torch", "safetensors")
    import hide
    import rdattnres
    import torch
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
    said = script("hide.py", "shard.bin", place.folder, status=1)
    assert said == "error: %s: no checkpoint\n" % place.folder, said


THEIR_READS = """
import torch
def naive_attnres(query, residuals, rms_weight, rms_eps):
    v = torch.stack(list(residuals)).float()
    k = v / (v.square().mean(-1, keepdim=True) + rms_eps).sqrt() * rms_weight.float()
    p = torch.softmax((k * query.float()).sum(-1) + %s, 0)
    return (p[..., None] * v).sum(0).to(residuals[0].dtype)
"""


@test("agreement.py: others' code agrees, and does not with a bias towards one source")
def _(place):
    need("torch", "safetensors")
    for bias, status in (("0", 0), ("0.01 * torch.arange(len(v))[:, None, None]", 1)):
        write(place.path("fla/ops/attnres/naive.py"), THEIR_READS % bias)
        said = script("agreement.py", "fla", place.folder, status=status)
        assert said.count("differ by") == 2, said


# ---- with the real trainer -----------------------------------------------------------------------------------
# The third launch is killed as soon as it has a checkpoint.
KILLER = """#!/bin/bash
echo >> "%(folder)s/launches"
if [ "$(wc -l < "%(folder)s/launches")" -eq 3 ]; then
  "%(trainer)s" "$@" &
  while kill -0 $! 2>/dev/null; do
    ls "%(folder)s"/runs/*-rd-s1/ckpt_*4.safetensors 2>/dev/null && kill -9 $!
  done
  wait $!; exit 1
fi
exec "%(trainer)s" "$@"
"""


@test("three runs of the smoke study with the real CPU trainer, left alone and killed: the same report")
def _(place):
    if not os.path.exists(TRAINER):
        raise Skip("train_rdattnres_cpu is not built")
    place.change(**json.loads(read(PAIRED, "studies", "smoke.json")))
    place.change(groups=[{"sizes": ["w16"], "arms": ["block", "tied", "rd"], "seeds": [1]}])
    place.run("--trainer", TRAINER, OMP_NUM_THREADS="1")
    whole = place.report()
    has(whole, "All runs are finished", "is 0 in all")
    place.wipe()
    killer = write(place.path("trainer.sh"), KILLER % {"folder": place.folder, "trainer": TRAINER})
    has(place.run("--trainer", killer, OMP_NUM_THREADS="1"), "FAILED")
    assert place.report() == whole


if __name__ == "__main__":
    chosen = [t for t in TESTS if len(sys.argv) < 2 or any(word in t[0] for word in sys.argv[1:])]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # they mostly wait for processes
        for text, result in [(text, pool.submit(run)) for text, run in chosen]:
            with case(text):
                result.result()
    finish()
