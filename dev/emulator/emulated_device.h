// emulated_device.h - the CPU twins of what train_rdattnres.cu says in <<<>>> and in inline PTX.
#pragma once
#include <string>

#include "cuda_runtime.h"

constexpr bool EMULATED = true;  // times mean nothing here
#define launch(...) emu::launch_kernel(emu::Site{__FILE__, __LINE__}, #__VA_ARGS__, __VA_ARGS__)
inline std::string code_found() { return emu::failure("cudaFuncGetAttributes") ? "" : "no GPU code"; }
template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(emu::self->block->shared);
}

// ---- tensor.cpp ---------------------------------------------------------------------------------------
// Lane l names row l % 8 of matrix l / 8 (8 x 8, 16-bit). Register i of lane l receives of matrix i row l / 4,
// columns 2 * (l % 4) and the next. The transposed form reads columns for rows.
void ldmatrix_x4(unsigned (&r)[4], const void* row, EMU_SITE);
void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, EMU_SITE);
// d (16 x 8, float) += a (16 x 16, bf16) b (16 x 8, bf16), spread over the lanes as the PTX manual draws it.
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, EMU_SITE);
inline float exp2_flushed(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
// 16 bytes from global to shared memory, or 16 zeros, some time before the wait that covers them.
void cp_async_16(void* to, const void* from, bool live = true, EMU_SITE);
void cp_async_commit();
namespace emu {
void land_copies(int groups_in_flight);
}
template <int N>
void cp_async_wait() {
  emu::land_copies(N);
}
