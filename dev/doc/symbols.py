#!/usr/bin/env python3
"""Writes dev/doc/symbols.md: for each symbol of the formulas, its line in both trainers.

    python dev/doc/symbols.py            # finds the lines again and writes the table
    python dev/doc/symbols.py --check    # exit 1, and why, if a line has moved or gone

A row names a function and a piece of one of its lines; the line number is looked up. In train_rdattnres.cu the row
points at the function of the same name, unless it names another there. Standard library only.
"""
import pathlib
import re
import sys

DOC = pathlib.Path(__file__).with_suffix(".md")
ROOT = DOC.parent.parent.parent
CPU, GPU = "train_rdattnres_cpu.cpp", "train_rdattnres.cu"

# heading, then rows: symbol, what it is, function, piece of its line in the CPU trainer (None: the definition)
# and, where the CUDA trainer's function has another name, that name and a piece of its line or None.
TABLE = [
    ("Depth memory", [
        ("`e`, `b_0`", "the embedding, source 0", "embedding_forward", "memcpy"),
        ("`dwte`", "its gradient", "embedding_backward", "row[c] +="),
        ("`stream`", "the embedding, then the partial after each sublayer", "Activations", "*stream"),
        ("`K`, `sources`", "what a site reads", "site_at", "source_slots(c, i)"),
        ("`partial + o`", "the write", "write_partial", "add(slot",
         "model_forward", None),
        ("`dbank`", "one gradient per embedding and block", "Activations", "dbank;"),
        ("`do`", "gradient of the partial after a sublayer, so of its output", "model_backward", "dout = dpartial"),
    ]),
    ("Route", [
        ("`eps`", "inside every rmsnorm", None, "constexpr real EPS"),
        ("`r_j`", "1 / rms of a source", "source_rstd", "rstd[bt] = 1 /", "route_forward", None),
        ("`w`", "query * gain", "fold_gain", "w[r * C + c] ="),
        ("`z_j`", "logit of source j", "route_forward", "rstd[j][bt] * dot("),
        ("`p_j`", "softmax over the sources", "route_forward", "weights[j] /= sum"),
        ("`h`", "the mix of the raw sources", "route_mix", "mix[c] +=", "route_forward", None),
        ("`delta`", "dh . h", "route_backward", "const real delta ="),
        ("`dp_j`, `dz_j`", "gradients of weight and logit", "route_backward", "const real dz ="),
        ("`ds_j`", "gradient of a source, as value and as key", "route_backward", "ds[c] +="),
        ("`base`", "dw, summed over tokens and sources", "route_backward", "base[c] +="),
        ("`dquery`", "gain * base", "route_backward", "dquery[r][c] +="),
        ("`dgain`", "query * base", "route_backward", "dgain[c] +="),
    ]),
    ("Layers", [
        ("`x`", "weight * rmsnorm(h)", "rmsnorm_forward", "x[bt * C + c] ="),
        ("`dh`", "back through the norm", "rmsnorm_backward", "dh[bt * C + c] ="),
        ("`dweight`", "of a norm", "rmsnorm_backward", "dweight[c] +="),
        ("`x W^T`", "matrix product, weights (out, in)", "matmul_forward", "matmul(out"),
        ("`dx`, `dw`", "its backward", "matmul_backward", "matmul(dx", "matmul_backward_input", None),
        ("`a' = a cos - b sin`", "rotary position encoding", "rope_rotate", "x[i] ="),
        ("`score_tu`", "attention's logit", "attention_forward", "? scale * score[t]"),
        ("`lse_t`", "log of the sum of exp", "attention_forward", "lse["),
        ("`att_t`", "attention's output", "attention_forward", "att_t[i] ="),
        ("`a_tu`", "attention's weight, rebuilt", "attention_backward", "exponential(scale * a_u[t] - lse_t[t])"),
        ("`delta_t`", "datt . att", "attention_backward", "delta[t] = dot("),
        ("`da_tu`, `dscore_tu`", "gradients of weight and logit", "attention_backward", "da_u[t] = scale * a_u[t]"),
        ("`dv_u`", "gradient of a value", "attention_backward", "matmul_rows(&dv"),
        ("`dq_t`", "gradient of a query", "attention_backward", "matmul_rows(&dq_rows"),
        ("`dk_u`", "gradient of a key", "attention_backward", "matmul_rows(&dk"),
        ("`silu(gate) * up`", "SwiGLU", "swiglu_forward", "act[i] ="),
        ("`dgate`", "its backward", "swiglu_backward", "dgate[i] ="),
        ("`dup`", "its backward", "swiglu_backward", "dup[i] ="),
        ("`loss_t`", "cross-entropy of a token", "classifier", "losses[row0 + row] ="),
        ("`dlogits`", "softmax less one at the target", "classifier", "z[target] -= dloss"),
    ]),
    ("Arms", [
        ("`tied`", "V's query is QK's", "site_at", "Arch::tied"),
        ("`tied`, backward", "both gradients meet", "read_sources_backward", "Arch::tied"),
        ("`average`", "(h_qk + h_v) / 2", "read_sources", "Arch::average"),
        ("`average`, backward", "each route gets half", "read_sources_backward", "Arch::average"),
        ("`frozen-v`", "a null query: the uniform mean", "fold_gain", "query[r] ?"),
    ]),
    ("Optimiser", [
        ("global norm", "what clipping looks at", "grad_norm", None),
        ("`m`", "running mean of the gradient", "adamw", "m[i] ="),
        ("`v`", "running mean of its square", "adamw", "v[i] ="),
        ("`p -= ...`", "the update", "adamw", "p[i] -="),
    ]),
]


