// test_model.cpp - the whole model of the CPU trainer: depth memory, arms, gradients, optimiser.
//
// Against tests/reference.h, which keeps bank and partial as an explicit list, and gets gradients from the
// chain rule; against central differences of the trainer's own loss; and against what must be equal bit for
// bit: arms that are one function, any number of threads, any batch size. Parameters are random throughout,
// queries and gains included: zero queries would hide swapped routes.
#include <unistd.h>

#include <numeric>
#include <set>
#include <tuple>

#include "tests/check.h"      // TEST, CHECK, finish
#include "tests/compare.h"    // same_bits, check_error
#include "tests/reference.h"  // the model from its definition, gradients without a backward

// Two builds of the trainer: a call goes to the one whose numbers it is given.
#define TESTING
#define CPU_NAMESPACE cpu_float
#define REAL float
#include "train_rdattnres_cpu.cpp"
#define CPU_NAMESPACE cpu_double
#define REAL double
#include "train_rdattnres_cpu.cpp"
using namespace cpu_float;
using namespace cpu_double;

using reference::Params;
using reference::Random;
using reference::Tape;
using reference::Var;

const Arch ARCHS[] = {Arch::rd, Arch::block, Arch::tied, Arch::average, Arch::frozen_v, Arch::residual};
const char* name_of(Arch arch) { return ARCH_NAMES[int(arch)]; }

const std::set<std::string> MATRICES = {"wte", "wqk", "wv", "wo", "w_gate", "w_up", "w_down"};
const std::set<std::string> QUERIES = {"attn_route_qk", "attn_route_v", "mlp_route", "out_route"};

Config config_of(Arch arch, size_t L, size_t S, size_t C, size_t NH, size_t F, size_t T, size_t V) {
  Config c;
  std::tie(c.arch, c.L, c.S, c.C, c.NH, c.F, c.T, c.V) = std::tie(arch, L, S, C, NH, F, T, V);
  return c;
}
// The tensors that an arm has.
std::vector<TensorSpec> tensors_of(const Config& c) {
  std::vector<TensorSpec> present;
  for (const TensorSpec& t : tensor_table(c))
    if (t.present) present.push_back(t);
  return present;
}
// For gradients by the chain rule, where every operation is kept; and the sizes of the design's tests.
Config small_config(Arch arch, size_t L, size_t S) { return config_of(arch, L, S, 12, 3, 20, 9, 37); }
Config full_config(Arch arch, size_t S) { return config_of(arch, 3, S, 48, 3, 80, 37, 131); }

// ---- parameters and batches --------------------------------------------------------------------------

// Every tensor by name. A tensor's numbers depend on its name, size and the seed only: arms share them.
Params<double> random_params(const Config& c, uint64_t seed) {
  Params<double> params;
  for (const TensorSpec& t : tensors_of(c)) {
    Random random(seed * 1000 + t.id);
    std::vector<double>& w = params[t.name];
    if (t.kind == Kind::norm || t.kind == Kind::gain)
      w = random.normals(t.size(), 1, 0.3);
    else if (t.kind == Kind::query)
      w = random.normals(t.size(), 0, 0.4);
    else if (t.kind == Kind::embedding)
      w = random.normals(t.size(), 0, 0.7);
    else
      w = random.normals(t.size(), 0, 1 / std::sqrt(double(t.shape.back())));
    if (t.id == TENSOR_wte) std::fill(w.begin() + long(c.V * c.C), w.end(), 0.0);  // padding
  }
  return params;
}

struct Batch {
  size_t B;
  std::vector<int> tokens, targets;
  Batch(const Config& c, size_t B, uint64_t seed) : B(B) {
    Random random(seed);
    tokens = random.integers(B * c.T, c.V);
    targets = random.integers(B * c.T, c.V);
  }
};

// A model of the float or the double build, of contexts of T tokens.
template <class real>
struct TestModel : std::conditional_t<std::is_same<real, float>::value, cpu_float::Model, cpu_double::Model> {
  TestModel(const Config& c, size_t B, uint64_t seed) { model_create(*this, c, B, c.T, seed); }
  TestModel(const Config& c, size_t B, const Params<double>& values) : TestModel(c, B, 1) { set(values); }
  TestModel(const Config& c, const Batch& batch, const Params<double>& values) : TestModel(c, batch.B, values) {
    loss_and_gradients(batch);
  }
  TestModel(const TestModel&) = delete;
  ~TestModel() { model_free(*this); }

  void set(const Params<double>& values) {
    for (const TensorSpec& t : tensors_of(this->config)) {
      const std::vector<double>& w = values.at(t.name);
      std::copy(w.begin(), w.end(), this->params.tensor(t.id));
    }
  }
  void forward(const Batch& batch) { model_forward(*this, batch.tokens.data(), batch.B, this->T); }
  double loss_and_gradients(const Batch& batch, size_t accumulation = 1) {
    return model_loss_and_gradients(*this, batch.tokens.data(), batch.targets.data(), batch.B, this->T,
                                    accumulation);
  }
};

template <class real>
std::vector<real> all_of(real* family, size_t n) {
  return std::vector<real>(family, family + n);
}
// Logits of the last forward: what the head reads times wte. (B,T,V)
template <class Model>
auto logits_of(const Model& m, size_t BT) {
  using real = std::remove_reference_t<decltype(*m.acts.x)>;
  const Config& c = m.config;
  const std::vector<real> x(m.acts.x, m.acts.x + BT * c.C);
  return reference::linear(x, m.params.wte, BT, c.C, c.V);
}

// ---- against the model written from its definition ---------------------------------------------------

// Everything that a forward and backward compute, as named arrays.
template <class X>
using Named = std::map<std::string, std::vector<X>>;

template <class real>
Named<real> run_trainer(const Config& c, const Params<double>& params, const Batch& batch) {
  const size_t BT = batch.B * c.T;
  TestModel<real> m(c, batch, params);
  Named<real> out;
  for (const TensorSpec& t : tensors_of(c))
    out[std::string("d ") + t.name] = all_of(m.grads.tensor(t.id), t.size());
  out["losses"] = all_of(m.acts.losses, BT);
  m.forward(batch);
  out["logits"] = logits_of(m, BT);
  for (size_t i = 0; i <= c.sublayers(); i++) {
    const auto site = site_at(m, i, BT);
    for (size_t r = 0; r < site.R; r++)
      out[format("routes %zu.%zu", i, r)] = all_of(site.p + r * BT * site.K, BT * site.K);
  }
  for (size_t l = 0; l < c.L; l++) out[format("lse %zu", l)] = all_of(m.acts.lse + l * c.NH * BT, c.NH * BT);
  return out;
}

template <class X>
Named<X> run_reference(const Config& c, const Params<double>& params, const Batch& batch, bool gradients) {
  using reference::run_model;
  Named<X> out;
  Params<X> w;
  for (const auto& item : params) w[item.first] = std::vector<X>(item.second.begin(), item.second.end());
  const reference::Run<X> run = run_model(c, w, batch.tokens, batch.targets, batch.B, c.T);
  out["logits"] = run.logits;
  out["losses"] = run.losses;
  for (size_t i = 0; i < run.routes.size(); i++)
    for (size_t r = 0; r < run.routes[i].size(); r++) out[format("routes %zu.%zu", i, r)] = run.routes[i][r].p;
  for (size_t l = 0; l < c.L; l++) out[format("lse %zu", l)] = run.attention[l].lse;
  if (!gradients) return out;

  Tape<X>::get().clear();
  Params<Var<X>> vars;
  for (const auto& item : params)
    for (double value : item.second) vars[item.first].push_back(Var<X>::input(X(value)));
  const std::vector<X> d =
      reference::tape_gradients(run_model(c, vars, batch.tokens, batch.targets, batch.B, c.T).mean_loss);
  for (const auto& item : vars)
    for (const Var<X>& var : item.second) out["d " + item.first].push_back(d[var.node]);
  return out;
}

// Errors of one arm in several shapes. The tensors of one model share their errors (a loss is one chain of
// layers), and how much a model amplifies a rounding is a matter of luck: the worst that the plain loops do in
// any shape is the yardstick for all.
struct Comparison {
  std::vector<std::pair<std::string, Error>> errors[2];  // outputs, gradients
  Error worst[2], yardstick[2];
};

