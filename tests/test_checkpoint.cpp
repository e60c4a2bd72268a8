// test_checkpoint.cpp - checkpoints: written whole or not at all, refused when anything is wrong with them; and
// the folder of a run that holds them.
#include <csignal>
#include <limits>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include "dev/common/checkpoint.h"
#include "dev/common/random.h"
#include "dev/common/run.h"
#include "dev/common/train.h"
#include "tests/check.h"
#include "tests/child.h"

// ---- a small checkpoint --------------------------------------------------------------------------------

struct Tensor {
  std::string name;
  std::vector<size_t> shape;
  std::vector<float> data;
};

static std::vector<Tensor> make_tensors(uint64_t seed = 1) {
  // One is larger than a chunk and no multiple of it, so that chunks meet inside.
  std::vector<Tensor> tensors = {
      {"model.wte", {3, 5}, {}}, {"model.wo", {2, 3, 50000}, {}}, {"adam_v.norm", {1}, {}}};
  for (Tensor& t : tensors) {
    size_t n = 1;
    for (size_t d : t.shape) n *= d;
    for (size_t i = 0; i < n; i++) t.data.push_back(normal(seed, STREAM_TEST, t.data.size()));
  }
  // Bits that arithmetic would not keep.
  const float odd[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), -0.0f,
                       std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::max()};
  std::copy(odd, odd + 5, tensors[0].data.begin());
  return tensors;
}

static void write_tensors(const std::string& path, const std::vector<Tensor>& tensors,
                          const Metadata& metadata) {
  std::vector<CheckpointTensor> list;
  for (const Tensor& t : tensors) {
    const float* data = t.data.data();
    list.push_back({t.name, t.shape, [data](size_t offset, size_t n, float* chunk) {
                      memcpy(chunk, data + offset, n * sizeof(float));
                    }});
  }
  checkpoint_write(path, metadata, list);
}

