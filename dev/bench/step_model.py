#!/usr/bin/env python3
"""step_model.py - a prediction: what a step of train_rdattnres must move and compute, and how long that takes.

    python3 dev/bench/step_model.py --preset s --card H100,A100 --arch rd,block

A roofline: a function takes as long as the slower of its matrix products and its memory traffic, each at a
fraction of the card's peak. Nothing here is measured. The fractions are guesses, from the kernels' instructions
and from what is published about kernels like them: expect a total to be 15% off, and a row 30%. Functions and
calls are those of --profile, so that what a card says can be laid beside the prediction.
"""
import argparse
import pathlib
import re

COMMON = pathlib.Path(__file__).resolve().parent.parent / "common"
ARCHS = ("rd", "block", "residual")  # the other arms cost nearly what rd costs

# The card's name in flops.h, which has the peak of its tensor cores. Bytes per second of its memory. The fraction
# of the tensor cores' peak that products, attention and its backward are assumed to reach.
CARDS = {
    "A100": ("NVIDIA A100-SXM4-80GB", 2.039e12, 0.70, 0.37, 0.26),  # memory: NVIDIA A100 data sheet
    "H100": ("NVIDIA H100 80GB HBM3", 3.35e12, 0.58, 0.21, 0.15),  # NVIDIA H100 data sheet, SXM
    "H200": ("NVIDIA H200", 4.8e12, 0.58, 0.21, 0.15),  # NVIDIA H200 data sheet
    "RTX4090": ("NVIDIA GeForce RTX 4090", 1.008e12, 0.80, 0.60, 0.45),  # NVIDIA Ada white paper
}
# The fraction of the memory's peak. Routes wait for sums over channels, which pass through shuffles;
# cross_entropy reads its rows twice, and not all of them wait in the cache.
OF_MEMORY = {"route_forward": 0.72, "route_backward": 0.67, "route_backward_bank": 0.40, "cross_entropy": 0.65}
STREAMING = 0.88  # all other functions
LAUNCH = 1.5e-6  # seconds from one kernel to the next
ADD_ROWS = 6e-6  # seconds to add what some 400 blocks have summed, after each of:
ADDS_ROWS = ("rmsnorm_backward", "route_backward", "route_backward_bank")


def preset(name):
    """The flags of a preset of the CUDA trainer, from flags.h."""
    pattern = rf'{{"{name}",\s*((?:"[^"]*"\s*)+),\s*"[^"]*", "([^"]*)"}}'
    flags, gpu = re.search(pattern, (COMMON / "flags.h").read_text()).groups()
    words = (flags.replace('"', "") + " " + gpu).split()
    return {flag: float(value) for flag, value in zip(words[::2], words[1::2])}


def count_parameters(flags):
    """Numbers in the matrices, padding rows of wte included. Vectors are left out."""
    L, C, F, V = (int(flags[name]) for name in ("layers", "width", "ffn", "vocab"))
    return (V + 127) // 128 * 128 * C + L * (4 * C * C + 3 * C * F)


