// test_shards.cpp - token shards: windows and their order, huge files, bad files.
#include <algorithm>
#include <set>

#include "dev/common/shards.h"
#include "tests/check.h"
#include "tests/child.h"

// A shard file as bytes; count overrides the number of tokens in the header.
static std::string shard_bytes(const std::vector<uint16_t>& tokens, int32_t magic = SHARD_MAGIC,
                               int32_t version = SHARD_VERSION, int64_t count = -1) {
  std::vector<int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = int32_t(count >= 0 ? count : int64_t(tokens.size()));
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  if (!tokens.empty()) bytes.append(reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size());
  return bytes;
}
// n different tokens from `first` upwards.
static std::vector<uint16_t> counting(size_t n, size_t first = 0) {
  std::vector<uint16_t> tokens(n);
  for (size_t i = 0; i < n; i++) tokens[i] = uint16_t(first + i);
  return tokens;
}

static void test_windows() {
  const size_t T = 37;
  Scratch folder;
  for (size_t tokens : {size_t(0), size_t(1), T, T + 1, 4 * T, 4 * T + 1, 4 * T + 2, 14 * T + 30}) {
    const size_t windows = tokens == 0 ? 0 : (tokens - 1) / T;
    TEST(format("a shard of %zu tokens: %zu windows of %zu + 1, each in its place", tokens, windows, T));
    write_file(folder / "shard.bin", shard_bytes(counting(tokens, 7)));
    const TokenData file = TokenData::from_glob(folder / "shard.bin", 65536);
    const TokenData memory = TokenData::from_tokens(counting(tokens, 7), "memory", 65536);
    for (const TokenData* data : {&file, &memory}) {
      CHECK_EQ(data->num_tokens(), tokens);
      if (!CHECK_EQ(data->num_windows(T), windows)) continue;
      for (size_t i = 0; i < windows; i++) {
        std::vector<int> inputs(T, -1), targets(T, -1);
        data->window(i, T, inputs.data(), targets.data());
        for (size_t t = 0; t < T; t++) {
          const int token = int(7 + i * T + t);
          CHECK(inputs[t] == token && targets[t] == token + 1);
        }
      }
    }
  }
}

static void test_order() {
  const size_t T = 11;
  Scratch folder;
  write_file(folder / "train_2.bin", shard_bytes(counting(3 * T + 1, 20000)));
  write_file(folder / "train_0.bin", shard_bytes(counting(5 * T + 9)));
  write_file(folder / "train_1.bin", shard_bytes(counting(T, 10000)));  // too short for a window
  write_file(folder / "other.bin", "not a shard, and not matched");
  const TokenData data = TokenData::from_glob(folder / "train_*.bin", 65536);
  std::vector<int> inputs(T), targets(T);

  TEST("several shards: in the order of their names, no window across an edge");
  CHECK_EQ(data.shards.size(), 3u);
  CHECK_EQ(data.num_windows(T), 8u);
  std::vector<int> firsts;
  for (size_t i = 0; i < 8; i++) {
    data.window(i, T, inputs.data(), targets.data());
    CHECK_EQ(targets[T - 1], inputs[0] + int(T));
    firsts.push_back(inputs[0]);
  }
  CHECK(firsts == std::vector<int>({0, 11, 22, 33, 44, 20000, 20011, 20022}));

  const auto first_of = [&](uint64_t seed, uint64_t k) {
    training_example(data, T, seed, k, inputs.data(), targets.data());
    return inputs[0];
  };
  TEST("each window exactly once in every epoch, epochs and seeds in orders of their own");
  std::set<std::vector<int>> orders = {firsts};
  for (uint64_t seed : {1, 2, 3})
    for (uint64_t epoch : {0, 1, 2, 1000000}) {
      std::vector<int> order;
      for (uint64_t k = 0; k < 8; k++) order.push_back(first_of(seed, epoch * 8 + k));
      CHECK(orders.insert(order).second);
      std::sort(order.begin(), order.end());
      CHECK(order == firsts);
    }

  TEST("asking out of order changes nothing");
  const int first = first_of(5, 0);
  first_of(5, 8);
  CHECK_EQ(first_of(5, 0), first);
}

