// tokenizer.h - text to tokens and back: single bytes, or byte-pair encoding as GPT-2 has it.
//
// A tokenizer file is 256 little-endian uint32, [0] = 20240328, [1] = 2, [2] = number of tokens, [3] = the
// end-of-text token; then each token as one length byte and its bytes. It need not say which pairs were merged:
// a token's number is also its place in the order of merges. So encoding cuts the text into words, starts from
// single bytes, and keeps joining the two neighbours that make the token of the lowest number.
#pragma once
#include <queue>
#include <string_view>
#include <unordered_map>

#include "check.h"    // fatal, format
#include "files.h"    // InFile
#include "unicode.h"  // utf8_decode, char_class

class Tokenizer {
 public:
  size_t size = 0;  // number of tokens, end-of-text included
  int eot = 0;      // stands in front of every document; no text encodes to it

  // Every byte its own token, and 256 for end-of-text.
  static Tokenizer bytes() {
    Tokenizer tokenizer;
    for (int b = 0; b < 256; b++) tokenizer.tokens.push_back(std::string(1, char(b)));
    tokenizer.tokens.push_back("<|endoftext|>");
    tokenizer.finish(256);
    return tokenizer;
  }
  static Tokenizer load(const std::string& path) {  // fatal if the file is bad
    Tokenizer tokenizer;
    fatal_if(tokenizer.try_load(path));
    return tokenizer;
  }
  // Returns the error, empty when all is well.
  std::string try_load(const std::string& path) {
    InFile file;
    std::string error = file.open(path);
    if (!error.empty()) return error;
    const char* name = path.c_str();
    if (file.size < HEADER || file.size > HEADER + MAX_TOKENS * 256)
      return format("%s: %zu bytes, expected %zu to %zu for a tokenizer", name, file.size, HEADER,
                    HEADER + MAX_TOKENS * 256);
    std::string data(file.size, '\0');
    error = file.read(0, file.size, &data[0]);
    if (!error.empty()) return error;
    uint32_t header[4];
    memcpy(header, data.data(), sizeof(header));
    if (header[0] != MAGIC) return format("%s: not a tokenizer: magic %u, expected %u", name, header[0], MAGIC);
    if (header[1] != VERSION) return format("%s: tokenizer version %u, expected %u", name, header[1], VERSION);
    if (header[2] < 2 || header[2] > MAX_TOKENS)
      return format("%s: %u tokens, expected 2 to %zu", name, header[2], MAX_TOKENS);
    if (header[3] >= header[2]) return format("%s: end-of-text is token %u of %u", name, header[3], header[2]);
    size_t at = HEADER;
    for (uint32_t id = 0; id < header[2]; id++) {
      const size_t length = at < data.size() ? static_cast<unsigned char>(data[at]) : 0;
      if (at + 1 + length > data.size())
        return format("%s: cut short: ends inside token %u of %u", name, id, header[2]);
      tokens.push_back(data.substr(at + 1, length));
      at += 1 + length;
    }
    if (at != data.size())
      return format("%s: %zu bytes, expected %zu for its %u tokens", name, data.size(), at, header[2]);
    finish(int(header[3]));
    return "";
  }

  // The bytes of a token; not always whole characters. A number past the tokenizer (a model's vocabulary may be
  // rounded up) is shown as itself.
  std::string decode(int id) const {
    return id >= 0 && size_t(id) < size ? tokens[size_t(id)] : format("<|%d|>", id);
  }
  std::string decode(const std::vector<int>& ids) const {
    std::string text;
    for (int id : ids) text += decode(id);
    return text;
  }

  // Fatal if a byte of the text has no token. "<|endoftext|>" in the text is text like any other.
  std::vector<int> encode(const std::string& text) const {
    std::vector<int> ids;
    for (size_t at = 0; at < text.size();) {
      const size_t length = longest == 1 ? 1 : word_length(text, at);
      encode_word(std::string_view(text).substr(at, length), ids);
      at += length;
    }
    return ids;
  }

  Tokenizer() = default;  // number_of looks into tokens: moving the object keeps it valid, copying would not
  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;

 private:
  static constexpr uint32_t MAGIC = 20240328, VERSION = 2;
  static constexpr size_t HEADER = 1024, MAX_TOKENS = 65536;

