// text_to_shards.cpp - turns text files into token shards that the trainers read.
//
//   text_to_shards --out shards book.txt notes.txt                          every byte a token
//   text_to_shards --out shards --tokenizer gpt2_tokenizer.bin *.txt        GPT-2's tokens
//   zcat big.txt.gz | text_to_shards --out shards --separator '\n' -        one document a line, from a pipe
//
// A file is cut into documents at blank lines (or at any separator). Each document becomes one end-of-text
// token and its own tokens, and goes to train, val or test by a hash of its text: the same document lands in
// the same split on every machine, in any order of files, however much other text stands around it.
//
// Memory is bounded by the longest document, not by the files. Shards grow in a hidden folder and get their
// names when all of them are complete, so an interrupted run leaves nothing that looks like data.
#include <functional>
#include <memory>

#include <dirent.h>

#include "dev/common/errors.h"     // fatal, format, parse_count
#include "dev/common/files.h"      // OutFile, make_folders, lock_folder
#include "dev/common/shards.h"     // SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER
#include "dev/common/tokenizer.h"  // Tokenizer
#include "data/sha256.h"           // sha256_prefix

enum class BadUtf8 { error, replace, skip };
constexpr const char* BAD_UTF8_NAMES[] = {"error", "replace", "skip"};  // by enum value

struct Settings {
  std::string out, name = "text", tokenizer, separator;  // separator empty: blank lines
  size_t shard_tokens = 100000000, val = 5, test = 5, max_document = 16 << 20;
  BadUtf8 bad_utf8 = BadUtf8::error;
  std::vector<std::string> files;
};

constexpr const char* USAGE =
    "usage: text_to_shards --out DIR [flags] FILE...        FILE - is standard input\n"
    "  --out DIR            folder of the shards; made if it is not there\n"
    "  --name NAME          shards are called NAME_train_000000.bin and so on [text]\n"
    "  --tokenizer FILE     tokenizer file, such as GPT-2's [none: every byte a token, 256 end-of-text]\n"
    "  --separator TEXT     what stands between documents; \\n, \\t, \\\\ are understood [a blank line]\n"
    "  --shard-tokens N     tokens in a shard at most, unless one document alone is longer [100000000]\n"
    "  --val P, --test P    percent of the documents that go to val and to test [5, 5]\n"
    "  --bad-utf8 error|replace|skip   stop at bytes that are not UTF-8, put U+FFFD for each, or leave\n"
    "                       their document out [error]\n"
    "  --max-document N     longest document in bytes; a longer one is an error [16777216]\n";

// ---- command line --------------------------------------------------------------------------------------
size_t count_flag(const std::string& flag, const std::string& text, size_t min, size_t max) {
  uint64_t n;
  if (!parse_count(text, &n) || n < min || n > max)
    fatal(EXIT_USAGE, "%s: got '%s', expected a whole number from %zu to %zu", flag.c_str(), text.c_str(), min,
          max);
  return n;
}
std::string unescape(const std::string& text) {
  std::string result;
  for (size_t i = 0; i < text.size(); i++) {
    const char next = text[i] == '\\' && i + 1 < text.size() ? text[i + 1] : '\0';
    const char* found = next ? strchr("n\nt\tr\r\\\\", next) : nullptr;  // pairs: letter, what it stands for
    if (found)
      result += found[1], i++;
    else
      result += text[i];
  }
  return result;
}

