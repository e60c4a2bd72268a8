#!/usr/bin/env python3
"""The CPU trainer against PyTorch, eager and compiled: same weights, same batch, same training step.

    make build/stepper && python dev/bench/peers.py [--sizes small,medium,s] [--arch rd] [--threads 2]

Needs torch, safetensors, numpy. A step is forward, backward, gradient clipping and AdamW. The three take turns
in one run, so whatever else the machine does meets all of them; medians and their ratios are printed. Before
anything is timed the first loss must be the same everywhere. PyTorch gets its best case: one tensor for each
layer (a slice of a stacked tensor costs its backward pass a copy of all layers), rotation tables computed once,
the fused optimiser.
"""
import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/hf"))

SIZES = {  # L, C, NH, F, S, T, V, batch, rounds: those of bench.cpp
    "small": (4, 128, 4, 640, 2, 256, 257, 8, 15),
    "medium": (8, 256, 4, 1280, 4, 256, 8192, 4, 9),
    "s": (16, 576, 9, 2880, 4, 256, 32768, 2, 5),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--arch", default="rd")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes minutes")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: processor time, for a busy machine; with one thread only")
    args = parser.parse_args()
    unknown = [size for size in args.sizes.split(",") if size not in SIZES]
    if unknown:
        parser.error(f"--sizes: {unknown[0]} is none of {', '.join(SIZES)}")
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu: waiting threads use processor time too, so it needs --threads 1")
    return args


ARGS = parse_arguments()
os.environ["OMP_NUM_THREADS"] = str(ARGS.threads)  # before torch starts its threads; stepper inherits it

import numpy as np  # noqa: E402
import rdattnres  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(ARGS.threads)
now = time.process_time if ARGS.clock == "cpu" else time.perf_counter


@functools.lru_cache
def rotation(T, HS):
    frequency = 10000.0 ** (-torch.arange(0, HS, 2, dtype=torch.float64) / HS)
    angle = torch.outer(torch.arange(T, dtype=torch.float64), frequency)
    return torch.cos(angle).float(), torch.sin(angle).float()


def rope(x):
    cos, sin = rotation(*x.shape[-2:])
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


rdattnres.rope = rope


class Peer(rdattnres.RDAttnRes):
    """The reference model with a parameter for every layer in place of stacked ones."""

    def __init__(self, config, weights):
        nn.Module.__init__(self)
        self.config = config
        for name, value in weights.items():
            layered = name not in ("wte", "out_route_gain", "out_route", "final_norm")
            own = value.clone()
            setattr(self, name, nn.ParameterList(own.unbind(0)) if layered else nn.Parameter(own))

    def matrices_and_vectors(self):
        parameters = list(self.parameters())
        return [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]


def random_weights(config, seed=1):
    """Near the trainers' initial weights, queries not zero so that routes have something to do."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.shapes().items():
        vector = name.endswith(("gain", "norm"))
        weights[name] = torch.ones(shape) if vector else 0.02 * torch.randn(shape, generator=generator)
    weights["wte"][config.V:] = 0
    return weights


class TorchSteps:
    def __init__(self, config, weights, tokens, targets, compiled):
        self.model, self.batch = Peer(config, weights), (tokens, targets)
        matrices, vectors = self.model.matrices_and_vectors()
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.loss = torch.compile(self.model.loss) if compiled else self.model.loss

    def step(self):
        start = now()
        self.optimiser.zero_grad()
        loss = self.loss(*self.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        value = loss.item()
        return value, now() - start


class OurSteps:
    def __init__(self, checkpoint, batch):
        self.process = subprocess.Popen([ROOT / "build/stepper", checkpoint, batch, ARGS.clock],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit("build/stepper ended without an answer")
        return tuple(map(float, line.split()))

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(name, folder):
    *sizes, batch, rounds = SIZES[name]
    config = rdattnres.Config(ARGS.arch, *sizes)
    weights = random_weights(config)
    checkpoint, batch_file = str(folder / "peer.safetensors"), str(folder / "batch.i32")
    save_file({"model." + key: value for key, value in weights.items()}, checkpoint, config.to_metadata())
    tokens = torch.randint(config.V, (2, batch, config.T), generator=torch.Generator().manual_seed(2))
    np.concatenate([[batch], tokens.numpy().ravel()]).astype(np.int32).tofile(batch_file)

    ours = OurSteps(checkpoint, batch_file)
    runs = {"ours": ours, "eager": TorchSteps(config, weights, *tokens, compiled=False)}
    if not ARGS.no_compile:
        runs["compiled"] = TorchSteps(config, weights, *tokens, compiled=True)
    first = {key: run.step()[0] for key, run in runs.items()}  # compiles, and touches all memory
    for key, loss in first.items():
        if not abs(loss - first["eager"]) <= 2e-6 * abs(first["eager"]):
            sys.exit(f"{name}: first loss {loss:.9g} ({key}) is not PyTorch's {first['eager']:.9g}")
    seconds, losses = {key: [] for key in runs}, {}
    for _ in range(rounds):
        for key, run in runs.items():
            losses[key], t = run.step()
            seconds[key].append(t)
    ours.close()
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    print(f"{name:7} C={config.C:<4} L={config.L:<3} first loss {first['ours']:.6f}, "
          f"after {rounds + 1} steps {', '.join(f'{losses[key]:.6f} {key}' for key in runs)}")
    for key, t in medians.items():
        print(f"        {key:9} {1e3 * t:9.1f} ms/step {batch * config.T / t:9.0f} tok/s   ours is "
              f"{t / medians['ours']:.2f} times as fast", flush=True)


def main():
    print(f"PyTorch {torch.__version__}, {ARGS.threads} thread{'s' * (ARGS.threads > 1)}, arch {ARGS.arch}, "
          f"{'processor' if ARGS.clock == 'cpu' else 'wall-clock'} time, medians")
    with tempfile.TemporaryDirectory() as folder:
        for name in ARGS.sizes.split(","):
            compare(name, Path(folder))


if __name__ == "__main__":
    main()
