// config.h - what model to build: the sizes, the arms, and the one table of parameter tensors.
//
// Allocation, initialisation, weight decay, checkpoints, the parameter count, gradient checks and the
// GPU-against-CPU loops all walk TENSOR_TABLE. Add a tensor there and all of them know it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "dev/common/random.h"  // normal

// ---- the arms ------------------------------------------------------------------------------------------
enum class Arch { rd, block, tied, average, frozen_v, residual };
constexpr const char* ARCH_NAMES[] = {"rd", "block", "tied", "average", "frozen-v", "residual"};  // by value
constexpr int NUM_ARCHS = 6;

// ---- the sizes -----------------------------------------------------------------------------------------
struct Config {
  Arch arch = Arch::rd;
  size_t L = 4;    // decoder layers; each is two sublayers, attention then feed-forward
  size_t C = 64;   // width (channels)
  size_t NH = 4;   // attention heads
  size_t F = 192;  // feed-forward width
  size_t S = 2;    // sublayers per block of the depth memory (1: every sublayer output is a source)
  size_t T = 160;  // context length
  size_t V = 257;  // vocabulary

  size_t HS() const { return C / NH; }                 // head size
  size_t Vp() const { return (V + 127) / 128 * 128; }  // vocabulary padded to a multiple of 128
  size_t sublayers() const { return 2 * L; }
  size_t blocks() const { return (2 * L + S - 1) / S; }  // N

  // Which parts an arm has. A residual network has no routes at all; two queries at an attention site make
  // two mixes there; only rd and average own a trained V query (tied shares QK's, frozen-v's is zero).
  bool has_routes() const { return arch != Arch::residual; }
  bool two_routes() const { return has_routes() && arch != Arch::block; }
  bool has_v_query() const { return arch == Arch::rd || arch == Arch::average; }

  // The depth memory. Activations flow through 2L + 1 slots: slot 0 is the embedding, slot i + 1 the running
  // partial after sublayer i. A block ends where the slot number is a multiple of S; that slot is then the
  // finished block. So site i, which stands before sublayer i (i = 2L: before the head), reads slots 0, S, 2S,
  // ... up to i, and slot i itself (the running partial) if it is not one of them.
  // A residual network reads slot i alone: there every slot is the running sum of all that came before.
  std::vector<size_t> source_slots(size_t i) const {
    if (!has_routes()) return {i};
    std::vector<size_t> slots;
    for (size_t slot = 0; slot <= i; slot += S) slots.push_back(slot);
    if (i % S != 0) slots.push_back(i);
    return slots;
  }
  size_t num_sources(size_t i) const { return has_routes() ? 1 + (i + S - 1) / S : 1; }  // K of site i
  size_t max_sources() const { return num_sources(sublayers()); }

  // Routes of site i (R): two before an attention sublayer if the arm has two, else one; none if residual.
  size_t num_routes(size_t i) const {
    const bool attention = i % 2 == 0 && i < sublayers();
    return has_routes() + (attention && two_routes());
  }

  // The bank holds one gradient per block: 0 for the embedding, n for block n. This is a slot's place in it.
  size_t bank_index(size_t slot) const { return has_routes() ? (slot + S - 1) / S : 0; }
  size_t bank_size() const { return bank_index(sublayers()) + 1; }
};

// ---- the tensors ---------------------------------------------------------------------------------------
// A tensor's kind decides how it starts and whether it decays:
//   embedding, matrix   N(0, 0.02), weight decay
//   residual_matrix     its output joins the partial: N(0, 0.02 / sqrt(2L)), weight decay
//   norm, gain          ones
//   query               zeros: every route starts as a uniform mix. Its learning rate has a multiplier
enum class Kind { embedding, matrix, residual_matrix, norm, gain, query };

// name, kind, one per layer?, rows (0: a vector), columns, does this arm have it? c is the Config.
// Shapes are (L,) rows, columns: weights are (out, in), y = x W^T.
#define TENSOR_TABLE(X)                                  \
  X(wte, embedding, false, c.Vp(), c.C, true)            \
  X(attn_route_gain, gain, true, 0, c.C, c.has_routes()) \
  X(attn_route_qk, query, true, 0, c.C, c.has_routes())  \
  X(attn_route_v, query, true, 0, c.C, c.has_v_query())  \
  X(attn_norm, norm, true, 0, c.C, true)                 \
  X(wqk, matrix, true, 2 * c.C, c.C, true)               \
  X(wv, matrix, true, c.C, c.C, true)                    \
  X(wo, residual_matrix, true, c.C, c.C, true)           \
  X(mlp_route_gain, gain, true, 0, c.C, c.has_routes())  \
  X(mlp_route, query, true, 0, c.C, c.has_routes())      \
  X(mlp_norm, norm, true, 0, c.C, true)                  \
  X(w_gate, matrix, true, c.F, c.C, true)                \
  X(w_up, matrix, true, c.F, c.C, true)                  \
  X(w_down, residual_matrix, true, c.C, c.F, true)       \
  X(out_route_gain, gain, false, 0, c.C, c.has_routes()) \
  X(out_route, query, false, 0, c.C, c.has_routes())     \
  X(final_norm, norm, false, 0, c.C, true)

