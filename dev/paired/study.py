"""study.py - what a study is: its file, its runs, what their logs say, and when two runs may be compared.

Shared by run.py, analyse.py and plot.py. Python 3.8 or later, standard library only.

A study file is JSON:

    name        short name; the runs go to runs/paired/<name> unless --root says otherwise
    about       sentences for the head of the report
    limits      sentences for the end of the report: what the study cannot show
    trainer     the trainer's binary, relative to the folder run.py is started in
    variables   {"data": "some/folder"}: text put where a flag says {data}; --set data=... replaces it
    env         environment variables for the trainer
    flags       the trainer's flags without their dashes: {"layers": 4}; true means a flag without a value
    milestones  token counts at which the arms are compared
    sizes       {"<size>": {"label": ..., "flags": {...}, "milestones": [...], "env": {...}}}, each overriding
                the study's own
    groups      [{"sizes": [...], "arms": [...], "seeds": [...]}]: the runs, in the order they are launched;
                within a group and size seeds are the outer loop, so pairs are completed one after another
    slurm       options for --slurm, e.g. ["--gpus=1", "--time=24:00:00"]
"""

import json
import math
import os
import re

ARMS = ["residual", "block", "rd", "tied", "average", "frozen-v"]  # the order used in every table and picture
BASELINE, PROPOSAL = "block", "rd"

# Config fields that may differ between two runs of a pair: the arm, what follows from the arm alone, and
# settings that are promised to leave the result untouched (where files go, what is printed, how often a
# checkpoint is written, the number of threads). Everything else must be equal, fields unknown here included.
MAY_DIFFER = {
    "arch", "out", "resume", "quiet", "keep", "checkpoint_every", "sample_every", "sample_tokens", "prompt",
    "temperature", "top_k", "top_p", "count_parameters", "count_routes"
}
# Between seeds of one arm the seed may differ besides, and the program: if it was rebuilt in the middle of a
# study, only the pairs that it cuts in two are spoilt.
MAY_DIFFER_BETWEEN_SEEDS = MAY_DIFFER | {"seed", "trainer"}

# With zero queries, where every run starts, all arms compute the same loss up to the norms' eps (well below
# this); batches that differ give losses that differ. So equal first losses show that a pair saw the same batch.
FIRST_LOSS_TOLERANCE = 0.005


class StudyError(Exception):
    """Something about a study, its runs or its logs is wrong; the message is one line that says what."""


# ---- the study file ------------------------------------------------------------------------------------------
class Run:
    """One training run: a size, an arm and a seed."""

    def __init__(self, study, size, arch, seed):
        self.study, self.size, self.arch, self.seed = study, size, arch, seed
        self.name = "%s-%s-s%d" % (size, arch, seed)
        self.flags = dict(study.size_flags[size], arch=arch, seed=seed)
        self.env = dict(study.env, **study.sizes[size].get("env", {}))
        self.milestone_steps = study.milestone_steps[size]

    def folder(self, root):
        return os.path.join(root, self.name)


