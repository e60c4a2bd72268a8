// profile.h - the table of --profile: what each function of the GPU trainer cost, over some steps.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "dev/common/errors.h"  // format

// One function, or one shape of a product, summed over all calls. ms: of its own kernels, not of functions it
// calls. bytes and flops: what it must move and compute by its formula; 0 where it states none.
struct ProfileRow {
  std::string name;
  size_t calls = 0;
  double ms = 0, bytes = 0, flops = 0;
};

// Per step, the most expensive first. Without times (timed = false: the emulator's mean nothing) in the order
// given, and columns that need a time stay empty.
inline std::string profile_table(std::vector<ProfileRow> rows, size_t steps, bool timed) {
  double total = 0;
  for (const ProfileRow& row : rows) total += row.ms;
  std::string text = format("profile of %zu step%s, ", steps, steps == 1 ? "" : "s");
  if (timed)
    text += format("%.3f ms each, the events' own time included\n", total / double(steps));
  else
    text += "emulated: no times\n";
  text += "  calls  ms/step  share   MB/step    GB/s  GFLOP/step  TFLOP/s\n";
  const auto dearer = [](const ProfileRow& a, const ProfileRow& b) { return a.ms > b.ms; };
  if (timed) std::stable_sort(rows.begin(), rows.end(), dearer);
  const auto cell = [](int width, int digits, double value, bool known) {
    return known ? format("%*.*f", width, digits, value) : std::string(size_t(width) - 1, ' ') + "-";
  };
  for (const ProfileRow& row : rows) {
    const double n = double(steps), seconds = row.ms * 1e-3;
    const bool moves = row.bytes > 0, computes = row.flops > 0, rate = timed && row.ms > 0;
    text += cell(7, 0, double(row.calls) / n, true) + cell(9, 3, row.ms / n, timed);
    text += cell(6, 1, 100 * row.ms / total, timed && total > 0) + (timed ? "%" : " ");
    text += cell(10, 2, row.bytes / n / 1e6, moves) + cell(8, 0, row.bytes / seconds / 1e9, moves && rate);
    text += cell(12, 2, row.flops / n / 1e9, computes);
    text += cell(9, 1, row.flops / seconds / 1e12, computes && rate) + "  " + row.name + "\n";
  }
  return text;
}
