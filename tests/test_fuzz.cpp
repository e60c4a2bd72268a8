// test_fuzz.cpp - every fuzz target on its seeds and on thousands of changed seeds, the same ones every time.
//
//   test_fuzz_asan                  as a test; FUZZ_RUNS=100000 in the environment: so many changed seeds each
//   test_fuzz_asan --seeds FOLDER   writes the seeds as FOLDER/<target>/<number>, for libFuzzer
//   test_fuzz_asan --run TARGET FILE...   runs a target on files, such as those that libFuzzer found
//
// Built with the address and undefined-behaviour sanitizers (make test), which end it at the first report; the
// input that did it is then in build/fuzz_found. No allocation may pass 16 MiB: inputs are a few kilobytes.
#include "dev/common/random.h"  // philox
#include "tests/check.h"
#include "tests/fuzz/targets.h"

#ifdef ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
extern "C" const char* __asan_default_options() { return "max_allocation_size_mb=16"; }
#endif

static std::string current;  // the input under way

static void keep_current() { write_file("build/fuzz_found", current); }

// Numbers at which sizes and counts turn over, and bits of what the formats are made of.
static const std::vector<std::string>& pieces() {
  static const std::vector<std::string> list = [] {
    std::vector<std::string> all = {"\n", " "};
    std::istringstream words(
        R"(" \ \u \ud83d { } [ ] , : -- = 0 -1 1e308 . 9223372036854775808 18446744073709551615)"
        R"( 18446744073709551616 4294967296 null "step" "shape" "F32" data_offsets __metadata__ 'll)"
        " \xc3\xa9 \xff");
    for (std::string word; words >> word;) all.push_back(word);
    for (uint64_t n :
         {uint64_t(0), uint64_t(1), uint64_t(0x7F), uint64_t(0x80), uint64_t(0x7FFF), uint64_t(0xFFFF),
          uint64_t(0x7FFFFFFF), uint64_t(0x80000000), uint64_t(0xFFFFFFFF), uint64_t(1) << 63, ~uint64_t(0)})
      for (size_t bytes : {1, 2, 4, 8}) all.push_back(std::string(reinterpret_cast<const char*>(&n), bytes));
    return all;
  }();
  return list;
}

// The seeds, each changed in one to six places; change number i is always the same.
static std::string changed_seed(std::vector<std::string> seeds, size_t target, size_t i) {
  size_t draw = 0;
  const auto below = [&](size_t n) { return n == 0 ? 0 : philox(target, STREAM_TEST + i, draw++).x[0] % n; };
  std::string input = seeds[below(seeds.size())];
  for (size_t changes = 1 + below(6); changes > 0; changes--) {
    const size_t at = below(input.size() + 1), some = 1 + below(8), kind = below(7);
    const std::string& piece = pieces()[below(pieces().size())];
    if (kind == 0) input.insert(at, piece);
    if (kind == 1) input.replace(at, piece.size(), piece);
    if (kind == 2) input.erase(at, below(4) ? some : input.size());
    if (kind == 3 && at < input.size()) input[at] = char(input[at] ^ (1 << below(8)));
    if (kind == 4 && at < input.size()) input[at] = char(below(256));
    if (kind == 5) input.insert(at, input.substr(below(input.size() + 1), some * 4));  // a part of it again
    if (kind == 6) input += seeds[below(seeds.size())].erase(0, below(64));            // two seeds
  }
  return input;
}

static void test_target(const FuzzTarget& target, size_t runs) {
  TEST(format("%s: the seeds and %zu changed ones", target.name, runs));
  const std::vector<std::string> seeds = target.seeds();
  const size_t number = size_t(&target - FUZZ_TARGETS);
  size_t accepted = 0;
  for (size_t i = 0; i < seeds.size() + runs; i++) {
    current = i < seeds.size() ? seeds[i] : changed_seed(seeds, number, i);
    try {
      accepted += fuzz_one(target, current);
    } catch (const std::logic_error& broken) {
      printf("     input %zu: %s\n", i, broken.what());
      keep_current();
      CHECK(!"a property does not hold; the input is in build/fuzz_found");
    }
    if (i + 1 == seeds.size()) {  // good and bad seeds, or the changed ones show little
      printf("     %zu of %zu seeds accepted", accepted, seeds.size());
      CHECK(accepted > 0 && (accepted < seeds.size()) == target.refuses);
    }
  }
  printf(", %zu of all %zu\n", accepted, seeds.size() + runs);
}

int main(int argc, char** argv) {
#ifdef ADDRESS_SANITIZER
  __sanitizer_set_death_callback(keep_current);
#endif
  const std::string mode = argc > 2 ? argv[1] : "";
  for (const FuzzTarget& target : FUZZ_TARGETS) {
    if (mode == "--seeds") {
      const std::string folder = argv[2] + std::string("/") + target.name;
      std::filesystem::create_directories(folder);
      const std::vector<std::string> seeds = target.seeds();
      for (size_t i = 0; i < seeds.size(); i++) write_file(folder + "/" + std::to_string(i), seeds[i]);
    } else if (mode == "--run") {
      for (int i = 3; i < argc && target.name == std::string(argv[2]); i++)
        printf("%s: %s\n", argv[i], fuzz_one(target, current = read_file(argv[i])) ? "accepted" : "refused");
    } else {
      test_target(target, getenv("FUZZ_RUNS") ? size_t(atoll(getenv("FUZZ_RUNS"))) : 20000);
    }
  }
  return mode.empty() ? finish() : 0;
}