static void test_evenness() {
  TEST("the order is even: every window is equally likely at every place");
  const uint64_t n = 7, epochs = 7000;
  std::vector<int> counts(n * n);
  for (uint64_t epoch = 0; epoch < epochs; epoch++)
    for (uint64_t i = 0; i < n; i++) counts[i * n + permute(3, epoch, n, i)]++;
  for (int count : counts) CHECK_CLOSE(count, 1000, 5 * 29.3);  // five standard deviations
}

static void test_huge() {
  TEST("a sparse shard of 2.2 GB: windows on both sides of byte 2^31");
  Scratch folder;
  const std::string path = folder / "huge.bin";
  const size_t tokens = 1100000000, T = 1024, limit = size_t(1) << 31;
  write_file(path, shard_bytes({}, SHARD_MAGIC, SHARD_VERSION, int64_t(tokens)));
  if (truncate(path.c_str(), off_t(SHARD_HEADER + 2 * tokens)) != 0) {
    SKIP("no sparse file of 2.2 GB in /tmp");
    return;
  }
  const size_t around = (limit - SHARD_HEADER) / 2 / T, begin = SHARD_HEADER + 2 * around * T;
  CHECK(begin < limit && begin + 2 * T >= limit);
  for (size_t window : {around, (tokens - 1) / T - 1}) {
    FILE* file = fopen(path.c_str(), "r+b");
    for (size_t t : {size_t(0), T}) {
      const uint16_t token = uint16_t(window % 1000 + t);
      CHECK_EQ(fseeko(file, off_t(SHARD_HEADER + 2 * (window * T + t)), SEEK_SET), 0);
      CHECK_EQ(fwrite(&token, 2, 1, file), 1u);
    }
    fclose(file);
    std::vector<int> inputs(T), targets(T);
    TokenData::from_glob(path, 65536).window(window, T, inputs.data(), targets.data());
    CHECK_EQ(inputs[0], int(window % 1000));
    CHECK_EQ(inputs[1], 0);
    CHECK_EQ(targets[T - 1], int(window % 1000 + T));
  }
}

static void test_many() {
  TEST("more shards than the usual limit of open files");
  Scratch folder;
  for (size_t i = 0; i < 1500; i++) write_file(folder / format("s_%04zu.bin", i), shard_bytes(counting(5, i)));
  const Outcome opened = in_child([&] {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 1024;
    setrlimit(RLIMIT_NOFILE, &limit);
    int inputs[4], targets[4];
    TokenData::from_glob(folder / "s_*.bin", 65536).window(1499, 4, inputs, targets);
    printf("%d", targets[3]);
  });
  CHECK_EQ(opened.out, "1503");
}

