#!/usr/bin/env python3
"""analyse.py - what a study found: summaries of its runs, paired statistics, a report in Markdown.

    python3 dev/paired/analyse.py STUDY --results DIR [--root RUNS]    from the logs of the runs
    python3 dev/paired/analyse.py --results DIR                        from the summaries alone

DIR then holds study.json (a copy of the study file), summaries/<run>.json (one a run, small enough to commit),
report.md, and apart from them speed.json and speed.md: losses are the same however often a study was killed and
resumed, clock times are not. The report is a function of study.json and the summaries: same files, same text.

Runs that differ in more than the arm are refused, not averaged. Exit status: 0, 1 bad or incomparable runs, 2
usage. Standard library only.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys

from study import (ARMS, BASELINE, PROPOSAL, Study, StudyError, check_against_study, check_comparable,
                   is_number, read_json, read_notes, read_summaries, state_of, step_tokens, without_folders)

# The numbers of the paper (arXiv 2608.01075) that a study is held against: validation NLL of rd minus block at
# 2.0B tokens. The values of single seeds are read off its figure, each to +-0.0005; means and perplexity
# changes are the ones it states.
PAPER = [
    {"label": "paper, S (119.8M)", "tokens": 2.0e9, "mean": -0.0301, "perplexity": -2.97, "js": 0.218,
     "seeds": [-0.0269, -0.0291, -0.0293, -0.0301, -0.0351]},
    {"label": "paper, M (343.0M)", "tokens": 2.0e9, "mean": -0.0247, "perplexity": -2.43, "js": 0.215,
     "seeds": [-0.0120, -0.0181, -0.0211, -0.0293, -0.0430]},
]


# ---- statistics ----------------------------------------------------------------------------------------------
def incomplete_beta(a, b, x):
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (modified Lentz)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only on this side
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    fraction = d
    for m in range(1, 1000):
        even = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        odd = (a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even * x, -odd * x):
            d = 1.0 + term * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + term / c
            c = c if abs(c) > tiny else tiny
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction


def t_cdf(t, df):
    """P(T <= t) for Student's t with df degrees of freedom."""
    tail = 0.5 * incomplete_beta(df / 2.0, 0.5, df / (df + t * t))
    return 1.0 - tail if t > 0 else tail


def t_quantile(p, df):
    """The t with P(T <= t) = p, 0.5 <= p < 1, by bisection."""
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return 0.5 * (low + high)


def t_interval(values, level=0.95):
    """(low, high) for the mean, or None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    half = t_quantile(0.5 + level / 2, n - 1) * statistics.stdev(values) / math.sqrt(n)
    mean = statistics.fmean(values)
    return mean - half, mean + half


def bootstrap_interval(values, level=0.95):
    """(low, high) percentile bootstrap for the mean, or None for fewer than two values. Up to eight values it
    is exact: every resample is weighted by its probability. Beyond, 20,000 draws from a fixed seed."""
    n = len(values)
    if n < 2:
        return None
    if n <= 8:
        means = []
        for resample in itertools.combinations_with_replacement(range(n), n):
            ways = math.factorial(n)
            for _, same in itertools.groupby(resample):
                ways //= math.factorial(len(list(same)))
            means.append((math.fsum(values[i] for i in resample) / n, ways))
    else:
        draw = random.Random(1)
        means = [(math.fsum(draw.choice(values) for _ in range(n)) / n, 1) for _ in range(20000)]
    means.sort()
    total, tail = sum(w for _, w in means), (1 - level) / 2

    def percentile(ordered):
        seen = 0
        for mean, ways in ordered:
            seen += ways
            if seen >= tail * total:
                return mean

    return percentile(means), percentile(reversed(means))


def sign_test(lower, higher):
    """Two-sided exact p-value of so many negative and positive differences, ties left out; None without any."""
    n, k = lower + higher, min(lower, higher)
    if n == 0:
        return None
    return min(1.0, 2.0 * sum(math.comb(n, i) for i in range(k + 1)) / 2.0**n)


def rank_correlation(a, b):
    """Spearman's, of two lists of two values or more without ties."""
    n = len(a)
    first, second = ({i: rank for rank, i in enumerate(sorted(range(n), key=x.__getitem__))} for x in (a, b))
    return 1 - 6 * sum((first[i] - second[i])**2 for i in range(n)) / (n * (n * n - 1))


