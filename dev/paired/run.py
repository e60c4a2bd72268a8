#!/usr/bin/env python3
"""run.py - carries out a study: every arm with every seed, finished runs skipped, interrupted ones resumed.

    python3 dev/paired/run.py STUDY                     one run after another
    python3 dev/paired/run.py STUDY --jobs 2            two at a time
    python3 dev/paired/run.py STUDY --gpus 0,1,2,3      one per GPU
    python3 dev/paired/run.py STUDY --slurm FILE        writes a job array instead, one run a task
    python3 dev/paired/run.py STUDY --list              the state of every run

It may be stopped (Ctrl-C, a time limit, a crash) and started again at any moment. A trainer that fails is
resumed from its last checkpoint; if it fails again at the same step the study stops, because the same failure
would come again and again (--keep-going: that run is given up and the others go on). Before anything is
launched, and after every run, the logs are checked: runs that differ in more than the arm must not be paired,
so the study stops.

A run's folder belongs to the trainer. What the runner knows lies beside it, in <root>/runner: the trainer's
output (<run>.txt), a line for each launch and each end (<run>.launches.jsonl, <run>.attempts.jsonl), and the
lock that keeps two runners off one run.

Exit status: 0 all runs finished, 1 something failed, 2 wrong usage, 130 interrupted. Standard library only.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

from study import (Log, Study, StudyError, check_against_study, check_comparable, checkpoints, command,
                   read_notes, read_summaries, state_of, without_folders)

ATTEMPTS_WITHOUT_PROGRESS = 3  # a run that dies at changing steps but reaches no new checkpoint is stuck too


class Stop(Exception):
    """The study must stop; the message says why."""


class Runner:
    def __init__(self, study, root, options):
        self.study, self.root, self.options = study, root, options
        self.notes = os.path.join(root, "runner")
        self.interrupted = False
        self.active = []  # Attempt objects
        self.gave_up = set()
        self.kept = read_summaries(options.results) if options.results else {}

    # ---- what is there ---------------------------------------------------------------------------------------
    def state(self, run):
        """State and log; a run made with other flags than the study's is an error, not a state."""
        state, log = state_of(run, self.root)
        if state == "missing" and self.kept.get(run.name, {}).get("state") == "finished":
            check_against_study(run, self.kept[run.name]["config"], "%s: %s" % (self.options.results, run.name))
            return "finished", log
        if log.config is not None:
            check_against_study(run, log.config, run.folder(self.root))
        return state, log

    def check_pairs(self):
        rows = []
        for run in self.study.runs:
            state, log = self.state(run)
            if log.config is None and state == "finished":
                config, first = self.kept[run.name]["config"], self.kept[run.name]["first_loss"]
            else:
                config, first = log.config, log.first_loss()
            if config is not None and self.kept:
                config = without_folders(config)
            rows.append((run.name, run.seed, run.size, config, first))
        check_comparable(rows)

    def note(self, run, kind):
        return os.path.join(self.notes, "%s.%s" % (run.name, kind))

    # ---- running ---------------------------------------------------------------------------------------------
    def go(self, runs):
        """Carries out the given runs; returns the exit status."""
        os.makedirs(self.notes, exist_ok=True)
        self.check_pairs()
        waiting = list(runs)
        slots = list(self.options.gpus) if self.options.gpus else [None] * self.options.jobs
        try:
            while (waiting or self.active) and not self.interrupted:
                busy = []  # held by another runner: look again later
                while waiting and slots and not self.interrupted:
                    run = waiting.pop(0)
                    lock = self.lock(run)
                    if lock is None:
                        busy.append(run)
                        continue
                    state, log = self.state(run)
                    if state == "finished":
                        self.say(run, "finished" if log.done else "finished, kept in %s" % self.options.results)
                        os.close(lock)
                        continue
                    self.active.append(Attempt(self, run, lock, slots.pop(0)))
                waiting += busy
                for attempt in list(self.active):
                    if attempt.ended():
                        self.active.remove(attempt)
                        slots.append(attempt.slot)
                        if self.judge(attempt):
                            waiting.insert(0, attempt.run)
                        self.check_pairs()
                time.sleep(0.02 if self.active else 0.5 if waiting else 0)
        except (Stop, StudyError) as e:
            self.stop_all()
            raise Stop(str(e))
        self.stop_all()
        if self.interrupted:
            print("interrupted; the same command goes on from here", flush=True)
            return 130
        return 1 if self.gave_up else 0

    def judge(self, attempt):
        """Decides what an ended attempt means; True if the run must be tried again."""
        run, record = attempt.run, attempt.record
        state, log = self.state(run)
        if state == "finished":
            self.say(run, "finished: %d steps in %.0f s" % (log.done["step"], record["seconds"]))
            return False
        if self.interrupted:
            return False
        before = read_notes(self.root, run, "attempts")[:-1]
        if state == "diverged":
            reason = "stopped being a number at step %d" % log.diverged_at
        else:
            reason = "trainer ended with status %d after step %d" % (record["status"], record["reached"])
        repeated = bool(before) and not before[-1]["interrupted"] and before[-1]["reached"] == record["reached"]
        recent = [a for a in before + [record] if not a["interrupted"]][-ATTEMPTS_WITHOUT_PROGRESS:]
        stuck = len(recent) == ATTEMPTS_WITHOUT_PROGRESS and len({a["from"] for a in recent}) == 1
        self.say(run, "FAILED: %s; it said: %s" % (reason, record["message"] or "nothing"))
        if record["status"] == 2:
            how = "because of its flags"
        elif repeated:
            how = "again at the same step"
        elif stuck:
            how = "%d times without reaching a new checkpoint" % ATTEMPTS_WITHOUT_PROGRESS
        else:
            return True
        message = "%s failed %s (%s); see %s" % (run.name, how, reason, self.note(run, "txt"))
        if not self.options.keep_going:
            raise Stop(message)
        self.say(run, "given up: " + message)
        self.gave_up.add(run.name)
        return False

    def lock(self, run):
        """The run's lock as a file descriptor; None if another runner, or a trainer left behind, holds it."""
        fd = os.open(self.note(run, "lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            os.close(fd)
            return None

    def stop_all(self):
        """Asks the running trainers to save and end, and waits until they have."""
        for attempt in self.active:
            attempt.asked_to_stop = True
            attempt.signal()
        for attempt in self.active:
            while not attempt.ended():
                time.sleep(0.02)
        self.active = []

    def interrupt(self, *_):
        """Signal handler. The trainers save and exit on SIGTERM, sent by stop_all; they do not get the
        terminal's Ctrl-C as well, because a second signal makes them leave at once. A second one here does."""
        if self.interrupted:
            for attempt in self.active:
                attempt.signal()
        self.interrupted = True

    def say(self, run, text):
        print("%-28s %s" % (run.name, text), flush=True)


class Attempt:
    """One launch of the trainer for one run."""

    def __init__(self, runner, run, lock, slot):
        self.runner, self.run, self.lock, self.slot = runner, run, lock, slot
        folder = run.folder(runner.root)
        resume = bool(checkpoints(folder))
        if not resume and os.path.exists(os.path.join(folder, "log.jsonl")):
            os.remove(os.path.join(folder, "log.jsonl"))  # died before its first checkpoint: begin again
        start = int(checkpoints(folder)[-1][5:-12]) if resume else 0
        words = command(runner.study, run, runner.root, resume)
        env = dict(os.environ, **run.env)
        if slot is not None:
            env["CUDA_VISIBLE_DEVICES"] = slot
        if runner.options.threads:
            env["OMP_NUM_THREADS"] = str(runner.options.threads)
        how = "resumed after step %d" % start if resume else "started"
        runner.say(run, how + (" on GPU %s" % slot if slot is not None else ""))
        self.record = {
            "from": start, "reached": start, "status": None, "interrupted": False, "seconds": 0.0,
            "peak_bytes": 0, "gpu": slot, "message": "", "jobs": len(runner.active) + 1
        }
        self.begin, self.asked_to_stop = time.time(), False
        self.note("launches", {"from": start, "trainer": digest(words[0])})
        with open(runner.note(run, "txt"), "ab") as out:
            out.write(("$ %s\n" % " ".join(shlex.quote(w) for w in words)).encode())
            out.flush()
            try:
                # The lock goes along: should this runner be killed, the trainer it leaves behind holds it.
                self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                                env=env, start_new_session=True, pass_fds=(lock,))
            except OSError as e:
                os.close(lock)
                raise Stop("cannot start the trainer %s: %s (build it first, or --trainer PATH)" %
                           (words[0], e.strerror))

    def ended(self):
        """Has the trainer ended? If so, the attempt is recorded."""
        if self.record["status"] is not None:
            return True
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        self.process.returncode = code
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
        self.record.update(status=code, interrupted=self.asked_to_stop,
                           seconds=round(time.time() - self.begin, 3), peak_bytes=usage.ru_maxrss * unit,
                           message=last_line(self.runner.note(self.run, "txt")))
        log = Log(os.path.join(self.run.folder(self.runner.root), "log.jsonl"))
        self.record["reached"] = max(log.last_step(), self.record["from"])
        self.note("attempts", self.record)
        os.close(self.lock)
        return True

    def note(self, kind, record):
        with open(self.runner.note(self.run, kind + ".jsonl"), "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")

    def signal(self):
        if self.process.returncode is None:
            try:
                os.kill(self.process.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass


def last_line(path):
    """The last line of a trainer's output, the lines that the runner wrote itself left out."""
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = [line.strip() for line in f]
    begin = max(i for i, line in enumerate(lines) if line.startswith("$ "))
    return ([line for line in lines[begin + 1:] if line] or [""])[-1][:500]


def digest(path):
    """Which program is this? A few hexadecimal digits of its SHA-256; "?" if it cannot be read."""
    try:
        with open(shutil.which(path) or path, "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()[:16]
    except OSError:
        return "?"


# ---- Slurm ---------------------------------------------------------------------------------------------------
def ranges(numbers):
    """[0, 1, 2, 5] -> "0-2,5", as sbatch --array wants it."""
    parts = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else "%d-%d" % (a, b) for a, b in parts)


def write_slurm(runner, runs, argv):
    """Writes the job array to the file --slurm names. Task k is the k-th run of the study, finished or not."""
    study, options = runner.study, runner.options
    tasks = [k for k, run in enumerate(study.runs) if run in runs and runner.state(run)[0] != "finished"]
    if not tasks:
        print("nothing to do: every run is finished")
        return 0
    os.makedirs(runner.notes, exist_ok=True)
    again = " ".join(shlex.quote(w) for w in [sys.executable or "python3", os.path.abspath(__file__)] + argv)
    output = os.path.join(os.path.abspath(runner.notes), "slurm-%A_%a.txt")
    lines = [
        "#!/bin/bash",
        "# Written by dev/paired/run.py: one run of study '%s' a task; submit with sbatch." % study.name,
        "#SBATCH --job-name=paired-%s" % study.name,
        "#SBATCH --array=%s" % ranges(tasks),
        "#SBATCH --output=%s" % output, "#SBATCH --open-mode=append", "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120   # two minutes before the time limit: save, leave, queue again"
    ]
    lines += ["#SBATCH " + option for option in study.slurm + options.sbatch]
    lines += ["# %3d  %s" % (k, study.runs[k].name) for k in tasks]
    lines += [
        "cd %s || exit 1" % shlex.quote(os.getcwd()),
        '%s --task "$SLURM_ARRAY_TASK_ID" &' % again, 'trap "kill -TERM $!" TERM', "wait $!; status=$?",
        "while kill -0 $! 2>/dev/null; do wait $!; status=$?; done   # a signal ends the wait, not the run",
        'if [ "$status" -eq 130 ]; then scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"; fi',
        "exit $status", ""
    ]
    with open(options.slurm, "w", encoding="utf-8") as f:
        f.write("\n".join(lines))
    print("%s: %d of %d runs to do" % (options.slurm, len(tasks), len(study.runs)))
    if options.submit:
        return subprocess.call(["sbatch", options.slurm])
    return 0


# ---- main ----------------------------------------------------------------------------------------------------
def main(argv):
    p = argparse.ArgumentParser(description="Carries out a study of paired runs.", allow_abbrev=False)
    p.add_argument("study", help="study file (JSON; see study.py)")
    p.add_argument("--root", help="folder for the runs (default runs/paired/<name of the study>)")
    p.add_argument("--results", metavar="DIR",
                   help="skip the runs that analyse.py has summarised there as finished")
    p.add_argument("--trainer", help="the trainer's binary, instead of the study's")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                   help="sets one of the study's variables")
    p.add_argument("--only", metavar="TEXT", help="only runs whose name contains TEXT")
    p.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    p.add_argument("--gpus", type=lambda s: [g for g in s.split(",") if g],
                   help="GPUs to use, one run on each: 0,1,2,3")
    p.add_argument("--threads", type=int, default=0,
                   help="OMP_NUM_THREADS for each run (the result does not depend on it)")
    p.add_argument("--keep-going", action="store_true",
                   help="give up a run that fails repeatedly, go on with the others")
    p.add_argument("--list", action="store_true", help="print the state of every run and exit")
    p.add_argument("--slurm", metavar="FILE", help="write a job array instead of running")
    p.add_argument("--submit", action="store_true", help="with --slurm: submit it with sbatch")
    p.add_argument("--sbatch", action="append", default=[], metavar="OPTION",
                   help="with --slurm: one more #SBATCH option")
    p.add_argument("--task", type=int, metavar="K",
                   help="only the K-th run of the study file, from 0 (used by --slurm)")
    options = p.parse_args(argv)
    if options.jobs < 1:
        p.error("--jobs %d: expected 1 or more" % options.jobs)
    if options.submit and not options.slurm:
        p.error("--submit: needs --slurm FILE")
    try:
        study = Study(options.study, options.set, options.trainer)
        if options.task is not None and not 0 <= options.task < len(study.runs):
            raise StudyError("--task %d: the study has runs 0 to %d" % (options.task, len(study.runs) - 1))
    except StudyError as e:
        print("error: %s" % e, file=sys.stderr)
        return 2

    root = options.root or os.path.join("runs", "paired", study.name)
    runs = [
        r for k, r in enumerate(study.runs)
        if (options.only is None or options.only in r.name) and (options.task is None or k == options.task)
    ]
    try:
        runner = Runner(study, root, options)
        if options.list:
            for run in runs:
                state, log = runner.state(run)
                print("%-28s %-11s step %d of %s" % (run.name, state, log.last_step(), run.flags["steps"]))
            return 0
        if options.slurm:
            task_words = [options.study, "--root", root] + [w for s in options.set for w in ("--set", s)]
            task_words += ["--results", options.results] if options.results else []
            task_words += ["--trainer", options.trainer] if options.trainer else []
            task_words += ["--threads", str(options.threads)] if options.threads else []
            return write_slurm(runner, runs, task_words)
        signal.signal(signal.SIGINT, runner.interrupt)
        signal.signal(signal.SIGTERM, runner.interrupt)
        return runner.go(runs)
    except (Stop, StudyError) as e:
        print("error: %s" % e, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
