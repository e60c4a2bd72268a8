// test_layers.cpp - every layer of the CPU trainer, alone, as float and as double.
//
// Each layer is run on odd sizes and compared with plain loops (tests/reference.h) evaluated in long double;
// the same loops in the layer's own precision are the yardstick for its error (tests/compare.h). Gradients are
// held against the chain rule, recorded operation by operation, and against central differences of the layer's
// own forward. Every layer must also give the same bits for any number of threads, add where it says "adds",
// and overwrite (fresh memory is NaN) where it does not.
#include "tests/check.h"      // TEST, CHECK, finish
#include "tests/compare.h"    // same_bits, check_error
#include "tests/reference.h"  // the same layers as plain loops, gradients without a backward

#define TESTING
#define CPU_NAMESPACE cpu_float
#define REAL float
#include "train_rdattnres_cpu.cpp"
#define CPU_NAMESPACE cpu_double
#define REAL double
#include "train_rdattnres_cpu.cpp"

using reference::Array;
using reference::Random;
using reference::Tape;
using reference::Var;

// One name for both builds of the trainer, so that a test is written once.
#define BUILD(Name, ns)                                                        \
  struct Name {                                                                \
    using real = ns::real;                                                     \
    static constexpr auto embedding_forward = ns::embedding_forward;           \
    static constexpr auto embedding_backward = ns::embedding_backward;         \
    static constexpr auto source_rstd = ns::source_rstd;                       \
    static constexpr auto route_forward = ns::route_forward;                   \
    static constexpr auto route_mix = ns::route_mix;                           \
    static constexpr auto route_backward = ns::route_backward;                 \
    static constexpr auto rmsnorm_forward = ns::rmsnorm_forward;               \
    static constexpr auto rmsnorm_backward = ns::rmsnorm_backward;             \
    static constexpr auto matmul = ns::matmul;                                 \
    static constexpr auto matmul_forward = ns::matmul_forward;                 \
    static constexpr auto matmul_backward_input = ns::matmul_backward_input;   \
    static constexpr auto matmul_backward_weight = ns::matmul_backward_weight; \
    static constexpr auto rope_forward = ns::rope_forward;                     \
    static constexpr auto rope_backward = ns::rope_backward;                   \
    static constexpr auto attention_forward = ns::attention_forward;           \
    static constexpr auto attention_backward = ns::attention_backward;         \
    static constexpr auto swiglu_forward = ns::swiglu_forward;                 \
    static constexpr auto swiglu_backward = ns::swiglu_backward;               \
    static constexpr auto classifier = ns::classifier;                         \
  };
BUILD(Float, cpu_float)
BUILD(Double, cpu_double)

constexpr double DIFFERENCE_TOLERANCE = 1e-9;  // central differences, relative

// ---- arrays by name ----------------------------------------------------------------------------------

template <class X>
using Named = std::map<std::string, std::vector<X>>;
using Values = Named<double>;

template <class X, class Y>
std::vector<X> convert(const std::vector<Y>& values) {
  return std::vector<X>(values.begin(), values.end());
}
template <class X, class Y>
Named<X> convert(const Named<Y>& named) {
  Named<X> out;
  for (const auto& item : named) out[item.first] = convert<X>(item.second);
  return out;
}

template <class X>
bool same_bits(const Named<X>& a, const Named<X>& b) {
  if (a.size() != b.size()) return false;
  for (const auto& item : a)
    if (!b.count(item.first) || !same_bits(item.second, b.at(item.first))) return false;
  return true;
}

template <class X>
std::vector<X> filled(size_t n, double value) {
  return std::vector<X>(n, X(value));
}

// ---- what is checked of every layer ------------------------------------------------------------------
//
// A layer is a struct with
//   name, C (length of a row)
//   inputs(random) -> Values                    cotangents(random) -> Values: gradient of some of the outputs
//   adds(input): does its gradient add?         plain<X>(inputs) -> outputs, from reference.h
//   forward<Build>(inputs) -> outputs           backward<Build>(inputs, cotangents, gradients): fills gradients

// The worst outputs and gradients of the case under way, for its line in the table.
struct Columns {
  double ours[4] = {}, plain[4] = {};
};  // outputs float, double, gradients float, double

template <class real>
void compare(Columns& columns, bool gradient, const std::string& layer, const std::string& output,
             const std::vector<real>& ours, const std::vector<real>& plain,
             const std::vector<long double>& exact) {
  const Error got = error_of(ours, exact), yardstick = error_of(plain, exact);
  check_error<real>(layer + ": " + (gradient ? "gradient of " : "") + output, got, yardstick);
  const int column = (sizeof(real) == sizeof(double)) + 2 * gradient;
  columns.ours[column] = std::fmax(columns.ours[column], got.rms);
  columns.plain[column] = std::fmax(columns.plain[column], yardstick.rms);
}

// Gradient of sum(cotangent * output) by the chain rule, in X.
template <class X, class Layer>
Named<X> plain_gradients(const Layer& layer, const Values& in, const Values& cotangents) {
  Tape<X>::get().clear();
  Named<Var<X>> vars;
  for (const auto& item : in)
    for (double value : item.second) vars[item.first].push_back(Var<X>::input(X(value)));
  const Named<Var<X>> out = layer.template plain<Var<X>>(vars);
  Var<X> sum = 0;
  for (const auto& item : cotangents)
    for (size_t i = 0; i < item.second.size(); i++) sum += Var<X>(item.second[i]) * out.at(item.first)[i];
  const std::vector<X> d = reference::tape_gradients(sum);
  Named<X> gradients;
  for (const auto& item : vars)
    for (const Var<X>& var : item.second) gradients[item.first].push_back(d[var.node]);
  return gradients;
}

// Memory for the gradients: zero where they add, NaN where they are overwritten.
template <class X, class Layer>
Named<X> fresh_gradients(const Layer& layer, const Values& in) {
  Named<X> gradients;
  for (const auto& item : in)
    gradients[item.first] = filled<X>(item.second.size(), layer.adds(item.first) ? 0 : NAN);
  return gradients;
}

