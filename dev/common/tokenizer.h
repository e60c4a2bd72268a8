// tokenizer.h - text to tokens and back: single bytes, or byte-pair encoding as GPT-2 has it.
//
// A tokenizer file is 256 little-endian uint32, [0] = 20240328, [1] = 2, [2] = number of tokens, [3] = the
// end-of-text token; then each token as one length byte and its bytes. It need not say which pairs were merged:
// a token's number is also its place in the order of merges. So encoding cuts the text into words, starts from
// single bytes, and keeps joining the two neighbours that make the token of the lowest number.
#pragma once
#include <algorithm>
#include <queue>
#include <sstream>
#include <string_view>
#include <unordered_map>

#include "dev/common/errors.h"  // fatal, format
#include "dev/common/files.h"   // InFile
#include "dev/common/text.h"    // utf8_decode

// ---- classes of characters -----------------------------------------------------------------------------
enum class CharClass : uint8_t { letter, number, space, other };

// General categories L and N of Unicode 17, and \s, as pairs from 0 upwards: the gap since the last range's
// end, the range's length. To make them anew, in Python:
//   import regex
//   for category in r"\p{L}", r"\p{N}", r"\s":
//     inside = [bool(regex.match(category, chr(c))) for c in range(0x110000)] + [False]
//     edges = [c for c in range(1, 0x110001) if inside[c] != inside[c - 1]]
//     print(*[b - a for a, b in zip([0] + edges, edges)])
constexpr const char* UNICODE_LETTERS =
    "65 26 6 26 47 1 10 1 4 1 5 23 1 31 1 458 4 12 14 5 7 1 1 1 129 5 1 2 2 4 1 1 6 1 1 3 1 1 1 20 1 83 1 139 "
    "8 166 1 38 2 1 6 41 71 27 4 4 45 43 35 2 1 99 1 1 15 2 7 2 10 3 2 1 16 1 1 30 29 89 11 1 24 33 9 2 4 1 5 "
    "22 4 1 9 1 3 1 23 25 7 11 5 24 1 7 16 42 58 54 3 1 18 1 7 10 15 16 4 8 2 2 2 22 1 7 1 1 3 4 3 1 16 1 13 "
    "2 1 3 14 2 10 1 8 6 4 2 2 22 1 7 1 2 1 2 1 2 31 4 1 1 19 3 16 9 1 3 1 22 1 7 1 2 1 5 3 1 18 1 15 2 23 1 "
    "11 8 2 2 2 22 1 7 1 2 1 5 3 1 30 2 1 3 15 1 17 1 1 6 3 3 1 4 3 2 1 1 1 2 3 2 3 3 3 12 22 1 52 8 1 3 1 23 "
    "1 16 3 1 26 3 1 2 2 2 30 1 4 8 1 3 1 23 1 10 1 5 3 1 30 3 1 2 15 2 17 9 1 3 1 41 2 1 16 1 5 3 8 3 24 6 5 "
    "18 3 24 1 9 1 1 2 7 58 48 1 2 12 7 58 2 1 1 1 5 1 24 1 1 1 10 1 2 9 1 2 5 1 1 21 4 32 1 63 8 1 36 27 5 "
    "115 43 20 1 16 6 4 4 3 1 3 2 7 3 4 13 12 1 17 38 1 1 5 1 2 43 1 333 1 4 2 7 1 1 1 4 2 41 1 4 2 33 1 4 2 "
    "7 1 1 1 4 2 15 1 57 1 4 2 67 37 16 16 86 2 6 3 620 2 17 1 26 5 75 6 8 7 18 13 19 14 18 14 13 1 3 15 52 "
    "35 1 4 1 67 89 7 5 2 34 1 1 5 70 10 31 49 30 2 5 11 44 4 26 54 23 9 53 82 1 93 47 17 8 54 30 13 2 10 44 "
    "26 36 41 3 10 36 2 11 5 43 2 3 41 4 1 6 1 2 3 1 5 192 64 278 2 6 2 38 2 6 2 8 1 1 1 1 1 1 1 31 2 53 1 7 "
    "1 1 3 3 1 7 3 4 2 6 4 13 5 3 1 7 116 1 13 1 16 13 101 1 4 1 2 10 1 1 3 5 6 1 1 1 1 1 1 4 1 11 2 4 5 5 4 "
    "1 52 2 2683 229 6 4 3 2 12 38 1 1 5 1 2 56 7 1 16 23 9 7 1 7 1 7 1 7 1 7 1 7 1 7 1 7 80 1 469 2 42 5 5 2 "
    "4 86 6 3 1 90 1 4 5 43 1 94 17 32 48 16 512 6592 64 22157 67 46 2 269 3 16 10 2 20 47 16 31 2 70 49 9 2 "
    "103 2 82 20 17 1 3 1 4 1 23 29 52 14 50 62 6 3 1 1 2 11 28 10 23 25 29 7 47 28 1 16 5 1 10 10 5 1 41 23 "
    "3 1 8 20 23 3 1 3 50 1 1 3 2 2 5 2 1 1 1 24 3 2 11 7 3 12 6 2 6 2 6 9 7 1 7 1 43 1 14 6 115 29 11172 12 "
    "23 4 49 8452 366 2 106 38 7 12 5 5 1 1 10 1 13 1 5 1 1 1 2 1 2 1 108 33 363 18 64 2 54 40 12 116 5 1 135 "
    "36 26 6 26 11 89 3 6 2 6 2 6 2 3 35 12 1 26 1 19 1 2 1 15 2 14 34 123 389 29 3 49 47 32 13 20 1 8 6 38 "
    "10 30 2 36 4 8 48 158 18 36 4 36 4 40 8 52 12 11 1 15 1 7 1 2 1 11 1 15 1 7 1 2 3 52 12 311 9 22 10 8 24 "
    "6 1 42 1 9 69 6 2 1 1 44 1 2 3 1 2 23 10 23 9 31 65 19 1 2 10 22 10 26 6 26 38 56 6 2 64 1 15 4 1 3 1 29 "
    "42 29 3 29 35 8 1 28 27 54 10 22 10 19 13 18 110 73 55 51 13 51 13 36 38 28 9 23 250 42 6 2 16 6 56 29 "
    "10 1 8 22 42 18 46 21 27 23 12 53 57 2 2 1 13 45 32 25 26 36 29 1 2 1 8 35 3 1 12 48 14 4 21 1 1 1 35 18 "
    "1 25 19 2 63 7 1 1 1 4 1 15 1 10 7 47 38 8 2 2 2 22 1 7 1 2 1 5 3 1 18 1 12 5 30 10 1 1 2 1 1 38 1 1 25 "
    "1 1 1 44 53 18 4 20 3 30 48 20 2 1 1 184 47 41 4 36 48 20 1 59 43 13 1 71 27 37 7 185 44 116 64 31 8 2 1 "
    "2 8 1 2 1 24 15 1 1 1 94 8 2 39 16 1 1 1 28 1 10 40 7 1 21 1 11 46 19 1 18 73 199 33 31 9 1 37 17 1 49 "
    "30 112 7 1 2 1 38 21 1 25 6 1 2 1 32 14 1 23 44 260 19 15 1 1 13 1 34 124 1 79 922 230 196 2636 97 15 "
    "1072 17 6 25 3995 5 583 6841 30 1762 569 7 31 17 79 17 30 18 48 16 4 31 21 5 19 432 45 211 64 32 25 2 25 "
    "44 75 5 1 66 13 64 2 1 1 14 2 12 7382 41 32 97 115 8701 4 1 7 1 2 1 291 15 1 29 3 2 1 14 4 8 396 2308 "
    "107 5 13 3 9 7 10 5990 85 1 71 1 2 2 1 2 2 2 4 1 12 1 1 1 7 1 65 1 4 2 8 1 7 1 28 1 4 1 5 1 1 3 7 1 340 "
    "2 25 1 25 1 31 1 25 1 31 1 25 1 31 1 25 1 31 1 25 1 8 1844 31 6 6 261 62 146 45 10 7 16 1 321 30 18 44 "
    "484 28 228 30 2 1 207 31 1 3 1 2 1 7 2 5 9 2 224 7 1 4 1 2 1 15 1 197 59 68 7 1 1204 4 1 27 1 2 1 1 2 1 "
    "1 10 1 4 1 1 1 1 6 1 4 1 1 1 1 1 1 3 1 2 1 1 2 1 1 1 1 1 1 1 1 1 1 2 1 1 2 4 1 7 1 4 1 4 1 1 1 10 1 17 5 "
    "3 1 5 1 17 4420 42720 32 4382 2 5774 2 7473 15 622 2466 542 1506 4939 5 8490";