template <class real>
void compare(Comparison& comparison, const Config& c, const Params<double>& params, const Batch& batch,
             const Named<long double>& exact) {
  const Named<real> ours = run_trainer<real>(c, params, batch);
  const Named<real> plain = run_reference<real>(c, params, batch, true);
  CHECK_EQ(ours.size(), exact.size());
  for (const auto& item : exact) {
    const std::string& name = item.first;
    if (!CHECK(ours.count(name) == 1)) continue;
    const bool gradient = name.substr(0, 2) == "d ";
    const Error error = error_of(ours.at(name), item.second), of_plain = error_of(plain.at(name), item.second);
    if (sizeof(real) == sizeof(double)) CHECK_CLOSE(error.largest, 0, gradient ? 1e-10 : 1e-12);
    comparison.errors[gradient].push_back({format("S=%zu L=%zu: %s", c.S, c.L, name.c_str()), error});
    comparison.worst[gradient] = larger(comparison.worst[gradient], error);
    comparison.yardstick[gradient] = larger(comparison.yardstick[gradient], of_plain);
  }
}

template <class real>
void check_comparison(const Comparison& comparison) {
  for (int gradient : {0, 1}) {
    for (const auto& item : comparison.errors[gradient])
      check_error<real>(item.first, item.second, comparison.yardstick[gradient]);
    printf("  %7.1e %7.1e", comparison.worst[gradient].rms, comparison.yardstick[gradient].rms);
  }
}

void test_against_reference() {
  printf(
      "  rms of errors, relative: ours, plain    float outputs    float gradients   double outputs  "
      "double gradients\n");
  for (Arch arch : ARCHS) {
    TEST(std::string("logits, losses, routes and all gradients against the definition: ") + name_of(arch));
    const size_t shapes[][2] = {{3, 2}, {3, 4}, {3, 1}, {3, 6}, {1, 2}, {2, 4}, {4, 6}, {3, 8}};
    Comparison in_float, in_double;
    for (const size_t* shape : shapes) {
      const Config c = small_config(arch, shape[0], shape[1]);
      const Params<double> params = random_params(c, 10 * c.L + c.S);
      const Batch batch(c, 2, 7);
      const Named<long double> exact = run_reference<long double>(c, params, batch, true);
      compare<float>(in_float, c, params, batch, exact);
      compare<double>(in_double, c, params, batch, exact);
    }
    printf("  %-36s", name_of(arch));
    check_comparison<float>(in_float);
    check_comparison<double>(in_double);
    printf("\n");
  }
}

// The sizes of the design's tests: forward only against long double.
void test_full_size_against_reference() {
  TEST("T=37 C=48 V=131: logits, losses and routes against the definition");
  for (size_t S : {2, 4}) {
    const Config c = full_config(Arch::rd, S);
    const Params<double> params = random_params(c, S);
    const Batch batch(c, 2, 8);
    const Named<long double> exact = run_reference<long double>(c, params, batch, false);
    const Named<double> ours = run_trainer<double>(c, params, batch);
    double worst = 0;
    for (const auto& item : exact) worst = std::fmax(worst, error_of(ours.at(item.first), item.second).largest);
    printf("  rd S=%zu, double: largest error over rms %.1e\n", S, worst);
    CHECK_CLOSE(worst, 0, 1e-12);
  }
}

// ---- central differences -----------------------------------------------------------------------------

// Fourth order: (8 d(h) - d(2h)) / 12h, d(h) = loss(w + h direction) - loss(w - h direction).
double slope(TestModel<double>& m, const Batch& batch, double* w, const std::vector<double>& direction,
             double h) {
  const std::vector<double> before = all_of(w, direction.size());
  auto loss = [&](double step) {
    for (size_t i = 0; i < direction.size(); i++) w[i] = before[i] + step * direction[i];
    return model_loss(m, batch.tokens.data(), batch.targets.data(), batch.B, m.T);
  };
  const double result = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h);
  std::copy(before.begin(), before.end(), w);
  return result;
}

// Per tensor: single elements, and one random direction through all elements at once. Relative to the larger of
// the slope itself and what is usual for the tensor.
void check_differences(const Config& c, size_t B, int samples) {
  const Batch batch(c, B, 9);
  TestModel<double> m(c, batch, random_params(c, 100 + c.S));
  double worst = 0;
  std::string where;
  Random random(c.S);
  for (const TensorSpec& t : tensors_of(c)) {
    const size_t n = t.id == TENSOR_wte ? c.V * c.C : t.size();
    double *w = m.params.tensor(t.id), *g = m.grads.tensor(t.id);
    for (int sample = 0; sample <= samples; sample++) {
      std::vector<double> direction(n);
      if (sample < samples)
        direction[random.next() % n] = 1;
      else
        direction = random.normals(n, 0, 0.3);
      double want = 0;
      for (size_t i = 0; i < n; i++) want += g[i] * direction[i];
      const double got = slope(m, batch, w, direction, 1e-3 * rms(w, n));
      // A first attention site has one source: its query and gain have no effect, and a gradient of exactly
      // zero.
      const double usual = rms(g, n) * rms(direction) * std::sqrt(double(n));
      const double scale = std::fmax(std::fabs(want), usual);
      const double error = std::fabs(got - want) / (scale > 0 ? scale : 1);
      if (error <= worst) continue;
      worst = std::isfinite(error) ? error : INFINITY;
      where = t.name;
    }
  }
  printf("  %-9s L=%zu S=%zu T=%zu C=%zu: worst relative error %.1e (%s)\n", name_of(c.arch), c.L, c.S, c.T,
         c.C, worst, where.c_str());
  CHECK_CLOSE(worst, 0, 1e-6);
}

void test_central_differences() {
  const size_t shapes[][2] = {{3, 2}, {3, 4}, {3, 1}, {3, 6}};
  for (Arch arch : ARCHS) {
    TEST(std::string("gradient of every tensor against central differences: ") + name_of(arch));
    for (const size_t* shape : shapes) check_differences(small_config(arch, shape[0], shape[1]), 2, 3);
  }
  TEST("gradient of every tensor against central differences: T=37 C=48 V=131");
  for (size_t S : {2, 4}) check_differences(full_config(Arch::rd, S), 1, 2);
}

// ---- training steps that must give the same bits -----------------------------------------------------

// Losses and gradients of every step, then parameters and moments after the last, one after the other.
template <class real>
std::vector<double> train(const Config& c, size_t B, size_t accumulation, size_t steps, int threads) {
  set_threads(threads);
  TestModel<real> m(c, B, random_params(c, 3));
  std::vector<double> path;
  const auto append = [&](const Tensors<real>& family) {
    path.insert(path.end(), family.wte, family.wte + m.num_elements);
  };
  for (size_t step = 1; step <= steps; step++) {
    model_zero_grad(m);
    for (size_t micro = 0; micro < accumulation; micro++)
      path.push_back(m.loss_and_gradients(Batch(c, B, step * 100 + micro), accumulation));
    append(m.grads);
    model_update(m, step, std::fmin(1, 1 / grad_norm(m)), 3e-3, 0.1, 2.0);
  }
  for (const Tensors<real>* family : {&m.params, &m.adam_m, &m.adam_v}) append(*family);
  set_threads(1);
  return path;
}

template <class real>
void check_tied_is_block(size_t S) {
  for (size_t accumulation : {1, 3}) {
    const auto block = train<real>(full_config(Arch::block, S), 2, accumulation, 10, 1);
    for (int threads : {1, 3})
      CHECK(same_bits(train<real>(full_config(Arch::tied, S), 2, accumulation, 10, threads), block));
    const auto rd = train<real>(full_config(Arch::rd, S), 2, accumulation, 1, 1);
    CHECK(rd[0] != block[0]);  // the comparison can fail
  }
}

void test_tied_is_block() {
  TEST("tied equals block bit for bit: losses, gradients, parameters, moments over ten steps");
  check_tied_is_block<float>(2);
  check_tied_is_block<float>(4);
  check_tied_is_block<double>(2);
}

void test_threads() {
  TEST("1, 2, 3 and 8 threads: the same bits");
  for (Arch arch : ARCHS) {
    Config c = full_config(arch, 4);
    if (arch == Arch::rd) c.C = 42;  // rows that do not start where a vector register would like
    const size_t steps = arch == Arch::rd ? 3 : 1;
    const auto one = train<float>(c, 3, 2, steps, 1);
    for (int threads : {2, 3, 8}) CHECK(same_bits(train<float>(c, 3, 2, steps, threads), one));
  }
}

// ---- zero queries ------------------------------------------------------------------------------------

// Relative error over the tensors of both that are not part of a route.
double weight_gradient_difference(TestModel<double>& a, TestModel<double>& b) {
  double worst = 0;
  for (const TensorSpec& t : tensor_table(a.config))
    if (!strstr(t.name, "route"))
      worst = std::fmax(worst, error_of(a.grads.tensor(t.id), b.grads.tensor(t.id), t.size()).largest);
  return worst;
}

