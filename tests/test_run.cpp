// test_run.cpp - whole runs of a trainer, as a user starts them: what must not change the result (threads,
// resuming, stopping, looking), what a checkpoint and a log hold, and how a run refuses.
//
// Argument: the trainer, if it is not ./train_rdattnres_cpu but a CUDA trainer; see test_cuda_run.sh.
#include <csignal>
#include <cstdlib>

#include <sys/wait.h>
#include <unistd.h>

#include "dev/common/checkpoint.h"  // checkpoint_write
#include "dev/common/train.h"       // learning_rate
#include "tests/check.h"
#include "tests/runs.h"

static double first_loss(const std::string& out) {
  const std::vector<std::string> losses = log_field(out, "step", "loss");
  return losses.empty() ? NAN : std::stod(losses[0]);
}

// ---- the tests -----------------------------------------------------------------------------------------

static std::string listing(const std::string& out) {
  return shell("cd " + folder + "/" + out + " && ls | grep -v lock | tr '\\n' ' '").text;
}

// The reference run of this file: 20 steps of 4 windows over 3 shards of 5 + 9 + 3 = 17 windows, so the epoch
// ends within a step, again and again.
static void reference_run() {
  TEST("a run of 20 steps ends with a checkpoint, a log and a lower loss");
  check_ok(train("whole", "--steps 20 --checkpoint-every 10"));
  CHECK_EQ(tensors(checkpoint_of("whole", 20)).size(), 3u * 17u);
  const std::vector<std::string> losses = log_field("whole", "step", "loss");
  if (CHECK_EQ(losses.size(), 20u)) CHECK(std::stod(losses.back()) < 0.8 * std::stod(losses.front()));
  // Step n of the log, counted from 1, trained at step n - 1 of the schedule; the log keeps the tokens seen.
  check_ok(train("warm", "--steps 8 --warmup 3 --min-lr-ratio 0.2"));
  const std::vector<std::string> rates = log_field("warm", "step", "lr"),
                                 seen = log_field("warm", "step", "tokens");
  CHECK_EQ(rates.size(), 8u);
  for (size_t n = 0; n < rates.size(); n++) {
    CHECK_CLOSE(std::stod(rates[n]), learning_rate(n, 8, 3, 0.01, 0.2), 1e-15);
    CHECK_EQ(seen[n], std::to_string((n + 1) * 148));
  }
  CHECK_EQ(Checkpoint::open(checkpoint_of("whole", 20)).metadata["data_position"], "80");  // examples, 4 a step
}

static void threads() {
  TEST("1, 2, 3 and 8 threads: the same losses and parameters, bit for bit");
  for (int n : {1, 3, 2, 8}) {
    if (n == 2 && !on_cpu()) break;  // an emulated run takes seconds
    const std::string out = format("threads%d", n);
    check_ok(train(out, "--steps 20", format("OMP_NUM_THREADS=%d", n)));
    check_same_end(out, "whole", 20);
  }
}

static void resuming() {
  TEST("20 steps = 10 + resume + 10, bit for bit, across shard and epoch edges, with accumulation");
  shell("mkdir " + folder + "/half && cp " + folder + "/whole/log.jsonl " + checkpoint_of("whole", 10) + " " +
        folder + "/half/");
  check_ok(shell(resume("half")));
  check_same_end("half", "whole", 20);
  CHECK(log_field("half", "step", "step") == log_field("whole", "step", "step"));

  TEST("a resumed run can be made longer, but its model cannot be changed");
  check_ok(shell(resume("half", "--steps 21")));
  CHECK_EQ(logged_steps("half"), 21u);
  CHECK_EQ(shell(resume("half", "--width 96")).status, 2);
}

static void stopping() {
  TEST("SIGTERM: the run saves, says how to resume, and resuming gives the same bits");
  Process run(command("stopped", "--steps 30"));
  wait_for_steps(run, "stopped", 5);
  run.signal(SIGTERM);
  check_says(run.wait(), 0, "--resume " + folder + "/stopped");
  CHECK(access(checkpoint_of("stopped", logged_steps("stopped")).c_str(), F_OK) == 0);
  check_ok(shell(resume("stopped")));
  check_ok(train("unstopped", "--steps 30"));
  check_same_end("stopped", "unstopped", 30);
}

