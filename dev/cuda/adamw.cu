// adamw.cu - the ladder to the optimiser's update. Included by ladders.cu.
//
// Every parameter is touched once a step and computed on for an instant, so the update costs what it moves.
// Each number has a parameter p, moments m and v and a gradient g in float32, and a copy of p in bf16 that
// products read.
namespace adamw_ladder {

// What is computed. Each number by itself:
//   g' = scale g      m = b1 m + (1 - b1) g'      v = b2 v + (1 - b2) g'^2
//   p -= rate (mhat / (sqrt(vhat) + eps) + decay p)       mhat, vhat: corrected for having started at zero
struct Hyper {
  double scale, rate, decay;
  size_t step;
};
template <class real>
void plain(std::vector<real>& p, std::vector<real>& m, std::vector<real>& v, const std::vector<real>& g,
           const Hyper& by) {
  const real b1 = real(gpu::ADAM_BETA1), b2 = real(gpu::ADAM_BETA2), eps = real(gpu::ADAM_EPS);
  const real rate = real(by.rate), decay = real(by.decay), scale = real(by.scale);
  for (size_t i = 0; i < p.size(); i++) {
    const real grad = scale * g[i];
    m[i] = b1 * m[i] + (1 - b1) * grad;
    v[i] = b2 * v[i] + (1 - b2) * grad * grad;
    const real mhat = m[i] / real(1 - std::pow(gpu::ADAM_BETA1, double(by.step)));
    const real vhat = v[i] / real(1 - std::pow(gpu::ADAM_BETA2, double(by.step)));
    p[i] -= rate * (mhat / (std::sqrt(vhat) + eps) + decay * p[i]);
  }
}

// What every rung works on: (n) each, on the device. `scaled` is a workspace.
struct Update {
  float *p, *m, *v, *g, *scaled;
  bf16* working;
  size_t n;
  Hyper hyper;
  gpu::AdamStep by;  // the same as factors in float
};
constexpr float B1 = float(gpu::ADAM_BETA1), B2 = float(gpu::ADAM_BETA2), EPSILON = float(gpu::ADAM_EPS);
constexpr unsigned THREADS = 256;
__device__ inline size_t index() { return blockIdx.x * size_t(THREADS) + threadIdx.x; }
inline unsigned blocks_for(size_t n) { return gpu::ceil_div(n, THREADS); }

// Rung 1: a kernel for every line of the formula, as a library of tensor operations would do it. Whatever one
// line hands to the next goes through memory.
__global__ void scale_kernel(float* scaled, const float* g, float scale, size_t n) {
  const size_t i = index();
  if (i < n) scaled[i] = scale * g[i];
}
__global__ void moment_kernel(float* m, const float* g, float beta, bool square, size_t n) {
  const size_t i = index();
  if (i < n) m[i] = beta * m[i] + (1 - beta) * g[i] * (square ? g[i] : 1);
}
__global__ void step_kernel(float* p, const float* m, const float* v, gpu::AdamStep by, size_t n) {
  const size_t i = index();
  if (i < n) p[i] -= by.rate * (m[i] * by.correct1) / (sqrtf(v[i] * by.correct2) + EPSILON) + by.shrink * p[i];
}
__global__ void copy_kernel(bf16* working, const float* p, size_t n) {
  const size_t i = index();
  if (i < n) working[i] = __float2bfloat16(p[i]);
}
inline void line_by_line(const Update& u) {
  const unsigned blocks = blocks_for(u.n);
  const cudaStream_t stream = gpu::device.stream;
  launch(scale_kernel, blocks, THREADS, 0, stream, u.scaled, u.g, u.by.scale, u.n);
  launch(moment_kernel, blocks, THREADS, 0, stream, u.m, u.scaled, B1, false, u.n);
  launch(moment_kernel, blocks, THREADS, 0, stream, u.v, u.scaled, B2, true, u.n);
  launch(step_kernel, blocks, THREADS, 0, stream, u.p, u.m, u.v, u.by, u.n);
  launch(copy_kernel, blocks, THREADS, 0, stream, u.working, u.p, u.n);
}

// Rung 2: one kernel for the update. Between the lines everything stays in registers: p, m, v, g come in once
// and p, m, v go out once. The copy is still made by a kernel of its own, which reads p again.
__device__ inline float update(float* p, float* m, float* v, const float* g, size_t i,
                               const gpu::AdamStep& by) {
  const float grad = by.scale * g[i], param = p[i];
  const float mean = B1 * m[i] + (1 - B1) * grad, square = B2 * v[i] + (1 - B2) * grad * grad;
  m[i] = mean, v[i] = square;
  return p[i] = param -
                (by.rate * (mean * by.correct1) / (sqrtf(square * by.correct2) + EPSILON) + by.shrink * param);
}
__global__ void fused_kernel(float* p, float* m, float* v, const float* g, gpu::AdamStep by, size_t n) {
  const size_t i = index();
  if (i < n) update(p, m, v, g, i, by);
}
inline void fused(const Update& u) {
  const unsigned blocks = blocks_for(u.n);
  const cudaStream_t stream = gpu::device.stream;
  launch(fused_kernel, blocks, THREADS, 0, stream, u.p, u.m, u.v, u.g, u.by, u.n);
  launch(copy_kernel, blocks, THREADS, 0, stream, u.working, u.p, u.n);
}

// Rung 3: the copy on the way. Whoever holds the new p rounds it.
__global__ void fused_copy_kernel(float* p, bf16* working, float* m, float* v, const float* g, gpu::AdamStep by,
                                  size_t n) {
  const size_t i = index();
  if (i < n) working[i] = __float2bfloat16(update(p, m, v, g, i, by));
}
inline void fused_copy(const Update& u) {
  launch(fused_copy_kernel, blocks_for(u.n), THREADS, 0, gpu::device.stream, u.p, u.working, u.m, u.v, u.g,
         u.by, u.n);
}

// Rung 4: the trainer's. Four numbers a thread, in loads of 16 bytes: the same bytes with a quarter of the
// memory instructions, and four times as many bytes of a warp on their way at once, which is what hides the
// latency of DRAM.
inline void trainers(const Update& u) {
  gpu::adamw(u.p, u.working, u.m, u.v, u.g, u.n, u.hyper.scale, u.hyper.rate, u.hyper.decay, u.hyper.step);
}

inline void shape(size_t n, bool timed) {
  const Hyper hyper = {0.37, 1e-2, 0.1, 3};
  const Numbers p0 = normals<float>(n), m0 = normals<float>(n, 0, 0.1), g0 = normals<float>(n, 0, 1e-2);
  Numbers v0 = normals<float>(n, 0, 0.1);
  for (double& x : v0) x = round_to<float>(x * x);
  const auto on_cpu = [&](auto zero) {
    using real = decltype(zero);
    std::vector<real> cp = as<real>(p0), cm = as<real>(m0), cv = as<real>(v0);
    plain(cp, cm, cv, as<real>(g0), hyper);
    return std::vector<Numbers>{from(cp), from(cm), from(cv)};
  };
  const std::vector<Numbers> want = on_cpu(double(0)), in_float = on_cpu(float(0));
  Array<float> p(n), m(n), v(n), g(g0), scaled(n);
  Array<bf16> working(n);
  const Update u = {p,
                    m,
                    v,
                    g,
                    scaled,
                    working,
                    n,
                    hyper,
                    {float(hyper.scale), float(hyper.rate), float(hyper.rate * hyper.decay),
                     float(1 / (1 - std::pow(gpu::ADAM_BETA1, double(hyper.step)))),
                     float(1 / (1 - std::pow(gpu::ADAM_BETA2, double(hyper.step))))}};
  ladder::climb({"adamw",
                 format("n %zu", n),
                 [&] { put(u.p, p0), put(u.m, m0), put(u.v, v0), scaled.forget(), working.forget(); },
                 [&] {
                   compare<float>("p", p.numbers(), in_float[0], want[0]);
                   compare<float>("m", m.numbers(), in_float[1], want[1]);
                   compare<float>("v", v.numbers(), in_float[2], want[2]);
                   CHECK(working.numbers() == rounded_to<bf16>(p.numbers()));
                 },
                 {{"a kernel a line", BYTES(4 * n * (2 + 3 + 3 + 4) + 6 * n), [&] { line_by_line(u); }},
                  {"one kernel, all in registers", BYTES(4 * n * 7 + 6 * n), [&] { fused(u); }},
                  {"the bf16 copy on the way", BYTES(4 * n * 7 + 2 * n), [&] { fused_copy(u); }},
                  {"the trainer's: 16-byte loads", BYTES(4 * n * 7 + 2 * n), [&] { trainers(u); }}}},
                timed);
}

inline void climb(bool timed) {
  if (timed) return shape(size_t(1) << 24, true);
  shape(10004, false);
}

}  // namespace adamw_ladder
