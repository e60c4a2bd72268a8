// cuda.h - what every kernel and every launcher uses: checked calls, launches, single instructions, the one
// GPU, its memory, --profile, cuBLASLt's matrix product, loads and stores of 16 bytes, sums over a warp.
// Nothing of the model is here.
#pragma once
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>
#ifdef WITH_MPI
#if !__has_include(<nccl.h>)
#error "MPI=1 needs NCCL for the GPU, and nccl.h is missing: install NCCL (libnccl-dev), or build without MPI=1"
#endif
#include <nccl.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "dev/common/errors.h"  // fatal, format, checked_mul, human_bytes
#include "dev/common/random.h"  // normal
#include "dev/common/ranks.h"   // ranks, gather, agree

// ---- checked calls -------------------------------------------------------------------------------------

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
inline void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  const char* advice = error == cudaErrorECCUncorrectable || error == cudaErrorUnknown
                           ? "; the card failed, the last checkpoint is whole: continue with --resume"
                           : "";
  fatal(EXIT_ERROR, "%s:%d: %s: %s%s", file, line, call, cudaGetErrorString(error), advice);
}

#define CUBLAS_CHECK(call) cublas_check((call), #call, __FILE__, __LINE__)
inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fatal(EXIT_ERROR, "%s:%d: %s: cuBLAS status %d", file, line, call, int(status));
}

// ---- launches and single instructions ------------------------------------------------------------------
// Where the CPU emulator compiles this, its emulated_device.h supplies the functions of this section.
#ifdef __CUDACC__
constexpr bool EMULATED = false;

// launch(kernel, grid, block, shared_bytes, stream, arguments...): <<<>>> with the error checked.
template <class... P, class... A>
void launch_at(const char* file, int line, const char* text, void (*kernel)(P...), dim3 grid, dim3 block,
               size_t smem, cudaStream_t stream, A... arguments) {
  cudaError_t error = cudaSuccess;
  // A block has to ask for more than 48 KiB, and what the kernel declares itself counts too.
  if (smem > 32 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem));
  if (error == cudaSuccess) {
    kernel<<<grid, block, smem, stream>>>(arguments...);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess)
    fatal(EXIT_ERROR, "%s:%d: launch(%s) with grid (%u,%u,%u), block %u, %zu bytes of shared memory: %s", file,
          line, text, grid.x, grid.y, grid.z, block.x * block.y * block.z, smem, cudaGetErrorString(error));
}
#define launch(...) launch_at(__FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__)

// What this program holds for this card: "code for 9.0", by the PTX it came from; "" if there is none.
static __global__ void empty_kernel() {}
inline std::string code_found() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, empty_kernel) != cudaSuccess) return "";
  return format("code for %d.%d", attributes.ptxVersion / 10, attributes.ptxVersion % 10);
}

