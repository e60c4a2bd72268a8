// text.h - numbers, UTF-8 and JSON, read strictly: safe on hostile input.
#pragma once
#include <algorithm>

#include "dev/common/errors.h"  // format

// ---- numbers in text -----------------------------------------------------------------------------------
// The whole text must be the number: no spaces, no sign on a count, no trailing junk, no overflow.
inline bool parse_count(const std::string& text, uint64_t* value) {
  if (text.empty()) return false;
  uint64_t n = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return false;
    const uint64_t digit = uint64_t(c - '0');
    if (n > (UINT64_MAX - digit) / 10) return false;
    n = n * 10 + digit;
  }
  *value = n;
  return true;
}
inline bool parse_double(const std::string& text, double* value) {
  if (text.empty() || text.find_first_not_of("0123456789+-.eE") != std::string::npos) return false;
  char* end = nullptr;
  const double x = strtod(text.c_str(), &end);
  if (*end != '\0' || !std::isfinite(x)) return false;
  *value = x;
  return true;
}

// The shortest text that reads back as exactly this number: "0.1", not "0.10000000000000001".
inline std::string number_text(double x) {
  std::string text;
  for (int digits = 6; digits <= 17; digits++) {
    text = format("%.*g", digits, x);
    if (strtod(text.c_str(), nullptr) == x) break;
  }
  return text;
}
inline std::string number_text(float x) {
  std::string text;
  for (int digits = 6; digits <= 9; digits++) {
    text = format("%.*g", digits, double(x));
    if (strtof(text.c_str(), nullptr) == x) break;
  }
  return text;
}

// ---- UTF-8 ---------------------------------------------------------------------------------------------
// Decodes the character at text[at]. Returns its length in bytes, 0 if there is no well-formed one.
inline size_t utf8_decode(const std::string& text, size_t at, uint32_t* code) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const uint32_t first = byte(at);
  if (at >= text.size() || (first >= 0x80 && first < 0xC2) || first > 0xF4) return 0;
  if (first < 0x80) {
    *code = first;
    return 1;
  }
  const size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  *code = first & (0x7Fu >> length);
  for (size_t i = 1; i < length; i++) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
    *code = *code << 6 | (byte(at + i) & 0x3F);
  }
  // The same character written longer than need be, half a surrogate pair, past the last character.
  static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool good = *code >= least[length] && (*code < 0xD800 || *code > 0xDFFF) && *code <= 0x10FFFF;
  return good ? length : 0;
}

// Text for a screen: control characters, which a terminal may obey, and bytes that are not UTF-8 are spelt out;
// without unicode, all that is not ASCII.
inline std::string printable(const std::string& text, bool unicode = true) {
  std::string shown;
  for (size_t at = 0; at < text.size();) {
    uint32_t code = 0;
    const size_t length = utf8_decode(text, at, &code);
    const bool control = code < 0x20 || (code >= 0x7F && code < 0xA0);
    if (length > 0 && (unicode || code < 0x80) && (!control || code == '\n' || code == '\t'))
      shown += text.substr(at, length);
    else
      for (size_t i = 0; i < std::max<size_t>(length, 1); i++) shown += format("\\x%02x", text[at + i] & 0xFF);
    at += std::max<size_t>(length, 1);
  }
  return shown;
}

// Any bytes as valid UTF-8, and back: a byte that is no part of UTF-8 becomes the private character U+10FE00 +
// byte. Other text stays as it is, but for these characters, whose bytes are written so too.
constexpr uint32_t BYTE_CHARACTERS = 0x10FE00;

