// reference.h - the model once more, written from its definition as plainly as possible, for tests to compare
// with. Nothing is shared with the trainers but Config, so a mistake there is not repeated here.
//
// Everything is a template on the scalar X. float and double give the error that plain loops of that precision
// make: the yardstick for the trainer's error. long double gives the value that both are measured against.
// Var<X> records every operation, so gradients come from the chain rule alone, without a backward by hand. On
// request the model rounds to bf16 where train_rdattnres.cu says that it does: the yardstick for bf16.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "dev/common/config.h"  // Config: sizes and arms

namespace reference {

// ---- random test data --------------------------------------------------------------------------------

// Rounded to float, so that float, double and long double all start from the same numbers.
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t next() {
    state += 0x9E3779B97F4A7C15u;
    uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  double uniform() { return double(next() >> 11) * 0x1p-53; }
  double normal(double mean = 0, double deviation = 1) {
    double sum = -6;  // twelve uniform numbers have variance 1
    for (int i = 0; i < 12; i++) sum += uniform();
    return double(float(mean + deviation * sum));
  }
  std::vector<double> normals(size_t n, double mean = 0, double deviation = 1) {
    std::vector<double> values(n);
    for (double& value : values) value = normal(mean, deviation);
    return values;
  }
  std::vector<int> integers(size_t n, size_t below) {
    std::vector<int> values(n);
    for (int& value : values) value = int(next() % below);
    return values;
  }
};

// ---- storage in bf16 ---------------------------------------------------------------------------------

// To the nearest number of eight significant bits, ties to the even one.
template <class X, class = std::enable_if_t<std::is_arithmetic<X>::value>>
X round_bf16(X x) {
  const float f = float(x);
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f == f) bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
  float r;
  memcpy(&r, &bits, 4);
  return X(r);
}
enum class Round { value, gradient, both };  // what is stored: a number, its gradient, or each in its turn

// ---- gradients without a backward: every operation is written on a tape ------------------------------

template <class X>
struct Tape {
  struct Node {
    uint32_t a, b;
    X da, db;
  };                                       // what the value was made of, and its derivatives by both
  static constexpr uint32_t STORED = ~0u;  // in b: the gradient rounds to bf16 on its way to a
  std::vector<Node> nodes{Node{}};         // node 0 stands for every constant
  static Tape& get() {
    static Tape tape;
    return tape;
  }
  void clear() { nodes.resize(1); }
};

template <class X>
struct Var {
  X value = 0;
  uint32_t node = 0;
  Var() = default;
  template <class Y, class = std::enable_if_t<std::is_arithmetic<Y>::value>>
  Var(Y constant) : value(X(constant)) {}
  static Var record(X value, const Var& a, X da, const Var& b, X db) {
    std::vector<typename Tape<X>::Node>& nodes = Tape<X>::get().nodes;
    nodes.push_back({a.node, b.node, da, db});
    Var result;
    result.value = value, result.node = uint32_t(nodes.size() - 1);
    return result;
  }
  static Var input(X value) { return record(value, Var(), 0, Var(), 0); }
  friend Var operator+(const Var& a, const Var& b) { return record(a.value + b.value, a, 1, b, 1); }
  friend Var operator-(const Var& a, const Var& b) { return record(a.value - b.value, a, 1, b, -1); }
  friend Var operator*(const Var& a, const Var& b) { return record(a.value * b.value, a, b.value, b, a.value); }
  friend Var operator/(const Var& a, const Var& b) {
    const X q = a.value / b.value;
    return record(q, a, 1 / b.value, b, -q / b.value);
  }
  friend Var operator-(const Var& a) { return record(-a.value, a, -1, Var(), 0); }
  Var& operator+=(const Var& b) { return *this = *this + b; }
  friend Var exp(const Var& a) {
    const X e = std::exp(a.value);
    return record(e, a, e, Var(), 0);
  }
  friend Var log(const Var& a) { return record(std::log(a.value), a, 1 / a.value, Var(), 0); }
  friend Var sqrt(const Var& a) {
    const X root = std::sqrt(a.value);
    return record(root, a, 1 / (2 * root), Var(), 0);
  }
};

// Derivatives of result by every node of the tape; look them up by Var::node.
template <class X>
std::vector<X> tape_gradients(const Var<X>& result) {
  const auto& nodes = Tape<X>::get().nodes;
  std::vector<X> d(nodes.size(), X(0));
  d[result.node] = 1;
  for (size_t i = nodes.size(); i-- > 1;) {
    if (nodes[i].b == Tape<X>::STORED) {
      d[nodes[i].a] += round_bf16(d[i]);
      continue;
    }
    d[nodes[i].a] += d[i] * nodes[i].da;
    d[nodes[i].b] += d[i] * nodes[i].db;
  }
  return d;
}

