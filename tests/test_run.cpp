// test_run.cpp - whole runs of ./train_rdattnres_cpu, as a user starts them: what must not change the result
// (threads, resuming, stopping, looking), what a checkpoint and a log hold, and how a run refuses.
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dev/common/json.h"         // Json
#include "dev/common/log.h"          // log lines
#include "dev/common/random.h"       // philox: made-up tokens
#include "dev/common/safetensors.h"  // Checkpoint
#include "dev/common/checkpoint.h"   // checkpoint_write
#include "dev/common/schedule.h"     // learning_rate
#include "dev/common/shards.h"       // SHARD_MAGIC
#include "tests/check.h"

static std::string folder;  // of this test, removed at its end
static const char* const TRAINER = "./train_rdattnres_cpu";

// ---- starting runs and reading what they leave ---------------------------------------------------------

struct Result { int status; std::string text; };  // exit status; stdout and stderr together

static Result shell(const std::string& command) {
  Result result = {-1, ""};
  FILE* pipe = popen(("export OMP_WAIT_POLICY=passive; (" + command + ") 2>&1").c_str(), "r");
  if (!pipe) return result;
  char chunk[4096];
  for (size_t n; (n = fread(chunk, 1, sizeof chunk, pipe)) > 0;) result.text.append(chunk, n);
  const int status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

// A run of the small model, or of what `flags` ("--name value ...") makes of it: the trainer takes a flag once.
// Odd sizes on purpose: no dimension is a multiple of a tile. 2 x 37 tokens a batch, two batches a step.
static std::string command(const std::string& out, const std::string& flags) {
  std::map<std::string, std::string> values;
  std::istringstream words(
      "--layers 3 --width 48 --heads 3 --ffn 40 --block-size 4 --context 37 --vocab 131 --batch 2 --total-batch 148"
      " --lr 0.01 --query-lr-mult 10 --val-tokens 400 --val-every 0 --sample-tokens 0 --checkpoint-every 0 --keep 0"
      " --train '" + folder + "/train_*.bin' --val '" + folder + "/val_*.bin' --out " + folder + "/" + out + " " + flags);
  std::string name, word;
  while (words >> word) {
    if (word.compare(0, 2, "--") == 0) values[name = word] = "";
    else values[name] = word;
  }
  std::string text = TRAINER;
  for (const auto& flag : values) text += " " + flag.first + " " + flag.second;
  return text;
}
static Result train(const std::string& out, const std::string& flags, const std::string& environment = "") {
  return shell(environment + " " + command(out, flags));
}

static void write_shard(const std::string& name, size_t num_tokens, uint64_t seed) {
  std::vector<int32_t> header(256);
  header[0] = SHARD_MAGIC, header[1] = SHARD_VERSION, header[2] = int32_t(num_tokens);
  std::ofstream file(folder + "/" + name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(header.data()), 1024);
  for (size_t i = 0; i < num_tokens; i++) {  // each token hints at the next: there is something to learn
    const uint16_t token = uint16_t((i * 7 + philox(seed, STREAM_TEST, i).x[0] % 5) % 131);
    file.write(reinterpret_cast<const char*>(&token), 2);
  }
}

// All tensors of a checkpoint, by name. Empty if it cannot be opened.
static std::map<std::string, std::vector<float>> tensors(const std::string& path) {
  std::map<std::string, std::vector<float>> all;
  Checkpoint checkpoint;
  const std::string error = checkpoint.try_open(path);
  if (!error.empty()) { printf("  %s\n", error.c_str()); return all; }
  for (const auto& entry : checkpoint.tensors) {
    std::vector<float>& values = all[entry.first];
    checkpoint.read(entry.first, entry.second.shape, [&](size_t, size_t n, const float* chunk) { values.insert(values.end(), chunk, chunk + n); });
  }
  return all;
}
static std::string checkpoint_of(const std::string& out, size_t step) {
  return folder + "/" + out + format("/ckpt_%08zu.safetensors", step);
}

// Two checkpoints hold the same bits in every parameter and moment.
static bool same_bits(const std::string& a, const std::string& b) {
  const auto x = tensors(a), y = tensors(b);
  if (x.empty() || x.size() != y.size()) return false;
  for (const auto& entry : x) {
    const auto other = y.find(entry.first);
    if (other == y.end() || other->second.size() != entry.second.size()) return false;
    if (memcmp(entry.second.data(), other->second.data(), entry.second.size() * sizeof(float)) != 0) {
      printf("  differs in %s\n", entry.first.c_str());
      return false;
    }
  }
  return true;
}

// The values of one field of one kind of event, as written, in the order of the log.
static std::vector<std::string> log_field(const std::string& out, const std::string& event, const std::string& field) {
  std::vector<std::string> values;
  std::ifstream log(folder + "/" + out + "/log.jsonl");
  for (std::string line; std::getline(log, line);) {
    Json json;
    if (!JsonParser::parse(line, &json).empty()) { values.push_back("bad line: " + line); continue; }
    const Json *name = json.find("event"), *value = json.find(field);
    if (name && name->text == event && value) values.push_back(value->text);
  }
  return values;
}

static double first_loss(const std::string& out) {
  const std::vector<std::string> losses = log_field(out, "step", "loss");
  return losses.empty() ? NAN : std::stod(losses[0]);
}

static void check_ok(const Result& result) {
  if (!CHECK_EQ(result.status, 0)) printf("%s\n", result.text.c_str());
}

// ---- the tests -----------------------------------------------------------------------------------------

// The reference run of this file: 20 steps of 4 windows over 3 shards of 5 + 9 + 3 = 17 windows, so the epoch
// ends within a step, again and again.
static void reference_run() {
  TEST("a run of 20 steps ends with a checkpoint, a log and a lower loss");
  check_ok(train("whole", "--steps 20 --checkpoint-every 10"));
  CHECK_EQ(tensors(checkpoint_of("whole", 20)).size(), 3u * 17u);
  const std::vector<std::string> losses = log_field("whole", "step", "loss");
  if (CHECK_EQ(losses.size(), 20u)) {
    printf("  loss %s at step 1, %s at step 20\n", losses.front().c_str(), losses.back().c_str());
    CHECK(std::stod(losses.back()) < 0.8 * std::stod(losses.front()));
  }
  // Step n of the log, counted from 1, trained at step n - 1 of the schedule; the log keeps the tokens seen.
  check_ok(train("warm", "--steps 8 --warmup 3 --min-lr-ratio 0.2"));
  const std::vector<std::string> rates = log_field("warm", "step", "lr"), seen = log_field("warm", "step", "tokens");
  CHECK_EQ(rates.size(), 8u);
  for (size_t n = 0; n < rates.size(); n++) {
    CHECK_EQ(std::stod(rates[n]), learning_rate(n, 8, 3, 0.01, 0.2));
    CHECK_EQ(seen[n], std::to_string((n + 1) * 148));
  }
  CHECK_EQ(log_field("whole", "config", "parameters").size(), 1u);
  CHECK_EQ(log_field("whole", "done", "step").size(), 1u);
  CHECK_EQ(log_field("whole", "checkpoint", "step").size(), 2u);
}

static void threads() {
  TEST("1, 2, 3 and 8 threads: the same losses and parameters, bit for bit");
  const std::vector<std::string> losses = log_field("whole", "step", "loss");
  for (const char* n : {"1", "2", "3", "8"}) {
    const std::string out = std::string("threads") + n;
    check_ok(train(out, "--steps 20", std::string("OMP_NUM_THREADS=") + n));
    CHECK(log_field(out, "step", "loss") == losses);
    CHECK(same_bits(checkpoint_of(out, 20), checkpoint_of("whole", 20)));
  }
}

static void resuming() {
  TEST("20 steps = 10 + resume + 10, bit for bit, across shard and epoch edges, with accumulation");
  shell("mkdir " + folder + "/half && cp " + folder + "/whole/log.jsonl " + checkpoint_of("whole", 10) + " " + folder + "/half/");
  check_ok(shell(std::string(TRAINER) + " --resume " + folder + "/half"));
  CHECK(same_bits(checkpoint_of("half", 20), checkpoint_of("whole", 20)));
  CHECK(log_field("half", "step", "loss") == log_field("whole", "step", "loss"));
  CHECK(log_field("half", "step", "step") == log_field("whole", "step", "step"));

  TEST("a resumed run can be made longer, but its model cannot be changed");
  check_ok(shell(std::string(TRAINER) + " --resume " + folder + "/half --steps 21"));
  CHECK_EQ(log_field("half", "step", "step").size(), 21u);
  CHECK_EQ(shell(std::string(TRAINER) + " --resume " + folder + "/half --width 96").status, 2);
}

static void stopping() {
  TEST("SIGTERM: the run saves, says how to resume, and resuming gives the same bits");
  const std::string out = folder + "/stopped";
  const pid_t child = fork();
  if (child == 0) {
    const std::string line = "exec " + command("stopped", "--steps 60") + " > " + folder + "/stopped.txt";
    execl("/bin/sh", "sh", "-c", line.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  while (log_field("stopped", "step", "step").size() < 5) usleep(1000);
  kill(child, SIGTERM);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(shell("cat " + folder + "/stopped.txt").text.find("--resume " + out) != std::string::npos);
  const size_t stopped_at = log_field("stopped", "step", "step").size();
  printf("  stopped after step %zu\n", stopped_at);
  CHECK(access(checkpoint_of("stopped", stopped_at).c_str(), F_OK) == 0);
  check_ok(shell(std::string(TRAINER) + " --resume " + out));
  check_ok(train("unstopped", "--steps 60"));
  CHECK(same_bits(checkpoint_of("stopped", 60), checkpoint_of("unstopped", 60)));
  CHECK(log_field("stopped", "step", "loss") == log_field("unstopped", "step", "loss"));
}

static void looking() {
  TEST("validation, samples and checkpoints on the way change nothing");
  check_ok(train("watched", "--steps 20 --val-every 3 --sample-every 4 --sample-tokens 9 --checkpoint-every 7 --keep 1"));
  CHECK(same_bits(checkpoint_of("watched", 20), checkpoint_of("whole", 20)));
  CHECK(log_field("watched", "step", "loss") == log_field("whole", "step", "loss"));
  CHECK_EQ(log_field("watched", "val", "loss").size(), 8u);  // steps 0, 3, .., 18 and the end
  CHECK_EQ(log_field("watched", "sample", "text").size(), 5u);  // steps 4, 8, .., 20
  TEST("--keep 1 leaves one checkpoint, the newest");
  CHECK_EQ(shell("ls " + folder + "/watched | grep -c safetensors").text, std::string("1\n"));
  CHECK(access(checkpoint_of("watched", 20).c_str(), F_OK) == 0);
}

static void reloading() {
  TEST("a new process reloads the checkpoint and finds the same validation loss, bit for bit, for any batch");
  const std::vector<std::string> loss = log_field("whole", "val", "loss");
  CHECK_EQ(loss.size(), 1u);
  for (const char* batch : {"1", "2", "5"}) {
    const std::string out = std::string("reload") + batch;
    check_ok(shell(std::string(TRAINER) + " --init-from " + checkpoint_of("whole", 20) + " --val '" + folder + "/val_*.bin'" +
                   " --steps 0 --sample-tokens 0 --val-tokens 400 --batch " + batch + " --out " + folder + "/" + out));
    CHECK(log_field(out, "val", "loss") == loss);
  }
  TEST("--steps 0 writes a checkpoint, with the weights it started from");
  const auto x = tensors(checkpoint_of("whole", 20)), y = tensors(checkpoint_of("reload1", 0));
  for (const char* tensor : {"model.attn_route_v", "model.wte"})
    CHECK(x.count(tensor) && y.count(tensor) && x.at(tensor) == y.at(tensor));
}

static void pairing() {
  TEST("rd, block and residual: the same weights and batches, so the first loss agrees up to eps");
  const double rd = first_loss("whole");
  // At zero queries a mix is the residual stream over K <= 3 sources. The norm takes the 1/K out again but for its
  // eps, which then weighs K^2 eps / (2 mean(h^2)) < 1% of logits whose size is 0.1: a thousandth of a nat. Other
  // batches or weights differ by ten times that.
  for (const char* arch : {"block", "residual"}) {
    check_ok(train(arch, std::string("--steps 2 --arch ") + arch));
    printf("  rd %.9g, %s %.9g\n", rd, arch, first_loss(arch));
    CHECK_CLOSE(first_loss(arch), rd, strcmp(arch, "block") == 0 ? 1e-6 : 1e-3);
  }
  TEST("tied = block bit for bit in the log of whole runs");
  check_ok(train("tied20", "--steps 20 --arch tied"));
  check_ok(train("block20", "--steps 20 --arch block"));
  CHECK(log_field("tied20", "step", "loss") == log_field("block20", "step", "loss"));
  CHECK(log_field("tied20", "step", "norm") == log_field("block20", "step", "norm"));
  TEST("rd trains away from block, and another seed from both");
  CHECK(log_field("whole", "step", "loss") != log_field("block20", "step", "loss"));
  check_ok(train("seed2", "--steps 2 --seed 2"));
  CHECK(first_loss("seed2") != rd);
}

static void refusing() {
  struct Case { const char *what, *flags, *message; int status; };
  const Case cases[] = {
    {"an unknown flag", "--stpes 3", "--stpes", 2},
    {"a shard that is not there", "--val /nowhere/x.bin --steps 1", "/nowhere/x.bin", 1},
    {"a token past the vocabulary", "--steps 1 --vocab 100", "expected less than the vocabulary's 100", 1},
    {"a prompt the tokenizer cannot fit", "--steps 0 --tokenizer /nowhere/t.bin", "/nowhere/t.bin", 1},
    {"a checkpoint that is not one", "--steps 1 --init-from Makefile", "Makefile", 1},
    {"a folder that cannot be made", "--steps 1 --out /proc/x/y", "/proc/x", 1},
  };
  for (const Case& c : cases) {
    TEST(std::string("refused: ") + c.what);
    const Result result = train("refused", c.flags);
    CHECK_EQ(result.status, c.status);
    if (!CHECK(result.text.find(c.message) != std::string::npos)) printf("%s\n", result.text.c_str());
    CHECK(log_field("refused", "step", "step").empty());
  }

  TEST("a second run in the same folder refuses, and the first is untouched");
  shell("mkdir -p " + folder + "/locked");
  const std::string hold = "flock -n " + folder + "/locked/lock -c '";
  const Result second = shell(hold + command("locked", "--steps 1 --train " + folder + "/train_0.bin --val " + folder + "/val_0.bin") + "'");
  if (second.status == 127) SKIP("no flock program");
  CHECK_EQ(second.status, 1);
  CHECK(second.text.find("in use by another run") != std::string::npos);

  struct Poison { const char *tensor, *blamed; float value; };
  for (const Poison& poison : {Poison{"w_up", "parameter w_up, layer 1", NAN}, Poison{"wo", "the output of the attention, layer 1", 3e38f}}) {
    TEST(std::string("a number that is not finite stops the run and is traced to ") + poison.blamed);
    Checkpoint good;
    fatal_if(good.try_open(checkpoint_of("whole", 20)));
    std::map<std::string, std::vector<float>> values = tensors(checkpoint_of("whole", 20));
    std::vector<float>& bad = values[std::string("model.") + poison.tensor];
    for (size_t i = bad.size() / 3; i < bad.size() / 3 * 2; i++) bad[i] = poison.value;  // the middle of three layers
    std::vector<CheckpointTensor> rewritten;
    for (const auto& entry : good.tensors) {
      const std::vector<float>& from = values[entry.first];
      rewritten.push_back({entry.first, entry.second.shape, [&from](size_t offset, size_t n, float* chunk) {
                             std::copy_n(from.begin() + std::ptrdiff_t(offset), n, chunk);
                           }});
    }
    checkpoint_write(folder + "/poisoned.safetensors", good.metadata, rewritten);
    const Result stopped = train("diverged", "--steps 5 --init-from " + folder + "/poisoned.safetensors");
    CHECK_EQ(stopped.status, 1);
    if (!CHECK(stopped.text.find(std::string("first bad number in ") + poison.blamed) != std::string::npos)) printf("%s\n", stopped.text.c_str());
    CHECK(stopped.text.find("step 1:") != std::string::npos);
    CHECK_EQ(shell("ls " + folder + "/diverged | grep -c safetensors").text, std::string("0\n"));
  }

  TEST("--dry-run prints the sizes of a model that no machine holds, and writes nothing");
  const Result dry = train("dry", "--dry-run --layers 4096 --width 65536 --heads 1024 --ffn 1048576 --vocab 65536");
  check_ok(dry);
  CHECK(access((folder + "/dry").c_str(), F_OK) != 0);
}

int main() {
  char name[] = "/tmp/rdattnres_test_run_XXXXXX";
  if (!mkdtemp(name)) { perror(name); return 1; }
  folder = name;
  write_shard("train_0.bin", 5 * 37 + 1, 1), write_shard("train_1.bin", 9 * 37 + 36, 2), write_shard("train_2.bin", 3 * 37 + 2, 3);
  write_shard("val_0.bin", 11 * 37 + 1, 4);
  reference_run();
  threads();
  resuming();
  stopping();
  looking();
  reloading();
  pairing();
  refusing();
  shell("rm -rf " + folder);
  return finish();
}