constexpr const char* UNICODE_NUMBERS =
    "48 10 120 2 5 1 2 3 1441 10 134 10 198 10 412 10 118 10 4 6 108 10 118 10 118 10 2 6 110 13 115 10 8 7 "
    "103 10 104 7 7 19 109 10 96 10 118 10 70 20 268 10 70 10 719 20 881 3 239 10 6 10 22 10 300 10 128 11 "
    "165 10 6 10 182 10 86 10 134 10 6 10 1046 1 3 6 6 10 198 51 2 5 726 60 78 22 630 30 1385 1 777 1 25 9 14 "
    "3 343 4 138 10 30 8 1 15 32 10 39 15 29536 10 188 10 320 6 154 10 38 10 198 10 22 10 86 10 406 10 21270 "
    "10 493 45 12 57 17 2 341 27 36 4 29 1 8 1 134 5 202 10 942 8 25 7 39 9 75 5 22 6 160 2 2 16 2 46 64 9 52 "
    "2 30 3 75 5 104 8 24 8 41 7 330 6 48 10 6 10 278 31 158 10 42 4 112 7 134 30 128 10 60 10 144 10 7 20 "
    "251 10 342 10 118 10 374 10 102 10 6 20 76 12 420 19 93 10 662 10 86 29 227 10 70 10 54 10 358 10 102 21 "
    "1067 111 15553 10 2342 10 86 10 134 10 1 7 526 10 262 23 349 3 23801 10 1478 20 12 20 108 25 1109 50 "
    "2368 10 422 10 502 10 247 10 716 9 128 10 791 59 1 3 1 4 76 45 1 15 962 13 2787 10";
