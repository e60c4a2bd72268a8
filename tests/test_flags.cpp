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

static void test_refusals() {
  static const struct {
    std::vector<std::string> words;
    const char* message;
  } cases[] = {
      // not a flag at all
      {{"--bogus", "1"}, "--bogus: no such flag"},
      {{"--"}, "--: no such flag"},
      {{"--Lr", "1"}, "--Lr: no such flag"},
      {{"-lr", "1"}, "'-lr': expected --flag value; did you mean --lr?"},
      {{"shard_1.bin"}, "'shard_1.bin': expected --flag value\n"},
      {{"help"}, "'help': expected --flag value; did you mean --help?"},
      {{"--bach", "1"}, "--bach: no such flag; did you mean --batch?"},
      {{"--val_every", "1"}, "--val_every: no such flag; did you mean --val-every?"},
      {{"--learning-rate", "1"}, "--learning-rate: no such flag; did you mean --lr?"},
      {{"--learning_rate", "1"}, "--learning_rate: no such flag; did you mean --lr?"},
      {{"--recomputed"}, "--recomputed: no such flag; --help lists them all"},  // the GPU's alone
      {{"--train", "a.bin", "b.bin"}, "'b.bin': expected --flag value (put globs in quotes"},
      {{""}, "'': expected --flag value"},
      // no value
      {{"--lr"}, "--lr: value missing; expected --lr X"},
      {{"--lr", "--seed", "1"}, "--lr: value missing"},
      {{"--preset"}, "--preset: value missing; expected --preset tiny|s|m"},
      {{"--train="}, "--train: got '', expected GLOB"},
      {{"--val", ""}, "--val: got '', expected GLOB"},
      {{"--resume", ""}, "--resume: got '', expected PATH"},
      {{"--out", ""}, "--out: got '', expected DIR"},
      {{"--steps="}, "--steps: got '', expected a whole number from 0 to"},
      // given twice
      {{"--seed", "1", "--seed", "1"}, "--seed: given twice"},
      {{"--quiet", "--quiet"}, "--quiet: given twice"},
      // not one of the words allowed
      {{"--preset", "xl"}, "--preset: got 'xl', expected tiny|s|m"},
      {{"--preset", ""}, "--preset: got '', expected tiny|s|m"},
      {{"--preset", "tiny|s"}, "--preset: got 'tiny|s', expected tiny|s|m"},
      {{"--arch", "frozen_v"}, "--arch: got 'frozen_v', expected rd|block|tied|average|frozen-v|residual"},
      {{"--arch", "RD"}, "--arch: got 'RD'"},
      {{"--quiet=yes"}, "--quiet: got 'yes', expected true or false"},
      // not a number of the kind
      {{"--layers", "four"}, "--layers: got 'four', expected a whole number from 1 to 4096"},
      {{"--layers", "4.0"}, "--layers: got '4.0'"},
      {{"--layers", "4x"}, "--layers: got '4x'"},
      {{"--layers", " 4"}, "--layers: got ' 4'"},
      {{"--layers", "+4"}, "--layers: got '+4'"},
      {{"--layers", "0x4"}, "--layers: got '0x4'"},
      {{"--steps", "1e3"}, "--steps: got '1e3'"},
      {{"--lr", "fast"}, "--lr: got 'fast', expected a number from 0 to 100"},
      {{"--lr", "1e-3x"}, "--lr: got '1e-3x'"},
      {{"--lr", "nan"}, "--lr: got 'nan'"},
      {{"--lr", "inf"}, "--lr: got 'inf'"},
      {{"--lr", "1e999"}, "--lr: got '1e999'"},
      {{"--lr", "0x1p3"}, "--lr: got '0x1p3'"},
      {{"--lr", "1,5"}, "--lr: got '1,5'"},
      {{"--lr", "-"}, "--lr: got '-'"},
      // out of range
      {{"--layers", "0"}, "--layers: got '0', expected a whole number from 1 to 4096"},
      {{"--layers", "4097"}, "--layers: got '4097'"},
      {{"--layers", "-1"}, "--layers: got '-1'"},
      {{"--width", "1"}, "--width: got '1', expected a whole number from 2 to 65536"},
      {{"--heads", "0"}, "--heads: got '0'"},
      {{"--ffn", "0"}, "--ffn: got '0'"},
      {{"--block-size", "0"}, "--block-size: got '0', expected a whole number from 1 to 8192"},
      {{"--context", "0"}, "--context: got '0'"},
      {{"--context", "18446744073709551616"}, "--context: got '18446744073709551616'"},
      {{"--vocab", "1"}, "--vocab: got '1', expected a whole number from 2 to 65536"},
      {{"--vocab", "65537"}, "--vocab: got '65537'"},
      {{"--batch", "0"}, "--batch: got '0'"},
      {{"--total-batch", "0"}, "--total-batch: got '0'"},
      {{"--steps", "-5"}, "--steps: got '-5'"},
      {{"--steps", "99999999999999"}, "--steps: got '99999999999999'"},
      {{"--lr", "-0.1"}, "--lr: got '-0.1', expected a number from 0 to 100"},
      {{"--min-lr-ratio", "1.5"}, "--min-lr-ratio: got '1.5', expected a number from 0 to 1"},
      {{"--warmup", "-1"}, "--warmup: got '-1'"},
      {{"--weight-decay", "-1"}, "--weight-decay: got '-1'"},
      {{"--clip", "-1"}, "--clip: got '-1'"},
      {{"--query-lr-mult", "-1"}, "--query-lr-mult: got '-1'"},
      {{"--seed", "-1"}, "--seed: got '-1'"},
      {{"--val-every", "-1"}, "--val-every: got '-1'"},
      {{"--val-tokens", "x"}, "--val-tokens: got 'x'"},
      {{"--sample-every", "-1"}, "--sample-every: got '-1'"},
      {{"--sample-tokens", "9999999"}, "--sample-tokens: got '9999999'"},
      {{"--temperature", "-1"}, "--temperature: got '-1'"},
      {{"--top-k", "65537"}, "--top-k: got '65537'"},
      {{"--top-p", "1.01"}, "--top-p: got '1.01', expected a number from 0 to 1"},
      {{"--checkpoint-every", "1.5"}, "--checkpoint-every: got '1.5'"},
      {{"--keep", "-1"}, "--keep: got '-1'"},
      // GPU only
      {{"--dtype", "bf16"}, "--dtype: for the GPU trainer only"},
      {{"--profile", "5"}, "--profile: for the GPU trainer only"},
      {{"--recompute"}, "--recompute: for the GPU trainer only"},
      // combinations that cannot be
      {{"--width", "128", "--heads", "3"},
       "--heads: got 3; expected width / heads, here 128 / 3, to be an even whole number"},
      {{"--width", "12", "--heads", "4"}, "--heads: got 4; expected width / heads, here 12 / 4"},
      {{"--width", "2", "--heads", "4"}, "--heads: got 4; expected width / heads, here 2 / 4"},
      {{"--block-size", "3"}, "--block-size: got 3, expected an even number of sublayers, or 1"},
      {{"--batch", "8", "--context", "128", "--total-batch", "1000"},
       "--total-batch: got 1000, expected a multiple of batch * context = 1024"},
      {{"--batch", "8", "--context", "128", "--total-batch", "512"},
       "--total-batch: got 512, expected a multiple of batch * context = 1024"},
      {{"--batch", "1048576", "--context", "1048576", "--width", "65536", "--layers", "4096", "--heads", "1"},
       "--batch: got 1048576; expected activations, about 5e+21 numbers here, to fit in 64 bits"},
      {{"--train", "x", "--vocab", "50257", "--prompt", "a"},
       "--prompt: the vocabulary has 50257 tokens, the tokenizer 257; expected --tokenizer"},
      {{"--train", "x", "--vocab", "131", "--prompt", "a"}, "--prompt: the vocabulary has 131 tokens"},
      {{"--vocab", "256"}, "--vocab: got 256, expected at least the tokenizer's 257"},
      {{"--val", "v.bin"}, "--train: missing"},
      {{"--tokenizer", "t.bin"}, "--tokenizer: the built-in stories are bytes"},
      {{"--resume", "a", "--init-from", "b"}, "--init-from: cannot be combined with --resume"},
  };
  for (const auto& c : cases) {
    std::string name = "refused:";
    for (const std::string& word : c.words) name += " " + (word.empty() ? "''" : word);
    TEST(name);
    CHECK(refuses(in_child([&] { parse(c.words); }), 2, c.message));
  }
}

