// host.cpp - the emulator's own house: settings, error messages, crashes, address space, work for all cores.
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>

#include "engine.h"

namespace emu {

// ---- settings -----------------------------------------------------------------------------------------
static std::string setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}
Order order = [] {
  const std::string s = setting("EMU_ORDER", "forward");
  if (s == "forward") return Order::forward;
  if (s == "reverse") return Order::reverse;
  if (s == "random") return Order::random;
  fail("EMU_ORDER is %s, expected forward, reverse or random", s.c_str());
}();
uint64_t seed = std::stoull(setting("EMU_SEED", "1"));
size_t device_bytes = std::stoull(setting("EMU_MEMORY_MB", "8192")) << 20;
Card card = [] {  // CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
  const std::string s = setting("EMU_CARD", "8.6");
  Card wanted{};
  const int given = sscanf(s.c_str(), "%d.%d:%zu", &wanted.major, &wanted.minor, &wanted.shared_bytes);
  for (Card c : {Card{7, 5, 64 << 10}, Card{8, 0, 163 << 10}, Card{8, 6, 99 << 10}, Card{8, 9, 99 << 10},
                 Card{9, 0, 227 << 10}, Card{10, 0, 227 << 10}, Card{12, 0, 99 << 10}})
    if (c.major == wanted.major && c.minor == wanted.minor) return given == 3 ? wanted : c;
  fail("EMU_CARD is %s, expected 7.5, 8.0, 8.6, 8.9, 9.0, 10.0 or 12.0", s.c_str());
}();

unsigned random_below(unsigned n) {  // xorshift; a block has its own state, so that cores do not matter
  uint64_t& x = self ? engine->random : seed;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return unsigned((x >> 32) % n);
}

// ---- errors -------------------------------------------------------------------------------------------
void fail(const char* format, ...) {
  fflush(stdout);
  fprintf(stderr, "emu: error: ");
  va_list list;
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  if (self) {
    const uint3 b = engine->index, t = self->index;
    const Launch& l = *engine->launch;
    fprintf(stderr, "\nemu: in kernel %s (launched at %s:%d), block (%u,%u,%u), thread (%u,%u,%u)",
            l.kernel.c_str(), l.site.file, l.site.line, b.x, b.y, b.z, t.x, t.y, t.z);
  } else if (api) {
    fprintf(stderr, "\nemu: in %s, called at %s:%d", api->name, api->site.file, api->site.line);
  }
  fprintf(stderr, "\n");
  _Exit(FAILED);
}

static std::string base_name(const char* file) {
  const char* slash = strrchr(file, '/');
  return slash ? slash + 1 : file;
}
// The source line of an instruction; where it was inlined, the chain of callers up to the kernel.
std::string source_line(const void* caller) {
  uintptr_t address = reinterpret_cast<uintptr_t>(caller) - 1;  // a return address is one instruction too far
  const auto subtract_base = [](dl_phdr_info* executable, size_t, void* a) {
    *static_cast<uintptr_t*>(a) -= executable->dlpi_addr;
    return 1;
  };
  dl_iterate_phdr(subtract_base, &address);
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

static const bool watching = [] {
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  action.sa_sigaction = [](int number, siginfo_t* info, void*) {
    if (self) fail("bad or misaligned address (%p), or stack overflow", info->si_addr);
    signal(number, SIG_DFL);  // the host's own crash: once more, without us
  };
  return sigaction(SIGSEGV, &action, nullptr) == 0 && sigaction(SIGBUS, &action, nullptr) == 0;
}();

// ---- address space, work for all cores ----------------------------------------------------------------
void* reserve(size_t bytes) {  // memory comes when it is touched, as zeros
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("cannot reserve %zu bytes of address space", bytes);
  return p;
}
void parallel_for(size_t n, const std::function<void(size_t)>& f) {  // the race build has no OpenMP: one core
#pragma omp parallel for schedule(dynamic) if (n > 1)
  for (size_t i = 0; i < n; i++) f(i);
}

}  // namespace emu
