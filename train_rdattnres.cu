// train_rdattnres.cu - Role-Decoupled Attention Residuals (arXiv 2608.01075), trained on a GPU.
//
// What it is: train_rdattnres_cpu.cpp once more, in the same order with the same names, as CUDA kernels. A
// kernel stands beside the function that launches it. Read the CPU file for what a layer computes; read this
// one for how a GPU computes it. Matrix products go through cuBLASLt; every other kernel is here.
//
// What it refuses to be: a library, a framework, a home for many precisions. One process, one GPU.
//
// Conventions, beyond those of the CPU file:
//   floatX is the storage type: bf16 (the default) or float (--dtype fp32, for checking). Activations, their
//   gradients and the matrices that products read are floatX. Master weights, moments, gradients of parameters,
//   norms, gains, queries, softmax statistics and every sum are float32.
//   What rounds to floatX, and nothing else: x (a normalised mix), qkv before and after rope, the weights and
//   the scores' gradients where attention multiplies them, att, gate, up, act, a slot of the stream (o +
//   partial, rounded once), logits; the gradient of each of these; and the gradient of a mix, dh. A mix h never
//   rounds: it lives in registers only.
//   No floating-point atomics: a sum over tokens is made by a fixed number of blocks, each a fixed share, and a
//   second kernel adds the blocks in order. Same binary, same card, same bits.
//   C and F are multiples of 8 and head sizes of 16, so that 16-byte loads never straddle a row or half a head.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dev/common/errors.h"      // fatal, checked_mul, human_bytes
#include "dev/common/checkpoint.h"  // checkpoint_write, Checkpoint: safetensors files
#include "dev/common/config.h"      // Config, TENSOR_TABLE, Tensors, num_routes, bank_index
#include "dev/common/cuda.h"        // launch, load8, warp_sum, matmul, NVTX_RANGE: what every layer uses
#include "data/stories.h"           // tell_story, StoryMarks: the built-in corpus and its questions
#include "dev/common/flags.h"       // Options, parse_flags, config_from: the command line
#include "dev/common/flops.h"       // training_flops, find_card
#include "dev/common/random.h"      // normal, uniform: counter-based random numbers; sample_token
#include "dev/common/ranks.h"       // many cards; one and no more unless built with MPI=1
#include "dev/common/shards.h"      // TokenData, training_example: which tokens come when; open_data
#include "dev/common/train.h"  // Run, validate, generate, save, ...: what both trainers do around the model

namespace gpu {

constexpr float EPS = 1e-6f;  // inside every rmsnorm, routes included
constexpr float LOG2_E = 1.4426950408889634f;

// ---- token embedding -----------------------------------------------------------------------------------

// One thread per eight channels.
template <class floatX>
__global__ void embedding_forward_kernel(floatX* out, const int* tokens, const floatX* wte, size_t BT,
                                         size_t C) {
  const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * 8;
  if (i >= BT * C) return;
  float v[8];
  load8(v, wte + size_t(tokens[i / C]) * C + i % C);
  store8(out + i, v);
}
template <class floatX>
void embedding_forward(floatX* out,        // (BT,C)
                       const int* tokens,  // (BT)
                       const floatX* wte,  // (Vp,C)
                       size_t BT, size_t C) {
  NVTX_RANGE(2 * BT * C * sizeof(floatX));
  launch(embedding_forward_kernel<floatX>, ceil_div(BT * C / 8, 256), 256, 0, device.stream, out, tokens, wte,
         BT, C);
}

// A token may occur many times. The host sorts the positions by token (a counting sort: BT small steps), so
// that one block owns one row of dwte and adds its gradients in a fixed order.
struct TokenBuckets {    // each an array of ints, on the host or on the device
  const int* positions;  // (BT) sorted by token, then by position
  const int* starts;     // (count + 1) where each distinct token's positions begin
  const int* ids;        // (count) the distinct tokens
  size_t count;
};
// Fills `sorted` with positions, starts and ids, one after the other; returns the number of distinct tokens.
inline size_t sort_tokens(std::vector<int>& sorted, const int* tokens, size_t BT, size_t V) {
  std::vector<int> count(V, 0);
  for (size_t bt = 0; bt < BT; bt++) count[size_t(tokens[bt])]++;

  std::vector<int> next(V), starts, ids;  // next: where a token's next position belongs
  int start = 0;
  for (size_t v = 0; v < V; v++) {
    next[v] = start;
    if (count[v] == 0) continue;
    starts.push_back(start);
    ids.push_back(int(v));
    start += count[v];
  }
  starts.push_back(start);

  sorted.resize(BT);
  for (size_t bt = 0; bt < BT; bt++) sorted[size_t(next[size_t(tokens[bt])]++)] = int(bt);
  sorted.insert(sorted.end(), starts.begin(), starts.end());
  sorted.insert(sorted.end(), ids.begin(), ids.end());
  return ids.size();
}

// Launch: grid (distinct tokens, C / 256), block (32, 8). A lane owns eight channels; the 8 warps take every
// eighth occurrence, and their sums are added in order.
template <class floatX>
__global__ void embedding_backward_kernel(float* dwte, const floatX* dout, TokenBuckets buckets, size_t C) {
  __shared__ float sums[8][32][8];
  const int lane = threadIdx.x, warp = threadIdx.y;
  const size_t c = blockIdx.y * size_t(256) + size_t(lane) * 8;
  float sum[8] = {}, v[8];
  if (c < C)
    for (int i = buckets.starts[blockIdx.x] + warp; i < buckets.starts[blockIdx.x + 1]; i += 8) {
      load8(v, dout + size_t(buckets.positions[i]) * C + c);
      for (int k = 0; k < 8; k++) sum[k] += v[k];
    }
  for (int k = 0; k < 8; k++) sums[warp][lane][k] = sum[k];
  __syncthreads();

  if (warp != 0 || c >= C) return;
  float* row = dwte + size_t(buckets.ids[blockIdx.x]) * C + c;
  for (int k = 0; k < 8; k++) {
    for (int other = 1; other < 8; other++) sum[k] += sums[other][lane][k];
    row[k] += sum[k];
  }
}

template <class floatX>
void embedding_backward(float* dwte,         // (Vp,C)
                        const floatX* dout,  // (BT,C)
                        const TokenBuckets& buckets, size_t C) {
  NVTX_RANGE();
  launch(embedding_backward_kernel<floatX>, dim3(unsigned(buckets.count), ceil_div(C, 256)), dim3(32, 8), 0,
         device.stream, dwte, dout, buckets, C);
}

// ---- sums over tokens ----------------------------------------------------------------------------------

// Gradients of norms and queries are sums over all tokens. Stage one: token_blocks() blocks, each with a fixed
// share of the tokens, write one row of sums each. Stage two, here, adds the rows in order. Neither depends on
// when a block runs. So many blocks for each multiprocessor: only another kind of card may round differently.
constexpr int TOKEN_BLOCKS = 3;
inline size_t token_blocks(size_t each = TOKEN_BLOCKS) {
  return each * size_t(device.properties.multiProcessorCount);
}

// A block of so many warps; each takes one token at a time.
constexpr int TOKEN_WARPS = 4, TOKEN_THREADS = 32 * TOKEN_WARPS;

// sum (n) = the warps' shares (TOKEN_WARPS,n), which lie in shared memory, in order. All threads call it.
__device__ inline void add_warps(float* sum, const float* shares, size_t n) {
  __syncthreads();
  for (size_t i = threadIdx.x; i < n; i += TOKEN_THREADS) {
    float total = 0;
    for (int warp = 0; warp < TOKEN_WARPS; warp++) total += shares[warp * n + i];
    sum[i] = total;
  }
}

// What a block sums over its tokens: one vector (C) or several, and where each total belongs.
constexpr int MAX_SUMS = 12;
struct Totals {
  float* vector[MAX_SUMS] = {};
};

// totals.vector[v] (C) += sum over row of rows (num_rows, vectors, C)[row][v]. A block owns 32 channels of one
// vector; its 8 warps take every eighth row. Launch: grid (C / 32, vectors), block (32, 8).
__global__ void add_rows_kernel(const __grid_constant__ Totals totals, const float* rows, size_t num_rows,
                                size_t C) {
  __shared__ float sums[8][32];
  const size_t c = blockIdx.x * size_t(32) + threadIdx.x, vectors = gridDim.y;
  float sum = 0;
  if (c < C)
    for (size_t row = threadIdx.y; row < num_rows; row += 8) sum += rows[(row * vectors + blockIdx.y) * C + c];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();

  if (threadIdx.y != 0 || c >= C) return;
  for (int warp = 1; warp < 8; warp++) sum += sums[warp][threadIdx.x];
  totals.vector[blockIdx.y][c] += sum;
}
inline void add_rows(const std::vector<float*>& totals,  // (C) each, at most MAX_SUMS
                     const float* rows,                  // (num_rows, totals, C)
                     size_t num_rows, size_t C) {
  Totals list;
  std::copy(totals.begin(), totals.end(), list.vector);
  launch(add_rows_kernel, dim3(ceil_div(C, 32), unsigned(totals.size())), dim3(32, 8), 0, device.stream, list,
         rows, num_rows, C);
}

// ---- RMSNorm -------------------------------------------------------------------------------------------

// Alone only where there is one source: the first attention site, and every site of a residual network. One
// warp per token; a row is small enough to be read twice, the second time from the cache.
template <class floatX>
__global__ void rmsnorm_forward_kernel(floatX* x, float* rstd, const floatX* h, const float* weight, size_t BT,
                                       size_t C) {
  const unsigned lane = threadIdx.x % 32;
  const size_t bt = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) / 32;
  if (bt >= BT) return;

  float squares = 0, v[8], g[8];
  for (size_t c = size_t(lane) * 8; c < C; c += 256) {
    load8(v, h + bt * C + c);
    for (int k = 0; k < 8; k++) squares = fmaf(v[k], v[k], squares);
  }
  const float r = rsqrtf(warp_sum(squares) / float(C) + EPS);
  if (lane == 0) rstd[bt] = r;

  for (size_t c = size_t(lane) * 8; c < C; c += 256) {
    load8(v, h + bt * C + c);
    load8(g, weight + c);
    for (int k = 0; k < 8; k++) v[k] = g[k] * (r * v[k]);
    store8(x + bt * C + c, v);
  }
}
template <class floatX>
void rmsnorm_forward(floatX* x,            // (BT,C)
                     float* rstd,          // (BT): 1 / rms, for the routes that read h later
                     const floatX* h,      // (BT,C)
                     const float* weight,  // (C)
                     size_t BT, size_t C) {
  NVTX_RANGE(2 * BT * C * sizeof(floatX));
  launch(rmsnorm_forward_kernel<floatX>, ceil_div(BT, 4), 128, 0, device.stream, x, rstd, h, weight, BT, C);
}

// forward: x = weight * hhat, hhat = rstd h
//   dhhat = weight * dx      dh = rstd (dhhat - hhat mean(dhhat * hhat))      dweight += sum_tokens dx * hhat
template <class floatX>
__global__ void rmsnorm_backward_kernel(floatX* dh, float* rows, const floatX* dx, const floatX* h,
                                        const float* rstd, const float* weight, size_t BT, size_t C) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* gathered = dynamic_shared<float>() + warp * C;  // this warp's share of dweight
  for (size_t c = lane; c < C; c += 32) gathered[c] = 0;
  __syncwarp();

  for (size_t bt = blockIdx.x * size_t(TOKEN_WARPS) + warp; bt < BT; bt += gridDim.x * size_t(TOKEN_WARPS)) {
    const float r = rstd[bt];
    float mean = 0, v[8], d[8], g[8], sum[8], out[8];
    for (size_t c = size_t(lane) * 8; c < C; c += 256) {
      load8(v, h + bt * C + c);
      load8(d, dx + bt * C + c);
      load8(g, weight + c);
      for (int k = 0; k < 8; k++) mean = fmaf(g[k] * d[k], r * v[k], mean);
    }
    mean = warp_sum(mean) / float(C);

    for (size_t c = size_t(lane) * 8; c < C; c += 256) {
      load8(v, h + bt * C + c);
      load8(d, dx + bt * C + c);
      load8(g, weight + c);
      load8(sum, gathered + c);
      load8(out, dh + bt * C + c);
      for (int k = 0; k < 8; k++) {
        const float hhat = r * v[k];
        out[k] += r * (g[k] * d[k] - hhat * mean);
        sum[k] = fmaf(d[k], hhat, sum[k]);
      }
      store8(dh + bt * C + c, out);
      store8(gathered + c, sum);
    }
  }
  add_warps(rows + blockIdx.x * C, dynamic_shared<float>(), C);
}
template <class floatX>
void rmsnorm_backward(floatX* dh,                          // (BT,C): adds
                      float* dweight,                      // (C)
                      const floatX* dx,                    // (BT,C)
                      const floatX* h, const float* rstd,  // (BT,C), (BT)
                      const float* weight,                 // (C)
                      float* rows,                         // workspace (token_blocks(),C)
                      size_t BT, size_t C) {
  NVTX_RANGE(4 * BT * C * sizeof(floatX));
  const size_t blocks = std::min<size_t>(ceil_div(BT, TOKEN_WARPS), token_blocks());
  launch(rmsnorm_backward_kernel<floatX>, unsigned(blocks), TOKEN_THREADS, TOKEN_WARPS * C * sizeof(float),
         device.stream, dh, rows, dx, h, rstd, weight, BT, C);
  add_rows({dweight}, rows, blocks, C);
}

// ---- matrix products -----------------------------------------------------------------------------------

// y = x W^T and its two gradients, through cuBLASLt. matmul<Out, In>(out, a, b, M, N, K, addend), in
// dev/common/cuda.h: out (M,N) = a (M,K) b (K,N) + addend. Inputs are floatX, sums float32. {x, IC} is a view
// of x as a matrix whose rows begin IC numbers apart. Rows that are ldo apart: Q, K and V share one packed
// buffer.

// out = x w^T (+ addend, its rows as far apart as out's)
template <class floatX>
void matmul_forward(floatX* out,      // (BT,OC), rows ldo apart
                    const floatX* x,  // (BT,IC)
                    const floatX* w,  // (OC,IC)
                    size_t BT, size_t IC, size_t OC, size_t ldo, const floatX* addend = nullptr) {
  NVTX_RANGE(BT, OC, IC);
  matmul<floatX, floatX>({out, ldo}, {x, IC}, transposed(w, IC), BT, OC, IC, addend);
}

// forward: out = x w^T       dx = dout w      dw += dout^T x
// Two functions, because x is there only after dx has gone through the route: see model_backward.
template <class floatX>
void matmul_backward_input(floatX* dx,          // (BT,IC); adds if add_dx
                           const floatX* dout,  // (BT,OC), rows ldo apart
                           const floatX* w,     // (OC,IC)
                           size_t BT, size_t IC, size_t OC, size_t ldo, bool add_dx = false) {
  NVTX_RANGE(BT, IC, OC);
  matmul<floatX, floatX>({dx, IC}, {dout, ldo}, {w, IC}, BT, IC, OC, add_dx ? dx : nullptr);
}
template <class floatX>
void matmul_backward_weight(float* dw,           // (OC,IC)
                            const floatX* dout,  // (BT,OC), rows ldo apart
                            const floatX* x,     // (BT,IC)
                            size_t BT, size_t IC, size_t OC, size_t ldo) {
  NVTX_RANGE(OC, IC, BT);
  matmul<float, floatX>({dw, IC}, transposed(dout, ldo), {x, IC}, OC, IC, BT, dw);
}

// ---- depth route: a softmax read over the sources, per token -------------------------------------------
//
// The layer moves much and computes little, so what counts is what is asked of memory and of the caches. One
// warp reads one token: every source once, for both routes, whose mixes stay in registers. It walks from token
// to token, so w = query * gain can stay in registers too, and the next sources are always on their way to
// shared memory. The norm that follows every route is folded in, and so are the CPU file's source_rstd and
// route_mix: whoever has a source in registers needs no other kernel to square it or to mix it again.

constexpr size_t MAX_SOURCES = 32;  // one for each lane of a warp

// The sources of site i: slots 0, S, 2S, ... of the stream, and slot i itself, which comes last.
template <class floatX>
struct Sources {
  const floatX* stream;  // (2L+1, BT,C)
  float* rstd;  // (2L+1, BT): 1 / rms of each slot, written by the first site that reads it: site i for slot i
  size_t S, i;
  __host__ __device__ size_t K() const { return 1 + (i + S - 1) / S; }
  __host__ __device__ unsigned slot(unsigned j) const {
    return j * unsigned(S) < unsigned(i) ? j * unsigned(S) : unsigned(i);
  }
};

