// targets.h - everything that reads files or text from outside, each as a function of any bytes at all.
//
// A target may refuse its input (fatal, thrown here) but must not crash, run on, or ask for memory out of all
// proportion; and what it accepts must have the properties it claims. tests/test_fuzz.cpp runs all targets on
// their seeds and on changed seeds; tests/fuzz/fuzz.cpp hands one of them to libFuzzer (make fuzz).
#pragma once
#include <filesystem>
#include <stdexcept>

#include "dev/common/checkpoint.h"
#include "dev/common/flags.h"
#include "dev/common/text.h"
#include "dev/common/log.h"
#include "dev/common/report.h"
#include "dev/common/shards.h"
#include "dev/common/tokenizer.h"
#include "tests/child.h"  // Scratch, write_file, read_file

struct FuzzTarget {
  const char* name;
  std::vector<std::string> (*seeds)();
  void (*run)(const std::string& input);  // throws Fatal: refused; std::logic_error: a property does not hold
  bool refuses;                           // a log is never refused: lines that are none of ours are dropped
};

// Unlike a check of a test, says so to whoever runs the target: libFuzzer keeps the input that does not hold.
#define HOLDS(condition) \
  if (!(condition)) throw std::logic_error(format("%s:%d: %s is false", __FILE__, __LINE__, #condition))

namespace fuzz {

// Files go where writing costs least.
inline const Scratch& scratch() {
  static const Scratch folder(access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
  return folder;
}

// The first bytes of an input choose; the rest is what is read.
struct Input {
  std::string rest;
  explicit Input(const std::string& bytes) : rest(bytes) {}
  size_t byte() { return size_t(static_cast<unsigned char>(take(1)[0])); }
  std::string take(size_t n) {  // zeros where there are no more
    std::string head = rest.substr(0, n);
    rest.erase(0, n);
    head.resize(n);
    return head;
  }
};

// A header of these numbers, zeros up to `length` bytes.
inline std::string header(const std::vector<uint32_t>& numbers, size_t length) {
  std::string bytes(reinterpret_cast<const char*>(numbers.data()), 4 * numbers.size());
  bytes.resize(length);
  return bytes;
}

// ---- token shards: T - 1, V / 256, the file -------------------------------------------------------------

inline std::vector<std::string> shard_seeds() {
  const std::string tokens("\1\0\2\0\3\1\4\0\5\1\6\0\7\2\10\0\11\0\12\0", 20);
  std::vector<std::string> seeds;
  for (uint32_t count : {uint32_t(10), uint32_t(0), uint32_t(-1), uint32_t(INT32_MAX)})
    for (const std::string& choice : {std::string("\3\4"), std::string("\0\377", 2)})
      seeds.push_back(choice + header({SHARD_MAGIC, SHARD_VERSION, count}, SHARD_HEADER) +
                      (count ? tokens : ""));
  return seeds;
}

inline void run_shard(const std::string& bytes) {
  Input input(bytes);
  const size_t T = 1 + input.byte(), V = 1 + 256 * input.byte();
  const std::string path = scratch() / "tokens.bin";
  write_file(path, input.rest);
  const TokenData data = TokenData::from_glob(path, V);
  HOLDS(SHARD_HEADER + 2 * data.num_tokens() == input.rest.size());
  data.require_window(T);
  const size_t n = data.num_windows(T);
  HOLDS(n * T < data.num_tokens());
  std::vector<int> inputs(T), targets(T);
  for (uint64_t k : {uint64_t(0), uint64_t(n), uint64_t(1) << 62}) {
    training_example(data, T, 1, k, inputs.data(), targets.data());
    for (size_t t = 0; t < T; t++) HOLDS(size_t(inputs[t]) < V && size_t(targets[t]) < V);
  }
}

// ---- tokenizer: length of a text, the text, the file ----------------------------------------------------

inline std::string tokenizer_file(const std::vector<std::string>& tokens, uint32_t eot) {
  std::string file = header({20240328, 2, uint32_t(tokens.size()), eot}, 1024);
  for (const std::string& token : tokens) file += char(token.size()) + token;
  return file;
}

inline std::vector<std::string> tokenizer_seeds() {
  const std::string text = "a ab's  b\xc3\xa9\xff'll 12 \n\n";
  const std::string head = char(text.size()) + text;
  const std::vector<std::string> few = {"a", "b", " ", "ab", " ab", "'", "s", "\n", "aba", "b", "", "end"};
  std::vector<std::string> all;
  for (int b = 0; b < 256; b++) all.push_back(std::string(1, char(b)));
  for (const char* merged : {" a", "ab", "'s", "\xc3\xa9", " ab", "  "}) all.push_back(merged);
  all.push_back(std::string(255, 'a'));
  return {head + tokenizer_file(all, 262),
          head + tokenizer_file(few, 11),
          "\2ab" + tokenizer_file(few, 11),
          "\2ab" + tokenizer_file(few, 12),
          "\2ab" + tokenizer_file(few, 11) + "more",
          "\2ab" + tokenizer_file({"a", "b"}, 0),
          head + tokenizer_file(all, 0).substr(0, 1300)};
}

inline void run_tokenizer(const std::string& bytes) {
  Input input(bytes);
  const std::string text = input.take(input.byte()), path = scratch() / "tokenizer.bin";
  write_file(path, input.rest);
  const Tokenizer tokenizer = Tokenizer::load(path);
  HOLDS(tokenizer.size >= 2 && tokenizer.eot >= 0 && size_t(tokenizer.eot) < tokenizer.size);
  size_t length = 1024;
  for (size_t id = 0; id < tokenizer.size; id++) length += 1 + tokenizer.decode(int(id)).size();
  HOLDS(length == input.rest.size());
  const std::vector<int> ids = tokenizer.encode(text);
  HOLDS(tokenizer.decode(ids) == text && ids.size() <= text.size());
  for (int id : ids) HOLDS(id >= 0 && size_t(id) < tokenizer.size && id != tokenizer.eot);
}

// ---- safetensors: the file; then what a resumed run takes from it ----------------------------------------

inline std::string safetensors_file(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data_bytes, '\1');
}

inline std::vector<std::string> safetensors_seeds() {
  // A file of ours, checksum and all, with the metadata of a run.
  const auto get = [](size_t, size_t n, float* chunk) { std::fill_n(chunk, n, 0.5f); };
  const Options o = preset_options("tiny", Device::cpu);
  Metadata metadata = saved_options(o);
  for (const char* name : {"step", "tokens", "data_position"}) metadata[name] = "7";
  const std::string path = scratch() / "seed.safetensors";
  checkpoint_write(path, metadata, {{"model.wte", {3, 4}, get}, {"model.norm", {4}, get}});
  std::vector<std::string> seeds = {read_file(path), safetensors_file("{}", 0)};
  const std::string first = R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)";
  for (const char* second : {
           R"("b":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]}})",
           R"("b":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[24,28]}})",
           R"("b":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[24,24]}})",
           R"("__metadata__":{"format":"pt","layers":"3","vocab":"99999999999999999999"}})",
       })
    seeds.push_back(safetensors_file(first + second, strstr(second, "28]") ? 28 : 24));
  return seeds;
}

inline void run_safetensors(const std::string& bytes) {
  const std::string path = scratch() / "fuzzed.safetensors";
  write_file(path, bytes);
  const Checkpoint checkpoint = Checkpoint::open(path);
  size_t total = 0;
  for (const auto& tensor : checkpoint.tensors) {
    total += tensor.second.end - tensor.second.begin;
    if (!error_of([&] { checkpoint.entry(tensor.first, tensor.second.shape); }).empty()) continue;
    size_t n = 1, got = 0;
    for (size_t d : tensor.second.shape) n *= d;
    const auto put = [&](size_t, size_t count, const float*) { got += count; };
    checkpoint.read(tensor.first, tensor.second.shape, put);
    HOLDS(got == n);
  }
  HOLDS(checkpoint.data + total == bytes.size());  // every byte belongs to the header or to one tensor

  Options o = preset_options("tiny", Device::cpu);
  adopt_saved(o, checkpoint.metadata);
  const Config config = config_from(o, 257);
  HOLDS(config.C % config.NH == 0);
}

// ---- JSON -----------------------------------------------------------------------------------------------

inline std::vector<std::string> json_seeds() {
  return {R"({"event":"step","step":12,"loss":-1.25e-3,"list":[1,[],{}],"ok":true,"none":null})",
          R"(["\"\\\/\b\f\n\r\t\u0041\u00e9\u20ac\ud83d\ude00", "é€😀"])", "[\"\\ud800\", \"\xff\xc0\x80\"]",
          "{\"a\":1,\"a\":2}", std::string(40, '[') + std::string(40, ']')};
}

inline void run_json(const std::string& bytes) {
  Json value, again;
  const std::string error = JsonParser::parse(bytes, &value);
  if (!error.empty()) fatal(EXIT_ERROR, "%s", error.c_str());
  HOLDS(JsonParser::parse(json_quote(value.text), &again).empty() && again.type == Json::string);
}

// ---- the log of a resumed run: the step, the file ---------------------------------------------------------

inline std::vector<std::string> log_seeds() {
  std::string log = "{\"event\":\"config\",\"options\":{\"arch\":\"rd\"},\"parameters\":470016}\n";
  for (int step = 1; step <= 4; step++) log += format("{\"event\":\"step\",\"step\":%d,\"loss\":5.5}\n", step);
  return {"\2" + log, "\11" + log + "{\"event\":\"done\",\"step\":4}\n{\"event\":\"step\",\"st",
          "\2\n\n[]\n" + log + "rubbish\n" + log,
          "\2{\"step\":-1}\n{\"step\":\"2\"}\n{\"step\":2.0}\n{\"event\":7}\n"};
}

inline std::vector<std::string> lines_of(const std::string& text) {  // those that end
  std::vector<std::string> lines;
  for (size_t at = 0, end; (end = text.find('\n', at)) != text.npos; at = end + 1)
    lines.push_back(text.substr(at, end - at));
  return lines;
}

inline void run_log(const std::string& bytes) {
  Input input(bytes);
  const size_t last = input.byte();
  const std::string path = scratch() / "log.jsonl";
  write_file(path, input.rest);
  { Log log(scratch().path, last); }
  const std::string kept = read_file(path);
  const std::vector<std::string> before = lines_of(input.rest), after = lines_of(kept);
  size_t from = 0;
  for (const std::string& line : after) {  // lines of the old log, in their order, each whole
    while (from < before.size() && before[from] != line) from++;
    HOLDS(from++ < before.size());
    Json event;
    HOLDS(JsonParser::parse(line, &event).empty() && event.type == Json::object);
    size_t step = 0;
    HOLDS(!event.find("step") || (event.find("step")->as_count(&step) && step <= last));
  }
  {
    Log log(scratch().path, last);
    HOLDS(read_file(path) == kept);  // resuming twice drops nothing more
    log.write(Event("step").add("step", last + 1));
  }
  HOLDS(lines_of(read_file(path)).size() == after.size() + 1);
}

// ---- the command line: 'g' for the GPU's, then words, each on a line --------------------------------------

inline std::vector<std::string> flags_seeds() {
  std::vector<std::string> seeds = {"c", "g--dtype\nfp32\n--recompute", "c--preset=s\n--dry-run",
                                    "c--layers\n3\n--layers\n4", "c--resume\nx\n--init-from\ny"};
  for (const Flag& flag : flag_table())
    for (const std::string& value : {number_text(flag.min), number_text(flag.max), std::string("x"),
                                     flag_text(preset_options("s", Device::gpu), flag)})
      seeds.push_back(format("g--%s=%s", flag.name, value.c_str()));
  return seeds;
}

inline void run_flags(const std::string& bytes) {
  Input input(bytes);
  const Device device = input.byte() == 'g' ? Device::gpu : Device::cpu;
  std::vector<std::string> arguments = {"train"};
  std::istringstream lines(input.rest);
  for (std::string line; std::getline(lines, line);) {
    line = line.c_str();  // an argument ends at a zero byte
    const bool ends = line == "--help" || line == "-h" || line == "--version";  // prints and ends the program
    if (!ends) arguments.push_back(line);
  }
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(&argument[0]);
  Options o = parse_flags(int(argv.size()), argv.data(), device);
  for (const Flag& flag : flag_table()) {  // what was understood is what the text says again
    Options again;
    HOLDS(set_flag(again, flag, flag_text(o, flag)).empty() || !o.given.count(flag.name));
    HOLDS(flag_text(again, flag) == flag_text(o, flag) || !o.given.count(flag.name));
  }
  const Config config = config_from(o, 257);
  HOLDS(config.C % config.NH == 0 && config.HS() % 2 == 0);
  HOLDS(o.total_batch % (o.batch * o.context) == 0 && o.total_batch > 0);
  HOLDS(!settings_table(o).empty() && !model_table(config).empty() && !schedule_table(o, 1).empty());
  Options resumed = preset_options(o.preset, device);  // what a checkpoint keeps of it, read back
  adopt_saved(resumed, saved_options(o));
  HOLDS(saved_options(resumed) == saved_options(o));
}

}  // namespace fuzz

constexpr FuzzTarget FUZZ_TARGETS[] = {
    {"shard", fuzz::shard_seeds, fuzz::run_shard, true},
    {"tokenizer", fuzz::tokenizer_seeds, fuzz::run_tokenizer, true},
    {"safetensors", fuzz::safetensors_seeds, fuzz::run_safetensors, true},
    {"json", fuzz::json_seeds, fuzz::run_json, true},
    {"log", fuzz::log_seeds, fuzz::run_log, false},
    {"flags", fuzz::flags_seeds, fuzz::run_flags, true},
};

// True if the target accepted the input, false if it refused it with one line that says why.
inline bool fuzz_one(const FuzzTarget& target, const std::string& input) {
  fatal_throws = true;
  try {
    target.run(input);
    return true;
  } catch (const Fatal& refusal) {
    HOLDS(!refusal.message.empty() && refusal.message.find('\n') == std::string::npos);
    HOLDS(refusal.exit_code == EXIT_ERROR || refusal.exit_code == EXIT_USAGE);
    return false;
  }
}
