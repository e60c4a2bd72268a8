// flags.h - the command line: --name value or --name=value, and what follows from what was not said.
//
//   Options o = parse_flags(argc, argv, Device::cpu);   // wrong use: one line on stderr, exit status 2
//   if (resuming) adopt_saved(o, checkpoint.metadata);  // what was not given now is as it was then
//   Config config = config_from(o, tokenizer.size);     // settles what depends on other flags, checks the sum
#pragma once
#include <map>
#include <sstream>

#include "check.h"    // fatal
#include "config.h"   // Config
#include "options.h"  // Options, flag_table, PRESETS, model_config

inline const char* program_name(Device device) {
  return device == Device::cpu ? "train_rdattnres_cpu" : "train_rdattnres";
}

// ---- presets -------------------------------------------------------------------------------------------
inline void apply_settings(Options& o, const std::string& settings) {  // "name value name value ..."
  std::istringstream words(settings);
  std::string name, value;
  while (words >> name >> value) {
    const Flag* flag = find_flag(name);
    if (!flag || !set_flag(o, *flag, value).empty())
      fatal(EXIT_ERROR, "preset: bad setting %s %s", name.c_str(), value.c_str());
  }
}
inline Options preset_options(const std::string& name, Device device) {
  Options o;
  o.device = device;
  o.preset = name;
  for (const Preset& preset : PRESETS) {
    if (name != preset.name) continue;
    apply_settings(o, preset.flags);
    apply_settings(o, device == Device::cpu ? preset.cpu : preset.gpu);
  }
  return o;
}

// ---- help ----------------------------------------------------------------------------------------------
inline void print_help(Device device) {
  const Options defaults = preset_options("tiny", device);
  printf(
      "usage: %s [--flag value]...\n\n"
      "Trains a Transformer with Role-Decoupled Attention Residuals. Without flags: the preset tiny on\n"
      "built-in stories. In brackets the default of a flag, where it is one value.\n\n",
      program_name(device));
  for (const Flag& flag : flag_table()) {
    if (!available(flag, device)) continue;
    const bool settled_later = &flag == find_flag("warmup") || &flag == find_flag("total-batch");
    const std::string value = is_switch(flag) || settled_later ? "" : flag_text(defaults, flag);
    std::string left = std::string("--") + flag.name + " " + flag.value;
    if (left.size() > 25) left += "\n" + std::string(27, ' ');
    printf("  %-26s %s", left.c_str(), flag.help);
    printf(value.empty() ? "\n" : " [%s]\n", value.c_str());
  }
  printf("\npresets, each a list of flags that the command line overrides:\n");
  for (const Preset& p : PRESETS)
    printf("  %-6s%s %s\n", p.name, p.flags, device == Device::cpu ? p.cpu : p.gpu);
}

// ---- the parser ----------------------------------------------------------------------------------------
// One --name [value] of the command line, cut out but not yet understood.
struct Argument {
  const Flag* flag;
  std::string value;
};

inline std::vector<Argument> split_arguments(int argc, char** argv, Device device) {
  std::vector<Argument> arguments;
  std::set<std::string> seen;
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    if (word.compare(0, 2, "--") != 0)
      fatal(EXIT_USAGE, "'%s': expected --flag value (put globs in quotes: the shell must leave them alone)",
            word.c_str());
    const size_t equals = word.find('=');
    const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    const Flag* flag = find_flag(name);
    if (!flag) fatal(EXIT_USAGE, "--%s: no such flag; --help lists them all", name.c_str());
    if (!available(*flag, device))
      fatal(EXIT_USAGE, "--%s: for the GPU trainer only; this one computes in float32 on the CPU", flag->name);
    if (!seen.insert(name).second) fatal(EXIT_USAGE, "--%s: given twice; expected once", flag->name);
    std::string value = "true";
    if (equals != std::string::npos) {
      value = word.substr(equals + 1);
    } else if (!is_switch(*flag)) {
      if (i + 1 >= argc || strncmp(argv[i + 1], "--", 2) == 0)
        fatal(EXIT_USAGE, "--%s: value missing; expected --%s %s", flag->name, flag->name, flag->value);
      value = argv[++i];
    }
    arguments.push_back({flag, value});
  }
  return arguments;
}

inline void set_or_die(Options& o, const Flag& flag, const std::string& value) {
  const std::string allowed = set_flag(o, flag, value);
  if (!allowed.empty())
    fatal(EXIT_USAGE, "--%s: got '%s', expected %s", flag.name, value.c_str(), allowed.c_str());
  o.given.insert(flag.name);
}

