// nccl.h - the calls of NCCL that the trainer makes, played between emulated cards by MPI: through the memory
// of the host, sums in the order of the ranks. EMU_CARDS says how many cards a machine has.
#pragma once
#include <cuda_runtime.h>
#include <mpi.h>

#include <algorithm>
#include <vector>

enum ncclResult_t { ncclSuccess };
enum ncclDataType_t { ncclFloat };
enum ncclRedOp_t { ncclSum };
struct ncclUniqueId {
  char internal[128];
};
struct Cards {
  int size, rank;
};
typedef Cards* ncclComm_t;

inline const char* ncclGetErrorString(ncclResult_t) { return "no error"; }
inline ncclResult_t ncclGetUniqueId(ncclUniqueId*) { return ncclSuccess; }
inline ncclResult_t ncclCommInitRank(ncclComm_t* cards, int size, ncclUniqueId, int rank) {
  *cards = new Cards{size, rank};
  return ncclSuccess;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t cards) {
  delete cards;
  return ncclSuccess;
}
inline ncclResult_t ncclReduceScatter(const void* from, void* to, size_t n, ncclDataType_t, ncclRedOp_t,
                                      ncclComm_t cards, cudaStream_t stream) {
  std::vector<float> mine(n * size_t(cards->size)), parts(mine.size());
  cudaMemcpyAsync(mine.data(), from, mine.size() * sizeof(float), cudaMemcpyDeviceToHost, stream);
  cudaStreamSynchronize(stream);
  MPI_Alltoall(mine.data(), int(n), MPI_FLOAT, parts.data(), int(n), MPI_FLOAT, MPI_COMM_WORLD);
  for (size_t i = n; i < parts.size(); i++) parts[i % n] += parts[i];
  cudaMemcpyAsync(to, parts.data(), n * sizeof(float), cudaMemcpyHostToDevice, stream);
  cudaStreamSynchronize(stream);
  return ncclSuccess;
}
inline ncclResult_t ncclAllGather(const void* from, void* to, size_t n, ncclDataType_t, ncclComm_t cards,
                                  cudaStream_t stream) {
  std::vector<float> mine(n), all(n * size_t(cards->size));
  cudaMemcpyAsync(mine.data(), from, n * sizeof(float), cudaMemcpyDeviceToHost, stream);
  cudaStreamSynchronize(stream);
  MPI_Allgather(mine.data(), int(n), MPI_FLOAT, all.data(), int(n), MPI_FLOAT, MPI_COMM_WORLD);
  cudaMemcpyAsync(to, all.data(), all.size() * sizeof(float), cudaMemcpyHostToDevice, stream);
  cudaStreamSynchronize(stream);
  return ncclSuccess;
}
