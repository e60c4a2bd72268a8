// flags.h - every setting of a run, in one table, and the command line: --name value or --name=value.
//
//   Options o = parse_flags(argc, argv, Device::cpu);   // wrong use ends the program
//   if (resuming) adopt_saved(o, checkpoint.metadata);  // what was not given now is as it was then
//   Config config = config_from(o, tokenizer.size);     // settles what depends on other flags, checks the sum
//
// The parser, --help, the table printed at the start, the log's config event and the settings kept in a
// checkpoint all walk flag_table(): a flag added there is known everywhere.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "dev/common/config.h"  // Config, Arch
#include "dev/common/errors.h"  // fatal, format
#include "dev/common/files.h"   // expand_home
#include "dev/common/ranks.h"   // ranks
#include "dev/common/text.h"    // parse_count, parse_double, number_text

constexpr const char* VERSION = "0.9";  // as CHANGELOG.md has it

enum class Device { cpu, gpu };

struct Options {
  // model
  std::string preset = "tiny", arch = "rd";
  size_t layers = 0, width = 0, heads = 0, ffn = 0, block_size = 0, context = 0, vocab = 0;
  // data and files; with neither train nor val, the built-in stories are the data
  std::string train, val, test, tokenizer, out, resume, init_from;
  // training; total_batch is in tokens a step, warmup in steps
  size_t steps = 0, batch = 0, total_batch = 0, warmup = 0, seed = 1;
  double lr = 0, min_lr_ratio = 0.1, weight_decay = 0.1, clip = 1, query_lr_mult = 1;
  // seeing and keeping
  size_t log_every = 0, val_every = 0, val_tokens = 0, sample_every = 0, sample_tokens = 0,
         checkpoint_every = 0, keep = 0;
  std::string prompt;
  double temperature = 0.8, top_p = 1;
  size_t top_k = 0;
  bool quiet = false, dry_run = false, new_data = false;
  // GPU
  std::string dtype = "bf16";
  bool recompute = false;
  size_t profile = 0;

  Device device = Device::cpu;
  std::set<std::string> given;  // flags set on the command line or by a checkpoint, not by a preset
};

// ---- the table -----------------------------------------------------------------------------------------
enum FlagTrait {
  NOW = 1,    // about this call of the program only: a checkpoint does not remember it
  MODEL = 2,  // part of what was trained: a resumed run cannot change it
  GPU = 4     // train_rdattnres only
};
struct Flag {
  const char* name;
  std::variant<std::string Options::*, size_t Options::*, double Options::*, bool Options::*> member;
  const char* value;  // how help names the value; "a|b" lists the only ones allowed
  double min, max;    // of a number
  int traits;
  const char* help;
};