template <class X, class = std::enable_if_t<std::is_arithmetic<X>::value>>
X stored(X x, Round what) {
  return what == Round::gradient ? x : round_bf16(x);
}
template <class X>
Var<X> stored(const Var<X>& x, Round what) {
  Var<X> result = Var<X>::record(stored(x.value, what), x, 1, Var<X>(), 0);
  if (what != Round::value) Tape<X>::get().nodes[result.node].b = Tape<X>::STORED;
  return result;
}
// Rounds what a bf16 run keeps in memory; nothing if `bf16` is false.
template <class X>
void store(bool bf16, std::vector<X>& numbers, Round what = Round::both) {
  if (bf16)
    for (X& x : numbers) x = stored(x, what);
}

template <class X>
X plain_value(const X& x) {
  return x;
}
template <class X>
X plain_value(const Var<X>& x) {
  return x.value;
}

// Largest of n numbers; a constant as far as gradients are concerned.
template <class X>
X maximum(const X* z, size_t n) {
  auto top = plain_value(z[0]);
  for (size_t i = 1; i < n; i++)
    if (plain_value(z[i]) > top) top = plain_value(z[i]);
  return X(top);
}

// ---- layers ------------------------------------------------------------------------------------------

constexpr double EPS = 1e-6;

template <class X>
using Array = std::vector<X>;

// 1 / sqrt(mean(x^2) + eps) of one token
template <class X>
X inverse_rms(const X* x, size_t C) {
  using std::sqrt;
  X sum = 0;
  for (size_t c = 0; c < C; c++) sum += x[c] * x[c];
  return X(1) / sqrt(sum / X(double(C)) + X(EPS));
}

template <class X>
Array<X> rmsnorm(const Array<X>& h, const Array<X>& weight, size_t BT, size_t C) {
  Array<X> x(BT * C);
  for (size_t bt = 0; bt < BT; bt++) {
    const X r = inverse_rms(&h[bt * C], C);
    for (size_t c = 0; c < C; c++) x[bt * C + c] = weight[c] * (r * h[bt * C + c]);
  }
  return x;
}

template <class X>
Array<X> softmax(const Array<X>& z) {
  using std::exp;
  const X top = maximum(z.data(), z.size());
  Array<X> p(z.size());
  X sum = 0;
  for (size_t j = 0; j < z.size(); j++) sum += p[j] = exp(z[j] - top);
  for (X& value : p) value = value / sum;
  return p;
}

template <class X>
struct Read {
  Array<X> h, p;
};  // (BT,C), (BT,K)

// k_j = gain * rmsnorm(s_j)    z_j = query . k_j    p = softmax(z)    h = sum_j p_j s_j
template <class X>
Read<X> route(const std::vector<Array<X>>& sources, const Array<X>& query, const Array<X>& gain, size_t BT,
              size_t C) {
  const size_t K = sources.size();
  Read<X> read{Array<X>(BT * C), Array<X>(BT * K)};
  for (size_t bt = 0; bt < BT; bt++) {
    Array<X> z(K, X(0));
    for (size_t j = 0; j < K; j++) {
      const X* s = &sources[j][bt * C];
      const X r = inverse_rms(s, C);
      for (size_t c = 0; c < C; c++) z[j] += (query[c] * gain[c]) * (r * s[c]);
    }
    const Array<X> p = softmax(z);
    for (size_t j = 0; j < K; j++) {
      read.p[bt * K + j] = p[j];
      for (size_t c = 0; c < C; c++) read.h[bt * C + c] += p[j] * sources[j][bt * C + c];
    }
  }
  return read;
}

// y = x W^T; x (BT,IC), w (OC,IC)
template <class X>
Array<X> linear(const Array<X>& x, const X* w, size_t BT, size_t IC, size_t OC) {
  Array<X> y(BT * OC);
  for (size_t bt = 0; bt < BT; bt++)
    for (size_t o = 0; o < OC; o++)
      for (size_t i = 0; i < IC; i++) y[bt * OC + o] += x[bt * IC + i] * w[o * IC + i];
  return y;
}

// Angles are double, or long double where X is: nobody computes them in float.
template <class X>
struct AngleType {
  using type = double;
};
template <>
struct AngleType<long double> {
  using type = long double;
};
template <class X>
struct AngleType<Var<X>> {
  using type = typename AngleType<X>::type;
};

// Turns the pair (i, i + HS/2) of every head by t * 10000^(-2i / HS): (lo + i hi) times e^(i angle). x (B,T,C)
template <class X>
Array<X> rope(const Array<X>& x, size_t B, size_t T, size_t C, size_t NH) {
  using Angle = typename AngleType<X>::type;
  const size_t HS = C / NH;
  Array<X> y(x.size());
  for (size_t bt = 0; bt < B * T; bt++)
    for (size_t head = 0; head < NH; head++)
      for (size_t i = 0; i < HS / 2; i++) {
        const Angle angle = Angle(bt % T) * std::pow(Angle(10000), -Angle(2 * i) / Angle(HS));
        const X cosine = X(std::cos(angle)), sine = X(std::sin(angle));
        const size_t lo = bt * C + head * HS + i, hi = lo + HS / 2;
        y[lo] = x[lo] * cosine - x[hi] * sine;
        y[hi] = x[hi] * cosine + x[lo] * sine;
      }
  return y;
}

