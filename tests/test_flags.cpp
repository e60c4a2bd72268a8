// test_flags.cpp - the command line: what is understood, what is refused and in which words.
#include "dev/common/flags.h"
#include "tests/check.h"
#include "tests/child.h"

// Parses as the trainers do. For refusals call it in a child.
static Options parse(std::vector<std::string> words, Device device = Device::cpu) {
  std::vector<char*> argv = {const_cast<char*>("trainer")};
  for (std::string& word : words) argv.push_back(&word[0]);
  Options o = parse_flags(int(argv.size()), argv.data(), device);
  config_from(o, 257);
  return o;
}
static Options parse(const std::string& line, Device device = Device::cpu) {
  std::vector<std::string> words;
  std::istringstream stream(line);
  for (std::string word; std::getline(stream, word, ' ');) words.push_back(word);
  return parse(words, device);
}

// Every "flag value" of the list is what the options hold.
static void holds(const Options& o, const std::string& list) {
  std::istringstream words(list);
  for (std::string name, value; words >> name >> value;)
    if (!CHECK_EQ(flag_text(o, *find_flag(name)), value)) printf("     --%s\n", name.c_str());
}

static void test_refusals() {
  static const struct {
    const char *line, *message;
  } cases[] = {
      {"--bogus 1", "--bogus: no such flag"},
      {"-lr 1", "'-lr': expected --flag value; did you mean --lr?"},
      {"shard_1.bin", "'shard_1.bin': expected --flag value\n"},
      {"help", "'help': expected --flag value; did you mean --help?"},
      {"--bach 1", "--bach: no such flag; did you mean --batch?"},
      {"--val_every 1", "--val_every: no such flag; did you mean --val-every?"},
      {"--learning_rate 1", "--learning_rate: no such flag; did you mean --lr?"},
      {"--recomputed", "--recomputed: no such flag; --help lists them all"},  // the GPU's alone
      {"--train a.bin b.bin", "'b.bin': expected --flag value (put globs in quotes"},
      {" ", "'': expected --flag value"},
      {"--lr", "--lr: value missing; expected --lr X"},
      {"--train=", "--train: got '', expected GLOB"},
      {"--seed 1 --seed 1", "--seed: given twice"},
      {"--quiet=yes", "--quiet: got 'yes', expected true or false"},
      {"--dtype bf16", "--dtype: for the GPU trainer only"},
      {"--recompute", "--recompute: for the GPU trainer only"},
      // combinations that cannot be
      {"--width 128 --heads 3",
       "--heads: got 3; expected width / heads, here 128 / 3, to be an even whole number"},
      {"--width 2 --heads 4", "--heads: got 4; expected width / heads, here 2 / 4"},
      {"--block-size 3", "--block-size: got 3, expected an even number of sublayers, or 1"},
      {"--batch 8 --context 128 --total-batch 1000", "got 1000, expected a multiple of batch * context = 1024"},
      {"--batch 8 --context 128 --total-batch 512", "got 512, expected a multiple of batch * context = 1024"},
      {"--batch 1048576 --context 1048576 --width 65536 --layers 4096 --heads 1",
       "--batch: got 1048576; expected activations, about 5e+21 numbers here, to fit in 64 bits"},
      {"--train x --vocab 50257 --prompt a",
       "--prompt: the vocabulary has 50257 tokens, the tokenizer 257; expected --tokenizer"},
      {"--vocab 256", "--vocab: got 256, expected at least the tokenizer's 257"},
      {"--val v.bin", "--train: missing"},
      {"--tokenizer t.bin", "--tokenizer: the built-in stories are bytes"},
      {"--resume a --init-from b", "--init-from: cannot be combined with --resume"},
  };
  for (const auto& c : cases) {
    TEST(std::string("refused: ") + c.line);
    CHECK(refuses(in_child([&] { parse(c.line); }), 2, c.message));
  }

  static const struct {
    const char *flag, *expected;
    std::vector<std::string> values;
  } ranges[] = {
      {"preset", "tiny|s|m", {"xl", "", "tiny|s"}},
      {"arch", "rd|block|tied|average|frozen-v|residual", {"frozen_v", "RD"}},
      {"layers", "a whole number from 1 to 4096", {"", "x", "4.0", "4x", " 4", "+4", "0x4", "0", "4097", "-1"}},
      {"context", "a whole number from 1 to", {"0", "18446744073709551616"}},
      {"vocab", "a whole number from 2 to 65536", {"1", "65537"}},
      {"steps", "a whole number from 0 to", {"-5", "99999999999999", "1e3"}},
      {"lr", "a number from 0 to 100", {"x", "1e-3x", "nan", "inf", "1e999", "0x1p3", "1,5", "-", "-0.1"}},
      {"top-p", "a number from 0 to 1", {"1.01"}},
  };
  for (const auto& range : ranges)
    for (const std::string& value : range.values) {
      TEST(format("refused: --%s '%s'", range.flag, value.c_str()));
      const std::string message =
          format("--%s: got '%s', expected %s", range.flag, value.c_str(), range.expected);
      CHECK(refuses(in_child([&] { parse({std::string("--") + range.flag, value}); }), 2, message));
    }
}

