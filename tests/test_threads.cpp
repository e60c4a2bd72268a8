// test_threads.cpp - the CPU trainer's threads under the thread sanitizer, which stops the program at the first
// two accesses to one place that nothing orders. Built by make test_all with clang++, whose OpenMP tells the
// sanitizer what it orders; the first cases hold it to that.
#define TESTING
#include "train_rdattnres_cpu.cpp"

#include <omp.h>

#include <future>

#include "tests/check.h"
#include "tests/child.h"

extern "C" const char* __tsan_default_options() { return "halt_on_error=1:ignore_noninstrumented_modules=1"; }
constexpr int RACE = 66;  // the sanitizer's exit status

// ---- does it see what it should? -------------------------------------------------------------------------

static int shared_sum;
static std::vector<int> first(1000), second(1000);

static void race_in_loop() {
#pragma omp parallel for
  for (size_t i = 0; i < first.size(); i++) shared_sum += int(i);
}
static void race_in_dynamic_loop() {
#pragma omp parallel
  {
#pragma omp barrier
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < first.size(); i++) {
      shared_sum += int(i);
      usleep(10);  // or one thread does it all
    }
  }
}
static void missing_barrier() {
#pragma omp parallel
  {
#pragma omp for nowait
    for (size_t i = 0; i < first.size(); i++) first[i] = int(i);
#pragma omp for
    for (size_t i = 0; i < first.size(); i++) second[i] = first[999 - i];
  }
}
static void barrier_in_place() {
#pragma omp parallel
  {
#pragma omp for
    for (size_t i = 0; i < first.size(); i++) first[i] = int(i);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < first.size(); i++) second[i] = first[999 - i];
#pragma omp for
    for (size_t i = 0; i < first.size(); i++) first[i] = second[999 - i];
  }
}

static void test_detection() {
  const struct {
    const char* name;
    void (*body)();
    int status;
  } cases[] = {{"a race in a loop is reported", race_in_loop, RACE},
               {"a race between chunks of a dynamic loop is reported", race_in_dynamic_loop, RACE},
               {"a barrier that is missing between two loops is reported", missing_barrier, RACE},
               {"three loops with their barriers are not reported, and compute", barrier_in_place, 0}};
  for (const auto& c : cases) {
    TEST(c.name);
    const Outcome outcome = in_child(c.body);
    CHECK_EQ(outcome.status, c.status);
    CHECK_EQ(outcome.err.find("ThreadSanitizer: data race") != std::string::npos, c.status == RACE);
  }
  barrier_in_place();
  for (size_t i = 0; i < first.size(); i++) CHECK_EQ(first[i] + second[i], 999);
}

// ---- the trainer -----------------------------------------------------------------------------------------

// Odd sizes, so that every tail runs; more than one chunk of tokens, of heads, and of the classifier's rows.
static void train(cpu::Model& m, const Config& config, const TokenData& data, double* loss) {
  Options o;
  o.total_batch = 2 * 5 * config.T;
  o.clip = 1;
  cpu::model_create(m, config, 5, config.T, 1);
  for (size_t step = 1; step <= 2; step++)
    *loss = cpu::train_step(m, data, o, (step - 1) * 10, step, 0.01).loss;
}

static void test_training() {
  std::vector<uint16_t> tokens(3001);
  for (size_t i = 0; i < tokens.size(); i++) tokens[i] = uint16_t(philox(1, STREAM_TEST, i).x[0] % 257);
  const TokenData data = TokenData::from_tokens(tokens, "made-up tokens", 257);
  for (int arch = 0; arch < NUM_ARCHS; arch++) {
    TEST(std::string("two steps, validation, a sample and answers, with 4 threads as with 1: ") +
         ARCH_NAMES[arch]);
    Config config;
    config.arch = Arch(arch);
    config.L = 3;
    config.C = 48;
    config.NH = 3;
    config.F = 40;
    config.S = 4;
    config.T = 67;
    cpu::Model one, four;
    double losses[2];
    omp_set_num_threads(1);
    train(one, config, data, &losses[0]);
    omp_set_num_threads(4);
    train(four, config, data, &losses[1]);
    CHECK_EQ(losses[0], losses[1]);
    CHECK(memcmp(one.params.wte, four.params.wte, one.num_elements * sizeof(float)) == 0);
    CHECK(std::isfinite(validate(four, data, 700).loss));
    const std::vector<int> sample = generate(four, {256}, 3, 1, 0, 1, 1, -1);
    CHECK_EQ(sample.size(), 4u);
    CHECK_EQ(generate(four, {256}, 3, 1, 0, 1, 1, sample[1]).size(), 2u);  // ends behind an end-of-text
    if (Arch(arch) == Arch::rd) CHECK(mark_answers(four, 3).total().asked > 0);
    cpu::model_free(one);
    cpu::model_free(four);
  }
}

int main() {
  omp_set_num_threads(4);  // whatever the environment says
  test_detection();
  test_training();
  return finish();
}
