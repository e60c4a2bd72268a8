// train.h - what both trainers do around the model.
#pragma once
#include <atomic>
#include <cmath>
#include <csignal>
#include <initializer_list>

#include <unistd.h>

// ---- the learning rate ---------------------------------------------------------------------------------
// Linear warm-up, then half a cosine down to a fraction of the peak.
//
//        lr |    /--.                     step s (from 0) of the warm-up trains at lr (s + 1) / warmup, so the
//           |   /    '-.                  first step already moves; its last step trains at lr, and the last
//   min lr |  /         '--.______        step of the run at min_ratio * lr. A step past the end stays there.
//           +--|------------|-----> step
inline double learning_rate(size_t step, size_t steps, size_t warmup, double lr, double min_ratio) {
  if (step < warmup) return lr * double(step + 1) / double(warmup);
  const size_t peak = warmup > 0 ? warmup - 1 : 0;  // the step that trains at lr
  if (step == peak) return lr;                      // no warm-up: the first step, also of a run of one step
  if (step >= steps || step + 1 == steps) return lr * min_ratio;
  const double progress = double(step - peak) / double(steps - 1 - peak);  // 0 at the peak, 1 at the last step
  return lr * (min_ratio + (1 - min_ratio) * 0.5 * (1 + std::cos(3.141592653589793 * progress)));
}

// ---- stopping ------------------------------------------------------------------------------------------
// Ctrl-C and SIGTERM ask the loop to stop after its step, so that it can save. The second one ends the program
// at once, with the exit status of a program killed by Ctrl-C; files on the disk are whole at any moment.
inline std::atomic<int> stop_requested{0};  // the handler runs on whatever thread the signal comes to
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler must not wait for a lock");

inline void request_stop(int) {
  if (stop_requested) _exit(130);
  stop_requested = 1;
}
inline void catch_stop_signals() {
  struct sigaction action = {};
  action.sa_handler = request_stop;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // a signal must not cut a write short
  for (int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
  signal(SIGXFSZ, SIG_IGN);  // a file that may not grow any more is an error with a message, as a full disk is
}

// A program built for one processor (-march=native) says so when it meets another, instead of dying in silence.
inline void illegal_instruction(int) {
  const char text[] =
      "error: this program was built for another processor; build it here with make, or for any"
      " with make PORTABLE=1\n";
  _exit(write(STDERR_FILENO, text, sizeof(text) - 1) < 0 ? 2 : 1);
}
__attribute__((constructor)) inline void catch_illegal_instruction() { signal(SIGILL, illegal_instruction); }
