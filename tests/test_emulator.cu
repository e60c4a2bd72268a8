// test_emulator.cu - does the emulator (dev/emulator) find what it says it finds, and nothing else?
//
// The first half is two tables of faults, of kernels and of calls. Each runs in a process of its own, in three
// thread orders, and must end as the table says for this build: with a message that names the right thing, with
// wrong numbers that a test would notice, or, where the README admits it, unnoticed. The second half is correct
// code that must pass in every order.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <emulated_device.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/child.h"  // in_child

using bf16 = __nv_bfloat16;
using emu::Order;

static void must(bool ok, int line) {
  if (!ok) fprintf(stderr, "test_emulator.cu:%d: a call failed\n", line), exit(1);
}
#define CUDA_CHECK(call) must((call) == cudaSuccess, __LINE__)
#define CUBLAS_CHECK(call) must((call) == CUBLAS_STATUS_SUCCESS, __LINE__)

template <class T>
struct Device {  // n values on the card and on the host
  T* d = nullptr;
  std::vector<T> h;
  explicit Device(size_t n, T value = T(1.0f)) : h(n, value) { CUDA_CHECK(cudaMalloc(&d, bytes())); }
  Device(const Device&) = delete;
  ~Device() { CUDA_CHECK(cudaFree(d)); }
  size_t bytes() const { return h.size() * sizeof(T); }
  Device& up() {
    CUDA_CHECK(cudaMemcpyAsync(d, h.data(), bytes(), cudaMemcpyHostToDevice, nullptr));
    return *this;
  }
  const std::vector<T>& down() {
    CUDA_CHECK(cudaMemcpyAsync(h.data(), d, bytes(), cudaMemcpyDeviceToHost, nullptr));
    return h;
  }
};
static bool all(const std::vector<float>& v, float value) {
  return std::all_of(v.begin(), v.end(), [value](float x) { return x == value; });
}

// ======================================================================================================
// Faults: what happens in the fast and in the race build. A text: the program ends with a message that contains
// it. NUMBERS: wrong numbers in at least one thread order. UNSEEN: nothing. ANY: not determined.
// ======================================================================================================
static const char NUMBERS[] = "wrong numbers", UNSEEN[] = "unseen", ANY[] = "not determined";
#define BOTH(text) text, text
#if defined(__clang__)
#define CALLED_AT "test_emulator.cu:"  // addr2line does not follow clang's inlining
#else
#define CALLED_AT ", called at test_emulator.cu:"
#endif
static const int WRONG = 3;  // exit status: it ran, and the numbers are wrong
static void expect(bool right) {
  if (!right) _Exit(WRONG);
}

// ---- kernels: 64 threads a block; `in` holds 256 ones, `out` nothing yet --------------------------------
__global__ void store_beyond(float*, float* in) { in[256] = 1; }
__global__ void load_before(float* out, float* in) { out[threadIdx.x] = in[-1]; }
__global__ void load_unwritten(float* out, float*) { out[threadIdx.x] += 1; }
__global__ void load_misaligned(float* out, float* in) {
  if (threadIdx.x == 0) *reinterpret_cast<float4*>(out) = *reinterpret_cast<float4*>(in + 1);
}
__device__ __attribute__((noinline)) float deep(int depth) {
  volatile float frame[1024];
  frame[depth % 1024] = float(depth);
  if (depth > 0) frame[0] = deep(depth - 1);
  return frame[depth % 1024] + 1;
}
__global__ void overflow_stack(float* out, float*) { out[threadIdx.x] = deep(1000); }