  std::vector<std::string> tokens;                      // by number
  std::unordered_map<std::string_view, int> number_of;  // of each token that text can become
  size_t longest = 0;                                   // bytes of the longest such token

  void finish(int end_of_text) {
    size = tokens.size();
    eot = end_of_text;
    for (size_t id = 0; id < size; id++) {
      if (int(id) == eot || tokens[id].empty()) continue;
      number_of.emplace(tokens[id], int(id));  // of two equal tokens the first stays
      longest = std::max(longest, tokens[id].size());
    }
  }
  int find(std::string_view bytes) const {  // -1 if they are no token
    if (bytes.size() > longest) return -1;
    const auto found = number_of.find(bytes);
    return found == number_of.end() ? -1 : found->second;
  }

  // ---- words: GPT-2's pattern, by hand
  //   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  // A byte that is not part of UTF-8 counts as a character of its own that is no letter, number or space.

  struct Char {
    CharClass type;
    size_t length;
  };
  static Char char_at(const std::string& text, size_t at) {
    uint32_t code = 0;
    const size_t length = utf8_decode(text, at, &code);
    return length > 0 ? Char{char_class(code), length} : Char{CharClass::other, 1};
  }
  static size_t word_length(const std::string& text, size_t at) {
    if (text[at] == '\'')
      for (const char* ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
        if (text.compare(at, strlen(ending), ending) == 0) return strlen(ending);

    // A run of one class, with the one blank before it.
    const size_t blank = text[at] == ' ' && at + 1 < text.size() ? 1 : 0;
    const CharClass type = char_at(text, at + blank).type;
    size_t end = at + blank;
    if (type != CharClass::space) {
      while (end < text.size() && char_at(text, end).type == type) end += char_at(text, end).length;
      return end - at;
    }
    // A run of spaces. Its last character is left to the word that follows, unless it is all there is.
    size_t last = at;
    end = at;
    while (end < text.size() && char_at(text, end).type == type) {
      last = end;
      end += char_at(text, end).length;
    }
    return end < text.size() && last > at ? last - at : end - at;
  }

  // ---- one word: joining neighbours
  struct Pair {  // two neighbouring parts that make a token together
    int id;
    size_t left, right, end;                   // parts left .. right-1 and right .. end-1, in bytes of the word
    bool operator<(const Pair& other) const {  // the queue hands out the largest: lowest number, then leftmost
      return id != other.id ? id > other.id : left > other.left;
    }
  };

  // A queue of candidate pairs in place of a search for the best one each time: a word may be a megabyte long.
  void encode_word(std::string_view word, std::vector<int>& ids) const {
    const int whole = find(word);
    if (whole >= 0) {
      ids.push_back(whole);
      return;
    }

    const size_t n = word.size(), NONE = SIZE_MAX;
    // By a part's first byte: where it ends, and where the part before it starts.
    std::vector<size_t> end(n), previous(n);
    std::priority_queue<Pair> queue;
    const auto consider = [&](size_t left) {  // the part at `left` and the one after it
      if (left == NONE || end[left] == n) return;
      const size_t right = end[left];
      const int id = find(word.substr(left, end[right] - left));
      if (id >= 0) queue.push({id, left, right, end[right]});
    };
    for (size_t i = 0; i < n; i++) end[i] = i + 1, previous[i] = i > 0 ? i - 1 : NONE;
    for (size_t i = 0; i < n; i++) consider(i);
    while (!queue.empty()) {
      const Pair pair = queue.top();
      queue.pop();
      // Either part may have been joined with another since; a part that was swallowed has end NONE.
      if (end[pair.left] != pair.right || end[pair.right] != pair.end) continue;
      end[pair.left] = pair.end;
      end[pair.right] = NONE;
      if (pair.end < n) previous[pair.end] = pair.left;
      consider(pair.left);
      consider(previous[pair.left]);
    }
    for (size_t i = 0; i < n; i = end[i]) {
      const int id = find(word.substr(i, end[i] - i));
      const int byte = static_cast<unsigned char>(word[i]);
      if (id < 0) fatal(EXIT_ERROR, "tokenizer: no token for byte %d", byte);
      ids.push_back(id);
    }
  }
};
