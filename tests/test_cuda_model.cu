// test_cuda_model.cu - the whole model of train_rdattnres.cu against the CPU trainer, and against itself.
//
// Losses of all tokens and every gradient, for every arm, in float32 and bf16; training, routes, logits:
//   want    the CPU trainer in double
//   plain   for fp32 the CPU trainer in float; for bf16 the plain loops of reference.h, in float, rounding to
//           bf16 where train_rdattnres.cu says that it does
//   got     the CUDA trainer; how wrong it may be: compare.h
// Then what must not change a bit: two runs, tied instead of block, recomputation, resuming, the chunks of the
// classifier; and checkpoints that go to the CPU trainer and back.
#define TESTING
#define CPU_NAMESPACE cpu_double
#define REAL double
#include "train_rdattnres_cpu.cpp"  // cpu_double: what is wanted
#define CPU_NAMESPACE cpu_float
#define REAL float
#include "train_rdattnres_cpu.cpp"  // cpu_float: plain code, and the other end of exchanged checkpoints

#include "train_rdattnres.cu"

#include <sys/stat.h>

#include <array>

#include "tests/check.h"
#include "tests/child.h"   // in_child, refuses
#include "tests/device.h"  // compare: errors of numbers

constexpr size_t B = 2, T = 37, V = 131;
// The emulator's slow builds look for races and overruns: every kernel once is enough there, and numbers are
// the fast build's business where they take long.
#if defined(EMU_RACE) || defined(ADDRESS_SANITIZER)
constexpr bool BRIEF = true;
#else
constexpr bool BRIEF = false;
#endif
template <class floatX>
constexpr bool is_bf16 = std::is_same<floatX, bf16>::value;

Config small_config(Arch arch, size_t S) {
  Config c;
  c.arch = arch, c.L = 3, c.C = 48, c.NH = 3, c.F = 104, c.S = S, c.T = T, c.V = V;
  return c;
}
struct Batch {
  std::vector<int> tokens, targets;
};
Batch batch(uint64_t seed, size_t rows) {
  Batch b;
  for (size_t i = 0; i < rows * T; i++) {
    b.tokens.push_back(int(uniform(seed, 77, 2 * i) * V));
    b.targets.push_back(int(uniform(seed, 77, 2 * i + 1) * V));
  }
  return b;
}
// Random, larger than initial weights and with non-zero queries: zero queries hide swapped routes.
float random_parameter(const TensorSpec& t, const Config& c, size_t i) {
  if (t.id == TENSOR_wte && i >= c.V * c.C) return 0;
  const float n = normal(5, 1000 + uint64_t(t.id), i);
  if (t.kind == Kind::query) return 0.15f * n;
  return t.is_matrix() ? 0.12f * n : 1 + 0.2f * n;
}
template <class floatX>
void randomise(gpu::Model<floatX>& m) {
  for (const TensorSpec& t : tensor_table(m.config)) {
    std::vector<float> v(t.size());
    for (size_t i = 0; i < v.size(); i++) v[i] = random_parameter(t, m.config, i);
    gpu::upload(m.params.tensor(t.id), v.data(), v.size());
  }
  gpu::model_refresh(m);
}

template <class floatX>
double loss_and_gradients(gpu::Model<floatX>& m, const Batch& data) {
  gpu::InFlight& batch = m.in_flight[0];
  std::copy(data.tokens.begin(), data.tokens.end(), batch.tokens);
  std::copy(data.targets.begin(), data.targets.end(), batch.targets);
  gpu::start_micro_batch(m, batch, B, T, 1);
  return gpu::finish_micro_batch(batch, B * T);
}

