// matmul.cpp - the ladder to the CPU trainer's matrix product, from the plain loop to the function that trains.
//
//   make build/matmul && build/matmul        C = 576: x (1024,576) times w (576,576) transposed
//   build/matmul 512 2880 576                any M N K
//
// Every rung computes out (M,N) = x (M,K) w^T, w (N,K): the forward pass of a linear layer. Each differs from
// the one before by one idea. A rung is checked against sums in double before it is timed; what is printed is
// its best time of several, as a share of the peak that a loop in registers reaches on the spot. With OpenBLAS
// installed, make build/matmul_blas && build/matmul_blas compares the last rung with it at the model's shapes.
#include "dev/bench/measure.h"  // clock, peak
#define TESTING
#include "train_rdattnres_cpu.cpp"
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef WITH_OPENBLAS
#include <cblas.h>
extern "C" void openblas_set_num_threads(int);
#endif
using namespace cpu;

struct Product {
  size_t M, N, K;
  const float *x, *w;
  float* out;
};

// Rung 0: the definition. Each sum is one chain of additions, each waiting for the last; nothing vectorises,
// because reordering a sum changes its rounding and the compiler may not do that.
static void plain(const Product& p) {
  for (size_t i = 0; i < p.M; i++)
    for (size_t j = 0; j < p.N; j++) {
      float sum = 0;
      for (size_t k = 0; k < p.K; k++) sum += p.x[i * p.K + k] * p.w[j * p.K + k];
      p.out[i * p.N + j] = sum;
    }
}

// Rung 1: reorder. With j innermost the sums of a whole row of out grow side by side, and side by side is what
// vectors do. It takes w with j innermost in memory too: a transposed copy, (K,N).
static std::vector<float> transposed(const Product& p) {
  std::vector<float> wt(p.K * p.N);
  for (size_t j = 0; j < p.N; j++)
    for (size_t k = 0; k < p.K; k++) wt[k * p.N + j] = p.w[j * p.K + k];
  return wt;
}
static void reordered(const Product& p) {
  const std::vector<float> wt = transposed(p);
  std::fill(p.out, p.out + p.M * p.N, 0.0f);
  for (size_t i = 0; i < p.M; i++)
    for (size_t k = 0; k < p.K; k++)
      for (size_t j = 0; j < p.N; j++) p.out[i * p.N + j] += p.x[i * p.K + k] * wt[k * p.N + j];
}

// Rung 2: block. The rung before walks through all of w for every row of x. A few rows of w that fit the cache
// are used for all rows of x before the next are fetched. It buys little where the third-level cache holds w
// and is fast: every multiply-add still loads its sum and stores it again, and that is the limit now.
static void blocked(const Product& p) {
  constexpr size_t K_BLOCK = 16;
  const std::vector<float> wt = transposed(p);
  std::fill(p.out, p.out + p.M * p.N, 0.0f);
  for (size_t k0 = 0; k0 < p.K; k0 += K_BLOCK)
    for (size_t i = 0; i < p.M; i++)
      for (size_t k = k0; k < std::min(k0 + K_BLOCK, p.K); k++)
        for (size_t j = 0; j < p.N; j++) p.out[i * p.N + j] += p.x[i * p.K + k] * wt[k * p.N + j];
}

// Rung 3: keep the sums in registers. Until now every multiply-add loads and stores its sum. A tile of MR rows
// by two vectors holds MR * 2 vector sums in registers for the whole of k; each step loads two vectors of w and
// MR numbers of x for MR * 2 vector multiply-adds. It is the trainer's matmul_tile, on the unpacked copy of w.
static void tile_unpacked(float* out, size_t ldo, const float* x, size_t K, const float* wt, size_t N) {
  vec sum[MR][2] = {};
  for (size_t k = 0; k < K; k++, wt += N) {
    const vec w0 = *reinterpret_cast<const vec*>(wt), w1 = *reinterpret_cast<const vec*>(wt + LANES);
#pragma GCC unroll 8
    for (size_t i = 0; i < MR; i++) sum[i][0] += x[i * K + k] * w0, sum[i][1] += x[i * K + k] * w1;
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < MR; i++) {
    *reinterpret_cast<vec*>(out + i * ldo) = sum[i][0];
    *reinterpret_cast<vec*>(out + i * ldo + LANES) = sum[i][1];
  }
}
// What no whole tile covers, one element after the other in the same order of k.
static void rest(const Product& p, size_t rows_done, size_t columns_done) {
  for (size_t i = 0; i < p.M; i++)
    for (size_t j = i < rows_done ? columns_done : 0; j < p.N; j++) {
      float sum = 0;
      for (size_t k = 0; k < p.K; k++) sum += p.x[i * p.K + k] * p.w[j * p.K + k];
      p.out[i * p.N + j] = sum;
    }
}
static void register_tile(const Product& p) {
  const std::vector<float> wt = transposed(p);
  const size_t rows = p.M / MR * MR, columns = p.N / NR * NR;
  for (size_t i = 0; i < rows; i += MR)
    for (size_t j = 0; j < columns; j += NR)
      tile_unpacked(p.out + i * p.N + j, p.N, p.x + i * p.K, p.K, &wt[j], p.N);
  rest(p, rows, columns);
}

