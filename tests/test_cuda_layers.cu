// test_cuda_layers.cu - every layer of train_rdattnres.cu, forward and backward, against the CPU functions in
// double.
//
// `want`, `plain` and `got` are those of device.h: the CPU functions in double and in float, and the kernel.
// Where the kernel rounds in the middle (bf16 attention), `plain` is a loop that rounds at the same points.
// Runs on a GPU (nvcc) or through the emulator, in several thread orders.
#define TESTING
#define CPU_NAMESPACE cpu_double
#define REAL double
#include "train_rdattnres_cpu.cpp"  // cpu_double: what is wanted
#define CPU_NAMESPACE cpu_float
#define REAL float
#include "train_rdattnres_cpu.cpp"  // cpu_float: plain code

#include <array>
#include <memory>

#include "train_rdattnres.cu"

#include "tests/check.h"
#include "tests/device.h"  // Array, compare: numbers on the device, and their errors

template <class X>  // what truncated sums may be off: products of float32 do not go to tensor cores
double tensor_sum(size_t terms, double a, double b) {
  return std::is_same<X, bf16>::value ? truncated_sum(terms, a, b) : 0;
}

constexpr double EXTREME = 1e4;  // logits that no softmax survives unless it subtracts their maximum

// The CPU functions by scalar type, so that one template makes both references.
template <class real>
struct Cpu;
#define CPU_FUNCTIONS(real, ns)                                          \
  template <>                                                            \
  struct Cpu<real> {                                                     \
    static constexpr auto* source_rstd = &ns::source_rstd;               \
    static constexpr auto* route_forward = &ns::route_forward;           \
    static constexpr auto* route_backward = &ns::route_backward;         \
    static constexpr auto* rmsnorm_forward = &ns::rmsnorm_forward;       \
    static constexpr auto* rmsnorm_backward = &ns::rmsnorm_backward;     \
    static constexpr auto* matmul = &ns::matmul;                         \
    static constexpr auto overwrite = ns::overwrite;                     \
    static constexpr auto accumulate = ns::accumulate;                   \
    static constexpr auto* rope_rotate = &ns::rope_rotate;               \
    static constexpr auto* swiglu_forward = &ns::swiglu_forward;         \
    static constexpr auto* swiglu_backward = &ns::swiglu_backward;       \
    static constexpr auto* classifier = &ns::classifier;                 \
    static constexpr auto* embedding_backward = &ns::embedding_backward; \
    static constexpr auto* adamw = &ns::adamw;                           \
  };
CPU_FUNCTIONS(double, cpu_double)
CPU_FUNCTIONS(float, cpu_float)

// ---- layers --------------------------------------------------------------------------------------------

std::vector<int> random_tokens(size_t n, size_t V) {
  std::vector<int> tokens(n);
  for (int& t : tokens) {
    const double u = std::fabs(normal_number()) / 6;  // some often, some never
    t = int(std::min(double(V - 1), u * double(V)));
  }
  return tokens;
}
Numbers numbers_of(const std::vector<int>& v) { return Numbers(v.begin(), v.end()); }

template <class X>
void test_embedding(size_t BT, size_t C, size_t V) {
  TEST(format("embedding %s, BT %zu, C %zu", type_name<X>(), BT, C));
  const std::vector<int> tokens = random_tokens(BT, V);
  const Numbers wte = normals<X>(V * C), dout = normals<X>(BT * C), start = normals<float>(V * C);
  Array<X> w(wte), out(BT * C), d(dout);
  Ints ids(numbers_of(tokens));
  Array<float> dwte(start);
  gpu::embedding_forward<X>(out, ids, w, BT, C);
  Numbers want(BT * C);
  for (size_t i = 0; i < BT * C; i++) want[i] = wte[size_t(tokens[i / C]) * C + i % C];
  CHECK(out.numbers() == want);
  std::vector<int> sorted;
  const size_t distinct = gpu::sort_tokens(sorted, tokens.data(), BT, V);
  Ints on_device(numbers_of(sorted));
  gpu::embedding_backward<X>(dwte, d, {on_device, on_device + BT, on_device + BT + distinct + 1, distinct}, C);
  std::vector<double> w2 = as<double>(start);
  std::vector<float> w1 = as<float>(start);
  cpu_double::embedding_backward(w2.data(), as<double>(dout).data(), tokens.data(), BT, C);
  cpu_float::embedding_backward(w1.data(), as<float>(dout).data(), tokens.data(), BT, C);
  compare<float>("dwte", dwte.numbers(), from(w1), from(w2));
}

// One block of the depth memory: sublayers b S .. b S + S - 1 of 2 L, and the output site if it is the last
// block. Every site gets random dx; dbank, the partials' gradients, dnorm, dquery and dgain must be what the
// CPU makes of it.
struct BlockShape {
  size_t C, S, first, sites;
  bool output;
  int two;
  bool average;
};  // two: attention sites have 2 routes
struct SiteData {
  size_t i, R, K, inputs;
  Numbers query, gain, norm, dx, dpartial;
};
struct SiteResult {
  Numbers x, p, rstd, dpartial, dnorm, dquery, dgain;
};  // rstd: of the last source
struct BlockResult {
  std::vector<SiteResult> sites;
  Numbers dbank;
};

