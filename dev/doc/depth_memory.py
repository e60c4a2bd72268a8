#!/usr/bin/env python3
"""Draws dev/doc/depth_memory.svg: who reads what and writes where, with 6 layers in blocks of 4 sublayers.

    python dev/doc/depth_memory.py            # writes the picture beside this file
    python dev/doc/depth_memory.py --check    # exit 1 if the file there is not what this script draws

Standard library only. The picture brings its own background, and follows the reader's light or dark setting.
"""
import pathlib
import sys
from xml.sax.saxutils import escape

L, S = 6, 4
SITES = 2 * L  # the last site, SITES itself, is the head's
WIDTH, HEIGHT = 1000, 706

# name: (light, dark)
PALETTE = {
    "page": ("#ffffff", "#14181f"), "panel": ("#f4f6f9", "#1d232d"), "edge": ("#c9d1db", "#3a4454"),
    "ink": ("#1b2430", "#e8edf4"), "soft": ("#5b6777", "#9aa7b8"), "qk": ("#1f6feb", "#6cb0ff"),
    "v": ("#d9480f", "#ff9a5c"), "one": ("#6b4fbb", "#b79cff"), "done": ("#8ba3bd", "#5f7892"),
    "open": ("#c9dbef", "#33475f"), "write": ("#2b8a3e", "#69db7c"),
}


def style():
    def rules(theme):
        return "".join(f".f-{n}{{fill:{c[theme]}}}.s-{n}{{stroke:{c[theme]};fill:none}}"
                       for n, c in PALETTE.items())
    return ("<style>"
            "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif}"
            ".mono{font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
            f"{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}</style>")


shapes = []


def rect(x, y, w, h, fill, edge=None, r=0):
    shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r}" class="f-{fill}"/>')
    if edge:
        shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r}" class="s-{edge}"/>')


def text(x, y, words, fill="ink", size=13, anchor="start", bold=False, mono=False):
    weight = ' font-weight="600"' if bold else ""
    shapes.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight} '
                  f'class="f-{fill}{" mono" if mono else ""}">{escape(words)}</text>')


def line(x1, y1, x2, y2, color, width=1.5):
    shapes.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke-width="{width}" class="s-{color}"/>')


def dot(x, y, color, r=4.2):
    shapes.append(f'<circle cx="{x:g}" cy="{y:g}" r="{r}" class="f-{color}"/>')


def arrow(x1, y1, x2, y2, color, width=1.5):
    """A straight arrow, along one axis."""
    line(x1, y1, x2, y2, color, width)
    ux, uy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    a, b = (x2 - 7 * ux - 4 * uy, y2 - 7 * uy - 4 * ux), (x2 - 7 * ux + 4 * uy, y2 - 7 * uy + 4 * ux)
    shapes.append(f'<path d="M{x2:g} {y2:g}L{a[0]:g} {a[1]:g}L{b[0]:g} {b[1]:g}z" class="f-{color}"/>')


# ---- upper half: the whole model ------------------------------------------------------------------------
X0, DX, BOX_Y, BOX_H = 172, 62, 92, 40
LANE = [188, 236, 284, 332]  # the embedding and the blocks


def column(i):
    return X0 + i * DX