// A stream of rms sigma makes eps count as eps / sigma^2 would. Matrices that write to the stream grow by
// sigma, the final norm shrinks by it, so that the logits stay as they are.
void test_zero_queries() {
  TEST("queries at zero: every arm computes what residual does, up to eps");
  for (size_t S : {1, 2, 4, 6}) {
    double difference[2][2] = {};  // [sigma][logits, gradients]
    for (int large : {0, 1}) {
      const double sigma = large ? 1000 : 1;
      const Batch batch(full_config(Arch::rd, S), 2, 11);
      auto scaled_params = [&](Arch arch) {
        Params<double> params = random_params(full_config(arch, S), 12);
        for (auto& item : params) {
          const std::string& name = item.first;
          const bool writes = name == "wte" || name == "wo" || name == "w_down";
          const double scale = QUERIES.count(name) ? 0 : writes ? sigma : name == "final_norm" ? 1 / sigma : 1;
          for (double& w : item.second) w *= scale;
        }
        return params;
      };
      const auto logits = [&](TestModel<double>& m) {
        m.forward(batch);  // the backward has used x for other sites
        return logits_of(m, 2 * m.T);
      };
      TestModel<double> residual(full_config(Arch::residual, S), batch, scaled_params(Arch::residual));
      TestModel<double> block(full_config(Arch::block, S), batch, scaled_params(Arch::block));
      const std::vector<double> want = logits(residual), of_block = logits(block);
      for (Arch arch : {Arch::rd, Arch::block, Arch::tied, Arch::average, Arch::frozen_v}) {
        TestModel<double> m(full_config(arch, S), batch, scaled_params(arch));
        const std::vector<double> got = logits(m);
        CHECK(same_bits(got, of_block));  // among the arms with routes: no difference at all
        difference[large][0] = std::fmax(difference[large][0], error_of(got, want).largest);
        difference[large][1] = std::fmax(difference[large][1], weight_gradient_difference(m, residual));
        CHECK_CLOSE(weight_gradient_difference(m, block), 0, 1e-11);
      }
    }
    printf("  S=%zu  logits differ by %.1e, gradients by %.1e; with eps a million times smaller %.1e, %.1e\n",
           S, difference[0][0], difference[0][1], difference[1][0], difference[1][1]);
    for (int what : {0, 1}) {
      CHECK_CLOSE(difference[1][what], 0, 1e-9);
      CHECK_CLOSE(difference[0][what], 0, 1e-3);
      CHECK(difference[0][what] > 1e4 * difference[1][what]);  // so it is eps, and nothing else
    }
  }
}

// ---- the depth memory --------------------------------------------------------------------------------

struct SourceTable {
  size_t L, S;
  std::vector<std::vector<size_t>> slots;
  std::vector<size_t> bank;
};
// slots[i]: what site i reads; slot 0 is the embedding, slot n the partial after n sublayers.
// bank[n]: the block that slot n belongs to; 0 is the embedding.
const std::vector<SourceTable> SOURCE_TABLES = {
    {2, 2, {{0}, {0, 1}, {0, 2}, {0, 2, 3}, {0, 2, 4}}, {0, 1, 1, 2, 2}},
    {2, 1, {{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}}, {0, 1, 2, 3, 4}},
    {2, 4, {{0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}}, {0, 1, 1, 1, 1}},
    {3, 4, {{0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 4, 5}, {0, 4, 6}}, {0, 1, 1, 1, 1, 2, 2}},
    {3, 6, {{0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 5}, {0, 6}}, {0, 1, 1, 1, 1, 1, 1}},
    {4,
     6,
     {{0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 5}, {0, 6}, {0, 6, 7}, {0, 6, 8}},
     {0, 1, 1, 1, 1, 1, 1, 2, 2}},
    {1, 2, {{0}, {0, 1}, {0, 2}}, {0, 1, 1}},
    {2, 8, {{0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}}, {0, 1, 1, 1, 1}},  // a block longer than the network
};

void test_source_table() {
  TEST("sources of every site, against a literal table");
  size_t sites = 0;
  for (const SourceTable& table : SOURCE_TABLES) {
    const Config c = small_config(Arch::rd, table.L, table.S);
    CHECK_EQ(table.slots.size(), c.sublayers() + 1);
    for (size_t i = 0; i < table.slots.size(); i++, sites++) {
      CHECK(c.source_slots(i) == table.slots[i]);
      CHECK_EQ(c.num_sources(i), table.slots[i].size());
      CHECK_EQ(c.bank_index(i), table.bank[i]);
    }
    CHECK_EQ(c.blocks(), table.bank.back());
    CHECK_EQ(c.max_sources(), table.slots.back().size());
  }
  printf("  %zu sites of %zu networks\n", sites, SOURCE_TABLES.size());
}

// Moves one slot of the stream after a forward and lets every site read again: exactly those that have it among
// their sources read something else.
void test_who_sees_a_block() {
  TEST("moving one slot of the depth memory moves exactly its readers");
  size_t moved = 0, still = 0;
  for (const SourceTable& table : SOURCE_TABLES) {
    const Config c = small_config(Arch::rd, table.L, table.S);
    const size_t B = 2, BT = B * c.T, n = BT * c.C;
    TestModel<double> m(c, B, random_params(c, 13));
    const Batch batch(c, B, 14);
    m.forward(batch);
    for (size_t slot = 0; slot <= c.sublayers(); slot++)
      for (size_t i = 0; i <= c.sublayers(); i++) {
        const auto site = site_at(m, i, BT);
        read_sources(m, site, BT, cpu_double::Weights::find);
        const std::vector<double> h = all_of(m.acts.h, site.R * n);
        double* source = m.acts.stream + slot * n;
        const std::vector<double> kept = all_of(source, n), noise = Random(15).normals(n);
        for (size_t k = 0; k < n; k++) source[k] += noise[k];
        source_rstd(m.acts.rstd + slot * BT, source, BT, c.C);
        read_sources(m, site, BT, cpu_double::Weights::find);
        const std::vector<size_t>& sources = table.slots[i];
        const bool reads = std::find(sources.begin(), sources.end(), slot) != sources.end();
        for (size_t k = 0; k < site.R * n; k++) CHECK_EQ(m.acts.h[k] != h[k], reads);
        (reads ? moved : still)++;
        std::copy(kept.begin(), kept.end(), source);
        source_rstd(m.acts.rstd + slot * BT, source, BT, c.C);
      }
  }
  printf("  %zu reads moved, %zu stayed\n", moved, still);
}

// Scaling what sublayer i writes changes the stream after it and nothing before it.
void test_depth_causality() {
  TEST("a sublayer's weights move the stream after it, and nothing before");
  for (Arch arch : ARCHS)
    for (size_t S : {2, 4}) {
      const Config c = small_config(arch, 3, S);
      const size_t BT = 2 * c.T, n = BT * c.C;
      const Batch batch(c, 2, 16);
      TestModel<double> m(c, 2, random_params(c, 17));
      m.forward(batch);
      const std::vector<double> stream = all_of(m.acts.stream, (c.sublayers() + 1) * n);
      for (size_t i = 0; i < c.sublayers(); i++) {
        double* w = i % 2 == 0 ? m.params.wo + i / 2 * c.C * c.C : m.params.w_down + i / 2 * c.C * c.F;
        w[5] += 0.5;
        m.forward(batch);
        for (size_t slot = 0; slot <= c.sublayers(); slot++)
          CHECK_EQ(same_bits(m.acts.stream + slot * n, &stream[slot * n], n), slot <= i);
        w[5] -= 0.5;
        m.set(random_params(c, 17));
      }
    }
}

// ---- the roles of the two queries --------------------------------------------------------------------

// Which of Q, K and V of layer l change when one element of a tensor of that layer moves.
std::string moved_parts(Arch arch, const std::string& tensor, size_t l) {
  const Config c = small_config(arch, 3, 2);
  const size_t n = 2 * c.T * 3 * c.C;
  std::vector<double> qkv[2];
  for (int changed : {0, 1}) {
    Params<double> params = random_params(c, 19);
    params.at(tensor)[l * c.C + 3] += 0.25 * changed;
    TestModel<double> m(c, 2, params);
    m.forward(Batch(c, 2, 18));
    qkv[changed] = all_of(m.acts.qkv + l * n, n);
  }
  std::string moved;
  for (size_t part = 0; part < 3; part++)
    for (size_t i = 0; i < n; i++)
      if (i / c.C % 3 == part && qkv[0][i] != qkv[1][i]) {
        moved += "QKV"[part];
        break;
      }
  return moved;
}

