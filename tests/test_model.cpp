// test_model.cpp - the whole model of the CPU trainer: depth memory, arms, gradients, optimiser.
//
// Against tests/reference.h, which keeps bank and partial as an explicit list and gets gradients from the chain
// rule; against differences of the trainer's own loss; and against what must be equal bit for bit: arms that
// are one function, any number of threads, any batch size. Parameters are random throughout, queries and gains
// included: zero queries would hide swapped routes.
#include <numeric>
#include <set>

#include "tests/check.h"      // TEST, CHECK, finish
#include "tests/child.h"      // Scratch
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

using reference::Named;
using reference::Params;
using reference::Random;

const Arch ARCHS[] = {Arch::rd, Arch::block, Arch::tied, Arch::average, Arch::frozen_v, Arch::residual};
const char* name_of(Arch arch) { return ARCH_NAMES[int(arch)]; }

const std::set<std::string> MATRICES = {"wte", "wqk", "wv", "wo", "w_gate", "w_up", "w_down"};
const std::set<std::string> QUERIES = {"attn_route_qk", "attn_route_v", "mlp_route", "out_route"};

// For gradients by the chain rule, where every operation is kept; and the sizes of the other tests.
Config small_config(Arch arch, size_t L, size_t S) { return {arch, L, 12, 3, 20, S, 9, 37}; }
Config full_config(Arch arch, size_t S) { return {arch, 3, 48, 3, 80, S, 37, 131}; }

// The tensors that an arm has.
std::vector<TensorSpec> tensors_of(const Config& c) {
  std::vector<TensorSpec> present;
  for (const TensorSpec& t : tensor_table(c))
    if (t.present) present.push_back(t);
  return present;
}

// ---- parameters and batches --------------------------------------------------------------------------

// Every tensor by name. A tensor's numbers depend on its name, size and the seed only: arms share them.
Params<double> random_params(const Config& c, uint64_t seed) {
  Params<double> params;
  for (const TensorSpec& t : tensors_of(c)) {
    Random random(seed * 1000 + t.id);
    const bool around_one = t.kind == Kind::norm || t.kind == Kind::gain;
    double deviation = 1 / std::sqrt(double(t.shape.back()));
    if (around_one) deviation = 0.3;
    if (t.kind == Kind::query) deviation = 0.4;
    if (t.kind == Kind::embedding) deviation = 0.7;
    params[t.name] = random.normals(t.size(), around_one ? 1 : 0, deviation);
  }
  std::fill(params["wte"].begin() + long(c.V * c.C), params["wte"].end(), 0.0);  // padding
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

TokenData random_data(const Config& c, size_t num_tokens) {
  const std::vector<int> tokens = Random(500).integers(num_tokens, c.V);
  return TokenData::from_tokens(std::vector<uint16_t>(tokens.begin(), tokens.end()), "test", c.V);
}

template <class real>
std::vector<real> all_of(const real* first, size_t n) {
  return std::vector<real>(first, first + n);
}

// A model of the float or the double build, for contexts of T tokens.
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
    for (const TensorSpec& t : tensors_of(this->config))
      std::copy_n(values(t.name), t.size(), this->params.tensor(t.id));
  }
  void forward(const Batch& batch) { model_forward(*this, batch.tokens.data(), batch.B, this->T); }
  double loss(const Batch& batch) {
    return model_loss(*this, batch.tokens.data(), batch.targets.data(), batch.B, this->T);
  }
  double loss_and_gradients(const Batch& batch, size_t accumulation = 1) {
    return model_loss_and_gradients(*this, batch.tokens.data(), batch.targets.data(), batch.B, this->T,
                                    accumulation);
  }
  // What the last forward gave the head, times wte. (B,T,V)
  std::vector<real> logits(size_t BT) const {
    const Config& c = this->config;
    return reference::linear(all_of(this->acts.x, BT * c.C), this->params.wte, BT, c.C, c.V);
  }
};

// ---- against the model written from its definition ---------------------------------------------------

// Everything that a forward and backward compute, as named arrays.
template <class real>
Named<real> run_trainer(const Config& c, const Params<double>& params, const Batch& batch) {
  const size_t BT = batch.B * c.T;
  TestModel<real> m(c, batch, params);
  Named<real> out;
  for (const TensorSpec& t : tensors_of(c))
    out[std::string("d ") + t.name] = all_of(m.grads.tensor(t.id), t.size());
  out["losses"] = all_of(m.acts.losses, BT);
  m.forward(batch);
  out["logits"] = m.logits(BT);
  for (size_t i = 0; i <= c.sublayers(); i++) {
    const auto site = site_at(m, i, BT);
    for (size_t r = 0; r < site.R; r++)
      out[format("routes %zu.%zu", i, r)] = all_of(site.p + r * BT * site.K, BT * site.K);
  }
  for (size_t l = 0; l < c.L; l++) out[format("lse %zu", l)] = all_of(m.acts.lse + l * c.NH * BT, c.NH * BT);
  return out;
}