template <class X>
struct Attention {
  Array<X> att, lse, a;
};  // (B,T,C), (B,NH,T), probabilities (B,NH,T,T)

// q, k, v (B,T,C): a_tu = softmax over u <= t of q_t . k_u / sqrt(HS), att_t = sum_u a_tu v_u
template <class X>
Attention<X> attention(const Array<X>& q, const Array<X>& k, const Array<X>& v, size_t B, size_t T, size_t C,
                       size_t NH, bool bf16 = false) {
  using std::exp;
  using std::log;
  using std::sqrt;
  const size_t HS = C / NH;
  const X root = sqrt(X(double(HS)));
  Attention<X> out{Array<X>(B * T * C), Array<X>(B * NH * T), Array<X>(B * NH * T * T)};
  for (size_t b = 0; b < B; b++)
    for (size_t head = 0; head < NH; head++)
      for (size_t t = 0; t < T; t++) {
        Array<X> scores(t + 1, X(0));
        for (size_t u = 0; u <= t; u++) {
          for (size_t c = head * HS; c < (head + 1) * HS; c++)
            scores[u] += q[(b * T + t) * C + c] * k[(b * T + u) * C + c];
          scores[u] = scores[u] / root;
        }
        store(bf16, scores, Round::gradient);
        Array<X> a = softmax(scores);
        // lse = score_u - log a_u for every u; the most likely one loses no digits.
        size_t best = 0;
        for (size_t u = 0; u <= t; u++)
          if (plain_value(a[u]) > plain_value(a[best])) best = u;
        out.lse[(b * NH + head) * T + t] = scores[best] - log(a[best]);
        store(bf16, a, Round::value);
        for (size_t u = 0; u <= t; u++) {
          out.a[((b * NH + head) * T + t) * T + u] = a[u];
          for (size_t c = head * HS; c < (head + 1) * HS; c++)
            out.att[(b * T + t) * C + c] += a[u] * v[(b * T + u) * C + c];
        }
      }
  return out;
}

// silu(gate) * up
template <class X>
Array<X> swiglu(const Array<X>& gate, const Array<X>& up) {
  using std::exp;
  Array<X> act(gate.size());
  for (size_t i = 0; i < act.size(); i++) act[i] = gate[i] / (X(1) + exp(-gate[i])) * up[i];
  return act;
}

// -log softmax(logits)[target]; logits (BT,V)
template <class X>
Array<X> cross_entropy(const Array<X>& logits, const std::vector<int>& targets, size_t BT, size_t V) {
  using std::exp;
  using std::log;
  Array<X> losses(BT);
  for (size_t bt = 0; bt < BT; bt++) {
    const X* z = &logits[bt * V];
    const X top = maximum(z, V);
    X sum = 0;
    for (size_t v = 0; v < V; v++) sum += exp(z[v] - top);
    losses[bt] = log(sum) - (z[targets[bt]] - top);
  }
  return losses;
}

// ---- the whole model, with the depth memory as an explicit list --------------------------------------

template <class X>
using Params = std::map<std::string, Array<X>>;  // by the names of the tensor table

template <class X>
struct Run {
  std::vector<std::vector<Read<X>>> routes;  // [site][route]; none in a residual network
  std::vector<Array<X>> x_qk, x_v;           // [sublayer] what it reads: normalised mixes (BT,C)
  std::vector<Array<X>> outputs;             // [sublayer] its output o (BT,C)
  std::vector<Attention<X>> attention;       // [layer]
  Array<X> logits, losses;                   // (BT,V), (BT)
  X mean_loss;
};

template <class X>
Array<X> sum_of(const Array<X>& a, const Array<X>& b) {
  Array<X> out(a.size());
  for (size_t i = 0; i < a.size(); i++) out[i] = a[i] + b[i];
  return out;
}

