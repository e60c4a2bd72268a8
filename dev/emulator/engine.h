// engine.h - what the emulator's own files share; programs never see it.
#pragma once
#include <vector>

#include "emulator.h"

namespace emu {
constexpr int FAILED = 86;                              // exit status of fail()
constexpr size_t MAX_THREADS = 1024, MAX_PARAMETERS = 4096;
constexpr size_t MAX_SHARED = 163 * 1024, GAP = 1024;   // an A100's; a gap lies before and behind it
constexpr size_t PAGE = 4096, STACK = 64 * PAGE, GUARD = 16 * PAGE;  // of a thread

enum class State { ready, at_barrier, at_warp_op, left };
struct Copy { void* to; const void* from; int group; };  // a cp.async that has not landed yet

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
struct Warp { unsigned exists, arrived; };  // lanes
struct Engine : Block {                     // one per core; runs one block at a time
  const Launch* launch = nullptr;
  uint64_t launch_number = 0;
  Fiber host, fibers[MAX_THREADS], *running = nullptr;
  Warp warps[MAX_THREADS / 32];
  std::vector<Fiber*> ready;  // ready[first..]
  size_t first = 0;
  int n = 0, left = 0, at_barrier = 0;  // threads in the block; of these gone; of these in __syncthreads
  char* stacks = nullptr;
  char* shared_room = nullptr;  // dynamic shared memory between two gaps
  char* tls = nullptr;          // where __shared__ variables live
  size_t tls_bytes = 0;
  uint64_t random = 1;
  alignas(16) char parameters[MAX_PARAMETERS];  // the kernel's, each thread copies them
};
extern EMU_PER_CORE Engine* engine;

// host.cpp
unsigned random_below(unsigned n);
std::string source_line(const void* caller);
std::string source_line(Site);
std::string source_line(Site, const void* caller);
void* reserve(size_t bytes);
void parallel_for(size_t n, const std::function<void(size_t)>& f);  // f(0) .. f(n - 1), on all cores
// tensor.cpp
void commit_copies();
void land_copies(int groups_in_flight);
// runtime.cpp
struct DeviceAccess { DeviceAccess(); ~DeviceAccess(); };  // while one lives, device memory may be touched
void check_device(const char* what, const void* p, size_t bytes);  // fails unless within one allocation
std::string describe(const void* p);  // ", byte 20 of 16 allocated at ...", or nothing
void object_made(const void*, const char* what, Site);  // objects that must not outlive the program
void object_gone(const void*, const char* what);

// race.cpp
#if defined(EMU_RACE)
void* race_alloc(size_t bytes);
void race_free(void*, size_t bytes);
char* race_shared_room();
void race_shared(size_t bytes);  // so much of the room is in use
void race_window(bool open);
void race_block_begin(), race_block_end();
void race_launch_end(const std::string& kernel);
void race_sync(int warp);  // -1: the whole block
#else
inline void race_shared(size_t) {}
inline void race_block_begin() {}
inline void race_block_end() {}
inline void race_launch_end(const std::string&) {}
inline void race_sync(int) {}
#endif
}  // namespace emu