#define TENSOR_ENUM(name, ...) TENSOR_##name,
enum TensorId { TENSOR_TABLE(TENSOR_ENUM) NUM_TENSORS };
#undef TENSOR_ENUM

// One pointer per tensor, null where the arm lacks it: params.wqk reads better than params[5]. The same
// struct serves parameters, gradients and both moments; tensor(id) is for loops over the table.
template <class T>
struct Tensors {
#define TENSOR_MEMBER(name, ...) T* name = nullptr;
  TENSOR_TABLE(TENSOR_MEMBER)
#undef TENSOR_MEMBER
  T*& tensor(int id) {
#define TENSOR_POINTER(name, ...) &name,
    T** const all[] = {TENSOR_TABLE(TENSOR_POINTER)};
#undef TENSOR_POINTER
    return *all[id];
  }
};

struct TensorSpec {  // one row of the table, with this config's numbers
  TensorId id;
  const char* name;
  Kind kind;
  bool per_layer;
  std::vector<size_t> shape;  // with the leading layer dimension, where there is one
  bool present;
  size_t begin;  // where it starts in a family, which is one array

  size_t size() const {  // number of elements, 0 if absent
    size_t n = present ? 1 : 0;
    for (size_t d : shape) n *= d;
    return n;
  }
  bool is_matrix() const {
    return kind == Kind::embedding || kind == Kind::matrix || kind == Kind::residual_matrix;
  }
};

inline std::vector<TensorSpec> tensor_table(const Config& c) {
  std::vector<TensorSpec> table;
  const auto add = [&](TensorId id, const char* name, Kind kind, bool per_layer, size_t rows, size_t cols,
                       bool present) {
    std::vector<size_t> shape;
    if (per_layer) shape.push_back(c.L);
    if (rows) shape.push_back(rows);
    shape.push_back(cols);
    const size_t begin = table.empty() ? 0 : table.back().begin + table.back().size();
    table.push_back({id, name, kind, per_layer, shape, present, begin});
  };
#define TENSOR_ROW(name, kind, per_layer, rows, cols, present) \
  add(TENSOR_##name, #name, Kind::kind, per_layer, rows, cols, present);
  TENSOR_TABLE(TENSOR_ROW)
#undef TENSOR_ROW
  return table;
}

// Element i of a tensor before the first step: a pure function of (seed, tensor, index), so that arms which
// lack a tensor share all the others, and both trainers start from the same numbers. The padding rows of wte
// are zero.
inline float initial_value(const TensorSpec& t, const Config& c, uint64_t seed, size_t i) {
  if (t.kind == Kind::norm || t.kind == Kind::gain) return 1;
  if (t.kind == Kind::query || (t.kind == Kind::embedding && i >= c.V * c.C)) return 0;

  const double std = t.kind == Kind::residual_matrix ? 0.02 / std::sqrt(2.0 * double(c.L)) : 0.02;
  return float(std * normal(seed, STREAM_INIT + t.id, i));
}

// What a family takes in memory: all elements of all tensors, the padding rows of wte among them.
inline size_t count_elements(const Config& c) {
  size_t n = 0;
  for (const TensorSpec& t : tensor_table(c)) n += t.size();
  return n;
}

// Exact parameter count. Rows V .. Vp-1 of wte are padding, never trained, and are not counted.
struct ParamCount {
  size_t embedding, layers, routes, total;
};
inline ParamCount count_params(const Config& c) {
  ParamCount n = {};
  for (const TensorSpec& t : tensor_table(c)) {
    if (t.id == TENSOR_wte)
      n.embedding += c.V * c.C;
    else if (t.kind == Kind::gain || t.kind == Kind::query)
      n.routes += t.size();
    else
      n.layers += t.size();
  }
  n.total = n.embedding + n.layers + n.routes;
  return n;
}

// Names the piece of a family, a tensor or a layer of one, that is nearest to the output among those that
// have(id, offset, n) says yes to: the tensor's elements offset .. offset + n - 1. "" if there is none.
template <class Have>
std::string nearest_to_output(const Config& c, Have have) {
  std::string nearest;
  size_t highest = 0;                            // 0: the embedding; l + 1: layer l; L + 1: the output
  for (const TensorSpec& t : tensor_table(c)) {  // in the order of the network
    const size_t pieces = t.per_layer ? c.L : 1, n = t.size() / pieces;
    for (size_t l = 0; l < pieces && t.present; l++) {
      const size_t depth = t.per_layer ? l + 1 : t.id == TENSOR_wte ? 0 : c.L + 1;
      if (depth < highest || !have(t.id, l * n, n)) continue;
      highest = depth;
      nearest = t.name + (t.per_layer ? ", layer " + std::to_string(l) : "");
    }
  }
  return nearest;
}
