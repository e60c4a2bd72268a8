// processor.h - a program built for one processor (-march=native) says so when it meets another, instead of
// dying of an illegal instruction.
//
// The check runs before the constructors of global objects, which may use the missing instructions already, and
// is itself compiled without them. Only x86-64 is checked.
#pragma once
#if defined(__x86_64__)
#include <unistd.h>

#include <cstring>

// What the compiler was allowed to use, by its macros, and the processor's own word on it.
#ifdef __AVX__
#define BUILT_FOR_AVX(X) X("avx")
#else
#define BUILT_FOR_AVX(X)
#endif
#ifdef __AVX2__
#define BUILT_FOR_AVX2(X) X("avx2")
#else
#define BUILT_FOR_AVX2(X)
#endif
#ifdef __FMA__
#define BUILT_FOR_FMA(X) X("fma")
#else
#define BUILT_FOR_FMA(X)
#endif
#ifdef __FMA4__
#define BUILT_FOR_FMA4(X) X("fma4")
#else
#define BUILT_FOR_FMA4(X)
#endif
#ifdef __BMI2__
#define BUILT_FOR_BMI2(X) X("bmi2")
#else
#define BUILT_FOR_BMI2(X)
#endif
#ifdef __AVX512F__
#define BUILT_FOR_AVX512F(X) X("avx512f")
#else
#define BUILT_FOR_AVX512F(X)
#endif
#ifdef __AVX512VL__
#define BUILT_FOR_AVX512VL(X) X("avx512vl")
#else
#define BUILT_FOR_AVX512VL(X)
#endif
#define BUILT_FOR(X) \
  BUILT_FOR_AVX(X)   \
  BUILT_FOR_AVX2(X)  \
  BUILT_FOR_FMA(X) BUILT_FOR_FMA4(X) BUILT_FOR_BMI2(X) BUILT_FOR_AVX512F(X) BUILT_FOR_AVX512VL(X)

__attribute__((constructor(101), target("arch=x86-64"))) static void check_processor() {
  __builtin_cpu_init();
  const char* missing = nullptr;
#define CHECK_FEATURE(name) \
  if (!__builtin_cpu_supports(name)) missing = name;
  BUILT_FOR(CHECK_FEATURE)
#undef CHECK_FEATURE
  if (!missing) return;
  const char* parts[] = {"error: this program was built for a processor with ", missing,
                         ", which this one lacks; build it here with make, or for any with make PORTABLE=1\n"};
  for (const char* part : parts)
    if (write(STDERR_FILENO, part, strlen(part)) < 0) break;
  _exit(1);
}
#endif
