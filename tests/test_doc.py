#!/usr/bin/env python3
"""What is written, held to what it is written about.

The Python of dev/doc/rdattnres.md runs block by block, in order, in one process: each block is a case. Pages
name tests, files, flags and headings that exist. The two trainers have the same sections and the same functions
in the same order, so that two windows side by side scroll together. What is made from the sources, or quotes
them, is up to date.
"""
import pathlib
import re
import subprocess
import sys

from check import case, finish, skip
from pages import FOLDERS, PAGES, ROOT, Page

DOC = ROOT / "dev/doc/rdattnres.md"
TRAINERS = [ROOT / "train_rdattnres_cpu.cpp", ROOT / "train_rdattnres.cu"]
SOURCES = [path for folder in FOLDERS for path in folder.rglob("*.*")
           if path.suffix in (".h", ".cpp", ".cu", ".py", ".sh")]


def sections(path):
    return re.findall(r"^// ---- (.*?) -*$", path.read_text(), re.M)


def definitions(path):
    """Names of the functions and types that a trainer defines at the outermost level, in order."""
    function = r"^(?!template)\w[\w:<>*& ]*?[\w>*&] (\w+)\((?!.*;$)"
    names = re.findall(rf"{function}|^(?:struct|enum class) (\w+)", path.read_text(), re.M)
    return list(dict.fromkeys(function or kind for function, kind in names))


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
        named = re.findall(r'`(test_\w+)`: "([^"]+)"', DOC.read_text())
        assert len(named) > 20
        for test, name in named:
            sources = [path.read_text() for path in pathlib.Path(__file__).parent.glob(test + ".*")]
            assert any(f'"{name}' in source for source in sources), f'no case of {test} begins with "{name}"'
    text = "".join(path.read_text() for path in SOURCES)
    for page in map(Page, PAGES):
        with case(f"{page.name}: what it links to and the files and flags it names exist"):
            for link in page.links():
                path, _, anchor = link.partition("#")
                target = (page.path.parent / path).resolve() if path else page.path
                if link.startswith("https://"):
                    continue
                assert target.exists(), f"link to {link}"
                if anchor and target.suffix == ".md":
                    assert anchor in Page(target).anchors(), f"link to {link}"
            for code in page.inline_code():
                if re.fullmatch(r"[\w./-]+\.(h|cpp|cu|py|sh|md|json|svg)", code):
                    there = (ROOT / code).exists() or (page.path.parent / code).exists()
                    assert there or f'"{code}"' in text, f"names {code}: no such file, and nothing writes it"
                for flag in re.findall(r"(?:^|\s)--([a-z][\w-]+)", code):
                    known = f'"--{flag}"' in text or f'{{"{flag}", &O::' in text
                    assert known, f"names --{flag}, which no program has"
    with case("dev/emulator/README.md: every file of the emulator, and its lines to within ten"):
        emulator = ROOT / "dev/emulator"
        said = dict(re.findall(r"^\| `(\w+\.\w+)` \| (\d+) \|", (emulator / "README.md").read_text(), re.M))
        sources = [path.name for path in emulator.glob("*.*") if path.suffix in (".h", ".cpp")]
        assert sorted(said) == sorted(sources)
        for name, lines in said.items():
            found = len((emulator / name).read_text().splitlines())
            assert abs(int(lines) - found) <= 10, f"{name} has {found} lines, the page says {lines}"
    with case("both trainers: the same sections, the same functions, in the same order"):
        for parts in (sections, definitions):
            cpu, gpu = map(parts, TRAINERS)
            shared = [name for name in cpu if name in gpu]
            print(f"    {len(shared)} {parts.__name__} in both, of {len(cpu)} and {len(gpu)}")
            for one, other in zip(shared, [name for name in gpu if name in cpu]):
                assert one == other, f"where the CPU trainer has {one}, the CUDA trainer has {other}"
        assert len(shared) > 50
    for name, script, flag in (
            ("depth_memory.svg is what depth_memory.py draws", "dev/doc/depth_memory.py", "--check"),
            ("symbols.md: every link points at the line it names", "dev/doc/symbols.py", "--check"),
            ("mutants.txt: every fault's text is in its file, its tests exist", "dev/mutate.py", "--list")):
        with case(name):
            result = subprocess.run([sys.executable, ROOT / script, flag], capture_output=True, text=True)
            errors = [line for line in result.stdout.split("\n") if line.startswith("error: ")]
            assert result.returncode == 0, "\n".join(errors + [result.stderr.strip()])
    finish()