// A row of C numbers in a warp: lane l holds the four from 4 l on of every 128, NV times; zeros after the end.
template <int NV>
using Row = float[NV][4];
template <int NV, class F>
__device__ inline void for_each_four(size_t C, F f) {  // f(v, c): this lane's v-th four are channels c .. c + 3
#pragma unroll
  for (int v = 0; v < NV; v++) {
    const unsigned c = v * 128 + threadIdx.x % 32 * 4;
    if (c < C) f(v, c);
  }
}
template <int NV, class T>
__device__ inline void load_row(Row<NV>& row, const T* p, size_t C) {
#pragma unroll
  for (int v = 0; v < NV; v++)
#pragma unroll
    for (int k = 0; k < 4; k++) row[v][k] = 0;
  for_each_four<NV>(C, [&](int v, unsigned c) { load4(row[v], p + c); });
}
template <int NV>
__device__ inline void scale_row(Row<NV>& row, float factor) {
#pragma unroll
  for (int v = 0; v < NV; v++)
#pragma unroll
    for (int k = 0; k < 4; k++) row[v][k] *= factor;
}
template <int NV>
__device__ inline void add_row(Row<NV>& row, float times, const Row<NV>& other) {
#pragma unroll
  for (int v = 0; v < NV; v++)
#pragma unroll
    for (int k = 0; k < 4; k++) row[v][k] = fmaf(times, other[v][k], row[v][k]);
}
template <int NV>
__device__ inline float row_dot(const Row<NV>& a, const Row<NV>& b) {  // this lane's share
  float sum = 0;
#pragma unroll
  for (int v = 0; v < NV; v++)
#pragma unroll
    for (int k = 0; k < 4; k++) sum = fmaf(a[v][k], b[v][k], sum);
  return sum;
}

// Calls f with an NV that holds C, as a compile-time constant. 5 and 7 are the presets'.
constexpr size_t MAX_ROUTE_WIDTH = 1024;  // wider rows do not fit into registers
template <class F>
void with_vectors(size_t C, F f) {
  if (C <= 128) return f(std::integral_constant<int, 1>());
  if (C <= 384) return f(std::integral_constant<int, 3>());
  if (C <= 640) return f(std::integral_constant<int, 5>());
  if (C <= 896) return f(std::integral_constant<int, 7>());
  f(std::integral_constant<int, 8>());
}
// Calls f with the number of routes and of what the sublayer reads (one if it reads the average of two mixes).
template <class F>
void with_routes(size_t R, bool average, F f) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  if (R == 1) return f(One(), One());
  if (average) return f(Two(), One());
  f(Two(), Two());
}
// Blocks that a multiprocessor must have registers for: what token_blocks counts on, but for the widest rows
constexpr int route_blocks(int NV) { return NV <= 7 ? TOKEN_BLOCKS : 1; }

// The rows that a warp reads on its walk over tokens bt, bt + step, ...: row_at(bt, 0) .. row_at(bt, count - 1)
// of each. Its ring in shared memory has place for SLOTS rows: one is being read, the others are on their way.
template <class floatX>
constexpr unsigned SLOTS = 8 / sizeof(floatX);
constexpr size_t ring_bytes(size_t NV) { return NV * 128 * 8; }  // of a warp, for either type
template <class floatX, int NV, class RowAt>
struct Ring {
  static constexpr unsigned LOAD = 16 / sizeof(floatX);
  const RowAt& row_at;
  floatX* slots;  // (SLOTS, NV * 128), of this warp
  unsigned BT, C;
  unsigned bt, step,
      count;  // the token that rows are sent for; from one of the walk to the next; rows of a token
  unsigned n = 0, slot = 0;  // the next row of that token, and its place in the ring

  __device__ void send() {  // starts the copy of the next row
    if (bt < BT) {
      const floatX* row = row_at(bt, n);
#pragma unroll
      for (unsigned c = threadIdx.x % 32 * LOAD, v = 0; v < NV * 128; v += 32 * LOAD)
        if (c + v < C) cp_async_16(slots + slot * NV * 128 + c + v, row + c + v);
      if (++n == count) {
        n = 0;
        bt += step;
      }
    }
    cp_async_commit();  // after the last row too: waiting counts the groups
    slot = (slot + 1) % SLOTS<floatX>;
  }
  __device__ void start() {
    for (unsigned c = threadIdx.x % 32; c < SLOTS<floatX> * NV * 128; c += 32)
      if (c % (NV * 128) >= C) slots[c] = from_float<floatX>(0);  // once for all, the end of the rows
    for (unsigned i = 1; i < SLOTS<floatX>; i++) send();
  }
  __device__ void next(Row<NV>& row) {
    cp_async_wait<SLOTS<floatX> - 2>();
    __syncwarp();  // all lanes' copies of this row have landed, and all lanes have read the row before
    send();        // into its slot
#pragma unroll
    for (int v = 0; v < NV; v++) load4(row[v], slots + (slot * NV + v) * 128 + threadIdx.x % 32 * 4);
  }
};

// Kernels read w = query * gain from arrays called `queries`, made once after every update; a null query is one
// held at zero. Backward, once a micro-batch: dquery += gain * dw, dgain += query * dw. One thread per channel.
struct Fold {  // (C) each; the gradients may be null
  const float *query, *gain;
  float *dquery, *dgain;
};
__global__ void fold_gain_kernel(float* queries, const Fold* folds, size_t C) {
  const size_t c = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  const Fold fold = folds[blockIdx.y];
  if (c < C) queries[blockIdx.y * C + c] = fold.query ? fold.query[c] * fold.gain[c] : 0.0f;
}
inline void fold_gain(float* queries,     // (routes,C)
                      const Fold* folds,  // (routes), device memory
                      size_t routes, size_t C) {
  NVTX_RANGE();
  launch(fold_gain_kernel, dim3(ceil_div(C, 128), unsigned(routes)), 128, 0, device.stream, queries, folds, C);
}
// Two routes of one site share a gain, so a thread walks over the routes in order.
__global__ void fold_gain_backward_kernel(const float* dqueries, const Fold* folds, size_t routes, size_t C) {
  const size_t c = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (c >= C) return;
  for (size_t r = 0; r < routes; r++) {
    const Fold fold = folds[r];
    if (!fold.dquery) continue;
    fold.dquery[c] += fold.gain[c] * dqueries[r * C + c];
    fold.dgain[c] += fold.query[c] * dqueries[r * C + c];
  }
}
inline void fold_gain_backward(const float* dqueries,  // (routes,C)
                               const Fold* folds,      // (routes), device memory; adds to dquery, dgain
                               size_t routes, size_t C) {
  NVTX_RANGE();
  launch(fold_gain_backward_kernel, ceil_div(C, 64), 64, 0, device.stream, dqueries, folds, routes, C);
}

// z_j = r_j (w . s_j), p = softmax(z), h = sum_j p_j s_j, x = norm * rmsnorm(h), for R routes in one pass: each
// source is read once and serves all of them. The softmax is online, and in base 2: top and sum of the logits
// so far; when top rises, what has been gathered shrinks. The last source's 1 / rms is computed here and kept;
// the others' are known. With one input for two routes the mean of the two mixes is normalised.
template <class floatX, int NV, int R, int INPUTS>
__global__ void __launch_bounds__(TOKEN_THREADS, route_blocks(NV))
    route_forward_kernel(floatX* x, float* p, Sources<floatX> sources, const float* queries, const float* norm,
                         size_t BT, size_t C, size_t ldp) {
  const unsigned lane = threadIdx.x % 32, K = unsigned(sources.K());
  const unsigned warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);  // so the compiler sees: one for all lanes
  const unsigned start = blockIdx.x * TOKEN_WARPS + warp, step = gridDim.x * TOKEN_WARPS;
  const auto row_at = [&](unsigned bt, unsigned j) { return sources.stream + (sources.slot(j) * BT + bt) * C; };
  floatX* slots = dynamic_shared<floatX>() + warp * SLOTS<floatX> * NV * 128;
  Ring<floatX, NV, decltype(row_at)> ring = {row_at, slots, unsigned(BT), unsigned(C), start, step, K};
  ring.start();
  Row<NV> query[R];  // times gain and log2(e)
#pragma unroll
  for (int r = 0; r < R; r++) {
    load_row(query[r], queries + r * C, C);
    scale_row<NV>(query[r], LOG2_E);
  }

  for (unsigned bt = start; bt < BT; bt += step) {
    Row<NV> h[R] = {}, s;
    float top[R], sum[R] = {}, logit[R];  // logit: lane j keeps that of source j
#pragma unroll
    for (int r = 0; r < R; r++) top[r] = logit[r] = -INFINITY;
    const float rstd = lane + 1 < K ? sources.rstd[sources.slot(lane) * BT + bt] : 0.0f;  // of source `lane`
    for (unsigned j = 0; j < K; j++) {
      ring.next(s);
      float rj = __shfl_sync(ALL_LANES, rstd, int(j));
      if (j + 1 == K) {
        rj = rsqrtf(warp_sum(row_dot<NV>(s, s)) / float(C) + EPS);
        if (lane == 0) sources.rstd[sources.i * BT + bt] = rj;
      }
      float z[R];
#pragma unroll
      for (int r = 0; r < R; r++) z[r] = warp_sum(row_dot<NV>(query[r], s));
      bool rises = false;
#pragma unroll
      for (int r = 0; r < R; r++) {
        z[r] *= rj;
        if (lane == j) logit[r] = z[r];
        rises |= z[r] > top[r];
      }
      if (rises) {
#pragma unroll
        for (int r = 0; r < R; r++) {
          const float new_top = fmaxf(top[r], z[r]), shrink = exp2_flushed(top[r] - new_top);
          top[r] = new_top;
          sum[r] *= shrink;
          scale_row<NV>(h[r], shrink);
        }
      }
#pragma unroll
      for (int r = 0; r < R; r++) {
        const float e = exp2_flushed(z[r] - top[r]);
        sum[r] += e;
        add_row<NV>(h[r], e, s);
      }
    }

#pragma unroll
    for (int r = 0; r < R; r++) {
      const float scale = 1 / sum[r];
      scale_row<NV>(h[r], scale);
      if (lane < K) p[(r * BT + bt) * ldp + lane] = exp2_flushed(logit[r] - top[r]) * scale;
    }
    if (INPUTS < R) {
      add_row<NV>(h[0], 1, h[R - 1]);
      scale_row<NV>(h[0], 0.5f);
    }
    float scale[INPUTS];
#pragma unroll
    for (int n = 0; n < INPUTS; n++) scale[n] = rsqrtf(warp_sum(row_dot<NV>(h[n], h[n])) / float(C) + EPS);
    for_each_four<NV>(C, [&](int v, unsigned c) {
      float g[4], out[4];
      load4(g, norm + c);
#pragma unroll
      for (int n = 0; n < INPUTS; n++) {
#pragma unroll
        for (int k = 0; k < 4; k++) out[k] = g[k] * (scale[n] * h[n][v][k]);
        store4(x + (n * BT + bt) * C + c, out);
      }
    });
  }
}
template <class floatX>
void route_forward(floatX* x,                       // (R,BT,C), one if average: the normalised mixes
                   float* p,                        // (R,BT, ldp >= K)
                   const Sources<floatX>& sources,  // K times (BT,C); rstd of the last is written
                   const float* queries,            // (R,C): query * gain
                   const float* norm,               // (C)
                   bool average, size_t BT, size_t C, size_t ldp, size_t R) {
  NVTX_RANGE(double(sources.K() + (average ? 1 : R)) * BT * C * sizeof(floatX));
  const size_t blocks = std::min<size_t>(ceil_div(BT, TOKEN_WARPS), token_blocks());
  with_vectors(C, [&](auto NV) {
    with_routes(R, average, [&](auto routes, auto inputs) {
      launch(
          route_forward_kernel<floatX, decltype(NV)::value, decltype(routes)::value, decltype(inputs)::value>,
          unsigned(blocks), TOKEN_THREADS, TOKEN_WARPS * ring_bytes(decltype(NV)::value), device.stream, x, p,
          sources, queries, norm, BT, C, ldp);
    });
  });
}

// Backward, what cannot wait. forward: h = sum_j p_j s_j, hhat = h / rms(h), x = norm * hhat
//   x, and with it hhat, is computed once more: neither was kept
//   dhhat = norm * dx      dh = (dhhat - hhat mean(dhhat * hhat)) / rms(h)      dnorm += sum_tokens dx * hhat
//   delta = dh . h         what every source's softmax gradient needs: dz_j = p_j (dh . s_j - delta)
// The earlier sublayers of this block need the gradient of the running partial next, so its share is added now:
//   ds += p dh + dz r (w - s r z / C)      dw += sum_tokens dz r s
// The finished sources wait: see route_backward_bank. One read of the sources, as in the forward. Each warp
// gathers its tokens' shares of dnorm and dw in shared memory, its own until the end.
__device__ inline void gather4(float* sum, const float (&value)[4]) {
  float total[4];
  load4(total, sum);
#pragma unroll
  for (int k = 0; k < 4; k++) total[k] += value[k];
  store4(sum, total);
}

// The mixes h once more. Leaves the last source in s and its weights in p_last.
template <int NV, int R, class Ring>
__device__ inline void mix_again(Row<NV> (&h)[R], Row<NV>& s, float (&p_last)[R], Ring& ring, const float* p,
                                 unsigned bt, unsigned K, size_t BT, size_t ldp) {
  const unsigned lane = threadIdx.x % 32;
  float weights[R];  // lane j: p_j
#pragma unroll
  for (int r = 0; r < R; r++) weights[r] = lane < K ? p[(r * BT + bt) * ldp + lane] : 0.0f;
  for (unsigned j = 0; j < K; j++) {
    ring.next(s);
#pragma unroll
    for (int r = 0; r < R; r++) {
      p_last[r] = __shfl_sync(ALL_LANES, weights[r], int(j));
      add_row<NV>(h[r], p_last[r], s);
    }
  }
}

// Backward of x = norm * rmsnorm(mix), mix(v, k) being a channel of this lane: d holds dx, becomes share * dmix
// rounded as route_backward_bank will read it. Writes x, adds to dnorm.
template <class floatX, int NV, class Mix>
__device__ inline void mix_norm_backward(Row<NV>& d, floatX* x, float* dnorm, Mix mix, const float* norm,
                                         float share, size_t C) {
  float squares = 0, mean = 0;
  for_each_four<NV>(C, [&](int v, unsigned c) {
    float g[4];
    load4(g, norm + c);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      squares = fmaf(mix(v, k), mix(v, k), squares);
      mean = fmaf(g[k] * d[v][k], mix(v, k), mean);
    }
  });
  const float rstd = rsqrtf(warp_sum(squares) / float(C) + EPS);
  mean = rstd * warp_sum(mean) / float(C);

  for_each_four<NV>(C, [&](int v, unsigned c) {
    float g[4], out[4], to_dnorm[4];
    load4(g, norm + c);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float hhat = rstd * mix(v, k);
      out[k] = g[k] * hhat;
      to_dnorm[k] = d[v][k] * hhat;
      d[v][k] = rounded<floatX>(share * rstd * fmaf(g[k], d[v][k], -hhat * mean));
    }
    store4(x + c, out);
    gather4(dnorm + c, to_dnorm);
  });
}

// The last source, a running partial, with weights p. Adds what the routes owe to ds, its gradient, and to dw.
template <int NV, int R>
__device__ inline void partial_backward(Row<NV>& ds, float* dqueries, const Row<NV>& s, const Row<NV> (&dh)[R],
                                        const float (&p)[R], const float (&dp)[R], const float (&delta)[R],
                                        float rstd, const float* queries, size_t C) {
  float z[R] = {}, dzr[R], shrink = 0, query[4];  // times gain
#pragma unroll
  for (int r = 0; r < R; r++) {
    for_each_four<NV>(C, [&](int v, unsigned c) {
      load4(query, queries + r * C + c);
#pragma unroll
      for (int k = 0; k < 4; k++) z[r] = fmaf(query[k], s[v][k], z[r]);
    });
    z[r] = rstd * warp_sum(z[r]);
    dzr[r] = p[r] * (dp[r] - delta[r]) * rstd;
    shrink = fmaf(dzr[r] * rstd, z[r] / float(C), shrink);
  }

  for_each_four<NV>(C, [&](int v, unsigned c) {
#pragma unroll
    for (int k = 0; k < 4; k++) ds[v][k] = fmaf(-shrink, s[v][k], ds[v][k]);
#pragma unroll
    for (int r = 0; r < R; r++) {
      float to_dw[4];
      load4(query, queries + r * C + c);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        ds[v][k] = fmaf(p[r], dh[r][v][k], fmaf(dzr[r], query[k], ds[v][k]));
        to_dw[k] = dzr[r] * s[v][k];
      }
      gather4(dqueries + r * C + c, to_dw);
    }
  });
}