template <class real, class X>
BlockResult block_on_cpu(const std::vector<SiteData>& sites, const BlockShape& s, const Numbers& stream,
                         Numbers dbank, size_t BT, bool rounding) {
  using F = Cpu<real>;
  auto round = [&](std::vector<real>& v) {
    if (rounding)
      for (real& x : v) x = real(round_to<X>(double(x)));
  };
  const size_t C = s.C, slots = stream.size() / (BT * C);
  const std::vector<real> all = as<real>(stream);
  std::vector<real> rstd(slots * BT), bank = as<real>(dbank);
  for (size_t n = 0; n < slots; n++) F::source_rstd(&rstd[n * BT], &all[n * BT * C], BT, C);
  BlockResult result;
  for (const SiteData& site : sites) {
    const std::vector<real> query = as<real>(site.query), gain = as<real>(site.gain),
                            norm = as<real>(site.norm);
    std::vector<real> h(site.R * BT * C), p(site.R * BT * site.K), x(site.inputs * BT * C), dh(2 * BT * C),
        dx = as<real>(site.dx);
    std::vector<real> dpartial = as<real>(site.dpartial), dnorm(C), dquery(site.R * C), dgain(C),
                      unused(BT * C);
    std::vector<const real*> sources, rstds, queries;
    std::vector<real*> dsources, dqueries;
    for (size_t j = 0; j < site.K; j++) {
      const size_t slot = std::min(j * s.S, site.i);
      sources.push_back(&all[slot * BT * C]), rstds.push_back(&rstd[slot * BT]);
      const bool finished = slot % s.S == 0 && slot <= s.first;
      dsources.push_back(finished ? &bank[slot / s.S * BT * C] : dpartial.data());
    }
    for (size_t r = 0; r < site.R; r++) queries.push_back(&query[r * C]), dqueries.push_back(&dquery[r * C]);
    F::route_forward(h.data(), p.data(), sources.data(), rstds.data(), queries.data(), gain.data(), BT, C,
                     site.K, site.R);
    std::vector<real> mixes = h;
    if (s.average && site.R == 2)
      for (size_t i = 0; i < BT * C; i++) mixes[i] = (h[i] + h[BT * C + i]) / 2;
    for (size_t n = 0; n < site.inputs; n++) {
      F::rmsnorm_forward(&x[n * BT * C], &mixes[n * BT * C], norm.data(), BT, C);
      F::rmsnorm_backward(&dh[n * BT * C], dnorm.data(), &dx[n * BT * C], &mixes[n * BT * C], norm.data(), BT,
                          C);
    }
    if (s.average && site.R == 2)
      for (size_t i = 0; i < BT * C; i++) dh[i] = dh[BT * C + i] = dh[i] / 2;
    round(dh);  // as the kernels keep it
    F::route_backward(dsources.data(), dqueries.data(), dgain.data(), dh.data(), h.data(), p.data(),
                      sources.data(), rstds.data(), queries.data(), gain.data(), BT, C, site.K, site.R);
    const Numbers last(rstd.begin() + long(site.i * BT), rstd.begin() + long((site.i + 1) * BT));
    result.sites.push_back({from(x), from(p), last, from(dpartial), from(dnorm), from(dquery), from(dgain)});
  }
  result.dbank = from(bank);
  return result;
}

// deviation: of the logits. At EXTREME nearly every route takes one source, and the gradients of logits,
// differences of sums of C products, are zero but for rounding; errors are relative to what they are otherwise.
template <class X>
void test_route(const BlockShape& s, size_t BT, double deviation = 1.5) {
  const bool extreme = deviation >= EXTREME;
  const double unit = extreme ? deviation : 0, unit_dquery = extreme ? std::sqrt(double(s.C * BT)) : 0,
               unit_dgain = extreme ? deviation * std::sqrt(double(BT)) : 0;
  const size_t C = s.C, last = s.first + s.sites, K = s.first / s.S + 1;
  TEST(format("route %s, C %zu, %zu finished sources, S %zu, %zu sites%s%s%s, logits of %g", type_name<X>(), C,
              K, s.S, s.sites, s.output ? " and output" : "", s.two ? ", two routes" : "",
              s.average ? ", averaged" : "", deviation));
  const Numbers stream = normals<X>((last + 1) * BT * C, 0.1, 1), dbank = normals<X>(K * BT * C);
  std::vector<SiteData> sites;
  for (size_t i = last + s.output; i-- > s.first;) {  // in the order of a backward
    if (i == 0) continue;
    const size_t R = s.two && i % 2 == 0 && i < last ? 2 : 1;
    SiteData site = {i, R, 1 + (i + s.S - 1) / s.S, s.average ? 1 : R, {}, {}, {}, {}, {}};
    site.query = normals<float>(R * C, 0, deviation / std::sqrt(double(C)));
    site.gain = normals<float>(C, 1, 0.3);
    site.norm = normals<float>(C, 1, 0.3), site.dx = normals<X>(site.inputs * BT * C);
    site.dpartial = normals<X>(BT * C);
    sites.push_back(site);
  }
  const BlockResult want = block_on_cpu<double, X>(sites, s, stream, dbank, BT, false);
  const BlockResult plain = block_on_cpu<float, X>(sites, s, stream, dbank, BT, true);

  size_t routes = 0, ldp = 0;
  for (const SiteData& site : sites)
    routes += site.R, ldp = std::max(ldp, site.K + 1);  // + 1: a row may be longer than K
  Array<X> slots(stream), bank(dbank), dh(routes * BT * C);
  Array<float> rstd((last + 1) * BT), p(routes * BT * ldp), w(routes * C), dw(Numbers(routes * C, 0)),
      delta(routes * BT);
  Array<float> rows(gpu::token_blocks() * gpu::MAX_ROUTE_LIST * C);
  {  // 1 / rms of a finished slot was computed by a site before this block
    Array<X> x(BT * C);
    Array<float> norm(Numbers(C, 1));
    for (size_t n = 0; n <= last; n++)
      gpu::rmsnorm_forward<X>(x, rstd + n * BT, slots + n * BT * C, norm, BT, C);
  }
  std::vector<gpu::Fold> folds;
  std::vector<std::unique_ptr<Array<float>>> parameters;
  auto array = [&](const Numbers& v) {
    parameters.emplace_back(new Array<float>(v));
    return parameters.back()->at;
  };
  for (const SiteData& site : sites) {
    float *gain = array(site.gain), *dgain = array(Numbers(C, 0));
    for (size_t r = 0; r < site.R; r++)
      folds.push_back({array(Numbers(site.query.begin() + long(r * C), site.query.begin() + long((r + 1) * C))),
                       gain, array(Numbers(C, 0)), dgain});
  }
  Array<int> fold_memory(folds.size() * sizeof(gpu::Fold) / sizeof(int));
  gpu::upload(fold_memory.at, reinterpret_cast<const int*>(folds.data()), fold_memory.n);
  const gpu::Fold* device_folds = reinterpret_cast<const gpu::Fold*>(fold_memory.at);
  gpu::fold_gain(w, device_folds, routes, C);

  size_t r0 = 0;
  std::vector<int> list;
  std::vector<Numbers> dnorms;
  for (size_t n = 0; n < sites.size(); n++) {
    const SiteData& site = sites[n];
    const gpu::Sources<X> sources{slots, rstd, s.S, site.i};
    Array<X> x(site.inputs * BT * C), dpartial(site.dpartial);
    Array<float> norm(site.norm), dnorm(Numbers(C, 0));
    put(rstd + site.i * BT, Numbers(BT, NAN));  // of the last source: computed, and kept
    gpu::route_forward<X>(x, p + r0 * BT * ldp, sources, w + r0 * C, norm, s.average, BT, C, ldp, site.R);
    compare<float>("rstd", take(rstd + site.i * BT, BT), plain.sites[n].rstd, want.sites[n].rstd);
    const Numbers weights = p.numbers();
    Numbers used(site.R * BT * site.K);
    for (size_t r = 0; r < site.R; r++)
      for (size_t i = 0; i < BT * site.K; i++)
        used[r * BT * site.K + i] = weights[((r0 + r) * BT + i / site.K) * ldp + i % site.K];
    compare<X>(format("site %zu x", site.i), x.numbers(), plain.sites[n].x, want.sites[n].x);
    compare<float>("p", used, plain.sites[n].p, want.sites[n].p);
    const auto hard = std::count_if(used.begin(), used.end(), [](double v) { return v == 0 || v == 1; });
    if (extreme) CHECK(size_t(hard) > used.size() * 9 / 10);
    put(dh + r0 * BT * C, site.dx);
    for (size_t r = 0; r < site.R; r++) list.push_back(int(r0 + r));
    const bool has_partial = site.i % s.S != 0 || (s.output && site.i == last);
    Array<X> x_again(site.inputs * BT * C);
    gpu::route_backward<X>(dh + r0 * BT * C, x_again, delta + r0 * BT, has_partial ? dpartial.at : nullptr,
                           dnorm, dw + r0 * C, sources, p + r0 * BT * ldp, w + r0 * C, norm, s.average, rows,
                           BT, C, ldp, site.R);
    compare<X>("x again", x_again.numbers(), plain.sites[n].x, want.sites[n].x);
    if (has_partial)
      compare<X>("dpartial", dpartial.numbers(), plain.sites[n].dpartial, want.sites[n].dpartial, unit);
    compare<float>("dnorm", dnorm.numbers(), plain.sites[n].dnorm, want.sites[n].dnorm);
    r0 += site.R;
  }
  gpu::route_backward_bank<X>(bank, dw, dh, delta, gpu::Sources<X>{slots, rstd, s.S, s.first}, p, w, list,
                              false, rows, BT, C, ldp);
  compare<X>("dbank", bank.numbers(), plain.dbank, want.dbank, unit * std::sqrt(double(routes)));
  {  // `first` overwrites what was there, with however many visits: the same bits as adding to zeros
    Array<X> zeros(Numbers(K * BT * C, 0)), nothing(Numbers(K * BT * C, NAN));
    Array<float> unused(Numbers(routes * C, 0));
    const gpu::Sources<X> finished{slots, rstd, s.S, s.first};
    gpu::route_backward_bank<X>(zeros, unused, dh, delta, finished, p, w, list, false, rows, BT, C, ldp);
    gpu::route_backward_bank<X>(nothing, unused, dh, delta, finished, p, w, list, true, rows, BT, C, ldp);
    CHECK(nothing.numbers() == zeros.numbers());
  }
  gpu::fold_gain_backward(dw, device_folds, routes, C);
  size_t f = 0;
  for (size_t n = 0; n < sites.size(); n++) {
    Numbers dquery;
    for (size_t r = 0; r < sites[n].R; r++, f++)
      for (double v : take(folds[f].dquery, C)) dquery.push_back(v);
    compare<float>(format("site %zu dquery", sites[n].i), dquery, plain.sites[n].dquery, want.sites[n].dquery,
                   unit_dquery);
    compare<float>("dgain", take(folds[f - 1].dgain, C), plain.sites[n].dgain, want.sites[n].dgain, unit_dgain);
  }
}

