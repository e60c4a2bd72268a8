// host.cpp - the emulator's own house: settings, error messages, crashes, address space, work for all cores.
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "engine.h"
#if defined(EMU_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

// ---- settings -----------------------------------------------------------------------------------------
static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}
Order order = [] {
  const std::string s = setting("EMU_ORDER", "forward");
  if (s != "forward" && s != "reverse" && s != "random")
    fail("EMU_ORDER is %s, expected forward, reverse or random", s.c_str());
  return s == "forward" ? Order::forward : s == "reverse" ? Order::reverse : Order::random;
}();
uint64_t seed = strtoull(setting("EMU_SEED", "1"), nullptr, 10);
size_t device_bytes = strtoull(setting("EMU_MEMORY_MB", "8192"), nullptr, 10) << 20;
Card card = [] {  // CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
  const std::string s = setting("EMU_CARD", "8.0");
  for (Card c : {Card{8, 0, 163 << 10},
                 {8, 6, 99 << 10},
                 {8, 9, 99 << 10},
                 {9, 0, 227 << 10},
                 {10, 0, 227 << 10},
                 {12, 0, 99 << 10}})
    if (s == std::to_string(c.major) + "." + std::to_string(c.minor)) return c;
  fail("EMU_CARD is %s, expected 8.0, 8.6, 8.9, 9.0, 10.0 or 12.0", s.c_str());
}();

unsigned random_below(unsigned n) {  // xorshift; a block has its own state, so that cores do not matter
  static uint64_t host_state = 0, host_seed = 0;
  if (!self && host_seed != seed + 1) host_seed = seed + 1, host_state = host_seed * 0x9E3779B97F4A7C15u;
  uint64_t& x = self ? engine->random : host_state;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return unsigned((x >> 32) % n);
}

// ---- errors -------------------------------------------------------------------------------------------
Api* api = nullptr;
Api::Api(const char* name, Site site) : name(name), site(site), outer(api) { api = this; }
Api::~Api() { api = outer; }

void print_position() {
  if (self) {
    const uint3 b = engine->index, t = self->index;
    const Launch& l = *engine->launch;
    fprintf(stderr, "emu: in kernel %s (launched at %s:%d), block (%u,%u,%u), thread (%u,%u,%u)\n",
            l.kernel.c_str(), l.site.file, l.site.line, b.x, b.y, b.z, t.x, t.y, t.z);
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

static std::string base_name(const char* file) {
  const char* slash = strrchr(file, '/');
  return slash ? slash + 1 : file;
}
// The source line of an instruction; where it was inlined, the chain of callers up to the kernel.
std::string source_line(const void* caller) {
  uintptr_t address = reinterpret_cast<uintptr_t>(caller) - 1;  // a return address is one instruction too far
  dl_iterate_phdr(
      [](dl_phdr_info* executable, size_t, void* a) {
        *static_cast<uintptr_t*>(a) -= executable->dlpi_addr;
        return 1;
      },
      &address);
  char exe[300] = {}, text[500];
  if (!caller || readlink("/proc/self/exe", exe, sizeof exe - 1) < 0) return "?";
  snprintf(text, sizeof text, "addr2line -i -e '%s' 0x%zx 2>/dev/null", exe, size_t(address));
  std::string lines;
  FILE* f = popen(text, "r");
  while (f && fgets(text, sizeof text, f)) {
    text[strcspn(text, " \n")] = 0;
    if (*text == '?' || strstr(text, "dev/emulator/")) continue;
    lines += (lines.empty() ? "" : ", called at ") + base_name(text);
  }
  if (f) pclose(f);
  return lines.empty() ? "?" : lines;
}
std::string source_line(Site site) { return base_name(site.file) + ":" + std::to_string(site.line); }
std::string source_line(Site site, const void* caller) {  // compilers merge branches: the site's line is right
  const std::string lines = source_line(caller), line = source_line(site);
  return lines.compare(0, line.size(), line) ? line : lines;
}

// ---- crashes ------------------------------------------------------------------------------------------
#if defined(EMU_ASAN)
extern "C" __attribute__((used)) void __ubsan_on_report() { print_position(); }
static void watch_crashes() {
  __sanitizer_set_death_callback([] {
    print_position();
    const void* p = __asan_get_report_address();
    const std::string place = describe(p);
    if (place.empty()) return;
    fprintf(stderr, "emu: address %p%s%s\n", p, place.c_str(),
            self ? "" : "; the host reaches device memory through cudaMemcpy only");
  });
}
void touch(const void* p, size_t bytes, Access access, const void* caller) {
  if (!__asan_region_is_poisoned(const_cast<void*>(p), bytes)) return;
  fail("%s of %zu bytes outside any allocation (%p%s) at %s", access == Access::read ? "read" : "write", bytes,
       p, describe(p).c_str(), source_line(caller ? caller : __builtin_return_address(0)).c_str());
}
#else
static void watch_crashes() {
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  action.sa_sigaction = [](int number, siginfo_t* info, void*) {
    if (self) fail("bad or misaligned address (%p), or stack overflow", info->si_addr);
    signal(number, SIG_DFL);  // the host's own crash: once more, without us
  };
  sigaction(SIGSEGV, &action, nullptr), sigaction(SIGBUS, &action, nullptr);
}
#if !defined(EMU_RACE)
void touch(const void*, size_t, Access, const void*) {}
#endif
#endif
static const bool watching = (watch_crashes(), true);

// ---- address space, work for all cores ----------------------------------------------------------------
void* reserve(size_t bytes) {  // memory comes when it is touched, as zeros
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("cannot reserve %zu bytes of address space", bytes);
  return p;
}
// Work is taken from a counter. The caller waits for work that somebody has begun, not for threads that never
// woke up: on a busy machine it does everything itself. (A fork-join pool such as OpenMP's would wait.)
struct Job {
  std::function<void(size_t)> f;
  size_t n;
  std::atomic<size_t> next{0}, done{0};
};
struct Pool {
  std::mutex mutex;
  std::condition_variable wake;
  std::shared_ptr<Job> job;
};
static void work_on(Job& job) {
  for (size_t i; (i = job.next++) < job.n; job.done++) job.f(i);
}
static Pool* start_pool(unsigned threads) {
  Pool* pool = new Pool;  // never destroyed: its threads wait on it until the process ends
  for (unsigned t = 1; t < threads; t++)
    std::thread([pool] {
      for (std::shared_ptr<Job> job, before;; before = job) {
        std::unique_lock<std::mutex> lock(pool->mutex);
        pool->wake.wait(lock, [&] { return pool->job != before; });
        job = pool->job;
        lock.unlock();
        work_on(*job);
      }
    }).detach();
  return pool;
}
void parallel_for(size_t n, const std::function<void(size_t)>& f) {
#if defined(EMU_RACE)
  const unsigned threads = 1;  // the race check sees one block at a time
#else
  static const unsigned asked = unsigned(atoi(setting("EMU_THREADS", "0")));
  static const unsigned threads = asked ? asked : std::max(1u, std::thread::hardware_concurrency());
#endif
  if (n == 1 || threads == 1) {
    for (size_t i = 0; i < n; i++) f(i);
    return;
  }
  static Pool* const pool = start_pool(threads);
  auto job = std::make_shared<Job>();
  job->f = f, job->n = n;
  {
    std::lock_guard<std::mutex> lock(pool->mutex);
    pool->job = job;
  }
  pool->wake.notify_all();
  work_on(*job);
  while (job->done < n) std::this_thread::yield();
}

}  // namespace emu