template <class floatX, int NV, int R, int INPUTS>
__global__ void __launch_bounds__(TOKEN_THREADS, route_blocks(NV))
    route_backward_kernel(floatX* dh, floatX* x, float* delta, floatX* dpartial, float* rows,
                          Sources<floatX> sources, const float* p, const float* queries, const float* norm,
                          size_t BT, size_t C, size_t ldp) {
  constexpr bool average = INPUTS < R;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, K = unsigned(sources.K());
  const unsigned start = blockIdx.x * TOKEN_WARPS + warp, step = gridDim.x * TOKEN_WARPS;
  const size_t gathered = (1 + R) * C;      // dnorm and dw
  float* shares = dynamic_shared<float>();  // (TOKEN_WARPS, 1+R, C)
  float* dnorm = shares + warp * gathered;
  float* dqueries = dnorm + C;
  floatX* rings = reinterpret_cast<floatX*>(shares + TOKEN_WARPS * gathered);
  const auto row_at = [&](unsigned bt, unsigned n) -> const floatX* {
    if (n < K) return sources.stream + (sources.slot(n) * BT + bt) * C;
    if (n < K + INPUTS) return dh + ((n - K) * BT + bt) * C;  // dx still
    return dpartial + bt * C;
  };
  const unsigned rows_of_token = K + INPUTS + (dpartial != nullptr);
  Ring<floatX, NV, decltype(row_at)> ring = {
      row_at, rings + warp * SLOTS<floatX> * NV * 128, unsigned(BT), unsigned(C), start, step, rows_of_token};
  ring.start();
  for (int vector = 0; vector <= R; vector++)
    for_each_four<NV>(C, [&](int, unsigned c) { store4(dnorm + vector * C + c, {0, 0, 0, 0}); });

  for (unsigned bt = start; bt < BT; bt += step) {
    Row<NV> h[R] = {}, s, d;
    float p_last[R], deltas[R] = {}, dp[R] = {};  // dh . h and dh . s
    mix_again(h, s, p_last, ring, p, bt, K, BT, ldp);

#pragma unroll
    for (int n = 0; n < INPUTS; n++) {  // of the sublayer
      ring.next(d);
      const auto mix = [&](int v, int k) { return average ? (h[0][v][k] + h[R - 1][v][k]) / 2 : h[n][v][k]; };
      mix_norm_backward<floatX>(d, x + (n * BT + bt) * C, dnorm, mix, norm, average ? 0.5f : 1.0f, C);
#pragma unroll
      for (int r = 0; r < R; r++) {
        if (r != n && !average) continue;
        deltas[r] = warp_sum(row_dot<NV>(d, h[r]));
        dp[r] = warp_sum(row_dot<NV>(d, s));
        if (lane == 0) delta[r * BT + bt] = deltas[r];
        for_each_four<NV>(C, [&](int v, unsigned c) {
          store4(dh + (r * BT + bt) * C + c, d[v]);
#pragma unroll
          for (int k = 0; k < 4; k++) h[r][v][k] = d[v][k];  // from here on h holds dh
        });
      }
    }

    if (!dpartial) continue;
    ring.next(d);
    partial_backward(d, dqueries, s, h, p_last, dp, deltas, sources.rstd[sources.i * BT + bt], queries, C);
    for_each_four<NV>(C, [&](int v, unsigned c) { store4(dpartial + bt * C + c, d[v]); });
  }
  add_warps(rows + blockIdx.x * gathered, shares, gathered);
}
template <class floatX>
void route_backward(
    floatX* dh,        // (R,BT,C): holds dx of every input (one if average), becomes dh of every route
    floatX* x,         // (R,BT,C): the normalised mixes again
    float* delta,      // (R,BT)
    floatX* dpartial,  // (BT,C): adds; null: no source is a running partial
    float* dnorm,      // (C)
    float* dqueries,   // (R,C): of query * gain, from the running partial alone
    const Sources<floatX>& sources, const float* p, const float* queries, const float* norm, bool average,
    float* rows,  // workspace (token_blocks(), 1 + R, C)
    size_t BT, size_t C, size_t ldp, size_t R) {
  const size_t blocks = std::min<size_t>(ceil_div(BT, TOKEN_WARPS), token_blocks());
  // Sources in; dx in and x out of every input; dh out of every route; dpartial, if there, in and out.
  const size_t partial = dpartial ? 2 : 0;
  NVTX_RANGE(double(sources.K() + 2 * (average ? 1 : R) + R + partial) * BT * C * sizeof(floatX));
  with_vectors(C, [&](auto NV) {
    with_routes(R, average, [&](auto routes, auto inputs) {
      launch(
          route_backward_kernel<floatX, decltype(NV)::value, decltype(routes)::value, decltype(inputs)::value>,
          unsigned(blocks), TOKEN_THREADS,
          TOKEN_WARPS * ((1 + R) * C * sizeof(float) + ring_bytes(decltype(NV)::value)), device.stream, dh, x,
          delta, dpartial, rows, sources, p, queries, norm, BT, C, ldp);
    });
  });
  std::vector<float*> totals = {dnorm};
  for (size_t r = 0; r < R; r++) totals.push_back(dqueries + r * C);
  add_rows(totals, rows, blocks, C);
}

// Backward, the finished sources: once a block of S sublayers is done, one pass adds what all its routes (those
// of the output site too, in the last block) owe to the bank. Sources are read once, gradients updated once.
//   dz_j = p_j (dh . s_j - delta)      ds_j += sum_routes p_j dh + dz_j r_j (w - s_j r_j z_j / C)
//   dw += sum over tokens and j of dz_j r_j s_j
// A block works on one token at a time, and there on four sources at once; a thread owns four channels. The
// sources, their gradients and dw of all routes are in its registers. w, dh, and the next token's dh, which is
// on its way, lie in shared memory: four sources share a look at them. What has to be summed over channels,
// dh . s_j and w . s_j, crosses the block in `shares`; the resulting weights come back in `coefficients`.
constexpr unsigned BANK_WARPS = 16;  // of a block at most; that registers leave room for
constexpr int MAX_ROUTE_LIST = MAX_SUMS;
struct RouteList {  // the routes that the kernel works on: numbers into p, w and dw
  int count = 0;
  int number[MAX_ROUTE_LIST] = {};
};

// What a route has in shared memory, of floats: w (width), coefficients (3,4), shares (8,warps); and of floatX:
// this token's dh and the next one's, (width) each. width: the channels of all threads, beyond C too.
inline size_t bank_bytes(size_t warps, size_t element) {
  const size_t width = 128 * warps;
  return (width + 12 + 8 * warps) * sizeof(float) + 2 * width * element;
}

// This thread's part of dh . s_n, in sums[n], and of w . s_n, in sums[4 + n], for four sources.
__device__ inline void four_dots(float (&sums)[8], const float (&dh)[4], const float (&query)[4],
                                 const float (&s)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; n++)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      sums[n] = fmaf(dh[k], s[n][k], sums[n]);
      sums[4 + n] = fmaf(query[k], s[n][k], sums[4 + n]);
    }
}

// The factors of dh, w and -s in ds of one source and route, to places 0, 4 and 8, from the warps' shares.
__device__ inline void bank_coefficients(float* coefficients, const float* shares, unsigned warps, float p,
                                         float delta, float rstd, size_t C) {
  float dp = 0, z = 0;
  for (unsigned warp = 0; warp < warps; warp++) {
    dp += shares[warp];
    z += shares[warp + 4 * warps];
  }
  const float dzr = p * (dp - delta) * rstd;
  coefficients[0] = p;
  coefficients[4] = dzr;
  coefficients[8] = dzr * rstd * (rstd * z) / float(C);
}

// Adds what one route owes to ds of four sources, but for the part along s, whose factors gather in `shrink`.
__device__ inline void add_route(float (&ds)[4][4], float (&dqueries)[4], float (&shrink)[4],
                                 const float* coefficients, const float (&dh)[4], const float (&query)[4],
                                 const float (&s)[4][4]) {
  float times_dh[4], times_query[4], times_s[4];
  load4(times_dh, coefficients);
  load4(times_query, coefficients + 4);
  load4(times_s, coefficients + 8);
#pragma unroll
  for (int n = 0; n < 4; n++) {
    shrink[n] += times_s[n];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      ds[n][k] = fmaf(times_dh[n], dh[k], fmaf(times_query[n], query[k], ds[n][k]));
      dqueries[k] = fmaf(times_query[n], s[n][k], dqueries[k]);
    }
  }
}

template <class floatX, int RMAX>
__global__ void __launch_bounds__(32 * BANK_WARPS)
    route_backward_bank_kernel(floatX* dbank, float* rows, const floatX* dh, const float* delta,
                               Sources<floatX> sources, const float* p, const float* queries, RouteList routes,
                               bool overwrite, size_t BT, size_t C, size_t ldp) {
  const unsigned R = unsigned(routes.count), K = unsigned(sources.i / sources.S) + 1;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned c = threadIdx.x * 4;
  const size_t width = blockDim.x * size_t(4);  // rows are zero from C on
  const bool live = c < C;
  float* query_rows = dynamic_shared<float>();                                 // (R,width) times gain
  float* coefficients = query_rows + R * width;                                // (R,3,4)
  float* shares = coefficients + R * size_t(12);                               // (R,8,warps)
  floatX* two_dh = reinterpret_cast<floatX*>(shares + R * size_t(8) * warps);  // (2,R,width): now, next
  __shared__ int number[RMAX];  // a list that is indexed by a variable should not live in a register

#pragma unroll
  for (unsigned r = 0; r < RMAX; r++) {
    if (threadIdx.x == r) number[r] = routes.number[r];
    if (r >= R) continue;
    float query[4] = {};
    if (live)
      load4(query, queries + size_t(routes.number[r]) * C + c);
    else {
      store4(two_dh + r * width + c, query);
      store4(two_dh + (R + r) * width + c, query);
    }
    store4(query_rows + r * width + c, query);
  }

  const auto send_for_dh = [&](size_t bt, unsigned buffer) {
    const unsigned channel = threadIdx.x * (16 / sizeof(floatX));
    for (unsigned r = 0; r < R && channel < C; r++)
      cp_async_16(two_dh + (buffer * R + r) * width + channel, dh + (r * BT + bt) * C + channel);
    cp_async_commit();
  };

  float dqueries[RMAX][4] = {};
  unsigned buffer = 0;
  send_for_dh(blockIdx.x, buffer);
  for (size_t bt = blockIdx.x; bt < BT; bt += gridDim.x, buffer ^= 1) {
    const floatX* dh_here = two_dh + buffer * (R * width) + c;
    cp_async_wait<0>();
    __syncthreads();  // dh is there, and nobody looks at the last token's any more
    if (bt + gridDim.x < BT) send_for_dh(bt + gridDim.x, buffer ^ 1);

    for (unsigned j0 = 0; j0 < K; j0 += 4) {
      float s[4][4] = {}, ds[4][4] = {};
#pragma unroll
      for (unsigned n = 0; n < 4; n++) {
        if (!live || j0 + n >= K) continue;
        load4(s[n], sources.stream + ((j0 + n) * sources.S * BT + bt) * C + c);
        if (!overwrite) load4(ds[n], dbank + ((j0 + n) * BT + bt) * C + c);
      }

      const unsigned route = threadIdx.x / 4, j = j0 + threadIdx.x % 4;  // whose coefficients this thread makes
      float p_j = 0, rstd = 0, delta_r = 0;
      if (route < R && j < K) {
        p_j = p[(size_t(number[route]) * BT + bt) * ldp + j];
        rstd = sources.rstd[j * sources.S * BT + bt];
        delta_r = delta[route * BT + bt];
      }

      for (unsigned r = 0; r < R; r++) {
        float d[4], query[4], sums[8] = {};
        load4(d, dh_here + r * width);
        load4(query, query_rows + r * width + c);
        four_dots(sums, d, query, s);
        const float total = warp_sum_each(sums, lane);
        if (lane < 8) shares[(r * 8 + lane) * warps + warp] = total;
      }
      __syncthreads();

      if (route < R)
        bank_coefficients(coefficients + size_t(route) * 12 + threadIdx.x % 4,
                          shares + (size_t(route) * 8 + threadIdx.x % 4) * warps, warps, p_j, delta_r, rstd, C);
      __syncthreads();

      float shrink[4] = {};
#pragma unroll
      for (unsigned r = 0; r < RMAX; r++) {
        if (r >= R) continue;
        float d[4], query[4];
        load4(d, dh_here + r * width);
        load4(query, query_rows + r * width + c);
        add_route(ds, dqueries[r], shrink, coefficients + r * size_t(12), d, query, s);
      }

#pragma unroll
      for (unsigned n = 0; n < 4; n++) {
        if (!live || j0 + n >= K) continue;
#pragma unroll
        for (int k = 0; k < 4; k++) ds[n][k] = fmaf(-shrink[n], s[n][k], ds[n][k]);
        store4(dbank + ((j0 + n) * BT + bt) * C + c, ds[n]);
      }
    }
  }

#pragma unroll
  for (unsigned r = 0; r < RMAX; r++)
    if (r < R && live) store4(rows + (blockIdx.x * size_t(R) + r) * C + c, dqueries[r]);
}
template <class floatX>
void route_backward_bank(
    floatX* dbank,                         // (K,BT,C): adds, or overwrites if `overwrite`
    float* dqueries,                       // (routes,C)
    const floatX* dh,                      // (count,BT,C): of the listed routes, in that order
    const float* delta,                    // (count,BT)
    const Sources<floatX>& sources,        // i: the block's first sublayer; sources are slots 0, S, .. i
    const float* p, const float* queries,  // (routes,BT,ldp), (routes,C)
    const std::vector<int>& routes,        // numbers into p, w, dw
    bool overwrite,
    float* rows,  // workspace (token_blocks(), MAX_ROUTE_LIST, C)
    size_t BT, size_t C, size_t ldp) {
  const size_t K = sources.i / sources.S + 1;
  const size_t warps = std::max<size_t>(2, ceil_div(C, 128));  // 4 channels a thread; 4 threads a route
  const size_t of_a_route = bank_bytes(warps, sizeof(floatX));
  const size_t group = std::min<size_t>(MAX_ROUTE_LIST, (SHARED_MEMORY - sizeof(RouteList)) / of_a_route);
  const size_t visits = ceil_div(routes.size(), group);
  const size_t blocks = std::min(BT, token_blocks(std::clamp<size_t>(BANK_WARPS / warps, 1, TOKEN_BLOCKS)));
  NVTX_RANGE(double(K * (3 * visits - overwrite) + routes.size()) * BT * C * sizeof(floatX));
  for (size_t r0 = 0; r0 < routes.size(); r0 += group) {
    RouteList list;
    std::vector<float*> totals;
    for (size_t r = r0; r < std::min(r0 + group, routes.size()); r++) {
      list.number[list.count++] = routes[r];
      totals.push_back(dqueries + size_t(routes[r]) * C);
    }
    const auto run = [&](auto most) {
      launch(route_backward_bank_kernel<floatX, decltype(most)::value>, unsigned(blocks), unsigned(32 * warps),
             list.count * of_a_route, device.stream, dbank, rows, dh + r0 * BT * C, delta + r0 * BT, sources, p,
             queries, list, overwrite && r0 == 0, BT, C, ldp);
    };
    if (list.count <= 8)
      run(std::integral_constant<int, 8>());
    else
      run(std::integral_constant<int, MAX_ROUTE_LIST>());
    add_rows(totals, rows, blocks, C);
  }
}

// ---- rotary position encoding --------------------------------------------------------------------------

constexpr double ROPE_BASE = 10000.0;
// (T, HS/2) pairs: cosine and sine of t * base^(-2i / HS), computed in double on the host
inline std::vector<float> rope_angles(size_t T, size_t HS) {
  std::vector<float> table;
  for (size_t t = 0; t < T; t++)
    for (size_t i = 0; i < HS / 2; i++) {
      const double angle = double(t) * std::pow(ROPE_BASE, -2.0 * double(i) / double(HS));
      table.push_back(float(std::cos(angle)));
      table.push_back(float(std::sin(angle)));
    }
  return table;
}

// A thread turns eight neighbouring pairs (i, i + HS/2) of Q or K. direction -1 turns back.
template <class floatX>
__global__ void rope_kernel(floatX* qkv, const float2* angles, size_t BT, size_t T, size_t C, size_t HS,
                            float direction) {
  const size_t half = HS / 2;
  const size_t n = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * 8;  // 2 NH heads of HS/2 pairs: C a token
  if (n >= BT * C) return;
  const size_t bt = n / C, pair = n % C, i = pair % half;
  floatX* x = qkv + bt * 3 * C + pair / half * HS + i;
  const float2* angle = angles + bt % T * half + i;

  float low[8], high[8];
  load8(low, x);
  load8(high, x + half);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const float cosine = angle[k].x, sine = direction * angle[k].y, l = low[k];
    low[k] = l * cosine - high[k] * sine;
    high[k] = l * sine + high[k] * cosine;
  }
  store8(x, low);
  store8(x + half, high);
}
template <class floatX>
void rope_forward(floatX* qkv,           // (B,T,3C)
                  const float2* angles,  // (T,HS/2)
                  size_t B, size_t T, size_t C, size_t NH) {
  NVTX_RANGE(4 * B * T * C * sizeof(floatX));
  launch(rope_kernel<floatX>, ceil_div(B * T * C / 8, 256), 256, 0, device.stream, qkv, angles, B * T, T, C,
         C / NH, 1.0f);
}
template <class floatX>
void rope_backward(floatX* dqkv, const float2* angles, size_t B, size_t T, size_t C, size_t NH) {
  NVTX_RANGE(4 * B * T * C * sizeof(floatX));
  launch(rope_kernel<floatX>, ceil_div(B * T * C / 8, 256), 256, 0, device.stream, dqkv, angles, B * T, T, C,
         C / NH, -1.0f);
}