static void test_values() {
  static const struct {
    const char *line, *values;
    Device device = Device::cpu;
  } cases[] = {
      {"", "preset tiny arch rd vocab 257 out runs/tiny-rd-1"},
      // both spellings, the first and the last of a range, text that looks like a flag
      {"--lr=0.5 --layers 4096 --seed 10000000000000000000", "lr 0.5 layers 4096 seed 10000000000000000000"},
      {"--prompt=--hello --top-p 0 --clip .5e1", "prompt --hello top-p 0 clip 5"},
      {"--quiet --dry-run=false", "quiet true dry-run false"},
      // a flag overrides the preset, before or after it
      {"--layers 7 --preset s", "layers 7 width 576"},
      {"--preset s --layers 7", "layers 7 width 576"},
      {"--preset s --arch frozen-v --seed 9", "out runs/s-frozen-v-9"},
      {"--out here", "out here"},
      // the home folder, where the shell leaves ~ alone
      {"--out=~/runs --train ~/*.bin --val a/~/b --prompt ~/",
       "out /home/me/runs train /home/me/*.bin val a/~/b prompt ~/"},
      // 2% of the steps are warm-up, or as given
      {"--steps 5000", "warmup 100"},
      {"--steps 49", "warmup 0"},
      {"--steps 5000 --warmup 0", "warmup 0"},
      // half a million tokens a step on a GPU, one batch on a CPU
      {"--preset s", "total-batch 524288", Device::gpu},
      {"--preset s", "total-batch 1024"},
      {"--preset s --total-batch 2048", "total-batch 2048"},
      // the tokenizer's vocabulary, unless given; a prompt with the bytes' vocabulary, padded
      {"--tokenizer t --train x", "vocab 257"},
      {"--preset s --tokenizer t --train x", "vocab 257"},
      {"--preset s --tokenizer t --train x --vocab 300", "vocab 300"},
      {"--preset s --train x", "vocab 50257"},
      {"--train x --vocab 384 --prompt a", "vocab 384"},
      {"--train x --tokenizer t --vocab 50257 --prompt a", "vocab 50257"},
      {"--dtype fp32 --recompute --profile 10", "dtype fp32 recompute true profile 10", Device::gpu},
  };
  setenv("HOME", "/home/me", 1);
  for (const auto& c : cases) {
    TEST(std::string("understood: ") + c.line);
    holds(parse(c.line, c.device), c.values);
  }

  TEST("an empty prompt is a prompt; what was given is known");
  const Options o = parse("--prompt=");
  CHECK_EQ(o.prompt, "");
  CHECK(o.given.count("prompt") == 1 && o.given.count("steps") == 0);
  CHECK_EQ(o.total_batch, o.batch * o.context);
}

static void test_presets() {
  TEST("presets: the sizes of the design, and their parameter counts");
  static const struct {
    const char *line, *sizes, *parameters;
  } cases[] = {
      {"--preset s", "layers 16 width 576 heads 9 ffn 2880 block-size 4 vocab 50257", "129.9M"},
      {"--preset s --vocab 32768", "vocab 32768", "119.8M"},
      {"--preset m --vocab 32768 --arch block", "layers 24 width 832 heads 13 ffn 4160 block-size 6", "343.0M"},
  };
  for (const auto& preset : cases) {
    const Options o = parse(preset.line);
    holds(o, preset.sizes);
    CHECK_EQ(human_count(double(count_params(model_config(o)).total)), preset.parameters);
  }

  TEST("depth routes cost s 9,216 parameters");
  const auto routes = [](const char* line) { return count_params(model_config(parse(line))).routes; };
  CHECK_EQ(routes("--preset s") - routes("--preset s --arch block"), 9216u);

  TEST("arch: every name leads to its arm");
  for (int i = 0; i < NUM_ARCHS; i++)
    CHECK(model_config(parse(std::string("--arch ") + ARCH_NAMES[i])).arch == Arch(i));
}

