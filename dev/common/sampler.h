// sampler.h - draws the next token from logits.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

// Draws from softmax(logits / temperature), cut to the top_k most likely tokens (0: all) and then to the fewest
// most likely ones that together hold the probability top_p. Of equal logits the lower token comes first.
//
// V > 0; logits of any finite size are safe. temperature 0: the most likely token. u in [0, 1) is the
// random number that decides: the same u gives the same token.
inline int sample_token(const float* logits /* (V) */, size_t V, double temperature, size_t top_k, double top_p,
                        double u) {
  const size_t best = size_t(std::max_element(logits, logits + V) - logits);
  if (temperature == 0 || top_k == 1 || top_p == 0) return int(best);

  std::vector<double> p(V);
  for (size_t i = 0; i < V; i++)  // the largest exponent is 0: nothing overflows, the sum is at least 1
    p[i] = std::exp((double(logits[i]) - double(logits[best])) / temperature);

  std::vector<int> order(V);  // the candidates; sorted only where an order is needed
  std::iota(order.begin(), order.end(), 0);
  if (top_k > 0 || top_p < 1) {
    const auto likelier = [&](int a, int b) {
      const float x = logits[a], y = logits[b];
      return x > y || (x == y && a < b);
    };
    const size_t k = top_k > 0 ? std::min(top_k, V) : V;
    std::partial_sort(order.begin(), order.begin() + std::ptrdiff_t(k), order.end(), likelier);
    order.resize(k);
  }

  double sum = 0;
  for (int i : order) sum += p[size_t(i)];
  if (top_p < 1) {
    double held = 0;
    size_t n = 0;
    while (n < order.size() && held < top_p * sum) held += p[size_t(order[n++])];
    order.resize(n);
    sum = held;
  }

  double passed = 0;
  for (int i : order) {
    passed += p[size_t(i)];
    if (u * sum < passed) return i;
  }
  return order.back();  // only rounding brings us here
}
