// test_emulator.cu - does the emulator (dev/emulator) find what it says it finds, and nothing else?
//
// The first half is a list of faults. Each runs in a process of its own, in three thread orders, and must end
// as the list says for this build: with a message that names the right thing, with wrong numbers that a test
// would notice, or, where the README admits it, unnoticed. The second half is correct code that must pass in
// every order.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <emulated_device.h>
#include <nvtx3/nvToolsExt.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"

typedef __nv_bfloat16 bf16;
using emu::Order;

static void must(bool ok, int line, const char* what) {
  if (!ok) fprintf(stderr, "test_emulator.cu:%d: %s\n", line, what), exit(1);
}
#define CUDA_CHECK(call) must((call) == cudaSuccess, __LINE__, #call)
#define CUBLAS_CHECK(call) must((call) == CUBLAS_STATUS_SUCCESS, __LINE__, #call)

template <class T>
struct Device {  // n values on the card and on the host
  T* d = nullptr;
  std::vector<T> h;
  explicit Device(size_t n, T value = T(1.0f)) : h(n, value) { CUDA_CHECK(cudaMalloc(&d, n * sizeof(T))); }
  ~Device() { CUDA_CHECK(cudaFree(d)); }
  size_t bytes() const { return h.size() * sizeof(T); }
  Device& up() {
    CUDA_CHECK(cudaMemcpy(d, h.data(), bytes(), cudaMemcpyHostToDevice));
    return *this;
  }
  Device& down() {
    CUDA_CHECK(cudaMemcpy(h.data(), d, bytes(), cudaMemcpyDeviceToHost));
    return *this;
  }
};
struct Pointer {
  float* p;
};  // hides a pointer from the check at the launch

// ======================================================================================================
// Faults: small broken kernels, each 64 threads unless it says otherwise.
// ======================================================================================================
static const int WRONG = 3;  // exit status: it ran, and the numbers are wrong
static void expect(bool right) {
  if (!right) _Exit(WRONG);
}

__global__ void store(Pointer out, int i) { out.p[i] = 1; }
__global__ void load(float* out, Pointer in, int i) { out[threadIdx.x] = in.p[i]; }
__global__ void add_one(float* out) { out[threadIdx.x] += 1; }
__global__ void load_float4(float4* out, const float* in) { out[0] = *reinterpret_cast<const float4*>(in + 1); }
__global__ void dynamic_overrun(float* out, int i) {
  float* s = dynamic_shared<float>();
  s[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) s[i] = 2;
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void static_overrun(float* out, int i) {
  __shared__ float s[64];
  s[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) s[i] = 2;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void unwritten_shared(float* out) {
  __shared__ float s[64];
  if (threadIdx.x < 63) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void left_over_shared(float* out) {  // the second block hopes for what the first one wrote
  __shared__ float s[64];
  if (blockIdx.x == 0) s[threadIdx.x] = 1;
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = s[63 - threadIdx.x];
}
__device__ __noinline__ float deep(int depth) {
  volatile float frame[1024];
  frame[depth % 1024] = float(depth);
  if (depth > 0) frame[0] = deep(depth - 1);
  return frame[depth % 1024] + 1;
}
__global__ void overflow_stack(float* out, int depth) { out[threadIdx.x] = deep(depth); }
__global__ void no_barrier(float* out) {
  __shared__ float s[64];
  s[threadIdx.x] = float(threadIdx.x);
  out[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void no_barrier_before_reuse(float* out) {
  __shared__ float s[64];
  for (int i = 0; i < 2; i++) {
    s[threadIdx.x] = float(i * 64 + int(threadIdx.x));
    __syncthreads();
    out[i * 64 + threadIdx.x] = s[63 - threadIdx.x];
  }
}
__global__ void write_after_read(float* out) {  // who runs in order reads first: only the readers' marks tell
  __shared__ float s;
  if (threadIdx.x == 0) s = 1;
  __syncthreads();
  out[threadIdx.x] = s;
  if (threadIdx.x == 63) s = 2;
}
__global__ void no_syncwarp(float* out) {
  __shared__ float s[64];
  s[threadIdx.x] = float(threadIdx.x);
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void barrier_in_branch(float* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 1;
}
__global__ void early_exit(float* out, unsigned n) {
  if (threadIdx.x >= n) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}
__global__ void two_barriers(float* out) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 1;
}
__global__ void uneven_loop(float* out) {
  for (unsigned i = 0; i < 1 + threadIdx.x / 32; i++) __syncthreads();
  out[threadIdx.x] = 1;
}
__global__ void shuffle_half(float* out) {
  float v = 1;
  if (threadIdx.x % 32 < 20) v += __shfl_xor_sync(~0u, v, 1);
  out[threadIdx.x] = v;
}
__global__ void shuffle_in_branches(float* out) {
  float v = 1;
  if (threadIdx.x % 32 < 16)
    v += __shfl_xor_sync(~0u, v, 1);
  else
    v += __shfl_xor_sync(~0u, v, 2);
  out[threadIdx.x] = v;
}
__global__ void shuffle_outside(float* out) {
  float v = 1;
  if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(0xFFFFu, v, 16);
  out[threadIdx.x] = v;
}
__global__ void wrong_mask(float* out) { out[threadIdx.x] = __shfl_xor_sync(0xFFFFu, 1.0f, 1); }
__global__ void shuffle_against_barrier(float* out) {
  if (threadIdx.x < 32) __syncwarp();
  if (threadIdx.x == 5)
    __syncthreads();
  else
    out[threadIdx.x] = __shfl_sync(~0u, 1.0f, 0);
  __syncthreads();
}
__device__ __forceinline__ float sum_of_warp(float v) {
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
__global__ void half_of_helper(float* out) {
  if (threadIdx.x < 20) out[0] = sum_of_warp(1);
}
__global__ void cp_async(float* out, const float* in, int in_flight, bool barrier) {  // 16 bytes a thread
  float* s = dynamic_shared<float>();
  cp_async_16(s + threadIdx.x * 4, in + threadIdx.x * 4);
  cp_async_commit();
  if (in_flight)
    cp_async_wait<1>();
  else
    cp_async_wait<0>();
  if (barrier) __syncthreads();
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = s[(63 - threadIdx.x) * 4 + i];
}
__global__ void ldmatrix_at(float* out, int offset) {  // of 32 rows of 8 bf16, in bytes
  char* s = dynamic_shared<char>();
  if (threadIdx.x < 32) reinterpret_cast<float4*>(s)[threadIdx.x] = {};
  __syncthreads();
  unsigned r[4];
  ldmatrix_x4(r, s + threadIdx.x % 32 * 16 + offset);
  out[threadIdx.x] = float(r[0]);
}
__global__ void mma_in_branch(float* out) {
  float d[4] = {};
  const unsigned a[4] = {};
  if (threadIdx.x % 32 < 16) mma_m16n8k16(d, a, 0, 0);
  out[threadIdx.x] = d[0];
}
__global__ void sum_without_atomics(float* sum) { *sum += 1; }
__global__ void overlapping_blocks(float* out) { out[blockIdx.x * 60 + threadIdx.x] = float(blockIdx.x); }
__global__ void same_cell(float* out) { out[0] = float(threadIdx.x / 32); }

// One product in cuBLASLt's own words; the faults change one argument each.
struct Product {
  int m = 16, n = 8, k = 24, lda = 24, ldb = 24, ldd = 16;
  cudaDataType type_a = CUDA_R_16BF, type_b = CUDA_R_16BF, type_d = CUDA_R_32F;
  uint64_t workspace = 65536;
  uint32_t alignment = 256;
  size_t offset_a = 0;
  bool reuse_algorithm = false, host_operand = false, unwritten = false, small_output = false,
       short_attribute = false;
  void run() {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t la, lb, ld;
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtCreate(&lt));
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t t = CUBLAS_OP_T;
    CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &t, short_attribute ? 1 : sizeof t));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&la, type_a, 24, 16, lda));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&lb, type_b, uint64_t(k), uint64_t(n), ldb));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&ld, type_d, uint64_t(m), uint64_t(n), ldd));
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    uint64_t max_workspace = 1 << 20;
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &max_workspace, sizeof max_workspace));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                                      &alignment, sizeof alignment));
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(lt, desc, la, lb, ld, ld, preference, 1, &result, &found));
    Device<float> a(1024), b(1024), d(small_output ? 127 : 128), room(1 << 18);
    if (!unwritten) a.up();
    b.up();
    const float one = 1, zero = 0;
    if (reuse_algorithm) {
      CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(lb));
      CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&lb, type_b, uint64_t(k), uint64_t(n), ldb + 8));
    }
    const void* pa = reinterpret_cast<char*>(host_operand ? a.h.data() : a.d) + offset_a;
    CUBLAS_CHECK(cublasLtMatmul(lt, desc, &one, pa, la, b.d, lb, &zero, d.d, ld, d.d, ld, &result.algo, room.d,
                                workspace, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    for (cublasLtMatrixLayout_t l : {la, lb, ld}) CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(l));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(desc));
    CUBLAS_CHECK(cublasLtDestroy(lt));
  }
};

