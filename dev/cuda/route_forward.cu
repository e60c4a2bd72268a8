// route_forward.cu - the ladder to the depth route: two softmax reads over the sources, and the norm that
// follows. Included by ladders.cu.
//
// Per token and source a route multiplies and adds C numbers twice: next to nothing for what it reads. So the
// route costs what it moves, and the paper's second route looks like twice the cost. Unless both read the
// sources at once.
namespace route_forward_ladder {

// What is computed, per token, for R routes w (R,C) over K sources s (K,BT,C); w is query * gain:
//   r_j = 1 / sqrt(mean(s_j^2) + eps)    z_j = r_j (w . s_j)    p = softmax(z)    h = sum_j p_j s_j
//   x = norm * h / sqrt(mean(h^2) + eps)
// The newest source's r is asked for too; the others are known from the sites before.
template <class real>
void plain(std::vector<real>& x, std::vector<real>& p, std::vector<real>& newest, const std::vector<real>& s,
           const std::vector<real>& w, const std::vector<real>& norm, size_t BT, size_t C, size_t K, size_t R) {
  const auto one_over_rms = [C](const real* v) {
    real squares = 0;
    for (size_t c = 0; c < C; c++) squares += v[c] * v[c];
    return 1 / std::sqrt(squares / real(C) + real(gpu::EPS));
  };
  std::vector<real> h(C);
  for (size_t r = 0; r < R; r++)
    for (size_t bt = 0; bt < BT; bt++) {
      real *weights = &p[(r * BT + bt) * K], top = -INFINITY, sum = 0;
      for (size_t j = 0; j < K; j++) {
        const real* sj = &s[(j * BT + bt) * C];
        real dot = 0;
        for (size_t c = 0; c < C; c++) dot += w[r * C + c] * sj[c];
        const real rj = one_over_rms(sj);
        weights[j] = rj * dot, top = std::max(top, weights[j]);
        if (j == K - 1) newest[bt] = rj;
      }
      for (size_t j = 0; j < K; j++) sum += weights[j] = std::exp(weights[j] - top);
      std::fill(h.begin(), h.end(), real(0));
      for (size_t j = 0; j < K; j++) {
        weights[j] /= sum;
        for (size_t c = 0; c < C; c++) h[c] += weights[j] * s[(j * BT + bt) * C + c];
      }
      const real scale = one_over_rms(h.data());
      for (size_t c = 0; c < C; c++) x[(r * BT + bt) * C + c] = norm[c] * (scale * h[c]);
    }
}

// What every rung works on, on the device.
constexpr size_t R = 2;
struct Read {
  bf16* x;                // (R,BT,C)
  float* p;               // (R,BT,K)
  const bf16* s;          // (K,BT,C)
  float* rstd;            // (K,BT): the last source's is not known yet
  const float *w, *norm;  // (R,C), (C)
  float* mix;             // (BT,C), workspace
  size_t BT, C, K;
};

// Rung 1: a kernel a step, route by route; a thread for every number that a step makes. All sources are read
// twice a route, for the logits and for the mix, and the mix goes through memory, in float32, because a mix is
// never rounded.
__global__ void rstd_kernel(float* rstd, const bf16* s, size_t BT, size_t C) {
  const size_t bt = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (bt >= BT) return;
  float squares = 0;
  for (size_t c = 0; c < C; c++) {
    const float v = gpu::to_float(s[bt * C + c]);
    squares += v * v;
  }
  rstd[bt] = rsqrtf(squares / float(C) + gpu::EPS);
}
__global__ void logits_kernel(float* z, const bf16* s, const float* rstd, const float* w, size_t BT, size_t C,
                              size_t K) {
  const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x, bt = i / K, j = i % K;
  if (bt >= BT) return;
  float dot = 0;
  for (size_t c = 0; c < C; c++) dot += w[c] * gpu::to_float(s[(j * BT + bt) * C + c]);
  z[bt * K + j] = rstd[j * BT + bt] * dot;
}
__global__ void softmax_kernel(float* p, size_t BT, size_t K) {
  const size_t bt = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (bt >= BT) return;
  float *z = p + bt * K, top = -INFINITY, sum = 0;
  for (size_t j = 0; j < K; j++) top = fmaxf(top, z[j]);
  for (size_t j = 0; j < K; j++) sum += z[j] = expf(z[j] - top);
  for (size_t j = 0; j < K; j++) z[j] /= sum;
}
__global__ void mix_kernel(float* mix, const bf16* s, const float* p, size_t BT, size_t C, size_t K) {
  const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (i >= BT * C) return;
  float h = 0;
  for (size_t j = 0; j < K; j++) h += p[i / C * K + j] * gpu::to_float(s[j * BT * C + i]);
  mix[i] = h;
}
__global__ void norm_kernel(bf16* x, const float* mix, const float* norm, size_t BT, size_t C) {
  const size_t bt = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (bt >= BT) return;
  float squares = 0;
  for (size_t c = 0; c < C; c++) squares += mix[bt * C + c] * mix[bt * C + c];
  const float scale = rsqrtf(squares / float(C) + gpu::EPS);
  for (size_t c = 0; c < C; c++) x[bt * C + c] = __float2bfloat16(norm[c] * (scale * mix[bt * C + c]));
}
inline void step_by_step(const Read& a) {
  const size_t BT = a.BT, C = a.C, K = a.K;
  const cudaStream_t stream = gpu::device.stream;
  launch(rstd_kernel, gpu::ceil_div(BT, 128), 128, 0, stream, a.rstd + (K - 1) * BT, a.s + (K - 1) * BT * C, BT,
         C);
  for (size_t r = 0; r < R; r++) {
    float* p = a.p + r * BT * K;
    launch(logits_kernel, gpu::ceil_div(BT * K, 128), 128, 0, stream, p, a.s, a.rstd, a.w + r * C, BT, C, K);
    launch(softmax_kernel, gpu::ceil_div(BT, 128), 128, 0, stream, p, BT, K);
    launch(mix_kernel, gpu::ceil_div(BT * C, 256), 256, 0, stream, a.mix, a.s, p, BT, C, K);
    launch(norm_kernel, gpu::ceil_div(BT, 128), 128, 0, stream, a.x + r * BT * C, a.mix, a.norm, BT, C);
  }
}

// From here on a block reads one token, and thread c owns channel c: neighbours read neighbours, the mix stays
// in one register a thread, and only what is summed over channels crosses the block. C is at most 1024.
template <int N>
__device__ inline void block_sums(float (&v)[N]) {  // of each v over all threads; everybody gets them
  __shared__ float parts[N][32];
  for (int n = 0; n < N; n++) {
    v[n] = gpu::warp_sum(v[n]);
    if (threadIdx.x % 32 == 0) parts[n][threadIdx.x / 32] = v[n];
  }
  __syncthreads();
  for (int n = 0; n < N; n++) {
    v[n] = 0;
    for (unsigned w = 0; w < blockDim.x / 32; w++) v[n] += parts[n][w];
  }
  __syncthreads();  // parts may be written again
}
// x of this token and channel, from its mix.
__device__ inline void normalise(bf16* x, float h, const float* norm, size_t C) {
  const size_t c = threadIdx.x;
  float squares[1] = {h * h};
  block_sums(squares);
  if (c < C) x[c] = __float2bfloat16(norm[c] * (rsqrtf(squares[0] / float(C) + gpu::EPS) * h));
}
inline unsigned threads_for(size_t C) {
  if (C > 1024) fatal(EXIT_USAGE, "width %zu: this ladder's rungs take at most 1024", C);
  return unsigned((C + 31) / 32 * 32);
}

// Rung 2: one kernel a route. Logits, softmax, mix and norm of a token by one block. The sources still pass
// twice, but the second time the block finds in the caches what it has just read, and the mix never sees
// memory.
__global__ void two_visits_kernel(bf16* x, float* p, const bf16* s, float* rstd, const float* w,
                                  const float* norm, size_t BT, size_t C, size_t K, bool newest_known) {
  const size_t bt = blockIdx.x, c = threadIdx.x;
  const bool live = c < C;
  float* weights = dynamic_shared<float>();  // (K)
  for (size_t j = 0; j < K; j++) {
    const float v = live ? gpu::to_float(s[(j * BT + bt) * C + c]) : 0.0f;
    float sums[2] = {live ? w[c] * v : 0.0f, v * v};
    block_sums(sums);
    if (c != 0) continue;
    float rj = rsqrtf(sums[1] / float(C) + gpu::EPS);
    if (j + 1 < K || newest_known)
      rj = rstd[j * BT + bt];
    else
      rstd[j * BT + bt] = rj;
    weights[j] = rj * sums[0];
  }
  __syncthreads();
  float top = -INFINITY, sum = 0, h = 0;
  for (size_t j = 0; j < K; j++) top = fmaxf(top, weights[j]);
  for (size_t j = 0; j < K; j++) sum += expf(weights[j] - top);
  for (size_t j = 0; j < K; j++) {
    const float pj = expf(weights[j] - top) / sum;
    if (live) h += pj * gpu::to_float(s[(j * BT + bt) * C + c]);
    if (c == 0) p[bt * K + j] = pj;
  }
  normalise(x + bt * C, h, norm, C);
}
inline void two_visits(const Read& a) {
  for (size_t r = 0; r < R; r++)
    launch(two_visits_kernel, unsigned(a.BT), threads_for(a.C), a.K * sizeof(float), gpu::device.stream,
           a.x + r * a.BT * a.C, a.p + r * a.BT * a.K, a.s, a.rstd, a.w + r * a.C, a.norm, a.BT, a.C, a.K,
           r > 0);
}

// Rung 3: the online softmax. As soon as z_j is known, s_j joins the mix with weight exp(z_j - top), top being
// the largest logit so far; when top rises, what has been gathered shrinks. A source is read once and can be
// forgotten.
// Rung 4: both routes in one read. The same kernel with R = 2: a source that is at hand serves both queries,
// and the second route costs two dot products and a result, but no reading.
template <int ROUTES>
__global__ void online_kernel(bf16* x, float* p, const bf16* s, float* rstd, const float* w, const float* norm,
                              size_t BT, size_t C, size_t K, bool newest_known) {
  const size_t bt = blockIdx.x, c = threadIdx.x;
  const bool live = c < C;
  float* logits = dynamic_shared<float>();  // (ROUTES,K)
  float h[ROUTES] = {}, top[ROUTES], sum[ROUTES] = {};
  for (int r = 0; r < ROUTES; r++) top[r] = -INFINITY;
  for (size_t j = 0; j < K; j++) {
    const float v = live ? gpu::to_float(s[(j * BT + bt) * C + c]) : 0.0f;
    float sums[ROUTES + 1] = {v * v};
    for (int r = 0; r < ROUTES; r++) sums[r + 1] = live ? w[r * C + c] * v : 0.0f;
    block_sums(sums);
    const bool known = j + 1 < K || newest_known;
    const float rj = known ? rstd[j * BT + bt] : rsqrtf(sums[0] / float(C) + gpu::EPS);
    if (!known && c == 0) rstd[j * BT + bt] = rj;
    for (int r = 0; r < ROUTES; r++) {
      const float z = rj * sums[r + 1], new_top = fmaxf(top[r], z);
      const float shrink = expf(top[r] - new_top), e = expf(z - new_top);
      top[r] = new_top, sum[r] = sum[r] * shrink + e, h[r] = h[r] * shrink + e * v;
      if (c == 0) logits[r * K + j] = z;
    }
  }
  __syncthreads();
  for (int r = 0; r < ROUTES; r++) {
    for (size_t j = c; j < K; j += blockDim.x)
      p[(r * BT + bt) * K + j] = expf(logits[r * K + j] - top[r]) / sum[r];
    normalise(x + (r * BT + bt) * C, h[r] / sum[r], norm, C);
  }
}
inline void online(const Read& a) {
  for (size_t r = 0; r < R; r++)
    launch(online_kernel<1>, unsigned(a.BT), threads_for(a.C), a.K * sizeof(float), gpu::device.stream,
           a.x + r * a.BT * a.C, a.p + r * a.BT * a.K, a.s, a.rstd, a.w + r * a.C, a.norm, a.BT, a.C, a.K,
           r > 0);
}
inline void both_routes(const Read& a) {
  launch(online_kernel<2>, unsigned(a.BT), threads_for(a.C), 2 * a.K * sizeof(float), gpu::device.stream, a.x,
         a.p, a.s, a.rstd, a.w, a.norm, a.BT, a.C, a.K, false);
}

// Rung 5: a warp a token, a lane four channels of every 128, and sums over channels are shuffles. No barrier
// holds up anybody, and while one source is worked on the next one is on its way to registers. These and both
// mixes leave no room for w. So it is asked for again with every source, four times a source's bytes: the first
// cache has it, but must hand it out.
template <int NV>
__global__ void warp_a_token_kernel(bf16* x, float* p, const bf16* s, float* rstd, const float* w,
                                    const float* norm, size_t BT, size_t C, size_t K) {
  const unsigned lane = threadIdx.x % 32;
  const size_t bt = blockIdx.x * size_t(blockDim.x / 32) + threadIdx.x / 32;
  if (bt >= BT) return;
  gpu::Row<NV> h[R] = {}, v, next, other;  // other: a row of w, then the norm
  float top[R], sum[R] = {};
  for (size_t r = 0; r < R; r++) top[r] = -INFINITY;
  gpu::load_row(next, s + bt * C, C);
  for (size_t j = 0; j < K; j++) {
    for (int i = 0; i < NV * 4; i++) v[i / 4][i % 4] = next[i / 4][i % 4];
    if (j + 1 < K) gpu::load_row(next, s + ((j + 1) * BT + bt) * C, C);
    const float rj =
        j + 1 < K ? rstd[j * BT + bt] : rsqrtf(gpu::warp_sum(gpu::row_dot<NV>(v, v)) / float(C) + gpu::EPS);
    if (j + 1 == K && lane == 0) rstd[j * BT + bt] = rj;
    for (size_t r = 0; r < R; r++) {
      gpu::load_row(other, w + r * C, C);
      const float z = rj * gpu::warp_sum(gpu::row_dot<NV>(other, v)), new_top = fmaxf(top[r], z);
      const float shrink = expf(top[r] - new_top), e = expf(z - new_top);
      top[r] = new_top, sum[r] = sum[r] * shrink + e;
      gpu::scale_row<NV>(h[r], shrink), gpu::add_row<NV>(h[r], e, v);
      if (lane == j % 32) p[(r * BT + bt) * K + j] = z;
    }
  }
  gpu::load_row(other, norm, C);
  for (size_t r = 0; r < R; r++) {
    for (size_t j = lane; j < K; j += 32)
      p[(r * BT + bt) * K + j] = expf(p[(r * BT + bt) * K + j] - top[r]) / sum[r];
    gpu::scale_row<NV>(h[r], 1 / sum[r]);
    const float scale = rsqrtf(gpu::warp_sum(gpu::row_dot<NV>(h[r], h[r])) / float(C) + gpu::EPS);
    gpu::for_each_four<NV>(C, [&](int i, unsigned c) {
      for (int k = 0; k < 4; k++) h[r][i][k] *= scale * other[i][k];
      gpu::store4(x + (r * BT + bt) * C + c, h[r][i]);
    });
  }
}
inline void warp_a_token(const Read& a) {
  gpu::with_vectors(a.C, [&](auto NV) {
    launch(warp_a_token_kernel<decltype(NV)::value>, gpu::ceil_div(a.BT, 4), 128, 0, gpu::device.stream, a.x,
           a.p, a.s, a.rstd, a.w, a.norm, a.BT, a.C, a.K);
  });
}

// Rung 6: the trainer's. A warp walks from token to token, so w is read once a walk and stays in registers. The
// room for it comes from a ring in shared memory: what is on its way, now three sources, takes no registers.
inline void trainers(const Read& a) {
  const gpu::Sources<bf16> sources = {a.s, a.rstd, 1, a.K - 1};  // blocks of one sublayer: every slot is read
  gpu::route_forward<bf16>(a.x, a.p, sources, a.w, a.norm, false, a.BT, a.C, a.K, R);
}

inline void shape(size_t BT, size_t C, size_t K, bool timed) {
  const Numbers s0 = normals<bf16>(K * BT * C, 0.1, 1),
                w0 = normals<float>(R * C, 0, 1.5 / std::sqrt(double(C))), norm0 = normals<float>(C, 1, 0.3);
  Numbers rstd0(K * BT, NAN);
  for (size_t i = 0; i < (K - 1) * BT; i++) {
    double squares = 0;
    for (size_t c = 0; c < C; c++) squares += s0[i * C + c] * s0[i * C + c];
    rstd0[i] = round_to<float>(1 / std::sqrt(squares / double(C) + gpu::EPS));
  }
  struct Result {
    Numbers x, p, newest;
  };
  const auto on_cpu = [&](auto zero) {
    using real = decltype(zero);
    std::vector<real> x(R * BT * C), p(R * BT * K), newest(BT);
    plain<real>(x, p, newest, as<real>(s0), as<real>(w0), as<real>(norm0), BT, C, K, R);
    return Result{from(x), from(p), from(newest)};
  };
  const Result want = on_cpu(double(0)), in_float = on_cpu(float(0));
  Array<bf16> x(R * BT * C), s(s0);
  Array<float> p(R * BT * K), rstd(K * BT), w(w0), norm(norm0), mix(BT * C);
  const Read a = {x, p, s, rstd, w, norm, mix, BT, C, K};
  // Bytes: BTC numbers are one source, or one x, or the mix; weights, logits and rstd are BTK floats; a launch
  // reads the queries and the norm once.
  const size_t BTC = BT * C, BTK = BT * K;
  ladder::climb(
      {"route_forward",
       format("BT %zu, C %zu, K %zu, 2 routes", BT, C, K),
       [&] { x.forget(), p.forget(), mix.forget(), put(rstd.at, rstd0); },
       [&] {
         compare<bf16>("x", x.numbers(), in_float.x, want.x);
         compare<float>("p", p.numbers(), in_float.p, want.p);
         compare<float>("rstd of the newest", take(rstd + (K - 1) * BT, BT), in_float.newest, want.newest);
       },
       {{"a kernel a step, the mix in memory",
         BYTES(BTC * (2 + R * (2 * K + 2 * K + 4 + 4 + 2)) + 4 * BT + R * (4 * BTK * (2 + 2 + 1) + 8 * C)),
         [&] { step_by_step(a); }},
        {"a block a token, the mix in a register", BYTES(R * (BTC * (2 * K + 2) + 4 * BTK * 2 + 8 * C)),
         [&] { two_visits(a); }},
        {"online softmax, a source read once", BYTES(R * (BTC * (2 * K + 2) + 4 * BTK * 2 + 8 * C)),
         [&] { online(a); }},
        {"both routes in one read", BYTES(BTC * (2 * K + R * 2) + 4 * BTK * (1 + R) + 4 * C * (R + 1)),
         [&] { both_routes(a); }},
        {"a warp a token, no barriers", BYTES(BTC * (2 * K + R * 2) + 4 * BTK * (1 + R) + 4 * C * (R + 1)),
         [&] { warp_a_token(a); }},
        {"the trainer's: w in registers, sources through a ring",
         BYTES(BTC * (2 * K + R * 2) + 4 * BTK * (1 + R) + 4 * C * (R + 1)), [&] { trainers(a); }}}},
      timed);
}

inline void climb(bool timed) {
  if (timed) return shape(16384, 576, 9, true);
  shape(37, 48, 1, false), shape(19, 48, 5, false), shape(7, 576, 9, false);
}

}  // namespace route_forward_ladder