inline const std::vector<Flag>& flag_table() {
  using O = Options;
  static const std::vector<Flag> table = {
      {"preset", &O::preset, "tiny|s|m", 0, 0, MODEL, "sizes and training defaults, listed below"},
      {"arch", &O::arch, "rd|block|tied|average|frozen-v|residual", 0, 0, MODEL, "which routes the model has"},
      {"layers", &O::layers, "L", 1, 4096, MODEL, "decoder layers, each attention then feed-forward"},
      {"width", &O::width, "C", 2, 65536, MODEL, "channels of the residual sources"},
      {"heads", &O::heads, "NH", 1, 4096, MODEL, "attention heads; divides the width, width / heads is even"},
      {"ffn", &O::ffn, "F", 1, 1048576, MODEL, "feed-forward width"},
      {"block-size", &O::block_size, "S", 1, 8192, MODEL, "sublayers a block: even; or 1: all are sources"},
      {"context", &O::context, "T", 1, 1048576, MODEL, "tokens the model looks back on"},
      {"vocab", &O::vocab, "V", 2, 65536, MODEL, "vocabulary; default: the tokenizer's size, or the preset's"},
      {"train", &O::train, "GLOB", 0, 0, 0, "training shards; without --train and --val: built-in stories"},
      {"val", &O::val, "GLOB", 0, 0, 0, "validation shards"},
      {"test", &O::test, "GLOB", 0, 0, 0, "shards for one evaluation at the end"},
      {"tokenizer", &O::tokenizer, "FILE", 0, 0, 0, "turns tokens into text; default: bytes"},
      {"out", &O::out, "DIR", 0, 0, NOW, "folder of the run; default runs/<preset>-<arch>-<seed>"},
      {"resume", &O::resume, "PATH", 0, 0, NOW, "go on from a run's folder or checkpoint"},
      {"init-from", &O::init_from, "PATH", 0, 0, NOW, "start from the weights of a run's folder or checkpoint"},
      {"new-data", &O::new_data, "", 0, 0, NOW, "resume though the training shards have changed"},
      {"steps", &O::steps, "N", 0, 1e12, 0, "optimiser steps"},
      {"batch", &O::batch, "B", 1, 1048576, 0, "sequences computed at a time"},
      {"total-batch", &O::total_batch, "TOKENS", 1, 1e12, 0, "tokens a step; a multiple of batch * context"},
      {"lr", &O::lr, "X", 0, 100, 0, "peak learning rate"},
      {"min-lr-ratio", &O::min_lr_ratio, "X", 0, 1, 0, "last learning rate / peak"},
      {"warmup", &O::warmup, "N", 0, 1e12, 0, "steps of linear warm-up; default 2% of the steps"},
      {"weight-decay", &O::weight_decay, "X", 0, 100, 0, "decay of matrices"},
      {"clip", &O::clip, "X", 0, 1e12, 0, "largest global gradient norm; 0: no clipping"},
      {"query-lr-mult", &O::query_lr_mult, "X", 0, 1e6, 0, "learning rate of route queries / that of the rest"},
      {"seed", &O::seed, "N", 0, 1e19, 0, "initial weights, data order, sampling"},
      {"log-every", &O::log_every, "N", 0, 1e12, NOW,
       "steps between step lines; 0: a second apart, on a terminal one line that is renewed"},
      {"val-every", &O::val_every, "N", 0, 1e12, 0, "steps between validations; 0: at the end only"},
      {"val-tokens", &O::val_tokens, "N", 0, 1e15, 0, "tokens a validation reads; 0: the whole split"},
      {"sample-every", &O::sample_every, "N", 0, 1e12, 0, "steps between samples; 0: at the end only"},
      {"sample-tokens", &O::sample_tokens, "N", 0, 1048576, 0, "length of a sample; 0: none"},
      {"prompt", &O::prompt, "TEXT", 0, 0, 0, "what a sample continues; default: a new document"},
      {"temperature", &O::temperature, "X", 0, 1000, 0, "of sampling; 0: always the most likely token"},
      {"top-k", &O::top_k, "K", 0, 65536, 0, "sample from the K most likely tokens; 0: from all"},
      {"top-p", &O::top_p, "P", 0, 1, 0, "sample from the fewest tokens that hold this probability"},
      {"checkpoint-every", &O::checkpoint_every, "N", 0, 1e12, 0, "steps from save to save; 0: last only"},
      {"keep", &O::keep, "N", 0, 1e9, 0, "checkpoints to keep, the newest; 0: all"},
      {"quiet", &O::quiet, "", 0, 0, NOW, "print only what matters most: no step lines, no pictures"},
      {"dry-run", &O::dry_run, "", 0, 0, NOW, "print sizes, memory, data and schedule, then stop"},
      {"dtype", &O::dtype, "bf16|fp32", 0, 0, GPU, "what the GPU computes in"},
      {"profile", &O::profile, "N", 0, 1e6, NOW | GPU, "time N steps by function, print a table, go on"},
      {"recompute", &O::recompute, "", 0, 0, GPU, "recompute activations in the backward pass to save memory"},
  };
  return table;
}

// ---- values --------------------------------------------------------------------------------------------
inline const Flag* find_flag(const std::string& name) {
  for (const Flag& flag : flag_table())
    if (name == flag.name) return &flag;
  return nullptr;
}
inline bool is_switch(const Flag& flag) { return std::holds_alternative<bool Options::*>(flag.member); }
inline bool available(const Flag& flag, Device device) { return device == Device::gpu || !(flag.traits & GPU); }