Settings parse_command_line(int argc, char** argv) {
  Settings s;
  for (int i = 1; i < argc; i++) {
    std::string flag = argv[i], value;
    if (flag == "--help" || flag == "-h") {
      fputs(USAGE, stdout);
      exit(0);
    }
    if (flag == "-" || flag.compare(0, 1, "-") != 0) {
      s.files.push_back(flag);
      continue;
    }
    const size_t equals = flag.find('=');
    if (equals != std::string::npos) {
      value = flag.substr(equals + 1);
      flag.resize(equals);
    } else {
      if (i + 1 == argc) fatal(EXIT_USAGE, "%s: no value follows; see --help", flag.c_str());
      value = argv[++i];
    }
    if (flag == "--out")
      s.out = value;
    else if (flag == "--name")
      s.name = value;
    else if (flag == "--tokenizer")
      s.tokenizer = value;
    else if (flag == "--separator") {
      s.separator = unescape(value);
      if (s.separator.empty()) fatal(EXIT_USAGE, "--separator: empty; leave it out to cut at blank lines");
    } else if (flag == "--shard-tokens")
      s.shard_tokens = count_flag(flag, value, 1, INT32_MAX);
    else if (flag == "--val")
      s.val = count_flag(flag, value, 0, 100);
    else if (flag == "--test")
      s.test = count_flag(flag, value, 0, 100);
    else if (flag == "--max-document")
      s.max_document = count_flag(flag, value, 1, 1 << 30);
    else if (flag == "--bad-utf8") {
      int choice = 0;
      while (choice < 3 && value != BAD_UTF8_NAMES[choice]) choice++;
      if (choice == 3)
        fatal(EXIT_USAGE, "--bad-utf8: got '%s', expected error, replace or skip", value.c_str());
      s.bad_utf8 = BadUtf8(choice);
    } else
      fatal(EXIT_USAGE, "%s: unknown flag; see --help", flag.c_str());
  }
  if (s.out.empty()) fatal(EXIT_USAGE, "--out: expected the folder of the shards; see --help");
  if (s.files.empty()) fatal(EXIT_USAGE, "no text files named; see --help");
  if (s.name.empty() || s.name.find('/') != std::string::npos)
    fatal(EXIT_USAGE, "--name: got '%s', expected the first part of a file name", s.name.c_str());
  if (s.val + s.test > 100)
    fatal(EXIT_USAGE, "--val and --test: %zu + %zu percent, expected 100 at most", s.val, s.test);
  return s;
}

// ---- documents -----------------------------------------------------------------------------------------
// Cuts a stream of bytes into documents. Line breaks at the ends of a document belong to the separator, and a
// document with nothing else in it is none. Each is handed on with the place of its first byte in the file.
class Splitter {
 public:
  std::function<void(std::string& document, size_t offset)> document;

  Splitter(const std::string& separator, size_t max_document) : separator(separator), limit(max_document) {}

  void begin(const std::string& file_name) { name = file_name, text.clear(), start = 0, searched = 0; }

  void add(const char* data, size_t bytes) {
    if (start == 0 && text.size() < 3) {  // a byte order mark is no text
      text.append(data, bytes);
      if (text.compare(0, 3, "\xEF\xBB\xBF") == 0) text.erase(0, 3), start = 3;
    } else {
      text.append(data, bytes);
    }
    size_t from = 0, length = 0;  // of the part not handed on yet; of the separator
    for (size_t at; (at = find_separator(from, &length)) != std::string::npos; from = at + length) {
      emit(from, at);
      searched = at + length;
    }
    text.erase(0, from);
    start += from;
    searched = searched > from ? searched - from : 0;
    const size_t document = std::min(text.find_first_not_of("\r\n"), text.size());
    if (text.size() - document > limit + separator.size() + 4) too_long(start + document);
  }
  void end() {
    if (separator.empty()) add("\n", 1);  // a last line of blanks is a blank line too
    emit(0, text.size());
    text.clear();
  }

 private:
  std::string separator, name, text;
  size_t limit;
  size_t start = 0;     // place in the file of text[0]
  size_t searched = 0;  // no separator begins before this byte of text

  // The next separator, its length, npos if it is not there or not complete yet. `searched` keeps a long
  // document from being looked through again for every piece that arrives.
  size_t find_separator(size_t from, size_t* length) {
    size_t at = std::max(from, searched);
    if (!separator.empty()) {
      *length = separator.size();
      const size_t found = text.find(separator, at);
      const size_t beginning = std::min(text.size(), separator.size() - 1);  // of one, at the end of the text
      if (found == std::string::npos) searched = std::max(at, text.size() - beginning);
      return found;
    }
    // A blank line: a line break, then nothing but blanks up to the next one.
    for (; (at = text.find('\n', at)) != std::string::npos; at++) {
      searched = at;
      const size_t next = text.find_first_not_of(" \t\r", at + 1);
      if (next == std::string::npos) return next;  // wait for the rest of the line
      if (text[next] != '\n') continue;
      *length = next - at;  // the second line break may begin the next blank line
      return at;
    }
    searched = text.size();
    return std::string::npos;
  }
  void emit(size_t from, size_t to) {
    while (from < to && (text[from] == '\n' || text[from] == '\r')) from++;
    while (from < to && (text[to - 1] == '\n' || text[to - 1] == '\r')) to--;
    if (from == to) return;
    if (to - from > limit) too_long(start + from);
    std::string one = text.substr(from, to - from);
    document(one, start + from);
  }
  [[noreturn]] void too_long(size_t offset) const {
    fatal(EXIT_ERROR,
          "%s: the document at byte %zu is longer than %zu bytes; expected a separator before that "
          "(see --separator, --max-document)",
          name.c_str(), offset, limit);
  }
};

