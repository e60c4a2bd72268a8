#!/usr/bin/env python3
"""gpt2_to_bytes.py - byte shards from GPT-2 shards: the same documents in the same order, as bytes.

    python3 dev/paired/gpt2_to_bytes.py --tokenizer gpt2_tokenizer.bin --out FOLDER SHARD... [--max-bytes N]

For studies on a CPU: with 257 tokens instead of 50,257 a small model spends its time in its layers, where the
arms differ, and not in the output head. Every SHARD becomes FOLDER/<its name>; GPT-2's end-of-text becomes
token 256. With --max-bytes a shard ends with the last whole document that fits. Standard library only.
"""

import argparse
import array
import os
import struct
import sys

MAGIC, VERSION, HEADER = 20240520, 1, 256
CHUNK = 1 << 20  # tokens read at a time


class Bad(Exception):
    pass


def swapped(values):
    """Files are little-endian whatever the machine is."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


def read_tokenizer(path):
    """(bytes of every token as an array of uint16, id of end-of-text)"""
    with open(path, "rb") as f:
        data = f.read()
    if len(data) < 1024:
        raise Bad("%s: %d bytes, expected a header of 1024" % (path, len(data)))
    magic, version, size, eot = struct.unpack("<4I", data[:16])
    if (magic, version) != (20240328, 2):
        raise Bad("%s: magic %d version %d, expected 20240328 version 2" % (path, magic, version))
    tokens, at = [], 1024
    for _ in range(size):
        if at >= len(data) or at + 1 + data[at] > len(data):
            raise Bad("%s: ends after %d of %d tokens" % (path, len(tokens), size))
        tokens.append(array.array("H", list(data[at + 1 : at + 1 + data[at]])))
        at += 1 + data[at]
    tokens[eot] = array.array("H", [256])
    return tokens, eot


def convert(shard, out, tokens, eot, max_bytes):
    """Writes the byte shard; returns its number of tokens."""
    with open(shard, "rb") as f, open(out + ".tmp", "wb") as g:
        header = struct.unpack("<%di" % HEADER, f.read(4 * HEADER).ljust(4 * HEADER, b"\0"))
        count = (os.path.getsize(shard) - 4 * HEADER) // 2
        if header[:3] != (MAGIC, VERSION, count):
            raise Bad("%s: header %s, expected %s" % (shard, header[:3], (MAGIC, VERSION, count)))
        g.write(b"\0" * 4 * HEADER)
        written, whole = 0, 0  # tokens written; of which up to the last whole document
        while True:
            chunk = swapped(array.array("H", f.read(2 * CHUNK)))
            if not chunk:
                whole = written
                break
            for token in chunk:
                if token >= len(tokens):
                    raise Bad("%s: token %d, but the tokenizer has %d" % (shard, token, len(tokens)))
            text = array.array("H")
            for token in chunk:
                if token == eot:
                    if max_bytes and written + len(text) > max_bytes:
                        break
                    whole = written + len(text)
                text.extend(tokens[token])
            g.write(swapped(text).tobytes())
            written += len(text)
            if max_bytes and written > max_bytes:
                break
        g.truncate(4 * HEADER + 2 * whole)
        g.seek(0)
        g.write(struct.pack("<3i", MAGIC, VERSION, whole))
    os.replace(out + ".tmp", out)
    return whole


def main(argv):
    p = argparse.ArgumentParser(description="Byte shards from GPT-2 shards.", allow_abbrev=False)
    p.add_argument("shards", nargs="+", metavar="SHARD")
    p.add_argument("--tokenizer", required=True, help="gpt2_tokenizer.bin")
    p.add_argument("--out", required=True, help="folder for the byte shards")
    p.add_argument(
        "--max-bytes", type=int, default=0, help="at most so many bytes of each shard, whole documents"
    )
    options = p.parse_args(argv)
    try:
        tokens, eot = read_tokenizer(options.tokenizer)
        os.makedirs(options.out, exist_ok=True)
        for shard in options.shards:
            out = os.path.join(options.out, os.path.basename(shard))
            if os.path.abspath(out) == os.path.abspath(shard):
                raise Bad("%s: would be overwritten; choose another --out" % shard)
            print("%s: %d byte tokens" % (out, convert(shard, out, tokens, eot, options.max_bytes)))
    except (Bad, OSError) as e:
        print("error: %s" % e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
