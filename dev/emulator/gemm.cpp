// gemm.cpp - cuBLASLt: a matrix product, and checks of what its callers get wrong.
#include <algorithm>

#include "cublasLt.h"
#include "engine.h"

namespace emu {

struct Matrix : Layout {
  const char* p;
};  // column-major; rows and columns as stored
static const char* const NAMES[] = {"A", "B", "C", "D"};

// ---- the product: D = alpha op(A) op(B) + beta C ------------------------------------------------------
static size_t size_of(const Matrix& x) { return x.type == CUDA_R_32F ? 4 : 2; }
static float load(const Matrix& x, size_t row, size_t col) {
  const size_t i = col * size_t(x.ld) + row;
  return x.type == CUDA_R_32F ? reinterpret_cast<const float*>(x.p)[i]
                              : float(reinterpret_cast<const __nv_bfloat16*>(x.p)[i]);
}
static void store(const Matrix& x, size_t row, size_t col, float v) {
  char* at = const_cast<char*>(x.p) + (col * size_t(x.ld) + row) * size_of(x);
  if (x.type == CUDA_R_32F)
    *reinterpret_cast<float*>(at) = v;
  else
    *reinterpret_cast<__nv_bfloat16*>(at) = v;
}

// Both operands become floats first. Sums are float32, in the order of k, those of bf16 products truncated, and
// rounded once, to D's type. The sums of 32 rows stay in registers, and belong to one core: any number of cores
// gives the same bits.
typedef float Lanes __attribute__((vector_size(32)));
struct Strip {
  static constexpr size_t ROWS = 32;
  Lanes lanes[4];
  float& operator[](size_t row) { return reinterpret_cast<float*>(lanes)[row]; }
};
static void gemm(bool ta, bool tb, float alpha, Matrix a, Matrix b, float beta, Matrix c, Matrix d) {
  const size_t m = d.rows, n = d.cols, K = ta ? a.rows : a.cols;
  std::vector<float> columns(n * K);  // of op(B), one after the other
  parallel_for(n, [&](size_t j) {
    for (size_t k = 0; k < K; k++) columns[j * K + k] = tb ? load(b, j, k) : load(b, k, j);
  });
  parallel_for((m + Strip::ROWS - 1) / Strip::ROWS, [&](size_t number) {
    const size_t i0 = number * Strip::ROWS, rows = std::min(Strip::ROWS, m - i0);
    std::vector<Strip> strips(K);  // of op(A): for each k its 32 rows, zeros beyond the last
    for (size_t k = 0; k < K; k++)
      for (size_t i = 0; i < rows; i++) strips[k][i] = ta ? load(a, k, i0 + i) : load(a, i0 + i, k);
    std::vector<Strip> sums(n);
    const auto add = [&] {
      for (size_t j = 0; j < n; j++) {
        Strip sum = {};
        for (size_t k = 0; k < K; k++)
          for (size_t i = 0; i < 4; i++) sum.lanes[i] += strips[k].lanes[i] * columns[j * K + k];
        sums[j] = sum;
      }
    };
    a.type == CUDA_R_16BF ? truncated(add) : add();
    for (size_t j = 0; j < n; j++)
      for (size_t i = 0; i < rows; i++) {  // where beta is 0, C may hold anything
        const float sum = alpha * sums[j][i];
        store(d, i0 + i, j, beta == 0 ? sum : sum + beta * load(c, i0 + i, j));
      }
  });
}
}  // namespace emu
using namespace emu;

