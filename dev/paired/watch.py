#!/usr/bin/env python3
"""watch.py - live curves of running jobs in the terminal, plain text.

    python3 dev/paired/watch.py RUN...        each RUN a run's folder, or a folder of runs (a study's root)

Draws validation loss against tokens (--train: training loss), one letter a run; below it the same for the
difference to the `block` run of the same name and seed, where there is one; below that a line for each run.
Redrawn every --every seconds until Ctrl-C; --once draws once. It only reads logs, so it may run anywhere that
sees the folders. Standard library only.
"""

import argparse
import math
import os
import shutil
import sys
import time

from study import BASELINE, Log, StudyError, is_number

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def find_runs(paths):
    """Folders with a log, in the order given; a folder of runs stands for its runs."""
    found = []
    for path in paths:
        if os.path.exists(os.path.join(path, "log.jsonl")):
            found.append(path)
        elif os.path.isdir(path):
            found += sorted(
                os.path.join(path, n)
                for n in os.listdir(path)
                if os.path.exists(os.path.join(path, n, "log.jsonl"))
            )
        else:
            raise StudyError("%s: no such folder" % path)
    return found


def short(x):
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if x >= unit:
            return "%.3g%s" % (x / unit, name)
    return "%.3g" % x


def chart(series, width, height, title, zero=False):
    """Lines of text: series is [(letter, [(x, y)])]; where letters meet, a '*'. zero: draw the line y = 0."""
    points = [(x, y) for _, line in series for x, y in line]
    if not points:
        return [title + ": nothing yet"]
    last = max(x for x, _ in points) or 1.0
    late = sorted(y for x, y in points if x >= 0.05 * last)  # the first steps would squeeze the rest
    low, high = (late or sorted(y for _, y in points))[0], (late or sorted(y for _, y in points))[-1]
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-9:
        low, high = low - 0.5 * (abs(low) or 1.0) * 1e-3, high + 0.5 * (abs(high) or 1.0) * 1e-3
    left = 10
    columns, rows = max(width - left - 1, 10), max(height, 4)
    cells = [[" "] * columns for _ in range(rows)]

    def row_of(y):
        return round((high - y) / (high - low) * (rows - 1))

    if zero:
        cells[row_of(0.0)] = ["-"] * columns
    for letter, line in series:
        previous = None
        for x, y in line:
            column, row = round(x / last * (columns - 1)), row_of(y)
            if previous is not None:  # fill the columns between two points
                for c in range(previous[0] + 1, column):
                    between = previous[1] + (y - previous[1]) * (c - previous[0]) / (column - previous[0])
                    put(cells, c, row_of(between), letter)
            put(cells, column, row, letter)
            previous = (column, y)
    lines = [title]
    for i, row in enumerate(cells):
        value = high - (high - low) * i / (rows - 1)
        labelled = i % max(1, (rows - 1) // 4) == 0 or i == rows - 1
        lines.append(("%9.4f |" % value if labelled else " " * 9 + " |") + "".join(row).rstrip())
    lines.append(" " * 9 + " +" + "-" * columns)
    lines.append(" " * left + "0" + ("%s tokens" % short(last)).rjust(columns))
    return lines


def put(cells, column, row, letter):
    if 0 <= row < len(cells) and 0 <= column < len(cells[0]):
        there = cells[row][column]
        cells[row][column] = letter if there in (" ", "-", letter) else "*"


def losses(log, train):
    """[(tokens, loss)] of a run; training losses are averaged over stretches so that they can be seen."""
    if not train:
        return [
            (e["tokens"], e["loss"])
            for (split, s), e in sorted(log.val.items(), key=lambda i: i[0][1])
            if split == "val" and is_number(e["loss"])
        ]
    steps = [log.steps[s] for s in sorted(log.steps) if is_number(log.steps[s]["loss"])]
    size = max(1, len(steps) // 60)
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [(p[-1]["tokens"], math.fsum(e["loss"] for e in p) / len(p)) for p in parts]


def name_of(path):
    return os.path.basename(os.path.normpath(path))


def status(letter, path, log, width):
    """One line about a run, its name in so many columns."""
    config = log.config or {}
    total = int(config.get("steps", 0) or 0)
    step, last = log.last_step(), log.steps.get(log.last_step(), {})
    val = losses(log, False)
    text = "%s  %-*s  step %s/%s" % (letter, width, name_of(path), step, total or "?")
    text += "  loss %s" % ("%.4f" % last["loss"] if is_number(last.get("loss")) else "-")
    text += "  val %s" % ("%.4f" % val[-1][1] if val else "-")
    if log.diverged_at is not None:
        return text + "  DIVERGED at step %d" % log.diverged_at
    if log.done is not None and log.done["step"] >= total:
        return text + "  done"
    if is_number(last.get("tok_s")):
        text += "  %s tok/s" % short(last["tok_s"])
    if is_number(last.get("ms")) and total:
        seconds = (total - step) * last["ms"] / 1000
        text += "  eta %d:%02d:%02d" % (seconds // 3600, seconds // 60 % 60, seconds % 60)
    return text


def screen(paths, train, width, height):
    """Everything to show, as lines of text."""
    runs = [
        (LETTERS[i % len(LETTERS)], path, Log(os.path.join(path, "log.jsonl")))
        for i, path in enumerate(find_runs(paths))
    ]
    if not runs:
        return ["no logs yet in " + ", ".join(paths)]
    series = [(letter, losses(log, train)) for letter, _, log in runs]
    base = {}
    for _, path, log in runs:
        if (log.config or {}).get("arch") == BASELINE:
            base[name_of(path)] = {s: e["loss"] for (split, s), e in log.val.items() if split == "val"}
    gaps = []
    for letter, path, log in runs:
        arch = (log.config or {}).get("arch")
        other = base.get(name_of(path).replace("-%s-" % arch, "-%s-" % BASELINE))
        if arch != BASELINE and other:
            gaps.append(
                (
                    letter,
                    [
                        (e["tokens"], e["loss"] - other[s])
                        for (split, s), e in sorted(log.val.items(), key=lambda i: i[0][1])
                        if split == "val" and is_number(e["loss"]) and is_number(other.get(s))
                    ],
                )
            )
    shown = (
        runs if len(runs) <= height // 3 else [r for r in runs if not (r[2].done and r[2].diverged_at is None)]
    )
    lines = [status(*run, max(len(name_of(path)) for _, path, _ in shown)) for run in shown]
    lines += ["%d finished runs not listed" % (len(runs) - len(shown))] if len(shown) < len(runs) else []
    room = max(height - len(lines) - 8, 12)
    out = chart(
        series,
        width,
        room * 3 // 5 if gaps else room,
        "training loss" if train else "validation loss (nats a token)",
    )
    if gaps:
        out += chart(
            gaps, width, room * 2 // 5, "minus %s of the same seed (below 0: better)" % BASELINE, zero=True
        )
    return [line[:width] for line in out + [""] + lines]


def main(argv):
    p = argparse.ArgumentParser(description="Live curves of running jobs, in plain text.", allow_abbrev=False)
    p.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or a folder of runs")
    p.add_argument("--train", action="store_true", help="training loss instead of validation loss")
    p.add_argument("--every", type=float, default=5.0, help="seconds between drawings (default 5)")
    p.add_argument("--once", action="store_true", help="draw once and exit")
    p.add_argument("--width", type=int, help="columns (default: the terminal's)")
    p.add_argument("--height", type=int, help="lines (default: the terminal's)")
    options = p.parse_args(argv)
    try:
        while True:
            size = shutil.get_terminal_size((100, 40))
            text = "\n".join(
                screen(options.runs, options.train, options.width or size.columns, options.height or size.lines)
            )
            if options.once:
                print(text)
                return 0
            sys.stdout.write("\x1b[H\x1b[2J" + text + "\n")
            sys.stdout.flush()
            time.sleep(options.every)
    except KeyboardInterrupt:
        return 0
    except StudyError as e:
        print("error: %s" % e, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
