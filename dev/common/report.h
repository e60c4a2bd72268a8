// report.h - what a person sees: the tables at the start, the line of a step, the picture of the depth routes;
// and beside each the event that says the same to programs.
#pragma once
#include <cstdlib>

#include <sys/ioctl.h>
#include <unistd.h>

#include "dev/common/config.h"  // Config, count_params
#include "dev/common/errors.h"  // format, human_bytes, human_count
#include "dev/common/flags.h"   // flag_table: the settings
#include "dev/common/flops.h"   // training_flops, find_card
#include "dev/common/log.h"     // Event, Progress
#include "dev/common/ranks.h"   // ranks, gather
#include "dev/common/shards.h"  // TokenData
#include "dev/common/text.h"    // printable

// ---- the screen ----------------------------------------------------------------------------------------
// What stdout can show. A file or a pipe is as wide as a line needs.
struct Screen {
  size_t columns = 0;   // of a terminal; 0: no terminal
  bool unicode = true;  // or ASCII alone
  bool narrower_than(size_t width) const { return columns > 0 && columns < width; }
};
inline Screen find_screen() {
  Screen screen;
  winsize size = {};
  if (!MANY_PROCESSES && isatty(STDOUT_FILENO))  // mpirun looks like a terminal even if it writes to a file
    screen.columns = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col : 80;
  std::string locale;
  for (const char* name : {"LANG", "LC_CTYPE", "LC_ALL"}) {  // the last that is set decides
    const char* value = getenv(name);
    if (value && *value) locale = value;
  }
  for (char& c : locale) c = char(tolower(c));
  screen.unicode = locale.find("utf-8") != locale.npos || locale.find("utf8") != locale.npos;
  return screen;
}

// Prints lines that stay, in place of the line that is renewed.
inline void print_lines(const std::string& lines) {
  if (line_is_open) printf("\r\033[K");
  line_is_open = false;
  printf("%s", lines.c_str());
}
// Prints the one line that the next print_lines or renew_line replaces.
inline void renew_line(const std::string& line) {
  line_is_open = true;
  printf("\r%s\033[K", line.c_str());
  fflush(stdout);
}

// ---- small texts ---------------------------------------------------------------------------------------
inline std::string with_commas(size_t n) {  // 1234567 -> "1,234,567"
  std::string text = std::to_string(n);
  for (size_t i = text.size(); i > 3; i -= 3) text.insert(i - 3, ",");
  return text;
}
inline std::string trim_end(std::string text) {
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}
inline std::string duration_text(double seconds) {  // "45s", "2m10s", "3h05m", "2d04h"
  if (!(seconds >= 0 && seconds < 1e15)) return "?";
  const size_t s = size_t(std::llround(seconds));
  if (s < 60) return format("%zus", s);
  if (s < 3600) return format("%zum%02zus", s / 60, s % 60);
  if (s < 86400) return format("%zuh%02zum", s / 3600, s / 60 % 60);
  return format("%zud%02zuh", s / 86400, s / 3600 % 24);
}

// ---- the tables at the start ---------------------------------------------------------------------------
// Every setting, two a row if the screen is wide enough; a star marks what was given, on the command line or by
// a checkpoint.
inline std::string settings_table(const Options& o, const Screen& screen = {}) {
  std::string text = "settings (* given)\n", row;
  const bool two_a_row = !screen.narrower_than(100);
  for (const Flag& flag : flag_table()) {
    if (!available(flag, o.device)) continue;
    std::string value = printable(flag_text(o, flag), screen.unicode);
    if (value.empty()) value = "-";
    const char star = o.given.count(flag.name) ? '*' : ' ';
    const std::string cell = format(" %c%-17s%s", star, flag.name, value.c_str());
    if (two_a_row && row.empty() && cell.size() < 50) {
      row = cell + std::string(50 - cell.size(), ' ');
      continue;
    }
    if (!row.empty()) text += cell.size() < 50 ? row : trim_end(row) + "\n";
    text += cell + "\n";
    row.clear();
  }
  return row.empty() ? text : text + trim_end(row) + "\n";
}

// The settings of the run and the number of parameters.
inline Event config_event(const Options& o, const Config& c) {
  const ParamCount n = count_params(c);
  Event event("config");
  return event.add("options", saved_options(o))
      .add("parameters", n.total)
      .add("embedding", n.embedding)
      .add("layers", n.layers)
      .add("routes", n.routes);
}

