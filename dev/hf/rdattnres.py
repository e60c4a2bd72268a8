#!/usr/bin/env python3
"""RD-AttnRes in PyTorch: the model of the trainers, for people who think in PyTorch.

It reads the trainers' checkpoints, computes the same loss, and lets autograd find the gradients that the
trainers derive by hand, so it is also their independent check (tests/test_reference.py). It does not train.
modeling_rdattnres.py wraps it for Hugging Face.

    python dev/hf/rdattnres.py CKPT SHARD [--windows N] [--double]     # loss on the first windows
"""
import argparse
from dataclasses import astuple, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

EPS = 1e-6
ARCHES = ("rd", "block", "tied", "average", "frozen-v", "residual")


@dataclass
class Config:
    arch: str  # one of ARCHES
    L: int     # decoder layers; each is two sublayers, attention then feed-forward
    C: int     # width
    NH: int    # attention heads
    F: int     # feed-forward width
    S: int     # sublayers per block of the depth memory
    T: int     # context length
    V: int     # vocabulary

    METADATA = ("arch", "layers", "width", "heads", "ffn", "block-size", "context", "vocab")  # in a checkpoint

    @classmethod
    def from_metadata(cls, metadata):
        return cls(metadata["arch"], *(int(metadata[name]) for name in cls.METADATA[1:]))

    def to_metadata(self):
        return dict(zip(self.METADATA, map(str, astuple(self))))

    def shapes(self):
        """Every parameter of this arch and its shape. Weights are (out, in): y = x @ W.T."""
        L, C, padded_vocabulary = self.L, self.C, (self.V + 127) // 128 * 128
        shapes = dict(wte=(padded_vocabulary, C), attn_norm=(L, C), wqk=(L, 2 * C, C), wv=(L, C, C),
                      wo=(L, C, C), mlp_norm=(L, C), w_gate=(L, self.F, C), w_up=(L, self.F, C),
                      w_down=(L, C, self.F), final_norm=(C,))
        if self.arch != "residual":
            shapes.update(attn_route_gain=(L, C), attn_route_qk=(L, C), mlp_route_gain=(L, C), mlp_route=(L, C),
                          out_route_gain=(C,), out_route=(C,))
        if self.arch in ("rd", "average"):
            shapes.update(attn_route_v=(L, C))
        return shapes