void test_roles() {
  TEST("query_v moves V alone, query_qk moves Q and K alone, the gain moves all three");
  struct Want {
    Arch arch;
    const char *tensor, *moved;
  };
  const Want wants[] = {
      {Arch::rd, "attn_route_v", "V"},         {Arch::rd, "attn_route_qk", "QK"},
      {Arch::rd, "attn_route_gain", "QKV"},    {Arch::rd, "attn_norm", "QKV"},
      {Arch::average, "attn_route_v", "QKV"},  {Arch::average, "attn_route_qk", "QKV"},
      {Arch::frozen_v, "attn_route_qk", "QK"}, {Arch::frozen_v, "attn_route_gain", "QK"},
      {Arch::block, "attn_route_qk", "QKV"},   {Arch::block, "attn_route_gain", "QKV"},
      {Arch::tied, "attn_route_qk", "QKV"},    {Arch::tied, "attn_route_gain", "QKV"},
      {Arch::residual, "attn_norm", "QKV"},
  };
  for (size_t l : {1, 2})
    for (const Want& want : wants) CHECK_EQ(moved_parts(want.arch, want.tensor, l), std::string(want.moved));
  CHECK_EQ(moved_parts(Arch::rd, "attn_route_v", 0), std::string());  // one source: nothing to choose
}

// Arms as special cases of rd: V's query at zero is frozen-v, both queries equal is tied, and the average of
// two equal mixes is the mix.
void test_arms() {
  TEST("frozen-v is rd with V's query at zero; average of equal queries is tied");
  const Config rd = small_config(Arch::rd, 3, 2);
  const size_t B = 2, BT = B * rd.T;
  const Batch batch(rd, B, 20);
  using Arm = TestModel<double>;
  const Params<double> random = random_params(rd, 21);  // the other arms have some of these tensors
  Params<double> zero = random, equal = random;
  std::fill(zero["attn_route_v"].begin(), zero["attn_route_v"].end(), 0.0);
  equal["attn_route_v"] = equal["attn_route_qk"];
  auto same_gradients = [](Arm& a, Arm& b, double tolerance) {
    for (const TensorSpec& t : tensor_table(a.config))
      if (a.grads.tensor(t.id) && b.grads.tensor(t.id) && t.id != TENSOR_attn_route_qk)
        CHECK_CLOSE(error_of(a.grads.tensor(t.id), b.grads.tensor(t.id), t.size()).largest, 0, tolerance);
  };
  Arm frozen(small_config(Arch::frozen_v, 3, 2), batch, random), rd_zero(rd, batch, zero);
  CHECK(frozen.grads.attn_route_v == nullptr && frozen.params.attn_route_v == nullptr);
  CHECK(same_bits(frozen.acts.losses, rd_zero.acts.losses, BT));
  same_gradients(frozen, rd_zero, 0);
  const size_t n = rd.L * rd.C;
  CHECK(same_bits(frozen.grads.attn_route_qk, rd_zero.grads.attn_route_qk, n));
  CHECK(rms(rd_zero.grads.attn_route_v, n) > 0);
  for (size_t l = 0; l < rd.L; l++) {
    const auto site = site_at(frozen, 2 * l, BT);
    for (size_t i = 0; i < BT * site.K; i++) CHECK_EQ(site.p[BT * site.K + i], 1 / double(site.K));
  }

  Arm average(small_config(Arch::average, 3, 2), batch, equal), rd_equal(rd, batch, equal);
  Arm tied(small_config(Arch::tied, 3, 2), batch, random);
  CHECK(same_bits(average.acts.losses, tied.acts.losses, BT));
  CHECK(same_bits(rd_equal.acts.losses, tied.acts.losses, BT));
  same_gradients(average, tied, 1e-12);
  same_gradients(rd_equal, tied, 1e-12);
  std::vector<double> sum(n);  // the two query gradients sum to the one
  for (size_t i = 0; i < n; i++) sum[i] = rd_equal.grads.attn_route_qk[i] + rd_equal.grads.attn_route_v[i];
  CHECK_CLOSE(error_of(sum.data(), tied.grads.attn_route_qk, n).largest, 0, 1e-12);
  CHECK(!same_bits(rd_equal.grads.attn_route_qk, rd_equal.grads.attn_route_v, n));
  for (size_t i = 0; i < n; i++) {  // each of the averaged queries gets half
    CHECK_CLOSE(average.grads.attn_route_qk[i], tied.grads.attn_route_qk[i] / 2, 1e-12);
    CHECK_CLOSE(average.grads.attn_route_v[i], tied.grads.attn_route_qk[i] / 2, 1e-12);
  }
}

void test_first_site() {
  TEST("the first attention site: gradients of queries and gain exactly zero, and nothing moves");
  for (Arch arch : ARCHS) {
    const Config c = full_config(arch, 2);
    const Params<double> params = random_params(c, 22);
    TestModel<float> m(c, 2, params);
    for (size_t step = 1; arch != Arch::residual && step <= 4; step++) {
      m.loss_and_gradients(Batch(c, 2, step));
      for (const TensorSpec& t : tensors_of(c)) {
        if (strncmp(t.name, "attn_route", 10) != 0) continue;
        for (size_t i = 0; i < c.C; i++) {
          CHECK_EQ(m.grads.tensor(t.id)[i], 0.0f);
          CHECK_EQ(double(m.params.tensor(t.id)[i]), params.at(t.name)[i]);
        }
        for (size_t l = 1; l < c.L; l++) CHECK(rms(m.grads.tensor(t.id) + l * c.C, c.C) > 0);
      }
      model_update(m, step, 1, 1e-2, 0.1, 1);
    }
  }
}

// ---- batches and time --------------------------------------------------------------------------------

void test_batch_shape() {
  TEST("losses of 8 rows are the same bits in batches of 8, 4, 3, 2 and 1");
  for (size_t C : {48, 42}) {
    Config c = full_config(Arch::rd, 2);
    c.C = C;
    const Params<double> params = random_params(c, 25);
    const Batch batch(c, 8, 26);
    TestModel<float> m(c, 8, params);
    model_loss(m, batch.tokens.data(), batch.targets.data(), 8, c.T);
    const std::vector<float> whole = all_of(m.acts.losses, 8 * c.T);
    for (size_t B : {1, 2, 3, 4}) {
      TestModel<float> small(c, B, params);
      for (auto* model : {&m, &small})  // buffers just large enough, or larger
        for (size_t row = 0; row < 8; row += B) {
          const size_t rows = std::min(B, 8 - row);
          model_loss(*model, &batch.tokens[row * c.T], &batch.targets[row * c.T], rows, c.T);
          CHECK(same_bits(model->acts.losses, &whole[row * c.T], rows * c.T));
        }
    }
  }
}

void test_time_causality() {
  TEST("a token changes nothing before itself, nothing in other rows, and something at and after itself");
  for (Arch arch : ARCHS) {
    const Config c = full_config(arch, 2);
    TestModel<float> m(c, 2, random_params(c, 27));
    Batch batch(c, 2, 28);
    m.forward(batch);
    const std::vector<float> before = logits_of(m, 2 * c.T);
    for (size_t t : {0, 17, 36}) {
      const int kept = batch.tokens[c.T + t];  // in the second row
      batch.tokens[c.T + t] = (kept + 1) % int(c.V);
      m.forward(batch);
      const std::vector<float> after = logits_of(m, 2 * c.T);
      for (size_t bt = 0; bt < 2 * c.T; bt++)
        CHECK_EQ(same_bits(&before[bt * c.V], &after[bt * c.V], c.V), bt < c.T + t);
      batch.tokens[c.T + t] = kept;
    }
  }
}

// Shorter texts than the buffers hold: the same logits as the beginning of a longer one.
void test_context() {
  TEST("the logits of a prefix do not depend on what follows; a long context keeps its last T tokens");
  const Config c = full_config(Arch::rd, 4);
  TestModel<float> m(c, 2, random_params(c, 29));
  const std::vector<int> text = Random(30).integers(c.T + 20, c.V);
  model_forward(m, text.data(), 1, c.T);
  const std::vector<float> x = all_of(m.acts.x, c.T * c.C);
  std::vector<float> logits, last;
  for (size_t n : {size_t(1), size_t(2), size_t(20), c.T}) {
    next_token_logits(m, std::vector<int>(text.begin(), text.begin() + long(n)), logits);
    CHECK_EQ(logits.size(), c.V);
    const std::vector<float> row(x.begin() + long((n - 1) * c.C), x.begin() + long(n * c.C));
    const std::vector<float> want = reference::linear(row, m.params.wte, 1, c.C, c.V);
    CHECK_CLOSE(error_of(logits, want).largest, 0, 1e-6);
  }
  next_token_logits(m, text, logits);
  next_token_logits(m, std::vector<int>(text.end() - long(c.T), text.end()), last);
  CHECK(same_bits(logits, last));
}

