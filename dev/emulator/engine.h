// engine.h - what the emulator's own files share; programs never see it.
#pragma once
#include <cstdlib>
#include <functional>
#include <vector>

#include "emulator.h"
#if defined(EMU_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace emu {
constexpr int FAILED = 86;  // exit status of fail()
constexpr size_t MAX_THREADS = 1024, MAX_PARAMETERS = 4096;
constexpr size_t MAX_SHARED = 227 * 1024, GAP = 1024;  // of any card; a gap lies before and behind it
constexpr size_t SHARED_ROOM = GAP + MAX_SHARED + GAP;
constexpr size_t PAGE = 4096, STACK = 64 * PAGE, GUARD = 16 * PAGE;  // of a thread

enum class State { ready, at_barrier, at_warp_op, left };
struct Copy {
  void* to;
  const void* from;
  int group;
};  // a cp.async that has not landed yet

struct Fiber : Thread {
  void* stack_pointer = nullptr;  // while it does not run
  char* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's bookkeeping
  State state = State::ready;
  const char* op = "";  // what it waits in, where, for whom, with which arguments
  Site site{};
  const void* caller = nullptr;
  unsigned mask = 0;
  void* args = nullptr;
  std::vector<Copy> copies;
  int copy_group = 0;
};
struct Warp {
  unsigned exists, arrived;
};                       // lanes
struct Engine : Block {  // one per core; runs one block at a time
  const Launch* launch = nullptr;
  uint64_t launch_number = 0;
  Fiber host, fibers[MAX_THREADS], *running = nullptr;
  Warp warps[MAX_THREADS / 32];
  std::vector<Fiber*> ready;  // ready[first..]
  size_t first = 0;
  int n = 0, left = 0, at_barrier = 0;  // threads in the block; of these gone; of these in __syncthreads
  char* stacks = nullptr;
  char* tls = nullptr;  // where __shared__ variables live
  size_t tls_bytes = 0;
  uint64_t random = 1;
  alignas(16) char parameters[MAX_PARAMETERS];  // the kernel's, each thread copies them
};
extern __thread Engine* engine;
inline size_t distance(const void* from, const void* to) {  // huge if `to` comes before `from`
  return size_t(static_cast<const char*>(to) - static_cast<const char*>(from));
}

// host.cpp
extern Api* api;  // the call under way
unsigned random_below(unsigned n);
std::string source_line(const void* caller);
std::string source_line(Site);
std::string source_line(Site, const void* caller);
void* reserve(size_t bytes);
void parallel_for(size_t n, const std::function<void(size_t)>& f);  // f(0) .. f(n - 1), on all cores
// tensor.cpp
void commit_copies();
void land_copies(int groups_in_flight);
void truncated(const std::function<void()>& sums);
// runtime.cpp
void enqueue(Stream*, std::function<void()> work);  // done at once, or as late as the program allows
void drain(Stream*);                                // do what is queued
void check_device(const char* what, const void* p, size_t bytes);  // fails unless within one allocation
std::string describe(const void* p);  // ", byte 20 of 16 allocated at ...", or nothing

// What checks memory: race.cpp in the race build, AddressSanitizer in the asan build, nobody in the fast one.
#if defined(EMU_RACE)
void* device_alloc(size_t bytes);
void device_free(void*, size_t bytes);
char* shared_room();
void allow(const void*p, size_t bytes), forbid(const void*p, size_t bytes);
void race_window(bool open);
void race_block_begin(), race_block_end();
void race_launch_end(const std::string& kernel);
void race_sync(int warp);  // -1: the whole block
#else
#if defined(EMU_ASAN)
inline void allow(const void* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
inline void forbid(const void* p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
#else
inline void allow(const void*, size_t) {}
inline void forbid(const void*, size_t) {}
#endif
inline void* device_alloc(size_t bytes) {
  void* p = nullptr;
  return posix_memalign(&p, 256, bytes) ? nullptr : p;
}
inline void device_free(void* p, size_t bytes) { allow(p, bytes), free(p); }
inline char* shared_room() { return static_cast<char*>(device_alloc(SHARED_ROOM)); }
inline void race_block_begin() {}
inline void race_block_end() {}
inline void race_launch_end(const std::string&) {}
inline void race_sync(int) {}
#endif
}  // namespace emu
