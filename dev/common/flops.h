// flops.h - how much arithmetic a token costs, and how fast known cards are.
//
// What the model needs, not what an implementation happens to do: recomputed activations and padding count
// nothing, so a share of the peak can be compared between programs. One multiply-add is two operations.
#pragma once
#include <string>

#include "dev/common/config.h"  // Config

struct Flops {
  double matmul, attention, routes;
  double total() const { return matmul + attention + routes; }
};

// Forward, a token, averaged over a window of T tokens.
inline Flops forward_flops(const Config& c, size_t T) {
  const double C = double(c.C), L = double(c.L), F = double(c.F), V = double(c.V);
  Flops flops = {};
  flops.matmul = 2 * (L * (4 * C * C + 3 * C * F) + V * C);  // wqk, wv, wo; gate, up, down; the head
  // Token t meets t + 1 tokens, on average (T + 1) / 2: q.k and the sum of values, 2C operations each.
  flops.attention = L * 4 * C * double(T + 1) / 2;
  for (size_t i = 0; i <= c.sublayers(); i++)  // a route: a dot product and a multiple of each source
    flops.routes += 4 * C * double(c.num_routes(i) * c.num_sources(i));
  return flops;
}

// Forward and backward: each product has two in the backward pass, one for each of its factors.
inline Flops training_flops(const Config& c, size_t T) {
  const Flops f = forward_flops(c, T);
  return {3 * f.matmul, 3 * f.attention, 3 * f.routes};
}

// ---- cards ---------------------------------------------------------------------------------------------
// Peak bfloat16 operations a second with float32 sums, dense, as the maker states it; figures that a data sheet
// gives "with sparsity" are halved. The name is the device's own and must match in full: cards that share half
// a name differ by a factor of two.
struct Card {
  const char* name;
  double tflops;
  const char* source;
};
constexpr Card CARDS[] = {
    {"NVIDIA A100-SXM4-40GB", 312, "NVIDIA A100 data sheet"},
    {"NVIDIA A100-SXM4-80GB", 312, "NVIDIA A100 data sheet"},
    {"NVIDIA A100-PCIE-40GB", 312, "NVIDIA A100 data sheet"},
    {"NVIDIA A100 80GB PCIe", 312, "NVIDIA A100 data sheet"},
    {"NVIDIA A10", 125, "NVIDIA A10 data sheet"},
    {"NVIDIA RTX A6000", 154.8, "NVIDIA Ampere GA102 white paper"},
    {"NVIDIA GeForce RTX 3090", 71, "NVIDIA Ampere GA102 white paper"},
    {"NVIDIA GeForce RTX 4090", 165.2, "NVIDIA Ada white paper"},
    {"NVIDIA L4", 121, "NVIDIA L4 data sheet, 242 with sparsity"},
    {"NVIDIA L40S", 362.05, "NVIDIA L40S data sheet"},
    {"NVIDIA H100 PCIe", 756, "NVIDIA H100 white paper"},
    {"NVIDIA H100 80GB HBM3", 989.4, "NVIDIA H100 white paper, SXM5"},
    {"NVIDIA H200", 989.5, "NVIDIA H200 data sheet, 1,979 with sparsity"},
    {"NVIDIA GeForce RTX 5090", 209.5, "NVIDIA RTX Blackwell white paper"},
    {"NVIDIA B200", 2250, "NVIDIA Blackwell architecture brief, 4,500 with sparsity"},
};
inline const Card* find_card(const std::string& device_name) {  // null: not in the table; nothing is guessed
  for (const Card& card : CARDS)
    if (device_name == card.name) return &card;
  return nullptr;
}
