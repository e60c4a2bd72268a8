// runtime.cpp - the CUDA runtime API: device memory, copies, streams, events.
//
// Real calls return an error for a bad argument, and programs rarely look; here a bad argument ends the program
// with a message. Returned is what a correct program must handle: out of memory, no such device, not ready.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <set>

#include "cuda_runtime.h"
#include "engine.h"
#if defined(EMU_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace emu {

struct Allocation { size_t bytes; Site site; };
typedef std::map<const char*, Allocation> Memory;
struct Stream { bool blocking = true; std::deque<std::function<void()>> queue; };
struct Event { Stream* stream = nullptr; bool recorded = false, done = false; timespec time{}; };
static Memory device_memory, pinned_memory;
static std::map<const void*, std::pair<const char*, Site>> objects;  // streams, events, handles: what, where
static std::set<Stream*> streams;
static Stream default_stream;
static size_t bytes_in_use;
static cudaError_t last_error;

// ---- what a program leaves behind ---------------------------------------------------------------------
static void at_exit(int status, void*) {
  const size_t found = device_memory.size() + pinned_memory.size() + objects.size();
  if (status || !found) return;  // a failed program has better things to say
  fflush(stdout);
  fprintf(stderr, "emu: error: %zu allocations and objects are still there at exit:\n", found);
  auto list = [](const char* what, size_t bytes, Site s) {
    static int left = 10;
    if (left-- > 0) fprintf(stderr, "  %s of %zu bytes, made at %s:%d\n", what, bytes, s.file, s.line);
  };
  for (auto& [p, a] : device_memory) list("device memory", a.bytes, a.site);
  for (auto& [p, a] : pinned_memory) list("pinned memory", a.bytes, a.site);
  for (auto& [p, o] : objects) list(o.first, 0, o.second);
  _exit(FAILED);
}
static const int registered = on_exit(at_exit, nullptr);

void object_made(const void* p, const char* what, Site site) { objects[p] = {what, site}; }
void object_gone(const void* p, const char* what) {
  auto it = objects.find(p);
  const bool known = it != objects.end() && !strcmp(it->second.first, what);
  if (!known) fail("%p is no %s, or was destroyed before", p, what);
  objects.erase(it);
}

// ---- pointers -----------------------------------------------------------------------------------------
// The allocation that begins last at or before p, if p lies in it or at its end.
static const Memory::value_type* find(const Memory& memory, const void* p, size_t slack = 0) {
  auto it = memory.upper_bound(static_cast<const char*>(p));
  if (it == memory.begin()) return nullptr;
  --it;
  return size_t(static_cast<const char*>(p) - it->first) <= it->second.bytes + slack ? &*it : nullptr;
}
static size_t offset_in(const Memory::value_type* a, const void* p) {
  return size_t(static_cast<const char*>(p) - a->first);
}

void check_device(const char* what, const void* p, size_t bytes) {
  if (!bytes) return;
  const auto* a = find(device_memory, p);
  if (!a) fail("%s: %p is not device memory", what, p);
  if (offset_in(a, p) + bytes > a->second.bytes)
    fail("%s: %zu bytes at offset %zu run past the end of %zu bytes allocated at %s:%d", what, bytes,
         offset_in(a, p), a->second.bytes, a->second.site.file, a->second.site.line);
}
static void check_host(const char* what, const void* p, size_t bytes) {
  const auto* a = bytes ? find(device_memory, p) : nullptr;
  if (a && offset_in(a, p) < a->second.bytes) fail("%s: %p is device memory, expected host memory", what, p);
}
void check_pointer(const char* kernel, size_t parameter, const void* p) {
  if (p && !find(device_memory, p))
    fail("%s: parameter %zu (%p) is not device memory (but the host's, or freed)", kernel, parameter, p);
}
std::string describe(const void* p) {
  const auto* a = find(device_memory, p, 65536);
  if (!a) return "";
  return ", byte " + std::to_string(offset_in(a, p)) + " of " + std::to_string(a->second.bytes) +
         " allocated at " + a->second.site.file + ":" + std::to_string(a->second.site.line);
}

