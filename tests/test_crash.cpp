// test_crash.cpp - whole runs that are killed, stopped twice, or lose their disk: the previous checkpoint
// always loads, going on from it gives the bits of a run that was left alone, and nothing fails in silence.
//
// Argument: the trainer, if it is not ./train_rdattnres_cpu but a CUDA trainer; see test_cuda_crash.sh.
// CRASH_KILLS=50 in the environment: so many kills instead of 10, or of 6 of a CUDA trainer.
#include <chrono>
#include <csignal>

#ifdef __linux__
#include <sched.h>
#include <sys/mount.h>
#endif

#include "dev/common/run.h"  // list_checkpoints
#include "tests/check.h"
#include "tests/runs.h"

static const std::string EVERY_STEP = " --checkpoint-every 1 --keep 1";

static std::vector<size_t> checkpoint_steps(const std::string& out) {
  return is_folder(folder + "/" + out) ? list_checkpoints(folder + "/" + out) : std::vector<size_t>();
}
static size_t newest_checkpoint(const std::string& out) {  // its step; 0: there is none
  const std::vector<size_t> steps = checkpoint_steps(out);
  return steps.empty() ? 0 : steps.back();
}
// How many checkpoints a run has left. Every one must be whole.
static size_t whole_checkpoints(const std::string& out) {
  for (size_t step : checkpoint_steps(out)) {
    Checkpoint checkpoint;
    CHECK_EQ(checkpoint.try_open(checkpoint_of(out, step)), "");
  }
  return checkpoint_steps(out).size();
}
static bool half_written(const std::string& out) {
  if (!is_folder(folder + "/" + out)) return false;
  for (const auto& entry : std::filesystem::directory_iterator(folder + "/" + out))
    if (entry.path().extension() == ".tmp") return true;
  return false;
}

// How long the trainer takes here: from its start to its first step, and a step. A kill is aimed by them.
static double start_seconds, step_seconds;

// The run that everything is compared with.
static void reference(size_t steps) {
  TEST("the run that is left alone");
  const double before = seconds_now();
  check_ok(train("whole", format("--steps %zu --checkpoint-every 3", steps)));
  const double all = seconds_now() - before;
  const std::vector<std::string> in_steps = log_field("whole", "done", "seconds");
  if (!CHECK_EQ(in_steps.size(), 1u)) return;
  step_seconds = std::stod(in_steps[0]) / double(steps), start_seconds = all - std::stod(in_steps[0]);
  printf("  starts in %.3f s, %.4f s a step\n", start_seconds, step_seconds);
}

// ---- kill -9 ---------------------------------------------------------------------------------------------

static void killed(size_t steps, size_t kills) {
  TEST(format("kill -9 at %zu random moments, a checkpoint every step, --keep 1: the same bits at the end",
              kills));
  size_t during_writing = 0, newest = 0, lives = 0, restarts = 0;
  // So many lives, and more until one of them has ended while it wrote.
  for (; lives < kills || (during_writing == 0 && lives < 10 * kills); lives++) {
    // A run that has no checkpoint yet starts anew; one that has must be able to go on.
    const std::string line =
        newest == 0 ? command("killed", format("--steps %zu", steps) + EVERY_STEP) : resume("killed");
    Process run(line);
    // Kill it at any moment of some steps after its second, or while it starts and reads its checkpoint, or as
    // soon as a checkpoint is being written.
    enum { TRAINS, STARTS, WRITES };
    const size_t moment = lives % 3;
    const auto waiting = [&] {
      if (moment == WRITES) return !half_written("killed");
      return moment == TRAINS && newest_checkpoint("killed") < newest + 2;
    };
    while (run.running() && waiting()) continue;
    const double most = moment == STARTS ? start_seconds : 4 * step_seconds;
    const double seconds = most * uniform(7, STREAM_TEST, lives);
    if (moment != WRITES) usleep(useconds_t(1e6 * seconds));
    run.signal(SIGKILL);
    const Result result = run.wait();
    if (result.status == 0 && restarts++ < 5) {  // the kill came late, the run was at its end: another begins
      std::filesystem::remove_all(folder + "/killed");
      newest = 0;
      continue;
    }
    check_says(result, 128 + SIGKILL, "");
    if (result.status != 128 + SIGKILL) return;
    const size_t left = whole_checkpoints("killed");
    during_writing += half_written("killed");
    CHECK(newest == 0 || left > 0);
    CHECK(newest_checkpoint("killed") >= newest);
    newest = newest_checkpoint("killed");
  }
  printf("  %zu of %zu kills left a file half written; the last came after step %zu of %zu\n", during_writing,
         kills, newest, steps);
  CHECK(newest > 0 && newest < steps && during_writing > 0);
  check_ok(shell(resume("killed")));
  check_same_end("killed", "whole", steps);
  CHECK_EQ(whole_checkpoints("killed"), 1u);
  CHECK(!half_written("killed"));
}

// ---- disks -----------------------------------------------------------------------------------------------

// Needs root. In a namespace of this test's own, so that nothing stays mounted however the test ends.
static bool mount_at(const std::string& place, const std::string& options) {
#ifdef __linux__
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
#endif
  std::filesystem::create_directory(place);
  return system(("mount -t tmpfs -o " + options + " tmpfs " + place + " 2>/dev/null").c_str()) == 0;
}

