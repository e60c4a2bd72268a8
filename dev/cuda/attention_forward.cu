// attention_forward.cu - the ladder to causal attention. Included by ladders.cu.
//
// A query meets every key before it: the work grows with the square of the length, what comes in and goes out
// does not. So attention need not be bound by memory, if nothing of the (T,T) scores ever reaches it; after
// that, by what feeds the multipliers: caches, then shared memory, then registers.
//
// FLOPs count what causality leaves: T (T + 1) / 2 pairs of query and key a head, 4 HS for each (its score, and
// its share of the mean of the values).
namespace attention_forward_ladder {

// What is computed, per head. qkv holds (B,T) rows of Q's heads, K's heads, V's heads:
//   a_tu = exp(scale q_t . k_u) for u <= t    att_t = sum_u a_tu v_u / sum_u a_tu    lse_t = log sum_u a_tu
constexpr int HS = 64;
template <class real>
void plain(std::vector<real>& att, std::vector<real>& lse, const std::vector<real>& qkv, size_t B, size_t T,
           size_t NH) {
  const size_t C = NH * HS;
  std::vector<real> a(T);
  for (size_t b = 0; b < B; b++)
    for (size_t head = 0; head < NH; head++)
      for (size_t t = 0; t < T; t++) {
        const real* q = &qkv[(b * T + t) * 3 * C + head * HS];
        real top = -INFINITY, sum = 0, *out = &att[(b * T + t) * C + head * HS];
        for (size_t u = 0; u <= t; u++) {
          const real* k = &qkv[(b * T + u) * 3 * C + C + head * HS];
          real dot = 0;
          for (size_t i = 0; i < HS; i++) dot += q[i] * k[i];
          top = std::max(top, a[u] = dot / std::sqrt(real(HS)));
        }
        for (size_t u = 0; u <= t; u++) sum += a[u] = std::exp(a[u] - top);
        for (size_t i = 0; i < HS; i++) out[i] = 0;
        for (size_t u = 0; u <= t; u++)
          for (size_t i = 0; i < HS; i++)
            out[i] += a[u] / sum * qkv[(b * T + u) * 3 * C + 2 * C + head * HS + i];
        lse[(b * NH + head) * T + t] = top + std::log(sum);
      }
}

// What every rung works on, on the device.
struct Attention {
  bf16* att;        // (B,T,C)
  float* lse;       // (B,NH,T)
  const bf16* qkv;  // (B,T,3C)
  float* scores;    // (B,NH,T,T), workspace of the first rung
  size_t B, T, NH;
  size_t C() const { return NH * HS; }
};
const float SCALE = 1 / std::sqrt(float(HS));

// Rung 1: three kernels with the scores in a buffer: a thread for every score, for every row's softmax, for
// every number of the result. The buffer is written once and read three times.
__global__ void scores_kernel(float* scores, const bf16* qkv, size_t T, size_t C, float scale) {
  const size_t u = blockIdx.x * size_t(blockDim.x) + threadIdx.x, t = blockIdx.y, head = blockIdx.z % (C / HS),
               b = blockIdx.z / (C / HS);
  if (u > t) return;
  const bf16 *q = qkv + (b * T + t) * 3 * C + head * HS, *k = qkv + (b * T + u) * 3 * C + C + head * HS;
  float dot = 0;
  for (int i = 0; i < HS; i++) dot += gpu::to_float(q[i]) * gpu::to_float(k[i]);
  scores[(blockIdx.z * T + t) * T + u] = scale * dot;
}
__global__ void softmax_kernel(float* scores, float* lse, size_t rows, size_t T) {
  const size_t row = blockIdx.x * size_t(blockDim.x) + threadIdx.x, t = row % T;
  if (row >= rows) return;
  float *a = scores + row * T, top = -INFINITY, sum = 0;
  for (size_t u = 0; u <= t; u++) top = fmaxf(top, a[u]);
  for (size_t u = 0; u <= t; u++) sum += expf(a[u] - top);
  for (size_t u = 0; u <= t; u++) a[u] = expf(a[u] - top) / sum;
  lse[row] = top + logf(sum);
}
__global__ void mean_kernel(bf16* att, const float* a, const bf16* qkv, size_t T, size_t C) {
  const size_t i = threadIdx.x, t = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
  const float* row = a + ((b * gridDim.y + head) * T + t) * T;
  float sum = 0;
  for (size_t u = 0; u <= t; u++)
    sum += row[u] * gpu::to_float(qkv[(b * T + u) * 3 * C + 2 * C + head * HS + i]);
  att[(b * T + t) * C + head * HS + i] = __float2bfloat16(sum);
}
inline void buffered(const Attention& a) {
  const cudaStream_t stream = gpu::device.stream;
  const size_t rows = a.B * a.NH * a.T;
  launch(scores_kernel, dim3(gpu::ceil_div(a.T, 128), unsigned(a.T), unsigned(a.B * a.NH)), 128, 0, stream,
         a.scores, a.qkv, a.T, a.C(), SCALE);
  launch(softmax_kernel, gpu::ceil_div(rows, 128), 128, 0, stream, a.scores, a.lse, rows, a.T);
  launch(mean_kernel, dim3(unsigned(a.T), unsigned(a.NH), unsigned(a.B)), HS, 0, stream, a.att, a.scores, a.qkv,
         a.T, a.C());
}

// Rung 2: one kernel, no buffer. A warp takes a query; its lanes own channels and walk over the keys. The
// softmax is online: what has been summed is relative to the largest score so far, and shrinks whenever a
// larger one comes. Memory now moves what it must, but every warp asks for all keys and values anew, and a
// score costs five shuffles. The trainer keeps this kernel for float32.
inline void warp_per_query(const Attention& a) {
  launch(gpu::attention_forward_plain_kernel<bf16>, dim3(gpu::ceil_div(a.T, 4), unsigned(a.NH), unsigned(a.B)),
         128, 0, gpu::device.stream, a.att, a.lse, a.qkv, a.T, a.C(), size_t(HS), SCALE);
}

// Rung 3: tensor cores. 64 queries by 64 keys, a warp multiplies 16 by 16 by 8 numbers with one instruction,
// and what one lane loads from shared memory serves many others: ldmatrix hands the parts out as mma wants
// them. The weights stay in the registers in which the scores came up. The products, the softmax and the store
// are the trainer's parts. The warps wait for a tile, use it, wait for the next.
constexpr int LD = gpu::TILE_LD<HS>, ROWS = gpu::OWN<1>, TILE = gpu::TILE;
__global__ void __launch_bounds__(gpu::FLASH_THREADS)
    tensor_kernel(bf16* att, float* lse, const bf16* qkv, size_t T, size_t C, float scale) {
  bf16 *sq = dynamic_shared<bf16>(), *sk = sq + ROWS * LD, *sv = sk + TILE * LD;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const size_t head = blockIdx.y, b = blockIdx.z;
  const int q0 = int(blockIdx.x) * ROWS, first = q0 + warp * 16;
  const bf16* rows = qkv + b * T * 3 * C + head * HS;
  const float to_base_2 = scale * gpu::LOG2_E;
  gpu::load_tile<HS, ROWS>(sq, rows, 3 * C, q0, T);
  float acc[1][HS / 8][4] = {}, top[1][2] = {{-INFINITY, -INFINITY}}, sum[1][2] = {};
  for (int k0 = 0; k0 <= q0; k0 += TILE) {
    gpu::load_tile<HS, TILE>(sk, rows + C, 3 * C, k0, T),
        gpu::load_tile<HS, TILE>(sv, rows + 2 * C, 3 * C, k0, T);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float s[1][TILE / 8][4] = {};
    gpu::product_nt<HS>(s, sq + warp * 16 * LD, sk, lane);
    if (k0 == q0) gpu::hide_later(s, first - k0, lane);
    gpu::online_softmax(s, acc, top, sum, to_base_2);
    gpu::product_nn<HS>(acc, s, sv, lane);
    __syncthreads();  // the tiles are refilled next
  }
  gpu::finish_softmax(acc, top, sum, to_base_2, lse + (b * gridDim.y + head) * T, first, T, lane);
  gpu::store_rows<HS>(att + b * T * C + head * HS, C, first, T, acc, 1, lane);
}
inline void tensor_cores(const Attention& a) {
  launch(tensor_kernel, dim3(gpu::ceil_div(a.T, ROWS), unsigned(a.NH), unsigned(a.B)), gpu::FLASH_THREADS,
         gpu::ROW_BYTES<HS> * (ROWS + 2 * TILE), gpu::device.stream, a.att, a.lse, a.qkv, a.T, a.C(), SCALE);
}

// Rung 4: two buffers. The next tile is on its way while this one is used, one barrier a tile is enough, and
// the longest rows start first, so that no long one is left over at the end. This is the trainer's kernel, with
// one strip of 16 queries a warp.
inline void two_buffers(const Attention& a) {
  launch(gpu::attention_forward_kernel<HS, 1>, dim3(gpu::ceil_div(a.T, ROWS), unsigned(a.NH), unsigned(a.B)),
         gpu::FLASH_THREADS, gpu::ROW_BYTES<HS> * (ROWS + 4 * TILE), gpu::device.stream, a.att, a.lse, a.qkv,
         a.T, a.C(), SCALE);
}

// Rung 5: the trainer's. Two strips a warp: every part of a key or value tile that ldmatrix fetches goes into
// four mma instead of two. With one strip shared memory cannot keep up with the tensor cores: see the trainer's
// comment.
inline void trainers(const Attention& a) { gpu::attention_forward(a.att, a.lse, a.qkv, a.B, a.T, a.C(), a.NH); }

inline void shape(size_t B, size_t T, size_t NH, bool timed) {
  const size_t C = NH * HS, BTC = B * T * C, BHT = B * NH * T;
  const size_t scores = BHT * (T + 8) / 2;  // up to the diagonal, in whole sectors of 8
  const Numbers qkv0 = normals<bf16>(3 * BTC, 0.1, 1.3);
  const auto on_cpu = [&](auto zero) {
    using real = decltype(zero);
    std::vector<real> att(BTC), lse(BHT);
    plain<real>(att, lse, as<real>(qkv0), B, T, NH);
    return std::pair<Numbers, Numbers>(from(att), from(lse));
  };
  const auto want = on_cpu(double(0)), in_float = on_cpu(float(0));
  Array<bf16> qkv(qkv0), att(BTC);
  Array<float> lse(BHT), buffer(BHT * T);
  const Attention a = {att, lse, qkv, buffer, B, T, NH};
  const double flops = 4 * HS * double(BHT) * double(T + 1) / 2;
  ladder::climb(
      {"attention_forward",
       format("B %zu, T %zu, NH %zu, HS %d", B, T, NH, HS),
       [&] { att.forget(), lse.forget(), buffer.forget(); },
       [&] {
         compare<bf16>("att", att.numbers(), in_float.first, want.first);
         compare<float>("lse", lse.numbers(), in_float.second, want.second);
       },
       {{"scores in a buffer, three kernels", BYTES(8 * BTC + 16 * scores + 4 * BHT), [&] { buffered(a); },
         flops},
        {"a warp a query, online softmax", BYTES(8 * BTC + 4 * BHT), [&] { warp_per_query(a); }, flops},
        {"tensor cores", BYTES(8 * BTC + 4 * BHT), [&] { tensor_cores(a); }, flops},
        {"two buffers", BYTES(8 * BTC + 4 * BHT), [&] { two_buffers(a); }, flops},
        {"the trainer's: two strips a warp", BYTES(8 * BTC + 4 * BHT), [&] { trainers(a); }, flops}}},
      timed);
}

inline void climb(bool timed) {
  if (timed) return shape(8, 1024, 9, true);
  shape(2, 150, 1, false), shape(1, 64, 2, false);
}

}  // namespace attention_forward_ladder