template <class X>
Named<X> run_reference(const Config& c, const Params<double>& params, const Batch& batch) {
  const auto run = [&](const auto& w) { return run_model(c, w, batch.tokens, batch.targets, batch.B, c.T); };
  const reference::Run<X> forward = run(reference::convert<X>(params));
  Named<X> out = {{"logits", forward.logits}, {"losses", forward.losses}};
  for (size_t i = 0; i < forward.routes.size(); i++)
    for (size_t r = 0; r < forward.routes[i].size(); r++)
      out[format("routes %zu.%zu", i, r)] = forward.routes[i][r].p;
  for (size_t l = 0; l < c.L; l++) out[format("lse %zu", l)] = forward.attention[l].lse;
  const auto gradients = reference::gradients<X>(params, [&](const auto& w) { return run(w).mean_loss; });
  for (const auto& item : gradients) out["d " + item.first] = item.second;
  return out;
}

// The worst errors of an arm in several shapes. The tensors of one model share their errors (a loss is one
// chain of layers), and how much a model amplifies a rounding is a matter of luck: the worst that the plain
// loops do in any shape is the yardstick for all.
struct Worst {
  Error ours, plain;
  std::string where;
};

template <class real>
void compare(Worst worst[2], const Config& c, const Params<double>& params, const Batch& batch,
             const Named<long double>& exact) {
  const Named<real> ours = run_trainer<real>(c, params, batch);
  const Named<real> plain = run_reference<real>(c, params, batch);
  CHECK_EQ(ours.size(), exact.size());
  for (const auto& item : exact) {
    const std::string& name = item.first;
    if (!CHECK(ours.count(name) == 1)) continue;
    const bool gradient = name.compare(0, 2, "d ") == 0;
    const Error error = error_of(ours.at(name), item.second);
    if (sizeof(real) == sizeof(double)) CHECK_CLOSE(error.largest, 0, gradient ? 1e-10 : 1e-12);
    Worst& so_far = worst[gradient];
    if (error.largest > so_far.ours.largest) so_far.where = format("S=%zu L=%zu: %s", c.S, c.L, name.c_str());
    so_far.ours = larger(so_far.ours, error);
    so_far.plain = larger(so_far.plain, error_of(plain.at(name), item.second));
    // Exactly zero, not a rounding error near it: padding rows of wte, and the routes of the first site, which
    // has one source and nothing to choose.
    for (size_t i = 0; i < item.second.size(); i++)
      if (item.second[i] == 0) CHECK_EQ(ours.at(name)[i], real(0));
  }
}

template <class real>
void check_worst(const Worst worst[2]) {
  for (int gradient : {0, 1}) {
    check_error<real>(worst[gradient].where, worst[gradient].ours, worst[gradient].plain);
    printf("  %7.1e %7.1e", worst[gradient].ours.rms, worst[gradient].plain.rms);
  }
}

void test_against_reference() {
  printf("  rms of errors, relative: ours, plain; of outputs, gradients; float, double\n");
  for (Arch arch : ARCHS) {
    TEST(std::string("logits, losses, routes and all gradients against the definition: ") + name_of(arch));
    const size_t shapes[][2] = {{3, 2}, {3, 4}, {3, 1}, {3, 6}, {1, 2}, {2, 4}, {4, 6}, {3, 8}};
    Worst in_float[2], in_double[2];
    for (const auto& shape : shapes) {
      const Config c = small_config(arch, shape[0], shape[1]);
      Params<double> params = random_params(c, 10 * c.L + c.S);
      std::fill(params["wte"].begin() + long(c.V * c.C), params["wte"].end(), NAN);  // padding: never read
      const Batch batch(c, 2, 7);
      const Named<long double> exact = run_reference<long double>(c, params, batch);
      compare<float>(in_float, c, params, batch, exact);
      compare<double>(in_double, c, params, batch, exact);
    }
    printf("  %-9s", name_of(arch));
    check_worst<float>(in_float);
    check_worst<double>(in_double);
    printf("\n");
  }
}

// ---- differences of the trainer's own loss -----------------------------------------------------------

