#!/usr/bin/env python3
"""scaling_model.py - a prediction: tokens/s of one training job on 1 to 64 cards.

    python3 dev/bench/scaling_model.py --card H100

A card's own work is that of step_model.py with its share of the step's micro-batches and of AdamW. To that comes,
one after the other, what cards exchange: gradients are reduce-scattered and parameters all-gathered, both in
float32, each passing (N - 1) / N of the family through every card, in a ring. Nothing here is measured.
"""
import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import step_model  # noqa: E402

CARDS = (1, 2, 4, 8, 16, 32, 64)
MACHINE = 8  # cards in a machine, whose network they share
# Nominal bytes a second in one direction: of a card's NVLink (data sheets), of a machine's network. Beside them
# the fraction that large messages of NCCL are assumed to reach.
NVLINK, OF_NVLINK = {"A100": 300e9, "H100": 450e9, "H200": 450e9}, 0.8
NETWORKS, OF_NETWORK = {"NVLink between all": None, "400 Gb/s a machine": 50e9, "100 Gb/s a machine": 12.5e9}, 0.85
LATENCY = 20e-6  # seconds a hop of the ring


def exchange_seconds(numbers, card, cards, network):
    """Reduce-scatter and all-gather of a family of float32 numbers."""
    rate = OF_NVLINK * NVLINK[card]
    if NETWORKS[network] and cards > MACHINE:
        rate = OF_NETWORK * NETWORKS[network]
    return 2 * (cards - 1) * (4 * numbers / cards / rate + LATENCY)


def step_seconds(flags, arch, card, cards, network):
    mine = dict(flags)
    mine["total-batch"] = flags["total-batch"] / cards
    mine["batch"] = min(flags["batch"], mine["total-batch"] / flags["context"])
    rows, _ = step_model.count_step(mine, arch)
    numbers = step_model.count_parameters(flags)
    for function in "adamw", "global_norm":  # of a card's share alone
        rows[function] = [value / cards for value in rows[function]]
    if cards > 1:  # matrices of the other shares are rounded again
        rows["round"] = [1, 6 * numbers, 0]
    own = sum(step_model.seconds(function, row, card) for function, row in rows.items())
    return own + (exchange_seconds(numbers, card, cards, network) if cards > 1 else 0)


def print_table(card, arch):
    print("| cards | " + " | ".join(f"{preset}, {network}" for preset in "sm" for network in NETWORKS) + " |")
    print("|---:" * (1 + 2 * len(NETWORKS)) + "|")
    for cards in CARDS:
        cells = []
        for preset in "sm":
            flags = step_model.preset(preset)
            alone = step_seconds(flags, arch, card, 1, "NVLink between all")
            for network in NETWORKS:
                time = step_seconds(flags, arch, card, cards, network)
                cells.append(f"{flags['total-batch'] / time / 1e6:.2f}M, {alone / time / cards:.0%}")
        print(f"| {cards} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", choices=sorted(NVLINK), default="H100")
    parser.add_argument("--arch", choices=step_model.ARCHS, default="rd")
    options = parser.parse_args()
    print_table(options.card, options.arch)