static void waiting() {
  TEST("threads that wait for each other sleep, unless the user has a setting of their own");
  const auto sleeps = [](const std::string& setting) {
    const std::string shown =
        shell("unset OMP_WAIT_POLICY; OMP_DISPLAY_ENV=verbose " + setting + " " + TRAINER + " --help").text;
    if (shown.find("OMP") == std::string::npos) SKIP("a build without OpenMP");
    return shown.find("GOMP_SPINCOUNT = '10000'") != std::string::npos ||
           shown.find("KMP_BLOCKTIME='0'") != std::string::npos;
  };
  CHECK(sleeps(""));
  CHECK(!sleeps("GOMP_SPINCOUNT=7 KMP_BLOCKTIME=7"));
  CHECK(!sleeps("OMP_WAIT_POLICY=active"));
}

// ---- no trained work is lost -----------------------------------------------------------------------------

static void going_back() {
  TEST(
      "going back moves the later steps aside with their log, and --keep deletes nothing that was just "
      "written");
  check_ok(train("back", "--steps 8 --checkpoint-every 2"));
  check_says(shell(resume("back/ckpt_00000002.safetensors", "--steps 3 --keep 1")), 0,
             "moved later steps to " + folder + "/back/abandoned-1");
  CHECK_EQ(listing("back"), "abandoned-1 ckpt_00000003.safetensors log.jsonl ");
  CHECK_EQ(listing("back/abandoned-1"),
           "ckpt_00000004.safetensors ckpt_00000006.safetensors "
           "ckpt_00000008.safetensors log.jsonl ");
  CHECK_EQ(logged_steps("back"), 3u);
  CHECK_EQ(logged_steps("back/abandoned-1"), 6u);
  CHECK_EQ(log_field("back/abandoned-1", "done", "step").size(), 1u);

  TEST("resuming into a folder that holds another run moves that aside");
  check_ok(train("other", "--steps 1"));
  check_says(shell(resume("back", "--steps 4 --out " + folder + "/other/")), 0,
             "moved an earlier run to " + folder + "/other/");
  CHECK_EQ(listing("other"), "ckpt_00000004.safetensors earlier-1 log.jsonl ");
  CHECK_EQ(listing("other/earlier-1"), "ckpt_00000001.safetensors log.jsonl ");
}

static void only_looking() {
  TEST(
      "with nothing to train and no --out, nothing is written or moved; a folder will do; --val asks for "
      "validation");
  const std::string before = shell("cd " + folder + "/whole && cat log.jsonl && ls").text;
  const std::string look = "cd " + folder + "; flock -n whole/lock " +
                           std::filesystem::absolute(TRAINER).string() + " --steps 0 --sample-tokens 4 ";
  for (const std::string flag : {"--init-from", "--resume"}) {
    const Result looked = shell(look + flag + " whole");
    check_says(looked, 0, "sample step");
    CHECK(looked.text.find("nats per token") == std::string::npos);
    check_says(shell(look + flag + " whole --val 'val_*.bin'"), 0, "nats per token");
  }
  CHECK_EQ(shell("cd " + folder + "/whole && cat log.jsonl && ls").text, before);
  CHECK(access((folder + "/runs").c_str(), F_OK) != 0);
}

static void any_bytes() {
  TEST("bytes that are not UTF-8 in a prompt and a file's name come back from the checkpoint");
  const std::string bytes =
      "p=$(printf 'a\\377b'); cd " + folder + "; cp train_0.bin \"$p.bin\"; cd - > /dev/null; ";
  check_ok(shell(bytes + command("bytes", "--steps 1 --prompt \"$p\" --train " + folder + "/\"$p\".bin")));
  check_ok(shell(resume("bytes", "--steps 2")));
  Metadata saved = Checkpoint::open(checkpoint_of("bytes", 2)).metadata;
  CHECK_EQ(saved["prompt"], "a\377b");
  CHECK_EQ(saved["train"], folder + "/a\377b.bin");
}