template <class X>
Run<X> run_model(const Config& c, const Params<X>& w, const std::vector<int>& tokens,
                 const std::vector<int>& targets, size_t B, size_t T, bool bf16 = false) {
  const size_t C = c.C, F = c.F, V = c.V, BT = B * T;
  Run<X> run;
  auto vector_of = [&](const char* name, size_t layer) {
    const Array<X>& all = w.at(name);
    return Array<X>(all.begin() + long(layer * C), all.begin() + long((layer + 1) * C));
  };

  std::vector<Array<X>> bank(1, Array<X>(BT * C));  // b_0: the token embedding
  for (size_t bt = 0; bt < BT; bt++)
    for (size_t i = 0; i < C; i++) bank[0][bt * C + i] = w.at("wte")[size_t(tokens[bt]) * C + i];
  store(bf16, bank[0]);
  Array<X> partial;             // empty: none
  Array<X> residual = bank[0];  // embedding + sum of all outputs, for the plain Transformer

  // One site: reads with the given queries, then normalises each mix. Leaves x_qk and x_v.
  auto read = [&](const std::vector<Array<X>>& queries, const char* gain_name, const char* norm_name,
                  size_t layer) {
    const Array<X> norm = vector_of(norm_name, layer);
    std::vector<Array<X>> mixes;
    std::vector<Read<X>> reads;
    if (c.arch == Arch::residual) {
      mixes = {residual};
    } else {
      std::vector<Array<X>> sources = bank;
      if (!partial.empty()) sources.push_back(partial);
      for (const Array<X>& query : queries) {
        reads.push_back(route(sources, query, vector_of(gain_name, layer), BT, C));
        mixes.push_back(reads.back().h);
      }
      if (c.arch == Arch::average && mixes.size() == 2) {
        Array<X> mean = sum_of(mixes[0], mixes[1]);
        for (X& value : mean) value = value / X(2);
        mixes = {mean};
      }
    }
    for (Array<X>& mix : mixes)
      if (c.arch != Arch::residual) store(bf16, mix, Round::gradient);
    run.routes.push_back(reads);
    run.x_qk.push_back(rmsnorm(mixes.front(), norm, BT, C));
    run.x_v.push_back(rmsnorm(mixes.back(), norm, BT, C));
    store(bf16, run.x_qk.back()), store(bf16, run.x_v.back());
  };

  for (size_t i = 0; i < 2 * c.L; i++) {
    const size_t layer = i / 2;
    if (i % c.S == 0 && i > 0) bank.push_back(partial), partial.clear();
    Array<X> o;
    if (i % 2 == 0) {
      std::vector<Array<X>> queries;
      if (c.arch != Arch::residual) queries.push_back(vector_of("attn_route_qk", layer));
      if (c.arch == Arch::rd || c.arch == Arch::average) queries.push_back(vector_of("attn_route_v", layer));
      if (c.arch == Arch::tied) queries.push_back(queries[0]);
      if (c.arch == Arch::frozen_v) queries.push_back(Array<X>(C, X(0)));
      read(queries, "attn_route_gain", "attn_norm", layer);
      const X* wqk = &w.at("wqk")[layer * 2 * C * C];
      Array<X> q = linear(run.x_qk.back(), wqk, BT, C, C), k = linear(run.x_qk.back(), wqk + C * C, BT, C, C);
      Array<X> v = linear(run.x_v.back(), &w.at("wv")[layer * C * C], BT, C, C);
      for (Array<X>* turned : {&q, &k}) {
        store(bf16, *turned);
        *turned = rope(*turned, B, T, C, c.NH);
        store(bf16, *turned);
      }
      store(bf16, v);
      run.attention.push_back(attention(q, k, v, B, T, C, c.NH, bf16));
      store(bf16, run.attention.back().att);
      o = linear(run.attention.back().att, &w.at("wo")[layer * C * C], BT, C, C);
    } else {
      std::vector<Array<X>> queries;
      if (c.arch != Arch::residual) queries.push_back(vector_of("mlp_route", layer));
      read(queries, "mlp_route_gain", "mlp_norm", layer);
      Array<X> gate = linear(run.x_qk.back(), &w.at("w_gate")[layer * F * C], BT, C, F);
      Array<X> up = linear(run.x_qk.back(), &w.at("w_up")[layer * F * C], BT, C, F);
      store(bf16, gate), store(bf16, up);
      Array<X> act = swiglu(gate, up);
      store(bf16, act);
      o = linear(act, &w.at("w_down")[layer * C * F], BT, F, C);
    }
    run.outputs.push_back(o);
    partial = partial.empty() ? o : sum_of(partial, o);
    residual = sum_of(residual, o);
    store(bf16, c.arch == Arch::residual ? residual : partial);
  }

  std::vector<Array<X>> queries;
  if (c.arch != Arch::residual) queries.push_back(vector_of("out_route", 0));
  read(queries, "out_route_gain", "final_norm", 0);  // sources: bank + [partial]
  run.logits = linear(run.x_qk.back(), &w.at("wte")[0], BT, C, V);
  store(bf16, run.logits);
  run.losses = cross_entropy(run.logits, targets, BT, V);
  run.mean_loss = 0;
  for (const X& loss : run.losses) run.mean_loss += loss;
  run.mean_loss = run.mean_loss / X(double(BT));
  return run;
}

}  // namespace reference