class Study:

    def __init__(self, path, settings=(), trainer=None):
        """Reads and checks the study file at path; settings are "name=value" strings for its variables."""
        self.path = path
        try:
            with open(path, encoding="utf-8") as f:
                self.source = f.read()
            study = json.loads(self.source)
        except OSError as e:
            raise StudyError("%s: %s" % (path, e.strerror))
        except ValueError as e:
            raise StudyError("%s: not JSON: %s" % (path, e))
        known = "name about limits trainer variables env flags milestones sizes groups slurm".split()
        if not isinstance(study, dict):
            raise StudyError("%s: expected an object" % path)
        for key in study:
            if key not in known:
                raise StudyError("%s: unknown entry '%s'; known: %s" % (path, key, ", ".join(sorted(known))))
        for key in ("name", "trainer", "sizes", "groups"):
            if key not in study:
                raise StudyError("%s: entry '%s' is missing" % (path, key))
        self.name = study["name"]
        self.about = _sentences(study.get("about", ""))
        self.limits = _list_of_sentences(study.get("limits", []))
        self.trainer = trainer or study["trainer"]
        self.env = study.get("env", {})
        self.sizes = study["sizes"]
        self.slurm = study.get("slurm", [])
        self.variables = dict(study.get("variables", {}))
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not equals or name not in self.variables:
                raise StudyError("--set %s: expected name=value with one of the study's variables: %s" %
                                 (setting, ", ".join(sorted(self.variables)) or "(it has none)"))
            self.variables[name] = value

        self.size_flags, self.milestone_steps = {}, {}
        for size, entry in self.sizes.items():
            if not re.fullmatch(r"[A-Za-z0-9_.]+", size):
                raise StudyError("%s: size '%s': letters, digits, '_' and '.' only" % (path, size))
            flags = {_plain(k): v for k, v in study.get("flags", {}).items()}
            flags.update({_plain(k): v for k, v in entry.get("flags", {}).items()})
            for flag in ("arch", "seed", "out", "resume"):
                if flag in flags:
                    raise StudyError("%s: size '%s': flag '%s' is the runner's to set" % (path, size, flag))
            self.size_flags[size] = {k: self._substitute(v) for k, v in flags.items()}
            self._milestones(size, entry.get("milestones", study.get("milestones", [])))

        self.runs = []
        for group in study["groups"]:
            for size in group.get("sizes", list(self.sizes)):
                if size not in self.sizes:
                    raise StudyError("%s: a group names the unknown size '%s'" % (path, size))
                for seed in group["seeds"]:
                    for arch in group["arms"]:
                        if arch not in ARMS:
                            raise StudyError("%s: a group names the unknown arm '%s'" % (path, arch))
                        run = Run(self, size, arch, seed)
                        if run.name not in [r.name for r in self.runs]:
                            self.runs.append(run)
        if not self.runs:
            raise StudyError("%s: no runs" % path)

    def _substitute(self, value):
        if not isinstance(value, str):
            return value
        for name, text in self.variables.items():
            value = value.replace("{%s}" % name, text)
        if re.search(r"\{\w+\}", value):
            raise StudyError("%s: '%s' uses a variable that is not set" % (self.path, value))
        return value

    def _milestones(self, size, tokens):
        """Milestones are token counts; each becomes the nearest step at which the trainer validates."""
        flags, where = self.size_flags[size], "%s: size '%s'" % (self.path, size)
        try:
            steps, every = int(flags["steps"]), int(flags["val_every"])
            per_step = step_tokens(flags)
        except KeyError as e:
            raise StudyError(
                "%s: flag %s is needed to place the milestones (steps, val-every, and total-batch or "
                "batch and context)" % (where, e))
        found = []
        for milestone in tokens:
            near = min(int(milestone / per_step / every + 0.5), steps // every) * every
            step = min([near, steps], key=lambda s: abs(s * per_step - milestone))
            if step <= 0 or abs(step * per_step - milestone) > 0.01 * milestone:
                raise StudyError(
                    "%s: no validation within 1%% of milestone %d tokens: nearest is step %d of %d, %d tokens" %
                    (where, milestone, step, steps, step * per_step))
            found.append(step)
        if sorted(set(found)) != found:
            raise StudyError("%s: milestones must rise, each at its own validation step" % where)
        self.milestone_steps[size] = found


def step_tokens(flags):
    return int(flags["total_batch"]) if "total_batch" in flags else int(flags["batch"]) * int(flags["context"])


def _plain(flag):
    return flag.replace("-", "_")


def _sentences(text):
    return " ".join(text) if isinstance(text, list) else text


def _list_of_sentences(text):
    return [_sentences(t) for t in text] if isinstance(text, list) else [text]


def command(study, run, root, resume):
    """The trainer's command line for a run."""
    words = [study.trainer]
    for flag, value in run.flags.items():
        if value is True:
            words.append("--" + flag.replace("_", "-"))
        elif value is not False:
            words += ["--" + flag.replace("_", "-"), _flag_text(value)]
    words += ["--out", run.folder(root)]
    if resume:
        words += ["--resume", run.folder(root)]
    return words


def _flag_text(value):
    return repr(value) if isinstance(value, float) else str(value)


# ---- logs ----------------------------------------------------------------------------------------------------
class Log:
    """What a run's log.jsonl says. Events of one step replace earlier ones of the same step (a resumed run)."""

    def __init__(self, path):
        self.path = path
        self.config, self.done, self.diverged_at = None, None, None
        self.steps, self.val, self.routes = {}, {}, {}  # by step; the last two by (split, step)
        try:
            with open(path, encoding="utf-8", errors="replace") as f:
                lines = f.read().split("\n")
        except FileNotFoundError:
            return
        except OSError as e:
            raise StudyError("%s: %s" % (path, e.strerror))
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, KeyError, TypeError):
                if number == len(lines):  # the end of a line cut off by a kill; a resumed run mends it
                    continue
                raise StudyError("%s:%d: not a log event: %.60s" % (path, number, line))
            if kind == "config":
                config = settings_of(event)
                if self.config is not None:
                    differing = differences(self.config, config, MAY_DIFFER)
                    if differing:
                        raise StudyError("%s:%d: the run was resumed with other settings: %s" %
                                         (path, number, "; ".join(differing)))
                self.config = self.config or config
            elif kind == "step":
                self.steps[event["step"]] = event
            elif kind == "val" and "loss" in event:  # others count right answers
                self.val[(event["split"], event["step"])] = event
            elif kind == "routes":
                self.routes[(event["split"], event["step"])] = event
            elif kind == "done":
                self.done = event
        bad = [
            e["step"] for e in list(self.steps.values()) + list(self.val.values()) if not is_number(e["loss"])
        ]
        self.diverged_at = min(bad) if bad else None  # the step at which a loss stopped being a number

    def last_step(self):
        return max(self.steps) if self.steps else 0

    def first_loss(self):
        """The loss of the first step, or None; a log that begins later (none does today) says nothing."""
        return self.steps[1].get("loss") if 1 in self.steps else None


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def settings_of(event):
    """A config event as one dictionary: the options by name, and what the trainer counted as count_<name>."""
    settings = {_plain(name): value for name, value in event["options"].items()}
    settings.update({"count_" + k: v for k, v in event.items() if k not in ("event", "options")})
    return settings


