// train_rdattnres_cpu.cpp - Role-Decoupled Attention Residuals (arXiv 2608.01075), trained on a CPU.
//
// What it is: the reference. One decoder-only Transformer in which a sublayer does not read one residual stream
// but a softmax mix of sources: the embedding, the finished blocks, and the partial sum of the block under way.
// Role-decoupled: attention reads two such mixes, one for Q and K and one for V. Every layer forward and
// backward by hand, AdamW, the training step. Read it from top to bottom: the layers first, each after those it
// builds on, then the model, the optimiser, the checkpoint, main. train_rdattnres.cu follows the same order
// with the same names. The mathematics is derived in dev/doc/rdattnres.md.
//
// What it refuses to be: a library, a framework, a place for other architectures. Files, text, flags, random
// numbers, schedules and sampling are in dev/common, and so are the model's sizes and tensor table (config.h);
// no arithmetic of a layer is there.
//
// Conventions, stated once:
//   B batch, T time, C width, NH heads, HS = C / NH, F feed-forward width, V vocabulary (Vp: padded to a
//   multiple of 128), L layers. BT stands for B * T where a layer treats every
//   token alike. Arrays are row-major; weights are (out, in), y = x W^T.
//   Depth memory (dev/common/config.h): S sublayers in a row form a block; its running partial is the sum of
//   its outputs so far. Slot 0 is the embedding, slot i + 1 the partial after sublayer i. Site i is the place
//   before sublayer i (i = 2L: before the head). A site has R routes, each one query with its own mix of the
//   site's K sources: R is 1 or 2, or 0 in the residual arm. An arm is a variant of the model (Arch). Arguments
//   come in the order outputs, inputs, saved values, sizes. `d` before a name is its gradient. Gradients of
//   parameters accumulate (+=) and are zeroed once a step; gradients of activations are overwritten, except
//   where a comment says "adds". Results are the same bits for any number of threads: a sum is never split by
//   thread, only by fixed chunks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "dev/common/errors.h"      // fatal, alloc_array
#include "dev/common/checkpoint.h"  // checkpoint_write, Checkpoint: safetensors files
#include "dev/common/config.h"      // Config, TENSOR_TABLE, Tensors: sizes, depth memory, parameters
#include "dev/common/random.h"      // normal, uniform: counter-based random numbers; sample_token
#include "dev/common/ranks.h"       // many processes; one and no more unless built with MPI=1
#include "data/stories.h"           // tell_story, StoryMarks: the built-in corpus and its questions
#include "dev/common/flags.h"       // Options, parse_flags, config_from: the command line
#include "dev/common/shards.h"      // TokenData, training_example: which tokens come when; open_data
#include "dev/common/train.h"  // Run, validate, generate, save, ...: what both trainers do around the model

// A test may include this file twice, as float and as double: see tests/.
#ifndef REAL
#define REAL float
#endif
#ifndef CPU_NAMESPACE
#define CPU_NAMESPACE cpu
#endif
#include "dev/cpu/matmul.h"  // real; View, Rows, transposed; matmul, dot, add, exponential, maximum

