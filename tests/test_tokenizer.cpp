// test_tokenizer.cpp - text to tokens and back, against a slow encoder written from GPT-2's definition.
#include <algorithm>
#include <cctype>
#include <functional>
#include <sstream>

#include "dev/common/text.h"    // json_quote: names of cases on one line
#include "dev/common/random.h"  // philox, permute
#include "dev/common/tokenizer.h"
#include "tests/check.h"
#include "tests/child.h"

// ---- made-up tokenizers --------------------------------------------------------------------------------

static std::string tokenizer_bytes(const std::vector<std::string>& tokens, uint32_t eot,
                                   uint32_t magic = 20240328, uint32_t version = 2, int64_t count = -1) {
  std::vector<uint32_t> header(256);
  header[0] = magic, header[1] = version, header[3] = eot;
  header[2] = uint32_t(count >= 0 ? count : int64_t(tokens.size()));
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  for (const std::string& token : tokens) bytes += char(token.size()) + token;
  return bytes;
}

// The 256 bytes in an order of their own, as GPT-2 has them, then the given tokens, then end-of-text.
static std::vector<std::string> vocabulary(const std::vector<std::string>& merges) {
  std::vector<std::string> tokens;
  for (uint64_t i = 0; i < 256; i++) tokens.push_back(std::string(1, char(permute(1, 0, 256, i))));
  tokens.insert(tokens.end(), merges.begin(), merges.end());
  tokens.push_back("<|endoftext|>");
  return tokens;
}

static uint64_t dice(uint64_t i, uint64_t sides) { return philox(17, STREAM_TEST, i).x[0] % sides; }

static std::string random_text(uint64_t stream, size_t length, const std::string& letters) {
  std::string text;
  for (size_t i = 0; i < length; i++) text += letters[philox(stream, STREAM_TEST, i).x[1] % letters.size()];
  return text;
}

// Merges as training makes them: two tokens that stand next to each other somewhere, joined.
static std::vector<std::string> random_merges(size_t n, const std::string& letters) {
  std::vector<std::string> parts, merges;
  for (char c : letters) parts.push_back(std::string(1, c));
  for (uint64_t i = 0; merges.size() < n; i++) {
    const std::string token = parts[dice(2 * i, parts.size())] + parts[dice(2 * i + 1, parts.size())];
    if (token.size() > 9 || std::find(parts.begin(), parts.end(), token) != parts.end()) continue;
    parts.push_back(token);
    merges.push_back(token);
  }
  return merges;
}

// ---- the slow encoder ----------------------------------------------------------------------------------

static int number_of(const std::vector<std::string>& tokens, const std::string& token) {
  const auto end = tokens.end() - 1;  // end-of-text is not for text
  const auto found = std::find(tokens.begin(), end, token);
  return found == end ? -1 : int(found - tokens.begin());
}

// One word: in every round, of all neighbours that together are a token, join those of the lowest number.
static void slow_word(const std::vector<std::string>& tokens, const std::string& word, std::vector<int>& ids) {
  std::vector<std::string> parts;
  for (char c : word) parts.push_back(std::string(1, c));
  for (;;) {
    int best = -1;
    size_t at = 0;
    for (size_t i = 0; i + 1 < parts.size(); i++) {
      const int id = number_of(tokens, parts[i] + parts[i + 1]);
      if (id >= 0 && (best < 0 || id < best)) best = id, at = i;
    }
    if (best < 0) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + std::ptrdiff_t(at) + 1);
  }
  for (const std::string& part : parts) ids.push_back(number_of(tokens, part));
}