// Every bit of these tensors is in the checkpoint; its chunks come in order, without gaps.
static bool holds(const Checkpoint& checkpoint, const std::vector<Tensor>& tensors) {
  for (const Tensor& t : tensors) {
    std::vector<float> data;
    checkpoint.read(t.name, t.shape, [&](size_t offset, size_t n, const float* chunk) {
      CHECK_EQ(offset, data.size());
      data.insert(data.end(), chunk, chunk + n);
    });
    if (!CHECK_EQ(data.size(), t.data.size())) return false;
    if (memcmp(data.data(), t.data.data(), data.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

// ---- what the disk is asked to do ------------------------------------------------------------------------

// Only a power cut shows what was not flushed, so this program's own fsync and rename keep a list.
static std::string asked;
#ifdef __linux__
extern "C" int fsync(int fd) {
  struct stat info = {};
  fstat(fd, &info);
  asked += S_ISDIR(info.st_mode) ? "flush the folder, " : format("flush %zu bytes, ", size_t(info.st_size));
  return int(syscall(SYS_fsync, fd));
}
extern "C" int rename(const char* from, const char* to) noexcept {
  asked += "rename, ";
  return renameat(AT_FDCWD, from, AT_FDCWD, to);
}
#endif

// ---- tests ---------------------------------------------------------------------------------------------

static void test_round_trip(const Scratch& folder) {
  TEST("round trip: every bit of every tensor, every character of the metadata");
  const std::vector<Tensor> tensors = make_tensors();
  const Metadata metadata = {
      {"step", "500"}, {"prompt", "\"quotes\", \\, \n, \t, \x01 and \u00e9\U0001f600"}, {"empty", ""}};
  const std::string path = folder / "a.safetensors";
  write_tensors(path, tensors, metadata);
  const Checkpoint checkpoint = Checkpoint::open(path);
  CHECK(holds(checkpoint, tensors));
  for (const auto& entry : metadata) CHECK_EQ(checkpoint.metadata.at(entry.first), entry.second);
  CHECK_EQ(checkpoint.metadata.at("format_version"), std::string(CHECKPOINT_FORMAT));
  CHECK_EQ(checkpoint.metadata.size(), metadata.size() + 2);
  CHECK_EQ(checkpoint.tensors.size(), 3u);

  TEST("the same content gives the same file, byte for byte");
  write_tensors(folder / "b.safetensors", tensors, metadata);
  CHECK(read_file(path) == read_file(folder / "b.safetensors"));

  TEST("a tensor that is missing, or of another shape, is refused before anything is handed out");
  const auto read = [&](const char* name, std::vector<size_t> shape) {
    return in_child(
        [&] { checkpoint.read(name, shape, [](size_t, size_t, const float*) { printf("handed out"); }); });
  };
  CHECK(refuses(read("model.wv", {3, 5}), 1, path + ": holds no tensor model.wv"));
  CHECK(refuses(read("model.wte", {5, 3}), 1, path + ": tensor model.wte is (3,5), expected (5,3)"));
  CHECK(refuses(read("model.wte", {15}), 1, "tensor model.wte is (3,5), expected (15)"));
}

static void test_counts() {
  TEST("numbers of the metadata");
  CHECK_EQ(count_from_metadata({{"step", "12"}}, "step"), 12u);
  CHECK(refuses(in_child([] {
                  count_from_metadata({{"step", "12x"}}, "step");
                }),
                1, "metadata: step is '12x', expected a whole number"));
  CHECK(refuses(in_child([] { count_from_metadata({}, "step"); }), 1, "metadata lacks step"));
}

// A safetensors file made by hand: header length, header, data.
static std::string raw_file(const std::string& header, size_t data_bytes, uint64_t length = UINT64_MAX) {
  if (length == UINT64_MAX) length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data_bytes, '\0');
}

static void test_from_elsewhere(const Scratch& folder) {
  const std::string path = folder / "elsewhere.safetensors", index = path + ".index.json";
  TEST("weights in 16 bits: both types, signs, the smallest, the largest and what is no number");
  std::string bytes = raw_file(R"({"h":{"dtype":"F16","shape":[8],"data_offsets":[0,16]},)"
                               R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]}})",
                               0);
  const uint16_t words[] = {0x3C00, 0xC400, 0x0001, 0x83FF, 0x0400, 0x7BFF,
                            0xFC00, 0x7E00, 0x3F80, 0xC0A0, 0x0001};
  bytes.append(reinterpret_cast<const char*>(words), sizeof(words));
  write_file(path, bytes);
  const Checkpoint halves = Checkpoint::open(path);
  std::vector<float> got;
  const auto put = [&](size_t, size_t n, const float* chunk) { got.insert(got.end(), chunk, chunk + n); };
  halves.read("h", {8}, put);
  halves.read("b", {3}, put);
  const float want[] = {
      1, -4, std::ldexp(1.f, -24), std::ldexp(-1023.f, -24), std::ldexp(1.f, -14), 65504, -INFINITY, NAN,
      1, -5, std::ldexp(1.f, -133)};
  CHECK_EQ(got.size(), 11u);
  for (size_t i = 0; i < got.size(); i++) CHECK(i == 7 ? std::isnan(got[i]) : got[i] == want[i]);

  TEST("sizes from config.json beside weights without metadata; one that is no JSON is named");
  const std::string beside = folder / "config.json";
  write_file(beside, R"({"layers": 7, "block_size": 4, "arch": "block", "ffn": null, "vocab_size": 9})");
  const Metadata sizes = Checkpoint::open(path).metadata;
  CHECK(sizes == (Metadata{{"layers", "7"}, {"block-size", "4"}, {"arch", "block"}}));
  write_file(beside, R"({"layers": 7,})");
  Checkpoint bad;
  CHECK_EQ(bad.try_open(path), beside + ": bad JSON at byte 13: expected a name in quotes");
  remove(beside.c_str());

  TEST("a model in several files is refused by its index");
  remove(path.c_str());
  write_file(index, "{}");
  Checkpoint several;
  CHECK_EQ(several.try_open(path),
           index + ": a model in several files, expected one: save it with a larger max_shard_size");
  remove(index.c_str());
}

