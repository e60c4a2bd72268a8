#!/usr/bin/env python3
"""hide.py - do the routes matter? Hides a source from one route of a trained rd model and measures the loss.

    python3 dev/paired/hide.py SHARD RUN... [--windows 64]

RUN is a folder with a checkpoint and log.jsonl. One layer at a time, three things are hidden, each against the
whole model on the same windows:
    top       from V, the source that its route weighs most (mean over the validation tokens, from the log)
    other     from V, another source drawn at random (the same draw for every run)
    from QK   from Q and K, the source that V weighs most
What is left is read with weights that sum to 1 again. Layer 0 has one source only and is left out. Prints the
rise of the loss in nats per token, a row a layer, as Markdown. Needs torch and safetensors.
"""

import argparse
import os
import random
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "hf"))
import torch  # noqa: E402
from rdattnres import RDAttnRes, load_windows, read  # noqa: E402

from analyse import signed, table  # noqa: E402
from study import Log, StudyError, checkpoints  # noqa: E402


class Hiding(RDAttnRes):
    hidden = {}  # (layer, "qk" or "v") -> index of the source that this route does not see

    def attention_mixes(self, l, sources):
        def mix(route):
            seen = [s for j, s in enumerate(sources) if j != self.hidden.get((l, route))]
            return read(seen, getattr(self, "attn_route_" + route)[l], self.attn_route_gain[l])

        return mix("qk"), mix("v")


def rises(folder, shard, windows):
    """The loss and {layer: (V's top source, rise of the loss for top, other, from QK)}."""
    if not checkpoints(folder):
        raise StudyError("%s: no checkpoint" % folder)
    model = Hiding.from_checkpoint(os.path.join(folder, checkpoints(folder)[-1]))
    if model.config.arch != "rd":
        raise StudyError("%s: arch %s, expected rd" % (folder, model.config.arch))
    routes = Log(os.path.join(folder, "log.jsonl")).routes
    if not routes:
        raise StudyError("%s: the log has no routes of a validation" % folder)
    weights = routes[max(key for key in routes if key[0] == "val")]["v"]
    tokens, targets = load_windows(shard, model.config.T, windows)
    draw = random.Random(1)

    @torch.no_grad()
    def loss(**hidden):
        model.hidden = {(l, route): source for route, source in hidden.items()}
        parts = zip(tokens.split(8), targets.split(8))
        return sum(len(x) * model.loss(x, y).item() for x, y in parts) / len(tokens)

    whole, found = loss(), {}
    for l in range(1, model.config.L):
        top = max(range(len(weights[l])), key=lambda j: weights[l][j])
        other = draw.choice([j for j in range(len(weights[l])) if j != top])
        partial = 2 * l % model.config.S and top == len(weights[l]) - 1
        name = "partial" if partial else "block %d" % top if top else "embedding"
        found[l] = (name, loss(v=top) - whole, loss(v=other) - whole, loss(qk=top) - whole)
    return whole, found


def main(argv):
    p = argparse.ArgumentParser(description="Hides sources from the routes of trained rd models.")
    p.add_argument("shard", help="validation shard")
    p.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run of rd")
    p.add_argument("--windows", type=int, default=64, help="windows of the context's length (default 64)")
    options = p.parse_args(argv)
    try:
        for folder in options.runs:
            whole, found = rises(folder, options.shard, options.windows)
            rows = [[l, name] + [signed(x) for x in rise] for l, (name, *rise) in found.items()]
            means = [signed(statistics.fmean(f[k] for f in found.values())) for k in (1, 2, 3)]
            print("%s, step %d, %d windows: loss %.4f; its rise when one layer's route does not see a source:\n" %
                  (os.path.basename(os.path.normpath(folder)), int(checkpoints(folder)[-1][5:-12]),
                   options.windows, whole))
            head = ["layer", "V's top source", "top from V", "another from V", "top from QK"]
            print("\n".join(table(head, rows + [["mean", ""] + means])))
    except (StudyError, ValueError, OSError) as e:
        print("error: %s" % e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
