// engine.cpp - what a GPU does with a kernel: threads, warps, barriers, blocks, a grid.
#include "cuda_runtime.h"
#include "engine.h"

#include <link.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>

namespace emu {

__thread Thread* self = nullptr;
__thread Engine* engine = nullptr;

// ---- switching between fibers -------------------------------------------------------------------------
// emu_switch(&old, new): push what a function must keep for its caller, save the stack pointer in old, take up
// the stack pointer new, pop, return: into another fiber, at the place where that one called emu_switch.
extern "C" void emu_switch(void** save_stack_pointer, void* load_stack_pointer);
constexpr size_t SAVED = 8, RETURN_ADDRESS = 6;  // words on the stack of a fiber that does not run
#if !defined(__x86_64__)
#error "dev/emulator/engine.cpp: write emu_switch for this processor"
#endif
asm(R"(
  .text
  .type emu_switch,@function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
  .size emu_switch,.-emu_switch
)");

static void switch_to(Fiber& to) {
  Fiber& from = *engine->running;
  if (&from == &to) return;
  engine->running = &to;
  self = &to == &engine->host ? nullptr : &to;
  emu_switch(&from.stack_pointer, to.stack_pointer);
}

// ---- who runs next ------------------------------------------------------------------------------------
static std::string place(const Fiber& t) { return source_line(t.site, t.caller); }
static bool same(Site a, Site b) { return a.line == b.line && !strcmp(a.file, b.file); }

[[noreturn]] static void deadlock() {  // group the threads by what they do, then list the groups
  const Engine& e = *engine;
  std::string text;
  for (int i = 0, end; i < e.n; i = end) {
    const Fiber& t = e.fibers[i];
    const bool left = t.state == State::left;
    for (end = i; end < e.n; end++) {
      const Fiber& other = e.fibers[end];
      if (t.state != other.state || (!left && !same(t.site, other.site))) break;
    }
    text += "\n  threads " + std::to_string(i) + ".." + std::to_string(end - 1);
    text += left ? " have left the kernel" : std::string(" wait in ") + t.op + " at " + place(t);
  }
  fail("some threads wait for threads that never come:%s", text.c_str());
}
static void make_ready(Fiber& t) {
  t.state = State::ready;
  engine->ready.push_back(&t);
}
static void schedule() {  // give the CPU to the next thread that can run
  Engine& e = *engine;
  if (e.ready.empty()) {
    if (e.left < e.n) deadlock();
    return switch_to(e.host);
  }
  if (order == Order::forward) {
    Fiber* next = e.ready[e.first++];
    if (e.first == e.ready.size()) {
      e.ready.clear();
      e.first = 0;
    }
    return switch_to(*next);
  }
  if (order == Order::random) std::swap(e.ready[random_below(unsigned(e.ready.size()))], e.ready.back());
  Fiber* next = e.ready.back();
  e.ready.pop_back();
  switch_to(*next);
}
[[noreturn]] static void fiber_main() {
  for (;;) {
    engine->launch->run(engine->launch->call.get());
    land_copies(-1);
    engine->running->state = State::left;
    engine->left++;
    schedule();  // comes back when the next block starts
  }
}
static void make_fiber(Fiber& t, int number) {  // below the stack nothing may be touched: an overflow stops
  char* stack = engine->stacks + size_t(number) * (GUARD + STACK);
  mprotect(stack, GUARD, PROT_NONE);
  // Stacks are staggered, or all of them would fight for the same lines of the cache.
  void** top = reinterpret_cast<void**>(stack + GUARD + STACK - size_t(number) % 16 * 256) - SAVED;
  top[RETURN_ADDRESS] = reinterpret_cast<void*>(&fiber_main);
  t.stack_pointer = top;
}

// ---- barriers and warp-wide operations ----------------------------------------------------------------
static Fiber& arrive_in(const char* op, Site site, State state, const void* caller) {
  if (!self) fail("%s at %s:%d outside any kernel", op, site.file, site.line);
  Fiber& t = *engine->running;
  t.state = state;
  t.op = op;
  t.site = site;
  t.caller = caller;
  return t;
}
static bool left_out(Site site) {  // by EMU_WITHOUT=train.cu:123, which takes the barrier of that line away
  static const char* const without = getenv("EMU_WITHOUT");
  return without && *without && source_line(site) == without;
}
}  // namespace emu
using namespace emu;