// Along one random direction through each tensor.
void check_differences(const Config& c, size_t B) {
  const Batch batch(c, B, 9);
  TestModel<double> m(c, batch, random_params(c, 100 + c.S));
  Random random(c.S);
  double worst = 0;
  for (const TensorSpec& t : tensors_of(c)) {
    const size_t n = t.id == TENSOR_wte ? c.V * c.C : t.size();
    double* w = m.params.tensor(t.id);
    const std::vector<double> before = all_of(w, n), g = all_of(m.grads.tensor(t.id), n);
    const std::vector<double> direction = random.normals(n, 0, rms(before));
    const auto loss_at = [&](double step) {
      for (size_t i = 0; i < n; i++) w[i] = before[i] + step * direction[i];
      return m.loss(batch);
    };
    const double scale = rms(g) * rms(direction) * std::sqrt(double(n));
    const double error = std::fabs(slope(loss_at, 1e-4) - inner_product(g, direction)) / scale;
    std::copy(before.begin(), before.end(), w);
    worst = std::fmax(worst, error);
    CHECK_CLOSE(error, 0, 1e-6);
  }
  printf("  %-9s S=%zu T=%zu C=%zu: worst relative error %.1e\n", name_of(c.arch), c.S, c.T, c.C, worst);
}

void test_central_differences() {
  for (Arch arch : ARCHS) {
    TEST(std::string("gradient of every tensor against central differences: ") + name_of(arch));
    for (size_t S : {1, 2, 4, 6}) check_differences(small_config(arch, 3, S), 2);
    check_differences(full_config(arch, 2), 1);
  }
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
    const auto one = train<float>(c, 3, 2, 2, 1);
    for (int threads : {2, 3, 8}) CHECK(same_bits(train<float>(c, 3, 2, 2, threads), one));
  }
}

// ---- the depth memory and the arms -------------------------------------------------------------------

// Each mix is then the residual stream over K, and the norm removes the K but for eps. The stream is a thousand
// times larger than usual, so that eps hardly counts; the final norm shrinks by as much, so that logits do not.
void test_zero_queries() {
  TEST("queries at zero: every arm computes what residual does, up to eps");
  for (size_t S : {1, 2, 4, 6}) {
    const Batch batch(full_config(Arch::rd, S), 2, 11);
    const auto scaled_params = [&](Arch arch) {
      Params<double> params = random_params(full_config(arch, S), 12);
      for (const std::string& query : QUERIES)
        for (double& w : params[query]) w = 0;
      for (const char* writes_to_stream : {"wte", "wo", "w_down"})
        for (double& w : params[writes_to_stream]) w *= 1000;
      for (double& w : params["final_norm"]) w /= 1000;
      return params;
    };
    const size_t BT = batch.tokens.size();
    TestModel<double> residual(full_config(Arch::residual, S), batch, scaled_params(Arch::residual));
    TestModel<double> block(full_config(Arch::block, S), batch, scaled_params(Arch::block));
    for (Arch arch : {Arch::rd, Arch::block, Arch::tied, Arch::average, Arch::frozen_v}) {
      TestModel<double> m(full_config(arch, S), batch, scaled_params(arch));
      CHECK(
          same_bits(m.acts.losses, block.acts.losses, BT));  // among the arms with routes: no difference at all
      CHECK_CLOSE(error_of(m.acts.losses, residual.acts.losses, BT).largest, 0, 1e-9);
      for (const TensorSpec& t : tensors_of(residual.config))
        CHECK_CLOSE(error_of(m.grads.tensor(t.id), residual.grads.tensor(t.id), t.size()).largest, 0, 1e-9);
    }
  }
}

void test_source_table() {
  TEST("sources of every site, against a literal table");
  // slots[i]: what site i reads; slot 0 is the embedding, slot n the partial after n sublayers.
  // bank[n]: the block that slot n belongs to; 0 is the embedding.
  struct Network {
    size_t L, S;
    std::vector<std::vector<size_t>> slots;
    std::vector<size_t> bank;
  };
  const Network networks[] = {
      {2, 2, {{0}, {0, 1}, {0, 2}, {0, 2, 3}, {0, 2, 4}}, {0, 1, 1, 2, 2}},
      {2, 1, {{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}}, {0, 1, 2, 3, 4}},
      {2, 4, {{0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}}, {0, 1, 1, 1, 1}},
      {3, 4, {{0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 4, 5}, {0, 4, 6}}, {0, 1, 1, 1, 1, 2, 2}},
      {1, 2, {{0}, {0, 1}, {0, 2}}, {0, 1, 1}},
      {2, 8, {{0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}}, {0, 1, 1, 1, 1}},  // a block longer than the network
  };
  for (const Network& network : networks) {
    const Config c = small_config(Arch::rd, network.L, network.S);
    CHECK_EQ(network.slots.size(), c.sublayers() + 1);
    for (size_t i = 0; i < network.slots.size(); i++) {
      CHECK(c.source_slots(i) == network.slots[i]);
      CHECK_EQ(c.num_sources(i), network.slots[i].size());
      CHECK_EQ(c.bank_index(i), network.bank[i]);
    }
    CHECK_EQ(c.blocks(), network.bank.back());
    CHECK_EQ(c.max_sources(), network.slots.back().size());
  }
}

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
  bool moved[3] = {};
  for (size_t i = 0; i < n; i++) moved[i / c.C % 3] |= qkv[0][i] != qkv[1][i];
  return std::string(moved[0], 'Q') + std::string(moved[1], 'K') + std::string(moved[2], 'V');
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
  for (const Want& want : wants) CHECK_EQ(moved_parts(want.arch, want.tensor, 1), std::string(want.moved));
  CHECK_EQ(moved_parts(Arch::rd, "attn_route_v", 0), std::string());  // one source: nothing to choose
}