// Warps walk over the tokens. What is made for a token is the same bits whoever walks there, on a card with one
// multiprocessor or with so many that no warp has a second token.
template <class X>
void test_walks(size_t BT, size_t C) {
  constexpr size_t S = 4, first = 4, i = 6, K = 3, R = 2, MULTIPROCESSORS[] = {1, 2, 50};
  TEST(format("route %s, C %zu, walks over %zu tokens", type_name<X>(), C, BT));
  const Numbers dx = normals<X>(R * BT * C), dbank0 = normals<X>(2 * BT * C), dpartial0 = normals<X>(BT * C);
  Array<X> stream(normals<X>((i + 1) * BT * C, 0.1, 1)), x(R * BT * C), dh(dx), x_again(R * BT * C),
      dpartial(BT * C), dbank(2 * BT * C);
  Array<float> rstd(normals<float>((i + 1) * BT, 1, 0.1)), norm(normals<float>(C, 1, 0.3)), p(R * BT * K),
      w(normals<float>(R * C, 0, 1 / std::sqrt(double(C)))), delta(R * BT), dnorm(Numbers(C, 0)), dw(R * C);
  const int multiprocessors = gpu::device.properties.multiProcessorCount;
  std::vector<Numbers> made;  // by the first card
  for (size_t count : MULTIPROCESSORS) {
    gpu::device.properties.multiProcessorCount = int(count);
    Array<float> rows(gpu::token_blocks() * gpu::MAX_ROUTE_LIST * C);
    put(dh.at, dx), put(dpartial.at, dpartial0), put(dbank.at, dbank0), put(dw.at, Numbers(R * C, 0));
    const gpu::Sources<X> sources{stream, rstd, S, i}, finished{stream, rstd, S, first};
    gpu::route_forward<X>(x, p, sources, w, norm, false, BT, C, K, R);
    gpu::route_backward<X>(dh, x_again, delta, dpartial, dnorm, dw, sources, p, w, norm, false, rows, BT, C, K,
                           R);
    gpu::route_backward_bank<X>(dbank, dw, dh, delta, finished, p, w, {0, 1}, false, rows, BT, C, K);
    const std::vector<Numbers> now = {x.numbers(),  p.numbers(),     take(rstd + i * BT, BT), x_again.numbers(),
                                      dh.numbers(), delta.numbers(), dpartial.numbers(),      dbank.numbers()};
    if (made.empty()) made = now;
    CHECK(now == made);
    for (const Numbers& v : now)
      CHECK(std::all_of(v.begin(), v.end(), [](double a) { return std::isfinite(a); }));
  }
  gpu::device.properties.multiProcessorCount = multiprocessors;
}