def find(path, function, piece):
    """Line (from 1) where the function or struct is defined, or of the first line from there on that has the piece."""
    lines = (ROOT / path).read_text().split("\n")
    start = 0
    if function:
        # A definition starts in column 0; a declaration would end in a semicolon.
        pattern = re.compile(rf"^(?!\s|//|#).*\b{re.escape(function)}(\(|\s*\{{)")
        found = [n for n, line in enumerate(lines) if pattern.match(line) and not line.rstrip().endswith(";")]
        if not found:
            raise LookupError(f"{path}: no definition of {function}")
        start = found[0]
    if piece is None:
        return start + 1
    for n in range(start, len(lines)):
        if n > start and function and re.match(r"}", lines[n]):
            break  # the function's end
        if piece in lines[n] and not lines[n].lstrip().startswith("//"):
            return n + 1
    raise LookupError(f"{path}: '{piece}' is not in {function or 'the file'}")


def link(path, function, piece):
    return f"[{function or 'EPS'}](../../{path}#L{find(path, function, piece)})"


def document():
    with_gpu = (ROOT / GPU).exists()
    out = ["# Symbols: from the formulas to the code", "",
           "Each symbol of [rdattnres.md](rdattnres.md), and the line that computes it. Written by `symbols.py`; a test",
           "fails when a link no longer points at its line.", ""]
    for heading, rows in TABLE:
        out += [f"## {heading}", "", "| symbol | what it is | CPU |" + (" CUDA |" if with_gpu else ""),
                "|---|---|---|" + ("---|" if with_gpu else "")]
        for symbol, meaning, function, piece, *gpu in rows:
            row = f"| {symbol} | {meaning} | {link(CPU, function, piece)} |"
            if with_gpu:
                row += f" {link(GPU, *gpu) if gpu else link(GPU, function, None if function else 'EPS')} |"
            out.append(row)
        out.append("")
    return "\n".join(out)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: symbols.py [--check]")
    try:
        text = document()
    except LookupError as error:
        sys.exit(f"symbols.py: {error}; mend its row in TABLE")
    if not sys.argv[1:]:
        DOC.write_text(text)
    elif not DOC.exists() or DOC.read_text() != text:
        sys.exit("dev/doc/symbols.md points at lines that have moved: run python3 dev/doc/symbols.py")
