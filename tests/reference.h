// reference.h - the model once more, written from its definition as plainly as possible, for tests to compare
// with. Nothing is shared with the trainers but Config, so a mistake there is not repeated here.
//
// Everything is a template on the scalar X. float and double give the error that plain loops of that precision
// make: the yardstick for the trainer's error. long double gives the value that both are measured against.
// Var<X> records every operation, so gradients come from the chain rule alone, without a backward by hand. On
// request the model rounds to bf16 where train_rdattnres.cu says that it does: the yardstick for bf16.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "dev/common/config.h"  // Config: sizes and arms

namespace reference {

// ---- test data ---------------------------------------------------------------------------------------

// Rounded to float, so that float, double and long double all start from the same numbers.
struct Random {
  std::mt19937_64 bits;
  explicit Random(uint64_t seed) : bits(seed) {}

  double uniform() { return double(bits() >> 11) * 0x1p-53; }
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
    for (int& value : values) value = int(bits() % below);
    return values;
  }
};

template <class X>
using Array = std::vector<X>;

// Arrays by name; named("x") points at the numbers of x.
template <class X>
struct Named : std::map<std::string, Array<X>> {
  using std::map<std::string, Array<X>>::map;
  X* operator()(const std::string& name) { return this->at(name).data(); }
  const X* operator()(const std::string& name) const { return this->at(name).data(); }
};

template <class X, class Y>
Named<X> convert(const Named<Y>& named) {
  Named<X> out;
  for (const auto& item : named) out[item.first].assign(item.second.begin(), item.second.end());
  return out;
}

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
  struct Node {  // what a value was made of, and its derivatives by both
    uint32_t a, b;
    X da, db;
  };
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

  static Var record(X value, const Var& a, X da, const Var& b = Var(), X db = 0) {
    std::vector<typename Tape<X>::Node>& nodes = Tape<X>::get().nodes;
    nodes.push_back({a.node, b.node, da, db});
    Var result(value);
    result.node = uint32_t(nodes.size() - 1);
    return result;
  }
  static Var input(X value) { return record(value, Var(), 0); }

  friend Var operator+(const Var& a, const Var& b) { return record(a.value + b.value, a, 1, b, 1); }
  friend Var operator-(const Var& a, const Var& b) { return record(a.value - b.value, a, 1, b, -1); }
  friend Var operator*(const Var& a, const Var& b) { return record(a.value * b.value, a, b.value, b, a.value); }
  friend Var operator/(const Var& a, const Var& b) {
    const X q = a.value / b.value;
    return record(q, a, 1 / b.value, b, -q / b.value);
  }
  friend Var operator-(const Var& a) { return record(-a.value, a, -1); }
  Var& operator+=(const Var& b) { return *this = *this + b; }
  friend Var exp(const Var& a) {
    const X e = std::exp(a.value);
    return record(e, a, e);
  }
  friend Var log(const Var& a) { return record(std::log(a.value), a, 1 / a.value); }
  friend Var sqrt(const Var& a) {
    const X root = std::sqrt(a.value);
    return record(root, a, 1 / (2 * root));
  }
  friend bool operator<(const Var& a, const Var& b) { return a.value < b.value; }
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

// Derivatives of a function of named arrays, which returns one number, by every number of them.
template <class X, class Function>
Named<X> gradients(const Named<double>& inputs, Function function) {
  Tape<X>::get().clear();
  Named<Var<X>> vars;
  for (const auto& item : inputs)
    for (double value : item.second) vars[item.first].push_back(Var<X>::input(X(value)));
  const std::vector<X> d = tape_gradients<X>(function(vars));
  Named<X> out;
  for (const auto& item : vars)
    for (const Var<X>& var : item.second) out[item.first].push_back(d[var.node]);
  return out;
}

template <class X>
X plain_value(const X& x) {
  return x;
}
template <class X>
X plain_value(const Var<X>& x) {
  return x.value;
}