static void test_table() {
  TEST("the table: every value survives being written as text and read again");
  const Options o = parse("--lr 0.1 --clip 0.30000000000000004 --seed 9007199254740993");
  for (const Flag& flag : flag_table()) {
    Options copy = o;
    const std::string text = flag_text(o, flag);
    if (!CHECK_EQ(set_flag(copy, flag, text), "")) printf("     %s %s\n", flag.name, text.c_str());
    CHECK_EQ(flag_text(copy, flag), text);
  }
  holds(o, "clip 0.30000000000000004 lr 0.1");

  TEST("--help: every flag on a GPU, all but the GPU's on a CPU, exit status 0");
  for (Device device : {Device::cpu, Device::gpu}) {
    const Outcome help = in_child([&] { parse("--seed 1 --help", device); });
    CHECK_EQ(help.status, 0);
    CHECK_EQ(help.err, "");
    for (const Flag& flag : flag_table()) {
      const bool shown = help.out.find(std::string("--") + flag.name + " ") != std::string::npos;
      if (!CHECK_EQ(shown, available(flag, device))) printf("     --%s\n", flag.name);
    }
    for (const Preset& preset : PRESETS) CHECK(help.out.find(preset.flags) != std::string::npos);
  }

  TEST("a preset runs what --help says of it");
  for (const Preset& preset : PRESETS) {
    const Options o = parse(std::string("--preset ") + preset.name);
    std::istringstream words(preset.flags + std::string(" ") + preset.cpu);
    for (std::string name, value; words >> name >> value;) {
      Options said;
      set_flag(said, *find_flag(name), value);
      CHECK_EQ(flag_text(o, *find_flag(name)), flag_text(said, *find_flag(name)));
    }
  }
}

static void test_resume() {
  TEST("resuming: what was not given comes from the checkpoint");
  const Options first =
      parse("--layers 3 --lr 0.25 --steps 500 --seed 7 --train x --batch 4 --quiet --arch tied");
  const auto saved = saved_options(first);
  Options again = parse("--resume r --steps 900");
  adopt_saved(again, saved);
  config_from(again, 257);
  // The warm-up is the first run's, for the schedule must not jump; --quiet was about that call only.
  holds(again, "layers 3 arch tied lr 0.25 seed 7 train x batch 4 warmup 10 steps 900 quiet false");
  CHECK_EQ(again.total_batch, first.total_batch);
  for (const char* name : {"resume", "out", "quiet", "dtype", "profile"}) CHECK_EQ(saved.count(name), 0u);

  static const struct {
    const char *line, *name, *value;  // a value that the checkpoint holds instead
    int status;
    const char* message;
  } cases[] = {
      {"--layers 4", "arch", "tied", 2, "--layers: got 4, but the checkpoint has 3"},
      {"--arch rd", "arch", "tied", 2, "--arch: got rd, but the checkpoint has tied"},
      {"--preset s", "arch", "tied", 2, "--preset: got s, but the checkpoint has tiny"},
      {"", "layers", "0", 1, "checkpoint: layers is '0', expected a whole number from 1 to"},
      {"", "lr", "x", 1, "checkpoint: lr is 'x', expected a number"},
  };
  const auto resume = [&](const std::string& line, const std::string& name, const std::string& value) {
    return in_child([&] {
      Options o = parse(line);
      auto altered = saved;
      altered[name] = value;
      adopt_saved(o, altered);
      config_from(o, 257);
    });
  };
  TEST("resuming with another model or from nonsense is refused, with the same model it is not");
  for (const auto& c : cases) CHECK(refuses(resume(c.line, c.name, c.value), c.status, c.message));
  CHECK_EQ(resume("--layers 3 --preset tiny", "arch", "tied").status, 0);

  TEST("a new run from given weights takes over the model alone");
  Options fresh = parse("--lr 0.125");
  adopt_saved(fresh, saved, true);
  holds(fresh, "layers 3 arch tied lr 0.125 steps " + std::to_string(parse("").steps));
}

int main() {
  test_values();
  test_presets();
  test_table();
  test_resume();
  test_refusals();
  return finish();
}