static void changed_data() {
  TEST("data that changed while a run was stopped: what changed is said, and --new-data goes on");
  write_shard("grows_0.bin", 400, 1);
  check_ok(train("changed", "--steps 2 --train '" + folder + "/grows_*.bin'"));
  write_shard("grows_1.bin", 300, 2);
  check_says(shell(resume("changed", "--steps 3")), 1,
             "the shards are not those of the checkpoint (new: grows_1.bin, 300 tokens)");
  write_shard("grows_0.bin", 350, 1);
  check_says(shell(resume("changed", "--steps 3")), 1, "(gone: grows_0.bin, 400 tokens; new: grows_0.bin, 350");
  check_ok(shell(resume("changed", "--steps 3 --new-data")));
  check_ok(shell(resume("changed", "--steps 4")));

  TEST("a bad token anywhere is found before anything is moved or trained");
  write_shard("bad.bin", 3000, 3);
  shell("printf '\\377\\377' | dd of=" + folder + "/bad.bin bs=1 seek=7000 conv=notrunc");
  check_says(train("changed", "--steps 1 --train " + folder + "/bad.bin"), 1,
             "token 2988, at byte 7000, is 65535");
  CHECK(access((folder + "/changed/earlier-1").c_str(), F_OK) != 0);

  TEST("a shard that is cut while the run goes on ends it with a save");
  write_shard("cut.bin", 400, 4);
  Process run(command("cut", "--steps 100000 --train " + folder + "/cut.bin"));
  wait_for_steps(run, "cut", 3);
  CHECK_EQ(truncate((folder + "/cut.bin").c_str(), 1024), 0);
  check_says(run.wait(), 1, "cut.bin: cut short");
  CHECK_EQ(tensors(checkpoint_of("cut", logged_steps("cut"))).size(), 3u * 17u);
}

static void signals() {
  TEST("a pipe that closes ends the run after a save");
  const std::string line = command("piped", "--steps 5000");
  shell("(" + line + "; echo $? > " + folder + "/status) | grep -m 1 -q '^step .* 3/'; sleep 0.1");
  for (int wait = 0; wait < 200 && read_file(folder + "/status").empty(); wait++) usleep(50000);
  CHECK_EQ(read_file(folder + "/status"), "0\n");
  CHECK_EQ(tensors(checkpoint_of("piped", logged_steps("piped"))).size(), 3u * 17u);

  TEST("Ctrl-C answers at once, leaves out the validation and says so");
  write_shard("long.bin", 4000000, 6);
  Process run(command("hasty", "--steps 9 --val-every 1 --val-tokens 0 --val " + folder + "/long.bin"));
  while (log_field("hasty", "config", "parameters").empty() && run.running()) usleep(1000);
  run.signal(SIGINT);
  const Result hasty = run.wait();
  check_says(hasty, 0, "saving after this step; press Ctrl-C again");
  check_says(hasty, 0, "stopped at step 0 of 9, leaving out the validation or sample due there; go on with: ");
  CHECK(log_field("hasty", "val", "loss").empty());
  CHECK_EQ(tensors(checkpoint_of("hasty", 0)).size(), 3u * 17u);

  TEST("a program built for another processor says so");
  Process wrong(command("wrong", "--steps 100000"));
  wait_for_steps(wrong, "wrong", 1);
  wrong.signal(SIGILL);
  check_says(wrong.wait(), 1, "error: this program was built for another processor");
}

static void looking() {
  TEST("validation, samples and checkpoints on the way change nothing");
  check_ok(train("watched",
                 "--steps 20 --val-every 3 --sample-every 4 --sample-tokens 9 --checkpoint-every 7"
                 " --keep 1"));
  check_same_end("watched", "whole", 20);
  CHECK_EQ(log_field("watched", "val", "loss").size(), 8u);     // steps 0, 3, .., 18 and the end
  CHECK_EQ(log_field("watched", "sample", "text").size(), 5u);  // steps 4, 8, .., 20
  CHECK_EQ(listing("watched"), "ckpt_00000020.safetensors log.jsonl ");
  TEST("no sample where no tokenizer turns the vocabulary into text: it says so");
  check_says(train("numbers", "--steps 0 --vocab 999 --sample-tokens 9"), 0,
             "sample step 0: none; a vocabulary of 999 tokens needs --tokenizer");
}

