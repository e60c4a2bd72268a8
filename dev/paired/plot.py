#!/usr/bin/env python3
"""plot.py - the pictures of a study, from the summaries that analyse.py wrote.

    python3 dev/paired/plot.py --results DIR [--beside DIR] [--if-possible]

writes into DIR/pictures, each as PNG and SVG:
    loss      validation loss against tokens, all arms, with the band of the seeds
    pairs     paired differences rd - block, seed by seed, with mean and 95% interval, beside the paper's
    gap       every arm minus block along the tokens; rd with its pairs and 95% band
    beside_*  the same gap of rd, beside that of another study (--beside)
    routes_*  depth routes of rd, one picture a size: layer by source, QK beside V
    js        Jensen-Shannon divergence between the two routes, by layer

Colours are Okabe and Ito's, told apart by colour-blind readers; every arm has its own dash and marker too, so
that a grey print still tells them apart. The same summaries give the same files. Needs matplotlib; where it
is missing the exit status is 1, or with --if-possible 0 and a line that says so.
"""

import argparse
import math
import os
import statistics
import sys

from analyse import PAPER, Comparison, Results, signed, tokens_text
from study import ARMS, BASELINE, PROPOSAL, StudyError, is_number

LOOKS = {  # arm: colour, dash, marker
    "residual": ("#666666", (0, (5, 2)), "s"), "block": ("#0072B2", "-", "o"), "rd": ("#D55E00", "-", "D"),
    "tied": ("#56B4E9", (0, (1, 1.5)), "x"), "average": ("#009E73", (0, (6, 2, 1, 2)), "^"),
    "frozen-v": ("#CC79A7", (0, (3, 1.5)), "v")
}
STYLE = {
    "figure.dpi": 100, "savefig.dpi": 160, "figure.constrained_layout.use": True, "font.size": 10,
    "axes.titlesize": 10.5, "axes.labelsize": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "axes.edgecolor": "#444444", "grid.color": "#dddddd",
    "grid.linewidth": 0.6, "legend.frameon": False, "lines.linewidth": 1.6,
    "svg.fonttype": "none", "svg.hashsalt": "rdattnres",
}


def save(fig, folder, name):
    fig.savefig(os.path.join(folder, name + ".png"), metadata={"Software": None})
    fig.savefig(os.path.join(folder, name + ".svg"), metadata={"Date": None, "Creator": None})
    plt.close(fig)


def panels(results, width=4.6, height=3.6, rows=1, **options):
    """A row of panels, one a size."""
    n = len(results.study.sizes)
    fig, axes = plt.subplots(rows, n, figsize=(max(width * n, 5.6), height * rows), squeeze=False, **options)
    return fig, axes


def tokens_axis(ax):
    ax.set_xlabel("training tokens")
    ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: tokens_text(x) if x > 0 else "0"))
    ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6))


