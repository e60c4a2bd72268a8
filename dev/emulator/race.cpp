// race.cpp - the memory check of the race build.
//
// With -fsanitize=thread the compiler puts a call of __tsan_readN or __tsan_writeN before every access to
// memory. The sanitizer's own library is not linked: the calls are answered here, by someone who knows what a
// block and a barrier are. Every two bytes of device and shared memory have a cell that remembers who wrote
// them and who read them last, and when: a clock ticks at each barrier, block and launch. Two accesses to the
// same bytes, one of them a write, by different threads, are a race unless a tick that orders the two lies in
// between.
#include "engine.h"
#if !defined(EMU_RACE)
namespace emu {
void count_traffic(bool) {}
Traffic traffic(const std::string&) { return {}; }
}  // namespace emu
#else
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <unordered_map>

namespace emu {

struct Mark {  // one access; pc: see program_counter
  uint64_t time : 30, pc : 24, thread : 10;
};
struct Cell {
  Mark write, read[2];
};
// Values of write.time: nothing is allocated here; allocated, never written; written by the host; a kernel's.
constexpr uint32_t NOTHING = 0, UNWRITTEN = 1, HOST = 2, FIRST = 3, LAST = (1u << 30) - 1;

constexpr size_t ARENA = size_t(1) << 36;  // addresses: dynamic shared memory, then device memory, used once
static char* const arena = static_cast<char*>(reserve(ARENA));
static Cell* const cells = static_cast<Cell*>(reserve(ARENA / 2 * sizeof(Cell)));
static size_t used = SHARED_ROOM;
static std::vector<Cell> static_cells;  // for __shared__ variables
static uint32_t now = FIRST, launch_time = FIRST, block_time = FIRST, barrier_time = FIRST, warp_time[32];
static std::vector<std::pair<uint32_t, uint3> > blocks;  // of this launch: when each began
static bool window_open = false, counting = false;
extern "C" char __executable_start, end;  // the linker's

static uint64_t program_counter(const void* p) {  // from the program's start
  return uint64_t(static_cast<const char*>(p) - &__executable_start);
}
static Cell* cell_of(const char* p) {
  if (distance(arena, p) < ARENA) return cells + distance(arena, p) / 2;
  if (self && distance(engine->tls, p) < engine->tls_bytes) return &static_cells[distance(engine->tls, p) / 2];
  return nullptr;
}
static bool is_shared(const void* p) { return distance(arena, p) >= ARENA || distance(arena, p) < SHARED_ROOM; }

// ---- one access ---------------------------------------------------------------------------------------
static bool ordered(Mark a, bool shared) {  // does a barrier order `a` before this thread, now?
  if (a.time < launch_time) return true;
  if (a.time < block_time) return shared;  // another block of the same launch; its shared memory is another one
  return a.time < barrier_time || a.thread == unsigned(self->linear) ||
         (int(a.thread / 32) == self->warp && a.time < warp_time[self->warp]);
}
[[noreturn]] static void report(Mark a, bool wrote, Access access, size_t n, const void* p,
                                const void* caller) {
  char block[60] = "";
  const bool other_block = a.time < block_time;
  for (auto& [time, b] : blocks)
    if (other_block && time <= a.time) snprintf(block, sizeof block, " of block (%u,%u,%u)", b.x, b.y, b.z);
  const char* missing =
      int(a.thread / 32) == self->warp ? "no __syncwarp lies in between" : "no __syncthreads lies in between";
  fail(
      "data race on %zu bytes of %s memory at %p:\n"
      "  thread %d %s at %s\n  thread %u%s %s before, at %s, and %s",
      n, is_shared(p) ? "shared" : "device", p, self->linear, access == Access::read ? "reads" : "writes",
      source_line(caller).c_str(), unsigned(a.thread), block, wrote ? "wrote" : "read",
      source_line(&__executable_start + a.pc).c_str(),
      other_block ? "nothing orders the blocks of a launch" : missing);
}
static void count(const char* p, size_t n, bool write, const void* caller);

static void access_by_host(Cell* c, size_t n, Access access, const void* caller) {
  if (!window_open)
    fail("the host touches device memory at %s: only kernels and cudaMemcpyAsync may",
         source_line(caller).c_str());
  for (size_t i = 0; i < (n + 1) / 2; i++) {
    if (access != Access::read)
      c[i].write = {HOST, 0, 0};
    else if (c[i].write.time == UNWRITTEN)
      fail("a library call reads device memory nobody has written");
  }
}
static void access_by_kernel(Cell* c, const char* p, size_t n, Access access, const void* caller) {
  const bool write = access != Access::read, shared = is_shared(p);
  const char* what = write ? "write" : "read";
  const void* address = p;
  if (!c) {  // besides, a kernel may touch its stack, its parameters and constants
    const bool stack = distance(engine->stacks, p) < MAX_THREADS * (GUARD + STACK);
    const bool index = distance(engine, p) < sizeof(Engine);
    if (stack || index || (p >= &__executable_start && p < &end)) return;
    fail("%s of %zu bytes of host memory (%p) at %s", what, n, address, source_line(caller).c_str());
  }
  if (counting && !shared) count(p, n, write, caller);
  const Mark mark{now, program_counter(caller), uint64_t(self->linear)};
  for (size_t i = 0; i < (n + 1) / 2; i++, c++) {
    const uint32_t written = c->write.time;
    if (written == NOTHING)
      fail("%s of %zu bytes outside any allocation (%p%s) at %s", what, n, address, describe(p).c_str(),
           source_line(caller).c_str());
    if (!write && (written == UNWRITTEN || (shared && written < block_time)))
      fail("read of %s memory nobody has written (yet) (%p) at %s", shared ? "shared" : "device", address,
           source_line(caller).c_str());
    if (!ordered(c->write, shared)) report(c->write, true, access, n, p, caller);
    if (write) {
      for (Mark r : c->read)
        if (!ordered(r, shared)) report(r, false, access, n, p, caller);
      c->write = mark;
      if (access == Access::in_flight) c->write.time = UNWRITTEN;
    } else {  // remember the last readers, two different ones
      if (c->read[0].thread != mark.thread) c->read[1] = c->read[0];
      c->read[0] = mark;
    }
  }
}
void touch(const void* address, size_t n, Access access, const void* caller) {
  if (address == &self) return;  // threadIdx and the like begin with it; it lies among the __shared__ variables
  if (!caller) caller = __builtin_return_address(0);
  const char* p = static_cast<const char*>(address);
  Cell* c = cell_of(p);
  if (self)
    access_by_kernel(c, p, n, access, caller);
  else if (c)
    access_by_host(c, n, access, caller);
}

// ---- device and shared memory -------------------------------------------------------------------------
static void set_cells(const void* p, size_t bytes, uint32_t time) {
  Cell fresh{};
  fresh.write.time = time;
  std::fill_n(cell_of(static_cast<const char*>(p)), (bytes + 1) / 2, fresh);
}
char* shared_room() { return arena; }
void allow_shared(size_t bytes) {
  set_cells(arena, SHARED_ROOM, NOTHING);
  set_cells(arena + GAP, bytes, UNWRITTEN);
}
void* device_alloc(size_t bytes) {
  char* p = arena + used;
  used += (bytes + 511) / 256 * 256;  // at least one byte of nothing between two allocations
  if (used > ARENA) fail("the race check's %zu bytes of addresses are used up", ARENA);
  set_cells(p, bytes, UNWRITTEN);
  return p;
}
static void give_back(void* from, size_t bytes) {  // whole pages; they read as zeros from now on
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from);
  const uintptr_t first = (begin + PAGE - 1) / PAGE * PAGE, last = (begin + bytes) / PAGE * PAGE;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}
