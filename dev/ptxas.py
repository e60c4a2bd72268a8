#!/usr/bin/env python3
"""ptxas.py - the compiler's report on the CUDA kernels, as one table.

    nvcc ... -Xptxas -v -c train_rdattnres.cu -o /dev/null 2>&1 | python3 dev/ptxas.py      (make ptxas)

One row a kernel and architecture: registers of a thread, bytes spilled, bytes of local memory, bytes of static
shared memory. A star marks what presets s and m launch in bf16; exit status 1 if one of these spills or keeps an
array in local memory, or if a line of STARRED fits no kernel.
"""
import re
import subprocess
import sys

STARRED = [r"^route_\w+<__nv_bfloat16, [57],",     # width 576 and 832, in vectors of 128
           r"_bank_kernel<__nv_bfloat16, (8|12)>",  # the routes that a block of 4 and of 6 sublayers keeps waiting
           r"^attention_\w+<64, ",
           r"^\w+<__nv_bfloat16>$",
           r"^\w+$"]


def short_name(name):
    """void gpu::f<int, (int)4>(float*, ...) -> f<int, 4>"""
    return re.sub(r"^void |gpu::|\((int|bool)\)", "", name).split("(")[0]


def read(text):
    """Rows of the report, and the lines that are not ptxas's."""
    rows, others = [], []
    for line in text.splitlines():
        numbers = [int(number) for number in re.findall(r"\b\d+\b", line)]
        if "Compiling entry function" in line:
            _, mangled, _, architecture, _ = line.split("'")
        elif "bytes stack frame" in line:
            local, stored, loaded = numbers[:3]
        elif "Used" in line and "registers" in line:
            shared = re.search(r"(\d+) bytes smem", line)
            rows.append((mangled, architecture, numbers[0], stored + loaded, local,
                         int(shared.group(1)) if shared else 0))
        elif line.strip() and not line.startswith("ptxas info"):
            others.append(line)
    names = subprocess.run(["c++filt"], input="\n".join(row[0] for row in rows), capture_output=True, text=True,
                           check=True).stdout.split("\n")
    return sorted((short_name(name), *row[1:]) for name, row in zip(names, rows)), others


def main():
    rows, problems = read(sys.stdin.read())
    layout = "{:2}{:58} {:6} {:>9} {:>7} {:>6} {:>6}"
    print(layout.format("", "kernel", "code", "registers", "spilled", "local", "shared"))
    for name, architecture, registers, spilled, local, shared in rows:
        star = any(re.search(pattern, name) for pattern in STARRED)
        print(layout.format("*" if star else "", name, architecture, registers, spilled, local, shared))
        if star and (spilled or local):
            problems.append(f"{name} for {architecture}: {spilled} bytes spilled, {local} of local memory")
    problems += [f"no kernel fits {pattern}; see STARRED in dev/ptxas.py" for pattern in STARRED
                 if not any(re.search(pattern, row[0]) for row in rows)]
    for problem in problems:
        print("error: " + problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
