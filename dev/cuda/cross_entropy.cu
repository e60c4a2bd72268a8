// cross_entropy.cu - the ladder to the softmax cross-entropy behind the head. Included by ladders.cu.
//
// A row of logits is long, 50257 numbers for GPT-2's vocabulary, and is asked for one number, its loss; in
// training the gradient of the logits then takes their place. What it costs is how often the row passes by.
namespace cross_entropy_ladder {

// What is computed, for every row z of V logits, of which Vp - V more are padding:
//   loss = log(sum_v exp(z_v)) - z_target       dz_v = (exp(z_v) / sum - [v is the target]) dloss, padding 0
// The maximum of the row is subtracted first, which changes nothing and keeps exp from overflowing.
template <class real>
void plain(std::vector<real>& losses, std::vector<real>& z, const std::vector<int>& targets, real dloss,
           size_t rows, size_t V, size_t Vp) {
  for (size_t row = 0; row < rows; row++) {
    real *zr = &z[row * Vp], top = *std::max_element(zr, zr + V), sum = 0;
    for (size_t v = 0; v < V; v++) sum += std::exp(zr[v] - top);
    losses[row] = std::log(sum) - (zr[targets[row]] - top);
    for (size_t v = 0; v < Vp; v++)
      zr[v] = v < V ? (std::exp(zr[v] - top) / sum - (int(v) == targets[row] ? 1 : 0)) * dloss : 0;
  }
}

// What every rung works on, on the device. `tops` and `sums` are workspaces.
struct Rows {
  bf16* logits;                 // (rows,Vp), become their gradients
  float *losses, *tops, *sums;  // (rows)
  int* targets;                 // (rows)
  float dloss;
  size_t rows, V, Vp;
};
// z becomes its gradient.
__device__ inline void differentiate(bf16& z, float top, float sum, bool is_target, bool is_padding,
                                     float dloss) {
  const float p = __expf(gpu::to_float(z) - top) / sum;
  z = __float2bfloat16(is_padding ? 0.0f : (p - (is_target ? 1.0f : 0.0f)) * dloss);
}

// Rung 1: a kernel a step, a thread a row: the loops above, each row on a thread of its own. The lanes of a
// warp read 32 different rows, so every load of 2 bytes fetches a sector of 32, and what they hold in common is
// nothing.
__global__ void thread_tops_kernel(float* tops, const bf16* logits, size_t rows, size_t V, size_t Vp) {
  const size_t row = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (row >= rows) return;
  float top = -INFINITY;
  for (size_t v = 0; v < V; v++) top = fmaxf(top, gpu::to_float(logits[row * Vp + v]));
  tops[row] = top;
}
__global__ void thread_sums_kernel(float* sums, float* losses, const float* tops, const bf16* logits,
                                   const int* targets, size_t rows, size_t V, size_t Vp) {
  const size_t row = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (row >= rows) return;
  float sum = 0;
  for (size_t v = 0; v < V; v++) sum += __expf(gpu::to_float(logits[row * Vp + v]) - tops[row]);
  sums[row] = sum;
  losses[row] = logf(sum) - (gpu::to_float(logits[row * Vp + size_t(targets[row])]) - tops[row]);
}
__global__ void thread_gradients_kernel(bf16* logits, const float* tops, const float* sums, const int* targets,
                                        float dloss, size_t rows, size_t V, size_t Vp) {
  const size_t row = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (row >= rows) return;
  for (size_t v = 0; v < Vp; v++)
    differentiate(logits[row * Vp + v], tops[row], sums[row], int(v) == targets[row], v >= V, dloss);
}
inline void thread_per_row(const Rows& a) {
  const unsigned blocks = gpu::ceil_div(a.rows, 32);
  const cudaStream_t stream = gpu::device.stream;
  launch(thread_tops_kernel, blocks, 32, 0, stream, a.tops, a.logits, a.rows, a.V, a.Vp);
  launch(thread_sums_kernel, blocks, 32, 0, stream, a.sums, a.losses, a.tops, a.logits, a.targets, a.rows, a.V,
         a.Vp);
  launch(thread_gradients_kernel, blocks, 32, 0, stream, a.logits, a.tops, a.sums, a.targets, a.dloss, a.rows,
         a.V, a.Vp);
}

// Rung 2: a block a row. Neighbouring threads read neighbouring numbers, so a warp's load is two whole sectors;
// the threads' maxima and sums meet in shared memory. Still a kernel a step: the row comes from DRAM three
// times.
constexpr unsigned THREADS = 512;
template <class Combine>
__device__ inline float over_block(float v, Combine combine) {  // of all threads' v; everybody gets it
  __shared__ float parts[THREADS / 32];
  for (int o = 16; o > 0; o /= 2) v = combine(v, __shfl_xor_sync(gpu::ALL_LANES, v, o));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = parts[0];
  for (unsigned w = 1; w < THREADS / 32; w++) v = combine(v, parts[w]);
  __syncthreads();  // parts may be written again
  return v;
}
__device__ inline float block_max(float v) {
  return over_block(v, [](float a, float b) { return fmaxf(a, b); });
}
__device__ inline float block_sum(float v) {
  return over_block(v, [](float a, float b) { return a + b; });
}
__device__ inline float row_top(const bf16* z, size_t V) {
  float top = -INFINITY;
  for (size_t v = threadIdx.x; v < V; v += THREADS) top = fmaxf(top, gpu::to_float(z[v]));
  return block_max(top);
}
__device__ inline float row_sum(const bf16* z, float top, size_t V) {
  float sum = 0;
  for (size_t v = threadIdx.x; v < V; v += THREADS) sum += __expf(gpu::to_float(z[v]) - top);
  return block_sum(sum);
}
__device__ inline void row_gradients(bf16* z, float top, float sum, size_t target, float dloss, size_t V,
                                     size_t Vp) {
  for (size_t v = threadIdx.x; v < Vp; v += THREADS) differentiate(z[v], top, sum, v == target, v >= V, dloss);
}
__global__ void block_tops_kernel(float* tops, const bf16* logits, size_t V, size_t Vp) {
  const float top = row_top(logits + blockIdx.x * Vp, V);
  if (threadIdx.x == 0) tops[blockIdx.x] = top;
}
__global__ void block_sums_kernel(float* sums, float* losses, const float* tops, const bf16* logits,
                                  const int* targets, size_t V, size_t Vp) {
  const bf16* z = logits + blockIdx.x * Vp;
  const float top = tops[blockIdx.x], sum = row_sum(z, top, V);
  if (threadIdx.x != 0) return;
  sums[blockIdx.x] = sum;
  losses[blockIdx.x] = logf(sum) - (gpu::to_float(z[size_t(targets[blockIdx.x])]) - top);
}
__global__ void block_gradients_kernel(bf16* logits, const float* tops, const float* sums, const int* targets,
                                       float dloss, size_t V, size_t Vp) {
  row_gradients(logits + blockIdx.x * Vp, tops[blockIdx.x], sums[blockIdx.x], size_t(targets[blockIdx.x]),
                dloss, V, Vp);
}
inline void block_per_row(const Rows& a) {
  const unsigned blocks = unsigned(a.rows);
  const cudaStream_t stream = gpu::device.stream;
  launch(block_tops_kernel, blocks, THREADS, 0, stream, a.tops, a.logits, a.V, a.Vp);
  launch(block_sums_kernel, blocks, THREADS, 0, stream, a.sums, a.losses, a.tops, a.logits, a.targets, a.V,
         a.Vp);
  launch(block_gradients_kernel, blocks, THREADS, 0, stream, a.logits, a.tops, a.sums, a.targets, a.dloss, a.V,
         a.Vp);
}

// Rung 3: one kernel. The same three visits, but a block comes back to its row of 100 KB at once and finds it
// in the L2 cache, as long as the rows of all blocks under way fit there. DRAM delivers a row once.
__global__ void three_visits_kernel(float* losses, bf16* logits, const int* targets, float dloss, size_t V,
                                    size_t Vp) {
  bf16* z = logits + blockIdx.x * Vp;
  const size_t target = size_t(targets[blockIdx.x]);
  const float target_logit = gpu::to_float(z[target]);  // before a barrier: later it is overwritten
  const float top = row_top(z, V), sum = row_sum(z, top, V);
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - (target_logit - top);
  row_gradients(z, top, sum, target, dloss, V, Vp);
}
inline void three_visits(const Rows& a) {
  launch(three_visits_kernel, unsigned(a.rows), THREADS, 0, gpu::device.stream, a.losses, a.logits, a.targets,
         a.dloss, a.V, a.Vp);
}

// Rung 4: the online softmax. A thread keeps the maximum so far and the sum of exp(z - maximum so far); when
// the maximum rises, the sum shrinks by exp(old - new). One visit instead of two finds both.
__global__ void online_kernel(float* losses, bf16* logits, const int* targets, float dloss, size_t V,
                              size_t Vp) {
  bf16* z = logits + blockIdx.x * Vp;
  const size_t target = size_t(targets[blockIdx.x]);
  const float target_logit = gpu::to_float(z[target]);
  float top = -INFINITY, sum = 0;
  for (size_t v = threadIdx.x; v < V; v += THREADS) {
    const float zv = gpu::to_float(z[v]);
    if (zv > top) sum *= __expf(top - zv), top = zv;
    sum += __expf(zv - top);
  }
  const float all = block_max(top);
  sum = block_sum(top > -INFINITY ? sum * __expf(top - all) : 0.0f);  // a thread beyond V has seen nothing
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - (target_logit - all);
  row_gradients(z, all, sum, target, dloss, V, Vp);
}
inline void online(const Rows& a) {
  launch(online_kernel, unsigned(a.rows), THREADS, 0, gpu::device.stream, a.losses, a.logits, a.targets,
         a.dloss, a.V, a.Vp);
}

// Rung 5: the trainer's, as gpu::classifier launches it. Eight logits a thread, in loads of 16 bytes: an eighth
// of the memory instructions, and the division by the sum is made once.
inline void trainers(const Rows& a) {
  launch(gpu::cross_entropy_kernel<bf16>, unsigned(a.rows), gpu::CROSS_ENTROPY_THREADS, 0, gpu::device.stream,
         a.losses, a.logits, a.targets, a.dloss, true, int(a.V), int(a.Vp));
}

inline void shape(size_t rows, size_t V, bool timed) {
  const size_t Vp = (V + 127) / 128 * 128;
  const float dloss = 1 / float(rows);
  Numbers z0 = normals<bf16>(rows * Vp, 0, 3), targets0(rows);
  std::vector<int> targets1(rows);
  for (size_t row = 0; row < rows; row++) {
    targets1[row] = int(row * 7919 % V), targets0[row] = targets1[row];
    for (size_t v = V; v < Vp; v++) z0[row * Vp + v] = 50;  // padding that counted would outweigh everything
  }
  // The gradient of a target is far larger than all others: each kind is held to its own size.
  struct Result {
    Numbers losses, at_targets, elsewhere, padding;
  };
  const auto parts = [&](const Numbers& losses, const Numbers& dz) {
    Result r = {losses, {}, {}, {}};
    for (size_t i = 0; i < dz.size(); i++)
      (i % Vp >= V                          ? r.padding
       : i % Vp == size_t(targets1[i / Vp]) ? r.at_targets
                                            : r.elsewhere)
          .push_back(dz[i]);
    return r;
  };
  const auto on_cpu = [&](auto zero) {
    using real = decltype(zero);
    std::vector<real> losses(rows), z = as<real>(z0);
    plain<real>(losses, z, targets1, dloss, rows, V, Vp);
    return parts(from(losses), from(z));
  };
  const Result want = on_cpu(double(0)), in_float = on_cpu(float(0));
  Array<bf16> logits(rows * Vp);
  Array<float> losses(rows), tops(rows), sums(rows);
  Ints targets(targets0);
  const Rows a = {logits, losses, tops, sums, targets, dloss, rows, V, Vp};
  // Bytes: the last visit reads the padding too, before it becomes zero; that is simpler than not to.
  ladder::climb(
      {"cross_entropy",
       format("rows %zu, V %zu", rows, V),
       [&] { put(a.logits, z0), losses.forget(), tops.forget(), sums.forget(); },
       [&] {
         const Result got = parts(losses.numbers(), logits.numbers());
         compare<float>("losses", got.losses, in_float.losses, want.losses);
         compare<bf16>("gradients of the targets", got.at_targets, in_float.at_targets, want.at_targets);
         compare<bf16>("of all others", got.elsewhere, in_float.elsewhere, want.elsewhere);
         CHECK(got.padding == want.padding);
       },
       {{"a kernel a step, a thread a row", BYTES(4 * rows * (V + Vp) + 32 * rows), [&] { thread_per_row(a); }},
        {"a block a row", BYTES(4 * rows * (V + Vp) + 32 * rows), [&] { block_per_row(a); }},
        {"one kernel, three visits", BYTES(4 * rows * Vp + 8 * rows), [&] { three_visits(a); }},
        {"online softmax, two visits", BYTES(4 * rows * Vp + 8 * rows), [&] { online(a); }},
        {"the trainer's: 16-byte loads", BYTES(4 * rows * Vp + 8 * rows), [&] { trainers(a); }}}},
      timed);
}

inline void climb(bool timed) {
  if (timed) return shape(2048, 50257, true);
  shape(37, 131, false), shape(3, 5003, false);
}

}  // namespace cross_entropy_ladder
