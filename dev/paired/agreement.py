#!/usr/bin/env python3
"""agreement.py - runs somebody else's Block AttnRes inside this project's model and compares the logits.

    python3 dev/paired/agreement.py nanogpt CHECKOUT    github.com/tokenbender/nanogpt-attnres-repro
    python3 dev/paired/agreement.py fla CHECKOUT        github.com/fla-org/flash-linear-attention

CHECKOUT is a folder that the reader has cloned. Weights, queries and gains are random, so that every source
counts. nanogpt: block, in double; which sources a sublayer reads, all reads and the output read are theirs,
attention and feed-forward are ours. fla: every read of block and of rd is theirs (naive_attnres, which computes
in float32). Exit status 1 if the logits differ by more than rounding. Needs torch; fla needs einops.
"""

import importlib.util
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "hf"))
import rdattnres  # noqa: E402
import torch  # noqa: E402


def load(path):
    """A Python file as a module of its own, without the package around it."""
    spec = importlib.util.spec_from_file_location("theirs", path)
    module = sys.modules["theirs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_model(arch):
    """Eight layers in six blocks, the last of them short."""
    torch.manual_seed(1)
    model = rdattnres.RDAttnRes(rdattnres.Config(arch, L=8, C=32, NH=4, F=48, S=3, T=16, V=50)).double()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "gain" in name or "norm" in name else 0.0, 0.3)
    return model


def nanogpt_logits(checkout, model, tokens):
    theirs = load(os.path.join(checkout, "examples", "nanogpt", "attnres.py"))
    c = model.config
    memory = theirs.BlockAttnResReference(2 * c.L, c.C, c.S, eps=rdattnres.EPS).double()
    gains, queries = [], []
    for l in range(c.L):
        gains += [model.attn_route_gain[l], model.mlp_route_gain[l]]
        queries += [model.attn_route_qk[l], model.mlp_route[l]]
    memory.mixer.queries.copy_(torch.stack(queries + [model.out_route]))
    for norm, gain in zip(memory.mixer.key_norms, gains + [model.out_route_gain]):
        norm.weight.copy_(gain)

    state = memory.init_state(model.wte[tokens])
    for i in range(2 * c.L):
        mix = memory.layer_input(state)
        model.attention_mixes = lambda l, sources: (mix, mix)
        model.read_one = lambda sources, site, layer=...: mix
        output = model.mlp(i // 2, None) if i % 2 else model.attention(i // 2, None, None, None)
        memory.append_layer_output(state, output)
    h = memory.final_output(state)
    return (model.final_norm * rdattnres.rmsnorm(h)) @ model.wte[:c.V].T


def fla_logits(checkout, model, tokens):
    theirs = load(os.path.join(checkout, "fla", "ops", "attnres", "naive.py"))
    ours = rdattnres.read
    eps = rdattnres.EPS
    rdattnres.read = lambda sources, query, gain: theirs.naive_attnres(query, sources, gain, rms_eps=eps)
    try:
        return model(tokens)
    finally:
        rdattnres.read = ours


@torch.no_grad()
def main(argv):
    if len(argv) != 2 or argv[0] not in ("nanogpt", "fla"):
        print(__doc__, file=sys.stderr)
        return 2
    agree = True
    for arm in ["block"] if argv[0] == "nanogpt" else ["block", "rd"]:
        model, tokens = random_model(arm), torch.randint(50, (2, 16))
        ours = model(tokens)
        if argv[0] == "nanogpt":
            theirs, rounding = nanogpt_logits(argv[1], model, tokens), 1e-12
        else:
            theirs = fla_logits(argv[1], model, tokens)
            rounding = 4 * (model.float()(tokens) - ours).abs().max().item()  # of our own float32
        worst = (theirs - ours).abs().max().item()
        print("%s, %s: logits up to %.1f differ by %.1e at most (rounding: %.1e)"
              % (argv[0], arm, ours.abs().max(), worst, rounding))
        agree &= worst <= rounding
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
