// test_common.cpp - the small parts of dev/common: numbers, random numbers, schedule, sampler, JSON, the log,
// the FLOP count, and what people see.
#include <algorithm>
#include <csignal>
#include <limits>
#include <numeric>

#include <sys/resource.h>

#include "dev/common/errors.h"
#include "dev/common/flags.h"
#include "dev/common/flops.h"
#include "dev/common/text.h"
#include "dev/common/log.h"
#include "dev/common/random.h"
#include "dev/common/report.h"
#include "data/stories.h"
#include "dev/common/train.h"
#include "tests/check.h"
#include "tests/child.h"

// What was made and what it should be.
static void check_texts(const std::vector<std::pair<std::string, std::string>>& texts) {
  for (const auto& text : texts) CHECK_EQ(text.first, text.second);
}

// ---- errors.h ------------------------------------------------------------------------------------------

static void test_check() {
  TEST("an error is one line on stderr, after what was printed before, with the status asked for");
  const Outcome failed = in_child([] {
    printf("before");
    fatal(7, "%s: got %d\nsecond line", "thing", 5);
  });
  CHECK_EQ(failed.status, 7);
  CHECK_EQ(failed.out, "before");
  CHECK_EQ(failed.err, "error: thing: got 5 second line\n");

  TEST("sizes that do not fit in 64 bits are refused, not wrapped");
  const size_t big = size_t(1) << 32;
  CHECK_EQ(checked_mul(big - 1, big + 1, "x"), SIZE_MAX);
  CHECK(refuses(in_child([&] { checked_mul(big, big, "w_gate"); }), 1,
                "w_gate: 4294967296 * 4294967296 does not fit in 64 bits"));

  TEST("memory: aligned, writable to the end, refused when there is too little");
  for (size_t n : {0, 17}) {
    float* memory = alloc_array<float>(n, "test");
    CHECK_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0u);
#ifdef FILL_NAN
    for (size_t i = 0; i < n; i++) CHECK(std::isnan(memory[i]));
#endif
    std::fill(memory, memory + n, 1.0f);
    free_array(memory);
  }
#ifndef ADDRESS_SANITIZER  // which ends the program itself when asked for so much
  CHECK(refuses(in_child([] { alloc_array<char>(size_t(1) << 60, "gradients"); }), 1,
                "out of memory: gradients needs 1.0 EiB"));
#endif

  TEST("numbers from text: the whole text or nothing");
  uint64_t n = 0;
  double x = 0;
  CHECK(parse_count("18446744073709551615", &n) && n == UINT64_MAX);
  CHECK(parse_count("007", &n) && n == 7);
  for (const char* bad :
       {"", " 1", "1 ", "-1", "+1", "1.0", "0x1", "1e3", "18446744073709551616", "99999999999999999999"})
    if (!CHECK(!parse_count(bad, &n))) printf("     '%s'\n", bad);
  CHECK(parse_double("-1.5e-3", &x) && x == -1.5e-3);
  for (const char* bad : {"", "1x", "1 ", "nan", "inf", "1e999", "0x1p3", "--1", "1e", ".", "1,5"})
    if (!CHECK(!parse_double(bad, &x))) printf("     '%s'\n", bad);

  TEST("numbers to text and back: exactly the same, as short as may be");
  check_texts({{number_text(0.1), "0.1"},
               {number_text(0.1f), "0.1"},
               {number_text(1.0 / 3), "0.3333333333333333"},
               {number_text(6e-4), "0.0006"}});
  for (uint64_t i = 0; i < 20000; i++) {
    const Random4 r = philox(5, STREAM_TEST, i);
    double d;
    float f;
    memcpy(&d, &r.x[0], 8);
    memcpy(&f, &r.x[2], 4);
    if (std::isfinite(d)) CHECK(strtod(number_text(d).c_str(), nullptr) == d);
    if (std::isfinite(f)) CHECK(strtof(number_text(f).c_str(), nullptr) == f);
  }
  check_texts({{human_bytes(0), "0 B"},
               {human_bytes(1023), "1023 B"},
               {human_bytes(1536), "1.5 KiB"},
               {human_bytes((size_t(1) << 30) - 1), "1.0 GiB"},
               {human_bytes(SIZE_MAX), "16.0 EiB"},
               {human_count(0), "0"},
               {human_count(119800512), "119.8M"},
               {human_count(999950), "1.000M"},
               {human_count(1e13), "10.00T"},
               {human_count(417999, 3), "418k"}});
}