__global__ void overrun_shared(float* out, float*) {
  float* s = dynamic_shared<float>();
  s[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) s[64] = 2;
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void unwritten_shared(float* out, float*) {
  __shared__ float s[64];
  if (threadIdx.x < 63) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
template <bool DYNAMIC>
__global__ void left_over_shared(float* out, float*) {  // the second block hopes for what the first one wrote
  __shared__ float fixed[64];
  float* s = DYNAMIC ? dynamic_shared<float>() : fixed;
  if (blockIdx.x == 0) s[threadIdx.x] = 1;
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = s[63 - threadIdx.x];
}

__global__ void no_barrier(float* out, float*) {
  __shared__ float s[64];
  s[threadIdx.x] = float(threadIdx.x);
  out[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void no_barrier_before_reuse(float* out, float*) {
  __shared__ float s[64];
  s[threadIdx.x] = float(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
  s[threadIdx.x] = 0;
}
__global__ void write_after_read(float* out,
                                 float*) {  // in order, all read first: only the readers' marks tell
  __shared__ float s;
  if (threadIdx.x == 0) s = 1;
  __syncthreads();
  out[threadIdx.x] = s;
  if (threadIdx.x == 63) s = 2;
}
__global__ void no_syncwarp(float* out, float*) {
  __shared__ float s[64];
  s[threadIdx.x] = float(threadIdx.x);
  out[threadIdx.x ^ 1] = 63 - s[threadIdx.x ^ 1];
}
__global__ void barrier_in_branch(float*, float*) {
  if (threadIdx.x < 32) __syncthreads();
}
__global__ void early_exit(float*, float*) {
  if (threadIdx.x >= 50) return;
  __syncthreads();
}
__global__ void two_barriers(float*, float*) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
__global__ void uneven_loop(float*, float*) {
  for (unsigned i = 0; i < 1 + threadIdx.x / 32; i++) __syncthreads();
}

__global__ void shuffle_half(float* out, float*) {
  if (threadIdx.x % 32 < 20) out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
}
__global__ void shuffle_in_branches(float* out, float*) {
  if (threadIdx.x % 32 < 16)
    out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
  else
    out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 2);
}
__global__ void shuffle_some(float* out, float*) { out[threadIdx.x] = __shfl_xor_sync(0xFFFFu, 1.0f, 1); }
__global__ void shuffle_against_barrier(float* out, float*) {
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
__global__ void half_of_helper(float* out, float*) {
  if (threadIdx.x < 20) out[0] = sum_of_warp(1);
}
__global__ void mma_in_branch(float*, float*) {
  float d[4] = {};
  const unsigned a[4] = {};
  if (threadIdx.x % 32 < 16) mma_m16n8k16(d, a, 0, 0);
}
template <int OFFSET>
__global__ void ldmatrix_at(float* out, float*) {  // of 32 rows of 8 bf16; OFFSET in bytes
  char* s = dynamic_shared<char>();
  if (threadIdx.x < 32) reinterpret_cast<float4*>(s)[threadIdx.x] = {};
  __syncthreads();
  unsigned r[4];
  ldmatrix_x4(r, s + threadIdx.x % 32 * 16 + OFFSET);
  out[threadIdx.x] = float(r[0]);
}

template <int IN_FLIGHT, bool BARRIER, int OFFSET>
__global__ void copy_async(float* out, float* in) {  // 16 bytes a thread
  float* s = dynamic_shared<float>();
  cp_async_16(s + threadIdx.x * 4, in + threadIdx.x * 4 + OFFSET);
  cp_async_commit();
  cp_async_wait<IN_FLIGHT>();
  if (BARRIER) __syncthreads();
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = s[(63 - threadIdx.x) * 4 + i];
}

__global__ void sum_of_blocks(float*, float* in) {
  if (threadIdx.x == 0) in[0] += 1;
}
__global__ void overlapping_blocks(float* out, float*) { out[blockIdx.x * 60 + threadIdx.x] = 1; }
__global__ void same_cell(float* out, float*) { out[0] = float(threadIdx.x / 32); }

enum Output { NOT_LOOKED_AT, ONES, REVERSED };  // of a kernel without the fault; REVERSED: 63 .. 0
struct KernelFault {
  const char* name;
  void (*kernel)(float* out, float* in);
  unsigned blocks;
  size_t shared_bytes, outputs;
  Output output;
  const char *fast, *race;
};
static const char NOT_WRITTEN[] = "read of shared memory nobody has written",
                  OUTSIDE[] = "outside any allocation";
static const KernelFault KERNEL_FAULTS[] = {
    {"store one past the end", store_beyond, 1, 0, 64, NOT_LOOKED_AT, ANY, "write of 4 bytes outside"},
    {"load one before the beginning", load_before, 1, 0, 64, NOT_LOOKED_AT, ANY, "read of 4 bytes outside"},
    {"unwritten device memory", load_unwritten, 1, 0, 64, ONES, NUMBERS, "device memory nobody has written"},
    {"misaligned vector load", load_misaligned, 1, 0, 64, NOT_LOOKED_AT, ANY, "misaligned access"},
    {"stack overflow", overflow_stack, 1, 0, 64, NOT_LOOKED_AT, BOTH("stack overflow")},

    {"dynamic shared memory, one past the end", overrun_shared, 1, 256, 64, NOT_LOOKED_AT, UNSEEN, OUTSIDE},
    {"unwritten shared memory", unwritten_shared, 1, 0, 64, ONES, NUMBERS, NOT_WRITTEN},
    {"static shared memory of another block", left_over_shared<false>, 2, 0, 128, ONES, NUMBERS, NOT_WRITTEN},
    {"dynamic shared memory of another block", left_over_shared<true>, 2, 256, 128, ONES, NUMBERS, NOT_WRITTEN},

    {"no barrier before a read", no_barrier, 1, 0, 64, REVERSED, NUMBERS, "emu: error"},
    {"no barrier before reuse", no_barrier_before_reuse, 1, 0, 64, REVERSED, NUMBERS, "no __syncthreads lies"},
    {"no barrier before a write", write_after_read, 1, 0, 64, ONES, NUMBERS, "data race on 4 bytes of shared"},
    {"no __syncwarp", no_syncwarp, 1, 0, 64, REVERSED, NUMBERS, "emu: error"},
    {"barrier in a branch", barrier_in_branch, 1, 0, 64, NOT_LOOKED_AT, "threads 0..31 wait in __syncthreads",
     "threads 32..63 have left the kernel"},
    {"exit before a barrier", early_exit, 1, 0, 64, NOT_LOOKED_AT, BOTH("threads that never come")},
    {"two barriers in two branches", two_barriers, 1, 0, 64, NOT_LOOKED_AT, BOTH("different __syncthreads")},
    {"barrier in an uneven loop", uneven_loop, 1, 0, 64, NOT_LOOKED_AT, BOTH("threads that never come")},

    {"shuffle without all its lanes", shuffle_half, 1, 0, 64, NOT_LOOKED_AT, BOTH("wait in __shfl_xor_sync")},
    {"shuffles in two branches", shuffle_in_branches, 1, 0, 64, NOT_LOOKED_AT, BOTH("different operations")},
    {"shuffle of some lanes", shuffle_some, 1, 0, 64, NOT_LOOKED_AT, BOTH("0x0000ffff, expected all lanes")},
    {"shuffle against barrier", shuffle_against_barrier, 1, 0, 64, NOT_LOOKED_AT, BOTH("threads 5..5 wait in")},
    {"warp sum by half a warp", half_of_helper, 1, 0, 64, NOT_LOOKED_AT, BOTH(CALLED_AT)},
    {"mma without all lanes", mma_in_branch, 1, 0, 64, NOT_LOOKED_AT, BOTH("wait in mma")},
    {"ldmatrix of a misaligned row", ldmatrix_at<8>, 1, 1024, 64, NOT_LOOKED_AT, BOTH("not aligned")},
    {"ldmatrix of a row outside", ldmatrix_at<16>, 1, 512, 64, NOT_LOOKED_AT, UNSEEN, OUTSIDE},

    {"cp.async waited for too late", copy_async<1, true, 0>, 1, 1024, 256, ONES, NUMBERS, NOT_WRITTEN},
    {"cp.async without a barrier", copy_async<0, false, 0>, 1, 1024, 256, ONES, NUMBERS, "emu: error"},
    {"cp.async, misaligned", copy_async<0, true, 1>, 1, 1024, 256, NOT_LOOKED_AT, BOTH("not aligned")},
    {"cp.async from beyond the end", copy_async<0, true, 4>, 1, 1024, 256, NOT_LOOKED_AT, ANY, OUTSIDE},

    {"blocks that add without an order", sum_of_blocks, 4, 0, 64, NOT_LOOKED_AT, ANY,
     "nothing orders the blocks"},
    {"blocks that overlap", overlapping_blocks, 4, 0, 244, NOT_LOOKED_AT, ANY, "wrote before"},
    {"warps that write one cell", same_cell, 1, 0, 64, NOT_LOOKED_AT, UNSEEN, "data race"},
};
static void run_kernel_fault(const KernelFault& fault) {
  Device<float> in(256), out(fault.outputs);
  in.up();
  emu::launch_kernel({__FILE__, __LINE__}, fault.name, fault.kernel, fault.blocks, 64, fault.shared_bytes,
                     nullptr, out.d, in.d);
  out.down();
  if (fault.output == ONES) expect(all(out.h, 1));
  if (fault.output == REVERSED)
    for (size_t i = 0; i < 64; i++) expect(out.h[i] == float(63 - i));
}

// ---- calls ---------------------------------------------------------------------------------------------
__global__ void add_one(float* out) { out[threadIdx.x] += 1; }
static void launch_add_one(float* out, dim3 grid = 1, dim3 block = 64, size_t shared = 0, cudaStream_t s = 0) {
  launch(add_one, grid, block, shared, s, out);
  CUDA_CHECK(cudaStreamSynchronize(nullptr));
}
static float* pinned(float value) {
  float* p;
  CUDA_CHECK(cudaMallocHost(&p, 256));
  std::fill_n(p, 64, value);
  return p;
}
static cudaStream_t destroyed_stream() {
  cudaStream_t s;
  CUDA_CHECK(cudaStreamCreate(&s));
  CUDA_CHECK(cudaStreamDestroy(s));
  return s;
}

// One product in cuBLASLt's own words: D (m x n) = 0.5 op(A) op(B) + beta D. The faults change one field each.
struct Product {
  size_t m = 16, n = 8, k = 24, rows_b = 24, lda = 24, ldb = 24, ldd = 16;
  bool ta = true, tb = false;
  cudaDataType type_a = CUDA_R_16BF, type_b = CUDA_R_16BF, type_d = CUDA_R_32F;
  size_t workspace = 65536, short_by = 0, offset_a = 0, algorithm_ldb = 0, attribute_bytes = 4;
  bool on_host = false, unwritten = false;
  void run(const void* a, const void* b, void* d, void* room, float beta = 0) const {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t la, lb, lb_asked, ld;
    cublasLtMatmulPreference_t preference;
    const cublasOperation_t op_a = ta ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    const size_t rows_a = ta ? k : m, columns_a = ta ? m : k, rows = tb ? n : rows_b, columns = tb ? rows_b : n;
    CUBLAS_CHECK(cublasLtCreate(&lt));
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, attribute_bytes));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&la, type_a, rows_a, columns_a, int64_t(lda)));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&lb, type_b, rows, columns, int64_t(ldb)));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&lb_asked, type_b, rows, columns, int64_t(ldb + algorithm_ldb)));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&ld, type_d, m, n, int64_t(ldd)));
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const uint64_t most = 1 << 20;
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &most, sizeof most));
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    CUBLAS_CHECK(
        cublasLtMatmulAlgoGetHeuristic(lt, desc, la, lb_asked, ld, ld, preference, 1, &result, &found));
    const float half = 0.5f;
    CUBLAS_CHECK(cublasLtMatmul(lt, desc, &half, a, la, b, lb, &beta, d, ld, d, ld, &result.algo, room,
                                workspace, nullptr));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    for (cublasLtMatrixLayout_t l : {la, lb, lb_asked, ld}) CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(l));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(desc));
    CUBLAS_CHECK(cublasLtDestroy(lt));
  }
};
static void product_fault(void (*change)(Product&)) {
  Product p;
  change(p);
  Device<float> a(1024), b(1024), d(128 - p.short_by), room(1 << 18);
  if (!p.unwritten) a.up();
  b.up();
  p.run((p.on_host ? a.h.data() : a.d) + p.offset_a, b.d, d.d, room.d);
}