template <class X>
void test_rmsnorm(size_t BT, size_t C) {
  TEST(format("rmsnorm %s, BT %zu, C %zu", type_name<X>(), BT, C));
  const Numbers h = normals<X>(BT * C, 0.2), weight = normals<float>(C, 1, 0.3), dx = normals<X>(BT * C);
  const Numbers start = normals<X>(BT * C), dstart = normals<float>(C);
  Array<X> in(h), x(BT * C), d(dx), dh(start);
  Array<float> w(weight), rstd(BT), dw(dstart), rows(gpu::token_blocks() * C);
  gpu::rmsnorm_forward<X>(x, rstd, in, w, BT, C);
  gpu::rmsnorm_backward<X>(dh, dw, d, in, rstd, w, rows, BT, C);
  auto on_cpu = [&](auto zero) {
    using real = decltype(zero);
    std::vector<real> out(BT * C), din(BT * C), dweight = as<real>(dstart);
    Cpu<real>::rmsnorm_forward(out.data(), as<real>(h).data(), as<real>(weight).data(), BT, C);
    Cpu<real>::rmsnorm_backward(din.data(), dweight.data(), as<real>(dx).data(), as<real>(h).data(),
                                as<real>(weight).data(), BT, C);
    std::vector<real> sum = din;
    for (size_t i = 0; i < BT * C; i++) sum[i] += real(start[i]);
    return std::vector<Numbers>{from(out), from(sum), from(dweight)};
  };
  const std::vector<Numbers> want = on_cpu(double(0)), plain = on_cpu(float(0));
  compare<X>("x", x.numbers(), plain[0], want[0]);
  compare<X>("dh, added", dh.numbers(), plain[1], want[1]);
  compare<float>("dweight", dw.numbers(), plain[2], want[2]);
}

template <class X>
void test_matmul(size_t BT, size_t IC, size_t OC) {
  TEST(format("matmul %s, BT %zu, IC %zu, OC %zu", type_name<X>(), BT, IC, OC));
  const size_t ld = OC + 8;  // rows of a packed buffer
  const Numbers x = normals<X>(BT * IC), w = normals<X>(OC * IC), addend = normals<X>(BT * ld),
                dout = normals<X>(BT * ld);
  const Numbers dx0 = normals<X>(BT * IC), dw0 = normals<float>(OC * IC);
  Array<X> in(x), weight(w), add(addend), out(Numbers(BT * ld, 7)), sum(Numbers(BT * ld, 7)), d(dout),
      dx(BT * IC), dx_sum(dx0);
  Array<float> dw(dw0);
  gpu::matmul_forward<X>(out, in, weight, BT, IC, OC, ld);
  gpu::matmul_forward<X>(sum, in, weight, BT, IC, OC, ld, add);
  gpu::matmul_backward_input<X>(dx, d, weight, BT, IC, OC, ld);
  gpu::matmul_backward_input<X>(dx_sum, d, weight, BT, IC, OC, ld, true);
  gpu::matmul_backward_weight<X>(dw, d, in, BT, IC, OC, ld);
  auto on_cpu = [&](auto zero) {
    using real = decltype(zero);
    using F = Cpu<real>;
    const std::vector<real> cx = as<real>(x), cw = as<real>(w), cd = as<real>(dout);
    std::vector<real> o(BT * ld, 7), s = as<real>(addend), cdx(BT * IC), cdx_sum = as<real>(dx0),
                                     cdw = as<real>(dw0);
    F::matmul({o.data(), ld}, {cx.data(), IC}, {cw.data(), 1, IC}, BT, OC, IC, F::overwrite);
    F::matmul({s.data(), ld}, {cx.data(), IC}, {cw.data(), 1, IC}, BT, OC, IC, F::accumulate);
    for (size_t i = 0; i < BT * ld; i++)
      if (i % ld >= OC) s[i] = 7;
    F::matmul({cdx.data(), IC}, {cd.data(), ld}, {cw.data(), IC}, BT, IC, OC, F::overwrite);
    F::matmul({cdx_sum.data(), IC}, {cd.data(), ld}, {cw.data(), IC}, BT, IC, OC, F::accumulate);
    F::matmul({cdw.data(), IC}, {cd.data(), 1, ld}, {cx.data(), IC}, OC, IC, BT, F::accumulate);
    return std::vector<Numbers>{from(o), from(s), from(cdx), from(cdx_sum), from(cdw)};
  };
  const std::vector<Numbers> want = on_cpu(double(0)), plain = on_cpu(float(0));
  compare<X>("out", out.numbers(), plain[0], want[0]);
  compare<X>("out + addend", sum.numbers(), plain[1], want[1]);
  compare<X>("dx", dx.numbers(), plain[2], want[2]);
  compare<X>("dx, added", dx_sum.numbers(), plain[3], want[3]);
  compare<float>("dw", dw.numbers(), plain[4], want[4], 0, tensor_sum<X>(BT, rms(dout), rms(x)));
}

template <class X>
void test_rope(size_t B, size_t T, size_t C, size_t NH) {
  TEST(format("rope %s, T %zu, C %zu, HS %zu", type_name<X>(), T, C, C / NH));
  const Numbers qkv = normals<X>(B * T * 3 * C);
  const std::vector<float> table = gpu::rope_angles(T, C / NH);
  Array<float> angles(from(table));
  for (float direction : {1.0f, -1.0f}) {
    Array<X> x(qkv);
    const float2* at = reinterpret_cast<const float2*>(angles.at);
    direction > 0 ? gpu::rope_forward<X>(x, at, B, T, C, NH) : gpu::rope_backward<X>(x, at, B, T, C, NH);
    std::vector<double> want = as<double>(qkv);
    std::vector<float> plain = as<float>(qkv);
    cpu_double::rope_rotate(want.data(), B, T, C, NH, direction);
    cpu_float::rope_rotate(plain.data(), B, T, C, NH, direction);
    compare<X>(direction > 0 ? "forward" : "backward", x.numbers(), from(plain), from(want));
  }
}

