// engine.h - what the emulator's own files share; programs never see it.
#pragma once
#include <cstdlib>
#include <functional>
#include <vector>

#include "emulator.h"

namespace emu {
constexpr int FAILED = 86;  // exit status of fail()
constexpr size_t MAX_THREADS = 1024;
constexpr size_t MAX_SHARED = 227 * 1024, GAP = 1024;  // of any card; a gap lies before and behind it
constexpr size_t SHARED_ROOM = GAP + MAX_SHARED + GAP;
constexpr size_t PAGE = 4096, STACK = 64 * PAGE, GUARD = 16 * PAGE;  // of a thread

enum class State { ready, at_barrier, at_warp_op, left };
struct Copy {  // a cp.async that has not landed yet
  void* to;
  const void* from;
  int group;
};
struct Fiber : Thread {
  void* stack_pointer = nullptr;  // while it does not run; null: it never ran
  State state = State::ready;
  const char* op = "";  // what it waits in, where, with which arguments
  Site site{};
  const void* caller = nullptr;
  void* args = nullptr;
  std::vector<Copy> copies;
  int copy_group = 0;
};
struct Warp {
  int arrived;  // lanes that wait in a warp-wide operation; the last of them:
  const Fiber* latest;
};
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
};
extern __thread Engine* engine;
inline size_t distance(const void* from, const void* to) {  // huge if `to` comes before `from`
  return size_t(static_cast<const char*>(to) - static_cast<const char*>(from));
}

// host.cpp
unsigned random_below(unsigned n);
std::string source_line(const void* caller);
std::string source_line(Site);
std::string source_line(Site, const void* caller);
void* reserve(size_t bytes);
void parallel_for(size_t n, const std::function<void(size_t)>& f);  // f(0) .. f(n - 1), on all cores
// tensor.cpp
void land_copies(int groups_in_flight);  // of cp.async, when their wait or the end of the thread comes
void truncated(const std::function<void()>& sums);
// runtime.cpp
extern Api* api;                                    // the call under way
void enqueue(Stream*, std::function<void()> work);  // done at once, or as late as the program allows
void check_device(const char* what, const void* p, size_t bytes);  // fails unless within one allocation
std::string describe(const void* p);  // ", byte 20 of 16 allocated at ...", or nothing

// What the race build checks at each access to memory (race.cpp); the others do not.
enum class Access { read, write, in_flight };  // in_flight: a cp.async is on its way, too early to read
#if defined(EMU_RACE)
void touch(const void* p, size_t bytes, Access, const void* caller = nullptr);
void* device_alloc(size_t bytes);
void device_free(void*, size_t bytes);
char* shared_room();
void allow_shared(size_t bytes);  // of the room; the rest is forbidden
void race_window(bool open);      // device memory is closed to the host, unless a kernel or a library call runs
void race_block_begin();
void race_block_end();
void race_launch_end(const std::string& kernel);
void race_sync(int warp);  // -1: the whole block
#else
inline void touch(const void*, size_t, Access, const void* = nullptr) {}
inline void* device_alloc(size_t bytes) {
  void* p = nullptr;
  return posix_memalign(&p, 256, bytes) ? nullptr : p;
}
inline void device_free(void* p, size_t) { free(p); }
inline char* shared_room() { return static_cast<char*>(device_alloc(SHARED_ROOM)); }
inline void allow_shared(size_t) {}
inline void race_window(bool) {}
inline void race_block_begin() {}
inline void race_block_end() {}
inline void race_launch_end(const std::string&) {}
inline void race_sync(int) {}
#endif
}  // namespace emu