template <class Build, class Layer>
void compare_with_plain(Columns& columns, const Layer& layer, const Values& in, const Values& cotangents,
                        const Named<long double>& exact, const Named<long double>& exact_gradients) {
  using real = typename Build::real;
  const Named<real> typed = convert<real>(in), cot = convert<real>(cotangents);
  const Named<real> ours = layer.template forward<Build>(typed), plain = layer.template plain<real>(typed);
  for (const auto& item : exact)
    compare(columns, false, layer.name, item.first, ours.at(item.first), plain.at(item.first), item.second);

  Named<real> gradients = fresh_gradients<real>(layer, in);
  layer.template backward<Build>(typed, cot, gradients);
  const Named<real> plain_d = plain_gradients<real>(layer, in, cotangents);
  for (const auto& item : exact_gradients)
    compare(columns, true, layer.name, item.first, gradients.at(item.first), plain_d.at(item.first),
            item.second);

  // Accumulation: on top of something that is not zero.
  Random random(77);
  Named<real> base = fresh_gradients<real>(layer, in);
  for (auto& item : base)
    if (layer.adds(item.first)) item.second = convert<real>(random.normals(item.second.size()));
  Named<real> added = base;
  layer.template backward<Build>(typed, cot, added);
  for (const auto& item : base) {
    if (!layer.adds(item.first)) {
      CHECK(same_bits(added.at(item.first), gradients.at(item.first)));
      continue;
    }
    double worst = 0;
    const double scale = 1 + rms(gradients.at(item.first));
    for (size_t i = 0; i < item.second.size(); i++)
      worst = std::fmax(worst, std::fabs(double(added.at(item.first)[i]) - double(item.second[i]) -
                                         double(gradients.at(item.first)[i])) /
                                   scale);
    CHECK_CLOSE(worst, 0, 64 * epsilon<real>());
  }

  // Threads: the same bits.
  for (int threads : {1, 2, 3, 8}) {
    set_threads(threads);
    CHECK(same_bits(layer.template forward<Build>(typed), ours));
    Named<real> again = fresh_gradients<real>(layer, in);
    layer.template backward<Build>(typed, cot, again);
    CHECK(same_bits(again, gradients));
  }
  set_threads(1);
}

// Fourth-order central differences of the double build's own forward: (8 d(h) - d(2h)) / 12h with
// d(h) = f(x+h) - f(x-h). Returns the worst error, relative to the larger of the element and the array's rms.
template <class Layer>
double worst_difference(const Layer& layer, const Values& in, const Values& cotangents) {
  Named<double> gradients = fresh_gradients<double>(layer, in);
  layer.template backward<Double>(in, cotangents, gradients);
  Random random(5);
  double worst = 0;
  for (const auto& item : in) {
    const double scale = rms(gradients.at(item.first));
    for (int sample = 0; sample < 6; sample++) {
      const size_t i = random.next() % item.second.size(), row = i / layer.C * layer.C;
      const auto begin = item.second.begin() + long(row);
      const double step =
          2e-3 * rms(std::vector<double>(begin, begin + long(std::min(layer.C, item.second.size() - row))));
      Values at = in;
      double& x = at[item.first][i];
      const double x0 = x;
      auto difference = [&](double h) {  // output by output: most do not depend on x and cancel exactly
        x = x0 + h;
        const Values up = layer.template forward<Double>(at);
        x = x0 - h;
        const Values down = layer.template forward<Double>(at);
        double sum = 0;
        for (const auto& cot : cotangents)
          for (size_t k = 0; k < cot.second.size(); k++)
            sum += cot.second[k] * (up.at(cot.first)[k] - down.at(cot.first)[k]);
        return sum;
      };
      const double slope = (8 * difference(step) - difference(2 * step)) / (12 * step);
      const double g = gradients.at(item.first)[i];
      const double error = std::fabs(slope - g) / std::fmax(std::fabs(g), scale > 0 ? scale : 1);
      if (!(error <= worst)) worst = std::isfinite(error) ? error : INFINITY;
    }
  }
  return worst;
}

template <class Layer>
void check_layer(const Layer& layer, uint64_t seed) {
  TEST(layer.name);
  Random random(seed);
  const Values in = layer.inputs(random), cotangents = layer.cotangents(random);
  const Named<long double> exact = layer.template plain<long double>(convert<long double>(in));
  const Named<long double> exact_gradients = plain_gradients<long double>(layer, in, cotangents);
  Columns columns;
  compare_with_plain<Float>(columns, layer, in, cotangents, exact, exact_gradients);
  compare_with_plain<Double>(columns, layer, in, cotangents, exact, exact_gradients);
  const double difference = worst_difference(layer, in, cotangents);
  CHECK_CLOSE(difference, 0, DIFFERENCE_TOLERANCE);
  printf("  %-38s", layer.name.c_str());
  for (int column : {0, 2, 1, 3}) printf("  %7.1e %7.1e", columns.ours[column], columns.plain[column]);
  printf("  %7.1e\n", difference);
}

// Rows of very different size, one so small that eps matters inside a norm.
std::vector<double> uneven_rows(Random& random, size_t rows, size_t C) {
  std::vector<double> values = random.normals(rows * C);
  for (size_t row = 0; row < rows; row++)
    for (size_t c = 0; c < C; c++)
      values[row * C + c] *= row % 7 == 3 ? 0x1p-10 : std::ldexp(1.0, int(row % 5) - 2);
  return values;
}

// ---- the layers --------------------------------------------------------------------------------------