// ---- causal attention ----------------------------------------------------------------------------------
//
// The (T,T) matrix of scores never exists as a whole. Two ways to go through it: for bf16, tiles on the tensor
// cores; for float32, which is for checking, a warp for each token. Head sizes: 16, 32, .. 128.

constexpr size_t MAX_HEAD_SIZE = 128;

// -- a warp for each token. Lane l owns channels l, l + 32, ... of the head; a dot product is a sum over the
// warp. Launch: grid (T / 4, NH, B), block (128).
using HeadRow = float[MAX_HEAD_SIZE / 32];

template <class floatX>
__device__ inline void load_head(HeadRow& v, const floatX* row, size_t HS) {
  for (unsigned i = 0; i < MAX_HEAD_SIZE / 32; i++) {
    const unsigned channel = threadIdx.x % 32 + 32 * i;
    v[i] = channel < HS ? to_float(row[channel]) : 0.0f;
  }
}
template <class floatX>
__device__ inline void store_head(floatX* row, const HeadRow& v, float scale, size_t HS) {
  for (unsigned i = 0; i < MAX_HEAD_SIZE / 32; i++) {
    const unsigned channel = threadIdx.x % 32 + 32 * i;
    if (channel < HS) row[channel] = from_float<floatX>(v[i] * scale);
  }
}
__device__ inline void add_head(HeadRow& v, float weight, const HeadRow& other) {
  for (unsigned i = 0; i < MAX_HEAD_SIZE / 32; i++) v[i] += weight * other[i];
}
__device__ inline float head_dot(const HeadRow& a, const HeadRow& b) {
  float sum = 0;
  for (unsigned i = 0; i < MAX_HEAD_SIZE / 32; i++) sum += a[i] * b[i];
  return warp_sum(sum);
}

template <class floatX>
__global__ void attention_forward_plain_kernel(floatX* att, float* lse, const floatX* qkv, size_t T, size_t C,
                                               size_t HS, float scale) {
  const size_t t = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) / 32, head = blockIdx.y, b = blockIdx.z;
  if (t >= T) return;
  const floatX* rows = qkv + b * T * 3 * C + head * HS;
  HeadRow q, k, v, sum_v = {};
  float top = -INFINITY, sum = 0;
  load_head(q, rows + t * 3 * C, HS);
  for (size_t u = 0; u <= t; u++) {
    load_head(k, rows + u * 3 * C + C, HS);
    load_head(v, rows + u * 3 * C + 2 * C, HS);
    const float score = scale * head_dot(q, k), new_top = fmaxf(top, score);
    const float shrink = expf(top - new_top), weight = expf(score - new_top);
    top = new_top;
    sum = sum * shrink + weight;
    for (float& channel : sum_v) channel *= shrink;
    add_head(sum_v, weight, v);
  }
  store_head(att + (b * T + t) * C + head * HS, sum_v, 1 / sum, HS);
  if (threadIdx.x % 32 == 0) lse[(b * gridDim.y + head) * T + t] = top + logf(sum);
}

// A token is a query, whose dq comes from all keys before it, and a key, whose dk and dv come from all queries
// after it. Its warp writes what it owns: nothing is added from two sides, in any order of warps.
template <class floatX>
__global__ void attention_backward_plain_kernel(floatX* dqkv, const floatX* datt, const floatX* qkv,
                                                const floatX* att, const float* lse, size_t T, size_t C,
                                                size_t HS, float scale) {
  const size_t token = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) / 32, head = blockIdx.y, b = blockIdx.z;
  if (token >= T) return;
  const floatX *rows = qkv + b * T * 3 * C + head * HS, *drows = datt + b * T * C + head * HS;
  const floatX* outs = att + b * T * C + head * HS;
  lse += (b * gridDim.y + head) * T;
  HeadRow own_q, own_k, own_v, own_dout, q, k, v, dout, out, dq = {}, dk = {}, dv = {};
  load_head(own_q, rows + token * 3 * C, HS);
  load_head(own_k, rows + token * 3 * C + C, HS);
  load_head(own_v, rows + token * 3 * C + 2 * C, HS);
  load_head(own_dout, drows + token * C, HS);
  load_head(out, outs + token * C, HS);

  const float delta = head_dot(own_dout, out);
  for (size_t u = 0; u <= token; u++) {
    load_head(k, rows + u * 3 * C + C, HS);
    load_head(v, rows + u * 3 * C + 2 * C, HS);
    const float a = expf(scale * head_dot(own_q, k) - lse[token]);
    add_head(dq, a * (head_dot(own_dout, v) - delta), k);
  }
  for (size_t t = token; t < T; t++) {
    load_head(q, rows + t * 3 * C, HS);
    load_head(dout, drows + t * C, HS);
    load_head(out, outs + t * C, HS);
    const float a = expf(scale * head_dot(q, own_k) - lse[t]);
    add_head(dv, a, dout);
    add_head(dk, a * (head_dot(dout, own_v) - head_dot(dout, out)), q);
  }
  floatX* gradients = dqkv + (b * T + token) * 3 * C + head * HS;
  store_head(gradients, dq, scale, HS);
  store_head(gradients + C, dk, scale, HS);
  store_head(gradients + 2 * C, dv, 1, HS);
}

// -- tensor-core tiles. A block of 4 warps owns rows: queries, or keys in the kernel for dk and dv. Tiles of 64
// rows of the other kind pass by in shared memory, two buffers in turn: one in use, the next on its way.
//
// A warp owns STRIPS of 16 rows. Whatever it reads of the other kind, it multiplies with all its strips,
// because reading is what limits: an ldmatrix of 512 bytes takes shared memory 4 cycles, and with one strip it
// feeds two mma, which at full rate take the tensor cores of an A100 4 cycles and those of an H100 2. Beyond 64
// channels the sums of two strips would fill the registers.
//
// Accumulators of one warp, [m][n][i]: row 16 m + g + 8 (i / 2), column 8 n + 2 t + i % 2, with g = lane / 4, t
// = lane % 4: four neighbouring lanes, a quad, share a row. The same registers, rounded to bf16 in pairs, are
// the left operand of the next product: scores never leave the warp.
constexpr int TILE = 64, FLASH_WARPS = 4, FLASH_THREADS = 32 * FLASH_WARPS;
template <int HS>
constexpr int STRIPS = HS <= 64 ? 2 : 1;
template <int M>
constexpr int OWN = 16 * M* FLASH_WARPS;  // rows of a block whose warps have M strips
// Rows in shared memory are padded by 16 bytes, so that the eight rows of an 8x8 matrix meet no bank twice.
// With 128 channels a block would then need more than the 99 KiB that every card has: there the eight rows have
// their columns in different orders instead (tile_at). Offsets are int: wider ones take registers.
template <int HS>
constexpr int TILE_LD = HS == 128 ? HS : HS + 8;
// Where a row and column of a tile are; the column is a multiple of 8.
template <int HS>
__device__ inline int tile_at(int row, int column) {
  return row * TILE_LD<HS> + (HS == 128 ? column ^ row % 8 * 8 : column);
}
template <int HS>
constexpr size_t ROW_BYTES = TILE_LD<HS> * sizeof(bf16);

// ROWS rows of a (T, ld) array from row0 < T on, in the background; zeros from row T on
template <int HS, int ROWS>
__device__ inline void load_tile(bf16* tile, const bf16* rows, size_t ld, int row0, size_t T) {
  const bf16* source = rows + row0 * ld;
  const unsigned live = unsigned(T) - row0;
#pragma unroll 4  // more would hold more addresses in registers than they are worth
  for (int n = 0; n < ROWS * HS / 8 / FLASH_THREADS; n++) {
    const unsigned i = n * FLASH_THREADS + threadIdx.x, r = i / (HS / 8), c = i % (HS / 8) * 8;
    cp_async_16(tile + tile_at<HS>(int(r), int(c)), source + (r * unsigned(ld) + c), r < live);
  }
}
// The tile that begins at row0, of two arrays, to the buffer whose turn it is.
template <int HS>
__device__ inline void load_two_tiles(bf16* tiles_a, const bf16* a, size_t ld_a, bf16* tiles_b, const bf16* b,
                                      size_t ld_b, int row0, size_t T) {
  const int buffer = row0 / TILE % 2 * TILE * TILE_LD<HS>;
  load_tile<HS, TILE>(tiles_a + buffer, a, ld_a, row0, T);
  load_tile<HS, TILE>(tiles_b + buffer, b, ld_b, row0, T);
  cp_async_commit();
}

// s[16 M][8 N] += left[16 M][HS] right[8 N][HS]^T, both in shared memory
template <int HS, int M, int N>
__device__ inline void product_nt(float (&s)[M][N][4], const bf16* left, const bf16* right, int lane) {
#pragma unroll
  for (int c = 0; c < HS / 16; c++) {
    unsigned a[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; m++)
      ldmatrix_x4(a[m], left + tile_at<HS>(m * 16 + lane % 16, c * 16 + lane / 16 * 8));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      ldmatrix_x4(b, right + tile_at<HS>(n * 8 + lane % 8 + lane / 16 * 8, c * 16 + lane / 8 % 2 * 8));
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_m16n8k16(s[m][n], a[m], b[0], b[1]);
        mma_m16n8k16(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// acc[16 M][HS] += p[16 M][8 N] right[8 N][HS], p in registers as accumulators
template <int HS, int M, int N>
__device__ inline void product_nn(float (&acc)[M][HS / 8][4], const float (&p)[M][N][4], const bf16* right,
                                  int lane) {
#pragma unroll
  for (int c = 0; c < N / 2; c++) {
    unsigned a[M][4], b[4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[m][i] = pack_bf16(p[m][2 * c + i / 2][i % 2 * 2], p[m][2 * c + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < HS / 8; n += 2) {
      ldmatrix_x4_trans(b, right + tile_at<HS>(c * 16 + lane % 16, n * 8 + lane / 16 * 8));
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_m16n8k16(acc[m][n], a[m], b[0], b[1]);
        mma_m16n8k16(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Calls f(m, n, i) for every number that a lane holds of s.
template <int M, int N, class F>
__device__ inline void for_each_score(const float (&)[M][N][4], F f) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) f(m, n, i);
}
__device__ inline int score_row(int m, int i, int lane) { return m * 16 + lane / 4 + i / 2 * 8; }
__device__ inline int score_column(int n, int i, int lane) { return n * 8 + lane % 4 * 2 + i % 2; }

// Rows are queries, columns keys; the first query stands `ahead` after the first key. Later keys do not count.
template <int M, int N>
__device__ inline void hide_later(float (&s)[M][N][4], int ahead, int lane) {
  for_each_score(s, [&](int m, int n, int i) {
    if (score_column(n, i, lane) > score_row(m, i, lane) + ahead) s[m][n][i] = -INFINITY;
  });
}

__device__ inline float quad_sum(float v) {
  v += __shfl_xor_sync(ALL_LANES, v, 1);
  return v + __shfl_xor_sync(ALL_LANES, v, 2);
}
__device__ inline float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 1));
  return fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 2));
}

// Turns one more tile of scores into weights, relative to the largest score of their row so far, and shrinks
// what was summed before to match. Base 2: with scores times log2(e), exp is one instruction. [half]: a lane
// holds numbers of two rows of a strip, i / 2 = 0 and 1.
template <int M, int N, int O>
__device__ inline void online_softmax(float (&s)[M][N][4], float (&acc)[M][O][4], float (&top)[M][2],
                                      float (&sum)[M][2], float to_base_2) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float new_top = top[m][half], more = 0;
#pragma unroll
      for (int n = 0; n < N; n++) new_top = fmaxf(new_top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      new_top = quad_max(new_top);
      const float shrink = exp2_flushed((top[m][half] - new_top) * to_base_2), unit = new_top * to_base_2;
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
          s[m][n][i] = exp2_flushed(s[m][n][i] * to_base_2 - unit);
          more += s[m][n][i];
        }
      top[m][half] = new_top;
      sum[m][half] = sum[m][half] * shrink + more;
#pragma unroll
      for (int n = 0; n < O; n++) {
        acc[m][n][2 * half] *= shrink;
        acc[m][n][2 * half + 1] *= shrink;
      }
    }
}

// Ends it: sums of weighted values become means, and top and sum lse, the natural log of the sum of exp(score).
template <int M, int O>
__device__ inline void finish_softmax(float (&acc)[M][O][4], const float (&top)[M][2], const float (&sum)[M][2],
                                      float to_base_2, float* lse, int first, size_t T, int lane) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float total = quad_sum(sum[m][half]), inverse = 1 / total;
      const size_t query = first + score_row(m, 2 * half, lane);
      if (lane % 4 == 0 && query < T) lse[query] = (top[m][half] * to_base_2 + log2f(total)) / LOG2_E;
#pragma unroll
      for (int n = 0; n < O; n++) {
        acc[m][n][2 * half] *= inverse;
        acc[m][n][2 * half + 1] *= inverse;
      }
    }
}

// A warp's accumulators times scale to its rows, of which the first is row0, as far as they are below T
template <int HS, int M>
__device__ inline void store_rows(bf16* rows, size_t ld, int row0, size_t T, const float (&acc)[M][HS / 8][4],
                                  float scale, int lane) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const size_t row = row0 + score_row(m, i, lane);
      if (row >= T) continue;
#pragma unroll
      for (int n = 0; n < HS / 8; n++)
        *reinterpret_cast<unsigned*>(rows + row * ld + score_column(n, 0, lane)) =
            pack_bf16(acc[m][n][i] * scale, acc[m][n][i + 1] * scale);
    }
}

// Where a block works: rows row0 .. row0 + OWN<M> - 1 of one head of one sequence, the `block`th such rows.
// Each warp takes 16 M of them, from row `first` on, which stand at offset `own` of the block's tile.
template <int HS, int M>
struct Place {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int row0, first, own = warp * 16 * M * TILE_LD<HS>;
  size_t qkv, att, statistics;  // where this head begins in (B,T,3C), (B,T,C) and (B,NH,T)
  __device__ Place(unsigned block, size_t T, size_t C) {
    row0 = int(block) * OWN<M>;
    first = row0 + warp * 16 * M;
    qkv = blockIdx.z * T * 3 * C + blockIdx.y * size_t(HS);
    att = blockIdx.z * T * C + blockIdx.y * size_t(HS);
    statistics = (blockIdx.z * size_t(gridDim.y) + blockIdx.y) * T;
  }
};

// Shared memory: Q, then K and V twice. The longest rows start first.
template <int HS, int M>
__global__ void __launch_bounds__(FLASH_THREADS)
    attention_forward_kernel(bf16* att, float* lse, const bf16* qkv, size_t T, size_t C, float scale) {
  const Place<HS, M> at(gridDim.x - 1 - blockIdx.x, T, C);
  bf16* q_tile = dynamic_shared<bf16>();
  bf16* k_tiles = q_tile + OWN<M> * TILE_LD<HS>;
  bf16* v_tiles = k_tiles + 2 * TILE * TILE_LD<HS>;
  const bf16 *q = qkv + at.qkv, *k = q + C, *v = k + C;
  const auto load_keys = [&](int k0) { load_two_tiles<HS>(k_tiles, k, 3 * C, v_tiles, v, 3 * C, k0, T); };
  load_tile<HS, OWN<M>>(q_tile, q, 3 * C, at.row0, T);
  load_keys(0);

  const float to_base_2 = scale * LOG2_E;
  float acc[M][HS / 8][4] = {}, top[M][2], sum[M][2] = {};
#pragma unroll
  for (int m = 0; m < M; m++) top[m][0] = top[m][1] = -INFINITY;
  const int end = min(at.row0 + OWN<M>, int(T));  // no query of the block sees a key from here on
  for (int k0 = 0; k0 < end; k0 += TILE) {
    cp_async_wait<0>();
    __syncthreads();  // this tile is here, and nobody reads the one before it any more
    if (k0 + TILE < end) load_keys(k0 + TILE);
    if (k0 >= at.first + 16 * M) continue;  // all of it lies after the warp's queries

    const int buffer = k0 / TILE % 2 * TILE * TILE_LD<HS>;
    float s[M][TILE / 8][4] = {};
    product_nt<HS>(s, q_tile + at.own, k_tiles + buffer, at.lane);
    if (at.first < k0 + TILE) hide_later(s, at.first - k0, at.lane);
    online_softmax(s, acc, top, sum, to_base_2);
    product_nn<HS>(acc, s, v_tiles + buffer, at.lane);
  }
  finish_softmax(acc, top, sum, to_base_2, lse + at.statistics, at.first, T, at.lane);
  store_rows<HS>(att + at.att, C, at.first, T, acc, 1, at.lane);
}