static void test_values() {
  TEST("without flags: the tiny preset, a complete run");
  Options o = parse({});
  CHECK_EQ(o.preset, "tiny");
  CHECK_EQ(o.arch, "rd");
  CHECK_EQ(o.vocab, 257u);
  CHECK_EQ(o.total_batch, o.batch * o.context);
  CHECK_EQ(o.warmup, o.steps / 50);
  CHECK_EQ(o.out, "runs/tiny-rd-1");
  CHECK(o.steps > 0 && o.lr > 0);

  TEST("values: both spellings, first and last of a range, text that looks like a flag");
  o = parse({"--lr=0.5", "--layers", "4096", "--seed", "10000000000000000000", "--prompt=--hello", "--top-p",
             "0", "--quiet", "--dry-run=false", "--clip", ".5e1"});
  CHECK_EQ(o.lr, 0.5);
  CHECK_EQ(o.layers, 4096u);
  CHECK_EQ(o.seed, 10000000000000000000u);
  CHECK_EQ(o.prompt, "--hello");
  CHECK_EQ(o.top_p, 0.0);
  CHECK(o.quiet && !o.dry_run);
  CHECK_EQ(o.clip, 5.0);
  CHECK(o.given.count("lr") == 1 && o.given.count("steps") == 0);

  TEST("an empty prompt is a prompt");
  CHECK_EQ(parse({"--prompt", ""}).prompt, "");

  TEST("a flag overrides the preset, before or after it");
  CHECK_EQ(parse({"--layers", "7", "--preset", "s"}).layers, 7u);
  CHECK_EQ(parse({"--preset", "s", "--layers", "7"}).layers, 7u);
  CHECK_EQ(parse({"--layers", "7", "--preset", "s"}).width, 576u);

  TEST("~ stands for the home folder where the shell leaves it alone");
  setenv("HOME", "/home/me", 1);
  o = parse({"--out=~/runs", "--train", "~/*.bin", "--val", "a/~/b", "--prompt", "~/"});
  CHECK_EQ(o.out, "/home/me/runs");
  CHECK_EQ(o.train, "/home/me/*.bin");
  CHECK_EQ(o.val, "a/~/b");
  CHECK_EQ(o.prompt, "~/");

  TEST("a prompt with the bytes' vocabulary, padded; with a tokenizer's, cut to its size");
  CHECK_EQ(parse({"--train", "x", "--vocab", "384", "--prompt", "a"}).vocab, 384u);
  CHECK_EQ(parse({"--train", "x", "--tokenizer", "t", "--vocab", "50257", "--prompt", "a"}).vocab, 50257u);

  TEST("the name of the run's folder");
  CHECK_EQ(parse({"--preset", "s", "--arch", "frozen-v", "--seed", "9"}).out, "runs/s-frozen-v-9");
  CHECK_EQ(parse({"--out", "here"}).out, "here");

  TEST("warm-up: 2% of the steps, or as given");
  CHECK_EQ(parse({"--steps", "5000"}).warmup, 100u);
  CHECK_EQ(parse({"--steps", "49"}).warmup, 0u);
  CHECK_EQ(parse({"--steps", "5000", "--warmup", "0"}).warmup, 0u);

  TEST("half a million tokens a step on a GPU, one batch on a CPU");
  CHECK_EQ(parse({"--preset", "s"}, Device::gpu).total_batch, 524288u);
  CHECK_EQ(parse({"--preset", "s"}, Device::cpu).total_batch, 1024u);
  CHECK_EQ(parse({"--preset", "s", "--total-batch", "2048"}, Device::cpu).total_batch, 2048u);

  TEST("the vocabulary: the tokenizer's, unless given");
  std::vector<std::string> words = {"--tokenizer", "t", "--train", "x"};
  o = parse(words);
  CHECK_EQ(o.vocab, 257u);
  o = parse({"--preset", "s", "--tokenizer", "t", "--train", "x"});
  CHECK_EQ(o.vocab, 257u);
  o = parse({"--preset", "s", "--tokenizer", "t", "--train", "x", "--vocab", "300"});
  CHECK_EQ(o.vocab, 300u);
  CHECK_EQ(parse({"--preset", "s", "--train", "x"}).vocab, 50257u);

  TEST("GPU flags on a GPU");
  o = parse({"--dtype", "fp32", "--recompute", "--profile", "10"}, Device::gpu);
  CHECK_EQ(o.dtype, "fp32");
  CHECK_EQ(o.profile, 10u);
  CHECK_EQ(saved_options(o).count("profile"), 0u);  // about this call only
  CHECK(refuses(in_child([] {
                  parse({"--profile", "-1"}, Device::gpu);
                }),
                2, "--profile: got '-1', expected a whole number from 0"));
  CHECK(o.recompute);
}