// Checks that a document is UTF-8. Returns the place of the first byte that is not, npos if all is well; with
// `replace`, puts U+FFFD in the place of each such byte.
size_t check_utf8(std::string& text, bool replace) {
  size_t bad = std::string::npos;
  std::string clean;
  for (size_t at = 0; at < text.size();) {
    uint32_t code;
    const size_t length = static_cast<unsigned char>(text[at]) < 0x80 ? 1 : utf8_decode(text, at, &code);
    if (length == 0 && bad == std::string::npos) {
      bad = at;
      if (!replace) return bad;
      clean = text.substr(0, at);
    }
    if (length == 0)
      clean += "\xEF\xBF\xBD", at++;
    else if (bad != std::string::npos)
      clean.append(text, at, length), at += length;
    else
      at += length;
  }
  if (bad != std::string::npos) text = clean;
  return bad;
}

// ---- shards --------------------------------------------------------------------------------------------
constexpr const char* SPLITS[] = {"train", "val", "test"};

// Which split a document belongs to: the first 32 bits of the SHA-256 of its bytes, modulo 100. The highest
// numbers are test, those below them val. data/fineweb_edu.py has the same rule.
int split_of(const std::string& document, size_t val, size_t test) {
  const size_t number = sha256_prefix(document) % 100;
  return number >= 100 - test ? 2 : number >= 100 - test - val ? 1 : 0;
}

struct Split {
  size_t documents = 0, bytes = 0, tokens = 0;  // in all
  std::vector<std::string> names;               // of its shards, the one being written last
  std::unique_ptr<OutFile> shard;
  size_t shard_tokens = 0;  // in that one

  void add(const std::vector<uint16_t>& ids, const std::string& prefix, size_t limit) {
    if (shard && shard_tokens + ids.size() > limit) finish();
    if (!shard) {
      names.push_back(format("%s_%06zu.bin", prefix.c_str(), names.size()));
      shard = std::make_unique<OutFile>(names.back());
      const std::vector<char> header(SHARD_HEADER, 0);
      shard->write(header.data(), header.size());
    }
    shard->write(ids.data(), 2 * ids.size());
    shard_tokens += ids.size();
    tokens += ids.size();
  }
  void finish() {  // the header is known only now
    if (!shard) return;
    const int32_t header[] = {SHARD_MAGIC, SHARD_VERSION, int32_t(shard_tokens)};
    shard->patch(0, header, sizeof(header));
    shard->commit();
    shard.reset();
    shard_tokens = 0;
  }
};

// Whether a file is one of this program's: NAME_(train|val|test)_*.bin, finished or not.
bool is_shard_name(const std::string& file, const std::string& name) {
  for (const char* split : SPLITS)
    if (file.compare(0, name.size() + strlen(split) + 2, name + "_" + split + "_") == 0 &&
        file.find(".bin") != std::string::npos)
      return true;
  return false;
}
std::vector<std::string> shards_in(const std::string& folder, const std::string& name) {
  std::vector<std::string> found;
  DIR* dir = opendir(folder.c_str());
  if (!dir) fatal(EXIT_ERROR, "%s", file_error(folder, "open").c_str());
  while (const dirent* entry = readdir(dir))
    if (is_shard_name(entry->d_name, name)) found.push_back(entry->d_name);
  closedir(dir);
  return found;
}

