// check.h - the smallest test harness that can fail.
//
//   int main() {
//     TEST("addition");               // starts a case; a case ends where the next one starts
//     CHECK_EQ(1 + 1, 2);             // the first failure names file and line, what it got and what it wanted
//     CHECK_CLOSE(0.1 + 0.2, 0.3, 1e-15);
//     TEST("needs a card");
//     SKIP("no GPU");                 // counts as skipped, not as passed; a failed check still wins
//     return finish();                // prints the totals; 1 if any case failed or checked nothing
//   }
//
// A case that checks nothing counts as failed: a test that cannot fail is not a test. A check never ends the
// program, so one run shows every failure.
#pragma once
#include <cmath>
#include <cstdio>
#include <sstream>
#include <string>

// Built with the address sanitizer, by g++ or by clang.
#if defined(__SANITIZE_ADDRESS__)
#define ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADDRESS_SANITIZER
#endif
#endif

namespace check {

struct State {
  std::string name, failure, skip_reason;  // of the case under way
  size_t checks = 0, failures = 0;
  size_t passed = 0, failed = 0, skipped = 0;
};
inline State& state() {
  static State s;
  return s;
}

// Ends the case under way, if there is one: prints its line and counts it.
inline void end_case() {
  State& s = state();
  if (s.name.empty()) return;
  if (s.checks == 0 && s.skip_reason.empty()) s.failure = "no check was made", s.failures = 1;
  if (s.failures > 0) {
    printf("FAIL %s: %s", s.name.c_str(), s.failure.c_str());
    if (s.failures > 1) printf(" (and %zu more)", s.failures - 1);
    printf("\n");
    s.failed++;
  } else if (!s.skip_reason.empty()) {
    printf("skip %s: %s\n", s.name.c_str(), s.skip_reason.c_str());
    s.skipped++;
  } else {
    printf("ok   %s\n", s.name.c_str());
    s.passed++;
  }
  fflush(stdout);
  s.name.clear();
}

inline void begin_case(const std::string& name) {
  end_case();
  State& s = state();
  s.name = name;
  s.failure = s.skip_reason = "";
  s.checks = s.failures = 0;
}

// Records one check. The first failure of a case is the one that is printed.
inline bool record(bool ok, const char* file, int line, const std::string& what) {
  State& s = state();
  if (s.name.empty()) s.name = "(before the first TEST)";
  s.checks++;
  if (ok) return true;
  if (s.failures++ == 0) s.failure = std::string(file) + ":" + std::to_string(line) + ": " + what;
  return false;
}

template <class T>
std::string show(const T& value) {
  std::ostringstream text;
  text.precision(17);
  if constexpr (std::is_convertible<T, std::string>::value)
    text << '"' << value << '"';
  else
    text << std::boolalpha << value;
  return text.str();
}

template <class A, class B>
bool equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  const bool ok = a == b;
  return record(ok, file, line, ok ? "" : std::string(expression) + ": got " + show(a) + ", want " + show(b));
}

// |got - want| <= tolerance, absolute; a NaN or an infinity on either side fails.
inline bool close(double got, double want, double tolerance, const char* expression, const char* file,
                  int line) {
  const double error = std::fabs(got - want);
  if (error <= tolerance) return record(true, file, line, "");  // false for NaN
  return record(false, file, line,
                std::string(expression) + ": got " + show(got) + ", want " + show(want) + ", off by " +
                    show(error) + ", allowed " + show(tolerance));
}

inline int finish() {
  end_case();
  const State& s = state();
  printf("%zu passed, %zu failed, %zu skipped\n", s.passed, s.failed, s.skipped);
  fflush(stdout);
  return s.failed > 0 ? 1 : 0;
}

}  // namespace check

// Each check is an expression, true when it held, so a test can stop early: if (!CHECK(p)) return;
#define TEST(name) check::begin_case(name)
#define CHECK(condition) check::record(bool(condition), __FILE__, __LINE__, #condition " is false")
#define CHECK_EQ(a, b) check::equal((a), (b), #a, __FILE__, __LINE__)
#define CHECK_CLOSE(got, want, tolerance) \
  check::close(double(got), double(want), double(tolerance), #got, __FILE__, __LINE__)
#define SKIP(reason) (void)(check::state().skip_reason = (reason))
using check::finish;
