// test_layers.cpp - every layer of the CPU trainer, alone, as float and as double.
//
// Each layer runs on odd sizes, in memory that holds NaN, and is compared with plain loops (tests/reference.h)
// in long double; the same loops in the layer's own precision are the yardstick for its error
// (tests/compare.h). Gradients are held against the chain rule, recorded operation by operation, and against
// differences of the layer's own forward. They must add where the layer says so, and any number of threads must
// give the same bits.
#include <set>

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
using reference::convert;
using reference::Named;
using Numbers = std::vector<double>;

constexpr double SLOPE_TOLERANCE = 1e-9;  // of differences, relative

reference::Random numbers(1);  // one stream for all cases
Numbers normals(size_t n, double mean = 0, double deviation = 1) { return numbers.normals(n, mean, deviation); }

// Rows of very different size, one so small that eps matters inside a norm.
Numbers uneven_rows(size_t rows, size_t C) {
  Numbers values = normals(rows * C);
  for (size_t row = 0; row < rows; row++)
    for (size_t c = 0; c < C; c++)
      values[row * C + c] *= row % 7 == 3 ? 0x1p-10 : std::ldexp(1.0, int(row % 5) - 2);
  return values;
}

// The Write of the build whose scalar is `real`.
template <class real>
constexpr auto write_of(bool accumulate) {
  if constexpr (std::is_same<real, float>::value)
    return accumulate ? cpu_float::accumulate : cpu_float::overwrite;
  else
    return accumulate ? cpu_double::accumulate : cpu_double::overwrite;
}

template <class X>
bool same_bits(const Named<X>& a, const Named<X>& b) {
  for (const auto& item : a)
    if (!same_bits(item.second, b.at(item.first))) return false;
  return a.size() == b.size();
}

// ---- what is checked of every layer ------------------------------------------------------------------

// The three functions take arrays by name, of any scalar; outputs and gradients come first.
template <class Plain, class Forward, class Backward>
struct Layer {
  std::string name;
  Named<double> inputs;
  Named<double> cotangents;    // the gradient of some of the outputs
  std::set<std::string> adds;  // the inputs whose gradient adds to what is there
  Plain plain;                 // (outputs, inputs), from reference.h
  Forward forward;             // (outputs, inputs), the trainer's, as is
  Backward backward;           // (gradients, cotangents, inputs, outputs)
  bool extreme = false;        // inputs so large that rounding decides gradients: they need only be finite
};
// The trainer's outputs, in memory of the shape of `like` that holds NaN.
template <class real, class AnyLayer, class X>
Named<real> forward(const AnyLayer& layer, const Named<real>& in, const Named<X>& like) {
  Named<real> out;
  for (const auto& item : like) out[item.first].assign(item.second.size(), real(NAN));
  layer.forward(out, in);
  return out;
}

// The trainer's gradients, on top of `start` where they add.
template <class real, class AnyLayer>
Named<real> backward(const AnyLayer& layer, const Named<real>& in, const Named<real>& out, real start = 0) {
  Named<real> d;
  for (const auto& item : in)
    d[item.first].assign(item.second.size(), layer.adds.count(item.first) ? start : NAN);
  layer.backward(d, convert<real>(layer.cotangents), in, out);
  return d;
}

// Gradients of sum(cotangents * outputs) by the chain rule, in X.
template <class X, class AnyLayer>
Named<X> plain_gradients(const AnyLayer& layer) {
  return reference::gradients<X>(layer.inputs, [&](const auto& in) {
    std::decay_t<decltype(in)> out;
    layer.plain(out, in);
    reference::Var<X> sum = 0;
    for (const auto& item : layer.cotangents)
      for (size_t i = 0; i < item.second.size(); i++) sum += item.second[i] * out.at(item.first)[i];
    return sum;
  });
}

// Every array against the exact one. Prints the largest errors: ours, plain loops'.
template <class real>
void compare(const std::string& name, const Named<real>& ours, const Named<real>& plain,
             const Named<long double>& exact) {
  Error worst, yardstick;
  for (const auto& item : exact) {
    const Error error = error_of(ours.at(item.first), item.second);
    const Error of_plain = error_of(plain.at(item.first), item.second);
    check_error<real>(name + item.first, error, of_plain);
    if (rms(item.second) == 0) CHECK_EQ(rms(ours.at(item.first)), 0.0);  // no rounding error near it
    worst = larger(worst, error);
    yardstick = larger(yardstick, of_plain);
  }
  printf("  %7.1e %7.1e", worst.rms, yardstick.rms);
}

