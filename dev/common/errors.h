// errors.h - failing well: one-line errors, checked sizes and memory.
//
// What cannot go on ends in fatal(): one line on stderr that names the thing, what was found and what was
// expected. A caller with a second plan asks for that line instead, by error_of().
#pragma once
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

static_assert(sizeof(size_t) == 8, "sizes and offsets pass 2^32: a 64-bit machine is needed");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "shards and checkpoints are little-endian and are read as they lie in memory"
#endif

// ---- errors --------------------------------------------------------------------------------------------
constexpr int EXIT_ERROR = 1;  // anything that went wrong while working
constexpr int EXIT_USAGE = 2;  // the command line is wrong; nothing was written

inline std::atomic<bool> line_is_open{false};  // the terminal shows a line that is still without its end

// What fatal() throws, in place of ending the program, where fatal_throws is set: in error_of() and in tests.
struct Fatal {
  int exit_code;
  std::string message;
};
inline bool fatal_throws = false;

// Set where the program is many processes (ranks.h): one of them prints the line, and all end.
inline void (*fatal_ends)(int exit_code, const std::string& line) = nullptr;
inline bool may_warn = true;

#define PRINTF_LIKE(format_index, first_argument) __attribute__((format(printf, format_index, first_argument)))

// printf to a string.
PRINTF_LIKE(1, 0) inline std::string vformat(const char* text, va_list arguments) {
  char* made = nullptr;
  if (vasprintf(&made, text, arguments) < 0) return text;
  const std::string result = made;
  free(made);
  return result;
}
PRINTF_LIKE(1, 2) inline std::string format(const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  const std::string result = vformat(text, arguments);
  va_end(arguments);
  return result;
}

// Prints "error: ..." as one line on stderr and ends the program.
[[noreturn]] inline void fatal(int exit_code, std::string message) {
  for (char& c : message)
    if (c == '\n' || c == '\r') c = ' ';  // one line, whatever a file name holds
  if (fatal_throws) throw Fatal{exit_code, message};
  fflush(stdout);  // so that the error comes last where both streams go to one place
  message = std::string(line_is_open ? "\n" : "") + "error: " + message + "\n";
  if (fatal_ends) fatal_ends(exit_code, message);
  fputs(message.c_str(), stderr);
  exit(exit_code);
}
[[noreturn]] PRINTF_LIKE(2, 3) inline void fatal(int exit_code, const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  const std::string message = vformat(text, arguments);
  va_end(arguments);
  fatal(exit_code, message);
}

// The message with which work() would have ended the program; empty if all went well.
template <class Work>
std::string error_of(Work work) {
  const bool threw_before = std::exchange(fatal_throws, true);
  std::string message;
  try {
    work();
  } catch (const Fatal& error) {
    message = error.message;
  }
  fatal_throws = threw_before;
  return message;
}
// Prints "warning: ...": something is odd, the program goes on.
inline void warn(const std::string& message) {
  if (may_warn) fprintf(stderr, "warning: %s\n", message.c_str());
}

// ---- sizes ---------------------------------------------------------------------------------------------
inline size_t checked_mul(size_t a, size_t b, const char* what) {
  if (b != 0 && a > SIZE_MAX / b) fatal(EXIT_ERROR, "%s: %zu * %zu does not fit in 64 bits", what, a, b);
  return a * b;
}

// "512 B", "1.5 KiB", "37.2 MiB": powers of 1024, as memory is counted.
inline std::string human_bytes(size_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = double(bytes);
  int unit = 0;
  while (value >= 1023.95 && unit < 6) value /= 1024, unit++;
  return unit == 0 ? format("%zu B", bytes) : format("%.1f %s", value, units[unit]);
}

// "950", "119.8M", "2.000B": counts of parameters and tokens in powers of 1000, to so many digits.
inline std::string human_count(double n, int digits = 4) {
  const char* units[] = {"", "k", "M", "B", "T"};
  int unit = 0;
  while (n >= 999.95 && unit < 4) n /= 1000, unit++;
  const int whole = n < 9.9995 ? 1 : n < 99.995 ? 2 : 3;  // digits before the point
  return format("%.*f%s", unit == 0 || whole > digits ? 0 : digits - whole, n, units[unit]);
}

// ---- memory --------------------------------------------------------------------------------------------
// 64-byte aligned, so that a vector load never straddles a cache line. The contents are undefined; with
// -DFILL_NAN every byte is 0xFF, which reads as NaN, so a value used before it is written shows itself.
template <class T>
T* alloc_array(size_t n, const char* what) {
  const size_t bytes = checked_mul(n, sizeof(T), what);
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes) != 0)
    fatal(EXIT_ERROR, "out of memory: %s needs %s", what, human_bytes(bytes).c_str());
#ifdef FILL_NAN
  memset(memory, 0xFF, bytes);
#endif
  return static_cast<T*>(memory);
}
inline void free_array(void* memory) { free(memory); }
