// device.h - numbers that go to the device and come back, and how wrong they may be: for tests and ladders.
//
// Inputs are random and rounded to the storage type, so that everybody sees the same numbers:
//   want    a loop in double
//   plain   the same loop in float, its results rounded to the storage type: what any plain code of this
//           precision gives
//   got     the kernel
// How wrong the kernel may be: compare.h.
//
// Include it after train_rdattnres.cu (TESTING) and check.h.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/compare.h"    // error_of, check_error
#include "tests/reference.h"  // round_bf16

using gpu::bf16;
using reference::round_bf16;

// ---- numbers -------------------------------------------------------------------------------------------

using Numbers = std::vector<double>;

template <class X>
double round_to(double v) {
  return std::is_same<X, bf16>::value ? round_bf16(v) : double(float(v));
}

inline uint64_t random_state = 1;
inline double normal_number() {
  double sum = -6;
  for (int i = 0; i < 12; i++) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    sum += double(random_state >> 11) * 0x1p-53;
  }
  return sum;
}
template <class X>
Numbers normals(size_t n, double mean = 0, double deviation = 1) {
  Numbers v(n);
  for (double& x : v) x = round_to<X>(mean + deviation * normal_number());
  return v;
}
template <class X>
Numbers rounded_to(Numbers v) {
  for (double& x : v) x = round_to<X>(x);
  return v;
}
template <class real>
std::vector<real> as(const Numbers& v) {
  return std::vector<real>(v.begin(), v.end());
}
template <class real>
Numbers from(const std::vector<real>& v) {
  return Numbers(v.begin(), v.end());
}

inline void store(float& to, double v) { to = float(v); }
inline void store(int& to, double v) { to = int(v); }
inline void store(bf16& to, double v) {
  const float f = float(round_bf16(v));
  memcpy(&to, reinterpret_cast<const char*>(&f) + 2, 2);  // a bf16 is the upper half of a float
}
inline double load(float v) { return v; }
inline double load(int v) { return v; }
inline double load(bf16 v) {
  float f = 0;
  memcpy(reinterpret_cast<char*>(&f) + 2, &v, 2);
  return f;
}
template <class X>
void put(X* to, const Numbers& v) {
  std::vector<X> host(v.size());
  for (size_t i = 0; i < v.size(); i++) store(host[i], v[i]);
  gpu::upload(to, host.data(), v.size());
}
template <class X>
Numbers take(const X* at, size_t n) {
  std::vector<X> host(n);
  gpu::download(host.data(), at, n);
  Numbers v(n);
  for (size_t i = 0; i < n; i++) v[i] = load(host[i]);
  return v;
}
// A device array of its own cudaMalloc, so that the emulator sees every step over its end. Fresh memory is NaN
// there.
template <class X>
struct Array {
  X* at = nullptr;
  size_t n;
  explicit Array(size_t n) : n(n) { CUDA_CHECK(cudaMalloc(&at, (n ? n : 1) * sizeof(X))); }
  explicit Array(const Numbers& v) : Array(v.size()) { put(at, v); }
  Array(const Array&) = delete;
  ~Array() { cudaFree(at); }
  operator X*() const { return at; }
  Numbers numbers() const { return take(at, n); }
  void forget() const { CUDA_CHECK(cudaMemsetAsync(at, 0xFF, n * sizeof(X), gpu::device.stream)); }  // all NaN
};
using Ints = Array<int>;

// ---- comparing -----------------------------------------------------------------------------------------

// `unit`: what errors are relative to, the rms of `want` where none is given. `allowed`: see check_error;
// absolute.
template <class X>
void compare(const std::string& what, const Numbers& got, const Numbers& plain, const Numbers& want,
             double unit = 0, double allowed = 0) {
  if (unit == 0) unit = rms(want);
  if (unit == 0) unit = 1;
  const Error ours = error_of(got, want, unit), by_plain = error_of(rounded_to<X>(plain), want, unit);
  printf("       %-28s error %.2e, plain %.2e   largest %.2e, plain %.2e   allowed besides %.1e\n",
         what.c_str(), ours.rms, by_plain.rms, ours.largest, by_plain.largest, allowed / unit);
  check_error<float>(what, ours, by_plain, allowed / unit);
}
template <class X>
const char* type_name() {
  return std::is_same<X, bf16>::value ? "bf16" : "fp32";
}
