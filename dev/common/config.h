// config.h - what model to build: the sizes, the arms, and the one table of parameter tensors.
//
// Allocation, initialisation, weight decay, checkpoints, the parameter count, gradient checks and the
// GPU-against-CPU loops all walk TENSOR_TABLE. Add a tensor there and all of them know it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

// ---- the arms ------------------------------------------------------------------------------------------
enum class Arch { rd, block, tied, average, frozen_v, residual };
constexpr const char* ARCH_NAMES[] = {"rd", "block", "tied", "average", "frozen-v", "residual"};  // by value
constexpr int NUM_ARCHS = 6;

// ---- the sizes -----------------------------------------------------------------------------------------
struct Config {
  Arch arch = Arch::rd;
  size_t L = 4;    // decoder layers; each is two sublayers, attention then feed-forward
  size_t C = 128;  // width (channels)
  size_t NH = 4;   // attention heads
  size_t F = 384;  // feed-forward width
  size_t S = 2;    // sublayers per block of the depth memory (1: every sublayer output is a source)
  size_t T = 128;  // context length
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
  // Sources that sublayer i reads (i = 2L: the output site): embedding, finished blocks, running partial.
  size_t num_sources(size_t i) const { return has_routes() ? 1 + (i + S - 1) / S : 1; }
  size_t max_sources() const { return num_sources(sublayers()); }
};

// ---- the tensors ---------------------------------------------------------------------------------------
enum class Init { one, zero, normal, normal_residual };  // N(0, 0.02), N(0, 0.02 / sqrt(2L))

// name, one per layer?, rows (0: a vector), columns, initial value, weight decay?, does this arm have it?
// c is the Config. Shapes are (L,) rows, cols: weights are (out, in), y = x W^T.
#define TENSOR_TABLE(X)                                              \
  X(wte, false, c.Vp(), c.C, Init::normal, true, true)               \
  X(attn_route_gain, true, 0, c.C, Init::one, false, c.has_routes()) \
  X(attn_route_qk, true, 0, c.C, Init::zero, false, c.has_routes())  \
  X(attn_route_v, true, 0, c.C, Init::zero, false, c.has_v_query())  \
  X(attn_norm, true, 0, c.C, Init::one, false, true)                 \
  X(wqk, true, 2 * c.C, c.C, Init::normal, true, true)               \
  X(wv, true, c.C, c.C, Init::normal, true, true)                    \
  X(wo, true, c.C, c.C, Init::normal_residual, true, true)           \
  X(mlp_route_gain, true, 0, c.C, Init::one, false, c.has_routes())  \
  X(mlp_route, true, 0, c.C, Init::zero, false, c.has_routes())      \
  X(mlp_norm, true, 0, c.C, Init::one, false, true)                  \
  X(w_gate, true, c.F, c.C, Init::normal, true, true)                \
  X(w_up, true, c.F, c.C, Init::normal, true, true)                  \
  X(w_down, true, c.C, c.F, Init::normal_residual, true, true)       \
  X(out_route_gain, false, 0, c.C, Init::one, false, c.has_routes()) \
  X(out_route, false, 0, c.C, Init::zero, false, c.has_routes())     \
  X(final_norm, false, 0, c.C, Init::one, false, true)

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
  bool per_layer;
  std::vector<size_t> shape;  // with the leading layer dimension, where there is one
  Init init;
  bool decay, present;
  size_t size() const {  // number of elements, 0 if absent
    size_t n = present ? 1 : 0;
    for (size_t d : shape) n *= d;
    return n;
  }
  bool is_query() const { return init == Init::zero; }  // route queries: their learning rate has a multiplier
};

inline std::vector<TensorSpec> tensor_table(const Config& c) {
  std::vector<TensorSpec> table;
  auto add = [&](TensorId id, const char* name, bool per_layer, size_t rows, size_t cols, Init init, bool decay,
                 bool present) {
    std::vector<size_t> shape;
    if (per_layer) shape.push_back(c.L);
    if (rows) shape.push_back(rows);
    shape.push_back(cols);
    table.push_back({id, name, per_layer, shape, init, decay, present});
  };
#define TENSOR_ROW(name, per_layer, rows, cols, init, decay, present) \
  add(TENSOR_##name, #name, per_layer, rows, cols, init, decay, present);
  TENSOR_TABLE(TENSOR_ROW)
#undef TENSOR_ROW
  return table;
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
    else if (strstr(t.name, "route"))
      n.routes += t.size();
    else
      n.layers += t.size();
  }
  n.total = n.embedding + n.layers + n.routes;
  return n;
}

// Names the piece of a family, a tensor or a layer of one, that comes first on the way down from the output to
// the embedding, of those that have(id, offset, n) says yes to: the tensor's elements offset .. offset + n - 1.
// "" if there is none.
template <class Have>
std::string nearest_to_output(const Config& c, Have have) {
  std::vector<TensorSpec> table = tensor_table(c);  // in the order of the network
  std::reverse(table.begin(), table.end());
  for (size_t depth = c.L + 2; depth-- > 0;)  // L + 1: the output; l + 1: layer l; 0: the embedding
    for (const TensorSpec& t : table) {
      const bool layer = depth > 0 && depth <= c.L;
      if (!t.present || t.per_layer != layer || (!layer && (t.id == TENSOR_wte) != (depth == 0))) continue;
      const size_t n = layer ? t.size() / c.L : t.size();
      if (have(t.id, layer ? (depth - 1) * n : 0, n))
        return layer ? std::string(t.name) + ", layer " + std::to_string(depth - 1) : t.name;
    }
  return "";
}

// ---- the depth memory ----------------------------------------------------------------------------------
// The stream has 2L + 1 slots of (B,T,C): slot 0 is the embedding, slot i + 1 the running partial after
// sublayer i. A block ends where the slot number is a multiple of S; that slot is then the finished block.
// So sublayer i reads slots 0, S, 2S, ... up to i, and slot i itself (the running partial) if it is not one
// of them. i = 2L is the output site. A residual network reads slot i alone: its slots are running sums of all.
inline std::vector<size_t> source_slots(const Config& c, size_t i) {
  if (!c.has_routes()) return {i};
  std::vector<size_t> slots;
  for (size_t s = 0; s <= i; s += c.S) slots.push_back(s);
  if (i % c.S != 0) slots.push_back(i);
  return slots;
}
// Number in the bank (0: embedding, n: block n) of the block that a slot belongs to.
inline size_t bank_index(const Config& c, size_t slot) { return c.has_routes() ? (slot + c.S - 1) / c.S : 0; }

// Routes at a site: two before an attention sublayer if the arm has two, else one.
inline size_t num_routes(const Config& c, size_t i) {
  const bool attention = i % 2 == 0 && i < c.sublayers();
  return c.has_routes() ? (attention && c.two_routes() ? 2 : 1) : 0;
}
