#!/usr/bin/env python3
"""FineWeb-Edu to token shards, tokenized on this machine.

    python data/fineweb_edu.py --out data/fineweb_edu_10B                     GPT-2's tokens (vocabulary 50,257)
    python data/fineweb_edu.py --out data/fineweb_edu_32k --tokenizer train   a vocabulary of our own, 32,768
    python data/fineweb_edu.py --out shards --input a.parquet b.jsonl         any parquet or JSON Lines files

Without --input the documents are those of HuggingFaceFW/fineweb-edu, sample-10BT (28 GB to download; the
datasets library keeps it in its cache). Every document becomes one end-of-text token and its own tokens and
goes to train, val or test by the rule of data/text_to_shards.cpp: the first 8 hexadecimal digits of the SHA-256
of its UTF-8 bytes, modulo 100; the highest numbers are test, those below them val. The tokenizer is kept beside
the shards, NAME_tokenizer.bin, for --tokenizer of the trainers.

All cores tokenize. Interrupted at any moment, the same command goes on where the last saved state is, and ends
with the same files, byte for byte, as a run that was left alone.

Needs: numpy, tiktoken; tokenizers for --tokenizer train; pyarrow for parquet; datasets without --input.
"""
import argparse
import collections
import fcntl
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

SHARD_MAGIC, SHARD_VERSION, HEADER = 20240520, 1, 1024
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2
SPLITS = ("train", "val", "test")
# How GPT-2 cuts text into words before it joins bytes.
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def fail(message):
    sys.stdout.flush()
    sys.exit("error: " + " ".join(message.split()))


def library(name, what_for):
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as error:
        fail(f"{name}: {error}; {what_for} (pip install {name.split('.')[0]})")


def header(*numbers):
    """The 1024 bytes before a shard's or a tokenizer's data."""
    return b"".join(n.to_bytes(4, "little") for n in numbers).ljust(HEADER, b"\0")


def write_whole(path, data):
    """The file appears complete or not at all."""
    with open(path + ".tmp", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def lock(path):
    """Keeps a second run out. The kernel drops the lock when this process ends, however it ends."""
    file = open(path, "w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        fail(f"{path}: in use by another run; expected an --out or --name of its own")
    except OSError as error:  # a file system without locks
        print(f"warning: {path}: cannot lock: {error.strerror}; start no second run here", file=sys.stderr)
    return file


# ---- tokenizer -----------------------------------------------------------------------------------------

def load_tokenizer(path):
    """The bytes of every token, by number; the last one is end-of-text."""
    with open(path, "rb") as file:
        data = file.read()
    magic, version, size, eot = (int.from_bytes(data[i:i + 4], "little") for i in range(0, 16, 4))
    if magic != TOKENIZER_MAGIC or version != TOKENIZER_VERSION:
        fail(f"{path}: not a tokenizer: magic {magic}, version {version},"
             f" expected {TOKENIZER_MAGIC}, {TOKENIZER_VERSION}")
    tokens, at = [], HEADER
    for _ in range(size):
        length = data[at] if at < len(data) else 0
        tokens.append(data[at + 1:at + 1 + length])
        at += 1 + length
    if at != len(data):
        fail(f"{path}: {len(data)} bytes, expected {at} for its {size} tokens")
    if eot != size - 1:
        fail(f"{path}: end-of-text is token {eot}, expected the last, {size - 1}")
    missing = set(range(256)) - {token[0] for token in tokens if len(token) == 1}
    if missing:
        fail(f"{path}: no token for byte {min(missing)}; expected one for each byte")
    return tokens


def train_tokenizer(texts, vocab_size):
    """A byte-level BPE of vocab_size tokens, end-of-text included: single bytes, then merges in their order."""
    tokenizers = library("tokenizers", "it trains the vocabulary")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=byte_level.alphabet(), special_tokens=[],
        max_token_length=64, show_progress=sys.stderr.isatty())
    bpe.train_from_iterator(texts, trainer)
    # The library writes bytes as printable characters: those that are printable as themselves, the others as
    # U+0100 and up, in order.
    as_themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in as_themselves]
    byte_of = {chr(b): b for b in as_themselves} | {chr(0x100 + i): b for i, b in enumerate(others)}
    numbers = bpe.get_vocab()
    tokens = [bytes(byte_of[c] for c in text) for text in sorted(numbers, key=numbers.get)]
    if len(tokens) != vocab_size - 1:
        fail(f"--vocab-size {vocab_size}: the text offers only {len(tokens)} tokens; expected more of it")
    return tokens


