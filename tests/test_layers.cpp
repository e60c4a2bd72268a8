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

// Two builds of the trainer: a call goes to the one whose numbers it is given.
#define TESTING
#define CPU_NAMESPACE cpu_float
#define REAL float
#include "train_rdattnres_cpu.cpp"
#define CPU_NAMESPACE cpu_double
#define REAL double
#include "train_rdattnres_cpu.cpp"
using namespace cpu_float;
using namespace cpu_double;

using reference::Array;
using reference::Random;
using reference::Tape;
using reference::Var;

constexpr double DIFFERENCE_TOLERANCE = 1e-9;  // central differences, relative

// Runs a generic test for both.
template <class Test>
void in_both(Test test) {
  test(float());
  test(double());
}

template <class real>
constexpr auto write_of(bool accumulate) {
  if constexpr (std::is_same<real, float>::value)
    return accumulate ? cpu_float::accumulate : cpu_float::overwrite;
  else
    return accumulate ? cpu_double::accumulate : cpu_double::overwrite;
}

// ---- arrays by name ----------------------------------------------------------------------------------

using Sizes = std::vector<std::pair<std::string, size_t>>;

template <class X>
struct Named : std::map<std::string, std::vector<X>> {
  using std::map<std::string, std::vector<X>>::map;
  X* operator()(const std::string& name) { return this->at(name).data(); }
  const X* operator()(const std::string& name) const { return this->at(name).data(); }
};
using Values = Named<double>;

template <class X, class Y>
Named<X> convert(const Named<Y>& named) {
  Named<X> out;
  for (const auto& item : named) out[item.first].assign(item.second.begin(), item.second.end());
  return out;
}

template <class X>
bool same_bits(const Named<X>& a, const Named<X>& b) {
  for (const auto& item : a)
    if (!same_bits(item.second, b.at(item.first))) return false;
  return a.size() == b.size();
}

// ---- what is checked of every layer ------------------------------------------------------------------
//
// A layer is a struct with
//   name, C (length of a row)
//   inputs(random) -> Values                    cotangents(random) -> Values: gradient of some of the outputs
//   adds(input): does its gradient add?         plain<X>(inputs) -> outputs, from reference.h
//   sizes(): of the outputs                     forward(outputs, inputs), backward(gradients, cotangents,
//                                               inputs, outputs): the trainer's, in memory that is given

// Fresh memory is NaN.
template <class real, class Layer>
Named<real> forward(const Layer& layer, const Named<real>& in) {
  Named<real> out;
  for (const auto& output : layer.sizes()) out[output.first].assign(output.second, real(NAN));
  layer.forward(out, in);
  return out;
}

// Adds to zero where it adds.
template <class real, class Layer>
Named<real> backward(const Layer& layer, const Named<real>& cotangents, const Named<real>& in,
                     const Named<real>& out) {
  Named<real> d = in;
  for (auto& item : d)
    std::fill(item.second.begin(), item.second.end(), layer.adds(item.first) ? 0 : real(NAN));
  layer.backward(d, cotangents, in, out);
  return d;
}

// Gradient of sum(cotangent * output) by the chain rule, in X.
template <class X, class Layer>
Named<X> plain_gradients(const Layer& layer, const Values& cotangents, const Values& in) {
  Tape<X>::get().clear();
  Named<Var<X>> vars;
  for (const auto& item : in)
    for (double value : item.second) vars[item.first].push_back(Var<X>::input(X(value)));
  const Named<Var<X>> out = layer.plain(vars);
  Var<X> sum = 0;
  for (const auto& item : cotangents)
    for (size_t i = 0; i < item.second.size(); i++) sum += Var<X>(item.second[i]) * out.at(item.first)[i];

  const std::vector<X> d = reference::tape_gradients(sum);
  Named<X> gradients;
  for (const auto& item : vars)
    for (const Var<X>& var : item.second) gradients[item.first].push_back(d[var.node]);
  return gradients;
}

