// compare.h - how tests compare numbers: equal bits, or an error that follows from the arithmetic.
//
// The same computation is done by plain loops in the same precision, and both are held against a wider one.
// Plain loops round each operation to the nearest number, so by half a unit in the last place (ulp) at most.
// What is tested may do the same operations in another order, with instructions that are off by up to two ulp
// (exp, 1 / sqrt; CUDA C++ Programming Guide, "Mathematical Functions"): each error is at most four times as
// large, and so are the root mean squares of all. The largest of n errors lies between their rms and about
// sqrt(2 ln n) of it, 5 for a million, so between two programs the largest may differ by four times as much
// again. And where the plain loops happen to be exact, a weight, a product, a sum and the result may still
// round: four times an ulp.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "tests/check.h"  // CHECK_CLOSE

constexpr double ERROR_RATIO = 4;     // our error against the plain loops', rms over rms
constexpr double LARGEST_RATIO = 16;  // and the largest over the largest
constexpr double ROUNDINGS = 4;       // of one ulp each, where the plain loops are exact

// How far a float32 sum of products of bf16 numbers may be off on a tensor core, which truncates (Fasi, Higham,
// Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, 2021): every term loses less than an ulp,
// 2^-23, of a partial sum. Of independent factors around zero, with root mean squares a and b, no partial sum
// has a root mean square above sqrt(terms) a b.
inline double truncated_sum(size_t terms, double a, double b) {
  return double(terms) * 0x1p-23 * std::sqrt(double(terms)) * a * b;
}

template <class X>
double epsilon() {
  return double(std::numeric_limits<X>::epsilon());
}

inline void set_threads(int n) {
#ifdef _OPENMP
  omp_set_num_threads(n);
#else
  (void)n;
#endif
}

template <class X>
bool same_bits(const X* a, const X* b, size_t n) {
  return memcmp(a, b, n * sizeof(X)) == 0;
}
template <class X>
bool same_bits(const std::vector<X>& a, const std::vector<X>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

template <class X>
double rms(const X* values, size_t n) {
  long double sum = 0;
  for (size_t i = 0; i < n; i++) sum += (long double)(values[i]) * (long double)(values[i]);
  return n ? double(std::sqrt(sum / (long double)(n))) : 0;
}
template <class X>
double rms(const std::vector<X>& values) {
  return rms(values.data(), values.size());
}

// Differences from the exact values, over `unit`, by default the rms of those: their rms and the largest.
// Infinite if anything is not finite.
struct Error {
  double rms = 0, largest = 0;
};

template <class X, class Y>
Error error_of(const X* got, const Y* exact, size_t n, double unit = 0) {
  const double scale = unit > 0 ? unit : rms(exact, n);
  std::vector<double> differences(n);
  Error error;
  for (size_t i = 0; i < n; i++) {
    const long double difference = std::fabs((long double)(got[i]) - (long double)(exact[i]));
    differences[i] = std::isfinite(difference) ? double(difference) / (scale > 0 ? scale : 1) : INFINITY;
    error.largest = std::fmax(error.largest, differences[i]);
  }
  error.rms = rms(differences);
  return error;
}
template <class X, class Y>
Error error_of(const std::vector<X>& got, const std::vector<Y>& exact, double unit = 0) {
  return got.size() == exact.size() ? error_of(got.data(), exact.data(), got.size(), unit)
                                    : Error{INFINITY, INFINITY};
}

inline Error larger(const Error& a, const Error& b) {
  return {std::fmax(a.rms, b.rms), std::fmax(a.largest, b.largest)};
}

template <class X>
double inner_product(const std::vector<X>& a, const std::vector<X>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); i++) sum += double(a[i]) * double(b[i]);
  return sum;
}

// The slope of f at 0, by central differences of fourth order.
template <class Function>
double slope(const Function& f, double h) {
  return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h);
}

// The rule for every output: not much worse than plain loops on the whole, and nowhere much worse than they are
// at their worst. `real` is the precision of both; `allowed` is what this output may be off besides, relative
// like the errors, where the arithmetic says so: a truncated_sum, say.
template <class real>
bool check_error(const std::string& what, const Error& ours, const Error& plain, double allowed = 0) {
  const double floor = ROUNDINGS * epsilon<real>() + allowed;
  const bool on_the_whole = CHECK_CLOSE(ours.rms, 0, ERROR_RATIO * plain.rms + floor);
  const bool anywhere = CHECK_CLOSE(ours.largest, 0, LARGEST_RATIO * plain.largest + floor);
  if (!on_the_whole || !anywhere)
    printf("  %s is off by %.1e (rms), %.1e (largest); plain loops %.1e, %.1e\n", what.c_str(), ours.rms,
           ours.largest, plain.rms, plain.largest);
  return on_the_whole && anywhere;
}