void test_validation() {
  TEST("validation: the mean over whole windows in order, the same bits for any B, and it touches nothing");
  const Config c = full_config(Arch::rd, 2);
  const Params<double> params = random_params(c, 31);
  std::vector<uint16_t> tokens(c.T * 7 + 5);
  for (size_t i = 0; i < tokens.size(); i++) tokens[i] = uint16_t(Random(i).next() % c.V);
  const TokenData data = TokenData::from_tokens(tokens, "test", c.V);
  std::vector<double> losses;
  for (size_t B : {1, 2, 3, 8}) {
    TestModel<float> m(c, Batch(c, B, 32), params);
    model_update(m, 1, 1, 0, 0, 1);  // moments that are not zero
    const auto everything = [&] {
      std::vector<float> all;
      for (const Tensors<float>* family : {&m.params, &m.grads, &m.adam_m, &m.adam_v})
        all.insert(all.end(), family->wte, family->wte + m.num_elements);
      return all;
    };
    const std::vector<float> before = everything();
    const auto result = validate(m, data, 5 * c.T + 3);
    CHECK(same_bits(before, everything()));
    CHECK_EQ(result.tokens, 5 * c.T);
    losses.push_back(result.loss);
    CHECK_EQ(result.loss, losses[0]);
    CHECK_EQ(validate(m, data, 1000 * c.T).tokens, 7 * c.T);
    // Against the windows one by one, and routes: each row of weights sums to 1.
    double sum = 0;
    std::vector<int> in(c.T), target(c.T);
    for (size_t w = 0; w < 5; w++) {
      std::copy_n(&tokens[w * c.T], c.T, in.begin());
      std::copy_n(&tokens[w * c.T + 1], c.T, target.begin());
      model_loss(m, in.data(), target.data(), 1, c.T);
      for (size_t t = 0; t < c.T; t++) sum += double(m.acts.losses[t]);
    }
    CHECK_EQ(result.loss, sum / double(5 * c.T));
    for (const auto* weights : {&result.routes.qk, &result.routes.v}) {
      CHECK_EQ(weights->size(), c.L);
      for (const std::vector<double>& layer : *weights)
        CHECK_CLOSE(std::accumulate(layer.begin(), layer.end(), 0.0), 1, 1e-6);
    }
  }
  printf("  loss %.9g for B = 1, 2, 3, 8\n", losses[0]);
}

// The picture of the routes, from the definition: JS = (KL(p||m) + KL(q||m)) / 2, m = (p + q) / 2, per token.
void test_route_stats() {
  TEST("route statistics: mean weights and Jensen-Shannon divergence");
  for (Arch arch : {Arch::rd, Arch::block, Arch::frozen_v}) {
    const Config c = small_config(arch, 3, 2);
    const size_t BT = 2 * c.T;
    const Params<double> params = random_params(c, 33);
    const Batch batch(c, 2, 34);
    TestModel<double> m(c, 2, params);
    m.forward(batch);
    RouteStats stats;
    add_route_stats(stats, m, BT);
    add_route_stats(stats, m, BT);  // adds
    const auto run = reference::run_model(c, params, batch.tokens, batch.targets, 2, c.T);
    for (size_t l = 0; l < c.L; l++) {
      const auto& routes = run.routes[2 * l];
      const size_t K = routes[0].p.size() / BT;
      std::vector<double> qk(K), v(K);
      double divergence = 0;
      for (size_t i = 0; i < BT * K; i++) {
        const double p = routes[0].p[i], q = routes.back().p[i], mid = (p + q) / 2;
        qk[i % K] += 2 * p;
        v[i % K] += 2 * q;
        divergence += p * std::log(p / mid) + q * std::log(q / mid);
      }
      CHECK_EQ(stats.qk[l].size(), K);
      CHECK_EQ(stats.v[l].size(), arch == Arch::block ? 0 : K);
      for (size_t j = 0; j < K; j++) CHECK_CLOSE(stats.qk[l][j], qk[j], 1e-11);
      for (size_t j = 0; j < stats.v[l].size(); j++) CHECK_CLOSE(stats.v[l][j], v[j], 1e-11);
      CHECK_CLOSE(stats.js_nats[l], divergence, 1e-11);
      CHECK((divergence > 0.1) == (arch != Arch::block && l > 0));
    }
  }
}

// ---- initial weights ---------------------------------------------------------------------------------

void test_initial_weights() {
  TEST("initial weights: shared by all arms, the documented spread, another seed other weights");
  TestModel<float> rd(full_config(Arch::rd, 2), 1, 5), other(full_config(Arch::rd, 2), 1, 6);
  std::set<float> firsts;
  for (const TensorSpec& t : tensors_of(rd.config)) {
    const float* w = rd.params.tensor(t.id);
    const std::string name = t.name;
    if (!MATRICES.count(name)) {
      for (size_t i = 0; i < t.size(); i++) CHECK_EQ(w[i], QUERIES.count(name) ? 0.0f : 1.0f);
      continue;
    }
    const bool writes = name == "wo" || name == "w_down";
    const size_t n = name == "wte" ? 131 * 48 : t.size();
    const double want = writes ? 0.02 / std::sqrt(6.0) : 0.02, got = rms(w, n);
    double mean = 0, kurtosis = 0;
    for (size_t i = 0; i < n; i++) {
      mean += double(w[i]) / double(n);
      kurtosis += std::pow(double(w[i]) / got, 4) / double(n);
    }
    printf("  %-8s deviation %.5f (documented %.5f), mean %+.5f, kurtosis %.2f\n", t.name, got, want, mean,
           kurtosis);
    CHECK_CLOSE(got, want, 5 * want / std::sqrt(2.0 * double(n)));
    CHECK_CLOSE(mean, 0, 5 * want / std::sqrt(double(n)));
    CHECK_CLOSE(kurtosis, 3, 5 * std::sqrt(24.0 / double(n)));
    std::set<float> distinct(w, w + n);
    CHECK(distinct.size() > n * 99 / 100);                       // layers are not copies of each other
    CHECK(firsts.insert(w[0] / float(want)).second);             // nor tensors
    for (size_t i = n; i < t.size(); i++) CHECK_EQ(w[i], 0.0f);  // padding rows
    CHECK(!same_bits(w, other.params.tensor(t.id), t.size()));
  }
  for (Arch arch : ARCHS) {
    TestModel<float> m(full_config(arch, 2), 1, 5);
    for (const TensorSpec& t : tensors_of(m.config))
      CHECK(same_bits(m.params.tensor(t.id), rd.params.tensor(t.id), t.size()));
    for (const Tensors<float>* family : {&m.grads, &m.adam_m, &m.adam_v})
      CHECK(rms(family->wte, m.num_elements) == 0);
  }
}

void test_padding() {
  TEST("padding rows of wte: never read, never a gradient, never moved");
  const Config c = full_config(Arch::rd, 2);
  TestModel<float> m(c, 2, random_params(c, 35));
  const size_t used = c.V * c.C, all = c.Vp() * c.C;
  CHECK(all > used);
  for (size_t i = used; i < all; i++) CHECK_EQ(m.params.wte[i], 0.0f);
  for (size_t step = 1; step <= 3; step++) {
    const Batch batch(c, 2, step);
    m.loss_and_gradients(batch);
    for (size_t i = used; i < all; i++) CHECK_EQ(m.grads.wte[i], 0.0f);
    for (size_t v = 0; v < c.V; v++) CHECK(rms(m.grads.wte + v * c.C, c.C) > 0);
    model_update(m, step, 1, 1e-2, 0.1, 1);
    for (size_t i = used; i < all; i++) CHECK_EQ(m.params.wte[i], 0.0f);
  }
  const Batch batch(c, 2, 36);
  model_zero_grad(m);
  CHECK(rms(m.grads.wte, m.num_elements) == 0);
  const double clean = m.loss_and_gradients(batch);
  const std::vector<float> gradients = all_of(m.grads.wte, m.num_elements);
  for (size_t i = used; i < all; i++) m.params.wte[i] = NAN;
  model_zero_grad(m);
  CHECK_EQ(m.loss_and_gradients(batch), clean);
  CHECK(same_bits(gradients, all_of(m.grads.wte, m.num_elements)));
}

// ---- the optimiser -----------------------------------------------------------------------------------