namespace CPU_NAMESPACE {

constexpr real EPS = real(1e-6);  // inside every rmsnorm, routes included

// ---- token embedding -----------------------------------------------------------------------------------

void embedding_forward(real* out,          // (BT,C)
                       const int* tokens,  // (BT)
                       const real* wte,    // (Vp,C)
                       size_t BT, size_t C) {
#pragma omp parallel for
  for (size_t bt = 0; bt < BT; bt++) memcpy(out + bt * C, wte + size_t(tokens[bt]) * C, C * sizeof(real));
}

void embedding_backward(real* dwte,         // (Vp,C)
                        const real* dout,   // (BT,C)
                        const int* tokens,  // (BT)
                        size_t BT, size_t C) {
  // A token may occur many times, so threads share out the channels, not the tokens: no two write one cell.
  constexpr size_t CHANNELS = 16;
#pragma omp parallel for
  for (size_t begin = 0; begin < C; begin += CHANNELS)
    for (size_t bt = 0; bt < BT; bt++) {
      real* row = dwte + size_t(tokens[bt]) * C;
      for (size_t c = begin; c < std::min(begin + CHANNELS, C); c++) row[c] += dout[bt * C + c];
    }
}

// ---- RMSNorm -------------------------------------------------------------------------------------------

// Sums over tokens that end in one vector (the gradients of norms, gains and queries) run in chunks of this
// many tokens, each chunk into a row of its own; the rows are then added in order. Independent of threads.
constexpr size_t TOKEN_CHUNK = 64;
inline size_t num_chunks(size_t BT) { return (BT + TOKEN_CHUNK - 1) / TOKEN_CHUNK; }

// x = weight * h / sqrt(mean(h^2) + eps)
void rmsnorm_forward(real* x,             // (BT,C)
                     const real* h,       // (BT,C)
                     const real* weight,  // (C)
                     size_t BT, size_t C) {
#pragma omp parallel for
  for (size_t bt = 0; bt < BT; bt++) {
    const real* in = h + bt * C;
    const real rstd = 1 / std::sqrt(dot(in, in, C) / real(C) + EPS);
    for (size_t c = 0; c < C; c++) x[bt * C + c] = weight[c] * (rstd * in[c]);
  }
}

// forward: x = weight * hhat, hhat = rstd h
//   dhhat = weight * dx      dh = rstd (dhhat - hhat mean(dhhat * hhat))      dweight += sum_tokens dx * hhat
void rmsnorm_backward(real* dh,            // (BT,C)
                      real* dweight,       // (C)
                      const real* dx,      // (BT,C)
                      const real* h,       // (BT,C)
                      const real* weight,  // (C)
                      size_t BT, size_t C) {
  std::vector<real> sums(num_chunks(BT) * C);
#pragma omp parallel for
  for (size_t chunk = 0; chunk < num_chunks(BT); chunk++)
    for (size_t bt = chunk * TOKEN_CHUNK; bt < std::min((chunk + 1) * TOKEN_CHUNK, BT); bt++) {
      const real* h_t = h + bt * C;
      const real* dx_t = dx + bt * C;
      const real rstd = 1 / std::sqrt(dot(h_t, h_t, C) / real(C) + EPS);
      real mean = 0;
#pragma omp simd reduction(+ : mean)
      for (size_t c = 0; c < C; c++) mean += weight[c] * dx_t[c] * (rstd * h_t[c]);
      mean /= real(C);

#pragma omp simd
      for (size_t c = 0; c < C; c++) {
        const real hhat = rstd * h_t[c];
        dh[bt * C + c] = rstd * (weight[c] * dx_t[c] - hhat * mean);
        sums[chunk * C + c] += dx_t[c] * hhat;
      }
    }

  for (size_t chunk = 0; chunk < num_chunks(BT); chunk++)
    for (size_t c = 0; c < C; c++) dweight[c] += sums[chunk * C + c];
}

// ---- matrix products -----------------------------------------------------------------------------------

// y = x W^T and its two gradients. matmul(out, a, b, M, N, K, write): out (M,N) = a (M,K) b (K,N), or += with
// `accumulate`. {x, IC} is a view of x as a matrix whose rows begin IC numbers apart. A view's rows may be
// further apart than they are long: Q, K and V are columns of one (BT,3C) buffer. Nearly all the time goes
// here.
void matmul_forward(Rows out,       // (BT,OC)
                    const real* x,  // (BT,IC)
                    const real* w,  // (OC,IC)
                    size_t BT, size_t IC, size_t OC) {
  matmul(out, {x, IC}, transposed(w, IC), BT, OC, IC);
}

// forward: out = x w^T      dx = dout w
void matmul_backward_input(real* dx,       // (BT,IC)
                           View dout,      // (BT,OC)
                           const real* w,  // (OC,IC)
                           size_t BT, size_t IC, size_t OC, Write write = overwrite) {
  matmul({dx, IC}, dout, {w, IC}, BT, IC, OC, write);
}

// forward: out = x w^T      dw += dout^T x
void matmul_backward_weight(real* dw,       // (OC,IC)
                            View dout,      // (BT,OC)
                            const real* x,  // (BT,IC)
                            size_t BT, size_t IC, size_t OC) {
  matmul({dw, IC}, transposed(dout.data, dout.row), {x, IC}, OC, IC, BT, accumulate);
}

// ---- depth route: a softmax read over the sources, per token -------------------------------------------
//
//   k_j = gain * rmsnorm(s_j)      z_j = query . k_j      p = softmax(z)      h = sum_j p_j s_j
//
// With w = query * gain formed once and r_j = 1 / rms(s_j), the logit is z_j = r_j (w . s_j): keys are never
// stored. R = 2 queries share the sources, their r_j and the gain; the outputs of route r follow those of
// route r - 1. A null query is a query held at zero: its mix is uniform.

// r = 1 / sqrt(mean(s^2) + eps) of every token of one source. Once per source, whoever reads it later.
void source_rstd(real* rstd,          // (BT)
                 const real* source,  // (BT,C)
                 size_t BT, size_t C) {
#pragma omp parallel for
  for (size_t bt = 0; bt < BT; bt++) {
    const real* s = source + bt * C;
    rstd[bt] = 1 / std::sqrt(dot(s, s, C) / real(C) + EPS);
  }
}

inline void fold_gain(real* w,                   // (R,C)
                      const real* const* query,  // R pointers to (C) or null
                      const real* gain,          // (C)
                      size_t C, size_t R) {
  for (size_t r = 0; r < R; r++)
    for (size_t c = 0; c < C; c++) w[r * C + c] = query[r] ? query[r][c] * gain[c] : 0;
}

// The mix of token bt with given weights.
inline void mix_token(real* mix,                   // (C)
                      const real* weights,         // (K)
                      const real* const* sources,  // K pointers to (BT,C)
                      size_t bt, size_t C, size_t K) {
#pragma omp simd
  for (size_t c = 0; c < C; c++) mix[c] = weights[0] * sources[0][bt * C + c];
  for (size_t j = 1; j < K; j++)
#pragma omp simd
    for (size_t c = 0; c < C; c++) mix[c] += weights[j] * sources[j][bt * C + c];
}

// The mixes alone, from weights that route_forward saved: the backward recomputes h instead of keeping it.
void route_mix(real* h,                     // (R,BT,C)
               const real* p,               // (R,BT,K)
               const real* const* sources,  // K pointers to (BT,C)
               size_t BT, size_t C, size_t K, size_t R) {
#pragma omp parallel for
  for (size_t bt = 0; bt < BT; bt++)
    for (size_t r = 0; r < R; r++) mix_token(h + (r * BT + bt) * C, p + (r * BT + bt) * K, sources, bt, C, K);
}

void route_forward(real* h,                     // (R,BT,C)
                   real* p,                     // (R,BT,K)
                   const real* const* sources,  // K pointers to (BT,C)
                   const real* const* rstd,     // K pointers to (BT)
                   const real* const* query,    // R pointers to (C) or null
                   const real* gain,            // (C)
                   size_t BT, size_t C, size_t K, size_t R) {
  std::vector<real> w(R * C);
  fold_gain(w.data(), query, gain, C, R);
#pragma omp parallel for
  for (size_t bt = 0; bt < BT; bt++)
    for (size_t r = 0; r < R; r++) {
      real* weights = p + (r * BT + bt) * K;  // first the logits
      for (size_t j = 0; j < K; j++) weights[j] = rstd[j][bt] * dot(&w[r * C], sources[j] + bt * C, C);

      const real top = *std::max_element(weights, weights + K);
      real sum = 0;
      for (size_t j = 0; j < K; j++) {
        weights[j] = std::exp(weights[j] - top);
        sum += weights[j];
      }
      for (size_t j = 0; j < K; j++) weights[j] /= sum;

      mix_token(h + (r * BT + bt) * C, weights, sources, bt, C, K);
    }
}

// forward: h = sum_j p_j s_j, p = softmax(z), z_j = w . shat_j, shat_j = r_j s_j, w = query * gain
//   dp_j = dh . s_j      delta = sum_j p_j dp_j = dh . h      dz_j = p_j (dp_j - delta)
//   ds_j += p_j dh + dz_j r_j (w - shat_j z_j / C)
//   base = sum over tokens and j of dz_j shat_j;   dquery += gain * base;   dgain += query * base
// Both routes of a site add to the same sources and the same gain.
void route_backward(real* const* dsources,         // K pointers to (BT,C); adds
                    real* const* dquery,           // R pointers to (C), null where the query is held at zero
                    real* dgain,                   // (C)
                    const real* dh,                // (R,BT,C)
                    const real* h, const real* p,  // (R,BT,C), (R,BT,K)
                    const real* const* sources, const real* const* rstd, const real* const* query,
                    const real* gain, size_t BT, size_t C, size_t K, size_t R) {
  std::vector<real> w(R * C);
  std::vector<real> bases(num_chunks(BT) * R * C);
  fold_gain(w.data(), query, gain, C, R);
#pragma omp parallel for
  for (size_t chunk = 0; chunk < num_chunks(BT); chunk++)
    for (size_t bt = chunk * TOKEN_CHUNK; bt < std::min((chunk + 1) * TOKEN_CHUNK, BT); bt++)
      for (size_t r = 0; r < R; r++) {
        const real* weights = p + (r * BT + bt) * K;
        const real* dmix = dh + (r * BT + bt) * C;
        const real* wr = &w[r * C];
        real* base = &bases[(chunk * R + r) * C];
        const real delta = dot(dmix, h + (r * BT + bt) * C, C);

        for (size_t j = 0; j < K; j++) {
          const real* s = sources[j] + bt * C;
          real* ds = dsources[j] + bt * C;
          real ws = 0;
          real dp = 0;
#pragma omp simd reduction(+ : ws, dp)
          for (size_t c = 0; c < C; c++) {
            ws += wr[c] * s[c];
            dp += dmix[c] * s[c];
          }

          // A lone source has p = 1 whatever the query says: dz is exactly zero, not a rounding error near it.
          const real dz = K > 1 ? weights[j] * (dp - delta) : 0;
          const real pj = weights[j];
          const real rj = rstd[j][bt];
          // dz_j r_j shat_j (w . shat_j) / C = along s_j, since shat_j = r_j s_j
          const real along = dz * rj * rj * rj * ws / real(C);
#pragma omp simd
          for (size_t c = 0; c < C; c++) {
            ds[c] += pj * dmix[c] + dz * rj * wr[c] - along * s[c];
            base[c] += dz * rj * s[c];
          }
        }
      }

  for (size_t chunk = 0; chunk < num_chunks(BT); chunk++)
    for (size_t r = 0; r < R; r++) {
      if (!query[r]) continue;
      const real* base = &bases[(chunk * R + r) * C];
      for (size_t c = 0; c < C; c++) {
        dquery[r][c] += gain[c] * base[c];
        dgain[c] += query[r][c] * base[c];
      }
    }
}

inline void average(real* out, const real* a, const real* b, size_t n) {  // out = (a + b) / 2
#pragma omp parallel for simd
  for (size_t i = 0; i < n; i++) out[i] = (a[i] + b[i]) / 2;
}
inline void average_backward(real* da, real* db, size_t n) {  // da: first the gradient of (a + b) / 2
#pragma omp parallel for simd
  for (size_t i = 0; i < n; i++) {
    da[i] = da[i] / 2;
    db[i] = da[i];
  }
}

// ---- rotary position encoding --------------------------------------------------------------------------

// Turns the pair (i, i + HS/2) of every head of Q and K by the angle t * base^(-2i / HS), in place. Scores
// then depend on how far apart two tokens are, not on where they stand. V is left alone.
constexpr double ROPE_BASE = 10000.0;
void rope_rotate(real* qkv,  // (B,T,3C)
                 size_t B, size_t T, size_t C, size_t NH, real direction) {
  const size_t HS = C / NH;
  const size_t half = HS / 2;
  std::vector<double> frequency(half);
  for (size_t i = 0; i < half; i++) frequency[i] = std::pow(ROPE_BASE, -2.0 * double(i) / double(HS));
#pragma omp parallel
  {
    std::vector<real> cosine(half);
    std::vector<real> sine(half);
#pragma omp for
    for (size_t t = 0; t < T; t++) {
      for (size_t i = 0; i < half; i++) {
        cosine[i] = real(std::cos(double(t) * frequency[i]));
        sine[i] = direction * real(std::sin(double(t) * frequency[i]));
      }

      for (size_t b = 0; b < B; b++)
        for (size_t head = 0; head < 2 * NH; head++) {  // Q's heads, then K's
          real* x = qkv + (b * T + t) * 3 * C + head * HS;
#pragma omp simd
          for (size_t i = 0; i < half; i++) {
            const real low = x[i];
            const real high = x[i + half];
            x[i] = low * cosine[i] - high * sine[i];
            x[i + half] = low * sine[i] + high * cosine[i];
          }
        }
    }
  }
}

void rope_forward(real* qkv, size_t B, size_t T, size_t C, size_t NH) { rope_rotate(qkv, B, T, C, NH, 1); }
// A rotation's transpose is the rotation back.
void rope_backward(real* dqkv, size_t B, size_t T, size_t C, size_t NH) { rope_rotate(dqkv, B, T, C, NH, -1); }

// ---- causal attention ----------------------------------------------------------------------------------

// Per head: score_tu = q_t . k_u / sqrt(HS) for u <= t, a = softmax over u, att_t = sum_u a_tu v_u.
// No (T,T) matrix is kept: lse_t = log sum_u exp(score_tu) is enough to rebuild a_tu = exp(score_tu - lse_t).
//
// A thread takes one head and walks its queries in tiles; a tile meets the keys up to its own last query.
// Scores are stored (keys, queries), so the softmax runs down columns: a SIMD register holds one key's scores
// for many queries, and the softmax never has to sum within a register. In a last, short tile the columns past
// `queries` hold leftovers: computed along to keep the loops of fixed length, read by nobody.
constexpr size_t QUERY_TILE = 32;

// Scores (keys,QUERY_TILE) of the queries from t0 on: multiplied by scale where the key is not later than the
// query, -infinity where it is.
inline void scale_and_mask(real* scores, real scale, size_t t0, size_t keys) {
  for (size_t u = 0; u < keys; u++) {
    const int first_query = int(u) - int(t0);  // of this tile, the first that sees key u
    real* score = scores + u * QUERY_TILE;
#pragma omp simd
    for (int t = 0; t < int(QUERY_TILE); t++) score[t] = t >= first_query ? scale * score[t] : -INFINITY;
  }
}

// Scores become weights, down each column.
inline void softmax_columns(real* scores, real* lse, size_t queries, size_t keys) {
  real top[QUERY_TILE];
  std::fill(top, top + QUERY_TILE, real(-INFINITY));
  for (size_t u = 0; u < keys; u++) {
    const real* score = scores + u * QUERY_TILE;
#pragma omp simd
    for (size_t t = 0; t < QUERY_TILE; t++) top[t] = score[t] > top[t] ? score[t] : top[t];
  }

  real sum[QUERY_TILE] = {};
  for (size_t u = 0; u < keys; u++) {
    real* score = scores + u * QUERY_TILE;
#pragma omp simd
    for (size_t t = 0; t < QUERY_TILE; t++) {
      score[t] = exponential(score[t] - top[t]);
      sum[t] += score[t];
    }
  }

  for (size_t t = 0; t < QUERY_TILE; t++) {
    if (t < queries) lse[t] = top[t] + std::log(sum[t]);
    sum[t] = 1 / sum[t];
  }
  for (size_t u = 0; u < keys; u++) {
    real* score = scores + u * QUERY_TILE;
#pragma omp simd
    for (size_t t = 0; t < QUERY_TILE; t++) score[t] *= sum[t];
  }
}

// Copies one head's n vectors of HS numbers from rows in_stride apart to rows out_stride apart: out of the
// packed Q, K, V into an array of their own, which is read straight through the cache, and gradients back
// again.
inline void copy_head(real* out, size_t out_stride, const real* in, size_t in_stride, size_t n, size_t HS) {
  for (size_t t = 0; t < n; t++) memcpy(out + t * out_stride, in + t * in_stride, HS * sizeof(real));
}

void attention_forward(real* att,        // (B,T,C)
                       real* lse,        // (B,NH,T)
                       const real* qkv,  // (B,T,3C): Q's heads, K's heads, V's heads
                       size_t B, size_t T, size_t C, size_t NH) {
  const size_t HS = C / NH;
  const real scale = 1 / std::sqrt(real(HS));
#pragma omp parallel
  {
    std::vector<real> k(T * HS);
    std::vector<real> v(T * HS);
    std::vector<real> scores(T * QUERY_TILE);
#pragma omp for collapse(2) schedule(dynamic)
    for (size_t b = 0; b < B; b++)
      for (size_t head = 0; head < NH; head++) {
        const real* q = qkv + b * T * 3 * C + head * HS;
        copy_head(k.data(), HS, q + C, 3 * C, T, HS);
        copy_head(v.data(), HS, q + 2 * C, 3 * C, T, HS);

        for (size_t t0 = 0; t0 < T; t0 += QUERY_TILE) {
          const size_t queries = std::min(QUERY_TILE, T - t0);
          const size_t keys = t0 + queries;
          const Rows att_tile = {att + (b * T + t0) * C + head * HS, C};
          const View qt = transposed(q + t0 * 3 * C, 3 * C);

          matmul_on_this_thread({scores.data(), QUERY_TILE}, {k.data(), HS}, qt, keys, queries, HS);
          scale_and_mask(scores.data(), scale, t0, keys);
          softmax_columns(scores.data(), lse + (b * NH + head) * T + t0, queries, keys);
          const View weights =
              transposed(scores.data(), QUERY_TILE);  // (queries, keys): scores are weights now
          matmul_on_this_thread(att_tile, weights, {v.data(), HS}, queries, HS, keys);
        }
      }
  }
}

// forward: att_t = sum_u a_tu v_u, a_t = softmax(score_t), score_tu = scale q_t . k_u
//   da_tu = datt_t . v_u      dscore_tu = a_tu (da_tu - delta_t), delta_t = datt_t . att_t as in the route
//   dv_u = sum_t a_tu datt_t      dq_t = scale sum_u dscore_tu k_u      dk_u = scale sum_t dscore_tu q_t
void attention_backward(real* dqkv,                        // (B,T,3C)
                        const real* datt,                  // (B,T,C)
                        const real* qkv,                   // (B,T,3C)
                        const real* att, const real* lse,  // (B,T,C), (B,NH,T)
                        size_t B, size_t T, size_t C, size_t NH) {
  const size_t HS = C / NH;
  const real scale = 1 / std::sqrt(real(HS));
#pragma omp parallel
  {
    std::vector<real> k(T * HS);
    std::vector<real> v(T * HS);
    std::vector<real> dk(T * HS);
    std::vector<real> dv(T * HS);
    std::vector<real> a(T * QUERY_TILE);   // the weights, (keys, queries)
    std::vector<real> da(T * QUERY_TILE);  // their gradients, then scale * dscore
#pragma omp for collapse(2) schedule(dynamic)
    for (size_t b = 0; b < B; b++)
      for (size_t head = 0; head < NH; head++) {
        const real* q = qkv + b * T * 3 * C + head * HS;
        real* dq = dqkv + b * T * 3 * C + head * HS;
        copy_head(k.data(), HS, q + C, 3 * C, T, HS);
        copy_head(v.data(), HS, q + 2 * C, 3 * C, T, HS);
        std::fill(dk.begin(), dk.end(), real(0));
        std::fill(dv.begin(), dv.end(), real(0));

        for (size_t t0 = 0; t0 < T; t0 += QUERY_TILE) {
          const size_t queries = std::min(QUERY_TILE, T - t0);
          const size_t keys = t0 + queries;
          const real* q_tile = q + t0 * 3 * C;
          const real* att_tile = att + (b * T + t0) * C + head * HS;
          const real* datt_tile = datt + (b * T + t0) * C + head * HS;
          real delta[QUERY_TILE] = {};
          real lse_tile[QUERY_TILE] = {};
          for (size_t t = 0; t < queries; t++) {
            delta[t] = dot(datt_tile + t * C, att_tile + t * C, HS);
            lse_tile[t] = lse[(b * NH + head) * T + t0 + t];
          }

          matmul_on_this_thread({a.data(), QUERY_TILE}, {k.data(), HS}, transposed(q_tile, 3 * C), keys,
                                queries, HS);
          matmul_on_this_thread({da.data(), QUERY_TILE}, {v.data(), HS}, transposed(datt_tile, C), keys,
                                queries, HS);
          scale_and_mask(a.data(), scale, t0, keys);
          for (size_t u = 0; u < keys; u++) {
            real* a_u = &a[u * QUERY_TILE];
            real* da_u = &da[u * QUERY_TILE];
#pragma omp simd
            for (size_t t = 0; t < QUERY_TILE; t++) {
              a_u[t] = exponential(a_u[t] - lse_tile[t]);
              da_u[t] = scale * a_u[t] * (da_u[t] - delta[t]);
            }
          }

          const View weights = {a.data(), QUERY_TILE};  // (keys, queries)
          const View scaled_dscores = {da.data(), QUERY_TILE};
          matmul_on_this_thread({dv.data(), HS}, weights, {datt_tile, C}, keys, HS, queries, accumulate);
          matmul_on_this_thread({dk.data(), HS}, scaled_dscores, {q_tile, 3 * C}, keys, HS, queries,
                                accumulate);
          matmul_on_this_thread({dq + t0 * 3 * C, 3 * C}, transposed(da.data(), QUERY_TILE), {k.data(), HS},
                                queries, HS, keys);
        }
        copy_head(dq + C, 3 * C, dk.data(), HS, T, HS);
        copy_head(dq + 2 * C, 3 * C, dv.data(), HS, T, HS);
      }
  }
}

// ---- SwiGLU --------------------------------------------------------------------------------------------

// Elementwise loops that hold an exponential or a square root go in chunks of this many numbers: a vectorised
// loop and its scalar remainder may round differently, so where a chunk ends must not depend on the number of
// threads.
constexpr size_t CHUNK = 1 << 12;

// act = silu(gate) * up, silu(x) = x sigmoid(x)
void swiglu_forward(real* act,                         // (n)
                    const real* gate, const real* up,  // (n)
                    size_t n) {
#pragma omp parallel for
  for (size_t begin = 0; begin < n; begin += CHUNK)
#pragma omp simd
    for (size_t i = begin; i < std::min(begin + CHUNK, n); i++) {
      const real sigmoid = 1 / (1 + exponential(-gate[i]));
      act[i] = gate[i] * sigmoid * up[i];
    }
}

// forward: act = g sigmoid(g) up       dup = dact silu(g)      dg = dact up sigmoid(g) (1 + g (1 - sigmoid(g)))
// act, which w_down's gradient needs and nobody kept, comes along. Outputs may take the place of inputs.
void swiglu_backward(real* dgate, real* dup, real* act,  // (n)
                     const real* dact,                   // (n)
                     const real* gate, const real* up,   // (n)
                     size_t n) {
#pragma omp parallel for
  for (size_t begin = 0; begin < n; begin += CHUNK)
#pragma omp simd
    for (size_t i = begin; i < std::min(begin + CHUNK, n); i++) {
      const real g = gate[i];
      const real u = up[i];
      const real d = dact[i];
      const real sigmoid = 1 / (1 + exponential(-g));
      act[i] = g * sigmoid * u;
      dup[i] = d * g * sigmoid;
      dgate[i] = d * u * sigmoid * (1 + g * (1 - sigmoid));
    }
}

// ---- classifier: tied head and softmax cross-entropy ---------------------------------------------------

// logits = x wte^T over the V real tokens, loss = -log softmax(logits)[target]. With a large vocabulary the
// logits of a whole batch would be the largest array of all. So they are formed for CLASSIFIER_ROWS tokens at a
// time, and those tokens' losses and, if dx is given, gradients are finished before the next rows overwrite
// them.
//   dlogits = (softmax(logits) - onehot(target)) dloss      dx = dlogits wte      dwte += dlogits^T x
constexpr size_t CLASSIFIER_ROWS = 256;
void classifier(real* losses,        // (BT), nats
                real* dx,            // (BT,C); null: no gradients
                real* dwte,          // (Vp,C)
                const real* x,       // (BT,C)
                const real* wte,     // (Vp,C)
                const int* targets,  // (BT)
                real dloss,          // gradient of every token's loss: 1 / tokens in the step
                real* logits,        // workspace (CLASSIFIER_ROWS,Vp)
                size_t BT, size_t C, size_t V, size_t Vp) {
  for (size_t begin = 0; begin < BT; begin += CLASSIFIER_ROWS) {
    const size_t rows = std::min(CLASSIFIER_ROWS, BT - begin);
    matmul({logits, Vp}, {x + begin * C, C}, transposed(wte, C), rows, V, C);
#pragma omp parallel for
    for (size_t row = 0; row < rows; row++) {
      real* z = logits + row * Vp;
      const size_t target = size_t(targets[begin + row]);
      const real target_logit = z[target];
      const real top = maximum(z, V);
      real sum = 0;
#pragma omp simd reduction(+ : sum)
      for (size_t v = 0; v < V; v++) {
        z[v] = exponential(z[v] - top);
        sum += z[v];
      }
      losses[begin + row] = std::log(sum) - (target_logit - top);  // large logits cancel before they round

      if (!dx) continue;
      for (size_t v = 0; v < V; v++) z[v] *= dloss / sum;
      z[target] -= dloss;
    }
    if (!dx) continue;
    matmul({dx + begin * C, C}, {logits, Vp}, {wte, C}, rows, C, V);
    matmul({dwte, C}, transposed(logits, Vp), {x + begin * C, C}, V, C, rows, accumulate);
  }
}

// ---- the model -----------------------------------------------------------------------------------------

struct Activations {
  // Kept from forward to backward.
  real* stream;  // (2L+1, B,T,C): embedding, then the partial after each sublayer
  real* rstd;    // (2L+1, B,T): 1 / rms of each slot of the stream
  real* p;       // the routes' weights, site after site, each (R,B,T,K)
  real* qkv;     // (L, B,T,3C) after rope
  real* att;     // (L, B,T,C)
  real* lse;     // (L, B,NH,T)
  real* gate;    // (L, B,T,F); its gradient takes its place, and up's likewise
  real* up;      // (L, B,T,F)

