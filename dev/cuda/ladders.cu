// ladders.cu - all kernel ladders in one program, so that the trainer is compiled once.
//
//   make bench_gpu                       on a GPU: check, then time every rung; a table and bench_gpu.jsonl
//   build/ladders_gpu adamw              one ladder, or several
//   build/ladders_race [ladder...]       through the emulator: check every rung and count the bytes it moves
//
// README.md says in what order to read them.
#define TESTING
#include "train_rdattnres.cu"

#include "dev/cuda/ladder.h"  // climb: checks, counts, times

#include "dev/cuda/adamw.cu"
#include "dev/cuda/attention_forward.cu"
#include "dev/cuda/attention_backward.cu"  // takes the forward's results from attention_forward.cu's plain loop
#include "dev/cuda/cross_entropy.cu"
#include "dev/cuda/route_forward.cu"
#include "dev/cuda/route_backward.cu"  // shares route_forward.cu's sums over a block

constexpr struct {
  const char* name;
  void (*climb)(bool timed);
} LADDERS[] = {{"adamw", adamw_ladder::climb},
               {"cross_entropy", cross_entropy_ladder::climb},
               {"route_forward", route_forward_ladder::climb},
               {"route_backward", route_backward_ladder::climb},
               {"attention_forward", attention_forward_ladder::climb},
               {"attention_backward", attention_backward_ladder::climb}};

int main(int argc, char** argv) {
  for (int i = 1; i < argc; i++) {
    std::string names;
    bool known = false;
    for (const auto& ladder : LADDERS)
      known |= argv[i] == std::string(ladder.name), names += std::string(" ") + ladder.name;
    if (!known) fatal(EXIT_USAGE, "no ladder is called %s; there are:%s", argv[i], names.c_str());
  }
  const auto chosen = [&](const char* name) {
    return argc == 1 || std::find(argv + 1, argv + argc, std::string(name)) != argv + argc;
  };
  gpu::device_open();
  for (const auto& ladder : LADDERS)
    if (chosen(ladder.name)) ladder.climb(false);
  if (ladder::ON_GPU) {
    check::end_case();
    ladder::json = fopen("bench_gpu.jsonl", "w");
    if (!ladder::json) fatal(EXIT_ERROR, "bench_gpu.jsonl: %s", strerror(errno));
    ladder::limits = ladder::measure_limits();
    printf("\n%s: copy %.0f GB/s, bf16 product %.0f TFLOP/s, both measured here\n\n",
           gpu::device.properties.name, ladder::limits.copy_bandwidth / 1e9, ladder::limits.matrix_rate / 1e12);
    for (const auto& ladder : LADDERS)
      if (chosen(ladder.name)) ladder.climb(true);
    if (fclose(ladder::json) != 0) fatal(EXIT_ERROR, "bench_gpu.jsonl: %s", strerror(errno));
  }
  gpu::device_close();
  return finish();
}