struct Fault {
  const char* name;
  void (*run)();
  // What happens in the builds fast, asan and race. A text: the program ends with a message that contains it.
  // NUMBERS: wrong numbers in at least one thread order. UNSEEN: nothing. ANY: not determined.
  const char *fast, *asan, *race;
};
static const char NUMBERS[] = "wrong numbers", UNSEEN[] = "unseen", ANY[] = "not determined";
#define ASAN "AddressSanitizer"
#define UBSAN "runtime error"
#define ALL(text) text, text, text
#if defined(__clang__)
#define CALLED_AT "test_emulator.cu:"  // addr2line does not follow clang's inlining
#else
#define CALLED_AT ", called at test_emulator.cu:"
#endif

// Runs kernel(out, ...) with 64 threads a block; returns the n values of out.
#define run64(n, blocks, shared, ...) run_kernel(n, blocks, shared, #__VA_ARGS__, __LINE__, __VA_ARGS__)
template <class... P, class... A>
static std::vector<float> run_kernel(size_t n, unsigned blocks, size_t shared, const char* name, int line,
                                     void (*kernel)(float*, P...), A... args) {
  Device<float> out(n);
  emu::launch_kernel(emu::Site{__FILE__, line}, name, kernel, blocks, 64, shared, nullptr, out.d, args...);
  return out.down().h;
}
static bool reversed(const std::vector<float>& v, size_t begin = 0) {
  for (size_t i = 0; i < 64; i++)
    if (v[begin + i] != float(begin + 63 - i)) return false;
  return true;
}
static bool all(const std::vector<float>& v, float value) {
  for (float x : v)
    if (x != value) return false;
  return true;
}
static void product_fault(void (*change)(Product&)) {
  Product p;
  change(p);
  p.run();
}