// The yardstick for bf16. Parameters, their gradients and moments are a CPU model's in float, as are norm and
// update; forward and backward are reference.h's.
namespace cpu_bf16 {
using namespace cpu_float;

template <class X>
reference::Params<X> parameters(Model& m) {
  reference::Params<X> params;
  for (const TensorSpec& t : tensor_table(m.config))
    for (size_t i = 0; i < t.size(); i++) {
      const float v = m.params.tensor(t.id)[i], used = t.is_matrix() ? round_bf16(v) : v;
      if constexpr (std::is_same<X, float>::value)
        params[t.name].push_back(used);
      else
        params[t.name].push_back(X::input(used));
    }
  return params;
}
template <class X>  // puts losses and routes where the CPU trainer has them
double keep(Model& m, const reference::Run<X>& run, size_t BT) {
  for (size_t bt = 0; bt < BT; bt++) m.acts.losses[bt] = reference::plain_value(run.losses[bt]);
  for (size_t i = 0; i < run.routes.size(); i++)
    for (size_t r = 0; r < run.routes[i].size(); r++) {
      const reference::Array<X>& p = run.routes[i][r].p;
      for (size_t n = 0; n < p.size(); n++)
        site_at(m, i, BT).p[r * p.size() + n] = reference::plain_value(p[n]);
    }
  return mean_loss(m.acts.losses, BT);
}
std::vector<int> first(const int* tokens, size_t n) { return std::vector<int>(tokens, tokens + n); }

reference::Run<float> forward(Model& m, const int* tokens, const int* targets, size_t B, size_t T) {
  return reference::run_model(m.config, parameters<float>(m), first(tokens, B * T), first(targets, B * T), B, T,
                              true);
}
double model_loss(Model& m, const int* tokens, const int* targets, size_t B, size_t T) {
  return keep(m, forward(m, tokens, targets, B, T), B * T);
}
double model_loss_and_gradients(Model& m, const int* tokens, const int* targets, size_t B, size_t T,
                                size_t accumulation = 1) {
  using X = reference::Var<float>;
  reference::Tape<float>::get().clear();
  const reference::Params<X> params = parameters<X>(m);
  const reference::Run<X> run =
      reference::run_model(m.config, params, first(tokens, B * T), first(targets, B * T), B, T, true);
  const std::vector<float> d = reference::tape_gradients(run.mean_loss);
  for (const TensorSpec& t : tensor_table(m.config))
    for (size_t i = 0; i < t.size(); i++)
      m.grads.tensor(t.id)[i] += d[params.at(t.name)[i].node] / float(accumulation);
  return keep(m, run, B * T);
}
StepResult train_step(Model& m, const TokenData& data, const Options& o, size_t position, size_t step,
                      double lr) {
  const size_t B = m.B, T = m.T, accumulation = o.total_batch / (B * T);
  std::vector<int> tokens(B * T), targets(B * T);
  StepResult result = {0, 0};
  model_zero_grad(m);
  for (size_t micro = 0; micro < accumulation; micro++) {
    for (size_t b = 0; b < B; b++)
      training_example(data, T, o.seed, position + micro * B + b, &tokens[b * T], &targets[b * T]);
    result.loss += cpu_bf16::model_loss_and_gradients(m, tokens.data(), targets.data(), B, T, accumulation) /
                   double(accumulation);
  }
  result.norm = grad_norm(m);
  model_update(m, step, result.norm > o.clip ? o.clip / result.norm : 1, lr, o.weight_decay, o.query_lr_mult);
  return result;
}
Validation validate(Model& m, const TokenData& data, size_t max_tokens) {
  Validation result = {};
  std::vector<int> tokens(m.T), targets(m.T);
  for (size_t window = 0; window < max_tokens / m.T; window++, result.tokens += m.T) {
    data.window(window, m.T, tokens.data(), targets.data());
    result.loss += cpu_bf16::model_loss(m, tokens.data(), targets.data(), 1, m.T) * double(m.T);
    add_route_stats(result.routes, m, m.T);
  }
  result.loss /= double(result.tokens), result.routes.divide(double(result.tokens));
  return result;
}
void next_token_logits(Model& m, const std::vector<int>& context, std::vector<float>& logits) {
  const size_t n = std::min(context.size(), m.T);
  const int* last = context.data() + context.size() - n;
  const reference::Run<float> run = forward(m, last, last, 1, n);
  logits.assign(run.logits.end() - long(m.config.V), run.logits.end());
}
}  // namespace cpu_bf16
// f(the yardstick's functions for floatX): a macro, because a namespace is no argument
#define PLAIN(floatX, call) (is_bf16<floatX> ? cpu_bf16::call : cpu_float::call)

struct Result {
  double loss;
  Numbers losses;
  std::vector<Numbers> grads;
  std::vector<std::string> names;
};

template <class real>
Numbers numbers(const real* at, size_t n) {
  return Numbers(at, at + n);
}
Numbers numbers(const std::vector<float>& v) { return numbers(v.data(), v.size()); }
template <class floatX>
Numbers losses_of(const gpu::Model<floatX>& m, size_t BT) {
  std::vector<float> v(BT);
  gpu::download(v.data(), m.acts.losses, BT);
  return numbers(v);
}

#define RANDOMISE(m, real)                           \
  for (const TensorSpec& t : tensor_table(m.config)) \
    for (size_t i = 0; i < t.size(); i++) m.params.tensor(t.id)[i] = real(random_parameter(t, m.config, i));
#define RESULT_ON_CPU(function, ns)                                                          \
  Result function(const Config& c, const Batch& data) {                                      \
    ns::Model m;                                                                             \
    ns::model_create(m, c, B, T, 1);                                                         \
    RANDOMISE(m, ns::real)                                                                   \
    ns::model_zero_grad(m);                                                                  \
    Result r;                                                                                \
    r.loss = ns::model_loss_and_gradients(m, data.tokens.data(), data.targets.data(), B, T); \
    r.losses = numbers(m.acts.losses, B * T);                                                \
    for (const TensorSpec& t : tensor_table(c)) {                                            \
      r.grads.push_back(numbers(m.grads.tensor(t.id), t.size()));                            \
      r.names.push_back(t.name);                                                             \
    }                                                                                        \
    ns::model_free(m);                                                                       \
    return r;                                                                                \
  }
