// log.h - log.jsonl in the run's folder: what happened, one JSON object a line, for programs to read.
//
//   Log log(folder);                                     // a new log; Log(folder, step) when resuming at step
//   log.write(Event("step").add("step", step).add("loss", loss));
//
// Every line reaches the file in one write, so a crash can lose the last line but not tear the others. An
// event's "step" counts the updates done: events of step n describe the model that checkpoint n holds.
#pragma once
#include <map>
#include <type_traits>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dev/common/errors.h"  // fatal
#include "dev/common/files.h"   // InFile, OutFile
#include "dev/common/text.h"    // Json, json_quote, number_text

// How far a run is: updates done, tokens seen, examples taken.
struct Progress {
  size_t step = 0, tokens = 0, position = 0;
};

// One line of the log. Numbers are written so that they read back exactly; NaN and infinities as null.
struct Event {
  std::string text;
  explicit Event(const char* name) : text("{\"event\":" + json_quote(name)) {}

  template <class T>
  Event& add(const char* name, const T& value) {
    text += "," + json_quote(name) + ":" + to_json(value);
    return *this;
  }

  static std::string to_json(const std::string& value) { return json_quote(value); }
  static std::string to_json(const char* value) { return json_quote(value); }
  template <class T>
  static std::string to_json(const std::vector<T>& values) {
    std::string list;
    for (const T& value : values) list += (list.empty() ? "" : ",") + to_json(value);
    return "[" + list + "]";
  }
  template <class T>
  static std::string to_json(const std::map<std::string, T>& members) {
    std::string list;
    for (const auto& member : members)
      list += (list.empty() ? "" : ",") + json_quote(member.first) + ":" + to_json(member.second);
    return "{" + list + "}";
  }
  template <class T>
  static std::enable_if_t<std::is_arithmetic<T>::value, std::string> to_json(T value) {
    if constexpr (std::is_same<T, bool>::value)
      return value ? "true" : "false";
    else if constexpr (std::is_integral<T>::value)
      return std::to_string(value);
    else
      return std::isfinite(value) ? number_text(value) : "null";
  }
};

class Log {
 public:
  std::string path;

  // A new log: one that is there already is emptied.
  explicit Log(const std::string& folder) : path(folder + "/log.jsonl") { open(O_TRUNC); }

  // Goes on with the log of a run resumed at `step`: events of later steps, which will happen again, are
  // dropped, and with them the end of the run if it had ended, and a line that a crash cut short. They move to
  // the log of the folder `aside` if one is named.
  Log(const std::string& folder, size_t step, const std::string& aside = "") : path(folder + "/log.jsonl") {
    struct stat info;
    if (stat(path.c_str(), &info) == 0) drop_after(step, aside);
    open(0);
  }
  Log() = default;  // writes nothing

  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;
  ~Log() {
    if (fd >= 0) ::close(fd);
  }

  void write(const Event& event) { write_line(event.text + "}"); }

 private:
  static constexpr size_t MAX_LINE = 1 << 24;  // a longer one is none of ours; cut, it fails to parse
  int fd = -1;

  void open(int flags) {
    fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | flags, 0666);
    if (fd < 0) fatal(EXIT_ERROR, "%s", file_error(path, "open").c_str());
  }

  void write_line(const std::string& text) {
    if (fd < 0) return;
    const std::string line = text + "\n";
    ssize_t n;
    do n = ::write(fd, line.data(), line.size());
    while (n < 0 && errno == EINTR);
    if (n == ssize_t(line.size())) return;
    if (n >= 0) errno = ENOSPC;  // part of the line went in: the disk filled up on the way
    fatal(EXIT_ERROR, "%s", file_error(path, "write").c_str());
  }

  static bool keep(const std::string& line, size_t last_step) {
    Json event;
    if (!JsonParser::parse(line, &event).empty() || event.type != Json::object) return false;
    const Json *name = event.find("event"), *step = event.find("step");
    if (name && name->text == "done") return false;
    size_t n = 0;
    return !step || (step->as_count(&n) && n <= last_step);
  }

  void drop_after(size_t last_step, const std::string& aside) {
    const InFile old(path);
    OutFile kept(path);
    Log dropped;
    if (!aside.empty()) dropped.path = aside + "/log.jsonl", dropped.open(0);
    std::string line;
    std::vector<char> chunk(1 << 16);
    for (size_t at = 0; at < old.size; at += chunk.size()) {
      chunk.resize(std::min(chunk.size(), old.size - at));
      old.read(at, chunk.size(), chunk.data());
      for (char c : chunk) {
        if (c != '\n' && line.size() < MAX_LINE) line += c;
        if (c != '\n') continue;
        if (keep(line, last_step))
          kept.write(line + "\n");
        else
          dropped.write_line(line);
        line.clear();
      }
    }
    kept.commit();  // what is left in `line` has no end: it was cut short
  }
};
