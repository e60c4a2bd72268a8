// gemm.cpp - cuBLAS and cuBLASLt: matrix products, and checks of what callers get wrong.
#include <algorithm>
#include <memory>

#include "cublasLt.h"
#include "engine.h"

namespace emu {

// ---- the product --------------------------------------------------------------------------------------
// Both operands become panels of floats: 16 rows of A or 6 columns of B for every k, next to each other. A tile of
// 16 x 6 results stays in registers while k runs. One thread computes a tile, so results never depend on the cores.
constexpr size_t MR = 16, NR = 6;
typedef float Lanes __attribute__((vector_size(32)));

static size_t size_of(cudaDataType t) { return t == CUDA_R_32F ? 4 : 2; }
static float load(const void* p, cudaDataType t, size_t i) {
  return t == CUDA_R_32F ? static_cast<const float*>(p)[i] : float(static_cast<const __nv_bfloat16*>(p)[i]);
}
// panel[k * width + i] = element (first + i, k), where along_rows says which of i and k walks down a column
static void pack(float* panel, size_t width, const Matrix& m, bool k_along_rows, size_t first, size_t n, size_t k_size) {
  for (size_t k = 0; k < k_size; k++)
    for (size_t i = 0; i < width; i++)
      panel[k * width + i] = first + i >= n ? 0.0f : load(m.p, m.type, k_along_rows ? (first + i) * size_t(m.ld) + k : k * size_t(m.ld) + first + i);
}
static void tile(float* out, const float* a, const float* b, size_t k_size) {  // out: NR columns of MR
  Lanes sum[NR][2] = {};
  for (size_t k = 0; k < k_size; k++) {
    Lanes a0, a1;
    memcpy(&a0, a + k * MR, sizeof a0), memcpy(&a1, a + k * MR + 8, sizeof a1);
    for (size_t j = 0; j < NR; j++) sum[j][0] += a0 * b[k * NR + j], sum[j][1] += a1 * b[k * NR + j];
  }
  memcpy(out, sum, sizeof sum);
}
void gemm(const char* name, bool ta, bool tb, float alpha, Matrix a, Matrix b, float beta, Matrix c, Matrix d) {
  DeviceAccess open;
  const size_t m = d.rows, n = d.cols, k_size = ta ? a.rows : a.cols;
  auto all = [&](const char* operand, const Matrix& x, Access access) {
    const std::string what = std::string(name) + " " + operand;
    check_device(what.c_str(), x.p, ((x.cols - 1) * size_t(x.ld) + x.rows) * size_of(x.type));
    for (size_t j = 0; j < x.cols; j++)
      touch(static_cast<const char*>(x.p) + j * size_t(x.ld) * size_of(x.type), x.rows * size_of(x.type), access);
  };
  all("A", a, Access::read), all("B", b, Access::read);
  if (beta != 0) all("C", c, Access::read);
  all("D", d, Access::write);
  const size_t panels = (n + NR - 1) / NR;
  std::unique_ptr<float[]> packed_b(new float[panels * NR * k_size]);
#pragma omp parallel
  {
#pragma omp for
    for (size_t j = 0; j < panels; j++) pack(&packed_b[j * NR * k_size], NR, b, !tb, j * NR, n, k_size);
    std::unique_ptr<float[]> packed_a(new float[MR * k_size]);
#pragma omp for schedule(dynamic)
    for (size_t i0 = 0; i0 < m; i0 += MR) {
      pack(packed_a.get(), MR, a, ta, i0, m, k_size);
      for (size_t j0 = 0; j0 < n; j0 += NR) {
        float out[NR * MR];
        tile(out, packed_a.get(), &packed_b[j0 * k_size], k_size);
        for (size_t j = j0; j < std::min(n, j0 + NR); j++)
          for (size_t i = i0; i < std::min(m, i0 + MR); i++) {
            const float v = alpha * out[(j - j0) * MR + i - i0] + (beta == 0 ? 0.0f : beta * load(c.p, c.type, j * size_t(c.ld) + i));
            void* p = const_cast<void*>(d.p);
            if (d.type == CUDA_R_32F) static_cast<float*>(p)[j * size_t(d.ld) + i] = v;
            else static_cast<__nv_bfloat16*>(p)[j * size_t(d.ld) + i] = v;
          }
      }
    }
  }
}
static void check_product(bool ta, bool tb, const Matrix& a, const Matrix& b, const Matrix& c, const Matrix& d) {
  auto text = [](const char* name, const Matrix& x) {
    return std::string(name) + (x.type == CUDA_R_32F ? " float " : " bf16 ") + std::to_string(x.rows) + " x " + std::to_string(x.cols) + " ld " + std::to_string(x.ld);
  };
  const std::string all = text("A", a) + (ta ? " transposed, " : ", ") + text("B", b) + (tb ? " transposed, " : ", ") + text("C", c) + ", " + text("D", d);
  const size_t m = ta ? a.cols : a.rows, n = tb ? b.rows : b.cols, k = ta ? a.rows : a.cols, k_b = tb ? b.cols : b.rows;
  if (m != d.rows || n != d.cols || k != k_b || c.rows != d.rows || c.cols != d.cols)
    fail("the sizes do not fit together, expected op(A) m x k, op(B) k x n, C and D m x n: %s", all.c_str());
  if (!m || !n || !k) fail("a size is 0: %s", all.c_str());
  for (const Matrix* x : {&a, &b, &c, &d})
    if (x->ld < int64_t(x->rows)) fail("a leading dimension is smaller than the rows: %s", all.c_str());
  if (a.type != b.type || c.type != d.type || (a.type == CUDA_R_32F && d.type != CUDA_R_32F))
    fail("unsupported types, expected A and B alike, C and D alike, bf16 results from bf16 operands only: %s", all.c_str());
}
static Matrix at(const void* p, size_t offset, cudaDataType type, size_t rows, size_t cols, int64_t ld) {
  return {static_cast<const char*>(p) + offset * size_of(type), type, rows, cols, ld};
}
}  // namespace emu
using namespace emu;