static void test_hostile(const Scratch& folder) {
  const std::string path = folder / "hostile.safetensors";
  const auto tensor = [](const char* name, const char* shape, const char* offsets, const char* dtype = "F32") {
    return format(R"("%s":{"dtype":"%s","shape":%s,"data_offsets":%s})", name, dtype, shape, offsets);
  };
  const auto one = [&](const char* shape, const char* offsets) {
    return "{" + tensor("a", shape, offsets) + "}";
  };
  // Six numbers, and another entry behind them.
  const auto two = [&](const std::string& b) { return "{" + tensor("a", "[2,3]", "[0,24]") + "," + b + "}"; };

  TEST("hand-made files that are good: no metadata, any order, empty tensors, other types beside ours");
  for (const std::string& bytes : {
           raw_file("{}", 0),
           raw_file(one("[2,3]", "[0,24]") + "   ", 24),
           raw_file("{" + tensor("b", "[]", "[24,28]") + "," + tensor("a", "[6]", "[0,24]") + "}", 28),
           raw_file(two(tensor("b", "[0,9]", "[24,24]")), 24),
           raw_file(two(R"("__metadata__":{"format":"pt"})"), 24),
           raw_file(two(tensor("b", "[4]", "[24,32]", "I16")), 32),
       }) {
    write_file(path, bytes);
    Checkpoint checkpoint;
    CHECK_EQ(checkpoint.try_open(path), "");
  }
  const Checkpoint mixed = Checkpoint::open(path);
  CHECK_EQ(mixed.entry("a", {2, 3}).dtype, "F32");
  CHECK_EQ(error_of([&] { mixed.entry("b", {4}); }), path + ": tensor b is I16, expected F32, F16 or BF16");

  TEST("refused: bad sizes, bad headers, tensors that do not lie end to end, a wrong checksum");
  const struct {
    std::string bytes, message;
  } bad[] = {
      {"", "0 bytes, too short for a safetensors file"},
      {raw_file("{}", 0, 3), "cut short: header of 3 bytes in a file of 10"},
      {raw_file("{}", 0, uint64_t(1) << 63), "no safetensors file: header of 9223372036854775808 bytes"},
      {"Once upon a time there was a file of text.", "no safetensors file: header of"},
      {raw_file("hello", 0), "header: bad JSON at byte 0: expected a value"},
      {raw_file("[]", 0), "header: expected a JSON object"},
      {raw_file(std::string(100000, '['), 0), "header: bad JSON at byte 33: nested too deeply"},
      {raw_file(two(tensor("a", "[6]", "[24,48]")), 48), "a name stands twice in an object"},
      {raw_file(R"({"__metadata__":[]})", 0), "header: __metadata__ is no object"},
      {raw_file(R"({"__metadata__":{"step":5}})", 0), "header: metadata step is no string"},
      {raw_file(R"({"a":5})", 0), "header: tensor a: data_offsets is no list of whole numbers"},
      {raw_file(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4), "header: tensor a: shape is no list of"},
      {raw_file(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4), "header: tensor a has no dtype"},
      {raw_file(one("[1]", "[0,4,8]"), 4), "header: tensor a: data_offsets are not two"},
      {raw_file(one("[-1]", "[0,4]"), 4), "tensor a: shape is no list of whole numbers"},
      {raw_file(one("[1]", "[0,18446744073709551617]"), 4), "data_offsets is no list of whole numbers"},
      {raw_file(one("[250]", "[0,1000]"), 4), "4 bytes of data, expected 1000"},
      {raw_file(one("[1]", "[4,0]"), 4), "tensor a ends before it starts"},
      {raw_file(one("[4294967296,4294967296]", "[0,4]"), 4), "tensor a: 4294967296 * 4294967296 does not fit"},
      {raw_file(one("[4611686018427387905]", "[0,4]"), 4), "tensor a: 4611686018427387905 * 4 does not fit"},
      {raw_file(one("[2]", "[0,4]"), 4), "tensor a takes 4 bytes, expected 8 for its shape"},
      {raw_file(two(tensor("b", "[1]", "[20,24]")), 24), "a tensor starts at byte 20 of the data, expected 24"},
      {raw_file(two(tensor("b", "[6]", "[0,24]")), 24), "a tensor starts at byte 0 of the data, expected 24"},
      {raw_file(two(tensor("b", "[1]", "[28,32]")), 32), "a tensor starts at byte 28 of the data, expected 24"},
      {raw_file(two(tensor("b", "[1]", "[24,28]")), 32), "32 bytes of data, expected 28"},
      {raw_file(two(R"("__metadata__":{"format_version":"rdattnres-1"})"), 24), "metadata lacks checksum"},
      {raw_file(two(R"("__metadata__":{"format_version":"rdattnres-9"})"), 24),
       "'rdattnres-9', expected rdatt"},
      {raw_file(two(R"("__metadata__":{"checksum":"0123456789abcdef"})"), 24), "0123456789abcdef: altered"},
  };
  for (const auto& c : bad) {
    write_file(path, c.bytes);
    CHECK(refuses(in_child([&] { Checkpoint::open(path); }), 1, c.message));
  }
  CHECK(refuses(in_child([&] { Checkpoint::open(folder / "none"); }), 1, "none: cannot open: No such file"));
  CHECK(refuses(in_child([&] { Checkpoint::open(folder.path); }), 1, folder.path + ": not a regular file"));
}

