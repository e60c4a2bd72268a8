// random.h - random numbers that are computed, not remembered.
//
// Every number is a pure function of (seed, stream, i): no generator state to carry, save or keep in step
// between threads. Weight 1,000,000 of a tensor, the token sampled at step 500, the 3rd window of epoch 7: each
// is one call, in any order, on any machine, with the same answer.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

// What a number is for. Two purposes never share a stream, so asking for one cannot shift another.
constexpr uint64_t STREAM_INIT = 0;            // + tensor id (dev/common/config.h)
constexpr uint64_t STREAM_SHUFFLE = 1u << 16;  // + round of the permutation
constexpr uint64_t STREAM_SAMPLE = 2u << 16;   // sampling text
constexpr uint64_t STREAM_TEST = 3u << 16;     // + whatever a test likes

// ---- Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) ----------------
struct Random4 {
  uint32_t x[4];
};

// 128 random bits from a 64-bit key and a 128-bit counter. Ten rounds of: multiply two words of the counter,
// swap the halves of the products across, mix in the key; the key moves on by two odd constants a round.
inline Random4 philox(uint64_t key, uint64_t counter_hi, uint64_t counter_lo) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  Random4 c = {
      {uint32_t(counter_lo), uint32_t(counter_lo >> 32), uint32_t(counter_hi), uint32_t(counter_hi >> 32)}};
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = uint64_t(0xD2511F53u) * c.x[0];
    const uint64_t product1 = uint64_t(0xCD9E8D57u) * c.x[2];
    c = {{uint32_t(product1 >> 32) ^ c.x[1] ^ k0, uint32_t(product1), uint32_t(product0 >> 32) ^ c.x[3] ^ k1,
          uint32_t(product0)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// ---- distributions -------------------------------------------------------------------------------------
// 53 random bits as a double in [0, 1).
inline double unit_interval(uint32_t hi, uint32_t lo) {
  return double((uint64_t(hi) << 32 | lo) >> 11) * 0x1p-53;
}

// Uniform in [0, 1).
inline double uniform(uint64_t seed, uint64_t stream, uint64_t i) {
  const Random4 r = philox(seed, stream, i);
  return unit_interval(r.x[0], r.x[1]);
}

// Normal with mean 0 and variance 1, by Box and Muller. 1 - u lies in (0, 1], so the logarithm is finite.
inline float normal(uint64_t seed, uint64_t stream, uint64_t i) {
  const Random4 r = philox(seed, stream, i);
  const double radius = std::sqrt(-2.0 * std::log(1.0 - unit_interval(r.x[0], r.x[1])));
  return float(radius * std::cos(6.283185307179586 * unit_interval(r.x[2], r.x[3])));
}

// ---- permutation ---------------------------------------------------------------------------------------
// Element i (0 <= i < n) of a pseudo-random permutation of 0 .. n-1, without a table: shuffling a trillion
// windows costs no memory, and any place in the order can be asked for directly. n up to 2^62.
//
// A Feistel network, left, right = right, left ^ hash(right), is a permutation of the numbers of 2h bits
// whatever the hash. With 2^2h >= n, results outside 0 .. n-1 are sent through again until one falls inside
// (fewer than four trips on average, n > 16): following the cycles of a permutation keeps it one. With h < 3
// the few possible hashes would make some orders far likelier than others.
inline uint64_t permute(uint64_t seed, uint64_t epoch, uint64_t n, uint64_t i) {
  int half = 3;
  while (half < 31 && (uint64_t(1) << 2 * half) < n) half++;
  const uint64_t mask = (uint64_t(1) << half) - 1;
  do {
    uint64_t left = i >> half, right = i & mask;
    for (uint64_t round = 0; round < 8; round++) {
      const Random4 hash = philox(seed, STREAM_SHUFFLE + round, epoch << 32 ^ right);
      const uint64_t next = left ^ (hash.x[0] & mask);
      left = right;
      right = next;
    }
    i = left << half | right;
  } while (i >= n);
  return i;
}

// ---- the next token ------------------------------------------------------------------------------------
// Draws from softmax(logits / temperature), cut to the top_k most likely tokens (0: all) and then to the fewest
// most likely ones that together hold the probability top_p. Of equal logits the lower token comes first.
//
// V > 0; logits of any finite size are safe. temperature 0: the most likely token. u in [0, 1) is the
// random number that decides: the same u gives the same token.
inline int sample_token(const float* logits /* (V) */, size_t V, double temperature, size_t top_k, double top_p,
                        double u) {
  std::vector<int> order(V);  // the candidates, the most likely first
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  if (top_k > 0) order.resize(std::min(top_k, V));
  if (temperature == 0) return order[0];

  std::vector<double> up_to(order.size());  // probability of the candidates up to this one, times a constant
  double sum = 0;
  for (size_t i = 0; i < order.size(); i++) {  // the largest exponent is 0: nothing overflows
    sum += std::exp((double(logits[order[i]]) - double(logits[order[0]])) / temperature);
    up_to[i] = sum;
  }

  const auto last = std::lower_bound(up_to.begin(), up_to.end(), top_p * sum);  // the fewest that hold top_p
  const auto drawn = std::upper_bound(up_to.begin(), last, u * *last);
  return order[size_t(drawn - up_to.begin())];
}
