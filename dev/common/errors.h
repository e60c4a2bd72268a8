// errors.h - failing well: one-line errors, checked sizes and memory.
//
// What cannot go on ends in fatal(): one line on stderr that names the thing, what was found and what was
// expected. Functions whose caller may have a second plan return that line instead, empty when all is well.
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
#include <type_traits>
#include <vector>

static_assert(sizeof(size_t) == 8, "sizes and offsets pass 2^32: a 64-bit machine is needed");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "shards and checkpoints are little-endian and are read as they lie in memory"
#endif

// ---- errors --------------------------------------------------------------------------------------------
constexpr int EXIT_ERROR = 1;  // anything that went wrong while working
constexpr int EXIT_USAGE = 2;  // the command line is wrong; nothing was written

inline std::atomic<bool> line_is_open{false};  // the terminal shows a line that is still without its end

// Tests and fuzzers set this to get an exception where the trainers end.
struct Fatal {
  int exit_code;
  std::string message;
};
inline bool fatal_throws = false;

#define PRINTF_LIKE(format_index, first_argument) __attribute__((format(printf, format_index, first_argument)))

// printf to a string.
PRINTF_LIKE(1, 0) inline std::string vformat(const char* text, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  const int length = vsnprintf(nullptr, 0, text, again);
  va_end(again);
  std::string result(length > 0 ? size_t(length) : 0, '\0');
  if (length > 0) vsnprintf(&result[0], result.size() + 1, text, arguments);
  return result;
}
PRINTF_LIKE(1, 2) inline std::string format(const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  std::string result = vformat(text, arguments);
  va_end(arguments);
  return result;
}

// Prints "error: ..." as one line on stderr and ends the program.
[[noreturn]] PRINTF_LIKE(2, 3) inline void fatal(int exit_code, const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  std::string message = vformat(text, arguments);
  va_end(arguments);
  for (char& c : message)
    if (c == '\n' || c == '\r') c = ' ';  // one line, whatever a file name holds
  if (fatal_throws) throw Fatal{exit_code, message};
  fflush(stdout);  // so that the error comes last where both streams go to one place
  fprintf(stderr, "%serror: %s\n", line_is_open ? "\n" : "", message.c_str());
  exit(exit_code);
}
// For functions that return their error as a line: ends the program if there is one.
inline void fatal_if(const std::string& error) {
  if (!error.empty()) fatal(EXIT_ERROR, "%s", error.c_str());
}

// ---- sizes ---------------------------------------------------------------------------------------------
inline size_t checked_mul(size_t a, size_t b, const char* what) {
  if (b != 0 && a > SIZE_MAX / b) fatal(EXIT_ERROR, "%s: %zu * %zu does not fit in 64 bits", what, a, b);
  return a * b;
}
inline size_t checked_add(size_t a, size_t b, const char* what) {
  if (a > SIZE_MAX - b) fatal(EXIT_ERROR, "%s: %zu + %zu does not fit in 64 bits", what, a, b);
  return a + b;
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
inline void* checked_alloc(size_t bytes, const char* what) {
  const size_t rounded = checked_add(bytes, 63, what) / 64 * 64;
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, rounded > 0 ? rounded : 64) != 0)
    fatal(EXIT_ERROR, "out of memory: %s needs %s", what, human_bytes(bytes).c_str());
#ifdef FILL_NAN
  memset(memory, 0xFF, rounded);
#endif
  return memory;
}
template <class T>
T* alloc_array(size_t n, const char* what) {
  static_assert(std::is_trivially_copyable<T>::value, "for plain numbers only");
  return static_cast<T*>(checked_alloc(checked_mul(n, sizeof(T), what), what));
}
inline void free_array(void* memory) { free(memory); }