template <class real, class Layer>
void check_build(const Layer& layer, const Values& values, const Values& cotangents) {
  const Named<real> in = convert<real>(values), cot = convert<real>(cotangents);
  const Named<real> out = forward(layer, in), d = backward(layer, cot, in, out);
  double worst[4] = {};
  const auto compare = [&](bool gradient, const Named<real>& ours, const Named<real>& plain,
                           const Named<long double>& exact) {
    for (const auto& item : exact) {
      const Error got = error_of(ours.at(item.first), item.second);
      const Error yardstick = error_of(plain.at(item.first), item.second);
      check_error<real>(layer.name + (gradient ? ": gradient of " : ": ") + item.first, got, yardstick);
      worst[2 * gradient] = std::fmax(worst[2 * gradient], got.rms);
      worst[2 * gradient + 1] = std::fmax(worst[2 * gradient + 1], yardstick.rms);
    }
  };
  compare(false, out, layer.plain(in), layer.plain(convert<long double>(values)));
  compare(true, d, plain_gradients<real>(layer, cotangents, values),
          plain_gradients<long double>(layer, cotangents, values));
  for (double error : worst) printf("  %7.1e", error);

  // Accumulation: on top of something that is not zero.
  Random random(77);
  Named<real> added = d;
  for (auto& item : added) {
    const std::vector<double> base = random.normals(item.second.size());
    if (layer.adds(item.first)) item.second.assign(base.begin(), base.end());
  }
  const Named<real> base = added;
  layer.backward(added, cot, in, out);
  for (const auto& item : d) {
    const std::vector<real>& start = base.at(item.first);
    std::vector<double> want(item.second.begin(), item.second.end());
    for (size_t i = 0; layer.adds(item.first) && i < want.size(); i++) want[i] += double(start[i]);
    CHECK_CLOSE(error_of(added.at(item.first), want).largest, 0,
                layer.adds(item.first) ? 64 * epsilon<real>() : 0);
  }

  for (int threads : {1, 2, 3, 8}) {
    set_threads(threads);
    CHECK(same_bits(forward(layer, in), out));
    CHECK(same_bits(backward(layer, cot, in, out), d));
  }
  set_threads(1);
}

