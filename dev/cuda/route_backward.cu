// route_backward.cu - the ladder to the backward of the depth routes, for one block of S sublayers. Included by
// ladders.cu; route_forward.cu comes first.
//
// A route's gradient reaches every source that it read. Done when a site's turn comes, that is one read of the
// source, one read and one write of its gradient, for every route that ever read it: by far the dearest part of
// the depth memory. But only the running partial's gradient is wanted at once, by the sublayer before. What is
// owed to the finished sources can wait until the whole block is done, and is then paid in one visit for all
// its routes.
namespace route_backward_ladder {

using route_forward_ladder::block_sums;  // sums over the channels of a token, a thread a channel
using route_forward_ladder::threads_for;

// The sites of the block, in the order of a backward: sublayers first + S - 1 .. first, F finished sources each
// and, but for the first, the running partial; an attention site (even) has two routes, the other kind one.
struct Site {
  size_t i, R, route, K;
};  // route: number of its first route, counting from 0 in this order
inline std::vector<Site> sites_of_block(size_t F, size_t S) {
  std::vector<Site> sites;
  size_t route = 0;
  for (size_t n = S; n-- > 0;) {
    const size_t R = n % 2 == 0 ? 2 : 1;
    sites.push_back({(F - 1) * S + n, R, route, F + (n > 0)});
    route += R;
  }
  return sites;
}

// What is computed, per token, site after site, for each of its routes:
//   h = sum_j p_j s_j     hhat = h / rms(h)     x = norm * hhat     dnorm += sum_tokens dx * hhat
//   dh = (norm * dx - hhat mean(norm * dx * hhat)) / rms(h)         delta = dh . h
//   z_j = r_j (w . s_j)   dz_j = p_j (dh . s_j - delta)
//   ds_j += p_j dh + dz_j r_j (w - s_j r_j z_j / C)                 dw += sum over tokens and j of dz_j r_j s_j
// p and r_j = 1 / rms(s_j) were kept by the forward; mixes and x were not. With `rounds`, dh and the gradients
// of sources are rounded to bf16 whenever they are stored, here: after every route.
struct Given {
  Numbers stream, rstd, p, w, norm, dx, dbank, dpartial;
};
struct Result {
  Numbers x, dbank, dpartial, dnorm, dw;
};
template <class real>
Result plain(const Given& in, size_t F, size_t S, size_t BT, size_t C, bool rounds) {
  const auto stored = [rounds](real v) { return rounds ? real(round_bf16(double(v))) : v; };
  const std::vector<real> stream = as<real>(in.stream), rstd = as<real>(in.rstd), p = as<real>(in.p),
                          w = as<real>(in.w), norm = as<real>(in.norm), dx = as<real>(in.dx);
  const std::vector<Site> sites = sites_of_block(F, S);
  std::vector<real> dbank = as<real>(in.dbank), dpartial = as<real>(in.dpartial), x(dx.size()), dnorm(S * C),
                    dw(w.size()), h(C), dh(C);
  const auto dot = [C](const real* a, const real* b) {
    real sum = 0;
    for (size_t c = 0; c < C; c++) sum += a[c] * b[c];
    return sum;
  };
  for (size_t n = 0; n < sites.size(); n++)
    for (size_t r = sites[n].route; r < sites[n].route + sites[n].R; r++)
      for (size_t bt = 0; bt < BT; bt++) {
        const Site& site = sites[n];
        const auto slot = [&](size_t j) { return j < F ? j * S : site.i; };
        const auto source = [&](size_t j) { return &stream[(slot(j) * BT + bt) * C]; };
        const real *weights = &p[(r * BT + bt) * (F + 1)], *d = &dx[(r * BT + bt) * C], *g = &norm[n * C];
        std::fill(h.begin(), h.end(), real(0));
        for (size_t j = 0; j < site.K; j++)
          for (size_t c = 0; c < C; c++) h[c] += weights[j] * source(j)[c];
        const real scale = 1 / std::sqrt(dot(h.data(), h.data()) / real(C) + real(gpu::EPS));
        real mean = 0;
        for (size_t c = 0; c < C; c++) mean += g[c] * d[c] * scale * h[c] / real(C);
        for (size_t c = 0; c < C; c++) {
          const real hhat = scale * h[c];
          x[(r * BT + bt) * C + c] = g[c] * hhat, dnorm[n * C + c] += d[c] * hhat;
          dh[c] = stored(scale * (g[c] * d[c] - hhat * mean));
        }
        const real delta = dot(dh.data(), h.data());
        for (size_t j = 0; j < site.K; j++) {
          const real *s = source(j), rj = rstd[slot(j) * BT + bt], z = rj * dot(&w[r * C], s);
          const real dz = weights[j] * (dot(dh.data(), s) - delta);
          real* ds = j < F ? &dbank[(j * BT + bt) * C] : &dpartial[bt * C];
          for (size_t c = 0; c < C; c++) {
            ds[c] = stored(ds[c] + weights[j] * dh[c] + dz * rj * (w[r * C + c] - s[c] * rj * z / real(C)));
            dw[r * C + c] += dz * rj * s[c];
          }
        }
      }
  return {from(x), from(dbank), from(dpartial), from(dnorm), from(dw)};
}

// What every rung works on, on the device.
struct Block {
  bf16* dh;                   // (routes,BT,C): holds dx of every route's input
  bf16* x;                    // (routes,BT,C)
  bf16 *dbank, *dpartial;     // (F,BT,C), (BT,C): add
  float *dnorm, *dw;          // (S,C), (routes,C): add
  const bf16* stream;         // (2L+1,BT,C)
  float* rstd;                // (2L+1,BT)
  const float *p, *w, *norm;  // (routes,BT,F+1), (routes,C), (S,C)
  float *mix, *delta;         // workspaces (BT,C), (routes,BT)
  float* rows;                // workspace (token_blocks(),MAX_ROUTE_LIST,C)
  size_t F, S, BT, C;
};

// Sums over tokens, dnorm and dw, are made in two fixed stages by every rung: token_blocks() blocks walk over
// the tokens, a thread keeps its channel's sum in a register, and gpu::add_rows adds the blocks' rows in order.
inline unsigned walkers(const Block& b) { return unsigned(std::min(b.BT, gpu::token_blocks())); }
using gpu::Sources;
__device__ inline float source_at(const Sources<bf16>& sources, size_t j, size_t bt, size_t BT, size_t C) {
  return gpu::to_float(sources.stream[(sources.slot(j) * BT + bt) * C + threadIdx.x]);
}

// Adds to the gradient of source j what ROUTES routes owe it, and to dw what it owes them; one channel a
// thread.
template <int ROUTES>
__device__ inline void source_backward(bf16* ds, float (&dw)[ROUTES], const float (&dh)[ROUTES],
                                       const float (&delta)[ROUTES], const float (&w)[ROUTES],
                                       const Sources<bf16>& sources, const float* p, size_t j, size_t bt,
                                       bool live, size_t BT, size_t C, size_t ldp) {
  const float s = live ? source_at(sources, j, bt, BT, C) : 0.0f, rj = sources.rstd[sources.slot(j) * BT + bt];
  float sums[2 * ROUTES], sum = live ? gpu::to_float(ds[bt * C + threadIdx.x]) : 0.0f;
  for (int r = 0; r < ROUTES; r++) sums[2 * r] = dh[r] * s, sums[2 * r + 1] = w[r] * s;
  block_sums(sums);
  for (int r = 0; r < ROUTES; r++) {
    const float pj = p[(r * BT + bt) * ldp + j], dzr = pj * (sums[2 * r] - delta[r]) * rj,
                z = rj * sums[2 * r + 1];
    sum += pj * dh[r] + dzr * (w[r] - s * rj * z / float(C));
    dw[r] += dzr * s;
  }
  if (live) ds[bt * C + threadIdx.x] = __float2bfloat16(sum);
}

// Rung 1: a kernel a step, route by route. The mix is made again and goes through memory, and so does dh; then
// every source and its gradient are visited.
__global__ void mix_kernel(float* mix, Sources<bf16> sources, const float* p, size_t BT, size_t C, size_t ldp) {
  const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (i >= BT * C) return;
  float h = 0;
  for (size_t j = 0; j < sources.K(); j++)
    h += p[i / C * ldp + j] * gpu::to_float(sources.stream[sources.slot(j) * BT * C + i]);
  mix[i] = h;
}
__global__ void norm_backward_kernel(bf16* dh, bf16* x, float* delta, float* rows, const float* mix,
                                     const float* norm, size_t BT, size_t C) {
  const size_t c = threadIdx.x;
  const bool live = c < C;
  const float g = live ? norm[c] : 0.0f;
  float dnorm = 0;
  for (size_t bt = blockIdx.x; bt < BT; bt += gridDim.x) {
    const float h = live ? mix[bt * C + c] : 0.0f, d = live ? gpu::to_float(dh[bt * C + c]) : 0.0f;
    float sums[2] = {h * h, g * d * h};
    block_sums(sums);
    const float scale = rsqrtf(sums[0] / float(C) + gpu::EPS), hhat = scale * h;
    const float din = gpu::rounded<bf16>(scale * (g * d - hhat * (scale * sums[1] / float(C))));
    float dot[1] = {din * h};
    block_sums(dot);
    if (c == 0) delta[bt] = dot[0];
    if (live) x[bt * C + c] = __float2bfloat16(g * hhat), dh[bt * C + c] = __float2bfloat16(din);
    dnorm += d * hhat;
  }
  if (live) rows[blockIdx.x * C + c] = dnorm;
}
__global__ void sources_backward_kernel(bf16* dbank, bf16* dpartial, float* rows, const bf16* dh,
                                        const float* delta, Sources<bf16> sources, const float* p,
                                        const float* w, size_t F, size_t BT, size_t C, size_t ldp) {
  const size_t c = threadIdx.x;
  const bool live = c < C;
  const float wc[1] = {live ? w[c] : 0.0f};
  float dw[1] = {};
  for (size_t bt = blockIdx.x; bt < BT; bt += gridDim.x) {
    const float d[1] = {live ? gpu::to_float(dh[bt * C + c]) : 0.0f}, dot[1] = {delta[bt]};
    for (size_t j = 0; j < sources.K(); j++)
      source_backward<1>(j < F ? dbank + j * BT * C : dpartial, dw, d, dot, wc, sources, p, j, bt, live, BT, C,
                         ldp);
  }
  if (live) rows[blockIdx.x * C + c] = dw[0];
}
inline void step_by_step(const Block& b) {
  const cudaStream_t stream = gpu::device.stream;
  const size_t BT = b.BT, C = b.C, ldp = b.F + 1;
  const std::vector<Site> sites = sites_of_block(b.F, b.S);
  for (size_t n = 0; n < sites.size(); n++)
    for (size_t r = sites[n].route; r < sites[n].route + sites[n].R; r++) {
      const Sources<bf16> sources = {b.stream, b.rstd, b.S, sites[n].i};
      const float* p = b.p + r * BT * ldp;
      bf16* dh = b.dh + r * BT * C;
      launch(mix_kernel, gpu::ceil_div(BT * C, 256), 256, 0, stream, b.mix, sources, p, BT, C, ldp);
      launch(norm_backward_kernel, walkers(b), threads_for(C), 0, stream, dh, b.x + r * BT * C, b.delta, b.rows,
             b.mix, b.norm + n * C, BT, C);
      gpu::add_rows({b.dnorm + n * C}, b.rows, walkers(b), C);
      launch(sources_backward_kernel, walkers(b), threads_for(C), 0, stream, b.dbank, b.dpartial, b.rows, dh,
             b.delta, sources, p, b.w + r * C, b.F, BT, C, ldp);
      gpu::add_rows({b.dw + r * C}, b.rows, walkers(b), C);
    }
}

// Rung 2: one kernel a route. A block has a token's mix and dh in registers, so neither sees memory; on their
// second visit the sources are found in the cache. What is left: sources in, their gradients in and out, dx in
// and x out.
// Rung 3: both routes of a site in one kernel, ROUTES = 2. Sources and gradients pass once for both, as in the
// forward.
template <int ROUTES>
__global__ void site_backward_kernel(bf16* dbank, bf16* dpartial, bf16* x, float* rows, const bf16* dx,
                                     Sources<bf16> sources, const float* p, const float* w, const float* norm,
                                     size_t F, size_t BT, size_t C, size_t ldp) {
  const size_t c = threadIdx.x;
  const bool live = c < C;
  const float g = live ? norm[c] : 0.0f;
  float wc[ROUTES], dw[ROUTES] = {}, dnorm = 0;
  for (int r = 0; r < ROUTES; r++) wc[r] = live ? w[r * C + c] : 0.0f;
  for (size_t bt = blockIdx.x; bt < BT; bt += gridDim.x) {
    float h[ROUTES] = {}, dh[ROUTES], delta[ROUTES];
    for (size_t j = 0; j < sources.K(); j++) {
      const float s = live ? source_at(sources, j, bt, BT, C) : 0.0f;
      for (int r = 0; r < ROUTES; r++) h[r] += p[(r * BT + bt) * ldp + j] * s;
    }
    for (int r = 0; r < ROUTES; r++) {
      const size_t at = (r * BT + bt) * C + c;
      const float d = live ? gpu::to_float(dx[at]) : 0.0f;
      float sums[2] = {h[r] * h[r], g * d * h[r]};
      block_sums(sums);
      const float scale = rsqrtf(sums[0] / float(C) + gpu::EPS), hhat = scale * h[r];
      if (live) x[at] = __float2bfloat16(g * hhat);
      dnorm += d * hhat;
      dh[r] = scale * (g * d - hhat * (scale * sums[1] / float(C)));
      float dot[1] = {dh[r] * h[r]};
      block_sums(dot);
      delta[r] = dot[0];
    }
    for (size_t j = 0; j < sources.K(); j++)
      source_backward<ROUTES>(j < F ? dbank + j * BT * C : dpartial, dw, dh, delta, wc, sources, p, j, bt, live,
                              BT, C, ldp);
  }
  if (!live) return;
  rows[blockIdx.x * (1 + ROUTES) * C + c] = dnorm;
  for (int r = 0; r < ROUTES; r++) rows[(blockIdx.x * (1 + ROUTES) + 1 + r) * C + c] = dw[r];
}
template <int ROUTES>
void routes_at_once(const Block& b, const Site& site, size_t n, size_t r) {  // of site n: r, and the next
  const size_t BT = b.BT, C = b.C, ldp = b.F + 1;
  const Sources<bf16> sources = {b.stream, b.rstd, b.S, site.i};
  launch(site_backward_kernel<ROUTES>, walkers(b), threads_for(C), 0, gpu::device.stream, b.dbank, b.dpartial,
         b.x + r * BT * C, b.rows, b.dh + r * BT * C, sources, b.p + r * BT * ldp, b.w + r * C, b.norm + n * C,
         b.F, BT, C, ldp);
  std::vector<float*> totals = {b.dnorm + n * C};
  for (size_t i = 0; i < ROUTES; i++) totals.push_back(b.dw + (r + i) * C);
  gpu::add_rows(totals, b.rows, walkers(b), C);
}
inline void route_by_route(const Block& b) {
  const std::vector<Site> sites = sites_of_block(b.F, b.S);
  for (size_t n = 0; n < sites.size(); n++)
    for (size_t r = 0; r < sites[n].R; r++) routes_at_once<1>(b, sites[n], n, sites[n].route + r);
}
inline void site_by_site(const Block& b) {
  const std::vector<Site> sites = sites_of_block(b.F, b.S);
  for (size_t n = 0; n < sites.size(); n++)
    if (sites[n].R == 2)
      routes_at_once<2>(b, sites[n], n, sites[n].route);
    else
      routes_at_once<1>(b, sites[n], n, sites[n].route);
}

// Rung 4: the trainer's, deferred to once a block. In its turn a site makes its mixes again, one read of its
// sources, and pays only the running partial; dh and delta = dh . h are kept. When the block's S sublayers are
// done, route_backward_bank visits every finished source once: it has the dh of all waiting routes at hand and
// adds to each gradient once what they all owe it. In numbers of C a token: before, 3 K + 2 R a site; now
// K + 3 R + 2 a site (the first has no partial: K + 3 R) and 3 F + routes a block. With S = 4 that is 12 F + 21
// against 7 F + 33: less from three finished sources on, and 117 against 89 at eight. Both kernels load 8 to 16
// bytes at a time.
inline void trainers(const Block& b) {
  const size_t BT = b.BT, C = b.C, ldp = b.F + 1;
  const std::vector<Site> sites = sites_of_block(b.F, b.S);
  std::vector<int> waiting;
  for (size_t n = 0; n < sites.size(); n++) {
    const Site& site = sites[n];
    for (size_t r = site.route; r < site.route + site.R; r++) waiting.push_back(int(r));
    gpu::route_backward<bf16>(b.dh + site.route * BT * C, b.x + site.route * BT * C, b.delta + site.route * BT,
                              site.K > b.F ? b.dpartial : nullptr, b.dnorm + n * C, b.dw + site.route * C,
                              {b.stream, b.rstd, b.S, site.i}, b.p + site.route * BT * ldp,
                              b.w + site.route * C, b.norm + n * C, false, b.rows, BT, C, ldp, site.R);
  }
  gpu::route_backward_bank<bf16>(b.dbank, b.dw, b.dh, b.delta, {b.stream, b.rstd, b.S, (b.F - 1) * b.S}, b.p,
                                 b.w, waiting, false, b.rows, BT, C, ldp);
}

// Small sources, `size` not far above sqrt(eps), are where delta counts: x does not change with the scale of h
// but for eps, so else delta = dh . h is almost zero.
inline void shape(size_t BT, size_t C, size_t F, size_t S, double size, bool timed) {
  const std::vector<Site> sites = sites_of_block(F, S);
  const size_t routes = sites.back().route + sites.back().R, slots = F * S, ldp = F + 1;
  Given in = {Numbers(slots * BT * C, NAN),    Numbers(slots * BT, NAN),
              Numbers(routes * BT * ldp, NAN), normals<float>(routes * C, 0, 1.5 / std::sqrt(double(C))),
              normals<float>(S * C, 1, 0.3),   normals<bf16>(routes * BT * C),
              normals<bf16>(F * BT * C),       normals<bf16>(BT * C)};
  for (size_t slot = 0; slot < slots; slot++) {
    if (slot % S != 0 && slot < (F - 1) * S) continue;  // inside an earlier block: no site of this one reads it
    const Numbers source = normals<bf16>(BT * C, 0.1 * size, size);
    std::copy(source.begin(), source.end(), in.stream.begin() + long(slot * BT * C));
    for (size_t bt = 0; bt < BT; bt++) {
      double squares = 0;
      for (size_t c = 0; c < C; c++) squares += source[bt * C + c] * source[bt * C + c];
      in.rstd[slot * BT + bt] = round_to<float>(1 / std::sqrt(squares / double(C) + gpu::EPS));
    }
  }
  for (const Site& site : sites)
    for (size_t row = site.route * BT; row < (site.route + site.R) * BT; row++) {
      double sum = 0;
      for (size_t j = 0; j < site.K; j++) sum += in.p[row * ldp + j] = std::exp(1.5 * normal_number());
      for (size_t j = 0; j < site.K; j++) in.p[row * ldp + j] = round_to<float>(in.p[row * ldp + j] / sum);
    }
  const Result want = plain<double>(in, F, S, BT, C, false), in_float = plain<float>(in, F, S, BT, C, true);

  Array<bf16> dh(routes * BT * C), x(routes * BT * C), dbank(F * BT * C), dpartial(BT * C), stream(in.stream);
  Array<float> dnorm(S * C), dw(routes * C), rstd(in.rstd), p(in.p), w(in.w), norm(in.norm), mix(BT * C),
      delta(routes * BT), rows(gpu::token_blocks() * gpu::MAX_ROUTE_LIST * C);
  const Block b = {dh, x, dbank, dpartial, dnorm, dw, stream, rstd, p, w, norm, mix, delta, rows, F, S, BT, C};
  // Bytes: BTC numbers are a source, a gradient, dx, dh or x, in bf16. sum_K: of K over sites; route_K: over
  // routes. vector: what a sum over tokens costs, rows out and in, result in and out, and its parameter in.
  size_t sum_K = 0, route_K = 0, partial_routes = 0;
  for (const Site& site : sites)
    sum_K += site.K, route_K += site.R * site.K, partial_routes += site.K > F ? site.R : 0;
  const size_t BTC = BT * C, partials = S - 1, vector = 4 * C * (2 * walkers(b) + 3);
  ladder::climb(
      {"route_backward",
       format("BT %zu, C %zu, %zu finished sources of size %g, S %zu", BT, C, F, size, S),
       [&] {
         put(b.dh, in.dx), put(b.dbank, in.dbank), put(b.dpartial, in.dpartial);
         x.forget(), mix.forget(), delta.forget(), rows.forget();
         gpu::zero(b.dnorm, S * C), gpu::zero(b.dw, routes * C);
       },
       [&] {
         compare<bf16>("x", x.numbers(), in_float.x, want.x);
         compare<bf16>("dbank", dbank.numbers(), in_float.dbank, want.dbank);
         compare<bf16>("dpartial", dpartial.numbers(), in_float.dpartial, want.dpartial);
         compare<float>("dnorm", dnorm.numbers(), in_float.dnorm, want.dnorm);
         compare<float>("dw", dw.numbers(), in_float.dw, want.dw);
       },
       {{"a kernel a step, mix and dh in memory",
         BYTES(BTC * (8 * route_K + 16 * routes) + 4 * BT * (3 * route_K + 2 * routes) + 2 * routes * vector),
         [&] { step_by_step(b); }},
        {"a kernel a route",
         BYTES(BTC * (6 * route_K + 4 * routes) + 4 * BT * 2 * route_K + 2 * routes * vector),
         [&] { route_by_route(b); }},
        {"both routes of a site at once",
         BYTES(BTC * (6 * sum_K + 4 * routes) + 4 * BT * (sum_K + route_K) + (S + routes) * vector),
         [&] { site_by_site(b); }},
        {"the trainer's: finished sources once a block",
         BYTES(BTC * (2 * sum_K + 6 * routes + 4 * partials + 6 * F + 2 * routes) +
               4 * BT * (route_K + partials + 2 * routes + F + F * routes) +
               (S + partial_routes + routes) * vector),
         [&] { trainers(b); }}}},
      timed);
}

inline void climb(bool timed) {
  if (timed) return shape(8192, 576, 8, 4, 1, true);
  shape(37, 48, 2, 2, 1, false), shape(37, 48, 3, 4, 1e-3, false), shape(33, 264, 5, 4, 1, false);
}

}  // namespace route_backward_ladder