template <class real, class AnyLayer>
void check_build(const AnyLayer& layer) {
  const Named<real> in = convert<real>(layer.inputs);
  Named<real> plain;
  Named<long double> exact;
  layer.plain(plain, in);
  layer.plain(exact, convert<long double>(layer.inputs));
  const Named<real> out = forward(layer, in, exact);
  const Named<real> d = backward(layer, in, out);
  compare(layer.name + ": ", out, plain, exact);
  for (const auto& item : d)
    for (real g : item.second) CHECK(std::isfinite(g));
  if (!layer.extreme)
    compare(layer.name + ": gradient of ", d, plain_gradients<real>(layer),
            plain_gradients<long double>(layer));

  const Named<real> added = backward<real>(layer, in, out, 3);
  for (const auto& item : d) {
    const bool adds = layer.adds.count(item.first);
    Numbers want(item.second.begin(), item.second.end());
    for (double& w : want) w += adds ? 3 : 0;
    CHECK_CLOSE(error_of(added.at(item.first), want).largest, 0, adds ? 64 * epsilon<real>() : 0);
  }

  for (int threads : {2, 3, 8}) {
    set_threads(threads);
    CHECK(same_bits(forward(layer, in, exact), out));
    CHECK(same_bits(backward(layer, in, out), d));
  }
  set_threads(1);
}

// Differences of the layer's own forward, along one random direction through each input.
template <class AnyLayer>
void check_slopes(const AnyLayer& layer) {
  Named<double> shape;
  layer.plain(shape, layer.inputs);
  const Named<double> d = backward(layer, layer.inputs, forward(layer, layer.inputs, shape));
  double worst = 0;
  for (const auto& item : layer.inputs) {
    Numbers direction = item.second;
    for (double& x : direction) x *= numbers.normal();
    const auto sum_at = [&](double step) {
      Named<double> moved = layer.inputs;
      for (size_t i = 0; i < direction.size(); i++) moved[item.first][i] += step * direction[i];
      const Named<double> out = forward(layer, moved, shape);
      double sum = 0;
      for (const auto& cotangent : layer.cotangents)
        sum += inner_product(cotangent.second, out.at(cotangent.first));
      return sum;
    };
    const Numbers& g = d.at(item.first);
    const double scale = rms(g) * rms(direction) * std::sqrt(double(g.size()));
    const double error = std::fabs(slope(sum_at, 1e-3) - inner_product(g, direction));
    worst = std::fmax(worst, error / (scale > 0 ? scale : 1));
  }
  printf("  %7.1e", worst);
  CHECK_CLOSE(worst, 0, SLOPE_TOLERANCE);
}

template <class Plain, class Forward, class Backward>
void check_layer(const std::string& name, const Named<double>& inputs, const Named<double>& cotangents,
                 const std::set<std::string>& adds, Plain plain, Forward forward, Backward backward,
                 bool extreme = false) {
  const Layer<Plain, Forward, Backward> layer = {name,  inputs,  cotangents, adds,
                                                 plain, forward, backward,   extreme};
  TEST(name);
  printf("  %-46s", name.c_str());
  check_build<float>(layer);
  check_build<double>(layer);
  if (!extreme) check_slopes(layer);
  printf("\n");
}

// ---- the layers --------------------------------------------------------------------------------------

void check_embedding(size_t BT, size_t C, size_t V) {
  const std::vector<int> tokens = numbers.integers(BT, V);  // V < BT: some occur several times
  const auto plain = [&](auto& out, const auto& in) {
    for (int token : tokens)
      for (size_t c = 0; c < C; c++) out["out"].push_back(in("wte")[size_t(token) * C + c]);
  };
  const auto forward = [&](auto& out, const auto& in) {
    embedding_forward(out("out"), tokens.data(), in("wte"), BT, C);
  };
  const auto backward = [&](auto& d, const auto& cot, const auto&, const auto&) {
    embedding_backward(d("wte"), cot("out"), tokens.data(), BT, C);
  };
  check_layer(format("embedding BT=%zu C=%zu V=%zu", BT, C, V), {{"wte", normals(V * C)}},
              {{"out", normals(BT * C)}}, {"wte"}, plain, forward, backward);
}