struct CallFault {
  const char* name;
  void (*run)();
  const char *fast, *race;
};
static const char LATE[] = "wrong numbers";  // seen when work runs late, in reverse order
static const CallFault CALL_FAULTS[] = {
    {"use after free",
     [] {
       float* freed;
       CUDA_CHECK(cudaMalloc(&freed, 256));
       CUDA_CHECK(cudaFree(freed));
       launch_add_one(freed);
     },
     ANY, OUTSIDE},
    {"host pointer", [] { launch_add_one(std::vector<float>(64).data()); }, UNSEEN, "bytes of host memory"},
    {"null pointer", [] { launch_add_one(nullptr); }, "bad or misaligned address", "host memory"},
    {"host reads device memory",
     [] {
       Device<float> in(64);
       const volatile float* p = in.up().d;
       expect(p[3] == 1);
     },
     UNSEEN, "the host touches device memory"},
    {"host writes device memory", [] { const_cast<volatile float*>(Device<float>(64).d)[3] = 1; }, UNSEEN,
     "the host touches device memory"},
    // ---- launches -------------------------------------------------------------------------------------
    {"1025 threads", [] { launch_add_one(Device<float>(1).d, 1, 1025); }, BOTH("bad configuration of add_one")},
    {"empty grid", [] { launch_add_one(Device<float>(1).d, 0); }, BOTH("grid (0,1,1)")},
    {"grid too large", [] { launch_add_one(Device<float>(1).d, size_t(1) << 32); }, BOTH("bad configuration")},
    {"grid y too large", [] { launch_add_one(Device<float>(1).d, dim3(1, 65536)); }, BOTH("bad configuration")},
    {"more shared memory than compute 8.6 gives a block",
     [] {
       emu::card = {8, 6, 99 << 10};
       Device<float> a(64);
       launch_add_one(a.up().d, 1, 64, 99 << 10);
       launch_add_one(a.d, 1, 64, (99 << 10) + 1);
     },
     BOTH("shared memory <= 101376 (compute 8.6)")},
    {"launch on a destroyed stream", [] { launch_add_one(Device<float>(64).d, 1, 64, 0, destroyed_stream()); },
     BOTH("was not made by")},
    // ---- the runtime API ------------------------------------------------------------------------------
    {"copy too long",
     [] {
       std::vector<float> h(65);
       CUDA_CHECK(cudaMemcpyAsync(Device<float>(64).d, h.data(), 260, cudaMemcpyHostToDevice, nullptr));
     },
     "emu: in cudaMemcpyAsync, called at", "run past the end of 256 bytes"},
    {"copy in the wrong direction",
     [] {
       Device<float> a(64);
       CUDA_CHECK(cudaMemcpyAsync(a.h.data(), a.d, 256, cudaMemcpyHostToDevice, nullptr));
     },
     BOTH("is not device memory")},
    {"memset too long", [] { CUDA_CHECK(cudaMemset(Device<float>(64).d + 1, 0, 256)); },
     BOTH("offset 4 run past")},
    {"free twice",
     [] {
       Device<float> a(64);
       CUDA_CHECK(cudaFree(a.d));
     },
     "emu: in cudaFree", "was freed before"},
    {"leak of device memory",
     [] {
       float* p;
       CUDA_CHECK(cudaMalloc(&p, 1000));
     },
     BOTH("device memory of 1000 bytes, made at")},
    {"leak of a cuBLASLt handle",
     [] {
       cublasLtHandle_t lt;
       CUBLAS_CHECK(cublasLtCreate(&lt));
     },
     BOTH("cuBLASLt object of 0 bytes, made at")},
    {"wait for a destroyed stream", [] { CUDA_CHECK(cudaStreamSynchronize(destroyed_stream())); },
     "emu: in cudaStreamSynchronize", "was not made by cudaStreamCreate"},
    {"time of an event nobody waited for",
     [] {
       emu::order = Order::reverse;
       cudaEvent_t e;
       float ms;
       CUDA_CHECK(cudaEventCreate(&e));
       CUDA_CHECK(cudaEventRecord(e, nullptr));
       CUDA_CHECK(cudaEventElapsedTime(&ms, e, e));
     },
     BOTH("an event has not happened yet")},
    {"read before the copy has finished",
     [] {
       float* p = pinned(0);
       Device<float> a(64);
       CUDA_CHECK(cudaMemcpyAsync(p, a.up().d, 256, cudaMemcpyDeviceToHost, nullptr));
       expect(p[5] == 1);
       CUDA_CHECK(cudaFreeHost(p));
     },
     LATE, LATE},
    {"source changed before the copy has finished",
     [] {
       float* p = pinned(1);
       Device<float> a(64);
       CUDA_CHECK(cudaMemcpyAsync(a.d, p, 256, cudaMemcpyHostToDevice, nullptr));
       std::fill_n(p, 64, 2.0f);
       expect(all(a.down(), 1));
       CUDA_CHECK(cudaFreeHost(p));
     },
     LATE, LATE},
    // ---- cuBLASLt -------------------------------------------------------------------------------------
    {"product: inner sizes differ", [] { product_fault([](Product& p) { p.rows_b = 23; }); },
     BOTH("sizes do not fit")},
    {"product: leading dimension too small", [] { product_fault([](Product& p) { p.ldb = 23; }); },
     BOTH("leading dimension")},
    {"product: operand types differ", [] { product_fault([](Product& p) { p.type_a = CUDA_R_32F; }); },
     BOTH("unsupported types")},
    {"product: float into bf16",
     [] {
       product_fault([](Product& p) {
         p.type_a = p.type_b = CUDA_R_32F;
         p.type_d = CUDA_R_16BF;
       });
     },
     BOTH("unsupported types")},
    {"product: output buffer too small", [] { product_fault([](Product& p) { p.short_by = 1; }); },
     "D: 512 bytes", "run past the end of 508"},
    {"product: host operand", [] { product_fault([](Product& p) { p.on_host = true; }); },
     BOTH("is not device memory")},
    {"product: unwritten operand", [] { product_fault([](Product& p) { p.unwritten = true; }); }, UNSEEN,
     "nobody has written"},
    {"product: algorithm of another product", [] { product_fault([](Product& p) { p.algorithm_ldb = 8; }); },
     BOTH("for another product")},
    {"product: workspace too small", [] { product_fault([](Product& p) { p.workspace = 100; }); },
     BOTH("the workspace has 100 bytes")},
    {"product: operand not aligned as promised", [] { product_fault([](Product& p) { p.offset_a = 4; }); },
     BOTH("A is not aligned to the 256")},
    {"product: attribute of the wrong size", [] { product_fault([](Product& p) { p.attribute_bytes = 1; }); },
     BOTH("has 1 bytes, expected 4")},
};