def wide(x):
    """Norms and routes are computed in float32 at least, whatever the storage type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rmsnorm(x):
    x32 = wide(x)
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def read(sources, query, gain):
    """One route. sources: K tensors (B,T,C); query, gain: (C). Returns the mix (B,T,C)."""
    s = wide(torch.stack(sources))                    # (K,B,T,C)
    z = (wide(gain) * rmsnorm(s)) @ wide(query)       # (K,B,T): keys are normalised ...
    p = torch.softmax(z, dim=0)
    return (p.unsqueeze(-1) * s).sum(0).to(gain.dtype)  # ... values are the raw sources


def rope(x, start=0):
    """Rotary position encoding of x (B,NH,T,HS): at position t = start, start + 1, ... channels i and i + HS/2
    turn by t * 10000^(-2i/HS)."""
    T, HS = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, HS, 2, dtype=torch.float64) / HS)
    angle = torch.outer(torch.arange(start, start + T, dtype=torch.float64), frequency)  # (T,HS/2)
    cos, sin = (f(angle).to(x) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class RDAttnRes(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        for name, shape in config.shapes().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    @classmethod
    def from_checkpoint(cls, path, dtype=torch.float32):
        with safe_open(path, "pt") as file:
            model = cls(Config.from_metadata(file.metadata())).to(dtype)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    value = file.get_tensor("model." + name)
                    if value.shape != parameter.shape:
                        raise ValueError(f"{path}: {name}: {tuple(value.shape)}, not {tuple(parameter.shape)}")
                    parameter.copy_(value)
        return model

    def attention_mixes(self, l, sources):
        """The mix that Q and K read and the mix that V reads: here the arches differ, and only here."""
        arch = self.config.arch
        if arch == "residual":
            return sum(sources), sum(sources)
        gain, query_qk = self.attn_route_gain[l], self.attn_route_qk[l]
        h_qk = read(sources, query_qk, gain)
        if arch == "block":
            return h_qk, h_qk
        if arch == "tied":
            return h_qk, read(sources, query_qk, gain)
        if arch == "frozen-v":
            return h_qk, read(sources, torch.zeros_like(query_qk), gain)  # the uniform mix
        h_v = read(sources, self.attn_route_v[l], gain)
        if arch == "average":
            return (h_qk + h_v) / 2, (h_qk + h_v) / 2
        return h_qk, h_v

    def attention(self, l, sources, cache, mask):
        h_qk, h_v = self.attention_mixes(l, sources)
        x_qk, x_v = self.attn_norm[l] * rmsnorm(h_qk), self.attn_norm[l] * rmsnorm(h_v)
        B, T, C = x_qk.shape
        q, k = (x_qk @ self.wqk[l].T).chunk(2, dim=-1)
        v = x_v @ self.wv[l].T
        q, k, v = (x.view(B, T, self.config.NH, -1).transpose(1, 2) for x in (q, k, v))  # (B,NH,T,HS)
        start = 0 if cache is None else cache.get_seq_length(l)
        q, k = rope(q, start), rope(k, start)
        if cache is not None:
            k, v = cache.update(k, v, l)  # those of all tokens so far
        att = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)  # softmax(q.k / sqrt(HS)) v
        return att.transpose(1, 2).reshape(B, T, C) @ self.wo[l].T

    def mlp(self, l, sources):
        h = self.read_one(sources, "mlp_route", l)
        x = self.mlp_norm[l] * rmsnorm(h)
        return (F.silu(x @ self.w_gate[l].T) * (x @ self.w_up[l].T)) @ self.w_down[l].T

    def read_one(self, sources, site, layer=...):
        """The mix at a site with one query: before a feed-forward, or before the head."""
        if self.config.arch == "residual":
            return sum(sources)
        return read(sources, getattr(self, site)[layer], getattr(self, site + "_gain")[layer])

    def forward(self, tokens, cache=None, mask=None):
        """tokens (B,T) -> logits (B,T,V).

        cache keeps each layer's keys and values of earlier tokens, and nothing else: the routes of a token read
        that token's own sources, so the sources of earlier tokens are never needed again.
        mask (B,1,T,all tokens) says which keys a token may see; none: those up to itself (no cache then).
        """
        c = self.config
        bank, partial = [self.wte[tokens]], None  # the embedding is a source of its own
        for i in range(2 * c.L):
            if i % c.S == 0 and i > 0:
                bank, partial = bank + [partial], None  # the partial is now a finished block
            sources = bank if partial is None else bank + [partial]
            o = self.mlp(i // 2, sources) if i % 2 else self.attention(i // 2, sources, cache, mask)
            partial = o if partial is None else partial + o
        h_out = self.read_one(bank + [partial], "out_route")
        return (self.final_norm * rmsnorm(h_out)) @ self.wte[:c.V].T  # padding rows take no part

    def loss(self, tokens, targets):
        """Mean cross-entropy in nats per token; tokens, targets (B,T)."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def loss_and_gradients(model, tokens, targets):
    """The loss and {name: gradient} of one batch."""
    model.zero_grad()
    loss = model.loss(tokens, targets)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def load_windows(path, T, count):
    """The first count windows of a token shard: inputs and targets (count,T), fewer if the shard is short."""
    header = np.fromfile(path, "<i4", 256)
    if list(header[:2]) != [20240520, 1]:
        raise ValueError(f"{path}: no token shard of version 1")
    tokens = torch.from_numpy(np.fromfile(path, "<u2", header[2], offset=1024).astype(np.int64))
    starts = torch.arange(min(count, (len(tokens) - 1) // T)) * T
    windows = tokens[starts[:, None] + torch.arange(T + 1)]
    return windows[:, :-1], windows[:, 1:]


def main():
    parser = argparse.ArgumentParser(description="Loss of a checkpoint on the first windows of a token shard.")
    parser.add_argument("checkpoint")
    parser.add_argument("shard")
    parser.add_argument("--windows", type=int, default=8, help="how many windows of T tokens (default 8)")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    args = parser.parse_args()
    model = RDAttnRes.from_checkpoint(args.checkpoint, torch.float64 if args.double else torch.float32)
    tokens, targets = load_windows(args.shard, model.config.T, args.windows)
    with torch.no_grad():
        losses = [model.loss(x[None], y[None]).item() for x, y in zip(tokens, targets)]
    print(model.config)
    print(f"loss {np.mean(losses):.9g} nats per token over {tokens.numel()} tokens")


if __name__ == "__main__":
    main()
