// test_cuda_model.cu - the whole model of train_rdattnres.cu against the CPU trainer, and against itself.
//
// Loss and every gradient, for every arm, in float32 and bf16, against the CPU model in double (`want`). The
// yardstick is `plain`: the CPU model in float for fp32; for bf16 the same model in double whose matrices are
// rounded to bf16. Then what must not change a bit: two
// runs, tied instead of block, recomputation, accumulation's order, resuming, the chunks of the classifier; and
// checkpoints that go to the CPU trainer and back.
#define TESTING
#define CPU_NAMESPACE cpu_double
#define REAL double
#include "../train_rdattnres_cpu.cpp"  // cpu_double: what is wanted
#define CPU_NAMESPACE cpu_float
#define REAL float
#include "../train_rdattnres_cpu.cpp"  // cpu_float: plain code, and the other end of exchanged checkpoints

#include "../train_rdattnres.cu"

#include "check.h"

using gpu::bf16;
using Numbers = std::vector<double>;

constexpr size_t B = 2, T = 37, V = 131;
constexpr double FACTOR = 4;
// In bf16 a number is rounded some twenty times on its way into a gradient, where `plain` rounds once, the
// weights. Independent errors add like the square root of their number.
constexpr double BF16_FACTOR = 5;

Config small_config(Arch arch, size_t S) {
  Config c;
  c.arch = arch, c.L = 3, c.C = 48, c.NH = 3, c.F = 104, c.S = S, c.T = T, c.V = V;
  return c;
}
struct Batch { std::vector<int> tokens, targets; };
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
  if (t.is_query()) return 0.15f * n;
  return t.decay ? 0.12f * n : 1 + 0.2f * n;
}
template <class floatX> void randomise(gpu::Model<floatX>& m) {
  for (const TensorSpec& t : tensor_table(m.config)) {
    std::vector<float> v(t.size());
    for (size_t i = 0; i < v.size(); i++) v[i] = random_parameter(t, m.config, i);
    gpu::upload(m.params.tensor(t.id), v.data(), v.size());
  }
  gpu::model_refresh(m);
}
double round_bf16(double v) {
  uint32_t bits;
  const float f = float(v);
  memcpy(&bits, &f, 4);
  bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
  float r;
  memcpy(&r, &bits, 4);
  return r;
}

struct Result { double loss; std::vector<Numbers> grads; std::vector<std::string> names; };

#define RESULT_ON_CPU(function, ns)                                                                            \
  Result function(const Config& c, const Batch& data, bool round_weights) {                                    \
    ns::Model m;                                                                                           \
    ns::model_create(m, c, B, T, 1);                                                                       \
    for (const TensorSpec& t : tensor_table(c))                                                            \
      for (size_t i = 0; i < t.size(); i++) {                                                              \
        const double v = random_parameter(t, c, i);                                                        \
        m.params.tensor(t.id)[i] = ns::real(round_weights && t.decay ? round_bf16(v) : v);                 \
      }                                                                                                    \
    ns::model_zero_grad(m);                                                                                \
    Result r;                                                                                              \
    r.loss = ns::model_loss_and_gradients(m, data.tokens.data(), data.targets.data(), B, T);               \
    for (const TensorSpec& t : tensor_table(c)) {                                                          \
      const ns::real* g = m.grads.tensor(t.id);                                                            \
      r.grads.emplace_back(g, g + t.size());                                                               \
      r.names.push_back(t.name);                                                                           \
    }                                                                                                      \
    ns::model_free(m);                                                                                     \
    return r;                                                                                              \
  }
RESULT_ON_CPU(result_double, cpu_double)
RESULT_ON_CPU(result_float, cpu_float)