void __syncthreads(Site site) {
  if (left_out(site)) return;
  const Fiber& t = arrive_in("__syncthreads", site, State::at_barrier, __builtin_return_address(0));
  Engine& e = *engine;
  if (++e.at_barrier == e.n) {
    e.at_barrier = 0;
    for (int i = 0; i < e.n; i++) {
      if (!same(e.fibers[i].site, site))
        fail("threads meet in different __syncthreads: thread %d at %s, thread %d at %s", i,
             place(e.fibers[i]).c_str(), t.linear, place(t).c_str());
      make_ready(e.fibers[i]);
    }
    race_sync(-1);
  }
  schedule();
}
void __syncwarp(Site site) {
  if (!left_out(site)) meet("__syncwarp", site, nullptr, [](void**) { race_sync(self->warp); });
}
namespace emu {
void meet(const char* op, Site site, void* args, void (*together)(void**)) {
  Fiber& t = arrive_in(op, site, State::at_warp_op, __builtin_return_address(0));
  t.args = args;
  Warp& w = engine->warps[t.warp];
  if (w.arrived && !same(w.latest->site, site))
    fail("lanes of one warp meet in different operations: lane %d in %s at %s, lane %d in %s at %s",
         w.latest->lane, w.latest->op, place(*w.latest).c_str(), t.lane, op, place(t).c_str());
  w.latest = &t;
  if (++w.arrived == 32) {  // the last one to come does the work of all
    w.arrived = 0;
    Fiber* lanes = &engine->fibers[t.warp * 32];
    void* all[32];
    for (int i = 0; i < 32; i++) all[i] = lanes[i].args;
    together(all);
    for (int i = 0; i < 32; i++) make_ready(lanes[i]);
  }
  schedule();
}

// ---- launching ----------------------------------------------------------------------------------------
static void start_engine() {  // once per OS thread
  engine = new Engine;
  engine->running = &engine->host;
  engine->stacks = static_cast<char*>(reserve(MAX_THREADS * (GUARD + STACK)));
  engine->shared = shared_room() + GAP;
  stack_t alternate{};  // where the handler of a crash runs when the stack is full
  alternate.ss_size = 64 * 1024;
  alternate.ss_sp = reserve(alternate.ss_size);
  sigaltstack(&alternate, nullptr);
  // __shared__ means thread_local: all of it lies in one segment of the executable, which comes first.
  const auto find_tls = [](dl_phdr_info* executable, size_t, void*) {
    for (int i = 0; i < executable->dlpi_phnum; i++)
      if (executable->dlpi_phdr[i].p_type == PT_TLS) {
        engine->tls = static_cast<char*>(executable->dlpi_tls_data);
        engine->tls_bytes = executable->dlpi_phdr[i].p_memsz;
      }
    return 1;
  };
  dl_iterate_phdr(find_tls, nullptr);
}
static void prepare(const Launch& l, uint64_t number) {  // once per launch and core
  if (!engine) start_engine();
  Engine& e = *engine;
  if (e.launch_number == number) return;
  e.launch = &l;
  e.launch_number = number;
  e.n = int(l.block.x * l.block.y * l.block.z);
  e.dim = l.block;
  e.grid = l.grid;
  e.shared_bytes = l.shared_bytes;
  allow_shared(l.shared_bytes);
  for (int i = 0; i < e.n; i++) {
    Fiber& t = e.fibers[i];
    if (!t.stack_pointer) make_fiber(t, i);
    t.linear = i;
    t.warp = i / 32;
    t.lane = i % 32;
    t.block = &e;
    t.index = {i % l.block.x, i / l.block.x % l.block.y, i / l.block.x / l.block.y};
  }
}
static void run_block(const Launch& l, size_t index) {
  Engine& e = *engine;
  e.left = e.at_barrier = 0;
  const size_t x = l.grid.x, y = l.grid.y;
  e.index = {unsigned(index % x), unsigned(index / x % y), unsigned(index / x / y)};
  e.random = (seed * 0x9E3779B97F4A7C15u + e.launch_number) * 0x9E3779B97F4A7C15u + index + 1;
  if (e.tls_bytes)
    memset(e.tls, 0xFF, e.tls_bytes);  // shared memory starts out as NaN; these two live among it
  engine = &e;
  self = nullptr;
  memset(e.shared, 0xFF, e.shared_bytes);
  memset(e.warps, 0, sizeof e.warps);
  race_block_begin();
  for (int i = 0; i < e.n; i++) make_ready(e.fibers[i]);
  schedule();  // comes back when all threads have left
  race_block_end();
}
static void run_grid(const Launch& l) {
  static uint64_t number = 0;
  number++;
  const size_t blocks = size_t(l.grid.x) * l.grid.y * l.grid.z;
  std::vector<unsigned> sequence(blocks);
  for (size_t i = 0; i < blocks; i++) sequence[i] = unsigned(order == Order::reverse ? blocks - 1 - i : i);
  if (order == Order::random)
    for (size_t i = blocks; i > 1; i--) std::swap(sequence[i - 1], sequence[random_below(unsigned(i))]);
  parallel_for(blocks, [&](size_t i) {
    prepare(l, number);
    run_block(l, sequence[i]);
  });
  race_launch_end(l.kernel);
}
std::string kernel_name(const char* text) {  // the text up to the first comma outside <>
  int depth = 0;
  const char* p = text;
  for (; *p && !(*p == ',' && depth == 0); p++) depth += (*p == '<' || *p == '(') - (*p == '>' || *p == ')');
  return std::string(text, p);
}
void start(Launch l, Stream* stream) {
  const dim3 g = l.grid, b = l.block;
  const size_t threads = size_t(b.x) * b.y * b.z;
  const bool grid_fits = g.x && g.y && g.z && g.x <= 0x7FFFFFFF && g.y <= 65535 && g.z <= 65535;
  if (!grid_fits || !threads || threads > MAX_THREADS || b.z > 64 || l.shared_bytes > card.shared_bytes)
    fail(
        "bad configuration of %s: grid (%u,%u,%u), block (%u,%u,%u), shared memory %zu; expected 1..%zu "
        "threads,"
        " grid x < 2^31, y and z < 2^16, shared memory <= %zu (compute %d.%d)",
        l.kernel.c_str(), g.x, g.y, g.z, b.x, b.y, b.z, l.shared_bytes, MAX_THREADS, card.shared_bytes,
        card.major, card.minor);
  enqueue(stream, [l = std::move(l)] { run_grid(l); });
}

}  // namespace emu
