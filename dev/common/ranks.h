// ranks.h - one model trained by many processes, the ranks: one a card, or a share of a CPU each. With one card
// there is one rank, and nothing here does anything: the first section says all that the trainers use.
//
// Each family of tensors is one flat array, cut into as many shares as there are ranks (ZeRO-1): the sum of the
// ranks' gradients is made share by share, a rank's AdamW changes its own share of the parameters and keeps the
// moments of that share only, then all have the new parameters from one another. MPI=1 builds it: MPI starts
// the processes and carries the CPU's numbers (dev/doc/ranks.md).
#pragma once
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "dev/common/errors.h"  // fatal, warn

struct Ranks {
  size_t rank = 0, size = 1;         // this process, and how many there are
  size_t local = 0, local_size = 1;  // the same among those of this machine
  // Until the run begins, and where all have seen the same trouble, all ranks fail or agree at the same places;
  // after that one alone may fail.
  bool together = true;
  bool silent = false;         // another rank tells of the failure that this one has met too
  std::function<void()> save;  // what all ranks do first when one of them cannot go on
};
inline Ranks ranks;

// ---- shares --------------------------------------------------------------------------------------------
// Sums that must not depend on the number of ranks are made of these chunks, added in order; none is cut.
constexpr size_t SHARE_CHUNK = 1 << 14;

// Elements of a rank's share in a family of n: whole chunks, as many for each rank; with one rank all n. The
// last shares may reach past n, or lie there, so families have room for ranks.size * share_of(n) elements.
inline size_t share_of(size_t n) {
  if (ranks.size == 1) return n;
  const size_t chunks = (n + SHARE_CHUNK - 1) / SHARE_CHUNK;
  return (chunks + ranks.size - 1) / ranks.size * SHARE_CHUNK;
}

// What this rank updates of a family of n: elements first .. end - 1. With one rank, all.
struct Part {
  size_t first, end;
};
inline Part own_part(size_t n) {
  const size_t first = std::min(ranks.rank * share_of(n), n);
  return {first, std::min(first + share_of(n), n)};
}

#ifndef WITH_MPI
constexpr bool MANY_PROCESSES = false;
inline void ranks_open(int*, char***) {}
template <class T>
std::vector<T> gather(const std::vector<T>& mine) {
  return mine;
}
inline std::string broadcast(const std::string& text) { return text; }
template <class T>
void sum_shares(T*, size_t) {}
template <class T>
void gather_shares(T*, size_t) {}
inline void hand_over(float*, size_t, size_t) {}
inline void agree() {}
inline void announce_end() {}
#else
constexpr bool MANY_PROCESSES = true;
#define OMPI_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#include <mpi.h>

#include <unistd.h>

// ---- failing together ----------------------------------------------------------------------------------
// How much each rank has to give; a rank that cannot go on says -1, and all save. Returns the bytes of all.
inline std::vector<int> meet(int bytes) {
  std::vector<int> all(ranks.size);
  MPI_Allgather(&bytes, 1, MPI_INT, all.data(), 1, MPI_INT, MPI_COMM_WORLD);
  const auto failed = std::find(all.begin(), all.end(), -1);
  if (failed == all.end()) return all;
  ranks.silent = size_t(failed - all.begin()) != ranks.rank;
  if (bytes == -1) return all;
  if (ranks.save) ranks.save();
  for (;;) pause();  // that rank says why, and ends all
}
// Called by a rank that cannot go on and is about to save, while the others wait for its numbers.
inline void announce_end() { meet(-1); }

// What every rank has, in the order of the ranks: sizes may differ. For little: the counts are int.
template <class T>
std::vector<T> gather(const std::vector<T>& mine) {
  const std::vector<int> bytes = meet(int(mine.size() * sizeof(T)));
  std::vector<int> starts(ranks.size);
  for (size_t r = 1; r < ranks.size; r++) starts[r] = starts[r - 1] + bytes[r - 1];
  std::vector<T> all(size_t(starts.back() + bytes.back()) / sizeof(T));
  MPI_Allgatherv(mine.data(), bytes[ranks.rank], MPI_BYTE, all.data(), bytes.data(), starts.data(), MPI_BYTE,
                 MPI_COMM_WORLD);
  return all;
}
// Goes on if no rank has failed. Else the lowest that has prints its line, and all end with its exit status.
inline void agree(int exit_code = 0, const std::string& line = "") {
  const std::vector<int> all = gather(std::vector<int>{exit_code});
  for (size_t r = 0; r < ranks.size; r++) {
    if (all[r] == 0) continue;
    if (r == ranks.rank) fputs(line.c_str(), stderr);
    exit(all[r]);
  }
}
// fatal() ends here.
inline void end_ranks(int exit_code, const std::string& line) {
  if (ranks.together) agree(exit_code, line);
  while (ranks.silent) pause();
  fputs(line.c_str(), stderr);
  MPI_Abort(MPI_COMM_WORLD, exit_code);
}

