"""pages.py - the project's Markdown pages, cut into what tests look at: code, links, headings."""
import pathlib
import re
from collections import namedtuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = [ROOT / name for name in ("data", "dev", "tests")]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(path for folder in FOLDERS for path in folder.rglob("*.md"))]

Block = namedtuple("Block", "language heading line text")  # heading: what it stands under; line: its first


class Page:
    """blocks: the fenced ones; prose: the rest, without indented blocks."""

    def __init__(self, path):
        self.path, self.name = path, str(path.relative_to(ROOT))
        self.blocks, self.headings, prose, block = [], [], [], None
        for number, line in enumerate(path.read_text().split("\n"), 1):
            if block is not None and line.startswith("```"):
                self.blocks.append(block._replace(text="\n".join(block.text)))
                block = None
            elif block is not None:
                block.text.append(line)
            elif line.startswith("```"):
                block = Block(line[3:], self.headings[-1], number + 1, [])
            elif not line.startswith("    "):
                prose.append(line)
                if line.startswith("#"):
                    self.headings.append(re.sub(r"^#+ *", "", line))
        assert block is None, f"{self.name}: the block opened above line {block.line} never ends"
        self.prose = "\n".join(prose)

    def python(self):
        """The Python of the page, block by block, compiled with the page's line numbers."""
        for block in self.blocks:
            if block.language == "python":
                yield block, compile("\n" * (block.line - 1) + block.text, str(self.path), "exec")

    def inline_code(self):
        return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", self.prose)]

    def links(self):
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    def anchors(self):
        """What a link may name after '#': headings in lower case, spaces as dashes, most signs dropped."""
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in self.headings}