// Pointers to `parts` arrays that follow one another, n numbers each.
template <class real>
std::vector<real*> split(real* first, size_t parts, size_t n) {
  std::vector<real*> pointers;
  for (size_t i = 0; i < parts; i++) pointers.push_back(first + i * n);
  return pointers;
}

// R queries over K sources. null_query: the last query is held at zero. steepness: the size of the queries.
void check_route(size_t BT, size_t C, size_t K, size_t R, bool null_query = false, double steepness = 0.3) {
  const size_t trained = R - null_query, n = BT * C;
  const auto plain = [=](auto& out, const auto& in) {
    using Numbers = std::decay_t<decltype(in.at("gain"))>;
    std::vector<Numbers> sources;
    for (const auto* source : split(in("sources"), K, n)) {
      sources.push_back(Numbers(source, source + n));
      for (size_t bt = 0; bt < BT; bt++) out["rstd"].push_back(reference::inverse_rms(source + bt * C, C));
    }
    for (size_t r = 0; r < R; r++) {
      Numbers query(C, 0);
      if (r < trained) query.assign(in("queries") + r * C, in("queries") + (r + 1) * C);
      const auto read = reference::route(sources, query, in.at("gain"), BT, C);
      out["h"].insert(out["h"].end(), read.h.begin(), read.h.end());
      out["p"].insert(out["p"].end(), read.p.begin(), read.p.end());
    }
  };
  const auto queries = [=](auto* first) {
    auto pointers = split(first, trained, C);
    if (null_query) pointers.push_back(nullptr);
    return pointers;
  };
  const auto forward = [=](auto& out, const auto& in) {
    const auto sources = split(in("sources"), K, n);
    const auto rstd = split(out("rstd"), K, BT);
    const auto query = queries(in("queries"));
    for (size_t j = 0; j < K; j++) source_rstd(rstd[j], sources[j], BT, C);
    route_forward(out("h"), out("p"), sources.data(), rstd.data(), query.data(), in("gain"), BT, C, K, R);
    // The backward makes the mixes again from the saved weights: they must be the same bits.
    auto again = out.at("h");
    std::fill(again.begin(), again.end(), NAN);
    route_mix(again.data(), out("p"), sources.data(), BT, C, K, R);
    CHECK(same_bits(again, out.at("h")));
  };
  const auto backward = [=](auto& d, const auto& cot, const auto& in, const auto& out) {
    const auto sources = split(in("sources"), K, n);
    const auto dsources = split(d("sources"), K, n);
    const auto rstd = split(out("rstd"), K, BT);
    const auto query = queries(in("queries"));
    const auto dquery = queries(d("queries"));
    route_backward(dsources.data(), dquery.data(), d("gain"), cot("h"), out("h"), out("p"), sources.data(),
                   rstd.data(), query.data(), in("gain"), BT, C, K, R);
  };
  check_layer(format("route K=%zu R=%zu BT=%zu C=%zu%s%s", K, R, BT, C, null_query ? " null" : "",
                     steepness > 1 ? ", logits of +-1e4" : ""),
              {{"sources", uneven_rows(K * BT, C)},
               {"queries", normals(trained * C, 0, steepness)},
               {"gain", normals(C, 1, 0.4)}},
              {{"h", normals(R * n)}}, {"sources", "queries", "gain"}, plain, forward, backward, steepness > 1);
}

void check_rmsnorm(size_t BT, size_t C) {
  const auto plain = [=](auto& out, const auto& in) {
    out["x"] = reference::rmsnorm(in.at("h"), in.at("weight"), BT, C);
  };
  const auto forward = [=](auto& out, const auto& in) {
    rmsnorm_forward(out("x"), in("h"), in("weight"), BT, C);
  };
  const auto backward = [=](auto& d, const auto& cot, const auto& in, const auto&) {
    rmsnorm_backward(d("h"), d("weight"), cot("x"), in("h"), in("weight"), BT, C);
  };
  check_layer(format("rmsnorm BT=%zu C=%zu", BT, C),
              {{"h", uneven_rows(BT, C)}, {"weight", normals(C, 1, 0.4)}}, {{"x", normals(BT * C)}}, {"weight"},
              plain, forward, backward);
}