// Length of what the pattern matches at the start of ASCII text, one alternative after the other:
//   's|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+
static size_t slow_word_length(const std::string& text) {
  for (const char* ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
    if (text.compare(0, strlen(ending), ending) == 0) return strlen(ending);
  using Kind = std::function<int(int)>;
  const auto run = [&](size_t at, const Kind& is) {  // characters from `at` that are
    size_t n = 0;
    while (at + n < text.size() && is(text[at + n])) n++;
    return n;
  };
  const auto mark = [](int c) { return int(!isalnum(c) && !isspace(c)); };
  const size_t blank = text[0] == ' ' ? 1 : 0;
  for (const Kind& is : {Kind(isalpha), Kind(isdigit), Kind(mark)})
    if (run(blank, is) > 0) return blank + run(blank, is);
  const size_t spaces = run(0, isspace);
  return spaces < text.size() && spaces > 1 ? spaces - 1 : spaces;  // the last is left to what follows
}

static std::vector<int> slow_encode(const std::vector<std::string>& tokens, std::string text) {
  std::vector<int> ids;
  while (!text.empty()) {
    const size_t length = slow_word_length(text);
    slow_word(tokens, text.substr(0, length), ids);
    text.erase(0, length);
  }
  return ids;
}

// ---- tests ---------------------------------------------------------------------------------------------

static void test_bytes() {
  TEST("bytes: every byte is its own token, end-of-text is 256, nothing is lost; other numbers are shown");
  const Tokenizer bytes = Tokenizer::bytes();
  CHECK_EQ(bytes.size, 257u);
  CHECK_EQ(bytes.eot, 256);
  std::string text;
  for (int b = 0; b < 256; b++) text += char(b);
  const std::vector<int> ids = bytes.encode(text);
  CHECK_EQ(ids.size(), 256u);
  for (int b = 0; b < 256; b++) CHECK(ids[size_t(b)] == b);
  CHECK(bytes.decode(ids) == text);
  CHECK_EQ(bytes.decode(256), "<|endoftext|>");
  CHECK_EQ(bytes.encode("<|endoftext|>").size(), 13u);
  CHECK_EQ(bytes.encode("").size(), 0u);
  CHECK_EQ(bytes.decode(257), "<|257|>");
  CHECK_EQ(bytes.decode(-1), "<|-1|>");
}

static void test_printable() {
  TEST("on a screen: control characters and bytes that are not UTF-8 are spelt out, text stays");
  const std::string text("a\0b\033[2J\r\n\t\x7f\xc2\x85 \xc3\xa9\xff\xe4\xb8", 19);
  CHECK_EQ(printable(text), "a\\x00b\\x1b[2J\\x0d\n\t\\x7f\\xc2\\x85 \xc3\xa9\\xff\\xe4\\xb8");
}

static void test_merges(const Scratch& folder) {
  const std::string letters = "aabbcdest  '.,\n7";
  const std::vector<std::string> tokens = vocabulary(random_merges(400, letters));
  write_file(folder / "t.bin", tokenizer_bytes(tokens, uint32_t(tokens.size() - 1)));
  const Tokenizer tokenizer = Tokenizer::load(folder / "t.bin");

  TEST("a tokenizer file: size, end-of-text, every token decodes to its bytes");
  CHECK_EQ(tokenizer.size, tokens.size());
  CHECK_EQ(tokenizer.eot, int(tokens.size() - 1));
  for (size_t id = 0; id < tokens.size(); id++) CHECK_EQ(tokenizer.decode(int(id)), tokens[id]);

  TEST("merges by number: the same tokens as the slow encoder, on random text and on one letter over and over");
  std::vector<std::string> texts;
  for (uint64_t stream = 0; stream < 60; stream++)
    texts.push_back(random_text(stream, 20 + 7 * stream, letters));
  for (size_t n : {1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 100})
    for (char c : {'a', 'b', ' ', '.'}) texts.push_back(std::string(n, c));
  for (const std::string& text : texts) {
    const std::vector<int> fast = tokenizer.encode(text), slow = slow_encode(tokens, text);
    if (!CHECK(fast == slow))
      printf("     %s: %zu tokens, expected %zu\n", json_quote(text).c_str(), fast.size(), slow.size());
    CHECK(tokenizer.decode(fast) == text);
  }

  TEST("a word of a megabyte does not take for ever");
  const std::string long_word = random_text(99, 1 << 20, "abcdest");
  CHECK(tokenizer.decode(tokenizer.encode(long_word)) == long_word);

  TEST("any bytes come back, UTF-8 or not");
  for (uint64_t stream = 0; stream < 200; stream++) {
    std::string noise;
    for (uint64_t i = 0; i < 50; i++) noise += char(philox(stream, STREAM_TEST + 1, i).x[0]);
    CHECK(tokenizer.decode(tokenizer.encode(noise)) == noise);
  }
}

// Where the text is cut into words. Every word is a token here, and so is the whole text and any two
// neighbouring words together: a cut that is missing or in the wrong place shows.
static void test_words(const Scratch& folder) {
  const char* cases =
      // words end at a |, cases at a ~
      "ab~a|1~1|a~a|.~ a~a| ~ 1~ .~a| b~a| | b~a|  | b~a|\n|b~a| |\n|b~a|\n| b~a|  ~  ~ \n~\n|\n|.~"
      "I|'m~I|'ll~'t|is~'|S~ '|s~''|s~'~'|v~'ve~'|l~"
      // letters, numbers and spaces beyond ASCII
      "\u00e9a~a|\u00bd~1\u00bd~\u0661\u0662~\u4e2d\u6587~\u4e2d|1~a|\u00a0|b~\u3000|\u3000|a~\u2019|s~"
      "\u00b7\u00b7~\u0e01|\u0e31~\u200b|a~\U0001d400a~\U0001f600|a~\u2028|a~\u0301|a~"
      // a space is no part of the punctuation behind it; U+200B is no space
      "\t|.~\r|.~\u0085|.~\u00a0|.~\u1680|.~\u2000|.~\u200a|.~\u200b.~\u2028|.~\u2029|.~\u202f|.~\u205f|.~"
      "\u3000|.";
  const auto split = [](const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
    return parts;
  };
  TEST("words: where the text is cut into them");
  for (const std::string& want : split(cases, '~')) {
    const std::vector<std::string> words = split(want, '|');
    std::string text, got;
    for (const std::string& word : words) text += word;
    std::vector<std::string> merges = {text};
    merges.insert(merges.end(), words.begin(), words.end());
    for (size_t i = 0; i + 1 < words.size(); i++) merges.push_back(words[i] + words[i + 1]);
    const std::vector<std::string> tokens = vocabulary(merges);
    write_file(folder / "w.bin", tokenizer_bytes(tokens, uint32_t(tokens.size() - 1)));
    const Tokenizer tokenizer = Tokenizer::load(folder / "w.bin");
    for (int id : tokenizer.encode(text)) got += (got.empty() ? "" : "|") + tokenizer.decode(id);
    CHECK_EQ(got, want);
  }
}

static void test_bad_files(const Scratch& folder) {
  const std::string path = folder / "bad.bin";
  const std::vector<std::string> tokens = vocabulary({"ab", "abc"});
  const std::string good = tokenizer_bytes(tokens, 258);
  TEST("refused: another kind of file, bad counts, a wrong size");
  const struct {
    std::string bytes, message;
  } cases[] = {
      {"", "cut short: nothing at byte 0, expected 16 more"},
      {tokenizer_bytes(tokens, 258, 20240520), "not a tokenizer: magic 20240520, expected 20240328"},
      {tokenizer_bytes(tokens, 258, 20240328, 1), "tokenizer version 1, expected 2"},
      {tokenizer_bytes({}, 0), "0 tokens, expected 2 to 65536"},
      {tokenizer_bytes(tokens, 258, 20240328, 2, 0xFFFFFFFF), "4294967295 tokens, expected 2 to 65536"},
      {tokenizer_bytes(tokens, 259), "end-of-text is token 259 of 259"},
      {good.substr(0, good.size() - 1), "cut short: ends inside token 258 of 259"},
      {good + "x", format("%zu bytes, expected %zu for its 259 tokens", good.size() + 1, good.size())},
  };
  for (const auto& c : cases) {
    write_file(path, c.bytes);
    CHECK(refuses(in_child([&] { Tokenizer::load(path); }), 1, path + ": " + c.message));
  }
  write_file(path, good);
  CHECK_EQ(Tokenizer::load(path).encode("abcab").size(), 2u);
  CHECK(refuses(in_child([&] { Tokenizer::load(folder / "none"); }), 1, "none: cannot open: No such file"));
  CHECK(refuses(in_child([&] { Tokenizer::load(folder.path); }), 1, folder.path + ": not a regular file"));

  TEST("end-of-text spelt out is text, even where it could be one token; a byte that has no token is refused");
  write_file(path, tokenizer_bytes({"a", "b", "ab", "ba"}, 3));
  const Tokenizer tokenizer = Tokenizer::load(path);
  CHECK(tokenizer.encode("ba") == std::vector<int>({1, 0}));
  CHECK(tokenizer.encode("ab") == std::vector<int>({2}));
  CHECK(refuses(in_child([&] { tokenizer.encode("abc"); }), 1, "tokenizer: no token for byte 99"));
}

// GPT-2's own file, where there is one; what it must give was computed with another encoder (tiktoken).
static void test_gpt2() {
  TEST("GPT-2's tokenizer");
  const char* given = getenv("GPT2_TOKENIZER");
  const std::string path = given ? given : "data/gpt2_tokenizer.bin";
  if (access(path.c_str(), R_OK) != 0) {
    SKIP("no " + path + "; GPT2_TOKENIZER=FILE names another place");
    return;
  }
  const Tokenizer gpt2 = Tokenizer::load(path);
  CHECK_EQ(gpt2.size, 50257u);
  CHECK_EQ(gpt2.eot, 50256);
  const struct {
    const char* text;
    std::vector<int> ids;
  } cases[] = {
      {"Hello world", {15496, 995}},
      {"I'll say: 3.14159  is pi,\n\n\tisn't it?",
       {40, 1183, 910, 25, 513, 13, 1415, 19707, 220, 318, 31028, 11, 628, 197, 271, 77, 470, 340, 30}},
      {"Z\u00fcrich, \u6771\u4eac", {57, 9116, 7527, 11, 10545, 251, 109, 12859, 105}},
      {"<|endoftext|>", {27, 91, 437, 1659, 5239, 91, 29}},
  };
  for (const auto& c : cases) {
    CHECK(gpt2.encode(c.text) == c.ids);
    CHECK_EQ(gpt2.decode(c.ids), std::string(c.text));
  }
}

int main() {
  Scratch folder;
  test_bytes();
  test_printable();
  test_merges(folder);
  test_words(folder);
  test_bad_files(folder);
  test_gpt2();
  return finish();
}