// ---- random.h ------------------------------------------------------------------------------------------

static void test_random() {
  TEST("Philox4x32-10: the three vectors its authors published");
  const std::pair<Random4, Random4> vectors[] = {
      {philox(0, 0, 0), {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {philox(-1, -1, -1), {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const auto& vector : vectors)
    for (int i = 0; i < 4; i++) CHECK_EQ(vector.first.x[i], vector.second.x[i]);

  TEST("a number depends on seed, stream and place, and on nothing else");
  const float first = normal(1, STREAM_INIT, 5);
  normal(9, STREAM_SAMPLE, 123);
  CHECK_EQ(normal(1, STREAM_INIT, 5), first);
  CHECK(normal(2, STREAM_INIT, 5) != first);
  CHECK(normal(1, STREAM_INIT + 1, 5) != first);
  CHECK(normal(1, STREAM_INIT, 6) != first);
  CHECK(normal(1, STREAM_INIT, 5 + (uint64_t(1) << 32)) != first);  // 2^32 numbers are not all

  TEST("uniform: in [0, 1), evenly spread");
  const size_t n = 1000000;
  std::vector<int> counts(100);
  for (size_t i = 0; i < n; i++) {
    const double u = uniform(3, STREAM_TEST, i);
    if (CHECK(u >= 0 && u < 1)) counts[size_t(u * 100)]++;
  }
  double chi_squared = 0;
  for (int count : counts) chi_squared += (count - n / 100.0) * (count - n / 100.0) / (n / 100.0);
  CHECK_CLOSE(chi_squared, 99, 4 * 14.1);  // four standard deviations
  CHECK(unit_interval(UINT32_MAX, UINT32_MAX) < 1 && unit_interval(0, 0) == 0);

  TEST("normal: mean, variance, skewness, tails, neighbours unrelated");
  double sum = 0, squares = 0, cubes = 0, products = 0, before = 0;
  size_t beyond2 = 0;
  for (size_t i = 0; i < n; i++) {
    const double x = double(normal(4, STREAM_TEST, i));
    sum += x, squares += x * x, cubes += x * x * x, products += x * before;
    beyond2 += std::fabs(x) > 2;
    before = x;
  }
  CHECK_CLOSE(sum / n, 0, 4e-3);  // four standard errors each
  CHECK_CLOSE(squares / n, 1, 4 * 1.42e-3);
  CHECK_CLOSE(cubes / n, 0, 4 * 3.9e-3);
  CHECK_CLOSE(products / n, 0, 4e-3);
  CHECK_CLOSE(double(beyond2) / n, 0.0455, 4 * 2.1e-4);

  TEST("permute: every n up to 300, and some larger, is a permutation; epochs differ");
  std::vector<uint64_t> sizes = {4096, 4097, 65535, 100003};
  for (uint64_t size = 1; size <= 300; size++) sizes.push_back(size);
  for (uint64_t size : sizes) {
    std::vector<bool> seen(size);
    size_t fixed = 0, same = 0;
    for (uint64_t i = 0; i < size; i++) {
      const uint64_t p = permute(1, 0, size, i);
      if (CHECK(p < size)) seen[p] = true;
      fixed += p == i;
      same += p == permute(1, 1, size, i);
    }
    CHECK_EQ(std::count(seen.begin(), seen.end(), true), std::ptrdiff_t(size));
    if (size > 300) CHECK(fixed < 10 && same < 10);
  }
  const uint64_t huge = (uint64_t(1) << 40) + 12345;
  std::vector<uint64_t> far;
  for (uint64_t i = 0; i < 1000; i++) far.push_back(permute(1, 0, huge, huge - 1 - i));
  std::sort(far.begin(), far.end());
  CHECK(std::adjacent_find(far.begin(), far.end()) == far.end() && far.back() < huge);
  CHECK(far[500] > huge / 3 && far[500] < huge / 3 * 2);
}

// ---- schedule.h ----------------------------------------------------------------------------------------

static void test_schedule() {
  const double lr = 6e-4, ratio = 0.1;
  TEST("schedule: first step, warm-up, peak, middle, last step, past the end");
  const size_t steps = 1001, warmup = 100;
  const auto rate = [&](size_t step) { return learning_rate(step, steps, warmup, lr, ratio); };
  CHECK_CLOSE(rate(0), lr / 100, 1e-18);  // never 0
  CHECK_CLOSE(rate(49), lr / 2, 1e-18);
  CHECK_EQ(rate(99), lr);
  CHECK(rate(100) < lr && rate(100) > 0.9999 * lr);
  // From the peak (step 99) to the last step (1000) there are 901 steps; half-way the cosine is 0.
  CHECK_CLOSE((rate(549) + rate(550)) / 2, lr * (ratio + 1) / 2, 1e-9);
  CHECK_CLOSE(rate(99 + 300), lr * (ratio + (1 - ratio) * 0.5 * (1 + std::cos(M_PI * 300 / 901))), 1e-15);
  CHECK_CLOSE(rate(1000), lr * ratio, 1e-18);
  CHECK_CLOSE(rate(1001), lr * ratio, 1e-18);
  CHECK_CLOSE(rate(SIZE_MAX), lr * ratio, 1e-18);
  for (size_t step = 1; step < 1100; step++)
    CHECK(step < 100 ? rate(step) > rate(step - 1) : rate(step) <= rate(step - 1));

  TEST("schedule: no warm-up, one step, warm-up for the whole run or longer, no steps, 10^12 steps");
  const size_t many = 1000000000000;
  const struct {
    size_t step, steps, warmup;
    double ratio, want;
  } cases[] = {
      {0, 10, 0, 0.1, lr},  {9, 10, 0, 0.1, lr * 0.1},      {0, 1, 0, 0.1, lr},        {0, 1, 1, 0.1, lr},
      {9, 10, 10, 0.1, lr}, {4, 10, 20, 0.1, lr / 4},       {0, 0, 0, 0.1, lr},        {7, 0, 0, 0.1, lr * 0.1},
      {5, 10, 2, 1, lr},    {many / 2, many, 0, 0, lr / 2}, {many - 1, many, 0, 0, 0},
  };
  for (const auto& c : cases) CHECK_CLOSE(learning_rate(c.step, c.steps, c.warmup, lr, c.ratio), c.want, 1e-12);
  CHECK(learning_rate(many - 1000000, many, 0, lr, 0) > 0);
}

// ---- sampler.h -----------------------------------------------------------------------------------------

// Shares of the tokens drawn with `draws` numbers u spread evenly over [0, 1): off by at most 1 / draws each.
static std::vector<double> shares(const std::vector<float>& logits, double temperature, size_t top_k,
                                  double top_p) {
  const size_t draws = 20000;
  std::vector<double> share(logits.size());
  for (size_t i = 0; i < draws; i++) {
    const double u = (double(i) + 0.5) / draws;
    share[size_t(sample_token(logits.data(), logits.size(), temperature, top_k, top_p, u))] += 1.0 / draws;
  }
  return share;
}
static std::vector<double> softmax(const std::vector<float>& logits, double temperature,
                                   const std::vector<int>& keep) {
  std::vector<double> p(logits.size());
  double sum = 0;
  for (int i : keep) sum += p[size_t(i)] = std::exp(double(logits[size_t(i)]) / temperature);
  for (double& x : p) x /= sum;
  return p;
}
static void check_shares(const std::vector<double>& got, const std::vector<double>& want) {
  for (size_t i = 0; i < got.size(); i++) CHECK_CLOSE(got[i], want[i], 1e-4);
}

static void test_sampler() {
  const std::vector<float> logits = {0.5f, 2.0f, -1.0f, 2.0f, 1.0f, -3.0f};
  const std::vector<int> all = {0, 1, 2, 3, 4, 5};
  TEST("sampler: shares are the softmax, at several temperatures");
  for (double temperature : {0.5, 1.0, 2.0})
    check_shares(shares(logits, temperature, 0, 1), softmax(logits, temperature, all));
  TEST("sampler: top-k keeps the k most likely, the lower token first among equals");
  check_shares(shares(logits, 1, 3, 1), softmax(logits, 1, {1, 3, 4}));
  check_shares(shares(logits, 1, 1, 1), {0, 1, 0, 0, 0, 0});
  check_shares(shares(logits, 1, 1000, 1), softmax(logits, 1, all));
  TEST("sampler: top-p keeps the fewest that hold p");
  const std::vector<double> p = softmax(logits, 1, all);  // 0.083 0.371 0.018 0.371 0.137 0.003 about
  check_shares(shares(logits, 1, 0, p[1] - 0.01), {0, 1, 0, 0, 0, 0});
  check_shares(shares(logits, 1, 0, p[1] + 0.01), softmax(logits, 1, {1, 3}));
  check_shares(shares(logits, 1, 0, 2 * p[1] + 0.01), softmax(logits, 1, {1, 3, 4}));
  check_shares(shares(logits, 1, 0, 0), {0, 1, 0, 0, 0, 0});
  TEST("sampler: top-k first, then top-p of what is left");
  check_shares(shares(logits, 1, 2, 0.6), softmax(logits, 1, {1, 3}));
  check_shares(shares(logits, 1, 2, 0.4), {0, 1, 0, 0, 0, 0});
  TEST("sampler: temperature 0 is the most likely token, whatever u");
  for (double u : {0.0, 0.5, 1 - 1e-16}) CHECK_EQ(sample_token(logits.data(), 6, 0, 0, 1, u), 1);

  TEST("sampler: logits of +-1e4, and the largest floats there are");
  const float huge = std::numeric_limits<float>::max();
  for (float size : {1e4f, huge}) {
    check_shares(shares({-size, size, 0, -size}, 1, 0, 1), {0, 1, 0, 0});
    check_shares(shares({size, size, -size, size}, 1, 0, 1), {1.0 / 3, 1.0 / 3, 0, 1.0 / 3});
    check_shares(shares({-size, -size}, 1, 0, 0.7), {0.5, 0.5});
    check_shares(shares({-size, size, -size}, 1e-3, 2, 0.9), {0, 1, 0});
  }
  check_shares(shares({1e4f, 1e4f + 1}, 1, 0, 1), softmax({0, 1}, 1, {0, 1}));

  TEST("sampler: the ends of u; a token of probability 0 is never drawn");
  CHECK_EQ(sample_token(logits.data(), 6, 1, 0, 1, 0), 1);
  CHECK_EQ(sample_token(logits.data(), 6, 1, 0, 1, 1 - 0x1p-53), 5);
  const float zero_first[] = {-1e4f, 0};
  CHECK_EQ(sample_token(zero_first, 2, 1, 0, 1, 0), 1);
}

// ---- text.h, log.h -------------------------------------------------------------------------------------

static void test_json() {
  TEST("JSON: what is read");
  Json json;
  const char* all = R"( {"a" : [1, -2.5e3, "x\"\\\/\b\f\n\r\t\u00e9\uD83d\ude00", true, false, null, {}, []]})";
  CHECK_EQ(JsonParser::parse(all, &json), "");
  const Json* a = json.find("a");
  CHECK(a && a->type == Json::array && a->values.size() == 8);
  size_t count = 0;
  CHECK(a->values[0].as_count(&count) && count == 1 && !a->values[1].as_count(&count));
  CHECK_EQ(a->values[1].text, "-2.5e3");
  CHECK_EQ(a->values[2].text, "x\"\\/\b\f\n\r\t\u00e9\U0001f600");
  CHECK(a->values[3].text == "true" && a->values[5].text == "null" && !json.find("b"));
  CHECK_EQ(JsonParser::parse("18446744073709551615", &json), "");
  CHECK(json.as_count(&count) && count == SIZE_MAX);
  CHECK_EQ(JsonParser::parse(std::string(32, '[') + std::string(32, ']'), &json), "");

  TEST("JSON: what is refused");
  std::istringstream texts(R"(|{|}|[|[1,]|[1 2]|1 2|tru|nul|NaN|-|1.2.3|0x10|{"a"}|{"a":}|{"a":1,}|{a:1})"
                           R"(|{"a":1 "b":2}|{"a":1,"a":2}|"|"a|"\|"\x"|"\u12"|"\u12g4"|"\ud83d"|"\ude00")"
                           R"(|"\ud83d\u0041")");
  Json value;
  for (std::string bad; std::getline(texts, bad, '|');)
    if (!CHECK_EQ(JsonParser::parse(bad, &value).substr(0, 16), "bad JSON at byte"))
      printf("     %s\n", bad.c_str());
  CHECK_EQ(JsonParser::parse("\"\n\"", &value), "bad JSON at byte 1: control character in a string");
  CHECK_EQ(JsonParser::parse(std::string("1\0", 2), &value), "bad JSON at byte 0: expected a value");
  CHECK_EQ(JsonParser::parse(std::string("\"a\0\"", 4), &value),
           "bad JSON at byte 2: control character in a string");
  std::string many = "[0";
  for (int i = 0; i < 1000001; i++) many += ",0";
  CHECK(JsonParser::parse(many + "]", &value).find("too many values") != std::string::npos);

  TEST("JSON: text of any bytes becomes a string that reads back");
  for (uint64_t i = 0; i < 2000; i++) {
    std::string text;
    for (uint64_t j = 0; j < 20; j++) text += char(philox(i, STREAM_TEST, j).x[0] % (i % 2 ? 256 : 128));
    CHECK_EQ(JsonParser::parse(json_quote(text), &value), "");
    if (i % 2 == 0) CHECK_EQ(value.text, text);  // ASCII, control characters included, comes back as it was
  }
  CHECK_EQ(json_quote("caf\u00e9 \xff\xc3"), "\"caf\u00e9 \\ufffd\\ufffd\"");
}