RESULT_ON_CPU(result_double, cpu_double)
RESULT_ON_CPU(result_float, cpu_float)
RESULT_ON_CPU(result_bf16, cpu_bf16)

template <class floatX>
Result result_of(gpu::Model<floatX>& m, double loss) {
  Result r = {loss, losses_of(m, B * T), {}, {}};
  for (const TensorSpec& t : tensor_table(m.config)) {
    std::vector<float> g(t.size());
    if (t.present) gpu::download(g.data(), m.grads.tensor(t.id), g.size());
    r.grads.emplace_back(g.begin(), g.end());
    r.names.push_back(t.name);
  }
  return r;
}
template <class floatX>
Result result_on_gpu(const Config& c, const Batch& data, bool recompute = false, size_t chunk_rows = 16) {
  gpu::Model<floatX> m;
  m.chunk_rows = chunk_rows;
  gpu::model_create(m, c, B, T, 1, recompute);
  randomise(m);
  gpu::model_zero_grad(m);
  const double loss = loss_and_gradients(m, data);
  const Result r = result_of(m, loss);
  gpu::model_free(m);
  return r;
}
bool same_bits(const Result& a, const Result& b) { return a.loss == b.loss && a.grads == b.grads; }
template <class floatX>
void test_gradients(Arch arch, size_t S) {
  const Config c = small_config(arch, S);
  TEST(format("losses and gradients, %s, %s, S %zu", type_name<floatX>(), ARCH_NAMES[int(arch)], S));
  const Batch data = batch(1, B);
  const Result want = result_double(c, data);
  const Result plain = is_bf16<floatX> ? result_bf16(c, data) : result_float(c, data);
  const Result got = result_on_gpu<floatX>(c, data);
  compare<float>("losses", got.losses, plain.losses, want.losses);
  for (size_t n = 0; n < got.grads.size(); n++)
    if (!want.grads[n].empty())
      compare<float>("d " + got.names[n], got.grads[n], plain.grads[n], want.grads[n]);
  if (c.has_routes()) {  // the first attention site has one source: its queries and gain get no gradient at all
    for (int id : {TENSOR_attn_route_qk, TENSOR_attn_route_v, TENSOR_attn_route_gain})
      for (size_t i = 0; i < c.C && !got.grads[size_t(id)].empty(); i++) CHECK(got.grads[size_t(id)][i] == 0);
  }
  for (size_t i = c.V * c.C; i < c.Vp() * c.C; i++) CHECK(got.grads[TENSOR_wte][i] == 0);
}

template <class floatX>
void test_same_bits() {
  const Batch data = batch(2, B);
  for (Arch arch : {Arch::rd, Arch::residual}) {
    const Config c = small_config(arch, 4);
    const Result first = result_on_gpu<floatX>(c, data);
    TEST(format("two runs, same bits, %s", ARCH_NAMES[int(arch)]));
    CHECK(same_bits(first, result_on_gpu<floatX>(c, data)));
    TEST(format("recomputation, same bits, %s", ARCH_NAMES[int(arch)]));
    CHECK(same_bits(first, result_on_gpu<floatX>(c, data, true)));
  }
  for (size_t S : {2, 4}) {
    TEST(format("tied is block, bit for bit, S %zu", S));
    const Result block = result_on_gpu<floatX>(small_config(Arch::block, S), data);
    CHECK(same_bits(block, result_on_gpu<floatX>(small_config(Arch::tied, S), data)));
  }
}

template <class floatX>
std::vector<float> parameters_of(gpu::Model<floatX>& m) {
  std::vector<float> v(m.num_elements);
  gpu::download(v.data(), m.params.wte, v.size());
  return v;
}
// Ten steps of training on made-up shards, from step `from`; returns losses and norms.
struct Steps {
  std::vector<double> losses, norms;
};
TokenData made_up_tokens() {
  std::vector<uint16_t> tokens;
  for (size_t i = 0; i < 40 * T + 1; i++) tokens.push_back(uint16_t(uniform(3, 78, i) * V));
  return TokenData::from_tokens(tokens, "made up", V);
}
Options step_options(size_t micro_batch_rows) {
  Options o;
  o.total_batch = 4 * T, o.batch = micro_batch_rows, o.seed = 9, o.lr = 3e-3, o.weight_decay = 0.1, o.clip = 1;
  o.query_lr_mult = 2, o.steps = 10, o.warmup = 2;
  return o;
}
#define TRAIN(ns, m, data, o, first, last, out)                                       \
  for (size_t step = first; step < last; step++) {                                    \
    const auto r = ns::train_step(m, data, o, step * o.total_batch / T, step + 1,     \
                                  learning_rate(step, o.steps, o.warmup, o.lr, 0.1)); \
    out.losses.push_back(r.loss), out.norms.push_back(r.norm);                        \
  }