  // One site at a time; the backward computes them again.
  real* h;    // (routes, B,T,C) mixes; arch `average` appends their average; residual: none
  real* x;    // (routes, B,T,C) normalised mixes: what the sublayer reads
  real* act;  // (B,T,F); in the backward its gradient, then act again

  // The classifier's.
  real* logits;  // (CLASSIFIER_ROWS,Vp)
  real* losses;  // (B,T)

  // Gradients, one sublayer at a time; only the bank lives through the backward.
  real* dbank;  // (bank_size, B,T,C): the embedding's, then one per block; residual: one for all
  real* dh;     // (routes, B,T,C)
  real* dx;     // (routes, B,T,C), one per input; the classifier's goes in the first
  real* dqkv;   // (B,T,3C)
  real* datt;   // (B,T,C)
};

struct Model {
  Config config;
  size_t B = 0, T = 0;                          // largest batch and context that the buffers hold
  Tensors<real> params, grads, adam_m, adam_v;  // each one allocation, in the order of the tensor table
  size_t num_elements = 0;                      // of each family, padding rows of wte included
  // Of many ranks (ranks.h) each updates one share, and has no more of adam_m and adam_v than that, from wte
  // on.
  size_t share = 0;
  Activations acts = {};
  size_t activation_bytes = 0;
};

void allocate_tensors(Tensors<real>& tensors, const Config& config, size_t elements, const char* family) {
  real* all = alloc_array<real>(elements, family);
  for (const TensorSpec& t : tensor_table(config))
    if (t.present) tensors.tensor(t.id) = all + t.begin;
}

// Calls visit(name, pointer, elements) for every activation buffer: allocation and the memory table.
template <class Visit>
void for_each_activation(Activations& a, const Config& c, size_t B, size_t T, Visit visit) {
  const size_t BT = B * T;
  const size_t BTC = BT * c.C;
  const size_t BTF = BT * c.F;
  const size_t routes = c.two_routes() ? 2 : 1;  // the most that one site has; 1 serves a residual network too
  size_t weights = 0;                            // elements of p for one token
  for (size_t i = 0; i <= c.sublayers(); i++) weights += c.num_routes(i) * c.num_sources(i);
  visit("stream", a.stream, (c.sublayers() + 1) * BTC);
  visit("stream rstd", a.rstd, c.has_routes() ? (c.sublayers() + 1) * BT : 0);
  visit("route weights", a.p, weights * BT);
  visit("qkv", a.qkv, c.L * 3 * BTC);
  visit("attention output", a.att, c.L * BTC);
  visit("attention lse", a.lse, c.L * c.NH * BT);
  visit("gate", a.gate, c.L * BTF);
  visit("up", a.up, c.L * BTF);
  visit("mixes", a.h, (c.has_routes() ? routes + (c.arch == Arch::average) : 0) * BTC);
  visit("normalised mixes", a.x, routes * BTC);
  visit("act", a.act, BTF);
  visit("logits chunk", a.logits, CLASSIFIER_ROWS * c.Vp());
  visit("losses", a.losses, BT);
  visit("d bank", a.dbank, c.bank_size() * BTC);
  visit("d mixes", a.dh, routes * BTC);
  visit("d normalised mixes", a.dx, routes * BTC);
  visit("d qkv", a.dqkv, 3 * BTC);
  visit("d attention output", a.datt, BTC);
}

void model_zero_grad(Model& m) { memset(m.grads.wte, 0, ranks.size * m.share * sizeof(real)); }

void model_create(Model& m, const Config& config, size_t B, size_t T, uint64_t seed) {
  m.config = config;
  m.B = B;
  m.T = T;
  m.num_elements = count_elements(config);
  m.share = share_of(m.num_elements);
  allocate_tensors(m.params, config, ranks.size * m.share, "parameters");
  allocate_tensors(m.grads, config, ranks.size * m.share, "gradients");
  allocate_tensors(m.adam_m, config, m.share, "first moments");
  allocate_tensors(m.adam_v, config, m.share, "second moments");
  model_zero_grad(m);
  for (Tensors<real>* moments : {&m.adam_m, &m.adam_v}) memset(moments->wte, 0, m.share * sizeof(real));
  for_each_activation(m.acts, config, B, T, [&](const char* name, real*& pointer, size_t n) {
    pointer = alloc_array<real>(n, name);
    m.activation_bytes += n * sizeof(real);
  });

  for (const TensorSpec& t : tensor_table(config)) {
    real* w = m.params.tensor(t.id);
#pragma omp parallel for
    for (size_t i = 0; i < t.size(); i++) w[i] = real(initial_value(t, config, seed, i));
  }
}

void model_free(Model& m) {
  for (Tensors<real>* family : {&m.params, &m.grads, &m.adam_m, &m.adam_v}) free_array(family->wte);
  for_each_activation(m.acts, m.config, m.B, m.T,
                      [](const char*, real*& pointer, size_t) { free_array(pointer); });
  m = Model();
}

// What one site reads: its sources, and the parameters of its routes and norm (Config says which are where).
struct Site {
  size_t K;       // sources
  size_t R;       // routes
  size_t inputs;  // normalised inputs of the sublayer: 2 (x_qk, x_v) where a site has two routes, else 1;
                  // average: 1
  std::vector<const real*> sources;    // K pointers to (BT,C)
  std::vector<const real*> rstd;       // K pointers to (BT)
  std::vector<real*> dsources;         // K pointers to (BT,C): where each source's gradient gathers
  real* p;                             // (R,BT,K)
  const real *query[2], *gain, *norm;  // each (C)
  real *dquery[2], *dgain, *dnorm;
};

Site site_at(Model& m, size_t i, size_t BT) {
  const Config& c = m.config;
  const Activations& a = m.acts;
  Site site = {};
  site.K = c.num_sources(i);
  site.R = c.num_routes(i);
  site.inputs = c.arch == Arch::average ? 1 : std::max<size_t>(site.R, 1);
  site.p = a.p;  // sites follow each other; a handful of additions, next to millions in what follows
  for (size_t j = 0; j < i; j++) site.p += c.num_routes(j) * c.num_sources(j) * BT;
  for (size_t slot : c.source_slots(i)) {
    site.sources.push_back(a.stream + slot * BT * c.C);
    site.rstd.push_back(a.rstd + slot * BT);
    site.dsources.push_back(a.dbank + c.bank_index(slot) * BT * c.C);
  }

  // A tensor's vector for this site; null where the arm lacks the tensor.
  const size_t layer = i < c.sublayers() ? i / 2 : 0;
  const auto vector_of = [&](real* tensor) { return tensor ? tensor + layer * c.C : nullptr; };
  const auto choose = [&](const Tensors<real>& w, auto& query, auto& gain, auto& norm) {
    const bool head = i == c.sublayers();
    const bool mlp = i % 2 == 1;
    query[0] = vector_of(head ? w.out_route : mlp ? w.mlp_route : w.attn_route_qk);
    gain = vector_of(head ? w.out_route_gain : mlp ? w.mlp_route_gain : w.attn_route_gain);
    norm = vector_of(head ? w.final_norm : mlp ? w.mlp_norm : w.attn_norm);
    query[1] = vector_of(w.attn_route_v);  // null: held at zero or not there; read only where R = 2
    if (c.arch == Arch::tied) query[1] = query[0];
  };
  choose(m.params, site.query, site.gain, site.norm);
  choose(m.grads, site.dquery, site.dgain, site.dnorm);
  return site;
}

// Gradient of the running partial after sublayer i, which is the gradient of the sublayer's output too.
real* dpartial(const Model& m, size_t i, size_t BT) {
  return m.acts.dbank + m.config.bank_index(i + 1) * BT * m.config.C;
}

// The average arm at a site with two routes: Q, K and V all read (h_qk + h_v) / 2, which stands behind the two.
bool reads_average(const Model& m, const Site& site) { return m.config.arch == Arch::average && site.R == 2; }

// The mixes that a site's norm reads, one per input, each (BT,C).
const real* site_mixes(const Model& m, const Site& site, size_t BT) {
  if (site.R == 0) return site.sources[0];  // residual: the running sum itself
  return m.acts.h + (reads_average(m, site) ? 2 * BT * m.config.C : 0);
}

// Reads the sources through the site's routes and normalises: acts.h and acts.x, overwritten by the next site.
// The forward finds and saves the weights p; the backward, given p, reads again to have h and x back.
enum class Weights { find, given };
void read_sources(Model& m, const Site& site, size_t BT, Weights weights) {
  const size_t BTC = BT * m.config.C;
  real* h = m.acts.h;
  if (site.R > 0 && weights == Weights::find)
    route_forward(h, site.p, site.sources.data(), site.rstd.data(), site.query, site.gain, BT, m.config.C,
                  site.K, site.R);
  if (site.R > 0 && weights == Weights::given)
    route_mix(h, site.p, site.sources.data(), BT, m.config.C, site.K, site.R);
  if (reads_average(m, site)) average(h + 2 * BTC, h, h + BTC, BTC);

  const real* mixes = site_mixes(m, site, BT);
  for (size_t n = 0; n < site.inputs; n++)
    rmsnorm_forward(m.acts.x + n * BTC, mixes + n * BTC, site.norm, BT, m.config.C);
}

// Slot i + 1 holds the output o of sublayer i. Adds the partial before it (slot i), unless this sublayer starts
// a block, and saves the slot's rstd for the routes that read it.
void write_partial(Model& m, size_t i, size_t BT) {
  const Config& c = m.config;
  real* slot = m.acts.stream + (i + 1) * BT * c.C;
  // forward: partial = o if this sublayer starts a block, else partial + o. A residual network adds always.
  if (i % c.S != 0 || !c.has_routes()) add(slot, slot - BT * c.C, BT * c.C);
  if (c.has_routes()) source_rstd(m.acts.rstd + (i + 1) * BT, slot, BT, c.C);
}

// tokens (B,T). Leaves what the head reads, final_norm * rmsnorm(h_out), in acts.x.
void model_forward(Model& m, const int* tokens, size_t B, size_t T) {
  const Config& c = m.config;
  const Tensors<real>& w = m.params;
  const Activations& a = m.acts;
  const size_t C = c.C;
  const size_t F = c.F;
  const size_t BT = B * T;

  embedding_forward(a.stream, tokens, w.wte, BT, C);
  if (c.has_routes()) source_rstd(a.rstd, a.stream, BT, C);

  for (size_t l = 0; l < c.L; l++) {
    {  // attention: sublayer 2l
      const Site site = site_at(m, 2 * l, BT);
      const real* x_qk = a.x;
      const real* x_v = a.x + (site.inputs - 1) * BT * C;
      real* qkv = a.qkv + l * BT * 3 * C;
      real* att = a.att + l * BT * C;
      real* out = a.stream + (2 * l + 1) * BT * C;

      read_sources(m, site, BT, Weights::find);
      matmul_forward({qkv, 3 * C}, x_qk, w.wqk + l * 2 * C * C, BT, C, 2 * C);
      matmul_forward({qkv + 2 * C, 3 * C}, x_v, w.wv + l * C * C, BT, C, C);
      rope_forward(qkv, B, T, C, c.NH);
      attention_forward(att, a.lse + l * c.NH * BT, qkv, B, T, C, c.NH);
      matmul_forward({out, C}, att, w.wo + l * C * C, BT, C, C);
      write_partial(m, 2 * l, BT);
    }
    {  // feed-forward: sublayer 2l + 1
      const Site site = site_at(m, 2 * l + 1, BT);
      real* gate = a.gate + l * BT * F;
      real* up = a.up + l * BT * F;
      real* out = a.stream + (2 * l + 2) * BT * C;

      read_sources(m, site, BT, Weights::find);
      matmul_forward({gate, F}, a.x, w.w_gate + l * F * C, BT, C, F);
      matmul_forward({up, F}, a.x, w.w_up + l * F * C, BT, C, F);
      swiglu_forward(a.act, gate, up, BT * F);
      matmul_forward({out, C}, a.act, w.w_down + l * C * F, BT, F, C);
      write_partial(m, 2 * l + 1, BT);
    }
  }
  read_sources(m, site_at(m, c.sublayers(), BT), BT, Weights::find);
}

// Backward of read_sources: from acts.dx, one gradient per input, adds to the gradients of the site's sources,
// queries, gain and norm. acts.h must hold this site's mixes. Overwrites acts.dh and, in `tied`, acts.dx.
void read_sources_backward(Model& m, const Site& site, size_t BT) {
  const size_t C = m.config.C;
  const size_t BTC = BT * C;
  const real* mixes = site_mixes(m, site, BT);
  real* dh = m.acts.dh;
  real* dx = m.acts.dx;
  size_t inputs = site.inputs;
  size_t R = site.R;
  if (m.config.arch == Arch::tied && R == 2) {  // both inputs are one function of one query: as in `block`
    add(dx, dx + BTC, BTC);
    inputs = 1;
    R = 1;
  }

  for (size_t n = 0; n < inputs; n++)
    rmsnorm_backward(dh + n * BTC, site.dnorm, dx + n * BTC, mixes + n * BTC, site.norm, BT, C);
  if (reads_average(m, site)) average_backward(dh, dh + BTC, BTC);
  if (R == 0) return add(site.dsources[0], dh, BTC);  // residual: h is the source itself

  route_backward(site.dsources.data(), site.dquery, site.dgain, dh, m.acts.h, site.p, site.sources.data(),
                 site.rstd.data(), site.query, site.gain, BT, C, site.K, R);
}

// After model_forward and classifier, which left the gradient of the head's input in acts.dx. Adds to m.grads.
// Uses up acts.gate and acts.up: each backward needs a forward of its own.
//
// All slots of one block share one gradient buffer of the bank. partial_after = partial_before + o gives both
// terms the same gradient, so on the way back nothing is copied: the buffer holds d partial_after, which is d
// o; once the site that read partial_before has added its share, the same buffer holds d partial_before.
// Whoever reads the finished block stands later in the network and has added already. A block's first sublayer
// has no partial_before: its site adds to other blocks' buffers only. A residual network has one buffer for all
// slots.
void model_backward(Model& m, const int* tokens, size_t B, size_t T) {
  const Config& c = m.config;
  const Tensors<real>& w = m.params;
  const Tensors<real>& d = m.grads;
  const Activations& a = m.acts;
  const size_t C = c.C;
  const size_t F = c.F;
  const size_t BT = B * T;

  memset(a.dbank, 0, c.bank_size() * BT * C * sizeof(real));
  read_sources_backward(m, site_at(m, c.sublayers(), BT), BT);  // acts.h still holds this site's mixes

  for (size_t l = c.L; l-- > 0;) {
    {  // feed-forward: sublayer 2l + 1
      const Site site = site_at(m, 2 * l + 1, BT);
      const real* dout = dpartial(m, 2 * l + 1, BT);
      real* gate = a.gate + l * BT * F;
      real* up = a.up + l * BT * F;
      real* dgate = gate;  // gradients take the place of what they are gradients of
      real* dup = up;
      real* dact = a.act;  // until swiglu_backward puts act back in its place

      matmul_backward_input(dact, {dout, C}, w.w_down + l * C * F, BT, F, C);
      swiglu_backward(dgate, dup, a.act, dact, gate, up, BT * F);
      matmul_backward_weight(d.w_down + l * C * F, {dout, C}, a.act, BT, F, C);
      read_sources(m, site, BT, Weights::given);
      matmul_backward_weight(d.w_gate + l * F * C, {dgate, F}, a.x, BT, C, F);
      matmul_backward_weight(d.w_up + l * F * C, {dup, F}, a.x, BT, C, F);
      matmul_backward_input(a.dx, {dgate, F}, w.w_gate + l * F * C, BT, C, F);
      matmul_backward_input(a.dx, {dup, F}, w.w_up + l * F * C, BT, C, F, accumulate);
      read_sources_backward(m, site, BT);
    }
    {  // attention: sublayer 2l
      const Site site = site_at(m, 2 * l, BT);
      const real* dout = dpartial(m, 2 * l, BT);
      const real* qkv = a.qkv + l * BT * 3 * C;
      const real* att = a.att + l * BT * C;
      const real* x_qk = a.x;
      const real* x_v = a.x + (site.inputs - 1) * BT * C;
      real* dx_qk = a.dx;
      real* dx_v = a.dx + (site.inputs - 1) * BT * C;
      const View dqk = {a.dqkv, 3 * C};
      const View dv = {a.dqkv + 2 * C, 3 * C};

      matmul_backward_weight(d.wo + l * C * C, {dout, C}, att, BT, C, C);
      matmul_backward_input(a.datt, {dout, C}, w.wo + l * C * C, BT, C, C);
      attention_backward(a.dqkv, a.datt, qkv, att, a.lse + l * c.NH * BT, B, T, C, c.NH);
      rope_backward(a.dqkv, B, T, C, c.NH);
      read_sources(m, site, BT, Weights::given);
      matmul_backward_weight(d.wqk + l * 2 * C * C, dqk, x_qk, BT, C, 2 * C);
      matmul_backward_weight(d.wv + l * C * C, dv, x_v, BT, C, C);
      matmul_backward_input(dx_qk, dqk, w.wqk + l * 2 * C * C, BT, C, 2 * C);
      matmul_backward_input(dx_v, dv, w.wv + l * C * C, BT, C, C, dx_v == dx_qk ? accumulate : overwrite);
      read_sources_backward(m, site, BT);
    }
  }
  embedding_backward(d.wte, a.dbank, tokens, BT, C);
}

// Mean loss in nats per token, summed in token order in double: independent of threads.
double mean_loss(const real* losses, size_t BT) {
  double sum = 0;
  for (size_t bt = 0; bt < BT; bt++) sum += double(losses[bt]);
  return sum / double(BT);
}

// Loss of one micro-batch; adds the gradient of (its mean loss / accumulation) to m.grads.
double model_loss_and_gradients(Model& m, const int* tokens, const int* targets, size_t B, size_t T,
                                size_t accumulation = 1) {
  const Config& c = m.config;
  const Activations& a = m.acts;
  const real dloss = 1 / (real(B * T) * real(accumulation));
  model_forward(m, tokens, B, T);
  classifier(a.losses, a.dx, m.grads.wte, a.x, m.params.wte, targets, dloss, a.logits, B * T, c.C, c.V, c.Vp());
  model_backward(m, tokens, B, T);
  return mean_loss(a.losses, B * T);
}

// Losses only, per token in acts.losses.
double model_loss(Model& m, const int* tokens, const int* targets, size_t B, size_t T) {
  const Config& c = m.config;
  const Activations& a = m.acts;
  model_forward(m, tokens, B, T);
  classifier(a.losses, nullptr, nullptr, a.x, m.params.wte, targets, 0, a.logits, B * T, c.C, c.V, c.Vp());
  return mean_loss(a.losses, B * T);
}

// ---- what the routes do --------------------------------------------------------------------------------

// Adds the last forward's attention routes to the sums in stats: the weight on each source for QK and for V,
// and the Jensen-Shannon divergence between the two, JS = (KL(p||m) + KL(q||m)) / 2 with m = (p + q) / 2.
void add_route_stats(RouteStats& stats, Model& m, size_t BT) {
  const Config& c = m.config;
  if (!c.has_routes()) return;
  stats.qk.resize(c.L);
  stats.v.resize(c.L);
  stats.js_nats.resize(c.L);
  for (size_t l = 0; l < c.L; l++) {
    const Site site = site_at(m, 2 * l, BT);
    stats.qk[l].resize(site.K), stats.v[l].resize(site.R == 2 ? site.K : 0);
    for (size_t bt = 0; bt < BT; bt++) {
      const real *p = site.p + bt * site.K, *q = site.p + ((site.R - 1) * BT + bt) * site.K;
      for (size_t j = 0; j < site.K; j++) {
        const double pj = double(p[j]), qj = double(q[j]), mj = (pj + qj) / 2;
        stats.qk[l][j] += pj;
        if (site.R == 2) stats.v[l][j] += qj;
        if (pj > 0) stats.js_nats[l] += pj * std::log(pj / mj) / 2;
        if (qj > 0) stats.js_nats[l] += qj * std::log(qj / mj) / 2;
      }
    }
  }
}

// ---- a number that is not finite -----------------------------------------------------------------------

bool all_finite(const real* values, size_t n) {
  return std::all_of(values, values + n, [](real value) { return std::isfinite(value); });
}

// Names a tensor and layer of a family that holds a number that is not finite: of several the one nearest to
// the output, where a bad gradient begins before it spreads to all that comes below. "" if all are finite.
std::string find_non_finite(const Config& c, Tensors<real>& family) {
  return nearest_to_output(
      c, [&](TensorId id, size_t offset, size_t n) { return !all_finite(family.tensor(id) + offset, n); });
}

// Says which number of a step was the first not to be finite; "" if all are. Call it after model_zero_grad and
// model_loss_and_gradients of one micro-batch.
std::string blame_non_finite(Model& m, size_t BT) {
  const Config& c = m.config;
  const Activations& a = m.acts;
  const auto sublayer = [](size_t i) {
    return format("%s, layer %zu", i % 2 ? "feed-forward" : "attention", i / 2);
  };
  const std::string parameter = find_non_finite(c, m.params);
  if (!parameter.empty()) return "parameter " + parameter;
  for (size_t i = 0; i <= c.sublayers(); i++) {
    const Site site = site_at(m, i, BT);
    if (!all_finite(a.stream + i * BT * c.C, BT * c.C))
      return i == 0 ? "the embedding" : "the output of the " + sublayer(i - 1);
    if (!all_finite(site.p, site.R * BT * site.K))
      return i == c.sublayers() ? "the output route" : "a route of the " + sublayer(i);
  }
  read_sources(m, site_at(m, c.sublayers(), BT), BT, Weights::given);
  if (!all_finite(a.x, BT * c.C)) return "what the head reads";
  if (!all_finite(a.losses, BT)) return "the logits";
  const std::string gradient = find_non_finite(c, m.grads);
  return gradient.empty() ? "" : "gradient of " + gradient;
}

// ---- AdamW ---------------------------------------------------------------------------------------------

constexpr double ADAM_BETA1 = 0.9;
constexpr double ADAM_BETA2 = 0.95;
constexpr double ADAM_EPS = 1e-8;

// Global norm of all gradients, each rank's share of them summed up by itself. Chunks of fixed size, added in
// order in double: independent of threads and ranks.
double grad_norm(const Model& m) {
  const real* g = m.grads.wte;  // the whole family is one allocation
  const Part own = own_part(m.num_elements);
  std::vector<double> sums((own.end - own.first + SHARE_CHUNK - 1) / SHARE_CHUNK);
#pragma omp parallel for
  for (size_t chunk = 0; chunk < sums.size(); chunk++) {
    const size_t first = own.first + chunk * SHARE_CHUNK;
    const size_t end = std::min(first + SHARE_CHUNK, own.end);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = first; i < end; i++) sum += double(g[i]) * double(g[i]);
    sums[chunk] = sum;
  }
  double sum = 0;
  for (double s : gather(sums)) sum += s;
  return std::sqrt(sum);
}