static std::vector<Json> read_log(const std::string& path) {
  std::vector<Json> events;
  std::istringstream lines(read_file(path));
  for (std::string line; std::getline(lines, line);)
    CHECK_EQ(JsonParser::parse(line, &events.emplace_back()), "");
  return events;
}

static void test_log() {
  Scratch folder;
  const std::string path = folder / "log.jsonl";
  TEST("log: losses read back exactly, as float and as double; what is not finite is null");
  const size_t n = 500;
  {
    Log log(folder.path);
    for (size_t i = 0; i < n; i++)
      log.write(Event("step").add("loss", normal(1, STREAM_TEST, i)).add("norm", uniform(2, STREAM_TEST, i)));
    log.write(Event("val").add("step", n).add("loss", NAN).add("norm", HUGE_VAL).add("text", "a\n\"b\""));
    log.write(Event("routes").add("qk", std::vector<std::vector<double>>{{1}, {0.1, 0.9}, {}}));
  }
  std::vector<Json> events = read_log(path);
  CHECK_EQ(events.size(), n + 2);
  for (size_t i = 0; i < n; i++) {
    CHECK_EQ(strtof(events[i].find("loss")->text.c_str(), nullptr), normal(1, STREAM_TEST, i));
    CHECK_EQ(strtod(events[i].find("norm")->text.c_str(), nullptr), uniform(2, STREAM_TEST, i));
  }
  CHECK(read_file(path).find(
            "\n{\"event\":\"val\",\"step\":500,\"loss\":null,\"norm\":null,\"text\":\"a\\n\\\"b\\\"\"}\n"
            "{\"event\":\"routes\",\"qk\":[[1],[0.1,0.9],[]]}\n") != std::string::npos);

  TEST("log: resuming drops later events, the end of the run, a torn line and rubbish; a new run starts empty");
  {
    Log log(folder.path);
    log.write(Event("config").add("layers", 4));
    for (size_t i = 1; i <= 9; i++) log.write(Event("step").add("step", i));
    log.write(Event("done").add("step", 5));
  }
  const std::string rubbish = "rubbish\n[1]\n{\"event\":\"step\",\"step\":\"x\"}\n", torn = "{\"step\":3";
  write_file(path, read_file(path) + rubbish + torn);
  Log(folder.path, 5).write(Event("step").add("step", 6).add("again", 1));
  events = read_log(path);
  CHECK_EQ(events.size(), 7u);
  CHECK_EQ(events[0].find("event")->text, "config");
  for (size_t i = 1; i <= 6; i++) CHECK_EQ(events[i].find("step")->text, std::to_string(i));
  CHECK(events[6].find("again") && !std::filesystem::exists(path + ".tmp"));
  std::filesystem::create_directory(folder / "new");
  Log(folder / "new", 5);
  CHECK(std::filesystem::is_empty(folder / "new/log.jsonl"));

  TEST("log: no folder, no room for any of a line, room for a part of it: refused, with the file named");
  CHECK(refuses(in_child([&] { Log log(folder / "none"); }), 1, "none/log.jsonl: cannot open: No such file"));
  std::string long_log;  // longer than what the child prints, which has the same limit
  while (long_log.size() < 10000) long_log += "{\"event\":\"step\",\"step\":1}\n";
  write_file(folder / "new/log.jsonl", long_log);
  const auto limited = [&](size_t more) {
    return in_child([&] {
      signal(SIGXFSZ, SIG_IGN);
      const struct rlimit limit = {long_log.size() + more, long_log.size() + more};
      setrlimit(RLIMIT_FSIZE, &limit);
      Log(folder / "new", 1).write(Event("step"));
    });
  };
  CHECK(refuses(limited(0), 1, "log.jsonl: cannot write: File too large"));
  CHECK(refuses(limited(10), 1, "log.jsonl: cannot write: No space left on device"));
}

