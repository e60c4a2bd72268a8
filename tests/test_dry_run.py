"""test_dry_run.py - what --dry-run prints for models that no machine holds, against Python's integers, which
have no end: parameters, memory and arithmetic on both sides of 2^31, 2^32 and far beyond, in both trainers.
"""
import os
import re
import resource
import struct
import subprocess
import tempfile

from check import Skip, case, finish

# What is asked of each: sizes, batch, steps.
SMALL = dict(arch="rd", layers=3, width=48, heads=3, ffn=40, block_size=4, context=37, vocab=131, batch=5,
             steps=10)
TEN_BILLION = dict(arch="rd", layers=40, width=4096, heads=32, ffn=14336, block_size=8, context=4096,
                   vocab=65536, batch=8, steps=30517579)
# its kernels hold 1024 channels and 32 sources
GPU_TEN_BILLION = dict(TEN_BILLION, layers=338, width=1024, ffn=8192, block_size=26)
CONFIGS = {
    "./train_rdattnres_cpu": [
        SMALL,
        TEN_BILLION,
        dict(TEN_BILLION, arch="residual"),
        dict(TEN_BILLION, arch="average", block_size=1),
        dict(SMALL, layers=1, width=32766, heads=1, vocab=65408),  # a tensor of 2^31 elements less some
        dict(SMALL, layers=1, width=65536, heads=1, vocab=65536, arch="block"),  # of 2^32
        dict(SMALL, context=1048576, batch=4096, arch="frozen-v"),  # activations of 2^40 elements and more
        dict(SMALL, layers=4096, width=65536, heads=4096, ffn=1048576, vocab=65536, block_size=2),  # the largest
    ],
    "build/train_emulated": [
        SMALL,
        GPU_TEN_BILLION,
        dict(GPU_TEN_BILLION, arch="residual"),
        dict(GPU_TEN_BILLION, arch="average", block_size=22),
        dict(SMALL, layers=127, width=1024, heads=16, ffn=16384, block_size=10),
        dict(SMALL, layers=256, width=1024, heads=16, ffn=16384, arch="block", block_size=20),
        dict(SMALL, context=1048576, batch=4096, arch="frozen-v"),
    ],
}
HELD_IN_CLASSIFIER = 256  # rows of logits that the CPU trainer holds at a time


def routes(c, site):  # queries at a site: two before attention if the arm has two
    if c["arch"] == "residual":
        return 0
    return 2 if site % 2 == 0 and site < 2 * c["layers"] and c["arch"] != "block" else 1