// One step for n numbers: m and v are running means of g and g^2, corrected for having started at zero.
//   p -= lr (mhat / (sqrt(vhat) + eps) + decay p)
void adamw(real* p, real* m, real* v, const real* g, size_t n, double grad_scale, double lr, double decay,
           size_t step) {
  const real beta1 = real(ADAM_BETA1);
  const real beta2 = real(ADAM_BETA2);
  const real eps = real(ADAM_EPS);
  const real correct1 = real(1 / (1 - std::pow(ADAM_BETA1, double(step))));
  const real correct2 = real(1 / (1 - std::pow(ADAM_BETA2, double(step))));
  const real scale = real(grad_scale);
  const real rate = real(lr);
  const real shrink = real(lr * decay);
#pragma omp parallel for
  for (size_t begin = 0; begin < n; begin += CHUNK)
#pragma omp simd
    for (size_t i = begin; i < std::min(begin + CHUNK, n); i++) {
      const real grad = scale * g[i];
      m[i] = beta1 * m[i] + (1 - beta1) * grad;
      v[i] = beta2 * v[i] + (1 - beta2) * grad * grad;
      p[i] -= rate * (m[i] * correct1) / (std::sqrt(v[i] * correct2) + eps) + shrink * p[i];
    }
}

// step counts from 1. Gradients are scaled by grad_scale (clipping) on the way in. Each rank updates its share
// and gets the others'.
void model_update(Model& m, size_t step, double grad_scale, double lr, double weight_decay,
                  double query_lr_mult) {
  const Part own = own_part(m.num_elements);
  for (const TensorSpec& t : tensor_table(m.config)) {
    const size_t first = std::max(t.begin, own.first), end = std::min(t.begin + t.size(), own.end);
    if (first >= end) continue;
    const size_t at = first - own.first;
    adamw(m.params.wte + first, m.adam_m.wte + at, m.adam_v.wte + at, m.grads.wte + first, end - first,
          grad_scale, t.kind == Kind::query ? lr * query_lr_mult : lr, t.is_matrix() ? weight_decay : 0, step);
  }
  gather_shares(m.params.wte, m.share);
}