// Call it first. Only rank 0 prints.
inline void ranks_open(int* argc, char*** argv) {
  MPI_Init(argc, argv);
  atexit([] { MPI_Finalize(); });
  MPI_Comm machine;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
  const auto number = [](int (*ask)(MPI_Comm, int*), MPI_Comm those) {
    int n = 0;
    ask(those, &n);
    return size_t(n);
  };
  ranks.rank = number(MPI_Comm_rank, MPI_COMM_WORLD);
  ranks.size = number(MPI_Comm_size, MPI_COMM_WORLD);
  ranks.local = number(MPI_Comm_rank, machine);
  ranks.local_size = number(MPI_Comm_size, machine);
  fatal_ends = end_ranks;
  may_warn = ranks.rank == 0;
  if (ranks.rank > 0 && !freopen("/dev/null", "w", stdout)) fatal(EXIT_ERROR, "/dev/null: cannot open");
}

// ---- moving numbers ------------------------------------------------------------------------------------
inline std::string broadcast(std::string text) {  // rank 0's
  size_t length = text.size();
  MPI_Bcast(&length, sizeof(length), MPI_BYTE, 0, MPI_COMM_WORLD);
  text.resize(length);
  MPI_Bcast(&text[0], int(length), MPI_BYTE, 0, MPI_COMM_WORLD);
  return text;
}
// A chunk of a share: counts of these stay small where counts of numbers would pass 2^31.
template <class T>
MPI_Datatype chunk_type() {
  static MPI_Datatype type = MPI_DATATYPE_NULL;
  if (type == MPI_DATATYPE_NULL) {
    MPI_Type_contiguous(int(SHARE_CHUNK * sizeof(T)), MPI_BYTE, &type);
    MPI_Type_commit(&type);
  }
  return type;
}
// g (ranks.size * share): this rank's share becomes the sum of all ranks' numbers there. They are added here in
// the order of the ranks, a piece at a time, because MPI_Reduce_scatter may add in any order: the same number
// of ranks gives the same bits. The other shares are left as they are.
template <class T>
void sum_shares(T* g, size_t share) {
  if (ranks.size == 1) return;
  constexpr size_t PIECE = 4;  // chunks
  const size_t size = ranks.size, chunks = share / SHARE_CHUNK;
  std::vector<T> parts(size * PIECE * SHARE_CHUNK);
  std::vector<int> counts(size), from(size), to(size);
  for (size_t first = 0; first < chunks; first += PIECE) {
    const size_t piece = std::min(PIECE, chunks - first), n = piece * SHARE_CHUNK;
    for (size_t r = 0; r < size; r++) {
      counts[r] = int(piece);
      from[r] = int(r * chunks + first);
      to[r] = int(r * piece);
    }
    MPI_Alltoallv(g, counts.data(), from.data(), chunk_type<T>(), parts.data(), counts.data(), to.data(),
                  chunk_type<T>(), MPI_COMM_WORLD);
    T* sum = g + ranks.rank * share + first * SHARE_CHUNK;
    std::copy(parts.begin(), parts.begin() + std::ptrdiff_t(n), sum);
    for (size_t r = 1; r < size; r++) {
      const T* part = &parts[r * n];
#pragma omp parallel for simd
      for (size_t i = 0; i < n; i++) sum[i] += part[i];
    }
  }
}
// p (ranks.size * share): every rank gets every other's share.
template <class T>
void gather_shares(T* p, size_t share) {
  if (ranks.size == 1) return;
  MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, p, int(share / SHARE_CHUNK), chunk_type<T>(),
                MPI_COMM_WORLD);
}
inline void hand_over(float* numbers, size_t n, size_t from) {  // to rank 0
  if (ranks.rank == from) MPI_Send(numbers, int(n), MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
  if (ranks.rank == 0) MPI_Recv(numbers, int(n), MPI_FLOAT, int(from), 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}
#endif

// ---- for both ------------------------------------------------------------------------------------------
// Brings elements first .. first + n - 1 of a family to rank 0, for a checkpoint; every rank calls it alike.
// read(at, n, to) copies n elements from element `at` of this rank's share.
template <class Read>
void collect(float* to, size_t first, size_t n, size_t share, Read read) {
  for (size_t r = first / share; r * share < first + n; r++) {
    const size_t begin = std::max(first, r * share), end = std::min(first + n, (r + 1) * share);
    if (ranks.rank == r) read(begin - r * share, end - begin, to + (begin - first));
    if (r > 0) hand_over(to + (begin - first), end - begin, r);
  }
}
// The loss of every token of the ranks' rows, (rows,T) on each, in the order of the ranks. A rank that has none
// left computes one for nothing: the others would not be faster.
template <class Model>
auto all_token_losses(Model& m, const std::vector<int>& tokens, const std::vector<int>& targets, size_t rows) {
  auto losses = token_losses(m, tokens.data(), targets.data(), std::max<size_t>(rows, 1), m.T);
  losses.resize(rows * m.T);
  return gather(losses);
}
// The first text that is not empty, in the order of the ranks.
inline std::string first_text(const std::string& mine) {
  const std::vector<char> all = gather(std::vector<char>(mine.begin(), mine.end()));
  const std::vector<size_t> lengths = gather(std::vector<size_t>{mine.size()});
  const auto length = std::find_if(lengths.begin(), lengths.end(), [](size_t n) { return n > 0; });
  return length == lengths.end() ? "" : std::string(all.data(), *length);
}