static const Fault FAULTS[] = {
    // ---- device memory ----------------------------------------------------------------------------------
    {"store one past the end",
     [] {
       Device<float> out(64);
       launch(store, 1, 1, 0, 0, Pointer{out.d}, 64);
       CUDA_CHECK(cudaDeviceSynchronize());
     },
     ANY, ASAN, "write of 4 bytes outside any allocation"},
    {"load one before the beginning",
     [] {
       Device<float> in(64);
       run64(64, 1, 0, load, Pointer{in.up().d}, -1);
     },
     ANY, ASAN, "read of 4 bytes outside any allocation"},
    {"use after free, pointer in a struct",
     [] {
       Device<float> out(64);
       float* gone;
       CUDA_CHECK(cudaMalloc(&gone, 256));
       CUDA_CHECK(cudaFree(gone));
       launch(load, 1, 64, 0, 0, out.d, Pointer{gone}, 0);
       CUDA_CHECK(cudaDeviceSynchronize());
     },
     ANY, ASAN, "outside any allocation"},
    {"use after free, pointer as a parameter",
     [] {
       float* gone;
       CUDA_CHECK(cudaMalloc(&gone, 256));
       CUDA_CHECK(cudaFree(gone));
       launch(add_one, 1, 64, 0, 0, gone);
     },
     ALL("add_one: parameter 1")},
    {"host pointer as a parameter",
     [] {
       std::vector<float> host(64);
       launch(add_one, 1, 64, 0, 0, host.data());
     },
     ALL("is not device memory")},
    {"host pointer in a struct",
     [] {
       std::vector<float> host(64);
       run64(64, 1, 0, load, Pointer{host.data()}, 0);
     },
     UNSEEN, UNSEEN, "read of 4 bytes of host memory"},
    {"null pointer",
     [] {
       launch(add_one, 1, 64, 0, 0, static_cast<float*>(nullptr));
       CUDA_CHECK(cudaDeviceSynchronize());
     },
     "bad or misaligned address", "add_one", "host memory"},
    {"host reads device memory",
     [] {
       Device<float> in(64);
       const volatile float* p = in.up().d;
       expect(p[3] == 1);
     },
     UNSEEN, "through cudaMemcpy only", "the host touches device memory"},
    {"host writes device memory",
     [] {
       Device<float> out(64);
       const_cast<volatile float*>(out.d)[3] = 1;
     },
     UNSEEN, "through cudaMemcpy only", "the host touches device memory"},
    {"unwritten device memory", [] { expect(all(run64(64, 1, 0, add_one), 2)); }, NUMBERS, NUMBERS,
     "read of device memory nobody has written"},
    {"misaligned vector load",
     [] {
       Device<float> in(64);
       Device<float4> out(1, float4{});
       launch(load_float4, 1, 1, 0, 0, out.d, in.up().d);
       CUDA_CHECK(cudaDeviceSynchronize());
     },
     ANY, "misaligned", "misaligned access"},
    {"stack overflow", [] { run64(64, 1, 0, overflow_stack, 1000); }, "stack overflow", "stack-overflow",
     "stack overflow"},
    // ---- shared memory ----------------------------------------------------------------------------------
    {"dynamic shared memory, one past the end", [] { run64(64, 1, 256, dynamic_overrun, 64); }, UNSEEN, ASAN,
     "outside any allocation"},
    {"static shared memory, one past the end", [] { run64(64, 1, 0, static_overrun, 64); }, ANY, UBSAN, ANY},
    {"unwritten shared memory", [] { expect(all(run64(64, 1, 0, unwritten_shared), 1)); }, NUMBERS, NUMBERS,
     "read of shared memory nobody has written"},
    {"shared memory left over from another block", [] { expect(all(run64(128, 2, 0, left_over_shared), 1)); },
     NUMBERS, NUMBERS, "read of shared memory nobody has written"},
    // ---- barriers ---------------------------------------------------------------------------------------
    {"no barrier before a read", [] { expect(reversed(run64(64, 1, 0, no_barrier))); }, NUMBERS, NUMBERS,
     "emu: error"},
    {"no barrier before reuse",
     [] {
       const auto v = run64(128, 1, 0, no_barrier_before_reuse);
       expect(reversed(v) && v[64] == 127);
     },
     NUMBERS, NUMBERS, "no __syncthreads lies in between"},
    {"no barrier before a write", [] { expect(all(run64(64, 1, 0, write_after_read), 1)); }, NUMBERS, NUMBERS,
     "data race on 4 bytes of shared memory"},
    {"no __syncwarp", [] { expect(run64(64, 1, 0, no_syncwarp)[6] == 7); }, NUMBERS, NUMBERS, "emu: error"},
    {"barrier in a branch", [] { run64(64, 1, 0, barrier_in_branch); }, "threads 0..31 wait in __syncthreads",
     "threads 0..31 wait in __syncthreads", "threads 32..63 have left the kernel"},
    {"exit before a barrier", [] { run64(64, 1, 0, early_exit, 50); }, ALL("threads that never come")},
    {"two barriers in two branches", [] { run64(64, 1, 0, two_barriers); }, ALL("different __syncthreads")},
    {"barrier in an uneven loop", [] { run64(64, 1, 0, uneven_loop); }, ALL("threads that never come")},
    // ---- warps ------------------------------------------------------------------------------------------
    {"shuffle without all its lanes", [] { run64(64, 1, 0, shuffle_half); }, ALL("wait in __shfl_xor_sync")},
    {"shuffles in two branches", [] { run64(64, 1, 0, shuffle_in_branches); },
     ALL("meet in different operations")},
    {"shuffle from a lane outside the mask", [] { run64(64, 1, 0, shuffle_outside); },
     ALL("does not take part")},
    {"mask without the caller", [] { run64(64, 1, 0, wrong_mask); }, ALL("leaves it out")},
    {"shuffle against barrier", [] { run64(64, 1, 0, shuffle_against_barrier); },
     ALL("threads 5..5 wait in __syncthreads")},
    {"warp sum by half a warp", [] { run64(64, 1, 0, half_of_helper); }, ALL(CALLED_AT)},
    {"mma without all lanes", [] { run64(64, 1, 0, mma_in_branch); }, ALL("wait in mma")},
    {"ldmatrix of a misaligned row", [] { run64(64, 1, 1024, ldmatrix_at, 8); }, ALL("not aligned")},
    {"ldmatrix of a row outside", [] { run64(64, 1, 512, ldmatrix_at, 16); }, UNSEEN, "outside any allocation",
     "outside any allocation"},
    // ---- asynchronous copies ----------------------------------------------------------------------------
    {"cp.async waited for too late",
     [] {
       Device<float> in(256);
       expect(all(run64(256, 1, 1024, cp_async, in.up().d, 1, true), 1));
     },
     NUMBERS, NUMBERS, "read of shared memory nobody has written"},
    {"cp.async without a barrier after the wait",
     [] {
       Device<float> in(256);
       expect(all(run64(256, 1, 1024, cp_async, in.up().d, 0, false), 1));
     },
     NUMBERS, NUMBERS, "emu: error"},
    {"cp.async from a misaligned address",
     [] {
       Device<float> in(260);
       run64(256, 1, 1024, cp_async, in.up().d + 1, 0, true);
     },
     ALL("not aligned")},
    {"cp.async from beyond the end",
     [] {
       Device<float> in(252);
       run64(256, 1, 1024, cp_async, in.up().d, 0, true);
     },
     ANY, "outside any allocation", "outside any allocation"},
    // ---- threads and blocks that get in each other's way --------------------------------------------------
    {"sum without atomics",
     [] {
       Device<float> sum(1, 0.0f);
       launch(sum_without_atomics, 4, 1, 0, 0, sum.up().d);
       CUDA_CHECK(cudaDeviceSynchronize());
     },
     ANY, ANY, "nothing orders the blocks"},
    {"blocks that overlap", [] { run64(244, 4, 0, overlapping_blocks); }, ANY, ANY, "wrote before"},
    {"warps that write one cell", [] { run64(64, 1, 0, same_cell); }, UNSEEN, UNSEEN, "data race"},
    // ---- launches ---------------------------------------------------------------------------------------
    {"1025 threads",
     [] {
       Device<float> a(1);
       launch(add_one, 1, 1025, 0, 0, a.d);
     },
     "bad configuration of add_one", "bad configuration", "bad configuration"},
    {"empty grid",
     [] {
       Device<float> a(1);
       launch(add_one, 0, 64, 0, 0, a.d);
     },
     ALL("grid (0,1,1)")},
    {"grid too large",
     [] {
       Device<float> a(1);
       launch(add_one, size_t(1) << 32, 64, 0, 0, a.d);
     },
     ALL("bad configuration")},
    {"grid y too large",
     [] {
       Device<float> a(1);
       launch(add_one, dim3(1, 65536), 64, 0, 0, a.d);
     },
     ALL("bad configuration")},
    {"too much shared memory",
     [] {
       Device<float> a(1);
       launch(add_one, 1, 64, 200000, 0, a.d);
     },
     "shared memory 200000", "bad configuration", "bad configuration"},
    {"more shared memory than compute 8.6 gives a block",
     [] {
       emu::card = {8, 6, 99 << 10};
       Device<float> a(64);
       launch(add_one, 1, 64, 99 << 10, 0, a.up().d);
       launch(add_one, 1, 64, (99 << 10) + 1, 0, a.d);
     },
     ALL("shared memory <= 101376 (compute 8.6)")},
    {"launch on a destroyed stream",
     [] {
       cudaStream_t s;
       CUDA_CHECK(cudaStreamCreate(&s));
       CUDA_CHECK(cudaStreamDestroy(s));
       Device<float> a(64);
       launch(add_one, 1, 64, 0, s, a.d);
     },
     ALL("was not made by cudaStreamCreate")},
    // ---- the runtime API ----------------------------------------------------------------------------------
    {"copy too long",
     [] {
       Device<float> a(64);
       std::vector<float> h(65);
       CUDA_CHECK(cudaMemcpy(a.d, h.data(), 65 * 4, cudaMemcpyHostToDevice));
     },
     "emu: in cudaMemcpy, called at", "run past the end of 256 bytes", "run past the end of 256 bytes"},
    {"copy in the wrong direction",
     [] {
       Device<float> a(64);
       CUDA_CHECK(cudaMemcpy(a.d, a.h.data(), 256, cudaMemcpyDeviceToHost));
     },
     ALL("is device memory, expected host")},
    {"copy between overlapping ranges",
     [] {
       Device<float> a(64);
       CUDA_CHECK(cudaMemcpy(a.up().d, a.d + 8, 128, cudaMemcpyDeviceToDevice));
     },
     ALL("overlap")},
    {"copy from a host buffer too short",
     [] {
       Device<float> a(64);
       std::vector<float> h(32);
       CUDA_CHECK(cudaMemcpy(a.d, h.data(), 256, cudaMemcpyHostToDevice));
     },
     UNSEEN, ASAN, UNSEEN},
    {"memset too long",
     [] {
       Device<float> a(64);
       CUDA_CHECK(cudaMemset(a.d + 1, 0, 256));
     },
     ALL("offset 4 run past")},
    {"free twice",
     [] {
       float* p;
       CUDA_CHECK(cudaMalloc(&p, 256));
       CUDA_CHECK(cudaFree(p));
       CUDA_CHECK(cudaFree(p));
     },
     "emu: in cudaFree", "was freed before", "was freed before"},
    {"free of host memory",
     [] {
       std::vector<float> h(64);
       CUDA_CHECK(cudaFree(h.data()));
     },
     ALL("is no device memory")},
    {"leak of device memory",
     [] {
       float* p;
       CUDA_CHECK(cudaMalloc(&p, 1000));
     },
     ALL("device memory of 1000 bytes")},
    {"leak of an event",
     [] {
       cudaEvent_t e;
       CUDA_CHECK(cudaEventCreate(&e));
     },
     "event of 0 bytes, made at", "made at", "made at"},
    {"leak of a cuBLASLt handle",
     [] {
       cublasLtHandle_t lt;
       CUBLAS_CHECK(cublasLtCreate(&lt));
     },
     ALL("cuBLASLt object of 0 bytes, made at")},
    {"cuBLASLt handle destroyed twice",
     [] {
       cublasLtHandle_t lt;
       CUBLAS_CHECK(cublasLtCreate(&lt));
       CUBLAS_CHECK(cublasLtDestroy(lt));
       CUBLAS_CHECK(cublasLtDestroy(lt));
     },
     ALL("is no cuBLASLt object")},
    {"wait for a destroyed stream",
     [] {
       cudaStream_t s;
       CUDA_CHECK(cudaStreamCreate(&s));
       CUDA_CHECK(cudaStreamDestroy(s));
       CUDA_CHECK(cudaStreamSynchronize(s));
     },
     "emu: in cudaStreamSynchronize", "was not made by cudaStreamCreate", "was not made by cudaStreamCreate"},
    {"time of an event never recorded",
     [] {
       cudaEvent_t e;
       float ms;
       CUDA_CHECK(cudaEventCreate(&e));
       CUDA_CHECK(cudaEventElapsedTime(&ms, e, e));
     },
     ALL("never recorded")},
    {"nvtx range ended twice",
     [] {
       nvtxRangePushA("a");
       nvtxRangePop();
       nvtxRangePop();
     },
     ALL("nvtxRangePop")},
    // ---- streams: seen when work runs late, in reverse order ------------------------------------------------
    {"read before the copy has finished",
     [] {
       Device<float> a(64);
       float* pinned;
       CUDA_CHECK(cudaMallocHost(&pinned, 256));
       CUDA_CHECK(cudaMemcpyAsync(pinned, a.up().d, 256, cudaMemcpyDeviceToHost));
       expect(pinned[5] == 1);
       CUDA_CHECK(cudaFreeHost(pinned));
     },
     NUMBERS, NUMBERS, NUMBERS},
    {"source changed before the copy has finished",
     [] {
       Device<float> a(64);
       float* pinned;
       CUDA_CHECK(cudaMallocHost(&pinned, 256));
       for (int i = 0; i < 64; i++) pinned[i] = 1;
       CUDA_CHECK(cudaMemcpyAsync(a.d, pinned, 256, cudaMemcpyHostToDevice));
       for (int i = 0; i < 64; i++) pinned[i] = 2;
       expect(all(a.down().h, 1));
       CUDA_CHECK(cudaFreeHost(pinned));
     },
     NUMBERS, NUMBERS, NUMBERS},
    {"one stream does not wait for another",
     [] {
       cudaStream_t s, t;
       CUDA_CHECK(cudaStreamCreate(&s));
       CUDA_CHECK(cudaStreamCreate(&t));
       Device<float> a(64, 5.0f);
       a.up();
       CUDA_CHECK(cudaDeviceSynchronize());
       launch(add_one, 1, 64, 0, s, a.d);
       CUDA_CHECK(cudaMemsetAsync(a.d, 0, 256, t));
       CUDA_CHECK(cudaStreamSynchronize(t));
       expect(all(a.down().h, 0));
       CUDA_CHECK(cudaStreamDestroy(s));
       CUDA_CHECK(cudaStreamDestroy(t));
     },
     NUMBERS, NUMBERS, NUMBERS},
    {"time of an event nobody waited for",
     [] {
       cudaEvent_t e;
       float ms;
       CUDA_CHECK(cudaEventCreate(&e));
       CUDA_CHECK(cudaEventRecord(e));
       emu::order = Order::reverse;
       CUDA_CHECK(cudaEventRecord(e));
       CUDA_CHECK(cudaEventElapsedTime(&ms, e, e));
     },
     ALL("nothing waited for it")},
    // ---- cuBLASLt -----------------------------------------------------------------------------------------
    {"product: inner sizes differ", [] { product_fault([](Product& p) { p.k = 23; }); }, "B bf16 23 x 8",
     "sizes do not fit", "sizes do not fit"},
    {"product: output of another size", [] { product_fault([](Product& p) { p.m = 15; }); }, "D float 15 x 8",
     "sizes do not fit", "sizes do not fit"},
    {"product: leading dimension too small", [] { product_fault([](Product& p) { p.ldb = 23; }); },
     ALL("leading dimension")},
    {"product: operand types differ", [] { product_fault([](Product& p) { p.type_a = CUDA_R_32F; }); },
     ALL("unsupported types")},
    {"product: float into bf16",
     [] { product_fault([](Product& p) { p.type_a = p.type_b = CUDA_R_32F, p.type_d = CUDA_R_16BF; }); },
     ALL("unsupported types")},
    {"product: output buffer too small", [] { product_fault([](Product& p) { p.small_output = true; }); },
     "D: 512 bytes", "run past the end of 508", "run past the end of 508"},
    {"product: host operand", [] { product_fault([](Product& p) { p.host_operand = true, p.alignment = 1; }); },
     "A: ", "is not device memory", "is not device memory"},
    {"product: unwritten operand", [] { product_fault([](Product& p) { p.unwritten = true; }); }, UNSEEN,
     UNSEEN, "nobody has written"},
    {"product: algorithm of another product",
     [] { product_fault([](Product& p) { p.reuse_algorithm = true; }); }, ALL("for another product")},
    {"product: workspace too small", [] { product_fault([](Product& p) { p.workspace = 100; }); },
     ALL("the workspace has 100 bytes")},
    {"product: operand not aligned as promised", [] { product_fault([](Product& p) { p.offset_a = 16; }); },
     "A is not aligned to the 256", "A is not aligned", "A is not aligned"},
    {"product: attribute of the wrong size",
     [] { product_fault([](Product& p) { p.short_attribute = true; }); }, ALL("has 1 bytes, expected 4")},
};