// ---- checkpoint ----------------------------------------------------------------------------------------

// Parameters as model.<name>, moments as adam_m.<name> and adam_v.<name>: float32, whatever `real` is.
struct Family {
  const char* prefix;
  real* numbers;
  size_t share;  // what one rank has of it: of the parameters all
  Part own;
};
std::vector<Family> checkpoint_families(const Model& m) {
  return {{"model.", m.params.wte, m.num_elements, {0, m.num_elements}},
          {"adam_m.", m.adam_m.wte, m.share, own_part(m.num_elements)},
          {"adam_v.", m.adam_v.wte, m.share, own_part(m.num_elements)}};
}

// Rank 0 writes; of what it does not have itself, a chunk at a time passes through its memory.
void model_save(Model& m, const std::string& path, const std::map<std::string, std::string>& metadata) {
  std::vector<CheckpointTensor> tensors;
  for (const Family& family : checkpoint_families(m)) {
    const auto read = [family](size_t at, size_t n, float* chunk) {
      for (size_t i = 0; i < n; i++) chunk[i] = float(family.numbers[at + i]);
    };
    for (const TensorSpec& t : tensor_table(m.config)) {
      if (!t.present) continue;
      const auto get = [family, read, t](size_t offset, size_t n, float* chunk) {
        collect(chunk, t.begin + offset, n, family.share, read);
      };
      tensors.push_back({std::string(family.prefix) + t.name, t.shape, get});
    }
  }
  checkpoint_write(path, metadata, tensors);
}

