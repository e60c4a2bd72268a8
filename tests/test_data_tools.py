#!/usr/bin/env python3
"""The tools of data/ that make and fetch token shards, against small separate implementations.

    python3 tests/test_data_tools.py        (make data/text_to_shards first; make test does)
"""
import functools
import glob
import gzip
import hashlib
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
import time

from check import Skip, case, finish, skip

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOOL = os.path.join(ROOT, "data", "text_to_shards")
FINEWEB = os.path.join(ROOT, "data", "fineweb_edu.py")
TEMPORARY = tempfile.TemporaryDirectory(prefix="test_data_")
EOT = 256
SPLITS = ("train", "val", "test")
TENS = [b"%09d" % i for i in range(40)]  # ten tokens each fill a shard of 100, leave one free in 101
BYTES = [bytes([b]) for b in range(256)] + [b"<|endoftext|>"]


# ---- helpers -------------------------------------------------------------------------------------------

def run(*command, status=0, says="", env=None, **more):
    """Runs a program, checks its exit status and that what it printed holds `says`. Returns what it printed."""
    done = subprocess.run([str(c) for c in command], env={**os.environ, **(env or {})}, timeout=100,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    text = done.stdout.decode("utf-8", "replace")
    assert done.returncode == status, f"status {done.returncode}, expected {status}: {text}"
    assert says in text, f"expected '{says}' in: {text}"
    assert "Traceback" not in text, text
    if status:
        assert text.count("\n") == 1 or not text.startswith("error"), f"expected one line: {text}"
    return text


def fresh_folder():
    return tempfile.mkdtemp(dir=TEMPORARY.name)


def write(folder, name, data):
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        file.write(data)
    return path


def contents(folder, pattern="*"):
    return {os.path.basename(p): open(p, "rb").read() for p in glob.glob(f"{folder}/{pattern}")}


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


def everything(folder, name="text"):
    """The documents of each split, in order, from shards of bytes."""
    found = {split: [] for split in SPLITS}
    for split in SPLITS:
        for tokens in read_split(folder, split, name):
            assert tokens[0] == EOT, "a shard that does not begin with a document"
            ends = [i for i, token in enumerate(tokens) if token == EOT] + [len(tokens)]
            found[split] += [bytes(tokens[a + 1:b]) for a, b in zip(ends, ends[1:])]
    return found


def by_split(documents, val=5, test=5):
    """What everything() should find."""
    numbers = [int(hashlib.sha256(document).hexdigest()[:8], 16) % 100 for document in documents]
    bounds = {"train": (0, 100 - test - val), "val": (100 - test - val, 100 - test), "test": (100 - test, 100)}
    return {split: [d for d, n in zip(documents, numbers) if first <= n < last]
            for split, (first, last) in bounds.items()}


def some_documents(seed, count, longest=200):
    """Nonsense with letters of one to four bytes; no blank lines."""
    rng = random.Random(seed)
    letters = "abcdefgh ABC 0123 ..,'  \t é ß ж 中 😀 \u00a0"
    texts = ("".join(rng.choices(letters, k=rng.randint(1, longest))) for _ in range(count))
    return [("x" + text.replace(". ", ".\n-") + "y").encode() for text in texts]


def convert(data, *flags, status=0, says="", **more):
    """Runs text_to_shards on one file; returns its documents by split, its folder if it must fail."""
    folder = fresh_folder()
    run(TOOL, "--out", folder + "/out", *flags, write(folder, "in.txt", data), status=status, says=says, **more)
    if status == 0:
        return everything(folder + "/out")
    assert not glob.glob(folder + "/out/*.bin"), "a failed run left shards"
    return folder


def train_only(data, *flags):
    return convert(data, "--val", "0", "--test", "0", *flags)["train"]


def summary(found):
    """The lines about documents of bytes that both tools print at the end."""
    lines = ""
    for split, mine in found.items():
        size = sum(map(len, mine))
        lines += f"{split:5} {len(mine):9} documents {size:13} bytes {size + len(mine):12} tokens in 1 shard\n"
    return lines


# ---- text_to_shards ------------------------------------------------------------------------------------

def test_text_to_shards():
    with case("a separator between documents, blank lines or any other; line breaks at their ends are dropped"):
        for flag, text, want in [
            (None, b"\n\n\none\n\n\n\n\ntwo\n\n\n", [b"one", b"two"]), (None, b"a\nb\n\nc", [b"a\nb", b"c"]),
            (None, b"one\n  \t\ntwo\n ", [b"one", b"two"]), (None, b"  one  \n\n\ttwo", [b"  one  ", b"\ttwo"]),
            (None, b"one\r\n\r\ntwo\r\nthree\r\n", [b"one", b"two\r\nthree"]),
            (None, b"\xef\xbb\xbfone\n\n\xef\xbb\xbftwo", [b"one", b"\xef\xbb\xbftwo"]),
            (None, b"nul\0byte\n\nx", [b"nul\0byte", b"x"]), (None, b"<|endoftext|>", [b"<|endoftext|>"]),
            ("<|>", b"a\n\nb<|>c<|><|>\n<|>d\n", [b"a\n\nb", b"c", b"d"]),
            ("aab", b"xaaaabyaab", [b"xaa", b"y"]),
            ("\\n---\\n", b"a\n---\nb---c\n----\nd", [b"a", b"b---c\n----\nd"]),
            ("\\t", b"a\\tb\tc", [b"a\\tb", b"c"]), ("\\\\t", b"a\\tb\tc", [b"a", b"b\tc"]),
            ("\\r\\n", b"a\r\nb\nc", [b"a", b"b\nc"])]:
            got = train_only(text, *(["--separator", flag] if flag else []))
            assert got == want, f"{flag}, {text}: got {got}, want {want}"

    with case("separators and characters across the edges of the pieces in which a file is read"):
        piece, b = 1 << 20, b"b" * 10
        for before in (piece - 3, piece - 2, piece - 1, piece):
            a = b"a" * before
            assert train_only(a + b"\n \t \n" + b + b"\n\n" + a) == [a, b, a], before
            assert train_only(a + b"\xc3\xa9\n\n" + b) == [a + b"\xc3\xa9", b], before
            assert train_only(a + b"<cut>" + b, "--separator", "<cut>") == [a, b], before
            assert train_only(a + b"\n" + a) == [a + b"\n" + a], before

    with case("the split is the SHA-256 of the document, whatever stands around it, in one file or two"):
        # Lengths 1 to 200 take the padding of the hash through every case of its block of 64 bytes.
        rng = random.Random(5)
        documents = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=1 + i % 200)) for i in range(1200)]
        text = b"\n\n".join(documents)
        assert convert(text) == by_split(documents)
        for val, test in ((30, 0), (0, 100), (60, 40)):
            assert convert(text, f"--val={val}", "--test", str(test)) == by_split(documents, val, test)
        folder = fresh_folder()  # the first file ends with a long document, the second begins with short ones
        first, second = (write(folder, name, b"\n\n".join(half))
                         for name, half in (("a", documents[:800]), ("b", documents[800:])))
        run(TOOL, "--out", folder + "/out", first, second)
        assert everything(folder + "/out") == by_split(documents)

    with case("--shard-tokens bounds shards, which begin with a document; a longer document has its own"):
        documents = some_documents(1, 300) + [b"long " * 300] + some_documents(2, 50)
        for many, limits in ((documents, (1000, 2 ** 31 - 1)), (TENS, (1, 99, 100, 101, 137))):
            for limit in limits:
                folder = fresh_folder()
                run(TOOL, "--out", folder, "--val", 0, "--test", 0, "--shard-tokens", limit, "-",
                    input=b"\n\n".join(many))
                assert read_split(folder, "train") == greedy(many, limit), limit

    with case("what is printed at the end: documents, bytes, tokens, shards of each split; repaired documents"):
        folder = fresh_folder()
        path = write(folder, "in.txt", b"\n\n".join(some_documents(12, 200) + [b"\xff", b"\xff\xff"]))
        text = run(TOOL, "--out", folder + "/out", "--val", 20, "--bad-utf8", "replace", path)
        assert text.startswith(summary(everything(folder + "/out"))), text
        assert "\n2 documents held bytes that are not UTF-8, replaced" in text, text

    with case("bytes that are not UTF-8: an error with their place, U+FFFD for each, or the document left out"):
        # A continuation byte alone, cut short, too long a form (twice), half a surrogate pair, past U+10FFFF,
        # no such byte.
        for bad in (b"\x80", b"\xe4\xb8", b"\xc0\xaf", b"\xe0\x80\xaf", b"\xed\xa0\x80",
                    b"\xf4\x90\x80\x80", b"\xff"):
            for text in (b"good\n\nab" + bad + b"c\n\nalso good", b"good\n\nab" + bad):
                convert(text, status=1, says=f"in.txt: byte 8 (0x{bad[0]:02x}) is not UTF-8")
                documents = text.split(b"\n\n")
                want = [d.replace(bad, b"\xef\xbf\xbd" * len(bad)) for d in documents]
                assert train_only(text, "--bad-utf8", "replace") == want, bad
                assert train_only(text, "--bad-utf8=skip") == [d for d in documents if bad not in d], bad

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
        whole = ["--out", out, path]
        for flags, says in [
            ([path], "--out"), (["--out", out], "no text files"), (["--out"], "--out: no value"),
            ([*whole, "--val", "x"], "--val: got 'x'"), ([*whole, "--nonsense", "1"], "--nonsense"),
            ([*whole, "--val=60", "--test=41"], "60 + 41"), ([*whole, "--shard-tokens", "0"], "--shard-tokens"),
            ([*whole, "--shard-tokens", "2147483648"], "--shard-tokens"),
            ([*whole, "--bad-utf8", "no"], "--bad-utf8"), ([*whole, "--name", "a/b"], "--name"),
            ([*whole, "--max-document", "1073741825"], "--max-document"), ([*whole, "--separator", ""], "--separator")]:
            run(TOOL, *flags, status=2, says=says)
        assert not os.path.exists(out), "wrote something"
        run(TOOL, "--help", says="usage:")

    with case("what cannot be read, written or trusted: one line, exit status 1, no shards"):
        folder = fresh_folder()
        path, out = write(folder, "a", b"a"), folder + "/out"
        for arguments, says in [
            ([out, path, folder + "/missing"], "/missing: cannot read"), ([out, folder], folder),
            ([path + "/out", path], ": cannot create the folder: Not a directory"),
            ([out, "--tokenizer", path, path], path + ": cut short"),
            ([out, write(folder, "empty", b"\n\n \n")], "no document")]:
            run(TOOL, "--out", *arguments, status=1, says=says)
        assert not glob.glob(out + "/*.bin")
        convert(b"a\n\n" + b"b" * 1001, "--max-document", "1000", status=1,
                says="in.txt: the document at byte 3 is longer than 1000 bytes")
        for end in (b"\n\nc", b"\n", b"\r\n\r\n", b""):
            got = train_only(b"a\n\n" + b"b" * 1000 + end, "--max-document", "1000")
            assert got == [b"a", b"b" * 1000] + [b"c"] * (b"c" in end), end
        run(TOOL, "--out", out, path)
        before = contents(out)
        run(TOOL, "--out", out, path, status=1, says="already there")
        assert before == contents(out)

    with case("two runs into one folder: the second is refused, the first ends as if alone; other names go on"):
        folder, documents = fresh_folder(), some_documents(15, 100)
        first = subprocess.Popen([TOOL, "--out", folder, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        while not glob.glob(folder + "/.text.unfinished/lock"):
            time.sleep(0.01)
        time.sleep(0.1)
        run(TOOL, "--out", folder, "-", input=b"other", status=1,
            says=f"/.text.unfinished: in use by another run (process {first.pid})")
        run(TOOL, "--out", folder, "--name", "other", "-", input=b"other")
        first.communicate(b"\n\n".join(documents))
        assert first.returncode == 0 and everything(folder) == by_split(documents)

    with case("a file system without locks: a warning, and the work is done"):
        library = os.path.join(TEMPORARY.name, "nolock.so")
        source = b'#include <errno.h>\nextern "C" int flock(int, int) { errno = ENOLCK; return -1; }'
        compiler = shutil.which("g++") or shutil.which("clang++")
        if not sys.platform.startswith("linux") or not compiler:
            raise Skip("needs Linux and a compiler")
        run(compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", library, input=source)
        folder = fresh_folder()
        run(TOOL, "--out", folder, "-", input=b"a", env={"LD_PRELOAD": library},
            says="lock: cannot lock: No locks available")
        assert everything(folder) == by_split([b"a"])

    with case("a disk that is full: an error that names the file, and no shard under its name"):
        text = b"\n\n".join(some_documents(4, 3000))
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (50000, 50000))
        folder = convert(text, "--shard-tokens", "40000", status=1, says="cannot write: File too large",
                         preexec_fn=limit, restore_signals=False)
        run(TOOL, "--out", folder + "/out", folder + "/in.txt")  # clears up what the broken one left
        assert everything(folder + "/out") == by_split(some_documents(4, 3000))
        assert not glob.glob(folder + "/out/.*"), glob.glob(folder + "/out/.*")

    with case("memory does not grow with the text"):
        piece = b"\n\n".join(some_documents(7, 5000)) + b"\n\n"
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (48 << 20, 48 << 20))
        run(TOOL, "--out", fresh_folder(), "-", input=piece * ((64 << 20) // len(piece)), preexec_fn=limit)


# ---- fineweb_edu.sh ------------------------------------------------------------------------------------

def shard(tokens, magic=20240520, version=1, count=None):
    return (struct.pack("<3i", magic, version, len(tokens) if count is None else count).ljust(1024, b"\0")
            + struct.pack(f"<{len(tokens)}H", *tokens))


def test_fineweb_edu_sh():
    script = os.path.join(ROOT, "data", "fineweb_edu.sh")
    if not shutil.which("bash") or not shutil.which("curl"):
        return skip("fineweb_edu.sh", "no bash or no curl on this machine")
    val, train = "edu_fineweb_val_000000.bin", "edu_fineweb_train_%06d.bin"
    good = {val: shard([50256, 1, 2])} | {train % i: shard([50256] + [i] * (10000 * i)) for i in range(1, 6)}
    source = fresh_folder()
    for name, data in good.items():
        write(source, name, data)

    def fetch(n, folder, says="", status=0, url="file://" + source):
        env = {"FINEWEB_EDU_URL": url, "RETRIES": "2"}
        done = subprocess.run(["bash", script, str(n), folder], env={**os.environ, **env}, timeout=100,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == status and says in done.stdout.decode(), f"want {status}, {says}: {done}"

    def holds(folder, *numbers):
        assert contents(folder) == {name: good[name] for name in [val] + [train % i for i in numbers]}, folder

    with case("fineweb_edu.sh fetches N shards and the validation shard; a second run fetches nothing"):
        folder = fresh_folder() + "/new/folder"
        fetch(3, folder, "done: --train")
        holds(folder, 1, 2, 3)
        fetch(3, folder, "already there", url="file:///nowhere")

    with case("a broken download goes on where it stopped"):
        folder, marked = fresh_folder(), good[train % 1][:5000] + b"\7" * 777  # kept, not fetched again
        write(folder, train % 1 + ".part", marked)
        write(folder, train % 2 + ".part", good[train % 2])  # whole: only the rename is missing
        fetch(2, folder)
        assert contents(folder) == {val: good[val], train % 1: marked + good[train % 1][len(marked):],
                                    train % 2: good[train % 2]}
        fetch(6, folder, train % 6, status=1)  # there is none

    with case("a file that is not the shard it should be never gets its name"):
        tokens = [50256] * 100
        for wrong, says in [
                (b"<html>sorry</html>" * 100, "magic"), (shard(tokens, version=2), "version 2, expected 1"),
                (b"x" * 100, "too short"), (shard(tokens, count=99), "1224 bytes, expected 1222"),
                (shard(tokens, count=101), "incomplete: 1224 bytes of 1226")]:
            folder = fresh_folder()
            write(source, train % 2, wrong)
            fetch(3, folder, says, status=1)
            assert set(contents(folder, "*.bin")) == {val, train % 1, train % 3}, says
            write(source, train % 2, good[train % 2])
            if "incomplete" in says:
                os.remove(f"{folder}/{train % 2}.part")  # goes on with what it takes for a beginning
            fetch(3, folder)
            holds(folder, 1, 2, 3)

    with case("a damaged shard already there, two runs at once, wrong arguments: refused with a reason"):
        folder = fresh_folder()
        path = write(folder, train % 1, good[train % 1][:-2])
        fetch(1, folder, f"{path}: incomplete", status=1)
        assert open(path, "rb").read() == good[train % 1][:-2]
        for arguments in ([], ["x"], ["1", "a", "b"], ["1000"]):
            run("bash", script, *arguments, status=2, says="usage")
        if shutil.which("flock"):
            with subprocess.Popen(["flock", folder + "/.lock", "cat"], stdin=subprocess.PIPE):
                while subprocess.run(["flock", "-n", folder + "/.lock", "true"]).returncode == 0:
                    time.sleep(0.01)
                fetch(1, folder, f"{folder}: in use by another run", status=1)


# ---- fineweb_edu.py ------------------------------------------------------------------------------------

def need(name):
    if importlib.util.find_spec(name) is None:
        raise Skip(f"no {name} in this Python")


def jsonl(documents):
    return b"".join(json.dumps({"id": i, "text": d.decode()}).encode() + b"\n" for i, d in enumerate(documents))


def tokenizer_file(tokens=BYTES, size=257, eot=256):
    return (struct.pack("<4I", 20240328, 2, size, eot).ljust(1024, b"\0")
            + b"".join(bytes([len(t)]) + t for t in tokens))


def test_fineweb_edu_py():
    vocabulary = write(TEMPORARY.name, "bytes.bin", tokenizer_file())

    def tokenize(folder, path, *flags, name="fineweb_edu", program=FINEWEB, workers=2, tokenizer=vocabulary,
                 **more):
        paths = path if isinstance(path, list) else [path]
        return run(sys.executable, program, "--out", folder + "/out", "--workers", workers, "--input", *paths,
                   "--tokenizer", tokenizer, "--name", name, *flags, **more)

    if not (importlib.util.find_spec("numpy") and importlib.util.find_spec("tiktoken")):
        return skip("fineweb_edu.py", "no numpy or no tiktoken in this Python")

    with case("fineweb_edu.py on JSON Lines: every document, split by its hash, as text_to_shards has them"):
        folder, documents = fresh_folder(), some_documents(8, 700)
        path = write(folder, "a.jsonl", b"\xef\xbb\xbf" + jsonl(documents[:400]) + b"\n" + jsonl([b""]))
        more = write(folder, "b.jsonl", jsonl(documents[400:]))
        flags = ["--shard-tokens", 20000, "--val", 10, "--test", 5]
        tokenize(folder, [path, more], *flags)
        assert everything(folder + "/out", "fineweb_edu") == by_split(documents, 10, 5)
        text = write(folder, "all.txt", b"\n\n".join(documents))
        run(TOOL, "--out", folder + "/text", "--name", "fineweb_edu", *flags, text)
        assert contents(folder + "/text") == contents(folder + "/out", "*[0-9].bin")
        path = write(folder, "tens.jsonl", jsonl(TENS))
        for limit in (1, 100, 101, 109):
            tokenize(folder, path, "--val", 0, "--test", 0, "--shard-tokens", limit, name=f"at{limit}")
            assert read_split(folder + "/out", "train", f"at{limit}") == greedy(TENS, limit), limit

    with case("fineweb_edu.py: compressed files, half a surrogate pair, --max-tokens, the counts printed"):
        folder, documents = fresh_folder(), some_documents(14, 1000, 2000)
        path = write(folder, "a.jsonl.gz", gzip.compress(jsonl(documents) + b'{"text": "a\\ud800b"}\n'))
        text = tokenize(folder, path, "--val", 10)
        found = everything(folder + "/out", "fineweb_edu")
        assert found == by_split(documents + [b"a?b"], 10, 1)
        assert text.startswith(summary(found)), text
        # It stops with the batch (some 260,000 characters) that reaches the number, not before and soon after.
        tokenize(folder, path, "--val", 10, "--max-tokens", 270_000, name="some")
        some = everything(folder + "/out", "some")
        assert all(mine == found[split][:len(mine)] for split, mine in some.items())
        total, in_all = (sum(len(d) + 1 for mine in one.values() for d in mine) for one in (some, found))
        assert 270_000 <= total < 270_000 + (1 << 19) < in_all, (total, in_all)

    with case("fineweb_edu.py on parquet gives what JSON Lines gives; columns that hold no text are refused"):
        need("pyarrow")
        import pyarrow
        import pyarrow.parquet
        folder, documents = fresh_folder(), some_documents(9, 300)
        path = folder + "/a.parquet"
        columns = {"number": [1] * 301, "bytes": [b"x"] * 301, "list": [["x"]] * 301,
                   "body": [d.decode() for d in documents] + [None]}
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=70)
        tokenize(folder, path, "--column", "body")
        assert everything(folder + "/out", "fineweb_edu") == by_split(documents, 1, 1)
        tokenize(folder, path, name="b", status=1, says="no 'text' among the columns number, bytes, list, body")
        for column, kind in (("number", "int"), ("bytes", "bytes"), ("list", "list")):
            tokenize(folder, path, "--column", column, name=column, status=1,
                     says=f"a.parquet: document 1: TypeError: '{column}' is of type {kind}; expected parquet")
        cut = write(folder, "cut.parquet", open(path, "rb").read()[:-9])
        tokenize(folder, cut, name="cut", status=1, says="cut.parquet: document 1: ArrowInvalid: Parquet magic")

    with case("fineweb_edu.py refuses what it cannot read or write: one line, and where"):
        need("pyarrow")
        folder, good = fresh_folder(), jsonl([b"abc"] * 999)
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
        for i, (name, data, says) in enumerate([
                ("a.jsonl", b'{"text": "a"}\n{"text": \n', "document 2: JSONDecodeError"),
                ("a.jsonl", b'{"txt": "a"}\n', "document 1: KeyError: 'text'; expected JSON Lines with text"),
                ("a.jsonl", b'{"text": 5}\n', "of type int"),
                ("a.jsonl", '{"text": "é"}\n'.encode("latin-1"), "document 1: UnicodeDecodeError"),
                ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "document 1: UnicodeDecodeError"),
                ("a.jsonl.gz", gzip.compress(good)[:-9], "EOFError"),
                ("a.jsonl.gz", good, "Not a gzipped file"),
                ("a.jsonl.gz", gzip.compress(good)[:40] + b"#" * 99, "a.jsonl.gz: document 1: error: Error -3"),
                ("a.jsonl", pointer, "a pointer of Git LFS"), ("a.parquet", pointer, "a pointer of Git LFS")]):
            tokenize(folder, write(folder, name, data), name=f"n{i}", status=1, says=says)
        path = write(folder, "a.jsonl", b"\n")
        tokenize(folder, path, status=1, says="no document")
        tokenize(folder, folder + "/missing.jsonl", status=1, says="missing.jsonl")
        tokenize(path, path, status=1, says=f"{path}/out: Not a directory")
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (5000, 5000))
        tokenize(folder, write(folder, "b.jsonl", good * 9), name="full", status=1, says="File too large",
                 preexec_fn=limit)
        write(folder + "/out", "z_train_000000.bin", b"")
        tokenize(folder, path, name="z", status=1, says="already there")
        for data, says in [
                (good, "not a tokenizer"), (tokenizer_file()[:-20], "t.bin: 1530 bytes"),
                (tokenizer_file(BYTES[-1:] + BYTES[:-1], eot=0), "end-of-text is token 0, expected the last"),
                (tokenizer_file(BYTES[:65] + BYTES[66:], 256, 255), "byte 65")]:
            tokenize(folder, path, tokenizer=write(folder, "t.bin", data), name="t", status=1, says=says)
        tokenize(folder, path, tokenizer=folder + "/none", status=2, says="--tokenizer: got")
        for flag, value in [("--vocab-size", 65537), ("--shard-tokens", 0), ("--workers", 0), ("--val", 100)]:
            text = tokenize(folder, path, flag, value, status=2)
            assert flag in text.splitlines()[-1], text  # behind the usage

    with case("a worker that dies: the run ends, names it, and goes on with the files of one left alone"):
        folder, documents = fresh_folder(), some_documents(10, 3000, 1000)
        documents[::10] = [b""] * 300  # counted as read, though nothing is written for them
        path = write(folder, "a.jsonl", jsonl(documents))
        flags = ["--shard-tokens", 50000, "--save-every", 0, "--val", 20]
        driver = write(folder, "driver.py", b"""
import multiprocessing, os, sys
sys.path.insert(0, %a)
import fineweb_edu
multiprocessing.set_start_method("fork")
split_of = fineweb_edu.split_of
def dies(data, *shares):
    if data == %a:
        print("dies:", os.getpid(), flush=True)
        os.kill(os.getpid(), 9)
    return split_of(data, *shares)
fineweb_edu.split_of = dies
fineweb_edu.main()
""" % (os.path.dirname(FINEWEB), documents[-1]))
        text = tokenize(folder, path, *flags, program=driver, workers=1, status=1)
        says = f"worker process {text.split('dies: ')[1].split()[0]} was killed; expected memory for 1 of them"
        assert says in text, text
        text = tokenize(folder, path, *flags, says="going on after ")
        ours = contents(folder + "/out")
        shutil.rmtree(folder + "/out")
        tokenize(folder, path, *flags)
        assert ours == contents(folder + "/out")
        again = tokenize(folder, path, *flags)  # done: nothing changes
        assert text.endswith("".join(again.splitlines(True)[1:])) and ours == contents(folder + "/out")
        for flag, was, now in [
                ("--test", 1, 3), ("--val", 20, 5), ("--shard-tokens", 50000, 50001), ("--max-tokens", 0, 9),
                ("--column", "text", "body"), ("--input", f"['{path}']", FINEWEB)]:
            tokenize(folder, path, *flags, flag, now, status=1,
                     says=f"an earlier run had {flag[2:].replace('-', '_')} {was}, now it is")

    with case("two runs of fineweb_edu.py into one folder: the second is refused; without locks, a warning"):
        folder = fresh_folder()
        os.mkfifo(folder + "/pipe")
        command = [sys.executable, FINEWEB, "--out", folder + "/out", "--tokenizer", vocabulary, "--workers=2"]
        first = subprocess.Popen([*command, "--input", folder + "/pipe"], stdout=subprocess.PIPE)
        path = write(folder, "a.jsonl", jsonl([b"abc"]))
        with open(folder + "/pipe", "wb") as pipe:  # opened there too: the first run has begun to read
            pipe.write(jsonl(some_documents(17, 3000)))
            pipe.flush()
            tokenize(folder, path, status=1, says=".fineweb_edu.lock: in use by another run")
            first.kill()
            first.communicate(timeout=60)  # the end of its output: its workers, who hold it too, have ended
        write(folder, "sitecustomize.py", b"""
import errno, fcntl
def none(*_): raise OSError(errno.ENOLCK, 'No lock')
fcntl.lockf = none
""")  # a module that Python imports first
        tokenize(folder, path, name="b", env={"PYTHONPATH": folder}, says=".b.lock: cannot lock: No lock")

    with case("fineweb_edu.py stopped anywhere: the folder is again as it was saved, then as if left alone"):
        # The class that writes, without processes: so every pair of a save and a stop can be tried.
        sys.path.insert(0, os.path.dirname(FINEWEB))
        import fineweb_edu
        sizes = [4, 6, 3, 0, 8, 10, 1, 12, 9, 3, 2]  # tokens; full shards, a document longer than a shard
        documents = [(("train", "val")[n % 5 == 4], struct.pack(f"<{size}H", *range(100 * n, 100 * n + size)))
                     for n, size in enumerate(sizes)]

        def written(folder):  # without headers: that of an unfinished shard counts for nothing
            return {name: data[1024:] for name, data in contents(folder, "*.bin*").items()}

        def write_on(folder, upto):
            writer = fineweb_edu.Writer(folder, "w", 10, {})
            at_start = written(folder)
            for split, tokens in documents[writer.state["rows"]:upto]:
                writer.add(split, len(tokens), tokens)
            return writer, at_start

        def finish_all(folder):
            writer, at_start = write_on(folder, len(documents))
            for split in SPLITS:
                writer.finish(split)
            return at_start, contents(folder, "*.bin*")

        folder = fresh_folder()
        alone = finish_all(folder)[1]
        shards = [len(shard) for split in ("train", "val") for shard in read_split(folder, split, "w")]
        assert shards == [10, 3, 10, 1, 12, 9, 2, 8, 3], shards
        for saved in range(len(documents)):
            for stopped in range(saved, len(documents) + 1):
                folder = fresh_folder()
                writer, _ = write_on(folder, saved)
                writer.save()
                before = written(folder)
                for split, tokens in documents[saved:stopped]:
                    writer.add(split, len(tokens), tokens)
                for file in writer.files.values():
                    file.close()  # all of it has reached the disk, but not the state
                assert finish_all(folder) == (before, alone), f"saved after {saved}, stopped after {stopped}"

    with case("--tokenizer train: a vocabulary of the size asked for, that text_to_shards encodes with alike"):
        need("tokenizers")
        folder, rng = fresh_folder(), random.Random(11)
        words = ["".join(rng.choices("abcdeéж", k=rng.randint(2, 7))) for _ in range(300)]
        documents = [" ".join(rng.choices(words, k=60)).encode() + b"  don't 12345!\n\t x" for _ in range(200)]
        path = write(folder, "a.jsonl", jsonl(documents))
        tokenize(folder, path, "--vocab-size", 500, tokenizer="train", says="vocabulary 500")
        trained = folder + "/out/fineweb_edu_tokenizer.bin"
        data = open(trained, "rb").read()
        assert struct.unpack("<4I", data[:16]) == (20240328, 2, 500, 499)
        tokens, at = [], 1024
        while at < len(data):
            tokens.append(data[at + 1:at + 1 + data[at]])
            at += 1 + data[at]
        assert len(set(tokens)) == 500 and {bytes([b]) for b in range(256)} == set(tokens[:256])
        text = write(folder, "all.txt", b"<>".join(documents))
        run(TOOL, "--out", folder + "/text", "--name=fineweb_edu", "--separator=<>", "--val=1", "--test=1",
            "--tokenizer", trained, text)
        for split, mine in by_split(documents, 1, 1).items():
            got = read_split(folder + "/out", split, "fineweb_edu")
            assert got == read_split(folder + "/text", split, "fineweb_edu"), split
            assert b"".join(tokens[t] for s in got for t in s) == b"".join(tokens[499] + d for d in mine)
        tokenize(folder, path, "--vocab-size", 60000, tokenizer="train", name="b", status=1,
                 says="--vocab-size 60000")


try:
    test_text_to_shards()
    test_fineweb_edu_sh()
    test_fineweb_edu_py()
finally:
    TEMPORARY.cleanup()
finish()