def without_folders(config):
    """A config fit to be kept: paths lose their folders."""
    kept = {}
    for key, value in config.items():
        kept[key] = os.path.basename(value) if isinstance(value, str) and "/" in value else value
    return kept


# ---- summaries: what is kept of a run, written by analyse.py -------------------------------------------------
def read_summaries(folder):
    """{run name: summary} of a results folder; empty if there are none."""
    folder = os.path.join(folder, "summaries")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return {name[:-5]: read_json(os.path.join(folder, name)) for name in names if name.endswith(".json")}


def read_json(path, default=None):
    """What the file holds; the default if there is no such file."""
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as e:
        raise StudyError("%s: not JSON: %s" % (path, e))


# ---- comparing -----------------------------------------------------------------------------------------------
def same(a, b):
    """Are two settings equal? Numbers by value, whether written as a number or as text."""
    a, b = (str(x).lower() if isinstance(x, bool) else x for x in (a, b))
    if a == b:
        return True
    try:
        return float(a) == float(b)
    except (TypeError, ValueError):
        return False


def differences(a, b, may_differ):
    """What differs between two configs, as a list of short texts; empty if they may be paired."""
    absent = object()
    found = []
    for key in sorted(set(a) | set(b)):
        x, y = a.get(key, absent), b.get(key, absent)
        if key in may_differ or same(x, y) or (key == "trainer" and absent in (x, y)):
            continue  # which program ran is known only of runs that run.py launched
        found.append("%s %s against %s" %
                     (key, *("(absent)" if v is absent else json.dumps(v) for v in (x, y))))
    return found