// Runs fault i in a process of its own; returns its exit status and what it printed.
static int run_fault(size_t i, const char* order, std::string* output) {
  int pipe_ends[2];
  if (pipe(pipe_ends)) exit(1);
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], 1), dup2(pipe_ends[1], 2);
    close(pipe_ends[0]), close(pipe_ends[1]);
    setenv("EMU_ORDER", order, 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);  // a program that ends in the middle leaks
    setenv("EMU_THREADS", "2", 1);
    execl("/proc/self/exe", "test_emulator", "fault", std::to_string(i).c_str(), static_cast<char*>(nullptr));
    _Exit(1);
  }
  close(pipe_ends[1]);
  char buffer[4096];
  for (ssize_t n; (n = read(pipe_ends[0], buffer, sizeof buffer)) > 0;) output->append(buffer, size_t(n));
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
static std::string first_line_with(const std::string& text, const char* part) {
  const size_t at = text.find(part);
  if (at == std::string::npos) return "";
  const size_t begin = text.rfind('\n', at) + 1;
  return text.substr(begin, text.find('\n', at) - begin);
}
static void test_faults() {
  for (size_t i = 0; i < sizeof FAULTS / sizeof *FAULTS; i++) {
    const Fault& f = FAULTS[i];
#if defined(EMU_RACE)
    const char* expected = f.race;
#elif defined(__SANITIZE_ADDRESS__)
    const char* expected = f.asan;
#else
    const char* expected = f.fast;
#endif
    TEST("fault: " + std::string(f.name) + (expected == UNSEEN ? " (unseen by this build)" : ""));
    size_t wrong = 0;
    for (const char* order : {"forward", "reverse", "random"}) {
      std::string text;
      const int status = run_fault(i, order, &text);
      wrong += status == WRONG;
      if (expected == ANY)
        CHECK(true);
      else if (expected == UNSEEN)
        CHECK_EQ(status, 0);
      else if (expected == NUMBERS)
        CHECK(status == 0 || status == WRONG);
      else {
        CHECK(status != 0 && status != WRONG);
        if (!CHECK(text.find(expected) != std::string::npos))
          printf("  %s, expected '%s':\n%s\n", order, expected, text.c_str());
        // Whatever happens inside a kernel names kernel, block and thread; whatever not, the API call or the
        // line.
        const bool in_kernel = text.find("emu: in kernel ") != std::string::npos;
        if (in_kernel)
          CHECK(text.find(", block (") != std::string::npos && text.find(", thread (") != std::string::npos);
        else
          CHECK(text.find("test_emulator.cu:") != std::string::npos || text.find("nvtx") != std::string::npos);
        if (!strcmp(order, "forward")) printf("  %s\n", first_line_with(text, expected).c_str());
      }
    }
    if (expected == NUMBERS) CHECK(wrong > 0), printf("  wrong numbers in %zu of 3 orders\n", wrong);
  }
}

