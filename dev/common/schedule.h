// schedule.h - the learning rate: linear warm-up, then half a cosine down to a fraction of the peak.
//
//        lr |    /--.                     step s (from 0) of the warm-up trains at lr (s + 1) / warmup, so the
//           |   /    '-.                  first step already moves; its last step trains at lr, and the last
//   min lr |  /         '--.______        step of the run at min_ratio * lr. A step past the end stays there.
//           +--|------------|-----> step
#pragma once
#include <cmath>
#include <cstddef>

inline double learning_rate(size_t step, size_t steps, size_t warmup, double lr, double min_ratio) {
  if (step < warmup) return lr * double(step + 1) / double(warmup);
  const size_t peak = warmup > 0 ? warmup - 1 : 0;  // the step that trains at lr
  if (step == peak) return lr;                      // no warm-up: the first step, also of a run of one step
  if (step >= steps || step + 1 == steps) return lr * min_ratio;
  const double progress = double(step - peak) / double(steps - 1 - peak);  // 0 at the peak, 1 at the last step
  return lr * (min_ratio + (1 - min_ratio) * 0.5 * (1 + std::cos(3.141592653589793 * progress)));
}
