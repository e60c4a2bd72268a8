#!/usr/bin/env python3
"""dev/ptxas.py reads the compiler's report: canned ones, which need no nvcc, and a real one if there is one."""
import os
import re
import shutil
import subprocess
import sys

from check import Skip, case, finish

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "dev"))
import ptxas  # noqa: E402


def entry(name, sm="80", registers=40, stack=0, stores=0, loads=0, shared=0):
    """One kernel's lines as ptxas writes them. Names may be mangled or not: c++filt leaves others alone."""
    smem = ", %d bytes smem" % shared if shared else ""
    return ("ptxas info    : Compiling entry function '%s' for 'sm_%s'\n"
            "ptxas info    : Function properties for %s\n"
            "    %d bytes stack frame, %d bytes spill stores, %d bytes spill loads\n"
            "ptxas info    : Used %d registers, used 1 barriers%s, 400 bytes cmem[0]\n"
            "ptxas info    : Compile time = 12.345 ms\n"
            % (name, sm, name, stack, stores, loads, registers, smem))


def run(text, *arguments):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "dev", "ptxas.py"), *arguments],
                          input=text, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def mangled(kernel):
    name, _, arguments = kernel.rstrip(">").partition("<")
    codes = ["Li%sE" % word if word.isdigit() else "%d%s" % (len(word), word)
             for word in arguments.split(", ") if word]
    return "_ZN3gpu%d%s%s" % (len(name), name, "I%sEEvv" % "".join(codes) if codes else "Ev")


KERNELS = sorted({kernel for launches in ptxas.PRESETS.values() for kernel in launches})


def everything(sm="80", **changed):
    """A report on every kernel that a preset launches; changed: name without arguments = what is other."""
    return "".join(entry(mangled(k), sm, **changed.get(k.partition("<")[0], {})) for k in KERNELS)


with case("a report is read: registers, stack, spills, static shared memory, for each architecture"):
    text = (entry("f", "80", 72, 16, 8, 12, 1024) + "nvcc warning : something\n"
            + entry("f", "90", 90) + entry("g", "90a", 32))
    reports, others = ptxas.parse(text)
    assert reports == {("80", "f"): (72, 16, 8, 12, 1024), ("90", "f"): (90, 0, 0, 0, 0),
                       ("90", "g"): (32, 0, 0, 0, 0)}, reports
    assert others == ["nvcc warning : something"], others

with case("names: demangled, without namespace, return type, parameters"):
    names = ptxas.demangle(["_ZN3gpu15add_rows_kernelEPfPKfNS_9RouteListEmmm",
                            "_ZN3gpu20route_forward_kernelI13__nv_bfloat16Li3ELi2EEEvPT_"])
    short = [ptxas.short_name(name) for name in names[:2]]
    assert short == ["add_rows_kernel", "route_forward_kernel<__nv_bfloat16, 3, 2>"], names

with case("occupancy, worked by hand from the limits of compute capability 8.0 and 9.0"):
    def occupancy(sm, threads, registers, static=0, dynamic=0):
        report, launch = ptxas.Report(registers, 0, 0, 0, static), ptxas.Launch(threads, dynamic)
        return ptxas.occupancy(report, launch, ptxas.LIMITS[sm])
    # 64 registers x 32 lanes = 2,048 a warp; 65,536 / 2,048 = 32 warps = 4 blocks of 8; of 64 warps half
    assert occupancy("80", 256, 64) == (0.5, "registers")
    # 255 x 32 = 8,160, rounded up to 8,192: 8 warps, 2 blocks of 4
    assert occupancy("80", 128, 255) == (0.125, "registers")
    # 33 x 32 = 1,056 -> 1,280: 51 warps, 48 in whole fours: 6 blocks of 8
    assert occupancy("90", 256, 33) == (0.75, "registers")
    # 32 blocks of one warp
    assert occupancy("80", 32, 16) == (0.5, "blocks")
    # 46,080 + 1,024 reserved = 47,104 of 167,936: 3 blocks of 4 warps; of 233,472: 4
    assert occupancy("80", 128, 32, 0, 46080) == (12 / 64, "shared memory")
    assert occupancy("90", 128, 32, 0, 46080) == (16 / 64, "shared memory")
    # static and dynamic memory count together: 40,000 + 6,080 is the same
    assert occupancy("80", 128, 32, 40000, 6080) == (12 / 64, "shared memory")
    assert occupancy("80", 1024, 32) == (1.0, "-")

with case("a good report: each kernel of the presets in one row, exit status 0"):
    status, out, err = run(everything("80") + everything("90"))
    assert status == 0 and err == "", err
    rows = [line for line in out.split("\n") if line.startswith("|")][2:]
    assert {row.split("|")[1].strip().replace("bfloat16", "__nv_bfloat16") for row in rows} == set(KERNELS)
    assert len({len(row) for row in rows}) == 1  # aligned
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows}
    assert cells["adamw_kernel<bfloat16>"] == ["s, m", "256", "40", "0", "0", "0", "75%", "registers"], cells
    assert cells["attention_forward_kernel<64, 2>"] == ["s, m", "128", "40", "0", "0", "55296", "12% / 25%",
                                                        "shared memory"], cells

with case("a kernel that spills, or keeps arrays in local memory: named, exit status 1, and still a table"):
    for fault in ({"stores": 8, "loads": 12}, {"stack": 32}):
        status, out, err = run(everything("80", swiglu_forward_kernel=fault))
        assert status == 1 and "| swiglu_forward_kernel<bfloat16>" in out
        assert err.count("\n") == 1 and err.startswith("error: swiglu_forward_kernel<__nv_bfloat16>"), err

with case("other instantiations may spill; --all shows them"):
    wide = entry("_ZN3gpu20route_forward_kernelIfLi8ELi2EEEvv", registers=255, stores=100, loads=100)
    text = everything("80") + wide
    status, out, err = run(text)
    assert status == 0 and "float" not in out.replace("bfloat16", ""), err
    shown = run(text, "--all")[1]
    assert re.search(r"\| route_forward_kernel<float, 8, 2> +\| - +\| - +\| 255 +\| 200 ", shown), shown

with case("a kernel that is not in the report: the list is out of date, exit status 1"):
    status, out, err = run(everything("80").replace("attention_forward", "attention_foreward"))
    assert status == 1 and "attention_forward_kernel<64, 2> is not in the report for sm_80" in err, err

with case("a compiler that failed: what it said, exit status 1"):
    status, out, err = run("train_rdattnres.cu(7): error: expected a ;\n")
    assert status == 1 and "expected a ;" in err and "no report on any kernel" in err, err

with case("every kernel of the list is one of train_rdattnres.cu"):
    with open(os.path.join(ROOT, "train_rdattnres.cu")) as file:
        defined = set(re.findall(r"(\w+_kernel)\(", file.read()))
    assert {kernel.partition("<")[0] for kernel in KERNELS} <= defined

with case("make ptxas: no kernel that training spends its time in spills, and nvcc warns of nothing"):
    if not shutil.which("nvcc") and not os.path.exists("/usr/local/cuda/bin/nvcc"):
        raise Skip("no nvcc on this machine")
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    done = subprocess.run(["make", "-s", "ptxas", "GPU_ARCH=80"], cwd=ROOT, env=alone,
                          capture_output=True, text=True)
    print(done.stdout, end="")
    assert done.returncode == 0 and done.stderr == "", done.stderr

finish()