void test_arms() {
  TEST("frozen-v is rd with V's query at zero; average of equal queries is tied");
  const Config rd = small_config(Arch::rd, 3, 2);
  const Batch batch(rd, 2, 20);
  const Params<double> random = random_params(rd, 21);  // the other arms have some of these tensors
  Params<double> zero = random, equal = random;
  std::fill(zero["attn_route_v"].begin(), zero["attn_route_v"].end(), 0.0);
  equal["attn_route_v"] = equal["attn_route_qk"];
  // The same losses, bit for bit, and nearly the same gradients of what both have.
  const auto check_same = [&](Arch arch, const Params<double>& params, Arch other,
                              const Params<double>& others) {
    TestModel<double> a(small_config(arch, 3, 2), batch, params), b(small_config(other, 3, 2), batch, others);
    CHECK(same_bits(a.acts.losses, b.acts.losses, batch.tokens.size()));
    for (const TensorSpec& t : tensors_of(a.config))
      if (b.grads.tensor(t.id) && (t.id != TENSOR_attn_route_qk || arch == Arch::frozen_v))
        CHECK_CLOSE(error_of(a.grads.tensor(t.id), b.grads.tensor(t.id), t.size()).largest, 0, 1e-12);
  };
  check_same(Arch::frozen_v, random, Arch::rd, zero);
  check_same(Arch::tied, random, Arch::rd, equal);  // whose two queries share the gradient of the one
  check_same(Arch::tied, random, Arch::average, equal);
}

// ---- batches and time --------------------------------------------------------------------------------

void test_time_causality() {
  TEST("a token changes nothing before itself, nothing in other rows, and something at and after itself");
  for (Arch arch : ARCHS) {
    const Config c = full_config(arch, 2);
    TestModel<float> m(c, 2, random_params(c, 27));
    const Batch batch(c, 2, 28);
    m.forward(batch);
    const std::vector<float> before = m.logits(2 * c.T);
    for (size_t t : {0, 17, 36}) {
      Batch changed = batch;
      int& token = changed.tokens[c.T + t];  // in the second row
      token = (token + 1) % int(c.V);
      m.forward(changed);
      const std::vector<float> after = m.logits(2 * c.T);
      for (size_t bt = 0; bt < 2 * c.T; bt++)
        CHECK_EQ(same_bits(&before[bt * c.V], &after[bt * c.V], c.V), bt < c.T + t);
    }
  }
}

void test_context() {
  TEST("the logits of a prefix do not depend on what follows; a long context keeps its last T tokens");
  const Config c = full_config(Arch::rd, 4);
  TestModel<float> m(c, 2, random_params(c, 29));
  const std::vector<int> text = Random(30).integers(c.T + 20, c.V);
  model_forward(m, text.data(), 1, c.T);
  const std::vector<float> all = m.logits(c.T);
  std::vector<float> logits, last;
  for (size_t n : {size_t(1), size_t(2), size_t(20), c.T}) {
    next_token_logits(m, std::vector<int>(text.begin(), text.begin() + long(n)), logits);
    CHECK_CLOSE(error_of(logits, all_of(&all[(n - 1) * c.V], c.V)).largest, 0, 1e-6);
  }
  next_token_logits(m, text, logits);
  next_token_logits(m, std::vector<int>(text.end() - long(c.T), text.end()), last);
  CHECK(same_bits(logits, last));
}

void test_validation() {
  TEST("validation: the mean over whole windows in order, the same bits for any B, and it touches nothing");
  const Config c = full_config(Arch::rd, 2);
  const TokenData data = random_data(c, c.T * 7 + 5);
  double sum = 0;  // of the losses of five windows, one by one
  TestModel<float> one(c, 1, random_params(c, 31));
  for (size_t w = 0; w < 5; w++) {
    Batch window(c, 1, 1);
    data.window(w, c.T, window.tokens.data(), window.targets.data());
    one.loss(window);
    for (size_t t = 0; t < c.T; t++) sum += double(one.acts.losses[t]);
  }
  for (size_t B : {1, 2, 3, 8}) {
    TestModel<float> m(c, Batch(c, B, 32), random_params(c, 31));
    model_update(m, 1, 1, 0, 0, 1);  // moments that are not zero
    const auto everything = [&] {
      std::vector<float> all;
      for (const Tensors<float>* family : {&m.params, &m.grads, &m.adam_m, &m.adam_v})
        all.insert(all.end(), family->wte, family->wte + m.num_elements);
      return all;
    };
    const std::vector<float> before = everything();
    const Validation result = validate(m, data, 5 * c.T + 3);
    CHECK(same_bits(before, everything()));
    CHECK_EQ(result.tokens, 5 * c.T);
    CHECK_EQ(result.loss, sum / double(5 * c.T));
    CHECK_EQ(validate(m, data, 1000 * c.T).tokens, 7 * c.T);
    for (const auto* weights : {&result.routes.qk, &result.routes.v}) {
      CHECK_EQ(weights->size(), c.L);
      for (const std::vector<double>& layer : *weights)
        CHECK_CLOSE(std::accumulate(layer.begin(), layer.end(), 0.0), 1, 1e-6);
    }
  }
}

