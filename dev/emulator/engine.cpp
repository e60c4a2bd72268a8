// engine.cpp - fibers, their scheduler, barriers, warp-wide operations, launches.
#include "engine.h"

#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#if defined(EMU_ASAN)
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

EMU_PER_CORE Thread* self = nullptr;
EMU_PER_CORE Engine* engine = nullptr;

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}
Order order = [] {
  const std::string s = setting("EMU_ORDER", "forward");
  if (s != "forward" && s != "reverse" && s != "random") fail("EMU_ORDER is %s, expected forward, reverse or random", s.c_str());
  return s == "forward" ? Order::forward : s == "reverse" ? Order::reverse : Order::random;
}();
uint64_t seed = strtoull(setting("EMU_SEED", "1"), nullptr, 10);
size_t device_bytes = strtoull(setting("EMU_MEMORY_MB", "8192"), nullptr, 10) << 20;

unsigned random_below(unsigned n) {  // xorshift, one state per OS thread
  uint64_t& s = start_engine().random;
  s ^= s << 13, s ^= s >> 7, s ^= s << 17;
  return unsigned((s >> 32) % n);
}

// ---- errors -------------------------------------------------------------------------------------------
static Api* api = nullptr;
Api::Api(const char* name, Site site) : name(name), site(site), outer(api) { api = this; }
Api::~Api() { api = outer; }

void print_position() {
  if (self) {
    const uint3 b = engine->index, t = self->index;
    const Launch& l = *engine->launch;
    fprintf(stderr, "emu: in kernel %s (launched at %s:%d), block (%u,%u,%u), thread (%u,%u,%u)\n", l.kernel.c_str(),
            l.site.file, l.site.line, b.x, b.y, b.z, t.x, t.y, t.z);
  } else if (api) {
    fprintf(stderr, "emu: in %s, called at %s:%d\n", api->name, api->site.file, api->site.line);
  }
}
void fail(const char* format, ...) {
  fflush(stdout);
  fprintf(stderr, "emu: error: ");
  va_list list;
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  fprintf(stderr, "\n");
  print_position();
  _Exit(FAILED);
}

// The source line of an instruction; where it was inlined, the chain of callers up to the kernel.
std::string source_line(const void* caller) {
  uintptr_t load_address = 0;  // what the executable's own addresses are shifted by
  dl_iterate_phdr([](dl_phdr_info* info, size_t, void* p) { *static_cast<uintptr_t*>(p) = info->dlpi_addr; return 1; }, &load_address);
  char exe[300] = {}, text[500];
  if (!caller || readlink("/proc/self/exe", exe, sizeof exe - 1) < 0) return "?";
  snprintf(text, sizeof text, "addr2line -i -e '%s' 0x%zx 2>/dev/null", exe, size_t(reinterpret_cast<uintptr_t>(caller) - load_address - 1));
  std::string lines;
  FILE* f = popen(text, "r");
  while (f && fgets(text, sizeof text, f)) {
    text[strcspn(text, " \n")] = 0;
    if (strstr(text, "dev/emulator/") || *text == '?') continue;
    const char* slash = strrchr(text, '/');
    lines += (lines.empty() ? "" : ", called at ") + std::string(slash ? slash + 1 : text);
  }
  if (f) pclose(f);
  return lines.empty() ? "?" : lines;
}
std::string source_line(Site site, const void* caller) {  // compilers merge branches: the line is the site's
  const std::string lines = source_line(caller);
  const char* slash = strrchr(site.file, '/');
  const std::string line = std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
  return lines.compare(0, line.size(), line) ? line : lines;
}
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
    if (a.state == State::left) { text += " have left the kernel"; continue; }
    text += std::string(" wait in ") + a.op + " at " + source_line(a.site, a.caller);
    char mask[40];
    snprintf(mask, sizeof mask, " with mask 0x%08x", a.mask);
    if (a.state == State::at_warp_op) text += mask;
  }
  fail("some threads wait for threads that never come:%s", text.c_str());
}

// ---- switching between fibers -------------------------------------------------------------------------
// emu_switch(&old, new): push what the calling convention says a function keeps, save the stack pointer in old, take
// up the stack pointer new, pop, return: into another fiber, at the place where that one called emu_switch.
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

static void arrived([[maybe_unused]] Fiber& now) {
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
  arrived(from);
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
  arrived(*engine->running);
  for (;;) {
    engine->launch->body(engine->parameters);
    land_copies(0);
    engine->running->state = State::left, engine->left++;
    schedule();  // comes back when the next block starts
  }
}
static void make_fiber(Fiber& t, int number) {  // the page below the stack stays unmapped: an overflow stops
  char* p = engine->stacks + size_t(number) * (STACK + PAGE);
  mprotect(p, PAGE, PROT_NONE);
  t.stack = p + PAGE, t.stack_bytes = STACK;
  // Stacks are staggered, or all of them would fight for the same lines of the cache.
  void** top = reinterpret_cast<void**>(t.stack + STACK - size_t(number) % 16 * 256) - SAVED;
  top[RETURN_ADDRESS] = reinterpret_cast<void*>(&fiber_main);
  t.stack_pointer = top;
}