// out = x w^T into rows that stand `apart`; what lies between the rows is not touched.
void check_linear(size_t BT, size_t IC, size_t OC, size_t apart, bool add_dx) {
  const auto plain = [=](auto& out, const auto& in) {
    out["out"] = reference::linear(in.at("x"), in("w"), BT, IC, OC);
  };
  const auto forward = [=](auto& out, const auto& in) {
    auto rows = out.at("out");
    rows.assign(BT * apart, 99);
    matmul_forward({rows.data(), apart}, in("x"), in("w"), BT, IC, OC);
    for (size_t bt = 0; bt < BT; bt++) {
      std::copy_n(&rows[bt * apart], OC, out("out") + bt * OC);
      for (size_t o = OC; o < apart; o++) CHECK_EQ(rows[bt * apart + o], 99);
    }
  };
  const auto backward = [=](auto& d, const auto& cot, const auto& in, const auto& out) {
    using real = std::decay_t<decltype(*cot("out"))>;
    auto rows = out.at("out");
    rows.assign(BT * apart, NAN);
    for (size_t bt = 0; bt < BT; bt++) std::copy_n(cot("out") + bt * OC, OC, &rows[bt * apart]);
    matmul_backward_input(d("x"), {rows.data(), apart}, in("w"), BT, IC, OC, write_of<real>(add_dx));
    matmul_backward_weight(d("w"), {rows.data(), apart}, in("x"), BT, IC, OC);
  };
  check_layer(format("matmul BT=%zu IC=%zu OC=%zu%s", BT, IC, OC, add_dx ? " adding dx" : ""),
              {{"x", normals(BT * IC)}, {"w", normals(OC * IC)}}, {{"out", normals(BT * OC)}},
              add_dx ? std::set<std::string>{"w", "x"} : std::set<std::string>{"w"}, plain, forward, backward);
}

// Q (0), K (1) or V (2) out of the packed (B,T,3C).
template <class X>
Array<X> third(const Array<X>& qkv, size_t C, size_t which) {
  Array<X> part;
  for (size_t i = 0; i < qkv.size(); i++)
    if (i / C % 3 == which) part.push_back(qkv[i]);
  return part;
}

void check_rope(size_t B, size_t T, size_t C, size_t NH) {
  const auto plain = [=](auto& out, const auto& in) {
    const auto q = reference::rope(third(in.at("qkv"), C, 0), B, T, C, NH);
    const auto k = reference::rope(third(in.at("qkv"), C, 1), B, T, C, NH);
    out["turned"] = in.at("qkv");
    for (size_t i = 0; i < B * T * C; i++) {
      out["turned"][i / C * 3 * C + i % C] = q[i];
      out["turned"][i / C * 3 * C + C + i % C] = k[i];
    }
  };
  const auto forward = [=](auto& out, const auto& in) {
    out["turned"] = in.at("qkv");  // in place
    rope_forward(out("turned"), B, T, C, NH);
  };
  const auto backward = [=](auto& d, const auto& cot, const auto&, const auto&) {
    d["qkv"] = cot.at("turned");
    rope_backward(d("qkv"), B, T, C, NH);
  };
  check_layer(format("rope B=%zu T=%zu C=%zu NH=%zu", B, T, C, NH), {{"qkv", normals(B * T * 3 * C)}},
              {{"turned", normals(B * T * 3 * C)}}, {}, plain, forward, backward);
}

// `deviation` of Q, K and V: scores are its square.
void check_attention(size_t B, size_t T, size_t C, size_t NH, double deviation = 1) {
  const auto plain = [=](auto& out, const auto& in) {
    const auto& qkv = in.at("qkv");
    const auto want = reference::attention(third(qkv, C, 0), third(qkv, C, 1), third(qkv, C, 2), B, T, C, NH);
    out["att"] = want.att;
    out["lse"] = want.lse;
  };
  const auto forward = [=](auto& out, const auto& in) {
    attention_forward(out("att"), out("lse"), in("qkv"), B, T, C, NH);
  };
  const auto backward = [=](auto& d, const auto& cot, const auto& in, const auto& out) {
    attention_backward(d("qkv"), cot("att"), in("qkv"), out("att"), out("lse"), B, T, C, NH);
  };
  check_layer(
      format("attention B=%zu T=%zu C=%zu NH=%zu%s", B, T, C, NH, deviation > 1 ? ", scores of +-1e4" : ""),
      {{"qkv", normals(B * T * 3 * C, 0, deviation)}}, {{"att", normals(B * T * C)}}, {}, plain, forward,
      backward, deviation > 1);
}

