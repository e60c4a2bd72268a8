// child.h - for tests of what ends a program: runs a function in a child process and reports how it ended, and
// keeps scratch files in a folder that disappears.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

struct Outcome {
  int status;            // exit status; 128 + signal if a signal ended it; -1 if it could not be started
  std::string out, err;  // what it printed
};

inline std::string read_stream(FILE* file) {
  std::string text;
  char chunk[4096];
  rewind(file);
  for (size_t n; (n = fread(chunk, 1, sizeof(chunk), file)) > 0;) text.append(chunk, n);
  fclose(file);
  return text;
}

// A function that returns ends its child with status 0.
inline Outcome in_child(const std::function<void()>& function) {
  FILE *out = tmpfile(), *err = tmpfile();
  fflush(nullptr);
  const pid_t child = out && err ? fork() : -1;
  if (child < 0) return {-1, "", "cannot start a child process"};
  if (child == 0) {
    if (dup2(fileno(out), 1) < 0 || dup2(fileno(err), 2) < 0) _exit(127);
    function();
    fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_stream(out), read_stream(err)};
}

// True if the outcome is a refusal as the project's users see it: this exit status, nothing on stdout, and one
// line on stderr that starts with "error: " and holds `part`. Prints the line, and what was wrong with it.
inline bool refuses(const Outcome& o, int status, const std::string& part) {
  const bool one_line = !o.err.empty() && o.err.find('\n') == o.err.size() - 1;
  const bool ok = o.status == status && o.out.empty() && one_line && o.err.compare(0, 7, "error: ") == 0 &&
                  o.err.find(part) != std::string::npos;
  printf("     %s", one_line ? o.err.c_str() : (o.err + "\n").c_str());
  if (!ok)
    printf("     ^ expected exit status %d (got %d), no output, one line with \"%s\"\n", status, o.status,
           part.c_str());
  return ok;
}

struct Scratch {
  std::string path;
  explicit Scratch(const std::string& parent = "/tmp") : path(parent + "/rdattnres_test_XXXXXX") {
    if (!mkdtemp(&path[0])) perror(path.c_str()), exit(1);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::filesystem::remove_all(path); }
  std::string operator/(const std::string& name) const { return path + "/" + name; }
};

inline void write_file(const std::string& path, const std::string& bytes) {
  FILE* file = fopen(path.c_str(), "wb");
  if (!file || fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size()) perror(path.c_str()), exit(1);
  fclose(file);
}
inline std::string read_file(const std::string& path) {
  FILE* file = fopen(path.c_str(), "rb");
  return file ? read_stream(file) : "";
}