// ---- flops.h, report.h ---------------------------------------------------------------------------------

static void test_flops() {
  TEST("FLOPs of a small model, counted by hand");
  Config c;
  c.L = 2, c.C = 8, c.NH = 2, c.F = 20, c.S = 2, c.V = 30;
  const Flops f = forward_flops(c, 5);
  CHECK_EQ(f.matmul, 2.0 * (2 * (8 * 16 + 8 * 8 + 8 * 8 + 3 * 8 * 20) + 30 * 8));
  CHECK_EQ(f.attention, 2 * 8 * 4 * (1 + 2 + 3 + 4 + 5) / 5.0);  // 2 layers, 4C operations for each token met
  // Sources read, by sublayer: attention 1, feed-forward 2, attention 2, feed-forward 3, output 3.
  CHECK_EQ(f.routes, 4.0 * 8 * (2 * 1 + 2 + 2 * 2 + 3 + 3));
  c.arch = Arch::block;
  CHECK_EQ(forward_flops(c, 5).routes, 4.0 * 8 * (1 + 2 + 2 + 3 + 3));
  c.arch = Arch::residual;
  CHECK_EQ(forward_flops(c, 5).routes, 0.0);
  CHECK_EQ(training_flops(c, 5).total(), 3 * forward_flops(c, 5).total());

  TEST("cards: the peak is what the multiprocessors do in a clock, times their number and the clock");
  // Dense multiply-adds of bf16 a clock and multiprocessor, summed in float32; multiprocessors; highest clock.
  // Makers round, and state some cards below their highest clock: 7%. A figure with sparsity, or of half sums,
  // is off by 2.
  const struct {
    const char* name;
    double per_clock, count, mhz;
  } chips[] = {{"NVIDIA A100-SXM4-40GB", 1024, 108, 1410},
               {"NVIDIA A100-SXM4-80GB", 1024, 108, 1410},
               {"NVIDIA A100-PCIE-40GB", 1024, 108, 1410},
               {"NVIDIA A100 80GB PCIe", 1024, 108, 1410},
               {"NVIDIA A10", 512, 72, 1695},
               {"NVIDIA RTX A6000", 512, 84, 1800},
               {"NVIDIA GeForce RTX 3090", 256, 82, 1695},
               {"NVIDIA GeForce RTX 4090", 256, 128, 2520},
               {"NVIDIA L4", 512, 58, 2040},
               {"NVIDIA L40S", 512, 142, 2520},
               {"NVIDIA H100 PCIe", 2048, 114, 1620},
               {"NVIDIA H100 80GB HBM3", 2048, 132, 1830},
               {"NVIDIA H200", 2048, 132, 1830},
               {"NVIDIA GeForce RTX 5090", 256, 170, 2407},
               {"NVIDIA B200", 4096, 148, 1965}};
  CHECK_EQ(std::size(chips), std::size(CARDS));
  for (const auto& chip : chips) {
    const Card* card = find_card(chip.name);
    if (!CHECK(card != nullptr)) continue;
    const double counted = 2 * chip.per_clock * chip.count * chip.mhz * 1e6 / 1e12;
    printf("     %-24s %7.1f TFLOP/s, counted %7.1f   %s\n", card->name, card->tflops, counted, card->source);
    CHECK_CLOSE(card->tflops, counted, 0.07 * counted);
  }
  for (const char* part : {"", "NVIDIA A10G", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"})
    CHECK(find_card(part) == nullptr);
}

static void test_report() {
  TEST("the step line");
  StepReport r = {7, 1000, 7.1234, 1.234, 6e-4, 0.312, 130416, 130};
  const std::string start = "step    7/1000 | loss 7.1234 | norm 1.234 | lr 6.00e-04 | 312 ms";
  CHECK_EQ(step_line(r), start + " | 418k tok/s | eta 2m10s\n");
  r.flops = 0.41 * 989e12 * 0.312, r.peak_flops = 989e12;
  CHECK_EQ(step_line(r), start + " | 41% of 989 TFLOP/s | 418k tok/s | eta 2m10s\n");
  r.peak_flops = 0;
  CHECK_EQ(step_line(r), start + " | n/a of peak | 418k tok/s | eta 2m10s\n");
  r = {1000, 1000, 1.0, 0.5, 1e-5, 0.0021, 64, -1};
  CHECK_EQ(step_line(r), "step 1000/1000 | loss 1.0000 | norm 0.500 | lr 1.00e-05 | 2.1 ms | 30.5k tok/s\n");

  TEST("the lines on arithmetic: what a token costs, what the card can do, what it did");
  CHECK_EQ(peak_line("NVIDIA H200", 742.13e12),
           "peak        989.5 TFLOP/s in bf16, dense (NVIDIA H200 data sheet, 1,979 with sparsity);"
           " one large product reaches 742.1 TFLOP/s, 75%\n");
  CHECK_EQ(peak_line("NVIDIA L4", 0),
           "peak        121 TFLOP/s in bf16, dense (NVIDIA L4 data sheet, 242 with sparsity)\n");
  CHECK_EQ(peak_line("NVIDIA H300", 1e15),
           "peak        n/a: no figure for NVIDIA H300 in dev/common/flops.h;"
           " one large product reaches 1000 TFLOP/s\n");
  Config paper;
  paper.L = 16, paper.C = 576, paper.NH = 9, paper.F = 2880, paper.S = 4, paper.T = 1024, paper.V = 32768;
  // 6 for each of 119,734,272 weights; 3 x 16 x 4 x 576 x 512.5; 3 x 4 x 576 for each of 257 sources read
  CHECK(arithmetic_table(paper, Options(), 0, "")
            .find("arithmetic  776,860,416 FLOP a token: matrices 92.5%, attention 7.3%, routes 0.2%\n") == 0);

  TEST("durations and long numbers");
  check_texts({{duration_text(0.4), "0s"},
               {duration_text(59.6), "1m00s"},
               {duration_text(3 * 3600 + 5 * 60), "3h05m"},
               {duration_text(86400 * 2 + 4 * 3600), "2d04h"},
               {duration_text(NAN), "?"},
               {with_commas(999), "999"},
               {with_commas(1234567890), "1,234,567,890"}});

  TEST("right answers: a line on the way, a table at the end; both tell apart what the last sentence tells");
  StoryMarks marks;
  const auto mark = [&](StoryKind kind, const char* answer, const char* latest, bool right) {
    marks.add({kind, 0, 0, answer, latest}, right);
  };
  for (int i = 0; i < 3; i++) mark(StoryKind::just_told, "Rome", "Rome", true);
  mark(StoryKind::where_person, "Oslo", "Rome", true);
  mark(StoryKind::where_person, "Lima", "Lima", true);
  for (const char* answer : {"Ann", "Bob", "Cid"}) mark(StoryKind::who_has, answer, "Bob", false);
  CHECK_EQ(answers_line(100, marks),
           "answers step 100 | told in the last sentence 100% of 3"
           " | looking back 40% of 5, latest name 40%\n");
  const std::string table = answers_table(marks, 7);
  for (const char* row : {"answers in 7 held-out stories     asked    right   best guess   latest name\n",
                          "  told in the last sentence       3     100%          100%           100%\n",
                          "  where a thing is                0       0%            0%             0%\n",
                          "  looking back                    5      40%           40%            40%\n",
                          "  together                        8      62%           62%            62%\n"})
    CHECK(table.find(row) != std::string::npos);

  TEST("the picture of the depth routes");
  Config c;
  c.L = 3, c.S = 4;
  RouteStats stats;
  stats.qk = {{4}, {1, 3}, {1, 3}};
  stats.v = {{4}, {2, 2}, {4, 0}};
  stats.js_nats = {0, 4 * 0.0123, 4 * NATS_PER_BIT};
  stats.divide(4);
  CHECK_EQ(route_picture(c, stats),
           "depth routes    E     B1    part    JS nats   bits\n"
           "  layer  0  QK   \u2588100                0.0000 0.0000\n"
           "            V    \u2588100\n"
           "  layer  1  QK   \u2582 25        \u2586 75    0.0123 0.0177\n"
           "            V    \u2584 50        \u2584 50\n"
           "  layer  2  QK   \u2582 25  \u2586 75          0.6931 1.0000\n"
           "            V    \u2588100     0\n");
  c.arch = Arch::block;
  for (auto& row : stats.v) row.clear();
  CHECK_EQ(route_picture(c, stats).substr(0, 60),
           "depth routes    E     B1    part\n  layer  0  QKV  \u2588100\n  l");
  c.arch = Arch::residual;
  CHECK_EQ(route_picture(c, stats), "");

  TEST("the tables at the start: every setting once, a star at those given; exact counts; sums");
  char program[] = "t", flag[] = "--seed=3";
  char* argv[] = {program, flag};
  Options o = parse_flags(2, argv, Device::cpu);
  const std::string settings = settings_table(o);
  for (const Flag& f : flag_table()) {
    const std::string cell = format(" %c%-17s", o.given.count(f.name) ? '*' : ' ', f.name);
    const bool shown = settings.find(cell) != std::string::npos;
    if (!CHECK_EQ(shown, available(f, Device::cpu))) printf("     %s\n", f.name);
  }
  const Config config = config_from(o, 257);
  const std::string parameters = "parameters  " + with_commas(count_params(config).total) + " (";
  CHECK(model_table(config).find(parameters) != std::string::npos);
  CHECK_EQ(memory_table({{"parameters", 1536}, {"activations", 512}}),
           "memory\n  parameters                   1.5 KiB\n  activations                    512 B\n"
           "  together                     2.0 KiB\n");
  CHECK_EQ(data_line("train", TokenData::from_tokens(std::vector<uint16_t>(1001), "here", 257), 100),
           "train       here: 1 shard, 1,001 tokens, 10 windows of 100\n");
  CHECK(schedule_table(o, o.steps * o.total_batch / 2).find(", 2.00 epochs") != std::string::npos);
  CHECK_EQ(validation_line("val", 100, 0, 5),
           "val    step 100 | loss 0.0000 nats per token | perplexity 1 | 5 tokens\n");
}

int main() {
  test_check();
  test_random();
  test_schedule();
  test_sampler();
  test_json();
  test_log();
  test_flops();
  test_report();
  return finish();
}