// ---- what is set, and what is chosen -------------------------------------------------------------------
template <class T>
static cublasStatus_t set(T* field, const void* value, size_t bytes) {
  if (bytes != sizeof(T)) fail("the attribute has %zu bytes, expected %zu", bytes, sizeof(T));
  memcpy(field, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(Desc* d, cublasLtMatmulDescAttributes_t a, const void* value,
                                              size_t bytes, Site site) {
  Api api("cublasLtMatmulDescSetAttribute", site);
  return set(a == CUBLASLT_MATMUL_DESC_TRANSA ? &d->transpose_a : &d->transpose_b, value, bytes);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(Preference* p, cublasLtMatmulPreferenceAttributes_t a,
                                                    const void* value, size_t bytes, Site site) {
  Api api("cublasLtMatmulPreferenceSetAttribute", site);
  if (a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return set(&p->workspace, value, bytes);
  if (a == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) return set(&p->reduction, value, bytes);
  return set(&p->alignment[a - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(Handle*, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d,
                                              Preference* p, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results, int* found, Site site) {
  Api api("cublasLtMatmulAlgoGetHeuristic", site);
  Preference limits = *p;
  limits.workspace = std::min<uint64_t>(p->workspace, 65536);  // it wants a workspace, if it may
  *found = wanted > 0;
  if (*found) results[0].algo = {*desc, {*a, *b, *c, *d}, limits};
  return CUBLAS_STATUS_SUCCESS;
}

// ---- cublasLtMatmul -----------------------------------------------------------------------------------
static void check_product(bool ta, bool tb, const Matrix (&x)[4]) {
  const Matrix &a = x[0], &b = x[1], &c = x[2], &d = x[3];
  std::string all;
  for (int i = 0; i < 4; i++)
    all += std::string(i ? ", " : "") + NAMES[i] + (x[i].type == CUDA_R_32F ? " float " : " bf16 ") +
           std::to_string(x[i].rows) + " x " + std::to_string(x[i].cols) + " ld " + std::to_string(x[i].ld) +
           ((i == 0 && ta) || (i == 1 && tb) ? " transposed" : "");
  const size_t m = ta ? a.cols : a.rows, k = ta ? a.rows : a.cols;
  const size_t n = tb ? b.rows : b.cols, also_k = tb ? b.cols : b.rows;
  if (m != d.rows || n != d.cols || k != also_k || c.rows != d.rows || c.cols != d.cols || !m || !n || !k)
    fail("the sizes do not fit, expected op(A) m x k, op(B) k x n, C and D m x n: %s", all.c_str());
  for (const Matrix& y : x)
    if (y.ld < int64_t(y.rows)) fail("a leading dimension is smaller than the rows: %s", all.c_str());
  if (a.type != b.type || c.type != d.type || (a.type == CUDA_R_32F && d.type != CUDA_R_32F))
    fail("unsupported types, expected A and B alike, C and D alike, no bf16 from float: %s", all.c_str());
}
static void check_algorithm(const Algorithm& algo, const Desc& desc, const Matrix (&x)[4], size_t workspace) {
  bool same = !memcmp(&algo.desc, &desc, sizeof desc);
  for (int i = 0; i < 4; i++) same = same && !memcmp(&algo.layout[i], &x[i], sizeof algo.layout[i]);
  if (!same) fail("the algorithm was chosen for another product");
  if (workspace < algo.limits.workspace)
    fail("the workspace has %zu bytes, the algorithm needs %zu", workspace, size_t(algo.limits.workspace));
  for (int i = 0; i < 4; i++)
    if (reinterpret_cast<uintptr_t>(x[i].p) % algo.limits.alignment[i])
      fail("%s is not aligned to the %u bytes of CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_%s_BYTES", NAMES[i],
           algo.limits.alignment[i], NAMES[i]);
}
static void touch_all(const Matrix& x, Access access) {  // the rows, not what lies between two columns
  for (size_t j = 0; j < x.cols; j++) touch(x.p + j * size_t(x.ld) * size_of(x), x.rows * size_of(x), access);
}
cublasStatus_t cublasLtMatmul(Handle*, Desc* desc, const void* alpha, const void* a, Layout* la, const void* b,
                              Layout* lb, const void* beta, const void* c, Layout* lc, void* d, Layout* ld,
                              const Algorithm* algo, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream, Site site) {
  Api api("cublasLtMatmul", site);
  auto matrix = [](const Layout* l, const void* p) { return Matrix{*l, static_cast<const char*>(p)}; };
  const Matrix x[4] = {matrix(la, a), matrix(lb, b), matrix(lc, c), matrix(ld, d)};
  const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
  const bool ta = desc->transpose_a, tb = desc->transpose_b;
  check_product(ta, tb, x);
  check_device("workspace", workspace, workspace_bytes);
  for (int i = 0; i < 4; i++)
    if (i != 2 || keep != 0)
      check_device(NAMES[i], x[i].p, ((x[i].cols - 1) * size_t(x[i].ld) + x[i].rows) * size_of(x[i]));
  check_algorithm(*algo, *desc, x, workspace_bytes);
  const size_t dirty = algo->limits.workspace;  // by partial sums
  enqueue(stream, [=] {
    memset(workspace, 0xFF, dirty);
    touch(workspace, dirty, Access::write);
    touch_all(x[0], Access::read);
    touch_all(x[1], Access::read);
    if (keep != 0) touch_all(x[2], Access::read);
    touch_all(x[3], Access::write);
    gemm(ta, tb, scale, x[0], x[1], keep, x[2], x[3]);
  });
  return CUBLAS_STATUS_SUCCESS;
}