struct EmbeddingLayer {
  size_t BT, C, V;
  std::string name = format("embedding BT=%zu C=%zu V=%zu", BT, C, V);
  std::vector<int> tokens() const { return Random(3).integers(BT, V); }  // V < BT: some occur several times
  Values inputs(Random& random) const { return {{"wte", random.normals(V * C)}}; }
  Values cotangents(Random& random) const { return {{"out", random.normals(BT * C)}}; }
  bool adds(const std::string&) const { return true; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    Named<X> out;
    for (int token : tokens())
      for (size_t c = 0; c < C; c++) out["out"].push_back(in.at("wte")[size_t(token) * C + c]);
    return out;
  }
  template <class Build, class real = typename Build::real>
  Named<real> forward(const Named<real>& in) const {
    Named<real> out{{"out", filled<real>(BT * C, NAN)}};
    Build::embedding_forward(out["out"].data(), tokens().data(), in.at("wte").data(), BT, C);
    return out;
  }
  template <class Build, class real = typename Build::real>
  void backward(const Named<real>&, const Named<real>& cot, Named<real>& d) const {
    Build::embedding_backward(d["wte"].data(), cot.at("out").data(), tokens().data(), BT, C);
  }
};

// R queries over K sources; the last one of two may be null: held at zero.
struct RouteLayer {
  size_t BT, C, K, R;
  bool null_query;
  std::string name = format("route K=%zu R=%zu BT=%zu C=%zu%s", K, R, BT, C, null_query ? " null" : "");
  std::string source(size_t j) const { return format("source%zu", j); }
  size_t trained() const { return R - null_query; }

  Values inputs(Random& random) const {
    Values in;
    for (size_t j = 0; j < K; j++) in[source(j)] = uneven_rows(random, BT, C);
    for (size_t r = 0; r < trained(); r++) in[format("query%zu", r)] = random.normals(C, 0, 0.3);
    in["gain"] = random.normals(C, 1, 0.4);
    return in;
  }
  Values cotangents(Random& random) const { return {{"h", random.normals(R * BT * C)}}; }
  bool adds(const std::string&) const { return true; }

  template <class X>
  Named<X> plain(const Named<X>& in) const {
    std::vector<Array<X>> sources;
    for (size_t j = 0; j < K; j++) sources.push_back(in.at(source(j)));
    Named<X> out;
    for (size_t r = 0; r < R; r++) {
      const Array<X> query = r < trained() ? in.at(format("query%zu", r)) : Array<X>(C, X(0));
      const reference::Read<X> read = reference::route(sources, query, in.at("gain"), BT, C);
      out["h"].insert(out["h"].end(), read.h.begin(), read.h.end());
      out["p"].insert(out["p"].end(), read.p.begin(), read.p.end());
    }
    for (size_t j = 0; j < K; j++)
      for (size_t bt = 0; bt < BT; bt++)
        out["r"].push_back(reference::inverse_rms(&sources[j][bt * C], C) / X(1000));  // largest possible: 1000
    return out;
  }

  template <class real>
  struct Pointers {
    std::vector<const real*> sources, rstd, query;
    std::vector<std::vector<real>> rstd_values;
  };
  template <class Build, class real = typename Build::real>
  Pointers<real> pointers(const Named<real>& in) const {
    Pointers<real> p;
    p.rstd_values.assign(K, filled<real>(BT, NAN));
    for (size_t j = 0; j < K; j++) {
      p.sources.push_back(in.at(source(j)).data());
      Build::source_rstd(p.rstd_values[j].data(), p.sources[j], BT, C);
      p.rstd.push_back(p.rstd_values[j].data());
    }
    for (size_t r = 0; r < R; r++)
      p.query.push_back(r < trained() ? in.at(format("query%zu", r)).data() : nullptr);
    return p;
  }
  template <class Build, class real = typename Build::real>
  Named<real> forward(const Named<real>& in) const {
    const Pointers<real> ptr = pointers<Build>(in);
    Named<real> out{{"h", filled<real>(R * BT * C, NAN)}, {"p", filled<real>(R * BT * K, NAN)}};
    Build::route_forward(out["h"].data(), out["p"].data(), ptr.sources.data(), ptr.rstd.data(),
                         ptr.query.data(), in.at("gain").data(), BT, C, K, R);
    for (size_t j = 0; j < K; j++)
      for (real r : ptr.rstd_values[j]) out["r"].push_back(r / 1000);
    // The backward makes the mixes again from the saved weights: they must be the same bits.
    std::vector<real> again = filled<real>(R * BT * C, NAN);
    Build::route_mix(again.data(), out["p"].data(), ptr.sources.data(), BT, C, K, R);
    CHECK(same_bits(again, out["h"]));
    return out;
  }
  template <class Build, class real = typename Build::real>
  void backward(const Named<real>& in, const Named<real>& cot, Named<real>& d) const {
    const Pointers<real> ptr = pointers<Build>(in);
    const Named<real> out = forward<Build>(in);
    std::vector<real*> dsources, dquery;
    for (size_t j = 0; j < K; j++) dsources.push_back(d[source(j)].data());
    for (size_t r = 0; r < R; r++) dquery.push_back(r < trained() ? d[format("query%zu", r)].data() : nullptr);
    Build::route_backward(dsources.data(), dquery.data(), d["gain"].data(), cot.at("h").data(),
                          out.at("h").data(), out.at("p").data(), ptr.sources.data(), ptr.rstd.data(),
                          ptr.query.data(), in.at("gain").data(), BT, C, K, R);
  }
};

struct NormLayer {
  size_t BT, C;
  std::string name = format("rmsnorm BT=%zu C=%zu", BT, C);
  Values inputs(Random& random) const {
    return {{"h", uneven_rows(random, BT, C)}, {"weight", random.normals(C, 1, 0.4)}};
  }
  Values cotangents(Random& random) const { return {{"x", random.normals(BT * C)}}; }
  bool adds(const std::string& input) const { return input == "weight"; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    return {{"x", reference::rmsnorm(in.at("h"), in.at("weight"), BT, C)}};
  }
  template <class Build, class real = typename Build::real>
  Named<real> forward(const Named<real>& in) const {
    Named<real> out{{"x", filled<real>(BT * C, NAN)}};
    Build::rmsnorm_forward(out["x"].data(), in.at("h").data(), in.at("weight").data(), BT, C);
    return out;
  }
  template <class Build, class real = typename Build::real>
  void backward(const Named<real>& in, const Named<real>& cot, Named<real>& d) const {
    Build::rmsnorm_backward(d["h"].data(), d["weight"].data(), cot.at("x").data(), in.at("h").data(),
                            in.at("weight").data(), BT, C);
  }
};

