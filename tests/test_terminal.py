"""test_terminal.py - what a run shows on a terminal, on one that is narrow or knows ASCII alone, and in a pipe."""
import fcntl
import os
import pty
import re
import struct
import subprocess
import tempfile
import termios

from check import Skip, case, finish

TRAINER = "./train_rdattnres_cpu"
FLAGS = ("--layers 4 --width 16 --heads 2 --ffn 16 --context 64 --batch 2 --steps 40 --val-every 20"
         " --val-tokens 64 --sample-tokens 20 --checkpoint-every 20 --prompt é").split()


def run_on_terminal(columns, locale, flags=()):
    """What a terminal of so many columns shows in the end, line by line, and all that was sent to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with tempfile.TemporaryDirectory(prefix="rdattnres_terminal_") as folder:
        program = subprocess.Popen([TRAINER, *FLAGS, "--out", folder, *flags], stdout=theirs, stderr=theirs,
                                   env=dict(os.environ, LC_ALL=locale, OMP_NUM_THREADS="1"))
        os.close(theirs)
        sent = b""
        try:
            while chunk := os.read(ours, 65536):
                sent += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(ours)
        assert program.wait() == 0, sent
    text = sent.decode()
    # "\r" goes back to the line's start, "\033[K" empties what is right of it.
    lines = [re.split(r"\r(?=.)", line.rstrip("\r"))[-1].replace("\033[K", "") for line in text.split("\n")]
    return lines, text


def step_lines(lines):
    return [line for line in lines if line.startswith("step ")]


def main():
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with case("a terminal: one step line, renewed; validations, samples and checkpoints stay"):
        lines, text = run_on_terminal(120, "C.UTF-8")
        assert [line.split()[1] for line in step_lines(lines)] == ["40/40"], step_lines(lines)
        assert re.search(r"\rstep +\d+/40  loss \d\.\d+  \S+ tok/s(  \S+ left)?  \[\u2588*\.*\]\033\[K", text)
        for start, count in (("val    step", 3), ("saved ", 2), ("sample ", 1), ("depth routes", 3), ("done ", 1)):
            assert sum(line.startswith(start) for line in lines) == count, (start, text)
        assert "\u2588" in "".join(lines)

    with case("60 columns: no line is longer; the picture of the routes has its numbers alone"):
        lines, text = run_on_terminal(60, "C.UTF-8")
        shown = [line for line in lines if re.match("  layer |depth routes|[ *]*(lr|seed|keep) ", line)]
        renewed = re.findall(r"\r(step [^\r\033]*)\033", text)
        assert renewed and max(map(len, shown + renewed)) < 60, max(shown + renewed, key=len)
        assert not re.search("layer .*[\u2581-\u2588]", text)

    with case("LC_ALL=C: ASCII alone"):
        assert run_on_terminal(120, "C")[1].isascii()

    with case("--log-every 10: these lines stay"):
        lines, _ = run_on_terminal(120, "C", ["--log-every", "10"])
        assert [line.split()[1] for line in step_lines(lines)] == ["10/40", "20/40", "30/40", "40/40"]

    with case("a pipe: the first and last step, then one a second; log.jsonl has them all"), \
            tempfile.TemporaryDirectory(prefix="rdattnres_terminal_") as folder:
        result = subprocess.run([TRAINER, *FLAGS, "--out", folder], stdout=subprocess.PIPE, universal_newlines=True,
                                check=True, env=dict(os.environ, LC_ALL="C.UTF-8", OMP_NUM_THREADS="1"))
        lines = step_lines(result.stdout.split("\n"))
        seconds = int(re.search(r"done .* in (\d+)s", result.stdout).group(1))
        assert 2 <= len(lines) <= 3 + seconds and lines[-1].startswith("step 40/40"), lines
        assert "\r" not in result.stdout
        with open(os.path.join(folder, "log.jsonl")) as log:
            assert log.read().count('"event":"step"') == 40
    finish()


if __name__ == "__main__":
    main()