// Sets a flag from text. Returns what would have been allowed, empty when all is well.
inline std::string set_flag(Options& o, const Flag& flag, const std::string& text) {
  const std::string range = number_text(flag.min) + " to " + number_text(flag.max);
  if (auto member = std::get_if<std::string Options::*>(&flag.member)) {
    const std::string choices = std::string("|") + flag.value + "|";
    const bool listed = text.find('|') == std::string::npos && choices.find("|" + text + "|") != choices.npos;
    if (strchr(flag.value, '|') && !listed) return flag.value;
    o.*(*member) = text;
  } else if (auto member = std::get_if<size_t Options::*>(&flag.member)) {
    size_t n;
    const bool ok = parse_count(text, &n) && double(n) >= flag.min && double(n) <= flag.max;
    if (!ok) return "a whole number from " + range;
    o.*(*member) = n;
  } else if (auto member = std::get_if<double Options::*>(&flag.member)) {
    double x;
    if (!parse_double(text, &x) || x < flag.min || x > flag.max) return "a number from " + range;
    o.*(*member) = x;
  } else {
    if (text != "true" && text != "false") return "true or false";
    o.*std::get<bool Options::*>(flag.member) = text == "true";
  }
  return "";
}
// The value as text that set_flag reads back exactly.
inline std::string flag_text(const Options& o, const Flag& flag) {
  if (auto member = std::get_if<std::string Options::*>(&flag.member)) return o.*(*member);
  if (auto member = std::get_if<size_t Options::*>(&flag.member)) return std::to_string(o.*(*member));
  if (auto member = std::get_if<double Options::*>(&flag.member)) return number_text(o.*(*member));
  return o.*std::get<bool Options::*>(flag.member) ? "true" : "false";
}

// ---- presets -------------------------------------------------------------------------------------------
// A preset is a line of flags without the dashes; flags on the command line override it. On a CPU a step is
// one batch unless --total-batch says otherwise: half a million tokens a step would take hours.
struct Preset {
  const char *name, *flags, *cpu, *gpu;
};
constexpr Preset PRESETS[] = {
    {"tiny",
     "layers 4 width 64 heads 4 ffn 192 block-size 2 context 160 vocab 257 batch 8 steps 2400 lr 3e-3"
     " val-every 200 val-tokens 32000 sample-every 0 sample-tokens 160 checkpoint-every 500 keep 2",
     "", ""},
    {"s",
     "layers 16 width 576 heads 9 ffn 2880 block-size 4 context 1024 vocab 50257 steps 3815 lr 6e-4"
     " val-every 250 val-tokens 1048576 sample-every 1000 sample-tokens 128 checkpoint-every 500 keep 2",
     "batch 1", "batch 32 total-batch 524288"},
    {"m",
     "layers 24 width 832 heads 13 ffn 4160 block-size 6 context 1024 vocab 50257 steps 3815 lr 6e-4"
     " val-every 250 val-tokens 1048576 sample-every 1000 sample-tokens 128 checkpoint-every 500 keep 2",
     "batch 1", "batch 16 total-batch 524288"},
};

inline Options preset_options(const std::string& name, Device device) {
  Options o;
  o.device = device;
  o.preset = name;
  for (const Preset& preset : PRESETS) {
    if (name != preset.name) continue;
    std::istringstream words(preset.flags + std::string(" ") +
                             (device == Device::cpu ? preset.cpu : preset.gpu));
    for (std::string flag, value; words >> flag >> value;) set_flag(o, *find_flag(flag), value);
  }
  return o;
}

// ---- help ----------------------------------------------------------------------------------------------
inline const char* program_name(Device device) {
  return device == Device::cpu ? "train_rdattnres_cpu" : "train_rdattnres";
}