struct AttentionResult {
  Numbers att, lse, dqkv;
};
AttentionResult wanted_attention(const Numbers& qkv, const Numbers& datt, const Numbers& att0,
                                 const Numbers& lse0, size_t B, size_t T, size_t C, size_t NH) {
  AttentionResult r = {Numbers(B * T * C), Numbers(B * NH * T), Numbers(B * T * 3 * C)};
  cpu_double::attention_forward(r.att.data(), r.lse.data(), qkv.data(), B, T, C, NH);
  cpu_double::attention_backward(r.dqkv.data(), datt.data(), qkv.data(), att0.data(), lse0.data(), B, T, C, NH);
  return r;
}
// Part 0, 1, 2 of the rows of qkv: q, k or v (BT,C).
Numbers part_of(const Numbers& qkv, size_t part, size_t C) {
  Numbers out;
  for (size_t row = 0; row < qkv.size(); row += 3 * C)
    out.insert(out.end(), qkv.begin() + long(row + part * C), qkv.begin() + long(row + (part + 1) * C));
  return out;
}
// The definition and the chain rule in float; for bf16 the weights, and the scores' gradients, round before
// their products. The gradients are those of the sum of att times datt.
struct PlainAttention {
  Numbers att, lse, gradients[3];
};
PlainAttention plain_attention(const Numbers& qkv, const Numbers& datt, size_t B, size_t T, size_t C, size_t NH,
                               bool rounds) {
  PlainAttention r;
  reference::Named<double> inputs;
  for (size_t part = 0; part < 3; part++) inputs[std::string(1, "qkv"[part])] = part_of(qkv, part, C);
  const auto d = reference::gradients<float>(inputs, [&](const reference::Named<reference::Var<float>>& x) {
    const auto out = reference::attention(x.at("q"), x.at("k"), x.at("v"), B, T, C, NH, rounds);
    reference::Var<float> sum = 0;
    for (size_t i = 0; i < datt.size(); i++) {
      sum += out.att[i] * reference::Var<float>(datt[i]);
      r.att.push_back(double(out.att[i].value));
    }
    for (const auto& lse : out.lse) r.lse.push_back(double(lse.value));
    return sum;
  });
  for (size_t part = 0; part < 3; part++) r.gradients[part] = from(d.at(std::string(1, "qkv"[part])));
  return r;
}
template <class X>
void test_attention(size_t B, size_t T, size_t HS, size_t NH, double deviation = 1.3) {
  TEST(format("attention %s, B %zu, T %zu, HS %zu, NH %zu, q, k, v of %g", type_name<X>(), B, T, HS, NH,
              deviation));
  const size_t C = HS * NH;
  const Numbers qkv = normals<X>(B * T * 3 * C, 0.1, deviation), datt = normals<X>(B * T * C);
  Array<X> in(qkv), att(B * T * C), d(datt), dqkv(B * T * 3 * C);
  Array<float> lse(B * NH * T), delta(B * NH * T);
  gpu::attention_forward<X>(att, lse, in, B, T, C, NH);
  const Numbers att0 = att.numbers(),
                lse0 = lse.numbers();  // the backward is judged on what the forward handed it
  gpu::attention_backward<X>(dqkv, delta, d, in, att, lse, B, T, C, NH);
  const AttentionResult want = wanted_attention(qkv, datt, att0, lse0, B, T, C, NH);
  const bool rounds = std::is_same<X, bf16>::value && HS % 16 == 0;
  const PlainAttention plain = plain_attention(qkv, datt, B, T, C, NH, rounds);
  // A weight is exp(score - lse): what rounding takes from these two is a relative error of the weight. (One
  // token's weight is 1, and the plain loops find exactly that.)
  const double weight_off = error_of(lse0, Numbers(lse0.size(), 0)).largest * 0x1p-23, size = rms(qkv);
  compare<X>("att", att0, plain.att, want.att, 0, weight_off * rms(want.att));
  compare<float>("lse", lse0, plain.lse, want.lse, 0, tensor_sum<X>(HS, size, size) / std::sqrt(double(HS)));
  const char* names[] = {"dq", "dk", "dv"};
  const Numbers got = dqkv.numbers();
  for (size_t part = 0; part < 3; part++) {
    // dq and dk come from differences, datt . v - delta, which cancel for one token, and where one key has all
    // the weight: only rounding is left, of sums of HS products. It is relative to what they are otherwise.
    const Numbers wanted = part_of(want.dqkv, part, C);
    const double unit = part < 2 ? rms(datt) * size * size * std::sqrt(double(HS)) : rms(wanted);
    compare<X>(names[part], part_of(got, part, C), plain.gradients[part], wanted, unit,
               part < 2 ? 0 : weight_off * unit);
  }
}

template <class X>
void test_swiglu(size_t n) {
  TEST(format("swiglu %s, n %zu", type_name<X>(), n));
  const Numbers gate = normals<X>(n, 0, 3), up = normals<X>(n), dact = normals<X>(n);
  Array<X> g(gate), u(up), act(n), d(dact);
  gpu::swiglu_forward<X>(act, g, u, n);
  gpu::swiglu_backward<X>(g, u, d, d, g, u, n);  // in place, as the model does it
  auto on_cpu = [&](auto zero) {
    using real = decltype(zero);
    std::vector<real> a(n), again(n), dg(n), du(n);
    Cpu<real>::swiglu_forward(a.data(), as<real>(gate).data(), as<real>(up).data(), n);
    Cpu<real>::swiglu_backward(dg.data(), du.data(), again.data(), as<real>(dact).data(), as<real>(gate).data(),
                               as<real>(up).data(), n);
    return std::vector<Numbers>{from(a), from(dg), from(du)};
  };
  const std::vector<Numbers> want = on_cpu(double(0)), plain = on_cpu(float(0));
  compare<X>("act", act.numbers(), plain[0], want[0]);
  compare<X>("act again", d.numbers(), plain[0], want[0]);
  compare<X>("dgate", g.numbers(), plain[1], want[1]);
  compare<X>("dup", u.numbers(), plain[2], want[2]);
}

// `plain` rounds where the kernels round, logits and dlogits, and sums over the vocabulary one by one.
template <class X>
void test_classifier(size_t BT, size_t C, size_t V, size_t chunk, double deviation = 2) {
  TEST(format("classifier %s, BT %zu, C %zu, V %zu, %zu rows at a time, logits of %g", type_name<X>(), BT, C, V,
              chunk, deviation));
  const size_t Vp = (V + 127) / 128 * 128;
  const Numbers x = normals<X>(BT * C), start = normals<float>(Vp * C);
  Numbers wte = normals<X>(Vp * C, 0, deviation / std::sqrt(double(C)));
  std::fill(wte.begin() + long(V * C), wte.end(), 0);
  std::vector<int> targets = random_tokens(BT, V);
  const float dloss = 1 / float(BT);
  Array<X> in(x), w(wte), dx(BT * C), logits(chunk * Vp);
  Array<float> losses(BT), dwte(start), losses_only(BT);
  Ints t(numbers_of(targets));
  gpu::classifier<X>(losses, dx, dwte, in, w, t, dloss, logits, chunk, BT, C, V, Vp);
  gpu::classifier<X>(losses_only, nullptr, nullptr, in, w, t, 0, logits, chunk, BT, C, V, Vp);
  CHECK(losses.numbers() == losses_only.numbers());

  std::vector<double> loss2(BT), dx2(BT * C), dw2 = as<double>(start), z2(cpu_double::CLASSIFIER_ROWS * Vp);
  cpu_double::classifier(loss2.data(), dx2.data(), dw2.data(), x.data(), wte.data(), targets.data(), dloss,
                         z2.data(), BT, C, V, Vp);
  std::vector<float> loss1(BT), dx1(BT * C), dw1 = as<float>(start), cx = as<float>(x), cw = as<float>(wte);
  for (size_t bt = 0; bt < BT; bt++) {
    std::vector<float> z(V);
    cpu_float::matmul({z.data(), V}, {&cx[bt * C], C}, {cw.data(), 1, C}, 1, V, C);
    for (float& v : z) v = float(round_to<X>(v));
    const float top = *std::max_element(z.begin(), z.end()), target = z[size_t(targets[bt])];
    float sum = 0;
    for (float& v : z) sum += v = std::exp(v - top);
    loss1[bt] = std::log(sum) - (target - top);
    for (size_t v = 0; v < V; v++)
      z[v] = float(round_to<X>(z[v] / sum * dloss - (int(v) == targets[bt] ? dloss : 0)));
    for (size_t v = 0; v < V; v++)
      for (size_t i = 0; i < C; i++) dx1[bt * C + i] += z[v] * cw[v * C + i];
    cpu_float::matmul({dw1.data(), C}, {z.data(), 1}, {&cx[bt * C], C}, V, C, 1, cpu_float::accumulate);
  }
  compare<float>("losses", losses.numbers(), from(loss1), from(loss2));
  compare<X>("dx", dx.numbers(), from(dx1), from(dx2));
  compare<float>("dwte", dwte.numbers(), from(dw1), from(dw2), 0, tensor_sum<X>(BT, dloss, rms(x)));
  const Numbers all = dwte.numbers();
  CHECK(Numbers(all.begin() + long(V * C), all.end()) == Numbers(start.begin() + long(V * C), start.end()));
}