// The backward works on half a tile at a time, so that scores and their gradients leave room for the sums.
constexpr int CHUNK = TILE / 2;

// Of the warp's queries: lse in base 2, and delta = datt . att, which is also stored for the other kernel.
// Zeros from row T on. Arrays begin at this head.
template <int HS, int M>
__device__ inline void query_statistics(float (&row_lse)[M][2], float (&row_delta)[M][2], float* delta,
                                        const float* lse, const bf16* datt, const bf16* att, int first,
                                        size_t T, size_t C, int lane) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const size_t query = first + score_row(m, 2 * half, lane);
      row_lse[m][half] = query < T ? lse[query] * LOG2_E : 0.0f;
      float sum = 0, d[8], o[8];
      for (int c = lane % 4 * 8; c < HS && query < T; c += 32) {
        load8(d, datt + query * C + c);
        load8(o, att + query * C + c);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += d[k] * o[k];
      }
      row_delta[m][half] = quad_sum(sum);
      if (lane % 4 == 0 && query < T) delta[query] = row_delta[m][half];
    }
}

// dq of the block's queries, and delta. Shared memory: Q, dO, then K and V twice.
template <int HS, int M>
__global__ void __launch_bounds__(FLASH_THREADS)
    attention_backward_q_kernel(bf16* dqkv, float* delta, const bf16* datt, const bf16* qkv, const bf16* att,
                                const float* lse, size_t T, size_t C, float scale) {
  const Place<HS, M> at(gridDim.x - 1 - blockIdx.x, T, C);
  bf16* q_tile = dynamic_shared<bf16>();
  bf16* dout_tile = q_tile + OWN<M> * TILE_LD<HS>;
  bf16* k_tiles = dout_tile + OWN<M> * TILE_LD<HS>;
  bf16* v_tiles = k_tiles + 2 * TILE * TILE_LD<HS>;
  const bf16 *q = qkv + at.qkv, *k = q + C, *v = k + C, *dout = datt + at.att;
  const auto load_keys = [&](int k0) { load_two_tiles<HS>(k_tiles, k, 3 * C, v_tiles, v, 3 * C, k0, T); };
  load_tile<HS, OWN<M>>(q_tile, q, 3 * C, at.row0, T);
  load_tile<HS, OWN<M>>(dout_tile, dout, C, at.row0, T);
  load_keys(0);

  float row_lse[M][2], row_delta[M][2];
  query_statistics<HS>(row_lse, row_delta, delta + at.statistics, lse + at.statistics, dout, att + at.att,
                       at.first, T, C, at.lane);
  float acc[M][HS / 8][4] = {};
  const int end = min(at.row0 + OWN<M>, int(T));
  for (int k0 = 0; k0 < end; k0 += TILE) {
    cp_async_wait<0>();
    __syncthreads();
    if (k0 + TILE < end) load_keys(k0 + TILE);

    for (int key = k0; key < k0 + TILE && key < at.first + 16 * M; key += CHUNK) {
      const int chunk = key % (2 * TILE) * TILE_LD<HS>;
      float a[M][CHUNK / 8][4] = {}, da[M][CHUNK / 8][4] = {};
      product_nt<HS>(a, q_tile + at.own, k_tiles + chunk, at.lane);
      product_nt<HS>(da, dout_tile + at.own, v_tiles + chunk, at.lane);
      if (at.first < key + CHUNK) hide_later(a, at.first - key, at.lane);
      for_each_score(a, [&](int m, int n, int i) {
        const float weight = exp2_flushed(a[m][n][i] * (scale * LOG2_E) - row_lse[m][i / 2]);
        a[m][n][i] = weight * (da[m][n][i] - row_delta[m][i / 2]);
      });
      product_nn<HS>(acc, a, k_tiles + chunk, at.lane);
    }
  }
  store_rows<HS>(dqkv + at.qkv, 3 * C, at.first, T, acc, scale, at.lane);
}

// dk and dv of the block's keys; rows are keys here, columns queries. Shared memory: K, V, then Q and dO twice,
// then lse and delta of the queries twice. A query from T on has zeros everywhere, and so adds nothing.
template <int HS, int M>
__global__ void __launch_bounds__(FLASH_THREADS)
    attention_backward_kv_kernel(bf16* dqkv, const bf16* datt, const bf16* qkv, const float* lse,
                                 const float* delta, size_t T, size_t C, float scale) {
  const Place<HS, M> at(blockIdx.x, T, C);
  bf16* k_tile = dynamic_shared<bf16>();
  bf16* v_tile = k_tile + OWN<M> * TILE_LD<HS>;
  bf16* q_tiles = v_tile + OWN<M> * TILE_LD<HS>;
  bf16* dout_tiles = q_tiles + 2 * TILE * TILE_LD<HS>;
  float2* statistics = reinterpret_cast<float2*>(dout_tiles + 2 * TILE * TILE_LD<HS>);
  const bf16 *q = qkv + at.qkv, *k = q + C, *v = k + C, *dout = datt + at.att;
  const auto load_queries = [&](int q0) { load_two_tiles<HS>(q_tiles, q, 3 * C, dout_tiles, dout, C, q0, T); };
  const auto fetch_statistics = [&](int q0) {  // of one query a thread
    const size_t query = q0 + threadIdx.x;
    if (threadIdx.x >= TILE || query >= T) return float2{0, 0};
    return float2{lse[at.statistics + query] * LOG2_E, delta[at.statistics + query]};
  };
  load_tile<HS, OWN<M>>(k_tile, k, 3 * C, at.row0, T);
  load_tile<HS, OWN<M>>(v_tile, v, 3 * C, at.row0, T);
  load_queries(at.row0);

  float2 next = fetch_statistics(at.row0);
  float dk[M][HS / 8][4] = {}, dv[M][HS / 8][4] = {};
  for (int q0 = at.row0; q0 < int(T); q0 += TILE) {
    if (threadIdx.x < TILE) statistics[q0 % (2 * TILE) + threadIdx.x] = next;
    cp_async_wait<0>();
    __syncthreads();
    if (q0 + TILE < int(T)) {
      load_queries(q0 + TILE);
      next = fetch_statistics(q0 + TILE);
    }

    for (int query = q0; query < q0 + TILE; query += CHUNK) {
      if (query + CHUNK <= at.first) continue;  // all of it lies before the warp's keys
      const int chunk = query % (2 * TILE) * TILE_LD<HS>;
      float a[M][CHUNK / 8][4] = {}, da[M][CHUNK / 8][4] = {};
      product_nt<HS>(a, k_tile + at.own, q_tiles + chunk, at.lane);
      product_nt<HS>(da, v_tile + at.own, dout_tiles + chunk, at.lane);
      if (query < at.first + 16 * M)  // some keys lie after some queries
        for_each_score(a, [&](int m, int n, int i) {
          if (at.first + score_row(m, i, at.lane) > query + score_column(n, i, at.lane)) a[m][n][i] = -INFINITY;
        });
      for_each_score(a, [&](int m, int n, int i) {
        const float2 of_query = statistics[query % (2 * TILE) + score_column(n, i, at.lane)];
        a[m][n][i] = exp2_flushed(a[m][n][i] * (scale * LOG2_E) - of_query.x);
        da[m][n][i] = a[m][n][i] * (da[m][n][i] - of_query.y);
      });
      product_nn<HS>(dv, a, dout_tiles + chunk, at.lane);
      product_nn<HS>(dk, da, q_tiles + chunk, at.lane);
    }
  }
  store_rows<HS>(dqkv + at.qkv + C, 3 * C, at.first, T, dk, scale, at.lane);
  store_rows<HS>(dqkv + at.qkv + 2 * C, 3 * C, at.first, T, dv, 1, at.lane);
}

// Calls f with the head size, a multiple of 16, as a compile-time constant.
template <int HS = 16, class F>
void with_head_size(size_t head_size, F f) {
  if constexpr (HS <= MAX_HEAD_SIZE) {
    if (head_size == HS) return f(std::integral_constant<int, HS>());
    with_head_size<HS + 16>(head_size, f);
  }
}
// Forward: token t meets t + 1 tokens, in two products, 4C operations each time. Backward: five such products.
inline double attention_flops(size_t B, size_t T, size_t C) {
  return 4 * double(C) * double(B) * double(T) * double(T + 1) / 2;
}

template <class floatX>
void attention_forward(floatX* att,        // (B,T,C)
                       float* lse,         // (B,NH,T)
                       const floatX* qkv,  // (B,T,3C): Q's heads, K's heads, V's heads
                       size_t B, size_t T, size_t C, size_t NH) {
  NVTX_RANGE(0, attention_flops(B, T, C));
  const size_t HS = C / NH;
  const float scale = 1 / std::sqrt(float(HS));
  if constexpr (std::is_same<floatX, bf16>::value)
    with_head_size(HS, [&](auto head_size) {
      constexpr int N = decltype(head_size)::value, ROWS = OWN<STRIPS<N>>;
      launch(attention_forward_kernel<N, STRIPS<N>>, dim3(ceil_div(T, ROWS), unsigned(NH), unsigned(B)),
             FLASH_THREADS, ROW_BYTES<N> * (ROWS + 4 * TILE), device.stream, att, lse, qkv, T, C, scale);
    });
  else
    launch(attention_forward_plain_kernel<floatX>, dim3(ceil_div(T, 4), unsigned(NH), unsigned(B)), 128, 0,
           device.stream, att, lse, qkv, T, C, HS, scale);
}

// forward: att_t = sum_u a_tu v_u, a_t = softmax(score_t), score_tu = scale q_t . k_u
//   da_tu = datt_t . v_u     delta_t = sum_u a_tu da_tu = datt_t . att_t     dscore_tu = a_tu (da_tu - delta_t)
//   dv_u = sum_t a_tu datt_t      dq_t = scale sum_u dscore_tu k_u      dk_u = scale sum_t dscore_tu q_t
template <class floatX>
void attention_backward(floatX* dqkv,                         // (B,T,3C)
                        float* delta,                         // workspace (B,NH,T)
                        const floatX* datt,                   // (B,T,C)
                        const floatX* qkv,                    // (B,T,3C)
                        const floatX* att, const float* lse,  // (B,T,C), (B,NH,T)
                        size_t B, size_t T, size_t C, size_t NH) {
  NVTX_RANGE(0, 2.5 * attention_flops(B, T, C));
  const size_t HS = C / NH;
  const float scale = 1 / std::sqrt(float(HS));
  if constexpr (std::is_same<floatX, bf16>::value)
    with_head_size(HS, [&](auto head_size) {
      constexpr int N = decltype(head_size)::value, ROWS = OWN<STRIPS<N>>;
      constexpr size_t TILES = ROW_BYTES<N> * (2 * ROWS + 4 * TILE);
      const dim3 grid(ceil_div(T, ROWS), unsigned(NH), unsigned(B));
      launch(attention_backward_q_kernel<N, STRIPS<N>>, grid, FLASH_THREADS, TILES, device.stream, dqkv, delta,
             datt, qkv, att, lse, T, C, scale);
      launch(attention_backward_kv_kernel<N, STRIPS<N>>, grid, FLASH_THREADS, TILES + sizeof(float2) * 2 * TILE,
             device.stream, dqkv, datt, qkv, lse, delta, T, C, scale);
    });
  else
    launch(attention_backward_plain_kernel<floatX>, dim3(ceil_div(T, 4), unsigned(NH), unsigned(B)), 128, 0,
           device.stream, dqkv, datt, qkv, att, lse, T, C, HS, scale);
}

// ---- SwiGLU --------------------------------------------------------------------------------------------

// One thread per eight numbers; n is a multiple of 8.
template <class floatX>
__global__ void swiglu_forward_kernel(floatX* act, const floatX* gate, const floatX* up, size_t n) {
  const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * 8;
  if (i >= n) return;
  float g[8], u[8];
  load8(g, gate + i);
  load8(u, up + i);
  for (int k = 0; k < 8; k++) u[k] *= g[k] / (1 + __expf(-g[k]));
  store8(act + i, u);
}
// act = silu(gate) * up, silu(x) = x sigmoid(x)
template <class floatX>
void swiglu_forward(floatX* act,                           // (n)
                    const floatX* gate, const floatX* up,  // (n)
                    size_t n) {
  NVTX_RANGE(3 * n * sizeof(floatX));
  launch(swiglu_forward_kernel<floatX>, ceil_div(n / 8, 256), 256, 0, device.stream, act, gate, up, n);
}

template <class floatX>
__global__ void swiglu_backward_kernel(floatX* dgate, floatX* dup, floatX* act, const floatX* dact,
                                       const floatX* gate, const floatX* up, size_t n) {
  const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * 8;
  if (i >= n) return;
  float g[8], u[8], d[8];
  load8(g, gate + i);
  load8(u, up + i);
  load8(d, dact + i);
  for (int k = 0; k < 8; k++) {
    const float sigmoid = 1 / (1 + __expf(-g[k])), silu = g[k] * sigmoid, dk = d[k];
    d[k] = silu * u[k];
    g[k] = dk * u[k] * sigmoid * (1 + g[k] * (1 - sigmoid));
    u[k] = dk * silu;
  }
  store8(dgate + i, g);
  store8(dup + i, u);
  store8(act + i, d);
}
// forward: act = g sigmoid(g) up       dup = dact silu(g)      dg = dact up sigmoid(g) (1 + g (1 - sigmoid(g)))
// act, which w_down's gradient needs and nobody kept, comes along. Outputs may take the place of inputs.
template <class floatX>
void swiglu_backward(floatX* dgate, floatX* dup, floatX* act,  // (n)
                     const floatX* dact,                       // (n)
                     const floatX* gate, const floatX* up,     // (n)
                     size_t n) {
  NVTX_RANGE(6 * n * sizeof(floatX));
  launch(swiglu_backward_kernel<floatX>, ceil_div(n / 8, 256), 256, 0, device.stream, dgate, dup, act, dact,
         gate, up, n);
}

// ---- classifier: tied head and softmax cross-entropy ---------------------------------------------------

// One block of 512 threads per row: loss, and (if gradients) dlogits in the place of the logits. The first
// visit is an online softmax; the second finds the row in the L2 cache, its end first, which was read last.
// Padding, V .. Vp-1, becomes zero. Everything in base 2, where exp is one instruction.
constexpr int CROSS_ENTROPY_THREADS = 512;
template <class floatX>
__global__ void cross_entropy_kernel(float* losses, floatX* logits, const int* targets, float dloss,
                                     bool gradients, int V, int Vp) {
  constexpr int WARPS = CROSS_ENTROPY_THREADS / 32, STRIDE = CROSS_ENTROPY_THREADS * 8;
  __shared__ float tops[WARPS], sums[WARPS];
  const size_t row = blockIdx.x;
  const int target = targets[row], start = int(threadIdx.x) * 8;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  floatX* z = logits + row * size_t(Vp);
  const float target_logit = to_float(z[target]);  // read by all before the first barrier, overwritten after it
  const auto load_logits = [&](float(&v)[8], int i) {
    load8(v, z + i);
    if (i + 8 <= V) return;
#pragma unroll
    for (int k = 0; k < 8; k++)
      if (i + k >= V) v[k] = -INFINITY;
  };

  float top = -INFINITY, sum = 0, v[8];
  for (int i = start; i < V; i += STRIDE) {
    load_logits(v, i);
    float new_top = top;
#pragma unroll
    for (int k = 0; k < 8; k++) new_top = fmaxf(new_top, v[k]);
    if (new_top == -INFINITY) continue;

    sum *= exp2_flushed((top - new_top) * LOG2_E);
    top = new_top;
#pragma unroll
    for (int k = 0; k < 8; k++) sum += exp2_flushed((v[k] - top) * LOG2_E);
  }

  const auto combine = [&] {  // pairs (top, sum) of a warp's lanes
    const float all = warp_max(top);
    sum = warp_sum(top > -INFINITY ? sum * exp2_flushed((top - all) * LOG2_E) : 0.0f);
    top = all;
  };
  combine();
  if (lane == 0) {
    tops[warp] = top;
    sums[warp] = sum;
  }
  __syncthreads();
  top = lane < WARPS ? tops[lane] : -INFINITY;
  sum = lane < WARPS ? sums[lane] : 0.0f;
  combine();
  // The difference first: large logits would lose the digits of log(sum).
  if (threadIdx.x == 0) losses[row] = logf(sum) - (target_logit - top);
  if (!gradients || start >= Vp) return;

  const float scale = dloss / sum;
  for (int i = start + (Vp - 1 - start) / STRIDE * STRIDE; i >= 0; i -= STRIDE) {
    load_logits(v, i);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      v[k] = exp2_flushed((v[k] - top) * LOG2_E) * scale;
      if (i + k == target) v[k] -= dloss;
    }
    store8(z + i, v);
  }
}