inline void print_help(Device device) {
  const Options defaults = preset_options("tiny", device);
  printf(
      "usage: %s [--flag value]...\n\n"
      "Trains a Transformer with Role-Decoupled Attention Residuals. Without flags: the preset tiny on\n"
      "built-in stories. In brackets the default of a flag, where it is one value.\n\n",
      program_name(device));
  for (const Flag& flag : flag_table()) {
    if (!available(flag, device)) continue;
    const bool settled_later = !strcmp(flag.name, "warmup") || !strcmp(flag.name, "total-batch");
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

// Whether one word becomes the other by changing, putting in or leaving out n letters at most.
inline bool within_letters(const char* a, const char* b, size_t n) {
  while (*a && *a == *b) a++, b++;
  if (*a == *b) return true;  // both have ended
  if (n == 0) return false;
  return (*a && *b && within_letters(a + 1, b + 1, n - 1)) || (*a && within_letters(a + 1, b, n - 1)) ||
         (*b && within_letters(a, b + 1, n - 1));
}
// "; did you mean --batch?" for "bach": the flag one or two letters off, else one described in these words.
inline std::string suggestion(std::string name, Device device) {
  if (name == "help") return "; did you mean --help?";
  std::replace(name.begin(), name.end(), '_', '-');
  std::string words = name;
  std::replace(words.begin(), words.end(), '-', ' ');
  for (size_t letters : {0, 1, 2, 3})
    for (const Flag& flag : flag_table()) {
      const bool near = 2 * letters <= strlen(flag.name) && within_letters(name.c_str(), flag.name, letters);
      const bool described = words.size() > 3 && strstr(flag.help, words.c_str());
      if (available(flag, device) && (letters < 3 ? near : described))
        return std::string("; did you mean --") + flag.name + "?";
    }
  return "";
}

// ---- the parser ----------------------------------------------------------------------------------------
inline void set_or_die(Options& o, const Flag& flag, const std::string& value) {
  const std::string allowed = set_flag(o, flag, value);
  if (!allowed.empty())
    fatal(EXIT_USAGE, "--%s: got '%s', expected %s", flag.name, value.c_str(), allowed.c_str());
  o.given.insert(flag.name);
}

inline Options parse_flags(int argc, char** argv, Device device) {
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    if (word == "--help" || word == "-h") print_help(device), exit(0);
    if (word == "--version") printf("%s %s\n", program_name(device), VERSION), exit(0);
  }
  std::vector<std::pair<const Flag*, std::string>> arguments;  // with their values
  std::set<std::string> seen;
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    if (word.compare(0, 2, "--") != 0) {
      const bool shell_glob = !arguments.empty() && !strcmp(arguments.back().first->value, "GLOB");
      const std::string name = word.substr(std::min(word.size(), word.find_first_not_of('-')));
      fatal(EXIT_USAGE, "'%s': expected --flag value%s", word.c_str(),
            shell_glob ? " (put globs in quotes: the shell must leave them alone)"
                       : suggestion(name, device).c_str());
    }
    const size_t equals = std::min(word.find('='), word.size());
    const std::string name = word.substr(2, equals - 2);
    const Flag* flag = find_flag(name);
    if (!flag)
      fatal(EXIT_USAGE, "--%s: no such flag%s; --help lists them all", name.c_str(),
            suggestion(name, device).c_str());
    if (!available(*flag, device))
      fatal(EXIT_USAGE, "--%s: for the GPU trainer only; this one computes in float32 on the CPU", flag->name);
    if (!seen.insert(name).second) fatal(EXIT_USAGE, "--%s: given twice; expected once", flag->name);
    const bool alone = equals == word.size() && !is_switch(*flag);  // the value is the next word
    if (alone && (i + 1 >= argc || strncmp(argv[i + 1], "--", 2) == 0))
      fatal(EXIT_USAGE, "--%s: value missing; expected --%s %s", flag->name, flag->name, flag->value);
    arguments.push_back({flag, alone ? argv[++i] : equals < word.size() ? word.substr(equals + 1) : "true"});
  }

  Options o;
  for (const auto& [flag, value] : arguments)  // the preset first, wherever it stands: the others override it
    if (!strcmp(flag->name, "preset")) set_or_die(o, *flag, value);
  o = preset_options(o.preset, device);
  for (const auto& [flag, value] : arguments) set_or_die(o, *flag, value);
  for (const char* name : {"train", "val", "test", "tokenizer", "out", "resume", "init-from"}) {
    std::string& path = o.*std::get<std::string Options::*>(find_flag(name)->member);
    if (o.given.count(name) && path.empty())
      fatal(EXIT_USAGE, "--%s: got '', expected %s", name, find_flag(name)->value);
    path = expand_home(path);
  }
  if (!o.resume.empty() && !o.init_from.empty())
    fatal(EXIT_USAGE, "--init-from: cannot be combined with --resume, which has its own weights");
  return o;
}

// ---- resuming ------------------------------------------------------------------------------------------
// The settings that a checkpoint's metadata remembers and the log's config event records, by flag name.
inline std::map<std::string, std::string> saved_options(const Options& o) {
  std::map<std::string, std::string> saved;
  for (const Flag& flag : flag_table())
    if (!(flag.traits & NOW) && available(flag, o.device)) saved[flag.name] = flag_text(o, flag);
  return saved;
}

