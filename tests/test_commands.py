#!/usr/bin/env python3
"""Every command of the pages is run as printed, if it is in RUN, or else checked.

A command is a line of a ```sh block, or inline code that begins with a program. Everything happens in a copy of the
project in a temporary folder. What a check looks at: make targets and variables, with make -n; a trainer's flags,
shards and sizes, with --dry-run; other programs' flags, in their --help; files of the project, by their names.
"""
import glob
import gzip
import os
import pathlib
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile

from check import Skip, case, finish, skip
from pages import PAGES, ROOT, Page

# In this order. Flags behind a command cut a run short that would take a minute.
CUT = " --steps 1 --val-tokens 160 --sample-tokens 0"
RUN = {
    "make data/text_to_shards": "",
    "data/text_to_shards --out shards --val 5 mine/*.txt": "",
    "data/text_to_shards --out shards50k --tokenizer gpt2_tokenizer.bin mine/*.txt": "",
    "gunzip -c big.gz | data/text_to_shards --out shards_big -": "",
    "data/fineweb_edu.sh 1": "",
    "./train_rdattnres_cpu --help": "",
    "./train_rdattnres_cpu --preset s --dry-run": "",
    "make train ARGS='--steps 5000'": " ARGS='" + CUT + "'",
    "./train_rdattnres_cpu --resume runs/tiny": "",
    './train_rdattnres_cpu --init-from runs/tiny --steps 0 --prompt "Ann took"': "",
    "./train_rdattnres_cpu --train 'shards/text_train_*.bin' --val 'shards/text_val_*.bin' "
    "--out runs/mine": CUT,
    "./train_rdattnres_cpu --init-from runs/mine --val 'shards/text_val_*.bin' --steps 0": "",
    "python3 dev/hf/rdattnres.py runs/mine/ckpt_00002400.safetensors shards/text_val_000000.bin": "",
}
TRAINERS = ("./train_rdattnres_cpu", "./train_rdattnres", "build/train_emulated")
INTERPRETERS = ("bash", "python3")
SYSTEM = ("sudo", "gunzip", "git", "cd", "pip")  # not ours to check


# ---- the commands of a page ----------------------------------------------------------------------------

def is_command(code):
    first, *more = code.split()
    return code == "make" or bool(more) and (first in ("make", *INTERPRETERS, "gunzip") or "/" in first)


def commands(page):
    """Every command of the page in one line, without its comment."""
    for block in page.blocks:
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").split("\n"):
                command = " ".join(re.sub(r"(^|\s)# .*", "", line).split())
                if command:
                    yield command
    yield from filter(is_command, page.inline_code())


# ---- a copy of the project, with the files that commands name ------------------------------------------

def shard(path, tokens=2000):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack("<3i", 20240520, 1, tokens).ljust(1024, b"\0")
    path.write_bytes(header + b"".join(struct.pack("<H", n % 256) for n in range(tokens)))


