#!/usr/bin/env python3
"""The Python of dev/doc/rdattnres.md, run block by block, in order, in one process: each block is a case."""
import pathlib
import re
import subprocess
import sys

from check import case, finish, skip

DOC = pathlib.Path(__file__).resolve().parent.parent / "dev/doc/rdattnres.md"


def blocks(path):
    """(heading it stands under, line of its first line, source) of every ```python block of a Markdown file."""
    heading, start, lines = "", None, []
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if start is not None:
            if line.startswith("```"):
                yield heading, start, "\n".join(lines)
                start, lines = None, []
            else:
                lines.append(line)
        elif line.startswith("```python"):
            start = number + 1
        elif line.startswith("#"):
            heading = re.sub(r"^#+ *", "", line)
    assert start is None, f"{path}: the block opened above line {start} never ends"


def run_blocks(path, namespace):
    """Runs the blocks one after the other in one namespace, with the line numbers of the document."""
    for heading, start, source in blocks(path):
        with case(f"{path.name}:{start} {heading}"):
            exec(compile("\n" * (start - 1) + source, str(path), "exec"), namespace)


if __name__ == "__main__":
    try:
        import numpy  # noqa: F401
        run_blocks(DOC, {"__name__": "doc"})
    except ImportError:
        skip("the derivation's Python", "no numpy on this machine")
    with case("every test that the page names exists"):
        named = re.findall(r'`(test_\w+)`: "([^"]+)"', DOC.read_text())
        assert len(named) > 20
        for test, name in named:
            sources = [path.read_text() for path in pathlib.Path(__file__).parent.glob(test + ".*")]
            assert any(f'"{name}' in source for source in sources), f'no case of {test} begins with "{name}"'
    for name, script in (("depth_memory.svg is what depth_memory.py draws", "depth_memory.py"),
                         ("symbols.md: every link points at the line it names", "symbols.py")):
        with case(name):
            command = [sys.executable, str(DOC.with_name(script)), "--check"]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr.strip()
    finish()