template <class floatX> Result result_of(gpu::Model<floatX>& m, double loss) {
  Result r = {loss, {}, {}};
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
  const double loss = gpu::model_loss_and_gradients(m, data.tokens.data(), data.targets.data(), B, T);
  const Result r = result_of(m, loss);
  gpu::model_free(m);
  return r;
}
// Relative to the root mean square of what is wanted
double error_of(const Numbers& got, const Numbers& want) {
  double squares = 0, wanted = 0;
  for (size_t i = 0; i < want.size(); i++)
    squares += (got[i] - want[i]) * (got[i] - want[i]), wanted += want[i] * want[i];
  return wanted == 0 ? std::sqrt(squares) : std::sqrt(squares / wanted);
}
bool same_bits(const Result& a, const Result& b) { return a.loss == b.loss && a.grads == b.grads; }

template <class floatX> void test_gradients(Arch arch, size_t S) {
  const bool is_bf16 = std::is_same<floatX, bf16>::value;
  const Config c = small_config(arch, S);
  TEST(format("loss and gradients, %s, %s, S %zu", is_bf16 ? "bf16" : "fp32", ARCH_NAMES[int(arch)], S));
  const Batch data = batch(1, B);
  const Result want = result_double(c, data, false),
               plain = is_bf16 ? result_double(c, data, true) : result_float(c, data, false);
  const Result got = result_on_gpu<floatX>(c, data);
  const double factor = is_bf16 ? BF16_FACTOR : FACTOR;
  printf("       loss %.9f, want %.9f, error %.1e, plain %.1e\n", got.loss, want.loss,
         std::fabs(got.loss - want.loss), std::fabs(plain.loss - want.loss));
  CHECK_CLOSE(got.loss, want.loss,
              factor * std::fabs(plain.loss - want.loss) + want.loss * (is_bf16 ? 0x1p-9 : 0x1p-22));
  for (size_t n = 0; n < got.grads.size(); n++) {
    if (want.grads[n].empty()) continue;
    const double g = error_of(got.grads[n], want.grads[n]), p = error_of(plain.grads[n], want.grads[n]);
    printf("       d %-16s error %.2e, plain %.2e\n", got.names[n].c_str(), g, p);
    CHECK(g <= factor * p + (is_bf16 ? 0x1p-8 : 0x1p-22));
  }
  if (c.has_routes()) {  // the first attention site has one source: its queries and gain get no gradient at all
    for (int id : {TENSOR_attn_route_qk, TENSOR_attn_route_v, TENSOR_attn_route_gain})
      for (size_t i = 0; i < c.C && !got.grads[size_t(id)].empty(); i++) CHECK(got.grads[size_t(id)][i] == 0);
  }
  for (size_t i = c.V * c.C; i < c.Vp() * c.C; i++) CHECK(got.grads[TENSOR_wte][i] == 0);
}