void test_optimiser(size_t n) {
  TEST(format("global norm and AdamW, n %zu", n));
  const Numbers p0 = normals<float>(n), m0 = normals<float>(n, 0, 0.1), g0 = normals<float>(n, 0, 1e-2);
  Numbers v0 = normals<float>(n, 0, 0.1);
  for (double& v : v0) v = double(float(v * v));
  double squares = 0;
  for (double g : g0) squares += g * g;
  Array<float> p(p0), m(m0), v(v0), g(g0);
  Array<bf16> working(n);
  double* sums = nullptr;
  CUDA_CHECK(cudaMalloc(&sums, gpu::ceil_div(n, SHARE_CHUNK) * sizeof(double)));
  CHECK_CLOSE(gpu::global_norm(g, sums, n) / std::sqrt(squares), 1, 1e-14 * std::sqrt(double(n)));
  CUDA_CHECK(cudaFree(sums));
  gpu::adamw<bf16>(p, working, m, v, g, n, 0.37, 1e-2, 0.1, 3);
  auto on_cpu = [&](auto zero) {
    using real = decltype(zero);
    std::vector<real> cp = as<real>(p0), cm = as<real>(m0), cv = as<real>(v0);
    Cpu<real>::adamw(cp.data(), cm.data(), cv.data(), as<real>(g0).data(), n, 0.37, 1e-2, 0.1, 3);
    return std::vector<Numbers>{from(cp), from(cm), from(cv)};
  };
  const std::vector<Numbers> want = on_cpu(double(0)), plain = on_cpu(float(0));
  compare<float>("p", p.numbers(), plain[0], want[0]);
  compare<float>("m", m.numbers(), plain[1], want[1]);
  compare<float>("v", v.numbers(), plain[2], want[2]);
  CHECK(working.numbers() == rounded_to<bf16>(p.numbers()));
}

// ---- traffic -------------------------------------------------------------------------------------------

// How many bytes the depth-route kernels move, against what they must: the layer is bound by memory, so its
// cost is the number of times a source passes by. Per token, in units of C values:
//   forward             K sources in, R normalised mixes out
//   backward, per site  K sources in (the mixes are made again); dx in, dh and x out, for each route; and the
//                       gradient of the running partial in and out
//   backward, per block every finished source in, its gradient in and out; dh of each route in
// The emulator's race build counts them, in distinct sectors of 32 bytes: what a cache keeps is free. What does
// not grow with the tokens (query times gain, norms, sums) drops out of the difference between two numbers of
// tokens. And what warps ask for, in sectors per instruction: that is the first cache's work. It can hand out
// some six times what memory brings; warps that asked for query times gain with every source would want more.
#ifdef __CUDACC__
void test_traffic() {
  TEST("traffic of the depth routes");
  SKIP("only the emulator's race build counts bytes");
}
void test_stated_bytes() {
  TEST("bytes stated for --profile");
  SKIP("only the emulator's race build counts bytes");
}
#else
constexpr double ALLOWED = 1.1;

struct Moved {
  double counted = 0, stated = 0,
         asked = 0;  // bytes: distinct sectors; what --profile states; what warps ask for
};
Moved moved_by(const std::string& function, const std::string& kernel) {
  const emu::Traffic t = emu::traffic(kernel);
  return {32.0 * double(t.distinct), gpu::profile.row(function).bytes, 32.0 * double(t.sectors)};
}
struct Pass {
  const char* name;
  std::vector<std::string> functions;  // the first site has one source: a norm alone
  double may_ask;                      // for so many times what it must move
};
const Pass PASSES[] = {{"forward", {"route_forward", "rmsnorm_forward"}, 1.5},
                       {"backward", {"route_backward", "rmsnorm_backward"}, 2},
                       {"bank", {"route_backward_bank"}, 1.2}};
using Passes = std::array<Moved, 3>;

