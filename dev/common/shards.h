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

  // Tokens first .. first+n-1, which must exist. Returns the error, empty when all is well.
  std::string read(size_t first, size_t n, uint16_t* tokens) const {
    if (file.fd >= 0) return file.read(SHARD_HEADER + 2 * first, 2 * n, tokens);
    std::copy(memory.data() + first, memory.data() + first + n, tokens);
    return "";
  }
};

// Opens a shard and checks magic, version and size. Returns the error, empty when all is well.
inline std::string open_shard(const std::string& path, Shard* shard) {
  shard->name = path;
  std::string error = shard->file.open(path);
  if (!error.empty()) return error;
  const size_t size = shard->file.size;
  const char* name = path.c_str();
  if (size < SHARD_HEADER)
    return format("%s: %zu bytes, too short for a shard's header of %zu", name, size, SHARD_HEADER);
  int32_t header[SHARD_HEADER / 4];
  error = shard->file.read(0, SHARD_HEADER, header);
  if (!error.empty()) return error;
  if (header[0] != SHARD_MAGIC)
    return format("%s: not a token shard: magic %d, expected %d", name, header[0], SHARD_MAGIC);
  if (header[1] != SHARD_VERSION)
    return format("%s: shard version %d, expected %d", name, header[1], SHARD_VERSION);
  if (header[2] < 0) return format("%s: its header counts %d tokens, expected 0 or more", name, header[2]);
  shard->num_tokens = size_t(header[2]);
  const size_t expected = SHARD_HEADER + 2 * shard->num_tokens;
  if (size == expected) return "";
  return format("%s: %zu bytes, expected %zu as its header counts %d tokens", name, size, expected, header[2]);
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
    allow_many_files();
    const std::vector<std::string> paths = files_of(pattern);
    TokenData data;
    data.name = pattern;
    data.V = V;
    data.shards.resize(paths.size());
    for (size_t s = 0; s < paths.size(); s++) fatal_if(open_shard(paths[s], &data.shards[s]));
    return data;
  }

  static TokenData from_tokens(std::vector<uint16_t> tokens, const std::string& name, size_t V) {
    TokenData data;
    data.name = name;
    data.V = V;
    data.shards.resize(1);
    data.shards[0].name = name;
    data.shards[0].num_tokens = tokens.size();
    data.shards[0].memory = std::move(tokens);
    return data;
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
    for (const Shard& shard : shards) {
      const size_t n = shard.num_windows(T);
      if (i >= n) {
        i -= n;
        continue;
      }
      std::vector<uint16_t> tokens(T + 1);
      std::string error = shard.read(i * T, T + 1, tokens.data());
      if (error.empty()) error = token_problem(shard, i * T, tokens);
      if (!error.empty() && before_fatal) before_fatal();
      fatal_if(error);
      std::copy(tokens.begin(), tokens.end() - 1, inputs);
      std::copy(tokens.begin() + 1, tokens.end(), targets);
      return;
    }
    fatal(EXIT_ERROR, "%s: window %zu past the last of %zu", name.c_str(), i + num_windows(T), num_windows(T));
  }

  // Reads every token once, so that a bad one is found before anything is trained; gives up where that takes
  // more than a second a gigabyte, and leaves the rest to window().
  void check_tokens() const {
    constexpr size_t CHUNK = 1 << 22;
    const double start = seconds_now();
    size_t bytes = 0;
    for (const Shard& shard : shards)
      for (size_t first = 0; first < shard.num_tokens; first += CHUNK) {
        std::vector<uint16_t> tokens(std::min(CHUNK, shard.num_tokens - first));
        fatal_if(shard.read(first, tokens.size(), tokens.data()));
        fatal_if(token_problem(shard, first, tokens));
        bytes += 2 * tokens.size();
        if (seconds_now() - start > 1 + double(bytes) * 1e-9) return;
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

 private:
  std::string token_problem(const Shard& shard, size_t first, const std::vector<uint16_t>& tokens) const {
    uint16_t largest = 0;
    for (uint16_t token : tokens) largest = std::max(largest, token);
    if (largest < V) return "";
    size_t t = 0;
    while (tokens[t] < V) t++;
    return format("%s: token %zu, at byte %zu, is %d; expected less than the vocabulary's %zu",
                  shard.name.c_str(), first + t, SHARD_HEADER + 2 * (first + t), int(tokens[t]), V);
  }
  // Sorted by name. Brackets are first taken as they are, for folders such as "data [v2]", then as a choice.
  static std::vector<std::string> files_of(const std::string& pattern) {
    if (access(pattern.c_str(), F_OK) == 0) return {pattern};
    std::string literal;
    for (char c : pattern) literal += c == '[' ? "\\[" : std::string(1, c);
    for (const std::string& one : {literal, pattern}) {
      glob_t found = {};
      const int status = glob(one.c_str(), 0, nullptr, &found);
      const std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
      globfree(&found);
      if (status == 0) return paths;
      if (status != GLOB_NOMATCH) fatal(EXIT_ERROR, "%s: cannot list the files", pattern.c_str());
    }
    fatal(EXIT_ERROR, "%s: no file of that name or pattern", pattern.c_str());
  }
  // A split may have more shards than the usual 1,024 open files; raise the soft limit as far as is allowed.
  static void allow_many_files() {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max == RLIM_INFINITY ? 65536 : limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
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

inline TokenData open_split(const std::string& pattern, const Config& config) {
  if (pattern.empty()) return {};
  TokenData data = TokenData::from_glob(pattern, config.V);
  data.require_window(config.T);
  data.check_tokens();
  return data;
}

// A file to validate on that is trained on too.
inline void warn_of_overlap(const char* split, const TokenData& data, const TokenData& train) {
  const auto id = [](const Shard& shard) {
    struct stat info;
    fatal_if(fstat(shard.file.fd, &info) == 0 ? "" : file_error(shard.name, "examine"));
    return std::make_pair(info.st_dev, info.st_ino);
  };
  std::set<std::pair<dev_t, ino_t>> trained_on;
  for (const Shard& shard : train.shards) trained_on.insert(id(shard));
  std::string names;
  for (const Shard& shard : data.shards)
    if (trained_on.count(id(shard))) names += (names.empty() ? "" : ", ") + shard.name;
  if (!names.empty())
    fprintf(stderr, "warning: --%s has files that --train has too: %s\n", split, names.c_str());
}

// How two inventories differ: "gone: a.bin, 5 tokens; new: b.bin, 7 tokens"; empty if they do not.
inline std::string inventory_change(const std::string& then, const std::string& now) {
  if (then == now) return "";
  std::set<std::string> lines[2];
  for (int i : {0, 1}) {
    std::istringstream text(i == 0 ? then : now);
    for (std::string line; std::getline(text, line);) lines[i].insert(line);
  }
  std::string change;
  for (int i : {0, 1})
    for (const std::string& line : lines[i])
      if (!lines[1 - i].count(line) && change.size() < 200) change += (i == 0 ? "; gone: " : "; new: ") + line;
  return change.empty() ? "another order" : change.substr(2);
}

// Every split that is named. Fatal if one holds no window.
inline Data open_data(const Options& o, const Config& config) {
  Data data;
  data.train = open_split(o.train, config);
  data.val = open_split(o.val, config);
  data.test = open_split(o.test, config);
  warn_of_overlap("val", data.val, data.train);
  warn_of_overlap("test", data.test, data.train);
  return data;
}
