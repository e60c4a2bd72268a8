// events.h - what both trainers write into log.jsonl, where an event is more than a few numbers.
#pragma once
#include "../../data/stories.h"  // StoryMarks
#include "config.h"              // Config, count_params
#include "flags.h"               // saved_options
#include "log.h"                 // Event
#include "report.h"              // RouteStats, NATS_PER_BIT, StepReport
#include "run.h"                 // Progress

// The settings of the run and the number of parameters.
inline Event config_event(const Options& o, const Config& c) {
  const ParamCount n = count_params(c);
  Event event("config");
  return event.add("options", saved_options(o))
      .add("parameters", n.total)
      .add("embedding", n.embedding)
      .add("layers", n.layers)
      .add("routes", n.routes);
}

inline Event step_event(const Progress& at, const StepReport& r) {
  Event event("step");
  return event.add("step", r.step)
      .add("tokens", at.tokens)
      .add("loss", r.loss)
      .add("norm", r.norm)
      .add("lr", r.lr)
      .add("ms", r.seconds * 1000)
      .add("tok_s", double(r.tokens) / r.seconds);
}

inline Event validation_event(const Progress& at, const char* split, double loss, size_t count) {
  Event event("val");
  return event.add("step", at.step)
      .add("tokens", at.tokens)
      .add("split", split)
      .add("loss", loss)
      .add("count", count);
}

// Per attention layer the mean weight on each source, for QK and for V, and the divergence between the two.
inline Event routes_event(const Progress& at, const char* split, const RouteStats& routes) {
  std::vector<double> js_bits = routes.js_nats;
  for (double& js : js_bits) js /= NATS_PER_BIT;
  Event event("routes");
  return event.add("step", at.step)
      .add("tokens", at.tokens)
      .add("split", split)
      .add("qk", routes.qk)
      .add("v", routes.v)
      .add("js_nats", routes.js_nats)
      .add("js_bits", js_bits);
}

// Right answers, the model's and those of the two readers who do not look back (data/stories.h).
inline Event answers_event(const Progress& at, const char* which, const StoryMarks::Row& row) {
  Event event("val");
  return event.add("step", at.step)
      .add("tokens", at.tokens)
      .add("split", which)
      .add("count", row.asked)
      .add("right", row.right)
      .add("guessed", row.guessed)
      .add("latest", row.latest);
}
