// ladder.h - what all kernel ladders need: how a rung is checked, counted, timed and printed.
//
// A ladder is one file: a plain loop that says what is computed, then rungs, each a kernel and its launch, each
// one idea away from the rung before; the last rung is the function that trains. climb() takes them in order:
//   check   the rung runs on fresh buffers; what it leaves is held against the plain loop in double (device.h).
//           A wrong rung is neither counted nor timed, and the program ends with status 1
//   count   in the emulator's race build: bytes that the kernels moved, against the rung's prediction
//   time    on a GPU, at the large shape: median time, bandwidth as a share of a copy's, speed-up over rung 1
//
// Predicted bytes are what DRAM has to move: every launch reads its inputs and writes its outputs once. What
// one launch reads again is the caches' affair, and counted apart: `asked` is how many times the predicted
// bytes the warps request, in sectors of 32 bytes. `requests` are memory instructions of warps.
#pragma once
#include <functional>

#include "tests/check.h"        // TEST, CHECK
#include "tests/device.h"       // Array, compare: numbers on the device, and their errors
#include "dev/bench/measure.h"  // median

namespace ladder {

#ifdef __CUDACC__
constexpr bool ON_GPU = true, COUNTS_TRAFFIC = false;
#else
constexpr bool ON_GPU = false, COUNTS_TRAFFIC = emu::COUNTS_TRAFFIC;
#endif

// BYTES(4 * n * (2 + 3)): the number and the formula it came from, in terms that the ladder's file explains.
struct Bytes {
  double value;
  const char* formula;
};
#define BYTES(formula) \
  ladder::Bytes { double(formula), #formula }

struct Rung {
  const char* idea;
  Bytes bytes;                // predicted
  std::function<void()> run;  // launches on gpu::device.stream
  double flops = 0;           // above zero: the matrix rate is the limit, not the bandwidth
};
struct Ladder {
  const char* name;
  std::string shape;
  std::function<void()> reset;  // before a checked run: outputs NaN, inputs that runs overwrite restored
  std::function<void()> check;  // after it: compare() what came out
  std::vector<Rung> rungs;
};

// What the kernels are held against: measured on the spot, on a GPU only.
struct Limits {
  double copy_bandwidth = 0, matrix_rate = 0;
};  // bytes/s, read + written; bf16 FLOP/s
inline Limits limits;

constexpr int WARM_UPS = 3, RUNS = 25;

// Median over RUNS of the time between two events around run(). Before each, a buffer larger than the L2 cache
// is written, so that a rung does not find there what the one before left.
inline double median_seconds(const std::function<void()>& run) {
  const size_t flush_bytes = 2 * size_t(gpu::device.properties.l2CacheSize) + (size_t(64) << 20);
  char* flush = gpu::device_array<char>(flush_bytes, "a ladder's cache flush");
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  std::vector<double> seconds;
  for (int i = 0; i < WARM_UPS + RUNS; i++) {
    gpu::zero(flush, flush_bytes);
    CUDA_CHECK(cudaEventRecord(begin, gpu::device.stream));
    run();
    CUDA_CHECK(cudaEventRecord(end, gpu::device.stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= WARM_UPS) seconds.push_back(double(ms) / 1e3);
  }
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  CUDA_CHECK(cudaFree(flush));
  return measure::median(seconds);
}

// The driver's own copy of 1 GiB, and cuBLASLt's product of two matrices of 8192 x 8192.
inline Limits measure_limits() {
  const size_t bytes = size_t(1) << 30;
  Array<int> from(bytes / sizeof(int)), to(bytes / sizeof(int));
  from.forget();
  const double seconds = median_seconds([&] {
    CUDA_CHECK(cudaMemcpyAsync(to.at, from.at, bytes, cudaMemcpyDeviceToDevice, gpu::device.stream));
  });
  return {2 * double(bytes) / seconds, gpu::measure_matrix_rate(8192)};
}

constexpr double ALLOWED = 1.1;  // counted over predicted bytes

#ifndef __CUDACC__
inline void count(const Rung& rung, const std::function<void()>& reset) {
  reset();
  CUDA_CHECK(cudaStreamSynchronize(gpu::device.stream));
  emu::count_traffic(true);
  rung.run();
  CUDA_CHECK(cudaStreamSynchronize(gpu::device.stream));
  emu::count_traffic(false);
  const emu::Traffic t = emu::traffic();
  const double moved = 32 * double(t.distinct), predicted = rung.bytes.value, asked = 32 * double(t.sectors);
  printf(
      "       bytes: predicted %.0f = %s, counted %.0f, ratio %.3f; asked %.2f; %zu requests, %zu launches\n",
      predicted, rung.bytes.formula, moved, moved / predicted, asked / predicted, t.requests, t.launches);
  CHECK(moved <= ALLOWED * predicted);
  CHECK(moved >= predicted / ALLOWED);  // a prediction too high would excuse anything
}
#endif

inline FILE* json = nullptr;  // bench_gpu.jsonl, on a GPU

struct Timed {
  const Rung* rung;
  double seconds;
};
inline void print_times(const Ladder& ladder, const std::vector<Timed>& times) {
  printf("\n%s, %s\n%-50s %9s %9s %8s %8s %9s %9s\n", ladder.name, ladder.shape.c_str(), "rung", "MB", "ms",
         "GB/s", "of copy", "of matmul", "speed-up");
  for (size_t i = 0; i < times.size(); i++) {
    const Rung& rung = *times[i].rung;
    const double s = times[i].seconds, bandwidth = rung.bytes.value / s,
                 of_copy = bandwidth / limits.copy_bandwidth, of_matmul = rung.flops / s / limits.matrix_rate,
                 speed_up = times[0].seconds / s;
    printf("%zu %-48s %9.1f %9.4f %8.1f %7.1f%% %9s %8.2fx\n", i + 1, rung.idea, rung.bytes.value / 1e6,
           s * 1e3, bandwidth / 1e9, 100 * of_copy,
           rung.flops > 0 ? format("%.1f%%", 100 * of_matmul).c_str() : "", speed_up);
    fprintf(json,
            "{\"ladder\": \"%s\", \"shape\": \"%s\", \"rung\": %zu, \"idea\": \"%s\", \"gpu\": \"%s\", "
            "\"ms\": %.5f, \"predicted_bytes\": %.0f, \"formula\": \"%s\", \"gb_s\": %.2f, "
            "\"share_of_copy\": %.4f, \"flops\": %.0f, \"share_of_matmul\": %.4f, \"speed_up\": %.4f}\n",
            ladder.name, ladder.shape.c_str(), i + 1, rung.idea, gpu::device.properties.name, s * 1e3,
            rung.bytes.value, rung.bytes.formula, bandwidth / 1e9, of_copy, rung.flops, of_matmul, speed_up);
  }
  printf("\n");
  fflush(stdout), fflush(json);
}

// `timed`: this shape is the large one, and this is a GPU.
inline void climb(const Ladder& ladder, bool timed) {
  std::vector<Timed> times;
  for (size_t i = 0; i < ladder.rungs.size(); i++) {
    const Rung& rung = ladder.rungs[i];
    TEST(format("%s, %s, rung %zu: %s", ladder.name, ladder.shape.c_str(), i + 1, rung.idea));
    ladder.reset();
    rung.run();
    ladder.check();
    if (check::state().failures > 0) continue;
#ifndef __CUDACC__
    if (COUNTS_TRAFFIC) count(rung, ladder.reset);
#endif
    if (timed) times.push_back({&rung, median_seconds(rung.run)});
  }
  check::end_case();
  if (timed && times.size() == ladder.rungs.size()) print_times(ladder, times);
}

}  // namespace ladder