template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of bf16: lane l names row l % 8 of matrix l / 8; register i of lane l gets row l / 4,
// columns 2 (l % 4) and + 1 of matrix i (of its transpose: _trans).
__device__ inline void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d[16][8] += a[16][16] b[16][8] on the tensor cores, bf16 in, float32 out
__device__ inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x in one instruction, tiny results flushed to zero: exp2f spends three more to keep those
__device__ inline float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes from global to shared memory, or 16 zeros unless `live`, in the background; wait<N> leaves at most N
// groups in flight
__device__ inline void cp_async_16(void* to, const void* from, bool live = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(live ? 16 : 0)
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#else
#include <emulated_device.h>
#endif

namespace gpu {

using bf16 = __nv_bfloat16;

// ---- the GPU -------------------------------------------------------------------------------------------
inline unsigned ceil_div(size_t a, size_t b) { return unsigned((a + b - 1) / b); }

// Everything that cuBLASLt's choice of an algorithm may depend on, and what it chose: see matmul.
struct ProductShape {
  size_t M, N, K, out_row, a_row, b_row;
  bool a_transposed, b_transposed;
  cudaDataType out_type, in_type;
  unsigned alignment;  // in bytes, of all pointers
  auto all() const {
    return std::tie(M, N, K, out_row, a_row, b_row, a_transposed, b_transposed, out_type, in_type, alignment);
  }
  bool operator<(const ProductShape& other) const { return all() < other.all(); }
};
struct Product {
  cublasLtMatmulDesc_t description;
  cublasLtMatrixLayout_t a, b, out;
  cublasLtMatmulAlgo_t algorithm;
};

// Everything runs in order on one stream.
struct Gpu {
  cudaStream_t stream = nullptr;
  cublasLtHandle_t cublas = nullptr;
  void* workspace = nullptr;  // of cuBLASLt: fixed, so that the choice of algorithms repeats
  std::map<ProductShape, Product> products;
  cudaDeviceProp properties = {};
  std::string code;  // which of the program's versions runs on this card
};
inline Gpu device;
constexpr size_t CUBLAS_WORKSPACE = size_t(32) << 20;

// ---- memory --------------------------------------------------------------------------------------------
// Device memory; null if no bytes are wanted. `hint` says what to lower when there is not enough.
inline void* device_alloc(size_t bytes, const char* what, const char* hint) {
  void* memory = nullptr;
  if (bytes == 0) return memory;

  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    fatal(EXIT_ERROR, "out of GPU memory: %s needs %s, %s of %s are free; %s", what, human_bytes(bytes).c_str(),
          human_bytes(free).c_str(), human_bytes(total).c_str(), hint);
  }
#ifdef FILL_NAN
  CUDA_CHECK(cudaMemset(memory, 0xFF, bytes));  // a value used before it is written shows itself
#endif
  return memory;
}

template <class T>
T* device_array(size_t n, const char* what, const char* hint = "lower the sizes of the model") {
  return static_cast<T*>(device_alloc(checked_mul(n, sizeof(T), what), what, hint));
}
// Returns when the host memory may be used again.
template <class T>
void upload(T* to, const T* from, size_t n) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, n * sizeof(T), cudaMemcpyHostToDevice, device.stream));
  CUDA_CHECK(cudaStreamSynchronize(device.stream));
}

template <class T>
void download(T* to, const T* from, size_t n) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, n * sizeof(T), cudaMemcpyDeviceToHost, device.stream));
  CUDA_CHECK(cudaStreamSynchronize(device.stream));
}
// Returns at once. The host memory is pinned and left alone until the stream has come this far.
template <class T>
void copy_later(T* to, const T* from, size_t n, cudaMemcpyKind direction) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, n * sizeof(T), direction, device.stream));
}

template <class T>
void zero(T* p, size_t n) {
  CUDA_CHECK(cudaMemsetAsync(p, 0, n * sizeof(T), device.stream));
}

// ---- many cards ----------------------------------------------------------------------------------------
// The GPU's part of ranks.h, on the stream and in float32. NCCL adds in an order that depends on the number of
// cards and how they are connected, not on timing.
#ifdef WITH_MPI
#define NCCL_CHECK(call) nccl_check((call), #call, __FILE__, __LINE__)
inline void nccl_check(ncclResult_t result, const char* call, const char* file, int line) {
  if (result != ncclSuccess) fatal(EXIT_ERROR, "%s:%d: %s: %s", file, line, call, ncclGetErrorString(result));
}
inline ncclComm_t cards = nullptr;