void test_decay() {
  TEST("weight decay touches exactly the matrices; the query multiplier exactly the queries");
  for (Arch arch : ARCHS) {
    const Config c = small_config(arch, 3, 2);
    const Params<double> params = random_params(c, 37);
    TestModel<double> m(c, 1, params);
    model_update(m, 1, 1, 0.5, 0.1, 3);  // gradients are zero
    for (const TensorSpec& t : tensors_of(c)) {
      const double factor = MATRICES.count(t.name) ? 1 - 0.5 * 0.1 : 1;
      for (size_t i = 0; i < t.size(); i++)
        CHECK_CLOSE(m.params.tensor(t.id)[i], factor * params.at(t.name)[i], factor == 1 ? 0 : 1e-15);
    }
    m.set(params);
    std::fill(m.grads.wte, m.grads.wte + m.num_elements, -2.0);
    model_update(m, 1, 0.5, 1e-3, 0, 3);  // the first step moves everything by lr against the gradient's sign
    for (const TensorSpec& t : tensors_of(c)) {
      const double move = QUERIES.count(t.name) ? 3e-3 : 1e-3;
      for (size_t i = 0; i < t.size(); i++)
        CHECK_CLOSE(m.params.tensor(t.id)[i] - params.at(t.name)[i], move, 1e-10);
    }
  }
}

// From the paper's formulas, in double; the float build may lose a few roundings.
void test_adamw() {
  TEST("AdamW against a plain double loop: step 1, early, a million");
  const size_t n = 1003;
  for (size_t step : {1, 2, 10, 1000, 1000000}) {
    Random random(step);
    const double lr = 0.01, decay = 0.1, scale = 0.7;
    std::vector<double> p = random.normals(n), m(n), v(n), g = random.normals(n, 0, 0.1);
    if (step > 1)
      for (size_t i = 0; i < n; i++) {
        m[i] = random.normal(0, 0.05);
        v[i] = double(float(std::fabs(random.normal(0, 0.01))));
      }
    g[0] = m[0] = v[0] = 0;
    const auto check_build = [&](auto real) {
      using X = decltype(real);
      const auto as = [](const std::vector<double>& values) {
        return std::vector<X>(values.begin(), values.end());
      };
      std::vector<X> new_p = as(p), new_m = as(m), new_v = as(v);
      adamw(new_p.data(), new_m.data(), new_v.data(), as(g).data(), n, scale, lr, decay, step);
      const double rounding = ROUNDINGS * epsilon<X>();
      for (size_t i = 0; i < n; i++) {
        const double gi = scale * g[i];
        const double mi = 0.9 * m[i] + 0.1 * gi;
        const double vi = 0.95 * v[i] + 0.05 * gi * gi;
        const double mhat = mi / (1 - std::pow(0.9, double(step)));
        const double vhat = vi / (1 - std::pow(0.95, double(step)));
        const double pi = p[i] - lr * (mhat / (std::sqrt(vhat) + 1e-8) + decay * p[i]);
        CHECK_CLOSE(new_p[i], pi, rounding * std::fmax(1, std::fabs(pi)));
        CHECK_CLOSE(new_m[i], mi, rounding * 0.1);
        CHECK_CLOSE(new_v[i], vi, rounding * 0.01);
      }
    };
    check_build(float());
    check_build(double());
  }
}

// A million updates one after the other, each at the schedule's rate, beside the same loop in double. A step
// rounds the parameter once and the update a few times; decay lets old errors fade. `bound` adds that up.
void test_million_steps() {
  TEST("AdamW over a million steps of a schedule does not drift from the same loop in double");
  constexpr size_t N = 3, STEPS = 1000000;
  const double decay = 0.1, size[N] = {1, 1e-3, 1e3};
  float p[N] = {1, -2, 0.5f}, m[N] = {}, v[N] = {}, g[N];
  double exact_p[N] = {1, -2, 0.5}, exact_m[N] = {}, exact_v[N] = {}, bound[N] = {}, worst = 0;
  for (size_t step = 1; step <= STEPS; step++) {
    const double lr = learning_rate(step - 1, STEPS, 1000, 1e-3, 0.1);
    for (size_t i = 0; i < N; i++) g[i] = float(size[i] * (std::sin(0.1 * double(step)) + 0.2));
    adamw(p, m, v, g, N, 1, lr, decay, step);
    const double correct1 = 1 - std::pow(0.9, double(step)), correct2 = 1 - std::pow(0.95, double(step));
    for (size_t i = 0; i < N; i++) {
      const double gi = double(g[i]);
      exact_m[i] = 0.9 * exact_m[i] + 0.1 * gi;
      exact_v[i] = 0.95 * exact_v[i] + 0.05 * gi * gi;
      const double update = lr * (exact_m[i] / correct1) / (std::sqrt(exact_v[i] / correct2) + 1e-8);
      exact_p[i] -= update + lr * decay * exact_p[i];
      bound[i] = bound[i] * (1 - lr * decay) + epsilon<float>() * (std::fabs(exact_p[i]) + ROUNDINGS * lr);
      const double error = std::fabs(double(p[i]) - exact_p[i]);
      worst = std::fmax(worst, error / bound[i]);
      if (!CHECK(error <= bound[i])) return;
    }
  }
  // Running means: each step's rounding fades with the mean itself.
  for (size_t i = 0; i < N; i++) {
    CHECK_CLOSE(m[i], exact_m[i], ROUNDINGS * epsilon<float>() / 0.1 * size[i]);
    CHECK_CLOSE(v[i], exact_v[i], ROUNDINGS * epsilon<float>() / 0.05 * size[i] * size[i]);
  }
  printf("  parameters %.6g %.6g %.6g; error at most %.2f of what rounding allows\n", double(p[0]),
         double(p[1]), double(p[2]), worst);
}

// Every softmax of the model at once: routes, attention and classifier with logits past 1e4, then the sampler.
void test_extremes() {
  for (Arch arch : ARCHS) {
    TEST(std::string("logits past 1e4 in routes, attention and classifier: all finite: ") + name_of(arch));
    const Config c = full_config(arch, 4);
    Params<double> params = random_params(c, 53);
    for (auto& tensor : params) {
      const std::string& name = tensor.first;
      const double scale = QUERIES.count(name) ? 1e5 : name == "wqk" ? 300 : name == "final_norm" ? 1e4 : 1;
      for (double& w : tensor.second) w *= scale;
    }
    const size_t B = 2, BT = B * c.T;
    const Batch batch(c, B, 54);
    TestModel<float> m(c, B, params);
    m.forward(batch);
    const std::vector<float> logits = logits_of(m, BT);
    const double loss = m.loss_and_gradients(batch);
    const std::vector<float> lse = all_of(m.acts.lse, c.L * c.NH * BT);
    const double largest = double(*std::max_element(logits.begin(), logits.end()));
    const double score = double(*std::max_element(lse.begin(), lse.end()));
    size_t reads = 0, one_hot = 0;
    for (size_t i = 0; c.has_routes() && i <= c.sublayers(); i++) {
      const auto site = site_at(m, i, BT);
      for (size_t row = 0; site.K > 1 && row < site.R * BT; row++, reads++)
        one_hot += *std::max_element(site.p + row * site.K, site.p + (row + 1) * site.K) == 1;
    }
    printf("  loss %.4g, logits to %.3g, scores to %.3g, %zu of %zu reads one-hot\n", loss, largest, score,
           one_hot, reads);
    CHECK(std::isfinite(loss) && loss > 1e3 && largest > 1e4 && score > 1e4);
    CHECK(2 * one_hot >= reads);
    CHECK_EQ(find_non_finite(c, m.grads), "");
    CHECK(std::isfinite(grad_norm(m)));
    std::vector<float> next;
    next_token_logits(m, batch.tokens, next);
    const int token = sample_token(next.data(), c.V, 1, 0, 1, 0.5);
    CHECK(token >= 0 && next[size_t(token)] > *std::max_element(next.begin(), next.end()) - 100);
  }
}