void check_swiglu(const char* name, const Numbers& gate, bool extreme) {
  const size_t n = gate.size();
  const auto plain = [=](auto& out, const auto& in) {
    out["act"] = reference::swiglu(in.at("gate"), in.at("up"));
  };
  const auto forward = [=](auto& out, const auto& in) { swiglu_forward(out("act"), in("gate"), in("up"), n); };
  const auto backward = [=](auto& d, const auto& cot, const auto& in, const auto& out) {
    // In place, as the model does it; act comes along, the same bits as in the forward.
    d = in;
    auto act = cot.at("act");
    swiglu_backward(d("gate"), d("up"), act.data(), act.data(), d("gate"), d("up"), n);
    CHECK(same_bits(act, out.at("act")));
  };
  check_layer(name, {{"gate", gate}, {"up", normals(n)}}, {{"act", normals(n)}}, {}, plain, forward, backward,
              extreme);
}

// The padding rows of wte are NaN and those of its gradient a mark: neither is read or written.
void check_classifier(const char* name, const Numbers& x, const Numbers& wte, size_t C,
                      const std::vector<int>& targets, bool extreme = false) {
  const size_t BT = x.size() / C, V = wte.size() / C, Vp = (V + 127) / 128 * 128;
  const auto plain = [=](auto& out, const auto& in) {
    out["losses"] =
        reference::cross_entropy(reference::linear(in.at("x"), in("wte"), BT, C, V), targets, BT, V);
  };
  const auto run = [=](auto& losses, auto* dx, auto* dwte, auto dloss, const auto& in) {
    auto padded = in.at("wte");
    padded.resize(Vp * C, NAN);
    auto logits = in.at("wte");
    logits.assign(cpu_float::CLASSIFIER_ROWS * Vp, NAN);
    classifier(losses.data(), dx, dwte, in("x"), padded.data(), targets.data(), dloss, logits.data(), BT, C, V,
               Vp);
  };
  const auto forward = [=](auto& out, const auto& in) {
    using real = std::decay_t<decltype(*out("losses"))>;
    real* const none = nullptr;
    run(out["losses"], none, none, real(0), in);
  };
  const auto backward = [=](auto& d, const auto& cot, const auto& in, const auto& out) {
    auto losses = out.at("losses");
    std::fill(losses.begin(), losses.end(), NAN);
    d["wte"].resize(Vp * C, 99);
    run(losses, d("x"), d("wte"), cot("losses")[0], in);
    for (size_t i = V * C; i < Vp * C; i++) CHECK_EQ(d("wte")[i], 99);
    d["wte"].resize(V * C);
    CHECK(same_bits(losses, out.at("losses")));  // they do not depend on whether gradients are asked for
  };
  check_layer(format("classifier BT=%zu C=%zu V=%zu%s", BT, C, V, name), {{"x", x}, {"wte", wte}},
              {{"losses", Numbers(BT, 0.375)}}, {"wte"}, plain, forward, backward, extreme);
}

// ---- the matrix product itself -----------------------------------------------------------------------

