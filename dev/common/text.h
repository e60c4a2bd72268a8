// text.h - numbers, UTF-8 and JSON, read strictly: safe on hostile input.
#pragma once
#include <algorithm>
#include <charconv>
#include <set>

#include "dev/common/errors.h"  // fatal, format

// ---- numbers in text -----------------------------------------------------------------------------------
// The whole text must be the number: no spaces, no sign on a count, no trailing junk, no overflow.
template <class Count>
bool parse_count(const std::string& text, Count* value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  return stop == end && error == std::errc();
}
inline bool parse_double(const std::string& text, double* value) {
  if (text.empty() || text.find_first_not_of("0123456789+-.eE") != std::string::npos) return false;
  char* end = nullptr;
  *value = strtod(text.c_str(), &end);
  return *end == '\0' && std::isfinite(*value);
}

// The shortest text that reads back as exactly this number: "0.1", not "0.10000000000000001".
template <class Real>
std::string number_text(Real x) {
  std::string text;
  for (int digits = 6; digits <= 17; digits++) {
    text = format("%.*g", digits, double(x));
    if (Real(strtod(text.c_str(), nullptr)) == x) break;
  }
  return text;
}

// ---- UTF-8 ---------------------------------------------------------------------------------------------
inline std::string utf8_encode(uint32_t code) {
  const auto six_bits = [&](int shift) { return char(0x80 | (code >> shift & 0x3F)); };
  if (code < 0x80) return {char(code)};
  if (code < 0x800) return {char(0xC0 | code >> 6), six_bits(0)};
  if (code < 0x10000) return {char(0xE0 | code >> 12), six_bits(6), six_bits(0)};
  return {char(0xF0 | code >> 18), six_bits(12), six_bits(6), six_bits(0)};
}
// Decodes the character at text[at]. Returns its length in bytes, 0 if there is no well-formed one.
inline size_t utf8_decode(const std::string& text, size_t at, uint32_t* code) {
  if (at >= text.size()) return 0;
  *code = static_cast<unsigned char>(text[at]);
  if (*code < 0x80) return 1;
  const size_t length = *code < 0xE0 ? 2 : *code < 0xF0 ? 3 : 4;
  *code &= 0x7Fu >> length;
  for (size_t i = at + 1; i < std::min(at + length, text.size()); i++) *code = *code << 6 | (text[i] & 0x3F);
  // Half a surrogate pair, past the last character, or written in another way than it should be.
  if ((*code >= 0xD800 && *code <= 0xDFFF) || *code > 0x10FFFF) return 0;
  return text.compare(at, length, utf8_encode(*code)) == 0 ? length : 0;
}

// The text cut into characters. A byte that is no part of UTF-8 is one of its own, with this code.
constexpr uint32_t NOT_UTF8 = UINT32_MAX;
struct Character {
  std::string bytes;
  uint32_t code;
};
inline std::vector<Character> characters(const std::string& text) {
  std::vector<Character> all;
  for (size_t at = 0; at < text.size(); at += all.back().bytes.size()) {
    uint32_t code;
    const size_t length = utf8_decode(text, at, &code);
    all.push_back(length > 0 ? Character{text.substr(at, length), code} : Character{{text[at]}, NOT_UTF8});
  }
  return all;
}

// Text for a screen: control characters, which a terminal may obey, and bytes that are not UTF-8 are spelt out;
// without unicode, all that is not ASCII.
inline std::string printable(const std::string& text, bool unicode = true) {
  std::string shown;
  for (const Character& c : characters(text)) {
    const bool control = c.code < 0x20 || (c.code >= 0x7F && c.code < 0xA0) || c.code == NOT_UTF8;
    if (c.code == '\n' || c.code == '\t' || (!control && (unicode || c.code < 0x80)))
      shown += c.bytes;
    else
      for (char byte : c.bytes) shown += format("\\x%02x", byte & 0xFF);
  }
  return shown;
}

// Any bytes as valid UTF-8, and back: what is not UTF-8 becomes HEX_MARK and two digits a byte.
constexpr const char* HEX_MARK = "bytes in hexadecimal:";

inline std::string escape_bytes(const std::string& text) {
  bool plain = text.compare(0, strlen(HEX_MARK), HEX_MARK) != 0;
  for (const Character& c : characters(text)) plain = plain && c.code != NOT_UTF8;
  if (plain) return text;

  std::string escaped = HEX_MARK;
  for (char byte : text) escaped += format("%02x", byte & 0xFF);
  return escaped;
}
inline std::string unescape_bytes(const std::string& text) {
  if (text.compare(0, strlen(HEX_MARK), HEX_MARK) != 0) return text;
  std::string bytes;
  for (size_t i = strlen(HEX_MARK); i < text.size(); i += 2)
    bytes += char(strtol(text.substr(i, 2).c_str(), nullptr, 16));
  return bytes;
}

