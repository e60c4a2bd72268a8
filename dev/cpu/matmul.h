// matmul.h - the CPU's matrix product, as fast as the machine, and the two loops over numbers that compilers do
// not vectorise by themselves: what cuBLAS and the hardware are to the other trainer. dev/cpu/README.md climbs
// to it.
//
// Included by train_rdattnres_cpu.cpp, which says what `real` is: float, or double in tests. Hence no #pragma
// once.
//
// Three ideas make it fast, and the ladder in matmul.cpp takes them one by one:
//   - a tile of MR x NR sums stays in vector registers while k runs: MR * 2 multiply-adds for MR + 2 loads;
//   - B is packed into panels of NR columns, the NR numbers of each k side by side, so that the inner loop
//     reads straight ahead. A is read where it is, unless a step in k is a jump: then panels of MR rows are
//     packed as well. Packing absorbs every transpose;
//   - k is cut so that a panel of A stays in the first-level cache and one of B in the second, M and N so that
//     all that is packed stays in the third.
// Every element is summed in the same order whatever the number of rows or threads: a tile at the edge is the
// same tile on zero-padded panels.
namespace CPU_NAMESPACE {

using real = REAL;

// ---- views ---------------------------------------------------------------------------------------------

// A matrix to read: element (i, j) is data[i * row + j * column]. {x, C} has rows C apart.
struct View {
  const real* data;
  size_t row;
  size_t column = 1;
};

// The transpose of a matrix whose rows are stored `apart` numbers apart.
inline View transposed(const real* data, size_t apart) { return {data, 1, apart}; }

// A matrix to write: row i begins at data + i * row.
struct Rows {
  real* data;
  size_t row;
};

enum Write { overwrite, accumulate };  // out = A B, or out += A B

// ---- the register tile ---------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr size_t VECTOR_BYTES = 64;
constexpr size_t REGISTERS = 32;
#elif defined(__AVX__)
constexpr size_t VECTOR_BYTES = 32;
constexpr size_t REGISTERS = 16;
#elif defined(__aarch64__)
constexpr size_t VECTOR_BYTES = 16;
constexpr size_t REGISTERS = 32;
#else
constexpr size_t VECTOR_BYTES = 16;
constexpr size_t REGISTERS = 16;
#endif
typedef real vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));
constexpr size_t LANES = VECTOR_BYTES / sizeof(real);

constexpr size_t MR = REGISTERS == 32 ? 8 : 6;  // rows of a tile
constexpr size_t NR = 2 * LANES;                // columns of a tile
constexpr size_t KC = 576;                      // longest panel
constexpr size_t MT = 64 / MR * MR;             // rows and columns that one thread takes at a time
constexpr size_t NT = 128 / NR * NR;
constexpr size_t MB = 1536 / MT * MT;  // rows and columns that are packed at a time
constexpr size_t NB = 1536 / NT * NT;

// out (MR,NR) = A (MR,K) B (K,NR), or +=. B is a packed panel.
// Not inlined: on its own, the compiler keeps all sums in registers and nothing else.
__attribute__((noinline)) inline void matmul_tile(Rows out, View a, const real* b, size_t K, Write write) {
  vec sum[MR][2] = {};
  for (size_t k = 0; k < K; k++, a.data += a.column, b += NR) {
    const vec b0 = *reinterpret_cast<const vec*>(b);
    const vec b1 = *reinterpret_cast<const vec*>(b + LANES);
#pragma GCC unroll 8
    for (size_t i = 0; i < MR; i++) {
      sum[i][0] += a.data[i * a.row] * b0;
      sum[i][1] += a.data[i * a.row] * b1;
    }
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < MR; i++, out.data += out.row) {
    vec* out0 = reinterpret_cast<vec*>(out.data);
    vec* out1 = reinterpret_cast<vec*>(out.data + LANES);
    *out0 = write == accumulate ? *out0 + sum[i][0] : sum[i][0];
    *out1 = write == accumulate ? *out1 + sum[i][1] : sum[i][1];
  }
}

// The same where only m x n of the tile may lie inside the matrix.
inline void matmul_edge(Rows out, size_t m, size_t n, View a, const real* b, size_t K, Write write) {
  if (m >= MR && n >= NR) return matmul_tile(out, a, b, K, write);

  real whole[MR * NR];
  matmul_tile({whole, NR}, a, b, K, overwrite);
  for (size_t i = 0; i < std::min(m, MR); i++)
    for (size_t j = 0; j < std::min(n, NR); j++) {
      real* sum = out.data + i * out.row + j;
      *sum = (write == accumulate ? *sum : 0) + whole[i * NR + j];
    }
}