inline Options parse_flags(int argc, char** argv, Device device) {
  for (int i = 1; i < argc; i++)
    if (std::string(argv[i]) == "--help" || std::string(argv[i]) == "-h") print_help(device), exit(0);
  const std::vector<Argument> arguments = split_arguments(argc, argv, device);
  Options o;
  for (const Argument& a : arguments)  // the preset first, wherever it stands: the others override it
    if (!strcmp(a.flag->name, "preset")) set_or_die(o, *a.flag, a.value);
  o = preset_options(o.preset, device);
  for (const Argument& a : arguments) set_or_die(o, *a.flag, a.value);
  for (const char* name : {"train", "val", "test", "tokenizer", "out", "resume", "init-from"})
    if (o.given.count(name) && flag_text(o, *find_flag(name)).empty())
      fatal(EXIT_USAGE, "--%s: got '', expected %s", name, find_flag(name)->value);
  if (!o.resume.empty() && !o.init_from.empty())
    fatal(EXIT_USAGE, "--init-from: cannot be combined with --resume, which has its own weights");
  return o;
}

// ---- resuming ------------------------------------------------------------------------------------------
// The settings that a checkpoint's metadata remembers and the log's config event records, by flag name.
inline bool is_saved(const Flag& flag, Device device) {
  return !(flag.traits & NOW) && available(flag, device);
}

inline std::map<std::string, std::string> saved_options(const Options& o) {
  std::map<std::string, std::string> saved;
  for (const Flag& flag : flag_table())
    if (is_saved(flag, o.device)) saved[flag.name] = flag_text(o, flag);
  return saved;
}

// Settings not given on the command line become those of the checkpoint: all of them when a run is resumed, the
// model's alone (model_only) when a new run starts from its weights. One that is part of the model and differs
// is wrong use.
inline void adopt_saved(Options& o, const std::map<std::string, std::string>& saved, bool model_only = false) {
  for (const Flag& flag : flag_table()) {
    const auto found = saved.find(flag.name);
    if (found == saved.end() || !is_saved(flag, o.device)) continue;
    if (model_only && !(flag.traits & MODEL)) continue;
    const std::string &now = flag_text(o, flag), &then = found->second;
    if (o.given.count(flag.name)) {
      if ((flag.traits & MODEL) && now != then)
        fatal(EXIT_USAGE, "--%s: got %s, but the checkpoint has %s", flag.name, now.c_str(), then.c_str());
      continue;
    }
    const std::string allowed = set_flag(o, flag, then);
    if (!allowed.empty())
      fatal(EXIT_ERROR, "checkpoint: %s is '%s', expected %s", flag.name, then.c_str(), allowed.c_str());
    o.given.insert(flag.name);
  }
}

// ---- the model asked for -------------------------------------------------------------------------------
// Settles the options that depend on others and checks those that must fit each other. tokenizer_size is the
// number of tokens of the tokenizer in use.
inline Config config_from(Options& o, size_t tokenizer_size) {
  if (!o.given.count("vocab") && !o.tokenizer.empty()) o.vocab = tokenizer_size;
  if (o.total_batch == 0) o.total_batch = o.batch * o.context;
  if (!o.given.count("warmup")) o.warmup = o.steps / 50;
  if (o.out.empty()) o.out = format("runs/%s-%s-%zu", o.preset.c_str(), o.arch.c_str(), o.seed);

  const std::string problem = model_problem(o);
  if (!problem.empty()) fatal(EXIT_USAGE, "--%s", problem.c_str());
  if (o.total_batch % (o.batch * o.context) != 0)
    fatal(EXIT_USAGE, "--total-batch: got %zu, expected a multiple of batch * context = %zu", o.total_batch,
          o.batch * o.context);
  // All activations together hold fewer numbers than this, and their bytes must fit in 64 bits.
  const double rows = double(o.batch) * double(o.context) * double(2 * o.layers + 2);
  const double most = rows * double(8 * o.width + 4 * o.ffn + 2 * o.layers);
  if (most > 0x1p59)
    fatal(EXIT_USAGE, "--batch: got %zu; expected activations, about %.0e numbers here, to fit in 64 bits",
          o.batch, most);
  if (o.vocab < tokenizer_size && (!o.tokenizer.empty() || (o.train.empty() && o.val.empty())))
    fatal(EXIT_USAGE, "--vocab: got %zu, expected at least the tokenizer's %zu", o.vocab, tokenizer_size);
  if (o.steps > 0 && o.train.empty() && !o.val.empty())
    fatal(EXIT_USAGE, "--train: missing; expected shards to train on beside --val (or --steps 0)");
  if (o.steps > 0 && o.train.empty() && !o.tokenizer.empty())
    fatal(EXIT_USAGE, "--tokenizer: the built-in stories are bytes; expected --train with it (or --steps 0)");

  return model_config(o);
}
