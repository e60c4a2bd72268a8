// runtime.cpp - the CUDA runtime API: device memory, copies, streams, events.
//
// Real calls return an error for a bad argument and programs rarely look; here a bad argument ends the program with a
// message. Only what a correct program must handle is returned: out of memory, no such device, not ready.
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

// ---- what exists: device memory, pinned host memory, streams, events, library handles -------------------
struct Allocation { size_t bytes; Site site; };
struct Stream { bool blocking = true; std::deque<std::function<void()>> queue; };
struct Event { Stream* stream = nullptr; bool recorded = false, done = false; timespec time{}; };
static std::map<const char*, Allocation> device_memory, pinned_memory;
static std::map<const void*, std::pair<const char*, Site>> objects;  // what it is, where it was made
static std::set<Stream*> streams;
static Stream default_stream;
static size_t bytes_in_use;
static cudaError_t last_error;

static void at_exit(int status, void*) {  // what a clean exit left behind; a failed program has better to say
  if (status) return;
  size_t bytes = 0;
  const size_t found = device_memory.size() + pinned_memory.size() + objects.size();
  for (auto& [p, a] : device_memory) bytes += a.bytes;
  if (!found) return;
  fflush(stdout);
  fprintf(stderr, "emu: error: at exit %zu device allocations (%zu bytes) and %zu other objects are still there:\n", device_memory.size(),
          bytes, found - device_memory.size());
  int left = 10;
  for (auto& [p, a] : device_memory) if (left-- > 0) fprintf(stderr, "  cudaMalloc of %zu bytes at %s:%d\n", a.bytes, a.site.file, a.site.line);
  for (auto& [p, a] : pinned_memory) if (left-- > 0) fprintf(stderr, "  cudaMallocHost of %zu bytes at %s:%d\n", a.bytes, a.site.file, a.site.line);
  for (auto& [p, o] : objects) if (left-- > 0) fprintf(stderr, "  %s made at %s:%d\n", o.first, o.second.file, o.second.line);
  if (left < 0) fprintf(stderr, "  and %d more\n", -left);
  _exit(FAILED);
}
static void register_at_exit() {
  static const int once = on_exit(at_exit, nullptr);
  (void)once;
}
void object_made(const void* p, const char* what, Site site) {
  register_at_exit();
  objects[p] = {what, site};
}
void object_gone(const void* p, const char* what) {
  auto it = objects.find(p);
  if (it == objects.end() || strcmp(it->second.first, what)) fail("%p is no %s, or was destroyed before", p, what);
  objects.erase(it);
}

// ---- pointers -----------------------------------------------------------------------------------------
// The allocation that holds p (one past its end counts, if nothing begins there), or null.
static const std::pair<const char* const, Allocation>* find(const std::map<const char*, Allocation>& memory, const void* p) {
  auto it = memory.upper_bound(static_cast<const char*>(p));
  if (it == memory.begin()) return nullptr;
  --it;
  return static_cast<const char*>(p) <= it->first + it->second.bytes ? &*it : nullptr;
}
void check_device(const char* what, const void* p, size_t bytes) {
  if (!bytes) return;
  const auto* a = find(device_memory, p);
  if (!a) fail("%s: %p is not device memory", what, p);
  if (static_cast<const char*>(p) + bytes > a->first + a->second.bytes)
    fail("%s: %zu bytes at offset %zu run past the end of %zu bytes allocated at %s:%d", what, bytes, size_t(static_cast<const char*>(p) - a->first),
         a->second.bytes, a->second.site.file, a->second.site.line);
}
void check_host(const char* what, const void* p, size_t bytes) {
  const auto* a = bytes ? find(device_memory, p) : nullptr;
  if (a && static_cast<const char*>(p) < a->first + a->second.bytes) fail("%s: %p is device memory, expected host memory", what, p);
}
void check_pointer(const char* kernel, Site site, size_t i, const void* p) {
  if (p && !find(device_memory, p))
    fail("launch of %s at %s:%d: pointer parameter %zu (%p) is not device memory (host memory, or freed)", kernel, site.file, site.line, i, p);
}
std::string describe(const void* p) {  // where p lies, seen from the allocation before it
  auto it = device_memory.upper_bound(static_cast<const char*>(p));
  if (it == device_memory.begin()) return "";
  --it;
  const size_t offset = size_t(static_cast<const char*>(p) - it->first), bytes = it->second.bytes;
  if (offset > bytes + 65536) return "";
  return ", byte " + std::to_string(offset) + " of " + std::to_string(bytes) + " allocated at " + it->second.site.file + ":" + std::to_string(it->second.site.line);
}
// Outside kernels and library calls device memory is closed.
static int open_count = 0;
static void window([[maybe_unused]] bool open) {
#if defined(EMU_ASAN)
  for (auto& [p, a] : device_memory)
    open ? __asan_unpoison_memory_region(p, a.bytes) : __asan_poison_memory_region(p, a.bytes);
#elif defined(EMU_RACE)
  race_window(open);
#endif
}
DeviceAccess::DeviceAccess() { if (open_count++ == 0) window(true); }
DeviceAccess::~DeviceAccess() { if (--open_count == 0) window(false); }

