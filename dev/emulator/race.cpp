// race.cpp - the memory check of the race build.
//
// With -fsanitize=thread the compiler puts a call of __tsan_readN or __tsan_writeN before every access to memory. The
// sanitizer's own library is not linked: the calls are answered here, by someone who knows what a block and a barrier
// are. Every two bytes of device and shared memory have a cell that remembers who wrote them and who read them last,
// and when: a clock ticks at each barrier, block and launch. Two accesses to the same bytes, one of them a write, by
// different threads, are a race unless a tick that orders these two threads lies between them.
#if defined(EMU_RACE)
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "engine.h"

namespace emu {

struct Mark { uint64_t time : 29, pc : 24, thread : 10, atomic : 1; };  // one access; pc counts from the program's start
struct Cell { Mark write, read[2]; };
// Values of write.time: nothing is allocated here; allocated, never written; written by the host; later: by a kernel.
constexpr uint32_t NOTHING = 0, UNWRITTEN = 1, HOST = 2, FIRST = 3, LAST = (1u << 29) - 2;

constexpr size_t ARENA = size_t(1) << 36;  // address space for device memory; freed addresses are never used again
static char* const arena = static_cast<char*>(reserve(ARENA));
static Cell* const cells = static_cast<Cell*>(reserve(ARENA / 2 * sizeof(Cell)));
static constexpr size_t SHARED_ROOM = 1 << 20;  // dynamic shared memory lives at the arena's start
static size_t used = SHARED_ROOM;
static std::vector<Cell> static_cells;  // for __shared__ variables
static uint32_t now = FIRST, launch_time = FIRST, block_time = FIRST, barrier_time = FIRST, warp_time[32];
static std::vector<std::pair<uint32_t, uint3>> blocks;  // when each block of this launch began
static bool window_open = false;
extern "C" char __executable_start, etext, edata, end;

struct Place { Cell* cell; bool shared; };
static Place place_of(const char* p) {
  if (size_t(p - arena) < ARENA) return {cells + (p - arena) / 2, size_t(p - arena) < SHARED_ROOM};
  if (self && size_t(p - engine->tls) < engine->tls_bytes) return {&static_cells[size_t(p - engine->tls) / 2], true};
  return {nullptr, false};
}
static bool ordered(Mark a, bool atomic) {
  if (a.time < launch_time || (atomic && a.atomic)) return true;
  if (a.time < block_time) return false;  // another block of the same launch
  return a.time < barrier_time || a.thread == unsigned(self->linear) ||
         (int(a.thread / 32) == self->warp && a.time < warp_time[self->warp]);
}
static const char* address_of(Mark a) { return &__executable_start + a.pc; }
[[noreturn]] static void report(Mark a, bool wrote, bool shared, Access access, size_t n, const char* p, const void* caller) {
  const bool other_block = a.time < block_time;
  uint3 b{};
  for (auto& [time, index] : blocks) if (time <= a.time) b = index;
  char block[60] = "";
  if (other_block) snprintf(block, sizeof block, " of block (%u,%u,%u)", b.x, b.y, b.z);
  fail("data race on %zu bytes of %s memory at %p:\n  thread %d %s at %s\n  thread %u%s %s before, at %s, and %s", n,
       shared ? "shared" : "device", static_cast<const void*>(p), self->linear, access == Access::read ? "reads" : "writes",
       source_line(caller).c_str(), unsigned(a.thread), block, wrote ? "wrote" : "read", source_line(address_of(a)).c_str(),
       other_block ? "nothing orders the blocks of a launch"
       : int(a.thread / 32) == self->warp ? "no __syncwarp lies in between" : "no __syncthreads lies in between");
}
static void count(const char* p, size_t n, bool write, const void* caller);
static bool counting = false;

static void access_by_host(const char* p, size_t n, Cell* c, Access access, const void* caller) {
  if (!window_open)
    fail("the host touches device memory at %s: only kernels and cudaMemcpy may", source_line(caller).c_str());
  for (size_t i = 0; i < (n + 1) / 2; i++, c++) {
    if (access != Access::read) c->write = {HOST, 0, 0, 0};
    else if (c->write.time == UNWRITTEN) fail("a library call reads device memory nobody has written, at offset %zu of the row at %p", 2 * i, static_cast<const void*>(p));
  }
}
static void check(const void* address, size_t n, Access access, const void* caller) {
  const char* p = static_cast<const char*>(address);
  const auto [cell, shared] = place_of(p);
  if (!self) {
    if (cell) access_by_host(p, n, cell, access, caller);
    return;
  }
  const bool read = access == Access::read || access == Access::atomic, write = access != Access::read;
  if (!cell) {  // a kernel may otherwise touch its stack, its parameters and constants
    const bool fine = size_t(p - engine->stacks) < MAX_THREADS * (STACK + PAGE) || size_t(p - reinterpret_cast<char*>(engine)) < sizeof(Engine) ||
                      (p >= &__executable_start && p < &end);
    if (!fine) fail("%s of %zu bytes of host memory (%p) at %s", write ? "write" : "read", n, address, source_line(caller).c_str());
    return;
  }
  if (counting && !shared) count(p, n, write, caller);
  const Mark mark{now, uint64_t(static_cast<const char*>(caller) - &__executable_start), uint64_t(self->linear), access == Access::atomic};
  Cell* c = cell;
  for (size_t i = 0; i < (n + 1) / 2; i++, c++) {
    if (c->write.time == NOTHING)
      fail("%s of %zu bytes outside any allocation (%p%s) at %s", write ? "write" : "read", n, address, describe(p).c_str(), source_line(caller).c_str());
    if (read && (c->write.time == UNWRITTEN || (shared && c->write.time < block_time)))
      fail("read of %s memory nobody has written (yet) (%p) at %s", shared ? "shared" : "device", address, source_line(caller).c_str());
    const bool before = shared && c->write.time < block_time;  // left over from the block before
    if (!before && !ordered(c->write, access == Access::atomic)) report(c->write, true, shared, access, n, p, caller);
    if (write) {
      for (Mark r : c->read)
        if (!(shared && r.time < block_time) && !ordered(r, false)) report(r, false, shared, access, n, p, caller);
      c->write = mark;
      if (access == Access::in_flight) c->write.time = UNWRITTEN;
    } else {
      if (c->read[0].thread != mark.thread) c->read[1] = c->read[0];
      c->read[0] = mark;
    }
  }
}
static void hook(const void* p, size_t n, Access access, const void* caller) {
  if (self && reinterpret_cast<uintptr_t>(p) % n) fail("misaligned access of %zu bytes (%p) at %s", n, p, source_line(caller).c_str());
  check(p, n, access, caller);
}
void touch(const void* p, size_t bytes, Access access, const void* caller) {
  check(p, bytes, access, caller ? caller : __builtin_return_address(0));
}

// ---- device and shared memory -------------------------------------------------------------------------
static Cell* first_cell(const void* p) { return cells + (static_cast<const char*>(p) - arena) / 2; }
static void set_cells(const void* p, size_t bytes, uint32_t time) {
  Cell fresh{};
  fresh.write.time = time;
  std::fill_n(first_cell(p), (bytes + 1) / 2, fresh);
}
void* race_alloc(size_t bytes) {
  char* p = arena + used;
  used += (bytes + 511) / 256 * 256;  // at least one byte of nothing between two allocations
  if (used > ARENA) fail("the race check's %zu bytes of address space are used up", ARENA);
  set_cells(p, bytes, UNWRITTEN);
  return p;
}
void race_free(void* p, size_t bytes) {
  auto drop = [](void* from, size_t n) {  // give the pages back; they read as zeros again
    const uintptr_t a = (reinterpret_cast<uintptr_t>(from) + PAGE - 1) / PAGE * PAGE, b = (reinterpret_cast<uintptr_t>(from) + n) / PAGE * PAGE;
    if (b > a) madvise(reinterpret_cast<void*>(a), b - a, MADV_DONTNEED);
  };
  set_cells(p, bytes, NOTHING);
  drop(p, bytes), drop(first_cell(p), bytes / 2 * sizeof(Cell));
}
char* race_shared_room() { return arena; }
void race_shared(size_t bytes) {
  static size_t before = 0;
  if (bytes > before) set_cells(arena + GAP + before, bytes - before, UNWRITTEN);
  else set_cells(arena + GAP + bytes, before - bytes, NOTHING);
  before = bytes;
}

// ---- the clock ----------------------------------------------------------------------------------------
void race_window(bool open) {  // a launch or a library call begins or ends
  window_open = open;
  if (!open) return;
  if (now > LAST / 2) {  // wind the clock back: whatever happened before this launch happened long ago
    for (size_t i = 0; i < used / 2; i++) {
      if (cells[i].write.time > HOST) cells[i].write.time = HOST;
      cells[i].read[0] = cells[i].read[1] = {};
    }
    static_cells.clear(), now = FIRST;
  }
  launch_time = ++now, blocks.clear();
}
void race_block_begin() {
  block_time = barrier_time = ++now;
  std::fill_n(warp_time, 32, now);
  blocks.emplace_back(now, engine->index);
  Cell fresh{};
  fresh.write.time = UNWRITTEN;
  static_cells.resize(engine->tls_bytes / 2 + 16, fresh);
}
void race_sync(int warp) {
  if (++now == LAST) fail("the race check's clock ran out within one launch");
  (warp < 0 ? barrier_time : warp_time[warp]) = now;
}

// ---- traffic: who asked for which bytes of device memory ----------------------------------------------
// Lanes that execute the same instruction for the same time share a request: the sectors of one request are counted
// once, as on the card. A compiler may split a 16-byte load into pieces; neighbours in order are put together again.
struct Request { uint64_t key; uintptr_t address; uint32_t bytes; };  // key: instruction, count, warp, is it a write
static std::vector<Request> requests;
static std::unordered_map<uint64_t, uint32_t> times;  // (thread, instruction): how often so far
static std::vector<uint64_t> launch_sectors;          // 2 * sector + is it a write
static size_t last_request[MAX_THREADS];              // index + 1
static std::map<std::string, Traffic> totals;
static Traffic launch_traffic;

static void count(const char* p, size_t n, bool write, const void* caller) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  (write ? launch_traffic.bytes_written : launch_traffic.bytes_read) += n;
  size_t& last = last_request[self->linear];
  if (last) {
    Request& r = requests[last - 1];
    if ((r.key & 1) == write && r.address + r.bytes == address && r.address / 16 == address / 16) { r.bytes += uint32_t(n); return; }
  }
  const uint64_t pc = uint64_t(static_cast<const char*>(caller) - &__executable_start) & 0xFFFFFF;
  const uint64_t k = times[pc << 10 | uint64_t(self->linear)]++;
  requests.push_back({pc << 40 | (k & 0xFFFFFFFF) << 8 | uint64_t(self->warp) << 1 | uint64_t(write), address, uint32_t(n)});
  last = requests.size();
}
void race_block_end() {
  if (!counting) return;
  std::vector<std::pair<uint64_t, uint64_t>> sectors;  // (request, sector)
  for (const Request& r : requests)
    for (uint64_t s = r.address / 32; s <= (r.address + r.bytes - 1) / 32; s++) sectors.emplace_back(r.key, s);
  std::sort(sectors.begin(), sectors.end());
  sectors.erase(std::unique(sectors.begin(), sectors.end()), sectors.end());
  for (auto& [key, sector] : sectors) {
    (key & 1 ? launch_traffic.sectors_written : launch_traffic.sectors_read)++;
    launch_sectors.push_back(2 * sector | (key & 1));
  }
  requests.clear(), times.clear();
  std::fill_n(last_request, MAX_THREADS, 0);
}
void race_launch_end(const std::string& kernel) {
  if (!counting) return;
  std::sort(launch_sectors.begin(), launch_sectors.end());
  launch_sectors.erase(std::unique(launch_sectors.begin(), launch_sectors.end()), launch_sectors.end());
  for (uint64_t s : launch_sectors) (s & 1 ? launch_traffic.distinct_written : launch_traffic.distinct_read)++;
  Traffic &t = totals[kernel.substr(0, kernel.find('<'))], &l = launch_traffic;
  t.launches++;
  t.bytes_read += l.bytes_read, t.sectors_read += l.sectors_read, t.distinct_read += l.distinct_read;
  t.bytes_written += l.bytes_written, t.sectors_written += l.sectors_written, t.distinct_written += l.distinct_written;
  launch_traffic = {}, launch_sectors.clear();
}
void count_traffic(bool on) {
  if (on) totals.clear();
  counting = on;
}
Traffic traffic(const std::string& kernel) { return totals[kernel]; }

}  // namespace emu

