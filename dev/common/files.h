// files.h - reading at any offset, writing a file that appears whole or not at all, a folder for one run alone.
#pragma once
#include <filesystem>
#include <memory>

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dev/common/errors.h"  // fatal, format

// "path: reason", from errno: the form of every message about a file.
inline std::string file_error(const std::string& path, const char* action) {
  return path + ": cannot " + action + ": " + strerror(errno);
}

// "~/x" as a shell would have put it; it leaves the ~ alone inside quotes and behind "--flag=".
inline std::string expand_home(const std::string& path) {
  const char* home = getenv("HOME");
  const bool begins_at_home = path == "~" || path.compare(0, 2, "~/") == 0;
  return home && begins_at_home && access(path.c_str(), F_OK) != 0 ? home + path.substr(1) : path;
}

// Closed with the last copy of the pointer.
inline std::shared_ptr<FILE> open_file(const std::string& path, const char* mode, const char* action) {
  FILE* file = fopen(path.c_str(), mode);
  if (!file) fatal(EXIT_ERROR, file_error(path, action));
  return {file, fclose};
}

// A file opened for reading at any offset. Safe to share between threads: there is no file position.
struct InFile {
  std::string path;
  size_t size = 0;
  std::shared_ptr<FILE> file;  // null: nothing was opened

  InFile() = default;
  explicit InFile(const std::string& name) : path(name) {
    struct stat info;
    if (stat(path.c_str(), &info) != 0) fatal(EXIT_ERROR, file_error(path, "open"));
    if (!S_ISREG(info.st_mode)) fatal(EXIT_ERROR, path + ": not a regular file");  // opening a pipe would wait
    size = size_t(info.st_size);
    file = open_file(path, "rb", "open");
  }

  void read(size_t offset, size_t bytes, void* buffer) const {
    char* to = static_cast<char*>(buffer);
    while (bytes > 0) {
      const ssize_t n = pread(fileno(file.get()), to, bytes, off_t(offset));
      if (n < 0) fatal(EXIT_ERROR, file_error(path, "read"));
      if (n == 0)
        fatal(EXIT_ERROR, "%s: cut short: nothing at byte %zu, expected %zu more", path.c_str(), offset, bytes);
      to += n;
      offset += size_t(n);
      bytes -= size_t(n);
    }
  }
  std::string read_all() const {
    std::string bytes(size, '\0');
    read(0, size, &bytes[0]);
    return bytes;
  }
};

// A file that appears complete or not at all. It grows under a temporary name; commit() puts it on the disk
// and gives it its name, in that order, so a crash leaves the old file or the new one, never half of one.
// Every failure is fatal and removes the temporary file.
struct OutFile {
  std::string path, temporary;
  std::shared_ptr<FILE> file;

  explicit OutFile(const std::string& name) : path(name), temporary(name + ".tmp") {
    struct stat info;  // renaming over a device would replace it
    if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
      fatal(EXIT_ERROR, path + ": cannot write: not a regular file");
    file = open_file(temporary, "wb", "create");
  }
  OutFile(const OutFile&) = delete;
  ~OutFile() {
    if (!temporary.empty()) unlink(temporary.c_str());
  }

  void write(const void* data, size_t bytes) {
    if (fwrite(data, 1, bytes, file.get()) != bytes) fail("write");
  }
  void write(const std::string& text) { write(text.data(), text.size()); }

  // Overwrites bytes written before: for a count or a checksum known only at the end.
  void patch(size_t offset, const void* data, size_t bytes) {
    if (fseeko(file.get(), off_t(offset), SEEK_SET) != 0) fail("write");
    write(data, bytes);
    if (fseeko(file.get(), 0, SEEK_END) != 0) fail("write");
  }

  void commit() {
    if (fflush(file.get()) != 0) fail("write");
    if (fsync(fileno(file.get())) != 0) fail("flush to disk");
    file.reset();
    if (rename(temporary.c_str(), path.c_str()) != 0) fail("rename");
    temporary.clear();
    sync_folder(path);
  }

  // Makes a rename or a removal last: the folder's list of names is flushed too.
  static void sync_folder(const std::string& path) {
    const std::string folder = std::filesystem::absolute(path).parent_path();
    const std::shared_ptr<FILE> file = open_file(folder, "r", "open");
    if (fsync(fileno(file.get())) != 0 && errno != EINVAL && errno != ENOTSUP)  // not every file system can
      fatal(EXIT_ERROR, file_error(folder, "flush to disk"));
  }

 private:
  [[noreturn]] void fail(const char* action) {
    const std::string message = file_error(path, action);  // errno, before the cleaning up changes it
    unlink(temporary.c_str());
    fatal(EXIT_ERROR, message);
  }
};

// ---- folders -------------------------------------------------------------------------------------------
inline bool is_folder(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// Creates the folder and those above it, where they are missing.
inline void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fatal(EXIT_ERROR, path + ": cannot create the folder: " + error.message());
}

// Holds the folder for this process, or ends the program if another has it. The kernel drops the lock when the
// process ends, however it ends: a killed run leaves nothing to clean up.
inline void lock_folder(const std::string& folder) {
  const std::string path = folder + "/lock";
  static std::vector<std::shared_ptr<FILE>> locks;  // stay open until the process ends
  locks.push_back(open_file(path, "a+", "open"));
  FILE* file = locks.back().get();
  if (flock(fileno(file), LOCK_EX | LOCK_NB) == 0) {
    const bool emptied = ftruncate(fileno(file), 0) == 0;
    if (!emptied || fprintf(file, "%ld\n", long(getpid())) < 0 || fflush(file) != 0)
      fatal(EXIT_ERROR, file_error(path, "write"));
  } else if (errno == EWOULDBLOCK) {
    char owner[32];
    rewind(file);
    const bool known = fscanf(file, "%31s", owner) == 1;
    fatal(EXIT_ERROR, "%s: in use by another run (process %s); expected a folder of this run's own, see --out",
          folder.c_str(), known ? owner : "unknown");
  } else {  // a file system without locks
    warn(file_error(path, "lock") + "; start no second run there");
  }
}
