"""models.py - for tests with PyTorch: random models as checkpoints, token shards, and a run of the CPU trainer."""
import os
import subprocess
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TRAINER = Path(__file__).resolve().parent.parent / "train_rdattnres_cpu"


def random_parameters(config, seed):
    """Queries that are not zero, gains and norms that are not one, padding rows that are zero: in float32."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in config.shapes().items():
        x = rng.standard_normal(shape)
        if "norm" in name or "gain" in name:
            x = 1 + 0.3 * x
        elif "route" in name:
            x *= 0.4
        else:
            x *= 0.2 if name == "wte" else shape[-1] ** -0.5
        params[name] = x.astype(np.float32)
    params["wte"][config.V:] = 0
    return params


def write_checkpoint(path, config, params):
    save_file({"model." + n: x for n, x in params.items()}, str(path), config.to_metadata())


def write_shard(path, tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def trainer(folder, config, *flags):
    """Runs the CPU trainer on config (None: the checkpoint's); what it said is in the exception if it fails."""
    command = [str(TRAINER), "--out", str(folder), "--quiet", "--sample-tokens", "0"]
    for name, value in (config.to_metadata() if config else {}).items():
        command += ["--" + name, value]
    result = subprocess.run([*command, *map(str, flags)], capture_output=True, text=True, errors="replace",
                            env={**os.environ, "OMP_NUM_THREADS": "1"})  # too small a model for more
    said = result.stderr or result.stdout
    assert result.returncode == 0, f"{' '.join(command)}: exit {result.returncode}: {said}"
