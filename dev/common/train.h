// train.h - what both trainers do around the model: how a run starts, what it reports and saves, how it stops.
//
// A model offers, in its own namespace:
//   token_losses(model, tokens, targets, B, T)   the loss of every token, (B,T), in nats
//   next_token_logits(model, context, logits)    logits (V) of the token that follows the context
//   add_route_stats(stats, model, BT)            adds the last forward's attention routes to the sums
//   model_save(model, path, metadata)
#pragma once
#include <atomic>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <initializer_list>

#include <unistd.h>

#include "dev/common/ranks.h"      // ranks, gather, agree: many processes
#include "dev/common/report.h"     // RouteStats, StepReport, lines and events
#include "dev/common/run.h"        // checkpoints by name, move_aside
#include "dev/common/tokenizer.h"  // Tokenizer

// ---- the learning rate ---------------------------------------------------------------------------------
// Linear warm-up, then half a cosine down to a fraction of the peak.
//
//        lr |    /--.                     step s (from 0) of the warm-up trains at lr (s + 1) / warmup, so the
//           |   /    '-.                  first step already moves; its last step trains at lr, and the last
//   min lr |  /         '--.______        step of the run at min_ratio * lr. A step past the end stays there.
//           +--|------------|-----> step
inline double learning_rate(size_t step, size_t steps, size_t warmup, double lr, double min_ratio) {
  if (step < warmup) return lr * double(step + 1) / double(warmup);
  const size_t peak = warmup > 0 ? warmup - 1 : 0;  // the step that trains at lr
  if (step == peak) return lr;                      // no warm-up: the first step, also of a run of one step
  if (step >= steps || step + 1 == steps) return lr * min_ratio;
  const double progress = double(step - peak) / double(steps - 1 - peak);  // 0 at the peak, 1 at the last step
  return lr * (min_ratio + (1 - min_ratio) * 0.5 * (1 + std::cos(3.141592653589793 * progress)));
}

// ---- stopping ------------------------------------------------------------------------------------------
// A signal asks the loop to stop after its step, so that it can save: Ctrl-C, a closed terminal or pipe, and
// what batch systems send. A second Ctrl-C ends the program at once; files on the disk are whole at any moment.
inline std::atomic<int> stop_requested{
    0};  // the signal's number; the handler runs on whatever thread it comes to
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler must not wait for a lock");

template <size_t N>
void say_in_handler(const char (&text)[N]) {
  if (write(STDERR_FILENO, text, N - 1) < 0) return;  // nobody is there to read it
}
inline void request_stop(int number) {
  const int error = errno;
  if (number == SIGINT && stop_requested == SIGINT) {
    if (line_is_open) say_in_handler("\n");
    say_in_handler("stopped without saving\n");
    _exit(130);
  }
  // A pipe that closes must not hide that Ctrl-C was pressed, nor print into itself.
  if (number != SIGPIPE && line_is_open) say_in_handler("\n");
  if (number != SIGPIPE && ranks.rank == 0)
    say_in_handler("saving after this step; press Ctrl-C again to stop without\n");
  if (number != SIGPIPE || !stop_requested) stop_requested = number;
  errno = error;
}
inline void catch_stop_signals() {
  struct sigaction action = {}, before;
  action.sa_handler = request_stop;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // a signal must not cut a write short
  for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGPIPE, SIGHUP}) {
    sigaction(number, nullptr, &before);
    if (number == SIGHUP && before.sa_handler == SIG_IGN) continue;  // nohup
    sigaction(number, &action, nullptr);
  }
  signal(SIGXFSZ, SIG_IGN);  // a file that may not grow any more is an error with a message, as a full disk is
}

// Whether a stop was asked for; of many ranks, of any. All ranks ask at the same places.
inline bool stop_agreed() {
  const std::vector<int> all = gather(std::vector<int>{stop_requested});
  return *std::max_element(all.begin(), all.end()) > 0;
}

// A program built for one processor (-march=native) says so when it meets another, instead of dying in silence.
inline void illegal_instruction(int) {
  const char text[] =
      "error: this program was built for another processor; build it here with make, or for any"
      " with make PORTABLE=1\n";
  _exit(write(STDERR_FILENO, text, sizeof(text) - 1) < 0 ? 2 : 1);
}
__attribute__((constructor)) inline void catch_illegal_instruction() { signal(SIGILL, illegal_instruction); }