template <class floatX> void test_same_bits() {
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

template <class floatX> std::vector<float> parameters_of(gpu::Model<floatX>& m) {
  std::vector<float> v(m.num_elements);
  gpu::download(v.data(), m.params.wte, v.size());
  return v;
}
// Ten steps of training on made-up shards, from step `from`; returns losses and norms.
struct Steps { std::vector<double> losses, norms; };
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

template <class floatX> void test_training(Arch arch) {
  const bool is_bf16 = std::is_same<floatX, bf16>::value;
  const Config c = small_config(arch, 2);
  const TokenData data = made_up_tokens();
  const Options o = step_options(2);
  const std::string path = format("/tmp/test_cuda_model_%d.safetensors", int(getpid()));

  gpu::Model<floatX> m;
  gpu::model_create(m, c, 2, T, 4);
  Steps whole;
  TRAIN(gpu, m, data, o, 0, 10, whole);
  const std::vector<float> end = parameters_of(m);
  gpu::model_free(m);

  TEST(format("ten steps like the CPU's, %s, %s", is_bf16 ? "bf16" : "fp32", ARCH_NAMES[int(arch)]));
  cpu_double::Model reference;
  cpu_double::model_create(reference, c, 2, T, 4);
  cpu_float::Model plain;
  cpu_float::model_create(plain, c, 2, T, 4);
  Steps want, by_float;
  TRAIN(cpu_double, reference, data, o, 0, 10, want);
  TRAIN(cpu_float, plain, data, o, 0, 10, by_float);
  for (size_t i = 0; i < 10; i++) {
    printf("       step %2zu: loss %.7f, want %.7f, float %.7f   norm %.5f, want %.5f\n", i + 1,
           whole.losses[i], want.losses[i], by_float.losses[i], whole.norms[i], want.norms[i]);
    CHECK_CLOSE(whole.losses[i], want.losses[i], is_bf16 ? 0x1p-8 * want.losses[i] : 1e-5 * want.losses[i]);
    CHECK_CLOSE(whole.norms[i], want.norms[i], (is_bf16 ? 0x1p-5 : 1e-4) * want.norms[i]);
  }
  cpu_double::model_free(reference);

  TEST(format("resumed in the middle, same bits, %s, %s", is_bf16 ? "bf16" : "fp32", ARCH_NAMES[int(arch)]));
  Steps halves;
  gpu::model_create(m, c, 2, T, 4);
  TRAIN(gpu, m, data, o, 0, 4, halves);
  gpu::model_save(m, path, config_to_metadata(c));
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
  gpu::model_save(m, path, config_to_metadata(c));
  {
    Checkpoint checkpoint = Checkpoint::open(path);
    cpu_float::model_load(plain, checkpoint, true);
  }
  CHECK(std::vector<float>(plain.params.wte, plain.params.wte + plain.num_elements) == end);
  const std::string back = path + ".back";
  cpu_float::model_save(plain, back, config_to_metadata(c));
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

  TEST(format("micro-batches of 1, 2 and 4 rows, %s, %s", is_bf16 ? "bf16" : "fp32", ARCH_NAMES[int(arch)]));
  for (size_t rows : {1, 4}) {
    gpu::Model<floatX> other;
    gpu::model_create(other, c, rows, T, 4);
    Steps steps;
    const Options o2 = step_options(rows);
    TRAIN(gpu, other, data, o2, 0, 2, steps);
    for (size_t i = 0; i < 2; i++) {
      CHECK_CLOSE(steps.losses[i], whole.losses[i], (is_bf16 ? 0x1p-9 : 1e-6) * whole.losses[i]);
      CHECK_CLOSE(steps.norms[i], whole.norms[i], (is_bf16 ? 0x1p-6 : 1e-5) * whole.norms[i]);
    }
    gpu::model_free(other);
  }
}

// With all queries zero every mix is the residual stream / K, and the norm removes the 1 / K (but for eps).
template <class floatX> void test_zero_queries() {
  TEST(format("queries at zero: rd, block, residual agree, %s",
              std::is_same<floatX, bf16>::value ? "bf16" : "fp32"));
  const Batch data = batch(6, B);
  double losses[3];
  for (Arch arch : {Arch::rd, Arch::block, Arch::residual}) {
    gpu::Model<floatX> m;
    gpu::model_create(m, small_config(arch, 2), B, T, 11);
    losses[arch == Arch::rd ? 0 : arch == Arch::block ? 1 : 2] =
        gpu::model_loss(m, data.tokens.data(), data.targets.data(), B, T);
    gpu::model_free(m);
  }
  printf("       losses %.7f %.7f %.7f\n", losses[0], losses[1], losses[2]);
  CHECK(losses[0] == losses[1]);
  CHECK_CLOSE(losses[0], losses[2], 1e-3);
}

template <class floatX> void test_validation() {
  TEST(format("validation, route statistics and logits, %s",
              std::is_same<floatX, bf16>::value ? "bf16" : "fp32"));
  const Config c = small_config(Arch::rd, 2);
  const TokenData data = made_up_tokens();
  gpu::Model<floatX> m, wide;
  gpu::model_create(m, c, 2, T, 1), gpu::model_create(wide, c, 5, T, 1);
  randomise(m), randomise(wide);
  cpu_double::Model reference;
  cpu_double::model_create(reference, c, 2, T, 1);
  for (const TensorSpec& t : tensor_table(c))
    for (size_t i = 0; i < t.size(); i++) reference.params.tensor(t.id)[i] = random_parameter(t, c, i);
  const bool is_bf16 = std::is_same<floatX, bf16>::value;
  const double tolerance = is_bf16 ? 2e-2 : 1e-5;
  const auto got = gpu::validate(m, data, 9 * T);
  const auto want = cpu_double::validate(reference, data, 9 * T);
  CHECK_EQ(got.tokens, want.tokens);
  CHECK_CLOSE(got.loss, want.loss, tolerance);
  CHECK(got.loss == gpu::validate(wide, data, 9 * T).loss);  // the batch does not show
  for (size_t l = 0; l < c.L; l++) {
    CHECK_CLOSE(got.routes.js_nats[l], want.routes.js_nats[l], tolerance);
    for (size_t j = 0; j < want.routes.qk[l].size(); j++) {
      CHECK_CLOSE(got.routes.qk[l][j], want.routes.qk[l][j], tolerance);
      CHECK_CLOSE(got.routes.v[l][j], want.routes.v[l][j], tolerance);
    }
  }
  cpu_double::Model rounded;  // the yardstick: weights as the products read them
  cpu_double::model_create(rounded, c, 2, T, 1);
  for (const TensorSpec& t : tensor_table(c))
    for (size_t i = 0; i < t.size(); i++) {
      const double v = random_parameter(t, c, i);
      rounded.params.tensor(t.id)[i] = t.decay ? round_bf16(v) : v;
    }
  std::vector<float> logits, logits_want, logits_plain;
  for (size_t n : {1, 5, 60}) {  // 60: longer than the context
    std::vector<int> context;
    for (size_t i = 0; i < n; i++) context.push_back(int(i * 7 % V));
    gpu::next_token_logits(m, context, logits);
    cpu_double::next_token_logits(reference, context, logits_want);
    cpu_double::next_token_logits(rounded, context, logits_plain);
    auto numbers = [](const std::vector<float>& v) { return Numbers(v.begin(), v.end()); };
    const double error = error_of(numbers(logits), numbers(logits_want));
    const double plain = is_bf16 ? error_of(numbers(logits_plain), numbers(logits_want)) : 1e-6;
    printf("       logits after %2zu tokens: error %.2e, plain %.2e\n", n, error, plain);
    CHECK(error <= BF16_FACTOR * plain);
  }
  cpu_double::model_free(rounded);
  cpu_double::model_free(reference);
  gpu::model_free(m), gpu::model_free(wide);
}

// Copies and kernels are queued and the host goes on; --profile puts events between them. Neither may show. The
// emulator does queued work at once, as late as it may, or in between.
template <class floatX> void test_queueing() {
  TEST(format("queued copies, and looking with --profile: same bits, %s",
              std::is_same<floatX, bf16>::value ? "bf16" : "fp32"));
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

template <class floatX> void test_all(bool brief) {
  test_gradients<floatX>(Arch::rd, 4);  // the last block is half a block
  if (!brief) {
    for (Arch arch : {Arch::rd, Arch::block, Arch::tied, Arch::average, Arch::frozen_v, Arch::residual})
      test_gradients<floatX>(arch, 2);
    test_gradients<floatX>(Arch::rd, 6), test_gradients<floatX>(Arch::average, 6);  // one block
    test_gradients<floatX>(Arch::rd, 1);                                            // every output a source
    test_same_bits<floatX>();
    test_zero_queries<floatX>();
    test_training<floatX>(Arch::residual);
  }
  test_validation<floatX>();
  test_training<floatX>(Arch::rd);
  if (!brief || std::is_same<floatX, bf16>::value) test_queueing<floatX>();
}

int main() {
  // The emulator's slow builds look for races and overruns: every kernel once is enough there.
#if defined(EMU_RACE) || defined(__SANITIZE_ADDRESS__)
  const bool brief = true;
#else
  const bool brief = false;
#endif
  gpu::device_open();
  test_all<float>(brief);
  test_all<bf16>(brief);
  gpu::device_close();
  return finish();
}