// ---- what the compiler calls --------------------------------------------------------------------------
#define EMU_HOOK(name, size, access) \
  extern "C" void name(void* p) { emu::hook(p, size, emu::Access::access, __builtin_return_address(0)); }
#define EMU_HOOKS(n) EMU_HOOK(__tsan_read##n, n, read) EMU_HOOK(__tsan_write##n, n, write)
EMU_HOOKS(1) EMU_HOOKS(2) EMU_HOOKS(4) EMU_HOOKS(8) EMU_HOOKS(16)
extern "C" void __tsan_read_range(void* p, size_t n) { emu::check(p, n, emu::Access::read, __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void* p, size_t n) { emu::check(p, n, emu::Access::write, __builtin_return_address(0)); }
#define EMU_ATOMIC_HOOK(bits, name, call)                                                                     \
  extern "C" uint##bits##_t __tsan_atomic##bits##_##name(uint##bits##_t* p, uint##bits##_t v, int) {          \
    emu::check(p, bits / 8, emu::Access::atomic, __builtin_return_address(0));                                \
    return call(p, v, __ATOMIC_SEQ_CST);                                                                      \
  }
#define EMU_ATOMIC_HOOKS(bits)                                                                                \
  EMU_ATOMIC_HOOK(bits, fetch_add, __atomic_fetch_add) EMU_ATOMIC_HOOK(bits, fetch_sub, __atomic_fetch_sub)   \
  EMU_ATOMIC_HOOK(bits, fetch_or, __atomic_fetch_or) EMU_ATOMIC_HOOK(bits, fetch_and, __atomic_fetch_and)     \
  EMU_ATOMIC_HOOK(bits, exchange, __atomic_exchange_n)                                                        \
  extern "C" uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t* p, int) {                        \
    emu::check(p, bits / 8, emu::Access::atomic, __builtin_return_address(0));                                \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                              \
  }                                                                                                           \
  extern "C" void __tsan_atomic##bits##_store(uint##bits##_t* p, uint##bits##_t v, int) {                     \
    emu::check(p, bits / 8, emu::Access::atomic, __builtin_return_address(0));                                \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                                 \
  }                                                                                                           \
  extern "C" int __tsan_atomic##bits##_compare_exchange_strong(uint##bits##_t* p, uint##bits##_t* before, uint##bits##_t v, int, int) { \
    emu::check(p, bits / 8, emu::Access::atomic, __builtin_return_address(0));                                \
    return __atomic_compare_exchange_n(p, before, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);              \
  }                                                                                                           \
  extern "C" int __tsan_atomic##bits##_compare_exchange_weak(uint##bits##_t* p, uint##bits##_t* before, uint##bits##_t v, int, int) { \
    emu::check(p, bits / 8, emu::Access::atomic, __builtin_return_address(0));                                \
    return __atomic_compare_exchange_n(p, before, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);              \
  }
EMU_ATOMIC_HOOKS(8) EMU_ATOMIC_HOOKS(16) EMU_ATOMIC_HOOKS(32) EMU_ATOMIC_HOOKS(64)
extern "C" void __tsan_atomic_thread_fence(int) {}
extern "C" void __tsan_vptr_update(void*, void*) {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

#else
#include "emulator.h"
namespace emu {
void count_traffic(bool) {}
Traffic traffic(const std::string&) { return {}; }
}  // namespace emu
#endif