// Whole blocks of a network, sites first .. end - 1, forward and backward as model_backward walks. The model
// has its activations and norms but no matrices: the emulator keeps twelve bytes of notes for every one.
Passes move_blocks(const Config& c, size_t first, size_t end, size_t BT) {
  gpu::Model<bf16> m;
  m.config = c, m.B = 1, m.T = BT;
  auto for_each = [&](auto visit) { gpu::for_each_activation(m.acts, c, 1, BT, true, 1, visit); };
  for_each([](const char*, const char*, auto*& at, size_t n) {
    CUDA_CHECK(cudaMalloc(&at, n * sizeof *at));
    gpu::zero(at, n);
  });
  Array<float> norm(Numbers(c.L * c.C, 1)), dnorm(Numbers(c.L * c.C, 0));
  m.params.attn_norm = m.params.mlp_norm = norm, m.grads.attn_norm = m.grads.mlp_norm = dnorm;
  CUDA_CHECK(
      cudaStreamSynchronize(gpu::device.stream));  // the emulator may run what was launched as late as this
  emu::count_traffic(true);
  gpu::profile.on = true;
  const gpu::Activations<bf16>& a = m.acts;
  std::vector<int> waiting;
  for (size_t i = first; i < end; i++) gpu::read_sources(m, gpu::site_at(m, i, BT), BT);
  for (size_t i = end; i-- > first;) {
    gpu::read_sources_backward(m, gpu::site_at(m, i, BT), waiting, BT);
    if (i % c.S != 0) continue;
    gpu::route_backward_bank(a.dbank, a.dqueries, a.dh, a.delta, gpu::site_at(m, i, BT).sources, a.p, a.queries,
                             waiting, false, a.rows, BT, c.C, c.max_sources());
    waiting.clear();
  }
  gpu::profile.end_step();
  Passes passes;
  for (size_t n = 0; n < 3; n++)
    for (const std::string& function : PASSES[n].functions) {
      const Moved moved = moved_by(function, function + "_kernel");
      passes[n].counted += moved.counted;
      passes[n].stated += moved.stated;
      passes[n].asked += moved.asked;
    }
  emu::count_traffic(false);
  gpu::profile.finish(1);
  for_each([](const char*, const char*, auto*& at, size_t) { CUDA_CHECK(cudaFree(at)); });
  return passes;
}
// What sites first .. end - 1 move, in units of C values a token and sublayer. Checks that it is what they
// must, and what --profile states.
std::array<double, 3> test_blocks(const Config& c, size_t first, size_t end) {
  // Enough tokens that every block of every kernel has its share in both runs; the difference is free of
  // constants.
  const size_t few = 4 * gpu::token_blocks(), many = 2 * few;
  const Passes low = move_blocks(c, first, end, few), high = move_blocks(c, first, end, many);
  const double unit = double(many - few) * double(c.C) * sizeof(bf16) * double(end - first);
  double want[3] = {};
  for (size_t i = first; i < end; i++) {
    const double K = double(c.num_sources(i)), R = double(i == 0 ? 1 : c.num_routes(i));
    want[0] += K + R + (i == 0 ? 2 : 0);  // the first site's norm runs once more in the backward
    want[1] += i == 0 ? 4 : K + 3 * R + (i % c.S != 0 ? 2 : 0);  // site 0: dx, h, the gradient in and out
    want[2] += (i == 0 ? 0 : R) + (i % c.S != 0 ? 0 : 3 * K);
  }
  std::array<double, 3> got;
  for (size_t n = 0; n < 3; n++) {
    const double must = want[n] / double(end - first), asked = (high[n].asked - low[n].asked) / unit;
    got[n] = (high[n].counted - low[n].counted) / unit;
    printf("       %-10s %6.3f units of C a token and sublayer, must be %6.3f, ratio %.3f; asked %.2f\n",
           PASSES[n].name, got[n], must, got[n] / must, asked / must);
    CHECK(asked <= PASSES[n].may_ask * must);
    CHECK(got[n] <= ALLOWED * must);
    CHECK(got[n] >= 0.99 * must);  // less would mean that the counting is broken
    CHECK_CLOSE((high[n].stated - low[n].stated) / unit, must, 1e-9);
  }
  return got;
}
void test_block(const Config& c, size_t first) {
  TEST(format("traffic of a block, %s, C %zu, S %zu, %zu finished sources", ARCH_NAMES[int(c.arch)], c.C, c.S,
              first / c.S + 1));
  test_blocks(c, first, first + c.S);
}
// A whole network against the figures of dev/doc/rdattnres.md, section 8: forward, and a backward that would
// find every mix and its delta kept. Here no mix is kept, which saves one for each route and site of memory and
// costs a second reading of the sources, and the norm's backward is folded in: dx comes in, x and dh go out.
void test_network(Arch arch, double forward, double backward_if_kept) {
  TEST(format("traffic of 16 layers in 8 blocks, %s", ARCH_NAMES[int(arch)]));
  Config c;
  c.arch = arch, c.L = 16, c.C = 256, c.NH = 4, c.F = 8, c.S = 4, c.T = 8, c.V = 17;
  const auto [ahead, sites, bank] = test_blocks(c, 0, 32);
  CHECK(ahead <= ALLOWED * forward);
  // Making the mixes again is the forward's reading once more; next to nothing comes on top of the two tables.
  CHECK(sites + bank <= ALLOWED * (backward_if_kept + forward));
}

void test_traffic() {
  if (!emu::COUNTS_TRAFFIC) {
    TEST("traffic of the depth routes");
    SKIP("only the emulator's race build counts bytes");
    return;
  }
  Config s;  // preset s, and what the routes take of m
  s.L = 11, s.C = 576, s.NH = 9, s.F = 8, s.S = 4, s.T = 8, s.V = 17;
  Config m = s;
  m.L = 19, m.C = 832, m.NH = 13, m.S = 6;
  for (Arch arch : {Arch::rd, Arch::block}) {
    s.arch = m.arch = arch;
    test_block(s, 16), test_block(m, 30);
  }
  test_network(Arch::block, 6.25, 7.375), test_network(Arch::rd, 6.75, 8.125);
}
// The bytes that functions state for --profile, against those that their kernels move: formulas that are wrong
// would show bandwidths that nobody reached.
void test_stated_bytes() {
  TEST("bytes stated for --profile");
  if (!emu::COUNTS_TRAFFIC) {
    SKIP("only the emulator's race build counts bytes");
    return;
  }
  constexpr size_t B = 2, T = 128, BT = B * T, C = 576, NH = 9, V = 1000, Vp = 1024, n = BT * C;
  Array<bf16> x(normals<bf16>(n)), y(normals<bf16>(n)), z(normals<bf16>(n)), out(n);
  Array<bf16> wte(normals<bf16>(V * C)), qkv(normals<bf16>(3 * n)), logits(normals<bf16>(BT * Vp));
  Array<float> w(Numbers(C, 1)), dw(Numbers(C, 0)), rstd(Numbers(BT, 1)), rows(gpu::token_blocks() * C);
  Array<float> p(normals<float>(n)), m(normals<float>(n)), v(Numbers(n, 1)), g(normals<float>(n)), losses(BT);
  Array<float> angles(Numbers(T * C / NH, 0));
  std::vector<int> ids(BT);
  for (size_t i = 0; i < BT; i++) ids[i] = int(i * 3);
  int* tokens = nullptr;
  CUDA_CHECK(cudaMalloc(&tokens, BT * sizeof(int)));
  gpu::upload(tokens, ids.data(), BT);
  double* sums = nullptr;
  CUDA_CHECK(cudaMalloc(&sums, gpu::ceil_div(n, SHARE_CHUNK) * sizeof(double)));
  CUDA_CHECK(cudaStreamSynchronize(gpu::device.stream));

  emu::count_traffic(true);
  gpu::profile.on = true;
  gpu::embedding_forward<bf16>(out, tokens, wte, BT, C);
  gpu::rmsnorm_forward<bf16>(out, rstd, x, w, BT, C);
  gpu::rmsnorm_backward<bf16>(out, dw, x, y, rstd, w, rows, BT, C);
  const float* turns = angles;
  gpu::rope_forward<bf16>(qkv, reinterpret_cast<const float2*>(turns), B, T, C, NH);
  gpu::swiglu_forward<bf16>(out, x, y, n);
  gpu::swiglu_backward<bf16>(x, y, z, out, x, y, n);
  gpu::cross_entropy<bf16>(losses, logits, tokens, 1, true, BT, V, Vp);
  gpu::global_norm(g, sums, n);
  gpu::adamw<bf16>(p, out, m, v, g, n, 1, 1e-3, 0.1, 1);
  gpu::profile.end_step();
  for (const auto& [function, kernel] : std::initializer_list<std::pair<const char*, const char*>>{
           {"embedding_forward", "embedding_forward_kernel"},
           {"rmsnorm_forward", "rmsnorm_forward_kernel"},
           {"rmsnorm_backward", "rmsnorm_backward_kernel"},
           {"rope_forward", "rope_kernel"},
           {"swiglu_forward", "swiglu_forward_kernel"},
           {"swiglu_backward", "swiglu_backward_kernel"},
           {"cross_entropy", "cross_entropy_kernel"},
           {"global_norm", "square_sums_kernel"},
           {"adamw", "adamw_kernel"}}) {
    const Moved moved = moved_by(function, kernel);
    printf("       %-18s %8.0f bytes stated, %8.0f moved, ratio %.3f\n", function, moved.stated, moved.counted,
           moved.counted / moved.stated);
    CHECK(moved.stated <= moved.counted && moved.counted <= ALLOWED * moved.stated);
  }
  emu::count_traffic(false);
  gpu::profile.finish(1);
  CUDA_CHECK(cudaFree(tokens));
  CUDA_CHECK(cudaFree(sums));
}
#endif