// Settings not given on the command line become those of the checkpoint: all of them when a run is resumed, the
// model's alone (model_only) when a new run starts from its weights. One that is part of the model and differs
// is wrong use.
inline void adopt_saved(Options& o, const std::map<std::string, std::string>& saved, bool model_only = false) {
  for (const auto& [name, now] : saved_options(o)) {
    const Flag& flag = *find_flag(name);
    const auto found = saved.find(name);
    if (found == saved.end() || (model_only && !(flag.traits & MODEL))) continue;
    const std::string& then = found->second;
    if (!o.given.count(name)) {
      const std::string allowed = set_flag(o, flag, then);
      if (!allowed.empty())
        fatal(EXIT_ERROR, "checkpoint: %s is '%s', expected %s", flag.name, then.c_str(), allowed.c_str());
      o.given.insert(name);
    } else if ((flag.traits & MODEL) && now != then) {
      fatal(EXIT_USAGE, "--%s: got %s, but the checkpoint has %s", flag.name, now.c_str(), then.c_str());
    }
  }
}

// ---- the model asked for -------------------------------------------------------------------------------
// The built-in corpus, where no shards are named.
inline bool uses_stories(const Options& o) { return o.train.empty() && o.val.empty() && o.test.empty(); }

// Whether the tokenizer is the vocabulary's. The built-in one is, but for padding up to a round number.
inline bool has_text(const Options& o, size_t tokenizer_size) {
  return o.vocab >= tokenizer_size && (!o.tokenizer.empty() || o.vocab < tokenizer_size + 128);
}

inline Config model_config(const Options& o) {
  size_t arch = 0;
  while (o.arch != ARCH_NAMES[arch]) arch++;  // set_flag took no other
  return {Arch(arch), o.layers, o.width, o.heads, o.ffn, o.block_size, o.context, o.vocab};
}

// Settles the options that depend on others and checks those that must fit each other. tokenizer_size is the
// number of tokens of the tokenizer in use.
inline Config config_from(Options& o, size_t tokenizer_size) {
  if (!o.given.count("vocab") && !o.tokenizer.empty()) o.vocab = tokenizer_size;
  const size_t one_batch = o.batch * o.context, least = one_batch * ranks.size;  // in tokens
  if (o.total_batch == 0) o.total_batch = least;
  if (!o.given.count("warmup")) o.warmup = o.steps / 50;
  if (o.out.empty()) o.out = format("runs/%s-%s-%zu", o.preset.c_str(), o.arch.c_str(), o.seed);

  if (o.width % (2 * o.heads) != 0)
    fatal(EXIT_USAGE, "--heads: got %zu; expected width / heads, here %zu / %zu, to be an even whole number",
          o.heads, o.width, o.heads);
  if (o.block_size != 1 && o.block_size % 2 != 0)
    fatal(EXIT_USAGE, "--block-size: got %zu, expected an even number of sublayers, or 1", o.block_size);
  if (o.total_batch % least != 0)
    fatal(EXIT_USAGE, "--total-batch: got %zu, expected a multiple of batch * context%s = %zu", o.total_batch,
          ranks.size > 1 ? format(" * %zu ranks", ranks.size).c_str() : "", least);
  // All activations together hold fewer numbers than this, and their bytes must fit in 64 bits.
  const double slots = double(2 * o.layers + 2), width = double(8 * o.width + 4 * o.ffn + 2 * o.layers);
  const double most = double(one_batch) * slots * width;
  if (most > 0x1p59)
    fatal(EXIT_USAGE, "--batch: got %zu; expected activations, about %.0e numbers here, to fit in 64 bits",
          o.batch, most);
  const bool reads_val = !o.val.empty() || !o.test.empty() || o.train.empty();
  if (reads_val && o.val_tokens > 0 && o.val_tokens < o.context)
    fatal(EXIT_USAGE, "--val-tokens: got %zu, expected 0 (the whole split) or at least --context %zu",
          o.val_tokens, o.context);
  if (o.vocab < tokenizer_size && (!o.tokenizer.empty() || (o.train.empty() && o.val.empty())))
    fatal(EXIT_USAGE, "--vocab: got %zu, expected at least the tokenizer's %zu", o.vocab, tokenizer_size);
  if (!o.prompt.empty() && !has_text(o, tokenizer_size))
    fatal(EXIT_USAGE, "--prompt: the vocabulary has %zu tokens, the tokenizer %zu; expected --tokenizer %s",
          o.vocab, tokenizer_size, "with the shards' own");
  if (o.steps > 0 && o.train.empty() && !o.val.empty())
    fatal(EXIT_USAGE, "--train: missing; expected shards to train on beside --val (or --steps 0)");
  if (o.steps > 0 && o.train.empty() && !o.tokenizer.empty())
    fatal(EXIT_USAGE, "--tokenizer: the built-in stories are bytes; expected --train with it (or --steps 0)");
  return model_config(o);
}