inline std::string escape_bytes(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    uint32_t code = 0;
    const size_t length = utf8_decode(text, i, &code);
    const bool plain = length > 0 && (code < BYTE_CHARACTERS || code > BYTE_CHARACTERS + 0xFF);
    const size_t bytes = std::max<size_t>(length, 1);
    for (size_t end = i + bytes; i < end; i++) {
      const unsigned byte = static_cast<unsigned char>(text[i]);
      out += plain ? std::string(1, text[i])
                   : std::string("\xF4\x8F") + char(0xB8 | byte >> 6) + char(0x80 | (byte & 0x3F));
    }
  }
  return out;
}
inline std::string unescape_bytes(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    uint32_t code = 0;
    const size_t length = std::max<size_t>(utf8_decode(text, i, &code), 1);
    if (code >= BYTE_CHARACTERS && code <= BYTE_CHARACTERS + 0xFF)
      out += char(code - BYTE_CHARACTERS);
    else
      out.append(text, i, length);
    i += length;
  }
  return out;
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
// Just enough for the headers of safetensors files and for the lines of our log: one value read from a string,
// and strings quoted for writing.
struct Json {
  enum Type { null, boolean, number, string, array, object };
  Type type = null;
  std::string text;                // string: its characters; number, boolean: as written
  std::vector<std::string> names;  // object: the names of its values, none twice
  std::vector<Json> values;        // array, object

  const Json* find(const std::string& name) const {  // null if this object has no such member
    for (size_t i = 0; i < names.size(); i++)
      if (names[i] == name) return &values[i];
    return nullptr;
  }
  bool as_count(size_t* n) const {  // false unless a whole number from 0 to 2^64 - 1, written as such
    uint64_t value = 0;
    const bool ok = type == number && parse_count(text, &value);
    if (ok) *n = value;
    return ok;
  }
  bool as_double(double* x) const { return type == number && parse_double(text, x); }
};

class JsonParser {
 public:
  // Reads all of text into *value. Returns the error, empty when all is well.
  static std::string parse(const std::string& text, Json* value) {
    JsonParser parser(text);
    *value = Json();
    if (parser.read_value(*value, 0)) {
      parser.skip_spaces();
      if (parser.at < text.size()) parser.fail("more text after the value");
    }
    return parser.error;
  }

 private:
  // Nesting costs stack and values cost memory far beyond their text, so both have limits.
  static constexpr size_t MAX_DEPTH = 32, MAX_VALUES = 1000000;

  const std::string& text;
  size_t at = 0, num_values = 0;
  std::string error;

  explicit JsonParser(const std::string& t) : text(t) {}

  bool fail(const char* what) {
    if (error.empty()) error = format("bad JSON at byte %zu: %s", at, what);
    return false;
  }
  void skip_spaces() {
    while (at < text.size() && strchr(" \t\r\n", text[at]) && text[at] != '\0') at++;
  }
  bool next_is(char c) {  // skips spaces, then c if it is there
    skip_spaces();
    if (at >= text.size() || text[at] != c) return false;
    at++;
    return true;
  }

  bool read_value(Json& value, size_t depth) {
    if (depth > MAX_DEPTH) return fail("nested too deeply");
    if (++num_values > MAX_VALUES) return fail("too many values");
    skip_spaces();
    if (at >= text.size()) return fail("ends where a value should be");
    const char c = text[at];
    if (c == '{') return read_object(value, depth);
    if (c == '[') return read_array(value, depth);
    if (c == '"') return value.type = Json::string, read_string(value.text);
    if (c == '-' || (c >= '0' && c <= '9')) return read_number(value);
    return read_word(value);
  }

  bool read_object(Json& value, size_t depth) {
    value.type = Json::object;
    at++;  // the brace
    if (next_is('}')) return true;
    do {
      value.names.emplace_back();
      value.values.emplace_back();
      skip_spaces();
      if (at >= text.size() || text[at] != '"') return fail("expected a name in quotes");
      if (!read_string(value.names.back())) return false;
      if (!next_is(':')) return fail("expected ':' after a name");
      if (!read_value(value.values.back(), depth + 1)) return false;
    } while (next_is(','));
    if (!next_is('}')) return fail("expected ',' or '}'");
    std::vector<std::string> sorted = value.names;
    std::sort(sorted.begin(), sorted.end());
    const bool twice = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
    return !twice || fail("a name stands twice in an object");
  }