// One whole step: which examples, the mean of the losses, the norm, clipping, and the update, put together by
// hand; the batch at once or in micro-batches.
void test_train_step() {
  TEST("a training step: its examples, loss, norm, clipping and update");
  for (Arch arch : {Arch::rd, Arch::average}) {
    const Config c = small_config(arch, 3, 4);
    const Params<double> params = random_params(c, 43);
    std::vector<uint16_t> tokens(c.T * 11 + 3);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = uint16_t(Random(i + 500).next() % c.V);
    const TokenData data = TokenData::from_tokens(tokens, "test", c.V);
    Options o;
    o.seed = 5;
    o.weight_decay = 0.3;
    o.query_lr_mult = 2;
    o.total_batch = 8 * c.T;
    const size_t position = 9, step = 3;  // of 11 windows: the step crosses an epoch
    const double lr = 0.01;
    Batch batch(c, 8, 1);
    for (size_t row = 0; row < 8; row++)
      training_example(data, c.T, o.seed, position + row, &batch.tokens[row * c.T], &batch.targets[row * c.T]);

    for (double clip : {0.0, 0.25, 1e9}) {
      o.clip = clip;
      TestModel<double> by_hand(c, 8, params);
      const double loss = by_hand.loss_and_gradients(batch);
      const double norm = grad_norm(by_hand);
      CHECK(norm > 0.25);
      model_update(by_hand, step, clip == 0.25 ? clip / norm : 1, lr, 0.3, 2);
      for (size_t B : {8, 4, 2, 1}) {
        TestModel<double> m(c, B, params);
        m.grads.wte[0] = 1e3;  // left over: the step starts from zero
        const auto result = train_step(m, data, o, position, step, lr);
        CHECK_CLOSE(result.loss, loss, 1e-13 * loss);
        CHECK_CLOSE(result.norm, norm, 1e-11 * norm);
        CHECK_CLOSE(error_of(m.params.wte, by_hand.params.wte, m.num_elements).largest, 0, 1e-10);
        CHECK_CLOSE(error_of(m.adam_m.wte, by_hand.adam_m.wte, m.num_elements).largest, 0, 1e-10);
        if (clip == 0.25)  // Adam's update hardly sees a factor, its moments do
          CHECK_CLOSE(rms(m.adam_m.wte, m.num_elements) * std::sqrt(double(m.num_elements)), 0.1 * 0.25, 1e-12);
      }
    }
  }
}

void test_grad_norm() {
  TEST("gradient norm: all tensors, the same bits for any number of threads");
  const Config c = full_config(Arch::rd, 2);
  TestModel<float> m(c, 1, random_params(c, 38));
  long double sum = 0;
  Random random(39);
  for (size_t i = 0; i < m.num_elements; i++) {
    m.grads.wte[i] = float(random.normal());
    sum += (long double)(m.grads.wte[i]) * (long double)(m.grads.wte[i]);
  }
  const double norm = grad_norm(m);
  printf("  %zu numbers: %.12f, exactly %.12f\n", m.num_elements, norm, double(std::sqrt(sum)));
  CHECK_CLOSE(norm, double(std::sqrt(sum)), 1e-12 * norm);
  for (int threads : {2, 3, 8}) {
    set_threads(threads);
    CHECK_EQ(grad_norm(m), norm);
  }
  set_threads(1);
  // Every element counts: the first and last of every tensor.
  for (const TensorSpec& t : tensor_table(c))
    for (size_t i : {size_t(0), t.size() - 1}) {
      model_zero_grad(m);
      m.grads.tensor(t.id)[i] = 3;
      CHECK_EQ(grad_norm(m), 3.0);
    }
}

void test_find_non_finite() {
  TEST("a gradient that is not finite is found, with tensor and layer");
  for (Arch arch : ARCHS) {
    const Config c = small_config(arch, 3, 2);
    TestModel<float> m(c, 1, random_params(c, 40));
    const auto parts = [&](const TensorSpec& t) { return t.per_layer ? c.L : 1; };
    const auto name = [&](const TensorSpec& t, size_t l) {
      return t.per_layer ? format("%s, layer %zu", t.name, l) : std::string(t.name);
    };
    CHECK_EQ(find_non_finite(c, m.grads), std::string());
    for (const TensorSpec& t : tensors_of(c))
      for (size_t l = 0; l < parts(t); l++)
        for (float bad : {float(NAN), float(INFINITY), -float(INFINITY)}) {
          const size_t n = t.size() / parts(t);
          for (size_t i : {l * n, (l + 1) * n - 1}) {
            m.grads.tensor(t.id)[i] = bad;
            CHECK_EQ(find_non_finite(c, m.grads), name(t, l));
            CHECK(!std::isfinite(grad_norm(m)));
            m.grads.tensor(t.id)[i] = 0;
          }
        }
    // From the embedding up, layer by layer: each is nearer to the output than those before.
    std::vector<TensorSpec> in_layer, above;
    for (const TensorSpec& t : tensors_of(c))
      if (t.id != TENSOR_wte) (t.per_layer ? in_layer : above).push_back(t);
    m.grads.wte[0] = NAN;
    CHECK_EQ(find_non_finite(c, m.grads), std::string("wte"));
    const auto spoil = [&](const TensorSpec& t, size_t l) {
      m.grads.tensor(t.id)[l * (t.size() / parts(t))] = NAN;
      CHECK_EQ(find_non_finite(c, m.grads), name(t, l));
    };
    for (size_t l = 0; l < c.L; l++)
      for (const TensorSpec& t : in_layer) spoil(t, l);
    for (const TensorSpec& t : above) spoil(t, 0);
  }
}

void test_blame() {
  TEST("a number that is not finite is traced to where a step made it first");
  const size_t B = 2;
  for (Arch arch : ARCHS) {
    const Config c = small_config(arch, 3, 2);
    const size_t BT = B * c.T, L = c.L;
    const Batch batch(c, B, 44);
    TestModel<float> m(c, B, random_params(c, 45));
    // `name` is that of a tensor, `layer` one of its L parts, or L for all of it.
    const auto fill = [&](const char* name, size_t layer, float value) {
      for (const TensorSpec& t : tensor_table(c)) {
        if (strcmp(t.name, name) != 0 || !t.present) continue;
        const size_t n = layer < L ? t.size() / L : t.size();
        std::fill_n(m.params.tensor(t.id) + (layer < L ? layer * n : 0), n, value);
      }
    };
    const auto blame = [&] {
      model_zero_grad(m);
      m.loss_and_gradients(batch);
      const std::string where = blame_non_finite(m, BT);
      m.set(random_params(c, 45));
      return where;
    };
    CHECK_EQ(blame(), "");
    m.params.wv[c.C * c.C] = NAN;
    CHECK_EQ(blame(), "parameter wv, layer 1");
    // From here on every parameter is finite.
    fill("w_down", 1, 3e38f);
    CHECK_EQ(blame(), "the output of the feed-forward, layer 1");
    fill("wo", 2, 3e38f);
    CHECK_EQ(blame(), "the output of the attention, layer 2");
    fill("final_norm", L, 3e38f);
    CHECK_EQ(blame(), "what the head reads");
    size_t unseen = 0;  // a token that is read nowhere
    while (std::count(batch.tokens.begin(), batch.tokens.end(), int(unseen)) > 0) unseen++;
    fill("final_norm", L, 1e30f);
    std::fill_n(m.params.wte + unseen * c.C, c.C, 1e20f);
    CHECK_EQ(blame(), "the logits");
    // Nothing comes out of the feed-forward, since silu(0) = 0; but a gradient goes in.
    fill("w_gate", 1, 0);
    fill("w_up", 1, 1e30f);
    fill("w_down", 1, 1e30f);
    CHECK_EQ(blame(), "gradient of w_gate, layer 1");
    if (c.has_routes()) {
      fill("out_route", L, 3e38f);
      fill("out_route_gain", L, 10);
      CHECK_EQ(blame(), "the output route");
      fill("mlp_route", 2, 3e38f);
      fill("mlp_route_gain", 2, 10);
      CHECK_EQ(blame(), "a route of the feed-forward, layer 2");
      fill("attn_route_qk", 1, 3e38f);
      fill("attn_route_gain", 1, 10);
      CHECK_EQ(blame(), "a route of the attention, layer 1");
      fill("out_route", L, 0);
      fill("out_route_gain", L, 3e38f);
      fill("final_norm", L, 1e6f);
      CHECK_EQ(blame(), "gradient of out_route");
    }
    CHECK_EQ(blame(), "");
    m.grads.mlp_norm[2 * c.C] = NAN;
    CHECK_EQ(blame_non_finite(m, BT), "gradient of mlp_norm, layer 2");
  }
}