template <class floatX>
void test_training(Arch arch) {
  const Config c = small_config(arch, 2);
  const TokenData data = made_up_tokens();
  const Options o = step_options(2);
  const std::string path = format("/tmp/test_cuda_model_%d.safetensors", int(getpid()));

  gpu::Model<floatX> m;
  gpu::model_create(m, c, 2, T, 4);
  Steps whole;
  TRAIN(gpu, m, data, o, 0, 10, whole);
  const std::vector<float> end = parameters_of(m);
  const Numbers last_losses = losses_of(m, 2 * T);
  gpu::model_free(m);

  TEST(format("ten steps like the CPU's, %s, %s", type_name<floatX>(), ARCH_NAMES[int(arch)]));
  cpu_double::Model reference;
  cpu_double::model_create(reference, c, 2, T, 4);
  cpu_float::Model plain;
  cpu_float::model_create(plain, c, 2, T, 4);
  Steps want, by_plain;
  const bool judged = !BRIEF || !is_bf16<floatX>;
  const size_t n = plain.num_elements;
  TRAIN(cpu_double, reference, data, o, 0, 2, want);
  const Numbers want_two = numbers(reference.params.wte, n);
  TRAIN(cpu_double, reference, data, o, 2, 10, want);
  CHECK_EQ(whole.losses.size(), want.losses.size());
  Numbers plain_two;
  for (size_t first : {0, 2}) {
    const size_t last = !judged ? 0 : first == 0 ? 2 : 10;
    if (is_bf16<floatX>)
      TRAIN(cpu_bf16, plain, data, o, first, last, by_plain)
    else
      TRAIN(cpu_float, plain, data, o, first, last, by_plain)
    if (first == 0) plain_two = numbers(plain.params.wte, n);
  }
  if (judged) {
    for (size_t i = 0; i < 10; i++)
      printf("       step %2zu: loss %.7f, plain %.7f, want %.7f   norm %.6f, plain %.6f, want %.6f\n", i + 1,
             whole.losses[i], by_plain.losses[i], want.losses[i], whole.norms[i], by_plain.norms[i],
             want.norms[i]);
    compare<float>("losses", whole.losses, by_plain.losses, want.losses);
    compare<float>("norms", whole.norms, by_plain.norms, want.norms);
    compare<float>("last token losses", last_losses, numbers(plain.acts.losses, 2 * T),
                   numbers(reference.acts.losses, 2 * T));
    compare<float>("parameters", numbers(end), numbers(plain.params.wte, n), numbers(reference.params.wte, n));
  }
  cpu_double::model_free(reference);

  TEST(format("resumed in the middle, same bits, %s, %s", type_name<floatX>(), ARCH_NAMES[int(arch)]));
  Steps halves;
  gpu::model_create(m, c, 2, T, 4);
  TRAIN(gpu, m, data, o, 0, 4, halves);
  gpu::model_save(m, path, {});
  gpu::model_free(m);
  gpu::model_create(m, c, 2, T, 5);  // other initial weights: all of them must come from the file
  {
    Checkpoint checkpoint = Checkpoint::open(path);
    gpu::model_load(m, checkpoint, true);
  }
  TRAIN(gpu, m, data, o, 4, 10, halves);
  CHECK(halves.losses == whole.losses);
  CHECK(halves.norms == whole.norms);
  CHECK(parameters_of(m) == end);

  TEST(format("checkpoint to the CPU trainer and back, %s", ARCH_NAMES[int(arch)]));
  gpu::model_save(m, path, {});
  {
    Checkpoint checkpoint = Checkpoint::open(path);
    cpu_float::model_load(plain, checkpoint, true);
  }
  CHECK(std::vector<float>(plain.params.wte, plain.params.wte + plain.num_elements) == end);
  const std::string back = path + ".back";
  cpu_float::model_save(plain, back, {});
  {
    std::vector<char> a, b;
    for (auto [name, bytes] :
         {std::pair<const char*, std::vector<char>*>(path.c_str(), &a), {back.c_str(), &b}}) {
      FILE* file = fopen(name, "rb");
      for (int ch; (ch = fgetc(file)) != EOF;) bytes->push_back(char(ch));
      fclose(file);
    }
    CHECK(a == b);
  }
  unlink(path.c_str()), unlink(back.c_str());
  cpu_float::model_free(plain);
  gpu::model_free(m);

  TEST(format("micro-batches of 1, 2 and 4 rows, %s, %s", type_name<floatX>(), ARCH_NAMES[int(arch)]));
  for (size_t rows : {1, 4}) {
    gpu::Model<floatX> other;
    gpu::model_create(other, c, rows, T, 4);
    Steps steps;
    const Options o2 = step_options(rows);
    TRAIN(gpu, other, data, o2, 0, 2, steps);
    CHECK_EQ(steps.losses.size(), 2u);
    if (judged) {
      // Sums in another order, as close to what is wanted. Two losses and norms are too few to judge the plain
      // code by: it is judged by all its steps.
      compare<float>(format("parameters, %zu rows", rows), numbers(parameters_of(other)), plain_two, want_two);
      check_error<float>("losses", error_of(steps.losses.data(), want.losses.data(), 2),
                         error_of(by_plain.losses, want.losses));
      check_error<float>("norms", error_of(steps.norms.data(), want.norms.data(), 2),
                         error_of(by_plain.norms, want.norms));
    }
    gpu::model_free(other);
  }
}