// ---- cuBLAS -------------------------------------------------------------------------------------------
struct cublasContext { cudaStream_t stream = nullptr; };
struct cublasLtContext {};
cublasStatus_t cublasCreate(cublasHandle_t* h, Site site) { object_made(*h = new cublasContext, "cuBLAS handle", site); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasDestroy(cublasHandle_t h, Site site) {
  Api api("cublasDestroy", site);
  object_gone(h, "cuBLAS handle");
  delete h;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s) { h->stream = s; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetWorkspace(cublasHandle_t, void* p, size_t bytes, Site site) {
  Api api("cublasSetWorkspace", site);
  check_device("workspace", p, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void* alpha,
    const void* a, cudaDataType type_a, int lda, long long stride_a, const void* b, cudaDataType type_b, int ldb, long long stride_b,
    const void* beta, void* c, cudaDataType type_c, int ldc, long long stride_c, int batch, cublasComputeType_t, cublasGemmAlgo_t, Site site) {
  Api api("cublasGemm", site);
  if (m <= 0 || n <= 0 || k <= 0 || batch <= 0) fail("a size is not positive: m %d, n %d, k %d, batch %d", m, n, k, batch);
  const float al = *static_cast<const float*>(alpha), be = *static_cast<const float*>(beta);
  for (int i = 0; i < batch; i++) {
    const Matrix A = at(a, size_t(i * stride_a), type_a, size_t(ta ? k : m), size_t(ta ? m : k), lda);
    const Matrix B = at(b, size_t(i * stride_b), type_b, size_t(tb ? n : k), size_t(tb ? k : n), ldb);
    const Matrix C = at(c, size_t(i * stride_c), type_c, size_t(m), size_t(n), ldc);
    check_product(ta, tb, A, B, C, C);
    enqueue(h->stream, [=] { Api api("cublasGemm", site); gemm("cublasGemm", ta, tb, al, A, B, be, C, C); });
  }
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void* alpha, const void* a,
    cudaDataType type_a, int lda, const void* b, cudaDataType type_b, int ldb, const void* beta, void* c, cudaDataType type_c, int ldc,
    cublasComputeType_t compute, cublasGemmAlgo_t algo, Site site) {
  return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c, ldc, 0, 1, compute, algo, site);
}

// ---- cuBLASLt -----------------------------------------------------------------------------------------
template <class T> static cublasStatus_t make(T** out, const char* what, Site site, T value = {}) {
  object_made(*out = new T(value), what, site);
  return CUBLAS_STATUS_SUCCESS;
}
template <class T> static cublasStatus_t destroy(T* p, const char* what, Site site) {
  Api api("cublasLt...Destroy", site);
  object_gone(p, what);
  delete p;
  return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t set(void* field, size_t expected, const void* value, size_t bytes, const char* name, Site site) {
  Api api(name, site);
  if (!field) fail("this attribute is not emulated");
  if (bytes != expected) fail("the attribute has %zu bytes, expected %zu", bytes, expected);
  memcpy(field, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t* h, Site site) { return make(h, "cuBLASLt handle", site); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h, Site site) { return destroy(h, "cuBLASLt handle", site); }
size_t cublasLtGetVersion() { return 0; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType scale, Site site) {
  Api api("cublasLtMatmulDescCreate", site);
  if (scale != CUDA_R_32F) fail("the scale type is %d, expected CUDA_R_32F", scale);
  return make(d, "cublasLtMatmulDesc", site);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d, Site site) { return destroy(d, "cublasLtMatmulDesc", site); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void* value, size_t bytes, Site site) {
  int32_t* field = a == CUBLASLT_MATMUL_DESC_TRANSA ? &d->transpose_a : a == CUBLASLT_MATMUL_DESC_TRANSB ? &d->transpose_b : nullptr;
  return set(field, sizeof *field, value, bytes, "cublasLtMatmulDescSetAttribute", site);
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld, Site site) {
  return make(l, "cublasLtMatrixLayout", site, Layout{type, rows, cols, ld, 1, 0});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l, Site site) { return destroy(l, "cublasLtMatrixLayout", site); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a, const void* value, size_t bytes, Site site) {
  const bool count = a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, stride = a == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
  void* field = count ? static_cast<void*>(&l->batch) : stride ? &l->stride : nullptr;
  return set(field, count ? sizeof l->batch : sizeof l->stride, value, bytes, "cublasLtMatrixLayoutSetAttribute", site);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p, Site site) { return make(p, "cublasLtMatmulPreference", site); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p, Site site) { return destroy(p, "cublasLtMatmulPreference", site); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void* value, size_t bytes, Site site) {
  const bool workspace = a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
  const unsigned i = unsigned(a - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
  void* field = workspace ? static_cast<void*>(&p->workspace) : i < 4 ? &p->alignment[i] : a == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK ? &p->reduction : nullptr;
  return set(field, workspace ? sizeof p->workspace : 4, value, bytes, "cublasLtMatmulPreferenceSetAttribute", site);
}
static uint64_t problem(const Desc& desc, std::initializer_list<const Layout*> layouts) {  // a number for all that an algorithm may depend on
  uint64_t h = uint64_t(desc.transpose_a * 2 + desc.transpose_b) + 1;
  for (const Layout* l : layouts)
    for (uint64_t v : {uint64_t(l->type), l->rows, l->cols, uint64_t(l->ld), uint64_t(l->batch), uint64_t(l->stride)}) h = (h ^ v) * 0x9E3779B97F4A7C15u, h ^= h >> 29;
  return h;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t p, int wanted, cublasLtMatmulHeuristicResult_t* results, int* found, Site site) {
  Api api("cublasLtMatmulAlgoGetHeuristic", site);
  if (wanted < 1) fail("%d results wanted, expected 1 or more", wanted);
  *found = std::min(wanted, 2);
  for (int i = 0; i < *found; i++) {
    const uint64_t workspace = i == 0 ? std::min<uint64_t>(p->workspace, 65536) : 0;
    results[i] = {{problem(*desc, {a, b, c, d}), workspace, {}}, workspace, CUBLAS_STATUS_SUCCESS, 1.0f};
    std::copy_n(p->alignment, 4, results[i].algo.alignment);
  }
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a, cublasLtMatrixLayout_t la, const void* b,
    cublasLtMatrixLayout_t lb, const void* beta, const void* c, cublasLtMatrixLayout_t lc, void* d, cublasLtMatrixLayout_t ld,
    const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes, cudaStream_t stream, Site site) {
  Api api("cublasLtMatmul", site);
  if (la->batch != ld->batch || lb->batch != ld->batch || lc->batch != ld->batch)
    fail("batch counts differ: A %d, B %d, C %d, D %d", la->batch, lb->batch, lc->batch, ld->batch);
  const float al = *static_cast<const float*>(alpha), be = *static_cast<const float*>(beta);
  const bool ta = desc->transpose_a, tb = desc->transpose_b;
  auto part = [](const void* p, const Layout* l, int i) { return at(p, size_t(i * l->stride), l->type, l->rows, l->cols, l->ld); };
  check_product(ta, tb, part(a, la, 0), part(b, lb, 0), part(c, lc, 0), part(d, ld, 0));
  if (workspace_bytes) check_device("workspace", workspace, workspace_bytes);
  if (algo) {
    const void* operands[] = {a, b, c, d};
    if (algo->problem != problem(*desc, {la, lb, lc, ld})) fail("the algorithm was chosen for another product");
    if (workspace_bytes < algo->workspace) fail("the workspace has %zu bytes, the algorithm needs %zu", workspace_bytes, size_t(algo->workspace));
    for (int i = 0; i < 4; i++)
      if (algo->alignment[i] && reinterpret_cast<uintptr_t>(operands[i]) % algo->alignment[i])
        fail("%c is not aligned to the %u bytes that the algorithm was chosen for (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_%c_BYTES)", "ABCD"[i], algo->alignment[i], "ABCD"[i]);
  }
  const size_t used = algo ? algo->workspace : 0;
  enqueue(stream, [=] {  // a real product leaves its partial sums in the workspace
    Api api("cublasLtMatmul", site);
    DeviceAccess open;
    if (used) memset(workspace, 0xFF, used), touch(workspace, used, Access::write);
  });
  for (int i = 0; i < ld->batch; i++) {
    const Matrix A = part(a, la, i), B = part(b, lb, i), C = part(c, lc, i), D = part(d, ld, i);
    enqueue(stream, [=] { Api api("cublasLtMatmul", site); gemm("cublasLtMatmul", ta, tb, al, A, B, be, C, D); });
  }
  return CUBLAS_STATUS_SUCCESS;
}