// out = x w^T into rows that stand ldo apart; what lies between the rows is not touched.
struct LinearLayer {
  size_t BT, C, OC, ldo;
  bool add_dx;
  std::string name = format("matmul BT=%zu IC=%zu OC=%zu%s", BT, C, OC, add_dx ? " adding dx" : "");
  Values inputs(Random& random) const { return {{"x", random.normals(BT * C)}, {"w", random.normals(OC * C)}}; }
  Values cotangents(Random& random) const { return {{"out", random.normals(BT * OC)}}; }
  bool adds(const std::string& input) const { return input == "w" || add_dx; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    return {{"out", reference::linear(in.at("x"), in.at("w").data(), BT, C, OC)}};
  }
  template <class Build, class real = typename Build::real>
  Named<real> forward(const Named<real>& in) const {
    std::vector<real> rows = filled<real>(BT * ldo, 99), out;
    Build::matmul_forward(rows.data(), in.at("x").data(), in.at("w").data(), BT, C, OC, ldo);
    for (size_t bt = 0; bt < BT; bt++)
      for (size_t o = 0; o < ldo; o++) {
        if (o < OC)
          out.push_back(rows[bt * ldo + o]);
        else
          CHECK_EQ(rows[bt * ldo + o], real(99));
      }
    return {{"out", out}};
  }
  template <class Build, class real = typename Build::real>
  void backward(const Named<real>& in, const Named<real>& cot, Named<real>& d) const {
    std::vector<real> rows = filled<real>(BT * ldo, NAN);
    for (size_t bt = 0; bt < BT; bt++)
      for (size_t o = 0; o < OC; o++) rows[bt * ldo + o] = cot.at("out")[bt * OC + o];
    Build::matmul_backward_input(d["x"].data(), rows.data(), in.at("w").data(), BT, C, OC, ldo, add_dx);
    Build::matmul_backward_weight(d["w"].data(), rows.data(), in.at("x").data(), BT, C, OC, ldo);
  }
};

// Takes the packed (B,T,3C) apart.
template <class X>
Array<X> third(const Array<X>& qkv, size_t C, size_t which) {
  Array<X> part;
  for (size_t i = 0; i < qkv.size(); i++)
    if (i / C % 3 == which) part.push_back(qkv[i]);
  return part;
}

struct RopeLayer {
  size_t B, T, C, NH;
  std::string name = format("rope B=%zu T=%zu C=%zu NH=%zu", B, T, C, NH);
  Values inputs(Random& random) const { return {{"qkv", random.normals(B * T * 3 * C)}}; }
  Values cotangents(Random& random) const { return {{"turned", random.normals(B * T * 3 * C)}}; }
  bool adds(const std::string&) const { return false; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    Array<X> parts[3];
    for (size_t which = 0; which < 3; which++) {
      parts[which] = third(in.at("qkv"), C, which);
      if (which < 2) parts[which] = reference::rope(parts[which], B, T, C, NH);
    }
    Named<X> out;
    for (size_t i = 0; i < 3 * B * T * C; i++) out["turned"].push_back(parts[i / C % 3][i / C / 3 * C + i % C]);
    return out;
  }
  template <class Build, class real = typename Build::real>
  Named<real> forward(const Named<real>& in) const {
    Named<real> out{{"turned", in.at("qkv")}};
    Build::rope_forward(out["turned"].data(), B, T, C, NH);
    return out;
  }
  template <class Build, class real = typename Build::real>
  void backward(const Named<real>&, const Named<real>& cot, Named<real>& d) const {
    d["qkv"] = cot.at("turned");
    Build::rope_backward(d["qkv"].data(), B, T, C, NH);
  }
};

struct AttentionLayer {
  size_t B, T, C, NH;
  std::string name = format("attention B=%zu T=%zu C=%zu NH=%zu", B, T, C, NH);
  Values inputs(Random& random) const { return {{"qkv", random.normals(B * T * 3 * C)}}; }
  Values cotangents(Random& random) const { return {{"att", random.normals(B * T * C)}}; }
  bool adds(const std::string&) const { return false; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    const Array<X>& qkv = in.at("qkv");
    const reference::Attention<X> out =
        reference::attention(third(qkv, C, 0), third(qkv, C, 1), third(qkv, C, 2), B, T, C, NH);
    return {{"att", out.att}, {"lse", out.lse}};
  }
  template <class Build, class real = typename Build::real>
  Named<real> forward(const Named<real>& in) const {
    Named<real> out{{"att", filled<real>(B * T * C, NAN)}, {"lse", filled<real>(B * NH * T, NAN)}};
    Build::attention_forward(out["att"].data(), out["lse"].data(), in.at("qkv").data(), B, T, C, NH);
    return out;
  }
  template <class Build, class real = typename Build::real>
  void backward(const Named<real>& in, const Named<real>& cot, Named<real>& d) const {
    const Named<real> out = forward<Build>(in);
    Build::attention_backward(d["qkv"].data(), cot.at("att").data(), in.at("qkv").data(), out.at("att").data(),
                              out.at("lse").data(), B, T, C, NH);
  }
};

struct SwigluLayer {
  size_t C;  // number of elements
  std::string name = format("swiglu n=%zu", C);
  Values inputs(Random& random) const { return {{"gate", random.normals(C, 0, 2)}, {"up", random.normals(C)}}; }
  Values cotangents(Random& random) const { return {{"act", random.normals(C)}}; }
  bool adds(const std::string&) const { return false; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    return {{"act", reference::swiglu(in.at("gate"), in.at("up"))}};
  }
  template <class Build, class real = typename Build::real>
  Named<real> forward(const Named<real>& in) const {
    Named<real> out{{"act", filled<real>(C, NAN)}};
    Build::swiglu_forward(out["act"].data(), in.at("gate").data(), in.at("up").data(), C);
    return out;
  }
  template <class Build, class real = typename Build::real>
  void backward(const Named<real>& in, const Named<real>& cot, Named<real>& d) const {
    // In place, as the model does it; act comes along, the same bits as in the forward.
    std::vector<real> gate = in.at("gate"), up = in.at("up"), act = cot.at("act");
    Build::swiglu_backward(gate.data(), up.data(), act.data(), act.data(), gate.data(), up.data(), C);
    CHECK(same_bits(act, forward<Build>(in).at("act")));
    d["gate"] = gate, d["up"] = up;
  }
};