// Every line of a log as "event step".
static std::vector<std::string> log_order(const std::string& out) {
  std::vector<std::string> order;
  std::istringstream log(read_file(folder + "/" + out + "/log.jsonl"));
  for (std::string line; std::getline(log, line);) {
    Json event;
    if (!CHECK_EQ(JsonParser::parse(line, &event), "")) continue;
    const Json* step = event.find("step");
    order.push_back(event.find("event")->text + (step ? " " + step->text : ""));
  }
  return order;
}
static void saving() {
  TEST("log and screen name a checkpoint before the step after it");
  const std::string flags = " --checkpoint-every 2 --val-every 2 --keep 1 --warmup 0 --min-lr-ratio 1";
  const Result result = train("saving", "--steps 4" + flags);
  check_ok(result);
  const std::vector<std::string> expected = {"config", "val 0",    "routes 0",     "step 1", "step 2",
                                             "val 2",  "routes 2", "checkpoint 2", "step 3", "step 4",
                                             "val 4",  "routes 4", "checkpoint 4", "done 4"};
  if (!CHECK(log_order("saving") == expected))
    for (const std::string& event : log_order("saving")) printf("  %s\n", event.c_str());
  size_t at = 0;
  for (const std::string& text :
       {std::string("step 2/4 "), "saved  " + checkpoint_of("saving", 2), std::string("step 3/4 "),
        std::string("step 4/4 "), "saved  " + checkpoint_of("saving", 4), std::string("done ")}) {
    at = result.text.find(text, at);
    if (!CHECK(at != std::string::npos)) printf("  not found, or too early: %s\n", text.c_str());
  }
  CHECK_EQ(listing("saving"), "ckpt_00000004.safetensors log.jsonl ");

  TEST("a checkpoint on the way holds the bits of a run that ends there");
  check_ok(train("ends", "--steps 2 --warmup 0 --min-lr-ratio 1"));
  check_ok(train("goes_on", "--steps 3 --checkpoint-every 1 --warmup 0 --min-lr-ratio 1"));
  CHECK(same_bits(checkpoint_of("goes_on", 2), checkpoint_of("ends", 2)));

  TEST("a checkpoint that cannot be written ends the run before the next step counts; the last one is left");
  shell("mkdir -p " + checkpoint_of("blocked", 4) + ".tmp");
  check_says(train("blocked", "--steps 6" + flags), 1,
             "error: " + checkpoint_of("blocked", 4) + ".tmp: cannot create: Is a directory\n");
  CHECK_EQ(log_order("blocked").back(), "routes 4");
  CHECK_EQ(tensors(checkpoint_of("blocked", 2)).size(), 3u * 17u);
}