// The run stopped with one line that names the file, at a step > 0; its last checkpoint is whole and, once
// there is room again, the run goes on to the same bits.
static void goes_on(const std::string& out, size_t steps, const Result& stopped, const std::string& message) {
  check_says(stopped, 1, message);
  CHECK_EQ(whole_checkpoints(out), 1u);
  CHECK(!half_written(out));
  check_ok(shell(resume(out)));
  check_same_end(out, "whole", steps);
}

static void disk_full(size_t steps) {
  const size_t bytes = read_file(checkpoint_of("whole", steps)).size();
  const std::string flags = format("--steps %zu", steps) + EVERY_STEP;

  TEST("a disk that fills up: the run ends with a message, its last checkpoint is whole, and it can go on");
  if (!mount_at(folder + "/small",
                format("size=%zu", bytes * 3 / 2))) {  // room for one checkpoint, not for two
    SKIP("cannot mount a tmpfs here");
  } else {
    const Result stopped = train("small", flags);
    CHECK_EQ(system(("mount -o remount,size=64m " + folder + "/small").c_str()), 0);
    goes_on("small", steps, stopped, "small/ckpt_00000002.safetensors: cannot write: No space left on device");
    TEST("a disk that can only be read: refused at the start, nothing changed");
    CHECK_EQ(system(("mount -o remount,ro " + folder + "/small").c_str()), 0);
    const Result refused = shell(resume("small", format("--steps %zu", steps + 1)));
    check_says(refused, 1, "cannot open: Read-only file system");
    CHECK_EQ(whole_checkpoints("small"), 1u);
    CHECK_EQ(system(("umount " + folder + "/small").c_str()), 0);
  }

  TEST("a file that may not grow to the size of a checkpoint: a message, not the death by a signal");
  shell("cd " + folder + "; mkdir limited; cp whole/log.jsonl whole/ckpt_00000003.safetensors limited");
  const Result stopped = shell(format("ulimit -f %zu; ", bytes / 2048) + resume("limited"));
  goes_on("limited", steps, stopped, "limited/ckpt_00000006.safetensors: cannot write: File too large");
}

static void folder_lost() {
  TEST("a folder that vanishes during the run: the next checkpoint ends it with a message");
  Process run(command("lost", "--steps 100000" + EVERY_STEP));
  while (run.running() && newest_checkpoint("lost") < 3) usleep(500);
  std::filesystem::rename(folder + "/lost", folder + "/moved");
  const Result lost = run.wait();
  check_says(lost, 1, "error: " + folder + "/lost");
  check_says(lost, 1, "No such file or directory");
  CHECK(!is_folder(folder + "/lost") && whole_checkpoints("moved") > 0);
}

// ---- two runs, two signals -------------------------------------------------------------------------------

static void second_run() {
  TEST("a second run in the folder of a running one is refused; the first goes on undisturbed");
  Process first(command("shared", "--steps 1000000" + EVERY_STEP));
  while (first.running() && newest_checkpoint("shared") < 1) usleep(500);
  for (const std::string& second : {command("shared", "--steps 60"), resume("shared")})
    check_says(shell(second), 1, format("in use by another run (process %d)", int(first.id)));
  const size_t before = logged_steps("shared");
  wait_for_steps(first, "shared", before + 5);
  first.signal(SIGTERM);
  check_ok(first.wait());
  const std::vector<std::string> steps = log_field("shared", "step", "step");
  CHECK(steps.size() >= before + 5);
  for (size_t n = 0; n < steps.size(); n++) CHECK_EQ(steps[n], std::to_string(n + 1));
}

static void second_signal() {
  TEST("a second Ctrl-C ends the run at once, in the middle of a step, with status 130; the folder is whole");
  // One step of 148,000 tokens: it lasts long enough for both signals to fall into it.
  check_ok(train("twice", "--steps 1" + EVERY_STEP));
  Process run(resume("twice", "--steps 3 --total-batch 148000"));
  while (run.running() && log_field("twice", "config", "parameters").size() < 2) usleep(500);
  usleep(50000);  // from the start of the log into the step
  run.signal(SIGINT);
  usleep(20000);
  CHECK(run.running());
  const double before = seconds_now();
  run.signal(SIGINT);
  CHECK_EQ(run.wait().status, 130);
  const double seconds = seconds_now() - before;
  printf("  ended %.4f s after the second signal\n", seconds);
  CHECK(seconds < 2);  // the step would take longer
  CHECK(whole_checkpoints("twice") == 1 && newest_checkpoint("twice") == 1 && !half_written("twice"));
}

int main(int argc, char** argv) {
  if (argc > 1) TRAINER = argv[1];
  // The model of runs.h is slow in the emulator, and a kill needs no large one.
  if (!on_cpu())
    small_model =
        "--layers 2 --width 16 --heads 1 --ffn 16 --context 8 --vocab 131 --batch 1 --total-batch 16"
        " --val-tokens 16";
  const char* wanted = getenv("CRASH_KILLS");
  const size_t kills = wanted ? size_t(atoll(wanted)) : on_cpu() ? 10 : 6;
  write_shards();
  const size_t steps = on_cpu() ? 60 + 10 * kills : 12 + 4 * kills;
  reference(steps);
  killed(steps, kills);
  disk_full(steps);
  folder_lost();
  second_run();
  second_signal();
  return finish();
}
