// attention_backward.cu - the ladder to the gradient of causal attention. Included by ladders.cu.
//
// Five products where the forward has two: the weights are made again, their gradients, and then the gradients
// of queries, keys and values. A query adds to the gradients of many keys, a key to those of many queries: sums
// from two sides, and without atomics, whose order changes from run to run, somebody must own each.
//
// FLOPs count what causality leaves and the five products need: T (T + 1) / 2 pairs of query and key a head, 10
// HS each. From rung 2 on the weights and their gradients are made twice, once for each owner: 14 HS that are
// computed, of which 10 count.
namespace attention_backward_ladder {

// What is computed, per head, from the forward's att and lse:
//   a_tu = exp(scale q_t . k_u - lse_t)    da_tu = datt_t . v_u    delta_t = datt_t . att_t
//   ds_tu = scale a_tu (da_tu - delta_t)
//   dq_t = sum_u ds_tu k_u                 dk_u = sum_t ds_tu q_t  dv_u = sum_t a_tu datt_t      for u <= t
constexpr int HS = 64;
template <class real>
void plain(std::vector<real>& dqkv, const std::vector<real>& datt, const std::vector<real>& qkv,
           const std::vector<real>& att, const std::vector<real>& lse, size_t B, size_t T, size_t NH) {
  const size_t C = NH * HS;
  const real scale = 1 / std::sqrt(real(HS));
  std::fill(dqkv.begin(), dqkv.end(), real(0));
  for (size_t b = 0; b < B; b++)
    for (size_t head = 0; head < NH; head++)
      for (size_t t = 0; t < T; t++) {
        const size_t at_t = (b * T + t) * 3 * C + head * HS;
        const real *q = &qkv[at_t], *d = &datt[(b * T + t) * C + head * HS],
                   *o = &att[(b * T + t) * C + head * HS];
        real delta = 0;
        for (size_t i = 0; i < HS; i++) delta += d[i] * o[i];
        for (size_t u = 0; u <= t; u++) {
          const size_t at_u = (b * T + u) * 3 * C + head * HS;
          const real *k = &qkv[at_u + C], *v = &qkv[at_u + 2 * C];
          real score = 0, da = 0;
          for (size_t i = 0; i < HS; i++) score += q[i] * k[i], da += d[i] * v[i];
          const real a = std::exp(scale * score - lse[(b * NH + head) * T + t]), ds = scale * a * (da - delta);
          for (size_t i = 0; i < HS; i++) {
            dqkv[at_t + i] += ds * k[i];
            dqkv[at_u + C + i] += ds * q[i];
            dqkv[at_u + 2 * C + i] += a * d[i];
          }
        }
      }
}

// What every rung works on, on the device.
struct Gradients {
  bf16* dqkv;                    // (B,T,3C)
  float* delta;                  // (B,NH,T), workspace from the second rung on
  const bf16 *datt, *qkv, *att;  // (B,T,C), (B,T,3C), (B,T,C)
  const float* lse;              // (B,NH,T)
  float *a, *ds;                 // (B,NH,T,T), workspace of the first rung
  size_t B, T, NH;
  size_t C() const { return NH * HS; }
};
const float SCALE = 1 / std::sqrt(float(HS));

// Rung 1: all weights and their gradients in buffers, (T,T) each; a kernel a formula, a thread for every
// number.
__device__ inline float dot(const bf16* a, const bf16* b) {
  float sum = 0;
  for (int i = 0; i < HS; i++) sum += gpu::to_float(a[i]) * gpu::to_float(b[i]);
  return sum;
}
__global__ void weights_kernel(float* a, const bf16* qkv, const float* lse, size_t T, size_t C, float scale) {
  const size_t u = blockIdx.x * size_t(blockDim.x) + threadIdx.x, t = blockIdx.y, head = blockIdx.z % (C / HS),
               b = blockIdx.z / (C / HS);
  if (u > t) return;
  const bf16* rows = qkv + b * T * 3 * C + head * HS;
  a[(blockIdx.z * T + t) * T + u] =
      expf(scale * dot(rows + t * 3 * C, rows + u * 3 * C + C) - lse[blockIdx.z * T + t]);
}
__global__ void dweights_kernel(float* da, const bf16* datt, const bf16* qkv, size_t T, size_t C) {
  const size_t u = blockIdx.x * size_t(blockDim.x) + threadIdx.x, t = blockIdx.y, head = blockIdx.z % (C / HS),
               b = blockIdx.z / (C / HS);
  if (u > t) return;
  da[(blockIdx.z * T + t) * T + u] =
      dot(datt + (b * T + t) * C + head * HS, qkv + (b * T + u) * 3 * C + 2 * C + head * HS);
}
__global__ void dscores_kernel(float* ds, const float* a, size_t rows, size_t T, float scale) {
  const size_t row = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (row >= rows) return;
  float delta = 0;
  for (size_t u = 0; u <= row % T; u++) delta += a[row * T + u] * ds[row * T + u];
  for (size_t u = 0; u <= row % T; u++) ds[row * T + u] = scale * a[row * T + u] * (ds[row * T + u] - delta);
}
// One channel of one query's gradient; one channel of one key's or value's, from rows `in` with ld numbers
// each.
__global__ void dq_kernel(bf16* dqkv, const float* ds, const bf16* qkv, size_t T, size_t C) {
  const size_t i = threadIdx.x, t = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
  const float* row = ds + ((b * gridDim.y + head) * T + t) * T;
  float sum = 0;
  for (size_t u = 0; u <= t; u++) sum += row[u] * gpu::to_float(qkv[(b * T + u) * 3 * C + C + head * HS + i]);
  dqkv[(b * T + t) * 3 * C + head * HS + i] = __float2bfloat16(sum);
}
__global__ void dkv_kernel(bf16* out, const float* weights, const bf16* in, size_t ld, size_t T, size_t C) {
  const size_t i = threadIdx.x, u = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
  const float* column = weights + (b * gridDim.y + head) * T * T + u;
  float sum = 0;
  for (size_t t = u; t < T; t++) sum += column[t * T] * gpu::to_float(in[(b * T + t) * ld + head * HS + i]);
  out[(b * T + u) * 3 * C + head * HS + i] = __float2bfloat16(sum);
}
inline void buffered(const Gradients& g) {
  const cudaStream_t stream = gpu::device.stream;
  const size_t T = g.T, C = g.C(), rows = g.B * g.NH * T;
  const dim3 pairs(gpu::ceil_div(T, 128), unsigned(T), unsigned(g.B * g.NH)),
      heads(unsigned(T), unsigned(g.NH), unsigned(g.B));
  launch(weights_kernel, pairs, 128, 0, stream, g.a, g.qkv, g.lse, T, C, SCALE);
  launch(dweights_kernel, pairs, 128, 0, stream, g.ds, g.datt, g.qkv, T, C);
  launch(dscores_kernel, gpu::ceil_div(rows, 128), 128, 0, stream, g.ds, g.a, rows, T, SCALE);
  launch(dq_kernel, heads, HS, 0, stream, g.dqkv, g.ds, g.qkv, T, C);
  launch(dkv_kernel, heads, HS, 0, stream, g.dqkv + C, g.ds, g.qkv, 3 * C, T, C);
  launch(dkv_kernel, heads, HS, 0, stream, g.dqkv + 2 * C, g.a, g.datt, C, T, C);
}

// Rung 2: no buffers. lse is all that is needed to make a weight again, and delta has a closed form, datt .
// att, that needs no row of weights. A warp owns a token and what belongs to it: it walks over the keys before
// it and makes dq, then over the queries after it and makes dk and dv. So a and ds of every pair are made
// twice: two products more, in place of sums from two sides. The lanes own channels. The trainer keeps this
// kernel for float32.
inline void warp_per_token(const Gradients& g) {
  launch(gpu::attention_backward_plain_kernel<bf16>, dim3(gpu::ceil_div(g.T, 4), unsigned(g.NH), unsigned(g.B)),
         128, 0, gpu::device.stream, g.dqkv, g.datt, g.qkv, g.att, g.lse, g.T, g.C(), size_t(HS), SCALE);
}

// Rung 3: tensor cores and two buffers, as in rungs 3 and 4 of the forward. Weights and their gradients stay in
// the registers in which they came up; for dk and dv the rows are keys, so that these can be left operands
// there too. This is the trainer's pair of kernels, with one strip of 16 rows a warp.
inline void tensor_cores(const Gradients& g) {
  const dim3 grid(gpu::ceil_div(g.T, gpu::OWN<1>), unsigned(g.NH), unsigned(g.B));
  const size_t tiles = gpu::ROW_BYTES<HS> * (2 * gpu::OWN<1> + 4 * gpu::TILE);
  const cudaStream_t stream = gpu::device.stream;
  launch(gpu::attention_backward_q_kernel<HS, 1>, grid, gpu::FLASH_THREADS, tiles, stream, g.dqkv, g.delta,
         g.datt, g.qkv, g.att, g.lse, g.T, g.C(), SCALE);
  launch(gpu::attention_backward_kv_kernel<HS, 1>, grid, gpu::FLASH_THREADS,
         tiles + 2 * gpu::TILE * sizeof(float2), stream, g.dqkv, g.datt, g.qkv, g.lse, g.delta, g.T, g.C(),
         SCALE);
}

// Rung 4: the trainer's. Two strips a warp halve what the products read of the passing tiles in shared memory.
inline void trainers(const Gradients& g) {
  gpu::attention_backward(g.dqkv, g.delta, g.datt, g.qkv, g.att, g.lse, g.B, g.T, g.C(), g.NH);
}

inline void shape(size_t B, size_t T, size_t NH, bool timed) {
  const size_t C = NH * HS, BTC = B * T * C, BHT = B * NH * T;
  const size_t scores = BHT * (T + 8) / 2;  // up to the diagonal, in whole sectors of 8
  const Numbers qkv0 = normals<bf16>(3 * BTC, 0.1, 1.3), datt0 = normals<bf16>(BTC);
  // att and lse as a forward leaves them: in double, then stored.
  std::vector<double> att1(BTC), lse1(BHT);
  attention_forward_ladder::plain<double>(att1, lse1, qkv0, B, T, NH);
  const Numbers att0 = rounded_to<bf16>(att1), lse0 = rounded_to<float>(lse1);
  const auto part = [&](const Numbers& dqkv, size_t which) {
    Numbers out;
    for (size_t i = 0; i < dqkv.size(); i++)
      if (i / C % 3 == which) out.push_back(dqkv[i]);
    return out;
  };
  const auto on_cpu = [&](auto zero) {
    using real = decltype(zero);
    std::vector<real> dqkv(3 * BTC);
    plain<real>(dqkv, as<real>(datt0), as<real>(qkv0), as<real>(att0), as<real>(lse0), B, T, NH);
    return from(dqkv);
  };
  const Numbers want = on_cpu(double(0)), in_float = on_cpu(float(0));
  Array<bf16> qkv(qkv0), datt(datt0), att(att0), dqkv(3 * BTC);
  Array<float> lse(lse0), delta(BHT), a(BHT * T), ds(BHT * T);
  const Gradients g = {dqkv, delta, datt, qkv, att, lse, a, ds, B, T, NH};
  const double flops = 10 * HS * double(BHT) * double(T + 1) / 2;
  const ladder::Bytes owners = BYTES((2 * 5 + 2 + 2 * 4 + 4) * BTC + (4 + 4 + 8) * BHT);
  ladder::climb({"attention_backward",
                 format("B %zu, T %zu, NH %zu, HS %d", B, T, NH, HS),
                 [&] { dqkv.forget(), delta.forget(), a.forget(), ds.forget(); },
                 [&] {
                   const char* names[] = {"dq", "dk", "dv"};
                   for (size_t i = 0; i < 3; i++)
                     compare<bf16>(names[i], part(dqkv.numbers(), i), part(in_float, i), part(want, i));
                 },
                 {{"weights in buffers, six kernels", BYTES(20 * BTC + 32 * scores + 4 * BHT),
                   [&] { buffered(g); }, flops},
                  {"a warp a token, weights made again", BYTES((2 * 5 + 2 * 3) * BTC + 4 * BHT),
                   [&] { warp_per_token(g); }, flops},
                  {"tensor cores, two buffers", owners, [&] { tensor_cores(g); }, flops},
                  {"the trainer's: two strips a warp", owners, [&] { trainers(g); }, flops}}},
                timed);
}

inline void climb(bool timed) {
  if (timed) return shape(8, 1024, 9, true);
  shape(2, 150, 1, false), shape(1, 64, 2, false);
}

}  // namespace attention_backward_ladder