// ---- barriers and warp-wide operations ----------------------------------------------------------------
static bool same(Site a, Site b) { return a.line == b.line && !strcmp(a.file, b.file); }
static Fiber& running_in(const char* op, Site site) {
  if (!self) fail("%s at %s:%d outside any kernel", op, site.file, site.line);
  return *engine->running;
}
void barrier(Site site) {
  Fiber& t = running_in("__syncthreads", site);
  Engine& e = *engine;
  t.state = State::at_barrier, t.op = "__syncthreads", t.site = site, t.caller = __builtin_return_address(0);
  if (++e.at_barrier == e.n) {
    e.at_barrier = 0;
    for (int i = 0; i < e.n; i++) {
      const Fiber& o = e.fibers[i];
      if (!same(o.site, site))
        fail("threads meet in different __syncthreads: thread %d at %s, thread %d at %s", o.linear,
             source_line(o.site, o.caller).c_str(), t.linear, source_line(site, t.caller).c_str());
    }
    for (int i = 0; i < e.n; i++) make_ready(e.fibers[i]);
    race_sync(-1);
  }
  schedule();
}
void warp_synced() { race_sync(self->warp); }
void meet(const char* op, Site site, unsigned mask, void* args, void (*together)(void**, void*), void* f) {
  Fiber& t = running_in(op, site);
  Warp& w = engine->warps[t.warp];
  Fiber* lanes = &engine->fibers[t.warp * 32];
  t.state = State::at_warp_op, t.op = op, t.site = site, t.mask = mask, t.args = args, t.caller = __builtin_return_address(0);
  if (!(mask >> t.lane & 1))
    fail("%s at %s: lane %d calls it but mask 0x%08x leaves it out", op, source_line(site, t.caller).c_str(), t.lane, mask);
  if (const unsigned others = w.arrived & mask) {
    const Fiber& o = lanes[__builtin_ctz(others)];
    if (strcmp(o.op, op) || o.mask != mask || !same(o.site, site))
      fail("lanes of one warp meet in different operations: lane %d in %s mask 0x%08x at %s, lane %d in %s mask 0x%08x at %s",
           o.lane, o.op, o.mask, source_line(o.site, o.caller).c_str(), t.lane, op, mask, source_line(site, t.caller).c_str());
  }
  w.arrived |= 1u << t.lane;
  const unsigned need = mask & w.exists;
  if ((w.arrived & need) == need) {
    void* all[32] = {};
    for (int i = 0; i < 32; i++) if (need >> i & 1) all[i] = lanes[i].args;
    together(all, f);
    w.arrived &= ~need;
    for (int i = 0; i < 32; i++) if (need >> i & 1) make_ready(lanes[i]);
  }
  schedule();
}

// ---- memory -------------------------------------------------------------------------------------------
void* reserve(size_t bytes) {  // address space; memory comes when it is touched, as zeros
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("cannot reserve %zu bytes of address space", bytes);
  return p;
}
#if !defined(EMU_RACE)
void touch(const void* p, size_t bytes, Access access, const void* caller) {
#if defined(EMU_ASAN)
  if (__asan_region_is_poisoned(const_cast<void*>(p), bytes))
    fail("%s of %zu bytes at %p outside any allocation, at %s", access == Access::read ? "read" : "write", bytes, p,
         source_line(caller ? caller : __builtin_return_address(0)).c_str());
#else
  (void)p, (void)bytes, (void)access, (void)caller;
#endif
}
#endif

// ---- launching ----------------------------------------------------------------------------------------
static void find_shared_variables() {  // __shared__ is thread_local: this executable's thread-local segment
  dl_iterate_phdr([](dl_phdr_info* info, size_t, void*) {
    for (int i = 0; i < info->dlpi_phnum; i++)
      if (info->dlpi_phdr[i].p_type == PT_TLS)
        engine->tls = static_cast<char*>(info->dlpi_tls_data), engine->tls_bytes = info->dlpi_phdr[i].p_memsz;
    return 1;  // the first entry is the executable itself
  }, nullptr);
}
#if !defined(EMU_ASAN)
static void on_fault(int number, siginfo_t* info, void*) {
  if (!self) { signal(number, SIG_DFL); return; }  // the host's own crash
  fail("bad or misaligned address (%p), or stack overflow", info->si_addr);
}
static void watch_faults() {
  struct sigaction action{};
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr), sigaction(SIGBUS, &action, nullptr);
}
#else
extern "C" __attribute__((used)) void __ubsan_on_report() { print_position(); }
static void watch_faults() {
  __sanitizer_set_death_callback([] {
    print_position();
    const void* p = __asan_get_report_address();
    const std::string place = describe(p);
    if (!place.empty()) fprintf(stderr, "emu: address %p%s%s\n", p, place.c_str(), self ? "" : "; the host reaches device memory through cudaMemcpy only");
  });
}
#endif
static const bool watching = (watch_faults(), true);
Engine& start_engine() {  // once per OS thread
  if (engine) return *engine;
  engine = new Engine;
  engine->running = &engine->host;
  engine->stacks = static_cast<char*>(reserve(MAX_THREADS * (STACK + PAGE)));
  engine->random = seed * 0x9E3779B97F4A7C15u + 1;
#if defined(EMU_ASAN)
  pthread_attr_t attributes;
  void* bottom;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &engine->host.stack_bytes);
  pthread_attr_destroy(&attributes);
  engine->host.stack = static_cast<char*>(bottom);