template <class floatX>
void cross_entropy(float* losses,       // (rows), nats
                   floatX* logits,      // (rows,Vp): becomes the logits' gradients, if `gradients`
                   const int* targets,  // (rows)
                   float dloss, bool gradients, size_t rows, size_t V, size_t Vp) {
  NVTX_RANGE(rows * (V + (gradients ? Vp : 0)) * sizeof(floatX));
  launch(cross_entropy_kernel<floatX>, unsigned(rows), CROSS_ENTROPY_THREADS, 0, device.stream, losses, logits,
         targets, dloss, gradients, int(V), int(Vp));
}

// logits = x wte^T over the V real tokens, loss = -log softmax(logits)[target], a chunk of rows at a time: its
// losses and, if dx is given, its gradients, before the next chunk overwrites the buffer.
//   dlogits = (softmax(logits) - onehot(target)) dloss      dx = dlogits wte      dwte += dlogits^T x
template <class floatX>
void classifier(float* losses,       // (BT), nats
                floatX* dx,          // (BT,C); null: no gradients
                float* dwte,         // (Vp,C)
                const floatX* x,     // (BT,C)
                const floatX* wte,   // (Vp,C); rows V .. Vp-1 are zero
                const int* targets,  // (BT)
                float dloss,         // gradient of every token's loss: 1 / tokens in the step
                floatX* logits,      // workspace (chunk_rows,Vp)
                size_t chunk_rows, size_t BT, size_t C, size_t V, size_t Vp) {
  NVTX_RANGE();
  for (size_t row0 = 0; row0 < BT; row0 += chunk_rows) {
    const size_t rows = std::min(chunk_rows, BT - row0);
    matmul_forward(logits, x + row0 * C, wte, rows, C, Vp, Vp);
    cross_entropy(losses + row0, logits, targets + row0, dloss, dx != nullptr, rows, V, Vp);
    if (!dx) continue;
    matmul_backward_input(dx + row0 * C, logits, wte, rows, C, Vp, Vp);
    matmul_backward_weight(dwte, logits, x + row0 * C, rows, C, Vp, Vp);
  }
}

// ---- the model -----------------------------------------------------------------------------------------

template <class floatX>
struct Activations {
  // Kept from forward to backward.
  floatX* stream;     // (2L+1, B,T,C): embedding, then the partial after each sublayer
  float* rstd;        // (2L+1, B,T): 1 / rms of each slot
  float* p;           // (routes, B,T,ldp): the routes' weights; ldp is the most sources of any site
  floatX *qkv, *att;  // (L, B,T,3C) after rope, (L, B,T,C)
  float* lse;         // (L, B,NH,T)
  floatX *gate, *up;  // (L, B,T,F); --recompute: (1, B,T,F). The backward turns them into their gradients
  // Recomputed where needed, one site at a time.
  floatX* x;       // (R, B,T,C) normalised mixes: what the sublayer reads
  floatX* act;     // (B,T,F); in the backward dact, then act again
  floatX* logits;  // (chunk_rows,Vp)
  float* losses;   // (B,T)
  // Gradients. The bank lives through the whole backward, dh and delta until their block is done.
  floatX* dbank;           // (N+1, B,T,C): embedding, blocks
  floatX* dh;              // (routes of a block, B,T,C): dx of a site's inputs, then dh of its routes
  float* delta;            // (routes of a block, B,T): dh . h
  floatX *dqkv, *datt;     // (B,T,3C), (B,T,C)
  float* attention_delta;  // (B,NH,T)
  // What a step needs besides.
  float *queries, *dqueries;  // (routes,C): query * gain, and its gradient
  float* rows;                // (token_blocks(), MAX_ROUTE_LIST, C), at least Vp: sums over tokens, stage one
  double* norm_sums;          // one per chunk of this rank's share of the gradients
  double* route_sums;         // (L, ldp, 3): see add_route_stats
  int *tokens, *targets;      // (B,T)
  int* sorted_tokens;         // (3 B,T + 1): positions, starts, ids
  float2* rope_angles;        // (T,HS/2)
  Fold* folds;                // (routes)
};

// A micro-batch on its way through the GPU: pinned memory that copies read and write while the host goes on.
struct InFlight {
  int *tokens, *targets;  // (B,T)
  int* sorted_tokens;     // (3 B,T + 1)
  float* losses;          // (B,T)
  cudaEvent_t done;       // the losses are here, and the rest may be overwritten
};

template <class floatX>
struct Model {
  Config config;
  size_t B = 0, T = 0;  // largest batch and context that the buffers hold
  bool recompute = false;
  Tensors<float> params, grads, adam_m, adam_v;  // each one allocation, in the order of the tensor table
  Tensors<floatX> weights;                       // the matrices rounded, for products; float: params itself
  size_t num_elements = 0;                       // of each family, padding rows of wte included
  // Of many ranks (ranks.h) each updates one share, and has no more of adam_m and adam_v than that, from wte
  // on.
  size_t share = 0;
  size_t num_weights = 0;  // elements of the rounded copies, 0 for float
  size_t chunk_rows = 0;   // rows that the classifier works on at a time
  Activations<floatX> acts = {};
  InFlight in_flight[2] = {};  // while the GPU works on one micro-batch, the host fills the other
};

inline void allocate_tensors(Tensors<float>& tensors, const Config& config, size_t elements,
                             const char* family) {
  float* all = device_array<float>(elements, family);
  for (const TensorSpec& t : tensor_table(config))
    if (t.present) tensors.tensor(t.id) = all + t.begin;
}

// Routes are numbered in the order of the forward. The first site's count too, although it has one source and
// nothing to choose: it is read as it is, and its routes stay unused.
inline size_t route_number(const Config& c, size_t site) {
  size_t n = 0;
  for (size_t i = 0; i < site; i++) n += c.num_routes(i);
  return n;
}
inline size_t total_routes(const Config& c) { return route_number(c, c.sublayers() + 1); }
// The most routes whose gradients wait for the end of a block: of a whole block, and the output site's.
inline size_t most_routes_of_a_block(const Config& c) {
  return route_number(c, std::min(c.S, c.sublayers())) + 1;
}

// Rows of logits, the largest array of all, that exist at a time. Fewer, larger chunks visit dwte less often.
inline size_t classifier_rows(const Config& c, size_t BT) {
  return std::min(BT, std::max<size_t>(128, (size_t(1) << 28) / c.Vp() / 128 * 128));
}

// Calls visit(group, name, pointer, elements) for every buffer but the families of parameters.
template <class floatX, class Visit>
void for_each_activation(Activations<floatX>& a, const Config& c, size_t B, size_t T, bool recompute,
                         size_t chunk_rows, Visit visit) {
  const size_t BT = B * T, BTC = BT * c.C, routes = total_routes(c), waiting = most_routes_of_a_block(c);
  const size_t gates = (recompute ? 1 : c.L) * BT * c.F;
  visit("sources", "stream", a.stream, (c.sublayers() + 1) * BTC);
  visit("sources", "stream rstd", a.rstd, (c.sublayers() + 1) * BT);
  visit("sources", "route weights", a.p, routes * BT * c.max_sources());
  visit("activations", "qkv", a.qkv, c.L * 3 * BTC);
  visit("activations", "attention output", a.att, c.L * BTC);
  visit("activations", "attention lse", a.lse, c.L * c.NH * BT);
  visit("activations", "gate", a.gate, gates);
  visit("activations", "up", a.up, gates);
  visit("activations", "normalised mixes", a.x, (c.two_routes() ? 2 : 1) * BTC);
  visit("activations", "act", a.act, BT * c.F);
  visit("activations", "logits chunk", a.logits, chunk_rows * c.Vp());
  visit("activations", "losses", a.losses, BT);
  visit("their gradients", "d bank", a.dbank, c.bank_size() * BTC);
  visit("their gradients", "d mixes of a block", a.dh, waiting * BTC);
  visit("their gradients", "delta of a block", a.delta, waiting * BT);
  visit("their gradients", "d qkv", a.dqkv, 3 * BTC);
  visit("their gradients", "d attention output", a.datt, BTC);
  visit("their gradients", "attention delta", a.attention_delta, c.NH * BT);
  visit("workspace", "route queries times gains", a.queries, routes * c.C);
  visit("workspace", "their gradients", a.dqueries, routes * c.C);
  visit("workspace", "sums over tokens", a.rows, std::max(token_blocks() * MAX_ROUTE_LIST * c.C, c.Vp()));
  visit("workspace", "norm sums", a.norm_sums, ceil_div(share_of(count_elements(c)), SHARE_CHUNK));
  visit("workspace", "route statistics", a.route_sums, c.L * c.max_sources() * 3);
  visit("workspace", "tokens", a.tokens, BT);
  visit("workspace", "targets", a.targets, BT);
  visit("workspace", "sorted tokens", a.sorted_tokens, 3 * BT + 1);
  visit("workspace", "rope angles", a.rope_angles, T * c.HS() / 2);
  visit("workspace", "fold table", a.folds, routes);
}

// What the kernels cannot do, said before anything is allocated.
inline void check_config(const Config& c, size_t B) {
  constexpr size_t MAX_BATCH = 65535;  // blocks in the third dimension of a grid
  if (B > MAX_BATCH) fatal(EXIT_USAGE, "--batch %zu: on the GPU at most %zu", B, MAX_BATCH);
  if (c.C % 8 != 0 || c.C > MAX_ROUTE_WIDTH)
    fatal(EXIT_USAGE, "--width %zu: on the GPU a multiple of 8, at most %zu", c.C, MAX_ROUTE_WIDTH);
  if (c.F % 8 != 0) fatal(EXIT_USAGE, "--ffn %zu: on the GPU a multiple of 8", c.F);
  if (c.HS() % 16 != 0 || c.HS() > MAX_HEAD_SIZE)
    fatal(EXIT_USAGE, "--heads %zu: head size %zu; on the GPU a multiple of 16, at most %zu", c.NH, c.HS(),
          MAX_HEAD_SIZE);
  if (c.max_sources() > MAX_SOURCES)
    fatal(EXIT_USAGE, "--block-size %zu: %zu sources before the head; on the GPU at most %zu", c.S,
          c.max_sources(), MAX_SOURCES);
}

template <class floatX>
__global__ void round_kernel(floatX* out, const float* in, size_t n) {
  const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = from_float<floatX>(in[i]);
}
// After the parameters have come from elsewhere: whatever is derived from them.
template <class floatX>
void model_refresh(Model<floatX>& m) {
  if constexpr (!std::is_same<floatX, float>::value)
    for (const TensorSpec& t : tensor_table(m.config))
      if (t.is_matrix())
        launch(round_kernel<floatX>, ceil_div(t.size(), 256), 256, 0, device.stream, m.weights.tensor(t.id),
               m.params.tensor(t.id), t.size());
  if (m.config.has_routes()) fold_gain(m.acts.queries, m.acts.folds, total_routes(m.config), m.config.C);
}

// The queries and gains that each route is folded from, in the order of the routes.
template <class floatX>
std::vector<Fold> fold_table(Model<floatX>& m) {
  const Config& c = m.config;
  const Tensors<float>&w = m.params, &d = m.grads;
  std::vector<Fold> folds;
  if (!c.has_routes()) return folds;
  for (size_t l = 0; l < c.L; l++) {
    const size_t layer = l * c.C;  // where it begins in an (L,C) tensor
    const float *query = w.attn_route_qk + layer, *gain = w.attn_route_gain + layer;
    float* dgain = d.attn_route_gain + layer;
    folds.push_back({query, gain, d.attn_route_qk + layer, dgain});
    if (c.has_v_query())
      folds.push_back({w.attn_route_v + layer, gain, d.attn_route_v + layer, dgain});
    else if (c.two_routes())
      folds.push_back({c.arch == Arch::tied ? query : nullptr, gain, nullptr, nullptr});
    folds.push_back(
        {w.mlp_route + layer, w.mlp_route_gain + layer, d.mlp_route + layer, d.mlp_route_gain + layer});
  }
  folds.push_back({w.out_route, w.out_route_gain, d.out_route, d.out_route_gain});
  return folds;
}

template <class floatX>
void model_zero_grad(Model<floatX>& m) {
  NVTX_RANGE(ranks.size * m.share * sizeof(float));
  zero(m.grads.wte, ranks.size * m.share);
}

template <class floatX>
void model_create(Model<floatX>& m, const Config& config, size_t B, size_t T, uint64_t seed,
                  bool recompute = false) {
  NVTX_RANGE();
  check_config(config, B);
  device_open();
  m.config = config;
  m.B = B;
  m.T = T;
  m.recompute = recompute;
  m.num_elements = count_elements(config);
  m.share = share_of(m.num_elements);
  allocate_tensors(m.params, config, ranks.size * m.share, "parameters");
  allocate_tensors(m.grads, config, ranks.size * m.share, "gradients");
  allocate_tensors(m.adam_m, config, m.share, "first moments");
  allocate_tensors(m.adam_v, config, m.share, "second moments");
  model_zero_grad(m);
  for (Tensors<float>* moments : {&m.adam_m, &m.adam_v}) zero(moments->wte, m.share);
  if constexpr (std::is_same<floatX, float>::value)
    m.weights = m.params;
  else {
    for (const TensorSpec& t : tensor_table(config)) m.num_weights += t.is_matrix() ? t.size() : 0;
    floatX* next = device_array<floatX>(m.num_weights, "bf16 copies of the matrices");
    for (const TensorSpec& t : tensor_table(config)) {
      if (!t.is_matrix()) continue;
      m.weights.tensor(t.id) = next;
      next += t.size();
    }
  }
  if (m.chunk_rows == 0) m.chunk_rows = classifier_rows(config, B * T);
  const char* hint = recompute ? "lower --batch" : "lower --batch, or add --recompute";
  for_each_activation(m.acts, config, B, T, recompute, m.chunk_rows,
                      [&](const char*, const char* name, auto*& pointer, size_t n) {
                        pointer = device_array<std::remove_reference_t<decltype(*pointer)>>(n, name, hint);
                      });

  for (InFlight& batch : m.in_flight) {
    CUDA_CHECK(cudaMallocHost(&batch.tokens, B * T * sizeof(int)));
    CUDA_CHECK(cudaMallocHost(&batch.targets, B * T * sizeof(int)));
    CUDA_CHECK(cudaMallocHost(&batch.sorted_tokens, (3 * B * T + 1) * sizeof(int)));
    CUDA_CHECK(cudaMallocHost(&batch.losses, B * T * sizeof(float)));
    CUDA_CHECK(cudaEventCreateWithFlags(&batch.done, cudaEventDisableTiming));
  }

  const std::vector<float> angles = rope_angles(T, config.HS());
  upload(reinterpret_cast<float*>(m.acts.rope_angles), angles.data(), angles.size());
  const std::vector<Fold> folds = fold_table(m);
  if (!folds.empty()) upload(m.acts.folds, folds.data(), folds.size());

  for (const TensorSpec& t : tensor_table(config)) {
    std::vector<float> initial(t.size());
    for (size_t i = 0; i < initial.size(); i++) initial[i] = initial_value(t, config, seed, i);
    upload(m.params.tensor(t.id), initial.data(), initial.size());
  }
  model_refresh(m);
}

template <class floatX>
void model_free(Model<floatX>& m) {
  for (Tensors<float>* family : {&m.params, &m.grads, &m.adam_m, &m.adam_v}) CUDA_CHECK(cudaFree(family->wte));
  if (m.num_weights > 0) CUDA_CHECK(cudaFree(m.weights.wte));
  for_each_activation(m.acts, m.config, m.B, m.T, m.recompute, m.chunk_rows,
                      [](const char*, const char*, auto*& pointer, size_t) { CUDA_CHECK(cudaFree(pointer)); });
  for (InFlight& batch : m.in_flight) {
    CUDA_CHECK(cudaFreeHost(batch.tokens));
    CUDA_CHECK(cudaFreeHost(batch.targets));
    CUDA_CHECK(cudaFreeHost(batch.sorted_tokens));
    CUDA_CHECK(cudaFreeHost(batch.losses));
    CUDA_CHECK(cudaEventDestroy(batch.done));
  }
  m = Model<floatX>();
}

// What one site reads: its sources and the parameters of its routes.
template <class floatX>
struct Site {
  size_t i, R, route;       // R = 0: one source, read as it is; route: number of its first route
  Sources<floatX> sources;  // the last is slot i
  float* p;                 // (R,BT,ldp)
  const float* queries;     // (R,C): query * gain
  const float* norm;        // (C)
  float* dnorm;             // (C)
  bool average;             // one input from two routes
  size_t inputs;            // how many different x the sublayer reads: x_qk and x_v, or one for both
};
template <class floatX>
Site<floatX> site_at(const Model<floatX>& m, size_t i, size_t BT) {
  const Config& c = m.config;
  const Activations<floatX>& a = m.acts;
  Site<floatX> site = {};
  site.i = i;
  site.R = i == 0 ? 0 : c.num_routes(i);
  site.route = route_number(c, i);
  site.sources = {a.stream, a.rstd, c.S, i};
  site.p = a.p + site.route * BT * c.max_sources();
  site.queries = a.queries + site.route * c.C;
  site.average = c.arch == Arch::average && site.R == 2;
  site.inputs = site.R == 2 && !site.average ? 2 : 1;
  const auto norm_of = [&](const Tensors<float>& family) {
    if (i == c.sublayers()) return family.final_norm;
    return (i % 2 == 1 ? family.mlp_norm : family.attn_norm) + i / 2 * c.C;
  };
  site.norm = norm_of(m.params);
  site.dnorm = norm_of(m.grads);
  return site;
}