class Comparison:
    """Paired differences arm minus base, from {seed: value}; a value may be None (not there) or "diverged"."""

    def __init__(self, arm, base):
        self.by_seed, self.lost = {}, []
        self.lower, self.higher, self.ties = 0, 0, 0
        for seed in sorted(set(arm) | set(base)):
            a, b = arm.get(seed), base.get(seed)
            if is_number(a) and is_number(b):
                self.by_seed[seed] = a - b
                self.lower += a < b
                self.higher += a > b
                self.ties += a == b
            elif "diverged" in (a, b) and a is not None and b is not None:
                # No difference can be formed, but the pair is not forgotten: who diverged has lost it.
                self.higher += a == "diverged" and b != "diverged"
                self.lower += b == "diverged" and a != "diverged"
                self.lost.append((seed, "both" if a == b else "arm" if a == "diverged" else "base"))
            else:
                self.lost.append((seed, "missing"))
        self.values = list(self.by_seed.values())
        self.n = len(self.values)
        self.mean = statistics.fmean(self.values) if self.values else None
        self.t = t_interval(self.values)
        self.bootstrap = bootstrap_interval(self.values)
        self.p = sign_test(self.lower, self.higher)

    def perplexity(self):
        """Change of perplexity in percent."""
        return None if self.mean is None else 100.0 * math.expm1(self.mean)


# ---- summaries -----------------------------------------------------------------------------------------------
def bins(points, most=120):
    """At most so many (tokens, mean loss) points from a run's steps, each the mean over a stretch of steps."""
    width = max(1, math.ceil(len(points) / most))
    parts = [points[i:i + width] for i in range(0, len(points), width)]
    return [[part[-1][0], statistics.fmean(loss for _, loss in part)] for part in parts]


def summarise(state, log):
    """What is worth keeping of a run, clock times apart: (summary, speed)."""
    steps = [log.steps[s] for s in sorted(log.steps)]
    numbers = [e for e in steps if is_number(e.get("loss"))]
    summary = {
        "state": state, "diverged_at": log.diverged_at, "step": log.last_step(),
        "config": without_folders(log.config or {}), "first_loss": log.first_loss(),
        "train": bins([(e["tokens"], e["loss"]) for e in numbers]), "val": {}, "routes": None, "js": []
    }
    for split, step in sorted(log.val):
        event = log.val[(split, step)]
        if is_number(event.get("loss")):
            summary["val"].setdefault(split, []).append([step, event["tokens"], event["loss"], event["count"]])
    for split, step in sorted(log.routes):
        event = log.routes[(split, step)]
        if split == "val":
            summary["js"].append([step, event["tokens"], event["js_nats"]])
            summary["routes"] = {k: event[k] for k in ("step", "qk", "v", "js_nats", "js_bits")}
    settled = [e for e in steps[1:] if is_number(e.get("tok_s"))]  # the first step also warms up
    speed = {"tok_s": statistics.median(e["tok_s"] for e in settled)} if settled else {}
    return summary, speed


def collect(study, root, results):
    """Summaries of all runs under root into the results folder; less never replaces a finished one."""
    os.makedirs(os.path.join(results, "summaries"), exist_ok=True)
    kept = read_summaries(results)
    speeds = read_json(os.path.join(results, "speed.json"), {})
    for run in study.runs:
        state, log = state_of(run, root)
        if state == "missing" or log.config is None:
            continue
        if state != "finished" and kept.get(run.name, {}).get("state") == "finished":
            continue
        check_against_study(run, log.config, run.folder(root))
        summary, speed = summarise(state, log)
        write_json(os.path.join(results, "summaries", run.name + ".json"), summary)
        attempts = read_notes(root, run, "attempts")
        if attempts:
            seconds = round(sum(a["seconds"] for a in attempts), 1)
            speed.update(peak_bytes=max(a["peak_bytes"] for a in attempts), attempts=len(attempts),
                         seconds=seconds, jobs=max(a["jobs"] for a in attempts))
        speeds[run.name] = speed
    write_text(os.path.join(results, "study.json"), study.source)
    write_json(os.path.join(results, "speed.json"), speeds)