// From the definition: JS = (KL(p||m) + KL(q||m)) / 2, m = (p + q) / 2, per token.
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
    const auto run = run_model(c, params, batch.tokens, batch.targets, 2, c.T);
    for (size_t l = 0; l < c.L; l++) {
      const std::vector<double>& p = run.routes[2 * l].front().p;
      const std::vector<double>& q = run.routes[2 * l].back().p;
      const size_t K = p.size() / BT;
      std::vector<double> qk(K), v(K);
      double divergence = 0;
      for (size_t i = 0; i < BT * K; i++) {
        const double mid = (p[i] + q[i]) / 2;
        qk[i % K] += 2 * p[i];
        v[i % K] += 2 * q[i];
        divergence += p[i] * std::log(p[i] / mid) + q[i] * std::log(q[i] / mid);
      }
      if (arch == Arch::block) v.clear();
      CHECK_CLOSE(error_of(stats.qk[l], qk).largest, 0, 1e-11);
      CHECK_CLOSE(error_of(stats.v[l], v).largest, 0, 1e-11);
      CHECK_CLOSE(stats.js_nats[l], divergence, 1e-11);
      CHECK((divergence > 0.1) == (arch != Arch::block && l > 0));
    }
  }
}

// ---- initial weights ---------------------------------------------------------------------------------

void test_initial_weights() {
  TEST("initial weights: shared by all arms, the documented spread, another seed other weights");
  const Config c = full_config(Arch::rd, 2);
  TestModel<float> rd(c, 1, 5), other(c, 1, 6);
  std::set<float> seen;
  for (const TensorSpec& t : tensors_of(c)) {
    const float* w = rd.params.tensor(t.id);
    const std::string name = t.name;
    if (!MATRICES.count(name)) {
      for (size_t i = 0; i < t.size(); i++) CHECK_EQ(w[i], QUERIES.count(name) ? 0.0f : 1.0f);
      continue;
    }
    const size_t n = name == "wte" ? c.V * c.C : t.size();
    const double want = name == "wo" || name == "w_down" ? 0.02 / std::sqrt(6.0) : 0.02;
    printf("  %-8s deviation %.5f (documented %.5f)\n", t.name, rms(w, n), want);
    CHECK_CLOSE(rms(w, n), want, 5 * want / std::sqrt(2.0 * double(n)));
    const size_t before = seen.size();
    for (size_t i = 0; i < n; i++) seen.insert(w[i] / float(want));
    CHECK(seen.size() - before > n * 98 / 100);                  // no copies of other layers or tensors
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
        CHECK_CLOSE(m.params.tensor(t.id)[i], factor * params(t.name)[i], factor == 1 ? 0 : 1e-15);
    }
    m.set(params);
    std::fill_n(m.grads.wte, m.num_elements, -2.0);
    model_update(m, 1, 0.5, 1e-3, 0, 3);  // the first step moves everything by lr against the gradient's sign
    for (const TensorSpec& t : tensors_of(c)) {
      const double move = QUERIES.count(t.name) ? 3e-3 : 1e-3;
      for (size_t i = 0; i < t.size(); i++)
        CHECK_CLOSE(m.params.tensor(t.id)[i] - params(t.name)[i], move, 1e-10);
    }
  }
}

// From the paper's formulas, in double; the float build may lose a few roundings.
template <class real>
void check_adamw(size_t step) {
  const size_t n = 1003;
  const double lr = 0.01, decay = 0.1, scale = 0.7;
  Random random(step);
  const auto numbers = [&](double deviation) {
    const std::vector<double> values = random.normals(n, 0, deviation);
    return std::vector<real>(values.begin(), values.end());
  };
  const std::vector<real> p = numbers(1), g = numbers(0.1), m = numbers(step > 1 ? 0.05 : 0);
  std::vector<real> v = numbers(step > 1 ? 0.01 : 0);
  for (real& x : v) x = std::fabs(x);
  v[0] = 0;  // only eps keeps the update finite
  std::vector<real> new_p = p, new_m = m, new_v = v;
  adamw(new_p.data(), new_m.data(), new_v.data(), g.data(), n, scale, lr, decay, step);
  const double rounding = ROUNDINGS * epsilon<real>();
  for (size_t i = 0; i < n; i++) {
    const double gi = scale * double(g[i]), pi = double(p[i]);
    const double mi = 0.9 * double(m[i]) + 0.1 * gi;
    const double vi = 0.95 * double(v[i]) + 0.05 * gi * gi;
    const double mhat = mi / (1 - std::pow(0.9, double(step)));
    const double vhat = vi / (1 - std::pow(0.95, double(step)));
    const double want = pi - lr * (mhat / (std::sqrt(vhat) + 1e-8) + decay * pi);
    CHECK_CLOSE(new_p[i], want, rounding * std::fmax(1, std::fabs(want)));
    CHECK_CLOSE(new_m[i], mi, rounding * 0.1);
    CHECK_CLOSE(new_v[i], vi, rounding * 0.01);
  }
}