// With all queries zero every mix is the residual stream / K, and the norm removes the 1 / K (but for eps).
template <class floatX>
void test_zero_queries() {
  TEST(format("queries at zero: rd, block, residual agree, %s", type_name<floatX>()));
  const Batch data = batch(6, B);
  const int *tokens = data.tokens.data(), *targets = data.targets.data();
  Numbers got[3], plain[3], want[3];
  for (int n = 0; n < 3; n++) {
    const Config c = small_config(std::array{Arch::rd, Arch::block, Arch::residual}[size_t(n)], 2);
    gpu::Model<floatX> m;
    gpu::model_create(m, c, B, T, 11);
    gpu::token_losses(m, tokens, targets, B, T);
    got[n] = losses_of(m, B * T);
    gpu::model_free(m);
    cpu_float::Model yardstick;
    cpu_float::model_create(yardstick, c, B, T, 11);
    PLAIN(floatX, model_loss(yardstick, tokens, targets, B, T));
    plain[n] = numbers(yardstick.acts.losses, B * T);
    cpu_float::model_free(yardstick);
    cpu_double::Model reference;
    cpu_double::model_create(reference, c, B, T, 11);
    cpu_double::model_loss(reference, tokens, targets, B, T);
    want[n] = numbers(reference.acts.losses, B * T);
    cpu_double::model_free(reference);
    compare<float>(ARCH_NAMES[int(c.arch)], got[n], plain[n], want[n]);
  }
  CHECK(got[0] == got[1]);
  const double apart = error_of(got[0], got[2]).rms, by_eps = error_of(want[0], want[2]).rms;
  printf("       rd and residual are %.2e apart; by eps alone %.2e\n", apart, by_eps);
  CHECK(apart <= by_eps + ERROR_RATIO * (error_of(plain[0], want[0]).rms + error_of(plain[2], want[2]).rms));
}

Numbers route_numbers(const RouteStats& stats) {
  Numbers all = stats.js_nats;
  for (const auto* routes : {&stats.qk, &stats.v})
    for (const std::vector<double>& site : *routes) all.insert(all.end(), site.begin(), site.end());
  return all;
}
template <class floatX>
void test_validation() {
  TEST(format("validation, route statistics and logits, %s", type_name<floatX>()));
  const Config c = small_config(Arch::rd, 2);
  const TokenData data = made_up_tokens();
  gpu::Model<floatX> m, wide;
  gpu::model_create(m, c, 2, T, 1), gpu::model_create(wide, c, 5, T, 1);
  randomise(m), randomise(wide);
  cpu_double::Model reference;
  cpu_double::model_create(reference, c, 2, T, 1);
  RANDOMISE(reference, double)
  cpu_float::Model yardstick;
  cpu_float::model_create(yardstick, c, 2, T, 1);
  RANDOMISE(yardstick, float)
  const auto got = validate(m, data, 9 * T);
  const auto want = validate(reference, data, 9 * T);
  const auto plain =
      is_bf16<floatX> ? cpu_bf16::validate(yardstick, data, 9 * T) : validate(yardstick, data, 9 * T);
  CHECK_EQ(got.tokens, want.tokens);
  CHECK_EQ(plain.tokens, want.tokens);
  double sum = 0;
  std::vector<int> tokens(T), targets(T);
  for (size_t window = 0; window < 9; window++) {
    data.window(window, T, tokens.data(), targets.data());
    for (float loss : gpu::token_losses(m, tokens.data(), targets.data(), 1, T)) sum += double(loss);
  }
  CHECK_EQ(got.loss, sum / double(got.tokens));
  compare<float>("route statistics", route_numbers(got.routes), route_numbers(plain.routes),
                 route_numbers(want.routes));
  CHECK(got.loss == validate(wide, data, 9 * T).loss);  // the batch does not show
  std::vector<float> logits, logits_want, logits_plain;
  double largest = 0;            // error of the plain code
  for (size_t n : {1, 5, 60}) {  // 60: longer than the context
    std::vector<int> context;
    for (size_t i = 0; i < n; i++) context.push_back(int(i * 7 % V));
    gpu::next_token_logits(m, context, logits);
    cpu_double::next_token_logits(reference, context, logits_want);
    PLAIN(floatX, next_token_logits(yardstick, context, logits_plain));
    compare<float>(format("logits after %zu", n), numbers(logits), numbers(logits_plain), numbers(logits_want));
    for (size_t v = 0; v < V; v++)
      largest = std::max(largest, std::fabs(double(logits_plain[v]) - logits_want[v]));
  }

  TEST(format("a prompt is continued as the CPU does, %s", type_name<floatX>()));
  const std::vector<int> prompt = {3, 1, 4, 1, 5, 9, 2, 6};
  const size_t more = BRIEF ? 3 : 40;  // past the end of the context, if it may take long
  if (!is_bf16<floatX>)
    for (double temperature : {0.0, 1.0})
      CHECK(generate(m, prompt, more, temperature, 20, 0.95, 7, -1) ==
            generate(yardstick, prompt, more, temperature, 20, 0.95, 7, -1));
  // In bf16 another token may win where two are nearly as likely; nowhere else.
  const std::vector<int> text = generate(m, prompt, more, 0, 0, 1, 7, -1);
  CHECK_EQ(text.size(), prompt.size() + more);
  size_t others = 0;
  for (size_t n = prompt.size(); n < text.size(); n++) {
    const std::vector<int> before(text.begin(), text.begin() + long(n));
    cpu_double::next_token_logits(reference, before, logits_want);
    const float best = *std::max_element(logits_want.begin(), logits_want.end());
    const float chosen = logits_want[size_t(text[n])];
    CHECK(best - chosen <= 2 * ERROR_RATIO * largest);
    others += chosen < best;
  }
  printf("       %zu tokens, %zu not the first choice in double; plain logits are off by up to %.1e\n", more,
         others, largest);
  CHECK(std::vector<int>(text.begin(), text.begin() + long(prompt.size())) == prompt);
  cpu_float::model_free(yardstick);
  cpu_double::model_free(reference);
  gpu::model_free(m), gpu::model_free(wide);
}