#endif
  find_shared_variables();
#if !defined(EMU_ASAN)
  stack_t alternate{};  // where on_fault runs when the stack has overflowed
  alternate.ss_sp = malloc(alternate.ss_size = 64 * 1024);
  sigaltstack(&alternate, nullptr);
#endif
  return *engine;
}
static void run_block(const Launch& l, size_t index) {
  Engine& e = *engine;
  e.n = int(l.block.x * l.block.y * l.block.z), e.left = e.at_barrier = 0;
  e.index = {unsigned(index % l.grid.x), unsigned(index / l.grid.x % l.grid.y), unsigned(index / l.grid.x / l.grid.y)};
  Engine* keep = engine;  // shared memory starts out as NaN; our own thread-locals live there too
  if (e.tls_bytes) memset(e.tls, 0xFF, e.tls_bytes);
  engine = keep, self = nullptr;
  if (e.shared_bytes) memset(e.shared, 0xFF, e.shared_bytes);
  race_block_begin();
  std::fill_n(e.warps, 32, Warp{});
  for (int i = 0; i < e.n; i++) {
    Fiber& t = e.fibers[i];
    if (!t.stack) make_fiber(t, i);
    t.linear = i, t.warp = i / 32, t.lane = i % 32, t.block = &e;
    t.index = {i % l.block.x, i / l.block.x % l.block.y, i / l.block.x / l.block.y};
    e.warps[t.warp].exists |= 1u << t.lane;
    make_ready(t);
  }
  schedule();
  race_block_end();
}
static void run_grid(const Launch& l) {
  const size_t blocks = size_t(l.grid.x) * l.grid.y * l.grid.z;
  start_engine();
  std::vector<unsigned> sequence(blocks);
  for (size_t i = 0; i < blocks; i++) sequence[i] = unsigned(order == Order::reverse ? blocks - 1 - i : i);
  if (order == Order::random)
    for (size_t i = blocks; i > 1; i--) std::swap(sequence[i - 1], sequence[random_below(unsigned(i))]);
  DeviceAccess open;
#pragma omp parallel if (blocks > 1)
  {
    Engine& e = start_engine();
    e.launch = &l, e.grid = l.grid, e.dim = l.block, e.shared_bytes = l.shared_bytes;
    memcpy(e.parameters, l.parameters.get(), l.parameter_bytes);
    char* room = nullptr;
#if defined(EMU_RACE)
    e.shared = race_shared(l.shared_bytes);
#else  // exactly as large as asked: one byte more is AddressSanitizer's
    const size_t rounded = l.shared_bytes / 1024 * 1024 + 1024;
    e.shared = room = static_cast<char*>(aligned_alloc(1024, rounded));
#if defined(EMU_ASAN)
    __asan_poison_memory_region(e.shared + l.shared_bytes, rounded - l.shared_bytes);
#endif
#endif
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < blocks; i++) run_block(l, sequence[i]);
    free(room);
    e.shared = nullptr, e.shared_bytes = 0;
  }
  race_launch_end(l.kernel);
}
std::string kernel_name(const char* text) {  // the text up to the first comma outside <>
  int depth = 0;
  const char* p = text;
  for (; *p && !(*p == ',' && depth == 0); p++) depth += (*p == '<' || *p == '(') - (*p == '>' || *p == ')');
  return std::string(text, p);
}
void start(Launch l, Stream* stream) {
  Api api("launch", l.site);
  const dim3 g = l.grid, b = l.block;
  const size_t threads = size_t(b.x) * b.y * b.z;
  if (!g.x || !g.y || !g.z || g.x > 0x7FFFFFFF || g.y > 65535 || g.z > 65535 || !threads || threads > MAX_THREADS || b.z > 64 ||
      l.shared_bytes > MAX_SHARED || l.parameter_bytes > MAX_PARAMETERS)
    fail("launch of %s at %s:%d: bad configuration: grid (%u,%u,%u), block (%u,%u,%u), %zu bytes of shared memory, %zu of parameters; "
         "expected 1..1024 threads, grid x < 2^31, y and z < 2^16, at most %zu bytes of shared memory, %zu of parameters",
         l.kernel.c_str(), l.site.file, l.site.line, g.x, g.y, g.z, b.x, b.y, b.z, l.shared_bytes, l.parameter_bytes, MAX_SHARED, MAX_PARAMETERS);
  enqueue(stream, [l = std::move(l)] { run_grid(l); });
}

}  // namespace emu
