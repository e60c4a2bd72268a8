// emulated_device.h - the CPU twins of what train_rdattnres.cu writes in <<<>>> and inline PTX: launch, dynamic
// shared memory, ldmatrix, mma, cp.async. Fragment layouts as in the PTX ISA.
#pragma once
#include "cuda_bf16.h"

namespace emu {
struct LdMatrix { const uint16_t* row; unsigned r[4]; };
// Lane l names row l%8 of matrix l/8. Register i of lane l receives row l/4, columns 2*(l%4) and +1
// of matrix i (of its transpose, if asked).
__forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row, bool transpose, Site s) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("ldmatrix at %s:%d: row address %p is not 16-byte aligned", s.file, s.line, row);
  race_range(row, 16, 0);
  LdMatrix a{static_cast<const uint16_t*>(row), {}};
  warp_op(transpose ? "ldmatrix.trans" : "ldmatrix", s, ~0u, a, [&](LdMatrix** lane) {
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) {
        const int p = l / 4, q = l % 4 * 2;
        const uint16_t lo = transpose ? lane[8 * i + q]->row[p] : lane[8 * i + p]->row[q];
        const uint16_t hi = transpose ? lane[8 * i + q + 1]->row[p] : lane[8 * i + p]->row[q + 1];
        lane[l]->r[i] = lo | unsigned(hi) << 16;
      }
  });
  memcpy(r, a.r, sizeof r);
}
struct Mma { float* d; const unsigned* a; unsigned b[2]; };
inline float half_of(unsigned r, int hi) { return __uint_as_float(hi ? r & 0xFFFF0000u : r << 16); }
// d[16][8] += a[16][16] b[16][8], bf16 in, fp32 out.
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Site s) {
  Mma arg{d, a, {b0, b1}};
  warp_op("mma.m16n8k16", s, ~0u, arg, [&](Mma** lane) {
    float A[16][16], B[16][8];
    for (int l = 0; l < 32; l++) {
      const int g = l / 4, t = l % 4 * 2;
      for (int h = 0; h < 2; h++) {
        for (int i = 0; i < 4; i++) A[g + 8 * (i & 1)][t + h + 8 * (i >> 1)] = half_of(lane[l]->a[i], h);
        for (int i = 0; i < 2; i++) B[t + h + 8 * i][g] = half_of(lane[l]->b[i], h);
      }
    }
    for (int i = 0; i < 16; i++) {
      float row[8] = {};
      for (int k = 0; k < 16; k++)
        for (int j = 0; j < 8; j++) row[j] += A[i][k] * B[k][j];
      for (int j = 0; j < 8; j++) lane[i % 8 * 4 + j / 2]->d[i / 8 * 2 + j % 2] += row[j];
    }
  });
}
__forceinline__ void cp_async_16(void* to, const void* from, Site s) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16) fail("cp.async at %s:%d: address is not 16-byte aligned", s.file, s.line);
  Thread& t = *engine->cur;
  char check[16];  // touch the source now, so that AddressSanitizer sees a bad address here
  memcpy(check, from, 16);
  if (order == Reverse || (order == Random && random_below(2))) memcpy(to, check, 16);
  t.copies.push_back({to, from, t.copy_group});
  race_range(to, 16, 3);
}
inline void cp_async_commit() { engine->cur->copy_group++; }
inline void cp_async_wait(int groups_in_flight) { land_copies(*engine->cur, groups_in_flight); }
}  // namespace emu

#define launch(...) emu::launch(emu::here(__FILE__, __LINE__), #__VA_ARGS__, __VA_ARGS__)
template <class T> T* dynamic_shared() { return reinterpret_cast<T*>(emu::engine->smem); }
__forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row, EMU_SITE) { emu::ldmatrix_x4(r, row, false, s); }
__forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, EMU_SITE) { emu::ldmatrix_x4(r, row, true, s); }
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, EMU_SITE) { emu::mma_m16n8k16(d, a, b0, b1, s); }
__forceinline__ void cp_async_16(void* to, const void* from, EMU_SITE) { emu::cp_async_16(to, from, s); }
inline void cp_async_commit() { emu::cp_async_commit(); }
template <int N> inline void cp_async_wait() { emu::cp_async_wait(N); }