void test_bad_micro_batch() {
  TEST("a step that makes a number that is not finite stops before its update, whichever micro-batch makes it");
  const Config c = small_config(Arch::rd, 3, 2);
  // Two windows; only the second holds the token that has something in channel 0, which overflows in layer 0.
  const size_t marked = c.V - 1;
  std::vector<uint16_t> tokens(2 * c.T + 1);
  for (size_t i = 0; i < tokens.size(); i++) tokens[i] = uint16_t(i % 100);
  tokens[c.T + 3] = uint16_t(marked);
  const TokenData data = TokenData::from_tokens(tokens, "test", c.V);
  TestModel<float> m(c, 1, random_params(c, 46));
  for (size_t v = 0; v < c.V; v++) m.params.wte[v * c.C] = v == marked;
  std::fill_n(m.params.wo, c.C * c.C, 0.0f);
  for (size_t f = 0; f < c.F; f++) m.params.w_gate[f * c.C] = m.params.w_up[f * c.C] = 1e20f;
  const std::vector<float> before(m.params.wte, m.params.wte + m.num_elements);
  Options o;
  o.total_batch = 2 * c.T;
  const auto message_of = [&](size_t position) -> std::string {
    try {
      train_step(m, data, o, position, 7, 0.1);
    } catch (const Fatal& fatal) {
      return fatal.message;
    }
    return "";
  };
  size_t last_is_bad = 0;
  fatal_throws = true;
  for (size_t position : {0, 2, 4, 6, 8, 10}) {  // an epoch each
    std::vector<int> inputs(c.T), targets(c.T);
    training_example(data, c.T, o.seed, position, inputs.data(), targets.data());
    last_is_bad += inputs[3] != int(marked);
    const std::string message = message_of(position);
    CHECK(message.find("step 7: loss ") == 0);
    CHECK(message.find("first bad number in the output of the feed-forward, layer 0;") != std::string::npos);
    CHECK(memcmp(m.params.wte, before.data(), before.size() * sizeof(float)) == 0);
  }
  CHECK(last_is_bad > 0 && last_is_bad < 6);
  // A finite loss, since silu(0) = 0, but an infinite gradient.
  m.set(random_params(c, 46));
  std::fill_n(m.params.w_gate + c.F * c.C, c.F * c.C, 0.0f);
  for (float* w : {m.params.w_up, m.params.w_down}) std::fill_n(w + c.F * c.C, c.F * c.C, 1e30f);
  const std::string message = message_of(0);
  CHECK(message.find("step 7: loss ") == 0 && std::isfinite(std::strtod(message.c_str() + 13, nullptr)));
  CHECK(message.find("first bad number in gradient of w_gate, layer 1;") != std::string::npos);
  fatal_throws = false;
}

// ---- sizes -------------------------------------------------------------------------------------------

void test_parameter_count() {
  TEST("parameter counts of the paper's sizes");
  struct Want {
    size_t L, C, NH, F, S, V;
    Arch arch;
    size_t embedding, layers, routes, total;
  };
  const Want wants[] = {
      {16, 576, 9, 2880, 4, 32768, Arch::rd, 18874368, 100878912, 47232, 119800512},
      {16, 576, 9, 2880, 4, 32768, Arch::block, 18874368, 100878912, 47232 - 9216, 119800512 - 9216},
      {16, 576, 9, 2880, 4, 32768, Arch::tied, 18874368, 100878912, 47232 - 9216, 119800512 - 9216},
      {16, 576, 9, 2880, 4, 32768, Arch::average, 18874368, 100878912, 47232, 119800512},
      {16, 576, 9, 2880, 4, 32768, Arch::frozen_v, 18874368, 100878912, 47232 - 9216, 119800512 - 9216},
      {16, 576, 9, 2880, 4, 32768, Arch::residual, 18874368, 100878912, 0, 119753280},
      {16, 576, 9, 2880, 4, 50257, Arch::rd, 28948032, 100878912, 47232, 129874176},
      {24, 832, 13, 4160, 6, 32768, Arch::rd, 27262976, 315694912, 101504, 343059392},
      {24, 832, 13, 4160, 6, 50257, Arch::rd, 41813824, 315694912, 101504, 357610240},
  };
  for (const Want& want : wants) {
    const Config c = config_of(want.arch, want.L, want.S, want.C, want.NH, want.F, 1024, want.V);
    const ParamCount count = count_params(c);
    printf("  L=%zu C=%zu V=%zu %-9s %zu\n", want.L, want.C, want.V, name_of(want.arch), count.total);
    CHECK_EQ(count.embedding, want.embedding);
    CHECK_EQ(count.layers, want.layers);
    CHECK_EQ(count.routes, want.routes);
    CHECK_EQ(count.total, want.total);
  }
  // What is allocated is what is counted, and the padding.
  for (Arch arch : ARCHS) {
    const Config c = full_config(arch, 2);
    const TestModel<float> m(c, 1, 1);
    CHECK_EQ(m.num_elements, count_params(c).total + (c.Vp() - c.V) * c.C);
  }
}

// No buffer grows with the square of the context, and none holds the logits of a whole batch.
void test_memory() {
  TEST("activation memory is linear in the context and holds no (B*T,V) array");
  for (Arch arch : ARCHS) {
    const Config c = config_of(arch, 16, 4, 576, 9, 2880, 1 << 20, 200000);
    cpu_float::Activations acts = {};
    size_t bytes[2] = {};
    for (int doubled : {0, 1}) {
      const size_t T = size_t(1) << (20 + doubled);
      cpu_float::for_each_activation(acts, c, 4, T,
                                     [&](const char*, float*&, size_t n) { bytes[doubled] += n * 4; });
    }
    const size_t per_token = (bytes[1] - bytes[0]) / (size_t(4) << 20);
    printf("  %-9s %zu bytes a token\n", name_of(arch), per_token);
    CHECK(bytes[1] < 2 * bytes[0]);
    CHECK(per_token < 16 * 4 * (20 * 576 + 4 * 2880));
    CHECK(bytes[1] > size_t(1) << 32);
  }
}

// ---- checkpoint --------------------------------------------------------------------------------------

void test_checkpoint() {
  TEST("checkpoint: parameters and both moments under their names, back where they were, bit for bit");
  char folder[] = "/tmp/rdattnres_test_XXXXXX";
  if (!CHECK(mkdtemp(folder) != nullptr)) return;
  const std::string path = std::string(folder) + "/model.safetensors";
  std::vector<Config> configs;
  for (Arch arch : ARCHS) configs.push_back(small_config(arch, 3, 4));
  configs.push_back(config_of(Arch::rd, 1, 2, 600, 3, 10, 4, 500));  // tensors longer than is moved at a time
  for (const Config& c : configs) {
    TestModel<float> m(c, 1, random_params(c, 41));
    const size_t n = m.num_elements;
    Random random(42);
    for (size_t i = 0; i < n; i++) {
      m.adam_m.wte[i] = float(random.uniform() - 0.5);
      m.adam_v.wte[i] = float(random.uniform());
    }
    model_save(m, path, config_to_metadata(c));
    const Checkpoint checkpoint = Checkpoint::open(path);
    const std::pair<std::string, Tensors<float>*> families[] = {
        {"model.", &m.params}, {"adam_m.", &m.adam_m}, {"adam_v.", &m.adam_v}};
    for (const auto& family : families)
      for (const TensorSpec& t : tensor_table(c)) {
        if (!CHECK_EQ(checkpoint.has(family.first + t.name), t.present) || !t.present) continue;
        size_t seen = 0, different = 0;
        checkpoint.read(family.first + t.name, t.shape, [&](size_t offset, size_t k, const float* values) {
          different += !same_bits(values, family.second->tensor(t.id) + offset, k);
          seen += k;
        });
        CHECK_EQ(seen, t.size());
        CHECK_EQ(different, size_t(0));
      }
    TestModel<float> with(c, 1, 99), without(c, 1, 99);
    model_load(with, checkpoint, true);
    model_load(without, checkpoint, false);
    CHECK(same_bits(with.params.wte, m.params.wte, n) && same_bits(without.params.wte, m.params.wte, n));
    CHECK(same_bits(with.adam_m.wte, m.adam_m.wte, n) && same_bits(with.adam_v.wte, m.adam_v.wte, n));
    CHECK(rms(without.adam_m.wte, n) == 0 && rms(without.adam_v.wte, n) == 0);
  }
  unlink(path.c_str());
  rmdir(folder);
}

int main() {
  set_threads(1);  // cases that compare thread counts set their own
  test_against_reference();
  test_full_size_against_reference();
  test_central_differences();
  test_tied_is_block();
  test_threads();
  test_zero_queries();
  test_source_table();
  test_who_sees_a_block();
  test_depth_causality();
  test_roles();
  test_arms();
  test_first_site();
  test_batch_shape();
  test_time_causality();
  test_context();
  test_validation();
  test_route_stats();
  test_initial_weights();
  test_padding();
  test_decay();
  test_adamw();
  test_million_steps();
  test_extremes();
  test_train_step();
  test_grad_norm();
  test_find_non_finite();
  test_blame();
  test_bad_micro_batch();
  test_parameter_count();
  test_memory();
  test_checkpoint();
  return finish();
}
