#!/usr/bin/env python3
"""The PyTorch model (dev/hf/rdattnres.py) against the derivation's numpy model and the CPU trainer.

The trainer shows its loss in the log, and its gradients in a checkpoint: after one step from zero moments,
without clipping, adam_m is (1 - 0.9) times the gradient. Both are compared with PyTorch in float64, and must be
as near to it as PyTorch's own float32 is, up to a small factor; both distances are printed. How far float32 is
off depends on luck where a sum happens to cancel, so PyTorch tries several times: with the channels in another
order the model is the same and the roundings are not.
"""
import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile

from check import Skip, case, finish, skip

ROOT = pathlib.Path(__file__).resolve().parent.parent
try:
    import numpy as np
    import torch
    from safetensors import safe_open
except ImportError as error:
    skip("the PyTorch model", f"no {error.name} on this machine")
    finish()
sys.path.insert(0, str(ROOT / "dev/hf"))
from rdattnres import ARCHES, Config, RDAttnRes, load_windows, loss_and_gradients  # noqa: E402
from models import TRAINER, random_parameters, trainer, write_checkpoint, write_shard  # noqa: E402
from pages import Page  # noqa: E402

torch.set_num_threads(1)
FACTOR = 8        # our float32 error may be this many times PyTorch's float32 error ...
FLOOR = 2.0**-22  # ... or this, relative: adam_m has been rounded twice more on its way here
ORDERS = 5
BATCH = 3


def relative_error(got, want):
    """The norm of the difference relative to the norm of want; where want is zero, got must be exactly zero."""
    got, want = got.double(), want.double()
    size = want.norm().item()
    return (got - want).norm().item() / size if size else (0.0 if got.norm().item() == 0 else float("inf"))


def permuted(tensors, order):
    """The same model with its channels in another order; heads and feed-forward channels stay in place."""
    return {n: x.index_select(1 if n in ("wo", "w_down") else x.dim() - 1, order) for n, x in tensors.items()}


def plain_errors(checkpoint, batch, loss, grads):
    """The worst errors of PyTorch in float32 over several orders of channels: of loss, {of each gradient}."""
    model = RDAttnRes.from_checkpoint(checkpoint, torch.float32)
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss_error, errors = 0.0, dict.fromkeys(grads, 0.0)
    for n in range(ORDERS):
        order = torch.from_numpy(np.random.default_rng(n).permutation(model.config.C))
        model.load_state_dict(permuted(params, order))
        loss32, grads32 = loss_and_gradients(model, *batch)
        loss_error = max(loss_error, abs(loss32 - loss) / loss)
        for name, g in permuted(grads32, order.argsort()).items():
            errors[name] = max(errors[name], relative_error(g, grads[name]))
    return loss_error, errors


