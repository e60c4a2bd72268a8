// measure.h - what every benchmark here needs: a clock, the machine's peak, the memory used, medians.
#pragma once
#include <sys/resource.h>
#include <time.h>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace measure {

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Processor time of all threads of this process. With one thread, what the clock would show on an idle machine.
inline double processor_seconds() {
  timespec t = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

inline double median(std::vector<double> values) {  // of a non-empty list
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Largest resident set of this process so far, in bytes.
inline size_t peak_memory() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
  return size_t(usage.ru_maxrss);
#else
  return size_t(usage.ru_maxrss) * 1024;
#endif
}

#if defined(__AVX512F__)
constexpr size_t PEAK_VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr size_t PEAK_VECTOR_BYTES = 32;
#else
constexpr size_t PEAK_VECTOR_BYTES = 16;
#endif
typedef float PeakVector __attribute__((vector_size(PEAK_VECTOR_BYTES)));

// Twelve independent chains of multiply-adds: enough to hide their latency, few enough to stay in registers.
// They start apart, or the compiler would see that they are one; the values converge, nothing overflows.
__attribute__((noinline)) inline float multiply_add_chains(size_t steps, float multiplier, float addend) {
  PeakVector chain[12], m = PeakVector{} + multiplier, a = PeakVector{} + addend, sum = {};
  for (size_t i = 0; i < 12; i++) chain[i] = PeakVector{} + float(i);
  for (size_t step = 0; step < steps; step++)
    for (PeakVector& c : chain) c = c * m + a;
  for (const PeakVector& c : chain) sum += c;
  return sum[0];
}

// Float operations a second (a multiply-add is two) of all OpenMP threads together, in registers alone: the
// best of several runs of some milliseconds each, because other programs can only make it slower.
inline double peak_flops() {
  constexpr size_t STEPS = 200000;
  const double flops = 2.0 * 12 * double(PEAK_VECTOR_BYTES / sizeof(float)) * double(STEPS);
  volatile float half = 0.5f, sink = 0;  // volatile: nothing is known at compile time, nothing is dropped
  double total = 0;
#pragma omp parallel reduction(+ : total)
  {
    double best = 0;
    for (int run = 0; run < 15; run++) {
      const double start = seconds_now();
      const float result = multiply_add_chains(STEPS, half, half);
      best = std::max(best, flops / (seconds_now() - start));
#pragma omp critical
      sink = sink + result;
    }
    total += best;
  }
  return total;
}

}  // namespace measure