template <class X, class = std::enable_if_t<std::is_arithmetic<X>::value>>
X stored(X x, Round what) {
  return what == Round::gradient ? x : round_bf16(x);
}
template <class X>
Var<X> stored(const Var<X>& x, Round what) {
  Var<X> result = Var<X>::record(stored(x.value, what), x, 1);
  if (what != Round::value) Tape<X>::get().nodes[result.node].b = Tape<X>::STORED;
  return result;
}
// Rounds what a bf16 run keeps in memory; nothing if `bf16` is false.
template <class X>
void store(bool bf16, std::vector<X>& numbers, Round what = Round::both) {
  if (bf16)
    for (X& x : numbers) x = stored(x, what);
}

// ---- layers ------------------------------------------------------------------------------------------

constexpr double EPS = 1e-6;

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
  const X top = plain_value(*std::max_element(z.begin(), z.end()));  // a constant for gradients
  Array<X> p(z.size());
  X sum = 0;
  for (size_t j = 0; j < z.size(); j++) sum += p[j] = exp(z[j] - top);
  for (X& value : p) value = value / sum;
  return p;
}

template <class X>
struct Read {
  Array<X> h, p;  // (BT,C), (BT,K)
};

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

// Turns the pair (i, i + HS/2) of every head by t * 10000^(-2i / HS): (lo + i hi) times e^(i angle). x (B,T,C)
template <class X>
Array<X> rope(const Array<X>& x, size_t B, size_t T, size_t C, size_t NH) {
  using Angle = long double;  // nobody computes angles in float
  const size_t HS = C / NH;
  Array<X> y(x.size());
  for (size_t bt = 0; bt < B * T; bt++)
    for (size_t head = 0; head < NH; head++)
      for (size_t i = 0; i < HS / 2; i++) {
        const Angle angle = Angle(bt % T) * std::pow(Angle(10000), -Angle(2 * i) / Angle(HS));
        const X cosine = X(std::cos(angle));
        const X sine = X(std::sin(angle));
        const size_t lo = bt * C + head * HS + i, hi = lo + HS / 2;
        y[lo] = x[lo] * cosine - x[hi] * sine;
        y[hi] = x[hi] * cosine + x[lo] * sine;
      }
  return y;
}

template <class X>
struct Attention {
  Array<X> att, lse;  // (B,T,C), (B,NH,T)
};

// q, k, v (B,T,C): a_tu = softmax over u <= t of q_t . k_u / sqrt(HS), att_t = sum_u a_tu v_u
template <class X>
Attention<X> attention(const Array<X>& q, const Array<X>& k, const Array<X>& v, size_t B, size_t T, size_t C,
                       size_t NH, bool bf16 = false) {
  using std::exp;
  using std::log;
  using std::sqrt;
  const size_t HS = C / NH;
  const X root = sqrt(X(double(HS)));
  Attention<X> out{Array<X>(B * T * C), Array<X>(B * NH * T)};
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
        const size_t best = size_t(std::max_element(a.begin(), a.end()) - a.begin());
        out.lse[(b * NH + head) * T + t] = scores[best] - log(a[best]);
        store(bf16, a, Round::value);
        for (size_t u = 0; u <= t; u++)
          for (size_t c = head * HS; c < (head + 1) * HS; c++)
            out.att[(b * T + t) * C + c] += a[u] * v[(b * T + u) * C + c];
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
    const X top = plain_value(*std::max_element(z, z + V));
    X sum = 0;
    for (size_t v = 0; v < V; v++) sum += exp(z[v] - top);
    losses[bt] = log(sum) - (z[targets[bt]] - top);
  }
  return losses;
}

// ---- the whole model, with the depth memory as an explicit list --------------------------------------

template <class X>
using Params = Named<X>;  // by the names of the tensor table

template <class X>
struct Run {
  std::vector<std::vector<Read<X>>> routes;  // [site][route]; none in a residual network
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

  std::vector<Array<X>> bank(1, Array<X>(BT * C));  // b_0: the token embedding
  for (size_t bt = 0; bt < BT; bt++)
    for (size_t i = 0; i < C; i++) bank[0][bt * C + i] = w("wte")[size_t(tokens[bt]) * C + i];
  store(bf16, bank[0]);
  Array<X> partial;             // empty: none
  Array<X> residual = bank[0];  // embedding + sum of all outputs, for the plain Transformer

