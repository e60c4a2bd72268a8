// emulator.h - what the stand-in headers (cuda_runtime.h, cublasLt.h, ...) and the engine behind them share.
//
// A CUDA thread is a fiber: it has a stack of its own and runs until it reaches a barrier or a warp-wide
// operation, then hands the CPU to the next thread that can run. README.md tells the whole story.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(size_t x = 1, size_t y = 1, size_t z = 1) : x(fit(x)), y(fit(y)), z(fit(z)) {}
  static constexpr unsigned fit(size_t n) { return n > ~0u ? ~0u : unsigned(n); }  // refused, not wrapped
};

namespace emu {

// ---- where in the source something was called ---------------------------------------------------------
struct Site {
  const char* file;
  int line;
};
#define EMU_SITE emu::Site site = {__builtin_FILE(), __builtin_LINE()}  // a last parameter: the caller's line
#define EMU_INLINE inline __attribute__((always_inline))  // so that return addresses lie in the kernel itself

// ---- what a running kernel can see of the machine -----------------------------------------------------
struct Block {
  uint3 index;
  dim3 dim, grid;
  char* shared = nullptr;
  size_t shared_bytes = 0;
};
struct Thread {
  uint3 index;
  int linear, warp, lane;
  const Block* block;
};
extern __thread Thread* self;  // the one that runs now on this core, null on the host

// ---- settings: from the environment, a test may change them -------------------------------------------
enum class Order { forward, reverse, random };
extern Order order;    // EMU_ORDER=forward|reverse|random: threads, blocks, asynchronous copies, the stream
extern uint64_t seed;  // EMU_SEED, for the random order
extern size_t device_bytes;  // EMU_MEMORY_MB: memory of the pretended card
struct Card {
  int major, minor;     // compute capability
  size_t shared_bytes;  // of shared memory that a block may ask for
};
extern Card
    card;  // EMU_CARD=7.5|8.0|8.6|8.9|9.0|10.0|12.0, or 9.0:65536 with bytes of shared memory of its own

// ---- errors: one line, then kernel, block and thread; exit status 86 ----------------------------------
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
struct Api {  // while it lives, fail() on the host names this API call
  const char* name;
  Site site;
  Api* outer;
  Api(const char* name, Site site);
  ~Api();
};
// What a program makes and must destroy. gone() fails unless it is there, and returns its bytes.
void made(const char* kind, const void* p, Site, size_t bytes = 0);
size_t gone(const char* kind, const void* p);

// All 32 lanes of a warp arrive with their arguments; the last one runs together(arguments of each lane) for
// all.
void meet(const char* op, Site, void* args, void (*together)(void** lane));

// ---- launching ----------------------------------------------------------------------------------------
struct Stream;
struct Launch {
  std::string kernel;
  Site site;
  dim3 grid, block;
  size_t shared_bytes;
  std::shared_ptr<void> call;     // the kernel and its arguments,
  void (*run)(const void* call);  // and how to call it
};
void start(Launch, Stream*);
std::string kernel_name(const char* launch_text);

template <class... P>
void launch_kernel(Site site, const char* text, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                   Stream* stream, std::common_type_t<P>... args) {
  static_assert((std::is_trivially_copyable_v<P> && ...), "launch: kernel parameters are copied as bytes");
  static_assert((sizeof(P) + ... + 0) <= 4096, "launch: bytes of kernel parameters");
#define EMU_UNWATCHED __attribute__((no_sanitize("thread")))  // a kernel may read its arguments, not the host's
  const auto call = [=]() EMU_UNWATCHED { kernel(args...); };
  using Call = decltype(call);
  const auto run = [](const void* c) EMU_UNWATCHED { (*static_cast<Call*>(c))(); };
  Api api("launch", site);
  start({kernel_name(text), site, grid, block, shared, std::make_shared<std::remove_const_t<Call>>(call), run},
        stream);
}

// ---- global memory traffic, counted in the race build while counting is on -----------------------------
struct Traffic {
  size_t launches = 0;
  size_t requests = 0;  // accesses, those of a warp's lanes by one instruction together counted as one
  size_t sectors = 0;   // of 32 bytes, read or written, by each request: what the L2 cache moves
  size_t distinct = 0;  // sectors that a launch touched at all, read and written apart: what DRAM must move
};
#if defined(EMU_RACE)
constexpr bool COUNTS_TRAFFIC = true;
#else
constexpr bool COUNTS_TRAFFIC = false;
#endif
void count_traffic(bool on);  // on: forget earlier counts and start
Traffic traffic(
    const std::string& kernel = "");  // of all its launches and template arguments; or of all kernels

}  // namespace emu