// Parameters, and the moments too if `with_moments` (resuming; without: starting from given weights). Ends the
// program if one is missing or has another shape.
void model_load(Model& m, const Checkpoint& checkpoint, bool with_moments) {
  for (const Family& family : checkpoint_families(m)) {
    if (family.numbers != m.params.wte && !with_moments) continue;
    for (const TensorSpec& t : tensor_table(m.config)) {
      if (!t.present) continue;
      const auto put = [&](size_t offset, size_t n, const float* chunk) {
        const size_t from = t.begin + offset;
        for (size_t i = std::max(from, family.own.first); i < std::min(from + n, family.own.end); i++)
          family.numbers[i - family.own.first] = real(chunk[i - from]);
      };
      checkpoint.read(std::string(family.prefix) + t.name, t.shape, put);
    }
  }
}

// ---- what dev/common/train.h asks of a model, besides add_route_stats -----------------------------------

// The loss of every token, (B,T), in nats.
std::vector<real> token_losses(Model& m, const int* tokens, const int* targets, size_t B, size_t T) {
  model_loss(m, tokens, targets, B, T);
  return std::vector<real>(m.acts.losses, m.acts.losses + B * T);
}

// Logits of the token that follows `context` (the last T tokens of it): V numbers.
void next_token_logits(Model& m, const std::vector<int>& context, std::vector<float>& logits) {
  const Config& c = m.config;
  const size_t n = std::min(context.size(), m.T);
  model_forward(m, context.data() + context.size() - n, 1, n);
  matmul({m.acts.logits, c.Vp()}, {m.acts.x + (n - 1) * c.C, c.C}, transposed(m.params.wte, c.C), 1, c.V, c.C);
  logits.assign(m.acts.logits, m.acts.logits + c.V);
}

