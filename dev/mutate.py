#!/usr/bin/env python3
"""mutate.py - do the tests notice? Puts small faults into copies of the source, one by one, and runs the tests.

    python3 dev/mutate.py                   all faults of dev/mutants.txt, two at a time
    python3 dev/mutate.py --only route      those whose file or description holds the word
    python3 dev/mutate.py --list            what there is, and whether each text is still in its file

A fault is killed when a test fails, crashes or runs five times longer than usual. One that is not killed shows
a test that is missing; then the exit status is 1. A fault whose text is no longer in its file, or that does not
compile, is an error: correct the entry. The working tree is not touched. Needs make and what the tests need.
Better not run as root: a program with a fault in it may write where it should not.
"""
import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MUTANTS = os.path.join(ROOT, "dev", "mutants.txt")
MINIMUM_LIMIT = 30  # seconds, however short a test usually is
BARRIER = r"__sync(threads|warp)\(\);"

# What a test runs besides itself.
PROGRAMS = {"run": ["train_rdattnres_cpu"], "terminal": ["train_rdattnres_cpu"], "crash": ["train_rdattnres_cpu"],
            "cuda_run": ["build/train_emulated", "build/test_run", "train_rdattnres_cpu"],
            "cuda_crash": ["build/train_emulated", "build/test_crash"], "cuda_card": ["build/train_emulated"],
            "ranks": ["train_rdattnres_cpu", "build/train_rdattnres_cpu_mpi", "build/train_emulated",
                      "build/train_emulated_mpi"],
            "data_tools": ["data/text_to_shards"]}

# line: where it stands in mutants.txt. A fault changes a text of the file, or leaves out the barrier `without`.
Fault = namedtuple("Fault", "line what file tests old new without")


def read_faults():
    faults, block = [], []
    with open(MUTANTS) as f:
        lines = f.read().split("\n") + [""]
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            block.append(line)
        elif block:
            faults += parse(block, number - len(block))
            block = []
    return faults


def parse(block, line):
    """The faults of one entry; the head of mutants.txt says what an entry is."""
    old = [text[2:] for text in block[2:] if text[:2] == "- "]
    new = [text[2:] for text in block[2:] if text[:2] == "+ "]
    file, colon, tests = block[1].strip().partition(": ") if len(block) > 1 else ("", "", "")
    if colon and block[2:] == ["* barriers"]:
        lines = [n for n, text in enumerate(source_of(file).split("\n"), 1) if re.search(BARRIER, text)]
        return [Fault(line, "%s, line %d" % (block[0], n), file, tests.split(), "", "", "%s:%d" % (file, n))
                for n in lines]
    if not colon or not old or len(block) != 2 + len(old) + len(new):
        sys.exit("error: dev/mutants.txt:%d: \"%s\" is no fault; see the head of the file" % (line, block[0]))
    return [Fault(line, block[0], file, tests.split(), "\n".join(old), "\n".join(new), "")]