// Asks for the place of a tile, so that it has come from memory when the sums are ready.
inline void prefetch_tile(Rows out, size_t m) {
  for (size_t i = 0; i < std::min(m, MR); i++)
    for (size_t j = 0; j < NR; j += 64 / sizeof(real)) __builtin_prefetch(out.data + i * out.row + j, 1);
}

// ---- panels --------------------------------------------------------------------------------------------

// panel[k][w] = element (w, k) of a matrix, for w < W; rows past n are zero.
template <size_t W>
void pack_panel(real* panel, View a, size_t n, size_t K) {
  constexpr size_t GROUP = W % 8 ? W : 8;
  constexpr size_t DEPTH = 16;
  size_t k = 0;
  if (n >= W && a.row == 1) {
    for (; k < K; k++) memcpy(panel + k * W, a.data + k * a.column, W * sizeof(real));
  } else if (n >= W && a.column == 1) {  // transpose in blocks that compilers can shuffle in registers
    for (; k + DEPTH <= K; k += DEPTH)
      for (size_t g = 0; g < W; g += GROUP) {
        real block[DEPTH][GROUP];
        for (size_t d = 0; d < DEPTH; d++)
          for (size_t w = 0; w < GROUP; w++) block[d][w] = a.data[(g + w) * a.row + k + d];
        for (size_t d = 0; d < DEPTH; d++) memcpy(panel + (k + d) * W + g, block[d], sizeof(block[d]));
      }
  }
  for (; k < K; k++)
    for (size_t w = 0; w < W; w++) panel[k * W + w] = w < n ? a.data[w * a.row + k * a.column] : 0;
}

// The panel of columns j .. j + NR - 1 of B.
inline void pack_columns(real* panel, View b, size_t j, size_t n, size_t K) {
  pack_panel<NR>(panel, {b.data + j * b.column, b.column, b.row}, n - j, K);
}

// K in even pieces no longer than KC.
inline size_t piece_of(size_t K) {
  const size_t pieces = std::max<size_t>(1, (K + KC - 1) / KC);
  return (K + pieces - 1) / pieces;
}

// ---- the product ---------------------------------------------------------------------------------------

// out (M,N) = A (M,K) B (K,N), or +=, by all threads.
inline void matmul(Rows out, View a, View b, size_t M, size_t N, size_t K, Write write = overwrite) {
  alignas(64) static real packed_a[MB * KC];
  alignas(64) static real packed_b[NB * KC];
  const size_t longest = piece_of(K);
#pragma omp parallel
  for (size_t m0 = 0; m0 < M; m0 += MB)
    for (size_t n0 = 0; n0 < N; n0 += NB)
      for (size_t k0 = 0; k0 < K; k0 += longest) {
        const size_t m = std::min(MB, M - m0);
        const size_t n = std::min(NB, N - n0);
        const size_t k = std::min(longest, K - k0);
        const View a0 = {a.data + m0 * a.row + k0 * a.column, a.row, a.column};
        const View b0 = {b.data + k0 * b.row + n0 * b.column, b.row, b.column};
        const Write how = k0 > 0 ? accumulate : write;
        const size_t in_place = a.column == 1 ? m / MR * MR : 0;  // rows of A that are not packed

#pragma omp for nowait
        for (size_t i = in_place; i < m; i += MR)
          pack_panel<MR>(packed_a + i * k, {a0.data + i * a.row, a.row, a.column}, m - i, k);
#pragma omp for
        for (size_t j = 0; j < n; j += NR) pack_columns(packed_b + j * k, b0, j, n, k);

#pragma omp for collapse(2) schedule(dynamic)
        for (size_t i0 = 0; i0 < m; i0 += MT)
          for (size_t j0 = 0; j0 < n; j0 += NT)
            for (size_t i = i0; i < std::min(m, i0 + MT); i += MR)
              for (size_t j = j0; j < std::min(n, j0 + NT); j += NR) {
                const Rows tile = {out.data + (m0 + i) * out.row + n0 + j, out.row};
                prefetch_tile(tile, m - i);
                const View rows =
                    i < in_place ? View{a0.data + i * a.row, a.row} : View{packed_a + i * k, 1, MR};
                matmul_edge(tile, m - i, n - j, rows, packed_b + j * k, k, how);
              }
      }
}