// Reads the sources through the site's routes and normalises: acts.x.
template <class floatX>
void read_sources(Model<floatX>& m, const Site<floatX>& site, size_t BT) {
  const Config& c = m.config;
  const Activations<floatX>& a = m.acts;
  if (site.R == 0)
    rmsnorm_forward(a.x, a.rstd + site.i * BT, a.stream + site.i * BT * c.C, site.norm, BT, c.C);
  else
    route_forward(a.x, site.p, site.sources, site.queries, site.norm, site.average, BT, c.C, c.max_sources(),
                  site.R);
}

// What sublayer i's output is added to on its way into slot i + 1: the running partial; null if a block starts.
template <class floatX>
const floatX* partial_before(const Model<floatX>& m, size_t i, size_t BT) {
  return i % m.config.S != 0 || !m.config.has_routes() ? m.acts.stream + i * BT * m.config.C : nullptr;
}

// The two products of the feed-forward that are recomputed, not kept, with --recompute.
template <class floatX>
void gate_and_up(Model<floatX>& m, size_t l, size_t BT) {
  const Config& c = m.config;
  const Activations<floatX>& a = m.acts;
  const size_t kept = (m.recompute ? 0 : l) * BT * c.F;
  matmul_forward(a.gate + kept, a.x, m.weights.w_gate + l * c.F * c.C, BT, c.C, c.F, c.F);
  matmul_forward(a.up + kept, a.x, m.weights.w_up + l * c.F * c.C, BT, c.C, c.F, c.F);
}

// Of the (B,T) tokens in acts.tokens. Leaves what the head reads, final_norm * rmsnorm(h_out), in acts.x.
template <class floatX>
void model_forward(Model<floatX>& m, size_t B, size_t T) {
  NVTX_RANGE();
  const Config& c = m.config;
  const Tensors<floatX>& w = m.weights;
  const Activations<floatX>& a = m.acts;
  const size_t C = c.C, F = c.F, BT = B * T;

  embedding_forward(a.stream, a.tokens, w.wte, BT, C);
  for (size_t l = 0; l < c.L; l++) {
    {  // attention: sublayer 2l
      const Site<floatX> site = site_at(m, 2 * l, BT);
      const floatX *x_qk = a.x, *x_v = a.x + (site.inputs - 1) * BT * C;
      floatX *qkv = a.qkv + l * BT * 3 * C, *att = a.att + l * BT * C;
      read_sources(m, site, BT);
      matmul_forward(qkv, x_qk, w.wqk + l * 2 * C * C, BT, C, 2 * C, 3 * C);
      matmul_forward(qkv + 2 * C, x_v, w.wv + l * C * C, BT, C, C, 3 * C);
      rope_forward(qkv, a.rope_angles, B, T, C, c.NH);
      attention_forward(att, a.lse + l * c.NH * BT, qkv, B, T, C, c.NH);
      matmul_forward(a.stream + (2 * l + 1) * BT * C, att, w.wo + l * C * C, BT, C, C, C,
                     partial_before(m, 2 * l, BT));
    }
    {  // feed-forward: sublayer 2l + 1
      const size_t kept = (m.recompute ? 0 : l) * BT * F;
      read_sources(m, site_at(m, 2 * l + 1, BT), BT);
      gate_and_up(m, l, BT);
      swiglu_forward(a.act, a.gate + kept, a.up + kept, BT * F);
      matmul_forward(a.stream + (2 * l + 2) * BT * C, a.act, w.w_down + l * C * F, BT, F, C, C,
                     partial_before(m, 2 * l + 1, BT));
    }
  }
  read_sources(m, site_at(m, c.sublayers(), BT), BT);
}

// Backward of read_sources: takes dx of each input, in the free places of acts.dh, and leaves acts.x as the
// forward had it. Routes whose shares of the finished sources are still owed are in `waiting`, in acts.dh's
// order.
template <class floatX>
void read_sources_backward(Model<floatX>& m, const Site<floatX>& site, std::vector<int>& waiting, size_t BT) {
  const Config& c = m.config;
  const Activations<floatX>& a = m.acts;
  const size_t C = c.C;
  floatX* dh = a.dh + waiting.size() * BT * C;
  if (site.R == 0) {
    // One source: x again, then the norm's backward straight into that source's gradient, which is the
    // embedding's; in a residual network the running sum's.
    read_sources(m, site, BT);
    rmsnorm_backward(a.dbank, site.dnorm, dh, a.stream + site.i * BT * C, a.rstd + site.i * BT, site.norm,
                     a.rows, BT, C);
    return;
  }
  // tied: both inputs are one function of one query, so their gradients have met in dx already, as in `block`.
  const size_t R = c.arch == Arch::tied ? 1 : site.R;
  float* delta = a.delta + waiting.size() * BT;
  for (size_t r = 0; r < R; r++) waiting.push_back(int(site.route + r));
  // The last slot counts as a running partial for the head, although its block may be complete.
  const bool has_partial = site.i % c.S != 0 || site.i == c.sublayers();
  floatX* dpartial = has_partial ? a.dbank + c.bank_index(site.i) * BT * C : nullptr;
  route_backward(dh, a.x, delta, dpartial, site.dnorm, a.dqueries + site.route * C, site.sources, site.p,
                 site.queries, site.norm, site.average, a.rows, BT, C, c.max_sources(), R);
}

// After model_forward and classifier, which left the head's gradient in acts.dh. Adds to m.grads.
//
// Every slot of one block shares one gradient buffer of the bank. Walking back through a block, that buffer is
// the gradient of the running partial: partial_after = partial_before + o, so it is also the gradient of o, and
// the routes that read partial_before add to it at once. What they owe to the finished sources they pay
// together, when the block is done.
template <class floatX>
void model_backward(Model<floatX>& m, size_t B, size_t T, const TokenBuckets& buckets) {
  NVTX_RANGE();
  const Config& c = m.config;
  const Tensors<floatX>& w = m.weights;
  const Tensors<float>& d = m.grads;
  const Activations<floatX>& a = m.acts;
  const size_t C = c.C, F = c.F, BT = B * T;
  std::vector<int> waiting;
  const auto dx = [&] { return a.dh + waiting.size() * BT * C; };
  // Gradient of the running partial after sublayer i, which is the gradient of the sublayer's output too
  const auto dpartial = [&](size_t i) { return a.dbank + c.bank_index(i + 1) * BT * C; };
  const auto end_block = [&](size_t i) {  // after the backward of sublayer i, if a block starts there
    if (i % c.S != 0 || waiting.empty()) return;
    const bool overwrite = i > 0 && i / c.S + 1 == c.blocks();  // the first visit, by the last block
    route_backward_bank(a.dbank, a.dqueries, a.dh, a.delta, site_at(m, i, BT).sources, a.p, a.queries, waiting,
                        overwrite, a.rows, BT, C, c.max_sources());
    waiting.clear();
  };

  // What is added to from the start. Finished blocks' gradients start with a visit that overwrites.
  if (c.has_routes()) zero(a.dqueries, total_routes(c) * C);
  zero(a.dbank, BT * C);                      // the embedding's
  zero(dpartial(c.sublayers() - 1), BT * C);  // the last partial's

  read_sources_backward(m, site_at(m, c.sublayers(), BT), waiting, BT);
  for (size_t l = c.L; l-- > 0;) {
    {  // feed-forward: sublayer 2l + 1
      const Site<floatX> site = site_at(m, 2 * l + 1, BT);
      const size_t kept = (m.recompute ? 0 : l) * BT * F;
      floatX *gate = a.gate + kept, *up = a.up + kept;
      if (m.recompute) {
        read_sources(m, site, BT);
        gate_and_up(m, l, BT);
      }
      matmul_backward_input(a.act, dpartial(site.i), w.w_down + l * C * F, BT, F, C, C);  // dact
      swiglu_backward(gate, up, a.act, a.act, gate, up, BT * F);                          // dgate, dup, act
      matmul_backward_weight(d.w_down + l * C * F, dpartial(site.i), a.act, BT, F, C, C);
      matmul_backward_input(dx(), gate, w.w_gate + l * F * C, BT, C, F, F);
      matmul_backward_input(dx(), up, w.w_up + l * F * C, BT, C, F, F, true);
      read_sources_backward(m, site, waiting, BT);
      matmul_backward_weight(d.w_gate + l * F * C, gate, a.x, BT, C, F, F);
      matmul_backward_weight(d.w_up + l * F * C, up, a.x, BT, C, F, F);
      end_block(site.i);
    }
    {  // attention: sublayer 2l
      const Site<floatX> site = site_at(m, 2 * l, BT);
      const bool one_dx = site.inputs == 1 || c.arch == Arch::tied;
      const floatX *qkv = a.qkv + l * BT * 3 * C, *att = a.att + l * BT * C;
      const size_t v_input = one_dx ? 0 : BT * C;  // where V's begins in x and dx
      matmul_backward_input(a.datt, dpartial(site.i), w.wo + l * C * C, BT, C, C, C);
      matmul_backward_weight(d.wo + l * C * C, dpartial(site.i), att, BT, C, C, C);
      attention_backward(a.dqkv, a.attention_delta, a.datt, qkv, att, a.lse + l * c.NH * BT, B, T, C, c.NH);
      rope_backward(a.dqkv, a.rope_angles, B, T, C, c.NH);
      matmul_backward_input(dx(), a.dqkv, w.wqk + l * 2 * C * C, BT, C, 2 * C, 3 * C);
      matmul_backward_input(dx() + v_input, a.dqkv + 2 * C, w.wv + l * C * C, BT, C, C, 3 * C, one_dx);
      read_sources_backward(m, site, waiting, BT);
      matmul_backward_weight(d.wqk + l * 2 * C * C, a.dqkv, a.x, BT, C, 2 * C, 3 * C);
      matmul_backward_weight(d.wv + l * C * C, a.dqkv + 2 * C, a.x + v_input, BT, C, C, 3 * C);
      end_block(site.i);
    }
  }
  if (c.has_routes()) fold_gain_backward(a.dqueries, a.folds, total_routes(c), C);
  embedding_backward(d.wte, a.dbank, buckets, C);
}

// Sends off the micro-batch whose tokens and targets (B,T) are in `batch`: adds the gradient of (its mean loss
// / accumulation) to m.grads. Returns long before the GPU is done; finish_micro_batch waits.
template <class floatX>
void start_micro_batch(Model<floatX>& m, InFlight& batch, size_t B, size_t T, size_t accumulation) {
  const Config& c = m.config;
  const Activations<floatX>& a = m.acts;
  const size_t BT = B * T;
  std::vector<int> sorted;
  const size_t distinct = sort_tokens(sorted, batch.tokens, BT, c.V);
  std::copy(sorted.begin(), sorted.end(), batch.sorted_tokens);
  copy_later(a.tokens, batch.tokens, BT, cudaMemcpyHostToDevice);
  copy_later(a.targets, batch.targets, BT, cudaMemcpyHostToDevice);
  copy_later(a.sorted_tokens, batch.sorted_tokens, sorted.size(), cudaMemcpyHostToDevice);
  model_forward(m, B, T);
  classifier(a.losses, a.dh, m.grads.wte, a.x, m.weights.wte, a.targets, 1 / (float(BT) * float(accumulation)),
             a.logits, m.chunk_rows, BT, c.C, c.V, c.Vp());
  model_backward(m, B, T,
                 {a.sorted_tokens, a.sorted_tokens + BT, a.sorted_tokens + BT + distinct + 1, distinct});
  copy_later(batch.losses, a.losses, BT, cudaMemcpyDeviceToHost);
  CUDA_CHECK(cudaEventRecord(batch.done, device.stream));
}
// Mean loss in nats per token. The sum runs in token order in double: the same for any batch shape.
inline double finish_micro_batch(const InFlight& batch, size_t BT) {
  CUDA_CHECK(cudaEventSynchronize(batch.done));
  double sum = 0;
  for (size_t bt = 0; bt < BT; bt++) sum += double(batch.losses[bt]);
  return sum / double(BT);
}

// ---- what the routes do --------------------------------------------------------------------------------

// One block per source j: sums over all tokens of p_j and q_j, the weights of the routes for QK and for V (one
// and the same if R = 1), and of j's share of the Jensen-Shannon divergence between p and q.
__global__ void route_sums_kernel(double* sums, const float* p, const float* q, size_t BT, size_t ldp) {
  double values[3] = {};  // of p_j, q_j and j's share of the divergence
  for (size_t bt = threadIdx.x; bt < BT; bt += SUM_THREADS) {
    const double pj = p[bt * ldp + blockIdx.x], qj = q[bt * ldp + blockIdx.x], mean = (pj + qj) / 2;
    values[0] += pj;
    values[1] += qj;
    if (pj > 0) values[2] += pj * log(pj / mean) / 2;
    if (qj > 0) values[2] += qj * log(qj / mean) / 2;
  }

  for (int i = 0; i < 3; i++) {
    const double sum = block_sum(values[i]);
    if (threadIdx.x == 0) sums[blockIdx.x * 3 + i] = sum;
    __syncthreads();
  }
}
// Adds the last forward's attention routes to the sums in stats: the weight on each source for QK and for V,
// and the Jensen-Shannon divergence between the two, JS = (KL(p||m) + KL(q||m)) / 2 with m = (p + q) / 2.
template <class floatX>
void add_route_stats(RouteStats& stats, const Model<floatX>& m, size_t BT) {
  const Config& c = m.config;
  if (!c.has_routes()) return;
  NVTX_RANGE();
  const size_t ldp = c.max_sources();
  zero(m.acts.route_sums, c.L * ldp * 3);
  for (size_t l = 1; l < c.L; l++) {  // the first site is not routed: its one source has all the weight
    const Site<floatX> site = site_at(m, 2 * l, BT);
    launch(route_sums_kernel, unsigned(c.num_sources(2 * l)), SUM_THREADS, 0, device.stream,
           m.acts.route_sums + l * ldp * 3, site.p, site.p + (site.R - 1) * BT * ldp, BT, ldp);
  }

  std::vector<double> sums(c.L * ldp * 3,
                           double(BT));  // so much weight has the first site's source, per route,
  sums[2] = 0;                           // and no divergence
  if (c.L > 1) download(&sums[ldp * 3], m.acts.route_sums + ldp * 3, (c.L - 1) * ldp * 3);

  stats.qk.resize(c.L);
  stats.v.resize(c.L);
  stats.js_nats.resize(c.L);
  for (size_t l = 0; l < c.L; l++) {
    const size_t K = c.num_sources(2 * l);
    const bool two = c.num_routes(2 * l) == 2;
    stats.qk[l].resize(K);
    stats.v[l].resize(two ? K : 0);
    for (size_t j = 0; j < K; j++) {
      const double* of_source = &sums[(l * ldp + j) * 3];
      stats.qk[l][j] += of_source[0];
      stats.js_nats[l] += of_source[2];
      if (two) stats.v[l][j] += of_source[1];
    }
  }
}

// ---- a number that is not finite -----------------------------------------------------------------------

// Rows of n numbers, a distance of ld apart, of which the first `used` count.
template <class T>
bool all_finite(const T* values, size_t rows, size_t ld, size_t used) {
  std::vector<T> copy(rows * ld);
  download(copy.data(), values, copy.size());
  for (size_t i = 0; i < copy.size(); i++)
    if (i % ld < used && !std::isfinite(float(copy[i]))) return false;
  return true;
}

// Names a tensor and layer of a family that holds a number that is not finite: of several the one nearest to
// the output, where a bad gradient begins before it spreads to all that comes below. "" if all are finite.
inline std::string find_non_finite(const Config& c, Tensors<float>& family) {
  return nearest_to_output(c, [&](TensorId id, size_t offset, size_t n) {
    return !all_finite(family.tensor(id) + offset, 1, n, n);
  });
}

// Where numbers stopped being finite, for the message that ends the run, after one micro-batch from gradients
// of zero: what comes first in the order of a step. "" if all are finite.
template <class floatX>
std::string blame_non_finite(Model<floatX>& m, size_t BT) {
  const Config& c = m.config;
  const Activations<floatX>& a = m.acts;
  const auto sublayer = [](size_t i) {
    return format("%s, layer %zu", i % 2 ? "feed-forward" : "attention", i / 2);
  };
  const std::string parameter = find_non_finite(c, m.params);
  if (!parameter.empty()) return "parameter " + parameter;
  for (size_t i = 0; i <= c.sublayers(); i++) {
    const Site<floatX> site = site_at(m, i, BT);
    if (!all_finite(a.stream + i * BT * c.C, BT, c.C, c.C))
      return i == 0 ? "the embedding" : "the output of the " + sublayer(i - 1);
    if (!all_finite(site.p, site.R * BT, c.max_sources(), c.num_sources(i)))
      return i == c.sublayers() ? "the output route" : "a route of the " + sublayer(i);
  }
  read_sources(m, site_at(m, c.sublayers(), BT), BT);
  if (!all_finite(a.x, BT, c.C, c.C)) return "what the head reads";
  if (!all_finite(a.losses, 1, BT, BT)) return "the logits";
  const std::string gradient = find_non_finite(c, m.grads);
  return gradient.empty() ? "" : "gradient of " + gradient;
}