// ---- starting ------------------------------------------------------------------------------------------
// What the command line asks for, and the checkpoint that it names.
struct Start : Progress {
  Options options;
  Checkpoint checkpoint;
  bool resuming = false, has_checkpoint = false;
  bool only_looks = false;  // nothing to train and no --out: nothing is written or moved
  size_t first_step = 0;
  std::string program;
};

inline Start read_command_line(int argc, char** argv, Device device) {
  Start start;
  Options& o = start.options = parse_flags(argc, argv, device);
  const std::set<std::string> now = o.given;  // on this command line, not by the checkpoint
  start.program = argv[0];
  start.resuming = !o.resume.empty();
  start.has_checkpoint = start.resuming || !o.init_from.empty();
  if (start.has_checkpoint) {
    start.checkpoint = open_newest_checkpoint(start.resuming ? o.resume : o.init_from);
    adopt_saved(o, start.checkpoint.metadata, !start.resuming);
  }
  if (start.resuming) {
    if (o.out.empty()) o.out = folder_of(o.resume);
    static_cast<Progress&>(start) = progress_from_metadata(start.checkpoint.metadata);
  }
  start.first_step = start.step;
  start.only_looks = start.has_checkpoint && now.count("steps") && o.steps <= start.step && !now.count("out");
  if (start.only_looks) {
    o.train = "";
    if (!now.count("val")) o.val = "";
    if (!now.count("test")) o.test = "";
  }
  return start;
}

// Ends the run unless all ranks run the same program with the same flags on the same data.
inline void require_same_start(const Start& start, const Data& data) {
  if (ranks.size == 1) return;
  agree();
  Checksum build("program");
  const char* self = "/proc/self/exe";
  if (access(self, R_OK) == 0) build.mix(InFile(self).read_all());
  std::string mine = "program " + checksum_text(build.value) + "\n";
  for (const Flag& flag : flag_table())
    mine += std::string("--") + flag.name + " " + flag_text(start.options, flag) + "\n";
  for (const auto& entry : start.checkpoint.metadata)
    mine += "checkpoint's " + entry.first + " " + entry.second + "\n";
  for (const auto& split : data.splits()) mine += split.second->inventory();
  const std::string first = broadcast(mine);
  std::istringstream lines(mine), expected(first);
  for (std::string line, want; mine != first && line == want;) {
    line = want = "nothing more";
    std::getline(lines, line);
    std::getline(expected, want);
    if (line != want)
      fatal(EXIT_USAGE, "rank %zu has %s, rank 0 %s; expected the same on all", ranks.rank, line.c_str(),
            want.c_str());
  }
  agree();
}

// What a run works with, from the flags to the model.
template <class Model>
struct Run : Start {
  Config config;
  Tokenizer tokenizer;
  Data data;
  Model model;
  Screen screen = find_screen();
  double timed = 0;       // seconds of all steps but the first, which pays for fresh memory
  double shown = -1;      // when the last step line was shown
  bool left_out = false;  // a stop has left out a validation or a sample that was due

  // stories: makes the built-in corpus, for a run that names no shards.
  Run(Start&& start, Data (*stories)(const Config&)) : Start(std::move(start)) {
    Options& o = options;
    tokenizer = o.tokenizer.empty() ? Tokenizer::bytes() : Tokenizer::load(o.tokenizer);
    config = config_from(o, tokenizer.size);
    data = uses_stories(o) && !only_looks ? stories(config) : open_data(o, config);
    require_same_start(*this, data);
    const auto then = checkpoint.metadata.find("train_data");
    if (!resuming || only_looks || o.new_data || then == checkpoint.metadata.end()) return;
    const std::string change = inventory_change(then->second, data.train.inventory());
    if (!change.empty())
      fatal(EXIT_ERROR,
            "--train: the shards are not those of the checkpoint (%s); expected the same, since the order of"
            " examples depends on them; --new-data goes on with those that are there now",
            change.c_str());
  }
};

