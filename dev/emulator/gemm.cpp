// gemm.cpp - cuBLASLt: a fast matrix product, and checks of what its callers get wrong.
#include <algorithm>
#include <memory>

#include "cublasLt.h"
#include "engine.h"

namespace emu {

struct Matrix : Layout { const char* p; };  // column-major; rows and columns as stored
static size_t size_of(int64_t type) { return type == CUDA_R_32F ? 4 : 2; }

// ---- the product: D = alpha op(A) op(B) + beta C ------------------------------------------------------
// Both operands become panels of floats: 16 rows of op(A), or 6 columns of op(B), side by side for every k. A
// tile of 16 x 6 sums stays in registers while k runs. Sums are float32, over runs of 64 k first and then over
// the runs, much as a card does it, and rounded once, to D's type. A tile belongs to one core: any number of
// cores gives the same bits.
constexpr size_t MR = 16, NR = 6, RUN = 64;
typedef float Lanes __attribute__((vector_size(32)));

// panel[k * width + i] = the element at (i0 + i, k), or (k, i0 + i) if k walks down the columns; 0 beyond n
template <class T>
static void pack_as(
    float* panel, size_t width, const T* p, size_t ld, bool k_down, size_t i0, size_t n, size_t K) {
  for (size_t k = 0; k < K; k++)
    for (size_t i = i0; i < i0 + width; i++)
      panel[k * width + i - i0] = i < n ? float(p[k_down ? i * ld + k : k * ld + i]) : 0.0f;
}
static void pack(float* panel, size_t width, const Matrix& x, bool k_down, size_t i0, size_t n, size_t K) {
  const size_t ld = size_t(x.ld);
  if (x.type == CUDA_R_32F) pack_as(panel, width, reinterpret_cast<const float*>(x.p), ld, k_down, i0, n, K);
  else pack_as(panel, width, reinterpret_cast<const __nv_bfloat16*>(x.p), ld, k_down, i0, n, K);
}
static void tile(float* out, const float* a, const float* b, size_t K) {  // out: NR columns of MR
  Lanes total[NR][2] = {};
  for (size_t k0 = 0; k0 < K; k0 += RUN) {
    Lanes sum[NR][2] = {};
    for (size_t k = k0; k < std::min(K, k0 + RUN); k++) {
      Lanes a0, a1;
      memcpy(&a0, a + k * MR, sizeof a0), memcpy(&a1, a + k * MR + 8, sizeof a1);
      for (size_t j = 0; j < NR; j++) sum[j][0] += a0 * b[k * NR + j], sum[j][1] += a1 * b[k * NR + j];
    }
    for (size_t j = 0; j < NR; j++) total[j][0] += sum[j][0], total[j][1] += sum[j][1];
  }
  memcpy(out, total, sizeof total);
}
static void access(const char* name, const Matrix& x, Access kind) {
  const size_t size = size_of(x.type), column = size_t(x.ld) * size;
  check_device(name, x.p, (x.cols - 1) * column + x.rows * size);
  for (size_t j = 0; j < x.cols; j++) touch(x.p + j * column, x.rows * size, kind);
}
static void gemm(bool ta, bool tb, float alpha, Matrix a, Matrix b, float beta, Matrix c, Matrix d) {
  DeviceAccess open;
  access("A", a, Access::read), access("B", b, Access::read), access("D", d, Access::write);
  if (beta != 0) access("C", c, Access::read);
  const size_t m = d.rows, n = d.cols, K = ta ? a.rows : a.cols, panels = (n + NR - 1) / NR;
  std::unique_ptr<float[]> packed_b(new float[panels * NR * K]);
  auto store = [&](size_t i, size_t j, float sum) {
    const size_t at_c = j * size_t(c.ld) + i, at_d = j * size_t(d.ld) + i;
    float* out = reinterpret_cast<float*>(const_cast<char*>(d.p));
    if (d.type == CUDA_R_32F) {
      out[at_d] = beta == 0 ? alpha * sum : alpha * sum + beta * reinterpret_cast<const float*>(c.p)[at_c];
    } else {
      const float old = beta == 0 ? 0.0f : float(reinterpret_cast<const __nv_bfloat16*>(c.p)[at_c]);
      reinterpret_cast<__nv_bfloat16*>(out)[at_d] = beta == 0 ? alpha * sum : alpha * sum + beta * old;
    }
  };
  parallel_for(panels, [&](size_t j) { pack(&packed_b[j * NR * K], NR, b, !tb, j * NR, n, K); });
  parallel_for((m + MR - 1) / MR, [&](size_t panel) {
    const size_t i0 = panel * MR;
    std::unique_ptr<float[]> packed_a(new float[MR * K]);
    pack(packed_a.get(), MR, a, ta, i0, m, K);
    for (size_t j0 = 0; j0 < n; j0 += NR) {
      float out[NR * MR];
      tile(out, packed_a.get(), &packed_b[j0 * K], K);
      for (size_t j = j0; j < std::min(n, j0 + NR); j++)
        for (size_t i = i0; i < std::min(m, i0 + MR); i++) store(i, j, out[(j - j0) * MR + i - i0]);
    }
  });
}

// ---- handles and descriptions -------------------------------------------------------------------------
template <class T> static cublasStatus_t make(T** out, const char* what, Site site, T value = {}) {
  object_made(*out = new T(value), what, site);
  return CUBLAS_STATUS_SUCCESS;
}
template <class T> static cublasStatus_t destroy(T* p, const char* what, Site site) {
  Api api("a cublasLt...Destroy", site);
  object_gone(p, what);
  delete p;
  return CUBLAS_STATUS_SUCCESS;
}
template <class T> static cublasStatus_t set(T* field, const void* value, size_t bytes) {
  if (bytes != sizeof(T)) fail("the attribute has %zu bytes, expected %zu", bytes, sizeof(T));
  memcpy(field, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
}  // namespace emu
using namespace emu;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* h, Site site) { return make(h, "cuBLASLt handle", site); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h, Site site) { return destroy(h, "cuBLASLt handle", site); }
cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType scale, Site site) {
  Api api("cublasLtMatmulDescCreate", site);
  if (scale != CUDA_R_32F) fail("the scale type is %d, expected CUDA_R_32F", scale);
  return make(d, "matmul description", site);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d, Site site) {
  return destroy(d, "matmul description", site);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void* value, size_t bytes, Site site) {
  Api api("cublasLtMatmulDescSetAttribute", site);
  return set(a == CUBLASLT_MATMUL_DESC_TRANSA ? &d->transpose_a : &d->transpose_b, value, bytes);
}
cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t* l, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld, Site site) {
  return make(l, "matrix layout", site, Layout{type, rows, cols, ld});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l, Site site) {
  return destroy(l, "matrix layout", site);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p, Site site) {
  return make(p, "matmul preference", site);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p, Site site) {
  return destroy(p, "matmul preference", site);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void* value, size_t bytes,
    Site site) {
  Api api("cublasLtMatmulPreferenceSetAttribute", site);
  if (a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return set(&p->workspace, value, bytes);
  if (a == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) return set(&p->reduction, value, bytes);
  return set(&p->alignment[a - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t p, int wanted,
    cublasLtMatmulHeuristicResult_t* results, int* found, Site site) {
  Api api("cublasLtMatmulAlgoGetHeuristic", site);
  if (wanted < 1) fail("%d results wanted, expected 1 or more", wanted);
  *found = std::min(wanted, 2);
  for (int i = 0; i < *found; i++) {  // the first one wants a workspace, if it may
    Preference limits = *p;
    limits.workspace = i == 0 ? std::min<uint64_t>(p->workspace, 65536) : 0;
    results[i] = {{*desc, {*a, *b, *c, *d}, limits}, limits.workspace, CUBLAS_STATUS_SUCCESS, 1.0f};
  }
  return CUBLAS_STATUS_SUCCESS;
}

// ---- cublasLtMatmul -----------------------------------------------------------------------------------
static void check_product(bool ta, bool tb, Layout a, Layout b, Layout c, Layout d) {
  std::string all;
  int i = 0;
  for (const Layout* x : {&a, &b, &c, &d})
    all += std::string(i ? ", " : "") + "ABCD"[i] + (x->type == CUDA_R_32F ? " float " : " bf16 ") +
           std::to_string(x->rows) + " x " + std::to_string(x->cols) + " ld " + std::to_string(x->ld) +
           ((i == 0 && ta) || (i == 1 && tb) ? " transposed" : ""), i++;
  const size_t m = ta ? a.cols : a.rows, k = ta ? a.rows : a.cols;
  const size_t n = tb ? b.rows : b.cols, also_k = tb ? b.cols : b.rows;
  if (m != d.rows || n != d.cols || k != also_k || c.rows != d.rows || c.cols != d.cols || !m || !n || !k)
    fail("the sizes do not fit, expected op(A) m x k, op(B) k x n, C and D m x n: %s", all.c_str());
  for (const Layout* x : {&a, &b, &c, &d})
    if (x->ld < int64_t(x->rows)) fail("a leading dimension is smaller than the rows: %s", all.c_str());
  if (a.type != b.type || c.type != d.type || (a.type == CUDA_R_32F && d.type != CUDA_R_32F))
    fail("unsupported types, expected A and B alike, C and D alike, no bf16 from float: %s", all.c_str());
}
cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a, cublasLtMatrixLayout_t la,
    const void* b, cublasLtMatrixLayout_t lb, const void* beta, const void* c, cublasLtMatrixLayout_t lc,
    void* d, cublasLtMatrixLayout_t ld, const cublasLtMatmulAlgo_t* algo, void* workspace,
    size_t workspace_bytes, cudaStream_t stream, Site site) {
  Api api("cublasLtMatmul", site);
  const bool ta = desc->transpose_a, tb = desc->transpose_b;
  check_product(ta, tb, *la, *lb, *lc, *ld);
  if (workspace_bytes) check_device("workspace", workspace, workspace_bytes);
  if (algo) {
    const Layout layouts[] = {*la, *lb, *lc, *ld};
    const void* operands[] = {a, b, c, d};
    if (memcmp(&algo->desc, desc, sizeof *desc) || memcmp(algo->layout, layouts, sizeof layouts))
      fail("the algorithm was chosen for another product");
    const size_t needed = algo->limits.workspace;
    if (workspace_bytes < needed)
      fail("the workspace has %zu bytes, the algorithm needs %zu", workspace_bytes, needed);
    for (int i = 0; i < 4; i++) {
      const unsigned alignment = algo->limits.alignment[i];
      if (alignment && reinterpret_cast<uintptr_t>(operands[i]) % alignment)
        fail("%c is not aligned to the %u bytes that the algorithm was chosen for"
             " (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_%c_BYTES)", "ABCD"[i], alignment, "ABCD"[i]);
    }
  }
  auto matrix = [](const void* p, const Layout* l) { return Matrix{*l, static_cast<const char*>(p)}; };
  const Matrix A = matrix(a, la), B = matrix(b, lb), C = matrix(c, lc), D = matrix(d, ld);
  const float x = *static_cast<const float*>(alpha), y = *static_cast<const float*>(beta);
  const size_t dirty = algo ? algo->limits.workspace : 0;
  enqueue(stream, [=] {
    Api api("cublasLtMatmul", site);
    DeviceAccess open;
    if (dirty) memset(workspace, 0xFF, dirty), touch(workspace, dirty, Access::write);  // by partial sums
    gemm(ta, tb, x, A, B, y, C, D);
  });
  return CUBLAS_STATUS_SUCCESS;
}