void test_adamw() {
  TEST("AdamW against the formulas in double: step 1, early, a million");
  for (size_t step : {1, 2, 10, 1000, 1000000}) {
    check_adamw<float>(step);
    check_adamw<double>(step);
  }
}

// One whole step, put together by hand: which examples, the mean of the losses, the norm, clipping, and the
// update; the batch at once or in micro-batches.
void test_train_step() {
  TEST("a training step: its examples, loss, norm, clipping and update");
  for (Arch arch : {Arch::rd, Arch::average}) {
    const Config c = small_config(arch, 3, 4);
    const Params<double> params = random_params(c, 43);
    const TokenData data = random_data(c, c.T * 11 + 3);
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
        // The moments show a factor that Adam's update hardly sees.
        CHECK_CLOSE(error_of(m.adam_m.wte, by_hand.adam_m.wte, m.num_elements).largest, 0, 1e-10);
      }
    }
  }
}

void test_grad_norm() {
  TEST("gradient norm: all tensors, the same bits for any number of threads");
  const Config c = full_config(Arch::rd, 2);
  TestModel<float> m(c, 1, 38);
  const std::vector<double> gradients = Random(39).normals(m.num_elements);
  std::copy(gradients.begin(), gradients.end(), m.grads.wte);
  const double norm = grad_norm(m), want = std::sqrt(inner_product(gradients, gradients));
  CHECK_CLOSE(norm, want, 1e-12 * want);
  for (int threads : {2, 3, 8}) {
    set_threads(threads);
    CHECK_EQ(grad_norm(m), norm);
  }
  set_threads(1);
  for (const TensorSpec& t : tensor_table(c))  // every element counts: the first and last of every tensor
    for (size_t i : {size_t(0), t.size() - 1}) {
      model_zero_grad(m);
      m.grads.tensor(t.id)[i] = 3;
      CHECK_EQ(grad_norm(m), 3.0);
    }
}

// ---- numbers that are not finite ---------------------------------------------------------------------

void test_find_non_finite() {
  TEST("a gradient that is not finite is found, with tensor and layer; of several, the nearest to the output");
  for (Arch arch : ARCHS) {
    const Config c = small_config(arch, 3, 2);
    TestModel<float> m(c, 1, 40);
    // From the embedding up: each is nearer to the output than those before, which stay as bad as they are.
    std::vector<TensorSpec> in_layer, above;
    for (const TensorSpec& t : tensors_of(c))
      if (t.id != TENSOR_wte) (t.per_layer ? in_layer : above).push_back(t);
    const auto spoil = [&](const TensorSpec& t, size_t l, const std::string& name) {
      const size_t n = t.per_layer ? t.size() / c.L : t.size();
      float& last = m.grads.tensor(t.id)[(l + 1) * n - 1];
      for (float bad : {-INFINITY, INFINITY, NAN}) {
        last = bad;
        CHECK_EQ(find_non_finite(c, m.grads), name);
        CHECK(!std::isfinite(grad_norm(m)));
      }
      last = 0;
      m.grads.tensor(t.id)[l * n] = NAN;
      CHECK_EQ(find_non_finite(c, m.grads), name);
    };
    CHECK_EQ(find_non_finite(c, m.grads), "");
    spoil(tensor_table(c)[TENSOR_wte], 0, "wte");
    for (size_t l = 0; l < c.L; l++)
      for (const TensorSpec& t : in_layer) spoil(t, l, format("%s, layer %zu", t.name, l));
    for (const TensorSpec& t : above) spoil(t, 0, t.name);
  }
}