// Rung 4: pack. A step in k jumped a whole row of w: a new cache line and soon a new page each time. Panels of
// NR columns, made once, put what a tile reads side by side; transposing in small blocks makes them cheaply.
static void packed(const Product& p) {
  std::vector<float> panels((p.N + NR - 1) / NR * NR * p.K);
  for (size_t j = 0; j < p.N; j += NR) pack_panel<NR>(&panels[j * p.K], {p.w + j * p.K, p.K}, p.N - j, p.K);
  const size_t rows = p.M / MR * MR, columns = p.N / NR * NR;
  for (size_t i = 0; i < rows; i += MR)
    for (size_t j = 0; j < columns; j += NR)
      matmul_tile({p.out + i * p.N + j, p.N}, {p.x + i * p.K, p.K}, &panels[j * p.K], p.K, overwrite);
  rest(p, rows, columns);
}

// Rung 5: the trainer's. The loops around the tile are cut so that a panel of x stays in the first cache,
// panels of w in the second, all that is packed in the third; edges run the same tile; blocks of tiles go to
// threads.
static void trainers(const Product& p) { matmul_forward({p.out, p.N}, p.x, p.w, p.M, p.K, p.N); }

static void use_threads(int n) {
#ifdef _OPENMP
  omp_set_num_threads(n);
#else
  (void)n;
#endif
}
static int all_threads() {
#ifdef _OPENMP
  return omp_get_num_procs();
#else
  return 1;
#endif
}

// Largest error against sums in double, over what rounding alone may do: K roundings of a sum of this size.
static double error_of(const Product& p) {
  double worst = 0;
  for (size_t n = 0; n < 2000; n++) {
    const size_t i = size_t(uniform(3, 0, n) * double(p.M)), j = size_t(uniform(3, 1, n) * double(p.N));
    double exact = 0, size = 0;
    for (size_t k = 0; k < p.K; k++) {
      const double term = double(p.x[i * p.K + k]) * double(p.w[j * p.K + k]);
      exact += term, size += std::fabs(term);
    }
    worst = std::max(worst, std::fabs(double(p.out[i * p.N + j]) - exact) / (size * double(p.K) * 0x1p-24));
  }
  return worst;
}

static double best_seconds(void (*rung)(const Product&), const Product& p) {
  double best = INFINITY, total = 0;
  for (int run = 0; run < 3 || (total < 0.5 && run < 50); run++) {
    const double start = measure::seconds_now();
    rung(p);
    const double seconds = measure::seconds_now() - start;
    best = std::min(best, seconds), total += seconds;
  }
  return best;
}

static std::vector<float> random_numbers(size_t n, uint64_t stream) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; i++) values[i] = float(uniform(1, stream, i) - 0.5);
  return values;
}

static int ladder(size_t M, size_t N, size_t K) {
  const std::vector<float> x = random_numbers(M * K, 0), w = random_numbers(N * K, 1);
  std::vector<float> out(M * N);
  const Product p = {M, N, K, x.data(), w.data(), out.data()};
  const double flops = 2.0 * double(M) * double(N) * double(K);
  const struct {
    const char* name;
    void (*run)(const Product&);
    int threads;
  } rungs[] = {{"0 plain", plain, 1},
               {"1 reordered", reordered, 1},
               {"2 blocked", blocked, 1},
               {"3 register tile", register_tile, 1},
               {"4 packed", packed, 1},
               {"5 the trainer's", trainers, 1},
               {"  with threads", trainers, all_threads()}};
  printf("out (%zu,%zu) = x (%zu,%zu) w^T   tile %zu x %zu\n\n", M, N, M, K, MR, NR);
  printf("%-16s %7s %10s %9s %9s\n", "rung", "threads", "ms", "GFLOP/s", "of peak");
  for (const auto& rung : rungs) {
    use_threads(rung.threads);
    const double peak = measure::peak_flops();
    std::fill(out.begin(), out.end(), NAN);
    rung.run(p);
    const double error = error_of(p);
    if (!(error <= 1)) {
      printf("%s: wrong, error is %.3g times what rounding allows\n", rung.name, error);
      return 1;
    }
    const double seconds = best_seconds(rung.run, p);
    printf("%-16s %7d %10.2f %9.1f %8.0f%%\n", rung.name, rung.threads, seconds * 1e3, flops / seconds / 1e9,
           100 * flops / seconds / peak);
    fflush(stdout);
  }
  return 0;
}