// The padding rows of wte are NaN and those of its gradient a mark: neither is read or written.
struct ClassifierLayer {
  size_t BT, C, V;
  std::string name = format("classifier BT=%zu C=%zu V=%zu", BT, C, V);
  size_t Vp() const { return (V + 127) / 128 * 128; }
  std::vector<int> targets() const { return Random(9).integers(BT, V); }
  Values inputs(Random& random) const {
    return {{"x", random.normals(BT * C)}, {"wte", random.normals(V * C, 0, 0.5)}};
  }
  Values cotangents(Random&) const { return {{"losses", std::vector<double>(BT, 0.375)}}; }
  bool adds(const std::string& input) const { return input == "wte"; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    const Array<X> logits = reference::linear(in.at("x"), in.at("wte").data(), BT, C, V);
    return {{"losses", reference::cross_entropy(logits, targets(), BT, V)}};
  }
  template <class Build, class real = typename Build::real>
  Named<real> run(const Named<real>& in, real dloss, Named<real>* d) const {
    std::vector<real> wte = in.at("wte"), logits = filled<real>(cpu_float::CLASSIFIER_ROWS * Vp(), NAN), dwte;
    wte.resize(Vp() * C, real(NAN));
    Named<real> out{{"losses", filled<real>(BT, NAN)}};
    if (d) dwte = (*d)["wte"], dwte.resize(Vp() * C, real(99));
    Build::classifier(out["losses"].data(), nullptr, d ? (*d)["x"].data() : nullptr, d ? dwte.data() : nullptr,
                      in.at("x").data(), wte.data(), targets().data(), dloss, logits.data(), BT, C, V, Vp());
    if (d) {
      for (size_t i = V * C; i < Vp() * C; i++) CHECK_EQ(dwte[i], real(99));
      dwte.resize(V * C);
      (*d)["wte"] = dwte;
    }
    return out;
  }
  template <class Build, class real = typename Build::real>
  Named<real> forward(const Named<real>& in) const {
    return run<Build, real>(in, real(0), nullptr);
  }
  template <class Build, class real = typename Build::real>
  void backward(const Named<real>& in, const Named<real>& cot, Named<real>& d) const {
    const Named<real> out = run<Build>(in, cot.at("losses")[0], &d);
    CHECK(same_bits(out, forward<Build>(in)));  // losses do not depend on whether gradients are asked for
  }
};

// ---- the matrix product itself -----------------------------------------------------------------------

// op(A) op(B) for every way of storing A and B, with gaps between rows that hold NaN.
template <class Build>
void check_matmul(size_t M, size_t N, size_t K, double& worst_ours, double& worst_plain) {
  using real = typename Build::real;
  for (int variant = 0; variant < 8; variant++) {
    const bool trans_a = variant & 1, trans_b = variant & 2, accumulate = variant & 4;
    const size_t lda = (trans_a ? M : K) + 3, ldb = (trans_b ? K : N) + 5, ldo = N + 2;
    Random random(M * 1000 + N * 100 + K * 10 + size_t(variant));
    std::vector<real> a = filled<real>((trans_a ? K : M) * lda, NAN),
                      b = filled<real>((trans_b ? N : K) * ldb, NAN);
    std::vector<real> out = filled<real>(M * ldo, accumulate ? 99 : NAN);
    auto a_at = [&](size_t i, size_t k) -> real& { return trans_a ? a[k * lda + i] : a[i * lda + k]; };
    auto b_at = [&](size_t k, size_t j) -> real& { return trans_b ? b[j * ldb + k] : b[k * ldb + j]; };
    for (size_t i = 0; i < M; i++)
      for (size_t k = 0; k < K; k++) a_at(i, k) = real(random.normal());
    for (size_t k = 0; k < K; k++)
      for (size_t j = 0; j < N; j++) b_at(k, j) = real(random.normal());
    for (size_t i = 0; i < M; i++)
      for (size_t j = 0; j < N; j++)
        if (accumulate) out[i * ldo + j] = real(random.normal());
    const std::vector<real> before = out;
    Build::matmul(out.data(), ldo, a.data(), lda, trans_a, b.data(), ldb, trans_b, M, N, K, accumulate);
    std::vector<real> got, plain;
    std::vector<long double> exact;
    for (size_t i = 0; i < M; i++) {
      for (size_t j = 0; j < N; j++) {
        long double sum = 0;
        real rounded = 0;
        for (size_t k = 0; k < K; k++) {
          sum += (long double)(a_at(i, k)) * (long double)(b_at(k, j));
          rounded += a_at(i, k) * b_at(k, j);
        }
        const real start = accumulate ? before[i * ldo + j] : 0;
        got.push_back(out[i * ldo + j]), plain.push_back(start + rounded);
        exact.push_back((long double)(start) + sum);
      }
      for (size_t j = N; j < ldo; j++)
        CHECK(memcmp(&out[i * ldo + j], &before[i * ldo + j], sizeof(real)) == 0);
    }
    const Error ours = error_of(got, exact), yardstick = error_of(plain, exact);
    check_error<real>(format("matmul %zu x %zu x %zu, variant %d", M, N, K, variant), ours, yardstick);
    worst_ours = std::fmax(worst_ours, ours.rms), worst_plain = std::fmax(worst_plain, yardstick.rms);
    for (int threads : {1, 3, 8}) {
      std::vector<real> again = before;
      set_threads(threads);
      Build::matmul(again.data(), ldo, a.data(), lda, trans_a, b.data(), ldb, trans_b, M, N, K, accumulate);
      CHECK(same_bits(again, out));
    }
    set_threads(1);
    // The product of the first rows alone: a row's bits do not depend on its company.
    if (M > 1) {
      std::vector<real> again = before;
      const size_t rows = M / 2;
      Build::matmul(again.data(), ldo, a.data(), lda, trans_a, b.data(), ldb, trans_b, rows, N, K, accumulate);
      CHECK(memcmp(again.data(), out.data(), rows * ldo * sizeof(real)) == 0);
    }
  }
}