def tokenizer(path):
    """257 tokens: the bytes and end-of-text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack("<4I", 20240328, 2, 257, 256).ljust(1024, b"\0")
    path.write_bytes(header + b"".join(bytes([1, n]) for n in range(256)) + b"\x0d<|endoftext|>")


def make_copy(copy):
    for name in ("Makefile", "train_rdattnres_cpu.cpp", "train_rdattnres.cu", "train_rdattnres_cpu"):
        shutil.copy2(ROOT / name, copy)  # with its time: make must find the program up to date
    for name in (".ci", "data", "dev", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.bin", "__pycache__"))
    text = "\n\n".join(f"Document {n}. " + f"Its word is {n * n}, again and again. " * 8 for n in range(100))
    (copy / "mine").mkdir()
    (copy / "mine/own.txt").write_text(text)
    (copy / "big.gz").write_bytes(gzip.compress(text.encode()))
    tokenizer(copy / "gpt2_tokenizer.bin")
    shard(copy / "mirror/edu_fineweb_train_000001.bin")
    shard(copy / "mirror/edu_fineweb_val_000000.bin")


# ---- running and checking ------------------------------------------------------------------------------

class Project:
    def __init__(self, copy):
        self.copy = copy
        drop = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")  # this test may itself run under make
        self.environment = {name: value for name, value in os.environ.items() if name not in drop}
        self.environment.update(OMP_WAIT_POLICY="passive", FINEWEB_EDU_URL=f"file://{copy}/mirror")
        self.built = set()  # what checked commands would have made

    def shell(self, command):
        result = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=self.copy, env=self.environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        assert result.returncode == 0, f"`{command}`: exit {result.returncode}: {result.stdout.strip()[-300:]}"
        return result.stdout

    def run(self, command, cut):
        if command.startswith("data/fineweb_edu.sh") and not shutil.which("curl"):
            raise Skip("no curl on this machine")
        if command.startswith("python3 dev/hf"):
            need("torch", "safetensors", "numpy")
        self.shell(command + cut)
        if cut:  # the checkpoint gets the name of a whole run's last, which the next commands expect
            [steps] = re.findall(r"schedule +([\d,]+) steps", self.shell(TRAINERS[0] + " --dry-run"))
            for first in self.copy.glob("runs/*/ckpt_00000001.safetensors"):
                first.rename(first.with_name(f"ckpt_{int(steps.replace(',', '')):08}.safetensors"))

    def check(self, command):
        for words in split(command):
            while re.match(r"\w+=", words[0]):  # VARIABLE=value program ...
                self.named_in_source(words.pop(0).split("=")[0])
            program, arguments = words[0], words[1:]
            if program in SYSTEM:
                continue
            if program == "make":
                self.check_make(arguments)
            elif program in TRAINERS:
                self.check_trainer(arguments if program == TRAINERS[0] else without_gpu_flags(arguments))
            else:
                if program in INTERPRETERS:
                    program, *arguments = arguments
                self.check_program(program, arguments)

    def check_make(self, arguments):
        for variable in re.findall(r"^(\w+)=", "\n".join(arguments), re.M):
            assert f"$({variable})" in (ROOT / "Makefile").read_text(), f"the Makefile knows no {variable}"
        plan = self.shell(shlex.join(["make", "-n", "NVCC=nvcc", *arguments]))
        for line in plan.replace("\\\n", " ").split("\n"):
            if any(trainer + " --" in line for trainer in TRAINERS):
                self.check(line)

    def check_trainer(self, arguments):
        """A dry run of the CPU trainer: it has all flags but those for the GPU alone."""
        for flag, value in zip(arguments, arguments[1:]):
            path = self.copy / value.replace("*", "000000")
            if flag in ("--train", "--val") and not glob.glob(str(self.copy / value)):
                shard(path)
            if flag == "--tokenizer" and not path.exists():
                tokenizer(path)
        self.shell(shlex.join([TRAINERS[0], *arguments, "--dry-run"]))

    def check_program(self, program, arguments):
        for word in (program, *arguments):
            ours = word.startswith((".ci/", "data/", "dev/", "tests/")) and "*" not in word
            if ours and ("--out", word) not in zip(arguments, arguments[1:]):
                assert (self.copy / word).exists(), f"there is no {word}"
        if program.startswith("build/"):
            if program not in self.built:
                self.check_make([program])
        elif program == "dev/emulator/build.sh":
            mode, _, output, *_ = arguments
            assert f"\n  {mode}) " in (ROOT / program).read_text(), f"{program} knows no {mode}"
            self.built.add(output)
        elif program.endswith(".py"):
            usage = subprocess.run([sys.executable, program, "--help"], cwd=self.copy, capture_output=True,
                                   text=True)
            if "ModuleNotFoundError" in usage.stderr:
                raise Skip(usage.stderr.strip().split("\n")[-1])
            for flag in (word.split("=")[0] for word in arguments if word.startswith("--")):
                assert re.search(re.escape(flag) + r"\b", usage.stdout), f"{program} has no {flag}"

    def check_presets(self, page):
        """The table of sizes: what each preset is, and its exact parameters with either vocabulary."""
        rows = re.findall(r"^\| `(\w+)` ((?:\| \d+ ){5})\| ([\d,]+).*? \| ([\d,]*) *\|$", page.prose, re.M)
        assert [row[0] for row in rows] == ["tiny", "s", "m"], rows
        for preset, sizes, *counts in rows:
            L, C, NH, F, S = re.findall(r"\d+", sizes)
            for count, vocabulary in zip(filter(None, counts), ("--vocab 32768", "--vocab 50257")):
                run = f"{TRAINERS[0]} --preset {preset} {vocabulary if counts[1] else ''} --dry-run"
                text = " ".join(self.shell(run).split())
                for words in (f"{L} layers, width {C}, {NH} heads of", f"feed-forward {F},", f"blocks of {S},",
                              f"parameters {count} "):
                    assert words in text, f"{run} does not print: {words}"

    def named_in_source(self, variable):
        sources = [ROOT / "Makefile", *(ROOT / "dev/emulator").glob("*.cpp"), *(ROOT / "data").glob("*.sh")]
        assert any(variable in source.read_text() for source in sources), f"nothing looks at {variable}"


def split(command):
    """The simple commands of a line of && and |, each a list of words."""
    words = [[]]
    for word in shlex.split(command):
        words.append([]) if word in ("&&", "|") else words[-1].append(word)
    return words


def without_gpu_flags(arguments):
    """The arguments but for the flags, and their values, that the table has for the CUDA trainer alone."""
    options = (ROOT / "dev/common/flags.h").read_text()
    table = re.findall(r'^ *\{"([\w-]+)", &O::\w+, "(.*?)",.* GPU,', options, re.M)
    assert len(table) > 1, "dev/common/flags.h: the flags for the GPU are not found"
    rest = list(arguments)
    for name, value in table:
        if f"--{name}" in rest:
            at = rest.index(f"--{name}")
            del rest[at:at + (2 if value else 1)]
    return rest


def need(*modules):
    for module in modules:
        try:
            __import__(module)
        except ImportError:
            raise Skip(f"no {module} on this machine")


if __name__ == "__main__":
    found = list(dict.fromkeys(command for page in map(Page, PAGES) for command in commands(page)))
    with case("every command that is run here is on a page"):
        assert RUN.keys() <= set(found), RUN.keys() - set(found)
    if (ROOT / "train_rdattnres_cpu").exists():
        with tempfile.TemporaryDirectory() as folder:
            make_copy(pathlib.Path(folder))
            project = Project(pathlib.Path(folder))
            for command, cut in RUN.items():
                with case(f"runs{', cut short' if cut else ''}: {command}"):
                    project.run(command, cut)
            for command in [c for c in found if c not in RUN]:
                with case(f"its parts exist: {command}"):
                    project.check(command)
            with case("--version: the first section of CHANGELOG.md"):
                version = Page(ROOT / "CHANGELOG.md").headings[1]
                assert project.shell(TRAINERS[0] + " --version") == f"train_rdattnres_cpu {version}\n"
            with case("README.md: the sizes and the parameter counts of the presets"):
                project.check_presets(Page(ROOT / "README.md"))
            os.chdir(folder)
            for page in map(Page, PAGES):
                names = {"document": b"any", "path": "shards/text_val_000000.bin"}
                if page.name == "dev/doc/rdattnres.md":
                    continue  # test_doc.py runs it
                for block, code in page.python():
                    with case(f"{page.name}:{block.line}: the Python under \"{block.heading}\""):
                        need(*set(re.findall(r"^(?:import|from) (numpy|safetensors|torch)", block.text, re.M)))
                        exec(code, names)
            os.chdir(ROOT)
    else:
        skip("running and checking the commands", "make first")
    finish()
