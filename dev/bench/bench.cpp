// bench.cpp - how fast a training step is, and how much memory it takes, for every arm at a few fixed sizes.
//
//   make bench                    all sizes, all arms: a table, and a JSON line each in bench.jsonl
//   build/bench small rd,block    some sizes (small, medium, s), some arms
//
// A step is what train_rdattnres_cpu does: forward, backward, clipping, AdamW. The arms take turns, one step
// each, so what the machine does meanwhile hits all of them; the figure is the median of the rounds. They share
// one set of buffers, those of `average`, whose tensors include everyone's. Peak memory is measured apart: a
// process of its own for each arm that does two steps and ends.
#include <sys/wait.h>
#include <unistd.h>

#include "dev/bench/measure.h"  // clock, machine peak, peak memory
#define TESTING
#include "train_rdattnres_cpu.cpp"
#include "dev/common/flops.h"  // training_flops
#ifdef _OPENMP
#include <omp.h>
#endif
using namespace cpu;

struct Size {
  const char* name;
  size_t L, C, NH, F, S, T, V, B, rounds;
};
constexpr Size SIZES[] = {{"small", 4, 128, 4, 640, 2, 256, 257, 8, 31},
                          {"medium", 8, 256, 4, 1280, 4, 256, 8192, 4, 15},
                          {"s", 16, 576, 9, 2880, 4, 256, 32768, 2, 7}};

static Config config_of(const Size& size, Arch arch) {
  Config c;
  c.arch = arch, c.L = size.L, c.C = size.C, c.NH = size.NH, c.F = size.F, c.S = size.S;
  c.T = size.T, c.V = size.V;
  return c;
}

struct Batch {
  std::vector<int> tokens, targets;
  Batch(size_t BT, size_t V) {
    for (size_t i = 0; i < BT; i++) {
      tokens.push_back(int(uniform(1, 0, i) * double(V)));
      targets.push_back(int(uniform(1, 1, i) * double(V)));
    }
  }
};

static double one_step(Model& m, const Batch& batch, size_t step) {
  const double start = measure::seconds_now();
  model_zero_grad(m);
  model_loss_and_gradients(m, batch.tokens.data(), batch.targets.data(), m.B, m.T);
  const double norm = grad_norm(m);
  model_update(m, step, norm > 1 ? 1 / norm : 1, 1e-4, 0.1, 1);
  return measure::seconds_now() - start;
}

// Parameters, gradients and two moments, and all activations: what the buffers' table says a step takes.
static size_t bytes_of(const Model& m) { return 4 * m.num_elements * sizeof(real) + m.activation_bytes; }

// Peak resident bytes of a fresh process that does two steps, and what bytes_of says; zero if it failed.
struct Memory {
  size_t measured, predicted;
};
static Memory memory_of(const Size& size, Arch arch) {
  Memory memory = {};
  int ends[2];
  if (pipe(ends) != 0) return memory;
  const pid_t child = fork();
  if (child == 0) {
    Model m;
    model_create(m, config_of(size, arch), size.B, size.T, 1);
    const Batch batch(size.B * size.T, size.V);
    for (size_t step = 1; step <= 2; step++) one_step(m, batch, step);
    memory = {measure::peak_memory(), bytes_of(m)};
    _exit(write(ends[1], &memory, sizeof(memory)) == ssize_t(sizeof(memory)) ? 0 : 1);
  }
  close(ends[1]);
  if (child < 0 || read(ends[0], &memory, sizeof(memory)) != ssize_t(sizeof(memory))) memory = {};
  close(ends[0]);
  if (child > 0) waitpid(child, nullptr, 0);
  return memory;
}

static bool listed(const std::string& list, const char* name) {
  return list.empty() || ("," + list + ",").find("," + std::string(name) + ",") != std::string::npos;
}

int main(int argc, char** argv) {
  const std::string sizes = argc > 1 ? argv[1] : "", arms = argc > 2 ? argv[2] : "";
  FILE* json = fopen("bench.jsonl", "w");
  if (!json) fatal(EXIT_ERROR, "bench.jsonl: %s", strerror(errno));
  std::vector<std::pair<const Size*, Arch>> runs;
  for (const Size& size : SIZES)
    for (int a = 0; a < NUM_ARCHS; a++)
      if (listed(sizes, size.name) && listed(arms, ARCH_NAMES[a])) runs.push_back({&size, Arch(a)});
  if (runs.empty()) fatal(EXIT_USAGE, "nothing to run: sizes are small, medium, s; arms are those of --arch");
  std::vector<Memory> memory;  // before OpenMP starts its threads: they do not survive a fork
  for (const auto& run : runs) memory.push_back(memory_of(*run.first, run.second));

  int threads = 1;
#ifdef _OPENMP
  threads = omp_get_max_threads();
#endif
  const double peak = measure::peak_flops();
  printf("%d thread%s, peak %.0f GFLOP/s in registers, float32\n\n", threads, threads > 1 ? "s" : "",
         peak / 1e9);
  printf("%-7s %-9s %9s %9s %9s %10s %11s %11s\n", "size", "arch", "ms/step", "tok/s", "of peak", "time/first",
         "memory", "predicted");
  for (size_t first = 0; first < runs.size();) {
    const Size& size = *runs[first].first;
    size_t last = first;
    while (last < runs.size() && runs[last].first == &size) last++;
    Model shared;
    model_create(shared, config_of(size, Arch::average), size.B, size.T, 1);
    const Batch batch(size.B * size.T, size.V);
    std::vector<std::vector<double>> seconds(last - first);
    for (size_t round = 0; round <= size.rounds; round++)
      for (size_t i = first; i < last; i++) {
        Model m = shared;
        m.config.arch = runs[i].second;
        if (!m.config.has_v_query()) m.params.attn_route_v = m.grads.attn_route_v = nullptr;
        const double t = one_step(m, batch, round + 1);
        if (round > 0) seconds[i - first].push_back(t);  // the first pays for fresh memory
      }
    for (size_t i = first; i < last; i++) {
      const char* arch = ARCH_NAMES[int(runs[i].second)];
      const double t = measure::median(seconds[i - first]), tokens = double(size.B * size.T);
      const double share = training_flops(config_of(size, runs[i].second), size.T).total() * tokens / t / peak;
      const double ratio = t / measure::median(seconds[0]);
      printf("%-7s %-9s %9.1f %9.0f %8.1f%% %10.3f %11s %11s\n", size.name, arch, t * 1e3, tokens / t,
             share * 100, ratio, human_bytes(memory[i].measured).c_str(),
             human_bytes(memory[i].predicted).c_str());
      fprintf(json,
              "{\"size\": \"%s\", \"arch\": \"%s\", \"threads\": %d, \"batch\": %zu, \"context\": %zu, "
              "\"ms\": %.3f, \"tok_s\": %.0f, \"peak_flops\": %.4g, \"share_of_peak\": %.4f, "
              "\"peak_bytes\": %zu, \"predicted_bytes\": %zu}\n",
              size.name, arch, threads, size.B, size.T, t * 1e3, tokens / t, peak, share, memory[i].measured,
              memory[i].predicted);
    }
    fflush(stdout);
    model_free(shared);
    first = last;
  }
  fclose(json);
}