static void test_damage(const Scratch& folder) {
  const std::string path = folder / "damaged.safetensors";
  std::vector<Tensor> tensors = make_tensors();
  tensors[1] = {"model.wo", {2, 100}, std::vector<float>(200, 0.5f)};
  write_tensors(path, tensors, {{"step", "500"}, {"layers", "4"}});
  const std::string good = read_file(path);

  TEST(format("a file of %zu bytes cut short at any byte is refused", good.size()));
  for (size_t length = 0; length < good.size(); length++) {
    write_file(path, good.substr(0, length));
    Checkpoint checkpoint;
    CHECK(checkpoint.try_open(path) != "");
  }

  TEST("a file with any one bit flipped is refused when it is opened, or when its tensors are asked for");
  for (size_t at = 0; at < good.size(); at++) {
    std::string bytes = good;
    bytes[at] = char(bytes[at] ^ (1 << at % 8));
    write_file(path, bytes);
    Checkpoint checkpoint;
    bool readable = checkpoint.try_open(path).empty();
    for (const Tensor& t : tensors)
      readable = readable && error_of([&] { checkpoint.entry(t.name, t.shape); }).empty();
    if (!CHECK(!readable)) printf("     byte %zu of %zu is not noticed\n", at, good.size());
  }
}

static void test_writing(const Scratch& folder) {
  const std::string path = folder / "w.safetensors";
  const std::vector<Tensor> old = make_tensors(1), fresh = make_tensors(2);
  const auto file_list = [&] {
    std::string names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path))
      names += entry.path().filename().string() + " ";
    return names;
  };
  write_tensors(path, old, {});

  TEST("writing again replaces the file and leaves nothing else behind");
  write_tensors(path, fresh, {});
  CHECK(holds(Checkpoint::open(path), fresh));
  CHECK_EQ(file_list(), "w.safetensors ");
  write_tensors(path, old, {});

  TEST("a file is on the disk, all of it, before it has its name; its name is, before the write returns");
#ifdef __linux__
  asked.clear();
  write_tensors(path, old, {});
  const size_t bytes = std::filesystem::file_size(path);
  CHECK_EQ(asked, format("flush %zu bytes, rename, flush the folder, ", bytes));
  asked.clear();
  OutFile file(folder / "text");  // a checkpoint empties the buffer before its checksum; this does not
  file.write("text");
  file.commit();
  CHECK_EQ(asked, "flush 4 bytes, rename, flush the folder, ");
  std::filesystem::remove(folder / "text");
