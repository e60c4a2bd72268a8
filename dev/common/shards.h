// shards.h - tokens of one split, read a window at a time.
//
// A shard is a file of 256 little-endian int32, [0] = 20240520, [1] = 1, [2] = number of tokens n, then n
// uint16. Window i of a shard holds its tokens iT .. iT+T: the first T are inputs, the last T the targets, so a
// shard has floor((n - 1) / T) windows; none crosses into another shard, and neighbours share one token. Shards
// stay on the disk and are read where needed: a split may be larger than memory.
#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <set>
#include <sstream>

#include <glob.h>
#include <sys/resource.h>

#include "dev/common/config.h"  // Config
#include "dev/common/errors.h"  // fatal, format
#include "dev/common/files.h"   // InFile
#include "dev/common/flags.h"   // Options
#include "dev/common/random.h"  // permute

constexpr int32_t SHARD_MAGIC = 20240520, SHARD_VERSION = 1;
constexpr size_t SHARD_HEADER = 1024;  // bytes

struct Shard {
  std::string name;
  size_t num_tokens = 0;
  InFile file;                   // either the tokens are in this file ...
  std::vector<uint16_t> memory;  // ... or, where it was never opened, here

  size_t num_windows(size_t T) const { return num_tokens > 0 ? (num_tokens - 1) / T : 0; }

  // Tokens first .. first+n-1, which must exist. Fatal if one is not below V.
  std::vector<uint16_t> read(size_t first, size_t n, size_t V) const {
    std::vector<uint16_t> tokens(n);
    if (file.file)
      file.read(SHARD_HEADER + 2 * first, 2 * n, tokens.data());
    else
      std::copy_n(memory.begin() + std::ptrdiff_t(first), n, tokens.begin());
    uint16_t largest = 0;  // a search for the first bad token would be four times slower
    for (uint16_t token : tokens) largest = std::max(largest, token);
    if (largest < V) return tokens;
    size_t t = 0;
    while (tokens[t] < V) t++;
    fatal(EXIT_ERROR, "%s: token %zu, at byte %zu, is %d; expected less than the vocabulary's %zu",
          name.c_str(), first + t, SHARD_HEADER + 2 * (first + t), int(tokens[t]), V);
  }
};

// Opens a shard and checks magic, version and size.
inline Shard open_shard(const std::string& path) {
  Shard shard = {path, 0, InFile(path), {}};
  const char* name = path.c_str();
  uint32_t header[SHARD_HEADER / 4];
  shard.file.read(0, SHARD_HEADER, header);
  if (header[0] != SHARD_MAGIC)
    fatal(EXIT_ERROR, "%s: not a token shard: magic %u, expected %u", name, header[0], SHARD_MAGIC);
  if (header[1] != SHARD_VERSION)
    fatal(EXIT_ERROR, "%s: shard version %u, expected %u", name, header[1], SHARD_VERSION);
  shard.num_tokens = header[2];
  const size_t size = shard.file.size, expected = SHARD_HEADER + 2 * shard.num_tokens;
  if (size == expected) return shard;
  fatal(EXIT_ERROR, "%s: %zu bytes, expected %zu as its header counts %u tokens", name, size, expected,
        header[2]);
}