// `run` in three processes, one for each order of threads.
static void test_fault(const char* name, const std::function<void()>& run, const char* fast, const char* race) {
  const char* expected = emu::COUNTS_TRAFFIC ? race : fast;
  TEST("fault: " + std::string(name) + (expected == UNSEEN ? " (unseen by this build)" : ""));
  size_t wrong = 0;
  for (Order order : {Order::forward, Order::reverse, Order::random}) {
    const Outcome outcome = in_child([&] {
      emu::order = order;
      run();
      exit(0);  // leaks are found on the way out
    });
    const int status = outcome.status;
    const std::string& text = outcome.err;
    wrong += status == WRONG;
    if (expected == ANY || expected == LATE || expected == NUMBERS) {
      CHECK(expected == ANY || status == 0 || status == WRONG);
    } else if (expected == UNSEEN) {
      CHECK_EQ(status, 0);
    } else {
      CHECK_EQ(status, 86);
      if (!CHECK(text.find(expected) != std::string::npos))
        printf("  expected '%s':\n%s\n", expected, text.c_str());
      // A message names kernel, block and thread, or the line of the call.
      const bool in_kernel = text.find("emu: in kernel ") != std::string::npos;
      CHECK(text.find(in_kernel ? ", thread (" : "test_emulator.cu:") != std::string::npos);
    }
  }
  if (expected == NUMBERS || expected == LATE) CHECK(wrong > 0);
}