// Joins the ranks' cards, of which this one has the number `card` on its machine.
inline void cards_open(int card) {
  if (ranks.size == 1) return;
  agree();
  struct Place {
    char machine[256], slot[32];
  };
  Place mine = {};
  gethostname(mine.machine, sizeof(mine.machine) - 1);
  CUDA_CHECK(cudaDeviceGetPCIBusId(mine.slot, sizeof(mine.slot), card));
  const std::vector<Place> all = gather(std::vector<Place>{mine});
  for (size_t r = 0; r < ranks.rank; r++)
    if (!memcmp(&all[r], &mine, sizeof(mine)))
      fatal(EXIT_ERROR, "ranks %zu and %zu would share the GPU %s of %s; expected as many GPUs there as ranks",
            r, ranks.rank, mine.slot, mine.machine);
  agree();

  ncclUniqueId id = {};
  if (ranks.rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
  const std::string bytes = broadcast(std::string(id.internal, sizeof(id.internal)));
  memcpy(id.internal, bytes.data(), bytes.size());
  NCCL_CHECK(ncclCommInitRank(&cards, int(ranks.size), id, int(ranks.rank)));
}
inline void cards_close() {
  if (cards) NCCL_CHECK(ncclCommDestroy(cards));
  cards = nullptr;
}
inline void sum_shares_on_cards(float* g, size_t share) {
  if (ranks.size == 1) return;
  float* own = g + ranks.rank * share;
  NCCL_CHECK(ncclReduceScatter(g, own, share, ncclFloat, ncclSum, cards, device.stream));
}
inline void gather_shares_on_cards(float* p, size_t share) {
  if (ranks.size == 1) return;
  NCCL_CHECK(ncclAllGather(p + ranks.rank * share, p, share, ncclFloat, cards, device.stream));
}
#else
inline void cards_open(int) {}
inline void cards_close() {}
inline void sum_shares_on_cards(float*, size_t) {}
inline void gather_shares_on_cards(float*, size_t) {}
#endif

// ---- opening and closing -------------------------------------------------------------------------------
// What a block of the most demanding kernel may need: every card from compute capability 8.0 on has it.
constexpr size_t SHARED_MEMORY = 101376;  // 99 KiB

inline void device_open() {
  if (device.stream) return;

  // One card a rank, in the order that all ranks of a machine see; or the one that a batch system lets it see.
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  const int number = count > 0 ? int(ranks.local) % count : 0;
  if (error == cudaSuccess) error = cudaSetDevice(number);
  if (error == cudaSuccess) error = cudaStreamCreate(&device.stream);  // fails if another program has the card
  if (error != cudaSuccess) {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    fatal(EXIT_ERROR, "no GPU: %s%s%s; train_rdattnres_cpu does without one", cudaGetErrorString(error),
          visible ? ", CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "");
  }

  cudaDeviceProp& card = device.properties;
  CUDA_CHECK(cudaGetDeviceProperties(&card, number));
  if (card.major < 8 || card.sharedMemPerBlockOptin < SHARED_MEMORY)
    fatal(EXIT_ERROR,
          "GPU %s: compute capability %d.%d with %zu bytes of shared memory a block; needed are 8.0 and %zu",
          card.name, card.major, card.minor, card.sharedMemPerBlockOptin, SHARED_MEMORY);
  device.code = code_found();
  if (device.code.empty())
    fatal(EXIT_ERROR, "GPU %s: this program has no code for it; build with make train_rdattnres GPU_ARCH=%d%d",
          card.name, card.major, card.minor);

  CUBLAS_CHECK(cublasLtCreate(&device.cublas));
  device.workspace =
      device_alloc(CUBLAS_WORKSPACE, "cuBLASLt workspace", "another program may hold this GPU's memory");
  cards_open(number);
}

inline void device_close() {
  cards_close();
  for (auto& [shape, product] : device.products) {
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(product.description));
    for (cublasLtMatrixLayout_t layout : {product.a, product.b, product.out})
      CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(layout));
  }
  CUDA_CHECK(cudaFree(device.workspace));
  CUBLAS_CHECK(cublasLtDestroy(device.cublas));
  CUDA_CHECK(cudaStreamDestroy(device.stream));
  device = Gpu();
}

// ---- --profile -----------------------------------------------------------------------------------------
// One function, or one shape of a product, summed over all calls. ms: of its own kernels, not of functions it
// calls. bytes and flops: what it must move and compute by its formula; 0 where it states none.
struct ProfileRow {
  std::string name;
  size_t calls = 0;
  double ms = 0, bytes = 0, flops = 0;
};

// Per step, the most expensive first. Without times (timed = false: the emulator's mean nothing) in the order
// given, and columns that need a time stay empty.
inline std::string profile_table(std::vector<ProfileRow> rows, size_t steps, bool timed) {
  double total = 0;
  for (const ProfileRow& row : rows) total += row.ms;
  std::string text = format("profile of %zu step%s, ", steps, steps == 1 ? "" : "s");
  if (timed)
    text += format("%.3f ms each, the events' own time included\n", total / double(steps));
  else
    text += "emulated: no times\n";
  text += "  calls  ms/step  share   MB/step    GB/s  GFLOP/step  TFLOP/s\n";
  const auto dearer = [](const ProfileRow& a, const ProfileRow& b) { return a.ms > b.ms; };
  if (timed) std::stable_sort(rows.begin(), rows.end(), dearer);
  const auto cell = [](int width, int digits, double value, bool known) {
    return known ? format("%*.*f", width, digits, value) : std::string(size_t(width) - 1, ' ') + "-";
  };
  for (const ProfileRow& row : rows) {
    const double n = double(steps), seconds = row.ms * 1e-3;
    const bool moves = row.bytes > 0, computes = row.flops > 0, rate = timed && row.ms > 0;
    text += cell(7, 0, double(row.calls) / n, true) + cell(9, 3, row.ms / n, timed);
    text += cell(6, 1, 100 * row.ms / total, timed && total > 0) + (timed ? "%" : " ");
    text += cell(10, 2, row.bytes / n / 1e6, moves) + cell(8, 0, row.bytes / seconds / 1e9, moves && rate);
    text += cell(12, 2, row.flops / n / 1e9, computes);
    text += cell(9, 1, row.flops / seconds / 1e12, computes && rate) + "  " + row.name + "\n";
  }
  return text;
}

