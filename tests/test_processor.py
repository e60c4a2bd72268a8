#!/usr/bin/env python3
"""A program built for another processor says which instructions it misses, before it runs into one.

Needs a compiler (CXX, else c++) and, to have something this processor lacks, any x86-64 made after 2017: none
of them has AMD's old FMA4.
"""
import os
import platform
import subprocess
import tempfile

from check import Skip, case, finish

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = """
#include "dev/common/processor.h"
#include <cstdio>
#include <string>
std::string global = "a constructor that runs before main";
int main() { puts(global.c_str()); }
"""


def build_and_run(folder, *flags):
    source, program = os.path.join(folder, "program.cpp"), os.path.join(folder, "program")
    with open(source, "w") as file:
        file.write(PROGRAM)
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-std=c++17", "-O2", *flags, "-I", ROOT, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


with tempfile.TemporaryDirectory() as folder:
    with case("built for this processor: runs"):
        if platform.machine() not in ("x86_64", "AMD64"):
            raise Skip("not an x86-64")
        assert build_and_run(folder, "-march=native")[0] == 0
        assert build_and_run(folder)[0] == 0
    with case("built for a processor with FMA4: one line that names it, exit status 1"):
        if platform.machine() not in ("x86_64", "AMD64"):
            raise Skip("not an x86-64")
        with open("/proc/cpuinfo") as cpuinfo:
            if " fma4 " in cpuinfo.read():
                raise Skip("this processor has FMA4")
        status, out, err = build_and_run(folder, "-march=native", "-mfma4")
        assert status == 1 and out == "", (status, out)
        assert err.startswith("error: ") and "fma4" in err and err.count("\n") == 1, err
finish()