// op(A) op(B) for every way of storing A and B, with gaps between rows that hold NaN.
template <class real>
void check_matmul(size_t M, size_t N, size_t K, bool transpose_a, bool transpose_b, bool accumulate) {
  const size_t a_row = transpose_a ? 1 : K + 3, a_column = transpose_a ? M + 3 : 1;
  const size_t b_row = transpose_b ? 1 : N + 5, b_column = transpose_b ? K + 5 : 1;
  const size_t out_row = N + 2;
  std::vector<real> a(transpose_a ? K * a_column : M * a_row, NAN);
  std::vector<real> b(transpose_b ? N * b_column : K * b_row, NAN);
  std::vector<real> before(M * out_row, accumulate ? 1 : NAN);
  for (size_t i = 0; i < M; i++)
    for (size_t k = 0; k < K; k++) a[i * a_row + k * a_column] = real(numbers.normal());
  for (size_t j = 0; j < N; j++)
    for (size_t k = 0; k < K; k++) b[k * b_row + j * b_column] = real(numbers.normal());
  const auto product = [&](size_t rows, bool on_this_thread = false) {
    std::vector<real> out = before;
    const auto write = write_of<real>(accumulate);
    if (on_this_thread)
      matmul_on_this_thread({out.data(), out_row}, {a.data(), a_row, a_column}, {b.data(), b_row, b_column},
                            rows, N, K, write);
    else
      matmul({out.data(), out_row}, {a.data(), a_row, a_column}, {b.data(), b_row, b_column}, rows, N, K,
             write);
    return out;
  };
  const std::vector<real> out = product(M);

  std::vector<real> ours, plain_sums;
  std::vector<long double> exact;
  for (size_t i = 0; i < M; i++) {
    for (size_t j = 0; j < N; j++) {
      real plain = 0;
      long double sum = 0;
      for (size_t k = 0; k < K; k++) {
        const real x = a[i * a_row + k * a_column], y = b[k * b_row + j * b_column];
        plain += x * y;
        sum += (long double)(x) * (long double)(y);
      }
      const real start = accumulate ? 1 : 0;
      ours.push_back(out[i * out_row + j]);
      plain_sums.push_back(start + plain);
      exact.push_back((long double)(start) + sum);
    }
    CHECK(same_bits(&out[i * out_row + N], &before[i * out_row + N], out_row - N));
  }
  check_error<real>(format("matmul %zu x %zu x %zu", M, N, K), error_of(ours, exact),
                    error_of(plain_sums, exact));

  for (int threads : {2, 3, 8}) {
    set_threads(threads);
    CHECK(same_bits(product(M), out));
  }
  set_threads(1);
  CHECK(same_bits(product(M, true), out));                               // the product inside a loop over heads
  CHECK(same_bits(product(M / 2).data(), out.data(), M / 2 * out_row));  // a row does not depend on its company
}

void test_matmul() {
  TEST("matmul: every transpose, odd sizes, gaps between rows, accumulation");
  // Also beyond the sizes at which the product is cut into pieces: 576 along K, 1536 along M and N.
  const size_t sizes[][3] = {{1, 1, 1},      {1, 131, 48},   {3, 5, 7},      {37, 131, 48},  {64, 64, 64},
                             {65, 63, 129},  {74, 144, 48},  {131, 48, 128}, {16, 17, 300},  {200, 9, 33},
                             {7, 1, 1000},   {33, 70, 577},  {9, 35, 1729},  {1540, 19, 10}, {5, 1550, 11},
                             {1600, 3, 600}, {100, 128, 576}};
  for (const auto& size : sizes)
    for (int variant = 0; variant < 8; variant++) {
      check_matmul<float>(size[0], size[1], size[2], variant & 1, variant & 2, variant & 4);
      check_matmul<double>(size[0], size[1], size[2], variant & 1, variant & 2, variant & 4);
    }
}

// ---- exponential, rope -------------------------------------------------------------------------------

// The float build has an exponential of its own: every exponent of two and what lies between, and the ends of
// the range.
void test_exponential() {
  TEST("exponential: within 1.2 units in the last place, from zero to infinity");
  double worst = 0, at = 0;
  const auto check_at = [&](float x) {
    const double want = std::exp(double(x));
    // The distance from want's float to the next: below the smallest normal number it stays the same.
    const double unit = std::ldexp(1.0, std::max(std::ilogb(want), -126) - 23);
    const double error = std::fabs(double(cpu_float::exponential(x)) - want) / unit;
    if (error <= worst) return;
    worst = std::isfinite(error) ? error : INFINITY;
    at = double(x);
  };
  for (float x = -104; x < 88.7f; x += 0.00113f) check_at(x);
  for (int e = -149; e < 7; e++)
    for (float x : {1.0f, -1.0f, 1.1f, -1.2f}) check_at(std::ldexp(x, e));
  printf("  at most %.3f units in the last place, at %.9g\n", worst, at);
  CHECK_CLOSE(worst, 0, 1.2);
  CHECK_EQ(cpu_float::exponential(0.0f), 1.0f);
  for (float x : {-104.5f, -1e4f, -3e38f, -float(INFINITY)}) CHECK_EQ(cpu_float::exponential(x), 0.0f);
  for (float x : {89.0f, 1e4f, 3e38f, float(INFINITY)}) CHECK_EQ(cpu_float::exponential(x), float(INFINITY));
  CHECK(std::isnan(cpu_float::exponential(NAN)) && std::isnan(cpu_float::exponential(-float(NAN))));
  for (double x : {-800.0, -1.5, 0.0, 3.25, 700.0, 800.0}) CHECK_EQ(cpu_double::exponential(x), std::exp(x));
}