def write_json(path, value):
    """One entry of the top level a line: small in a diff, readable enough."""
    lines = ["%s: %s" % (json.dumps(k), json.dumps(value[k])) for k in value]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_text(path, text):
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(path + ".tmp", path)


# ---- reading the summaries -----------------------------------------------------------------------------------
class Results:
    """A study with the summaries of its runs."""

    def __init__(self, folder):
        self.folder = folder
        self.study = Study(os.path.join(folder, "study.json"))
        self.summaries = read_summaries(folder)
        self.speed = read_json(os.path.join(folder, "speed.json"), {})
        rows = []
        for run in self.study.runs:
            s = self.summaries.get(run.name)
            if s:
                check_against_study(run, s["config"], run.name)
                rows.append((run.name, run.seed, run.size, s["config"], s["first_loss"]))
        check_comparable(rows)

    def runs(self, size, arch=None):
        return [r for r in self.study.runs if r.size == size and arch in (None, r.arch)]

    def arms(self, size):
        return [a for a in ARMS if self.runs(size, a)]

    def state(self, run):
        s = self.summaries.get(run.name)
        return s["state"] if s else "missing"

    def values(self, size, arch, step, split="val"):
        """{seed: loss at that step, None if not there, or "diverged"} of all runs the study has of this arm."""
        found = {}
        for run in self.runs(size, arch):
            s = self.summaries.get(run.name) or {"val": {}, "diverged_at": None}
            losses = {row[0]: row[2] for row in s["val"].get(split, [])}
            found[run.seed] = losses.get(step)
            if found[run.seed] is None and s["diverged_at"] is not None and s["diverged_at"] <= step:
                found[run.seed] = "diverged"
        return found

    def compare(self, size, arm, base, step, split="val"):
        """The comparison over the seeds that both arms have in the study."""
        a, b = self.values(size, arm, step, split), self.values(size, base, step, split)
        both = set(a) & set(b)
        return Comparison({s: a[s] for s in both}, {s: b[s] for s in both})

    def val_steps(self, size, split="val"):
        """[(step, tokens)] at which any run of this size was validated."""
        found = {}
        for run in self.runs(size):
            for step, tokens, _, _ in self.summaries.get(run.name, {"val": {}})["val"].get(split, []):
                found[step] = tokens
        return sorted(found.items())

    def last_step(self, size):
        return int(self.study.size_flags[size]["steps"])

    def label(self, size):
        return self.study.sizes[size].get("label", size)

    def routes(self, size):
        """Mean weights of the proposal's finished runs: (names of the sources, {seed: (QK, V)}), each by layer
        and source, None where a layer cannot read the source. The partial is the last source."""
        runs = [r for r in self.runs(size, PROPOSAL) if self.state(r) == "finished"]
        routes = {r.seed: self.summaries[r.name]["routes"] for r in runs}
        routes = {seed: (found["qk"], found["v"]) for seed, found in routes.items() if found and found["v"]}
        if not routes:
            return [], {}
        layers = len(next(iter(routes.values()))[0])
        block = int(self.summaries[runs[0].name]["config"].get("block_size", 2))
        names = ["embedding"] + ["block %d" % (i + 1) for i in range((2 * layers - 2) // block)]
        names += ["partial"] if any(2 * l % block for l in range(layers)) else []

        def cells(rows):
            found = [[None] * len(names) for _ in rows]
            for l, row in enumerate(rows):
                for j, p in enumerate(row):
                    found[l][-1 if 2 * l % block and j == len(row) - 1 else j] = p
            return found

        return names, {seed: (cells(qk), cells(v)) for seed, (qk, v) in routes.items()}

    def js(self, size):
        """{seed: JS per layer in nats} of the proposal's runs, at their last validation."""
        found = {}
        for run in self.runs(size, PROPOSAL):
            s = self.summaries.get(run.name)
            if s and s["state"] == "finished" and s["routes"] and s["routes"]["js_nats"]:
                found[run.seed] = s["routes"]["js_nats"]
        return found


# ---- the report ----------------------------------------------------------------------------------------------
def signed(x, digits=4):
    """A number with its sign; a true minus, and no sign for what rounds to zero."""
    if x is None:
        return "–"
    text = "%+.*f" % (digits, x)
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def interval(pair, digits=4):
    return "–" if pair is None else "%s to %s" % (signed(pair[0], digits), signed(pair[1], digits))


def p_value(p):
    return "–" if p is None else "%.3g" % p


def tokens_text(n):
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return "%.4g%s" % (n / unit, name)
    return "%d" % n


def table(head, rows):
    rule = "|".join(["---"] + ["---:"] * (len(head) - 1))
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [head] + rows]
    return lines[:1] + ["|" + rule + "|"] + lines[1:] + [""]


def verdict(c, arm=PROPOSAL, base=BASELINE):
    if c.n == 0:
        return "no complete pair yet"
    if c.t is None:
        return "one pair only (%s nats): no interval, no conclusion" % signed(c.mean)
    change = "%s − %s = %s nats (95%% interval %s, %d pairs, %d lower and %d higher, sign test p = %s)" % (
        arm, base, signed(c.mean), interval(c.t), c.n, c.lower, c.higher, p_value(c.p))
    if c.t[1] < 0:
        return change + ": " + arm + " is better, beyond the spread of the seeds"
    if c.t[0] > 0:
        return change + ": " + arm + " is worse, beyond the spread of the seeds"
    return change + ": not told apart, which is not to say that they are equal"


def comparison_row(head, tokens, c):
    change = "–" if c.n == 0 else signed(c.perplexity(), 2) + "%"
    return [head, tokens, c.n, signed(c.mean), interval(c.t), interval(c.bootstrap),
            "%d : %d" % (c.lower, c.higher), p_value(c.p), change]


REASONS = {"arm": PROPOSAL + " diverged", "base": BASELINE + " diverged", "both": "both diverged",
           "missing": "missing"}
COMPARISON_HEAD = ["", "tokens", "pairs", "mean (nats)", "95% t interval", "95% bootstrap", "lower : higher",
                   "sign test p", "perplexity"]


def report(results):
    """The report as Markdown text."""
    study = results.study
    sizes = list(study.sizes)
    out = ["# The study `%s`" % study.name, ""]
    out += [study.about, ""] if study.about else []
    out += [
        "Differences are %s minus %s (or the named arm minus %s) in validation loss, nats per token, between "
        "runs of one seed: same weights at the start, same batches, same schedule. Negative: the first is "
        "better." % (PROPOSAL, BASELINE, BASELINE), ""
    ]

    out += ["## In short", ""]
    for size in sizes:
        steps = study.milestone_steps[size] or [results.last_step(size)]
        reached = [s for s in steps if results.compare(size, PROPOSAL, BASELINE, s).n] or steps
        for step in sorted({reached[-1], steps[-1]}):  # the last one, and before it how far the pairs are
            c = results.compare(size, PROPOSAL, BASELINE, step)
            out.append("- %s, %s tokens: %s." % (results.label(size), tokens_at(results, size, step), verdict(c)))
    out.append("")
    out += runs_section(results, sizes)

    out += ["## %s against %s, beside the paper" % (PROPOSAL, BASELINE), ""]
    rows = []
    for size in sizes:
        for step in study.milestone_steps[size]:
            c = results.compare(size, PROPOSAL, BASELINE, step)
            rows.append(comparison_row(results.label(size), tokens_at(results, size, step), c))
    for paper in PAPER:
        c = Comparison(dict(enumerate(paper["seeds"])), dict.fromkeys(range(len(paper["seeds"])), 0.0))
        row = comparison_row(paper["label"], tokens_text(paper["tokens"]), c)
        row[3], row[-1] = signed(paper["mean"]), signed(paper["perplexity"], 2) + "%"
        rows.append(row)
    out += table(COMPARISON_HEAD, rows)
    out += [
        "The paper's means and perplexity changes are the ones it states; its intervals and signs are computed "
        "here from the ten differences read off its figure (each ±0.0005). It reports 10 of 10 pairs lower: "
        "sign test p = %s. With five pairs no sign test can go below p = %s." %
        (p_value(sign_test(10, 0)), p_value(sign_test(5, 0))), ""
    ]

    out += ["### Pair by pair", ""]
    seeds = sorted({r.seed for r in study.runs if r.arch == PROPOSAL})
    rows = []
    for size in sizes:
        for step in study.milestone_steps[size]:
            c = results.compare(size, PROPOSAL, BASELINE, step)
            why = {seed: REASONS[reason] for seed, reason in c.lost}
            rows.append([results.label(size), tokens_at(results, size, step)]
                        + [signed(c.by_seed[s]) if s in c.by_seed else why.get(s, "–") for s in seeds])
    out += table(["", "tokens"] + ["seed %d" % s for s in seeds], rows)
    out += table(["paper, sorted by size of the difference", "tokens"] + [""] * len(PAPER[0]["seeds"]),
                 [[p["label"], tokens_text(p["tokens"])] + [signed(v) for v in p["seeds"]] for p in PAPER])

    out += ["## Every arm against %s" % BASELINE, ""]
    for size in sizes:
        step = (study.milestone_steps[size] or [results.last_step(size)])[-1]
        rows = []
        for arm in results.arms(size):
            losses = [v for v in results.values(size, arm, step).values() if is_number(v)]
            row = [arm, "%.4f" % statistics.fmean(losses) if losses else "–", len(losses)]
            if arm == BASELINE:
                rows.append(row + [""] * 7)
                continue
            c = results.compare(size, arm, BASELINE, step)
            r = results.compare(size, PROPOSAL, arm, step)
            rows.append(row + comparison_row("", "", c)[2:8]
                        + ["–" if arm == PROPOSAL else "%s (%s)" % (signed(r.mean), interval(r.t))])
        out += ["%s, %s tokens:" % (results.label(size), tokens_at(results, size, step)), ""]
        out += table([
            "arm", "mean loss", "runs", "pairs", "minus " + BASELINE, "95% t interval", "95% bootstrap",
            "lower : higher", "sign test p", PROPOSAL + " minus this arm"
        ], rows)
    out += tied_lines(results, sizes)

    out += gap_section(results, sizes) + js_section(results, sizes) + routes_section(results, sizes)
    out += test_section(results, sizes)

    out += [
        "## How it was computed", "",
        "- 95% t interval: mean ± Student's t quantile times standard deviation / √pairs. Bootstrap: "
        "percentile interval over resampled pairs, every resample counted; with so few pairs it is too "
        "narrow, and stands here only beside the other.",
        "- Sign test: exact, two-sided, ties left out. A run whose loss stopped being a number has lost its "
        "pair in this count; it has no difference, so means and intervals leave it out, and the report "
        "says so.",
        "- Perplexity: exp(mean difference) − 1.",
        "- Runs are paired only after their logs were compared: every setting but the arm is equal, and so is "
        "the first loss (all arms compute the same function while the queries are zero).",
        "- The intervals tell the spread over seeds (weights and order of the data), for one validation set "
        "and one setting of everything else. They are not corrected for the number of comparisons in "
        "this report.", ""
    ]
    if study.limits:
        out += ["## Limits", ""] + ["- " + limit for limit in study.limits] + [""]
    return "\n".join(out)


def tied_lines(results, sizes):
    """tied computes what block computes: a check of the machinery, at every validation of every pair."""
    worst, pairs = 0.0, 0
    for size in sizes:
        steps = results.val_steps(size) if "tied" in results.arms(size) else []
        compared = [results.compare(size, "tied", BASELINE, step) for step, _ in steps]
        pairs += max([c.n for c in compared] or [0])
        worst = max([worst] + [abs(v) for c in compared for v in c.values])
    if not pairs:
        return []
    if worst:
        return [
            "**`tied` differs from `%s`, by up to %.3g nats, though by construction it computes the same: "
            "something is wrong with the runs.**" % (BASELINE, worst), ""
        ]
    return [
        "`tied` computes the same as `%s` by construction; at every validation its difference is 0 in all %d "
        "pairs." % (BASELINE, pairs), ""
    ]


def tokens_at(results, size, step):
    tokens = dict(results.val_steps(size)).get(step)
    return tokens_text(tokens or step * step_tokens(results.study.size_flags[size]))



def runs_section(results, sizes):
    out = ["## The runs", ""]
    rows, unfinished = [], []
    for size in sizes:
        for arm in results.arms(size):
            runs = results.runs(size, arm)
            states = [results.state(r) for r in runs]
            rows.append([results.label(size), arm, len(runs)]
                        + [states.count(s) for s in ("finished", "diverged", "interrupted", "missing")])
            for run, state in zip(runs, states):
                if state != "finished":
                    s = results.summaries.get(run.name)
                    at = " at step %d" % (s["diverged_at"] if state == "diverged" else s["step"]) if s else ""
                    unfinished.append("- `%s`: %s%s" % (run.name, state, at))
    out += table(["size", "arm", "planned", "finished", "diverged", "interrupted", "missing"], rows)
    if not unfinished:
        return out + ["All runs are finished; none was left out.", ""]
    out += ["The study is not complete; what is said below holds for the pairs that are there. Not finished:"]
    return out + [""] + unfinished + [""]


def gap_section(results, sizes):
    out = [
        "## The gap along the tokens", "",
        "%s minus %s at validations along the runs: mean, and 95%% t interval." % (PROPOSAL, BASELINE), ""
    ]
    for size in sizes:
        steps = [s for s in results.val_steps(size) if s[0] > 0]
        most = min(8, len(steps))
        rows = []
        for step, tokens in [steps[round((i + 1) * len(steps) / most) - 1] for i in range(most)]:
            c = results.compare(size, PROPOSAL, BASELINE, step)
            if c.n:
                losses = [v for v in results.values(size, BASELINE, step).values() if is_number(v)]
                base = "%.4f" % statistics.fmean(losses)
                rows.append([tokens_text(tokens), c.n, base, signed(c.mean), interval(c.t)])
        if rows:
            out += [results.label(size) + ":", ""]
            out += table(["tokens", "pairs", BASELINE + " loss", "difference", "95% t interval"], rows)
    return out


def js_section(results, sizes):
    out = [
        "## How far the two routes part", "",
        "Jensen-Shannon divergence between the QK route and the V route of %s, per token, averaged over the "
        "validation tokens and over seeds. Layer 0 reads one source only, so there it is 0; the mean is given "
        "with and without it." % PROPOSAL, ""
    ]
    rows = []
    for size in sizes:
        by_seed = results.js(size)
        if by_seed:
            layers = [statistics.fmean(js) for js in zip(*by_seed.values())]
            means = [statistics.fmean(layers), statistics.fmean(layers[1:]) if len(layers) > 1 else 0.0]
            rows.append([results.label(size), len(by_seed)]
                        + ["%.4f" % (m / unit) for unit in (1, math.log(2)) for m in means])
            out += ["%s, nats by layer: %s" % (results.label(size), ", ".join("%.4f" % x for x in layers)), ""]
    if not rows:
        return out + ["No finished %s run yet." % PROPOSAL, ""]
    rows += [[p["label"], len(p["seeds"])] + ["%.3f" % p["js"]] + [""] * 3 for p in PAPER]
    out += table(["mean over layers", "runs", "nats", "nats, without layer 0", "bits", "bits, without layer 0"],
                 rows)
    return out + [
        "The paper's number is entered once; whether it counts layer 0, and its unit, are not known here.", ""
    ]


def routes_section(results, sizes):
    """Which source V reads and QK does not, and whether the seeds agree about it."""
    out = []
    for size in sizes:
        names, by_seed = results.routes(size)
        if not by_seed:
            continue
        by_seed = {seed: list(zip(*pair))[1:] for seed, pair in by_seed.items()}  # [(QK, V)] by layer
        rows = []
        for j, name in enumerate(names):
            weights = [(qk[j], v[j]) for layers in by_seed.values() for qk, v in layers if qk[j] is not None]
            if weights:
                qk, v = map(statistics.fmean, zip(*weights))
                rows.append([name, "%.3f" % qk, "%.3f" % v, signed(v - qk, 3)])
        out += [results.label(size) + ":", ""] + table(["source", "QK route", "V route", "V − QK"], rows)
        words = []
        for name, what in (("QK", lambda qk, v: qk), ("V", lambda qk, v: v), ("V − QK", lambda qk, v: v - qk)):
            # times the number of sources: each weight beside the uniform one
            seeds = [[what(a, b) * sum(p is not None for p in qk) for qk, v in layers
                      for a, b in zip(qk, v) if a is not None] for layers in by_seed.values()]
            agreement = [rank_correlation(a, b) for a, b in itertools.combinations(seeds, 2)]
            if agreement:
                numbers = [signed(f(agreement), 2) for f in (statistics.fmean, min, max)]
                words.append("%s %s (%s to %s)" % (name, *numbers))
        if words:
            out += ["Rank correlation between two seeds, mean (lowest to highest): %s." % ", ".join(words), ""]
    head = ["## What the routes read", "",
            "Mean weights of %s on each source at the last validation, averaged over seeds and over the "
            "attention layers that can read it, layer 0 left out. The correlation is Spearman's, over all "
            "layers and sources, of the weight times the number of sources." % PROPOSAL, ""]
    return head + out if out else []


def test_section(results, sizes):
    rows = []
    for size in sizes:
        step = results.last_step(size)
        for arm in results.arms(size):
            c = results.compare(size, arm, BASELINE, step, "test")
            if arm != BASELINE and c.n:
                head = "%s, %s" % (results.label(size), arm)
                rows.append(comparison_row(head, tokens_at(results, size, step), c))
    if not rows:
        return []
    return [
        "## The held-out test split", "",
        "Evaluated once, at the end of each run; nothing was chosen by it. Arm minus %s:" % BASELINE, ""
    ] + table(COMPARISON_HEAD, rows)


def speed_report(results):
    """Tokens/s and memory, as Markdown text: what was measured, not what could be."""
    out = [
        "# The study `%s`: speed and memory" % results.study.name, "",
        "Medians over the runs of each run's median step, and medians of the ratios to %s of the same seed. "
        "The memory is the trainer's peak resident size as the operating system counts it (on a GPU this is "
        "the host's side only)." % BASELINE, ""
    ]
    jobs = max([s.get("jobs", 1) for s in results.speed.values()] or [1])
    out += ["Up to %d runs shared the machine, perhaps with other work; a benchmark this is not." % jobs, ""]
    for size in results.study.sizes:
        rows = []
        for arm in results.arms(size):
            cells = []
            for key, scale, text in (("tok_s", 1, "%.0f"), ("peak_bytes", 2.0**20, "%.1f")):
                own, base = ({r.seed: results.speed[r.name][key] for r in results.runs(size, a)
                              if results.speed.get(r.name, {}).get(key)} for a in (arm, BASELINE))
                ratios = [own[s] / base[s] for s in own if s in base]
                cells += [text % (statistics.median(own.values()) / scale) if own else "–",
                          "%.3f" % statistics.median(ratios) if ratios else "–"]
            rows.append([arm, len([r for r in results.runs(size, arm) if r.name in results.speed])] + cells)
        out += [results.label(size) + ":", ""]
        out += table(["arm", "runs", "tokens/s", "against " + BASELINE, "peak MiB", "against " + BASELINE],
                     rows)
    return "\n".join(out)


# ---- main ----------------------------------------------------------------------------------------------------
def main(argv):
    p = argparse.ArgumentParser(description="Summaries, statistics and report of a study of paired runs.",
                                allow_abbrev=False)
    p.add_argument("study", nargs="?",
                   help="study file; without it the report is made from the summaries alone")
    p.add_argument("--root", help="folder of the runs (default runs/paired/<name of the study>)")
    p.add_argument("--results", required=True, help="folder for summaries and report")
    options = p.parse_args(argv)
    try:
        if options.study:
            study = Study(options.study)
            root = options.root or os.path.join("runs", "paired", study.name)
            if not os.path.isdir(root):
                raise StudyError("%s: no such folder of runs" % root)
            collect(study, root, options.results)
        results = Results(options.results)
        write_text(os.path.join(options.results, "report.md"), report(results))
        write_text(os.path.join(options.results, "speed.md"), speed_report(results))
    except StudyError as e:
        print("error: %s" % e, file=sys.stderr)
        return 1
    finished = sum(results.state(r) == "finished" for r in results.study.runs)
    print("%s: %d of %d runs finished" %
          (os.path.join(options.results, "report.md"), finished, len(results.study.runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