def sources(c, site):
    return 1 if c["arch"] == "residual" else 1 + -(-site // c["block_size"])


def expected(c):
    """Elements of a family, parameters in three parts, CPU activations, operations a token: all integers."""
    L, C, F, V, T, S, NH = (c[k] for k in ("layers", "width", "ffn", "vocab", "context", "block_size", "heads"))
    Vp, BT, routed = -(-V // 128) * 128, c["batch"] * T, c["arch"] != "residual"
    two, v_query = routed and c["arch"] != "block", c["arch"] in ("rd", "average")
    matrices = L * (4 * C * C + 3 * C * F)
    route_vectors = (L * (4 + v_query) + 2) * C if routed else 0  # gain and query a site, V's query
    layers = matrices + (2 * L + 1) * C
    family = Vp * C + layers + route_vectors
    weights = sum(routes(c, i) * sources(c, i) for i in range(2 * L + 1))
    reads = 2 if two else 1
    activations = (
        BT * (C + routed) * (2 * L + 1) + weights * BT        # stream and its rms, weights of the routes
        + L * BT * (3 * C + C + NH + 2 * F)                   # q, k, v; attention; its lse; gate, up
        + BT * C * (reads + (c["arch"] == "average")) * routed + BT * C * reads  # mixes; normalised
        + BT * F + HELD_IN_CLASSIFIER * Vp + BT               # act and its gradient, logits, losses
        + BT * C * (-(-2 * L // S) + 1 if routed else 1)      # gradients: the bank,
        + BT * C * (reads + reads + 3 + 1))                   # mixes, inputs, q k v, attention
    flops = 3 * (2 * (matrices + V * C) + 2 * L * C * (T + 1) + 4 * C * weights)
    return dict(family=family, embedding=V * C, layers=layers, routes=route_vectors, matrices=matrices + Vp * C,
                activations=activations, flops=flops)


def human_bytes(n):
    unit = 0
    while n >= 1023.95 and unit < 6:
        n, unit = n / 1024, unit + 1
    return "%.1f %siB" % (n, " KMGTPE"[unit])  # none of ours is below a KiB


def dry_run(program, c, folder):
    """What it prints. It may not ask for more memory than a small program needs, or leave anything behind."""
    flags = ["--" + name.replace("_", "-") + "=" + str(value) for name, value in c.items()]
    shard = os.path.join(folder, "tokens.bin")  # one window for the longest context, of zeros
    with open(shard, "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, 1048577))
        file.truncate(1024 + 2 * 1048577)
    flags += ["--train", shard, "--out", os.path.join(folder, "run"), "--dry-run"]
    limit = 3 << 30  # addresses, threads' stacks included; what is asked of it lies far above
    result = subprocess.run([program] + flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            universal_newlines=True, env=dict(os.environ, OMP_NUM_THREADS="2"),
                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert result.returncode == 0, result.stderr
    assert os.listdir(folder) == ["tokens.bin"], os.listdir(folder)
    return result.stdout


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, "no %r in:\n%s" % (pattern, text)
    return int(found.group(1).replace(",", ""))


def check(text, c, gpu):
    want = expected(c)
    total = want["embedding"] + want["layers"] + want["routes"]
    assert number(r"parameters  ([\d,]+) \(", text) == total
    for part in ("embedding", "layers", "routes"):
        assert number(r"([\d,]+) %s(?: \+|\n)" % part, text) == want[part], part
    lines = re.findall(r"^  (.{24}) *([\d.]+ (?:B|[KMGTPE]iB))$", text, re.M)
    memory = {name.strip(): size for name, size in lines}
    assert memory["parameters"] == memory["gradients"] == human_bytes(4 * want["family"])
    assert memory["AdamW moments"] == human_bytes(8 * want["family"])
    if gpu:
        assert memory["bf16 matrices"] == human_bytes(2 * want["matrices"])
    else:
        assert memory["activations"] == human_bytes(4 * want["activations"])
        assert memory["together"] == human_bytes(16 * want["family"] + 4 * want["activations"])
    assert number(r"arithmetic  ([\d,]+) FLOP a token", text) == want["flops"]
    tokens = c["steps"] * c["batch"] * c["context"]
    assert "%.6g FLOP in all" % (want["flops"] * tokens) in text
    if gpu:
        assert "time n/a" in text  # the emulated card has no peak
        return total
    rate = float(re.search(r"at ([\d.e+]+) GFLOP/s", text).group(1)) * 1e9
    time = re.search(r"in all; (\S+) at", text).group(1)
    seconds = want["flops"] * tokens / rate
    units = {unit: int(n) for n, unit in re.findall(r"(\d+)([dhms])", time)}
    shown = sum(n * dict(d=86400, h=3600, m=60, s=1)[unit] for unit, n in units.items())
    coarse = 3600 if "d" in units else 60 if "h" in units else 1  # the last digit shown
    assert abs(shown - seconds) <= coarse + 0.01 * seconds, (time, seconds)  # the rate has three digits
    return total


def main():
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for program, configs in CONFIGS.items():
        gpu = program != "./train_rdattnres_cpu"
        for c in configs:
            with case("%s --dry-run: %s, %d layers of width %d" % (program, c["arch"], c["layers"], c["width"])):
                if not os.access(program, os.X_OK):
                    raise Skip("not built on this machine")
                with tempfile.TemporaryDirectory(prefix="rdattnres_dry_") as folder:
                    text = dry_run(program, c, folder)
                print("     %s parameters" % format(check(text, c, gpu), ","))
    finish()


if __name__ == "__main__":
    main()