def make_tokenizer(args, path):
    """Puts the tokenizer beside the shards, end-of-text as its last token."""
    def texts(left=args.train_bytes):
        for text in documents(args):
            yield text
            left -= len(text)
            if left <= 0:
                return

    if args.tokenizer == "gpt2":
        tiktoken = library("tiktoken", "it knows GPT-2's vocabulary")
        try:
            ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
        except Exception as error:  # it downloads the vocabulary, and whatever goes wrong there goes through
            fail(f"GPT-2's vocabulary: {error}; give a tokenizer file with --tokenizer instead")
        tokens = sorted(ranks, key=ranks.get)
    elif args.tokenizer == "train":
        print(f"training a vocabulary of {args.vocab_size} on {args.train_bytes / 1e6:.0f} MB", flush=True)
        tokens = train_tokenizer(texts(), args.vocab_size)
    else:
        tokens = load_tokenizer(args.tokenizer)[:-1]
    data = b"".join(bytes([len(t)]) + t for t in tokens + [b"<|endoftext|>"])
    write_whole(path, header(TOKENIZER_MAGIC, TOKENIZER_VERSION, len(tokens) + 1, len(tokens)) + data)


# ---- documents -----------------------------------------------------------------------------------------

def jsonl_documents(path, column):
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line.decode("utf-8-sig"))[column]


def parquet_documents(path, column):
    file = library("pyarrow.parquet", "it reads parquet files").ParquetFile(path)
    if column not in file.schema_arrow.names:
        raise KeyError(f"no '{column}' among the columns {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(batch_size=1024, columns=[column]):
        yield from batch.column(0).to_pylist()


def documents(args, first=0):
    """The texts, in order, from number `first` on."""
    def of_file(path):
        parquet, number = path.endswith(".parquet"), 1
        try:
            for text in (parquet_documents if parquet else jsonl_documents)(path, args.column):
                if not isinstance(text, (str, type(None))):
                    raise TypeError(f"'{args.column}' is of type {type(text).__name__}")
                yield text or ""
                number += 1
        except Exception as error:  # a broken file, or one of another kind: its reader knows how to put it
            what = f"document {number}: {type(error).__name__}: {error}"
            with open(path, "rb") as file:
                if file.read(24).startswith(b"version https://git-lfs"):
                    what = "a pointer of Git LFS (git lfs pull fetches the file)"
            fail(f"{path}: {what}; expected {'parquet' if parquet else 'JSON Lines'} with text in UTF-8 as"
                 f" '{args.column}'")

    if args.input:
        return itertools.islice(itertools.chain.from_iterable(map(of_file, args.input)), first, None)
    datasets = library("datasets", "it downloads the dataset")
    try:
        rows = datasets.load_dataset("HuggingFaceFW/fineweb-edu", name="sample-10BT", split="train")
    except Exception as error:  # whatever goes wrong on the network goes through
        fail(f"HuggingFaceFW/fineweb-edu: {error}; give files of your own with --input instead")
    return (row["text"] for row in rows.select_columns(["text"]).select(range(first, len(rows))))


def batches(texts, size):
    """Lists of texts of about `size` characters."""
    batch, length = [], 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= size:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


# ---- workers -------------------------------------------------------------------------------------------

def start_worker(path):
    global encoding, end_of_text
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends this one
    # If the main process is killed, this one ends too.
    threading.Thread(target=lambda: os._exit(multiprocessing.parent_process().join() or 1), daemon=True).start()
    import tiktoken
    *tokens, _ = load_tokenizer(path)
    ranks = {token: number for number, token in enumerate(tokens)}
    end_of_text = len(tokens)
    encoding = tiktoken.Encoding("shards", pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens={})


def split_of(data, val, test):
    number = int(hashlib.sha256(data).hexdigest()[:8], 16) % 100
    return 2 if number >= 100 - test else 1 if number >= 100 - test - val else 0


def encode_batch(texts, val, test):
    """For each text: split, length in bytes, tokens as the bytes of uint16 (none if the text is empty)."""
    import numpy
    result = []
    for text in texts:
        data = text.encode("utf-8", "replace")  # half a surrogate pair, which JSON can hold, becomes a '?'
        tokens = [end_of_text] + encoding.encode_ordinary(data.decode()) if data else []
        result.append((split_of(data, val, test), len(data), numpy.array(tokens, "<u2").tobytes()))
    return result


def in_order(jobs, workers, tokenizer):
    """Results of jobs in their order, a few of them under way: the documents do not fit in memory."""
    waiting, processes = collections.deque(), set()
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=(tokenizer,)) as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(encode_batch, *job))
                processes.update(multiprocessing.active_children())
                if len(waiting) >= 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            pool.shutdown()  # ends the other workers, by SIGTERM
            died = " and ".join(str(p.pid) for p in processes if p.exitcode != -signal.SIGTERM)
            fail(f"worker process {died} was killed; expected memory for {workers} of them (see --workers); the"
                 " same command goes on from the last saved state")