// The files of a name or pattern, sorted. A name that exists is that file, whatever its letters mean in a
// pattern; brackets are first taken as they are, for folders such as "data [v2]", then as a choice.
inline std::vector<std::string> files_of(const std::string& pattern) {
  if (access(pattern.c_str(), F_OK) == 0) return {pattern};
  std::string literal;
  for (char c : pattern) literal += c == '[' ? "\\[" : std::string(1, c);
  for (const std::string& one : {literal, pattern}) {
    glob_t found = {};
    glob(one.c_str(), 0, nullptr, &found);
    const std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    if (!paths.empty()) return paths;
  }
  fatal(EXIT_ERROR, pattern + ": no file of that name or pattern");
}

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct TokenData {
  std::string name;                    // the glob, or what the tokens in memory are
  size_t V = 0;                        // every token must be below this
  std::vector<Shard> shards;           // in the order of their names
  std::function<void()> before_fatal;  // what to do first when a window cannot be had: a run saves

  // The file of that name, or every file that the pattern matches; fatal if there is none, or if one is not a
  // good shard.
  static TokenData from_glob(const std::string& pattern, size_t V) {
    // A split may have more shards than the usual 1,024 open files; raise the soft limit as far as is allowed.
    struct rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 65536);
    setrlimit(RLIMIT_NOFILE, &limit);

    TokenData data = {pattern, V, {}, {}};
    for (const std::string& path : files_of(pattern)) data.shards.push_back(open_shard(path));
    return data;
  }

  static TokenData from_tokens(const std::vector<uint16_t>& tokens, const std::string& name, size_t V) {
    return {name, V, {Shard{name, tokens.size(), {}, tokens}}, {}};
  }

  size_t num_tokens() const {
    size_t n = 0;
    for (const Shard& shard : shards) n += shard.num_tokens;
    return n;
  }
  size_t num_windows(size_t T) const {
    size_t n = 0;
    for (const Shard& shard : shards) n += shard.num_windows(T);
    return n;
  }
  // Fatal if there is not one window to train on; call it before the first window is asked for.
  void require_window(size_t T) const {
    if (num_windows(T) > 0) return;
    fatal(EXIT_ERROR, "%s: no shard holds one window of %zu + 1 tokens (%zu shard%s, %zu tokens in all)",
          name.c_str(), T, shards.size(), shards.size() == 1 ? "" : "s", num_tokens());
  }

  // Window i in the order of the shards, 0 <= i < num_windows(T). Fatal if it holds a token >= V.
  void window(size_t i, size_t T, int* inputs /* (T) */, int* targets /* (T) */) const {
    size_t s = 0;
    while (s < shards.size() && i >= shards[s].num_windows(T)) i -= shards[s++].num_windows(T);
    if (s == shards.size())
      fatal(EXIT_ERROR, "%s: window %zu past the last of %zu", name.c_str(), i + num_windows(T),
            num_windows(T));

    std::vector<uint16_t> tokens;
    const std::string error = error_of([&] { tokens = shards[s].read(i * T, T + 1, V); });
    if (!error.empty() && before_fatal) before_fatal();
    if (!error.empty()) fatal(EXIT_ERROR, error);
    std::copy(tokens.begin(), tokens.end() - 1, inputs);
    std::copy(tokens.begin() + 1, tokens.end(), targets);
  }

  // Reads every token once, so that a bad one is found before anything is trained; gives up where that takes
  // more than a second a gigabyte, and leaves the rest to window().
  void check_tokens() const {
    constexpr size_t CHUNK = 1 << 22;
    const double start = seconds_now();
    double gigabytes = 0;
    for (const Shard& shard : shards)
      for (size_t first = 0; first < shard.num_tokens; first += CHUNK) {
        const size_t n = std::min(CHUNK, shard.num_tokens - first);
        shard.read(first, n, V);
        gigabytes += 2e-9 * double(n);
        if (seconds_now() - start > 1 + gigabytes) return;
      }
  }

  // Each shard's name, without its folder, and its number of tokens, a line each: what the order of examples
  // depends on.
  std::string inventory() const {
    std::string lines;
    for (const Shard& shard : shards)
      lines += shard.name.substr(shard.name.rfind('/') + 1) + format(", %zu tokens\n", shard.num_tokens);
    return lines;
  }
};

// The k-th example of a run, k = 0, 1, 2, ...: windows in a new random order each epoch. The order is a
// function of (seed, epoch) alone, so a resumed run asks for example k and is where it was.
// Step s, micro-batch m, row b of a run uses k = s * (examples a step) + m * B + b.
inline void training_example(const TokenData& data, size_t T, uint64_t seed, uint64_t k, int* inputs /* (T) */,
                             int* targets /* (T) */) {
  const uint64_t n = data.num_windows(T);
  if (n == 0) return data.require_window(T);  // fatal
  data.window(permute(seed, k / n, n, k % n), T, inputs, targets);
}

// How two inventories differ: "gone: a.bin, 5 tokens; new: b.bin, 7 tokens"; empty if they do not.
inline std::string inventory_change(const std::string& then, const std::string& now) {
  if (then == now) return "";
  std::string change;
  const auto list = [&](const char* what, const std::string& lines, const std::string& others) {
    std::istringstream text(lines);
    for (std::string line; std::getline(text, line);)
      if (("\n" + others).find("\n" + line + "\n") == std::string::npos && change.size() < 200)
        change += what + line;
  };
  list("; gone: ", then, now);
  list("; new: ", now, then);
  return change.empty() ? "another order" : change.substr(2);
}

// ---- the splits of a run -------------------------------------------------------------------------------
struct Data {
  TokenData train, val, test;  // one that was not asked for has no tokens
  bool stories = false;        // the built-in corpus: its questions can be marked right or wrong

  std::vector<std::pair<const char*, const TokenData*>> splits() const {
    std::vector<std::pair<const char*, const TokenData*>> present;
    if (train.num_tokens() > 0) present.push_back({"train", &train});
    if (val.num_tokens() > 0) present.push_back({"val", &val});
    if (test.num_tokens() > 0) present.push_back({"test", &test});
    return present;
  }
};

// Every split that is named. Fatal if one holds no window; a warning if one is trained on too.
inline Data open_data(const Options& o, const Config& config) {
  Data data;
  std::set<std::string> trained_on;
  const auto open = [&](const char* split, const std::string& pattern, TokenData& tokens) {
    if (pattern.empty()) return;
    tokens = TokenData::from_glob(pattern, config.V);
    tokens.require_window(config.T);
    tokens.check_tokens();
    std::string both;
    for (const Shard& shard : tokens.shards) {
      const std::string file = std::filesystem::canonical(shard.name);
      if (&tokens == &data.train)
        trained_on.insert(file);
      else if (trained_on.count(file))
        both += (both.empty() ? "" : ", ") + shard.name;
    }
    if (!both.empty()) warn(format("--%s has files that --train has too: ", split) + both);
  };
  open("train", o.train, data.train);
  open("val", o.val, data.val);
  open("test", o.test, data.test);
  return data;
}