// The text as one word of a shell's command line.
inline std::string shell_quote(const std::string& text) {
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
  if (!text.empty() && text.find_first_not_of(plain) == std::string::npos) return text;
  std::string out = "'";
  for (char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

// ---- JSON ----------------------------------------------------------------------------------------------
// Just enough for the headers of safetensors files and for the lines of our log.
struct Json {
  enum Type { word, number, string, array, object };
  Type type = word;                // null, true or false
  std::string text;                // string: its characters; number, word: as written
  std::vector<std::string> names;  // object: the names of its values, none twice
  std::vector<Json> values;        // array, object

  const Json* find(const std::string& name) const {  // null if this object has no such member
    for (size_t i = 0; i < names.size(); i++)
      if (names[i] == name) return &values[i];
    return nullptr;
  }
  // False unless this is a whole number from 0 to 2^64 - 1, written as such.
  bool as_count(size_t* n) const { return type == number && parse_count(text, n); }
};

class JsonParser {
 public:
  // Reads all of text into *value. Returns the error, empty when all is well.
  static std::string parse(const std::string& text, Json* value) {
    JsonParser parser(text);
    return error_of([&] {
      *value = parser.read_value(0);
      parser.skip_spaces();
      if (parser.at < text.size()) parser.fail("more text after the value");
    });
  }

 private:
  // Nesting costs stack and values cost memory far beyond their text, so both have limits.
  static constexpr size_t MAX_DEPTH = 32, MAX_VALUES = 1000000;

  const std::string& text;
  size_t at = 0, num_values = 0;

  explicit JsonParser(const std::string& t) : text(t) {}

  [[noreturn]] void fail(const char* what) const { fatal(EXIT_ERROR, "bad JSON at byte %zu: %s", at, what); }

  void skip_spaces() { at = std::min(text.find_first_not_of(" \t\r\n", at), text.size()); }
  bool next_is(char c) {
    skip_spaces();
    return at < text.size() && text[at] == c;
  }
  bool skip(char c) {  // c, if it comes next
    const bool there = next_is(c);
    at += there;
    return there;
  }

  Json read_value(size_t depth) {
    if (depth > MAX_DEPTH) fail("nested too deeply");
    if (++num_values > MAX_VALUES) fail("too many values");
    Json value;
    if (skip('{')) {
      value.type = Json::object;
      while (!skip('}')) {
        if (!value.names.empty() && !skip(',')) fail("expected ',' or '}'");
        if (!next_is('"')) fail("expected a name in quotes");
        value.names.push_back(read_string());
        if (!skip(':')) fail("expected ':' after a name");
        value.values.push_back(read_value(depth + 1));
      }
      const std::set<std::string> different(value.names.begin(), value.names.end());
      if (different.size() < value.names.size()) fail("a name stands twice in an object");
    } else if (skip('[')) {
      value.type = Json::array;
      while (!skip(']')) {
        if (!value.values.empty() && !skip(',')) fail("expected ',' or ']'");
        value.values.push_back(read_value(depth + 1));
      }
    } else if (next_is('"')) {
      value.type = Json::string;
      value.text = read_string();
    } else {
      value.text = text.substr(at, text.find_first_of(",]} \t\r\n", at) - at);
      double x;
      if (parse_double(value.text, &x))
        value.type = Json::number;
      else if (value.text != "null" && value.text != "true" && value.text != "false")
        fail(at < text.size() ? "expected a value" : "ends where a value should be");
      at += value.text.size();
    }
    return value;
  }

  std::string read_string() {  // from the quote on
    std::string out;
    for (at++; at < text.size() && text[at] != '"'; at++) {
      if (static_cast<unsigned char>(text[at]) < 0x20) fail("control character in a string");
      out += text[at] == '\\' ? read_escape() : std::string(1, text[at]);
    }
    if (at >= text.size()) fail("ends inside a string");
    at++;
    return out;
  }

  std::string read_escape() {  // from the backslash to the last letter
    static const std::string names = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
    if (++at >= text.size()) fail("ends inside a string");
    const size_t found = names.find(text[at]);
    if (found != std::string::npos) return meanings.substr(found, 1);
    if (text[at] != 'u') fail("unknown escape in a string");
    uint32_t code = read_hex();
    if (code >= 0xD800 && code < 0xDC00 && text.compare(at + 1, 2, "\\u") == 0) {  // the first of a pair
      at += 2;
      const uint32_t low = read_hex() - 0xDC00;
      if (low < 0x400) code = 0x10000 + ((code - 0xD800) << 10) + low;
    }
    if (code >= 0xD800 && code < 0xE000) fail("half a surrogate pair");
    return utf8_encode(code);
  }

  uint32_t read_hex() {  // from the u to the last of four digits
    uint32_t code = 0;
    const char* digits = text.data() + at + 1;
    if (text.size() - at < 5 || std::from_chars(digits, digits + 4, code, 16).ptr != digits + 4)
      fail("expected four hexadecimal digits");
    at += 4;
    return code;
  }
};

// The text in quotes. Sampled bytes may be no text at all: a byte that is not part of UTF-8 becomes U+FFFD.
inline std::string json_quote(const std::string& text) {
  std::string out = "\"";
  for (const Character& c : characters(text)) {
    if (c.code == NOT_UTF8)
      out += "\\ufffd";
    else if (c.code == '"' || c.code == '\\')
      out += "\\" + c.bytes;
    else if (c.code == '\n')
      out += "\\n";
    else if (c.code < 0x20)
      out += format("\\u%04x", c.code);
    else
      out += c.bytes;
  }
  return out + "\"";
}