void test_matmul() {
  TEST("matmul: every transpose, odd sizes, gaps between rows, accumulation");
  // Also beyond the sizes at which the product is cut into pieces: 576 along K, 1536 along M and N.
  const size_t sizes[][3] = {{1, 1, 1},      {1, 131, 48},   {3, 5, 7},      {37, 131, 48},  {64, 64, 64},
                             {65, 63, 129},  {74, 144, 48},  {131, 48, 128}, {16, 17, 300},  {200, 9, 33},
                             {7, 1, 1000},   {33, 70, 577},  {9, 35, 1729},  {1540, 19, 10}, {5, 1550, 11},
                             {1600, 3, 600}, {100, 128, 576}};
  double ours[2] = {}, plain[2] = {};
  for (const size_t* s : sizes) {
    check_matmul<Float>(s[0], s[1], s[2], ours[0], plain[0]);
    check_matmul<Double>(s[0], s[1], s[2], ours[1], plain[1]);
  }
  printf("  %-38s  %7.1e %7.1e                    %7.1e %7.1e\n", "matmul, worst of 136 products", ours[0],
         plain[0], ours[1], plain[1]);
}

// ---- special cases -----------------------------------------------------------------------------------

template <class Build>
void check_lone_source() {
  using real = typename Build::real;
  const RouteLayer layer{74, 48, 1, 2, false};
  Random random(21);
  Named<real> in = convert<real>(layer.inputs(random));
  for (real& q : in["query0"]) q *= 1000;
  const Named<real> cot = convert<real>(layer.cotangents(random));
  const Named<real> out = layer.forward<Build>(in);
  for (real p : out.at("p")) CHECK_EQ(p, real(1));
  const std::vector<real>&source = in["source0"], &h = out.at("h");
  CHECK(memcmp(h.data(), source.data(), source.size() * sizeof(real)) == 0);
  CHECK(memcmp(h.data() + source.size(), source.data(), source.size() * sizeof(real)) == 0);
  Named<real> d;
  for (const auto& item : in) d[item.first] = filled<real>(item.second.size(), 0.25);
  layer.backward<Build>(in, cot, d);
  for (const char* name : {"query0", "query1", "gain"})
    for (real g : d[name]) CHECK_EQ(g, real(0.25));
  for (size_t i = 0; i < source.size(); i++)  // both mixes are the source itself
    CHECK_CLOSE(d["source0"][i], real(0.25) + cot.at("h")[i] + cot.at("h")[source.size() + i],
                4 * epsilon<real>() * 8);
}

void test_lone_source() {
  TEST("a lone source: weight exactly 1, mix its very bits, gradients of query and gain exactly zero");
  check_lone_source<Float>();
  check_lone_source<Double>();
}

template <class Build>
void check_uniform() {
  using real = typename Build::real;
  for (size_t K : {1, 2, 3, 5}) {
    const RouteLayer layer{37, 48, K, 1, true};
    Random random(22);
    const Named<real> out = layer.forward<Build>(convert<real>(layer.inputs(random)));
    for (real p : out.at("p")) CHECK_EQ(p, 1 / real(K));
  }
}

// Logits of about +-1e4: each read takes one source, bit for bit, and nothing turns into NaN.
template <class Build>
void check_extreme_routes() {
  using real = typename Build::real;
  const RouteLayer layer{74, 48, 4, 2, false};
  const size_t BT = layer.BT, C = layer.C, K = layer.K;
  Random random(23);
  Named<real> in = convert<real>(layer.inputs(random));
  for (const char* name : {"query0", "query1"})
    for (real& q : in[name]) q *= 5000;
  const Named<real> cot = convert<real>(layer.cotangents(random));
  const Named<real> out = layer.forward<Build>(in);
  const Named<long double> exact = layer.plain<long double>(convert<long double>(in));
  size_t one_hot = 0;
  double largest = 0;
  for (size_t r = 0; r < 2; r++)
    for (size_t bt = 0; bt < BT; bt++) {
      const size_t row = r * BT + bt;
      size_t winner = 0;
      for (size_t j = 0; j < K; j++) {
        const real p = out.at("p")[row * K + j];
        CHECK(p >= 0 && p <= 1);
        if (exact.at("p")[row * K + j] > exact.at("p")[row * K + winner]) winner = j;
        long double z = 0;
        const auto& s = in[layer.source(j)];
        for (size_t c = 0; c < C; c++)
          z += (long double)(in[format("query%zu", r)][c] * in["gain"][c]) * (long double)(s[bt * C + c]);
        z *= 1000 * exact.at("r")[j * BT + bt];
        largest = std::fmax(largest, double(std::fabs(z)));
      }
      if (exact.at("p")[row * K + winner] < 1 - 1e-30L) continue;  // a near tie
      one_hot++;
      CHECK_EQ(out.at("p")[row * K + winner], real(1));
      CHECK(memcmp(&out.at("h")[row * C], &in[layer.source(winner)][bt * C], C * sizeof(real)) == 0);
    }
  printf("  %-38s  largest logit %.0f, %zu of %zu reads are one-hot\n", "extreme queries", largest, one_hot,
         2 * BT);
  CHECK(largest > 1e4 && one_hot > BT);
  Named<real> d = fresh_gradients<real>(layer, convert<double>(in));
  layer.backward<Build>(in, cot, d);
  for (const auto& item : d)
    for (real g : item.second) CHECK(std::isfinite(g));
}