static void reloading() {
  TEST("a new process reloads the checkpoint and finds the same validation loss, bit for bit, for any batch");
  const std::vector<std::string> loss = log_field("whole", "val", "loss");
  CHECK_EQ(loss.size(), 1u);
  for (const char* batch : {"1", "2", "5"}) {
    const std::string out = std::string("reload") + batch;
    check_ok(shell(std::string(TRAINER) + " --init-from " + checkpoint_of("whole", 20) + " --val '" + folder +
                   "/val_*.bin' --steps 0 --sample-tokens 0 --val-tokens 400 --batch " + batch + " --out " +
                   folder + "/" + out));
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
  // At zero queries a mix is the residual stream over K <= 3 sources. The norm takes the 1/K out again but for
  // its eps, which then weighs K^2 eps / (2 mean(h^2)) < 1% of logits whose size is 0.1: a thousandth of a nat.
  // Other batches or weights differ by ten times that.
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

// Writes the checkpoint of step 20 with these metadata and values instead of its own.
static void rewrite_whole(const std::string& path, const Metadata& changes,
                          const std::map<std::string, std::vector<float>>& values) {
  const Checkpoint whole = Checkpoint::open(checkpoint_of("whole", 20));
  std::vector<CheckpointTensor> rewritten;
  for (const auto& entry : whole.tensors) {
    const float* from = values.at(entry.first).data();
    rewritten.push_back({entry.first, entry.second.shape, [from](size_t offset, size_t n, float* chunk) {
                           std::copy_n(from + offset, n, chunk);
                         }});
  }
  Metadata metadata = whole.metadata;
  for (const auto& change : changes) metadata[change.first] = change.second;
  checkpoint_write(path, metadata, rewritten);
}

static void refusing() {
  const struct {
    const char *what, *flags, *message;
    int status;
  } cases[] = {
      {"an unknown flag", "--stpes 3", "--stpes", 2},
      {"a shard that is not there", "--val /nowhere/x.bin --steps 1", "/nowhere/x.bin", 1},
      {"a token past the vocabulary", "--steps 1 --vocab 100", "expected less than the vocabulary's 100", 1},
      {"a prompt the tokenizer cannot fit", "--steps 0 --tokenizer /nowhere/t.bin", "/nowhere/t.bin", 1},
      {"a checkpoint that is not one", "--steps 1 --init-from Makefile", "Makefile", 1},
      {"a validation of less than one window", "--steps 1 --val-tokens 36",
       "--val-tokens: got 36, expected 0 (the whole split) or at least", 2},
      {"a folder that cannot be made", "--steps 1 --out /proc/x/y", "/proc/x", 1},
  };
  for (const auto& c : cases) {
    TEST(std::string("refused: ") + c.what);
    check_says(train("refused", c.flags), c.status, c.message);
    CHECK(log_field("refused", "step", "step").empty());
  }

  TEST("a validation of exactly one window, or without a split to validate on, is none of those");
  check_ok(train("one_window", "--steps 0 --val-tokens 37"));
  CHECK(log_field("one_window", "val", "count") == std::vector<std::string>{"37"});
  check_ok(shell(std::string(TRAINER) + " --dry-run --val-tokens 36 --context 37 --train '" + folder +
                 "/train_*.bin'"));

  TEST("a second run in the same folder refuses, and the first is untouched");
  shell("mkdir -p " + folder + "/locked");
  const std::string hold = "flock -n " + folder + "/locked/lock -c '";
  const std::string one_shard = "--steps 1 --train " + folder + "/train_0.bin --val " + folder + "/val_0.bin";
  const Result second = shell(hold + command("locked", one_shard) + "'");
  if (second.status == 127)
    SKIP("no flock program");
  else
    check_says(second, 1, "in use by another run");

  const struct {
    const char *tensor, *blamed;
    float value;
  } poisons[] = {
      {"w_up", "parameter w_up, layer 1", NAN},
      {"wo", "the output of the attention, layer 1", 3e38f},
      {"out_route", "the output route", 3e38f},
      {"final_norm", "what the head reads", 1.5e38f},
  };
  for (const auto& poison : poisons) {
    TEST(std::string("a number that is not finite stops the run and is traced to ") + poison.blamed);
    std::map<std::string, std::vector<float>> values = tensors(checkpoint_of("whole", 20));
    std::vector<float>& bad = values[std::string("model.") + poison.tensor];
    const size_t third = bad.size() / 3;  // the middle one of three layers
    for (size_t i = third; i < third * 2; i++) bad[i] = poison.value;
    rewrite_whole(folder + "/poisoned.safetensors", {}, values);
    const Result stopped = train("diverged", "--steps 5 --init-from " + folder + "/poisoned.safetensors");
    check_says(stopped, 1, std::string("first bad number in ") + poison.blamed);
    check_says(stopped, 1, "step 1:");
    CHECK(listing("diverged").find("safetensors") == std::string::npos);
  }
  TEST("a run that diverges later ends at that step; its last checkpoint is as it was, and can be resumed");
  const std::string saved = checkpoint_of("ruined", 20), untouched = folder + "/untouched";
  shell("cp -r " + folder + "/whole " + folder + "/ruined && cp " + saved + " " + untouched);
  const Result ruined = shell(resume("ruined", "--steps 40 --lr 100 --weight-decay 100"));
  const size_t steps = logged_steps("ruined");
  CHECK(steps > 20);
  check_says(ruined, 1, format("step %zu:", steps + 1));
  CHECK_EQ(shell("cmp " + saved + " " + untouched + "; ls " + folder + "/ruined/*.safetensors | tail -1").text,
           saved + "\n");
  check_ok(shell(resume("ruined", "--steps 21 --lr 0.01 --weight-decay 0.1")));

  TEST("a run that diverges ends after the last step's checkpoint is safe, on the screen and in the log");
  const Result diverged =
      train("diverging", "--steps 40 --init-from " + checkpoint_of("whole", 20) +
                             " --warmup 0 --lr 100 --weight-decay 100 --checkpoint-every 1 --keep 1");
  const size_t last = logged_steps("diverging");
  CHECK(last > 0 && log_order("diverging").back() == format("checkpoint %zu", last));
  check_says(diverged, 1,
             "saved  " + checkpoint_of("diverging", last) + "\n" + format("error: step %zu:", last + 1));
  CHECK_EQ(listing("diverging"), format("ckpt_%08zu.safetensors log.jsonl ", last));
  for (const auto& entry : tensors(checkpoint_of("diverging", last)))
    CHECK(std::all_of(entry.second.begin(), entry.second.end(), [](float x) { return std::isfinite(x); }));

  TEST("--dry-run prints the sizes of a model that no machine holds, and writes nothing");
  const Result dry =
      train("dry", std::string("--dry-run --layers 4096 --ffn 1048576 --vocab 65536 ") +
                       (on_cpu() ? "--width 65536 --heads 1024" : "--width 1024 --heads 16 --block-size 512"));
  check_ok(dry);
  if (on_cpu()) {
    CHECK(dry.text.find("\nwarning     this run asks for ") != std::string::npos);
    CHECK(train("dry", "--dry-run").text.find("\nwarning     ") == std::string::npos);
    const std::string three = shell("export OMP_NUM_THREADS=3; " + command("dry", "--dry-run")).text;
    CHECK(three.find("\nthreads     3\n") != std::string::npos ||
          three.find("\nthreads     1\n") != std::string::npos);
  }
  CHECK(access((folder + "/dry").c_str(), F_OK) != 0);
}

static void large_numbers() {
  for (const size_t step : {size_t(1000000), (size_t(1) << 32) - 1, size_t(500000000000)}) {
    TEST(format("a run resumed at step %zu counts steps, tokens and examples on, and keeps to the schedule",
                step));
    const std::string out = format("at_%zu", step);
    shell("mkdir " + folder + "/" + out);
    rewrite_whole(checkpoint_of(out, step),
                  {{"step", std::to_string(step)},
                   {"tokens", std::to_string(step * 148)},
                   {"data_position", std::to_string(step * 4)}},
                  tensors(checkpoint_of("whole", 20)));
    Process run(resume(out, format("--steps %zu --warmup 1000", step * 2)));
    wait_for_steps(run, out, 3);
    run.signal(SIGTERM);
    check_ok(run.wait());
    const std::vector<std::string> numbers = log_field(out, "step", "step"),
                                   seen = log_field(out, "step", "tokens"),
                                   rates = log_field(out, "step", "lr");
    CHECK(numbers.size() >= 3);
    for (size_t n = 0; n < numbers.size(); n++) {
      CHECK_EQ(numbers[n], std::to_string(step + n + 1));
      CHECK_EQ(seen[n], std::to_string((step + n + 1) * 148));
      CHECK_EQ(std::stod(rates[n]), learning_rate(step + n, step * 2, 1000, 0.01, 0.1));
    }
    const size_t last = step + numbers.size();
    CHECK_EQ(Checkpoint::open(checkpoint_of(out, last)).metadata["data_position"], std::to_string(last * 4));
  }
}

// Kilobytes of the process that are in memory; 0 once it has ended.
static size_t resident(pid_t process) {
  std::ifstream file(format("/proc/%d/status", int(process)));
  for (std::string line; std::getline(file, line);)
    if (line.compare(0, 6, "VmRSS:") == 0) return size_t(atoll(line.c_str() + 6));
  return 0;
}

static void long_run() {
  TEST("memory is flat from step 1,000 to step 10,000, with validation, samples and checkpoints");
#ifdef ADDRESS_SANITIZER
  SKIP("the address sanitizer keeps freed memory; it looks for leaks itself, in all the runs above");
  return;
#endif
  if (access("/proc/self/status", R_OK) != 0) {
    SKIP("no /proc to read a process's memory from");
    return;
  }
  const std::string flags =
      "--layers 1 --width 16 --heads 1 --ffn 16 --context 8 --batch 1 --total-batch 8 --steps 10000"
      " --val-every 500 --val-tokens 64 --sample-every 500 --sample-tokens 8 --checkpoint-every 500";
  Process run("env OMP_NUM_THREADS=1 " + command("long", flags));
  const auto past = [](size_t step) { return access(checkpoint_of("long", step).c_str(), F_OK) == 0; };
  // Writing a checkpoint takes a buffer for a moment: the least of many looks is what is held between.
  size_t early = SIZE_MAX, late = SIZE_MAX;
  while (run.running()) {
    const size_t now = resident(run.id);
    if (now > 0 && past(1000) && !past(2000)) early = std::min(early, now);
    if (now > 0 && past(9000)) late = std::min(late, now);
    usleep(2000);
  }
  check_ok(run.wait());
  printf("  %zu KiB after step 1,000, %zu KiB after step 9,000\n", early, late);
  CHECK(early < SIZE_MAX && late < SIZE_MAX);
  CHECK(late <= early + 128);  // 16 bytes a step would show
}

static void sizes() {
  TEST("log and checkpoint are as large for a hundred times the data");
  std::vector<size_t> lines, bytes;
  for (const size_t tokens : {20000, 2000000}) {
    write_shard("big.bin", tokens, 5);
    check_ok(train("big", "--steps 5 --train " + folder + "/big.bin"));
    const std::string log = read_file(folder + "/big/log.jsonl");
    lines.push_back(size_t(std::count(log.begin(), log.end(), '\n')));
    bytes.push_back(read_file(checkpoint_of("big", 5)).size());
  }
  CHECK_EQ(lines[0], lines[1]);
  CHECK_EQ(bytes[0], bytes[1]);
  CHECK(bytes[0] > 0);
}

// The same checkpoint, the same prompt: the CUDA trainer continues it as the CPU trainer does.
static void sampling_like_the_cpu() {
  TEST("a prompt is continued with the CPU trainer's tokens, the most likely ones and drawn ones");
  check_ok(train("bytes", "--steps 20 --vocab 257"));
  for (const char* temperature : {"0", "1"}) {
    std::vector<std::string> texts[2];
    for (int cpu : {0, 1}) {
      const std::string out = std::string(cpu ? "sample_cpu" : "sample_gpu") + temperature;
      check_ok(shell((cpu ? CPU_TRAINER : std::string(TRAINER) + " --dtype fp32") + " --init-from " +
                     checkpoint_of("bytes", 20) + " --val '" + folder +
                     "/val_*.bin' --val-tokens 37 --steps 0 --prompt 'Once upon' --sample-tokens 60" +
                     " --temperature " + temperature + " --out " + folder + "/" + out));
      texts[cpu] = log_field(out, "sample", "text");
    }
    CHECK(texts[0] == texts[1]);
    CHECK(texts[0].size() == 1 && texts[0][0].compare(0, 9, "Once upon") == 0 && texts[0][0].size() > 9);
  }
}

static void running_out_of_memory() {
  // 65,535 windows in 1,000 layers, or a thousand times the paper's parameters, are more than any card holds.
  const std::string batch = "--batch 65535 --total-batch 2424795 --layers 1000 --block-size 100";
  const struct {
    const char *flags, *message, *hint;
  } cases[] = {
      {"", "stream needs ", "are free; lower --batch, or add --recompute\n"},
      {" --recompute", "stream needs ", "are free; lower --batch\n"},
      {" --width 1024 --heads 16 --ffn 100000", "parameters needs ",
       "are free; lower the sizes of the model\n"},
  };
  TEST("out of memory names the buffer, the bytes and what to lower");
  for (const auto& c : cases) {
    const Result result = train("too_large", "--steps 1 " + batch + c.flags);
    check_says(result, 1, std::string("error: out of GPU memory: ") + c.message);
    check_says(result, 1, c.hint);
    CHECK(access((folder + "/too_large").c_str(), F_OK) != 0);
  }
}

int main(int argc, char** argv) {
  if (argc > 1) TRAINER = argv[1];
  write_shards();
  reference_run();
  threads();
  resuming();
  stopping();
  looking();
  saving();
  refusing();
  going_back();
  changed_data();
  if (on_cpu())  // too many steps for the emulator
    only_looking(), any_bytes(), signals(), waiting(), reloading(), pairing(), large_numbers(), long_run(),
        sizes();
  else
    running_out_of_memory(), sampling_like_the_cpu();
  return finish();
}