inline std::string model_table(const Config& c) {
  const ParamCount n = count_params(c);
  std::string text = format("model       %s: %zu layers, width %zu, %zu heads of %zu, feed-forward %zu, ",
                            ARCH_NAMES[int(c.arch)], c.L, c.C, c.NH, c.HS(), c.F);
  text += format("context %zu\n", c.T);
  text += format("vocabulary  %zu, stored as %zu rows\n", c.V, c.Vp());
  if (c.has_routes())
    text += format("depth       %zu sublayers in %zu blocks of %zu, up to %zu sources a read\n", c.sublayers(),
                   c.blocks(), c.S, c.max_sources());
  text += "parameters  " + with_commas(n.total) + " (" + human_count(double(n.total)) + ") = ";
  return text + with_commas(n.embedding) + " embedding + " + with_commas(n.layers) + " layers + " +
         with_commas(n.routes) + " routes\n";
}

// Beside what one rank has: " on each of 4 ranks".
inline std::string ranks_text() { return ranks.size > 1 ? format(" on each of %zu ranks", ranks.size) : ""; }

struct MemoryLine {
  std::string name;
  size_t bytes;
};
// machine: bytes of memory that there are for it; 0: not known, or said elsewhere.
inline std::string memory_table(const std::vector<MemoryLine>& lines, size_t machine = 0) {
  std::string text = "memory" + ranks_text() + "\n";
  size_t total = 0;
  for (const MemoryLine& line : lines) {
    text += format("  %-24s%12s\n", line.name.c_str(), human_bytes(line.bytes).c_str());
    total += line.bytes;
  }
  text += format("  %-24s%12s\n", "together", human_bytes(total).c_str());
  if (machine == 0 || total <= machine) return text;
  return text + format("warning     this run asks for %s of memory, the machine has %s\n",
                       human_bytes(total).c_str(), human_bytes(machine).c_str());
}

// One line a split, such as: "train       data/*.bin: 3 shards, 1,234,567 tokens, 9,645 windows of 128".
inline std::string data_line(const char* split, const TokenData& data, size_t T) {
  const size_t n = data.shards.size();
  return format("%-12s%s: %zu shard%s, %s tokens, %s windows of %zu\n", split, data.name.c_str(), n,
                n == 1 ? "" : "s", with_commas(data.num_tokens()).c_str(),
                with_commas(data.num_windows(T)).c_str(), T);
}

// The peak that the step lines' share refers to, and beside it what one large product reached on this very card
// (measured_flops a second; 0: not measured).
inline std::string peak_line(const std::string& device_name, double measured_flops) {
  const Card* card = find_card(device_name);
  std::string text = "peak        ";
  if (card)
    text += format("%.4g TFLOP/s in bf16, dense (%s)", card->tflops, card->source);
  else
    text += format("n/a: no figure for %s in dev/common/flops.h", device_name.c_str());
  if (measured_flops > 0) text += format("; one large product reaches %.4g TFLOP/s", measured_flops / 1e12);
  if (measured_flops > 0 && card) text += format(", %.0f%%", measured_flops / card->tflops / 1e10);
  return text + "\n";
}

// How long the run is, in steps, tokens and epochs of its training data (train_tokens; 0 if there are none).
inline std::string schedule_table(const Options& o, size_t train_tokens) {
  const double tokens = double(o.steps) * double(o.total_batch);
  std::string text = "schedule    " + with_commas(o.steps) + " steps of " + with_commas(o.total_batch);
  const std::string of_ranks = ranks.size > 1 ? format("%zu ranks x ", ranks.size) : "";
  text += format(" tokens (%s%zu x %zu x %zu)", of_ranks.c_str(),
                 o.total_batch / (o.batch * o.context * ranks.size), o.batch, o.context);
  text += " = " + human_count(tokens) + " tokens";
  if (train_tokens > 0) text += format(", %.2f epochs", tokens / double(train_tokens));
  return text + format("\n            learning rate up to %g in %zu steps, then down to %g\n", o.lr, o.warmup,
                       o.lr * o.min_lr_ratio);
}