#else
  SKIP("fsync and rename are watched on Linux only");
#endif

  TEST("disk full on the way (a limit on the file's size): refused, the old file whole, no leftovers");
  CHECK(refuses(in_child([&] {
                  signal(SIGXFSZ, SIG_IGN);
                  const struct rlimit limit = {600000, 600000};
                  setrlimit(RLIMIT_FSIZE, &limit);
                  write_tensors(path, fresh, {});
                }),
                1, path + ": cannot write: File too large"));
  CHECK(holds(Checkpoint::open(path), old));
  CHECK_EQ(file_list(), "w.safetensors ");

  TEST("killed in the middle: the old file is whole, the next write cleans up");
  const Outcome killed = in_child([&] {
    checkpoint_write(path, {}, {{"a", {1000000}, [](size_t offset, size_t n, float* chunk) {
                                   std::fill(chunk, chunk + n, 1.0f);
                                   if (offset > 500000) kill(getpid(), SIGKILL);
                                 }}});
  });
  CHECK_EQ(killed.status, 128 + SIGKILL);
  CHECK(holds(Checkpoint::open(path), old));
  CHECK(file_list().find(".tmp") != std::string::npos);
  CHECK_EQ(list_checkpoints(folder.path).size(), 0u);  // w.safetensors is no name of ours, the .tmp even less
  write_tensors(path, fresh, {});
  CHECK(holds(Checkpoint::open(path), fresh));
  CHECK_EQ(file_list(), "w.safetensors ");

  TEST("refused: a folder that is not there, a pipe, a folder of that name");
  const auto write = [&](const std::string& to) { return in_child([&] { write_tensors(to, fresh, {}); }); };
  CHECK(refuses(write(folder / "none/x"), 1, "none/x.tmp: cannot create: No such file"));
  const std::string pipe = folder / "pipe";  // not a device of the machine's: a fault here would replace it
  CHECK_EQ(mkfifo(pipe.c_str(), 0600), 0);
  CHECK(refuses(write(pipe), 1, pipe + ": cannot write: not a regular file"));
  CHECK(refuses(write(folder.path), 1, folder.path + ": cannot write: not a regular file"));
  CHECK(std::filesystem::is_fifo(pipe));
}

static void test_python(const Scratch& folder) {
  const std::string a = folder / "a.safetensors", b = folder / "b.safetensors", script = folder / "resave.py";
  const std::vector<Tensor> tensors = make_tensors();
  TEST("Python's safetensors opens our file, and we open the one it saves, with and without metadata");
  if (system("python3 -c 'import numpy, safetensors.numpy' 2>/dev/null") != 0) {
    SKIP("no python3 with numpy and safetensors");
    return;
  }
  write_tensors(a, tensors, {{"note", "caf\u00e9 \"quoted\""}});
  write_file(script, R"(
import sys
from safetensors import safe_open
from safetensors.numpy import save_file
with safe_open(sys.argv[1], 'np') as f:
    metadata, tensors = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}
assert metadata['note'] == 'caf\u00e9 "quoted"', metadata
assert tensors['model.wo'].shape == (2, 3, 50000) and str(tensors['model.wo'].dtype) == 'float32'
tensors = dict(sorted(tensors.items(), reverse=True))
save_file(tensors, sys.argv[2], metadata if sys.argv[3] == 'with' else None)
)");
  for (const std::string with : {"with", "without"}) {
    CHECK_EQ(system(("python3 " + script + " " + a + " " + b + " " + with).c_str()), 0);
    const Checkpoint again = Checkpoint::open(b);
    CHECK(holds(again, tensors));
    CHECK_EQ(again.metadata.count("checksum"), with == "with" ? 1u : 0u);
  }
}

// ---- the folder of a run -------------------------------------------------------------------------------

