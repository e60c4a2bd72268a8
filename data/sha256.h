// sha256.h - the hash that decides which split a document belongs to (FIPS 180-4).
//
// Any good hash would do; this one is in every language's library, so any tool can find a document's split.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>

namespace sha256_detail {

inline uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

// The first 32 bits of the fraction of a prime's root: square roots start the state, cube roots are the
// constants of the rounds. 80 bits of a long double would do, 53 of a double do as well: checked in the tests.
struct Constants {
  uint32_t start[8], round[64];
  Constants() {
    int count = 0;
    for (uint32_t n = 2; count < 64; n++) {
      bool prime = true;
      for (uint32_t d = 2; d * d <= n; d++) prime = prime && n % d != 0;
      if (!prime) continue;
      if (count < 8) start[count] = fraction(std::sqrt(double(n)));
      round[count++] = fraction(std::cbrt(double(n)));
    }
  }
  static uint32_t fraction(double x) { return uint32_t((x - std::floor(x)) * 4294967296.0); }
};

inline void add_block(uint32_t* state /* (8) */, const unsigned char* block /* (64) */) {
  static const Constants constants;
  uint32_t w[64] = {};
  for (int i = 0; i < 16; i++)
    for (int byte = 0; byte < 4; byte++) w[i] = w[i] << 8 | block[4 * i + byte];
  for (int i = 16; i < 64; i++) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    const uint32_t from_a = rotate(a, 7) ^ rotate(a, 18) ^ a >> 3;
    const uint32_t from_b = rotate(b, 17) ^ rotate(b, 19) ^ b >> 10;
    w[i] = w[i - 16] + w[i - 7] + from_a + from_b;
  }
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
  for (int i = 0; i < 64; i++) {
    const uint32_t choose = (e & f) ^ (~e & g), majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t t = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + choose + constants.round[i] + w[i];
    h = g, g = f, f = e, e = d + t, d = c, c = b, b = a;
    a = t + (rotate(b, 2) ^ rotate(b, 13) ^ rotate(b, 22)) + majority;
  }
  const uint32_t after[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; i++) state[i] += after[i];
}

}  // namespace sha256_detail

// The first 32 bits of the SHA-256 of a text: its first 8 hexadecimal digits, read as a number.
inline uint32_t sha256_prefix(const std::string& text) {
  static const sha256_detail::Constants constants;
  uint32_t state[8];
  for (int i = 0; i < 8; i++) state[i] = constants.start[i];
  const unsigned char* data = reinterpret_cast<const unsigned char*>(text.data());
  size_t at = 0;
  for (; at + 64 <= text.size(); at += 64) sha256_detail::add_block(state, data + at);
  // The rest, a 1 bit, zeros, and the length in bits as the last 64 bits of a block.
  std::string tail = text.substr(at) + '\x80';
  while (tail.size() % 64 != 56) tail += '\0';
  for (int shift = 56; shift >= 0; shift -= 8) tail += char(uint64_t(text.size()) * 8 >> shift);
  for (size_t i = 0; i < tail.size(); i += 64)
    sha256_detail::add_block(state, reinterpret_cast<const unsigned char*>(tail.data()) + i);
  return state[0];
}
