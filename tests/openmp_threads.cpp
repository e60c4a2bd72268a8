// openmp_threads.cpp - the OpenMP calls that g++ puts into the trainer, on std::thread.
//
// The thread sanitizer sees the threads and locks of the C++ library but not those inside g++'s OpenMP library:
// with that one, every loop would be reported as a race. Linked in its place (-fopenmp when compiling, not when
// linking), this file makes the same promises and no more: a team starts after what came before it, ends before
// what comes after, and barriers hold. Chunks of a dynamic loop are handed out without ordering anything, as
// OpenMP does it. A call that is missing here shows when linking.
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Count = unsigned long long;
constexpr size_t MAX_LOOPS = 1024;  // dynamic loops in one parallel region

struct Team {
  size_t size;
  std::mutex mutex;
  std::condition_variable next_round;
  size_t waiting = 0, round = 0;
  std::atomic<Count> handed_out[MAX_LOOPS] = {};  // iterations, by the loop's number

  void barrier() {
    std::unique_lock<std::mutex> lock(mutex);
    const size_t mine = round;
    if (++waiting == size)
      waiting = 0, round++, next_round.notify_all();
    else
      next_round.wait(lock, [&] { return round != mine; });
  }
};

struct Member {  // one thread's place in its team, and the dynamic loop it is in
  Team* team = nullptr;
  size_t number = 0, loops = 0;
  Count start = 0, end = 0, step = 1, chunk = 1;

  bool next(Count* begin, Count* stop) {
    const Count total = (end - start + step - 1) / step;
    const Count first = team->handed_out[loops - 1].fetch_add(chunk, std::memory_order_relaxed);
    if (first >= total) return false;
    *begin = start + first * step;
    *stop = start + (total - first < chunk ? total : first + chunk) * step;
    return true;
  }
};
thread_local Member self;

int threads_wanted = getenv("OMP_NUM_THREADS") ? atoi(getenv("OMP_NUM_THREADS")) : 4;

}  // namespace

extern "C" {

int omp_get_max_threads() { return threads_wanted; }
void omp_set_num_threads(int n) { threads_wanted = n; }
int omp_get_num_threads() { return self.team ? int(self.team->size) : 1; }
int omp_get_thread_num() { return int(self.number); }

void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned) {
  Team team;
  team.size = num_threads > 0 ? num_threads : size_t(threads_wanted);
  const auto run = [&](size_t number) {
    self = Member();
    self.team = &team, self.number = number;
    body(data);
    self = Member();
  };
  std::vector<std::thread> others;
  for (size_t number = 1; number < team.size; number++) others.emplace_back(run, number);
  run(0);
  for (std::thread& other : others) other.join();
}

void GOMP_barrier() {
  if (self.team) self.team->barrier();
}

bool GOMP_loop_ull_nonmonotonic_dynamic_next(Count* begin, Count* stop) { return self.next(begin, stop); }
bool GOMP_loop_ull_nonmonotonic_dynamic_start(bool, Count start, Count end, Count step, Count chunk,
                                              Count* begin, Count* stop) {
  if (++self.loops > MAX_LOOPS)
    fprintf(stderr, "openmp_threads.cpp: more than %zu loops in a region\n", MAX_LOOPS), abort();
  self.start = start, self.end = end, self.step = step, self.chunk = chunk;
  return self.next(begin, stop);
}
void GOMP_loop_end() { GOMP_barrier(); }
void GOMP_loop_end_nowait() {}

}  // extern "C"