// Copies and kernels are queued and the host goes on; --profile puts events between them. Neither may show. The
// emulator does queued work at once, as late as it may, or in between.
template <class floatX>
void test_queueing() {
  TEST(format("queued copies, and looking with --profile: same bits, %s", type_name<floatX>()));
  const Config c = small_config(Arch::rd, 2);
  const TokenData data = made_up_tokens();
  const Options o = step_options(1);  // four micro-batches a step take turns in two places
  const auto train = [&](bool look) {
    gpu::Model<floatX> m;
    gpu::model_create(m, c, 1, T, 4);
    Steps steps;
    gpu::profile.on = look;
    TRAIN(gpu, m, data, o, 0, 2, steps);
    if (look) gpu::profile.end_step();
    gpu::profile.on = false;
    const std::vector<float> end = parameters_of(m);
    gpu::model_free(m);
    return std::make_tuple(steps.losses, steps.norms, end);
  };
  const auto plain = train(false);
  CHECK(train(true) == plain);
  size_t elements = 0;
  for (const TensorSpec& t : tensor_table(c)) elements += t.size();
  const size_t micro_batches = 2 * o.total_batch / T;
  const auto row = [](const char* name) { return gpu::profile.row(name); };
  CHECK_EQ(row("train_step").calls, 2u);
  CHECK_EQ(row("model_forward").calls, micro_batches);
  CHECK_EQ(row("attention_forward").calls, micro_batches * c.L);
  CHECK_EQ(row("attention_forward").flops, double(micro_batches * c.L) * 4 * double(c.C) * T * (T + 1) / 2);
  CHECK_EQ(row(format("matmul_forward %zu x %zu x %zu", T, c.F, c.C).c_str()).calls, micro_batches * c.L * 2);
  CHECK_EQ(row(format("matmul_backward_weight %zu x %zu x %zu", c.C, c.F, T).c_str()).flops,
           double(micro_batches * c.L) * 2 * double(c.C * c.F * T));
  CHECK_EQ(row("route_forward").calls, micro_batches * 2 * c.L);  // every site but the first
  CHECK_EQ(row("model_zero_grad").bytes, 2.0 * 4 * double(elements));
  const std::string table = gpu::profile.finish(2);
  printf("%s", table.c_str());
  CHECK((table.find("emulated: no times") != std::string::npos) == EMULATED);
  CHECK(gpu::profile.rows.empty() && gpu::profile.events.empty());
#ifndef __CUDACC__
  const emu::Order order = emu::order;
  for (emu::Order other : {emu::Order::forward, emu::Order::reverse, emu::Order::random}) {
    emu::order = other;
    CHECK(train(false) == plain);
  }
  emu::order = order;
#endif
}