static void test_presets() {
  TEST("presets: the sizes of the design, and their parameter counts");
  Options o = parse({"--preset", "s"});
  Config c = config_from(o, 257);
  CHECK(c.L == 16 && c.C == 576 && c.NH == 9 && c.F == 2880 && c.S == 4 && c.V == 50257 && c.HS() == 64);
  // Counted by hand: V C + L (4 C^2 + 3 C F) + norms (2 L + 1) C + routes (5 L + 2) C
  const auto by_hand = [&] { return c.V * c.C + c.L * (4 * c.C * c.C + 3 * c.C * c.F) + (7 * c.L + 3) * c.C; };
  printf("     s with 50,257 tokens: %zu parameters\n", count_params(c).total);
  CHECK_EQ(count_params(c).total, by_hand());
  CHECK_EQ(human_count(double(count_params(c).total)), "129.9M");
  c.V = 32768;
  printf("     s with 32,768 tokens: %zu parameters\n", count_params(c).total);
  CHECK_EQ(count_params(c).total, by_hand());
  CHECK_EQ(human_count(double(count_params(c).total)), "119.8M");
  const size_t routes = count_params(c).routes;
  c.arch = Arch::block;
  CHECK_EQ(routes - count_params(c).routes, 9216u);
  o = parse({"--preset", "m", "--vocab", "32768"});
  c = config_from(o, 257);
  CHECK(c.L == 24 && c.C == 832 && c.NH == 13 && c.F == 4160 && c.S == 6 && c.HS() == 64);
  printf("     m with 32,768 tokens: %zu parameters\n", count_params(c).total);
  CHECK_EQ(count_params(c).total, by_hand());
  c.arch = Arch::block;
  CHECK_EQ(human_count(double(count_params(c).total)), "343.0M");

  TEST("arch: every name leads to its arm");
  for (int i = 0; i < NUM_ARCHS; i++) {
    o = parse({"--arch", ARCH_NAMES[i]});
    CHECK(config_from(o, 257).arch == Arch(i));
  }
}