// Takes the folder for this run: nobody else's, and what another run or later steps left there moved aside.
// Rank 0 does, when all ranks have loaded what they need from there.
inline Log take_folder(const Start& start) {
  const std::string& out = start.options.out;
  std::string aside;
  bool goes_on = false;
  agree();
  if (!start.only_looks && ranks.rank == 0) {
    make_folders(out);
    lock_folder(out);
    goes_on = start.resuming && std::filesystem::equivalent(folder_of(start.options.resume), out);
    aside = goes_on ? move_aside(out, "abandoned", start.step + 1) : move_aside(out, "earlier", 0);
    if (!aside.empty()) printf("moved %s to %s\n", goes_on ? "later steps" : "an earlier run", aside.c_str());
  }
  agree();
  ranks.together = false;
  if (!start.only_looks) catch_stop_signals();
  if (start.only_looks || ranks.rank > 0) return Log();
  return goes_on ? Log(out, start.step, aside) : Log(out);
}

// ---- looking -------------------------------------------------------------------------------------------
struct Validation {
  double loss;  // nats per token
  size_t tokens;
  RouteStats routes;
};

// Mean loss over the first max_tokens >= T of a split (whole windows), in order. Touches activations only. The
// sum runs in token order in double, so neither batch size nor ranks show in the result. No tokens if a stop
// cut it short.
template <class Model>
Validation validate(Model& m, const TokenData& data, size_t max_tokens) {
  const size_t T = m.T, windows = std::min(max_tokens / T, data.num_windows(T));
  std::vector<int> tokens(m.B * T), targets(m.B * T);
  Validation result = {};
  double sum = 0;
  for (size_t w0 = 0; w0 < windows; w0 += ranks.size * m.B) {
    if (stop_agreed()) return {};
    const size_t first = std::min(w0 + ranks.rank * m.B, windows), rows = std::min(m.B, windows - first);
    for (size_t b = 0; b < rows; b++) data.window(first + b, T, &tokens[b * T], &targets[b * T]);
    for (auto loss : all_token_losses(m, tokens, targets, rows)) sum += double(loss);
    RouteStats routes;
    if (rows > 0) add_route_stats(routes, m, rows * T);
    result.routes.add(routes);
  }
  result.tokens = windows * T;
  result.loss = sum / double(result.tokens);
  result.routes.divide(double(result.tokens));
  return result;
}

template <class Model>
void validate_split(Run<Model>& run, Log& log, const char* split, const TokenData& data) {
  if (data.num_tokens() == 0) return;
  const size_t wanted = run.options.val_tokens;
  const Validation v = validate(run.model, data, wanted > 0 ? wanted : data.num_tokens());
  if (v.tokens == 0) {
    run.left_out = true;
    return;
  }
  print_lines(validation_line(split, run.step, v.loss, v.tokens));
  log.write(validation_event(run, split, v.loss, v.tokens));
  if (run.data.stories) report_answers(run, log, v.tokens / run.config.T);  // as many as windows were read
  if (!run.config.has_routes()) return;
  if (!run.options.quiet) print_lines(route_picture(run.config, v.routes, run.screen));
  log.write(routes_event(run, split, v.routes));
}

// Continues `context` by n tokens, or up to an end-of-text. Random numbers are a function of (seed, position):
// no state, none disturbed.
template <class Model>
std::vector<int> generate(Model& m, std::vector<int> context, size_t n, double temperature, size_t top_k,
                          double top_p, uint64_t seed, int eot) {
  std::vector<float> logits;
  for (size_t i = 0; i < n && !stop_requested; i++) {
    next_token_logits(m, context, logits);
    const double u = uniform(seed, STREAM_SAMPLE, context.size());
    context.push_back(sample_token(logits.data(), m.config.V, temperature, top_k, top_p, u));
    if (context.back() == eot) break;
  }
  return context;
}

template <class Model>
void sample(Run<Model>& run, Log& log) {
  if (ranks.rank > 0) return;
  const Options& o = run.options;
  if (!has_text(o, run.tokenizer.size)) {
    print_lines(format("sample step %zu: none; a vocabulary of %zu tokens needs --tokenizer to become text\n",
                       run.step, o.vocab));
    return;
  }
  std::vector<int> context = {run.tokenizer.eot};  // a document starts with an end of text
  for (int token : run.tokenizer.encode(o.prompt)) context.push_back(token);
  context = generate(run.model, context, o.sample_tokens, o.temperature, o.top_k, o.top_p, o.seed + run.step,
                     run.tokenizer.eot);
  if (stop_requested) {
    run.left_out = true;
    return;
  }
  context.erase(context.begin());
  const std::string text = run.tokenizer.decode(context);
  print_lines(format("sample step %zu:\n%s\n---\n", run.step, printable(text, run.screen.unicode).c_str()));
  log.write(Event("sample").add("step", run.step).add("text", text));
}