def check_comparable(runs):
    """runs: [(name, seed, size, config, first loss or None)]. Raises StudyError unless, within each size, the
    runs of one seed differ in nothing but the arm, and runs of different seeds in nothing but arm and seed."""
    first = {}
    for name, seed, size, config, loss in runs:
        if config is None:
            continue
        for key, may_differ in (((size, seed), MAY_DIFFER), ((size,), MAY_DIFFER_BETWEEN_SEEDS)):
            if key not in first:
                first[key] = (name, config, loss)
                continue
            other, other_config, other_loss = first[key]
            found = differences(other_config, config, may_differ)
            if found:
                raise StudyError("%s and %s must not be compared, they differ in more than the arm%s: %s" %
                                 (other, name, "" if len(key) == 2 else " and the seed", "; ".join(found)))
            if (len(key) == 2 and is_number(loss) and is_number(other_loss)
                    and abs(loss - other_loss) > FIRST_LOSS_TOLERANCE):
                raise StudyError(
                    "%s and %s must not be compared: their first losses %.6f and %.6f differ, so they did "
                    "not see the same first batch from the same weights" % (other, name, other_loss, loss))


def check_against_study(run, config, where):
    """Was the run made with the study's flags?"""
    for flag, value in run.flags.items():
        if (flag in config and flag not in ("train", "val", "test", "tokenizer")
                and not same(config[flag], value)):
            raise StudyError(
                "%s: made with --%s %s, but the study says %s; give it another --root or move the folder away" %
                (where, flag.replace("_", "-"), config[flag], value))


# ---- the state of a run --------------------------------------------------------------------------------------
def read_notes(root, run, kind):
    """What run.py noted about a run: its "launches" when the trainer began, its "attempts" when it ended."""
    try:
        with open(os.path.join(root, "runner", "%s.%s.jsonl" % (run.name, kind)), encoding="utf-8") as f:
            return [json.loads(line) for line in f if line.endswith("\n")]
    except FileNotFoundError:
        return []


def stopped_at(message):
    """The step at which a trainer refused to go on with numbers that are not finite, from its last words."""
    found = re.search(r"step (\d+): .*expected finite numbers", message or "")
    return int(found.group(1)) if found else None


def checkpoints(folder):
    """Names of the run's checkpoints, oldest first."""
    try:
        return sorted(n for n in os.listdir(folder) if re.fullmatch(r"ckpt_\d+\.safetensors", n))
    except OSError:
        return []


def state_of(run, root):
    """(state, log) of a run; state is one of missing, interrupted, diverged, finished. The log's config gains
    "trainer", a digest of the program (of all of them, should there be several) that run.py launched."""
    log = Log(os.path.join(run.folder(root), "log.jsonl"))
    programs, begin = set(), None  # backwards from the end: which launches' steps are in the run as it stands
    for launch in reversed(read_notes(root, run, "launches")):
        if begin is None or launch["from"] < begin:
            programs.add(launch["trainer"])
            begin = launch["from"]
    if log.config is not None and programs:
        log.config["trainer"] = "+".join(sorted(programs))
    if log.done is not None and log.done["step"] >= int(run.flags["steps"]):
        for step in run.milestone_steps:
            if ("val", step) not in log.val:
                raise StudyError("%s: finished, but without the validation at step %d that the study compares" %
                                 (log.path, step))
        return "finished", log
    attempts = read_notes(root, run, "attempts")
    if log.diverged_at is None and attempts and not attempts[-1]["interrupted"]:
        log.diverged_at = stopped_at(attempts[-1]["message"])
    if log.diverged_at is not None:
        return "diverged", log
    return ("interrupted" if log.config is not None or checkpoints(run.folder(root)) else "missing"), log