template <class Build>
void check_extreme_attention() {
  using real = typename Build::real;
  const AttentionLayer layer{2, 37, 48, 3};
  Random random(24);
  Values wide = layer.inputs(random);
  for (size_t i = 0; i < wide["qkv"].size(); i++)
    if (i / layer.C % 3 < 2) wide["qkv"][i] *= 64;  // scores grow by 64 * 64 and reach 1e4
  const Named<real> in = convert<real>(wide), cot = convert<real>(layer.cotangents(random));
  const Named<real> out = layer.forward<Build>(in);
  const Named<long double> exact = layer.plain<long double>(convert<long double>(in));
  const Named<real> plain = layer.plain<real>(in);
  double largest = 0;
  for (long double lse : exact.at("lse")) largest = std::fmax(largest, double(lse));
  // A score of that size is known to its own rounding; where two nearly tie, so is the weight.
  const Error ours = error_of(out.at("att"), exact.at("att")), ref = error_of(plain.at("att"), exact.at("att"));
  printf("  %-38s  largest lse %.0f, largest error %.1e, plain loop %.1e, score's rounding %.1e\n",
         "extreme attention", largest, ours.largest, ref.largest, largest * epsilon<real>());
  CHECK(largest > 1e4);
  CHECK_CLOSE(ours.largest, 0, ROUNDINGS * largest * epsilon<real>());
  Named<real> d{{"qkv", filled<real>(in.at("qkv").size(), NAN)}};
  layer.backward<Build>(in, cot, d);
  for (real g : d["qkv"]) CHECK(std::isfinite(g));
}

template <class Build>
void check_extreme_swiglu() {
  using real = typename Build::real;
  const std::vector<real> gate = {-10000, -200, -90, 0, 90, 200, 10000}, up(7, 2), dact(7, 1);
  std::vector<real> act(7), again(7), dgate(7), dup(7);
  Build::swiglu_forward(act.data(), gate.data(), up.data(), 7);
  Build::swiglu_backward(dgate.data(), dup.data(), again.data(), dact.data(), gate.data(), up.data(), 7);
  for (size_t i = 0; i < 7; i++) {
    const double silu = i < 3 ? 0 : double(gate[i]), slope = i < 3 ? 0 : i == 3 ? 0.5 : 1;
    CHECK_CLOSE(act[i], 2 * silu, 1e-30);
    CHECK_CLOSE(again[i], 2 * silu, 1e-30);
    CHECK_CLOSE(dup[i], silu, 1e-30);
    CHECK_CLOSE(dgate[i], 2 * slope, 1e-30);
  }
}

// One channel, so that logits are exactly x * wte: ties at 1e4, targets on either end.
template <class Build>
void check_extreme_classifier() {
  using real = typename Build::real;
  const std::vector<real> x = {100, -100, 100, 0}, table = {100, -100, 100, 0, 99};
  std::vector<real> wte = table, losses(4), dx(4), dwte(128, 0), logits(cpu_float::CLASSIFIER_ROWS * 128);
  wte.resize(128, real(NAN));
  std::vector<int> guesses(4);
  const std::vector<int> targets = {0, 0, 1, 3};
  Build::classifier(losses.data(), guesses.data(), dx.data(), dwte.data(), x.data(), wte.data(), targets.data(),
                    real(1), logits.data(), 4, 1, 5, 128);
  const double want[4] = {std::log(2.0), 20000, 20000 + std::log(2.0), std::log(5.0)};
  for (size_t i = 0; i < 4; i++)  // the loss is known to one rounding of itself, not of the logits
    CHECK_CLOSE(losses[i], want[i], ROUNDINGS * epsilon<real>() * std::fmax(1, want[i]));
  CHECK_EQ(guesses[0], 0);
  CHECK_EQ(guesses[1], 1);
  CHECK_EQ(guesses[3], 0);
  for (real g : dx) CHECK(std::isfinite(g));
  for (real g : dwte) CHECK(std::isfinite(g));
  CHECK_CLOSE(dx[0], 0, 1e-30);  // half of token 0, half of token 2, minus token 0: all 100; token 4 is e^-100
  CHECK_CLOSE(dx[1], -200, 1e-30);  // softmax on token 1 (-100), target token 0 (100)
}

void test_extremes() {
  TEST("queries held at zero: every weight is exactly 1/K");
  check_uniform<Float>();
  check_uniform<Double>();
  TEST("extreme queries: one-hot routes, no NaN");
  check_extreme_routes<Float>();
  check_extreme_routes<Double>();
  TEST("extreme attention scores: no NaN, no loss of accuracy beyond the scores' own rounding");
  check_extreme_attention<Float>();
  check_extreme_attention<Double>();
  TEST("swiglu at gates of +-1e4");
  check_extreme_swiglu<Float>();
  check_extreme_swiglu<Double>();
  TEST("classifier with logits of +-1e4: losses, guesses, gradients");
  check_extreme_classifier<Float>();
  check_extreme_classifier<Double>();
}

// The float build has an exponential of its own: every exponent of two and what lies between, and the
// ends of the range.
void test_exponential() {
  TEST("exponential: within 1.2 units in the last place, from zero to infinity");
  double worst = 0, at = 0;
  size_t count = 0;
  Random random(51);
  auto check_at = [&](float x) {
    const double want = std::exp(double(x));
    // The distance from want's float to the next: below the smallest normal number it stays the same.
    const double unit = std::ldexp(1.0, std::max(std::ilogb(want), -126) - 23);
    const double error = std::fabs(double(cpu_float::exponential(x)) - want) / unit;
    if (!(error <= worst)) worst = std::isfinite(error) ? error : INFINITY, at = double(x);
    count++;
  };
  for (float x = -104; x < 88.7f; x += 0.00113f) check_at(x);
  for (int e = -149; e < 7; e++)
    for (float sign : {-1.0f, 1.0f}) {
      check_at(sign * std::ldexp(1.0f, e) * float(1 + random.uniform() / 4));
      check_at(sign * std::ldexp(1.0f, e));
    }
  printf("  %zu numbers: at most %.3f units in the last place, at %.9g\n", count, worst, at);
  CHECK_CLOSE(worst, 0, 1.2);
  CHECK_EQ(cpu_float::exponential(0.0f), 1.0f);
  for (float x : {-104.5f, -1e4f, -3e38f, -float(INFINITY)}) CHECK_EQ(cpu_float::exponential(x), 0.0f);
  for (float x : {89.0f, 1e4f, 3e38f, float(INFINITY)}) CHECK_EQ(cpu_float::exponential(x), float(INFINITY));
  CHECK(std::isnan(cpu_float::exponential(NAN)) && std::isnan(cpu_float::exponential(-float(NAN))));
  for (double x : {-800.0, -1.5, 0.0, 3.25, 700.0, 800.0}) CHECK_EQ(cpu_double::exponential(x), std::exp(x));
}