// Fourth-order central differences of the double build's own forward: (8 d(h) - d(2h)) / 12h with
// d(h) = f(x+h) - f(x-h). Returns the worst error, relative to the larger of the element and the array's rms.
template <class Layer>
double worst_difference(const Layer& layer, const Values& in, const Values& cotangents) {
  const Values gradients = backward(layer, cotangents, in, forward(layer, in));
  Random random(5);
  double worst = 0;
  for (const auto& item : in) {
    const double scale = rms(gradients.at(item.first));
    for (int sample = 0; sample < 6; sample++) {
      const size_t i = random.next() % item.second.size(), row = i / layer.C * layer.C;
      const double step = 2e-3 * rms(&item.second[row], std::min(layer.C, item.second.size() - row));
      Values at = in;
      double& x = at[item.first][i];
      const double x0 = x;
      auto difference = [&](double h) {  // output by output: most do not depend on x and cancel exactly
        x = x0 + h;
        const Values up = forward(layer, at);
        x = x0 - h;
        const Values down = forward(layer, at);
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
  printf("  %-38s", layer.name.c_str());
  check_build<float>(layer, in, cotangents);
  check_build<double>(layer, in, cotangents);
  const double difference = worst_difference(layer, in, cotangents);
  printf("  %7.1e\n", difference);
  CHECK_CLOSE(difference, 0, DIFFERENCE_TOLERANCE);
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
  std::vector<int> tokens = Random(3).integers(BT, V);  // V < BT: some occur several times
  Values inputs(Random& random) const { return {{"wte", random.normals(V * C)}}; }
  Values cotangents(Random& random) const { return {{"out", random.normals(BT * C)}}; }
  Sizes sizes() const { return {{"out", BT * C}}; }
  bool adds(const std::string&) const { return true; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    Named<X> out;
    for (int token : tokens)
      for (size_t c = 0; c < C; c++) out["out"].push_back(in("wte")[size_t(token) * C + c]);
    return out;
  }
  template <class real>
  void forward(Named<real>& out, const Named<real>& in) const {
    embedding_forward(out("out"), tokens.data(), in("wte"), BT, C);
  }
  template <class real>
  void backward(Named<real>& d, const Named<real>& cot, const Named<real>&, const Named<real>&) const {
    embedding_backward(d("wte"), cot("out"), tokens.data(), BT, C);
  }
};

// R queries over K sources; the last one of two may be null: held at zero.
struct RouteLayer {
  size_t BT, C, K, R;
  bool null_query;
  std::string name = format("route K=%zu R=%zu BT=%zu C=%zu%s", K, R, BT, C, null_query ? " null" : "");
  std::string source(size_t j) const { return format("source%zu", j); }
  std::string query(size_t r) const { return format("query%zu", r); }
  size_t trained() const { return R - null_query; }
  Values inputs(Random& random) const {
    Values in;
    for (size_t j = 0; j < K; j++) in[source(j)] = uneven_rows(random, BT, C);
    for (size_t r = 0; r < trained(); r++) in[query(r)] = random.normals(C, 0, 0.3);
    in["gain"] = random.normals(C, 1, 0.4);
    return in;
  }
  Values cotangents(Random& random) const { return {{"h", random.normals(R * BT * C)}}; }
  Sizes sizes() const { return {{"h", R * BT * C}, {"p", R * BT * K}, {"rstd", K * BT}}; }
  bool adds(const std::string&) const { return true; }

  template <class X>
  Named<X> plain(const Named<X>& in) const {
    std::vector<Array<X>> sources;
    for (size_t j = 0; j < K; j++) sources.push_back(in.at(source(j)));
    Named<X> out;
    for (size_t r = 0; r < R; r++) {
      const Array<X> query_r = r < trained() ? in.at(query(r)) : Array<X>(C, X(0));
      const reference::Read<X> read = reference::route(sources, query_r, in.at("gain"), BT, C);
      out["h"].insert(out["h"].end(), read.h.begin(), read.h.end());
      out["p"].insert(out["p"].end(), read.p.begin(), read.p.end());
    }
    for (size_t j = 0; j < K; j++)
      for (size_t bt = 0; bt < BT; bt++) out["rstd"].push_back(reference::inverse_rms(&sources[j][bt * C], C));
    return out;
  }

  template <class real>
  struct Pointers {
    std::vector<const real*> sources, rstd, query;
    Pointers(const RouteLayer& layer, const Named<real>& in, const Named<real>& out) {
      for (size_t j = 0; j < layer.K; j++) {
        sources.push_back(in(layer.source(j)));
        rstd.push_back(out("rstd") + j * layer.BT);
      }
      for (size_t r = 0; r < layer.R; r++) query.push_back(r < layer.trained() ? in(layer.query(r)) : nullptr);
    }
  };
  template <class real>
  void forward(Named<real>& out, const Named<real>& in) const {
    const Pointers<real> from(*this, in, out);
    for (size_t j = 0; j < K; j++) source_rstd(out("rstd") + j * BT, from.sources[j], BT, C);
    route_forward(out("h"), out("p"), from.sources.data(), from.rstd.data(), from.query.data(), in("gain"), BT,
                  C, K, R);
    // The backward makes the mixes again from the saved weights: they must be the same bits.
    std::vector<real> again(R * BT * C, real(NAN));
    route_mix(again.data(), out("p"), from.sources.data(), BT, C, K, R);
    CHECK(same_bits(again, out["h"]));
  }
  template <class real>
  void backward(Named<real>& d, const Named<real>& cot, const Named<real>& in, const Named<real>& out) const {
    const Pointers<real> from(*this, in, out);
    std::vector<real*> dsources, dquery;
    for (size_t j = 0; j < K; j++) dsources.push_back(d(source(j)));
    for (size_t r = 0; r < R; r++) dquery.push_back(r < trained() ? d(query(r)) : nullptr);
    route_backward(dsources.data(), dquery.data(), d("gain"), cot("h"), out("h"), out("p"), from.sources.data(),
                   from.rstd.data(), from.query.data(), in("gain"), BT, C, K, R);
  }
};

struct NormLayer {
  size_t BT, C;
  std::string name = format("rmsnorm BT=%zu C=%zu", BT, C);
  Values inputs(Random& random) const {
    return {{"h", uneven_rows(random, BT, C)}, {"weight", random.normals(C, 1, 0.4)}};
  }
  Values cotangents(Random& random) const { return {{"x", random.normals(BT * C)}}; }
  Sizes sizes() const { return {{"x", BT * C}}; }
  bool adds(const std::string& input) const { return input == "weight"; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    return {{"x", reference::rmsnorm(in.at("h"), in.at("weight"), BT, C)}};
  }
  template <class real>
  void forward(Named<real>& out, const Named<real>& in) const {
    rmsnorm_forward(out("x"), in("h"), in("weight"), BT, C);
  }
  template <class real>
  void backward(Named<real>& d, const Named<real>& cot, const Named<real>& in, const Named<real>&) const {
    rmsnorm_backward(d("h"), d("weight"), cot("x"), in("h"), in("weight"), BT, C);
  }
};

// out = x w^T into rows that stand ldo apart; what lies between the rows is not touched.
struct LinearLayer {
  size_t BT, C, OC, ldo;
  bool add_dx;
  std::string name = format("matmul BT=%zu IC=%zu OC=%zu%s", BT, C, OC, add_dx ? " adding dx" : "");
  Values inputs(Random& random) const { return {{"x", random.normals(BT * C)}, {"w", random.normals(OC * C)}}; }
  Values cotangents(Random& random) const { return {{"out", random.normals(BT * OC)}}; }
  Sizes sizes() const { return {{"out", BT * OC}}; }
  bool adds(const std::string& input) const { return input == "w" || add_dx; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    return {{"out", reference::linear(in.at("x"), in("w"), BT, C, OC)}};
  }
  template <class real>
  void forward(Named<real>& out, const Named<real>& in) const {
    std::vector<real> rows(BT * ldo, 99);
    matmul_forward({rows.data(), ldo}, in("x"), in("w"), BT, C, OC);
    for (size_t bt = 0; bt < BT; bt++) {
      std::copy_n(&rows[bt * ldo], OC, out("out") + bt * OC);
      for (size_t o = OC; o < ldo; o++) CHECK_EQ(rows[bt * ldo + o], real(99));
    }
  }
  template <class real>
  void backward(Named<real>& d, const Named<real>& cot, const Named<real>& in, const Named<real>&) const {
    std::vector<real> rows(BT * ldo, real(NAN));
    for (size_t bt = 0; bt < BT; bt++) std::copy_n(cot("out") + bt * OC, OC, &rows[bt * ldo]);
    matmul_backward_input(d("x"), {rows.data(), ldo}, in("w"), BT, C, OC, write_of<real>(add_dx));
    matmul_backward_weight(d("w"), {rows.data(), ldo}, in("x"), BT, C, OC);
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
  Sizes sizes() const { return {{"turned", 0}}; }
  bool adds(const std::string&) const { return false; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    const Array<X>& qkv = in.at("qkv");
    const Array<X> parts[3] = {reference::rope(third(qkv, C, 0), B, T, C, NH),
                               reference::rope(third(qkv, C, 1), B, T, C, NH), third(qkv, C, 2)};
    Named<X> out;
    for (size_t i = 0; i < 3 * B * T * C; i++) out["turned"].push_back(parts[i / C % 3][i / C / 3 * C + i % C]);
    return out;
  }
  template <class real>
  void forward(Named<real>& out, const Named<real>& in) const {
    out["turned"] = in.at("qkv");  // in place
    rope_forward(out("turned"), B, T, C, NH);
  }
  template <class real>
  void backward(Named<real>& d, const Named<real>& cot, const Named<real>&, const Named<real>&) const {
    d["qkv"] = cot.at("turned");
    rope_backward(d("qkv"), B, T, C, NH);
  }
};

struct AttentionLayer {
  size_t B, T, C, NH;
  std::string name = format("attention B=%zu T=%zu C=%zu NH=%zu", B, T, C, NH);
  Values inputs(Random& random) const { return {{"qkv", random.normals(B * T * 3 * C)}}; }
  Values cotangents(Random& random) const { return {{"att", random.normals(B * T * C)}}; }
  Sizes sizes() const { return {{"att", B * T * C}, {"lse", B * NH * T}}; }
  bool adds(const std::string&) const { return false; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    const Array<X>& qkv = in.at("qkv");
    const reference::Attention<X> out =
        reference::attention(third(qkv, C, 0), third(qkv, C, 1), third(qkv, C, 2), B, T, C, NH);
    return {{"att", out.att}, {"lse", out.lse}};
  }
  template <class real>
  void forward(Named<real>& out, const Named<real>& in) const {
    attention_forward(out("att"), out("lse"), in("qkv"), B, T, C, NH);
  }
  template <class real>
  void backward(Named<real>& d, const Named<real>& cot, const Named<real>& in, const Named<real>& out) const {
    attention_backward(d("qkv"), cot("att"), in("qkv"), out("att"), out("lse"), B, T, C, NH);
  }
};

struct SwigluLayer {
  size_t C;  // number of elements
  std::string name = format("swiglu n=%zu", C);
  Values inputs(Random& random) const { return {{"gate", random.normals(C, 0, 2)}, {"up", random.normals(C)}}; }
  Values cotangents(Random& random) const { return {{"act", random.normals(C)}}; }
  Sizes sizes() const { return {{"act", C}}; }
  bool adds(const std::string&) const { return false; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    return {{"act", reference::swiglu(in.at("gate"), in.at("up"))}};
  }
  template <class real>
  void forward(Named<real>& out, const Named<real>& in) const {
    swiglu_forward(out("act"), in("gate"), in("up"), C);
  }
  template <class real>
  void backward(Named<real>& d, const Named<real>& cot, const Named<real>& in, const Named<real>& out) const {
    // In place, as the model does it; act comes along, the same bits as in the forward.
    d = in;
    std::vector<real> act = cot.at("act");
    swiglu_backward(d("gate"), d("up"), act.data(), act.data(), d("gate"), d("up"), C);
    CHECK(same_bits(act, out.at("act")));
  }
};

// The padding rows of wte are NaN and those of its gradient a mark: neither is read or written.
struct ClassifierLayer {
  size_t BT, C, V;
  std::string name = format("classifier BT=%zu C=%zu V=%zu", BT, C, V);
  std::vector<int> targets = Random(9).integers(BT, V);
  size_t Vp() const { return (V + 127) / 128 * 128; }
  Values inputs(Random& random) const {
    return {{"x", random.normals(BT * C)}, {"wte", random.normals(V * C, 0, 0.5)}};
  }
  Values cotangents(Random&) const { return {{"losses", std::vector<double>(BT, 0.375)}}; }
  Sizes sizes() const { return {{"losses", BT}}; }
  bool adds(const std::string& input) const { return input == "wte"; }
  template <class X>
  Named<X> plain(const Named<X>& in) const {
    const Array<X> logits = reference::linear(in.at("x"), in("wte"), BT, C, V);
    return {{"losses", reference::cross_entropy(logits, targets, BT, V)}};
  }
  template <class real>
  void run(real* losses, real* dx, real* dwte, real dloss, const Named<real>& in) const {
    std::vector<real> wte = in.at("wte"), logits(cpu_float::CLASSIFIER_ROWS * Vp(), real(NAN));
    wte.resize(Vp() * C, real(NAN));
    classifier(losses, dx, dwte, in("x"), wte.data(), targets.data(), dloss, logits.data(), BT, C, V, Vp());
  }
  template <class real>
  void forward(Named<real>& out, const Named<real>& in) const {
    run<real>(out("losses"), nullptr, nullptr, 0, in);
  }
  template <class real>
  void backward(Named<real>& d, const Named<real>& cot, const Named<real>& in, const Named<real>& out) const {
    std::vector<real> losses(BT, real(NAN)), &dwte = d["wte"];
    dwte.resize(Vp() * C, real(99));
    run(losses.data(), d("x"), dwte.data(), cot("losses")[0], in);
    for (size_t i = V * C; i < Vp() * C; i++) CHECK_EQ(dwte[i], real(99));
    dwte.resize(V * C);
    CHECK(same_bits(losses, out.at("losses")));  // they do not depend on whether gradients are asked for
  }
};

// ---- the matrix product itself -----------------------------------------------------------------------

// op(A) op(B) for every way of storing A and B, with gaps between rows that hold NaN.
template <class real>
void check_matmul(size_t M, size_t N, size_t K, double worst[2]) {
  for (int variant = 0; variant < 8; variant++) {
    const bool trans_a = variant & 1, trans_b = variant & 2, accumulate = variant & 4;
    const size_t lda = (trans_a ? M : K) + 3, ldb = (trans_b ? K : N) + 5, ldo = N + 2;
    Random random(M * 1000 + N * 100 + K * 10 + size_t(variant));
    std::vector<real> a((trans_a ? K : M) * lda, real(NAN)), b((trans_b ? N : K) * ldb, real(NAN));
    std::vector<real> before(M * ldo, accumulate ? 99 : real(NAN));
    auto a_at = [&](size_t i, size_t k) -> real& { return trans_a ? a[k * lda + i] : a[i * lda + k]; };
    auto b_at = [&](size_t k, size_t j) -> real& { return trans_b ? b[j * ldb + k] : b[k * ldb + j]; };
    for (size_t i = 0; i < M; i++)
      for (size_t k = 0; k < K; k++) a_at(i, k) = real(random.normal());
    for (size_t k = 0; k < K; k++)
      for (size_t j = 0; j < N; j++) b_at(k, j) = real(random.normal());
    for (size_t i = 0; accumulate && i < M; i++)
      for (size_t j = 0; j < N; j++) before[i * ldo + j] = real(random.normal());
    auto product = [&](size_t rows, bool alone = false) {
      std::vector<real> out = before;
      const size_t a_row = trans_a ? 1 : lda, b_row = trans_b ? 1 : ldb;
      const size_t a_column = trans_a ? lda : 1, b_column = trans_b ? ldb : 1;
      const auto write = write_of<real>(accumulate);
      if (alone)
        matmul_on_this_thread({out.data(), ldo}, {a.data(), a_row, a_column}, {b.data(), b_row, b_column}, rows,
                              N, K, write);
      else
        matmul({out.data(), ldo}, {a.data(), a_row, a_column}, {b.data(), b_row, b_column}, rows, N, K, write);
      return out;
    };
    const std::vector<real> out = product(M);

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
        got.push_back(out[i * ldo + j]);
        plain.push_back(start + rounded);
        exact.push_back((long double)(start) + sum);
      }
      CHECK(same_bits(&out[i * ldo + N], &before[i * ldo + N], ldo - N));
    }
    const Error ours = error_of(got, exact), yardstick = error_of(plain, exact);
    check_error<real>(format("matmul %zu x %zu x %zu, variant %d", M, N, K, variant), ours, yardstick);
    worst[0] = std::fmax(worst[0], ours.rms);
    worst[1] = std::fmax(worst[1], yardstick.rms);

    for (int threads : {1, 3, 8}) {
      set_threads(threads);
      CHECK(same_bits(product(M), out));
    }
    set_threads(1);
    CHECK(same_bits(product(M, true), out));                           // the product inside a loop over heads
    CHECK(same_bits(product(M / 2).data(), out.data(), M / 2 * ldo));  // a row does not depend on its company
  }
}

void test_matmul() {
  TEST("matmul: every transpose, odd sizes, gaps between rows, accumulation");
  // Also beyond the sizes at which the product is cut into pieces: 576 along K, 1536 along M and N.
  const size_t sizes[][3] = {{1, 1, 1},      {1, 131, 48},   {3, 5, 7},      {37, 131, 48},  {64, 64, 64},
                             {65, 63, 129},  {74, 144, 48},  {131, 48, 128}, {16, 17, 300},  {200, 9, 33},
                             {7, 1, 1000},   {33, 70, 577},  {9, 35, 1729},  {1540, 19, 10}, {5, 1550, 11},
                             {1600, 3, 600}, {100, 128, 576}};
  double worst[2][2] = {};
  for (const size_t* s : sizes) {
    check_matmul<float>(s[0], s[1], s[2], worst[0]);
    check_matmul<double>(s[0], s[1], s[2], worst[1]);
  }
  printf("  matmul, worst of 136 products: float %.1e (plain loop %.1e), double %.1e (%.1e)\n", worst[0][0],
         worst[0][1], worst[1][0], worst[1][1]);
}

// ---- special cases -----------------------------------------------------------------------------------

template <class real>
void check_lone_source(real) {
  const RouteLayer layer{74, 48, 1, 2, false};
  Random random(21);
  Named<real> in = convert<real>(layer.inputs(random));
  for (real& q : in["query0"]) q *= 1000;
  const Named<real> cot = convert<real>(layer.cotangents(random)), out = forward(layer, in);
  for (real p : out.at("p")) CHECK_EQ(p, real(1));
  const size_t n = layer.BT * layer.C;
  CHECK(same_bits(out("h"), in("source0"), n));
  CHECK(same_bits(out("h") + n, in("source0"), n));

  Named<real> d = in;
  for (auto& item : d) std::fill(item.second.begin(), item.second.end(), real(0.25));
  layer.backward(d, cot, in, out);
  for (const char* name : {"query0", "query1", "gain"})
    for (real g : d[name]) CHECK_EQ(g, real(0.25));
  for (size_t i = 0; i < n; i++)  // both mixes are the source itself
    CHECK_CLOSE(d("source0")[i], real(0.25) + cot("h")[i] + cot("h")[n + i], 4 * epsilon<real>() * 8);
}

template <class real>
void check_uniform(real) {
  for (size_t K : {1, 2, 3, 5}) {
    const RouteLayer layer{37, 48, K, 1, true};
    Random random(22);
    const Named<real> out = forward(layer, convert<real>(layer.inputs(random)));
    for (real p : out.at("p")) CHECK_EQ(p, 1 / real(K));
  }
}

// Logits of about +-1e4: each read takes one source, bit for bit, and nothing turns into NaN.
template <class real>
void check_extreme_routes(real) {
  const RouteLayer layer{74, 48, 4, 2, false};
  const size_t BT = layer.BT, C = layer.C, K = layer.K;
  Random random(23);
  Named<real> in = convert<real>(layer.inputs(random));
  for (size_t r = 0; r < 2; r++)
    for (real& q : in[layer.query(r)]) q *= 5000;
  const Named<real> cot = convert<real>(layer.cotangents(random)), out = forward(layer, in);
  const Named<long double> exact = layer.plain(convert<long double>(in));
  size_t one_hot = 0;
  double largest = 0;
  for (size_t row = 0; row < 2 * BT; row++) {
    const size_t r = row / BT, bt = row % BT;
    const long double* p = exact("p") + row * K;
    const size_t winner = size_t(std::max_element(p, p + K) - p);
    for (size_t j = 0; j < K; j++) {
      CHECK(out("p")[row * K + j] >= 0 && out("p")[row * K + j] <= 1);
      long double z = 0;
      for (size_t c = 0; c < C; c++)
        z += (long double)(in(layer.query(r))[c] * in("gain")[c]) *
             (long double)(in(layer.source(j))[bt * C + c]);
      largest = std::fmax(largest, double(std::fabs(z * exact("rstd")[j * BT + bt])));
    }
    if (p[winner] < 1 - 1e-30L) continue;  // a near tie
    one_hot++;
    CHECK_EQ(out("p")[row * K + winner], real(1));
    CHECK(same_bits(out("h") + row * C, in(layer.source(winner)) + bt * C, C));
  }
  printf("  largest logit %.0f, %zu of %zu reads are one-hot\n", largest, one_hot, 2 * BT);
  CHECK(largest > 1e4 && one_hot > BT);
  for (const auto& item : backward(layer, cot, in, out))
    for (real g : item.second) CHECK(std::isfinite(g));
}

template <class real>
void check_extreme_attention(real) {
  const AttentionLayer layer{2, 37, 48, 3};
  Random random(24);
  Values wide = layer.inputs(random);
  for (size_t i = 0; i < wide["qkv"].size(); i++)
    if (i / layer.C % 3 < 2) wide["qkv"][i] *= 64;  // scores grow by 64 * 64 and reach 1e4
  const Named<real> in = convert<real>(wide), cot = convert<real>(layer.cotangents(random));
  const Named<real> out = forward(layer, in), plain = layer.plain(in);
  const Named<long double> exact = layer.plain(convert<long double>(wide));
  const double largest = double(*std::max_element(exact.at("lse").begin(), exact.at("lse").end()));
  // A score of that size is known to its own rounding; where two nearly tie, so is the weight.
  const Error ours = error_of(out.at("att"), exact.at("att")), ref = error_of(plain.at("att"), exact.at("att"));
  printf("  largest lse %.0f, largest error %.1e, plain loop %.1e, score's rounding %.1e\n", largest,
         ours.largest, ref.largest, largest * epsilon<real>());
  CHECK(largest > 1e4);
  CHECK_CLOSE(ours.largest, 0, ROUNDINGS * largest * epsilon<real>());
  const Named<real> d = backward(layer, cot, in, out);
  for (real g : d.at("qkv")) CHECK(std::isfinite(g));
}

template <class real>
void check_extreme_swiglu(real) {
  const std::vector<real> gate = {-10000, -200, -90, 0, 90, 200, 10000}, up(7, 2), dact(7, 1);
  std::vector<real> act(7), again(7), dgate(7), dup(7);
  swiglu_forward(act.data(), gate.data(), up.data(), 7);
  swiglu_backward(dgate.data(), dup.data(), again.data(), dact.data(), gate.data(), up.data(), 7);
  for (size_t i = 0; i < 7; i++) {
    const double silu = i < 3 ? 0 : double(gate[i]), slope = i < 3 ? 0 : i == 3 ? 0.5 : 1;
    CHECK_CLOSE(act[i], 2 * silu, 1e-30);
    CHECK_CLOSE(again[i], 2 * silu, 1e-30);
    CHECK_CLOSE(dup[i], silu, 1e-30);
    CHECK_CLOSE(dgate[i], 2 * slope, 1e-30);
  }
}

// One channel, so that logits are exactly x * wte: ties at 1e4, targets on either end.
template <class real>
void check_extreme_classifier(real) {
  const std::vector<real> x = {100, -100, 100, 0};
  std::vector<real> wte = {100, -100, 100, 0, 99}, losses(4), dx(4), dwte(128, 0);
  std::vector<real> logits(cpu_float::CLASSIFIER_ROWS * 128);
  wte.resize(128, real(NAN));
  const std::vector<int> targets = {0, 0, 1, 3};
  classifier(losses.data(), dx.data(), dwte.data(), x.data(), wte.data(), targets.data(), real(1),
             logits.data(), 4, 1, 5, 128);
  const double want[4] = {std::log(2.0), 20000, 20000 + std::log(2.0), std::log(5.0)};
  for (size_t i = 0; i < 4; i++)  // the loss is known to one rounding of itself, not of the logits
    CHECK_CLOSE(losses[i], want[i], ROUNDINGS * epsilon<real>() * std::fmax(1, want[i]));
  for (real g : dx) CHECK(std::isfinite(g));
  for (real g : dwte) CHECK(std::isfinite(g));
  CHECK_CLOSE(dx[0], 0, 1e-30);  // half of token 0, half of token 2, minus token 0: all 100; token 4 is e^-100
  CHECK_CLOSE(dx[1], -200, 1e-30);  // softmax on token 1 (-100), target token 0 (100)
}

void test_special_cases() {
  TEST("a lone source: weight exactly 1, mix its very bits, gradients of query and gain exactly zero");
  in_both([](auto x) { check_lone_source(x); });
  TEST("queries held at zero: every weight is exactly 1/K");
  in_both([](auto x) { check_uniform(x); });
  TEST("extreme queries: one-hot routes, no NaN");
  in_both([](auto x) { check_extreme_routes(x); });
  TEST("extreme attention scores: no NaN, no loss of accuracy beyond the scores' own rounding");
  in_both([](auto x) { check_extreme_attention(x); });
  TEST("swiglu at gates of +-1e4");
  in_both([](auto x) { check_extreme_swiglu(x); });
  TEST("classifier with logits of +-1e4: losses, gradients");
  in_both([](auto x) { check_extreme_classifier(x); });
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
    count++;
    if (error <= worst) return;
    worst = std::isfinite(error) ? error : INFINITY;
    at = double(x);
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
    for (size_t c = 0; c < C; c++) {
      qkv[t * 3 * C + c] = q[c];
      qkv[t * 3 * C + C + c] = k[c];
    }
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

int main() {
  set_threads(1);  // cases that compare thread counts set their own
  printf("  rms of errors: ours, plain loop; of outputs, gradients; float, double; then differences\n");
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
  test_special_cases();
  test_exponential();
  test_rope_is_relative();
  return finish();
}