// What the run costs, and how long that takes at `rate` operations a second, named by rate_name; 0: not known.
inline std::string arithmetic_table(const Config& c, const Options& o, double rate,
                                    const std::string& rate_name) {
  const Flops f = training_flops(c, c.T);
  const double all = f.total() * double(o.steps) * double(o.total_batch);
  std::string text = "arithmetic  " + with_commas(size_t(f.total()));
  const double percent = 100 / f.total();
  text += format(" FLOP a token: matrices %.1f%%, attention %.1f%%, routes %.1f%%\n", percent * f.matmul,
                 percent * f.attention, percent * f.routes);
  text += format("            %.6g FLOP in all; ", all);
  text += rate > 0 ? duration_text(all / rate) + " at " + rate_name : "time n/a: the peak rate is not known";
  return text + "\n";
}

// ---- lines while running -------------------------------------------------------------------------------
struct StepReport {
  size_t step, steps;  // updates done, this one included; updates in the run
  double loss, norm, lr;
  double seconds;         // of this step
  size_t tokens;          // of this step
  double eta_seconds;     // to the end of the run; negative: not known yet
  double flops = 0;       // floating-point operations of this step; 0: no share of a peak is shown
  double peak_flops = 0;  // the card's peak, a second; 0: not known, the share is n/a
};
inline std::string step_line(const StepReport& r) {
  const int width = int(std::to_string(r.steps).size());
  std::string text = format("step %*zu/%zu | loss %.4f | norm %.3f", width, r.step, r.steps, r.loss, r.norm);
  text += format(" | lr %.2e | ", r.lr);
  text += format(r.seconds < 0.00995 ? "%.1f ms" : "%.0f ms", r.seconds * 1000);
  if (r.flops > 0 && r.peak_flops > 0)
    text += format(" | %.0f%% of %.0f TFLOP/s", 100 * r.flops / r.seconds / r.peak_flops, r.peak_flops / 1e12);
  else if (r.flops > 0)
    text += " | n/a of peak";
  const double rate = double(r.tokens) / r.seconds;
  text += " | " + human_count(rate, 3) + " tok/s";
  return text + (r.eta_seconds >= 0 ? " | eta " + duration_text(r.eta_seconds) : "") + "\n";
}

// For a terminal: "step  1200/2400  loss 0.1631  42.1k tok/s  41s left  [#####.....]", cut to the screen.
inline std::string progress_line(const StepReport& r, const Screen& screen) {
  const int width = int(std::to_string(r.steps).size());
  std::string text = format("step %*zu/%zu  loss %.4f  ", width, r.step, r.steps, r.loss);
  text += human_count(double(r.tokens) / r.seconds, 3) + " tok/s";
  if (r.eta_seconds >= 0) text += "  " + duration_text(r.eta_seconds) + " left";

  const size_t room = screen.columns - 1;  // the last column stays free: some terminals break the line there
  if (text.size() + 14 > room) return text.substr(0, room);
  const size_t bar = std::min<size_t>(room - text.size() - 4, 40), done = bar * r.step / r.steps;
  text += "  [";
  for (size_t i = 0; i < bar; i++) text += i >= done ? "." : screen.unicode ? "\u2588" : "#";
  return text + "]";
}

inline Event step_event(const Progress& at, const StepReport& r) {
  Event event("step");
  return event.add("step", r.step)
      .add("tokens", at.tokens)
      .add("loss", r.loss)
      .add("norm", r.norm)
      .add("lr", r.lr)
      .add("ms", r.seconds * 1000)
      .add("tok_s", double(r.tokens) / r.seconds);
}

// "val    step 100 | loss 1.2345 nats per token | perplexity 3.437 | 16,384 tokens"
inline std::string validation_line(const char* split, size_t step, double loss, size_t tokens) {
  return format("%-6s step %zu | loss %.4f nats per token | perplexity %.4g | %s tokens\n", split, step, loss,
                std::exp(loss), with_commas(tokens).c_str());
}

inline Event validation_event(const Progress& at, const char* split, double loss, size_t count) {
  Event event("val");
  return event.add("step", at.step)
      .add("tokens", at.tokens)
      .add("split", split)
      .add("loss", loss)
      .add("count", count);
}

// ---- the depth routes ----------------------------------------------------------------------------------
struct RouteStats {                        // means over tokens, per attention layer
  std::vector<std::vector<double>> qk, v;  // weight on each source; v is empty where one route serves both
  std::vector<double> js_nats;             // Jensen-Shannon divergence between the two