void device_free(void* p, size_t bytes) {
  set_cells(p, bytes, NOTHING);
  give_back(p, bytes);
  give_back(cell_of(static_cast<char*>(p)), bytes / 2 * sizeof(Cell));
}

// ---- the clock ----------------------------------------------------------------------------------------
static uint32_t tick() {
  if (++now == LAST) fail("the race check's clock ran out, after %u barriers, blocks and launches", now);
  return now;
}
void race_window(bool open) {
  window_open = open;
  if (!open) return;
  launch_time = tick();
  blocks.clear();
}
void race_block_begin() {
  block_time = barrier_time = tick();
  std::fill_n(warp_time, 32, now);
  blocks.emplace_back(now, engine->index);
  Cell fresh{};
  fresh.write.time = UNWRITTEN;
  static_cells.resize(engine->tls_bytes / 2 + 16, fresh);
}
void race_sync(int warp) { (warp < 0 ? barrier_time : warp_time[warp]) = tick(); }

// ---- traffic: who asked for which bytes of device memory ----------------------------------------------
// Lanes of a warp that execute the same instruction for the same time share a request, and its sectors count
// once, as on the card. Compilers split 16-byte accesses; what follows on what a thread touched is one with it.
static struct {
  uint64_t request;
  uintptr_t end;
} latest[MAX_THREADS];                                       // each thread's last access
static std::unordered_map<uint64_t, uint64_t> times;         // (instruction, thread): how often so far
static std::vector<std::pair<uint64_t, uint64_t> > sectors;  // of this block: (request, sector)
static std::vector<uint64_t> launch_sectors;                 // 2 * sector + is it a write
static std::map<std::string, Traffic> totals;
static Traffic launch_traffic;

