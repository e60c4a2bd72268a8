#!/usr/bin/env python3
"""The tools of data/ that make and fetch token shards, against small separate implementations.

    python3 tests/test_data_tools.py        (make data/text_to_shards first; make test does)
"""
import contextlib
import functools
import glob
import gzip
import hashlib
import http.server
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

from check import Skip, case, finish

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOOL = os.path.join(ROOT, "data", "text_to_shards")
EOT = 256


# ---- helpers -------------------------------------------------------------------------------------------

def run(*command, status=0, stdin=b"", says="", env=None, **more):
    """Runs a program, checks its exit status and that what it printed holds `says`. Returns what it printed."""
    environment = {**os.environ, **env} if env else None
    done = subprocess.run([str(c) for c in command], input=stdin, env=environment, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    text = done.stdout.decode("utf-8", "replace")
    assert done.returncode == status, f"status {done.returncode}, expected {status}: {text}"
    assert says in text, f"expected '{says}' in: {text}"
    if status:
        assert text.count("\n") == 1 or not text.startswith("error"), f"expected one line: {text}"
    return text


def read_shard(path):
    with open(path, "rb") as file:
        data = file.read()
    magic, version, count = struct.unpack("<3i", data[:12])
    assert (magic, version) == (20240520, 1), f"{path}: {magic}, {version}"
    assert data[12:1024] == bytes(1012), f"{path}: the rest of the header is not zero"
    assert len(data) == 1024 + 2 * count, f"{path}: {len(data)} bytes for {count} tokens"
    return list(struct.unpack(f"<{count}H", data[1024:]))


def read_split(folder, split, name="text"):
    """The tokens of each shard of a split."""
    paths = sorted(glob.glob(f"{folder}/{name}_{split}_*.bin"))
    assert paths == [f"{folder}/{name}_{split}_{i:06d}.bin" for i in range(len(paths))], paths
    return [read_shard(path) for path in paths]


def greedy(documents, limit):
    """Shards of at most `limit` tokens: as many documents as fit, each with an end-of-text in front."""
    shards = [[]]
    for document in documents:
        tokens = [EOT] + list(document)
        if shards[-1] and len(shards[-1]) + len(tokens) > limit:
            shards.append([])
        shards[-1] += tokens
    return shards


def documents_of(shards, eot=EOT):
    """Byte tokens back to documents, in order."""
    found = []
    for tokens in shards:
        assert tokens[0] == eot, "a shard that does not begin with a document"
        for token in tokens:
            if token == eot:
                found.append(bytearray())
            else:
                found[-1].append(token)
    return [bytes(d) for d in found]


def everything(folder, name="text"):
    return {split: documents_of(read_split(folder, split, name)) for split in ("train", "val", "test")}


def split_of(document, val=5, test=5):
    number = int(hashlib.sha256(document).hexdigest()[:8], 16) % 100
    return "test" if number >= 100 - test else "val" if number >= 100 - test - val else "train"


def some_documents(seed, count, longest=200):
    """Lines of nonsense with letters of one to four bytes; no blank lines."""
    rng = random.Random(seed)
    letters = "abcdefgh ABC 0123 ..,'  \t é ß ж 中 😀 \u00a0"
    documents = []
    for _ in range(count):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(1, longest)))
        text = "x" + text.replace(". ", ".\n-") + "y"
        documents.append(text.encode())
    return documents


folders = []


def fresh_folder():
    folders.append(tempfile.mkdtemp(prefix="test_data_"))
    return folders[-1]


def write(folder, name, data):
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        file.write(data)
    return path


def convert(data, *flags, status=0, says="", **more):
    """Runs text_to_shards on one file; returns its documents by split."""
    folder = fresh_folder()
    path = write(folder, "in.txt", data)
    run(TOOL, "--out", folder + "/out", *flags, path, status=status, says=says, **more)
    if status:
        assert not glob.glob(folder + "/out/*.bin"), "a failed run left shards"
        return folder
    return everything(folder + "/out")


def train_only(data, *flags):
    result = convert(data, "--val", "0", "--test", "0", *flags)
    assert not result["val"] and not result["test"]
    return result["train"]


# ---- text_to_shards ------------------------------------------------------------------------------------