  template <class Visit>
  void each(Visit visit) {
    for (auto* table : {&qk, &v})
      for (std::vector<double>& row : *table)
        for (double& p : row) visit(p);
    for (double& js : js_nats) visit(js);
  }
  // Adds the sums of every rank's batch, in the order of the ranks. A rank may have none.
  void add(RouteStats batch) {
    std::vector<double> mine;
    batch.each([&](double& sum) {
      mine.push_back(sum);
      sum = 0;
    });
    if (js_nats.empty()) *this = batch;
    const std::vector<double> all = gather(mine);
    for (size_t i = 0; i < all.size() && !js_nats.empty();) each([&](double& sum) { sum += all[i++]; });
  }
  void divide(double tokens) {  // turns sums into means
    each([&](double& sum) { sum /= tokens; });
  }
};

constexpr size_t WIDE_CELL = 6, NARROW_CELL = 4;  // columns of a source in the picture
constexpr double NATS_PER_BIT = 0.6931471805599453;

// The weights p of one route as cells under their sources, the per cent and before it, where there is room, a
// bar of up to eight eighths. The last column is the running partial; a layer at a block's start has none.
inline std::string route_cells(const std::vector<double>& p, bool has_partial, size_t columns, size_t cell,
                               bool unicode) {
  static const char* const blocks[] = {" ",      "\u2581", "\u2582", "\u2583", "\u2584",
                                       "\u2585", "\u2586", "\u2587", "\u2588"};
  static const char* const letters[] = {" ", ".", ":", "-", "=", "+", "*", "%", "#"};
  const auto& bars = unicode ? blocks : letters;
  std::string text;
  for (size_t column = 0; column < columns; column++) {
    const bool partial_column = column + 1 == columns;
    const size_t in_bank = p.size() - (has_partial ? 1 : 0);
    if (partial_column ? !has_partial : column >= in_bank) {
      text += std::string(cell, ' ');
      continue;
    }
    const double share = partial_column ? p.back() : p[column];
    const int eighths = !(share > 0) ? 0 : share >= 1 ? 8 : int(std::lround(share * 8));
    text += cell == WIDE_CELL ? format(" %s%3.0f ", bars[eighths], 100 * share) : format("%3.0f ", 100 * share);
  }
  return text;
}

// Per attention layer, where Q and K read and where V reads: E the embedding, B1, B2, .. the finished blocks,
// "part" the block under way; per cent. "" for an arm without routes.
inline std::string route_picture(const Config& c, const RouteStats& stats, const Screen& screen = {}) {
  if (!c.has_routes() || stats.qk.empty()) return "";
  const size_t bank = c.num_sources(2 * c.L - 2), columns = bank + 1;  // the last attention site reads the most
  const bool narrow = screen.narrower_than(16 + WIDE_CELL * columns + 17);
  const size_t cell = narrow ? NARROW_CELL : WIDE_CELL;
  const auto name = [&](const std::string& text) { return format("%-*s", int(cell), text.c_str()); };
  const auto cells = [&](const std::vector<double>& p, bool has_partial) {
    return route_cells(p, has_partial, columns, cell, screen.unicode);
  };
  std::string text = "depth routes    " + name("E");
  for (size_t b = 1; b < bank; b++) text += name("B" + std::to_string(b));
  text += trim_end(name("part") + (c.two_routes() ? "  JS nats   bits" : "")) + "\n";
  for (size_t l = 0; l < stats.qk.size(); l++) {
    const bool has_partial = 2 * l % c.S != 0, two = !stats.v[l].empty();
    std::string row = format("  layer %2zu  %-3s ", l, two ? "QK" : "QKV") + cells(stats.qk[l], has_partial);
    if (two) row += format("  %7.4f %6.4f", stats.js_nats[l], stats.js_nats[l] / NATS_PER_BIT);
    text += trim_end(row) + "\n";
    if (two) text += "            " + trim_end("V   " + cells(stats.v[l], has_partial)) + "\n";
  }
  return text;
}

// Per attention layer the mean weight on each source, for QK and for V, and the divergence between the two.
inline Event routes_event(const Progress& at, const char* split, const RouteStats& routes) {
  std::vector<double> js_bits = routes.js_nats;
  for (double& js : js_bits) js /= NATS_PER_BIT;
  Event event("routes");
  return event.add("step", at.step)
      .add("tokens", at.tokens)
      .add("split", split)
      .add("qk", routes.qk)
      .add("v", routes.v)
      .add("js_nats", routes.js_nats)
      .add("js_bits", js_bits);
}