// ---- main ----------------------------------------------------------------------------------------------
int main(int argc, char** argv) {
  const Settings s = parse_command_line(argc, argv);
  const Tokenizer tokenizer = s.tokenizer.empty() ? Tokenizer::bytes() : Tokenizer::load(s.tokenizer);

  for (const std::string& file : s.files)  // better now than after an hour
    if (file != "-" && access(file.c_str(), R_OK) != 0)
      fatal(EXIT_ERROR, "%s", file_error(file, "read").c_str());
  const std::string hidden = s.out + "/." + s.name + ".unfinished";
  make_folders(hidden);
  lock_folder(hidden);
  const std::vector<std::string> present = shards_in(s.out, s.name);
  if (!present.empty())
    fatal(EXIT_ERROR, "%s/%s: already there; remove the old shards, or choose another --out or --name",
          s.out.c_str(), present[0].c_str());
  for (const std::string& file : shards_in(hidden, s.name)) unlink((hidden + "/" + file).c_str());

  Split splits[3];
  size_t repaired = 0, left_out = 0;
  std::string file_name;
  Splitter splitter(s.separator, s.max_document);
  std::vector<uint16_t> ids;
  splitter.document = [&](std::string& document, size_t offset) {
    const size_t bad = check_utf8(document, s.bad_utf8 == BadUtf8::replace);
    if (bad != std::string::npos) {
      if (s.bad_utf8 == BadUtf8::error)
        fatal(EXIT_ERROR, "%s: byte %zu (0x%02x) is not UTF-8; see --bad-utf8", file_name.c_str(), offset + bad,
              unsigned(static_cast<unsigned char>(document[bad])));
      if (s.bad_utf8 == BadUtf8::skip) {
        left_out++;
        return;
      }
      repaired++;
    }
    const int which = split_of(document, s.val, s.test);
    ids.assign(1, uint16_t(tokenizer.eot));
    for (int id : tokenizer.encode(document)) ids.push_back(uint16_t(id));
    Split& split = splits[which];
    split.documents++;
    split.bytes += document.size();
    split.add(ids, hidden + "/" + s.name + "_" + SPLITS[which], s.shard_tokens);
  };

  std::vector<char> piece(1 << 20);
  for (const std::string& file : s.files) {
    file_name = file == "-" ? "standard input" : file;
    FILE* in = file == "-" ? stdin : fopen(file.c_str(), "rb");
    if (!in) fatal(EXIT_ERROR, "%s", file_error(file, "open").c_str());
    splitter.begin(file_name);
    while (const size_t n = fread(piece.data(), 1, piece.size(), in)) splitter.add(piece.data(), n);
    if (ferror(in)) fatal(EXIT_ERROR, "%s", file_error(file_name, "read").c_str());
    if (in != stdin) fclose(in);
    splitter.end();
  }

  size_t documents = 0;
  for (Split& split : splits) split.finish(), documents += split.documents;
  if (documents == 0)
    fatal(EXIT_ERROR, "no document in %zu file%s", s.files.size(), s.files.size() == 1 ? "" : "s");
  for (const Split& split : splits)
    for (const std::string& from : split.names) {
      const std::string to = s.out + from.substr(hidden.size());
      if (rename(from.c_str(), to.c_str()) != 0) fatal(EXIT_ERROR, "%s", file_error(to, "rename").c_str());
    }
  unlink((hidden + "/lock").c_str());
  rmdir(hidden.c_str());
  OutFile::sync_folder(s.out + "/");

  for (int i = 0; i < 3; i++)
    printf("%-5s %9zu documents %13zu bytes %12zu tokens in %zu shard%s\n", SPLITS[i], splits[i].documents,
           splits[i].bytes, splits[i].tokens, splits[i].names.size(), splits[i].names.size() == 1 ? "" : "s");
  if (repaired) printf("%zu documents held bytes that are not UTF-8, replaced by U+FFFD\n", repaired);
  if (left_out) printf("%zu documents held bytes that are not UTF-8 and were left out\n", left_out);
  printf("vocabulary %zu; train on them with --train '%s/%s_train_*.bin'%s%s\n", tokenizer.size, s.out.c_str(),
         s.name.c_str(), s.tokenizer.empty() ? "" : " --tokenizer ", s.tokenizer.c_str());
  return 0;
}