static void count(const char* p, size_t n, bool write, const void* caller) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  auto& [request, end] = latest[self->linear];
  const bool same_16_bytes = (address - 1) / 16 == (address + n - 1) / 16;
  const bool continues = address == end && same_16_bytes && (request & 1) == write;
  end = address + n;
  if (continues) return;  // the rest of an access that the compiler split: the same request, the same sector
  const uint64_t pc = program_counter(caller) & 0xFFFFFF, time = times[pc << 10 | uint64_t(self->linear)]++;
  request = pc << 40 | (time & 0xFFFFFFFF) << 8 | uint64_t(self->warp) << 1 | write;
  for (uint64_t s = address / 32; s <= (end - 1) / 32; s++) sectors.emplace_back(request, s);
}
template <class T>
static void sort_unique(std::vector<T>& v) {
  std::sort(v.begin(), v.end());
  v.erase(std::unique(v.begin(), v.end()), v.end());
}
void race_block_end() {
  if (!counting) return;
  sort_unique(sectors);
  launch_traffic.sectors += sectors.size();
  uint64_t last = ~uint64_t(0);
  for (auto& [request, sector] : sectors) {
    launch_traffic.requests += request != last;
    last = request;
    launch_sectors.push_back(2 * sector | (request & 1));
  }
  sectors.clear();
  times.clear();
  for (auto& l : latest) l = {};
}
static void add(Traffic& sum, const Traffic& t) {
  sum.launches += t.launches;
  sum.requests += t.requests;
  sum.sectors += t.sectors;
  sum.distinct += t.distinct;
}
void race_launch_end(const std::string& kernel) {
  if (!counting) return;
  sort_unique(launch_sectors);
  launch_traffic.distinct = launch_sectors.size();
  launch_traffic.launches = 1;
  add(totals[kernel.substr(0, kernel.find('<'))], launch_traffic);
  launch_traffic = {};
  launch_sectors.clear();
}
void count_traffic(bool on) {
  if (on) totals.clear();
  counting = on;
}
Traffic traffic(const std::string& wanted) {
  Traffic sum;
  for (const auto& [kernel, t] : totals)
    if (wanted.empty() || wanted == kernel) add(sum, t);
  return sum;
}

// ---- what the compiler calls --------------------------------------------------------------------------
static void hook(const void* p, size_t n, Access access, const void* caller) {
  if (self && reinterpret_cast<uintptr_t>(p) % n)
    fail("misaligned access of %zu bytes (%p) at %s", n, p, source_line(caller).c_str());
  touch(p, n, access, caller);
}
}  // namespace emu

#define CALLER __builtin_return_address(0)
#define HOOKS(n)                                                                          \
  extern "C" void __tsan_read##n(void* p) { emu::hook(p, n, emu::Access::read, CALLER); } \
  extern "C" void __tsan_write##n(void* p) { emu::hook(p, n, emu::Access::write, CALLER); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" {
void __tsan_read_range(void* p, size_t n) { emu::touch(p, n, emu::Access::read, CALLER); }
void __tsan_write_range(void* p, size_t n) { emu::touch(p, n, emu::Access::write, CALLER); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
// Atomics are the host's: counts of shared pointers, guards of static variables.
int __tsan_atomic32_load(const int* p, int) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
uint8_t __tsan_atomic8_load(const uint8_t* p, int) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
int __tsan_atomic32_fetch_add(int* p, int n, int) { return __atomic_fetch_add(p, n, __ATOMIC_ACQ_REL); }
}
#endif