// ---- one training step ---------------------------------------------------------------------------------

struct StepResult {
  double loss, norm;
};

// Example numbers position .. position + B * accumulation - 1 of the run's data order, B at a time, each rank
// as many; clipping; one update. step counts from 1. Stops the program, naming the tensor, before a number that
// is not finite reaches the parameters.
StepResult train_step(Model& m, const TokenData& data, const Options& o, size_t position, size_t step,
                      double lr) {
  const size_t B = m.B, T = m.T, accumulation = o.total_batch / (B * T);
  std::vector<int> tokens(B * T), targets(B * T);
  StepResult result = {0, 0};
  const auto micro_batch = [&](size_t micro) {
    for (size_t b = 0; b < B; b++)
      training_example(data, T, o.seed, position + micro * B + b, &tokens[b * T], &targets[b * T]);
    return model_loss_and_gradients(m, tokens.data(), targets.data(), B, T, accumulation);
  };
  const size_t first = accumulation / ranks.size * ranks.rank, end = first + accumulation / ranks.size;
  std::vector<double> losses;
  model_zero_grad(m);
  for (size_t micro = first; micro < end; micro++) losses.push_back(micro_batch(micro));
  for (double loss : gather(losses)) result.loss += loss / double(accumulation);
  sum_shares(m.grads.wte, m.share);
  result.norm = grad_norm(m);
  if (!std::isfinite(result.loss) || !std::isfinite(result.norm)) {
    std::string where;  // every micro-batch once more, alone, until one shows it
    for (size_t micro = first; micro < end && where.empty(); micro++) {
      model_zero_grad(m);
      micro_batch(micro);
      where = blame_non_finite(m, B * T);
    }
    where = first_text(where);
    ranks.together = true;
    if (where.empty()) where = "the sum of gradients or its norm, which overflowed";
    fatal(EXIT_ERROR,
          "step %zu: loss %g, gradient norm %g, first bad number in %s; expected finite numbers."
          " No update was made; resume from the last checkpoint, with a lower --lr",
          step, result.loss, result.norm, where.c_str());
  }
  const double scale = o.clip > 0 && result.norm > o.clip ? o.clip / result.norm : 1;
  model_update(m, step, scale, lr, o.weight_decay, o.query_lr_mult);
  return result;
}

}  // namespace CPU_NAMESPACE