// What a function must move, each large array once, and compute. 0: not stated.
struct Work {
  double bytes, flops;
  size_t M = 0, N = 0, K = 0;  // of a product
  explicit Work(double bytes = 0, double flops = 0) : bytes(bytes), flops(flops) {}
  Work(size_t M, size_t N, size_t K)
      : bytes(0), flops(2 * double(M) * double(N) * double(K)), M(M), N(N), K(K) {}
};

// --profile: an event at both ends of every range below, read when the step is over.
struct Profile {
  struct Span {
    std::string name;
    Work work;
    size_t outer;
    cudaEvent_t begin, end;
  };
  bool on = false;
  size_t open = SIZE_MAX;           // the innermost range under way
  std::vector<Span> spans;          // of this step
  std::vector<cudaEvent_t> events;  // made earlier, free to use
  std::vector<ProfileRow> rows;

  cudaEvent_t event() {
    cudaEvent_t e;
    if (events.empty()) {
      CUDA_CHECK(cudaEventCreate(&e));
    } else {
      e = events.back();
      events.pop_back();
    }
    return e;
  }
  void begin(const char* name, const Work& work) {
    const std::string shape = work.M ? format(" %zu x %zu x %zu", work.M, work.N, work.K) : "";
    spans.push_back({name + shape, work, open, event(), event()});
    open = spans.size() - 1;
    CUDA_CHECK(cudaEventRecord(spans[open].begin, device.stream));
  }
  void end() {
    CUDA_CHECK(cudaEventRecord(spans[open].end, device.stream));
    open = spans[open].outer;
  }
  ProfileRow& row(const std::string& name) {
    for (ProfileRow& r : rows)
      if (r.name == name) return r;
    return rows.emplace_back(ProfileRow{name});
  }
  void end_step() {
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    for (const Span& span : spans) {
      float ms = 0;
      CUDA_CHECK(cudaEventElapsedTime(&ms, span.begin, span.end));
      if (span.outer != SIZE_MAX) row(spans[span.outer].name).ms -= double(ms);  // counts where it was spent
      ProfileRow& r = row(span.name);
      r.calls++;
      r.ms += double(ms);
      r.bytes += span.work.bytes;
      r.flops += span.work.flops;
      events.push_back(span.begin);
      events.push_back(span.end);
    }
    spans.clear();
  }
  // The table of what was gathered; nothing is left behind.
  std::string finish(size_t steps) {
    const std::string table = profile_table(rows, steps, !EMULATED);
    for (cudaEvent_t e : events) CUDA_CHECK(cudaEventDestroy(e));
    *this = Profile();
    return table;
  }
};
inline Profile profile;

// Names a stretch of the time line, for Nsight Systems and for --profile.
struct Range {
  explicit Range(const char* name, const Work& work) {
    nvtxRangePushA(name);
    if (profile.on) profile.begin(name, work);
  }
  ~Range() {
    if (profile.on) profile.end();
    nvtxRangePop();
  }
};
// NVTX_RANGE(bytes, flops), NVTX_RANGE(M, N, K) of a product, or NVTX_RANGE()
#define NVTX_RANGE(...) Range nvtx_range(__func__, Work(__VA_ARGS__))

// ---- matrix products -----------------------------------------------------------------------------------
// A matrix to read: element (i, j) is data[i * row + j], or data[j * row + i] if it is transposed; and to
// write.
template <class T>
struct View {
  const T* data;
  size_t row;
  bool transposed = false;
};
template <class T>
View<T> transposed(const T* data, size_t row) {
  return {data, row, true};
}
template <class T>
struct Rows {
  T* data;
  size_t row;
};

template <class T>
cudaDataType data_type() {
  return std::is_same<T, float>::value ? CUDA_R_32F : CUDA_R_16BF;
}
inline unsigned alignment_of(const void* p) {  // the largest power of two up to 256 that divides the address
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) | 256;
  return unsigned(address & (~address + 1));
}