# ---- shards --------------------------------------------------------------------------------------------

class Writer:
    """The shards of all splits, and the state from which a broken run goes on.

    A shard that is not full has the name FILE.part. NAME_state.json says how many texts of the input are done
    and how long each .part was then; what a broken run wrote after that is cut off.
    """

    def __init__(self, folder, name, shard_tokens, settings):
        self.folder, self.name, self.shard_tokens = folder, name, shard_tokens
        self.lock = lock(os.path.join(folder, f".{name}.lock"))
        self.state_path = os.path.join(folder, name + "_state.json")
        self.state = dict(settings=settings, rows=0, done=False,
                          splits={s: dict(documents=0, bytes=0, tokens=0, shards=0, part=0) for s in SPLITS})
        if os.path.exists(self.state_path):
            with open(self.state_path) as file:
                self.state = json.load(file)
            for key, value in settings.items():
                if self.state["settings"].get(key) != value:
                    fail(f"{self.state_path}: an earlier run had {key} {self.state['settings'].get(key)}, now"
                         f" it is {value}; expected the same, or another --out")
        else:
            present = [f for f in os.listdir(folder) if f.startswith(tuple(f"{name}_{s}_" for s in SPLITS))]
            if present:
                fail(f"{folder}/{present[0]}: already there; remove old shards, or choose another --name")
        self.files = {}
        for split in SPLITS:
            self.go_on(split)
        self.save()

    def tokens(self):
        return sum(split["tokens"] for split in self.state["splits"].values())

    def path(self, split, later=0):
        number = self.state["splits"][split]["shards"] + later
        return os.path.join(self.folder, f"{self.name}_{split}_{number:06d}.bin")

    def go_on(self, split):
        """Opens the unfinished shard as it was when the state was saved."""
        part, path = self.state["splits"][split]["part"], self.path(split)
        if os.path.exists(path):  # it was finished after that: unfinished again
            os.replace(path, path + ".part")
        for number in itertools.count(part > 0):  # begun after that
            later = self.path(split, number)
            later = [p for p in (later, later + ".part") if os.path.exists(p)]
            if not later:
                break
            for p in later:
                os.remove(p)
        if part == 0:
            return
        size = HEADER + 2 * part
        if os.path.getsize(path + ".part") < size:
            fail(f"{path}.part: shorter than {size} bytes; remove the folder and start again")
        self.files[split] = open(path + ".part", "r+b")
        self.files[split].truncate(size)
        self.files[split].seek(size)

    def add(self, split, text_bytes, tokens):
        counts, n = self.state["splits"][split], len(tokens) // 2
        self.state["rows"] += 1
        if n == 0:
            return
        if counts["part"] > 0 and counts["part"] + n > self.shard_tokens:
            self.finish(split)
        if counts["part"] == 0:
            self.files[split] = open(self.path(split) + ".part", "wb")
            self.files[split].write(header())
        self.files[split].write(tokens)
        for key, value in (("part", n), ("tokens", n), ("documents", 1), ("bytes", text_bytes)):
            counts[key] += value

    def finish(self, split):
        """Header, then to the disk, then its name."""
        counts = self.state["splits"][split]
        if counts["part"] == 0:
            return
        file, path = self.files.pop(split), self.path(split)
        file.seek(0)
        file.write(header(SHARD_MAGIC, SHARD_VERSION, counts["part"]))
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(path + ".part", path)
        counts["shards"] += 1
        counts["part"] = 0

    def save(self):
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        write_whole(self.state_path, json.dumps(self.state, indent=1).encode())


# ---- main ----------------------------------------------------------------------------------------------