// Scores after rope depend on the distance of two tokens only, and the length of a vector does not change.
void test_rope_is_relative() {
  TEST("rope: scores depend on the distance alone; backward undoes forward");
  const size_t T = 37, C = 16, NH = 1;
  Random random(31);
  const std::vector<double> q = random.normals(C), k = random.normals(C);
  std::vector<double> qkv(T * 3 * C);
  for (size_t t = 0; t < T; t++)
    for (size_t c = 0; c < C; c++) qkv[t * 3 * C + c] = q[c], qkv[t * 3 * C + C + c] = k[c];
  const std::vector<double> before = qkv;
  cpu_double::rope_forward(qkv.data(), 1, T, C, NH);
  auto score = [&](size_t t, size_t u) { return cpu_double::dot(&qkv[t * 3 * C], &qkv[u * 3 * C + C], C); };
  double worst = 0, spread = 0;
  for (size_t distance = 0; distance < T; distance++)
    for (size_t u = 0; u + distance < T; u++) {
      worst = std::fmax(worst, std::fabs(score(u + distance, u) - score(distance, 0)));
      spread = std::fmax(spread, std::fabs(score(distance, 0) - score(0, 0)));
    }
  printf("  equal distances differ by at most %.1e, different distances by up to %.1f\n", worst, spread);
  CHECK_CLOSE(worst, 0, 1e-13);
  CHECK(spread > 1);
  cpu_double::rope_backward(qkv.data(), 1, T, C, NH);
  double back = 0;
  for (size_t i = 0; i < qkv.size(); i++) back = std::fmax(back, std::fabs(qkv[i] - before[i]));
  CHECK_CLOSE(back, 0, 1e-14);
}

// Equal logits: the guess is the first of them. Guesses and losses need no gradients.
void test_guesses() {
  TEST("guesses: the most likely token of every row, the first of equals");
  const size_t BT = 150, C = 7, V = 131, Vp = 256;
  Random random(41);
  std::vector<double> x = random.normals(BT * C), wte = random.normals(Vp * C);
  for (size_t c = 0; c < C; c++) wte[100 * C + c] = wte[50 * C + c] *= 3;
  std::vector<double> losses(BT), logits(cpu_double::CLASSIFIER_ROWS * Vp);
  std::vector<int> guesses(BT);
  const std::vector<int> targets(BT, 0);
  cpu_double::classifier(losses.data(), guesses.data(), nullptr, nullptr, x.data(), wte.data(), targets.data(),
                         0, logits.data(), BT, C, V, Vp);
  const std::vector<double> z = reference::linear(x, wte.data(), BT, C, V);
  size_t fifty = 0;
  for (size_t bt = 0; bt < BT; bt++) {
    size_t best = 0;
    for (size_t v = 1; v < V; v++)
      if (v != 100 && z[bt * V + v] > z[bt * V + best]) best = v;
    CHECK_EQ(size_t(guesses[bt]), best);
    fifty += best == 50;
  }
  CHECK(fifty > 0);
}

int main() {
  set_threads(1);  // cases that compare thread counts set their own
  printf(
      "  rms of errors, relative: ours, plain       float outputs    float gradients   double outputs   double "
      "gradients"
      "  differences\n");
  check_layer(EmbeddingLayer{74, 48, 31}, 1);
  check_layer(EmbeddingLayer{37, 42, 131}, 2);
  for (size_t K = 1; K <= 5; K++)
    for (size_t R = 1; R <= 2; R++) check_layer(RouteLayer{2 * 37, 48, K, R, false}, 100 + 10 * K + R);
  check_layer(RouteLayer{37, 48, 3, 2, true}, 3);
  check_layer(RouteLayer{130, 42, 3, 2, false}, 4);
  check_layer(NormLayer{2 * 37, 48}, 5);
  check_layer(NormLayer{130, 42}, 6);
  check_layer(LinearLayer{2 * 37, 48, 131, 131, false}, 7);
  check_layer(LinearLayer{37, 42, 96, 144, true}, 8);
  check_layer(RopeLayer{2, 37, 48, 3}, 9);
  check_layer(RopeLayer{1, 70, 42, 3}, 10);
  check_layer(AttentionLayer{2, 37, 48, 3}, 11);
  check_layer(AttentionLayer{1, 1, 48, 3}, 12);
  check_layer(AttentionLayer{2, 64, 42, 3}, 13);
  check_layer(AttentionLayer{1, 130, 6, 1}, 14);
  check_layer(AttentionLayer{1, 45, 128, 2}, 19);  // heads of 64, as at the paper's sizes
  check_layer(AttentionLayer{2, 33, 80, 2}, 20);   // and of 40
  check_layer(SwigluLayer{37 * 131}, 15);
  const size_t rows = cpu_float::CLASSIFIER_ROWS;
  for (size_t BT : {size_t(1), size_t(37), rows, rows + 1, 2 * rows + 44})
    check_layer(ClassifierLayer{BT, 10, 131}, 16 + BT);
  check_layer(ClassifierLayer{37, 48, 257}, 17);
  check_layer(ClassifierLayer{37, 48, 1}, 18);
  test_matmul();
  test_lone_source();
  test_extremes();
  test_exponential();
  test_rope_is_relative();
  test_guesses();
  return finish();
}