#undef REAL
#undef CPU_NAMESPACE

#ifndef TESTING
using namespace cpu;

// ---- main ----------------------------------------------------------------------------------------------

// While OpenMP's threads wait for one another they keep their cores busy; beside another program a step then
// takes many times as long. With these settings, g++'s and clang's, they soon sleep. OpenMP reads them when the
// program starts, so it starts once more, unless the user has a setting of their own.
static void let_waiting_threads_sleep(char** argv) {
  if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || getenv("KMP_BLOCKTIME")) return;
  setenv("GOMP_SPINCOUNT", "10000", 1);
  setenv("KMP_BLOCKTIME", "0", 1);
  execvp(argv[0], argv);  // returns only if that cannot be done: then the run goes on as it is
}

static std::vector<MemoryLine> memory_lines(const Config& c, size_t B) {
  const size_t elements = count_elements(c);
  size_t activations = 0;
  Activations none = {};
  for_each_activation(none, c, B, c.T, [&](const char*, real*&, size_t n) { activations += n * sizeof(real); });
  const size_t share = share_of(elements) * sizeof(real), family = ranks.size * share;
  return {{"parameters", family},
          {"gradients", family},
          {"AdamW moments", 2 * share},
          {"activations", activations}};
}

// Operations a second of matrix products like the model's, on this machine now.
static double product_rate() {
  constexpr size_t N = 576;
  std::vector<real> a(N * N, 1), b(N * N, 1), out(N * N);
  const double start = seconds_now();
  double seconds = 0, products = 0;
  while (seconds < 0.5) {
    matmul({out.data(), N}, {a.data(), N}, transposed(b.data(), N), N, N, N);
    products++;
    seconds = seconds_now() - start;
  }
  return products * 2 * double(N * N * N) / seconds;
}

static void print_start(const Run<Model>& run) {
  const Options& o = run.options;
  if (!o.quiet) printf("%s\n", settings_table(o, run.screen).c_str());
  const size_t machine = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  printf("%s%s", model_table(run.config).c_str(),
         memory_table(memory_lines(run.config, o.batch), machine / ranks.local_size).c_str());
  int threads = 0;
#pragma omp parallel reduction(+ : threads)
  threads++;
  printf("threads     %d%s\n", threads, ranks_text().c_str());
  for (const auto& split : run.data.splits())
    printf("%s", data_line(split.first, *split.second, run.config.T).c_str());
  printf("%s", schedule_table(o, run.data.train.num_tokens()).c_str());
  if (o.dry_run) {
    const double rate = product_rate();
    const std::string name = format("%.3g GFLOP/s, the rate of matrix products here and now", rate / 1e9);
    printf("%s", arithmetic_table(run.config, o, rate, name).c_str());
  }
  printf("\n");
}

int main(int argc, char** argv) {
  let_waiting_threads_sleep(argv);
  ranks_open(&argc, &argv);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  Run<Model> run(read_command_line(argc, argv, Device::cpu), story_data);
  const Options& o = run.options;
  print_start(run);
  if (o.dry_run) return 0;

  model_create(run.model, run.config, o.batch, run.config.T, o.seed);
  if (run.has_checkpoint) model_load(run.model, run.checkpoint, run.resuming);
  Log log = take_folder(run);
  log.write(config_event(o, run.config));
  save_before_data_errors(run, log);

  const double start = seconds_now();
  while (!between_steps(run, log)) {
    const double lr = learning_rate(run.step, o.steps, o.warmup, o.lr, o.min_lr_ratio), before = seconds_now();
    const StepResult result = train_step(run.model, run.data.train, o, run.position, run.step + 1, lr);
    report_step(run, log, result.loss, result.norm, lr, seconds_now() - before);
  }
  report_end(run, log, seconds_now() - start);
  model_free(run.model);
  return 0;
}
#endif