static void test_table() {
  TEST("the table: every value survives being written as text and read again");
  Options o = parse({"--lr", "0.1", "--clip", "0.30000000000000004", "--seed", "9007199254740993"});
  for (const Flag& flag : flag_table()) {
    Options copy = o;
    const std::string text = flag_text(o, flag);
    if (!CHECK_EQ(set_flag(copy, flag, text), "")) printf("     %s %s\n", flag.name, text.c_str());
    CHECK_EQ(flag_text(copy, flag), text);
  }
  CHECK_EQ(flag_text(o, *find_flag("clip")), "0.30000000000000004");
  CHECK_EQ(flag_text(o, *find_flag("lr")), "0.1");

  TEST("--help: every flag on a GPU, all but the GPU's on a CPU, exit status 0");
  for (Device device : {Device::cpu, Device::gpu}) {
    const Outcome help = in_child([&] { parse({"--seed", "1", "--help"}, device); });
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
    o = parse({"--preset", preset.name});
    std::istringstream words(preset.flags + std::string(" ") + preset.cpu);
    for (std::string name, value; words >> name >> value;) {
      Options said = o;
      set_flag(said, *find_flag(name), value);
      CHECK_EQ(flag_text(o, *find_flag(name)), flag_text(said, *find_flag(name)));
    }
  }
}