void test_rope_is_relative() {
  TEST("rope: scores depend on how far apart two tokens are, not on where they stand");
  const size_t T = 37, C = 16;
  const Numbers token = normals(3 * C);
  Numbers qkv;
  for (size_t t = 0; t < T; t++) qkv.insert(qkv.end(), token.begin(), token.end());
  cpu_double::rope_forward(qkv.data(), 1, T, C, 1);
  const auto score = [&](size_t t, size_t u) {
    return cpu_double::dot(&qkv[t * 3 * C], &qkv[u * 3 * C + C], C);
  };
  double spread = 0;
  for (size_t distance = 0; distance < T; distance++) {
    for (size_t u = 0; u + distance < T; u++) CHECK_CLOSE(score(u + distance, u), score(distance, 0), 1e-13);
    spread = std::fmax(spread, std::fabs(score(distance, 0) - score(0, 0)));
  }
  CHECK(spread > 1);
}

int main() {
  set_threads(1);  // checks that compare thread counts set their own
  printf("  rms of errors: ours, plain loop; of outputs, gradients; float, double; then slopes\n");
  check_embedding(74, 48, 31);
  check_embedding(37, 42, 131);
  for (size_t K = 1; K <= 5; K++)
    for (size_t R = 1; R <= 2; R++) check_route(2 * 37, 48, K, R);
  check_route(37, 48, 3, 2, true);
  check_route(130, 42, 3, 2);
  check_route(74, 48, 4, 2, false, 1500);
  check_rmsnorm(2 * 37, 48);
  check_rmsnorm(130, 42);
  check_linear(2 * 37, 48, 131, 131, false);
  check_linear(37, 42, 96, 144, true);
  check_rope(2, 37, 48, 3);
  check_rope(1, 70, 42, 3);
  check_attention(2, 37, 48, 3);
  check_attention(1, 1, 6, 1);
  check_attention(2, 64, 42, 3);
  check_attention(1, 130, 6, 1);
  check_attention(1, 45, 128, 2);  // heads of 64, as at the paper's sizes
  check_attention(2, 33, 80, 2);   // and of 40
  check_attention(2, 37, 48, 3, 64);
  check_swiglu("swiglu", normals(37 * 131, 0, 2), false);
  check_swiglu("swiglu at gates of +-1e4", {-10000, -200, -90, 0, 90, 200, 10000}, true);
  const size_t rows = cpu_float::CLASSIFIER_ROWS;
  for (size_t BT : {size_t(1), size_t(37), rows, rows + 1, 2 * rows + 44})
    check_classifier("", normals(BT * 10), normals(131 * 10, 0, 0.5), 10, numbers.integers(BT, 131));
  check_classifier("", normals(37 * 48), normals(257 * 48, 0, 0.5), 48, numbers.integers(37, 257));
  check_classifier("", normals(37 * 48), normals(48), 48, std::vector<int>(37, 0));
  check_classifier(", logits of +-1e4", normals(37 * 48, 0, 100), normals(131 * 48, 0, 50), 48,
                   numbers.integers(37, 131), true);
  // One channel, so that logits are x * wte: losses of log 2 and log 5, where logits of 1e4 must cancel first.
  check_classifier(", ties at 1e4", {100, 100, 0}, {100, -100, 100, 0, 99}, 1, {0, 2, 3}, true);
  test_matmul();
  test_exponential();
  test_rope_is_relative();
  return finish();
}