// ---- streams ------------------------------------------------------------------------------------------
// A real stream runs its work some time after the call, at the latest when the program waits for it. Forward order
// runs everything at once, reverse as late as it may, random either; so a missing wait gives wrong results in one.
// Work in the default stream waits for all work queued before, and the other way round (blocking streams).
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
  if (s && !streams.count(s)) fail("stream %p was not made by cudaStreamCreate, or was destroyed", static_cast<void*>(s));
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
  switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
  }
  return "unrecognized error code";
}
cudaError_t cudaGetLastError() { const cudaError_t e = last_error; last_error = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  // An A100's limits; few multiprocessors, so that grids sized by them must loop.
  *p = {"CPU emulator", device_bytes, 48 * 1024, MAX_SHARED, MAX_SHARED + 1024, 8, 0, 4, 2048, 32, 65536, 1 << 20, 5120};
  return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaRuntimeGetVersion(int* version) { *version = 0; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = device_bytes > bytes_in_use ? device_bytes - bytes_in_use : 0, *total = device_bytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { drain_all(); return cudaSuccess; }

// ---- memory -------------------------------------------------------------------------------------------
static size_t on_card(size_t bytes) { return (bytes + 511) / 512 * 512; }  // what an allocation takes on the card
cudaError_t cudaMalloc(void** p, size_t bytes, Site site) {
  Api api("cudaMalloc", site);
  register_at_exit();
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > device_bytes || on_card(bytes) > device_bytes - bytes_in_use) return result(cudaErrorMemoryAllocation);
#if defined(EMU_RACE)
  *p = race_alloc(bytes);
#else
  if (posix_memalign(p, 256, bytes)) return result(cudaErrorMemoryAllocation);
#endif
  memset(*p, 0xFF, bytes);
  bytes_in_use += on_card(bytes);
  device_memory[static_cast<char*>(*p)] = {bytes, site};
  if (open_count == 0) window(false);
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
  Api api("cudaMallocHost", site);
  register_at_exit();
  if (!(*p = malloc(bytes))) return result(cudaErrorMemoryAllocation);
  memset(*p, 0xFF, bytes);
  pinned_memory[static_cast<char*>(*p)] = {bytes, site};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p, Site site) {
  Api api("cudaFreeHost", site);
  if (!p) return cudaSuccess;
  drain_all();
  if (!pinned_memory.erase(static_cast<char*>(p))) fail("%p was not returned by cudaMallocHost, or was freed before", p);
  free(p);
  return cudaSuccess;
}
static void copy(void* to, const void* from, size_t bytes) {
  DeviceAccess open;
  memcpy(to, from, bytes);
  if (find(device_memory, to)) touch(to, bytes, Access::write);
}
static void check_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const char *a = static_cast<const char*>(to), *b = static_cast<const char*>(from);
  if (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) check_device("destination", to, bytes);
  else if (kind != cudaMemcpyDefault) check_host("destination", to, bytes);
  if (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) check_device("source", from, bytes);
  else if (kind != cudaMemcpyDefault) check_host("source", from, bytes);
  if (bytes && a < b + bytes && b < a + bytes) fail("source and destination overlap");
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream, Site site) {
  auto work = [=] { Api api("cudaMemcpyAsync", site); check_copy(to, from, bytes, kind); copy(to, from, bytes); };
  { Api api("cudaMemcpyAsync", site); check_copy(to, from, bytes, kind); }
  // Only between the card and pinned memory does the call return before the host's memory has been used.
  auto far = [](const void* p) { return find(device_memory, p) || find(pinned_memory, p); };
  enqueue(stream, work);
  if (!far(to) || !far(from)) drain(stream);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream, Site site) {
  auto work = [=] {
    Api api("cudaMemset", site);
    check_device("destination", p, bytes);
    DeviceAccess open;
    memset(p, value, bytes);
    touch(p, bytes, Access::write);
  };
  { Api api("cudaMemset", site); check_device("destination", p, bytes); }
  enqueue(stream, work);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Site site) {
  Api api("cudaMemcpy", site);
  check_copy(to, from, bytes, kind);
  enqueue(nullptr, [=] { copy(to, from, bytes); });
  drain(nullptr);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes, Site site) { return cudaMemsetAsync(p, value, bytes, nullptr, site); }

// ---- streams and events -------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags, Site site) {
  *s = new Stream;
  (*s)->blocking = !(flags & cudaStreamNonBlocking);
  streams.insert(*s);
  object_made(*s, "stream", site);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* s, Site site) { return cudaStreamCreateWithFlags(s, cudaStreamDefault, site); }
cudaError_t cudaStreamDestroy(cudaStream_t s, Site site) {
  Api api("cudaStreamDestroy", site);
  object_gone(s, "stream");
  drain(s);
  streams.erase(s);
  delete s;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  if (s) drain(s);
  else drain_all();
  return cudaSuccess;
}
static void wait_for(Event* e) {
  if (e->recorded && !e->done) drain(e->stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  enqueue(s, [=] { wait_for(e); });
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned, Site site) {
  *e = new Event;
  object_made(*e, "event", site);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e, Site site) { return cudaEventCreateWithFlags(e, cudaEventDefault, site); }
cudaError_t cudaEventDestroy(cudaEvent_t e, Site site) {
  Api api("cudaEventDestroy", site);
  object_gone(e, "event");
  wait_for(e);
  drain_all();
  delete e;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  e->stream = s, e->recorded = true, e->done = false;
  enqueue(s, [=] { clock_gettime(CLOCK_MONOTONIC, &e->time), e->done = true; });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {  // not yet, if it is late; but asking again helps
  if (!e->recorded || e->done) return cudaSuccess;
  wait_for(e);
  return cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  wait_for(e);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end, Site site) {
  Api api("cudaEventElapsedTime", site);
  for (Event* e : {begin, end}) {
    if (!e->recorded) fail("the event was never recorded");
    if (!e->done) fail("the event has not happened yet: nothing waited for it");
  }
  *ms = float(double(end->time.tv_sec - begin->time.tv_sec) * 1e3 + double(end->time.tv_nsec - begin->time.tv_nsec) * 1e-6);
  return cudaSuccess;
}