// ======================================================================================================
// Correct code: the same numbers in every order.
// ======================================================================================================
template <class F>
static void in_every_order(F&& f) {
  for (Order o : {Order::forward, Order::reverse, Order::random})
    for (uint64_t s = 1; s <= (o == Order::random ? 3 : 1); s++) emu::order = o, emu::seed = s, f();
  emu::order = Order::forward;
}

__global__ void reverse_in_blocks(float* out, const float* in) {  // two arrays, two barriers
  __shared__ float s[2][96];
  const int t = int(threadIdx.x), n = int(blockDim.x), i = int(blockIdx.x) * n + t;
  for (int round = 0; round < 3; round++) {
    s[round % 2][t] = in[i] + float(round);
    __syncthreads();
    if (round == 2) out[i] = s[0][n - 1 - t] + s[1][t];
  }
}
__global__ void warp_operations(int* out) {  // 40 threads: the second warp has eight lanes
  const int t = int(threadIdx.x), lane = t % 32;
  const unsigned mask = t < 32 ? ~0u : 0xFFu;
  int* o = out + t * 8;
  o[0] = __shfl_sync(mask, t, 3);
  o[1] = __shfl_up_sync(mask, t, 1);
  o[2] = __shfl_down_sync(mask, t, 2, 8);
  o[3] = __shfl_xor_sync(mask, t, 5);
  o[4] = int(__ballot_sync(mask, lane % 3 == 0));
  o[5] = __any_sync(mask, t == 39) * 2 + __all_sync(mask, t < 32);
  o[6] = __reduce_add_sync(mask, t);
  o[7] = __shfl_xor_sync(mask, t, 1, 4) * 100 + __shfl_down_sync(mask, t, 3, 8);
}
__global__ void exchange_by_warp(float* out) {
  float* s = dynamic_shared<float>();
  const int t = int(threadIdx.x);
  for (int i = 0; i < 3; i++) {
    s[t] = float(t + i);
    __syncwarp();
    out[t] = s[t ^ 7];
    __syncwarp();
  }
}
__global__ void look_and_leave(float* out) {  // what was there before, and something for the next block to find
  __shared__ float fixed[64];
  float* dynamic = dynamic_shared<float>();
  const unsigned t = threadIdx.x, i = blockIdx.x * 64 + t;
  out[2 * i] = fixed[t], out[2 * i + 1] = dynamic[t];
  fixed[t] = dynamic[t] = 1;
}
__global__ void histogram(int* counts, int* last, const int* values, int n) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  atomicAdd(&counts[values[i]], 1);
  atomicMax(last, i);
}
// d (16 x 8) = a (16 x K) b (N x K)^T with K in steps of 16: cp.async in two buffers, ldmatrix, mma. One warp.
// The rows of b from N <= 8 on are zeros.
__global__ void tensor_product(float* d, const bf16* a, const bf16* b, int N, int K) {
  bf16* s = dynamic_shared<bf16>();  // two times (16 + 8) rows of 24, 16 used
  constexpr int LD = 24, BUFFER = 24 * LD;
  const int lane = int(threadIdx.x);
  auto fetch = [&](int k) {
    bf16* to = s + k / 16 % 2 * BUFFER;
    for (int i = lane; i < 48; i += 32) {
      const int row = i / 2, c = i % 2 * 8;
      cp_async_16(to + row * LD + c, (row < 16 ? a + row * K : b + (row - 16) * K) + k + c, row < 16 + N);
    }
  };
  float sum[4] = {};
  fetch(0), cp_async_commit();
  for (int k = 0; k < K; k += 16) {
    if (k + 16 < K) fetch(k + 16);
    cp_async_commit(), cp_async_wait<1>();
    __syncwarp();
    const bf16* at = s + k / 16 % 2 * BUFFER;
    unsigned fa[4], fb[4];
    ldmatrix_x4(fa, at + lane % 16 * LD + lane / 16 * 8);
    ldmatrix_x4(fb, at + (16 + lane % 8) * LD + lane / 8 % 2 * 8);
    mma_m16n8k16(sum, fa, fb[0], fb[1]);
    __syncwarp();  // this buffer is refilled in the next round
  }
  for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}