void test_blame() {
  TEST("a number that is not finite is traced to where a step made it first");
  struct Fill {  // layer l of a tensor, or all of it
    const char* tensor;
    int layer;
    float value;
  };
  struct Case {
    const char* want;
    std::vector<Fill> fills;
    bool routes = false;  // only where the arm has routes
  };
  const int all = -1;
  const Case cases[] = {
      {"", {}},
      {"parameter wv, layer 1", {{"wv", 1, NAN}}},
      // From here on every parameter is finite.
      {"the output of the feed-forward, layer 1", {{"w_down", 1, 3e38f}}},
      {"the output of the attention, layer 2", {{"wo", 2, 3e38f}}},
      {"what the head reads", {{"final_norm", all, 3e38f}}},
      {"the logits", {{"final_norm", all, 1e30f}, {"a token read nowhere", all, 1e20f}}},
      // Nothing comes out of the feed-forward, since silu(0) = 0; but a gradient goes in.
      {"gradient of w_gate, layer 1", {{"w_gate", 1, 0}, {"w_up", 1, 1e30f}, {"w_down", 1, 1e30f}}},
      {"the output route", {{"out_route", all, 3e38f}, {"out_route_gain", all, 10}}, true},
      {"a route of the feed-forward, layer 2", {{"mlp_route", 2, 3e38f}, {"mlp_route_gain", 2, 10}}, true},
      {"a route of the attention, layer 1", {{"attn_route_qk", 1, 3e38f}, {"attn_route_gain", 1, 10}}, true},
      {"gradient of out_route",
       {{"out_route", all, 0}, {"out_route_gain", all, 3e38f}, {"final_norm", all, 1e6f}},
       true},
  };
  for (Arch arch : ARCHS) {
    const Config c = small_config(arch, 3, 2);
    const Batch batch(c, 2, 44);
    TestModel<float> m(c, 2, 1);
    size_t unseen = 0;  // a token that is read nowhere
    while (std::count(batch.tokens.begin(), batch.tokens.end(), int(unseen)) > 0) unseen++;
    for (const Case& one : cases) {
      if (one.routes && !c.has_routes()) continue;
      m.set(random_params(c, 45));
      for (const Fill& fill : one.fills) {
        for (const TensorSpec& t : tensors_of(c)) {
          if (strcmp(t.name, fill.tensor) != 0) continue;
          const size_t n = fill.layer == all ? t.size() : t.size() / c.L;
          std::fill_n(m.params.tensor(t.id) + (fill.layer == all ? 0 : size_t(fill.layer) * n), n, fill.value);
        }
        if (strcmp(fill.tensor, "a token read nowhere") == 0)
          std::fill_n(m.params.wte + unseen * c.C, c.C, fill.value);
      }
      model_zero_grad(m);
      m.loss_and_gradients(batch);
      CHECK_EQ(blame_non_finite(m, batch.tokens.size()), one.want);
    }
  }
}

