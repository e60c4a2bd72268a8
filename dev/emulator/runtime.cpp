// runtime.cpp - the CUDA runtime API: device memory, copies, streams, events.
//
// Real calls return an error for a bad argument, and programs rarely look; here a bad argument ends the program
// with a message. Returned is what a correct program must handle: out of memory, no such device, not ready.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <map>
#include <set>

#include "cuda_runtime.h"
#include "engine.h"

namespace emu {

struct Thing {
  size_t bytes;
  Site site;
};
typedef std::map<const void*, Thing> Things;
struct Stream {
  bool blocking = true;
  std::deque<std::function<void()>> queue;
};
struct Event {
  Stream* stream = nullptr;
  bool recorded = false, done = false;
  double ms = 0;
};
static std::map<std::string, Things> things;  // by kind
static Things &device_memory = things["device memory"], &pinned_memory = things["pinned memory"];
static std::set<Stream*> streams;
static Stream default_stream;
static size_t bytes_in_use;
static cudaError_t last_error;

// ---- what a program made and must destroy -------------------------------------------------------------
void made(const char* kind, const void* p, Site site, size_t bytes) { things[kind][p] = {bytes, site}; }
size_t gone(const char* kind, const void* p) {
  auto it = things[kind].find(p);
  if (it == things[kind].end()) fail("%p is no %s, or was freed before", p, kind);
  const size_t bytes = it->second.bytes;
  things[kind].erase(it);
  return bytes;
}
static void at_exit(int status, void*) {
  size_t found = 0, left = 10;
  for (auto& [kind, all] : things) found += all.size();
  if (status || !found) return;  // a failed program has better things to say
  fflush(stdout);
  fprintf(stderr, "emu: error: %zu allocations and objects are still there at exit:\n", found);
  for (auto& [kind, all] : things)
    for (auto& [p, t] : all)
      if (left && left--)
        fprintf(stderr, "  %s of %zu bytes, made at %s:%d\n", kind.c_str(), t.bytes, t.site.file, t.site.line);
  _exit(FAILED);
}
static const int registered = on_exit(at_exit, nullptr);

// ---- pointers -----------------------------------------------------------------------------------------
// The allocation that begins last at or before p, if p lies in it or at its end.
static const Things::value_type* find(const Things& memory, const void* p, size_t slack = 0) {
  auto it = memory.upper_bound(p);
  if (it == memory.begin()) return nullptr;
  --it;
  return distance(it->first, p) <= it->second.bytes + slack ? &*it : nullptr;
}
void check_device(const char* what, const void* p, size_t bytes) {
  if (!bytes) return;
  const auto* a = find(device_memory, p);
  if (!a) fail("%s: %p is not device memory", what, p);
  const auto& [begin, t] = *a;
  if (distance(begin, p) + bytes > t.bytes)
    fail("%s: %zu bytes at offset %zu run past the end of %zu bytes allocated at %s:%d", what, bytes,
         distance(begin, p), t.bytes, t.site.file, t.site.line);
}
static void check_host(const char* what, const void* p, size_t bytes) {
  const auto* a = bytes ? find(device_memory, p) : nullptr;
  if (a && distance(a->first, p) < a->second.bytes)
    fail("%s: %p is device memory, expected host memory", what, p);
}
void check_pointer(const char* kernel, size_t parameter, const void* p) {
  if (p && !find(device_memory, p))
    fail("%s: parameter %zu (%p) is not device memory (but the host's, or freed)", kernel, parameter, p);
}
std::string describe(const void* p) {
  const auto* a = find(device_memory, p, 65536);
  if (!a) return "";
  const auto& [begin, t] = *a;
  return ", byte " + std::to_string(distance(begin, p)) + " of " + std::to_string(t.bytes) + " allocated at " +
         t.site.file + ":" + std::to_string(t.site.line);
}

// ---- streams ------------------------------------------------------------------------------------------
// A real stream does its work some time after the call, at the latest when the program waits for it. Forward
// order does everything at once, reverse as late as it may, random either: a missing wait gives wrong numbers
// in one. The default stream waits for what was queued before in blocking streams, and they wait for it.

// Device memory is closed to the host, and open while a kernel or a library call runs.
static void open_device(bool open) {
#if defined(EMU_RACE)
  race_window(open);
#else
  for (auto& [p, t] : device_memory) (open ? allow : forbid)(p, t.bytes);
#endif
}
static Stream& known(Stream* s) {
  if (s && !streams.count(s))
    fail("stream %p was not made by cudaStreamCreate, or was destroyed", static_cast<void*>(s));
  return s ? *s : default_stream;
}
void drain(Stream* s) {
  Stream& stream = known(s);
  while (!stream.queue.empty()) {
    auto work = std::move(stream.queue.front());
    stream.queue.pop_front();
    open_device(true);
    work();  // may be a wait for another stream's event, which drains that one, and touches no memory itself
    open_device(false);
  }
}
static void drain_all() {
  drain(nullptr);
  for (Stream* s : streams) drain(s);
}
void enqueue(Stream* s, std::function<void()> work) {
  Stream& stream = known(s);
  if (s && stream.blocking) drain(nullptr);
  if (!s)
    for (Stream* other : streams)
      if (other->blocking) drain(other);
  stream.queue.push_back([name = api->name, site = api->site, work = std::move(work)] {
    Api again(name, site);  // whenever it runs, it belongs to this call
    work();
  });
  if (order == Order::forward || (order == Order::random && random_below(2))) drain(s);
}
}  // namespace emu
using namespace emu;