  bool read_array(Json& value, size_t depth) {
    value.type = Json::array;
    at++;  // the bracket
    if (next_is(']')) return true;
    do {
      value.values.emplace_back();
      if (!read_value(value.values.back(), depth + 1)) return false;
    } while (next_is(','));
    return next_is(']') || fail("expected ',' or ']'");
  }

  bool read_number(Json& value) {
    value.type = Json::number;
    const size_t begin = at;
    while (at < text.size() && strchr("0123456789+-.eE", text[at]) && text[at] != '\0') at++;
    value.text = text.substr(begin, at - begin);
    double x;
    return parse_double(value.text, &x) || fail("not a number");
  }

  bool read_word(Json& value) {
    for (const char* word : {"true", "false", "null"}) {
      if (text.compare(at, strlen(word), word) != 0) continue;
      at += strlen(word);
      value.type = word[0] == 'n' ? Json::null : Json::boolean;
      value.text = word;
      return true;
    }
    return fail("expected a value");
  }

  bool read_string(std::string& out) {
    at++;  // the quote
    while (at < text.size() && text[at] != '"') {
      const unsigned char c = static_cast<unsigned char>(text[at]);
      if (c < 0x20) return fail("control character in a string");
      if (c != '\\')
        out += text[at++];
      else if (!read_escape(out))
        return false;
    }
    return at++ < text.size() || fail("ends inside a string");
  }

  bool read_escape(std::string& out) {
    static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    if (++at >= text.size()) return fail("ends inside a string");
    const char* found = text[at] != '\0' ? strchr(names, text[at]) : nullptr;
    if (found) return out += meanings[found - names], at++, true;
    if (text[at] != 'u') return fail("unknown escape in a string");
    at++;
    unsigned code, low;
    if (!read_hex4(&code)) return false;
    if (code >= 0xDC00 && code < 0xE000) return fail("half a surrogate pair");
    if (code >= 0xD800 && code < 0xDC00) {  // beyond U+FFFF: a pair of escapes
      if (text.compare(at, 2, "\\u") != 0) return fail("half a surrogate pair");
      at += 2;
      if (!read_hex4(&low)) return false;
      if (low < 0xDC00 || low > 0xDFFF) return fail("half a surrogate pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(out, code);
    return true;
  }

  bool read_hex4(unsigned* code) {
    *code = 0;
    for (int i = 0; i < 4; i++, at++) {
      static const char digits[] = "0123456789abcdefABCDEF";
      const char* found = at < text.size() && text[at] != '\0' ? strchr(digits, text[at]) : nullptr;
      if (!found) return fail("expected four hexadecimal digits");
      const unsigned digit = unsigned(found - digits);
      *code = *code * 16 + (digit < 16 ? digit : digit - 6);
    }
    return true;
  }

  static void append_utf8(std::string& out, unsigned code) {
    if (code < 0x80) {
      out += char(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  // bytes that follow the first
    static const unsigned lead[] = {0, 0xC0, 0xE0, 0xF0};
    out += char(lead[more] | code >> 6 * more);
    for (int i = more - 1; i >= 0; i--) out += char(0x80 | (code >> 6 * i & 0x3F));
  }
};

// The text in quotes. Sampled bytes may be no text at all: a byte that is not part of UTF-8 becomes U+FFFD.
inline std::string json_quote(const std::string& text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    uint32_t code;
    const size_t length = utf8_decode(text, i, &code);
    const char c = text[i];
    if (length == 0)
      out += "\\ufffd";
    else if (c == '"' || c == '\\')
      out += '\\', out += c;
    else if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (static_cast<unsigned char>(c) < 0x20)
      out += format("\\u%04x", unsigned(c));
    else
      out.append(text, i, length);
    i += std::max<size_t>(length, 1);
  }
  return out + "\"";
}