static void test_bad() {
  Scratch folder;
  const std::string path = folder / "bad.bin", good = shard_bytes(counting(100));
  TEST("refused: another kind of file, a count that the size does not bear out");
  const struct {
    std::string bytes, message;
  } cases[] = {
      {good.substr(0, 1023), "cut short: nothing at byte 1023, expected 1 more"},
      {std::string(5000, 'a'), "not a token shard: magic 1633771873, expected 20240520"},
      {shard_bytes(counting(100), SHARD_MAGIC, 2), "shard version 2, expected 1"},
      {shard_bytes(counting(100), SHARD_MAGIC, 1, 0xFFFFFFFF),
       "1224 bytes, expected 8589935614 as its header counts 4294967295 tokens"},
      {good.substr(0, 1223), "1223 bytes, expected 1224 as its header counts 100"},
      {good + "x", "1225 bytes, expected 1224 as its header counts 100 tokens"},
      {shard_bytes(counting(100), SHARD_MAGIC, 1, 0x7FFFFFFF),
       "1224 bytes, expected 4294968318 as its header counts 2147483647 tokens"},
      {good.substr(0, 1024), "1024 bytes, expected 1224 as its header counts 100 tokens"},
  };
  for (const auto& c : cases) {
    write_file(path, c.bytes);
    CHECK(refuses(in_child([&] { TokenData::from_glob(path, 256); }), 1, path + ": " + c.message));
  }

  TEST("refused: one bad shard among good ones, no file, no match, a folder, a pipe");
  write_file(folder / "a.bin", good);
  write_file(folder / "z.bin", good);
  const auto open = [&](const std::string& pattern) {
    return in_child([=] { TokenData::from_glob(pattern, 256); });
  };
  CHECK(refuses(open(folder / "*.bin"), 1, "bad.bin: 1024 bytes"));
  CHECK(refuses(open(folder / "none.bin"), 1, "none.bin: no file of that name"));
  CHECK(refuses(open(folder / "none_*.bin"), 1, "none_*.bin: no file of that name or pattern"));
  CHECK(refuses(open(folder.path), 1, "not a regular file"));
  CHECK_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  CHECK(refuses(open(folder / "pipe"), 1, "pipe: not a regular file"));

  TEST("refused: too few tokens for one window");
  const TokenData data = TokenData::from_glob(folder / "a.bin", 256);
  data.require_window(99);
  int inputs[128], targets[128];
  const char* none = "a.bin: no shard holds one window of 100 + 1 tokens (1 shard, 100 tokens in all)";
  CHECK(refuses(in_child([&] { data.require_window(100); }), 1, none));
  CHECK(refuses(in_child([&] { training_example(data, 100, 1, 0, inputs, targets); }), 1, none));
  CHECK(refuses(in_child([&] { data.window(9, 10, inputs, targets); }), 1, "window 9 past the last of 9"));

  TEST("refused: a token outside the vocabulary, with its place, wherever it is in the window");
  std::vector<uint16_t> tokens = counting(100);
  tokens[60] = 256;
  write_file(path, shard_bytes(tokens));
  const TokenData altered = TokenData::from_glob(path, 256);
  altered.window(4, 10, inputs, targets);  // tokens 40 .. 50
  const char* message = "bad.bin: token 60, at byte 1144, is 256; expected less than the vocabulary's 256";
  CHECK(refuses(in_child([&] { altered.window(5, 10, inputs, targets); }), 1, message));  // its last target
  CHECK(refuses(in_child([&] { altered.window(6, 10, inputs, targets); }), 1, message));  // its first input
  altered.window(7, 10, inputs, targets);
  CHECK_EQ(targets[9], 80);

  TEST("refused: a shard that shrinks while it is read");
  write_file(path, good);
  const TokenData shrinking = TokenData::from_glob(path, 256);
  if (truncate(path.c_str(), 1100) != 0) perror("truncate");
  CHECK(refuses(in_child([&] { shrinking.window(8, 10, inputs, targets); }), 1,
                "bad.bin: cut short: nothing at byte 1184, expected 22 more"));
}

static void test_names() {
  Scratch folder;
  const std::string inner = folder / "d [v2]";
  std::filesystem::create_directory(inner);
  write_file(inner + "/a.bin", shard_bytes(counting(50)));
  write_file(inner + "/b.bin", shard_bytes(counting(60)));
  write_file(folder / "a*.bin", shard_bytes(counting(70)));
  write_file(folder / "ab.bin", shard_bytes(counting(80)));
  write_file(folder / "ac.bin", shard_bytes(counting(90)));
  const auto tokens = [](const std::string& name) { return TokenData::from_glob(name, 65536).num_tokens(); };
  TEST("a name that exists is that file, whatever its letters mean in a pattern");
  CHECK_EQ(tokens(inner + "/a.bin"), 50u);
  CHECK_EQ(tokens(folder / "a*.bin"), 70u);
  TEST("a folder with brackets in its name under a pattern; brackets as a choice");
  CHECK_EQ(tokens(inner + "/*.bin"), 110u);
  CHECK_EQ(tokens(folder / "a[bc].bin"), 170u);

  TEST("files to validate on that are trained on too are named");
  Options o;
  o.train = folder / "a?.bin";
  o.val = folder / "a[cd].bin";
  Config c;
  c.V = 65536;
  c.T = 10;
  const Outcome both = in_child([&] { open_data(o, c); });
  CHECK_EQ(both.status, 0);
  CHECK_EQ(both.err, "warning: --val has files that --train has too: " + (folder / "ac.bin") + "\n");
  o.val = inner + "/*.bin";
  CHECK_EQ(in_child([&] { open_data(o, c); }).err, "");
}

int main() {
  test_windows();
  test_names();
  test_order();
  test_evenness();
  test_huge();
  test_many();
  test_bad();
  return finish();
}