__global__ void add_less_than_an_ulp(
    float* d) {  // 1 + 7/8 ulp, then -1 - 7/8 ulp: a tensor core drops what does not fit
  const unsigned a[4] = {0x3F80, 0, 0, 0}, b = 0x33E0, minus_b = 0xB3E0;  // 1 in column 0; 7/8 of 2^-23
  for (unsigned i = 0; i < 2; i++) {
    float sum[4] = {i ? -1.0f : 1.0f};
    mma_m16n8k16(sum, a, threadIdx.x % 4 ? 0 : i ? minus_b : b, 0);
    if (threadIdx.x == 0) d[i] = sum[0];
  }
}
__global__ void add_beyond_the_largest(float* d) {  // 2^127 + 2^127 - 2^127: the sum is infinite from there on
  const unsigned a[4] = {0x7F007F00, 0, 0x00007F00, 0}, b = 0x3F803F80, minus_b = 0x0000BF80;
  float sum[4] = {};
  mma_m16n8k16(sum, a, b, minus_b);
  if (threadIdx.x == 0) d[0] = sum[0];
}
__global__ void transpose_by_ldmatrix(uint16_t* out, const uint16_t* in) {  // four 8 x 8 matrices, one warp
  __shared__ __align__(16) uint16_t s[32 * 8];
  const int lane = int(threadIdx.x);
  for (int i = 0; i < 8; i++) s[lane * 8 + i] = in[lane * 8 + i];
  __syncwarp();
  unsigned r[4];
  ldmatrix_x4_trans(r, s + lane * 8);
  for (int i = 0; i < 4; i++)
    for (int high = 0; high < 2; high++)
      out[i * 64 + lane / 4 * 8 + lane % 4 * 2 + high] = uint16_t(r[i] >> 16 * high);
}

static float value(size_t i) { return float(int(i * 2654435761u % 2001) - 1000) / 1000; }
static void test_kernels() {
  TEST("barriers and shared memory, 5 blocks of 96 threads");
  in_every_order([] {
    Device<float> in(480), out(480);
    for (size_t i = 0; i < 480; i++) in.h[i] = float(i);
    launch(reverse_in_blocks, 5, 96, 0, 0, out.d, in.up().d);
    out.down();
    for (size_t i = 0; i < 480; i++)
      if (!CHECK_EQ(out.h[i], in.h[i / 96 * 96 + 95 - i % 96] + 2 + in.h[i] + 1)) break;
  });
  TEST("warp operations, 40 threads");
  in_every_order([] {
    Device<int> out(320, 0);
    launch(warp_operations, 1, 40, 0, 0, out.d);
    out.down();
    for (int t = 0; t < 40; t++) {
      const int base = t / 32 * 32, lanes = t < 32 ? 32 : 8, lane = t % 32;
      int sum = 0, ballot = 0;
      for (int l = 0; l < lanes; l++) sum += base + l, ballot |= (l % 3 == 0) << l;
      const int expected[8] = {base + 3,
                               lane ? t - 1 : t,
                               lane % 8 + 2 < 8 ? t + 2 : t,
                               t ^ 5,
                               ballot,
                               t < 32 ? 1 : 2,
                               sum,
                               (t ^ 1) * 100 + (lane % 8 + 3 < 8 ? t + 3 : t)};
      for (int i = 0; i < 8; i++) CHECK_EQ(out.h[size_t(t * 8 + i)], expected[i]);
    }
  });
  TEST("__syncwarp orders the lanes of a warp");
  in_every_order([] {
    Device<float> out(128);
    launch(exchange_by_warp, 1, 128, 512, 0, out.d);
    out.down();
    for (size_t i = 0; i < 128; i++)
      if (!CHECK_EQ(out.h[i], float((i ^ 7) + 2))) break;
  });
  TEST("memory is NaN until somebody writes it");
  in_every_order([] {
    auto is_nan = [](float x) { return x != x; };
    auto all_nan = [&](const float* p, size_t n) { return std::all_of(p, p + n, is_nan); };
    {
      Device<float> before(640, 1.0f);
      before.up();
    }
    CHECK(all_nan(Device<float>(640).down().h.data(), 640));
    float* pinned;
    CUDA_CHECK(cudaMallocHost(&pinned, 256));
    CHECK(all_nan(pinned, 64));
    CUDA_CHECK(cudaFreeHost(pinned));
    if (emu::COUNTS_TRAFFIC) return;  // the race build refuses to read shared memory that nobody wrote
    for (int i = 0; i < 2; i++) CHECK(all_nan(run64(640, 5, 256, look_and_leave).data(), 640));
  });
  TEST("atomics");
  in_every_order([] {
    Device<int> counts(10, 0), last(1, -1), values(1000, 0);
    for (size_t i = 0; i < 1000; i++) values.h[i] = int(i * i % 10);
    launch(histogram, 8, 128, 0, 0, counts.up().d, last.up().d, values.up().d, 1000);
    counts.down(), last.down();
    const int expected[10] = {100, 200, 0, 0, 200, 100, 200, 0, 0, 200};
    for (size_t i = 0; i < 10; i++) CHECK_EQ(counts.h[i], expected[i]);
    CHECK_EQ(last.h[0], 999);
  });
  TEST("cp.async in two buffers, ldmatrix, mma");
  in_every_order([] {
    const int K = 80, N = 5;
    Device<bf16> a(16 * K), b(N * K);
    Device<float> d(128);
    for (size_t i = 0; i < a.h.size(); i++) a.h[i] = value(i);
    for (size_t i = 0; i < b.h.size(); i++) b.h[i] = value(i + 7777);
    launch(tensor_product, 1, 32, 2 * 24 * 24 * sizeof(bf16), 0, d.d, a.up().d, b.up().d, N, K);
    d.down();
    double worst = 0;
    for (size_t y = 0; y < 16; y++)
      for (size_t x = 0; x < 8; x++) {
        double sum = 0;
        for (size_t k = 0; k < size_t(K) && x < size_t(N); k++)
          sum += double(float(a.h[y * K + k])) * double(float(b.h[x * K + k]));
        worst = fmax(worst, fabs(sum - double(d.h[y * 8 + x])));
      }
    CHECK(worst < 80 * 1.2e-7 * 10);  // K products below 1, each sum truncated
    if (emu::order == Order::forward) printf("  largest error %.1e\n", worst);
  });
  TEST("mma truncates its sums");
  in_every_order([] {
    Device<float> out(2);
    launch(add_less_than_an_ulp, 1, 32, 0, 0, out.d);
    out.down();
    CHECK(out.h[0] == 1 && out.h[1] == -1);
  });
  TEST("mma: a sum beyond the largest float is infinite");
  in_every_order([] {
    Device<float> out(1);
    launch(add_beyond_the_largest, 1, 32, 0, 0, out.d);
    CHECK_EQ(out.down().h[0], INFINITY);
  });
  TEST("ldmatrix transposed");
  in_every_order([] {
    Device<uint16_t> in(256, 0), out(256, 0);
    for (size_t i = 0; i < 256; i++) in.h[i] = uint16_t(i * 251);
    launch(transpose_by_ldmatrix, 1, 32, 0, 0, out.d, in.up().d);
    out.down();
    for (size_t i = 0; i < 256; i++) CHECK_EQ(out.h[i], in.h[i / 64 * 64 + i % 8 * 8 + i / 8 % 8]);
  });
}