def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the shards")
    parser.add_argument("--input", nargs="+", metavar="FILE",
                        help="parquet, jsonl or jsonl.gz files instead of the dataset")
    flags = [("name", "fineweb_edu", None, "shards are called NAME_train_000000.bin and so on"),
             ("column", "text", None, "where the text is in the files"),
             ("tokenizer", "gpt2", None, "gpt2, train (a new vocabulary, from the text) or a tokenizer file"),
             ("vocab-size", 32768, (258, 65536), "of a new vocabulary, end-of-text included"),
             ("train-bytes", 10 ** 9, (1, 10 ** 12), "bytes of text that a new vocabulary is trained on"),
             ("val", 1, (0, 100), "percent of the documents"),
             ("test", 1, (0, 100), "percent of the documents"),
             ("shard-tokens", 10 ** 8, (1, 2 ** 31 - 1), "tokens in a shard; a longer document has its own"),
             ("max-tokens", 0, (0, 10 ** 15), "stop after about so many; 0: all there is"),
             ("workers", os.cpu_count(), (1, 1024), "processes that tokenize"),
             ("save-every", 10.0, (0, 10 ** 9), "seconds of work that an interrupted run loses at most")]
    for flag, value, _, text in flags:
        parser.add_argument("--" + flag, default=value, type=type(value), help=text)
    args = parser.parse_args()
    for flag, _, allowed, _ in flags:
        given = getattr(args, flag.replace("-", "_"))
        if allowed and not allowed[0] <= given <= allowed[1]:
            parser.error(f"--{flag}: got {given}, expected {allowed[0]} to {allowed[1]}")
    if args.tokenizer not in ("gpt2", "train") and not os.access(args.tokenizer, os.R_OK):
        parser.error(f"--tokenizer: got {args.tokenizer}, expected gpt2, train or a file that can be read")
    if args.val + args.test > 100:
        parser.error(f"--val and --test: {args.val} + {args.test} percent, expected 100 at most")
    return args


def tokenize(args, writer, tokenizer):
    """The run itself, from where the writer's state is to the end of the input."""
    saved, before = time.time(), writer.tokens()
    texts = documents(args, writer.state["rows"])
    jobs = ((batch, args.val, args.test) for batch in batches(texts, 1 << 18))
    for batch in in_order(jobs, args.workers, tokenizer):
        for split, text_bytes, tokens in batch:
            writer.add(SPLITS[split], text_bytes, tokens)
        seconds, total = time.time() - saved, writer.tokens()
        if seconds > args.save_every:
            writer.save()
            print(f"{writer.state['rows']:>10} documents | {total / 1e6:9.1f}M tokens |"
                  f" {(total - before) / seconds / 1e6:.2f}M tokens/s", flush=True)
            saved, before = time.time(), total
        if args.max_tokens and total >= args.max_tokens:
            break
    if writer.tokens() == 0:
        fail("no document in the input")
    for split in SPLITS:
        writer.finish(split)
    writer.state["done"] = True
    writer.save()


def main():
    args = parse_args()
    library("tiktoken", "it tokenizes"), library("numpy", "it holds the tokens")
    for path in args.input or []:
        if not os.access(path, os.R_OK):  # better now than after an hour
            fail(f"{path}: no such file, or not readable")
    os.makedirs(args.out, exist_ok=True)
    keys = ("input", "column", "tokenizer", "vocab_size", "train_bytes", "val", "test", "shard_tokens",
            "max_tokens")
    writer = Writer(args.out, args.name, args.shard_tokens, {key: getattr(args, key) for key in keys})
    state = writer.state
    if state["rows"]:
        print(f"going on after {state['rows']} documents", flush=True)
    tokenizer = os.path.join(args.out, args.name + "_tokenizer.bin")
    if not state["rows"] or not os.path.exists(tokenizer):
        make_tokenizer(args, tokenizer)
    vocabulary = len(load_tokenizer(tokenizer))
    if not state["done"]:
        tokenize(args, writer, tokenizer)
    for name, split in state["splits"].items():
        print(f"{name:5} {split['documents']:>9} documents {split['bytes']:>13} bytes {split['tokens']:>12}"
              f" tokens in {split['shards']} shard{'' if split['shards'] == 1 else 's'}")
    print(f"vocabulary {vocabulary}; train on them with --train '{args.out}/{args.name}_train_*.bin'"
          f" --tokenizer {tokenizer}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last saved state", file=sys.stderr)
        sys.exit(130)
    except OSError as error:  # a full disk, a folder that may not be written
        fail(f"{error.filename or 'a file of --out'}: {error.strerror or error}")