static void test_run_folder(const Scratch& folder) {
  const std::string run = folder / "runs/deep/one";
  const std::vector<Tensor> tensors = {{"a", {10}, std::vector<float>(10, 3.0f)}};
  const auto write_step = [&](size_t step) {
    write_tensors(checkpoint_path(run, step), tensors, {{"step", std::to_string(step)}});
  };
  const auto steps = [&] {
    std::string text;
    for (size_t step : list_checkpoints(run)) text += std::to_string(step) + " ";
    return text;
  };
  TEST("folders are made with those above them; a file in the way is named");
  make_folders(run);
  make_folders(run + "/");
  CHECK(is_folder(run));
  write_file(folder / "file", "");
  CHECK(refuses(in_child([&] { make_folders(folder / "file/x"); }), 1,
                "file/x: cannot create the folder: Not a dir"));
  std::filesystem::permissions(folder.path, std::filesystem::perms(0555));
  CHECK(refuses(in_child([&] {
                  if (geteuid() == 0 && setuid(65534) != 0) _exit(9);
                  make_folders(folder / "closed");
                }),
                1, "closed: cannot create the folder: Permission denied"));
  std::filesystem::permissions(folder.path, std::filesystem::perms(0755));

  TEST("checkpoints are listed by step, whatever the number of digits; other files are not");
  CHECK_EQ(checkpoint_path("r", 42), "r/ckpt_00000042.safetensors");
  for (size_t step : {size_t(7), size_t(1000), size_t(123456789), size_t(20)}) write_step(step);
  for (const char* name : {"ckpt_1.safetensors", "ckpt_00000008.safetensors.tmp", "ckpt_0000000x.safetensors",
                           "ckpt_.safetensors", "xkpt_00000008.safetensors"})
    write_file(run + "/" + name, "x");
  CHECK_EQ(steps(), "7 20 1000 123456789 ");

  TEST("--keep deletes the oldest; 0 keeps all, a large number too");
  for (size_t keep : {0, 9}) delete_old_checkpoints(run, keep, 123456789);
  CHECK_EQ(steps(), "7 20 1000 123456789 ");
  delete_old_checkpoints(run, 3, 123456789);
  CHECK_EQ(steps(), "20 1000 123456789 ");
  delete_old_checkpoints(run, 2, 1000);  // later ones are another's, and do not count
  CHECK_EQ(steps(), "20 1000 123456789 ");

  TEST("resuming takes the newest checkpoint that is whole, and says which it passed over");
  CHECK_EQ(open_newest_checkpoint(run).metadata.at("step"), "123456789");
  write_file(checkpoint_path(run, 123456789), "half a file");
  const auto open = [&](const std::string& path) {
    return in_child([&] { printf("%s", open_newest_checkpoint(path).metadata.at("step").c_str()); });
  };
  const Outcome resumed = open(run);
  CHECK_EQ(resumed.out, "1000");
  CHECK(resumed.err.find("warning: " + checkpoint_path(run, 123456789)) == 0);
  CHECK_EQ(open_newest_checkpoint(checkpoint_path(run, 20)).metadata.at("step"), "20");
  CHECK(refuses(open(checkpoint_path(run, 123456789)), 1, "no safetensors file"));
  make_folders(folder / "empty");
  CHECK(refuses(open(folder / "empty"), 1, "empty: holds no checkpoint"));
  make_folders(folder / "empty/earlier-1");
  CHECK(refuses(open(folder / "empty"), 1, "an earlier run is in " + (folder / "empty/earlier-1")));
  CHECK(refuses(open(folder / "none"), 1, "none: cannot open: No such file"));
  write_file(folder / "empty/ckpt_00000001.safetensors", "bad");
  CHECK(open(folder / "empty").err.find("error: " + (folder / "empty") + ": none of its 1") !=
        std::string::npos);
  CHECK_EQ(folder_of(checkpoint_path(run, 20)), run);
  CHECK_EQ(folder_of("x.safetensors"), ".");

  TEST("a new run in a used folder moves what was there aside, every time");
  write_file(run + "/log.jsonl", "{}\n");
  CHECK_EQ(move_aside(run, "abandoned", 123456790), "");
  CHECK_EQ(move_aside(run, "earlier", 0), run + "/earlier-1");
  CHECK_EQ(steps(), "");
  CHECK_EQ(list_checkpoints(run + "/earlier-1").size(), 3u);
  CHECK_EQ(read_file(run + "/earlier-1/log.jsonl"), "{}\n");
  CHECK_EQ(move_aside(run, "earlier", 0), "");
  write_step(5);
  CHECK_EQ(move_aside(run, "earlier", 0), run + "/earlier-2");

  TEST("one run a folder: a second is refused and told who has it; a killed one leaves it free");
  int ready[2];
  char byte = 0;
  CHECK_EQ(pipe(ready), 0);
  fflush(nullptr);
  const pid_t holder = fork();
  if (holder == 0) {
    lock_folder(run);
    if (write(ready[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  CHECK_EQ(read(ready[0], &byte, 1), 1);
  const std::string message = run + format(": in use by another run (process %d)", int(holder));
  CHECK(refuses(in_child([&] { lock_folder(run); }), 1, message));
  kill(holder, SIGKILL);
  waitpid(holder, nullptr, 0);
  CHECK_EQ(in_child([&] { lock_folder(run); }).status, 0);
}

static void test_signals() {
  TEST(
      "every signal that ends a program asks the loop to stop; a second Ctrl-C alone ends it, with status 130");
  const auto raising = [](std::vector<int> signals, void (*before)(int)) {
    return in_child([&] {
      signal(signals[0], before);
      catch_stop_signals();
      if (stop_requested) _exit(9);
      for (int number : signals) raise(number);
      _exit(stop_requested ? 0 : 8);
    });
  };
  for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE}) {
    const Outcome once = raising({number}, SIG_DFL);
    CHECK_EQ(once.status, 0);
    CHECK_EQ(once.err, number == SIGPIPE ? "" : "saving after this step; press Ctrl-C again to stop without\n");
    CHECK_EQ(raising({number, SIGTERM, SIGPIPE, SIGHUP}, SIG_DFL).status, 0);
    CHECK_EQ(raising({number, SIGINT, SIGPIPE, SIGINT}, SIG_DFL).status, 130);
  }
  CHECK_EQ(raising({SIGHUP}, SIG_IGN).status, 8);  // nohup hands it on ignored
}

static void test_bytes(const Scratch& folder) {
  TEST("metadata come back the same, whatever bytes they are; valid text stays as it is in the file");
  std::string all;
  for (int byte = 1; byte < 256; byte++) all += char(byte);
  const std::string texts[] = {
      all, "caf\u00e9 \u4e2d \U0001F600", "\xff", "cut \xf0\x9f", "\U0010FE80 \U0010FEFF", "\xf4\x8f\xba\xff",
      ""};
  for (const std::string& text : texts) {
    checkpoint_write(folder / "bytes", {{"prompt", text}}, {});
    Checkpoint checkpoint;
    CHECK_EQ(checkpoint.try_open(folder / "bytes"), "");
    CHECK_EQ(checkpoint.metadata["prompt"], text);
    const std::string file = read_file(folder / "bytes");
    uint32_t code;
    for (size_t at = 0; at < file.size();) {
      const size_t length = utf8_decode(file, at, &code);
      if (!CHECK(length > 0 || at < 8)) break;
      at += std::max<size_t>(length, 1);
    }
    CHECK_EQ(unescape_bytes(escape_bytes(text)), text);
  }
  CHECK_EQ(escape_bytes(texts[1]), texts[1]);
}

int main() {
  Scratch folder;
  test_writing(folder);
  test_round_trip(folder);
  test_counts();
  test_from_elsewhere(folder);
  test_hostile(folder);
  test_damage(folder);
  test_python(folder);
  test_bytes(folder);
  test_run_folder(folder);
  test_signals();
  return finish();
}
