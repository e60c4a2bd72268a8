// tensor.cpp - the instructions of the tensor cores and the asynchronous copies.
#include <cfenv>

#include "emulated_device.h"
#include "engine.h"
using namespace emu;

static void check_aligned(const char* op, Site site, const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16)
    fail("%s at %s:%d: address %p is not aligned to 16 bytes", op, site.file, site.line, p);
}

// ---- ldmatrix -----------------------------------------------------------------------------------------
struct Load {
  const uint16_t* row;
  unsigned r[4];
};
template <bool TRANSPOSE>
static void load_matrices(unsigned (&r)[4], const void* row, Site site, const void* caller) {
  check_aligned("ldmatrix", site, row);
  touch(row, 16, Access::read, caller);
  Load mine{static_cast<const uint16_t*>(row), {}};
  meet("ldmatrix", site, &mine, [](void** lane) {
    const auto of = [lane](int l) { return static_cast<Load*>(lane[l]); };
    const auto element = [of](int matrix, int y, int x) -> unsigned {
      return TRANSPOSE ? of(8 * matrix + x)->row[y] : of(8 * matrix + y)->row[x];
    };
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++)
        of(l)->r[i] = element(i, l / 4, l % 4 * 2) | element(i, l / 4, l % 4 * 2 + 1) << 16;
  });
  memcpy(r, mine.r, sizeof r);
}
void ldmatrix_x4(unsigned (&r)[4], const void* row, Site site) {
  load_matrices<false>(r, row, site, __builtin_return_address(0));
}
void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, Site site) {
  load_matrices<true>(r, row, site, __builtin_return_address(0));
}

// ---- mma ----------------------------------------------------------------------------------------------
// Sums round towards zero, as in a tensor core (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021).
// A card truncates sums of a few products, here every one: no card is less precise. But where a card's sum
// becomes infinite, one rounded towards zero stops at the largest float; then all are made again, to nearest.
void emu::truncated(const std::function<void()>& sums) {
  feclearexcept(FE_OVERFLOW);
  fesetround(FE_TOWARDZERO);
  sums();
  fesetround(FE_TONEAREST);
  if (fetestexcept(FE_OVERFLOW)) sums();
}

struct Product {
  float* d;
  const unsigned* a;
  unsigned b[2];
};
static float half_of(unsigned r, int high) { return __uint_as_float(high ? r & 0xFFFF0000u : r << 16); }
static void multiply_add(void** lane) {
  const auto of = [lane](int l) { return static_cast<Product*>(lane[l]); };
  float A[16][16], B[16][8], D[16][8];  // gather the fragments
  for (int l = 0; l < 32; l++)
    for (int high = 0; high < 2; high++) {
      const int y = l / 4, x = l % 4 * 2 + high;
      for (int i = 0; i < 4; i++) A[y + 8 * (i & 1)][x + 8 * (i >> 1)] = half_of(of(l)->a[i], high);
      for (int i = 0; i < 2; i++) B[x + 8 * i][y] = half_of(of(l)->b[i], high);
    }
  const auto at = [of](int y, int x) -> float& { return of(y % 8 * 4 + x / 2)->d[y / 8 * 2 + x % 2]; };
  truncated([&] {
    for (int y = 0; y < 16; y++) {
      float row[8] = {};
      for (int k = 0; k < 16; k++)
        for (int x = 0; x < 8; x++) row[x] += A[y][k] * B[k][x];
      for (int x = 0; x < 8; x++) D[y][x] = at(y, x) + row[x];
    }
  });
  for (int y = 0; y < 16; y++)
    for (int x = 0; x < 8; x++) at(y, x) = D[y][x];
}
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Site site) {
  Product mine{d, a, {b0, b1}};
  meet("mma.m16n8k16", site, &mine, multiply_add);
}

// ---- cp.async -----------------------------------------------------------------------------------------
// A copy may land at once or as late as the wait that covers it; the order of threads decides which.
void cp_async_16(void* to, const void* from, bool live, Site site) {
  alignas(16) static const char zeros[16] = {};
  check_aligned("cp.async", site, to);
  check_aligned("cp.async", site, from);
  if (live) touch(from, 16, Access::read, __builtin_return_address(0));
  touch(to, 16, Access::in_flight, __builtin_return_address(0));
  Fiber& t = *engine->running;
  t.copies.push_back({to, live ? from : zeros, t.copy_group});
  if (order == Order::reverse || (order == Order::random && random_below(2)))
    memcpy(to, t.copies.back().from, 16);
}
void cp_async_commit() { engine->running->copy_group++; }
void emu::land_copies(int groups_in_flight) {
  Fiber& t = *engine->running;
  size_t n = 0;
  for (; n < t.copies.size() && t.copies[n].group < t.copy_group - groups_in_flight; n++) {
    memcpy(t.copies[n].to, t.copies[n].from, 16);
    touch(t.copies[n].to, 16, Access::write, __builtin_return_address(0));
  }
  t.copies.erase(t.copies.begin(), t.copies.begin() + ptrdiff_t(n));
}
