#!/usr/bin/env python3
"""ptxas.py - the compiler's report on the kernels that training spends its time in, as one table.

    nvcc ... -Xptxas -v -c train_rdattnres.cu -o /dev/null 2>&1 | python3 dev/ptxas.py      (make ptxas)

Reads what ptxas says on stdin and prints, for every kernel that presets s and m launch in bf16: registers,
spills, shared memory, and the occupancy that these leave, from the documented limits of compute capability 8.0
and 9.0. --all adds every other instantiation, whose launch is not known here, without an occupancy. Exit status
1 if a kernel of the list spills or keeps an array in local memory, or is not in the report: then the list below
is out of date.
"""
import argparse
import re
import subprocess
import sys
from collections import namedtuple

Limits = namedtuple("Limits", "warps blocks registers shared")  # of one multiprocessor; shared in bytes
LIMITS = {"80": Limits(64, 32, 65536, 164 * 1024), "90": Limits(64, 32, 65536, 228 * 1024)}
REGISTER_UNIT, WARP_UNIT = 256, 4  # how registers are given to a warp, and warps counted
SHARED_UNIT, SHARED_RESERVED = 128, 1024  # and shared memory to a block; what the system takes of it

Report = namedtuple("Report", "registers stack stores loads shared")  # as ptxas has it; shared: static, bytes
Launch = namedtuple("Launch", "threads shared")  # of a block; shared: dynamic, bytes