// cuBLASLt is asked once per shape which algorithm it would take; the answer is kept. Not the fastest of
// several by the clock: two runs could then choose differently, and round differently. Its first suggestion
// depends on the library, the card, the shape and the workspace's size alone, and the library promises the same
// bits from run to run while one stream is active.
inline Product make_product(const ProductShape& p) {
  // cuBLAS counts in columns: our row-major out = A B is its out^T = B^T A^T. B goes first, nothing moves.
  Product product;
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&product.description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const auto transpose = [&](cublasLtMatmulDescAttributes_t which, bool transposed) {
    const cublasOperation_t operation = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(product.description, which, &operation, sizeof operation));
  };
  transpose(CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed);
  transpose(CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed);
  const auto layout = [](cublasLtMatrixLayout_t& to, cudaDataType type, bool transposed, size_t rows,
                         size_t columns, size_t row) {
    if (transposed) std::swap(rows, columns);
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&to, type, columns, rows, int64_t(row)));
  };
  layout(product.a, p.in_type, p.a_transposed, p.M, p.K, p.a_row);
  layout(product.b, p.in_type, p.b_transposed, p.K, p.N, p.b_row);
  layout(product.out, p.out_type, false, p.M, p.N, p.out_row);

  cublasLtMatmulPreference_t preference;
  CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLAS_WORKSPACE);
  for (auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    prefer(attribute, uint32_t(p.alignment));
  // A split sum may meet in the workspace, in order and in float32; not in the output, where blocks come as
  // they please, and not in the output's type, which rounds.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));

  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(device.cublas, product.description, product.b, product.a, product.out,
                                     product.out, preference, 1, &result, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0)
    fatal(EXIT_ERROR, "cuBLASLt has no algorithm for a product of M %zu, N %zu, K %zu (status %d)", p.M, p.N,
          p.K, int(status));
  product.algorithm = result.algo;
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  return product;
}

// out (M,N) = a (M,K) b (K,N) + addend, row-major. addend: null, or (M,N) with rows as far apart as out's; it
// may be `out` itself. Sums are float32.
template <class Out, class In>
void matmul(Rows<Out> out, View<In> a, View<In> b, size_t M, size_t N, size_t K, const Out* addend = nullptr) {
  const unsigned alignment =
      std::min({alignment_of(out.data), alignment_of(a.data), alignment_of(b.data), alignment_of(addend)});
  const ProductShape shape = {
      M, N, K, out.row, a.row, b.row, a.transposed, b.transposed, data_type<Out>(), data_type<In>(), alignment};
  auto found = device.products.find(shape);
  if (found == device.products.end()) found = device.products.emplace(shape, make_product(shape)).first;
  const Product& product = found->second;
  const float one = 1, beta = addend ? 1 : 0;
  CUBLAS_CHECK(cublasLtMatmul(device.cublas, product.description, &one, b.data, product.b, a.data, product.a,
                              &beta, addend ? addend : out.data, product.out, out.data, product.out,
                              &product.algorithm, device.workspace, CUBLAS_WORKSPACE, device.stream));
}

// What this card reaches, to set a share of its maker's peak beside: operations a second of one large product
// (n,n) (n,n) in bf16, the median of five. Random numbers: a card may run faster over zeros.
inline double measure_matrix_rate(size_t n) {
  std::vector<bf16> numbers(n * n);
  for (size_t i = 0; i < numbers.size(); i++)
    numbers[i] = i < 65521 ? __float2bfloat16(normal(1, STREAM_TEST, i)) : numbers[i - 65521];
  bf16* a = device_array<bf16>(n * n, "a product to measure");
  bf16* out = device_array<bf16>(n * n, "its result");
  upload(a, numbers.data(), n * n);
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));

  std::vector<float> ms(5);
  for (int run = -2; run < 5; run++) {  // the first two find the algorithm and wake the card
    CUDA_CHECK(cudaEventRecord(begin, device.stream));
    matmul<bf16, bf16>({out, n}, {a, n}, transposed(a, n), n, n, n);
    CUDA_CHECK(cudaEventRecord(end, device.stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    if (run >= 0) CUDA_CHECK(cudaEventElapsedTime(&ms[size_t(run)], begin, end));
  }

  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  CUDA_CHECK(cudaFree(a));
  CUDA_CHECK(cudaFree(out));
  std::sort(ms.begin(), ms.end());
  return 2 * double(n) * double(n) * double(n) / (double(ms[2]) * 1e-3);
}

// ---- loads and stores ----------------------------------------------------------------------------------
__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(bf16 v) { return __bfloat162float(v); }

template <class floatX>
__device__ inline floatX from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
  return v;
}