def count_step(flags, arch):
    """{function: [calls, bytes, FLOPs]} of a step, and the FLOPs that a step needs, as flops.h counts them.

    Bytes are those that the trainer states for --profile, which tests hold to what the emulator counts. Left out is
    what does not grow with tokens times width. FLOPs are those of tensor cores.
    """
    names = ("layers", "width", "ffn", "block-size", "context", "vocab", "batch", "total-batch")
    L, C, F, S, T, V, B, total = (int(flags[name]) for name in names)
    BT, Vp, N = B * T, (V + 127) // 128 * 128, (2 * L + S - 1) // S  # N: blocks
    if B < 1 or total % BT:
        raise SystemExit(f"step_model.py: a step of {total} tokens is not a number of micro-batches of {B} x {T}")
    U = 2 * BT * C  # bytes of C numbers per token in bf16: a source, a mix, ...
    rows, reads = {}, 0

    def add(function, calls, each_bytes, each_flops=0, micro_batches=total // BT):
        row = rows.setdefault(function, [0, 0, 0])
        for column, value in enumerate((1, each_bytes, each_flops)):
            row[column] += micro_batches * calls * value

    def product(function, calls, M, N, K, adds=False):  # out (M,N); each of its numbers is a sum of K products
        weight = function == "matmul_backward_weight"  # float32, always added to
        out = (4 if weight else 2) * (2 if weight or adds else 1)
        add(function, calls, 2 * K * (M + N) + out * M * N, 2 * M * N * K)

    # Sites, from the head's down. Site i reads K sources by R routes.
    waiting = 0  # routes whose shares of the finished sources are added when the block is done
    for i in range(2 * L, -1, -1):
        head = i == 2 * L
        K, R = 1 + (i + S - 1) // S, 2 if arch == "rd" and i % 2 == 0 and not head else 1
        reads += 0 if arch == "residual" else R * K
        if i == 0 or arch == "residual":  # one source: a norm, made again in the backward
            add("rmsnorm_forward", 2, 2 * U)
            add("rmsnorm_backward", 1, 4 * U)
        else:
            partial = 2 if head or i % S else 0  # the running partial's gradient, in and out
            add("route_forward", 1, (K + R) * U)
            add("route_backward", 1, (K + 3 * R + partial) * U)
            waiting += R
        if i % S == 0 and not head and waiting:
            sources = i // S + 1
            visits = 2 if sources == N > 1 else 3  # the first pass of a step overwrites the gradients
            add("route_backward_bank", 1, (visits * sources + waiting) * U)
            waiting = 0

    # Sublayers. What one adds to is read too: the running partial, which the first of a block does not have.
    starts = 0 if arch == "residual" else N
    attention = 2 * C * BT * (T + 1)
    product("matmul_forward", L, BT, 2 * C, C)  # Q and K
    product("matmul_forward", L, BT, C, C)  # V
    add("rope_forward", L, 4 * U)
    add("attention_forward", L, 4 * U, attention)
    product("matmul_forward", starts, BT, C, C)
    product("matmul_forward", L - starts, BT, C, C, adds=True)
    product("matmul_forward", 2 * L, BT, F, C)  # gate and up
    add("swiglu_forward", L, 3 * 2 * BT * F)
    product("matmul_forward", L, BT, C, F, adds=True)

    product("matmul_backward_input", L, BT, F, C)
    add("swiglu_backward", L, 6 * 2 * BT * F)
    product("matmul_backward_weight", L, C, F, BT)
    product("matmul_backward_input", L, BT, C, F)
    product("matmul_backward_input", L, BT, C, F, adds=True)
    product("matmul_backward_weight", 2 * L, F, C, BT)
    product("matmul_backward_input", L, BT, C, C)
    product("matmul_backward_weight", L, C, C, BT)
    add("attention_backward", L, 12 * U, 2.5 * attention)
    add("rope_backward", L, 4 * U)
    product("matmul_backward_input", L, BT, C, 2 * C)
    product("matmul_backward_input", L, BT, C, C, adds=arch != "rd")  # rd: V's mix has a gradient of its own
    product("matmul_backward_weight", L, 2 * C, C, BT)
    product("matmul_backward_weight", L, C, C, BT)

    # The two ends. The head takes the tokens a chunk at a time.
    add("embedding_forward", 1, 2 * U)
    add("embedding_backward", 1, U)
    chunk = min(BT, max(128, 2**28 // Vp // 128 * 128))
    for row in range(0, BT, chunk):
        M = min(chunk, BT - row)
        product("matmul_forward", 1, M, Vp, C)
        add("cross_entropy", 1, 2 * M * (V + Vp))
        product("matmul_backward_input", 1, M, C, Vp)
        product("matmul_backward_weight", 1, Vp, C, M)

    parameters = count_parameters(flags)  # once a step
    add("model_zero_grad", 1, 4 * parameters, micro_batches=1)
    add("global_norm", 1, 4 * parameters, micro_batches=1)
    add("adamw", 1, 30 * parameters, micro_batches=1)
    needed = total * 3 * (2 * (parameters - (Vp - V) * C) + 2 * L * C * (T + 1) + 4 * C * reads)
    return rows, needed


def peak_flops(card):
    return 1e12 * float(re.search(rf'"{CARDS[card][0]}", ([\d.]+)', (COMMON / "flops.h").read_text()).group(1))


def seconds(function, row, card):
    """Predicted time of a row."""
    calls, moved, flops = row
    bandwidth, products, attention, attention_backward = CARDS[card][1:]
    of_peak = {"attention_forward": attention, "attention_backward": attention_backward}.get(function, products)
    compute = flops / (of_peak * peak_flops(card))
    memory = moved / (OF_MEMORY.get(function, STREAMING) * bandwidth)
    return max(compute, memory) + calls * (LAUNCH + (ADD_ROWS if function in ADDS_ROWS else 0))


def predict(flags, arch, card):
    """Predicted time of a step: its functions, one after the other."""
    rows, _ = count_step(flags, arch)
    return sum(seconds(function, row, card) for function, row in rows.items())


def print_table(flags, archs, cards):
    """Markdown. Bytes differ from arm to arm, FLOPs do not."""
    def line(name, *cells):
        print(f"| {name} | {' | '.join(cells)} | |")

    def number(value):
        return "" if value == 0 else f"{value:.0f}" if value >= 10 else f"{value:.1f}"

    counts = {arch: count_step(flags, arch) for arch in archs}
    runs = [(card, arch) for card in cards for arch in archs]
    print(f"| function | TFLOP | {' | '.join(f'GB {arch}' for arch in archs)} "
          f"| {' | '.join(f'ms {card} {arch}' for card, arch in runs)} | measured: nothing yet |")
    print("|---" + "|---:" * (1 + len(archs) + len(runs)) + "|---|")
    for function in dict.fromkeys(function for rows, _ in counts.values() for function in rows):
        row = {arch: rows.get(function, [0, 0, 0]) for arch, (rows, _) in counts.items()}
        line(f"`{function}`", number(row[archs[0]][2] / 1e12), *(number(row[arch][1] / 1e9) for arch in archs),
             *(number(1e3 * seconds(function, row[arch], card)) for card, arch in runs))
    blank = [""] * (1 + len(archs))
    times = [predict(flags, arch, card) for card, arch in runs]
    line("a step", *blank, *(number(1e3 * time) for time in times))
    line("tokens/s", *blank, *(f"{flags['total-batch'] / time / 1e3:.0f}K" for time in times))
    line("share of the peak", *blank, *(f"{counts[arch][1] / time / peak_flops(card):.0%}"
                                        for (card, arch), time in zip(runs, times)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("s", "m"), default="s")
    parser.add_argument("--card", default="H100", help="one or more of " + ",".join(CARDS))
    parser.add_argument("--arch", default="rd", help="one or more of " + ",".join(ARCHS))
    parser.add_argument("--batch", type=int, help="sequences in a micro-batch; default: the preset's")
    options = parser.parse_args()
    for given, known in ((options.card, CARDS), (options.arch, ARCHS)):
        for name in given.split(","):
            if name not in known:
                parser.error(f"got {name}, expected one of {', '.join(known)}")
    flags = preset(options.preset)
    if options.batch is not None:
        flags["batch"] = options.batch
    print_table(flags, options.arch.split(","), options.card.split(","))