class Tree:
    """A copy of what the tests are made from, for one worker."""

    def __init__(self, folder, compiler_flags):
        self.folder = folder
        self.flags = compiler_flags
        self.running = None
        for name in ("Makefile", "train_rdattnres_cpu.cpp", "train_rdattnres.cu"):
            shutil.copy(os.path.join(ROOT, name), folder)
        for name in ("dev/common", "dev/cpu", "dev/emulator", "data", "tests"):
            shutil.copytree(os.path.join(ROOT, name), os.path.join(folder, name),
                            ignore=shutil.ignore_patterns("__pycache__", "*.bin"))

    def path(self, name):
        return os.path.join(self.folder, name)

    def build(self, test):
        """None, or what the compiler said."""
        targets = PROGRAMS.get(test, []) + ([] if script_of(test) else ["build/test_" + test])
        result = subprocess.run(["make", "-s", "CXXFLAGS=" + self.flags] + targets, cwd=self.folder,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
        return None if result.returncode == 0 else result.stdout

    def run(self, test, limit, without=""):
        """Stops at the first failure. Returns ("passed" or why not, seconds)."""
        start = time.time()
        environment = dict(os.environ, OMP_WAIT_POLICY="passive", EMU_WITHOUT=os.path.basename(without))
        command = script_of(test) or ["build/test_" + test]
        process = subprocess.Popen(command, cwd=self.folder, env=environment,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True,
                                   errors="replace", start_new_session=True)
        self.running = process
        late = []
        timer = threading.Timer(limit, lambda: (late.append(True), self.stop()))
        timer.start()
        outcome = None
        last = ""
        for line in process.stdout:
            last = line.strip() or last
            if line.startswith("FAIL "):
                outcome = line[5:80].split(": tests/")[0].strip()
                self.stop()
                break
        process.stdout.close()
        status = process.wait()
        timer.cancel()
        if outcome is None:
            if late:
                outcome = "took more than %d s" % limit
            elif status != 0:
                outcome = "ended with status %d: %s" % (status, last[:60])
            else:
                outcome = "passed"
        return outcome, time.time() - start

    def stop(self):
        try:
            os.killpg(self.running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def script_of(test):
    """The command of a test that is a script; None of one that is compiled."""
    for interpreter, ending in ((sys.executable, "py"), ("bash", "sh")):
        script = "tests/test_%s.%s" % (test, ending)
        if os.path.exists(os.path.join(ROOT, script)):
            return [interpreter, script]
    return None


def source_of_test(test):
    if script_of(test):
        return script_of(test)[1]
    stem, _, build = test.rpartition("_")
    if build in ("fast", "race") or (build == "asan" and stem.startswith(("cuda", "emulator"))):
        return "tests/test_%s.cu" % stem  # CUDA code in one of the emulator's builds
    return "tests/test_%s.cpp" % (stem if build in ("asan", "tsan") else test)


def source_of(file):
    with open(os.path.join(ROOT, file)) as f:
        return f.read()


def broken_entries(faults):
    """Entries that no longer fit the source, each with its reason."""
    broken = []
    for f in faults:
        found = 1 if f.without else source_of(f.file).count(f.old)
        missing = [t for t in f.tests if not os.path.exists(os.path.join(ROOT, source_of_test(t)))]
        if found != 1:
            broken.append((f, "its text is in the file %d times, expected once" % found))
        elif f.old == f.new and not f.without:
            broken.append((f, "it changes nothing"))
        elif missing:
            broken.append((f, "there is no %s" % source_of_test(missing[0])))
    return broken


def try_fault(tree, f, usual):
    """(verdict, by whom): killed, survived, or error."""
    if f.without:
        return judge(tree, f, usual)
    with open(tree.path(f.file)) as source:  # the copy: the working tree may have moved on
        original = source.read()
    if original.count(f.old) != 1:
        return "error", "its text is not in the copy of the file"
    try:
        with open(tree.path(f.file), "w") as out:
            out.write(original.replace(f.old, f.new))
        return judge(tree, f, usual)
    finally:
        with open(tree.path(f.file), "w") as out:
            out.write(original)


def judge(tree, f, usual):
    for test in f.tests:
        said = tree.build(test)
        if said is not None:
            errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()[-1:]
            return "error", "does not compile: " + errors[0][:150]
        outcome, _ = tree.run(test, max(5 * usual[test], MINIMUM_LIMIT), f.without)
        if outcome != "passed":
            return "killed", "%s: %s" % (test, outcome)
    return "survived", ", ".join(f.tests)


def main():
    parser = argparse.ArgumentParser(description="puts faults into the source and names those no test notices")
    parser.add_argument("--only", default="", help="only faults whose file or description holds this text")
    parser.add_argument("--first", type=int, default=1, help="number of the first fault to try (default 1)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--flags", default="-O1", help="compiler flags (default -O1)")
    parser.add_argument("--list", action="store_true", help="print the faults and whether they fit the source")
    arguments = parser.parse_args()
    wanted = arguments.only.lower()
    faults = [f for f in read_faults() if wanted in (f.file + " " + f.what).lower()]
    if platform.machine() != "x86_64":
        print("note: faults in CUDA code are left out: the emulator needs an x86-64 processor")
        faults = [f for f in faults if not f.file.endswith(".cu")]
    if not faults:
        sys.exit("error: no fault holds the text '%s'" % arguments.only)
    if arguments.list:
        for f in faults:
            print("%-26s %s" % (os.path.basename(f.file), f.what))
    broken = broken_entries(faults)
    for f, why in broken:
        print("error: dev/mutants.txt:%d: \"%s\" in %s: %s" % (f.line, f.what, f.file, why))
    if broken:
        sys.exit("error: %d of %d faults do not fit the source" % (len(broken), len(faults)))
    if arguments.list:
        return

    start = time.time()
    counts = {"killed": 0, "survived": 0, "error": 0}
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="mutate") as folder:
        trees = []
        for job in range(max(1, arguments.jobs)):
            os.mkdir(os.path.join(folder, str(job)))
            trees.append(Tree(os.path.join(folder, str(job)), arguments.flags))

        # Without a fault every test must pass; how long each takes sets its limit.
        usual = {}
        for test in sorted({t for f in faults[arguments.first - 1:] for t in f.tests}):
            said = trees[0].build(test)
            outcome, usual[test] = trees[0].run(test, 900) if said is None else ("does not compile\n" + said, 0)
            print("without a fault: %-16s %s, %.1f s" % (test, outcome, usual[test]), flush=True)
            if outcome != "passed":
                sys.exit("error: test_%s fails without a fault; mend that first" % test)

        queue = list(enumerate(faults, 1))[arguments.first - 1:]

        def work(tree):
            while True:
                with lock:
                    if not queue:
                        return
                    number, f = queue.pop(0)
                verdict, by = try_fault(tree, f, usual)
                with lock:
                    counts[verdict] += 1
                    print("%-8s %3d/%d  %s: %s\n%20s%s" % (
                        verdict if verdict == "killed" else verdict.upper(), number, len(faults),
                        os.path.basename(f.file), f.what, "", by), flush=True)

        workers = [threading.Thread(target=work, args=(tree,), daemon=True) for tree in trees]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            queue.clear()
            for tree in trees:
                if tree.running:
                    tree.stop()
    print("%d faults in %.0f s: %d killed, %d survived, %d errors" % (
        sum(counts.values()), time.time() - start, counts["killed"], counts["survived"], counts["error"]))
    sys.exit(1 if counts["survived"] or counts["error"] else 0)


if __name__ == "__main__":
    main()
