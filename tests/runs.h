// runs.h - for tests of whole runs: starts a trainer as a user does, on a small model and made-up
// shards, and reads what a run leaves.
#pragma once
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include <sys/wait.h>
#include <unistd.h>

#include "dev/common/text.h"        // Json
#include "dev/common/random.h"      // philox: made-up tokens
#include "dev/common/checkpoint.h"  // Checkpoint
#include "dev/common/shards.h"      // SHARD_MAGIC
#include "tests/check.h"
#include "tests/child.h"  // Scratch

inline const Scratch scratch;  // of this test, removed at its end
inline const std::string& folder = scratch.path;
#ifndef TRAINER_PATH
#define TRAINER_PATH "./train_rdattnres_cpu"
#endif
inline const char* const CPU_TRAINER = TRAINER_PATH;
inline const char* TRAINER = CPU_TRAINER;  // or a CUDA trainer
inline bool on_cpu() { return TRAINER == CPU_TRAINER; }

struct Result {
  int status;        // exit status; 128 + signal if a signal ended it
  std::string text;  // stdout and stderr together
};

// A program that runs beside the test.
class Process {
 public:
  explicit Process(const std::string& line, const char* prefix = "exec ") : output(tmpfile()) {
    fflush(nullptr);
    id = fork();
    if (id != 0) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    dup2(fileno(output), 1);
    dup2(fileno(output), 2);
    execl("/bin/sh", "sh", "-c", (prefix + line).c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  bool running() {
    if (id > 0 && waitpid(id, &state, WNOHANG) == id) id = 0;
    return id > 0;
  }
  void signal(int number) {  // a number that has ended may be another's by now
    if (running()) kill(id, number);
  }
  Result wait() {
    if (id > 0) waitpid(id, &state, 0);
    id = 0;
    return {WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state), read_stream(output)};
  }
  pid_t id = 0;

 private:
  FILE* output;
  int state = 127 << 8;
};

inline Result shell(const std::string& commands) { return Process(commands, "").wait(); }

// Odd sizes on purpose: no dimension is a multiple of a tile. 2 x 37 tokens a batch, two batches a step.
inline std::string small_model =
    "--layers 3 --width 48 --heads 3 --ffn 40 --block-size 4 --context 37 --vocab 257 --batch 2"
    " --total-batch 148 --val-tokens 400";

// A run of the small model, or of what `flags` ("--name value ...") makes of it: the trainer takes a flag once.
inline std::string command(const std::string& out, const std::string& flags) {
  std::map<std::string, std::string> values;
  std::istringstream words(small_model + " --lr 0.01 --query-lr-mult 10 --val-every 0 --sample-tokens 0" +
                           " --checkpoint-every 0 --keep 0 --log-every 1 --train '" + folder +
                           "/train_*.bin' --val '" + folder + "/val_*.bin' --out " + folder + "/" + out + " " +
                           flags);
  std::string name, word;
  while (words >> word) {
    if (word.compare(0, 2, "--") == 0)
      values[name = word] = "";
    else
      values[name] = word;
  }
  std::string text = TRAINER;
  for (const auto& flag : values) text += " " + flag.first + " " + flag.second;
  return text;
}
inline Result train(const std::string& out, const std::string& flags, const std::string& environment = "") {
  return shell(environment + " " + command(out, flags));
}
inline std::string resume(const std::string& out, const std::string& flags = "") {
  return std::string(TRAINER) + " --resume " + folder + "/" + out + " " + flags;
}

inline void check_says(const Result& result, int status, const std::string& part) {
  const bool right_status = CHECK_EQ(result.status, status);
  if (!CHECK(result.text.find(part) != std::string::npos) || !right_status)
    printf("  expected: %s\n%s\n", part.c_str(), result.text.c_str());
}
inline void check_ok(const Result& result) { check_says(result, 0, ""); }

inline void write_shard(const std::string& name, size_t num_tokens, uint64_t seed) {
  std::vector<int32_t> header(256);
  header[0] = SHARD_MAGIC, header[1] = SHARD_VERSION, header[2] = int32_t(num_tokens);
  std::ofstream file(folder + "/" + name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(header.data()), 1024);
  for (size_t i = 0; i < num_tokens; i++) {  // each token hints at the next: there is something to learn
    const uint16_t token = uint16_t((i * 7 + philox(seed, STREAM_TEST, i).x[0] % 5) % 131);
    file.write(reinterpret_cast<const char*>(&token), 2);
  }
}

// Three training shards of 5 + 9 + 3 = 17 windows, one of validation.
inline void write_shards() {
  write_shard("train_0.bin", 5 * 37 + 1, 1), write_shard("train_1.bin", 9 * 37 + 36, 2),
      write_shard("train_2.bin", 3 * 37 + 2, 3);
  write_shard("val_0.bin", 11 * 37 + 1, 4);
}

// All tensors of a checkpoint, by name. Empty if it cannot be opened.
inline std::map<std::string, std::vector<float>> tensors(const std::string& path) {
  std::map<std::string, std::vector<float>> all;
  Checkpoint checkpoint;
  const std::string error = checkpoint.try_open(path);
  if (!error.empty()) {
    printf("  %s\n", error.c_str());
    return all;
  }
  for (const auto& entry : checkpoint.tensors) {
    std::vector<float>& values = all[entry.first];
    checkpoint.read(entry.first, entry.second.shape, [&](size_t, size_t n, const float* chunk) {
      values.insert(values.end(), chunk, chunk + n);
    });
  }
  return all;
}
inline std::string checkpoint_of(const std::string& out, size_t step) {
  return folder + "/" + out + format("/ckpt_%08zu.safetensors", step);
}

// Two checkpoints hold the same bits in every parameter and moment.
inline bool same_bits(const std::string& a, const std::string& b) {
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
inline std::vector<std::string> log_field(const std::string& out, const std::string& event,
                                          const std::string& field) {
  std::vector<std::string> values;
  std::ifstream log(folder + "/" + out + "/log.jsonl");
  for (std::string line; std::getline(log, line);) {
    Json json;
    if (!JsonParser::parse(line, &json).empty()) {
      values.push_back("bad line: " + line);
      continue;
    }
    const Json *name = json.find("event"), *value = json.find(field);
    if (name && name->text == event && value) values.push_back(value->text);
  }
  return values;
}
inline size_t logged_steps(const std::string& out) { return log_field(out, "step", "step").size(); }
// Waits until a run's log has so many steps.
inline void wait_for_steps(Process& run, const std::string& out, size_t steps) {
  while (logged_steps(out) < steps && run.running()) usleep(1000);
}
// A run ended at this step as the other did, which was left alone.
inline void check_same_end(const std::string& out, const std::string& other, size_t step) {
  CHECK(same_bits(checkpoint_of(out, step), checkpoint_of(other, step)));
  CHECK(log_field(out, "step", "loss") == log_field(other, "step", "loss"));
}