def test_text_to_shards():
    with case("text_to_shards is built"):
        assert os.access(TOOL, os.X_OK), "make data/text_to_shards"

    with case("blank lines separate documents; line breaks at their ends are dropped, nothing else"):
        for text, want in [
            (b"one", [b"one"]), (b"one\n", [b"one"]), (b"one\n\ntwo\n", [b"one", b"two"]),
            (b"\n\n\none\n\n\n\n\ntwo\n\n\n", [b"one", b"two"]), (b"a\nb\n\nc", [b"a\nb", b"c"]),
            (b"one\n  \t\ntwo\n ", [b"one", b"two"]),
            (b"one\r\n\r\ntwo\r\nthree\r\n", [b"one", b"two\r\nthree"]),
            (b"  one  \n\n\ttwo", [b"  one  ", b"\ttwo"]), (b"\xef\xbb\xbfone\n\ntwo", [b"one", b"two"]),
            (b"a\n\n\xef\xbb\xbfb", [b"a", b"\xef\xbb\xbfb"]), (b"nul\0byte\n\nx", [b"nul\0byte", b"x"]),
            (b"<|endoftext|>", [b"<|endoftext|>"])]:
            got = train_only(text)
            assert got == want, f"{text}: got {got}, want {want}"

    with case("any separator, with \\n, \\t, \\\\ in it"):
        for flag, text, want in [
            ("<|>", b"a\n\nb<|>c<|><|>\n<|>d\n", [b"a\n\nb", b"c", b"d"]),
            ("\\n", b"a\nb\n\nc", [b"a", b"b", b"c"]),
            ("\\n---\\n", b"a\n---\nb---c\n----\nd", [b"a", b"b---c\n----\nd"]),
            ("\\t", b"a\\tb\tc", [b"a\\tb", b"c"]),
            ("\\\\t", b"a\\tb\tc", [b"a", b"b\tc"]), ("\\r\\n", b"a\r\nb\nc", [b"a", b"b\nc"]),
            ("aab", b"xaaaabyaab", [b"xaa", b"y"])]:
            got = train_only(text, "--separator", flag)
            assert got == want, f"{flag}: got {got}, want {want}"

    with case("the split is the SHA-256 of the document, whatever stands around it, in any order of files"):
        # Lengths 1 to 200 take the padding of the hash through every case of its block of 64 bytes.
        rng = random.Random(5)
        documents = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=1 + i % 200)) for i in range(1200)]
        assert convert(b"\n\n".join(documents)) == {s: [d for d in documents if split_of(d) == s]
                                                    for s in ("train", "val", "test")}
        result = convert(b"\n\n".join(documents), "--val", "30", "--test=0")
        splits = ("train", "val", "test")
        assert result == {s: [d for d in documents if split_of(d, 30, 0) == s] for s in splits}
        print(f"     {len(documents)} documents, --val 30: {len(result['val'])} in val")
        folder = fresh_folder()
        a = write(folder, "a", b"\n\n".join(documents[:700]))
        b = write(folder, "b", b"\n\n".join(documents[700:]))
        run(TOOL, "--out", folder + "/ab", a, b)
        run(TOOL, "--out", folder + "/ba", b, a)
        ab, ba = everything(folder + "/ab"), everything(folder + "/ba")
        assert all(sorted(ab[s]) == sorted(ba[s]) for s in ab) and ab != ba

    with case("--shard-tokens bounds shards; they begin with a document; together they are the large one"):
        documents = some_documents(1, 300) + [b"long " * 300] + some_documents(2, 50)
        text = b"\n\n".join(documents)
        folder = fresh_folder()
        path = write(folder, "in.txt", text)
        run(TOOL, "--out", folder + "/one", "--val", 0, "--test", 0, path)
        run(TOOL, "--out", folder + "/many", "--val", 0, "--test", 0, "--shard-tokens", 1000, "--name", "many",
            path)
        [whole], shards = read_split(folder + "/one", "train"), read_split(folder + "/many", "train", "many")
        assert sum(shards, []) == whole and documents_of(shards) == documents
        assert shards == greedy(documents, 1000)
        alone = [s for s in shards if len(s) > 1000]
        assert len(alone) == 1 and len(alone[0]) == 1501 and alone[0].count(EOT) == 1
        print(f"     {len(shards)} shards of at most 1000 tokens")
        # Documents of ten tokens each fill a shard of 100 to the last place, and leave one free in one of 101.
        tens = [b"%09d" % i for i in range(40)]
        path = write(folder, "tens.txt", b"\n\n".join(tens))
        for limit in (1, 99, 100, 101, 137):
            flags = ["--val", 0, "--test", 0, "--shard-tokens", limit, "--name", f"at{limit}"]
            run(TOOL, "--out", folder + "/many", *flags, path)
            assert read_split(folder + "/many", "train", f"at{limit}") == greedy(tens, limit), limit

    with case("what is printed at the end: documents, bytes, tokens, shards of each split; repaired documents"):
        documents = some_documents(12, 200)
        folder = fresh_folder()
        path = write(folder, "in.txt", b"\n\n".join(documents + [b"\xff", b"\xff\xff"]))
        flags = ["--val", 20, "--shard-tokens", 4000, "--bad-utf8", "replace"]
        text = run(TOOL, "--out", folder + "/out", *flags, path)
        for split, found in everything(folder + "/out").items():
            shards, size = read_split(folder + "/out", split), sum(map(len, found))
            assert f"{split:5} {len(found):9} documents {size:13} bytes {size + len(found):12} tokens in " \
                   f"{len(shards)} shard{'' if len(shards) == 1 else 's'}\n" in text, text
        assert "\n2 documents held bytes that are not UTF-8, replaced" in text, text
        run(TOOL, "--out", folder + "/skip", "--bad-utf8", "skip", path, says="\n2 documents held bytes")

    with case("the first and the last value of a flag"):
        a = [b"%d" % i for i in range(30)]
        text = b"\n\n".join(a)
        for flags, splits in [(("--val", "100", "--test", "0"), "val"),
                              (("--val", "0", "--test", "100"), "test"),
                              (("--val", "60", "--test", "40"), "test val")]:
            result = convert(text, *flags)
            assert sorted(sum((result[s] for s in splits.split()), [])) == sorted(a), flags
            assert result["train"] == [], flags
        convert(text, "--shard-tokens", "2147483647", "--max-document", "1073741824")
        for flag, value in (("--shard-tokens", 2 ** 31), ("--max-document", 2 ** 30 + 1),
                            ("--max-document", 0)):
            convert(text, flag, str(value), status=2, says=flag)

    with case("separators and characters across the edges of the pieces in which a file is read"):
        piece = 1 << 20
        for before in (piece - 3, piece - 2, piece - 1, piece, 2 * piece - 1):
            for separator in (b"\n\n", b"\n \t \n", b"\xc3\xa9\n\n\xc3\xa9"):
                a, b = b"a" * before, b"b" * 10
                want = [a, b] if separator[0] == 10 else [a + b"\xc3\xa9", b"\xc3\xa9" + b]
                assert train_only(a + separator + b) == want, f"{before} bytes before {separator}"
            assert train_only(a + b"<cut>" + b, "--separator", "<cut>") == [a, b]
        one = b"a" * (piece - 1) + b"\n" + b"b" * piece
        assert train_only(one) == [one]

    with case("standard input, a byte at a time, gives the same as a file"):
        text = b"\xef\xbb\xbf" + b"\n\n".join(some_documents(3, 20)) + b"\n \n"
        folder = fresh_folder()
        process = subprocess.Popen([TOOL, "--out", folder + "/out", "--val=0", "--test=0", "-"],
                                   stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for i in range(len(text)):
            process.stdin.write(text[i:i + 1])
            process.stdin.flush()
        process.stdin.close()
        assert process.wait(60) == 0
        assert documents_of(read_split(folder + "/out", "train")) == some_documents(3, 20)

    bad = {"a continuation byte alone": b"\x80", "cut short": b"\xe4\xb8", "too long a form": b"\xc0\xaf",
           "too long a form, 3 bytes": b"\xe0\x80\xaf", "half a surrogate pair": b"\xed\xa0\x80",
           "past U+10FFFF": b"\xf4\x90\x80\x80", "no such byte": b"\xff"}
    with case("bytes that are not UTF-8: an error with their place, U+FFFD for each, or the document left out"):
        for what, bytes_ in bad.items():
            for text in (b"good\n\nab" + bytes_ + b"c\n\nalso good", b"good\n\nab" + bytes_):
                convert(text, status=1, says=f"in.txt: byte 8 (0x{bytes_[0]:02x}) is not UTF-8")
                want = text.decode("utf-8", "replace")
                got = b"\n\n".join(train_only(text, "--bad-utf8", "replace")).decode()
                assert got.replace("\ufffd", "") == want.replace("\ufffd", ""), f"{what}: {got}"
                assert got.count("\ufffd") == len(bytes_), f"{what}: {got}"
                good = [d for d in text.split(b"\n\n") if bytes_ not in d]
                assert train_only(text, "--bad-utf8=skip") == good, what
        print(f"     {len(bad)} kinds of bad bytes")

    with case("the place of a bad byte: behind a byte order mark, far into a file, in the second file"):
        convert(b"\xef\xbb\xbfone\n\nab\xff", status=1, says="in.txt: byte 10 (0xff)")
        text = b"\n\n".join(some_documents(13, 30000))
        assert len(text) > 2 << 20  # pieces
        convert(text + b"\n\n\n\nx\xfe", status=1, says=f"in.txt: byte {len(text) + 5} (0xfe)")
        folder = fresh_folder()
        first, second = write(folder, "first", text), write(folder, "second", b"a\n\nb\n\nc\xfd")
        run(TOOL, "--out", folder + "/out", first, second, status=1, says=f"{second}: byte 7 (0xfd)")

    with case("wrong flags: one line, exit status 2, nothing written"):
        folder = fresh_folder()
        path, out = write(folder, "a", b"a"), folder + "/out"
        for flags, says in [
            ((), "--out"), (("--out", out), "no text files"), (("--out",), "--out: no value"),
            (("--out", out, "--val", "x", path), "--val: got 'x'"),
            (("--out", out, "--val", "101", path), "--val"),
            (("--out", out, "--val=60", "--test=41", path), "60 + 41"),
            (("--out", out, "--nonsense", "1", path), "--nonsense"),
            (("--out", out, "--shard-tokens", "0", path), "--shard-tokens"),
            (("--out", out, "--bad-utf8", "no", path), "--bad-utf8"),
            (("--out", out, "--separator", "", path), "--separator"),
            (("--out", out, "--name", "a/b", path), "--name"),
            (("--out", out, "--shard-tokens", "99999999999999999999", path), "--shard-tokens")]:
            run(TOOL, *flags, status=2, says=says)
            assert not os.path.exists(out), f"{flags}: wrote something"
        run(TOOL, "--help", says="usage:")

    with case("what cannot be read, written or trusted: one line, exit status 1, no shards"):
        folder = fresh_folder()
        path, out = write(folder, "a", b"a"), folder + "/out"
        run(TOOL, "--out", out, path, folder + "/missing", status=1, says=folder + "/missing: cannot read")
        run(TOOL, "--out", out, folder, status=1, says=folder)
        run(TOOL, "--out", path + "/out", path, status=1, says=path)
        run(TOOL, "--out", out, "--tokenizer", folder + "/missing", path, status=1, says="/missing")
        run(TOOL, "--out", out, "--tokenizer", path, path, status=1, says="for a tokenizer")
        run(TOOL, "--out", out, write(folder, "empty", b"\n\n \n"), status=1, says="no document")
        assert not glob.glob(out + "/*.bin")
        for size in (1001, 3000000):
            convert(b"a\n\n" + b"b" * size, "--max-document", "1000", status=1,
                    says="in.txt: the document at byte 3 is longer than 1000 bytes")
        for end in (b"\n\nc", b"\n", b"\r\n\r\n", b""):
            got = train_only(b"a\n\n" + b"b" * 1000 + end, "--max-document", "1000")
            assert got == [b"a", b"b" * 1000] + [b"c"] * (b"c" in end), end

    with case("shards that are there already are not overwritten"):
        folder = fresh_folder()
        path, out = write(folder, "a", b"a"), folder + "/out"
        run(TOOL, "--out", out, path)
        before = {p: open(p, "rb").read() for p in glob.glob(out + "/*")}
        run(TOOL, "--out", out, path, status=1, says="already there")
        assert before == {p: open(p, "rb").read() for p in glob.glob(out + "/*")}
        run(TOOL, "--out", out, "--name", "other", path)

    with case("a disk that is full: an error that names the file, and no shard under its name"):
        text = b"\n\n".join(some_documents(4, 3000))
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (50000, 50000))
        folder = convert(text, "--shard-tokens", "40000", status=1, says="cannot write: File too large",
                         preexec_fn=limit, restore_signals=False)
        # The next run clears up what the broken one left.
        run(TOOL, "--out", folder + "/out", folder + "/in.txt")
        assert sorted(sum(everything(folder + "/out").values(), [])) == sorted(some_documents(4, 3000))
        assert not glob.glob(folder + "/out/.*"), glob.glob(folder + "/out/.*")

    with case("a run that is killed leaves no shards; the next one starts afresh"):
        folder = fresh_folder()
        documents = some_documents(6, 20000)  # more than the tool reads at a time
        process = subprocess.Popen([TOOL, "--out", folder, "--shard-tokens", "1000", "-"],
                                   stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        process.stdin.write(b"\n\n".join(documents) + b"\n\n")
        process.stdin.flush()
        deadline = time.time() + 60
        while len(glob.glob(folder + "/.text.unfinished/*.bin")) < 3 and time.time() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait()
        process.stdin.close()
        left = glob.glob(folder + "/.text.unfinished/*")
        assert len(left) >= 3 and not glob.glob(folder + "/*.bin"), left
        run(TOOL, "--out", folder, "-", stdin=b"\n\n".join(documents[:50]))
        assert sorted(sum(everything(folder).values(), [])) == sorted(documents[:50])
        left = os.listdir(folder)
        assert left == [os.path.basename(p) for p in glob.glob(folder + "/text_*")], left

    with case("memory does not grow with the text"):
        folder, piece, peaks = fresh_folder(), b"\n\n".join(some_documents(7, 5000)) + b"\n\n", {}
        process = subprocess.Popen([TOOL, "--out", folder + "/out", "-"], stdin=subprocess.PIPE,
                                   stdout=subprocess.DEVNULL)
        if not os.path.exists(f"/proc/{process.pid}/status"):
            process.communicate()
            raise Skip("no /proc on this machine to read its memory from")
        sent = 0
        for size in (4 << 20, 64 << 20):
            while sent < size:
                process.stdin.write(piece)
                sent += len(piece)
            with open(f"/proc/{process.pid}/status") as status:
                peaks[sent] = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        process.stdin.close()
        assert process.wait(120) == 0
        for size, peak in peaks.items():
            print(f"     {size >> 20} MiB of text: {peak / 2 ** 20:.1f} MiB of memory")
        first, last = peaks.values()
        assert last - first < 8 << 20, peaks


# ---- fineweb_edu.sh ------------------------------------------------------------------------------------

class Server(http.server.BaseHTTPRequestHandler):
    """Serves the files of a dictionary, with or without ranges; remembers who asked for what."""
    files, asked, ranges, cut = {}, [], True, {}

    def do_GET(self):
        name = self.path.lstrip("/")
        data = self.files.get(name)
        wanted = self.headers.get("Range")
        self.asked.append((name, wanted))
        if data is None:
            self.send_error(404)
            return
        first = int(wanted.split("=")[1].split("-")[0]) if wanted and self.ranges else 0
        if first >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        stop = self.cut.pop(name, len(data))  # once: the connection breaks here
        self.wfile.write(data[first:max(stop, first)])

    def log_message(self, *_):
        pass


def shard(tokens, magic=20240520, version=1, count=None):
    return (struct.pack("<3i", magic, version, len(tokens) if count is None else count).ljust(1024, b"\0")
            + struct.pack(f"<{len(tokens)}H", *tokens))


def test_fineweb_edu_sh():
    script = os.path.join(ROOT, "data", "fineweb_edu.sh")
    for program in ("bash", "curl"):
        if not shutil.which(program):
            with case("fineweb_edu.sh"):
                raise Skip(f"no {program} on this machine")
            return
    val, train = "edu_fineweb_val_000000.bin", "edu_fineweb_train_%06d.bin"
    good = {val: shard([50256, 1, 2])} | {train % i: shard([50256] + [i] * (10000 * i)) for i in range(1, 6)}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # A proxy that the machine may have set must not stand between us and ourselves.
    env = {"FINEWEB_EDU_URL": f"http://127.0.0.1:{server.server_port}", "RETRIES": "2", "no_proxy": "*",
           "NO_PROXY": "*"}

    def fetch(n, folder, says="", status=0, **more):
        Server.asked.clear()
        done = subprocess.run(["bash", script, str(n), folder], env={**os.environ, **env, **more}, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text = done.stdout.decode()
        assert done.returncode == status, f"status {done.returncode}, expected {status}: {text}"
        assert says in text, f"expected '{says}' in: {text}"
        return list(Server.asked)

    def holds(folder, names):
        found = {os.path.basename(p): open(p, "rb").read() for p in glob.glob(folder + "/*")}
        assert found == {n: good[n] for n in names}, f"{sorted(found)}, expected {sorted(names)}, or contents"

    with case("fineweb_edu.sh fetches N shards and the validation shard; a second run fetches nothing"):
        Server.files, folder = dict(good), fresh_folder() + "/new/folder"
        fetch(3, folder, "done: --train")
        holds(folder, [val] + [train % i for i in (1, 2, 3)])
        assert fetch(3, folder, "already there") == []
        assert {name for name, _ in fetch(5, folder, PARALLEL="1")} == {train % 4, train % 5}
        holds(folder, good)

    with case("a broken download goes on where it stopped, within a run and between runs"):
        folder = fresh_folder()
        Server.cut = {train % 2: 15000}
        asked = [r for name, r in fetch(2, folder) if name == train % 2]
        print(f"     ranges asked for: {asked}")
        assert asked == [None, "bytes=15000-"], asked
        holds(folder, [val, train % 1, train % 2])
        folder = fresh_folder()
        write(folder, train % 1 + ".part", good[train % 1][:777])
        write(folder, train % 2 + ".part", good[train % 2])  # whole: only the rename is missing
        asked = fetch(2, folder)
        assert (train % 1, "bytes=777-") in asked and train % 2 not in [name for name, _ in asked], asked
        holds(folder, [val, train % 1, train % 2])

    with case("a server that cannot resume: the file is fetched from its start"):
        Server.ranges, folder = False, fresh_folder()
        write(folder, train % 1 + ".part", good[train % 1][:5000])
        fetch(1, folder)
        Server.ranges = True
        holds(folder, [val, train % 1])

    with case("a file that is not the shard it should be never gets its name"):
        tokens = [50256] * 100
        for wrong, says in [
                (b"<html>sorry</html>" * 100, "magic"), (shard(tokens, magic=7), "magic 7, expected 20240520"),
                (shard(tokens, version=2), "version 2, expected 1"), (b"x" * 100, "too short"),
                (shard(tokens, count=99), "1224 bytes, expected 1222"), (shard(tokens, count=-1), "expected"),
                (shard(tokens, count=101), "incomplete: 1224 bytes of 1226")]:
            Server.files, folder = {**good, train % 2: wrong}, fresh_folder()
            fetch(3, folder, says, status=1)
            holds_names = {os.path.basename(p) for p in glob.glob(folder + "/*.bin")}
            assert holds_names == {val, train % 1, train % 3}, f"{says}: {holds_names}"
            Server.files = dict(good)  # the server is mended: the same command mends the folder
            fetch(3, folder)
            holds(folder, [val] + [train % i for i in (1, 2, 3)])

    with case("a damaged shard already there, a missing file, wrong arguments: refused with a reason"):
        folder = fresh_folder()
        path = write(folder, train % 1, good[train % 1][:-2])
        fetch(1, folder, f"{path}: incomplete", status=1)
        assert open(path, "rb").read() == good[train % 1][:-2]
        del Server.files[train % 3]
        fetch(3, fresh_folder(), "404", status=1)
        for arguments in ([], ["x"], ["-1"], ["1", "a", "b"], ["1000"]):
            run("bash", script, *arguments, status=2, says="usage")
    server.shutdown()

    with case("FINEWEB_EDU_URL may be a folder: file://"):
        source, folder = fresh_folder(), fresh_folder()
        for name, data in good.items():
            write(source, name, data)
        fetch(2, folder, FINEWEB_EDU_URL="file://" + source)
        holds(folder, [val, train % 1, train % 2])


# ---- fineweb_edu.py ------------------------------------------------------------------------------------

def need(*libraries):
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            raise Skip(f"no {name} in this Python")


def jsonl(documents):
    return b"".join(json.dumps({"id": i, "text": d.decode()}).encode() + b"\n" for i, d in enumerate(documents))


BYTES = [bytes([b]) for b in range(256)] + [b"<|endoftext|>"]


def tokenizer_file(tokens, size, eot):
    return (struct.pack("<4I", 20240328, 2, size, eot).ljust(1024, b"\0")
            + b"".join(bytes([len(t)]) + t for t in tokens))


def bytes_tokenizer():
    return tokenizer_file(BYTES, 257, 256)


def test_fineweb_edu_py():
    script = os.path.join(ROOT, "data", "fineweb_edu.py")

    def tokenize(folder, *flags, **more):
        return run(sys.executable, script, "--out", folder + "/out", "--workers", 2, *flags, **more)

    with case("fineweb_edu.py on JSON Lines: every document, split by its hash, as text_to_shards has them"):
        need("numpy", "tiktoken")
        folder, documents = fresh_folder(), some_documents(8, 700)
        path = write(folder, "a.jsonl", jsonl(documents[:400]) + b"\n" + jsonl([b""]))
        more = write(folder, "b.jsonl", jsonl(documents[400:]))
        vocabulary = write(folder, "bytes.bin", bytes_tokenizer())
        flags = ["--shard-tokens", 20000, "--val", 10, "--test", 5]
        tokenize(folder, "--input", path, more, "--tokenizer", vocabulary, *flags)
        assert everything(folder + "/out", "fineweb_edu") == {
            s: [d for d in documents if split_of(d, 10, 5) == s] for s in ("train", "val", "test")}
        text = write(folder, "all.txt", b"\n\n".join(documents))
        run(TOOL, "--out", folder + "/text", "--name", "fineweb_edu", *flags, text)
        shards = sorted(os.path.basename(p) for p in glob.glob(folder + "/text/*.bin"))
        print(f"     {len(shards)} shards, the same bytes from both tools")
        for name in shards:
            assert open(f"{folder}/text/{name}", "rb").read() == open(f"{folder}/out/{name}", "rb").read(), name
        tens = [b"%09d" % i for i in range(40)]
        path = write(folder, "tens.jsonl", jsonl(tens))
        for limit in (1, 100, 101, 109, 137):  # documents of ten tokens
            flags = ["--val", 0, "--test", 0, "--shard-tokens", limit, "--name", f"at{limit}"]
            tokenize(folder, "--input", path, "--tokenizer", vocabulary, *flags)
            assert read_split(folder + "/out", "train", f"at{limit}") == greedy(tens, limit), limit

    with case("fineweb_edu.py: compressed files, half a surrogate pair, --max-tokens, the counts printed"):
        need("numpy", "tiktoken")
        folder, documents = fresh_folder(), some_documents(14, 1000, 2000)
        vocabulary = write(folder, "bytes.bin", bytes_tokenizer())
        path = write(folder, "a.jsonl.gz", gzip.compress(jsonl(documents) + b'{"text": "a\\ud800b"}\n'))
        flags = ["--input", path, "--tokenizer", vocabulary, "--val", 10]
        text = tokenize(folder, *flags)
        found = everything(folder + "/out", "fineweb_edu")
        assert sorted(sum(found.values(), [])) == sorted(documents + [b"a?b"])
        for split, mine in found.items():
            size = sum(map(len, mine))
            assert (f"{split:5} {len(mine):9} documents {size:13} bytes {size + len(mine):12} tokens in 1 "
                    "shard\n" in text), text
        # It stops with the batch (some 260,000 characters) that reaches the number, not before and soon after.
        text = tokenize(folder, *flags, "--max-tokens", 270_000, "--name", "some")
        some = everything(folder + "/out", "some")
        total = sum(len(d) + 1 for mine in some.values() for d in mine)
        assert all(mine == found[split][:len(mine)] for split, mine in some.items())
        in_all = sum(len(d) + 1 for mine in found.values() for d in mine)
        print(f"     {total} tokens with --max-tokens 270000, {in_all} in all")
        assert 270_000 <= total < 270_000 + (1 << 19) < in_all

    with case("fineweb_edu.py on parquet gives what JSON Lines gives"):
        need("numpy", "tiktoken", "pyarrow")
        import pyarrow
        import pyarrow.parquet
        folder, documents = fresh_folder(), some_documents(9, 300)
        path = folder + "/a.parquet"
        table = pyarrow.table({"url": ["x"] * 301, "body": [d.decode() for d in documents] + [None]})
        pyarrow.parquet.write_table(table, path, row_group_size=70)
        vocabulary = write(folder, "bytes.bin", bytes_tokenizer())
        tokenize(folder, "--input", path, "--tokenizer", vocabulary, "--column", "body")
        assert sorted(sum(everything(folder + "/out", "fineweb_edu").values(), [])) == sorted(documents)
        tokenize(folder, "--input", path, "--tokenizer", vocabulary, "--name", "b", status=1,
                 says="no column 'text'")

    with case("a run killed in the middle and started again ends with the files of one left alone"):
        need("numpy", "tiktoken")
        folder, documents = fresh_folder(), some_documents(10, 3000, 1000)
        documents[::10] = [b""] * 300  # counted as read, though nothing is written for them
        vocabulary = write(folder, "bytes.bin", bytes_tokenizer())
        flags = ["--tokenizer", vocabulary, "--shard-tokens", 50000, "--workers", 1, "--save-every", 0.2,
                 "--val", 20]
        alone = folder + "/alone"
        os.mkdir(alone)
        path = write(folder, "a.jsonl", jsonl(documents))
        run(sys.executable, script, "--out", alone, "--input", path, *flags)
        # The run to be killed reads from a pipe that stays open, so it cannot be done before it is killed.
        os.remove(path)
        os.mkfifo(path)
        out = folder + "/out"
        process = subprocess.Popen([sys.executable, script, "--out", out, "--input", path, *map(str, flags)],
                                   stdout=subprocess.DEVNULL, start_new_session=True)
        state, rows, written = out + "/fineweb_edu_state.json", 0, 0
        with contextlib.suppress(BrokenPipeError), open(path, "wb") as pipe:
            data, deadline = jsonl(documents), time.time() + 120
            part = len(data) * 9 // 10

            def feed():
                # Bit by bit, for longer than --save-every: on a fast machine the whole part would be read
                # before the first save is due, and then nothing more would come that could set it off.
                with contextlib.suppress(BrokenPipeError):  # the reader is killed
                    for piece in range(0, part, part // 40):
                        pipe.write(data[piece:min(piece + part // 40, part)])
                        pipe.flush()
                        time.sleep(0.05)

            feeder = threading.Thread(target=feed, daemon=True)
            feeder.start()
            while time.time() < deadline and not (rows and written > 4):
                time.sleep(0.05)
                rows = json.load(open(state))["rows"] if os.path.exists(state) else 0
                written = len(glob.glob(out + "/*.bin"))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            feeder.join(10)
        assert 0 < rows < len(documents), rows
        left = sorted(os.path.basename(p) for p in glob.glob(out + "/*.part"))
        os.remove(path)
        write(folder, "a.jsonl", data)
        text = run(sys.executable, script, "--out", out, "--input", path, *flags, says="going on after ")
        print(f"     killed after {rows} of {len(documents)} documents; unfinished: {', '.join(left)}")
        names = sorted(os.path.basename(p) for p in glob.glob(alone + "/*"))
        assert names == sorted(os.path.basename(p) for p in glob.glob(out + "/*")), glob.glob(out + "/*")
        for name in names:
            assert open(f"{alone}/{name}", "rb").read() == open(f"{out}/{name}", "rb").read(), name
        again = run(sys.executable, script, "--out", out, "--input", path, *flags)  # done: nothing changes
        assert again.splitlines()[1:] == text.splitlines()[1:]
        other = write(folder, "b.jsonl", b"")
        for flag, was, now in [
                ("--test", 1, 3), ("--val", 20, 5), ("--shard-tokens", 50000, 50001), ("--max-tokens", 0, 9),
                ("--column", "text", "body"), ("--vocab-size", 32768, 999), ("--input", f"['{path}']", other),
                ("--tokenizer", vocabulary, "gpt2"), ("--train-bytes", 1000000000, 5)]:
            run(sys.executable, script, "--out", out, "--input", path, *flags, flag, now, status=1,
                says=f"an earlier run had {flag[2:].replace('-', '_')} {was}, now it is")

    with case("fineweb_edu.py stopped anywhere: the folder is again as it was saved, then as if left alone"):
        # The class that writes, without processes: so every pair of a save and a stop can be tried.
        spec = importlib.util.spec_from_file_location("fineweb_edu", script)
        fineweb_edu = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fineweb_edu)
        sizes = [4, 6, 3, 0, 8, 10, 1, 12, 9, 3, 2]  # tokens; full shards, a document longer than a shard
        documents = [(("train", "val")[n % 5 == 4], struct.pack(f"<{size}H", *range(100 * n, 100 * n + size)))
                     for n, size in enumerate(sizes)]

        def holds(folder):  # every token, but no header: that of an unfinished shard counts for nothing
            return {os.path.basename(p): open(p, "rb").read()[1024:] for p in glob.glob(folder + "/*.bin*")}

        def write_on(folder, upto):
            writer = fineweb_edu.Writer(folder, "w", 10, {})
            at_start = holds(folder)
            for split, tokens in documents[writer.state["rows"]:upto]:
                writer.add(split, len(tokens), tokens)
            return writer, at_start

        def finish_all(writer, folder):
            for split in ("train", "val", "test"):
                writer.finish(split)
            return {os.path.basename(p): open(p, "rb").read() for p in glob.glob(folder + "/*.bin*")}

        folder = fresh_folder()
        alone = finish_all(write_on(folder, len(documents))[0], folder)
        shards = [len(shard) for split in ("train", "val") for shard in read_split(folder, split, "w")]
        assert shards == [10, 3, 10, 1, 12, 9, 2, 8, 3], shards
        for saved in range(len(documents)):
            for stopped in range(saved, len(documents) + 1):
                folder = fresh_folder()
                writer, _ = write_on(folder, saved)
                writer.save()
                before = holds(folder)
                for split, tokens in documents[saved:stopped]:
                    writer.add(split, len(tokens), tokens)
                for file in writer.files.values():
                    file.close()  # all of it has reached the disk, but not the state
                writer, after = write_on(folder, len(documents))
                assert after == before, f"saved after {saved}, stopped after {stopped}: {after}, {before}"
                assert finish_all(writer, folder) == alone, f"saved after {saved}, stopped after {stopped}"

    with case("--tokenizer train: a vocabulary of the size asked for, that text_to_shards encodes with alike"):
        need("numpy", "tiktoken", "tokenizers")
        folder = fresh_folder()
        rng = random.Random(11)
        words = ["".join(rng.choice("abcdeéж") for _ in range(rng.randint(2, 7))) for _ in range(300)]
        documents = [" ".join(rng.choices(words, k=60)).encode() + b"  don't 12345!\n\t x" for _ in range(200)]
        path = write(folder, "a.jsonl", jsonl(documents))
        tokenize(folder, "--input", path, "--tokenizer", "train", "--vocab-size", 500, says="vocabulary 500")
        data = open(folder + "/out/fineweb_edu_tokenizer.bin", "rb").read()
        assert struct.unpack("<4I", data[:16]) == (20240328, 2, 500, 499)
        tokens, at = [], 1024
        while at < len(data):
            tokens.append(data[at + 1:at + 1 + data[at]])
            at += 1 + data[at]
        assert len(set(tokens)) == 500 and {bytes([b]) for b in range(256)} == set(tokens[:256])
        text = write(folder, "all.txt", b"<>".join(documents))
        run(TOOL, "--out", folder + "/text", "--name", "fineweb_edu", "--separator", "<>", "--val", 1,
            "--test", 1, "--tokenizer", folder + "/out/fineweb_edu_tokenizer.bin", text)
        count = 0
        for split in ("train", "val", "test"):
            got = read_split(folder + "/out", split, "fineweb_edu")
            assert got == read_split(folder + "/text", split, "fineweb_edu"), split
            back = b"".join(tokens[t] for s in got for t in s)
            assert back == b"".join(tokens[499] + d for d in documents if split_of(d, 1, 1) == split)
            count += sum(map(len, got))
        size = sum(map(len, documents))
        print(f"     {size} bytes are {count} tokens, {size / count:.2f} bytes each")
        assert count < size / 2
        tokenize(folder, "--input", path, "--tokenizer", "train", "--vocab-size", 60000, "--name", "b",
                 status=1, says="--vocab-size 60000")

    with case("fineweb_edu.py refuses what it cannot read: one line, and where"):
        need("numpy", "tiktoken")
        folder = fresh_folder()
        vocabulary = write(folder, "bytes.bin", bytes_tokenizer())
        for i, (data, says) in enumerate([
                (b'{"text": "a"}\n{"text": \n', "line 2"), (b'{"txt": "a"}\n', "line 1: KeyError"),
                (b'["text"]\n', "line 1"), (b'{"text": 5}\n', "type int"), (b"\n", "no document")]):
            path = write(folder, f"{i}.jsonl", data)
            tokenize(folder, "--input", path, "--tokenizer", vocabulary, "--name", f"n{i}", status=1, says=says)
        path = write(folder, "a.jsonl", jsonl([b"a"]))
        tokenize(folder, "--input", folder + "/missing.jsonl", status=1, says="missing.jsonl")
        tokenize(folder, "--input", vocabulary, status=1, says="expected a name")
        tokenize(folder, "--input", path, "--tokenizer", path, "--name", "m", status=1, says="not a tokenizer")
        broken = write(folder, "b.bin", bytes_tokenizer()[:-20])
        tokenize(folder, "--input", path, "--tokenizer", broken, "--name", "k", status=1,
                 says="b.bin: 1530 bytes")
        for name, size, eot, tokens, says in [
                ("first", 257, 0, BYTES[-1:] + BYTES[:-1], "end-of-text is token 0, expected the last, 256"),
                ("past", 257, 257, BYTES, "not a tokenizer"),
                ("short", 256, 255, BYTES[:65] + BYTES[66:], "byte 65")]:
            broken = write(folder, name, tokenizer_file(tokens, size, eot))
            tokenize(folder, "--input", path, "--tokenizer", broken, "--name", name, status=1, says=says)
        tokenize(folder, "--input", path, "--tokenizer", folder + "/none", status=2, says="--tokenizer: got")
        for flag, value in [("--vocab-size", 257), ("--vocab-size", 65537), ("--shard-tokens", 0),
                            ("--shard-tokens", 2 ** 31), ("--workers", 0), ("--val", 100), ("--test", -1)]:
            text = tokenize(folder, "--input", path, "--tokenizer", vocabulary, flag, value, status=2)
            assert flag in text.splitlines()[-1], text  # behind the usage
        write(folder + "/out", "z_train_000000.bin", b"")
        tokenize(folder, "--input", path, "--tokenizer", vocabulary, "--name", "z", status=1,
                 says="already there")


try:
    test_text_to_shards()
    test_fineweb_edu_sh()
    test_fineweb_edu_py()
finally:
    for one in folders:
        shutil.rmtree(one, ignore_errors=True)
finish()