// Device memory is closed to the host, and open while a kernel or a library call runs.
static int doors = 0;
static void set_doors([[maybe_unused]] bool open) {
#if defined(EMU_ASAN)
  for (auto& [p, a] : device_memory)
    open ? __asan_unpoison_memory_region(p, a.bytes) : __asan_poison_memory_region(p, a.bytes);
#elif defined(EMU_RACE)
  race_window(open);
#endif
}
DeviceAccess::DeviceAccess() { if (doors++ == 0) set_doors(true); }
DeviceAccess::~DeviceAccess() { if (--doors == 0) set_doors(false); }

// ---- streams ------------------------------------------------------------------------------------------
// A real stream does its work some time after the call, at the latest when the program waits for it. Forward
// order does everything at once, reverse as late as it may, random either: a missing wait gives wrong numbers
// in one. The default stream waits for what was queued before in blocking streams, and they wait for it.
void drain(Stream* s) {
  Stream& stream = s ? *s : default_stream;
  while (!stream.queue.empty()) {
    auto work = std::move(stream.queue.front());
    stream.queue.pop_front();
    work();
  }
}
static void drain_all() {
  drain(nullptr);
  for (Stream* s : streams) drain(s);
}
void enqueue(Stream* s, std::function<void()> work) {
  if (s && !streams.count(s))
    fail("stream %p was not made by cudaStreamCreate, or was destroyed", static_cast<void*>(s));
  if (s && s->blocking) drain(nullptr);
  if (!s) for (Stream* other : streams) if (other->blocking) drain(other);
  (s ? *s : default_stream).queue.push_back(std::move(work));
  if (order == Order::forward || (order == Order::random && random_below(2))) drain(s);
}
}  // namespace emu
using namespace emu;

// ---- devices and errors -------------------------------------------------------------------------------
static cudaError_t result(cudaError_t e) { return e ? last_error = e : e; }
const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaSuccess ? "no error" : e == cudaErrorMemoryAllocation ? "out of memory" :
         e == cudaErrorInvalidDevice ? "invalid device ordinal" : "device not ready";
}
cudaError_t cudaGetLastError() { const cudaError_t e = last_error; last_error = cudaSuccess; return e; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  // An A100's limits, but few multiprocessors, so that grids sized by their number must loop.
  const size_t shared = MAX_SHARED;
  *p = {"CPU emulator", device_bytes, 48 * 1024, shared, shared + 1024, 8, 0, 4, 2048, 32, 65536, 1 << 20};
  return cudaSetDevice(device);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = device_bytes > bytes_in_use ? device_bytes - bytes_in_use : 0, *total = device_bytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { drain_all(); return cudaSuccess; }

// ---- memory -------------------------------------------------------------------------------------------
static size_t on_card(size_t bytes) { return (bytes + 511) / 512 * 512; }  // what an allocation takes there
cudaError_t cudaMalloc(void** p, size_t bytes, Site site) {
  Api api("cudaMalloc", site);
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > device_bytes || on_card(bytes) + bytes_in_use > device_bytes)
    return result(cudaErrorMemoryAllocation);
#if defined(EMU_RACE)
  *p = race_alloc(bytes);
#else
  if (posix_memalign(p, 256, bytes)) return result(cudaErrorMemoryAllocation);
#endif
  memset(*p, 0xFF, bytes);  // NaN
  bytes_in_use += on_card(bytes);
  device_memory[static_cast<char*>(*p)] = {bytes, site};
  if (doors == 0) set_doors(false);
  return cudaSuccess;
}
cudaError_t cudaFree(void* p, Site site) {
  Api api("cudaFree", site);
  if (!p) return cudaSuccess;
  drain_all();
  auto it = device_memory.find(static_cast<char*>(p));
  if (it == device_memory.end()) fail("%p was not returned by cudaMalloc, or was freed before", p);
  const size_t bytes = it->second.bytes;
  bytes_in_use -= on_card(bytes);
  device_memory.erase(it);
#if defined(EMU_RACE)
  race_free(p, bytes);
#else
#if defined(EMU_ASAN)
  __asan_unpoison_memory_region(p, bytes);
#endif
  free(p);
#endif
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes, Site site) {
  if (!(*p = malloc(bytes))) return result(cudaErrorMemoryAllocation);
  memset(*p, 0xFF, bytes);
  pinned_memory[static_cast<char*>(*p)] = {bytes, site};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p, Site site) {
  Api api("cudaFreeHost", site);
  if (!p) return cudaSuccess;
  drain_all();
  if (!pinned_memory.erase(static_cast<char*>(p)))
    fail("%p was not returned by cudaMallocHost, or was freed before", p);
  free(p);
  return cudaSuccess;
}
static void check_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const char *a = static_cast<const char*>(to), *b = static_cast<const char*>(from);
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind != cudaMemcpyDefault) {
    (to_device ? check_device : check_host)("destination", to, bytes);
    (from_device ? check_device : check_host)("source", from, bytes);
  }
  if (bytes && a < b + bytes && b < a + bytes) fail("source and destination overlap");
}
cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s, Site site) {
  Api api("cudaMemcpy", site);
  check_copy(to, from, bytes, kind);
  enqueue(s, [=] {
    Api api("cudaMemcpy", site);
    check_copy(to, from, bytes, kind);  // once more: by now something may have been freed
    DeviceAccess open;
    memcpy(to, from, bytes);
    if (find(device_memory, to)) touch(to, bytes, Access::write);
  });
  // Only between the card and pinned memory does the call return before it has used the host's memory.
  auto late = [](const void* p) { return find(device_memory, p) || find(pinned_memory, p); };
  if (!late(to) || !late(from)) drain(s);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Site site) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr, site);
  drain(nullptr);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t s, Site site) {
  Api api("cudaMemset", site);
  check_device("destination", p, bytes);
  enqueue(s, [=] {
    Api api("cudaMemset", site);
    check_device("destination", p, bytes);
    DeviceAccess open;
    memset(p, value, bytes);
    touch(p, bytes, Access::write);
  });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes, Site site) {
  return cudaMemsetAsync(p, value, bytes, nullptr, site);
}