constexpr const char* UNICODE_SPACES = "9 5 18 1 100 1 26 1 5599 1 2431 11 29 2 5 1 47 1 4000 1";

inline CharClass char_class(uint32_t code) {
  // A table of the classes of U+0000 .. U+3FFFF, unpacked once; nothing past it is a letter, number or space.
  static const std::vector<CharClass> classes = [] {
    std::vector<CharClass> table(0x40000, CharClass::other);
    const auto fill = [&](const char* pairs, CharClass value) {
      std::istringstream numbers(pairs);
      size_t at = 0;
      for (size_t gap, length; numbers >> gap >> length; at += gap + length)
        std::fill_n(table.begin() + std::ptrdiff_t(at + gap), length, value);
    };
    fill(UNICODE_LETTERS, CharClass::letter);
    fill(UNICODE_NUMBERS, CharClass::number);
    fill(UNICODE_SPACES, CharClass::space);
    return table;
  }();
  return code < classes.size() ? classes[code] : CharClass::other;
}

// ---- the tokenizer -------------------------------------------------------------------------------------
class Tokenizer {
 public:
  size_t size = 0;  // number of tokens, end-of-text included
  int eot = 0;      // stands in front of every document; no text encodes to it

  // Every byte its own token, and 256 for end-of-text.
  static Tokenizer bytes() {
    std::vector<std::string> tokens;
    for (int b = 0; b < 256; b++) tokens.push_back(std::string(1, char(b)));
    tokens.push_back("<|endoftext|>");
    return Tokenizer(tokens, 256);
  }
  static Tokenizer load(const std::string& path) {  // fatal if the file is bad
    const InFile file(path);
    const char* name = path.c_str();
    uint32_t header[4];
    file.read(0, sizeof(header), header);
    const auto [magic, version, count, eot] = header;
    if (magic != MAGIC) fatal(EXIT_ERROR, "%s: not a tokenizer: magic %u, expected %u", name, magic, MAGIC);
    if (version != VERSION) fatal(EXIT_ERROR, "%s: tokenizer version %u, expected %u", name, version, VERSION);
    if (count < 2 || count > MAX_TOKENS)
      fatal(EXIT_ERROR, "%s: %u tokens, expected 2 to %zu", name, count, MAX_TOKENS);
    if (eot >= count) fatal(EXIT_ERROR, "%s: end-of-text is token %u of %u", name, eot, count);

    const std::string data = file.read_all();
    std::vector<std::string> tokens;
    size_t at = HEADER;
    for (uint32_t id = 0; id < count; id++) {
      const size_t length = at < data.size() ? static_cast<unsigned char>(data[at]) : 0;
      if (at + 1 + length > data.size())
        fatal(EXIT_ERROR, "%s: cut short: ends inside token %u of %u", name, id, count);
      tokens.push_back(data.substr(at + 1, length));
      at += 1 + length;
    }
    if (at != data.size())
      fatal(EXIT_ERROR, "%s: %zu bytes, expected %zu for its %u tokens", name, data.size(), at, count);
    return Tokenizer(tokens, int(eot));
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

  Tokenizer(const std::vector<std::string>& list, int end_of_text)
      : size(list.size()), eot(end_of_text), tokens(list) {
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
    const bool blank = text[at] == ' ' && at + 1 < text.size();
    const CharClass type = char_at(text, at + blank).type;
    size_t end = at + (blank && type != CharClass::space), last = end;
    for (Char c; end < text.size() && (c = char_at(text, end)).type == type; end += c.length) last = end;

    // Of a run of spaces the last character is left to the word that follows, unless it is all there is.
    const bool leaves_one = type == CharClass::space && end < text.size() && last > at;
    return (leaves_one ? last : end) - at;
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
