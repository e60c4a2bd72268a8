#!/usr/bin/env python3
"""Writes dev/doc/symbols.md: for each symbol of the formulas, its line in both trainers.

    python dev/doc/symbols.py            # finds the lines again and writes the table
    python dev/doc/symbols.py --check    # exit 1, and why, if a line has moved or gone

A row names a function and a piece of one of its lines, for each trainer; the line number is looked up. Standard
library only.
"""
import pathlib
import re
import sys

DOC = pathlib.Path(__file__).with_suffix(".md")
ROOT = DOC.parent.parent.parent
CPU, GPU = "train_rdattnres_cpu.cpp", "train_rdattnres.cu"

# heading, then rows: symbol, what it is; function and piece of its line (None: the definition) in the CPU
# trainer, then in the CUDA trainer.
TABLE = [
    ("Depth memory", [
        ("`e`, `b_0`", "the embedding, source 0",
         "embedding_forward", "memcpy", "embedding_forward_kernel", "load8(v, wte"),
        ("`dwte`", "its gradient", "embedding_backward", "row[c] +=", "embedding_backward_kernel", "row[k] +="),
        ("`stream`", "the embedding, then the partial after each sublayer",
         "Activations", "*stream", "Activations", "stream;"),
        ("`K`, `sources`", "what a site reads", "site_at", "source_slots(c, i)", "Sources", "slot(unsigned j)"),
        ("`partial + o`", "the write",
         "write_partial", "add(slot", "model_forward", "partial_before(m, 2 * l,"),
        ("`dbank`", "one gradient per embedding and block", "Activations", "dbank;", "Activations", "dbank;"),
        ("`do`", "gradient of the partial after a sublayer, so of its output",
         "model_backward", "dout = dpartial", "model_backward", "dpartial = ["),
    ]),
    ("Route", [
        ("`eps`", "inside every rmsnorm", None, "constexpr real EPS", None, "constexpr float EPS"),
        ("`r_j`", "1 / rms of a source",
         "source_rstd", "rstd[bt] = 1 /", "route_forward_kernel", "rj = rsqrtf("),
        ("`w`", "query * gain", "fold_gain", "w[r * C + c] =", "fold_gain_kernel", "w[blockIdx.y * C + c] ="),
        ("`z_j`", "logit of source j",
         "route_forward", "rstd[j][bt] * dot(", "route_forward_kernel", "zj = rj *"),
        ("`p_j`", "softmax over the sources",
         "route_forward", "weights[j] /= sum", "route_forward_kernel", "weights[j] = expf("),
        ("`h`", "the mix of the raw sources",
         "mix_token", "mix[c] +=", "route_forward_kernel", "add_row<NV>(h[r], e, s)"),
        ("`delta`", "dh . h",
         "route_backward", "const real delta =", "route_backward_kernel", "deltas[r] = warp_sum("),
        ("`dp_j`, `dz_j`", "gradients of weight and logit",
         "route_backward", "const real dz =", "route_backward_bank_kernel", "dzr = pj * (dp - from"),
        ("`ds_j`", "gradient of a source, as value and as key",
         "route_backward", "ds[c] +=", "route_backward_bank_kernel", "ds[n][k] = fmaf(by_dh"),
        ("`base`", "dw, summed over tokens and sources",
         "route_backward", "base[c] +=", "route_backward_bank_kernel", "dw[r][k] = fmaf("),
        ("`dquery`", "gain * base",
         "route_backward", "dquery[r][c] +=", "fold_gain_backward_kernel", "dquery[c] +="),
        ("`dgain`", "query * base",
         "route_backward", "dgain[c] +=", "fold_gain_backward_kernel", "dgain[c] +="),
    ]),
    ("Layers", [
        ("`x`", "weight * rmsnorm(h)",
         "rmsnorm_forward", "x[bt * C + c] =", "rmsnorm_forward_kernel", "v[k] = g[k] *"),
        ("`dh`", "back through the norm",
         "rmsnorm_backward", "dh[bt * C + c] =", "rmsnorm_backward_kernel", "out[k] += r *"),
        ("`dweight`", "of a norm",
         "rmsnorm_backward", "dweight[c] +=", "rmsnorm_backward_kernel", "sum[k] = fmaf("),
        ("`x W^T`", "matrix product, weights (out, in)",
         "matmul_forward", "matmul(out", "matmul_forward", "matmul(out"),
        ("`dx`", "gradient of its input",
         "matmul_backward_input", "matmul(dx", "matmul_backward_input", "matmul(dx"),
        ("`dw`", "gradient of its weights",
         "matmul_backward_weight", "matmul(dw", "matmul_backward_weight", "matmul(dw"),
        ("`a' = a cos - b sin`", "rotary position encoding",
         "rope_rotate", "x[i] =", "rope_kernel", "lo[k] = low *"),
        ("`score_tu`", "attention's logit (CUDA: in the plain kernels, as below)",
         "attention_forward", "? scale * score[t]", "attention_forward_plain_kernel", "scale * dot_plain(q"),
        ("`lse_t`", "log of the sum of exp",
         "attention_forward", "lse[", "attention_forward_plain_kernel", "lse[("),
        ("`att_t`", "attention's output",
         "attention_forward", "att_t[i] =", "attention_forward_plain_kernel", "store_plain(att"),
        ("`a_tu`", "attention's weight, rebuilt",
         "attention_backward", "exponential(scale * a_u[t] - lse_t[t])",
         "attention_backward_q_plain_kernel", "a = expf("),
        ("`delta_t`", "datt . att", "attention_backward", "delta[t] = dot(",
         "attention_backward_q_plain_kernel", "row_delta += to_float"),
        ("`da_tu`, `dscore_tu`", "gradients of weight and logit",
         "attention_backward", "da_u[t] = scale * a_u[t]", "attention_backward_q_plain_kernel", "dscore = a *"),
        ("`dv_u`", "gradient of a value",
         "attention_backward", "matmul_rows(&dv", "attention_backward_kv_plain_kernel", "mix_plain(acc_v"),
        ("`dq_t`", "gradient of a query",
         "attention_backward", "matmul_rows(&dq_rows", "attention_backward_q_plain_kernel", "mix_plain(acc"),
        ("`dk_u`", "gradient of a key",
         "attention_backward", "matmul_rows(&dk", "attention_backward_kv_plain_kernel", "mix_plain(acc_k"),
        ("`silu(gate) * up`", "SwiGLU",
         "swiglu_forward", "act[i] =", "swiglu_forward_kernel", "u[k] *= g[k] /"),
        ("`dgate`", "its backward", "swiglu_backward", "dgate[i] =", "swiglu_backward_kernel", "g[k] = dk"),
        ("`dup`", "its backward", "swiglu_backward", "dup[i] =", "swiglu_backward_kernel", "u[k] = dk"),
        ("`loss_t`", "cross-entropy of a token",
         "classifier", "losses[row0 + row] =", "cross_entropy_kernel", "losses[row] ="),
        ("`dlogits`", "softmax less one at the target",
         "classifier", "z[target] -= dloss", "cross_entropy_kernel", "v[k] -= dloss"),
    ]),
    ("Arms", [
        ("`tied`", "V's query is QK's", "site_at", "Arch::tied", "fold_table", "Arch::tied"),
        ("`tied`, backward", "both gradients meet",
         "read_sources_backward", "Arch::tied", "read_sources_backward", "Arch::tied"),
        ("`average`", "(h_qk + h_v) / 2",
         "read_sources", "Arch::average", "route_forward_kernel", "if (average) add_row"),
        ("`average`, backward", "each route gets half",
         "read_sources_backward", "Arch::average", "route_backward_kernel", "average ? 0.5f"),
        ("`frozen-v`", "a null query: the uniform mean",
         "fold_gain", "query[r] ?", "fold_gain_kernel", "fold.query ?"),
    ]),
    ("Optimiser", [
        ("global norm", "what clipping looks at", "grad_norm", None, "grad_norm", None),
        ("`m`", "running mean of the gradient", "adamw", "m[i] =", "adamw_kernel", "mean[k] ="),
        ("`v`", "running mean of its square", "adamw", "v[i] =", "adamw_kernel", "square[k] ="),
        ("`p -= ...`", "the update", "adamw", "p[i] -=", "adamw_kernel", "param[k] -="),
    ]),
]


def find(path, function, piece):
    """Line, from 1, where the function or struct is defined, or the first from there that has the piece."""
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
    out = ["# Symbols: from the formulas to the code", "",
           "Each symbol of [rdattnres.md](rdattnres.md), and the line that computes it. Written by",
           "`symbols.py`; a test fails when a link no longer points at its line.", ""]
    for heading, rows in TABLE:
        out += [f"## {heading}", "", "| symbol | what it is | CPU | CUDA |", "|---|---|---|---|"]
        for symbol, meaning, *places in rows:
            out.append(f"| {symbol} | {meaning} | {link(CPU, *places[:2])} | {link(GPU, *places[2:])} |")
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