def sources_of(i):
    """The lanes that site i reads, and whether the last of them is still being built."""
    finished = [0] + [n + 1 for n in range(i // S)]
    return (finished + [i // S + 1], True) if i % S else (finished, False)


def draw_model():
    text(28, 38, "The depth memory", size=20, bold=True)
    text(972, 38, f"{L} layers = {SITES} sublayers, in blocks of S = {S}. A site mixes the lanes marked by its "
         "dots, by a softmax.", "soft", anchor="end")
    for n in range(SITES // S):  # a panel for the sublayers of each block
        x = column(n * S) - 27
        rect(x, 58, S * DX - 6, 318, "panel", r=8)
        text(x + 10, 76, f"block {n + 1} is built", "soft", 12)
    names = ["embedding"] + [f"block {n + 1}" for n in range(SITES // S)]
    for n, (y, name) in enumerate(zip(LANE, names)):
        text(28, y + 5, name, bold=True)
        first = column((n - 1) * S) + 20 if n else column(0) - 40  # the first write to this lane
        if n == 0:
            line(first, y, column(SITES) + 18, y, "done", 14)
            continue
        for k in range(S):  # the partial grows with every output, then it is finished
            last = k == S - 1
            end = column(SITES) + 18 if last else first + DX
            line(first, y, end, y, "done" if last else "open", 5 + 3 * k)
            first = end
    for i in range(SITES + 1):
        x, (lanes, _) = column(i), sources_of(i)
        attention, head = i % 2 == 0 and i < SITES, i == SITES
        routes = [(-15, "qk"), (-4, "v")] if attention else [(-9, "one")]
        for offset, color in routes:
            line(x + offset, BOX_Y + BOX_H, x + offset, LANE[lanes[-1]], color)
            for n in lanes:
                dot(x + offset, LANE[n], color)
        if not head:
            arrow(x + 20, BOX_Y + BOX_H, x + 20, LANE[i // S + 1] - 3, "write")
        rect(x - 25, BOX_Y, 50, BOX_H, "page", "ink" if head else "edge", r=6)
        name = "head" if head else "attn" if attention else "ffn"
        text(x, BOX_Y + 17, name, size=13, anchor="middle", bold=True)
        text(x, BOX_Y + 32, "logits" if head else f"i = {i}", "soft", 11, "middle")
        text(x - 9, 366, str(len(lanes)), size=13, anchor="middle")
    text(28, 366, "sources K")

    y = 402
    for x, color, label in ((28, "qk", "query_qk: the mix for Q and K"), (250, "v", "query_v: the mix for V"),
                            (424, "one", "one query: feed-forward, head")):
        dot(x + 5, y - 4, color)
        text(x + 16, y, label, size=12.5)
    arrow(650, y - 13, 650, y + 4, "write")
    text(662, y, "adds its output", size=12.5)
    line(772, y - 4, 796, y - 4, "open", 9)
    text(804, y, "partial", size=12.5)
    line(866, y - 4, 890, y - 4, "done", 14)
    text(898, y, "finished", size=12.5)


# ---- lower half: one attention site --------------------------------------------------------------------
def draw_site():
    top = 428
    rect(20, top, WIDTH - 40, HEIGHT - top - 20, "panel", r=8)
    text(36, top + 26, "Inside one attention site", size=15, bold=True)
    text(962, top + 26, "here i = 6, at one token; the weights are an example", "soft", anchor="end")
    rows = [("embedding", "done", 0.15, 0.62), ("block 1", "done", 0.25, 0.28), ("partial", "open", 0.60, 0.10)]
    text(262, top + 56, "p_qk", "qk", 13, "middle", mono=True)
    text(352, top + 56, "p_v", "v", 13, "middle", mono=True)
    for j, (name, color, qk, v) in enumerate(rows):
        y = top + 86 + 46 * j
        rect(40, y - 15, 120, 30, color, r=4)
        text(100, y + 5, f"s_{j}  {name}", size=12.5, anchor="middle")
        line(160, y, 225, y, "edge")
        line(301, y, 315, y, "edge")
        for x, share, route in ((225, qk, "qk"), (315, v, "v")):
            rect(x, y - 9, 76, 18, "page", "edge", 3)
            rect(x, y - 9, 76 * share, 18, route, r=3)
            text(x + 71, y + 4, f"{share:.2f}", size=10.5, anchor="end")
    text(40, top + 222, "z_j = query . (gain * rmsnorm(s_j)), p = softmax(z), h = sum_j p_j s_j", size=12.5,
         mono=True)
    text(40, top + 244, "Keys are normalised, values are the raw sources; no 1/sqrt(C), no bias. One gain, two "
         "queries.", "soft", 12)

    y_qk, y_v, middle = top + 94, top + 170, top + 132
    for y, color, mix, weight, result in ((y_qk, "qk", "h_qk", "wqk", "Q, K"), (y_v, "v", "h_v", "wv", "V")):
        arrow(400, y, 436, y, color)
        for x, w, label in ((436, 52, mix), (516, 76, "rmsnorm"), (620, 52, weight)):
            rect(x, y - 16, w, 32, "page", color, 5)
            text(x + w / 2, y + 4, label, size=12.5, anchor="middle", mono=True)
        arrow(488, y, 516, y, color)
        arrow(592, y, 620, y, color)
        text(694, y - 7, result, color, 12.5, "middle", bold=True)
        arrow(672, y, 720, y, color)
    text(554, middle + 4, "one attn_norm for both", "soft", 11.5, "middle")
    rect(720, y_qk - 22, 78, y_v - y_qk + 44, "page", "edge", 6)
    text(759, middle, "attention", size=13, anchor="middle", bold=True)
    text(759, middle + 17, "over time", "soft", 11, "middle")
    arrow(798, middle, 828, middle, "ink")
    rect(828, middle - 16, 40, 32, "page", "ink", 5)
    text(848, middle + 4, "wo", size=12.5, anchor="middle", mono=True)
    arrow(868, middle, 906, middle, "write")
    text(886, middle - 8, "o", "write", 13, "middle", bold=True)
    text(912, middle - 2, "into the", size=12.5)
    text(912, middle + 14, "partial", size=12.5, bold=True)
    text(962, top + 222, "Block AttnRes has one query here: Q, K and V read one mix.", size=12.5, anchor="end")
    text(962, top + 244, "The mixes are thrown away; only o is written.", "soft", 12, "end")


def picture():
    shapes.clear()
    rect(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "page", "edge", 10)
    draw_model()
    draw_site()
    description = ("Columns are sublayers, rows are the embedding and the blocks. Each sublayer reads the "
                   "embedding, all finished blocks and the partial block, attention with two queries, and adds "
                   "its output to the partial.")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img"><title>The depth memory of RD-AttnRes</title>'
            f'<desc>{escape(description)}</desc>\n'
            + style() + "\n" + "\n".join(shapes) + "\n</svg>\n")


if __name__ == "__main__":
    target = pathlib.Path(__file__).with_suffix(".svg")
    if sys.argv[1:] == ["--check"]:
        if not target.exists() or target.read_text() != picture():
            sys.exit(f"{target} is not what {pathlib.Path(__file__).name} draws: run it")
    elif sys.argv[1:]:
        sys.exit(f"unknown argument {sys.argv[1]}: only --check is known")
    else:
        target.write_text(picture())