// Every buffer in its turn does not fit: the message names it, what it needs and what is left.
void test_out_of_memory() {
  TEST("out of memory: whichever buffer it is, the message names it");
#ifdef __CUDACC__
  SKIP("only the emulator's card can be made smaller");
#else
  const Config c = small_config(Arch::rd, 2);
  size_t elements = 0, matrices = 0;
  for (const TensorSpec& t : tensor_table(c)) elements += t.size(), matrices += t.is_matrix() ? t.size() : 0;
  struct Buffer {
    const char* name;
    size_t bytes;
    const char* hint;
  };
  std::vector<Buffer> buffers;
  for (const char* family : {"parameters", "gradients", "first moments", "second moments"})
    buffers.push_back({family, elements * sizeof(float), "lower the sizes of the model"});
  buffers.push_back({"bf16 copies of the matrices", matrices * sizeof(bf16), "lower the sizes of the model"});
  gpu::Activations<bf16> none = {};
  gpu::for_each_activation(none, c, B, T, false, gpu::classifier_rows(c, B * T),
                           [&](const char*, const char* name, auto*& at, size_t n) {
                             buffers.push_back({name, n * sizeof *at, "lower --batch, or add --recompute"});
                           });
  size_t free = 0, card = 0, taken = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &card));
  taken = card - free;
  for (const Buffer& buffer : buffers) {
    emu::device_bytes = taken + buffer.bytes - 1;
    const Outcome outcome = in_child([&] {
      gpu::Model<bf16> m;
      gpu::model_create(m, c, B, T, 1);
    });
    CHECK(refuses(outcome, EXIT_ERROR,
                  format("out of GPU memory: %s needs %s, %s of %s are free; %s", buffer.name,
                         human_bytes(buffer.bytes).c_str(), human_bytes(buffer.bytes - 1).c_str(),
                         human_bytes(emu::device_bytes).c_str(), buffer.hint)));
    taken += (buffer.bytes + 511) / 512 * 512;
  }
  emu::device_bytes = card;
#endif
}

template <class floatX>
void test_blame(Arch arch) {
  TEST(format("a number that is not finite is traced to where a step made it first: %s, %s",
              ARCH_NAMES[int(arch)], type_name<floatX>()));
  const Config c = small_config(arch, 2);
  const size_t L = c.L;
  const Batch data = batch(9, B);
  gpu::Model<floatX> m;
  gpu::model_create(m, c, B, T, 12);
  // One of a tensor's L parts, or all of it (layer L), becomes `value`.
  const auto fill = [&](Tensors<float>& family, const char* name, size_t layer, float value) {
    for (const TensorSpec& t : tensor_table(c)) {
      if (strcmp(t.name, name) != 0) continue;
      const std::vector<float> values(layer < L ? t.size() / L : t.size(), value);
      gpu::upload(family.tensor(t.id) + (layer < L ? layer * values.size() : 0), values.data(), values.size());
    }
  };
  struct Fill {
    const char* name;
    size_t layer;
    float value;
  };
  const auto blame = [&](const std::vector<Fill>& fills) {
    randomise(m);
    for (const Fill& f : fills) fill(m.params, f.name, f.layer, f.value);
    gpu::model_refresh(m);
    gpu::model_zero_grad(m);
    loss_and_gradients(m, data);
    return gpu::blame_non_finite(m, B * T);
  };
  CHECK_EQ(blame({}), "");
  CHECK_EQ(blame({{"wv", 1, NAN}}), "parameter wv, layer 1");
  // From here on every parameter is finite.
  CHECK_EQ(blame({{"w_down", 1, 3e38f}}), "the output of the feed-forward, layer 1");
  CHECK_EQ(blame({{"wo", 2, 3e38f}}), "the output of the attention, layer 2");
  CHECK_EQ(blame({{"final_norm", L, 3e38f}}), "what the head reads");
  // Nothing comes out of the feed-forward, since silu(0) = 0; but a gradient goes in.
  CHECK_EQ(blame({{"w_gate", 1, 0}, {"w_up", 1, 1e30f}, {"w_down", 1, 1e30f}}), "gradient of w_gate, layer 1");
  if (c.has_routes()) {
    CHECK_EQ(blame({{"out_route", L, 3e38f}, {"out_route_gain", L, 10}}), "the output route");
    CHECK_EQ(blame({{"mlp_route", 2, 3e38f}, {"mlp_route_gain", 2, 10}}),
             "a route of the feed-forward, layer 2");
    CHECK_EQ(blame({{"attn_route_qk", 1, 3e38f}, {"attn_route_gain", 1, 10}}),
             "a route of the attention, layer 1");
    CHECK_EQ(blame({{"out_route", L, 0}, {"out_route_gain", L, 3e38f}, {"final_norm", L, 1e6f}}),
             "gradient of out_route");
  }
  CHECK_EQ(blame({}), "");
  // From the embedding up: of several bad gradients that nearest to the output is named.
  for (const Fill& f : {Fill{"wte", L, NAN}, Fill{"w_down", 0, INFINITY}, Fill{"attn_norm", 2, -INFINITY},
                        Fill{"mlp_norm", 2, NAN}, Fill{"final_norm", L, NAN}}) {
    fill(m.grads, f.name, f.layer, f.value);
    CHECK_EQ(gpu::blame_non_finite(m, B * T),
             std::string("gradient of ") + f.name + (f.layer < L ? format(", layer %zu", f.layer) : ""));
  }
  gpu::model_free(m);
}

