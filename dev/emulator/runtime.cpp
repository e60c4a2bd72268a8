// runtime.cpp - the CUDA runtime API: device memory, copies, the stream, events.
//
// Real calls return an error for a bad argument, and programs rarely look; here a bad argument ends the program
// with a message. Returned is what a correct program must handle: out of memory, and a card that fails.
#include "cuda_runtime.h"

#include <stdio.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <map>

#include "engine.h"

namespace emu {

struct Thing {
  size_t bytes;
  Site site;
};
using Things = std::map<const void*, Thing>;
struct Stream {};
struct Event {
  bool done = false;
  double ms = 0;
};
static std::map<std::string, Things> things;  // by kind
static Things &device_memory = things["device memory"], &pinned_memory = things["pinned memory"];
static size_t bytes_in_use;
static cudaError_t last_error;

// ---- what a program calls, and what it made and must destroy ------------------------------------------
Api* api = nullptr;
Api::Api(const char* name, Site site) : name(name), site(site), outer(api) { api = this; }
Api::~Api() { api = outer; }

void made(const char* kind, const void* p, Site site, size_t bytes) { things[kind][p] = {bytes, site}; }
size_t gone(const char* kind, const void* p) {
  auto it = things[kind].find(p);
  if (it == things[kind].end()) fail("%p is no %s, or was freed before", p, kind);
  const size_t bytes = it->second.bytes;
  things[kind].erase(it);
  return bytes;
}
static void at_exit(int status, void*) {
  if (status) return;  // a failed program has better things to say
  for (auto& [kind, all] : things)
    for (auto& [p, t] : all) {
      fprintf(stderr, "emu: error: still there at exit: %s of %zu bytes, made at %s:%d\n", kind.c_str(),
              t.bytes, t.site.file, t.site.line);
      status = FAILED;
    }
  fflush(stdout);
  if (status) _exit(status);
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
std::string describe(const void* p) {
  const auto* a = find(device_memory, p, 65536);
  if (!a) return "";
  const auto& [begin, t] = *a;
  return ", byte " + std::to_string(distance(begin, p)) + " of " + std::to_string(t.bytes) + " allocated at " +
         t.site.file + ":" + std::to_string(t.site.line);
}

// ---- the stream ---------------------------------------------------------------------------------------
// A card does its work some time after the call, at the latest when the program waits for it. Forward order
// does everything at once, reverse as late as it may, random either: a missing wait gives wrong numbers in one.
// There is one queue, for a program has one stream, and the default stream takes turns with that.
static std::deque<std::function<void()>> queue;

static void check_stream(const Stream* s) {
  if (s && !things["stream"].count(s))
    fail("stream %p was not made by cudaStreamCreate, or was destroyed", static_cast<const void*>(s));
}
static void drain() {
  while (!queue.empty()) {
    const auto work = std::move(queue.front());
    queue.pop_front();
    race_window(true);
    work();
    race_window(false);
  }
}
void enqueue(Stream* s, std::function<void()> work) {
  check_stream(s);
  queue.push_back([name = api->name, site = api->site, work = std::move(work)] {
    Api again(name, site);  // whenever it runs, it belongs to this call
    work();
  });
  if (order == Order::forward || (order == Order::random && random_below(2))) drain();
}

// ---- a card that fails --------------------------------------------------------------------------------
// EMU_FAIL=cudaStreamSynchronize:5:214 - the fifth such call returns error 214, and so does every call from
// then on, as when a card is lost.
cudaError_t failure(const char* call) {
  static char name[100] = "";
  static int calls = 0, code = 0;
  static bool lost = false;
  static const char* const wanted = getenv("EMU_FAIL");
  static const int given = wanted ? sscanf(wanted, "%99[^:]:%d:%d", name, &calls, &code) : 0;
  if (given != 0 && given != 3)
    fail("EMU_FAIL is \"%s\", expected a call, which one and its error: cudaMalloc:1:2", wanted);
  if (!strcmp(call, name) && --calls == 0) lost = true;
  return lost ? last_error = cudaError_t(code) : cudaSuccess;
}
}  // namespace emu
using namespace emu;

// Opens every function of the API.
#define CALL(name)      \
  Api api(#name, site); \
  if (const cudaError_t error = failure(#name); error != cudaSuccess) return error

const char* cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorDevicesUnavailable:
      return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorECCUncorrectable:
      return "uncorrectable ECC error encountered";
    default:
      return "unknown error";
  }
}
cudaError_t cudaGetLastError() {
  const cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}
static int number_of_cards() {
  const char* cards = getenv("EMU_CARDS");  // many processes have one each: see nccl.h
  return cards ? std::max(atoi(cards), 1) : 1;
}
cudaError_t cudaGetDeviceCount(int* count, Site site) {
  CALL(cudaGetDeviceCount);
  *count = number_of_cards();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device, Site site) {
  CALL(cudaSetDevice);
  const bool there = device >= 0 && device < number_of_cards();
  return there ? cudaSuccess : last_error = cudaErrorInvalidDevice;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device, Site site) {
  CALL(cudaDeviceGetPCIBusId);
  snprintf(id, size_t(length), "%d", device);
  return cudaSetDevice(device);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device, Site site) {
  CALL(cudaGetDeviceProperties);
  // Few multiprocessors, so that grids sized by their number must loop.
  *p = {"CPU emulator", card.major, card.minor, 4, 1 << 20, card.shared_bytes};
  return cudaSetDevice(device);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total, Site site) {
  CALL(cudaMemGetInfo);
  *free = device_bytes > bytes_in_use ? device_bytes - bytes_in_use : 0;
  *total = device_bytes;
  return cudaSuccess;
}

// ---- memory -------------------------------------------------------------------------------------------
static size_t on_card(size_t bytes) { return (bytes + 511) / 512 * 512; }  // what an allocation takes there
cudaError_t cudaMalloc(void** p, size_t bytes, Site site) {
  CALL(cudaMalloc);
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  const bool fits = bytes <= device_bytes && on_card(bytes) + bytes_in_use <= device_bytes;
  if (fits) *p = device_alloc(bytes);
  if (!*p) return last_error = cudaErrorMemoryAllocation;
  memset(*p, 0xFF, bytes);  // NaN
  bytes_in_use += on_card(bytes);
  made("device memory", *p, site, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* p, Site site) {
  CALL(cudaFree);
  if (!p) return cudaSuccess;
  drain();
  const size_t bytes = gone("device memory", p);
  bytes_in_use -= on_card(bytes);
  device_free(p, bytes);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes, Site site) {
  CALL(cudaMallocHost);
  *p = malloc(bytes);
  if (!*p) return last_error = cudaErrorMemoryAllocation;
  memset(*p, 0xFF, bytes);
  made("pinned memory", *p, site, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p, Site site) {
  CALL(cudaFreeHost);
  if (!p) return cudaSuccess;
  drain();
  gone("pinned memory", p);
  free(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s,
                            Site site) {
  CALL(cudaMemcpyAsync);
  if (kind != cudaMemcpyDeviceToHost) check_device("destination", to, bytes);
  if (kind != cudaMemcpyHostToDevice) check_device("source", from, bytes);
  enqueue(s, [=] {
    memcpy(to, from, bytes);
    if (kind != cudaMemcpyDeviceToHost) touch(to, bytes, Access::write);
  });
  // Only between the card and pinned memory does the call return before it has used the host's memory.
  const auto late = [](const void* p) { return find(device_memory, p) || find(pinned_memory, p); };
  if (!late(to) || !late(from)) drain();
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t s, Site site) {
  CALL(cudaMemsetAsync);
  check_device("destination", p, bytes);
  enqueue(s, [=] {
    memset(p, value, bytes);
    touch(p, bytes, Access::write);
  });
  return cudaSuccess;
}

// ---- the stream and events ----------------------------------------------------------------------------
cudaError_t cudaStreamCreate(cudaStream_t* s, Site site) {
  CALL(cudaStreamCreate);
  if (!things["stream"].empty()) fail("a second stream: the emulator has one besides the default stream");
  made("stream", *s = new Stream, site);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s, Site site) {
  CALL(cudaStreamDestroy);
  drain();
  gone("stream", s);
  delete s;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s, Site site) {
  CALL(cudaStreamSynchronize);
  check_stream(s);
  drain();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned, Site site) {
  CALL(cudaEventCreate);
  made("event", *e = new Event, site);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e, Site site) {
  CALL(cudaEventDestroy);
  drain();  // something may still record it
  gone("event", e);
  delete e;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s, Site site) {
  CALL(cudaEventRecord);
  e->done = false;
  enqueue(s, [=] {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    e->ms = std::chrono::duration<double, std::milli>(time).count();
    e->done = true;
  });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e, Site site) {
  CALL(cudaEventSynchronize);
  if (!e->done) drain();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end, Site site) {
  CALL(cudaEventElapsedTime);
  if (!begin->done || !end->done) fail("an event has not happened yet: nothing recorded it, or waited for it");
  *ms = float(end->ms - begin->ms);
  return cudaSuccess;
}
