// files.h - reading at any offset, writing a file that appears whole or not at all, a folder for one run alone.
#pragma once
#include <utility>

#include <fcntl.h>
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

// A file opened for reading at any offset. Safe to share between threads: there is no file position.
struct InFile {
  std::string path;
  size_t size = 0;
  int fd = -1;

  InFile() = default;
  InFile(InFile&& other) noexcept { *this = static_cast<InFile&&>(other); }
  InFile& operator=(InFile&& other) noexcept {
    std::swap(path, other.path), std::swap(size, other.size), std::swap(fd, other.fd);
    return *this;
  }
  ~InFile() {
    if (fd >= 0) ::close(fd);
  }

  std::string open(const std::string& name) {  // returns the error, empty when all is well
    path = name;
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: a pipe must not hang us
    if (fd < 0) return file_error(path, "open");
    struct stat info;
    if (fstat(fd, &info) != 0) return file_error(path, "examine");
    if (!S_ISREG(info.st_mode)) return path + ": not a regular file";
    size = size_t(info.st_size);
    return "";
  }
  std::string read(size_t offset, size_t bytes, void* buffer) const {
    char* to = static_cast<char*>(buffer);
    while (bytes > 0) {
      const ssize_t n = pread(fd, to, bytes, off_t(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return file_error(path, "read");
      if (n == 0)
        return format("%s: cut short: nothing at byte %zu, expected %zu more", path.c_str(), offset, bytes);
      to += n, offset += size_t(n), bytes -= size_t(n);
    }
    return "";
  }
};

// A file that appears complete or not at all. It grows under a temporary name; commit() puts it on the disk
// and gives it its name, in that order, so a crash leaves the old file or the new one, never half of one.
// Every failure is fatal and removes the temporary file.
struct OutFile {
  std::string path, temporary;
  int fd = -1;
  size_t written = 0;        // bytes so far, those still in the buffer included
  std::vector<char> buffer;  // small writes are gathered

  explicit OutFile(const std::string& name) : path(name), temporary(name + ".tmp") {
    struct stat info;  // renaming over a device would replace it
    if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
      fatal(EXIT_ERROR, "%s: cannot write: not a regular file", path.c_str());
    fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) fatal(EXIT_ERROR, "%s", file_error(temporary, "create").c_str());
    buffer.reserve(BUFFER);
  }
  OutFile(const OutFile&) = delete;
  OutFile& operator=(const OutFile&) = delete;
  ~OutFile() { discard(); }

  void write(const void* data, size_t bytes) {
    written += bytes;
    if (buffer.size() + bytes > BUFFER) flush();
    const char* from = static_cast<const char*>(data);
    if (bytes > BUFFER)
      write_all(from, bytes);
    else
      buffer.insert(buffer.end(), from, from + bytes);
  }
  void write(const std::string& text) { write(text.data(), text.size()); }

  // Overwrites bytes written before: for a count or a checksum known only at the end.
  void patch(size_t offset, const void* data, size_t bytes) {
    flush();
    if (pwrite(fd, data, bytes, off_t(offset)) != ssize_t(bytes)) fail("write");
  }

  void commit() {
    flush();
    if (fsync(fd) != 0) fail("flush to disk");
    if (::close(fd) != 0) {
      fd = -1;
      fail("close");
    }
    fd = -1;
    if (rename(temporary.c_str(), path.c_str()) != 0) fail("rename");
    temporary.clear();
    sync_folder(path);
  }

  // Makes a rename or a removal last: the folder's list of names is flushed too.
  static void sync_folder(const std::string& path) {
    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
    const int folder_fd = ::open(folder.c_str(), O_RDONLY | O_CLOEXEC);
    if (folder_fd < 0) fatal(EXIT_ERROR, "%s", file_error(folder, "open").c_str());
    const bool ok = fsync(folder_fd) == 0 || errno == EINVAL || errno == ENOTSUP;  // not every file system can
    if (!ok) fatal(EXIT_ERROR, "%s", file_error(folder, "flush to disk").c_str());
    ::close(folder_fd);
  }

 private:
  static constexpr size_t BUFFER = 1 << 20;

  void write_all(const char* from, size_t bytes) {
    while (bytes > 0) {
      const ssize_t n = ::write(fd, from, bytes);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail("write");
      from += n, bytes -= size_t(n);
    }
  }
  void flush() {
    write_all(buffer.data(), buffer.size());
    buffer.clear();
  }
  void discard() {
    if (fd >= 0) ::close(fd);
    if (!temporary.empty()) unlink(temporary.c_str());
    fd = -1;
    temporary.clear();
  }
  [[noreturn]] void fail(const char* action) {
    const std::string message = file_error(path, action);  // errno, before the cleaning up changes it
    discard();
    fatal(EXIT_ERROR, "%s", message.c_str());
  }
};

// ---- folders -------------------------------------------------------------------------------------------
inline bool is_folder(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// Creates the folder and those above it, where they are missing.
inline void make_folders(const std::string& path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const std::string part = path.substr(0, slash);
    if (is_folder(part)) {
      if (slash == std::string::npos) return;
      continue;
    }
    if (mkdir(part.c_str(), 0777) != 0) fatal(EXIT_ERROR, "%s", file_error(part, "create the folder").c_str());
    if (slash == std::string::npos) return;
  }
}

// ---- one run a folder ----------------------------------------------------------------------------------
// Holds the folder for this process, or ends the program if another has it. The kernel drops the lock when the
// process ends, however it ends: a killed run leaves nothing to clean up.
inline void lock_folder(const std::string& folder) {
  const std::string path = folder + "/lock";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);  // stays open until the process ends
  if (fd < 0) fatal(EXIT_ERROR, "%s", file_error(path, "open").c_str());
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
    const std::string owner = format("%ld\n", long(getpid()));
    if (ftruncate(fd, 0) != 0 || write(fd, owner.data(), owner.size()) < 0)
      fatal(EXIT_ERROR, "%s", file_error(path, "write").c_str());
    return;
  }
  if (errno != EWOULDBLOCK) {  // a file system without locks
    fprintf(stderr, "warning: %s; start no second run there\n", file_error(path, "lock").c_str());
    return;
  }
  char owner[32] = {};
  const ssize_t n = read(fd, owner, sizeof(owner) - 1);
  while (n > 0 && strlen(owner) > 0 && owner[strlen(owner) - 1] == '\n') owner[strlen(owner) - 1] = '\0';
  fatal(EXIT_ERROR, "%s: in use by another run (process %s); expected a folder of this run's own, see --out",
        folder.c_str(), n > 0 ? owner : "unknown");
}