void test_matrix_rate() {
  TEST("the card's matrix rate is measured");
  const size_t before = gpu::device.products.size();
  const double rate = gpu::measure_matrix_rate(EMULATED ? 64 : 4096);
  if (!EMULATED) printf("       %.1f TFLOP/s\n", rate / 1e12);
  CHECK(rate > 0 && std::isfinite(rate));
  CHECK(gpu::device.products.size() <= before + 1);
}

template <class X>
void test_all() {
  test_embedding<X>(75, 48, 131), test_embedding<X>(64, 576, 17);
  for (size_t K = 1; K <= 9;
       K++)  // S = 1: every slot is finished; the only site is the one that reads K of them
    if (K > 1) test_route<X>({48, 1, K - 1, 1, false, 1, false}, 37);
  test_route<X>({48, 2, 4, 2, false, 1, false}, 37), test_route<X>({48, 2, 4, 2, true, 0, false}, 37);
  test_route<X>({48, 4, 8, 4, true, 1, true}, 37), test_route<X>({48, 4, 0, 3, true, 1, false}, 3);
  test_route<X>({48, 8, 8, 8, true, 1, false}, 19);    // 13 routes: two groups
  test_route<X>({576, 4, 24, 4, false, 1, false}, 7);  // as in presets s and m
  test_route<X>({832, 6, 42, 6, true, 1, false}, 5);
  for (size_t C : {832, 1024})  // 12 routes: as much shared memory as a block gets on any card (EMU_CARD)
    test_route<X>({C, 8, 8, 8, false, 1, false}, 5);
  test_route<X>({264, 4, 4, 4, false, 1, true}, 6), test_route<X>({1024, 2, 2, 2, true, 1, false}, 5);
  for (size_t C : {576, 832, 1024}) test_route<X>({C, 2, 2, 2, false, 1, true}, 5);  // average, every width
  test_walks<X>(131, 48), test_walks<X>(29, 264);
  test_rmsnorm<X>(37, 48), test_rmsnorm<X>(5, 832);
  test_matmul<X>(37, 48, 96), test_matmul<X>(20, 576, 64);
  test_matmul<X>(1000, 16, 24);  // long sums: what truncating takes grows with them
  test_rope<X>(2, 37, 48, 3), test_rope<X>(1, 19, 64, 2), test_rope<X>(1, 9, 576, 9);
  for (size_t HS : {16, 32, 48, 64, 80, 96, 112, 128})
    test_attention<X>(HS == 16 ? 2 : 1, HS == 64 ? 150 : 70, HS, HS == 16 ? 3 : 1);
  test_attention<X>(1, 37, 16, 4), test_attention<X>(1, 1, 64, 1), test_attention<X>(1, 64, 64, 1),
      test_attention<X>(2, 65, 16, 1);
  test_swiglu<X>(37 * 104);
  test_classifier<X>(37, 48, 131, 16), test_classifier<X>(9, 64, 5003, 9);
  test_route<X>({48, 4, 8, 4, true, 1, false}, 37, EXTREME), test_classifier<X>(37, 48, 131, 16, EXTREME);
  for (size_t HS : {16, 64}) test_attention<X>(1, 70, HS, 2, std::sqrt(EXTREME));
}

void test_profile_table() {
  TEST("the table of --profile: per step, dearest first; no times where they mean nothing");
  const std::vector<gpu::ProfileRow> rows = {{"swiglu_forward", 20, 5, 10e9, 0},
                                             {"matmul_forward 8 x 4 x 2", 40, 15, 0, 3e12},
                                             {"model_forward", 10, 0, 0, 0}};
  std::string profile = gpu::profile_table(rows, 10, true);
  printf("%s", profile.c_str());
  CHECK_EQ(profile,
           "profile of 10 steps, 2.000 ms each, the events' own time included\n"
           "  calls  ms/step  share   MB/step    GB/s  GFLOP/step  TFLOP/s\n"
           "      4    1.500  75.0%         -       -      300.00    200.0  matmul_forward 8 x 4 x 2\n"
           "      2    0.500  25.0%   1000.00    2000           -        -  swiglu_forward\n"
           "      1    0.000   0.0%         -       -           -        -  model_forward\n");
  profile = gpu::profile_table(rows, 1, false);
  CHECK(profile.compare(0, 40, "profile of 1 step, emulated: no times\n  ") == 0);
  const std::string row = "     20        -     -   10000.00       -           -        -  swiglu_forward\n";
  CHECK(profile.find(row) != std::string::npos);
  CHECK(profile.find('%') == std::string::npos);
}

int main() {
  gpu::device_open();
  test_all<float>();
  test_all<bf16>();
  test_optimiser(1000), test_optimiser(300004);
  test_profile_table();
  test_matrix_rate();
  test_traffic();
  test_stated_bytes();
  gpu::device_close();
  return finish();
}