def preset_launches(C, S):
    """What one preset launches in bf16 with heads of 64, by name of the instantiation; see the launchers."""
    bf16, vectors = "__nv_bfloat16", {576: 5, 832: 7}[C]
    warps = -(-C // 128)  # of a block that visits the bank
    width = 128 * warps
    routes = S + S // 2 + 1  # of the last block, the output site's among them: the most that wait
    most = 4 if routes <= 4 else 8 if routes <= 8 else 12
    tile = 64 * (64 + 8) * 2  # bytes of 64 rows of a head
    launches = {
        "route_backward_bank_kernel<%s, %d>" % (bf16, most):
            Launch(32 * warps, routes * (4 * (width + 12 + 8 * warps) + 2 * 2 * width)),
        "rmsnorm_forward_kernel<%s>" % bf16: Launch(128, 0),
        "rmsnorm_backward_kernel<%s>" % bf16: Launch(128, 4 * C * 4),
        "attention_forward_kernel<64, 2>": Launch(128, 6 * tile),
        "attention_backward_q_kernel<64, 2>": Launch(128, 8 * tile),
        "attention_backward_kv_kernel<64, 2>": Launch(128, 8 * tile + 1024),
        "rope_kernel<%s, 8>" % bf16: Launch(256, 0),
        "swiglu_forward_kernel<%s>" % bf16: Launch(256, 0),
        "swiglu_backward_kernel<%s>" % bf16: Launch(256, 0),
        "cross_entropy_kernel<%s>" % bf16: Launch(512, 0),
        "embedding_forward_kernel<%s>" % bf16: Launch(256, 0),
        "embedding_backward_kernel<%s>" % bf16: Launch(256, 0),
        "add_rows_kernel": Launch(256, 0),
        "square_sums_kernel": Launch(256, 0),
        "adamw_kernel<%s>" % bf16: Launch(256, 0),
    }
    for routes_read in (1, 2):
        ring = vectors * 128 * 8  # bytes of a warp's rows on their way
        launches["route_forward_kernel<%s, %d, %d>" % (bf16, vectors, routes_read)] = Launch(128, 4 * ring)
        launches["route_backward_kernel<%s, %d, %d, %d>" % (bf16, vectors, routes_read, routes_read)] = \
            Launch(128, 4 * ((1 + routes_read) * C * 4 + ring))
    return launches


PRESETS = {"s": preset_launches(576, 4), "m": preset_launches(832, 6)}


def demangle(names):
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
        return done.stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        sys.exit("error: c++filt, which comes with the compiler's binutils, is needed to read kernels' names")


def short_name(name):
    """void gpu::f<int, (int)4>(float*, ...) -> f<int, 4>"""
    name = re.sub(r"^void ", "", name.replace("gpu::", "").replace("(int)", ""))
    depth = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return name[:i]
    return name


def parse(text):
    """Reports by (architecture, mangled name), and the lines that are not ptxas's."""
    reports, others, at, spills = {}, [], None, (0, 0, 0)
    for line in text.split("\n"):
        compiling = re.search(r"Compiling entry function '(\S+)' for 'sm_(\d+)", line)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        used = re.search(r"Used (\d+) registers", line)
        if compiling:
            at, spills = (compiling.group(2), compiling.group(1)), (0, 0, 0)
        elif stack:
            spills = tuple(int(n) for n in stack.groups())
        elif used and at:
            shared = re.search(r"(\d+) bytes smem", line)
            reports[at] = Report(int(used.group(1)), *spills, int(shared.group(1)) if shared else 0)
            at = None
        elif line.strip() and not line.startswith("ptxas info"):
            others.append(line)
    return reports, others


def occupancy(report, launch, limits):
    """Share of the multiprocessor's warps that can be there at once, and what keeps others out."""
    up = lambda n, unit: -(-n // unit) * unit
    warps = -(-launch.threads // 32)
    by_registers = limits.registers // up(32 * report.registers, REGISTER_UNIT) // WARP_UNIT * WARP_UNIT
    shared = up(report.shared + launch.shared + SHARED_RESERVED, SHARED_UNIT)
    blocks, why = min((limits.warps // warps, "-"), (limits.blocks, "blocks"),
                      (by_registers // warps, "registers"), (limits.shared // shared, "shared memory"),
                      key=lambda pair: pair[0])
    return blocks * warps / limits.warps, why


def row(kernel, presets, launch, reports):
    """reports: of this kernel, by architecture; None if there is none. launch: None if not known."""
    cells = []
    for sm, report in reports.items():
        share, why = "n/a", "-"
        if report and launch and sm in LIMITS:
            share, why = occupancy(report, launch, LIMITS[sm])
            share = "%.0f%%" % (100 * share)
        shared = report and report.shared + (launch.shared if launch else 0)
        cells.append(["-"] * 6 if not report else
                     [report.registers, report.stores + report.loads, report.stack, shared, share, why])
    same = lambda values: values[0] if len(set(values)) == 1 else " / ".join(values)
    cells = [same([str(cell) for cell in column]) for column in zip(*cells)]
    return [kernel.replace("__nv_", ""), presets, launch.threads if launch else "-"] + cells


def table(rows):
    heads = "kernel preset threads registers spilled local shared occupancy limit".split()
    rows = [heads] + [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--all", action="store_true", help="every instantiation in the report")
    options = options.parse_args()
    reports, others = parse(sys.stdin.read())
    for line in others:
        print(line, file=sys.stderr)
    if not reports:
        sys.exit("error: no report on any kernel; expected what nvcc -Xptxas -v prints")
    names = demangle([name for _, name in reports])
    reports = {(sm, short_name(name)): report for name, ((sm, _), report) in zip(names, reports.items())}
    architectures = sorted({sm for sm, _ in reports})

    launches = {}  # one row where two presets launch a kernel alike
    for preset, of_preset in PRESETS.items():
        for kernel, launch in of_preset.items():
            launches.setdefault((kernel, launch), []).append(preset)
    if options.all:
        listed = {kernel for kernel, _ in launches}
        launches.update({(kernel, None): ["-"] for _, kernel in sorted(reports) if kernel not in listed})
    rows, problems = [], []
    for (kernel, launch), presets in sorted(launches.items(), key=lambda item: (item[1] == ["-"], item[0][0])):
        found = {sm: reports.get((sm, kernel)) for sm in architectures}
        rows.append(row(kernel, ", ".join(presets), launch, found))
        for sm, report in found.items():
            if launch and not report:
                problems.append("%s is not in the report for sm_%s; see preset_launches in dev/ptxas.py"
                                % (kernel, sm))
            elif launch and (report.stores or report.loads or report.stack):
                problems.append("%s for sm_%s: %d bytes of spills stored, %d loaded, %d of local memory"
                                % (kernel, sm, report.stores, report.loads, report.stack))
    print("where they differ, " + " / ".join("sm_" + sm for sm in architectures) + "; shared memory in bytes\n")
    print(table(rows))
    for problem in problems:
        print("error: " + problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