#ifdef WITH_OPENBLAS
// Forward, input gradient and weight gradient of the model's layers, both libraries by turns, best of each.
static void against_openblas(int threads) {
  const size_t layers[][3] = {// rows, inputs, outputs
                              {256, 128, 384},   {2048, 128, 640},  {2048, 640, 128},  {1024, 256, 768},
                              {1024, 256, 1280}, {256, 576, 576},   {256, 576, 1152},  {1024, 576, 1152},
                              {1024, 576, 2880}, {1024, 2880, 576}, {4096, 576, 576},  {1024, 832, 4160},
                              {512, 2880, 2880}, {256, 576, 32768}, {256, 576, 50257}, {256, 128, 257}};
  use_threads(threads), openblas_set_num_threads(threads);
  const double peak = measure::peak_flops();
  double logs = 0, lowest = INFINITY;
  size_t count = 0;
  printf("\n%d thread%s, peak %.0f GFLOP/s\n", threads, threads > 1 ? "s" : "", peak / 1e9);
  printf("%-9s %5s %6s %6s %9s %9s %9s %7s\n", "product", "M", "N", "K", "GFLOP/s", "of peak", "OpenBLAS",
         "ratio");
  for (const auto& layer : layers)
    for (const int kind : {0, 1, 2}) {
      const size_t BT = layer[0], IC = layer[1], OC = layer[2];
      const bool trans_a = kind == 2, trans_b = kind == 0;
      const size_t M = kind == 2 ? OC : BT, N = kind == 0 ? OC : IC, K = kind == 0 ? IC : kind == 1 ? OC : BT;
      const size_t lda = trans_a ? M : K, ldb = trans_b ? K : N;
      const std::vector<float> a = random_numbers(M * K, 0), b = random_numbers(K * N, 1);
      std::vector<float> out(M * N), blas_out(M * N);
      const double flops = 2.0 * double(M) * double(N) * double(K);
      double ours = INFINITY, blas = INFINITY, total = 0;
      for (int run = 0; run < 5 || (total < 0.6 && run < 200); run++) {
        const double start = measure::seconds_now();
        matmul({out.data(), N}, a_view, b_view, M, N, K, trans_a ? accumulate : overwrite);
        const double middle = measure::seconds_now();
        cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans,
                    int(M), int(N), int(K), 1, a.data(), int(lda), b.data(), int(ldb), trans_a, blas_out.data(),
                    int(N));
        const double end = measure::seconds_now();
        ours = std::min(ours, middle - start), blas = std::min(blas, end - middle), total += end - start;
      }
      const char* names[] = {"forward", "d input", "d weight"};
      printf("%-9s %5zu %6zu %6zu %9.1f %8.0f%% %9.1f %7.2f\n", names[kind], M, N, K, flops / ours / 1e9,
             100 * flops / ours / peak, flops / blas / 1e9, blas / ours);
      fflush(stdout);
      logs += std::log(blas / ours), lowest = std::min(lowest, blas / ours), count++;
    }
  printf("geometric mean %.3f, lowest %.2f\n", std::exp(logs / double(count)), lowest);
}
#endif

int main(int argc, char** argv) {
  size_t sizes[] = {1024, 576, 576};
  for (int i = 1; i < argc && i <= 3; i++) sizes[i - 1] = size_t(strtoull(argv[i], nullptr, 10));
  if (argc > 4 || !sizes[0] || !sizes[1] || !sizes[2])
    fatal(EXIT_USAGE, "expected: matmul M N K, three sizes above 0, or nothing");
  const int status = ladder(sizes[0], sizes[1], sizes[2]);
#ifdef WITH_OPENBLAS
  against_openblas(1);
  if (all_threads() > 1) against_openblas(all_threads());
#endif
  return status;
}
