#!/usr/bin/env python3
"""What is written, held to what it is written about.

The Python of dev/doc/rdattnres.md runs block by block, in order, in one process: each block is a case. Pages
name tests, functions, files, flags and headings that exist. The two trainers have the same functions in the same
order, so that two windows side by side scroll together. The predicted step counts what the trainer's --profile counts.
"""
import re
import subprocess
import sys
import tempfile

from check import Skip, case, finish, skip
from pages import FOLDERS, PAGES, ROOT, Page

sys.path.insert(0, str(ROOT / "dev/bench"))
import step_model  # noqa: E402

DOC = ROOT / "dev/doc/rdattnres.md"
TRAINERS = [ROOT / "train_rdattnres_cpu.cpp", ROOT / "train_rdattnres.cu"]
SOURCES = [path for folder in FOLDERS for path in folder.rglob("*.*")
           if path.suffix in (".h", ".cpp", ".cu", ".py", ".sh")]


def definitions(path):
    """Names of the functions and types that a trainer defines at the outermost level, in order."""
    function = r"^(?!template)\w[\w:<>*& ]*?[\w>*&] (\w+)\((?!.*;$)"
    names = re.findall(rf"{function}|^(?:struct|enum class) (\w+)", path.read_text(), re.M)
    return list(dict.fromkeys(function or kind for function, kind in names))


def check_names(page, sources):
    """Links and the files and flags in inline code."""
    for link in page.links():
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        if not link.startswith("https://"):
            assert target.exists(), f"link to {link}"
            assert not anchor or target.suffix != ".md" or anchor in Page(target).anchors(), f"link to {link}"
    for code in page.inline_code():
        if re.fullmatch(r"[\w./-]+\.(h|cpp|cu|py|sh|md|json|svg)", code):
            there = (ROOT / code).exists() or (page.path.parent / code).exists()
            assert there or f'"{code}"' in sources, f"names {code}: no such file, and nothing writes it"
        for flag in re.findall(r"(?:^|\s)--([a-z][\w-]+)", code):
            known = f'"--{flag}"' in sources or f'{{"{flag}", &O::' in sources
            assert known, f"names --{flag}, which no program has"


def check_step_model(arch):
    """Calls, bytes and the sizes of products, against those that the CUDA trainer states for a small step."""
    trainer = ROOT / "build/train_emulated"
    if not trainer.exists():
        raise Skip(f"no {trainer.name}")
    flags = {"layers": 3, "width": 64, "heads": 2, "ffn": 96, "block-size": 4, "context": 64, "vocab": 257, "batch": 2,
             "total-batch": 256, "steps": 3, "warmup": 1, "val-every": 0, "val-tokens": 64, "sample-tokens": 0}
    with tempfile.TemporaryDirectory() as out:
        command = [trainer, f"--arch={arch}", f"--out={out}/run", "--profile=1"]
        text = subprocess.check_output(command + [f"--{flag}={value}" for flag, value in flags.items()], text=True)
    stated = {}
    row = r"^ *(\d+) +- +- +([\d.]+|-) +- +[\d.-]+ +- +(\w+)(?: (\d+) x (\d+) x (\d+))?$"
    for calls, megabytes, name, *sizes in re.findall(row, text, re.M):
        M, N, K = (int(size or 0) for size in sizes)
        total = stated.setdefault(name, [0, 0, 0])
        total[0] += int(calls)
        total[1] += float(megabytes.replace("-", "0"))
        total[2] += 2 * int(calls) * M * N * K
    for name, (calls, moved, flops) in step_model.count_step(flags, arch)[0].items():
        got = stated[name]
        assert got[0] == calls or name == "adamw", f"{name}: {got[0]} calls, predicted {calls}"
        close = abs(got[1] - moved / 1e6) < 0.02 * got[1] + 0.005  # printed to 0.01; vectors are left out
        assert close or got[1] == 0, f"{name}: {got[1]} MB, predicted {moved / 1e6}"
        assert got[2] in (0, flops), f"{name}: {got[2]} operations, predicted {flops}"


if __name__ == "__main__":
    try:
        import numpy  # noqa: F401
        names = {"__name__": "doc"}
        for block, code in Page(DOC).python():
            with case(f"{DOC.name}:{block.line} {block.heading}"):
                exec(code, names)
    except ImportError:
        skip("the derivation's Python", "no numpy on this machine")
    with case("every test that the derivation names exists"):
        for test, name in re.findall(r'`(test_\w+)`: "([^"]+)"', DOC.read_text()):
            sources = [path.read_text() for path in (ROOT / "tests").glob(test + ".*")]
            assert any(f'"{name}' in source for source in sources), f'no case of {test} begins with "{name}"'
    text = "".join(path.read_text() for path in SOURCES)
    with case("symbols.md: every function and type it names exists"):
        words = set(re.findall(r"\w+", text + "".join(path.read_text() for path in TRAINERS)))
        rows = re.findall(r"\| `(\w+)` \| `(\w+)` \|$", (ROOT / "dev/doc/symbols.md").read_text(), re.M)
        assert not {name for row in rows for name in row} - words, {name for row in rows for name in row} - words
    for page in map(Page, PAGES):
        with case(f"{page.name}: what it links to and the files and flags it names exist"):
            check_names(page, text)
    cuda = Page(ROOT / "dev/cuda/README.md")
    for command in re.findall("python3 (.*step_model.py.*)", "\n".join(block.text for block in cuda.blocks)):
        with case(f"{cuda.name}: the table is what {command} prints"):
            table = subprocess.check_output([sys.executable, *command.split()], cwd=ROOT, text=True)
            assert table in cuda.path.read_text(), "the page has another table"
    for arch in step_model.ARCHS:
        with case(f"step_model.py counts what --profile of the CUDA trainer counts, {arch}"):
            check_step_model(arch)
    with case("both trainers: the same functions in the same order"):
        cpu, gpu = map(definitions, TRAINERS)
        shared = [name for name in cpu if name in gpu]
        print(f"    {len(shared)} in both, of {len(cpu)} and {len(gpu)}")
        for one, other in zip(shared, [name for name in gpu if name in cpu]):
            assert one == other, f"where the CPU trainer has {one}, the CUDA trainer has {other}"
    with case("depth_memory.svg is what depth_memory.py draws"):
        subprocess.run([sys.executable, ROOT / "dev/doc/depth_memory.py", "--check"], check=True)
    finish()