static void test_runtime() {
  TEST("the device says what it is");
  cudaDeviceProp p;
  CHECK_EQ(cudaGetDeviceProperties(&p, 0), cudaSuccess);
  CHECK_EQ(std::string(p.name), std::string("CPU emulator"));
  CHECK_EQ(p.sharedMemPerBlockOptin, emu::card.shared_bytes);
  CHECK_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
  CHECK_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);

  TEST("out of memory");
  const size_t before = emu::device_bytes;
  size_t free = 0, total = 0;
  emu::device_bytes = 1 << 20;
  float *a = nullptr, *b = nullptr;
  CHECK_EQ(cudaMalloc(&a, 1000000), cudaSuccess);
  CHECK_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  CHECK(free < 50000 && total == 1 << 20);
  CHECK_EQ(cudaMalloc(&b, 100000), cudaErrorMemoryAllocation);
  CHECK(b == nullptr);
  CHECK_EQ(std::string(cudaGetErrorString(cudaGetLastError())), std::string("out of memory"));
  CHECK_EQ(cudaFree(a), cudaSuccess);
  CHECK_EQ(cudaMalloc(&b, 100000), cudaSuccess);
  CHECK_EQ(cudaFree(b), cudaSuccess);
  emu::device_bytes = before;

  TEST("streams and events, used as they should be");
  in_every_order([] {
    cudaStream_t s, t;
    cudaEvent_t begin, end;
    float *pinned, ms = -1;
    CUDA_CHECK(cudaStreamCreate(&s));
    CUDA_CHECK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    CUDA_CHECK(cudaMallocHost(&pinned, 256));
    {
      Device<float> a(64, 5.0f);
      a.up();
      CUDA_CHECK(cudaEventRecord(begin, s));
      launch(add_one, 1, 64, 0, s, a.d);
      CUDA_CHECK(cudaEventRecord(end, s));
      CUDA_CHECK(cudaStreamWaitEvent(t, end));
      CUDA_CHECK(cudaMemcpyAsync(pinned, a.d, 256, cudaMemcpyDeviceToHost, t));
      CUDA_CHECK(cudaStreamSynchronize(t));
      CHECK_EQ(pinned[63], 6.0f);
      CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
      CHECK(ms >= 0 && ms < 10000);
      while (cudaEventQuery(end) != cudaSuccess) {}
    }
    CUDA_CHECK(cudaFreeHost(pinned));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaStreamDestroy(s));
    CUDA_CHECK(cudaStreamDestroy(t));
  });

  TEST("a second thread of the host writes a file while kernels run");
  in_every_order([] {
    float* pinned;
    CUDA_CHECK(cudaMallocHost(&pinned, 4096));
    for (size_t i = 0; i < 1024; i++) pinned[i] = float(i);
    FILE* file = tmpfile();
    std::atomic<size_t> written{0};
    std::atomic<bool> stop{false};
    std::thread writer([&] {
      for (std::vector<float> copy; !stop; written++) {
        copy.assign(pinned, pinned + 1024);
        rewind(file);
        must(fwrite(copy.data(), 4, copy.size(), file) == copy.size(), __LINE__, "fwrite");
      }
    });
    Device<float> in(480, 1.0f), out(480);
    in.up();
    for (int i = 0; i < 20 || written < 2; i++) {
      launch(reverse_in_blocks, 5, 96, 0, 0, out.d, in.d);
      out.down();
      CHECK(all(out.h, 5));
    }
    stop = true;
    writer.join();
    std::vector<float> back(1024);
    rewind(file);
    CHECK(fread(back.data(), 4, 1024, file) == 1024 && back[1023] == 1023);
    fclose(file);
    CUDA_CHECK(cudaFreeHost(pinned));
  });

  TEST("bf16 rounds to nearest, ties to even");
  for (float f : {1.0f, 1.00390625f, 1.01171875f, -3.0e-39f, 3.3e38f, 65504.0f, 1e-8f}) {
    float best = 0, best_distance = INFINITY;  // the nearest of all 65,536
    for (unsigned u = 0; u < 65536; u++) {
      const float c = __ushort_as_bfloat16(uint16_t(u)), distance = fabsf(c - f);
      if (distance < best_distance || (distance == best_distance && u % 2 == 0))
        best = c, best_distance = distance;
    }
    CHECK_EQ(float(bf16(f)), best);
  }
  CHECK(std::isnan(float(bf16(NAN))) && std::isinf(float(bf16(3.4e38f))));
}