// The same on the calling thread, for small products inside a loop that threads share already. A is read where
// it is, so its steps in k should be short.
inline void matmul_on_this_thread(Rows out, View a, View b, size_t M, size_t N, size_t K,
                                  Write write = overwrite) {
  alignas(64) static thread_local real packed_a[MR * KC];
  alignas(64) static thread_local real packed_b[NT * KC];
  const size_t longest = piece_of(K);
  for (size_t n0 = 0; n0 < N; n0 += NT)
    for (size_t k0 = 0; k0 < K; k0 += longest) {
      const size_t n = std::min(NT, N - n0);
      const size_t k = std::min(longest, K - k0);
      const View b0 = {b.data + k0 * b.row + n0 * b.column, b.row, b.column};
      for (size_t j = 0; j < n; j += NR) pack_columns(packed_b + j * k, b0, j, n, k);

      for (size_t i = 0; i < M; i += MR) {
        View rows = {a.data + i * a.row + k0 * a.column, a.row, a.column};
        if (M - i < MR) {  // the last rows: a panel with zeros below them
          pack_panel<MR>(packed_a, rows, M - i, k);
          rows = {packed_a, 1, MR};
        }
        for (size_t j = 0; j < n; j += NR)
          matmul_edge({out.data + i * out.row + n0 + j, out.row}, M - i, n - j, rows, packed_b + j * k, k,
                      k0 > 0 ? accumulate : write);
      }
    }
}

// ---- loops over numbers --------------------------------------------------------------------------------

inline real dot(const real* a, const real* b, size_t n) {
  real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

inline void add(real* out, const real* a, size_t n) {  // out += a
#pragma omp parallel for simd
  for (size_t i = 0; i < n; i++) out[i] += a[i];
}

// e^x to about one unit in the last place (1.2 where there is no fused multiply-add), in operations that
// compilers vectorise (std::exp is a call for every number). x = n ln 2 + r with |r| <= ln 2 / 2, so
// e^x = 2^n e^r: a polynomial for e^r, and 2^n put together from its bits, as two factors so that results near
// zero and infinity come out right.
inline real exponential(real x) {
  if constexpr (sizeof(real) != sizeof(float)) return std::exp(x);

  float y = float(x);
  y = y < -104.0f ? -104.0f : y;  // e^-104 rounds to zero, e^89 to infinity; NaN fails both tests and stays
  y = y > 89.0f ? 89.0f : y;

  const float shift = 12582912.0f;  // 1.5 * 2^23: added, it rounds to an integer and leaves it in the low bits
  const float shifted = y * 1.44269504f + shift;
  const float n = shifted - shift;
  const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact times n
  float e = 0.0013814465f;
  for (float c : {0.008368781f, 0.041668393f, 0.1666652f, 0.49999994f, 1.0f, 1.0f}) e = e * r + c;

  int32_t exponent;
  memcpy(&exponent, &shifted, sizeof(exponent));
  exponent -= 0x4B400000;  // the bits of `shift`
  const int32_t half = exponent >> 1;
  const int32_t low = int32_t(uint32_t(half + 127) << 23);
  const int32_t high = int32_t(uint32_t(exponent - half + 127) << 23);
  float factor_low, factor_high;
  memcpy(&factor_low, &low, sizeof(low));
  memcpy(&factor_high, &high, sizeof(high));
  return e * factor_low * factor_high;
}

// The largest of x (n). In lanes of its own: compilers must not reorder the maximum of floats by themselves.
inline real maximum(const real* x, size_t n) {
  constexpr size_t WIDE = 64 / sizeof(real);
  real top[WIDE];
  std::fill(top, top + WIDE, real(-INFINITY));
  size_t i = 0;
  for (; i + WIDE <= n; i += WIDE)
    for (size_t lane = 0; lane < WIDE; lane++) top[lane] = x[i + lane] > top[lane] ? x[i + lane] : top[lane];
  for (; i < n; i++) top[0] = x[i] > top[0] ? x[i] : top[0];
  return *std::max_element(top, top + WIDE);
}

}  // namespace CPU_NAMESPACE