// ---- streams and events -------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags, Site site) {
  *s = new Stream;
  (*s)->blocking = !(flags & cudaStreamNonBlocking);
  streams.insert(*s), object_made(*s, "stream", site);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* s, Site site) {
  return cudaStreamCreateWithFlags(s, cudaStreamDefault, site);
}
cudaError_t cudaStreamDestroy(cudaStream_t s, Site site) {
  Api api("cudaStreamDestroy", site);
  object_gone(s, "stream");
  drain(s);
  streams.erase(s);
  delete s;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  s ? drain(s) : drain_all();
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e, Site site) {
  object_made(*e = new Event, "event", site);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned, Site site) { return cudaEventCreate(e, site); }
cudaError_t cudaEventDestroy(cudaEvent_t e, Site site) {
  Api api("cudaEventDestroy", site);
  object_gone(e, "event");
  drain_all();  // something may still record it
  delete e;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  e->stream = s, e->recorded = true, e->done = false;
  enqueue(s, [=] { clock_gettime(CLOCK_MONOTONIC, &e->time), e->done = true; });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  if (e->recorded && !e->done) drain(e->stream);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  if (!e->recorded || e->done) return cudaSuccess;
  cudaEventSynchronize(e);  // not yet, but who asks again will hear yes
  return cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  enqueue(s, [=] { cudaEventSynchronize(e); });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end, Site site) {
  Api api("cudaEventElapsedTime", site);
  for (Event* e : {begin, end}) {
    if (!e->recorded) fail("the event was never recorded");
    if (!e->done) fail("the event has not happened yet: nothing waited for it");
  }
  auto seconds = [](const timespec& t) { return double(t.tv_sec) + 1e-9 * double(t.tv_nsec); };
  *ms = float(1e3 * (seconds(end->time) - seconds(begin->time)));
  return cudaSuccess;
}