static void test_resume() {
  TEST("resuming: what was not given comes from the checkpoint");
  const Options first = parse({"--layers", "3", "--lr", "0.25", "--steps", "500", "--seed", "7", "--train", "x",
                               "--batch", "4", "--quiet", "--arch", "tied"});
  const std::map<std::string, std::string> saved = saved_options(first);
  Options again = parse({"--resume", "r", "--steps", "900"});
  adopt_saved(again, saved);
  config_from(again, 257);
  CHECK_EQ(again.layers, 3u);
  CHECK_EQ(again.arch, "tied");
  CHECK_EQ(again.lr, 0.25);
  CHECK_EQ(again.seed, 7u);
  CHECK_EQ(again.train, "x");
  CHECK_EQ(again.batch, 4u);
  CHECK_EQ(again.total_batch, first.total_batch);
  CHECK_EQ(again.warmup, 10u);  // of the first run: the schedule must not jump
  CHECK_EQ(again.steps, 900u);  // given now
  CHECK(!again.quiet);          // about the first call only
  CHECK_EQ(saved.count("resume") + saved.count("out") + saved.count("quiet") + saved.count("dtype"), 0u);

  const auto resume = [&](std::vector<std::string> words, const std::string& name, const std::string& value) {
    return in_child([=] {
      Options o = parse(words);
      auto altered = saved;
      if (!name.empty()) altered[name] = value;
      adopt_saved(o, altered);
      config_from(o, 257);
    });
  };
  TEST("resuming with another model is refused, with the same one it is not");
  CHECK(refuses(resume({"--layers", "4"}, "", ""), 2, "--layers: got 4, but the checkpoint has 3"));
  CHECK(refuses(resume({"--arch", "rd"}, "", ""), 2, "--arch: got rd, but the checkpoint has tied"));
  CHECK(refuses(resume({"--preset", "s"}, "", ""), 2, "--preset: got s, but the checkpoint has tiny"));
  CHECK_EQ(resume({"--layers", "3", "--preset", "tiny"}, "", "").status, 0);

  TEST("a new run from given weights takes over the model alone");
  Options fresh = parse({});
  adopt_saved(fresh, saved, true);
  CHECK_EQ(fresh.layers, 3u);
  CHECK_EQ(fresh.arch, "tied");
  CHECK_EQ(fresh.lr, parse({}).lr);
  CHECK_EQ(fresh.steps, parse({}).steps);

  TEST("a checkpoint that holds nonsense is refused");
  CHECK(refuses(resume({}, "layers", "0"), 1, "checkpoint: layers is '0', expected a whole number from 1 to"));
  CHECK(refuses(resume({}, "lr", "x"), 1, "checkpoint: lr is 'x', expected a number"));
}

int main() {
  test_values();
  test_presets();
  test_table();
  test_resume();
  test_refusals();
  return finish();
}