template <>
__device__ inline bf16 from_float<bf16>(float v) {
  return __float2bfloat16(v);
}
// What is left of v once it has been stored
template <class floatX>
__device__ inline float rounded(float v) {
  return to_float(from_float<floatX>(v));
}
__device__ inline unsigned pack_bf16(float lo, float hi) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Eight or four neighbouring numbers, 16 bytes at a time (four bf16: 8), from addresses that this divides.
__device__ inline void load8(float (&v)[8], const bf16* p) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  const unsigned bits[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int k = 0; k < 8; k += 2) {  // a bf16 is the upper half of a float
    v[k] = __uint_as_float(bits[k / 2] << 16);
    v[k + 1] = __uint_as_float(bits[k / 2] & 0xFFFF0000u);
  }
}
__device__ inline void load8(float (&v)[8], const float* p) {
  const float4 lo = reinterpret_cast<const float4*>(p)[0], hi = reinterpret_cast<const float4*>(p)[1];
  const float both[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
  for (int k = 0; k < 8; k++) v[k] = both[k];
}
__device__ inline void store8(bf16* p, const float (&v)[8]) {
  *reinterpret_cast<uint4*>(p) =
      uint4{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
}
__device__ inline void store8(float* p, const float (&v)[8]) {
  reinterpret_cast<float4*>(p)[0] = float4{v[0], v[1], v[2], v[3]};
  reinterpret_cast<float4*>(p)[1] = float4{v[4], v[5], v[6], v[7]};
}
__device__ inline void load4(float (&v)[4], const bf16* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  v[0] = __uint_as_float(raw.x << 16);
  v[1] = __uint_as_float(raw.x & 0xFFFF0000u);
  v[2] = __uint_as_float(raw.y << 16);
  v[3] = __uint_as_float(raw.y & 0xFFFF0000u);
}
__device__ inline void load4(float (&v)[4], const float* p) {
  const float4 raw = *reinterpret_cast<const float4*>(p);
  v[0] = raw.x;
  v[1] = raw.y;
  v[2] = raw.z;
  v[3] = raw.w;
}
__device__ inline void store4(bf16* p, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(p) = uint2{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
}
__device__ inline void store4(float* p, const float (&v)[4]) {
  *reinterpret_cast<float4*>(p) = float4{v[0], v[1], v[2], v[3]};
}

// ---- sums over a warp and over a block -----------------------------------------------------------------
constexpr unsigned ALL_LANES = 0xffffffffu;
__device__ inline float warp_sum(float v) {  // every lane gets the total
#pragma unroll
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(ALL_LANES, v, o);
  return v;
}
__device__ inline float warp_max(float v) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, o));
  return v;
}
// Sums N values (a power of two, up to 32) over the warp together: lane l gets the total of value l % N. Each
// round halves the values that a lane still carries, so it takes N - 1 + log2(32 / N) shuffles instead of 5 N.
template <int N, int ALL = N>
__device__ inline float warp_sum_each(const float (&v)[N], unsigned lane) {
  if constexpr (N > 1) {
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float keep = lane & (N / 2) ? v[i + N / 2] : v[i], give = lane & (N / 2) ? v[i] : v[i + N / 2];
      half[i] = keep + __shfl_xor_sync(ALL_LANES, give, N / 2);
    }
    return warp_sum_each<N / 2, ALL>(half, lane);
  } else {
    float sum = v[0];
#pragma unroll
    for (int o = ALL; o < 32; o *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, o);
    return sum;
  }
}

// Sum over a block of SUM_THREADS threads, in double. Thread 0 gets the total. All call it, and meet
// at a barrier before they call it again.
constexpr unsigned SUM_THREADS = 256;
__device__ inline double block_sum(double v) {
  __shared__ double sums[SUM_THREADS / 32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(ALL_LANES, v, o);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0)
    for (unsigned w = 1; w < SUM_THREADS / 32; w++) v += sums[w];
  return v;
}

}  // namespace gpu