// All ranks call it; rank 0 writes.
template <class Model>
void save(Run<Model>& run, Log& log) {
  if (run.only_looks) return;
  const Options& o = run.options;
  const std::string path = checkpoint_path(o.out, run.step);
  const size_t bytes = 3 * sizeof(float) * count_elements(run.config);
  if (bytes >= size_t(1) << 30) print_lines("saving " + human_bytes(bytes) + " to " + path + "\n");
  model_save(run.model, path, run_metadata(o, run, run.data.train));
  if (ranks.rank > 0) return;
  delete_old_checkpoints(o.out, o.keep, run.step);
  print_lines("saved  " + path + "\n");
  log.write(Event("checkpoint").add("step", run.step).add("path", path));
}

// A shard that turns out to be bad ends the run after a save.
template <class Model>
void save_before_data_errors(Run<Model>& run, Log& log) {
  ranks.save = [&] { save(run, log); };
  for (TokenData* data : {&run.data.train, &run.data.val, &run.data.test})
    data->before_fatal = [] {
      announce_end();
      ranks.save();
    };
}

// What is due between two steps: validation, a sample, a checkpoint. Returns whether the run ends here.
template <class Model>
bool between_steps(Run<Model>& run, Log& log) {
  const Options& o = run.options;
  const bool finished = run.step >= o.steps;
  // Events of the step at which a resumed run begins are in its log already.
  const bool fresh = run.step > run.first_step || !run.resuming;
  const auto due = [&](size_t every) { return finished || (fresh && every > 0 && run.step % every == 0); };
  if (due(o.val_every)) validate_split(run, log, "val", run.data.val);
  if (finished) validate_split(run, log, "test", run.data.test);
  if (due(o.sample_every) && o.sample_tokens > 0 && (run.step > 0 || finished)) sample(run, log);
  const bool stopping = stop_agreed();
  if (stopping || (due(o.checkpoint_every) && (run.step > 0 || finished))) save(run, log);
  return finished || stopping;
}

// Every --log-every'th step line stays on the screen; without that flag a line a second does, or on a terminal
// none: its one line is renewed. The last step's always stays.
template <class Model>
void show_step(Run<Model>& run, const StepReport& report) {
  const Options& o = run.options;
  const bool terminal = run.screen.columns > 0;
  const double since = seconds_now() - run.shown;
  const bool due = o.log_every > 0 ? report.step % o.log_every == 0 : !terminal && since >= 1;
  const bool stays = due || report.step == report.steps;
  if (o.quiet || (!stays && !(terminal && since >= 0.1))) return;
  run.shown = seconds_now();
  if (stays)
    print_lines(step_line(report));
  else
    renew_line(progress_line(report, find_screen()));
}

// Counts a step and reports it. flops: of a step, and the card's peak a second; 0: not known.
template <class Model>
void report_step(Run<Model>& run, Log& log, double loss, double norm, double lr, double seconds,
                 double flops = 0, double peak_flops = 0) {
  const Options& o = run.options;
  run.step++;
  run.tokens += o.total_batch;
  run.position += o.total_batch / run.config.T;
  const size_t timed_steps = run.step - run.first_step - 1;
  if (timed_steps > 0) run.timed += seconds;
  const double left = timed_steps > 0 ? run.timed / double(timed_steps) * double(o.steps - run.step) : -1;
  const StepReport report = {run.step, o.steps,       loss, norm,  lr,
                             seconds,  o.total_batch, left, flops, peak_flops};
  show_step(run, report);
  log.write(step_event(run, report));
}

template <class Model>
void report_end(const Run<Model>& run, Log& log, double seconds) {
  const Options& o = run.options;
  if (run.step >= o.steps && !run.left_out) {
    log.write(Event("done").add("step", run.step).add("tokens", run.tokens).add("seconds", seconds));
    print_lines(format("done   %zu steps in ", run.step - run.first_step) + duration_text(seconds) + "\n");
    return;
  }
  const char* without = run.left_out ? ", leaving out the validation or sample due there" : "";
  print_lines(format("stopped at step %zu of %zu%s; go on with: ", run.step, o.steps, without) +
              shell_quote(run.program) + " --resume " + shell_quote(o.out) + "\n");
}
