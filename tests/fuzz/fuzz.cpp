// fuzz.cpp - one target for libFuzzer, named by -DFUZZ_TARGET='"shard"'. See make fuzz.
#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  for (const FuzzTarget& target : FUZZ_TARGETS)
    if (!strcmp(target.name, FUZZ_TARGET))
      fuzz_one(target, std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