// Every transposition, type and odd size against plain double sums.
template <class T, class O>
static double product_error(bool ta, bool tb, size_t m, size_t n, size_t k, float beta) {
  auto type = [](auto v) { return sizeof v == 4 ? CUDA_R_32F : CUDA_R_16BF; };
  const size_t lda = (ta ? k : m) + 3, ldb = (tb ? n : k) + 1, ldd = m + 2;
  Device<T> a(lda * (ta ? m : k)), b(ldb * (tb ? k : n));
  Device<O> d(ldd * n);
  for (size_t i = 0; i < a.h.size(); i++) a.h[i] = T(value(i));
  for (size_t i = 0; i < b.h.size(); i++) b.h[i] = T(value(i + 999));
  for (size_t i = 0; i < d.h.size(); i++) d.h[i] = O(value(i + 55));
  const std::vector<O> before = d.h;
  a.up(), b.up(), d.up();
  cublasLtHandle_t lt;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t la, lb, ld;
  const cublasOperation_t op_a = ta ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
  CUBLAS_CHECK(cublasLtCreate(&lt));
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&la, type(T()), ta ? k : m, ta ? m : k, int64_t(lda)));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&lb, type(T()), tb ? n : k, tb ? k : n, int64_t(ldb)));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&ld, type(O()), m, n, int64_t(ldd)));
  const float alpha = 0.5f;
  CUBLAS_CHECK(cublasLtMatmul(lt, desc, &alpha, a.d, la, b.d, lb, &beta, d.d, ld, d.d, ld, nullptr, nullptr, 0,
                              nullptr));
  d.down();
  double worst = 0;
  for (size_t j = 0; j < n; j++)
    for (size_t i = 0; i < ldd; i++) {
      const double old = double(float(before[j * ldd + i])), got = double(float(d.h[j * ldd + i]));
      double sum = 0;
      for (size_t l = 0; l < k && i < m; l++)
        sum += double(float(a.h[ta ? i * lda + l : l * lda + i])) *
               double(float(b.h[tb ? l * ldb + j : j * ldb + l]));
      const double want = i < m ? 0.5 * sum + (beta == 0 ? 0 : double(beta) * old) : old;
      worst = fmax(worst,
                   fabs(got - want) / (sizeof(O) == 2 ? fabs(want) + 1e-2 : 1));  // between the rows: untouched
    }
  CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(la));
  CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(lb));
  CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(ld));
  CUBLAS_CHECK(cublasLtMatmulDescDestroy(desc));
  CUBLAS_CHECK(cublasLtDestroy(lt));
  return worst;
}
static void test_products() {
  TEST("cuBLASLt products against double sums: float error below k eps, bf16 one rounding");
  in_every_order([] {
    double worst[3] = {};
    for (int t = 0; t < 4; t++)
      for (auto [m, n, k] :
           {std::tuple<size_t, size_t, size_t>{1, 1, 1}, {17, 7, 5}, {16, 6, 64}, {33, 41, 130}})
        for (float beta : {0.0f, 1.0f}) {
          worst[0] =
              fmax(worst[0], product_error<float, float>(t & 1, t & 2, m, n, k, beta) / (double(k + 2) * 6e-8));
          worst[1] = fmax(worst[1],
                          product_error<bf16, float>(t & 1, t & 2, m, n, k, beta) / (double(k + 2) * 1.2e-7));
          worst[2] = fmax(worst[2], product_error<bf16, bf16>(t & 1, t & 2, m, n, k, beta) * 256);
        }
    if (emu::order == Order::forward)
      printf("  errors in these units: float %.2f, bf16 to float %.2f, bf16 to bf16 %.2f\n", worst[0], worst[1],
             worst[2]);
    for (double w : worst) CHECK(w <= 1.02);
  });
}

// ---- traffic: counted in the race build ----------------------------------------------------------------
__global__ void copy_vectors(float4* out, const float4* in) {
  const size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[i];
}
template <int STRIDE>
__global__ void read_strided(float* out, const float* in) {
  out[threadIdx.x] = in[threadIdx.x * STRIDE];
}
__global__ void read_broadcast(float* out, const float* in) { out[threadIdx.x] = in[0] + in[1]; }
__global__ void scale_vectors(float4* out, const float4* in) {  // compilers split such loads into four
  const float4 v = in[threadIdx.x];
  out[threadIdx.x] = {v.x * 2, v.y * 2, v.z * 2, v.w * 2};
}
static void test_traffic() {
  TEST("bytes and sectors of global memory per kernel");
  if (!emu::COUNTS_TRAFFIC) {
    SKIP("only the race build counts");
    return;
  }
  in_every_order([] {
    Device<float> in(4096), out(4096);
    in.up();
    emu::count_traffic(true);
    launch(copy_vectors, 8, 128, 0, 0, reinterpret_cast<float4*>(out.d), reinterpret_cast<const float4*>(in.d));
    launch(read_strided<1>, 1, 64, 0, 0, out.d, in.d);
    launch(read_strided<8>, 1, 64, 0, 0, out.d, in.d);
    launch(read_broadcast, 1, 64, 0, 0, out.d, in.d);
    launch(scale_vectors, 1, 64, 0, 0, reinterpret_cast<float4*>(out.d), reinterpret_cast<const float4*>(in.d));
    CUDA_CHECK(cudaDeviceSynchronize());
    emu::count_traffic(false);
    emu::Traffic t = emu::traffic("copy_vectors");
    CHECK_EQ(t.launches, size_t(1));
    CHECK_EQ(t.bytes_read, size_t(16384));
    CHECK_EQ(t.bytes_written, size_t(16384));
    CHECK_EQ(t.sectors_read, size_t(512));
    CHECK_EQ(t.sectors_written, size_t(512));
    CHECK_EQ(t.distinct_read, size_t(512));
    CHECK_EQ(t.requests, size_t(64));  // 32 warps, a load and a store each
    t = emu::traffic("read_strided");  // both: 64 * 4 bytes each; 8 sectors, then one sector for each of 64
    CHECK_EQ(t.launches, size_t(2));
    CHECK_EQ(t.bytes_read, size_t(512));
    CHECK_EQ(t.sectors_read, size_t(8 + 64));
    CHECK_EQ(t.requests, size_t(2 * 4));
    t = emu::traffic("read_broadcast");  // two loads by two warps, always the same sector
    CHECK_EQ(t.bytes_read, size_t(512));
    CHECK_EQ(t.sectors_read, size_t(2));  // the two neighbouring loads count as one
    CHECK_EQ(t.distinct_read, size_t(1));
    t = emu::traffic("scale_vectors");
    CHECK_EQ(t.sectors_read, size_t(32));
    CHECK_EQ(t.sectors_written, size_t(32));
    CHECK_EQ(emu::traffic("no_such_kernel").launches, size_t(0));
    CHECK_EQ(emu::traffic().launches, size_t(5));
    CHECK_EQ(emu::traffic().sectors_read, size_t(512 + 8 + 64 + 2 + 32));
  });
}

int main(int argc, char** argv) {
  if (argc == 3 && !strcmp(argv[1], "fault")) {
    FAULTS[atoi(argv[2])].run();
    return 0;
  }
  test_kernels();
  test_runtime();
  test_products();
  test_traffic();
  test_faults();
  return finish();
}