void test_bad_micro_batch() {
  TEST("a step that makes a number that is not finite stops before its update, whichever micro-batch makes it");
  const Config c = small_config(Arch::rd, 3, 2);
  // Two windows; only the second holds the token that has something in channel 0, which overflows in layer 0.
  const size_t marked = c.V - 1;
  std::vector<uint16_t> tokens(2 * c.T + 1);
  for (size_t i = 0; i < tokens.size(); i++) tokens[i] = uint16_t(i);
  tokens[c.T + 3] = uint16_t(marked);
  const TokenData data = TokenData::from_tokens(tokens, "test", c.V);
  TestModel<float> m(c, 1, random_params(c, 46));
  for (size_t v = 0; v < c.V; v++) m.params.wte[v * c.C] = v == marked;
  std::fill_n(m.params.wo, c.C * c.C, 0.0f);
  for (size_t f = 0; f < c.F; f++) m.params.w_gate[f * c.C] = m.params.w_up[f * c.C] = 1e20f;
  Options o;
  o.total_batch = 2 * c.T;
  const auto check_stops = [&](size_t position, const std::string& where) {
    const std::vector<float> before = all_of(m.params.wte, m.num_elements);
    std::string message;
    fatal_throws = true;
    try {
      train_step(m, data, o, position, 7, 0.1);
    } catch (const Fatal& fatal) {
      message = fatal.message;
    }
    fatal_throws = false;
    CHECK_EQ(message.substr(0, 13), "step 7: loss ");
    CHECK(message.find("first bad number in " + where + ";") != std::string::npos);
    CHECK(same_bits(m.params.wte, before.data(), before.size()));
    return message;
  };
  size_t last_is_bad = 0;
  for (size_t position : {0, 2, 4, 6, 8, 10}) {  // an epoch each
    std::vector<int> inputs(c.T), targets(c.T);
    training_example(data, c.T, o.seed, position, inputs.data(), targets.data());
    last_is_bad += inputs[3] != int(marked);
    check_stops(position, "the output of the feed-forward, layer 0");
  }
  CHECK(last_is_bad > 0 && last_is_bad < 6);
  // A finite loss, since silu(0) = 0, but an infinite gradient.
  m.set(random_params(c, 46));
  std::fill_n(m.params.w_gate + c.F * c.C, c.F * c.C, 0.0f);
  for (float* w : {m.params.w_up, m.params.w_down}) std::fill_n(w + c.F * c.C, c.F * c.C, 1e30f);
  const std::string message = check_stops(0, "gradient of w_gate, layer 1");
  CHECK(std::isfinite(std::strtod(message.c_str() + 13, nullptr)));
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
      {16, 576, 9, 2880, 4, 32768, Arch::block, 18874368, 100878912, 38016, 119791296},
      {16, 576, 9, 2880, 4, 32768, Arch::tied, 18874368, 100878912, 38016, 119791296},
      {16, 576, 9, 2880, 4, 32768, Arch::average, 18874368, 100878912, 47232, 119800512},
      {16, 576, 9, 2880, 4, 32768, Arch::frozen_v, 18874368, 100878912, 38016, 119791296},
      {16, 576, 9, 2880, 4, 32768, Arch::residual, 18874368, 100878912, 0, 119753280},
      {16, 576, 9, 2880, 4, 50257, Arch::rd, 28948032, 100878912, 47232, 129874176},
      {24, 832, 13, 4160, 6, 32768, Arch::rd, 27262976, 315694912, 101504, 343059392},
      {24, 832, 13, 4160, 6, 50257, Arch::rd, 41813824, 315694912, 101504, 357610240},
  };
  for (const Want& want : wants) {
    const ParamCount count = count_params({want.arch, want.L, want.C, want.NH, want.F, want.S, 1024, want.V});
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

void test_memory() {
  TEST("activation memory is linear in the context and holds no (B*T,V) array");
  for (Arch arch : ARCHS) {
    const Config c = {arch, 16, 576, 9, 2880, 4, 1 << 20, 200000};
    const auto bytes = [&](size_t T) {
      cpu_float::Activations none = {};
      size_t sum = 0;
      cpu_float::for_each_activation(none, c, 4, T, [&](const char*, float*&, size_t n) { sum += n * 4; });
      return sum;
    };
    const size_t per_token = (bytes(2 << 20) - bytes(1 << 20)) / (4 << 20);
    printf("  %-9s %zu bytes a token\n", name_of(arch), per_token);
    CHECK(bytes(2 << 20) < 2 * bytes(1 << 20));
    CHECK(per_token < 16 * 4 * (20 * 576 + 4 * 2880));
  }
}

// ---- checkpoint --------------------------------------------------------------------------------------

void test_checkpoint() {
  TEST("checkpoint: parameters and both moments under their names, back where they were, bit for bit");
  const Scratch scratch;
  const std::string path = scratch / "model.safetensors";
  std::vector<Config> configs;
  for (Arch arch : ARCHS) configs.push_back(small_config(arch, 3, 4));
  configs.push_back({Arch::rd, 1, 600, 3, 10, 2, 4, 500});  // tensors longer than is moved at a time
  for (const Config& c : configs) {
    TestModel<float> m(c, 1, random_params(c, 41)), with(c, 1, 99), without(c, 1, 99);
    const size_t n = m.num_elements;
    for (float* family : {m.adam_m.wte, m.adam_v.wte}) {
      const std::vector<double> numbers = Random(n).normals(n, family == m.adam_v.wte);
      std::copy_n(numbers.begin(), n, family);
    }
    model_save(m, path, {});
    const Checkpoint checkpoint = Checkpoint::open(path);
    const std::pair<std::string, Tensors<float>*> families[] = {
        {"model.", &m.params}, {"adam_m.", &m.adam_m}, {"adam_v.", &m.adam_v}};
    for (const auto& family : families)
      for (const TensorSpec& t : tensor_table(c)) {
        const bool there = checkpoint.tensors.count(family.first + t.name) == 1;
        if (!CHECK_EQ(there, t.present) || !t.present) continue;
        std::vector<float> read;
        checkpoint.read(family.first + t.name, t.shape, [&](size_t, size_t count, const float* values) {
          read.insert(read.end(), values, values + count);
        });
        CHECK(same_bits(read, all_of(family.second->tensor(t.id), t.size())));
      }
    model_load(with, checkpoint, true);
    model_load(without, checkpoint, false);
    CHECK(same_bits(with.params.wte, m.params.wte, n) && same_bits(without.params.wte, m.params.wte, n));
    CHECK(same_bits(with.adam_m.wte, m.adam_m.wte, n) && same_bits(with.adam_v.wte, m.adam_v.wte, n));
    CHECK(rms(without.adam_m.wte, n) == 0 && rms(without.adam_v.wte, n) == 0);
  }
}

int main() {
  set_threads(1);  // cases that compare thread counts set their own
  test_against_reference();
  test_central_differences();
  test_tied_is_block();
  test_threads();
  test_zero_queries();
  test_source_table();
  test_roles();
  test_arms();
  test_time_causality();
  test_context();
  test_validation();
  test_route_stats();
  test_initial_weights();
  test_decay();
  test_adamw();
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