// ======================================================================================================
// Correct code: the same numbers in every order.
// ======================================================================================================
template <class F>
static void in_every_order(F&& f) {
  for (Order order : {Order::forward, Order::reverse, Order::random, Order::random, Order::random}) {
    emu::order = order;
    f();
  }
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
__global__ void shuffle_all(int* out) {
  const int t = int(threadIdx.x);
  out[t * 2] = __shfl_sync(~0u, t, 3);
  out[t * 2 + 1] = __shfl_xor_sync(~0u, t, 5);
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
// d (16 x 8) = a (16 x K) b (N x K)^T with K in steps of 16: cp.async in two buffers, ldmatrix, mma. One warp.
// The rows of b from N <= 8 on are zeros.
__global__ void tensor_product(float* d, const bf16* a, const bf16* b, int N, int K) {
  bf16* s = dynamic_shared<bf16>();  // two times (16 + 8) rows of 24, 16 used
  constexpr int LD = 24, BUFFER = 24 * LD;
  const int lane = int(threadIdx.x);
  const auto fetch = [&](int k) {
    bf16* to = s + k / 16 % 2 * BUFFER;
    for (int i = lane; i < 48; i += 32) {
      const int row = i / 2, c = i % 2 * 8;
      cp_async_16(to + row * LD + c, (row < 16 ? a + row * K : b + (row - 16) * K) + k + c, row < 16 + N);
    }
  };
  float sum[4] = {};
  fetch(0);
  cp_async_commit();
  for (int k = 0; k < K; k += 16) {
    if (k + 16 < K) fetch(k + 16);
    cp_async_commit();
    cp_async_wait<1>();
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
// +-(1 + 7/8 ulp): a tensor core drops what does not fit. 2^127 + 2^127 - 2^127: infinite from the first sum
// on.
__global__ void sums_at_the_limits(float* d) {
  const unsigned one[4] = {0x3F80, 0, 0, 0}, large[4] = {0x7F007F00, 0, 0x7F00, 0}, column = threadIdx.x % 4;
  float up[4] = {1}, down[4] = {-1}, beyond[4] = {};
  mma_m16n8k16(up, one, column ? 0 : 0x33E0, 0);
  mma_m16n8k16(down, one, column ? 0 : 0xB3E0, 0);
  mma_m16n8k16(beyond, large, 0x3F803F80, 0xBF80);
  if (threadIdx.x > 0) return;
  d[0] = up[0];
  d[1] = down[0];
  d[2] = beyond[0];
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
    for (size_t i = 0; i < 480; i++) CHECK_EQ(out.h[i], in.h[i / 96 * 96 + 95 - i % 96] + 2 + in.h[i] + 1);
  });
  TEST("shuffles");
  in_every_order([] {
    Device<int> out(128, 0);
    launch(shuffle_all, 1, 64, 0, 0, out.d);
    out.down();
    for (int t = 0; t < 64; t++) {
      CHECK_EQ(out.h[size_t(t * 2)], t / 32 * 32 + 3);
      CHECK_EQ(out.h[size_t(t * 2 + 1)], t ^ 5);
    }
  });
  TEST("__syncwarp orders the lanes of a warp");
  in_every_order([] {
    Device<float> out(128);
    launch(exchange_by_warp, 1, 128, 512, 0, out.d);
    out.down();
    for (size_t i = 0; i < 128; i++) CHECK_EQ(out.h[i], float((i ^ 7) + 2));
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
    for (size_t y = 0; y < 16; y++)
      for (size_t x = 0; x < 8; x++) {
        double sum = 0;
        for (size_t k = 0; k < size_t(K) && x < size_t(N); k++)
          sum += double(float(a.h[y * K + k])) * double(float(b.h[x * K + k]));
        CHECK_CLOSE(d.h[y * 8 + x], sum, K * 0x1p-23 * K);  // K products below 1, each sum truncated
      }
  });
  TEST("mma truncates its sums; one beyond the largest float is infinite");
  in_every_order([] {
    Device<float> out(3);
    launch(sums_at_the_limits, 1, 32, 0, 0, out.d);
    CHECK(out.down() == (std::vector<float>{1, -1, INFINITY}));
  });
  TEST("ldmatrix transposed");
  in_every_order([] {
    Device<uint16_t> in(256, 0), out(256, 0);
    for (size_t i = 0; i < 256; i++) in.h[i] = uint16_t(i * 251);
    launch(transpose_by_ldmatrix, 1, 32, 0, 0, out.d, in.up().d);
    out.down();
    for (size_t i = 0; i < 256; i++) CHECK_EQ(out.h[i], in.h[i / 64 * 64 + i % 8 * 8 + i / 8 % 8]);
  });
  TEST("bf16 rounds to nearest, ties to even");
  for (float f : {1.0f, 1.00390625f, 1.01171875f, -3.0e-39f, 3.3e38f, 65504.0f, 1e-8f}) {
    float best = 0, best_distance = INFINITY;  // the nearest of all 65,536
    for (unsigned u = 0; u < 65536; u++) {
      const float c = __uint_as_float(u << 16), distance = fabsf(c - f);
      if (!(distance < best_distance || (distance == best_distance && u % 2 == 0))) continue;
      best = c;
      best_distance = distance;
    }
    CHECK_EQ(float(bf16(f)), best);
  }
  CHECK(std::isnan(float(bf16(NAN))) && std::isinf(float(bf16(3.4e38f))));
}

static void test_runtime() {
  TEST("the device says what it is");
  cudaDeviceProp p;
  CHECK_EQ(cudaGetDeviceProperties(&p, 0), cudaSuccess);
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
  CHECK_EQ(cudaGetErrorString(cudaGetLastError()), std::string("out of memory"));
  CHECK_EQ(cudaFree(a), cudaSuccess);
  CHECK_EQ(cudaMalloc(&b, 100000), cudaSuccess);
  CHECK_EQ(cudaFree(b), cudaSuccess);
  emu::device_bytes = before;

  TEST("the stream and events, used as they should be");
  in_every_order([] {
    cudaStream_t s;
    cudaEvent_t begin, end;
    float *result = pinned(0), ms = -1;
    CUDA_CHECK(cudaStreamCreate(&s));
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    Device<float> a(64, 5.0f);
    a.up();
    CUDA_CHECK(cudaEventRecord(begin, s));
    launch(add_one, 1, 64, 0, s, a.d);
    CUDA_CHECK(cudaMemcpyAsync(result, a.d, 256, cudaMemcpyDeviceToHost, s));
    CUDA_CHECK(cudaEventRecord(end, s));
    CUDA_CHECK(cudaEventSynchronize(end));
    CHECK_EQ(result[63], 6.0f);
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    CHECK(ms >= 0 && ms < 10000);
    CUDA_CHECK(cudaFreeHost(result));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaStreamDestroy(s));
  });
}

// Every transposition, type and odd size against plain double sums.
template <class T, class O>
static double product_error(bool ta, bool tb, size_t m, size_t n, size_t k, float beta) {
  const auto type = [](auto v) { return sizeof v == 4 ? CUDA_R_32F : CUDA_R_16BF; };
  const size_t lda = (ta ? k : m) + 3, ldb = (tb ? n : k) + 1, ldd = m + 2;
  Device<T> a(lda * (ta ? m : k)), b(ldb * (tb ? k : n));
  Device<O> d(ldd * n);
  Device<char> room(65536);
  for (size_t i = 0; i < a.h.size(); i++) a.h[i] = T(value(i));
  for (size_t i = 0; i < b.h.size(); i++) b.h[i] = T(value(i + 999));
  for (size_t i = 0; i < d.h.size(); i++) d.h[i] = O(value(i + 55));
  const std::vector<O> before = d.h;
  d.up();
  Product{m, n, k, k, lda, ldb, ldd, ta, tb, type(T()), type(T()), type(O())}.run(a.up().d, b.up().d, d.d,
                                                                                  room.d, beta);
  d.down();
  double worst = 0;
  for (size_t j = 0; j < n; j++)
    for (size_t i = 0; i < ldd; i++) {
      const double old = double(float(before[j * ldd + i])), got = double(float(d.h[j * ldd + i]));
      double sum = 0;
      for (size_t l = 0; l < k && i < m; l++)
        sum += double(float(a.h[ta ? i * lda + l : l * lda + i])) *
               double(float(b.h[tb ? l * ldb + j : j * ldb + l]));
      const double want =
          i < m ? 0.5 * sum + (beta == 0 ? 0 : double(beta) * old) : old;  // between rows: untouched
      worst = fmax(worst, fabs(got - want) / (sizeof(O) == 2 ? fabs(want) + 1e-2 : 1));
    }
  return worst;
}
static void test_products() {
  TEST("cuBLASLt products against double sums: float error below k eps, bf16 one rounding");
  struct Size {
    size_t m, n, k;
  };
  in_every_order([] {
    for (bool ta : {false, true})
      for (bool tb : {false, true})
        for (const Size& s : {Size{1, 1, 1}, Size{17, 7, 5}, Size{16, 6, 64}, Size{33, 41, 130}})
          for (float beta : {0.0f, 1.0f}) {
            const double sums = double(s.k + 2) * 0x1p-24;
            CHECK_CLOSE((product_error<float, float>(ta, tb, s.m, s.n, s.k, beta)), 0, sums);
            CHECK_CLOSE((product_error<bf16, float>(ta, tb, s.m, s.n, s.k, beta)), 0, 2 * sums);
            CHECK_CLOSE((product_error<bf16, bf16>(ta, tb, s.m, s.n, s.k, beta)), 0, 1.02 * 0x1p-8);
          }
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
  struct Row {
    const char* kernel;
    size_t launches, requests, sectors, distinct;
  };
  in_every_order([] {
    Device<float> in(4096), out(4096);
    float4 *out4 = reinterpret_cast<float4*>(out.d), *in4 = reinterpret_cast<float4*>(in.d);
    in.up();
    emu::count_traffic(true);
    launch(copy_vectors, 8, 128, 0, 0, out4, in4);
    launch(read_strided<1>, 1, 64, 0, 0, out.d, in.d);
    launch(read_strided<8>, 1, 64, 0, 0, out.d, in.d);
    launch(read_broadcast, 1, 64, 0, 0, out.d, in.d);
    launch(scale_vectors, 1, 64, 0, 0, out4, in4);
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
    emu::count_traffic(false);
    for (const Row& row :
         {Row{"copy_vectors", 1, 64, 1024, 1024},  // 32 warps, a load and a store each, of 16 sectors
          Row{"read_strided", 2, 8, 8 + 64 + 16, 8 + 64 + 16},  // one sector for each of 64 in the second
          Row{"read_broadcast", 1, 4, 2 + 8, 1 + 8},  // two warps load one sector; neighbouring loads are one
          Row{"scale_vectors", 1, 4, 64, 64}, Row{"no_such_kernel", 0, 0, 0, 0},
          Row{"", 5, 64 + 8 + 4 + 4, 1024 + 88 + 10 + 64, 1024 + 88 + 9 + 64}}) {
      const emu::Traffic t = emu::traffic(row.kernel);
      CHECK_EQ(t.launches, row.launches);
      CHECK_EQ(t.requests, row.requests);
      CHECK_EQ(t.sectors, row.sectors);
      CHECK_EQ(t.distinct, row.distinct);
    }
  });
}

int main() {
  // First what forks, while there is one thread.
  for (const KernelFault& f : KERNEL_FAULTS)
    test_fault(
        f.name, [&] { run_kernel_fault(f); }, f.fast, f.race);
  for (const CallFault& f : CALL_FAULTS) test_fault(f.name, f.run, f.fast, f.race);
  test_kernels();
  test_runtime();
  test_products();
  test_traffic();
  return finish();
}