// ---- devices and errors -------------------------------------------------------------------------------
static cudaError_t result(cudaError_t e) { return e ? last_error = e : e; }
const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaSuccess                 ? "no error"
         : e == cudaErrorMemoryAllocation ? "out of memory"
         : e == cudaErrorInvalidDevice    ? "invalid device ordinal"
                                          : "device not ready";
}
cudaError_t cudaGetLastError() {
  const cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  // Few multiprocessors, so that grids sized by their number must loop.
  *p = {"CPU emulator", card.major, card.minor, 4, 1 << 20, card.shared_bytes};
  return cudaSetDevice(device);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = device_bytes > bytes_in_use ? device_bytes - bytes_in_use : 0, *total = device_bytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  drain_all();
  return cudaSuccess;
}

// ---- memory -------------------------------------------------------------------------------------------
static size_t on_card(size_t bytes) { return (bytes + 511) / 512 * 512; }  // what an allocation takes there
cudaError_t cudaMalloc(void** p, size_t bytes, Site site) {
  Api api("cudaMalloc", site);
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > device_bytes || on_card(bytes) + bytes_in_use > device_bytes || !(*p = device_alloc(bytes)))
    return result(cudaErrorMemoryAllocation);
  memset(*p, 0xFF, bytes);  // NaN
  bytes_in_use += on_card(bytes);
  made("device memory", *p, site, bytes);
  open_device(false);
  return cudaSuccess;
}
cudaError_t cudaFree(void* p, Site site) {
  Api api("cudaFree", site);
  if (!p) return cudaSuccess;
  drain_all();
  const size_t bytes = gone("device memory", p);
  bytes_in_use -= on_card(bytes);
  device_free(p, bytes);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes, Site site) {
  if (!(*p = malloc(bytes))) return result(cudaErrorMemoryAllocation);
  memset(*p, 0xFF, bytes);
  made("pinned memory", *p, site, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p, Site site) {
  Api api("cudaFreeHost", site);
  if (!p) return cudaSuccess;
  drain_all();
  gone("pinned memory", p);
  free(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s,
                            Site site) {
  Api api("cudaMemcpy", site);
  (kind == cudaMemcpyDeviceToHost ? check_host : check_device)("destination", to, bytes);
  (kind == cudaMemcpyHostToDevice ? check_host : check_device)("source", from, bytes);
  const char *a = static_cast<const char*>(to), *b = static_cast<const char*>(from);
  if (bytes && a < b + bytes && b < a + bytes) fail("source and destination overlap");
  enqueue(s, [=] {
    memcpy(to, from, bytes);
    if (kind != cudaMemcpyDeviceToHost) touch(to, bytes, Access::write);
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
  enqueue(s, [=] { memset(p, value, bytes), touch(p, bytes, Access::write); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes, Site site) {
  return cudaMemsetAsync(p, value, bytes, nullptr, site);
}

// ---- streams and events -------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags, Site site) {
  made("stream", *s = new Stream, site);
  (*s)->blocking = !(flags & cudaStreamNonBlocking);
  streams.insert(*s);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* s, Site site) { return cudaStreamCreateWithFlags(s, 0, site); }
cudaError_t cudaStreamDestroy(cudaStream_t s, Site site) {
  Api api("cudaStreamDestroy", site);
  gone("stream", s);
  drain(s);
  streams.erase(s);
  delete s;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s, Site site) {
  Api api("cudaStreamSynchronize", site);
  s ? drain(s) : drain_all();
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e, Site site) {
  made("event", *e = new Event, site);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned, Site site) { return cudaEventCreate(e, site); }
cudaError_t cudaEventDestroy(cudaEvent_t e, Site site) {
  Api api("cudaEventDestroy", site);
  gone("event", e);
  drain_all();  // something may still record it
  delete e;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s, Site site) {
  Api api("cudaEventRecord", site);
  e->stream = s, e->recorded = true, e->done = false;
  enqueue(s, [=] {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    e->ms = std::chrono::duration<double, std::milli>(time).count(), e->done = true;
  });
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
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned, Site site) {
  Api api("cudaStreamWaitEvent", site);
  enqueue(s, [=] { cudaEventSynchronize(e); });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end, Site site) {
  Api api("cudaEventElapsedTime", site);
  for (Event* e : {begin, end}) {
    if (!e->recorded) fail("the event was never recorded");
    if (!e->done) fail("the event has not happened yet: nothing waited for it");
  }
  *ms = float(end->ms - begin->ms);
  return cudaSuccess;
}
