// stepper.cpp - our half of peers.py: trains on one batch, one step for each line it reads.
//
//   build/stepper CHECKPOINT BATCH wall|cpu
//
// BATCH: int32 numbers in this machine's order: B, then B * T inputs, then B * T targets. For every line on
// standard input one step (forward, backward, clipping at norm 1, AdamW at learning rate 1e-4) is done and its
// loss and seconds are printed: of the clock, or of the processor where the machine is not ours alone.
#include <ctime>
#include <iostream>

#include "dev/bench/measure.h"  // clocks
#define TESTING
#include "train_rdattnres_cpu.cpp"
using namespace cpu;

int main(int argc, char** argv) {
  if (argc != 4) fatal(EXIT_USAGE, "expected: stepper CHECKPOINT BATCH wall|cpu, found %d arguments", argc - 1);
  const bool cpu_clock = std::string(argv[3]) == "cpu";
  const Checkpoint checkpoint = Checkpoint::open(argv[1]);
  Options o;
  adopt_saved(o, checkpoint.metadata, true);
  const Config config = model_config(o);
  FILE* file = fopen(argv[2], "rb");
  int32_t B = 0;
  if (!file || fread(&B, sizeof(B), 1, file) != 1 || B < 1) fatal(EXIT_ERROR, "%s: expected a batch", argv[2]);
  const size_t n = size_t(B) * config.T;
  std::vector<int> tokens(n), targets(n);
  if (fread(tokens.data(), sizeof(int), n, file) != n || fread(targets.data(), sizeof(int), n, file) != n)
    fatal(EXIT_ERROR, "%s: expected two times %zu tokens", argv[2], n);
  fclose(file);
  Model m;
  model_create(m, config, size_t(B), config.T, 1);
  model_load(m, checkpoint, false);
  std::string line;
  for (size_t step = 1; std::getline(std::cin, line); step++) {
    const double start = cpu_clock ? measure::processor_seconds() : measure::seconds_now();
    model_zero_grad(m);
    const double loss = model_loss_and_gradients(m, tokens.data(), targets.data(), m.B, m.T);
    const double norm = grad_norm(m);
    model_update(m, step, norm > 1 ? 1 / norm : 1, 1e-4, 0.1, 1);
    const double end = cpu_clock ? measure::processor_seconds() : measure::seconds_now();
    printf("%.9g %.9g\n", loss, end - start);
    fflush(stdout);
  }
}
