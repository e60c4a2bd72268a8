// engine.cpp - what a GPU does with a kernel: threads, warps, barriers, blocks, a grid.
#include "engine.h"

#include <link.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#if defined(EMU_ASAN)
#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

__thread Thread* self = nullptr;
__thread Engine* engine = nullptr;

// ---- switching between fibers -------------------------------------------------------------------------
// emu_switch(&old, new): push what a function must keep for its caller, save the stack pointer in old, take up
// the stack pointer new, pop, return: into another fiber, at the place where that one called emu_switch.
extern "C" void emu_switch(void** save_stack_pointer, void* load_stack_pointer);
#if defined(__x86_64__)
constexpr size_t SAVED = 8, RETURN_ADDRESS = 6;  // words on the stack of a fiber that does not run
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
#elif defined(__aarch64__)
constexpr size_t SAVED = 20, RETURN_ADDRESS = 11;
asm(R"(
  .text
  .type emu_switch,%function
emu_switch:
  stp x19, x20, [sp, #-160]!
  stp x21, x22, [sp, #16];  stp x23, x24, [sp, #32];   stp x25, x26, [sp, #48];   stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80];  stp d8, d9, [sp, #96];     stp d10, d11, [sp, #112];  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x21, x22, [sp, #16];  ldp x23, x24, [sp, #32];   ldp x25, x26, [sp, #48];   ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80];  ldp d8, d9, [sp, #96];     ldp d10, d11, [sp, #112];  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x19, x20, [sp], #160
  ret
  .size emu_switch,.-emu_switch
)");
#else
#error "dev/emulator/engine.cpp: write emu_switch for this processor"
#endif

static void arrive([[maybe_unused]] Fiber& now) {
#if defined(EMU_ASAN)
  __sanitizer_finish_switch_fiber(now.fake_stack, nullptr, nullptr);
#endif
}
static void switch_to(Fiber& to) {
  Fiber& from = *engine->running;
  if (&from == &to) return;
  engine->running = &to;
  self = &to == &engine->host ? nullptr : &to;
#if defined(EMU_ASAN)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
  emu_switch(&from.stack_pointer, to.stack_pointer);
  arrive(from);
}

// ---- who runs next ------------------------------------------------------------------------------------
[[noreturn]] static void deadlock() {  // group the threads by what they do, then list the groups
  const Engine& e = *engine;
  std::string text;
  for (int i = 0, j; i < e.n; i = j) {
    const Fiber& a = e.fibers[i];
    for (j = i; j < e.n; j++) {
      const Fiber& b = e.fibers[j];
      if (a.state != b.state || (a.state != State::left && (a.op != b.op || a.site.line != b.site.line))) break;
    }
    text += "\n  threads " + std::to_string(i) + ".." + std::to_string(j - 1);
    char mask[40] = "";
    if (a.state == State::at_warp_op) snprintf(mask, sizeof mask, " with mask 0x%08x", a.mask);
    if (a.state == State::left)
      text += " have left the kernel";
    else
      text += std::string(" wait in ") + a.op + " at " + source_line(a.site, a.caller) + mask;
  }
  fail("some threads wait for threads that never come:%s", text.c_str());
}
static void make_ready(Fiber& t) { t.state = State::ready, engine->ready.push_back(&t); }
static void schedule() {  // give the CPU to the next thread that can run
  Engine& e = *engine;
  const size_t waiting = e.ready.size() - e.first;
  if (waiting == 0) {
    e.ready.clear(), e.first = 0;
    if (e.left < e.n) deadlock();
    return switch_to(e.host);
  }
  Fiber* next;
  if (order == Order::forward) {
    next = e.ready[e.first++];
    if (e.first == e.ready.size()) e.ready.clear(), e.first = 0;
  } else {
    if (order == Order::random) std::swap(e.ready[random_below(unsigned(waiting))], e.ready.back());
    next = e.ready.back(), e.ready.pop_back();
  }
  switch_to(*next);
}
[[noreturn]] static void fiber_main() {
  arrive(*engine->running);
  for (;;) {
    engine->launch->body(engine->parameters);
    commit_copies(), land_copies(0);
    engine->running->state = State::left, engine->left++;
    schedule();  // comes back when the next block starts
  }
}
static void make_fiber(Fiber& t, int number) {  // below the stack nothing may be touched: an overflow stops
  char* p = engine->stacks + size_t(number) * (GUARD + STACK);
  mprotect(p, GUARD, PROT_NONE);
  t.stack = p + GUARD, t.stack_bytes = STACK;
  // Stacks are staggered, or all of them would fight for the same lines of the cache.
  void** top = reinterpret_cast<void**>(t.stack + STACK - size_t(number) % 16 * 256) - SAVED;
  top[RETURN_ADDRESS] = reinterpret_cast<void*>(&fiber_main);
  t.stack_pointer = top;
}

// ---- barriers and warp-wide operations ----------------------------------------------------------------
static bool same(const char* a, const char* b) { return a == b || !strcmp(a, b); }
static bool same(Site a, Site b) { return a.line == b.line && same(a.file, b.file); }
static Fiber& arrive_in(const char* op, Site site, State state, const void* caller) {
  if (!self) fail("%s at %s:%d outside any kernel", op, site.file, site.line);
  Fiber& t = *engine->running;
  t.state = state, t.op = op, t.site = site, t.caller = caller;
  return t;
}
static std::string place(const Fiber& t) { return source_line(t.site, t.caller); }

bool left_out(Site site) {
  static const char* const without = getenv("EMU_WITHOUT");
  return without && *without && source_line(site) == without;
}
void barrier(Site site) {
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
void warp_synced() { race_sync(self->warp); }

void meet(const char* op, Site site, unsigned mask, void* args, void (*together)(void**, void*), void* f) {
  Fiber& t = arrive_in(op, site, State::at_warp_op, __builtin_return_address(0));
  t.mask = mask, t.args = args;
  Warp& w = engine->warps[t.warp];
  Fiber* lanes = &engine->fibers[t.warp * 32];
  if (!(mask >> t.lane & 1))
    fail("%s at %s: lane %d calls it but mask 0x%08x leaves it out", op, place(t).c_str(), t.lane, mask);
  if (const unsigned others = w.arrived & mask) {
    const Fiber& o = lanes[__builtin_ctz(others)];
    if (!same(o.op, op) || o.mask != mask || !same(o.site, site))
      fail(
          "lanes of one warp meet in different operations: lane %d in %s mask 0x%08x at %s,"
          " lane %d in %s mask 0x%08x at %s",
          o.lane, o.op, o.mask, place(o).c_str(), t.lane, op, mask, place(t).c_str());
  }
  w.arrived |= 1u << t.lane;
  const unsigned need = mask & w.exists;
  if ((w.arrived & need) == need) {  // the last one to come does the work of all
    void* all[32] = {};
    for (int i = 0; i < 32; i++)
      if (need >> i & 1) all[i] = lanes[i].args;
    together(all, f);
    w.arrived &= ~need;
    for (int i = 0; i < 32; i++)
      if (need >> i & 1) make_ready(lanes[i]);
  }
  schedule();
}

// ---- launching ----------------------------------------------------------------------------------------
Engine& start_engine() {  // once per OS thread
  if (engine) return *engine;
  engine = new Engine;
  engine->running = &engine->host;
  engine->stacks = static_cast<char*>(reserve(MAX_THREADS * (GUARD + STACK)));
  engine->shared = shared_room() + GAP;
  forbid(engine->shared - GAP, SHARED_ROOM);
#if defined(EMU_ASAN)  // it wants to know the bounds of every stack
  pthread_attr_t attributes;
  void* bottom;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &engine->host.stack_bytes);
  pthread_attr_destroy(&attributes);
  engine->host.stack = static_cast<char*>(bottom);
#else  // where the handler of a crash runs when the stack is full
  stack_t alternate{};
  alternate.ss_sp = malloc(alternate.ss_size = 64 * 1024);
  sigaltstack(&alternate, nullptr);
#endif
  // __shared__ means thread_local: all of it lies in one segment of the executable, which comes first.
  dl_iterate_phdr(
      [](dl_phdr_info* executable, size_t, void*) {
        for (int i = 0; i < executable->dlpi_phnum; i++)
          if (executable->dlpi_phdr[i].p_type == PT_TLS) {
            engine->tls = static_cast<char*>(executable->dlpi_tls_data);
            engine->tls_bytes = executable->dlpi_phdr[i].p_memsz;
          }
        return 1;
      },
      nullptr);
  return *engine;
}
static void prepare(const Launch& l, uint64_t number) {  // once per launch and core
  Engine& e = start_engine();
  if (e.launch_number == number) return;
  e.launch = &l, e.launch_number = number;
  e.n = int(l.block.x * l.block.y * l.block.z), e.dim = l.block, e.grid = l.grid;
  forbid(e.shared, e.shared_bytes), allow(e.shared, l.shared_bytes);  // all around is forbidden anyway
  e.shared_bytes = l.shared_bytes;
  memcpy(e.parameters, l.parameters.get(), l.parameter_bytes);
  for (int i = 0; i < e.n; i++) {
    Fiber& t = e.fibers[i];
    if (!t.stack) make_fiber(t, i);
    t.linear = i, t.warp = i / 32, t.lane = i % 32, t.block = &e;
    t.index = {i % l.block.x, i / l.block.x % l.block.y, i / l.block.x / l.block.y};
  }
}
static void run_block(const Launch& l, size_t index) {
  Engine& e = *engine;
  e.left = e.at_barrier = 0;
  const size_t x = l.grid.x, y = l.grid.y;
  e.index = {unsigned(index % x), unsigned(index / x % y), unsigned(index / x / y)};
  e.random = (seed * 0x9E3779B97F4A7C15u + e.launch_number) * 0x9E3779B97F4A7C15u + index + 1;
  if (e.tls_bytes) memset(e.tls, 0xFF, e.tls_bytes);  // shared memory starts out as NaN;
  engine = &e, self = nullptr;                        // these two live among it
  memset(e.shared, 0xFF, e.shared_bytes);
  race_block_begin();
  for (int w = 0; w * 32 < e.n; w++) e.warps[w] = {e.n - w * 32 >= 32 ? ~0u : (1u << e.n % 32) - 1, 0};
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
  parallel_for(blocks, [&](size_t i) { prepare(l, number), run_block(l, sequence[i]); });
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
  if (!grid_fits || !threads || threads > MAX_THREADS || b.z > 64 || l.shared_bytes > card.shared_bytes ||
      l.parameter_bytes > MAX_PARAMETERS)
    fail(
        "bad configuration of %s: grid (%u,%u,%u), block (%u,%u,%u), shared memory %zu, parameters %zu bytes;"
        " expected 1..%zu threads, grid x < 2^31, y and z < 2^16, shared memory <= %zu (compute %d.%d),"
        " parameters <= %zu",
        l.kernel.c_str(), g.x, g.y, g.z, b.x, b.y, b.z, l.shared_bytes, l.parameter_bytes, MAX_THREADS,
        card.shared_bytes, card.major, card.minor, MAX_PARAMETERS);
  enqueue(stream, [l = std::move(l)] { run_grid(l); });
}

}  // namespace emu