def draw_loss(results, folder):
    fig, axes = panels(results, height=3.3, rows=2)
    labels = {}
    for k, size in enumerate(results.study.sizes):
        whole, zoomed = axes[0][k], axes[1][k]
        last = max([t for _, t in results.val_steps(size)] or [1])
        means = []
        for arm in results.arms(size):
            losses = [(t, results.values(size, arm, step).values()) for step, t in results.val_steps(size)]
            points = [(t, v) for t, v in ((t, [x for x in v if is_number(x)]) for t, v in losses) if t > 0 and v]
            if not points:
                continue
            colour, dash, marker = LOOKS[arm]
            for ax, begin in ((whole, 0), (zoomed, 0.6 * last)):
                part = [(t, v) for t, v in points if t >= begin]
                x, mean = [t for t, _ in part], [statistics.fmean(v) for _, v in part]
                ax.fill_between(x, [min(v) for _, v in part], [max(v) for _, v in part], color=colour,
                                alpha=0.13, lw=0)
                (line,) = ax.plot(x, mean, color=colour, ls=dash, marker=marker, ms=4,
                                  markevery=max(1, len(x) // 8), label=arm)
                labels.setdefault(arm, line)
            means += [(t, statistics.fmean(v)) for t, v in points]
        # the first steps would squeeze all the rest against the floor
        late = [m for t, m in means if t >= 0.08 * last]
        if late:
            margin = 0.05 * (max(late) - min(late)) + 1e-3
            whole.set_ylim(min(late) - margin, max(late) + margin)
        whole.set_title(results.label(size))
        zoomed.set_title("the last two fifths", fontsize=9.5)
        zoomed.set_xlim(left=0.59 * last)
        for ax in (whole, zoomed):
            tokens_axis(ax)
        whole.set_xlabel("")
    for ax in (axes[0][0], axes[1][0]):
        ax.set_ylabel("validation loss (nats per token)")
    fig.suptitle("Validation loss: mean of the seeds, band from lowest to highest", fontsize=11)
    legend_below(fig, labels)
    save(fig, folder, "loss")


def legend(ax):
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8.5, loc="best")


def legend_below(fig, labels):
    """One legend for the whole picture, the arms in their usual order."""
    arms = [a for a in ARMS if a in labels]
    if arms:
        fig.legend([labels[a] for a in arms], arms, loc="outside lower center", ncols=len(arms), fontsize=9,
                   handlelength=3)


def interval_mark(ax, y, c, colour, mean=None):
    """Mean and 95% interval as a horizontal bar at height y."""
    mean = c.mean if mean is None else mean
    if c.t:
        ax.plot(c.t, [y, y], color=colour, lw=2.2, solid_capstyle="butt", zorder=2)
        for end in c.t:
            ax.plot([end, end], [y - 0.12, y + 0.12], color=colour, lw=1.6, zorder=2)
    ax.plot([mean], [y], marker="D", ms=7.5, color=colour, mec="white", mew=0.8, zorder=4)


def draw_pairs(results, folder):
    rows = []  # label, comparison, stated mean, colour
    for size in results.study.sizes:
        for step in results.study.milestone_steps[size]:
            c = results.compare(size, PROPOSAL, BASELINE, step)
            tokens = dict(results.val_steps(size)).get(step)
            if c.n:
                rows.append(("%s\n%s tokens, %d pairs" %
                             (results.label(size), tokens_text(tokens), c.n), c, None, LOOKS[PROPOSAL][0]))
    for paper in PAPER:
        c = Comparison(dict(enumerate(paper["seeds"])), dict.fromkeys(range(len(paper["seeds"])), 0.0))
        rows.append(("%s\n%s tokens, read off its figure" %
                     (paper["label"], tokens_text(paper["tokens"])), c, paper["mean"], "#444444"))
    fig, ax = plt.subplots(figsize=(8.4, 0.9 + 0.62 * len(rows)))
    ends = [0.0]
    for i, (_, c, mean, colour) in enumerate(rows):
        y = len(rows) - 1 - i
        interval_mark(ax, y, c, colour, mean)
        ordered = sorted(c.by_seed.items(), key=lambda item: item[1])
        ax.plot([v for _, v in ordered], [y + 0.28] * len(ordered), ls="", marker="o", ms=5, mfc="none",
                mec=colour, mew=1.3, zorder=3)
        ax.text(1.01, y, "%s\n%d of %d lower" %
                (signed(c.mean if mean is None else mean), c.lower, c.lower + c.higher),
                transform=ax.get_yaxis_transform(), va="center", fontsize=8.5)
        ends += list(c.t or []) + c.values
    ax.axvline(0, color="#222222", lw=1)
    ax.set_yticks(range(len(rows)))
    ax.set_yticklabels([r[0] for r in reversed(rows)], fontsize=8.5)
    ax.set_ylim(-0.6, len(rows) - 0.3)
    span = max(ends) - min(ends)
    ax.set_xlim(min(ends) - 0.04 * span, max(ends) + 0.04 * span)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("← %s better        %s − %s, validation loss (nats per token)        %s better →" %
                  (PROPOSAL, PROPOSAL, BASELINE, BASELINE))
    ax.set_title("Pairs (circles), their mean (diamond) and its 95% t interval", loc="left")
    save(fig, folder, "pairs")


def draw_curve(ax, results, size, colour, label="mean"):
    """The gap of one size along the tokens: pairs, mean and 95% interval; the values after the start."""
    steps = [(s, t) for s, t in results.val_steps(size) if s > 0]
    compared = [(t, results.compare(size, PROPOSAL, BASELINE, s)) for s, t in steps]
    compared = [(t, c) for t, c in compared if c.n]
    if not compared:
        return []
    for seed in sorted({s for _, c in compared for s in c.by_seed}):
        line = [(t, c.by_seed[seed]) for t, c in compared if seed in c.by_seed]
        ax.plot(*zip(*line), color=colour, lw=0.8, alpha=0.55)
    banded = [(t, *c.t) for t, c in compared if c.t]
    if banded:
        ax.fill_between(*zip(*banded), color=colour, alpha=0.18, lw=0)
    ax.plot([t for t, _ in compared], [c.mean for _, c in compared], color=colour, lw=2.4, label=label)
    return after_the_start([(t, v) for t, c in compared for v in list(c.t or []) + c.values])


def draw_gap(results, folder):
    fig, axes = panels(results, height=3.2, rows=2, sharex="col", sharey="row")
    labels, early, late = {}, [], []
    for k, size in enumerate(results.study.sizes):
        steps = [(s, t) for s, t in results.val_steps(size) if s > 0]
        top, bottom = axes[0][k], axes[1][k]
        early += draw_curve(top, results, size, LOOKS[PROPOSAL][0])
        top.set_title(results.label(size))
        for arm in results.arms(size):
            compared = [(t, results.compare(size, arm, BASELINE, s)) for s, t in steps]
            line = [(t, c.mean) for t, c in compared if c.n and arm != BASELINE]
            if line:
                colour, dash, marker = LOOKS[arm]
                (labels[arm],) = bottom.plot(*zip(*line), color=colour, ls=dash, marker=marker, ms=4,
                                             markevery=max(1, len(line) // 8))
                late += after_the_start(line)
        tokens_axis(bottom)
        for ax in (top, bottom):
            ax.axhline(0, color="#222222", lw=1, zorder=1)
    fit(axes[0][0], early)
    fit(axes[1][0], late)
    axes[0][0].set_ylabel("%s − %s (nats)" % (PROPOSAL, BASELINE))
    axes[1][0].set_ylabel("arm − %s, mean (nats)" % BASELINE)
    legend_below(fig, labels)
    fig.suptitle("The gap along the tokens (below 0: better than %s)\nabove: pairs, mean, 95%% t interval" %
                 BASELINE, fontsize=10.5)
    save(fig, folder, "gap")


def draw_beside(results, folder, other):
    """The gap of two studies in one panel."""
    fig, ax = plt.subplots(figsize=(7.2, 3.8))
    values = []
    for study, colours in ((results, ["#D55E00", "#CC79A7"]), (other, ["#0072B2", "#009E73"])):
        for size, colour in zip(study.study.sizes, colours):
            pairs = study.compare(size, PROPOSAL, BASELINE, study.last_step(size)).n
            values += draw_curve(ax, study, size, colour, "%s, %d pair%s at the end" %
                                 (study.label(size), pairs, "" if pairs == 1 else "s"))
    ax.axhline(0, color="#222222", lw=1, zorder=1)
    fit(ax, values)
    tokens_axis(ax)
    ax.set_ylabel("%s − %s (nats per token)" % (PROPOSAL, BASELINE))
    ax.set_title("The gap along the tokens: mean (thick), pairs (thin), 95% t interval (band)", loc="left")
    legend(ax)
    save(fig, folder, "beside_" + other.study.name)


def after_the_start(points):
    """The values of the last nine tenths of a run: early differences are large and mean little."""
    last = max(t for t, _ in points)
    return [v for t, v in points if t >= 0.1 * last]


def fit(ax, values):
    """Vertical limits that hold these values and 0."""
    low, high = min(values + [0.0]), max(values + [0.0])
    margin = 0.08 * (high - low) or 1e-3
    ax.set_ylim(low - margin, high + margin)



def draw_routes(results, folder):
    for size in results.study.sizes:
        names, by_seed = results.routes(size)
        if not by_seed:
            continue

        def mean(which):  # over the seeds; NaN where a layer cannot read the source
            return [[math.nan if cell[0] is None else statistics.fmean(cell) for cell in zip(*layer)]
                    for layer in zip(*(pair[which] for pair in by_seed.values()))]

        qk, v = mean(0), mean(1)
        difference = [[b - a for a, b in zip(x, y)] for x, y in zip(qk, v)]
        layers = len(qk)
        most = max(abs(p) for row in difference for p in row if p == p) or 1.0
        high = max([p for row in qk[1:] + v[1:] for p in row if p == p] or [1.0])  # layer 0 is always 1
        weights = dict(cmap="cividis", vmin=0, vmax=high)
        signs = dict(cmap="PuOr_r", vmin=-most, vmax=most)
        width, height = 2.2 + 3 * max(2.4, 0.52 * len(names)), 1.7 + max(1.8, 0.33 * layers)
        fig, axes = plt.subplots(1, 3, figsize=(width, height))
        for ax, cells, title, options in ((axes[0], qk, "QK route", weights), (axes[1], v, "V route", weights),
                                          (axes[2], difference, "V − QK", signs)):
            image = ax.imshow(cells, aspect="auto", **options)
            ax.set_facecolor("#eeeeee")
            ax.grid(False)
            ax.spines[:].set_visible(False)
            ax.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8.5)
            ax.set_yticks(range(layers))
            ax.set_title(title)
            for l, row in enumerate(cells):
                for j, p in enumerate(row):
                    if not math.isnan(p):
                        r, g, b, _ = image.cmap(image.norm(p))
                        text = ("%.2f" % abs(p)).replace("0.", ".", 1)
                        ax.text(j, l, "−" + text if p < -0.005 else text, ha="center", va="center",
                                fontsize=7.5, color="white" if 0.3 * r + 0.59 * g + 0.11 * b < 0.5 else "black")
            fig.colorbar(image, ax=ax, shrink=0.9)
        axes[0].set_ylabel("layer")
        runs = "%d run%s" % (len(by_seed), "" if len(by_seed) == 1 else "s")
        fig.suptitle("Depth routes of %s, %s: mean weight on each source (grey: not readable there), %s" %
                     (PROPOSAL, results.label(size), runs), fontsize=11)
        save(fig, folder, "routes_" + size)


def draw_js(results, folder):
    fig, axes = panels(results, height=3.6, sharey=True)
    for ax, size in zip(axes[0], results.study.sizes):
        by_seed = results.js(size)
        colour = LOOKS[PROPOSAL][0]
        for seed, js in by_seed.items():
            ax.plot(range(len(js)), js, ls="", marker="o", ms=5, mfc="none", mec=colour, alpha=0.8,
                    label="one seed" if seed == min(by_seed) else None)
        if by_seed:
            mean = [statistics.fmean(js) for js in zip(*by_seed.values())]
            ax.plot(range(len(mean)), mean, color=colour, lw=2, label="mean of the seeds")
            ax.set_xticks(range(0, len(mean), max(1, len(mean) // 12)))
        ax.set_ylim(bottom=0)
        bits = ax.secondary_yaxis("right", functions=(lambda n: n / math.log(2), lambda b: b * math.log(2)))
        bits.set_ylabel("bits")
        ax.set_xlabel("layer (layer 0 has one source only)")
        ax.set_ylabel("JS divergence QK against V (nats)")
        ax.set_title(results.label(size))
        legend(ax)
    save(fig, folder, "js")


def draw_all(results, other):
    folder = os.path.join(results.folder, "pictures")
    os.makedirs(folder, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for draw in (draw_loss, draw_pairs, draw_gap, draw_routes, draw_js):
            draw(results, folder)
        if other:
            draw_beside(results, folder, other)
    return folder


def main(argv):
    global matplotlib, plt
    p = argparse.ArgumentParser(description="Pictures of a study of paired runs.", allow_abbrev=False)
    p.add_argument("--results", required=True, help="folder that analyse.py wrote")
    p.add_argument("--beside", metavar="DIR", help="results of another study, for one picture of both gaps")
    p.add_argument("--if-possible", action="store_true", help="exit with status 0 where matplotlib is missing")
    options = p.parse_args(argv)
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        import matplotlib.ticker  # noqa: F401 (used as matplotlib.ticker)
    except ImportError:
        print("no pictures: matplotlib is not installed",
              file=sys.stdout if options.if_possible else sys.stderr)
        return 0 if options.if_possible else 1
    try:
        other = Results(options.beside) if options.beside else None
        print("pictures in %s" % draw_all(Results(options.results), other))
    except StudyError as e:
        print("error: %s" % e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
