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
#include <tuple>
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
extern Order order;          // EMU_ORDER=forward|reverse|random: threads, blocks, asynchronous copies, streams
extern uint64_t seed;        // EMU_SEED, for the random order
extern size_t device_bytes;  // EMU_MEMORY_MB: memory of the pretended card
struct Card {
  int major, minor;     // compute capability
  size_t shared_bytes;  // of shared memory that a block may ask for
};
extern Card card;  // EMU_CARD=8.0|8.6|8.9|9.0|10.0|12.0

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

// ---- barriers and warp-wide operations ----------------------------------------------------------------
void barrier(Site);
bool left_out(Site);  // by EMU_WITHOUT=train.cu:123, which takes the barrier of that line away
void warp_synced();   // what __syncwarp adds to a meeting of lanes: their accesses to memory are now ordered
// Every lane in `mask` arrives with its arguments; the last one runs together(arguments of each lane) for all.
void meet(const char* op, Site, unsigned mask, void* args, void (*together)(void** lane, void* f), void* f);
template <class Args, class F>
EMU_INLINE void warp_op(const char* op, Site site, unsigned mask, Args& args, F&& f) {
  using Body = std::remove_reference_t<F>;
  meet(
      op, site, mask, &args,
      [](void** lane, void* body) { (*static_cast<Body*>(body))(reinterpret_cast<Args**>(lane)); }, &f);
}

// ---- memory checks: AddressSanitizer's in the asan build, race.cpp's in the race build, else nothing ---
enum class Access { read, write, atomic, in_flight };  // in_flight: a cp.async is on its way, too early to read
void touch(const void* p, size_t bytes, Access, const void* caller = nullptr);
void check_pointer(const char* kernel, size_t parameter, const void* p);  // fails unless device memory or null

// ---- launching ----------------------------------------------------------------------------------------
struct Stream;
struct Launch {
  std::string kernel;
  Site site;
  dim3 grid, block;
  size_t shared_bytes;
  void (*body)(const void* parameters);
  std::shared_ptr<void> parameters;
  size_t parameter_bytes;
};
void start(Launch, Stream*);
std::string kernel_name(const char* launch_text);

template <class... P, class... A>
void launch_kernel(Site site, const char* text, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                   Stream* stream, A... args) {
  static_assert(sizeof...(P) == sizeof...(A), "launch: number of kernel arguments");
  static_assert((std::is_trivially_copyable_v<P> && ...), "launch: kernel parameters are copied as bytes");
  using Call = std::tuple<void (*)(P...), P...>;
  auto call = std::make_shared<Call>(kernel, static_cast<P>(args)...);
  const std::string name = kernel_name(text);
  Api api("launch", site);
  size_t i = 0;
  auto check = [&](auto p) {
    i++;
    if constexpr (std::is_pointer_v<decltype(p)>) check_pointer(name.c_str(), i, p);
  };
  std::apply([&](auto, auto... p) { (check(p), ...); }, *call);
  auto body = [](const void* c) {
    std::apply([](auto k, auto... p) { k(p...); }, *static_cast<const Call*>(c));
  };
  start({name, site, grid, block, shared, body, call, sizeof(Call)}, stream);
}

// ---- global memory traffic, counted in the race build while counting is on -----------------------------
struct Traffic {
  size_t launches = 0;
  size_t bytes_read = 0, bytes_written = 0;      // what threads asked for
  size_t sectors_read = 0, sectors_written = 0;  // 32-byte sectors per warp and access: what the L2 cache moves
  size_t distinct_read = 0, distinct_written = 0;  // sectors touched at all, per launch: what DRAM must move
  size_t requests = 0;  // accesses, those of a warp's lanes by one instruction together counted as one
};
#if defined(EMU_RACE)
constexpr bool COUNTS_TRAFFIC = true;
#else
constexpr bool COUNTS_TRAFFIC = false;
#endif
void count_traffic(bool on);                 // on: forget earlier counts and start
Traffic traffic(const std::string& kernel);  // summed over the launches of kernel, all its template arguments
Traffic traffic();                           // of all kernels together

}  // namespace emu