  const auto vector_of = [&](const char* name, size_t layer) {
    return Array<X>(w(name) + layer * C, w(name) + (layer + 1) * C);
  };
  // One site: reads with the given queries ("": held at zero) and normalises each mix.
  const auto read = [&](const std::vector<const char*>& queries, const char* gain, const char* norm,
                        size_t layer) {
    std::vector<Array<X>> mixes;
    std::vector<Read<X>> reads;
    if (c.arch == Arch::residual) {
      mixes = {residual};
    } else {
      std::vector<Array<X>> sources = bank;
      if (!partial.empty()) sources.push_back(partial);
      for (const char* query : queries) {
        const Array<X> q = *query ? vector_of(query, layer) : Array<X>(C, X(0));
        reads.push_back(route(sources, q, vector_of(gain, layer), BT, C));
        mixes.push_back(reads.back().h);
      }
      if (c.arch == Arch::average && mixes.size() == 2) {
        Array<X> mean = sum_of(mixes[0], mixes[1]);
        for (X& value : mean) value = value / X(2);
        mixes = {mean};
      }
      for (Array<X>& mix : mixes) store(bf16, mix, Round::gradient);
    }
    run.routes.push_back(reads);
    for (Array<X>& mix : mixes) {
      mix = rmsnorm(mix, vector_of(norm, layer), BT, C);
      store(bf16, mix);
    }
    return mixes;
  };

  std::vector<const char*> attention_queries = {"attn_route_qk"};
  if (c.arch == Arch::rd || c.arch == Arch::average) attention_queries.push_back("attn_route_v");
  if (c.arch == Arch::tied) attention_queries.push_back("attn_route_qk");
  if (c.arch == Arch::frozen_v) attention_queries.push_back("");

  for (size_t i = 0; i < 2 * c.L; i++) {
    const size_t layer = i / 2;
    if (i % c.S == 0 && i > 0) {
      bank.push_back(partial);
      partial.clear();
    }
    Array<X> o;
    if (i % 2 == 0) {
      const std::vector<Array<X>> x = read(attention_queries, "attn_route_gain", "attn_norm", layer);
      const X* wqk = w("wqk") + layer * 2 * C * C;
      Array<X> q = linear(x.front(), wqk, BT, C, C);
      Array<X> k = linear(x.front(), wqk + C * C, BT, C, C);
      Array<X> v = linear(x.back(), w("wv") + layer * C * C, BT, C, C);
      for (Array<X>* turned : {&q, &k}) {
        store(bf16, *turned);
        *turned = rope(*turned, B, T, C, c.NH);
        store(bf16, *turned);
      }
      store(bf16, v);
      run.attention.push_back(attention(q, k, v, B, T, C, c.NH, bf16));
      store(bf16, run.attention.back().att);
      o = linear(run.attention.back().att, w("wo") + layer * C * C, BT, C, C);
    } else {
      const Array<X> x = read({"mlp_route"}, "mlp_route_gain", "mlp_norm", layer)[0];
      Array<X> gate = linear(x, w("w_gate") + layer * F * C, BT, C, F);
      Array<X> up = linear(x, w("w_up") + layer * F * C, BT, C, F);
      store(bf16, gate);
      store(bf16, up);
      Array<X> act = swiglu(gate, up);
      store(bf16, act);
      o = linear(act, w("w_down") + layer * C * F, BT, F, C);
    }
    partial = partial.empty() ? o : sum_of(partial, o);
    residual = sum_of(residual, o);
    store(bf16, c.arch == Arch::residual ? residual : partial);
  }

  const Array<X> x = read({"out_route"}, "out_route_gain", "final_norm", 0)[0];  // sources: bank + [partial]
  run.logits = linear(x, w("wte"), BT, C, V);
  store(bf16, run.logits);
  run.losses = cross_entropy(run.logits, targets, BT, V);
  run.mean_loss = 0;
  for (const X& loss : run.losses) run.mean_loss += loss;
  run.mean_loss = run.mean_loss / X(double(BT));
  return run;
}

}  // namespace reference