// Four micro-batches of one window each; the token that overflows is in one of them only.
template <class floatX>
void test_bad_micro_batch() {
  TEST(format("a bad number is traced in whichever micro-batch makes it, and nothing is updated, %s",
              type_name<floatX>()));
  const Config c = small_config(Arch::rd, 2);
  gpu::Model<floatX> m;
  gpu::model_create(m, c, 1, T, 13);
  randomise(m);
  std::vector<float> wte(c.Vp() * c.C), wo(c.L * c.C * c.C), w_gate(c.L * c.F * c.C), w_up(w_gate);
  gpu::download(wte.data(), m.params.wte, wte.size());
  gpu::download(wo.data(), m.params.wo, wo.size());
  gpu::download(w_gate.data(), m.params.w_gate, w_gate.size());
  gpu::download(w_up.data(), m.params.w_up, w_up.size());
  // The marked token alone has something in channel 0; the first feed-forward multiplies that by too much.
  const size_t marked = V - 1;
  for (size_t v = 0; v < V; v++) wte[v * c.C] = v == marked;
  std::fill_n(wo.begin(), c.C * c.C, 0.0f);
  for (size_t f = 0; f < c.F; f++) w_gate[f * c.C] = w_up[f * c.C] = 1e20f;
  gpu::upload(m.params.wte, wte.data(), wte.size());
  gpu::upload(m.params.wo, wo.data(), wo.size());
  gpu::upload(m.params.w_gate, w_gate.data(), w_gate.size());
  gpu::upload(m.params.w_up, w_up.data(), w_up.size());
  gpu::model_refresh(m);
  const std::vector<float> before = parameters_of(m);
  Options o;
  o.total_batch = 4 * T;
  fatal_throws = true;
  for (size_t window = 0; window < 4; window++) {
    std::vector<uint16_t> tokens(4 * T + 1);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = uint16_t(i % 100);
    tokens[window * T + 3] = uint16_t(marked);
    const TokenData data = TokenData::from_tokens(tokens, "test", V);
    std::string message;
    try {
      gpu::train_step(m, data, o, 0, 7, 0.1);
    } catch (const Fatal& fatal) {
      message = fatal.message;
    }
    CHECK(message.find("first bad number in the output of the feed-forward, layer 0;") != std::string::npos);
    CHECK(parameters_of(m) == before);
  }
  // A finite loss, since silu(0) = 0, but an infinite gradient.
  randomise(m);
  const std::vector<float> none(c.F * c.C, 0), large(c.F * c.C, 1e30f);
  gpu::upload(m.params.w_gate + none.size(), none.data(), none.size());
  gpu::upload(m.params.w_up + large.size(), large.data(), large.size());
  gpu::upload(m.params.w_down + large.size(), large.data(), large.size());
  gpu::model_refresh(m);
  std::string message;
  try {
    gpu::train_step(m, TokenData::from_tokens(std::vector<uint16_t>(4 * T + 1, 5), "test", V), o, 0, 7, 0.1);
  } catch (const Fatal& fatal) {
    message = fatal.message;
  }
  CHECK(message.find("step 7: loss ") == 0 && std::isfinite(std::strtod(message.c_str() + 13, nullptr)));
  CHECK(message.find("first bad number in gradient of w_gate, layer 1;") != std::string::npos);
  fatal_throws = false;
  gpu::model_free(m);
}

template <class floatX>
void test_all() {
  test_gradients<floatX>(Arch::rd, 4);  // the last block is half a block
  if (!BRIEF) {
    for (Arch arch : {Arch::rd, Arch::block, Arch::tied, Arch::average, Arch::frozen_v, Arch::residual})
      test_gradients<floatX>(arch, 2);
    test_gradients<floatX>(Arch::rd, 6), test_gradients<floatX>(Arch::average, 6);  // one block
    test_gradients<floatX>(Arch::rd, 1);                                            // every output a source
    test_same_bits<floatX>();
    test_zero_queries<floatX>();
    test_training<floatX>(Arch::residual);
    for (Arch arch : {Arch::rd, Arch::residual}) test_blame<floatX>(arch);
    test_bad_micro_batch<floatX>();
  }
  test_validation<floatX>();
  test_training<floatX>(Arch::rd);
  if (!BRIEF || is_bf16<floatX>) test_queueing<floatX>();
}

int main() {
  gpu::device_open();
  test_out_of_memory();  // first: they fork, so there should be one thread
  test_all<float>();
  test_all<bf16>();
  gpu::device_close();
  return finish();
}