def compare_with_trainer(arch, S, folder):
    config = Config(arch, L=3, C=48, NH=3, F=80, S=S, T=37, V=131)
    rng = np.random.default_rng(S)
    checkpoint, shard = folder / "random.safetensors", folder / "shard_000001.bin"
    write_checkpoint(checkpoint, config, random_parameters(config, seed=S))
    # Exactly BATCH windows: the first step is one pass over the shard, in whatever order.
    write_shard(shard, rng.integers(0, config.V, BATCH * config.T + 1))
    batch = load_windows(shard, config.T, BATCH)

    loss, grads = loss_and_gradients(RDAttnRes.from_checkpoint(checkpoint, torch.float64), *batch)
    plain, plain_grads = plain_errors(checkpoint, batch, loss, grads)

    trainer(folder / "val", config, "--init-from", checkpoint, "--val", shard, "--steps", 0)
    events = [json.loads(line) for line in (folder / "val/log.jsonl").read_text().splitlines()]
    got = [e["loss"] for e in events if e["event"] == "val"][-1]
    ours = abs(got - loss) / loss
    print(f"    {arch:8} S={S} loss {got:.9g}, PyTorch float64 {loss:.9g}: error {ours:.1e}, "
          f"of float32 there {plain:.1e}")
    assert ours <= max(FACTOR * plain, FLOOR)

    trainer(folder / "step", config, "--init-from", checkpoint, "--train", shard, "--steps", 1, "--clip", 0,
            "--batch", BATCH, "--total-batch", BATCH * config.T)
    with safe_open(str(folder / "step/ckpt_00000001.safetensors"), "pt") as file:
        names = {n.removeprefix("adam_m.") for n in file.keys() if n.startswith("adam_m.")}
        assert names == set(grads), f"tensors in the checkpoint: {names ^ set(grads)} in one only"
        moments = {n: file.get_tensor("adam_m." + n) for n in names}
    rows = [(n, relative_error(moments[n] / 0.1, g), plain_grads[n]) for n, g in grads.items()]
    name, ours, plain = max(rows, key=lambda row: row[1] / max(FACTOR * row[2], FLOOR))
    print(f"    {arch:8} S={S} gradients of {len(rows)} tensors, the worst {name}: error {ours:.1e}, "
          f"of float32 there {plain:.1e}")
    assert ours <= max(FACTOR * plain, FLOOR), f"{name}: {ours} against {plain}"
    first_routes = [(n, m[0]) for n, m in moments.items() if "attn_route" in n]
    for n, zero in [("wte", moments["wte"][config.V:]), *first_routes]:
        assert zero.abs().max() == 0, f"{n}: padding rows and the first layer's routes have no gradient"


def compare_with_derivation(arch, S, doc):
    """The same loss and gradients as dev/doc/rdattnres.md's numpy model, float64 against float64."""
    config = Config(arch, L=3, C=doc["C"], NH=doc["NH"], F=doc["F"], S=S, T=doc["T"], V=doc["V"])
    params = {n: x.astype(np.float64) for n, x in random_parameters(config, seed=S).items()}
    model = RDAttnRes(config).double()
    model.load_state_dict({n: torch.from_numpy(x) for n, x in params.items()})
    loss, grads = loss_and_gradients(model, torch.from_numpy(doc["tokens"]), torch.from_numpy(doc["targets"]))
    params["wte"] = params["wte"][:config.V]
    derived_loss, derived = doc["backward"](params, arch, S, config.NH, doc["tokens"], doc["targets"])
    grads["wte"] = grads["wte"][:config.V]
    size = torch.stack([g.norm() for g in grads.values()]).norm().item()
    error = max((torch.from_numpy(derived[n]) - g).norm().item() for n, g in grads.items()) / size
    print(f"    {arch:8} S={S} loss {loss:.15g}, derived {derived_loss:.15g}; gradients differ by {error:.1e}")
    assert abs(loss - derived_loss) < 1e-13 * loss and error < 1e-13


with case("the derivation's numpy model gives PyTorch's loss and gradients, all arches"):
    doc = {"__name__": "doc"}
    with contextlib.redirect_stdout(io.StringIO()):
        for _, code in Page(ROOT / "dev/doc/rdattnres.md").python():
            exec(code, doc)
    for arch in ARCHES:
        for S in (2, 4):
            compare_with_derivation(arch, S, doc)

for arch in ARCHES:
    with case(f"the CPU trainer gives PyTorch's loss and gradients: {arch}"):
        if not TRAINER.exists():
            raise Skip(f"{TRAINER.name} is not built")
        for S in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                compare_with_trainer(arch, S, pathlib.Path(folder))

with case("the command line prints the loss of the first windows"):
    config = Config("rd", L=2, C=16, NH=2, F=24, S=2, T=9, V=131)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, shard = pathlib.Path(folder) / "a.safetensors", pathlib.Path(folder) / "a.bin"
        params = random_parameters(config, seed=0)
        params["wte"][:] = 0  # every logit is 0: the loss is log V, whatever the rest
        write_checkpoint(checkpoint, config, params)
        write_shard(shard, np.arange(100))
        program = str(ROOT / "dev/hf/rdattnres.py")
        command = [sys.executable, program, str(checkpoint), str(shard), "--double"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print("    " + output.strip().split("\n")[-1])
    assert f"loss {np.log(131):.9g} nats per token over 72 tokens" in output

finish()