// ---- AdamW ---------------------------------------------------------------------------------------------

constexpr double ADAM_BETA1 = 0.9, ADAM_BETA2 = 0.95, ADAM_EPS = 1e-8;

// Sums of squares in double, one block per chunk.
__global__ void square_sums_kernel(double* sums, const float* g, size_t n) {
  const size_t begin = blockIdx.x * SHARE_CHUNK, end = begin + SHARE_CHUNK < n ? begin + SHARE_CHUNK : n;
  double sum = 0;
  for (size_t i = begin + threadIdx.x; i < end; i += SUM_THREADS) sum += double(g[i]) * double(g[i]);
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
// Global norm of every rank's n gradients, chunk after chunk: the same order for any number of ranks. Waits for
// the GPU.
inline double global_norm(const float* g,  // (n)
                          double* sums,    // workspace, one per chunk
                          size_t n) {
  NVTX_RANGE(n * sizeof(float));
  std::vector<double> of_chunks(ceil_div(n, SHARE_CHUNK));
  if (n > 0) {
    launch(square_sums_kernel, unsigned(of_chunks.size()), SUM_THREADS, 0, device.stream, sums, g, n);
    download(of_chunks.data(), sums, of_chunks.size());
  }
  double total = 0;
  for (double sum : gather(of_chunks)) total += sum;
  return std::sqrt(total);
}

// Global norm of all gradients, each rank's share of them summed up by itself: a family is one allocation.
template <class floatX>
double grad_norm(const Model<floatX>& m) {
  const Part own = own_part(m.num_elements);
  return global_norm(m.grads.wte + own.first, m.acts.norm_sums, own.end - own.first);
}

// One thread per four numbers; n is a multiple of 4. The working copy that products read is written on the way;
// null where there is none.
struct AdamStep {
  float scale, rate, shrink, correct1, correct2;
};
template <class floatX>
__global__ void adamw_kernel(float* p, floatX* working, float* m, float* v, const float* g, size_t n,
                             AdamStep rates) {
  const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * 4;
  if (i >= n) return;
  constexpr float BETA1 = float(ADAM_BETA1), BETA2 = float(ADAM_BETA2), EPSILON = float(ADAM_EPS);
  float param[4], mean[4], square[4], grad[4];
  load4(param, p + i);
  load4(mean, m + i);
  load4(square, v + i);
  load4(grad, g + i);
  for (int k = 0; k < 4; k++) {
    grad[k] *= rates.scale;
    mean[k] = BETA1 * mean[k] + (1 - BETA1) * grad[k];
    square[k] = BETA2 * square[k] + (1 - BETA2) * grad[k] * grad[k];
    const float step = rates.rate * (mean[k] * rates.correct1) / (sqrtf(square[k] * rates.correct2) + EPSILON);
    param[k] -= step + rates.shrink * param[k];
  }
  store4(p + i, param);
  store4(m + i, mean);
  store4(v + i, square);
  if (working) store4(working + i, param);
}
// One step for n numbers: m and v are running means of g and g^2, corrected for having started at zero.
//   p -= lr (mhat / (sqrt(vhat) + eps) + decay p)
template <class floatX>
void adamw(float* p, floatX* working, float* m, float* v, const float* g, size_t n, double grad_scale,
           double lr, double decay, size_t step) {
  NVTX_RANGE(n * (7 * sizeof(float) + (working ? sizeof(floatX) : 0)));
  const AdamStep rates = {float(grad_scale), float(lr), float(lr * decay),
                          float(1 / (1 - std::pow(ADAM_BETA1, double(step)))),
                          float(1 / (1 - std::pow(ADAM_BETA2, double(step))))};
  launch(adamw_kernel<floatX>, ceil_div(n / 4, 256), 256, 0, device.stream, p, working, m, v, g, n, rates);
}

// step counts from 1. Gradients are scaled by grad_scale (clipping) on the way in. Each rank updates its share
// and gets the others'.
template <class floatX>
void model_update(Model<floatX>& m, size_t step, double grad_scale, double lr, double weight_decay,
                  double query_lr_mult) {
  NVTX_RANGE();
  const Part own = own_part(m.num_elements);
  for (const TensorSpec& t : tensor_table(m.config)) {
    const size_t first = std::max(t.begin, own.first), end = std::min(t.begin + t.size(), own.end);
    floatX* working = t.is_matrix() && m.num_weights > 0 ? m.weights.tensor(t.id) + (first - t.begin) : nullptr;
    if (first >= end) continue;
    const size_t at = first - own.first;
    adamw(m.params.wte + first, working, m.adam_m.wte + at, m.adam_v.wte + at, m.grads.wte + first, end - first,
          grad_scale, t.kind == Kind::query ? lr * query_lr_mult : lr, t.is_matrix() ? weight_decay : 0, step);
  }
  gather_shares_on_cards(m.params.wte, m.share);
  if (ranks.size > 1) return model_refresh(m);  // others' shares are not rounded yet
  if (m.config.has_routes()) fold_gain(m.acts.queries, m.acts.folds, total_routes(m.config), m.config.C);
}

// ---- checkpoint ----------------------------------------------------------------------------------------

// Parameters as model.<name>, moments as adam_m.<name> and adam_v.<name>: float32, the CPU trainer's files.
struct Family {
  const char* prefix;
  float* numbers;
  size_t share;  // what one rank has of it: of the parameters all
  Part own;
};
template <class floatX>
std::vector<Family> checkpoint_families(const Model<floatX>& m) {
  return {{"model.", m.params.wte, m.num_elements, {0, m.num_elements}},
          {"adam_m.", m.adam_m.wte, m.share, own_part(m.num_elements)},
          {"adam_v.", m.adam_v.wte, m.share, own_part(m.num_elements)}};
}

// Rank 0 writes; a chunk at a time comes from the GPU, or from another rank's.
template <class floatX>
void model_save(Model<floatX>& m, const std::string& path, const std::map<std::string, std::string>& metadata) {
  std::vector<CheckpointTensor> tensors;
  for (const Family& family : checkpoint_families(m)) {
    const auto read = [family](size_t at, size_t n, float* chunk) { download(chunk, family.numbers + at, n); };
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
template <class floatX>
void model_load(Model<floatX>& m, const Checkpoint& checkpoint, bool with_moments) {
  for (const Family& family : checkpoint_families(m)) {
    if (family.numbers != m.params.wte && !with_moments) continue;
    for (const TensorSpec& t : tensor_table(m.config)) {
      if (!t.present) continue;
      const auto put = [&](size_t offset, size_t n, const float* chunk) {
        const size_t from = t.begin + offset;
        const size_t first = std::max(from, family.own.first), end = std::min(from + n, family.own.end);
        if (first < end)
          upload(family.numbers + (first - family.own.first), chunk + (first - from), end - first);
      };
      checkpoint.read(std::string(family.prefix) + t.name, t.shape, put);
    }
  }
  model_refresh(m);
}

// ---- what dev/common/train.h asks of a model, besides add_route_stats -----------------------------------

// The loss of every token, (B,T), in nats. No gradients.
template <class floatX>
std::vector<float> token_losses(Model<floatX>& m, const int* tokens, const int* targets, size_t B, size_t T) {
  const Config& c = m.config;
  const Activations<floatX>& a = m.acts;
  const size_t BT = B * T;
  upload(a.tokens, tokens, BT);
  upload(a.targets, targets, BT);
  model_forward(m, B, T);
  floatX* no_gradients = nullptr;
  classifier(a.losses, no_gradients, nullptr, a.x, m.weights.wte, a.targets, 0, a.logits, m.chunk_rows, BT, c.C,
             c.V, c.Vp());
  std::vector<float> losses(BT);
  download(losses.data(), a.losses, BT);
  return losses;
}

// Logits of the token that follows `context` (the last T tokens of it): V numbers.
template <class floatX>
void next_token_logits(Model<floatX>& m, const std::vector<int>& context, std::vector<float>& logits) {
  const Config& c = m.config;
  const size_t n = std::min(context.size(), m.T);
  upload(m.acts.tokens, context.data() + context.size() - n, n);
  model_forward(m, 1, n);
  // acts.rows is free between steps, and float32: the sampler sees unrounded logits.
  const floatX* last = m.acts.x + (n - 1) * c.C;
  matmul<float, floatX>({m.acts.rows, c.Vp()}, {last, c.C}, transposed(m.weights.wte, c.C), 1, c.Vp(), c.C);
  logits.resize(c.V);
  download(logits.data(), m.acts.rows, c.V);
}

// ---- one training step ---------------------------------------------------------------------------------

struct StepResult {
  double loss, norm;
};

// Example numbers position .. position + B * accumulation - 1 of the run's data order, B at a time, each rank
// as many; clipping; one update. step counts from 1. Stops the program, naming the tensor, before a number that
// is not finite reaches the parameters.
//
// The host stays ahead: it reads a micro-batch and queues its kernels while the GPU works on the one before,
// and waits once a step, for the norm, because the update depends on it. It does not wait for the update, which
// runs while the next step reads its first micro-batch. So the loss is there when the step returns, and a
// step's time is that of its kernels, though the update it holds is that of the step before.
template <class floatX>
StepResult train_step(Model<floatX>& m, const TokenData& data, const Options& o, size_t position, size_t step,
                      double lr) {
  NVTX_RANGE();
  const size_t B = m.B, T = m.T, accumulation = o.total_batch / (B * T);
  const size_t mine = accumulation / ranks.size, first = position + ranks.rank * mine * B;
  StepResult result = {0, 0};
  std::vector<double> losses;
  const auto finish = [&](size_t micro) {
    losses.push_back(finish_micro_batch(m.in_flight[micro % 2], B * T));
  };
  const auto start = [&](size_t micro) {
    InFlight& batch = m.in_flight[micro % 2];
    for (size_t b = 0; b < B; b++)
      training_example(data, T, o.seed, first + micro * B + b, batch.tokens + b * T, batch.targets + b * T);
    start_micro_batch(m, batch, B, T, accumulation);
  };

  model_zero_grad(m);
  for (size_t micro = 0; micro < mine; micro++) {
    if (micro >= 2) finish(micro - 2);  // its memory is needed again
    start(micro);
  }
  for (size_t micro = std::max<size_t>(mine, 2) - 2; micro < mine; micro++) finish(micro);
  for (double loss : gather(losses)) result.loss += loss / double(accumulation);
  sum_shares_on_cards(m.grads.wte, m.share);
  result.norm = grad_norm(m);
  if (!std::isfinite(result.loss) || !std::isfinite(result.norm)) {
    std::string where;  // every micro-batch once more, alone, until one shows it
    for (size_t micro = 0; micro < mine && where.empty(); micro++) {
      model_zero_grad(m);
      start(micro);
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

}  // namespace gpu

#ifndef TESTING
using namespace gpu;

// ---- main ----------------------------------------------------------------------------------------------

// By family and by group of buffers, for a batch of B.
template <class floatX>
static std::vector<MemoryLine> memory_lines(const Config& c, size_t B, bool recompute) {
  const size_t elements = count_elements(c);
  size_t matrices = 0;
  for (const TensorSpec& t : tensor_table(c)) matrices += t.is_matrix() ? t.size() : 0;
  const size_t share = share_of(elements) * sizeof(float), family = ranks.size * share;
  std::vector<MemoryLine> lines = {{"parameters", family}, {"gradients", family}, {"AdamW moments", 2 * share}};
  if (sizeof(floatX) == 2) lines.push_back({"bf16 matrices", matrices * sizeof(floatX)});
  Activations<floatX> none = {};
  for_each_activation(none, c, B, c.T, recompute, classifier_rows(c, B * c.T),
                      [&](const char* group, const char*, auto*& pointer, size_t n) {
                        if (lines.back().name != group) lines.push_back({group, 0});
                        lines.back().bytes += n * sizeof(*pointer);
                      });
  lines.back().bytes += CUBLAS_WORKSPACE;
  return lines;
}

// The largest batch for which everything fits into `bytes`; 0 if none does.
template <class floatX>
static size_t largest_batch(const Config& c, bool recompute, size_t bytes) {
  const auto fits = [&](size_t B) {
    size_t total = 0;
    for (const MemoryLine& line : memory_lines<floatX>(c, B, recompute)) total += line.bytes;
    return total <= bytes;
  };
  size_t low = 0, high = 1;
  while (fits(high)) {
    low = high;
    high *= 2;
  }
  while (high - low > 1) (fits((low + high) / 2) ? low : high) = (low + high) / 2;
  return low;
}

template <class floatX>
static double peak_flops() {  // of this card, a second; 0: not known, as for fp32 on any card
  const Card* card = sizeof(floatX) == 2 ? find_card(device.properties.name) : nullptr;
  return card ? card->tflops * 1e12 : 0;
}

template <class floatX>
static void print_start(const Run<Model<floatX>>& run) {
  const Options& o = run.options;
  if (!o.quiet) printf("%s\n", settings_table(o, run.screen).c_str());
  printf("%s%s", model_table(run.config).c_str(),
         memory_table(memory_lines<floatX>(run.config, o.batch, o.recompute)).c_str());
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  // Kernels are loaded when they first run, and memory comes in whole pages: some of it is not for arrays.
  constexpr size_t KEPT_BACK = size_t(512) << 20;
  const size_t usable = std::max(free + CUBLAS_WORKSPACE, KEPT_BACK) - KEPT_BACK;
  printf("GPU         %s%s, compute %d.%d, %s; %s free of %s; largest batch that fits: %zu\n",
         device.properties.name, ranks_text().c_str(), device.properties.major, device.properties.minor,
         device.code.c_str(), human_bytes(free).c_str(), human_bytes(total).c_str(),
         largest_batch<floatX>(run.config, o.recompute, usable));
  if (sizeof(floatX) == 2) {
    const double measured = EMULATED || o.dry_run ? 0 : measure_matrix_rate(8192);
    printf("%s", peak_line(device.properties.name, measured).c_str());
  } else {
    printf("peak        n/a: the figures in dev/common/flops.h are for bf16\n");
  }
  for (const auto& split : run.data.splits())
    printf("%s", data_line(split.first, *split.second, run.config.T).c_str());
  const double peak = peak_flops<floatX>();
  const std::string rate = format("the card's peak of %.0f TFLOP/s", peak / 1e12);
  printf("%s%s\n", schedule_table(o, run.data.train.num_tokens()).c_str(),
         arithmetic_table(run.config, o, peak, rate).c_str());
}

// From the settled flags to the end of the run.
template <class floatX>
static int run_training(Start&& asked) {
  Run<Model<floatX>> run(std::move(asked), story_data);
  const Options& o = run.options;
  const Config& config = run.config;
  check_config(config, o.batch);
  device_open();
  print_start(run);
  if (o.dry_run) {
    device_close();
    return 0;
  }

  model_create(run.model, config, o.batch, config.T, o.seed, o.recompute);
  if (run.has_checkpoint) model_load(run.model, run.checkpoint, run.resuming);
  Log log = take_folder(run);
  log.write(config_event(o, config));
  save_before_data_errors(run, log);

  const double flops = training_flops(config, config.T).total() * double(o.total_batch) / double(ranks.size);
  const double peak = peak_flops<floatX>();
  const double start = seconds_now();
  size_t profiled = 0;  // steps since --profile began to look
  while (!between_steps(run, log)) {
    constexpr size_t WARM_UP = 2;  // steps that --profile lets pass: algorithms are chosen, the card wakes
    profile.on = profiled < o.profile && run.step >= run.first_step + WARM_UP;
    const double lr = learning_rate(run.step, o.steps, o.warmup, o.lr, o.min_lr_ratio), before = seconds_now();
    const StepResult result = train_step(run.model, run.data.train, o, run.position, run.step + 1, lr);
    report_step(run, log, result.loss, result.norm, lr, seconds_now() - before, flops, peak);
    if (!profile.on) continue;
    profile.end_step();
    profile.on = false;  // what happens between steps is not looked at
    if (++profiled == o.profile) print_lines(profile.finish(profiled));
  }
  if (profiled > 0 && profiled < o.profile) print_lines(profile.finish(profiled));  // a short run
  if (o.profile > 0 && profiled == 0) print_lines("profile: no step after the two of the warm-up\n");
  report_end(run, log, seconds_now() - start);
  model_free(run.model);
  device_close();
  return 0;
}

int main(int argc, char** argv) {
  ranks_open(&argc, &argv);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  Start start = read_command_line(argc, argv, Device::gpu);
  return start.options.dtype == "bf16" ? run_training<bf16>(std::move(start))
                                       : run_training<float>(std::move(start));
}
#endif
